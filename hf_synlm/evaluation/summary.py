# SPDX-License-Identifier: Apache-2.0
"""Means and standard deviations of results over runs, such as several seeds; never over different conventions."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_synlm.evaluation.results import SUMMARY_FORMAT, EvaluationResult, PathLike, Row, json_text, load_result

# How many texts did not fit the positions of the model.
_CUTS = ("texts_in_windows", "contexts_cut")
# Options that say what is counted; others, such as the beam, belong to a model.
_RULES = (
    "convention", "unlabeled", "punctuation", "unit", "context", "tokenize", "pairs_per_group", "pairs_per_paradigm",
    "spillover", "baseline", "interaction", "controls", "log_rt", "by_subject", "mixed", "folds", "folds_by",
)  # fmt: skip
# Scores that a picture shows where none are named, by task: names, or their beginnings.
_SHOWN = {
    "syntaxgym": ("mean_", "circuit "),
    "blimp": ("mean_", "phenomenon "),
    "parsing": ("f1", "sentence_drop", "corpus_drop", "sentence_count", "corpus_count"),
    "perplexity": ("word_perplexity",),
    "pairs": ("accuracy", "mean_"),
    "reading": ("delta_ll ",),
}


def load_runs(paths: Sequence[PathLike]) -> list[EvaluationResult]:
    """Read the results of several runs; a file that is given twice is refused."""
    counts = Counter(Path(path).resolve() for path in paths)
    twice = [str(path) for path in paths if counts[Path(path).resolve()] > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given more than once. Give each run once")
    return [load_result(path) for path in paths]


def summarize(results: Sequence[EvaluationResult]) -> list[Row]:
    """Mean, standard deviation (of a sample; None for one run), minimum and maximum of each score over runs.

    The runs must agree in everything but the seed, so that no mean mixes conventions.
    """
    first = results[0]
    for other in results[1:]:
        _check_alike(first, other, options=lambda result: result.options, data=_content, models=_kind)
        if set(first.scores) != set(other.scores):
            differing = ", ".join(sorted(set(first.scores) ^ set(other.scores)))
            raise ValueError(f"results with different scores cannot be compared: {differing}")
    return [_row(name, [result.scores[name] for result in results]) for name in first.scores]


def _row(name: str, values: Sequence[float]) -> Row:
    deviation = None
    if len(values) > 1:  # a run may have diverged
        deviation = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return {
        "score": name,
        "mean": statistics.fmean(values),
        "standard_deviation": deviation,
        "minimum": min(values),
        "maximum": max(values),
        "runs": len(values),
    }


def summary_to_json(paths: Sequence[PathLike], results: Sequence[EvaluationResult], rows: Sequence[Row]) -> str:
    """The rows of `summarize` as a JSON document that names the runs and what is common to them."""
    fields = {
        "format": SUMMARY_FORMAT,
        "format_version": 1,
        "task": results[0].task,
        "options": {key: value for key, value in results[0].options.items() if key != "seed"},
        "data": _content(results[0]),
        "runs": [
            {"file": str(path), "model": result.model, "seed": result.options.get("seed")}
            for path, result in zip(paths, results, strict=True)
        ],
        "scores": list(rows),
    }
    return json_text(fields)


def scores_of_groups(
    results: Sequence[EvaluationResult], labels: Sequence[str], wanted: Sequence[str] = ()
) -> tuple[list[str], dict[str, list[float]], dict[str, list[float | None]]]:
    """Scores of several models, each a group of runs: names, and by group their means and standard deviations.

    `wanted` holds names of scores, or their beginnings; empty = those that tell most about the task.
    """
    first = results[0]
    for other in results[1:]:
        _check_alike(first, other, data=_content, rules=_rules)
    chosen = tuple(wanted) or _SHOWN.get(first.task, ("",))
    names = [name for name in first.scores if any(name == k or (k[-1:] in " _" and name.startswith(k)) for k in chosen)]
    if not wanted and "sentence_drop" in names:
        names.remove("f1")  # one of the four, by the convention
    missing = [k for k in wanted if not any(name.startswith(k) for name in names)]
    if missing or not names:
        raise ValueError(f"results have no score {', '.join(missing or chosen)}, only {', '.join(first.scores)}")
    means: dict[str, list[float]] = {}
    deviations: dict[str, list[float | None]] = {}
    for label in dict.fromkeys(labels):
        runs = [result for result, own in zip(results, labels, strict=True) if own == label]
        rows = {row["score"]: row for row in summarize(runs)}
        lacking = [name for name in names if name not in rows]
        if lacking:
            raise ValueError(f"the results of {label!r} have no {', '.join(lacking)}")
        means[label] = [rows[name]["mean"] for name in names]
        deviations[label] = [rows[name]["standard_deviation"] for name in names]
    return names, means, deviations


def _check_alike(
    first: EvaluationResult, other: EvaluationResult, **parts: Callable[[EvaluationResult], Mapping[str, Any]]
) -> None:
    """Raise ValueError unless two results are of one task and have equal parts, the seed left out."""
    if other.task != first.task:
        raise ValueError(f"the results are of different tasks, {first.task} and {other.task}. Give results of one task")
    for name, part in parts.items():
        ours, theirs = part(first), part(other)
        differing = sorted(key for key in {*ours, *theirs} - {"seed"} if ours.get(key) != theirs.get(key))
        if differing:
            shown = "; ".join(f"{key} is {ours.get(key)!r} and {theirs.get(key)!r}" for key in differing)
            raise ValueError(
                f"results with different {name} cannot be compared: {shown}. (Runs of one model with different seeds "
                "can be compared. `synlm evaluate compare` tests the trees of two parsers.)"
            )


def _rules(result: EvaluationResult) -> dict[str, Any]:
    """What must be counted alike. Sums over given trees compare with each other only."""
    options = {"tokenize": "words", **result.options}  # earlier versions named other ways only
    rules = {key: options.get(key) for key in _RULES}
    rules["sums over given trees"] = result.options.get("estimator") == "proposals"
    # Perplexities with the ends have a name of their own.
    if result.task != "perplexity":
        rules["ends of sentences counted"] = result.options.get("end_of_text") != "not counted"
    return rules


def _kind(result: EvaluationResult) -> dict[str, Any]:
    """What runs of one model have in common."""
    return {key: result.model.get(key) for key in ("architecture", "num_parameters", "dtype")}


def _content(result: EvaluationResult) -> dict[str, Any]:
    """The data without the places and the order of the files, and without what a tokenizer makes of them."""
    files = [{k: v for k, v in file.items() if k != "path"} for file in result.data.get("files", [])]
    files.sort(key=json_text)
    return {**{k: v for k, v in result.data.items() if k not in ("files", *_CUTS)}, "files": files}
