"""Options that several commands share, the checks of `--out`, and the model that options describe.

Options that belong together are the fields of a dataclass, such as `Loading` or `Scoring`. A command takes the
dataclass as one parameter, and `with_groups` shows typer its fields instead.
"""

import dataclasses
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import typer

from hf_synlm.data.files import check_output
from hf_synlm.evaluation.results import EvaluationResult, check_report
from hf_synlm.evaluation.scoring import TextScorer
from hf_synlm.hub.checkpoint import TOKENIZER_FILES

_MODEL, _BEAM, _COMPUTE = "Model", "Estimator and beam", "Computation"
# Checks of typer: an input is a file that can be read. They do not accept "-" for standard input, so texts and trees go
# without them: a missing file is an OSError, which `app` reports.
INPUT_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}

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
        help="Token before the first word; default: the model's begin token. A chat model may need the one of its "
        "pretraining, such as '<|endoftext|>'.",
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
    int | None,
    typer.Option(min=0, help="Derivations that fast-track moves on to the next word (RNNG).", rich_help_panel=_BEAM),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.", rich_help_panel=_COMPUTE)
]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option("--dtype", help="Type of the weights; auto = as saved.", rich_help_panel=_COMPUTE),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Maximum number of sentences per batch.", rich_help_panel=_COMPUTE)]
Seed = Annotated[int, typer.Option(help="Random seed; scoring itself is not random.", rich_help_panel=_COMPUTE)]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]


@dataclasses.dataclass(frozen=True)
class Writes:
    """Metadata of `--out`: how to check, before anything is computed, that it can be written.

    Attributes:
        check: called with the path and the value of `--overwrite`; raises ValueError.
        beside: name of a second file that the command writes, from the name of the first.
        replaces_folder: True if `--out` is a folder, which is replaced as a whole.
    """

    check: Callable[[Path, bool], object] = check_output
    beside: Callable[[Path], Path] | None = None
    replaces_folder: bool = False


Output = Annotated[
    Path | None,
    typer.Option("--out", help="JSON file (.json) with all that repeats the result; a Markdown table lies beside it."),
    Writes(check_report, beside=lambda path: path.with_suffix(".md")),
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
        help="Trees in a file: ((the cat) sleeps), (S (NP the cat) (VP sleeps)), or with a tag for each word. JSON "
        "lines do not need it.",
    ),
]
Texts = Annotated[
    Path,
    typer.Argument(help="Text (one sentence per line), or a .tsv, .csv or .jsonl table; - reads standard input."),
]
ContextOption = Annotated[
    Literal["sentence", "document"],
    typer.Option("--context", help="Read each sentence alone, or after the earlier sentences of its document."),
]
FileFormat = Annotated[
    Literal["txt", "tsv", "csv", "jsonl"] | None,
    typer.Option("--format", help="Format of the input; default: by its name."),
]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts in a table; default: sentence.")]


def parse_options(more: Sequence[str] | None, flag: str = "--parse-option", /, **named: Any) -> dict[str, Any]:
    """Keyword arguments for a model's `parse` or `generate`.

    Args:
        more: "name=value", the value in JSON or a bare string.
        flag: the option that gave them, for messages.
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


# --------------------------------------------------------------------------------------------- groups of options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """Which version of a model computes, and on which device."""

    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    device: Device = None
    dtype: DType = "auto"
    batch_size: BatchSize = 16
    seed: Seed = 0

    def scorer(self, model: str, **more: Any) -> TextScorer:
        """Load a model with the options of this group.

        Args:
            model: folder or name.
            **more: further options of `TextScorer.from_pretrained`.

        Returns:
            The model with its tokenizer.
        """
        given = dataclasses.asdict(self)
        search = {name: given.pop(name) for name in ("action_beam_size", "fast_track_size") if name in given}
        of_parse = ("method", "parse_option")
        given = {name: value for name, value in given.items() if name not in of_parse}
        return TextScorer.from_pretrained(model, search_options=search, **given, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searching(Loading):
    """The beam of a model that searches."""

    num_beams: NumBeams = None
    action_beam_size: ActionBeamSize = None
    fast_track_size: FastTrackSize = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Searching):
    """How a model scores text."""

    gguf_file: GGUFFile = None
    begin_token: BeginToken = None
    estimator: EstimatorOption = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsing(Searching):
    """How a model parses."""

    method: ParseMethod = None
    parse_option: ParseOptions = None

    def chosen(self, **more: Any) -> dict[str, Any]:
        """The options of `parse` that were given, and those of `more` that are not None."""
        beams = {name: getattr(self, name) for name in ("num_beams", "action_beam_size", "fast_track_size")}
        return parse_options(self.parse_option, method=self.method, **beams, **more)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer a command with the options of its groups, and check `--out` before the command runs.

    Args:
        command: a function; parameters whose type is a dataclass are groups.

    Returns:
        A function of all options, which calls the command with the groups.
    """
    hints = get_type_hints(command)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(parameter.replace(kind=parameter.KEYWORD_ONLY))
            continue
        types = get_type_hints(groups[parameter.name], include_extras=True)
        for field in dataclasses.fields(groups[parameter.name]):
            default = parameter.empty if field.default is dataclasses.MISSING else field.default
            parameters.append(
                parameter.replace(
                    name=field.name, kind=parameter.KEYWORD_ONLY, default=default, annotation=types[field.name]
                )
            )
    of_out = get_args(get_type_hints(command, include_extras=True).get("out"))
    writes = next((extra for extra in of_out if isinstance(extra, Writes)), None)

    @wraps(command)
    def run(**given: Any) -> None:
        if writes is not None and given["out"] is not None:
            _check_out(writes, given)
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, kind in groups.items()
        }
        command(**given, **made)

    # Functions are not declared to have this attribute, by which `inspect.signature`, and so typer, reads them.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del run.__wrapped__  # or typer reads the annotations of the command itself
    return run


# ----------------------------------------------------------------------------------------------------- checks of --out
# Files that make up a model; results may lie beside them.
_OF_MODELS = (
    *"*.safetensors *.gguf *.bin *.py config.json *_config.json *.index.json special_tokens_map.json".split(),
    *"added_tokens.json vocab.* merges.txt chat_template* README.md".split(),
    *(pattern for pattern in TOKENIZER_FILES if pattern != "vocab*"),
)


def _check_out(writes: Writes, given: Mapping[str, Any]) -> None:
    """Raise ValueError if `--out` cannot be written, exists without `--overwrite`, or names a file that is read."""
    out: Path = given["out"]
    if str(out) == "-":
        raise ValueError("--out -: name a file or folder. Commands that can print do so without --out.")
    inputs = _input_files(given)
    if writes.replaces_folder:
        inputs |= {folder for file in inputs for folder in file.parents}
    for path in (out, *([writes.beside(out)] if writes.beside else ())):
        if path.resolve() in inputs:
            raise ValueError(
                f"--out {out} would overwrite an input or a part of the model ({path}). Choose another name."
            )
    writes.check(out, given["overwrite"])


def _input_files(given: Mapping[str, Any]) -> set[Path]:
    """Files that a command reads: all paths among its options but `--out`, and the files of its model."""
    values = [value for name, value in given.items() if name != "out"]
    listed = [value if isinstance(value, list) else [value] for value in values]
    inputs = {path.resolve() for paths in listed for path in paths if isinstance(path, Path)}
    if isinstance(given.get("model"), str):  # a folder, or a name on the Hub
        inputs |= {file.resolve() for pattern in _OF_MODELS for file in Path(given["model"]).glob(pattern)}
    return inputs


# --------------------------------------------------------------------------------------------------------- results
command_line: ContextVar[str | None] = ContextVar("command_line", default=None)
"""The command that runs, as the user typed it."""


def report(result: EvaluationResult, out: Path | None) -> None:
    """Write a result with its command, if `out` is given, and print its table, even if writing fails."""
    result.command = command_line.get()
    try:
        if out is not None:
            paths = result.save(out)
            typer.echo(f"wrote {paths[0]} and {paths[1]}", err=True)
    finally:
        typer.echo(result.to_markdown(), nl=False)
