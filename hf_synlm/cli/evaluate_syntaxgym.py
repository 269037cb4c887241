"""`synlm evaluate syntaxgym`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.syntaxgym import evaluate_syntaxgym, find_suites


def command(
    suites: Annotated[Path, typer.Argument(help="Folder of suites in SyntaxGym's JSON format, or one suite.")],
    model: options.Model,
    out: options.Output = None,
    suite: Annotated[list[str] | None, typer.Option(help="Take this suite only; repeat for several.")] = None,
    begin_token: options.BeginToken = None,
    estimator: options.EstimatorOption = None,
    num_beams: options.NumBeams = None,
    action_beam_size: options.ActionBeamSize = None,
    fast_track_size: options.FastTrackSize = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    gguf_file: options.GGUFFile = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    batch_size: options.BatchSize = 16,
    seed: options.Seed = 0,
) -> None:
    """Accuracy on SyntaxGym's test suites: per suite, per circuit, and the means that papers report.

    mean_31_suites averages the suites of Hu et al. 2020, mean_6_circuits their circuits (what most papers call SG
    score). Suites are not part of this package: get them from cpllab/syntactic-generalization.

    Example: synlm evaluate syntaxgym test_suites/json --model runs/gpst_tiny/model --num-beams 300 --out sg.json
    """
    paths = find_suites(suites, suite or [])
    scorer = options.load_scorer(
        model,
        num_beams=num_beams,
        action_beam_size=action_beam_size,
        fast_track_size=fast_track_size,
        begin_token=begin_token,
        estimator=estimator,
        revision=revision,
        trust_remote_code=trust_remote_code,
        gguf_file=gguf_file,
        device=device,
        dtype=dtype,
        batch_size=batch_size,
        seed=seed,
    )
    options.report(evaluate_syntaxgym(scorer, paths, options={"seed": seed}), out)
