# SPDX-License-Identifier: Apache-2.0
"""Attention whose mask and positions come from a tree.

Every pair of a row and a column has an integer: a difference of tree depths (Transformer Grammars), a distance, or how
often a column has been closed (the stack tape of Pushdown Layers). A table holds one vector for each integer, and

    score(t, s) = (q_t . k_s + sum over terms of q'_t . table[index(t, s)]) / sqrt(d),   where mask(t, s)

Each row is multiplied with the whole table once, and the products are gathered by the index: [T, R] numbers per head
instead of [T, S, d]. The slow and obvious version is in `tests/reference/tree_lm.py`.

Source: Sartran et al. 2022, whose program multiplies with one-hot vectors instead.

Shapes: B sentences, H heads, T rows, S columns, R rows of a table, d width of a head.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.stack import NodePool

# Columns that rows share cost each row time, too: they are shared where they are at most so many times the L nodes of a
# path. CPU time of a call of 76 rows with shared columns, beside a gather of each path, for a backbone of width 576 and
# a Tree LM of width 96: with 8 L columns 1.01 and 0.98, with 4.5 L 0.88 and 0.94, with 2.8 L 0.85 and 0.77.
_DENSE = 4


class RelativeTerm(NamedTuple):
    """One term of the score that depends on an integer of each pair."""

    query: Tensor
    """[B, H, T, d]."""
    table: Tensor
    """[H, R, d], or [1, R, d] for all heads alike."""
    relative: Tensor
    """[B, T, S] integers in [0, R)."""


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, terms: Sequence[RelativeTerm], dropout: float = 0.0
) -> Tensor:
    """Attend to what `mask` [B, T, S] shows, with scores that depend on integers of each pair: [B, H, T, d].

    Every row must see something. Cost: O(T S d) multiplications and O(T R d) for each term; H T S numbers for the bias.
    """
    bias, scale = _bias(query, mask, terms), query.shape[-1] ** -0.5
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)


def attention_weights(query: Tensor, key: Tensor, mask: Tensor, terms: Sequence[RelativeTerm]) -> Tensor:
    """Weights [B, H, T, S] with which `tree_attention` attends, float32."""
    scores = query @ key.mT * query.shape[-1] ** -0.5 + _bias(query, mask, terms)
    return scores.float().softmax(-1)


def _bias(query: Tensor, mask: Tensor, terms: Sequence[RelativeTerm]) -> Tensor:
    """What is added to the scaled products of queries and keys: -inf where `mask` is False."""
    bias = query.new_zeros(()).masked_fill(~mask[:, None], float("-inf"))
    for term in terms:
        products = torch.einsum("bhtd,hrd->bhtr", term.query, term.table.expand(query.shape[1], -1, -1))
        index = term.relative[:, None].expand(-1, query.shape[1], -1, -1)
        bias = bias + products.gather(3, index) * query.shape[-1] ** -0.5
    return bias


def visible_columns(path: Tensor, context: int, most: float) -> tuple[Tensor, Tensor]:
    """Flat places of columns, and which of them the rows see, for rows that see their own path [M, L]; -1 = none.

    Both are [M, L], or [1, U] and [M, U], every node once, where the rows have enough in common, with the `context`
    before. With the rows these are at most `most` columns, because some decoders have tables of so many positions.
    """
    nodes, column = path.unique(return_inverse=True)
    if len(nodes) + len(path) + context > min(_DENSE * (path.shape[1] + context), most):
        return path.clamp(min=0), path >= 0
    seen = torch.zeros(len(path), len(nodes), dtype=torch.bool, device=path.device)
    return nodes.clamp(min=0)[None], seen.scatter_(1, column, path >= 0)


class PathCache:
    """Keys and values of the nodes before new ones, for one call of the layers in a search.

    The features `layer_0`, `layer_1`, ... of the pool hold them; `own` [M] are flat places of the new nodes, `before`
    those of the nodes before them: of each [M, L], or of all [1, U]. Unless it `writes`, the nodes are in the pool
    already.
    """

    def __init__(self, pool: NodePool, before: Tensor, own: Tensor, writes: bool = True) -> None:
        self.pool, self.own, self.writes = pool, own.view(len(before), -1), writes
        self.columns = torch.cat([before, self.own], 1)
        self._rows, self._read = self.own.flatten(), self.columns.flatten()

    def update(self, key: Tensor, value: Tensor, number: int, **_: Any) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, H, C, d] of the new nodes, B = M or 1; return those of all columns.

        Some decoders tell a cache more than that.
        """
        store = self.pool.features[f"layer_{number}"].flatten(0, 1)
        new = torch.stack([key, value], 1).permute(0, 3, 1, 2, 4)  # [B, C, 2, H, d]
        count = self.own.shape[1]
        if self.writes:
            store.index_copy_(0, self._rows, new[:, :count].reshape(-1, store.shape[1]).to(store.dtype))
        kept = store.index_select(0, self._read).view(*self.columns.shape, *new.shape[2:])  # faster than by brackets
        if self.pool.context:
            sentence = self.own[:, 0] // self.pool.fields.shape[1]
            context = self.pool.context[f"layer_{number}"][sentence]
            kept = torch.cat([context.unflatten(2, new.shape[2:]), kept], 1)
        kept = kept.to(new.dtype)
        if new.shape[1] > count:  # of the second position, which nobody sees later, nothing is kept
            kept = torch.cat([kept, new[:, count:]], 1)
        keys, values = kept.permute(2, 0, 3, 1, 4).unbind(0)
        return keys, values

    def get_seq_length(self) -> int:
        """Columns before each row, by the name that decoders of transformers ask for."""
        return self.columns.shape[1] - self.own.shape[1]
