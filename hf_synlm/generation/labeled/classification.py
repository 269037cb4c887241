# SPDX-License-Identifier: Apache-2.0
"""Classify sentences by their trees: what the classifiers of RNNG and Tree LM have in common.

Shapes: B sentences, T tokens, A actions, h width of a state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import HiddenStateChoice
from hf_synlm.core.outputs import SyntacticClassifierOutput, SyntacticLMOutput
from hf_synlm.generation.tree_states import FindsTrees


class TreeReading(NamedTuple):
    """What a classifier gets from one pass over given trees."""

    final: Tensor
    """[B, h] states when the trees are closed."""
    hidden_states: tuple[Tensor | None, ...] | None
    num_items: int
    """Number of items over which the loss of the language model is a mean."""
    score: Callable[[], SyntacticLMOutput]
    """Loss and probability of texts and trees."""


class TreeClassifierMixin(FindsTrees):
    """A classifier on the state of a language model when the tree of the sentence is closed.

    A model that inherits it has the classifier, `score`, and a method `read_trees`, which gives a `TreeReading` of
    `GivenTrees`.
    """

    bare_class: type[Any]
    """The bare model, whose `_add_heads` the classifier has, too."""

    def __init__(self: Any, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.bare_class(config, add_heads=False)
        self._add_heads()
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        actions: Tensor | None = None,
        word_ends: Tensor | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SyntacticClassifierOutput:
        """Classify sentences by their trees. Where no trees are given, the model's own search finds them.

        That search takes hundreds of times longer than the rest. To classify a text often, keep the actions that
        `parse` of the language model returns, and pass them.

        With `labels`, loss = classification loss + `config.objective_weight` x negative log-probability of texts and
        trees (RNNG: per action and word; Tree LM: per token of the linearized tree), so that the model stays a language
        model. With weight 0 it does not stay one, and its search finds worse trees.

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right.
            labels: [B] class ids (or targets of a regression, or [B, num_labels] of a multi-label problem).
            actions: [B, A] derivations, 0 = padding.
            word_ends: [B, T], True at the last piece of every word; by default as the model knows it.
            output_hidden_states: also return `hidden_states` (see `forward` of the base model).
            output_attentions: not possible (see `forward` of the base model).
            **kwargs: arguments of other models, which wrappers pass as None.

        Returns:
            `SyntacticClassifierOutput`.

        Raises:
            ValueError: see `forward` of the language model; and when the search finds no tree of a sentence.
            TypeError: for other keyword arguments.
        """
        given = self.given_or_best_trees(input_ids, attention_mask, actions, word_ends, output_hidden_states, kwargs)
        read = self.read_trees(given)
        logits = self.score(read.final)
        result = SyntacticClassifierOutput(logits=logits, hidden_states=read.hidden_states)
        if labels is not None:
            classification = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            result.loss, result.losses = classification, {"classification": classification.detach()}
            if self.config.objective_weight:
                given.weights = dict.fromkeys(("action", "word"), 1 / read.num_items)
                scores = read.score()
                result.loss = classification + self.config.objective_weight * scores.loss
                result.losses |= scores.losses
        return result
