# SPDX-License-Identifier: Apache-2.0
"""What the program EVALB reads: its parameter files (.prm), and trees as it reads them.

The scores are in `evaluation/trees/evalb.py`. Source: evalb.c of EVALB 20080701 (Sekine and Collins; public domain).
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from hf_synlm.data.brackets import read_brackets
from hf_synlm.data.text import PathLike, read_lines_beside
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.trees.spans import Span

Bracket = tuple[str, int, int]


@dataclasses.dataclass(frozen=True)
class EvalbParameters:
    """What EVALB reads from a parameter file; the defaults are COLLINS.prm."""

    # Of brackets that do not count, and tags of words that are removed.
    delete_labels: tuple[str, ...] = ("TOP", "-NONE-", ",", ":", "``", "''", ".")
    # Tags of words that do not count for the length of a sentence.
    delete_labels_for_length: tuple[str, ...] = ("-NONE-",)
    equal_labels: tuple[tuple[str, str], ...] = (("ADVP", "PRT"),)
    equal_words: tuple[tuple[str, str], ...] = ()
    # Where gold and test give a quotation mark two of these tags, and only one side would delete it, it stays.
    quote_labels: tuple[str, ...] = ()
    labeled: bool = True
    # The second summary is over the sentences of at most this length.
    cutoff_length: int = 40
    # With more sentences than this and one whose words differ, the evaluation stops, as in EVALB.
    max_errors: int = 10

    @classmethod
    def read(cls, path: PathLike) -> "EvalbParameters":
        """Read a parameter file (.prm). What it does not set is empty, as in EVALB, not as in COLLINS.prm."""
        fields: dict[str, Any] = {name: () for name, size in _KEYWORDS.values() if size}
        for number, line in enumerate(read_lines_beside(path), start=1):
            if line.startswith("#") or not line.strip():
                continue
            keyword, *values = line.split()
            if keyword not in _KEYWORDS:
                raise ValueError(
                    f"{path}:{number}: {keyword!r} is not a parameter of EVALB. Use one of {', '.join(_KEYWORDS)}"
                )
            name, size = _KEYWORDS[keyword]
            if len(values) != (size or 1) or (not size and not values[0].isdecimal()):
                raise ValueError(f"{path}:{number}: {line.strip()!r}: the value of {keyword} does not fit")
            if size:
                fields[name] += (values[0] if size == 1 else tuple(values),)
            elif name:
                fields[name] = int(values[0])
        return cls(**fields | {"labeled": bool(fields.get("labeled", True))})

    def same_label(self, left: str, right: str) -> bool:
        """Whether two labels count as equal."""
        return left == right or (left, right) in self.equal_labels or (right, left) in self.equal_labels

    def same_word(self, left: str, right: str) -> bool:
        """Whether two words count as equal."""
        return left == right or (left, right) in self.equal_words or (right, left) in self.equal_words


# Field, and how many words a line adds to it; 0 = it is a number.
_KEYWORDS = {
    "DELETE_LABEL": ("delete_labels", 1),
    "DELETE_LABEL_FOR_LENGTH": ("delete_labels_for_length", 1),
    "EQ_LABEL": ("equal_labels", 2),
    "EQ_WORD": ("equal_words", 2),
    "QUOTE_LABEL": ("quote_labels", 1),
    "LABELED": ("labeled", 0),
    "CUTOFF_LEN": ("cutoff_length", 0),
    "MAX_ERROR": ("max_errors", 0),
    "DEBUG": ("", 0),  # of the program's output
}
COLLINS = EvalbParameters()


@dataclasses.dataclass(frozen=True)
class EvalbTree:
    """One side of a comparison: nothing is deleted from it yet."""

    words: tuple[str, ...]  # traces included
    tags: tuple[str, ...]
    brackets: tuple[Bracket, ...]  # half-open, in the order in which they open

    @classmethod
    def from_line(cls, line: str, where: str = "<text>") -> "EvalbTree":
        """Read a line of a file as EVALB does: one sentence with one tree, several trees, or no word at all."""
        words: list[str] = []
        tags: list[str] = []
        brackets: list[Bracket] = []
        open_brackets: list[tuple[int, int]] = []  # its number in `brackets`, its character in the line
        word = None  # in the innermost bracket
        for symbol, (_, character), is_first in read_brackets([line], lambda symbol, _: f"{where}: {symbol!r}"):
            index, opened_at = open_brackets[-1] if open_brackets else (-1, -1)
            if symbol == ")":
                open_brackets.pop()
                label, start, _ = brackets[index]
                if word is None:
                    brackets[index] = (label, start, len(words))
                else:  # not a constituent, but a word with its tag
                    brackets.pop()
                    words.append(word)
                    tags.append(label)
                    word = None
            elif word is None and symbol == "(":
                open_brackets.append((len(brackets), character))
                brackets.append(("", len(words), len(words)))
            elif is_first and character == opened_at + 1:  # EVALB reads no label after a space
                brackets[index] = (symbol, len(words), len(words))
            elif word is None and open_brackets and index == len(brackets) - 1 and brackets[index][1] == len(words):
                word = symbol
            else:
                lost = word or symbol
                raise ValueError(f"{where}: {lost!r} has no bracket of its own. Write it as (TAG {lost})")
        return cls(tuple(words), tuple(tags), tuple(brackets))

    @classmethod
    def from_spans(
        cls, words: Sequence[str], tags: Sequence[str], labels: Sequence[str], spans: Sequence[Span]
    ) -> "EvalbTree":
        """A tree from one label per half-open word span in post-order (unary chains from the bottom to the top)."""
        brackets = [(label, i, j) for label, (i, j) in zip(labels, spans, strict=True)]
        opening = sorted(reversed(brackets), key=lambda bracket: (bracket[1], -bracket[2]))
        return cls(tuple(words), tuple(tags), tuple(opening))

    @classmethod
    def from_sentence(cls, sentence: TreebankSentence) -> "EvalbTree":
        """Convert a sentence of `read_treebank`, which drops wrappers, and cuts labels at "|" (ADVP|PRT becomes ADVP).

        To leave all cutting of labels to EVALB, read the treebank with `keep_functions=True`.
        """
        spans = [(i, j) for _, i, j in sentence.labeled_spans]
        return cls.from_spans(sentence.words, sentence.tags, [label for label, _, _ in sentence.labeled_spans], spans)
