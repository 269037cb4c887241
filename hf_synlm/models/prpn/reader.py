# SPDX-License-Identifier: Apache-2.0
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
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.matrix_products import linear, linear_map, uses_onednn, weight_gradient, without_autocast
from hf_synlm.core.module_tools import weight_of
from hf_synlm.models.prpn.parser import drop
from hf_synlm.recurrent.layers import keep_mask

NORM_EPSILON = 1e-6
ATTENTION_EPSILON = 1e-8


class UnbiasedLayerNorm(nn.Module):
    """Parameters of a layer normalization gamma (x - mean) / (std + 1e-6) + beta, with the unbiased std (n - 1).

    Applied by `normalize` inside the recurrence. Source: `LayerNormalization` of the authors' code.
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

    The mask r (`recurrent_dropout`) has H numbers, the same for all sentences and tokens of a call. Later steps read h
    and c without the mask, and c before its normalization.
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
        """Read all tokens: states [T, B, H]; tape [N + T, B, D] of all states and cells; attention weights [T, B, N].

        No gradient flows through the last two, nor into `tape_NBD`, states and cells of the N tokens before the first
        one. Tape and gates have the oldest slot first. Under autocast the multiplications over all tokens run in its
        type; the recurrence stays in float32. Cost: T sequential steps of B (5 H^2 + 3 N H) multiplications, B T I 5 H
        at once.
        """
        size, training = self.key.out_features, self.training
        input_size = x_TBI.shape[-1]
        key_weight = weight_of(self.key)
        x_key = drop(x_TBI, self.key_dropout, training)
        key_TBH = linear(x_key, key_weight[:, :input_size], self.key.bias)
        input_TBG = linear(drop(x_TBI, self.dropout, training), weight_of(self.input), self.input.bias)
        masks: list[Tensor | None] = [None, None]
        if training and self.key_dropout:
            masks = [keep_mask(key_TBH.shape, self.key_dropout, self.cell_norm.weight) for _ in range(2)]
        weight = weight_of(self.recurrent)
        if training and self.recurrent_dropout:
            weight = weight * keep_mask((size,), self.recurrent_dropout, self.cell_norm.weight)
        dtype = torch.promote_types(tape_NBD.dtype, torch.float32)
        with without_autocast(x_TBI.device.type):
            shift = (self.input_norm.bias + self.recurrent_norm.bias).to(dtype)
            normalized = _Normalize.apply(input_TBG.to(dtype))
            gates_TBG = torch.addcmul(shift, normalized, self.input_norm.weight.to(dtype))
            scale = size**-0.5  # of the logits
            weights = key_weight[:, input_size:].to(dtype) * scale, weight, self.recurrent.bias
            norms = self.recurrent_norm.weight, self.cell_norm.weight, self.cell_norm.bias
            tensors = (key_TBH.to(dtype) * scale, gates_TBG, gate_TBN, tape_NBD, *masks, *weights, *norms)
            hidden_TBH, tape, attention_TBN = _Reading.apply(*(None if t is None else t.to(dtype) for t in tensors))
        return hidden_TBH.to(x_TBI.dtype), tape, attention_TBN


class _Steps(NamedTuple):
    """Values of all steps that the backward pass needs, each [T, B, *]."""

    key: Tensor
    """Keys, times the scale of the logits."""
    logits: Tensor
    attention: Tensor
    """Attention weights, and in a last slot the share of the constant in their denominator."""
    read: Tensor
    """State and cell that the attention reads from the tape."""
    past: Tensor
    """What the recurrence adds to the gates, before its normalization."""
    acts: Tensor
    """i, f, g, o after their activations."""
    activated: Tensor
    """tanh(LN(c))."""
    past_inverse: Tensor
    """1 / deviation of the rows of `past`, and of c."""
    cell_inverse: Tensor


class _Reading(torch.autograd.Function):
    """The recurrence of `ReadingLayer`; the masks may be None.

    Slot n of step t is entry t + n of the tape, and step t writes entry t + N. What does not depend on later steps is
    computed for all steps at once, in backward too, and the weights get their gradients in one multiplication.
    """

    @staticmethod
    def forward(
        ctx, key_TBH, input_TBG, gate_TBN, tape_NBD, mask_before, mask_key,
        key_weight, weight, bias, gain, cell_gain, cell_bias,
    ):  # fmt: skip
        steps, batch, size = key_TBH.shape
        slots = len(tape_NBD)
        tape = torch.cat([tape_NBD, tape_NBD.new_empty(steps, batch, 2 * size)])
        # A slot more, whose weight is the constant in the denominator of `gated_softmax`.
        log_gate = F.pad(gate_TBN, (0, 1), value=ATTENTION_EPSILON).log()
        logits = torch.empty_like(log_gate)
        attention, read = torch.empty_like(logits), tape.new_empty(steps, batch, 2 * size)
        key, past = key_TBH.clone(), bias.repeat(steps, batch, 1)
        acts, activated = torch.empty_like(input_TBG), torch.empty_like(key)
        add_key, add_past = _adding_map(key_weight, batch, steps), _adding_map(weight, batch, steps)
        add_norm, add_cell_norm = _NormStep(gain, tape), _NormStep(cell_gain, tape)
        for t in range(steps):  # `x[t] += y` would copy the sum once more
            window = tape[t : t + slots]
            add_key(key[t], _masked(window[-1, :, :size], mask_before, t))
            if mask_key is not None:
                key[t].mul_(mask_key[t])
            torch.bmm(key[t, :, None], window[..., :size].permute(1, 2, 0), out=logits[t, :, None, :slots])
            torch.amax(logits[t, :, :slots], 1, keepdim=True, out=logits[t, :, slots:])
            torch.softmax(logits[t] + log_gate[t], 1, out=attention[t])
            torch.bmm(attention[t, :, None, :slots], window.transpose(0, 1), out=read[t, :, None])
            add_past(past[t], read[t, :, :size])
            gates = add_norm(input_TBG[t], past[t], acts[t])
            gates[:, : 2 * size].sigmoid_()
            gates[:, 2 * size : 3 * size].tanh_()
            gates[:, 3 * size :].sigmoid_()
            i, f, g, o = gates.split(size, 1)
            hidden, cell = tape[t + slots].split(size, 1)
            torch.mul(f, read[t, :, size:], out=cell).addcmul_(i, g)
            add_cell_norm(cell_bias, cell, activated[t]).tanh_()
            torch.mul(o, activated[t], out=hidden)
        inverses = torch.stack(add_norm.inverses), torch.stack(add_cell_norm.inverses)
        kept = _Steps(key, logits, attention, read, past, acts, activated, *inverses)
        weights = attention[..., :slots].contiguous()
        ctx.save_for_backward(*kept, tape, mask_before, mask_key, key_weight, weight, gain, cell_gain)
        ctx.mark_non_differentiable(tape, weights)
        return tape[slots:, :, :size].clone(), tape, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TBH, _tape, _attention):
        *kept, tape, mask_before, mask_key, key_weight, weight, gain, cell_gain = ctx.saved_tensors
        kept = _Steps(*kept)
        steps, batch, size = kept.key.shape
        slots = kept.attention.shape[2] - 1
        past_norm = _NormBackward(kept.past, kept.past_inverse)
        cell_norm = _NormBackward(tape[slots:, :, size:], kept.cell_inverse)
        gate_slopes = _gate_slopes(kept)
        past_slopes = gate_slopes * (gain * past_norm.scale)
        state_slopes = kept.acts[..., 3 * size :] * (1 - kept.activated.square())  # of h by LN(c)
        cell_slopes = state_slopes * (cell_gain * cell_norm.scale)
        largest = kept.logits[..., :slots].argmax(2, keepdim=True)
        largest = torch.zeros_like(kept.logits[..., :slots]).scatter_(2, largest, 1.0)
        grad_hidden = grad_TBH.clone()  # grows to the whole gradient
        grad_cell, grad_past = torch.empty_like(kept.key), torch.empty_like(kept.past)
        grad_key, grad_read = torch.empty_like(kept.key), torch.empty_like(kept.read)
        grad_attention = torch.zeros_like(kept.attention)
        # How much of a step reaches the entries of the tape: attention, and gradient of the logits.
        spread = kept.attention[..., None, :slots].repeat(1, 1, 2, 1)
        map_key, map_past = linear_map(key_weight.t(), batch, steps), linear_map(weight.t(), batch, steps)
        with without_autocast(grad_TBH.device.type):
            for t in range(steps - 1, -1, -1):
                from_cell = _from_windows(spread, grad_read, kept.key, grad_hidden[t], t)
                torch.mul(grad_hidden[t], cell_slopes[t], out=grad_cell[t])
                cell_norm.project(grad_cell[t], t)
                if from_cell is not None:
                    grad_cell[t].add_(from_cell)
                by_cell = past_slopes[t, :, : 3 * size].unflatten(1, (3, size))
                torch.mul(by_cell, grad_cell[t, :, None], out=grad_past[t, :, : 3 * size].unflatten(1, (3, size)))
                torch.mul(past_slopes[t, :, 3 * size :], grad_hidden[t], out=grad_past[t, :, 3 * size :])
                past_norm.project(grad_past[t], t)
                grad_read[t, :, :size].copy_(map_past(grad_past[t]))
                torch.mul(grad_cell[t], kept.acts[t, :, size : 2 * size], out=grad_read[t, :, size:])
                window = tape[t : t + slots]
                torch.bmm(grad_read[t, :, None], window.permute(1, 2, 0), out=grad_attention[t, :, None, :slots])
                # The derivative of a softmax, but the last slot has the largest logit for its own.
                grad = torch._softmax_backward_data(grad_attention[t], kept.attention[t], 1, grad_read.dtype)
                torch.addcmul(grad[:, :slots], largest[t], grad[:, slots:], out=spread[t, :, 1])
                states = window[..., :size].transpose(0, 1)
                torch.bmm(spread[t, :, 1:], states, out=grad_key[t, :, None])
                if mask_key is not None:
                    grad_key[t].mul_(mask_key[t])
                if t and mask_before is not None:
                    grad_hidden[t - 1].addcmul_(map_key(grad_key[t]), mask_before[t])
                elif t:
                    grad_hidden[t - 1].add_(map_key(grad_key[t]))
            grad_gates = gate_slopes.unflatten(2, (4, size))
            grad_gates[:, :, :3].mul_(grad_cell[:, :, None])
            grad_gates[:, :, 3].mul_(grad_hidden)
            grad_gates = grad_gates.flatten(2)
            grad_activated = state_slopes.mul_(grad_hidden)
            before, past = _masked(tape[slots - 1 : -1, :, :size], mask_before), kept.read[..., :size]
            return (
                grad_key, grad_gates, _gate_gradient(kept, grad_attention), None, None, None,
                weight_gradient(grad_key.flatten(0, 1), before.flatten(0, 1)),
                weight_gradient(grad_past.flatten(0, 1), past.flatten(0, 1)),
                grad_past.sum((0, 1)),
                (grad_gates * past_norm.normalized).sum((0, 1)),
                (grad_activated * cell_norm.normalized).sum((0, 1)), grad_activated.sum((0, 1)),
            )  # fmt: skip


def _masked(values: Tensor, mask: Tensor | None, t: int | None = None) -> Tensor:
    """Values times the mask (of step t)."""
    if mask is None:
        return values
    return values * (mask if t is None else mask[t])


def _gate_gradient(kept: _Steps, grad_attention: Tensor) -> Tensor:
    """Gradients of the gates, where e = exp(logit - max) / sum is the derivative of a weight by its own gate."""
    *_, slots = kept.attention[..., :-1].shape
    grad = grad_attention - (grad_attention * kept.attention).sum(2, keepdim=True)
    exponential = (kept.logits[..., :slots] - kept.logits[..., slots:]).exp()
    return grad[..., :slots] * exponential * (kept.attention[..., slots:] / ATTENTION_EPSILON)


class _Normalize(torch.autograd.Function):
    """`normalize` with its gradient."""

    @staticmethod
    def forward(ctx, x):
        normalized = torch.empty_like(x)
        ctx.save_for_backward(normalized, normalize(x, out=normalized))
        return normalized

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        normalized, inverse = ctx.saved_tensors
        return normalize_backward(grad, normalized, *normalize_factors(inverse, grad.shape[-1]))


def normalize(x: Tensor, out: Tensor) -> Tensor:
    """Write (x - mean) / (std + 1e-6) to `out`, with the unbiased std (n - 1); 1 / biased deviation [..., 1].

    The stock kernel divides by the biased deviation; the rest is a factor per row.
    """
    # An epsilon of 0 would make NaN of constant rows; this one changes no other.
    centred, _, inverse = torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-30)
    torch.mul(centred, _row_factor(inverse, x.shape[-1]), out=out)
    return inverse


def _row_factor(inverse: Tensor, size: int) -> Tensor:
    """Biased deviation / (unbiased deviation + 1e-6), of 1 / biased deviation."""
    return 1 / (math.sqrt(size / (size - 1)) + NORM_EPSILON * inverse)


def normalize_factors(inverse: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """What `normalize_backward` needs of every row: scale = r f and ratio = k / f, each [..., 1].

    r = 1 / biased deviation, f = `normalize`'s factor of the row, k = unbiased / biased deviation.
    """
    factor = _row_factor(inverse, size)
    return inverse * factor, math.sqrt(size / (size - 1)) / factor


def normalize_backward(grad: Tensor, normalized: Tensor, scale: Tensor, ratio: Tensor) -> Tensor:
    """Gradient of the input y -> x of `normalize`: dx = scale (dy - mean(dy) - ratio y mean(dy y))."""
    slope = (grad * normalized).mean(-1, keepdim=True).mul_(ratio).mul_(scale)
    offset = grad.mean(-1, keepdim=True).mul_(scale).neg_()
    return torch.addcmul(offset, grad, scale).addcmul_(normalized, slope, value=-1)


class _NormStep:
    """start + gain * `normalize`(x), step by step; keeps 1 / biased deviation of every step."""

    def __init__(self, gain: Tensor, like: Tensor) -> None:
        self.gain, self.size = gain, len(gain)
        self.ratio = like.new_full((1, 1), math.sqrt(self.size / (self.size - 1)))
        self.inverses: list[Tensor] = []

    def __call__(self, start: Tensor, x: Tensor, out: Tensor) -> Tensor:
        """Write the result to `out`."""
        centred, _, inverse = torch.native_layer_norm(x, (self.size,), self.gain, None, 1e-30)
        self.inverses.append(inverse)
        return torch.addcdiv(start, centred, torch.add(self.ratio, inverse, alpha=NORM_EPSILON), out=out)


class _NormBackward:
    """`normalize_backward` step by step, as a projection: dx = scale (dy - (dy P^T) P) with two rows P."""

    def __init__(self, x_TBD: Tensor, inverse: Tensor) -> None:
        steps, batch, size = x_TBD.shape
        self.scale, ratio = normalize_factors(inverse, size)
        self.normalized = torch.empty(x_TBD.shape, dtype=x_TBD.dtype, device=x_TBD.device)
        normalize(x_TBD, out=self.normalized)
        self.rows = x_TBD.new_empty(steps, batch, 2, size)
        self.rows[:, :, 0] = size**-0.5
        torch.mul(self.normalized, (ratio / size).sqrt(), out=self.rows[:, :, 1])

    def project(self, grad: Tensor, t: int) -> None:
        """Replace scale * dy [B, D] of step t by dx."""
        rows, grad = self.rows[t], grad[:, None]
        grad.baddbmm_(torch.bmm(grad, rows.transpose(1, 2)), rows, alpha=-1)


def _gate_slopes(kept: _Steps) -> Tensor:
    """Derivatives [T, B, G] of c by the scores of i, f, g, and of h by those of o."""
    acts, size = kept.acts, kept.key.shape[2]
    slopes = torch.addcmul(acts, acts, acts, value=-1)  # s - s^2
    by_i, by_f, by_g, by_o = slopes.split(size, 2)
    i, _, g, _ = acts.split(size, 2)
    torch.mul(g, g, out=by_g).neg_().add_(1).mul_(i)
    by_i.mul_(g)
    by_f.mul_(kept.read[..., size:])
    by_o.mul_(kept.activated)
    return slopes


def _from_windows(spread: Tensor, grad_read: Tensor, key: Tensor, grad_hidden: Tensor, t: int) -> Tensor | None:
    """Gradients of state and cell of step t through the attention of the steps after it; None after the last.

    Step t + 1 + k reads it in slot N - 1 - k: as value with its attention weight, and as key. That of the state is
    added to `grad_hidden`, that of the cell returned, each [B, H].
    """
    after = slice(t + 1, t + 1 + spread.shape[3])
    count, slots, size = len(key[after]), spread.shape[3], key.shape[2]
    if count == 0:
        return None
    time, batch, kind, slot = spread.stride()
    view = spread[t + 1 :].as_strided(
        (spread.shape[1], 2, count), (batch, kind, time - slot), spread.storage_offset() + (t + 1) * time + slots - 1
    )
    coefficients = view.contiguous()
    values = torch.bmm(coefficients[:, :1], grad_read[after].transpose(0, 1)).squeeze(1)
    grad_hidden += values[:, :size]
    grad_hidden.unsqueeze(1).baddbmm_(coefficients[:, 1:], key[after].transpose(0, 1))
    return values[:, size:]


def _adding_map(weight_OI: Tensor, num_rows: int, num_uses: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """The map (y [R, O], x [R, I]) -> y + x W^T, written to y; see `linear_map`."""
    if not uses_onednn(weight_OI):
        transposed = weight_OI.t()
        return lambda y_RO, x_RI: y_RO.addmm_(x_RI, transposed)
    product = linear_map(weight_OI, num_rows, num_uses)
    return lambda y_RO, x_RI: y_RO.add_(product(x_RI.contiguous()))
