# SPDX-License-Identifier: Apache-2.0
"""Train a neural PCFG on the words of text or of treebanks: neural, compound, TN- and simple PCFG.

    accelerate launch training/train_pcfg.py --config pcfg_mini --output-dir runs/pcfg

The grammar learns from words alone; gold trees only serve to score the trees that it finds. Short sentences come first.
The model that is kept is the one with the best validation likelihood, never the one with the best trees. Papers: Kim et
al. (ACL 2019), Yang et al. (NAACL 2021, NAACL 2022), Liu et al. (EMNLP Findings 2023).
"""

from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn

from hf_synlm.core.losses import share_of
from hf_synlm.evaluation.text.perplexity import perplexity_of
from hf_synlm.training.arguments.base import refuse
from hf_synlm.training.arguments.text import CurriculumArguments, PCFGDataArguments
from hf_synlm.training.engine.runner import run_recipe
from hf_synlm.training.engine.samplers import PaddedBatchSampler
from hf_synlm.training.engine.steps import model_loss
from hf_synlm.training.tasks.text_recipe import TextRecipe


class CurriculumSampler(PaddedBatchSampler):
    """Batches of sentences of similar length, in epoch e only those of up to `first` + e `growth` tokens."""

    def __init__(self, first: float, growth: int, *args: Any, **share: Any):
        super().__init__(*args, **share)
        self.first, self.growth = first, growth
        if (shortest := self.lengths.min()) > first:
            raise ValueError(
                f"Raise --curriculum-words from {first - 2} to {shortest - 2}, the shortest training sentence."
            )

    def samples(self, epoch: int) -> np.ndarray:
        """The sentences of an epoch, by length."""
        samples = super().samples(epoch)
        return samples[: np.searchsorted(self.lengths[samples], self.first + epoch * self.growth, side="right")]


class PCFGRecipe(TextRecipe):
    """Train a PCFG on words; keep the best validation likelihood."""

    program = "train_pcfg"
    repeated = "max_batch_tokens batch_group_size curriculum_words curriculum_growth"
    data: PCFGDataArguments
    curriculum: CurriculumArguments

    def check(self) -> None:
        """Complete the arguments about trees; refuse characters."""
        super().check()
        refuse(self.data, "tokenizer_type", "but a PCFG reads words")

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
        return {**means, "perplexity": perplexity_of(nats / tokens)}


main = partial(run_recipe, PCFGRecipe)
"""Run the program with a command line (default: the process's)."""


if __name__ == "__main__":
    main()
