"""Load a saved model through the Auto classes where `import hf_synlm` fails, parse sentences and generate one.

    python -I load_saved_model.py REQUEST.json ANSWER.json

Run by `final_report.py`. Everything here is what a user of a published model would write; it must not import
hf_synlm.
"""

import json
import sys
from pathlib import Path
from typing import Any

sys.modules["hf_synlm"] = None  # type: ignore[assignment]  # from here on, `import hf_synlm` is an ImportError

import torch  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

BATCH_SIZE = 32
NEW_TOKENS = 14


def parse_texts(
    model: Any, tokenizer: Any, texts: list[str], ends: list[list[bool]], **options: Any
) -> list[list[tuple[int, int]]]:
    """Spans over tokens of the best tree of each text; `ends` marks the last token of every word."""
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
    trees: list[list[tuple[int, int]]] = [[] for _ in ids]
    for start in range(0, len(order), BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        batch = tokenizer.pad({"input_ids": [ids[row] for row in rows]}, padding_side="right", return_tensors="pt")
        word_ends = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
        for line, row in enumerate(rows):
            if len(ids[row]) != len(ends[row]):
                raise ValueError(f"The saved tokenizer encodes {texts[row]!r} differently.")
            word_ends[line, : len(ids[row])] = torch.tensor(ends[row])
        output = model.parse(batch["input_ids"], attention_mask=batch["attention_mask"], word_ends=word_ends, **options)
        for row, hypotheses in zip(rows, output.spans, strict=True):
            trees[row] = hypotheses[0]
    return trees


def generate_sentence(model: Any, tokenizer: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Continue the prompt by sampling; the tree comes with it."""
    torch.manual_seed(request["seed"])
    prompt = tokenizer([request["prompt"]], add_special_tokens=False, return_tensors="pt")
    output = model.generate(
        prompt["input_ids"],
        attention_mask=prompt["attention_mask"],
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        top_k=20,
        return_dict_in_generate=True,
    )
    spans = output.spans[0]
    num_tokens = max((end for _, end in spans), default=1)
    tokens = output.sequences[0, :num_tokens].tolist()
    return {
        "text": tokenizer.decode(tokens),
        "tokens": [tokenizer.decode([token]).strip() or "_" for token in tokens],
        "spans": spans,
        "labels": output.labels[0] if getattr(output, "labels", None) else None,
    }


def main(request_file: str, answer_file: str) -> None:
    """Read the request, load the model, write the answer."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    tokenizer = AutoTokenizer.from_pretrained(request["folder"], trust_remote_code=True)
    model = AutoModelForCausalLM.from_pretrained(request["folder"], trust_remote_code=True).eval()
    trees: dict[str, dict[str, list]] = {}
    for name, texts in request["texts"].items():
        ends = request["word_ends"][name]
        trees[name] = {
            kind: parse_texts(model, tokenizer, texts, ends, **options) for kind, options in request["methods"].items()
        }
    answer = {
        "class": f"{type(model).__module__}.{type(model).__qualname__}",
        "trees": trees,
        "generated": generate_sentence(model, tokenizer, request),
    }
    Path(answer_file).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
