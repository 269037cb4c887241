"""Arguments of the training scripts, from a YAML or JSON file and from flags."""

import argparse
import dataclasses
import difflib
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from hf_synlm.data.arguments import ArgumentParser, config_flags, read_config_file, read_yaml

DEFAULT_STEPS = 1000
CONFIGS = Path(__file__).parent / "configs"


@dataclass
class TrainingArguments:
    """Optimization, checkpoints and logging; the flags are those of the official `no_trainer` scripts."""

    output_dir: str = field(default="", metadata={"help": "Folder for checkpoints, logs and the final model."})
    overwrite_output_dir: bool = field(
        default=False,
        metadata={
            "help": "Replace the run in the output folder, which is deleted. A folder that holds something else than a "
            "run, or what this run reads, is refused."
        },
    )
    seed: int = field(default=404, metadata={"help": "Seed of initialization, data order, dropout and noise."})
    per_device_train_batch_size: int = field(
        default=8, metadata={"help": "Contexts or sentences per process and micro step."}
    )
    per_device_eval_batch_size: int = field(
        default=8, metadata={"help": "Contexts or sentences per process in evaluation."}
    )
    gradient_accumulation_steps: int = field(default=1, metadata={"help": "Micro steps per optimizer step."})
    max_train_steps: int | None = field(
        default=None,
        metadata={
            "help": "Optimizer steps of the whole run; default: those of num_train_epochs, where there are some, or "
            "1000. With both, the smaller of the two."
        },
    )
    learning_rate: float = field(default=5e-5, metadata={"help": "Peak learning rate."})
    adam_beta1: float = field(default=0.9, metadata={"help": "AdamW: decay of the first moment."})
    adam_beta2: float = field(default=0.999, metadata={"help": "AdamW: decay of the second moment."})
    adam_epsilon: float = field(default=1e-6, metadata={"help": "AdamW: term in the denominator."})
    weight_decay: float = field(default=0.0, metadata={"help": "AdamW: decay of weights (not of biases and norms)."})
    max_grad_norm: float = field(
        default=1.0, metadata={"help": "Gradients are clipped to this norm; 0: they are not clipped."}
    )
    lr_scheduler_type: str = field(
        default="linear", metadata={"help": "Decay after the warm-up: linear or cosine (both to 0), or constant."}
    )
    warmup_ratio: float = field(default=0.01, metadata={"help": "Share of the steps with a rising learning rate."})
    num_warmup_steps: int | None = field(default=None, metadata={"help": "Warm-up in steps; overrides the ratio."})
    gradient_checkpointing: bool = field(
        default=False, metadata={"help": "Recompute layer activations in backward: less memory, more time."}
    )
    torch_compile: bool = field(
        default=False, metadata={"help": "Compile the Transformer layers of GPST with torch.compile."}
    )
    dataloader_num_workers: int = field(default=0, metadata={"help": "Processes that prepare batches."})
    logging_steps: int = field(default=10, metadata={"help": "Steps between readings of the losses."})
    evaluation_steps: int = field(default=0, metadata={"help": "Steps between evaluations; 0: only at both ends."})
    generation_steps: int = field(
        default=0, metadata={"help": "Steps between sentences that the model generates, with their trees; 0: none."}
    )
    checkpointing_steps: int = field(default=0, metadata={"help": "Steps between checkpoints; 0: none."})
    checkpoints_total_limit: int = field(default=2, metadata={"help": "Number of newest checkpoints to keep."})
    resume_from_checkpoint: str | None = field(
        default=None,
        metadata={
            "help": "A checkpoint folder, or 'latest' for the newest complete one, if any. Default: an unfinished run "
            "in the output folder is resumed."
        },
    )
    with_tracking: bool = field(default=False, metadata={"help": "Log to the trackers of --report_to."})
    report_to: str = field(
        default="tensorboard", metadata={"help": "A tracker that accelerate knows, such as tensorboard or trackio."}
    )
    peak_flops: float | None = field(
        default=None,
        metadata={"help": "Peak FLOP/s of a device, for the utilization; default: from a table of GPUs."},
    )
    push_to_hub: bool = field(default=False, metadata={"help": "Push the final model to the Hub."})
    hub_strategy: str = field(
        default="end",
        metadata={
            "help": "What --push_to_hub pushes: 'end' the final model; 'checkpoint' also the model of every "
            "checkpoint, and the checkpoint itself as last-checkpoint."
        },
    )
    hub_model_id: str | None = field(default=None, metadata={"help": "Repository of --push_to_hub."})
    hub_token: str | None = field(default=None, metadata={"help": "Token of --push_to_hub; default: the login's."})

    def __post_init__(self):
        """Check the values, so that a wrong one fails before any work is done."""
        if not self.output_dir:
            raise ValueError("output_dir is not set. Pass --output_dir FOLDER or set it in the config file.")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite and is {value}.")
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps",
                     "max_train_steps", "logging_steps", "checkpoints_total_limit"):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1 and is {value}.")
        for name in ("evaluation_steps", "generation_steps", "checkpointing_steps", "learning_rate", "weight_decay",
                     "max_grad_norm"):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative and is {getattr(self, name)}.")
        if self.peak_flops is not None and self.peak_flops <= 0:
            raise ValueError(f"peak_flops must be positive and is {self.peak_flops}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"warmup_ratio must be in [0, 1] and is {self.warmup_ratio}.")
        if self.lr_scheduler_type not in ("linear", "cosine", "constant"):
            raise ValueError(
                f"lr_scheduler_type {self.lr_scheduler_type!r} is unknown. Choose linear, cosine, constant."
            )
        if self.hub_strategy not in ("end", "checkpoint"):
            raise ValueError(f"hub_strategy is {self.hub_strategy!r}. Choose 'end' or 'checkpoint'.")
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("push_to_hub needs a repository. Pass --hub_model_id OWNER/NAME.")
        if self.push_to_hub and self.hub_strategy == "checkpoint" and not self.checkpointing_steps:
            raise ValueError("hub_strategy 'checkpoint' needs checkpoints. Set checkpointing_steps.")
        if self.with_tracking:
            self._check_tracker()

    def _check_tracker(self) -> None:
        """Raise ValueError for a tracker that is unknown or not installed: accelerate would leave it out."""
        known = [str(item) for item in LoggerType if item != LoggerType.ALL]
        if self.report_to not in known:
            raise ValueError(f"report_to is {self.report_to!r}. Choose among {', '.join(known)}.")
        if self.report_to not in [str(item) for item in get_available_trackers()]:
            raise ValueError(f"report_to is {self.report_to!r}, which is not installed: pip install {self.report_to}.")

    def limit_steps(self, steps_of_epochs: int | None = None) -> None:
        """Settle `max_train_steps`.

        Args:
            steps_of_epochs: what the epochs of the run take, if their number is given.
        """
        given = [count for count in (self.max_train_steps, steps_of_epochs) if count is not None]
        self.max_train_steps = min(given, default=DEFAULT_STEPS)

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
        value = read_yaml(text, f"--{name} {text!r}")
        if not isinstance(value, dict):
            raise ValueError(f"--{name} {text!r} is not a JSON object.")
        return value
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"--{name}: {key!r} has no value. Write key=value,key=value or a JSON object.")
    return {key.strip(): read_yaml(value, f"--{name} {key}={value}") for key, _, value in pairs}


def find_config(name: str) -> str:
    """Find the file that `--config` names.

    Args:
        name: a file, or the name of a shipped configuration, such as "gpst_tiny".

    Returns:
        Path of the file.

    Raises:
        ValueError: there is no such file or configuration.
    """
    if Path(name).is_file():
        return name
    shipped = {path.stem: str(path) for path in sorted(CONFIGS.glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    close = difflib.get_close_matches(Path(name).stem, shipped, 3)
    hint = f"Did you mean {' or '.join(close)}?" if close else f"Shipped configurations: {', '.join(shipped)}."
    raise ValueError(f"There is no config file and no shipped configuration {name!r}. {hint}")


def read_config(path: str, known: Sequence[str]) -> dict[str, Any]:
    """Read a YAML or JSON file of arguments.

    Args:
        path: the file.
        known: names of all arguments.

    Returns:
        Argument name -> value.

    Raises:
        ValueError: the file does not hold a mapping, or a key is not an argument.
    """
    values = read_config_file(path)
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            hint = f" Did you mean {close[0]!r}?" if close else " Run the script with --help for all names."
            raise ValueError(f"{path}: {key!r} is not an argument of this script.{hint}")
    return values


def parse_arguments(
    types: Sequence[type],
    argv: Sequence[str] | None = None,
    mappings: Sequence[str] = (),
    description: str | None = None,
) -> tuple[Any, ...]:
    """Read dataclasses of arguments from `--config` and from flags; flags win.

    A field named in `mappings` arrives as a dict: the file's mapping, updated key by key with the flag's, which has
    the form of `read_mapping`.

    Args:
        types: the dataclasses.
        argv: command line without the program name; default: the process's.
        mappings: names of string fields that hold mappings.
        description: of the program, for `--help`.

    Returns:
        One instance per dataclass.

    Raises:
        ValueError: see `find_config` and `read_config`; also for flags that no dataclass has.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)
    names = [f.name for cls in types for f in dataclasses.fields(cls) if f.init]
    values = read_config(find_config(known.config), names) if known.config else {}
    parser = ArgumentParser(list(types), allow_abbrev=False, description=description)
    parser.add_argument(
        "--config",
        help="YAML or JSON file with values for any of the arguments, or the name of a shipped configuration such as "
        "gpst_tiny; flags win.",
    )
    given = {name: value for name, value in values.items() if not isinstance(value, dict)}
    # `--config` itself belongs to no dataclass and comes last, as a namespace.
    parsed = parser.parse_args_into_dataclasses(args=[*config_flags(given), *rest], look_for_args_file=False)
    parsed = parsed[: len(types)]
    for arguments in parsed:
        for f in dataclasses.fields(arguments):
            value = getattr(arguments, f.name)
            if f.name in mappings:
                given = read_mapping(value, f.name) if isinstance(value, str) else {}
                setattr(arguments, f.name, {**(values.get(f.name) or {}), **given})
            elif isinstance(values.get(f.name), dict):
                raise ValueError(f"{known.config}: {f.name!r} takes a single value, not a mapping.")
    return tuple(parsed)


def check_overrides(config_class: type, overrides: Any) -> dict[str, Any]:
    """Check fields that replace those of a preset.

    Args:
        config_class: the configuration, a dataclass.
        overrides: mapping from fields to values, as `parse_arguments` returns it; may be `None`.

    Returns:
        The same; integers become floats where the field is a float.

    Raises:
        ValueError: the configuration has no such field.
    """
    types = {f.name: f.type for f in dataclasses.fields(config_class)}
    checked: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        if name not in types:
            raise ValueError(f"config_overrides: {config_class.__name__} has no field {name!r}.")
        checked[name] = float(value) if types[name] is float and isinstance(value, int) else value
    return checked
