"""Bar charts of scores as SVG: models side by side, with the standard deviation over runs."""

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

from hf_synlm.viz.svg import SMALL, escape_xml, svg_element, text_element, text_width

# Colors that stay apart for people who do not see some of them (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
_BAR, _GROUP_GAP, _PLOT, _MARGIN = 14, 12, 420, 8


def bars_to_svg(
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    deviations: Mapping[str, Sequence[float | None]] | None = None,
    title: str,
    largest: float | None = None,
    digits: int = 3,
) -> str:
    """Draw horizontal bars: a group per name, in it a bar per series.

    Args:
        names: of the groups, from top to bottom.
        series: by name one value per group; None or NaN = no bar. Bars of negative values go to the left of 0.
        deviations: of some series, one per group, drawn as a whisker of one standard deviation to each side;
            where no value is negative, it ends at 0.
        title: shown below.
        largest: value at the right end of the scale, if no value with its deviation is larger.
        digits: after the point, of the values that are named.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: a series or its deviations do not fit the names, or there is no value at all.

    Cost: O(number of values).
    """
    spread = {name: list((deviations or {}).get(name, [None] * len(names))) for name in series}
    for name, values in series.items():
        if len(values) != len(names) or len(spread[name]) != len(names):
            raise ValueError(f"{name!r} has {len(values)} values for {len(names)} names: give one each")
    found = [
        (value, deviation if _is_number(deviation) else 0.0)
        for name, values in series.items()
        for value, deviation in zip(values, spread[name], strict=True)
        if _is_number(value)
    ]
    if not found:
        raise ValueError("there is no finite value: nothing to draw")
    # Whiskers end at 0, unless a value is below: most scores cannot be negative.
    lowest = min(value - deviation for value, deviation in found) if min(found)[0] < 0 else 0.0
    highest = max(largest or 0.0, *(value + deviation for value, deviation in found), 0.0)
    scale = _PLOT / (highest - lowest or 1.0)
    label_end = max(text_width(name, SMALL) for name in names) + _MARGIN
    left = label_end - lowest * scale
    parts, y = [], float(_MARGIN)
    for place, group in enumerate(names):
        height = _BAR * len(series)
        parts.append(_text(group, label_end - 6, y + height / 2 + SMALL / 3, "end"))
        for color, (name, values) in enumerate(series.items()):
            bar = _bar(left, y, values[place], spread[name][place], scale, lowest, _COLORS[color % len(_COLORS)])
            parts += [f"<g><title>{escape_xml(_said(group, name, values[place], spread[name][place], digits))}</title>"]
            parts += [*bar, _value(left, y, values[place], spread[name][place], scale, digits), "</g>"]
            y += _BAR
        y += _GROUP_GAP
    parts.insert(0, f'<path d="M{left:.1f} 0V{y - _GROUP_GAP / 2:.1f}" stroke="currentColor" stroke-opacity="0.4"/>')
    x, below = label_end, y + SMALL
    for color, name in enumerate(series):
        parts.append(f'<rect x="{x:.1f}" y="{below - 9:.1f}" width="10" height="10" fill="{_COLORS[color % 8]}"/>')
        parts.append(_text(name, x + 14, below, "start"))
        x += text_width(name, SMALL) + 30
    parts.append(_text(title, 0, below + 2 * SMALL, "start"))
    width = max(label_end + _PLOT + 90, x, text_width(title, SMALL))
    return svg_element(parts, width + 2 * _MARGIN, below + 3 * SMALL, title)


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _text(text: str, x: float, y: float, anchor: str) -> str:
    return text_element(text, x, y, font_size=SMALL).replace('"middle"', f'"{anchor}"', 1)


def _bar(
    left: float, y: float, value: float | None, deviation: float | None, scale: float, lowest: float, color: str
) -> list[str]:
    """A bar from the line of 0 at `left`, with its whisker."""
    if value is None or not math.isfinite(value):
        return []
    start, width = left + min(0.0, value) * scale, abs(value) * scale
    parts = [f'<rect x="{start:.1f}" y="{y + 1:.1f}" width="{width:.1f}" height="{_BAR - 2}" fill="{color}"/>']
    if deviation is not None and deviation > 0:
        middle, low, high = (
            y + _BAR / 2,
            left + max(lowest, value - deviation) * scale,
            left + (value + deviation) * scale,
        )
        ends = f"M{high:.1f} {middle - 3:.1f}v6"
        if value - deviation >= lowest:  # it is not cut
            ends += f"M{low:.1f} {middle - 3:.1f}v6"
        parts.append(f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{ends}" stroke="currentColor" fill="none"/>')
    return parts


def _value(left: float, y: float, value: float | None, deviation: float | None, scale: float, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return _text("none", left + 4, y + _BAR - 3, "start")
    end = left + max(0.0, value + (deviation or 0.0)) * scale
    return _text(f"{value:.{digits}f}", end + 4, y + _BAR - 3, "start")


def _said(group: str, name: str, value: float | None, deviation: float | None, digits: int) -> str:
    if value is None or not math.isfinite(value):
        return f"{group}, {name}: none"
    around = "" if deviation is None else f" ± {deviation:.{digits}f}"
    return f"{group}, {name}: {value:.{digits}f}{around}"
