"""Raw text -> sentences -> token ids -> contexts on disk, with `datasets` as the memory-mapped store.

Documents are rows with a list of sentences; contexts are rows with token ids and sentence lengths. Both are written
once to the cache of `datasets` and shared by all processes and runs, so a corpus never has to fit into memory.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from common import save_tokenizer_once
from datasets import Dataset, Features, List, Value, load_dataset
from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import pack_contexts, word_ends_from_word_ids
from hf_synlm.data.samples import sample_path
from hf_synlm.data.text import documents_to_sentences, lines_to_documents, read_documents
from hf_synlm.data.tokenizers import load_tokenizer, train_bpe_tokenizer, train_wordpiece_tokenizer
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.parsing import keep_by_tag

# What the tokenizer of a run depends on.
TOKENIZER_OPTIONS = (
    "tokenizer_type",
    "tokenizer_vocab_size",
    "tokenizer_min_frequency",
    "context_length",
    "dataset_name",
    "dataset_config_name",
    "train_split",
    "train_files",
    "train_trees",
    "drop_punctuation",
)
# Marks at the edge of a word; inside a word (don't, 3.5, well-known) they stay.
_EDGE_PUNCTUATION = re.compile(r"(?<!\w)[^\w\s]+|[^\w\s]+(?!\w)")
_TABULAR = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


@dataclass
class DataArguments:
    """Where text comes from and how it becomes contexts."""

    dataset_name: str | None = field(
        default=None, metadata={"help": "Data set of the Hub, or a folder; without it and files: the embedded corpus."}
    )
    dataset_config_name: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    train_split: str = field(default="train", metadata={"help": "Split to train on."})
    validation_split: str | None = field(
        default="validation", metadata={"help": "Split to validate on; 'none' takes documents off the training split."}
    )
    num_validation_documents: int = field(
        default=1000, metadata={"help": "Documents to take off the training text where there is no validation text."}
    )
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Text files (documents between blank lines), or parquet, json, csv."}
    )
    validation_files: list[str] = field(default_factory=list, metadata={"help": "The same for validation."})
    train_trees: list[str] = field(
        default_factory=list,
        metadata={"help": "Treebank files whose words are added as training sentences; their trees are not used."},
    )
    text_column: str = field(default="text", metadata={"help": "Column of the text in data sets and tabular files."})
    rows: str = field(
        default="documents", metadata={"help": "What a row of a data set is: 'documents' or 'lines' (WikiText)."}
    )
    streaming: bool = field(default=False, metadata={"help": "Not supported: exact resume needs a fixed corpus."})
    one_sentence_per_line: bool = field(default=False, metadata={"help": "Lines are sentences; do not split them."})
    language: str = field(default="en", metadata={"help": "Language of the sentence splitting (ISO 639)."})
    drop_punctuation: bool = field(
        default=False, metadata={"help": "Remove punctuation at word edges, as in grammar induction (Kim et al. 2019)."}
    )
    max_sentence_tokens: int | None = field(default=None, metadata={"help": "Leave longer sentences out."})
    keep_words_together: bool = field(
        default=False, metadata={"help": "Do not let constituents split words in training (the authors do not)."}
    )
    context_length: int = field(default=1024, metadata={"help": "Largest number of tokens of a context."})
    tokenizer_name: str | None = field(
        default=None, metadata={"help": "Folder or Hub name of a tokenizer; without it one is trained on the text."}
    )
    tokenizer_type: str = field(default="bpe", metadata={"help": "Tokenizer to train: 'bpe' or 'wordpiece'."})
    tokenizer_vocab_size: int = field(default=8192, metadata={"help": "Vocabulary of the tokenizer to train."})
    tokenizer_min_frequency: int = field(default=2, metadata={"help": "Pieces that are rarer are not made."})
    preprocessing_num_workers: int | None = field(default=None, metadata={"help": "Processes that encode text."})

    def __post_init__(self):
        """Check the values and name the files of the embedded corpus."""
        if self.streaming:
            raise ValueError("streaming is not supported: exact resume needs a fixed corpus. Leave --streaming out.")
        if self.rows not in ("documents", "lines"):
            raise ValueError(f"rows is {self.rows!r}. Choose 'documents' or 'lines'.")
        if self.tokenizer_type not in ("bpe", "wordpiece"):
            raise ValueError(f"tokenizer_type is {self.tokenizer_type!r}. Choose 'bpe' or 'wordpiece'.")
        if self.dataset_name is not None and self.train_files:
            raise ValueError("dataset_name and train_files are both given. Choose one source of text.")
        for name in ("context_length", "num_validation_documents", "tokenizer_min_frequency"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 and is {getattr(self, name)}.")
        if self.dataset_name is None and not self.train_files:
            self.train_files = [str(sample_path("raw.train.txt"))]
            self.validation_files = self.validation_files or [str(sample_path("raw.valid.txt"))]
            self.one_sentence_per_line = True
        self.train_trees = [str(sample_path("trees.train.txt")) if x == "embedded" else x for x in self.train_trees]
        for path in (*self.train_files, *self.validation_files, *self.train_trees):
            if not Path(path).is_file():
                raise ValueError(f"There is no file {path!r}.")
        if self.validation_split == "none":
            self.validation_split = None

    def describe(self) -> str:
        """One sentence for the model card."""
        sources = [self.dataset_name] if self.dataset_name else [Path(path).name for path in self.train_files]
        trees = [f"the words of {Path(path).name}" for path in self.train_trees]
        return f"{', '.join([*sources, *trees])}; no trees."


# ---------------------------------------------------------------------------------------------- documents
def training_text(accelerator: Accelerator, data: DataArguments) -> tuple[Dataset, Dataset]:
    """Training and validation documents.

    Args:
        accelerator: the main process reads first, the others find its cache.
        data: arguments.

    Returns:
        Two data sets with the column `sentences`.

    Raises:
        ValueError: when a source holds no text, or too little to take validation documents off.
    """
    with accelerator.main_process_first():
        train = _source(data, data.train_files, data.train_split)
        if data.validation_files or (data.dataset_name and data.validation_split):
            validation = _source(data, data.validation_files, data.validation_split)
        else:
            count = data.num_validation_documents
            if len(train) <= count:
                raise ValueError(
                    f"There are {len(train)} documents, too few to take {count} off for validation. Pass "
                    "--validation_files, or a smaller --num_validation_documents."
                )
            validation = train.select(range(len(train) - count, len(train)))
            train = train.select(range(len(train) - count))
        if data.train_trees:
            train = _concatenate(train, _from_generator(_treebank_words, data.train_trees, data.drop_punctuation))
    return train, validation


def _concatenate(*parts: Dataset) -> Dataset:
    from datasets import concatenate_datasets

    return concatenate_datasets(list(parts))


def _source(data: DataArguments, files: Sequence[str], split: str | None) -> Dataset:
    """Documents of text files, of tabular files, or of a split of a data set."""
    options = (data.one_sentence_per_line, data.language, data.drop_punctuation)
    if files and not any(Path(path).suffix in _TABULAR for path in files):
        return _from_generator(_text_files, files, *options)
    if files:
        kinds = {_TABULAR.get(Path(path).suffix) for path in files}
        if len(kinds) > 1:
            raise ValueError(f"{list(files)} mix formats. Pass text files, or tabular files of one format.")
        table = load_dataset(kinds.pop(), data_files=list(files), split="train")
    else:
        table = load_dataset(data.dataset_name, data.dataset_config_name, split=split)
    if data.text_column not in table.column_names:
        raise ValueError(f"There is no column {data.text_column!r}. Set --text_column to one of {table.column_names}.")
    return table.map(
        _split_rows,
        batched=True,
        remove_columns=table.column_names,
        num_proc=data.preprocessing_num_workers,
        fn_kwargs={"column": data.text_column, "rows": data.rows, "options": options},
        desc="splitting sentences",
    )


def _from_generator(generate: Any, paths: Sequence[str], *options: Any) -> Dataset:
    # Time stamps are part of the cache key, so that an edited file is read again.
    stamps = [(os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    dataset = Dataset.from_generator(
        generate,
        gen_kwargs={"paths": [str(Path(path).resolve()) for path in paths], "stamps": stamps, "options": options},
        features=Features({"sentences": List(Value("string"))}),
    )
    return dataset


def _text_files(paths: list[str], stamps: list, options: tuple) -> Iterator[dict[str, list[str]]]:
    one_sentence_per_line, language, drop = options
    for document in read_documents(paths, one_sentence_per_line=one_sentence_per_line, language=language):
        yield {"sentences": _clean(document, drop)}


def _treebank_words(paths: list[str], stamps: list, options: tuple) -> Iterator[dict[str, list[str]]]:
    (drop,) = options
    for path in paths:
        sentences = []
        for sentence in read_treebank(path):
            kept = keep_by_tag(sentence.tags) if drop else [True] * len(sentence.tags)
            words = [word for word, keep in zip(sentence.words, kept, strict=True) if keep]
            if words:
                sentences.append(" ".join(words))
        yield {"sentences": sentences}


def _split_rows(batch: dict[str, list], column: str, rows: str, options: tuple) -> dict[str, list]:
    one_sentence_per_line, language, drop = options
    texts = [text.split("\n") for text in batch[column] if text is not None]
    if rows == "lines":
        documents = lines_to_documents(line for lines in texts for line in lines)
    else:
        documents = (
            [line.strip() for line in lines if line.strip()] for lines in texts if any(line.strip() for line in lines)
        )
    split = documents_to_sentences(documents, one_sentence_per_line=one_sentence_per_line, language=language)
    return {"sentences": [_clean(sentences, drop) for sentences in split]}


def _clean(sentences: Sequence[str], drop_punctuation: bool) -> list[str]:
    if not drop_punctuation:
        return list(sentences)
    cleaned = (" ".join(_EDGE_PUNCTUATION.sub(" ", sentence).split()) for sentence in sentences)
    return [sentence for sentence in cleaned if sentence]


# ---------------------------------------------------------------------------------------------- tokenizer
def make_tokenizer(
    accelerator: Accelerator, data: DataArguments, documents: Dataset, name: str | None, output_dir: Path
) -> PreTrainedTokenizerBase:
    """Load the tokenizer, or train one on the text and keep it in `output_dir/tokenizer`.

    A resumed run finds the tokenizer of the first part there.

    Args:
        accelerator: the main process trains, the others load.
        data: arguments.
        documents: training documents.
        name: folder or Hub name, or `None` to train one.
        output_dir: of the run.

    Returns:
        A stock fast tokenizer with the special tokens of GPST.
    """
    if name is not None:
        return load_tokenizer(name)
    folder = output_dir / "tokenizer"
    train = train_bpe_tokenizer if data.tokenizer_type == "bpe" else train_wordpiece_tokenizer
    save_tokenizer_once(
        accelerator,
        folder,
        lambda: train(
            (sentence for row in documents for sentence in row["sentences"]),
            data.tokenizer_vocab_size,
            min_frequency=data.tokenizer_min_frequency,
            model_max_length=data.context_length,
        ),
        {name: getattr(data, name) for name in TOKENIZER_OPTIONS},
    )
    return load_tokenizer(folder)


# ---------------------------------------------------------------------------------------------- contexts
class ContextDataset(torch.utils.data.Dataset):
    """Contexts of whole sentences, memory-mapped.

    An item holds `input_ids` and `sentence_ids` (1, 2, ... inside the context), and `word_ends` if they were stored.
    """

    def __init__(self, table: Dataset):
        self.table = table.with_format("numpy")

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One context."""
        row = self.table[index]
        lengths = row["sentence_lengths"]
        item = {"input_ids": row["input_ids"], "sentence_ids": np.repeat(np.arange(1, len(lengths) + 1), lengths)}
        if "word_ends" in row:
            item["word_ends"] = row["word_ends"]
        return item

    def totals(self) -> dict[str, int]:
        """Numbers of contexts, tokens and sentences; of sentences that were cut, and left out for their length."""
        columns = self.table.data
        return {
            "contexts": len(self),
            "tokens": pc.sum(pc.list_value_length(columns.column("input_ids"))).as_py() or 0,
            "sentences": pc.sum(pc.list_value_length(columns.column("sentence_lengths"))).as_py() or 0,
            "cut": pc.sum(columns.column("num_cut")).as_py() or 0,
            "left_out": pc.sum(columns.column("num_left_out")).as_py() or 0,
        }

    def describe(self) -> str:
        """One line about the size."""
        n = self.totals()
        return (
            f"{n['contexts']:,} contexts, {n['sentences']:,} sentences, {n['tokens']:,} tokens "
            f"({n['cut']:,} sentences cut at the context length, {n['left_out']:,} left out as too long)"
        )

    def fingerprint(self) -> str:
        """Hash of the sizes and of contexts spread over the data set."""
        digest = hashlib.sha256(repr(self.totals()).encode())
        for index in np.linspace(0, len(self) - 1, num=min(len(self), 256), dtype=int):
            digest.update(np.asarray(self[int(index)]["input_ids"], dtype=np.int64).tobytes())
        return digest.hexdigest()[:16]


def load_contexts(
    accelerator: Accelerator,
    data: DataArguments,
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    end_of_document_id: int | None,
) -> ContextDataset:
    """Encode documents and pack them into contexts.

    Args:
        accelerator: the main process encodes first, the others find its cache.
        data: arguments.
        documents: with the column `sentences`.
        tokenizer: for encoding.
        end_of_document_id: id that follows every document as a sentence of its own, or `None`.

    Returns:
        The contexts.

    Raises:
        ValueError: when nothing is left.
    """
    features = {
        "input_ids": List(Value("int32")),
        "sentence_lengths": List(Value("int32")),
        "num_cut": Value("int32"),
        "num_left_out": Value("int32"),
    }
    if data.keep_words_together:
        features["word_ends"] = List(Value("bool"))
    with accelerator.main_process_first():
        table = documents.map(
            _pack_documents,
            batched=True,
            remove_columns=documents.column_names,
            features=Features(features),
            num_proc=data.preprocessing_num_workers,
            fn_kwargs={
                "tokenizer": tokenizer,
                "context_length": data.context_length,
                "end_id": end_of_document_id,
                "max_tokens": data.max_sentence_tokens,
                "with_words": data.keep_words_together,
            },
            desc="packing contexts",
        )
    if not len(table):
        raise ValueError("No context is left. Check the text, the sentence splitting and max_sentence_tokens.")
    return ContextDataset(table)


def _pack_documents(
    batch: dict[str, list],
    tokenizer: PreTrainedTokenizerBase,
    context_length: int,
    end_id: int | None,
    max_tokens: int | None,
    with_words: bool,
) -> dict[str, list]:
    """Encode and pack some documents; the context after the last of them stays short."""
    documents, word_ends, num_left_out = [], [], 0
    for sentences in batch["sentences"]:
        encoding = tokenizer(sentences, add_special_tokens=False, verbose=False) if sentences else {"input_ids": []}
        kept = []
        for index, ids in enumerate(encoding["input_ids"]):
            too_long = max_tokens is not None and len(ids) > max_tokens
            num_left_out += too_long
            if ids and not too_long:
                kept.append(ids)
                if with_words:
                    word_ends += word_ends_from_word_ids(encoding.word_ids(index))
        documents.append(kept)
        if end_id is not None:
            word_ends.append(True)
    packed = pack_contexts(documents, context_length, end_of_document_id=end_id)
    table: dict[str, list] = {"input_ids": [], "sentence_lengths": [], "num_cut": [], "num_left_out": []}
    if with_words:
        table["word_ends"] = []
    first = 0
    for ids, sentence_ids in zip(packed.input_ids, packed.sentence_ids, strict=True):
        lengths = [len(list(group)) for _, group in groupby(sentence_ids)]
        ends = word_ends[first : first + len(ids)]
        first += len(ids)
        # The end of a document that opens a context ends nothing there (and would be read as the begin token).
        skip = 0
        while skip < len(ids) and ids[skip] == end_id:
            skip += 1
        if skip == len(ids):
            continue
        table["input_ids"].append(ids[skip:])
        table["sentence_lengths"].append(lengths[skip:])
        table["num_cut"].append(0)
        table["num_left_out"].append(0)
        if with_words:
            table["word_ends"].append(ends[skip:])
    if table["num_cut"]:
        table["num_cut"][0], table["num_left_out"][0] = packed.num_cut_sentences, num_left_out
    return table
