# SPDX-License-Identifier: Apache-2.0
"""Parse sentences, such as those of a treebank, with a model.

Words are encoded with their word boundaries, so that word pieces stay together. Trees over tokens are mapped back to
words.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.text import NATURAL, PathLike, Tokenization, check_list, errors_at, plural, tokenization_of
from hf_synlm.evaluation.text.batches import (
    growing_blocks,
    iterate_texts,
    token_budget,
    usual_batch_size,
)
from hf_synlm.evaluation.text.cache import Result, ResultCache
from hf_synlm.evaluation.text.words import encode_sentences, split_sentences
from hf_synlm.evaluation.trees.gold_treebank import best_trees
from hf_synlm.hub.abilities import declared, parse_options
from hf_synlm.trees.spans import Span


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
        batch_size: largest number of sentences per call; None = 16 on a CPU, 128 on other devices.
        progress: name of a progress bar; None = no bar.
        num_processes: how many processes parse on a CPU; None = as many as are worth it, see `TextScorer`.
        cache: file to which trees are written as they come; a run that was stopped continues from it.
        tokenize: split words, see `evaluation.text.words`; trees are over the pieces. Default: for texts, as the
            model's `text_style` says; for words, words as they are.
        **options: for `model.parse`, such as `method="inside"`, `num_beams=20` or `num_return_sequences=5`.

    Returns:
        The sentences with their trees and the log-probabilities of their words.

    Raises:
        ValueError: the model cannot parse, `sentences` is a text, or one of them has no words, more tokens than the
            model has positions, or a word that is empty, has white space or no token, or shares a token. Nothing is
            parsed then.
    """
    check_list("sentences", sentences)
    if all(isinstance(sentence, str) for sentence in sentences):
        tokenize = tokenization_of(getattr(model.config, "text_style", None), tokenize)
    given = [sentence.split() if isinstance(sentence, str) else list(sentence) for sentence in sentences]
    how = {"batch_size": batch_size, "progress": progress, "num_processes": num_processes, "cache": cache}
    return list(iterate_parses(model, tokenizer, given, how, tokenize=tokenize, **options))


@torch.no_grad()
def iterate_parses(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Iterable[list[str]],
    computation: Mapping[str, Any],
    *,
    tokenize: Tokenization | None = None,
    skipped: Counter[str] | None = None,
    skip_long: bool = False,
    **options: Any,
) -> Iterator[ParsedSentence]:
    """`parse_sentences` of words, one after the other; the sentences of an iterator are taken as they are needed.

    `computation` has the options of `iterate_encoded`. With `skipped`, a sentence of which no word is read has no words
    and no tree. With `skip_long`, so does a sentence longer than the model's positions, which counts under "long".
    Otherwise both are a ValueError.
    """
    name, style = type(model).__name__, getattr(model.config, "text_style", None)
    if not declared(model.config, "gives_trees"):
        raise ValueError(f"{name} gives no trees. Name a model of hf_synlm that gives trees")
    known = parse_options(model)
    if unknown := ", ".join(sorted(set(options) - known)):
        raise ValueError(f"{unknown}: not an option of {name}.parse ({', '.join(sorted(known))}). Leave {unknown} out.")

    def encoded() -> Iterator[EncodedSentence]:
        first = 1
        for block in [sentences] if isinstance(sentences, list) else growing_blocks(sentences, 1024, 8):
            pieces = split_sentences(tokenizer, block, tokenize, style)
            split = [[piece for word in words for piece in word] for words in pieces]
            if [] in split and skipped is None:
                place = split.index([])
                text = " ".join(block[place])
                raise ValueError(f"sentence {first + place} ({text!r}) has no words that the model reads. Leave it out")
            if tokenize == "ptb" and style == NATURAL:  # the spaces are those of the text
                texts = [(text.ids, text.word_ends) for text in encode_sentences(tokenizer, block, tokenize, style)]
            else:
                texts = [
                    _encode(tokenizer, words, k, style) if words else ([], []) for k, words in enumerate(split, first)
                ]
            long = _check_lengths(model, split, texts, first, skip_long)
            if skipped is not None:
                skipped["long"] += len(long)
            for place, ((ids, ends), words) in enumerate(zip(texts, split, strict=True)):
                kept = place not in long
                yield EncodedSentence(tuple(ids), tuple(ends), tuple(words)) if kept else EncodedSentence((), (), ())
            first += len(block)

    yield from iterate_encoded(
        model, list(encoded()) if isinstance(sentences, list) else encoded(), **computation, **options
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


def parse_encoded(model: PreTrainedModel, sentences: Sequence[EncodedSentence], **options: Any) -> list[ParsedSentence]:
    """`parse_sentences` of sentences whose tokens are known."""
    return list(iterate_encoded(model, list(sentences), **options))


def iterate_encoded(
    model: PreTrainedModel,
    sentences: Iterable[EncodedSentence],
    *,
    batch_size: int | None = None,
    progress: str | None = None,
    num_processes: int | None = 1,
    cache: PathLike | None = None,
    **options: Any,
) -> Iterator[ParsedSentence]:
    """`iterate_parses` of sentences whose tokens are known."""
    searches = declared(model.config, "searches") and options.get("method", "search") == "search"
    width = model.word_search(options.get("num_beams")).num_beams if searches else 1
    for row in iterate_texts(
        sentences,
        lambda one: [one] if one.ids else [],
        partial(_parse_batch, model, options),
        model,
        batch_size=usual_batch_size(batch_size, model),
        budget=token_budget(model, width),
        num_processes=num_processes,
        num_beams=width,
        cache=None if cache is None else ResultCache(cache, model, {"parse": options}),
        progress=progress,
    ):
        yield ParsedSentence.from_dict(row[0][1]) if row else ParsedSentence(())


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
    model: PreTrainedModel,
    sentences: Sequence[Sequence[str]],
    encoded: Sequence[tuple[list[int], list[bool]]],
    first: int,
    skip: bool,
) -> set[int]:
    """Places of the sentences that are too long; ValueError if there are some, unless they are skipped."""
    if not declared(model.config, "searches"):
        return set()  # recurrent models read any length
    limit = model.word_search(1).machine.max_tokens
    long = [place for place, (ids, _) in enumerate(encoded) if len(ids) > limit]
    if long and not skip:
        words = sentences[long[0]]
        raise ValueError(
            f"sentence {first + long[0]} of {plural(len(words), 'word')} ({' '.join(words[:5])} ...) has "
            f"{len(encoded[long[0]][0])} tokens, but the model reads at most {int(limit)} ({len(long)} of "
            f"{len(encoded)} sentences are too long). Shorten these sentences, or leave them out (synlm parse: "
            "--skip-long)"
        )
    return set(long)


def parse_words(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], **options: Any
) -> list[list[Span]]:
    """`best_trees` of `parse_sentences`."""
    return best_trees(parse_sentences(model, tokenizer, sentences, **options))
