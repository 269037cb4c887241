"""Arguments of the training scripts, from a YAML or JSON file and from flags."""

import argparse
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from transformers import HfArgumentParser


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
