"""`synlm evaluate perplexity`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.perplexity import evaluate_perplexity
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text_items import read_items


def command(
    texts: Annotated[
        Path,
        typer.Argument(help="Text (one sentence per line), or a .tsv, .csv or .jsonl table; - reads standard input."),
    ],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    context: Annotated[
        Literal["sentence", "document"],
        typer.Option(help="Read every sentence alone, or after the sentences of its document before it."),
    ] = "sentence",
    file_format: Annotated[
        Literal["txt", "tsv", "csv", "jsonl"] | None,
        typer.Option("--format", help="Of the input; default: by its name."),
    ] = None,
    text_column: Annotated[str, typer.Option(help="Column of the texts in a table.")] = "sentence",
) -> None:
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names estimator, beam and what the end of a sentence counts: an end token, or for GPST and RNNG the
    closing of the trees. Compare models with different tokenizers by word_perplexity.

    Example: synlm evaluate perplexity valid.txt --model runs/gpst_tiny/model --estimator stepwise --out ppl.json
    """
    items = read_items(texts, kind=file_format, text_column=text_column)
    result = evaluate_perplexity(
        scoring.scorer(model),
        items,
        context=context,
        data={"files": describe_files([texts])},
        options={"seed": scoring.seed},
    )
    options.report(result, out)
