"""Layers of URNNG: the stack LSTM, whose steps begin at the state below them, and the composition of two constituents.

Shapes: P pushes, R rows, L layers, h width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .matrix_products import linear
from .module_tools import unwrapped, weight_of
from .rnng_forest_lstm import Parents, forest_lstm


class URNNGStackLSTM(nn.Module):
    """An LSTM over elements of a stack, which reads every element from the state of the one below.

    Gates stand in the order input, forget, cell, output.

    Args:
        size: width h of elements and states.
        num_layers: number of layers L.
        dropout: between the layers.
    """

    def __init__(self, size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.from_input = nn.ModuleList(nn.Linear(size, 4 * size) for _ in range(num_layers))
        self.from_below = nn.ModuleList(nn.Linear(size, 4 * size, bias=False) for _ in range(num_layers))
        self.size, self.dropout = size, dropout

    def forward(self, elements: Tensor, sizes: Sequence[int], parents: Sequence[Parents]) -> Tensor:
        """Push all elements of given derivations, depth by depth.

        Args:
            elements: [P, h], those on the bottom first.
            sizes: number of pushes of each depth.
            parents: see `forest_lstm`.

        Returns:
            States [P, h] of the last layer.
        """
        for number, (from_input, from_below) in enumerate(zip(self.from_input, self.from_below, strict=True)):
            if number:
                elements = F.dropout(elements, self.dropout, self.training)
            gates = linear(elements, weight_of(from_input), unwrapped(from_input).bias)
            elements = forest_lstm(gates[None], weight_of(from_below)[None], sizes, parents)[0][0].to(elements.dtype)
        return elements

    def push(self, elements: Tensor, below: Tensor) -> Tensor:
        """Push one element on each of some stacks.

        Args:
            elements: [..., h].
            below: states [..., L, 2 h] of the elements below, hidden state and cell.

        Returns:
            States [..., L, 2 h].
        """
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

    Args:
        size: width h.
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
