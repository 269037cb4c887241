"""Inside and outside passes over pruned charts, batched by level over all sentences of a batch.

`inside` fills the charts of a plan (`models/gpst/chart.py`) bottom-up, `outside` runs them top-down. The caller passes
the composition function as an object. Each pass is one node of the autograd graph. In it every level has a small
graph, and the weight gradients of all levels are computed together. The slow and obvious versions are `naive_inside`
and `naive_outside` in tests/reference/inside_outside.py.

Shapes: N cells (leaves first, then level by level), C cells of a level, M splits of a cell, R rows of a batch of
pairs, D width of a cell vector, F width of a feature row.

Papers: Hu et al. 2024a (ReCAT), Hu et al. 2024b (GPST, section 3.2 and appendix A.1).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.models.gpst.chart import ChartPlan
from hf_synlm.models.gpst.composition import GPSTComposition, GPSTDecomposition

# Rows of deferred weight gradients that are collected before they are multiplied: enough for efficient GEMMs, but a
# small part of the memory.
_DEFERRED_ROWS = 1 << 15
# Calls with fewer rows are joined before they are multiplied; joining large ones would copy more than it saves.
_SMALL_CALL = 256


# ---------------------------------------------------------------------------------------------- weight gradients
class WeightGradients:
    """Linear maps of a level loop whose weight gradients are computed once for the whole chart.

    A chart calls the same few weights once per level, often with a handful of rows. In backward each call only passes
    the gradient to its input; its rows are collected here and multiplied out in a few large GEMMs. The gradient of a
    weight is linear in the gradient of the output, so two gradient channels of one call are added before the GEMM.
    GEMMs run in `dtype`, results have the type of the input. A bias with leading dimensions is added by position: [P,
    out] to inputs [..., P, in].
    """

    def __init__(self, tensors: dict[str, tuple[Tensor, Tensor | None]], train: bool, dtype: torch.dtype):
        self.tensors = {
            name: (weight.detach().to(dtype), None if bias is None else bias.detach().to(dtype))
            for name, (weight, bias) in tensors.items()
        }
        self.train = train
        self.calls: dict[str, list[list[Tensor]]] = {name: [] for name in tensors}
        self.rows = dict.fromkeys(tensors, 0)
        self.sums: dict[str, tuple[Tensor, Tensor | None]] = {}

    def linear(self, name: str, inputs: Tensor) -> Tensor:
        """Apply the named map to `inputs` [..., in]."""
        weight, bias = self.tensors[name]
        if self.train:
            return _DeferredLinear.apply(inputs, self, name)
        output = F.linear(inputs.to(weight.dtype), weight)
        return (output if bias is None else output + bias).to(inputs.dtype)

    def flush(self, name: str) -> None:
        """Multiply the collected rows of one map: large calls one by one, small ones joined."""
        calls, self.calls[name], self.rows[name] = self.calls[name], [], 0
        weight, bias = self.tensors[name]
        shape = weight.shape[:1] if bias is None else bias.shape
        pairs = [(inputs.reshape(-1, weight.shape[1]), gradient.reshape(-1, *shape)) for inputs, gradient in calls]
        small = [pair for pair in pairs if len(pair[0]) < _SMALL_CALL]
        pairs = [pair for pair in pairs if len(pair[0]) >= _SMALL_CALL]
        if small:
            inputs, gradients = zip(*small, strict=True)
            pairs.append((torch.cat(inputs), torch.cat(gradients)))
        for inputs, gradient in pairs:
            flat = gradient.reshape(-1, weight.shape[0]).t()
            if name not in self.sums:  # sums are kept in float32 where GEMMs run in half precision
                dtype = torch.promote_types(weight.dtype, torch.float32)
                bias_sum = None if bias is None else gradient.sum(0, dtype=dtype)
                self.sums[name] = ((flat @ inputs).to(dtype), bias_sum)
                continue
            weight_sum, bias_sum = self.sums[name]
            if weight_sum.dtype == flat.dtype:
                weight_sum.addmm_(flat, inputs)
            else:
                weight_sum += flat @ inputs
            if bias_sum is not None:
                bias_sum += gradient.sum(0, dtype=bias_sum.dtype)

    def end_level(self) -> None:
        """Multiply the rows of maps that have collected many; call it only between levels."""
        for name, rows in self.rows.items():
            if rows >= _DEFERRED_ROWS:
                self.flush(name)

    def results(self) -> list[Tensor]:
        """Gradients of weight and bias of every map, in the order of `tensors`.

        A map that no cell used gets zeros, so that every parameter always has a gradient.
        """
        gradients: list[Tensor] = []
        for name, (weight, bias) in self.tensors.items():
            self.flush(name)
            if name not in self.sums:
                self.sums[name] = (torch.zeros_like(weight), None if bias is None else torch.zeros_like(bias))
            weight_sum, bias_sum = self.sums[name]
            gradients.append(weight_sum)
            if bias is not None:
                gradients.append(bias_sum)
        return gradients


class _DeferredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, gradients, name):
        weight, bias = gradients.tensors[name]
        ctx.gradients, ctx.name, ctx.entry = gradients, name, None
        cast = inputs.to(weight.dtype)
        ctx.save_for_backward(cast)
        output = F.linear(cast, weight) if bias is None or bias.dim() > 1 else F.linear(cast, weight, bias)
        if bias is not None and bias.dim() > 1:
            output = output + bias
        return output.to(inputs.dtype)

    @staticmethod
    def backward(ctx, gradient):
        gradients, name = ctx.gradients, ctx.name
        weight, _ = gradients.tensors[name]
        cast = gradient.to(weight.dtype)
        if ctx.entry is None:
            (inputs,) = ctx.saved_tensors
            ctx.entry = [inputs, cast]
            gradients.calls[name].append(ctx.entry)
            gradients.rows[name] += inputs.numel() // inputs.shape[-1]
        else:  # the second gradient channel of the same call
            ctx.entry[1] = ctx.entry[1] + cast
        return (cast @ weight).to(gradient.dtype), None, None


class _SplitMixture(torch.autograd.Function):
    """sum_m w_m v_m over the splits of a cell, with a switch that cuts the gradient of the weights.

    The switch (`channel["structure"]`) tells the two backward calls of a level apart: the auto-regressive losses do
    not reach the split weights (GPST section 3.2), the auto-encoding loss does.
    """

    @staticmethod
    def forward(ctx, weight_CM, vector_CMD, channel):
        ctx.save_for_backward(weight_CM, vector_CMD)
        ctx.channel = channel
        return torch.einsum("cm,cmd->cd", weight_CM, vector_CMD)

    @staticmethod
    def backward(ctx, gradient_CD):
        weight_CM, vector_CMD = ctx.saved_tensors
        weight_gradient = (vector_CMD * gradient_CD[:, None]).sum(-1) if ctx.channel["structure"] else None
        return weight_gradient, weight_CM[..., None] * gradient_CD[:, None], None


# ---------------------------------------------------------------------------------------------- inside
Linear = Callable[[str, Tensor], Tensor]


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


@dataclasses.dataclass
class _Run:
    """What forward and backward of the level loops share (nothing here is differentiable)."""

    plan: ChartPlan
    model: Any
    names: tuple[str, ...]
    has_bias: tuple[bool, ...]
    train: bool
    options: dict[str, Any]
    channel: dict[str, bool] = dataclasses.field(default_factory=lambda: {"structure": True})
    notes: dict[str, Any] = dataclasses.field(default_factory=dict)
    consumed: bool = False

    def begin_backward(self) -> None:
        """Refuse a second backward call: the graphs of the levels are freed one by one."""
        if self.consumed:
            raise RuntimeError(
                "backward ran through this chart already. Its graph is freed level by level, even with "
                "retain_graph=True: add the losses before one backward call, or call forward again."
            )
        self.consumed = True

    def weights(self, tensors: Sequence[Tensor], like: Tensor) -> WeightGradients:
        """Give the flat parameter list its names back, in the type in which GEMMs run here."""
        device = like.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
        flat, named = iter(tensors), {}
        for name, has_bias in zip(self.names, self.has_bias, strict=True):
            named[name] = (next(flat), next(flat) if has_bias else None)
        return WeightGradients(named, self.train, dtype)


def _flatten(tensors: dict[str, tuple[Tensor, Tensor | None]]) -> tuple[tuple, tuple, list[Tensor]]:
    flat = [tensor for pair in tensors.values() for tensor in pair if tensor is not None]
    return tuple(tensors), tuple(bias is not None for _, bias in tensors.values()), flat


@torch.compiler.disable  # dynamo would bake in one state of the gradient switch
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

    Cost: one batch of compositions per level; O(W n) compositions, about log n levels for random orders. One `backward`
    over losses on both vector fields: two passes of input gradients and one of weight gradients.
    Source: GPST section 3.2 and appendix A.1; `model/r2d2_insideoutside.py`. Spec: tests/reference/inside_outside.py.
    """
    names, has_bias, flat = _flatten(composition.chart_tensors())
    train = torch.is_grad_enabled() and (leaf_ND.requires_grad or any(tensor.requires_grad for tensor in flat))
    options = {
        "temperature": temperature,
        "hard": hard,
        "accumulate": accumulate_scores,
        "stop_structure_gradient": stop_structure_gradient,
        "normalize": normalize_mixture,
    }
    run = _Run(plan, composition, names, has_bias, train, options)
    vector, language, height, score = _Inside.apply(run, leaf_ND, *flat)
    return InsideChart(vector, language, height, score, run.notes["split_score_CM"])


def _split_weights(score_CM: Tensor, options: dict[str, Any]) -> Tensor:
    if score_CM.shape[1] == 1:
        return torch.ones_like(score_CM)
    if not options["hard"]:
        return F.softmax(score_CM / options["temperature"], -1)
    soft = F.softmax(score_CM, -1)
    return (F.one_hot(soft.argmax(-1), soft.shape[1]).to(soft.dtype) - soft).detach() + soft


def _inside_level(run: _Run, linear: Linear, child_CM2D: Tensor, height_CM2: Tensor, score_CM2: Tensor) -> tuple:
    num_cells, width, _, size = child_CM2D.shape
    pair = child_CM2D.reshape(num_cells * width, 2, size)
    split_score = run.model.score_splits(linear, pair[:, 0], pair[:, 1]).view(num_cells, width)
    if run.options["accumulate"]:
        split_score = split_score + score_CM2.sum(-1)
    vector = run.model.compose(linear, pair).view(num_cells, width, size)
    weight = _split_weights(split_score, run.options)
    mixed = vector[:, 0] if width == 1 else _SplitMixture.apply(weight, vector, run.channel)
    height = (weight * (height_CM2.amax(-1) + 1)).sum(-1)
    if run.options["normalize"]:
        mixed = F.layer_norm(mixed, (size,))
    return mixed, height, (weight * split_score).sum(-1), split_score


class _Inside(torch.autograd.Function):
    """The inside pass as one node of the autograd graph: per-level graphs inside, one buffer per direction."""

    @staticmethod
    def forward(ctx, run, leaf_ND, *tensors):
        plan, first_inner = run.plan, run.plan.num_leaves
        weights = run.weights(tensors, leaf_ND)
        vector_ND = leaf_ND.new_empty(plan.num_cells, leaf_ND.shape[1])
        vector_ND[:first_inner] = leaf_ND
        height_N, score_N = leaf_ND.new_zeros(plan.num_cells), leaf_ND.new_zeros(plan.num_cells)
        split_score_CM = leaf_ND.new_full(plan.left_CM.shape, -torch.inf)
        saved = []
        with torch.autocast(leaf_ND.device.type, enabled=False), torch.set_grad_enabled(run.train):
            for level, (first, last, width) in enumerate(plan.levels):
                children = plan.level_children(level)
                inputs = [table[children].requires_grad_(run.train) for table in (vector_ND, height_N, score_N)]
                vector, height, score, split_score = _inside_level(run, weights.linear, *inputs)
                cells = slice(first_inner + first, first_inner + last)
                vector_ND[cells], height_N[cells] = vector.detach(), height.detach()
                score_N[cells], split_score_CM[first:last, :width] = score.detach(), split_score.detach()
                if run.train:
                    saved.append((cells, children, inputs, (vector, height, score)))
        ctx.run, ctx.saved, ctx.weights = run, saved, weights
        run.notes["split_score_CM"] = split_score_CM
        return vector_ND, vector_ND.clone() if run.train else vector_ND.view_as(vector_ND), height_N, score_N

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_vector, grad_language, grad_height, grad_score):
        ctx.run.begin_backward()
        run, weights, size = ctx.run, ctx.weights, grad_vector.shape[1]
        stop_gradient = run.options["stop_structure_gradient"]
        main = grad_vector.clone() if stop_gradient else grad_vector + grad_language
        language = grad_language.clone() if stop_gradient else None
        height, score = grad_height.clone(), grad_score.clone()
        while ctx.saved:
            cells, children, inputs, outputs = ctx.saved.pop()
            run.channel["structure"] = True
            vector_in, height_in, score_in = torch.autograd.grad(
                outputs,
                inputs,
                [main[cells], height[cells], score[cells]],
                retain_graph=stop_gradient,
                allow_unused=True,
            )
            flat = children.flatten()
            main.index_add_(0, flat, vector_in.view(-1, size))
            height.index_add_(0, flat, height_in.view(-1))
            if score_in is not None:
                score.index_add_(0, flat, score_in.reshape(-1))
            if stop_gradient:
                run.channel["structure"] = False
                (language_in,) = torch.autograd.grad(outputs[0], inputs[:1], language[cells])
                language.index_add_(0, flat, language_in.view(-1, size))
            weights.end_level()
        leaf = main[: run.plan.num_leaves]
        if stop_gradient:
            leaf = leaf + language[: run.plan.num_leaves]
        return None, leaf, *weights.results()


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
    names, has_bias, flat = _flatten(decomposition.chart_tensors())
    feature_NF = decomposition.cell_features(inside_chart.vector_ND)
    inputs = [feature_NF, inside_chart.score_N, root_D, decomposition.position_bias(), *flat]
    train = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    run = _Run(plan, decomposition, names, has_bias, train, {"accumulate": accumulate_scores, "all": return_all})
    leaf_ND = _Outside.apply(run, *inputs)
    return leaf_ND, run.notes


def _combine(score: Tensor, message: Tensor, cell: Tensor, num_cells: int) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax-weighted sum of the messages of each cell, log sum exp and softmax mean of their scores."""
    largest = score.new_full((num_cells,), -torch.inf).scatter_reduce(0, cell, score.detach(), "amax")
    weight = (score - largest[cell]).exp()
    total = weight.new_zeros(num_cells).index_add(0, cell, weight)
    weight = weight / total[cell]
    vector = message.new_zeros(num_cells, message.shape[1]).index_add(0, cell, message * weight[:, None])
    mean = score.new_zeros(num_cells).index_add(0, cell, weight * score)
    return vector, mean, (largest + total.log()).detach()


class _Combined(NamedTuple):
    """Cells that have combined the messages they received.

    Fields:
        numbers: Messages, sorted by receiving cell.
        inputs: Scores and vectors of the messages.
        outputs: Outside vectors and scores of the cells.
    """

    cells: slice
    numbers: Tensor
    inputs: list[Tensor]
    outputs: tuple[Tensor, Tensor]


class _Sent(NamedTuple):
    """Messages that the cells of a level have sent.

    Fields:
        inputs: Outside vectors of the cells, features and inside scores of the siblings, outside scores of the cells.
        outputs: Scores and vectors of the messages.
    """

    cells: slice
    sibling: Tensor
    level: int
    inputs: list[Tensor]
    outputs: tuple[Tensor, Tensor]


class _OutsideTables:
    """What the outside pass fills: one row per cell, and the messages."""

    def __init__(self, plan: ChartPlan, like: Tensor, root_D: Tensor):
        self.plan = plan
        self.vector_ND = like.new_zeros(plan.num_cells, root_D.shape[0])
        self.score_N, self.log_sum_exp_N = like.new_zeros(plan.num_cells), like.new_zeros(plan.num_cells)
        self.vector_ND[plan.root_S] = root_D
        self.messages = _Messages(plan, like, root_D.shape[0])

    def combine(self, first: int, last: int, part: int, train: bool) -> list[_Combined]:
        """Combine the messages that the cells first .. last - 1 (ids) have received; what backward needs of that."""
        begin, end = self.messages.bounds(part)
        if begin == end:
            return []
        numbers, cell = self.plan.message_order[begin:end], self.plan.message_child[begin:end] - first
        inputs = [table[numbers].requires_grad_(train) for table in (self.messages.score, self.messages.vector)]
        vector, score, log_sum_exp = _combine(inputs[0], inputs[1], cell, last - first)
        received = torch.zeros(last - first, dtype=torch.bool, device=cell.device).index_fill_(0, cell, True)
        self._write(self.vector_ND[first:last], vector, received[:, None])
        self._write(self.score_N[first:last], score, received)
        self._write(self.log_sum_exp_N[first:last], log_sum_exp, received)
        return [_Combined(slice(first, last), numbers, inputs, (vector, score))] if train else []

    @staticmethod
    def _write(rows: Tensor, values: Tensor, where: Tensor) -> None:
        rows.copy_(torch.where(where, values.detach(), rows))


class _Outside(torch.autograd.Function):
    """The outside pass as one node of the autograd graph."""

    @staticmethod
    def forward(ctx, run, feature_NF, inside_score_N, root_D, bias, *tensors):
        plan, num_leaves = run.plan, run.plan.num_leaves
        weights, tables = run.weights(tensors, feature_NF), _OutsideTables(run.plan, feature_NF, root_D)
        saved: list[_Combined | _Sent] = []
        with torch.autocast(feature_NF.device.type, enabled=False), torch.set_grad_enabled(run.train):
            bias = bias.detach().requires_grad_(run.train)
            for level in reversed(range(len(plan.levels))):
                first, last = num_leaves + plan.levels[level][0], num_leaves + plan.levels[level][1]
                saved += tables.combine(first, last, level + 1, run.train)
                cells, sibling = slice(first, last), plan.level_children(level).flip(-1)
                inputs = [
                    tables.vector_ND[cells].clone().requires_grad_(run.train),
                    feature_NF[sibling].requires_grad_(run.train),
                    inside_score_N[sibling].requires_grad_(run.train),
                    tables.score_N[cells].clone().requires_grad_(run.train),
                ]
                outputs = _outside_level(run, weights.linear, bias, *inputs)
                tables.messages.put(level, *outputs)
                if run.train:
                    saved.append(_Sent(cells, sibling, level, inputs, outputs))
            saved += tables.combine(0, num_leaves, 0, run.train)
        ctx.run, ctx.weights, ctx.bias, ctx.messages = run, weights, bias, tables.messages
        ctx.saved, ctx.shapes = saved, (feature_NF.shape, root_D.shape[0])
        if run.options["all"]:
            run.notes.update(
                outside_ND=tables.vector_ND, log_sum_exp_N=tables.log_sum_exp_N, message_score=tables.messages.score
            )
        return tables.vector_ND[:num_leaves].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_leaf):
        ctx.run.begin_backward()
        plan, messages = ctx.run.plan, ctx.messages
        (num_cells, num_features), size = ctx.shapes
        outside = grad_leaf.new_zeros(num_cells, size)
        outside[: plan.num_leaves] = grad_leaf
        score, inside_score = grad_leaf.new_zeros(num_cells), grad_leaf.new_zeros(num_cells)
        feature = grad_leaf.new_zeros(num_cells, num_features)
        bias = torch.zeros_like(ctx.bias)
        message_score, message_vector = torch.zeros_like(messages.score), torch.zeros_like(messages.vector)
        while ctx.saved:
            done = ctx.saved.pop()
            if isinstance(done, _Combined):
                outgoing = [outside[done.cells], score[done.cells]]
                score_in, vector_in = torch.autograd.grad(done.outputs, done.inputs, outgoing)
                message_score[done.numbers], message_vector[done.numbers] = score_in, vector_in
                continue
            numbers = messages.numbers(done.level)
            sent_score, sent_vector = done.outputs
            outgoing = [message_score[numbers].view_as(sent_score), message_vector[numbers].view_as(sent_vector)]
            gradients = torch.autograd.grad(done.outputs, [*done.inputs, ctx.bias], outgoing, allow_unused=True)
            vector_in, feature_in, inside_score_in, score_in, bias_in = gradients
            outside[done.cells] += vector_in
            feature.index_add_(0, done.sibling.flatten(), feature_in.view(-1, num_features))
            if inside_score_in is not None:
                inside_score.index_add_(0, done.sibling.flatten(), inside_score_in.reshape(-1))
                score[done.cells] += score_in
            bias += bias_in
            ctx.weights.end_level()
        return None, feature, inside_score, outside[plan.root_S].sum(0), bias, *ctx.weights.results()


def _outside_level(
    run: _Run,
    linear: Linear,
    bias: Tensor,
    parent_CD: Tensor,
    sibling_CM2F: Tensor,
    sibling_score: Tensor,
    score_C: Tensor,
) -> tuple[Tensor, Tensor]:
    score, vector = run.model.messages(linear, bias, parent_CD, sibling_CM2F)
    if run.options["accumulate"]:
        score = score + sibling_score + score_C[:, None, None]
    return score, vector


class _Messages:
    """Scores and vectors of all outside messages, numbered as in `ChartPlan.message_order`."""

    def __init__(self, plan: ChartPlan, like: Tensor, size: int):
        self.plan = plan
        self.starts = [0]
        for first, last, width in plan.levels:
            self.starts.append(self.starts[-1] + (last - first) * width * 2)
        self.score = like.new_zeros(self.starts[-1])
        self.vector = like.new_zeros(self.starts[-1], size)

    def numbers(self, level: int) -> slice:
        """Messages that the cells of a level send."""
        return slice(self.starts[level], self.starts[level + 1])

    def put(self, level: int, score: Tensor, vector: Tensor) -> None:
        """Store the messages of a level."""
        self.score[self.numbers(level)] = score.detach().flatten()
        self.vector[self.numbers(level)] = vector.detach().flatten(0, 2)

    def bounds(self, part: int) -> tuple[int, int]:
        """Positions in `message_order` of the messages to the leaves (part 0) or to a level (part level + 1)."""
        return (0, *self.plan.message_bounds)[part], self.plan.message_bounds[part]
