"""Hidden states and attention weights on request, clear refusals where there are none, and outputs as tuples."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.architectures import batch, build
from tests.helpers.recurrent_models import ids_of
from tests.helpers.refusals import raised, refused

RECURRENT = ("on_lstm", "prpn", "prpn, syd", "palm", "awd_lstm", "lstm")
RNNGS = ("rnng", "rnng, attention")
EVERY = ("gpst", *RNNGS, *RECURRENT)
# Number of hidden states, and which have attention weights.
COUNTS = {"gpst": 4, "rnng": 4, "rnng, attention": 4, "on_lstm": 4, "prpn": 4, "prpn, syd": 4, "palm": 4, "awd_lstm": 4}
COUNTS["lstm"] = 3
WITH_ATTENTION = ("gpst", "prpn", "prpn, syd", "palm")

every_architecture = pytest.mark.parametrize("name", EVERY)
recurrent = pytest.mark.parametrize("name", RECURRENT)


def tokens_of(states: Tensor, mask: Tensor) -> Tensor:
    """States at the tokens of all rows, row by row."""
    return states[mask.bool()]


# ------------------------------------------------------------------------------------------------------ hidden states


@every_architecture
def test_embeddings_come_first_and_the_output_last(name):
    model, inputs = build(name, "Model"), batch(name)
    output = model(**inputs, output_hidden_states=True)
    states, mask = output.hidden_states, inputs["attention_mask"]
    assert isinstance(states, tuple) and len(states) == COUNTS[name]
    assert all(state.shape[:2] == mask.shape for state in states)
    assert torch.equal(states[-1], output.last_hidden_state)
    torch.testing.assert_close(output.last_hidden_state, model(**inputs).last_hidden_state)
    if name != "gpst":  # there a node may stand before the next token, and has a position
        embedded = model.get_input_embeddings()(inputs["input_ids"])
        torch.testing.assert_close(tokens_of(states[0], mask), tokens_of(embedded, mask))


@every_architecture
def test_some_places(name):
    model, inputs = build(name, "Model"), batch(name)
    every = model(**inputs, output_hidden_states=True).hidden_states
    some = model(**inputs, output_hidden_states=[0, -1]).hidden_states
    assert [state is None for state in some] == [False] + [True] * (len(every) - 2) + [False]
    torch.testing.assert_close((some[0], some[-1]), (every[0], every[-1]))
    assert torch.equal(model(**inputs, output_hidden_states=1).hidden_states[1], every[1])
    refused(f"names entry 9, but this model has {len(every)} entries", model, **inputs, output_hidden_states=[9])


@pytest.mark.parametrize("name", RNNGS)
@pytest.mark.parametrize("kind", ["ForCausalLM", "ForSequenceClassification"])
def test_heads_pass_them_on(name, kind):
    model, inputs = build(name, kind), batch(name)
    expected = model.model(**inputs, output_hidden_states=True).hidden_states
    torch.testing.assert_close(model(**inputs, output_hidden_states=True).hidden_states, expected)


def test_lstm_layer_by_layer_keeps_the_same_state():
    model = build("lstm", "Model", num_layers=3)
    ids, mask = ids_of(6, 2, 4)
    caches = [
        model(ids, attention_mask=mask, use_cache=True, output_hidden_states=asked).past_key_values
        for asked in (False, True)
    ]
    torch.testing.assert_close(caches[1].state, caches[0].state)


@pytest.mark.parametrize("name", RNNGS)
def test_gradients_of_the_lower_layers_of_a_stack(name):
    model, inputs = build(name, "Model").double(), batch(name)
    weight = model.stack_lstm.cells[0].weight_ih

    def total() -> Tensor:
        return model(**inputs, output_hidden_states=True).hidden_states[1].sin().sum()

    total().backward()
    for place in ((0, 0), (7, 3), (21, 5)):
        values = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                weight[place] += step
                values.append(total().item())
                weight[place] -= step
        assert weight.grad[place].item() == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-5, abs=1e-8)


def test_gpst_states_follow_each_other():
    model = build("gpst", "Model", num_type_layers=2)
    output = model(**batch("gpst"), output_hidden_states=True, output_structure=True)
    slots = output.structure.sequence.token_slots[:, 1:]
    torch.testing.assert_close(output.hidden_states[0], output.structure.sequence.inputs.flatten(0, 1)[slots])
    torch.testing.assert_close(output.hidden_states[2], output.type_hidden_state.flatten(0, 1)[slots])
    assert len(output.hidden_states) == 1 + 2 + model.config.num_token_layers


# --------------------------------------------------------------------------------------------------- attention weights
@pytest.mark.parametrize("name", WITH_ATTENTION)
@pytest.mark.parametrize("kind", ["Model", "ForCausalLM", "ForSequenceClassification"])
def test_attention_weights(name, kind):
    model, inputs = build(name, kind), batch(name)
    if kind == "ForCausalLM":
        inputs["labels"] = inputs["input_ids"]
    if name == "gpst":
        model.set_attn_implementation("eager")
    attentions = model(**inputs, output_attentions=True).attentions
    assert isinstance(attentions, tuple) and len(attentions) == {"gpst": 3, "palm": 1}.get(name, 3)
    mask = inputs["attention_mask"].bool()
    for weights in attentions:
        if name == "gpst":
            rows = weights.flatten(0, 2).sum(-1)
        else:
            assert weights.shape[:2] == mask.shape
            rows = weights[mask].sum(-1)
        # PRPN's gates may shut all slots of a token.
        assert bool((rows < 1 + 1e-5).all()) and (name.startswith("prpn") or bool((rows > 1 - 1e-5).all()))
    model.config.output_attentions = True
    torch.testing.assert_close(model(**inputs).attentions, attentions)


def test_palm_weights_are_those_of_its_scores():
    output = build("palm", "Model")(ids_of(6)[0], output_attentions=True)
    torch.testing.assert_close(output.attentions[0], output.span_scores.softmax(-1))


def test_gpst_needs_eager_attention_for_weights():
    model, inputs = build("gpst", "Model"), batch("gpst")
    refused("'sdpa' computes no weights.*eager", model, **inputs, output_attentions=True)
    model.set_attn_implementation("eager")
    types, tokens = (model(**inputs, output_attentions=True).attentions[place] for place in (0, -1))
    assert types.shape[2:] == (14, 14) and tokens.shape[2:] == (8, 8)
    assert not types.triu(1).any() and not tokens.triu(1).any()


def test_gpst_attention_implementations_agree_in_the_search():
    model, inputs = build("gpst"), batch("gpst")
    by_sdpa = model(**inputs).logits, model.parse(**inputs).log_probs
    model.set_attn_implementation("eager")
    torch.testing.assert_close((model(**inputs).logits, model.parse(**inputs).log_probs), by_sdpa)


# ----------------------------------------------------------------------------------------------------------- refusals
@every_architecture
def test_unknown_arguments_are_errors(name):
    raised(TypeError, "output_router_logits", build(name), **batch(name), output_router_logits=True)


@pytest.mark.parametrize("name", [name for name in EVERY if name != "gpst"])
def test_gradient_checkpointing_is_for_transformer_layers(name):
    refused("does not support (gradient|activation) checkpointing", build(name).gradient_checkpointing_enable)


# ---------------------------------------------------------------------------------------------------------- generation
@recurrent
@pytest.mark.parametrize("num_beams", [1, 3])
def test_generation_collects_hidden_states(name, num_beams):
    model = build(name)
    options = {"max_new_tokens": 3, "eos_token_id": None, "return_dict_in_generate": True, "num_beams": num_beams}
    ids, _ = ids_of(4, 4)
    plain = model.generate(ids, **options)
    result = model.generate(ids, output_hidden_states=True, **options)
    assert torch.equal(plain.sequences, result.sequences) and plain.hidden_states is None
    assert len(result.hidden_states) == 3 and all(len(step) == COUNTS[name] for step in result.hidden_states)
    assert [step[0].shape[1] for step in result.hidden_states] == [4, 1, 1]


@recurrent
def test_generation_collects_attention_weights(name):
    model = build(name)
    options = {"max_new_tokens": 2, "eos_token_id": None, "return_dict_in_generate": True, "output_attentions": True}
    assert len(model.generate(ids_of(3)[0], **options).attentions) == 2


# ------------------------------------------------------------------------------------------------- tuples, and devices
def flat(value: Any) -> list[Tensor]:
    """The tensors of an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in flat(part)]


@pytest.mark.parametrize("name", ["gpst", "lstm"])
def test_tuples_hold_what_dictionaries_hold(name):
    """Of the classes that transformers' own test leaves out."""
    model, inputs = build(name), batch(name)
    for more in ({}, {"labels": inputs["input_ids"], "output_hidden_states": True}):
        fields = model(**inputs, **more)
        values = model(**inputs, **more, return_dict=False)
        assert isinstance(values, tuple) and len(values) == len(fields)
        assert next(iter(fields)) == ("loss" if more else "logits")
        torch.testing.assert_close(flat(values), flat(fields.to_tuple()), equal_nan=True)
