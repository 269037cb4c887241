# SPDX-License-Identifier: Apache-2.0
"""Composition of RNNG: the vector of a constituent from its label and its children.

The slow and obvious version is `StackMachine` in `tests/reference/rnng.py`, one constituent at a time.

Shapes: R nodes, M children, S steps of all rows, w element size, h stack size. The children of the nodes come as
`Chains` (models/rnng/plan.py).
"""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import LevelModule
from hf_synlm.core.losses import widened
from hf_synlm.core.matrix_products import ROW_STEP, linear, uses_onednn
from hf_synlm.core.module_tools import saved_whole, weight_of
from hf_synlm.models.rnng.forest_lstm import batched_map, by_activation, forest_lstm, lstm_step
from hf_synlm.models.rnng.plan import Chains

ReadChains: TypeAlias = Callable[[Tensor, list[int]], Tensor]
"""A `BidirectionalLSTM`: (inputs [2, S, w], numbers of rows of the steps) -> states [2, S, w]."""

# Rows of a step and calls of a search, roughly: they choose the layout of the weights.
_ROWS, _CALLS = 4, 100


class BidirectionalLSTM(LevelModule):
    """A forward and a backward LSTM over short sequences, each read from its own first step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        # Only the parameters are used: the layer would need padded or packed sequences.
        self.lstm = saved_whole(nn.LSTM(size, size, bidirectional=True))

    def _weights(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of both directions: input weights, recurrent weights, and the sum of the two biases."""
        names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
        weight_ih, weight_hh, bias_ih, bias_hh = (
            torch.stack([weight_of(self.lstm, name), weight_of(self.lstm, name + "_reverse")]) for name in names
        )
        return weight_ih, weight_hh, bias_ih + bias_hh

    def forward(self, inputs: Tensor, sizes: list[int]) -> Tensor:
        """States [2, S, w] of both directions after every step of `Chains`, from their inputs [2, S, w]."""
        weight_ih, weight_hh, bias = self._weights()
        dtype = _matmul_dtype(inputs)
        gates = _batched_linear(inputs.to(dtype), weight_ih.to(dtype), bias.to(dtype))
        parents = [None] * (len(sizes) - 1)
        return forest_lstm(gates, weight_hh, sizes, parents, self.compile_options)[0].to(inputs.dtype)

    @torch.no_grad()
    def prepared(self) -> ReadChains:
        """The same as `forward`, with the weights as they are now, for chains of equal lengths in a search."""
        weight_ih, weight_hh, bias = (by_activation(value, 1) for value in self._weights())
        from_input, from_state = (batched_map(weight, _ROWS, _CALLS, ROW_STEP) for weight in (weight_ih, weight_hh))

        def run(inputs: Tensor, sizes: list[int]) -> Tensor:
            gates = bias[:, None].repeat(1, inputs.shape[1], 1)
            from_input(gates, inputs)
            size = inputs.shape[2]
            states, before = inputs.new_empty(2, inputs.shape[1], 2 * size), inputs.new_zeros(2, sizes[0], 2 * size)
            for number, (now, new) in enumerate(zip(gates.split(sizes, 1), states.split(sizes, 1), strict=True)):
                if number:  # the first states are zeros
                    from_state(now, before[..., :size])
                lstm_step(now, before[..., size:], new)
                before = new
            return states[..., :size]

        return run


def _batched_linear(x_GRI: Tensor, weight_GOI: Tensor, bias_GO: Tensor) -> Tensor:
    """Compute x W^T + b for several matrices, with gradients: [G, R, O]."""
    if not uses_onednn(weight_GOI):
        return torch.baddbmm(bias_GO[:, None], x_GRI, weight_GOI.mT)
    return torch.stack([linear(*values) for values in zip(x_GRI, weight_GOI, bias_GO, strict=True)])


def _matmul_dtype(values: Tensor) -> torch.dtype:
    """Type of multiplications: autocast's, if it is on."""
    device = values.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else values.dtype


class LSTMComposition(nn.Module):
    """x = ReLU(W [forward; backward] + b) over the label's vector n and the children c_1 .. c_m.

    forward reads n, c_1, .., c_m and backward n, c_m, .., c_1; each gives its last state. The authors run one
    bidirectional LSTM over n, c_1, .., c_m, n and read the states at c_m and c_1, which are the same.

    Source: Noji and Oseki 2021, section 2; `LSTMComposition` of the authors' code.
    """

    reads_stack = False

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.rnn = BidirectionalLSTM(size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * size, size)

    def forward(self, inputs: Tensor, chains: Chains, rnn: ReadChains | None = None) -> Tensor:
        """Compose nodes [R, w] from the vectors [2, S, w] of labels and children at the steps of the chains.

        The label's element stands first in the chains. `rnn` reads them; None = the layer `rnn`.
        """
        states = (rnn or self.rnn)(inputs, chains.sizes)[:, chains.last]
        return F.relu(self.output(self.dropout(torch.cat([states[0], states[1]], 1))))


class AttentionComposition(nn.Module):
    """A gated sum of the children and the label (Kuncoro et al. 2017), whose weights depend on the stack, too.

        H = BiLSTM(c_1 .. c_m);   q = [e_x; u];   a = sum_i softmax_i((V H_i) . q) H_i
        g = sigmoid(W_g [t_x; a] + b_g);   x = ReLU(W_o (g t_x + (1 - g) a) + b_o)

    with two vectors e_x, t_x of the label, and u = ReLU(output(h)) of the state h on the top of the stack.

    Source: `AttentionComposition` of the authors' code.
    """

    reads_stack = True

    def __init__(self, size: int, num_labels: int, dropout: float) -> None:
        super().__init__()
        self.rnn = BidirectionalLSTM(size)
        self.key = nn.Linear(2 * size, 2 * size, bias=False)
        self.query_labels = nn.Embedding(num_labels, size)
        self.labels = nn.Embedding(num_labels, 2 * size)
        self.gate = nn.Linear(4 * size, 2 * size)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(2 * size, size)

    def forward(
        self, inputs: Tensor, chains: Chains, label_R: Tensor, top_R: Tensor, rnn: ReadChains | None = None
    ) -> Tensor:
        """Compose nodes [R, w] from the vectors [2, S, w] of the children at the steps of the chains.

        The chains have no label's element; `top_R` is u of the stacks before the action [R, w]. `rnn` reads the chains;
        None = the layer `rnn`.
        """
        states = (rnn or self.rnn)(inputs, chains.sizes)
        both = torch.cat([states[0][chains.position[0]], states[1][chains.position[1]]], 2)
        query = torch.cat([self.query_labels(label_R), top_R], 1)
        # (V H_i) . q = H_i . (V^T q): one multiplication per node instead of one per child
        score = torch.einsum("rmd,rd->rm", both, (query @ weight_of(self.key).to(query.dtype)).to(both.dtype))
        column = torch.arange(both.shape[1], device=score.device)
        score = widened(score)
        weight = score.masked_fill(column >= chains.length[:, None], float("-inf")).softmax(1).to(both.dtype)
        total = self.dropout(torch.einsum("rm,rmd->rd", weight, both))
        label = self.dropout(self.labels(label_R))
        gate = torch.sigmoid(self.gate(torch.cat([label, total], 1)))
        return F.relu(self.output(gate * label + (1 - gate) * total))


def chain_inputs(elements: Tensor, chains: Chains) -> Tensor:
    """Vectors [2, S, w] at the steps of the chains, out of `elements` [P, w]."""
    return elements.index_select(0, chains.index.flatten()).view(2, -1, elements.shape[1])
