"""Unlabeled F1 against hand-made cases and the formulas of the scorers that the presets stand for."""

import random
import re

import pytest
from hypothesis import given, strategies as st

from hf_synlm.data.punctuation import keep_words
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_baselines, score_trees
from hf_synlm.evaluation.trees.parsing import branching_baselines, drop_tokens, resolve_convention, unlabeled_f1
from hf_synlm.trees.spans import right_branching
from tests.helpers.refusals import raised, refused
from tests.reference.trees import spans_of


@pytest.mark.parametrize("convention", ["gpst", "on-lstm", "prpn"])
def test_one_sentence_by_hand(convention):
    """With the epsilon of the Ordered-Neurons scorer; all else is in the tests below."""
    two = ((0, 1), (2, 3))
    for gold, predicted, f1 in ((two, two, 0.99999999), ((0, (1, 2, 3)), (0, (1, (2, 3))), 0.6666666577777778)):
        scores = unlabeled_f1([spans_of(predicted)], [spans_of(gold)], [4], convention)
        assert scores.sentence_f1 == pytest.approx(f1, abs=1e-12)
        assert scores.f1_per_sentence == (scores.sentence_f1,)


def test_corpus_by_hand():
    # Gold and predicted spans without the whole sentence: 1 of 2 predicted, 1 gold; 2 of 2, 2 gold; 0 of 1, none gold.
    gold = [(0, (1, 2, 3)), ((0, 1), (2, 3)), (0, 1, 2)]
    predicted = [(0, (1, (2, 3))), ((0, 1), (2, 3)), (0, (1, 2))]
    scores = unlabeled_f1(list(map(spans_of, predicted)), list(map(spans_of, gold)), [4, 4, 3])
    assert (scores.precision, scores.recall) == (pytest.approx(3 / 5), 1)
    # With the whole sentence: 2 of 3, 2 gold; 3 of 3, 3 gold; 1 of 2, 1 gold.
    expected = {"sentence_drop": (2 / 3 + 1 + 0) / 3, "corpus_drop": 2 * 3 / (5 + 3)}
    expected |= {"sentence_count": (4 / 5 + 1 + 2 / 3) / 3, "corpus_count": 2 * 6 / (8 + 6)}
    assert scores.variants == pytest.approx(expected, abs=1e-7)
    assert (scores.sentence_f1, scores.corpus_f1) == (scores.variants["sentence_drop"], scores.variants["corpus_drop"])
    counted = unlabeled_f1(list(map(spans_of, predicted)), list(map(spans_of, gold)), [4, 4, 3], "palm")
    assert counted.sentence_f1 == scores.variants["sentence_count"]
    counted = unlabeled_f1(list(map(spans_of, predicted)), list(map(spans_of, gold)), [4, 4, 3], sentence_span="count")
    assert counted.corpus_f1 == scores.variants["corpus_count"]
    assert counted.variants == scores.variants


def test_printing_names_the_convention_and_the_four_numbers():
    gold = [[(1, 4), (0, 4)], [(0, 3)]]
    text = str(unlabeled_f1([right_branching(4), right_branching(3)], gold, [4, 3]))
    assert re.findall(r"\d+\.\d\d", text) == "33.33 50.00 73.33 75.00".split()
    assert "2 sentences; " in text and "convention gpst: sentence F1" in text
    changed = str(unlabeled_f1([right_branching(4)], [[(1, 4)]], [4], max_length=10, sentence_span="count"))
    assert "convention gpst with sentence_span=count, max_length=10: " in changed
    assert "sentences of 1 to 10 token(s), sentences without gold spans have recall 1, epsilon 1e-08" in changed


def test_length_limits():
    trees = [right_branching(n) for n in (1, 2, 3, 11)]
    lengths = [1, 2, 3, 11]
    assert unlabeled_f1(trees, trees, lengths).num_sentences == 4
    assert unlabeled_f1(trees, trees, lengths, min_length=2).f1_per_sentence[0] is None
    scores = unlabeled_f1(trees, trees, lengths, "prpn", min_length=3)
    assert (scores.num_sentences, scores.num_skipped) == (1, 3)
    assert scores.f1_per_sentence[2] == pytest.approx(1)
    limits = {"prpn": 3, "compound-pcfg": 3, "compound-pcfg-corpus": 3, "palm": 4}  # which of the lengths they count
    counted = {name: unlabeled_f1(trees, trees, lengths, name).num_sentences for name in limits}
    assert counted == limits
    assert resolve_convention("prpn", max_length=10).name == "prpn"  # unchanged, so it keeps its name
    refused("none of 4 sentences", unlabeled_f1, trees, trees, lengths, min_length=12)


FLAT, RIGHT = [(0, 3)], right_branching(3)
COPIES = [(0, 1), (1, 3), (1, 3), (0, 3)]


COUNTED = [
    (RIGHT, FLAT, {}, 0),
    (FLAT, FLAT, {}, 1),
    (FLAT, RIGHT, {}, 0),
    ([], RIGHT, {"sentence_span": "count"}, 2 / 3),  # the whole sentence counts on both sides, listed or not
    ([(1, 3)], RIGHT, {"sentence_span": "count"}, 1),
    (RIGHT, COPIES, {}, 1),
]


@pytest.mark.parametrize(("predicted", "gold", "changes", "f1"), COUNTED)
def test_what_counts(predicted, gold, changes, f1):
    assert unlabeled_f1([predicted], [gold], [3], **changes).sentence_f1 == pytest.approx(f1, abs=1e-7)


def test_dropping_tokens():
    words = ["``", "I", "think", "so", ",", "''", "she", "said", "."]
    tags = ["``", "PRP", "VBP", "RB", ",", "''", "PRP", "VBD", "."]
    keep = [False, True, True, True, False, False, True, True, False]
    assert keep_words(words, tags, "tag") == keep_words(words, tags, "form") == keep
    spans = [(2, 4), (1, 4), (4, 6), (0, 6), (6, 8), (0, 9)]
    assert drop_tokens(spans, keep) == [(1, 3), (0, 3), (0, 3), (3, 5), (0, 5)]
    bank = Treebank([TreebankSentence(words, tags, [("X", *span) for span in spans], "")], [keep], "")
    scores = score_trees([[(7, 9), (6, 9), (0, 9)]], bank)
    # (3, 4) after removal is one token; gold keeps (1, 3), (0, 3), (3, 5).
    assert (scores.precision, scores.recall) == (1, pytest.approx(1 / 3))
    assert score_baselines(bank)["right"].recall == pytest.approx(1 / 3)


def test_baselines_by_hand():
    gold = [[(1, 3), (1, 4), (0, 4)], [(0, 2), (0, 3)]]
    baselines = branching_baselines(gold, [4, 3])
    expected = {"left": 2 / 6, "right": 2 / 6, "balanced": 0, "binarized gold": 1}
    assert {name: baselines[name].corpus_f1 for name in expected} == pytest.approx(expected)
    # The upper bound, of flat trees.
    upper = branching_baselines([[(0, 5)], [(1, 5), (0, 5), (0, 5)]], [5, 5])["binarized gold"]
    assert (upper.recall, upper.precision) == (1, pytest.approx(1 / 6))
    assert branching_baselines([[]], [3], sentence_span="count")["binarized gold"].recall == 1
    lengths = list(range(3, 30))
    gold = [random_tree(length, random.Random(length)) for length in lengths]
    first, again, other = (branching_baselines(gold, lengths, seed=seed)["random"] for seed in (1, 1, 2))
    assert first == again != other


def reference_f1(predicted, gold, length, sentence_span):
    """Sentence F1 in sets and fractions, as a paper would put it (no epsilon)."""
    predicted, gold = set(predicted), set(gold)
    whole = {(0, length)} if length > 1 else set()
    treat = set.union if sentence_span == "count" else set.difference
    predicted, gold = treat(predicted, whole), treat(gold, whole)
    if not gold:
        return float(not predicted)
    return 2 * len(predicted & gold) / (len(predicted) + len(gold))


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(0, 999), st.integers(0, 999)), min_size=1, max_size=8))
def test_against_the_definition(corpus):
    lengths = [length for length, _, _ in corpus]
    predicted = [random_tree(length, random.Random(seed)) for length, seed, _ in corpus]
    gold = [
        [span for span in random_tree(length, random.Random(seed)) if sum(span) % 2 or span == (0, length)]
        for length, _, seed in corpus
    ]
    for sentence_span in ("drop", "count"):
        scores = unlabeled_f1(predicted, gold, lengths, sentence_span=sentence_span)
        expected = [reference_f1(p, g, n, sentence_span) for p, g, n in zip(predicted, gold, lengths, strict=True)]
        assert scores.f1_per_sentence == pytest.approx(expected, abs=1e-7)
        assert scores.sentence_f1 == pytest.approx(sum(expected) / len(expected), abs=1e-7)
        assert 0 <= scores.corpus_f1 <= 1
        exact = unlabeled_f1(gold, gold, lengths, sentence_span=sentence_span)
        assert exact.sentence_f1 == pytest.approx(1, abs=1e-7)


def test_bad_input_is_named():
    refused(r"\(0, 3\) of the prediction for sentence 1", unlabeled_f1, [[], [(0, 3)]], [[], []], [2, 2])
    refused(r"\(1, 1\) of the gold tree of sentence 0", unlabeled_f1, [[]], [[(1, 1)]], [2])
    refused("convention 'evalb'", unlabeled_f1, [[]], [[]], [2], "evalb")
    refused("sentence_span", resolve_convention, "gpst", sentence_span="keep")
    raised(TypeError, "root", resolve_convention, "gpst", root=True)
