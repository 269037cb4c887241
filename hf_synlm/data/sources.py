# SPDX-License-Identifier: Apache-2.0
"""Sources of text: files, tables, treebanks and data sets of the Hub, read once from the beginning to the end.

A source gives lines without surrounding white space; an empty line ends a document. It replaces or drops what it cannot
read, and counts it, so that one bad byte does not stop a corpus of a billion lines.
"""

import gc
import io
import json
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import chain, compress, repeat
from pathlib import Path
from typing import Any, TextIO

import pyarrow
import pyarrow.parquet

from hf_synlm.data.brackets import begins_with_tree
from hf_synlm.data.files import file_sha256
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.text import errors_at, open_text, read_separated
from hf_synlm.data.treebank import count_tags, read_treebank
from hf_synlm.trees.spans import check_words

BLOCK_CHARACTERS = 1 << 20
LINE_LIMIT = 1 << 20  # characters of a line; longer ones are cut
HASHED_BYTES = 1 << 26  # files up to this size are identified by their content, larger ones by size and time
ROWS_PER_BATCH = 64

_SURROGATE = re.compile("[\ud800-\udfff]")

# What is counted, in the words in which it is printed.
BAD_CHARACTERS = "undecodable bytes and lone surrogates replaced"
NULS = "NUL characters dropped"
CUT_LINES = "lines longer than 1,048,576 characters cut"
BAD_ROWS = "dropped rows (not JSON objects)"
ODD_ROWS = "dropped rows (text not a string)"
EMPTY_ROWS = "rows without text dropped"
LONG_ROWS = "rows over several lines, by a quotation mark"


class TextSource(ABC):
    """Text that can be read several times; with `is_split` every line is already a sentence."""

    is_split = False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe the text as JSON; other text has another description."""

    @abstractmethod
    def lines(self, counts: Counter[str]) -> Iterator[str]:
        """Yield the lines, an empty one after each document; `counts` counts what is replaced or dropped.

        Bytes that cannot be decoded are lone surrogates in the lines.
        """


def describe_file(path: str) -> dict[str, Any]:
    """Name, size and hash of a file; above 64 MiB the time of its last change instead of the hash."""
    status = Path(path).stat()
    known: dict[str, Any] = {"name": Path(path).name, "bytes": status.st_size}
    if status.st_size <= HASHED_BYTES:
        return {**known, "sha256": file_sha256(path)}
    return {**known, "modified": status.st_mtime_ns}


class TextFiles(TextSource):
    """Text files, one after the other; a document ends at a blank line and at the end of its file."""

    kind = "text"

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)

    def describe(self) -> dict[str, Any]:
        """Kind and files."""
        return {"kind": self.kind, "files": [describe_file(path) for path in self.paths]}

    def lines(self, counts: Counter[str]) -> Iterator[str]:
        """Lines of all files."""
        for path in self.paths:
            with errors_at(path):  # UTF-16 that is cut off cannot be decoded
                self._check_beginning(path)
                yield from self._read(path, counts)
            yield ""

    def _check_beginning(self, path: str) -> None:
        """Raise ValueError for files of another kind."""
        with _open(path) as file:
            beginning = file.read(200)
        if self.kind != "parquet" and 3 * beginning.count("\0") > len(beginning):
            kind = "UTF-16LE" if beginning[1::2].count("\0") > beginning[::2].count("\0") else "UTF-16BE"
            raise ValueError(f"{path} is {kind} without a BOM. Convert it: iconv -f {kind} -t UTF-8 {path} > NEW_FILE")
        if self.kind == "text" and begins_with_tree(beginning):
            raise ValueError(
                f"{path} begins with a tree. Give its words, or pass the file to an option such as --train-trees."
            )
        if beginning.startswith("PAR1") and self.kind != "parquet":
            raise ValueError(f"{path} is Parquet. Give it a name that ends in .parquet.")

    def _read(self, path: str, counts: Counter[str]) -> Iterator[str]:
        with _open(path) as file:
            yield from _lines(file, counts)


def _open(path: str, newline: str | None = None) -> AbstractContextManager[TextIO]:
    return open_text(path, errors="surrogateescape", newline=newline)


def _lines(file: TextIO, counts: Counter[str]) -> Iterator[str]:
    """Lines without surrounding white space; long ones in pieces, of which a blank one does not end a document."""
    is_piece = False
    while line := file.readline(LINE_LIMIT):
        goes_on = len(line) == LINE_LIMIT and not line.endswith("\n")
        counts[CUT_LINES] += goes_on and not is_piece
        text = line.strip()
        if text or not (is_piece or goes_on):
            yield text
        is_piece = goes_on


def _no_text(column: str, where: str, kind: Any) -> ValueError:
    return ValueError(f"{where}: column {column!r} holds {kind}, not text. Name another column with --text-column.")


def _no_column(column: str, where: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"{where} has no column {column!r}. Set --text-column to one of {list(names)}.")


class Table:
    """Rows with a `column` of text; a row is a document, or else a line, and empty lines end documents."""

    def __init__(self, column: str, is_document: bool):
        self.column, self.is_document = column, is_document

    def describe(self) -> dict[str, Any]:
        """Column, and what a row is."""
        return {"column": self.column, "rows": "documents" if self.is_document else "lines"}

    def row(self, text: str | bytes | None, counts: Counter[str]) -> Iterator[str]:
        """Lines of the text of a row."""
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig", "surrogateescape")
        lines = _lines(io.StringIO(text or "", newline=None), counts)
        if not self.is_document:
            yield from lines if text else [""]
            return
        has_text = False
        for line in filter(None, lines):
            has_text = True
            yield line
        counts[EMPTY_ROWS] += not has_text
        yield ""

    def arrow_rows(self, table: pyarrow.Table | pyarrow.RecordBatch, where: str, counts: Counter[str]) -> Iterator[str]:
        """Lines of the rows of a table of Arrow, whose strings may be invalid UTF-8."""
        if self.column not in table.schema.names:
            raise _no_column(self.column, where, table.schema.names)
        values = table.column(self.column)
        try:
            texts = values.cast(pyarrow.large_binary()).to_pylist()
        except pyarrow.ArrowNotImplementedError as error:  # what pyarrow raises for a type that is no text
            raise _no_text(self.column, where, values.type) from error
        for text in texts:
            yield from self.row(text, counts)


class TableFiles(TextFiles):
    """Files of rows with a column of text, all of one format; subclasses read the formats."""

    def __init__(self, paths: Sequence[str], column: str, is_document: bool):
        super().__init__(paths)
        self.table = Table(column, is_document)

    def describe(self) -> dict[str, Any]:
        """Kind, files, column, and what a row is."""
        return {**super().describe(), **self.table.describe()}


class JSONFiles(TableFiles):
    """A JSON object per line, or one array of objects per file (which then has to fit into memory)."""

    kind = "json"

    def lines(self, counts: Counter[str]) -> Iterator[str]:
        """Lines of all files; rows without text are dropped, but a file must not end before the first row with text."""
        self._has_text = False
        return super().lines(counts)

    def _read(self, path: str, counts: Counter[str]) -> Iterator[str]:
        column, problem = self.table.column, None
        for record in self._records(path):
            if not isinstance(record, dict):
                counts[BAD_ROWS] += 1
                continue
            value = record.get(column)
            if column not in record:
                problem = problem or _no_column(column, path, record)
            elif isinstance(value, str):
                self._has_text = True
            elif value is not None:
                problem = problem or _no_text(column, path, type(value).__name__)
                counts[ODD_ROWS] += 1
                continue
            yield from self.table.row(value, counts)
        if problem and not self._has_text:
            raise problem

    def _records(self, path: str) -> Iterator[Any]:
        """The values of a file; `None` for a line that is not JSON. Control characters in strings are allowed."""
        with _open(path, newline="\n") as file:
            is_array = file.read(64).lstrip().startswith("[")
            file.seek(0)
            if is_array:
                try:
                    yield from json.load(file, strict=False)
                except ValueError as error:
                    raise ValueError(f"{path} is not JSON: {error}. Write one object per line.") from error
            for line in filter(str.strip, file):
                try:
                    record = json.loads(line, strict=False)
                except (ValueError, RecursionError):
                    record = None
                yield record


class CSVFiles(TableFiles):
    """Comma-separated values with a line of column names."""

    kind = "csv"

    def _read(self, path: str, counts: Counter[str]) -> Iterator[str]:
        with _open(path, newline="") as file:
            rows = read_separated(file, self.kind, path)
            _, _, names = next(rows, (1, 1, []))
            if self.table.column not in names:
                raise _no_column(self.table.column, path, names)
            column = names.index(self.table.column)
            for first, last, row in rows:
                if self.kind == "tsv" and row != [""] and len(row) != len(names):
                    raise ValueError(
                        f"{path}:{first}: {len(row)} fields, but the header names {len(names)}: {names}. Write a row "
                        "on one line, or save the table as .csv or .jsonl."
                    )
                counts[LONG_ROWS] += last > first
                yield from self.table.row(row[column] if column < len(row) else None, counts)


class TSVFiles(CSVFiles):
    """Tab-separated values with a line of column names; a line is a row."""

    kind = "tsv"


class ParquetFiles(TableFiles):
    """Parquet, read in small batches, because a row group may be larger than the memory."""

    kind = "parquet"

    def _read(self, path: str, counts: Counter[str]) -> Iterator[str]:
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20) as table:
                if self.table.column not in table.schema_arrow.names:
                    raise _no_column(self.table.column, path, table.schema_arrow.names)
                for batch in table.iter_batches(ROWS_PER_BATCH, columns=[self.table.column], use_threads=False):
                    yield from self.table.arrow_rows(batch, path, counts)
                    number += len(batch)
        except (pyarrow.ArrowException, OSError) as error:  # Arrow reports damaged pages as OSError
            raise ValueError(f"{path} cannot be read as Parquet after row {number}: {error}. Get it again.") from error


class TreebankFiles(TextFiles):
    """The words of treebanks: a file is a document, a tree is a sentence; the trees themselves are not kept.

    With `drop_punctuation`, words that are tagged as punctuation are left out.
    """

    kind, is_split = "treebank", True

    def __init__(self, paths: Sequence[str], drop_punctuation: bool):
        super().__init__(paths)
        self.drop_punctuation = drop_punctuation

    def check(self) -> None:
        """Raise ValueError if punctuation is to be left out but the tags do not mark it."""
        if not self.drop_punctuation:
            return
        for path in self.paths:
            self._check_beginning(path)
        check_tags(count_tags(self.paths), "leave out drop_punctuation, or give the sentences as text")

    def _read(self, path: str, counts: Counter[str]) -> Iterator[str]:
        for sentence in read_treebank(path):
            kept = keep_words(sentence.words, sentence.tags, "tag") if self.drop_punctuation else repeat(True)
            if words := list(compress(sentence.words, kept)):
                with errors_at(sentence.source):
                    check_words(words)
                yield " ".join(words)


def is_saved_split(name: str | None) -> bool:
    """Whether a data set is a folder that `Dataset.save_to_disk` wrote: a single split, whatever its name."""
    return name is not None and (Path(name) / "state.json").is_file()


def clean_lines(sources: Sequence[TextSource], counts: Counter[str]) -> Iterator[str]:
    """Lines of sources without lone surrogates, which a splitter of sentences refuses."""
    for line in chain.from_iterable(source.lines(counts) for source in sources):
        cleaned, found = _SURROGATE.subn("\ufffd", line)
        counts[BAD_CHARACTERS] += found
        yield cleaned


class Part(TextSource):
    """The first `count` sentences of sources, or with `is_rest` all text after them; `split` gives those of a line."""

    def __init__(self, whole: Sequence[TextSource], count: int, is_rest: bool, split: Callable[[str], list[str]]):
        self.whole, self.count, self.is_rest, self.split = whole, count, is_rest, split
        self.paths = [path for source in whole for path in getattr(source, "paths", [])]

    def describe(self) -> dict[str, Any]:
        """The sources, and where they are cut."""
        described = [source.describe() for source in self.whole]
        return {"kind": "part", "whole": described, "sentences": self.count, "is_rest": self.is_rest}

    def lines(self, counts: Counter[str]) -> Iterator[str]:
        """Lines of the part; a line of the whole may begin or end inside."""
        left = self.count
        for line in clean_lines(self.whole, counts):
            sentences = self.split(line) if left else []
            first, rest = sentences[:left], sentences[left:]
            if self.is_rest and (rest or not left):
                yield " ".join(rest) if left else line
            elif not self.is_rest:
                yield from first or [""]
            left -= len(first)
            if not (left or self.is_rest):
                yield ""
                return


class HubSource(TextSource):
    """A split of a data set that `datasets` loads, from the Hub or from a folder, stored first or as a stream."""

    def __init__(
        self, name: str, config: str | None, split: str, column: str, is_document: bool, streaming: bool = False
    ):
        self.name, self.config, self.split, self.streaming = name, config, split, streaming
        self.table = Table(column, is_document)

    def describe(self) -> dict[str, Any]:
        """Name, configuration, split, column, and what a row is; for a folder also its files."""
        known: dict[str, Any] = {"kind": "dataset", "name": self.name, "config": self.config, "split": self.split}
        if Path(self.name).is_dir():
            files = sorted(path for path in Path(self.name).rglob("*") if path.is_file())
            known["name"] = Path(self.name).resolve().name
            known["files"] = [describe_file(str(path)) for path in files]
        return {**known, **self.table.describe()}

    def lines(self, counts: Counter[str]) -> Iterator[str]:
        """Lines of the split."""
        from datasets import load_dataset, load_from_disk  # a large import, only for this source

        if is_saved_split(self.name):
            rows: Any = load_from_disk(self.name)
        else:
            rows = load_dataset(self.name, self.config, split=self.split, streaming=self.streaming)
        rows = rows.with_format("arrow")
        batches = rows.iter(batch_size=ROWS_PER_BATCH)
        try:
            while (batch := next(batches, None)) is not None:
                yield from self.table.arrow_rows(batch, self.name, counts)
            yield ""
        finally:
            # Arrow's threads must end before the interpreter does: apache/arrow#45214.
            batches.close()
            del batches, rows
            batch = None
            gc.collect()


# ---------------------------------------------------------------------------------------------- blocks
@dataclass
class Block:
    """About a megabyte of lines, each of which ends in a line feed; an empty line ends a document."""

    text: str
    is_split: bool
    counts: Counter[str] = field(default_factory=Counter)


def read_blocks(
    sources: Sequence[TextSource], *, skip_documents: int = 0, max_documents: int | None = None
) -> Iterator[Block]:
    """Read sources as blocks, whose boundaries depend on the text alone.

    A block ends with the document that makes it BLOCK_CHARACTERS long, or inside a document at twice that size.
    """
    documents, last = 0, None if max_documents is None else skip_documents + max_documents
    for source in sources:  # a block has lines of one source, because sources differ in `is_split`
        lines: list[str] = []
        size, is_open, counts = 0, False, Counter[str]()
        for line in source.lines(counts):
            if not line and not is_open:
                continue
            is_open = bool(line)
            if documents >= skip_documents:
                lines.append(line)
                size += len(line) + 1
            else:
                counts.clear()
            documents += not line
            is_last = documents == last and not is_open
            if is_last or (size >= BLOCK_CHARACTERS and (not is_open or size >= 2 * BLOCK_CHARACTERS)):
                yield _clean(lines, source.is_split, counts)
                lines, size = [], 0
                counts.clear()
            if is_last:
                return
        if lines or counts.total():
            yield _clean(lines, source.is_split, counts)


def _clean(lines: list[str], is_split: bool, counts: Counter[str]) -> Block:
    """Drop NUL characters and replace lone surrogates; a line that becomes empty by this does not end a document."""
    counts, text = counts.copy(), "".join(f"{line}\n" for line in lines)
    counts[NULS] += text.count("\0")
    try:
        text.encode()
    except UnicodeEncodeError:
        text, found = _SURROGATE.subn("\ufffd", text)
        counts[BAD_CHARACTERS] += found
    if counts[NULS]:
        cleaned = ((line, line.replace("\0", "").strip()) for line in text.split("\n")[:-1])
        text = "".join(f"{new}\n" for old, new in cleaned if new or not old)
    return Block(text, is_split, counts)
