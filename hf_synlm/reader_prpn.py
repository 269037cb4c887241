"""Reading network of PRPN: LSTM layers whose past is not the last state but an attention over the last N.

Layer by layer: a layer runs over all tokens before the next one begins, which the gates allow, as they depend on the
embeddings only. Of a layer, whatever does not depend on its own past is multiplied out for all tokens at once. The
tokens are one dimension before the sentences throughout, so that a step is a contiguous slice.

Shapes: T tokens, B sentences, N slots, I input size, H hidden size, D = 2 H (state and cell), G = 4 H (gates).

Source: Shen et al. 2018, section 5.1; `ReadingNetwork.py` and `LSTMCell.py` of the authors' code.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .layers_prpn import (
    ATTENTION_EPSILON,
    UnbiasedLayerNorm,
    drop,
    linear,
    normalize,
    normalize_backward,
    normalize_factors,
)
from .matrix_products import linear_map, weight_gradient
from .recurrent_dropout import keep_mask


class ReadingLayer(nn.Module):
    """One layer of the reading network.

        key = drop(W_k drop([x ; h_t-1]) + b_k);    a = gated softmax of <h_s, key> / sqrt(H) over the N last states
        h' = sum a_s h_s;    c' = sum a_s c_s
        i, f, g, o = LN(W_ih drop(x) + b_ih) + LN(W_hh (r * h') + b_hh)
        c = sigmoid(f) c' + sigmoid(i) tanh(g);    h = sigmoid(o) tanh(LN(c))

    The mask r is one of H numbers for all sentences and tokens of a call. What is read later are h and c themselves:
    without mask, and c before its normalization.

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
            tape_NBD: states and cells of the N tokens before the first one, the oldest first. No gradient flows there.

        Returns:
            States [T, B, H]; tape [N + T, B, D] of all states and cells; attention weights [T, B, N]. No gradient flows
            through the last two.

        Cost: T sequential steps of B (5 H^2 + 3 N H) multiplications, B T I 5 H at once.
        """
        size, training = self.key.out_features, self.training
        input_size = x_TBI.shape[-1]
        x_key = drop(x_TBI, self.key_dropout, training)
        key_TBH = linear(x_key, self.key.weight[:, :input_size], self.key.bias)
        gates_TBG = linear(drop(x_TBI, self.dropout, training), self.input.weight, self.input.bias)
        masks: list[Tensor | None] = [None, None, None]
        if training and self.key_dropout:
            masks[:2] = [keep_mask(key_TBH.shape, self.key_dropout, self.cell_norm.weight) for _ in range(2)]
        if training and self.recurrent_dropout:
            masks[2] = keep_mask((size,), self.recurrent_dropout, self.cell_norm.weight)
        weights = (
            self.key.weight[:, input_size:],
            self.recurrent.weight,
            self.recurrent.bias,
            self.recurrent_norm.weight,
            self.cell_norm.weight,
            self.cell_norm.bias,
        )
        dtype = torch.promote_types(tape_NBD.dtype, torch.float32)
        with torch.autocast(x_TBI.device.type, enabled=False):
            # Both normalizations add their bias to the gates.
            gates_TBG = self.input_norm(gates_TBG.to(dtype)) + self.recurrent_norm.bias
            tensors = (key_TBH, gates_TBG, gate_TBN, tape_NBD, *masks, *weights)
            hidden_TBH, tape, attention_TBN = _Reading.apply(*(None if t is None else t.to(dtype) for t in tensors))
        return hidden_TBH.to(x_TBI.dtype), tape, attention_TBN


class _Reading(torch.autograd.Function):
    """The recurrence of `ReadingLayer`; the masks may be None.

    Slot n of step t is entry t + n of the tape, and step t writes entry t + N. The weights get their gradients in one
    multiplication over all steps.
    """

    @staticmethod
    def forward(
        ctx, key_TBH, gates_TBG, gate_TBN, tape_NBD, mask_before, mask_key, mask_recurrent,
        key_weight, weight, bias, gain, cell_gain, cell_bias,
    ):  # fmt: skip
        steps, batch, size = key_TBH.shape
        slots = len(tape_NBD)
        tape = torch.cat([tape_NBD, tape_NBD.new_empty(steps, batch, 2 * size)])
        key, acts, normalized = torch.empty_like(key_TBH), torch.empty_like(gates_TBG), torch.empty_like(gates_TBG)
        read = key.new_empty(steps, batch, 2 * size)
        cell_normalized, activated = torch.empty_like(key), torch.empty_like(key)
        attention, slope = torch.empty_like(gate_TBN), torch.empty_like(gate_TBN)
        best = torch.empty(steps, batch, 1, dtype=torch.long, device=key.device)
        inverse, cell_inverse = key.new_empty(steps, batch, 1), key.new_empty(steps, batch, 1)
        map_key, map_past = linear_map(key_weight, batch, steps), linear_map(weight, batch, steps)
        for t in range(steps):
            window = tape[t : t + slots]  # [N, B, D]
            before = tape[t + slots - 1, :, :size]
            if mask_before is not None:
                before = before * mask_before[t]
            torch.add(key_TBH[t], map_key(before.contiguous()), out=key[t])
            if mask_key is not None:
                key[t].mul_(mask_key[t])
            logits = (window[..., :size] * key[t]).sum(2).t().contiguous().mul_(size**-0.5)
            top, best[t] = logits.max(1, keepdim=True)
            exponential = logits.sub_(top).exp_()
            torch.mul(exponential, gate_TBN[t], out=attention[t])
            total = attention[t].sum(1, keepdim=True).add_(ATTENTION_EPSILON)
            attention[t].div_(total)
            torch.div(exponential, total, out=slope[t])
            torch.bmm(attention[t].unsqueeze(1), window.transpose(0, 1), out=read[t].unsqueeze(1))
            past, past_cell = read[t].split(size, 1)
            z = map_past(past.contiguous() if mask_recurrent is None else past * mask_recurrent).add_(bias)
            inverse[t] = normalize(z, out=normalized[t])
            i, f, g, o = _activate(torch.addcmul(gates_TBG[t], normalized[t], gain, out=acts[t]))
            hidden, cell = tape[t + slots].split(size, 1)
            torch.mul(f, past_cell, out=cell).addcmul_(i, g)
            cell_inverse[t] = normalize(cell, out=cell_normalized[t])
            torch.addcmul(cell_bias, cell_normalized[t], cell_gain, out=activated[t]).tanh_()
            torch.mul(o, activated[t], out=hidden)
        ctx.save_for_backward(
            tape, key, read, acts, normalized, inverse, cell_normalized, cell_inverse, activated,
            attention, slope, best, mask_before, mask_key, mask_recurrent, key_weight, weight, gain, cell_gain,
        )  # fmt: skip
        ctx.mark_non_differentiable(tape, attention)
        return tape[slots:, :, :size].clone(), tape, attention

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_TBH, _tape, _attention):
        (
            tape, key, read, acts, normalized, inverse, cell_normalized, cell_inverse, activated,
            attention, slope, best, mask_before, mask_key, mask_recurrent, key_weight, weight, gain, cell_gain,
        ) = ctx.saved_tensors  # fmt: skip
        steps, batch, size = key.shape
        slots = attention.shape[2]
        scale, ratio = normalize_factors(inverse, 4 * size)
        cell_scale, cell_ratio = normalize_factors(cell_inverse, size)
        gates_slope, cell_slope = _gate_slopes(acts, activated, read[..., size:])
        grad_cell_out = cell_slope * cell_gain
        forget = acts[..., size : 2 * size]
        # What reaches the entries of the tape, through the windows of later steps; newest slot first.
        spread = attention.new_empty(steps, batch, 2, slots)
        spread[:, :, 0] = attention.flip(2)
        grad_read, grad_key = torch.empty_like(read), torch.empty_like(key)
        grad_gates, grad_z = torch.empty_like(acts), torch.empty_like(acts)
        grad_gate, grad_hidden = torch.empty_like(attention), torch.empty_like(key)
        map_key, map_past = linear_map(key_weight.t(), batch, steps), linear_map(weight.t(), batch, steps)
        carried = None
        for t in range(steps - 1, -1, -1):
            grad, grad_cell = _from_windows(spread, grad_read, key, t, slots)
            grad = grad_TBH[t] if grad is None else grad.add_(grad_TBH[t])
            grad_hidden[t] = grad if carried is None else grad + carried
            through = normalize_backward(
                grad_hidden[t] * grad_cell_out[t], cell_normalized[t], cell_scale[t], cell_ratio[t]
            )
            grad_cell = through if grad_cell is None else through.add_(grad_cell)
            _gate_gradients(grad_hidden[t], grad_cell, gates_slope[t], out=grad_gates[t])
            grad_z[t] = normalize_backward(grad_gates[t] * gain, normalized[t], scale[t], ratio[t])
            past, past_cell = grad_read[t].split(size, 1)
            torch.mul(grad_cell, forget[t], out=past_cell)
            past.copy_(map_past(grad_z[t]))
            if mask_recurrent is not None:
                past.mul_(mask_recurrent)
            window = tape[t : t + slots]
            grad_weights = (window * grad_read[t]).sum(2).t().contiguous()
            grad_weights -= (grad_weights * attention[t]).sum(1, keepdim=True)
            torch.mul(grad_weights, slope[t], out=grad_gate[t])
            grad_logits = grad_weights.mul_(attention[t])
            # The maximum is subtracted from all logits.
            grad_logits.scatter_add_(1, best[t], -grad_logits.sum(1, keepdim=True)).mul_(size**-0.5)
            spread[t, :, 1] = grad_logits.flip(1)
            torch.bmm(grad_logits.unsqueeze(1), window[..., :size].transpose(0, 1), out=grad_key[t].unsqueeze(1))
            if mask_key is not None:
                grad_key[t].mul_(mask_key[t])
            carried = map_key(grad_key[t])
            if mask_before is not None:
                carried.mul_(mask_before[t])
        before, past = tape[slots - 1 : slots - 1 + steps, :, :size], read[..., :size]
        before = before if mask_before is None else before * mask_before
        past = past if mask_recurrent is None else past * mask_recurrent
        grad_cell_norm = grad_hidden * cell_slope
        return (
            grad_key, grad_gates, grad_gate, None, None, None, None,
            weight_gradient(grad_key.flatten(0, 1), before.reshape(-1, size)),
            weight_gradient(grad_z.flatten(0, 1), past.reshape(-1, size)),
            grad_z.sum((0, 1)),
            (grad_gates * normalized).sum((0, 1)),
            (grad_cell_norm * cell_normalized).sum((0, 1)),
            grad_cell_norm.sum((0, 1)),
        )  # fmt: skip


def _activate(gates: Tensor) -> tuple[Tensor, ...]:
    """Apply the activations to the gates [B, G] in place; i, f, g, o."""
    size = gates.shape[1] // 4
    gates[:, : 2 * size].sigmoid_()
    gates[:, 2 * size : 3 * size].tanh_()
    gates[:, 3 * size :].sigmoid_()
    return gates.split(size, 1)


def _gate_slopes(acts: Tensor, activated: Tensor, past_cell: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives by the gates (of the cell by i, f, g, of the state by o), and of the state by the normalized cell."""
    i, f, g, o = acts.chunk(4, -1)
    slopes = torch.empty_like(acts)
    by_i, by_f, by_g, by_o = slopes.chunk(4, -1)
    torch.mul(i - i * i, g, out=by_i)
    torch.mul(f - f * f, past_cell, out=by_f)
    torch.mul(1 - g * g, i, out=by_g)
    torch.mul(o - o * o, activated, out=by_o)
    return slopes, (1 - activated * activated).mul_(o)


def _gate_gradients(grad_hidden: Tensor, grad_cell: Tensor, slopes: Tensor, out: Tensor) -> None:
    """Gradients of the gates [B, G] before their activations."""
    batch, size = grad_hidden.shape
    first = 3 * size
    torch.mul(grad_cell.unsqueeze(1), slopes[:, :first].view(batch, 3, size), out=out[:, :first].view(batch, 3, size))
    torch.mul(grad_hidden, slopes[:, first:], out=out[:, first:])


def _from_windows(spread: Tensor, grad_read: Tensor, key: Tensor, t: int, slots: int) -> tuple[Tensor, ...]:
    """Gradients of state and cell [B, H] of step t through the reading of the next `slots` steps; None after the last.

    Step t + 1 + k reads it in slot k, counted from the newest: as value with its attention weight, and as key.
    """
    after = slice(t + 1, min(len(key), t + 1 + slots))
    if after.start == after.stop:
        return None, None
    coefficients = spread[after].diagonal(dim1=0, dim2=3).contiguous()  # [B, 2, steps]
    values, keys = grad_read[after].transpose(0, 1), key[after].transpose(0, 1)
    grad = torch.bmm(coefficients[:, :1], values).squeeze(1)
    hidden, cell = grad.split(key.shape[2], 1)
    return torch.baddbmm(hidden.unsqueeze(1), coefficients[:, 1:], keys).squeeze(1), cell


__all__ = ["ReadingLayer"]
