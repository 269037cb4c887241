"""Which constituents a parser finds: recall by label, by width and by height.

Recall of a class = gold constituents of that class whose span the predicted tree has / gold constituents of that class.
Which constituents count (the whole sentence, narrow spans, copies) is said by a `ParsingConvention`, as for F1.

Precision by width or height of the predicted constituents (Du et al. 2020, figure 4) is the same with the two sides
exchanged: `recall_by_height(gold, predicted, lengths)`.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.parsing import counted_spans
from hf_synlm.evaluation.parsing_conventions import ParsingConvention, check_spans, resolve_convention
from hf_synlm.trees import Span


@dataclasses.dataclass(frozen=True)
class Recall:
    """How many constituents of a class were found.

    Attributes:
        found: number found.
        total: number there is.
    """

    found: int
    total: int

    @property
    def value(self) -> float:
        """Recall in 0..1; 0 where there is nothing to find."""
        return self.found / self.total if self.total else 0.0


def recall_by_label(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[TreebankSentence],
    convention: str | ParsingConvention = "gpst",
    **changes: Any,
) -> dict[str, Recall]:
    """Recall of gold constituents by their label; labels of the prediction play no part.

    A constituent counts once per label and span: a unary chain VP over VP once, S over VP as both. Table 3 of Du et al.
    (2020), by the scorer of yikangshen/Ordered-Neurons, counts the whole sentence (`sentence_span="count"`); Kim et al.
    (2019) do not.

    Args:
        predicted: per sentence the half-open word spans of the predicted tree.
        gold: the gold sentences; leave out punctuation before (`TreebankSentence.select_words`).
        convention: as in `unlabeled_f1`.
        **changes: as in `unlabeled_f1`.

    Returns:
        Recall by label, the most frequent label first.

    Raises:
        ValueError: different numbers of sentences, spans outside their sentence, an unknown convention.

    Cost: O(number of spans).
    """
    resolved = resolve_convention(convention, **changes)
    lengths = [len(sentence.words) for sentence in gold]
    found, total = Counter[str](), Counter[str]()
    spans = [[(i, j) for _, i, j in sentence.labeled_spans] for sentence in gold]
    for number, prediction, truth in _scored(predicted, spans, lengths, resolved):
        by_span: dict[Span, list[str]] = {}
        for label, i, j in gold[number].labeled_spans:
            by_span.setdefault((i, j), []).append(label)
        for span in truth:
            names = by_span.get(span, [])
            if resolved.duplicates == "set":
                names = list(dict.fromkeys(names))
            total.update(names)
            if span in prediction:
                found.update(names)
    return {label: Recall(found[label], count) for label, count in total.most_common()}


def recall_by_length(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    **changes: Any,
) -> dict[int, Recall]:
    """Recall of gold constituents by their number of words.

    Args:
        predicted: per sentence the half-open spans of the predicted tree.
        gold: per sentence the half-open spans of the gold tree.
        lengths: number of words of each sentence.
        convention: as in `unlabeled_f1`.
        **changes: as in `unlabeled_f1`.

    Returns:
        Recall by width, narrow ones first.

    Raises:
        ValueError: as `recall_by_label`.
    """
    return _recall_by(predicted, gold, lengths, lambda spans: {(i, j): j - i for i, j in spans}, convention, changes)


def recall_by_height(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    **changes: Any,
) -> dict[int, Recall]:
    """Recall of gold constituents by their height: 1 over words alone, else one more than the highest child.

    Args:
        predicted: per sentence the half-open spans of the predicted tree.
        gold: per sentence the half-open spans of the gold tree, which nest.
        lengths: number of words of each sentence.
        convention: as in `unlabeled_f1`.
        **changes: as in `unlabeled_f1`.

    Returns:
        Recall by height, low ones first.

    Raises:
        ValueError: as `recall_by_label`.
    """
    return _recall_by(predicted, gold, lengths, span_heights, convention, changes)


def span_heights(spans: Sequence[Span]) -> dict[Span, int]:
    """Height of each constituent of a tree: 1 over words alone, else one more than the highest child.

    Args:
        spans: half-open spans that nest; spans of one word and copies count for nothing.

    Returns:
        Height by span.

    Cost: O(s log s) for s spans.
    """
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


def _recall_by(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    classify: Callable[[Sequence[Span]], dict[Span, int]],
    convention: str | ParsingConvention,
    changes: dict[str, Any],
) -> dict[int, Recall]:
    found, total = Counter[int](), Counter[int]()
    for number, prediction, truth in _scored(predicted, gold, lengths, resolve_convention(convention, **changes)):
        # The whole sentence may count without being listed.
        classes = classify([*gold[number], *truth])
        for span, count in truth.items():
            key = classes.get(span, 0)
            total[key] += count
            found[key] += min(count, prediction[span])
    return {key: Recall(found[key], total[key]) for key in sorted(total)}


def _scored(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: ParsingConvention,
) -> list[tuple[int, Counter[Span], Counter[Span]]]:
    """Number, counted predicted spans and counted gold spans of each sentence that the convention does not skip."""
    if not len(predicted) == len(gold) == len(lengths):
        raise ValueError(
            f"{len(predicted)} predicted and {len(gold)} gold trees of {len(lengths)} sentences: give one each"
        )
    scored = []
    for number, length in enumerate(lengths):
        check_spans(predicted[number], length, f"prediction for sentence {number}")
        check_spans(gold[number], length, f"gold tree of sentence {number}")
        if length < convention.min_length or (convention.max_length is not None and length > convention.max_length):
            continue
        found, wanted = (counted_spans(side[number], length, convention) for side in (predicted, gold))
        scored.append((number, found, wanted))
    return scored
