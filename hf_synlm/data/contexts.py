# SPDX-License-Identifier: Apache-2.0
"""Contexts of whole sentences over a prepared corpus: which sentences share a context, and reading one of them.

Sentences are packed in order: a context ends when the next sentence does not fit; it may contain the end of one
document and the beginning of the next. A sentence longer than a context is cut into pieces of `context_length` tokens,
each of which counts as a sentence; no token is lost. The end token of a document is a separate sentence; it is left out
if it does not fit, because at the beginning of a context it would end nothing. The last context of a shard stays short.

The beginnings of contexts are computed once from the boundaries of sentences, without reading a token, and stored next
to the shards: 8 bytes per context.

Shapes: S sentences of a shard, U units (sentences, or pieces of long ones), C contexts.
"""

import hashlib
import io
import json
import logging
from collections import Counter
from typing import Any

import numpy as np
import torch
from filelock import FileLock

from hf_synlm.data.files import write_bytes, write_json
from hf_synlm.data.shards import PreparedCorpus, Shard
from hf_synlm.data.text import plural

logger = logging.getLogger(__name__)


def pack_sentences(
    sentence_ends: np.ndarray,
    document_ends: np.ndarray,
    context_length: int,
    *,
    max_sentence_tokens: int | None = None,
    mark_documents: bool = False,
) -> tuple[np.ndarray, dict[str, int]]:
    """Find the beginning of each context.

    `sentence_ends` [S] are numbers of tokens, `document_ends` numbers of sentences, both increasing. Sentences of more
    than `max_sentence_tokens` are left out. With `mark_documents` an end token follows each document that has a
    sentence left, if it fits.

    Returns uint32 [C, 2], per context the numbers of its first sentence and its first token; and the numbers of
    contexts, tokens and sentences (marks and pieces included), sentences cut, and sentences left out.

    Cost: O(S) array operations, and a step per context.
    """
    starts = np.concatenate([[0], sentence_ends[:-1]]).astype(np.int64) if len(sentence_ends) else np.zeros(0, np.int64)
    lengths = sentence_ends - starts
    kept = np.flatnonzero(lengths <= (np.inf if max_sentence_tokens is None else max_sentence_tokens))
    starts, lengths = starts[kept], lengths[kept]
    pieces = -(-lengths // context_length)
    sentence_U = np.repeat(kept, pieces)
    inside_U = np.arange(len(sentence_U)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # number of the piece
    start_U = np.repeat(starts, pieces) + inside_U * context_length
    length_U = np.minimum(np.repeat(starts + lengths, pieces) - start_U, context_length)
    mark_U = np.zeros(len(start_U), bool)
    if mark_documents:
        # The last unit of its document: the next one is in a later document, or there is none and the document ends.
        document_U = np.searchsorted(document_ends, sentence_U, side="right")
        mark_U = np.diff(document_U, append=len(document_ends)) > 0
    stop_U = np.cumsum(length_U + mark_U) - mark_U
    before_U = stop_U - length_U
    next_U = np.searchsorted(stop_U, before_U + context_length, side="right")
    first, opening = 0, []
    while first < len(next_U):
        opening.append(first)
        first = int(next_U[first])
    opening_C = np.array(opening, np.int64)
    sizes = np.diff(opening_C, append=len(next_U))
    # Only the mark after the last unit of a context may not fit.
    fill_U = stop_U - np.repeat(before_U[opening_C], sizes)
    num_marks = int((mark_U & (fill_U < context_length)).sum())
    totals = {
        "contexts": len(opening),
        "tokens": int(length_U.sum()) + num_marks,
        "sentences": len(length_U) + num_marks,
        "cut": int((pieces > 1).sum()),
        "left_out": len(sentence_ends) - len(kept),
    }
    return np.stack([sentence_U[opening_C], start_U[opening_C]], axis=1).astype(np.uint32), totals


class ContextDataset(torch.utils.data.Dataset):
    """Contexts of whole sentences of a prepared corpus.

    An item has `input_ids` and `sentence_ids` (1, 2, ... inside the context), both int64, and with `with_word_ends` the
    bools `word_ends`, True at the last token of each word. Reading an item costs O(its tokens).

    Sentences of more than `max_sentence_tokens` are left out; the token `end_of_document_id` follows every document as
    a separate sentence, if it fits into the context.
    """

    def __init__(
        self,
        corpus: PreparedCorpus,
        context_length: int,
        *,
        max_sentence_tokens: int | None = None,
        end_of_document_id: int | None = None,
        with_word_ends: bool = False,
    ):
        self.corpus, self.context_length = corpus, context_length
        self.max_sentence_tokens, self.end_of_document_id = max_sentence_tokens, end_of_document_id
        self.with_word_ends = with_word_ends
        self._path = corpus.folder / f"contexts_{self.fingerprint()}.npy"
        self._opening, self._totals = self._read_index() or self._make_index()
        self._first_of_shard = np.cumsum([0, *self._totals["contexts_of_shards"]])
        if not len(self):
            raise ValueError(
                f"{corpus.folder} gives no context, only {plural(self._totals['left_out'], 'sentence')} of more than "
                f"{max_sentence_tokens} tokens. Raise --max-sentence-tokens, or name other text."
            )

    def __getstate__(self) -> dict[str, Any]:
        """The state without a memory-mapped index."""
        is_mapped = isinstance(self._opening, np.memmap)
        return {**self.__dict__, "_opening": None if is_mapped else self._opening}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Map the index again."""
        self.__dict__.update(state)
        if self._opening is None:
            self._opening = np.load(self._path, mmap_mode="r")

    # ------------------------------------------------------------------------------------------ index
    def _read_index(self) -> tuple[np.ndarray, dict[str, Any]] | None:
        """Read the index next to the shards; `None` if it is missing or truncated."""
        record = self._path.with_suffix(".json")
        if not record.is_file():
            return None
        try:
            totals, opening = json.loads(record.read_bytes()), np.load(self._path, mmap_mode="r")
        except (ValueError, FileNotFoundError):
            return None
        return (opening, totals) if opening.shape == (totals["contexts"], 2) else None

    def _make_index(self) -> tuple[np.ndarray, dict[str, Any]]:
        """Pack all shards, and store the result next to them if the folder is writable."""
        try:
            with FileLock(self.corpus.folder / ".lock"):
                if (known := self._read_index()) is not None:  # another process was faster
                    return known
                opening, totals = self._pack()
                buffer = io.BytesIO()
                np.save(buffer, opening)
                write_bytes(self._path, buffer.getvalue())
                write_json(self._path.with_suffix(".json"), totals)
        except OSError as error:
            logger.warning("The index of contexts is kept in memory, because it cannot be written: %s", error)
            return self._pack()
        return self._read_index() or (opening, totals)

    def _pack(self) -> tuple[np.ndarray, dict[str, Any]]:
        parts, totals, sizes = [], Counter[str](), []
        for number in range(len(self.corpus.records)):
            shard = self.corpus.shard(number)
            opening, counts = pack_sentences(
                shard.sentence_ends,
                shard.document_ends,
                self.context_length,
                max_sentence_tokens=self.max_sentence_tokens,
                mark_documents=self.end_of_document_id is not None,
            )
            parts.append(opening)
            sizes.append(len(opening))
            totals.update(counts)
        return np.concatenate(parts), {**totals, "contexts_of_shards": sizes}

    def fingerprint(self) -> str:
        """Hash of the corpus and of the options of its contexts; the place of the corpus does not matter."""
        settings = (self.context_length, self.max_sentence_tokens, self.end_of_document_id, self.with_word_ends)
        return hashlib.sha256(repr((self.corpus.fingerprint(), *settings)).encode()).hexdigest()[:16]

    def totals(self) -> dict[str, int]:
        """Numbers of contexts, tokens, sentences, cut sentences, and sentences left out as too long."""
        return {name: self._totals[name] for name in ("contexts", "tokens", "sentences", "cut", "left_out")}

    def describe(self) -> str:
        """One line about the size."""
        n = self.totals()
        return (
            f"{plural(n['contexts'], 'context')}, {plural(n['sentences'], 'sentence')}, {plural(n['tokens'], 'token')} "
            f"({plural(n['cut'], 'sentence')} cut at the context length, {n['left_out']:,} left out as too long)"
        )

    # ------------------------------------------------------------------------------------------ items
    def __len__(self) -> int:
        return self._totals["contexts"]

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        """One context."""
        if not -len(self) <= index < len(self):
            raise IndexError(f"context {index} does not exist: there are {len(self)}")
        index %= len(self)
        number = int(np.searchsorted(self._first_of_shard, index, side="right")) - 1
        shard = self.corpus.shard(number)
        first, start = self._opening[index].tolist()
        if index + 1 < self._first_of_shard[number + 1]:
            last, stop = self._opening[index + 1].tolist()
        else:
            last, stop = len(shard.sentence_ends), len(shard.input_ids)
        return self._read(shard, first, last, start, stop)

    def _read(self, shard: Shard, first: int, last: int, start: int, stop: int) -> dict[str, np.ndarray]:
        """Tokens start .. stop - 1, which begin in sentence `first` and end before or in sentence `last`."""
        bounds = np.concatenate([[start], shard.sentence_ends[first:last], [stop]]).astype(np.int64)
        if bounds[-1] == bounds[-2]:
            bounds = bounds[:-1]
        lengths = np.diff(bounds)
        ids = shard.input_ids[start:stop].astype(np.int64)
        ends = shard.word_ends(start, stop) if self.with_word_ends else None
        is_kept = lengths <= (np.inf if self.max_sentence_tokens is None else self.max_sentence_tokens)
        if not is_kept.all():
            mask = np.repeat(is_kept, lengths)
            ids, ends = ids[mask], ends if ends is None else ends[mask]
        lengths = lengths[is_kept]
        if self.end_of_document_id is not None:
            at = self._marks(shard, first, last, is_kept, lengths)
            positions = np.cumsum(lengths)[at - 1]
            ids = np.insert(ids, positions, self.end_of_document_id)
            ends = ends if ends is None else np.insert(ends, positions, True)
            lengths = np.insert(lengths, at, 1)
        item = {"input_ids": ids, "sentence_ids": np.repeat(np.arange(1, len(lengths) + 1), lengths)}
        return item if ends is None else {**item, "word_ends": ends}

    def _marks(self, shard: Shard, first: int, last: int, is_kept: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Number of kept sentences before each end token of a document."""
        low, high = np.searchsorted(shard.document_ends, np.array([first + 1, last + 1], np.uint32))
        document_ends = shard.document_ends[low:high].astype(np.int64) - first
        before = np.cumsum(is_kept)[document_ends - 1]
        before = before[np.diff(before, prepend=0) > 0]  # documents that have a sentence left
        # Only the last one may not fit.
        return before[:-1] if lengths.sum() + len(before) > self.context_length else before
