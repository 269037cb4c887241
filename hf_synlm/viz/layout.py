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
    """A constituent or a word.

    Attributes:
        label: of a constituent, empty if it has none; for a word the word.
        start: first word.
        end: one past the last word.
        children: none for a word.
        height: 0 for a word, else one more than the highest child.
        column: horizontal place, in the unit of the words' places.
    """

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
    """Put a tree together.

    Args:
        words: the n words, at least one.
        spans: half-open spans in any order that nest, unary chains from the bottom to the top. Without labels, spans of
            one word and copies are left out.
        labels: one label per span.

    Returns:
        The roots, from left to right: one if the whole sentence is among the spans, or if there is one word.

    Raises:
        ValueError: no words, spans that cross or leave the sentence, or another number of labels.

    Cost: O(n + s log s) for s spans.
    """
    if labels is not None and len(labels) != len(spans):
        raise ValueError(f"{len(spans)} spans have {len(labels)} labels: give one label per span")
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
    """Give every node its column, so far apart that no word and no label overlaps its neighbour.

    Args:
        roots: of `build_nodes`; their columns are written.
        measure: width of a word or label.
        gap: space between neighbours.

    Returns:
        All nodes, parents before children, from left to right; and the whole width.

    Cost: O(n * depth).
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
    """Replace what no XML document and no terminal line may hold: control characters, lone surrogates, noncharacters.

    Args:
        text: any string.

    Returns:
        The text with U+FFFD in their place; white space becomes a blank.
    """
    return "".join(
        " " if character.isspace() else "\ufffd" if _is_forbidden(character) else character for character in text
    )


def _is_forbidden(character: str) -> bool:
    return unicodedata.category(character) in ("Cc", "Cs") or (ord(character) & 0xFFFE) == 0xFFFE


def display_width(text: str) -> int:
    """Number of cells that a text takes in a terminal: 2 for wide characters, 0 for combining and invisible ones.

    Args:
        text: any string.

    Returns:
        The width.
    """
    return sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def is_right_to_left(text: str) -> bool:
    """Tell whether a text holds a letter of a script that is written from right to left.

    Args:
        text: any string.

    Returns:
        True for Arabic, Hebrew and the like.
    """
    return any(unicodedata.bidirectional(character) in ("R", "AL") for character in text)
