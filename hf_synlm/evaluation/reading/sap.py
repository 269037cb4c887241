"""Effects by item of the SAP benchmark (Huang et al. 2024): agreement errors and garden paths.

The effect of an item is the difference between its critical and its control sentence, in ms and in bits, at the
critical word and the two words after it. With 18 or 24 items there is no Delta LL: a line through 0 gives ms per bit,
and Pearson's r says whether items with large effects have large differences of surprisal.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from hf_synlm.evaluation.reading.natural_stories import find_file
from hf_synlm.evaluation.reading.tables import Predictor, numbers, plain_word, read_rows
from hf_synlm.evaluation.results import Row

SOURCE = "github.com/caplabnyu/sapbenchmark"
REGIONS = (0, 1, 2)
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
            raise ValueError(f"{times}: condition is {', '.join(means)}: it must be critical or control")
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


def predicted_effects(items: pd.DataFrame, predictor: Predictor) -> pd.Series:
    """Differences of surprisal (bits) by construction, item and region; sentences are found by their words."""
    table = predictor.table.assign(value=numbers(predictor.table, predictor.column))
    if predictor.unit == "nats":
        table["value"] /= np.log(2)
    if "sentence_id" not in table:
        raise ValueError(f"{table.attrs['name']} has no column sentence_id: give a table of `synlm surprisal`")
    groups = table.groupby("sentence_id", sort=False)
    values = {plain_word(" ".join(rows["word"])): rows["value"].to_numpy() for _, rows in groups}
    found: dict[tuple[str, str, int], dict[str, float]] = {}
    for row in items.to_dict("records"):
        own = values.get(plain_word(row["sentence"]), [])[row["critical"] :]
        for region, value in zip(REGIONS, own, strict=False):
            found.setdefault((row["construction"], row["item"], region), {})[row["condition"]] = value
    pairs = {key: pair["critical"] - pair["control"] for key, pair in found.items() if len(pair) == 2}
    if not pairs:
        raise ValueError(
            f"{table.attrs['name']} holds no pair of sentences of the items, such as {items['sentence'][0]!r}"
        )
    return pd.Series(pairs).rename_axis(["construction", "item", "roi"])


def compare_effects(
    items: pd.DataFrame, effects: pd.Series, predictors: Sequence[Predictor], slope: float | None
) -> list[Row]:
    """A row per predictor, construction and region; `slope` is in ms per bit."""
    rows = []
    for predictor in predictors:
        both = pd.concat([effects.rename("ms"), predicted_effects(items, predictor).rename("bits")], axis=1).dropna()
        for (construction, region), own in both.groupby(["construction", "roi"]):
            bits, ms = own["bits"].to_numpy(), own["ms"].to_numpy()
            pearson = stats.pearsonr(bits, ms)
            low, high = pearson.confidence_interval()
            rows.append({
                "predictor": predictor.name, "construction": construction, "region": region, "items": len(own),
                "ms": float(ms.mean()), "bits": float(bits.mean()), "ms_per_bit": float(bits @ ms / (bits @ bits)),
                "r": float(pearson.statistic), "low": float(low), "high": float(high), "p": float(pearson.pvalue),
                "predicted_share": None if slope is None else float(slope * bits.mean() / ms.mean()),
            })  # fmt: skip
    return rows
