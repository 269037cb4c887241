# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and the model that options describe.

An option is declared by `option` as the default of a parameter; those of several commands are types. Options that
belong together are the fields of a dataclass, such as `Loading` or `Scoring`; a command takes the dataclass as one
parameter, and `grouped` shows typer its fields.
"""

import dataclasses
import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_type_hints

import typer

from hf_synlm.cli import outputs
from hf_synlm.data import parsed
from hf_synlm.data.brackets import LABEL_SEPARATORS
from hf_synlm.data.dependencies import DEPENDENCY_OPTIONS, Invalid, Labels, NonProjective, Structure, Tokens
from hf_synlm.data.files import find_model, flag_of
from hf_synlm.data.text import Tokenization, command_encoding, plural, read_lines_beside
from hf_synlm.evaluation.text.text_items import NUM_FIRST, OpenTexts, open_texts

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.scoring import TextScorer

# ------------------------------------------------------------------------------------------------- shared options
# Checks of typer: an input is a file that can be read. They do not accept "-" for standard input, so texts and trees go
# without them: a missing file is an OSError, which `app` reports.
INPUT_FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
_MODEL = "Model"
_BEAM = "Estimator and beam"
_COMPUTATION = "Computation"
_BRACKETS = "Bracketed trees"
DEPENDENCIES = "Dependencies (CoNLL-U)"

_of_model = partial(typer.Option, rich_help_panel=_MODEL)
_of_computation = partial(typer.Option, rich_help_panel=_COMPUTATION)
_FOLDER = "Folder of a model or of its training run, or its name on the Hub."
Model = Annotated[str, _of_model(help=_FOLDER, callback=find_model)]


def find_models(names: list[str] | None) -> list[str] | None:
    """Find the folder of each model that a repeated option names."""
    return names and list(map(find_model, names))


ModelName = Annotated[str, typer.Argument(help=_FOLDER, callback=find_model)]
Revision = Annotated[str | None, _of_model(help="Branch, tag or commit of a model on the Hub.")]
TrustRemoteCode = Annotated[bool, _of_model("--trust-remote-code", help="Run code that comes with the model.")]
Backbone = Annotated[
    str | None,
    _of_model(help="Folder or Hub name of the backbone of an adapter; default: the backbone that the adapter names."),
]
Device = Annotated[str | None, _of_computation(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")]
DType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    _of_computation(help="Type of the weights. auto keeps the saved type, but a CPU computes in float32."),
]
Texts = Annotated[
    Path, typer.Argument(help="Text (one sentence per line), or a .tsv, .csv or .jsonl table; - reads standard input.")
]
Context = Annotated[
    Literal["sentence", "document"],
    typer.Option(help="Read each sentence alone, or after the earlier sentences of its document."),
]
Tokenize = Annotated[
    Tokenization | None,
    typer.Option(
        help="How the model reads ordinary text. ptb, for models of treebanks: split unknown words as in the Penn "
        "Treebank ('end.' becomes 'end' and '.'). no-punctuation, for models that learned without punctuation: "
        "remove the marks at the edges of words. words: change no words. auto (default): follow text_style in "
        "the model's configuration; 'treebank' means ptb, 'natural' means ptb without new spaces, and no "
        "text_style means words.",
        callback=lambda given: None if given == "auto" else given,
    ),
]
_ENCODING = inspect.Parameter(
    "encoding",
    inspect.Parameter.KEYWORD_ONLY,
    default="utf-8",
    annotation=Annotated[str, typer.Option(help="Encoding of the files that are read, such as latin-1 or gbk.")],
)
TextColumn = Annotated[str | None, typer.Option(help="Column of the texts in a table (default: sentence).")]
InputFormat = Literal["txt", "tsv", "csv", "jsonl"]
InputFormatOption = Annotated[
    InputFormat | None, typer.Option(help="Format of the input. By default, the ending of the file's name decides.")
]
SplitSentences = Annotated[
    bool, typer.Option("--split-sentences", help="Split lines, or texts of a table, into sentences (English rules).")
]
PunctuationBy = Annotated[
    Literal["tag", "form"],
    typer.Option(help="Recognize punctuation by its tag (Penn Treebank, Universal Dependencies) or by its form."),
]
Treebank = Annotated[Path, typer.Option(help="Gold trees in the format of the Penn Treebank.")]
TreeStyle = Annotated[
    parsed.TreeStyle | None,
    typer.Option(
        help="Form of the brackets in a file. unlabeled: ((the cat) sleeps). labeled: (S (NP the cat) (VP sleeps)). "
        "treebank: with a tag for each word. By default, the brackets show their form. If several forms fit, a "
        "remark says which is used. JSON lines do not need this option."
    ),
]
ReportFormat = Annotated[Literal["table", "json"], typer.Option("--format", help="How to print the result.")]
Output = Annotated[
    Path | None,
    typer.Option(
        help="JSON file for the result and the facts that reproduce it. A Markdown table is written beside this file."
    ),
]
ItemsOutput = Annotated[
    Path | None,
    typer.Option(help="TSV file (or JSON, with the ending .jsonl) for the measurements of every pair or region."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")]


def option(help: str, panel: str | None = None, *, default: Any = None, name: str = "", **more: Any) -> Any:
    """Declare an option as the default of a parameter or of a dataclass's field. `MISSING` makes the option required.

    `name` is the spelling of the option, if the parameter has another spelling. `more` goes to `typer.Option`.
    """
    return _declared(typer.Option, default, name, {"help": help, "rich_help_panel": panel, **more})


def argument(help: str, *, default: Any = None, **more: Any) -> Any:
    """Declare an argument of a command: a value without the name of an option."""
    return _declared(typer.Argument, default, "", {"help": help, **more})


def _declared(kind: Callable[..., Any], default: Any, name: str, more: dict[str, Any]) -> Any:
    return dataclasses.field(default=default, metadata={"declare": partial(kind, **more), "name": name})


def _as_typer_reads(parameter: inspect.Parameter, declared: Any) -> inspect.Parameter:
    """A parameter whose default may be that of `option`."""
    if not isinstance(declared, dataclasses.Field) or not declared.metadata:
        return parameter
    # A switch has no opposite.
    name = declared.metadata["name"] or flag_of(parameter.name) * (declared.default is False)
    how = declared.metadata["declare"](*filter(None, [name]))
    default = inspect.Parameter.empty if declared.default is MISSING else declared.default
    return parameter.replace(annotation=Annotated[parameter.annotation, how], default=default)


SEARCH_OPTIONS = ("action_beam_size", "fast_track_size", "normalization")
"""Options of `parse` besides the word beam."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreebankReading:
    """How trees are read."""

    drop_tags: str | None = option("Leave out words with these tags, separated by spaces: '-DFL- SYM'.", _BRACKETS)
    drop_labels: str | None = option("Leave out the brackets of these labels, but keep the words in them.", _BRACKETS)
    label_separators: str = option(
        "Characters between a label and its function tags. These tags are removed.", _BRACKETS, default=LABEL_SEPARATORS
    )
    lemma_separator: str | None = option(
        "Character between word and lemma, if leaves have both; '-' for cats-cat.", _BRACKETS
    )
    split_leaves: bool = option("Read a leaf like (NN New York) as several leaves.", _BRACKETS, default=False)

    structure: Structure | None = option(
        "flat: a constituent for every word with dependents; left-first, right-first: binary trees that split "
        "off the dependents on the left (right) first. Default: flat.",
        DEPENDENCIES,
    )
    labels: Labels | None = option(
        "Labels. upos (default): a word's UPOS and P, such as NOUNP; deprel: the word's relation; X: always X.",
        DEPENDENCIES,
    )
    tokens: Tokens | None = option(
        "surface: a multiword token (German im) is one word; syntactic: it is several. Default: surface.", DEPENDENCIES
    )
    nonprojective: NonProjective | None = option(
        "Trees with crossing arcs: lift the arcs, skip the sentences, or refuse the file. Default: lift.", DEPENDENCIES
    )

    invalid: Invalid | None = option(
        "Dependencies that form no tree (several roots, a cycle): refuse the file, or skip the sentences. "
        "Default: refuse.",
        DEPENDENCIES,
    )

    def given(self) -> list[str]:
        """Names of the options that were given."""
        return differing(self, TreebankReading())

    def reading(self) -> dict[str, Any]:
        """The given options, as arguments of `read_treebank`."""
        given = {name: getattr(self, name) for name in self.given()}
        given |= {name: given[name].split() for name in ("drop_tags", "drop_labels") if name in given}
        dependencies = {name: given.pop(name) for name in DEPENDENCY_OPTIONS if name in given}
        return given | ({"dependencies": dependencies} if dependencies else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextReading:
    """Which texts are read."""

    text_column: TextColumn = None
    item_column: str | None = option("Column of the items' ids in a table; default: item, or the number of the row.")
    word_column: str | None = option(
        "Column of the words or regions, if each row of the table has one. The rows of an item (--item-column) are "
        "one text, in their order; each condition of an item is a text of its own."
    )
    sentence_column: str | None = option(
        "With --word-column: the column that tells the sentences of an item apart. With --context document, a "
        "sentence is read after the earlier sentences of its item."
    )
    split_sentences: SplitSentences = False

    def open(self, places: Sequence[Path], kind: InputFormat | None, flag: str = "--format") -> OpenTexts:
        """Open the texts, and print remarks about the first texts."""
        names = [field.name for field in dataclasses.fields(TextReading) if field.name != "split_sentences"]
        columns = {name: getattr(self, name) for name in names}
        found = open_texts(places, kind=kind, by_sentences=self.split_sentences, flag=flag, **columns)
        if self.word_column is None:
            outputs.say_odd_texts(item.text for item in found.first)
        if found.items is not found.first:
            outputs.say(
                f"more than {NUM_FIRST:,} texts: they are read piece by piece, and remarks are about the first texts"
            )
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loading:
    """Which version of a model is loaded, and on which device."""

    revision: Revision = None
    trust_remote_code: TrustRemoteCode = False
    backbone: Backbone = None
    device: Device = None
    dtype: DType = "auto"
    batch_size: int | None = option(
        "Sentences per batch, at most; default: 16 on a CPU, 128 on a GPU.", _COMPUTATION, min=1
    )
    seed: int = option("Random seed; scoring itself is not random.", _COMPUTATION, default=0)

    def scorer(self, model: str, **more: Any) -> "TextScorer":
        """Load a model and its tokenizer; `more` goes to `TextScorer.from_pretrained`."""
        from hf_synlm.evaluation.text.scoring import TextScorer

        outputs.hide_bars_of_weights()
        given = {name: value for name, value in vars(self).items() if name not in ("method", "parse_option")}
        search = {name: given.pop(name) for name in SEARCH_OPTIONS if name in given}
        scorer = TextScorer.from_pretrained(model, search_options=search, **given, **more)
        beams = {"num_beams": scorer.num_beams, **scorer.search_options}
        if not scorer.searches:
            typed = [name for name, value in beams.items() if value is not None]
            refuse(typed, f"{type(scorer.model).__name__} has no beam of trees")
        return scorer


_NUM_BEAMS = "Derivations kept after each word (GPST, RNNG). Default: as the model's configuration says."


@dataclasses.dataclass(frozen=True, kw_only=True)
class Widths:
    """Widths of a beam."""

    num_beams: int | None = option(_NUM_BEAMS, _BEAM, min=1)
    action_beam_size: int | None = option(
        "Derivations kept after each action (RNNG). Default: as the model says, at least --num-beams.", _BEAM, min=1
    )
    fast_track_size: int | None = option("Derivations that always continue to the next word (RNNG).", _BEAM, min=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Searching(Widths, Loading):
    """The beam of a model that searches."""

    normalization: Literal["search", "train"] | None = option(
        "For RNNG and Tree LM. search: impossible actions and words get probability 0, and the others are "
        "renormalized. train: the others are not renormalized. Default: as the model says (search).",
        _BEAM,
    )
    num_processes: int | None = option(
        "Processes on a CPU, with one thread each; default: one for every 2,000 derivations (texts times "
        "beam), at most one per core. For several GPUs: accelerate launch -m hf_synlm.cli ...",
        _COMPUTATION,
        min=1,
    )
    cache: Path | None = option(
        "File that stores the result of each text as soon as it is computed. If the command was stopped, run "
        "it again to continue from this file.",
        _COMPUTATION,
    )

    def for_models(self, models: Sequence[str]) -> dict[str, Self]:
        """The options for each model. If only some models have a beam, the other models get no options of a beam."""
        typed = [name for name in ("num_beams", *SEARCH_OPTIONS) if getattr(self, name) is not None]
        if not typed or len(models) < 2:
            return dict.fromkeys(models, self)
        from hf_synlm.hub.abilities import declared
        from hf_synlm.hub.loading import saved_config

        configs = {model: saved_config(model, self.revision, self.trust_remote_code) for model in models}
        lacking = [model for model, config in configs.items() if not declared(config, "searches")]
        if not 0 < len(lacking) < len(models):
            return dict.fromkeys(models, self)
        outputs.say(f"{', '.join(map(flag_of, typed))}: no effect on {', '.join(lacking)} (no beam of trees)")
        plain = type(self)(**{**vars(self), **dict.fromkeys(typed)})
        return {model: plain if model in lacking else self for model in models}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(Searching):
    """How a model scores text."""

    begin_token: str | None = option(
        "Token before the first word; default: the model's begin token. A chat model may need the begin token of "
        "its pretraining, such as '<|endoftext|>'.",
        _MODEL,
    )
    estimator: Literal["exact", "beam_marginal", "stepwise"] | None = option(
        "GPST and RNNG: beam_marginal (default; ratio of prefix probabilities over the beam, as in the "
        "papers) or stepwise (normalized next-token distribution, which minicons and lm-eval use). Other models: "
        "exact.",
        _BEAM,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoringByBeams(Scoring):
    """How a model scores text, by one or several widths of the beam."""

    # The base class has one width; `by_width` makes a base class of each.
    num_beams: list[int] | None = option(f"{_NUM_BEAMS} Repeat to compare several.", _BEAM, min=1)  # type: ignore[assignment]

    def by_width(self) -> dict[int | None, Scoring]:
        """The options for each width of the beam. The key None stands for the model's own width."""
        widths: Sequence[int | None] = self.num_beams or [None]
        if self.cache is not None and len(widths) > 1:
            raise ValueError(f"--cache {self.cache} holds results of one beam. Give one --num-beams, or no --cache")
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(Scoring)}
        return {width: Scoring(**{**given, "num_beams": width}) for width in widths}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Beliefs:
    """How much each word changes the weights of derivations, in addition to surprisal."""

    belief_update: Literal["old", "new"] | None = option(
        "For models that search: add belief_update_bits, how much a word changes the weights of derivations, and "
        "belief_cut, the share of weight that the beam drops. old compares the weights of earlier derivations "
        "before and after the word. new compares weights of derivations that have read the word, without and with "
        "its probability."
    )
    belief_order: float | None = option("Renyi order of --belief-update, or inf; default: 1, Kullback-Leibler.", min=0)

    @property
    def beliefs(self) -> tuple[str, float] | None:
        """Kind and order of the requested belief update."""
        if self.belief_order is not None and self.belief_update is None:
            raise ValueError(f"--belief-order {self.belief_order:g} belongs to --belief-update. Give both, or neither")
        return self.belief_update and (self.belief_update, 1.0 if self.belief_order is None else self.belief_order)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsing(Searching):
    """How a model parses."""

    method: str | None = option("How the model parses, e.g. search, inside or mbr (GPST).", _BEAM)
    parse_option: list[str] | None = option(
        "NAME=VALUE for the model's parse(), e.g. decoder=biased or layer=1 (ON-LSTM); repeat for several.", _BEAM
    )

    def scorer(self, model: str, **more: Any) -> "TextScorer":
        """Load a model as `Loading` does, or a parser that is not a language model."""
        from transformers import AutoModelForTokenClassification

        from hf_synlm.hub.loading import saved_auto_class

        model = find_model(model)
        if saved_auto_class(model, self.revision, self.trust_remote_code) is AutoModelForTokenClassification:
            more["auto_class"] = AutoModelForTokenClassification
        return super().scorer(model, **more)

    def chosen(self, **more: Any) -> dict[str, Any]:
        """The given options of `parse`, with the values of `more` that are not None."""
        beams = {name: getattr(self, name) for name in ("num_beams", *SEARCH_OPTIONS)}
        return parse_options(self.parse_option, method=self.method, **beams, **more)

    def beam(self, model: Any, flag: str = "--consensus") -> int:
        """How many trees of a sentence the beam of a model holds. Raise ValueError if the model has no beam."""
        from hf_synlm.hub.abilities import declared

        if not declared(model.config, "searches"):
            raise ValueError(f"{flag}: {type(model).__name__} has no beam of trees. Omit the option.")
        return self.num_beams or model.config.scoring_num_beams

    def computation(self) -> dict[str, Any]:
        """Arguments of `parse_sentences` that are not for the model."""
        return {name: getattr(self, name) for name in ("batch_size", "num_processes", "cache")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParsingByModels(Parsing):
    """How one or several models parse."""

    # The base class has one method; `by_model` makes a base class of each.
    method: list[str] | None = option(
        "How the model parses, e.g. search, inside or mbr (GPST). With several --model: give --method once for all "
        "models, or once for each in the same order.",
        _BEAM,
    )  # type: ignore[assignment]  # several, where Parsing takes one

    def by_model(self, models: Sequence[str]) -> dict[str, Parsing]:
        """The options for each model, by its name."""
        methods: Sequence[str | None] = self.method or [None]
        if models and len(methods) not in (1, len(models)):
            raise ValueError(
                f"--method is given {len(methods)} times for {plural(len(models), 'model')}. Give --method once for "
                "all models, or once for each --model in the same order"
            )
        each = [methods[0]] * len(models) if len(methods) == 1 else methods
        of = self.for_models(models)
        return {name: Parsing(**{**vars(of[name]), "method": how}) for name, how in zip(models, each, strict=True)}


def grouped(command: Callable[..., None], reads_text: bool = False) -> Callable[..., None]:
    """Replace each parameter whose type is a dataclass by the fields of the dataclass, so that typer sees them.

    A command that reads text gets the option --encoding, too.
    """
    hints, parameters = get_type_hints(command, include_extras=True), list[inspect.Parameter]()
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    for name, parameter in inspect.signature(command).parameters.items():
        of_group = inspect.signature(groups[name]).parameters.values() if name in groups else [parameter]
        types = get_type_hints(groups[name], include_extras=True) if name in groups else hints
        fields = groups[name].__dataclass_fields__ if name in groups else {name: parameter.default}
        for one in of_group:
            typed = one.replace(annotation=types[one.name], kind=one.KEYWORD_ONLY)
            parameters.append(_as_typer_reads(typed, fields[one.name]))
    parameters += [_ENCODING] * reads_text

    def run(**given: Any) -> None:
        if reads_text:
            command_encoding.set(_checked(given.pop("encoding")))
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
        command(**given)

    # Typer reads both; the type of a function does not declare the first.
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _checked(encoding: str) -> str:
    try:
        "".encode(encoding)
    except LookupError as error:
        raise ValueError(f"--encoding {encoding} is unknown. Choose one such as utf-8, latin-1 or gbk") from error
    return encoding


def parse_options(more: Sequence[str] | None, flag: str = "--parse-option", /, **named: Any) -> dict[str, Any]:
    """Arguments for `parse` or `generate`: those of `named` that are not None, and NAME=VALUE (JSON or a string)."""
    chosen = {name: value for name, value in named.items() if value is not None}
    for option in more or ():
        name, equals, value = option.partition("=")
        if not name or not equals:
            raise ValueError(f"{flag} {option}. Write NAME=VALUE")
        if name in chosen:
            raise ValueError(f"{flag} {option}: the command has its own option for {name}. See --help")
        try:
            chosen[name] = json.loads(value)
        except json.JSONDecodeError:  # a bare string
            chosen[name] = value
    return chosen


def differing(group: Any, usual: Any) -> list[str]:
    """Names of the options in a group whose values differ from the defaults."""
    names = [field.name for field in dataclasses.fields(usual)]
    return [name for name in names if getattr(group, name) != getattr(usual, name)]


def refuse(names: Iterable[str], why: str) -> None:
    """Raise ValueError if any option is named, because these options would change nothing."""
    if flags := ", ".join(map(flag_of, names)):
        raise ValueError(f"{flags}: {why}. Leave {flags} out.")


def refuse_repeated(flag: str, values: Sequence[Path | str]) -> None:
    """Raise ValueError if the same value is given twice to an option that may be repeated."""
    for value, count in Counter(map(str, values)).items():
        if count > 1:
            raise ValueError(f"{flag} {value} is given {count} times. Give it once")


def read_trees(
    path: Path, style: parsed.TreeStyle | None, tagged: Callable[[Path], Any] | None = None, **reading: Any
) -> Any:
    """Read the parses in a file.

    --tree-style gives the style. Without --tree-style, the form of the brackets decides, and a remark says so. For
    trees with tags, return the result of `tagged`. `reading` holds options for trees with tags and dependencies.
    """
    lines = read_lines_beside(path)
    kind = parsed.kind_of_trees(path, lines)
    first = next((line for line in lines if len(line.split()) > 1 and not line.startswith("#")), "(")
    if kind == "brackets" and not first.lstrip().startswith("("):
        raise ValueError(f"{path} holds text, not trees (brackets, JSON, CoNLL-U). Make trees by `synlm parse {path}`")
    found, is_certain = (style, True) if style else parsed.guess_style(lines)
    if not is_certain:
        outputs.say(f"{path}: labels of brackets are unclear: read as {found}. If this is wrong, give --tree-style.")
    if tagged is not None and kind == "brackets" and found == "treebank":
        return tagged(path)
    try:
        return parsed.parses_of_lines(lines, found, source=str(path), **reading)
    except ValueError as error:
        remedy = f" (read as {found}: --tree-style gives another style)" if kind == "brackets" else ""
        raise ValueError(f"{error}{remedy}") from error
