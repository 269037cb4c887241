"""`synlm evaluate plot`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import check_output as check_writable
from hf_synlm.data.files import write_text
from hf_synlm.evaluation.summary import load_runs, scores_of_groups
from hf_synlm.viz import bars_to_svg


def command(
    results: Annotated[list[Path], typer.Argument(help="JSON files of one evaluation: several models, or seeds.")],
    out: Annotated[
        Path,
        typer.Option(
            "--out", help="SVG file to write.", callback=options.output_check(lambda path: _check_picture(path))
        ),
    ],
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a file in the picture, one for each file in order; files with the same name are runs of one "
            "model, drawn as mean with standard deviation. Default: names of the files, or of their folders."
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
    loaded = load_runs(results)
    labels = label or _names(results)
    if len(labels) != len(results):
        raise ValueError(f"{len(labels)} labels for {len(results)} files: give one for each, or none")
    names, means, deviations = scores_of_groups(loaded, labels, score or [])
    runs = {name: labels.count(name) for name in means}
    named = ", ".join(name if count == 1 else f"{name} ({count} runs)" for name, count in runs.items())
    unit = 1.0 if all(value is None or value <= 1 for row in means.values() for value in row) else None
    title = f"{loaded[0].task}: {named}"
    write_text(out, bars_to_svg(names, means, deviations=deviations, title=title, largest=unit) + "\n")
    typer.echo(f"wrote {out}", err=True)


def _names(paths: list[Path]) -> list[str]:
    """A name for each file: its own, or that of its folder."""
    for names in ([path.stem for path in paths], [path.absolute().parent.name for path in paths]):
        if len(set(names)) == len(names):
            return names
    raise ValueError("files and folders have the same names: name each file by --label (runs of one model alike)")


def _check_picture(out: Path) -> None:
    if out.suffix.lower() != ".svg":
        raise ValueError(f"--out {out}: the picture is SVG. Choose a name in .svg")
    check_writable(out)
