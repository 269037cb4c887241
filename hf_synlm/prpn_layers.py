"""Small parts that the three networks of PRPN share: dropout, attention, layer normalization, rows that count.

Shapes: T tokens, B sentences, N slots, R rows that count.
"""

import math

import torch
from torch import Tensor, nn

from .recurrent_dropout import keep_mask

NORM_EPSILON = 1e-6
ATTENTION_EPSILON = 1e-8


def drop(values: Tensor, p: float, training: bool) -> Tensor:
    """Drop every number by itself.

    Args:
        values: any shape.
        p: probability of dropping.
        training: otherwise nothing is dropped.

    Returns:
        Values of the same shape.
    """
    return values * keep_mask(values.shape, p, values) if training and p else values


def gated_softmax(logits: Tensor, gate: Tensor) -> Tensor:
    """Attention weights under gates.

    u_s = gate_s exp(logit_s - max logit);    weight_s = u_s / (sum u + 1e-8)

    The maximum is that of all slots, open or not. Where all gates are shut, all weights are about 0.

    Args:
        logits: [..., N].
        gate: [..., N] in [0, 1].

    Returns:
        [..., N].
    """
    weights = (logits - logits.max(-1, keepdim=True).values).exp() * gate
    return weights / (weights.sum(-1, keepdim=True) + ATTENTION_EPSILON)


class TokenRows:
    """The positions of a [T, B] grid that a batch normalization sees, as rows of a matrix.

    Args:
        tokens_TB: True = token.
        every: all positions count, token or not.
    """

    def __init__(self, tokens_TB: Tensor, every: bool) -> None:
        self.shape = tokens_TB.shape
        self.places = None if every else tokens_TB.nonzero(as_tuple=True)

    def __len__(self) -> int:
        return self.shape.numel() if self.places is None else len(self.places[0])

    def take(self, values: Tensor) -> Tensor:
        """Rows [R, ...] of values [T, B, ...], time by time."""
        return values.flatten(0, 1) if self.places is None else values[self.places]

    def put(self, rows: Tensor) -> Tensor:
        """Rows [R, ...] at their places in [T, B, ...]; 0 elsewhere."""
        if self.places is None:
            return rows.unflatten(0, self.shape)
        return rows.new_zeros(*self.shape, *rows.shape[1:]).index_put(self.places, rows)


# ---------------------------------------------------------------------------------------------- layer normalization
def normalize(x: Tensor, out: Tensor) -> Tensor:
    """Write (x - mean) / (std + 1e-6) to `out`, with the unbiased std (n - 1).

    The stock kernel divides by the biased deviation; the rest is a factor per row.

    Args:
        x: [..., n].
        out: [..., n].

    Returns:
        1 / biased deviation [..., 1], for `normalize_factors`.
    """
    # An epsilon of 0 would make NaN of constant rows; this one changes no other.
    centred, _, inverse = torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-30)
    torch.mul(centred, _row_factor(inverse, x.shape[-1]), out=out)
    return inverse


def _row_factor(inverse: Tensor, size: int) -> Tensor:
    """Biased deviation / (unbiased deviation + 1e-6), of 1 / biased deviation."""
    return 1 / (math.sqrt(size / (size - 1)) + NORM_EPSILON * inverse)


def normalize_factors(inverse: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What `normalize_backward` needs of every row.

    With r = 1 / biased deviation, f = `normalize`'s factor of the row, k = unbiased / biased deviation:

    Args:
        inverse: r [..., 1].
        size: length n of a row.

    Returns:
        scale = r f and ratio = k / f, each [..., 1].
    """
    factor = _row_factor(inverse, size)
    return inverse * factor, math.sqrt(size / (size - 1)) / factor


def normalize_backward(grad: Tensor, normalized: Tensor, scale: Tensor, ratio: Tensor) -> Tensor:
    """Gradient of the input y -> x of `normalize`: dx = scale (dy - mean(dy) - ratio y mean(dy y)).

    Args:
        grad: dy [..., n].
        normalized: y [..., n].
        scale: see `normalize_factors`.
        ratio: see `normalize_factors`.

    Returns:
        dx [..., n].
    """
    slope = (grad * normalized).mean(-1, keepdim=True).mul_(ratio).mul_(scale)
    offset = grad.mean(-1, keepdim=True).mul_(scale).neg_()
    return torch.addcmul(offset, grad, scale).addcmul_(normalized, slope, value=-1)


class UnbiasedLayerNorm(nn.Module):
    """Parameters of a layer normalization gamma (x - mean) / (std + 1e-6) + beta, with the unbiased std (n - 1).

    Applied by `normalize` inside the recurrence.

    Args:
        size: length n of the last dimension, at least 2.

    Source: `LayerNormalization` of the authors' code.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size))


__all__ = [
    "ATTENTION_EPSILON",
    "TokenRows",
    "UnbiasedLayerNorm",
    "drop",
    "gated_softmax",
    "normalize",
    "normalize_backward",
    "normalize_factors",
]
