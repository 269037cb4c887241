"""Matrix products of recurrent networks on CPUs.

PyTorch leaves products of float32 matrices to a library that does not use the widest vectors of every CPU, and that
prepares a matrix anew for every step of a recurrence. Its own LSTM runs on oneDNN; these functions make the same
kernels available to other recurrences (2.5 times as fast on an AMD EPYC with AVX-512). Other types and devices, and
builds without oneDNN, take the ordinary products, which give the same numbers up to rounding.

`linear_map` and `weight_gradient` record no graph: they are for the inside of `torch.autograd.Function`.

Shapes: R rows, I inputs, O outputs.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# From how many uses on it pays to bring a matrix into the layout of the kernels (about one product).
_PACK_FROM = 4
# Below so many rows the ordinary products are as fast.
_ROWS_FROM = 64


def _has_onednn() -> bool:
    """Whether this build of PyTorch has the kernels, and they are called as expected: they are no public interface."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Whatever the default type and device are at import.
    x, weight = (torch.ones(rows, 3, dtype=torch.float32, device="cpu") for rows in (2, 4))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((product == 3).all())


_HAS_ONEDNN = _has_onednn()


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


def batched_map(weight_GOI: Tensor, num_rows: int, num_uses: int = 1) -> Callable[[Tensor], Tensor]:
    """The map x -> x W^T for several matrices at once.

    Args:
        weight_GOI: the matrices W.
        num_rows: as in `linear_map`.
        num_uses: as in `linear_map`.

    Returns:
        Function from [G, R, I] to [G, R, O].
    """
    if not _uses_onednn(weight_GOI):
        transposed = weight_GOI.mT
        return lambda x_GRI: torch.bmm(x_GRI, transposed)
    maps = [linear_map(weight, num_rows, num_uses) for weight in weight_GOI]
    if len(maps) == 1:
        return lambda x_GRI: maps[0](x_GRI[0])[None]
    return lambda x_GRI: torch.stack([apply(x) for apply, x in zip(maps, x_GRI, strict=True)])


def batched_linear(x_GRI: Tensor, weight_GOI: Tensor, bias_GO: Tensor) -> Tensor:
    """Compute x W^T + b for several matrices at once, with gradients.

    Args:
        x_GRI: rows.
        weight_GOI: the matrices W.
        bias_GO: the biases b.

    Returns:
        [G, R, O].
    """
    if not _uses_onednn(weight_GOI):
        return torch.baddbmm(bias_GO[:, None], x_GRI, weight_GOI.mT)
    return torch.stack([linear(*values) for values in zip(x_GRI, weight_GOI, bias_GO, strict=True)])


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


def without_autocast(device_type: str) -> AbstractContextManager:
    """A region without autocast; nothing at all where autocast is off, as regions stand in the way of exported code.

    Args:
        device_type: "cpu", "cuda", ...

    Returns:
        The context.
    """
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def _uses_onednn(weight: Tensor) -> bool:
    # The kernels cannot be traced, so that compiled and exported code has the ordinary products.
    if torch.compiler.is_compiling():
        return False
    return _HAS_ONEDNN and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() > 0


__all__ = [
    "OneDNNLinear",
    "batched_linear",
    "batched_map",
    "linear",
    "linear_map",
    "weight_gradient",
    "without_autocast",
]
