"""Numbers of the authors' programs, as tests/goldens/README.md describes them."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

GOLDENS = Path(__file__).parents[1] / "goldens"


def read_tensors(case: str, name: str) -> dict[str, Tensor]:
    """One file of a case ("palm/rb"): `state`, `io`, `grads`, ..."""
    return load_file(GOLDENS / case / f"{name}.safetensors")


def read_case(case: str) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    """State dict, inputs with results, and description of a case."""
    meta = json.loads((GOLDENS / case / "meta.json").read_text(encoding="utf-8"))
    return read_tensors(case, "state"), read_tensors(case, "io"), meta
