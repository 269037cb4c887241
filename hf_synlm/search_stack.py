"""Batched stacks whose entries are node ids: hypotheses branch without copying a vector.

A *node* is the state of a derivation after one action. It is also the entry that this action put on the stack, and
one slot of the key-value caches of the layers that read the action sequence. A hypothesis is the id of its last node;
the stack below it is a chain of ids. A node is written once and never changes. The slow and obvious version is
`ListHypothesis` in tests/test_search_stack.py.

Shapes: B sentences, N nodes, R new nodes of one step, K hypotheses, A actions, H heads, D features of a vector.
"""

from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, DynamicLayer

_FIELDS = ("predecessor", "below", "depth", "action", "token", "start")


class Nodes(NamedTuple):
    """Integer fields of some nodes, each [B, R].

    Fields:
        predecessor: Node before the action; -1 at the first node.
        below: Node under this one on the stack; -1 at the bottom.
        depth: Number of stack entries, this one included; 0 before the first action.
        action: Id of the action that made the node; -1 for the nodes that stand before the derivation.
        token: Token id that the action generated; -1 if none.
        start: First token covered by the top of the stack; -1 for the nodes that stand before the derivation.
    """

    predecessor: torch.Tensor
    below: torch.Tensor
    depth: torch.Tensor
    action: torch.Tensor
    token: torch.Tensor
    start: torch.Tensor


def _grown(tensor: torch.Tensor, dim: int, capacity: int) -> torch.Tensor:
    """Copy of `tensor` with `capacity` places along `dim`, zeros after the old content."""
    shape = list(tensor.shape)
    shape[dim] = capacity
    grown = tensor.new_zeros(shape)
    grown.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return grown


class SlotLayer(DynamicLayer):
    """Keys and values of one attention layer, one slot per node, in storage that doubles when it is full.

    `keys` and `values` [B, H, N, D / H] are views of the filled part, so that an update copies only the new slots.
    """

    is_croppable = False

    def crop(self, tokens_to_remove: int) -> None:
        """Refuse: a slot is an action, not a token."""
        raise ValueError(f"crop({tokens_to_remove}): the slots of a syntactic cache are actions, not tokens")

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Set up storage from the shape [B, H, R, D / H] of the first keys."""
        self.dtype, self.device = key_states.dtype, key_states.device
        batch, heads, rows, width = key_states.shape
        self.storage = key_states.new_zeros(2, batch, heads, max(64, rows), width)
        self.length = 0
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append R slots.

        Args:
            key_states: Keys of the new slots [B, H, R, D / H].
            value_states: Values of the new slots, same shape.
            *args: Unused, part of the interface.
            **kwargs: Unused, part of the interface.

        Returns:
            All keys and all values, each [B, H, N, D / H].
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.storage.shape[3]:
            self.storage = _grown(self.storage, 3, max(self.length, 2 * self.storage.shape[3]))
        self.storage[0, :, :, first : self.length] = key_states
        self.storage[1, :, :, first : self.length] = value_states
        self._set_views()
        return self.keys, self.values

    def _set_views(self) -> None:
        self.keys = self.storage[0, :, :, : self.length]
        self.values = self.storage[1, :, :, : self.length]

    def get_seq_length(self) -> int:
        """Number of filled slots N."""
        return self.length if self.is_initialized else 0

    def keep_slots(self, index: torch.Tensor) -> None:
        """Keep the slots `index` [B, N'] of each sentence, in that order."""
        if self.is_initialized:
            index = index[:, None, :, None].expand(-1, self.storage.shape[2], -1, self.storage.shape[4])
            kept = torch.stack([self.keys.gather(2, index), self.values.gather(2, index)])
            self.length = index.shape[2]
            self.storage[:, :, :, : self.length] = kept
            self._set_views()

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on."""
        if self.is_initialized and self.length > length:
            self.length = length
            self._set_views()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Keep the sentences `beam_idx` [B'], in that order."""
        if self.is_initialized:
            self.storage = self.storage[:, :, :, : self.length].index_select(1, beam_idx.to(self.device))
            self._set_views()


class SlotCache(Cache):
    """One `SlotLayer` per attention layer, made on first use."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=SlotLayer)

    def keep_slots(self, index: torch.Tensor) -> None:
        """Keep the slots `index` [B, N'] of each sentence in all layers."""
        for layer in self.layers:
            layer.keep_slots(index)

    def truncate(self, length: int) -> None:
        """Forget the slots from `length` on in all layers."""
        for layer in self.layers:
            layer.truncate(length)


class NodePool:
    """All nodes of B sentences, with the vectors that a model attaches to them and its key-value caches.

    Every step appends the same number R of slots to every sentence, so that a range of slots is a slice. Slots that a
    sentence does not need hold nodes to which no hypothesis points.

    Args:
        batch_size: Number of sentences B.
        features: Width and dtype of each vector that the model keeps per node, by name.
        num_caches: Number of key-value caches whose slots are nodes.
        device: Where the tensors live.
        capacity: Slots to reserve at first; storage doubles when it is full.
        links: Names of further fields that hold ids of nodes (-1 = none) of the same derivation.
        counts: Names of further integer fields.
    """

    def __init__(
        self,
        batch_size: int,
        features: dict[str, tuple[int, torch.dtype]],
        num_caches: int,
        device: torch.device,
        capacity: int = 64,
        links: tuple[str, ...] = (),
        counts: tuple[str, ...] = (),
    ) -> None:
        self.size = 0
        self.names = (*_FIELDS, *links, *counts)
        self._links = [self.names.index(name) for name in ("predecessor", "below", *links)]
        self.fields = torch.zeros(batch_size, capacity, len(self.names), dtype=torch.long, device=device)
        self.features = {
            name: torch.zeros(batch_size, capacity, width, dtype=dtype, device=device)
            for name, (width, dtype) in features.items()
        }
        self.caches = [SlotCache() for _ in range(num_caches)]
        # Tokens before the derivation [B]: positions of its own tokens count from here.
        self.num_context = torch.zeros(batch_size, dtype=torch.long, device=device)

    @property
    def batch_size(self) -> int:
        """Number of sentences B."""
        return self.fields.shape[0]

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.fields.device

    def append(self, nodes: Nodes, *further: torch.Tensor, **features: torch.Tensor) -> int:
        """Write R nodes after the last one of every sentence.

        Args:
            nodes: Their fields, each [B, R].
            *further: Their links and counts in the order of their names, each [B, R].
            **features: Their vectors [B, R, D], by name; those left out are not set.

        Returns:
            Id of the first one; the others follow.
        """
        first, self.size = self.size, self.size + nodes.depth.shape[1]
        capacity = self.fields.shape[1]
        if self.size > capacity:
            capacity = max(self.size, 2 * capacity)
            self.fields = _grown(self.fields, 1, capacity)
            self.features = {name: _grown(value, 1, capacity) for name, value in self.features.items()}
        torch.stack((*nodes, *further), -1, out=self.fields[:, first : self.size])
        for name, value in features.items():
            self.features[name][:, first : self.size] = value
        return first

    def nodes(self, ids: torch.Tensor) -> Nodes:
        """Fields of the nodes `ids` [B, R]; negative ids give the fields of node 0."""
        index = ids.clamp(min=0)[..., None].expand(-1, -1, len(_FIELDS))
        return Nodes(*self.fields[..., : len(_FIELDS)].gather(1, index).unbind(-1))

    def field(self, name: str, ids: torch.Tensor | None = None) -> torch.Tensor:
        """One field of the nodes `ids` [B, R], or of all nodes [B, N]."""
        column = self.fields[:, : self.size, self.names.index(name)]
        return column if ids is None else column.gather(1, ids.clamp(min=0))

    def feature(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Vectors [B, R, D] of the nodes `ids` [B, R]."""
        value = self.features[name]
        return value.gather(1, ids.clamp(min=0)[..., None].expand(-1, -1, value.shape[2]))

    def push(self, ids: torch.Tensor, action: int, tokens: torch.Tensor, start: torch.Tensor) -> Nodes:
        """Nodes that put one more entry on the stacks `ids`.

        Args:
            ids: States before the action [B, R].
            action: Id of the action.
            tokens: Generated tokens [B, R].
            start: Position of those tokens in the sentence [B, R].

        Returns:
            Fields of the nodes, not yet in the pool.
        """
        depth = self.field("depth", ids)
        below = torch.where(depth > 0, ids, -1)
        return Nodes(ids, below, depth + 1, torch.full_like(ids, action), tokens, start)

    def pop_two(self, ids: torch.Tensor, action: int) -> tuple[Nodes, torch.Tensor]:
        """Nodes that put one entry in the place of the two top ones.

        Args:
            ids: States before the action [B, R]; the right child is the top entry itself.
            action: Id of the action.

        Returns:
            Fields of the nodes, not yet in the pool, and the ids of the left children [B, R]. Where the stack holds
            fewer than two entries both are arbitrary.
        """
        top = self.nodes(ids)
        left_ids = top.below.clamp(min=0)
        left = self.nodes(left_ids)
        no_token = torch.full_like(ids, -1)
        made = Nodes(ids, left.below, top.depth - 1, torch.full_like(ids, action), no_token, left.start)
        return made, left_ids

    def select_rows(self, index: torch.Tensor) -> None:
        """Keep the sentences `index` [B'], in that order; a sentence may be kept more than once."""
        self.fields = self.fields.index_select(0, index)
        self.num_context = self.num_context.index_select(0, index)
        self.features = {name: value.index_select(0, index) for name, value in self.features.items()}
        for cache in self.caches:
            cache.reorder_cache(index)

    def truncate(self, size: int) -> None:
        """Forget the nodes from `size` on; no node that stays may point to them."""
        self.size = size
        for cache in self.caches:
            cache.truncate(size)

    def compact(self, keep: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep some nodes of every sentence and renumber them in their old order.

        Args:
            keep: Nodes to keep [B, N], bool. The nodes that kept ones link to must be kept.
            count: The largest number of nodes kept in a sentence; the others get padding slots.

        Returns:
            Old id of every new slot [B, count], and the new id of every old node [B, N] (-1 or arbitrary if dropped).
        """
        index = (~keep).to(torch.uint8).argsort(dim=1, stable=True)[:, :count]
        renumber = keep.long().cumsum(1) - 1
        fields = self.fields.gather(1, index[..., None].expand(-1, -1, len(self.names)))
        for column in self._links:
            old = fields[..., column]
            fields[..., column] = torch.where(old < 0, old, renumber.gather(1, old.clamp(min=0)))
        self.fields[:, :count] = fields
        for name, value in self.features.items():
            value[:, :count] = self.feature(name, index)
        for cache in self.caches:
            cache.keep_slots(index)
        self.size = count
        return index, renumber

    def derivations(self, history: torch.Tensor) -> Nodes:
        """Actions of hypotheses in order.

        Args:
            history: Nodes of every hypothesis [B, K, N], bool.

        Returns:
            Fields [B, K, A] of the nodes of each derivation, oldest first (ids grow with time); all fields are -1
            after its end. Nodes before the derivation are left out. `predecessor` and `below` are ids of this pool.
        """
        used = history & (self.field("start") >= 0)[:, None]
        length = used.sum(2)
        longest = int(length.max()) if length.numel() else 0
        index = (~used).to(torch.uint8).argsort(dim=2, stable=True)[..., :longest]
        beyond = torch.arange(longest, device=index.device) >= length[..., None]
        flat = self.nodes(index.flatten(1))
        return Nodes(*(field.view_as(index).masked_fill(beyond, -1) for field in flat))
