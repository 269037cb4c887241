"""What trees look like, without a gold standard: depth, branching direction, agreement between runs.

Trees are lists of half-open spans; spans of one word and copies (unary chains) count for nothing, and the whole
sentence counts as a constituent, listed or not.
"""

import dataclasses
import statistics
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import Any

from hf_synlm.evaluation.parsing import unlabeled_f1
from hf_synlm.evaluation.parsing_conventions import ParsingConvention, check_spans, resolve_convention
from hf_synlm.trees import Span


@dataclasses.dataclass(frozen=True)
class TreeStatistics:
    """Shape of a set of trees.

    Attributes:
        depth: mean over the sentences of the mean depth of their words, the number of constituents around a word
            ("Depth" in table 3 of Du et al. 2020).
        num_left_words: words that are the first child of their parent.
        num_right_words: words that are the last child of their parent.
        num_left_splits: splits of [i, j) into [i, j - 1) and a word.
        num_right_splits: splits of [i, j) into a word and [i + 1, j).
        num_splits: all splits of constituents of more than two words.
    """

    depth: float
    num_left_words: int
    num_right_words: int
    num_left_splits: int
    num_right_splits: int
    num_splits: int

    @property
    def right_left_ratio(self) -> float:
        """First-child words / last-child words: above 1 in right-branching trees (the R/L ratio of Du et al. 2020)."""
        return self.num_left_words / self.num_right_words if self.num_right_words else 0.0

    @property
    def left_splits(self) -> float:
        """Share of left splits, 0..1 (table 4 of Peng et al. 2019)."""
        return self.num_left_splits / self.num_splits if self.num_splits else 0.0

    @property
    def right_splits(self) -> float:
        """Share of right splits, 0..1 (table 4 of Peng et al. 2019)."""
        return self.num_right_splits / self.num_splits if self.num_splits else 0.0

    def numbers(self) -> dict[str, float]:
        """The four published numbers, for JSON; splits in percent."""
        return {
            "depth": round(self.depth, 2),
            "right_left_ratio": round(self.right_left_ratio, 2),
            "left_splits": round(100 * self.left_splits, 2),
            "right_splits": round(100 * self.right_splits, 2),
        }


def tree_statistics(trees: Sequence[Sequence[Span]], lengths: Sequence[int]) -> TreeStatistics:
    """Depth and branching direction of trees.

    Words: in a tree, the word at i is the first child of its parent if and only if a constituent begins at i, because
    the narrowest constituent around it is then the narrowest of these; and the last child if one ends at i + 1.

    Splits: a binary constituent has one. A wider one is split from the top, as by the authors of PaLM: off comes the
    widest constituent at its end, else the widest at its beginning; a rest without either is not split further. The
    rest of the words is treated likewise, whether it is a constituent or not.

    Args:
        trees: per sentence its half-open spans, which nest.
        lengths: number of words of each sentence.

    Returns:
        The statistics; leave punctuation out before to get the published numbers.

    Raises:
        ValueError: no sentences, different numbers of them, or a span outside its sentence.

    Cost: O(s log s) for s spans.
    """
    if not lengths or len(trees) != len(lengths):
        raise ValueError(f"{len(trees)} trees of {len(lengths)} sentences: give one each, at least one")
    depths, left_words, right_words, left, right, num_splits = [], 0, 0, 0, 0, 0
    for number, (tree, length) in enumerate(zip(trees, lengths, strict=True)):
        check_spans(tree, length, f"tree of sentence {number}")
        spans = {span for span in tree if span[1] - span[0] > 1} | ({(0, length)} if length > 1 else set())
        depths.append(sum(j - i for i, j in spans) / length)
        left_words += len({i for i, _ in spans})
        right_words += len({j for _, j in spans})
        for i, k, j in _splits(spans, length):
            left += k == j - 1
            right += k == i + 1
            num_splits += 1
    return TreeStatistics(statistics.fmean(depths), left_words, right_words, left, right, num_splits)


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


@dataclasses.dataclass(frozen=True)
class Agreement:
    """How much several runs agree in their trees.

    Attributes:
        mean: mean F1 over all pairs of runs, 0..1 ("self F1" in Williams et al. 2018).
        minimum: of the pair that agrees least.
        maximum: of the pair that agrees most.
        pairs: F1 by pair (first run, second run), numbered from 0.
        convention: one line that says what is counted.
    """

    mean: float
    minimum: float
    maximum: float
    pairs: dict[tuple[int, int], float]
    convention: str


def agreement(
    runs: Sequence[Sequence[Sequence[Span]]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    *,
    keep: Sequence[Sequence[bool]] | None = None,
    **changes: Any,
) -> Agreement:
    """Mean F1 between the trees of every two runs, such as several seeds.

    Args:
        runs: per run, per sentence its half-open spans.
        lengths: number of words of each sentence.
        convention: as in `unlabeled_f1`; its published level, sentence or corpus F1, is the one taken.
        keep: as in `unlabeled_f1`.
        **changes: as in `unlabeled_f1`.

    Returns:
        The agreement.

    Raises:
        ValueError: fewer than two runs, or as `unlabeled_f1`.

    Cost: O(runs^2 x spans).
    """
    if len(runs) < 2:
        raise ValueError(f"{len(runs)} run(s) given: agreement needs at least two")
    convention = resolve_convention(convention, **changes)
    pairs = {
        (a, b): unlabeled_f1(runs[a], runs[b], lengths, convention, keep=keep).f1
        for a, b in combinations(range(len(runs)), 2)
    }
    values = list(pairs.values())
    return Agreement(statistics.fmean(values), min(values), max(values), pairs, convention.describe())
