# SPDX-License-Identifier: Apache-2.0
"""A corpus of token ids on disk: shards, each a data set of `datasets` with one row, read through memory maps.

    FOLDER/made_from.json      what the corpus is made from; written first
    FOLDER/shard_00000/        `load_from_disk` opens it; its row has the columns of `Shard`
    FOLDER/shard_00000/shard.json   sizes, checksum, what was dropped
    FOLDER/corpus.json         the index: all shards and the totals; written last, so only a complete corpus has one

A shard is the text of SHARD_CHARACTERS characters. Its folder gets its name when it is complete, so a killed run leaves
only whole shards; the next run reads the text again, and encodes what is missing.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.compute
from datasets import Dataset, load_from_disk
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.encoding import TextOptions, encode_block, encoded_features
from hf_synlm.data.files import file_sha256, folder_writer, read_json, remove_folder, remove_partial, write_json
from hf_synlm.data.sources import BAD_CHARACTERS, Block
from hf_synlm.data.text import PathLike, plural

FORMAT = 2
INDEX_FILE, MADE_FROM_FILE, RECORD_FILE = "corpus.json", "made_from.json", "shard.json"
SHARD_CHARACTERS = 1 << 26
EMPTY_SENTENCES = "sentences without tokens dropped"
EMPTY_DOCUMENTS = "documents without sentences dropped"
_OTHER_ENCODING = ". Is the text not UTF-8? Convert it, such as by iconv -f cp1252 -t UTF-8 FILE > NEW_FILE"
_OPEN_SHARDS = 512  # every memory map keeps a file open


def read_record(path: Path) -> dict[str, Any]:
    """Read a JSON file of a corpus; the ValueError for a missing or damaged one says what to do."""
    return read_json(path, f"Restore it, or delete {path.parent} and prepare again.")


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """List the differences between two JSON objects, such as "text.language was 'en' and is now 'de'"."""
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


def check_made_from(folder: Path, made_from: Mapping[str, Any]) -> None:
    """Raise ValueError, which names every difference, if a corpus is made from other text or with other options."""
    changed = differences(read_record(folder / MADE_FROM_FILE), made_from)
    if changed:
        told = [text for text in changed if ".bytes was" not in text and "sha256 was" not in text]
        raise ValueError(
            f"{folder.parent} holds text that was prepared in another way: {'; '.join(told) or 'from other files'}. "
            f"Use the old values again, choose another folder (--output-dir), or delete {folder.parent}."
        )


def _check_format(folder: Path) -> dict[str, Any]:
    """Read what a corpus is made from; refuse a corpus of an earlier version."""
    made_from = read_record(folder / MADE_FROM_FILE)
    if made_from.get("format") != FORMAT:
        raise ValueError(
            f"{folder} is of another version (format {made_from.get('format')}, not {FORMAT}). Delete it, and run "
            f"python training/prepare_text.py --output-dir {folder.parent} with the same options as before."
        )
    return made_from


# ---------------------------------------------------------------------------------------------- shards
@dataclass
class ShardRecord:
    """The facts about a shard; with `ends_inside_document` the next one continues the same document."""

    tokens: int
    sentences: int
    documents: int  # that end in it
    bytes: int
    sha256: str
    ends_inside_document: bool
    counts: dict[str, int]  # what was replaced or dropped


@dataclass
class Shard:
    """The memory-mapped columns of a shard.

    `input_ids` are uint16 or uint32; `sentence_ends` uint32 numbers of tokens; `document_ends` uint32 numbers of
    sentences, 0 if all sentences of a document are in the shard before; `word_end_bits` a bit per token.
    """

    input_ids: np.ndarray
    sentence_ends: np.ndarray
    document_ends: np.ndarray
    word_end_bits: pyarrow.BooleanArray

    def word_ends(self, start: int, stop: int) -> np.ndarray:
        """Bools for the tokens `start` to `stop` - 1, True at the last token of each word."""
        return self.word_end_bits.slice(start, stop - start).to_numpy(zero_copy_only=False)


def shard_path(folder: Path, number: int) -> Path:
    """Folder of shard `number` of the corpus in `folder`."""
    return folder / f"shard_{number:05d}"


def _arrow_file(shard: Path) -> Path:
    return shard / "data-00000-of-00001.arrow"


def _check_shard(folder: Path, number: int, record: ShardRecord, verify: bool) -> None:
    """Raise ValueError if a shard is missing, does not have its size, or, with `verify`, its checksum."""
    shard = shard_path(folder, number)
    path, found = _arrow_file(shard), None
    if not path.is_file():
        found = "is missing"
    elif path.stat().st_size != record.bytes:
        found = f"has {path.stat().st_size} bytes instead of {record.bytes}"
    elif verify and file_sha256(path) != record.sha256:
        found = "is damaged: its checksum is wrong"
    if found:
        raise ValueError(f"{path} {found}. {_remedy(folder, number)}")


def _remedy(folder: Path, number: int) -> str:
    return (
        f"Restore it; or delete {folder / INDEX_FILE} and {shard_path(folder, number)}, and prepare again with the "
        "same options: the other shards are kept."
    )


def _dropped(counts: Mapping[str, int]) -> str:
    """Describe in parentheses what was replaced or dropped; the empty string if nothing was."""
    found = "; ".join(f"{count:,} {name}" for name, count in sorted(counts.items()) if count)
    return f" ({found})" if found else ""


class PreparedCorpus:
    """A complete corpus, read through memory maps; it can be pickled, and other processes open their own maps.

    The sizes of all shards are always checked, the checksums with `verify`, which reads the whole corpus. Raises
    ValueError if the corpus is not complete or a shard is damaged.
    """

    def __init__(self, folder: PathLike, verify: bool = False):
        self.folder = Path(folder)
        if not (self.folder / INDEX_FILE).is_file():
            state = "is not finished" if (self.folder / MADE_FROM_FILE).is_file() else "is not a prepared corpus"
            raise ValueError(f"{self.folder} {state}. Prepare it (again) by python training/prepare_text.py.")
        self.made_from = _check_format(self.folder)
        index = read_record(self.folder / INDEX_FILE)
        self.records = [ShardRecord(**record) for record in index["shards"]]
        self.counts: dict[str, int] = index["counts"]
        self.num_tokens: int = index["tokens"]
        self.num_sentences: int = index["sentences"]
        self.num_documents: int = index["documents"]
        self._maps: dict[int, Shard] = {}
        for number, record in enumerate(self.records):
            _check_shard(self.folder, number, record, verify)

    def __getstate__(self) -> dict[str, Any]:
        """The state without memory maps."""
        return {**self.__dict__, "_maps": {}}

    def shard(self, number: int) -> Shard:
        """Memory maps of a shard, opened at the first call."""
        if number not in self._maps:
            if len(self._maps) >= _OPEN_SHARDS:
                del self._maps[next(iter(self._maps))]
            shard = shard_path(self.folder, number)
            try:
                table = load_from_disk(shard, keep_in_memory=False).data
            except (OSError, ValueError, KeyError) as error:
                raise ValueError(f"{shard} cannot be opened: {error}. {_remedy(self.folder, number)}") from error
            values = {name: table.column(name).chunk(0).values for name in table.column_names}
            bits = values.pop("word_ends")
            arrays = {name: array.to_numpy(zero_copy_only=True) for name, array in values.items()}
            self._maps[number] = Shard(**arrays, word_end_bits=bits)
        return self._maps[number]

    def source_names(self) -> list[str]:
        """Names of the data sets and files that the text comes from."""
        names = []
        for source in (part for whole in self.made_from["sources"] for part in whole.get("whole", [whole])):
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
            f"{plural(self.num_documents, 'document')}, {plural(self.num_sentences, 'sentence')}, "
            f"{plural(self.num_tokens, 'token')} in {plural(len(self.records), 'shard')}{_dropped(self.counts)}"
            + _OTHER_ENCODING
            * bool(self.counts.get(BAD_CHARACTERS))
        )


# ---------------------------------------------------------------------------------------------- writing
def write_corpus(
    folder: Path,
    blocks: Iterable[Block],
    tokenizer: PreTrainedTokenizerBase,
    options: TextOptions,
    made_from: Mapping[str, Any],
    num_processes: int = 1,
) -> None:
    """Encode blocks and write them as shards; the shards that a killed run has finished are kept.

    Memory: text and token ids of a shard. Raises ValueError if the folder contains a corpus that is made from
    something else, or if the text has no tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_partial(folder)
    made_from = {"format": FORMAT, **made_from}
    if (folder / MADE_FROM_FILE).is_file():
        _check_format(folder)
    if any(folder.glob("shard_*")):
        check_made_from(folder, made_from)
    else:  # a run that failed before its first shard does not fix the options
        write_json(folder / MADE_FROM_FILE, made_from)
    records: list[ShardRecord] = []
    for group in _group(blocks):
        path = shard_path(folder, len(records))
        if not path.is_dir():
            rows = _encode(group, tokenizer, options, num_processes, f"{folder.name} text, shard {len(records)}")
            found = sum((block.counts for block in group), Counter())
            try:
                write_shard(path, rows, found, bool(records) and records[-1].ends_inside_document)
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"{error}: {path} could not be written. The {len(records)} shards before it are kept; make room "
                    "and run the same command again",
                ) from error
        record = ShardRecord(**read_record(path / RECORD_FILE))
        _check_shard(folder, len(records), record, verify=False)
        records.append(record)
    write_index(folder, records)


def write_index(folder: Path, records: list[ShardRecord]) -> None:
    """Write the index of a corpus whose shards are complete; delete them and raise ValueError if it has no tokens."""
    totals = {name: sum(getattr(x, name) for x in records) for name in ("tokens", "sentences", "documents")}
    counts = sum((Counter(record.counts) for record in records), Counter())
    if not totals["tokens"]:
        for number in range(len(records)):
            remove_folder(shard_path(folder, number))
        raise ValueError(f"The text for {folder} has no tokens. Check files and options{_dropped(counts)}.")
    write_json(folder / INDEX_FILE, {"shards": [asdict(x) for x in records], "counts": dict(counts), **totals})


def _group(blocks: Iterable[Block]) -> Iterator[list[Block]]:
    """Blocks of each shard."""
    group: list[Block] = []
    size = 0
    for block in blocks:
        group.append(block)
        size += len(block.text)
        if size >= SHARD_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _encode(
    blocks: list[Block], tokenizer: PreTrainedTokenizerBase, options: TextOptions, num_processes: int, name: str
) -> Dataset:
    """Encode blocks: a row of `encoded_features` for each."""
    num_processes = min(num_processes, len(blocks))
    if num_processes > 1:  # otherwise tokenizers warns of threads when the workers are forked
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    rows = pyarrow.table({"text": [x.text for x in blocks], "is_split": [x.is_split for x in blocks]})
    return Dataset(rows, fingerprint="text").map(
        partial(encode_block, tokenizer=tokenizer, options=options),
        remove_columns=rows.column_names,
        features=encoded_features(len(tokenizer)),
        num_proc=num_processes if num_processes > 1 else None,
        new_fingerprint="tokens",
        desc=name,
    )


def write_shard(path: Path, rows: Dataset, counts: Counter[str], continues_document: bool) -> None:
    """Join encoded blocks, and write them with their record, in which `counts` are completed.

    `continues_document`: the shard before ends inside a document.
    """
    joined = {name: pyarrow.compute.list_flatten(rows.data.column(name)) for name in rows.column_names[:3]}
    lengths = joined["lengths"].to_numpy()
    is_end = lengths == 0
    ends = np.cumsum(~is_end)[is_end]
    # If a document continues from the shard before, its end counts even without further sentences.
    before = -1 if continues_document else 0
    is_new = np.diff(ends, prepend=before) > 0
    columns = {
        "input_ids": joined["input_ids"].combine_chunks(),
        "sentence_ends": np.cumsum(lengths[~is_end], dtype=np.uint32),
        "document_ends": ends[is_new].astype(np.uint32),
        "word_ends": joined["word_ends"].combine_chunks(),
    }
    table = pyarrow.table(
        {name: pyarrow.ListArray.from_arrays([0, len(x)], pyarrow.array(x)) for name, x in columns.items()}
    )
    counts[EMPTY_SENTENCES] += sum(rows["dropped"])
    counts[EMPTY_DOCUMENTS] += int((~is_new).sum())
    with folder_writer(path) as partial_path:
        Dataset(table, fingerprint=path.name).save_to_disk(partial_path, num_shards=1)
        arrow = _arrow_file(partial_path)
        record = ShardRecord(
            tokens=len(columns["input_ids"]),
            sentences=len(columns["sentence_ends"]),
            documents=len(columns["document_ends"]),
            bytes=arrow.stat().st_size,
            sha256=file_sha256(arrow),
            ends_inside_document=len(columns["sentence_ends"]) > (int(ends[-1]) if len(ends) else before),
            counts={name: count for name, count in sorted(counts.items()) if count},
        )
        write_json(partial_path / RECORD_FILE, asdict(record))
