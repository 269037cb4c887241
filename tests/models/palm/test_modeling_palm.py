"""PaLM as a model of transformers: its definition, the contract of `forward`, cache, trees, training, generation."""

import functools
import re

import pytest
import torch

from hf_synlm import PaLMConfig, PaLMForCausalLM
from hf_synlm.models.palm.span_attention import span_states, split_by_scores
from tests.helpers.recurrent_models import MODELS, ids_of, make_model
from tests.helpers.refusals import refused
from tests.reference import palm as reference

tiny = functools.partial(make_model, "palm")
kinds = pytest.mark.parametrize("kind", [name for name, (prefix, _) in MODELS.items() if prefix == "PaLM"])


# ------------------------------------------------------------------------------------------------ definition
@kinds
def test_values_are_those_of_the_definition(kind):
    model = make_model(kind)
    ids, _ = ids_of(9)
    expected = reference.log_probs(model, ids[0].tolist())
    output = model(ids)
    torch.testing.assert_close(output.logits[0], expected, atol=1e-5, rtol=1e-5)
    if model.config.span_attention:
        reader = reference.Reader(model)
        for token in ids[0].tolist():
            reader.read(token)
        torch.testing.assert_close(output.span_scores[0], torch.stack(reader.scores), atol=1e-5, rtol=1e-5)
    else:
        assert output.span_scores is None


@pytest.mark.parametrize(("num_spans", "num_positions"), [(1, 1), (1, 5), (4, 1), (4, 9), (9, 3)])
def test_states_of_spans(num_spans, num_positions):
    torch.manual_seed(1)
    tokens = num_spans + num_positions - 1
    inputs = torch.randn(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    forgets = torch.rand(2, tokens, 6, dtype=torch.float64, requires_grad=True)
    states = span_states(inputs, forgets, num_spans).flip(0)  # the shortest first
    expected = []
    for length in range(1, num_spans + 1):
        rows = []
        for row in range(2):
            for position in range(num_positions):
                place = [num_spans + position - length + step for step in range(length)]
                u, f = ([value[row, at] for at in place] for value in (inputs, forgets))
                forward = reference.state_of_span([x[:3] for x in u], [x[:3] for x in f])
                backward = reference.state_of_span([x[3:] for x in u[::-1]], [x[3:] for x in f[::-1]])
                rows.append(torch.cat([forward, backward]))
        expected.append(torch.stack(rows).view(2, num_positions, 6))
    weight = torch.randn(num_spans, 2, num_positions, 6, dtype=torch.float64)
    gradients = []
    for values in (states, torch.stack(expected)):
        gradients.append(torch.autograd.grad((values * weight).sum(), (inputs, forgets), allow_unused=True))
    torch.testing.assert_close(states, torch.stack(expected), rtol=0, atol=1e-15)
    for mine, theirs in zip(*gradients, strict=True):
        mine, theirs = (torch.zeros_like(inputs) if value is None else value for value in (mine, theirs))
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-14)


def test_fresh_parameters():
    torch.manual_seed(0)
    model = PaLMForCausalLM(
        PaLMConfig(vocab_size=30, embedding_size=10, layer_size=60, rrnn_size=40, attention_size=30)
    )
    attention = model.model.span_context.attention

    def bound(parameter):
        return parameter.abs().max().item()

    assert bound(model.model.embed_tokens.weight) == pytest.approx((3 / 10) ** 0.5, rel=0.05)
    assert bound(attention.input.weight) == pytest.approx(5 / 3 * (6 / 100) ** 0.5, rel=0.05)
    assert bound(attention.forget_gate.weight) == pytest.approx(5 / 3 * (6 / 100) ** 0.5, rel=0.05)
    assert bound(attention.output_gate.weight) == pytest.approx((6 / 100) ** 0.5, rel=0.05)
    assert bound(attention.key.weight) == pytest.approx((6 / 170) ** 0.5, rel=0.05)
    assert bound(attention.query.weight) == pytest.approx((6 / 170) ** 0.5, rel=0.05)
    assert bound(attention.score.weight) == pytest.approx((6 / 31) ** 0.5, rel=0.2)
    assert bound(model.model.span_context.projection.weight) == pytest.approx((6 / 140) ** 0.5, rel=0.05)
    assert bound(model.model.span_context.residual_gate.weight) == pytest.approx((6 / 200) ** 0.5, rel=0.05)
    for block in model.model.layers[1].weight_hh_l0.chunk(4):
        torch.testing.assert_close(block @ block.T, torch.eye(60), atol=1e-5, rtol=0)
    assert all(not parameter.any() for name, parameter in model.named_parameters() if "bias" in name)


# ------------------------------------------------------------------------------------------- rows and padding
class TestCache:
    def test_dropped_queries_are_carried(self):
        # As in the authors' code, the attention reads tokens of the last segment under the mask of that segment.
        model = tiny(hidden_dropout=0.5).train()
        ids, _ = ids_of(6)
        output = model.model(ids, use_cache=True)
        assert torch.equal(output.past_key_values.state[-1], output.query_states[:, -4:])
        assert (output.query_states == 0).any()


# ----------------------------------------------------------------------------------------------------- trees
class TestParse:
    @pytest.mark.parametrize("kind", ["palm", "palm, one span", "palm, paper"])
    def test_trees_are_those_of_the_scores(self, kind):
        """Of words of one token and of several, between the boundaries."""
        model, (ids, _) = make_model(kind), ids_of(9)
        queries = model.model(torch.cat([ids.new_zeros(1, 1), ids, ids.new_zeros(1, 1)], 1)).query_states
        scores = model.model.span_context.attention.scores(queries, queries.new_zeros(1, 11, queries.shape[2]))[0]
        for ends in ([*range(1, 10)], [2, 3, 6, 7, 9]):
            output = model.parse(ids, word_ends=torch.tensor([[place + 1 in ends for place in range(9)]]))
            words, bounds = split_by_scores(scores, [1, *(end + 1 for end in ends)]), [0, *ends]
            assert {(bounds[i], bounds[j]) for i, j in words} <= set(output.spans[0][0])
            assert len(words) == len(ends) - 1 == output.brackets(list("abcdefghi")[: len(ends)]).count("(")

    def test_right_branching(self):
        model = tiny(span_scores="right_branching")
        ids, _ = ids_of(6)
        assert set(model.parse(ids).spans[0][0]) == {(i, 6) for i in range(5)}

    def test_the_first_of_equal_scores(self):
        assert split_by_scores(torch.zeros(5, 4), range(5)) == [(2, 4), (1, 4), (0, 4)]
        scores = torch.zeros(5, 4)
        scores[4, 3] = 1.0  # the last word by itself
        assert split_by_scores(scores, range(5)) == [(1, 3), (0, 3), (0, 4)]

    def test_any_tree_can_be_expressed(self):
        for spans in ([(1, 3), (0, 3), (3, 5), (0, 5)], [(0, 2), (2, 4), (2, 5), (0, 5)]):
            scores = torch.zeros(6, 5)
            for i, j in spans:
                scores[j, 5 - (j - i)] = 1.0
            for j in range(1, 6):
                scores[j, 4] = 0.5
            assert set(split_by_scores(scores, range(6))) >= {(0, 5)}
            assert set(split_by_scores(scores, range(6))) == set(spans)


# ------------------------------------------------------------------------------------------- transformers
# ---------------------------------------------------------------------------------------------- bad inputs
@pytest.mark.parametrize("span", [(2, 2), (2, 5), (-3, -1)])
def test_bad_spans_are_named(span):
    ids = torch.full((1, 4), 7)
    refused(re.escape(f"{span} in row 0 is not a span"), tiny(), ids, labels=ids, spans=[[span]])
