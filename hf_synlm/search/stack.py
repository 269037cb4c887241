# SPDX-License-Identifier: Apache-2.0
"""Batched stacks whose entries are node ids: hypotheses branch without copying a vector.

A *node* is the state of a derivation after one action. It is also the entry that this action put on the stack, and
one entry of the key-value caches of the layers that read the action sequence. A hypothesis is the id of its last node;
the stack below it and the derivation before it are chains of ids. A node is written once and never changes. The slow
and obvious version is `ListHypothesis` in tests/search/test_search_stack.py.

Shapes: B sentences, N nodes, R new nodes of one step, C actions in a row, P rows of C levels, K hypotheses, A actions,
D features of a vector.
"""

import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

_FIELDS = ("predecessor", "below", "depth", "action", "token", "start")


class Nodes(NamedTuple):
    """Integer fields of some nodes, each [B, R].

    Fields:
        predecessor: node before the action; -1 at the first node.
        below: node under this one on the stack; -1 at the bottom.
        depth: number of stack entries, this one included; 0 before the first action.
        action: id of the action that made the node; -1 for the nodes that stand before the derivation.
        token: token id that the action generated; -1 = no token.
        start: first token covered by the top of the stack; -1 for the nodes that stand before the derivation.
    """

    predecessor: torch.Tensor
    below: torch.Tensor
    depth: torch.Tensor
    action: torch.Tensor
    token: torch.Tensor
    start: torch.Tensor


class Levels:
    """Rows of C levels, one level after the other; every level has as many rows as the one before it, or fewer.

    Row r of level c and row r of level c + 1 belong to one line, of at most C rows.
    """

    def __init__(self, sizes: list[int], device: torch.device) -> None:
        self.sizes, self.device = sizes, device

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """First and last + 1 row of every level."""
        ends = list(itertools.accumulate(self.sizes))
        return list(zip([0, *ends], ends, strict=False))

    @functools.cached_property
    def place(self) -> torch.Tensor:
        """Number of every row [P] in the table of all lines [R, C], flattened."""
        count = len(self.sizes)
        return torch.cat([torch.arange(c, c + r * count, count, device=self.device) for c, r in enumerate(self.sizes)])

    @functools.cached_property
    def line(self) -> torch.Tensor:
        """Number of the line of every row [P]."""
        return self.place // len(self.sizes)

    @functools.cached_property
    def level(self) -> torch.Tensor:
        """Level of every row [P]."""
        return self.place % len(self.sizes)

    @functools.cached_property
    def row(self) -> torch.Tensor:
        """Row at every place of the table, flattened [R C]; -1 where a line has ended."""
        number = torch.arange(sum(self.sizes), device=self.device)
        return self.place.new_full((self.sizes[0] * len(self.sizes),), -1).scatter_(0, self.place, number)

    def split(self, width: int) -> Iterator[tuple[slice, slice | torch.Tensor, "Levels"]]:
        """Groups of at most `width` lines: which lines, which rows, and their levels."""
        if width >= self.sizes[0]:
            yield slice(None), slice(None), self
            return
        for first in range(0, self.sizes[0], width):
            last = min(first + width, self.sizes[0])
            rows = [
                torch.arange(a + first, min(a + last, b), device=self.device) for a, b in self.bounds if a + first < b
            ]
            yield slice(first, last), torch.cat(rows), Levels([len(level) for level in rows], self.device)

    def lines(self, values: torch.Tensor, empty: float) -> torch.Tensor:
        """Table [B, R, C] of values of the rows [B, P], `empty` where a line has ended."""
        table = values.index_select(1, self.row.clamp(min=0)).masked_fill_(self.row < 0, empty)
        return table.view(len(values), -1, len(self.sizes))


def grown(tensor: torch.Tensor, dim: int, capacity: int) -> torch.Tensor:
    """Copy of `tensor` with `capacity` places along `dim`, zeros after the old content."""
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_zeros(shape)
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown


class NodePool:
    """All nodes of B sentences, with the vectors that a model attaches to them, keys and values among them.

    Every step appends the same number R of slots to every sentence, so that a range of slots is a slice. Slots that a
    sentence does not need hold nodes to which no hypothesis points. `features` gives width and dtype of each vector;
    `links` and `counts` name further integer fields, the links being ids of nodes (-1 = no node) of the same
    derivation.
    """

    def __init__(
        self,
        batch_size: int,
        features: dict[str, tuple[int, torch.dtype]],
        device: torch.device,
        capacity: int = 64,
        links: tuple[str, ...] = (),
        counts: tuple[str, ...] = (),
    ) -> None:
        self.size = self._needed = 0
        self.names = (*_FIELDS, "length", *links, *counts)
        self._links = [self.names.index(name) for name in ("predecessor", "below", *links)]
        self.fields = torch.zeros(batch_size, capacity, len(self.names), dtype=torch.long, device=device)
        self.features = {
            name: torch.zeros(batch_size, capacity, width, dtype=dtype, device=device)
            for name, (width, dtype) in features.items()
        }
        # How the layers multiply that compute the nodes.
        self.products: AbstractContextManager = nullcontext()
        # What the next call of the layers computes, too.
        self.waiting: list[torch.Tensor] = []
        # Whether the caller told where words end.
        self.told_ends = False
        # Place of the first node of every sentence in flat tables.
        self._first, self._capacity = torch.arange(batch_size, device=device) * capacity, capacity
        # Tokens before the derivation [B]: positions of its own tokens count from here.
        self.num_context = torch.zeros(batch_size, dtype=torch.long, device=device)
        # Features of these tokens [B, C, D], if every node of a sentence attends to them.
        self.context: dict[str, torch.Tensor] = {}

    @property
    def batch_size(self) -> int:
        """Number of sentences B."""
        return self.fields.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.fields.device

    def reserve(self, count: int) -> int:
        """Make room for `count` nodes after the last one of every sentence; returns the id of the first one."""
        first, self.size = self.size, self.size + count
        capacity = self.fields.shape[1]
        if self.size > capacity:
            capacity = max(self.size, 2 * capacity)
            self.fields = grown(self.fields, 1, capacity)
            self.features = {name: grown(value, 1, capacity) for name, value in self.features.items()}
        return first

    def append(
        self, nodes: Nodes, *further: torch.Tensor, length: torch.Tensor | None = None, **features: torch.Tensor
    ) -> torch.Tensor:
        """Write R nodes after the last one of every sentence; returns their ids [B, R].

        `further` are their links and counts in the order of their names; `length` [B, R] is the number of actions of
        their derivations, None = one more than that of the predecessor. Features that are left out are not set.
        """
        first = self.reserve(nodes.depth.shape[1])
        if length is None:
            # Nodes before the start of the derivation have no actions.
            length = torch.where(nodes.start < 0, 0, self.field("length", nodes.predecessor) + 1)
        torch.stack((*nodes, length, *further), -1, out=self.fields[:, first : self.size])
        for name, value in features.items():
            self.features[name][:, first : self.size] = value
        return torch.arange(first, self.size, device=self.device).expand(self.batch_size, -1)

    def nodes(self, ids: torch.Tensor) -> Nodes:
        """Fields of the nodes `ids` [B, R]; negative ids give the fields of node 0."""
        return Nodes(*self._rows(self.fields, ids)[..., : len(_FIELDS)].unbind(-1))

    def field(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """One field of the nodes `ids` [B, R], or of all nodes [B, N]."""
        column = self.fields[:, : self.size, self.names.index(name)]
        return column if ids is None else column.gather(1, ids.clamp(min=0))

    def feature(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Vectors [B, ..., D] of the nodes `ids` [B, ...]."""
        return self._rows(self.features[name], ids)

    def _rows(self, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Rows [B, ..., D] of a table [B, N, D] at the nodes `ids` [B, ...]."""
        return table.flatten(0, 1).index_select(0, self.places(ids).flatten()).view(*ids.shape, table.shape[2])

    def push(self, ids: torch.Tensor, action: int, tokens: torch.Tensor, start: torch.Tensor) -> Nodes:
        """Fields of the nodes that put one more entry on the stacks `ids` [B, R]; they are not yet in the pool."""
        depth = self.field("depth", ids)
        below = torch.where(depth > 0, ids, -1)
        return Nodes(ids, below, depth + 1, torch.full_like(ids, action), tokens, start)

    def pop_chain(self, ids: torch.Tensor, action: int, levels: Levels) -> tuple[Nodes, torch.Tensor, torch.Tensor]:
        """Nodes of some actions in a row, each of which puts one entry in the place of the two top ones.

        `ids` [B, R] are the states before the actions, `levels` how many of them take a first action, a second one, ...
        Returns fields of the nodes [B, P], all first actions before all second ones, for the next slots of the pool;
        lengths of their derivations; and the ids of the left children. Where the stack holds too few entries all are
        arbitrary.
        """
        left = self.follow("below", ids, len(levels.sizes) + 1)[..., 1:].flatten(1).index_select(1, levels.place)
        made = self.nodes(left)
        later = levels.place[ids.shape[1] :]
        # The node before that of a later action belongs to the action before it.
        before = (self.size + levels.row.index_select(0, later - 1)).expand(len(ids), -1)
        before = torch.cat([ids, before], 1)
        length = self.field("length", ids).index_select(1, levels.line) + levels.level + 1
        same, none = torch.full_like(before, action), torch.full_like(before, -1)
        return made._replace(predecessor=before, action=same, token=none), length, left

    def select_rows(self, index: torch.Tensor) -> None:
        """Keep the sentences `index` [B'], in that order; a sentence may be kept more than once."""
        self.fields = self.fields.index_select(0, index)
        self.num_context = self.num_context.index_select(0, index)
        self.features = {name: value.index_select(0, index) for name, value in self.features.items()}
        self.context = {name: value.index_select(0, index) for name, value in self.context.items()}

    def truncate(self, size: int) -> None:
        """Forget the nodes from `size` on; no node that stays may point to them."""
        self.size = size

    def places(self, ids: torch.Tensor) -> torch.Tensor:
        """Indices of the nodes `ids` [B, ...] in tables whose first two dimensions are flattened; node 0 where < 0."""
        if self._first.shape[0] != self.batch_size or self._capacity != self.fields.shape[1]:
            self._capacity = self.fields.shape[1]
            self._first = torch.arange(self.batch_size, device=ids.device) * self._capacity
        return ids.clamp(min=0) + self._first.view(-1, *[1] * (ids.dim() - 1))

    def follow(self, link: str, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Nodes [B, R, count] along a link ("predecessor" or "below"), `ids` first; node 0 behind the end.

        Every step doubles the list.
        """
        jump, found = self.field(link).clamp(min=0), ids.clamp(min=0)[..., None]
        while found.shape[2] < count:
            further = jump.gather(1, found.flatten(1)).view_as(found)
            found = torch.cat([found, further[..., : count - found.shape[2]]], 2)
            if found.shape[2] < count:
                jump = jump.gather(1, jump)
        return found

    def paths(self, ids: torch.Tensor, length: int) -> torch.Tensor:
        """The last `length` nodes of derivations [B, R, length], `ids` last; -1 before the first node."""
        listed = self.follow("predecessor", ids, length).flip(2)
        # Node 0 is the first of all derivations: what stands before it repeats it.
        listed[..., :-1].masked_fill_(listed[..., 1:] == 0, -1)
        return listed

    @property
    def is_full(self) -> bool:
        """Whether so many nodes were added since `compact` that it may find more than half of them unused."""
        return self.size > 2 * self._needed + 32

    def in_use(self, ids: torch.Tensor, alive: torch.Tensor, length: int) -> torch.Tensor:
        """Nodes [B, N] of the derivations `ids` [B, R] that are `alive` [B, R] and have at most `length` nodes."""
        path = self.paths(ids, length)
        path = torch.where(alive[..., None] & (path >= 0), path, self.size)
        used = torch.zeros(len(ids), self.size + 1, dtype=torch.bool, device=ids.device)
        return used.scatter_(1, path.flatten(1), True)[:, :-1]

    def compact(self, keep: torch.Tensor, count: int, ids: torch.Tensor) -> torch.Tensor:
        """Keep some nodes [B, N] of every sentence and renumber them in order, once fewer than half are needed.

        The nodes that kept ones link to must be kept, too. `count` is the largest number of nodes kept in a sentence;
        the others get padding slots. Returns the new ids of the nodes `ids`; arbitrary if they were dropped.
        """
        count = self._needed = max(1, count)
        if not self.is_full:
            return ids
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        renumber = (keep.long().cumsum(1) - 1).clamp(min=0)
        fields = self.fields.gather(1, index[..., None].expand(-1, -1, len(self.names)))
        for column in self._links:
            old = fields[..., column]
            fields[..., column] = torch.where(old < 0, old, renumber.gather(1, old.clamp(min=0)))
        self.fields[:, :count] = fields
        for name, value in self.features.items():
            value[:, :count] = self.feature(name, index)
        self.size = count
        return renumber.gather(1, ids)

    def derivations(self, ids: torch.Tensor, exists: torch.Tensor | None = None) -> Nodes:
        """Fields [B, K, A] of the nodes of each derivation, oldest first, -1 after its end.

        `ids` [B, K] are the last nodes. Nodes before the derivation are left out. `predecessor` and `below` are ids of
        this pool.
        """
        length = self.field("length", ids)
        length = length if exists is None else length.masked_fill(~exists, 0)
        longest = int(length.max()) if length.numel() else 0
        column = torch.arange(longest, device=ids.device)
        index = (column + longest - length[..., None]).clamp(max=max(0, longest - 1))
        path = self.paths(ids, longest).gather(2, index) if longest else ids[..., None][..., :0]
        flat = self.nodes(path.flatten(1))
        beyond = column >= length[..., None]
        return Nodes(*(field.view_as(path).masked_fill(beyond, -1) for field in flat))
