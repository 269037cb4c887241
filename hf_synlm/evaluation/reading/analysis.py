# SPDX-License-Identifier: Apache-2.0
"""What each predictor adds to the baseline: over sentences, or over readers."""

import dataclasses
from itertools import combinations

import numpy as np
import pandas as pd
from scipy import stats

from hf_synlm.evaluation.reading.frame import Frame, Settings
from hf_synlm.evaluation.reading.regression import Fit, check_columns, compare, fit, held_out, make_folds
from hf_synlm.evaluation.results import Row

WORDS_OF_A_READER = 30
"""Words per column that a reader must have for a regression of their own."""


@dataclasses.dataclass
class Effect:
    """What a predictor adds."""

    name: str
    gains: Row  # Delta LL with its uncertainty, gain in the sample
    coefficients: pd.DataFrame  # b, se, t, p of every term


@dataclasses.dataclass
class _Run:
    """Regressions on one set of words: by predictor ("" = baseline) held-out log densities and the fit of all words."""

    rows: np.ndarray
    ll: dict[str, np.ndarray]
    fits: dict[str, Fit]


def _run(frame: Frame, y: np.ndarray, folds: np.ndarray, rows: np.ndarray, mixed: bool) -> _Run:
    run = _Run(rows, {}, {})
    readers = frame.rows["subject"][rows].reset_index(drop=True) if mixed else None
    if np.ptp(y[rows]) == 0:
        raise ValueError(f"all remaining reading times are {y[rows][0]:g}. Name another column (--rt-column)")
    for name, part in {"": None, **frame.predictors}.items():
        columns = pd.concat([frame.baseline, part], axis=1)[rows].reset_index(drop=True)
        check_columns(columns, f"leave out {name}" if name else "leave it out of --baseline or --control")
        run.ll[name] = held_out(y[rows], columns, folds[rows], readers)
        run.fits[name] = fit(y[rows], columns, readers)
    return run


@dataclasses.dataclass
class Analysis:
    """A run on all words, or one on the words of each reader."""

    runs: list[_Run]
    by_reader: bool
    y: np.ndarray
    sentences: np.ndarray
    folds: np.ndarray
    seed: int
    readers_left_out: int

    def differences(self, a: str, b: str) -> np.ndarray:
        """A value per word, or the mean of each reader."""
        found = [run.ll[a] - run.ll[b] for run in self.runs]
        return np.array([one.mean() for one in found]) if self.by_reader else found[0]

    def compared(self, a: str, b: str) -> Row:
        """Whether one predictor is better than another, or than the baseline ("")."""
        groups = np.arange(len(self.runs)) if self.by_reader else self.sentences
        # A useless predictor is worse than none on words held out: only a gain over the baseline ("") means something.
        return compare(self.differences(a, b), groups, self.seed, "two-sided" if b else "greater")

    def pairs(self) -> list[Row]:
        """Comparisons of the predictors with each other."""
        names = [name for name in self.runs[0].fits if name]
        return [{"a": a, "b": b, **self.compared(a, b)} for a, b in combinations(names, 2)]

    def mean(self, field: str, name: str) -> float:
        """Mean over runs of a number of their fits."""
        return float(np.mean([getattr(run.fits[name], field) for run in self.runs]))

    def baseline_ll(self) -> np.ndarray:
        """Held-out log density of every word without predictors; NaN for readers left out."""
        found = np.full(len(self.y), np.nan)
        for run in self.runs:
            found[run.rows] = run.ll[""]
        return found

    def effect(self, name: str) -> Effect:
        """What a predictor adds to the baseline."""
        parts = pd.Series(self.differences(name, ""))
        parts = parts if self.by_reader else parts.groupby(self.folds).mean()
        tables = [run.fits[name].table for run in self.runs]
        difference, r2_gain = self.compared(name, ""), self.mean("r2", name) - self.mean("r2", "")
        gains = {
            "delta_ll": difference.pop("mean"), "se": float(parts.sem()), **difference,
            "above_0": f"{(parts > 0).sum()} of {len(parts)}",
            "in_sample": self.mean("ll_per_word", name) - self.mean("ll_per_word", ""),
            "r2_gain": r2_gain if np.isfinite(r2_gain) else None,
        }  # fmt: skip
        return Effect(name, gains, _over_readers(tables) if self.by_reader else tables[0])


def analyse(frame: Frame, settings: Settings) -> Analysis:
    """Regressions with and without each predictor; differences are over sentences, or over readers."""
    y = frame.rows["time"].to_numpy(float)
    if settings.log_rt:
        if y.min() <= 0:
            raise ValueError(f"--log-rt: a reading time is {y.min():g}. Give times above 0")
        y = np.log(y)
    units = frame.rows["sentence_id" if settings.folds_by == "sentence" else "document"]
    folds = make_folds(units, settings.folds, settings.folds_by)
    by_reader = settings.by_subject and not settings.mixed
    found = []
    for reader, rows in (_rows_of_readers(frame) if by_reader else {"": np.ones(len(y), bool)}).items():
        try:
            found.append(_run(frame, y, folds, rows, settings.mixed))
        except ValueError as error:
            if by_reader:
                raise ValueError(f"reader {reader}: {error}; or fit all readers together by --mixed") from error
            raise
    left_out = frame.rows["subject"].nunique() - len(found) if by_reader else 0
    return Analysis(found, by_reader, y, frame.rows["sentence_id"].to_numpy(), folds, settings.seed, left_out)


def _rows_of_readers(frame: Frame) -> dict[str, np.ndarray]:
    """The rows of each reader who has enough."""
    readers = frame.rows["subject"]
    size = frame.baseline.shape[1] + next(iter(frame.predictors.values())).shape[1]
    rows = {reader: (readers == reader).to_numpy() for reader in readers.unique()}
    enough = {reader: own for reader, own in rows.items() if own.sum() >= WORDS_OF_A_READER * size}
    if len(enough) < 2:
        raise ValueError(
            f"only {len(enough)} of {len(rows)} readers have {WORDS_OF_A_READER} words for each of {size} columns. "
            "Lower --spillover, shorten --baseline, or fit all readers together by --mixed"
        )
    return enough


def _over_readers(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Mean of each coefficient over readers, and the test that it is 0."""
    values = np.array([table["b"] for table in tables])
    tested = stats.ttest_1samp(values, 0.0)
    columns = {"b": values.mean(axis=0), "se": stats.sem(values), "t": tested.statistic, "p": tested.pvalue}
    return pd.DataFrame(columns, index=tables[0].index)


def early_times(frame: Frame, y: np.ndarray, name: str) -> tuple[float, float]:
    """T of the predictor at the next word and at the word before, in one regression with the baseline."""
    columns = pd.concat([frame.baseline, frame.predictors[name], frame.following[f"{name}_-1"]], axis=1)
    known = columns.notna().all(axis=1).to_numpy()
    t = fit(y[known], columns[known].reset_index(drop=True)).table["t"]
    return float(t[f"{name}_-1"]), float(t.get(f"{name}_1", np.inf))
