# SPDX-License-Identifier: Apache-2.0
"""Collate contexts into padded batches; find the word boundaries of tokens.

Shapes: B contexts, T tokens of the longest context in the batch.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.punctuation import spell, stands_joined
from hf_synlm.data.text import NATURAL
from hf_synlm.trees.codecs import pad_inputs, pad_rows
from hf_synlm.trees.spans import check_words

LABEL_PADDING = -100


def collate_contexts(batch: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Collate contexts to a right-padded batch for training a model.

    Args:
        batch: per context a mapping with `input_ids` (at least one token) and, in all contexts or in none,
            `sentence_ids` (default: the context is one sentence) and `word_ends` (bools, True at the last piece of
            each word), all of the same length; other keys are ignored.
        pad_token_id: id that fills `input_ids`.

    Returns:
        `input_ids`, `attention_mask` (1 = token, 0 = padding), `labels` (the ids, -100 at padding), `sentence_ids` (0
        at padding), all int64 [B, T]; `word_ends` bool [B, T] (False at padding) if given.
    """
    names = [name for name in ("sentence_ids", "word_ends") if any(name in context for context in batch)]
    rows = [context["input_ids"] for context in batch]
    types = {"sentence_ids": torch.long, "word_ends": torch.bool}
    inputs = pad_inputs(rows, pad_token_id)
    return {
        **inputs,
        # Labels are masked by position, not by id: a tokenizer may use a real token for padding.
        "labels": pad_rows(rows, LABEL_PADDING),
        "sentence_ids": inputs["attention_mask"].clone(),
        **{name: pad_rows((context[name] for context in batch), 0, types[name]) for name in names},
    }


def word_ends_from_offsets(offsets: Sequence[tuple[int, int]], words: Sequence[str]) -> list[bool]:
    """Find the last token of each word from the character offsets of a fast tokenizer.

    The tokenizer must have encoded `" ".join(words)` without special tokens. The space before a word belongs to the
    word, whether or not the offsets include it.

    Args:
        offsets: `(start, end)` character offsets of the tokens, as from `return_offsets_mapping=True`.
        words: the words, without white space inside.

    Returns:
        One bool per token, True at the last token of each word.

    Raises:
        ValueError: a token spans two words, or a word has no token; the message names the word.

    Cost: O(tokens + characters).
    """
    ends = [end - 1 for end in accumulate(len(word) + 1 for word in words)]
    word_ids: list[int] = []
    word = 0
    for start, end in offsets:
        # The last character of the token says which word it belongs to.
        last = max(start, end - 1)
        while word < len(words) - 1 and ends[word] <= last:
            word += 1
        if word > 0 and start < ends[word - 1]:
            raise ValueError(f"the token at characters {start}..{end} spans {words[word - 1]!r} and {words[word]!r}")
        word_ids.append(word)
    missing = sorted(set(range(len(words))) - set(word_ids))
    if missing:
        raise ValueError(f"word {missing[0]} ({words[missing[0]]!r}) has no token. Remove it or use another tokenizer")
    return word_ends_from_word_ids(word_ids)


def word_ends_from_word_ids(word_ids: Sequence[int | None]) -> list[bool]:
    """Find the last token of each word from `BatchEncoding.word_ids()`.

    Args:
        word_ids: per token the index of its word, or None for a special token, which counts as a word of its own.

    Returns:
        One bool per token, True at the last token of each word.
    """
    last = len(word_ids) - 1
    return [word is None or t == last or word != word_ids[t + 1] for t, word in enumerate(word_ids)]


def encode_words(
    tokenizer: PreTrainedTokenizerBase, words: Sequence[str], text_style: str | None = None
) -> tuple[list[int], list[bool]]:
    """Encode a sentence given as words, and find the last token of each word.

    The words are joined by single spaces: the first piece of each word but the first contains the space.

    Args:
        tokenizer: a fast tokenizer.
        words: the words, non-empty and without white space inside.
        text_style: of the model's configuration; "natural": the words are those of a treebank, spelled as in text.

    Returns:
        The token ids without special tokens, and one bool per token, True at the last piece of each word.

    Raises:
        ValueError: a word is empty or contains white space, has no token, or shares a token with its neighbour.
    """
    check_words(words)
    if text_style == NATURAL:
        [(ids, owners)] = encode_joined(tokenizer, [words], [stands_joined(words)])
        return ids, word_ends_from_word_ids(owners)
    # verbose=False: sentences may be longer than model_max_length.
    encoding = tokenizer(" ".join(words), add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return list(encoding["input_ids"]), word_ends_from_offsets(encoding["offset_mapping"], words)


def encode_joined(
    tokenizer: PreTrainedTokenizerBase, sentences: Sequence[Sequence[str]], joined: Sequence[Sequence[bool]]
) -> list[tuple[list[int], list[int]]]:
    """Cut words into the pieces of the text that they make.

    Words that touch are cut together, and a piece belongs to the word in which it begins. Where a word would have no
    piece (`cannot` is one piece of two words), each word of this string is cut by itself.

    Args:
        tokenizer: a fast tokenizer.
        sentences: per sentence its words, as a treebank or as text has them.
        joined: per sentence, which words have no space before them; that of the first does not count.

    Returns:
        Per sentence its token ids, and for each token the index of its word.

    Raises:
        ValueError: the tokenizer puts a space before every text.
    """
    strings = [list(joined_strings(words, marks)) for words, marks in zip(sentences, joined, strict=True)]
    distinct = list(dict.fromkeys(string for row in strings for string in row))
    pieces = dict(zip(distinct, cut_texts(tokenizer, ["".join(string) for string in distinct]), strict=True))
    groups = {string: _by_word(string, *pieces[string]) for string in distinct}
    apart = list(dict.fromkeys(word for string in distinct if not all(groups[string]) for word in string))
    alone = {word: ids for word, (ids, _) in zip(apart, cut_texts(tokenizer, apart), strict=True)}
    groups |= {string: [alone[word] for word in string] for string in distinct if not all(groups[string])}
    if any(not word.startswith(" ") and tokenizer.decode(ids).startswith(" ") for word, ids in alone.items()):
        raise ValueError("the tokenizer puts a space before every text, so it cannot cut words that touch")
    encoded = []
    for row in strings:
        found = [ids for string in row for ids in groups[string]]
        encoded.append(([t for ids in found for t in ids], [k for k, ids in enumerate(found) for _ in ids]))
    return encoded


def joined_strings(words: Sequence[str], joined: Sequence[bool]) -> Iterator[tuple[str, ...]]:
    """The words in groups that touch, as they are spelled; a space before a group belongs to its first word."""
    starts = [place for place, mark in enumerate(joined) if not (mark and place)]
    for start, stop in pairwise([*starts, len(words)]):
        first, *others = map(spell, words[start:stop])
        yield (f" {first}" if start else first, *others)


def cut_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
    """Ids and offsets of the pieces of each text; what looks like a special token is text."""
    if not texts:
        return []  # a tokenizer does not take an empty batch
    batch = tokenizer(
        texts, add_special_tokens=False, return_offsets_mapping=True, split_special_tokens=True, verbose=False
    )
    return list(zip(batch["input_ids"], batch["offset_mapping"], strict=True))


def _by_word(string: tuple[str, ...], ids: list[int], offsets: Sequence[tuple[int, int]]) -> list[list[int]]:
    """The pieces of a string by the word in which they begin."""
    text, ends = "".join(string), list(accumulate(map(len, string)))
    found: list[list[int]] = [[] for _ in string]
    for piece, (start, end) in zip(ids, offsets, strict=True):
        start += text[start:end].startswith(" ")
        found[min(bisect_right(ends, start), len(ends) - 1)].append(piece)
    return found
