"""Checkpoints that are complete or do not exist, and what a resumed run must have in common with its first part."""

import dataclasses
import hashlib
import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate import Accelerator

STATE_FILE = "training_state.json"
PARTIAL_SUFFIX = ".partial"


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
