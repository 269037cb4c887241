# SPDX-License-Identifier: Apache-2.0
"""Trees as SVG, with a bar for the surprisal of each word below it. It needs no other library.

Lines and text have the color of the text around the picture, so it fits light and dark pages.
"""

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape as _escape_xml

from hf_synlm.trees.spans import Span
from hf_synlm.viz.layout import Node, build_nodes, clean_text, display_width, place_nodes

FONT = "'DejaVu Sans', 'Noto Sans', 'Helvetica Neue', Arial, sans-serif"
FONT_SIZE, SMALL = 14, 11
_LEVEL, _GAP, _MARGIN, _BARS = 34, 14, 10, 60
_BARE_LEVEL = 20  # without labels
_LEGEND = "surprisal (bits)"
_NARROW, _WIDE = frozenset("iljtfrI.,:;!|'`()[] "), frozenset("mwMW@%—…")


def escape_xml(text: str) -> str:
    """Escape a text for an element of SVG or HTML; characters that XML cannot hold become U+FFFD."""
    return _escape_xml(clean_text(text))


def text_width(text: str, size: float = FONT_SIZE) -> float:
    """Estimate the width of a text in pixels without reading a font: rather too wide than too narrow."""
    return size * sum(map(_em, clean_text(text)))


def _em(character: str) -> float:
    if display_width(character) != 1:
        return 0.525 * display_width(character)
    if character in _NARROW:
        return 0.42
    if character in _WIDE:
        return 1.02
    return 0.76 if character.isupper() else 0.65


def tree_to_svg(
    words: Sequence[str],
    spans: Sequence[Span],
    labels: Sequence[str] | None = None,
    *,
    surprisals: Sequence[float] | None = None,
) -> str:
    """Draw a tree.

    Args:
        words: the n words.
        spans: half-open spans of the tree.
        labels: one label per span; None for trees without.
        surprisals: in bits, one per word, shown as bars with their values; infinite ones as full bars.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: as `build_nodes`, or another number of surprisals, or one that is not a number.

    Cost: O(n * depth).
    """
    if surprisals is not None and (len(surprisals) != len(words) or any(map(math.isnan, surprisals))):
        raise ValueError(f"surprisals are {list(surprisals)} for {len(words)} words. Give one number per word")
    roots = build_nodes(words, spans, labels)
    numbers = [""] * len(words) if surprisals is None else [_number(value) for value in surprisals]
    widest = max(text_width(text, SMALL) for text in numbers)
    nodes, width = place_nodes(roots, lambda text: max(text_width(text), widest), _GAP)
    level = _LEVEL if any(node.label for node in nodes if not node.is_word) else _BARE_LEVEL
    below = _MARGIN + FONT_SIZE + level * max(node.height for node in nodes)
    lines = {id(node): below - level * node.height for node in nodes}
    parts = [_edges(nodes, lines), *(_text(node, lines[id(node)]) for node in nodes)]
    height = below + FONT_SIZE / 2
    if surprisals is not None:
        columns = [node.column for node in nodes if node.is_word]
        parts.append(_bars(columns, list(surprisals), numbers, below + FONT_SIZE))
        width, height = max(width, text_width(_LEGEND, SMALL)), below + FONT_SIZE + 2 * SMALL + _BARS
    return svg_element(parts, width + 2 * _MARGIN, height + _MARGIN, " ".join(words))


def svg_element(parts: Sequence[str], width: float, height: float, title: str) -> str:
    """An `<svg>` element around its parts; x = 0 is 10 pixels from the left side, sizes are in pixels."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-_MARGIN} 0 {width:.0f} {height:.0f}" role="img" font-family="{FONT}" font-size="{FONT_SIZE}" '
        f'fill="currentColor">\n<title>{escape_xml(title)}</title>\n'
        + "\n".join(part for part in parts if part)
        + "\n</svg>"
    )


def text_element(text: str, x: float, y: float, **attributes: object) -> str:
    """A `<text>` element, whose direction follows its own script.

    The middle of the text is at `x`; `y` is the base line. In the names of further attributes an underscore stands for
    a hyphen.
    """
    more = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in attributes.items())
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle" style="unicode-bidi: plaintext"{more}>'
        f"{escape_xml(text)}</text>"
    )


def _edges(nodes: Sequence[Node], base_lines: Mapping[int, float]) -> str:
    lines = []
    for node in nodes:
        if node.is_word:
            continue
        # A point without label has the line to its children in its middle; text keeps a distance from lines.
        beam = base_lines[id(node)] + (6 if node.label else -FONT_SIZE / 3)
        columns = [node.column, *(child.column for child in node.children)]
        lines.append(f"M{min(columns):.1f} {beam:.1f}H{max(columns):.1f}")
        for child in node.children:
            end = base_lines[id(child)] - (FONT_SIZE if child.label else FONT_SIZE / 3)
            lines.append(f"M{child.column:.1f} {beam:.1f}V{end:.1f}")
    return f'<path d="{"".join(lines)}" fill="none" stroke="currentColor" stroke-opacity="0.55"/>' if lines else ""


def _text(node: Node, y: float) -> str:
    if not node.label:
        return ""
    if node.is_word:
        return text_element(node.label, node.column, y)
    return text_element(node.label, node.column, y, font_weight="bold", font_size=FONT_SIZE - 1)


def _bars(columns: Sequence[float], values: Sequence[float], numbers: Sequence[str], y: float) -> str:
    """Bars that stand on one line, their values above them; negative values (a pruned beam) have none."""
    largest = max((value for value in values if math.isfinite(value)), default=0.0)
    base = y + SMALL + _BARS
    parts = ['<g class="surprisal">']
    for x, value, number in zip(columns, values, numbers, strict=True):
        share = 1.0 if value == math.inf else max(value, 0.0) / largest if largest > 0 else 0.0
        height = _BARS * share
        parts.append(
            f'<rect x="{x - 9:.1f}" y="{base - height:.1f}" width="18" height="{height:.1f}" fill="#4c78a8">'
            f"<title>{number} bits</title></rect>"
        )
        parts.append(text_element(number, x, base - height - 3, font_size=SMALL))
    right = columns[-1] + 12
    parts.append(
        f'<path d="M{columns[0] - 12:.1f} {base:.1f}H{right:.1f}" stroke="currentColor" stroke-opacity="0.55"/>'
    )
    middle = max((columns[0] + right) / 2, text_width(_LEGEND, SMALL) / 2)
    parts.append(text_element(_LEGEND, middle, base + SMALL + 2, font_size=SMALL))
    return "\n".join([*parts, "</g>"])


def _number(value: float) -> str:
    return f"{value:.1f}" if math.isfinite(value) else "∞"
