"""What the training scripts share, as plain functions over accelerate.

Arguments from YAML and flags, the samplers, parameter groups, schedule, the optimizer step loop, atomic checkpoints
and exact resume, the best model and early stopping, the export at the end.

Terms: a micro step is one forward and backward pass of one process; a step is one optimizer update, made of
`gradient_accumulation_steps` micro steps on every process. A run resumes bit for bit (on CPU) because nothing depends
on history: sample ids are a function of (seed, what was consumed), and the random state of a micro step is a function
of (seed, micro step, rank).
"""

import argparse
import dataclasses
import difflib
import hashlib
import itertools
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import ProjectConfiguration
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm.auto import tqdm
from transformers import HfArgumentParser, PreTrainedModel, PreTrainedTokenizerBase, get_scheduler

from hf_synlm.hub.card import fill_card
from hf_synlm.hub.export import export_model, push_to_hub

logger = get_logger(__name__)

STATE_FILE = "training_state.json"
PARTIAL_SUFFIX = ".partial"


# ---------------------------------------------------------------------------------------------- arguments
@dataclass
class TrainingArguments:
    """Optimization, checkpoints and logging; the flags are those of the official `no_trainer` scripts."""

    output_dir: str = field(default="", metadata={"help": "Folder for checkpoints, logs and the final model."})
    overwrite_output_dir: bool = field(
        default=False, metadata={"help": "Delete what a previous run left in the output folder."}
    )
    seed: int = field(default=404, metadata={"help": "Seed of initialization, data order, dropout and noise."})
    per_device_train_batch_size: int = field(default=8, metadata={"help": "Contexts per process and micro step."})
    per_device_eval_batch_size: int = field(default=8, metadata={"help": "Contexts per process in evaluation."})
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro steps per optimizer step."})
    max_train_steps: int = field(default=1000, metadata={"help": "Optimizer steps of the whole run."})
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW: decay of the first moment."})
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW: decay of the second moment."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "AdamW: term in the denominator."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW: decay of weights (not of biases and norms)."})
    max_grad_norm: float = field(default=1.0, metadata={"help": "Gradients are clipped to this norm."})
    lr_scheduler_type: str = field(
        default="linear", metadata={"help": "Decay after the warm-up: linear or cosine (both to 0), or constant."}
    )
    warmup_ratio: float = field(default=0.01, metadata={"help": "Share of the steps with a rising learning rate."})
    num_warmup_steps: int | None = field(default=None, metadata={"help": "Warm-up in steps; overrides the ratio."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute layer activations in backward: less memory, more time."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that prepare batches."})
    logging_steps: int = field(default=10, metadata={"help": "Steps between readings of the losses."})
    evaluation_steps: int = field(default=0, metadata={"help": "Steps between evaluations; 0: only at both ends."})
    checkpointing_steps: int = field(default=0, metadata={"help": "Steps between checkpoints; 0: none."})
    checkpoints_total_limit: int = field(default=2, metadata={"help": "Number of newest checkpoints to keep."})
    resume_from_checkpoint: str | None = field(
        default=None, metadata={"help": "A checkpoint folder, or 'latest' for the newest complete one, if any."}
    )
    with_tracking: bool = field(default=False, metadata={"help": "Log to the trackers of --report_to."})
    report_to: str = field(default="tensorboard", metadata={"help": "A tracker that accelerate knows, or 'all'."})
    push_to_hub: bool = field(default=False, metadata={"help": "Push the final model to the Hub."})
    hub_model_id: str | None = field(default=None, metadata={"help": "Repository of --push_to_hub."})
    hub_token: str | None = field(default=None, metadata={"help": "Token of --push_to_hub; default: the login's."})

    def __post_init__(self):
        """Check the values, so that a wrong one fails before any work is done."""
        if not self.output_dir:
            raise ValueError("output_dir is not set. Pass --output_dir FOLDER or set it in the config file.")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                     "max_train_steps", "logging_steps", "checkpoints_total_limit"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        for name in ("evaluation_steps", "checkpointing_steps", "learning_rate", "weight_decay"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative and is {getattr(self, name)}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must be in [0, 1] and is {self.warmup_ratio}.")
        if self.lr_scheduler_type not in ("linear", "cosine", "constant"):
            raise ValueError(
                f"lr_scheduler_type {self.lr_scheduler_type!r} is unknown. Choose linear, cosine, constant."
            )
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs a repository. Pass --hub_model_id OWNER/NAME.")

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        if self.num_warmup_steps is not None:
            return self.num_warmup_steps
        return round(self.warmup_ratio * self.max_train_steps)


def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Read a mapping given on the command line: JSON, or `key=value,key=value` with YAML values.

    Args:
        text: for example `hidden_size=64,merge_noise=0.5` or `{"hidden_size": 64}`.
        name: the flag, for messages.

    Returns:
        The mapping.

    Raises:
        ValueError: when the text is neither form.
    """
    if text.lstrip().startswith("{"):
        value = yaml.safe_load(text)
        if not isinstance(value, dict):
            raise ValueError(f"--{name} {text!r} is not a JSON object.")
        return value
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--{name}: {key!r} has no value. Write key=value,key=value or a JSON object.")
    return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}


def read_config(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Read a YAML or JSON file of arguments.

    Args:
        path: the file.
        known: names of all arguments.

    Returns:
        Argument name -> value.

    Raises:
        ValueError: when there is no such file, it holds no mapping, or a key is no argument.
    """
    if not Path(path).is_file():
        raise ValueError(f"There is no config file {path!r}.")
    values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise ValueError(f"{path} does not hold a mapping of argument names to values.")
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else " Run the script with --help for all names."
            raise ValueError(f"{path}: {key!r} is not an argument of this script.{hint}")
    return values


def _as_flags(values: dict[str, Any]) -> list[str]:
    flags: list[str] = []
    for key, value in values.items():
        if value is not None and not isinstance(value, dict):
            items = value if isinstance(value, list) else [value]
            flags += [f"--{key}", *(str(item) for item in items)]
    return flags


def parse_arguments(
    types: Sequence[type], argv: Sequence[str] | None = None, mappings: Sequence[str] = ()
) -> tuple[Any, ...]:
    """Read dataclasses of arguments from `--config FILE` and from flags; flags win.

    A field named in `mappings` arrives as a dict: the file's mapping, updated key by key with the flag's, which has
    the form of `read_mapping`.

    Args:
        types: the dataclasses.
        argv: command line without the program name; default: the process's.
        mappings: names of string fields that hold mappings.

    Returns:
        One instance per dataclass.

    Raises:
        ValueError: see `read_config`; also for flags that no dataclass has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)
    names = [f.name for cls in types for f in dataclasses.fields(cls) if f.init]
    values = read_config(known.config, names) if known.config else {}
    parser = HfArgumentParser(list(types), allow_abbrev=False)
    parser.add_argument("--config", help="YAML or JSON file with values for any of the arguments; flags win.")
    flags = [*_as_flags(values), *rest]
    # What belongs to no dataclass (--config itself) comes last, as a namespace.
    parsed = parser.parse_args_into_dataclasses(args=flags, look_for_args_file=False)[: len(types)]
    for arguments in parsed:
        for f in dataclasses.fields(arguments):
            value = getattr(arguments, f.name)
            if f.name in mappings:
                given = read_mapping(value, f.name) if isinstance(value, str) else {}
                setattr(arguments, f.name, {**(values.get(f.name) or {}), **given})
            elif isinstance(values.get(f.name), dict):
                raise ValueError(f"{known.config}: {f.name!r} takes a single value, not a mapping.")
    return tuple(parsed)


def check_overrides(config_class: type, overrides: dict[str, Any] | None) -> dict[str, Any]:
    """Check fields that replace those of a preset.

    Args:
        config_class: the configuration, a dataclass.
        overrides: field -> value, as they come from a config file.

    Returns:
        The same; whole numbers become floats where the field takes floats only.

    Raises:
        ValueError: when the configuration has no such field.
    """
    types = {f.name: f.type for f in dataclasses.fields(config_class)}
    checked: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        if name not in types:
            raise ValueError(f"config_overrides: {config_class.__name__} has no field {name!r}.")
        checked[name] = float(value) if types[name] is float and isinstance(value, int) else value
    return checked


def load_pretrained(
    model_class: type[PreTrainedModel],
    name: str,
    overrides: dict[str, Any] | None,
    tokenizer: PreTrainedTokenizerBase,
) -> PreTrainedModel:
    """Load the model that a run continues from, and check it against the tokenizer.

    Args:
        model_class: of the library.
        name: folder or Hub name.
        overrides: of the configuration; there must be none.
        tokenizer: of the run.

    Returns:
        The model in float32.

    Raises:
        ValueError: for overrides, and when the tokenizer has ids that the model has not.
    """
    if overrides:
        raise ValueError("config_overrides cannot change the model of model_name_or_path. Leave one of them out.")
    model = model_class.from_pretrained(name, dtype=torch.float32)
    if len(tokenizer) > model.config.vocab_size:
        raise ValueError(
            f"The tokenizer has {len(tokenizer)} tokens and the model {model.config.vocab_size}. "
            "Pass --tokenizer_name with the model's own tokenizer."
        )
    return model


# ---------------------------------------------------------------------------------------------- accelerator
def make_accelerator(arguments: TrainingArguments) -> Accelerator:
    """Accelerator of a run: precision and devices come from `accelerate launch`, the rest from the arguments.

    Raises:
        ValueError: when the launcher started several processes that do not find each other.
    """
    accelerator = Accelerator(
        # Without it, processes that torchrun starts on a machine without GPUs each believe to be alone.
        cpu=not torch.accelerator.is_available(),
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        # The schedule counts optimizer steps: it must not run faster with more processes.
        step_scheduler_with_optimizer=False,
        log_with=arguments.report_to if arguments.with_tracking else None,
        project_config=ProjectConfiguration(
            project_dir=arguments.output_dir, logging_dir=str(Path(arguments.output_dir) / "logs")
        ),
    )
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if accelerator.num_processes != world_size:
        raise ValueError(
            f"The launcher started {world_size} processes and accelerate sees {accelerator.num_processes}. "
            "Start the script with torchrun or with `accelerate launch --multi_gpu`."
        )
    return accelerator


def prepare_output_dir(accelerator: Accelerator, arguments: TrainingArguments) -> Path | None:
    """Check the output folder, create it, and find the checkpoint to resume from.

    Args:
        accelerator: of the run.
        arguments: of the run.

    Returns:
        The checkpoint to resume from, or `None` for a fresh start.

    Raises:
        ValueError: when the folder is in use and the run neither overwrites nor resumes, or the named checkpoint is
            missing or half-written.
    """
    output_dir = Path(arguments.output_dir)
    if arguments.resume_from_checkpoint:
        checkpoint = find_checkpoint(output_dir, arguments.resume_from_checkpoint)
        if checkpoint is None:
            logger.warning(f"{output_dir} holds no complete checkpoint: training starts from step 0.")
    else:
        checkpoint = None
        if output_dir.exists() and (not output_dir.is_dir() or any(output_dir.iterdir())):
            if not arguments.overwrite_output_dir:
                raise ValueError(
                    f"Output folder {str(output_dir)!r} exists and is not empty. Choose another --output_dir, continue "
                    "its run with --resume_from_checkpoint latest, or delete its content with --overwrite_output_dir."
                )
            accelerator.wait_for_everyone()  # every process has looked before the first deletes
            if accelerator.is_main_process:
                _clear_run(output_dir)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
    accelerator.wait_for_everyone()
    return checkpoint


def _clear_run(folder: Path) -> None:
    """Delete the content of an output folder; refuse where a wrong path would lose more than a run."""
    if folder.resolve() in (Path.home().resolve(), Path.cwd().resolve(), Path(folder.resolve().anchor)):
        raise ValueError(f"--overwrite_output_dir would delete {str(folder)!r}. Choose a folder for runs only.")
    if (folder / ".git").exists():
        raise ValueError(f"--overwrite_output_dir would delete the repository {str(folder)!r}. Choose another folder.")
    for item in folder.iterdir():
        shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()


def start_tracking(accelerator: Accelerator, name: str, *arguments: Any) -> None:
    """Write all arguments to `output_dir/arguments.json` (without the token) and to the trackers, if there are any."""
    settings = {key: value for item in arguments for key, value in dataclasses.asdict(item).items()}
    settings.pop("hub_token", None)
    if accelerator.is_main_process:
        write_json(Path(settings["output_dir"]) / "arguments.json", settings)
    if accelerator.log_with:
        simple = {k: v if isinstance(v, (bool, int, float, str)) else json.dumps(v) for k, v in settings.items()}
        accelerator.init_trackers(name, config=simple)


# ---------------------------------------------------------------------------------------------- randomness and order
def seed_micro_step(seed: int, micro_step: int, rank: int) -> None:
    """Set all random states from (seed, micro step, rank), so that a resumed run draws what the first would have.

    Args:
        seed: of the run.
        micro_step: number of the micro step since the start of training.
        rank: of the process; the ranks draw different noise.
    """
    numpy_seed, torch_seed = np.random.SeedSequence([seed, micro_step, rank]).generate_state(2)
    random.seed(int(numpy_seed))
    np.random.seed(int(numpy_seed))
    torch.manual_seed(int(torch_seed))


class StepSampler(Sampler[list[int]]):
    """Endless micro batches whose sample ids are a pure function of (seed, consumed samples).

    Sample k of the run is entry k mod n of the permutation of epoch k // n. A micro step consumes one batch per
    process, in the order of the ranks. There is no other state, and the samples of a micro step over all processes
    do not depend on how many processes share them.

    Args:
        num_samples: n, size of the data set.
        batch_size: samples per process and micro step.
        seed: of the permutations.
        rank: of this process.
        world_size: number of processes.
        consumed: samples that all processes together have consumed.
        shuffle: `False` keeps the order of the data set.

    Raises:
        ValueError: when the data set is empty.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
        shuffle: bool = True,
    ):
        if num_samples < 1:
            raise ValueError("The training data are empty. Check the files and the sentence splitting.")
        self.num_samples, self.batch_size, self.seed = num_samples, batch_size, seed
        self.rank, self.world_size, self.consumed, self.shuffle = rank, world_size, consumed, shuffle
        self._epoch, self._order = -1, np.arange(num_samples)

    @property
    def consumed_per_micro_step(self) -> int:
        """By how much a micro step of all processes advances `consumed`."""
        return self.batch_size * self.world_size

    def sample_id(self, k: int) -> int:
        """Data set index of sample k of the run."""
        epoch, position = divmod(k, self.num_samples)
        if self.shuffle and epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_samples)
        return int(self._order[position])

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's share of one micro batch after the other."""
        consumed = self.consumed
        while True:
            first = consumed + self.rank * self.batch_size
            yield [self.sample_id(k) for k in range(first, first + self.batch_size)]
            consumed += self.consumed_per_micro_step


class PaddedBatchSampler(Sampler[list[int]]):
    """Endless micro batches of samples of similar length, bounded in number and in padded size.

    The samples are sorted by length and divided into groups. In every epoch each group is shuffled and cut into
    batches, each taken as large as both bounds allow, and the batches of all groups are shuffled. Batch k of the run
    is a function of (seed, k), whatever the number of processes; a micro step consumes one batch per process, in the
    order of the ranks. A sample that exceeds the budget alone is a batch of its own.

    Source: Noji and Oseki (2021), section 5.1.

    Args:
        lengths: length of each sample; padding fills a batch up to its longest one.
        max_batch_size: largest number of samples of a batch.
        max_padded_length: largest padded size of a batch: number of samples times the longest length.
        group_size: samples of similar length among which batches are drawn.
        seed: of the permutations.
        rank: of this process.
        world_size: number of processes.
        consumed: batches that all processes together have consumed.

    Raises:
        ValueError: when the data set is empty, or a bound is less than 1.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        max_batch_size: int,
        max_padded_length: int,
        group_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        consumed: int = 0,
    ):
        if not len(lengths):
            raise ValueError("The training data are empty. Check the files and the limits on sentence length.")
        for name, value in (("batch size", max_batch_size), ("budget", max_padded_length), ("group size", group_size)):
            if value < 1:
                raise ValueError(f"The {name} must be at least 1 and is {value}.")
        self.lengths = np.asarray(lengths)
        self.max_batch_size, self.max_padded_length = max_batch_size, max_padded_length
        self.group_size, self.seed = group_size, seed
        self.rank, self.world_size, self.consumed = rank, world_size, consumed
        self._by_length = np.argsort(self.lengths, kind="stable")

    @property
    def consumed_per_micro_step(self) -> int:
        """By how much a micro step of all processes advances `consumed`."""
        return self.world_size

    def epoch_batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, in their order. Cost: O(n)."""
        generator = np.random.default_rng([self.seed, epoch])
        batches: list[list[int]] = []
        for first in range(0, len(self._by_length), self.group_size):
            group = generator.permutation(self._by_length[first : first + self.group_size])
            batches += self._cut(group.tolist(), self.lengths[group].tolist())
        return [batches[k] for k in generator.permutation(len(batches))]

    def _cut(self, samples: list[int], lengths: list[int]) -> list[list[int]]:
        """Cut samples into batches, each as large as the bounds allow."""
        batches: list[list[int]] = []
        longest = 0
        for sample, length in zip(samples, lengths, strict=True):
            size = len(batches[-1]) + 1 if batches else 1
            longest = max(longest, length)
            if not batches or size > self.max_batch_size or size * longest > self.max_padded_length:
                batches.append([])
                longest = length
            batches[-1].append(sample)
        return batches

    def num_batches(self, num_epochs: int) -> int:
        """Number of batches of the first epochs; it differs a little from epoch to epoch."""
        return sum(len(self.epoch_batches(epoch)) for epoch in range(num_epochs))

    def num_samples(self, num_batches: int) -> int:
        """Number of samples in the first batches of the run."""
        batches = itertools.chain.from_iterable(self.epoch_batches(epoch) for epoch in itertools.count())
        return sum(len(batch) for batch in itertools.islice(batches, num_batches))

    def __iter__(self) -> Iterator[list[int]]:
        """Yield this process's batch of one micro step after the other."""
        number = self.consumed + self.rank
        epoch, first = 0, 0
        batches = self.epoch_batches(epoch)
        while True:
            while number >= first + len(batches):
                first += len(batches)
                epoch += 1
                batches = self.epoch_batches(epoch)
            yield batches[number - first]
            number += self.world_size


def make_loader(
    accelerator: Accelerator,
    dataset: Dataset,
    collate: Callable[[list[Any]], dict[str, Any]],
    arguments: TrainingArguments,
    sampler: Sampler,
) -> DataLoader:
    """Endless loader of the training batches of a sampler; it is not to be prepared by accelerate."""
    return DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate,
        num_workers=arguments.dataloader_num_workers,
        pin_memory=accelerator.device.type == "cuda",
        # Without a generator of its own, a loader draws from the global one, and a resumed run would differ.
        generator=torch.Generator(),
    )


# ---------------------------------------------------------------------------------------------- optimizer
def parameter_groups(
    model: nn.Module, learning_rate: float, module_rates: dict[str, float], weight_decay: float
) -> list[dict[str, Any]]:
    """Parameter groups by learning rate and weight decay.

    Args:
        model: the model.
        learning_rate: of everything that `module_rates` does not name.
        module_rates: module name (a component of the parameter's name, such as "parser") -> its learning rate.
        weight_decay: of matrices; biases, norms and single vectors are never decayed.

    Returns:
        Groups for a torch optimizer.

    Raises:
        ValueError: when a named module has no parameters.
    """
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    unused = set(module_rates)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        owner = next((module for module in module_rates if module in name.split(".")), None)
        unused.discard(owner)
        rate = learning_rate if owner is None else module_rates[owner]
        groups.setdefault((rate, weight_decay if parameter.dim() > 1 else 0.0), []).append(parameter)
    if unused:
        raise ValueError(f"No parameter of the model belongs to a module named {sorted(unused)[0]!r}.")
    return [{"params": params, "lr": rate, "weight_decay": decay} for (rate, decay), params in groups.items()]


def make_optimizer(
    model: nn.Module, arguments: TrainingArguments, module_rates: dict[str, float] | None = None
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW with parameter groups, and its schedule: linear warm-up, then decay to 0 at `max_train_steps`."""
    groups = parameter_groups(model, arguments.learning_rate, module_rates or {}, arguments.weight_decay)
    optimizer = torch.optim.AdamW(
        groups, betas=(arguments.adam_beta1, arguments.adam_beta2), eps=arguments.adam_epsilon
    )
    name = "constant_with_warmup" if arguments.lr_scheduler_type == "constant" else arguments.lr_scheduler_type
    schedule = get_scheduler(name, optimizer, arguments.warmup_steps, arguments.max_train_steps)
    return optimizer, schedule


# ---------------------------------------------------------------------------------------------- checkpoints
@dataclass
class TrainingState:
    """What a checkpoint holds besides weights and optimizer; small, readable, and enough to continue.

    Fields:
        step: optimizer steps done.
        consumed: samples (`StepSampler`) or batches (`PaddedBatchSampler`, segments of a stream) that all processes
            together have consumed.
        fingerprint: hash of everything that decides the course of the run; a resumed run must have the same.
        notes: what a script wants to remember (JSON), such as evaluations.
    """

    step: int = 0
    consumed: int = 0
    fingerprint: str = ""
    notes: dict[str, Any] = field(default_factory=dict)


def fingerprint(**settings: Any) -> str:
    """Short hash of JSON-like settings."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: into a temporary file, then rename."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints of an output folder, oldest first; half-written ones are left out."""
    found = []
    for folder in output_dir.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdigit() and (folder / STATE_FILE).is_file():
            found.append((int(number), folder))
    return [folder for _, folder in sorted(found)]


def find_checkpoint(output_dir: Path, name: str) -> Path | None:
    """The checkpoint that `--resume_from_checkpoint` names.

    Args:
        output_dir: of the run.
        name: "latest" or a checkpoint folder.

    Returns:
        The folder; `None` when "latest" is asked for and there is none.

    Raises:
        ValueError: when the named folder is no complete checkpoint.
    """
    if name == "latest":
        complete = list_checkpoints(output_dir)
        return complete[-1] if complete else None
    folder = Path(name)
    if not (folder / STATE_FILE).is_file() or folder.name.endswith(PARTIAL_SUFFIX):
        complete = [str(path) for path in list_checkpoints(output_dir)]
        raise ValueError(f"{name!r} is not a complete checkpoint. Complete ones in {str(output_dir)!r}: {complete}.")
    return folder


def save_checkpoint(accelerator: Accelerator, output_dir: Path, state: TrainingState, keep: int) -> Path:
    """Write the checkpoint `step_N` under a temporary name, rename it when complete, delete old ones.

    Args:
        accelerator: with model, optimizer and schedule prepared. Every process has to call.
        output_dir: of the run.
        state: of the run.
        keep: number of newest checkpoints to keep.

    Returns:
        The checkpoint folder.
    """
    folder = output_dir / f"step_{state.step}"
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        write_json(partial / STATE_FILE, dataclasses.asdict(state))
        if folder.exists():  # left by a run that was resumed from an earlier checkpoint
            shutil.rmtree(folder)
        os.replace(partial, folder)
        for old in list_checkpoints(output_dir)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return folder


def load_checkpoint(accelerator: Accelerator, folder: Path, expected_fingerprint: str) -> TrainingState:
    """Restore model, optimizer and schedule, and return the state of the run.

    Args:
        accelerator: with model, optimizer and schedule prepared.
        folder: a complete checkpoint.
        expected_fingerprint: of the current settings.

    Returns:
        The state.

    Raises:
        ValueError: when the settings or the data are not those of the checkpoint.
    """
    state = TrainingState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    if state.fingerprint != expected_fingerprint:
        raise ValueError(
            f"{folder} was written with other settings or data (model, optimizer, batch size, number of steps, seed or "
            "corpus). Resume with the same ones, or start afresh with another --output_dir."
        )
    accelerator.load_state(str(folder))
    return state


# ---------------------------------------------------------------------------------------------- the loop
def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of a batch, and what else can be moved, such as a schedule of tensors."""
    return {k: v.to(device, non_blocking=True) if hasattr(v, "to") else v for k, v in batch.items()}


@dataclass
class StepReport:
    """What one optimizer step leaves: tensors on the device, read only at logging intervals.

    Fields:
        losses: name -> mean over the micro steps of this process; "loss" is the objective.
        gradient_norm: before clipping.
    """

    losses: dict[str, Tensor]
    gradient_norm: Tensor


def optimizer_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: DataLoader,
    arguments: TrainingArguments,
    state: TrainingState,
    compute_loss: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]],
) -> Iterator[StepReport]:
    """Train until `max_train_steps`, yielding after every optimizer step.

    The objective of a step is the mean over its micro steps of a loss that is itself a mean over the micro batch.

    Args:
        accelerator: of the run.
        model: prepared.
        optimizer: prepared.
        schedule: prepared.
        batches: of `make_loader`.
        arguments: of the run.
        state: of the run; `step` and `consumed` are advanced.
        compute_loss: (model, batch) -> the scalar objective and its named parts, detached.

    Yields:
        `StepReport`, after `state` has been advanced.
    """
    model.train()
    sums: dict[str, Tensor] = {}
    accumulation = arguments.gradient_accumulation_steps
    iterator = iter(batches)
    micro_step = state.step * accumulation
    while state.step < arguments.max_train_steps:
        batch = to_device(next(iterator), accelerator.device)
        seed_micro_step(arguments.seed, micro_step, accelerator.process_index)
        with accelerator.accumulate(model):
            loss, parts = compute_loss(model, batch)
            accelerator.backward(loss)
            for name, value in {"loss": loss.detach(), **parts}.items():
                sums[name] = sums[name] + value / accumulation if name in sums else value / accumulation
            norm = torch.zeros(())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        micro_step += 1
        state.consumed += batches.batch_sampler.consumed_per_micro_step
        if accelerator.sync_gradients:
            state.step += 1
            report, sums = StepReport(sums, norm), {}
            yield report
            model.train()


class LossMeter:
    """Sums step reports on the device and reads them (one host sync, one reduction) when asked."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.names: list[str] = []
        self.total: Tensor | None = None
        self.count = 0

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self.names = [*report.losses, "gradient_norm"]
        device = self.accelerator.device
        values = torch.stack([v.detach().float().to(device) for v in (*report.losses.values(), report.gradient_norm)])
        self.total = values if self.total is None else self.total + values
        self.count += 1

    def read(self, step: int) -> dict[str, float]:
        """Means over the steps since the last reading and over all processes.

        Args:
            step: last step that was added, for messages.

        Returns:
            Name -> mean; empty when nothing was added.

        Raises:
            FloatingPointError: when a loss or the gradient norm was not finite.
        """
        if self.total is None:
            return {}
        values = self.accelerator.reduce(self.total / self.count, "mean").tolist()
        first = step - self.count + 1
        self.total, self.count = None, 0
        means = dict(zip(self.names, values, strict=True))
        broken = [name for name, value in means.items() if not np.isfinite(value)]
        if broken:
            raise FloatingPointError(
                f"{', '.join(broken)} became NaN or infinite between steps {first} and {step}. Lower the learning "
                "rate, lengthen the warm-up or train in float32; then resume from the last checkpoint or start again."
            )
        return means


def progress_bar(accelerator: Accelerator, arguments: TrainingArguments, state: TrainingState) -> tqdm:
    """Progress bar over all steps of the run, starting where the run resumes."""
    return tqdm(
        total=arguments.max_train_steps,
        initial=state.step,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.5,
        disable=not accelerator.is_local_main_process,
    )


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether something that happens every `interval` steps (0 = never) and not after the last step is due."""
    return interval > 0 and step % interval == 0 and step < last


# ---------------------------------------------------------------------------------------------- the run
@dataclass
class Run:
    """All parts of a run."""

    accelerator: Accelerator
    arguments: TrainingArguments
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    state: TrainingState

    @property
    def output_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.arguments.output_dir)


Evaluate = Callable[[nn.Module, int], dict[str, Any]]


def course_settings(arguments: TrainingArguments, config: Any, data_fingerprint: str, world_size: int) -> dict:
    """Everything that decides the course of a run and that all scripts share; folders and intervals do not.

    Args:
        arguments: of the run.
        config: of the model.
        data_fingerprint: hash of the training data.
        world_size: number of processes.

    Returns:
        Settings for `fingerprint`.
    """
    names = (
        "seed max_train_steps learning_rate adam_beta1 adam_beta2 adam_epsilon weight_decay max_grad_norm "
        "lr_scheduler_type warmup_steps per_device_train_batch_size gradient_accumulation_steps"
    ).split()
    return {
        **{name: getattr(arguments, name) for name in names},
        "config": config.to_dict(),
        "contexts": data_fingerprint,
        "num_processes": world_size,
    }


class BestModel:
    """Keeps the weights of the best evaluation, and says when there was no better one for long enough.

    Weights lie in `output_dir/best_N`, N the step of the evaluation. What a complete checkpoint names as its best stays
    as long as the checkpoint, so that a resumed run finds it.

    Args:
        metric: the number of an evaluation to minimise.
        patience: stop after so many evaluations in a row without a better one; 0 = never.
    """

    def __init__(self, metric: Callable[[dict[str, Any]], float], patience: int):
        self.metric, self.patience = metric, patience

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call.

        Args:
            run: whose `state.notes` hold the evaluations; the best is noted there.

        Returns:
            Whether to stop.

        Raises:
            FloatingPointError: when the metric is not finite.
        """
        notes = run.state.notes
        evaluation = notes["evaluations"][-1]
        value, best = self.metric(evaluation), notes.get("best")
        if not np.isfinite(value):
            raise FloatingPointError(f"The validation loss is {value} at step {evaluation['step']}.")
        if best is None or value < best["value"]:
            notes["best"] = {"step": evaluation["step"], "value": value}
            self._write(run)
            self.prune(run)
            return False
        stale = sum(1 for other in notes["evaluations"] if other["step"] > best["step"])
        return 0 < self.patience <= stale

    def prune(self, run: Run) -> None:
        """Delete weights that neither the run nor one of its checkpoints names as its best."""
        if run.accelerator.is_main_process:
            notes = [
                json.loads((folder / STATE_FILE).read_text())["notes"] for folder in list_checkpoints(run.output_dir)
            ]
            kept = {self._folder(run, item["best"]["step"]) for item in (run.state.notes, *notes) if "best" in item}
            for folder in run.output_dir.glob("best_*"):
                if folder not in kept:
                    shutil.rmtree(folder)
        run.accelerator.wait_for_everyone()

    def restore(self, run: Run) -> int:
        """Load the best weights into the model, on every process, and return the step that they are from."""
        step = run.state.notes["best"]["step"]
        file = self._folder(run, step) / "model.safetensors"
        load_weights(run.accelerator.unwrap_model(run.model), str(file))
        return step

    @staticmethod
    def _folder(run: Run, step: int) -> Path:
        return run.output_dir / f"best_{step}"

    def _write(self, run: Run) -> None:
        folder = self._folder(run, run.state.notes["best"]["step"])
        partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        if run.accelerator.is_main_process:
            for old in (partial, folder):
                shutil.rmtree(old, ignore_errors=True)
            partial.mkdir()
            save_weights(run.accelerator.unwrap_model(run.model), str(partial / "model.safetensors"))
            os.replace(partial, folder)
        run.accelerator.wait_for_everyone()


def start_or_resume(
    run: Run, checkpoint: Path | None, settings: dict[str, Any], evaluate: Evaluate, best: BestModel | None = None
) -> None:
    """Load the checkpoint, or evaluate the untrained model.

    Args:
        run: of this process; its `state` is replaced or begun.
        checkpoint: of `prepare_output_dir`.
        settings: of `course_settings`.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        best: keeps the best model.
    """
    mark = fingerprint(**settings)
    if checkpoint is not None:
        run.state = load_checkpoint(run.accelerator, checkpoint, mark)
        run.accelerator.print(f"resumed from {checkpoint} at step {run.state.step}")
        return
    run.state.fingerprint = mark
    run.state.notes["evaluations"] = [evaluate(run.model, 0)]
    if best is not None:
        best.update(run)


def train(
    run: Run,
    batches: DataLoader,
    compute_loss: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]],
    evaluate: Evaluate,
    best: BestModel | None = None,
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict,
    evaluation_due: Callable[[int], bool] | None = None,
) -> None:
    """Train to the last step (or until `best` says stop), with logging, evaluation and checkpoints on the way.

    Args:
        run: of this process.
        batches: of `make_loader`.
        compute_loss: see `optimizer_steps`.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        best: keeps the best model and stops the run.
        summarize: means of the named parts over the steps of a reading -> what is shown and noted.
        evaluation_due: whether to evaluate after a step; default: every `evaluation_steps`. The last step always is.
    """
    accelerator, arguments, state = run.accelerator, run.arguments, run.state
    if evaluation_due is None:

        def evaluation_due(step: int) -> bool:
            return is_due(step, arguments.evaluation_steps, arguments.max_train_steps)

    meter = LossMeter(accelerator)
    steps = optimizer_steps(
        accelerator, run.model, run.optimizer, run.schedule, batches, arguments, state, compute_loss
    )
    with progress_bar(accelerator, arguments, state) as bar:
        for report in steps:
            meter.add(report)
            bar.update()
            save = is_due(state.step, arguments.checkpointing_steps, arguments.max_train_steps)
            if save or state.step % arguments.logging_steps == 0 or state.step == arguments.max_train_steps:
                means = summarize(meter.read(state.step))
                bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()})
                rates = {f"learning_rate/{i}": rate for i, rate in enumerate(run.schedule.get_last_lr())}
                accelerator.log({**{f"train/{k}": v for k, v in means.items()}, **rates}, step=state.step)
                state.notes.setdefault("train", []).append({"step": state.step, **means})
            stop = False
            if state.step < arguments.max_train_steps and evaluation_due(state.step):
                state.notes["evaluations"].append(evaluate(run.model, state.step))
                stop = best is not None and best.update(run)
            if save and not stop:  # resumed from here, the run would go on
                save_checkpoint(accelerator, run.output_dir, state, arguments.checkpoints_total_limit)
                if best is not None:
                    best.prune(run)
            if stop:
                accelerator.print(f"stopped at step {state.step}: no better evaluation for a while")
                break
    if state.notes["evaluations"][-1]["step"] != state.step:
        state.notes["evaluations"].append(evaluate(run.model, state.step))
        if best is not None:
            best.update(run)


def save_final_model(run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any]) -> Path:
    """Export model, tokenizer, code and card to `output_dir/model`, and push it; every process has to call.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: for the card; the name is added.

    Returns:
        The folder.
    """
    accelerator = run.accelerator
    folder = run.output_dir / "model"
    weights = accelerator.get_state_dict(run.model)
    if accelerator.is_main_process:
        plain = accelerator.unwrap_model(run.model)
        card = fill_card(
            plain.config, {"repo_id": run.arguments.hub_model_id or run.output_dir.resolve().name, **facts}
        )
        export_model(plain, tokenizer, folder, card=card, overwrite=True, state_dict=weights)
        if run.arguments.push_to_hub:
            push_to_hub(folder, run.arguments.hub_model_id, token=run.arguments.hub_token)
    accelerator.wait_for_everyone()
    return folder


def save_tokenizer_once(
    accelerator: Accelerator, folder: Path, make: Callable[[], PreTrainedTokenizerBase], made_from: dict[str, Any]
) -> None:
    """Make a tokenizer on the main process and save it; a resumed run finds that of its first part.

    Args:
        accelerator: of the run. Every process has to call.
        folder: where the tokenizer lies afterwards; if it exists, nothing is made.
        make: makes the tokenizer.
        made_from: files and options that it depends on; written next to it.

    Raises:
        ValueError: when the one that exists was made from something else.
    """
    record = folder / "made_from.json"
    if accelerator.is_main_process and not folder.is_dir():
        tokenizer = make()
        partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        shutil.rmtree(partial, ignore_errors=True)
        tokenizer.save_pretrained(partial)
        (partial / record.name).write_text(json.dumps(made_from, indent=2), encoding="utf-8")
        partial.rename(folder)
    accelerator.wait_for_everyone()
    known = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    changed = {name: value for name, value in made_from.items() if known.get(name) != value}
    if changed:
        raise ValueError(
            f"The tokenizer in {folder} was made with { ({name: known.get(name) for name in changed}) }, and now "
            f"{changed} is asked for. Repeat the old values, pass it as tokenizer_name, or take another output_dir."
        )
