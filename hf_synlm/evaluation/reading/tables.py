# SPDX-License-Identifier: Apache-2.0
"""Tables of surprisals and of reading times: reading them, and finding the word of a text that a row belongs to.

A table has one row per word, with one of the keys of `KEYS`. Ids are text (1.10 is not 1.1). A table with the columns
`word zone item` has a text per item and the place in it as zone. Every row is matched with a row of the text, which is
the first table of surprisals or comes with a corpus.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_synlm.data.brackets import plain_word
from hf_synlm.data.files import read_json
from hf_synlm.evaluation.text import tables

KEYS = (("sentence_id", "word_id"), ("item", "word_id"), ("document", "number"))
"""Columns that identify a word, in the order in which they are tried; `number` is the place in the document."""
_STRUCTURE = ("document", "sentence_id", "word_id")
_MISSING: tuple[str | float, ...] = ("", "NA", "NaN", "nan")
INFINITE = ("inf", math.inf)
_UNPARTNERED = 0.05
# What the `.meta.json` of a table of surprisals says about how they were computed.
SETTINGS = ("estimator", "context", "num_beams", "word_correction", "tokenize")


@dataclasses.dataclass
class Predictor:
    """A column of a table, one value per word, with what is known about it."""

    name: str
    column: str
    table: pd.DataFrame
    source: Path | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def unit(self) -> str:
        """Bits, nats, or the name of another column."""
        found = re.search(r"_(bits|nats)(_|$)", self.column)
        return found[1] if found else self.column


def read_rows(path: Path) -> pd.DataFrame:
    """Read a table; all fields are text."""
    kind = tables.file_format(path)
    return with_places(pd.DataFrame(tables.read_rows(path, "tsv" if kind == "txt" else kind)), path)


def with_places(table: pd.DataFrame, path: object) -> pd.DataFrame:
    """Add the columns `document` and `number` (place in the document) to a table that says what its texts are."""
    if {"item", "zone"} <= set(table):
        table["number"] = table["zone"]
        table["document"] = table["document"] if "document" in table else table["item"]
    elif "document" in table:
        texts = [column for column in ("subject", "document") if column in table]
        table["number"] = table.groupby(texts, sort=False).cumcount() + 1
    ids = [column for column in ("item", "number", *_STRUCTURE) if column in table]
    table[ids] = table[ids].astype(str)
    table.attrs["name"] = str(path)
    return table


def list_columns(table: pd.DataFrame) -> str:
    """The columns of a table, for messages."""
    return f"{table.attrs['name']} has the columns {', '.join(map(str, table.columns))}"


def numbers(table: pd.DataFrame, column: str, missing: Sequence[str | float] = (), option: str = "") -> np.ndarray:
    """A column as numbers, NaN where a field is empty, NA or `missing`; ValueError names the first bad row.

    `option` is what stands before the column in the command.
    """
    if column not in table:
        like = next((one for one in map(str, table) if one.lower() == column.lower()), "COLUMN")
        raise ValueError(f"there is no column {column!r}: {list_columns(table)}. Write {option}{like}")
    found = table[column].where(~table[column].isin([*_MISSING, *missing]) & table[column].notna())
    values = pd.to_numeric(found, errors="coerce").astype(float)
    bad = np.flatnonzero(~np.isfinite(values) & found.notna())
    if len(bad):
        value = found.iloc[bad[0]]
        remedy = f"Write numbers{', such as 0 and 1' if option == '--control ' else ''}, or empty the field"
        if re.fullmatch(r"-?\d+,\d+", str(value)):
            remedy = f"Write {value.replace(',', '.')}, with a point; write thousands without a comma"
        place = f"{table.attrs['name']}: row {bad[0] + 1}"
        raise ValueError(f"{place} has {value!r} in {column!r}, which is not a number. {remedy}")
    return values.to_numpy()


def split_given(given: str) -> tuple[str, Path, str]:
    """Name, file and column of NAME=FILE[:COLUMN] or FILE; without a column it is empty."""
    name, equals, rest = given.partition("=")
    if not equals or any(Path(path).is_file() for path in (given, given.rpartition(":")[0])):
        equals, rest = "", given  # a path may hold =
    path, colon, column = rest.rpartition(":")
    if not colon or Path(rest).is_file():
        path, column = rest, ""
    if equals and not name:
        raise ValueError(f"{given}: the name is empty. Write NAME{given}, or only the file")
    return (name if equals else Path(path).stem), Path(path), column


def read_predictor(given: str) -> Predictor:
    """The predictor that NAME=FILE[:COLUMN] or FILE names; the default column is the first surprisal."""
    name, path, column = split_given(given)
    table = read_rows(path)
    column = column or next((one for one in table if str(one).startswith("surprisal")), "")
    if not column:
        raise ValueError(f"{given} names no column of surprisals. Write {given}:COLUMN; {list_columns(table)}")
    meta = Path(f"{path}.meta.json")
    described = read_json(meta) if meta.is_file() else {}
    settings = {key: described.get("options", {}).get(key) for key in SETTINGS} if described else {}
    if described:
        settings["model"] = described.get("model", {}).get("name")
        if width := re.search(r"_b(\d+)$", column):  # of several --num-beams
            settings["num_beams"] = int(width[1])
    return Predictor(name, column, table, path, settings)


def match(
    table: pd.DataFrame,
    text: pd.DataFrame,
    remarks: list[str],
    *,
    on: Sequence[str] = (),
    partial: bool = False,
    allow_different_words: bool = False,
    reader: str = "",
) -> np.ndarray:
    """For each row of a table the row of the text, or -1; remarks tell of rows without a partner.

    `reader` is the column of readers, each of whom may have a row for a word.
    """
    ours, theirs = table.attrs["name"], text.attrs["name"]
    key = _key(table, text, on)
    _check_unique(text, key)
    _check_unique(table, [*key, reader] if reader else key)
    index = pd.MultiIndex.from_frame(text[key].astype(str))
    keys = pd.MultiIndex.from_frame(table[key].astype(str))
    places = index.get_indexer(keys)
    if (places < 0).all():
        raise ValueError(
            f"no row of {ours} fits a row of {theirs} by {', '.join(key)}. The ids of the tables begin with "
            f"{_shown(keys)} and {_shown(index)}. Write the ids in the same way, or name other columns by --on A,B"
        )
    remarks += _check_partners(places, keys, index, key, (ours, theirs), partial)
    if "word" in table and "word" in text:
        differ = _different(table, text, places)
        if len(differ) and not allow_different_words:
            shown = "; ".join(
                f"{table['word'].iloc[row]!r} and {text['word'].iloc[places[row]]!r} at {', '.join(keys[row])}"
                for row in differ[:3]
            )
            raise ValueError(
                f"{len(differ):,} words of {ours} and {theirs} differ: {shown}. Give tables of one text, or leave "
                "these words out by --allow-different-words"
            )
        places[differ] = -1
        remarks += [f"{len(differ):,} words of {ours} differ from {theirs} and are left out"] if len(differ) else []
    return places


def _key(table: pd.DataFrame, text: pd.DataFrame, on: Sequence[str]) -> list[str]:
    """The columns to join by."""
    for one in (table, text):
        if missing := [column for column in on if column not in one]:
            remedy = "Rename columns, so that both tables have the same names"
            raise ValueError(f"--on {','.join(on)}: no column {', '.join(missing)}; {list_columns(one)}. {remedy}")
    common = [key for key in ([on] if on else KEYS) if all(c in table and c in text for c in key)]
    if not common:
        raise ValueError(
            "the tables have no columns in common that identify a word, such as sentence_id and word_id: "
            f"{list_columns(table)}; {list_columns(text)}. Give columns the same names in both, and name them by "
            "--on A,B"
        )
    return list(next((key for key in common if not text.duplicated(list(key)).any()), common[0]))


def _check_unique(table: pd.DataFrame, key: list[str]) -> None:
    twice = table.duplicated(key)
    if not twice.any():
        return
    # An id names several words; a measurement seldom has one value twice.
    others = [c for c in table if c not in (*key, "word", "number") and 2 * table[c].nunique() <= len(table)]
    others = [c for c in others if not table.duplicated([*key, c]).any()]
    first = ", ".join(map(str, table.loc[twice, key].iloc[0]))
    name = table.attrs["name"]
    copies = table.drop(columns="number", errors="ignore").duplicated()
    if copies.equals(twice):
        rows = np.flatnonzero(copies) + 1
        runs = np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)
        shown = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        raise ValueError(f"{name}: these rows repeat rows before them: {shown}. Delete these rows")
    remedy = "no other column tells them apart: number the rows of the stimuli, in both tables"
    if others:
        column = min(others, key=lambda c: table[c].nunique())
        remedy = f"add it to both tables, and pass --on {','.join([column, *key])}"
        remedy = "rename it to subject" if column != "subject" == column.lower() else remedy
        remedy = f"the column {column} tells them apart: {remedy}"
    raise ValueError(f"{name}: {twice.sum():,} rows have the same {', '.join(key)} as another, first {first}; {remedy}")


def _check_partners(
    places: np.ndarray, keys: pd.MultiIndex, index: pd.MultiIndex, key: list[str], names: tuple[str, str], partial: bool
) -> list[str]:
    """Remarks on the words of each table that the other lacks; an error if they are many."""
    lost = {names[0]: keys[places < 0].unique(), names[1]: index[~np.isin(np.arange(len(index)), places)]}
    sizes = {names[0]: keys.nunique(), names[1]: len(index)}
    remarks = [
        f"{len(rows):,} of {sizes[name]:,} words of {name} have no partner in the other table, first "
        f"{', '.join(key)} = {_shown(rows)}"
        for name, rows in lost.items()
        if len(rows)
    ]
    if not partial and any(len(rows) > _UNPARTNERED * sizes[name] for name, rows in lost.items()):
        raise ValueError("; ".join(remarks) + ". If this is meant, add --partial")
    return remarks


def _shown(keys: pd.MultiIndex) -> str:
    return " ".join(map(str, keys[0]))


def _different(table: pd.DataFrame, text: pd.DataFrame, places: np.ndarray) -> np.ndarray:
    """Rows whose word is not that of the text."""
    rows = np.flatnonzero(places >= 0)
    ours, theirs = table["word"].to_numpy()[rows], text["word"].to_numpy()[places[rows]]
    unequal = [row for row, a, b in zip(rows, ours, theirs, strict=True) if a != b and plain_word(a) != plain_word(b)]
    return np.array(unequal, dtype=int)


def add_structure(text: pd.DataFrame, table: pd.DataFrame, places: np.ndarray) -> None:
    """Give the text the columns of documents and sentences that only another table has."""
    rows = np.flatnonzero(places >= 0)
    for column in _STRUCTURE:
        if column in table and column not in text:
            text[column] = pd.Series(table[column].to_numpy()[rows], index=places[rows]).groupby(level=0).first()
