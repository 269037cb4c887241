# SPDX-License-Identifier: Apache-2.0
"""What programs have in common that train on the sentences of treebanks, with or without their trees."""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_synlm.data.text import plural
from hf_synlm.data.vocabulary import word_final_ids
from hf_synlm.evaluation.trees.gold_treebank import load_treebank
from hf_synlm.hub.abilities import declared, tree_codec
from hf_synlm.training.arguments.treebank import EvaluationArguments, TreeDataArguments
from hf_synlm.training.engine.arguments import ModelArguments
from hf_synlm.training.engine.final_report import REPORT_REMEDY, report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits, improvement
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.tasks.sentence_files import load_or_make_tokenizer
from hf_synlm.training.tasks.tree_batches import (
    TreeCollator,
    TreeDataset,
    WordCollator,
    collect_labels,
    encode_treebanks,
    load_trees,
    tree_words,
)
from hf_synlm.training.tasks.tree_evaluation import (
    Objective,
    add_perplexities,
    evaluate_given_trees,
    search_trees,
    spread,
)
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
        words = partial(tree_words, trees[0])
        tokenizer = load_or_make_tokenizer(accelerator, data, name, output_dir, words, *self.special_tokens)
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token  # GPT-2 and Llama have none
        self.tokenizer, labels = tokenizer, collect_labels(*trees, system=self.label_system)
        model = self.make_model(labels)
        self.config = config = model.config
        labeled = declared(config, "gives_labels")
        source: Any = tree_codec(config) if labeled else LabeledCodec("top_down", tuple(labels))
        style = getattr(config, "text_style", None)
        self.splits = encode_treebanks(accelerator, data, trees, tokenizer, source, style)
        self.examples, self.collate = self.splits.train, self.collator(source)
        accelerator.print(data.describe_splits(self.splits, TreeDataset.describe))
        return model

    def collator(self, source: LabeledCodec) -> TreeCollator | WordCollator:
        """What makes a batch of sentences whose trees are encoded by `source`."""
        return TreeCollator(self.tokenizer.pad_token_id, tree_codec(self.config), source)

    def fingerprints(self) -> tuple[str, str]:
        """Of the trees."""
        return self.splits.train.fingerprint(), self.splits.validation.fingerprint()


# ---------------------------------------------------------------------------------------------- grammars


class GrammarRecipe(TreebankRecipe):
    """Train on gold trees by teacher forcing, or a baseline on their words; the best validation loss wins."""

    repeated = "max_batch_actions batch_group_size evaluation_steps"
    needs_whole = "the search"
    model_arguments: ModelArguments
    evaluation: EvaluationArguments
    objective: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]]

    def check(self) -> None:
        """Refuse trees of a baseline, and shards of FSDP."""
        super().check()
        if self.model_arguments.row.is_baseline:
            self.evaluation.refuse_trees(self.model_arguments.architecture)

    def load(self) -> PreTrainedModel:
        """Read the trees, and those of the report; make or load tokenizer and model."""
        files = self.data.test_files[:1] if self.evaluation.final_report else []
        self.report_treebanks = {
            name: load_treebank(file, name, REPORT_SENTENCES, remedy=REPORT_REMEDY, **self.data.reading)
            for file, name in product(files, self.evaluation.report_punctuation)
        }
        model = super().load()
        self.objective = Objective(self.config, tree_codec(self.config) if self.is_grammar else None)
        return model

    def make_model(self, labels: list[str]) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from; the tokenizer tells which tokens end a word."""
        given, tokenizer, word_final = self.model_arguments, self.tokenizer, word_final_ids(self.tokenizer)
        decided: dict[str, Any] = {"pad_token_id": tokenizer.pad_token_id}
        if given.row.model_class.config_class.gives_labels:
            decided.update(nonterminals=labels, subwords=not all(word_final))
        ends = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")}
        ends = {name: tokenizer.pad_token_id if token is None else token for name, token in ends.items()}
        options = {} if self.backbone is None else {"backbone": self.backbone}
        model: Any = new_or_pretrained(given, tokenizer, decided, ends, **options)
        if given.model_name_or_path is None and getattr(model.config, "subwords", False):
            model.model.word_final.copy_(torch.tensor(word_final))
        return model

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences with similar numbers of actions; for all architectures the same."""
        return self.padded_sampler(self.examples.lengths("actions"), self.data.max_batch_actions, consumed)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective with the nats that perplexities are made of."""
        return self.objective(model, batch)

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
        sizes = (self.arguments.per_device_eval_batch_size, self.data.max_batch_actions)
        losses = evaluate_given_trees(self.accelerator, model, dataset, self.collate, self.objective, *sizes)
        result: dict[str, Any] = {"step": step, "losses": losses}
        self.tell(step, name, f" of {plural(len(dataset), 'sentence')}", losses)
        if rows:
            size, beam = self.evaluation.search_batch_size, self.evaluation.beam(self.config)
            result["search"], text = search_trees(self.accelerator, model, dataset, rows, size, beam)
            self.accelerator.print(f"step {step}: {name}: {text}")
            numbers = {f"{name}/{k}": v for k, v in result["search"].items() if not isinstance(v, dict)}
            self.accelerator.log(numbers, step=step)
        return result

    def procedure(self, run: Run, read: str = "") -> str:
        """Steps, sentences and seed."""
        return super().procedure(run, f"{self._num_sentences(run)} sentences read, ")

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

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        if self.report_treebanks:
            beam = self.evaluation.beam(self.config)
            widths = [str(beam[name]) for name in ("num_beams", "action_beam_size") if name in beam]
            methods = {f"search (beams {' and '.join(widths)})": beam}
            backbone = self.backbone if getattr(run.model, "adapts_backbone", False) else None
            report = report_saved_model(folder, self.report_treebanks, methods, self.arguments.seed, "gpst", backbone)
            results["test"]["saved_model"] = report
        line, test = improvement(results, "nats_per_sentence"), results.get("test")
        if test is None:
            return line
        line += f"; test nats per sentence {test['losses']['nats_per_sentence']:.2f}"
        if "search" in test:
            search = test["search"]
            kind = "labeled" if "labeled_f1" in search else "unlabeled"
            line += f", {kind} F1 {search[f'{kind}_f1']:.2f}, word perplexity {search['word_perplexity']:.2f}"
        elif "word_perplexity" in test["losses"]:
            line += f", word perplexity {test['losses']['word_perplexity']:.2f}"
        return line
