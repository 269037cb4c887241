# SPDX-License-Identifier: Apache-2.0
"""Tables as TSV, CSV or JSON lines: their rows, and what is written as TSV."""

import csv
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from hf_synlm.data.text import PathLike, file_ending, read_lines, read_separated

FORMATS = ("txt", "tsv", "csv", "jsonl")
# Endings of files that are neither plain text nor one of `FORMATS`, with what to do about them.
_REMEDIES = {
    **dict.fromkeys(("zst", "zip", "7z", "rar", "tar", "tgz"), "unpack it first"),
    **dict.fromkeys(("xls", "xlsx", "ods", "parquet", "feather", "arrow", "pkl"), "save it as .csv or .tsv"),
    **dict.fromkeys(("rds", "rda", "sav", "dta"), "save it as .csv or .tsv"),
    **dict.fromkeys(("pdf", "doc", "docx", "odt", "rtf"), "save its text as .txt"),
    "json": "write one object per line, and name the file .jsonl, or its format jsonl",
}


def file_format(path: PathLike, given: str | None = None) -> str:
    """One of `FORMATS`: the given one, or by the file's ending; files with other endings are plain text."""
    if given is not None:
        return given
    suffix = file_ending(path).removeprefix(".")
    if suffix in _REMEDIES:
        raise ValueError(f"{path} is not a text file or table that can be read: {_REMEDIES[suffix]}")
    return suffix if suffix in FORMATS else "txt"


def read_rows(path: PathLike, kind: str, line_ends: bool = False) -> Iterator[dict[str, Any]]:
    """Rows of a TSV, CSV or JSON lines file by column name; tables have a header, see `read_separated`.

    Fields of CSV may have `line_ends` inside by request.
    """
    rows = _json_rows(path) if kind == "jsonl" else _separated(path, kind, line_ends)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"{path} has no rows")
    yield from chain([first], rows)


def _json_rows(path: PathLike) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            # A lone surrogate such as \\ud800 is half of a character. No tokenizer can read it.
            json.dumps(row, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"{path}:{number}: half of a character ({error}). Correct the text.") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: not a JSON object with columns as keys: {line[:60]!r}")
        yield row


def _separated(path: PathLike, kind: str, line_ends: bool) -> Iterator[dict[str, Any]]:
    header: list[str] | None = None
    # Line ends stay, so that a field that holds some is seen.
    for first, last, fields in read_separated((line + "\n" for line in read_lines(path)), kind, path):
        if last > first and not line_ends:
            raise ValueError(
                f"{path}:{first}: a quotation mark is not closed, so the row continues to line {last}. If the mark "
                "is text, double it and quote the field. If not, take the line end out of the field."
            )
        if header is None:
            header = [name.strip() for name in fields]
            named = list(filter(None, header))
            if len(set(named)) < len(named):
                raise ValueError(f"{path}: the header {header} names a column twice")
            # As of the empty columns of spreadsheets.
            unnamed, filled = [place for place, name in enumerate(header) if not name], set[int]()
        elif fields not in ([], [""]):
            if len(fields) != len(header):
                quote = "Quote each field that has a comma in it, or another mark that separates fields"
                remedy = quote if len(fields) > len(header) else "Write all fields of the row, also empty ones"
                size = f"{len(fields)} fields, but the header names {len(header)}: {header}"
                raise ValueError(f"{path}:{first}: {size}. {remedy}")
            filled.update(place for place in unnamed if fields[place])
            if len(filled) > 1:
                places = ", ".join(str(place + 1) for place in sorted(filled))
                raise ValueError(f"{path}:{first}: columns {places} hold text, but have no name. Add names")
            yield {name: field for name, field in zip(header, fields, strict=True) if name or field}
    if header is None:
        raise ValueError(f"{path} is empty: the first line must name the columns")


def table_text(rows: Iterable[Sequence[Any]]) -> str:
    """Rows of a tab-separated table.

    Fields with quotation marks are quoted as in CSV, which pandas and R's `read.delim` undo.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerows([_field(value) for value in row] for row in rows)
    return buffer.getvalue()


def rows_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows, at least one, as a tab-separated table; their keys in order of appearance are the columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table_text([names, *([row.get(name) for name in names] for row in rows)])


def _field(value: Any) -> Any:
    if isinstance(value, float):
        return "" if math.isnan(value) else f"{value + 0.0:.8g}"  # no -0
    if isinstance(value, (dict, list)):  # of a table in JSON
        return json.dumps(value, ensure_ascii=False)
    return int(value) if isinstance(value, bool) else value


def need_columns(
    path: PathLike, rows: Iterable[dict[str, Any]], names: Sequence[str], remedy: str, first: int = 1
) -> None:
    """Raise ValueError, which ends with the remedy, unless every row has text in the columns `names`."""
    for number, row in enumerate(rows, first):
        for name in names:
            if not isinstance(row.get(name), str):
                problem = "no column" if name not in row else f"{row[name]!r} in the column"
                raise ValueError(
                    f"{path}: data row {number} has {problem} {name!r} (it has {', '.join(map(str, row))}). {remedy}"
                )
