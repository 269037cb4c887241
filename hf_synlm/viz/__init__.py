# SPDX-License-Identifier: Apache-2.0
"""Pictures of what the models compute: trees, surprisals, charts, distances, attention, grammars, and bars of scores.

Bars and heat maps need matplotlib. `show` gives an object that draws itself in notebooks. Functions whose names end in
`_to_text`, `_to_svg`, `_to_latex`, `_to_html` and `_to_page` return text in that format, with everything escaped.
"""

from hf_synlm.data.parsed import posteriors
from hf_synlm.viz.html import sentence_to_html, sentence_to_page, surprisals_in_bits
from hf_synlm.viz.latex import escape_latex, tree_to_latex
from hf_synlm.viz.plots import (
    chart_scores,
    chart_to_svg,
    distances_to_svg,
    heatmap_to_svg,
    plot_bars,
    plot_effects,
    span_attention_to_svg,
)
from hf_synlm.viz.svg import tree_to_svg
from hf_synlm.viz.text import tree_to_text
from hf_synlm.viz.view import SentenceView, show

__all__ = [
    "SentenceView",
    "chart_scores",
    "chart_to_svg",
    "distances_to_svg",
    "escape_latex",
    "heatmap_to_svg",
    "plot_bars",
    "plot_effects",
    "posteriors",
    "sentence_to_html",
    "sentence_to_page",
    "show",
    "span_attention_to_svg",
    "surprisals_in_bits",
    "tree_to_latex",
    "tree_to_svg",
    "tree_to_text",
]
