# SPDX-License-Identifier: Apache-2.0
"""Tables of fine-tuning examples: read from files or data sets, checked, encoded."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError

from hf_synlm.data.text import file_ending, plural
from hf_synlm.evaluation.text.tables import read_rows

_FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}


def load_table(
    path: str | None, dataset: tuple[str | None, str | None, str], max_samples: int | None = None
) -> Dataset:
    """Read a table of at least one row: a file (see `_FORMATS`), or a data set (name, configuration, split).

    Only the first `max_samples` rows are kept.
    """
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"There is no file {path!r}.")
        ending = file_ending(path)
        if ending not in _FORMATS:
            raise ValueError(f"{path!r} has the ending {Path(path).suffix!r}. Pass one of {', '.join(_FORMATS)}.")
        if not os.path.getsize(path):
            raise ValueError(f"{path!r} is empty.")
        try:  # fields of CSV and TSV are the text that stands there, also null and 007
            kind = _FORMATS[ending]
            if ending in (".csv", ".tsv"):
                table = Dataset.from_list(list(read_rows(path, kind, line_ends=True)))
            else:
                table = load_dataset(kind, data_files=path, split="train")
        except (DatasetGenerationError, ValueError) as error:  # the cause of the former says what is wrong
            cause = " ".join(str(error.__cause__ or error).split()).removesuffix(".")
            raise ValueError(
                f"{path!r} cannot be read as {kind}: {cause}. Correct the file (text is in UTF-8), or get it again."
            ) from error
    else:
        name, config, split = dataset
        table = load_dataset(name, config, split=split)
    if not len(table):
        raise ValueError(f"{path or dataset} has no examples.")
    return table if max_samples is None else table.select(range(min(max_samples, len(table))))


def describe_table(
    role: str, path: str, table: Dataset, columns: Sequence[str], labels: np.ndarray | None = None
) -> dict[str, Any]:
    """Origin and content of the rows that are used: `role`, `path`, `rows`, and `sha256_of_rows`.

    The checksum depends on texts, labels and their order, not on the format of the file. Cost: O(characters).
    """
    digest = hashlib.sha256()
    for batch in table.select_columns(list(columns)).iter(1000):
        for row in zip(*(batch[name] for name in columns), strict=True):
            digest.update(json.dumps(row).encode() + b"\n")
    if labels is not None:
        digest.update(json.dumps(labels.tolist()).encode())
    return {"role": role, "path": path, "rows": len(table), "sha256_of_rows": digest.hexdigest()}


def check_columns(table: Dataset, names: Iterable[str], source: str) -> None:
    """Raise ValueError if a column is missing; `source` names the origin of the table."""
    missing = [name for name in names if name not in table.column_names]
    if missing:
        raise ValueError(f"{source} has no column {missing[0]!r}. Its columns are {', '.join(table.column_names)}.")


def check_texts(table: Dataset, name: str, source: str) -> None:
    """Raise ValueError if a row of a column holds something else than text, or only white space."""
    for row, text in enumerate(table[name]):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{source}: {name} of row {row} (counted from 0) is {text!r}. Remove or fill this row.")


class ExampleDataset(torch.utils.data.Dataset):
    """Encoded examples, memory-mapped; an item maps the columns to arrays and numbers."""

    def __init__(self, table: Dataset):
        if not len(table):
            raise ValueError("No examples are left. Check the files and the limits on length.")
        self.table = table.with_format("numpy")
        self.lengths = [len(ids) for ids in table["input_ids"]]

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One example."""
        return self.table[index]

    def describe(self) -> str:
        """One line about the size."""
        return f"{plural(len(self), 'example')}, {sum(self.lengths):,} tokens, the longest {max(self.lengths):,}"

    def fingerprint(self) -> str:
        """Hash of all lengths and of examples spread over the data set."""
        digest = hashlib.sha256(json.dumps(self.lengths).encode())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), 256), dtype=int):
            for name, value in sorted(self[int(index)].items()):
                digest.update(name.encode() + np.asarray(value).tobytes())
        return digest.hexdigest()[:16]


def encode_table(
    accelerator: Accelerator,
    table: Dataset,
    encode: Callable[..., dict[str, list]],
    num_workers: int | None,
    rows: bool = False,
) -> ExampleDataset:
    """Encode all rows of a table; the main process encodes first, the others find its cache.

    `encode` turns columns of some rows (and their numbers, with `rows`) into encoded columns.
    """
    with accelerator.main_process_first():
        encoded = table.map(
            encode,
            with_indices=rows,
            batched=True,
            remove_columns=table.column_names,
            num_proc=num_workers,
            desc="encoding",
        )
    return ExampleDataset(encoded)
