"""`synlm convert`: a checkpoint of the authors in, a folder for `from_pretrained` out."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.conversion.files import convert_files
from hf_synlm.hub.checkpoint import load_tokenizer


def command(
    architecture: Annotated[
        Literal["gpst", "on_lstm", "palm", "prpn", "rnng"], typer.Argument(help="Architecture of the checkpoint.")
    ],
    weights: Annotated[Path, typer.Option(help="The authors' checkpoint: safetensors, or a file of plain tensors.")],
    config: Annotated[
        list[Path],
        typer.Option(help="The authors' configuration in JSON; for gpst twice: first r2d2_config, then gpt_config."),
    ],
    out: Annotated[
        Path, typer.Option("--out", help="Folder to write; it must not exist.", callback=options.output_check())
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Folder or Hub name of the checkpoint's tokenizer; default: what the configuration describes."
        ),
    ] = None,
) -> None:
    """Convert a checkpoint of the authors' code into a self-contained repository.

    Every tensor is accounted for, or the conversion stops and names what is left. Pickles that hold more than tensors
    are refused, because they can run code; the message says how to take the tensors out.

    Examples:
        synlm convert gpst --weights model.bin --config r2d2.json --config gpt.json --tokenizer gpst-vocab --out gpst
        synlm convert rnng --weights weights.pt --config config.json --out rnng
    """
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    convert_files(architecture, weights, config, out, loaded)
    typer.echo(f"wrote {out}; check it by `synlm verify {out}`", err=True)
