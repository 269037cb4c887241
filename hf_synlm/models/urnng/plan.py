# SPDX-License-Identifier: Apache-2.0
"""Layout of given GEN/COMP derivations for batched computation: compositions by height, pushes by stack depth.

Every action pushes something: GEN a word, COMP a constituent. Before the first action the begin token is pushed. The
state of the last push predicts the next action, and if this is GEN, its word.

Shapes: B derivations, T tokens, A actions, P pushes, W words, R compositions of one height.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.rows import check_rows
from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION
from hf_synlm.trees.given import check_actions


@dataclass
class URNNGPlan:
    """Pushes of derivations, in the order of their depth.

    Elements are numbered: 0 the begin token, then all places [B, T] of the input, then the constituents by height.
    """

    compositions: list[tuple[Tensor, Tensor]]
    """By height, [R] elements of the right and of the left parts."""
    source: Tensor
    """[P] element of every push."""
    sizes: list[int]
    """Number of pushes of each depth."""
    parents: list[Tensor]
    """For every depth but the first, [N] the push below, counted in its depth."""
    place: Tensor
    """[B, A + 1] the push of every action, behind that of the begin token; 0 behind the end."""
    forced: Tensor
    """[B, A] whether an action had no alternative: COMP needs two elements."""


def make_plan(actions: Tensor, mask: Tensor) -> URNNGPlan:
    """Lay out derivations [B, A], `PAD_ACTION` at the end, on their device; the tokens stand side by side.

    Actions that are not derivations of the tokens raise ValueError. Cost: one wait for the device; A sequential steps
    on the host.
    """
    device = actions.device
    actions, mask = actions.cpu(), mask.cpu()
    check_actions(actions, mask, padding=PAD_ACTION)
    check_rows(mask)
    rows, count = actions.shape
    shape = (rows, count + 1)
    below, depth, height = (torch.zeros(shape, dtype=torch.long) for _ in range(3))
    parts = torch.zeros(2, *shape, dtype=torch.long)  # times of the right and the left parts
    stack = torch.zeros(rows, count + 2, dtype=torch.long)  # times of the pushes, the lowest first
    top = torch.zeros(rows, 1, dtype=torch.long)
    for time, action in enumerate(actions.split(1, 1), 1):
        composes = action == COMP
        _check(action > COMP, time - 1, f"GEN is {GEN}, COMP is {COMP}, other ids do not exist")
        _check(composes & (top < 2), time - 1, "COMP finds fewer than two elements")
        both = stack.gather(1, torch.cat([top, (top - 1).clamp(min=0)], 1))
        parts[:, :, time] = both.T
        height[:, time] = (height.gather(1, both).amax(1) + 1) * composes[:, 0]
        top = top + (action == GEN).long() - composes.long()
        below[:, time] = stack.gather(1, (top - 1).clamp(min=0))[:, 0]
        depth[:, time] = top[:, 0]
        stack.scatter_(1, top, time)
    generated = (actions == GEN).cumsum(1)
    _check((top != 1) | (generated[:, -1:] != mask.sum(1, keepdim=True)), count, "the tokens do not make one tree")
    live = F.pad(actions != PAD_ACTION, (1, 0), value=True)
    # Elements of the pushes, and the constituents by height.
    height = torch.where(live, height, 0)
    order = height.flatten().argsort(stable=True)[int((height == 0).sum()) :]
    element = torch.zeros(rows * (count + 1), dtype=torch.long)
    element[order] = torch.arange(len(order)) + 1 + mask.numel()
    element = element.view(shape)
    first = mask.long().argmax(1) + torch.arange(rows) * mask.shape[1]
    element[:, 1:] = torch.where(actions == GEN, first[:, None] + generated, element[:, 1:])
    children = torch.stack([element.gather(1, part).flatten() for part in parts])[:, order]
    heights = height.flatten().bincount()[1:].tolist()
    # The order of the pushes.
    key = torch.where(live, depth, count + 2).flatten()
    pushes = key.argsort(stable=True)[: int(live.sum())]
    sizes = key[pushes].bincount().tolist()
    place = torch.zeros(rows * (count + 1), dtype=torch.long)
    place[pushes] = torch.arange(len(pushes))
    place = place.view(shape)
    parent = place.gather(1, below).flatten()[pushes].split(sizes)
    start = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return URNNGPlan(
        compositions=[tuple(pair.to(device)) for pair in children.split(heights, 1)],
        source=element.flatten()[pushes].to(device),
        sizes=sizes,
        parents=[(parent[level] - start[level - 1]).to(device) for level in range(1, len(sizes))],
        place=place.to(device),
        forced=(depth[:, :-1] < 2).to(device),
    )


def _check(wrong: Tensor, position: int, problem: str) -> None:
    """Raise ValueError if a row is `wrong` [B, 1]."""
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(f"actions of row {row} are not a derivation of its tokens: {problem} (at action {position}).")
