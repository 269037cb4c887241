"""The folder of a run: an unfinished run is resumed; a finished run or foreign content is refused.

`--overwrite_output_dir` replaces a run. The old one is set aside first, and put back if the new one does not start.
One process at a time trains in a folder: it holds the lock file until `end_run`.
"""

import dataclasses
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.logging import get_logger
from filelock import FileLock, Timeout
from torch import nn

from hf_synlm.data.files import PARTIAL_SUFFIX, remove_partial, write_json
from hf_synlm.training.engine.arguments import TrainingArguments
from hf_synlm.training.engine.checkpoints import find_checkpoint, list_checkpoints
from hf_synlm.training.engine.run import Run

logger = get_logger(__name__)

ARGUMENTS_FILE = "arguments.json"
RESULTS_FILE = "all_results.json"
EVALUATION_FILE = "evaluation.json"
TOKENIZER_FOLDER = "tokenizer"
LOCK_FILE = ".lock"
# Where a run waits until the one that replaces it has started, and its name while files are moved there or back.
REPLACED_FOLDER = "replaced_run"
MOVING_FOLDER = f"{REPLACED_FOLDER}.moving"
# Arguments that name a place to write to: a repository and a folder may have the same name.
_OUTPUTS = ("output_dir", "hub_model_id")
# Files that schedulers, `tee` and file systems write into the output folder of a job; they stay where they are.
_NOT_OURS = (LOCK_FILE, "*.out", "*.err", "*.log", ".nfs*", "lost+found")
# Folders that this process trains in.
_locks: dict[Path, FileLock] = {}


@contextmanager
def output_folder(accelerator: Accelerator, arguments: TrainingArguments, *others: Any) -> Iterator[Path | None]:
    """Take the output folder of a run and find the checkpoint to resume from; the block prepares the run.

    With `overwrite_output_dir` the previous run is deleted when the block ends. If the block raises, or the process is
    killed in it, the previous run is put back, at the latest by the next start. Without a checkpoint the run starts
    from step 0 and makes its tokenizer anew.

    Args:
        accelerator: of the run. Every process has to call.
        arguments: of the run.
        *others: other dataclasses of arguments; paths in them are inputs and must not be deleted.

    Yields:
        The checkpoint to resume from, or `None` for step 0.

    Raises:
        ValueError: the folder holds something that is not a run, a finished run, or (to be overwritten) inputs of this
            run; it cannot be written to; another process trains there; the named checkpoint is not complete.
    """
    output_dir, is_main = Path(arguments.output_dir), accelerator.is_main_process
    replaces = arguments.overwrite_output_dir and not arguments.resume_from_checkpoint
    _check_content(output_dir, replaces)
    if replaces:
        _check_inputs(output_dir, arguments, *others)
    if is_main:
        _lock(output_dir)
    try:
        if is_main:
            _put_back(output_dir)
        accelerator.wait_for_everyone()
        checkpoint = None if replaces else _find_start(output_dir, arguments.resume_from_checkpoint)
        accelerator.wait_for_everyone()  # every process has looked
        if is_main:
            if replaces:
                _set_aside(output_dir)
            remove_partial(output_dir)
            if checkpoint is None:
                shutil.rmtree(output_dir / TOKENIZER_FOLDER, ignore_errors=True)
            if not (output_dir / ARGUMENTS_FILE).is_file():  # from here on, the folder holds a run
                write_json(output_dir / ARGUMENTS_FILE, {"output_dir": arguments.output_dir})
        accelerator.wait_for_everyone()
        yield checkpoint
    except BaseException:
        if is_main:
            _put_back(output_dir)
            release(output_dir)
        raise
    accelerator.wait_for_everyone()
    if is_main:
        if (output_dir / REPLACED_FOLDER).is_dir():  # renamed first: half-deleted, it must not be put back
            os.replace(output_dir / REPLACED_FOLDER, output_dir / f"{REPLACED_FOLDER}{PARTIAL_SUFFIX}")
        remove_partial(output_dir)
        for name in (RESULTS_FILE, EVALUATION_FILE, str(Path(EVALUATION_FILE).with_suffix(".md"))):
            (output_dir / name).unlink(missing_ok=True)  # of a finished run that is continued
    accelerator.wait_for_everyone()


def end_run(run: Run) -> None:
    """End trackers, process group and lock of a run; its model is not wrapped afterwards.

    The wrapper of DDP must be deleted before the process group. If it held the last reference to the group, its
    destructor would wait for the group's threads while these wait for Python's lock, which it holds.

    Args:
        run: of this process. Every process has to call.
    """
    accelerator = run.accelerator
    accelerator.wait_for_everyone()
    run.model = accelerator.unwrap_model(run.model)
    accelerator.free_memory()
    accelerator.end_training()
    release(run.output_dir)


def release(output_dir: Path) -> None:
    """Release the lock of a folder.

    Args:
        output_dir: of a run that has ended.
    """
    lock = _locks.pop(output_dir.resolve(), None)
    if lock is not None:
        lock.release(force=True)


def check_space(arguments: TrainingArguments, model: nn.Module) -> None:
    """Compare the free space of the disk with what a run will write at least.

    A checkpoint counts as three times the weights (with Adam's two moments), the final model as once. The space of a
    run that is replaced counts as free.

    Args:
        arguments: of the run.
        model: that is trained.

    Raises:
        ValueError: not even one checkpoint (if any are to be saved) and the final model fit.
    """
    output_dir = Path(arguments.output_dir)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    replaced = (path.stat().st_size for path in (output_dir / REPLACED_FOLDER).rglob("*") if path.is_file())
    free = shutil.disk_usage(output_dir).free + sum(replaced)
    saves = arguments.checkpointing_steps > 0
    least = (4 if saves else 1) * weights
    if free < least:
        what = "a checkpoint and the final model take" if saves else "the final model takes"
        raise ValueError(
            f"{str(output_dir)!r} has {free / 1e9:.2f} GB of free space; {what} about {least / 1e9:.2f} GB. Free some, "
            "or choose another --output_dir."
        )


# ---------------------------------------------------------------------------------------------- lock and content
def _lock(output_dir: Path) -> None:
    """Make the folder and take its lock, which the operating system takes back from a killed process."""
    lock = _locks.setdefault(output_dir.resolve(), FileLock(output_dir / LOCK_FILE))
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(blocking=False)
    except Timeout as error:
        del _locks[output_dir.resolve()]
        raise ValueError(
            f"Another process trains in {str(output_dir)!r}. Wait until it has ended, or choose another --output_dir."
        ) from error
    except OSError as error:
        raise ValueError(
            f"Output folder {str(output_dir)!r} cannot be written to ({error.strerror or error}). Choose another "
            "--output_dir, or change its permissions."
        ) from error


def _content(output_dir: Path) -> list[Path]:
    """Files and folders of the run."""
    items = output_dir.iterdir() if output_dir.is_dir() else []
    return [item for item in items if not any(fnmatch(item.name, pattern) for pattern in _NOT_OURS)]


def _check_content(output_dir: Path, replaces: bool) -> None:
    """Refuse a folder with foreign content: it might be lost, now or when the run is replaced."""
    is_run = any((output_dir / name).exists() for name in (ARGUMENTS_FILE, REPLACED_FOLDER, MOVING_FOLDER))
    # A checkpoint may have been copied there alone, to be resumed.
    is_run = is_run or (not replaces and bool(list_checkpoints(output_dir)))
    if replaces and (output_dir / ".git").exists():
        raise ValueError(
            f"--overwrite_output_dir would delete the repository {str(output_dir)!r}. Choose another folder."
        )
    # Partial output of a killed process is nobody's.
    found = [item.name for item in _content(output_dir) if not item.name.endswith(PARTIAL_SUFFIX)]
    if found and not is_run:
        raise ValueError(
            f"Output folder {str(output_dir)!r} is not empty ({', '.join(sorted(found)[:5])}) and does not hold a run "
            f"(no {ARGUMENTS_FILE}). Choose another --output_dir, or empty this folder yourself."
        )


def _check_inputs(output_dir: Path, *arguments: Any) -> None:
    """Refuse to replace a run that holds inputs of the new one: models, tokenizers, data."""
    given = {name: value for item in arguments for name, value in dataclasses.asdict(item).items()}
    for name, value in given.items():
        for path in value if isinstance(value, list) else [value]:
            if name in _OUTPUTS or not isinstance(path, str) or not os.path.exists(path):
                continue
            if output_dir.resolve() in Path(path).resolve().parents:
                raise ValueError(
                    f"--overwrite_output_dir would delete {str(output_dir)!r}, in which {name} {path!r} lies. Choose "
                    "another --output_dir, or copy the input out of this one."
                )


def _find_start(output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from: the one that is named, or the newest of an unfinished run."""
    is_finished = (output_dir / RESULTS_FILE).is_file()
    if wanted is None and is_finished:
        raise ValueError(
            f"Output folder {str(output_dir)!r} holds a finished run. Choose another --output_dir, repeat the steps "
            "after training (evaluation, export) with --resume_from_checkpoint latest, or replace the run with "
            "--overwrite_output_dir."
        )
    checkpoint = find_checkpoint(output_dir, wanted or "latest")
    if checkpoint is None:
        if wanted or (output_dir / ARGUMENTS_FILE).is_file():
            logger.warning(f"{output_dir} holds no complete checkpoint: training starts from step 0.")
        return None
    is_own = checkpoint.resolve().parent == output_dir.resolve()
    if not is_own and (is_finished or list_checkpoints(output_dir)):
        raise ValueError(
            f"{checkpoint} is to be resumed from, and {str(output_dir)!r} holds another run. Choose another "
            "--output_dir."
        )
    logger.warning(
        f"The run resumes from {checkpoint}. To start from step 0, choose another --output_dir or pass "
        "--overwrite_output_dir."
    )
    return checkpoint


# ---------------------------------------------------------------------------------------------- replacing a run
def _set_aside(output_dir: Path) -> None:
    """Move the content of an output folder into a folder inside of it."""
    items = _content(output_dir)
    moving = output_dir / MOVING_FOLDER
    moving.mkdir()
    for item in items:
        os.replace(item, moving / item.name)
    os.replace(moving, output_dir / REPLACED_FOLDER)


def _put_back(output_dir: Path) -> None:
    """Restore the run that was set aside, if there is one, and delete the new one; may be killed anywhere."""
    moving, replaced = output_dir / MOVING_FOLDER, output_dir / REPLACED_FOLDER
    if replaced.is_dir():
        for item in _content(output_dir):
            if item != replaced:
                shutil.rmtree(item) if item.is_dir() and not item.is_symlink() else item.unlink()
        os.replace(replaced, moving)
    if moving.is_dir():
        for item in moving.iterdir():
            os.replace(item, output_dir / item.name)
        moving.rmdir()
