"""GEN and COMP: trees as actions and back, against enumerated trees."""

import random
from itertools import product

import pytest
from hypothesis import given, strategies as st

from hf_synlm.evaluation.trees.baseline_trees import left_branching, random_tree
from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION, spans_to_actions
from hf_synlm.trees.binary import actions_to_spans
from hf_synlm.trees.spans import right_branching
from tests.helpers.refusals import refused
from tests.reference.trees import actions_of, all_binary_trees, all_gen_comp_sequences, spans_of


@pytest.mark.parametrize("num_tokens", range(1, 8))
def test_every_binary_tree_survives_actions(num_tokens):
    for tree in all_binary_trees(0, num_tokens):
        spans = spans_of(tree)
        actions = spans_to_actions(random.sample(spans, len(spans)), num_tokens)
        assert actions == actions_of(tree)
        assert actions_to_spans(actions) == spans
        assert actions_to_spans([*actions, PAD_ACTION, PAD_ACTION]) == spans


@pytest.mark.parametrize("num_tokens", range(1, 7))
def test_exactly_the_derivations_of_trees_are_accepted(num_tokens):
    derivations = all_gen_comp_sequences(num_tokens)
    assert len(derivations) == len(all_binary_trees(0, num_tokens)) == [1, 1, 2, 5, 14, 42][num_tokens - 1]
    for actions in product((GEN, COMP), repeat=2 * num_tokens - 1):
        try:
            actions_to_spans(actions)
        except ValueError:
            assert list(actions) not in derivations
        else:
            assert list(actions) in derivations


@given(st.integers(1, 60), st.integers(0, 2**32))
def test_round_trip_of_random_trees(num_tokens, seed):
    spans = random_tree(num_tokens, random.Random(seed))
    actions = spans_to_actions(spans, num_tokens)
    assert len(actions) == 2 * num_tokens - 1
    assert actions_to_spans(actions) == spans
    for length in range(len(actions)):
        prefix = actions_to_spans(actions[:length], forest=True)
        assert prefix == spans[: len(prefix)]


def test_deep_trees():
    for spans in (left_branching(5000), right_branching(5000)):
        assert actions_to_spans(spans_to_actions(spans, 5000)) == spans


def test_forests():
    assert actions_to_spans([GEN, GEN, COMP, GEN, GEN], forest=True) == [(0, 2)]
    assert actions_to_spans([], forest=True) == []


WRONG_ACTIONS = [
    ([GEN, COMP], r"action 1 is not possible at position 1, with 1 item"),
    ([GEN, GEN, GEN, COMP], "leave 2 items on the stack"),
    ([GEN, 2], "action 2 is not possible at position 1, with 1 item"),
]


@pytest.mark.parametrize(("actions", "message"), WRONG_ACTIONS)
def test_wrong_actions_are_named(actions, message):
    refused(message, actions_to_spans, actions)


NO_BINARY_TREES = [
    ([(0, 3)], 3, "1 spans over 3 tokens are not a binary tree, which has 2"),
    ([(0, 2), (1, 3), (0, 3)], 3, r"\(0, 2\) and \(1, 3\) cross"),
]


@pytest.mark.parametrize(("spans", "num_tokens", "message"), NO_BINARY_TREES)
def test_spans_that_are_no_binary_tree_are_named(spans, num_tokens, message):
    refused(message, spans_to_actions, spans, num_tokens)
