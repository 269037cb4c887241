"""`synlm evaluate parsing`."""

import dataclasses
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.data.parsed import read_parses
from hf_synlm.evaluation.evalb import COLLINS, EvalbParameters
from hf_synlm.evaluation.parsing_conventions import CONVENTIONS, resolve_convention
from hf_synlm.evaluation.parsing_report import report_evalb, report_parsing
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.treebank_parsing import load_treebank, parse_sentences


def command(
    treebank: Annotated[Path, typer.Option(help="Gold trees in the format of the Penn Treebank.")],
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model that parses, or its name on the Hub.", rich_help_panel="Model"),
    ] = None,
    trees: Annotated[
        list[Path] | None,
        typer.Option(help="Score the trees in this file instead, one line per gold sentence; repeat for several runs."),
    ] = None,
    tree_style: options.TreeStyleOption = "unlabeled",
    convention: Annotated[
        str,
        typer.Option(help=f"What counts: {', '.join(CONVENTIONS)}; or evalb, brackets as the program EVALB counts."),
    ] = "gpst",
    punctuation: Annotated[
        Literal["remove", "ignore", "keep"] | None,
        typer.Option(
            help="Remove it before parsing (default); parse, but do not score it; keep it (default of evalb)."
        ),
    ] = None,
    punctuation_by: Annotated[Literal["tag", "form"], typer.Option(help="What tells punctuation.")] = "tag",
    max_length: Annotated[int | None, typer.Option(min=1, help="Score sentences of at most so many words.")] = None,
    min_length: Annotated[int | None, typer.Option(min=1, help="Score sentences of at least so many words.")] = None,
    parameters: Annotated[
        Path | None, typer.Option("--prm", help="Parameter file of EVALB; default: as in COLLINS.prm.")
    ] = None,
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="evalb: compare brackets without labels.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many sentences.")] = None,
    out: options.Output = None,
    method: options.ParseMethod = None,
    parse_option: options.ParseOptions = None,
    num_beams: options.NumBeams = None,
    action_beam_size: options.ActionBeamSize = None,
    fast_track_size: options.FastTrackSize = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    device: options.Device = None,
    dtype: options.DType = "auto",
    batch_size: options.BatchSize = 16,
    seed: options.Seed = 0,
) -> None:
    """F1 of trees against a treebank, by a named convention, next to the trees that need no model.

    Also recall by label, width and height, depth and branching of the trees, and the agreement of several runs
    (several --trees). All numbers in percent.

    Example: synlm evaluate parsing --treebank wsj23.mrg --model runs/gpst_tiny/model --num-beams 20 --out f1.json
    """
    if (model is None) == (not trees):
        raise ValueError("give either --model, which parses the treebank, or --trees, which were parsed before")
    if convention == "evalb":
        if max_length is not None or min_length is not None:
            raise ValueError("--max-length and --min-length: EVALB has CUTOFF_LEN in its parameter file (--prm)")
        counted = COLLINS if parameters is None else EvalbParameters.read(parameters)
        counted = dataclasses.replace(counted, labeled=counted.labeled and not unlabeled)
        report, described = partial(report_evalb, parameters=counted), f"evalb, {parameters or 'COLLINS.prm'}"
    else:
        if parameters is not None or unlabeled:
            raise ValueError(f"--prm and --unlabeled belong to --convention evalb, not to {convention}")
        changes = {"max_length": max_length, "min_length": min_length}
        chosen = resolve_convention(convention, **{k: v for k, v in changes.items() if v is not None})
        report, described = partial(report_parsing, convention=chosen), chosen.describe()
    punctuation = punctuation or ("keep" if convention == "evalb" else "remove")
    bank = load_treebank(treebank, punctuation, limit, punctuation_by=punctuation_by)
    treatment = "left out as the parameters say" if convention == "evalb" and punctuation == "keep" else bank.convention
    settings: dict[str, Any] = {
        "convention": described, "unlabeled": unlabeled or None, "punctuation": treatment, "unit": "percent",
    }  # fmt: skip
    paths = [treebank, *(trees or ()), *(() if parameters is None else (parameters,))]
    data = {"files": describe_files(paths), "num_sentences": len(bank.sentences)}
    if model is None:
        runs = {str(path): read_parses(path, tree_style) for path in trees or ()}
        scores, tables = report(bank, runs)
        result = EvaluationResult("parsing", scores, {"name": ", ".join(runs)}, settings, data, tables)
    else:
        beams = {"num_beams": num_beams, "action_beam_size": action_beam_size, "fast_track_size": fast_track_size}
        search = options.parse_options(parse_option, method=method, **beams)
        scorer = options.load_scorer(
            model,
            revision=revision,
            trust_remote_code=trust_remote_code,
            device=device,
            dtype=dtype,
            seed=seed,
            **beams,
        )
        start = time.perf_counter()
        parsed = parse_sentences(
            scorer.model,
            scorer.tokenizer,
            bank.words,
            batch_size=batch_size,
            progress=f"parse: {scorer.name}",
            **search,
        )
        seconds = time.perf_counter() - start
        scores, tables = report(bank, {scorer.name: parsed})
        settings |= {"parse": search, "seed": seed}
        result = EvaluationResult.of(scorer, "parsing", scores, settings, data=data, tables=tables, seconds=seconds)
    options.report(result, out)
