# SPDX-License-Identifier: Apache-2.0
"""Gold trees of a treebank, ready to be parsed and scored, and the scores of trees over their words; without torch."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.punctuation import Punctuation, check_tags, drop_marks, keep_words
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
        read_again: by a treatment of punctuation, a function that reads the same file with this treatment.
    """

    sentences: list[TreebankSentence]
    keep: list[list[bool]] | None
    convention: str
    read_again: Mapping[str, Callable[[], "Treebank"]] = dataclasses.field(default_factory=dict)

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
        bank = make_treebank(trees, punctuation, max_sentences, punctuation_by, remedy)
    except ValueError as error:
        raise ValueError(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    options = (max_sentences, punctuation_by, remedy)
    again = {mode: partial(load_treebank, path, mode, *options, **reading) for mode in PUNCTUATION}
    return dataclasses.replace(bank, read_again=again)


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
        raise ValueError("every word is punctuation. Check the treebank and the options that remove words")
    told = "" if punctuation == "keep" or punctuation_by == "tag" else f" (told by {punctuation_by})"
    if unknown:
        told += f", with {plural(unknown, 'word')} of unknown tags"
    return Treebank(sentences, keep if punctuation == "ignore" else None, PUNCTUATION[punctuation] + told)


def best_trees(parsed: Sequence[ParsedSentence]) -> list[list[Span]]:
    """Per sentence the spans of two or more words of its best tree, in post-order; empty if it has no tree."""
    return [sentence.hypotheses[0].unlabeled_spans if sentence.hypotheses else [] for sentence in parsed]


def match_treebank(runs: Mapping[str, Sequence[ParsedSentence]], treebank: Treebank, also: str = "") -> None:
    """Check that trees are over the words of a treebank, sentence by sentence.

    Args:
        runs: the trees by their file; an entry without words is a sentence without a tree.
        treebank: the gold trees.
        also: text that follows the advice to remove punctuation, in messages.

    Raises:
        ValueError: another number of sentences, or other words; it names the first difference. Case, and parentheses
            written -LRB- and -RRB-, make no difference.
    """
    for name, parsed in runs.items():
        if difference := _difference(parsed, treebank):
            raise ValueError(f"{name}: {difference} ({treebank.convention}). {_advise(runs, parsed, treebank, also)}")


def _plain(words: Sequence[str]) -> list[str]:
    """Words as they are compared."""
    return [escape_word(word).lower() for word in words]


def _difference(parsed: Sequence[ParsedSentence], treebank: Treebank) -> str:
    """The first place where trees have other words than the treebank; empty if there is none."""
    if len(parsed) != len(treebank.sentences):
        return f"{plural(len(parsed), 'sentence')}, but the treebank has {len(treebank.sentences)}"
    for number, (sentence, gold) in enumerate(zip(parsed, treebank.sentences, strict=True), start=1):
        own, other = _plain(sentence.words), _plain(gold.words)
        if own and own != other:
            pairs = enumerate(zip(sentence.words, gold.words, own, other, strict=False), start=1)
            found = (f"word {k} is {a!r}, in the gold tree {b!r}" for k, (a, b, x, y) in pairs if x != y)
            counts = f"it has {plural(len(own), 'word')}, the gold tree {len(other)}"
            return f"sentence {number} is not that of {gold.source}: {next(found, counts)}"
    return ""


def _advise(
    runs: Mapping[str, Sequence[ParsedSentence]], parsed: Sequence[ParsedSentence], treebank: Treebank, also: str
) -> str:
    """What to do about runs of which `parsed` is over other words; treatments of punctuation are tried."""
    told = {"ignore": "punctuation is not scored, as in trees of models", "keep": "punctuation is scored"}
    fits: dict[str, list[bool]] = {}
    for mode, read in treebank.read_again.items():
        with suppress(ValueError):  # tags that do not tell what punctuation is
            bank = read()
            fits[mode] = [not _difference(run, bank) for run in runs.values()]
    modes = [mode for mode in fits if all(fits[mode])]
    if "remove" in modes:
        return f"The trees lack punctuation. Add --punctuation remove{also}"
    if modes:
        return "The trees have punctuation. Add " + " or ".join(f"--punctuation {m} ({told[m]})" for m in modes)
    if any(fits.get("remove", ())) and all(map(any, zip(*fits.values(), strict=True))):
        bare = dict(zip(runs, fits["remove"], strict=True))
        some, none = (", ".join(name for name in runs if bare[name] == is_bare) for is_bare in (False, True))
        return (
            f"Punctuation is in {some}, but not in {none}. Parse again for {none} (`synlm evaluate parsing --model M "
            "--punctuation ignore --save-trees FILE`), then score with --punctuation ignore"
        )
    if len(parsed) != len(treebank.sentences):
        return "Give one line per sentence, and a blank line where there is no tree"
    sides = [(own.words, gold.words) for own, gold in zip(parsed, treebank.sentences, strict=True) if own.words]
    compared = _plain if all(drop_marks(own) == drop_marks(gold) for own, gold in sides) else drop_marks
    surplus = Counter(word for own, _ in sides for word in compared(own))
    surplus.subtract(word for _, gold in sides for word in compared(gold))
    extra, lacking = ([word for word in surplus if sign * surplus[word] > 0][:5] for sign in (1, -1))
    steps = [f"{step} {str(words)[1:-1]}" for step, words in (("leave out", extra), ("put in", lacking)) if words]
    if compared is drop_marks:
        steps.append("check their order and the style of the brackets (--tree-style, in `evaluate` prediction_style)")
    elif extra:
        steps[0] += ", too: the treebank counts this as punctuation (see --punctuation-by)"
    return f"Score trees over the same words: {'; '.join(steps)}"


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
