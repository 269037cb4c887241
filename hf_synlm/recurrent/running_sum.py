# SPDX-License-Identifier: Apache-2.0
"""Cumulative sums that are deterministic on a GPU where that is asked for."""

import torch
from torch import Tensor

from hf_synlm.core.matrix_products import without_autocast


def running_sum(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Cumulative sum over the last dimension; CUDA's kernel is not deterministic, a product with a triangle is."""
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return torch.cumsum(values, -1, out=out)
    size = values.shape[-1]
    with without_autocast(values.device.type):
        sums = values @ values.new_ones(size, size).triu()
    return sums if out is None else out.copy_(sums)
