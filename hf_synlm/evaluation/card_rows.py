"""Results of evaluations as rows of a model card: the number, and everything that it depends on.

    synlm evaluate parsing ... --out f1.json
    synlm export MODEL --out FOLDER --results f1.json

A row names beam width and estimator, the convention of what is counted, the seed and the hardware, and the same number
for trees that need no model. Without these a number on a card says little.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_synlm.evaluation.results import EvaluationResult

# By task, the scores that a card states; the JSON file holds the others.
CARD_SCORES = {
    "parsing": ("f1",),
    "perplexity": ("word_perplexity",),
    "syntaxgym": ("mean_over_suites",),
    "blimp": ("accuracy",),
    "pairs": ("accuracy",),
}
_OTHER_WIDTHS = {"action_beam_size": "action beam", "fast_track_size": "fast track"}


def card_rows(
    result: EvaluationResult, *, dataset: str | None = None, split: str = "all", command: str | None = None
) -> list[dict[str, Any]]:
    """Rows of `fill_card`'s `results` that state an evaluation.

    Args:
        result: of one model, as `synlm evaluate` writes it.
        dataset: what was measured on; by default the names of the files.
        split: part of the dataset; by default all of the files.
        command: what reproduces the number; by default the command line that made the result.

    Returns:
        One row per score in `CARD_SCORES`.

    Raises:
        ValueError: a card has no place for results of this task, or the scores lack the number.
    """
    if result.task not in CARD_SCORES:
        raise ValueError(f"a card has no place for results of {result.task!r}: known are {', '.join(CARD_SCORES)}")
    rows = []
    for score in CARD_SCORES[result.task]:
        value = result.scores.get(score)
        if value is None or not math.isfinite(value):
            raise ValueError(f"the result of {result.task} has no number {score!r} (it has {', '.join(result.scores)})")
        row = {
            "task": result.task,
            "dataset": dataset or ", ".join(Path(file["path"]).name for file in result.data.get("files", ())) or "text",
            "split": split,
            "metric": score,
            "value": round(float(value), 4),
            **_estimate(result),
            "convention": _convention(result),
            "seed": result.options.get("seed"),
            "hardware": _hardware(result),
            "baselines": _baselines(result),
            "command": command or result.command,
        }
        rows.append({key: item for key, item in row.items() if item or key in ("num_beams", "estimator", "seed")})
    return rows


def _estimate(result: EvaluationResult) -> dict[str, Any]:
    """Beam and estimator; trees that are read off without a search have no beam."""
    options, parse = result.options, result.options.get("parse") or {}
    estimator = parse.get("method", "search") if result.task == "parsing" else options.get("estimator")
    if estimator not in ("search", "beam_marginal", "stepwise"):
        return {"num_beams": None, "estimator": estimator}
    widths = [f"{words} {options[name]}" for name, words in _OTHER_WIDTHS.items() if name in options]
    return {"num_beams": options.get("num_beams"), "estimator": ", ".join([estimator.replace("_", " "), *widths])}


def _convention(result: EvaluationResult) -> str:
    """What is counted, in words; begins with a name and a colon."""
    options, scores = result.options, result.scores
    if result.task == "parsing":
        punctuation = options["punctuation"]
        treated = f"punctuation {punctuation}" if punctuation.startswith("left out") else punctuation
        return f"{_named(options['convention'])}; {treated}"
    if result.task != "perplexity":
        return ""
    treated = f"; {options['punctuation']}" if options.get("punctuation") else ""
    return (
        f"words: {scores['words']:.0f} words of {scores['sentences']:.0f} sentences, ends of sentences not counted, "
        f"{scores['unknown_words']:.0f} words outside the vocabulary predicted as their class{treated}"
    )


def _named(convention: str) -> str:
    """EVALB's is written "evalb, FILE"."""
    name, comma, rest = convention.partition(", ")
    return convention if ":" in convention or not comma else f"{name}: labeled brackets as in {rest}"


def _hardware(result: EvaluationResult) -> str:
    threads = result.hardware.get("num_threads")
    return f"{result.hardware.get('device_name')} ({result.hardware.get('device')}, {threads} thread(s))"


def _baselines(result: EvaluationResult) -> dict[str, float]:
    """F1 of trees that need no model, where the result has them."""
    rows: Sequence[dict[str, Any]] = result.tables.get("unlabeled F1 (%)", ())
    return {row["trees"]: row["F1 by the convention"] for row in rows if row["trees"] != result.model.get("name")}


__all__ = ["CARD_SCORES", "card_rows"]
