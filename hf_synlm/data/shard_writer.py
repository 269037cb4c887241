"""Writing a prepared corpus shard by shard, so that a killed writer leaves whole shards and nothing else that counts.

The format is described in `shards.py`.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hf_synlm.data.encoding import EncodedBlock
from hf_synlm.data.shards import (
    ALIGNMENT,
    FORMAT,
    INDEX_FILE,
    MADE_FROM_FILE,
    ShardRecord,
    as_json,
    check_made_from,
    dropped,
    finished_shards,
    read_json,
    shard_path,
    to_disk,
    write_atomically,
)
from hf_synlm.data.sources import HINT

SHARD_TOKENS = 1 << 25
TOKENS_PER_SENTENCE = 8  # a shard holds at most one sentence per so many of its tokens, so that packing stays small
EMPTY_DOCUMENTS = "documents without sentences dropped"


class _OpenShard:
    """A shard that is being written: its tokens go to the file, its boundaries are kept until the end."""

    def __init__(self, path: Path, dtype: np.dtype, continues_document: bool):
        self.path, self.dtype = path, dtype
        self.file: BinaryIO = path.open("wb")
        self.digest = hashlib.sha256()
        self.tokens = self.sentences = 0
        self.sentence_ends: list[np.ndarray] = []
        self.document_ends: list[np.ndarray] = []
        self.word_ends: list[np.ndarray] = []
        self.counts: Counter[str] = Counter()
        # The end of a document that goes on counts even if it has no more sentences.
        self._document_end = -1 if continues_document else 0
        self._bits = np.zeros(0, bool)  # word ends that do not fill a byte yet

    def add(self, block: EncodedBlock) -> None:
        self._write(np.ascontiguousarray(block.tokens, self.dtype).tobytes())
        ends = self.sentences + block.document_ends
        is_new = np.diff(ends, prepend=self._document_end) > 0
        self.counts.update(block.counts)
        self.counts[EMPTY_DOCUMENTS] += int((~is_new).sum())
        self.document_ends.append(ends[is_new])
        if len(ends):
            self._document_end = int(ends[-1])
        self.sentence_ends.append(self.tokens + np.cumsum(block.sentence_lengths, dtype=np.int64))
        bits = np.concatenate([self._bits, block.word_ends])
        whole = len(bits) // 8 * 8
        self.word_ends.append(np.packbits(bits[:whole], bitorder="little"))
        self._bits = bits[whole:]
        self.tokens += len(block.tokens)
        self.sentences += len(block.sentence_lengths)

    def close(self) -> None:
        """Append the boundaries and bring the file to disk."""
        self.word_ends.append(np.packbits(self._bits, bitorder="little"))
        sections = ((self.sentence_ends, np.uint32), (self.document_ends, np.uint32), (self.word_ends, np.uint8))
        for parts, kind in sections:
            self._write(bytes(-self.file.tell() % ALIGNMENT))
            for part in parts:
                self._write(part.astype(kind).tobytes())
        to_disk(self.file)
        self.file.close()

    def record(self, position: dict[str, Any] | None) -> ShardRecord:
        return ShardRecord(
            tokens=self.tokens,
            sentences=self.sentences,
            documents=self.num_documents,
            bytes=self.path.stat().st_size,
            sha256=self.digest.hexdigest(),
            ends_inside_document=self.sentences > self._document_end,
            next=position,
            counts={name: count for name, count in sorted(self.counts.items()) if count},
        )

    @property
    def num_documents(self) -> int:
        return sum(map(len, self.document_ends))

    def delete(self) -> None:
        try:
            self.file.close()
        finally:  # closing writes what is buffered, and may fail as the write before it
            self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)


class CorpusWriter:
    """Writes encoded blocks as shards; what a killed writer has finished, the next one keeps.

    Memory: the boundaries of one shard. A shard ends with the block that fills it, if reading can begin after that.

    Args:
        folder: of the corpus; made if needed.
        made_from: what the corpus is made from, as JSON: another one is refused.
        dtype: of the tokens.
        shard_tokens: tokens that fill a shard.

    Raises:
        ValueError: the folder holds a corpus made from something else, or a damaged one.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, made_from: dict[str, Any], dtype: np.dtype, shard_tokens: int):
        if not 1 <= shard_tokens < 1 << 31:
            raise ValueError(f"shard_tokens is {shard_tokens}: choose a number from 1 to 2**31 - 1")
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.made_from = {"format": FORMAT, "dtype": dtype.name, "shard_tokens": shard_tokens, **made_from}
        folder.mkdir(parents=True, exist_ok=True)
        for partial in folder.glob("*.partial"):
            partial.unlink()
        self.records = finished_shards(folder)
        if self.records:
            check_made_from(folder, self.made_from)
        else:  # a first run that failed at once, by a wrong option perhaps, binds nobody
            write_atomically(folder / MADE_FROM_FILE, as_json(self.made_from))
        self._shard: _OpenShard | None = None
        self._position: dict[str, Any] | None = None

    @property
    def start(self) -> dict[str, Any] | None:
        """Position of the text to write next; `None` is its beginning."""
        if not self.records:
            return None
        if self._restart.is_file():
            restart = read_json(self._restart)
            if restart["shards"] == len(self.records):
                return restart["position"]
        return self.records[-1].next

    @property
    def _restart(self) -> Path:
        """File of the last position with its hint; it is not part of the corpus."""
        return self.folder / "restart.json"

    @property
    def is_complete(self) -> bool:
        """Whether the last shard ends with the text."""
        return bool(self.records) and self.records[-1].next is None

    @property
    def num_tokens(self) -> int:
        """Tokens written so far."""
        return sum(record.tokens for record in self.records) + (self._shard.tokens if self._shard else 0)

    @property
    def num_documents(self) -> int:
        """Documents whose end is written."""
        return sum(record.documents for record in self.records) + (self._shard.num_documents if self._shard else 0)

    def add(self, block: EncodedBlock) -> None:
        """Append a block.

        Args:
            block: the next one of the text.

        Raises:
            OSError: it cannot be written; what is unfinished is deleted.
        """
        with self._clear_errors():
            shard = self._open()
            is_full = max(shard.tokens, shard.sentences * TOKENS_PER_SENTENCE) >= self.shard_tokens
            # Not before there is more to write, so that no shard is empty.
            if is_full and self._position is not None and len(block.tokens):
                self._close(shard, self._position)
                shard = self._open()
            shard.add(block)
            self._position = block.position

    def finish(self) -> None:
        """Write the last shard and the index.

        Raises:
            ValueError: the text has no tokens; the message says what was dropped.
            OSError: they cannot be written.
        """
        names = ("tokens", "sentences", "documents")
        with self._clear_errors():
            if not self.is_complete:
                shard = self._open()
                if not self.num_tokens:
                    self.abandon()
                    what = dropped(shard.counts)
                    raise ValueError(f"The text for {self.folder} has no tokens. Check files and options{what}.")
                self._close(shard, None)
            counts: Counter[str] = Counter()
            for record in self.records:
                counts.update(record.counts)
            totals = {name: sum(getattr(record, name) for record in self.records) for name in names}
            index = {"shards": [asdict(record) for record in self.records], "counts": dict(counts), **totals}
            write_atomically(self.folder / INDEX_FILE, as_json({**index, "made_from": self.made_from}))
            self._restart.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Delete the shard that is not finished."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.delete()

    def _open(self) -> _OpenShard:
        if self._shard is None:
            path = shard_path(self.folder, len(self.records))
            continues_document = bool(self.records) and self.records[-1].ends_inside_document
            self._shard = _OpenShard(path.with_name(path.name + ".partial"), self.dtype, continues_document)
        return self._shard

    def _close(self, shard: _OpenShard, position: dict[str, Any] | None) -> None:
        """Bring a shard to disk, rename it, and write its record."""
        shard.close()
        at = position and position["at"]
        if position and at and HINT in at:
            write_atomically(self._restart, as_json({"shards": len(self.records) + 1, "position": position}))
            position = {**position, "at": {name: value for name, value in at.items() if name != HINT}}
        record, path = shard.record(position), shard_path(self.folder, len(self.records))
        os.replace(shard.path, path)
        self._shard = None
        write_atomically(path.with_suffix(".json"), as_json(asdict(record)))
        self.records.append(record)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Say which shard an error of the disk is about, and delete what is unfinished."""
        try:
            yield
        except OSError as error:
            with suppress(OSError):
                self.abandon()
            raise OSError(
                error.errno,
                f"{error.strerror}: shard {len(self.records)} of {self.folder} could not be written. The "
                f"{len(self.records)} shards before it are kept; make room and run the same command again",
            ) from error
