# SPDX-License-Identifier: Apache-2.0
"""Saved models of unknown origin: what their files say about them, read without torch. Nothing here runs their code."""

import difflib
import math
import os
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers.dynamic_module_utils import get_relative_imports

from hf_synlm.data.files import CONFIG_FILE, TOKENIZER_FILES, file_sha256, find_model, read_json
from hf_synlm.data.text import refuse_pointer

# Tokenizers of bytes and code points, which have no vocabulary to save.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
INDEX_FILE = "model.safetensors.index.json"
STATE_FILE = "training_state.json"  # of a checkpoint of a training run, which is no model
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ADAPTER_WEIGHTS = "adapter/adapter_model.safetensors"  # as `core/backbone_adapter.py` writes them
ADAPTER_FILE = "adapter_config.json"  # of PEFT: the model itself lies elsewhere
MERGE = "Load it by PeftModel, merge it by `merge_and_unload`, save the model and its tokenizer, and take their folder."
# "file.Class" in an auto_map, or "owner/name--file.Class" where the code lies in another repository of the Hub.
_REFERENCE = re.compile(r"([\w.-]+/[\w.-]+--)?\w+\.\w+")
# A line that imports this package, also one in `try`.
_OF_PACKAGE = re.compile(r"^\s*(from|import)\s+hf_synlm\b", re.MULTILINE)
# Of RNNG, batch normalizers and sparse PCFGs.
_BUFFERS = ("word_final", "running_mean", "running_var", "num_batches_tracked", ".rules")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.pickle", "*.ckpt")
# What `from_pretrained` raises for files that are damaged, or something else than they claim to be.
_DAMAGED = (OSError, RuntimeError, TypeError, KeyError, AttributeError, ValueError)
_UNUSABLE = (*_DAMAGED, SafetensorError, StrictDataclassError)


@dataclass(frozen=True)
class StoredTensor:
    """What the header of a file says about one tensor."""

    shape: tuple[int, ...]
    dtype: str


def stored_tensors(folder: str | os.PathLike) -> dict[str, StoredTensor]:
    """Shapes and types of the weights in a folder, from the headers of its safetensors files; empty without any.

    Those of an adapter of a backbone have the names that PEFT gives them.
    """
    tensors: dict[str, StoredTensor] = {}
    for file in weight_files(Path(folder)):
        refuse_pointer(file)
        try:
            with safe_open(file, "np") as weights:
                # An open safetensors file is not a mapping: it cannot be iterated without `keys`.
                for name in weights.keys():  # noqa: SIM118
                    part = weights.get_slice(name)
                    tensors[name] = StoredTensor(tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{str(file)!r} is truncated or is not a safetensors file ({error}). Download it again."
            ) from error
    return tensors


def num_parameters(tensors: Mapping[str, StoredTensor]) -> int:
    """How many numbers of stored tensors are parameters, not buffers."""
    return sum(math.prod(part.shape) for name, part in tensors.items() if not name.endswith(_BUFFERS))


def loaded_tensors(name: str, revision: str | None = None) -> dict[str, StoredTensor]:
    """`stored_tensors` of a folder, or of a model on the Hub that has just been loaded."""
    return stored_tensors(
        find_model(name) if is_folder(name) else snapshot_download(name, revision=revision, local_files_only=True)
    )


def weight_checksums(folder: str | os.PathLike) -> dict[str, str]:
    """SHA-256 of the safetensors files in a folder, by file name."""
    return {path.name: file_sha256(path) for path in weight_files(Path(folder))}


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of a backbone, by its configuration."""
    return (folder / CONFIG_FILE).is_file() and bool(read_json(folder / CONFIG_FILE).get("adapter_of"))


def pickled_files(folder: str | os.PathLike) -> list[str]:
    """Files of a folder that are pickles by their names."""
    return sorted(file.name for pattern in PICKLES for file in Path(folder).glob(pattern))


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder that hold its weights."""
    single = folder / (_ADAPTER_WEIGHTS if is_adapter(folder) else "model.safetensors")
    return [single] if single.is_file() else _shards(folder)


def _shards(folder: Path) -> list[Path]:
    """Files that the list of shards names; empty without a list."""
    if not (folder / INDEX_FILE).is_file():
        return []
    names = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{str(folder / INDEX_FILE)!r} has no weight_map from tensors to files. Save the model again.")
    for name in names.values():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(
                f"{str(folder / INDEX_FILE)!r} names the file {name!r}, but shards are .safetensors files beside it"
            )
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} lacks its shard {name!r}. Download it again.")
    return sorted({folder / name for name in names.values()})


def is_folder(name: str | os.PathLike, is_owned: bool = False) -> bool:
    """Tell a folder from a name on the Hub, without asking it; ValueError for what looks like a missing folder.

    `is_owned`: a name on the Hub has an owner, as all have whose code is not that of transformers.
    """
    text = os.fspath(name)
    if os.path.isdir(text):
        return True
    if os.path.exists(text):
        raise ValueError(f"{text!r} is a file. Name the folder that holds this file.")
    if text.startswith((".", "/", "~")) or text.count("/") > 1 or (is_owned and "/" not in text):
        raise ValueError(f"there is no folder {text!r}. Name an existing folder, or owner/name on the Hub.")
    return False


def check_model_source(name: str | os.PathLike, revision: str | None = None, subfolder: str = "") -> None:
    """Refuse a folder that does not exist or holds no model, a revision of a folder, and a name without the Hub."""
    if not is_folder(name):
        check_hub(name, revision, (CONFIG_FILE, ADAPTER_FILE), subfolder)
        return
    if revision is not None:
        raise ValueError(f"revision {revision!r}: {str(name)!r} is a folder and has no revisions. Leave revision out.")
    folder = Path(name) / subfolder
    if not any((folder / file).is_file() for file in (CONFIG_FILE, ADAPTER_FILE)):
        steps = [file.parent for file in (folder / STATE_FILE, *folder.glob(f"step_*/{STATE_FILE}")) if file.is_file()]
        if steps:
            newest = max(steps, key=lambda step: int(step.name.rpartition("_")[2]) if step.name[-1].isdigit() else 0)
            raise ValueError(
                f"{str(folder)!r} is a training run or its checkpoint, not a model. Make a model of it by `synlm "
                f"export {newest} --out FOLDER`, or wait until the run ends and writes the folder `model`."
            )
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no {CONFIG_FILE}. Name a folder that has one.")
    for pattern in ("*.json", *PICKLES):
        for file in folder.glob(pattern):
            refuse_pointer(file)


def check_hub(name: str | os.PathLike, revision: str | None, files: Iterable[str], subfolder: str = "") -> None:
    """Raise ValueError for a name of the Hub that is not in the cache if nobody answers there.

    The loaders of model and tokenizer would each try for half a minute, file by file.
    """
    text, inside = os.fspath(name), f"{subfolder}/" if subfolder else ""
    try:
        if any(isinstance(try_to_load_from_cache(text, inside + file, revision=revision), str) for file in files):
            return
        HfApi().model_info(text, revision=revision, timeout=10)
    except (HfHubHTTPError, HFValidationError):
        return  # somebody answers, or the name is none: the loaders say what is wrong
    except HfHubHTTPError.__bases__ as error:
        raise ValueError(
            f"{text!r} {_not_a_folder(text)}the Hub cannot be asked for it: {_one_line(error).rstrip('.')}. Check the "
            "name of the folder, or the network."
        ) from error


def _not_a_folder(name: str) -> str:
    """That a model is no folder, with the folder beside it that may be meant."""
    near = difflib.get_close_matches(Path(name).name, (path.name for path in Path(name).parent.glob("*/")), 1, 0.75)
    return f"is not a folder{f' (did you mean {Path(name).with_name(near[0])}?)' if near else ''}, and "


def check_tokenizer_source(name: str | os.PathLike, subfolder: str = "") -> None:
    """Refuse a folder without a tokenizer; names on the Hub are not looked up.

    transformers would take an empty vocabulary, or ask for unrelated packages.
    """
    folder = Path(name) / subfolder
    settings = folder / TOKENIZER_FILES[1]
    if settings.is_file() and not any(any(folder.glob(p)) for p in TOKENIZER_FILES if p != settings.name):
        if read_json(settings).get("tokenizer_class") not in _WITHOUT_FILES:
            raise ValueError(f"{str(folder)!r} has no {TOKENIZER_FILES[0]}. Get it again, or save the tokenizer there.")
    if is_folder(name) and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        raise ValueError(
            f"{str(folder)!r} holds no tokenizer ({TOKENIZER_FILES[0]}, {TOKENIZER_FILES[1]}). Save it there by "
            "tokenizer.save_pretrained, or name a folder that holds one."
        )


@contextmanager
def one_line_errors(name: str, kind: str) -> Iterator[None]:
    """Turn what `from_pretrained` and the Hub raise into a ValueError of one line that names the model."""
    source = "" if os.path.isdir(name) else _not_a_folder(name)
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name!r} {source}cannot be loaded as a {kind}. Its weights are a pickle that holds more than tensors, "
            "so loading could run foreign code. Ask the author for safetensors."
        ) from error
    except _UNUSABLE as error:
        raise ValueError(f"{name!r} {source}cannot be loaded as a {kind}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()).partition(" Model type should be one of")[0]  # hundreds of classes
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"


# ---------------------------------------------------------------------------------------------- code
def check_complete(folder: str | os.PathLike) -> dict[str, str]:
    """Check as `check_code` does, and for weights; returns the `auto_map`."""
    auto_map = check_code(folder)
    if not stored_tensors(folder):
        raise ValueError(
            f"{os.fspath(folder)!r} has no *.safetensors file, so it holds no weights. Export the model again."
        )
    return auto_map


def check_saved(folder: Path) -> None:
    """Refuse a folder without a configuration, such as an adapter of PEFT."""
    if not (folder / CONFIG_FILE).is_file():
        remedy = "Export the model again."
        if (folder / ADAPTER_FILE).is_file():
            remedy = f"It is an adapter of PEFT. {MERGE}"
        raise ValueError(f"{str(folder)!r} has no {CONFIG_FILE}, so it holds no saved model. {remedy}")


def check_code(folder: str | os.PathLike) -> dict[str, str]:
    """The `auto_map` of a folder; ValueError if it lacks a configuration, or code that its Auto classes need."""
    folder, config_file = Path(folder), Path(folder, CONFIG_FILE)
    check_saved(folder)
    auto_map = read_json(config_file).get("auto_map")
    if not auto_map:
        raise ValueError(
            f"{str(config_file)!r} has no auto_map, so the folder loads only with hf_synlm, as all n-gram models do. "
            "For other models, import hf_synlm, and save the model again."
        )
    for auto_class, reference in auto_map.items():
        if not isinstance(reference, str) or not _REFERENCE.fullmatch(reference):
            raise ValueError(
                f"{auto_class} of {str(folder)!r} is {reference!r}. Code must lie in the folder itself, as "
                "'file.Class', or in a repository of the Hub, as 'owner/name--file.Class'. Load the model and export "
                "it again."
            )
        if "--" in reference:
            continue
        files = code_files(folder, reference)
        missing = sorted(file.name for file in files if not file.is_file())
        if missing:
            raise ValueError(f"{auto_class} of {str(folder)!r} needs {missing}, which is missing. Export the model.")
        needing = [file.name for file in sorted(files) if _OF_PACKAGE.search(file.read_text(encoding="utf-8"))]
        if needing:
            raise ValueError(
                f"{needing} in {str(folder)!r} import hf_synlm, so the folder does not load without it. For a folder "
                f"that loads alone: synlm export {folder} --out FOLDER."
            )
    return dict(auto_map)


def code_repositories(auto_map: Mapping[str, str]) -> list[str]:
    """Names on the Hub of the repositories that hold code of an `auto_map`; empty if the folder holds all of it."""
    return sorted({reference.partition("--")[0] for reference in auto_map.values() if "--" in reference})


def code_files(folder: Path, reference: str) -> set[Path]:
    """Files that "file.Class" of an `auto_map` needs, existing or not, as the loader of transformers finds them."""
    files, unread = set(), {folder / f"{reference.partition('.')[0]}.py"}
    while unread:
        files |= unread
        found = {folder / f"{name}.py" for file in unread if file.is_file() for name in get_relative_imports(file)}
        unread = found - files
    return files
