# SPDX-License-Identifier: Apache-2.0
"""What parsers find and what their trees look like: recall by class, tests of differences, branching, agreement.

Recall of a class (label, width or height) = gold constituents of that class whose span the predicted tree has / gold
constituents of that class. A `ParsingConvention` says which constituents count, as for F1. Precision by width or height
of the predicted constituents (Du et al. 2020, figure 4) is the same with the two sides exchanged.

Trees are lists of half-open spans. The statistics of their shape ignore spans of one word and copies (unary chains) and
count the whole sentence as a constituent, listed or not.
"""

import dataclasses
import statistics
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any, Literal

import numpy as np

from hf_synlm.data.text import plural
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.trees.parsing import (
    ParsingConvention,
    ParsingScores,
    counted_spans,
    unlabeled_f1,
)
from hf_synlm.trees.spans import Span


@dataclasses.dataclass(frozen=True)
class Recall:
    """How many constituents of a class were found, of `total`."""

    found: int
    total: int

    @property
    def value(self) -> float:
        """Recall in 0..1; 0 where there is nothing to find."""
        return self.found / self.total if self.total else 0.0


def recall_by_label(
    predicted: Sequence[Sequence[Span]], gold: Sequence[TreebankSentence], convention: ParsingConvention
) -> dict[str, Recall]:
    """Recall of gold constituents by their label, the most frequent first; the prediction needs no labels.

    A constituent counts once per label and span: a unary chain VP over VP once, S over VP as both. Table 3 of Du et al.
    (2020), by the scorer of yikangshen/Ordered-Neurons, counts the whole sentence (`sentence_span="count"`); Kim et al.
    (2019) do not. Remove punctuation before (`TreebankSentence.select_words`).
    """
    found, total = Counter[str](), Counter[str]()
    for of_sentence, truth in _labels_found(predicted, gold, convention):
        found.update(of_sentence)
        total.update(truth)
    return {label: Recall(found[label], count) for label, count in total.most_common()}


def _labels_found(
    predicted: Sequence[Sequence[Span]], gold: Sequence[TreebankSentence], convention: ParsingConvention
) -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Per sentence that is scored: constituents found, and all gold ones, by label."""
    lengths = [len(sentence.words) for sentence in gold]
    spans = [[(i, j) for _, i, j in sentence.labeled_spans] for sentence in gold]
    for number, prediction, truth in _scored(predicted, spans, lengths, convention):
        found, total = Counter[str](), Counter[str]()
        for label, i, j in dict.fromkeys(gold[number].labeled_spans):
            if (i, j) in truth:
                total[label] += 1
                found[label] += (i, j) in prediction
        yield found, total


def permutation_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Two-sided p of a paired permutation test: how often chance alone makes two means differ as much.

    Under the null hypothesis the two systems are interchangeable, so every sentence's two values may be exchanged. The
    test draws 10,000 exchanges at random (Noreen 1989; Yeh 2000), so p is at least 1 / 10,001.
    """
    differences = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    generator = np.random.default_rng(0)
    observed, extreme = abs(differences.sum()) - 1e-9, 0
    for _ in range(10_000):
        extreme += abs(differences @ generator.choice((-1.0, 1.0), differences.size)) >= observed
    return (extreme + 1) / 10_001


def compare_parses(
    first: Sequence[Sequence[Span]],
    second: Sequence[Sequence[Span]],
    gold: Sequence[TreebankSentence],
    convention: ParsingConvention,
) -> list[dict[str, Any]]:
    """Rows that compare two systems in percent: sentence F1, and recall by label, with paired permutation tests.

    `p` is not corrected for the number of tests. Remove punctuation before.
    """
    lengths = [len(sentence.words) for sentence in gold]
    spans = [sentence.spans for sentence in gold]
    rows = [compare_scores(*(unlabeled_f1(trees, spans, lengths, convention) for trees in (first, second)))]
    found = [list(_labels_found(trees, gold, convention)) for trees in (first, second)]
    total = sum((truth for _, truth in found[0]), Counter[str]())
    for label, count in total.most_common():
        ours, theirs = ([part[label] for part, _ in each] for each in found)
        rows.append({**_compared(f"recall {label}", ours, theirs, count), "of": plural(count, "gold constituent")})
    return rows


def compare_scores(first: ParsingScores, second: ParsingScores) -> dict[str, Any]:
    """The row of sentence F1 of `compare_parses`."""
    ours, theirs = ([f1 for f1 in score.f1_per_sentence if f1 is not None] for score in (first, second))
    row = _compared("sentence F1", ours, theirs, first.num_sentences)
    return {**row, "of": plural(first.num_sentences, "sentence")}


def _compared(measure: str, first: Sequence[float], second: Sequence[float], count: int) -> dict[str, Any]:
    """A row: sums over `count` things, in percent, and whether their difference may be chance."""
    ours, theirs = (round(100 * sum(values) / count, 2) for values in (first, second))
    return {
        "measure": measure,
        "first": ours,
        "second": theirs,
        "second - first": round(theirs - ours, 2),  # of the numbers beside it
        "p": round(permutation_test(first, second), 4),
    }


def recall_by_size(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    size: Literal["width", "height"],
    convention: ParsingConvention,
) -> dict[int, Recall]:
    """Recall of gold constituents by their number of words, or by their height (`span_heights`), small ones first."""
    found, total = Counter[int](), Counter[int]()
    for number, prediction, truth in _scored(predicted, gold, lengths, convention):
        # The whole sentence may count without being listed.
        heights = span_heights([*gold[number], *truth]) if size == "height" else {}
        for span in truth:
            key = span[1] - span[0] if size == "width" else heights[span]
            total[key] += 1
            found[key] += span in prediction
    return {key: Recall(found[key], total[key]) for key in sorted(total)}


def span_heights(spans: Sequence[Span]) -> dict[Span, int]:
    """Height of each constituent of a tree: 1 over words alone, else one more than its highest child."""
    heights: dict[Span, int] = {}
    # In post-order the finished constituents form a stack, and a parent takes the top ones that it covers.
    done: list[Span] = []
    for i, j in sorted({span for span in spans if span[1] - span[0] > 1}, key=lambda span: (span[1], -span[0])):
        height = 0
        while done and done[-1][0] >= i:
            height = max(height, heights[done.pop()])
        heights[i, j] = height + 1
        done.append((i, j))
    return heights


def _scored(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: ParsingConvention,
) -> list[tuple[int, set[Span], set[Span]]]:
    """Number, counted predicted spans and counted gold spans of each sentence that the convention does not skip."""
    scored = []
    for number, length in enumerate(lengths):
        if convention.scores_length(length):
            found, wanted = (counted_spans(side[number], length, convention) for side in (predicted, gold))
            scored.append((number, found, wanted))
    return scored


# ----------------------------------------------------------------------------------------------- shape of trees
def tree_statistics(trees: Sequence[Sequence[Span]], lengths: Sequence[int]) -> dict[str, float]:
    """Depth and branching direction of trees; published numbers leave punctuation out. Cost: O(s log s) for s spans.

    depth               mean over sentences of the mean number of constituents around a word (Du et al. 2020, table 3)
    right_left_ratio    words that are the first child of their parent / the last one: above 1 in right-branching trees
    left_splits         percent of the splits of [i, j), of more than two words, into [i, j - 1) and a word (Peng et al.
                        2019, table 4); right_splits: into a word and [i + 1, j)

    Words: in a tree, the word at i is the first child of its parent if and only if a constituent begins at i, because
    the narrowest constituent around it is then the narrowest of these; and the last child if one ends at i + 1.

    Splits: a binary constituent has one. A wider one is split from the top, as by the authors of PaLM: off comes the
    widest constituent at its end, else the widest at its beginning; a rest without either is not split further. The
    rest of the words is treated likewise, whether it is a constituent or not.
    """
    depths, left_words, right_words, left, right, num_splits = [], 0, 0, 0, 0, 0
    for tree, length in zip(trees, lengths, strict=True):
        spans = {span for span in tree if span[1] - span[0] > 1} | ({(0, length)} if length > 1 else set())
        depths.append(sum(j - i for i, j in spans) / length)
        left_words += len({i for i, _ in spans})
        right_words += len({j for _, j in spans})
        for i, k, j in _splits(spans, length):
            left += k == j - 1
            right += k == i + 1
            num_splits += 1
    return {
        "depth": statistics.fmean(depths),
        "right_left_ratio": left_words / right_words if right_words else 0.0,
        "left_splits": 100 * (left / num_splits) if num_splits else 0.0,
        "right_splits": 100 * (right / num_splits) if num_splits else 0.0,
    }


def _splits(spans: set[Span], length: int) -> list[tuple[int, int, int]]:
    """Splits (i, k, j) of constituents and rests of more than two words."""
    starts_of, ends_of = defaultdict(list), defaultdict(list)
    for i, j in sorted(spans):
        starts_of[j].append(i)
        ends_of[i].append(j)
    splits = []
    agenda = [(0, length)]
    while agenda:
        i, j = agenda.pop()
        if j - i <= 2:
            continue
        place = bisect_right(starts_of[j], i)
        if place < len(starts_of[j]):
            k = starts_of[j][place]
        else:
            place = bisect_left(ends_of[i], j)
            if not place:
                continue
            k = ends_of[i][place - 1]
        splits.append((i, k, j))
        agenda += [(i, k), (k, j)]
    return splits


def pairwise_f1(
    runs: Sequence[Sequence[Sequence[Span]]], lengths: Sequence[int], convention: ParsingConvention
) -> dict[tuple[int, int], float]:
    """F1, in 0..1, between the trees of every two runs; its mean is the "self F1" of Williams et al. (2018)."""
    pairs = combinations(range(len(runs)), 2)
    return {(a, b): unlabeled_f1(runs[a], runs[b], lengths, convention).f1 for a, b in pairs}


def pair_rows(names: Sequence[str], count: int, pairs: Mapping[tuple[int, int], float]) -> list[dict[str, Any]]:
    """Rows of `pairwise_f1`, in percent: F1 with each of the first `count` runs, and with those of them on average."""
    rows = []
    for number, name in enumerate(names):
        f1 = [None if k == number else round(100 * pairs[min(k, number), max(k, number)], 2) for k in range(count)]
        others = [value for value in f1 if value is not None]
        columns = {str(k): value for k, value in enumerate(f1, 1)}
        mean = round(statistics.fmean(others), 2) if others else None
        rows.append({"run": f"{number + 1} {name}", **columns, "mean": mean})
    return rows
