# SPDX-License-Identifier: Apache-2.0
"""The result of `synlm evaluate reading`: tables, remarks, and rows for other programs."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from hf_synlm.evaluation.reading.analysis import Analysis, Effect, analyse, early_times
from hf_synlm.evaluation.reading.corpus import Corpus
from hf_synlm.evaluation.reading.frame import UNKNOWN, Frame, Settings, build_frame
from hf_synlm.evaluation.reading.tables import SETTINGS, Predictor
from hf_synlm.evaluation.results import EvaluationResult, Row, describe_files, library_versions

# More unknown words than this need a second look.
_MANY_UNKNOWN = 0.25


@dataclasses.dataclass
class ReadingReport:
    """A result with what it was made from; remarks are for the user to read."""

    result: EvaluationResult
    frame: Frame
    effects: list[Effect]
    remarks: list[str]


def evaluate_reading(
    corpus: Corpus,
    settings: Settings,
    *,
    model: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
) -> ReadingReport:
    """Predict reading times with and without each predictor; `model`, `options` and `data` go to the result."""
    frame = build_frame(corpus, settings)
    analysis = analyse(frame, settings)
    effects = [analysis.effect(name) for name in frame.predictors]
    remarks = [*corpus.remarks, frame.describe_lost(), *_warnings(frame, analysis, effects, corpus)]
    rows = [_difference(effect, frame, corpus) for effect in effects]
    unknown = frame.lost.get(UNKNOWN, 0)
    if unknown > _MANY_UNKNOWN * (unknown + len(frame.rows)):
        kept = dataclasses.replace(settings, keep_oov=True)
        with_all = build_frame(corpus, kept)
        again = analyse(with_all, kept)
        more = [_difference(again.effect(name), with_all, corpus) for name in with_all.predictors]
        rows += [{**row, "predictor": f"{row['predictor']}, --keep-oov"} for row in more]
        remarks.append(
            f"warning: {unknown:,} words are left out, because a model does not know them or a word before them: "
            "other words may differ in kind. The rows with --keep-oov have all words, and unknown words as a class"
        )
    tables = {
        "baseline": [_baseline(frame, analysis)],
        "differences": rows,
        "effects": [_effect(effect, settings.spillover) for effect in effects],
        "pairs": analysis.pairs(),
        "predictors": [_describe(one) for one in corpus.predictors],
        "remarks": [{"remark": remark} for remark in remarks],
    }
    chosen = {**dataclasses.asdict(settings), "baseline": "+".join(settings.baseline), **(options or {})}
    baseline = tables["baseline"][0]
    gains = {f"delta_ll {effect.name}": effect.gains["delta_ll"] for effect in effects}
    result = EvaluationResult(
        task="reading",
        scores={"baseline_ll": baseline["held_out_ll"], **gains},
        model={"name": ", ".join(frame.predictors), **(model or {}), "predictors": _sources(corpus)},
        options={"unit": "nats per word", **{name: None if v is False else v for name, v in chosen.items()}},
        data={**(data or {}), "words": len(frame.rows), "exclusions": frame.lost},
        tables={title: table for title, table in tables.items() if table},
        versions=library_versions("pandas", "scipy", "statsmodels", "wordfreq"),
    )
    return ReadingReport(result, frame, effects, remarks)


# ------------------------------------------------------------------------------------------------------------ tables
def _baseline(frame: Frame, analysis: Analysis) -> Row:
    ll, r2 = analysis.baseline_ll(), analysis.mean("r2", "")
    return {
        "columns": " ".join(map(str, frame.baseline.columns)),
        "words": int(np.isfinite(ll).sum()),
        "held_out_ll": float(np.nanmean(ll)),
        "in_sample_ll": analysis.mean("ll_per_word", ""),
        "r2": r2 if math.isfinite(r2) else None,
    }


def _difference(effect: Effect, frame: Frame, corpus: Corpus) -> Row:
    return {
        "predictor": effect.name,
        "unit": next(one.unit for one in corpus.predictors if one.name == effect.name),
        "mean": float(frame.predictors[effect.name].iloc[:, 0].mean()),
        "unknown_percent": 100 * frame.unknown[effect.name],
        **effect.gains,
    }


def _effect(effect: Effect, spillover: int) -> Row:
    lags = range(spillover + 1)
    terms = effect.coefficients.loc[[f"{effect.name}_{lag}" for lag in lags]]
    numbered = {f"{field}_{lag}": float(terms[field].iloc[lag]) for field in ("t", "b", "se") for lag in lags}
    return {"predictor": effect.name, **numbered, "sum_b": float(terms["b"].sum())}


def _describe(one: Predictor) -> Row:
    known = {key: one.settings.get(key) for key in ("model", *SETTINGS)}
    return {"predictor": one.name, "column": one.column, "unit": one.unit, **known}


def _sources(corpus: Corpus) -> list[Row]:
    """The predictors with the checksums of their files."""
    files = [describe_files([one.source])[0] if one.source else {} for one in corpus.predictors]
    return [{**_describe(one), **file} for one, file in zip(corpus.predictors, files, strict=True)]


# ----------------------------------------------------------------------------------------------------------- remarks
def _warnings(frame: Frame, analysis: Analysis, effects: list[Effect], corpus: Corpus) -> list[str]:
    """What may be wrong with the data or the predictors."""
    said = []
    if analysis.readers_left_out:
        said.append(f"{analysis.readers_left_out} readers have too few words for a regression and are left out")
    if frame.constant:
        said.append(f"left out of the baseline, because all these words have one value: {', '.join(frame.constant)}")
    if "frequency_0" not in frame.baseline:
        said.append("warning: the baseline has no word frequency, so Delta LL is larger: give --frequencies")
    for effect in effects:
        total = effect.coefficients.loc[list(frame.predictors[effect.name]), "b"].sum()
        if total < 0:
            said.append(
                f"warning: the sum of b of {effect.name} is {total:.3g}: higher values go with shorter times, so a "
                "positive Delta LL is no evidence for it. Are many words unknown, or are these log-probabilities?"
            )
        following, before = early_times(frame, analysis.y, effect.name)
        if following > 4 and following > before:
            said.append(
                f"warning: t of {effect.name} is {following:.1f} at the next word, but {before:.1f} at the word "
                "before: the times may stand one row early"
            )
    known = [_describe(one) for one in corpus.predictors if one.settings]
    values = {"unit": [one.unit for one in corpus.predictors], **{key: [row[key] for row in known] for key in SETTINGS}}
    for name, found in values.items():
        if len(set(map(str, found))) > 1:
            said.append(f"warning: predictors differ in {name}: {', '.join(map(str, found))}")
    return said


# ---------------------------------------------------------------------------------------------- rows for other programs
def coefficient_rows(report: ReadingReport) -> list[Row]:
    """predictor, term, b, se, t, p of every regression on all words."""
    return [
        {"predictor": effect.name, "term": term, **row}
        for effect in report.effects
        for term, row in effect.coefficients.to_dict("index").items()
    ]


def frame_rows(report: ReadingReport) -> list[Row]:
    """Joined rows with the columns of every regression."""
    frame = report.frame
    return pd.concat([frame.rows, frame.baseline, *frame.predictors.values()], axis=1).to_dict("records")
