"""`synlm evaluate pairs`."""

from pathlib import Path
from typing import Annotated

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.blimp import evaluate_pairs, read_pairs
from hf_synlm.evaluation.results import describe_files


def command(
    pairs: Annotated[Path, typer.Argument(help="Table of minimal pairs: .tsv, .csv or .jsonl.")],
    model: options.Model,
    out: options.Output = None,
    good_column: Annotated[str, typer.Option(help="Column of the better sentences.")] = "sentence_good",
    bad_column: Annotated[str, typer.Option(help="Column of the other sentences.")] = "sentence_bad",
    group_column: Annotated[str | None, typer.Option(help="Column of what the pairs test, for one score each.")] = None,
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
    """Share of minimal pairs of which a model finds the better sentence more probable.

    For example the templates of Marvin and Linzen 2018, or your own stimuli.

    Example: synlm evaluate pairs agreement.tsv --model runs/rnng_tiny/model --group-column construction
    """
    read = read_pairs(pairs, good_column=good_column, bad_column=bad_column, group_column=group_column)
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
    data = {"files": describe_files([pairs])}
    result = evaluate_pairs(scorer, read, end=end_of_sentence, data=data, options={"seed": seed})
    options.report(result, out)
