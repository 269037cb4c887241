# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are complete or do not exist: the one place that writes, replaces and deletes.

Everything is written under a temporary name in the same folder, flushed to the disk, and renamed. A process that is
killed at any moment leaves only names that end in `PARTIAL_SUFFIX`. An existing output is refused unless the user
asked to overwrite it (`check_output`), and the old one stays until the new one is complete.
"""

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from hf_synlm.data.text import PathLike

logger = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
CONFIG_FILE = "config.json"
_locks: dict[Path, int] = {}  # outputs of this process -> the open files that lock them
_OLD_SUFFIX = f".old{PARTIAL_SUFFIX}"
# Tokenizers load from one of them; all but the first two are older, or of other libraries.
TOKENIZER_FILES = tuple(
    "tokenizer.json tokenizer_config.json vocab* *.model *.tiktoken tekken.json *.spm *.tokenizer dict.txt".split()
)


def flag_of(name: str) -> str:
    """How help and messages spell the option of an argument; parsers take underscores, too."""
    return f"--{name.replace('_', '-')}"


@contextmanager
def file_writer(path: PathLike) -> Iterator[BinaryIO]:
    """Fill a file, which has its name when the block ends without an exception; see `write_bytes`."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL_SUFFIX}")
    try:
        with _names_file(target), partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)


def write_bytes(path: PathLike, data: bytes) -> None:
    """Write a file atomically, and make missing folders; symlinks are followed, so that a link stays a link."""
    with file_writer(path) as file:
        file.write(data)


@contextmanager
def _names_file(path: Path) -> Iterator[None]:
    """Add the name of the output to errors of writing, which have none where the disk is full."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_text(path: PathLike, text: str) -> None:
    """Write a UTF-8 text file atomically, line ends as they are; see `write_bytes`."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: PathLike, value: Any) -> None:
    """Write indented JSON with sorted keys atomically; equal values give equal bytes. See `write_bytes`."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: PathLike, remedy: str = "Get it again, or name another file.") -> dict[str, Any]:
    """Read a file that contains one JSON object; the ValueError of any other file ends with the `remedy`."""
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} is missing. {remedy}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged or cannot be read ({error}). {remedy}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged or cannot be read (not a JSON object). {remedy}")
    return value


def file_sha256(path: PathLike) -> str:
    """SHA-256 of a file in hexadecimal digits, read piece by piece."""
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def folder_writer(folder: PathLike, mark: str = "") -> Iterator[Path]:
    """Fill a folder under a temporary name, and give it its name when the block ends without an exception.

    An older folder of that name is replaced when the new one is complete; a symlink to a folder stays one. `mark` is
    part of the temporary name: with equal marks, the temporary folder that a killed process has left is replaced.
    """
    target = Path(os.path.realpath(folder))
    partial = target.with_name(f"{target.name}{mark}{PARTIAL_SUFFIX}")
    _restore(target)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        with _names_file(target):
            yield partial
            publish_folder(partial, target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, folder: Path) -> None:
    """Flush a complete folder to the disk and give it its final name; an older folder of that name is deleted."""
    for path in (*partial.rglob("*"), partial):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    if not folder.exists():
        os.replace(partial, folder)
        return
    old = _old(folder)
    shutil.rmtree(old, ignore_errors=True)
    os.replace(folder, old)
    try:
        os.replace(partial, folder)
    except BaseException:
        os.replace(old, folder)
        raise
    shutil.rmtree(old)


def remove_folder(folder: Path) -> None:
    """Delete a folder that others may look for: it loses its name first, so that it is never seen half-deleted."""
    doomed = folder.with_name(f"{folder.name}.deleted{PARTIAL_SUFFIX}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(folder, doomed)
    shutil.rmtree(doomed)


def remove_partial(folder: Path) -> None:
    """Delete what interrupted programs have left half-written or half-deleted in a folder."""
    for path in folder.glob(f"*{_OLD_SUFFIX}"):
        _restore(path.with_name(path.name.removesuffix(_OLD_SUFFIX)))
    for path in folder.glob(f"*{PARTIAL_SUFFIX}"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def find_model(name: PathLike) -> str:
    """The name of a model; for the output folder of a training run that of its folder `model`, with a warning."""
    text, inside = os.fspath(name), Path(name) / "model"
    if (Path(name) / CONFIG_FILE).is_file() or not (inside / CONFIG_FILE).is_file():
        return text
    logger.warning(f"{text} is the output folder of a training run: its model is taken, {inside}")
    return str(inside)


def find_files(place: PathLike, ending: str, names: Sequence[str], what: str, source: str) -> list[Path]:
    """The files of a benchmark in alphabetical order: those in a folder with these `names`, all, or one file."""
    place = Path(place)
    if not place.exists():
        raise ValueError(f"{place} does not exist. Name the folder of the {ending} files, or one of these files")
    found = {file.stem: file for file in ([place] if place.is_file() else sorted(place.glob(f"*{ending}")))}
    if not found:
        raise ValueError(f"{place} holds no {what}s ({ending} files). Get them from {source}")
    unknown = [name for name in names if name not in found]
    if unknown:
        raise ValueError(f"no {what} {', '.join(unknown)} in {place}. It holds {', '.join(found)}")
    return [found[name] for name in sorted(names or found)]


def check_output(path: PathLike, overwrite: bool = False) -> Path:
    """Check, before anything is computed, that an output file can be written; its folder may be missing."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder or a device. Name a file to write.")
    if path.exists() and not overwrite:
        raise ValueError(f"{path} exists. Choose another name, or pass --overwrite to replace it.")
    folder = next(parent for parent in Path(os.path.realpath(path)).parents if parent.exists())
    try:  # permissions do not tell everything: the user may be root, the file system read-only
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: no files can be made in {folder} ({error.strerror}). Choose another folder."
        ) from error
    return path


def check_target(output_dir: PathLike, overwrite: bool = False, inputs: Sequence[PathLike] = ()) -> None:
    """Check, before anything is computed, that the folder of a model can be written; only such a folder is replaced.

    `inputs` are files and folders that are read; they must not lie in it, nor the home folder or the current folder.
    """
    path = Path(output_dir)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{str(path)!r} is a file. Choose another name for the folder.")
    if path.exists() and not overwrite:
        raise ValueError(f"{str(path)!r} exists. Choose another folder, or pass overwrite (--overwrite) to replace it.")
    if path.exists() and any(path.iterdir()):
        if not (path / CONFIG_FILE).is_file():
            raise ValueError(f"{str(path)!r} is not the folder of a model (no {CONFIG_FILE}). Choose another folder.")
        for kept in (Path.home(), Path.cwd(), *map(Path, inputs)):
            if path.resolve() in (kept.resolve(), *kept.resolve().parents):
                raise ValueError(f"{str(path)!r} contains {str(kept)!r}, which would be lost. Choose another folder.")


def lock_output(path: PathLike) -> None:
    """Keep other processes of this machine and user from an output until this process ends, however it ends.

    The lock is a file in the folder for temporary files, so that nothing stays beside the output.
    """
    target = Path(os.path.realpath(path))
    if target in _locks:
        return
    digest = hashlib.sha256(os.fsencode(target)).hexdigest()[:16]
    handle = os.open(Path(tempfile.gettempdir()) / f"synlm-{os.getuid()}-{digest}.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"Another process writes {path}. Wait until it ends, or choose another name.") from None
    _locks[target] = handle


def release_outputs() -> None:
    """Give up the locks of `lock_output`, as the end of the process does."""
    while _locks:
        os.close(_locks.popitem()[1])


def _old(folder: Path) -> Path:
    """Where a folder waits until the one that replaces it has its name."""
    return folder.with_name(f"{folder.name}{_OLD_SUFFIX}")


def _restore(folder: Path) -> None:
    """Put a folder back whose replacement was interrupted between the two renames."""
    if _old(folder).exists() and not folder.exists():
        os.replace(_old(folder), folder)
