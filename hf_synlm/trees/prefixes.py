"""What several derivations of one text have in common: each of their beginnings once.

Shapes: K derivations, P steps, N distinct beginnings.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Prefixes(NamedTuple):
    """The distinct beginnings of K derivations; that of the first step alone is the first one."""

    row: Tensor
    """[N] a derivation that begins so."""
    position: Tensor
    """[N] its last step."""
    place: Tensor
    """[K, P] the beginning that ends in each step of each derivation; 0 beyond the end."""

    @property
    def pays(self) -> bool:
        """Whether reading each beginning once is faster: it has overhead, for paths or larger masks."""
        return 2 * len(self.row) <= self.place.numel()


def distinct_prefixes(steps: Tensor, last: Tensor | None = None) -> Prefixes:
    """Beginnings of derivations [K, P] of integers, of which all have the same first step.

    `last` [K, 1] are the last steps of the derivations; `None` = all have P steps. Cost: O(K^2 P) comparisons.
    """
    differs = (steps[:, None] != steps).cummax(2).values
    leader = (~differs).to(torch.uint8).argmax(1)  # the first derivation that begins alike
    number = torch.arange(steps.shape[1], device=steps.device)
    node = leader * len(number) + number
    if last is not None:
        node = node.masked_fill(number > last, 0)
    nodes, place = node.unique(return_inverse=True)
    return Prefixes(nodes // len(number), nodes % len(number), place)
