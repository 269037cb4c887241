"""Trees and distances: exact facts about all small trees, the authors' decoders, the ranking loss pair by pair."""

import itertools
import math
import random

import pytest
import torch

from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.recurrent.distances import distances_to_spans, ranking_loss, spans_to_distances
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import validate_spans
from tests.helpers.goldens import read_meta
from tests.helpers.refusals import refused
from tests.reference import distances as reference
from tests.reference.trees import all_binary_trees, spans_of, spans_of_words

CASES = read_meta("onlstm/trees")
DECODERS = ["unbiased", "biased"]


@pytest.mark.parametrize("length", range(1, 8))
def test_every_binary_tree_comes_back(length):
    trees = all_binary_trees(0, length)
    assert len(trees) == math.comb(2 * length - 2, length - 1) // length  # Catalan
    seen = set()
    for tree in trees:
        distances = spans_to_distances(spans_of(tree), length)
        assert distances_to_spans(distances) == spans_of(tree)
        seen.add(tuple(distances))
    assert len(seen) == len(trees)


@pytest.mark.parametrize("length", range(1, 8))
def test_every_order_of_the_gaps_is_a_tree(length):
    trees = set()
    for order in itertools.permutations(range(length - 1)):
        spans = distances_to_spans([99, *order])
        validate_spans(spans, length)
        assert len(spans) == length - 1
        trees.add(tuple(spans))
    assert len(trees) == math.comb(2 * length - 2, length - 1) // length


def test_distances_are_heights():
    assert spans_to_distances([(0, 2), (0, 3), (4, 6), (3, 6), (0, 6)], 6) == [4, 1, 2, 3, 2, 1]
    assert spans_to_distances([], 1) == [1]
    refused("missing", spans_to_distances, [(0, 2)], 3)


def test_long_sentences():
    assert distances_to_spans(range(20000)) == [(0, i) for i in range(2, 20001)]
    spans = random_tree(3000, random.Random(2))
    assert distances_to_spans(spans_to_distances(spans, 3000)) == spans


@pytest.mark.parametrize("case", CASES["gold_tree_to_distance"], ids=lambda case: " ".join(case["leaves"][:3]))
def test_gold_distances_of_the_authors(case):
    spans = spans_of_words(case["binarised"])
    assert spans_to_distances(spans, len(case["leaves"]))[1:] == case["gap_distance"]


@pytest.mark.parametrize("decoder", DECODERS)
def test_trees_of_the_authors(decoder):
    """Of sentences of 1 to many words, with and without equal distances."""
    assert {case["ties"] for case in CASES["decode"]} == {False, True}
    for case in CASES["decode"]:
        assert distances_to_spans(case["depth"], decoder) == spans_of_words(case[decoder])


def test_wide_nodes_are_split_to_the_right():
    spans = [(0, 4), (4, 6), (0, 7)]
    assert distances_to_spans(spans_to_distances(spans, 7)) == binarize_spans(spans, 7)


@pytest.mark.parametrize(
    ("arguments", "message"), [(([],), "no distances"), (([0.0, math.nan],), "Distance 1 is not a number")]
)
def test_bad_distances(arguments, message):
    refused(message, distances_to_spans, *arguments)


class TestRankingLoss:
    @pytest.mark.parametrize("scope", ["sentence", "batch"])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    @pytest.mark.parametrize("sentences", [False, True])
    def test_pair_by_pair(self, scope, reduction, sentences):
        predicted = torch.rand(3, 8, dtype=torch.float64)
        gold = torch.randint(1, 5, (3, 8)).double()
        gold[0, 2] = gold[2, 5:] = math.nan
        ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2], [0] * 8, [0, 1, 1, 1, 1, 2, 2, 2]]) if sentences else None
        mine = ranking_loss(predicted, gold, margin=0.3, scope=scope, reduction=reduction, sentence_ids_BT=ids)
        rows = None if ids is None else ids.tolist()
        own = reference.ranking_loss(predicted.tolist(), gold.tolist(), 0.3, scope, reduction, rows)
        assert mine.item() == pytest.approx(own, rel=1e-12)

    def test_batch_scope_compares_rows(self):
        predicted, gold = torch.rand(4, 6), torch.rand(4, 6)
        order = torch.randperm(6)
        first = ranking_loss(predicted, gold, margin=1.0, scope="batch")
        torch.testing.assert_close(first, ranking_loss(predicted[:, order], gold[:, order], margin=1.0, scope="batch"))
        assert ranking_loss(predicted[:1], gold[:1], margin=1.0, scope="batch") == 0

    def test_right_order_by_the_margin_costs_nothing(self):
        gold = torch.tensor([[3.0, 1.0, 2.0]])
        assert ranking_loss(gold / 2, gold, margin=0.5) == 0
        assert ranking_loss(-gold, gold, margin=0.5) > 0

    def test_nothing_to_learn(self):
        predicted = torch.rand(2, 4, requires_grad=True)
        ranking_loss(predicted, torch.full((2, 4), math.nan), margin=1.0).backward()
        assert not predicted.grad.any()

    @pytest.mark.parametrize(("options", "message"), [({"scope": "row"}, "row")])
    def test_bad_options(self, options, message):
        arguments = {"predicted_BT": torch.zeros(2, 4), "gold_BT": torch.zeros(2, 4), "margin": 1.0, **options}
        refused(message, ranking_loss, **arguments)
