"""Sources of text: files, tables, treebanks and data sets of the Hub, read row by row from any position.

A row is a list of lines without surrounding white space; an empty line ends a document. A source replaces or drops
what it cannot read, and counts it, so that one bad byte does not stop a corpus of a billion lines. After every row the
source has a position, a small JSON value, from which reading can resume.
"""

import csv
import gc
import json
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, repeat
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from hf_synlm.data.files import file_sha256
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.treebank import count_tags, read_treebank

LINE_LIMIT = 1 << 20  # bytes of a line; longer ones are cut
HASHED_BYTES = 1 << 26  # files up to this size are identified by their content, larger ones by size and time
ROWS_PER_BATCH = 64
# Key of a position in a text: makes a restart quick, but two ways to the same place may have different ones.
HINT = "hint"

_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zX", b"\x28\xb5\x2f\xfd", b"PK\x03\x04")  # gzip, bzip2, xz, zstd, zip
_CELL_BREAK = "\u2028"  # Unicode's line separator: \r inside a cell of CSV, whose reader stops at \r without quotes

# What is counted, in the words in which it is printed.
BAD_BYTES = "undecodable bytes replaced"
CUT_LINES = "lines longer than 1 MiB cut"
BAD_ROWS = "dropped rows (not JSON objects)"
ODD_ROWS = "dropped rows (text not a string)"
EMPTY_ROWS = "rows without text dropped"


class TextSource(ABC):
    """Text that can be read from any position, by one reader at a time.

    Attributes:
        is_split: whether every line is already a sentence.
    """

    is_split = False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe the text as JSON; other text has another description."""

    @abstractmethod
    def rows(self, start: Any, counts: Counter[str]) -> Iterator[list[str]]:
        """Yield rows from the position `start` (`None`: the beginning); `counts` counts what is replaced or dropped."""

    @abstractmethod
    def position(self) -> Any:
        """The position after the row just read."""


def describe_file(path: str) -> dict[str, Any]:
    """Describe a file by name, size and hash; files of more than 64 MiB by the time of their last change, not the hash.

    Args:
        path: the file.

    Returns:
        A JSON object, which changes when the file is edited.
    """
    status = Path(path).stat()
    known: dict[str, Any] = {"name": Path(path).name, "bytes": status.st_size}
    if status.st_size <= HASHED_BYTES:
        return {**known, "sha256": file_sha256(path)}
    return {**known, "modified": status.st_mtime_ns}


class TextFiles(TextSource):
    """Text files, one after the other; a document ends at a blank line and at the end of its file.

    Args:
        paths: the files.
    """

    kind = "text"

    def __init__(self, paths: Sequence[str]):
        self.paths = list(paths)
        self._number, self._offset, self._inside = 0, 0, False

    def describe(self) -> dict[str, Any]:
        """Kind and files."""
        return {"kind": self.kind, "files": [describe_file(path) for path in self.paths]}

    def position(self) -> dict[str, Any]:
        """Number of the file, offset in it (bytes, or rows of a table), and whether the offset is inside a line."""
        return {"file": self._number, "offset": self._offset, "inside": self._inside}

    def rows(self, start: Any, counts: Counter[str]) -> Iterator[list[str]]:
        """Rows of all files."""
        at = start or {"file": 0, "offset": 0, "inside": False}
        self._offset, self._inside = at["offset"], at["inside"]
        for number in range(at["file"], len(self.paths)):
            self._number, path = number, self.paths[number]
            with Path(path).open("rb") as file:
                self._check_beginning(path, file)
                yield from self._read(path, file, counts)
                yield [""]
            self._offset, self._inside = 0, False

    def _check_beginning(self, path: str, file: BinaryIO) -> None:
        """Raise ValueError for files of another kind."""
        beginning = file.read(4)
        if beginning.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise ValueError(f"{path} is UTF-16. Convert it: iconv -f UTF-16 -t UTF-8 {path} > NEW_FILE")
        if beginning.startswith(_COMPRESSED):
            raise ValueError(f"{path} is compressed. Pass the file that is in it.")
        if beginning == b"PAR1" and self.kind != "parquet":
            raise ValueError(f"{path} is Parquet. Give it a name that ends in .parquet.")

    def _read(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[list[str]]:
        file.seek(self._offset)
        while line := file.readline(LINE_LIMIT):
            was_inside = self._inside
            self._inside = len(line) == LINE_LIMIT and not line.endswith(b"\n")
            if self._inside:
                end = _cut(line)
                file.seek(end - len(line), 1)
                line = line[:end]
                self._inside = not line.endswith(b"\r")
                counts[CUT_LINES] += self._inside and not was_inside
            self._offset = file.tell()
            lines = _lines_of(_decode(line, counts).removesuffix("\n"))
            # A blank piece of a long line does not end a document.
            yield lines[1:] if (was_inside or self._inside) and not lines[0] else lines


def _cut(data: bytes) -> int:
    r"""Where to cut `data`, which has no \n: after its last \r, or else before a character that is not complete."""
    end = data.rfind(b"\r", 0, -1) + 1  # the last byte may be half of \r\n
    if end:
        return end
    # At most three bytes belong to a character that begins here.
    return len(data) - next((k for k in (1, 2, 3) if data[-k] >= 0xC0 or data[-k] == 0x0D), 0)


def _decode(data: bytes, counts: Counter[str]) -> str:
    r"""Decode UTF-8; invalid bytes become U+FFFD, and a byte order mark is dropped."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        text = data.decode(errors="replace")
        counts[BAD_BYTES] += text.count("\ufffd") - data.count("\ufffd".encode())
    return text.removeprefix("\ufeff")


def _lines_of(text: str) -> list[str]:
    r"""Lines without surrounding white space; \n, \r\n and \r end a line."""
    if "\r" in text:
        text = text.removesuffix("\r").replace("\r\n", "\n").replace("\r", "\n")
    return [line.strip() for line in text.split("\n")]


def _row_of(text: str | bytes | None, is_document: bool, counts: Counter[str]) -> list[str]:
    """Lines of a row of a table: a document, or lines of which empty ones end documents."""
    text = _decode(text, counts) if isinstance(text, bytes) else text or ""
    lines = _lines_of(text)
    if len(text) > LINE_LIMIT:
        counts[CUT_LINES] += sum(len(line) > LINE_LIMIT for line in lines)
        lines = [line[k : k + LINE_LIMIT] for line in lines for k in range(0, max(len(line), 1), LINE_LIMIT)]
    if not is_document:
        return lines
    lines = [line for line in lines if line]
    counts[EMPTY_ROWS] += not lines
    return [*lines, ""] if lines else []


def _as_bytes(values: pyarrow.Array | pyarrow.ChunkedArray, column: str, where: str) -> list[bytes | None]:
    """Rows of a column of text as bytes, because strings of Arrow may be invalid UTF-8."""
    try:
        return values.cast(pyarrow.large_binary()).to_pylist()
    except pyarrow.ArrowNotImplementedError as error:
        raise _no_text(column, where, values.type) from error


def _no_text(column: str, where: str, kind: Any) -> ValueError:
    return ValueError(f"column {column!r} of {where} holds {kind}, not text. Name another column with --text_column.")


def _no_column(column: str, where: str, names: Iterable[str]) -> ValueError:
    return ValueError(f"{where} has no column {column!r}. Set --text_column to one of {list(names)}.")


def _check_column(column: str, where: str, names: Sequence[str]) -> None:
    if column not in names:
        raise _no_column(column, where, names)


class TableFiles(TextFiles):
    """Files of rows with a column of text; subclasses read the formats.

    Args:
        paths: the files, all of one format.
        column: column of the text.
        is_document: whether a row is a document; otherwise it is a line, and empty lines end documents.
    """

    def __init__(self, paths: Sequence[str], column: str, is_document: bool):
        super().__init__(paths)
        self.column, self.is_document = column, is_document

    def describe(self) -> dict[str, Any]:
        """Kind, files, column, and what a row is."""
        return {**super().describe(), "column": self.column, "rows": "documents" if self.is_document else "lines"}


class JSONFiles(TableFiles):
    """A JSON object per line, or one array of objects per file (which then has to fit into memory)."""

    kind = "json"

    def rows(self, start: Any, counts: Counter[str]) -> Iterator[list[str]]:
        """Rows of all files; rows without text are dropped, but a file must not end before the first row with text."""
        self._has_text = start is not None  # a position is always after text
        return super().rows(start, counts)

    def _read(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[list[str]]:
        file.seek(0)
        is_array = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
        problem: ValueError | None = None
        for record in self._array(path, file, counts) if is_array else self._objects(file, counts):
            if not isinstance(record, dict):
                counts[BAD_ROWS] += 1
                continue
            value = record.get(self.column)
            if self.column not in record:
                problem = problem or _no_column(self.column, path, record)
            elif isinstance(value, str):
                self._has_text = True
            elif value is not None:
                problem = problem or _no_text(self.column, path, type(value).__name__)
                counts[ODD_ROWS] += 1
                continue
            yield _row_of(value, self.is_document, counts)
        if problem and not self._has_text:
            raise problem

    def _objects(self, file: BinaryIO, counts: Counter[str]) -> Iterator[Any]:
        file.seek(self._offset)
        while line := file.readline():
            self._offset = file.tell()
            if line.strip():
                try:
                    # strict=False allows control characters inside strings.
                    record = json.loads(_decode(line, counts), strict=False)
                except (ValueError, RecursionError):
                    record = None
                yield record

    def _array(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[Any]:
        file.seek(0)
        try:
            records = json.loads(_decode(file.read(), counts), strict=False)
        except ValueError as error:
            raise ValueError(f"{path} is not valid JSON: {error}. Repair it, or write one object per line.") from error
        for record in records[self._offset :]:
            self._offset += 1
            yield record


class CSVFiles(TableFiles):
    """Comma-separated values with a line of column names."""

    kind, delimiter = "csv", ","

    def _read(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[list[str]]:
        csv.field_size_limit(2**31 - 1)  # a cell may be a long document
        file.seek(0)
        # Line by line, so that the position of the file is that of the reader.
        lines = (_decode(line, counts) for line in iter(file.readline, b""))
        broken = (line.replace("\r\n", "\n").replace("\r", _CELL_BREAK) for line in lines)
        table = csv.reader(broken, delimiter=self.delimiter)
        try:
            names = next(table, [])
            if any(_CELL_BREAK in name for name in names):
                raise ValueError(f"{path} has a \\r in its first line. Make \\n end its lines: tr '\\r' '\\n'.")
            _check_column(self.column, path, names)
            column = names.index(self.column)
            if self._offset:
                file.seek(self._offset)
            for record in table:
                self._offset = file.tell()
                cell = record[column] if column < len(record) else ""
                yield _row_of(cell.replace(_CELL_BREAK, "\n"), self.is_document, counts)
        except csv.Error as error:
            raise ValueError(f"{path} cannot be read as CSV near byte {file.tell()}: {error}.") from error


class TSVFiles(CSVFiles):
    """Tab-separated values with a line of column names."""

    kind, delimiter = "tsv", "\t"


class ParquetFiles(TableFiles):
    """Parquet, read in small batches, because a row group may be larger than the memory."""

    kind = "parquet"

    def _read(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[list[str]]:
        try:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=1 << 20)
            _check_column(self.column, path, table.schema_arrow.names)
            sizes = [table.metadata.row_group(k).num_rows for k in range(table.num_row_groups)]
            group, skipped = 0, 0
            while group < len(sizes) and skipped + sizes[group] <= self._offset:
                skipped += sizes[group]
                group += 1
            batches = table.iter_batches(
                ROWS_PER_BATCH, row_groups=range(group, len(sizes)), columns=[self.column], use_threads=False
            )
            for batch in batches:
                values = _as_bytes(batch.column(0), self.column, path)
                first = min(max(self._offset - skipped, 0), len(values))
                skipped += len(values)
                for value in values[first:]:
                    self._offset += 1
                    yield _row_of(value, self.is_document, counts)
        except (pyarrow.ArrowException, OSError) as error:  # Arrow reports damaged pages as OSError
            raise ValueError(
                f"{path} cannot be read as Parquet after row {self._offset}: {error}. Replace the file."
            ) from error


class TreebankFiles(TextFiles):
    """The words of treebanks: a file is a document, a tree is a sentence; the trees themselves are not kept.

    Args:
        paths: files of bracketed trees.
        drop_punctuation: leave out words tagged as punctuation.
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
            with Path(path).open("rb") as file:
                self._check_beginning(path, file)
        check_tags(count_tags(self.paths), "leave out drop_punctuation, or give the sentences as text")

    def _read(self, path: str, file: BinaryIO, counts: Counter[str]) -> Iterator[list[str]]:
        for number, sentence in enumerate(read_treebank(path)):
            if number < self._offset:
                continue
            kept = keep_words(sentence.words, sentence.tags, "tag") if self.drop_punctuation else repeat(True)
            words = list(compress(sentence.words, kept))
            self._offset = number + 1
            yield [" ".join(words)] if words else []


class HubSource(TextSource):
    """A split of a data set that `datasets` loads, from the Hub or from a folder.

    Args:
        name: name on the Hub, or folder.
        config: configuration, or `None`.
        split: e.g. "train", or "train[:1%]" (not with `streaming`).
        column: column of the text.
        is_document: whether a row is a document; otherwise it is a line, and empty lines end documents.
        streaming: read over the network instead of downloading first; the rows are the same.
    """

    def __init__(
        self, name: str, config: str | None, split: str, column: str, is_document: bool, streaming: bool = False
    ):
        self.name, self.config, self.split = name, config, split
        self.column, self.is_document, self.streaming = column, is_document, streaming
        self._row, self._state, self._rows_since = 0, None, 0

    def describe(self) -> dict[str, Any]:
        """Name, configuration, split, column, and what a row is; for a folder also its files."""
        known: dict[str, Any] = {"kind": "dataset", "name": self.name, "config": self.config, "split": self.split}
        if Path(self.name).is_dir():
            files = sorted(path for path in Path(self.name).rglob("*") if path.is_file())
            known["name"] = Path(self.name).resolve().name
            known["files"] = [describe_file(str(path)) for path in files]
        return {**known, "column": self.column, "rows": "documents" if self.is_document else "lines"}

    def position(self) -> dict[str, Any]:
        """Number of rows read; for a stream also its last known state, and the number of rows since."""
        if self._state is None:
            return {"row": self._row}
        return {"row": self._row, HINT: {"state": self._state, "rows": self._rows_since}}

    def rows(self, start: Any, counts: Counter[str]) -> Iterator[list[str]]:
        """Rows of the split."""
        self._row = start["row"] if start else 0
        hint = (start or {}).get(HINT, {"state": None, "rows": self._row})
        self._state, self._rows_since = hint["state"], hint["rows"]
        for values in self._stream() if self.streaming else self._table():
            for value in values:
                self._row += 1
                self._rows_since += 1
                yield _row_of(value, self.is_document, counts)
        yield [""]

    def _table(self) -> Iterator[list[bytes | None]]:
        from datasets import load_dataset  # a large import, only for this source

        table = load_dataset(self.name, self.config, split=self.split)
        _check_column(self.column, self.name, table.column_names)
        table = table.with_format("arrow")
        for first in range(self._row, len(table), ROWS_PER_BATCH):
            values = table[first : first + ROWS_PER_BATCH][self.column]
            yield _as_bytes(values, self.column, self.name)

    def _stream(self) -> Iterator[list[bytes | None]]:
        from datasets import load_dataset

        stream = load_dataset(self.name, self.config, split=self.split, streaming=True).with_format("arrow")
        if self._state is not None:
            stream.load_state_dict(self._state)
        batches = stream.iter(batch_size=ROWS_PER_BATCH)
        to_skip = self._rows_since
        try:
            while (batch := next(batches, None)) is not None:
                _check_column(self.column, self.name, batch.column_names)
                values = _as_bytes(batch[self.column], self.column, self.name)
                skipped = min(to_skip, len(values))
                yield values[skipped:]
                to_skip -= skipped
                if not to_skip:
                    self._state, self._rows_since = stream.state_dict(), 0
        finally:
            # Arrow's threads must end before the interpreter does: apache/arrow#45214.
            batches.close()
            del batches, stream
            batch = values = None
            gc.collect()
