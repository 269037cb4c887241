# SPDX-License-Identifier: Apache-2.0
"""Fine-tune a causal language model to summarize: XSum, CNN/DailyMail, Gigaword, or any table of texts and summaries.

    accelerate launch training/finetune_summarization.py --config summarization_xsum \
        --model-name-or-path runs/gpst_small_owt/model --output-dir runs/xsum

A context consists of document, prompt, summary and end token. GPST gets a tree for every sentence of the document, one
for the prompt and one for the whole summary, as in the paper. Other models read the same as running text. The model's
`generate` writes the summaries, and ROUGE scores them. Paper: Hu et al., "Generative Pretrained Structured
Transformers" (ACL 2024), sections 4.2.1 and A.5.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import Dataset
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import LABEL_PADDING, collate_contexts
from hf_synlm.data.files import flag_of, write_text
from hf_synlm.data.text import plural, split_sentences
from hf_synlm.evaluation.suites.rouge import rouge_scores
from hf_synlm.training.arguments.finetuning import (
    SUMMARY_COLUMNS,
    TEXT_COLUMNS,
    DecodingArguments,
    SummaryArguments,
)
from hf_synlm.training.engine.run import Run, check_length
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import seed_micro_step
from hf_synlm.training.engine.steps import map_rows, to_device
from hf_synlm.training.tasks.example_tables import (
    ExampleDataset,
    check_columns,
    check_texts,
    describe_table,
    encode_table,
    load_table,
)
from hf_synlm.training.tasks.finetuning import FineTuning, takes
from hf_synlm.trees.codecs import pad_inputs


# ---------------------------------------------------------------------------------------------- examples
def read_tables(accelerator: Accelerator, data: SummaryArguments) -> dict[str, Dataset]:
    """Read and check the tables `train`, `validation` and `test`: columns `text` and `references` (a list)."""
    limits = {"train": data.max_train_samples, "validation": data.max_eval_samples, "test": data.max_predict_samples}
    tables: dict[str, Dataset] = {}
    with accelerator.main_process_first():
        for part, limit in limits.items():
            source = f"{part} data ({data.source(part)})"
            table = load_table(data.file(part), (data.dataset_name, data.dataset_config_name, part), limit)
            text = _find_column(table, "text_column", data.text_column, TEXT_COLUMNS, source)
            summary = _find_column(table, "summary_column", data.summary_column, SUMMARY_COLUMNS, source)
            references = [value if isinstance(value, list) else [value] for value in table[summary]]
            for row, several in enumerate(references):
                if not several or not all(isinstance(item, str) and item.strip() for item in several):
                    where = f"{summary} of row {row} (counted from 0)"
                    raise ValueError(f"{source}: {where} is {several}. Give texts, or remove the row.")
            accelerator.print(f"{source}: text: {text}; summary: {summary}")
            check_texts(table, text, source)
            texts = table.select_columns(text).rename_column(text, "text")
            tables[part] = texts.add_column("references", references)
    return tables


def _find_column(table: Dataset, flag: str, given: str | None, usual: tuple[str, ...], source: str) -> str:
    found = [given] if given else [name for name in usual if name in table.column_names]
    if len(found) != 1:
        raise ValueError(f"{source}: set {flag_of(flag)} to one of its columns: {', '.join(table.column_names)}.")
    check_columns(table, found, source)
    return found[0]


@dataclass(frozen=True)
class ContextLayout:
    """How a document and its summary become a context.

    `by_sentences`: encode the document sentence by sentence (GPST); otherwise as running text. `begin_ids` are what the
    tokenizer puts before every text, `end_id` follows the summary, limits are in tokens.
    """

    data: SummaryArguments
    by_sentences: bool
    begin_ids: tuple[int, ...]
    end_id: int | None

    def encode(self, batch: dict[str, list], tokenizer: PreTrainedTokenizerBase) -> dict[str, list]:
        """Encode columns `text` and `references`, of which the first is the summary.

        Returns `input_ids`, `sentence_lengths`, and `prompt_length`, that of document and prompt.
        """
        gap = "" if self.by_sentences else " "
        summaries = [gap + " ".join(references[0].split()) for references in batch["references"]]
        targets = _token_ids(tokenizer, summaries)
        (prompt,) = _token_ids(tokenizer, [gap + self.data.prompt])
        table: dict[str, list] = {"input_ids": [], "sentence_lengths": [], "prompt_length": []}
        for text, target in zip(batch["text"], targets, strict=True):
            source = self._cut(_token_ids(tokenizer, self.segments(text)))
            source = [[*self.begin_ids, *source[0]], *source[1:]] if source else [list(self.begin_ids)]
            end = [] if self.end_id is None else [self.end_id]
            segments = [*source, prompt, target[: self.data.max_target_length], end]
            segments = [segment for segment in segments if segment]
            table["input_ids"].append([token for segment in segments for token in segment])
            table["sentence_lengths"].append([len(segment) for segment in segments])
            table["prompt_length"].append(sum(map(len, source)) + len(prompt))
        return table

    def segments(self, text: str) -> list[str]:
        """Parts of a document that are encoded one by one."""
        if not self.by_sentences:
            return [text.strip()]
        language = self.data.language
        return [sentence for line in text.splitlines() for sentence in split_sentences(line, language=language)]

    def _cut(self, segments: Iterable[list[int]]) -> list[list[int]]:
        """The first `max_source` tokens; the last segment may be cut."""
        kept, room = [], self.data.max_source_length
        for segment in segments:
            if room and segment:
                kept.append(segment[:room])
                room -= len(kept[-1])
        return kept

    def longest(self, tokenizer: PreTrainedTokenizerBase) -> int:
        """Largest number of tokens of a context."""
        (prompt,) = _token_ids(tokenizer, [self.data.prompt])
        longest = self.data.max_source_length + self.data.max_target_length
        return longest + len(prompt) + len(self.begin_ids) + 2


def _token_ids(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    return tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]


def make_layout(data: SummaryArguments, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> ContextLayout:
    """Choose the layout for a model; contexts that do not fit its positions are refused."""
    if data.end_token and tokenizer.eos_token_id is None:
        raise ValueError(
            "The tokenizer has no end token. Pass --end-token false. Then summaries end at max_new_tokens."
        )
    (plain,) = _token_ids(tokenizer, ["a"])
    marked = tokenizer("a")["input_ids"]
    layout = ContextLayout(
        data,
        by_sentences=takes(model, "sentence_ids"),
        begin_ids=tuple(marked[: marked.index(plain[0])]) if plain[0] in marked else (),
        end_id=tokenizer.eos_token_id if data.end_token else None,
    )
    remedy = "Lower --max-source-length or --max-target-length."
    what = f"A document of --max-source-length {data.max_source_length} with a summary of --max-target-length "
    check_length(model.config, layout.longest(tokenizer), f"{what}{data.max_target_length}", remedy)
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
            ids.append(row["input_ids"][:length])
            sentences.append(torch.as_tensor(_sentence_ids(row["sentence_lengths"])[:length]))
        batch = pad_inputs(ids, self.pad_token_id, "left")
        if self.with_sentences:  # GPST reads the prompt as complete sentences with their induced trees, as in training
            batch["context_sentence_ids"] = pad_sequence(sentences, batch_first=True, padding_side="left")
        return batch


def _sentence_ids(lengths: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(1, len(lengths) + 1), lengths)


# ---------------------------------------------------------------------------------------------- the run
class SummarizationRecipe(FineTuning):
    """A language model of documents that end with their summaries."""

    program = "finetune_summarization"
    data: SummaryArguments
    decoding: DecodingArguments
    collate: ContextCollator
    options: dict[str, Any]
    references: dict[str, list[list[str]]]
    held_out: dict[str, ExampleDataset]

    def dataset(self) -> str | None:
        """Of the option."""
        return self.data.dataset_name

    def load(self) -> PreTrainedModel:
        """Read and encode the tables, load the model, and try the options of `generate`."""
        data, accelerator = self.data, self.accelerator
        tables = read_tables(accelerator, data)
        self.sources = [
            describe_table(part, data.source(part), table, ["text", "references"]) for part, table in tables.items()
        ]
        self.references = {part: list(tables[part]["references"]) for part in ("validation", "test")}
        model = self._load_language_model()
        layout = make_layout(data, model, self.tokenizer)
        encode = partial(layout.encode, tokenizer=self.tokenizer)
        self.held_out = {
            part: encode_table(accelerator, table, encode, data.preprocessing_num_workers)
            for part, table in tables.items()
        }
        for part, encoded in self.held_out.items():
            accelerator.print(f"{part}: {encoded.describe()}")
        self.examples = self.held_out.pop("train")
        self.say_unknown_tokens()
        self.collate = ContextCollator(self.tokenizer.pad_token_id, layout.by_sentences, data.summary_loss_only)
        length = data.max_target_length if self.decoding.max_new_tokens is None else self.decoding.max_new_tokens
        end_id = self.tokenizer.eos_token_id if data.end_token else None
        self.options = {"max_new_tokens": length, "eos_token_id": end_id, **self.decoding.options(model.config)}
        length = self.options["max_new_tokens"]
        longest = layout.longest(self.tokenizer) - data.max_target_length + length
        what = f"A document with a summary of max_new_tokens {length}"
        check_length(model.config, longest, what, "Lower --max-source-length or --max-new-tokens.")
        # A wrong option fails here, before training.
        self._summarize(model, "validation", 1, max_new_tokens=2)
        return model

    def _load_language_model(self) -> PreTrainedModel:
        config = self.read_config()
        if config.model_type == "rnng":
            raise ValueError("RNNG learns from trees, and documents have none. Choose another architecture.")
        if config.is_encoder_decoder:
            raise ValueError(f"{config.model_type} has a separate encoder. Choose a causal language model.")
        if config.model_type == "gpst" and self.data.end_token:
            config = self.read_config(document_end_token=True)
        self.choose_tokenizer(config)
        return self.load_model(config)

    @torch.no_grad()
    def _summarize(self, model: nn.Module, part: str, count: int, **changes: Any) -> list[str]:
        """Summaries of the first `count` examples, on every process; the number of processes does not change them."""
        plain, examples = self.accelerator.unwrap_model(model), self.held_out[part]

        def summarize(rows: list[int]) -> list[str]:
            seed_micro_step(self.arguments.seed, min(rows), 0)
            batch = to_device(self.collate.prompts([examples[row] for row in rows]), plain.device)
            output = plain.generate(**batch, **{**self.options, **changes})
            texts = self.tokenizer.batch_decode(output[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
            return [text.strip() for text in texts]

        batch_size = self.arguments.per_device_eval_batch_size
        with evaluation_mode(plain):
            return map_rows(self.accelerator, examples.lengths[:count], batch_size, summarize, "summarizing")

    def fingerprints(self) -> tuple[str, str]:
        """Of the examples."""
        return self.examples.fingerprint(), self.held_out["validation"].fingerprint()

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Data, loss, and the choice of the best model."""
        count = self.decoding.num_validation_summaries
        return {
            **super().settings(model),
            "summary_loss_only": self.data.summary_loss_only,
            "choice": [count, self.options if count else {}],
        }

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the loss on validation examples, and ROUGE of some summaries."""
        examples = self.held_out["validation"]
        losses, rouge = self.mean_losses(model, examples), {}
        # The model of step 0 has seen no summaries.
        count = min(self.decoding.num_validation_summaries, len(examples)) if step else 0
        if count:
            rouge = self._rouge(self._summarize(model, "validation", count), "validation")
        self.tell(step, "validation", f", {plural(len(examples), 'example')}", {**losses, **rouge}, ".4f")
        return {"step": step, "losses": losses, **({"rouge": rouge} if count else {})}

    def _rouge(self, summaries: list[str], part: str) -> dict[str, float]:
        """ROUGE of the summaries of the first documents of a part."""
        references, stem = self.references[part][: len(summaries)], self.decoding.use_stemmer
        return rouge_scores(summaries, references, use_stemmer=stem, language=self.data.language)

    def metric(self, evaluation: dict[str, Any]) -> float:
        """Minus the mean ROUGE of `evaluation`, or its loss."""
        return -evaluation["rouge"]["rouge_average"] if "rouge" in evaluation else evaluation["losses"]["loss"]

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Summarize the test documents and score the summaries; the main process writes them."""
        references = self.references["test"]
        summaries = self._summarize(run.model, "test", len(references))
        results = super().final_results(run, step)
        if not self.accelerator.is_main_process:
            return results
        rows = [
            {"row": row, "summary": summary, "references": several}
            for row, (summary, several) in enumerate(zip(summaries, references, strict=True))
        ]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_text(run.output_dir / "summaries.jsonl", lines)
        scores, stem = self._rouge(summaries, "test"), self.decoding.use_stemmer
        self.tell(step, "test", f", ROUGE of {len(rows):,} summaries", scores, ".2f")
        test = {"rouge": scores, "num_summaries": len(rows), "options": self.options, "use_stemmer": stem}
        return {**results, "test": test}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Write `evaluation.json`."""
        self.save_scores(run, "summarization", results["test"]["rouge"], results)


main = partial(run_recipe, SummarizationRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
