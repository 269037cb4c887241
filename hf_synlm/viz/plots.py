# SPDX-License-Identifier: Apache-2.0
"""Plots by matplotlib: bars of scores; heat maps of chart scores (GPST), distances (ON-LSTM, PRPN), attention (PaLM).

Values come as tensors, arrays or nested lists. The same values give the same file, and text stays text. The color of a
cell goes from transparent at the smallest value to full at the largest; the title names both.
"""

import contextlib
import io
import math
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hf_synlm.data.files import write_bytes
from hf_synlm.data.text import PathLike
from hf_synlm.trees.spans import Span
from hf_synlm.viz.layout import clean_text

# Colors that stay apart for color-blind readers (Okabe and Ito 2008).
_COLORS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#999999")
_MOST_NAMES = 60  # below an axis; of more, some are written


@contextlib.contextmanager
def _figure(width: float, height: float, path: PathLike | None = None) -> Iterator[Any]:
    """An empty figure (inches), to be drawn here and saved: same file for the same values; $ and text as they are."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    settings: Any = {"svg.hashsalt": "hf_synlm", "svg.fonttype": "none", "text.parse_math": False}
    with rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader of an SVG file has more fonts
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        if path is not None:
            write_bytes(path, _saved(figure, Path(path).suffix[1:].lower()))


def _saved(figure: Any, ending: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, dpi=150, metadata={"Date": None} if ending == "svg" else None)
    return buffer.getvalue()


def _draw_lines(axes: Any, lines: Mapping[str, Sequence[tuple[float, float]]], apart: float) -> None:
    """A line per series through its values with their errors; series stand `apart`, so that all are seen."""
    for number, (name, points) in enumerate(lines.items()):
        values, errors = zip(*points, strict=True)
        places = [place + apart * number for place in range(len(points))]
        color = _COLORS[number % len(_COLORS)]
        axes.errorbar(places, values, yerr=errors, fmt="o-", capsize=3, color=color, label=name)
    axes.legend(fontsize=8)


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
    """Draw horizontal bars: a group per name, and in it a bar per series.

    Args:
        path: File to write; its ending is the format: .svg, .png or .pdf.
        names: Names of the groups, from top to bottom.
        series: For each name one value per group; None or NaN: no bar.
        deviations: Standard deviations of some series, one per group, drawn as error bars.
        title: Title above the bars.
        axis: What the values are, and their unit.
        limit: End of the axis.
        chance: Value that a guess would reach, drawn as a dashed line.
        digits: Decimals of the printed values.

    Raises:
        ValueError: no value is finite.
    """
    drawn = {name: np.array(values, dtype=float) for name, values in series.items()}
    spread = {name: np.array(values, dtype=float) for name, values in (deviations or {}).items()}
    if not any(np.isfinite(values).any() for values in drawn.values()):
        raise ValueError("no value is finite, so there is nothing to draw")
    with _figure(8, 1.6 + len(names) * (0.15 + 0.25 * len(series)), path) as figure:
        axes = figure.subplots()
        height = 0.8 / len(series)
        for number, (name, values) in enumerate(drawn.items()):
            places = [place - 0.4 + height * (number + 0.5) for place in range(len(names))]
            lengths, errors = (np.where(np.isfinite(v), v, 0.0) for v in (values, spread.get(name, np.zeros(1))))
            color = _COLORS[number % len(_COLORS)]
            bars = axes.barh(places, lengths, height, xerr=errors if errors.any() else None, color=color, label=name)
            written = [f"{value:.{digits}f}" if math.isfinite(value) else "none" for value in values]
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
        if len(series) > 1 or chance is not None:  # else title and axis say it
            figure.legend(loc="outside lower center", ncols=3)


def plot_effects(
    path: PathLike,
    gains: Mapping[str, tuple[float, float, float]],
    effects: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    axes_titles: tuple[str, str],
) -> None:
    """Draw what predictors add to a regression: gains with their intervals, and coefficients by lag.

    Args:
        path: File to write; its ending is the format: .svg, .png or .pdf.
        gains: Per predictor the gain and the ends of its interval.
        effects: Per predictor its coefficient and standard error for each lag, from 0.
        title: Title of the picture.
        axes_titles: What gains and coefficients are, and their units.
    """
    with _figure(9, 2.2 + 0.3 * max(len(gains), 5), path) as figure:
        left, right = figure.subplots(1, 2)
        for place, (value, low, high) in enumerate(gains.values()):
            left.errorbar(value, place, xerr=[[value - low], [high - value]], fmt="o", capsize=3, color=_COLORS[0])
        left.set_yticks(range(len(gains)), list(gains))
        left.set_ylim(len(gains) - 0.5, -0.5)
        left.axvline(0, color="0.3", linewidth=0.8)
        left.locator_params(axis="x", nbins=5)  # long numbers do not touch
        _draw_lines(right, effects, 0.06)
        right.set_xticks(range(max(len(values) for values in effects.values())))
        right.axhline(0, color="0.3", linewidth=0.8)
        right.set_ylabel(axes_titles[1])
        left.set_xlabel(axes_titles[0])
        right.set_xlabel("words before")
        figure.suptitle(title, fontsize=10)


def plot_lines(
    path: PathLike,
    names: Sequence[str],
    lines: Mapping[str, Sequence[tuple[float, float]]],
    *,
    title: str,
    axes_titles: tuple[str, str],
) -> None:
    """Draw a line per series over named places, with error bars; NaN: no point. Of many places, some have their name.

    Args:
        path: File to write; its ending is the format: .svg, .png or .pdf.
        names: Names of the places, from left to right.
        lines: Per series, for each place a value and its error.
        title: Title of the picture.
        axes_titles: What the places and the values are.
    """
    step = -(-len(names) // _MOST_NAMES)
    with _figure(max(5, 1.5 + 0.6 * min(len(names), _MOST_NAMES)), 4, path) as figure:
        axes = figure.subplots()
        _draw_lines(axes, lines, 0.04)
        shown = names[::step]
        axes.set_xticks(range(0, len(names), step), shown, rotation=30 if len("".join(shown)) > 60 else 0)
        axes.set(xlabel=axes_titles[0], ylabel=axes_titles[1])
        axes.set_title(title, fontsize=10, wrap=True)


# -------------------------------------------------------------------------------------------------------- heat maps
def heatmap_to_svg(values: Any, row_names: Sequence[str], column_names: Sequence[str], *, title: str) -> str:
    """Draw a table of numbers as colored cells with their values.

    Args:
        values: [rows, columns]; the cell of None, NaN or an infinite value stays empty.
        row_names: Names to the left.
        column_names: Names above, slanted.
        title: Title below.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: no value is finite.
    """
    rows = values.tolist() if hasattr(values, "tolist") else values
    cells = {(float(x), float(y)): value for y, row in enumerate(rows) for x, value in enumerate(row)}
    return _cells_to_svg(cells, column_names, row_names, title, frames=())


def _cells_to_svg(
    cells: Mapping[tuple[float, float], float | None],
    columns: Sequence[str],
    rows: Sequence[str],
    title: str,
    frames: Collection[tuple[float, float]],
) -> str:
    """Draw cells of width 1 around their places (x to the right, y down); those in `frames` have a thick frame."""
    finite = {place: value for place, value in cells.items() if value is not None and math.isfinite(value)}
    low, high = min(finite.values()), max(finite.values())
    bottom = max(y for _, y in cells) + 0.5
    with _figure(1.5 + 0.45 * len(columns), 1.5 + 0.35 * (bottom + 0.5)) as figure:
        from matplotlib.patches import Rectangle

        axes = figure.subplots()
        for (x, y), value in finite.items():
            share = (value - low) / (high - low) if high > low else 1.0
            color = ("#4c78a8", share)
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=color, edgecolor="0.8"))
            axes.text(x, y, f"{value:.3f}", ha="center", va="center", fontsize=6)
        for x, y in frames:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, linewidth=2))
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(bottom, -0.5), frame_on=False)
        axes.set_xticks(range(len(columns)), map(clean_text, columns), rotation=45 if rows else 0)
        axes.set_yticks(range(len(rows)), map(clean_text, rows))
        axes.tick_params(length=0, labeltop=bool(rows), labelbottom=not rows)
        axes.set_xlabel(clean_text(f"{title} ({low:.3f} to {high:.3f})"))
        return "<svg" + _saved(figure, "svg").decode().partition("<svg")[2]  # without the head of a file


# --------------------------------------------------------------------------------------------- what the models compute
def distances_to_svg(distances: Any, words: Sequence[str]) -> str:
    """Draw the syntactic distances of ON-LSTM or PRPN: a row per layer; a value belongs to the gap before its token.

    Args:
        distances: [L, T], a row of `distances` or `syd_distances` of the output of `forward`; the cell of NaN (no gold
            distance) stays empty.
        words: One string per token.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: If the shape does not fit the words.
    """
    names = [f"layer {number}" for number in range(1, len(distances) + 1)]
    return heatmap_to_svg(distances, names, words, title="syntactic distance before each token")


def span_attention_to_svg(span_scores: Any, words: Sequence[str]) -> str:
    """Draw the attention of PaLM: after the token of a row, the weight of the span that begins at a column's token.

    All spans end right before the token of the row. Weights are the softmax over all K spans; spans that would begin
    before the sentence have a weight, but no cell.

    Args:
        span_scores: [T, K], a row of `span_scores` of the output of `forward`; slot 0 is the longest span, of K tokens.
        words: One string per token.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: If the shape does not fit the words.
    """
    if len(span_scores) != len(words):
        raise ValueError(f"scores of {len(span_scores)} tokens for {len(words)} words. Give one per token")
    if len(words) == 1:
        raise ValueError("one token has no span before it, so there is nothing to draw")
    table: list[list[float | None]] = []
    scores = np.array(span_scores.tolist(), dtype=float)
    for end, weights in enumerate(np.exp(scores - np.logaddexp.reduce(scores, 1, keepdims=True)).tolist()):
        # The last slot is the span that begins right before the token; the first ones may begin before the text.
        shares = weights[max(0, len(weights) - end) :]
        table.append([*[None] * (end - len(shares)), *shares, *[None] * (len(words) - end)])
    return heatmap_to_svg(table, words, words, title="attention to the span from column to row")


def chart_scores(chart: Mapping[str, Any], context: int = 0) -> dict[Span, float]:
    """Read the expected split scores in the cells of GPST's chart.

    Args:
        chart: `model(..., output_chart=True).chart`.
        context: Row of the batch.

    Returns:
        The numbers by half-open span over context positions, without the cells of one token.
    """
    columns = [chart[name].tolist() for name in ("context", "start", "end", "score")]
    return {(i, j): number for row, i, j, number in zip(*columns, strict=True) if row == context and j - i > 1}


def chart_to_svg(
    scores: Mapping[Span, float],
    words: Sequence[str],
    *,
    spans: Collection[Span] = (),
) -> str:
    """Draw a chart above its words: the cell of a span is above the middle of its words, wide spans on top.

    Args:
        scores: Numbers by half-open span, as `chart_scores` gives them; a pruned chart lacks some spans.
        words: The n words.
        spans: Constituents of a tree; their cells have a thick frame.

    Returns:
        One `<svg>` element.

    Raises:
        ValueError: If a span lies outside the words, or no score is finite.
    """
    for i, j in [*scores, *spans]:
        if not 0 <= i < j <= len(words):
            raise ValueError(f"span ({i}, {j}) does not fit into {len(words)} words. Give the words that were scored")
    widest = max((j - i for i, j in scores), default=1)
    places = {(i, j): ((i + j - 1) / 2, float(widest - (j - i))) for i, j in scores}
    cells = {places[span]: value for span, value in scores.items()}
    return _cells_to_svg(
        cells, words, (), "score of each constituent", frames=[places[span] for span in spans if span in scores]
    )
