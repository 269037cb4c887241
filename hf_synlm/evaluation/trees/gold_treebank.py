# SPDX-License-Identifier: Apache-2.0
"""Gold trees of a treebank, ready to be parsed and scored, and the scores of trees over their words; without torch."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_synlm.data.brackets import unescape_word
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.punctuation import Punctuation, check_tags, keep_words
from hf_synlm.data.text import plural
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.evaluation.trees.parsing import (
    ParsingConvention,
    ParsingScores,
    branching_baselines,
    drop_tokens,
    scores_to_text,
    unlabeled_f1,
)
from hf_synlm.trees.spans import Span, escape_word

PUNCTUATION = {
    "remove": "punctuation removed before parsing",
    "ignore": "parsed with punctuation, scored without",
    "keep": "punctuation kept and scored",
}
_REMEDY = "keep it, or take it out before by `synlm treebank --punctuation remove --punctuation-by form`"


@dataclasses.dataclass(frozen=True)
class Treebank:
    """Sentences with gold trees, ready to be parsed and scored.

    Attributes:
        sentences: the words that are parsed, with their gold trees.
        keep: per sentence and word, whether it counts in the score; None = all count.
        convention: how punctuation is treated, in one line.
    """

    sentences: list[TreebankSentence]
    keep: list[list[bool]] | None
    convention: str

    @cached_property
    def words(self) -> list[list[str]]:
        """Per sentence its words."""
        return [list(sentence.words) for sentence in self.sentences]

    @cached_property
    def spans(self) -> list[list[Span]]:
        """Per sentence the gold spans of two or more words."""
        return [sentence.spans for sentence in self.sentences]

    @cached_property
    def lengths(self) -> list[int]:
        """Number of words of each sentence."""
        return [len(sentence.words) for sentence in self.sentences]

    def select(self, chosen: Iterable[int]) -> "Treebank":
        """The sentences with these numbers, in this order."""
        chosen = list(chosen)
        keep = None if self.keep is None else [self.keep[k] for k in chosen]
        return Treebank([self.sentences[k] for k in chosen], keep, self.convention)

    def scored(self) -> list[TreebankSentence]:
        """The gold sentences as they are scored: without the words that do not count."""
        if self.keep is None:
            return self.sentences
        return [sentence.select_words(keep) for sentence, keep in zip(self.sentences, self.keep, strict=True)]

    def over_kept_words(self, trees: Sequence[Sequence[Span]]) -> list[Sequence[Span]]:
        """Trees over the words of the treebank as trees over the words that are scored."""
        if self.keep is None:
            return list(trees)
        return [drop_tokens(tree, keep) for tree, keep in zip(trees, self.keep, strict=True)]

    def scored_trees(self) -> tuple[list[Sequence[Span]], list[int]]:
        """Gold spans, and numbers of words, as they are scored."""
        return self.over_kept_words(self.spans), [len(sentence.words) for sentence in self.scored()]

    def numbers_scored(self, convention: ParsingConvention) -> list[int]:
        """Numbers of the sentences whose length the convention scores; ValueError if there are none."""
        scored = enumerate(self.scored())
        found = [number for number, sentence in scored if convention.scores_length(len(sentence.words))]
        if not found:
            raise ValueError(f"none of {plural(len(self.sentences), 'sentence')} is scored: {convention.describe()}")
        return found


def load_treebank(
    path: str | Path,
    punctuation: str = "remove",
    max_sentences: int | None = None,
    punctuation_by: Punctuation = "tag",
    remedy: str = _REMEDY,
    **reading: Any,
) -> Treebank:
    """Read a treebank by `read_treebank` and `make_treebank`, which explain the options.

    Punctuation is removed from dependencies before they become constituents.
    """
    trees = read_treebank(path, without_punctuation=(punctuation, punctuation_by) == ("remove", "tag"), **reading)
    try:
        return make_treebank(trees, punctuation, max_sentences, punctuation_by, remedy)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error


def make_treebank(
    trees: Iterable[TreebankSentence],
    punctuation: str = "remove",
    max_sentences: int | None = None,
    punctuation_by: Punctuation = "tag",
    remedy: str = _REMEDY,
) -> Treebank:
    """Prepare gold trees for evaluation.

    Args:
        trees: the gold sentences.
        punctuation: "remove" deletes punctuation before parsing (Kim et al. 2019), "ignore" parses it but deletes it
            from both trees before scoring; both leave out sentences without other words. "keep" counts it as words.
        max_sentences: read at most this many first sentences.
        punctuation_by: how to recognize punctuation, by "tag" or "form"; see `keep_words`. By tag, a word is
            punctuation if its tag is not among the 36 of the Penn Treebank for words (`check_tags`).
        remedy: what to do about other tags, for the message.

    Returns:
        The treebank.

    Raises:
        ValueError: for another value of `punctuation_by`, for tags that are not the Penn Treebank's if punctuation is
            recognized by tag, or if no sentence is left.
    """
    sentences: list[TreebankSentence] = []
    keep: list[list[bool]] = []
    tags: Counter[str] = Counter()
    for sentence in trees:
        kept = keep_words(sentence.words, sentence.tags, punctuation_by)
        tags.update(sentence.tags)
        if punctuation == "keep" or any(kept):
            sentences.append(sentence if punctuation != "remove" else sentence.select_words(kept))
            keep.append(kept)
        if max_sentences is not None and len(sentences) == max_sentences:
            break
    unknown = check_tags(tags, remedy) if punctuation != "keep" and punctuation_by == "tag" else 0
    if not sentences:
        raise ValueError("no sentence has words that are not punctuation. Check the treebank and how it is filtered")
    told = "" if punctuation == "keep" or punctuation_by == "tag" else f" (told by {punctuation_by})"
    if unknown:
        told += f", with {plural(unknown, 'word')} of unknown tags"
    return Treebank(sentences, keep if punctuation == "ignore" else None, PUNCTUATION[punctuation] + told)


def best_trees(parsed: Sequence[ParsedSentence]) -> list[list[Span]]:
    """Per sentence the spans of two or more words of its best tree, in post-order; empty if it has no tree."""
    return [sentence.hypotheses[0].unlabeled_spans if sentence.hypotheses else [] for sentence in parsed]


def match_treebank(
    parsed: Sequence[ParsedSentence], treebank: Treebank, where: str = "the trees", also: str = ""
) -> None:
    """Check that trees are over the words of a treebank, sentence by sentence.

    Args:
        parsed: the trees; an entry without words is a sentence without a tree.
        treebank: the gold trees.
        where: the file of the trees, for messages.
        also: what follows the advice to remove punctuation, in messages.

    Raises:
        ValueError: another number of sentences, or other words; it names the first difference. Case, and parentheses
            written -LRB- and -RRB-, make no difference.
    """
    if len(parsed) != len(treebank.sentences):
        raise ValueError(
            f"{where}: {plural(len(parsed), 'sentence')}, but the treebank has {len(treebank.sentences)} "
            f"({treebank.convention}). Give one line per sentence, and a blank line where there is no tree"
        )
    for number, (sentence, gold) in enumerate(zip(parsed, treebank.sentences, strict=True), start=1):
        if not sentence.words:
            continue
        own, other = (tuple(escape_word(word).lower() for word in side.words) for side in (sentence, gold))
        if own == other:
            continue
        place = next((k for k, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            difference = f"it has {plural(len(own), 'word')}, the gold tree {len(other)}"
        else:
            difference = f"word {place + 1} is {sentence.words[place]!r}, in the gold tree {gold.words[place]!r}"
        remedy = (
            "Score trees over the same words: check the style of the brackets (--tree-style, in `evaluate` "
            "prediction_style) and the treatment of punctuation."
        )
        if tuple(filter(_has_letter, own)) == tuple(filter(_has_letter, other)):
            remedy = "The trees have punctuation: add --punctuation keep"
            remedy = f"The trees lack punctuation: add --punctuation remove{also}" if len(own) < len(other) else remedy
        raise ValueError(
            f"{where}: sentence {number} is not that of {gold.source}: {difference} ({treebank.convention}). {remedy}"
        )


def _has_letter(word: str) -> bool:
    return any(map(str.isalnum, unescape_word(word)))


def score_trees(
    trees: Sequence[Sequence[Span]], treebank: Treebank, convention: str | ParsingConvention = "gpst", **changes: Any
) -> ParsingScores:
    """`unlabeled_f1` of trees, given as spans over the words of a treebank."""
    return unlabeled_f1(treebank.over_kept_words(trees), *treebank.scored_trees(), convention, **changes)


def score_baselines(
    treebank: Treebank, convention: str | ParsingConvention = "gpst", **changes: Any
) -> dict[str, ParsingScores]:
    """`branching_baselines` of a treebank."""
    return branching_baselines(*treebank.scored_trees(), convention, **changes)


def score_table(scores: dict[str, ParsingScores], treebank: Treebank) -> str:
    """`scores_to_text` of trees over the words of a treebank."""
    return scores_to_text(scores, f"{treebank.convention}; ")


def score_numbers(scores: dict[str, ParsingScores]) -> dict[str, dict[str, float]]:
    """The numbers of `scores` in percent, for JSON."""
    return {name: score.numbers() for name, score in scores.items()}
