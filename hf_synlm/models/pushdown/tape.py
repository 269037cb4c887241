# SPDX-License-Identifier: Apache-2.0
"""Attachments and the stack tape of Pushdown Layers (Murty et al. 2023).

Positions count the begin token as 0. Position t is *attached* to a position a:

    a = t: it is put on the stack of constituents (shift)
    a < t: it is joined with the constituent at the top of the stack, the result with the next one, and so on, until
           the constituent whose last position is a has been joined

    ((a b) (c (d e)))   positions 1 .. 5   attachments 1 1 3 4 2

tape[t, s] counts the constituents joined at or before t that hold s. A Transformer that sees it knows the stack.

Shapes: B sentences, P positions.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def constituent_starts(attachments: Tensor) -> Tensor:
    """First position [B, P] of the constituent at the top of the stack once each position is attached.

    That of a constituent which is joined to a is that of a; found by doubling, in log P steps.
    """
    start, steps = attachments, max(1, attachments.shape[1] - 1).bit_length()
    for _ in range(steps):
        start = start.gather(1, start)
    return start


def stacks(attachments: Tensor) -> Tensor:
    """Which positions are last ones of constituents on the stack: row t [B, P, P], once 0 .. t are attached."""
    start, place = constituent_starts(attachments), torch.arange(attachments.shape[1], device=attachments.device)
    later = place[None] > place[:, None]
    # Position e stays on the stack up to t if nothing attached after it up to t starts at or before it.
    lowest = torch.where(later, start[:, None], len(place)).cummin(2).values
    return ((lowest > place[:, None]) & (later | (place[None] == place[:, None]))).mT


def stack_tape(attachments: Tensor) -> Tensor:
    """The stack tape [B, P, P] of given attachments: at (t, s) how many constituents that end at or before t hold s.

    A position that is not to be attached (the end of a sentence) has its own number. A position that is attached to one
    which is not the end of a constituent on the stack raises ValueError; not on a GPU, where the check would stall
    every step.
    """
    place = torch.arange(attachments.shape[1], device=attachments.device)
    _refuse(attachments, attachments > place)
    before = F.pad(stacks(attachments)[:, :-1], (0, 0, 1, 0))  # the stack before t
    _refuse(attachments, ~before.gather(2, attachments[..., None])[..., 0] & (attachments != place))
    joined = before & (place >= attachments[..., None]) & (attachments != place)[..., None]
    start = constituent_starts(attachments)[:, None].expand_as(joined)
    change = torch.zeros_like(start).scatter_add(2, start, joined.long())
    # Constituents that end at t hold the positions from their first one to t.
    held = change.cumsum(2) * (place[None] <= place[:, None])
    return held.cumsum(1)


def _refuse(attachments: Tensor, wrong: Tensor) -> None:
    """Raise ValueError if attachments are `wrong`, on a CPU."""
    if attachments.device.type == "cpu" and bool(wrong.any()):
        row, position = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"attachments: position {position} of row {row} is attached to {int(attachments[row, position])}, "
            "where no constituent on the stack ends."
        )
