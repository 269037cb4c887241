# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a model on a task of GLUE, or on any table of labeled texts.

    accelerate launch training/finetune_glue.py --config glue --task-name rte \
        --model-name-or-path runs/gpst_small_owt/model --output-dir runs/rte

The input layout is that of the paper, `a <CLS>` or `a <SEP> b <CLS>`. For GPST, SEP and CLS are separate sentences. A
tokenizer with its own layout for pairs (BERT) keeps it. `--objective-weight` adds the language-model loss of GPST, RNNG
and Tree LM to the classifier's loss. RNNG and Tree LM read trees that the pretrained model finds before training. The
final model is the one with the best validation score. Paper: Hu et al., "Generative Pretrained Structured Transformers"
(ACL 2024), sections 4.1 and A.3.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from datasets import Dataset
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_synlm.core.configuration_base import position_limit
from hf_synlm.data.text import plural
from hf_synlm.data.tokenizers import add_classification_template
from hf_synlm.evaluation.suites.glue import GLUE_TASKS, TextTask, check_labels, glue_task, main_score, task_scores
from hf_synlm.training.arguments.finetuning import GLUE_DATASET, GlueArguments, name_split
from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.tasks.example_tables import (
    ExampleDataset,
    check_columns,
    check_texts,
    describe_table,
    encode_table,
    load_table,
)
from hf_synlm.training.tasks.finetuning import FineTuning, takes
from hf_synlm.trees.codecs import pad_rows

LABEL = "label"
_MISSING = ("na", "n/a", "nan", "none", "null")
# Columns of published data sets, tried in this order where none are named.
_KNOWN_COLUMNS = (
    *dict.fromkeys(task.text_columns for task in GLUE_TASKS.values() if len(task.text_columns) == 2),
    *(("text_a", "text_b"), ("text1", "text2"), ("question", "passage"), ("sentence",), ("text",)),
)


# ---------------------------------------------------------------------------------------------- examples
@dataclass
class Part:
    """Rows of one split, not yet encoded, with their `labels` [n] (class ids or numbers) and where they are from."""

    place: str
    table: Dataset
    labels: np.ndarray


def read_tables(accelerator: Accelerator, data: GlueArguments) -> tuple[TextTask, dict[str, Part]]:
    """Read and check all rows: the task, and by name its parts, "training" and one or two for validation."""
    named = None if data.task_name is None else glue_task(data.task_name)
    splits = (("validation", "validation"),) if named is None else named.validation_splits
    name = data.dataset_name or GLUE_DATASET
    config = data.dataset_config_name or (data.task_name if data.dataset_name is None else None)
    files = (data.train_file, data.validation_file, data.validation_mismatched_file)
    limits = (data.max_train_samples, data.max_eval_samples, data.max_eval_samples)
    wanted = list(zip((("training", "train"), *splits), files, limits, strict=False))
    with accelerator.main_process_first():
        tables = [load_table(file, (name, config, split), limit) for (_, split), file, limit in wanted]
    source = f"training data ({data.train_file or name_split(name, config, 'train')})"
    task = named or infer_task(tables[0], source, data.text_columns)
    classes = ", ".join(task.labels) or "none, labels are numbers"
    accelerator.print(f"text: {', '.join(task.text_columns)}; label: {LABEL} (classes: {classes})")
    parts = {}
    for ((part, split), file, _), table in zip(wanted, tables, strict=True):
        place = file or name_split(name, config, split)
        source = f"{part} data ({place})"
        parts[part] = Part(place, table, read_labels(task, table, source))
        for column in task.text_columns:
            check_texts(table, column, source)
    return task, parts


def infer_task(table: Dataset, source: str, named: Sequence[str] = ()) -> TextTask:
    """Describe a user's own task: one or two columns of text, and classes or numbers as labels."""
    check_columns(table, [LABEL, *named], source)
    texts = tuple(named) or _text_columns(table, source)
    values = [value for value in label_values(table) if value is not None]
    if values and all(isinstance(value, float) for value in values):
        return TextTask("custom", texts, (), ("pearson", "spearmanr"), ("pearson", "spearmanr"))
    names = getattr(table.features[LABEL], "names", None)
    if names is None and all(isinstance(value, str) or (isinstance(value, int) and value > 0) for value in values):
        names = [str(value) for value in sorted(set(values), key=str)]  # also of classes that are numbered from 1
    elif names is None:
        wrong = next((value for value in values if not isinstance(value, int) or not 0 <= value < len(values)), None)
        if wrong is not None:
            raise ValueError(f"{source}: unusable label {wrong!r}. Number the classes from 0, or give their names.")
        names = [str(number) for number in range(max(values, default=0) + 1)]
    if all(re.fullmatch(r"-?\d+,\d+", name) for name in names):
        raise ValueError(f"{source}: labels such as {names[0]!r} are numbers with a comma. Write a point instead.")
    if len(names) < 2:
        raise ValueError(f"{source}: all labels are {names}. A classifier needs at least two classes.")
    return TextTask("custom", texts, tuple(names))


def _text_columns(table: Dataset, source: str) -> tuple[str, ...]:
    """The columns of text, if there is no doubt: a known pair, a known column, or the only one that is no number."""
    texts = [name for name in table.column_names if name != LABEL and _is_text(table, name)]
    known = [columns for columns in _KNOWN_COLUMNS if set(columns) <= set(texts)]
    if known:
        return known[0]
    texts = [name for name in texts if len(texts) == 1 or any(_as_number(value) is None for value in table[name])]
    if len(texts) != 1:
        raise ValueError(
            f"{source}: {len(texts)} columns may be the text. Pass --text-columns and the names of one or two columns, "
            f"separated by a space. The table has {', '.join(table.column_names)}."
        )
    return (texts[0],)


def label_values(table: Dataset) -> list[Any]:
    """The labels; numbers in text are numbers, whole ones if all are, and truth values are "false" and "true".

    Beside numbers, "NA" and the like is no label.
    """
    values = [str(value).lower() if isinstance(value, bool) else value for value in table[LABEL]]
    values = [(value.strip() or None) if isinstance(value, str) else value for value in values]
    numbers = [_as_number(value) for value in values]
    kinds = {str(value): number for value, number in zip(values, numbers, strict=True) if value is not None}
    texts = [name for name, number in kinds.items() if number is None]
    if len(texts) == len(kinds) or any(name.lower() not in _MISSING for name in texts):
        return values
    if all(number is None or number.is_integer() for number in numbers):
        return [None if number is None else int(number) for number in numbers]
    return numbers


def _as_number(value: Any) -> float | None:
    try:
        return float(value) if math.isfinite(float(value)) else None
    except (TypeError, ValueError):
        return None


def _is_text(table: Dataset, name: str) -> bool:
    return getattr(table.features[name], "dtype", None) in ("string", "large_string")


def read_labels(task: TextTask, table: Dataset, source: str) -> np.ndarray:
    """Labels [n] of a table: class ids (also from names of classes), or numbers. A row without a valid one is named."""
    check_columns(table, [*task.text_columns, LABEL], source)
    low, high = task.target_range or (-np.inf, np.inf)
    numbers = []
    for row, value in enumerate(label_values(table)):
        where = f"{source}: row {row} (counted from 0) has"
        if task.name == "custom" and str(value) in task.labels:
            value = str(value)
        if value is None or (value == -1 and not task.is_regression):
            raise ValueError(
                f"{where} no label ({value}). Correct or remove the row (GLUE's test parts have no labels)."
            )
        if isinstance(value, str) and value not in task.labels:
            raise ValueError(f"{where} the label {value!r}, not one of {list(task.labels)}. Correct or remove the row.")
        numbers.append(task.labels.index(value) if isinstance(value, str) else value)
        if not isinstance(value, str) and not low <= value <= high:
            raise ValueError(f"{where} the label {value}, outside [{low}, {high}]. Correct or remove the row.")
    check_labels(task, np.array(numbers), source)
    return np.array(numbers, dtype=np.float32 if task.is_regression else np.int64)


def encode_texts(
    texts: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> dict[str, list[list[int]]]:
    """Encode one or two columns by the tokenizer alone, so that pipelines give the model the inputs it was trained on.

    The tokenizer has the layout of classifiers (`add_classification_template`). Texts beyond `max_length` tokens are
    cut.
    """
    options = {} if max_length is None else {"truncation": True, "max_length": max_length}
    encoded = dict(tokenizer(*texts, verbose=False, **options))
    encoded.pop("attention_mask", None)
    return encoded


def encode_batch(
    batch: dict[str, list],
    rows: list[int],
    tokenizer: PreTrainedTokenizerBase,
    task: TextTask,
    labels: np.ndarray,
    max_length: int,
    max_tokens: int | None,
) -> dict[str, list]:
    """Encode columns of texts as `encode_texts` does, with `labels`, those of the whole table.

    Examples with more than `max_tokens` tokens are left out, and then longer ones than `max_length` are cut.
    """
    texts = [batch[name] for name in task.text_columns]
    encoded: dict[str, list] = {**encode_texts(texts, tokenizer, max_length), "labels": [labels[row] for row in rows]}
    if max_tokens is None:
        return encoded
    lengths = map(len, encode_texts(texts, tokenizer, None)["input_ids"])
    kept = [index for index, length in enumerate(lengths) if length <= max_tokens]
    return {name: [values[index] for index in kept] for name, values in encoded.items()}


class TreeCollator(DataCollatorWithPadding):
    """Pads `actions`, where examples have them, beside what the tokenizer pads."""

    def __call__(self, features: list[dict[str, Any]]) -> Any:
        """A batch of examples."""
        trees = [row.pop("actions") for row in features if "actions" in row]
        batch = super().__call__(features)
        if trees:
            batch["actions"] = pad_rows(trees, 0)
        return batch


# ---------------------------------------------------------------------------------------------- the run
class GlueRecipe(FineTuning):
    """A classifier, or a regression, of one or two texts."""

    program = "finetune_glue"
    task = "text-classification"
    auto_class = AutoModelForSequenceClassification
    data: GlueArguments
    held_out: dict[str, ExampleDataset]
    final_scores: dict[str, float]

    def dataset(self) -> str | None:
        """Of the option, or GLUE."""
        return None if self.data.train_file else self.data.dataset_name or GLUE_DATASET

    def load(self) -> PreTrainedModel:
        """Read and encode the tables, load the model with a classifier for the task."""
        data, accelerator = self.data, self.accelerator
        self.text_task, tables = read_tables(accelerator, data)
        metrics = self.text_task.main_metrics
        self.score = "mean of " * (len(metrics) > 1) + " and ".join(metrics)
        self.sources = [
            describe_table(name, part.place, part.table, self.text_task.text_columns, part.labels)
            for name, part in tables.items()
        ]
        config = self._read_classifier()
        self.held_out = {}
        for name, part in tables.items():
            encode = partial(
                encode_batch,
                tokenizer=self.tokenizer,
                task=self.text_task,
                labels=part.labels,
                max_length=data.max_length,
                max_tokens=data.max_train_tokens if name == "training" else None,
            )
            self.held_out[name] = encode_table(
                accelerator, part.table, encode, data.preprocessing_num_workers, rows=True
            )
        self.examples = self.held_out.pop("training")
        left_out = len(tables["training"].table) - len(self.examples)
        accelerator.print(f"training: {self.examples.describe()} ({left_out:,} left out as too long)")
        self.say_unknown_tokens()
        model = self.load_model(config)
        self.tokenizer.padding_side = "right"
        self.collate = TreeCollator(self.tokenizer)
        if takes(model, "actions"):
            self.examples = self._with_trees(model, self.examples, "training")
            self.held_out = {name: self._with_trees(model, part, name) for name, part in self.held_out.items()}
        if getattr(model.config, "objective_weight", None) == 0:  # no gradient reaches the heads of the objective
            accelerator.ddp_handler = DistributedDataParallelKwargs(find_unused_parameters=True)
        return model

    def _with_trees(self, model: PreTrainedModel, examples: ExampleDataset, name: str) -> ExampleDataset:
        """The examples with `actions`, trees that the pretrained model finds; the processes share the rows."""
        model.to(self.accelerator.device)

        def search(plain: Any, batch: dict[str, Any]) -> list[np.ndarray]:
            ids, mask = batch["input_ids"], batch["attention_mask"].bool()
            return [row[row != 0] for row in plain.best_trees(ids, mask, plain.word_ends_of(ids)).cpu().numpy()]

        trees = self.map_examples(model, examples, search, f"searching trees, {name}")
        return ExampleDataset(examples.table.with_format(None).add_column("actions", trees))

    def _read_classifier(self) -> PreTrainedConfig:
        """The configuration of a classifier for the task, and as `tokenizer` its tokenizer."""
        task, weight = self.text_task, self.data.objective_weight
        names = list(task.labels) or ["score"]
        config = self.read_config(
            num_labels=task.num_labels,
            id2label=dict(enumerate(names)),
            label2id={name: index for index, name in enumerate(names)},
            problem_type="regression" if task.is_regression else "single_label_classification",
            **({} if weight is None else {"objective_weight": weight}),
        )
        if weight is not None and not hasattr(type(config), "objective_weight"):
            raise ValueError(
                f"--objective-weight is {weight}, but {config.model_type} has no loss of its own. Leave the option out."
            )
        positions = position_limit(config) or self.data.max_length
        self.data.max_length = min(self.data.max_length, positions)
        self.accelerator.print(f"inputs have at most {plural(self.data.max_length, 'token')}")
        self.choose_tokenizer(config, "cls_token", "sep_token")
        add_classification_template(self.tokenizer)
        self.tokenizer.model_max_length = self.data.max_length
        return config

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """The classification loss comes first."""
        return dict(sorted(means.items(), key=lambda item: item[0] != "classification"))

    def fingerprints(self) -> tuple[str, list[str]]:
        """Of all examples."""
        return self.examples.fingerprint(), [part.fingerprint() for part in self.held_out.values()]

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Score the validation parts."""
        result: dict[str, Any] = {"step": step, "scores": {}, "classification_loss": {}}
        for part, examples in self.held_out.items():
            logits = np.stack(self.map_examples(model, examples, _logits, "classifying"))
            labels = np.array([examples[row]["labels"] for row in range(len(examples))])
            if self.text_task.is_regression:
                predictions = logits[:, 0]
                loss = float(np.mean((predictions - labels) ** 2))
            else:
                predictions = logits.argmax(1)
                loss = float(F.cross_entropy(torch.tensor(logits), torch.tensor(labels)))
            scores = result["scores"][part] = task_scores(self.text_task, predictions, labels)
            result["classification_loss"][part] = loss
            self.tell(step, part, f", {plural(len(labels), 'example')}", {**scores, "loss": loss}, ".4f")
        return result

    def score_of(self, evaluation: dict[str, Any]) -> float:
        """The mean of the main scores of all parts."""
        return float(np.mean([main_score(self.text_task, scores) for scores in evaluation["scores"].values()]))

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Scores of the best model under `eval_` names, as in transformers' own scripts."""
        best = next(item for item in run.state.notes["evaluations"] if item["step"] == step)
        if "actions" in self.examples.table.column_names:  # users of the model have no trees of the pretrained one
            self.accelerator.print("with the trees that the model itself finds:")
            tables = {name: part.table.remove_columns("actions") for name, part in self.held_out.items()}
            self.held_out = {name: ExampleDataset(table) for name, table in tables.items()}
            best = self.evaluate(run.model, step)
        self.final_scores = _flat_scores(best)
        evaluated = {f"eval_{name}": value for name, value in self.final_scores.items()}
        return {**super().final_results(run, step), "task": self.text_task.name, **evaluated}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Write `evaluation.json`."""
        self.save_scores(run, f"glue/{self.text_task.name}", self.final_scores, results)


def _logits(model: Any, batch: dict[str, Any]) -> list[np.ndarray]:
    """Outputs of a classifier for the rows of a batch."""
    batch.pop("labels")
    return list(model(**batch).logits.float().cpu().numpy())


def _flat_scores(evaluation: dict[str, Any]) -> dict[str, float]:
    """Scores by name; where there are several parts, by name and part."""
    several = len(evaluation["scores"]) > 1
    return {
        f"{name}_{part}" if several else name: value
        for part, scores in evaluation["scores"].items()
        for name, value in scores.items()
    }


main = partial(run_recipe, GlueRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
