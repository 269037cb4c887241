"""Parsed sentences in every format that commands write."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import check_output as check_writable
from hf_synlm.data.files import write_text
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.viz import SentenceView, sentences_to_page

Format: TypeAlias = Literal["brackets", "json", "text", "upright", "latex", "svg", "html"]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="brackets and json: one line per sentence (json: all trees, log-probabilities); text, upright: drawings; "
        "latex: for the package forest; svg: a file per sentence; html: one page with all trees and surprisals.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        help="File to write (svg of several sentences: folder); default: print.",
        # What can be written depends on the sentences, see `check_output`.
        callback=options.output_check(),
    ),
]


def check_output(style: Format, out: Path | None, num_sentences: int) -> None:
    """Check, before anything is computed, that what is asked for can be written.

    Args:
        style: the format.
        out: where to; None prints.
        num_sentences: how many sentences have words.

    Raises:
        ValueError: several SVG pictures without a folder, or a place where nothing can be written.
    """
    if style == "svg" and num_sentences != 1 and (out is None or out.suffix == ".svg"):
        raise ValueError(
            f"{num_sentences} sentences make as many SVG pictures: name a folder by --out, or use --format html"
        )
    if out is not None:
        check_writable(out / "1.svg" if style == "svg" and out.suffix != ".svg" else out)


def write_sentences(sentences: Sequence[ParsedSentence], style: Format, out: Path | None, title: str) -> None:
    """Write or print sentences.

    Args:
        sentences: in order; those without words are blank lines, or left out of drawings.
        style: the format.
        out: where to; None prints.
        title: of an HTML page.

    Raises:
        ValueError: see `check_output`.
    """
    check_output(style, out, sum(bool(sentence.words) for sentence in sentences))
    if style == "svg":
        _write_pictures(sentences, out)
        return
    if style == "html":
        text = sentences_to_page(sentences, title=title)
    else:
        parts = [_one(sentence, style) for sentence in sentences if sentence.words or style in ("brackets", "json")]
        text = ("\n" if style in ("brackets", "json") else "\n\n").join(parts) + "\n"
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        typer.echo(f"wrote {out}", err=True)


def _one(sentence: ParsedSentence, style: Format) -> str:
    if style == "json":
        return json.dumps(sentence.to_dict(), ensure_ascii=False)
    if not sentence.hypotheses:
        return ""
    if style == "brackets":
        return sentence.brackets()
    view = SentenceView(sentence)
    return view.latex() if style == "latex" else view.text(style="upright" if style == "upright" else "sideways")


def _write_pictures(sentences: Sequence[ParsedSentence], out: Path | None) -> None:
    drawn = {number: SentenceView(s).svg() + "\n" for number, s in enumerate(sentences, start=1) if s.hypotheses}
    if out is None:
        typer.echo("".join(drawn.values()), nl=False)
        return
    digits = len(str(len(sentences)))
    for number, picture in drawn.items():
        write_text(out if out.suffix == ".svg" else out / f"{number:0{digits}d}.svg", picture)
    typer.echo(f"wrote {len(drawn)} picture(s) to {out}", err=True)
