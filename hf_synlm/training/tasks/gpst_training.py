# SPDX-License-Identifier: Apache-2.0
"""What training GPST adds to a program that may train other models, too."""

from torch import nn
from transformers import PreTrainedModel

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
