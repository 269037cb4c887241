# SPDX-License-Identifier: Apache-2.0
"""Unlabeled parsing F1 of constituency trees, with the conventions of the literature as named presets.

Published numbers differ by more than ten points through convention alone: mean over sentences or pooled counts, with or
without the span of the whole sentence, with or without one-word sentences, punctuation kept or not. So every part of a
convention is an argument, every score carries its convention, and printing it shows the four common variants side by
side. The conventions of the program EVALB are in `hf_synlm.evaluation.trees.evalb`.

Notation: P = precision, R = recall, F1 = 2PR / (P + R), all in 0..1 (printed as percent); n = tokens of a sentence.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from hf_synlm.data.text import plural
from hf_synlm.evaluation.trees.baseline_trees import balanced, left_branching, random_tree
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span, right_branching

# Added to the denominators of sentence F1, as the scorers of the literature do.
_EPSILON = 1e-8


@dataclasses.dataclass(frozen=True)
class ParsingConvention:
    """How spans are counted; start from a preset of `CONVENTIONS` and change single fields by `dataclasses.replace`.

    Attributes:
        name: how the convention is called in output.
        level: which F1 is the published number: "sentence", the mean of the sentences' F1, or "corpus", of the counts
            pooled over all sentences. Both are always computed.
        sentence_span: the span (0, n): "drop" it on both sides, or "count" it on both sides, listed or not.
        min_length: shorter sentences are left out; 1 keeps all, 2 skips one-word sentences, 3 also two-word ones.
        max_length: longer sentences are left out; None keeps all.

    Spans of two or more tokens count, each once. A sentence without gold spans has recall 1, and precision 1 if nothing
    is predicted. The denominators of a sentence's P, R and F1 are 1e-8 larger; corpus F1 has no such addition.
    """

    name: str
    level: Literal["sentence", "corpus"] = "sentence"
    sentence_span: Literal["drop", "count"] = "drop"
    min_length: int = 1
    max_length: int | None = None

    def __post_init__(self) -> None:
        if self.level not in ("sentence", "corpus"):
            raise ValueError(f"level is {self.level!r}. Choose 'sentence' or 'corpus'")
        if self.sentence_span not in ("drop", "count"):
            raise ValueError(f"sentence_span is {self.sentence_span!r}. Choose 'drop' or 'count'")

    def scores_length(self, num_tokens: int) -> bool:
        """Whether sentences of this length are scored."""
        return self.min_length <= num_tokens and (self.max_length is None or num_tokens <= self.max_length)

    def describe(self) -> str:
        """One line that says what is counted."""
        longest = "" if self.max_length is None else f" to {self.max_length}"
        return (
            f"{self.name}: {self.level} F1, whole-sentence span "
            f"{'dropped' if self.sentence_span == 'drop' else 'counted'}, "
            f"spans of at least 2 token(s) as sets, sentences of {self.min_length}{longest or ' or more'} token(s), "
            f"sentences without gold spans have recall 1, epsilon {_EPSILON:g}"
        )


# gpst: the scorer of ant-research/StructuredLM_RTDT. prpn and on-lstm: the scorers of yikangshen/PRPN (WSJ10, up to 10
# words) and yikangshen/Ordered-Neurons, both for trees over the words alone (see `keep_words`). The three count alike.
# compound-pcfg: compare_trees.py of harvardnlp/compound-pcfg, whose input has no one-word sentences (its eval.py leaves
# sentences without gold spans out of the mean); compound-pcfg-corpus: the other number it prints.
# palm: the script of an early commit of Noahs-ARK/PaLM; Table 3 of the paper (right branching 40.7) fits its corpus F1
# (level="corpus") or sentence F1 without the whole sentence better than the mean that the script returns.
CONVENTIONS = {
    convention.name: convention
    for convention in (
        ParsingConvention("gpst"),
        ParsingConvention("prpn", max_length=10),
        ParsingConvention("on-lstm"),
        ParsingConvention("compound-pcfg", min_length=2),
        ParsingConvention("compound-pcfg-corpus", level="corpus", min_length=2),
        ParsingConvention("palm", sentence_span="count", max_length=40),
    )
}


def resolve_convention(convention: str | ParsingConvention, **changes: Any) -> ParsingConvention:
    """Look up a convention by name and change single fields of it.

    Args:
        convention: a key of `CONVENTIONS`, or a convention.
        **changes: fields of `ParsingConvention` to replace, e.g. `max_length=40`.

    Returns:
        The convention; its name lists the changes.

    Raises:
        ValueError: unknown name or value.
        TypeError: unknown field.
    """
    if isinstance(convention, str):
        if convention not in CONVENTIONS:
            raise ValueError(f"there is no convention {convention!r}. Choose one of {', '.join(CONVENTIONS)}")
        convention = CONVENTIONS[convention]
    new = dataclasses.replace(convention, **changes)
    changed = {name: value for name, value in vars(new).items() if value != getattr(convention, name)}
    if not changed:
        return convention
    listed = ", ".join(f"{name}={value}" for name, value in changed.items())
    return dataclasses.replace(new, name=f"{convention.name} with {listed}")


def drop_tokens(spans: Sequence[Span], keep: Sequence[bool]) -> list[Span]:
    """Remove the tokens that `keep` marks False from under a tree.

    Boundaries are renumbered and spans that lose all tokens vanish. The order stays. Equal spans that arise stay, too.
    """
    kept_before = list(accumulate(keep, initial=0))
    renumbered = [(kept_before[start], kept_before[end]) for start, end in spans]
    return [(start, end) for start, end in renumbered if end > start]


def check_spans(spans: Sequence[Span], num_tokens: int, what: str) -> None:
    """Raise ValueError if a half-open span is empty or outside its sentence; spans may cross or repeat."""
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) of the {what} does not fit into {plural(num_tokens, 'token')}. Spans are "
                "half-open. Count spans and lengths in the same tokens"
            )


def check_trees(predicted: Sequence[Sequence[Span]], gold: Sequence[Sequence[Span]], lengths: Sequence[int]) -> None:
    """Call `check_spans` for the trees of all sentences."""
    for index, (found, wanted, length) in enumerate(zip(predicted, gold, lengths, strict=True)):
        check_spans(found, length, f"prediction for sentence {index}")
        check_spans(wanted, length, f"gold tree of sentence {index}")


# --------------------------------------------------------------------------------------------------------------- F1
@dataclasses.dataclass(frozen=True)
class ParsingScores:
    """Unlabeled parsing scores in 0..1; `str()` prints them as percent with the convention named.

    Attributes:
        sentence_f1: mean of the sentences' F1 under the convention.
        corpus_f1: F1 of the counts pooled over all sentences under the convention.
        precision: pooled precision under the convention.
        recall: pooled recall under the convention.
        num_sentences: number of sentences scored.
        num_skipped: number of sentences left out by the convention (length, no gold spans).
        convention: one line that says what is counted.
        level: which F1 the convention's publications report: "sentence" or "corpus".
        variants: sentence and corpus F1 with the whole-sentence span dropped and counted, everything else as in the
            convention; keys "sentence_drop", "corpus_drop", "sentence_count", "corpus_count".
        f1_per_sentence: F1 of every sentence under the convention, None if it was left out.
    """

    sentence_f1: float
    corpus_f1: float
    precision: float
    recall: float
    num_sentences: int
    num_skipped: int
    convention: str
    level: str
    variants: dict[str, float]
    f1_per_sentence: tuple[float | None, ...] = dataclasses.field(repr=False)

    @property
    def f1(self) -> float:
        """The number that publications with this convention report, in 0..1: sentence or corpus F1."""
        return self.corpus_f1 if self.level == "corpus" else self.sentence_f1

    def numbers(self) -> dict[str, float]:
        """All F1s in percent with two decimals, for JSON: by the convention, and the four variants."""
        values = {"f1": self.f1, "sentence_f1": self.sentence_f1, "corpus_f1": self.corpus_f1, **self.variants}
        return {name: round(100 * value, 2) for name, value in values.items()}

    def __str__(self) -> str:
        return scores_to_text({"trees": self})


def scores_to_text(scores: Mapping[str, ParsingScores], treated: str = "") -> str:
    """Table of scores for a terminal: the four common numbers by kind of tree; its last line names the convention."""
    width = max(map(len, scores))
    lines = [
        f"{'':<{width + 2}}{'without sentence span':>24}{'with sentence span':>24}",
        f"{'unlabeled F1 (%)':<{width + 2}}" + f"{'sentence':>14}{'corpus':>10}" * 2,
    ]
    for name, score in scores.items():
        cells = (f"{100 * f1:>{10 + 4 * key.startswith('sentence')}.2f}" for key, f1 in score.variants.items())
        lines.append(f"  {name:<{width}}" + "".join(cells))
    first = next(iter(scores.values()))
    lines.append(f"  {plural(first.num_sentences, 'sentence')}; {treated}convention {first.convention}")
    return "\n".join(lines)


def counted_spans(spans: Sequence[Span], num_tokens: int, convention: ParsingConvention) -> set[Span]:
    """The spans of a sentence that a convention counts."""
    counted = {(i, j) for i, j in spans if j - i > 1} - {(0, num_tokens)}
    return counted | {(0, num_tokens)} if convention.sentence_span == "count" and num_tokens > 1 else counted


def _sentence_f1(num_common: int, num_predicted: int, num_gold: int) -> float:
    """F1 of one sentence: P = c / (p + eps), R = c / (g + eps), F1 = 2PR / (P + R + eps)."""
    precision = num_common / (num_predicted + _EPSILON) if num_predicted else float(num_gold == 0)
    recall = num_common / (num_gold + _EPSILON) if num_gold else 1.0
    return 2 * precision * recall / (precision + recall + _EPSILON)


def unlabeled_f1(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    **changes: Any,
) -> ParsingScores:
    """Score predicted trees against gold trees by their unlabeled spans.

    Sentence F1 = mean_s F1_s; corpus F1 = 2 sum_s c_s / (sum_s p_s + sum_s g_s), with c common, p predicted and g gold
    spans that the convention counts.

    Source of the preset "gpst": the grammar induction evaluation of ant-research/StructuredLM_RTDT (F1 after Kim et al.
    2019): sets of spans of two or more words, the whole sentence dropped, one-word sentences kept, epsilon 1e-8, no
    punctuation handling. There "the whole sentence" is the last span of a list, here it is the span (0, n).

    Args:
        predicted: per sentence the half-open spans of the predicted tree.
        gold: per sentence the half-open spans of the gold tree, which need not be binary.
        lengths: number of tokens n of each sentence, in the tokens that the spans count.
        convention: a key of `CONVENTIONS`, or a `ParsingConvention`.
        **changes: fields of `ParsingConvention` to change, e.g. `max_length=40`, `min_length=2`.

    Returns:
        The scores in 0..1.

    Raises:
        ValueError: different numbers of sentences, spans outside their sentence (the message names the sentence), an
            unknown convention, or no sentence left to score.

    Cost: O(number of spans).
    """
    convention = resolve_convention(convention, **changes)
    check_trees(predicted, gold, lengths)
    scored = [number for number, length in enumerate(lengths) if convention.scores_length(length)]
    if not scored:
        raise ValueError(f"none of {plural(len(lengths), 'sentence')} is scored under {convention.describe()}")
    variants: dict[str, float] = {}
    found: dict[str, tuple[list[float], float, float]] = {}
    for sentence_span in ("drop", "count"):
        rule = dataclasses.replace(convention, sentence_span=sentence_span)
        sides = ([counted_spans(trees[k], lengths[k], rule) for k in scored] for trees in (predicted, gold))
        counts = [(len(ours & theirs), len(ours), len(theirs)) for ours, theirs in zip(*sides, strict=True)]
        f1 = [_sentence_f1(*count) for count in counts]
        common, ours, theirs = map(sum, zip(*counts, strict=True))
        parts = ((2 * common, ours + theirs), (common, ours), (common, theirs))
        corpus, precision, recall = (part / whole if whole else 0.0 for part, whole in parts)
        variants |= {f"sentence_{sentence_span}": sum(f1) / len(f1), f"corpus_{sentence_span}": corpus}
        found[sentence_span] = f1, precision, recall
    f1, precision, recall = found[convention.sentence_span]
    of_number = dict(zip(scored, f1, strict=True))
    return ParsingScores(
        sentence_f1=variants[f"sentence_{convention.sentence_span}"],
        corpus_f1=variants[f"corpus_{convention.sentence_span}"],
        precision=precision,
        recall=recall,
        num_sentences=len(scored),
        num_skipped=len(lengths) - len(scored),
        convention=convention.describe(),
        level=convention.level,
        variants=variants,
        f1_per_sentence=tuple(map(of_number.get, range(len(lengths)))),
    )


def branching_baselines(
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    *,
    seed: int = 0,
    **changes: Any,
) -> dict[str, ParsingScores]:
    """Score the trees that need no model, and the best that a binary tree can do.

    Args:
        gold: per sentence the half-open spans of the gold tree.
        lengths: number of tokens of each sentence.
        convention: as in `unlabeled_f1`.
        seed: seed of the random trees, which are uniform over all binary trees.
        **changes: as in `unlabeled_f1`.

    Returns:
        Scores by name: "left", "right", "balanced", "random", and "binarized gold". The last one is the upper bound of
        binary trees, because it has all gold spans, and every binary tree has n - 1 spans.

    Raises:
        ValueError: as `unlabeled_f1`, or gold spans of a sentence that cross.
    """
    generator = random.Random(seed)
    predictions = {
        "left": [left_branching(length) for length in lengths],
        "right": [right_branching(length) for length in lengths],
        "balanced": [balanced(length) for length in lengths],
        "random": [random_tree(length, generator) for length in lengths],
        "binarized gold": [binarized_gold(spans, length) for spans, length in zip(gold, lengths, strict=True)],
    }
    return {name: unlabeled_f1(trees, gold, lengths, convention, **changes) for name, trees in predictions.items()}


def binarized_gold(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """Complete the spans of a gold tree, which must nest, to a binary tree: n - 1 spans in post-order.

    Wide constituents are binarized to the right; the span of the whole sentence may be missing. ValueError for spans
    that cross.
    """
    inner = {(i, j) for i, j in spans if j - i >= 2}
    if num_tokens > 1:
        inner.add((0, num_tokens))
    return binarize_spans(sorted(inner), num_tokens)
