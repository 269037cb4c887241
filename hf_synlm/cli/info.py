"""`synlm info`: what a saved model is, without loading it."""

import json
from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.hub.info import describe_model, info_table


def command(
    model: Annotated[str, typer.Argument(help="Folder of a model, or its name on the Hub.")],
    style: Annotated[Literal["table", "json"], typer.Option("--format", help="How to print it.")] = "table",
    revision: options.Revision = None,
) -> None:
    """Show what a model is: architecture, size, tokens, Auto classes, whether it is complete, and what its card says.

    Files are read and no code is run, so that this is safe for models of unknown origin; of a model on the Hub the
    weights stay there.

    Examples:
        synlm info runs/gpst_tiny/model
        synlm info your-name/gpst-tiny --revision v1.0 --format json
    """
    found = describe_model(model, revision)
    typer.echo(json.dumps(found, indent=2, ensure_ascii=False) if style == "json" else info_table(found))
