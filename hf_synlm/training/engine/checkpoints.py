# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a run saves and a resumed one restores (`--resume-from-checkpoint`), complete or not at all.

Saved by `save_checkpoint` in `output_dir/step_N`: model, optimizer and schedule (`accelerator.save_state`), what a
program registers (`register_for_checkpointing`: the text state of recurrent models), the best weights so far, the
tokenizer (for `synlm export`), and `training_state.json`, a `TrainingState` with the step, the number of samples
consumed, the settings of the run, and its evaluations and losses.
Restored by `loop.start_or_resume`: `load_checkpoint` refuses other settings (`read_state`) and loads these parts, and
`BestModel.adopt` takes the best weights. The data loader then starts behind `state.consumed` (`Recipe.loader`); random
states are functions of seed and step (`samplers.seed_micro_step`). So a resumed run is bit-equal to an uninterrupted
one on the CPU.
A folder is written under a temporary name, flushed to the disk and renamed (`folder_writer`), and renamed before it is
deleted: a process that is killed at any moment never leaves an incomplete folder that looks like a checkpoint.
"""

import dataclasses
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import Accelerator
from safetensors import SafetensorError
from safetensors.torch import load_model as load_weights, save_model as save_weights
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.files import PARTIAL_SUFFIX, folder_writer, read_json, remove_folder, write_json
from hf_synlm.data.text import NATURAL
from hf_synlm.data.tokenizers import save_tokenizer
from hf_synlm.hub.checkpoint import STATE_FILE
from hf_synlm.training.engine.run import Run, TrainingState

BEST_FILE = "best_model.safetensors"
WEIGHTS_FILE = "model.safetensors"
DAMAGED = "Delete the folder. The run then resumes from the previous checkpoint, if there is one."  # a remedy
_VERSION = "config.transformers_version"
_FIELD_OF_NESTED = re.compile(r"config\.(backbone|encoder)_config\.\w+")


# ---------------------------------------------------------------------------------------------- checkpoints
def save_checkpoint(
    accelerator: Accelerator,
    output_dir: Path,
    state: TrainingState,
    tokenizer: PreTrainedTokenizerBase,
    keep: int,
    best_weights: Path | None = None,
) -> Path:
    """Write the checkpoint `step_N`, and delete all but the newest `keep` and those that the notes name as kept.

    Every process calls. Returns its folder.
    """
    folder, is_main = output_dir / f"step_{state.step}", accelerator.is_main_process
    partial_folder = folder_writer(folder) if is_main else nullcontext(folder.with_name(folder.name + PARTIAL_SUFFIX))
    with clear_errors(folder, "The checkpoint"), partial_folder as partial:
        accelerator.wait_for_everyone()
        accelerator.save_state(str(partial))
        accelerator.wait_for_everyone()
        if is_main:
            if best_weights is not None:
                link_or_copy(best_weights, partial / BEST_FILE)
            save_tokenizer(tokenizer, partial)
            write_json(partial / STATE_FILE, dataclasses.asdict(state))
    if is_main:
        kept = {output_dir / f"step_{step}" for step in state.notes.get("kept", ())}
        for old in {*list_checkpoints(output_dir)[:-keep]} - kept:
            remove_folder(old)
    accelerator.wait_for_everyone()
    return folder


def load_checkpoint(accelerator: Accelerator, folder: Path, settings: dict[str, Any]) -> TrainingState:
    """Restore model, optimizer and schedule, and return the state of the run."""
    state = read_state(folder, settings)
    try:
        accelerator.load_state(str(folder))
    except (OSError, RuntimeError, SafetensorError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"The checkpoint {folder} is damaged: {error}. {DAMAGED}") from error
    return state


def read_state(folder: Path, settings: dict[str, Any]) -> TrainingState:
    """Read the state of a checkpoint; settings that differ from those of this run are refused by name."""
    state = TrainingState(**read_json(folder / STATE_FILE, DAMAGED))
    old, new = _flat(state.settings), _flat(plain_settings(settings))
    # Before this field existed, classifiers had 1, and others nothing that it weighs.
    if (weight := "config.objective_weight") in new:
        old.setdefault(weight, 1.0 if new.get("config.problem_type") else new[weight])
    # Before programs set this field, all text was read as what it says now, but for natural spelling.
    if new.get(style := "config.text_style") != NATURAL and old.get(style) is None:
        old[style] = new.get(style)
    # A version of transformers is no setting, nor are fields of a backbone's configuration that only one version has.
    fields = _nested_fields(old), _nested_fields(new)
    of_version = fields[0] ^ fields[1] if all(fields) and old.get(_VERSION) != new.get(_VERSION) else set()
    unequal = [name for name in {**old, **new} if old.get(name) != new.get(name) and name != _VERSION]
    names = [name for name in unequal if not _nested_fields([name]) & of_version]
    changed = [f"{name} {old.get(name)!r} (now {new.get(name)!r})" for name in names]
    if changed:
        sizes = " (an older run without a size: --model-preset gpst-small)" * ("config.hidden_size" in names)
        raise ValueError(
            f"{folder} was written with other settings or data: {', '.join(changed)}. Resume with the same settings "
            f"and data{sizes}, or start from step 0 with another --output-dir or with --overwrite-output-dir."
        )
    return state


def _nested_fields(names: Iterable[str]) -> set[str]:
    """Fields of the configuration of a backbone or an encoder, among flat names of settings."""
    return {field[0] for field in map(_FIELD_OF_NESTED.match, names) if field}


def plain_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as a JSON file would return them."""
    return json.loads(json.dumps(settings, default=str))


def _flat(settings: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings of nested dicts by names such as `config.hidden_size`."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


# ---------------------------------------------------------------------------------------------- folders and files
def list_checkpoints(output_dir: Path) -> list[Path]:
    """The complete checkpoints of an output folder, oldest first."""
    folders = [folder for folder in output_dir.glob("step_*") if folder.name.removeprefix("step_").isdigit()]
    return sorted((folder for folder in folders if (folder / STATE_FILE).is_file()), key=step_of)


def step_of(checkpoint: Path) -> int:
    """The step of a checkpoint, by the name of its folder."""
    return int(checkpoint.name.removeprefix("step_"))


def find_checkpoint(output_dir: Path, name: str) -> Path | None:
    """Find the checkpoint that `--resume-from-checkpoint` names: a folder, or "latest" (`None` if there is none)."""
    if name == "latest":
        complete = list_checkpoints(output_dir)
        return complete[-1] if complete else None
    folder = Path(name)
    if not (folder / STATE_FILE).is_file() or folder.name.endswith(PARTIAL_SUFFIX):
        complete = [str(path) for path in list_checkpoints(output_dir)]
        raise ValueError(f"{name!r} is not a complete checkpoint. Complete ones in {str(output_dir)!r}: {complete}.")
    return folder


def remove_later(output_dir: Path, step: int) -> None:
    """Delete checkpoints after `step`, which would count as newer than those that the resumed run writes."""
    for folder in list_checkpoints(output_dir):
        if step_of(folder) > step:
            remove_folder(folder)


@contextmanager
def clear_errors(folder: Path, what: str) -> Iterator[None]:
    """Raise OSError with a remedy if `folder` ("The checkpoint" and the like) cannot be written in the block."""
    try:
        yield
    # A full disk raises any of these, depending on the writer.
    except (OSError, RuntimeError, SafetensorError) as error:
        complete = list_checkpoints(folder.parent)
        start = f"continues from {complete[-1]}" if complete else "starts from the beginning (there is no checkpoint)"
        raise OSError(
            f"{what} {folder} could not be written: {error}. Free space or repair the folder; then the same command "
            f"with --resume-from-checkpoint latest {start}."
        ) from error


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link a file, which takes no space; copy it where the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# ---------------------------------------------------------------------------------------------- best model
class BestModel:
    """Keeps the weights of the evaluation with the smallest `metric` in `output_dir/best_N`, and stops a run early.

    The run stops after `patience` evaluations in a row without a better one (0 = never). Evaluations before
    `first_step` are never the best; 1 leaves out the model that a run begins with. A checkpoint holds the best weights
    so far (`weights`), so that a run can be resumed from a copy of it (`adopt`).
    """

    def __init__(self, metric: Callable[[dict[str, Any]], float], patience: int = 0, first_step: int = 0):
        self.metric, self.patience, self.first_step = metric, patience, first_step

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation and return whether to stop; every process calls."""
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
        """Delete weights that are no longer the best; every process calls."""
        if run.accelerator.is_main_process:
            file = self.weights(run)
            for folder in run.output_dir.glob("best_*"):
                if folder != (file and file.parent) and not folder.name.endswith(PARTIAL_SUFFIX):
                    remove_folder(folder)
        run.accelerator.wait_for_everyone()

    def weights(self, run: Run) -> Path | None:
        """File of the best weights so far, if there are any."""
        best = run.state.notes.get("best")
        return None if best is None else run.output_dir / f"best_{best['step']}" / WEIGHTS_FILE

    def adopt(self, run: Run, checkpoint: Path) -> None:
        """Take over the best weights of the checkpoint that a run is resumed from; every process calls."""
        file = self.weights(run)
        if run.accelerator.is_main_process and file is not None and not file.is_file():
            if not (checkpoint / BEST_FILE).is_file():
                raise ValueError(
                    f"The best weights of the run are those of step {run.state.notes['best']['step']}, but "
                    f"{checkpoint / BEST_FILE} is missing. Copy the whole checkpoint, or resume from another "
                    "checkpoint."
                )
            with clear_errors(file.parent, "The best model"), folder_writer(file.parent) as partial:
                link_or_copy(checkpoint / BEST_FILE, partial / WEIGHTS_FILE)
        self.prune(run)

    def restore(self, run: Run) -> int:
        """Load the best weights into the model and return their step; every process calls."""
        load_weights(run.accelerator.unwrap_model(run.model), str(self.weights(run)))
        return run.state.notes["best"]["step"]

    def _write(self, run: Run) -> None:
        folder = run.output_dir / f"best_{run.state.notes['best']['step']}"
        if run.accelerator.is_main_process:
            with clear_errors(folder, "The best model"), folder_writer(folder) as partial:
                save_weights(run.accelerator.unwrap_model(run.model), str(partial / WEIGHTS_FILE))
        run.accelerator.wait_for_everyone()
