"""Averages of trees: the authors' results, a search through all trees, and by hand."""

import gzip
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import hf_synlm
from hf_synlm.data.parsed import Hypothesis, ParsedSentence, as_treebank_sentence, posteriors, read_parse
from hf_synlm.data.treebank import sentence_to_brackets
from hf_synlm.evaluation.trees.consensus import average_parses, average_trees, best_binary_tree
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.training.tasks.inference_network import BinaryTreeCRF
from hf_synlm.trees.spans import right_branching
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer
from tests.reference.trees import all_binary_trees, all_trees, spans_of

GOLDENS = Path(__file__).parents[1] / "goldens" / "consensus" / "cases.json.gz"


def test_the_authors_trees():
    cases = json.loads(gzip.decompress(GOLDENS.read_bytes()))
    assert len(cases) == 200
    for case in cases:
        found = hf_synlm.average_trees(case["trees"], case["weights"])
        assert sorted(map(list, found.spans)) == case["average"]
        assert found.score == case["score"]
        assert found.expected_f1 == pytest.approx(case["expected_f1"], abs=1e-12)
        # Equal weights change nothing, rounded as they may be.
        if set(case["weights"]) == {1}:
            assert average_trees(case["trees"], [0.1] * len(case["trees"])).spans == found.spans


def f1(tree, other):
    """F1 of trees in post-order, without the whole sentence."""
    first, second = set(tree) - {tree[-1]}, set(other) - {tree[-1]}
    return 2 * len(first & second) / (len(first) + len(second)) if first or second else 1.0


@st.composite
def some_trees(draw):
    trees = [spans_of(tree) for tree in all_binary_trees(0, draw(st.integers(2, 7)))]
    chosen = draw(st.lists(st.sampled_from(trees), min_size=1, max_size=5))
    return trees, chosen, draw(st.lists(st.integers(1, 3), min_size=len(chosen), max_size=len(chosen)))


@settings(max_examples=60, deadline=None)
@given(some_trees())
def test_no_binary_tree_has_more_votes(drawn):
    """Of equally good trees it is the first one by splits, those of the left part before those of the right."""
    trees, chosen, weights = drawn

    def score(tree):
        return sum(weight * len(set(tree) & set(other)) for other, weight in zip(chosen, weights, strict=True))

    found = average_trees(chosen, weights)
    best = max(trees, key=score)
    assert list(found.spans) == best and found.score == score(best) - sum(weights)
    expected = [np.average([f1(tree, other) for other in chosen], weights=weights) for tree in trees]
    assert found.expected_f1 == pytest.approx(max(expected), abs=1e-12)
    assert list(average_trees([chosen[0]] * 3).spans) == chosen[0]


def test_average_of_a_posterior_is_the_tree_of_minimum_bayes_risk():
    """Of a distribution over all binary trees, by enumeration and by span marginals; and of a parser's beam."""
    trees = [spans_of(tree) for tree in all_binary_trees(0, 6)]
    for seed in range(5):
        scores = torch.randn(1, 6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        scores.requires_grad_()
        crf = BinaryTreeCRF(scores, torch.tensor([6]))
        tables = torch.zeros(1, len(trees), 6, 6, dtype=torch.bool)
        tables[..., range(6), range(6)] = True
        for number, tree in enumerate(trees):
            for i, j in tree:
                tables[0, number, i, j - 1] = True
        weights = crf.log_prob(tables)[0].exp().tolist()
        assert sum(weights) == pytest.approx(1)
        found = average_trees(trees, weights)
        (marginals,) = torch.autograd.grad(crf.log_partition.sum(), scores)
        spans = np.zeros((7, 7))
        spans[:6, 1:] = marginals[0].numpy()
        assert best_binary_tree(spans) == list(found.spans)
        best = max(trees, key=lambda tree: np.average([f1(tree, other) for other in trees], weights=weights))
        assert list(found.spans) == best

    beam = parse_sentences(*model_and_tokenizer("urnng"), ["We ask for peace"], num_beams=30, num_return_sequences=14)
    shares = posteriors(beam[0])
    assert len(shares) == 5, "all binary trees"
    (parsed,) = average_parses({"the beam": beam})
    trees = [tree.spans for tree in beam[0].hypotheses]
    best = max(trees, key=lambda tree: np.average([f1(tree, other) for other in trees], weights=shares))
    assert set(parsed.hypotheses[0].spans) == set(best) and parsed.word_log_probs == beam[0].word_log_probs
    assert average_trees(beam[0].hypotheses, [math.exp(t.log_prob) for t in beam[0].hypotheses]).spans == tuple(best)


def test_wide_constituents_vote_as_right_branching_ones_or_for_themselves():
    flat, left = [(0, 4)], [(0, 2), (0, 3), (0, 4)]
    assert list(average_trees([flat, flat, left]).spans) == right_branching(4)
    alone = average_trees([flat, flat, left], binarize=False)
    assert list(alone.spans) == left and alone.score == 2 and alone.expected_f1 == pytest.approx(1 / 3)
    for tree in all_trees(0, 5):
        found = average_trees([spans_of(tree)])
        assert found.expected_f1 == 1 and set(spans_of(tree)) <= set(found.spans)


def test_labels_are_those_of_most_trees_with_the_span():
    lines = [
        "(S (NP the cat) (VP (V sat) (ADVP down)))",
        "(S (NP the cat) (VP sat down))",
        "(FRAG (X the cat) sat down)",
    ]
    parses = [[read_parse(line, "labeled")] for line in lines]
    (found,) = average_parses({str(number): run for number, run in enumerate(parses)})
    # Two of three trees have a constituent (sat down); the third has the span by making its tree binary.
    assert found.brackets() == "(S (NP the cat) (VP sat down))"
    weighted = average_trees([run[0].hypotheses[0] for run in parses], [1, 1, 3])
    assert ParsedSentence(found.words, (weighted,)).brackets() == "(FRAG (X the cat) sat down)"
    assert average_parses({"a": [read_parse("(S (VP (V go)))", "labeled")]})[0].brackets() == "(S (VP (V go)))"
    # One tree without labels: the average has none, and is binary.
    mixed = average_parses({"a": parses[2], "b": [read_parse("((the cat) (sat down))")]})
    assert mixed[0].brackets() == "((the cat) (sat down))"


def test_runs_share_one_vote_and_may_lack_trees():
    words = tuple("abc")
    left, right = ((0, 2), (0, 3)), ((1, 3), (0, 3))
    one, none = ParsedSentence(words, (Hypothesis(right),)), ParsedSentence(())
    beam = ParsedSentence(words, tuple(Hypothesis(tree, None, math.log(p)) for tree, p in ((left, 0.4), (right, 0.3))))
    copies = ParsedSentence(("A", "b", "c"), (Hypothesis(left), Hypothesis(right)))
    for runs, expected in (([beam], left), ([beam, one], right), ([copies, beam], left), ([none, beam], left)):
        (found,) = average_parses({str(number): [run] for number, run in enumerate(runs)})
        assert found.hypotheses[0].spans == expected
    assert average_parses({"a": [none, one], "b": [none, none]}) == [none, *average_parses({"a": [one]})]


def test_what_cannot_be_averaged():
    left, crossing = [(0, 2), (0, 3)], [(0, 2), (1, 3), (0, 3)]
    refused("Give trees of one sentence", average_trees, [])
    refused(r"trees have \[2, 3\] words", average_trees, [[(0, 2)], left])
    refused(r"tree 1: spans \(0, 2\) and \(1, 3\) cross", average_trees, [left, crossing])
    refused("tree 0: .* cross", average_trees, [[(0, 2), (1, 3)]])
    for weights, said in (([1, 2], "for 1 trees"), ([-1], "0 or more"), ([math.nan], "finite"), ([0], "for 1 trees")):
        refused(said, average_trees, [[(0, 2)]], weights)


def test_runs_that_do_not_fit():
    one, other = (ParsedSentence(words, (Hypothesis(((0, 2),)),)) for words in (("a", "b"), ("a", "c")))
    refused("sentence 2 is 'a c' in y, but 'a b' in x", average_parses, {"x": [one, one], "y": [one, other]})
    refused("have different numbers of sentences: {'x': 1, 'y': 2}", average_parses, {"x": [one], "y": [one, one]})


def test_parses_become_sentences_of_a_treebank():
    for line, style, expected in (
        ("((the cat) (sat -LRB-))", "unlabeled", "(X (X (X the) (X cat)) (X (X sat) (X -LRB-)))"),
        ("(S (NP the cat) (VP sat))", "labeled", "(S (NP (X the) (X cat)) (VP (X sat)))"),
        ("go", "unlabeled", "(X (X go))"),
    ):
        assert sentence_to_brackets(as_treebank_sentence(read_parse(line, style), "file:1")) == expected
