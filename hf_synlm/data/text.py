# SPDX-License-Identifier: Apache-2.0
"""Opening and reading text files, and the sentences of running text by sentencex (rules for about 300 languages)."""

import bz2
import codecs
import csv
import gzip
import hashlib
import io
import lzma
import os
import re
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Literal, TextIO, TypeAlias, get_args

import sentencex

PathLike: TypeAlias = str | os.PathLike[str]
Tokenization: TypeAlias = Literal["auto", "words", "ptb", "no-punctuation"]
"""How a model reads the words of text, see `evaluation.text.words`; "auto" = as its configuration says."""
NATURAL = "natural"
"""`text_style` of models that read the words of a treebank as ordinary text."""
_STYLES: dict[str | None, Tokenization] = {NATURAL: "ptb", "treebank": "ptb", "no-punctuation": "no-punctuation"}

command_encoding: ContextVar[str | None] = ContextVar("command_encoding", default=None)
"""Encoding of the files that a command reads, by its option --encoding; None = it has no such option: UTF-8."""

# How compressed files begin.
_UNPACKING: dict[bytes, Callable[..., Any]] = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY|\x17rE)": bz2.open,
    rb"\xfd7zXZ": lzma.open,
}
_LFS_POINTER = b"version https://git-lfs"
_OTHER_ARCHIVE = re.compile(rb"\x28\xb5\x2f\xfd|PK\x03\x04|7z\xbc\xaf")  # zstd, zip, 7z
UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Scripts that write no spaces between words: Thai and Lao, Burmese, Khmer, Japanese and Chinese."""
_SEPARATOR = re.compile(r'"?sep=(.)"?[\r\n]*')
_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def tokenization_of(text_style: str | None, given: Tokenization | None = None) -> Tokenization:
    """How a model of a `text_style` reads the words of ordinary text: as given, or as its style says."""
    if given is not None and given not in get_args(Tokenization):
        raise ValueError(f"tokenize is {given!r}. Choose one of {', '.join(get_args(Tokenization))}.")
    return _STYLES.get(text_style, "words") if given in (None, "auto") else given


def read_separated(lines: Iterable[str], kind: str, path: PathLike) -> Iterator[tuple[int, int, list[str]]]:
    """Rows of the lines of a TSV or CSV file, which keep their ends, with the numbers of their first and last line."""
    lines = iter(lines)
    if kind == "tsv":
        yield from ((number, number, fields) for number, fields in enumerate(_read_tsv(lines), 1))
        return
    # Semicolons separate if the first line has some and no comma, as Excel writes it where commas are decimal points,
    # and tabs if it has neither. A line `sep=;` before it, by which Excel tells the mark, is no row.
    header = next(lines, "")
    told = _SEPARATOR.fullmatch(header)
    header = next(lines, "") if told else header
    csv.field_size_limit(2**31 - 1)  # a cell may be a long document
    delimiter = told[1] if told else next((mark for mark in ",;\t" if mark in header), ",")
    reader = csv.reader(chain([header] if header else [], lines), delimiter=delimiter, strict=True)
    last = before = int(bool(told))
    try:
        for fields in reader:
            first, last = last + 1, before + reader.line_num
            yield first, last, fields
    except csv.Error as error:
        raise ValueError(
            f"{path} cannot be read as CSV: {error}, in a row that begins at line {last + 1}. A field that begins with "
            'a quotation mark must be quoted as a whole, with its own quotation marks doubled: "She said ""no"" ."'
        ) from error


def _read_tsv(lines: Iterable[str]) -> Iterator[list[str]]:
    """Fields of tab-separated lines: a line is a row, for TSV has no quoting.

    Quotation marks are text. Some programs quote as in CSV, which is undone where it shows: in a field with doubled
    marks inside, in a row that has too many fields otherwise, and in all rows if all columns are named in marks.
    """
    names: list[str] = []
    for line in lines:
        fields = line.rstrip("\r\n").split("\t")
        names = names or fields
        is_quoted = len(fields) > len(names) or all(map(_QUOTED.fullmatch, names))
        if is_quoted or any(_QUOTED.fullmatch(field) and '""' in field[1:-1] for field in fields):
            try:
                fields = next(csv.reader([line], delimiter="\t", strict=True))
            except csv.Error as error:
                raise ValueError(
                    f"{error} in {line!r:.60}. Double the quotation marks inside a quoted field"
                ) from error
        yield fields


def file_ending(path: PathLike) -> str:
    """The ending of a file's name in small letters, such as .tsv, also where .gz, .bz2 or .xz follows."""
    path = Path(path)
    return Path(path.stem if path.suffix.lower() in (".gz", ".bz2", ".xz") else path.name).suffix.lower()


class ReadOnce(io.RawIOBase):
    """The path of a file that is opened once and read to its end, so that it may be a pipe; `facts` describes it."""

    def __init__(self, path: PathLike) -> None:
        self.path, self.size, self.digest = os.fspath(path), 0, hashlib.sha256()
        self.stream: Any = None

    def __fspath__(self) -> str:
        return self.path

    __str__ = __fspath__

    def readable(self) -> bool:
        """As `io.RawIOBase` says."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read some bytes, and count them; the first call opens the file."""
        self.stream = self.stream or (sys.stdin.buffer if self.path == "-" else Path(self.path).open("rb"))
        part = self.stream.read1(len(buffer))
        buffer[: len(part)] = part
        self.size += len(part)
        self.digest.update(part)
        return len(part)

    def facts(self) -> dict[str, Any]:
        """`path`, `bytes` and `sha256` of what was read."""
        return {"path": self.path, "bytes": self.size, "sha256": self.digest.hexdigest()}


def open_bytes(path: PathLike) -> io.BufferedReader:
    """Open a file as it is; - is standard input, which is kept in memory and can be read several times."""
    if isinstance(path, ReadOnce):
        return io.BufferedReader(path)
    if str(path) == "-":
        return io.BufferedReader(io.BytesIO(_read_once(sys.stdin.buffer)))
    return Path(path).open("rb")


@lru_cache(maxsize=1)
def _read_once(stream: BinaryIO) -> bytes:
    return stream.read()


def refuse_pointer(path: PathLike, start: bytes | None = None) -> None:
    """Raise ValueError for a file, which may be open at its `start`, that Git LFS has not downloaded."""
    if start is None:
        with Path(path).open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    if start.startswith(_LFS_POINTER):
        raise ValueError(f"{str(path)!r} is a Git LFS pointer, not the file. Get it by `git lfs pull` in its folder.")


@contextmanager
def open_unpacked(path: PathLike) -> Iterator[BinaryIO]:
    """As `open_bytes`, and unpack what gzip, bzip2 or xz has compressed."""
    with open_bytes(path) as file:
        head = file.peek(len(_LFS_POINTER))
        refuse_pointer(path, head)
        if _OTHER_ARCHIVE.match(head):
            raise ValueError(f"{path} is compressed in an unknown format. Unpack it, or use gzip, bzip2 or xz")
        unpack = next((unpack for start, unpack in _UNPACKING.items() if re.match(start, head)), None)
        if unpack is None:
            yield file
            return
        try:
            with unpack(file) as unpacked:
                yield unpacked
        except (EOFError, OSError, zlib.error, lzma.LZMAError) as error:
            raise ValueError(f"{path} cannot be unpacked: {error}. Get or write the file again.") from error


@contextmanager
def open_text(
    path: PathLike, *, encoding: str | None = None, errors: str = "strict", newline: str | None = None
) -> Iterator[TextIO]:
    """Open a text file, compressed or not, without its byte order mark; by default in the encoding of the command.

    A file that should be UTF-8 and begins with the mark of UTF-16 is UTF-16.
    """
    codec = encoding or command_encoding.get() or "utf-8"
    with open_unpacked(path) as stream:
        if codec.lower().replace("_", "-") in ("utf-8", "utf8"):
            # Every stream that is opened here can peek; the common type of them does not declare it.
            is_wide = stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)  # type: ignore[attr-defined]
            codec = "utf-16" if is_wide else "utf-8-sig"
        with io.TextIOWrapper(stream, codec, errors, newline) as file:
            yield file


def read_lines(path: PathLike, *, encoding: str | None = None) -> Iterator[str]:
    r"""Yield the lines of a text file without their ends; \n, \r\n and \r end a line.

    The file may be compressed by gzip, bzip2 or xz; the path - is standard input. A byte that is not in the encoding,
    by default that of the command or UTF-8, is a ValueError that names line and position.
    """
    with open_text(path, encoding=encoding) as file:
        number = 0
        try:
            for line in file:
                number += 1
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise ValueError(_describe_bad_byte(path, error, number)) from error


def read_lines_beside(path: PathLike) -> list[str]:
    """The lines of a file beside the main input: UTF-8, as we write it, or else in the encoding of the command."""
    return list(iterate_lines_beside(path))


def iterate_lines_beside(path: PathLike) -> Iterator[str]:
    """`read_lines_beside`, one after the other."""
    encoding: str | None = "utf-8"
    if command_encoding.get():
        try:
            deque(read_lines(path, encoding=encoding), 0)
        except ValueError:
            encoding = None
    return read_lines(path, encoding=encoding)


def _describe_bad_byte(path: PathLike, error: UnicodeDecodeError, num_lines: int) -> str:
    """Say where a file cannot be decoded: in the piece of it that follows so many lines."""
    encoding, data = error.encoding, error.object
    remedy = f"convert it to {encoding.upper()}"
    if command_encoding.get():
        # Bytes that are control characters in latin-1 are quotes and dashes in Windows.
        likely = "cp1252" if re.search(rb"[\x80-\x9f]", data) else "latin-1, cp1252"
        remedy = f"name the encoding of the file, such as --encoding {likely} (gbk, utf-16)"
    line = num_lines + data.count(b"\n", 0, error.start) + 1
    return f"{path}:{line}: byte 0x{data[error.start]:02x} is not {encoding} ({error.reason}): {remedy}"


def plural(count: int, noun: str) -> str:
    """A number with its noun: 1 sentence, 2,000 sentences."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def share(count: int, total: int, noun: str) -> str:
    """Some of all, with the verb: 1 of 2 texts has, 2 of 2,000 texts have."""
    return f"{count:,} of {plural(total, noun)} {'has' if count == 1 else 'have'}"


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Write a place, such as "file:line", before the message of a ValueError that does not begin with it."""
    try:
        yield
    except ValueError as error:
        if str(error).startswith(place):
            raise
        raise ValueError(f"{place}: {error}") from error


def check_list(name: str, values: Any, item: str = '"..."') -> None:
    """Refuse a text where a list is wanted: its letters would count as items. `item` shows what belongs into the list.

    Where items are no texts, a list of texts is refused, too.
    """
    if isinstance(values, (str, bytes)) or (item[0] != '"' and any(isinstance(value, str) for value in values)):
        raise ValueError(f"{name} is {values!r:.60}. Give a list, [{item}]")


def split_sentences(text: str, *, language: str = "en") -> list[str]:
    """Split running text into sentences by sentencex, without surrounding white space; empty ones are left out.

    `language` is an ISO 639 code; for languages without rules sentencex uses those of a related language.
    """
    return [stripped for sentence in sentencex.segment(language, text) if (stripped := sentence.strip())]
