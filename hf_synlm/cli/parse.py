"""`synlm parse`: text in, trees out."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import drawing, options
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.text import read_lines
from hf_synlm.evaluation.treebank_parsing import parse_sentences


def command(
    texts: Annotated[Path, typer.Argument(help="Text, one sentence per line; - reads standard input.")],
    model: options.Model,
    parsing: options.Parsing,
    style: drawing.FormatOption = "brackets",
    out: drawing.Out = None,
    num_trees: Annotated[
        int,
        typer.Option(
            min=1,
            help="Trees per sentence (json, html), if the model has a beam; trees that are equal over words are one.",
        ),
    ] = 1,
) -> None:
    """Parse sentences: trees as brackets, JSON, drawings, LaTeX, SVG or a page of HTML.

    Words are what stands between white space; their pieces stay together. A blank line stays a blank line, and so does
    a sentence for which the search finds no tree. Surprisals, in the pictures, are of prefixes, trees summed out.

    Example: synlm parse in.txt --model runs/gpst_tiny/model --num-beams 20 --num-trees 5 --format html --out trees.html
    """
    name = str(texts)
    sentences = [line.split() for line in read_lines(texts)]
    if not any(sentences):
        raise ValueError(f"{name} holds no sentence: give one per line")
    drawing.check_output(style, out, sum(map(bool, sentences)))
    chosen = parsing.chosen(num_return_sequences=None if num_trees == 1 else num_trees)
    scorer = parsing.scorer(model)
    width = parsing.num_beams or getattr(scorer.model.config, "scoring_num_beams", None)
    if width is None and num_trees > 1 and hasattr(scorer.model, "parse"):
        raise ValueError(f"--num-trees {num_trees}: {type(scorer.model).__name__} gives one tree. Leave it out.")
    if width is not None and num_trees > width:
        raise ValueError(f"--num-trees {num_trees}: the beam holds {width}. Give --num-beams of at least as many.")
    numbers = [number for number, words in enumerate(sentences) if words]
    found = parse_sentences(
        scorer.model,
        scorer.tokenizer,
        [sentences[number] for number in numbers],
        batch_size=parsing.batch_size,
        progress=f"parse: {scorer.name}" if out is not None else None,
        **chosen,
    )
    parsed = [ParsedSentence(())] * len(sentences)
    for number, sentence in zip(numbers, found, strict=True):
        parsed[number] = sentence
    missing = sum(not sentence.hypotheses for sentence in found)
    if missing:
        typer.echo(f"no complete tree for {missing} of {len(found)} sentences; a wider beam may find more", err=True)
    drawing.write_sentences(parsed, style, out, title=f"{name}, parsed by {scorer.name}")
