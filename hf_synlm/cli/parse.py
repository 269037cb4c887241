"""`synlm parse`: text in, trees out."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import drawing, options
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.evaluation.treebank_parsing import parse_sentences


def command(
    texts: Annotated[Path, typer.Argument(help="Text, one sentence per line; - reads standard input.")],
    model: options.Model,
    style: drawing.FormatOption = "brackets",
    out: drawing.Out = None,
    num_trees: Annotated[
        int,
        typer.Option(
            min=1,
            help="Trees per sentence (json, html), if the model has a beam; trees that are equal over words are one.",
        ),
    ] = 1,
    method: options.ParseMethod = None,
    parse_option: options.ParseOptions = None,
    num_beams: options.NumBeams = None,
    action_beam_size: options.ActionBeamSize = None,
    fast_track_size: options.FastTrackSize = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = None,
    dtype: options.DType = "auto",
    batch_size: options.BatchSize = 16,
    seed: options.Seed = 0,
) -> None:
    """Parse sentences: trees as brackets, JSON, drawings, LaTeX, SVG or a page of HTML.

    Words are what stands between white space; their pieces stay together. A blank line stays a blank line, and so does
    a sentence for which the search finds no tree. Surprisals, in the pictures, are of prefixes, trees summed out.

    Example: synlm parse in.txt --model runs/gpst_tiny/model --num-beams 20 --num-trees 5 --format html --out trees.html
    """
    name = str(texts)
    sentences = [line.split() for line in options.lines_of(texts)]
    if not any(sentences):
        raise ValueError(f"{name} holds no sentence: give one per line")
    drawing.check_output(style, out, sum(map(bool, sentences)))
    beams = {"num_beams": num_beams, "action_beam_size": action_beam_size, "fast_track_size": fast_track_size}
    several = None if num_trees == 1 else num_trees
    chosen = options.parse_options(parse_option, method=method, num_return_sequences=several, **beams)
    scorer = options.load_scorer(
        model, revision=revision, trust_remote_code=trust_remote_code, device=device, dtype=dtype, seed=seed, **beams
    )
    numbers = [number for number, words in enumerate(sentences) if words]
    found = parse_sentences(
        scorer.model,
        scorer.tokenizer,
        [sentences[number] for number in numbers],
        batch_size=batch_size,
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
