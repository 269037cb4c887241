# SPDX-License-Identifier: Apache-2.0
"""Rows of tokens with padding anywhere: their tokens, moved to the left end, and where each of them stood.

Shapes: B rows, T columns of the input, W tokens of the longest row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Rows:
    """Tokens of a batch, moved to the left end of their rows.

    Fields:
        ids: [B, W] token ids; 0 after the last token.
        columns: [B, W] input column of each.
        present: [B, W] True = token.
        mask: [B, T] True = token in the input.
    """

    ids: Tensor
    columns: Tensor
    present: Tensor
    mask: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, mask: Tensor, least: int = 0) -> "Rows":
        """Align the tokens under `mask` [B, T]; W is at least `least`."""
        # A graph that is compiled depends on shapes only.
        width = mask.shape[1] if torch.compiler.is_compiling() else max([least, *mask.sum(1).tolist()])
        columns = columns_of_tokens(mask)[:, :width]
        # Any id may stand at padding: it is looked up, but its result is not used.
        ids = input_ids.long().masked_fill(~mask, 0).gather(1, columns)
        return cls(ids, columns, mask.gather(1, columns), mask)

    @property
    def count(self) -> Tensor:
        """Number of tokens [B]."""
        return self.mask.sum(1)

    @cached_property
    def lengths(self) -> list[int]:
        """Number of tokens per row, on the host."""
        return self.count.tolist()

    @property
    def first(self) -> Tensor:
        """Input column [B] of the first token."""
        return self.mask.long().argmax(1)

    def align(self, values: Tensor) -> Tensor:
        """Bring [B, T] to [B, W]."""
        return values.gather(1, self.columns)

    def restore(self, values: Tensor) -> Tensor:
        """Bring [B, W] back to the input columns [B, T], 0 elsewhere."""
        full = values.new_zeros(self.mask.shape)
        return full.scatter(1, self.columns, values.masked_fill(~self.present, 0))

    def active(self, step: int) -> Tensor | None:
        """Rows that have a token at `step` [B]; None = all."""
        return None if min(self.lengths) > step else self.present[:, step]


def count_runs(mask: Tensor) -> Tensor:
    """How many runs of tokens a row of `mask` [B, T] has [B]: 0 if it is empty, more than 1 if it has holes."""
    return (mask & ~F.pad(mask[:, :-1], (1, 0))).sum(1)


def check_rows(mask: Tensor, name: str = "attention_mask", may_be_empty: bool = False) -> None:
    """Raise ValueError if a row of `mask` [B, T], True = token, is empty or has holes; one copy to the host."""
    for row, runs in enumerate(count_runs(mask).tolist()):
        if runs > 1:
            raise ValueError(f"{name} leaves holes inside row {row}. Put all tokens of a row side by side.")
        if runs == 0 and not may_be_empty:
            raise ValueError(f"Row {row} of input_ids has no token (besides a begin token). Leave empty texts out.")


def columns_of_tokens(mask_BT: Tensor) -> Tensor:
    """Columns [B, T] of a row, those of its tokens first, in their order."""
    return (~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)


def tokens_first(values: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Move the tokens of every row of `values` [B, T, ...] to its left end, in their order; padding follows."""
    if mask_BT is None:
        return values
    columns = columns_of_tokens(mask_BT)
    return values.gather(1, columns.view(*columns.shape, *[1] * (values.dim() - 2)).expand_as(values))


def after_columns(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Put the states [B, T + 1, ...] after 0, 1, 2, ... tokens back to the columns of the input [B, T, ...].

    Inverse of `tokens_first` at the tokens; padding has the state of the column before it.
    """
    if mask_BT is None:
        return states[:, 1:]
    count = mask_BT.cumsum(1)
    count = count.view(*count.shape, *[1] * (states.dim() - 2))
    return states.gather(1, count.expand(-1, -1, *states.shape[2:]))


def next_tokens(labels: Tensor, mask_BT: Tensor | None) -> Tensor:
    """The label [B, T] of the token after each token; -100 after the last one and at padding."""
    if mask_BT is not None:
        labels = tokens_first(labels.masked_fill(~mask_BT, -100), mask_BT)
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    if mask_BT is None:
        return following
    return after_columns(F.pad(following, (1, 0), value=-100), mask_BT).masked_fill(~mask_BT, -100)


def at_places(values_RX: Tensor, place: Any, shape: Sequence[int]) -> Tensor:
    """Put values [R, X] to their places, an index into a tensor of this shape; 0 elsewhere."""
    found = values_RX.new_zeros(*shape, values_RX.shape[1])
    found[place] = values_RX
    return found
