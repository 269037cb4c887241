"""LSTM over forests: the state before a step is that of its parent, and all steps of one depth run together.

The slow and obvious version is `naive_forest_lstm` in `tests/reference/rnng.py`.

A chain is the usual LSTM. A tree is a stack machine: every push is a step whose parent is the push under it, so that
all stacks of a batch, at all times, are one forest, and a pass over it takes as many steps as the deepest stack.

    i, f, g, o = W_ih x + b_ih + W_hh h[parent] + b_hh;   c = sigmoid(f) c[parent] + sigmoid(i) tanh(g)
    h = sigmoid(o) tanh(c);   roots have h[parent] = c[parent] = 0

Shapes: G independent LSTMs (directions), P steps, N steps of one depth, I input, D hidden.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .matrix_products import linear_map, uses_onednn, weight_gradient

Parents = Tensor | None
"""[N] index of each step's parent among the steps one level up; None = the first N of them, in order."""


@torch.compiler.disable
def forest_lstm(
    gates_GPD: Tensor, weight_hh_GDD: Tensor, sizes: Sequence[int], parents: Sequence[Parents]
) -> tuple[Tensor, Tensor]:
    """Run an LSTM over a forest, level by level.

    The recurrent weights get their gradient in one multiplication over all steps, and no state is copied when several
    steps share a parent. Under autocast the multiplications run in its type and the states stay in float32.

    Args:
        gates_GPD: W_ih x + b_ih + b_hh of all steps [G, P, 4 D], roots first, then level by level; gates in the order
            input, forget, cell, output.
        weight_hh_GDD: recurrent weights [G, 4 D, D].
        sizes: number of steps of each level; they sum to P.
        parents: for each level after the first, see `Parents`.

    Returns:
        Hidden states and cells of all steps, each [G, P, D]. No gradient flows to the cells.

    Cost: as many sequential steps as levels; O(P D^2) multiplications. No double backward.
    """
    return _ForestLSTM.apply(gates_GPD, weight_hh_GDD, tuple(sizes), tuple(parents))


def lstm_step(gates: Tensor, cell: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """One step of an LSTM.

    Args:
        gates: sum of the gate inputs [..., N, 4 D]; overwritten with their activations.
        cell: cell before the step [..., N, D]; None = 0.

    Returns:
        Hidden state, cell and tanh(cell), each [..., N, D].
    """
    size = gates.shape[-1] // 4
    gates[..., : 2 * size].sigmoid_()
    gates[..., 2 * size : 3 * size].tanh_()
    gates[..., 3 * size :].sigmoid_()
    i, f, g, o = gates.split(size, -1)
    new = i * g if cell is None else torch.addcmul(i * g, f, cell)
    activated = new.tanh()
    return o * activated, new, activated


def lstm_step_backward(
    acts: Tensor, cell: Tensor | None, activated: Tensor, grad_hidden: Tensor, grad_cell: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of `lstm_step`.

    Args:
        acts: activations of the gates [..., N, 4 D].
        cell: cell before the step [..., N, D]; None = 0.
        activated: tanh of the cell after it.
        grad_hidden: gradient of the hidden state.
        grad_cell: gradient of the new cell; None = 0.

    Returns:
        Gradients of the gate inputs [..., N, 4 D] and of the cell before the step.
    """
    i, f, g, o = acts.chunk(4, -1)
    through = grad_hidden * o
    grad_new = torch.addcmul(through, through, activated.square(), value=-1)
    if grad_cell is not None:
        grad_new = grad_new + grad_cell
    # d sigmoid = s (1 - s), d tanh = 1 - t^2
    slope = torch.addcmul(acts, acts, acts, value=-1)
    slope.chunk(4, -1)[2].copy_(1 - g.square())
    size = g.shape[-1]
    grad_gates = torch.empty_like(acts)
    torch.mul(grad_new, g, out=grad_gates[..., :size])
    if cell is None:
        grad_gates[..., size : 2 * size].zero_()
    else:
        torch.mul(grad_new, cell, out=grad_gates[..., size : 2 * size])
    torch.mul(grad_new, i, out=grad_gates[..., 2 * size : 3 * size])
    torch.mul(grad_hidden, activated, out=grad_gates[..., 3 * size :])
    return grad_gates.mul_(slope), grad_new * f


def _batched_map(weight_GOI: Tensor, num_rows: int, num_uses: int = 1) -> Callable[[Tensor], Tensor]:
    """The map x -> x W^T for several matrices: from [G, R, I] to [G, R, O]; see `linear_map`."""
    if not uses_onednn(weight_GOI):
        transposed = weight_GOI.mT
        return lambda x_GRI: torch.bmm(x_GRI, transposed)
    maps = [linear_map(weight, num_rows, num_uses) for weight in weight_GOI]
    if len(maps) == 1:
        return lambda x_GRI: maps[0](x_GRI[0])[None]
    return lambda x_GRI: torch.stack([apply(x) for apply, x in zip(maps, x_GRI, strict=True)])


class _ForestLSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gates_GPD, weight_hh_GDD, sizes, parents):
        dtype = gates_GPD.dtype
        state_dtype = torch.promote_types(dtype, torch.float32)
        recur = _batched_map(weight_hh_GDD.to(dtype), max(sizes), len(sizes))
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        acts: list[Tensor] = []
        activated: list[Tensor] = []
        for level, gates in enumerate(gates_GPD.split(sizes, 1)):
            cell = None
            if level:
                parent = parents[level - 1]
                before, cell = _parents(hidden[-1], parent, sizes[level]), _parents(cells[-1], parent, sizes[level])
                gates = recur(before.to(dtype)).add_(gates).to(state_dtype)
            else:
                gates = gates.to(state_dtype, copy=True)
            h, c, t = lstm_step(gates, cell)
            for store, value in zip((hidden, cells, acts, activated), (h, c, gates, t), strict=True):
                store.append(value)
        hidden_GPD, cells_GPD = torch.cat(hidden, 1), torch.cat(cells, 1)
        ctx.save_for_backward(weight_hh_GDD, hidden_GPD, cells_GPD, *acts, *activated)
        ctx.sizes, ctx.parents, ctx.dtype = sizes, parents, dtype
        ctx.mark_non_differentiable(cells_GPD)
        return hidden_GPD, cells_GPD

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden_GPD, _):
        sizes, parents, dtype = ctx.sizes, ctx.parents, ctx.dtype
        weight_hh_GDD, hidden_GPD, cells_GPD, *rest = ctx.saved_tensors
        acts, activated = rest[: len(sizes)], rest[len(sizes) :]
        recur_back = _batched_map(weight_hh_GDD.to(dtype).mT, max(sizes), len(sizes))
        hidden, cells = hidden_GPD.split(sizes, 1), cells_GPD.split(sizes, 1)
        grads = list(grad_hidden_GPD.split(sizes, 1))
        grad_cell, befores = None, []
        for level in range(len(sizes) - 1, -1, -1):
            parent = parents[level - 1] if level else None
            cell = _parents(cells[level - 1], parent, sizes[level]) if level else None
            grad_gates, back = lstm_step_backward(acts[level], cell, activated[level], grads[level], grad_cell)
            grads[level] = grad_gates = grad_gates.to(dtype)
            if level:
                befores.append(_parents(hidden[level - 1], parent, sizes[level]).to(dtype))
                down = recur_back(grad_gates).to(back.dtype)
                grads[level - 1] = _add_to_parents(grads[level - 1], down, parent)
                grad_cell = _add_to_parents(torch.zeros_like(hidden[level - 1]), back, parent)
        grad_gates_GPD = torch.cat(grads, 1)
        grad_weight = torch.zeros_like(weight_hh_GDD)
        if befores:
            after = grad_gates_GPD[:, sizes[0] :]
            pairs = zip(after, torch.cat(befores[::-1], 1), strict=True)
            grad_weight = torch.stack([weight_gradient(*pair) for pair in pairs]).to(weight_hh_GDD.dtype)
        return grad_gates_GPD, grad_weight, None, None


def _parents(values: Tensor, parent: Parents, size: int) -> Tensor:
    """Rows of the parents [G, size, D] in the level above."""
    return values[:, :size] if parent is None else values.index_select(1, parent)


def _add_to_parents(total: Tensor, more: Tensor, parent: Parents) -> Tensor:
    """`total` [G, N, D] plus the rows of the children, in a new tensor."""
    if parent is None:
        total = total.clone()
        total[:, : more.shape[1]] += more
        return total
    return total.index_add(1, parent, more)
