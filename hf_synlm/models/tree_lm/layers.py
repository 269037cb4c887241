# SPDX-License-Identifier: Apache-2.0
"""The layers of Tree LM: a Transformer-XL with post-norm, whose relative positions may be differences of tree depths.

    h' = LN1(h + W_o attend(h)),   h'' = LN2(h' + W_2 gelu(W_1 h'))
    score(t, s) = ((q_t + u) . k_s + (q_t + v) . W_R R(p_ts)) / sqrt(d)

with p_ts from the linearization and R(p) = [sin(p w_j) for all j; cos(p w_j) for all j], w_j = 10000^(-2j/D).

Source: Sartran et al. 2022; `core.py` and `common.py` of the authors' program.

Shapes: B sentences, P positions (rows), S columns, R values of a position, D width, H heads, d = D / H.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.search.tree_attention import RelativeTerm, attention_weights, tree_attention


def position_vectors(lowest: int, highest: int, size: int, like: Tensor) -> Tensor:
    """R(p) [highest - lowest + 1, size] for all p from `lowest` to `highest`, in device and type of `like`."""
    position = torch.arange(lowest, highest + 1, device=like.device, dtype=torch.float32)
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angle = position[:, None] * frequency
    return torch.cat([angle.sin(), angle.cos()], -1).to(like.dtype)


class TreeLMAttention(nn.Module):
    """Multi-head attention with relative positions; caches know the layer by its `number`."""

    def __init__(self, config: PreTrainedConfig, number: int):
        super().__init__()
        size = config.hidden_size
        self.number, self.num_heads, self.dropout = number, config.num_attention_heads, config.dropout
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.relative_proj = nn.Linear(size, size, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(size))
        self.position_bias = nn.Parameter(torch.zeros(size))
        self.o_proj = nn.Linear(size, size)

    def _heads(self, value: Tensor) -> Tensor:
        """[.., P, D] -> [.., H, P, d]."""
        return value.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def _inputs(
        self, hidden: Tensor, index: Tensor, positions: Tensor, cache: Any
    ) -> tuple[Tensor, Tensor, Tensor, RelativeTerm]:
        """Queries, keys and values [B, H, .., d] of `hidden` [B, P, D], and the term of the positions."""
        query, key, value = self.q_proj(hidden), self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        by_position = RelativeTerm(
            self._heads(query + self.position_bias), self._heads(self.relative_proj(positions)), index
        )
        return self._heads(query + self.content_bias), key, value, by_position

    def forward(self, hidden: Tensor, mask: Tensor, index: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """Attend from `hidden` [B, P, D] where `mask` [B, P, S] is True; `index` are rows of `positions` [R, D]."""
        query, key, value, by_position = self._inputs(hidden, index, positions, cache)
        dropout = self.dropout if self.training else 0.0
        attended = tree_attention(query, key, value, mask, [by_position], dropout)
        return self.o_proj(attended.transpose(1, 2).flatten(2))

    def look(
        self, hidden: Tensor, mask: Tensor, index: Tensor, positions: Tensor, cache: Any = None
    ) -> tuple[Tensor, Tensor]:
        """Weights [B, H, P, S] with which `forward` attends, and values [B, H, S, d]."""
        query, key, value, by_position = self._inputs(hidden, index, positions, cache)
        return attention_weights(query, key, mask, [by_position]), value


class TreeLMLayer(nn.Module):
    """Attention and feed-forward layer, each followed by a layer norm."""

    def __init__(self, config: PreTrainedConfig, number: int):
        super().__init__()
        size = config.hidden_size
        self.attention = TreeLMAttention(config, number)
        self.attention_norm = nn.LayerNorm(size)
        self.up_proj = nn.Linear(size, config.intermediate_size)
        self.down_proj = nn.Linear(config.intermediate_size, size)
        self.feed_forward_norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor, index: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """Run the layer; see `TreeLMAttention.forward`."""
        attended = self.attention(hidden, mask, index, positions, cache)
        hidden = self.attention_norm(hidden + self.dropout(attended))
        inner = self.dropout(F.gelu(self.up_proj(hidden), approximate="tanh"))
        return self.feed_forward_norm(hidden + self.dropout(self.down_proj(inner)))
