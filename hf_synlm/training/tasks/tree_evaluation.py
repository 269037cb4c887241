# SPDX-License-Identifier: Apache-2.0
"""Scores of trees: those of a beam search, and those of binary trees that are induced."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.punctuation import Punctuation, keep_words
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.evalb import EvalbParameters, labeled_f1
from hf_synlm.evaluation.trees.gold_treebank import PUNCTUATION, Treebank, score_baselines, score_trees
from hf_synlm.evaluation.trees.parsing import ParsingScores
from hf_synlm.trees.spans import Span


def spread(count: int, limit: int | None) -> list[int]:
    """At most `limit` (`None`: all) of `count` indices, spread evenly."""
    if limit is None or limit >= count:
        return list(range(count))
    return np.linspace(0, count - 1, num=limit, dtype=int).tolist()


def induction_scores(
    spans: Sequence[Sequence[Span]], gold: Sequence[TreebankSentence], by: Punctuation
) -> tuple[ParsingScores, ParsingScores]:
    """Scores of trees and of right-branching ones (convention "gpst", punctuation, recognized `by`, not counted)."""
    keep = [keep_words(sentence.words, sentence.tags, by) for sentence in gold]
    treebank = Treebank(list(gold), keep, PUNCTUATION["ignore"])
    chosen = [number for number, kept in enumerate(keep) if any(kept)]
    treebank = treebank.select(chosen)
    return score_trees([spans[k] for k in chosen], treebank), score_baselines(treebank)["right"]


def score_parses(
    gold: list[TreebankSentence], by: Punctuation, parsed: Sequence[ParsedSentence], config: Any
) -> dict[str, Any]:
    """Scores of the best trees that a beam search found of sentences, F1 in percent.

    - `labeled_f1`, `labeled_precision`, `labeled_recall`: EVALB's (COLLINS.prm); missing for unlabeled trees.
    - `unlabeled_f1`: the same brackets without their labels.
    - `induction_sentence_f1`: as for models that induce their trees (convention "gpst", punctuation not counted).
    - `right_branching_sentence_f1`: the same for right-branching trees.
    - `punctuation_by`: how punctuation was recognized for these two, `by`.
    - `word_perplexity`: exp(- sum of the words' log prefix-probability ratios / number of words).
    - `num_failures`: sentences without a complete tree in the beam; their gold brackets count as missed.
    """
    best = [sentence.hypotheses[0] if sentence.hypotheses else None for sentence in parsed]
    trees = [(tree.labels or ["X"] * len(tree.spans), tree.spans) if tree else ((), ()) for tree in best]
    induction, right = induction_scores([found for _, found in trees], gold, by)
    labeled = labeled_f1(trees, gold)
    names = ("f1", "precision", "recall") if config.gives_labels else ()
    fractions = {f"labeled_{name}": getattr(labeled.overall, name) for name in names}
    fractions |= {
        "unlabeled_f1": labeled_f1(trees, gold, EvalbParameters(labeled=False)).overall.f1,
        "induction_sentence_f1": induction.sentence_f1,
        "right_branching_sentence_f1": right.sentence_f1,
    }
    nats, num_words = -sum(math.fsum(one.word_log_probs or ()) for one in parsed), sum(len(one.words) for one in gold)
    return {
        **{name: round(100 * value, 2) for name, value in fractions.items()},
        "punctuation_by": by,
        "word_perplexity": perplexity_of(nats / num_words),
        "num_sentences": len(parsed),
        "num_failures": best.count(None),
    }
