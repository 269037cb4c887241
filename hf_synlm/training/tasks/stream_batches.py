# SPDX-License-Identifier: Apache-2.0
"""Text or treebanks -> vocabulary -> one stream of tokens -> segments or sentences: data of recurrent language models.

A corpus is read in one of two ways: as a stream, whose rows are read segment by segment with the state carried along,
or as single sentences between boundary tokens. Order and lengths of the batches are a function of (seed, number).
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import encode_words
from hf_synlm.data.gold_trees import gold_distances, gold_spans
from hf_synlm.data.streams import SentenceCode, StreamRows, TokenStream, make_stream, stream_remainder
from hf_synlm.data.text import errors_at, plural, read_lines
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.training.arguments.text import TextDataArguments, read_trees
from hf_synlm.training.engine.samplers import EpochSampler
from hf_synlm.training.tasks.word_tokenizers import load_or_make_tokenizer

SHORTEST_SEGMENT = 5
SEGMENT_DEVIATION = 5
HALF_LENGTH_SHARE = 0.05
PIECE_LENGTH = 10_000  # words or characters that are encoded at once


# ---------------------------------------------------------------------------------------------- text


def read_words(paths: Sequence[str], data: TextDataArguments) -> Iterator[Sequence[str]]:
    """Words of every sentence of `min_sentence_words` up to `max_sentence_words`.

    Blank lines of a text are sentences without words, as in WikiText's counts.
    """
    if data.file_format == "treebank":
        trees = read_trees(paths, data.preprocessing, data.reading)
        sentences: Iterable[Sequence[str]] = (tree.words for tree in trees)
    else:
        sentences = (line.split() for path in paths for line in read_lines(path))
    longest = data.max_sentence_words or math.inf
    return (words for words in sentences if data.min_sentence_words <= len(words) <= longest)


def make_stream_tokenizer(
    accelerator: Accelerator, data: TextDataArguments, name: str | None, output_dir: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer `name`, or make one from the training text; its end token is the boundary of sentences."""
    words = partial(read_words, data.train_files, data)
    return load_or_make_tokenizer(accelerator, data, name, output_dir, words, "pad_token", "eos_token")


def boundary_ids(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | None]:
    """Special tokens of a model of a stream, for its configuration: one boundary begins and ends sentences."""
    boundary = tokenizer.eos_token_id
    return {"bos_token_id": boundary, "eos_token_id": boundary, "pad_token_id": tokenizer.pad_token_id}


def load_stream(
    data: TextDataArguments, paths: Sequence[str], tokenizer: PreTrainedTokenizerBase, gold: str | None = None
) -> TokenStream:
    """Encode files as a stream, with `gold` "distances" or "spans" of the trees, or `None`."""
    codes: Iterable[SentenceCode]
    if gold is None:
        codes = _encode_lines(read_words(paths, data), tokenizer)
    else:
        trees, limit = read_trees(paths, data.preprocessing, data.reading), data.max_sentence_words or math.inf
        kept = (tree for tree in trees if len(tree.words) <= limit)
        codes = (_encode_tree(tree, tokenizer, gold, data.binarized_spans) for tree in kept)
    with errors_at(", ".join(paths)):
        return make_stream(codes, tokenizer.eos_token_id)


def _encode_lines(lines: Iterator[Sequence[str]], tokenizer: PreTrainedTokenizerBase) -> Iterator[SentenceCode]:
    """Encode sentences, many at once; a corpus may also be a single line."""
    while block := list(islice(lines, 1000)):
        pieces = [_pieces(words) for words in block]
        texts = [text for texts in pieces for text in texts]
        encode = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
        ids = iter(tokenizer(texts, **encode)["input_ids"] if texts else [])
        for texts in pieces:
            yield SentenceCode([token for _ in texts for token in next(ids)])


def _pieces(words: Sequence[str]) -> list[str]:
    starts = range(0, len(words), PIECE_LENGTH)
    return [" " * (start > 0) + " ".join(words[start : start + PIECE_LENGTH]) for start in starts]


def _encode_tree(
    sentence: TreebankSentence, tokenizer: PreTrainedTokenizerBase, gold: str, binarized: bool
) -> SentenceCode:
    ids, word_ends = encode_words(tokenizer, sentence.words)
    if gold == "distances":
        return SentenceCode(ids, distances=gold_distances(sentence.spans, word_ends))
    return SentenceCode(ids, spans=gold_spans(sentence.spans, word_ends, binarized=binarized))


def stream_fingerprint(stream: TokenStream) -> str:
    """Hash of a stream."""
    digest = hashlib.sha256()
    for values in (stream.ids, stream.starts, stream.distances, stream.spans):
        digest.update(b"-" if values is None else np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()[:16]


def describe_stream(stream: TokenStream) -> str:
    """One line about the size of `stream`; its tokens are the predicted ones, boundaries included."""
    return f"{plural(stream.num_sentences, 'sentence')}, {plural(len(stream) - 1, 'token')}"


# ---------------------------------------------------------------------------------------------- segments
class Segment(NamedTuple):
    """Columns of the rows of a stream.

    Fields:
        offset: of the rows of this epoch.
        start: first column; 0 begins an epoch, and the state begins anew.
        length: number of columns.
        rate_scale: factor of the learning rate: drawn length over usual length.
    """

    offset: int
    start: int
    length: int
    rate_scale: float


class SegmentSampler(EpochSampler):
    """Segments, as batches of one; all processes read the same columns, each in rows of its own.

    The length of a segment is drawn from N(base, 5), rounded down, at least 5, where base is `bptt`, or half of it in
    one of twenty cases; the learning rate is scaled by the drawn length over `bptt`. Without `variable`, all lengths
    are `bptt`. An epoch ends with the rows: the last segment is cut there, and less than 5 tokens that would be left
    are part of the one before. Which tokens are left over by rows of equal length differs from epoch to epoch. Epoch e
    is a function of (seed, e). `num_rows` and `consumed` (segments) count all processes together.

    Source: Merity et al. (2018), section 5, and their code; the offset is PRPN's.
    """

    def __init__(self, num_tokens: int, num_rows: int, bptt: int, variable: bool, seed: int, consumed: int = 0):
        super().__init__(consumed=consumed)
        self.remainder, self.num_columns = stream_remainder(num_tokens, num_rows)
        self.bptt, self.variable, self.seed = bptt, variable, seed

    def epoch_batches(self, epoch: int) -> list[list[Segment]]:
        """All segments of an epoch, in their order."""
        generator = np.random.default_rng([self.seed, epoch])
        offset = int(generator.integers(self.remainder + 1))
        shortest = min(SHORTEST_SEGMENT, self.bptt)
        lengths = np.full(self.num_columns // shortest + 1, self.bptt)
        if self.variable:
            halves = generator.random(len(lengths)) < HALF_LENGTH_SHARE
            drawn = generator.normal(np.where(halves, self.bptt / 2, self.bptt), SEGMENT_DEVIATION)
            lengths = np.maximum(shortest, drawn.astype(np.int64))
        segments: list[list[Segment]] = []
        start = 0
        for length in lengths.tolist():
            left = self.num_columns - start
            used = left if left - length < shortest else length
            segments.append([Segment(offset, start, used, length / self.bptt if self.variable else 1.0)])
            start += used
            if start == self.num_columns:
                break
        return segments


class SegmentDataset(torch.utils.data.Dataset):
    """Rows of a stream, of all processes and of this one (`rows`); the item of a `Segment` is a batch for `forward`."""

    def __init__(self, stream: TokenStream, num_rows: int, rows: range):
        self.stream, self.num_rows, self.rows = stream, num_rows, rows

    def __getitem__(self, segment: Segment) -> dict[str, Any]:
        """A batch; `begins` and `rate_scale` are not for `forward`."""
        rows = StreamRows(self.stream, self.num_rows, offset=segment.offset)
        batch = rows.segment(segment.start, segment.length, self.rows)
        return {**batch, "begins": segment.start == 0, "rate_scale": segment.rate_scale}


# ---------------------------------------------------------------------------------------------- sentences
class SentenceDataset(torch.utils.data.Dataset):
    """Numbers of the sentences of a stream, which `collate_framed` turns into batches; empty lines are left out."""

    def __init__(self, stream: TokenStream):
        lengths = np.diff(stream.starts) - 1
        self.stream = stream
        self.numbers = np.flatnonzero(lengths)
        self.lengths = lengths[self.numbers] + 2
        if not len(self.numbers):
            raise ValueError("All sentences are empty. Check the files.")

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> int:
        """Number of a sentence in the stream."""
        return int(self.numbers[index])
