# SPDX-License-Identifier: Apache-2.0
"""What programs have in common that train a model of words on text and compare its trees with a treebank's."""

from abc import abstractmethod
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.streams import TokenStream
from hf_synlm.evaluation.trees.gold_treebank import score_baselines, score_numbers, score_table
from hf_synlm.training.arguments.text import ParsingArguments, TextDataArguments
from hf_synlm.training.engine.arguments import ModelArguments, refuse_trees
from hf_synlm.training.engine.final_report import report_saved_model
from hf_synlm.training.engine.recipe import Recipe, Splits, improvement
from hf_synlm.training.engine.run import Run, new_or_pretrained
from hf_synlm.training.engine.samplers import EpochSampler
from hf_synlm.training.tasks.stream_batches import (
    boundary_ids,
    describe_stream,
    load_stream,
    make_stream_tokenizer,
    stream_fingerprint,
)
from hf_synlm.training.tasks.stream_evaluation import TextEvaluator, TreeScorer

REPORT_SENTENCES = 20


class TextRecipe(Recipe):
    """Train on text, epoch after epoch; each is evaluated on held-out text and on the trees that the model finds."""

    model_arguments: ModelArguments
    data: TextDataArguments
    parsing: ParsingArguments
    streams: Splits
    examples: Any
    collate: Any
    validation: TextEvaluator
    test: TextEvaluator | None = None
    final_trees: TreeScorer | None

    def check(self) -> None:
        """Complete the arguments about trees."""
        super().check()
        if self.model_arguments.row.is_baseline:
            names = "parsing_files final_parsing_files parse_options final_report"
            refuse_trees(self.parsing, self.model_arguments.architecture, names)
        self.parsing.complete(self.data)

    def make_model(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Make an untrained model, or load the one to continue from."""
        return new_or_pretrained(self.model_arguments, tokenizer, boundary_ids(tokenizer))

    def gold_structure(self, config: PreTrainedConfig) -> str | None:
        """What the model learns from gold trees: "distances" or "spans"; default: nothing."""
        return None

    @abstractmethod
    def set_examples(self) -> None:
        """Set `examples` and `collate`, from `streams` and `tokenizer`."""

    @abstractmethod
    def sampler(self, consumed: int = 0) -> EpochSampler:
        """See `Recipe.sampler`."""

    def fingerprints(self) -> tuple[str, str]:
        """Of the texts."""
        return stream_fingerprint(self.streams.train), stream_fingerprint(self.streams.validation)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Measure validation text and trees."""
        return self.validation.run(model, step)

    def load_text(self) -> tuple[Splits, PreTrainedTokenizerBase, PreTrainedModel]:
        """Make or load tokenizer and model, and encode the text for them; every process calls."""
        self.text_style = "treebank" if self.data.file_format == "treebank" else None
        data, source = self.data, self.data.tokenizer_name or self.model_arguments.model_name_or_path
        tokenizer = make_stream_tokenizer(self.accelerator, data, source, Path(self.arguments.output_dir))
        model = self.make_model(tokenizer)
        gold = (self.gold_structure(model.config), None, None)
        streams = (load_stream(data, files, tokenizer, kind) for files, kind in zip(data.splits, gold, strict=False))
        return Splits(*streams), tokenizer, model

    def load(self) -> PreTrainedModel:
        """Make or load tokenizer and model, encode the text, and try what will be measured."""
        accelerator, data, parsing = self.accelerator, self.data, self.parsing
        self.streams, self.tokenizer, model = self.load_text()
        accelerator.print(data.describe_splits(self.streams, describe_stream))
        self.set_examples()
        self.count_epochs()
        size = self.arguments.per_device_eval_batch_size
        trees = self._scorer(model, parsing.parsing_files, parsing.parse_sentences)
        self.validation = self._evaluator("validation", self.streams.validation, size, trees)
        if self.streams.test is not None:
            self.test = self._evaluator("test", self.streams.test, data.test_batch_size or size)
        self.final_trees = self._scorer(model, parsing.final_parsing_files)
        return model

    def _evaluator(self, name: str, stream: TokenStream, size: int, trees: TreeScorer | None = None) -> TextEvaluator:
        return TextEvaluator(self.accelerator, name, stream, self.data, self.tokenizer.pad_token_id, size, trees)

    def _scorer(self, model: PreTrainedModel, paths: list[str], limit: int | None = None) -> TreeScorer | None:
        """The scorer of a treebank, tried on one sentence."""
        parsing = self.parsing
        if not model.config.gives_trees or not paths or limit == 0:
            return None
        bank, size = parsing.treebank(paths, self.data.reading), parsing.parse_batch_size
        options: Any = parsing.parse_options  # a mapping, once the command line is parsed
        scorer = TreeScorer(bank, self.tokenizer, parsing.parsing_convention, options, size, limit)
        scorer.rehearse(model)
        return scorer

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """Likelihood of the test text and F1 of the induced trees."""
        test: dict[str, Any] = {} if self.test is None else self.test.run(run.model, step)
        scorer = self.final_trees
        if scorer is not None:
            bank = scorer.treebank
            scores = {"model": scorer.run(run.accelerator, run.model), **score_baselines(bank, scorer.convention)}
            run.accelerator.print(f"final trees, all {len(bank.words):,} sentences:\n{score_table(scores, bank)}")
            used = {"convention": scores["model"].convention, "punctuation": bank.convention}
            test["trees"] = {**used, **score_numbers(scores)}
        return {"test": test} if test else {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """Parse the first test sentences with the saved model, as its users will, and generate one."""
        parsing, test = self.parsing, results.get("test", {})
        if parsing.final_report:
            bank = parsing.treebank(parsing.report_files, self.data.reading, REPORT_SENTENCES)
            methods: dict[str, Any] = {"model": parsing.parse_options}
            banks, convention = {str(parsing.punctuation): bank}, parsing.parsing_convention
            seed = self.arguments.seed
            test["saved_model"] = report_saved_model(folder, banks, methods, seed, convention, None)
        unit = "bits_per_character" if self.data.tokenizer_type == "characters" else "perplexity"
        line = improvement(results, unit)
        if "losses" in test:
            line += f"; test {unit.replace('_', ' ')} {test['losses'][unit]:.2f}"
        if "trees" in test:
            model, right = (test["trees"][name]["sentence_f1"] for name in ("model", "right"))
            line += f"; sentence F1 {model:.2f}, right branching {right:.2f}"
        return line
