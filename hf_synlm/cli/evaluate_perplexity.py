"""`synlm evaluate perplexity`."""

from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.perplexity import evaluate_perplexity
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text_items import read_items, read_treebank_items


def command(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    context: options.ContextOption = "sentence",
    file_format: Annotated[
        Literal["txt", "tsv", "csv", "jsonl", "treebank"] | None,
        typer.Option("--format", help="Of the input; default: by its name. treebank: the words of bracketed trees."),
    ] = None,
    punctuation: Annotated[
        Literal["remove", "keep"] | None,
        typer.Option(help="Of a treebank: keep it (default), or remove it by its tags before scoring."),
    ] = None,
    text_column: options.TextColumn = None,
) -> None:
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names estimator, beam and what the end of a sentence counts: an end token, or for GPST and RNNG the
    closing of the trees. Compare models with different tokenizers by word_perplexity.

    Example: synlm evaluate perplexity valid.txt --model runs/gpst_tiny/model --estimator stepwise --out ppl.json
    """
    settings: dict[str, object] = {"seed": scoring.seed}
    if file_format == "treebank":
        if text_column is not None:
            raise ValueError("--text-column: a treebank has no columns, leave it out")
        items, settings["punctuation"] = read_treebank_items(texts, punctuation or "keep")
    elif punctuation is not None:
        raise ValueError("--punctuation belongs to --format treebank, where tags tell it; pass text without it instead")
    else:
        items = read_items(texts, kind=file_format, text_column=text_column)
    result = evaluate_perplexity(
        scoring.scorer(model),
        items,
        context=context,
        data={"files": describe_files([texts])},
        options=settings,
    )
    options.report(result, out)
