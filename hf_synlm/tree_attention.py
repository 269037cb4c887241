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
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


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
    """Attend to what a mask shows, with scores that depend on one integer per pair or several.

    Args:
        query: [B, H, T, d].
        key: [B, H, S, d].
        value: [B, H, S, d].
        mask: [B, T, S], True = seen; every row must see something.
        terms: what the score depends on besides the keys.
        dropout: of the weights.

    Returns:
        [B, H, T, d].

    Cost: O(T S d) multiplications and O(T R d) for each term; H T S numbers for the bias.
    """
    scale = query.shape[-1] ** -0.5
    bias = query.new_zeros(()).masked_fill(~mask[:, None], float("-inf"))
    for term in terms:
        products = torch.einsum("bhtd,hrd->bhtr", term.query, term.table.expand(query.shape[1], -1, -1))
        index = term.relative[:, None].expand(-1, query.shape[1], -1, -1)
        bias = bias + products.gather(3, index) * scale
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, scale=scale)
