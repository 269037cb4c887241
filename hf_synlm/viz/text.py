# SPDX-License-Identifier: Apache-2.0
"""Trees for a terminal: sideways, for sentences of any length, or upright.

    S ─┬─ NP ─┬─ the             ┌───S───┐
       │      └─ cat             │       │
       └─ VP ─── sleeps        ┌─NP┐    VP
                               │   │     │
                              the cat sleeps

Words of right-to-left scripts stand between isolating marks, so that they do not disorder the lines around them; the
words follow each other from left to right.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeAlias

from hf_synlm.trees.spans import Span
from hf_synlm.viz.layout import Node, build_nodes, clean_text, display_width, is_right_to_left, place_nodes

TextStyle: TypeAlias = Literal["sideways", "upright"]
_ISOLATE = "\u2068{}\u2069"
# The character that joins lines to the left (l), right (r), above (u) and below (d).
_JOINTS = {
    frozenset(sides): character
    for sides, character in (
        ("lr", "─"), ("ud", "│"), ("u", "│"), ("d", "│"), ("l", "─"), ("r", "─"), ("dr", "┌"), ("dl", "┐"),
        ("ur", "└"), ("ul", "┘"), ("udr", "├"), ("udl", "┤"), ("lrd", "┬"), ("lru", "┴"), ("lrud", "┼"),
    )
}  # fmt: skip


def tree_to_text(
    words: Sequence[str],
    spans: Sequence[Span],
    labels: Sequence[str] | None = None,
    *,
    style: TextStyle = "sideways",
) -> str:
    """Draw a tree in characters.

    Args:
        words: the n words.
        spans: half-open spans of the tree.
        labels: one label per span; None: the tree has no labels.
        style: "sideways" (one word per line) or "upright" (all words in one line).

    Returns:
        Lines of text without a newline at the end.

    Raises:
        ValueError: the spans or labels do not fit the words; see `build_nodes`.

    Cost: O(n * depth).
    """
    roots = build_nodes(words, spans, labels)
    return _sideways(roots) if style == "sideways" else _upright(roots)


def _printable(text: str) -> str:
    text = clean_text(text)
    return _ISOLATE.format(text) if is_right_to_left(text) else text


def _sideways(roots: Sequence[Node]) -> str:
    lines: list[str] = []
    # Each entry: a subtree, the text before its first line, and the text before its other lines.
    agenda = [(root, "", "") for root in reversed(roots)]
    while agenda:
        node, head, tail = agenda.pop()
        if node.is_word:
            lines.append(f"{head}─ {_printable(node.label)}")
            continue
        label = _printable(node.label)
        stem = f"{'─ ' if head else ''}{label} " if label else ""
        tail += " " * display_width(stem)
        first, *others = node.children
        for child in reversed(others):
            last = child is others[-1]
            agenda.append((child, tail + (" └" if last else " ├"), tail + ("  " if last else " │")))
        agenda.append((first, head + stem + ("─┬" if others else "──"), tail + (" │" if others else "  ")))
    return "\n".join(lines)


def _upright(roots: Sequence[Node]) -> str:
    nodes, width = place_nodes(roots, lambda text: display_width(_printable(text)), 1)
    top = max(node.height for node in nodes)
    sides: dict[tuple[int, int], set[str]] = {}
    labels: dict[int, list[tuple[int, str]]] = {}
    for node in nodes:
        row, text = 2 * (top - node.height), _printable(node.label)
        if node.children:
            _join(sides, row, node, top)
        if text:
            labels.setdefault(row, []).append((math.ceil(node.column - display_width(text) / 2), text))
    lines = []
    for row in range(2 * top + 1):
        cells = [_JOINTS[frozenset(sides[row, k])] if (row, k) in sides else " " for k in range(int(width) + 1)]
        for place, text in labels.get(row, ()):
            cells[place : place + display_width(text)] = [text, *[""] * (display_width(text) - 1)]
        lines.append("".join(cells).rstrip())
    return "\n".join(lines)


def _join(sides: dict[tuple[int, int], set[str]], row: int, node: Node, top: int) -> None:
    """Add the lines from a node to its children: along the row of the node, then straight down."""
    column = int(node.column)
    for child in node.children:
        place, bottom = int(child.column), 2 * (top - child.height)
        low, high = sorted((place, column))
        for k in range(low, high + 1):
            joint = sides.setdefault((row, k), set())
            joint |= {"l"} if k > low else set()
            joint |= {"r"} if k < high else set()
        sides.setdefault((row, place), set()).add("d")
        for between in range(row + 1, bottom):
            sides.setdefault((between, place), set()).update("ud")
