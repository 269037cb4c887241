# SPDX-License-Identifier: Apache-2.0
"""What programs have in common that train a model of words on text and compare its trees with a treebank's."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast, gather_object
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.cache import CACHE
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.streams import StreamRows, TokenStream, collate_framed
from hf_synlm.data.text import errors_at, plural
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_baselines, score_numbers, score_table, score_trees
from hf_synlm.evaluation.trees.parsing import ParsingScores, resolve_convention
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.arguments.base import ModelArguments, refuse
from hf_synlm.training.arguments.text import ParsingArguments, TextDataArguments
from hf_synlm.training.engine.final_report import report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.samplers import EpochSampler, padded_batches
from hf_synlm.training.engine.steps import to_device
from hf_synlm.training.tasks.stream_batches import (
    SentenceDataset,
    boundary_ids,
    describe_stream,
    load_stream,
    make_stream_tokenizer,
    stream_fingerprint,
)
from hf_synlm.training.tasks.tree_evaluation import spread

REPORT_SENTENCES = 20


# ---------------------------------------------------------------------------------------------- text
def gold_structure(config: PreTrainedConfig, tree_supervision: bool) -> str | None:
    """What a model learns from gold trees: "distances" or "spans"; `None` without supervision."""
    if not tree_supervision:
        return None
    learns, name, remedy = {
        "on_lstm": (getattr(config, "supervised_layers", ()), "distances", "Set supervised_layers"),
        "prpn": (getattr(config, "parsing_network", "") == "recurrent", "distances", "Set parsing_network=recurrent"),
        "ordered_memory": (False, "distances", "Use ON-LSTM-SYD or PRPN-SYD"),
        "palm": (
            getattr(config, "span_attention", False) and config.span_scores == "learned",
            "spans",
            "Use span_attention and learned span_scores",
        ),
    }[config.model_type]
    if not learns:
        raise ValueError(f"--tree-supervision is set, but this model does not learn from trees. {remedy}.")
    return name


# ---------------------------------------------------------------------------------------------- likelihood
def text_losses(nats: float, num_tokens: int, of_characters: bool) -> dict[str, float]:
    """Likelihood of a text in the usual units: `nats`, `tokens` (boundaries included), `nats_per_token`, and one more.

    That is `bits_per_character` = nats per token / ln 2 for characters, otherwise `perplexity` = exp(nats per token).
    """
    mean = nats / num_tokens
    losses = {"nats": nats, "tokens": num_tokens, "nats_per_token": mean}
    if of_characters:
        return {**losses, "bits_per_character": mean / math.log(2)}
    return {**losses, "perplexity": perplexity_of(mean)}


@torch.no_grad()
def share_buffers(accelerator: Accelerator, model: nn.Module) -> None:
    """Broadcast the buffers of the main process, whose model is saved; DDP does so only before training steps."""
    for buffer in accelerator.unwrap_model(model).buffers():
        broadcast(buffer)


@torch.no_grad()
def evaluate_stream(
    accelerator: Accelerator, model: nn.Module, stream: TokenStream, num_rows: int, segment_length: int
) -> float:
    """Negative log-likelihood of a stream in nats; every process calls.

    Every token but the first boundary is predicted once. The processes share the `num_rows` rows; up to rounding, the
    sum does not depend on their number. With one row every token is predicted from all tokens before it; with more,
    each row begins without context.
    """
    plain = accelerator.unwrap_model(model)
    rows = StreamRows(stream, num_rows, complete=True)
    share = range(accelerator.process_index, num_rows, accelerator.num_processes)
    total, cache = 0.0, None
    with evaluation_mode(plain):
        for start in range(0, rows.length if share else 0, segment_length):
            batch = to_device(rows.segment(start, segment_length, share), accelerator.device)
            output = plain(**batch, **{CACHE: cache}, use_cache=True)
            cache = output[CACHE]
            total -= output.joint_log_prob.cpu().double().sum().item()
    return sum(gather_object([total]))


@torch.no_grad()
def evaluate_sentences(
    accelerator: Accelerator, model: nn.Module, stream: TokenStream, pad_token_id: int, batch_size: int, max_tokens: int
) -> float:
    """Negative log-likelihood in nats of the sentences of a stream, each read alone; every process calls.

    The sum is over all words and the boundary after each sentence. A call has up to `batch_size` sentences and
    `max_tokens` padded tokens.
    """
    plain = accelerator.unwrap_model(model)
    sentences = SentenceDataset(stream)
    batches = padded_batches(sentences.lengths, batch_size, max_tokens)
    total = 0.0
    with evaluation_mode(plain):
        for numbers in batches[accelerator.process_index :: accelerator.num_processes]:
            batch = collate_framed(stream, [sentences[k] for k in numbers], pad_token_id, gold=False)
            output = plain(**to_device(batch, accelerator.device))
            total -= output.joint_log_prob.cpu().double().sum().item()
    return sum(gather_object([total]))


# ---------------------------------------------------------------------------------------------- the recipe
class TextRecipe(Recipe):
    """Train on text, epoch after epoch; each is evaluated on held-out text and on the trees that the model finds."""

    model_arguments: ModelArguments
    data: TextDataArguments
    parsing: ParsingArguments
    streams: Splits
    trees: Treebank | None
    final_trees: Treebank | None

    def check(self) -> None:
        """Complete the arguments about trees."""
        super().check()
        if self.model_arguments.row.is_baseline:
            names = "parsing_files final_parsing_files parse_options final_report"
            refuse(self.parsing, names, f"but {self.model_arguments.architecture} has no trees")
        self.parsing.complete(self.data)

    def make_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from."""
        return new_or_pretrained(self.model_arguments, tokenizer, boundary_ids(tokenizer))

    def set_examples(self) -> None:
        """Set `examples` and `collate`, from `streams` and `tokenizer`; default: sentences between boundaries."""
        self.examples = SentenceDataset(self.streams.train)
        self.collate = partial(collate_framed, self.streams.train, pad_token_id=self.tokenizer.pad_token_id)

    def sampler(self, consumed: int = 0) -> EpochSampler:
        """See `Recipe.sampler`; default: sentences of similar length."""
        return self.padded_sampler(self.examples.lengths, self.data.max_batch_tokens, consumed)

    def fingerprints(self) -> tuple[str, str]:
        """Of the texts."""
        return stream_fingerprint(self.streams.train), stream_fingerprint(self.streams.validation)

    def load_text(self) -> tuple[Splits, PreTrainedTokenizerBase, PreTrainedModel]:
        """Make or load tokenizer and model, and encode the text for them; every process calls."""
        self.text_style = "treebank" if self.data.file_format == "treebank" else None
        data, source = self.data, self.data.tokenizer_name or self.model_arguments.model_name_or_path
        tokenizer = make_stream_tokenizer(self.accelerator, data, source, Path(self.arguments.output_dir))
        model = self.make_model(tokenizer)
        gold = (gold_structure(model.config, data.tree_supervision), None, None)
        streams = (load_stream(data, files, tokenizer, kind) for files, kind in zip(data.splits, gold, strict=False))
        return Splits(*streams), tokenizer, model

    def load(self) -> PreTrainedModel:
        """Make or load tokenizer and model, encode the text, and try what will be measured."""
        data, parsing = self.data, self.parsing
        self.score = "bits_per_character" if data.tokenizer_type == "characters" else "perplexity"
        self.streams, self.tokenizer, model = self.load_text()
        self.accelerator.print(data.describe_splits(self.streams, describe_stream))
        self.set_examples()
        self.count_epochs()
        size = self.arguments.per_device_eval_batch_size
        self.eval_sizes = {"validation": size, "test": data.test_batch_size or size}
        for name in ("validation", "test")[: len(data.splits) - 1]:
            with errors_at(f"{name} text"):  # too short for so many rows
                stream = getattr(self.streams, name)
                if data.batching == "stream":
                    StreamRows(stream, self.eval_sizes[name], complete=True)
                else:
                    SentenceDataset(stream)
        self.trees = self._treebank(model, parsing.parsing_files, parsing.parse_sentences)
        self.final_trees = self._treebank(model, parsing.final_parsing_files)
        return model

    def _treebank(self, model: PreTrainedModel, paths: list[str], limit: int | None = None) -> Treebank | None:
        """The treebank to parse; its first sentence is parsed now, so that a wrong option fails before training."""
        parsing = self.parsing
        if not model.config.gives_trees or not paths or limit == 0:
            return None
        bank = parsing.treebank(paths, self.data.reading)
        first = bank.select(bank.numbers_scored(resolve_convention(parsing.parsing_convention))[:1])
        options: Any = parsing.parse_options  # a mapping, once the command line is parsed
        with errors_at("parse_options"):
            found = parse_words(model, self.tokenizer, first.words, **options)
        score_trees(found, first, parsing.parsing_convention)
        return bank.select(spread(len(bank.words), limit))

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure validation text and trees."""
        result = self._measure("validation", model, step)
        if self.trees is not None:
            scores = self._parse(model, self.trees)
            numbers = scores.numbers()
            result["trees"] = {"convention": scores.convention, **numbers}
            f1 = f"F1 {numbers['sentence_f1']:.2f} (sentence) {numbers['corpus_f1']:.2f} (corpus)"
            f1 += f" of {plural(scores.num_sentences, 'parsed sentence')}"
            self.accelerator.print(f"step {step}: validation: {f1}")
            self.accelerator.log({f"validation/{key}": value for key, value in numbers.items()}, step=step)
        return result

    def _measure(self, name: str, model: nn.Module, step: int) -> dict[str, Any]:
        """Likelihood of a held-out text; every process calls."""
        accelerator, data = self.accelerator, self.data
        stream, size = getattr(self.streams, name), self.eval_sizes[name]
        share_buffers(accelerator, model)
        if data.batching == "stream":
            nats, count = evaluate_stream(accelerator, model, stream, size, data.bptt), len(stream) - 1
        else:
            limits = (self.tokenizer.pad_token_id, size, data.max_batch_tokens)
            nats = evaluate_sentences(accelerator, model, stream, *limits)
            count = int((SentenceDataset(stream).lengths - 1).sum())
        losses = text_losses(nats, count, data.tokenizer_type == "characters")
        self.tell(step, name, "", losses, ".5g")
        return {"step": step, "losses": losses}

    def _parse(self, model: nn.Module, bank: Treebank) -> ParsingScores:
        """Parse and score; every process calls."""
        options: Any = self.parsing.parse_options
        found = self.parse(model, bank, **options)
        return score_trees(found, bank, self.parsing.parsing_convention)

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Likelihood of the test text and F1 of the induced trees."""
        test: dict[str, Any] = {} if self.streams.test is None else self._measure("test", run.model, step)
        if (bank := self.final_trees) is not None:
            model = self._parse(run.model, bank)
            scores = {"model": model, **score_baselines(bank, self.parsing.parsing_convention)}
            run.accelerator.print(f"final trees, all {len(bank.words):,} sentences:\n{score_table(scores, bank)}")
            test["trees"] = {
                "convention": model.convention, "punctuation": bank.convention, **score_numbers(scores)
            }  # fmt: skip
        return {"test": test} if test else {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        parsing = self.parsing
        if parsing.final_report:
            bank = parsing.treebank(parsing.report_files, self.data.reading, REPORT_SENTENCES)
            banks, methods = {str(parsing.punctuation): bank}, {"model": parsing.parse_options}
            report = report_saved_model(
                folder, banks, methods, self.arguments.seed, parsing.parsing_convention, None
            )  # fmt: skip
            results.setdefault("test", {})["saved_model"] = report
