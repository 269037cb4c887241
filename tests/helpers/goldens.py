"""Numbers of the authors' programs: `tests/goldens/FAMILY/cases.zip`, described by README.md beside it.

A zip holds a folder for each case. Equal tensors of a file are stored once: its metadata names the copies (name of the
copy -> name of the stored tensor), as `safetensors.torch.save_model` does.
"""

import json
import zipfile
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"


def cases_of(family: str) -> list[str]:
    """Names of the cases of a family ("palm")."""
    with zipfile.ZipFile(GOLDENS / family / "cases.zip") as archive:
        return sorted({name.partition("/")[0] for name in archive.namelist()})


def read_bytes(case: str, file: str) -> bytes:
    """One file of a case ("palm/rb"): "meta.json", "state.safetensors", ..."""
    family, name = case.split("/")
    with zipfile.ZipFile(GOLDENS / family / "cases.zip") as archive:
        return archive.read(f"{name}/{file}")


def read_tensors(case: str, name: str) -> dict[str, Tensor]:
    """The tensors of a case: of `state`, `io`, `grads`, ..."""
    data = read_bytes(case, f"{name}.safetensors")
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = load(data)
    return tensors | {copy: tensors[kept].clone() for copy, kept in header.get("__metadata__", {}).items()}


def read_meta(case: str, name: str = "meta") -> dict[str, Any]:
    """What a case says in JSON, by default about itself."""
    return json.loads(read_bytes(case, f"{name}.json"))


def read_case(case: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """State dict, inputs with results, and description of a case."""
    return read_tensors(case, "state"), read_tensors(case, "io"), read_meta(case)
