"""NT, SHIFT, REDUCE and FINISH: labeled trees as actions and back, against enumerated trees and the authors' code."""

import random
from itertools import accumulate, product

import pytest
from hypothesis import given, strategies as st

from hf_synlm.data.treebank import parse_treebank
from hf_synlm.evaluation.trees.baseline_trees import left_branching, random_tree
from hf_synlm.trees.actions import COMP, GEN, spans_to_actions
from hf_synlm.trees.spans import right_branching
from hf_synlm.trees.transitions import FINISH, PAD, REDUCE, SHIFT, TransitionSystem
from tests.helpers.goldens import cases_of, read_case
from tests.helpers.refusals import refused
from tests.reference.rnng import over_pieces, random_labeled_tree, random_word_ends
from tests.reference.trees import labeled_spans_of, stack_depths, stacks_of

SYSTEMS = ["top_down", "in_order"]


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("num_labels", "length"), [(1, 5), (1, 6), (1, 7), (1, 8), (2, 5), (2, 6)])
def test_exactly_the_possible_sequences_are_accepted(name, num_labels, length):
    """All sequences of so many actions, against a stack of explicit elements: so all trees are there and come back."""
    system = TransitionSystem(name, num_labels)
    num_complete = 0
    for actions in product(range(1, system.num_actions), repeat=length):
        stacks = stacks_of(actions, name)
        try:
            spans = system.actions_to_spans(actions, forest=True)
        except ValueError:
            assert stacks is None
            continue
        assert stacks is not None
        assert stack_depths(system, actions) == [len(stack) for stack in stacks]
        is_complete = len(stacks[-1]) == 1 and (actions[-1] == FINISH if name == "in_order" else actions[-1] == REDUCE)
        num_complete += is_complete
        if is_complete:
            assert spans == labeled_spans_of(stacks[-1][0]) == system.actions_to_spans([*actions, PAD, PAD])
            assert system.spans_to_actions(spans, actions.count(SHIFT)) == list(actions)
        else:
            refused("So the sentence is not finished", system.actions_to_spans, actions)
    assert num_complete > 0


@pytest.mark.parametrize("name", SYSTEMS)
@given(num_words=st.integers(1, 20), seed=st.integers(0, 2**32))
def test_round_trip_of_labeled_trees(name, num_words, seed):
    generator, system = random.Random(seed), TransitionSystem(name, 3)
    word_ends = random_word_ends(generator, num_words)
    labeled, num_tokens = over_pieces(random_labeled_tree(generator, num_words, 3), word_ends), len(word_ends)
    actions = system.spans_to_actions(labeled, num_tokens, word_ends)
    assert len(actions) == num_tokens + 2 * len(labeled) + (name == "in_order")
    assert system.actions_to_spans(actions, word_ends) == labeled
    depths = stack_depths(system, actions, word_ends)
    assert depths[-1] == 1
    for length in range(len(actions)):
        prefix = system.actions_to_spans(actions[:length], word_ends, forest=True)
        assert prefix == labeled[: len(prefix)]
        assert stack_depths(system, actions[:length], word_ends) == depths[:length]
        refused("So the sentence is not finished", system.actions_to_spans, actions[:length], word_ends)


@pytest.mark.parametrize("seed", range(5))
def test_binary_trees_are_those_of_gpst_with_labels(seed):
    generator, system = random.Random(seed), TransitionSystem("binary", 3)
    tree = [(generator.randrange(3), i, j) for i, j in random_tree(seed + 1, generator)]
    ends = random_word_ends(generator, seed + 1)
    actions = system.spans_to_actions(over_pieces(tree, ends), len(ends), ends)
    assert system.actions_to_spans([*actions, PAD], ends) == over_pieces(tree, ends)
    assert actions[-1] == FINISH
    # Of every word the last piece.
    words = [action for action, before in zip(actions, accumulate(a == SHIFT for a in actions), strict=True)
             if action != SHIFT or ends[before - 1]]  # fmt: skip
    gpst = [COMP if action > FINISH else GEN for action in words[:-1]]
    assert gpst == spans_to_actions([(i, j) for _, i, j in tree], seed + 1)


def test_an_in_order_sentence_may_be_a_bare_token():
    system = TransitionSystem("in_order", 2)
    assert system.spans_to_actions([], 1) == [SHIFT, FINISH]
    assert system.actions_to_spans([SHIFT, FINISH]) == []


@pytest.mark.parametrize("name", SYSTEMS)
def test_deep_labeled_trees(name):
    system = TransitionSystem(name, 1)
    for spans in (left_branching(3000), right_branching(3000), [(0, 1)] * 3000):
        labeled = [(0, i, j) for i, j in spans]
        assert system.actions_to_spans(system.spans_to_actions(labeled, labeled[-1][2])) == labeled


WRONG_ACTIONS = [
    ("top_down", [SHIFT], None, "position 0 is illegal: SHIFT needs an open nonterminal"),
    ("top_down", [3, REDUCE], None, "position 1 is illegal: REDUCE finds a nonterminal without children"),
    ("top_down", [REDUCE], None, "position 0 is illegal: REDUCE finds no open nonterminal"),
    ("top_down", [3, SHIFT, REDUCE, 3], None, "position 3 is illegal: the sentence is finished"),
    ("top_down", [3, SHIFT], None, r"the 2 actions stop with 1 open nonterminal\(s\) after 1 token"),
    ("top_down", [3, PAD, SHIFT], None, "action 0 at position 1 is illegal: the 5 ids of top_down with 2 labels"),
    ("in_order", [4], None, "position 0 is illegal: an in-order NT needs a complete element"),
    ("in_order", [SHIFT, SHIFT], None, "position 1 is illegal: SHIFT needs an open nonterminal"),
    ("in_order", [SHIFT, 4, FINISH], None, "position 2 is illegal: FINISH needs exactly one complete element"),
    ("in_order", [SHIFT, 4, REDUCE], None, "So the sentence is not finished"),
    ("binary", [SHIFT, 4], None, "position 1 is illegal: a binary constituent needs two elements"),
    ("binary", [SHIFT, SHIFT, 4], None, "So the sentence is not finished"),
    ("in_order", [SHIFT, 4], [False, True], "position 1 is illegal: it stands between the pieces of a word"),
    ("top_down", [3, SHIFT, REDUCE], [False, True], "position 2 is illegal: it stands between the pieces"),
    ("top_down", [3, SHIFT, SHIFT], [True], "position 2 is illegal: SHIFT, but word_ends has only 1 tokens"),
    ("in_order", [SHIFT, SHIFT, FINISH], [False, True], "FINISH needs exactly one complete element"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "actions", "word_ends", "message"), WRONG_ACTIONS)
def test_wrong_labeled_actions_are_named(name, actions, word_ends, message):
    refused(message, TransitionSystem(name, 2).actions_to_spans, actions, word_ends)


NO_TREES = [
    ([(0, 0, 2)], 3, None, r"the whole-sentence span \(0, 3\) is missing"),
    ([(0, 0, 2), (0, 1, 3), (0, 0, 3)], 3, None, r"\(0, 2\) and \(1, 3\) cross"),
    ([(0, 0, 1), (0, 0, 2)], 2, [False, True], r"span \(0, 1\) cuts a word at boundary 1"),
    ([(0, 0, 2)], 2, [True, False], "True at the last token"),
]


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize(("spans", "num_tokens", "word_ends", "message"), NO_TREES)
def test_labeled_spans_that_are_no_tree_are_named(name, spans, num_tokens, word_ends, message):
    refused(message, TransitionSystem(name, 2).spans_to_actions, spans, num_tokens, word_ends)


@pytest.mark.parametrize("case", cases_of("rnng"))
def test_actions_and_stack_depths_of_the_authors(case):
    _, golden, meta = read_case(f"rnng/{case}")
    labels = meta["config"]["nonterminals"]
    system = TransitionSystem(meta["config"]["strategy"], len(labels))
    assert system.num_actions == len(meta["i2a"])
    for row, sentence in enumerate(parse_treebank(meta["trees"])):
        num_tokens, num_actions = int(golden["sent_lengths"][row]), int(golden["action_lengths"][row])
        word_ends = golden["subword_end_mask"][row, :num_tokens].tolist()
        spans = [(labels.index(label), i, j) for label, i, j in sentence.labeled_spans]
        actions = system.spans_to_actions(spans, num_tokens, word_ends)
        padded = golden["action_ids"][row].tolist()
        assert actions == padded[:num_actions]
        assert system.actions_to_spans(padded, word_ends) == spans
        # The authors note the depth before each action.
        depths = stack_depths(system, actions, word_ends)
        assert [0, *depths[:-1]] == golden["top_position"][row, :num_actions].tolist()
        assert max(depths) == int(golden["max_stack_size"][row])
