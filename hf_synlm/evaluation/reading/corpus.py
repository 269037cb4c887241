# SPDX-License-Identifier: Apache-2.0
"""Texts with their surprisals and reading times, joined word by word."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from hf_synlm.data.text import plural
from hf_synlm.evaluation.reading.tables import (
    INFINITE,
    Predictor,
    add_structure,
    list_columns,
    match,
    numbers,
    read_rows,
)

SHORTEST, LONGEST = 100, 3000
"""Reading times of single readers (ms) count between these."""
BASELINE = ("length", "frequency", "punctuation", "place")
WORDFREQ = "wordfreq:"
RESERVED = (*BASELINE, "length_x_frequency", "baseline", "subject", "time")
"""Names of columns in the tables of results."""
STRIPPED = ".,;:!?'\"`()[]-–—‘’“”"
"""Punctuation at the ends of a word, which does not count for its length and its frequency."""


def stripped(word: str) -> str:
    """A word without punctuation at its ends."""
    return word.strip(STRIPPED)


def length_of(word: str) -> float:
    """Number of characters of a word, without punctuation at its ends; at least 1."""
    return max(1.0, len(stripped(word)))


def counter(given: str) -> Callable[[str], float]:
    """How often a word occurs, without punctuation at its ends; NaN if this is unknown.

    `given` is the value of --frequencies: a table of words and counts, where words that it lacks count in lower case,
    or wordfreq:LANGUAGE, which counts in a billion words.
    """
    if given.startswith(WORDFREQ):
        return _wordfreq(given)
    counts = _read_counts(given)
    return lambda word: counts.get(stripped(word), counts.get(stripped(word).lower(), math.nan))


def _wordfreq(given: str) -> Callable[[str], float]:
    """Source: Robyn Speer, wordfreq (code Apache-2.0; data CC BY-SA 4.0)."""
    language = given.removeprefix(WORDFREQ)
    try:
        import wordfreq

        wordfreq.word_frequency("a", language)  # reads the list, and for some languages loads a program that splits
    except ImportError as error:
        remedy = "pip install 'wordfreq[cjk]'"
        raise ImportError(f"{error.name} is missing: --frequencies {given} needs {remedy}") from error
    except LookupError as error:
        known = ", ".join(sorted(wordfreq.available_languages()))
        raise ValueError(f"--frequencies {given}: wordfreq lacks {language!r}. Choose one of {known}") from error
    return lambda word: 1e9 * wordfreq.word_frequency(stripped(word), language) or math.nan


def _read_counts(path: str) -> dict[str, float]:
    """The columns word and count of a table, or both columns of one that may lack a header."""
    table = read_rows(Path(path))
    names = ["word", "count"] if {"word", "count"} <= set(table) else list(table.columns)
    if len(names) != 2:
        raise ValueError(
            f"--frequencies: {list_columns(table)}. Name the column of words 'word' and that of counts 'count', or "
            "give a table of only two columns: first words, then counts"
        )
    if not math.isnan(pd.to_numeric(names[1], errors="coerce")):  # no header
        rows = [tuple(names), *table[names].itertuples(index=False)]
        names = ["word", "count"]
        table = pd.DataFrame(rows, columns=names).rename_axis(columns=None)
        table.attrs["name"] = path
    elif names[1][:1].isdigit():
        raise ValueError(
            f"--frequencies {path}: {names[1]!r} in the first row is not a number. Write the count without commas"
        )
    counts = pd.Series(_not_negative(table, names[1]), table[names[0]])
    return counts.groupby(level=0).sum(min_count=1).to_dict()  # a word may have a row for each part of speech


def _not_negative(table: pd.DataFrame, column: str) -> np.ndarray:
    """A column of counts; ValueError names the first row below 0."""
    found = numbers(table, column)
    if (found < 0).any():
        row = int((found < 0).argmax())
        raise ValueError(
            f"--frequencies: {table.attrs['name']}: row {row + 1} has {found[row]:g} in {column!r}, which is below "
            "0. Give counts, not their logarithms"
        )
    return found


@dataclasses.dataclass
class Corpus:
    """All words of texts in order, with what is known about them."""

    text: pd.DataFrame  # `document`, `sentence_id`, `word` ..., a row per word
    times: pd.DataFrame  # `place` (row of the text), `time` (ms) and `subject`; without readers a row for every word
    controls: pd.DataFrame  # more columns of the baseline, a row per reading time
    predictors: Sequence[Predictor]
    values: pd.DataFrame  # per predictor its value at every word
    unknown: pd.DataFrame  # per predictor 1 for words that its model does not know
    counts: pd.Series | None  # frequency of every word
    remarks: list[str]  # for the user
    key: Sequence[str] = ()  # columns of the text that the tables were joined by, if they were named

    def index(self, places: np.ndarray) -> pd.MultiIndex:
        """Reader and place, for each reading time."""
        readers = self.times["subject"] if "subject" in self.times else [""] * len(places)
        return pd.MultiIndex.from_arrays([readers, places])


def join_corpus(
    text: pd.DataFrame,
    predictors: Sequence[Predictor],
    times: pd.DataFrame,
    *,
    rt_column: str,
    by_subject: bool = False,
    frequencies: str | None = None,
    controls: Sequence[str] = (),
    **joining: Any,
) -> Corpus:
    """Join tables to the words of texts; `joining` goes to `match`."""
    if rt_column in controls:
        raise ValueError(f"--control {rt_column} is the time that the regression predicts. Leave this --control out")
    names = [*RESERVED, *controls, *(one.name for one in predictors)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"two columns are called {twice[0]!r}. Rename a table (NAME=FILE) or a column of --control. These names "
            f"are reserved: {', '.join(RESERVED)}"
        )
    text = text.reset_index(drop=True)
    remarks: list[str] = []
    reader = "subject" if "subject" in times else ""
    if by_subject and not reader:
        raise ValueError(f"--by-subject: there is no column 'subject'; {list_columns(times)}. Rename one to subject")
    measured = _times(times, rt_column, reader, remarks)
    of_times = match(times, text, remarks, reader=reader, **joining)
    add_structure(text, times, of_times)
    values, unknown = _values(predictors, text, remarks, joining)
    _name_sentences(text, remarks)
    more = {name: numbers(times, name, option="--control ") for name in controls}
    rows = pd.DataFrame({"place": of_times, "time": measured, **more})
    if by_subject:
        rows = rows.assign(subject=times[reader].to_numpy())[of_times >= 0].reset_index(drop=True)
    else:
        rows = rows.groupby("place").mean().reindex(range(len(text))).rename_axis("place").reset_index()
    counts = None if frequencies is None else _counts(frequencies, text, times, of_times)
    own = rows.drop(columns=list(controls))
    return Corpus(text, own, rows[list(controls)], predictors, values, unknown, counts, remarks, joining.get("on", ()))


def _values(
    predictors: Sequence[Predictor], text: pd.DataFrame, remarks: list[str], joining: dict[str, Any]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Of every predictor its value at each word of the text, and 1 for words that its model does not know."""
    values, unknown = pd.DataFrame(index=text.index), pd.DataFrame(index=text.index)
    for one in predictors:
        places = match(one.table, text, remarks, **joining)
        add_structure(text, one.table, places)
        joined = places >= 0
        # Words that a grammar cannot derive are as infinitely surprising as no regression can say.
        values.loc[places[joined], one.name] = numbers(one.table, one.column, INFINITE, f"{one.source}:")[joined]
        unknown[one.name] = 0.0
        if "oov" in one.table:
            unknown.loc[places[joined], one.name] = numbers(one.table, "oov")[joined]
    return values, unknown


def _times(times: pd.DataFrame, column: str, reader: str, remarks: list[str]) -> np.ndarray:
    """Reading times; those of single readers are NaN where they are too short or too long."""
    found = numbers(times, column, option="--rt-column ")
    if np.nanmax(found, initial=0) < 10:
        remarks.append(f"warning: all reading times are below 10: are they seconds? Give milliseconds in {column!r}")
    if not reader and (low := found <= 0).any():
        remarks.append(
            f"warning: {plural(int(low.sum()), 'reading time')} of 0 or less in {column!r}, such as "
            f"{found[low][0]:g}, are used as they are: if these words were not read, empty the fields"
        )
    out = (found <= SHORTEST) | (found >= LONGEST)
    if reader and out.any():
        remarks.append(
            f"{out.sum():,} of {len(found):,} times are not in {SHORTEST} to {LONGEST:,} ms and do not count"
        )
    found = np.where(out & bool(reader), np.nan, found)
    return found


def _name_sentences(text: pd.DataFrame, remarks: list[str]) -> None:
    """Sentences and documents of every word, where the tables say less."""
    if "sentence_id" not in text:
        if "item" not in text or "zone" in text:
            name = text.attrs["name"]
            raise ValueError(f"no table says where sentences begin. Add a column sentence_id to {name} or to the times")
        text["sentence_id"] = text["item"]
    _fill(text, "sentence_id")
    if "document" in text:
        sentences = (text["sentence_id"] != text["sentence_id"].shift()).cumsum()
        text["document"] = text["document"].fillna(text.groupby(sentences)["document"].transform("first"))
        _fill(text, "document")
        _check_order(text)
        if text.groupby("sentence_id")["document"].nunique().max() > 1:  # numbered in each text
            text["sentence_id"] = text["document"] + ":" + text["sentence_id"]
    else:
        text["document"] = text["sentence_id"]
        _check_order(text)
        remarks.append(
            "no table has a column document, so every sentence is a text of its own: spillover does not cross sentences"
        )


def _fill(text: pd.DataFrame, column: str) -> None:
    """Words that the table with this column lacks belong to the unit of the words around them."""
    before = text[column].ffill()
    text[column] = before.where(before == text[column].bfill())
    if text[column].isna().any():
        row, name = int(text[column].isna().argmax()), text.attrs["name"]
        raise ValueError(
            f"{name}: row {row + 1} ({text['word'][row]!r}) has no {column}. Another table has this column, but not "
            f"this word. Add a column {column} to {name}"
        )


def _check_order(text: pd.DataFrame) -> None:
    """Refuse rows that do not stand in the order of the text, which places and spillover follow."""
    sentence = ["document", "sentence_id"]
    steps = [text.groupby(unit, sort=False).ngroup().diff() for unit in ("document", sentence)]
    for column, unit in (("sentence_id", ["document"]), ("word_id", sentence), ("number", ["document"])):
        if column in text and (ids := text[column].astype(str)).str.isdecimal().all():
            steps.append(ids.astype(int).groupby([text[name] for name in unit], sort=False).diff())
    if (back := pd.concat(steps, axis=1).lt(0).any(axis=1)).any():
        row = int(back.argmax())
        raise ValueError(
            f"{text.attrs['name']}: row {row + 1} ({text['word'][row]!r}) belongs before row {row} "
            f"({text['word'][row - 1]!r}). Sort the rows by document, sentence_id and word_id, all as numbers"
        )


def _counts(given: str, text: pd.DataFrame, times: pd.DataFrame, of_times: np.ndarray) -> pd.Series:
    """Frequencies of the words: a column of the text or of the times, or as `counter` finds them."""
    if given == "log_frequency":
        raise ValueError("--frequencies log_frequency names logarithms. Name a column or a file of counts")
    if given in text:
        return pd.Series(_not_negative(text, given))
    if given in times:
        return pd.Series(_not_negative(times, given)).groupby(of_times).mean().reindex(text.index)
    if not given.startswith(WORDFREQ) and not Path(given).is_file():
        raise ValueError(f"--frequencies {given} is neither a file nor a column; {list_columns(times)}")
    return pd.Series(map(counter(given), text["word"]), dtype=float)
