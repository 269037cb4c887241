# SPDX-License-Identifier: Apache-2.0
"""A file of results by text, written as they come, from which a stopped evaluation continues.

JSON lines: first the model, as a checksum of its weights and configuration, and the options that change results; then
a line per text with what was computed. A line that a killed process left incomplete is cut off.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from hf_synlm.data.text import PathLike

# What JSON can hold.
Result: TypeAlias = dict[str, Any]
FORMAT = "hf_synlm.cache.2"


def checksum(model: PreTrainedModel) -> str:
    """SHA-256 of a model's weights and configuration, wherever it was loaded from."""
    places = ("_name_or_path", "transformers_version")
    config = json.loads(model.config.to_json_string(use_diff=False))
    digest = hashlib.sha256(json.dumps({k: v for k, v in config.items() if k not in places}).encode())
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class ResultCache:
    """Results of one model with one set of options, by text."""

    def __init__(self, path: PathLike, model: PreTrainedModel, options: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._header = {"format": FORMAT, "model": checksum(model), **json.loads(json.dumps(options))}

    def read(self) -> dict[str, Result]:
        """Results of earlier runs by the JSON of their text; makes the file ready for more."""
        remedy = "Name another file, or delete it to begin anew."
        data = self.path.read_bytes() if self.path.exists() else b""
        if not data:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._append([self._header])
            return {}
        try:
            header = json.loads(data.partition(b"\n")[0])
            is_cache = header["format"] == FORMAT
        except (ValueError, KeyError, TypeError):
            is_cache = False
        if not is_cache:
            raise ValueError(f"{self.path} is not a cache that this version has written. {remedy}")
        differing = [name for name in {**self._header, **header} if header.get(name) != self._header.get(name)]
        if differing:
            told = ", ".join(
                "another model" if name == "model" else f"{name} {header.get(name)} instead of {self._header.get(name)}"
                for name in differing
            )
            raise ValueError(f"{self.path} holds results of {told}. {remedy}")
        complete = data[: data.rfind(b"\n") + 1]
        if len(complete) < len(data):
            os.truncate(self.path, len(complete))
        rows = map(json.loads, complete.splitlines()[1:])
        return {json.dumps(row["text"]): row["result"] for row in rows}

    def add(self, results: Mapping[str, Result]) -> None:
        """Append results, given by the JSON of their text."""
        self._append([{"text": json.loads(key), "result": value} for key, value in results.items()])

    def _append(self, rows: list[Any]) -> None:
        # One call, so that processes that share the file do not mix their lines.
        with self.path.open("ab", buffering=0) as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
