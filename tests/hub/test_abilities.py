"""What configurations declare is what models can do, no more and no less."""

import copy

import pytest
import torch

from hf_synlm.hub.abilities import declared, parse_options
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import MODELS, model_and_tokenizer

ABILITIES = "searches gives_trees gives_labels measures_attention reads_context sentence_end parse_method is_grammar"
ABILITIES = (*ABILITIES.split(), "closing", "loss_normalization", "penalizes_activations")
OURS = [name for name in MODELS if name != "gpt2"]


def declarations(model):
    return {ability: declared(model.config, ability) for ability in ABILITIES}


@pytest.mark.parametrize("name", OURS)
def test_a_model_can_do_what_it_declares_and_nothing_else(name):
    model, _ = model_and_tokenizer(name)
    says, ids = declarations(model), torch.tensor([[5, 6, 7, 8]])
    assert says["searches"] == hasattr(model, "word_search")
    assert says["measures_attention"] == hasattr(model, "attention_entropy")
    if not hasattr(model, "parse"):
        assert not says["gives_trees"] and not parse_options(model)
        return
    output = model.parse(ids)
    if "method" in parse_options(model):
        assert model.parse(ids, method=says["parse_method"]).spans == output.spans
    assert says["gives_trees"] == any(output.spans[0])
    assert says["gives_labels"] == (output.labels is not None)
    if "context_sentence_ids" in parse_options(model):
        context = {"context_sentence_ids": torch.tensor([[1, 1, 0, 0]])}
        if says["reads_context"]:
            assert model.parse(ids, **context).lengths == [2]
        else:
            refused("context_sentence_ids", model.parse, ids, **context)
    else:
        assert says["reads_context"] is None


@pytest.mark.parametrize("name", OURS)
def test_the_code_of_earlier_exports_declares_what_its_type_does(name):
    model, _ = model_and_tokenizer(name)
    old = copy.deepcopy(model)
    missing = property(lambda self: self.no_such_field)
    old.config.__class__ = type("Old", (type(model.config),), dict.fromkeys(ABILITIES, missing))
    assert not hasattr(old.config, "searches")
    try:
        assert declarations(old) == declarations(model)
    finally:
        old.config.__class__ = type(model.config)


def test_models_of_others_declare_nothing():
    model, _ = model_and_tokenizer("gpt2")
    assert declarations(model) == dict.fromkeys(ABILITIES) and not parse_options(model)
