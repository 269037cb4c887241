# SPDX-License-Identifier: Apache-2.0
"""Parse a treebank with a model and score its trees beside baselines that need no model.

Words are encoded with their word boundaries, so that word pieces stay together. Trees over tokens are mapped back to
words before they are scored.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.punctuation import Punctuation, check_tags, keep_words
from hf_synlm.data.text import NATURAL, PathLike, Tokenization, check_list, errors_at
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.evaluation.text.batches import batches_by_cost, checked_batch_size, token_budget
from hf_synlm.evaluation.text.cache import Result, ResultCache
from hf_synlm.evaluation.text.processes import iterate_batches
from hf_synlm.evaluation.text.words import encode_sentences, split_sentences
from hf_synlm.evaluation.trees.parsing import (
    ParsingConvention,
    ParsingScores,
    apply_keep,
    branching_baselines,
    unlabeled_f1,
)
from hf_synlm.hub.abilities import declared, parse_options
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
        return apply_keep(trees, self.lengths, self.keep)

    def numbers_scored(self, convention: ParsingConvention) -> list[int]:
        """Numbers of the sentences whose length the convention scores; ValueError if there are none."""
        scored = enumerate(self.scored())
        found = [number for number, sentence in scored if convention.scores_length(len(sentence.words))]
        if not found:
            raise ValueError(f"none of the {len(self.sentences)} sentences is scored under {convention.describe()}")
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
        max_sentences: read only so many sentences, from the beginning.
        punctuation_by: how to recognize punctuation, by "tag" or "form"; see `keep_words`. By tag, all words count as
            punctuation whose tag is not among the 36 of the Penn Treebank for words (`check_tags`).
        remedy: what to do about other tags, for the message.

    Returns:
        The treebank.

    Raises:
        ValueError: for another value of `punctuation` or `punctuation_by`, for trees with other tags than the Penn
            Treebank's if punctuation is recognized by tag (in the sentences that are read), or if no sentence is left.
    """
    if punctuation not in PUNCTUATION:
        raise ValueError(f"punctuation {punctuation!r} is unknown. Choose one of {sorted(PUNCTUATION)}.")
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
        raise ValueError("no sentence has words that are not punctuation: check the treebank and how it is filtered")
    told = "" if punctuation == "keep" or punctuation_by == "tag" else f" (told by {punctuation_by})"
    if unknown:
        told += f", with {unknown} words of unknown tags"
    return Treebank(sentences, keep if punctuation == "ignore" else None, PUNCTUATION[punctuation] + told)


@torch.no_grad()
def parse_sentences(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[str | Sequence[str]],
    *,
    batch_size: int | None = None,
    progress: str | None = None,
    num_processes: int | None = 1,
    cache: PathLike | None = None,
    tokenize: Tokenization | None = None,
    **options: Any,
) -> list[ParsedSentence]:
    """Parse sentences; equal ones are parsed once.

        (parsed,) = hf_synlm.parse_sentences(model, tokenizer, ["the people agree"])
        print(parsed.brackets())

    Args:
        model: a model with `parse`.
        tokenizer: its tokenizer.
        sentences: each as text, whose words are separated by white space, or as a sequence of words; at least one word.
        batch_size: sentences per call, at most, about equally long; None = 16 on a CPU, 128 on other devices.
        progress: name of a progress bar; None = no bar.
        num_processes: how many processes parse on a CPU; None = as many as are worth it, see `TextScorer`.
        cache: file to which trees are written as they come; a run that was stopped continues from it.
        tokenize: split words, see `evaluation.text.words`; trees are over the pieces. Default: "words", and "ptb" for
            texts where the `text_style` of the model is "natural".
        **options: for `model.parse`, such as `method="inside"`, `num_beams=20` or `num_return_sequences=5`.

    Returns:
        The sentences with their trees and the log-probabilities of their words.

    Raises:
        ValueError: the model cannot parse, `batch_size` is not positive, `sentences` is a text, or one of them has no
            words, more tokens than the model has positions, or a word that is empty, has white space or no token, or
            shares one. Nothing is parsed then.
    """
    name = type(model).__name__
    if not declared(model.config, "gives_trees"):
        raise ValueError(f"{name} gives no trees: use another syntactic language model of hf_synlm")
    known = parse_options(model)
    if unknown := ", ".join(sorted(set(options) - known)):
        raise ValueError(f"{unknown}: not an option of {name}.parse ({', '.join(sorted(known))}). Leave it out.")
    check_list("sentences", sentences)
    style = getattr(model.config, "text_style", None)
    if tokenize is None and style == NATURAL and all(isinstance(sentence, str) for sentence in sentences):
        tokenize = "ptb"
    given = [sentence.split() if isinstance(sentence, str) else list(sentence) for sentence in sentences]
    pieces = split_sentences(tokenizer, given, tokenize, style)
    split = [[piece for word in words for piece in word] for words in pieces]
    if [] in split:
        raise ValueError(f"sentence {split.index([]) + 1} (''): there are no words: leave it out")
    if tokenize == "ptb" and style == NATURAL:  # the spaces are those of the text
        encoded = [(text.ids, text.word_ends) for text in encode_sentences(tokenizer, given, tokenize, style)]
    else:
        encoded = [_encode(tokenizer, words, number, style) for number, words in enumerate(split, 1)]
    _check_lengths(model, split, encoded)
    return parse_encoded(
        model,
        [EncodedSentence(tuple(e[0]), tuple(e[1]), tuple(words)) for words, e in zip(split, encoded, strict=True)],
        batch_size=batch_size,
        progress=progress,
        num_processes=num_processes,
        cache=cache,
        **options,
    )


class EncodedSentence(NamedTuple):
    """A sentence to parse: its tokens, which of them end a word, and its words."""

    ids: tuple[int, ...]
    word_ends: tuple[bool, ...]
    words: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.ids)


def parse_encoded(
    model: PreTrainedModel,
    sentences: Sequence[EncodedSentence],
    *,
    batch_size: int | None = None,
    progress: str | None = None,
    num_processes: int | None = 1,
    cache: PathLike | None = None,
    **options: Any,
) -> list[ParsedSentence]:
    """`parse_sentences` of sentences whose tokens are known, at least one each."""
    unique = list(dict.fromkeys(sentences))
    searches = declared(model.config, "searches") and options.get("method", "search") == "search"
    width = model.word_search(options.get("num_beams")).num_beams if searches else 1
    computed = iterate_batches(
        partial(_parse_batch, model, options),
        batches_by_cost(unique, checked_batch_size(batch_size, model), token_budget(model, width)),
        model,
        num_processes=num_processes,
        num_beams=width,
        cache=None if cache is None else ResultCache(cache, model, {"parse": options}),
        progress=progress,
    )
    found = dict(computed)
    return [ParsedSentence.from_dict(found[sentence]) for sentence in sentences]


def _parse_batch(model: PreTrainedModel, options: dict[str, Any], sentences: list[EncodedSentence]) -> list[Result]:
    batch = collate_contexts(
        [{"input_ids": sentence.ids, "word_ends": sentence.word_ends} for sentence in sentences],
        model.config.pad_token_id,
    )
    inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask", "word_ends")}
    with evaluation_mode(model):
        output = model.parse(**inputs, **options)
    return [ParsedSentence.from_output(output, sentence.words, row).to_dict() for row, sentence in enumerate(sentences)]


def _encode(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], number: int, text_style: str | None
) -> tuple[list[int], list[bool]]:
    shown = " ".join(words[:8]) + (" ..." if len(words) > 8 else "")
    with errors_at(f"sentence {number} ({shown!r})"):
        return encode_words(tokenizer, words, text_style)


def _check_lengths(
    model: PreTrainedModel, sentences: Sequence[Sequence[str]], encoded: Sequence[tuple[list[int], list[bool]]]
) -> None:
    if not declared(model.config, "searches"):
        return  # recurrent models read any length
    limit = model.word_search(1).machine.max_tokens
    long = [number for number, (ids, _) in enumerate(encoded) if len(ids) > limit]
    if long:
        words = sentences[long[0]]
        raise ValueError(
            f"sentence {long[0] + 1} of {len(words)} words ({' '.join(words[:5])} ...) has {len(encoded[long[0]][0])} "
            f"tokens, but the model has positions for {int(limit)} ({len(long)} of {len(encoded)} sentences are too "
            "long): shorten these sentences or leave them out"
        )


def parse_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], **options: Any
) -> list[list[Span]]:
    """`best_trees` of `parse_sentences`."""
    return best_trees(parse_sentences(model, tokenizer, sentences, **options))


def best_trees(parsed: Sequence[ParsedSentence]) -> list[list[Span]]:
    """Per sentence the spans of two or more words of its best tree, in post-order; empty if it has no tree."""
    return [sentence.hypotheses[0].unlabeled_spans if sentence.hypotheses else [] for sentence in parsed]


def match_treebank(parsed: Sequence[ParsedSentence], treebank: Treebank, where: str = "the trees") -> None:
    """Check that trees are over the words of a treebank, sentence by sentence.

    Args:
        parsed: the trees; an entry without words is a sentence without a tree.
        treebank: the gold trees.
        where: the file of the trees, for messages.

    Raises:
        ValueError: another number of sentences, or other words; it names the first difference. Case, and parentheses
            written -LRB- and -RRB-, make no difference.
    """
    if len(parsed) != len(treebank.sentences):
        raise ValueError(
            f"{where}: {len(parsed)} sentences, but the treebank has {len(treebank.sentences)} "
            f"({treebank.convention}): give one line per sentence, a blank one where there is no tree"
        )
    for number, (sentence, gold) in enumerate(zip(parsed, treebank.sentences, strict=True), start=1):
        if not sentence.words:
            continue
        own, other = (tuple(escape_word(word).lower() for word in side.words) for side in (sentence, gold))
        if own == other:
            continue
        place = next((k for k, pair in enumerate(zip(own, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None:
            difference = f"it has {len(own)} words, the gold tree {len(other)}"
        else:
            difference = f"word {place + 1} is {sentence.words[place]!r}, in the gold tree {gold.words[place]!r}"
        raise ValueError(
            f"{where}: sentence {number} is not that of {gold.source}: {difference} ({treebank.convention}). "
            "Score trees over the same words: check the style of the brackets (--tree-style, in `evaluate` "
            "prediction_style) and the treatment of punctuation."
        )


def score_trees(
    trees: Sequence[Sequence[Span]], treebank: Treebank, convention: str | ParsingConvention = "gpst", **changes: Any
) -> ParsingScores:
    """`unlabeled_f1` of trees, given as spans over the words of a treebank."""
    return unlabeled_f1(trees, treebank.spans, treebank.lengths, convention, keep=treebank.keep, **changes)


def score_baselines(
    treebank: Treebank, convention: str | ParsingConvention = "gpst", **changes: Any
) -> dict[str, ParsingScores]:
    """`branching_baselines` of a treebank."""
    return branching_baselines(treebank.spans, treebank.lengths, convention, keep=treebank.keep, **changes)


def score_table(scores: dict[str, ParsingScores], treebank: Treebank) -> str:
    """Table of scores for a terminal: the four common numbers by kind of tree; its last line names the convention."""
    width = max(map(len, scores))
    names = ("sentence_drop", "corpus_drop", "sentence_count", "corpus_count")
    lines = [
        f"{'':<{width + 2}}{'without sentence span':>24}{'with sentence span':>24}",
        f"{'unlabeled F1 (%)':<{width + 2}}" + f"{'sentence':>14}{'corpus':>10}" * 2,
    ]
    for name, score in scores.items():
        cells = (f"{100 * score.variants[key]:>{10 + 4 * key.startswith('sentence')}.2f}" for key in names)
        lines.append(f"  {name:<{width}}" + "".join(cells))
    first = next(iter(scores.values()))
    lines.append(f"  {first.num_sentences} sentences; {treebank.convention}; convention {first.convention}")
    return "\n".join(lines)


def score_numbers(scores: dict[str, ParsingScores]) -> dict[str, dict[str, float]]:
    """The numbers of `scores` in percent, for JSON."""
    return {name: score.numbers() for name, score in scores.items()}
