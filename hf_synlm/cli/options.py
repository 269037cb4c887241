"""Options that several commands share, the checks of `--out`, and the model that options describe.

A command is a function whose docstring describes its options under `Options:`. Options that belong together are the
fields of a dataclass, such as `Loading` or `Scoring`, which describes them under `Attributes:`; a command takes the
dataclass as one parameter. `as_typer_command` turns such a function into what typer expects.
"""

import copy
import dataclasses
import inspect
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from typer.models import ArgumentInfo, OptionInfo

from hf_synlm.data.files import TOKENIZER_FILES, check_output, write_text
from hf_synlm.evaluation.results import EvaluationResult, check_report, refuse_pipe
from hf_synlm.evaluation.text.text_items import rows_text

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.scoring import TextScorer

# Headings of the help, by option.
_PANELS = {
    "Model": "model revision trust_remote_code gguf_file begin_token",
    "Estimator and beam": "estimator num_beams action_beam_size fast_track_size method parse_option structure_mode",
    "Sampling": "sample temperature top_k top_p",
    "Computation": "device dtype batch_size num_processes cache seed",
}
# Descriptions of options that several commands take; those of the groups below count as well.
_SHARED = {
    "model": "Folder of a model, or its name on the Hub.",
    "out": "JSON file with the result and all that is needed to reproduce it; a Markdown table is written next to it.",
    "overwrite": "Replace the output if it exists.",
    "items_out": "TSV file to write, with what was measured of every item: a row per pair or region.",
    "texts": "Text (one sentence per line), or a .tsv, .csv or .jsonl table; - reads standard input.",
    "context": "Read each sentence alone, or after the earlier sentences of its document.",
    "tokenize": "ptb: split unknown words as the Penn Treebank does (end. becomes end and .); default: do not split.",
    "file_format": "Format of the input; default: by its name.",
    "text_column": "Column of the texts in a table; default: sentence.",
    "tree_style": "Trees in a file: ((the cat) sleeps), (S (NP the cat) (VP sleeps)), or with a tag for each word; "
    "default: told by capital letters. JSON lines do not need it.",
}


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


# Checks of typer: an input is a file that can be read. They do not accept "-" for standard input, so texts and trees go
# without them: a missing file is an OSError, which `app` reports.
INPUT_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
InputFile = Annotated[Path | None, typer.Option(**INPUT_FILE)]
InputFiles = Annotated[list[Path] | None, typer.Option(**INPUT_FILE)]
PathArgument = Annotated[Path, typer.Argument()]
Positive = Annotated[int, typer.Option(min=1)]
OptionalPositive = Annotated[int | None, typer.Option(min=1)]
FastTrackSize = Annotated[int | None, typer.Option(min=0)]
ItemsOutput = Annotated[Path | None, Writes()]
ProposalFiles = Annotated[list[Path] | None, typer.Option("--proposals", exists=True, dir_okay=False)]
Output = Annotated[Path | None, Writes(check_report, beside=lambda path: path.with_suffix(".md"))]
DType = Literal["auto", "float32", "bfloat16", "float16"]
TreeStyle = Literal["unlabeled", "labeled", "treebank"]
Context = Literal["sentence", "document"]
Tokenize = Literal["ptb"] | None
FileFormat = Annotated[Literal["txt", "tsv", "csv", "jsonl"] | None, typer.Option("--format")]


def say(message: str) -> None:
    """Write a remark beside the results, to standard error."""
    typer.echo(message, err=True)


def hide_bars_of_weights() -> None:
    """Show no bars for the loading and writing of weights; bars of downloads stay."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda bar, args, named: bar(*args, **{**named, "disable": True}))


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
    """Which version of a model computes, and on which device.

    Attributes:
        revision: Branch, tag or commit of a model on the Hub.
        trust_remote_code: Run code that comes with the model.
        device: cpu, cuda, cuda:1, ...; default: a GPU if there is one.
        dtype: Type of the weights; auto = as saved.
        batch_size: Maximum number of sentences per batch.
        seed: Random seed; scoring itself is not random.
    """

    revision: str | None = None
    trust_remote_code: bool = False
    device: str | None = None
    dtype: DType = "auto"
    batch_size: Positive = 16
    seed: int = 0

    def scorer(self, model: str, **more: Any) -> "TextScorer":
        """Load a model with the options of this group.

        Args:
            model: folder or name.
            **more: further options of `TextScorer.from_pretrained`.

        Returns:
            The model with its tokenizer.
        """
        from hf_synlm.evaluation.text.scoring import TextScorer

        hide_bars_of_weights()
        given = dataclasses.asdict(self)
        search = {name: given.pop(name) for name in ("action_beam_size", "fast_track_size") if name in given}
        of_parse = ("method", "parse_option")
        given = {name: value for name, value in given.items() if name not in of_parse}
        return TextScorer.from_pretrained(model, search_options=search, **given, **more)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searching(Loading):
    """The beam of a model that searches.

    Attributes:
        num_beams: Derivations kept after a word (GPST, RNNG); default: the model's own.
        action_beam_size: Derivations kept after an action (RNNG); default: the model's own, at least num_beams.
        fast_track_size: Derivations that fast-track moves on to the next word (RNNG).
        num_processes: Processes on a CPU, with one thread each; default: one for every 2,000 derivations (texts times
            beam), at most one per core. For several GPUs: accelerate launch -m hf_synlm.cli ...
        cache: File of results by text, written as they come. The same command continues from it if it was stopped.
    """

    num_beams: OptionalPositive = None
    action_beam_size: OptionalPositive = None
    fast_track_size: FastTrackSize = None
    num_processes: OptionalPositive = None
    cache: Path | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Searching):
    """How a model scores text.

    Attributes:
        gguf_file: Name of a GGUF file in the folder.
        begin_token: Token before the first word; default: the model's begin token. A chat model may need the one of its
            pretraining, such as '<|endoftext|>'.
        estimator: GPST and RNNG: beam_marginal (default; ratio of prefix probabilities over the beam, as in the papers)
            or stepwise (normalized next-token distribution, what minicons and lm-eval see). Other models: exact.
    """

    gguf_file: str | None = None
    begin_token: str | None = None
    estimator: Literal["exact", "beam_marginal", "stepwise"] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsing(Searching):
    """How a model parses.

    Attributes:
        method: How the model parses, e.g. search or inside (GPST).
        parse_option: NAME=VALUE for the model's parse(), e.g. decoder=biased or layer=1 (ON-LSTM); repeat for several.
    """

    method: str | None = None
    parse_option: list[str] | None = None

    def chosen(self, **more: Any) -> dict[str, Any]:
        """The options of `parse` that were given, and those of `more` that are not None."""
        beams = {name: getattr(self, name) for name in ("num_beams", "action_beam_size", "fast_track_size")}
        return parse_options(self.parse_option, method=self.method, **beams, **more)

    def computation(self) -> dict[str, Any]:
        """The options of `parse_sentences` that are not of the model."""
        return {name: getattr(self, name) for name in ("batch_size", "num_processes", "cache")}


# ---------------------------------------------------------------------------------------------- commands for typer
_SECTION = re.compile(r"^(?:Options|Attributes):\n((?: .*\n?|\n)*)", re.M)
_ENTRY = re.compile(r"^    (\w+): (.*(?:\n {8}.*)*)", re.M)


def without_options(text: str) -> str:
    """A docstring without the section that describes options."""
    return _SECTION.sub("", text)


def as_typer_command(command: Callable[..., None]) -> Callable[..., None]:
    """Show typer a command with the options of its groups, and check `--out` before the command runs.

    Args:
        command: a function; parameters whose type is a dataclass are groups. Docstrings describe the options.

    Returns:
        A function of all options, which calls the command with the groups.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    texts = {**_descriptions(Loading), **_descriptions(Searching), **_descriptions(Scoring), **_SHARED}
    texts |= _descriptions(command)
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name not in groups:
            parameters.append(_for_typer(parameter.name, hints[parameter.name], parameter.default, texts))
            continue
        kind = groups[parameter.name]
        types, of_group = get_type_hints(kind, include_extras=True), dict(texts)
        for base in reversed(kind.__mro__):
            of_group |= _descriptions(base)
        parameters += [_for_typer(f.name, types[f.name], f.default, of_group) for f in dataclasses.fields(kind)]
    writes = {name: extra for name, hint in hints.items() for extra in get_args(hint) if isinstance(extra, Writes)}

    @wraps(command)
    def run(**given: Any) -> None:
        # Checksums of the inputs stand beside the output: they are read twice.
        if any(rule.beside for rule in writes.values()):
            for path in _paths({name: value for name, value in given.items() if name not in writes}):
                refuse_pipe(path)
        for name, rule in writes.items():
            if given[name] is not None:
                _check_out(name, rule, given)
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


def _descriptions(described: Any) -> dict[str, str]:
    """What a docstring says about options, by name."""
    section = _SECTION.search(inspect.cleandoc(described.__doc__ or "") + "\n")
    return {name: " ".join(text.split()) for name, text in _ENTRY.findall(section[1])} if section else {}


def _for_typer(name: str, annotation: Any, default: Any, texts: Mapping[str, str]) -> inspect.Parameter:
    """A parameter with the flag, the description and the heading of its option."""
    kind, *extras = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    settings = next((copy.copy(extra) for extra in extras if isinstance(extra, OptionInfo | ArgumentInfo)), None)
    settings = settings or typer.Option()
    settings.help = texts[name]
    if isinstance(settings, OptionInfo):
        settings.rich_help_panel = next((title for title, names in _PANELS.items() if name in names.split()), None)
        if default is False and not settings.param_decls:  # no --no-NAME
            settings.param_decls = (f"--{name.replace('_', '-')}",)
    required = default in (inspect.Parameter.empty, dataclasses.MISSING)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else default,
        annotation=Annotated[kind, settings],
    )


# ----------------------------------------------------------------------------------------------------- checks of --out
# Files that make up a model; results may lie beside them.
_OF_MODELS = (
    *"*.safetensors *.gguf *.bin *.py config.json *_config.json *.index.json special_tokens_map.json".split(),
    *"added_tokens.json vocab.* merges.txt chat_template* README.md".split(),
    *(pattern for pattern in TOKENIZER_FILES if pattern != "vocab*"),
)


def _check_out(name: str, writes: Writes, given: Mapping[str, Any]) -> None:
    """Raise ValueError if an output cannot be written, exists without `--overwrite`, or names a file that is read."""
    out, flag = given[name], f"--{name.replace('_', '-')}"
    if str(out) == "-":
        raise ValueError(f"{flag} -: name a file or folder. Commands that can print do so without {flag}.")
    inputs = _input_files({other: value for other, value in given.items() if other != name})
    if writes.replaces_folder:
        inputs |= {folder for file in inputs for folder in file.parents}
    for path in (out, *([writes.beside(out)] if writes.beside else ())):
        if path.resolve() in inputs:
            raise ValueError(
                f"{flag} {out} would overwrite an input or a part of the model ({path}). Choose another name."
            )
    writes.check(out, given["overwrite"])


def _paths(given: Mapping[str, Any]) -> list[Path]:
    """All paths among the options of a command."""
    listed = [value if isinstance(value, list) else [value] for value in given.values()]
    return [path for paths in listed for path in paths if isinstance(path, Path)]


def _input_files(given: Mapping[str, Any]) -> set[Path]:
    """Files that a command reads: all paths among its options, and the files of its model."""
    inputs = {path.resolve() for path in _paths(given)}
    # A folder with items (suites, pairs) stands for its files, wherever links lead.
    inputs |= {file.resolve() for path in inputs if path.is_dir() for file in path.glob("*.json*")}
    # A folder, or a name on the Hub.
    inputs |= {Path(given[name]).resolve() for name in ("model", "tokenizer") if os.path.isdir(given.get(name) or "")}
    if isinstance(given.get("model"), str):
        inputs |= {file.resolve() for pattern in _OF_MODELS for file in Path(given["model"]).glob(pattern)}
    return inputs


# --------------------------------------------------------------------------------------------------------- results
command_line: ContextVar[str | None] = ContextVar("command_line", default=None)
"""The command that runs, as the user typed it."""


# Rows of a table that a terminal shows.
_MAX_ROWS = 8


def leave_output_to_first_process() -> None:
    """End the other processes of `accelerate launch` here."""
    if os.environ.get("RANK", "0") != "0":
        raise typer.Exit


def report(result: EvaluationResult, out: Path | None, items_out: Path | None = None) -> None:
    """Write a result with its command, if `out` is given, and print its table, even if writing fails."""
    leave_output_to_first_process()
    result.command = command_line.get()
    try:
        if out is not None:
            paths = result.save(out)
            say(f"wrote {paths[0]} and {paths[1]}")
        if items_out is not None:
            write_text(items_out, rows_text(result.items))
            say(f"wrote {len(result.items)} rows to {items_out}")
    finally:
        typer.echo(result.to_markdown(_MAX_ROWS), nl=False)
