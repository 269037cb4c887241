# SPDX-License-Identifier: Apache-2.0
"""Results of evaluations: everything needed to repeat them as JSON, a table as Markdown, and rows of a model card.

A result is a JSON object:

    format    "hf_synlm.result", format_version 1
    task      what was measured: "perplexity", "syntaxgym", "blimp", "pairs", ...
    model     name or folder, revision, architecture, number of parameters, dtype
    options   all options that change numbers, seeds included
    data      what was read: paths, sizes, SHA-256 of files or of the rows of tables; how many texts were longer than
              the positions of the model
    versions  of Python and the libraries
    hardware  device and number of threads
    seconds   wall time of the scoring (of fine-tuning: of the whole process)
    command   the command line that made it, null for results made in Python, or by fine-tuning, whose arguments are
              among the options
    scores    flat mapping from names to numbers; what summaries are about
    tables    name -> list of rows (mappings with equal keys), for the Markdown

    synlm evaluate parsing ... --out f1.json
    synlm export MODEL --out FOLDER --results f1.json

A row of a model card names beam width and estimator, the convention of what is counted, the seed and the hardware, and
the same number for trees that need no model. Without these a number on a card says little.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
import logging
import math
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import NoneType
from typing import Any, Self, TypeAlias

from hf_synlm.data.files import check_output, read_json, write_text
from hf_synlm.data.text import PathLike, ReadOnce, open_bytes, plural

Row: TypeAlias = dict[str, Any]
FORMAT, FORMAT_VERSION = "hf_synlm.result", 1
SUMMARY_FORMAT = "hf_synlm.summary"
logger = logging.getLogger(__name__)
# By task, the score that a model card states; the others are in the JSON file.
CARD_SCORES = {
    "parsing": "f1",
    "perplexity": "word_perplexity",
    "syntaxgym": "mean_over_suites",
    "blimp": "accuracy",
    "pairs": "accuracy",
}
F1_TITLES = {
    "f1": "F1 by the convention",
    "sentence_drop": "sentence, without sentence span",
    "corpus_drop": "corpus, without sentence span",
    "sentence_count": "sentence, with sentence span",
    "corpus_count": "corpus, with sentence span",
}
"""Score of unlabeled F1 -> its column in tables."""
_OTHER_WIDTHS = {
    "action_beam_size": "action beam", "fast_track_size": "fast track", "search_order": "order",
    "search_slack": "slack",
}  # fmt: skip
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy")


@dataclasses.dataclass
class EvaluationResult:
    """One evaluation of one model; `save` writes it, `load_result` reads it."""

    task: str
    scores: dict[str, float]
    model: dict[str, Any]
    options: dict[str, Any]
    data: dict[str, Any]
    tables: dict[str, list[Row]] = dataclasses.field(default_factory=dict)
    seconds: float | None = None
    versions: dict[str, str] = dataclasses.field(default_factory=lambda: library_versions())
    hardware: dict[str, Any] = dataclasses.field(default_factory=lambda: describe_hardware())
    command: str | None = None
    items: list[Row] = dataclasses.field(default_factory=list)

    @classmethod
    def of(
        cls,
        scorer: Any,
        task: str,
        scores: Mapping[str, float],
        options: Mapping[str, Any],
        data: Mapping[str, Any],
        **fields: Any,
    ) -> Self:
        """A result of a `TextScorer`: adds what describes the model, its options and its device."""
        return cls(
            task=task,
            scores=dict(scores),
            model=scorer.describe(),
            options={**scorer.options(), **options},
            data={**data, **scorer.cuts},
            hardware=describe_hardware(scorer.model.device),
            **fields,
        )

    @property
    def is_table(self) -> bool:
        """Whether the tables are what was asked for: they hold the scores, and are not cut."""
        return self.task == "parsing by conventions"

    def to_json(self) -> str:
        """The result as a JSON document; numbers that are not finite become null."""
        fields = dataclasses.asdict(dataclasses.replace(self, items=[]))
        del fields["items"]
        return json_text({"format": FORMAT, "format_version": FORMAT_VERSION, **fields})

    def to_markdown(self, max_rows: int | None = None, file: PathLike | None = None) -> str:
        """The scores and tables for a reader, with what they depend on. `max_rows` cuts tables; `file` has all."""
        max_rows = None if self.is_table else max_rows
        shown = {**self.options, **{key: value for key, value in self.data.items() if isinstance(value, int)}}
        parts = [
            f"# {self.task}: {self.model.get('name', '')}",
            # Punctuation begins with its name.
            ", ".join(
                str(value) if str(value).startswith(key) else f"{key} {value}"
                for key, value in shown.items()
                if value is not None
            ),
            "" if self.is_table else markdown_table([{"score": k, "value": value} for k, value in self.scores.items()]),
            *(f"## {title}\n\n{_cut_table(rows, max_rows, file)}" for title, rows in self.tables.items() if rows),
            ", ".join(f"{key} {value}" for key, value in self.versions.items()),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def save(self, path: PathLike) -> tuple[Path, Path]:
        """Write `path` (JSON) and the same name ending in .md. Neither file is ever half-written."""
        return write_report(path, self.to_json(), self.to_markdown())


def _cut_table(rows: Sequence[Row], max_rows: int | None, file: PathLike | None) -> str:
    left = 0 if max_rows is None else len(rows) - max_rows
    table = markdown_table(rows[:max_rows])
    where = "--out FILE.json writes them" if file is None else f"see {file}"
    return f"{table}\n\n{plural(left, 'more row')}: {where}" if left > 0 else table


def write_report(path: PathLike, document: str, table: str) -> tuple[Path, Path]:
    """Write a JSON document to `path` and its table to the same name ending in .md."""
    path, beside = Path(path), Path(path).with_suffix(".md")
    write_text(check_report(path, overwrite=True), document)
    write_text(beside, table)
    return path, beside


def check_report(path: Path, overwrite: bool) -> Path:
    """Check, before anything is computed, that a result can be written."""
    if path.suffix.lower() != ".json":
        raise ValueError(f"{path} does not end in .json, but results are JSON. Choose a name that ends in .json")
    return check_output(path, overwrite)


def library_versions(*more: str) -> dict[str, str]:
    """Versions of Python, of the libraries that compute, and of those of `more` that are installed."""
    from hf_synlm import __version__

    versions = {"python": platform.python_version(), "hf_synlm": __version__}
    for name in (*_LIBRARIES, *more):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def describe_hardware(device: Any = "cpu") -> dict[str, Any]:
    """`device`, `device_name` and `num_threads`; 1 where torch is not loaded, as for trees in files."""
    if "torch" not in sys.modules:
        return {"device": str(device), "device_name": _processor_name(), "num_threads": 1}
    import torch

    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _processor_name()
    return {"device": str(device), "device_name": name, "num_threads": torch.get_num_threads()}


def _processor_name() -> str:
    """Name from /proc/cpuinfo if there is one, else from `platform`."""
    information = Path("/proc/cpuinfo")
    if information.is_file():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def describe_files(paths: Iterable[PathLike]) -> list[dict[str, Any]]:
    """`path`, `bytes` and `sha256` of each file, to identify the data."""
    described = []
    for path in paths:
        if isinstance(path, ReadOnce):
            described.append(path.facts())
            continue
        refuse_pipe(path)
        with open_bytes(path) as file:  # piece by piece, for weights may be larger than memory
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            described.append({"path": str(path), "bytes": file.seek(0, io.SEEK_END), "sha256": digest})
    return described


def refuse_pipe(path: PathLike) -> None:
    """Raise ValueError if a file that is read twice is a pipe (standard input, "-", is kept in memory)."""
    if str(path) != "-" and Path(path).is_fifo():
        raise ValueError(
            f"{path} is a pipe, but the command reads it twice. Save the data to a file first. (Text can also be "
            "piped in with -.)"
        )


def load_result(path: PathLike) -> EvaluationResult:
    """Read what `EvaluationResult.save` wrote; scores that were not finite are NaN."""
    path = Path(path)
    fields = read_json(path, "Name a JSON file that `synlm evaluate` wrote by --out.")
    if fields.pop("format", None) != FORMAT:
        raise ValueError(f"{path} is not a result of hf_synlm, because its format is not {FORMAT!r}")
    if fields.pop("format_version", None) != FORMAT_VERSION:
        raise ValueError(f"{path} is a result of another version of hf_synlm. Evaluate again, or use that version")
    fields.setdefault("command", None)  # later than the format
    known = {field.name for field in dataclasses.fields(EvaluationResult)} - {"items"}
    if set(fields) != known:
        raise ValueError(f"{path} has missing or unknown fields: {', '.join(sorted(set(fields) ^ known))}")
    fields["scores"] = {key: math.nan if value is None else value for key, value in fields["scores"].items()}
    return EvaluationResult(**fields)


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as a Markdown table, without columns that have no value.

    The numbers of a column have the same digits after the point, as many as they need, but not more than four.
    """
    if not rows:
        return ""
    columns = table_columns(rows)
    lines = ["| " + " | ".join("---:" if is_number else "---" for is_number, _ in columns.values()) + " |"]
    for row in zip(*(cells for _, cells in columns.values()), strict=True):
        escaped = (cell.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(escaped) + " |")
    return "\n".join(["| " + " | ".join(columns) + " |", *lines])


def table_columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, tuple[bool, list[str]]]:
    """By name, whether a column of `markdown_table` holds numbers, and its cells."""
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    digits = {name: max(_digits(row[name]) for row in rows) for name in names}
    return {
        name: (
            all(isinstance(row[name], (int, float, NoneType)) for row in rows),
            [_cell(row[name], digits[name]) for row in rows],
        )
        for name in names
    }


def _digits(value: Any) -> int:
    """Digits after the point that a number needs, at most four."""
    if not isinstance(value, float) or not math.isfinite(value):
        return 0
    return max(1, len(f"{value:.4f}".rstrip("0").partition(".")[2]))


def _cell(value: Any, digits: int) -> str:
    if value is None:
        return ""
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)


def json_text(fields: Mapping[str, Any], indent: int | None = 2) -> str:
    """Plain data as a JSON document; numbers that are not finite become null."""
    return json.dumps(_finite(fields), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    """A copy in which numbers that are not finite are None."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# -------------------------------------------------------------------------------------------- rows of model cards
def check_results_of(
    results: Mapping[Path, EvaluationResult], model: str, architecture: str, num_parameters: int, dtype: str
) -> None:
    """Raise ValueError if a result, given by its file, was measured on other weights than a card is written for.

    A result of a model on the Hub names no checksum, which gives a warning.
    """
    weights = {file["sha256"] for file in describe_files(sorted(Path(model).glob("*.safetensors")))}
    for path, result in results.items():
        measured = result.model
        size = measured.get("architecture"), measured.get("num_parameters")
        checksums = {file["sha256"] for file in measured.get("weights", ())}
        if size != (architecture, num_parameters) or (weights and checksums and weights != checksums):
            of = "{} with {:,} parameters".format(*size) if all(size) else "no model"
            raise ValueError(
                f"{path} was measured on {measured.get('name')!r} ({of}), not on {model!r} ({architecture} with "
                f"{num_parameters:,} parameters). The checksums (SHA-256) of the weights differ. Evaluate this model."
            )
        if (measured.get("dtype") or dtype) != dtype:
            raise ValueError(
                f"{path} was measured in {measured['dtype']}, and the copy has {dtype} weights. Evaluate with --dtype "
                f"{dtype}, or export with --dtype {measured['dtype']}."
            )
        if weights and not checksums:
            logger.warning(f"{path} has no checksum of weights. It may be a result of other weights than {model!r}")


def card_rows(
    result: EvaluationResult, *, dataset: str | None = None, split: str = "all", command: str | None = None
) -> list[dict[str, Any]]:
    """The row for `fill_card` that states the score in `CARD_SCORES`; F1 is called `labeled_f1` or `unlabeled_f1`.

    By default `dataset` is the names of the files, and `command` what made the result.
    """
    if result.task not in CARD_SCORES:
        raise ValueError(f"a card cannot show results of {result.task!r}. Give results of {', '.join(CARD_SCORES)}")
    # F1 of trees that need no model, where the result has them.
    scored: Sequence[Row] = result.tables.get("unlabeled F1 (%)", ())
    baselines = {r["trees"]: r["F1 by the convention"] for r in scored if r["trees"] != result.model.get("name")}
    hardware = [result.hardware.get(name) for name in ("device_name", "device", "num_threads")]
    score = CARD_SCORES[result.task]
    value = result.scores.get(score)
    if value is None or not math.isfinite(value):
        raise ValueError(f"the result of {result.task} has no number {score!r} (it has {', '.join(result.scores)})")
    row = {
        "task": result.task,
        "dataset": dataset or ", ".join(Path(file["path"]).name for file in result.data.get("files", ())) or "text",
        "split": split,
        "metric": score if score != "f1" else "labeled_f1" if _is_labeled(result) else "unlabeled_f1",
        "value": round(float(value), 4),
        **estimate_of(result.task, result.options),
        "convention": _convention(result),
        "seed": result.options.get("seed"),
        "hardware": "{} ({}, {} thread(s))".format(*hardware),
        "baselines": baselines,
        "command": command or _public(result.command),
    }
    return [{key: item for key, item in row.items() if item or key in ("num_beams", "estimator", "seed")}]


def _is_labeled(result: EvaluationResult) -> bool:
    return "labeled brackets by EVALB (%)" in result.tables


def _public(command: str | None) -> str | None:
    """A command line without the folders of the machine that ran it."""
    if command is None:
        return None
    words = [
        [Path(part).name if part.startswith(("/", "~")) else part for part in word.split("=")]
        for word in shlex.split(command)
    ]
    return shlex.join("=".join(parts) for parts in words)


def estimate_of(task: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Beam and estimator by the options of a result; trees that are read off without a search have no beam."""
    estimator = options.get("estimator")
    if task == "parsing":
        searched = "search" if options.get("num_beams") else None
        estimator = (options.get("parse") or {}).get("method", searched)
    if estimator not in ("search", "beam_marginal", "stepwise"):
        return {"num_beams": None, "estimator": estimator}
    widths = [f"{words} {options[name]}" for name, words in _OTHER_WIDTHS.items() if name in options]
    return {"num_beams": options.get("num_beams"), "estimator": ", ".join([estimator.replace("_", " "), *widths])}


def _convention(result: EvaluationResult) -> str:
    """What is counted, in words; begins with a name and a colon."""
    options, scores = result.options, result.scores
    if result.task == "parsing":
        punctuation = options["punctuation"]
        treated = f"punctuation {punctuation}" if punctuation.startswith("left out") else punctuation
        return f"{_named(options['convention'], _is_labeled(result))}; {treated}"
    if result.task != "perplexity":
        return ""
    treated = f"; {options['punctuation']}" if options.get("punctuation") else ""
    return (
        f"words: {scores['words']:.0f} words of {scores['sentences']:.0f} sentences, without the ends of sentences; "
        f"{scores['unknown_words']:.0f} unknown words, each predicted as its class{treated}"
    )


def _named(convention: str, is_labeled: bool) -> str:
    """EVALB's is written "evalb, FILE"."""
    name, comma, rest = convention.partition(", ")
    kind = "labeled" if is_labeled else "unlabeled"
    return convention if ":" in convention or not comma else f"{name}: {kind} brackets as in {rest}"
