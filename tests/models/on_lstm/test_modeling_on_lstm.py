"""ON-LSTM as a model of transformers: its loop over layers, gold distances, trees, new weights."""

import functools

import pytest
import torch

from hf_synlm import ONLSTMConfig, ONLSTMForCausalLM
from hf_synlm.models.on_lstm.layer import LayerRun, on_lstm, split_distance
from hf_synlm.recurrent.distances import distances_to_spans
from hf_synlm.trees.spans import fold_tokens
from tests.helpers.recurrent_models import ids_of, make_model

SUPERVISED = {"supervised_layers": [2, 0], "syntactic_distance_scope": "sentence"}
tiny = functools.partial(make_model, "on_lstm")


# ------------------------------------------------------------------------------------------------------- values
def runs_of(chunk_counts, units=2, batch=2, width=5):
    """Layers of unequal width with random weights, and the tensors that get gradients."""
    torch.manual_seed(0)
    runs, leaves = [], []
    for number, chunks in enumerate(chunk_counts):
        size, gates = chunks * units, 2 * chunks + 4 * chunks * units
        state, weights = [(batch, size)] * 2, [(gates, width), (gates, size), (gates,)]
        tensors = [torch.randn(x, dtype=torch.float64, requires_grad=True) for x in (*state, *weights)]
        mask = torch.randint(0, 2, (batch, width)).double() * 2
        runs.append(LayerRun(*tensors[:2], mask if number else None, *tensors[2:], chunks))
        leaves += tensors
        width = size
    return runs, leaves


@pytest.mark.parametrize("chunk_counts", [[2], [1, 2]])
def test_layer_gradients_in_double_precision(chunk_counts):
    runs, leaves = runs_of(chunk_counts, batch=1, width=2)
    inputs = torch.randn(3, 1, 2, dtype=torch.float64, requires_grad=True)

    def outputs(places, inputs, *leaves):
        parts = [run._replace(**dict(zip(NAMES, leaves[5 * n :], strict=False))) for n, run in enumerate(runs)]
        return [states[place] for states in on_lstm(inputs, parts) for place in places]

    for places in ([0, 1, 2], [0], [1], [2]):  # each output alone: gradients that are not there count as zero
        assert torch.autograd.gradcheck(lambda *x, y=places: outputs(y, *x), [inputs, *leaves])


NAMES = ("hidden_BH", "cell_BH", "input_weight_GD", "weight_GH", "bias_G")


@pytest.mark.parametrize("steps", [2, 6])
@pytest.mark.parametrize("chunk_counts", [[4, 4, 4], [4, 2, 3]])
def test_layers_in_one_loop_are_layers_one_by_one(chunk_counts, steps):
    """As on a GPU, with dropout, for fewer steps than layers too."""
    runs, leaves = runs_of(chunk_counts)
    inputs = torch.randn(steps, 2, 5, dtype=torch.float64)
    one_by_one, read = [], inputs
    for run in runs:
        one_by_one += on_lstm(read, [run])
        read = one_by_one[-1][0][1:]

    def gradients(layers):
        total = sum((x * torch.linspace(-1, 1, x.numel()).view(x.shape)).sum() for layer in layers for x in layer)
        return torch.autograd.grad(total, leaves)

    together = on_lstm(inputs, runs)
    torch.testing.assert_close(together, one_by_one)
    torch.testing.assert_close(gradients(together), gradients(one_by_one))


def test_distance_is_the_mean_of_the_gate():
    scores = torch.randn(4, 5, 9, dtype=torch.float64)
    torch.testing.assert_close(split_distance(scores), 1 - scores.softmax(-1).cumsum(-1).mean(-1))
    assert split_distance(torch.tensor([0.0, 0.0, 1e4])).item() == pytest.approx(2 / 3)


# ------------------------------------------------------------------------------------------------- gold distances
class TestSupervision:
    def test_one_set_of_trees(self):
        output = tiny(supervised_layers=[1], syntactic_distance_head="shared")(ids_of(6)[0])
        assert torch.equal(output.syd_distances[:, 0], output.distances[:, 1])

    def test_vanilla_multitasking_reads_states(self):
        model = tiny(supervised_layers=[2], syntactic_distance_head="hidden")
        ids, _ = ids_of(6)
        states = model.model(ids).last_hidden_state
        torch.testing.assert_close(model(ids).syd_distances[:, 0], model.model.distance_heads[0](states)[..., 0])


# --------------------------------------------------------------------------------------------------------- trees
class TestParse:
    def test_words_of_several_pieces(self):
        model = tiny()
        ids, _ = ids_of(7)
        ends = torch.tensor([[0, 1, 1, 0, 0, 1, 1]]).bool()
        parsed = model.parse(ids, word_ends=ends)
        distances = model(torch.cat([torch.tensor([[0]]), ids], 1)).distances[0, 1, 1:]
        words = distances_to_spans(distances[[0, 2, 3, 6]].tolist())
        assert sorted(fold_tokens(parsed.spans[0][0], ends[0].tolist())) == sorted(words)
        assert parsed.word_ends == [[2, 3, 6, 7]] and len(parsed.spans[0][0]) == 6
        assert len(parsed.brackets(["a", "b", "c", "d"]).split()) == 4

    def test_choice_of_distances(self):
        model = tiny(supervised_layers=[2])
        ids, _ = ids_of(8)
        output = model(torch.cat([torch.tensor([[0]]), ids], 1))
        tree = model.parse(ids).spans[0][0]
        assert tree == distances_to_spans(output.syd_distances[0, 0, 1:].tolist())
        for layer in range(3):
            tree = model.parse(ids, distances="language_model", layer=layer).spans[0][0]
            assert tree == distances_to_spans(output.distances[0, layer, 1:].tolist())
        assert model.parse(ids, layer=1).spans == model.parse(ids, distances="language_model", layer=1).spans
        assert tiny().parse(ids).spans == tiny().parse(ids, layer=1).spans


# ---------------------------------------------------------------------------------------------- saving, types, input
@pytest.mark.parametrize("tied", [True, False])
def test_fresh_parameters(tied):
    config = ONLSTMConfig(vocab_size=2000, embedding_size=64, layer_size=100, chunk_size=2, tie_word_embeddings=tied)
    model = ONLSTMForCausalLM(config)
    for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
        assert weight.abs().max().item() == pytest.approx(0.1, rel=0.01)
    assert not model.lm_head.bias.any()
    layer = model.model.layers[1]
    for parameter in layer.parameters():
        assert parameter.abs().max().item() == pytest.approx(0.1, rel=0.02)
