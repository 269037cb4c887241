"""`synlm draw`: trees in, pictures out."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import drawing, options
from hf_synlm.data.parsed import parses_of_lines
from hf_synlm.data.text import read_lines


def command(
    trees: Annotated[
        Path,
        typer.Argument(
            help="One tree per line, or the JSON lines of `synlm parse --format json`; - reads standard input."
        ),
    ],
    tree_style: options.TreeStyleOption = "unlabeled",
    style: drawing.FormatOption = "text",
    out: drawing.Out = None,
) -> None:
    """Draw the trees of a file, whatever program they come from; no model is needed.

    Example: synlm draw trees.txt --tree-style treebank --format svg --out pictures
    """
    sentences = parses_of_lines(read_lines(trees), tree_style, source=str(trees))
    drawing.write_sentences(sentences, style, out, title=str(trees))
