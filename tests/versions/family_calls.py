"""What a client asks of a language model, as plain numbers: the same calls for all families.

The file imports nothing of hf_synlm: a process without it runs it as a script, on folders with their own code.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

GENERATE: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
}
WITHOUT_CACHE = {"greedy": {"use_cache": False}, "beams": {"num_beams": 3, "use_cache": False}}


def answers(model: Any, batch: dict[str, Tensor], labeled: dict[str, Tensor]) -> dict[str, list[float]]:
    """Numbers by name of the call; raises AssertionError where two calls must agree and do not."""
    ids = batch["input_ids"]
    searches = hasattr(model, "word_search")
    found = {"logits": model(**batch).logits[batch["attention_mask"].bool()], "marginal": model(ids).logits}
    found["cache"] = read_in_two_calls(model, ids, found["marginal"])
    modes = [("", GENERATE)] + [("marginal ", GENERATE | {f"{x} uncached": y for x, y in WITHOUT_CACHE.items()})]
    for prefix, calls in modes if searches else modes[1:]:
        options = {"structure_mode": "marginal"} if searches and prefix else {}
        for name, more in calls.items():
            found[prefix + name] = generate(model, ids[:, :3], **options, **more)
    if getattr(model.config, "gives_trees", False):
        parsed = model.parse(**batch)
        found["parse"] = torch.cat([parsed.log_probs[:, 0], torch.tensor(sum(flat(parsed.spans), ()))])
    found["labels"] = model(**labeled).loss
    found["saved"] = save_and_load(model, batch, found["logits"])
    found["trainer"] = train_one_step(model, labeled)
    return {name: summary(value) for name, value in found.items()}


def flat(spans: Any) -> list[tuple[int, int]]:
    """The spans of all first trees."""
    return [span for trees in spans for span in trees[0]]


def summary(values: Tensor) -> list[float]:
    """Size and sum of a tensor, and ten of its finite numbers."""
    values = values.detach().double().flatten()
    finite = values[values.isfinite()]
    return [len(values), finite.sum().item(), *finite[:: max(1, len(finite) // 10)][:10].tolist()]


def read_in_two_calls(model: Any, ids: Tensor, whole: Tensor) -> Tensor:
    """Logits from a cache, which has both of its names in every version; they are those of one call."""
    read = []
    for given, taken in (("past_key_values", "cache"), ("cache", "past_key_values")):
        first = model(ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], **{given: getattr(first, taken)})
        assert getattr(second, given) is getattr(second, taken) is second[2 - (second.loss is None)]
        read.append(torch.cat([first.logits, second.logits], 1))
    torch.testing.assert_close(read[0], whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(read[1], read[0])
    assert model(ids, use_cache=False, cache=None).get("logits") is not None
    return read[0]


def generate(model: Any, prompts: Tensor, **options: Any) -> Tensor:
    """Words, and their scores where there are some."""
    torch.manual_seed(0)
    common = {"max_new_tokens": 4, "pad_token_id": 0, "return_dict_in_generate": True}
    output = model.generate(prompts, **common, **options)
    scores = output.get("sequences_scores")
    return torch.cat([output.sequences.flatten(), *([] if scores is None else [scores])])


def save_and_load(model: Any, batch: dict[str, Tensor], expected: Tensor) -> Tensor:
    """Logits of the model when it is saved and loaded."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(loaded).__name__ == type(model).__name__
    logits = loaded(**batch).logits[batch["attention_mask"].bool()]
    torch.testing.assert_close(logits, expected, atol=1e-6, rtol=1e-6)  # not equal: other places in memory
    return logits


def train_one_step(model: Any, labeled: dict[str, Tensor]) -> Tensor:
    """Loss of a step of Trainer, and the sum of the squares of the weights after it; it changes the model."""
    rows = [{name: value[row] for name, value in labeled.items()} for row in range(len(labeled["input_ids"]))]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=len(rows), learning_rate=0.01, optim="sgd", report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False, seed=0,
        )  # fmt: skip
        loss = Trainer(model, arguments, train_dataset=rows).train().training_loss
    weights = sum(parameter.detach().double().square().sum().item() for parameter in model.parameters())
    return torch.tensor([loss, weights], dtype=torch.float64)


def main(folder: str) -> None:
    """Write the answers of all models in a folder, or what each fails with, as JSON."""
    sys.modules["hf_synlm"] = None  # type: ignore[assignment]  # from here on, `import hf_synlm` is an ImportError
    found = {}
    for place in sorted(Path(folder).iterdir()):
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True).eval()
        assert type(model).__module__.startswith("transformers_modules."), type(model)
        found[place.name] = answers(model, *torch.load(place / "batches.pt"))
    Path(folder, "answers.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
