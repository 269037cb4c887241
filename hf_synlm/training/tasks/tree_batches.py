# SPDX-License-Identifier: Apache-2.0
"""Treebanks -> vocabulary -> token ids and actions -> padded batches, with `datasets` as the memory-mapped store.

A row holds a sentence with its labeled tree, and, once encoded, its token ids and the actions of its derivation. Rows
are written once to the cache of `datasets` and shared by all processes and runs.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.data.gold_trees import encode_trees, label_inventory
from hf_synlm.data.punctuation import Punctuation, has_penn_tags
from hf_synlm.data.text import plural
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.models.rnng.configuration_rnng import RNNGConfig
from hf_synlm.models.rnng.plan import make_plan
from hf_synlm.training.arguments.treebank import TreeDataArguments
from hf_synlm.training.engine.recipe import Splits
from hf_synlm.trees.codecs import LabeledCodec, TreeCodec, pad_inputs, pad_rows

TREE_FEATURES = {
    "words": List(Value("string")),
    "tags": List(Value("string")),
    "labels": List(Value("string")),
    "spans": List(List(Value("int32"))),
    "source": Value("string"),
    "joined": List(Value("bool")),
}
CODE_FEATURES = {"input_ids": List(Value("int32")), "actions": List(Value("int32")), "word_ends": List(Value("bool"))}


# ---------------------------------------------------------------------------------------------- trees
def load_trees(accelerator: Accelerator, paths: Sequence[str], reading: Mapping[str, Any] | None = None) -> Dataset:
    """Read treebanks: columns of `TREE_FEATURES`; `reading` are options of `read_treebank`.

    The main process reads first, the others use its cache.
    """
    # Time stamps are part of the cache key, so that an edited file is read again.
    stamps = [(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    with accelerator.main_process_first():
        try:
            given = {"paths": [str(Path(path).resolve()) for path in paths], "stamps": stamps}
            given["reading"] = dict(reading or {})
            return Dataset.from_generator(_read_rows, gen_kwargs=given, features=Features(TREE_FEATURES))
        except DatasetGenerationError as error:
            # Report the error in the trees, not the call stack of the library.
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise


def _read_rows(paths: list[str], stamps: list, reading: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for sentence in read_treebank(path, **reading):
            yield {
                "words": sentence.words,
                "tags": sentence.tags,
                "labels": [label for label, _, _ in sentence.labeled_spans],
                "spans": [span[1:] for span in sentence.labeled_spans],
                "source": sentence.source,
                "joined": sentence.joined,
            }


def row_to_sentence(row: dict[str, Any]) -> TreebankSentence:
    """The sentence of the `row` of a table of `load_trees`."""
    spans = tuple((label, i, j) for label, (i, j) in zip(row["labels"], row["spans"], strict=True))
    joined = None if row["joined"] is None else tuple(row["joined"])
    return TreebankSentence(tuple(row["words"]), tuple(row["tags"]), spans, row["source"], joined)


def collect_labels(*treebanks: Dataset, system: str = "top_down") -> list[str]:
    """Sorted labels of all `treebanks`: of held-out trees, too, so that every tree has a probability."""
    if system == "binary":
        return list(label_inventory((row_to_sentence(row) for trees in treebanks for row in trees), system))
    return sorted({label for trees in treebanks for label in pc.list_flatten(_column(trees, "labels")).to_pylist()})


def _column(table: Dataset, name: str) -> Any:
    """A column as an arrow array, without reading the others."""
    return table.select_columns(name).with_format("arrow")[:][name]


# ---------------------------------------------------------------------------------------------- encoded trees
class TreeDataset(torch.utils.data.Dataset):
    """Encoded sentences; an item holds `input_ids`, `actions` and `word_ends`, lists of one sentence."""

    def __init__(self, table: Dataset):
        self.table = table
        self._codes = table.select_columns(list(CODE_FEATURES))

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, list]:
        """One sentence."""
        return self._codes[index]

    def __getitems__(self, indices: list[int]) -> list[dict[str, list]]:
        """Several sentences at once, which the loader asks for where it can."""
        return self._codes.__getitems__(indices)

    def sentence(self, index: int) -> TreebankSentence:
        """The gold tree of one sentence."""
        return row_to_sentence(self.table[index])

    def lengths(self, column: str) -> np.ndarray:
        """Lengths of all lists of a column, such as "actions"."""
        return np.asarray(pc.list_value_length(_column(self.table, column)))

    @cached_property
    def punctuation_by(self) -> Punctuation:
        """How punctuation is recognized: by tag where the tags are the Penn Treebank's, otherwise by form."""
        counts = pc.value_counts(pc.list_flatten(_column(self.table, "tags"))).to_pylist()
        return "tag" if has_penn_tags({item["values"]: item["counts"] for item in counts}) else "form"

    def describe(self) -> str:
        """One line about the size."""
        tokens, actions = (int(self.lengths(name).sum()) for name in ("input_ids", "actions"))
        return f"{plural(len(self), 'sentence')}, {tokens:,} tokens, {actions:,} actions"

    def fingerprint(self) -> str:
        """Hash of the sizes and of sentences spread over the data set."""
        digest = hashlib.sha256(self.describe().encode())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), 1024), dtype=int):
            item = self[int(index)]
            for name in ("input_ids", "actions"):
                digest.update(np.asarray(item[name], dtype=np.int64).tobytes())
        return digest.hexdigest()[:16]


def encode_treebanks(
    accelerator: Accelerator,
    data: TreeDataArguments,
    treebanks: Sequence[Dataset],
    tokenizer: PreTrainedTokenizerBase,
    codec: LabeledCodec,
    text_style: str | None = None,
) -> Splits:
    """Encode the words of training, validation and perhaps test trees, and write the trees as actions.

    The main process encodes first, the others use its cache. A tree that has a label which the codec lacks is refused.
    Sentences beyond `max_sentence_tokens` are left out of training.
    """
    limit, parts = data.max_sentence_tokens, list[TreeDataset]()
    for trees in treebanks:
        with accelerator.main_process_first():
            table = trees.map(
                _encode_batch,
                batched=True,
                features=Features({**TREE_FEATURES, **CODE_FEATURES}),
                num_proc=data.preprocessing_num_workers,
                fn_kwargs={"tokenizer": tokenizer, "codec": codec, "text_style": text_style},
                desc="encoding trees",
            )
            if not parts:
                table = table.filter(
                    lambda ids: len(ids) <= limit, input_columns="input_ids", desc="dropping long sentences"
                )
        if not len(table):
            raise ValueError(f"All training sentences are longer than --max-sentence-tokens {limit}. Raise this limit.")
        parts.append(TreeDataset(table))
    return Splits(*parts)


def _encode_batch(
    columns: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    codec: LabeledCodec,
    text_style: str | None,
) -> dict[str, list]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    codes = encode_trees([row_to_sentence(row) for row in rows], tokenizer, codec, text_style)
    return {name: [code[name] for code in codes] for name in CODE_FEATURES}


# ---------------------------------------------------------------------------------------------- batches
@dataclass
class WordCollator:
    """Encoded sentences -> a right-padded batch for a model of words alone, with the begin token if there is one."""

    pad_token_id: int
    begin_token_id: int | None = None

    def __call__(self, rows: Sequence[dict[str, list]]) -> dict[str, Any]:
        """Collate rows: the arguments of `forward`, and the number of words, `num_words`."""
        begin = [] if self.begin_token_id is None else [self.begin_token_id]
        labels = pad_rows(([LABEL_PADDING] * len(begin) + row["input_ids"] for row in rows), LABEL_PADDING)
        inputs = pad_inputs((begin + row["input_ids"] for row in rows), self.pad_token_id)
        return {**inputs, "labels": labels, "num_words": count_words(rows)}


@dataclass
class TreeCollator:
    """Encoded sentences -> a right-padded batch with trees.

    `codec` is that of the model, `source` that of the rows. `config` is that of an RNNG: the plan of its derivations is
    made here, in the workers of the loader.
    """

    pad_token_id: int
    codec: TreeCodec
    source: LabeledCodec
    config: RNNGConfig | None = None

    def __call__(self, rows: Sequence[dict[str, list]]) -> dict[str, Any]:
        """Collate rows: the arguments of `forward`, and the number of words, `num_words`."""
        num_words = count_words(rows)
        if self.codec != self.source:
            trees = map(self.source.decode, rows)
            rows = [
                self.codec.encode(row["input_ids"], row["word_ends"], tree)
                for row, tree in zip(rows, trees, strict=True)
            ]
        batch = {**self.codec.pad(rows, self.pad_token_id), "num_words": num_words}
        if self.config is not None:
            batch["plan"] = make_plan(
                [row["actions"] for row in rows],
                transition_system=self.config.transition_system,
                num_labels=len(self.config.nonterminals or ()),
                num_words=[len(row["input_ids"]) for row in rows],
                word_ends=[row["word_ends"] for row in rows],
                by_level=self.config.composition == "lstm",
            )
        return batch


def count_words(rows: Sequence[dict[str, list]]) -> Tensor:
    """Number of words of encoded sentences."""
    return torch.tensor(sum(sum(row["word_ends"]) for row in rows))
