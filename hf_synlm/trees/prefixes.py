# SPDX-License-Identifier: Apache-2.0
"""What several derivations of one text have in common: each of their beginnings once.

Shapes: K derivations, P steps, N distinct beginnings.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# What one position of a gathered path costs, in steps of a derivation: CPU times of GPST (width 256) and of Pushdown
# Layers (width 512) with 10 to 300 words give 1/60 to 1/20.
PATH_COST = 1 / 40


class Prefixes(NamedTuple):
    """The distinct beginnings of K derivations; that of the first step alone is the first one."""

    row: Tensor
    """[N] a derivation that begins so."""
    position: Tensor
    """[N] its last step."""
    place: Tensor
    """[K, P] the beginning that ends in each step of each derivation; 0 beyond the end."""

    def pay(self, overhead: float) -> bool:
        """Whether to read each beginning once, if that costs 1 + `overhead` times a step of a derivation."""
        return (1 + overhead) * len(self.row) <= self.place.numel()


def distinct_prefixes(steps: Tensor, last: Tensor | None = None) -> Prefixes:
    """Beginnings of derivations [K, P] of integers, of which all have the same first step.

    `last` [K, 1] are the last steps of the derivations; `None` = all have P steps. Cost: O(K^2 P) comparisons, and as
    many numbers.
    """
    differs = (steps[:, None] != steps).cummax(2).values
    leader = (~differs).to(torch.uint8).argmax(1)  # the first derivation that begins alike
    number = torch.arange(steps.shape[1], device=steps.device)
    node = leader * len(number) + number
    if last is not None:
        node = node.masked_fill(number > last, 0)
    nodes, place = node.unique(return_inverse=True)
    return Prefixes(nodes // len(number), nodes % len(number), place)
