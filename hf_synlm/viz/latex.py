r"""Trees for LaTeX, in the notation of the package forest.

In the preamble: \usepackage{forest}. Words in scripts beyond Latin need LuaLaTeX or XeLaTeX and a font that has them.
"""

import re
from collections.abc import Sequence

from hf_synlm.trees.spans import Span
from hf_synlm.viz.layout import Node, build_nodes, clean_text

_ESCAPES = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    # Not active with babel's shorthands, and no closing quotation mark in T1.
    '"': r"\char34{}",
    **{character: f"\\{character}" for character in "#$%&_{}"},
}
_SPECIAL = re.compile("|".join(map(re.escape, _ESCAPES)))
# Pairs of characters that fonts join to another one.
_LIGATURE = re.compile(r"(?<=-)(?=-)|(?<=[!?])(?=`)|(?<=,)(?=,)")


def escape_latex(text: str) -> str:
    r"""Write a text so that LaTeX prints it as it is.

    Args:
        text: any string.

    Returns:
        The text with commands for special characters; "--" and the like are kept from joining. The quotation marks
        of treebanks, `` and '', join to curly ones.
    """
    separated = _LIGATURE.sub("\x00", clean_text(text))
    return _SPECIAL.sub(lambda match: _ESCAPES[match[0]], separated).replace("\x00", r"\kern0pt{}")


def tree_to_latex(
    words: Sequence[str], spans: Sequence[Span], labels: Sequence[str] | None = None, *, standalone: bool = False
) -> str:
    r"""Write a tree as an environment of the package forest.

    Args:
        words: the n words.
        spans: half-open spans of the tree.
        labels: one label per span; None for trees without.
        standalone: a whole document that compiles, instead of the environment alone.

    Returns:
        LaTeX code, the words in one line below. Trees that do not cover the sentence stand side by side.

    Raises:
        ValueError: as `build_nodes`.

    Cost: O(n * depth).
    """
    roots = build_nodes(words, spans, labels)
    tier = "where n children=0{tier=word}{}"
    body = "\n".join(_brackets(root, 1 if len(roots) == 1 else 2) for root in roots)
    if len(roots) > 1:
        body = f"  [,phantom\n{body}\n  ]"
    tree = (
        f"\\begin{{forest}}\n  for tree={{parent anchor=south, child anchor=north}},\n  {tier}\n{body}\n\\end{{forest}}"
    )
    if not standalone:
        return tree
    head = "\\documentclass[border=4pt]{standalone}\n\\usepackage{iftex}\n\\usepackage[T1]{fontenc}\n"
    head += "\\iftutex\\usepackage{fontspec}\\fi\n\\usepackage{forest}\n"
    return f"{head}\\begin{{document}}\n{tree}\n\\end{{document}}\n"


def _brackets(root: Node, depth: int) -> str:
    """A node per line, indented by its depth; braces keep commas and brackets from being forest's own."""
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
            # A node without label is a point: forest draws the edges of an empty node to its middle.
            options = f"{{{escape_latex(node.label)}}}" if node.label else ",coordinate"
            lines.append(f"{indent}[{options}")
            agenda.append((None, level))
            agenda.extend((child, level + 1) for child in reversed(node.children))
    return "\n".join(lines)
