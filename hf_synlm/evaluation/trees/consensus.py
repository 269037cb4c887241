# SPDX-License-Identifier: Apache-2.0
"""Averages of trees: the binary tree that has most in common with several trees of one sentence.

    best(i, i + 1) = 0
    best(i, j) = votes(i, j) + max_k best(i, k) + best(k, j)

votes(i, j) is the sum of the weights of the trees that have the span; the whole sentence has no votes. Binary trees
have equally many spans, so this is the tree with the highest mean F1 with binary trees. If these are a parser's and the
weights are their probabilities, it is the tree with the highest expected F1 (minimum Bayes risk).

Ties: the smallest k, so the tree branches to the right if there are no votes. Values are tied if their difference is
below 1e-9 of the largest vote, because sums of weights are rounded.

Source: Shayegh et al. 2024, "Ensemble Distillation for Unsupervised Constituency Parsing", and the authors' program
(MANGA-UOFA/ED4UCP). There a sentence without a tree in one of the files has no line in the output; here it keeps one.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from hf_synlm.data.parsed import Hypothesis, ParsedSentence, posteriors
from hf_synlm.data.text import errors_at
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span, escape_word, in_post_order


@dataclasses.dataclass(frozen=True)
class AveragedTree(Hypothesis):
    """The average of trees.

    Attributes:
        spans: spans of the binary tree, in post-order. With labels: its constituents, as in `Hypothesis`; then nodes
            that no label was found for are left out.
        labels: one label per span, if all trees have labels.
        log_prob: None.
        score: sum of the votes of the binary tree, without the whole sentence.
        expected_f1: weighted mean of its F1 with the trees as they vote, in 0..1, without the whole sentence; 1 for
            sentences of one or two words.
    """

    score: float = 0.0
    expected_f1: float = 1.0


def average_trees(
    trees: Sequence[Sequence[Span] | Hypothesis],
    weights: Sequence[float] | None = None,
    *,
    binarize: bool = True,
) -> AveragedTree:
    """Average the trees of a sentence: the binary tree whose spans have the most votes.

        hf_synlm.average_trees([[(0, 2), (0, 3)], [(1, 3), (0, 3)], [(0, 2), (0, 3)]]).spans    # ((0, 2), (0, 3))

    Every tree that has a span of the average votes for the span's label, unless it has the span only because it was
    made binary. All trees vote for the labels of single words. Ties: the labels of the first tree.

    Args:
        trees: per tree its half-open spans, the whole sentence included, or a tree of a `ParsedSentence`.
        weights: one per tree, such as probabilities; None = 1.
        binarize: wide constituents vote for the spans that make them binary to the right, (a (b c)) of (a b c), as the
            authors' do. False: only for the spans that are there.

    Returns:
        The average.

    Raises:
        ValueError: there are no trees; they have different numbers of words; spans cross, or the whole sentence is
            missing; weights are negative, not finite, all 0, or not as many as trees.

    Cost: O(K n + n^3) for K trees over n words, in n steps of numpy.
    """
    given, voting, num_words = _read(trees, binarize)
    numbers = [1.0] * len(trees) if weights is None else [float(weight) for weight in weights]
    if len(numbers) != len(trees) or not all(0 <= w < math.inf for w in numbers) or not any(numbers):
        raise ValueError(f"weights are {numbers} for {len(trees)} trees. Give one finite number, 0 or more, per tree")
    votes = _count_votes(voting, numbers, num_words)
    votes[votes <= 1e-9 * votes.max()] = 0  # sums are rounded
    binary = best_binary_tree(votes)
    spans, labels = tuple(binary), None
    if all(tree.labels is not None for tree in given):
        spans, labels = _vote_on_labels(given, voting, numbers, [*binary, *((i, i + 1) for i in range(num_words))])
    return AveragedTree(
        spans=spans,
        labels=labels,
        score=sum(float(votes[span]) for span in binary),
        expected_f1=float(np.average([_f1(set(binary), other) for other in voting], weights=numbers)),
    )


def best_binary_tree(votes: np.ndarray) -> list[Span]:
    """The binary tree whose spans have the highest sum; at ties the first part of a span is as short as possible.

    Args:
        votes: [n + 1, n + 1] votes, or posterior probabilities, of the span (i, j) at [i, j].

    Returns:
        The n - 1 spans in post-order.

    Cost: O(n^3), in n steps.
    """
    num_words = len(votes) - 1
    slack = 1e-9 * np.abs(votes).max()
    best, split = np.zeros(votes.shape), np.zeros(votes.shape, dtype=int)
    for width in range(2, num_words + 1):
        start = np.arange(num_words + 1 - width)
        middle = start[:, None] + np.arange(1, width)
        both = best[start[:, None], middle] + best[middle, start[:, None] + width]
        first = (both >= both.max(1, keepdims=True) - slack).argmax(1)
        best[start, start + width] = votes[start, start + width] + both[start, first]
        split[start, start + width] = middle[start, first]
    splits = split.tolist()
    spans, agenda = [], [(0, num_words)]  # parent, right, left is post-order backwards
    while agenda:
        i, j = agenda.pop()
        if j - i > 1:
            spans.append((i, j))
            agenda += [(i, splits[i][j]), (splits[i][j], j)]
    return spans[::-1]


def _read(
    trees: Sequence[Sequence[Span] | Hypothesis], binarize: bool = True
) -> tuple[list[Hypothesis], list[set[Span]], int]:
    """The trees, the spans that each votes for, and the number of words."""
    given = [tree if isinstance(tree, Hypothesis) else Hypothesis(tuple((i, j) for i, j in tree)) for tree in trees]
    lengths = [max((j for _, j in tree.spans), default=1) for tree in given]
    if len(set(lengths)) != 1:
        raise ValueError(f"trees have {lengths} words. Give trees of one sentence, each with the span of all words")
    voting = []
    for number, tree in enumerate(given):
        with errors_at(f"tree {number}"):
            complete = binarize_spans if binarize else in_post_order
            voting.append(set(complete(tree.unlabeled_spans, lengths[0])))
    return given, voting, lengths[0]


def _count_votes(voting: Sequence[set[Span]], weights: Sequence[float], num_words: int) -> np.ndarray:
    """Votes [n + 1, n + 1] of every span, 0 for the whole sentence."""
    votes = np.zeros((num_words + 1, num_words + 1))
    for spans, weight in zip(voting, weights, strict=True):
        for span in spans:
            votes[span] += weight
    votes[0, num_words] = 0
    return votes


def _f1(first: set[Span], second: set[Span]) -> float:
    """F1 of two trees without the whole sentence; 1 if there is nothing else."""
    total = len(first) + len(second) - 2
    return 2 * (len(first & second) - 1) / total if total > 0 else 1.0


def _vote_on_labels(
    trees: Sequence[Hypothesis], voting: Sequence[set[Span]], weights: Sequence[float], spans: Sequence[Span]
) -> tuple[tuple[Span, ...], tuple[str, ...]]:
    """The constituents, with labels, that spans of two or more words and single words become."""
    chains: list[dict[Span, tuple[str, ...]]] = []
    for tree in trees:
        chains.append({})
        for span, label in zip(tree.spans, tree.labels or (), strict=True):
            chains[-1][span] = (*chains[-1].get(span, ()), label)
    found: list[tuple[Span, str]] = []
    for span in sorted(spans, key=lambda span: (span[1], -span[0])):
        votes: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for own, others, weight in zip(chains, voting, weights, strict=True):
            if span in others or span[1] - span[0] == 1:
                votes[own.get(span, ())] += weight
        found += [(span, label) for label in max(votes, key=votes.__getitem__, default=())]
    return tuple(span for span, _ in found), tuple(label for _, label in found)


# ------------------------------------------------------------------------------------------------------ sentences
def average_parses(runs: Mapping[str, Sequence[ParsedSentence]]) -> list[ParsedSentence]:
    """Average the trees of several runs, sentence by sentence.

    Each run has one vote, which its trees share by their probabilities: so one run with the trees of its beam gives
    the trees of minimum Bayes risk. Runs without a tree for a sentence do not vote.

    Args:
        runs: the parsed sentences of each run, by its name, such as its file.

    Returns:
        Per sentence one tree (an `AveragedTree`), or none if no run has one; with the log-probabilities of the words
        if there is one run.

    Raises:
        ValueError: the runs are not over the same words; it names the first difference.
    """
    sizes = {name: len(parsed) for name, parsed in runs.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"these runs cannot be averaged, because they have different numbers of sentences: {sizes}")
    averaged = []
    for number, sentences in enumerate(zip(*runs.values(), strict=True), 1):
        answers = {name: sentence for name, sentence in zip(runs, sentences, strict=True) if sentence.hypotheses}
        if not answers:
            averaged.append(sentences[0])
            continue
        _check_words(answers, number)
        trees: list[Hypothesis] = []
        weights: list[float] = []
        for sentence in answers.values():
            count = len(sentence.hypotheses)
            trees += sentence.hypotheses
            weights += posteriors(sentence) or [1 / count] * count
        with errors_at(f"sentence {number}"):
            tree = average_trees(trees, weights)
        first = next(iter(answers.values()))
        averaged.append(ParsedSentence(first.words, (tree,), first.word_log_probs if len(runs) == 1 else None))
    return averaged


def _check_words(answers: Mapping[str, ParsedSentence], number: int) -> None:
    """Raise ValueError if parses of a sentence have different words, as `match_treebank` compares them."""
    first = next(iter(answers))
    words = {name: [escape_word(word).lower() for word in answer.words] for name, answer in answers.items()}
    for name, own in words.items():
        if own != words[first]:
            raise ValueError(
                f"sentence {number} is {' '.join(answers[name].words)!r} in {name}, but "
                f"{' '.join(answers[first].words)!r} in {first}. Average trees over the same words"
            )
