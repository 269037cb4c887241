# SPDX-License-Identifier: Apache-2.0
"""Ordered Memory: a stack of N slots that decides softly, at every token, how much of it to reduce.

The slow and obvious version is `read` in `tests/reference/ordered_memory.py`.

The slots hold constituents in the order of their height. At every token an attention p over the slots says how high the
constituent is that the token joins; the slots up to there take over the candidates M^ of the token before, and from
there upwards a cell composes the token with what the slots hold:

    x = LN(W x_t + b)
    s_i = w . ReLU(LN(Q x) + LN(K M^_i)) / sqrt(D)           p_i ~ exp(s_i) sum_{j <= i + 1} p'_j  (p' of the last step)
    c_i = sum_{j <= i} p_j      r_i = sum_{j >= i} p_j       M_i = (1 - r_i) M_i + r_i M^_i
    h_-1 = x                    h_i = (1 - c_i) x + c_i cell(h_i-1, M_i)                M^_i = h_i

The factor of the last slot is 1. The output is M^_N-1, which has read the whole text. The first token fills all slots.

Shapes: B sentences, T tokens, N slots (the lowest first), D width, I input width.

Source: Shen et al. 2019, section 3, with the names of its equations; `ordered_memory.py` of the authors' code.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from hf_synlm.recurrent.running_sum import running_sum

# Smaller factors count as 0, as in the authors' code.
_LEAST_FACTOR = 1e-5


class MemoryState(NamedTuple):
    """The memory after a token.

    Fields:
        memory: M [B, N, D].
        candidate: M^ [B, N, D]; its last slot is the output.
        probs: p [B, N]; 0 after the first token, -1 before it.
    """

    memory: Tensor
    candidate: Tensor
    probs: Tensor


class OrderedMemoryLayer(nn.Module):
    """The layer: I inputs, N slots of D numbers."""

    def __init__(
        self, input_size: int, slot_size: int, num_slots: int, cell_dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        self.num_slots = num_slots
        self.input_projection = nn.Linear(input_size, slot_size)
        # Of the inputs and of what the cell composes: one for both.
        self.norm = nn.LayerNorm(slot_size)
        self.query, self.query_norm = nn.Linear(slot_size, slot_size), nn.LayerNorm(slot_size)
        self.key, self.key_norm = nn.Linear(slot_size, slot_size), nn.LayerNorm(slot_size)
        self.slot_score = nn.Linear(slot_size, 1)
        self.cell_in = nn.Linear(2 * slot_size, 4 * slot_size)
        self.cell_out = nn.Linear(4 * slot_size, 4 * slot_size)
        self.cell_dropout, self.attention_dropout = nn.Dropout(cell_dropout), nn.Dropout(attention_dropout)

    def start(self, inputs: Tensor) -> MemoryState:
        """State before the first token of inputs [B, ...]."""
        slots = inputs.new_zeros(len(inputs), self.num_slots, self.norm.normalized_shape[0])
        return MemoryState(slots, slots, inputs.new_full(slots.shape[:2], -1.0))

    def forward(self, inputs_BTI: Tensor, state: MemoryState) -> list[MemoryState]:
        """Read a text: the T + 1 states before and after each input.

        Cost: T N cells of 24 D^2 multiplications, one after the other.
        """
        x_BTD = self.norm(self.input_projection(inputs_BTI))
        query_BTD = self.query_norm(self.query(self.attention_dropout(x_BTD)))
        states = [state]
        for x, query in zip(x_BTD.unbind(1), query_BTD.unbind(1), strict=True):
            states.append(self._step(x, query, states[-1]))
        return states

    def _step(self, x_BD: Tensor, query_BD: Tensor, old: MemoryState) -> MemoryState:
        """The state after one more token."""
        begun = old.probs[:, :1] >= 0
        probs = torch.where(begun, self.attend(query_BD, old.candidate, old.probs), 0.0)
        up_to = running_sum(probs)
        from_on = torch.where(begun, running_sum(probs.flip(1)).flip(1), 1.0)[..., None]
        memory = (1 - from_on) * old.memory + from_on * old.candidate
        # Where every sentence has 0 the cell changes nothing. On a GPU, to find out would cost more than the cell.
        idle = int((up_to.amax(0) == 0).sum()) if x_BD.device.type == "cpu" else 0
        candidate = [x_BD] * idle
        for number in range(idle, self.num_slots):
            below = candidate[-1] if candidate else x_BD
            share = up_to[:, number, None]
            candidate.append((1 - share) * x_BD + share * self.compose(below, memory[:, number]))
        return MemoryState(memory, torch.stack(candidate, 1), probs)

    def attend(self, query_BD: Tensor, candidate_BND: Tensor, old_probs_BN: Tensor) -> Tensor:
        """Probabilities [B, N] of the slots, from those of the last step."""
        key = self.key_norm(self.key(self.attention_dropout(candidate_BND)))
        score = self.slot_score(self.attention_dropout(torch.relu(query_BD[:, None] + key))).squeeze(-1)
        factor = torch.cat([running_sum(old_probs_BN)[:, 1:], torch.ones_like(old_probs_BN[:, :1])], 1)
        factor = factor.masked_fill(factor < _LEAST_FACTOR, 0.0)
        score = score / query_BD.shape[1] ** 0.5
        weight = (score - score.amax(1, keepdim=True)).exp() * factor
        return weight / weight.sum(1, keepdim=True)

    def compose(self, below_BD: Tensor, slot_BD: Tensor) -> Tensor:
        """The cell: what comes from below, composed with what a slot holds."""
        hidden = torch.relu(self.cell_in(self.cell_dropout(torch.cat([below_BD, slot_BD], 1))))
        below_gate, slot_gate, new_gate, new = self.cell_out(self.cell_dropout(hidden)).chunk(4, 1)
        mixed = below_gate.sigmoid() * below_BD + slot_gate.sigmoid() * slot_BD + new_gate.sigmoid() * new
        return self.norm(mixed)
