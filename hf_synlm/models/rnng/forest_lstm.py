# SPDX-License-Identifier: Apache-2.0
"""LSTM over forests: the state before a step is that of its parent, and all steps of one depth run together.

The slow and obvious version is `naive_forest_lstm` in `tests/reference/rnng.py`.

A chain is the usual LSTM. A tree is a stack machine: every push is a step whose parent is the push under it, so that
all stacks of a batch, at all times, are one forest, and a pass over it takes as many steps as the deepest stack.

    i, f, g, o = W_ih x + b_ih + W_hh h[parent] + b_hh;   c = sigmoid(f) c[parent] + sigmoid(i) tanh(g)
    h = sigmoid(o) tanh(c);   roots have h[parent] = c[parent] = 0

Shapes: G independent LSTMs (directions), P steps, N steps of one depth, I input, D hidden.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import call_level
from hf_synlm.core.matrix_products import linear_map, uses_onednn, weight_gradient

Parents = Tensor | None
"""[N] index of each step's parent among the steps one level up; None = the first N of them, in order."""


@torch.compiler.disable
def forest_lstm(
    gates_GPD: Tensor,
    weight_hh_GDD: Tensor,
    sizes: Sequence[int],
    parents: Sequence[Parents],
    compile_options: dict[str, Any] | None = None,
) -> tuple[Tensor, Tensor]:
    """Run an LSTM over a forest, level by level: hidden states and cells [G, P, D], the cells without gradient.

    The recurrent weights get their gradient in one multiplication over all steps, and no state is copied when several
    steps share a parent. `gates_GPD` are W_ih x + b_ih + b_hh [G, P, 4 D], roots first, then level by level, in the
    order input, forget, cell, output. Under autocast the multiplications run in its type and the states stay in
    float32. No double backward. Cost: as many sequential steps as levels; O(P D^2) multiplications.
    `compile_options` of `torch.compile`, if any, make few kernels of a level.
    """
    if compile_options is not None:
        return _CompiledForestLSTM.apply(gates_GPD, weight_hh_GDD, tuple(sizes), (None, *parents), compile_options)
    return _ForestLSTM.apply(gates_GPD, weight_hh_GDD, tuple(sizes), tuple(parents))


def by_activation(values: Tensor, dim: int = 0) -> Tensor:
    """Bring the gates i, f, g, o along `dim` into the order o, i, f, g of `lstm_step`, in a new tensor.

    So the three sigmoids stand side by side, and so do the three gates whose gradients come from the cell.
    """
    i, f, g, o = values.chunk(4, dim)
    return torch.cat([o, i, f, g], dim)


def _in_usual_order(values: Tensor, dim: int) -> Tensor:
    """Inverse of `by_activation`."""
    o, i, f, g = values.chunk(4, dim)
    return torch.cat([i, f, g, o], dim)


def lstm_step(gates: Tensor, cell: Tensor, out: Tensor) -> None:
    """One step of an LSTM with gate inputs [..., N, 4 D] in the order o, i, f, g; they become their activations.

    `out` [..., N, 2 D] takes the hidden state and the cell.
    """
    size = gates.shape[-1] // 4
    gates[..., : 3 * size].sigmoid_()
    gates[..., 3 * size :].tanh_()
    o, i, f, g = gates.split(size, -1)
    hidden, new = out.split(size, -1)
    torch.mul(i, g, out=new).addcmul_(f, cell)
    torch.mul(o, new.tanh(), out=hidden)


def for_sigmoids(values: Tensor) -> Tensor:
    """Weights [4 D, ...] or biases [4 D] of gates i, f, g, o in the order of `search_step`, those of g times -2."""
    o, i, f, g = by_activation(values).chunk(4)
    return torch.cat([o, i, f, -2 * g])


def search_step(gates: Tensor, cell: Tensor, out: Tensor) -> None:
    """`lstm_step` where the inputs of g are multiplied with -2: tanh x = 1 - 2 sigmoid(-2 x).

    On a CPU, a sigmoid takes a sixth of the time of a tanh. The results differ by rounding.
    """
    size = gates.shape[-1] // 4
    o, i, f, g = gates.sigmoid_().split(size, -1)
    hidden, new = out.split(size, -1)
    torch.addcmul(i, f, cell, out=new).addcmul_(i, g, value=-2)
    torch.addcmul(o, o, torch.mul(new, -2).sigmoid_(), value=-2, out=hidden)


def lstm_slopes(acts: Tensor, cell: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """What the gradients of any number of steps are multiplied with, in a few operations for all of them.

    From activations [..., P, 4 D] in the order o, i, f, g and cells before and after: d hidden / d cell [..., P, D];
    and per gate [..., P, 4 D] d hidden / d o and d cell / d i, f, g, before the activation.
    """
    o, i, f, g = acts.chunk(4, -1)
    activated = new.tanh()
    # d sigmoid = s (1 - s), d tanh = 1 - t^2
    slopes = torch.addcmul(acts, acts, acts, value=-1)
    size = o.shape[-1]
    slopes[..., : 3 * size].mul_(torch.cat([activated, g, cell], -1))
    slopes[..., 3 * size :] = torch.addcmul(i, i, g.square(), value=-1)
    return torch.addcmul(o, o, activated.square(), value=-1), slopes


def lstm_step_backward(
    slopes: tuple[Tensor, Tensor], forget: Tensor, grad: Tensor, grad_gates: Tensor, grad_cell: Tensor
) -> None:
    """Gradients of `lstm_step`, written to `grad_gates` [..., N, 4 D] (order o, i, f, g) and `grad_cell` [..., N, D].

    `grad` [..., N, 2 D] are those of the hidden state and the new cell.
    """
    through, factors = slopes
    size = forget.shape[-1]
    grad_hidden, grad_new = grad.split(size, -1)
    grad_new = torch.addcmul(grad_new, grad_hidden, through)
    torch.mul(grad_hidden, factors[..., :size], out=grad_gates[..., :size])
    cell_gates = (value[..., size:].unflatten(-1, (3, size)) for value in (factors, grad_gates))
    torch.mul(next(cell_gates), grad_new[..., None, :], out=next(cell_gates))
    torch.mul(grad_new, forget, out=grad_cell)


def batched_map(
    weight_GOI: Tensor, num_rows: int, num_uses: int = 1, row_step: int = 1
) -> Callable[[Tensor, Tensor], None]:
    """The map (total, x) -> total += x W^T for several matrices, x [G, R, I] and total [G, R, O]; see `linear_map`."""
    if uses_onednn(weight_GOI):
        maps = [linear_map(weight, num_rows, num_uses, row_step=row_step) for weight in weight_GOI]

        def add_products(total: Tensor, x_GRI: Tensor) -> None:
            for part, apply, x in zip(total, maps, x_GRI, strict=True):
                part.add_(apply(x))

        return add_products
    transposed, dtype = weight_GOI.mT, weight_GOI.dtype

    def add_product(total: Tensor, x_GRI: Tensor) -> None:
        if total.dtype == dtype:
            total.baddbmm_(x_GRI, transposed)
        else:
            total.add_(torch.bmm(x_GRI.to(dtype), transposed))

    return add_product


class _ForestLSTM(torch.autograd.Function):
    """All states stand in one buffer, level after level: hidden state and cell [G, P, 2 D]."""

    @staticmethod
    def forward(ctx, gates_GPD, weight_hh_GDD, sizes, parents):
        dtype, size = gates_GPD.dtype, weight_hh_GDD.shape[2]
        acts = by_activation(gates_GPD, 2).to(torch.promote_types(dtype, torch.float32))
        recur = batched_map(by_activation(weight_hh_GDD, 1).to(dtype), max(sizes), len(sizes))
        states = acts.new_empty(*acts.shape[:2], 2 * size)
        before = torch.zeros_like(states)  # those of the parents
        levels = level_slices(sizes)
        for level, rows in enumerate(levels):
            if level:
                _read_parents(states[:, levels[level - 1]], parents[level - 1], before[:, rows])
                recur(acts[:, rows], before[:, rows, :size])
            lstm_step(acts[:, rows], before[:, rows, size:], states[:, rows])
        ctx.save_for_backward(weight_hh_GDD, acts, states, before)
        ctx.sizes, ctx.parents, ctx.dtype = sizes, parents, dtype
        hidden, cells = states.split(size, 2)
        ctx.mark_non_differentiable(cells)
        return hidden, cells

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden_GPD, _):
        weight_hh_GDD, acts, states, before = ctx.saved_tensors
        sizes, dtype, size = ctx.sizes, ctx.dtype, weight_hh_GDD.shape[2]
        recur_back = batched_map(by_activation(weight_hh_GDD, 1).to(dtype).mT, max(sizes), len(sizes))
        through, factors = lstm_slopes(acts, before[..., size:], states[..., size:])
        forget, grads, grad_gates = acts[..., 2 * size : 3 * size], torch.zeros_like(states), torch.empty_like(acts)
        grads[..., :size] = grad_hidden_GPD
        down = torch.zeros_like(states)  # what flows to the parents
        levels = level_slices(sizes)
        for level in range(len(sizes) - 1, -1, -1):
            rows = levels[level]
            slopes = through[:, rows], factors[:, rows]
            lstm_step_backward(slopes, forget[:, rows], grads[:, rows], grad_gates[:, rows], down[:, rows, size:])
            if level:
                recur_back(down[:, rows, :size], grad_gates[:, rows])
                _add_to_parents(grads[:, levels[level - 1]], down[:, rows], ctx.parents[level - 1])
        grad_gates = grad_gates.to(dtype)
        pairs = zip(grad_gates[:, sizes[0] :], before[:, sizes[0] :, :size].to(dtype), strict=True)
        grad_weight = torch.zeros_like(weight_hh_GDD)
        if len(sizes) > 1:
            grad_weight = torch.stack([weight_gradient(*pair) for pair in pairs]).to(weight_hh_GDD.dtype)
        return _in_usual_order(grad_gates, 2), _in_usual_order(grad_weight, 1), None, None


class _CompiledForestLSTM(torch.autograd.Function):
    """`_ForestLSTM` with a pure function for a level and one for its gradient. Above the roots stand zeros."""

    @staticmethod
    def forward(ctx, gates_GPD, weight_hh_GDD, sizes, parents, options):
        fixed = (weight_hh_GDD.to(gates_GPD.dtype),)
        dtype, shape = torch.promote_types(gates_GPD.dtype, torch.float32), (2, len(gates_GPD), sizes[0])
        state = tuple(torch.zeros(*shape, weight_hh_GDD.shape[2], dtype=dtype, device=gates_GPD.device))
        states, acts = [state], []
        for gates, parent in zip(gates_GPD.detach().split(sizes, 1), parents, strict=True):
            state, activations = call_level(options, _level, gates, parent, *state, fixed=fixed)
            states.append(state)
            acts += activations
        hidden, cells = zip(*states, strict=True)
        ctx.save_for_backward(*fixed, *hidden, *cells, *acts)
        ctx.sizes, ctx.parents, ctx.options, ctx.dtype = sizes, parents, options, weight_hh_GDD.dtype
        hidden, cells = torch.cat(hidden[1:], 1), torch.cat(cells[1:], 1)
        ctx.mark_non_differentiable(cells)
        return hidden, cells

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden_GPD, _):
        weight, *kept = ctx.saved_tensors
        last = len(ctx.sizes)
        hidden, cells, acts = kept[: last + 1], kept[last + 1 : 2 * last + 2], kept[2 * last + 2 :]
        grads = [torch.zeros_like(hidden[0]), *grad_hidden_GPD.split(ctx.sizes, 1)]
        grad_cell = torch.zeros_like(cells[-1])
        found = []
        for level in range(last, 0, -1):
            own = acts[4 * level - 4 : 4 * level], cells[level]
            above = ctx.parents[level - 1], hidden[level - 1], cells[level - 1], grads[level - 1]
            outputs = call_level(ctx.options, _level_gradient, own, above, grads[level], grad_cell, fixed=(weight,))
            grads[level - 1], grad_cell, *rows = outputs
            found.append(rows)
        grad_gates, before = (torch.cat(parts, 1) for parts in zip(*reversed(found), strict=True))
        return grad_gates, torch.bmm(grad_gates.mT, before).to(ctx.dtype), None, None, None


def _level(
    weight_GDD: Tensor, gates: Tensor, parent: Parents, hidden: Tensor, cell: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, ...]]:
    """Hidden state and cell [G, N, D] of a level from those above [G, N', D], and the activations of the gates."""
    hidden, cell = (_of_parents(values, parent, gates.shape[1]) for values in (hidden, cell))
    product = torch.bmm(hidden.to(weight_GDD.dtype), weight_GDD.mT)
    i, f, g, o = (gates.to(cell.dtype) + product).chunk(4, 2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new = f * cell + i * g
    return (o * new.tanh(), new), (i, f, g, o)


def _level_gradient(
    weight_GDD: Tensor, own: tuple[list[Tensor], Tensor], above: tuple, grad_hidden: Tensor, grad_cell: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of hidden states and cells above [G, N', D] and of the gates; the hidden states of the parents."""
    ((i, f, g, o), new), (parent, hidden, cell, grad_above) = own, above
    hidden, cell = (_of_parents(values, parent, f.shape[1]) for values in (hidden, cell))
    activated = new.tanh()
    # d sigmoid = s (1 - s), d tanh = 1 - t^2
    grad_new = grad_cell + grad_hidden * o * (1 - activated * activated)
    parts = [grad_new * g * i * (1 - i), grad_new * cell * f * (1 - f), grad_new * i * (1 - g * g)]
    grad_gates = torch.cat([*parts, grad_hidden * activated * o * (1 - o)], 2).to(weight_GDD.dtype)
    grad_above = _to_parents(grad_above, torch.bmm(grad_gates, weight_GDD), parent)
    by_cell = _to_parents(torch.zeros_like(grad_above), grad_new * f, parent)
    return grad_above, by_cell, grad_gates, hidden.to(weight_GDD.dtype, copy=True)


def _of_parents(above: Tensor, parent: Parents, num_rows: int) -> Tensor:
    """Rows of the parents in the level above [G, N', D]."""
    return above[:, :num_rows] if parent is None else above.index_select(1, parent)


def _to_parents(above: Tensor, more: Tensor, parent: Parents) -> Tensor:
    """The sum of the level above [G, N', D] and rows of the children."""
    if parent is None:
        return above + F.pad(more, (0, 0, 0, above.shape[1] - more.shape[1]))
    return above.index_add(1, parent, more.to(above.dtype))


def level_slices(sizes: Sequence[int]) -> list[slice]:
    """The steps of every level."""
    ends = list(itertools.accumulate(sizes))
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def _read_parents(above: Tensor, parent: Parents, out: Tensor) -> None:
    """Rows of the parents in the level above [G, N', 2 D]."""
    if parent is None:
        out.copy_(above[:, : out.shape[1]])
    else:
        torch.index_select(above, 1, parent, out=out)


def _add_to_parents(above: Tensor, more: Tensor, parent: Parents) -> None:
    """Add the rows of the children to those of the level above [G, N', 2 D]."""
    if parent is None:
        above[:, : more.shape[1]] += more
    else:
        above.index_add_(1, parent, more)
