"""A corpus of token ids on disk: memory-mapped shards with the boundaries of sentences, documents and words.

    FOLDER/made_from.json     what the corpus is made from; written first
    FOLDER/shard_00000.bin    token ids from byte 0 on, uint16 or uint32 depending on the size of the vocabulary; then,
                              each from a multiple of 8 bytes on: sentence ends, document ends, word ends
    FOLDER/shard_00000.json   sizes, checksum, what was dropped, and where the text of the next shard begins
    FOLDER/corpus.json        the index: all shards and the totals; written last, so only a complete corpus has one

Sentence ends are uint32 positions in the shard's tokens, document ends uint32 positions in its sentences. Word ends are
one bit per token (lowest first): a byte would make them half as large as the tokens. A file is written under a
temporary name and renamed when it is on disk. A shard counts when its JSON file exists, so a killed `CorpusWriter`
leaves only whole shards, and the next one continues after them.
"""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from hf_synlm.data.files import PARTIAL_SUFFIX, file_sha256, read_json, remove_partial, write_json
from hf_synlm.data.sources import HINT
from hf_synlm.data.text import PathLike

if TYPE_CHECKING:  # training reads shards without the imports of encoding
    from hf_synlm.data.encoding import EncodedBlock

FORMAT = 1
INDEX_FILE, MADE_FROM_FILE = "corpus.json", "made_from.json"
SHARD_TOKENS = 1 << 25
# A shard has at most one sentence per this many of its tokens, so that packing needs little memory.
TOKENS_PER_SENTENCE = 8
EMPTY_DOCUMENTS = "documents without sentences dropped"
_ALIGNMENT = 8
_OPEN_SHARDS = 512  # every memory map keeps a file open


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file of a corpus.

    Args:
        path: the file.

    Returns:
        Its object.

    Raises:
        ValueError: the file is missing or damaged; the message says what to do.
    """
    return read_json(path, f"Restore it, or delete {path.parent} and prepare again.")


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of the ids below `vocab_size`: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the differences between two JSON objects.

    Args:
        old: the first.
        new: the second.
        prefix: written before the names.

    Returns:
        Per difference a phrase such as "text.language was 'en' and is now 'de'".
    """
    found = []
    for name in sorted({*old, *new}):
        before, after = old.get(name), new.get(name)
        if isinstance(before, dict) and isinstance(after, dict):
            found += differences(before, after, f"{prefix}{name}.")
        elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            pairs = [({str(k): x}, {str(k): y}) for k, (x, y) in enumerate(zip(before, after, strict=True))]
            found += [text for x, y in pairs for text in differences(x, y, f"{prefix}{name}.")]
        elif before != after:
            found.append(f"{prefix}{name} was {before!r} and is now {after!r}")
    return found


# ---------------------------------------------------------------------------------------------- shards
@dataclass
class ShardRecord:
    """The facts about a finished shard.

    Attributes:
        tokens: number of token ids.
        sentences: number of sentences.
        documents: number of documents that end in it.
        bytes: size of its file.
        sha256: checksum of its file.
        ends_inside_document: the next shard continues the same document.
        next: where the text of the next shard begins; `None` at the end of the text.
        counts: what was replaced or dropped.
    """

    tokens: int
    sentences: int
    documents: int
    bytes: int
    sha256: str
    ends_inside_document: bool
    next: dict[str, Any] | None
    counts: dict[str, int]

    def sections(self, dtype: np.dtype) -> list[tuple[int, int, np.dtype]]:
        """Offset in bytes, number of values and type of tokens, sentence ends, document ends and word ends."""
        found, offset = [], 0
        small = np.dtype(np.uint32)
        kinds = ((self.tokens, dtype), (self.sentences, small), (self.documents, small))
        for count, kind in (*kinds, (-(-self.tokens // 8), np.dtype(np.uint8))):
            found.append((offset, count, kind))
            offset += -(-count * kind.itemsize // _ALIGNMENT) * _ALIGNMENT
        return found


@dataclass
class Shard:
    """The memory-mapped arrays of a shard.

    Attributes:
        tokens: token ids, uint16 or uint32.
        sentence_ends: uint32, per sentence the number of tokens up to its end.
        document_ends: uint32, per document that ends here the number of sentences up to its end; 0 if all its sentences
            are in the shard before.
        packed_word_ends: uint8, a bit per token, lowest first.
    """

    tokens: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray
    packed_word_ends: np.ndarray

    def word_ends(self, start: int, stop: int) -> np.ndarray:
        """Bools for the tokens `start` to `stop` - 1, True at the last token of each word."""
        bits = np.unpackbits(self.packed_word_ends[start // 8 : -(-stop // 8)], bitorder="little")
        return bits[start % 8 : start % 8 + stop - start].astype(bool)


def shard_path(folder: Path, number: int) -> Path:
    """File of shard `number` in `folder`."""
    return folder / f"shard_{number:05d}.bin"


def _damage(folder: Path, number: int, what: str) -> str:
    return (
        f"{shard_path(folder, number)} {what}. Restore it; or delete {folder / INDEX_FILE} and the files of this shard "
        "and all later ones, and prepare again with the same options: the shards before it are kept."
    )


def _check_sizes(folder: Path, records: Sequence[ShardRecord]) -> None:
    """Raise ValueError if a shard is missing or does not have its size."""
    for number, record in enumerate(records):
        path = shard_path(folder, number)
        size = path.stat().st_size if path.is_file() else None
        if size != record.bytes:
            found = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
            raise ValueError(_damage(folder, number, found))


def finished_shards(folder: Path) -> list[ShardRecord]:
    """Read the records of all finished shards of a corpus, complete or not.

    Args:
        folder: of the corpus.

    Returns:
        The records in their order.

    Raises:
        ValueError: a shard before another one is missing, or a shard has the wrong size.
    """
    numbers = sorted(int(path.stem.removeprefix("shard_")) for path in folder.glob("shard_?????.json"))
    if numbers != list(range(len(numbers))):
        missing = next(k for k, number in enumerate(numbers) if k != number)
        raise ValueError(
            f"{shard_path(folder, missing).with_suffix('.json')} is missing. Restore it, or delete all later shards "
            "too and prepare again: the shards before it are kept."
        )
    records = [ShardRecord(**read_record(shard_path(folder, number).with_suffix(".json"))) for number in numbers]
    _check_sizes(folder, records)
    return records


def check_made_from(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Check that a corpus was made from this text with these options.

    Args:
        folder: of the corpus.
        made_from: text and options as JSON.

    Raises:
        ValueError: it was made from something else; the message names every difference.
    """
    changed = differences(read_record(folder / MADE_FROM_FILE), json.loads(json.dumps(made_from)))
    if changed:
        raise ValueError(
            f"{folder} is made from something else: {'; '.join(changed)}. Repeat the old values (as options of "
            f"python training/prepare_text.py --output_dir {folder.parent}), choose another folder, "
            "or delete this one."
        )


def _dropped(counts: Mapping[str, int]) -> str:
    """Describe in parentheses what was replaced or dropped; the empty string if nothing was."""
    found = "; ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)
    return f" ({found})" if found else ""


# ---------------------------------------------------------------------------------------------- reading
class PreparedCorpus:
    """A complete corpus, read through memory maps; it can be pickled, and other processes open their own maps.

    The sizes of all shards are always checked; their checksums only on demand, because that reads the whole corpus.

    Args:
        folder: of the corpus.
        verify: check the checksums too.

    Attributes:
        folder: of the corpus.
        made_from: text and options.
        records: of the shards.
        counts: what was replaced or dropped.
        num_tokens: number of tokens.
        num_sentences: number of sentences.
        num_documents: number of documents.
        dtype: of the tokens.

    Raises:
        ValueError: the corpus is not complete, or a shard is missing, truncated or changed; the message names it.
    """

    def __init__(self, folder: PathLike, verify: bool = False):
        self.folder = Path(folder)
        if not (self.folder / INDEX_FILE).is_file():
            state = "is not finished" if (self.folder / MADE_FROM_FILE).is_file() else "is not a prepared corpus"
            raise ValueError(f"{self.folder} {state}. Run python training/prepare_text.py with its options (again).")
        index = read_record(self.folder / INDEX_FILE)
        self.made_from: dict[str, Any] = index["made_from"]
        if self.made_from["format"] != FORMAT:
            raise ValueError(f"{self.folder} has format {self.made_from['format']}, not {FORMAT}. Prepare it again.")
        self.records = [ShardRecord(**record) for record in index["shards"]]
        self.counts: dict[str, int] = index["counts"]
        self.num_tokens, self.num_sentences = index["tokens"], index["sentences"]
        self.num_documents: int = index["documents"]
        self.dtype = np.dtype(self.made_from["dtype"])
        self._maps: dict[int, Shard] = {}
        _check_sizes(self.folder, self.records)
        if verify:
            self.verify()

    def __getstate__(self) -> dict[str, Any]:
        """The state without memory maps."""
        return {**self.__dict__, "_maps": {}}

    def verify(self) -> None:
        """Compare the checksum of every shard. Cost: reads the whole corpus.

        Raises:
            ValueError: a shard was changed; the message names it.
        """
        for number, record in enumerate(self.records):
            if file_sha256(shard_path(self.folder, number)) != record.sha256:
                raise ValueError(_damage(self.folder, number, f"is damaged: its checksum is not that of {INDEX_FILE}"))

    def shard(self, number: int) -> Shard:
        """Memory maps of a shard, opened at the first call."""
        if number not in self._maps:
            if len(self._maps) >= _OPEN_SHARDS:
                del self._maps[next(iter(self._maps))]
            raw = np.memmap(shard_path(self.folder, number), np.uint8, "r")
            arrays = [
                raw[offset : offset + count * kind.itemsize].view(kind)
                for offset, count, kind in self.records[number].sections(self.dtype)
            ]
            self._maps[number] = Shard(*arrays)
        return self._maps[number]

    def source_names(self) -> list[str]:
        """Names of the data sets and files that the text comes from."""
        names = []
        for source in self.made_from["sources"]:
            prefix = "the words of " if source["kind"] == "treebank" else ""
            files = [file["name"] for file in source.get("files", [])]
            names += [source["name"]] if "name" in source else [prefix + name for name in files]
        return names

    def fingerprint(self) -> str:
        """Hash of the checksums of all shards."""
        return hashlib.sha256("".join(record.sha256 for record in self.records).encode()).hexdigest()[:16]

    def describe(self) -> str:
        """One line: sizes, and what was replaced or dropped."""
        return (
            f"{self.num_documents:,} documents, {self.num_sentences:,} sentences, {self.num_tokens:,} tokens in "
            f"{len(self.records)} shards of {self.dtype.name}{_dropped(self.counts)}"
        )


# ---------------------------------------------------------------------------------------------- writing
class _OpenShard:
    """A shard that is being written: tokens go to the file at once, boundaries at the end."""

    def __init__(self, path: Path, dtype: np.dtype, continues_document: bool):
        self.path, self.dtype = path, dtype
        self.file: BinaryIO = path.open("wb")
        self.digest = hashlib.sha256()
        self.tokens = self.sentences = 0
        self.sentence_ends: list[np.ndarray] = []
        self.document_ends: list[np.ndarray] = []
        self.word_ends: list[np.ndarray] = []
        self.counts: Counter[str] = Counter()
        # If a document continues from the shard before, its end counts even without further sentences.
        self._document_end = -1 if continues_document else 0
        self._bits = np.zeros(0, bool)  # word ends of a byte that is not full

    def add(self, block: "EncodedBlock") -> None:
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
        """Append the boundaries and flush the file to disk."""
        self.word_ends.append(np.packbits(self._bits, bitorder="little"))
        sections = ((self.sentence_ends, np.uint32), (self.document_ends, np.uint32), (self.word_ends, np.uint8))
        for parts, kind in sections:
            self._write(bytes(-self.file.tell() % _ALIGNMENT))
            for part in parts:
                self._write(part.astype(kind).tobytes())
        self.file.flush()
        os.fsync(self.file.fileno())
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
        finally:  # closing writes the buffer, and may fail too
            self.path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        self.file.write(data)
        self.digest.update(data)


class CorpusWriter:
    """Writes encoded blocks as shards, and keeps the shards that a killed writer has finished.

    Memory: the boundaries of one shard. A shard ends with the block that fills it, if reading can begin after that.

    Args:
        folder: of the corpus; made if needed.
        made_from: text and options of the corpus, as JSON; an unfinished corpus with others is refused.
        dtype: of the tokens.
        shard_tokens: tokens per shard.

    Raises:
        ValueError: the folder contains a corpus made from something else, or a damaged one.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path, made_from: dict[str, Any], dtype: np.dtype, shard_tokens: int):
        if not 1 <= shard_tokens < 1 << 31:
            raise ValueError(f"shard_tokens is {shard_tokens}: choose a number from 1 to 2**31 - 1")
        self.folder, self.dtype, self.shard_tokens = folder, dtype, shard_tokens
        self.made_from = {"format": FORMAT, "dtype": dtype.name, "shard_tokens": shard_tokens, **made_from}
        folder.mkdir(parents=True, exist_ok=True)
        remove_partial(folder)
        self.records = finished_shards(folder)
        if self.records:
            check_made_from(folder, self.made_from)
        else:  # a run that failed before its first shard does not fix the options
            write_json(folder / MADE_FROM_FILE, self.made_from)
        self._shard: _OpenShard | None = None
        self._position: dict[str, Any] | None = None

    @property
    def start(self) -> dict[str, Any] | None:
        """Position of the text to write next; `None` is the beginning."""
        if not self.records:
            return None
        if self._restart.is_file():
            restart = read_record(self._restart)
            if restart["shards"] == len(self.records):
                return restart["position"]
        return self.records[-1].next

    @property
    def _restart(self) -> Path:
        """File of the last position with its hint; not part of the corpus."""
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

    def add(self, block: "EncodedBlock") -> None:
        """Append a block.

        Args:
            block: the next one of the text.

        Raises:
            OSError: it cannot be written; the unfinished shard is deleted.
        """
        with self._clear_errors():
            shard = self._open()
            is_full = max(shard.tokens, shard.sentences * TOKENS_PER_SENTENCE) >= self.shard_tokens
            # Only when there is more to write, because a shard must not be empty.
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
                    what = _dropped(shard.counts)
                    raise ValueError(f"The text for {self.folder} has no tokens. Check files and options{what}.")
                self._close(shard, None)
            counts: Counter[str] = Counter()
            for record in self.records:
                counts.update(record.counts)
            totals = {name: sum(getattr(record, name) for record in self.records) for name in names}
            index = {"shards": [asdict(record) for record in self.records], "counts": dict(counts), **totals}
            write_json(self.folder / INDEX_FILE, {**index, "made_from": self.made_from})
            self._restart.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Delete the unfinished shard."""
        shard, self._shard = self._shard, None
        if shard is not None:
            shard.delete()

    def _open(self) -> _OpenShard:
        if self._shard is None:
            path = shard_path(self.folder, len(self.records))
            continues_document = bool(self.records) and self.records[-1].ends_inside_document
            self._shard = _OpenShard(path.with_name(path.name + PARTIAL_SUFFIX), self.dtype, continues_document)
        return self._shard

    def _close(self, shard: _OpenShard, position: dict[str, Any] | None) -> None:
        """Flush a shard to disk, rename it, and write its record."""
        shard.close()
        at = position and position["at"]
        if position and at and HINT in at:
            write_json(self._restart, {"shards": len(self.records) + 1, "position": position})
            position = {**position, "at": {name: value for name, value in at.items() if name != HINT}}
        record, path = shard.record(position), shard_path(self.folder, len(self.records))
        os.replace(shard.path, path)
        self._shard = None
        write_json(path.with_suffix(".json"), asdict(record))
        self.records.append(record)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Name the shard in an error of the disk, and delete it."""
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
