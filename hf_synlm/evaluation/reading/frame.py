# SPDX-License-Identifier: Apache-2.0
"""The rows and columns of a regression of reading times.

The columns of the baseline are length, log frequency and punctuation of the word and of the words before it (spillover,
across sentences, not across texts), and the places of the word in its text and sentence. Words that a regression should
not see are left out one rule after the other, and counted.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from hf_synlm.evaluation.reading.corpus import BASELINE, Corpus, length_of, stripped

UNKNOWN = "unknown word, here or before"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How reading times are predicted, and from which words."""

    spillover: int = 2  # words before a word that have columns, too
    baseline: Sequence[str] = BASELINE
    interaction: bool = False  # add length times log frequency, both centered
    missing_frequency: str = "exclude"  # or "zero"
    keep_edges: bool = False  # the first and last words of sentences
    keep_oov: bool = False
    drop_punctuation: bool = False
    folds: int = 10
    folds_by: str = "sentence"  # or "text"
    log_rt: bool = False
    by_subject: bool = False  # a regression for each reader
    mixed: bool = False  # one for all readers, with random intercepts
    seed: int = 0  # of intervals and p


@dataclasses.dataclass
class Frame:
    """What a regression reads, a row per reading time."""

    rows: pd.DataFrame  # ids of the word, `word`, `time`, and `subject` of readers
    baseline: pd.DataFrame
    predictors: dict[str, pd.DataFrame]  # values of the word and of the words before it
    following: pd.DataFrame  # values of the next word
    lost: dict[str, int]  # by rule the words left out, in order
    total: int  # words before
    unknown: dict[str, float]  # share of unknown words among those that other rules leave
    constant: list[str]  # columns of the baseline that have one value, and are left out

    def describe_lost(self) -> str:
        """One line of exclusions."""
        lost = [f"-{count:,} {rule}" for rule, count in self.lost.items()]
        return "; ".join([f"{self.total:,} words", *lost, f"{len(self.rows):,} left"])


def describe_words(text: pd.DataFrame, counts: pd.Series | None) -> pd.DataFrame:
    """Length, log frequency, punctuation and places of every word, and whether it begins or ends its sentence."""
    sentences = text.groupby("sentence_id", sort=False, dropna=False)
    own = pd.DataFrame({
        "length": [length_of(word) for word in text["word"]],
        "punctuation": [float(stripped(word[-1:]) == "") for word in text["word"]],
        "place_in_text": text.groupby("document", sort=False, dropna=False).cumcount() + 1.0,
        "place_in_sentence": sentences.cumcount() + 1.0,
        "last": sentences.cumcount(ascending=False) == 0,
    }, index=text.index)  # fmt: skip
    return own if counts is None else own.assign(frequency=np.log(counts + 1))


def _lagged(corpus: Corpus, values: pd.Series, lags: Sequence[int]) -> pd.DataFrame:
    """For every reading time the values of its word and of words before it in its text.

    `values` has a row per word, or per reader and word.
    """
    places, documents, found = corpus.times["place"].to_numpy(), corpus.text["document"].to_numpy(), {}
    for lag in lags:
        before = (places - lag).clip(0, len(documents) - 1)
        same = (before == places - lag) & (documents[before] == documents[places])
        index = corpus.index(before) if values.index.nlevels > 1 else before
        found[f"{values.name}_{lag}"] = np.where(same, values.reindex(index), np.nan)
    return pd.DataFrame(found)


def build_frame(corpus: Corpus, settings: Settings) -> Frame:
    """Make the columns, and leave out words."""
    text, places, lags = corpus.text, corpus.times["place"].to_numpy(), range(settings.spillover + 1)
    words = describe_words(text, corpus.counts)
    if settings.missing_frequency == "zero" and corpus.counts is not None:
        words["frequency"] = words["frequency"].fillna(0.0)
    here = words.iloc[places].reset_index(drop=True)

    def lagged(table: pd.DataFrame, lags: Sequence[int] = lags) -> dict[str, pd.DataFrame]:
        return {name: _lagged(corpus, table[name], lags) for name in table}

    parts = lagged(words[[name for name in ("length", "frequency", "punctuation") if name in settings.baseline]])
    controls = corpus.controls.set_axis(corpus.index(places))
    of_readers = controls.columns[controls.groupby(level=0).nunique().max() == 1]  # such as age: no spillover
    parts |= lagged(controls.drop(columns=of_readers)) | lagged(controls[of_readers], [0])
    predictors, unknown = lagged(corpus.values), lagged(corpus.unknown)
    rules = _rules(corpus, settings, here, parts, predictors, unknown)
    keep, lost, shares = np.ones(len(here), bool), {}, {}
    for rule, out in rules.items():
        if rule == UNKNOWN and keep.any():
            shares = {name: float(part[f"{name}_0"][keep].mean()) for name, part in unknown.items()}
        lost[rule] = int((keep & out).sum())
        keep &= ~out.to_numpy()

    def kept(table: pd.DataFrame) -> pd.DataFrame:
        return table[keep].reset_index(drop=True)

    baseline = _baseline({name: kept(part) for name, part in parts.items()}, kept(here), text, settings)
    constant = [name for name in baseline if baseline[name].nunique() == 1]
    ids = dict.fromkeys((*corpus.key, "item", "document", "sentence_id", "word_id", "word"))
    own = text[[name for name in ids if name in text]]
    frame = Frame(
        rows=kept(pd.concat([own.iloc[places].reset_index(drop=True), corpus.times.drop(columns="place")], axis=1)),
        baseline=baseline.drop(columns=constant),
        predictors={name: kept(part) for name, part in predictors.items()},
        following=kept(pd.concat(lagged(corpus.values, [-1]).values(), axis=1)),
        lost={rule: count for rule, count in lost.items() if count},
        total=len(keep),
        unknown=shares,
        constant=constant,
    )
    if not keep.any():
        raise ValueError(f"no word is left: {frame.describe_lost()}")
    return frame


def _rules(
    corpus: Corpus,
    settings: Settings,
    here: pd.DataFrame,
    parts: Mapping[str, pd.DataFrame],
    predictors: Mapping[str, pd.DataFrame],
    unknown: Mapping[str, pd.DataFrame],
) -> dict[str, pd.Series]:
    """What each rule leaves out, in order."""
    return {
        "no reading time": corpus.times["time"].isna(),
        "first word of a sentence": (here["place_in_sentence"] == 1) & (not settings.keep_edges),
        "last word of a sentence": here["last"] & (not settings.keep_edges),
        f"fewer than {settings.spillover} words before it": here["place_in_text"] <= settings.spillover,
        **{f"no {name}, here or before": part.isna().any(axis=1) for name, part in parts.items()},
        **{f"no value of {name}, here or before": part.isna().any(axis=1) for name, part in predictors.items()},
        UNKNOWN: pd.concat(unknown.values(), axis=1).eq(1).any(axis=1) & (not settings.keep_oov),
        "punctuation at its end": (here["punctuation"] == 1) & settings.drop_punctuation,
    }


def _baseline(
    parts: dict[str, pd.DataFrame], here: pd.DataFrame, text: pd.DataFrame, settings: Settings
) -> pd.DataFrame:
    """The columns side by side, with the product of length and frequency and the places."""
    columns = pd.concat(parts.values(), axis=1) if parts else pd.DataFrame(index=here.index)
    if settings.interaction:
        if not {"length", "frequency"} <= set(parts):
            raise ValueError("--interaction needs length and frequency in the baseline. Give --frequencies")
        length, frequency = ((part - part.mean()).to_numpy() for part in (parts["length"], parts["frequency"]))
        columns[[f"length_x_frequency_{lag}" for lag in range(settings.spillover + 1)]] = length * frequency
    if "place" in settings.baseline:
        # Where a text is a sentence, both places are one.
        several = text["document"].nunique() < text["sentence_id"].nunique()
        places = ["place_in_text", "place_in_sentence"] if several else ["place_in_sentence"]
        columns[places] = here[places]
    return columns
