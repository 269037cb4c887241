"""Fine-tune a model on a task of GLUE, or on any table of labeled texts.

    accelerate launch training/finetune_glue.py --config training/configs/gpst_glue.yaml --task_name rte \
        --model_name_or_path runs/gpst_small_owt/model --output_dir runs/rte

Inputs are laid out as in the paper, `a <CLS>` or `a <SEP> b <CLS>`, SEP and CLS being sentences of their own for GPST;
a tokenizer that has a layout for pairs of its own (BERT) keeps it. GPST and RNNG minimise the classifier's loss plus
their own objective on the inputs. The model that is kept is the one with the best validation score. Paper: Hu et al.,
"Generative Pretrained Structured Transformers" (ACL 2024), sections 4.1 and A.3.
"""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.evaluation.glue import TextTask, check_labels, glue_task, main_score, task_scores
from hf_synlm.training.arguments import TrainingArguments, parse_arguments
from hf_synlm.training.checkpoints import write_json
from hf_synlm.training.evaluation_report import save_evaluation
from hf_synlm.training.example_tables import (
    ExampleDataset,
    check_columns,
    check_texts,
    describe_table,
    load_table,
    name_split,
)
from hf_synlm.training.finetuning import (
    CourseArguments,
    ModelArguments,
    best_evaluation,
    card_facts,
    check_length,
    check_run,
    fine_tune,
    learning_rates,
    load_model,
    map_rows,
    prepare_run,
    read_config,
    read_tokenizer,
    run_results,
    set_steps,
)
from hf_synlm.training.hub_uploads import push_final_model
from hf_synlm.training.output_folder import RESULTS_FILE, output_folder
from hf_synlm.training.run import Run, end_run, make_accelerator, save_final_model, start_tracking
from hf_synlm.training.steps import to_device

GLUE_DATASET = "nyu-mll/glue"
LABEL = "label"


@dataclass
class GlueArguments:
    """The task and its files."""

    task_name: str | None = field(
        default=None,
        metadata={"help": "cola, sst2, mrpc, qqp, stsb, mnli, qnli, rte or wnli; without it: what the files hold."},
    )
    train_file: str | None = field(
        default=None,
        metadata={"help": "json(l), csv or parquet file with the columns of the task and `label`; default: the Hub's."},
    )
    validation_file: str | None = field(default=None, metadata={"help": "The same for validation; MNLI: matched."})
    validation_mismatched_file: str | None = field(default=None, metadata={"help": "The second one of MNLI."})
    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Data set of the Hub, or a folder, in place of files; a task's: nyu-mll/glue."},
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Its configuration; a task's is its name."})
    max_length: int = field(
        default=128, metadata={"help": "Longest input in tokens; the longer text of a pair is cut."}
    )
    max_train_tokens: int | None = field(
        default=None,
        metadata={"help": "Leave out longer training examples instead of cutting them (authors: 100 for QQP, 150 for "
                  "MNLI and QNLI)."},
    )  # fmt: skip
    pad_to_max_length: bool = field(default=False, metadata={"help": "Pad all batches to max_length."})
    max_train_samples: int | None = field(default=None, metadata={"help": "Train on the first so many rows."})
    max_eval_samples: int | None = field(default=None, metadata={"help": "Evaluate on the first so many rows."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that encode text."})

    def __post_init__(self):
        """Check the values."""
        if self.task_name is not None:
            self.task_name = glue_task(self.task_name).name
        if self.dataset_name is not None and self.train_file is not None:
            raise ValueError("dataset_name and train_file are both given. Choose one source of examples.")
        if (self.train_file is None) != (self.validation_file is None):
            raise ValueError("train_file and validation_file belong together. Pass both or none.")
        if self.task_name is None and self.train_file is None and self.dataset_name is None:
            raise ValueError("There is nothing to learn. Pass --task_name, --train_file or --dataset_name.")
        if self.validation_mismatched_file is not None and self.task_name != "mnli":
            raise ValueError("validation_mismatched_file belongs to task_name mnli only.")
        if self.task_name == "mnli" and self.train_file is not None and self.validation_mismatched_file is None:
            raise ValueError("MNLI has two validation files. Pass --validation_mismatched_file too.")
        if self.max_length < 4:
            raise ValueError(f"max_length must be at least 4 (a pair and its two marks) and is {self.max_length}.")
        for name in ("max_train_tokens", "max_train_samples", "max_eval_samples"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")

    def describe(self) -> str:
        """One sentence for the model card."""
        source = Path(self.train_file).name if self.train_file else self.dataset_name or GLUE_DATASET
        return f"{source}{'' if self.task_name is None else f', task {self.task_name}'}."


# ---------------------------------------------------------------------------------------------- examples
@dataclass
class Tables:
    """Rows of a task with their labels, not yet encoded."""

    task: TextTask
    train: Dataset
    train_labels: np.ndarray
    validation: dict[str, Dataset]
    validation_labels: dict[str, np.ndarray]
    sources: list[dict[str, Any]]


def read_tables(accelerator: Accelerator, data: GlueArguments) -> Tables:
    """Read training and validation rows and check columns, texts and labels."""
    with accelerator.main_process_first():
        task = None if data.task_name is None else glue_task(data.task_name)
        splits = (("validation", "validation"),) if task is None else task.validation_splits
        files = (data.validation_file, data.validation_mismatched_file)
        name = data.dataset_name or GLUE_DATASET
        config = data.dataset_config_name or (data.task_name if data.dataset_name is None else None)
        train_table = load_table(data.train_file, (name, config, "train"), data.max_train_samples)
        parts = {
            part: load_table(file, (name, config, split), data.max_eval_samples)
            for (part, split), file in zip(splits, files, strict=False)
        }
    places = {"training": data.train_file or name_split(name, config, "train")}
    for (part, split), file in zip(splits, files, strict=False):
        places[part] = file or name_split(name, config, split)
    sources = {part: f"{part} data ({place})" for part, place in places.items()}
    if task is None:
        task = infer_task(train_table, sources["training"])
    tables = {"training": train_table, **parts}
    labels = {part: read_labels(task, table, sources[part]) for part, table in tables.items()}
    for part, table in tables.items():
        for column in task.text_columns:
            check_texts(table, column, sources[part])
    described = [
        describe_table(part, places[part], table, task.text_columns, labels[part]) for part, table in tables.items()
    ]
    return Tables(task, train_table, labels.pop("training"), parts, labels, described)


def infer_task(table: Dataset, source: str) -> TextTask:
    """Describe a user's own task: one or two columns of text, and classes or numbers as labels.

    Raises:
        ValueError: when there is no column of labels, or not one or two columns of text.
    """
    check_columns(table, [LABEL], source)
    texts = [name for name in table.column_names if name != LABEL and _is_text(table, name)]
    if not 1 <= len(texts) <= 2:
        raise ValueError(
            f"{source}: the columns of text are {texts or 'missing'}. Leave one or two of them, besides {LABEL!r}."
        )
    values = [value for value in table[LABEL] if value is not None]
    if values and all(isinstance(value, float) for value in values):
        return TextTask("custom", tuple(texts), (), ("pearson", "spearmanr"), ("pearson", "spearmanr"))
    names = getattr(table.features[LABEL], "names", None)
    if names is None and values and isinstance(values[0], str):
        names = sorted(set(values))
    elif names is None:
        wrong = next((value for value in values if not isinstance(value, int) or not 0 <= value < len(values)), None)
        if wrong is not None:
            raise ValueError(f"{source}: there is the label {wrong!r}. Number the classes from 0, or give their names.")
        names = [str(number) for number in range(max(values, default=0) + 1)]
    if len(names) < 2:
        raise ValueError(f"{source}: all labels are {names}. A classifier needs at least two classes.")
    return TextTask("custom", tuple(texts), tuple(names))


def _is_text(table: Dataset, name: str) -> bool:
    return getattr(table.features[name], "dtype", None) in ("string", "large_string")


def read_labels(task: TextTask, table: Dataset, source: str) -> np.ndarray:
    """Labels [n] of a table: class ids (names of classes are understood), or numbers.

    Raises:
        ValueError: for missing columns and labels, and labels that the task does not have; names the row.
    """
    check_columns(table, [*task.text_columns, LABEL], source)
    values = list(table[LABEL])
    for row, value in enumerate(values):
        if value is None or (value == -1 and not task.is_regression):
            raise ValueError(
                f"{source}: row {row} (counted from 0) has no label ({value}). Test files without labels cannot be "
                "used."
            )
        if isinstance(value, str) and value not in task.labels:
            raise ValueError(
                f"{source}: label {value!r} of row {row} (counted from 0) is none of {list(task.labels)}. Correct or "
                "remove the row."
            )
    numbers = np.array([task.labels.index(value) if isinstance(value, str) else value for value in values])
    check_labels(task, numbers, source)
    if task.target_range is not None:
        low, high = task.target_range
        outside = np.flatnonzero((numbers < low) | (numbers > high))
        if len(outside):
            row = int(outside[0])
            raise ValueError(
                f"{source}: label {numbers[row]} of row {row} (counted from 0) is outside [{low}, {high}]. Correct or "
                "remove the row."
            )
    return numbers.astype(np.float32 if task.is_regression else np.int64)


def cut_pair(a: list[int], b: list[int], budget: int) -> tuple[list[int], list[int]]:
    """The texts cut to `budget` tokens together: the longer one first, then both alike."""
    share = max(budget // 2, budget - len(a))
    kept_b = b[:share]
    return a[: budget - len(kept_b)], kept_b


def encode_texts(
    texts: list[list[str]], tokenizer: PreTrainedTokenizerBase, max_length: int | None
) -> dict[str, list[list[int]]]:
    """Encode one or two columns of texts: `a <CLS>` or `a <SEP> b <CLS>`, or by the tokenizer's own layout of pairs."""
    if has_own_layout(tokenizer):
        options = {} if max_length is None else {"truncation": True, "max_length": max_length}
        encoded = dict(tokenizer(*texts, verbose=False, **options))
        encoded.pop("attention_mask", None)
        return encoded
    columns = [
        tokenizer([text.strip() for text in column], add_special_tokens=False, verbose=False)["input_ids"]
        for column in texts
    ]
    sep, cls = tokenizer.sep_token_id, tokenizer.cls_token_id
    if len(columns) == 1:
        return {"input_ids": [[*(a if max_length is None else a[: max_length - 1]), cls] for a in columns[0]]}
    pairs = zip(*columns, strict=True)
    if max_length is not None:
        pairs = (cut_pair(a, b, max_length - 2) for a, b in pairs)
    return {"input_ids": [[*a, sep, *b, cls] for a, b in pairs]}


def encode_batch(
    batch: dict[str, list],
    rows: list[int],
    tokenizer: PreTrainedTokenizerBase,
    task: TextTask,
    labels: np.ndarray,
    max_length: int,
    max_tokens: int | None,
) -> dict[str, list]:
    """Encode examples cut to `max_length`; those of more than `max_tokens` tokens before the cut are left out."""
    texts = [batch[name] for name in task.text_columns]
    encoded: dict[str, list] = {**encode_texts(texts, tokenizer, max_length), "labels": [labels[row] for row in rows]}
    if max_tokens is None:
        return encoded
    lengths = map(len, encode_texts(texts, tokenizer, None)["input_ids"])
    kept = [index for index, length in enumerate(lengths) if length <= max_tokens]
    return {name: [values[index] for index in kept] for name, values in encoded.items()}


def has_own_layout(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether a tokenizer marks the texts of a pair itself (BERT, RoBERTa), not just the beginning."""
    return tokenizer.num_special_tokens_to_add(pair=True) > 1


def encode_table(
    accelerator: Accelerator,
    table: Dataset,
    labels: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    task: TextTask,
    data: GlueArguments,
    max_tokens: int | None = None,
) -> ExampleDataset:
    """Encode a table; the main process does it first, the others find its cache."""
    with accelerator.main_process_first():
        encoded = table.map(
            encode_batch,
            with_indices=True,
            batched=True,
            remove_columns=table.column_names,
            num_proc=data.preprocessing_num_workers,
            fn_kwargs={
                "tokenizer": tokenizer,
                "task": task,
                "labels": labels,
                "max_length": data.max_length,
                "max_tokens": max_tokens,
            },
            desc="encoding examples",
        )
    return ExampleDataset(encoded)


@dataclass
class Collator:
    """Pads examples on the right; `width` pads every batch to so many tokens."""

    pad_token_id: int
    width: int | None = None

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A batch: `input_ids`, `attention_mask`, `labels`, and what else the tokenizer gave."""
        batch = {"labels": torch.as_tensor(np.array([row["labels"] for row in rows]))}
        columns = {name: [torch.as_tensor(row[name]) for row in rows] for name in rows[0] if name != "labels"}
        columns["attention_mask"] = [torch.ones_like(ids) for ids in columns["input_ids"]]
        for name, values in columns.items():
            fill = self.pad_token_id if name == "input_ids" else 0
            padded = pad_sequence(values, batch_first=True, padding_value=fill)
            batch[name] = F.pad(padded, (0, max((self.width or 0) - padded.shape[1], 0)), value=fill)
        return batch


# ---------------------------------------------------------------------------------------------- evaluation
@dataclass
class Evaluator:
    """Scores a model on the validation parts of a task.

    Fields:
        accelerator: of the run.
        task: which scores.
        parts: name -> examples.
        collate: makes batches.
        batch_size: examples per process and batch.
    """

    accelerator: Accelerator
    task: TextTask
    parts: dict[str, ExampleDataset]
    collate: Collator
    batch_size: int

    def run(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Evaluate; the main process prints the result. Every process has to call."""
        result: dict[str, Any] = {"step": step, "scores": {}, "classification_loss": {}}
        for part, examples in self.parts.items():
            logits = self.predict(model, examples)
            labels = np.array([examples[row]["labels"] for row in range(len(examples))])
            loss = _loss(self.task, torch.tensor(logits), torch.tensor(labels))
            predictions = logits[:, 0] if self.task.is_regression else logits.argmax(1)
            result["scores"][part] = task_scores(self.task, predictions, labels)
            result["classification_loss"][part] = loss
            text = "  ".join(f"{name} {value:.4f}" for name, value in result["scores"][part].items())
            self.accelerator.print(f"step {step}: {part}, {len(labels)} examples: {text}  loss {loss:.4f}")
        flat = {f"{part}/{k}": v for part, scores in result["scores"].items() for k, v in scores.items()}
        self.accelerator.log({**flat, **{f"{k}/loss": v for k, v in result["classification_loss"].items()}}, step=step)
        return result

    @torch.no_grad()
    def predict(self, model: nn.Module, examples: ExampleDataset) -> np.ndarray:
        """Outputs of the classifier [n, labels]; every process gets all of them."""
        plain = self.accelerator.unwrap_model(model)
        was_training = plain.training
        plain.eval()

        def logits(rows: list[int]) -> list[np.ndarray]:
            batch = to_device(self.collate([examples[row] for row in rows]), self.accelerator.device)
            batch.pop("labels")
            return list(plain(**batch).logits.float().cpu().numpy())

        outputs = map_rows(self.accelerator, examples.lengths, self.batch_size, logits, "classifying")
        plain.train(was_training)
        return np.stack(outputs)

    def negative_score(self, evaluation: dict[str, Any]) -> float:
        """What the best model minimises: minus the mean of the main scores of all parts."""
        return -float(np.mean([main_score(self.task, scores) for scores in evaluation["scores"].values()]))


def _loss(task: TextTask, logits: Tensor, labels: Tensor) -> float:
    """Mean squared error of a regression, cross entropy in nats of classes."""
    loss = F.mse_loss(logits[:, 0], labels) if task.is_regression else F.cross_entropy(logits, labels)
    return float(loss)


# ---------------------------------------------------------------------------------------------- the run
def make_model(
    arguments: ModelArguments, task: TextTask, max_length: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The pretrained model with a classifier for the task, and its tokenizer."""
    names = list(task.labels) or ["score"]
    config = read_config(
        arguments,
        num_labels=task.num_labels,
        id2label=dict(enumerate(names)),
        label2id={name: index for index, name in enumerate(names)},
        problem_type="regression" if task.is_regression else "single_label_classification",
    )
    check_length(config, max_length, "max_length")
    tokenizer = read_tokenizer(arguments, config, ["cls_token", "sep_token"])
    return load_model(AutoModelForSequenceClassification, arguments, config, tokenizer), tokenizer


def write_results(
    run: Run, task: TextTask, sources: list[dict[str, Any]], seconds: float, speed: dict[str, float]
) -> None:
    """Write `evaluation.json` and `all_results.json`, and print the closing line."""
    before, best = run.state.notes["evaluations"][0], best_evaluation(run)
    several = len(best["scores"]) > 1
    flat = {
        f"{name}_{part}" if several else name: value
        for part, scores in best["scores"].items()
        for name, value in scores.items()
    }
    evaluated = {f"eval_{name}": value for name, value in flat.items()}
    write_json(run.output_dir / RESULTS_FILE, {**run_results(run, seconds, speed), "task": task.name, **evaluated})
    save_evaluation(run, f"glue/{task.name}", flat, sources, seconds)
    text = "; ".join(
        f"{part} {name} {before['scores'][part][name]:.4f} -> {value:.4f}"
        for part, scores in best["scores"].items()
        for name, value in scores.items()
    )
    run.accelerator.print(f"{task.name}: {text} (best at step {best['step']})")


def main(argv: list[str] | None = None) -> None:
    """Run the script."""
    model_arguments, data, course, arguments = parse_arguments(
        (ModelArguments, GlueArguments, CourseArguments, TrainingArguments), argv, mappings=["config_overrides"]
    )
    started = time.monotonic()
    accelerator = make_accelerator(arguments)
    check_run(accelerator, arguments)
    with output_folder(accelerator, arguments, model_arguments, data, course) as checkpoint:
        tables = read_tables(accelerator, data)
        task = tables.task

        set_seed(arguments.seed)
        model, tokenizer = make_model(model_arguments, task, data.max_length)
        encode = (tokenizer, task, data)
        examples = encode_table(accelerator, tables.train, tables.train_labels, *encode, data.max_train_tokens)
        parts = {
            name: encode_table(accelerator, table, tables.validation_labels[name], *encode)
            for name, table in tables.validation.items()
        }
        accelerator.print(
            f"training: {examples.describe()} ({len(tables.train) - len(examples):,} left out as too long)"
        )
        set_steps(arguments, course, len(examples), accelerator.num_processes)
        run = prepare_run(accelerator, arguments, model, learning_rates(model_arguments, model.config))
        collate = Collator(tokenizer.pad_token_id, data.max_length if data.pad_to_max_length else None)
        evaluator = Evaluator(accelerator, task, parts, collate, arguments.per_device_eval_batch_size)
        settings = {"validation": [part.fingerprint() for part in parts.values()], "width": collate.width}
    start_tracking(accelerator, "finetune_glue", model_arguments, data, course, arguments)

    def facts() -> dict[str, Any]:
        return card_facts(run, "finetune_glue.py", data.describe(), "text-classification")

    speed = fine_tune(
        run, checkpoint, course, settings, examples, collate, evaluator.run, evaluator.negative_score, tokenizer, facts
    )
    save_final_model(run, tokenizer, facts())
    if accelerator.is_main_process:
        write_results(run, task, tables.sources, time.monotonic() - started, speed)
    end_run(run)
    push_final_model(run)


if __name__ == "__main__":
    main()
