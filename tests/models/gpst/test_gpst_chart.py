"""Chart plans against a replay of the merges, and against exact facts."""

import random

import pytest
import torch

from hf_synlm.evaluation.trees.baseline_trees import random_tree
from hf_synlm.models.gpst.chart import best_splits, induced_trees, mbr_splits, plan_chart, plan_trees
from tests.helpers.refusals import refused
from tests.reference.inside_outside import replay_chart


def plan_cells(plan, row=0, shift=0):
    """(splits by span, levels by span) of the inner cells of one row."""
    levels = {}
    for number, (first, last, _) in enumerate(plan.levels):
        levels.update(dict.fromkeys(range(first, last), number + 1))
    splits, by_span = {}, {}
    for cell in range(plan.num_cells - plan.num_leaves):
        index = plan.num_leaves + cell
        if int(plan.context_N[index]) != row:
            continue
        width = next(w for first, last, w in plan.levels if first <= cell < last)
        span = int(plan.start_N[index]) - shift, int(plan.end_N[index]) - shift
        splits[span] = [int(k) - shift for k in plan.split_CM[cell, :width]]
        by_span[span] = levels[cell]
        for m, k in enumerate(splits[span]):
            for child, expected in ((plan.left_CM, (span[0], k)), (plan.right_CM, (k, span[1]))):
                child = int(child[cell, m])
                assert (int(plan.start_N[child]) - shift, int(plan.end_N[child]) - shift) == expected
    return splits, by_span


@pytest.mark.parametrize("window", [1, 2, 3, 4])
def test_chart_equals_replayed_merges(window):
    generator = random.Random(window)
    for _ in range(120):
        n = generator.randint(1, 24)
        order = generator.sample(range(n - 1), n - 1)
        plan = plan_chart(
            torch.tensor([order], dtype=torch.long).view(1, n - 1), torch.ones(1, n, dtype=torch.long), window
        )
        splits, levels = plan_cells(plan)
        expected_splits, expected_levels = replay_chart(order, window)
        assert {s: sorted(k) for s, k in splits.items()} == {s: sorted(k) for s, k in expected_splits.items()}
        assert levels == expected_levels
        assert all(splits[span] == sorted(splits[span]) for span in splits)


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_wide_window_is_the_full_chart(n):
    plan = plan_chart(torch.randperm(n - 1)[None], torch.ones(1, n, dtype=torch.long), n)
    splits, _ = plan_cells(plan)
    assert splits == {(i, j): list(range(i + 1, j)) for i in range(n) for j in range(i + 2, n + 1)}


def test_size_bounds_of_window_two():
    n = 200
    plan = plan_chart(torch.randperm(n - 1)[None], torch.ones(1, n, dtype=torch.long), 2)
    assert plan.num_cells - n <= 3 * n - 5
    assert sum((last - first) * width for first, last, width in plan.levels) <= 5 * n
    assert all(width == min(level + 1, 2) for level, (_, _, width) in enumerate(plan.levels))


def chart_trees(splits, weights, span):
    """All trees of a chart below a span: (probability, spans)."""
    if span[1] - span[0] == 1:
        return [(1.0, frozenset())]
    return [
        (weight * left * right, first | second | {span})
        for k, weight in zip(splits[span], weights[span], strict=True)
        for left, first in chart_trees(splits, weights, (span[0], k))
        for right, second in chart_trees(splits, weights, (k, span[1]))
    ]


@pytest.mark.parametrize("window", [2, 3, 6])
def test_mbr_tree_has_the_most_expected_spans_of_all_trees_of_the_chart(window):
    generator = random.Random(window)
    torch.manual_seed(window)
    rows = [generator.randint(1, 8) for _ in range(20)]
    sentence_ids = torch.tensor([[1] * n + [0] * (8 - n) for n in rows])
    plan = plan_chart(torch.stack([torch.randperm(7) for _ in rows]), sentence_ids, window)
    scores = 2 * torch.randn(plan.left_CM.shape)
    for first, last, width in plan.levels:
        scores[first:last, width:] = -torch.inf
    nodes = induced_trees(plan, mbr_splits(plan, scores))
    spans = list(zip(nodes.start_A.tolist(), nodes.end_A.tolist(), strict=True))
    for row, n in enumerate(rows):
        splits, _ = plan_cells(plan, row)
        cells = {
            (int(plan.start_N[index]), int(plan.end_N[index])): scores[index - plan.num_leaves].softmax(0).tolist()
            for index in range(plan.num_leaves, plan.num_cells)
            if int(plan.context_N[index]) == row
        }
        weights = {span: values[: len(splits[span])] for span, values in cells.items()}
        trees = chart_trees(splits, weights, (0, n))
        assert sum(p for p, _ in trees) == pytest.approx(1)
        expected = {tree: sum(p * len(tree & other) for p, other in trees) for _, tree in trees}
        found = {span for span, of in zip(spans, nodes.context_A.tolist(), strict=True) if of == row}
        assert expected[frozenset(s for s in found if s[1] - s[0] > 1)] == pytest.approx(max(expected.values()))


def test_given_trees_come_back():
    generator = random.Random(3)
    spans, lengths = [], [7, 1, 12, 2]
    sentence_ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    for row, n in enumerate(lengths):
        spans.append(random_tree(n, generator))
        sentence_ids[row, :n] = 1
    plan = plan_trees(spans, sentence_ids)
    nodes = induced_trees(plan, best_splits(plan, torch.zeros(plan.left_CM.shape)))
    for row, n in enumerate(lengths):
        mine = nodes.context_A == row
        listed = list(zip(nodes.start_A[mine].tolist(), nodes.end_A[mine].tolist(), strict=True))
        assert len(listed) == 2 * n - 1
        assert listed == sorted(listed, key=lambda span: (span[1], -span[0]))
        assert sorted(span for span in listed if span[1] - span[0] > 1) == sorted(spans[row])


BAD_TREES = [
    ([[(0, 2), (1, 3), (0, 3)]], "cross"),
    ([[(0, 2)]], "inner nodes"),
    ([[(0, 2), (2, 4), (0, 4)]], "does not fit"),
    ([[(0, 3)]], "not the union"),
]


@pytest.mark.parametrize(("spans", "message"), BAD_TREES)
def test_bad_trees_are_named(spans, message):
    refused(message, plan_trees, spans, torch.ones(1, 3, dtype=torch.long))


def test_bad_orders_are_named():
    refused("shape", plan_chart, torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.long), 2)
