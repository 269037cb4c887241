# SPDX-License-Identifier: Apache-2.0
"""The layers of Pushdown Layers (Murty et al. 2023): attention that sees the stack tape, and the attachment head.

    score(t, s) = (q_t . k_s + q_t . W_R R(t - s) + q_t . T[tape(t, s)]) / sqrt(d)

with R the sinusoids of the distance and T a table of N depths, one per layer, shared by its heads.

The attachment of the next token x, which has just been generated from state h_t, is chosen among positions s <= t and
the token itself:

    q = MLP_q(W_q h_t, E x)
    logit(s) = q . MLP_k(W_k h_s, T[tape(t, s)]) + q . W_R R(t + 1 - s)
    logit(itself) = q . MLP_i(q, E x) + q . W_R R(0)

The first matrix of MLP_k is split, so that states and depths are multiplied once each; its second one is moved to the
query. A key is made once for a position and each depth that it has, not for every pair of positions.

Source: Murty et al. 2023 and the authors' program, whose numbers this gives.

Shapes: B sentences, T rows, S columns, D width, H heads, d = D / H, N depths, M width of MLP_k.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.core.module_tools import unwrapped, weight_of
from hf_synlm.search.tree_attention import RelativeTerm, tree_attention


def distance_vectors(count: int, size: int, like: Tensor) -> Tensor:
    """R(0) .. R(count - 1) [count, size]: sine and cosine interleaved, of minus the distance."""
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=like.device, dtype=torch.float32) / size)
    angle = -torch.arange(count, device=like.device, dtype=torch.float32)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(1).to(like.dtype)


def depth_pairs(tape: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Column and depth [B, L] of the pairs that occur in a tape [B, T, S], and the pair of every entry.

    Columns of a tape never decrease from row to row. L is about 2 S for trees that branch to the right, and T S / 2 for
    those that branch to the left.
    """
    by_column = tape.mT.flatten(1)
    changes = F.pad(tape[:, 1:] != tape[:, :-1], (0, 0, 1, 0), value=True)
    pair = changes.mT.flatten(1).cumsum(1) - 1
    numbers = torch.arange(int(pair.max()) + 1, device=tape.device).expand(len(tape), -1).contiguous()
    first = torch.searchsorted(pair, numbers).clamp(max=pair.shape[1] - 1)
    return first // tape.shape[1], by_column.gather(1, first), pair.view(-1, *tape.mT.shape[1:]).mT


class DepthEmbedding(nn.Embedding):
    """Vectors of depths, initialized otherwise than words."""


class FeedForwardLinear(nn.Linear):
    """Linear layer of a feed-forward network, initialized by Xavier with a gain."""

    def __init__(self, in_features: int, out_features: int, gain: float = 1.0):
        super().__init__(in_features, out_features)
        self.gain = gain


class PushdownAttention(nn.Module):
    """Multi-head attention that sees distances and, in some layers, the stack tape."""

    def __init__(self, config: PreTrainedConfig, number: int):
        super().__init__()
        size = config.hidden_size
        self.number, self.num_heads, self.dropout = number, config.num_attention_heads, config.dropout
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.relative_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)
        if config.pushdown_layers is None or number in config.pushdown_layers:
            self.depth_embedding = DepthEmbedding(config.num_depths, size // config.num_attention_heads)

    def _heads(self, value: Tensor) -> Tensor:
        """[.., T, D] -> [.., H, T, d]."""
        return value.unflatten(-1, (self.num_heads, -1)).transpose(-2, -3)

    def forward(self, hidden: Tensor, mask: Tensor, distance: Tensor, tape: Tensor, cache: Any = None) -> Tensor:
        """Attend from `hidden` [B, T, D] where `mask` [B, T, S] is True; distances in [0, S), tape in [0, N)."""
        query = self._heads(self.q_proj(hidden))
        key, value = self._heads(self.k_proj(hidden)), self._heads(self.v_proj(hidden))
        if cache is not None:
            key, value = cache.update(key, value, self.number)
        positions = self.relative_proj(distance_vectors(mask.shape[2], hidden.shape[2], hidden))
        terms = [RelativeTerm(query, self._heads(positions), distance)]
        if hasattr(self, "depth_embedding"):
            terms.append(RelativeTerm(query, weight_of(self.depth_embedding)[None], tape))
        attended = tree_attention(query, key, value, mask, terms, self.dropout if self.training else 0.0)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class PushdownLayer(nn.Module):
    """Attention and feed-forward layer, each followed by a layer norm."""

    def __init__(self, config: PreTrainedConfig, number: int):
        super().__init__()
        size = config.hidden_size
        self.attention = PushdownAttention(config, number)
        self.attention_norm = nn.LayerNorm(size)
        self.up_proj = FeedForwardLinear(size, config.intermediate_size, gain=2**0.5)
        self.down_proj = FeedForwardLinear(config.intermediate_size, size)
        self.feed_forward_norm = nn.LayerNorm(size)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor, distance: Tensor, tape: Tensor, cache: Any = None) -> Tensor:
        """Run the layer; see `PushdownAttention.forward`."""
        hidden = self.attention_norm(hidden + self.dropout(self.attention(hidden, mask, distance, tape, cache)))
        inner = self.dropout(F.relu(self.up_proj(hidden)))
        return self.feed_forward_norm(hidden + self.dropout(self.down_proj(inner)))


class PushdownMLP(nn.Module):
    """Two linear layers with relu and dropout between."""

    def __init__(self, input_size: int, inner_size: int, output_size: int, dropout: float):
        super().__init__()
        self.up_proj = nn.Linear(input_size, inner_size)
        self.down_proj = nn.Linear(inner_size, output_size)
        self.dropout = nn.Dropout(dropout)

    def forward(self, value: Tensor) -> Tensor:
        """Map the last dimension."""
        return self.down_proj(self.dropout(F.relu(self.up_proj(value))))


class AttachmentHead(nn.Module):
    """Where the next token is attached."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__()
        size, self.kind = config.hidden_size, config.attachment_key
        self.query_proj = nn.Linear(size, 2 * size, bias=False)
        self.key_proj = nn.Linear(size, 2 * size, bias=False)
        self.relative_proj = nn.Linear(size, 2 * size, bias=False)
        self.query_mlp = PushdownMLP(3 * size, 2 * size, 2 * size, config.dropout)
        self.shift_mlp = PushdownMLP(3 * size, 2 * size, 2 * size, config.dropout)
        if self.kind == "mlp":
            self.depth_embedding = DepthEmbedding(config.num_depths, config.attachment_depth_size)
            inner = 2 * size + config.attachment_depth_size
            self.key_mlp = PushdownMLP(inner, inner, 2 * size, config.dropout)
        elif self.kind == "sum":
            self.depth_embedding = DepthEmbedding(config.num_depths, 2 * size)

    @property
    def key_size(self) -> int:
        """Width of `keys`."""
        return self.key_mlp.up_proj.out_features if self.kind == "mlp" else self.key_proj.out_features

    def keys(self, hidden: Tensor) -> Tensor:
        """What a position contributes to its keys, whatever its depth: states [.., D] -> [.., M]."""
        keys = self.key_proj(hidden)
        if self.kind != "mlp":
            return keys
        first = self.key_mlp.up_proj
        return F.linear(keys, weight_of(first)[:, : keys.shape[-1]], unwrapped(first).bias)

    def forward(self, hidden: Tensor, embedded: Tensor, keys: Tensor, tape: Tensor, before: Tensor) -> Tensor:
        """Scores of attachments [B, T, S + 1]: at s, joining the constituent that ends at s; at `before` + 1, shifting.

        -inf beyond. `hidden` [B, T, D] are the states that the next tokens were generated from, `embedded` the tokens'
        own embeddings, not scaled; `before` [B, T] is the position of the rows, the columns are positions 0 .. S - 1.
        """
        query = self.query_mlp(torch.cat([self.query_proj(hidden), embedded], -1))
        own = (query * self.shift_mlp(torch.cat([query, embedded], -1))).sum(-1, keepdim=True)
        scores = F.pad(self._key_scores(query, keys, tape), (0, 1))
        scores = scores.scatter(2, before[..., None] + 1, own.to(scores.dtype))  # autocast may differ in types
        place = torch.arange(scores.shape[2], device=scores.device)
        distance = before[..., None] + 1 - place
        positions = self.relative_proj(distance_vectors(len(place), hidden.shape[2], hidden))
        scores = scores + (query @ positions.T).gather(2, distance.clamp(min=0))
        return scores.masked_fill(distance < 0, float("-inf"))

    def _key_scores(self, query: Tensor, keys: Tensor, tape: Tensor) -> Tensor:
        """Products [B, T, S] of queries with the keys of the columns at their depths."""
        if self.kind == "none":
            return query @ keys.mT
        if self.kind == "sum":
            return query @ keys.mT + (query @ weight_of(self.depth_embedding).T).gather(2, tape)
        first, second, dropout = self.key_mlp.up_proj, self.key_mlp.down_proj, self.key_mlp.dropout
        of_depth = F.linear(weight_of(self.depth_embedding), weight_of(first)[:, query.shape[2] :])
        # Dropout has one mask for each query; that of the authors has one for each pair, and the same mean.
        moved = dropout(query @ weight_of(second))
        columns, depths, pair = depth_pairs(tape)
        offset = keys.shape[1] * torch.arange(len(keys), device=keys.device)[:, None]
        inner = F.relu(F.embedding(columns + offset, keys.flatten(0, 1)) + F.embedding(depths, of_depth))
        return (moved @ inner.mT).gather(2, pair) + (query @ unwrapped(second).bias)[..., None]
