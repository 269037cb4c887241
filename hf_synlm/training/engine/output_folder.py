# SPDX-License-Identifier: Apache-2.0
"""The output folder of a run: which checkpoint a run continues from, and which folders it refuses.

`output_folder` decides. An unfinished run is resumed from its newest checkpoint; `--resume-from-checkpoint` names
another one, also for a finished run, which is refused otherwise. `--overwrite-output-dir` deletes the old run with all
that lies in its folder; it refuses a folder that does not hold a run, a repository, and a folder that holds an input.
The checkpoint itself is loaded by `loop.start_or_resume`.
"""

import dataclasses
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accelerate import Accelerator, PartialState

from hf_synlm.data.files import PARTIAL_SUFFIX, lock_output, read_json, remove_folder, remove_partial, write_json
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine.checkpoints import find_checkpoint, list_checkpoints

logger = logging.getLogger(__name__)

ARGUMENTS_FILE = "arguments.json"
RESULTS_FILE = "all_results.json"
EVALUATION_FILE = "evaluation.json"
TOKENIZER_FOLDER = "tokenizer"
# Arguments that name a place to write to: a repository and a folder may have the same name.
_OUTPUTS = ("output_dir", "hub_model_id")
# Where the run that is to be replaced waits.
_ASIDE = f"replaced{PARTIAL_SUFFIX}"
# Files that schedulers, `tee` and file systems write into the output folder of a job; they stay where they are.
_NOT_OURS = ("*.out", "*.err", "*.log", ".nfs*", "lost+found")


@contextmanager
def output_folder(accelerator: Accelerator, arguments: TrainingArguments, *others: Any) -> Iterator[Path | None]:
    """Give the checkpoint to resume from, or `None` to start from step 0; every process calls.

    With `overwrite_output_dir` the old run is set aside, unless it holds inputs: paths in `arguments` or `others`. It
    is deleted when the block, which loads and checks everything, ends; after an error, it is put back.
    """
    output_dir = Path(arguments.output_dir)
    checkpoint = _take(accelerator, arguments, *others)
    try:
        yield checkpoint
    except BaseException:
        if accelerator.is_main_process:
            _put_back(output_dir)
        raise
    accelerator.wait_for_everyone()  # every process has begun
    if accelerator.is_main_process and (output_dir / _ASIDE).is_dir():
        remove_folder(output_dir / _ASIDE)


def _take(accelerator: Accelerator, arguments: TrainingArguments, *others: Any) -> Path | None:
    output_dir = Path(arguments.output_dir)
    if accelerator.is_main_process:
        lock_output(output_dir)
        if (output_dir / _ASIDE).is_dir():
            _put_back(output_dir)
            logger.warning(
                f"{output_dir} holds its old run again, because the run that was to replace it did not begin."
            )
            if arguments.overwrite_output_dir and arguments.resume_from_checkpoint:
                raise ValueError(
                    "There is nothing to resume. Leave out --resume-from-checkpoint to replace the old run."
                )
    accelerator.wait_for_everyone()
    replaces = arguments.overwrite_output_dir and not arguments.resume_from_checkpoint
    _check_content(output_dir, replaces)
    if replaces:
        _check_inputs(output_dir, arguments, *others)
    checkpoint = None if replaces else _find_start(output_dir, arguments.resume_from_checkpoint)
    accelerator.wait_for_everyone()  # every process has looked
    if accelerator.is_main_process:
        output_dir.mkdir(parents=True, exist_ok=True)
        remove_partial(output_dir)
        if not (output_dir / ARGUMENTS_FILE).is_file():  # from here on, the folder holds a run
            write_json(output_dir / ARGUMENTS_FILE, {"output_dir": arguments.output_dir})
        if replaces:
            _set_aside(output_dir)
        if checkpoint is None:  # the tokenizer may stem from other options
            shutil.rmtree(output_dir / TOKENIZER_FOLDER, ignore_errors=True)
    accelerator.wait_for_everyone()
    return checkpoint


def forget_results(output_dir: Path) -> None:
    """Delete the results of a finished run that is continued."""
    for name in (RESULTS_FILE, EVALUATION_FILE, str(Path(EVALUATION_FILE).with_suffix(".md"))):
        (output_dir / name).unlink(missing_ok=True)


def _content(output_dir: Path) -> list[Path]:
    """Files and folders of the run."""
    items = output_dir.iterdir() if output_dir.is_dir() else []
    return [item for item in items if not any(fnmatch(item.name, pattern) for pattern in _NOT_OURS)]


def _set_aside(output_dir: Path) -> None:
    """Move everything but `arguments.json`, which marks the folder as that of a run and is written anew later."""
    items = [item for item in _content(output_dir) if item.name != ARGUMENTS_FILE]
    (output_dir / _ASIDE).mkdir()
    try:
        for item in items:
            item.rename(output_dir / _ASIDE / item.name)
    except BaseException:
        _put_back(output_dir)
        raise


def _put_back(output_dir: Path) -> None:
    """Put a run back that was to be replaced, in the place of what the new one has written; the results come last."""
    aside = output_dir / _ASIDE
    for item in sorted(aside.iterdir() if aside.is_dir() else [], key=lambda item: item.name == RESULTS_FILE):
        place = output_dir / item.name
        if place.is_dir() and not place.is_symlink():
            remove_folder(place)
        else:
            place.unlink(missing_ok=True)
        os.replace(item, place)
    if aside.is_dir():
        aside.rmdir()


def _check_content(output_dir: Path, replaces: bool) -> None:
    """Refuse a folder with foreign content: it might be lost, now or when the run is replaced."""
    # A checkpoint may have been copied there alone, to be resumed.
    is_run = (output_dir / ARGUMENTS_FILE).exists() or (not replaces and bool(list_checkpoints(output_dir)))
    if replaces and (output_dir / ".git").exists():
        raise ValueError(
            f"--overwrite-output-dir would delete the repository {str(output_dir)!r}. Choose another folder."
        )
    # Partial output of a killed process belongs to nobody.
    found = [item.name for item in _content(output_dir) if not item.name.endswith(PARTIAL_SUFFIX)]
    if found and not is_run:
        raise ValueError(
            f"Output folder {str(output_dir)!r} is not empty ({', '.join(sorted(found)[:5])}) and does not hold a run "
            f"(no {ARGUMENTS_FILE}). Choose another --output-dir, or empty this folder yourself."
        )


def _check_inputs(output_dir: Path, *arguments: Any) -> None:
    """Refuse to delete a run that holds inputs of the new one: models, tokenizers, data."""
    given = {name: value for item in arguments for name, value in dataclasses.asdict(item).items()}
    for name, value in given.items():
        for path in value if isinstance(value, list) else [value]:
            if name in _OUTPUTS or not isinstance(path, str) or not os.path.exists(path):
                continue
            if output_dir.resolve() in Path(path).resolve().parents:
                raise ValueError(
                    f"--overwrite-output-dir would delete {str(output_dir)!r}, which contains {name} {path!r}. "
                    "Choose another --output-dir, or move this input to another folder."
                )


def _find_start(output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from: the named one, or the newest of an unfinished run."""
    is_finished = (output_dir / RESULTS_FILE).is_file()
    checkpoint = find_checkpoint(output_dir, wanted or "latest")
    if is_finished and wanted in (None, "latest"):
        last = f"step_{read_json(output_dir / RESULTS_FILE)['step']}"
        is_kept = checkpoint is not None and checkpoint.name == last  # otherwise the model would be trained again
        repeat = "repeat the steps after training (evaluation, export) with --resume-from-checkpoint latest, "
        if wanted is None or not is_kept:
            raise ValueError(
                f"Output folder {str(output_dir)!r} holds a finished run{'' if is_kept else f' without {last}'}. "
                f"Choose another --output-dir, {repeat * is_kept}or replace the run with --overwrite-output-dir."
            )
    warn = PartialState().on_main_process(logger.warning)
    if checkpoint is None:
        if wanted or (output_dir / ARGUMENTS_FILE).is_file():
            warn(f"{output_dir} holds no complete checkpoint: training starts from step 0.")
        return None
    is_own = checkpoint.resolve().parent == output_dir.resolve()
    if not is_own and (is_finished or list_checkpoints(output_dir)):
        raise ValueError(
            f"--resume-from-checkpoint names {checkpoint}, but {str(output_dir)!r} holds another run. Change "
            "--output-dir."
        )
    warn(
        f"The run resumes from {checkpoint}. To start from step 0, choose another --output-dir or pass "
        "--overwrite-output-dir."
    )
    return checkpoint
