"""`synlm evaluate pairs`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.blimp import evaluate_pairs, first_pairs, read_pairs
from hf_synlm.evaluation.results import describe_files


def command(
    pairs: Annotated[Path, typer.Argument(help="Table of minimal pairs: .tsv, .csv or .jsonl.")],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    good_column: Annotated[str, typer.Option(help="Column of the better sentences.")] = "sentence_good",
    bad_column: Annotated[str, typer.Option(help="Column of the other sentences.")] = "sentence_bad",
    group_column: Annotated[str | None, typer.Option(help="Column of what the pairs test, for one score each.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many pairs of each group.")] = None,
    end_of_sentence: Annotated[
        bool, typer.Option("--end-of-sentence", help="Count the end of the sentences in their probability.")
    ] = False,
) -> None:
    """Share of minimal pairs of which a model finds the better sentence more probable.

    For example the templates of Marvin and Linzen 2018, or your own stimuli.

    Example: synlm evaluate pairs agreement.tsv --model runs/rnng_tiny/model --group-column construction
    """
    read = read_pairs(pairs, good_column=good_column, bad_column=bad_column, group_column=group_column)
    scorer = scoring.scorer(model)
    data = {"files": describe_files([pairs])}
    settings = {"pairs_per_group": limit or "all", "seed": scoring.seed}
    result = evaluate_pairs(scorer, first_pairs(read, limit), end=end_of_sentence, data=data, options=settings)
    options.report(result, out)
