"""Lines of text files, and the sentences of running text by sentencex (rules for about 300 languages)."""

import csv
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import sentencex

PathLike: TypeAlias = str | os.PathLike[str]

_QUOTED = re.compile(r'"(?:[^"]|"")*"')


def read_tsv(lines: Iterable[str]) -> Iterator[list[str]]:
    """Fields of tab-separated lines without their ends: a line is a row, for TSV has no quoting.

    Quotation marks are text. Some programs quote as in CSV, which is undone where it shows: in a field with doubled
    marks inside, in a row that has too many fields otherwise, and in all rows if all columns are named in marks.
    """
    names: list[str] = []
    for line in lines:
        fields = line.split("\t")
        names = names or fields
        is_quoted = len(fields) > len(names) or all(map(_QUOTED.fullmatch, names))
        if is_quoted or any(_QUOTED.fullmatch(field) and '""' in field[1:-1] for field in fields):
            fields = next(csv.reader([line], delimiter="\t"))
        yield fields


def read_bytes(path: PathLike) -> bytes:
    """Content of a file; - is standard input, which is kept in memory and can be read several times."""
    return _read_once(sys.stdin.buffer) if str(path) == "-" else Path(path).read_bytes()


@lru_cache(maxsize=1)
def _read_once(stream: BinaryIO) -> bytes:
    return stream.read()


def read_lines(path: PathLike, *, encoding: str = "utf-8") -> Iterator[str]:
    r"""Yield the lines of a text file without their ends; \n, \r\n and \r end a line, a byte order mark is dropped.

    The path - is standard input. A byte that is not in the encoding is a ValueError that names line and position.
    """
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    stream = io.BytesIO(read_bytes(path)) if str(path) == "-" else Path(path).open("rb")
    with io.TextIOWrapper(stream, encoding=codec) as file:
        try:
            for line in file:
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise ValueError(_describe_bad_byte(path, encoding)) from error


def _describe_bad_byte(path: PathLike, encoding: str) -> str:
    """Say where a file cannot be decoded; the file's iterator only knows the position in its buffer."""
    data = read_bytes(path)
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return (
            f"{path}:{line}: byte 0x{data[error.start]:02x} at position {error.start} is not {encoding} "
            f"({error.reason}): convert it to {encoding.upper()}"
        )
    return f"{path}: not {encoding} text: convert it to {encoding.upper()}"


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
        raise ValueError(f"{name} is {values!r:.60}: give a list, [{item}]")


def split_sentences(text: str, *, language: str = "en") -> list[str]:
    """Split running text into sentences by sentencex, without surrounding white space; empty ones are left out.

    `language` is an ISO 639 code; for languages without rules sentencex uses those of a related language.
    """
    return [stripped for sentence in sentencex.segment(language, text) if (stripped := sentence.strip())]
