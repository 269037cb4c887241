# SPDX-License-Identifier: Apache-2.0
"""Texts with item ids, read from plain text, TSV, CSV or JSON lines, or from the words of a treebank."""

import dataclasses
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby, islice, pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from hf_synlm.data.brackets import begins_with_tree
from hf_synlm.data.punctuation import Punctuation
from hf_synlm.data.text import (
    UNSPACED,
    PathLike,
    ReadOnce,
    errors_at,
    file_ending,
    plural,
    read_lines,
    share,
    split_sentences,
)
from hf_synlm.evaluation.text.tables import FORMATS, file_format, need_columns, read_rows
from hf_synlm.trees.spans import check_words

_CONTROLS = re.compile("[\x80-\x84\x86-\x9f]")  # U+0085 is a line end
_UNSEEN = re.compile("[\x00\xad\u200b\u2060\ufeff]")  # soft hyphens, and spaces without width
_NAME = r'"?[A-Za-z_]\w*"?'
_NAMES = re.compile(rf"{_NAME}(?:([,;]){_NAME})(?:\1{_NAME})*")  # the header of a CSV file
logger = logging.getLogger(__name__)

_READERS = frozenset("subject subject_id subj participant participant_id reader reader_id workerid".split())
# Columns that say where in its text a row stands.
_PLACES = re.compile(r"position|(region|word|token|chunk|segment)[ _]?(id|name|number|nr|index|position)|region", re.I)
NUM_FIRST = 4096
"""How many texts of a file are read, and looked at, before the first is used."""
_NUM_ROWS = 16_384  # of a block of a table with a word per row
_NO_TEXT = (
    "Name the column that has it (--text-column). If a row holds one word or region of a text, name the column of the "
    "words: synlm surprisal --word-column COLUMN."
)
_MERGED = "Fill in empty cells (if cells are merged, a spreadsheet writes only the first)"
_LONG = 100  # words of a line that is hardly one sentence
_UNSPACED_LENGTH = 6  # words of these scripts are shorter on average
# What texts may have that sentences do not, and how it is seen in a text and its words.
_REMARKS: dict[str, Callable[[str, list[str]], object]] = {
    "brackets like a tree: the labels are read as words. To read trees, use an option such as --trees, or `synlm "
    "draw`, or `synlm evaluate perplexity --format treebank`": lambda text, words: begins_with_tree(text),
    f"more than {_LONG} words, and each is read as one sentence. If they are paragraphs, add --split-sentences": (
        lambda text, words: len(words) > _LONG
    ),
    "control characters (U+0080 to U+009F). In files of Windows these bytes are quotes and dashes: add --encoding "
    "cp1252": lambda text, words: _CONTROLS.search(text),
    "invisible characters (soft hyphens, spaces without width, NUL) or accents apart from their letters. Models "
    "know few such words: remove these characters, or compose letters (Unicode NFC)": (
        lambda text, words: _UNSEEN.search(text) or len(unicodedata.normalize("NFC", text)) < len(text)
    ),
    "quotation marks at both ends, which are read as parts of their words. If a program has added these marks, "
    "remove them": lambda text, words: len(words) > 1 and words[0][0] == words[-1][-1] == '"' and text.count('"') == 2,
}


@dataclass(frozen=True)
class WordRow:
    """A row of a table that has one word per row: the `word`, which may hold white space, and the other columns."""

    word: str
    place: int  # of the row, from 0
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class TextItem:
    """One text, usually a sentence; `item` is the user's id, or the number of the line."""

    item: str
    text: str
    document: int = 0  # texts with the same number belong together
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)  # the other columns of its table
    rows: Sequence[WordRow] = field(default=(), compare=False)  # its words, if the table has one word per row
    start: int = field(default=0, compare=False)  # where a sentence begins in the text that was split


def read_items(path: PathLike, **reading: Any) -> list[TextItem]:
    """The texts of `iterate_items`."""
    return list(iterate_items(path, **reading))


def iterate_items(
    path: PathLike,
    *,
    kind: str | None = None,
    text_column: str | None = None,
    item_column: str | None = None,
    word_column: str | None = None,
    sentence_column: str | None = None,
    by_sentences: bool = False,
    flag: str = "--format",
) -> Iterator[TextItem]:
    """Read texts, from tables by default those of the column "sentence" with the ids of the column "item".

    In plain text every line is one text (an empty one too, which has no words) and its number the item; documents end
    at blank lines. In tables the column "document", if there is one, says which rows belong together. With
    `word_column` a table has one word per row: the rows of an item, or of a sentence of an item, are a text.
    `by_sentences` splits texts into sentences. `flag` is the option of `kind`, for messages.
    """
    named = next(filter(None, (word_column, sentence_column, item_column, text_column)), None)
    if file_format(path, kind) == "txt":
        if named is not None:
            raise ValueError(
                f"{path} is read as plain text, which has no column {named!r}. If it is a table, give its format, "
                f"for example {flag} tsv"
            )
        items = _items_of_lines(path, kind is not None, flag)
    elif word_column is not None and text_column is None:
        if by_sentences:
            raise ValueError(
                "--split-sentences does not apply to a table with one word per row. Name the column of sentences by "
                "--sentence-column"
            )
        table = read_rows(path, file_format(path, kind))
        items = _items_of_words(path, table, word_column, item_column or "item", sentence_column)
    elif word_column is not None or sentence_column is not None:
        raise ValueError(
            "give the options of one kind of table: a text per row (--text-column), or a word per row "
            "(--word-column, --sentence-column)"
        )
    else:
        items = _items_of_rows(path, read_rows(path, file_format(path, kind)), text_column or "sentence", item_column)
    has_text = False
    for item in items:
        has_text = has_text or bool(item.text.strip())
        yield from _sentences_of(item) if by_sentences else [item]
    if not has_text:
        raise ValueError(f"{path} holds no text. Give a file with at least one word")


def _sentences_of(item: TextItem) -> Iterator[TextItem]:
    """An item for each sentence of a text, or the item itself if it has none."""
    end = 0
    for sentence in split_sentences(item.text) or [item.text]:
        start = item.text.index(sentence, end)
        end = start + len(sentence)
        yield dataclasses.replace(item, text=sentence, start=start)


def _items_of_lines(path: PathLike, is_text: bool, flag: str) -> Iterator[TextItem]:
    """A text for each line; unless it `is_text` as the user says, what looks like a table is refused."""
    lines, document = read_lines(path), 0
    first = list(islice(lines, NUM_FIRST))
    if not is_text and (problem := describe_table(first)):
        what, kind = problem
        raise ValueError(f"{path} is read as plain text, but {what}. Pass {flag} {kind}, or {flag} txt if it is text")
    for number, line in enumerate(chain(first, lines), 1):
        yield TextItem(str(number), line, document)
        document += not line.strip()


def _items_of_rows(
    path: PathLike, rows: Iterable[dict[str, Any]], text: str, item_column: str | None
) -> Iterator[TextItem]:
    """A text for each row."""
    documents, is_told = dict[Any, int](), False
    for number, row in enumerate(rows, 1):
        if _is_empty(row):
            continue
        need_columns(path, [row], [text], _NO_TEXT, number)
        where = f"{path}: data row {number}"
        document = documents.setdefault(_label(row, "document", where), len(documents))
        item = _label(row, item_column or "item", where, needed=item_column is not None)
        if isinstance(item, str) and not item.strip():
            if not is_told:
                logger.warning(f"{where} has no item. The item is then the number of the row. {_MERGED}")
            item, is_told = None, True
        more = {name: value for name, value in row.items() if name not in (text, item_column or "item")}
        yield TextItem(str(number if item is None else item), row[text], document, more)


def _items_of_words(
    path: PathLike, table: Iterator[dict[str, Any]], word: str, item_column: str, sentence: str | None
) -> Iterator[TextItem]:
    """A text for each item, or each sentence of an item, whose words are rows in the order of the file.

    A table is read in blocks of whole items; in one of several blocks the rows of an item stand together.
    """
    documents: dict[Any, int] = {}
    known, apart, first = set[str](), list[str](), 0
    for block in _whole_items(table, item_column):
        need_columns(path, block, [word], "Name the column that has it (--word-column).", first + 1)
        rows = {place: row for place, row in enumerate(block, first) if not _is_empty(row)}
        found = _telling_columns(path, list(rows.values()), word, item_column, sentence)
        apart = apart if first else found
        texts: dict[tuple[Any, ...], list[WordRow]] = {}
        for place, row in rows.items():
            where = f"{path}: data row {place + 1}"
            item = str(_label(row, item_column, where, needed=True)).strip()
            if not item:
                raise ValueError(f"{where} has an empty {item_column!r}. Fill in the item of every row")
            if item in known or not set(found) <= set(apart):
                raise ValueError(
                    f"{where}: item {item!r} has rows elsewhere, or conditions that earlier items lack. A table of "
                    f"more than {_NUM_ROWS:,} rows is read in pieces. Sort the table by item, and put items with all "
                    "conditions first"
                )
            part = None if sentence is None else _label(row, sentence, where, needed=True)
            more = {name: value for name, value in row.items() if name not in (word, item_column)}
            key = (item, part, *(str(row.get(column)).strip() for column in apart))
            texts.setdefault(key, []).append(WordRow(row[word], place, more))
        pairs = chain.from_iterable(map(pairwise, texts.values()))
        twice = [b.place + 1 for a, b in pairs if (a.word, a.columns) == (b.word, b.columns)]
        if twice:
            logger.warning(f"{path}: data row {twice[0]} repeats the row before ({len(twice)} such): both are read")
        _say_unlike_rows(path, texts)
        if sentence is None:
            _refuse_copies(path, item_column, texts)
            _say_several_sentences(path, list(texts.values()))
        for (item, _, *others), words in texts.items():
            _check_one_reader(path, item, words)
            if sentence is None:
                _check_one_text(path, item_column, item, words)
            named = _label(words[0].columns, "document", f"{path}: data row {words[0].place + 1}")
            document = documents.setdefault((item, *others) if named is None else named, len(documents))
            yield TextItem(item, " ".join(row.word for row in words), document, rows=words)
        known |= {item for item, *_ in texts}
        first += len(block)


def _is_empty(row: Mapping[str, Any]) -> bool:
    """Whether this is an empty row of a spreadsheet; an empty text alone is none."""
    return len(row) > 1 and not any(str(value).strip() for value in row.values() if value is not None)


def _whole_items(table: Iterable[dict[str, Any]], item_column: str) -> Iterator[list[dict[str, Any]]]:
    """Rows in blocks, which end where an item does."""
    rows: list[dict[str, Any]] = []
    for row in table:
        if len(rows) >= _NUM_ROWS and row.get(item_column) != rows[-1].get(item_column):
            yield rows
            rows = []
        rows.append(row)
    yield rows


def _telling_columns(
    path: PathLike, rows: Sequence[dict[str, Any]], word: str, item_column: str, sentence: str | None
) -> list[str]:
    """Columns that tell the texts of an item apart, as conditions do.

    They are called condition, or their values divide most items into texts of the same words, at least by two thirds.
    Where only another column begins anew with each value, such as a number of the word, they may be; a ValueError.
    """
    parts: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
    for row in rows:
        for name in row.keys() - {word, item_column, sentence}:
            item = parts.setdefault(name, {}).setdefault(str(row.get(item_column)), {})
            item.setdefault(str(row[name]), []).append(row)
    found, doubtful = [], dict[str, str]()
    for name in filter(parts.__contains__, rows[0]):
        several = {item: list(values.values())[:2] for item, values in parts[name].items() if len(values) > 1}
        alike = [_are_alike(word, *both) for both in several.values()]
        is_named = name.lower() in ("condition", "cond") and bool(several)
        if is_named or (name.lower() not in _READERS and 2 * sum(alike) > len(alike)):
            found.append(name)
            continue
        anew = [
            {c for c in parts.keys() - {name} if _begins_anew(*([row.get(c) for row in part] for part in both))}
            | ({word} if all(part[0][word][:1].isupper() for part in both) else set())
            for both in several.values()
            if min(map(len, both)) > 1
        ]
        is_place = _PLACES.fullmatch(name) or name.lower() in _READERS
        if not is_place and 2 * sum(map(bool, anew)) > len(several):
            doubtful[name] = f"{sorted(set.union(*anew))[0]!r} begins anew, as in {next(iter(several))!r}"
        elif not is_place and _takes_turns(rows, name, item_column):
            doubtful[name] = f"the values take turns, as in {next(iter(several))!r}"
    if doubtful and not found and sentence is None and item_column in rows[0]:
        # Regions change with almost every row, what tells texts apart seldom.
        # Numbers are rather places in a text.
        changes = {name: sum(a.get(name) != b.get(name) for a, b in pairwise(rows)) for name in doubtful}
        name = min(doubtful, key=lambda name: (str(rows[0].get(name)).isdecimal(), changes[name]))
        raise ValueError(
            f"{path}: where {name!r} changes inside an item, {doubtful[name]}. If each part is a text of its own, "
            f"add --sentence-column {name}, or rename the column to 'condition'. If the item is one text, add "
            f"--sentence-column {item_column}"
        )
    return sorted(found)


def _are_alike(word: str, a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> bool:
    """Whether rows have mostly the same words."""
    first, second = (Counter(part for row in rows for part in row[word].lower().split()) for rows in (a, b))
    return (first & second).total() >= max(3, min(first.total(), second.total()) * 2 / 3)


def _takes_turns(rows: Sequence[dict[str, Any]], name: str, item_column: str) -> bool:
    """Whether the values of a column alternate in all items, as where conditions stand row by row."""
    orders, rounds = dict[Any, list[Any]](), 0
    for row in rows:
        orders.setdefault(row.get(item_column), []).append(row.get(name))
    for values in (values for values in orders.values() if len(set(values)) > 1):
        size = len(set(values))
        if size == len(values) or values != (values[:size] * len(values))[: len(values)]:
            return False
        rounds += len(values) // size
    return rounds > 2


def _begins_anew(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Whether the values of a column are those of another part of the item once more, and tell its rows apart."""
    size = min(len(a), len(b))
    return a[:size] == b[:size] and len(set(map(str, a))) == len(a)


def _comes_in_rounds(values: Sequence[str]) -> bool:
    """Whether all of three or more values come several times, in any order, each once before any comes again."""
    size = len(set(values))
    parts = [values[k : k + size] for k in range(0, len(values), size)]
    return size > 2 and len(parts) > 1 and all(len(set(part)) == size for part in parts)


def _check_one_text(path: PathLike, item_column: str, item: str, words: Sequence[WordRow]) -> None:
    """Raise ValueError if regions, or numbers of words, begin anew inside a text."""
    for column in words[0].columns:
        of_rows = [str(row.columns.get(column)) for row in words]
        values = [value for value, _ in groupby(of_rows)]
        size = values.index(values[0], 1) if values[0] in values[1:] else 0
        first, others = values[:size], values[size:]
        if _PLACES.fullmatch(column):  # where a text may lack the last ones
            is_again = size > 1 and len(others) > 1 and (size <= len(others) or values[0].isdecimal())
            if sorted(first) == sorted(others[:size]):
                others[:size] = first  # a condition may order regions in its own way
        else:
            is_again = size > 2 and len(others) % size == 0
        is_again = is_again and _begins_anew(first, others[:size])
        if is_again or (_PLACES.fullmatch(column) and any(map(_comes_in_rounds, (of_rows, values)))):
            raise ValueError(
                f"{path}: {column!r} begins anew inside item {item!r}, with {values[0]!r}. If each part is a text of "
                "its own, give each part its own value in a column condition, or name another column that tells the "
                f"parts apart by --sentence-column. If the item is one text, add --sentence-column {item_column}"
            )


def _say_unlike_rows(path: PathLike, texts: Mapping[tuple[Any, ...], Sequence[WordRow]]) -> None:
    """Tell of texts without a condition, and of texts with other rows than most of their condition.

    A typing error in a condition makes two texts of one.
    """
    gaps = [words[0].place + 1 for key, words in texts.items() if not all(key[2:])]
    if 0 < len(gaps) < len(texts):
        logger.warning(
            f"{path}: texts with an empty condition: {len(gaps)} of {len(texts)}, the first in data row {gaps[0]}. "
            f"Each is read as a text of its own. {_MERGED}"
        )

    def shape(words: Sequence[WordRow]) -> str:
        places = [column for column in words[0].columns if _PLACES.fullmatch(column)]
        order = (" ".join(str(row.columns.get(column)) for column in places) for row in words)
        return plural(len(words), "row") + f" ({', '.join(order)})" * bool(places)

    by_condition: dict[tuple[Any, ...], dict[tuple[Any, ...], str]] = {}
    for key, words in texts.items():
        by_condition.setdefault(key[2:], {})[key] = shape(words)
    odd = list[str]()
    for shapes in by_condition.values():
        usual, count = Counter(shapes.values()).most_common(1)[0]
        for key, own in shapes.items():
            if own != usual and 3 * count >= 2 * len(shapes):
                name = ", ".join(str(part) for part in key if part not in (None, ""))
                odd.append(f"{name} has {own}, most others have {usual}")
    if odd:
        logger.warning(
            f"{path}: {plural(len(odd), 'text')} of {len(texts)} may have a typing error in the item, the condition or "
            f"the order of rows. The first: {odd[0]}"
        )


def _say_several_sentences(path: PathLike, texts: Sequence[Sequence[WordRow]]) -> None:
    """Tell that most texts hold several sentences, as where a column of conditions is missing."""
    number = sum(len(split_sentences(" ".join(row.word for row in words))) > 1 for words in texts)
    if 2 * number > len(texts):
        logger.warning(
            f"{path}: {number} of {plural(len(texts), 'text')}: several sentences are read as one text. If they "
            "are several texts, name the column that tells them apart: call it condition, or give --sentence-column"
        )


def _refuse_copies(path: PathLike, item_column: str, texts: Mapping[tuple[Any, ...], Sequence[WordRow]]) -> None:
    """Raise ValueError if texts are the same rows several times, as where an item was pasted twice.

    Without a column of places these are four rows or more: a text may say "bye bye , bye bye ,".
    """
    copies, remedy = list[int](), "Delete them"
    for key, words in texts.items():
        rows, least = [(row.word, row.columns) for row in words], 4 - 2 * any(map(_PLACES.fullmatch, words[0].columns))
        sizes = (size for size in range(least, len(rows)) if not len(rows) % size and rows[size:] == rows[:-size])
        copies += [row.place + 1 for row in words[next(sizes, len(rows)) :]]
        if copies and not all(key[2:]):
            remedy = _MERGED
    if copies:
        runs = [list(run) for _, run in groupby(enumerate(sorted(copies)), lambda pair: pair[1] - pair[0])]
        shown = ", ".join(f"{run[0][1]} to {run[-1][1]}" for run in runs[:5]) + ", ..." * (len(runs) > 5)
        raise ValueError(
            f"{path}: {plural(len(copies), 'data row')} ({shown}) repeat earlier rows of the same text. {remedy}. "
            f"If the text repeats itself, add --sentence-column {item_column}"
        )


def is_part_of_text(item: TextItem, other: TextItem) -> bool:
    """Whether rows that were read as texts look like words or regions of one: only the place in a text differs."""
    changed = [name for name, value in item.columns.items() if value != other.columns.get(name)]
    is_row = not other.start  # no further sentence of a text that was split
    return is_row and item.item == other.item and (not changed or any(map(_PLACES.fullmatch, changed)))


def _check_one_reader(path: PathLike, item: str, words: Sequence[WordRow]) -> None:
    """Raise ValueError if the rows of a text are those of several readers."""
    for column in words[0].columns:
        readers = {row.columns[column] for row in words} if column.lower() in _READERS else ()
        if len(readers) > 1:
            raise ValueError(
                f"{path}: {item!r} has the rows of {len(readers)} readers ({column}), which are not one text. Score "
                "a table with one row per word, and then join the reading times to this table"
            )


def describe_table(lines: Iterable[str]) -> tuple[str, str] | None:
    """What tells that plain text is a table or CoNLL-U, and the format of such a table; None for text."""
    rows = [line for line in lines if line.strip() and not line.startswith("#")]
    tabs = {line.count("\t") for line in rows}
    if tabs == {9}:
        return 'has ten columns, like CoNLL-U, where lines "# text = ..." hold the sentences', "tsv"
    if len(rows) > 1 and (names := _NAMES.fullmatch(rows[0])):
        number = rows[0].count(names[1])
        if all(line.count(names[1]) >= number for line in rows):
            return f"begins with the names of {number + 1} columns, like a table", "csv"
    if len(rows) < 2 or len(tabs) > 1 or tabs == {0} or rows[0].startswith("\t"):
        return None
    return f"has {tabs.pop() + 1} columns, like a table", "tsv"


def remarks_on(texts: Iterable[str]) -> list[str]:
    """What tells that texts are not sentences whose words are separated by spaces."""
    counts, number, unspaced = Counter[str](), 0, list[int]()
    for text in texts:
        words = text.split()
        number += bool(words)
        counts.update(remark for remark, is_odd in _REMARKS.items() if is_odd(text, words))
        counts["single"] += len(words) == 1
        unspaced += [] if text.isascii() else [count for word in words if (count := len(UNSPACED.findall(word)))]
    remarks = [f"{share(counts[remark], number, 'text')} {remark}" for remark in _REMARKS if counts[remark]]
    if sum(unspaced) > _UNSPACED_LENGTH * len(unspaced):
        remarks.append(
            f"words in Chinese, Japanese or Thai script have {mean(unspaced):.0f} characters on average: spaces "
            "separate words here, and whole clauses are read as one. Put spaces between words first, for example by "
            "jieba (Chinese), fugashi (Japanese) or PyThaiNLP (Thai)"
        )
    elif number >= 5 and counts["single"] >= 0.9 * number:
        remarks.append(
            f"{share(counts['single'], number, 'text')} one word, and each is read as a sentence of its own. If they "
            "are the words of texts, in a table with a word per row: synlm surprisal --word-column"
        )
    return remarks


def text_files(places: Sequence[Path]) -> list[Path]:
    """The files that these are, or that lie in these folders and have one of the endings of `FORMATS`, by name.

    Hidden files and folders in folders are left out. Raises ValueError for a folder without such files, and for a file
    that is named twice.
    """
    files: list[Path] = []
    for place in places:
        inside = [path for path in sorted(place.glob("[!.]*")) if file_ending(path).removeprefix(".") in FORMATS]
        inside = [path for path in inside if path.is_file()]
        if place.is_dir() and not inside:
            raise ValueError(f"the folder {place} holds no file in {', '.join('.' + name for name in FORMATS)}")
        files += inside if place.is_dir() else [place]
    if twice := [str(path) for path, count in Counter(path.resolve() for path in files).items() if count > 1]:
        raise ValueError(f"{twice[0]} is named twice. Name it once")
    return files


def iterate_files(files: Sequence[PathLike], *, kind: str | None = None, **reading: Any) -> Iterator[TextItem]:
    """`iterate_items` of several files; their texts have a column `file`, and no document in common.

    Columns of the input that are called `file` become `file_input`. The columns that are named are those of the tables,
    if there are some.
    """
    next_document = next_row = 0
    has_tables = any(file_format(file, kind) != "txt" for file in files)

    def with_file(file: PathLike, columns: Mapping[str, Any]) -> dict[str, Any]:
        return {"file": str(file), **{"file_input" if k == "file" else k: value for k, value in columns.items()}}

    for file in files:
        is_text = has_tables and file_format(file, kind) == "txt"
        given = {name: value for name, value in reading.items() if not (is_text and name.endswith("_column"))}
        first_document, first_row = next_document, next_row
        for item in iterate_items(file, kind=kind, **given):
            rows = [WordRow(row.word, first_row + row.place, with_file(file, row.columns)) for row in item.rows]
            document, more = first_document + item.document, with_file(file, item.columns)
            yield dataclasses.replace(item, document=document, columns=more, rows=rows)
            next_document = max(next_document, document + 1)
            next_row += len(rows)


@dataclass(frozen=True)
class OpenTexts:
    """Texts of files.

    Attributes:
        files: the files, each of which is opened once.
        first: the first texts, which are read already.
        items: all texts: those of `first`, or an iterator that reads the others as they are needed.
        late: counts columns that the first texts lack, of texts that were read after them.
    """

    files: list[ReadOnce]
    first: list[TextItem]
    items: list[TextItem] | Iterator[TextItem]
    late: Counter[str]


def open_texts(places: Sequence[Path], **reading: Any) -> OpenTexts:
    """Open the files that these are, or that lie in these folders, and read the first `NUM_FIRST` texts.

    `reading` is as in `iterate_items`.
    """
    paths = text_files(places)
    files = list(map(ReadOnce, paths))
    items = iterate_items(files[0], **reading) if paths[:1] == list(places) else iterate_files(files, **reading)
    first = list(islice(items, NUM_FIRST))
    names = {name for item in first for columns in columns_of_rows(item) for name in columns}
    late = Counter[str]()

    def others() -> Iterator[TextItem]:
        for item in items:
            late.update({name for columns in columns_of_rows(item) for name in columns} - names)
            yield item

    more = others()
    following = next(more, None)
    return OpenTexts(files, first, first if following is None else chain(first, [following], more), late)


def columns_of_rows(item: TextItem) -> list[Mapping[str, Any]]:
    """The columns of the row of a text, and of the rows of its words."""
    return [item.columns, *(row.columns for row in item.rows)]


def _label(row: Mapping[str, Any], column: str, where: str, needed: bool = False) -> str | float | None:
    """Text or number that identifies a row; None if the column is not `needed` and has no value."""
    value = row.get(column)
    if needed and value is None:
        raise ValueError(
            f"{where} has no {column!r} (it has {', '.join(map(str, row))}). Name the column of the ids (--item-column)"
        )
    if isinstance(value, (dict, list)):
        raise ValueError(f"{where} has {value!r} in the column {column!r}. Write a number or text")
    return value


def read_treebank_items(
    path: PathLike, punctuation: str = "keep", punctuation_by: Punctuation = "tag", **reading: Any
) -> tuple[list[TextItem], str]:
    """The sentences of a treebank that have words left, as texts of one document; and how punctuation was treated.

    `punctuation` is "keep", or "remove" for models that are trained without punctuation; `punctuation_by` and `reading`
    are as in `load_treebank`.
    """
    from hf_synlm.evaluation.trees.gold_treebank import load_treebank

    remedy = "recognize punctuation by form (--punctuation-by form), or keep it (--punctuation keep)"
    treebank = load_treebank(Path(path), punctuation, punctuation_by=punctuation_by, remedy=remedy, **reading)
    for sentence in treebank.sentences:
        with errors_at(sentence.source):
            check_words(sentence.words)
    items = [TextItem(str(number), " ".join(words)) for number, words in enumerate(treebank.words, 1)]
    return items, treebank.convention
