"""Train a constituency parser on treebanks: an encoder of transformers with scores of spans.

    accelerate launch --mixed_precision bf16 training/train_span_parser.py --config span_parser_mini \
        --encoder FOLDER --train_files trees.train.txt --validation_files trees.valid.txt --output_dir runs/parser

The model that is kept is the one with the best labeled F1 on the validation trees. It gives trees for text that has
none (`synlm silver --parser`), on which syntactic language models can be trained.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from hf_synlm import SpanParserForTokenClassification
from hf_synlm.core.backbone_adapter import linear_layers
from hf_synlm.data.arguments import option
from hf_synlm.data.silver import parse_words, tokenizer_of_treebanks
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.evaluation.trees.evalb import labeled_f1
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.training.engine.arguments import ModelArguments, check_minimum, check_overrides
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.export import hub_facts
from hf_synlm.training.engine.recipe import Recipe, kept_evaluation
from hf_synlm.training.engine.run import Run, load_pretrained
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.engine.steps import map_rows
from hf_synlm.training.tasks.sentence_files import SentenceFileArguments, words_fingerprint
from hf_synlm.training.tasks.span_batches import SpanExample, SpanLabels, WeightedBatchSampler, collate_spans
from hf_synlm.training.tasks.tree_evaluation import spread

HEADS = ("left", "right", "norm", "label_head", "tag_head")


@dataclass
class SpanParserModelArguments(ModelArguments):
    """The encoder, and which of its weights are trained."""

    presets = {"span_parser": ""}

    architecture: str = option("span_parser", "'span_parser'.")
    encoder: str | None = option(
        None,
        "Folder or Hub name of the encoder whose weights and tokenizer to begin with. With --model_name_or_path: that "
        "of this adapter.",
    )
    encoder_name: str | None = option(
        None, "Hub name of the encoder if --encoder is a folder, from which an adapter is loaded elsewhere."
    )
    lora_r: int = option(
        0,
        "Train LoRA of this rank instead of all weights of the encoder (0). The model that is saved is an adapter of "
        "the encoder.",
    )
    head_learning_rate: float | None = option(
        None, "Learning rate of the layers on the encoder; default: --learning_rate."
    )

    def __post_init__(self):
        """Check that there is one model to begin with."""
        super().__post_init__()
        check_minimum(self, 0, "lora_r head_learning_rate")
        if self.encoder is None and self.model_name_or_path is None:
            raise ValueError("encoder is not set. Pass --encoder FOLDER_OR_NAME, or --model_name_or_path.")
        if self.lora_r and self.model_name_or_path is not None:
            raise ValueError("lora_r needs the weights of an encoder. Pass --encoder, and no --model_name_or_path.")
        if self.head_learning_rate is not None and not math.isfinite(self.head_learning_rate):
            raise ValueError(f"head_learning_rate is {self.head_learning_rate} and must be finite.")


@dataclass
class SpanDataArguments(SentenceFileArguments):
    """Treebanks, how often each is read, and the size of batches."""

    train_weights: list[float] = option(
        [], "How often an epoch reads the sentences of each of --train_files, such as 3 1 0.35; default: once."
    )
    max_sentence_words: int = option(80, "Leave longer sentences out of training.")
    max_batch_tokens: int = option(4096, "Largest padded size of a micro batch in tokens.")
    min_label_frequency: int = option(5, "Leave rarer labels and tags out.")
    evaluation_sentences: int | None = option(None, "Sentences of each of --validation_files; default: all.")

    def __post_init__(self):
        """Check the values."""
        super().__post_init__()
        check_minimum(self, 1, "max_sentence_words max_batch_tokens min_label_frequency evaluation_sentences")
        if self.train_weights and len(self.train_weights) != len(self.train_files):
            raise ValueError(
                f"train_weights are {len(self.train_weights)} numbers for {len(self.train_files)} train_files. Give "
                "one for each."
            )
        for weight in self.train_weights:
            if not 0 < weight < math.inf:
                raise ValueError(f"train_weights has {weight}. Give positive numbers, and leave files out otherwise.")

    def read(self, files: list[str]) -> list[list[TreebankSentence]]:
        """The sentences of each file."""
        return [list(read_treebank(path, **self.reading)) for path in files]


class SpanParserRecipe(Recipe):
    """Train a span parser on gold trees; keep the best validation F1."""

    program = "train_span_parser"
    parts = ("model_arguments", "data", "arguments")
    model_arguments: SpanParserModelArguments
    data: SpanDataArguments
    examples: list[SpanExample]

    def check(self) -> None:
        """Nothing excludes anything."""

    def load(self) -> PreTrainedModel:
        """Read the trees, and make or load tokenizer and model."""
        given, data = self.model_arguments, self.data
        train = [[s for s in part if len(s.words) <= data.max_sentence_words] for part in data.read(data.train_files)]
        sentences = [sentence for part in train for sentence in part]
        weights = data.train_weights or [1.0] * len(train)
        chosen = [
            [part[row] for row in spread(len(part), data.evaluation_sentences)]
            for part in data.read(data.validation_files)
        ]
        self.validation = [sentence for part in chosen for sentence in part]
        self.test = [sentence for part in data.read(data.test_files) for sentence in part]
        source = given.model_name_or_path or given.encoder
        check_tokenizer_source(str(source))
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        if given.model_name_or_path is None:
            model = self._new_model(sentences)
        else:
            backbone = {} if given.encoder is None else {"backbone": given.encoder}
            model_class = SpanParserForTokenClassification
            model = load_pretrained(
                model_class, given.model_name_or_path, given.config_overrides, self.tokenizer, **backbone
            )
        labels = SpanLabels(model.config.nonterminals, model.config.tags)
        encode = partial(labels.encode, tokenizer=self.tokenizer)
        limit = model.config.max_position_embeddings or math.inf
        examples = encode(sentences)
        fits = np.array([len(example.ids) + 2 <= limit for example in examples])
        self.examples = [example for example, kept in zip(examples, fits, strict=True) if kept]
        self.weights = np.repeat(weights, [len(part) for part in train])[fits]
        self.heldout, self.heldout_test = encode(self.validation), encode(self.test)
        self.collate = partial(collate_spans, pad_token_id=model.config.pad_token_id)
        model.get_input_embeddings().requires_grad_(False)  # half of the encoder, which learns little of it
        self.accelerator.print(
            f"{len(self.examples):,} training sentences, {int(self.weights.sum()):,} an epoch; "
            f"{len(self.validation):,} for validation; {len(labels.nonterminals)} labels, {len(labels.tags)} tags"
        )
        return model

    def _new_model(self, sentences: list[TreebankSentence]) -> PreTrainedModel:
        given = self.model_arguments
        labels = SpanLabels.of(sentences, self.data.min_label_frequency)
        self.tokenizer = tokenizer_of_treebanks(self.tokenizer)
        fields = check_overrides(SpanParserForTokenClassification.config_class, given.config_overrides)
        make: Any = SpanParserForTokenClassification.from_encoder
        model = make(given.encoder, labels.nonterminals, labels.tags, self.tokenizer, **fields)
        if given.lora_r:
            try:
                from peft import LoraConfig
            except ImportError as error:
                raise ValueError(f"lora_r is {given.lora_r}, and LoRA needs PEFT: pip install peft") from error
            model.backbone_source["name"] = given.encoder_name or model.backbone_source["name"]
            model.add_adapter(
                LoraConfig(r=given.lora_r, lora_alpha=2 * given.lora_r, target_modules=linear_layers(model))
            )
        return model

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """The layers on the encoder have their own."""
        rate = self.model_arguments.head_learning_rate
        return {} if rate is None else dict.fromkeys(HEADS, rate)

    def settings(self, model: PreTrainedModel) -> dict[str, Any]:
        """Fingerprints of the words, how batches are drawn, and what is trained."""
        data, given = self.data, self.model_arguments
        return {
            "training_data": words_fingerprint(tuple(map(str, (e.ids, e.spans, e.tags))) for e in self.examples),
            "validation": words_fingerprint(sentence.words for sentence in self.validation),
            **{name: getattr(data, name) for name in ("train_weights", "max_batch_tokens", "batch_group_size")},
            **{name: getattr(given, name) for name in ("lora_r", "head_learning_rate")},
            "evaluation_steps": self.arguments.evaluation_steps,
        }

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences of similar length."""
        lengths = np.array([len(example.ids) + 2 for example in self.examples])
        return self.padded_sampler(
            lengths, self.data.max_batch_tokens, consumed, partial(WeightedBatchSampler, self.weights)
        )

    def best_model(self) -> BestModel:
        """The evaluation with the largest labeled F1."""
        return BestModel(lambda evaluation: -evaluation["labeled_f1"], self.arguments.early_stopping_patience)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Parse the validation sentences."""
        return {"step": step, **self._measure("validation", model, self.heldout, self.validation, step)}

    @torch.no_grad()
    def _measure(
        self, name: str, model: nn.Module, examples: list[SpanExample], gold: list[TreebankSentence], step: int
    ) -> dict[str, float]:
        """Labeled F1 (EVALB), precision, recall and right tags in percent; every process calls."""
        plain = self.accelerator.unwrap_model(model).eval()

        def parse(rows: list[int]) -> list[TreebankSentence]:
            with self.accelerator.autocast():
                found = parse_words(plain, [examples[row][:2] for row in rows], [gold[row].words for row in rows])
            return [tree for tree, _ in found]

        lengths = [len(example.ids) for example in examples]
        trees = map_rows(self.accelerator, lengths, self.arguments.per_device_eval_batch_size, parse, name)
        spans = [([label for label, _, _ in t.labeled_spans], [(i, j) for _, i, j in t.labeled_spans]) for t in trees]
        scores = labeled_f1(spans, gold).overall
        right = Counter(
            tag == own for t, s in zip(trees, gold, strict=True) for tag, own in zip(t.tags, s.tags, strict=True)
        )
        result = {
            **{"labeled_f1": 100 * scores.f1, "precision": 100 * scores.precision, "recall": 100 * scores.recall},
            "tags": 100 * right[True] / right.total(),
        }
        text = "  ".join(f"{key} {value:.2f}" for key, value in result.items())
        self.accelerator.print(f"step {step}: {name} of {len(gold)} sentences: {text}")
        self.accelerator.log({f"{name}/{key}": value for key, value in result.items()}, step=step)
        return result

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files and steps, and the encoder."""
        given = self.model_arguments
        return {
            **hub_facts(given.encoder_name or given.encoder or given.model_name_or_path),
            "task": "token-classification",
            "intended_use": "Trees of text that has none, to train syntactic language models on; or parsing.",
            "training_data": f"The trees of {self.data.names()}.",
            "training_procedure": f"The best of {run.state.step} steps of `training/{self.program}.py` by labeled F1 "
            f"on {self.data.names('validation')}, that of step {run.state.notes['best']['step']}; seed "
            f"{self.arguments.seed}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """F1 on the test trees."""
        return {"test": self._measure("test", run.model, self.heldout_test, self.test, step)} if self.test else {}

    def report(self, run: Run, folder: Path, results: dict[str, Any]) -> str:
        """The F1 of the model that is kept."""
        line = (
            f"validation labeled F1 {kept_evaluation(results)['labeled_f1']:.2f} (best at step {results['best_step']})"
        )
        return line + (f"; test labeled F1 {results['test']['labeled_f1']:.2f}" if "test" in results else "")


main = partial(run_recipe, SpanParserRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
