"""The folder of a run: what may be in it, what is resumed, and when a previous run is deleted."""

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

from hf_synlm.training.arguments import TrainingArguments
from hf_synlm.training.checkpoints import (
    PARTIAL_SUFFIX,
    REPLACED_FOLDER,
    check_writable,
    find_checkpoint,
    list_checkpoints,
    remove_partial,
    write_json,
)

logger = get_logger(__name__)

ARGUMENTS_FILE = "arguments.json"
RESULTS_FILE = "all_results.json"
EVALUATION_FILE = "evaluation.json"
TOKENIZER_FOLDER = "tokenizer"
LOCK_FILE = ".lock"
# Arguments that name a place to write to: an owner and a folder may have the same name.
NO_INPUTS = ("output_dir", "hub_model_id")
# What schedulers, `tee` and file systems write into the output folder of a job.
_OF_OTHERS = ("*.out", "*.err", "*.log", ".nfs*", "lost+found")
# The previous run on its way to `REPLACED_FOLDER`.
MOVING_FOLDER = f"{REPLACED_FOLDER}.moving"
# Folders that this process trains in, until it ends or `release` is called.
_locks: dict[Path, FileLock] = {}


@contextmanager
def output_folder(accelerator: Accelerator, arguments: TrainingArguments, *others: Any) -> Iterator[Path | None]:
    """Check the output folder, create it, and find the checkpoint to resume from; a run is prepared inside the block.

    An unfinished run in the folder is resumed, so that a job that is started again by the same command goes on. With
    `overwrite_output_dir` the previous run is set aside, and deleted when the block ends. If the block is left by an
    exception, or the process is killed inside of it, the previous run is put back (by the next one, if need be). What
    is no run is never deleted (but for names in .partial), nor is a run that holds what this one reads; logs of
    schedulers stay where they are. Without a checkpoint there is nothing to go on with, and the tokenizer is made anew.
    While a run has the folder, no other one can begin there; the lock is the operating system's, which takes it back
    from a process that is killed.

    Args:
        accelerator: of the run. Every process has to call.
        arguments: of the run.
        *others: the script's other arguments, which may name files and folders that the run reads.

    Yields:
        The checkpoint to resume from, or `None` for a fresh start.

    Raises:
        ValueError: when the folder holds something else, a finished run that is not to be overwritten, or one to be
            overwritten in which inputs of this run lie; when it cannot be written to or another process trains there;
            or when the named checkpoint is missing or half-written.
    """
    output_dir = Path(arguments.output_dir)
    is_main, checkpoint = accelerator.is_main_process, None
    replaces = arguments.overwrite_output_dir and not arguments.resume_from_checkpoint
    is_new = False
    if is_main:
        if replaces:
            _check_replaceable(output_dir)
            _check_inputs(output_dir, arguments, *others)
        check_writable(output_dir)
        is_new = _lock(output_dir)
    try:
        if is_main:
            _put_back(output_dir)
        accelerator.wait_for_everyone()
        if replaces:
            if is_main:
                _check_content(output_dir)
                _set_aside(output_dir)
        else:
            checkpoint = _find_start(output_dir, arguments.resume_from_checkpoint)
        accelerator.wait_for_everyone()  # every process has looked
        if is_main:
            remove_partial(output_dir)
            if checkpoint is None:
                shutil.rmtree(output_dir / TOKENIZER_FOLDER, ignore_errors=True)
            if not (output_dir / ARGUMENTS_FILE).is_file():  # from here on, the folder holds a run
                write_json(output_dir / ARGUMENTS_FILE, without_token(dataclasses.asdict(arguments)))
        accelerator.wait_for_everyone()
        yield checkpoint
    except BaseException:
        if is_main:
            _put_back(output_dir)
            if is_new:  # a refused start leaves nothing behind
                (output_dir / LOCK_FILE).unlink(missing_ok=True)
            release(output_dir)
        raise
    accelerator.wait_for_everyone()
    if is_main:
        # Half-deleted, it must not be put back.
        if (output_dir / REPLACED_FOLDER).is_dir():
            os.replace(output_dir / REPLACED_FOLDER, output_dir / f"{REPLACED_FOLDER}{PARTIAL_SUFFIX}")
        remove_partial(output_dir)
        for name in (RESULTS_FILE, EVALUATION_FILE, str(Path(EVALUATION_FILE).with_suffix(".md"))):
            (output_dir / name).unlink(missing_ok=True)  # those of a finished run that goes on
    accelerator.wait_for_everyone()


def release(output_dir: Path) -> None:
    """Let other processes train in the folder of a run that has ended."""
    lock = _locks.pop(output_dir.resolve(), None)
    if lock is not None:
        lock.release(force=True)


def _lock(output_dir: Path) -> bool:
    """Take the folder for this process; whether no process had it before."""
    is_new = not (output_dir / LOCK_FILE).exists()
    lock = _locks.setdefault(output_dir.resolve(), FileLock(output_dir / LOCK_FILE))
    try:
        lock.acquire(blocking=False)
    except Timeout as error:
        del _locks[output_dir.resolve()]
        raise ValueError(
            f"Another process trains in {str(output_dir)!r}. Wait until it has ended, or choose another --output_dir."
        ) from error
    return is_new


def _content(output_dir: Path) -> list[Path]:
    """What lies in an output folder, besides its lock and what others keep there: it stays where it is."""
    kept = (LOCK_FILE, *_OF_OTHERS)
    return [item for item in output_dir.iterdir() if not any(fnmatch(item.name, pattern) for pattern in kept)]


def _in_use(output_dir: Path) -> bool:
    """Whether an output folder holds more than what a killed process had begun to write."""
    return any(not item.name.endswith(PARTIAL_SUFFIX) for item in _content(output_dir))


def without_token(settings: dict[str, Any]) -> dict[str, Any]:
    """Arguments as they may be written to files."""
    return {name: value for name, value in settings.items() if name != "hub_token"}


def _find_start(output_dir: Path, wanted: str | None) -> Path | None:
    """The checkpoint to resume from; an unfinished run is resumed without being asked for."""
    if wanted is None:
        _check_content(output_dir)
        if (output_dir / RESULTS_FILE).is_file():
            raise ValueError(
                f"Output folder {str(output_dir)!r} holds a finished run. Choose another --output_dir, or replace the "
                "run by this one with --overwrite_output_dir."
            )
    checkpoint = find_checkpoint(output_dir, wanted or "latest")
    own = checkpoint is None or checkpoint.resolve().parent == output_dir.resolve()
    if checkpoint is None or not own:  # a checkpoint that is named may have been copied there alone
        _check_content(output_dir)
    if not own and ((output_dir / RESULTS_FILE).is_file() or list_checkpoints(output_dir)):
        raise ValueError(
            f"{checkpoint} is to be resumed from, and {str(output_dir)!r} holds another run. Choose another "
            "--output_dir."
        )
    if checkpoint is not None:
        logger.warning(
            f"The run resumes from {checkpoint}. To start afresh, choose another --output_dir or pass "
            "--overwrite_output_dir."
        )
    elif wanted or _in_use(output_dir):
        logger.warning(f"{output_dir} holds no complete checkpoint: training starts from step 0.")
    return checkpoint


def _check_replaceable(output_dir: Path) -> None:
    """Refuse to replace what is more than a run."""
    for what, folder in (("home", Path.home().resolve()), ("current", Path.cwd())):
        if output_dir.resolve() in (folder, *folder.parents):
            raise ValueError(
                f"--overwrite_output_dir would delete {str(output_dir)!r}, in which the {what} folder {str(folder)!r} "
                "lies. Choose a folder for runs only."
            )
    if (output_dir / ".git").exists():
        raise ValueError(
            f"--overwrite_output_dir would delete the repository {str(output_dir)!r}. Choose another folder."
        )


def _check_content(output_dir: Path) -> None:
    """Refuse a folder that holds something else than a run: it might be lost, now or when the run is replaced."""
    if _in_use(output_dir) and not (output_dir / ARGUMENTS_FILE).is_file():
        found = ", ".join(sorted(item.name for item in _content(output_dir))[:5])
        raise ValueError(
            f"Output folder {str(output_dir)!r} is not empty ({found}) and holds no run (no {ARGUMENTS_FILE}): "
            "choose another --output_dir (or empty this folder yourself)."
        )


def _check_inputs(output_dir: Path, *arguments: Any) -> None:
    """Refuse to replace a run that holds files or folders which the new run reads: models, tokenizers, data."""
    given = {name: value for item in arguments for name, value in dataclasses.asdict(item).items()}
    for name, value in given.items():
        for path in value if isinstance(value, list) else [value]:
            if name in NO_INPUTS or not isinstance(path, str) or not os.path.exists(path):
                continue
            if output_dir.resolve() in Path(path).resolve().parents:
                raise ValueError(
                    f"--overwrite_output_dir would delete {str(output_dir)!r}, in which {name} {path!r} lies. Choose "
                    "another --output_dir, or copy the input out of this one."
                )


def _set_aside(output_dir: Path) -> None:
    """Move the content of an output folder into a folder inside of it."""
    items = _content(output_dir)
    moving = output_dir / MOVING_FOLDER
    moving.mkdir()
    for item in items:
        os.replace(item, moving / item.name)
    os.replace(moving, output_dir / REPLACED_FOLDER)


def _put_back(output_dir: Path) -> None:
    """Restore the run that was set aside, if there is one, in place of what was begun; may be cut off anywhere."""
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
