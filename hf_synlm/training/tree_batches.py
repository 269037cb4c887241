"""Treebanks -> vocabulary -> token ids and actions -> padded batches, with `datasets` as the memory-mapped store.

A row holds a sentence with its labeled tree, and, once encoded, its token ids and the actions of its derivation. Rows
are written once to the cache of `datasets` and shared by all processes and runs.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from datasets import Dataset, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_synlm.actions import TransitionSystem
from hf_synlm.configuration_rnng import RNNGConfig
from hf_synlm.data.collate import collate_trees
from hf_synlm.data.oracle import encode_trees
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.data.vocabulary import UNKNOWN_RULES, subword_tokenizer, word_tokenizer
from hf_synlm.evaluation.parsing import Punctuation, has_penn_tags
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.rnng_plan import make_plan
from hf_synlm.training.run import save_tokenizer_once, words_fingerprint

TOKENIZER_TYPES = ("words", "bpe", "unigram")
TREE_FEATURES = {
    "words": List(Value("string")),
    "tags": List(Value("string")),
    "labels": List(Value("string")),
    "spans": List(List(Value("int32"))),
    "source": Value("string"),
}
CODE_FEATURES = {
    "input_ids": List(Value("int32")),
    "actions": List(Value("int32")),
    "word_ends": List(Value("bool")),
}


@dataclass
class TreeDataArguments:
    """Where trees come from, how words become tokens, and how sentences become batches."""

    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Treebank files to train on; default: the embedded treebank."}
    )
    validation_files: list[str] = field(default_factory=list, metadata={"help": "Treebank files for validation."})
    test_files: list[str] = field(
        default_factory=list, metadata={"help": "Treebank files for the evaluation of the final model; may be none."}
    )
    split_leaves: bool = field(
        default=False,
        metadata={"help": "Read a leaf of several words, (NN New York), as so many words; otherwise it is an error."},
    )
    max_sentence_tokens: int = field(default=300, metadata={"help": "Leave longer sentences out of training."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a tokenizer; without it one is made from the trees."}
    )
    tokenizer_type: str = field(
        default="words", metadata={"help": "Tokenizer to make: 'words', or pieces of words by 'bpe' or 'unigram'."}
    )
    tokenizer_vocab_size: int = field(
        default=50000, metadata={"help": "Largest number of token ids, classes included."}
    )
    tokenizer_min_frequency: int = field(
        default=2, metadata={"help": "Words that are rarer are unknown words; 'bpe' makes no rarer pieces."}
    )
    unknown_words: str = field(
        default="berkeley",
        metadata={"help": "Tokens of unknown words: a 'single' one, or classes by form, 'berkeley' or 'berkeley2'."},
    )
    lowercase: bool = field(default=False, metadata={"help": "Lower-case all words."})
    replace_numbers: bool = field(default=False, metadata={"help": "Replace all numbers by one token."})
    max_batch_actions: int = field(
        default=26000,
        metadata={"help": "Largest padded size of a micro batch: sentences times actions of the longest derivation."},
    )
    batch_group_size: int = field(
        default=4096, metadata={"help": "Sentences with similar numbers of actions among which a batch is drawn."}
    )
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that encode trees."})

    def __post_init__(self):
        """Check the values and name the files of the embedded treebank."""
        if self.tokenizer_type not in TOKENIZER_TYPES:
            raise ValueError(f"tokenizer_type is {self.tokenizer_type!r}. Choose among {', '.join(TOKENIZER_TYPES)}.")
        if self.unknown_words not in UNKNOWN_RULES:
            raise ValueError(f"unknown_words is {self.unknown_words!r}. Choose among {', '.join(UNKNOWN_RULES)}.")
        if self.tokenizer_type != "words" and (self.lowercase or self.replace_numbers):
            raise ValueError(f"lowercase and replace_numbers go with words, not with {self.tokenizer_type!r}.")
        for name in ("max_sentence_tokens", "tokenizer_min_frequency", "max_batch_actions", "batch_group_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        if not self.train_files:
            self.train_files = [str(sample_path("trees.train.txt"))]
            self.validation_files = self.validation_files or [str(sample_path("trees.valid.txt"))]
            self.test_files = self.test_files or [str(sample_path("trees.test.txt"))]
        if not self.validation_files:
            raise ValueError("validation_files are not set. Pass treebank files that are not trained on.")
        for path in (*self.train_files, *self.validation_files, *self.test_files):
            if not Path(path).is_file():
                raise ValueError(f"There is no file {path!r}.")

    def describe(self) -> str:
        """One sentence for the model card."""
        return f"The trees of {', '.join(Path(path).name for path in self.train_files)}."


# ---------------------------------------------------------------------------------------------- trees
def load_trees(accelerator: Accelerator, paths: Sequence[str], split_leaves: bool = False) -> Dataset:
    """Read treebank files.

    Args:
        accelerator: the main process reads first, the others find its cache.
        paths: files of bracketed trees.
        split_leaves: see `read_treebank`.

    Returns:
        A data set with the columns of `TREE_FEATURES`.

    Raises:
        ValueError: for malformed trees; names file and line.
    """
    # Time stamps are part of the cache key, so that an edited file is read again.
    stamps = [(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    with accelerator.main_process_first():
        try:
            return Dataset.from_generator(
                _read_rows,
                gen_kwargs={
                    "paths": [str(Path(path).resolve()) for path in paths],
                    "stamps": stamps,
                    "split_leaves": split_leaves,
                },
                features=Features(TREE_FEATURES),
            )
        except DatasetGenerationError as error:
            # What is wrong with the trees, without the way it took through the library.
            if isinstance(error.__cause__, ValueError):
                raise error.__cause__ from None
            raise


def _read_rows(paths: list[str], stamps: list, split_leaves: bool) -> Iterator[dict[str, Any]]:
    for path in paths:
        for sentence in read_treebank(path, split_leaves=split_leaves):
            yield {
                "words": sentence.words,
                "tags": sentence.tags,
                "labels": [label for label, _, _ in sentence.labeled_spans],
                "spans": [span[1:] for span in sentence.labeled_spans],
                "source": sentence.source,
            }


def row_to_sentence(row: dict[str, Any]) -> TreebankSentence:
    """The sentence of a row of `load_trees`."""
    spans = tuple((label, i, j) for label, (i, j) in zip(row["labels"], row["spans"], strict=True))
    return TreebankSentence(tuple(row["words"]), tuple(row["tags"]), spans, row["source"])


def collect_labels(*treebanks: Dataset) -> list[str]:
    """Sorted labels of all constituents: those of held-out trees, too, so that every tree has a probability."""
    return sorted({label for trees in treebanks for label in pc.list_flatten(_column(trees, "labels")).to_pylist()})


def _column(table: Dataset, name: str) -> Any:
    """A column as an arrow array, without reading the others."""
    return table.select_columns(name).with_format("arrow")[:][name]


# ---------------------------------------------------------------------------------------------- tokenizer
def make_tree_tokenizer(
    accelerator: Accelerator, data: TreeDataArguments, trees: Dataset, name: str | None, output_dir: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or make one from the words of the trees and keep it in `output_dir/tokenizer`.

    A resumed run finds the tokenizer of the first part there.

    Args:
        accelerator: the main process makes it, the others load.
        data: arguments.
        trees: of `load_trees`.
        name: folder or Hub name, or `None` to make one.
        output_dir: of the run.

    Returns:
        A stock fast tokenizer.
    """
    folder = output_dir / "tokenizer" if name is None else name

    def make() -> PreTrainedTokenizerBase:
        sentences = (row["words"] for row in trees.select_columns("words"))
        if data.tokenizer_type == "words":
            return word_tokenizer(
                sentences,
                unknown=data.unknown_words,
                min_count=data.tokenizer_min_frequency,
                vocab_size=data.tokenizer_vocab_size,
                lowercase=data.lowercase,
                replace_numbers=data.replace_numbers,
            )
        return subword_tokenizer(
            sentences,
            data.tokenizer_vocab_size,
            model=data.tokenizer_type,
            min_frequency=data.tokenizer_min_frequency,
        )

    if name is None:
        names = ("tokenizer_type", "tokenizer_vocab_size", "tokenizer_min_frequency", "unknown_words", "lowercase")
        made_from = {name: getattr(data, name) for name in (*names, "replace_numbers", "split_leaves")}
        made_from["training_words"] = words_fingerprint(row["words"] for row in trees.select_columns("words"))
        save_tokenizer_once(accelerator, folder, make, made_from)
    check_tokenizer_source(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        raise ValueError(f"The tokenizer {name!r} has no padding token. Set its pad_token.")
    return tokenizer


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
        columns = self._codes[indices]
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def sentence(self, index: int) -> TreebankSentence:
        """The gold tree of one sentence."""
        return row_to_sentence(self.table[index])

    def lengths(self, column: str) -> np.ndarray:
        """Lengths of all lists of a column, such as "actions"."""
        return np.asarray(pc.list_value_length(_column(self.table, column)))

    @cached_property
    def punctuation_by(self) -> Punctuation:
        """What tells punctuation in these trees: their tags where they are the Penn Treebank's, else its form."""
        counts = pc.value_counts(pc.list_flatten(_column(self.table, "tags"))).to_pylist()
        return "tag" if has_penn_tags({item["values"]: item["counts"] for item in counts}) else "form"

    def describe(self) -> str:
        """One line about the size."""
        tokens, actions = (int(self.lengths(name).sum()) for name in ("input_ids", "actions"))
        return f"{len(self):,} sentences, {tokens:,} tokens, {actions:,} actions"

    def fingerprint(self) -> str:
        """Hash of the sizes and of sentences spread over the data set."""
        digest = hashlib.sha256(self.describe().encode())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), 1024), dtype=int):
            item = self[int(index)]
            for name in ("input_ids", "actions"):
                digest.update(np.asarray(item[name], dtype=np.int64).tobytes())
        return digest.hexdigest()[:16]


def encode_treebank(
    accelerator: Accelerator,
    trees: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    transition_system: str,
    labels: Sequence[str],
    num_workers: int | None = None,
    max_tokens: int | None = None,
) -> TreeDataset:
    """Encode the words and write the trees as actions.

    Args:
        accelerator: the main process encodes first, the others find its cache.
        trees: of `load_trees`.
        tokenizer: for the words.
        transition_system: "top_down" or "in_order".
        labels: of the nonterminals, in the order of their actions.
        num_workers: processes.
        max_tokens: leave longer sentences out.

    Returns:
        The encoded sentences.

    Raises:
        ValueError: when a tree has a label that is not among them (names file and line), or nothing is left.
    """
    with accelerator.main_process_first():
        table = trees.map(
            _encode_batch,
            batched=True,
            features=Features({**TREE_FEATURES, **CODE_FEATURES}),
            num_proc=num_workers,
            fn_kwargs={
                "tokenizer": tokenizer,
                "system": TransitionSystem(transition_system, len(labels)),
                "labels": tuple(labels),
            },
            desc="encoding trees",
        )
        if max_tokens is not None:
            table = table.filter(
                _is_short,
                input_columns="input_ids",
                fn_kwargs={"max_tokens": max_tokens},
                desc="dropping long sentences",
            )
    if not len(table):
        raise ValueError(f"No sentence is left. Check the files and max_sentence_tokens {max_tokens}.")
    return TreeDataset(table)


def _encode_batch(
    columns: dict[str, list], tokenizer: PreTrainedTokenizerBase, system: TransitionSystem, labels: tuple[str, ...]
) -> dict[str, list]:
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    codes = encode_trees([row_to_sentence(row) for row in rows], tokenizer, system, labels)
    return {name: [code[name] for code in codes] for name in CODE_FEATURES}


def _is_short(input_ids: list[int], max_tokens: int) -> bool:
    return len(input_ids) <= max_tokens


# ---------------------------------------------------------------------------------------------- batches
@dataclass
class TreeCollator:
    """Encoded sentences -> a right-padded batch for `forward`.

    Fields:
        pad_token_id: fills `input_ids`.
        config: of the RNNG, whose schedule of the derivations is made here, so that the workers of the loader do it;
            `None` leaves trees out and gives `labels`, for a model of words alone.
    """

    pad_token_id: int
    config: RNNGConfig | None = None

    def __call__(self, rows: Sequence[dict[str, list]]) -> dict[str, Any]:
        """Collate the rows of a batch; besides what `forward` takes, there is the number of words, `num_words`."""
        batch = collate_trees(rows, self.pad_token_id)
        num_words = batch["word_ends"].sum()
        if self.config is None:
            words = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
            return {**words, "num_words": num_words}
        del batch["labels"]  # all words count
        schedule = make_plan(
            [row["actions"] for row in rows],
            transition_system=self.config.transition_system,
            num_labels=len(self.config.nonterminals),
            num_words=[len(row["input_ids"]) for row in rows],
            word_ends=[row["word_ends"] for row in rows],
            by_level=self.config.composition == "lstm",
        )
        return {**batch, "schedule": schedule, "num_words": num_words}


def padded_batches(lengths: np.ndarray, max_size: int, max_padded_length: int) -> list[list[int]]:
    """All samples once, sorted by length, in batches within both bounds: for evaluation."""
    batches: list[list[int]] = [[]]
    for sample in np.argsort(lengths, kind="stable").tolist():
        size = len(batches[-1]) + 1
        if batches[-1] and (size > max_size or size * int(lengths[sample]) > max_padded_length):
            batches.append([])
        batches[-1].append(sample)
    return batches
