"""Checkpoints that are complete or do not exist, and what a resumed run must have in common with its first part.

A checkpoint is written under a temporary name, flushed to the disk and renamed; it is deleted the other way round. A
process that is killed at any moment leaves nothing behind that looks like a checkpoint and is none.
"""

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_synlm.training.arguments import TrainingArguments

logger = get_logger(__name__)

STATE_FILE = "training_state.json"
BEST_FILE = "best_model.safetensors"
# Where a previous run waits until the one that takes its place has begun.
REPLACED_FOLDER = "replaced_run"
PARTIAL_SUFFIX = ".partial"


@dataclass
class TrainingState:
    """What a checkpoint holds besides weights and optimizer; small, readable, and enough to continue.

    Fields:
        step: optimizer steps done.
        consumed: samples (`StepSampler`) or batches (`PaddedBatchSampler`, segments of a stream) that all processes
            together have consumed.
        settings: everything that decides the course of the run; a resumed run must have the same.
        notes: what a script wants to remember (JSON), such as evaluations.
    """

    step: int = 0
    consumed: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


# ---------------------------------------------------------------------------------------------- files
def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically: into a temporary file, then rename."""
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    partial.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    os.replace(partial, path)


def publish_folder(partial: Path, folder: Path) -> None:
    """Give a complete folder its final name, once its files are on the disk; an older folder of that name goes."""
    for path in (*partial.rglob("*"), partial):
        if path.is_file() or path.is_dir():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    if folder.exists():
        remove_folder(folder)
    os.replace(partial, folder)


@contextmanager
def written_whole(folder: Path, what: str) -> Iterator[Path]:
    """Write a folder of a run under a temporary name; what is left of it goes when that fails.

    Args:
        folder: its final name, which the block or its caller gives it (`publish_folder`).
        what: it is, for the message.

    Yields:
        The temporary name.

    Raises:
        OSError: when the disk is full or not to be written to; with a remedy.
    """
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    try:
        yield partial
    # A full disk shows as any of these, depending on who writes.
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        complete = list_checkpoints(folder.parent)
        start = f"from {complete[-1]}" if complete else "from the beginning, for there is no checkpoint"
        raise OSError(
            f"{what} {folder} could not be written: {error}. Free space or mend the folder; then the same command with "
            f"--resume_from_checkpoint latest goes on {start}."
        ) from error


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """A second name for a file, which costs no space; a copy where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def remove_folder(folder: Path) -> None:
    """Delete a folder that others may look for: it loses its name first, so that it is never seen half-deleted."""
    doomed = folder.with_name(f"{folder.name}.deleted{PARTIAL_SUFFIX}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def remove_partial(output_dir: Path) -> None:
    """Delete what interrupted runs have left half-written or half-deleted in an output folder."""
    for path in output_dir.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def check_writable(output_dir: Path) -> None:
    """Make the output folder and write into it.

    Args:
        output_dir: of a run.

    Raises:
        ValueError: when that is not possible.
    """
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        probe = output_dir / f"probe{PARTIAL_SUFFIX}"
        probe.write_bytes(b"written")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"Output folder {str(output_dir)!r} cannot be written to ({error.strerror or error}). Choose another "
            "--output_dir, or change its permissions."
        ) from error


def check_space(arguments: TrainingArguments, model: nn.Module) -> None:
    """Compare the free space of the disk with what a run will write.

    A checkpoint is taken for three times the trained weights, for the optimizer's two moments come with them; the best
    weights and the final model for once the weights each. What a run that is replaced takes counts as free.

    Args:
        arguments: of the run. At most `checkpoints_total_limit` checkpoints lie in its folder at once, and one more
            while the oldest has not been deleted.
        model: that is trained.

    Raises:
        ValueError: when not even one checkpoint, if there are to be some, and the final model fit.
    """
    output_dir = Path(arguments.output_dir)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    replaced = (path.stat().st_size for path in (output_dir / REPLACED_FOLDER).rglob("*") if path.is_file())
    free = shutil.disk_usage(output_dir).free + sum(replaced)
    num_checkpoints = arguments.checkpoints_total_limit if arguments.checkpointing_steps else 0
    least = (4 if num_checkpoints else 1) * weights
    all_of_it = (3 * (num_checkpoints + 1) + 2) * weights if num_checkpoints else 2 * weights
    if free < least:
        what = "a checkpoint and the final model take" if num_checkpoints else "the final model takes"
        raise ValueError(
            f"{str(output_dir)!r} has {free / 1e9:.2f} GB of free space; {what} about {least / 1e9:.2f} GB. Free some, "
            "or choose another --output_dir."
        )
    if free < all_of_it:
        logger.warning(
            f"{str(output_dir)!r} has {free / 1e9:.2f} GB of free space; {num_checkpoints} checkpoints and the one "
            f"that is written, the best and the final model will take about {all_of_it / 1e9:.2f} GB."
        )


# ---------------------------------------------------------------------------------------------- settings
def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Short hash of what a tokenizer does: vocabulary, rules and special tokens, whatever it was last called with."""
    rules = (
        json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    )
    if isinstance(rules, dict):
        rules = {name: value for name, value in rules.items() if name not in ("padding", "truncation")}
    text = json.dumps([rules, tokenizer.special_tokens_map], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they come back from a JSON file."""
    return json.loads(json.dumps(settings, default=str))


def changed_settings(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Say which settings differ.

    Args:
        before: of a checkpoint.
        now: of this run, plain.

    Returns:
        Texts such as "learning_rate 0.1 (now 0.2)".
    """
    old, new = dict(_flat(before)), dict(_flat(now))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    return [f"{name} {old.get(name)!r} (now {new.get(name)!r})" for name in names]


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# ---------------------------------------------------------------------------------------------- checkpoints
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


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, state: TrainingState, keep: int, best_weights: Path | None = None
) -> Path:
    """Write the checkpoint `step_N` under a temporary name, rename it when complete, delete old ones.

    Args:
        accelerator: with model, optimizer and schedule prepared. Every process has to call.
        output_dir: of the run.
        state: of the run.
        keep: number of newest checkpoints to keep.
        best_weights: file of the best weights so far, which becomes part of the checkpoint.

    Returns:
        The checkpoint folder.

    Raises:
        OSError: when it cannot be written; nothing of it is left then, and older ones stay.
    """
    folder = output_dir / f"step_{state.step}"
    with written_whole(folder, "The checkpoint") as partial:
        if accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            if best_weights is not None:
                link_or_copy(best_weights, partial / BEST_FILE)
            write_json(partial / STATE_FILE, dataclasses.asdict(state))
            publish_folder(partial, folder)
    if accelerator.is_main_process:
        for old in list_checkpoints(output_dir)[:-keep]:
            remove_folder(old)
    accelerator.wait_for_everyone()
    return folder


def read_state(folder: Path, settings: dict[str, Any]) -> TrainingState:
    """State of the run that a checkpoint holds.

    Args:
        folder: a complete checkpoint.
        settings: of this run.

    Returns:
        The state.

    Raises:
        ValueError: naming the settings and data that are not those of the checkpoint.
    """
    state = TrainingState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    changed = changed_settings(state.settings, plain_settings(settings))
    if changed:
        raise ValueError(
            f"{folder} was written with other settings or data: {', '.join(changed)}. Resume with the same ones, or "
            "start afresh with another --output_dir or with --overwrite_output_dir."
        )
    return state


def load_checkpoint(accelerator: Accelerator, folder: Path, settings: dict[str, Any]) -> TrainingState:
    """Restore model, optimizer and schedule, and return the state of the run.

    Args:
        accelerator: with model, optimizer and schedule prepared.
        folder: a complete checkpoint.
        settings: of this run.

    Returns:
        The state.

    Raises:
        ValueError: see `read_state`; and when the checkpoint is damaged.
    """
    state = read_state(folder, settings)
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"The checkpoint {folder} is damaged: {error}. Delete it; the run goes on from the one before it, if there "
            "is one."
        ) from error
    return state


def remove_later(output_dir: Path, step: int) -> None:
    """Delete checkpoints of later steps: they would count as newer than those that a resumed run will write."""
    for folder in list_checkpoints(output_dir):
        if int(folder.name.removeprefix("step_")) > step:
            remove_folder(folder)
