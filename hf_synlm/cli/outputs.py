# SPDX-License-Identifier: Apache-2.0
"""What commands write: checks of `--out`, remarks on standard error, tables and reports."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hf_synlm.data.files import TOKENIZER_FILES, check_output, lock_output, write_text
from hf_synlm.data.text import plural
from hf_synlm.evaluation.results import EvaluationResult, check_report, json_text, refuse_pipe
from hf_synlm.evaluation.text.tables import rows_text
from hf_synlm.evaluation.text.text_items import remarks_on

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.scoring import TextScorer

# ----------------------------------------------------------------------------------------------------- checks of --out
# Files that make up a model; results may lie beside them.
_OF_MODELS = (
    *"*.safetensors *.bin *.py config.json *_config.json *.index.json special_tokens_map.json".split(),
    *"added_tokens.json vocab.* merges.txt chat_template* README.md".split(),
    *(pattern for pattern in TOKENIZER_FILES if pattern != "vocab*"),
)


def check_out(
    out: Path | None,
    overwrite: bool,
    *reads: Path | None,
    model: str | Sequence[str] | None = None,
    check: Callable[[Path, bool], object] = check_output,
    beside: Callable[[Path], Path] | None = None,
    is_folder: bool = False,
    flag: str = "--out",
    once: Sequence[Path] = (),
) -> None:
    """Check before the computation that the output can be written.

    The output must not be a file that the command reads.

    `reads` holds the input files and folders. `model` holds the folders of models or their names on the Hub. `check`
    gets the path and `--overwrite`. `beside` names a second output with checksums of the inputs. So the inputs are read
    twice and must not be pipes. `once` holds the input files that are read only once. They may be pipes. An output
    folder is replaced as a whole, so it must not hold an input.
    """
    paths = [path for path in reads if path is not None]
    if beside is not None:
        for path in paths:
            refuse_pipe(path)
    if out is None:
        return
    if str(out) == "-":
        raise ValueError(f"`{flag} -` is not supported. Give a path, or omit {flag} to print to the terminal.")
    inputs = {path.resolve() for path in (*paths, *once)}
    # A folder of suites or pairs stands for its files, wherever links lead.
    inputs |= {file.resolve() for path in inputs if path.is_dir() for file in path.glob("*.json*")}
    models = [model] if isinstance(model, str) else model or ()
    for folder in filter(Path.is_dir, map(Path, models)):
        inputs |= {folder.resolve(), *(path.resolve() for pattern in _OF_MODELS for path in folder.glob(pattern))}
    others = [beside(out)] if beside else []
    for path in (out, *others):
        target = path.resolve()
        if target in inputs or (is_folder and any(file.is_relative_to(target) for file in inputs)):
            raise ValueError(
                f"{flag} {out} would overwrite an input or a part of the model ({path}). Choose another name."
            )
    if is_first_process():
        lock_output(out)
    check(out, overwrite)
    for path in others:
        check_output(path, overwrite)


def meta_file(out: Path) -> Path:
    """Path of the file that says how an output was made."""
    return Path(f"{out}.meta.json")


def check_picture(out: Path, overwrite: bool) -> None:
    """Check that a picture by matplotlib can be written."""
    if out.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"{out} is not a picture file. Use a name that ends in .svg, .png or .pdf")
    check_output(out, overwrite)


def check_results(
    out: Path | None,
    overwrite: bool,
    *reads: Path | None,
    model: str | Sequence[str] | None = None,
    items_out: Path | None = None,
) -> None:
    """Check the outputs of an evaluation. They are a JSON file, a Markdown file and, with --items-out, a table."""
    check_out(out, overwrite, *reads, model=model, check=check_report, beside=lambda path: path.with_suffix(".md"))
    check_out(items_out, overwrite, *reads, *report_files(out), model=model, flag="--items-out")


def report_files(out: Path | None) -> list[Path]:
    """The JSON file and the Markdown file of a result."""
    return [] if out is None else [out, out.with_suffix(".md")]


# --------------------------------------------------------------------------------------------------------- results
command_line: ContextVar[str | None] = ContextVar("command_line", default=None)
"""The command that runs, as the user typed it."""

# Rows of a table that a terminal shows.
_MAX_ROWS = 8


def say(message: str) -> None:
    """Write a remark to standard error, beside the results."""
    typer.echo(message, err=True)


def say_odd_texts(texts: Iterable[str]) -> None:
    """Print a remark if texts do not look like sentences with spaces between their words."""
    for remark in remarks_on(texts):
        say(remark)


def say_tokenization(scorer: "TextScorer", given: str | None) -> None:
    """Print how words are read, if the user did not choose it."""
    if given is None and (how := scorer.tokenization(None)) != "words":
        said = f"as the configuration of the model says (text_style {scorer.text_style})"
        say(f"{scorer.name}: text is read by --tokenize {how}, {said}")


def say_plain_context(scorer: "TextScorer", context: str) -> None:
    """Print a remark if a model of single sentences reads documents."""
    if context == "document" and scorer.reads_context == "plain text":
        say(
            "--context document puts the earlier sentences as plain text before the begin token. A Tree LM does not "
            "see such text in training. Compare the scores with those of --context sentence"
        )


def hide_bars_of_weights() -> None:
    """Hide the progress bars of loading and writing weights. The bars of downloads stay."""
    from transformers.utils import logging

    logging.set_tqdm_hook(lambda bar, args, named: bar(*args, **{**named, "disable": True}))


def is_first_process() -> bool:
    """Whether this process writes the outputs. With `accelerate launch`, only one process writes."""
    return os.environ.get("RANK", "0") == "0"


def leave_output_to_first_process() -> None:
    """End this process, unless it writes the outputs."""
    if not is_first_process():
        raise typer.Exit


def report(result: EvaluationResult, out: Path | None, items_out: Path | None = None, style: str = "markdown") -> None:
    """Print the tables of a result. If `out` is given, write the result and its command to this file before."""
    leave_output_to_first_process()
    result.command, written = command_line.get(), None
    try:
        if out is not None:
            written, beside = result.save(out)
            say(f"wrote {written} and {beside}")
        if items_out is not None:
            is_json = items_out.suffix.lower() == ".jsonl"
            lines = (json_text(row, indent=None) for row in result.items)
            write_text(items_out, "".join(lines) if is_json else rows_text(result.items))
            say(f"wrote {plural(len(result.items), 'row')} to {items_out}")
    finally:
        typer.echo(result.to_markdown(_MAX_ROWS, written) if style == "markdown" else _latex_of(result), nl=False)


def _latex_of(result: EvaluationResult) -> str:
    from hf_synlm.viz.latex import table_to_latex

    return "\n".join(f"% {title}\n{table_to_latex(rows)}" for title, rows in result.tables.items() if rows)
