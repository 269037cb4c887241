# SPDX-License-Identifier: Apache-2.0
"""The parts of GPST that see pairs and boundaries: composition, decomposition and the parser.

The composition model (f_alpha, phi_alpha) merges two vectors into one and scores splits; the decomposition model
(f_beta, phi_beta) sends messages down the chart; the parser scores boundaries, which gives the merge order. All three
are plain layers: charts, trees and losses are elsewhere.

Shapes: R rows, C cells of a level, M splits of a cell, B contexts, T tokens, D (here also d) width, F features.

Source: the authors' `model/r2d2_base.py`, `modules/layers.py` and `model/fast_parser.py`.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import LevelModule
from hf_synlm.core.module_tools import weight_of
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig

Maps = Mapping[str, tuple[Tensor, Tensor]]
"""Linear maps by name: weight and bias."""
Masks = tuple[Tensor | None, ...]
"""What dropout keeps at the four places of a layer; `None` for everything."""
NO_MASKS: Masks = (None, None, None, None)
Rows = dict[str, tuple[Tensor, Tensor]]
"""Inputs of maps, and gradients of their outputs by channel [K, ...]: what weight gradients are made of."""


# ---------------------------------------------------------------------------------------------- operations
def apply_map(maps: Maps, name: str, inputs: Tensor) -> Tensor:
    """Apply the named map to `inputs` [..., in]; a bias [G, out] is for G equal groups of rows, one after the other."""
    weight, bias = maps[name]
    if bias.dim() == 1:
        return F.linear(inputs, weight, bias)
    groups = inputs.reshape(len(bias), -1, inputs.shape[-1])
    output = torch.baddbmm(bias[:, None], groups, weight.mT.expand(len(bias), -1, -1))
    return output.view(*inputs.shape[:-1], -1)


def layer_norm(tensor: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """Layer norm without parameters, and what `layer_norm_backward` needs."""
    output, mean, scale = torch.native_layer_norm(tensor, tensor.shape[-1:], None, None, 1e-5)
    return output, (tensor, mean, scale)


def layer_norm_backward(gradient: Tensor, kept: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Gradient of the input [K, ...] from that of the output, one native call for each channel."""
    tensor, mean, scale = kept
    native, only_input = torch.ops.aten.native_layer_norm_backward, [True, False, False]
    parts = [native(part, tensor, tensor.shape[-1:], mean, scale, None, None, only_input)[0] for part in gradient]
    return torch.stack(parts)


def _gelu_backward(gradient: Tensor, hidden: Tensor) -> Tensor:
    """Gradient of the input [K, ...] from that of the output, with one evaluation of the slope."""
    return gradient * torch.ops.aten.gelu_backward(torch.ones_like(hidden), hidden)


def stack_two(first: Tensor, second: Tensor, dim: int) -> Tensor:
    """`torch.stack` along a negative dimension; compiled a choice, which joins the operations around it."""
    if not torch.compiler.is_compiling():
        return torch.stack([first, second], dim)
    is_second = torch.arange(2, device=first.device).bool().view(2, *[1] * (-dim - 1))
    return torch.where(is_second, second.unsqueeze(dim), first.unsqueeze(dim))


def keep_mask(shape: tuple[int, ...], rate: float, device: torch.device) -> Tensor | None:
    """Draw what dropout keeps; `None` for all."""
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(1 - rate) if rate > 0 else None


def _drop(tensor: Tensor, mask: Tensor | None, rate: float) -> Tensor:
    """Apply dropout; the gradient of the result goes through the same operation."""
    return tensor if mask is None else torch.ops.aten.native_dropout_backward(tensor, mask, 1 / (1 - rate))


def _product(gradient: Tensor, weight: Tensor, added: Tensor | None = None) -> Tensor:
    """The product with a weight over the last dimension, added to `added` if that is given."""
    if added is None:
        return gradient @ weight
    if weight.dim() == 3:
        return torch.baddbmm(added, gradient, weight)
    return torch.addmm(added.flatten(0, -2), gradient.flatten(0, -2), weight).view(added.shape)


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
        self.scale = (size // self.num_heads) ** -0.5
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

    def maps(self, name: str, in_bias: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """The layer's linear maps by name; `in_bias` replaces the bias of the q, k, v projection."""
        maps = {f"{name}.in_proj": (weight_of(self.in_proj), in_bias)}
        for part in ("out_proj", "linear1", "linear2"):
            module = getattr(self, part)
            maps[f"{name}.{part}"] = (weight_of(module), module.bias)
        return maps

    def draw_masks(self, num_rows: int, device: torch.device) -> Masks:
        """Draw what dropout keeps for so many pairs, rows in the last dimension but one.

        Attention weights [2 (key), 2 (query), R, heads], its branch [2, R, d], the hidden layer, its branch.
        """
        size, inner = self.out_proj.in_features, self.linear1.out_features
        shapes = [(2, num_rows, size), (2, num_rows, inner), (2, num_rows, size)]
        masks = [keep_mask((2, 2, num_rows, self.num_heads), self.attention_dropout, device)]
        return tuple(masks + [keep_mask(shape, self.dropout, device) for shape in shapes])

    def run(self, maps: Maps, name: str, pair: Tensor, qkv: Tensor, masks: Masks) -> tuple[Tensor, tuple]:
        """Finish the layer from its projections; what `backward` needs.

        Args:
            maps: See `maps`.
            name: The layer's name in `maps`.
            pair: [2, ..., d].
            qkv: [2, ..., 3 d] projections of `pair`.
            masks: See `draw_masks`.

        Returns:
            The layer's output [2, ..., d], and what `backward` needs.
        """
        mixed, attention = self._attend(qkv, masks[0])
        middle, first = layer_norm(pair + self._dropped(apply_map(maps, f"{name}.out_proj", mixed), masks[1]))
        hidden = apply_map(maps, f"{name}.linear1", middle)
        activated = self._dropped(F.gelu(hidden), masks[2])
        branch = self._dropped(apply_map(maps, f"{name}.linear2", activated), masks[3])
        output, second = layer_norm(middle + branch)
        return output, (attention, mixed, first, middle, hidden, activated, second, masks)

    def backward(self, maps: Maps, name: str, kept: tuple, gradient: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Gradients of `pair`, without the way through the projections, and of `qkv` [K, 2, R, 3 d]; fills `rows`."""
        attention, mixed, first, middle, hidden, activated, second, masks = kept
        gradient = layer_norm_backward(gradient, second)
        branch = self._dropped(gradient, masks[3])
        rows[f"{name}.linear2"] = (activated, branch)
        branch = self._dropped(_product(branch, maps[f"{name}.linear2"][0]), masks[2])
        branch = _gelu_backward(branch, hidden)
        rows[f"{name}.linear1"] = (middle, branch)
        gradient = layer_norm_backward(_product(branch, maps[f"{name}.linear1"][0], gradient), first)
        branch = self._dropped(gradient, masks[1])
        rows[f"{name}.out_proj"] = (mixed, branch)
        branch = _product(branch, maps[f"{name}.out_proj"][0])
        return gradient, self._attend_backward(attention, branch, masks[0])

    def _dropped(self, tensor: Tensor, mask: Tensor | None) -> Tensor:
        return _drop(tensor, mask, self.dropout)

    def _attend(self, qkv: Tensor, mask: Tensor | None) -> tuple[Tensor, tuple]:
        """w_0 v_0 + w_1 v_1 with w_0 = sigmoid(q (k_0 - k_1) / sqrt(s)), w_1 = 1 - w_0, both dropped by `mask`."""
        query, _, value = self._heads(qkv, 3)
        size = value.shape[-1] * self.num_heads
        difference = qkv[0, ..., size:] - qkv[1, ..., size:]
        key_difference, value_difference = self._heads(difference, 2)
        weight = ((query * key_difference).sum(-1) * self.scale).sigmoid()
        if mask is None:
            mixed, both = torch.addcmul(value[1], weight[..., None], value_difference), None
        else:
            both = _drop(stack_two(weight, 1 - weight, -weight.dim() - 1), mask, self.attention_dropout)
            mixed = torch.addcmul(both[1, ..., None] * value[1], both[0, ..., None], value[0])
        return mixed.flatten(-2), (qkv, difference, weight, both)

    def _heads(self, tensor: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Parts [..., heads, s] of a tensor [..., parts d]."""
        return tensor.unflatten(-1, (parts, self.num_heads, -1)).unbind(-3)

    def _attend_backward(self, kept: tuple, gradient: Tensor, mask: Tensor | None) -> Tensor:
        """Gradient of `qkv` from that of the result [K, 2, R, d]."""
        qkv, difference, weight, both = kept
        query, _, value = self._heads(qkv, 3)
        key_difference, value_difference = self._heads(difference, 2)
        gradient = gradient.unflatten(-1, query.shape[-2:])
        if both is None:
            by_first = (weight[..., None] * gradient).sum(1)
            by_value = stack_two(by_first, gradient.sum(1) - by_first, -4)
            by_weight = (gradient * value_difference).sum(-1)
        else:
            gradient = gradient[:, None]
            by_value = (both[..., None] * gradient).sum(2)
            if torch.compiler.is_compiling():  # key by key, which joins the operations around it
                parts = [(gradient[:, 0] * of_key).sum(-1) for of_key in value]
                first, second = (
                    _drop(part, kept, self.attention_dropout) for part, kept in zip(parts, mask, strict=True)
                )
            else:
                by_both = (gradient * value[:, None]).sum(-1)
                first, second = _drop(by_both, mask, self.attention_dropout).unbind(1)
            by_weight = first - second
        by_logit = (torch.ops.aten.sigmoid_backward(by_weight, weight) * self.scale)[..., None]
        by_first = (by_logit * query).sum(1)
        signs = torch.linspace(1, -1, 2, dtype=qkv.dtype, device=qkv.device)
        by_key = by_first[:, None] * signs[:, None, None, None]
        return torch.stack([by_logit * key_difference, by_key, by_value], -3).flatten(-3)


class GPSTScore(nn.Sequential):
    """Two-layer projection of a vector for split scores: d -> d, gelu, d -> score size."""

    def __init__(self, config: GPSTConfig):
        size = config.composition_size
        super().__init__(nn.Linear(size, size), nn.GELU(), nn.Linear(size, config.score_size))

    def maps(self, name: str) -> dict[str, tuple[Tensor, Tensor]]:
        """The linear maps by name."""
        return {f"{name}.{x}": (weight_of(self[x]), self[x].bias) for x in (0, 2)}

    @staticmethod
    def run(maps: Maps, name: str, vector: Tensor) -> tuple[Tensor, tuple]:
        """Apply the named projection; the result, and what `backward` needs."""
        hidden = apply_map(maps, f"{name}.0", vector)
        activated = F.gelu(hidden)
        return apply_map(maps, f"{name}.2", activated), (vector, hidden, activated)

    @staticmethod
    def backward(
        maps: Maps, name: str, kept: tuple, gradient: Tensor, rows: Rows, added: Tensor | None = None
    ) -> Tensor:
        """Gradient of the vector, added to `added` if that is given; fills `rows`."""
        vector, hidden, activated = kept
        rows[f"{name}.2"] = (activated, gradient[None])
        gradient = torch.ops.aten.gelu_backward(_product(gradient, maps[f"{name}.2"][0]), hidden)
        rows[f"{name}.0"] = (vector, gradient[None])
        return _product(gradient, maps[f"{name}.0"][0], added)


class GPSTPairEncoder(LevelModule):
    """Layers over pairs and the sum of their two positions: LN(sum over both positions of layers([x_0, x_1])).

    What a chart runs at each level is a pure function without autograd, its gradient a second one. `compile` compiles
    both; with `gradient_checkpointing`, backward computes the level again. What the first keeps for the second has its
    rows in the last dimension but one.
    """

    rows_per_split = 1
    """Pairs of a split of a cell."""

    def __init__(self, config: GPSTConfig, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(GPSTPairLayer(config) for _ in range(num_layers))
        self.scale = config.score_size**-0.5
        self.gradient_checkpointing = False

    def draw_masks(self, num_rows: int, device: torch.device) -> list[Masks]:
        """What dropout keeps in each layer (see `GPSTPairLayer.draw_masks`); in evaluation mode everything."""
        if not self.training:
            return [NO_MASKS] * len(self.layers)
        return [layer.draw_masks(num_rows, device) for layer in self.layers]

    def encode(
        self, maps: Maps, pair: Tensor, qkv: Tensor, masks: Sequence[Masks] | None = None
    ) -> tuple[Tensor, tuple]:
        """Vectors [..., d] of pairs [2, ..., d] whose first projections `qkv` [2, ..., 3 d] are known.

        Also returns what `encode_backward` needs.
        """
        kept = []
        for index, layer in enumerate(self.layers):
            if index:
                qkv = apply_map(maps, f"{index}.in_proj", pair)
            output, saved = layer.run(maps, str(index), pair, qkv, NO_MASKS if masks is None else masks[index])
            kept.append((pair, saved))
            pair = output
        vector, norm = layer_norm(pair[0] + pair[1])
        return vector, (kept, norm)

    def encode_backward(self, maps: Maps, kept: tuple, gradient: Tensor, rows: Rows) -> tuple[Tensor, Tensor]:
        """Gradients of `pair` and `qkv` from that of the vectors [K, R, d]; K channels that share everything kept."""
        layers, norm = kept
        gradient = layer_norm_backward(gradient, norm)[:, None].expand(-1, 2, -1, -1)
        for index in reversed(range(len(layers))):
            pair, saved = layers[index]
            gradient, by_qkv = self.layers[index].backward(maps, str(index), saved, gradient, rows)
            if index:
                gradient = self.project_backward(maps, str(index), pair, gradient, by_qkv, rows)
        return gradient, by_qkv

    @staticmethod
    def project_backward(maps: Maps, name: str, pair: Tensor, gradient: Tensor, by_qkv: Tensor, rows: Rows) -> Tensor:
        """Add the gradient of `pair` that comes through the projections of the named layer."""
        rows[f"{name}.in_proj"] = (pair, by_qkv)
        return _product(by_qkv, maps[f"{name}.in_proj"][0], gradient)


class GPSTComposition(GPSTPairEncoder):
    """Composition function f_alpha and score phi_alpha of the inside pass.

    f(l, r) = LN(sum over both positions of encoder([l, r]));  phi(l, r) = u(l) . v(r) / sqrt(score size)
    """

    def __init__(self, config: GPSTConfig):
        super().__init__(config, config.num_composition_layers)
        self.left_score = GPSTScore(config)
        self.right_score = GPSTScore(config)

    def chart_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Linear maps of the composition, with role terms folded into the first biases.

        Those of both score projections are stacked, so that one product makes both.
        """
        left, right = self.left_score.maps("score"), self.right_score.maps("score")
        maps = {
            name: (torch.stack([left[name][0], right[name][0]]), torch.stack([left[name][1], right[name][1]]))
            for name in left
        }
        for index, layer in enumerate(self.layers):
            maps.update(layer.maps(str(index), layer.role_bias()[:2]))
        return maps

    def compose(self, maps: Maps, pair_2RD: Tensor, masks: Sequence[Masks] | None = None) -> tuple[Tensor, tuple]:
        """Vectors [R, d] of the parents of R pairs, and what `compose_backward` needs."""
        vector, kept = self.encode(maps, pair_2RD, apply_map(maps, "0.in_proj", pair_2RD), masks)
        return vector, (pair_2RD, kept)

    def compose_backward(self, maps: Maps, kept: tuple, gradient_KRD: Tensor, rows: Rows) -> Tensor:
        """Gradient [K, 2, R, d] of the pairs."""
        pair, layers = kept
        gradient, by_qkv = self.encode_backward(maps, layers, gradient_KRD, rows)
        return self.project_backward(maps, "0", pair, gradient, by_qkv, rows)

    def score_splits(self, maps: Maps, pair_2RD: Tensor) -> tuple[Tensor, tuple]:
        """Scores [R] of pairs of children, at least in float32, and what `score_backward` needs."""
        both, kept = GPSTScore.run(maps, "score", pair_2RD)
        score = (both[0] * both[1]).sum(-1, dtype=torch.promote_types(both.dtype, torch.float32))
        return score * self.scale, (both, kept)

    def score_backward(self, maps: Maps, kept: tuple, gradient_R: Tensor, rows: Rows, added_2RD: Tensor) -> Tensor:
        """Gradient [2, R, d] of the pairs, added to another one."""
        both, projections = kept
        by_both = both.flip(0) * (gradient_R[:, None] * self.scale).to(both.dtype)
        return GPSTScore.backward(maps, "score", projections, by_both, rows, added_2RD)

    def composer(self) -> Callable[[Tensor, Tensor, list[int]], Tensor]:
        """Function that composes single pairs one after the other, as the left-to-right search does.

        It maps the left vectors [..., P, d] of levels of rows, the first right ones [..., R, d] and the sizes to
        [..., P, d]: each result is the right child of the next. It prepares the role terms once, so it is for use while
        the parameters stay as they are. Nothing is dropped.
        """
        maps = self.chart_tensors()
        weight, (left_bias, right_bias) = maps["0.in_proj"]

        def compose_chain(left: Tensor, right: Tensor, sizes: list[int]) -> Tensor:
            vectors, projections = [], F.linear(left, weight, left_bias).split(sizes, -2)
            for vector, projected in zip(left.split(sizes, -2), projections, strict=True):
                right = right[..., : vector.shape[-2], :]
                pair = torch.stack([vector, right])
                right, _ = self.encode(maps, pair, torch.stack([projected, F.linear(right, weight, right_bias)]))
                vectors.append(right)
            return torch.cat(vectors, -2)

        return compose_chain

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Compose single pairs outside of a chart: [..., d] x 2 -> [..., d]."""
        return self.composer()(left[..., None, :], right[..., None, :], [1]).squeeze(-2)


class GPSTDecomposition(GPSTPairEncoder):
    """Decomposition function f_beta and score phi_beta of the outside pass.

    Message to a child: LN(sum of encoder([outside of the parent, inside of the sibling])); its score is
    p(parent) . u(sibling) / sqrt(score size), with one projection u for right and one for left siblings.
    """

    rows_per_split = 2

    def __init__(self, config: GPSTConfig):
        super().__init__(config, config.num_decomposition_layers)
        self.parent_score = GPSTScore(config)
        self.left_score = GPSTScore(config)
        self.right_score = GPSTScore(config)
        self.sizes = [config.composition_size, 3 * config.composition_size, 2 * config.score_size]

    def chart_tensors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Linear maps that the level loop applies: the first projection to parents, later ones to pairs.

        The rows of pairs are parents with left siblings, then with right ones, left siblings, right siblings.
        """
        maps = self.parent_score.maps("parent_score")
        for index, layer in enumerate(self.layers):
            parent, right, left, _ = layer.role_bias()
            maps.update(layer.maps(str(index), torch.stack([parent, parent, left, right]) if index else parent))
        return maps

    def sibling_bias(self) -> Tensor:
        """Bias [2, 3 d] of the first projections of left and right siblings."""
        _, right, left, _ = self.layers[0].role_bias()
        return torch.stack([left, right])

    def cell_features(self, vector_ND: Tensor) -> Tensor:
        """[N, 4 d + 2 score size]: vector, its first projections, and its score projections as left / right sibling."""
        projections = F.linear(vector_ND, weight_of(self.layers[0].in_proj))
        parts = [vector_ND, projections, self.left_score(vector_ND), self.right_score(vector_ND)]
        return torch.cat([part.to(projections.dtype) for part in parts], -1)

    def messages(
        self,
        maps: Maps,
        sibling_bias: Tensor,
        parent_CD: Tensor,
        sibling_2CMF: Tensor,
        masks: Sequence[Masks] | None = None,
    ) -> tuple[Tensor, Tensor, tuple]:
        """Messages of left and right siblings, each of which goes to the other child.

        Scores [2, C, M], at least in float32; vectors [2 C M, d]; what `messages_backward` needs.
        """
        shape = sibling_2CMF.shape[:3]
        sibling, projections, scores = sibling_2CMF.split(self.sizes, -1)
        parent_score, kept_score = GPSTScore.run(maps, "parent_score", parent_CD)
        own = _of_own_side(scores).contiguous()
        score = (parent_score[:, None] * own).sum(-1, dtype=torch.promote_types(own.dtype, torch.float32))

        def pairs(parent: Tensor, sibling: Tensor) -> Tensor:
            return torch.stack([parent[:, None].expand(*shape, -1), sibling]).flatten(1, 3)

        projections = projections + sibling_bias[:, None, None]
        qkv = pairs(apply_map(maps, "0.in_proj", parent_CD), projections)
        vector, kept = self.encode(maps, pairs(parent_CD, sibling), qkv, masks)
        return score * self.scale, vector, (parent_CD, own.flatten(1, 2), parent_score, kept_score, kept)

    def messages_backward(
        self, maps: Maps, kept: tuple, by_score: Tensor, by_vector: Tensor, rows: Rows
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Gradients from those of scores and vectors.

        Of `sibling_bias`, the parents [C, d], the siblings' vectors and projections [2, C, M, 4 d], and their scores
        for their own side [2, C, M, score size].
        """
        parent, own, parent_score, kept_score, layers = kept
        own = own.unflatten(1, by_score.shape[1:])
        by_score = (by_score[..., None] * self.scale).to(own.dtype)
        by_parent_score = (by_score * own).sum((0, 2))
        by_parent = GPSTScore.backward(maps, "parent_score", kept_score, by_parent_score, rows)
        gradient, by_qkv = self.encode_backward(maps, layers, by_vector[None], rows)
        by_both = torch.cat([gradient[0], by_qkv[0]], -1).unflatten(1, own.shape[:3])  # [2, 2 (side), C, M, 4 d]
        by_first = by_both[0].sum((0, 2))
        size = parent.shape[-1]
        by_parent = by_parent + by_first[:, :size]
        by_parent = self.project_backward(maps, "0", parent, by_parent, by_first[None, :, size:], rows)
        by_bias = by_both[1, ..., size:].sum((1, 2), dtype=torch.promote_types(own.dtype, torch.float32))
        return by_bias, by_parent, by_both[1], by_score * parent_score[:, None]


def _of_own_side(tensor: Tensor) -> Tensor:
    """View [2, ..., S] of a tensor [2, ..., 2 S]: the first half of the first part, the second half of the second."""
    return tensor.unflatten(-1, (2, -1)).diagonal(dim1=0, dim2=-2).movedim(-1, 0)


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
        pair = torch.stack([query, key])
        first, second = pair.chunk(2, -1)
        cosine, sine = (part.to(pair.dtype) for part in rotary)
        query, key = pair * cosine + torch.cat([-second, first], -1) * sine
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask_B1TT)
        hidden_BTD = hidden_BTD + self.o_proj(mixed.transpose(1, 2).flatten(-2))
        normed = self.mlp_norm(hidden_BTD)
        return hidden_BTD + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


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
        """Scores [B, T - 1] of the boundaries between tokens t and t + 1, in float32, or float64 like the weights."""
        hidden = self.embed_tokens(input_ids)
        wide = torch.promote_types(hidden.dtype, torch.float32)
        mask = (sentence_ids[:, :, None] == sentence_ids[:, None, :])[:, None]
        position = torch.arange(input_ids.shape[1], device=input_ids.device, dtype=wide)
        steps = torch.arange(0, self.head_size, 2, device=input_ids.device, dtype=wide) / self.head_size
        angle = torch.outer(position, 10000.0**-steps).repeat(1, 2)
        rotary = (angle.cos(), angle.sin())
        for layer in self.layers:
            hidden = layer(hidden, mask, rotary)
        hidden = self.norm(hidden)
        return self.score(torch.cat([hidden[:, :-1], hidden[:, 1:]], -1)).squeeze(-1).to(wide)
