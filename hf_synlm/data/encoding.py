# SPDX-License-Identifier: Apache-2.0
"""Text -> sentences -> token ids, one block at a time; the result does not depend on the number of processes."""

import hashlib
import json
import os
import threading
from dataclasses import dataclass
from functools import cache
from itertools import chain
from multiprocessing.connection import wait
from typing import Any

import multiprocess
import numpy as np
from datasets import Features, List, Value
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.punctuation import drop_edge_punctuation
from hf_synlm.data.text import split_sentences

SENTENCES_PER_CALL = 1024


@dataclass(frozen=True)
class TextOptions:
    """How lines become sentences: lines may be sentences already; punctuation at the edges of words may be dropped."""

    one_sentence_per_line: bool = False
    language: str = "en"  # ISO 639
    drop_punctuation: bool = False  # as in grammar induction (Kim et al. 2019)


def block_sentences(text: str, is_split: bool, options: TextOptions) -> list[str]:
    """Split the lines of a block into sentences; the empty string ends a document."""
    sentences: list[str] = []
    for line in text.split("\n")[:-1]:
        if not line:
            sentences.append("")
            continue
        is_sentence = is_split or options.one_sentence_per_line
        for sentence in [line] if is_sentence else split_sentences(line, language=options.language):
            # Sources that are already split (treebanks) find punctuation by tags.
            if options.drop_punctuation and not is_split:
                sentence = drop_edge_punctuation(sentence)
            if sentence:
                sentences.append(sentence)
    return sentences


def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything in a fast tokenizer that determines the ids of a text."""
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: whole[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    if tokenizer.split_special_tokens:  # special tokens in a text are encoded like any other text
        parts["split_special_tokens"] = True
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of the ids below `vocab_size`: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def encoded_features(vocab_size: int) -> Features:
    """Columns of an encoded block; in `lengths` a 0 ends a document, every other number is that of a sentence."""
    columns = {"input_ids": token_dtype(vocab_size).name, "lengths": "uint32", "word_ends": "bool"}
    return Features({**{name: List(Value(kind)) for name, kind in columns.items()}, "dropped": Value("uint32")})


def encode_block(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, options: TextOptions) -> dict[str, Any]:
    """Split and encode a block without special tokens, for `Dataset.map`; a row has `text` and `is_split` of a Block.

    Returns `encoded_features`; `dropped` is the number of sentences without tokens. Cost: O(characters).
    """
    _end_with_parent(os.getpid())
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    backend.encode_special_tokens = tokenizer.split_special_tokens
    sentences = block_sentences(row["text"], row["is_split"], options)
    is_sentence = np.array([bool(sentence) for sentence in sentences], bool)
    texts = [sentence for sentence in sentences if sentence]
    dtype = token_dtype(len(tokenizer))
    tokens, sizes, word_ends = [np.zeros(0, dtype)], [np.zeros(0, np.uint32)], [np.zeros(0, bool)]
    for first in range(0, len(texts), SENTENCES_PER_CALL):
        encodings = _encode_batch(backend, texts[first : first + SENTENCES_PER_CALL])
        sizes.append(np.fromiter(map(len, encodings), np.uint32, len(encodings)))
        tokens.append(np.fromiter(chain.from_iterable(item.ids for item in encodings), dtype))
        word_ends.append(_word_ends([item.word_ids for item in encodings], sizes[-1]))
    lengths = np.zeros(len(sentences), np.uint32)
    lengths[is_sentence] = np.concatenate(sizes)
    is_dropped = is_sentence & (lengths == 0)
    return {
        "input_ids": np.concatenate(tokens),
        "lengths": lengths[~is_dropped],
        "word_ends": np.concatenate(word_ends),
        "dropped": int(is_dropped.sum()),
    }


def _encode_batch(backend: Tokenizer, sentences: list[str]) -> list[Encoding]:
    try:
        return backend.encode_batch(sentences, add_special_tokens=False)
    except Exception as error:  # tokenizers raises bare exceptions, e.g. if the unknown token is missing
        raise ValueError(
            f"The tokenizer cannot encode the text: {error}. Is its unknown token (unk_token) in the vocabulary? If "
            "not, add the unknown token to the vocabulary, or choose another tokenizer."
        ) from error


def _word_ends(word_ids: list[list[int | None]], lengths: np.ndarray) -> np.ndarray:
    """Bool per token, as `word_ends_from_word_ids` gives it sentence by sentence."""
    # -1 marks a token outside words, which counts as a word.
    ids = (ids if None not in ids else [-1 if word is None else word for word in ids] for ids in word_ids)
    word = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
    ends = np.append(word[1:] != word[:-1], True) | (word < 0) if len(word) else np.zeros(0, bool)
    ends[np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1] = True
    return ends


@cache
def _end_with_parent(process: int) -> None:
    """In a worker of `Dataset.map`: exit when the main process is killed, instead of waiting for work forever."""
    parent = multiprocess.parent_process()
    if parent is not None:
        threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
