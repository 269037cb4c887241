# SPDX-License-Identifier: Apache-2.0
"""GPST's trees: the order of merges, the plan of the chart, the induced tree, and its nodes as inputs of the layers.

`GPSTModel.forward` takes these steps one after the other: `_plan`, `induce` (hard EM), `node_sequence`.

Shapes: B contexts, T tokens, P boundaries between tokens, A slots of the node sequence (slot 0 the beginning, slot
t + 1 node t), D hidden size.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm.models.gpst.chart import (
    ChartPlan,
    TreeNodes,
    best_splits,
    induced_trees,
    joined_boundaries,
    mbr_splits,
    plan_chart,
    plan_trees,
)
from hf_synlm.models.gpst.inside_outside import InsideChart, inside
from hf_synlm.models.gpst.objective import NodeSequence
from hf_synlm.models.gpst.tokens import ContextBatch
from hf_synlm.trees.actions import COMP, GEN

WHOLE_SENTENCE_METHODS = ("inside", "mbr", "merge_order")
# Windows of "mbr" beside that of training: F1 of the trees of three models rose up to three and fell from four on.
_MBR_WINDOWS = 3


class Induction(NamedTuple):
    """The trees of a batch."""

    leaf_ids: Tensor
    """[leaves] token ids."""
    leaf_embedding: Tensor
    """[leaves, D] token embeddings."""
    chart: InsideChart
    nodes: TreeNodes
    """Of the best trees."""


class TreeInduction:
    """Methods of `GPSTModel` that find trees and lay out their nodes."""

    @torch.no_grad()
    def whole_sentence_trees(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        word_ends: Tensor | None = None,
        *,
        method: str = "inside",
    ) -> list[list[tuple[int, int]]]:
        """Inner nodes per row, in input positions and post-order, of the tree of the inside pass.

        `method` is one of `WHOLE_SENTENCE_METHODS`. The chart of "merge_order" has window 1 and needs no inside pass.
        """
        text = ContextBatch.read(self.config, input_ids, attention_mask, None, word_ends)
        scores = self.parser(text.ids, text.sentence_ids)
        window = {"merge_order": 1, "mbr": _MBR_WINDOWS * self.config.window_size}.get(method, self.config.window_size)
        plan = plan_chart(self._merge_order(scores, text), text.sentence_ids, window).to(scores.device)
        if method == "merge_order":
            return text.list_spans(induced_trees(plan, plan.left_CM.new_zeros(len(plan.left_CM))))
        choose = mbr_splits if method == "mbr" else best_splits
        return text.list_spans(self.induce(text, plan, choose=choose).nodes)

    def _plan(
        self: Any,
        text: ContextBatch,
        scores: Tensor,
        merge_order: Tensor | None,
        spans: list[list[tuple[int, int]]] | None,
    ) -> ChartPlan:
        """Chart of the given trees, of a given merge order, or of the parser's."""
        if spans is not None:
            return self.plan_given(text, spans)
        if merge_order is None:
            order = self._merge_order(scores.detach(), text)
        else:
            order = text.words_first(text.align_order(merge_order))
        return plan_chart(order, text.sentence_ids, self.config.window_size).to(scores.device)

    def plan_given(self, text: ContextBatch, spans: list[list[tuple[int, int]]]) -> ChartPlan:
        """Chart of the given trees, in input positions."""
        if len(spans) != len(text.ids):
            raise ValueError(f"spans has {len(spans)} rows, but the batch has {len(text.ids)}. Give one list per row.")
        text.check_words(spans)
        shifts = text.shifts()
        moved = [[(i - shift, j - shift) for i, j in row] for row, shift in zip(spans, shifts, strict=True)]
        return plan_trees(moved, text.sentence_ids).to(text.ids.device)

    def induce(
        self: Any, text: ContextBatch, plan: ChartPlan, given: bool = False, choose: Callable = best_splits
    ) -> Induction:
        """The E step of GPST's hard EM: one tree per sentence, the best split of every span from the root down."""
        leaf = plan.context_N[: plan.num_leaves] * text.width + plan.start_N[: plan.num_leaves]
        leaf_ids = text.ids.flatten()[leaf]
        leaf_embedding = self.embed_tokens(text.ids).flatten(0, 1)[leaf]  # [B, T, D], as hooks of NEFTune expect it
        chart = inside(
            plan,
            self.down_scale(leaf_embedding).to(leaf_embedding.dtype),
            self.composition,
            temperature=self.config.split_temperature,
            hard=self.config.hard_inside,
            accumulate_scores=self.config.accumulate_scores,
            stop_structure_gradient=self.config.stop_structure_gradient,
            normalize_mixture=not given,
        )
        nodes = induced_trees(plan, choose(plan, chart.split_score_CM, text.word_index))
        return Induction(leaf_ids, leaf_embedding, chart, nodes)

    def _merge_order(self: Any, score_BP: Tensor, text: ContextBatch) -> Tensor:
        """Boundaries by ascending score; word-internal ones first, sentence borders and padding last."""
        if self.training and self.config.merge_noise > 0:
            uniform = torch.rand_like(score_BP).clamp_min(torch.finfo(score_BP.dtype).tiny)
            gumbel = -(-uniform.log()).clamp_min(torch.finfo(score_BP.dtype).tiny).log()
            score_BP = score_BP + self.config.merge_noise * gumbel
        if text.word_index is not None and score_BP.numel():
            within = text.word_index[:, 1:] == text.word_index[:, :-1]
            score_BP = score_BP - within * (score_BP.max() - score_BP.min() + 1)
        joined = joined_boundaries(text.sentence_ids)
        return score_BP.masked_fill(~joined, torch.inf).sort(dim=-1, stable=True).indices

    def node_sequence(self: Any, plan: ChartPlan, trees: Induction) -> NodeSequence:
        """Lay the nodes out as inputs of the type layers.

        Leaves enter as their token embedding, inner nodes as the up-scaled inside vector: the paper's "representation
        surrogate" of what left-to-right composition would give. Without the surrogate, inner nodes enter as the
        embedding of the reduce token. The position of a node is the number of tokens generated so far.
        """
        nodes, leaf_embedding = trees.nodes, trees.leaf_embedding
        num_leaves, device = plan.num_leaves, leaf_embedding.device
        num_contexts, num_tokens = plan.leaf_BT.shape
        num_slots = max(plan.nodes_B) + 1
        is_inner = nodes.cell_A >= num_leaves
        # The counts are known, so sorting separates leaves from inner nodes without a host sync.
        by_cell = torch.where(is_inner, num_leaves, nodes.cell_A).argsort(stable=True)
        leaf_node, inner_node = by_cell[:num_leaves], by_cell[num_leaves:]
        inner_embedding = self._inner_embedding(trees.chart, nodes.cell_A[inner_node]).to(leaf_embedding.dtype)
        sources = torch.cat([self.bos_embedding[None], leaf_embedding, inner_embedding])
        source_A = torch.empty_like(nodes.cell_A)
        source_A[by_cell] = torch.arange(1, len(source_A) + 1, device=device)
        slot_A = nodes.context_A * num_slots + nodes.position_A  # the slot before the node
        source, position = (slot_A.new_zeros(num_contexts * num_slots) for _ in range(2))
        source[slot_A + 1], position[slot_A + 1] = source_A, nodes.end_A
        target = slot_A.new_full((num_contexts * num_slots,), -1)
        target[slot_A] = torch.where(is_inner, COMP, GEN)
        last_B = torch.arange(num_contexts, device=device) * num_slots + plan.count_2B[1]
        target.index_fill_(0, last_B, GEN)
        row, column = plan.context_N[:num_leaves], plan.start_N[:num_leaves]
        token_slots = (torch.arange(num_contexts, device=device) * num_slots)[:, None].repeat(1, num_tokens + 1)
        token_slots[row, column] = slot_A[leaf_node]
        token_slots[torch.arange(num_contexts, device=device), plan.count_2B[0]] = last_B
        position = position.view(num_contexts, num_slots)
        inputs = sources.index_select(0, source).view(num_contexts, num_slots, -1) + self.position_embedding(position)
        return NodeSequence(inputs, target.view(num_contexts, num_slots), position, token_slots, row, column)

    def _inner_embedding(self: Any, chart: InsideChart, cells: Tensor) -> Tensor:
        """Inputs of the type layers at inner nodes: the surrogate, or the reduce token."""
        if self.config.surrogate:
            return self.up_scale(chart.language_vector_ND[cells])
        reduce_id = torch.tensor(self.config.reduce_token_id, device=cells.device)
        return self.embed_tokens(reduce_id).expand(len(cells), -1)


def chart_tensors(plan: ChartPlan, chart: InsideChart, notes: dict) -> dict:
    """Chart tensors by name, cells and compositions described by integers."""
    return {
        "context": plan.context_N,
        "start": plan.start_N,
        "end": plan.end_N,
        "num_leaves": plan.num_leaves,
        "levels": plan.levels,
        "root": plan.root_S,
        "left": plan.left_CM,
        "right": plan.right_CM,
        "split": plan.split_CM,
        "inside": chart.vector_ND,
        "height": chart.height_N,
        "score": chart.score_N,
        "split_score": chart.split_score_CM,
        "outside": notes["outside_ND"],
        "outside_log_sum_exp": notes["log_sum_exp_N"],
    }
