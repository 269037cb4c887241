# SPDX-License-Identifier: Apache-2.0
"""Layers of URNNG: the stack LSTM, whose steps begin at the state below them, and the composition of two constituents.

Shapes: P pushes, R rows, L layers, h width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import LevelModule
from hf_synlm.core.matrix_products import linear, weight_gradient
from hf_synlm.core.module_tools import unwrapped, weight_of
from hf_synlm.models.rnng.forest_lstm import Parents, forest_lstm, level_slices


class URNNGStackLSTM(LevelModule):
    """An LSTM over elements of a stack, which reads every element from the state of the one below.

    Gates stand in the order input, forget, cell, output.
    """

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.from_input = nn.ModuleList(nn.Linear(size, 4 * size) for _ in range(num_layers))
        self.from_below = nn.ModuleList(nn.Linear(size, 4 * size, bias=False) for _ in range(num_layers))
        self.size, self.dropout = size, dropout

    def forward(self, elements: Tensor, sizes: Sequence[int], parents: Sequence[Parents]) -> Tensor:
        """Push all elements [P, h] of given derivations, depth by depth, bottom first: last layer's states [P, h]."""
        for number, (from_input, from_below) in enumerate(zip(self.from_input, self.from_below, strict=True)):
            if number:
                elements = F.dropout(elements, self.dropout, self.training)
            gates = linear(elements, weight_of(from_input), unwrapped(from_input).bias)
            weight = weight_of(from_below)[None]
            hidden, _ = forest_lstm(gates[None], weight, sizes, parents, self.compile_options)
            elements = hidden[0].to(elements.dtype)
        return elements

    def push(self, elements: Tensor, below: Tensor) -> Tensor:
        """Push one element [..., h] on each of some states [..., L, 2 h], hidden state and cell: the new states."""
        states = []
        for number, (from_input, from_below) in enumerate(zip(self.from_input, self.from_below, strict=True)):
            hidden, cell = below[..., number, :].chunk(2, -1)
            i, f, g, o = (from_input(elements) + from_below(hidden)).chunk(4, -1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            elements = o.sigmoid() * cell.tanh()
            states.append(torch.cat([elements, cell], -1))
        return torch.stack(states, -2)


class BinaryTreeLSTM(nn.Module):
    """The composition of two constituents (Tai et al. 2015); a word has its embedding and the cell 0.

    i, f_r, f_l, o, g = W [h_right; h_left] + b
    c = sigmoid(f_r) c_right + sigmoid(f_l) c_left + sigmoid(i) tanh(g);   h = sigmoid(o) tanh(c)
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * size, 5 * size)

    def forward(self, right: Tensor, left: Tensor) -> Tensor:
        """Compose constituents, hidden state and cell [..., 2 h] each, to one [..., 2 h]."""
        (hidden_r, cell_r), (hidden_l, cell_l) = right.chunk(2, -1), left.chunk(2, -1)
        i, f_r, f_l, o, g = self.gates(torch.cat([hidden_r, hidden_l], -1)).chunk(5, -1)
        cell = f_r.sigmoid() * cell_r + f_l.sigmoid() * cell_l + i.sigmoid() * g.tanh()
        return torch.cat([o.sigmoid() * cell.tanh(), cell], -1)

    def compose_all(self, words: Tensor, levels: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Compose the constituents of given trees, height by height: hidden states [E + C, h], words first.

        Equal to `forward`, level after level. `levels` hold by height the right and the left parts [R], as rows of the
        words and of the constituents so far. All stand in one buffer, so that a level costs its own rows, and not all
        rows before it, in the backward pass, too.
        """
        weight, bias = weight_of(self.gates), unwrapped(self.gates).bias
        return _TreeLSTM.apply(words, weight, bias, levels)


class _TreeLSTM(torch.autograd.Function):
    """States, hidden state and cell, stand in one buffer [E + C, 2 h], gates in another [C, 5 h]."""

    @staticmethod
    def forward(ctx, words, weight, bias, levels):
        device, size, first = words.device.type, words.shape[1], len(words)
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        count = sum(len(right) for right, _ in levels)
        states = words.new_zeros(first + count, 2 * size)
        states[:first, :size] = words
        parts, acts = (words.new_empty(count, width * size) for width in (2, 5))
        with torch.autocast(device, enabled=False):
            places = level_slices([len(right) for right, _ in levels])
            for rows, (right, left) in zip(places, levels, strict=True):
                parts[rows, :size], parts[rows, size:] = states[right, :size], states[left, :size]
                acts[rows] = F.linear(parts[rows].to(dtype), weight.to(dtype), bias.to(dtype))
                i, f_r, f_l, o = acts[rows, : 4 * size].sigmoid_().chunk(4, -1)
                g = acts[rows, 4 * size :].tanh_()
                cell = f_r * states[right, size:] + f_l * states[left, size:] + i * g
                new = slice(first + rows.start, first + rows.stop)
                states[new, :size], states[new, size:] = o * cell.tanh(), cell
        ctx.save_for_backward(weight, parts, acts, states)
        ctx.levels, ctx.dtype = levels, dtype
        return states[:, :size].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_hidden):
        weight, parts, acts, states = ctx.saved_tensors
        size, first, grads = weight.shape[1] // 2, len(states) - len(parts), torch.zeros_like(states)
        grads[:, :size] = grad_hidden
        grad_gates = torch.empty_like(acts)
        places = level_slices([len(right) for right, _ in ctx.levels])
        for rows, (right, left) in reversed([*zip(places, ctx.levels, strict=True)]):
            new = slice(first + rows.start, first + rows.stop)
            i, f_r, f_l, o, g = acts[rows].chunk(5, -1)
            tanh = states[new, size:].tanh()
            grad_cell = grads[new, size:] + grads[new, :size] * o * (1 - tanh.square())
            terms = (grad_cell * g, grad_cell * states[right, size:], grad_cell * states[left, size:])
            slopes = acts[rows, : 4 * size] * (1 - acts[rows, : 4 * size])
            grad_gates[rows, : 4 * size] = torch.cat([*terms, grads[new, :size] * tanh], -1) * slopes
            grad_gates[rows, 4 * size :] = grad_cell * i * (1 - g.square())
            grad_parts = (grad_gates[rows].to(ctx.dtype) @ weight.to(ctx.dtype)).to(grads.dtype)
            # No element is a part of two constituents.
            grads[right] += torch.cat([grad_parts[:, :size], grad_cell * f_r], -1)
            grads[left] += torch.cat([grad_parts[:, size:], grad_cell * f_l], -1)
        grad_gates = grad_gates.to(ctx.dtype)
        grad_weight = weight_gradient(grad_gates, parts.to(ctx.dtype)).to(weight.dtype)
        return grads[:first, :size], grad_weight, grad_gates.sum(0).to(weight.dtype), None
