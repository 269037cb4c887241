"""Numbers of the authors' programs: `tests/goldens/FAMILY/cases.zip`, described by README.md beside it.

    python -m tests.helpers.goldens FAMILY FOLDER    pack a folder with a subfolder for each case

Equal tensors of a file are stored once. Its metadata names the copies, as `safetensors.torch.save_model` does.
"""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

from safetensors.torch import load, load_file, save
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


def pack(family: str, folder: Path) -> None:
    """Write the zip of a family. Equal files give equal bytes."""
    with zipfile.ZipFile(GOLDENS / family / "cases.zip", "w") as archive:
        for file in sorted(folder.glob("*/*")):
            data = _without_copies(file) if file.suffix == ".safetensors" else file.read_bytes()
            member = zipfile.ZipInfo(f"{file.parent.name}/{file.name}")  # without a date
            archive.writestr(member, data, zipfile.ZIP_DEFLATED, 9)


def _without_copies(file: Path) -> bytes:
    kept, copies, first = dict[str, Tensor](), dict[str, str](), dict[Any, str]()
    for name, tensor in sorted(load_file(file).items()):
        same = first.setdefault((tensor.dtype, tensor.shape, tensor.numpy().tobytes()), name)
        if same == name:
            kept[name] = tensor
        else:
            copies[name] = same
    return save(kept, copies)


if __name__ == "__main__":
    pack(sys.argv[1], Path(sys.argv[2]))
