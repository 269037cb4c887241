"""Matrix products of recurrent networks on CPUs.

PyTorch leaves products of float32 matrices to a library that does not use the widest vectors of every CPU, and that
prepares a matrix anew for every step of a recurrence. Its own LSTM runs on oneDNN; these functions make the same
kernels available to other recurrences (2.5 times as fast on an AMD EPYC with AVX-512). Other types and devices, and
builds without oneDNN, take the ordinary products, which give the same numbers up to rounding.

`linear_map` and `weight_gradient` record no graph: they are for the inside of `torch.autograd.Function`.

Shapes: R rows, I inputs, O outputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# From how many uses on it pays to bring a matrix into the layout of the kernels (about one product).
_PACK_FROM = 4
# Below so many rows the ordinary products are as fast.
_ROWS_FROM = 64
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
        Function from [R, I] to [R, O].
    """
    if not _uses_onednn(weight_OI):
        transposed = weight_OI.t()
        return lambda x_RI: x_RI @ transposed
    # The kernels take rows or columns one after the other; a part of a larger matrix would be read number by number.
    dense = weight_OI.is_contiguous() or weight_OI.t().is_contiguous()
    weight = weight_OI if dense else weight_OI.contiguous()
    if num_uses >= _PACK_FROM:
        weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), num_rows)
    return lambda x_RI: torch.ops.mkldnn._linear_pointwise(x_RI, weight, None, "none", [], "")


def weight_gradient(grad_RO: Tensor, inputs_RI: Tensor) -> Tensor:
    """Gradient of W in x W^T: the product grad^T x.

    Args:
        grad_RO: gradient of the outputs.
        inputs_RI: the inputs x.

    Returns:
        [O, I].
    """
    return linear_map(inputs_RI.t(), grad_RO.shape[1])(grad_RO.t())


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x W^T + b, with gradients.

    Args:
        x: [..., I].
        weight_OI: the matrix W.
        bias_O: b; None = 0.

    Returns:
        [..., O].
    """
    ordinary = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or x.dtype != weight_OI.dtype
    if ordinary or x.numel() < _ROWS_FROM * x.shape[-1] or not _uses_onednn(weight_OI):
        return F.linear(x, weight_OI, bias_O)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return _Linear.apply(rows, weight_OI, bias_O).unflatten(0, x.shape[:-1])


class OneDNNLinear(nn.Linear):
    """`nn.Linear` with the products of `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute x W^T + b."""
        return linear(input, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_RI, weight_OI, bias_O):
        ctx.save_for_backward(x_RI, weight_OI)
        product = linear_map(weight_OI, len(x_RI))(x_RI)
        return product if bias_O is None else product.add_(bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RO):
        x_RI, weight_OI = ctx.saved_tensors
        grad_RO = grad_RO.contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            linear_map(weight_OI.t(), len(x_RI))(grad_RO) if needs_x else None,
            weight_gradient(grad_RO, x_RI) if needs_weight else None,
            grad_RO.sum(0) if needs_bias else None,
        )


def _uses_onednn(weight: Tensor) -> bool:
    return _HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


__all__ = ["OneDNNLinear", "linear", "linear_map", "weight_gradient"]
