# SPDX-License-Identifier: Apache-2.0
"""The tasks of GLUE (Wang et al. 2018) and their scores.

Scores are those of the benchmark: Matthews correlation (CoLA), accuracy, F1 of class 1 (MRPC, QQP), Pearson and
Spearman correlation (STS-B), by scikit-learn and scipy. All are fractions, not percent. Needs the extra `[eval]`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import stats
from sklearn import metrics as sklearn_metrics


@dataclasses.dataclass(frozen=True)
class TextTask:
    """A task on texts or pairs of texts; `name` as in the data set `nyu-mll/glue`, or of the user's own task."""

    name: str
    text_columns: tuple[str, ...]
    labels: tuple[str, ...]  # names of the classes by id; empty for a regression
    metrics: tuple[str, ...] = ("accuracy",)
    main_metrics: tuple[str, ...] = ("accuracy",)  # their mean chooses the best model, as in the paper's table
    validation_splits: tuple[tuple[str, str], ...] = (("validation", "validation"),)  # name -> split of the data set
    target_range: tuple[float, float] | None = None  # smallest and largest target of a regression

    @property
    def num_labels(self) -> int:
        """Number of outputs of a classifier: the classes, or 1 for a regression."""
        return len(self.labels) or 1

    @property
    def is_regression(self) -> bool:
        """Whether labels are numbers instead of classes."""
        return not self.labels


_PAIR = ("sentence1", "sentence2")
_ENTAILMENT = ("entailment", "not_entailment")
_BOTH = ("accuracy", "f1")
_MATTHEWS = ("matthews_correlation",)
_CORRELATIONS = ("pearson", "spearmanr")
_TASKS = (
    TextTask("cola", ("sentence",), ("unacceptable", "acceptable"), _MATTHEWS, _MATTHEWS),
    TextTask("sst2", ("sentence",), ("negative", "positive")),
    TextTask("mrpc", _PAIR, ("not_equivalent", "equivalent"), _BOTH, ("f1",)),
    TextTask("qqp", ("question1", "question2"), ("not_duplicate", "duplicate"), _BOTH, ("f1",)),
    TextTask("stsb", _PAIR, (), _CORRELATIONS, _CORRELATIONS, target_range=(0.0, 5.0)),
    TextTask(
        "mnli",
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        validation_splits=(("matched", "validation_matched"), ("mismatched", "validation_mismatched")),
    ),
    TextTask("qnli", ("question", "sentence"), _ENTAILMENT),
    TextTask("rte", _PAIR, _ENTAILMENT),
    TextTask("wnli", _PAIR, ("not_entailment", "entailment")),
)  # fmt: skip
GLUE_TASKS: dict[str, TextTask] = {task.name: task for task in _TASKS}


def _correlation(measure: Callable[..., Any]) -> Callable[[np.ndarray, np.ndarray], float]:
    def score(labels: np.ndarray, predictions: np.ndarray) -> float:
        # The correlation with a constant is undefined. It counts as 0, so that a run can continue.
        if np.ptp(labels) == 0 or np.ptp(predictions) == 0:
            return 0.0
        return float(measure(labels, predictions))

    return score


# Name (as in the package `evaluate`) -> (labels, predictions) -> score.
METRICS: dict[str, Callable[[np.ndarray, np.ndarray], float]] = {
    "accuracy": sklearn_metrics.accuracy_score,
    "f1": lambda labels, predictions: sklearn_metrics.f1_score(labels, predictions, zero_division=0.0),
    "matthews_correlation": _correlation(sklearn_metrics.matthews_corrcoef),
    "pearson": _correlation(lambda labels, predictions: stats.pearsonr(labels, predictions).statistic),
    "spearmanr": _correlation(lambda labels, predictions: stats.spearmanr(labels, predictions).statistic),
}


def glue_task(name: str) -> TextTask:
    """Look up a task of GLUE; "sst-2" and "sts-b" are understood, too."""
    key = name.lower().replace("-", "").replace("_", "")
    if key not in GLUE_TASKS:
        raise ValueError(f"task_name {name!r} is not a task of GLUE. Choose one of {', '.join(GLUE_TASKS)}.")
    return GLUE_TASKS[key]


def task_scores(
    task: TextTask, predictions: Sequence[float] | np.ndarray, labels: Sequence[float] | np.ndarray
) -> dict[str, float]:
    """Scores, as fractions, of [n] class ids or values of a regression.

    accuracy = correct / all;  f1 = 2 tp / (2 tp + fp + fn) of class 1, 0 without a positive;
    matthews_correlation = cov(y, x) / (std y std x) of classes 0 and 1, 0 if one is constant;
    pearson, spearmanr: correlation of values, and of ranks with ties at their mean; 0 if one side is constant.
    """
    predicted, gold = np.asarray(predictions), np.asarray(labels)
    return {name: float(METRICS[name](gold, predicted)) for name in task.metrics}


def check_labels(task: TextTask, labels: np.ndarray, name: str) -> None:
    """Raise ValueError unless all labels are classes of the task, or for a regression finite numbers."""
    if task.is_regression:
        wrong = ~np.isfinite(labels.astype(float))
        allowed = "a finite number"
    else:
        wrong = ~np.isin(labels, np.arange(task.num_labels))
        allowed = f"an id from 0 to {task.num_labels - 1} ({', '.join(task.labels)})"
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"{name}: label {labels[row]} of row {row} (counted from 0) is not {allowed}. Correct or remove the row."
        )


def main_score(task: TextTask, scores: dict[str, float]) -> float:
    """The number by which models are compared: the mean of `task.main_metrics`."""
    return float(np.mean([scores[name] for name in task.main_metrics]))
