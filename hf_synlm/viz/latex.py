# SPDX-License-Identifier: Apache-2.0
r"""Trees for LaTeX, in the notation of the package forest, and tables.

The preamble needs \usepackage{forest} for trees, \usepackage{booktabs} for tables. Words in other scripts than Latin
need LuaLaTeX or XeLaTeX, and a font for them.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from hf_synlm.evaluation.results import table_columns
from hf_synlm.trees.spans import Span
from hf_synlm.viz.layout import Node, build_nodes, clean_text

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # babel may make the plain character a shorthand, and in T1 it prints a closing quotation mark.
    '"': r"\char34{}",
    **{character: f"\\{character}" for character in "#$%&_{}"},
}
_SPECIAL = re.compile("|".join(map(re.escape, _ESCAPES)))
# Places inside pairs of characters that fonts join into another character.
_LIGATURE = re.compile(r"(?<=-)(?=-)|(?<=[!?])(?=`)|(?<=,)(?=,)")


def escape_latex(text: str) -> str:
    r"""Escape a text, so that LaTeX prints it unchanged.

    Args:
        text: any string.

    Returns:
        The text with commands for special characters. Pairs such as "--" do not join into one character, but the
        quotation marks of treebanks, `` and '', join into curly ones.
    """
    separated = _LIGATURE.sub("\x00", clean_text(text))
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], separated).replace("\x00", r"\kern0pt{}")


def tree_to_latex(words: Sequence[str], spans: Sequence[Span], labels: Sequence[str] | None = None) -> str:
    r"""Write a tree as an environment of the package forest.

    Args:
        words: the n words.
        spans: half-open spans of the tree.
        labels: one label per span; None: the tree has no labels.

    Returns:
        LaTeX code; the words stand in one line below the tree. Trees of parts of the sentence stand side by side.

    Raises:
        ValueError: the spans or labels do not fit the words; see `build_nodes`.

    Cost: O(n * depth).
    """
    roots = build_nodes(words, spans, labels)
    tier = "where n children=0{tier=word}{}"
    body = "\n".join(_brackets(root, 1 if len(roots) == 1 else 2) for root in roots)
    if len(roots) > 1:
        body = f"  [,phantom\n{body}\n  ]"
    return (
        f"\\begin{{forest}}\n  for tree={{parent anchor=south, child anchor=north}},\n  {tier}\n{body}\n\\end{{forest}}"
    )


def _brackets(root: Node, depth: int) -> str:
    """One node per line, indented by its depth. In braces, forest takes commas and brackets as text."""
    lines: list[str] = []
    agenda: list[tuple[Node | None, int]] = [(root, depth)]
    while agenda:
        node, level = agenda.pop()
        indent = "  " * level
        if node is None:
            lines.append(f"{indent}]")
        elif node.is_word:
            lines.append(f"{indent}[{{{escape_latex(node.label)}}}]")
        else:
            # A node without a label must be a point: forest draws the edges of an empty node to its middle.
            options = f"{{{escape_latex(node.label)}}}" if node.label else ",coordinate"
            lines.append(f"{indent}[{options}")
            agenda.append((None, level))
            agenda.extend((child, level + 1) for child in reversed(node.children))
    return "\n".join(lines)


def table_to_latex(rows: Sequence[Mapping[str, Any]]) -> str:
    r"""Rows with equal keys as a tabular, with the numbers of `markdown_table`; columns without values are left out."""
    columns = table_columns(rows)
    kinds = "".join("r" if is_number else "l" for is_number, _ in columns.values())
    rows_of_cells = [list(columns), *zip(*(cells for _, cells in columns.values()), strict=True)]
    head, *body = [" & ".join(map(escape_latex, cells)) + r" \\" for cells in rows_of_cells]
    rules = [rf"\begin{{tabular}}{{{kinds}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"]
    return "\n".join(rules) + "\n"
