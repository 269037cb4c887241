# SPDX-License-Identifier: Apache-2.0
"""Syntactic distances: one number per gap between words that says how high the tree splits there.

The slow and obvious versions are `unbiased`, `biased` and `ranking_loss` in `tests/reference/on_lstm.py`.

A sentence w_1 .. w_m has m distances; value i belongs to the gap before w_i, so that value 1 belongs to the gap between
the beginning and the first word. The higher the value, the higher the node whose parts meet in the gap; only the order
of the values matters.

Shapes: B sentences, T tokens, N values that are compared with each other.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor

from hf_synlm.core.hidden_states import state_at_columns
from hf_synlm.core.losses import widened
from hf_synlm.recurrent.configuration_distances import SYNTACTIC_DISTANCE_SCOPES
from hf_synlm.trees.actions import COMP, spans_to_actions
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span

Decoder: TypeAlias = Literal["unbiased", "biased"]


def distances_to_spans(distances: Sequence[float], decoder: Decoder = "unbiased") -> list[Span]:
    """Read the binary tree off the distances: split at the widest gap, then split the parts; spans in post-order.

    Value i of the m distances is that of the gap before word i. "unbiased" splits the words before the widest gap from
    the words after it, and does not read the first value. "biased" first takes the word right after the widest gap,
    value 1 included, together with everything to its right: (left part, (word, right part)). Trees are thus drawn to
    the right, which English parsing scores reward. Of equal gaps the leftmost counts as the widest. A distance that is
    not a number raises ValueError. Cost: O(m).

    Source: "unbiased" is Algorithm 2 of Du et al. 2020, as in their code (each part ignores its first value); "biased"
    is `build_tree` of PRPN and Ordered-Neurons.
    """
    values = [float(value) for value in distances]
    if not values:
        raise ValueError("There are no distances, because the sentence has no word. Leave empty sentences out.")
    if decoder not in get_args(Decoder):
        raise ValueError(f"decoder {decoder!r} is unknown. Choose one of {list(get_args(Decoder))}.")
    if any(value != value for value in values):
        raise ValueError(f"Distance {[value != value for value in values].index(True)} is not a number.")
    length, biased = len(values), decoder == "biased"
    spans: list[Span] = []
    # The gaps whose right part is still open, higher ones first. What stands below a gap bounds its left part.
    open_gaps = [-1 if biased else 0]

    def close(end: int) -> None:
        gap = open_gaps.pop()
        if not biased:
            spans.append((open_gaps[-1], end))
            return
        start = open_gaps[-1] + 1
        if gap + 1 < end:
            spans.append((gap, end))
        if start < gap:
            spans.append((start, end))

    for gap in range(0 if biased else 1, length):
        while len(open_gaps) > 1 and values[open_gaps[-1]] < values[gap]:
            close(gap)
        open_gaps.append(gap)
    while len(open_gaps) > 1:
        close(length)
    return spans


def spans_to_distances(spans: Sequence[Span], num_words: int) -> list[int]:
    """Distances of a given tree over m words: the height of the node whose parts meet in the gap, less one.

    A word has height 1, a node one more than the higher of its children. Nodes with more than two children are split to
    the right first. The first of the m values, which belongs to no node, is one more than the largest.
    `distances_to_spans` gives the binary tree back.

    Source: `helpers.py` of the SDLM code; Du et al. 2020 count node heights, which have the same order.
    """
    distances = [0] * num_words
    stack: list[tuple[int, int]] = []  # first word and height of every finished part
    next_word = 0
    for action in spans_to_actions(binarize_spans(spans, num_words), num_words):
        if action == COMP:
            middle, right_height = stack.pop()
            start, left_height = stack.pop()
            distances[middle] = max(left_height, right_height)
            stack.append((start, distances[middle] + 1))
        else:
            stack.append((next_word, 1))
            next_word += 1
    distances[0] = max(distances) + 1
    return distances


def at_columns(values_BTX: Tensor, mask_BT: Tensor | None) -> Tensor:
    """As `state_at_columns`, for values [B, T, ...] of tokens alone: a column that is skipped has 0."""
    columns, more = state_at_columns(values_BTX, mask_BT), [1] * (values_BTX.dim() - 2)
    return columns if mask_BT is None else columns.masked_fill(~mask_BT.view(*mask_BT.shape, *more), 0)


def distance_trees(
    distances_BT: Tensor, starts: Sequence[Sequence[int]], decoder: Decoder = "unbiased"
) -> list[list[Span]]:
    """Trees of a batch: per sentence the spans over its words, which begin at the columns `starts`.

    Value t of `distances_BT` is that of the gap before column t.
    """
    rows = distances_BT.tolist()
    return [
        distances_to_spans([row[start] for start in places], decoder) for row, places in zip(rows, starts, strict=True)
    ]


def ranking_loss(
    predicted_BT: Tensor,
    gold_BT: Tensor,
    *,
    margin: float,
    scope: str = "sentence",
    reduction: str = "mean",
    sentence_ids_BT: Tensor | None = None,
) -> Tensor:
    """Pairwise hinge loss of predicted distances: they should be in the order of the gold distances.

    loss = sum over pairs (i, j) with gold_i > gold_j of max(0, margin - (predicted_i - predicted_j)), or their mean.

    Where the gold distance is NaN there is no pair. Scope "sentence" compares the gaps with one id of `sentence_ids_BT`
    (default: whole rows), as the paper says; "batch" compares the rows of a batch at the same column, as the released
    code does (0 for one row). Reduction "sum" is the paper's, "mean" that of the released code. Cost: O(B T^2) for
    "sentence", O(T B^2) for "batch".

    Source: Du et al. 2020, Eq. 18, without the constant that pairs of equal gold distances add; `rankloss` in SDLM.
    """
    if scope not in SYNTACTIC_DISTANCE_SCOPES:
        raise ValueError(f"scope {scope!r} is unknown. Choose one of {list(SYNTACTIC_DISTANCE_SCOPES)}.")
    predicted = widened(predicted_BT)
    if scope == "batch":
        predicted = predicted.t()
    higher = _ordered_pairs(gold_BT, scope, sentence_ids_BT)
    hinge = (margin - (predicted[:, :, None] - predicted[:, None, :])).relu()
    total = torch.where(higher, hinge, torch.zeros_like(hinge)).sum()
    return total if reduction == "sum" else total / higher.sum().clamp_min(1)


def _ordered_pairs(gold_BT: Tensor, scope: str, sentence_ids_BT: Tensor | None) -> Tensor:
    """Pairs of values that are compared, the first one higher: [B, T, T], or for scope "batch" [T, B, B]."""
    gold = gold_BT.t() if scope == "batch" else gold_BT
    higher = gold[:, :, None] > gold[:, None, :]  # False for NaN
    if scope == "sentence" and sentence_ids_BT is not None:
        higher = higher & (sentence_ids_BT[:, :, None] == sentence_ids_BT[:, None, :])
    return higher


def _gold_values(config: Any, input_ids: Tensor, mask_BT: Tensor | None, gold_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Gold distances, NaN at masked columns, and the number of the sentence of each column."""
    # Without an end token a row is one sentence.
    ends = torch.zeros_like(input_ids, dtype=torch.bool)
    if config.eos_token_id is not None:
        ends = input_ids == config.eos_token_id
    if mask_BT is not None:
        gold_BT, ends = gold_BT.masked_fill(~mask_BT, torch.nan), ends & mask_BT
    # An end token is the last token of its sentence.
    return gold_BT, ends.cumsum(1) - ends.long()


def count_pairs(config: Any, input_ids: Tensor, mask_BT: Tensor | None, gold_BT: Tensor | None) -> int:
    """Number of pairs that the ranking loss of a layer is a mean over."""
    if gold_BT is None:
        return 0
    mask_BT = None if mask_BT is None else mask_BT.bool()
    gold_BT, sentence_ids_BT = _gold_values(config, input_ids, mask_BT, gold_BT)
    return int(_ordered_pairs(gold_BT, config.syntactic_distance_scope, sentence_ids_BT).sum())


def distance_losses(
    config: Any, input_ids: Tensor | None, mask_BT: Tensor | None, predicted_BXT: Tensor | None, gold_BT: Tensor | None
) -> dict[str, tuple[float, Tensor]]:
    """Weight and value of "syntactic_distance", the ranking loss summed over the supervised layers [B, X, T].

    Nothing for a model without them. `eos_token_id` ends a sentence (None: every row is one). Without gold distances
    the loss is 0, and every parameter still gets a gradient.
    """
    if predicted_BXT is None:
        return {}
    if gold_BT is None:
        return {"syntactic_distance": (config.syntactic_distance_weight, 0 * predicted_BXT.sum())}
    predicted_BXT = predicted_BXT * config.syntactic_distance_scale
    gold_BT, sentence_ids_BT = _gold_values(config, input_ids, mask_BT, gold_BT.to(predicted_BXT))
    losses = [
        ranking_loss(
            predicted_BT,
            gold_BT,
            margin=config.syntactic_distance_margin,
            scope=config.syntactic_distance_scope,
            reduction=config.syntactic_distance_reduction,
            sentence_ids_BT=sentence_ids_BT,
        )
        for predicted_BT in predicted_BXT.unbind(1)
    ]
    return {"syntactic_distance": (config.syntactic_distance_weight, torch.stack(losses).sum())}


def check_gold_distances(
    input_ids: Tensor | None, distances: Tensor | None, labeled: bool, remedy: str | None
) -> Tensor | None:
    """Check that gold distances [B, T] fit a call, and that the model learns from them.

    `remedy` says how to get a model that learns from them; None if this one does.
    """
    if distances is None:
        return None
    if remedy is not None:
        raise ValueError(f"This model does not learn from trees. Leave distances out, or {remedy}.")
    if input_ids is None:
        raise ValueError("distances need input_ids, which show the ends of sentences. Pass input_ids, too.")
    if distances.shape != input_ids.shape:
        raise ValueError(f"distances {tuple(distances.shape)}, input_ids {tuple(input_ids.shape)} need equal shapes.")
    return distances
