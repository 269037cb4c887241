"""The cache has two names, of which each version of transformers knows one; hooks of `generate` may change, too."""

import copy
import pickle
from typing import Any

import pytest
import torch
from transformers.generation import GenerationMixin

import hf_synlm
from hf_synlm.core.cache import CACHE, CACHE_NAMES, name_cache
from hf_synlm.core.configuration_base import NEWEST_TRANSFORMERS
from hf_synlm.core.outputs import SyntacticClassifierOutput, SyntacticLMOutput
from hf_synlm.generation import base
from hf_synlm.generation.base import HOOKS, check_hooks
from tests.helpers.architectures import ARCHITECTURES, build

LANGUAGE_MODELS = [getattr(hf_synlm, name) for name in hf_synlm.__all__ if name.endswith("ForCausalLM")]


def test_an_argument_has_one_of_the_names():
    given = {"cache": 1, "past_key_values": None, "x": 2}
    assert name_cache(given, "past_key_values") == {"x": 2, "past_key_values": 1}
    assert name_cache({"cache": None, "x": 2}, "cache") == {"x": 2}


def test_an_output_has_its_cache_under_both_names():
    output = SyntacticLMOutput(hidden_states=(torch.ones(1),))
    with pytest.raises(AttributeError, match="has no field 'memory'"):
        output.memory  # noqa: B018
    for name in CACHE_NAMES:
        setattr(output, name, name)
        assert output.cache == output.past_key_values == output[CACHE] == name
        for copied in (copy.copy(output), copy.deepcopy(output), pickle.loads(pickle.dumps(output))):
            assert copied.cache == name
    output.logits = torch.zeros(2)
    assert list(output) == ["logits", CACHE, "hidden_states"]
    assert not hasattr(SyntacticClassifierOutput(), "cache")


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("given", CACHE_NAMES)
def test_generate_continues_from_a_cache(name: str, given: str):
    model, ids = build(name), torch.tensor([[5, 6, 7, 8]])
    options: dict[str, Any] = {"max_new_tokens": 3, "pad_token_id": 0}
    options |= {"structure_mode": "marginal"} if hasattr(model, "word_search") else {}
    cache = model(ids[:, :3], use_cache=True).cache
    assert torch.equal(model.generate(ids, **options, **{given: cache}), model.generate(ids, **options))


def replaced(kind: type) -> set[str]:
    """Private methods of `generate` that a class of models replaces."""
    own = kind.__mro__[: kind.__mro__.index(GenerationMixin)]
    return {name for name in vars(GenerationMixin) if name[0] == "_" != name[1] and any(name in vars(x) for x in own)}


def test_every_replaced_hook_is_checked():
    assert set().union(*map(replaced, LANGUAGE_MODELS)) == set(HOOKS)


@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("removed", [True, False])
def test_a_changed_hook_is_told_in_one_line(name: str, removed: bool, monkeypatch: pytest.MonkeyPatch):
    kind = next(kind for kind in LANGUAGE_MODELS if name in replaced(kind))
    hooks = {hook: getattr(kind, hook) for hook in HOOKS if hook != name}
    hooks |= {} if removed else {name: lambda other: 0}
    monkeypatch.setattr(base, "GenerationMixin", type("Stock", (), hooks))
    said = f"tested up to transformers {NEWEST_TRANSFORMERS}. .* changed the method {name}, "
    with pytest.raises(ImportError, match=said):
        check_hooks(kind)
