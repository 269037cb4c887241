# SPDX-License-Identifier: Apache-2.0
"""Describe a saved model without loading it: read its files, run none of its code."""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import EntryNotFoundError, NotASafetensorsRepoError
from transformers.models.auto.auto_mappings import CONFIG_MAPPING_NAMES

from hf_synlm.data.files import CONFIG_FILE, find_model, read_json
from hf_synlm.hub.checkpoint import (
    SPECIAL_IDS,
    StoredTensor,
    check_code,
    check_model_source,
    check_saved,
    check_tokenizer_source,
    code_repositories,
    num_parameters,
    one_line_errors,
    pickled_files,
    stored_tensors,
)
from hf_synlm.hub.flatten import flat_files, outdated_code

_SIZES = ("vocab_size", "max_position_embeddings", "scoring_num_beams", "action_beam_size", "num_labels")
_CARD_FIELDS = ("license", "language", "pipeline_tag", "datasets", "tags")
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def describe_model(name: str | os.PathLike, revision: str | None = None) -> dict[str, Any]:
    """Describe a model from its files.

    Args:
        name: a folder, or a name on the Hub; then all files but the weights are downloaded.
        revision: branch, tag or commit on the Hub.

    Returns:
        For JSON: `model`, `revision`, `architecture`, `model_type`, `num_parameters`, `weights` (bytes by type),
        `config` (the sizes that users ask for, and special token ids), `adapter_of` (name of the backbone),
        `nonterminals` (RNNG), `tokenizer`, `auto_classes`, `code` (files), `outdated` (for which transformers the code
        was written, if they are older than this package's), `self_contained` and `problems` (why not), `card`.

    Raises:
        ValueError: there is no such model, or its files are damaged.
        OSError: the Hub cannot be reached.
    """
    name = find_model(name)
    check_model_source(name, revision)
    folder = Path(name)
    if folder.is_dir():
        weights = stored_tensors(folder)
    else:
        patterns = ["*.json", "*.py", "*.md", "*.txt"]
        with one_line_errors(str(name), "model"):
            folder = Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
        weights = _remote_weights(str(name), folder.name)
    check_saved(folder)
    config = read_json(folder / CONFIG_FILE)
    counts: dict[str, int] = {}
    for part in weights.values():
        counts[part.dtype] = counts.get(part.dtype, 0) + math.prod(part.shape)
    # Without an auto_map, an architecture of transformers brings no code.
    is_stock = config.get("model_type") in CONFIG_MAPPING_NAMES and not config.get("auto_map")
    problems = _problems(folder, bool(weights), is_stock)
    if Path(name).is_dir() and (folder / "tokenizer_config.json").is_file():  # of the Hub, not all files are here
        try:
            check_tokenizer_source(folder)
        except ValueError as error:
            problems.append(str(error))
    return {
        "model": str(name),
        "revision": None if Path(name).is_dir() else folder.name,
        "architecture": next(iter(config.get("architectures") or ()), None),
        "model_type": config.get("model_type"),
        "num_parameters": num_parameters(weights),
        "weights": {dtype: count * _BYTES.get(dtype, 1) for dtype, count in sorted(counts.items())},
        "config": {key: config[key] for key in (*_SIZES, *SPECIAL_IDS) if config.get(key) is not None},
        "adapter_of": (config.get("adapter_of") or {}).get("name"),
        "nonterminals": len(config["nonterminals"]) if config.get("nonterminals") else None,
        "tokenizer": _tokenizer_class(folder),
        "auto_classes": sorted(config.get("auto_map") or {}),
        "code": sorted(file.name for file in folder.glob("*.py")),
        "outdated": outdated_code(folder),
        "self_contained": not problems,
        "problems": problems,
        "card": _card(folder),
    }


def _remote_weights(name: str, revision: str) -> dict[str, StoredTensor]:
    """Shapes and types by name, from the first bytes of the files on the Hub."""
    try:
        found = get_safetensors_metadata(name, revision=revision)
    except (NotASafetensorsRepoError, EntryNotFoundError):
        return {}
    files = found.files_metadata.values()
    return {key: StoredTensor(tuple(part.shape), part.dtype) for file in files for key, part in file.tensors.items()}


def _problems(folder: Path, has_weights: bool, is_stock: bool) -> list[str]:
    """Why a folder cannot be loaded without this package, or not safely."""
    problems = []
    try:
        for name in [] if is_stock else code_repositories(check_code(folder)):
            problems.append(f"Its code lies in the repository {name!r} of the Hub.")
    except ValueError as error:
        problems.append(str(error))
    if not has_weights:
        problems.append("It holds no weights in safetensors.")
    pickled = pickled_files(folder)
    return problems + ([f"It holds pickled files: {', '.join(pickled)}."] if pickled else [])


def _tokenizer_class(folder: Path) -> str | None:
    file = folder / "tokenizer_config.json"
    return read_json(file).get("tokenizer_class") if file.is_file() else None


def _card(folder: Path) -> dict[str, Any] | None:
    """What the front matter of the card says; None without a card."""
    file = folder / "README.md"
    if not file.is_file():
        return None
    values = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    return {key: values[key] for key in _CARD_FIELDS if values.get(key) is not None}


def info_table(description: dict[str, Any]) -> str:
    """A description as lines for a reader.

    Args:
        description: what `describe_model` returns.

    Returns:
        One line per fact, names in a column.
    """
    weights = ", ".join(f"{dtype} {size / 2**20:.1f} MiB" for dtype, size in description["weights"].items())
    card = description["card"]
    rows = {
        "model": description["model"],
        "revision": description["revision"],
        "architecture": f"{description['architecture']} ({description['model_type']})",
        "parameters": f"{description['num_parameters']:,}",
        "weights": weights or "none in safetensors",
        **description["config"],
        "adapter of": description["adapter_of"],
        "nonterminals": description["nonterminals"],
        "tokenizer": description["tokenizer"] or "none, so it cannot read text",
        "Auto classes": ", ".join(description["auto_classes"]) or "none",
        "code": ", ".join(filter(None, [f"{len(description['code'])} files", description["outdated"]])),
        "self-contained": "yes" if description["self_contained"] else f"no: {' '.join(description['problems'])}",
        **({"card": "none"} if card is None else {f"card: {key}": value for key, value in card.items()}),
    }
    width = max(map(len, rows))
    lines = [
        f"{key:{width}}  {', '.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in rows.items()
        if value is not None
    ]
    return "\n".join(lines)


def shipped_files(architecture: str) -> dict[str, int]:
    """Files of code that ship with every model of an architecture.

    Args:
        architecture: its folder in `hf_synlm/models`, such as "gpst".

    Returns:
        Number of lines by file name, sorted by name.
    """
    return {name: len(text.splitlines()) for name, text in flat_files(architecture).items()}


def files_table(files: Mapping[str, int]) -> str:
    """Files with their lines for a reader, and the total.

    Args:
        files: what `shipped_files` returns.

    Returns:
        One line per file, and the total.
    """
    rows = {**files, f"total: {len(files)} files": sum(files.values())}
    width = max(map(len, rows))
    return "\n".join(f"{name:{width}}  {lines:6,}" for name, lines in rows.items())
