"""`synlm evaluate blimp`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.blimp import evaluate_blimp, find_blimp


def command(
    paradigms: Annotated[Path, typer.Argument(help="Folder of BLiMP's 67 .jsonl files, or one of them.")],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    paradigm: Annotated[list[str] | None, typer.Option(help="Take this paradigm only; repeat for several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many pairs of each paradigm.")] = None,
    end_of_sentence: Annotated[
        bool, typer.Option("--end-of-sentence", help="Count the end of the sentences in their probability.")
    ] = False,
) -> None:
    """Accuracy on BLiMP's minimal pairs: per paradigm, per phenomenon, and mean over the paradigms.

    The data are not part of this package: get them from alexwarstadt/blimp (CC BY 4.0).

    Example: synlm evaluate blimp blimp/data --model runs/gpst_tiny/model --limit 100 --out blimp.json
    """
    paths = find_blimp(paradigms, paradigm or [])
    scorer = scoring.scorer(model)
    result = evaluate_blimp(scorer, paths, limit=limit, end=end_of_sentence, options={"seed": scoring.seed})
    options.report(result, out)
