# SPDX-License-Identifier: Apache-2.0
"""Unlabeled parsing F1 of constituency trees, with the conventions of the literature as named presets.

Published numbers differ by more than ten points through convention alone: mean over sentences or pooled counts, with or
without the span of the whole sentence, with or without one-word sentences, punctuation kept or not. So every part of a
convention is an argument, every score carries its convention, and printing it shows the four common variants side by
side. The conventions of the program EVALB are in `hf_synlm.evaluation.trees.evalb`.

Notation: P = precision, R = recall, F1 = 2PR / (P + R), all in 0..1 (printed as percent); n = tokens of a sentence.
"""

import dataclasses
import logging
import random
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

from hf_synlm.data.text import plural
from hf_synlm.evaluation.trees.baseline_trees import balanced, left_branching, random_tree
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span, right_branching

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ParsingConvention:
    """How spans are counted; start from a preset of `CONVENTIONS` and change single fields by `dataclasses.replace`.

    Attributes:
        name: how the convention is called in output.
        level: which F1 is the published number: "sentence", the mean of the sentences' F1, or "corpus", of the counts
            pooled over all sentences. Both are always computed.
        sentence_span: the span (0, n): "drop" it on both sides, or "count" it on both sides, listed or not.
        min_width: narrower spans are not counted; 2 leaves single tokens out.
        duplicates: "set" counts a span once, "multiset" counts every copy (unary chains).
        min_length: shorter sentences are left out; 1 keeps all, 2 skips one-word sentences, 3 also two-word ones.
        max_length: longer sentences are left out; None keeps all.
        empty_gold: a sentence without gold spans (under this convention) has recall 1, and precision 1 if nothing is
            predicted ("recall_one"). Or it is left out ("skip"), or has F1 0 ("zero").
        epsilon: added to the denominators of a sentence's P, R and F1; corpus F1 has none.
    """

    name: str
    level: Literal["sentence", "corpus"] = "sentence"
    sentence_span: Literal["drop", "count"] = "drop"
    min_width: int = 2
    duplicates: Literal["set", "multiset"] = "set"
    min_length: int = 1
    max_length: int | None = None
    empty_gold: Literal["recall_one", "skip", "zero"] = "recall_one"
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            allowed, value = get_args(field.type), getattr(self, field.name)
            if field.name in ("level", "sentence_span", "duplicates", "empty_gold") and value not in allowed:
                raise ValueError(f"{field.name} is {value!r}: choose one of {', '.join(map(repr, allowed))}")

    def scores_length(self, num_tokens: int) -> bool:
        """Whether sentences of this length are scored."""
        return self.min_length <= num_tokens and (self.max_length is None or num_tokens <= self.max_length)

    def describe(self) -> str:
        """One line that says what is counted."""
        longest = "" if self.max_length is None else f" to {self.max_length}"
        empty = {"recall_one": "have recall 1", "skip": "are left out", "zero": "have F1 0"}[self.empty_gold]
        return (
            f"{self.name}: {self.level} F1, whole-sentence span "
            f"{'dropped' if self.sentence_span == 'drop' else 'counted'}, "
            f"spans of at least {self.min_width} token(s) as {self.duplicates}s, "
            f"sentences of {self.min_length}{longest or ' or more'} token(s), "
            f"sentences without gold spans {empty}, epsilon {self.epsilon:g}"
        )


# gpst: the scorer of ant-research/StructuredLM_RTDT. prpn and on-lstm: the scorers of yikangshen/PRPN (WSJ10, up to 10
# words) and yikangshen/Ordered-Neurons, both for trees over the words alone (see `keep_words`). The three count alike.
# compound-pcfg: compare_trees.py of harvardnlp/compound-pcfg, whose input has no one-word sentences (its eval.py leaves
# sentences without gold spans out of the mean: empty_gold="skip"); compound-pcfg-corpus: the other number it prints.
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
            raise ValueError(f"there is no convention {convention!r}: choose one of {', '.join(CONVENTIONS)}")
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
    kept_before = list(accumulate(map(bool, keep), initial=0))
    check_spans(spans, len(keep), "spans to drop tokens from")
    renumbered = [(kept_before[start], kept_before[end]) for start, end in spans]
    return [(start, end) for start, end in renumbered if end > start]


def check_spans(spans: Sequence[Span], num_tokens: int, what: str) -> None:
    """Raise ValueError if a half-open span is empty or outside its sentence; spans may cross or repeat."""
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) of the {what} does not fit into {plural(num_tokens, 'token')}: "
                "spans are half-open and counted in the same tokens as the lengths"
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
        percent = {name: f"{100 * value:.2f}" for name, value in self.variants.items()}
        return "\n".join(
            (
                f"unlabeled F1 (%) of {plural(self.num_sentences, 'sentence')} ({self.num_skipped} left out): "
                f"sentence {100 * self.sentence_f1:.2f}, corpus {100 * self.corpus_f1:.2f} "
                f"(precision {100 * self.precision:.2f}, recall {100 * self.recall:.2f})",
                f"  {'':<28}{'sentence F1':>12}{'corpus F1':>12}",
                f"  {'whole-sentence span dropped':<28}{percent['sentence_drop']:>12}{percent['corpus_drop']:>12}",
                f"  {'whole-sentence span counted':<28}{percent['sentence_count']:>12}{percent['corpus_count']:>12}",
                f"  convention {self.convention}",
            )
        )


def counted_spans(spans: Sequence[Span], num_tokens: int, convention: ParsingConvention) -> Counter[Span]:
    """The spans of a sentence that a convention counts, with their multiplicity."""
    whole = (0, num_tokens)
    counted = Counter((i, j) for i, j in spans if j - i >= convention.min_width)
    if convention.duplicates == "set":
        counted = Counter(set(counted))
    if convention.sentence_span == "drop":
        counted.pop(whole, None)
    elif num_tokens >= convention.min_width and whole not in counted:
        counted[whole] = 1
    return counted


def _sentence_f1(num_common: int, num_predicted: int, num_gold: int, convention: ParsingConvention) -> float:
    """F1 of one sentence: P = c / (p + eps), R = c / (g + eps), F1 = 2PR / (P + R + eps)."""
    if num_gold == 0 and convention.empty_gold == "zero":
        return 0.0
    epsilon = convention.epsilon
    precision = num_common / (num_predicted + epsilon) if num_predicted else 0.0
    recall = num_common / (num_gold + epsilon) if num_gold else 1.0
    if num_gold == 0 and num_predicted == 0:
        precision = 1.0
    total = precision + recall + epsilon
    return 2 * precision * recall / total if total else 0.0


@dataclasses.dataclass
class _Tally:
    """Sums over a corpus under one convention."""

    num_common: int = 0
    num_predicted: int = 0
    num_gold: int = 0
    f1: list[float | None] = dataclasses.field(default_factory=list)

    def add(self, predicted: Sequence[Span], gold: Sequence[Span], length: int, convention: ParsingConvention) -> None:
        """Count one sentence, or note that it is left out."""
        found, wanted = (counted_spans(spans, length, convention) for spans in (predicted, gold))
        common = (found & wanted).total()
        if not convention.scores_length(length) or (not wanted and convention.empty_gold == "skip"):
            self.f1.append(None)
            return
        self.num_common += common
        self.num_predicted += found.total()
        self.num_gold += wanted.total()
        self.f1.append(_sentence_f1(common, found.total(), wanted.total(), convention))

    def scores(self) -> tuple[float, float, float, float]:
        """Sentence F1, corpus F1, precision and recall; 0 where there is nothing to count."""
        scored = [f1 for f1 in self.f1 if f1 is not None]
        precision = self.num_common / self.num_predicted if self.num_predicted else 0.0
        recall = self.num_common / self.num_gold if self.num_gold else 0.0
        corpus = 2 * self.num_common / (self.num_predicted + self.num_gold) if self.num_common else 0.0
        return sum(scored) / len(scored) if scored else 0.0, corpus, precision, recall


def apply_keep(
    spans: Sequence[Sequence[Span]], lengths: Sequence[int], keep: Sequence[Sequence[bool]] | None
) -> list[Sequence[Span]]:
    """Call `drop_tokens` for every sentence; None keeps all. ValueError unless `keep` has one value per token."""
    if keep is None:
        return list(spans)
    for index, (mask, length) in enumerate(zip(keep, lengths, strict=True)):
        if len(mask) != length:
            raise ValueError(f"keep of sentence {index} has {len(mask)} values for {length} tokens: give one per token")
    return [drop_tokens(sentence, mask) for sentence, mask in zip(spans, keep, strict=True)]


def _lengths_kept(lengths: Sequence[int], keep: Sequence[Sequence[bool]] | None) -> Sequence[int]:
    return lengths if keep is None else [sum(map(bool, mask)) for mask in keep]


def unlabeled_f1(
    predicted: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    *,
    keep: Sequence[Sequence[bool]] | None = None,
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
        keep: per sentence and token, False for tokens (punctuation) to remove from both trees before scoring; lengths
            in the convention are then counted after removal. See `keep_words`. None keeps all.
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
    predicted, gold = apply_keep(predicted, lengths, keep), apply_keep(gold, lengths, keep)
    lengths = _lengths_kept(lengths, keep)

    tallies: dict[str, _Tally] = {}
    for sentence_span in ("drop", "count"):
        variant = dataclasses.replace(convention, sentence_span=sentence_span)
        tally = tallies[sentence_span] = _Tally()
        for prediction, truth, length in zip(predicted, gold, lengths, strict=True):
            tally.add(prediction, truth, length, variant)
    chosen = tallies[convention.sentence_span]
    num_scored = sum(f1 is not None for f1 in chosen.f1)
    if num_scored == 0:
        raise ValueError(f"none of {plural(len(lengths), 'sentence')} is scored under {convention.describe()}")
    sentence_f1, corpus_f1, precision, recall = chosen.scores()
    return ParsingScores(
        sentence_f1=sentence_f1,
        corpus_f1=corpus_f1,
        precision=precision,
        recall=recall,
        num_sentences=num_scored,
        num_skipped=len(lengths) - num_scored,
        convention=convention.describe(),
        level=convention.level,
        variants={
            f"{level}_{name}": score
            for name, tally in tallies.items()
            for level, score in zip(("sentence", "corpus"), tally.scores(), strict=False)
        },
        f1_per_sentence=tuple(chosen.f1),
    )


def branching_baselines(
    gold: Sequence[Sequence[Span]],
    lengths: Sequence[int],
    convention: str | ParsingConvention = "gpst",
    *,
    keep: Sequence[Sequence[bool]] | None = None,
    seed: int = 0,
    **changes: Any,
) -> dict[str, ParsingScores]:
    """Score the trees that need no model, and the best that a binary tree can do.

    Args:
        gold: per sentence the half-open spans of the gold tree.
        lengths: number of tokens of each sentence.
        convention: as in `unlabeled_f1`.
        keep: as in `unlabeled_f1`; the baseline trees are built over the tokens that are kept.
        seed: seed of the random trees, which are uniform over all binary trees.
        **changes: as in `unlabeled_f1`.

    Returns:
        Scores by name: "left", "right", "balanced", "random", and "binarized gold". The last one is the upper bound of
        binary trees, because it has all gold spans, and every binary tree has n - 1 spans.

    Raises:
        ValueError: as `unlabeled_f1`, or gold spans of a sentence that cross.
    """
    gold = apply_keep(gold, lengths, keep)
    if keep is not None:
        lengths = _lengths_kept(lengths, keep)
        # A sentence that is all punctuation has no tree.
        gold = [spans for spans, length in zip(gold, lengths, strict=True) if length]
        lengths = [length for length in lengths if length]
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
