"""`synlm evaluate summary`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.evaluation.results import load_result, markdown_table, summarize, write_text


def command(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one evaluation, for example one per seed.")],
    out: Annotated[Path | None, typer.Option("--out", help="Markdown file to write.")] = None,
) -> None:
    """Mean and standard deviation of results over seeds.

    Results of different tasks, options or data are refused: their mean would mix conventions.

    Example: synlm evaluate summary sg.seed0.json sg.seed1.json sg.seed2.json
    """
    loaded = [load_result(path) for path in results]
    names = "\n".join(f"- {path}: {result.model['name']}" for path, result in zip(results, loaded, strict=True))
    text = f"# {loaded[0].task}\n\n{names}\n\n{markdown_table(summarize(loaded))}\n"
    if out is not None:
        write_text(out, text)
    typer.echo(text, nl=False)
