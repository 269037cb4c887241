"""`synlm verify`: does a model compute the same where hf_synlm is not installed?"""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer
from huggingface_hub import snapshot_download

from hf_synlm.cli import options
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.hub.verify import VerificationReport, encode_texts, verify_export

Format = Literal["table", "json"]


def command(
    model: Annotated[str, typer.Argument(help="Exported folder, or a name on the Hub.")],
    text: Annotated[list[str] | None, typer.Option(help="Text to tokenize, parse and continue; repeatable.")] = None,
    num_beams: Annotated[int | None, typer.Option(min=1, help="Beam of the parser; default: the model's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Length of the greedy continuation.")] = 8,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest difference of a number that passes; trees and tokens must be equal.")
    ] = 0.0,
    style: Annotated[Format, typer.Option("--format", help="How to print the report.")] = "table",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
) -> None:
    """Load a model here and in a clean process where `import hf_synlm` fails, and compare what the two compute.

    Compared are configuration, tokenizer, logits, parses, and generated text with its trees. The code of the folder is
    run, so a model on the Hub needs --trust-remote-code. Exit code 1 if something differs.

    Examples:
        synlm verify gpst-tiny
        synlm verify your-name/gpst-tiny --revision v1.0 --trust-remote-code --text "fruit flies like a banana"
    """
    check_model_source(model, revision)
    folder = Path(model)
    if not folder.is_dir() and not trust_remote_code:
        raise ValueError(
            f"{model!r} is no folder, and verifying a model on the Hub runs its code: read it, then pass "
            "--trust-remote-code"
        )
    if not folder.is_dir():
        folder = Path(snapshot_download(model, revision=revision))
    typer.echo(f"loading {model} with and without hf_synlm ...", err=True)
    if not report_passed(folder, style, text, num_beams, max_new_tokens, tolerance):
        raise typer.Exit(1)


def report_passed(
    folder: Path,
    style: Format = "table",
    texts: list[str] | None = None,
    num_beams: int | None = None,
    max_new_tokens: int = 8,
    tolerance: float = 0.0,
) -> bool:
    """Verify a folder and print the report.

    Args:
        folder: the exported model.
        style: table or JSON.
        texts: of the user; default: tokens spread over the vocabulary.
        num_beams: beam of the parser.
        max_new_tokens: length of the continuation.
        tolerance: largest difference that passes.

    Returns:
        Whether all checks passed.
    """
    inputs = encode_texts(folder, texts) if texts else {}
    try:
        report: VerificationReport = verify_export(
            folder, num_beams=num_beams, max_new_tokens=max_new_tokens, tolerance=tolerance, **inputs
        )
    except RuntimeError as error:  # the clean process could not even start: a finding about the folder
        typer.echo(f"failed: {error}", err=True)
        return False
    typer.echo(json.dumps(report.to_dict(), indent=2) if style == "json" else report.table())
    return report.passed
