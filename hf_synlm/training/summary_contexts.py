"""Documents with summaries -> contexts: document, prompt, summary, end token."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.hf_argparser import HfArg

from hf_synlm.data.collate import LABEL_PADDING, collate_contexts
from hf_synlm.data.text import split_sentences
from hf_synlm.training.arguments import check_minimum
from hf_synlm.training.example_tables import (
    check_columns,
    check_texts,
    load_table,
    name_split,
)
from hf_synlm.training.finetuning import check_length, takes

# Columns of the published data sets, tried in this order where none are named.
TEXT_COLUMNS = ("document", "article", "text")
SUMMARY_COLUMNS = ("summary", "highlights")


@dataclass
class SummaryArguments:
    """Documents and summaries, and how they become contexts."""

    dataset_name: str | None = HfArg(default=None, help="Data set of the Hub, or a folder.")
    dataset_config_name: str | None = HfArg(default=None, help="Its configuration, such as 3.0.0.")
    train_file: str | None = HfArg(default=None, help="json(l), csv or parquet file, instead of it.")
    validation_file: str | None = HfArg(default=None, help="The same for validation.")
    test_file: str | None = HfArg(default=None, help="The same for the final summaries; default: the validation file.")
    text_column: str | None = HfArg(
        default=None, help=f"Column of the documents; default: one of {', '.join(TEXT_COLUMNS)}."
    )
    summary_column: str | None = HfArg(
        default=None,
        help="Column of the summaries (a text, or a list of references); default: one of "
        f"{', '.join(SUMMARY_COLUMNS)}.",
    )
    max_source_length: int = HfArg(default=900, help="Documents are cut to this many tokens.")
    max_target_length: int = HfArg(default=100, help="Summaries are cut to this many tokens in training.")
    prompt: str = HfArg(default="Summary:", help="Text between document and summary.")
    end_token: bool = HfArg(default=True, help="End summaries with the end token, which then ends generation.")
    summary_loss_only: bool = HfArg(
        default=False,
        help="No token loss on document and prompt. (The authors train on all; GPST's other losses always do.)",
    )
    language: str = HfArg(default="en", help="Language of the sentence splitting (ISO 639).")
    max_train_samples: int | None = HfArg(default=None, help="Number of training rows to use; default: all.")
    max_eval_samples: int | None = HfArg(default=None, help="Number of validation rows to use; default: all.")
    max_predict_samples: int | None = HfArg(default=None, help="Number of test rows to use; default: all.")
    preprocessing_num_workers: int | None = HfArg(default=None, help="Processes that encode text.")

    def __post_init__(self):
        """Check the values."""
        if (self.dataset_name is None) == (self.train_file is None):
            raise ValueError("Pass either --dataset_name, or --train_file and --validation_file.")
        if self.train_file is not None and self.validation_file is None:
            raise ValueError("train_file needs a validation_file, by which the best model is chosen.")
        check_minimum(self, 1, "max_source_length max_target_length")
        check_minimum(self, 1, "max_train_samples max_eval_samples max_predict_samples")
        if not self.prompt.strip():
            raise ValueError("prompt is empty. The model needs a mark where the summary begins.")

    def file(self, part: str) -> str | None:
        """File of `train`, `validation` or `test`; `None`: the split of the data set."""
        if part == "test" and self.test_file is None and self.dataset_name is None:
            return self.validation_file
        return {"train": self.train_file, "validation": self.validation_file, "test": self.test_file}[part]

    def source(self, part: str) -> str:
        """File, or data set, configuration and split of `part`."""
        return self.file(part) or name_split(self.dataset_name, self.dataset_config_name, part)

    def describe(self) -> str:
        """One sentence for the model card."""
        return f"{self.dataset_name or Path(str(self.train_file)).name}, documents with summaries."


# ---------------------------------------------------------------------------------------------- examples
def read_tables(accelerator: Accelerator, data: SummaryArguments) -> dict[str, Dataset]:
    """Read documents and summaries, and check them.

    Args:
        accelerator: the main process reads first, the others find its cache.
        data: arguments.

    Returns:
        Tables `train`, `validation`, `test` with the columns `text` and `references` (a list).

    Raises:
        ValueError: for files, columns or rows that cannot be used.
    """
    limits = {
        "train": data.max_train_samples,
        "validation": data.max_eval_samples,
        "test": data.max_predict_samples,
    }
    tables: dict[str, Dataset] = {}
    with accelerator.main_process_first():
        for part, limit in limits.items():
            dataset = (data.dataset_name, data.dataset_config_name, part)
            table = load_table(data.file(part), dataset, limit)
            tables[part] = _select_columns(table, data, f"{part} data ({data.source(part)})")
    for part, table in tables.items():
        check_texts(table, "text", f"{part} data ({data.source(part)})")
    return tables


def _select_columns(table: Dataset, data: SummaryArguments, source: str) -> Dataset:
    """The two columns of a table under fixed names."""
    wanted = {
        "text_column": (data.text_column, TEXT_COLUMNS),
        "summary_column": (data.summary_column, SUMMARY_COLUMNS),
    }
    names = {}
    for flag, (given, usual) in wanted.items():
        name = given or next((name for name in usual if name in table.column_names), None)
        if name is None:
            raise ValueError(f"{source}: set --{flag} to one of its columns: {', '.join(table.column_names)}.")
        check_columns(table, [name], source)
        names[flag] = name
    return table.map(
        _rename_batch,
        batched=True,
        remove_columns=table.column_names,
        fn_kwargs={**names, "source": source},
        with_indices=True,
    )


def _rename_batch(batch: dict, rows: list[int], text_column: str, summary_column: str, source: str) -> dict[str, list]:
    references = [value if isinstance(value, list) else [value] for value in batch[summary_column]]
    for row, several in zip(rows, references, strict=True):
        if not several or not all(isinstance(text, str) and text.strip() for text in several):
            raise ValueError(
                f"{source}: {summary_column} of row {row} (counted from 0) is {several}. Give texts, or remove the row."
            )
    return {"text": batch[text_column], "references": references}


@dataclass(frozen=True)
class ContextLayout:
    """How a document and its summary become a context.

    Fields:
        by_sentences: encode the document sentence by sentence (GPST); otherwise as running text.
        begin_ids: tokens that the tokenizer puts before every text, such as a begin token.
        end_id: token after the summary, or `None`.
        max_source, max_target: limits in tokens.
        prompt, language: see `SummaryArguments`.
    """

    by_sentences: bool
    begin_ids: tuple[int, ...]
    end_id: int | None
    max_source: int
    max_target: int
    prompt: str
    language: str

    def encode(self, batch: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
        """Encode texts and their first references.

        Args:
            batch: columns `text` and `references`.
            tokenizer: of the model.

        Returns:
            Columns `input_ids`, `sentence_lengths`, and `prompt_length`, that of document and prompt.
        """
        gap = "" if self.by_sentences else " "
        summaries = [gap + " ".join(references[0].split()) for references in batch["references"]]
        targets = _token_ids(tokenizer, summaries)
        (prompt,) = _token_ids(tokenizer, [gap + self.prompt])
        table: dict[str, list] = {"input_ids": [], "sentence_lengths": [], "prompt_length": []}
        for text, target in zip(batch["text"], targets, strict=True):
            source = self._cut(_token_ids(tokenizer, self.segments(text)))
            source = [[*self.begin_ids, *source[0]], *source[1:]] if source else [list(self.begin_ids)]
            segments = [*source, prompt, target[: self.max_target], [] if self.end_id is None else [self.end_id]]
            segments = [segment for segment in segments if segment]
            table["input_ids"].append([token for segment in segments for token in segment])
            table["sentence_lengths"].append([len(segment) for segment in segments])
            table["prompt_length"].append(sum(map(len, source)) + len(prompt))
        return table

    def segments(self, text: str) -> list[str]:
        """Parts of a document that are encoded one by one."""
        if not self.by_sentences:
            return [text.strip()]
        return [sentence for line in text.splitlines() for sentence in split_sentences(line, language=self.language)]

    def _cut(self, segments: Iterable[list[int]]) -> list[list[int]]:
        """The first `max_source` tokens; the last segment may be cut."""
        kept, room = [], self.max_source
        for segment in segments:
            if room and segment:
                kept.append(segment[:room])
                room -= len(kept[-1])
        return kept

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Largest number of tokens of a context."""
        (prompt,) = _token_ids(tokenizer, [self.prompt])
        return self.max_source + self.max_target + len(prompt) + len(self.begin_ids) + 2


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def make_layout(data: SummaryArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ContextLayout:
    """Choose the layout for a model.

    Args:
        data: arguments.
        model: the model.
        tokenizer: of the model.

    Returns:
        The layout.

    Raises:
        ValueError: the tokenizer has no end token, or the contexts do not fit the model.
    """
    if data.end_token and tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end token. Pass --end_token false; summaries then end at max_new_tokens."
        )
    (plain,) = _token_ids(tokenizer, ["a"])
    marked = tokenizer("a")["input_ids"]
    layout = ContextLayout(
        by_sentences=takes(model, "sentence_ids"),
        begin_ids=tuple(marked[: marked.index(plain[0])]) if plain[0] in marked else (),
        end_id=tokenizer.eos_token_id if data.end_token else None,
        max_source=data.max_source_length,
        max_target=data.max_target_length,
        prompt=data.prompt,
        language=data.language,
    )
    remedy = "Lower --max_source_length or --max_target_length."
    check_length(model.config, layout.longest(tokenizer), "A document with its summary", remedy)
    return layout


@dataclass
class ContextCollator:
    """Pads contexts on the right for the loss, prompts on the left for generation."""

    pad_token_id: int
    with_sentences: bool
    summary_loss_only: bool

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """A training batch."""
        contexts = [
            {"input_ids": row["input_ids"], "sentence_ids": _sentence_ids(row["sentence_lengths"])} for row in rows
        ]
        batch = collate_contexts(contexts, self.pad_token_id)
        if not self.with_sentences:
            batch.pop("sentence_ids")
        if self.summary_loss_only:
            for index, row in enumerate(rows):
                batch["labels"][index, : row["prompt_length"]] = LABEL_PADDING
        return batch

    def prompts(self, rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Arguments of `generate`: documents with the prompt."""
        ids, sentences = [], []
        for row in rows:
            length = int(row["prompt_length"])
            ids.append(torch.as_tensor(row["input_ids"][:length]))
            sentences.append(torch.as_tensor(_sentence_ids(row["sentence_lengths"])[:length]))
        batch = {
            "input_ids": _pad_left(ids, self.pad_token_id),
            "attention_mask": _pad_left([torch.ones_like(row) for row in ids], 0),
        }
        # GPST reads the prompt as complete sentences with their induced trees, as in training.
        return {**batch, "context_sentence_ids": _pad_left(sentences, 0)} if self.with_sentences else batch


def _pad_left(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")


def _sentence_ids(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)
