# SPDX-License-Identifier: Apache-2.0
"""Dependency treebanks in CoNLL-U, and the constituents of their trees.

    1  Im     ... ADP   ... 2  case          flat:        (NOUNP (ADP Im) (ADJ alten) (NOUN Garten))
    2  alten  ... ADJ   ... 3  amod          left-first:  (NOUNP (ADP Im) (NOUNP (ADJ alten) (NOUN Garten)))
    3  Garten ... NOUN  ... 0  root          right-first: the same here; they differ in what hangs to the right

A multiword token such as *Im* (in dem) is one word by default: it hangs where its highest word hangs, and what hangs
from any of its words hangs from it. Trees with crossing arcs are made projective by lifting: while an arc is not
projective, the word of the shortest one hangs from its head's head.

Structures (Kando, Noji and Miyao, ACL 2022). With [a, b) the span of a word h and all below it, l its dependents to the
left and r those to the right, the constituents of h are

    flat         [a, b)
    left-first   [start(l), b) for every l,  [h, end(r)) for every r
    right-first  [a, end(r)) for every r,    [start(l), h + 1) for every l
"""

import dataclasses
import logging
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from hf_synlm.data.text import PathLike, file_ending, plural, read_lines

Structure = Literal["flat", "left-first", "right-first"]
Labels = Literal["upos", "X", "deprel"]
Tokens = Literal["surface", "syntactic"]
NonProjective = Literal["lift", "skip", "refuse"]
Invalid = Literal["refuse", "skip"]
LabeledSpan = tuple[str, int, int]
logger = logging.getLogger(__name__)

# What training programs and evaluations can choose, with the default.
DEPENDENCY_OPTIONS = {
    "structure": "flat",
    "labels": "upos",
    "tokens": "surface",
    "nonprojective": "lift",
    "invalid": "refuse",
}
_ENDINGS = (".conllu", ".conll", ".conllx")
_NUM_COLUMNS = 10
_SPACE = re.compile(r"\s")
_WORD_OR_RANGE, _EMPTY_NODE = re.compile("[0-9]+(-[0-9]+)?"), re.compile(r"[0-9]+\.[0-9]+")


@dataclasses.dataclass(frozen=True)
class DependencySentence:
    """A sentence with its dependency tree.

    Attributes:
        words: the n words.
        tags: the universal part-of-speech tag of each word (UPOS).
        heads: the place of each word's head; -1 = the root.
        relations: DEPREL of each word.
        spaces: whether a space follows each word.
        source: "file:line" of the first line.
        name: `sent_id`, or "".
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]
    spaces: tuple[bool, ...]
    source: str
    name: str


class _Row(NamedTuple):
    """A line of a sentence: of a word or of a range of words."""

    line: int
    columns: list[str]

    @property
    def word(self) -> str:
        return _SPACE.sub("_", self.columns[1])

    @property
    def space(self) -> bool:
        return "SpaceAfter=No" not in self.columns[9].split("|")


class _Range(NamedTuple):
    """A word, or a multiword token, over the words [first, last) of the treebank."""

    first: int
    last: int
    row: _Row


class _LineError(ValueError):
    """What is wrong with a line."""

    def __init__(self, line: int, what: str) -> None:
        super().__init__(what)
        self.line = line


class _TreeError(_LineError):
    """Why the dependencies of a sentence do not form a tree."""


# ---------------------------------------------------------------------------------------------------- reading
def has_content(line: str) -> bool:
    """Whether a line is neither blank nor a comment."""
    return bool(line.strip()) and not line.startswith("#")


def is_conllu(path: PathLike, first_line: str) -> bool:
    """Whether a file is CoNLL-U: by its ending, or by its first line that `has_content`, which has ten columns."""
    return file_ending(path) in _ENDINGS or first_line.count("\t") == _NUM_COLUMNS - 1


def holds_dependencies(path: PathLike) -> bool:
    """Whether a file is CoNLL-U, by `is_conllu`."""
    return is_conllu(path, next(filter(has_content, read_lines(path)), ""))


def read_conllu(
    path: PathLike,
    tokens: Tokens = "surface",
    counts: Counter[str] | None = None,
    lines: Iterable[str] | None = None,
    invalid: Invalid = "refuse",
) -> list[DependencySentence]:
    """Read all sentences of a file in CoNLL-U or CoNLL-X.

    Args:
        path: the file.
        tokens: "surface" makes one word of a multiword token, "syntactic" takes the words of the treebank.
        counts: gets the numbers of multiword tokens, empty nodes, and words with white space inside, which becomes "_".
        lines: of the file, if it is open already.
        invalid: "skip" leaves out sentences with several roots, cycles or heads that are not there, and counts them in
            a warning.

    Returns:
        The sentences.

    Raises:
        ValueError: a sentence is not CoNLL-U or its dependencies form no tree; the message lists up to 20 of these as
            "file:line: what".
    """
    counts = Counter() if counts is None else counts
    sentences, problems, no_trees = [], [], list[str]()
    for block in _blocks(read_lines(path) if lines is None else lines):
        try:
            sentences.append(_read_sentence(block, str(path), tokens, counts))
        except _TreeError as error:
            no_trees.append(f"{path}:{error.line}: {error}")
        except _LineError as error:
            problems.append(f"{path}:{error.line}: {error}")
    if no_trees and invalid == "skip":
        logger.warning(
            f"left out, because their dependencies form no tree: {plural(len(no_trees), 'sentence')}, such as "
            f"{no_trees[0]}"
        )
    elif no_trees:
        problems += [*no_trees[:-1], f"{no_trees[-1]}. `synlm treebank --invalid skip` leaves out such sentences"]
    if len(problems) > 1 and not sentences and all("HEAD is '_'" in problem for problem in problems):
        raise ValueError(f"{path}: no word has a HEAD. Parse the text first")
    if problems:
        head = [] if len(problems) == 1 else [f"{path}: {plural(len(problems), 'sentence')} cannot be read:"]
        raise ValueError("\n".join([*head, *problems[:20], *(["..."] if len(problems) > 20 else [])]))
    return sentences


def _blocks(lines: Iterable[str]) -> Iterator[list[tuple[int, str]]]:
    """The numbered lines of each sentence; blank lines lie between sentences, and comments alone are none."""
    for blank, numbered in groupby(enumerate(lines, 1), key=lambda pair: not pair[1].strip(" ")):
        block = list(numbered)
        if not blank and not all(line.startswith("#") for _, line in block):
            yield block


def _read_sentence(block: list[tuple[int, str]], path: str, tokens: Tokens, counts: Counter[str]) -> DependencySentence:
    first = block[0][0]
    words, ranges, num_empty = _sort_rows([_Row(line, text.split("\t")) for line, text in block if text[0] != "#"])
    if not words:
        raise _LineError(first, "a sentence without words")
    if ranges and ranges[-1].last > len(words):
        raise _LineError(first, f"the last range ends after the last word {len(words)}")
    heads = _read_heads(words, first)
    counts["empty nodes"] += num_empty
    counts["multiword tokens"] += len(ranges)
    spaces = [row.space for row in words]
    for span in ranges:
        spaces[span.first : span.last] = [*[False] * (span.last - span.first - 1), span.row.space]
    joined = ranges if tokens == "surface" else []
    inside = {place for span in joined for place in range(span.first, span.last)}
    spans = sorted([*joined, *(_Range(k, k + 1, row) for k, row in enumerate(words) if k not in inside)])
    counts["words with white space"] += sum(span.row.word != span.row.columns[1] for span in spans)
    comments = (text[1:].partition("=") for _, text in block if text[0] == "#")
    names = [value.strip() for key, _, value in comments if key.strip() == "sent_id"]
    # A range hangs as that of its words with the fewest arcs to the root.
    depths = _depths(heads)
    speakers = [min(range(span.first, span.last), key=depths.__getitem__) for span in spans]
    place_of = [place for place, span in enumerate(spans) for _ in range(span.first, span.last)]
    return DependencySentence(
        words=tuple(span.row.word for span in spans),
        tags=tuple(words[k].columns[3] for k in speakers),
        heads=tuple(-1 if heads[k] < 0 else place_of[heads[k]] for k in speakers),
        relations=tuple(words[k].columns[7] for k in speakers),
        spaces=tuple(spaces[span.last - 1] for span in spans),
        source=f"{path}:{first}",
        name=names[0] if names else "",
    )


def _sort_rows(rows: Iterable[_Row]) -> tuple[list[_Row], list[_Range], int]:
    """Words, ranges, and the number of empty nodes."""
    words: list[_Row] = []
    ranges: list[_Range] = []
    num_empty = 0
    for row in rows:
        if len(row.columns) != _NUM_COLUMNS:
            raise _LineError(row.line, f"{plural(len(row.columns), 'column')}; CoNLL-U has 10, separated by tabs")
        name, following = row.columns[0], len(words) + 1
        if _EMPTY_NODE.fullmatch(name):
            num_empty += 1
            continue
        if not _WORD_OR_RANGE.fullmatch(name):
            raise _LineError(row.line, f"ID {name!r} names no word, range or empty node")
        begin, _, end = name.partition("-")
        if end and (int(begin) != following or int(end) < following):
            raise _LineError(row.line, f"range {name} does not begin with the next word {following}")
        if end and ranges and ranges[-1].last >= following:
            raise _LineError(row.line, f"range {name} begins inside the range before it")
        if not end and int(begin) != following:
            raise _LineError(row.line, f"ID {name} stands where {following} is expected")
        for column, what in ((1, "FORM"), *(() if end else ((3, "UPOS"), (7, "DEPREL")))):
            if not row.columns[column]:
                raise _LineError(row.line, f"{what} is empty")
        if not end and len(f"{row.columns[3]} {row.columns[7]}".split()) != 2:
            raise _LineError(row.line, f"white space in {row.columns[3]!r} or {row.columns[7]!r}")
        if end:
            ranges.append(_Range(following - 1, int(end), row))
        else:
            words.append(row)
    return words, ranges, num_empty


def _read_heads(words: Sequence[_Row], first_line: int) -> tuple[int, ...]:
    """The place of each word's head, -1 for the root."""
    for number, row in enumerate(words, 1):
        head = row.columns[6]
        if not head.isascii() or not head.isdigit():
            raise _LineError(row.line, f"HEAD is {head!r}: give the ID of a word, or 0")
        if len(head) > 9 or int(head) > len(words) or int(head) == number:
            raise _TreeError(row.line, f"HEAD of word {number} of {len(words)} is {head}")
    heads = tuple(int(row.columns[6]) - 1 for row in words)
    if heads.count(-1) != 1:
        raise _TreeError(first_line, f"{heads.count(-1)} roots (HEAD 0): there must be one")
    depths = _depths(heads)
    for number, (row, depth) in enumerate(zip(words, depths, strict=True), 1):
        if depth > len(words):
            raise _TreeError(row.line, f"word {number} does not lead to the root: it is in a cycle, or below one")
    return heads


def _depths(heads: Sequence[int]) -> list[int]:
    """Arcs from each word up to above the root; more than there are words if it does not lead there."""
    depths = []
    for word in range(len(heads)):
        depth = 0
        while word >= 0 and depth <= len(heads):
            word, depth = heads[word], depth + 1
        depths.append(depth)
    return depths


# ---------------------------------------------------------------------------------------------------- trees
def drop_punctuation(sentence: DependencySentence, marks: Container[str]) -> DependencySentence | None:
    """The sentence without the words whose tag is one of `marks`; None if no word is left.

    What hangs from punctuation hangs from the next word above that is none. If the root was punctuation, the first word
    that hung from it is the root, and the others hang from this one.
    """
    kept = [word for word, tag in enumerate(sentence.tags) if tag not in marks]
    if not kept:
        return None
    places = {word: place for place, word in enumerate(kept)}

    def above(word: int) -> int:
        head = sentence.heads[word]
        while head >= 0 and head not in places:
            head = sentence.heads[head]
        return places.get(head, -1)

    heads = [above(word) for word in kept]
    root = heads.index(-1)
    relations = [sentence.relations[word] for word in kept]
    if sentence.heads[kept[root]] >= 0:
        relations[root] = "root"
    return dataclasses.replace(
        sentence,
        words=tuple(sentence.words[word] for word in kept),
        tags=tuple(sentence.tags[word] for word in kept),
        heads=tuple(root if head < 0 and place != root else head for place, head in enumerate(heads)),
        relations=tuple(relations),
        spaces=tuple(sentence.spaces[a] or b - a > 1 for a, b in pairwise([*kept, len(sentence.words)])),
    )


def crossing_arcs(heads: Sequence[int], below: Sequence[int] | None = None) -> list[int]:
    """The words whose arc to the head is not projective: a word between the two is not below the head.

    `below` is what `_below` gives. Cost: O(n) operations on n bits.
    """
    below = _below(heads) if below is None else below
    found = []
    for word, head in enumerate(heads):
        first, last = min(word, head), max(word, head)
        between = (1 << last) - (1 << first + 1)
        if head >= 0 and between & ~below[head]:
            found.append(word)
    return found


def _below(heads: Sequence[int]) -> list[int]:
    """Of each word, a number with one bit for itself and for each word below it."""
    below = [1 << word for word in range(len(heads))]
    for word in sorted(range(len(heads)), key=_depths(heads).__getitem__, reverse=True):
        if heads[word] >= 0:
            below[heads[word]] |= below[word]
    return below


def lift(sentence: DependencySentence, counts: Counter[str]) -> DependencySentence:
    """Make a tree projective: while arcs cross, the word of the shortest (leftmost) hangs from its head's head.

    Cost: O(n) operations on n bits for each lift, of which there are O(n^2).
    """
    heads, below = list(sentence.heads), _below(sentence.heads)
    moved = set()
    while crossing := crossing_arcs(heads, below):
        word = min(crossing, key=lambda k: (abs(heads[k] - k), k))
        below[heads[word]] &= ~below[word]
        heads[word] = heads[heads[word]]
        moved.add(word)
        counts["lifts"] += 1
    counts["words moved"] += len(moved)
    return dataclasses.replace(sentence, heads=tuple(heads))


def constituents(
    sentence: DependencySentence, structure: Structure, labels: Labels, head_mark: str = ""
) -> list[LabeledSpan]:
    """The labeled spans (label, i, j) of a projective tree, in post-order, see the top of this file.

    A word without dependents has none; the one word of a sentence has one. `head_mark` is added to the label of a
    constituent that is a part of another one of the same word.
    """
    heads, words = sentence.heads, range(len(sentence.heads))
    starts, ends = list(words), [word + 1 for word in words]
    for word in sorted(words, key=_depths(heads).__getitem__, reverse=True):
        head = heads[word]
        if head >= 0:
            starts[head], ends[head] = min(starts[head], starts[word]), max(ends[head], ends[word])
    found: list[LabeledSpan] = []
    for head in words:
        a, b = starts[head], ends[head]
        left = [starts[word] for word in words if heads[word] == head and word < head]
        right = [ends[word] for word in words if heads[word] == head and word > head]
        spans = {
            "flat": [(a, b)] if left or right else [],
            "left-first": [*((i, b) for i in left), *((head, j) for j in right)],
            "right-first": [*((a, j) for j in right), *((i, head + 1) for i in left)],
        }[structure]
        label = {"X": "X", "upos": f"{sentence.tags[head]}P", "deprel": sentence.relations[head]}[labels]
        spans = sorted(spans, key=lambda span: span[0] - span[1]) if len(words) > 1 else [(0, 1)]
        found += [(label + head_mark * (inner > 0), *span) for inner, span in enumerate(spans)]
    return sorted(found, key=lambda span: (span[2], -span[1]))
