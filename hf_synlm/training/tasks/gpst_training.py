# SPDX-License-Identifier: Apache-2.0
"""What training GPST adds to a program that may train other models, too."""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from hf_synlm.evaluation.trees.gold_treebank import Treebank, score_numbers, score_table, score_trees
from hf_synlm.evaluation.trees.parsing import ParsingScores
from hf_synlm.training.engine.recipe import Recipe


class GPSTTraining(Recipe):
    """A recipe whose `model_arguments` have a `parser_learning_rate`, which only GPST uses."""

    def learning_rates(self, model: PreTrainedModel) -> dict[str, float]:
        """The parser of GPST has its own."""
        rate = self.model_arguments.parser_learning_rate
        return {} if model.config.model_type != "gpst" or rate is None else {"parser": rate}

    def layers_to_compile(self, model: PreTrainedModel) -> list[nn.Module]:
        """The Transformer layers of GPST and what its chart runs at each level.

        Their shapes vary only in rows and slots, so a few graphs serve all batches.
        """
        levels = Recipe.layers_to_compile(self, model)
        if model.config.model_type != "gpst":
            return levels
        base = model.base_model
        return [*base.type_layers.h, *base.token_layers.h, *base.parser.layers, *levels]

    def score_methods(
        self, model: nn.Module, treebank: Treebank, methods: dict[str, Any], batch_size: int = 32
    ) -> dict[str, ParsingScores]:
        """Scores of the trees by each kind of `methods`, options of `parse`; every process calls."""
        found = {kind: self.parse(model, treebank, batch_size, **options) for kind, options in methods.items()}
        return {kind: score_trees(trees, treebank) for kind, trees in found.items()}

    def tell_trees(self, scores: dict[str, ParsingScores], treebank: Treebank, step: int) -> dict[str, Any]:
        """Print and log scores of validation trees; returns them for JSON."""
        self.accelerator.print(score_table(scores, treebank))
        numbers = score_numbers(scores)
        flat = {f"validation_f1/{kind}": of_kind["sentence_f1"] for kind, of_kind in numbers.items()}
        self.accelerator.log(flat, step=step)
        return numbers
