# SPDX-License-Identifier: Apache-2.0
"""Plans of pruned inside-outside charts: which spans are encoded, from which splits, in which order.

Nearly everything here is integers: `plan_chart` (from a merge order), `plan_trees` (from given trees), `best_splits`
(the hard EM step of GPST), `mbr_splits` and `induced_trees` (from split scores back to trees). The tensors that run
through a plan are in `models/gpst/inside_outside.py`. The slow and obvious version is `replay_chart` in
tests/reference/inside_outside.py.

Shapes: B contexts, T tokens, P boundaries between neighbouring tokens, S sentences, N cells (leaves first, then
level by level), C inner cells, M splits of a cell, A tree nodes. Spans are half-open and in context positions.

An example: five tokens a b c d e, of which b c merge first, then d e, then a and b c, W = 2 (`merge_order` 1, 3, 0, 2).

    boundary          0   1   2   3            merges    super tokens
    tokens          a | b | c | d | e                    a  b  c  d  e
    merged at time    2   0   3   1            b c       a  bc    d  e
    level 1         ab  bc  cd  de             d e       a  bc    de
    level 2         abc  bcd                   a bc      abc      de
    level 3         bcde                       abc de    abcde
    level 4         abcde

The cells 0 .. 4 are the leaves. Each pair of neighbours is a cell (5 .. 8: ab, bc, cd, de). The merge of b c leaves
a bc and bc d with two super tokens: abc (cell 9) with the splits a|bc and ab|c, and bcd (cell 10) with b|cd and bc|d.
The merge of d e adds bcde (cell 11: bc|de, bcd|e), that of a bc adds abcde (cell 12: a|bcde, abc|de). The other spans,
cde and abcd, are never encoded.

Papers: Hu et al. 2024a (ReCAT: the pruned inside-outside algorithm), Hu et al. 2024b (GPST, appendix A.1).
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.losses import widened
from hf_synlm.trees.spans import validate_spans


@dataclasses.dataclass(frozen=True)
class ChartPlan:
    """The cells of a batch of pruned charts and the order in which they are computed (integers only).

    Cell ids: the leaves first (context by context, left to right), then the inner cells sorted by level. A level
    holds cells whose children all lie below it, so one level is one batch.

    Fields:
        num_leaves: number of tokens in the batch; num_cells: leaves and inner cells.
        context_N, start_N, end_N: context row and half-open span of each cell.
        left_CM, right_CM, split_CM: children ids and boundary k of each split of the inner cells
            (left child (i, k), right child (k, j)); columns past the cell's number of splits are 0.
        levels: per level `(first, last, num_splits)`, positions among the inner cells.
        root_S, length_S, context_S, offset_S: root cell, number of tokens, context row and first token of each
            sentence.
        tokens_B, nodes_B: tokens and tree nodes (2n - 1 for each sentence) of each context, as Python integers.
        count_2B: the same as a tensor.
        longest: tokens of the longest sentence.
        leaf_BT: leaf id at each context position, 0 where there is none.
        children_P: left, then right children of the splits of each level; see `level_children`.
        message_order, message_child, message_bounds: outside messages sorted by the cell that receives them; see
            `_message_lists`.
    """

    num_leaves: int
    num_cells: int
    context_N: Tensor
    start_N: Tensor
    end_N: Tensor
    left_CM: Tensor
    right_CM: Tensor
    split_CM: Tensor
    levels: tuple[tuple[int, int, int], ...]
    root_S: Tensor
    length_S: Tensor
    context_S: Tensor
    offset_S: Tensor
    tokens_B: tuple[int, ...]
    nodes_B: tuple[int, ...]
    count_2B: Tensor
    longest: int
    leaf_BT: Tensor
    children_P: Tensor
    message_order: Tensor
    message_child: Tensor
    message_bounds: tuple[int, ...]

    def to(self, device: torch.device) -> "ChartPlan":
        """Copy of the plan with its tensors on `device`, in one transfer."""
        names = [field.name for field in dataclasses.fields(self) if isinstance(getattr(self, field.name), Tensor)]
        tensors = [getattr(self, name) for name in names]
        packed = torch.cat([tensor.flatten() for tensor in tensors])
        if device.type == "cuda":  # or the host would wait for the copy
            packed = packed.pin_memory()
        parts = packed.to(device, non_blocking=True).split([tensor.numel() for tensor in tensors])
        moved = {name: part.view_as(tensor) for name, part, tensor in zip(names, parts, tensors, strict=True)}
        return dataclasses.replace(self, **moved)

    def first_message(self, level: int) -> int:
        """Number of the first outside message that a level sends; of the last level + 1: the number of messages.

        Each split sends two, so half of it is the number of splits in the levels below.
        """
        return sum(2 * (last - first) * width for first, last, width in self.levels[:level])

    def level_children(self, level: int) -> Tensor:
        """Ids [2, C_level, M] of the left and right children of the splits of one level."""
        first, last, width = self.levels[level]
        children = self.children_P[self.first_message(level) : self.first_message(level + 1)]
        return children.view(2, last - first, width)

    def message_receivers(self) -> Tensor:
        """The cell that receives each outside message: the child beside the one that the message is made of."""
        levels = [self.level_children(level).flip(0).flatten() for level in range(len(self.levels))]
        return torch.cat([self.children_P[:0], *levels])

    def received(self, part: int) -> tuple[Tensor, Tensor, int, int]:
        """Outside messages to the leaves (part 0) or to a level (part level + 1).

        Returns their numbers, the positions in that part of the cells that receive them, and the first of the cells and
        the last + 1 of that part.
        """
        begin, end = (0, *self.message_bounds)[part], self.message_bounds[part]
        cells = [0, self.num_leaves, *(self.num_leaves + last for _, last, _ in self.levels)]
        return self.message_order[begin:end], self.message_child[begin:end], cells[part], cells[part + 1]


class Cells(NamedTuple):
    """Some inner cells of a batch before they are numbered, all with equally many splits."""

    row_C: Tensor
    """Context."""
    start_C: Tensor
    end_C: Tensor
    split_CM: Tensor
    """Where the left child ends."""


# ---------------------------------------------------------------------------------------------- planning
@torch.compiler.disable  # integers on the host
def plan_chart(merge_order: Tensor, sentence_ids: Tensor, window_size: int) -> ChartPlan:
    """Plan the pruned charts of a batch, on the CPU, from the order in which neighbouring spans merge.

    `merge_order` [B, T - 1] is a permutation of the boundaries, first merge first; boundary p lies between tokens p and
    p + 1, and those between sentences and in padding may stand anywhere. `sentence_ids` [B, T]: 0 = padding, equal
    neighbours are one sentence.

    Merging replays `merge_order` on super tokens (at first the tokens). A span is encoded once it consists of at
    most W super tokens; its splits are the W boundaries that it had when it still was W + 1 super tokens (all its
    inner boundaries if it has at most W + 1 tokens). In closed form: the merge at boundary k takes exactly those
    spans from W + 1 to W super tokens that have k and its a nearest later-merged boundaries on the left and
    W - 1 - a on the right inside, 0 <= a < W. "Later-merged" is computed for all boundaries at once, so nothing is
    replayed. W >= the longest sentence gives the full chart.

    Cost: O(T log T) integer work, vectorized, plus one vectorized step per level: about log n levels for random
    orders, n for an order that merges from one end. At most 3n - 5 inner cells and 5n compositions for W = 2.
    Source: the authors' C++ chart manager (`py_backend`); the closed form is ours, the cells are the same.
    """
    num_contexts, num_tokens = sentence_ids.shape
    if merge_order.shape != (num_contexts, max(num_tokens - 1, 0)):
        raise ValueError(
            f"merge_order has shape {tuple(merge_order.shape)}; sentence_ids {tuple(sentence_ids.shape)} needs "
            f"({num_contexts}, {max(num_tokens - 1, 0)}): one entry for each boundary between neighbouring tokens."
        )
    both = torch.cat([merge_order.to(sentence_ids), sentence_ids], 1).cpu()  # every copy waits for the device
    merge_order, sentence_ids = both.split([merge_order.shape[1], num_tokens], 1)
    if not torch.equal(merge_order.sort(1).values, torch.arange(merge_order.shape[1]).expand_as(merge_order)):
        raise ValueError("merge_order must be a permutation of 0..T-2 in every row. Use an argsort of split scores.")
    joined_BP = joined_boundaries(sentence_ids)
    time_BP = torch.empty_like(merge_order)
    time_BP.scatter_(1, merge_order, torch.arange(merge_order.shape[1]).expand_as(merge_order))
    time_BP = torch.where(joined_BP, time_BP, num_tokens)  # later than every merge: sentence borders never merge
    starts_BT = _sentence_starts(sentence_ids, joined_BP)
    length_S = _sentence_lengths(starts_BT, sentence_ids != 0)
    cells = _initial_cells(joined_BP, window_size)
    if num_tokens > 1:
        cells += _merge_cells(time_BP, window_size, num_tokens, int(length_S.max()))
    return _finish_plan(cells, sentence_ids, starts_BT, length_S)


@torch.compiler.disable
def plan_trees(spans: Sequence[Sequence[tuple[int, int]]], sentence_ids: Tensor) -> ChartPlan:
    """Plan charts that hold exactly one given binary tree per sentence (each cell has one split).

    `spans`: per context the half-open spans of all inner nodes, in context positions, any order.
    """
    sentence_ids = sentence_ids.cpu()
    rows, firsts, lasts, splits = [], [], [], []
    for row, row_spans in enumerate(spans):
        validate_spans(row_spans, sentence_ids.shape[1])
        for (start, end), split in _split_points(row_spans, row).items():
            rows.append(row)
            firsts.append(start)
            lasts.append(end)
            splits.append(split)
    joined_BP = joined_boundaries(sentence_ids)
    if len(rows) != int(joined_BP.sum()):
        raise ValueError(
            f"spans hold {len(rows)} inner nodes, but binary trees over these sentences have {int(joined_BP.sum())} "
            "(n - 1 for n tokens). Binarize the trees and leave out the leaves."
        )
    starts_BT = _sentence_starts(sentence_ids, joined_BP)
    length_S = _sentence_lengths(starts_BT, sentence_ids != 0)
    for (row, start), length in zip(starts_BT.nonzero().tolist(), length_S.tolist(), strict=True):
        if length > 1 and (start, start + length) not in {(int(i), int(j)) for i, j in spans[row]}:
            raise ValueError(f"spans of row {row} lack the root span {(start, start + length)}. Add this span.")
    row, start, end, split = (torch.tensor(values, dtype=torch.long) for values in (rows, firsts, lasts, splits))
    return _finish_plan([Cells(row, start, end, split[:, None])], sentence_ids, starts_BT, length_S)


def _split_points(spans: Sequence[tuple[int, int]], row: int) -> dict[tuple[int, int], int]:
    """Split of each span of a binary tree: the end of the longest shorter span with the same start, or one token."""
    known = {(int(i), int(j)) for i, j in spans}
    points: dict[tuple[int, int], int] = {}
    left_end: dict[int, int] = {}
    for start, end in sorted(known, key=lambda span: (span[0], span[1])):
        split = left_end.get(start, start + 1)
        if end - start < 2 or (end - split > 1 and (split, end) not in known):
            raise ValueError(f"Span {(start, end)} of row {row} is not the union of two children. Give binary trees.")
        points[start, end] = split
        left_end[start] = end
    return points


def joined_boundaries(sentence_ids: Tensor) -> Tensor:
    """Boundaries [B, P] between two tokens of one sentence, from `sentence_ids` [B, T]."""
    return (sentence_ids[:, 1:] == sentence_ids[:, :-1]) & (sentence_ids[:, 1:] != 0)


def _sentence_starts(sentence_ids: Tensor, joined_BP: Tensor) -> Tensor:
    starts_BT = sentence_ids != 0
    starts_BT[:, 1:] &= ~joined_BP
    return starts_BT


def _initial_cells(joined_BP: Tensor, window_size: int) -> list[Cells]:
    """Spans of 2..W tokens with all their inner boundaries as splits."""
    cells, inside = list[Cells](), F.pad(joined_BP, (0, 1), value=True)
    for width in range(2, min(window_size, joined_BP.shape[1] + 1) + 1):
        inside = inside[:, :-1] & joined_BP[:, width - 2 :]
        row, start = inside.nonzero(as_tuple=True)
        cells.append(Cells(row, start, start + width, start[:, None] + torch.arange(1, width)))
    return cells


def _merge_cells(time_BP: Tensor, window_size: int, num_tokens: int, longest: int) -> list[Cells]:
    """Spans that a merge takes from W + 1 to W super tokens, for every merge at once."""
    num_contexts, num_boundaries = time_BP.shape
    border = torch.full((num_contexts, 1), num_tokens)
    padded = torch.cat([border, time_BP, border], 1)  # column x holds boundary x - 1
    table = _range_maxima(padded, longest)
    here = torch.arange(1, num_boundaries + 1).expand(num_contexts, num_boundaries)
    left, right = [here], [here]
    for _ in range(window_size):
        left.append(_next_later(padded, table, time_BP, left[-1], num_tokens, step=-1))
        right.append(_next_later(padded, table, time_BP, right[-1], num_tokens, step=1))
    finite = time_BP < num_tokens
    cells: list[Cells] = []
    for num_left in range(window_size):
        num_right = window_size - 1 - num_left
        valid = (
            finite & (padded.gather(1, left[num_left]) < num_tokens) & (padded.gather(1, right[num_right]) < num_tokens)
        )
        row, column = valid.nonzero(as_tuple=True)
        inner = [*left[num_left:0:-1], here, *right[1 : num_right + 1]]
        splits = torch.stack([boundary[row, column] for boundary in inner], 1)  # column x = split position x
        cells.append(Cells(row, left[num_left + 1][row, column], right[num_right + 1][row, column], splits))
    return cells


def _range_maxima(values: Tensor, longest: int) -> list[Tensor]:
    """Sparse table: entry h holds at x the maximum over columns x .. x + 2^h - 1 (cut off at the end)."""
    table = [values]
    while 1 << len(table) <= longest:
        half = 1 << (len(table) - 1)
        previous = table[-1]
        table.append(torch.maximum(previous, torch.cat([previous[:, half:], previous[:, -1:].expand(-1, half)], 1)))
    return table


def _next_later(
    padded: Tensor, table: list[Tensor], time_BP: Tensor, origin: Tensor, num_tokens: int, step: int
) -> Tensor:
    """Nearest column beyond `origin` whose merge is later than the boundary's own; borders stay where they are.

    Binary descent over the sparse table: a block of 2^h columns is skipped when its maximum is not later.
    """
    cursor, size = origin, padded.shape[1]
    for height in reversed(range(len(table))):
        length = 1 << height
        first = cursor - length if step < 0 else cursor + 1
        fits = (first >= 0) & (first + length <= size)
        block = table[height].gather(1, first.clamp(0, size - 1))
        cursor = torch.where(fits & (block <= time_BP), cursor + step * length, cursor)
    at_border = padded.gather(1, origin) == num_tokens
    return torch.where(at_border, origin, (cursor + step).clamp(0, size - 1))


def _finish_plan(cells: list[Cells], sentence_ids: Tensor, starts_BT: Tensor, length_S: Tensor) -> ChartPlan:
    """Number the cells, find their children, sort them by level and list the outside messages of each cell."""
    valid_BT = sentence_ids != 0
    num_leaves = int(valid_BT.sum())
    leaf_BT = torch.zeros_like(sentence_ids)
    leaf_BT[valid_BT] = torch.arange(num_leaves)
    spans = _SpanIndex.sort(cells, leaf_BT, num_leaves)
    left_CM, right_CM, level_C = spans.children_and_levels()
    level_C, order = level_C.sort(stable=True)
    new_id = torch.arange(num_leaves + len(order))
    new_id[num_leaves + order] = torch.arange(num_leaves, num_leaves + len(order))
    left_CM, right_CM = new_id[left_CM[order]], new_id[right_CM[order]]
    split_CM = spans.split_CM[order]
    levels = _level_bounds(level_C, (split_CM >= 0).sum(1))
    context_S, offset_S = starts_BT.nonzero(as_tuple=True)
    root_S = new_id[spans.find(context_S, offset_S, offset_S + length_S)]
    leaf_row, leaf_position = valid_BT.nonzero(as_tuple=True)
    count_2B = torch.stack([valid_BT.sum(1), 2 * valid_BT.sum(1) - starts_BT.sum(1)])
    children_P, message_order, message_child, message_bounds = _message_lists(left_CM, right_CM, levels, num_leaves)
    return ChartPlan(
        num_leaves=num_leaves,
        num_cells=len(new_id),
        context_N=torch.cat([leaf_row, spans.row_C[order]]),
        start_N=torch.cat([leaf_position, spans.start_C[order]]),
        end_N=torch.cat([leaf_position + 1, spans.end_C[order]]),
        left_CM=left_CM,
        right_CM=right_CM,
        split_CM=split_CM.clamp_min(0),
        levels=levels,
        root_S=root_S,
        length_S=length_S,
        context_S=context_S,
        offset_S=offset_S,
        tokens_B=tuple(count_2B[0].tolist()),
        nodes_B=tuple(count_2B[1].tolist()),
        count_2B=count_2B,
        longest=int(length_S.max()),
        leaf_BT=leaf_BT,
        children_P=children_P,
        message_order=message_order,
        message_child=message_child,
        message_bounds=message_bounds,
    )


class _SpanIndex(NamedTuple):
    """The inner cells sorted by context, start and end, so that a span is found by binary search."""

    row_C: Tensor
    start_C: Tensor
    end_C: Tensor
    split_CM: Tensor
    """-1 past the splits of a cell."""
    key_C: Tensor
    leaf_BT: Tensor
    num_leaves: int

    @classmethod
    def sort(cls, cells: list[Cells], leaf_BT: Tensor, num_leaves: int) -> "_SpanIndex":
        """Join groups of cells and sort them."""
        none = leaf_BT.new_zeros(0)
        groups = cells or [Cells(none, none, none, none[:, None])]
        width = max(group.split_CM.shape[1] for group in groups)
        row, start, end = (torch.cat([group[x] for group in groups]) for x in range(3))
        split_CM = torch.cat([F.pad(g.split_CM, (0, width - g.split_CM.shape[1]), value=-1) for g in groups])
        key, order = _span_key(row, start, end, leaf_BT.shape[1]).sort()
        return cls(row[order], start[order], end[order], split_CM[order], key, leaf_BT, num_leaves)

    def find(self, row: Tensor, start: Tensor, end: Tensor) -> Tensor:
        """Ids of spans: leaves, or inner cells in the order of this index."""
        num_tokens = self.leaf_BT.shape[1]
        inner = torch.searchsorted(self.key_C, _span_key(row, start, end, num_tokens)) + self.num_leaves
        return torch.where(end - start == 1, self.leaf_BT[row, start.clamp(0, num_tokens - 1)], inner)

    def children_and_levels(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [C, M] of left and right children (0 past the splits of a cell), and the level [C] of each cell."""
        exists = self.split_CM >= 0
        row, start, end = (column[:, None].expand_as(exists) for column in (self.row_C, self.start_C, self.end_C))
        left_CM = torch.where(exists, self.find(row, start, self.split_CM), 0)
        right_CM = torch.where(exists, self.find(row, self.split_CM, end), 0)
        return left_CM, right_CM, _levels(torch.cat([left_CM, right_CM], 1), self.num_leaves)


def _span_key(row: Tensor, start: Tensor, end: Tensor, num_tokens: int) -> Tensor:
    return (row * (num_tokens + 1) + start) * (num_tokens + 1) + end


def _sentence_lengths(starts_BT: Tensor, valid_BT: Tensor) -> Tensor:
    sentence_of_leaf = starts_BT[valid_BT].cumsum(0) - 1
    return torch.bincount(sentence_of_leaf, minlength=int(starts_BT.sum()))


def _levels(children_CX: Tensor, num_leaves: int) -> Tensor:
    """Level of each inner cell: 1 + the largest level among its children (leaves 0)."""
    level_N = torch.zeros(num_leaves + len(children_CX), dtype=torch.long)
    growing, level = torch.arange(num_leaves, len(level_N)), 0
    while len(growing):  # one pass per level; both chart kinds are acyclic, children are shorter spans
        level += 1
        level_N.index_fill_(0, growing, level)
        rows = (level_N.take(children_CX).amax(1) == level).nonzero().squeeze(1)  # a child grew, so the cell grows on
        growing, children_CX = growing.index_select(0, rows), children_CX.index_select(0, rows)
    return level_N[num_leaves:]


def _level_bounds(level_C: Tensor, num_splits_C: Tensor) -> tuple[tuple[int, int, int], ...]:
    """First cell, last cell + 1 and number of splits of each level; cells sorted by level, W splits before fewer."""
    levels, first = [], 0
    for count in torch.bincount(level_C, minlength=1)[1:].tolist():
        levels.append((first, first + count, int(num_splits_C[first])))
        first += count
    return tuple(levels)


def _message_lists(
    left_CM: Tensor, right_CM: Tensor, levels: tuple[tuple[int, int, int], ...], num_leaves: int
) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...]]:
    """Children of all levels, and the outside messages grouped by the cell that receives them.

    Messages are numbered as children are: level by level, left before right siblings, cell by cell, split by split. A
    sibling's message goes to the other child. Returned are the children, the message numbers sorted by receiving cell,
    the place of that cell among the leaves or in its level, and the positions in that list where the leaves end and
    where each level ends.
    """
    none = left_CM.new_zeros(0)
    sides = [(left_CM[i:j, :width].flatten(), right_CM[i:j, :width].flatten()) for i, j, width in levels]
    children = torch.cat([none, *(part for left, right in sides for part in (left, right))])
    child, order = torch.cat([none, *(part for left, right in sides for part in (right, left))]).sort(stable=True)
    ends = torch.tensor([num_leaves] + [num_leaves + last for _, last, _ in levels])
    place = child - F.pad(ends, (1, 0))[torch.searchsorted(ends, child, right=True)]
    return children, order, place, tuple(torch.searchsorted(child, ends).tolist())


# ---------------------------------------------------------------------------------------------- trees
def best_splits(plan: ChartPlan, split_score_CM: Tensor, word_index_BT: Tensor | None = None) -> Tensor:
    """Index [C] of the best split of every inner cell, argmax of the scores [C, M]: the tree choice of GPST's hard EM.

    With `word_index_BT` (the number of each token's word), a split inside a word is taken only in cells that lie inside
    that word (or when a cell has no other split).
    """
    return _allowed_scores(plan, split_score_CM, word_index_BT).argmax(-1)


def mbr_splits(plan: ChartPlan, split_score_CM: Tensor, word_index_BT: Tensor | None = None) -> Tensor:
    """Index [C] of the splits of the tree with the largest expected number of correct spans in the chart.

    From the root down, a cell takes a split with probability w = softmax(s) of its scores [C, M]; the probability of a
    span is that of reaching its cell. Words are kept whole as by `best_splits`. Cost: O(W) for each cell.
    Source: minimum Bayes risk as in Goodman 1996, Labelled Recall; the authors of GPST follow the best splits.
    """
    score_CM = _allowed_scores(plan, split_score_CM, word_index_BT)
    score_CM = widened(score_CM)
    weight_CM = score_CM.softmax(-1)
    reached_N = score_CM.new_zeros(plan.num_cells).index_fill_(0, plan.root_S, 1.0)
    inner_C = reached_N[plan.num_leaves :]
    for first, last, width in reversed(plan.levels):
        share = inner_C[first:last, None] * weight_CM[first:last, :width]
        for child_CM in (plan.left_CM, plan.right_CM):
            reached_N.index_add_(0, child_CM[first:last, :width].flatten(), share.flatten())
    expected_N = torch.zeros_like(reached_N)  # correct spans of the best subtree of a cell
    total_CM = torch.full_like(score_CM, -torch.inf)
    for level, (first, last, width) in enumerate(plan.levels):
        below = expected_N[plan.level_children(level)].sum(0)
        total = below.masked_fill(score_CM[first:last, :width] == -torch.inf, -torch.inf)
        total_CM[first:last, :width] = total
        expected_N[plan.num_leaves + first : plan.num_leaves + last] = total.amax(-1) + inner_C[first:last]
    return total_CM.argmax(-1)


def _allowed_scores(plan: ChartPlan, split_score_CM: Tensor, word_index_BT: Tensor | None) -> Tensor:
    """The scores, -inf for splits inside words where a cell has another one."""
    if word_index_BT is None:
        return split_score_CM
    row = plan.context_N[plan.num_leaves :, None]
    split = plan.split_CM.clamp_min(1)
    breaks = word_index_BT[row, split - 1] == word_index_BT[row, split]
    allowed = split_score_CM.masked_fill(breaks, -torch.inf)
    possible = (allowed > -torch.inf).any(-1, keepdim=True)
    return torch.where(possible, allowed, split_score_CM)


@dataclasses.dataclass
class TreeNodes:
    """Nodes of the induced trees, context by context, sentence by sentence, in post-order.

    Fields:
        cell_A: cell id of each node; context_A, start_A, end_A: its context row and span.
        split_A: boundary k of inner nodes, 0 for leaves.
        position_A: position of the node in its context's node sequence.
    """

    cell_A: Tensor
    context_A: Tensor
    start_A: Tensor
    end_A: Tensor
    split_A: Tensor
    position_A: Tensor


def induced_trees(plan: ChartPlan, best_C: Tensor) -> TreeNodes:
    """Follow the best splits [C] from the roots and list all nodes in post-order.

    Post-order is the order by end ascending, then by start descending, so one sort does it. The number of nodes is
    known in advance (2n - 1 per sentence), which saves a host sync.
    """
    num_leaves, device = plan.num_leaves, best_C.device
    child_2C = torch.stack([plan.left_CM, plan.right_CM]).gather(2, best_C[None, :, None].expand(2, -1, 1)).squeeze(2)
    used_N = torch.zeros(plan.num_cells, dtype=torch.bool, device=device)
    used_N[:num_leaves] = True
    used_N.index_fill_(0, plan.root_S, True)  # `used_N[...] = True` would copy a number to the GPU, and wait for it
    for first, last, _ in reversed(plan.levels):
        chosen = used_N[num_leaves + first : num_leaves + last]
        used_N.index_fill_(0, (child_2C[:, first:last] * chosen).flatten(), True)  # leaf 0 is used anyway
    num_tokens = plan.leaf_BT.shape[1]
    key = (plan.context_N * (num_tokens + 1) + plan.end_N) * (num_tokens + 1) + num_tokens - plan.start_N
    key = torch.where(used_N, key, torch.iinfo(torch.long).max)
    cell_A = key.argsort()[: sum(plan.nodes_B)]
    split_N = torch.zeros(plan.num_cells, dtype=torch.long, device=device)
    split_N[num_leaves:] = plan.split_CM.gather(1, best_C[:, None]).squeeze(1)
    context_A = plan.context_N[cell_A]
    first_B = plan.count_2B[1].cumsum(0) - plan.count_2B[1]
    position_A = torch.arange(len(cell_A), device=device) - first_B[context_A]
    return TreeNodes(cell_A, context_A, plan.start_N[cell_A], plan.end_N[cell_A], split_N[cell_A], position_A)
