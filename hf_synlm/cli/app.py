"""The commands of `synlm` and their exit codes.

0: done. 2: an option or an input is wrong; one line says which and what to do. 1: anything else, with a traceback.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_synlm import __version__
from hf_synlm.cli import (
    draw,
    evaluate_blimp,
    evaluate_pairs,
    evaluate_parsing,
    evaluate_perplexity,
    evaluate_plot,
    evaluate_summary,
    evaluate_syntaxgym,
    parse,
    surprisal,
)


class _Commands(TyperGroup):
    """Reports wrong input as one line and exit code 2; mistakes in the program keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        # transformers raises OSError for models that it does not find, and ImportError for packages of optional parts.
        except (ValueError, OSError, ImportError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Trees, word-by-word measures and evaluation of syntactic and other causal language models.",
)
evaluate = typer.Typer(no_args_is_help=True, help="Score a model on a data set; results as JSON and Markdown.")
app.add_typer(evaluate, name="evaluate")
app.command("surprisal")(surprisal.command)
app.command("parse")(parse.command)
app.command("draw")(draw.command)
evaluate.command("parsing")(evaluate_parsing.command)
evaluate.command("perplexity")(evaluate_perplexity.command)
evaluate.command("syntaxgym")(evaluate_syntaxgym.command)
evaluate.command("blimp")(evaluate_blimp.command)
evaluate.command("pairs")(evaluate_pairs.command)
evaluate.command("summary")(evaluate_summary.command)
evaluate.command("plot")(evaluate_plot.command)


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
    try:
        app(args=None if arguments is None else list(arguments), prog_name="synlm")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    return 0
