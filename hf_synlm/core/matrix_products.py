# SPDX-License-Identifier: Apache-2.0
"""Fast matrix products of recurrent networks on CPUs, by the kernels of oneDNN.

For float32 matrices PyTorch calls a library that does not use the widest vectors of every CPU, and that packs a matrix
again at every step of a recurrence. PyTorch's own LSTM runs on oneDNN; here other recurrences use the same kernels (2.5
times as fast on an AMD EPYC with AVX-512). Other types and devices, and builds without oneDNN, use the ordinary
products, which give the same numbers up to rounding. Searches use them in bfloat16, too, where the CPU does.

`linear_map` and `weight_gradient` record no graph: call them inside a `torch.autograd.Function`.

Shapes: R rows, I inputs, O outputs.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

# Packing a matrix for the kernels costs about one product: it pays from this number of uses on.
_PACK_FROM = 4
# With fewer rows the ordinary products are as fast.
_ROWS_FROM = 64
# oneDNN compiles a kernel for every new number of rows (0.6 ms and 0.5 MiB each), so searches pad rows to a multiple.
ROW_STEP = 16
# What `keep_packed_weights` of this thread was given.
_kept = threading.local()


def _has_onednn(dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch has the kernels and they work as expected: their interface is private."""
    if not torch.backends.mkldnn.is_available():
        return False
    # Type and device are given: the defaults at import may differ.
    x, weight = (torch.ones(rows, 3, dtype=dtype, device="cpu") for rows in (2, 4))
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, 2)
        product = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    except (AttributeError, RuntimeError, TypeError):
        return False
    return bool((product == 3).all())


ONEDNN_TYPES = tuple(dtype for dtype in (torch.float32, torch.bfloat16) if _has_onednn(dtype))
"""Types of the matrices that oneDNN multiplies on this machine."""
_FLOAT32 = tuple(dtype for dtype in ONEDNN_TYPES if dtype == torch.float32)


def linear_map(
    weight_OI: Tensor,
    num_rows: int,
    num_uses: int = 1,
    types: tuple[torch.dtype, ...] = _FLOAT32,
    row_step: int = 1,
) -> Callable[[Tensor], Tensor]:
    """The map x -> x W^T of [R, I], or without `row_step` of [R, ..., I]. W must not change while the map is in use.

    The layout is chosen for the expected number of rows and uses. Matrices of other `types` get ordinary products. The
    kernels meet multiples of `row_step` rows (many rows: of more), to which others are padded. Within
    `keep_packed_weights`, parameters of a model are packed once.
    """
    if not uses_onednn(weight_OI, types):
        transposed = weight_OI.t()
        return lambda x_RI: x_RI @ transposed
    # The kernels read rows or columns; they would read a slice of a larger matrix number by number.
    dense = weight_OI.is_contiguous() or weight_OI.t().is_contiguous()
    if num_uses >= _PACK_FROM:
        weight = _packed(weight_OI, num_rows)
    else:
        weight = weight_OI.detach() if dense else weight_OI.detach().contiguous()

    def product(x_RI: Tensor) -> Tensor:
        rows = len(x_RI)
        step = row_step << max(rows.bit_length() - 9, 0)  # adds at most a sixteenth of many rows
        if row_step > 1 and rows % step:
            x_RI = F.pad(x_RI, (0, 0, 0, -rows % step))
        return torch.ops.mkldnn._linear_pointwise(x_RI, weight, None, "none", [], "")[:rows]

    return product


@contextmanager
def keep_packed_weights(kept: dict[nn.Parameter, tuple[int, Tensor]]) -> Iterator[None]:
    """Within it, parameters that this thread packs are packed once, and again when they change (not through `.data`).

    `kept` holds their versions and packed copies.
    """
    before, _kept.weights = getattr(_kept, "weights", None), kept
    try:
        yield
    finally:
        _kept.weights = before


def _packed(weight_OI: Tensor, num_rows: int) -> Tensor:
    """The matrix in the layout of the kernels."""
    # What is no parameter may be computed for every call anew.
    known = getattr(_kept, "weights", None) if isinstance(weight_OI, nn.Parameter) else None
    version = None if known is None or weight_OI.is_inference() else weight_OI._version
    if version is None or known.get(weight_OI, (None,))[0] != version:
        packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach().contiguous(), num_rows)
        if version is None:
            return packed
        known[weight_OI] = version, packed
    return known[weight_OI][1]


def weight_gradient(grad_RO: Tensor, inputs_RI: Tensor) -> Tensor:
    """Gradient [O, I] of W in x W^T: the product grad^T x."""
    return linear_map(inputs_RI.t(), grad_RO.shape[1])(grad_RO.t())


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Compute x W^T + b for `x` [..., I], with gradients."""
    ordinary = torch.is_autocast_enabled("cpu") or torch.compiler.is_compiling() or x.dtype != weight_OI.dtype
    if ordinary or x.numel() < _ROWS_FROM * x.shape[-1] or not uses_onednn(weight_OI):
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
    """Turn autocast off for a while, if it is on: `torch.export` cannot handle such regions."""
    return torch.autocast(device_type, enabled=False) if torch.is_autocast_enabled(device_type) else nullcontext()


def uses_onednn(weight: Tensor, types: tuple[torch.dtype, ...] = _FLOAT32) -> bool:
    """Whether products with the matrix `weight` of one of the `types` run on oneDNN."""
    # The kernels cannot be traced: compiled and exported code uses the ordinary products.
    if torch.compiler.is_compiling():
        return False
    # Nor do they know quantized weights, which are other classes.
    plain = type(weight) in (Tensor, nn.Parameter) and weight.device.type == "cpu" and weight.dtype in types
    return plain and weight.numel() > 0
