"""What the fine-tuning scripts share: the model to start from, the course, evaluation, the export.

A model of this library and one of transformers go through the same code: it is told apart only where the paper's input
layout asks for it (`takes`), and at the export.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, gather_object
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.data.tokenizers import CLS_TOKEN, PAD_TOKEN, SEP_TOKEN, load_tokenizer
from hf_synlm.evaluation.results import describe_hardware, library_versions
from hf_synlm.hub.checkpoint import check_model_source, check_tokenizer_source
from hf_synlm.training.arguments import TrainingArguments, check_overrides
from hf_synlm.training.best_model import BestModel
from hf_synlm.training.checkpoints import TrainingState
from hf_synlm.training.example_tables import ExampleDataset
from hf_synlm.training.hub_uploads import CheckpointUploads
from hf_synlm.training.loop import Evaluate, start_or_resume, train
from hf_synlm.training.optimizers import make_optimizer
from hf_synlm.training.preflight import preflight
from hf_synlm.training.run import Run, course_settings, set_up_layers
from hf_synlm.training.samplers import StepSampler, make_loader
from hf_synlm.training.steps import to_device


# ---------------------------------------------------------------------------------------------- arguments
@dataclass
class ModelArguments:
    """The model to fine-tune."""

    model_name_or_path: str = field(default="", metadata={"help": "Folder or Hub name of the pretrained model."})
    tokenizer_name: str | None = field(default=None, metadata={"help": "Its tokenizer, if it lies elsewhere."})
    config_overrides: str | None = field(
        default=None,
        metadata={
            "help": "Fields of its configuration to change, such as loss weights, dropout or ablations: "
            "key=value,key=value or a JSON object; in a config file a mapping."
        },
    )
    parser_learning_rate: float | None = field(
        default=1e-3, metadata={"help": "Peak learning rate of GPST's parser, which gives the merge order."}
    )
    ignore_mismatched_sizes: bool = field(
        default=False, metadata={"help": "Start afresh with weights whose shape differs, such as another classifier."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run code of the model's repository. Models of this library do not need it."}
    )

    def __post_init__(self):
        """Check that there is a model, and a tokenizer."""
        if not self.model_name_or_path:
            raise ValueError("model_name_or_path is not set. Fine-tuning begins with a pretrained model.")
        check_model_source(self.model_name_or_path)
        check_tokenizer_source(self.tokenizer_name or self.model_name_or_path)


@dataclass
class CourseArguments:
    """How long to train, and which model to keep."""

    num_train_epochs: int = field(
        default=0,
        metadata={
            "help": "Passes through the examples, in place of max_train_steps; without evaluation_steps, the model is "
            "evaluated after each. 0: max_train_steps counts."
        },
    )
    early_stopping_patience: int = field(
        default=0, metadata={"help": "Stop after so many evaluations without a better one; 0: never."}
    )

    def __post_init__(self):
        """Check the values."""
        for name in ("num_train_epochs", "early_stopping_patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative and is {getattr(self, name)}.")


# ---------------------------------------------------------------------------------------------- model and tokenizer
def read_config(arguments: ModelArguments, **fields: Any) -> PreTrainedConfig:
    """Configuration of the pretrained model, with `fields` and the overrides of the command line put in.

    Raises:
        ValueError: for an override that is no field or not valid.
    """
    options = {"trust_remote_code": arguments.trust_remote_code}
    plain = AutoConfig.from_pretrained(arguments.model_name_or_path, **options)
    overrides = check_overrides(type(plain), arguments.config_overrides)
    config = AutoConfig.from_pretrained(arguments.model_name_or_path, **options, **{**fields, **overrides})
    if hasattr(config, "validate_architecture"):
        config.validate_architecture()
    return config


def read_tokenizer(
    arguments: ModelArguments, config: PreTrainedConfig, roles: Sequence[str]
) -> PreTrainedTokenizerBase:
    """Tokenizer of the pretrained model, with tokens for the roles that it leaves open.

    Args:
        arguments: of the command line.
        config: of the model.
        roles: "cls_token", "sep_token"; what is missing gets the name of GPST's token. Padding is always there: if
            need be it is the end token.

    Returns:
        The tokenizer; it may have more tokens than the model, which `load_model` then resizes.

    Raises:
        ValueError: when it is another model's: it has more tokens than the model before any is added.
    """
    name = arguments.tokenizer_name or arguments.model_name_or_path
    if config.model_type == "gpst":
        tokenizer = load_tokenizer(name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=arguments.trust_remote_code)
    if len(tokenizer) > config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {config.vocab_size}. "
            "Pass --tokenizer_name with the model's own tokenizer."
        )
    names = {"cls_token": CLS_TOKEN, "sep_token": SEP_TOKEN}
    added = {role: names[role] for role in roles if getattr(tokenizer, role) is None}
    if tokenizer.pad_token is None:
        added["pad_token"] = tokenizer.eos_token or PAD_TOKEN
    if added:
        tokenizer.add_special_tokens(added)
    return tokenizer


def load_model(
    auto_class: Any, arguments: ModelArguments, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> PreTrainedModel:
    """The pretrained model in float32, with a row for every token, and the tokenizer's special ids it has a place for.

    Args:
        auto_class: such as `AutoModelForCausalLM`.
        arguments: of the command line.
        config: of `read_config`.
        tokenizer: of `read_tokenizer`.

    Returns:
        The model.
    """
    model = auto_class.from_pretrained(
        arguments.model_name_or_path,
        config=config,
        dtype=torch.float32,
        ignore_mismatched_sizes=arguments.ignore_mismatched_sizes,
        trust_remote_code=arguments.trust_remote_code,
    )
    if len(tokenizer) > model.config.vocab_size:
        model.resize_token_embeddings(len(tokenizer))
    for name in ("pad_token_id", "cls_token_id", "sep_token_id"):
        if hasattr(model.config, name) and getattr(tokenizer, name) is not None:
            setattr(model.config, name, getattr(tokenizer, name))
    if getattr(model, "generation_config", None) is not None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model


def takes(model: nn.Module, name: str) -> bool:
    """Whether `forward` of a model has an argument, such as `sentence_ids`."""
    return name in inspect.signature(model.forward).parameters


def check_length(config: PreTrainedConfig, length: int, what: str) -> None:
    """Raise ValueError when texts of so many tokens do not fit the positions of a model."""
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise ValueError(
            f"{what} is {length} tokens, and the model has {limit} positions. Lower the limits on length "
            "(see --help: max_...)."
        )


def learning_rates(arguments: ModelArguments, config: PreTrainedConfig) -> dict[str, float]:
    """Modules with a learning rate of their own: GPST's parser."""
    if config.model_type != "gpst" or arguments.parser_learning_rate is None:
        return {}
    return {"parser": arguments.parser_learning_rate}


def check_run(accelerator: Accelerator, arguments: TrainingArguments) -> None:
    """Raise ValueError for what fine-tuning does not do.

    FSDP would shard the model, whose methods evaluation calls; and nothing is generated at intervals.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError("Fine-tuning evaluates the whole model, which FSDP would shard. Use DDP.")
    if arguments.generation_steps:
        raise ValueError("generation_steps is for pretraining. Leave it out.")


# ---------------------------------------------------------------------------------------------- course
def set_steps(arguments: TrainingArguments, course: CourseArguments, num_samples: int, num_processes: int) -> None:
    """Settle `max_train_steps`: at most what `num_train_epochs`, if given, take."""
    per_step = num_processes * arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps
    epochs = course.num_train_epochs
    arguments.limit_steps(-(-epochs * num_samples // per_step) if epochs else None)


def prepare_run(
    accelerator: Accelerator, arguments: TrainingArguments, model: PreTrainedModel, rates: dict[str, float]
) -> Run:
    """A run at step 0, with its optimizer; `rates` are those of modules with a learning rate of their own."""
    accelerator.print(f"model: {model.num_parameters():,} parameters, {type(model).__name__}")
    set_up_layers(model, arguments)
    preflight(accelerator, arguments, model)
    optimizer, schedule = make_optimizer(model, arguments, rates)
    return Run(accelerator, arguments, *accelerator.prepare(model, optimizer, schedule), TrainingState())


def fine_tune(
    run: Run,
    checkpoint: Path | None,
    course: CourseArguments,
    settings: dict[str, Any],
    examples: ExampleDataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    evaluate: Evaluate,
    metric: Callable[[dict[str, Any]], float],
    tokenizer: PreTrainedTokenizerBase,
    facts: Callable[[], dict[str, Any]],
) -> dict[str, float]:
    """Train, evaluate and go back to the best model; the untrained one is measured, but never the best.

    Args:
        run: of `prepare_run`.
        checkpoint: of `output_folder`.
        course: of the command line.
        settings: what decides the course of the run besides what every run has.
        examples: to train on.
        collate: examples -> batch.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        metric: the number of an evaluation to minimise.
        tokenizer: of the model.
        facts: makes what the card of a checkpoint on the Hub states.

    Returns:
        The speed (see `train`).
    """
    accelerator, arguments = run.accelerator, run.arguments
    config = accelerator.unwrap_model(run.model).config
    settings = {
        **course_settings(arguments, config, accelerator, tokenizer),
        "training_data": examples.fingerprint(),
        "learning_rates": [group["initial_lr"] for group in run.optimizer.param_groups],
        "patience": course.early_stopping_patience,
        "evaluation_steps": arguments.evaluation_steps,
        "by_epochs": bool(course.num_train_epochs),
        **settings,
    }
    best = BestModel(metric, course.early_stopping_patience)
    start_or_resume(run, checkpoint, settings, evaluate)
    if checkpoint is not None:
        best.adopt(run, checkpoint)
    sampler = StepSampler(
        len(examples),
        arguments.per_device_train_batch_size,
        arguments.seed,
        accelerator.process_index,
        accelerator.num_processes,
        run.state.consumed,
    )
    per_step = sampler.consumed_per_micro_step * arguments.gradient_accumulation_steps

    def epoch_ends(step: int) -> bool:
        return step * per_step // len(examples) > (step - 1) * per_step // len(examples)

    by_epochs = course.num_train_epochs and not arguments.evaluation_steps
    loader = make_loader(accelerator, examples, collate, arguments, sampler)
    uploads = CheckpointUploads(run, tokenizer, facts)
    speed = train(
        run,
        loader,
        compute_loss,
        evaluate,
        best,
        evaluation_due=epoch_ends if by_epochs else None,
        after_checkpoint=uploads,
    )
    uploads.finish()
    best.restore(run)
    return speed


def compute_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of a micro batch and, for models of this library, its detached parts."""
    output = model(**batch)
    return output.loss, dict(getattr(output, "losses", None) or {})


# ---------------------------------------------------------------------------------------------- evaluation
def map_rows(
    accelerator: Accelerator,
    lengths: Sequence[int],
    batch_size: int,
    work: Callable[[list[int]], Sequence[Any]],
    description: str,
) -> list[Any]:
    """Do something with every row of a data set, in batches of similar length, shared among the processes.

    Args:
        accelerator: of the run. Every process has to call.
        lengths: of the rows, for batches without much padding; batches do not depend on the number of processes.
        batch_size: rows per process and batch.
        work: rows -> one result per row, which can be pickled.
        description: of the progress bar.

    Returns:
        The results in the order of the rows, on every process.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    results: list[tuple[int, Any]] = []
    with tqdm(total=len(order), desc=description, disable=not accelerator.is_main_process, dynamic_ncols=True) as bar:
        for rows in batches[accelerator.process_index :: accelerator.num_processes]:
            results += zip(rows, work(rows), strict=True)
            bar.update(min(len(rows) * accelerator.num_processes, bar.total - bar.n))
    by_row = dict(gather_object(results))
    return [by_row[row] for row in range(len(lengths))]


@torch.no_grad()
def mean_losses(
    accelerator: Accelerator,
    model: nn.Module,
    examples: ExampleDataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    batch_size: int,
) -> dict[str, float]:
    """Objective and its parts on held-out texts in evaluation mode, batches weighted by the tokens that have labels.

    Args:
        accelerator: of the run. Every process has to call.
        model: with or without the wrapper of the run.
        examples: the texts.
        collate: examples -> batch with `labels` [B, T].
        batch_size: rows per process and batch.

    Returns:
        "loss" and the model's names of its parts -> mean in nats.
    """
    plain = accelerator.unwrap_model(model)
    was_training = plain.training
    plain.eval()

    def losses(rows: list[int]) -> list[dict[str, float]]:
        batch = collate([examples[row] for row in rows])
        counts = (batch["labels"] != LABEL_PADDING).sum(1).tolist()
        loss, parts = compute_loss(plain, to_device(batch, accelerator.device))
        means = {"loss": float(loss), **{name: float(part) for name, part in parts.items()}}
        return [{"tokens": count, **{name: mean * count for name, mean in means.items()}} for count in counts]

    sums = map_rows(accelerator, examples.lengths, batch_size, losses, "validating")
    plain.train(was_training)
    totals = {name: sum(row[name] for row in sums) for name in sums[0]}
    num_tokens = totals.pop("tokens")
    return {name: total / num_tokens for name, total in totals.items()}


# ---------------------------------------------------------------------------------------------- export and report
def card_facts(run: Run, script: str, data: str, task: str = "text-generation") -> dict[str, Any]:
    """What the card of the model states about a run."""
    best = run.state.notes.get("best", {}).get("step", run.state.step)
    return {
        "task": task,
        "training_data": data,
        "training_procedure": f"The best of {run.state.step} steps of `training/{script}`, that of step "
        f"{best}; {run.state.consumed} examples read, seed {run.arguments.seed}.",
    }


def best_evaluation(run: Run) -> dict[str, Any]:
    """The evaluation of the model that is kept."""
    notes = run.state.notes
    return next(item for item in notes["evaluations"] if item["step"] == notes["best"]["step"])


def run_results(run: Run, seconds: float, speed: dict[str, float]) -> dict[str, Any]:
    """What all `all_results.json` of fine-tuning hold; the arguments are in `arguments.json` beside it."""
    return {
        "step": run.state.step,
        "best_step": run.state.notes["best"]["step"],
        "examples": run.state.consumed,
        "seconds_of_this_process": round(seconds, 1),
        **speed,
        "versions": library_versions(),
        "hardware": describe_hardware(run.accelerator.device),
        "train": run.state.notes.get("train", []),
        "evaluations": run.state.notes["evaluations"],
    }
