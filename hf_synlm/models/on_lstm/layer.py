# SPDX-License-Identifier: Apache-2.0
"""The layers of ON-LSTM over a whole segment, with their own backward pass.

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

On a CPU one layer runs after the other. Elsewhere a step costs less than starting its operations, so all layers run in
one loop (a wavefront): at its turn s, layer l reads token s - l, which the layer below has read one turn before. Layers
of fewer chunks are filled up with chunks whose master gates are shut.

Shapes: T tokens, B sentences, L layers, D input, H hidden, N chunks, k units per chunk (H = N k), G = 2 N + 4 H gates,
in the order of the authors' matrices: master-in (N), master-forget (N), out (H), cell (H), in (H), forget (H).

Source: Shen et al. 2019, section 4; `ON_LSTM.py` of Ordered-Neurons; the split head of Du et al. 2020, Eq. 16 and 17.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.losses import widened
from hf_synlm.core.matrix_products import linear_map, weight_gradient, without_autocast
from hf_synlm.core.module_tools import weight_of
from hf_synlm.recurrent.layers import locked_mask, weight_dropout
from hf_synlm.recurrent.running_sum import running_sum


class LayerRun(NamedTuple):
    """What a layer needs besides its inputs: the state before the first step, weights, and what dropout has drawn."""

    hidden_BH: Tensor
    cell_BH: Tensor
    mask_BD: Tensor | None
    """Factors of the inputs; None = 1."""
    input_weight_GD: Tensor
    weight_GH: Tensor
    bias_G: Tensor
    num_chunks: int


class LayerStates(NamedTuple):
    """What a layer says of a segment."""

    states: Tensor
    """h [T + 1, B, H] before the first and after every step."""
    cells: Tensor
    """c, likewise."""
    distances_TB: Tensor
    split_distances_TB: Tensor | None
    """Distances of the split head."""


class ONLSTMLayer(nn.Module):
    """The parameters of one layer; `ONLSTMLayers` runs them."""

    def __init__(self, input_size: int, hidden_size: int, chunk_size: int, split_head: bool = False) -> None:
        super().__init__()
        self.num_chunks = hidden_size // chunk_size
        self.ih = nn.Linear(input_size, 4 * hidden_size + 2 * self.num_chunks)
        self.hh = nn.Linear(hidden_size, 4 * hidden_size + 2 * self.num_chunks)
        self.split_head = nn.Linear(self.num_chunks, self.num_chunks) if split_head else None

    def dropped(self, linear: nn.Linear, dropout: float) -> Tensor:
        """The matrix of `linear`, with weights dropped."""
        return weight_dropout(weight_of(linear), dropout, self.training, rescale=False)


class ONLSTMLayers(nn.ModuleList):
    """Gates, recurrence, and distances of a stack of `ONLSTMLayer`."""

    def forward(
        self, inputs_TBD: Tensor, old: Sequence[Tensor], input_dropout: Sequence[float], dropout: float
    ) -> list[LayerStates]:
        """Read a segment from h and c [B, H] of every layer.

        `input_dropout` drops an input, the same at all steps, by layer; `dropout` a recurrent weight.
        """
        runs: list[LayerRun] = []
        splits: list[tuple[Tensor, Tensor] | None] = []
        for number, layer in enumerate(self):
            assert isinstance(layer, ONLSTMLayer)
            batch_size, width = inputs_TBD.shape[1], layer.ih.in_features
            mask = locked_mask(batch_size, width, input_dropout[number], self.training, inputs_TBD)
            hidden, cell = (tensor.to(inputs_TBD.device) for tensor in old[2 * number : 2 * number + 2])
            weights = weight_of(layer.ih), layer.dropped(layer.hh, dropout), layer.ih.bias + layer.hh.bias
            runs.append(LayerRun(hidden, cell, None if mask is None else mask[:, 0], *weights, layer.num_chunks))
            split = layer.split_head
            splits.append(None if split is None else (layer.dropped(split, dropout), split.bias))
        # A single step has nothing to run beside it.
        together = len(self) if inputs_TBD.device.type != "cpu" and len(inputs_TBD) > len(self) else 1
        results: list[LayerStates] = []
        inputs = inputs_TBD
        for first in range(0, len(self), together):
            for states, cells, master_forget in on_lstm(inputs, runs[first : first + together]):
                inputs, syd_distance = states[1:].to(inputs_TBD.dtype), None
                split = splits[len(results)]
                if split is not None:
                    weight, bias = split
                    syd_distance = split_distance(F.linear(master_forget.to(weight.dtype), weight, bias))
                states = states.to(inputs_TBD.dtype)
                results.append(LayerStates(states, cells, split_distance(master_forget), syd_distance))
        return results


def split_distance(master_forget: Tensor) -> Tensor:
    """Syntactic distance of scores [..., N] of a master forget gate: 1 - mean(cumax(scores)), in [0, 1 - 1 / N]."""
    count = master_forget.shape[-1]
    scores = widened(master_forget)
    return (scores.softmax(-1) * (torch.arange(count, device=scores.device) / count)).sum(-1)


@torch.compiler.disable
def on_lstm(inputs_TBD: Tensor, runs: Sequence[LayerRun]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Run layers over a segment, all in one loop; each has as many units per chunk.

    Returns of every layer h and c [T + 1, B, H] before the first and after every step, and the scores of the master
    forget gate [T, B, N]. Matrix products run in the type of the inputs (or of autocast), everything else in float32 or
    higher.

    Cost: T + L - 1 turns of products [B, H] x [H, G] and a dozen elementwise operations, forward and backward; O(T B G)
    memory for each layer. Nothing waits for the device.
    """
    steps, num_chunks = len(inputs_TBD), max(run.num_chunks for run in runs)
    if runs[0].mask_BD is not None:
        inputs_TBD = inputs_TBD * runs[0].mask_BD
    if len(runs) == 1:
        run = runs[0]
        stacked = (*(tensor[None] for tensor in (run.hidden_BH, run.cell_BH, run.weight_GH, run.bias_G)), None, None)
        input_weight = run.input_weight_GD
    else:
        size = num_chunks * runs[0].hidden_BH.shape[1] // runs[0].num_chunks
        hidden, cell = (torch.stack([_padded(x, size) for x in xs]) for xs in list(zip(*runs, strict=True))[:2])
        weight = torch.stack([_padded(_more_chunks(run.weight_GH, run, num_chunks), size) for run in runs])
        # Shut: the scores of the master gates are -inf, so I = 0 and F = 1.
        bias = torch.stack([_more_chunks(run.bias_G, run, num_chunks, -torch.inf) for run in runs])
        above = runs[1:]
        below_weight = [_padded(_more_chunks(run.input_weight_GD, run, num_chunks), size) for run in above]
        masks = [_padded(run.mask_BD, size) for run in above if run.mask_BD is not None]
        stacked = (hidden, cell, weight, bias, torch.stack(below_weight), torch.stack(masks) if masks else None)
        input_weight = _more_chunks(runs[0].input_weight_GD, runs[0], num_chunks)
    states, cells, forget = _ONLSTM.apply(inputs_TBD, input_weight, *stacked, num_chunks)
    return [
        (
            states[number : number + steps + 1, number, :, : run.hidden_BH.shape[1]],
            cells[number : number + steps + 1, number, :, : run.hidden_BH.shape[1]],
            forget[number : number + steps, number, :, : run.num_chunks],
        )
        for number, run in enumerate(runs)
    ]


def _padded(values: Tensor, size: int) -> Tensor:
    """Add zeros to the last dimension, up to `size`."""
    return F.pad(values, (0, size - values.shape[-1])) if values.shape[-1] < size else values


def _more_chunks(values: Tensor, run: LayerRun, num_chunks: int, master: float = 0.0) -> Tensor:
    """Rows of gates [G, ...] of a layer for `num_chunks` chunks: `master` for new master gates, 0 for other gates."""
    if run.num_chunks == num_chunks:
        return values
    rest = (0, 0) * (values.dim() - 1)
    masters = values[: 2 * run.num_chunks].unflatten(0, (2, run.num_chunks))
    units = values[2 * run.num_chunks :].unflatten(0, (4, run.num_chunks, -1))
    missing = num_chunks - run.num_chunks
    masters = F.pad(masters, (*rest, 0, missing), value=master).flatten(0, 1)
    return torch.cat([masters, F.pad(units, (*rest, 0, 0, 0, missing)).flatten(0, 2)])


def _adder(weight_LOI: Tensor, low: torch.dtype, rows: int, uses: int) -> Callable[[Tensor, Tensor, slice], None]:
    """The function that adds x W^T of some of the layers to `out`, both [layers, R, *]."""
    weight_LOI = weight_LOI.to(low)
    if len(weight_LOI) == 1:
        single = linear_map(weight_LOI[0], rows, uses)
    transposed = weight_LOI.transpose(1, 2)

    def add(out: Tensor, x: Tensor, layers: slice) -> None:
        if len(weight_LOI) == 1:
            out[0].add_(single(x[0].to(low)))
        elif out.dtype == low:
            out.baddbmm_(x, transposed[layers])
        else:
            out.add_(torch.bmm(x.to(low), transposed[layers]))

    return add


class _ONLSTM(torch.autograd.Function):
    """The loop. Row s of a buffer belongs to turn s, where layer l is at step s - l."""

    @staticmethod
    def forward(ctx, inputs, input_weight, hidden, cell, weight, bias, below_weight, masks, num_chunks):
        (steps, batch, _), (layers, _, size) = inputs.shape, hidden.shape
        turns, device = steps + layers - 1, inputs.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else inputs.dtype
        dtype = torch.promote_types(low, torch.float32)
        with without_autocast(device):
            rows = inputs.to(low).reshape(steps * batch, -1)
            from_inputs = linear_map(input_weight.to(low), len(rows))(rows).view(steps, batch, -1)
            # In the end these are the scores of the master gates (2 N), and the activations of the others (4 H).
            acts = bias.to(dtype)[:, None].repeat(turns, 1, batch, 1)
            acts[:steps, 0].add_(from_inputs)
            add_own = _adder(weight, low, batch, steps)
            add_below = None if below_weight is None else _adder(below_weight, low, batch, steps)
            probs = acts.new_zeros(turns, layers, batch, 2, num_chunks)
            masters = torch.zeros_like(probs)  # I and F
            states = acts.new_zeros(turns + 1, layers, batch, size)
            cells = torch.zeros_like(states)
            for layer in range(layers):
                states[layer, layer], cells[layer, layer] = hidden[layer], cell[layer]
            for s in range(turns):  # `x[s] += y` would copy the sum once more
                on, above, below = _active(s, steps, layers)
                add_own(acts[s, on], states[s, on], on)
                if add_below is not None and above.start < above.stop:
                    inner = states[s, below] if masks is None else states[s, below] * masks[below]
                    add_below(acts[s, above], inner, below)
                gates = acts[s, on]
                grid = (*gates.shape[:2], num_chunks, -1)
                scores = gates[..., : 2 * num_chunks].view(*gates.shape[:2], 2, num_chunks)
                # cumax; the first one is 1 - cumax (the master gates I and F)
                master = running_sum(torch.softmax(scores, -1, out=probs[s, on]), out=masters[s, on])
                torch.sub(1, master[..., 0, :], out=master[..., 0, :])
                overlap = (master[..., 0, :] * master[..., 1, :])[..., None, :]
                units = gates[..., 2 * num_chunks :].unflatten(2, (4, num_chunks, -1))
                units[:, :, 0].sigmoid_()
                units[:, :, 1].tanh_()
                units[:, :, 2:].sigmoid_()
                # i and f
                opened = torch.addcmul((master - overlap)[..., None], units[:, :, 2:], overlap[..., None])
                after = torch.mul(opened[:, :, 1], cells[s, on].view(grid), out=cells[s + 1, on].view(grid))
                after.addcmul_(opened[:, :, 0], units[:, :, 1])
                torch.mul(units[:, :, 0], after.tanh(), out=states[s + 1, on].view(grid))
        ctx.save_for_backward(inputs, input_weight, weight, below_weight, masks, acts, probs, masters, states, cells)
        ctx.low = low
        ctx.types = [None if x is None else x.dtype for x in (inputs, input_weight, hidden, cell, weight, bias)]
        ctx.set_materialize_grads(False)
        return states, cells, acts[..., num_chunks : 2 * num_chunks].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_states, grad_cells, grad_forget):
        inputs, input_weight, weight, below_weight, masks, acts, probs, masters, states, cells = ctx.saved_tensors
        (turns, layers, batch, gates), num_chunks, low = acts.shape, probs.shape[4], ctx.low
        steps, size = len(inputs), states.shape[3]
        # These grow to the whole gradients of the states.
        grad_states = torch.zeros_like(states) if grad_states is None else grad_states.clone()
        grad_cells = torch.zeros_like(cells) if grad_cells is None else grad_cells.clone()
        grads, master_slopes, opened_forget, state_slopes = _slopes(acts, masters, cells)
        for layer in range(layers):  # turns at which it rests
            grads[:layer, layer] = 0
            grads[layer + steps :, layer] = 0
        with torch.autocast(acts.device.type, enabled=False):
            add_own = _adder(weight.transpose(1, 2), low, batch, steps)
            to_below = None if below_weight is None else below_weight.to(low)
            for s in reversed(range(turns)):
                on, above, below = _active(s, steps, layers)
                grad = grads[s, on]
                grid = (*grad.shape[:2], num_chunks, -1)
                down = grad_states[s + 1, on].view(grid)
                through = torch.addcmul(grad_cells[s + 1, on].view(grid), down, state_slopes[s, on])
                units = grad[..., 2 * num_chunks :].unflatten(2, (4, num_chunks, -1))
                units[:, :, 0].mul_(down)
                units[:, :, 1:].mul_(through[:, :, None])
                # Backward of cumax: of cumsum, then of softmax. A softmax ignores a constant, here the sum of all.
                master = (master_slopes[s, on] * through[:, :, None]).sum(-1)
                master -= running_sum(master)
                master = torch._softmax_backward_data(master, probs[s, on], -1, master.dtype)
                grad[..., : 2 * num_chunks] = master.flatten(2)
                if grad_forget is not None:
                    grad[..., num_chunks : 2 * num_chunks].add_(grad_forget[s, on])
                grad_cells[s, on].view(grid).addcmul_(through, opened_forget[s, on])
                add_own(grad_states[s, on], grad, on)
                if to_below is not None and above.start < above.stop:
                    inner = torch.bmm(grads[s, above].to(low), to_below[below])
                    if masks is None:
                        grad_states[s, below].add_(inner)
                    else:
                        grad_states[s, below].addcmul_(inner, masks[below])
            results = [_first_gradients(ctx, grads[:steps, 0].flatten(0, 1), inputs, input_weight)]
            grad_hidden, grad_cell = (
                torch.stack([grad[layer, layer] for layer in range(layers)]) for grad in (grad_states, grad_cells)
            )
            inner = states[:-1, : layers - 1] if masks is None else states[:-1, : layers - 1] * masks
            grad_weight, grad_below = (
                [
                    weight_gradient(
                        grads[:, layer].to(low).reshape(-1, gates), read[:, layer - first].to(low).reshape(-1, size)
                    )
                    for layer in range(first, layers)
                ]
                for first, read in enumerate((states[:-1], inner))
            )
        results = (*results[0], grad_hidden, grad_cell, torch.stack(grad_weight), grads.sum((0, 2)))
        typed = (None if tensor is None else tensor.to(dtype) for tensor, dtype in zip(results, ctx.types, strict=True))
        return (*typed, torch.stack(grad_below).to(below_weight.dtype) if grad_below else None, None, None)


def _active(turn: int, steps: int, layers: int) -> tuple[slice, slice, slice]:
    """The layers that take a step at a turn; those of them that have one below; and those below."""
    first, last = max(0, turn - steps + 1), min(layers, turn + 1)
    above = max(first, 1)
    return slice(first, last), slice(above, last), slice(above - 1, last - 1)


def _first_gradients(ctx, grad_RG: Tensor, inputs: Tensor, weight: Tensor) -> tuple[Tensor | None, Tensor]:
    """Gradients of the inputs of the first layer and of their matrix."""
    grad_RG, inputs_RD = grad_RG.to(ctx.low), inputs.to(ctx.low).flatten(0, 1)
    grad_inputs = None
    if ctx.needs_input_grad[0]:
        grad_inputs = linear_map(weight.to(ctx.low).t(), len(grad_RG))(grad_RG).view(inputs.shape)
    return grad_inputs, weight_gradient(grad_RG, inputs_RD)


def _slopes(acts: Tensor, masters: Tensor, cells: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Derivatives that do not depend on later steps, for all steps at once.

    Returns a buffer [turns, L, B, G] with the derivatives of h (by the scores of the out gate) and c (by those of cell,
    in and forget) in the places of the scores; of c by the cumulated sums of the master gates [turns, L, B, 2, N, k];
    of c by the c before, which is f [turns, L, B, N, k]; of h by c [turns, L, B, N, k].
    """
    *shape, _, num_chunks = masters.shape
    grid = (*shape, num_chunks, -1)
    out, cell, enter, forget = acts[..., 2 * num_chunks :].view(*shape, 4, num_chunks, -1).unbind(3)
    before, after = cells[:-1].view(grid), cells[1:].tanh().view(grid)
    master_in, master_forget = masters[..., 0, :, None], masters[..., 1, :, None]
    overlap = master_in * master_forget
    opened_in = torch.addcmul(master_in - overlap, enter, overlap)
    opened_forget = torch.addcmul(master_forget - overlap, forget, overlap)
    grads = torch.empty_like(acts)
    units = grads[..., 2 * num_chunks :].view(*shape, 4, num_chunks, -1)
    units[:, :, :, 0] = after * (out - out.square())
    units[:, :, :, 1] = opened_in * (1 - cell.square())
    units[:, :, :, 2] = cell * overlap * (enter - enter.square())
    units[:, :, :, 3] = before * overlap * (forget - forget.square())
    shut_in, shut_forget = 1 - enter, 1 - forget
    # I is 1 - cumsum, hence the sign of the first.
    by_in = before * master_forget * shut_forget - cell * (1 - master_forget * shut_in)
    by_forget = before * (1 - master_in * shut_forget) - cell * master_in * shut_in
    return grads, torch.stack([by_in, by_forget], 3), opened_forget, out * (1 - after.square())
