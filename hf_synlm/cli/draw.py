"""`synlm draw`: trees in, pictures out."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import drawing, options
from hf_synlm.data.parsed import read_parses


def command(
    trees: Annotated[Path, typer.Argument(help="One tree per line, or the JSON lines of `synlm parse --format json`.")],
    tree_style: options.TreeStyleOption = "unlabeled",
    style: drawing.FormatOption = "text",
    out: drawing.Out = None,
) -> None:
    """Draw the trees of a file, whatever program they come from; no model is needed.

    Example: synlm draw trees.txt --tree-style treebank --format svg --out pictures
    """
    drawing.write_sentences(read_parses(trees, tree_style), style, out, title=str(trees))
