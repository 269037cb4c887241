# SPDX-License-Identifier: Apache-2.0
"""Train a constituency parser on treebanks: an encoder of transformers with scores of spans.

    accelerate launch --mixed_precision bf16 training/train_span_parser.py --config span_parser_mini \
        --encoder FOLDER --train-files trees.train.txt --validation-files trees.valid.txt --output-dir runs/parser

The model that is kept is the one with the best labeled F1 on the validation trees. The parser gives trees to text that
has none (`synlm silver --parser`), so that syntactic language models can be trained on it.
"""

from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import numpy as np
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from hf_synlm import SpanParserForTokenClassification
from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.data.text import plural
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.trees.evalb import labeled_f1
from hf_synlm.evaluation.trees.treebank_parsing import parse_encoded
from hf_synlm.hub.checkpoint import check_tokenizer_source
from hf_synlm.training.arguments.base import check_overrides
from hf_synlm.training.arguments.treebank import SpanDataArguments, SpanParserModelArguments
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.engine.run import Run, add_lora
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.engine.steps import map_rows
from hf_synlm.training.tasks.span_batches import (
    SpanExample,
    WeightedBatchSampler,
    collate_spans,
    encode_spans,
    labels_and_tags,
    tokenizer_of_treebanks,
)
from hf_synlm.training.tasks.tree_evaluation import spread
from hf_synlm.training.tasks.word_tokenizers import words_fingerprint

HEADS = ("left", "right", "norm", "label_head", "tag_head")
# Learning rate of the heads beside that of an encoder all of whose weights are trained.
HEAD_RATE = 5.0
MAX_WORDS = 80  # of a training sentence


class SpanParserRecipe(Recipe):
    """Train a span parser on gold trees; keep the best validation F1."""

    program = "train_span_parser"
    text_style = "treebank"
    score = "labeled_f1"
    repeated = "train_weights max_batch_tokens batch_group_size lora_r evaluation_steps"
    model_arguments: SpanParserModelArguments
    data: SpanDataArguments
    examples: list[SpanExample]

    def load(self) -> PreTrainedModel:
        """Read the trees, and make tokenizer and model."""
        data = self.data
        train = data.read(data.train_files)
        model = self._new_model([sentence for part in train for sentence in part if len(sentence.words) <= MAX_WORDS])
        encode = partial(encode_spans, tokenizer=self.tokenizer, config=model.config)
        limit = model.config.max_position_embeddings
        weighted = [
            (example, weight)
            for part, weight in zip(train, data.train_weights, strict=True)
            for example in encode(part)
            if len(example.tags) <= MAX_WORDS and example.sentence.num_tokens + 2 <= limit
        ]
        self.examples, self.weights = [example for example, _ in weighted], np.array([w for _, w in weighted])
        parts = data.read(data.validation_files)
        self.validation = [part[row] for part in parts for row in spread(len(part), data.evaluation_sentences)]
        self.test = list(chain.from_iterable(data.read(data.test_files)))
        self.choice = f"labeled F1 on {data.names('validation')}"
        self.heldout, self.heldout_test = encode(self.validation), encode(self.test)
        self.collate = partial(collate_spans, pad_token_id=model.config.pad_token_id)
        self.accelerator.print(
            f"{len(self.examples):,} training sentences, {int(self.weights.sum()):,} an epoch; "
            f"{len(self.validation):,} for validation; {len(model.config.nonterminals)} labels, "
            f"{len(model.config.tags)} tags"
        )
        return model

    def _new_model(self, sentences: list[TreebankSentence]) -> PreTrainedModel:
        given, make = self.model_arguments, SpanParserForTokenClassification
        check_tokenizer_source(str(given.encoder))
        self.tokenizer = tokenizer_of_treebanks(AutoTokenizer.from_pretrained(given.encoder))
        fields = check_overrides(make.config_class, given.config_overrides, ("nonterminals", "tags"))
        labels: Any = labels_and_tags(sentences)
        model: Any = make.from_encoder(str(given.encoder), tokenizer=self.tokenizer, **labels, **fields)
        if given.lora_r:
            add_lora(model, given.lora_r, given.encoder_name)
        model.get_input_embeddings().requires_grad_(False)  # half of the encoder, which learns little of it
        return model

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """The layers on an encoder that is trained have their own."""
        rate = HEAD_RATE * self.arguments.learning_rate
        return {} if self.model_arguments.lora_r else dict.fromkeys(HEADS, rate)

    def fingerprints(self) -> tuple[str, str]:
        """Of the examples, and of the words."""
        train = words_fingerprint(tuple(map(str, example)) for example in self.examples)
        return train, words_fingerprint(sentence.words for sentence in self.validation)

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Batches of sentences of similar length."""
        lengths = np.array([example.sentence.num_tokens + 2 for example in self.examples])
        kind = partial(WeightedBatchSampler, self.weights)
        return self.padded_sampler(lengths, self.data.max_batch_tokens, consumed, kind)

    def best_model(self) -> BestModel:
        """The evaluation with the largest labeled F1."""
        return BestModel(lambda found: -found["losses"]["labeled_f1"], self.arguments.early_stopping_patience)

    def evaluate(self, model: nn.Module, step: int) -> dict[str, Any]:
        """Parse the validation sentences."""
        return self._measure("validation", model, self.heldout, self.validation, step)

    def _measure(
        self, name: str, model: nn.Module, examples: list[SpanExample], gold: list[TreebankSentence], step: int
    ) -> dict[str, Any]:
        """Labeled F1 (EVALB), precision, recall and right tags in percent; every process calls."""
        plain, size = self.accelerator.unwrap_model(model), self.arguments.per_device_eval_batch_size

        def parse(rows: list[int]) -> list[ParsedSentence]:
            return parse_encoded(plain, [examples[row].sentence for row in rows], batch_size=size)

        found = map_rows(self.accelerator, [e.sentence.num_tokens for e in examples], size, parse, name)
        scores = labeled_f1([(one.tree().labels, one.tree().spans) for one in found], gold).overall
        pairs = zip(chain.from_iterable(s.tags for s in gold), chain.from_iterable(s.tags for s in found), strict=True)
        shares = {"labeled_f1": scores.f1, "precision": scores.precision, "recall": scores.recall}
        shares["tags"] = fmean(tag == own for tag, own in pairs)
        result = {key: 100 * value for key, value in shares.items()}
        self.tell(step, name, f" of {plural(len(gold), 'sentence')}", result, ".2f")
        return {"step": step, "losses": result}

    def base_model(self) -> str | None:
        """The encoder."""
        return self.model_arguments.encoder_name or self.model_arguments.encoder

    def card_facts(self, run: Run) -> dict[str, Any]:
        """Files and steps."""
        return {
            **super().card_facts(run),
            "task": "token-classification",
            "intended_use": "Parsing, also to make the trees on which syntactic language models are trained.",
            "training_data": f"The trees of {self.data.names()}.",
        }

    def final_results(self, run: Run, step: int) -> dict[str, Any]:
        """F1 on the test trees."""
        return {"test": self._measure("test", run.model, self.heldout_test, self.test, step)} if self.test else {}


main = partial(run_recipe, SpanParserRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
