"""`synlm evaluate reading`: numbers by hand from an invented corpus, and an answer to every table that does not fit."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import wordfreq

from hf_synlm.cli.app import main
from hf_synlm.evaluation.reading.corpus import counter
from hf_synlm.evaluation.reading.tables import plain_word
from tests.helpers import commands

STRIPPED = ".,;:!?'\"`()[]-–—‘’“”"


def invent(seed=0):
    """The words of 6 texts of 10 sentences; reading times depend on length, frequency and surprisal, with spillover."""
    rng = np.random.default_rng(seed)
    words, number = [], 0
    for document in range(1, 7):
        for _ in range(10):
            number += 1
            length = int(rng.integers(8, 17))
            for place in range(1, length + 1):
                word = "".join(rng.choice(list("aeioulnrst"), int(rng.integers(1, 10))))
                word = f"‘{word}" if rng.random() < 0.05 else word
                word += "." if place == length else "," if rng.random() < 0.1 else ""
                words.append({
                    "document": f"d{document}", "sentence_id": number, "word_id": place, "word": word,
                    "surprisal_bits": float(rng.gamma(2, 4)), "other": float(rng.normal()),
                    "oov": int(rng.random() < 0.01), "count": int(rng.integers(0, 10_000)),
                })  # fmt: skip
    for i, row in enumerate(words):
        before = words[i - 1] if i and words[i - 1]["document"] == row["document"] else row
        row["mean_rt"] = (
            500 + 5 * len(row["word"]) - 3 * math.log(row["count"] + 1) + 3 * row["surprisal_bits"]
            + 2 * before["surprisal_bits"] + float(rng.normal(0, 30))
        )  # fmt: skip
    for i in (40, 200, 333):
        words[i]["mean_rt"] = None
    for i in (70, 400):
        words[i]["count"] = None
    words[150]["surprisal_bits"] = None
    return words


WORDS = invent()
OF_TIMES = ("sentence_id", "word_id", "word", "mean_rt", "count")
OF_SURPRISALS = ("document", "sentence_id", "word_id", "word", "oov", "surprisal_bits", "other")


def write(path, rows, names):
    lines = ["\t".join("" if row[name] is None else str(row[name]) for name in names) for row in rows]
    path.write_text("\n".join(["\t".join(names), *lines]) + "\n", encoding="utf-8")
    return str(path)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Tables of surprisals and times, in the folder where commands run."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "s.tsv", WORDS, OF_SURPRISALS)
    write(tmp_path / "rt.tsv", WORDS, OF_TIMES)
    return tmp_path


def run(capsys, *arguments):
    """The result of a command, with its remarks."""
    given = ["s.tsv", "--times", "rt.tsv", "--rt-column", "mean_rt", "--frequencies", "count"]
    alone = arguments and (not arguments[0].startswith("--") or "--preset" in arguments)
    given = list(arguments) if alone else [*given, *arguments]
    assert main(["evaluate", "reading", *given, "--out", "r.json", "--overwrite"]) == 0, capsys.readouterr().err
    with open("r.json", encoding="utf-8") as file:
        return json.load(file), capsys.readouterr().err


def fail(capsys, *arguments):
    return commands.fail(capsys, "evaluate", "reading", *arguments)


# ------------------------------------------------------------------------------------------------ the slow, obvious way
def log_frequency(row):
    return None if row["count"] is None else math.log(row["count"] + 1)


def slow_columns(words, predictor, lags=2, times="mean_rt"):
    """Rows of (word, baseline columns, columns of the predictor), and how many each rule leaves out."""
    kept, lost = [], dict.fromkeys(("time", "first", "last", "early", "frequency", "value", "unknown"), 0)
    places = {}
    for i, row in enumerate(words):
        places[row["document"]] = place = places.get(row["document"], 0) + 1
        around = [words[i - lag] for lag in range(lags + 1) if place > lag]
        is_last = i + 1 == len(words) or words[i + 1]["sentence_id"] != row["sentence_id"]
        rules = {
            "time": row[times] is None, "first": row["word_id"] == 1, "last": is_last, "early": place <= lags,
            "frequency": any(one["count"] is None for one in around),
            "value": any(one[predictor] is None for one in around), "unknown": any(one["oov"] for one in around),
        }  # fmt: skip
        broken = next((rule for rule, is_broken in rules.items() if is_broken), None)
        if broken:
            lost[broken] += 1
            continue
        lengths = [max(1, len(one["word"].strip(STRIPPED))) for one in around]
        points = [float(one["word"][-1] in STRIPPED) for one in around]
        baseline = [*lengths, *map(log_frequency, around), *points, place, row["word_id"]]
        kept.append((row, baseline, [one[predictor] for one in around]))
    return kept, lost


def slow_ll(y, x, folds):
    """Log density of each word under the regression on the other folds."""
    ll = np.zeros(len(y))
    for fold in set(folds):
        training = np.array([f != fold for f in folds])
        mean, deviation = x[training].mean(0), x[training].std(0)
        z = np.column_stack([np.ones(len(y)), (x - mean) / deviation])
        b = np.linalg.solve(z[training].T @ z[training], z[training].T @ y[training])
        variance = np.mean((y[training] - z[training] @ b) ** 2)
        for i in np.flatnonzero(~training):
            ll[i] = -0.5 * math.log(2 * math.pi * variance) - (y[i] - z[i] @ b) ** 2 / (2 * variance)
    return ll


def slow_fit(y, x):
    """Coefficients without the intercept, their standard errors, log-likelihood per word, and R2."""
    z = np.column_stack([np.ones(len(y)), x])
    inverse = np.linalg.inv(z.T @ z)
    b = inverse @ z.T @ y
    squares = float(((y - z @ b) ** 2).sum())
    se = np.sqrt(np.diag(inverse) * squares / (len(y) - z.shape[1]))
    ll = -0.5 * math.log(2 * math.pi * squares / len(y)) - 0.5
    return b[1:], se[1:], ll, 1 - squares / float(((y - y.mean()) ** 2).sum())


def slow(words=WORDS, predictor="surprisal_bits", fold_of=lambda row: (row["sentence_id"] - 1) % 10, log=False):
    kept, lost = slow_columns(words, predictor)
    y = np.array([math.log(row["mean_rt"]) if log else row["mean_rt"] for row, _, _ in kept])
    base = np.array([baseline for _, baseline, _ in kept], float)
    full = np.column_stack([base, [values for _, _, values in kept]])
    folds = [fold_of(row) for row, _, _ in kept]
    gains = slow_ll(y, full, folds) - slow_ll(y, base, folds)
    means = [gains[np.array(folds) == fold].mean() for fold in sorted(set(folds))]
    b, se, ll, r2 = slow_fit(y, full)
    _, _, ll0, r20 = slow_fit(y, base)
    return {
        "lost": lost, "words": len(y), "baseline": slow_ll(y, base, folds).mean(), "r2": r20, "delta_ll": gains.mean(),
        "se": np.std(means, ddof=1) / math.sqrt(len(means)), "in_sample": ll - ll0, "r2_gain": r2 - r20,
        "above": f"{sum(mean > 0 for mean in means)} of {len(means)}", "b": b[-3:], "t": b[-3:] / se[-3:],
        "gains": gains, "sentences": [row["sentence_id"] for row, _, _ in kept],
    }  # fmt: skip


def check(result, expected, number=0):
    tables = result["tables"]
    found, effect = tables["differences"][number], tables["effects"][number]
    assert result["data"]["words"] == expected["words"]
    assert list(result["data"]["exclusions"].values()) == [count for count in expected["lost"].values() if count]
    assert tables["baseline"][0]["held_out_ll"] == pytest.approx(expected["baseline"], abs=1e-9)
    assert tables["baseline"][0]["r2"] == pytest.approx(expected["r2"], abs=1e-9)
    for name in ("delta_ll", "se", "in_sample", "r2_gain"):
        assert found[name] == pytest.approx(expected[name], abs=1e-9), name
    assert found["above_0"] == expected["above"]
    for lag in range(3):
        assert effect[f"b_{lag}"] == pytest.approx(expected["b"][lag], rel=1e-6)
        assert effect[f"t_{lag}"] == pytest.approx(expected["t"][lag], rel=1e-6)
    assert effect["sum_b"] == pytest.approx(expected["b"].sum(), rel=1e-6)


# -------------------------------------------------------------------------------------------------------------- numbers
def test_numbers_are_those_of_the_definition(tables, capsys):
    result, said = run(capsys)
    expected = slow()
    check(result, expected)
    assert all(expected["lost"].values()) and "warning" not in said
    assert f"{len(WORDS)} words; -3 no reading time; -60 first word" in said
    found = result["tables"]["differences"][0]
    # Drawn here again, with other random numbers.
    rng = np.random.default_rng(5)
    sums = {
        s: sum(g for g, t in zip(expected["gains"], expected["sentences"], strict=True) if s == t) for s in range(1, 61)
    }
    sizes = {s: expected["sentences"].count(s) for s in range(1, 61)}
    draws = rng.integers(1, 61, (2000, 60))
    means = [sum(sums[s] for s in draw) / sum(sizes[s] for s in draw) for draw in draws]
    low, high = np.quantile(means, [0.025, 0.975])
    assert [found["low"], found["high"]] == pytest.approx([low, high], abs=0.1 * (high - low))
    assert found["p"] < 0.01 and found["unit"] == "bits"
    assert result["model"]["predictors"][0]["sha256"] and result["scores"]["delta_ll s"] == found["delta_ll"]
    assert "statsmodels" in result["versions"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        (["--folds-by", "text", "--folds", "6"], {"fold_of": lambda row: row["document"]}),
        (["--folds", "4"], {"fold_of": lambda row: (row["sentence_id"] - 1) % 4}),
        (["--log-rt"], {"log": True}),
    ],
)
def test_folds_and_logarithms(tables, capsys, options, changes):
    check(run(capsys, *options)[0], slow(**changes))


def test_predictors_are_compared_on_the_same_words(tables, capsys):
    words = [{**row, "other": None if i == 77 else row["other"]} for i, row in enumerate(WORDS)]
    write(tables / "more.tsv", words, OF_SURPRISALS)
    (tables / "more.tsv.meta.json").write_text('{"options": {"num_beams": 5}, "model": {"name": "m"}}')
    (tables / "s.tsv.meta.json").write_text('{"options": {"num_beams": 20}, "model": {"name": "m"}}')
    common = ("--times", "rt.tsv", "--rt-column", "mean_rt", "--frequencies", "count")
    result, said = run(capsys, "A=s.tsv", "B=more.tsv:other", *common)
    used = [dict(row, surprisal_bits=None) if i == 77 else row for i, row in enumerate(WORDS)]
    expected = slow(words, "other")
    assert result["data"]["words"] == slow(used)["words"]
    differences = {row["predictor"]: row["delta_ll"] for row in result["tables"]["differences"]}
    assert differences["A"] == pytest.approx(slow(used)["delta_ll"], abs=1e-9)
    both = [dict(row, other=None if row["surprisal_bits"] is None else row["other"]) for row in words]
    expected = slow(both, "other")
    assert differences["B"] == pytest.approx(expected["delta_ll"], abs=1e-9)
    assert expected["delta_ll"] < 0 < expected["in_sample"] < 0.01  # nothing is learned from random numbers
    (pair,) = result["tables"]["pairs"]
    assert pair["mean"] == pytest.approx(differences["A"] - differences["B"], abs=1e-12) and pair["p"] < 0.05
    assert pair["low"] < pair["mean"] < pair["high"]
    assert [row["p"] < 0.05 for row in result["tables"]["differences"]] == [True, False]
    assert result["tables"]["differences"][1]["p"] > 0.5  # one-sided: noise is no gain
    assert "differ in unit: bits, other" in said and "differ in num_beams: 20, 5" in said
    assert [row["num_beams"] for row in result["tables"]["predictors"]] == [20, 5]


def test_widths_of_the_beam_stand_in_names_of_columns(tables, capsys):
    rows = [{**row, "surprisal_bits_b3": row["other"]} for row in WORDS]
    write(tables / "s.tsv", rows, (*OF_SURPRISALS, "surprisal_bits_b3"))
    (tables / "s.tsv.meta.json").write_text('{"options": {"num_beams": 20}}')  # without a model
    result, said = run(capsys, "s.tsv", "b3=s.tsv:surprisal_bits_b3", *COMMON[1:])
    assert [row["num_beams"] for row in result["tables"]["predictors"]] == [20, 3]
    assert "differ in num_beams: 20, 3" in said and "differ in unit" not in said


def test_frame_words_and_coefficients_are_written(tables, capsys):
    words = [{**row, "minute": i % 7 if i % 50 else None} for i, row in enumerate(WORDS)]
    write(tables / "rt.tsv", words, (*OF_TIMES, "minute"))
    files = ("--write-frame", "f.tsv", "--coefficients", "c.tsv")
    run(capsys, "--interaction", "--control", "minute", "--keep-edges", "--drop-punctuation", *files)
    frame, coefficients = (
        [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]
        for lines in ([line.split("\t") for line in open(name).read().splitlines()] for name in ("f.tsv", "c.tsv"))
    )
    names = [row["term"] for row in coefficients]
    assert {"length_x_frequency_2", "minute_0", "minute_2", "place_in_text", "s_2"} <= set(names)
    x = np.array([[float(row[name]) for name in names] for row in frame])
    b, se, _, _ = slow_fit(np.array([float(row["time"]) for row in frame]), x)
    assert [float(row["b"]) for row in coefficients] == pytest.approx(b.tolist(), rel=1e-4)
    assert [float(row["se"]) for row in coefficients] == pytest.approx(se.tolist(), rel=1e-4)
    lengths, counts = (x[:, names.index(name)] for name in ("length_1", "frequency_1"))
    product = x[:, names.index("length_x_frequency_1")]
    assert product == pytest.approx((lengths - lengths.mean()) * (counts - counts.mean()), abs=1e-5)
    assert not any(row["word"][-1] in STRIPPED for row in frame)
    assert {row["word_id"] for row in frame} >= {"1"}
    # The value of the control one word before, in the same text.
    at = {(str(row["sentence_id"]), str(row["word_id"])): i for i, row in enumerate(words)}
    for row in frame:
        i = at[row["sentence_id"], row["word_id"]]
        assert float(row["minute_1"]) == words[i - 1]["minute"] and words[i - 1]["document"] == row["document"]


# -------------------------------------------------------------------------------------------------------------- readers
def readers(count=4):
    rng = np.random.default_rng(9)
    slowness = rng.normal(0, 60, count)
    return [
        {**row, "subject": f"r{reader}", "rt": row["mean_rt"] and row["mean_rt"] + slowness[reader] + rng.normal(0, 40)}
        for reader in range(count)
        for row in WORDS
    ]


OF_READERS = ("subject", "sentence_id", "word_id", "word", "rt", "count")


def test_times_are_averaged_over_readers(tables, capsys):
    rows = readers()
    rows[5]["rt"], rows[9]["rt"] = 90.0, 5000.0
    write(tables / "rt.tsv", rows, OF_READERS)
    result, said = run(capsys, "s.tsv", "--times", "rt.tsv", "--frequencies", "count")
    times = {}
    for row in rows:
        if row["rt"] is not None and 100 < row["rt"] < 3000:
            times.setdefault((row["sentence_id"], row["word_id"]), []).append(row["rt"])
    means = {key: sum(values) / len(values) for key, values in times.items()}
    check(result, slow([{**row, "mean_rt": means.get((row["sentence_id"], row["word_id"]))} for row in WORDS]))
    assert f"2 of {len(rows):,} times are not in 100 to 3,000 ms" in said


def test_a_regression_for_each_reader(tables, capsys):
    rows = readers()
    few = [dict(row, subject="r9") for row in rows[:300]]
    write(tables / "rt.tsv", [*rows, *few], OF_READERS)
    result, said = run(capsys, "s.tsv", "--times", "rt.tsv", "--frequencies", "count", "--by-subject")
    own = [slow(of_reader(rows, reader)) for reader in range(4)]
    gains, b = [one["delta_ll"] for one in own], np.array([one["b"] for one in own])
    found, effect = result["tables"]["differences"][0], result["tables"]["effects"][0]
    assert found["delta_ll"] == pytest.approx(np.mean(gains), abs=1e-9)
    assert found["se"] == pytest.approx(np.std(gains, ddof=1) / 2, abs=1e-9)
    assert [effect[f"b_{k}"] for k in range(3)] == pytest.approx(b.mean(0).tolist(), rel=1e-6)
    assert [effect[f"t_{k}"] for k in range(3)] == pytest.approx((2 * b.mean(0) / b.std(0, ddof=1)).tolist(), rel=1e-6)
    assert "1 readers have too few words" in said and found["above_0"].endswith("of 4")


def test_a_control_that_differs_only_between_readers(tables, capsys):
    write(tables / "rt.tsv", [{**row, "age": 30 + int(row["subject"][1])} for row in readers()], (*OF_READERS, "age"))
    common = ("s.tsv", "--times", "rt.tsv", "--frequencies", "count", "--by-subject", "--control", "age")
    said = "reader r0: age_0 is 30 for all words: leave it out of --baseline or --control; or fit all readers together"
    assert f"{said} by --mixed" in fail(capsys, *common)
    result, _ = run(capsys, *common[:-3], "--mixed", "--folds", "2", "--control", "age")
    assert "age_0" in result["tables"]["baseline"][0]["columns"] and "age_1" not in str(result["tables"])


def of_reader(rows, reader):
    times = {(r["sentence_id"], r["word_id"]): r["rt"] for r in rows if r["subject"] == f"r{reader}"}
    return [{**row, "mean_rt": times.get((row["sentence_id"], row["word_id"]))} for row in WORDS]


def test_random_intercepts_of_readers(tables, capsys):
    rows = readers()
    write(tables / "rt.tsv", rows, OF_READERS)
    common = ("--frequencies", "count", "--mixed", "--folds", "2", "--coefficients", "c.tsv")
    result, _ = run(capsys, "s.tsv", "--times", "rt.tsv", *common)
    kept = [(reader, *one) for reader in range(4) for one in slow_columns(of_reader(rows, reader), "surprisal_bits")[0]]
    group, folds = np.array([r for r, *_ in kept]), np.array([(row["sentence_id"] - 1) % 2 for _, row, *_ in kept])
    y = np.array([row["mean_rt"] for _, row, *_ in kept])
    base = np.array([baseline for *_, baseline, _ in kept], float)
    full = np.column_stack([base, [values for *_, values in kept]])
    gain = slow_mixed_ll(y, full, group, folds) - slow_mixed_ll(y, base, group, folds)
    assert result["tables"]["differences"][0]["delta_ll"] == pytest.approx(gain.mean(), abs=1e-5)
    b, _, _ = slow_mixed(y, full, group)
    assert [result["tables"]["effects"][0][f"b_{k}"] for k in range(3)] == pytest.approx(b[-3:].tolist(), rel=1e-3)


def test_readers_may_have_equal_means(tables, capsys):
    """A random intercept without variance; statsmodels cannot invert it."""
    rng = np.random.default_rng(3)
    rows = [{**row, "rt": row["rt"] and 300 + rng.normal(0, 40)} for row in readers()]
    write(tables / "rt.tsv", rows, OF_READERS)
    result, _ = run(capsys, "s.tsv", "--times", "rt.tsv", "--frequencies", "count", "--mixed", "--folds", "2")
    assert np.isfinite(result["tables"]["differences"][0]["delta_ll"])


def slow_mixed(y, x, group):
    """Maximum likelihood with an intercept for each group: coefficients, intercepts, residual variance."""
    z = np.column_stack([np.ones(len(y)), x])
    best = None
    sums = {g: group == g for g in set(group)}
    for ratio in np.exp(np.linspace(math.log(0.05), math.log(50), 500)):
        a, c = z.T @ z, z.T @ y
        for inside in sums.values():
            share, s = ratio / (1 + ratio * inside.sum()), z[inside].sum(0)
            a, c = a - share * np.outer(s, s), c - share * s * y[inside].sum()
        b = np.linalg.solve(a, c)
        r = y - z @ b
        squares = r @ r - sum(ratio / (1 + ratio * i.sum()) * r[i].sum() ** 2 for i in sums.values())
        ll = -len(y) / 2 * math.log(squares / len(y)) - 0.5 * sum(math.log(1 + ratio * i.sum()) for i in sums.values())
        if best is None or ll > best[0]:
            own = {g: ratio / (1 + ratio * i.sum()) * r[i].sum() for g, i in sums.items()}
            best = ll, b, own, squares / len(y)
    return best[1:]


def slow_mixed_ll(y, x, group, folds):
    ll = np.zeros(len(y))
    for fold in set(folds):
        training = folds != fold
        b, own, variance = slow_mixed(y[training], x[training], group[training])
        for i in np.flatnonzero(~training):
            error = y[i] - b[0] - x[i] @ b[1:] - own[group[i]]
            ll[i] = -0.5 * math.log(2 * math.pi * variance) - error**2 / (2 * variance)
    return ll


# ----------------------------------------------------------------------------------------------------------------- join
COMMON = ("s.tsv", "--times", "rt.tsv", "--rt-column", "mean_rt", "--frequencies", "count")


def test_words_that_differ(tables, capsys):
    rows = [dict(row) for row in WORDS]
    for i in (10, 11, 300, 301):
        rows[i]["word"] = "other"
    write(tables / "rt.tsv", rows, OF_TIMES)
    error = fail(capsys, *COMMON)
    named = [f"'other' and {row['word']!r} at {row['sentence_id']}, {row['word_id']}; " for row in WORDS[10:12]]
    assert error.startswith("4 words of rt.tsv and s.tsv differ") and "".join(named) in error
    assert error.count("'other'") == 3 and "--allow-different-words" in error
    result, said = run(capsys, "--allow-different-words")
    check(result, slow([{**row, "mean_rt": None, "count": None} if rows[i]["word"] == "other" else row
                        for i, row in enumerate(WORDS)]))  # fmt: skip
    assert "4 words of rt.tsv differ from s.tsv and are left out" in said


def test_words_are_compared_without_typography(tables, capsys):
    pairs = {
        "England,": "England ,", "‘What": "`` What", "boar?'": "boar ? ''", "don’t": "don't",
        "long–run": "long-run", "(so)": "-LRB- so -RRB-", "--": "—", "“Yes”": '"Yes"',
    }  # fmt: skip
    for ours, theirs in pairs.items():
        assert plain_word(ours) == plain_word(theirs)
    assert plain_word("null") == "null" != plain_word("nil")
    rows = [dict(row) for row in WORDS]
    for i, word in enumerate(["null", "NA", '"', '"quoted', "nan", "1.10"]):
        rows[5 + i]["word"] = word
    write(tables / "s.tsv", rows, OF_SURPRISALS)
    write(tables / "rt.tsv", rows, OF_TIMES)
    check(run(capsys)[0], slow(rows))


def test_ids_are_text(tables, capsys):
    rows = [{**row, "sentence_id": f"1.{row['sentence_id']}"} for row in WORDS]
    write(tables / "s.tsv", rows, OF_SURPRISALS)
    write(tables / "rt.tsv", rows, OF_TIMES)
    assert run(capsys)[0]["data"]["words"] == slow()["words"]  # 1.1 and 1.10 are two sentences


def test_keys_that_name_several_rows(tables, capsys):
    rows = [{**row, "sentence_id": (row["sentence_id"] - 1) % 10 + 1, "part": row["document"]} for row in WORDS]
    write(tables / "rt.tsv", rows, (*OF_TIMES, "part"))
    error = fail(capsys, *COMMON)
    assert "rt.tsv: " in error and "rows have the same sentence_id, word_id as another, first 1, 1" in error
    assert "the column part tells them apart: add it to both tables, and pass --on part,sentence_id,word_id" in error
    write(tables / "s.tsv", [{**row, "part": row["document"]} for row in rows], (*OF_SURPRISALS, "part"))
    result, _ = run(capsys, "--on", "part,sentence_id,word_id")
    check(result, slow())  # sentences in order, as if they were numbered through all texts
    write(tables / "s.tsv", WORDS, OF_SURPRISALS)
    write(tables / "rt.tsv", rows, OF_TIMES)
    assert "no other column tells them apart" in fail(capsys, *COMMON)
    write(tables / "rt.tsv", [{**row, "Subject": f"r{k}"} for k in (1, 2) for row in WORDS], (*OF_TIMES, "Subject"))
    assert "the column Subject tells them apart: rename it to subject" in fail(capsys, *COMMON)


@pytest.mark.parametrize("names", [OF_TIMES, ("subject", "document", *OF_TIMES)])
def test_rows_that_were_pasted_twice(tables, capsys, names):
    rows = [{**row, "subject": "r1"} for row in (*WORDS[:30], *WORDS[10:13], *WORDS[30:], WORDS[5])]
    write(tables / "rt.tsv", rows, names)
    assert f"repeat rows before them: 31 to 33, {len(rows)}. Delete these rows" in fail(capsys, *COMMON)
    write(tables / "rt.tsv", [*rows[:30], *rows[33:-1]], names)
    check(run(capsys)[0], slow())


def test_regions_of_conditions(tables, capsys):
    """Joined by several columns, which the frame keeps for other programs; words may be missing."""
    places = {"item": "document", "condition": "sentence_id", "region": "word_id"}
    rows = [{**row, **{name: row[old] for name, old in places.items()}, "text": row["word"]} for row in WORDS]
    write(tables / "s.tsv", rows, (*OF_SURPRISALS, *places))
    write(tables / "rt.tsv", rows, (*places, "text", *OF_TIMES[3:]))
    on = ("--on", "item,condition,region")
    result, said = run(capsys, *on, "--write-frame", "f.tsv")
    check(result, slow())
    assert "rt.tsv has no column word, so the words were not compared. Rename the column of its words to word" in said
    names, *frame = (line.split("\t") for line in (tables / "f.tsv").read_text(encoding="utf-8").splitlines())
    kept = [dict(zip(names, line, strict=True)) for line in frame]
    assert names[:3] == list(places) and all(row["item"] == row["document"] for row in kept)
    assert all((row["condition"], row["region"]) == (row["sentence_id"], row["word_id"]) for row in kept)
    write(tables / "rt.tsv", rows, (*places, *OF_TIMES[2:]))
    assert "were not compared" not in run(capsys, *on)[1]


def test_no_row_joins(tables, capsys):
    write(tables / "s.tsv", [{**row, "item": row["sentence_id"]} for row in WORDS], ("item", *OF_SURPRISALS[2:]))
    write(tables / "rt.tsv", [{**row, "item": f"1-{row['sentence_id']}"} for row in WORDS], ("item", *OF_TIMES[1:]))
    error = fail(capsys, *COMMON)
    assert (
        "no row of rt.tsv fits a row of s.tsv by item, word_id. The ids of the tables begin with 1-1 1 and 1 1" in error
    )
    write(tables / "rt.tsv", WORDS, ("word", "mean_rt", "count"))
    error = fail(capsys, *COMMON)
    assert "no columns in common" in error and "has the columns word, mean_rt, count" in error and "--on A,B" in error
    error = fail(capsys, *COMMON, "--on", "nothing")
    assert "no column nothing; rt.tsv has" in error and "Rename columns, so that both tables have the same" in error


def test_a_part_of_the_rows_joins(tables, capsys):
    write(tables / "rt.tsv", WORDS[:-80], OF_TIMES)
    error, last = fail(capsys, *COMMON), WORDS[-80]
    assert f"80 of {len(WORDS)} words of s.tsv have no partner in the other table, first sentence_id, word_id" in error
    assert f"word_id = {last['sentence_id']} {last['word_id']}" in error and "add --partial" in error
    result, said = run(capsys, "--partial")
    changed = [{**row, "mean_rt": None, "count": None} if i >= len(WORDS) - 80 else row for i, row in enumerate(WORDS)]
    check(result, slow(changed))
    assert "80 of" in said


def test_columns_that_are_missing_or_no_numbers(tables, capsys):
    error = fail(capsys, "s.tsv", "--times", "rt.tsv")
    assert "column 'rt': rt.tsv has the columns sentence_id, word" in error and "Write --rt-column COLUMN" in error
    assert "Write --rt-column mean_rt" in fail(capsys, "s.tsv", "--times", "rt.tsv", "--rt-column", "Mean_RT")
    assert "names no column of surprisals. Write rt.tsv:COLUMN" in fail(capsys, "rt.tsv", *COMMON[1:])
    error = fail(capsys, "N=s.tsv:nae", *COMMON[1:])
    assert "there is no column 'nae': s.tsv has" in error and error.endswith("Write s.tsv:COLUMN")
    message = "'word', which is not a number. Write numbers, such as 0 and 1, or empty the field"
    assert message in fail(capsys, *COMMON, "--control", "word")
    assert "Write --control count" in fail(capsys, *COMMON, "--control", "Count")
    times, none = [row["mean_rt"] for row in WORDS], "in 'mean_rt', which is not a number"
    for bad, message in (
        ([*times[:3], "fast", *times[4:]], f"bad.tsv: row 4 has 'fast' {none}. Write numbers, or empty the field"),
        (["349,2"] * len(times), f"row 1 has '349,2' {none}. Write 349.2, with a point"),
        ([*times[:3], "inf", *times[4:]], f"bad.tsv: row 4 has 'inf' {none}"),
        ([250] * len(times), "all remaining reading times are 250"),
        # First words do not count.
        ([250 + (row["word_id"] == 1) for row in WORDS], "all remaining reading times are 250"),
    ):
        write(tables / "bad.tsv", [{**row, "mean_rt": t} for row, t in zip(WORDS, bad, strict=True)], OF_TIMES)
        assert message in fail(capsys, "s.tsv", "--times", "bad.tsv", "--rt-column", "mean_rt")
    # A word that a grammar cannot derive has no surprisal that a regression takes.
    endless = [{**row, "surprisal_bits": "inf" if i == 60 else row["surprisal_bits"]} for i, row in enumerate(WORDS)]
    write(tables / "s.tsv", endless, OF_SURPRISALS)
    assert "-5 no value of s, here or before" in run(capsys)[1]
    assert "--frequencies nothing is neither a file nor a column" in fail(capsys, *COMMON[:-1], "nothing")
    assert "no column 'subject'; rt.tsv has" in fail(capsys, *COMMON, "--by-subject")


def test_predictors_that_a_regression_cannot_see(tables, capsys):
    rows = [{**row, "one": 3.5, "sum": 2 * len(row["word"].strip(STRIPPED)) + row["word_id"]} for row in WORDS]
    write(tables / "s.tsv", rows, (*OF_SURPRISALS, "one", "sum"))
    assert "C_0 is 3.5 for all words: leave out C" in fail(capsys, "C=s.tsv:one", *COMMON[1:])
    error = fail(capsys, "S=s.tsv:sum", *COMMON[1:], "--spillover", "0")
    assert "S_0 is a weighted sum of length_0 and place_in_sentence: leave out S" in error


def test_too_few_words(tables, capsys):
    assert "is empty. There are 6 texts. Lower --folds" in fail(capsys, *COMMON, "--folds-by", "text")
    write(tables / "s.tsv", WORDS[:250], OF_SURPRISALS)
    write(tables / "rt.tsv", WORDS[:250], OF_TIMES)
    assert "words are too few for 12 coefficients" in fail(capsys, *COMMON)
    write(tables / "rt.tsv", [{**row, "mean_rt": None} for row in WORDS[:250]], OF_TIMES)
    assert "no word is left: 250 words; -250 no reading time" in fail(capsys, *COMMON)


def test_tables_with_a_text_per_item(tables, capsys):
    zones, count = [], {}
    for row in WORDS:
        count[row["document"]] = zone = count.get(row["document"], 0) + 1
        zones.append({**row, "item": row["document"], "zone": zone})
    write(tables / "s.tsv", zones, ("word", "zone", "item", "oov", "surprisal_bits"))
    write(tables / "rt.tsv", zones, ("zone", "item", *OF_TIMES))
    check(run(capsys)[0], slow())
    write(tables / "rt.tsv", zones, ("zone", "item", "word", "mean_rt", "count"))
    assert "no table says where sentences begin" in fail(capsys, *COMMON)


def test_paths_may_hold_an_equals_sign(tables, capsys):
    (tables / "a=b").mkdir()
    (tables / "s.tsv").rename(tables / "a=b" / "s.tsv")
    for given in ("a=b/s.tsv", "a=b/s.tsv:surprisal_bits", "s=a=b/s.tsv"):
        check(run(capsys, given, *COMMON[1:])[0], slow())


def test_sentences_without_texts_stand_alone(tables, capsys):
    write(tables / "s.tsv", WORDS, OF_SURPRISALS[1:])
    result, said = run(capsys)
    alone, _ = slow_columns([{**row, "document": row["sentence_id"]} for row in WORDS], "surprisal_bits")
    assert result["data"]["words"] == len(alone) and "every sentence is a text of its own" in said
    write(tables / "rt.tsv", WORDS, ("document", *OF_TIMES))
    check(run(capsys)[0], slow())


def test_rows_that_are_not_in_the_order_of_the_text(tables, capsys):
    orders = {
        "words": lambda row: (row["word_id"], row["sentence_id"]),
        "numbers as text": lambda row: (str(row["sentence_id"]), row["word_id"]),
        "backwards": lambda row: (row["sentence_id"], -row["word_id"]),
    }
    for names in (OF_SURPRISALS, OF_SURPRISALS[1:]):
        for order, key in orders.items():
            write(tables / "s.tsv", sorted(WORDS, key=key), names)
            if "document" in names or order != "numbers as text":  # texts of one sentence may have any order
                assert "Sort the rows by document, sentence_id and word_id" in fail(capsys, *COMMON)
    write(tables / "rt.tsv", sorted(WORDS, key=orders["words"]), OF_TIMES)
    write(tables / "s.tsv", WORDS, OF_SURPRISALS)
    check(run(capsys)[0], slow())


def test_texts_that_only_some_times_name(tables, capsys):
    """Words without a time lie in the text of the words around them, or nobody knows where."""
    write(tables / "s.tsv", WORDS, OF_SURPRISALS[1:])
    without = [{**row, "mean_rt": None, "count": None} if row["sentence_id"] in (3, 25) else row for row in WORDS]
    write(tables / "rt.tsv", [row for row in without if row["mean_rt"]], ("document", *OF_TIMES))
    check(run(capsys, "--partial")[0], slow([{**row, "count": row["mean_rt"] and row["count"]} for row in without]))
    write(tables / "rt.tsv", [row for row in WORDS if row["sentence_id"] != 11], ("document", *OF_TIMES))
    assert "Add a column document to s.tsv" in fail(capsys, *COMMON, "--partial")


# ------------------------------------------------------------------------------------------------------------- warnings
def test_times_in_seconds_and_in_the_row_before(tables, capsys):
    write(tables / "rt.tsv", [{**r, "mean_rt": r["mean_rt"] and r["mean_rt"] / 1000} for r in WORDS], OF_TIMES)
    assert "below 10: are they seconds?" in run(capsys)[1]
    skipped = [{**r, "mean_rt": r["mean_rt"] and (0 if i % 40 == 9 else r["mean_rt"])} for i, r in enumerate(WORDS)]
    write(tables / "rt.tsv", skipped, OF_TIMES)
    assert "reading times of 0 or less in 'mean_rt', such as 0, are used as they are" in run(capsys)[1]
    early = [{**row, "mean_rt": after["mean_rt"]} for row, after in zip(WORDS, [*WORDS[1:], WORDS[-1]], strict=True)]
    write(tables / "rt.tsv", early, OF_TIMES)
    assert "at the next word, but" in run(capsys)[1]


def test_a_predictor_that_works_backwards(tables, capsys):
    negative = [{**row, "surprisal_bits": row["surprisal_bits"] and -row["surprisal_bits"]} for row in WORDS]
    write(tables / "s.tsv", negative, OF_SURPRISALS)
    result, said = run(capsys)
    assert result["scores"]["delta_ll s"] == pytest.approx(slow()["delta_ll"], abs=1e-9)
    assert f"warning: the sum of b of s is {-slow()['b'].sum():.3g}" in said


def test_many_unknown_words(tables, capsys):
    rng = np.random.default_rng(3)
    rows = [{**row, "oov": int(rng.random() < 0.12)} for row in WORDS]
    write(tables / "s.tsv", rows, OF_SURPRISALS)
    result, said = run(capsys)
    check(result, slow(rows))
    kept = slow([{**row, "oov": 0} for row in rows])
    assert [row["predictor"] for row in result["tables"]["differences"]] == ["s", "s, --keep-oov"]
    assert result["tables"]["differences"][1]["delta_ll"] == pytest.approx(kept["delta_ll"], abs=1e-9)
    assert "a model does not know them" in said
    assert run(capsys, "--keep-oov")[0]["data"]["words"] == kept["words"]


def test_frequencies_of_a_file(tables, capsys):
    words = {row["word"].strip(STRIPPED): row["count"] for row in WORDS if row["count"] is not None}
    (tables / "counts.tsv").write_text("word\tcount\n" + "".join(f"{w}\t{c}\n" for w, c in list(words.items())[20:]))
    counted = dict(list(words.items())[20:])
    rows = [{**row, "count": counted.get(row["word"].strip(STRIPPED))} for row in WORDS]
    files = (*COMMON[:-1], "counts.tsv")
    check(run(capsys, *files)[0], slow(rows))
    with_zero = [{**row, "count": row["count"] or 0} for row in rows]
    check(run(capsys, *files, "--missing-frequency", "zero")[0], slow(with_zero))
    lines = (tables / "counts.tsv").read_text().split("\n", 1)[1]  # without a header
    (tables / "counts.tsv").write_text(lines)
    check(run(capsys, *files)[0], slow(rows))
    capitals = [{**row, "word": row["word"].capitalize()} for row in WORDS]
    write(tables / "s.tsv", capitals, OF_SURPRISALS)
    write(tables / "rt.tsv", capitals, OF_TIMES)
    check(run(capsys, *files)[0], slow(rows))
    write(tables / "s.tsv", WORDS, OF_SURPRISALS)
    write(tables / "rt.tsv", WORDS, OF_TIMES)
    assert run(capsys, *files)[0]["options"]["frequencies"] == "counts.tsv"
    (tables / "commas.tsv").write_text("the\t1,000\nthen\t2\n")
    assert "'1,000' in the first row is not a number" in fail(capsys, *COMMON[:-1], "commas.tsv")
    (tables / "logs.tsv").write_text("word\tcount\nthe\t3\nthen\t-4.5\n")
    assert "logs.tsv: row 2 has -4.5 in 'count', which is below 0" in fail(capsys, *COMMON[:-1], "logs.tsv")
    write(tables / "four.tsv", WORDS, OF_TIMES[:4])
    said = "four.tsv has the columns sentence_id, word_id, word, mean_rt. Name the column of words"
    assert said in fail(capsys, *COMMON[:-1], "four.tsv")
    ranked = "".join(f"0\t{line}\n" for line in lines.splitlines())
    (tables / "counts.tsv").write_text(f"rank\tword\tcount\n{ranked}")
    check(run(capsys, *files)[0], slow(rows))
    result, said = run(capsys, *COMMON[:-2])
    assert "no word frequency" in said and "frequency_0" not in result["tables"]["baseline"][0]["columns"]
    (tables / "tags.tsv").write_text("word\tpos\tcount\nrun\tV\t900\nrun\tN\t10\nrare\tJJ\t\n")
    assert counter("tags.tsv")("Run") == 910 and math.isnan(counter("tags.tsv")("rare"))
    for text, said in (("the\t-3\nthen\t4\n", "row 1 has -3"), ("the\t3\nthen\t-4\n", "row 2 has -4")):
        (tables / "bare.tsv").write_text(text)
        assert said in fail(capsys, *COMMON[:-1], "bare.tsv")
    write(tables / "rt.tsv", [{**row, "log_frequency": 2} for row in WORDS], (*OF_TIMES, "log_frequency"))
    assert "names logarithms. Name a column or a file of counts" in fail(capsys, *COMMON[:-1], "log_frequency")
    write(tables / "rt.tsv", WORDS, OF_TIMES)
    assert "frequency needs --frequencies" in fail(capsys, *COMMON[:-2], "--baseline", "frequency,length")
    assert "'lenght' is unknown" in fail(capsys, *COMMON, "--baseline", "lenght")


def test_frequencies_of_the_package_wordfreq(tables, capsys, monkeypatch):
    """Occurrences in a billion words; words without one, such as most of these invented ones, have no value."""
    found = {row["word"]: 1e9 * wordfreq.word_frequency(row["word"].strip(STRIPPED), "de") or None for row in WORDS}
    assert 100 < sum(value is None for value in found.values()) < len(found) - 50
    german = (*COMMON[:-1], "wordfreq:de", "--missing-frequency", "zero")
    result, _ = run(capsys, *german)
    check(result, slow([{**row, "count": found[row["word"]] or 0} for row in WORDS]))
    assert result["options"]["frequencies"] == "wordfreq:de" and result["versions"]["wordfreq"] >= "3"
    assert "frequencies wordfreq:de" in Path("r.md").read_text(encoding="utf-8")
    assert counter("wordfreq:en")("“The,") == 1e9 * wordfreq.word_frequency("the", "en") > 1e7
    assert math.isnan(counter("wordfreq:en")("qqzzqq"))
    said = fail(capsys, *COMMON[:-1], "wordfreq:xx")
    assert "wordfreq lacks 'xx'" in said and " ar, bg," in said
    monkeypatch.setitem(sys.modules, "jieba", None)
    assert "wordfreq:zh needs pip install 'wordfreq[cjk]'" in fail(capsys, *COMMON[:-1], "wordfreq:zh")
    monkeypatch.setitem(sys.modules, "wordfreq", None)
    assert "needs pip install 'wordfreq[cjk]'" in fail(capsys, *COMMON[:-1], "wordfreq:en")


def test_options_that_do_not_go_together(tables, capsys, monkeypatch):
    assert "the reading times are missing" in fail(capsys, "s.tsv")
    assert "go together" in fail(capsys, "s.tsv", "--preset", "sap")
    assert "--model reads only the text of a --preset" in fail(capsys, *COMMON[1:], "--model", "m")
    assert "either tables" in fail(capsys, *COMMON[1:])
    assert "--num-beams: without --model" in fail(capsys, *COMMON, "--num-beams", "5", "--num-beams", "9")
    assert "two columns are called 's'" in fail(capsys, "s.tsv", "s.tsv:other", *COMMON[1:])
    for name in ("length", "baseline"):
        assert f"two columns are called {name!r}" in fail(capsys, f"{name}=s.tsv", *COMMON[1:])
    assert "=s.tsv: the name is empty. Write NAME=s.tsv" in fail(capsys, "=s.tsv", *COMMON[1:])
    for name in ("time", "subject"):
        assert f"two columns are called {name!r}" in fail(capsys, *COMMON, "--control", name)
    assert "mean_rt is the time that the regression predicts" in fail(capsys, *COMMON, "--control", "mean_rt")
    sap = ("s.tsv", "--preset", "sap", "--data", ".")
    assert "--folds, --coefficients: --preset sap" in fail(capsys, *sap, "--folds", "5", "--coefficients", "c.tsv")
    assert "--slope: this belongs to --preset sap" in fail(capsys, *COMMON, "--slope", "2")
    assert "would overwrite an input" in fail(capsys, *COMMON, "--write-frame", "s.tsv")
    monkeypatch.setitem(sys.modules, "statsmodels", None)
    for name in [name for name in sys.modules if name.startswith("hf_synlm.evaluation.reading")]:
        monkeypatch.delitem(sys.modules, name)
    assert "pip install '.[reading]'" in fail(capsys, *COMMON)


def test_results_are_summarized_and_drawn(tables, capsys):
    seed = [{**row, "surprisal_bits": row["other"] if row["surprisal_bits"] else None} for row in WORDS]
    write(tables / "seed1.tsv", seed, OF_SURPRISALS)
    for seed, file in enumerate(("s.tsv", "seed1.tsv")):
        run(capsys, f"m={file}", *COMMON[1:])
        (tables / "r.json").rename(tables / f"{seed}.json")
    assert "| delta_ll m |" in commands.run(capsys, "evaluate", "summary", "0.json", "1.json")
    run(capsys, "A=s.tsv", "B=s.tsv:other", *COMMON[1:])
    assert main(["evaluate", "plot", "r.json", "--out", "r.svg"]) == 0
    picture = (tables / "r.svg").read_text()
    for text in ("A", "B", "words before", "Delta log-likelihood (nats per word), 95 % intervals"):
        assert f">{text}</text>" in picture
    assert main(["evaluate", "plot", "0.json", "1.json", "--label", "m", "--label", "m", "--out", "m.svg"]) == 0
    assert "Delta log-likelihood" in (tables / "m.svg").read_text()


# -------------------------------------------------------------------------------------------------------------- presets
def natural_stories(folder, times):
    """Files of Natural Stories that hold the invented texts; without the time of the first word of a story."""
    stories, trees, sentences = {}, [], {}
    for row in WORDS:
        story = row["document"][1:]
        zones = stories.setdefault(story, [])
        zones.append(row)
        leaves = sentences.setdefault(row["sentence_id"], [])
        word, place = row["word"], f"{story}.{len(zones)}"
        if word[-1] in ",.":  # in trees, punctuation is apart
            leaves += [f"(NN {word[:-1]}/{place}.1)", f"({word[-1]} {word[-1]}/{place}.2)"]
        else:
            leaves += [f"(NN {word}/{place})", "(NP (-NONE- *T*-1))"]
    trees = ["(ROOT\n  (S " + "\n    ".join(leaves) + "))" for leaves in sentences.values()]
    (folder / "parses").mkdir()
    (folder / "parses" / "all-parses-aligned.txt.penn").write_text("\n".join(trees) + "\n", encoding="utf-8")
    words = [f"{row['word']}\t{zone}\t{story}" for story, rows in stories.items() for zone, row in enumerate(rows, 1)]
    (folder / "all_stories.tok").write_text("word\tzone\titem\n" + "\n".join(words) + "\n", encoding="utf-8")
    counts = [
        f"{story}.{zone}.{kind}\t1\t{row['word']}\t{row['count'] if kind == 'word' else 7}\tNA"
        for story, rows in stories.items() for zone, row in enumerate(rows, 1) for kind in ("word", "token.1")
        if row["count"] is not None
    ]  # fmt: skip
    (folder / "freqs-1.tsv").write_text("\n".join(counts) + "\n", encoding="utf-8")
    lines = times(stories)
    (folder / lines[0]).write_text("\n".join(lines[1:]) + "\n", encoding="utf-8")
    tokens = ["token,logprob,offset,story"]
    for story, rows in stories.items():
        for k, row in enumerate(rows):
            pieces = [row["word"][:1], row["word"][1:]] if len(row["word"]) > 1 else [row["word"]]
            nats = (row["surprisal_bits"] or 0) * math.log(2) / len(pieces)
            for number, piece in enumerate(pieces):
                shown = f'"{" " * (k > 0 and number == 0)}{piece}"'
                tokens.append(f"{shown},{'' if row['surprisal_bits'] is None else -nats},0,{int(story) - 1}")
    (folder / "all_stories_gpt3.csv").write_text("\n".join(tokens) + "\n", encoding="utf-8")


def means_one_row_early(stories):
    lines = ["processed_wordinfo.tsv", "word\tzone\titem\tmeanItemRT"]
    for story, rows in stories.items():
        times = [*("" if row["mean_rt"] is None else row["mean_rt"] for row in rows[1:]), 999]
        for zone, (row, time) in enumerate(zip(rows, times, strict=True), 1):
            lines.append(f"{row['word']}\t{zone}\t{story}\t{time}")
    return lines


def times_of_readers(stories):
    lines = ["processed_RTs.tsv", "WorkerId\titem\tzone\tRT\tword\tcorrect"]
    for reader, change, correct in (("a", -20, 6), ("b", 20, 5), ("c", 500, 4), ("a", 77, 6)):
        for story, rows in stories.items():
            timed = [(zone, row) for zone, row in enumerate(rows, 1) if row["mean_rt"] is not None]
            lines += [f"{reader}\t{story}\t{z}\t{r['mean_rt'] + change}\t{r['word']}\t{correct}" for z, r in timed]
    return lines


def known_in_stories(first_has_time):
    """As the preset reads the words: no model knows or lacks them, and the first of a story may have no time."""
    rows, seen = [], set()
    for row in WORDS:
        timed = first_has_time or row["document"] in seen
        seen.add(row["document"])
        rows.append({**row, "oov": 0, "mean_rt": row["mean_rt"] if timed else None})
    return rows


@pytest.mark.parametrize("times", [means_one_row_early, times_of_readers])
def test_natural_stories(tables, capsys, times):
    natural_stories(tables, times)
    result, said = run(capsys, "gpt3=all_stories_gpt3.csv", "--preset", "natural-stories", "--data", ".")
    check(result, slow(known_in_stories(times is times_of_readers)))
    assert ("one row early" in said) == (times is means_one_row_early)
    count = sum(row["mean_rt"] is not None for row in WORDS)
    told = f"left out: {count} times of stories with fewer than 5 of 6 right answers, and {count} of stories read again"
    assert (told in said) == (times is times_of_readers)
    if times is means_one_row_early:
        (tables / "all_stories.tok").unlink()
        error = fail(capsys, "s.tsv", "--preset", "natural-stories", "--data", ".")
        assert "--data . holds no all_stories.tok. Name a clone of" in error


def test_a_model_reads_the_stories(tables, capsys):
    natural_stories(tables, means_one_row_early)
    model = str(Path(__file__).parents[2] / "model_cards" / "on-lstm-syd-tiny")
    preset = ("--preset", "natural-stories", "--data", ".", "--keep-oov", "--times", "rt.tsv", "--rt-column", "mean_rt")
    text = {}
    for row in WORDS:
        text.setdefault((row["document"], row["sentence_id"]), []).append(row["word"])
    lines = [f"{document}\t{' '.join(words)}" for (document, _), words in text.items()]
    (tables / "text.tsv").write_text("document\tsentence\n" + "\n".join(lines) + "\n", encoding="utf-8")
    for context in ([], ["--context", "sentence"]):
        found, _ = run(capsys, *preset, "--model", model, *context)
        own = context or ["--context", "document"]
        assert main(["surprisal", "text.tsv", "--model", model, "--out", "m.tsv", "--overwrite", *own]) == 0
        expected, _ = run(capsys, "m.tsv", *preset)
        difference = found["tables"]["differences"][0]
        assert difference["delta_ll"] == pytest.approx(expected["tables"]["differences"][0]["delta_ll"], abs=1e-6)
        assert difference["predictor"] == "on-lstm-syd-tiny" and difference["unknown_percent"] > 50
        assert found["model"]["architecture"] and found["tables"]["predictors"][0]["context"] == own[1]


def test_a_model_that_reads_single_sentences(tables, capsys):
    natural_stories(tables, means_one_row_early)
    model = str(Path(__file__).parents[2] / "model_cards" / "rnng-tiny")
    beams = ("--num-beams", "1", "--action-beam-size", "4", "--keep-oov")
    result, said = run(capsys, "--preset", "natural-stories", "--data", ".", "--model", model, *beams)
    assert "each sentence is read alone (--context sentence): RNNGForCausalLM reads one sentence" in said
    assert result["tables"]["predictors"][0]["context"] == "sentence"


def sap_items(folder):
    """Eight pairs of each construction; the critical word is the fourth."""
    nouns = "dog cat man boy girl king bird fish".split()
    agreement = [
        f'{k},{condition},4,"The {noun} \'always {verb} very well here."'
        for k, noun in enumerate(nouns) for condition, verb in (("UNAGREE", "sing"), ("AGREE", "sings"))
    ]  # fmt: skip
    table = "\n".join(["item,condition,disambPosition,Sentence", *agreement])
    (folder / "items_Agreement.csv").write_text(f"{table}\n")
    gardens = [
        f"{k},NPZ_UAMB,5,When it ran {noun} fell down now.,4,When ran {noun} fell down now."
        for k, noun in enumerate(nouns)
    ]
    names = "item,condition,disambPositionUnamb,unambiguous,disambPositionAmb,ambiguous"
    (folder / "items_ClassicGP.csv").write_text("\n".join([names, *gardens]) + "\n")
    pairs = [(f"The {n} 'always sing very well here.", f"The {n} 'always sings very well here.") for n in nouns]
    return {
        "Agreement": (pairs, 3, 3),
        "NPZ": ([(f"When ran {n} fell down now.", f"When it ran {n} fell down now.") for n in nouns], 3, 4),
    }


def test_effects_of_items(tables, capsys):
    constructions = sap_items(tables)
    rng = np.random.default_rng(1)
    values, lines, ms = {}, ["sentence_id\tword_id\tword\tsurprisal_nats"], {}
    sentences = [sentence for pairs, *_ in constructions.values() for pair in pairs for sentence in pair]
    for number, sentence in enumerate(sentences, 1):
        values[sentence] = rng.gamma(2, 2, len(sentence.split())).tolist()
        lines += [
            f"{number}\t{k}\t{w}\t{v}"
            for k, (w, v) in enumerate(zip(sentence.split(), values[sentence], strict=True), 1)
        ]
    (tables / "n.tsv").write_text("\n".join(lines) + "\n")
    effects = ["effect\titem\troi\trt_effect_ms"]
    for name, (pairs, *_) in (("Agr", constructions["Agreement"]), ("GPE_NPZ", constructions["NPZ"])):
        for item in range(len(pairs)):
            for region in range(3):
                ms[name[-3:], item, region] = float(rng.normal(60, 20))
                effects.append(f"{name}\t{item}\t{region}\t{ms[name[-3:], item, region]}")
    preset = ("n.tsv", "--preset", "sap", "--data", ".")
    assert "--data . holds no effects_by_item.tsv with effect, item" in fail(capsys, *preset)
    (tables / "effects_by_item.tsv").write_text("\n".join(effects) + "\n")
    assert "two predictors are called 'n'" in fail(capsys, "n.tsv", *preset)
    result, said = run(capsys, *preset, "--slope", "3")
    assert "equal surprisals" not in said
    rows = {(row["construction"], row["region"]): row for row in result["tables"]["effects by item"]}
    assert len(rows) == 6
    for name, (pairs, critical, control) in constructions.items():
        for region in range(3):
            bits = [(values[a][critical + region] - values[b][control + region]) / math.log(2) for a, b in pairs]
            human = [ms[{"Agreement": "Agr", "NPZ": "NPZ"}[name], item, region] for item in range(8)]
            row = rows[name, region]
            assert row["ms"] == pytest.approx(np.mean(human)) and row["bits"] == pytest.approx(np.mean(bits))
            slope = sum(x * y for x, y in zip(bits, human, strict=True)) / sum(x * x for x in bits)
            assert row["ms_per_bit"] == pytest.approx(slope) and row["items"] == 8
            assert row["r"] == pytest.approx(np.corrcoef(bits, human)[0, 1]) and row["low"] < row["r"] < row["high"]
            assert row["predicted_share"] == pytest.approx(3 * np.mean(bits) / np.mean(human))
    same = [line if k == 0 else f"{line.rpartition(chr(9))[0]}\t2.5" for k, line in enumerate(lines)]
    (tables / "same.tsv").write_text("\n".join(same) + "\n")
    found, said = run(capsys, "same.tsv", *preset[1:], "--slope", "3")
    assert "same gives both sentences of NPZ equal surprisals in region 2" in said
    for row in found["tables"]["effects by item"]:
        assert row["bits"] == 0 and row["r"] is None and row["ms_per_bit"] is None and row["predicted_share"] == 0
    (tables / "effects_by_item.tsv").write_text("\n".join(effects[:7]) + "\n")
    error = fail(capsys, *preset)
    assert "Agreement has 2 items with times and surprisals in region 0. A correlation needs at least 3" in error
    (tables / "effects_by_item.tsv").write_text("\n".join(effects) + "\n")
    raw = ["construction\titem\tcondition\troi\trt"]
    for (name, item, region), effect in ms.items():
        name = {"Agr": "Agreement"}.get(name, name)
        raw += [
            f"{name}\t{item}\t{c}\t{region}\t{400 + (c == 'critical') * effect + d}"
            for c in ("control", "critical")
            for d in (-9, 9)
        ]
    (tables / "raw.tsv").write_text("\n".join(raw) + "\n")
    assert run(capsys, *preset, "--slope", "3", "--times", "raw.tsv")[0]["scores"] == pytest.approx(result["scores"])


def test_several_widths_of_the_beam(tables, capsys):
    sap_items(tables)
    effects = [f"Agr\t{item}\t{region}\t{item * 7 % 5}" for item in range(8) for region in range(3)]
    (tables / "effects_by_item.tsv").write_text("effect\titem\troi\trt_effect_ms\n" + "\n".join(effects) + "\n")
    model = str(Path(__file__).parents[2] / "model_cards" / "rnng-tiny")
    beams = ("--num-beams", "1", "--num-beams", "2", "--action-beam-size", "4", "--tokenize", "ptb")
    asked = ("--belief-update", "old", "--belief-order", "2")
    result, said = run(capsys, "--preset", "sap", "--data", ".", "--model", model, *beams, *asked)
    assert "rnng-tiny beam 1 does not know 16 of 16 critical words, and " in said
    rows = result["tables"]["effects by item"]
    names = [f"rnng-tiny beam {width}{more}" for width in (1, 2) for more in ("", " old beliefs, order 2")]
    assert [row["predictor"] for row in rows] == [name for name in names for _ in range(3)]
    # A beam of one has no beliefs to change.
    assert not any(row["bits"] for row in rows[3:6]) and any(row["bits"] for row in rows[9:])
