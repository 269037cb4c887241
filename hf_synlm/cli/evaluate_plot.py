"""`synlm evaluate plot`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.evaluation.results import check_writable, load_result, write_text
from hf_synlm.evaluation.summary import scores_of_groups
from hf_synlm.viz import bars_to_svg


def command(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one evaluation: several models, or seeds.")],
    out: Annotated[Path, typer.Option("--out", help="SVG file to write.", callback=lambda path: check_writable(path))],
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a file in the picture, one for each file in order; files with the same name are runs of one "
            "model, drawn as mean with standard deviation. Default: the file's name; its folder's where names repeat."
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="Score to draw, or the beginning of its name, such as 'suite '; repeat for several. Default: means "
            "and the circuits or phenomena; of parsing the F1s; of perplexity that over words."
        ),
    ] = None,
) -> None:
    """Draw the scores of one or several results as bars.

    Example: synlm evaluate plot sg.gpst.json sg.rnng.json --out sg.svg --score 'circuit '
    """
    loaded = [load_result(path) for path in results]
    stems = [path.stem for path in results]
    labels = label or (stems if len(set(stems)) == len(stems) else [path.absolute().parent.name for path in results])
    if len(labels) != len(results):
        raise ValueError(f"{len(labels)} labels for {len(results)} files: give one for each, or none")
    names, means, deviations = scores_of_groups(loaded, labels, score or [])
    runs = {name: labels.count(name) for name in means}
    named = ", ".join(name if count == 1 else f"{name} ({count} runs)" for name, count in runs.items())
    unit = 1.0 if all(value is None or value <= 1 for row in means.values() for value in row) else None
    title = f"{loaded[0].task}: {named}"
    write_text(out, bars_to_svg(names, means, deviations=deviations, title=title, largest=unit) + "\n")
    typer.echo(f"wrote {out}", err=True)
