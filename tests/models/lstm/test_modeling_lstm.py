"""The LSTM baseline as a model of transformers: the contract of `forward`, its cache, generation, saving, tools."""

import functools

import pytest
import torch

from hf_synlm import LSTMConfig, LSTMForCausalLM
from tests.helpers.recurrent_models import ids_of, make_model

tiny = functools.partial(make_model, "lstm")


@torch.no_grad()
def naive_log_probs(model, tokens):
    """log p(next | prefix) after the beginning and after each token, one cell at a time."""
    weights = dict(model.model.lstm.named_parameters())
    embedding, size, layers = model.model.embed_tokens.weight, model.config.hidden_size, model.config.num_layers
    h, c = [torch.zeros(size)] * layers, [torch.zeros(size)] * layers
    rows = []
    for token in [model.config.bos_token_id, *tokens]:
        x = embedding[token]
        for layer in range(layers):
            gates = weights[f"weight_ih_l{layer}"] @ x + weights[f"bias_ih_l{layer}"]
            gates = gates + weights[f"weight_hh_l{layer}"] @ h[layer] + weights[f"bias_hh_l{layer}"]
            i, f, g, o = gates.chunk(4)
            c[layer] = f.sigmoid() * c[layer] + i.sigmoid() * g.tanh()
            x = h[layer] = o.sigmoid() * c[layer].tanh()
        output = (model.projection[1].weight @ x + model.projection[1].bias).relu()
        rows.append((embedding @ output + model.lm_head.bias).log_softmax(-1))
    return torch.stack(rows)


@pytest.mark.parametrize("layers", [1, 3])
def test_values_are_those_of_the_definition(layers):
    model = tiny(num_layers=layers)
    ids, _ = ids_of(7)
    expected = naive_log_probs(model, ids[0].tolist())
    torch.testing.assert_close(model(ids).logits[0], expected[1:], atol=1e-5, rtol=1e-5)
    taken = expected[torch.arange(7), ids[0]]
    output = model(ids, labels=ids)
    torch.testing.assert_close(output.loss, -taken.mean())
    torch.testing.assert_close(output.joint_log_prob[0], taken.sum())
    assert set(output.losses) == {"word"}
    assert torch.equal(output.losses["word"], output.loss) and not output.losses["word"].requires_grad


def test_padding_without_mask_is_seen():
    model = tiny()
    ids, mask = ids_of(5, 8)
    given, inferred = (model(ids, attention_mask=m, use_cache=True) for m in (mask, None))
    assert torch.equal(given.logits, inferred.logits)
    assert torch.equal(given.past_key_values.state[0], inferred.past_key_values.state[0])
    assert torch.equal(model(ids, labels=ids).loss, model(ids, attention_mask=mask, labels=ids).loss)


@pytest.mark.parametrize("begin", [0, 4])
def test_leading_begin_token_is_the_beginning(begin):
    model = tiny(bos_token_id=begin)
    ids, _ = ids_of(6)
    ids[ids == 4] = 5
    with_begin = torch.cat([torch.full_like(ids[:, :1], begin), ids], 1)
    for mask in (None, torch.ones_like(with_begin)):
        mine = model(with_begin, attention_mask=mask).logits
        torch.testing.assert_close(mine[:, 1:], model(ids).logits)
        torch.testing.assert_close(mine[0], naive_log_probs(model, ids[0].tolist()), atol=1e-5, rtol=1e-5)
        labeled = model(with_begin, attention_mask=mask, labels=with_begin)
        torch.testing.assert_close(labeled.loss, model(ids, labels=ids).loss)


def test_begin_token_inside_a_text_is_a_word():
    model = tiny()
    ids = torch.tensor([[5, 0, 7]])
    cache = model(ids[:, :1], use_cache=True).past_key_values
    torch.testing.assert_close(model(ids[:, 1:], past_key_values=cache).logits, model(ids).logits[:, 1:])


def test_fresh_parameters():
    sizes = {"vocab_size": 2000, "embedding_size": 64, "hidden_size": 100}
    model = LSTMForCausalLM(LSTMConfig(**sizes))
    assert model.lm_head.weight.std().item() == pytest.approx(1.0, rel=0.05)
    assert model.model.lstm.weight_hh_l1.abs().max().item() == pytest.approx(0.1, rel=0.01)
    for parameter in LSTMForCausalLM(LSTMConfig(**sizes, initializer_range=0.05)).parameters():
        assert parameter.abs().max().item() == pytest.approx(0.05, rel=0.1)
