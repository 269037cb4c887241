"""`synlm evaluate perplexity`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.perplexity import evaluate_perplexity_file


def command(
    texts: Annotated[Path, typer.Argument(help="Text (one sentence per line), or a .tsv, .csv or .jsonl table.")],
    model: options.Model,
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
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names estimator, beam and what the end of a sentence counts: an end token, or for GPST and RNNG the
    closing of the trees. Compare models with different tokenizers by word_perplexity.

    Example: synlm evaluate perplexity valid.txt --model runs/gpst_tiny/model --estimator stepwise --out ppl.json
    """
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
    result = evaluate_perplexity_file(
        scorer, texts, context=context, options={"seed": seed}, kind=file_format, text_column=text_column
    )
    options.report(result, out)
