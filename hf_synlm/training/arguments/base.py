# SPDX-License-Identifier: Apache-2.0
"""Arguments of the training programs, from a YAML or JSON file and from flags."""

import argparse
import dataclasses
import difflib
import math
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

from hf_synlm.data.arguments import ArgumentParser, config_flags, option, read_config_file, read_yaml
from hf_synlm.data.files import find_model, flag_of
from hf_synlm.data.samples import EMBEDDED
from hf_synlm.hub.checkpoint import check_model_source
from hf_synlm.training.architectures import ARCHITECTURES, Architecture

DEFAULT_STEPS = 1000
STEPS_BEFORE_PROFILE = 3  # the first ones compile and reserve memory; the profiler itself starts in the last of them
MAPPINGS = ("config_overrides", "parse_options", "generation_options")
CONFIGS = Path(__file__).parents[1] / "configs"


@dataclass
class TrainingArguments:
    """Optimization, checkpoints and logging; the flags are those of the official `no_trainer` scripts."""

    output_dir: str = option("", "Folder for checkpoints, logs and the final model.")
    overwrite_output_dir: bool = option(
        False,
        "Delete the run in the output folder when the new one begins, and start from step 0. Until then, the old run "
        "waits in the folder 'replaced.partial'. A folder with other files or with inputs of this run is refused.",
    )
    seed: int = option(404, "Seed of initialization, data order, dropout and noise.")
    per_device_train_batch_size: int = option(8, "Contexts or sentences per process and micro step.", minimum=1)
    per_device_eval_batch_size: int = option(8, "Contexts or sentences per process in evaluation.", minimum=1)
    gradient_accumulation_steps: int = option(1, "Micro steps per optimizer step.", minimum=1)
    max_train_steps: int | None = option(
        None,
        "Optimizer steps of the run. By default, --num-train-epochs decides. Without both options, the run has 1000 "
        "steps. With both, the smaller number of steps counts.",
        minimum=1,
    )
    max_tokens: int | None = option(
        None, "End the run with the step that reaches this many tokens (all processes, since step 0).", minimum=1
    )
    max_time: float | None = option(
        None,
        "End the run after the first step that begins this many minutes after the start of training. The learning "
        "rate still follows --max-train-steps.",
        minimum=0,
    )
    num_train_epochs: int = option(0, "Passes through the data. With 0, --max-train-steps decides.", minimum=0)
    early_stopping_patience: int = option(
        0, "Keep the best model, and stop after this many evaluations without a better model. 0 never stops.", minimum=0
    )
    learning_rate: float = option(5e-5, "Peak learning rate.", minimum=0)
    adam_beta1: float = option(0.9, "AdamW: decay of the first moment.")
    adam_beta2: float = option(0.999, "AdamW: decay of the second moment.")
    adam_epsilon: float = option(1e-6, "AdamW: epsilon, added to the denominator.")
    adam_bias_correction: bool = option(True, "AdamW: use bias correction of the moments. GPST's authors do not.")
    weight_decay: float = option(0.0, "AdamW: weight decay of matrices. Biases and norms have none.", minimum=0)
    max_grad_norm: float = option(1.0, "Clip gradients to this norm. 0 turns this off.", minimum=0)
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option(
        "linear", "Learning rate after the warm-up. linear and cosine decay to 0, constant does not decay."
    )
    warmup_ratio: float = option(0.01, "Warm-up as a share of all steps.")
    num_warmup_steps: int | None = option(None, "Warm-up in steps. It overrides --warmup-ratio.")
    gradient_checkpointing: bool = option(False, "Save memory: compute activations again in backward.")
    torch_compile: bool = option(False, "Compile the layers and the chart of GPST, or the LSTMs of RNNG and URNNG.")
    precision: Literal["float32", "tf32", "bf16"] | None = option(
        None,
        "Precision of training. 'tf32' is float32 with products in TF32, on a GPU. 'bf16' is autocast to bfloat16. "
        "By default, mixed_precision of accelerate decides. If that is 'no', a GPU uses 'tf32', a CPU 'float32'.",
    )
    dataloader_num_workers: int | None = option(
        None,
        "Processes that prepare batches, for each GPU. Default: 2 on a GPU. On a CPU, the default is 0: the main "
        "process prepares batches.",
        minimum=0,
    )
    profile: int = option(
        0, "After the first three steps, record this many steps with torch.profiler. 0 records none.", minimum=0
    )
    logging_steps: int = option(10, "Number of steps between logs of the losses.", minimum=1)
    evaluation_steps: int = option(0, "Steps between evaluations (0: only before and after training).", minimum=0)
    checkpointing_steps: int = option(0, "Steps between checkpoints. 0 turns this off.", minimum=0)
    checkpoints_total_limit: int = option(2, "Number of newest checkpoints to keep.", minimum=1)
    keep_at_words: str | None = option(
        None,
        "Numbers of words, such as 1M,2M. After so many words since step 0, the run saves a checkpoint and keeps it.",
    )
    resume_from_checkpoint: str | None = option(
        None,
        "Folder of a checkpoint, or 'latest' for the newest complete checkpoint. By default, an unfinished run in "
        "the output folder is resumed, and a finished run is refused.",
    )
    with_tracking: bool = option(False, "Log to the trackers of --report-to.")
    report_to: str = option("tensorboard", "Tracker supported by accelerate, such as tensorboard or trackio.")
    push_to_hub: bool = option(False, "Push the final model to the Hub.")
    hub_model_id: str | None = option(None, "Repository of --push-to-hub.")

    def __post_init__(self):
        """Check the values, so that a wrong one fails before any work is done."""
        if not self.output_dir:
            raise ValueError("--output-dir is not set. Pass --output-dir FOLDER or set it in the config file.")
        for name, value in dataclasses.asdict(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{flag_of(name)} must be finite and is {value}.")
        if not 0 <= self.warmup_ratio <= 1:
            raise ValueError(f"--warmup-ratio must be in [0, 1] and is {self.warmup_ratio}.")
        self.word_marks = [_number_of_words(part.strip()) for part in (self.keep_at_words or "").split(",") if part]
        if self.push_to_hub and not self.hub_model_id:
            raise ValueError("--push-to-hub needs a repository. Pass --hub-model-id OWNER/NAME.")
        if self.with_tracking:  # accelerate would ignore a tracker that is unknown or not installed
            from accelerate.tracking import get_available_trackers  # imports torch, which --list-configs does not need
            from accelerate.utils import LoggerType

            check_choice("report_to", self.report_to, [str(item) for item in LoggerType if item != LoggerType.ALL])
            if self.report_to not in [str(item) for item in get_available_trackers()]:
                name = self.report_to
                raise ValueError(f"--report-to is {name!r}, which is not installed: pip install {name}.")

    def limit_steps(self, steps_of_epochs: int | None = None) -> None:
        """Settle `max_train_steps`: the smaller of itself and the steps of `num_train_epochs`, or the default."""
        given = [count for count in (self.max_train_steps, steps_of_epochs) if count is not None]
        self.max_train_steps = min(given, default=DEFAULT_STEPS)
        if self.profile and self.profile + STEPS_BEFORE_PROFILE > self.num_steps:
            raise ValueError(
                f"--profile is {self.profile}, after {STEPS_BEFORE_PROFILE} other steps, but the run has only "
                f"{self.num_steps} steps. Raise --max-train-steps or lower --profile."
            )

    @property
    def num_steps(self) -> int:
        """Steps of the whole run, once `limit_steps` has settled `max_train_steps`."""
        return cast(int, self.max_train_steps)

    @property
    def warmup_steps(self) -> int:
        """Steps of the warm-up."""
        if self.num_warmup_steps is not None:
            return self.num_warmup_steps
        return round(self.warmup_ratio * self.num_steps)


@dataclass
class ModelArguments:
    """The model to train, one of the table of `program`."""

    program: ClassVar[str]

    architecture: str = option("", "Architecture of the model.")
    model_preset: str | None = option(None, "Published size to start from.")
    config_overrides: str | None = option(
        None,
        "Fields of the configuration that differ from the preset. Write key=value,key=value or a JSON object, or a "
        "mapping in a config file.",
    )
    model_name_or_path: str | None = option(None, "Start from the weights and configuration of this model.")

    def __post_init__(self):
        """Check the architecture, and find the model to continue from."""
        if self.row.model is None:
            reason = f"but a {self.architecture} is trained from scratch, and --config-overrides sets its sizes"
            refuse(self, "model_name_or_path model_preset", reason)
        if self.model_name_or_path is not None:
            self.model_name_or_path = find_model(self.model_name_or_path)
            check_model_source(self.model_name_or_path)

    @property
    def row(self) -> Architecture:
        """What the table says of the architecture."""
        rows = ARCHITECTURES[self.program]
        check_choice("architecture", self.architecture, list(rows))
        return rows[self.architecture]


# ---------------------------------------------------------------------------------------------- checks
def _number_of_words(text: str) -> int:
    """The number that 500K, 1.5M or 2000000 means."""
    if not re.fullmatch(r"(?=.*[1-9])\d+(\.\d+)?[KMB]?", text):
        raise ValueError(f"--keep-at-words: {text!r} is not a number of words. Write 500K, 1.5M or 2000000.")
    return round(float(text.rstrip("KMB")) * {"K": 10**3, "M": 10**6, "B": 10**9}.get(text[-1], 1))


def refuse(arguments: Any, names: str, reason: str) -> None:
    """Raise ValueError for an option of `names` that is set and has no effect; `reason` says why."""
    for name in names.split():
        value = getattr(arguments, name)
        if value and value != getattr(type(arguments), name, None):
            raise ValueError(f"{flag_of(name)} is {value!r}, {reason}. Leave this option out.")


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Raise ValueError if the value of an argument is not one of `choices`."""
    if value not in choices:
        raise ValueError(f"{flag_of(name)} is {value!r}. Choose among {', '.join(choices)}.")


def check_overrides(config_class: type, overrides: Any, decided: Collection[str] = ()) -> dict[str, Any]:
    """Return `overrides` of a configuration, a mapping or `None`; integers become floats where the field is a float.

    Raises ValueError if the configuration has no such field, or if it is one of `decided`, which follow from the data.
    """
    types = {f.name: f.type for f in dataclasses.fields(config_class)}
    types |= {other: types[name] for other, name in getattr(config_class, "attribute_map", {}).items() if name in types}
    checked: dict[str, Any] = {}
    for name, value in (overrides or {}).items():
        if name not in types:
            raise ValueError(f"--config-overrides: {config_class.__name__} has no field {name!r}.")
        if name in decided:
            raise ValueError(f"--config-overrides: {name} follows from tokenizer and data. Leave this field out.")
        checked[name] = float(value) if types[name] is float and isinstance(value, int) else value
    return checked


# ---------------------------------------------------------------------------------------------- command line
def read_mapping(text: str, name: str) -> dict[str, Any]:
    """Read the mapping of a flag: JSON such as `{"hidden_size": 64}`, or `hidden_size=64,merge_noise=0.5`."""
    if text.lstrip().startswith("{"):
        value = read_yaml(text, f"{flag_of(name)} {text!r}")
        if not isinstance(value, dict):
            raise ValueError(f"{flag_of(name)} {text!r} is not a JSON object.")
        return value
    pairs = [pair.partition("=") for pair in text.split(",") if pair.strip()]
    for key, equals, _ in pairs:
        if not equals:
            raise ValueError(f"{flag_of(name)}: {key!r} has no value. Write key=value,key=value or a JSON object.")
    return {key.strip(): read_yaml(value, f"{flag_of(name)} {key}={value}") for key, _, value in pairs}


def find_config(name: str) -> str:
    """Path of what `--config` names: a file, or a shipped configuration such as "gpst_tiny"."""
    if Path(name).is_file():
        return name
    shipped = {path.stem: str(path) for path in sorted(CONFIGS.glob("*.yaml"))}
    if name in shipped:
        return shipped[name]
    hint = _similar(Path(name).stem, shipped) or f"Shipped configurations: {', '.join(shipped)}."
    raise ValueError(f"There is no config file and no shipped configuration {name!r}. {hint}")


def list_configs(program: str, argv: Sequence[str]) -> bool:
    """Whether a command line has --list-configs; then the shipped configurations of the program are printed."""
    if not {"--list-configs", "--list_configs"}.intersection(argv):
        return False
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yaml"))}
    found = {name: text for name, text in texts.items() if f"training/{program}.py" in text}
    lines = [f"{name:24} {text.partition(chr(10))[0].lstrip('# ')}" for name, text in found.items()]
    print("\n".join(lines) or f"{program} has no shipped configurations.")
    return True


def names_config(argv: Sequence[str]) -> bool:
    """Whether a command line names a configuration."""
    return any(word.partition("=")[0] == "--config" for word in argv)


def parse_arguments(
    types: Iterable[type], argv: Sequence[str] | None = None, description: str | None = None, base: str | None = None
) -> tuple[Any, ...]:
    """Read one instance of each dataclass from `--config` and from flags; flags win.

    `argv` is the command line without the program name (default: the process's). The values of the configuration `base`
    count where neither names one. A field of MAPPINGS arrives as
    a dict: the file's mapping, updated key by key with the flag's, which has the form of `read_mapping`. Keys and flags
    that no dataclass has are refused.
    """
    types, is_typed, argv = list(types), argv is None, list(sys.argv[1:] if argv is None else argv)
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    known, rest = first.parse_known_args(argv)
    parser = ArgumentParser(types, allow_abbrev=False, description=description)
    parser.add_argument(
        "--config",
        help="YAML or JSON file with values for any of the arguments, or the name of a shipped configuration such as "
        "gpst_tiny. Options on the command line override the file.",
    )
    parser.add_argument("--list-configs", action="store_true", help="List the shipped configurations, and end.")
    for action, count in parser.counts(argv).items():
        if count > 1 and (is_typed or action.dest == "config" or action.nargs == "*"):  # scripts may override values
            remedy = "once, with all of its values behind it" if action.nargs == "*" else "once"
            raise ValueError(f"{flag_of(action.dest)} is given {count} times. Give it {remedy}.")
    files = [read_config_file(find_config(name)) for name in (base, known.config) if name]
    values = {name: value for file in files for name, value in file.items() if value or name not in MAPPINGS}
    _check_names(values, parser.names, known.config)
    given = {name: value for name, value in values.items() if not isinstance(value, dict)}
    # `--config` itself belongs to no dataclass and comes after them, as a namespace; then what was not understood.
    *parsed, unknown = parser.parse_args_into_dataclasses(
        args=[*config_flags(given), *rest], look_for_args_file=False, return_remaining_strings=True
    )
    if unknown:
        word = unknown[0].removeprefix("--").partition("=")[0].replace("-", "_")
        hint = _similar(word, parser.names, flag_of) or "--help lists all options."
        raise ValueError(f"{unknown[0]} is not an option of this program. {hint}")
    parsed = parsed[: len(types)]
    for arguments in parsed:
        _check_files(arguments, is_said=base is None and os.environ.get("RANK", "0") == "0")
        for f in dataclasses.fields(arguments):
            value = getattr(arguments, f.name)
            if f.name in MAPPINGS:
                given = read_mapping(value, f.name) if isinstance(value, str) else {}
                setattr(arguments, f.name, {**(values.get(f.name) or {}), **given})
            elif isinstance(values.get(f.name), dict):
                raise ValueError(f"{known.config}: {f.name!r} takes a single value, not a mapping.")
    return tuple(parsed)


def _check_files(arguments: Any, is_said: bool) -> None:
    """Refuse a file that an option names twice, and tell of training files that also measure the model."""
    known = set[str]()
    for name, value in vars(arguments).items():
        if value and re.fullmatch("(train|validation(_mismatched)?|test)_(files?|trees|words)", name):
            named = [value] if isinstance(value, str) else value
            paths = [os.path.realpath(path) for path in named if path != EMBEDDED]
            if twice := [path for path in paths if paths.count(path) > 1]:
                raise ValueError(f"{flag_of(name)} names {twice[0]} twice. Name it once.")
            if name.startswith("train"):
                known.update(paths)
            elif is_said and known.intersection(paths):
                print(f"{flag_of(name)}: {min(known.intersection(paths))} is also a training file", file=sys.stderr)


def _check_names(values: Collection[Any], names: Sequence[str], file: str | None) -> None:
    """Raise ValueError for a name in a config file that is no argument."""
    for key in map(str, values):
        if key not in names:
            hint = _similar(key, names) or "--help lists all names."
            raise ValueError(f"{file}: {key!r} is not an argument of this program. {hint}")


def _similar(word: str, names: Collection[str], write: Callable[[str], str] = str) -> str:
    """Ask whether a similar name is meant; empty if there is none."""
    close = [name for name in names if name.startswith(word)] + difflib.get_close_matches(word, names, 1, 0.75)
    return f"Did you mean {write(close[0])}?" if close else ""
