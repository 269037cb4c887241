# SPDX-License-Identifier: Apache-2.0
"""Trees as nodes with places: what every drawing starts from.

A node's column is the middle between its first and last child (moved where its label would stick out over its words),
its level its height above the words. So all words stand on one line, every parent is above its children, and lines that
go from a parent to the side and then straight down never cross.
"""

import dataclasses
import unicodedata
from collections.abc import Callable, Sequence
from itertools import accumulate

from hf_synlm.trees.spans import Span, validate_spans


@dataclasses.dataclass
class Node:
    """A constituent (or a word: height 0, no children) over the words start to end - 1; its label may be empty."""

    label: str
    start: int
    end: int
    children: list["Node"] = dataclasses.field(default_factory=list)
    height: int = 0
    column: float = 0.0

    @property
    def is_word(self) -> bool:
        """True for a word."""
        return not self.children


def build_nodes(words: Sequence[str], spans: Sequence[Span], labels: Sequence[str] | None = None) -> list[Node]:
    """The roots of a tree, from left to right, from half-open spans in any order that nest.

    Unary chains go from the bottom to the top. Without labels, spans of one word and copies are left out. Raises
    ValueError if there are no words, spans cross or leave the sentence, or the number of labels is another.
    """
    validate_spans(spans, len(words), min_width=1, allow_duplicates=True)
    if labels is None:
        pairs = [("", span) for span in dict.fromkeys((i, j) for i, j in spans if j - i > 1)]
    else:
        pairs = list(zip(labels, ((i, j) for i, j in spans), strict=True))
    stack: list[Node] = []
    next_word = 0
    # Post-order is the order by end, then by descending start; sorting keeps unary chains in their order.
    for label, (start, end) in sorted(pairs, key=lambda pair: (pair[1][1], -pair[1][0])):
        while next_word < end:
            stack.append(Node(words[next_word], next_word, next_word + 1))
            next_word += 1
        first = len(stack)
        while first > 0 and stack[first - 1].start >= start:
            first -= 1
        children = stack[first:]
        stack[first:] = [Node(label, start, end, children, 1 + max(child.height for child in children))]
    return stack + [Node(words[k], k, k + 1) for k in range(next_word, len(words))]


def place_nodes(roots: Sequence[Node], measure: Callable[[str], float], gap: float) -> tuple[list[Node], float]:
    """Set the column of every node, so that no word and no label overlaps its neighbour. Cost: O(n * depth).

    `measure` gives the width of a word or label, `gap` is the space between neighbours. Returns all nodes, parents
    before children and left before right, and the whole width.
    """
    nodes: list[Node] = []
    agenda = list(reversed(roots))
    while agenda:
        node = agenda.pop()
        nodes.append(node)
        agenda.extend(reversed(node.children))
    widths = [measure(node.label) for node in nodes if node.is_word]
    for node in reversed(nodes):
        if node.label and not node.is_word:
            missing = measure(node.label) - sum(widths[node.start : node.end]) - gap * (node.end - node.start - 1)
            widths[node.end - 1] += max(missing, 0)
    starts = list(accumulate((width + gap for width in widths), initial=0.0))
    for node in reversed(nodes):
        if node.is_word:
            node.column = starts[node.start] + widths[node.start] / 2
        else:
            middle, half = (node.children[0].column + node.children[-1].column) / 2, measure(node.label) / 2
            end = starts[node.end - 1] + widths[node.end - 1]
            node.column = min(max(middle, starts[node.start] + half), end - half)
    return nodes, starts[-1] - gap


def clean_text(text: str) -> str:
    """Replace characters that XML and terminals cannot hold by U+FFFD, and white space by a blank."""
    return "".join(
        " " if character.isspace() else "\ufffd" if _is_forbidden(character) else character for character in text
    )


def _is_forbidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or (ord(character) & 0xFFFE) == 0xFFFE


def display_width(text: str) -> int:
    """Number of cells that a text takes in a terminal: 2 for wide characters, 0 for combining and invisible ones."""
    return sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def is_right_to_left(text: str) -> bool:
    """Whether a text holds a letter of a script that is written from right to left."""
    return any(unicodedata.bidirectional(character) in ("R", "AL") for character in text)
