"""Node pools against Python lists."""

import random

import pytest
import torch

from hf_synlm.search.stack import Levels, NodePool

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


def new_pool(batch: int) -> tuple[NodePool, torch.Tensor]:
    """A pool with its first node, and that node."""
    features = {"vector": (1, torch.float32), "layer": (4, torch.float32)}
    pool = NodePool(batch, features, torch.device("cpu"), capacity=2)
    none = torch.full((batch, 1), -1)
    pool.append(type(pool.nodes(none))(none, none, none + 1, none, none, none), vector=torch.zeros(batch, 1, 1))
    return pool, torch.zeros(batch, 1, dtype=torch.long)


def step(pool: NodePool, nodes: torch.Tensor, action: int, values: torch.Tensor, start: int) -> torch.Tensor:
    """Take one action in all hypotheses [B, K]."""
    if action == GEN:
        made, vector = pool.push(nodes, GEN, values.long(), torch.full_like(nodes, start)), values[..., None]
    else:
        made, _, left = pool.pop_chain(nodes, COMP, Levels([nodes.shape[1]], nodes.device))
        vector = 2 * pool.feature("vector", left) + pool.feature("vector", nodes)
    first = pool.append(made, vector=vector)
    return torch.arange(first, pool.size).expand_as(nodes)


@pytest.mark.parametrize("compact", [False, True])
def test_branching_derivations_match_lists(compact: bool) -> None:
    """Hypotheses that branch, are dropped and reordered read out as if each had lists of its own."""
    rng, batch, width = random.Random(3), 3, 4
    pool, nodes = new_pool(batch)
    nodes = nodes.expand(-1, width)
    lists = [[ListHypothesis() for _ in range(width)] for _ in range(batch)]
    for count in range(1, 41):
        depth = min(len(h.stack) for row in lists for h in row)
        action = GEN if depth < 2 or rng.random() < 0.5 else COMP
        picks = torch.tensor([[rng.randrange(width) for _ in range(width)] for _ in range(batch)])
        nodes = nodes.gather(1, picks)
        lists = [[lists[b][k].copy() for k in picks[b].tolist()] for b in range(batch)]
        if compact:
            keep = pool.in_use(nodes, torch.ones_like(nodes, dtype=torch.bool), count)
            nodes = pool.compact(keep, int(keep.sum(1).max()), nodes)
        values = torch.tensor([[float(rng.randrange(9)) for _ in range(width)] for _ in range(batch)])
        nodes = step(pool, nodes, action, values, lists[0][0].generated)
        for b in range(batch):
            for k in range(width):
                lists[b][k].take(action, float(values[b, k]))
    read, paths = pool.derivations(nodes), pool.paths(nodes, 43)
    for b in range(batch):
        for k in range(width):
            expected = lists[b][k]
            assert read.action[b, k].tolist() == expected.actions
            assert read.start[b, k].tolist() == expected.starts
            assert paths[b, k, :3].tolist() == [-1, -1, 0] and (paths[b, k, 3:] > 0).all()
            stack, node = [], nodes[b, k]
            while node >= 0:
                stack.append(float(pool.features["vector"][b, node]))
                node = pool.field("below")[b, node]
            assert stack[::-1] == [vector for _, vector in expected.stack]
            assert int(pool.field("depth", nodes)[b, k]) == len(expected.stack)
    assert (pool.size < 40 * width) == compact


def test_levels_are_split_by_lines() -> None:
    """Groups of lines hold all rows, each with its own lines and levels."""
    levels = Levels([5, 4, 4, 1], torch.device("cpu"))
    table = levels.lines(torch.arange(14)[None], -1)[0]
    for width in (1, 2, 3, 5, 9):
        found = []
        for lines, rows, part in levels.split(width):
            group = part.lines(torch.arange(14)[rows][None], -1)[0]
            assert len(group) <= width
            expected = table[lines]
            assert torch.equal(group, expected[:, : group.shape[1]]) and (expected[:, group.shape[1] :] == -1).all()
            found += torch.arange(14)[rows].tolist()
        assert sorted(found) == list(range(14))
