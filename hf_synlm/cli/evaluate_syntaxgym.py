"""`synlm evaluate syntaxgym`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.syntaxgym import evaluate_syntaxgym, find_suites


def command(
    suites: Annotated[Path, typer.Argument(help="Folder of suites in SyntaxGym's JSON format, or one suite.")],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    suite: Annotated[list[str] | None, typer.Option(help="Take this suite only; repeat for several.")] = None,
) -> None:
    """Accuracy on SyntaxGym's test suites: per suite, per circuit, and the means that papers report.

    mean_31_suites averages the suites of Hu et al. 2020, mean_6_circuits their circuits (what most papers call SG
    score). Suites are not part of this package: get them from cpllab/syntactic-generalization.

    Example: synlm evaluate syntaxgym test_suites/json --model runs/gpst_tiny/model --num-beams 300 --out sg.json
    """
    paths = find_suites(suites, suite or [])
    if out is not None and out.resolve().parent == suites.resolve():
        raise ValueError(
            f"--out {out}: the folder is that of the suites, where it would be read as one. Choose another"
        )
    scorer = scoring.scorer(model)
    options.report(evaluate_syntaxgym(scorer, paths, options={"seed": scoring.seed}), out)
