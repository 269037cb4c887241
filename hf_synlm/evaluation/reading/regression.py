# SPDX-License-Identifier: Apache-2.0
"""Regressions of reading times: log density of held-out words, coefficients, and how certain differences are.

In every fold the columns are scaled by mean and standard deviation of the training words; s2 is their residual sum of
squares over their number, and a held-out word has the log density (nats)

    ll = -(1/2) ln(2 pi s2) - (y - yhat)^2 / (2 s2)

Delta LL is the mean of ll with a predictor less that of the baseline. With `mixed`, readers have random intercepts; a
word held out is predicted with the intercept that the other words of its reader give.
"""

import dataclasses
from typing import Any, Literal

import numpy as np
import pandas as pd
import statsmodels.api as sm
from scipy import stats

WORDS_PER_COEFFICIENT = 20
# Columns are written with eight digits, so a sum of others differs from them in the last ones.
_RANK = 1e-6


def make_folds(units: pd.Series, count: int, name: str) -> np.ndarray:
    """Deal out whole units, sentences or texts, in turn; numbers say their turn, other ids their first appearance."""
    turns = pd.to_numeric(units, errors="coerce")
    order = turns - 1 if turns.notna().all() and (turns % 1 == 0).all() else pd.Series(pd.factorize(units)[0])
    folds = (order % count).to_numpy().astype(int)
    if empty := sorted(set(range(count)) - set(folds)):
        raise ValueError(f"fold {empty[0] + 1} of {count} is empty. There are {units.nunique()} {name}s. Lower --folds")
    return folds


def check_columns(columns: pd.DataFrame, remedy: str) -> None:
    """Raise ValueError if a regression cannot tell a column from the others, or has too few words."""
    if len(columns) < WORDS_PER_COEFFICIENT * (columns.shape[1] + 1):
        raise ValueError(
            f"{len(columns):,} words are too few for {columns.shape[1] + 1} coefficients. Each coefficient needs "
            f"{WORDS_PER_COEFFICIENT} words. Lower --spillover, shorten --baseline, or keep more words"
        )
    for name in columns:
        if columns[name].std(ddof=0) < 1e-12:
            raise ValueError(f"{name} is {columns[name].iloc[0]:g} for all words: {remedy}")
    scaled = _scaled(columns.to_numpy(), columns.to_numpy())[:, 1:]
    if np.linalg.matrix_rank(scaled, rtol=_RANK) == scaled.shape[1]:
        return
    k = next(k for k in range(scaled.shape[1]) if np.linalg.matrix_rank(scaled[:, : k + 1], rtol=_RANK) <= k)
    weights, *_ = np.linalg.lstsq(scaled[:, :k], scaled[:, k], rcond=None)
    parts = [name for name, weight in zip(columns, weights, strict=False) if abs(weight) > 1e-5]
    raise ValueError(f"{columns.columns[k]} is a weighted sum of {' and '.join(parts)}: {remedy}")


def _scaled(values: np.ndarray, training: np.ndarray) -> np.ndarray:
    """Columns by mean and standard deviation of the training words, after a column of ones."""
    scale = training.std(axis=0)
    scaled = (values - training.mean(axis=0)) / np.where(scale == 0, 1, scale)
    return np.column_stack([np.ones(len(values)), scaled])


def held_out(y: np.ndarray, columns: pd.DataFrame, folds: np.ndarray, readers: pd.Series | None = None) -> np.ndarray:
    """Log density of every word under the regression on the other folds; with `readers`, with random intercepts."""
    found, values = np.full(len(y), np.nan), columns.to_numpy(float)
    for fold in np.unique(folds):
        inside, outside = folds != fold, folds == fold
        scaled = _scaled(values, values[inside])
        if readers is None:
            weights, _, rank, _ = np.linalg.lstsq(scaled[inside], y[inside], rcond=None)
            if rank < scaled.shape[1]:
                raise ValueError(
                    f"without fold {fold + 1} the columns {', '.join(columns)} depend on each other, because one "
                    "column has too few different values. Lower --folds, or shorten --baseline"
                )
            predicted = scaled @ weights
            variance = np.mean((y[inside] - predicted[inside]) ** 2)
        else:
            fit = _mixed(y[inside], scaled[inside], readers[inside])
            effects = fit.random_effects if np.any(fit.cov_re) else {}  # readers may not differ
            of_readers = {reader: float(effect.iloc[0]) for reader, effect in effects.items()}
            predicted = scaled @ fit.fe_params + readers.map(of_readers).fillna(0.0).to_numpy()
            variance = fit.scale
        found[outside] = -0.5 * np.log(2 * np.pi * variance) - (y[outside] - predicted[outside]) ** 2 / (2 * variance)
    return found


def _mixed(y: np.ndarray, scaled: np.ndarray, readers: pd.Series) -> Any:
    return sm.MixedLM(y, scaled, groups=readers.to_numpy()).fit(reml=False)


@dataclasses.dataclass(frozen=True)
class Fit:
    """A regression on all words; `table` has a row per term: b, se, t, p."""

    table: pd.DataFrame
    ll_per_word: float
    r2: float


def fit(y: np.ndarray, columns: pd.DataFrame, readers: pd.Series | None = None) -> Fit:
    """Fit all words; coefficients are per unit of their column."""
    if readers is None:
        found = sm.OLS(y, sm.add_constant(columns)).fit()
        table = pd.DataFrame({"b": found.params, "se": found.bse, "t": found.tvalues, "p": found.pvalues})
        return Fit(table.drop("const"), float(found.llf) / len(y), float(found.rsquared))
    values = columns.to_numpy(float)
    found = _mixed(y, _scaled(values, values), readers)
    size, scale = values.shape[1], values.std(axis=0)
    terms = {"b": found.fe_params[1:] / scale, "se": found.bse_fe[1:] / scale}
    terms |= {"t": found.tvalues[1 : size + 1], "p": found.pvalues[1 : size + 1]}
    return Fit(pd.DataFrame(terms, index=columns.columns), float(found.llf) / len(y), np.nan)


def compare(
    differences: np.ndarray, groups: np.ndarray, seed: int, alternative: Literal["greater", "two-sided"]
) -> dict[str, float]:
    """Mean, 95% interval by drawing groups (2,000 draws), and p by flipping the signs of their sums (5,000)."""
    by_group = pd.Series(differences).groupby(groups)
    sums, sizes = by_group.sum().to_numpy(), by_group.size().to_numpy()
    interval = stats.bootstrap(
        (sums, sizes), lambda s, n, axis: s.sum(axis) / n.sum(axis), paired=True, n_resamples=2000, batch=200,
        method="percentile", rng=np.random.default_rng(seed),
    ).confidence_interval  # fmt: skip
    flipped = stats.permutation_test(
        (sums,), lambda s, axis: s.sum(axis), permutation_type="samples", n_resamples=5000, batch=500, vectorized=True,
        alternative=alternative, rng=np.random.default_rng(seed),
    )  # fmt: skip
    found = {"mean": differences.mean(), "low": interval.low, "high": interval.high, "p": flipped.pvalue}
    return {name: float(value) for name, value in found.items()}
