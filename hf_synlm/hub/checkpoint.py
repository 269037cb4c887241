# SPDX-License-Identifier: Apache-2.0
"""Saved models of unknown origin: reading what they say about themselves, and loading them or refusing them clearly.

Nothing here runs code that lies in a folder, and nothing unpickles more than tensors. What a folder promises is checked
before memory is taken: shard names stay inside the folder, headers can be read, shapes are those of the configuration.
"""

import dataclasses
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_synlm.core.backbone_adapter import ADAPTER_FOLDER
from hf_synlm.data.files import CONFIG_FILE, TOKENIZER_FILES, file_sha256, find_model, read_json
from hf_synlm.hub import architectures

# Tokenizers of bytes and code points, which have no vocabulary to save.
_WITHOUT_FILES = ("ByT5Tokenizer", "CanineTokenizer", "PerceiverTokenizer")
_LFS_POINTER = b"version https://git-lfs"
INDEX_FILE = "model.safetensors.index.json"
STATE_FILE = "training_state.json"  # of a checkpoint of a training run, which is no model
ADAPTER_FILE = "adapter_config.json"  # of PEFT: the model itself lies elsewhere
# Names that safetensors has for the types of weights.
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
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
    for file in _weight_files(Path(folder)):
        with file.open("rb") as start:
            if start.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise ValueError(
                    f"{str(file)!r} is a Git LFS pointer, not the weights. Get them by `git lfs pull` in this folder."
                )
        try:
            with safe_open(file, "pt") as weights:
                # An open safetensors file is not a mapping: it cannot be iterated without `keys`.
                for name in weights.keys():  # noqa: SIM118
                    part = weights.get_slice(name)
                    tensors[name] = StoredTensor(tuple(part.get_shape()), part.get_dtype())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{str(file)!r} is truncated or is not a safetensors file ({error}). Download it again."
            ) from error
    return tensors


def loaded_tensors(name: str, revision: str | None = None) -> dict[str, StoredTensor]:
    """`stored_tensors` of a folder, or of a model on the Hub that has just been loaded."""
    return stored_tensors(
        find_model(name) if is_folder(name) else snapshot_download(name, revision=revision, local_files_only=True)
    )


def store_as(folder: Path, wanted: Mapping[str, StoredTensor]) -> None:
    """Rewrite the weights of a folder in other types, of fewer bytes say. Loaded is still what config.json says."""
    here = {name: tensor.dtype for name, tensor in stored_tensors(folder).items()}
    there = {name: tensor.dtype for name, tensor in wanted.items() if name in here and tensor.dtype in _FLOATS}
    other, size = {name for name, dtype in there.items() if dtype != here[name]}, 0
    for file in _weight_files(folder) if other else ():
        tensors = load(file.read_bytes())  # not `load_file`, which leaves them in the file that is replaced
        tensors |= {name: tensors[name].to(_FLOATS[there[name]]) for name in tensors.keys() & other}
        save_file(tensors, file, {"format": "pt"})
        size += sum(tensor.nbytes for tensor in tensors.values())
    if other and (folder / INDEX_FILE).is_file():
        index = read_json(folder / INDEX_FILE)
        index["metadata"]["total_size"] = size
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def weight_checksums(folder: str | os.PathLike) -> dict[str, str]:
    """SHA-256 of the safetensors files in a folder, by file name."""
    adapter = _adapter_file(Path(folder))
    files = sorted(Path(folder).glob("*.safetensors")) if adapter is None else [adapter]
    return {path.name: file_sha256(path) for path in files}


def is_adapter(name: str | os.PathLike, **options: Any) -> bool:
    """Whether a model holds an adapter of a Tree LM on a backbone, by its configuration."""
    return bool(PreTrainedConfig.get_config_dict(name, **options)[0].get("adapter_of"))


def _adapter_file(folder: Path) -> Path | None:
    """The weights of a folder that holds an adapter; None for others."""
    adapts = (folder / CONFIG_FILE).is_file() and is_adapter(folder)
    return folder / ADAPTER_FOLDER / "adapter_model.safetensors" if adapts else None


def pickled_files(folder: str | os.PathLike) -> list[str]:
    """Files of a folder that are pickles by their names."""
    return sorted(file.name for pattern in PICKLES for file in Path(folder).glob(pattern))


def _weight_files(folder: Path) -> list[Path]:
    single = _adapter_file(folder) or folder / "model.safetensors"
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
                f"{str(folder / INDEX_FILE)!r} names the file {name!r}: shards are .safetensors files beside it"
            )
        if not (folder / name).is_file():
            raise ValueError(f"{str(folder)!r} lacks its shard {name!r}. Download it again.")
    return sorted({folder / name for name in names.values()})


def check_checkpoint(folder: str | os.PathLike) -> None:
    """Refuse a model folder that cannot be what it claims to be, before memory is taken for it.

    The configuration must be valid and give every tensor its shape; shards must lie in the folder. The model is built
    without memory for its weights. Of other architectures only configuration and headers are read.
    """
    folder = Path(folder)
    values, tensors = read_json(folder / CONFIG_FILE), stored_tensors(folder)
    named = values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    model_class: Any = getattr(architectures, name) if name in architectures.__all__ else None
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or config_class.model_type != values.get("model_type"):
        return
    try:
        config = config_class.from_dict(values)
    except (StrictDataclassError, TypeError) as error:
        raise ValueError(f"{str(folder / CONFIG_FILE)!r} does not fit: {_one_line(error)}") from error
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    wrong = [
        f"{key} {list(tensor.shape)} instead of {list(expected[key].shape)}"
        for key, tensor in tensors.items()
        if key in expected and tensor.shape != tuple(expected[key].shape)
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{str(folder)!r}: the weights do not fit config.json, which gives other shapes: "
            f"{', '.join(wrong[:3])}{more}. One of the two files belongs to another model."
        )


def is_folder(name: str | os.PathLike) -> bool:
    """Tell a folder from a name on the Hub, without asking it; ValueError for what looks like a missing folder."""
    text = os.fspath(name)
    if os.path.isdir(text):
        return True
    if os.path.exists(text):
        raise ValueError(f"{text!r} is a file: name the folder in which it lies.")
    if text.startswith((".", "/", "~")) or text.count("/") > 1:
        raise ValueError(f"there is no folder {text!r}. Name one that exists, or owner/name on the Hub.")
    return False


def check_model_source(
    name: str | os.PathLike, revision: str | None = None, gguf_file: str | None = None, subfolder: str = ""
) -> None:
    """Refuse a folder that does not exist or holds no model, a revision of a folder, and a name without the Hub.

    A GGUF file holds its own configuration and tokenizer.
    """
    if not is_folder(name):
        _check_hub(name, revision, (CONFIG_FILE, ADAPTER_FILE, gguf_file or CONFIG_FILE), subfolder)
        return
    if revision is not None:
        raise ValueError(
            f"revision {revision!r}: {str(name)!r} is a folder, and revisions are of the Hub. Leave it out."
        )
    folder = Path(name) / subfolder
    if gguf_file is None and not any((folder / file).is_file() for file in (CONFIG_FILE, ADAPTER_FILE)):
        steps = [file.parent for file in (folder / STATE_FILE, *folder.glob(f"step_*/{STATE_FILE}")) if file.is_file()]
        if steps:
            newest = max(steps, key=lambda step: int(step.name.rpartition("_")[2]) if step.name[-1].isdigit() else 0)
            raise ValueError(
                f"{str(folder)!r} is a training run or its checkpoint, and no model: `synlm export {newest} --out "
                "FOLDER` makes one of the checkpoint. Or let the run end, which writes `model` into its folder."
            )
        raise ValueError(f"{str(folder)!r} is not a model folder: it has no {CONFIG_FILE}. Name a folder that has one.")
    if (folder / CONFIG_FILE).is_file():
        _check_nulls(folder / CONFIG_FILE)


def _check_nulls(file: Path) -> None:
    """Refuse a configuration with null for a number, a string or a boolean; fields of other libraries are not known."""
    values = read_json(file)
    kind = values.get("model_type")
    for field in dataclasses.fields(CONFIG_MAPPING[kind]) if kind in CONFIG_MAPPING else ():
        if field.type in (bool, int, float, str) and values.get(field.name, 0) is None:
            raise ValueError(f"{str(file)!r}: {field.name} is null. It must be of type {field.type.__name__}.")


def _check_hub(name: str | os.PathLike, revision: str | None, files: Iterable[str], subfolder: str = "") -> None:
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
            f"{text!r} is not a folder, and the Hub cannot be asked for it: {_one_line(error).rstrip('.')}. Check the "
            "name of the folder, or the network."
        ) from error


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


def load_pretrained(
    name: str,
    auto_class: Any = AutoModelForCausalLM,
    *,
    dtype: str = "auto",
    backbone: str | None = None,
    merge: bool = True,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or the Hub, or say in one line why that fails.

    `options` are those of `from_pretrained`, for both (`revision`, `trust_remote_code`, ...); None counts as not given.
    `backbone` is the folder or Hub name of the backbone of an adapter, if not the one that the adapter names; `merge`
    adds the adapter to the weights.
    Raises ValueError if the model or tokenizer is missing, if files are damaged or do not fit together, and for pickled
    weights that hold more than tensors. Of the output folder of a training run, its model is loaded.
    """
    name = find_model(name)
    given: Mapping[str, Any] = {key: value for key, value in options.items() if value is not None}
    subfolder = given.get("subfolder", "")
    check_model_source(name, given.get("revision"), given.get("gguf_file"), subfolder)
    if "gguf_file" not in given:
        check_tokenizer_source(name, subfolder)
    if (Path(name) / CONFIG_FILE).is_file():
        check_checkpoint(name)
    with one_line_errors(name, "model"):
        tokenizer = AutoTokenizer.from_pretrained(name, **given)
        of_adapter: dict[str, Any] = {}
        if backbone is not None or not merge:
            of_adapter = {"backbone": backbone, "merge": merge} if is_adapter(name, **given) else {}
        if backbone is not None and not of_adapter:
            raise ValueError(f"it is not an adapter of a backbone. Leave out the backbone {backbone!r} (--backbone).")
        return auto_class.from_pretrained(name, dtype=dtype, **of_adapter, **given), tokenizer


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, or say in one line why that fails."""
    check_tokenizer_source(name)
    if not is_folder(name):
        _check_hub(name, None, TOKENIZER_FILES[:2])
    with one_line_errors(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def saved_auto_class(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Auto class that loads a model as what it was saved: a language model, a classifier, or a bare model.

    It is that of causal language models if the configuration does not tell.
    """
    name = find_model(name)
    check_model_source(name, revision)
    with one_line_errors(name, "model"):
        config = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)
    saved = next(iter(config.architectures or ()), None)
    auto_map = getattr(config, "auto_map", None) or {}
    kinds = architectures.AUTO_CLASSES.values()
    named = (kind for kind in kinds if str(auto_map.get(kind.__name__)).rpartition(".")[2] == saved)
    return next(named, AutoModelForCausalLM)


@contextmanager
def one_line_errors(name: str, kind: str) -> Iterator[None]:
    """Turn what `from_pretrained` and the Hub raise into a ValueError of one line that names the model."""
    source = "" if os.path.isdir(name) else "is not a folder, and "
    try:
        yield
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{name!r} {source}cannot be loaded as a {kind}: its weights are pickled and hold more than tensors, so "
            "loading them could run foreign code. Ask its author for safetensors."
        ) from error
    except _UNUSABLE as error:
        raise ValueError(f"{name!r} {source}cannot be loaded as a {kind}: {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {text}"
