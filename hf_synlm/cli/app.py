# SPDX-License-Identifier: Apache-2.0
"""The commands of `synlm` and their exit codes.

0: done. 1: a check failed (`verify`, `push`), or the program has a bug, with a traceback. 2: an option or an input is
wrong, or the Hub refuses; one line says which and what to do.
"""

import inspect
import logging
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Sequence
from contextvars import copy_context
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from hf_synlm import __version__
from hf_synlm.cli import (
    evaluate,
    evaluate_trees,
    grammar,
    hub,
    options,
    outputs,
    reading,
    surprisal,
    train,
    treebanks,
    trees,
)
from hf_synlm.data.files import release_outputs

for _library in ("torchao", "torch.utils._pytree"):  # they warn of parts that nobody asked for
    logging.getLogger(_library).setLevel(logging.ERROR)


class _Commands(TyperGroup):
    """Reports wrong input as one line and exit code 2; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        # transformers raises OSError for models that it does not find, and ImportError for packages of optional parts.
        except (ValueError, OSError, ImportError) as error:
            if isinstance(error, BrokenPipeError):
                raise  # whoever reads the output has seen enough: typer ends silently
            # Messages of the Hub have several paragraphs; messages of this library break lines on purpose.
            message = " ".join(str(error).split()) if isinstance(error, OSError) else str(error)
            if isinstance(error, OSError) and error.filename and error.strerror:
                message = f"{error.filename}: {error.strerror}"
            typer.echo(f"Error: {message}", err=True)  # as of wrong options
            raise typer.Exit(2) from error
        except RuntimeError as error:
            if not any(words in str(error) for words in ("out of memory", "allocate memory")):
                raise
            typer.echo("Error: out of memory: lower the batch size or the widths of the beam", err=True)
            raise typer.Exit(2) from error


class _Command(TyperCommand):
    """Shows options under their headings, and refuses an option that is given twice."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, count in Counter(given).items():
            if count > 1 and not option.multiple and option.nargs == 1:
                raise typer.BadParameter(f"{option.opts[0]} is given {count} times: it takes one value", ctx)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            usual = "Arguments" if parameter.param_type_name == "argument" else "Options"
            record = parameter.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(parameter, "rich_help_panel", None) or usual, []).append(record)
        for title, records in sections.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


EXIT_CODES = "Exit codes: 0 done; 1 a check failed; 2 an option or an input is wrong."
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich cuts long names of options where the terminal is narrow
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Parse, score, evaluate and publish syntactic and other causal language models.",
    epilog=f"`synlm COMMAND -h` shows options and examples.\n\n{EXIT_CODES}",
)
evaluations = typer.Typer(no_args_is_help=True, help="Score a model on a data set. The results are JSON and Markdown.")
app.add_typer(evaluations, name="evaluate")


def _add(group: typer.Typer, *commands: Callable[..., None], reads_text: bool = False) -> None:
    """Add commands by the names of their functions; the examples of a docstring go to the end of the help."""
    for command in commands:
        text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExamples:\n")
        lines = textwrap.indent(textwrap.dedent(examples), "  ")
        epilog = f"\b\nExamples:\n{lines}\n\n{EXIT_CODES}"  # \b keeps the lines as they are
        run = options.grouped(command, reads_text)
        group.command(command.__name__.replace("_", "-"), cls=_Command, help=text, epilog=epilog)(run)


_add(app, trees.parse, surprisal.surprisal, trees.generate, trees.draw, reads_text=True)
_add(app, treebanks.silver, treebanks.treebank, reads_text=True)
_add(app, grammar.grammar)
_add(app, hub.convert, hub.info, hub.export, hub.verify, hub.push, hub.push_code)
_add(
    evaluations,
    evaluate_trees.parsing,
    evaluate_trees.compare,
    evaluate.perplexity,
    evaluate.syntaxgym,
    evaluate.blimp,
    evaluate.pairs,
    reading.reading,
    reads_text=True,
)
_add(evaluations, evaluate.summary, evaluate.plot)
app.add_typer(train.app, name="train")


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"hf_synlm {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command, by default that of `sys.argv`, and return its exit code."""
    typed = list(sys.argv[1:] if arguments is None else arguments)
    outputs.command_line.set(shlex.join(["synlm", *typed]))
    try:
        copy_context().run(app, args=typed, prog_name="synlm")  # the encoding is that of this command
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    finally:
        release_outputs()
    return 0
