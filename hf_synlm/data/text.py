"""Raw text files -> documents -> sentences.

A text file holds documents separated by blank lines. A line holds running text, which is split into sentences by
sentencex (rules for about 300 languages), or exactly one sentence. All functions are iterators, so that a corpus never
has to fit into memory.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import sentencex

PathLike: TypeAlias = str | os.PathLike[str]


def read_lines(path: PathLike, *, encoding: str = "utf-8") -> Iterator[str]:
    r"""Yield the lines of a text file without their ends; \n, \r\n and \r end a line, a byte order mark is dropped.

    Args:
        path: the file.
        encoding: its character encoding.

    Yields:
        One string per line.

    Raises:
        ValueError: the file is not text in this encoding; the message names the line, the byte and its position.
    """
    codec = "utf-8-sig" if encoding.lower().replace("_", "-") in ("utf-8", "utf8") else encoding
    with Path(path).open(encoding=codec) as file:
        try:
            for line in file:
                yield line.rstrip("\n")
        except UnicodeDecodeError as error:
            raise ValueError(_describe_bad_byte(Path(path), encoding)) from error


def _describe_bad_byte(path: Path, encoding: str) -> str:
    """Say where a file cannot be decoded; the file's iterator only knows the position in its buffer."""
    data = path.read_bytes()
    try:
        data.decode(encoding)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        return (
            f"{path}:{line}: byte 0x{data[error.start]:02x} at position {error.start} is not {encoding} "
            f"({error.reason}): convert the file or name its encoding"
        )
    return f"{path}: not {encoding} text: convert the file or name its encoding"


def lines_to_documents(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group lines into documents, which end at blank lines.

    Args:
        lines: lines of text.

    Yields:
        Per document its lines without surrounding white space, at least one.
    """
    document: list[str] = []
    for line in lines:
        stripped = line.strip()
        if stripped:
            document.append(stripped)
        elif document:
            yield document
            document = []
    if document:
        yield document


def split_sentences(text: str, *, language: str = "en") -> list[str]:
    """Split running text into sentences by sentencex.

    Args:
        text: running text.
        language: ISO 639 code; sentencex takes the rules of a related language where it has none of its own.

    Returns:
        The sentences without surrounding white space; empty ones are left out.
    """
    return [stripped for sentence in sentencex.segment(language, text) if (stripped := sentence.strip())]


def documents_to_sentences(
    documents: Iterable[Sequence[str]], *, one_sentence_per_line: bool = False, language: str = "en"
) -> Iterator[list[str]]:
    """Split the lines of documents into sentences; no sentence crosses the end of a line.

    Args:
        documents: per document its lines.
        one_sentence_per_line: take every line as one sentence instead of splitting it.
        language: ISO 639 code for the splitting.

    Yields:
        Per document its sentences.
    """
    for lines in documents:
        if one_sentence_per_line:
            yield list(lines)
        else:
            yield [sentence for line in lines for sentence in split_sentences(line, language=language)]


def read_documents(
    paths: PathLike | Iterable[PathLike],
    *,
    one_sentence_per_line: bool = False,
    language: str = "en",
    encoding: str = "utf-8",
) -> Iterator[list[str]]:
    """Read text files as documents of sentences; a document ends at a blank line and at the end of its file.

    Args:
        paths: a file or several.
        one_sentence_per_line: take every line as one sentence instead of splitting it.
        language: ISO 639 code for the splitting.
        encoding: character encoding of the files.

    Yields:
        Per document its sentences, at least one.

    Raises:
        ValueError: a file holds no text, or is not text in this encoding; the message names the file and position.
    """
    for path in [paths] if isinstance(paths, (str, os.PathLike)) else paths:
        documents = lines_to_documents(read_lines(path, encoding=encoding))
        is_empty = True
        for sentences in documents_to_sentences(
            documents, one_sentence_per_line=one_sentence_per_line, language=language
        ):
            is_empty = False
            yield sentences
        if is_empty:
            raise ValueError(f"{path} holds no text: remove it from the list of files")
