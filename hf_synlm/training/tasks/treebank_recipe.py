# SPDX-License-Identifier: Apache-2.0
"""What programs have in common that train on the sentences of treebanks, with or without their trees."""

from abc import abstractmethod
from collections import Counter
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_synlm.core.losses import share_of
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.collate import LABEL_PADDING
from hf_synlm.data.gold_trees import which_joined
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.text import plural
from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.evaluation.trees.gold_treebank import load_treebank
from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence, parse_encoded
from hf_synlm.hub.abilities import declared, tree_codec
from hf_synlm.training.arguments.base import refuse
from hf_synlm.training.arguments.treebank import EvaluationArguments, GrammarModelArguments, TreeDataArguments
from hf_synlm.training.engine.export import model_name
from hf_synlm.training.engine.final_report import REPORT_REMEDY, report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.samplers import PaddedBatchSampler, padded_batches
from hf_synlm.training.engine.steps import map_rows, to_device
from hf_synlm.training.tasks.tree_batches import (
    TreeCollator,
    TreeDataset,
    WordCollator,
    collect_labels,
    encode_treebanks,
    load_trees,
    row_to_sentence,
)
from hf_synlm.training.tasks.tree_evaluation import score_parses, spread
from hf_synlm.training.tasks.word_tokenizers import load_or_make_tokenizer
from hf_synlm.training.tasks.word_vectors import take_word_vectors
from hf_synlm.trees.codecs import LabeledCodec

REPORT_SENTENCES = 20


class TreebankRecipe(Recipe):
    """Train on sentences of treebanks.

    Fields:
        special_tokens: that the tokenizer must have.
        label_system: the transition system whose labels the trees get.
        backbone: folder or Hub name of the decoder whose tokenizer is used, if the model is built on one.
        splits: the encoded sentences with their trees.
    """

    repeated = "max_batch_actions batch_group_size"
    text_style = "treebank"
    special_tokens: tuple[str, ...] = ("pad_token",)
    label_system: str = "top_down"
    backbone: str | None = None
    data: TreeDataArguments
    splits: Splits
    examples: TreeDataset

    @property
    def is_grammar(self) -> bool:
        """Whether the model reads trees."""
        return declared(self.config, "tree_codec") is not None

    @abstractmethod
    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """Make an untrained model for trees with these labels, or load the one to continue from."""

    def load(self) -> PreTrainedModel:
        """Read and encode the trees, make or load tokenizer and model."""
        data, accelerator, output_dir = self.data, self.accelerator, Path(self.arguments.output_dir)
        trees = [load_trees(accelerator, files, data.reading) for files in data.splits]
        name = data.tokenizer_name or self.model_arguments.model_name_or_path or self.backbone
        words = trees[0].select_columns("words")
        tokenizer = load_or_make_tokenizer(
            accelerator, data, name, output_dir, lambda: (row["words"] for row in words), *self.special_tokens
        )
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # GPT-2 and Llama have none
        self.tokenizer, labels = tokenizer, collect_labels(*trees, system=self.label_system)
        model = self.make_model(labels)
        self.config = config = model.config
        labeled = declared(config, "gives_labels")
        source: Any = tree_codec(config) if labeled else LabeledCodec("top_down", tuple(labels))
        style = getattr(config, "text_style", None)
        self.splits = encode_treebanks(accelerator, data, trees, tokenizer, source, style)
        self.examples, self.held_out, self.collate = self.splits.train, self.splits.validation, self.collator(source)
        accelerator.print(data.describe_splits(self.splits, TreeDataset.describe))
        return model

    def collator(self, source: LabeledCodec) -> TreeCollator | WordCollator:
        """What makes a batch of sentences whose trees are encoded by `source`."""
        return TreeCollator(self.tokenizer.pad_token_id, tree_codec(self.config), source)


# ---------------------------------------------------------------------------------------------- grammars
# Names of parts of Pushdown Layers' loss.
PARTS = {"language_model": "word", "attachment": "action"}


# ---------------------------------------------------------------------------------------------- given trees
def add_perplexities(totals: dict[str, float]) -> dict[str, float]:
    """Perplexities exp(nats / count) from sums (or from means over the same batches).

    `totals` has `word_nats`, `tokens`, `words`, and for grammars `action_nats`, `actions`; others are passed on. Added
    are `token_perplexity`, and for grammars `action_perplexity` and `perplexity` (of both), for models of words alone
    `word_perplexity`: a grammar predicts tokens given the actions before them, which gives no word perplexity.
    """
    values = dict(totals)
    word_nats, tokens, words = (values.pop(name) for name in ("word_nats", "tokens", "words"))
    values["token_perplexity"] = perplexity_of(word_nats / tokens)
    if "actions" in values:
        action_nats, actions = values.pop("action_nats"), values.pop("actions")
        values["action_perplexity"] = perplexity_of(action_nats / actions)
        values["perplexity"] = perplexity_of((word_nats + action_nats) / (tokens + actions))
    else:
        values["word_perplexity"] = perplexity_of(word_nats / words)
    return values


class GrammarRecipe(TreebankRecipe):
    """Train on gold trees by teacher forcing, or a baseline on their words; the best validation loss wins."""

    repeated = "max_batch_actions batch_group_size evaluation_steps"
    needs_whole = "the search"
    model_arguments: GrammarModelArguments
    evaluation: EvaluationArguments

    def check(self) -> None:
        """Refuse trees of a baseline, and shards of FSDP."""
        super().check()
        if self.model_arguments.row.is_baseline:
            names = "search_sentences final_search_sentences num_beams action_beam_size fast_track_size final_report"
            refuse(self.evaluation, names, f"but {self.model_arguments.architecture} has no trees")

    def load(self) -> PreTrainedModel:
        """Read the trees, and those of the report; make or load tokenizer and model."""
        files = self.data.test_files[:1] if self.evaluation.final_report else []
        if self.evaluation.final_report and not files:
            self.accelerator.print("--final-report: there is none without --test-files")
        self.report_treebanks = {
            name: load_treebank(file, name, REPORT_SENTENCES, remedy=REPORT_REMEDY, **self.data.reading)
            for file, name in product(files, self.evaluation.report_punctuation)
        }
        model = super().load()
        if not self.model_arguments.row.is_baseline:
            self.evaluation.beam(model.config)  # refuses widths before training
        return model

    def begin(self, model: PreTrainedModel) -> None:
        """Take the word vectors of another model."""
        source = self.model_arguments.word_vectors
        if source is not None:
            sentences = map(row_to_sentence, self.examples.table)
            marked = ((sentence.words, which_joined(sentence)) for sentence in sentences)
            count = take_word_vectors(model, self.tokenizer, source, marked)
            self.accelerator.print(f"{count:,} of {len(self.tokenizer):,} tokens begin with word vectors of {source}")

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Which model's word vectors the run began with, by name: its folder may be elsewhere now."""
        source = self.model_arguments.word_vectors
        return {**super().settings(model), "word_vectors": source and model_name(source)}

    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from; the tokenizer tells which tokens end a word."""
        given, tokenizer = self.model_arguments, self.tokenizer
        if given.model_name_or_path is not None:
            return new_or_pretrained(given, tokenizer, {})
        word_final = word_final_ids(tokenizer)
        decided: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id}
        if given.row.model_class.config_class.gives_labels:
            decided.update(nonterminals=labels, subwords=not all(word_final))
        ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        ends = {name: tokenizer.pad_token_id if token is None else token for name, token in ends.items()}
        model: Any = new_or_pretrained(given, tokenizer, decided, ends)
        if getattr(model.config, "subwords", False):
            model.model.word_final.copy_(torch.tensor(word_final))
        return model

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences with similar numbers of actions; for all architectures the same."""
        return self.padded_sampler(self.examples.lengths("actions"), self.data.max_batch_actions, consumed)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss, and detached: its named parts in nats over the batch (`word_nats`, ...) with what they count.

        A part of the loss is divided by what `loss_normalization` says; by default it is the mean over what it counts.
        """
        batch = dict(batch)
        tokens = batch["labels"] != LABEL_PADDING if "labels" in batch else batch["attention_mask"]
        counts = {"words": batch.pop("num_words").float(), "tokens": tokens.sum().float()}
        output: Any = model(**batch)
        normalization: Any = self.config.loss_normalization if self.is_grammar else None
        if self.is_grammar:
            counts["actions"] = (tree_codec(self.config).steps(batch)[0] >= 0).sum().float()
        own: dict[str, Any] = {"word": counts["tokens"], "action": counts.get("actions")}
        sizes = {"batch": len(batch["input_ids"]), "sum": 1, "token": own["word"], "action": own["action"]}
        shares, losses = batch.get("loss_shares"), output.get("losses") or {"word": output.loss.detach()}
        for name, part in losses.items():
            kind = PARTS.get(name, name)
            divisor = sizes.get(normalization, own[kind])
            counts[f"{kind}_nats"] = part * (divisor / share_of(shares, name))
        return output.loss, counts

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Losses and perplexities."""
        return add_perplexities(means)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure the likelihood of the validation trees, and parse some of them.

        An untrained model is not searched: it would open and close constituents at random.
        """
        rows = self._rows(self.splits.validation, self.evaluation.search_sentences)
        if rows and step == 0 and self.model_arguments.model_name_or_path is None:
            self.accelerator.print("step 0: no sentence is parsed with an untrained model")
            rows = []
        return self._measure("validation", self.splits.validation, rows, model, step)

    def _rows(self, dataset: TreeDataset, limit: int | None) -> list[int]:
        """Sentences to parse."""
        return spread(len(dataset), limit) if self.is_grammar else []

    def _measure(self, name: str, dataset: TreeDataset, rows: list[int], model: nn.Module, step: int) -> dict[str, Any]:
        """Likelihood of held-out trees and, for `rows`, parsing accuracy; every process calls."""
        losses = self.given_trees(model, dataset)
        result: dict[str, Any] = {"step": step, "losses": losses}
        self.tell(step, name, f" of {plural(len(dataset), 'sentence')}", losses)
        if rows:
            found = self._search(model, dataset, rows)
            numbers = {key: value for key, value in found.items() if isinstance(value, float | int)}
            self.tell(step, name, f", search over {plural(len(rows), 'sentence')}", numbers, ".2f")
            result["search"] = found
        return result

    @torch.no_grad()
    def given_trees(self, model: nn.Module, dataset: TreeDataset) -> dict[str, float]:
        """Negative log-likelihood of held-out trees (for a model of words: of their words); every process calls.

        Returns `nats` of all sentences, `nats_per_sentence`, and perplexities. The likelihood given the gold trees is
        not that of a language model of words. The number of processes changes the sums by rounding only.
        """
        accelerator, plain = self.accelerator, self.accelerator.unwrap_model(model)
        limits = (self.arguments.per_device_eval_batch_size, self.data.max_batch_actions)
        batches = padded_batches(dataset.lengths("actions"), *limits)
        own: Counter[str] = Counter()
        with evaluation_mode(plain):
            for rows in batches[accelerator.process_index :: accelerator.num_processes]:
                batch = to_device(self.collate(dataset.__getitems__(rows)), accelerator.device)
                own.update({name: part.item() for name, part in self.compute_loss(plain, batch)[1].items()})
        shares = gather_object([dict(own)])
        sums = {name: sum(share.get(name, 0.0) for share in shares) for name in next(filter(None, shares))}
        nats = sum(value for name, value in sums.items() if name.endswith("_nats"))
        return {"nats": nats, "nats_per_sentence": nats / len(dataset), **add_perplexities(sums)}

    @torch.no_grad()
    def _search(self, model: nn.Module, dataset: TreeDataset, rows: list[int]) -> dict[str, Any]:
        """Parse the sentences `rows` by beam search: `score_parses`, and the `beam`; every process calls.

        The search sums over trees: compare its word perplexity with that of a model without trees.
        """
        plain, size = self.accelerator.unwrap_model(model), self.evaluation.search_batch_size
        beam = self.evaluation.beam(self.config)
        gold, lengths = [dataset.sentence(row) for row in rows], dataset.lengths("input_ids")[rows].tolist()

        def parse(numbers: list[int]) -> list[ParsedSentence]:
            items = dataset.__getitems__([rows[number] for number in numbers])
            sentences = [
                EncodedSentence(tuple(item["input_ids"]), tuple(item["word_ends"]), gold[number].words)
                for number, item in zip(numbers, items, strict=True)
            ]
            return parse_encoded(plain, sentences, batch_size=size, **beam)

        found = map_rows(self.accelerator, lengths, size, parse, "search")
        return {**score_parses(gold, dataset.punctuation_by, found, plain.config), "beam": beam}

    def procedure(self, run: Run, read: str = "") -> str:
        """Steps, word vectors, sentences and seed."""
        source = self.model_arguments.word_vectors
        begun = f"word vectors began with those of {model_name(source)}; " if source else ""
        return super().procedure(run, f"{begun}{self._num_sentences(run)} sentences read, ")

    def _num_sentences(self, run: Run) -> int:
        one_process = self.sampler()
        one_process.rank, one_process.consumed_per_micro_step = 0, 1
        return sum(map(len, islice(one_process, run.state.consumed)))

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Number of sentences read; likelihood and search on the test trees."""
        results: dict[str, Any] = {"sentences": self._num_sentences(run)}
        if self.splits.test is not None:
            rows = self._rows(self.splits.test, self.evaluation.final_search_sentences)
            results["test"] = self._measure("test", self.splits.test, rows, run.model, step)
        return results

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> None:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        if self.report_treebanks:
            beam = self.evaluation.beam(self.config)
            widths = [str(beam[name]) for name in ("num_beams", "action_beam_size") if name in beam]
            methods = {f"search (beams {' and '.join(widths)})": beam}
            backbone = self.backbone if getattr(run.model, "adapts_backbone", False) else None
            report = report_saved_model(folder, self.report_treebanks, methods, self.arguments.seed, "gpst", backbone)
            results["test"]["saved_model"] = report
