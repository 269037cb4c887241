"""Reading network of PRPN: LSTM layers that read an attention over their last N states instead of the last state.

The slow and obvious version is `read` in `tests/reference/prpn.py`: a loop over tokens that autograd differentiates.
Here `_Reading` has a hand-written gradient, so that no product of weights is repeated per step.

A layer runs over all tokens before the next layer begins: the gates depend on the embeddings only. Everything in a
layer that does not depend on its own past is multiplied out for all tokens at once. Time is the dimension before the
sentences throughout, so that a step is a contiguous slice.

Shapes: T tokens, B sentences, N slots, I input size, H hidden size, D = 2 H (state and cell), G = 4 H (gates).

Source: Shen et al. 2018, section 5.1; `ReadingNetwork.py` and `LSTMCell.py` of the authors' code.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .matrix_products import linear, linear_map, weight_gradient, without_autocast
from .module_tools import weight_of
from .prpn_parser import drop
from .recurrent_layers import keep_mask

NORM_EPSILON = 1e-6
ATTENTION_EPSILON = 1e-8


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


class ReadingLayer(nn.Module):
    """One layer of the reading network.

        key = drop(W_k drop([x ; h_t-1]) + b_k);    a = gated softmax of <h_s, key> / sqrt(H) over the N last states
        h' = sum a_s h_s;    c' = sum a_s c_s
        i, f, g, o = LN(W_ih drop(x) + b_ih) + LN(W_hh (r * h') + b_hh)
        c = sigmoid(f) c' + sigmoid(i) tanh(g);    h = sigmoid(o) tanh(LN(c))

    The mask r has H numbers, the same for all sentences and tokens of a call. Later steps read h and c without the
    mask, and c before its normalization.

    Args:
        input_size: width of x.
        hidden_size: width of h and c.
        dropout: of x where the LSTM reads it.
        key_dropout: of what the key is made of, and of the key.
        recurrent_dropout: r.
    """

    def __init__(
        self, input_size: int, hidden_size: int, dropout: float, key_dropout: float, recurrent_dropout: float
    ) -> None:
        super().__init__()
        self.key = nn.Linear(input_size + hidden_size, hidden_size)
        self.input = nn.Linear(input_size, 4 * hidden_size)
        self.input_norm = UnbiasedLayerNorm(4 * hidden_size)
        self.recurrent = nn.Linear(hidden_size, 4 * hidden_size)
        self.recurrent_norm = UnbiasedLayerNorm(4 * hidden_size)
        self.cell_norm = UnbiasedLayerNorm(hidden_size)
        self.dropout, self.key_dropout, self.recurrent_dropout = dropout, key_dropout, recurrent_dropout

    @torch.compiler.disable
    def forward(self, x_TBI: Tensor, gate_TBN: Tensor, tape_NBD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read all tokens.

        Under autocast the multiplications over all tokens run in its type; the recurrence stays in float32.

        Args:
            x_TBI: inputs.
            gate_TBN: gates of the N slots before every token, the oldest first.
            tape_NBD: states and cells of the N tokens before the first one, the oldest first; they get no gradient.

        Returns:
            States [T, B, H]; tape [N + T, B, D] of all states and cells; attention weights [T, B, N]. No gradient flows
            through the last two.

        Cost: T sequential steps of B (5 H^2 + 3 N H) multiplications, B T I 5 H at once.
        """
        size, training = self.key.out_features, self.training
        input_size = x_TBI.shape[-1]
        key_weight = weight_of(self.key)
        x_key = drop(x_TBI, self.key_dropout, training)
        key_TBH = linear(x_key, key_weight[:, :input_size], self.key.bias)
        input_TBG = linear(drop(x_TBI, self.dropout, training), weight_of(self.input), self.input.bias)
        masks: list[Tensor | None] = [None, None, None]
        if training and self.key_dropout:
            masks[:2] = [keep_mask(key_TBH.shape, self.key_dropout, self.cell_norm.weight) for _ in range(2)]
        if training and self.recurrent_dropout:
            masks[2] = keep_mask((size,), self.recurrent_dropout, self.cell_norm.weight)
        weights = (
            key_weight[:, input_size:],
            weight_of(self.recurrent),
            self.recurrent.bias,
            self.input_norm.weight,
            self.recurrent_norm.weight,
            self.input_norm.bias + self.recurrent_norm.bias,
            self.cell_norm.weight,
            self.cell_norm.bias,
        )
        tensors = (key_TBH, input_TBG, gate_TBN, tape_NBD, *masks, *weights)
        dtype = torch.promote_types(tape_NBD.dtype, torch.float32)
        with without_autocast(x_TBI.device.type):
            hidden_TBH, tape, attention_TBN = _Reading.apply(*(None if t is None else t.to(dtype) for t in tensors))
        return hidden_TBH.to(x_TBI.dtype), tape, attention_TBN


class _Steps(NamedTuple):
    """Values of all steps that the backward pass needs, each [T, B, *]."""

    key: Tensor
    read: Tensor
    """State and cell that the attention reads from the tape."""
    acts: Tensor
    """i, f, g, o after their activations."""
    activated: Tensor
    """tanh(LN(c))."""
    attention: Tensor
    slope: Tensor
    """Derivatives of attention weights by their own gates, without the normalization: e / sum."""
    best: Tensor
    """Slot of the largest logit."""
    input_norm: Tensor
    """For each of three normalizations: the rows before gain and bias, and 1 / deviation."""
    input_inverse: Tensor
    past_norm: Tensor
    past_inverse: Tensor
    cell_norm: Tensor
    cell_inverse: Tensor

    @classmethod
    def like(cls, input_TBG: Tensor, gate_TBN: Tensor) -> "_Steps":
        """Uninitialized tensors."""
        grid, gates, slots = input_TBG.shape[:2], input_TBG.shape[2], gate_TBN.shape[2]
        size = gates // 4
        widths = (size, 2 * size, gates, size, slots, slots, 1, gates, 1, gates, 1, size, 1)
        steps = cls(*(input_TBG.new_empty(*grid, width) for width in widths))
        return steps._replace(best=torch.empty_like(steps.best, dtype=torch.long))


class _Reading(torch.autograd.Function):
    """The recurrence of `ReadingLayer`; the masks may be None.

    Slot n of step t is entry t + n of the tape, and step t writes entry t + N. The weights get their gradients in one
    multiplication over all steps.
    """

    @staticmethod
    def forward(
        ctx, key_TBH, input_TBG, gate_TBN, tape_NBD, mask_before, mask_key, mask_past,
        key_weight, weight, bias, input_gain, gain, shift, cell_gain, cell_bias,
    ):  # fmt: skip
        steps, batch, size = key_TBH.shape
        slots = len(tape_NBD)
        tape = torch.cat([tape_NBD, tape_NBD.new_empty(steps, batch, 2 * size)])
        kept = _Steps.like(input_TBG, gate_TBN)
        map_key, map_past = linear_map(key_weight, batch, steps), linear_map(weight, batch, steps)
        for t in range(steps):
            window = tape[t : t + slots]
            key = torch.add(key_TBH[t], map_key(_masked(window[-1, :, :size], mask_before, t)), out=kept.key[t])
            if mask_key is not None:
                key.mul_(mask_key[t])
            _attend(window, gate_TBN[t], kept, t)
            past, past_cell = kept.read[t].split(size, 1)
            past = map_past(_masked(past, mask_past)).add_(bias)
            kept.input_inverse[t] = normalize(input_TBG[t], out=kept.input_norm[t])
            kept.past_inverse[t] = normalize(past, out=kept.past_norm[t])
            gates = torch.addcmul(shift, kept.input_norm[t], input_gain, out=kept.acts[t])
            i, f, g, o = _activate(gates.addcmul_(kept.past_norm[t], gain))
            hidden, cell = tape[t + slots].split(size, 1)
            torch.mul(f, past_cell, out=cell).addcmul_(i, g)
            kept.cell_inverse[t] = normalize(cell, out=kept.cell_norm[t])
            activated = torch.addcmul(cell_bias, kept.cell_norm[t], cell_gain, out=kept.activated[t]).tanh_()
            torch.mul(o, activated, out=hidden)
        gains = (input_gain, gain, cell_gain)
        ctx.save_for_backward(*kept, tape, mask_before, mask_key, mask_past, key_weight, weight, *gains)
        ctx.mark_non_differentiable(tape, kept.attention)
        return tape[slots:, :, :size].clone(), tape, kept.attention

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TBH, _tape, _attention):
        *kept, tape, mask_before, mask_key, mask_past, key_weight, weight, input_gain, gain, cell_gain = (
            ctx.saved_tensors
        )
        kept = _Steps(*kept)
        steps, batch, size = kept.key.shape
        slots = kept.attention.shape[2]
        input_norm = _NormBackward(kept.input_norm, kept.input_inverse, input_gain)
        past_norm = _NormBackward(kept.past_norm, kept.past_inverse, gain)
        cell_norm = _NormBackward(kept.cell_norm, kept.cell_inverse, cell_gain)
        grad_input, grad_past = torch.empty_like(kept.acts), torch.empty_like(kept.acts)
        grad_key, grad_read = torch.empty_like(kept.key), torch.empty_like(kept.read)
        grad_gate = torch.empty_like(kept.attention)
        # How much of a step reaches the entries of the tape: attention and gradient of the logits, newest slot first.
        spread = kept.attention.new_empty(steps, batch, 2, slots)
        spread[:, :, 0] = kept.attention.flip(2)
        map_key, map_past = linear_map(key_weight.t(), batch, steps), linear_map(weight.t(), batch, steps)
        carried = torch.zeros_like(kept.key[0])
        for t in range(steps - 1, -1, -1):
            grad_hidden, grad_cell = _from_windows(spread, grad_read, kept.key, t)
            grad_hidden = carried.add_(grad_TBH[t]).add_(grad_hidden)
            o, activated = kept.acts[t, :, 3 * size :], kept.activated[t]
            through = grad_hidden * o
            through.addcmul_(through * activated, activated, value=-1)
            grad_cell = cell_norm(through, t).add_(grad_cell)
            grad_gates = _gate_gradients(kept, t, grad_hidden, grad_cell)
            grad_input[t] = input_norm(grad_gates, t)
            grad_past[t] = past_norm(grad_gates, t)
            past, past_cell = grad_read[t].split(size, 1)
            torch.mul(grad_cell, kept.acts[t, :, size : 2 * size], out=past_cell)
            past.copy_(_masked(map_past(grad_past[t]), mask_past))
            window = tape[t : t + slots]
            grad_logits = _attend_backward(window, grad_read[t], kept, t, grad_gate[t])
            spread[t, :, 1] = grad_logits.flip(1)
            torch.bmm(grad_logits.unsqueeze(1), window[..., :size].transpose(0, 1), out=grad_key[t].unsqueeze(1))
            if mask_key is not None:
                grad_key[t].mul_(mask_key[t])
            carried = _masked(map_key(grad_key[t]), mask_before, t)
        before = _masked(tape[slots - 1 : -1, :, :size], mask_before)
        past = _masked(kept.read[..., :size], mask_past)
        return (
            grad_key, grad_input, grad_gate, None, None, None, None,
            weight_gradient(grad_key.flatten(0, 1), before.flatten(0, 1)),
            weight_gradient(grad_past.flatten(0, 1), past.flatten(0, 1)),
            grad_past.sum((0, 1)),
            input_norm.grad_gain, past_norm.grad_gain, past_norm.grad_bias, cell_norm.grad_gain, cell_norm.grad_bias,
        )  # fmt: skip


def _masked(values: Tensor, mask: Tensor | None, t: int | None = None) -> Tensor:
    """Values times the mask (of step t), contiguous."""
    if mask is None:
        return values.contiguous()
    return values * (mask if t is None else mask[t])


def _attend(window_NBD: Tensor, gate_BN: Tensor, kept: _Steps, t: int) -> None:
    """Gated softmax of step t, and the state and cell that it reads from the tape; see `gated_softmax`."""
    size = kept.key.shape[2]
    # A sum of products is faster than a product of a matrix and a vector per sentence.
    logits = (window_NBD[..., :size] * kept.key[t]).sum(2).t().contiguous().mul_(size**-0.5)
    top, kept.best[t] = logits.max(1, keepdim=True)
    exponential = logits.sub_(top).exp_()
    attention = torch.mul(exponential, gate_BN, out=kept.attention[t])
    total = attention.sum(1, keepdim=True).add_(ATTENTION_EPSILON)
    attention.div_(total)
    torch.div(exponential, total, out=kept.slope[t])
    torch.bmm(attention.unsqueeze(1), window_NBD.transpose(0, 1), out=kept.read[t].unsqueeze(1))


def _attend_backward(window_NBD: Tensor, grad_read: Tensor, kept: _Steps, t: int, grad_gate: Tensor) -> Tensor:
    """Gradients of `_attend`: of the products of key and states [B, N], and, written to `grad_gate`, of the gates."""
    attention = kept.attention[t]
    grad = (window_NBD * grad_read).sum(2).t().contiguous()
    grad -= (grad * attention).sum(1, keepdim=True)
    torch.mul(grad, kept.slope[t], out=grad_gate)
    grad.mul_(attention)
    # The maximum is subtracted from all logits.
    return grad.scatter_add_(1, kept.best[t], -grad.sum(1, keepdim=True)).mul_(kept.key.shape[2] ** -0.5)


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


def _activate(gates: Tensor) -> tuple[Tensor, ...]:
    """Apply the activations to the gates [B, G] in place; i, f, g, o."""
    size = gates.shape[1] // 4
    gates[:, : 2 * size].sigmoid_()
    gates[:, 2 * size : 3 * size].tanh_()
    gates[:, 3 * size :].sigmoid_()
    return gates.split(size, 1)


def _gate_gradients(kept: _Steps, t: int, grad_hidden: Tensor, grad_cell: Tensor) -> Tensor:
    """Gradients of the gates [B, G] of step t before their activations."""
    acts, size = kept.acts[t], kept.key.shape[2]
    grad = torch.addcmul(acts, acts, acts, value=-1)  # s - s^2
    by_i, by_f, by_g, by_o = grad.split(size, 1)
    i, _, g, _ = acts.split(size, 1)
    torch.mul(g, g, out=by_g).neg_().add_(1).mul_(i)
    by_i.mul_(g)
    by_f.mul_(kept.read[t, :, size:])
    grad[:, : 3 * size].unflatten(1, (3, size)).mul_(grad_cell.unsqueeze(1))
    by_o.mul_(kept.activated[t]).mul_(grad_hidden)
    return grad


class _NormBackward:
    """Backward pass of a layer normalization, step by step."""

    def __init__(self, normalized: Tensor, inverse: Tensor, gain: Tensor) -> None:
        self.normalized, self.gain = normalized, gain
        self.scale, self.ratio = normalize_factors(inverse, len(gain))
        self.grad_gain, self.grad_bias = torch.zeros_like(gain), torch.zeros_like(gain)

    def __call__(self, grad: Tensor, t: int) -> Tensor:
        """Gradient of the input of step t; those of gain and bias are added up."""
        self.grad_gain += (grad * self.normalized[t]).sum(0)
        self.grad_bias += grad.sum(0)
        return normalize_backward(grad * self.gain, self.normalized[t], self.scale[t], self.ratio[t])


def _from_windows(spread: Tensor, grad_read: Tensor, key: Tensor, t: int) -> tuple[Tensor | float, ...]:
    """Gradients of state and cell [B, H] of step t through the attention of the steps after it; 0 after the last.

    Step t + 1 + k reads it in slot k, counted from the newest: as value with its attention weight, and as key.
    """
    after = slice(t + 1, t + 1 + spread.shape[3])
    if after.start == len(key):
        return 0.0, 0.0
    coefficients = spread[after].diagonal(dim1=0, dim2=3).contiguous()  # [B, 2, steps]
    values, keys = grad_read[after].transpose(0, 1), key[after].transpose(0, 1)
    grad = torch.bmm(coefficients[:, :1], values).squeeze(1)
    hidden, cell = grad.split(key.shape[2], 1)
    return torch.baddbmm(hidden.unsqueeze(1), coefficients[:, 1:], keys).squeeze(1), cell
