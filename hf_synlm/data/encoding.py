"""Text -> sentences -> token ids, block by block and on several processes.

A block is about a megabyte of lines. Its boundaries depend on the text alone, blocks are encoded independently, and
results keep their order; so the result does not depend on the number of processes. Only a few blocks are in memory at
any time.
"""

import gc
import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import chain
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers import Encoding, Tokenizer
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.text import split_sentences

if TYPE_CHECKING:  # workers do not need sources, which import large libraries
    from hf_synlm.data.sources import TextSource

BLOCK_CHARACTERS = 1 << 20
SENTENCES_PER_CALL = 1024

# What is counted, as it is printed.
NULS = "NUL characters dropped"
SURROGATES = "lone surrogates replaced"
EMPTY_SENTENCES = "sentences without tokens dropped"

_SURROGATE = re.compile("[\ud800-\udfff]")
# Marks at the edge of a word; inside a word (don't, 3.5, well-known) they stay.
_EDGE_PUNCTUATION = re.compile(r"(?<!\w)[^\w\s]+|[^\w\s]+(?!\w)")


@dataclass(frozen=True)
class TextOptions:
    """How lines become sentences.

    Attributes:
        one_sentence_per_line: lines are sentences and are not split.
        language: ISO 639 code for the splitting.
        drop_punctuation: remove punctuation at word edges, as in grammar induction (Kim et al. 2019).
    """

    one_sentence_per_line: bool = False
    language: str = "en"
    drop_punctuation: bool = False


@dataclass
class Block:
    """Some lines of a corpus.

    Attributes:
        lines: without surrounding white space; an empty line ends a document.
        is_split: every line is already a sentence.
        position: where reading resumes after the block (JSON); `None` inside a row of a table.
        counts: what was replaced or dropped while reading.
    """

    lines: list[str]
    is_split: bool
    position: dict[str, Any] | None
    counts: Counter[str] = field(default_factory=Counter)


@dataclass
class EncodedBlock:
    """A block as token ids.

    Attributes:
        tokens: the ids.
        sentence_lengths: uint32, tokens of each sentence, at least one.
        word_ends: bool, per token, True at the last token of each word.
        document_ends: int64, number of sentences before each end of a document; a document may begin in an earlier
            block, and a document without sentences repeats the value before it.
        position: of the block.
        counts: what was replaced or dropped, by reading and by encoding.
    """

    tokens: np.ndarray
    sentence_lengths: np.ndarray
    word_ends: np.ndarray
    document_ends: np.ndarray
    position: dict[str, Any] | None
    counts: Counter[str]


# ---------------------------------------------------------------------------------------------- reading
def read_blocks(
    sources: "Sequence[TextSource]",
    start: dict[str, Any] | None = None,
    *,
    skip_documents: int = 0,
    max_documents: int | None = None,
    block_characters: int = BLOCK_CHARACTERS,
) -> Iterator[Block]:
    """Read sources as blocks of lines.

    A block ends with the document that makes it `block_characters` long, or inside a document at twice that size.

    Args:
        sources: read one after the other.
        start: the `position` of a block, to read what follows it; default: the beginning.
        skip_documents: number of documents to leave out at the beginning.
        max_documents: largest number of documents to read.
        block_characters: size of a block.

    Yields:
        The blocks.
    """
    at = start or {"source": 0, "at": None, "documents": 0, "open": False}
    documents, is_open = at["documents"], at["open"]
    last = None if max_documents is None else skip_documents + max_documents
    lines: list[str] = []
    size, counts = 0, Counter[str]()

    def take(source: "TextSource", position: dict[str, Any] | None) -> Block:
        nonlocal lines, size
        block = Block(lines, source.is_split, position, counts.copy())
        lines, size = [], 0
        counts.clear()
        return block

    for number in range(at["source"], len(sources)):
        source = sources[number]
        for row in source.rows(at["at"] if number == at["source"] else None, counts):
            is_cut = False
            for number_of_line, line in enumerate(row, 1):
                if not line and not is_open:
                    continue
                if documents >= skip_documents:
                    lines.append(line)
                    size += len(line) + 1
                is_open = bool(line)
                documents += not line
                if documents == last and not is_open:
                    yield take(source, None)
                    return
                if size >= 2 * block_characters and number_of_line < len(row):
                    yield take(source, None)
                    is_cut = True
            if documents < skip_documents:
                counts.clear()
            # After a row that was cut, the end of the row is the next place where reading can resume.
            if is_cut or (size >= block_characters and (not is_open or size >= 2 * block_characters)):
                here = {"source": number, "at": source.position(), "documents": documents, "open": is_open}
                yield take(source, here)
        # A block has lines of one source, because sources differ in `is_split`.
        yield take(source, {"source": number + 1, "at": None, "documents": documents, "open": is_open})


def block_sentences(block: Block, options: TextOptions) -> tuple[list[str], list[int], Counter[str]]:
    """Split a block into sentences.

    NUL characters are dropped, and lone surrogates, which tokenizers reject, are replaced by U+FFFD.

    Args:
        block: the lines.
        options: how to split.

    Returns:
        The sentences; the number of sentences before each end of a document; what was replaced or dropped.
    """
    counts: Counter[str] = Counter()
    sentences: list[str] = []
    document_ends: list[int] = []
    for line in _clean_lines(block.lines, counts):
        if not line:
            document_ends.append(len(sentences))
            continue
        is_sentence = block.is_split or options.one_sentence_per_line
        for sentence in [line] if is_sentence else split_sentences(line, language=options.language):
            # Sources that are already split (treebanks) find punctuation by tags.
            if options.drop_punctuation and not block.is_split:
                sentence = " ".join(_EDGE_PUNCTUATION.sub(" ", sentence).split())
            if sentence:
                sentences.append(sentence)
    return sentences, document_ends, counts


def _clean_lines(lines: list[str], counts: Counter[str]) -> list[str]:
    """Lines without NUL characters and lone surrogates; a line that becomes empty by this does not end a document."""
    text = "\n".join(lines)
    nuls, surrogates = text.count("\0"), 0
    try:
        text.encode()
    except UnicodeEncodeError:
        surrogates = len(_SURROGATE.findall(text))
    if not nuls and not surrogates:
        return lines
    counts[NULS] += nuls
    counts[SURROGATES] += surrogates
    cleaned = ((line, _SURROGATE.sub("\ufffd", line.replace("\0", "")).strip()) for line in lines)
    return [new for old, new in cleaned if new or not old]


# ---------------------------------------------------------------------------------------------- encoding
def tokenizer_sha256(tokenizer: PreTrainedTokenizerBase) -> str:
    """Hash everything in a fast tokenizer that determines the ids of a text.

    Args:
        tokenizer: a fast tokenizer.

    Returns:
        Hexadecimal SHA-256 of its normalizer, pre-tokenizer, model and added tokens, and of `split_special_tokens` if
        that is set.
    """
    whole = json.loads(tokenizer.backend_tokenizer.to_str())
    parts = {name: whole[name] for name in ("normalizer", "pre_tokenizer", "model", "added_tokens")}
    if tokenizer.split_special_tokens:  # special tokens in a text are encoded like any other text
        parts["split_special_tokens"] = True
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


class BlockEncoder:
    """Encodes blocks without special tokens; cheap to send to another process.

    Args:
        tokenizer: a fast tokenizer.
        options: how lines become sentences.
        dtype: of the ids.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: TextOptions, dtype: np.dtype):
        self.options, self.dtype = options, dtype
        self._json = tokenizer.backend_tokenizer.to_str()
        self._is_split_special = bool(tokenizer.split_special_tokens)
        self._backend: Tokenizer | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state with the tokenizer as JSON."""
        return {**self.__dict__, "_backend": None}

    def __call__(self, block: Block) -> EncodedBlock:
        """Split and encode a block. Cost: O(characters).

        Args:
            block: lines of text.

        Returns:
            Its sentences as token ids.

        Raises:
            ValueError: the tokenizer has no token for a part of the text.
        """
        if self._backend is None:
            self._backend = Tokenizer.from_str(self._json)
            self._backend.no_truncation()
            self._backend.no_padding()
            self._backend.encode_special_tokens = self._is_split_special
        sentences, ends, counts = block_sentences(block, self.options)
        tokens, lengths, word_ends = [np.zeros(0, self.dtype)], [np.zeros(0, np.uint32)], [np.zeros(0, bool)]
        for first in range(0, len(sentences), SENTENCES_PER_CALL):
            encodings = self._encode_batch(sentences[first : first + SENTENCES_PER_CALL])
            sizes = np.fromiter(map(len, encodings), np.uint32, len(encodings))
            tokens.append(np.fromiter(chain.from_iterable(item.ids for item in encodings), self.dtype))
            lengths.append(sizes)
            word_ends.append(_word_ends([item.word_ids for item in encodings], sizes))
        length_of = np.concatenate(lengths)
        has_tokens = length_of > 0
        before = np.concatenate([[0], np.cumsum(has_tokens)])
        counts[EMPTY_SENTENCES] += len(sentences) - int(before[-1])
        return EncodedBlock(
            np.concatenate(tokens),
            length_of[has_tokens],
            np.concatenate(word_ends),
            before[np.array(ends, np.int64)],
            block.position,
            block.counts + counts,
        )

    def _encode_batch(self, sentences: list[str]) -> list[Encoding]:
        assert self._backend is not None
        try:
            return self._backend.encode_batch(sentences, add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare exceptions, e.g. if the unknown token is missing
            raise ValueError(
                f"The tokenizer cannot encode the text: {error}. Give its vocabulary the unknown token that its model "
                "names, or choose another tokenizer."
            ) from error


def _word_ends(word_ids: list[list[int | None]], lengths: np.ndarray) -> np.ndarray:
    """Bool per token, as `word_ends_from_word_ids` gives it sentence by sentence."""
    # -1 marks a token outside words, which counts as a word.
    ids = (ids if None not in ids else [-1 if word is None else word for word in ids] for ids in word_ids)
    word = np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum()))
    ends = np.append(word[1:] != word[:-1], True) | (word < 0) if len(word) else np.zeros(0, bool)
    ends[np.cumsum(lengths, dtype=np.int64)[lengths > 0] - 1] = True
    return ends


# ---------------------------------------------------------------------------------------------- processes
_encoder: BlockEncoder


def _start_worker(encoder: BlockEncoder) -> None:
    """Keep the encoder for all blocks, use one thread, and exit when the main process is killed."""
    global _encoder
    _encoder = encoder
    gc.freeze()  # otherwise every collection copies the memory shared with the parent process
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    # Otherwise the workers of a killed process wait for work forever.
    wait([sentinel])
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    return _encoder(block)


def encode_blocks(blocks: Iterable[Block], encoder: BlockEncoder, num_processes: int) -> Generator[EncodedBlock]:
    """Encode blocks in their order.

    Args:
        blocks: read as they are needed.
        encoder: what to do with a block.
        num_processes: number of worker processes; with 1 the calling process encodes, and the tokenizer may use several
            threads.

    Yields:
        The encoded blocks.

    Raises:
        RuntimeError: a worker process was killed.
    """
    if num_processes == 1:
        yield from map(encoder, blocks)
        return
    # Workers are forked from a small process without threads, never from this one.
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(num_processes, context, _start_worker, (encoder,))
    waiting: deque[Future[EncodedBlock]] = deque()
    try:
        for block in blocks:
            waiting.append(pool.submit(_encode, block))
            if len(waiting) > 2 * num_processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            "A process that encodes text was killed, perhaps for lack of memory. Finished shards are kept: run the "
            "same command again, with fewer processes if memory is short."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
