"""The commands of `synlm` and their exit codes.

0: done. 1: a check failed (`verify`, `push`); also a mistake in the program, with a traceback. 2: an option or an input
is wrong, or the Hub refuses; one line says which and what to do.
"""

import inspect
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
import typer
from typer.core import TyperGroup

from hf_synlm import __version__
from hf_synlm.cli import (
    convert,
    draw,
    evaluate_blimp,
    evaluate_pairs,
    evaluate_parsing,
    evaluate_perplexity,
    evaluate_plot,
    evaluate_summary,
    evaluate_syntaxgym,
    export,
    generate,
    info,
    options,
    parse,
    push,
    surprisal,
    verify,
)
from hf_synlm.training.command import app as training


class _Commands(TyperGroup):
    """Reports wrong input as one line and exit code 2; mistakes in the program keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        # transformers raises OSError for models that it does not find, and ImportError for packages of optional parts.
        except (ValueError, OSError, ImportError) as error:
            # Messages of the Hub are spread over paragraphs; those of this library break lines where they mean it.
            message = " ".join(str(error).split()) if isinstance(error, OSError) else str(error)
            typer.echo(f"error: {message}", err=True)
            raise typer.Exit(2) from error
        except RuntimeError as error:
            # On a CPU, a lack of memory is a RuntimeError like any other.
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            typer.echo("error: out of memory: lower --batch-size, or the widths of the beam", err=True)
            raise typer.Exit(2) from error


EXIT_CODES = "Exit codes: 0 done; 1 a check failed; 2 an option or an input is wrong."
app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Trees, word-by-word measures, evaluation and publishing of syntactic and other causal language models.",
    epilog=f"`synlm COMMAND --help` shows options and examples.\n\n{EXIT_CODES}",
)
evaluate = typer.Typer(no_args_is_help=True, help="Score a model on a data set; results as JSON and Markdown.")


def _add(group: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Add a command; what its docstring says by way of examples goes to the end of its help."""
    text, _, examples = (inspect.getdoc(command) or "").partition("\n\nExample")
    lines = [line.strip() for line in examples.removeprefix("s").removeprefix(":").strip().splitlines()]
    epilog = "\n\n".join(f"Example: {line}" for line in lines)
    group.command(name, help=text, epilog=f"{epilog}\n\n{EXIT_CODES}")(options.with_groups(command))


_add(app, "parse", parse.command)
_add(app, "surprisal", surprisal.command)
_add(app, "generate", generate.command)
_add(app, "draw", draw.command)
app.add_typer(evaluate, name="evaluate")
_add(app, "convert", convert.command)
_add(app, "info", info.command)
_add(app, "export", export.command)
_add(app, "verify", verify.command)
_add(app, "push", push.command)
_add(evaluate, "parsing", evaluate_parsing.command)
_add(evaluate, "perplexity", evaluate_perplexity.command)
_add(evaluate, "syntaxgym", evaluate_syntaxgym.command)
_add(evaluate, "blimp", evaluate_blimp.command)
_add(evaluate, "pairs", evaluate_pairs.command)
_add(evaluate, "summary", evaluate_summary.command)
_add(evaluate, "plot", evaluate_plot.command)
app.add_typer(training, name="train")


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
    """Run one command.

    Args:
        arguments: command line; default `sys.argv`.

    Returns:
        Exit code.
    """
    typed = list(sys.argv[1:] if arguments is None else arguments)
    options.command_line.set(shlex.join(["synlm", *typed]))
    try:
        app(args=typed, prog_name="synlm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
