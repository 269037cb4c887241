"""Checkpoints and best weights: complete or absent, and resumed only with the same settings.

A checkpoint is written under a temporary name, flushed to the disk and renamed; before deletion it is renamed, too. A
process that is killed at any moment never leaves an incomplete folder that looks like a checkpoint.
"""

import dataclasses
import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights

from hf_synlm.data.files import PARTIAL_SUFFIX, folder_writer, remove_folder, write_json
from hf_synlm.training.engine.run import Run, TrainingState

STATE_FILE = "training_state.json"
BEST_FILE = "best_model.safetensors"
WEIGHTS_FILE = "model.safetensors"


# ---------------------------------------------------------------------------------------------- files
@contextmanager
def clear_errors(folder: Path, what: str) -> Iterator[None]:
    """Say what to do when a folder of a run cannot be written.

    Args:
        folder: that the block writes.
        what: "The checkpoint" and the like, for the message.

    Yields:
        Nothing.

    Raises:
        OSError: the disk is full or cannot be written to; with a remedy.
    """
    try:
        yield
    # A full disk raises any of these, depending on the writer.
    except (OSError, RuntimeError, SafetensorError) as error:
        complete = list_checkpoints(folder.parent)
        start = f"continues from {complete[-1]}" if complete else "starts from the beginning (there is no checkpoint)"
        raise OSError(
            f"{what} {folder} could not be written: {error}. Free space or repair the folder; then the same command "
            f"with --resume_from_checkpoint latest {start}."
        ) from error


def link_or_copy(source: str | Path, target: str | Path) -> None:
    """Hard-link a file, which takes no space; copy it where the file system has no hard links.

    Args:
        source: the file.
        target: its second name.
    """
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# ---------------------------------------------------------------------------------------------- settings
def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings to what a JSON file would return.

    Args:
        settings: of a run.

    Returns:
        Dicts, lists, numbers and strings.
    """
    return json.loads(json.dumps(settings, default=str))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of nested dicts by names such as `config.hidden_size`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# ---------------------------------------------------------------------------------------------- checkpoints
def list_checkpoints(output_dir: Path) -> list[Path]:
    """List the complete checkpoints of an output folder.

    Args:
        output_dir: of a run.

    Returns:
        Folders, oldest first.
    """
    found = []
    for folder in output_dir.glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdigit() and (folder / STATE_FILE).is_file():
            found.append((int(number), folder))
    return [folder for _, folder in sorted(found)]


def find_checkpoint(output_dir: Path, name: str) -> Path | None:
    """Find the checkpoint that `--resume_from_checkpoint` names.

    Args:
        output_dir: of the run.
        name: "latest" or a checkpoint folder.

    Returns:
        The folder; `None` if there is no "latest" one.

    Raises:
        ValueError: the named folder is not a complete checkpoint.
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
        best_weights: file of the best weights so far; linked or copied into the checkpoint.

    Returns:
        The checkpoint folder.

    Raises:
        OSError: it cannot be written; nothing of it is left, and older ones stay.
    """
    folder = output_dir / f"step_{state.step}"
    is_main = accelerator.is_main_process
    with clear_errors(folder, "The checkpoint"):
        with (
            folder_writer(folder) if is_main else nullcontext(folder.with_name(folder.name + PARTIAL_SUFFIX)) as partial
        ):
            accelerator.wait_for_everyone()
            accelerator.save_state(str(partial))
            accelerator.wait_for_everyone()
            if is_main:
                if best_weights is not None:
                    link_or_copy(best_weights, partial / BEST_FILE)
                write_json(partial / STATE_FILE, dataclasses.asdict(state))
    if is_main:
        for old in list_checkpoints(output_dir)[:-keep]:
            remove_folder(old)
    accelerator.wait_for_everyone()
    return folder


def read_state(folder: Path, settings: dict[str, Any]) -> TrainingState:
    """Read the state of a checkpoint and compare its settings.

    Args:
        folder: a complete checkpoint.
        settings: of this run.

    Returns:
        The state.

    Raises:
        ValueError: settings or data differ from those of the checkpoint; names them.
    """
    state = TrainingState(**json.loads((folder / STATE_FILE).read_text(encoding="utf-8")))
    old, new = _flat(state.settings), _flat(plain_settings(settings))
    names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    changed = [f"{name} {old.get(name)!r} (now {new.get(name)!r})" for name in names]
    if changed:
        raise ValueError(
            f"{folder} was written with other settings or data: {', '.join(changed)}. Resume with the same ones, or "
            "start from step 0 with another --output_dir or with --overwrite_output_dir."
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
        ValueError: see `read_state`; or the checkpoint is damaged.
    """
    state = read_state(folder, settings)
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"The checkpoint {folder} is damaged: {error}. Delete it; the run then resumes from the previous one, if "
            "there is one."
        ) from error
    return state


def remove_later(output_dir: Path, step: int) -> None:
    """Delete later checkpoints, which would count as newer than those that the resumed run writes.

    Args:
        output_dir: of the run.
        step: that the run is resumed from.
    """
    for folder in list_checkpoints(output_dir):
        if int(folder.name.removeprefix("step_")) > step:
            remove_folder(folder)


# ---------------------------------------------------------------------------------------------- best model
class BestModel:
    """Keeps the weights of the best evaluation, and stops a run early.

    Weights are in `output_dir/best_N`, where N is the step of the evaluation. A checkpoint holds the best weights so
    far (`weights`), so that a run can be resumed from a copy of it (`adopt`).

    Args:
        metric: evaluation -> the number to minimise.
        patience: stop after this many evaluations in a row without a better one; 0 = never.
        first_step: evaluations of earlier steps are never the best; 1 leaves out the model that a run begins with.
    """

    def __init__(self, metric: Callable[[dict[str, Any]], float], patience: int = 0, first_step: int = 0):
        self.metric, self.patience, self.first_step = metric, patience, first_step

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call.

        Args:
            run: whose `state.notes` hold the evaluations; the best is noted there.

        Returns:
            Whether to stop.

        Raises:
            FloatingPointError: the metric is not finite.
        """
        notes = run.state.notes
        evaluation = notes["evaluations"][-1]
        if evaluation["step"] < self.first_step:
            return False
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
        """Delete weights that are no longer the best; every process has to call."""
        if run.accelerator.is_main_process:
            kept = self._folder(run, run.state.notes["best"]["step"]) if "best" in run.state.notes else None
            for folder in run.output_dir.glob("best_*"):
                if folder != kept and not folder.name.endswith(PARTIAL_SUFFIX):
                    remove_folder(folder)
        run.accelerator.wait_for_everyone()

    def weights(self, run: Run) -> Path | None:
        """File of the best weights so far, if there are some."""
        best = run.state.notes.get("best")
        return None if best is None else self._folder(run, best["step"]) / WEIGHTS_FILE

    def adopt(self, run: Run, checkpoint: Path) -> None:
        """Take over the best weights of the checkpoint that a run is resumed from; every process has to call.

        Args:
            run: resumed.
            checkpoint: that it is resumed from.

        Raises:
            ValueError: they are missing.
        """
        file = self.weights(run)
        if run.accelerator.is_main_process and file is not None and not file.is_file():
            if not (checkpoint / BEST_FILE).is_file():
                raise ValueError(
                    f"The best weights of the run are those of step {run.state.notes['best']['step']}, and "
                    f"{checkpoint / BEST_FILE} is missing. Copy the whole checkpoint, or resume from another one."
                )
            with clear_errors(file.parent, "The best model"), folder_writer(file.parent) as partial:
                link_or_copy(checkpoint / BEST_FILE, partial / WEIGHTS_FILE)
        self.prune(run)

    def restore(self, run: Run) -> int:
        """Load the best weights into the model; returns their step. Every process has to call."""
        step = run.state.notes["best"]["step"]
        file = self._folder(run, step) / WEIGHTS_FILE
        load_weights(run.accelerator.unwrap_model(run.model), str(file))
        return step

    @staticmethod
    def _folder(run: Run, step: int) -> Path:
        return run.output_dir / f"best_{step}"

    def _write(self, run: Run) -> None:
        folder = self._folder(run, run.state.notes["best"]["step"])
        if run.accelerator.is_main_process:
            with clear_errors(folder, "The best model"), folder_writer(folder) as partial:
                save_weights(run.accelerator.unwrap_model(run.model), str(partial / WEIGHTS_FILE))
        run.accelerator.wait_for_everyone()
