"""A corpus of token ids on disk: memory-mapped shards with the boundaries of sentences, documents and words.

    FOLDER/made_from.json     what the corpus is made from; written first
    FOLDER/shard_00000.bin    token ids, uint16 or uint32 by the size of the vocabulary, from byte 0 on; then, each
                              beginning at a multiple of 8 bytes: sentence ends, document ends, word ends
    FOLDER/shard_00000.json   sizes, checksum, what was dropped, and where the text of the next shard begins
    FOLDER/corpus.json        the index: all shards and the totals; written last, so only a complete corpus has one

Sentence ends are uint32 positions in the shard's tokens, document ends uint32 positions in its sentences. Word ends are
one bit per token (lowest first): a byte would make them as large as half of the tokens. A file is written under a
temporary name and renamed when it is on disk; a shard counts when its JSON file is there.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hf_synlm.data.text import PathLike

FORMAT = 1
INDEX_FILE, MADE_FROM_FILE = "corpus.json", "made_from.json"
ALIGNMENT = 8
_OPEN_SHARDS = 512  # every memory map holds a file open


def write_atomically(path: Path, data: bytes) -> None:
    """Write a small file under a temporary name, then rename it.

    Args:
        path: the file.
        data: its content.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(data)
            to_disk(file)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def to_disk(file: BinaryIO) -> None:
    """Wait until what was written to `file` is on disk."""
    file.flush()
    os.fsync(file.fileno())


def as_json(value: Any) -> bytes:
    """Readable JSON of `value`, the same for equal values."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Read the JSON object in a file of a corpus.

    Args:
        path: the file.

    Returns:
        The object.

    Raises:
        ValueError: there is no such file, or it holds none.
    """
    remedy = f"Restore it, or delete {path.parent} and prepare again."
    try:
        value = json.loads(path.read_bytes())
        if not isinstance(value, dict):
            raise ValueError("no JSON object")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. {remedy}") from None
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}). {remedy}") from error
    return value


def token_dtype(vocab_size: int) -> np.dtype:
    """Type of the ids below `vocab_size`: uint16 or uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Say where two JSON objects differ.

    Args:
        old: the first.
        new: the second.
        prefix: of the names.

    Returns:
        Per difference a phrase like "text.language was 'en' and is now 'de'".
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
    """What is known of a finished shard.

    Attributes:
        tokens: number of token ids.
        sentences: number of sentences.
        documents: number of documents that end in it.
        bytes: size of its file.
        sha256: checksum of its file.
        ends_inside_document: the next shard goes on with the same document.
        next: where the text of the next shard begins; `None` when the text is at its end.
        counts: what was replaced or dropped.
    """

    tokens: int
    sentences: int
    documents: int
    bytes: int
    sha256: str
    ends_inside_document: bool
    next: dict[str, Any] | None
    counts: dict[str, int] = field(default_factory=dict)

    def sections(self, dtype: np.dtype) -> list[tuple[int, int, np.dtype]]:
        """Offset in bytes, number of values and type of tokens, sentence ends, document ends and word ends."""
        found, offset = [], 0
        small = np.dtype(np.uint32)
        kinds = ((self.tokens, dtype), (self.sentences, small), (self.documents, small))
        for count, kind in (*kinds, (-(-self.tokens // 8), np.dtype(np.uint8))):
            found.append((offset, count, kind))
            offset += -(-count * kind.itemsize // ALIGNMENT) * ALIGNMENT
        return found


@dataclass
class Shard:
    """The memory-mapped arrays of a shard.

    Attributes:
        tokens: token ids, uint16 or uint32.
        sentence_ends: uint32, per sentence the number of tokens up to its end.
        document_ends: uint32, per document that ends here the number of sentences up to its end; 0 where all its
            sentences are in the shard before.
        packed_word_ends: uint8, a bit per token, lowest first.
    """

    tokens: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray
    packed_word_ends: np.ndarray

    def word_ends(self, start: int, stop: int) -> np.ndarray:
        """Bool, True at the last token of each word, of the tokens `start` to `stop` - 1."""
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


def _check_size(folder: Path, number: int, record: ShardRecord) -> None:
    path = shard_path(folder, number)
    size = path.stat().st_size if path.is_file() else None
    if size != record.bytes:
        found = "is missing" if size is None else f"has {size} bytes instead of {record.bytes}"
        raise ValueError(_damage(folder, number, found))


def finished_shards(folder: Path) -> list[ShardRecord]:
    """Records of the shards that a preparation finished, complete or not.

    Args:
        folder: of the corpus.

    Returns:
        The records in their order.

    Raises:
        ValueError: a shard before another one is missing, or one does not have its size.
    """
    numbers = sorted(int(path.stem.removeprefix("shard_")) for path in folder.glob("shard_?????.json"))
    if numbers != list(range(len(numbers))):
        missing = next(k for k, number in enumerate(numbers) if k != number)
        raise ValueError(
            f"{shard_path(folder, missing).with_suffix('.json')} is missing. Restore it, or delete all later shards "
            "too and prepare again: the shards before it are kept."
        )
    records = [ShardRecord(**read_json(shard_path(folder, number).with_suffix(".json"))) for number in numbers]
    for number, record in enumerate(records):
        _check_size(folder, number, record)
    return records


def check_made_from(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Check that a corpus is made from what is asked for.

    Args:
        folder: of the corpus.
        made_from: as JSON.

    Raises:
        ValueError: it is made from something else; the message names every difference.
    """
    changed = differences(read_json(folder / MADE_FROM_FILE), json.loads(json.dumps(made_from)))
    if changed:
        raise ValueError(
            f"{folder} is made from something else: {'; '.join(changed)}. Repeat the old values (as options of "
            f"python -m hf_synlm.data.prepare --output_dir {folder.parent}), choose another folder, or delete this one."
        )


def dropped(counts: Mapping[str, int]) -> str:
    """Say in parentheses what was replaced or dropped, by `counts`; nothing if that is nothing."""
    found = "; ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)
    return f" ({found})" if found else ""


# ---------------------------------------------------------------------------------------------- reading
class PreparedCorpus:
    """A complete corpus, read through memory maps; it can be sent to other processes, which open their own maps.

    The sizes of all shards are checked at once, their checksums on demand, since that reads the whole corpus.

    Args:
        folder: of the corpus.
        verify: check the checksums too.

    Attributes:
        folder: of the corpus.
        made_from: what it is made from.
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
            state = "is not finished" if (self.folder / MADE_FROM_FILE).is_file() else "holds no prepared corpus"
            raise ValueError(f"{self.folder} {state}. Run python -m hf_synlm.data.prepare with its options (again).")
        index = read_json(self.folder / INDEX_FILE)
        self.made_from: dict[str, Any] = index["made_from"]
        if self.made_from["format"] != FORMAT:
            raise ValueError(f"{self.folder} has format {self.made_from['format']}, not {FORMAT}. Prepare it again.")
        self.records = [ShardRecord(**record) for record in index["shards"]]
        self.counts: dict[str, int] = index["counts"]
        self.num_tokens, self.num_sentences = index["tokens"], index["sentences"]
        self.num_documents: int = index["documents"]
        self.dtype = np.dtype(self.made_from["dtype"])
        self._maps: dict[int, Shard] = {}
        for number, record in enumerate(self.records):
            _check_size(self.folder, number, record)
        if verify:
            self.verify()

    def __getstate__(self) -> dict[str, Any]:
        """Memory maps stay behind."""
        return {**self.__dict__, "_maps": {}}

    def verify(self) -> None:
        """Compare the checksum of every shard. Cost: reads the whole corpus.

        Raises:
            ValueError: a shard was changed; the message names it.
        """
        for number, record in enumerate(self.records):
            with shard_path(self.folder, number).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found != record.sha256:
                raise ValueError(_damage(self.folder, number, f"is damaged: its checksum is not that of {INDEX_FILE}"))

    def shard(self, number: int) -> Shard:
        """Memory maps of a shard; they are opened when first asked for."""
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
        """One line about size, and what was replaced or dropped."""
        return (
            f"{self.num_documents:,} documents, {self.num_sentences:,} sentences, {self.num_tokens:,} tokens in "
            f"{len(self.records)} shards of {self.dtype.name}{dropped(self.counts)}"
        )
