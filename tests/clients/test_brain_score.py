"""The plugin of Brain-Score in `examples/`, with a stand-in for Brain-Score, which is not installed."""

import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM

ROOT = Path(__file__).parents[2]
WORDS = "the people of this country agree".split()


class Subject:
    """Calls a model as `HuggingfaceSubject` of brainscore_language 2.3.0 does."""

    def __init__(self, model_id: str, region_layer_mapping: dict[str, str], model: Any, tokenizer: Any) -> None:
        self.layer, self.model, self.tokenizer = region_layer_mapping["language_system"], model, tokenizer

    def logits(self, words: list[str]) -> Tensor:
        """Of the last token of each word, read word by word with a cache."""
        found, cache, seen = [], {}, 0
        for count in range(1, len(words) + 1):
            ids = self.tokenizer(" ".join(words[:count]), return_tensors="pt")["input_ids"]
            given = {"attention_mask": torch.ones_like(ids), "use_cache": True, **cache}
            output = self.model(input_ids=ids[:, seen:], **given)
            found.append(output.logits[:, -1])
            cache, seen = {"past_key_values": output.past_key_values}, ids.shape[1]
        assert self.model.config.vocab_size == output.logits.shape[2]
        return torch.stack(found, 1)

    def recording(self, text: str) -> Tensor:
        """The output of the layer at the last token."""
        found: list[Tensor] = []
        hook = self.model._modules[self.layer].register_forward_hook(lambda *call: found.append(call[2]))
        self.model(**self.tokenizer(text, return_tensors="pt"), use_cache=False)
        hook.remove()
        return found[-1][:, -1]


@pytest.mark.parametrize("name", ["gpst-tiny", "rnng-tiny", "urnng-tiny", "on-lstm-syd-tiny"])
@torch.no_grad()
def test_reading_times_and_recordings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one call over the whole text."""
    registry: dict[str, Any] = {}
    target = SimpleNamespace(RecordingTarget=SimpleNamespace(language_system="language_system"))
    for module, names in {
        "brainscore_language": {"ArtificialSubject": target, "model_registry": registry},
        "brainscore_language.model_helpers.huggingface": {"HuggingfaceSubject": Subject},
    }.items():
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
        vars(sys.modules[module]).update(names)
    monkeypatch.chdir(ROOT)
    models = runpy.run_path("examples/brainscore.py")["MODELS"]
    assert registry.keys() == models.keys() and all(Path(folder).is_dir() for folder in models.values())
    models["rnng-mini"] = f"model_cards/{name}"
    subject = registry["rnng-mini"]()
    inputs = subject.tokenizer(" ".join(WORDS), return_tensors="pt")
    assert inputs["input_ids"].shape[1] == len(WORDS)
    whole = AutoModelForCausalLM.from_pretrained(f"model_cards/{name}")(**inputs).logits
    torch.testing.assert_close(subject.logits(WORDS), whole, atol=1e-4, rtol=1e-4)
    states = AutoModel.from_pretrained(f"model_cards/{name}")(**inputs).last_hidden_state
    torch.testing.assert_close(subject.recording(" ".join(WORDS)), states[:, -1])
