"""Options that several commands take, and the model that they describe.

Options that go together are the fields of a dataclass, such as `Loading` or `Scoring`. A command takes it as one
parameter, and `with_groups` shows typer its fields instead.
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

from hf_synlm.evaluation.results import EvaluationResult, check_report
from hf_synlm.evaluation.scoring import TextScorer
from hf_synlm.hub.checkpoint import TOKENIZER_FILES

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
BatchSize = Annotated[
    int, typer.Option(min=1, help="Sentences per call of the model, at most.", rich_help_panel=_COMPUTE)
]
Seed = Annotated[int, typer.Option(help="Of everything random; scoring itself is not.", rich_help_panel=_COMPUTE)]


def output_check(check: Callable[[Path], object] | None = None) -> Callable[..., Path | None]:
    """A callback of --out, which is checked before anything is computed.

    Args:
        check: raises ValueError where nothing can be written there; None = the command checks.

    Returns:
        What typer calls with the option and its value.
    """

    def checked(option: typer.CallbackParam, path: Path | None) -> Path | None:
        if str(path) == "-":
            raise ValueError(f"--out -: {'name what to write' if option.required else 'leave out --out to print'}")
        if path is not None and check is not None:
            check(path)
        return path

    return checked


@dataclasses.dataclass(frozen=True)
class Beside:
    """Metadata of --out: what else is written, so that it overwrites nothing that is read."""

    name: Callable[[Path], Path]


Output = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="JSON file (.json) with everything needed to repeat it; a Markdown table is written beside it.",
        callback=output_check(check_report),
    ),
    Beside(lambda path: path.with_suffix(".md")),
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


Texts = Annotated[
    Path,
    typer.Argument(help="Text (one sentence per line), or a .tsv, .csv or .jsonl table; - reads standard input."),
]
ContextOption = Annotated[
    Literal["sentence", "document"],
    typer.Option("--context", help="Read every sentence alone, or after the sentences of its document before it."),
]
FileFormat = Annotated[
    Literal["txt", "tsv", "csv", "jsonl"] | None,
    typer.Option("--format", help="Of the input; default: by its name."),
]
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts in a table; default: sentence.")]


# --------------------------------------------------------------------------------------------- groups of options
@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """Which version of a model computes, and on what."""

    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    device: Device = None
    dtype: DType = "auto"
    batch_size: BatchSize = 16
    seed: Seed = 0

    def scorer(self, model: str, **more: Any) -> TextScorer:
        """Load a model.

        Args:
            model: folder or name.
            **more: of `TextScorer.from_pretrained`.

        Returns:
            The model with its tokenizer.
        """
        return TextScorer.from_pretrained(
            model,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            device=self.device,
            dtype=self.dtype,
            batch_size=self.batch_size,
            seed=self.seed,
            **more,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searching(Loading):
    """The beam of a model that searches."""

    num_beams: NumBeams = None
    action_beam_size: ActionBeamSize = None
    fast_track_size: FastTrackSize = None

    def scorer(self, model: str, **more: Any) -> TextScorer:
        """Load a model, see `Loading`."""
        search = {"action_beam_size": self.action_beam_size, "fast_track_size": self.fast_track_size}
        return super().scorer(model, num_beams=self.num_beams, search_options=search, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Searching):
    """How a model scores text."""

    gguf_file: GGUFFile = None
    begin_token: BeginToken = None
    estimator: EstimatorOption = None

    def scorer(self, model: str, **more: Any) -> TextScorer:
        """Load a model, see `Loading`."""
        return super().scorer(
            model, gguf_file=self.gguf_file, begin_token=self.begin_token, estimator=self.estimator, **more
        )


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
    """A command as typer has to see it: groups of options are replaced by their options.

    Args:
        command: a function; parameters whose type is a dataclass are groups.

    Returns:
        A function of all the options, which calls the command with the groups.
    """
    hints = get_type_hints(command)
    beside = [
        extra.name
        for extra in get_args(get_type_hints(command, include_extras=True).get("out"))
        if isinstance(extra, Beside)
    ]
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

    @wraps(command)
    def run(**given: Any) -> None:
        _check_overwriting(given, beside)
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


# Files that make up a model: results may lie beside them.
_OF_MODELS = (
    *"*.safetensors *.gguf *.bin *.py config.json *_config.json *.index.json special_tokens_map.json".split(),
    *"added_tokens.json vocab.* merges.txt chat_template* README.md".split(),
    *(pattern for pattern in TOKENIZER_FILES if pattern != "vocab*"),
)


def _check_overwriting(given: Mapping[str, Any], beside: Sequence[Callable[[Path], Path]]) -> None:
    """Raise ValueError where `out`, or what is written beside it, is read."""
    out = given.get("out")
    values = [value for name, value in given.items() if name != "out"]
    read = {
        path.resolve()
        for value in values
        for path in (value if isinstance(value, list) else [value])
        if isinstance(path, Path)
    }
    if isinstance(given.get("model"), str):  # a folder, or a name on the Hub
        read |= {file.resolve() for pattern in _OF_MODELS for file in Path(given["model"]).glob(pattern)}
    for path in [] if out is None else [out, *(name(out) for name in beside)]:
        if path.resolve() in read:
            raise ValueError(
                f"--out {out} would overwrite what is read, or a part of the model ({path}): choose another name"
            )


# --------------------------------------------------------------------------------------------------------- results
command_line: ContextVar[str | None] = ContextVar("command_line", default=None)
"""The command that runs, as it was typed."""


def report(result: EvaluationResult, out: Path | None) -> None:
    """Write a result, with the command that made it, if `out` is given, and print its table, even if writing fails."""
    result.command = command_line.get()
    try:
        if out is not None:
            paths = result.save(out)
            typer.echo(f"wrote {paths[0]} and {paths[1]}", err=True)
    finally:
        typer.echo(result.to_markdown(), nl=False)
