# SPDX-License-Identifier: Apache-2.0
"""Weights of a module that are cast together under autocast, which saves launches."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from transformers.pytorch_utils import Conv1D


def call_with_weights_cast_together(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module; in training under autocast, the weights of its linear layers are cast together.

    Autocast launches a kernel for each of them, and one for each gradient. Values and gradients (not second ones) are
    the same. Left to autocast: adapters, layers that are compiled or compute twice, sharded, quantized and frozen
    weights, and several processes, which would wait for the gradients of the whole module.
    """
    if not (module.training and torch.is_grad_enabled()) or torch.compiler.is_compiling() or _is_distributed():
        return module(*args, **kwargs)
    layers = dict(module.named_modules())
    linear = {name: layer for name, layer in layers.items() if type(layer) in (nn.Linear, Conv1D)}
    weights = {
        f"{name}.{own}": weight
        for name, layer in linear.items()
        for own, weight in layer.named_parameters(recurse=False)
        if weight.requires_grad and weight.dtype == torch.float32 and not hasattr(weight, "__tensor_flatten__")
    }
    special = any(
        layer._compiled_call_impl or getattr(layer, "gradient_checkpointing", False) or hasattr(layer, "base_layer")
        for layer in layers.values()
    )
    device = next((weight.device.type for weight in weights.values()), "meta")
    if special or device == "meta" or not torch.is_autocast_enabled(device):
        return module(*args, **kwargs)
    different = list(dict.fromkeys(weights.values()))
    cast = dict(zip(different, _CastTogether.apply(torch.get_autocast_dtype(device), *different), strict=True))
    by_name = {name: cast[weight] for name, weight in weights.items()}
    return functional_call(module, by_name, args, kwargs, tie_weights=False)


def _is_distributed() -> bool:
    known = torch.distributed
    return known.is_available() and known.is_initialized() and known.get_world_size() > 1


class _CastTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dtype, *weights):
        ctx.set_materialize_grads(False)
        return _cast(weights, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        wide = iter(_cast([grad for grad in grads if grad is not None], torch.float32))
        return None, *(None if grad is None else next(wide) for grad in grads)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if cast:
        torch._foreach_copy_(cast, list(tensors))
    return tuple(cast)
