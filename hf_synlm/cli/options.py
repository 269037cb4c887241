"""Options that several commands take, and the model that they describe."""

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[str, typer.Option("--model", help="Folder of a model, or its name on the Hub.", show_default=False)]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]
TrustRemoteCode = Annotated[bool, typer.Option(help="Run code that comes with the model.")]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; by default a GPU if there is one.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sentences per call of the model.")]
Output = Annotated[
    Path | None, typer.Option("--out", help="JSON file to write; a Markdown table is written beside it.")
]
