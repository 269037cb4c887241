"""A layer of ON-LSTM over a whole segment, with its own backward pass.

The slow and obvious version is `step` in `tests/reference/on_lstm.py`; autograd over its loop gives the gradients.

Two master gates open and close the cell in a fixed order of its chunks: the first chunks hold short-lived information,
the last ones long-lived information. With the gates g = W_x x_t + W_h h_t-1 + b, cumax = cumsum(softmax):

    I = 1 - cumax(g_master_in)      F = cumax(g_master_forget)      W = I F      (N numbers, one per chunk of k units)
    f = sigmoid(g_forget) W + (F - W)         i = sigmoid(g_in) W + (I - W)
    c_t = f c_t-1 + i tanh(g_cell)            h_t = sigmoid(g_out) tanh(c_t)

The syntactic distance of the gap before token t is d_t = 1 - mean(F), the expected position of the split divided by N:
d_t = sum_j softmax(g_master_forget)_j j / N, with j from 0.

Autograd over the loop would add up the gradient of W_h step by step and write zeros for every slice of its input. Here
everything outside the recurrence is computed for all steps at once, and the gradient of W_h is one product.

Shapes: T tokens, B sentences, D input, H hidden, N chunks, k units per chunk (H = N k), G = 2 N + 4 H gates, in the
order of the authors' matrices: master-in (N), master-forget (N), out (H), cell (H), in (H), forget (H).

Source: Shen et al. 2019, section 4; `ON_LSTM.py` of Ordered-Neurons; the split head of Du et al. 2020, Eq. 16 and 17.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from .matrix_products import linear_map, weight_gradient, without_autocast
from .module_tools import weight_of
from .recurrent_layers import weight_dropout


class ONLSTMLayer(nn.Module):
    """One layer: gates, recurrence, and distances."""

    def __init__(self, input_size: int, hidden_size: int, chunk_size: int, split_head: bool = False) -> None:
        super().__init__()
        self.num_chunks = hidden_size // chunk_size
        self.ih = nn.Linear(input_size, 4 * hidden_size + 2 * self.num_chunks)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size + 2 * self.num_chunks)
        self.split_head = nn.Linear(self.num_chunks, self.num_chunks) if split_head else None

    def forward(
        self, inputs_TBD: Tensor, hidden_BH: Tensor, cell_BH: Tensor, dropout: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Read a segment.

        Args:
            inputs_TBD: inputs.
            hidden_BH: h before the first step.
            cell_BH: c before the first step.
            dropout: probability of dropping a recurrent weight.

        Returns:
            h [T + 1, B, H] and c [T + 1, B, H] before the first and after every step; the distances [T, B]; and the
            distances of the split head, or None.
        """
        weight = weight_dropout(weight_of(self.hh), dropout, self.training, rescale=False)
        bias = self.ih.bias + self.hh.bias
        states, cells, master_forget = on_lstm(
            inputs_TBD, hidden_BH, cell_BH, weight_of(self.ih), weight, bias, self.num_chunks
        )
        syd_distance = None
        if self.split_head is not None:
            split = weight_dropout(weight_of(self.split_head), dropout, self.training, rescale=False)
            syd_distance = split_distance(F.linear(master_forget.to(split.dtype), split, self.split_head.bias))
        return states.to(inputs_TBD.dtype), cells, split_distance(master_forget), syd_distance


def split_distance(master_forget: Tensor) -> Tensor:
    """Syntactic distance of the scores of a master forget gate: 1 - mean(cumax(scores)), in [0, 1 - 1 / N].

    Args:
        master_forget: [..., N].

    Returns:
        [...], in float32 or higher.
    """
    count = master_forget.shape[-1]
    scores = master_forget.to(torch.promote_types(master_forget.dtype, torch.float32))
    return (scores.softmax(-1) * (torch.arange(count, device=scores.device) / count)).sum(-1)


@torch.compiler.disable
def on_lstm(
    inputs_TBD: Tensor,
    hidden_BH: Tensor,
    cell_BH: Tensor,
    input_weight_GD: Tensor,
    weight_GH: Tensor,
    bias_G: Tensor,
    num_chunks: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a layer over a segment.

    Matrix products run in the type of the inputs (or of autocast), everything else in float32 or higher.

    Args:
        inputs_TBD: inputs.
        hidden_BH: h before the first step.
        cell_BH: c before the first step.
        input_weight_GD: matrix of the inputs, W_x.
        weight_GH: recurrent matrix, W_h.
        bias_G: bias of the gates.
        num_chunks: number of chunks N.

    Returns:
        h [T + 1, B, H] and c [T + 1, B, H] before the first and after every step, and the scores of the master forget
        gate [T, B, N].

    Cost: T steps of one product [B, H] x [H, G] and a dozen elementwise operations, forward and backward; O(T B G)
    memory. Nothing waits for the device.
    """
    return _ONLSTM.apply(inputs_TBD, hidden_BH, cell_BH, input_weight_GD, weight_GH, bias_G, num_chunks)


class _ONLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, hidden, cell, input_weight, weight, bias, num_chunks):
        (steps, batch, _), size = inputs.shape, hidden.shape[1]
        grid = (batch, num_chunks, size // num_chunks)
        device = inputs.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        dtype = torch.promote_types(low, torch.float32)
        with without_autocast(device):
            rows = inputs.to(low).reshape(steps * batch, -1)
            from_inputs = linear_map(input_weight.to(low), len(rows))
            # In the end these are the scores of the master gates (2 N), and the activations of the others (4 H).
            acts = (from_inputs(rows).to(dtype) + bias).view(steps, batch, -1)
            from_states = linear_map(weight.to(low), batch, steps)
            probs = acts.new_empty(steps, batch, 2, num_chunks)
            masters = torch.empty_like(probs)  # I and F
            states = acts.new_empty(steps + 1, batch, size)
            cells = torch.empty_like(states)
            states[0], cells[0] = hidden, cell
            for t in range(steps):
                acts[t] += from_states(states[t].to(low))
                scores = acts[t, :, : 2 * num_chunks].view(batch, 2, num_chunks)
                # cumax; the first one is 1 - cumax (the master gates I and F)
                master = _running_sum(torch.softmax(scores, -1, out=probs[t]), out=masters[t])
                torch.sub(1, master[:, 0], out=master[:, 0])
                overlap = (master[:, 0] * master[:, 1])[:, None]
                units = acts[t, :, 2 * num_chunks :].view(batch, 4, *grid[1:])
                units[:, 0].sigmoid_()
                units[:, 1].tanh_()
                units[:, 2:].sigmoid_()
                opened = torch.addcmul((master - overlap)[..., None], units[:, 2:], overlap[..., None])  # i and f
                after = torch.mul(opened[:, 1], cells[t].view(grid), out=cells[t + 1].view(grid))
                after.addcmul_(opened[:, 0], units[:, 1])
                torch.mul(units[:, 0], after.tanh(), out=states[t + 1].view(grid))
        ctx.save_for_backward(inputs, input_weight, weight, acts, probs, masters, states, cells)
        ctx.low, ctx.types = low, tuple(tensor.dtype for tensor in (inputs, hidden, cell, input_weight, weight, bias))
        ctx.set_materialize_grads(False)
        return states, cells, acts[:, :, num_chunks : 2 * num_chunks].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_states, grad_cells, grad_forget):
        inputs, input_weight, weight, acts, probs, masters, states, cells = ctx.saved_tensors
        (steps, batch, gates), num_chunks, low = acts.shape, probs.shape[3], ctx.low
        grid = (batch, num_chunks, states.shape[2] // num_chunks)
        if grad_states is None:
            grad_states = torch.zeros_like(states)
        grads, master_slopes, opened_forget, state_slopes = _slopes(acts, masters, cells)
        grad_hidden = grad_states[steps]
        grad_cell = (torch.zeros_like(cells[0]) if grad_cells is None else grad_cells[steps]).view(grid)
        with torch.autocast(acts.device.type, enabled=False):
            to_states = linear_map(weight.to(low).t(), batch, steps)
            for t in reversed(range(steps)):
                down = grad_hidden.view(grid)
                through = torch.addcmul(grad_cell, down, state_slopes[t])
                units = grads[t, :, 2 * num_chunks :].view(batch, 4, *grid[1:])
                units[:, 0].mul_(down)
                units[:, 1:].mul_(through[:, None])
                # Backward of cumax: of cumsum, then of softmax. A softmax ignores a constant, here the sum of all.
                master = (master_slopes[t] * through[:, None]).sum(-1)
                master = master - _running_sum(master)
                master = master - (probs[t] * master).sum(-1, keepdim=True)
                torch.mul(probs[t], master, out=grads[t, :, : 2 * num_chunks].view(batch, 2, num_chunks))
                if grad_forget is not None:
                    grads[t, :, num_chunks : 2 * num_chunks] += grad_forget[t]
                grad_cell = through * opened_forget[t]
                if grad_cells is not None:
                    grad_cell = grad_cell + grad_cells[t].view(grid)
                grad_hidden = grad_states[t] + to_states(grads[t].to(low))
            grads = grads.view(-1, gates)
            grad_bias, grads = grads.sum(0), grads.to(low)
            grad_inputs = None
            if ctx.needs_input_grad[0]:
                grad_inputs = linear_map(input_weight.to(low).t(), len(grads))(grads).view(inputs.shape)
            grad_input_weight = weight_gradient(grads, inputs.to(low).reshape(len(grads), -1))
            grad_weight = weight_gradient(grads, states[:-1].to(low).view(len(grads), -1))
        results = (grad_inputs, grad_hidden, grad_cell.flatten(1), grad_input_weight, grad_weight, grad_bias)
        typed = (None if tensor is None else tensor.to(dtype) for tensor, dtype in zip(results, ctx.types, strict=True))
        return (*typed, None)


def _running_sum(values: Tensor, out: Tensor | None = None) -> Tensor:
    """Cumulative sum over the last dimension; CUDA's kernel is not deterministic, a product with a triangle is."""
    if values.device.type == "cpu" or not torch.are_deterministic_algorithms_enabled():
        return torch.cumsum(values, -1, out=out)
    size = values.shape[-1]
    sums = values @ values.new_ones(size, size).triu()
    return sums if out is None else out.copy_(sums)


def _slopes(acts: Tensor, masters: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives that do not depend on later steps, for all steps at once.

    Returns a buffer [T, B, G] with the derivatives of h (by the scores of the out gate) and c (by those of cell, in and
    forget) in the places of the scores; of c by the cumulated sums of the master gates [T, B, 2, N, k]; of c by the c
    before, which is f [T, B, N, k]; of h by c [T, B, N, k].
    """
    steps, batch, _, num_chunks = masters.shape
    grid = (steps, batch, num_chunks, -1)
    out, cell, enter, forget = acts[:, :, 2 * num_chunks :].view(steps, batch, 4, num_chunks, -1).unbind(2)
    before, after = cells[:-1].view(grid), cells[1:].tanh().view(grid)
    master_in, master_forget = masters[:, :, 0, :, None], masters[:, :, 1, :, None]
    overlap = master_in * master_forget
    opened_in = torch.addcmul(master_in - overlap, enter, overlap)
    opened_forget = torch.addcmul(master_forget - overlap, forget, overlap)
    grads = torch.empty_like(acts)
    units = grads[:, :, 2 * num_chunks :].view(steps, batch, 4, num_chunks, -1)
    units[:, :, 0] = after * (out - out.square())
    units[:, :, 1] = opened_in * (1 - cell.square())
    units[:, :, 2] = cell * overlap * (enter - enter.square())
    units[:, :, 3] = before * overlap * (forget - forget.square())
    shut_in, shut_forget = 1 - enter, 1 - forget
    # I is 1 - cumsum, hence the sign of the first.
    by_in = before * master_forget * shut_forget - cell * (1 - master_forget * shut_in)
    by_forget = before * (1 - master_in * shut_forget) - cell * master_in * shut_in
    return grads, torch.stack([by_in, by_forget], 2), opened_forget, out * (1 - after.square())
