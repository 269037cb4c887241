"""The parts of GPST that see pairs and boundaries: composition, decomposition and the parser.

The composition model (f_alpha, phi_alpha) merges two vectors into one and scores splits; the decomposition model
(f_beta, phi_beta) sends messages down the chart; the parser scores boundaries, which gives the merge order. All three
are plain layers: charts, trees and losses are elsewhere.

Shapes: R rows, C cells of a level, M splits of a cell, B contexts, T tokens, D (here also d) width, F features.

Source: the authors' `model/r2d2_base.py`, `modules/layers.py` and `model/fast_parser.py`.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.module_tools import weight_of
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig


# ---------------------------------------------------------------------------------------------- composition
class GPSTPairLayer(nn.Module):
    """One post-norm Transformer layer over pairs; its layer norms have no parameters.

    x <- LN(x + W_o attention(x));  x <- LN(x + W_2 gelu(W_1 x))

    Role embeddings enter queries and keys, not values. With two positions, attention is a sigmoid:
    weight of position 0 = sigmoid(q . (k_0 - k_1) / sqrt(head size)).
    """

    def __init__(self, config: GPSTConfig):
        super().__init__()
        size = config.composition_size
        self.num_heads = config.composition_num_heads
        self.dropout, self.attention_dropout = config.composition_dropout, config.composition_attention_dropout
        self.role_embedding = nn.Embedding(4, size)
        self.in_proj = nn.Linear(size, 3 * size)
        self.out_proj = nn.Linear(size, size)
        self.linear1 = nn.Linear(size, config.composition_intermediate_size)
        self.linear2 = nn.Linear(config.composition_intermediate_size, size)

    def role_bias(self) -> Tensor:
        """Bias of the q, k, v projection with the role terms, by role [4, 3 d]."""
        size = self.out_proj.in_features
        role = F.linear(weight_of(self.role_embedding), weight_of(self.in_proj)[: 2 * size])
        return self.in_proj.bias + F.pad(role, (0, size))

    def attend(self, pair: Tensor, qkv: Tensor, linear: Callable, name: str) -> Tensor:
        """Finish the layer from its projections: `pair` [..., 2, d] and `qkv` [..., 2, 3 d] -> [..., 2, d]."""
        size, masks = pair.shape[-1], None
        if self.training and self.attention_dropout > 0:
            one = qkv.new_ones(*qkv.shape[:-1], self.num_heads, 1)
            masks = torch.stack([self._drop(one, True), self._drop(one, True)], -3)
        mixed = _PairAttention.apply(qkv, self.num_heads, masks)
        pair = F.layer_norm(pair + self._drop(linear(f"{name}.out_proj", mixed)), (size,))
        hidden = self._drop(F.gelu(linear(f"{name}.linear1", pair)))
        return F.layer_norm(pair + self._drop(linear(f"{name}.linear2", hidden)), (size,))

    def _drop(self, tensor: Tensor, attention: bool = False) -> Tensor:
        return F.dropout(tensor, self.attention_dropout if attention else self.dropout, self.training)

    def maps(self, name: str, in_bias: Tensor | None) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The layer's linear maps by name; `in_bias` replaces the bias of the q, k, v projection."""
        maps = {f"{name}.in_proj": (weight_of(self.in_proj), in_bias)}
        for part in ("out_proj", "linear1", "linear2"):
            module = getattr(self, part)
            maps[f"{name}.{part}"] = (weight_of(module), module.bias)
        return maps


class _PairAttention(torch.autograd.Function):
    """Attention of two positions to both: drop(w) v_0 + drop(1 - w) v_1 with w = sigmoid(q (k_0 - k_1) / sqrt(s)).

    Autograd would run three times as many operations in backward, and a chart calls this at every level. Shapes:
    `qkv` [..., 2, 3 d], `masks` [..., 2 (query), 2 (key), heads, 1] or None, head size s.
    """

    @staticmethod
    def forward(ctx, qkv, num_heads, masks):
        heads = qkv.unflatten(-1, (3 * num_heads, -1))
        query, value = heads[..., :num_heads, :], heads[..., 2 * num_heads :, :]
        keys_values = heads[..., num_heads:, :]
        difference, between = (keys_values[..., :1, :, :] - keys_values[..., 1:, :, :]).chunk(2, -2)
        difference = difference / math.sqrt(query.shape[-1])
        weight = (query * difference).sum(-1, keepdim=True).sigmoid()
        if masks is None and not ctx.needs_input_grad[0]:
            return torch.addcmul(value[..., 1:, :, :], weight, between).flatten(-2)
        weights = torch.stack([weight, 1 - weight], -3)  # [..., 2 (query), 2 (key), heads, 1]
        if masks is not None:
            weights = weights * masks
        # A chart runs backward twice.
        ctx.save_for_backward(qkv, difference, weight, weights, masks)
        second = weights[..., 1, :, :] * value[..., 1:, :, :]
        return torch.addcmul(second, weights[..., 0, :, :], value[..., :1, :, :]).flatten(-2)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        qkv, difference, weight, weights, masks = ctx.saved_tensors
        heads = (weight.shape[-2], -1)
        query, _, value = qkv.unflatten(-1, (3, *heads)).unbind(-3)
        grads = torch.empty_like(qkv)
        by_query, by_key, by_value = grads.unflatten(-1, (3, *heads)).unbind(-3)
        gradient = gradient.unflatten(-1, heads).unsqueeze(-3)
        torch.sum(weights * gradient, -4, out=by_value)
        by_weight = (gradient * value.unsqueeze(-4)).sum(-1, keepdim=True)
        if masks is not None:
            by_weight = by_weight * masks
        by_logit = torch.ops.aten.sigmoid_backward(by_weight[..., 0, :, :] - by_weight[..., 1, :, :], weight)
        torch.mul(by_logit, difference, out=by_query)
        torch.mul((by_logit * query).sum(-3), 1 / math.sqrt(query.shape[-1]), out=by_key[..., 0, :, :])
        torch.neg(by_key[..., 0, :, :], out=by_key[..., 1, :, :])
        return grads, None, None


class GPSTScore(nn.Sequential):
    """Two-layer projection of a vector for split scores: d -> d, gelu, d -> score size."""

    def __init__(self, config: GPSTConfig):
        size = config.composition_size
        super().__init__(nn.Linear(size, size), nn.GELU(), nn.Linear(size, config.score_size))

    def maps(self, name: str) -> dict[str, tuple[Tensor, Tensor | None]]:
        """The linear maps by name."""
        return {f"{name}.{x}": (weight_of(self[x]), self[x].bias) for x in (0, 2)}

    @staticmethod
    def run(linear: Callable, name: str, vector: Tensor) -> Tensor:
        """Apply the named projection through `linear`."""
        return linear(f"{name}.2", F.gelu(linear(f"{name}.0", vector)))


class GPSTComposition(nn.Module):
    """Composition function f_alpha and score phi_alpha of the inside pass.

    f(l, r) = LN(sum over both positions of encoder([l, r]));  phi(l, r) = u(l) . v(r) / sqrt(score size)
    """

    def __init__(self, config: GPSTConfig):
        super().__init__()
        self.layers = nn.ModuleList(GPSTPairLayer(config) for _ in range(config.num_composition_layers))
        self.left_score = GPSTScore(config)
        self.right_score = GPSTScore(config)
        self.scale = config.score_size**-0.5

    def chart_tensors(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Linear maps of the composition, with role terms folded into the first biases."""
        maps = {**self.left_score.maps("left_score"), **self.right_score.maps("right_score")}
        for index, layer in enumerate(self.layers):
            maps.update(layer.maps(str(index), layer.role_bias()[:2]))
        return maps

    def compose(self, linear: Callable, pair_R2D: Tensor, qkv: Tensor | None = None) -> Tensor:
        """Vectors [R, d] of the parents of R pairs; `qkv` [R, 2, 3 d] are their first projections, if known."""
        for index, layer in enumerate(self.layers):
            if index or qkv is None:
                qkv = linear(f"{index}.in_proj", pair_R2D)
            pair_R2D = layer.attend(pair_R2D, qkv, linear, str(index))
        return F.layer_norm(pair_R2D.sum(-2), pair_R2D.shape[-1:])

    def score_splits(self, linear: Callable, left_RD: Tensor, right_RD: Tensor) -> Tensor:
        """Scores [R] of pairs of children."""
        left = GPSTScore.run(linear, "left_score", left_RD)
        right = GPSTScore.run(linear, "right_score", right_RD)
        return (left * right).sum(-1) * self.scale

    def composer(self) -> Callable[[Tensor, Tensor, list[int]], Tensor]:
        """Function that composes single pairs one after the other, as the left-to-right search does.

        It maps the left vectors [..., P, d] of levels of rows, the first right ones [..., R, d] and the sizes to
        [..., P, d]: each result is the right child of the next. It prepares the role terms once, so it is for use while
        the parameters stay as they are.
        """
        maps = self.chart_tensors()
        weight, (left_bias, right_bias) = maps["0.in_proj"]

        def linear(name: str, inputs: Tensor) -> Tensor:
            weight, bias = maps[name]
            return F.linear(inputs, weight, bias) if bias.dim() == 1 else F.linear(inputs, weight) + bias

        def compose_chain(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
            vectors, projections = [], F.linear(left, weight, left_bias).split(sizes, -2)
            for vector, projected in zip(left.split(sizes, -2), projections, strict=True):
                right = right[..., : vector.shape[-2], :]
                pair = torch.stack([vector, right], -2)
                qkv = torch.stack([projected, F.linear(right, weight, right_bias)], -2)
                right = self.compose(linear, pair, qkv)
                vectors.append(right)
            return torch.cat(vectors, -2)

        return compose_chain

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Compose single pairs outside of a chart: [..., d] x 2 -> [..., d]."""
        return self.composer()(left[..., None, :], right[..., None, :], [1]).squeeze(-2)


class GPSTDecomposition(nn.Module):
    """Decomposition function f_beta and score phi_beta of the outside pass.

    Message to a child: LN(sum of encoder([outside of the parent, inside of the sibling])); its score is
    p(parent) . u(sibling) / sqrt(score size), with one projection u for right and one for left siblings.
    """

    def __init__(self, config: GPSTConfig):
        super().__init__()
        self.layers = nn.ModuleList(GPSTPairLayer(config) for _ in range(config.num_decomposition_layers))
        self.parent_score = GPSTScore(config)
        self.left_score = GPSTScore(config)
        self.right_score = GPSTScore(config)
        self.scale = config.score_size**-0.5
        self.sizes = [config.composition_size, 3 * config.composition_size, config.score_size, config.score_size]

    def chart_tensors(self) -> dict[str, tuple[Tensor, Tensor | None]]:
        """Linear maps that the level loop applies (the first projection of parents without its bias)."""
        maps = self.parent_score.maps("parent_score")
        for index, layer in enumerate(self.layers):
            maps.update(layer.maps(str(index), self._by_side(layer.role_bias()) if index else None))
        return maps

    def position_bias(self) -> Tensor:
        """Bias [2, 2, 3 d] of the first projections by child side and pair position."""
        return self._by_side(self.layers[0].role_bias())

    @staticmethod
    def _by_side(role_bias: Tensor) -> Tensor:
        """Rows of parent and sibling by child side: (parent, right sibling), (parent, left sibling)."""
        return torch.stack([role_bias[:2], role_bias[:3:2]])

    def cell_features(self, vector_ND: Tensor) -> Tensor:
        """[N, 4 d + 2 score size]: vector, its first projections, and its score projections as left / right sibling."""
        projections = F.linear(vector_ND, weight_of(self.layers[0].in_proj))
        parts = [vector_ND, projections, self.left_score(vector_ND), self.right_score(vector_ND)]
        return torch.cat([part.to(vector_ND.dtype) for part in parts], -1)

    def messages(
        self, linear: Callable, bias: Tensor, parent_CD: Tensor, sibling_CM2F: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores [C, M, 2] and vectors [C, M, 2, d] of the messages to left and right children."""
        num_cells, width = sibling_CM2F.shape[:2]
        sibling, projections, as_left, as_right = sibling_CM2F.split(self.sizes, -1)
        parent_score = GPSTScore.run(linear, "parent_score", parent_CD)[:, None]
        score = torch.stack([(parent_score * as_right[:, :, 0]).sum(-1), (parent_score * as_left[:, :, 1]).sum(-1)], -1)

        def pairs(parent: Tensor, sibling: Tensor) -> Tensor:
            return torch.stack([parent[:, None, None].expand(num_cells, width, 2, -1), sibling], -2)

        pair = pairs(parent_CD, sibling)
        qkv = pairs(linear("0.in_proj", parent_CD), projections) + bias
        for index, layer in enumerate(self.layers):
            qkv = qkv if index == 0 else linear(f"{index}.in_proj", pair)
            pair = layer.attend(pair, qkv, linear, str(index))
        return score * self.scale, F.layer_norm(pair.sum(-2), pair.shape[-1:])


# ---------------------------------------------------------------------------------------------- parser
class GPSTParserLayer(nn.Module):
    """Pre-norm Transformer layer with rotary positions and a gated feed-forward network, without biases and dropout."""

    def __init__(self, config: GPSTConfig):
        super().__init__()
        size = config.parser_size
        # Width of the authors' layer: two thirds of 4 p, rounded up to a multiple of 256.
        inner = 256 * math.ceil(int(2 * 4 * size / 3) / 256)
        self.num_heads = config.parser_num_heads
        self.attention_norm = nn.RMSNorm(size, eps=1e-5)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(size, size, bias=False) for _ in range(4))
        self.mlp_norm = nn.RMSNorm(size, eps=1e-5)
        self.gate_proj, self.up_proj = (nn.Linear(size, inner, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, hidden_BTD: Tensor, mask_B1TT: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """One layer; `mask_B1TT` is True where a token may attend."""
        normed = self.attention_norm(hidden_BTD)
        query, key, value = (
            proj(normed).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = _rotate(query, *rotary), _rotate(key, *rotary)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_B1TT)
        hidden_BTD = hidden_BTD + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(hidden_BTD)
        return hidden_BTD + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


def _rotate(tensor: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = tensor.chunk(2, -1)
    return tensor * cosine.to(tensor.dtype) + torch.cat([-second, first], -1) * sine.to(tensor.dtype)


class GPSTParser(nn.Module):
    """Scores the boundaries between neighbouring tokens; low scores merge first.

    Tokens attend to their own sentence only and positions are relative, so a sentence's scores do not depend on its
    neighbours or on where it stands.
    """

    def __init__(self, config: GPSTConfig):
        super().__init__()
        self.head_size = config.parser_size // config.parser_num_heads
        self.embed_tokens = nn.Embedding(config.vocab_size, config.parser_size)
        self.layers = nn.ModuleList(GPSTParserLayer(config) for _ in range(config.num_parser_layers))
        self.norm = nn.RMSNorm(config.parser_size, eps=1e-5)
        self.score = nn.Sequential(
            nn.Linear(2 * config.parser_size, config.parser_score_size),
            nn.GELU(),
            nn.Dropout(config.parser_dropout),
            nn.Linear(config.parser_score_size, 1),
        )

    def forward(self, input_ids: Tensor, sentence_ids: Tensor) -> Tensor:
        """Scores [B, T - 1] of the boundaries between tokens t and t + 1, in float32."""
        hidden = self.embed_tokens(input_ids)
        mask = (sentence_ids[:, :, None] == sentence_ids[:, None, :])[:, None]
        position = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=torch.float32)
        steps = torch.arange(0, self.head_size, 2, device=input_ids.device, dtype=torch.float32) / self.head_size
        angle = torch.outer(position, 10000.0**-steps).repeat(1, 2)
        rotary = (angle.cos(), angle.sin())
        for layer in self.layers:
            hidden = layer(hidden, mask, rotary)
        hidden = self.norm(hidden)
        return self.score(torch.cat([hidden[:, :-1], hidden[:, 1:]], -1)).squeeze(-1).float()
