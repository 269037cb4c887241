"""`synlm evaluate summary`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.results import markdown_table, write_report
from hf_synlm.evaluation.summary import load_runs, summarize, summary_to_json


def command(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one evaluation, for example one per seed.")],
    out: options.Output = None,
) -> None:
    """Mean and standard deviation of results over seeds.

    Results of different tasks, options or data, or of models of different architecture, size or precision are refused:
    their mean would mix conventions.

    Example: synlm evaluate summary sg.seed0.json sg.seed1.json sg.seed2.json --out sg.json
    """
    loaded = load_runs(results)
    names = "\n".join(f"- {path}: {result.model['name']}" for path, result in zip(results, loaded, strict=True))
    rows = summarize(loaded)
    text = f"# {loaded[0].task}\n\n{names}\n\n{markdown_table(rows)}\n"
    if out is not None:
        paths = write_report(out, summary_to_json(results, loaded, rows), text)
        typer.echo(f"wrote {paths[0]} and {paths[1]}", err=True)
    typer.echo(text, nl=False)
