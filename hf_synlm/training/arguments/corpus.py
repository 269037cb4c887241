# SPDX-License-Identifier: Apache-2.0
"""Arguments about a corpus of text: its files or data set, its tokenizer, and the folder of prepared text."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from functools import cached_property
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, Literal

from hf_synlm.data.arguments import option
from hf_synlm.data.encoding import TextOptions, block_sentences
from hf_synlm.data.samples import EMBEDDED, sample_path
from hf_synlm.data.shards import INDEX_FILE
from hf_synlm.data.sources import (
    CSVFiles,
    HubSource,
    JSONFiles,
    ParquetFiles,
    Part,
    TextFiles,
    TextSource,
    TreebankFiles,
    TSVFiles,
    clean_lines,
    is_saved_split,
)
from hf_synlm.data.text import PathLike, file_ending
from hf_synlm.training.arguments.sentences import resolve_files

_TABLES = {".parquet": ParquetFiles, ".pq": ParquetFiles, ".csv": CSVFiles, ".tsv": TSVFiles}
_TABLES |= dict.fromkeys((".json", ".jsonl", ".ndjson"), JSONFiles)
SPLITS = ("train", "validation")
MOST_HELD_OUT = 1000


def is_prepared(folder: PathLike) -> bool:
    """Whether `folder` contains complete training and validation text."""
    return all((Path(folder) / name / INDEX_FILE).is_file() for name in SPLITS)


@dataclass
class CorpusArguments:
    """Where text comes from and how it becomes token ids."""

    dataset_name: str | None = option(
        None, "Data set of the Hub, or a folder. If you name neither data set nor files, the embedded corpus is read."
    )
    dataset_config_name: str | None = option(None, "Configuration of the data set.")
    train_split: str = option("train", "Split to train on.")
    validation_split: str | None = option(
        "validation", "Split for validation. 'none' takes documents from the training split."
    )
    num_validation_documents: int | None = option(
        None,
        "If there is no validation text, take this many documents from the beginning of the training text. By "
        "default, the first tenth of the sentences is taken, at most 1,000.",
        minimum=1,
    )
    train_files: list[str] = option(
        [], "Text files (blank lines separate documents), or tables (parquet, json, csv, tsv), or 'embedded'."
    )
    validation_files: list[str] = option([], "Files for validation, in the same formats.")
    train_trees: list[str] = option(
        [], "Treebank files, or 'embedded'. Their words are training sentences. Their trees are not used."
    )
    validation_words: list[str] = option([], "Treebank files whose words are validation sentences.")
    text_column: str = option("text", "Column of the text in data sets and tables.")
    rows: Literal["documents", "lines"] = option("documents", "What each row of a data set holds (WikiText: lines).")
    streaming: bool = option(False, "Do not store the data set: read it over the network. The result is the same.")
    one_sentence_per_line: bool = option(False, "Lines are sentences, so do not split lines.")
    language: str = option("en", "Language for sentence splitting (ISO 639).")
    drop_punctuation: bool = option(
        False, "Remove punctuation at word edges, as in grammar induction (Kim et al. 2019)."
    )
    tokenizer_name: str | None = option(
        None, "Folder or Hub name of a tokenizer. By default, a tokenizer is trained on the text."
    )
    tokenizer_type: Literal["bpe", "wordpiece"] = option("bpe", "Tokenizer to train.")
    tokenizer_vocab_size: int = option(8192, "Vocabulary size of the tokenizer to train.")
    tokenizer_min_frequency: int = option(2, "The tokenizer to train gets no pieces rarer than this.", minimum=1)
    preprocessing_num_workers: int = option(1, "Number of processes that encode text.", minimum=1)

    def __post_init__(self):
        """Check the values and name the files of the embedded corpus."""
        if is_saved_split(self.dataset_name) and self.train_split != "train":
            raise ValueError(
                f"--train-split is {self.train_split!r}, but {self.dataset_name!r} has one split. Omit --train-split."
            )
        if self.dataset_name is not None and self.train_files:
            raise ValueError("--dataset-name and --train-files are both given. Choose one source of text.")
        if self.validation_split == "none" or is_saved_split(self.dataset_name):
            self.validation_split = None
        if not self.names_text and not self.takes_finished:
            self.train_files, self.train_trees = [EMBEDDED], [EMBEDDED]
        if self.dataset_name is None and {*self.train_files, *self.train_trees} == {EMBEDDED}:
            self.validation_files = self.validation_files or [EMBEDDED]
            self.one_sentence_per_line = True
        resolve_files(self, train_files="raw.train.txt", validation_files="raw.valid.txt")
        resolve_files(self, train_trees="trees.train.txt", validation_words="trees.valid.txt")

    @property
    def location(self) -> str | None:
        """Folder of prepared text."""
        return None

    @property
    def takes_finished(self) -> bool:
        """Whether no text is named and the folder of prepared text is complete, so that it is used as it is."""
        return not self.names_text and self.location is not None and is_prepared(self.location)

    @property
    def names_text(self) -> bool:
        """Whether a file or data set is named."""
        return bool(self.dataset_name or self.train_files or self.train_trees or self.has_validation_files)

    @property
    def has_validation_files(self) -> bool:
        """Whether files for validation are named."""
        return bool(self.validation_files or self.validation_words)

    @property
    def only_trees(self) -> bool:
        """Whether all training text is that of treebanks."""
        return bool(self.train_trees) and not self.train_files and self.dataset_name is None

    @property
    def is_embedded(self) -> bool:
        """Whether all training text is embedded."""
        embedded = {str(sample_path("raw.train.txt")), str(sample_path("trees.train.txt"))}
        files = {*self.train_files, *self.train_trees}
        return self.dataset_name is None and bool(files) and files <= embedded

    @property
    def text_options(self) -> TextOptions:
        """How lines become sentences."""
        return TextOptions(self.one_sentence_per_line, self.language, self.drop_punctuation)

    def sources(self, split: str) -> tuple[list[TextSource], dict[str, Any]]:
        """The sources of a split, and `skip_documents` or `max_documents` of `read_blocks`, if it is a part of them."""
        if self.dataset_name is None and not self.train_files and not self.train_trees:
            raise ValueError("No training text is named. Pass --train-files, --train-trees or --dataset-name.")
        has_validation = self.has_validation_files or bool(self.dataset_name and self.validation_split)
        if split == "validation" and has_validation:
            split_name = None if self.has_validation_files else self.validation_split
            return self._sources(self.validation_files, self.validation_words, split_name), {}
        if self.only_trees and not has_validation:
            raise ValueError(
                "No validation text is named. Pass --validation-words TREEBANK or --validation-files TEXT."
            )
        trees = self.train_trees if split == "train" else []
        if not has_validation and self.num_validation_documents is None:
            text = self._sources(self.train_files, [], self.train_split)
            part = Part(text, self.num_held_out, split == "train", self.split_line)
            return [part, *self._sources([], trees, None)], {}
        train = self._sources(self.train_files, trees, self.train_split)
        limit = "skip_documents" if split == "train" else "max_documents"
        return train, {} if has_validation else {limit: self.num_validation_documents}

    def split_line(self, line: str) -> list[str]:
        """The sentences of a line."""
        options = TextOptions(self.one_sentence_per_line, self.language)
        return block_sentences(f"{line}\n", False, options) if line else []

    @cached_property
    def num_held_out(self) -> int:
        """Sentences of the training text for validation: a tenth, at most MOST_HELD_OUT."""
        text = self._sources(self.train_files, [], self.train_split)
        lines = clean_lines(text, Counter())
        count = sum(1 for _ in islice(chain.from_iterable(map(self.split_line, lines)), 10 * MOST_HELD_OUT))
        if count < 2:
            names = ", ".join(self.train_files) or self.dataset_name
            raise ValueError(
                f"{names}: the text has {count or 'no'} sentence{'s' * (not count)}, but training and validation "
                "need at least one each. Name a longer text, or --validation-files."
            )
        return max(1, count // 10)

    def _sources(self, files: Sequence[str], trees: Sequence[str], split: str | None) -> list[TextSource]:
        """Files, or a split of the data set; and words of treebanks."""
        is_document = self.rows == "documents"
        found: list[TextSource] = []
        if self.dataset_name is not None and split is not None and not files:
            names = (self.dataset_name, self.dataset_config_name, split, self.text_column)
            found.append(HubSource(*names, is_document, self.streaming))
        for kind, group in groupby(files, key=lambda path: _TABLES.get(file_ending(path))):
            paths = list(group)
            found.append(TextFiles(paths) if kind is None else kind(paths, self.text_column, is_document))
        return [*found, TreebankFiles(trees, self.drop_punctuation)] if trees else found


@dataclass(kw_only=True)
class PrepareArguments(CorpusArguments):
    """Arguments of the command."""

    output_dir: str = option(MISSING, "Folder for tokenizer and shards.")
    verify: bool = option(False, "Check the checksums of all shards at the end, not only their sizes.")

    @property
    def location(self) -> str | None:
        """The output folder."""
        return self.output_dir
