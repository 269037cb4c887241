"""Matrix products of recurrent networks on CPUs.

PyTorch leaves products of float32 matrices to a library that does not use the widest vectors of every CPU, and that
prepares a matrix anew for every step of a recurrence. Its own LSTM runs on oneDNN; these functions make the same
kernels available to other recurrences (2.5 times as fast on an AMD EPYC with AVX-512). Other types and devices, and
builds without oneDNN, take the ordinary products, which give the same numbers up to rounding.

Neither function records a graph: they are for the inside of `torch.autograd.Function`.

Shapes: R rows, I inputs, O outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

# From how many uses on it pays to bring a matrix into the layout of the kernels (about one product).
_PACK_FROM = 4
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and all(
    hasattr(torch.ops.mkldnn, name) for name in ("_linear_pointwise", "_reorder_linear_weight")
)


def linear_map(weight_OI: Tensor, num_rows: int, num_uses: int = 1) -> Callable[[Tensor], Tensor]:
    """The map x -> x W^T.

    Args:
        weight_OI: the matrix W; it must not change as long as the map is used.
        num_rows: number of rows of x, for which the layout is chosen; others are allowed.
        num_uses: how often the map will be used, roughly.

    Returns:
        Function from contiguous [R, I] to [R, O].
    """
    if not _uses_onednn(weight_OI):
        transposed = weight_OI.t()
        return lambda x_RI: x_RI @ transposed
    weight = weight_OI.contiguous()
    if num_uses >= _PACK_FROM:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight, num_rows)
    return lambda x_RI: torch.ops.mkldnn._linear_pointwise(x_RI, weight, None, "none", [], "")


def weight_gradient(grad_RO: Tensor, inputs_RI: Tensor) -> Tensor:
    """Gradient of W in x W^T: the product grad^T x.

    Args:
        grad_RO: gradient of the outputs.
        inputs_RI: the inputs x.

    Returns:
        [O, I].
    """
    return linear_map(inputs_RI.t(), grad_RO.shape[1])(grad_RO.t().contiguous())


def _uses_onednn(weight: Tensor) -> bool:
    return _HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


__all__ = ["linear_map", "weight_gradient"]
