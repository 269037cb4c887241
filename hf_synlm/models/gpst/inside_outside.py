# SPDX-License-Identifier: Apache-2.0
"""Inside and outside passes over pruned charts, batched by level over all sentences of a batch.

`inside` fills the charts of a plan (`models/gpst/chart.py`) bottom-up, `outside` runs them top-down. The caller passes
the composition function as an object. Each pass is one node of the autograd graph. What it does at a level is a pure
function without autograd, and its gradient is another one, which works from what the first one kept (on a CPU) or
computes the level again (on a GPU, and with gradient checkpointing). Both can be compiled. The slow and obvious
versions are `naive_inside` and `naive_outside` in tests/reference/inside_outside.py.

Shapes: N cells (leaves first, then level by level), C cells of a level, M splits of a cell, R = C M rows of a batch of
pairs, P messages, K gradient channels, D width of a cell vector, F width of a feature row. The two children of a split
stand in the first dimension.

Papers: Hu et al. 2024a (ReCAT), Hu et al. 2024b (GPST, section 3.2 and appendix A.1).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import call_level
from hf_synlm.models.gpst.chart import ChartPlan
from hf_synlm.models.gpst.composition import (
    GPSTComposition,
    GPSTDecomposition,
    GPSTPairEncoder,
    Maps,
    Masks,
    Rows,
    layer_norm,
    layer_norm_backward,
    stack_two,
)

# Rows of weight gradients that are collected before they are multiplied: enough for efficient GEMMs, but a small part
# of the memory.
_COLLECTED_ROWS = 1 << 15
# Bytes of second channels up to which they are added to the first once for all levels, then level by level.
_SECOND_CHANNELS = 1 << 30
# On a CPU, calls with fewer rows are joined before they are multiplied; joining large ones would copy more than it
# saves.
_SMALL_CALL = 256


# ---------------------------------------------------------------------------------------------- weight gradients
class WeightGradients:
    """Weight gradients of maps that a chart applies once a level, often to a handful of rows.

    The rows are collected and multiplied in a few large GEMMs. Sums are kept in float32 where GEMMs run in half
    precision.
    """

    def __init__(self, maps: Maps):
        self.maps = maps
        self.on_cpu = self.adds_at_once = next(iter(maps.values()))[0].device.type == "cpu"
        self.second_channels = 0
        self.rows: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in maps}
        self.sums: dict[str, list[Tensor]] = {}

    def add(self, rows: Rows) -> None:
        """Collect the rows of a level; multiply those of maps that have many."""
        if not self.adds_at_once:
            self.second_channels += sum(gradient[1:].nbytes for _, gradient in rows.values())
            if self.second_channels > _SECOND_CHANNELS:
                self.adds_at_once = True
                for name in self.maps:
                    self._multiply(name)
        for name, (inputs, gradient) in rows.items():
            groups = self.maps[name][1].shape[:-1]
            collected = self.rows[name]
            gradient = gradient.reshape(len(gradient), *groups, -1, gradient.shape[-1])
            if self.adds_at_once:
                gradient = _all_channels(gradient)[None]
            collected.append((inputs.reshape(*groups, -1, inputs.shape[-1]), gradient))
            if sum(inputs.shape[:-1].numel() for inputs, _ in collected) >= _COLLECTED_ROWS:
                self._multiply(name)

    def _multiply(self, name: str) -> None:
        calls, self.rows[name] = self.rows[name], []
        weight, _ = self.maps[name]
        dtype = torch.promote_types(weight.dtype, torch.float32)
        small = [call for call in calls if not self.on_cpu or call[0].shape[-2] < _SMALL_CALL]
        calls = [call for call in calls if self.on_cpu and call[0].shape[-2] >= _SMALL_CALL]
        if len(small) > 1:
            small = [tuple(torch.cat(tensors, -2) for tensors in zip(*small, strict=True))]
        for inputs, gradient in calls + small:
            gradient = _all_channels(gradient)
            bias_sum = gradient.sum(-2, dtype=dtype)
            if weight.dim() == 2:
                inputs, gradient = inputs.flatten(0, -2), gradient.flatten(0, -2)
            if name not in self.sums:
                self.sums[name] = [(gradient.mT @ inputs).to(dtype), bias_sum]
                continue
            weight_sum, old_bias_sum = self.sums[name]
            if weight.dtype != dtype:
                weight_sum += gradient.mT @ inputs
            elif weight.dim() == 2:
                weight_sum.addmm_(gradient.mT, inputs)
            else:
                weight_sum.baddbmm_(gradient.mT, inputs)
            old_bias_sum += bias_sum

    def results(self) -> list[Tensor]:
        """Gradients of weight and bias of every map, in the order of `maps`.

        A map that no cell used gets zeros, so that every parameter always has a gradient.
        """
        for name in self.maps:
            self._multiply(name)
        return [
            total
            for name, tensors in self.maps.items()
            for total in self.sums.get(name) or [torch.zeros_like(tensor) for tensor in tensors]
        ]


def _all_channels(gradient: Tensor) -> Tensor:
    """Sum over the channels, in which a weight gradient is linear."""
    return gradient[0] if len(gradient) == 1 else gradient[0] + gradient[1]


# ---------------------------------------------------------------------------------------------- what both passes share
class _Run:
    """What forward and backward of a pass share (nothing here is differentiable)."""

    def __init__(self, plan: ChartPlan, model: GPSTPairEncoder, inputs: Sequence[Tensor], options: dict[str, Any]):
        self.plan, self.model, self.options = plan, model, options
        tensors = model.chart_tensors()
        self.names = tuple(tensors)
        self.flat = [tensor for pair in tensors.values() for tensor in pair]
        self.train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*inputs, *self.flat))
        self.again = inputs[0].device.type != "cpu" or model.gradient_checkpointing
        self.notes: dict[str, Any] = {}
        self.consumed = False

    def begin(self, like: Tensor, flat: Sequence[Tensor]) -> torch.dtype:
        """Set the maps, in the type of this pass, and the masks of dropout; returns the type."""
        device = like.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
        flat = [tensor.detach() for tensor in flat]
        if any(tensor.dtype != dtype for tensor in flat):
            exact, flat = flat, [torch.empty_like(tensor, dtype=dtype) for tensor in flat]
            torch._foreach_copy_(flat, exact)
        self.maps = dict(zip(self.names, zip(flat[::2], flat[1::2], strict=True), strict=True))
        last = len(self.plan.levels) + 1
        self.rows = [self.plan.first_message(level) * self.model.rows_per_split // 2 for level in range(last)]
        self.masks = self.model.draw_masks(self.rows[-1], like.device)
        return dtype

    def begin_backward(self) -> None:
        """Refuse a second backward call: what the levels kept is freed one by one."""
        if self.consumed:
            raise RuntimeError(
                "backward ran through this chart already. The graph of the chart is freed level by level, even with "
                "retain_graph=True: add the losses before one backward call, or call forward again."
            )
        self.consumed = True

    def call(self, function: Callable, *inputs: Any, fixed: tuple = ()) -> Any:
        """Call a function of a level, compiled if the model's functions are; only rows of `inputs` vary."""
        return call_level(self.model.compile_options, function, *inputs, fixed=fixed)

    def level_masks(self, level: int) -> list[Masks]:
        """The masks of a level."""
        rows = slice(self.rows[level], self.rows[level + 1])
        return [tuple(mask if mask is None else mask[..., rows, :] for mask in masks) for masks in self.masks]


def _rows_of(table_NX: Tensor, cells: Tensor) -> Tensor:
    """Rows [..., X] of a table."""
    return table_NX.index_select(0, cells.flatten()).view(*cells.shape, table_NX.shape[1])


# ---------------------------------------------------------------------------------------------- inside
@dataclasses.dataclass
class InsideChart:
    """Result of the inside pass.

    Fields:
        vector_ND: inside vectors; gradients reach the split weights.
        language_vector_ND: the same values, for the surrogate; their gradient skips the split weights if it is stopped
            there (the paper's "grad. stop", see `_Inside.backward`).
        height_N: expected height of the subtree (leaves 0).
        score_N: expected score of the splits (leaves 0).
        split_score_CM: score of every split of every inner cell (no gradient); unused columns are -inf.
    """

    vector_ND: Tensor
    language_vector_ND: Tensor
    height_N: Tensor
    score_N: Tensor
    split_score_CM: Tensor


@torch.compiler.disable  # only the functions of a level are compiled
def inside(
    plan: ChartPlan,
    leaf_ND: Tensor,
    composition: GPSTComposition,
    *,
    temperature: float = 1.0,
    hard: bool = False,
    accumulate_scores: bool = False,
    stop_structure_gradient: bool = True,
    normalize_mixture: bool = True,
) -> InsideChart:
    """Fill the pruned charts bottom-up, from the vectors [num_leaves, D] of the tokens.

    s_m = phi(l_m, r_m) [+ s(l_m) + s(r_m)];  w = softmax(s / temperature)
    e = LN(sum_m w_m f(l_m, r_m));  h = sum_m w_m (max(h(l_m), h(r_m)) + 1);  s = sum_m w_m s_m
    with LN a layer norm without parameters.

    `hard`: one-hot weights in the forward pass, softmax gradients in backward. `accumulate_scores` adds the children's
    scores (paper; the authors' code scores each split alone). `stop_structure_gradient` cuts the gradient of
    `language_vector_ND` at the split weights. `normalize_mixture=False`, without the outer LN, is for charts of given
    trees (one split per cell): their vectors are those of left-to-right composition, which normalizes once.

    Under autocast all is computed in its type, but scores, heights and sums of gradients.

    Cost: one batch of compositions per level; O(W n) compositions, about log n levels for random orders. One `backward`
    over losses on both vector fields: a pass for both gradients together.
    Source: GPST section 3.2 and appendix A.1; `model/r2d2_insideoutside.py`. Spec: tests/reference/inside_outside.py.
    """
    options = {
        "temperature": 1.0 if hard else temperature,
        "hard": hard,
        "accumulate": accumulate_scores,
        "stop_structure_gradient": stop_structure_gradient,
        "normalize": normalize_mixture,
    }
    run = _Run(plan, composition, [leaf_ND], options)
    vector, language, height, score = _Inside.apply(run, leaf_ND, *run.flat)
    return InsideChart(vector, language, height, score, run.notes["split_score_CM"])


def _inside_level(
    model: GPSTComposition,
    options: dict[str, Any],
    maps: Maps,
    masks: list[Masks],
    children_2CM: Tensor,
    vector_ND: Tensor,
    value_N2: Tensor,
) -> tuple[tuple[Tensor, Tensor, Tensor], tuple]:
    """Vectors [C, D], heights and scores [C, 2] of the cells of a level, scores [C, M] of their splits.

    Also what `_inside_gradient` needs.
    """
    pair = _rows_of(vector_ND, children_2CM).flatten(1, 2)
    child_height, child_score = _rows_of(value_N2, children_2CM).unbind(-1)
    split_score, kept_score = model.score_splits(maps, pair)
    split_score = split_score.view(children_2CM.shape[1:])
    if options["accumulate"]:
        split_score = split_score + child_score.sum(0)
    vector_RD, kept_vector = model.compose(maps, pair, masks)
    vector = vector_RD.unflatten(0, split_score.shape)
    soft = F.softmax(split_score / options["temperature"], -1)
    weight = F.one_hot(soft.argmax(-1), soft.shape[1]).to(soft.dtype) if options["hard"] else soft
    share = weight.to(vector.dtype)
    mixed = (share[..., None] * vector).sum(1)
    highest = child_height.amax(0)
    values = stack_two(highest + 1, split_score, -3)
    value = (weight * values).sum(-1).T
    norm = None
    if options["normalize"]:
        mixed, norm = layer_norm(mixed)
    kept = (kept_score, kept_vector, vector_RD, soft, weight, share, norm, values, child_height == highest)
    return (mixed, value, split_score), kept


def _inside_gradient(
    model: GPSTComposition,
    options: dict[str, Any],
    maps: Maps,
    kept: tuple,
    gradient_KCD: Tensor,
    by_value_2C: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor, Rows]:
    """Gradients of the children's vectors, K times [2, R, D], and of their heights [2, C, M].

    Also that of the scores [C, M] of splits, to which those of the children's scores are equal if they accumulate, and
    rows for the weight gradients. Only the first channel reaches the split weights.
    """
    kept_score, kept_vector, vector, soft, weight, share, norm, values, highest = kept
    vector = vector.unflatten(0, soft.shape)
    gradient = gradient_KCD.to(vector.dtype)
    if norm is not None:
        gradient = layer_norm_backward(gradient, norm)
    by_value = by_value_2C[..., None]
    by_weight = (vector * gradient[0][:, None]).sum(-1) + (values * by_value).sum(0)
    by_score = torch.ops.aten._softmax_backward_data(by_weight, soft, -1, soft.dtype) / options["temperature"]
    by_height, by_mean = weight * by_value
    by_score = by_score + by_mean
    by_height = highest * (by_height / highest.sum(0))  # equally high children share the gradient
    by_vector = (share[..., None] * gradient[:, :, None]).flatten(1, 2)
    rows: Rows = {}
    first, *others = model.compose_backward(maps, kept_vector, by_vector, rows)
    first = model.score_backward(maps, kept_score, by_score.flatten(), rows, first)
    return [first, *others], by_height, by_score, rows


def _inside_values(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _inside_level(*inputs)[0]


def _inside_again(
    model: GPSTComposition, options: dict[str, Any], maps: Maps, level: tuple, *gradients: Tensor
) -> tuple[list[Tensor], Tensor, Tensor, Rows]:
    return _inside_gradient(model, options, maps, _inside_level(model, options, maps, *level)[1], *gradients)


class _Inside(torch.autograd.Function):
    """The inside pass as one node of the autograd graph."""

    @staticmethod
    def forward(ctx, run, leaf_ND, *flat):
        plan, first_inner = run.plan, run.plan.num_leaves
        dtype = run.begin(leaf_ND, flat)
        vector_ND = leaf_ND.new_empty(plan.num_cells, leaf_ND.shape[1], dtype=dtype)
        vector_ND[:first_inner] = leaf_ND
        value_N2 = leaf_ND.new_zeros(plan.num_cells, 2, dtype=torch.promote_types(dtype, torch.float32))
        split_score_CM = value_N2.new_full(plan.left_CM.shape, -torch.inf)
        fixed, saved = (run.model, run.options, run.maps), []
        with torch.autocast(leaf_ND.device.type, enabled=False):
            for level, (first, last, width) in enumerate(plan.levels):
                inputs = (run.level_masks(level), plan.level_children(level), vector_ND, value_N2)
                if run.train and not run.again:
                    outputs, kept = run.call(_inside_level, *inputs, fixed=fixed)
                else:
                    outputs, kept = run.call(_inside_values, *inputs, fixed=fixed), inputs
                cells = slice(first_inner + first, first_inner + last)
                vector_ND[cells], value_N2[cells], split_score_CM[first:last, :width] = outputs
                saved.append(kept)
        ctx.run, ctx.saved = run, saved if run.train else []
        run.notes["split_score_CM"] = split_score_CM
        vector_ND = vector_ND.to(leaf_ND.dtype)
        # Backward may compute levels again from this table, so what the caller gets is a copy of it.
        return vector_ND.clone(), vector_ND.clone(), value_N2[:, 0].clone(), value_N2[:, 1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_vector, grad_language, grad_height, grad_score):
        run = ctx.run
        run.begin_backward()
        plan, weights = run.plan, WeightGradients(run.maps)
        stop = run.options["stop_structure_gradient"]
        gradient = torch.stack([grad_vector, grad_language]) if stop else (grad_vector + grad_language)[None]
        by_value = torch.stack([grad_height, grad_score])
        function, fixed = _inside_again if run.again else _inside_gradient, (run.model, run.options, run.maps)
        with torch.autocast(grad_vector.device.type, enabled=False):
            for level in reversed(range(len(plan.levels))):
                first, last, _ = plan.levels[level]
                cells = slice(plan.num_leaves + first, plan.num_leaves + last)
                inputs = ctx.saved.pop(), gradient[:, cells], by_value[:, cells]
                by_pair, by_height, by_score, rows = run.call(function, *inputs, fixed=fixed)
                children = plan.level_children(level).flatten()
                for channel, part in zip(gradient, by_pair, strict=True):
                    channel.index_add_(0, children, part.flatten(0, 1).to(gradient.dtype))
                by_value[0].index_add_(0, children, by_height.flatten())
                if run.options["accumulate"]:
                    by_value[1].index_add_(0, children, by_score.expand_as(by_height).flatten())
                weights.add(rows)
        return None, gradient[:, : plan.num_leaves].sum(0), *weights.results()


# ---------------------------------------------------------------------------------------------- outside
@torch.compiler.disable
def outside(
    plan: ChartPlan,
    inside_chart: InsideChart,
    root_D: Tensor,
    decomposition: GPSTDecomposition,
    *,
    accumulate_scores: bool = False,
    return_all: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Run the pruned charts top-down: the outside vectors [num_leaves, D] of the leaves.

    o(c) = sum over all (parent P, split, side) that use c of softmax(b) * g(o(P), e(sibling)), with scores
    b = psi(o(P), e(sibling)) [+ s(sibling) + b(P)] and b(c) the softmax mean of its messages' scores. `root_D` is the
    outside vector of every sentence root.

    With `return_all`, the dict holds `outside_ND` and `log_sum_exp_N` of all cells (no gradient; 0 for roots) and
    `message_score`; otherwise it is empty.

    Cost: two messages per composition, one batch per level; each cell combines its messages once (pull form).
    Source: GPST appendix A.1; `model/r2d2_insideoutside.py` (which keeps a running softmax instead).
    """
    feature_NF = decomposition.cell_features(inside_chart.vector_ND)
    inputs = [feature_NF, inside_chart.score_N, root_D, decomposition.sibling_bias()]
    run = _Run(plan, decomposition, inputs, {"accumulate": accumulate_scores})
    leaf_ND, outside_ND, message_score = _Outside.apply(run, *inputs, *run.flat)
    leaf_ND = leaf_ND.to(root_D.dtype)  # sums of messages are in float32, heads in the type of the weights
    if not return_all:
        return leaf_ND, {}
    log_sum_exp_N = _log_sum_exp(message_score, plan.message_receivers(), plan.num_cells)
    return leaf_ND, {"outside_ND": outside_ND, "log_sum_exp_N": log_sum_exp_N, "message_score": message_score}


def _log_sum_exp(score_P: Tensor, cell_P: Tensor, num_cells: int) -> Tensor:
    """Log sum exp [num_cells] of the scores of the messages that each cell has received; 0 for none."""
    largest = score_P.new_full((num_cells,), -torch.inf).scatter_reduce(0, cell_P, score_P, "amax")
    total = score_P.new_zeros(num_cells).index_add(0, cell_P, (score_P - largest[cell_P]).exp())
    return torch.where(total > 0, largest + total.log(), 0)


def _combine(
    message_score: Tensor, message_vector: Tensor, number_P: Tensor, cell_P: Tensor, zero_C: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax weights of numbered messages among those to the same cell, and the weighted vectors [P, D]."""
    score_P, vector_PD = message_score[number_P], message_vector[number_P]
    largest = zero_C.scatter_reduce(0, cell_P, score_P, "amax", include_self=False)
    weight = (score_P - largest[cell_P]).exp()
    total = zero_C.index_add(0, cell_P, weight)
    weight = weight / total[cell_P]
    return weight, weight[:, None] * vector_PD


def _combine_gradient(
    weight_P: Tensor,
    message_score: Tensor,
    message_vector: Tensor,
    number_P: Tensor,
    cell_P: Tensor,
    by_vector_CD: Tensor,
    by_mean_C: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of the scores and vectors [P, D] of messages, from those of sums and, if they count, mean scores."""
    score_P, vector_PD = message_score[number_P], message_vector[number_P]
    by_sum = by_vector_CD[cell_P]
    by_weight = (vector_PD * by_sum).sum(-1)
    if by_mean_C is not None:
        by_mean = by_mean_C[cell_P]
        by_weight = by_weight + by_mean * score_P
    weighted = weight_P * by_weight
    total = weighted.new_zeros(len(by_vector_CD)).index_add(0, cell_P, weighted)
    by_score = weighted - weight_P * total[cell_P]
    return by_score if by_mean_C is None else by_score + weight_P * by_mean, weight_P[:, None] * by_sum


def _outside_level(
    model: GPSTDecomposition,
    maps: Maps,
    sibling_bias: Tensor,
    masks: list[Masks],
    children_2CM: Tensor,
    feature_NF: Tensor,
    parent_CD: Tensor,
) -> tuple[tuple[Tensor, Tensor], tuple]:
    """Scores [2, C, M] and vectors [2 C M, D] of the messages of a level; what `_outside_gradient` needs."""
    sibling = _rows_of(feature_NF, children_2CM)
    score, vector, kept = model.messages(maps, sibling_bias, parent_CD, sibling, masks)
    return (score, vector), kept


def _outside_gradient(
    model: GPSTDecomposition, maps: Maps, sibling_bias: Tensor, kept: tuple, by_score: Tensor, by_vector: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Rows]:
    """Gradients by `GPSTDecomposition.messages_backward`, and rows for the weight gradients."""
    rows: Rows = {}
    return *model.messages_backward(maps, kept, by_score, by_vector, rows), rows


def _outside_values(*inputs: Any) -> tuple[Tensor, Tensor]:
    return _outside_level(*inputs)[0]


def _outside_again(
    model: GPSTDecomposition, maps: Maps, sibling_bias: Tensor, level: tuple, *gradients: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Rows]:
    _, kept = _outside_level(model, maps, sibling_bias, *level)
    return _outside_gradient(model, maps, sibling_bias, kept, *gradients)


class _Outside(torch.autograd.Function):
    """The outside pass as one node of the autograd graph.

    Each cell combines its messages into its vector, and with accumulated scores into their mean, before it sends its
    own.
    """

    @staticmethod
    def forward(ctx, run, feature_NF, inside_score_N, root_D, sibling_bias, *flat):
        plan, first_inner, accumulate = run.plan, run.plan.num_leaves, run.options["accumulate"]
        dtype = run.begin(feature_NF, flat)
        table = functools.partial(feature_NF.new_zeros, dtype=torch.promote_types(dtype, torch.float32))
        vector_ND, mean_N, zero_N = table(plan.num_cells, len(root_D)), table(plan.num_cells), table(plan.num_cells)
        vector_ND[plan.root_S] = root_D.to(vector_ND.dtype)
        message_score = table(plan.first_message(len(plan.levels)))
        message_vector = feature_NF.new_empty(len(message_score), len(root_D))
        fixed, saved = (run.model, run.maps, sibling_bias.detach().to(dtype)), []

        def combine(part: int) -> None:
            numbers, cells, first, last = plan.received(part)
            if len(numbers):
                inputs = message_score, message_vector, numbers, cells, zero_N[: last - first]
                weight, weighted = run.call(_combine, *inputs)
                vector_ND[first:last].index_add_(0, cells, weighted)
                if accumulate:
                    mean_N[first:last].index_add_(0, cells, weight * message_score[numbers])
                saved.append(weight)

        with torch.autocast(feature_NF.device.type, enabled=False):
            for level in reversed(range(len(plan.levels))):
                first, last, _ = plan.levels[level]
                combine(level + 1)
                parents, children = slice(first_inner + first, first_inner + last), plan.level_children(level)
                inputs = (run.level_masks(level), children, feature_NF, vector_ND[parents].to(feature_NF.dtype))
                if run.train and not run.again:
                    (score, vector), kept = run.call(_outside_level, *inputs, fixed=fixed)
                else:
                    (score, vector), kept = run.call(_outside_values, *inputs, fixed=fixed), inputs
                if accumulate:
                    score = score + inside_score_N[children] + mean_N[parents, None]
                messages = slice(plan.first_message(level), plan.first_message(level + 1))
                message_score[messages], message_vector[messages] = score.flatten(), vector
                saved.append(kept)
            combine(0)
        ctx.run, ctx.saved = run, saved if run.train else []
        ctx.messages, ctx.fixed, ctx.feature_shape = (message_score, message_vector), fixed, feature_NF.shape
        ctx.mark_non_differentiable(vector_ND, message_score)
        return vector_ND[:first_inner].clone(), vector_ND, message_score

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_leaf, *_):
        run = ctx.run
        run.begin_backward()
        plan, weights, accumulate = run.plan, WeightGradients(run.maps), run.options["accumulate"]
        message_score, message_vector = ctx.messages
        num_cells, num_features = ctx.feature_shape
        size = grad_leaf.shape[1]
        by_vector, by_mean = grad_leaf.new_zeros(num_cells, size), grad_leaf.new_zeros(num_cells)
        by_vector[: plan.num_leaves] = grad_leaf
        by_inside_score, by_biases = torch.zeros_like(by_mean), [torch.zeros_like(ctx.fixed[-1], dtype=grad_leaf.dtype)]
        by_feature = grad_leaf.new_zeros(num_cells, num_features)
        by_message_score, by_message_vector = torch.empty_like(message_score), grad_leaf.new_empty(message_vector.shape)
        function = _outside_again if run.again else _outside_gradient

        def combine(part: int) -> None:
            numbers, cells, first, last = plan.received(part)
            if len(numbers):
                inputs = ctx.saved.pop(), message_score, message_vector, numbers, cells
                by_means = by_mean[first:last] if accumulate else None
                found = run.call(_combine_gradient, *inputs, by_vector[first:last], by_means)
                by_message_score[numbers], by_message_vector[numbers] = found

        with torch.autocast(grad_leaf.device.type, enabled=False):
            combine(0)
            for level, (first, last, _) in enumerate(plan.levels):
                children = plan.level_children(level)
                messages = slice(plan.first_message(level), plan.first_message(level + 1))
                by_score = by_message_score[messages].view(children.shape)
                parents = slice(plan.num_leaves + first, plan.num_leaves + last)
                if accumulate:
                    by_inside_score.index_add_(0, children.flatten(), by_score.flatten())
                    by_mean[parents] += by_score.sum((0, 2))
                gradients = by_score, by_message_vector[messages].to(message_vector.dtype)
                found = run.call(function, ctx.saved.pop(), *gradients, fixed=ctx.fixed)
                bias, parent, sibling, own_score, rows = found
                by_biases.append(bias)
                by_vector[parents] += parent
                sibling = sibling.flatten(0, 2).to(by_feature.dtype)
                by_feature[:, : sibling.shape[1]].index_add_(0, children.flatten(), sibling)
                scores = by_feature[:, sibling.shape[1] :].chunk(2, -1)
                for side, part in zip(scores, own_score.flatten(1, 2).to(by_feature.dtype), strict=True):
                    side.index_add_(0, children[0 if side is scores[0] else 1].flatten(), part)
                weights.add(rows)
                combine(level + 1)
        by_root, by_bias = by_vector[plan.root_S].sum(0), torch.stack(by_biases).sum(0)
        return None, by_feature, by_inside_score, by_root, by_bias, *weights.results()
