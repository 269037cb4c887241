# SPDX-License-Identifier: Apache-2.0
"""Text or treebanks -> vocabulary -> one stream of tokens -> segments or sentences: data of recurrent language models.

A corpus is read in one of two ways: as a stream, whose rows are read segment by segment with the state carried along,
or as single sentences between boundary tokens. Order and lengths of the batches are a function of (seed, number).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.arguments import option
from hf_synlm.data.collate import encode_words
from hf_synlm.data.gold_trees import gold_distances, gold_spans
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.streams import SentenceCode, StreamRows, TokenStream, collate_framed, make_stream, stream_remainder
from hf_synlm.data.text import errors_at, plural, read_lines
from hf_synlm.data.tokenizers import character_tokenizer
from hf_synlm.data.treebank import TreebankSentence, count_tags, parse_treebank, read_treebank, to_ptb_concat
from hf_synlm.training.engine.arguments import check_minimum
from hf_synlm.training.engine.samplers import EpochSampler
from hf_synlm.training.tasks.sentence_files import BatchedFileArguments, Sentences, load_or_make_tokenizer

SHORTEST_SEGMENT = 5
SEGMENT_DEVIATION = 5
HALF_LENGTH_SHARE = 0.05
TREE_TEST_LINES = 200  # that are read to tell trees from text
PIECE_LENGTH = 10_000  # words or characters that are encoded at once
Preprocessing = Literal["none", "ptb-concat", "words-only"]


@dataclass
class TextDataArguments(BatchedFileArguments):
    """Files of text or trees, and how their words become tokens; sentences are read one by one."""

    file_format: Literal["treebank", "text"] = option(
        "treebank", "'treebank': bracketed trees; 'text': one sentence per line, words separated by spaces."
    )
    preprocessing: Preprocessing = option(
        "none",
        "Of trees: 'none'; 'ptb-concat': lower case, numbers as N, no punctuation, as in Mikolov's corpus; "
        "'words-only': drop leaves whose tag is punctuation, $ or #.",
    )
    max_sentence_words: int | None = option(None, "Leave out sentences with more words, counted after preprocessing.")
    tokenizer_type: Literal["words", "characters"] = option("words", "Tokenizer to make.")
    max_batch_tokens: int = option(5000, "Sentences: largest padded size of a micro batch.")
    test_batch_size: int | None = option(
        None,
        "Rows or sentences in the evaluation of the test files; default: per_device_eval_batch_size. With one row "
        "of a stream every token is predicted from all before it.",
    )

    tokenizer_options = f"{BatchedFileArguments.tokenizer_options} file_format preprocessing max_sentence_words"
    batching = "sentences"
    bptt = 0
    tree_supervision = False
    binarized_spans = False
    min_sentence_words = 0

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "max_batch_tokens max_sentence_words test_batch_size")
        if self.tokenizer_type == "characters":
            self._check_defaults("belongs to words, not to characters", "lowercase", "replace_numbers",
                                 "tokenizer_vocab_size", "unknown_words")  # fmt: skip
        if self.file_format == "text":
            self._check_defaults("needs trees", "preprocessing")
            if not self.train_files:
                raise ValueError("train_files are not set. Pass files of text, one sentence per line.")
        super().__post_init__()
        if self.file_format == "text":
            check_text(*self.files)

    def make_tokenizer(self, sentences: Sentences, end_token: bool) -> PreTrainedTokenizerBase:
        """Make a tokenizer from sentences: of words, or of characters, always with an end token."""
        if self.tokenizer_type == "characters":
            return character_tokenizer(map(" ".join, sentences), min_count=self.tokenizer_min_frequency)
        return super().make_tokenizer(sentences, end_token)

    def _check_defaults(self, reason: str, *names: str) -> None:
        """Raise ValueError for an argument that is not its default."""
        for name in names:
            value = getattr(self, name)
            if value != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} is {value!r}, which {reason}. Leave it out.")

    def describe(self, kind: str = "trees") -> str:
        """Sentences for the model card."""
        prepared = "" if self.preprocessing == "none" else f" Preprocessing: {self.preprocessing}."
        return super().describe(kind if self.tree_supervision else "text") + prepared


@dataclass
class StreamDataArguments(TextDataArguments):
    """Files of text or trees, how they become tokens, and how the tokens are read."""

    batching: Literal["stream", "sentences"] = option(
        "stream", "'stream': segments of running text, the state carried along; 'sentences': one by one."
    )
    bptt: int = option(70, "Usual length of a segment in tokens.")
    variable_bptt: bool = option(
        True, "Draw the length of each training segment around bptt (or half of it), and scale its rate."
    )
    tree_supervision: bool = option(False, "Train on the gold trees too: distances (ON-LSTM, PRPN) or spans (PaLM).")
    binarized_spans: bool = option(False, "PaLM: spans that binarization to the right adds are gold, too.")

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 1, "bptt")
        if self.file_format == "text":
            self._check_defaults("needs trees", "tree_supervision")
        super().__post_init__()


def check_text(*paths: str) -> None:
    """Raise ValueError for a file that begins with a tree: its brackets and labels would be learned as words."""
    for path in paths:
        if any(line.count("\t") == 9 for line in islice(read_lines(path), TREE_TEST_LINES)):
            raise ValueError(f"{path!r} is a treebank in CoNLL-U. Use --file-format treebank, or pass a file of words.")
        trees = parse_treebank(islice(read_lines(path), TREE_TEST_LINES), split_leaves=True)
        try:
            tree = next(trees, None)
        except ValueError:
            continue  # not a tree
        # A bare leaf such as (laughter continues) may be text.
        if tree is not None and any(label != "ROOT" for label, _, _ in tree.labeled_spans):
            raise ValueError(f"{path!r} begins with a tree. Use --file-format treebank, or pass a file of words.")


# ---------------------------------------------------------------------------------------------- text
def read_trees(
    paths: Sequence[str], preprocessing: Preprocessing = "none", reading: dict[str, Any] | None = None
) -> Iterator[TreebankSentence]:
    """Read treebank files and preprocess their sentences; those without words are left out."""
    reading = reading or {}
    if preprocessing == "words-only":
        _check_tags(tuple(paths), json.dumps(reading))
    for path in paths:
        for sentence in read_treebank(path, **reading):
            if preprocessing == "words-only":
                prepared = sentence.select_words(keep_words(sentence.words, sentence.tags, "tag"))
            else:
                prepared = to_ptb_concat(sentence) if preprocessing == "ptb-concat" else sentence
            if prepared is not None and prepared.words:
                yield prepared


@cache
def _check_tags(paths: tuple[str, ...], reading: str) -> None:
    """Raise ValueError where tags do not tell words; files that are read again were checked."""
    remedy = f"leave out the preprocessing 'words-only' of {', '.join(paths)}"
    check_tags(count_tags(paths, **json.loads(reading)), remedy)


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


def first_item(items: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The batch in `items`, a list of one."""
    return items[0]


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


@dataclass
class FramedCollator:
    """Numbers of sentences -> a batch for `forward`; `begins` and `rate_scale` are as for segments."""

    stream: TokenStream
    pad_token_id: int

    def __call__(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Collate."""
        return {**collate_framed(self.stream, numbers, self.pad_token_id), "begins": True, "rate_scale": 1.0}
