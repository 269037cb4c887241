"""`synlm surprisal`: one row per word."""

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import check_output as check_writable
from hf_synlm.data.files import write_text
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.surprisal import (
    LMZOO_COLUMNS,
    WordScores,
    can_correct_words,
    columns,
    score_words,
    token_table,
    word_table,
    write_table,
)
from hf_synlm.evaluation.text_items import TextItem, read_items


def command(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            help="TSV file to write; what it holds is told in OUT.meta.json.",
            callback=options.output_check(lambda path: _check_output(path)),
        ),
        options.Beside(lambda path: _meta(path)),
    ],
    unit: Annotated[
        Literal["bits", "nats"], typer.Option(help="Of surprisal; it is part of the column's name.")
    ] = "bits",
    context: options.ContextOption = "sentence",
    word_correction: Annotated[
        bool,
        typer.Option(
            "--word-correction",
            help="Probability of words instead of that of their tokens: the space after a word, which tells that it is "
            "over, belongs to it and not to the next word. Where tokens do not mark the beginning of words it does not "
            "apply, and OUT.meta.json says so.",
        ),
    ] = False,
    lmzoo: Annotated[
        bool, typer.Option("--lmzoo", help="Write the columns of lm-zoo instead, one row per token, in bits.")
    ] = False,
    first_word: Annotated[
        bool, typer.Option(help="Score the first word, from a begin token; otherwise it has no value.")
    ] = True,
    file_format: options.FileFormat = None,
    text_column: options.TextColumn = None,
    item_column: Annotated[
        str | None,
        typer.Option(help="Column of the items' ids in a table; default: item, or the number of the row."),
    ] = None,
) -> None:
    """Surprisal of every word of a text, one row per word of yours.

    Words are what stands between white space, punctuation included where it is attached. Columns: item, sentence_id,
    word_id, word, n_tokens, oov, surprisal_bits, its lexical and structural part (GPST, RNNG), cum_logprob_nats,
    beam_entropy_bits, n_actions, stack_depth, char_start, char_end. Empty fields are measures that the model does not
    have.

    Example: synlm surprisal stories.txt --model runs/rnng_tiny/model --out surprisals.tsv --num-beams 100
    """
    if lmzoo and unit != "bits":
        raise ValueError(f"--unit {unit}: the columns of lm-zoo are in bits; leave out --unit or --lmzoo")
    items = read_items(texts, kind=file_format, text_column=text_column, item_column=item_column)
    if not lmzoo:
        _warn_of_duplicates(items)
    scorer = scoring.scorer(model, begin=first_word, details=not lmzoo)
    if word_correction and not can_correct_words(scorer):
        word_correction = False
        typer.echo("--word-correction does not apply: tokens of this model tell where a word ends", err=True)
    bar = f"surprisal: {scorer.name}"
    start = time.perf_counter()
    scores = score_words(scorer, items, context=context, word_correction=word_correction, progress=bar)
    seconds = time.perf_counter() - start
    rows = token_table(scores) if lmzoo else word_table(items, scores, unit)
    names = LMZOO_COLUMNS if lmzoo else columns(unit)
    settings = {
        "unit": unit, "context": context, "word_correction": word_correction, "first_word": first_word,
        "seed": scoring.seed,
    }  # fmt: skip
    data = {"files": describe_files([texts]), "columns": list(names)}
    result = EvaluationResult.of(scorer, "surprisal", _counts(scores), settings, data=data, seconds=seconds)
    result.command = options.command_line.get()
    write_table(out, names, rows)
    write_text(_meta(out), result.to_json())
    _warn(result.scores)
    typer.echo(f"wrote {len(rows)} rows to {out}, and {_meta(out)}", err=True)


def _warn_of_duplicates(items: Sequence[TextItem]) -> None:
    """Say how to join tables of items that have several texts, such as several conditions."""
    repeated = sum(count > 1 for count in Counter(item.item for item in items).values())
    if repeated:
        typer.echo(
            f"items with several texts: {repeated}. Join other tables by sentence_id, which counts the rows of the "
            "input, and word_id, not by item",
            err=True,
        )


def _meta(out: Path) -> Path:
    return Path(f"{out}.meta.json")


def _check_output(out: Path) -> None:
    """Raise ValueError where one of the two files cannot be written, or is named as what it is not."""
    if out.suffix.lower() in (".csv", ".json", ".jsonl", ".xlsx", ".parquet"):
        raise ValueError(f"--out {out}: the table is tab-separated. Choose a name in .tsv")
    check_writable(out)
    check_writable(_meta(out))


def _counts(scores: Sequence[WordScores]) -> dict[str, float]:
    """What was scored."""
    return {
        "texts": len(scores),
        "words": sum(len(found.words) for found in scores),
        "tokens": sum(len(found.tokens) for found in scores),
        "unknown_words": sum(sum(found.unknown) for found in scores),
    }


def _warn(counts: Mapping[str, float]) -> None:
    """Say how many words the model does not know."""
    if counts["unknown_words"]:
        typer.echo(
            f"{counts['unknown_words']} of {counts['words']} words are outside the vocabulary (oov 1): its case "
            "and the white space around its punctuation are those of its training text",
            err=True,
        )
