"""`synlm evaluate blimp`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.blimp import evaluate_blimp, find_blimp


def command(
    folder: Annotated[Path, typer.Argument(help="Folder of BLiMP's 67 .jsonl files.")],
    model: options.Model,
    out: options.Output = None,
    paradigm: Annotated[list[str] | None, typer.Option(help="Take this paradigm only; repeat for several.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many pairs of each paradigm.")] = None,
    end_of_sentence: Annotated[
        bool, typer.Option("--end-of-sentence", help="Count the end of the sentences in their probability.")
    ] = False,
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
    """Accuracy on BLiMP's minimal pairs: per paradigm, per phenomenon, and mean over the paradigms.

    The data are not part of this package: get them from alexwarstadt/blimp (CC BY 4.0).

    Example: synlm evaluate blimp blimp/data --model runs/gpst_tiny/model --limit 100 --out blimp.json
    """
    paths = find_blimp(folder, paradigm or [])
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
    result = evaluate_blimp(scorer, paths, limit=limit, end=end_of_sentence, options={"seed": seed})
    options.report(result, out)
