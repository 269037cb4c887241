# SPDX-License-Identifier: Apache-2.0
"""Losses that models share: the cross entropy over a large vocabulary, and means over several calls of `forward`.

`linear_cross_entropy`: the logits of all rows would be the largest tensor of a language model. Here only one chunk of
rows exists at a time: its logits are computed, turned into loss and gradient, and dropped.

`loss_shares` (gradient accumulation, data-parallel training): every part of a loss is a mean over items: tokens,
sentences, actions, pairs. The mean over a batch is the mean over its pieces only if each piece is weighted by its share
of the items. A model counts the items of a piece from its inputs (`count_loss_items`), before the first backward pass;
`forward(..., loss_shares=...)` weights the parts, and the losses of the pieces add up.

Shapes: R rows, D hidden, V vocabulary.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.matrix_products import linear_map, weight_gradient


def share_of(loss_shares: Mapping[str, float] | None, name: str) -> float:
    """Share of the part `name` in `loss_shares`; 1 for a whole batch, and for parts that are sums instead of means."""
    return 1.0 if loss_shares is None else loss_shares.get(name, 1.0)


def check_shares(loss_shares: Mapping[str, float] | None, parts: Iterable[str]) -> None:
    """Raise ValueError if `loss_shares`, an argument of `forward`, names something other than parts of the loss."""
    known = list(parts)
    for name in loss_shares or ():
        if name not in known:
            raise ValueError(f"loss_shares names {name!r}, but the loss has only the parts {', '.join(known)}.")


def widened(values: Tensor) -> Tensor:
    """Values in float32, or in their own type if it is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


# Numbers in one chunk of logits. CPU: small enough for the caches, large enough for efficient GEMMs. Elsewhere: few
# chunks, for each of them adds to the whole gradient of the weight (2^27 floats are 0.5 GB).
_CHUNK_ELEMENTS = 1 << 24
_CHUNK_ELEMENTS_ON_DEVICE = 1 << 27


@torch.compiler.disable
def linear_cross_entropy(
    hidden_RD: Tensor, weight_VD: Tensor, target_R: Tensor, coefficient_R: Tensor, bias_V: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weighted sum of -log softmax(hidden @ weight.T + bias)[target], and the detached loss of each row [R]; in nats.

        loss = sum_r coefficient_r * (-log softmax(W h_r + b)[target_r])

    The gradients of hidden, weight and bias are computed in the forward pass, chunk by chunk, and scaled in backward:
    the gradient of a softmax needs the logits only, never the rest of the graph. The coefficients are not negative and
    get no gradient; where one is 0, any valid id may be the target. GEMMs run in the type of `hidden_RD` (or of
    autocast), sums over chunks in float32. Cost: O(R V D) multiplications, O(chunk V) memory.
    """
    train = torch.is_grad_enabled()
    return _LinearCrossEntropy.apply(hidden_RD, weight_VD, bias_V, target_R, coefficient_R, train)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_RD, weight_VD, bias_V, target_R, coefficient_R, train):
        device = hidden_RD.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_RD.dtype
        hidden, weight = hidden_RD.to(dtype), weight_VD.to(dtype)
        bias = None if bias_V is None else bias_V.to(dtype)
        need_hidden, need_weight, need_bias = (train and needed for needed in ctx.needs_input_grad[:3])
        # Gradients are kept in units of the largest coefficient: p / number of tokens would underflow in float16.
        wide = torch.promote_types(dtype, torch.float32)
        coefficient_R = coefficient_R.to(wide)
        unit = coefficient_R.amax().clamp_min(torch.finfo(torch.float32).tiny)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = None
        grad_bias = torch.zeros_like(bias_V) if need_bias else None
        loss_R = torch.empty(len(hidden), dtype=wide, device=hidden.device)
        elements = _CHUNK_ELEMENTS if device == "cpu" else _CHUNK_ELEMENTS_ON_DEVICE
        chunk = max(1, elements // weight.shape[0])
        num_chunks = -(-len(hidden) // chunk)
        to_logits = linear_map(weight, chunk, num_chunks)
        to_hidden = linear_map(weight.t(), chunk, num_chunks) if need_hidden else None
        with torch.autocast(device, enabled=False):
            for first in range(0, len(hidden), chunk):
                rows = slice(first, first + chunk)
                target = target_R[rows, None]
                logits = to_logits(hidden[rows]) if bias is None else to_logits(hidden[rows]).add_(bias)
                log_prob = F.log_softmax(logits.to(loss_R.dtype), -1)
                loss_R[rows] = -log_prob.gather(1, target).squeeze(1)
                if not (need_hidden or need_weight or need_bias):
                    continue
                relative = coefficient_R[rows, None] / unit
                gradient = log_prob.exp_().mul_(relative).scatter_add_(1, target, -relative).to(dtype)
                if need_bias:
                    grad_bias += gradient.sum(0, dtype=grad_bias.dtype)
                if need_hidden:
                    grad_hidden[rows] = to_hidden(gradient)
                if need_weight:
                    grad_weight = _accumulate(grad_weight, gradient, hidden[rows], loss_R.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, unit)
        ctx.dtypes = hidden_RD.dtype, weight_VD.dtype
        loss = (loss_R * coefficient_R).sum()
        ctx.mark_non_differentiable(loss_R)
        return loss, loss_R

    @staticmethod
    def backward(ctx, grad_loss, _):
        # `once_differentiable` would not notice: the gradient of a plain loss is a constant.
        if torch.is_grad_enabled():
            raise RuntimeError("The cross entropy has no second derivatives: leave create_graph=True out.")
        grad_hidden, grad_weight, grad_bias, unit = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        scale = grad_loss * unit
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * scale).to(hidden_dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * scale).to(weight_dtype)
        if grad_bias is not None:
            grad_bias = grad_bias * scale.to(grad_bias.dtype)
        return grad_hidden, grad_weight, grad_bias, None, None, None


def _accumulate(total: Tensor | None, gradient: Tensor, hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """Add gradient.T @ hidden to the running sum, without a temporary where the types allow it."""
    if total is None:
        return weight_gradient(gradient, hidden).to(dtype)
    if hidden.dtype == dtype and hidden.device.type != "cpu":
        return total.addmm_(gradient.t(), hidden)
    return total.add_(weight_gradient(gradient, hidden))
