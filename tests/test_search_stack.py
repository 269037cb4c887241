"""Node pools and slot caches against Python lists and the stock cache."""

import random

import pytest
import torch
from transformers.cache_utils import DynamicCache

from hf_synlm.search_stack import NodePool, SlotCache

GEN, COMP = 0, 1


class ListHypothesis:
    """A derivation as Python lists: actions, tokens, and the stack as (start, vector) pairs."""

    def __init__(self) -> None:
        self.actions, self.starts, self.stack, self.generated = [], [], [], 0

    def take(self, action: int, value: float) -> None:
        """Take an action; a composed vector is 2 left + right."""
        if action == GEN:
            self.stack.append((self.generated, value))
            self.generated += 1
        else:
            right, left = self.stack.pop(), self.stack.pop()
            self.stack.append((left[0], 2 * left[1] + right[1]))
        self.actions.append(action)
        self.starts.append(self.stack[-1][0])

    def copy(self) -> "ListHypothesis":
        """A copy that may go another way."""
        other = ListHypothesis()
        other.actions, other.starts = list(self.actions), list(self.starts)
        other.stack, other.generated = list(self.stack), self.generated
        return other


def new_pool(batch: int) -> tuple[NodePool, torch.Tensor, torch.Tensor]:
    """A pool with its first node, that node, and its history."""
    pool = NodePool(batch, {"vector": (1, torch.float32)}, 1, torch.device("cpu"), capacity=2)
    none = torch.full((batch, 1), -1)
    pool.append(type(pool.nodes(none))(none, none, none + 1, none, none, none), vector=torch.zeros(batch, 1, 1))
    return pool, torch.zeros(batch, 1, dtype=torch.long), torch.ones(batch, 1, 1, dtype=torch.bool)


def step(pool: NodePool, nodes: torch.Tensor, history: torch.Tensor, action: int, values: torch.Tensor, start: int):
    """Take one action in all hypotheses [B, K]."""
    if action == GEN:
        made, vector = pool.push(nodes, GEN, values.long(), torch.full_like(nodes, start)), values[..., None]
    else:
        made, left = pool.pop_two(nodes, COMP)
        vector = 2 * pool.feature("vector", left) + pool.feature("vector", nodes)
    first = pool.append(made, vector=vector)
    keys = vector.view(len(nodes), 1, -1, 1)
    pool.caches[0].update(keys, -keys, 0)
    own = torch.eye(nodes.shape[1], dtype=torch.bool).expand(len(nodes), -1, -1)
    return torch.arange(first, pool.size).expand_as(nodes), torch.cat([history, own], 2)


@pytest.mark.parametrize("compact", [False, True])
def test_branching_derivations_match_lists(compact: bool) -> None:
    """Hypotheses that branch, are dropped and reordered read out as if each had lists of its own."""
    rng, batch, width = random.Random(3), 3, 4
    pool, nodes, history = new_pool(batch)
    keys = torch.zeros(batch, 1, 1, 1)
    pool.caches[0].update(keys, keys, 0)
    nodes, history = nodes.expand(-1, width), history.expand(-1, width, -1)
    lists = [[ListHypothesis() for _ in range(width)] for _ in range(batch)]
    for _ in range(25):
        depth = min(len(h.stack) for row in lists for h in row)
        action = GEN if depth < 2 or rng.random() < 0.5 else COMP
        picks = torch.tensor([[rng.randrange(width) for _ in range(width)] for _ in range(batch)])
        nodes = nodes.gather(1, picks)
        history = history.gather(1, picks[..., None].expand(-1, -1, history.shape[2]))
        lists = [[lists[b][k].copy() for k in picks[b].tolist()] for b in range(batch)]
        if compact:
            keep = history.any(1)
            index, renumber = pool.compact(keep, int(keep.sum(1).max()))
            nodes = renumber.gather(1, nodes)
            history = history.gather(2, index[:, None].expand(-1, width, -1))
        values = torch.tensor([[float(rng.randrange(9)) for _ in range(width)] for _ in range(batch)])
        nodes, history = step(pool, nodes, history, action, values, lists[0][0].generated)
        for b in range(batch):
            for k in range(width):
                lists[b][k].take(action, float(values[b, k]))
    read = pool.derivations(history)
    for b in range(batch):
        for k in range(width):
            expected = lists[b][k]
            assert read.action[b, k].tolist() == expected.actions
            assert read.start[b, k].tolist() == expected.starts
            stack, node = [], nodes[b, k]
            while node >= 0:
                stack.append(float(pool.features["vector"][b, node]))
                assert float(pool.caches[0].layers[0].keys[b, 0, node]) == stack[-1]
                node = pool.field("below")[b, node]
            assert stack[::-1] == [vector for _, vector in expected.stack]
            assert int(pool.field("depth", nodes)[b, k]) == len(expected.stack)
    if compact:
        assert pool.size < 25 * width


def test_derivations_are_padded() -> None:
    """Shorter derivations, and hypotheses that do not exist, end in -1."""
    pool, nodes, history = new_pool(1)
    nodes, history = step(pool, nodes, history, GEN, torch.tensor([[5.0]]), 0)
    assert pool.derivations(torch.zeros(1, 2, pool.size, dtype=torch.bool)).action.shape == (1, 2, 0)
    read = pool.derivations(torch.cat([history, torch.zeros_like(history)], 1))
    assert read.action.tolist() == [[[GEN], [-1]]]
    assert read.token.tolist() == [[[5], [-1]]]


def test_select_rows_and_truncate() -> None:
    """Rows are copied with all that belongs to them, and the newest nodes can be forgotten."""
    pool, nodes, history = new_pool(2)
    keys = torch.zeros(2, 1, 1, 1)
    pool.caches[0].update(keys, keys, 0)
    nodes, history = step(pool, nodes, history, GEN, torch.tensor([[5.0], [6.0]]), 0)
    pool.num_context = torch.tensor([3, 4])
    pool.select_rows(torch.tensor([1, 1, 0]))
    assert pool.batch_size == 3 and pool.num_context.tolist() == [4, 4, 3]
    assert pool.field("token")[:, 1].tolist() == [6, 6, 5]
    assert pool.caches[0].layers[0].keys[:, 0, 1, 0].tolist() == [6, 6, 5]
    pool.truncate(1)
    assert pool.size == 1 and pool.caches[0].get_seq_length() == 1


def test_slot_cache_equals_dynamic_cache() -> None:
    """Appending gives the keys and values of the stock cache, through several doublings."""
    ours, stock = SlotCache(), DynamicCache()
    for rows in (1, 40, 3, 100, 2):
        keys, values = torch.randn(2, 3, rows, 4), torch.randn(2, 3, rows, 4)
        for layer in range(2):
            mine, theirs = ours.update(keys, values, layer), stock.update(keys, values, layer)
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    order = torch.tensor([1, 0, 1])
    ours.reorder_cache(order), stock.reorder_cache(order)
    assert torch.equal(ours.layers[1].values, stock.layers[1].values)
    keys = torch.randn(3, 3, 5, 4)
    assert torch.equal(ours.update(keys, keys, 0)[0], stock.update(keys, keys, 0)[0])
