# SPDX-License-Identifier: Apache-2.0
"""A plugin of Brain-Score (language): reading times, next words and neural recordings of syntactic language models.

Copy this file to `brainscore_language/models/syntactic/__init__.py` and name your models in MODELS. Reading times are
surprisals of `logits`. Recordings are the states of the bare model after the last token: the layer "states", which is
there for every architecture.
"""

from typing import Any

from brainscore_language import ArtificialSubject, model_registry
from brainscore_language.model_helpers.huggingface import HuggingfaceSubject
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

MODELS = {"rnng-mini": "model_cards/rnng-mini", "gpst-mini": "model_cards/gpst-mini"}  # folders, or names on the Hub


class WithStates(nn.Module):
    """A language model and its bare model, whose states are the output of the layer `states`."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.language_model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        self.bare_model = AutoModel.from_pretrained(source, trust_remote_code=True)
        self.states, self.config = nn.Identity(), self.language_model.config

    def forward(self, use_cache: bool = False, **inputs: Any) -> Any:
        """What the language model says of a text."""
        if not use_cache:  # with a cache, Brain-Score records nothing
            self.states(self.bare_model(**inputs).last_hidden_state)
        return self.language_model(**inputs, use_cache=use_cache)


def subject(name: str) -> HuggingfaceSubject:
    """The model of this name, as Brain-Score asks it."""
    tokenizer = AutoTokenizer.from_pretrained(MODELS[name], truncation_side="left")
    layers = {ArtificialSubject.RecordingTarget.language_system: "states"}
    return HuggingfaceSubject(name, layers, WithStates(MODELS[name]), tokenizer)


for model in MODELS:
    model_registry[model] = lambda name=model: subject(name)
