import random
from collections import Counter

import pytest
from hypothesis import given, strategies as st

from hf_synlm.data.brackets import brackets_to_labeled_spans, brackets_to_spans
from hf_synlm.evaluation.trees.baseline_trees import balanced, left_branching, random_tree
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import (
    fold_tokens,
    in_post_order,
    labeled_spans_to_brackets,
    right_branching,
    spans_to_brackets,
    validate_spans,
)
from tests.helpers.refusals import refused
from tests.reference.trees import all_binary_trees, all_trees, keeps_words_together, spans_of

DEEP = 3000


@st.composite
def trees(draw, max_tokens: int = 30) -> tuple[list[tuple[int, int]], int]:
    """Spans of a random tree and its number of tokens."""
    num_tokens = draw(st.integers(1, max_tokens))
    spans = random_tree(num_tokens, random.Random(draw(st.integers(0, 2**32))))
    keep = draw(st.lists(st.booleans(), min_size=len(spans), max_size=len(spans)))
    return [span for span, kept in zip(spans, keep, strict=True) if kept or span == (0, num_tokens)], num_tokens


@pytest.mark.parametrize(("enumerate_trees", "longest"), [(all_binary_trees, 7), (all_trees, 6)])
def test_every_tree_survives_spans_and_brackets(enumerate_trees, longest):
    for num_tokens in range(1, longest + 1):
        words = [f"w{i}" for i in range(num_tokens)]
        for tree in enumerate_trees(0, num_tokens):
            spans = spans_of(tree)
            assert brackets_to_spans(spans_to_brackets(spans[::-1], words)) == (spans, words)


@given(trees(), st.data())
def test_round_trip_of_random_trees(tree, data):
    spans, num_tokens = tree
    word = st.text(st.characters(blacklist_categories=("Z", "C")), min_size=1).filter(lambda text: "RB-" not in text)
    words = data.draw(st.lists(word, min_size=num_tokens, max_size=num_tokens))
    shuffled = data.draw(st.permutations(spans))
    assert in_post_order(shuffled, num_tokens) == spans
    assert brackets_to_spans(spans_to_brackets(shuffled, words)) == (spans, words)


@given(trees())
def test_binarize_keeps_the_spans(tree):
    spans, num_tokens = tree
    for direction in ("right", "left"):
        binary = binarize_spans(spans, num_tokens, direction)
        assert len(binary) == num_tokens - 1
        assert set(spans) <= set(binary)


def test_binarize_directions():
    spans = spans_of((0, 1, (2, 3, 4), 5))
    assert binarize_spans(spans, 6) == spans_of((0, (1, ((2, (3, 4)), 5))))
    assert binarize_spans(spans, 6, "left") == spans_of((((0, 1), ((2, 3), 4)), 5))
    assert binarize_spans([], 1) == []
    refused("whole-sentence span", binarize_spans, [(0, 2)], 3)


def test_brackets_of_the_example():
    spans, words = [(0, 2), (3, 5), (2, 5), (0, 5)], ["fruit", "flies", "like", "a", "banana"]
    assert spans_to_brackets(spans, words) == "((fruit flies) (like (a banana)))"
    assert brackets_to_spans("  ( (fruit\nflies)(like (a banana) ) ) ") == (spans, words)
    assert spans_to_brackets([], ["hello"]) == "hello"
    assert brackets_to_spans("hello") == ([], ["hello"])


def test_parentheses_inside_words_are_escaped():
    text = spans_to_brackets([(1, 3), (0, 3)], ["(", ":)", "x"])
    assert text == "(-LRB- (:-RRB- x))"
    assert brackets_to_spans(text) == ([(1, 3), (0, 3)], ["(", ":)", "x"])


def test_baselines():
    assert left_branching(4) == [(0, 2), (0, 3), (0, 4)]
    assert right_branching(4) == [(2, 4), (1, 4), (0, 4)]
    assert balanced(4) == [(0, 2), (2, 4), (0, 4)]
    assert balanced(5) == [(0, 2), (3, 5), (2, 5), (0, 5)]


@pytest.mark.parametrize("baseline", [left_branching, right_branching, balanced, lambda n: random_tree(n, random)])
def test_baselines_are_binary_trees_in_post_order(baseline):
    for num_tokens in range(1, 20):
        spans = baseline(num_tokens)
        assert len(spans) == num_tokens - 1
        assert in_post_order(spans, num_tokens) == spans


def test_random_trees_are_uniform_and_repeatable():
    generator = random.Random(1)
    draws = 14_000
    counts = Counter(tuple(random_tree(5, generator)) for _ in range(draws))
    assert len(counts) == 14
    # chi-square with 13 degrees of freedom: 34.5 is the 0.999 quantile.
    expected = draws / 14
    assert sum((count - expected) ** 2 / expected for count in counts.values()) < 34.5
    assert random_tree(20, random.Random(3)) == random_tree(20, random.Random(3))


def test_deep_trees_do_not_reach_the_recursion_limit():
    words = [f"w{i}" for i in range(DEEP)]
    for spans in (left_branching(DEEP), right_branching(DEEP), random_tree(DEEP, random.Random(0))):
        assert brackets_to_spans(spans_to_brackets(spans, words)) == (spans, words)
        assert binarize_spans(spans, DEEP, "left") == spans
        labeled = [("X", i, j) for i, j in spans]
        assert brackets_to_labeled_spans(labeled_spans_to_brackets(labeled, words)) == (labeled, words)
    assert binarize_spans([(0, DEEP)], DEEP) == right_branching(DEEP)
    assert binarize_spans([(0, DEEP)], DEEP, "left") == left_branching(DEEP)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=6, unique=True))
def test_validate_spans_finds_exactly_the_crossing_ones(spans):
    spans = [(i, j) for i, j in spans if j - i >= 2]
    crossing = any(a < c < b < d for a, b in spans for c, d in spans)
    if crossing:
        refused("cross", validate_spans, spans, 8)
    else:
        validate_spans(spans, 8)


WRONG_INPUT = [
    (in_post_order, ([(0, 2), (1, 3), (0, 3)], 3), r"\(0, 2\) and \(1, 3\) cross"),
    (in_post_order, ([(0, 3), (1, 4)], 3), r"span \(1, 4\) does not fit into a sentence of 3 tokens"),
    (in_post_order, ([(0, 3), (1, 2)], 3), r"span \(1, 2\) is 1 token"),
    (in_post_order, ([(0, 3), (0, 3)], 3), r"span \(0, 3\) is given twice"),
    (in_post_order, ([(0, 2)], 3), r"whole-sentence span \(0, 3\) is missing"),
    (spans_to_brackets, ([(0, 2)], ["a b", "c"]), "word 0 is 'a b'"),
    (brackets_to_spans, ("(a b",), r"'\(' at character 0 is never closed"),
    (brackets_to_spans, ("(a b))",), r"'\)' at character 5 closes nothing"),
    (brackets_to_spans, ("(a b) (c d)",), r"'\(' at character 6 stands after the end"),
    (brackets_to_spans, ("(a (b))",), r"opened at character 3 has 1 child"),
    (labeled_spans_to_brackets, ([("A", 0, 1)], ["a", "b"]), r"the whole-sentence span \(0, 2\) is missing"),
    (labeled_spans_to_brackets, ([("A", 0, 3)], ["a", "b"]), r"\(0, 3\) does not fit"),
    (labeled_spans_to_brackets, ([("A(", 0, 1)], ["a"]), r"the label of span \(0, 1\) is 'A\('"),
    (brackets_to_labeled_spans, ("(S a (B))",), "the bracket opened at character 5 contains no word"),
    (brackets_to_labeled_spans, ("(S a ())",), "the bracket opened at character 5 has no label"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), WRONG_INPUT)
def test_wrong_input_is_named(function, arguments, message):
    refused(message, function, *arguments)


def test_fold_tokens():
    # un|believ|able  stories  ab|ound
    word_ends = [False, False, True, True, False, True]
    assert fold_tokens([(1, 3), (0, 3), (0, 4), (4, 6), (0, 6)], word_ends) == [(0, 2), (0, 3)]
    assert fold_tokens(right_branching(3), [True] * 3) == right_branching(3)
    assert fold_tokens([(0, 2)], [False, True]) == []
    labeled = fold_tokens([(1, 3), (0, 3), (0, 5)], [True, False, True, False, True], keep_words=True)
    assert labeled == [(1, 2), (0, 2), (0, 3)]
    for wrong, ends, message in [
        ([(3, 5)], word_ends, r"span \(3, 5\) cuts a word at boundary 5"),
        ([(2, 4)], word_ends, r"span \(2, 4\) cuts a word at boundary 2"),
        ([(0, 2)], [True, False], "True at the last token"),
    ]:
        refused(message, fold_tokens, wrong, ends)


def test_fold_tokens_gives_binary_word_trees_whenever_words_are_kept_together():
    word_ends = [False, True, True, False, False, True]
    kept = 0
    for tree in all_binary_trees(0, 6):
        spans = spans_of(tree)
        if keeps_words_together(spans, word_ends):
            kept += 1
            folded = fold_tokens(spans, word_ends)
            assert len(folded) == 2
            assert in_post_order(folded, 3) == folded
    # two trees over three words, times one tree over two pieces, times two trees over three pieces
    assert kept == 4


def test_labeled_brackets_of_the_example():
    spans = [("NP", 0, 2), ("VP", 2, 3), ("S", 0, 3)]
    words = ["the", "cat", "sleeps"]
    text = "(S (NP the cat) (VP sleeps))"
    assert labeled_spans_to_brackets(spans, words) == labeled_spans_to_brackets(spans[::-1], words) == text
    assert brackets_to_labeled_spans(text) == (spans, words)
    assert brackets_to_labeled_spans(" ( S(NP the\ncat)(VP sleeps) )\n") == (spans, words)
    chain = [("A", 0, 1), ("B", 0, 1), ("A", 0, 1)]
    assert labeled_spans_to_brackets(chain, ["a(b)"]) == "(A (B (A a-LRB-b-RRB-)))"
    assert brackets_to_labeled_spans("(A (B (A a-LRB-b-RRB-)))") == (chain, ["a(b)"])
    assert labeled_spans_to_brackets([], ["yes"]) == "yes"
    assert brackets_to_labeled_spans("yes") == ([], ["yes"])


LABELS = st.text(st.characters(exclude_categories=("Z", "C"), exclude_characters="()"), min_size=1, max_size=3)


@given(tree=trees(), data=st.data())
def test_labeled_trees_survive_brackets(tree, data):
    spans, num_tokens = tree
    singles = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=5))
    spans = [*spans, (0, num_tokens), *((start, start + 1) for start in singles)]
    labeled = [(data.draw(LABELS), i, j) for i, j in sorted(spans, key=lambda span: (span[1], -span[0]))]
    words = data.draw(st.lists(LABELS | st.just("("), min_size=num_tokens, max_size=num_tokens))
    assert brackets_to_labeled_spans(labeled_spans_to_brackets(labeled, words)) == (labeled, words)
