"""Plots: bars and curves by matplotlib; heat maps of chart scores (GPST), distances (ON-LSTM, PRPN), attention (PaLM).

Heat maps are SVG in plain text. Values come as tensors, arrays or nested lists. The color goes from transparent at the
smallest value to full at the largest; the caption names both, and every cell shows its value as a tooltip.
"""

import io
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from hf_synlm.data.files import write_bytes
from hf_synlm.data.text import PathLike
from hf_synlm.trees.spans import Span
from hf_synlm.viz.svg import FONT_SIZE, SMALL, escape_xml, svg_element, text_element, text_width

# Colors that stay apart for color-blind readers (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
_CELL = 24
_COLOR = "#4c78a8"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _text(text: str, x: float, y: float, anchor: str, **attributes: object) -> str:
    return text_element(text, x, y, anchor, font_size=SMALL, **attributes)


# ------------------------------------------------------------------------------------------------------------- bars
def plot_bars(
    path: PathLike,
    names: Sequence[str],
    series: Mapping[str, Sequence[float | None]],
    *,
    deviations: Mapping[str, Sequence[float | None]] | None = None,
    title: str,
    axis: str,
    limit: float | None = None,
    chance: float | None = None,
    digits: int = 3,
) -> None:
    """Draw horizontal bars by matplotlib: a group per name, in it a bar per series.

    Args:
        path: file to write; its ending is the format: .svg, .png or .pdf.
        names: of the groups, from top to bottom.
        series: by name one value per group; None or NaN = no bar.
        deviations: standard deviations of some series, one per group, drawn as error bars.
        title: shown above.
        axis: what the values are, and their unit.
        limit: end of the axis.
        chance: value of a guess, drawn as a dashed line.
        digits: of the printed values, after the point.

    Raises:
        ValueError: a series or its deviations do not fit the names, or no value is finite.
    """
    spread = {name: (deviations or {}).get(name, [None] * len(names)) for name in series}
    for name, values in series.items():
        if len(values) != len(names) or len(spread[name]) != len(names):
            raise ValueError(f"{name!r} has {len(values)} values for {len(names)} names: give one each")
    figure = _figure(series.values(), (8, 1.6 + len(names) * (0.15 + 0.25 * len(series))))
    axes = figure.subplots()
    height = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        places = [place - 0.4 + height * (number + 0.5) for place in range(len(names))]
        lengths = [value if _is_number(value) else 0.0 for value in values]
        errors = [value if _is_number(value) else 0.0 for value in spread[name]]
        color = _COLORS[number % len(_COLORS)]
        bars = axes.barh(places, lengths, height, xerr=errors if any(errors) else None, color=color, label=name)
        written = [f"{value:.{digits}f}" if _is_number(value) else "none" for value in values]
        axes.bar_label(bars, written, padding=3, fontsize=8)
    if chance is not None:
        axes.axvline(chance, linestyle="--", color="0.3", label="chance")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if limit is not None:
        axes.set_xlim(right=limit)
    axes.set_xlabel(axis)
    axes.set_title(title, fontsize=10, wrap=True)
    figure.legend(loc="outside lower center", ncols=3)
    _save(figure, path)


# ----------------------------------------------------------------------------------------------------------- curves
def plot_lines(
    path: PathLike, series: Mapping[str, Mapping[float, float]], *, title: str, x: str, y: str, log: bool = False
) -> None:
    """Draw curves by matplotlib.

    Args:
        path: file to write; its ending is the format: .svg, .png or .pdf.
        series: by name, values by place.
        title: shown above.
        x: what the places are, and their unit.
        y: what the values are, and their unit.
        log: draw both axes on a logarithmic scale.

    Raises:
        ValueError: no value is finite.
    """
    figure = _figure([points.values() for points in series.values()], (7, 4.5))
    axes = figure.subplots()
    for number, (name, points) in enumerate(series.items()):
        axes.plot(*zip(*sorted(points.items()), strict=True), "o-", color=_COLORS[number % len(_COLORS)], label=name)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        places = sorted({place for points in series.values() for place in points})
        axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10, wrap=True)
    axes.grid(alpha=0.3)
    axes.legend()
    _save(figure, path)


def _figure(series: Iterable[Iterable[float | None]], size: tuple[float, float]) -> Any:
    """An empty picture of matplotlib, or ValueError if there is nothing to draw."""
    from matplotlib.figure import Figure

    if not any(_is_number(value) for values in series for value in values):
        raise ValueError("there is no finite value: nothing to draw")
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, path: PathLike) -> None:
    """Write a picture of matplotlib: the same file for the same numbers, with text as text."""
    from matplotlib import rc_context

    buffer, ending = io.BytesIO(), Path(path).suffix[1:].lower()
    with rc_context({"svg.hashsalt": "hf_synlm", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else None)
    write_bytes(path, buffer.getvalue())


# -------------------------------------------------------------------------------------------------------- heat maps
def heatmap_to_svg(
    values: Any,
    row_names: Sequence[str],
    column_names: Sequence[str],
    *,
    title: str,
    digits: int = 3,
) -> str:
    """Draw a table of numbers as colors.

    Args:
        values: [rows, columns]; None, NaN and infinite values leave their cell empty.
        row_names: shown to the left.
        column_names: shown above, slanted.
        title: shown below.
        digits: of the printed values, after the point.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: the names do not fit the values, or no value is finite.

    Cost: O(number of values).
    """
    rows = _to_lists(values)
    if len(rows) != len(row_names) or any(len(row) != len(column_names) for row in rows):
        shape = f"{len(rows)} rows of {sorted({len(row) for row in rows})} values"
        raise ValueError(f"{shape} have {len(row_names)} row and {len(column_names)} column names: give one each")
    left = max((text_width(name, SMALL) for name in row_names), default=0.0) + 8
    above = 0.75 * max((text_width(name, SMALL) for name in column_names), default=0.0) + SMALL
    parts = []
    for number, name in enumerate(column_names):
        x = left + (number + 0.5) * _CELL
        turn = f"rotate(-45 {x:.1f} {above - 4:.1f})"
        parts.append(_text(name, x, above - 4, "start", transform=turn))
    for number, name in enumerate(row_names):
        parts.append(_text(name, left - 6, above + (number + 0.65) * _CELL, "end"))
    cells = {
        (left + k * _CELL, above + r * _CELL): (value, f"{row_names[r]} / {column_names[k]}")
        for r, row in enumerate(rows)
        for k, value in enumerate(row)
    }
    body, legend = _cells(cells, digits)
    bottom = above + _CELL * len(rows)
    caption = f"{title} ({legend})"
    slanted = text_width(column_names[-1], SMALL) if column_names else 0.0
    width = max(left + _CELL * len(column_names) + 0.75 * slanted, text_width(caption, SMALL))
    parts += [body, _text(caption, 0, bottom + SMALL + 6, "start")]
    return svg_element(parts, width + 20, bottom + 2 * SMALL + 10, title)


def _to_lists(values: Any) -> list[Any]:
    """Tensors, arrays and sequences as nested lists."""
    nested = values.tolist() if hasattr(values, "tolist") else values
    return [_to_lists(row) if hasattr(row, "__len__") else row for row in nested]


def _cells(cells: Mapping[tuple[float, float], tuple[float | None, str]], digits: int) -> tuple[str, str]:
    """The colored squares, and a legend that names the range."""
    finite = [value for value, _ in cells.values() if _is_number(value)]
    if not finite:
        raise ValueError("no value is finite: there is nothing to draw")
    low, high = min(finite), max(finite)
    parts = []
    for (x, y), (value, name) in cells.items():
        if not _is_number(value):
            continue
        share = (value - low) / (high - low) if high > low else 1.0
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{_CELL}" height="{_CELL}" fill="{_COLOR}" '
            f'fill-opacity="{share:.3f}" stroke="currentColor" stroke-opacity="0.2">'
            f"<title>{escape_xml(f'{name}: {value:.{digits}f}')}</title></rect>"
        )
    return "\n".join(parts), f"{low:.{digits}f} to {high:.{digits}f}"


# --------------------------------------------------------------------------------------------- what the models compute
def _table_of(values: Any, sentence: int) -> list[Any]:
    """A table of numbers, or that of one sentence of a batch, as nested lists."""
    rows = _to_lists(values)
    if not rows or not rows[0] or not isinstance(rows[0][0], list):
        return rows
    if not 0 <= sentence < len(rows):
        raise ValueError(f"there is no sentence {sentence}: the batch has {len(rows)}")
    return rows[sentence]


def distances_to_svg(distances: Any, words: Sequence[str], *, sentence: int = 0, title: str | None = None) -> str:
    """Syntactic distances of ON-LSTM or PRPN: a row per layer; a value belongs to the gap before its token.

    Args:
        distances: [B, L, T] as in the output of `forward` (`distances`, `syd_distances`), or [L, T].
        words: one string per token of the row.
        sentence: row of the batch.
        title: of the picture.

    Returns:
        One `<svg>` element; NaN values (no gold distance) leave their cell empty.

    Raises:
        ValueError: the shape does not fit the words.
    """
    layers = _table_of(distances, sentence)
    names = [f"layer {number}" for number in range(1, len(layers) + 1)]
    return heatmap_to_svg(layers, names, words, title=title or "syntactic distance before each token")


def span_attention_to_svg(
    span_scores: Any, words: Sequence[str], *, sentence: int = 0, title: str | None = None
) -> str:
    """Attention of PaLM: after reading the token of a row, the weight of the span that begins at the token of a column.

    All spans end right before the token of the row. Weights are the softmax over all K spans; spans that would begin
    before the sentence have a weight, but no cell.

    Args:
        span_scores: [B, T, K] as in the output of `forward`, or [T, K]; slot 0 is the longest span, of K tokens.
        words: one string per token of the row.
        sentence: row of the batch.
        title: of the picture.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: the shape does not fit the words.
    """
    rows = _table_of(span_scores, sentence)
    if len(rows) != len(words):
        raise ValueError(f"scores of {len(rows)} tokens for {len(words)} words: give one per token")
    table: list[list[float | None]] = []
    for end, scores in enumerate(rows):
        largest = max(scores)
        weights = [math.exp(score - largest) for score in scores]
        total = math.fsum(weights)
        # The last slot is the span that begins right before the token; the first ones may begin before the text.
        shares = [weight / total for weight in weights[max(0, len(weights) - end) :]]
        table.append([*[None] * (end - len(shares)), *shares, *[None] * (len(words) - end)])
    if len(words) == 1:
        raise ValueError("one token has no span before it: there is nothing to draw")
    return heatmap_to_svg(table, words, words, title=title or "attention to the span from column to row")


def chart_scores(chart: Mapping[str, Any], context: int = 0, value: str = "score") -> dict[Span, float]:
    """Numbers of the cells of GPST's chart by span.

    Args:
        chart: `model(..., output_chart=True).chart`.
        context: row of the batch.
        value: which numbers: "score" (expected split score) or "height".

    Returns:
        By half-open span over context positions; cells of one token are left out.

    Raises:
        ValueError: another name of numbers.
    """
    if value not in ("score", "height"):
        raise ValueError(f"value is {value!r}: choose 'score' or 'height'")
    columns = [chart[name].tolist() for name in ("context", "start", "end", value)]
    return {(i, j): number for row, i, j, number in zip(*columns, strict=True) if row == context and j - i > 1}


def chart_to_svg(
    scores: Mapping[Span, float],
    words: Sequence[str],
    *,
    spans: Collection[Span] = (),
    title: str = "score of each constituent",
) -> str:
    """A chart above its words: the cell of a span is above the middle of its words, wide spans on top.

    Args:
        scores: by half-open span, such as `chart_scores` gives them; a pruned chart has not all spans.
        words: the n words.
        spans: constituents of a tree, drawn with a thick frame.
        title: of the picture.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: a span outside the words, or no finite score.

    Cost: O(number of cells).
    """
    for i, j in [*scores, *spans]:
        if not 0 <= i < j <= len(words):
            raise ValueError(f"span ({i}, {j}) does not fit into {len(words)} words: scores are of other tokens")
    step = max(_CELL, max(text_width(word, SMALL) for word in words) + 6)
    widest = max((j - i for i, j in scores), default=1)

    def corner(span: Span) -> tuple[float, float]:
        return step * sum(span) / 2 - _CELL / 2, _CELL * (widest - span[1] + span[0]) + 4

    cells = {corner(span): (value, " ".join(words[slice(*span)])) for span, value in scores.items()}
    body, legend = _cells(cells, 3)
    frames = [
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{_CELL}" height="{_CELL}" fill="none" stroke="currentColor" '
        'stroke-width="2"/>'
        for x, y in map(corner, (span for span in spans if span in scores))
    ]
    base = _CELL * widest + FONT_SIZE
    names = [_text(word, step * (k + 0.5), base, "middle") for k, word in enumerate(words)]
    caption = f"{title} ({legend})"
    width = max(step * len(words), text_width(caption, SMALL))
    parts = [body, *frames, *names, _text(caption, 0, base + 2 * SMALL, "start")]
    return svg_element(parts, width + 20, base + 3 * SMALL, title)
