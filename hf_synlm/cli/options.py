"""Options that several commands take, and the model that they describe."""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.data.text import read_lines
from hf_synlm.evaluation.results import EvaluationResult, check_report
from hf_synlm.evaluation.scoring import TextScorer

_MODEL, _BEAM, _COMPUTE = "Model", "Estimator and beam", "Computation"

Model = Annotated[
    str, typer.Option("--model", help="Folder of a model, or its name on the Hub.", rich_help_panel=_MODEL)
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.", rich_help_panel=_MODEL)
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.", rich_help_panel=_MODEL)
]
GGUFFile = Annotated[str | None, typer.Option(help="Name of a GGUF file in the folder.", rich_help_panel=_MODEL)]
BeginToken = Annotated[
    str | None,
    typer.Option(
        help="Token from which the first word is predicted; default: the model's begin token. A model tuned on chats "
        "may need the one of its pretraining, such as '<|endoftext|>'.",
        rich_help_panel=_MODEL,
    ),
]
EstimatorOption = Annotated[
    Literal["exact", "beam_marginal", "stepwise"] | None,
    typer.Option(
        "--estimator",
        help="GPST and RNNG: beam_marginal (default; ratio of prefix probabilities over the beam, as in the papers) or "
        "stepwise (normalized next-token distribution, what minicons and lm-eval see). Other models: exact.",
        rich_help_panel=_BEAM,
    ),
]
NumBeams = Annotated[
    int | None,
    typer.Option(
        min=1, help="Derivations kept after a word (GPST, RNNG); default: the model's own.", rich_help_panel=_BEAM
    ),
]
ActionBeamSize = Annotated[
    int | None, typer.Option(min=1, help="Derivations kept after an action (RNNG).", rich_help_panel=_BEAM)
]
FastTrackSize = Annotated[
    int | None, typer.Option(min=0, help="Derivations moved on to the next word (RNNG).", rich_help_panel=_BEAM)
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.", rich_help_panel=_COMPUTE)
]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Type of the weights; auto = as saved.", rich_help_panel=_COMPUTE),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Sentences per call of the model.", rich_help_panel=_COMPUTE)]
Seed = Annotated[int, typer.Option(help="Of everything random; scoring itself is not.", rich_help_panel=_COMPUTE)]
Output = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="JSON file with everything needed to repeat it; a Markdown table is written beside it.",
        # Before anything is computed.
        callback=lambda path: None if path is None else check_report(path),
    ),
]

ParseMethod = Annotated[
    str | None,
    typer.Option("--method", help="How the model parses, e.g. search or inside (GPST).", rich_help_panel=_BEAM),
]
ParseOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--parse-option",
        help="NAME=VALUE for the model's parse(), e.g. decoder=biased or layer=1 (ON-LSTM); repeat for several.",
        rich_help_panel=_BEAM,
    ),
]
TreeStyleOption = Annotated[
    Literal["unlabeled", "labeled", "treebank"],
    typer.Option(
        "--tree-style",
        help="Of trees in a file: ((the cat) sleeps), (S (NP the cat) (VP sleeps)), or with a tag for each word. Lines "
        "of JSON tell it themselves.",
    ),
]


def lines_of(path: Path) -> Iterator[str]:
    """Lines of a text without their ends.

    Args:
        path: the file; - is standard input.

    Returns:
        The lines, one by one.
    """
    return (line.rstrip("\n") for line in sys.stdin) if str(path) == "-" else read_lines(path)


def parse_options(more: Sequence[str] | None, flag: str = "--parse-option", /, **named: Any) -> dict[str, Any]:
    """What is passed on to a model's `parse` or `generate`.

    Args:
        more: "name=value", the value in JSON or a bare string.
        flag: the option by which they were given, for messages.
        **named: options by name; None = not given.

    Returns:
        The options that were given.

    Raises:
        ValueError: an option without "=" or without a name.
    """
    chosen = {name: value for name, value in named.items() if value is not None}
    for option in more or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"{flag} {option}: write NAME=VALUE")
        try:
            chosen[name] = json.loads(value)
        except json.JSONDecodeError:  # a bare string
            chosen[name] = value
    return chosen


def load_scorer(
    model: str,
    *,
    num_beams: int | None = None,
    action_beam_size: int | None = None,
    fast_track_size: int | None = None,
    **options: Any,
) -> TextScorer:
    """Load the model that the options describe.

    Args:
        model: folder or name.
        num_beams: word beam.
        action_beam_size: beam inside a word.
        fast_track_size: see RNNG.
        **options: of `TextScorer.from_pretrained`.

    Returns:
        The scorer.
    """
    search = {"action_beam_size": action_beam_size, "fast_track_size": fast_track_size}
    return TextScorer.from_pretrained(model, num_beams=num_beams, search_options=search, **options)


def report(result: EvaluationResult, out: Path | None) -> None:
    """Write a result if `out` is given, and print its table."""
    if out is not None:
        paths = result.save(out)
        typer.echo(f"wrote {paths[0]} and {paths[1]}", err=True)
    typer.echo(result.to_markdown(), nl=False)
