"""Texts with item ids, read from plain text, TSV, CSV or JSON lines, or from the words of a treebank."""

import csv
import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hf_synlm.data.text import PathLike, read_lines, read_tsv

FORMATS = ("txt", "tsv", "csv", "jsonl")
# Endings of files that are neither plain text nor one of `FORMATS`, with what to do about them.
_REMEDIES = {
    **dict.fromkeys(("gz", "bz2", "xz", "zst", "zip", "7z", "rar", "tar", "tgz"), "unpack it first"),
    **dict.fromkeys(("xls", "xlsx", "ods", "parquet", "feather", "arrow", "pkl"), "save it as .csv or .tsv"),
    **dict.fromkeys(("rds", "rda", "sav", "dta"), "save it as .csv or .tsv"),
    **dict.fromkeys(("pdf", "doc", "docx", "odt", "rtf"), "save its text as .txt"),
    "json": "write one object per line, and name the file .jsonl, or its format jsonl",
}


@dataclass(frozen=True)
class TextItem:
    """One text, usually a sentence; `item` is the user's id, or the number of the line."""

    item: str
    text: str
    document: int = 0  # texts with the same number belong together
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the other columns of its table


def file_format(path: PathLike, given: str | None = None) -> str:
    """One of `FORMATS`: the given one, or by the file's ending; files with other endings are plain text."""
    if given is not None and given not in FORMATS:
        raise ValueError(f"format {given!r} is unknown: choose one of {', '.join(FORMATS)}")
    if given is not None:
        return given
    suffix = Path(path).suffix.lower().removeprefix(".")
    if suffix in _REMEDIES:
        raise ValueError(f"{path} is not a text file or table that can be read: {_REMEDIES[suffix]}")
    return suffix if suffix in FORMATS else "txt"


def read_table(path: PathLike, kind: str) -> list[dict[str, Any]]:
    """Rows of a TSV, CSV or JSON lines file by column name; tables have a header. A row is a line, see `read_tsv`.

    Semicolons separate a CSV file whose header has some and no comma, as Excel writes it in many countries.
    """
    rows: list[dict[str, Any]] = []
    if kind == "jsonl":
        for number, line in enumerate(read_lines(path), 1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
                # A lone surrogate such as \\ud800 is half of a character. No tokenizer can read it.
                json.dumps(rows[-1], ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError as error:
                raise ValueError(f"{path}:{number}: half of a character ({error}). Correct the text.") from error
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}:{number}: not JSON ({error})") from error
            if not isinstance(rows[-1], dict):
                raise ValueError(f"{path}:{number}: not a JSON object with columns as keys: {line[:60]!r}")
    else:
        rows = list(_separated(path, kind))
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def _separated(path: PathLike, kind: str) -> Iterator[dict[str, Any]]:
    rows = enumerate(read_tsv(read_lines(path)), 1) if kind == "tsv" else _read_csv(path)
    _, header = next(rows, (0, None))
    if header is None:
        raise ValueError(f"{path} is empty: the first line must name the columns")
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: the header {header} names a column twice")
    for number, fields in rows:
        if fields in ([], [""]):
            continue
        if len(fields) != len(header):
            raise ValueError(f"{path}:{number}: {len(fields)} fields, but the header names {len(header)}: {header}")
        yield dict(zip(header, fields, strict=True))


def _read_csv(path: PathLike) -> Iterator[tuple[int, list[str]]]:
    """Rows of a CSV file, each with the number of its line."""
    # Line ends stay, so that a field that holds some is seen.
    lines = [line + "\n" for line in read_lines(path)]
    # Where commas are decimal points, Excel writes .csv with semicolons.
    semicolons = lines and ";" in lines[0] and "," not in lines[0]
    reader = csv.reader(lines, delimiter=";" if semicolons else ",", strict=True)
    before = 0
    try:
        for fields in reader:
            if reader.line_num > before + 1:
                raise ValueError(
                    f"{path}:{before + 1}: the row goes on to line {reader.line_num}: a quotation mark is open. If it "
                    "is text, double it and quote the field; if not, take the line end out of the field."
                )
            before = reader.line_num
            yield before, fields
    except csv.Error as error:
        raise ValueError(
            f"{path}:{reader.line_num}: {error}. A field that begins with a quotation mark must be quoted as a whole, "
            'with its own quotation marks doubled: "She said ""no"" ."'
        ) from error


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


def find_files(place: PathLike, ending: str, names: Sequence[str], what: str, source: str) -> list[Path]:
    """The files of a benchmark in alphabetical order: those in a folder with these `names`, all, or one file."""
    place = Path(place)
    if not place.exists():
        raise ValueError(f"{place} does not exist: name the folder of the {ending} files, or one of them")
    found = {file.stem: file for file in ([place] if place.is_file() else sorted(place.glob(f"*{ending}")))}
    if not found:
        raise ValueError(f"{place} holds no {what}s ({ending} files): get them from {source}")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no {what} {', '.join(unknown)} in {place}: there are {', '.join(found)}")
    return [found[name] for name in sorted(names or found)]


def need_columns(path: PathLike, rows: Sequence[dict[str, Any]], names: Sequence[str], remedy: str) -> None:
    """Raise ValueError, which ends with the remedy, unless every row has text in the columns `names`."""
    for number, row in enumerate(rows, 1):
        for name in names:
            if not isinstance(row.get(name), str):
                problem = "no column" if name not in row else f"{row[name]!r} in the column"
                raise ValueError(
                    f"{path}: row {number} has {problem} {name!r} (it has {', '.join(map(str, row))}): every row needs "
                    f"text there. {remedy}"
                )


def read_items(
    path: PathLike, *, kind: str | None = None, text_column: str | None = None, item_column: str | None = None
) -> list[TextItem]:
    """Read texts, from tables by default those of the column "sentence" with the ids of the column "item".

    In plain text every line is one text (an empty one too, which has no words) and its number the item; documents end
    at blank lines. In tables the column "document", if there is one, says which rows belong together.
    """
    kind = file_format(path, kind)
    items = []
    if kind == "txt":
        named = text_column if item_column is None else item_column
        if named is not None:
            raise ValueError(f"{path} is read as plain text, which has no column {named!r}: give the format of a table")
        document = 0
        for number, line in enumerate(read_lines(path), 1):
            items.append(TextItem(str(number), line, document))
            document += not line.strip()
    else:
        rows = read_table(path, kind)
        need_columns(path, rows, [text_column or "sentence"], "Name the column that has it (--text-column).")
        documents: dict[Any, int] = {}
        for number, row in enumerate(rows, 1):
            where = f"{path}: row {number}"
            document = documents.setdefault(_label(row, "document", where), len(documents))
            item = _label(row, item_column or "item", where, needed=item_column is not None)
            text = row[text_column or "sentence"]
            used = (text_column or "sentence", item_column or "item")
            more = {name: value for name, value in row.items() if name not in used}
            items.append(TextItem(str(number if item is None else item), text, document, more))
    if not any(item.text.strip() for item in items):
        raise ValueError(f"{path} holds no text: give a file with at least one word")
    return items


def text_files(places: Sequence[Path]) -> list[Path]:
    """The files that these are, or that lie in these folders and have one of the endings of `FORMATS`, by name.

    Hidden files and folders in folders are left out. Raises ValueError for a folder without such files, and for a file
    that is named twice.
    """
    files: list[Path] = []
    for place in places:
        inside = [path for path in sorted(place.glob("[!.]*")) if path.suffix.lower().removeprefix(".") in FORMATS]
        inside = [path for path in inside if path.is_file()]
        if place.is_dir() and not inside:
            raise ValueError(f"the folder {place} holds no file in {', '.join('.' + name for name in FORMATS)}")
        files += inside if place.is_dir() else [place]
    if twice := [str(path) for path, count in Counter(path.resolve() for path in files).items() if count > 1]:
        raise ValueError(f"{twice[0]} is named twice: leave one out")
    return files


def read_files(
    files: Sequence[Path], *, kind: str | None = None, text_column: str | None = None, item_column: str | None = None
) -> list[TextItem]:
    """`read_items` of several files; their texts have a column `file`, and no document in common.

    Columns of the input that are called `file` become `file_input`. The columns that are named are those of the tables,
    if there are some.
    """
    items: list[TextItem] = []
    first = 0
    has_tables = any(file_format(file, kind) != "txt" for file in files)
    for file in files:
        named = {"text_column": text_column, "item_column": item_column}
        if has_tables and file_format(file, kind) == "txt":
            named = {}
        for item in read_items(file, kind=kind, **named):
            more = {"file_input" if name == "file" else name: value for name, value in item.columns.items()}
            columns = {"file": str(file), **more}
            items.append(dataclasses.replace(item, document=first + item.document, columns=columns))
        first = 1 + max(item.document for item in items)
    return items


def _label(row: dict[str, Any], column: str, where: str, needed: bool = False) -> str | float | None:
    """Text or number that identifies a row; None if the column is not `needed` and has no value."""
    value = row.get(column)
    if needed and value is None:
        raise ValueError(f"{where} has no {column!r} (it has {', '.join(map(str, row))}): name the column of the ids")
    if isinstance(value, (dict, list)):
        raise ValueError(f"{where} has {value!r} in the column {column!r}: write a number or text")
    return value


def read_treebank_items(path: PathLike, punctuation: str = "keep") -> tuple[list[TextItem], str]:
    """The sentences of a treebank that have words left, as texts of one document; and how punctuation was treated.

    `punctuation` is "keep", or "remove" for models that are trained without punctuation.
    """
    from hf_synlm.evaluation.trees.treebank_parsing import load_treebank  # imports torch

    treebank = load_treebank(Path(path), punctuation)
    items = [TextItem(str(number), " ".join(words)) for number, words in enumerate(treebank.words, 1)]
    return items, treebank.convention
