# SPDX-License-Identifier: Apache-2.0
"""Train a neural PCFG on the words of text or of treebanks: neural, compound, TN- and simple PCFG.

    accelerate launch training/train_pcfg.py --config pcfg_mini --output-dir runs/pcfg

The grammar learns from words alone; gold trees serve to measure the trees that it finds. Short sentences come first.
The model that is kept is the one with the best validation likelihood, never the one with the best trees. Papers: Kim et
al. (ACL 2019), Yang et al. (NAACL 2021, NAACL 2022), Liu et al. (EMNLP Findings 2023).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from torch import Tensor, nn

from hf_synlm.core.losses import share_of
from hf_synlm.data.arguments import option
from hf_synlm.data.streams import collate_framed
from hf_synlm.evaluation.trees.parsing import CONVENTIONS
from hf_synlm.training.engine.arguments import ModelArguments, TrainingArguments, check_minimum
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.engine.steps import model_loss
from hf_synlm.training.tasks.stream_batches import SentenceDataset, TextDataArguments
from hf_synlm.training.tasks.stream_evaluation import ParsingArguments
from hf_synlm.training.tasks.text_recipe import TextRecipe


@dataclass
class PCFGModelArguments(ModelArguments):
    """The grammar; the preset is 'neural-pcfg', 'compound-pcfg', 'tn-pcfg', 'rank-space-pcfg' or 'simple-pcfg'."""

    program = "train_pcfg"

    architecture: str = option("pcfg", "'pcfg'.")


@dataclass
class PCFGDataArguments(TextDataArguments):
    """Files of text or trees; the words become tokens. Sentences of one word are left out: no grammar has them."""

    max_sentence_words: int | None = option(40, "Leave out sentences with more words, counted after preprocessing.")
    tokenizer_vocab_size: int | None = option(
        10_000, "Largest number of token ids, special tokens and classes of unknown words included."
    )
    batch_group_size: int = option(64, "Sentences of similar length from which the batches are drawn.")

    min_sentence_words = 2


@dataclass
class PCFGParsingArguments(ParsingArguments):
    """Which trees are compared with the grammar's; spans are counted as in the papers of the grammars."""

    parsing_convention: str = option("compound-pcfg", f"How spans are counted: {', '.join(CONVENTIONS)}.")


@dataclass
class CurriculumArguments:
    """Short sentences first."""

    curriculum_words: int = option(30, "Longest sentences of the first epoch in words; 0: all from the start.")
    curriculum_growth: int = option(1, "Words by which the longest sentences of an epoch are longer than before.")

    def __post_init__(self):
        """Check the values."""
        check_minimum(self, 0, "curriculum_words curriculum_growth")
        if self.curriculum_words == 1:
            raise ValueError("curriculum_words is 1, but sentences have two words or more. Use 0 or at least 2.")


@dataclass
class PCFGTrainingArguments(TrainingArguments):
    """The arguments of all programs with the authors' defaults; epochs decide about evaluations here."""

    per_device_train_batch_size: int = option(4, "Sentences per process and micro step.")
    per_device_eval_batch_size: int = option(32, "Sentences per process in evaluation.")
    num_train_epochs: int = option(10, "Passes through the data; 0: max_train_steps decides.")
    learning_rate: float = option(1e-3, "Adam: learning rate.")
    adam_beta1: float = option(0.75, "Adam: decay of the first moment.")
    adam_epsilon: float = option(1e-8, "Adam: term in the denominator.")
    max_grad_norm: float = option(3.0, "Clip gradients to this norm; 0 disables.")
    lr_scheduler_type: Literal["linear", "cosine", "constant"] = option(
        "constant", "Decay after the warm-up: linear or cosine (both to 0), or constant."
    )
    warmup_ratio: float = option(0.0, "Warm-up as a share of all steps.")


class CurriculumSampler(PaddedBatchSampler):
    """Batches of sentences of similar length, in epoch e only those of up to `first` + e `growth` tokens."""

    def __init__(self, first: float, growth: int, *args: Any, **share: Any):
        super().__init__(*args, **share)
        self.first, self.growth = first, growth
        if (shortest := self.lengths.min()) > first:
            raise ValueError(
                f"curriculum_words is {first - 2}, but the shortest training sentence has {shortest - 2} words."
            )

    def samples(self, epoch: int) -> np.ndarray:
        """The sentences of an epoch, by length."""
        samples = super().samples(epoch)
        return samples[: np.searchsorted(self.lengths[samples], self.first + epoch * self.growth, side="right")]


class PCFGRecipe(TextRecipe):
    """Train a PCFG on words; keep the best validation likelihood."""

    program = "train_pcfg"
    parts = ("model_arguments", "data", "parsing", "curriculum", "arguments")
    repeated = "max_batch_tokens batch_group_size curriculum_words curriculum_growth"
    model_arguments: PCFGModelArguments
    data: PCFGDataArguments
    parsing: PCFGParsingArguments
    curriculum: CurriculumArguments
    arguments: PCFGTrainingArguments

    def check(self) -> None:
        """Complete the arguments about trees; refuse characters."""
        super().check()
        if self.data.tokenizer_type != "words":
            raise ValueError(f"tokenizer_type is {self.data.tokenizer_type!r}, but a PCFG reads words. Leave it out.")

    def set_examples(self) -> None:
        """Sentences between boundaries."""
        train = self.streams.train
        self.examples = SentenceDataset(train)
        self.collate = partial(collate_framed, train, pad_token_id=self.tokenizer.pad_token_id)

    def sampler(self, consumed: int = 0) -> PaddedBatchSampler:
        """Sentences of similar length, short ones first."""
        first = self.curriculum.curriculum_words
        first_tokens = first + 2 if first else np.inf  # with both boundaries
        kind = partial(CurriculumSampler, first_tokens, self.curriculum.curriculum_growth)
        return self.padded_sampler(self.examples.lengths, self.data.max_batch_tokens, consumed, kind)

    def compute_loss(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """-log p of the sentences, or its bound; and their mean length, with their ends."""
        loss, parts = model_loss(model, batch)
        tokens = (batch["attention_mask"].sum(1) - 1).float().mean()
        return loss, {**parts, "tokens": tokens * share_of(batch.get("loss_shares"), "language_model")}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """The parts, and the perplexity of the training text."""
        tokens = means["tokens"]
        nats = sum(means[name] for name in ("language_model", "kl") if name in means)
        return {**means, "perplexity": math.exp(min(nats / tokens, 700))}


main = partial(run_recipe, PCFGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
