"""SyntaxGym: formulas, surprisals of regions, means over suites and circuits, and files that are wrong."""

import copy
import csv
import functools
import json
import math
import operator
import statistics
from pathlib import Path

import pytest

from hf_synlm.evaluation.suites.formulas import Formula
from hf_synlm.evaluation.suites.syntaxgym import (
    CIRCUITS,
    accuracies,
    circuit_of,
    evaluate_syntaxgym,
    find_suites,
    load_suite,
    score_regions,
    summary,
    surprisals_of,
)
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.text_items import TextItem
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import scorer_of, tokenizer_of

# Stimuli of our own in the format of the suites: an agreement suite with an empty region and odd white space.
SUITE = {
    "meta": {"name": "own_agreement", "metric": "sum"},
    "region_meta": {"1": "subject", "2": "modifier", "3": "verb", "4": "rest"},
    "predictions": [
        {"type": "formula", "formula": "[(3;%match%) < (3;%mismatch%)]"},
        {"type": "formula", "formula": "(verb;%match%) + (4;%match%) < (3;%mismatch%) + (rest;%mismatch%)"},
        {"type": "formula", "formula": "(*;%match%) < (*;%mismatch%) | (2;%match%) = (2;%mismatch%)"},
    ],
    "items": [],
}
STIMULI = [
    ("The keys", " to the cabinet ", "are", "is"),
    ("A child", "", "sleeps", "sleep"),
    ("We", "  ", "ask", "asks"),
]


def region_surprisals(scorer, suite):
    return list(map(surprisals_of, score_regions(scorer, [suite])[0]))


def condition(name, *contents):
    regions = [{"region_number": k, "content": content} for k, content in enumerate(contents, 1)]
    return {"condition_name": name, "regions": regions}


def suite_data():
    data = copy.deepcopy(SUITE)
    for number, (subject, modifier, right, wrong) in enumerate(STIMULI, 1):
        conditions = [
            condition("match", subject, modifier, right, "here today."),
            condition("mismatch", subject, modifier, f" {wrong}", "here  today."),
        ]
        data["items"].append({"item_number": number, "conditions": conditions})
    return data


def write_suite(folder, data):
    path = folder / "own_agreement.json"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path


@pytest.fixture
def suite_file(tmp_path):
    return write_suite(tmp_path, suite_data())


# ------------------------------------------------------------------------------------------------------ formulas
VALUES = {("a", 1): 1.0, ("a", 2): 2.5, ("b", 1): 1.0, ("b", 2): 4.0, ("b-c_d", 3): 0.0}


FORMULAS = [
    ("(1;%a%) < (2;%a%)", True),
    ("(1;%a%)>(2;%a%)", False),
    ("(1;%a%) = (1;%b%)", True),
    ("(2;%a%) = (2;%b%)", False),
    ("(2;%a%) - (1;%a%) + (1;%b%) = 2.5", True),  # from the left, not 2.5 - (1 + 1)
    ("(2;%a%) - [(1;%a%) + (1;%b%)] = .5", True),
    ("[[(2;%b%) - (2;%a%)] > [(1;%b%) - (1;%a%)]]", True),
    ("((1;%a%) < (2;%a%)) & ((2;%b%) < (2;%a%))", False),
    ("(1;%a%) < (2;%a%) | (1;%a%) < (2;%a%) & (2;%b%) < (1;%a%)", True),  # & binds tighter
    ("[(1;%a%) < (2;%a%) | (1;%a%) < (2;%a%)] & (2;%b%) < (1;%a%)", False),
    ("(*;%b%) = 5", True),
    ("( verb ; %a% ) = 2.5", True),
    ("-(2;%a%) < -(1;%a%)", True),
    ("(3;%b-c_d%) = 0.0005", True),  # within the tolerance
    ("(3;%b-c_d%) = 0.002", False),
    ("1e3 > 999.5", True),
    ("9 - 5 - 3 < 2 & 1 < 2 | 3 < 2", True),
    ("(1 + 2) - (3 - 4) = 4 & [2 < 1 | 1 < 2] & 3 > 4", False),
]


@pytest.mark.parametrize(("formula", "expected"), FORMULAS)
def test_formulas(formula, expected):
    assert Formula(formula, {"verb": 2})(VALUES) is expected


def test_what_is_no_formula():
    refused("is a number", Formula, "(1;%a%)")
    refused("never closed", Formula, "[(1;%a%) < (2;%a%)")
    refused("does not match", Formula, "((1;%a%) < (2;%a%)]")
    refused("chain", Formula, "(1;%a%) < (2;%a%) < (1;%b%)")
    refused("truth values", Formula, "(1;%a%) & (2;%a%)")
    refused("numbers", Formula, "((1;%a%) < (2;%a%)) < 3")
    refused("__import__", Formula, "(1;%a%) < __import__('os')")
    refused("a region, a number or a bracket", Formula, "(1;%a%) < [(2;%a%)] [1]")
    refused("''", Formula, "")


# ------------------------------------------------------------------------------------------------------- regions
@pytest.mark.parametrize("architecture", ["gpst", "rnng_pieces", "palm", "gpt2"])
def test_surprisals_of_regions_are_sums_over_their_words(architecture, suite_file):
    scorer, suite = scorer_of(architecture), load_suite(suite_file)
    items = region_surprisals(scorer, suite)
    for values, (subject, modifier, right, wrong) in zip(items, STIMULI, strict=True):
        for name, verb in (("match", right), ("mismatch", wrong)):
            text = " ".join(f"{subject} {modifier} {verb} here today.".split())
            (found,) = score_words(scorer, [TextItem("", text)])
            bits = (-found.log_probs / math.log(2)).tolist()
            sizes = [len(subject.split()), len(modifier.split()), 1, 2]
            for region, size in enumerate(sizes, 1):
                expected, bits = sum(bits[:size]), bits[size:]
                assert values[name, region] == pytest.approx(expected, abs=1e-3)
    assert items[1]["match", 2] == 0.0  # an empty region


@pytest.mark.parametrize(
    ("metric", "expected"),
    [("mean", statistics.fmean), ("median", statistics.median), ("max", max), ("min", min),
     ("range", lambda values: max(values) - min(values))],
)  # fmt: skip
def test_other_metrics_of_regions(metric, expected, tmp_path):
    data = suite_data()
    data["meta"]["metric"] = metric
    scorer = scorer_of("gpt2")
    values = region_surprisals(scorer, load_suite(write_suite(tmp_path, data)))
    (found,) = score_words(scorer, [TextItem("", "The keys to the cabinet are here today.")])
    pieces = [-p / math.log(2) for _, p in found.tokens][: sum(found.num_tokens[:2].tolist())]
    assert values[0]["match", 1] == pytest.approx(expected(pieces), abs=1e-4)
    assert values[1]["match", 2] == 0.0


# --------------------------------------------------------------------------------------------------------- means
def test_accuracy_of_suites(suite_file):
    scorer, suite = scorer_of("gpt2"), load_suite(suite_file)
    values = region_surprisals(scorer, suite)
    found = accuracies(suite, values)
    assert found[0] == pytest.approx(sum(v["match", 3] < v["mismatch", 3] for v in values) / 3)
    assert found[2] == 1.0  # the sentences are equal up to region 2
    result = evaluate_syntaxgym(scorer, [suite_file], options={"seed": 3})
    assert result.scores == {"mean_over_suites": found[0], "suite own_agreement": found[0]}
    assert [row["accuracy"] for row in result.tables["Predictions"]] == found
    assert result.options["seed"] == 3 and len(result.data["files"][0]["sha256"]) == 64


def test_unknown_words_in_what_a_formula_reads(tmp_path):
    """Words that stand for themselves in the vocabulary of the recurrent models, and one that does not."""
    known = {word for word in tokenizer_of("framed_words").get_vocab() if word.isalpha() and word.islower()}
    first, second = sorted(known)[:2]
    data = suite_data()
    data["items"] = [
        {"item_number": k, "conditions": [condition("match", *match), condition("mismatch", *mismatch)]}
        for k, (match, mismatch) in enumerate([
            (("xyzzy", "", first, second), ("xyzzy", "", second, second)),  # only outside of the first formula
            ((first, "", "xyzzy", second), (first, "", second, second)),
        ])
    ]  # fmt: skip
    path = write_suite(tmp_path, data)
    rows = evaluate_syntaxgym(scorer_of("palm"), [path]).tables["Predictions"]
    assert [row["items_with_unknown_words"] for row in rows] == [1, 1, 2]  # the last one reads all regions
    assert all(row["items_with_unknown_words"] == 0 for row in evaluate_syntaxgym(
        scorer_of("gpt2"), [path]).tables["Predictions"])  # fmt: skip


def test_published_accuracies_of_circuits():
    folder = Path(__file__).parents[1] / "goldens" / "syntaxgym"
    suites, circuits = (
        list(csv.DictReader((folder / f"published_{name}.csv").open(encoding="utf-8")))
        for name in ("suites", "circuits")
    )
    models = [name for name in suites[0] if name != "suite"]
    assert len(models) == 6 and len(suites) == 34 and [row["circuit"] for row in circuits][-1] == "ALL"
    for model in models:
        scores = summary({row["suite"]: float(row[model]) for row in suites})
        for row in circuits:
            name = "mean_31_suites" if row["circuit"] == "ALL" else f"circuit {row['circuit']}"
            assert scores[name] == pytest.approx(float(row[model]), abs=1e-4), (model, name)
        means = [scores[f"circuit {name}"] for name in CIRCUITS]
        assert len(means) == 6 and scores["mean_6_circuits"] == pytest.approx(sum(means) / 6)
    # A suite is missing: there is no mean over its circuit.
    fewer = summary({row["suite"]: float(row[models[0]]) for row in suites if row["suite"] != "number_src"})
    assert set(fewer) == {"mean_over_suites", *(f"circuit {name}" for name in CIRCUITS if name != "Agreement")}
    assert circuit_of("mvrr") == "Garden-Path Effects" and circuit_of("nn-nv-rpl") is None


# --------------------------------------------------------------------------------------------------------- files
WRONG_SUITES = [
    (("predictions", 0, "formula"), "(3;%plural%) < (3;%match%)", "'plural'.* match, mismatch"),
    (("predictions", 0, "formula"), "(9;%match%) < (3;%match%)", "no region 9"),
    (("meta", "metric"), "product", "metric 'product'"),
    (("predictions", 0, "formula"), "(noun;%match%) < (3;%match%)", r"prediction 0: formula '\(noun.*region 'noun'"),
    (("predictions", 1, "formula"), "(3;%match%) <= 2", "prediction 1: formula '.*' cannot be read: .* join"),
    (("predictions", 1, "formula"), "2 * (3;%match%) < 1", r"prediction 1: .*'\* \(3;%match%' is unknown"),
    (("predictions", 1, "formula"), "(3;%50% off%) < 1", "without % in its name"),
    (("predictions", 1), "(3;%match%) < 1", "prediction 1: '.*' is not part of a SyntaxGym suite, .* lacks 'type'"),
    (("predictions", 0, "type"), "script", "prediction 0: its type is 'script'"),
    (("meta",), {}, "lacks 'name'"),
    (("items", 1, "item_number"), "1a", r"items\[1\]: item_number is '1a'. Give a whole number"),
    (("items", 1, "item_number"), 1, "item 1: it occurs twice"),
    (("items", 1, "conditions", 0, "regions", 0, "content"), None, "item 2: condition 'match': content is None"),
    (("items", 1, "conditions", 0, "regions", 0, "region_number"), "1a", "item 2: .*region_number is '1a'"),
    (("items", 1, "conditions", 0), condition("match", "", " ", ""), "item 2: condition 'match': .* no words"),
    (("items", 1, "conditions", 0, "condition_name"), "mismatch", "item 2: it has the condition 'mismatch' twice"),
    (("items", 1, "conditions", 0, "regions", 0, "region_number"), 3, "has the region 3 twice"),
]


@pytest.mark.parametrize(("path", "value", "message"), WRONG_SUITES)
def test_suites_that_are_wrong(tmp_path, path, value, message):
    data = suite_data()
    part = functools.reduce(operator.getitem, path[:-1], data)
    part[path[-1]] = value
    refused(rf"own_agreement\.json: .*{message}", load_suite, write_suite(tmp_path, data))


def test_a_byte_order_mark_is_read(suite_file):
    suite = load_suite(suite_file)
    suite_file.write_bytes(b"\xef\xbb\xbf" + suite_file.read_bytes())
    assert load_suite(suite_file).items == suite.items


def test_suites_that_are_not_there(suite_file, tmp_path):
    assert find_suites(tmp_path) == find_suites(suite_file) == find_suites(tmp_path, ["own_agreement"]) == [suite_file]
    (tmp_path / "empty").mkdir()
    for name, text in (("text", "text"), ("deep", "[" * 100_000), ("zero", "\x00"), ("nothing", "")):
        (tmp_path / f"{name}.json").write_text(text)
    for call, arguments, message in (
        (find_suites, (suite_file, ["nothing"]), "nothing in .*own_agreement"),
        (find_suites, (tmp_path / "empty",), "empty"),
        (find_suites, (tmp_path / "missing",), "missing"),
        (load_suite, (tmp_path / "missing.json",), "missing.json"),
        *((load_suite, (tmp_path / f"{name}.json",), name) for name in ("text", "deep", "zero", "nothing")),
        (evaluate_syntaxgym, (scorer_of("gpt2"), [suite_file, suite_file]), "own_agreement"),
    ):
        refused(message, call, *arguments)
