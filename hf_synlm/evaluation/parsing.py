"""Unlabeled parsing F1 of constituency trees, with the conventions of the literature as arguments.

Published numbers differ by more than ten points through convention alone, so every score carries its convention
(`hf_synlm.evaluation.parsing_conventions`), and printing it shows the four common variants side by side.

Notation: P = precision, R = recall, F1 = 2PR / (P + R), all in 0..1 (printed as percent); n = tokens of a sentence.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from hf_synlm.evaluation.baseline_trees import balanced, left_branching, random_tree
from hf_synlm.evaluation.parsing_conventions import (
    CONVENTIONS,
    ParsingConvention,
    check_spans,
    drop_tokens,
    keep_by_tag,
    keep_by_word,
    keep_words,
    resolve_convention,
)
from hf_synlm.trees import Span, binarize, right_branching, spans_to_tree, tree_to_spans

__all__ = [
    "CONVENTIONS",
    "ParsingConvention",
    "ParsingScores",
    "apply_keep",
    "binarized_gold",
    "branching_baselines",
    "counted_spans",
    "drop_tokens",
    "keep_by_tag",
    "keep_by_word",
    "keep_words",
    "resolve_convention",
    "unlabeled_f1",
]


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
        f1_per_sentence: F1 of every sentence under the convention, None where it was left out.
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
                f"unlabeled F1 (%) of {self.num_sentences} sentences ({self.num_skipped} left out): "
                f"sentence {100 * self.sentence_f1:.2f}, corpus {100 * self.corpus_f1:.2f} "
                f"(precision {100 * self.precision:.2f}, recall {100 * self.recall:.2f})",
                f"  {'':<28}{'sentence F1':>12}{'corpus F1':>12}",
                f"  {'whole-sentence span dropped':<28}{percent['sentence_drop']:>12}{percent['corpus_drop']:>12}",
                f"  {'whole-sentence span counted':<28}{percent['sentence_count']:>12}{percent['corpus_count']:>12}",
                f"  convention {self.convention}",
            )
        )


def counted_spans(spans: Sequence[Span], num_tokens: int, convention: ParsingConvention) -> Counter[Span]:
    """List the spans of a sentence that a convention counts.

    Args:
        spans: half-open spans.
        num_tokens: length of the sentence.
        convention: what counts.

    Returns:
        The spans with their multiplicity.
    """
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
    """Return F1 of one sentence: P = c / (p + eps), R = c / (g + eps), F1 = 2PR / (P + R + eps)."""
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
        if length < convention.min_length or (convention.max_length is not None and length > convention.max_length):
            self.f1.append(None)
            return
        predicted_counts = counted_spans(predicted, length, convention)
        gold_counts = counted_spans(gold, length, convention)
        num_gold = gold_counts.total()
        if num_gold == 0 and convention.empty_gold == "skip":
            self.f1.append(None)
            return
        num_common = (predicted_counts & gold_counts).total()
        num_predicted = predicted_counts.total()
        self.num_common += num_common
        self.num_predicted += num_predicted
        self.num_gold += num_gold
        self.f1.append(_sentence_f1(num_common, num_predicted, num_gold, convention))

    def scores(self) -> tuple[float, float, float, float]:
        """Return sentence F1, corpus F1, precision and recall; 0 where there is nothing to count."""
        scored = [f1 for f1 in self.f1 if f1 is not None]
        precision = self.num_common / self.num_predicted if self.num_predicted else 0.0
        recall = self.num_common / self.num_gold if self.num_gold else 0.0
        corpus = 2 * self.num_common / (self.num_predicted + self.num_gold) if self.num_common else 0.0
        return sum(scored) / len(scored) if scored else 0.0, corpus, precision, recall


def _check_corpus(gold: Sequence[Sequence[Span]], lengths: Sequence[int], **others: Sequence[Any] | None) -> None:
    """Raise ValueError unless all arguments speak of the same sentences."""
    if not lengths:
        raise ValueError("there are no sentences to score: check the file the trees come from")
    for name, values in {"gold": gold, **others}.items():
        if values is not None and len(values) != len(lengths):
            raise ValueError(f"{name} has {len(values)} sentences and lengths has {len(lengths)}: give one each")
    for index, length in enumerate(lengths):
        if length < 1:
            raise ValueError(f"sentence {index} has length {length}: leave empty sentences out")


def apply_keep(
    spans: Sequence[Sequence[Span]], lengths: Sequence[int], keep: Sequence[Sequence[bool]] | None
) -> list[Sequence[Span]]:
    """Remove the tokens that `keep` marks False from under the spans of every sentence.

    Args:
        spans: per sentence its spans.
        lengths: number of tokens of each sentence.
        keep: per sentence and token, False for tokens to remove; None keeps all.

    Returns:
        Per sentence the spans over the tokens kept.

    Raises:
        ValueError: there is not one value per token.
    """
    if keep is None:
        return list(spans)
    for index, (mask, length) in enumerate(zip(keep, lengths, strict=True)):
        if len(mask) != length:
            raise ValueError(f"keep of sentence {index} has {len(mask)} values for {length} tokens: give one per token")
    return [drop_tokens(sentence, mask) for sentence, mask in zip(spans, keep, strict=True)]


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
            in the convention are then counted after removal. See `keep_by_tag` and `keep_by_word`. None keeps all.
        **changes: fields of `ParsingConvention` to change, e.g. `max_length=40`, `min_length=2`.

    Returns:
        The scores in 0..1.

    Raises:
        ValueError: different numbers of sentences, spans outside their sentence (the message names the sentence), an
            unknown convention, or no sentence left to score.

    Cost: O(number of spans).
    """
    convention = resolve_convention(convention, **changes)
    _check_corpus(gold, lengths, predicted=predicted, keep=keep)
    for index, length in enumerate(lengths):
        check_spans(predicted[index], length, f"prediction for sentence {index}")
        check_spans(gold[index], length, f"gold tree of sentence {index}")
    predicted, gold = apply_keep(predicted, lengths, keep), apply_keep(gold, lengths, keep)
    lengths = lengths if keep is None else [sum(map(bool, mask)) for mask in keep]

    tallies: dict[str, _Tally] = {}
    for sentence_span in ("drop", "count"):
        variant = dataclasses.replace(convention, sentence_span=sentence_span)
        tally = tallies[sentence_span] = _Tally()
        for prediction, truth, length in zip(predicted, gold, lengths, strict=True):
            tally.add(prediction, truth, length, variant)
    chosen = tallies[convention.sentence_span]
    num_scored = sum(f1 is not None for f1 in chosen.f1)
    if num_scored == 0:
        raise ValueError(f"none of the {len(lengths)} sentences is scored under convention {convention.describe()}")
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
        Scores by name: "left", "right", "balanced", "random", and "binarized gold", the oracle: no binary tree scores
        higher, because it has all gold spans and n - 1 spans in all, as every binary tree.

    Raises:
        ValueError: as `unlabeled_f1`, or gold spans of a sentence that cross.
    """
    _check_corpus(gold, lengths, keep=keep)
    for index, length in enumerate(lengths):
        check_spans(gold[index], length, f"gold tree of sentence {index}")
    gold = apply_keep(gold, lengths, keep)
    if keep is not None:
        lengths = [sum(map(bool, mask)) for mask in keep]
        # A sentence of nothing but punctuation has no tree.
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
    """Complete the spans of a gold tree to those of a right-binarized tree.

    Args:
        spans: half-open gold spans, which nest; the whole sentence may be missing.
        num_tokens: length of the sentence.

    Returns:
        The n - 1 spans of a binary tree in post-order, the gold spans of two or more tokens among them.

    Raises:
        ValueError: spans that cross.
    """
    inner = {(i, j) for i, j in spans if j - i >= 2}
    if num_tokens > 1:
        inner.add((0, num_tokens))
    return tree_to_spans(binarize(spans_to_tree(sorted(inner), num_tokens)))
