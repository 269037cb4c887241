# SPDX-License-Identifier: Apache-2.0
"""Effects by item of the SAP benchmark (Huang et al. 2024): agreement errors and garden paths.

The effect of an item is the difference between its critical and its control sentence, in ms and in bits, at the
critical word and the two words after it. With 18 or 24 items there is no Delta LL: a line through 0 gives ms per bit,
and Pearson's r says whether items with large effects have large differences of surprisal.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from hf_synlm.data.brackets import plain_word
from hf_synlm.evaluation.reading.natural_stories import find_file
from hf_synlm.evaluation.reading.tables import Predictor, numbers, read_rows
from hf_synlm.evaluation.results import Row

SOURCE = "github.com/caplabnyu/sapbenchmark"
REGIONS = (0, 1, 2)
FEWEST_ITEMS = 3
_CONSTRUCTIONS = {"Agr": "Agreement", "GPE_MVRR": "MVRR", "GPE_NPS": "NPS", "GPE_NPZ": "NPZ"}


def read_items(folder: Path) -> tuple[pd.DataFrame, list[Path]]:
    """`construction item condition sentence critical` (place of the critical word, from 0), and the files read."""
    files = [find_file(folder, SOURCE, name) for name in ("items_Agreement.csv", "items_ClassicGP.csv")]
    agreement, gardens = (read_rows(file) for file in files)
    rows = [
        ("Agreement", row["item"], "critical" if row["condition"] == "UNAGREE" else "control", row["Sentence"], place)
        for row, place in zip(agreement.to_dict("records"), numbers(agreement, "disambPosition"), strict=True)
    ]
    for condition, ending, column in (("critical", "Amb", "ambiguous"), ("control", "Unamb", "unambiguous")):
        places = numbers(gardens, f"disambPosition{ending}")
        for row, place in zip(gardens.to_dict("records"), places, strict=True):
            rows.append((row["condition"].partition("_")[0], row["item"], condition, row[column], place))
    items = pd.DataFrame(rows, columns=["construction", "item", "condition", "sentence", "critical"])
    items["sentence"] = items["sentence"].str.replace("\\'", "'", regex=False)
    items["critical"] = items["critical"].astype(int) - 1
    return items, files


def read_effects(folder: Path, times: Path | None, rt_column: str) -> tuple[pd.Series, Path]:
    """Effects in ms by construction, item and region: of a table of times, or `effects_by_item.tsv`."""
    if times is not None:
        table = read_rows(times)
        table["ms"], table["roi"] = numbers(table, rt_column), numbers(table, "roi").astype(int)
        means = table.groupby(["construction", "item", "roi", "condition"])["ms"].mean().unstack("condition")
        if not {"critical", "control"} <= set(means):
            raise ValueError(f"{times}: the column condition has {', '.join(means)}. Write 'critical' or 'control'")
        return (means["critical"] - means["control"]).dropna(), times
    hint = (
        " with effect, item, roi, rt_effect_ms (made from plots/spr/*/by_item.rds by R); or give --times, a table with "
        "construction, item, condition, roi and times"
    )
    file = find_file(folder, SOURCE, "effects_by_item.tsv", hint)
    table = read_rows(file)
    table["construction"] = table["effect"].map(_CONSTRUCTIONS)
    table["ms"], table["roi"] = numbers(table, "rt_effect_ms"), numbers(table, "roi").astype(int)
    return table.set_index(["construction", "item", "roi"])["ms"], file


def by_region(items: pd.DataFrame, table: pd.DataFrame, column: str) -> pd.DataFrame:
    """A column of a table at the regions of each construction and item, critical and control.

    Sentences are found by their words.
    """
    if "sentence_id" not in table:
        raise ValueError(f"{table.attrs['name']} has no column sentence_id. Give a table of `synlm surprisal`")
    groups = table.assign(value=numbers(table, column)).groupby("sentence_id", sort=False)
    values = {plain_word(" ".join(rows["word"])): rows["value"].to_numpy() for _, rows in groups}
    found = [
        (row["construction"], row["item"], region, row["condition"], value)
        for row in items.to_dict("records")
        for region, value in zip(REGIONS, values.get(plain_word(row["sentence"]), [])[row["critical"] :], strict=False)
    ]
    names = ["construction", "item", "roi", "condition", "value"]
    regions = pd.DataFrame(found, columns=names).set_index(names[:-1])["value"].unstack("condition")
    return regions.reindex(columns=["critical", "control"]).dropna()


def predicted_effects(items: pd.DataFrame, predictor: Predictor) -> pd.Series:
    """Differences of surprisal (bits) by construction, item and region."""
    regions = by_region(items, predictor.table, predictor.column)
    if regions.empty:
        name = predictor.table.attrs["name"]
        raise ValueError(f"{name} has no item with both sentences. The items begin with {items['sentence'][0]!r}")
    return (regions["critical"] - regions["control"]) / (np.log(2) if predictor.unit == "nats" else 1)


def remark_on_unknown_words(items: pd.DataFrame, predictor: Predictor) -> list[str]:
    """How many pairs of critical words a model does not know, and of the words after them."""
    if "oov" not in predictor.table:
        return []
    unknown = by_region(items, predictor.table, "oov").eq(1).any(axis=1)
    if not unknown.any():
        return []
    first = unknown[unknown.index.get_level_values("roi") == 0]
    return [
        f"warning: {predictor.name} does not know {first.sum()} of {len(first)} critical words, and "
        f"{unknown.sum() - first.sum()} of {len(unknown) - len(first)} words after them, in one or both sentences. "
        "There, effects are those of the class of unknown words"
    ]


def remark_on_equal_pairs(rows: Sequence[Row]) -> list[str]:
    """Where a model gives both sentences of each pair equal surprisals."""
    return [
        f"warning: {row['predictor']} gives both sentences of {row['construction']} equal surprisals in region "
        f"{row['region']}. It may not read what differs, such as a comma"
        for row in rows
        if math.isnan(row["ms_per_bit"])
    ]


def compare_effects(
    items: pd.DataFrame, effects: pd.Series, predictors: Sequence[Predictor], slope: float | None
) -> list[Row]:
    """A row per predictor, construction and region; `slope` is in ms per bit. What would divide by 0 is NaN."""
    rows, names = [], [one.name for one in predictors]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"two predictors are called {twice[0]!r}. Give each table another name, as NAME=FILE")
    for predictor in predictors:
        both = pd.concat([effects.rename("ms"), predicted_effects(items, predictor).rename("bits")], axis=1).dropna()
        if both.empty:
            raise ValueError(f"no item has both times and surprisals of {predictor.name}. Use one numbering in both")
        for (construction, region), own in both.groupby(["construction", "roi"]):
            bits, ms = own["bits"].to_numpy(), own["ms"].to_numpy()
            if len(own) < FEWEST_ITEMS:
                raise ValueError(
                    f"{predictor.name}: {construction} has {len(own)} items with times and surprisals in region "
                    f"{region}. A correlation needs at least {FEWEST_ITEMS} items. Score all sentences of the items"
                )
            r = low = high = p = math.nan
            if np.ptp(bits) and np.ptp(ms):
                pearson = stats.pearsonr(bits, ms)
                r, p, (low, high) = pearson.statistic, pearson.pvalue, pearson.confidence_interval()
            rows.append({
                "predictor": predictor.name, "construction": construction, "region": region, "items": len(own),
                "ms": float(ms.mean()), "bits": float(bits.mean()),
                "ms_per_bit": float(bits @ ms / (bits @ bits)) if bits.any() else math.nan,
                "r": float(r), "low": float(low), "high": float(high), "p": float(p),
                "predicted_share": float(slope * bits.mean() / ms.mean()) if slope is not None and ms.mean() else None,
            })  # fmt: skip
    return rows
