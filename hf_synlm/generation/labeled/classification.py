# SPDX-License-Identifier: Apache-2.0
"""Classify sentences by their trees: what the classifiers of RNNG and Tree LM have in common.

Shapes: B sentences, T tokens, A actions, h width of a state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import HiddenStateChoice, refuse_arguments
from hf_synlm.core.outputs import SyntacticClassifierOutput
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.generation.labeled.mixin import best_derivations
from hf_synlm.search.parsing import only_token_ids


class TreeReading(NamedTuple):
    """What a classifier gets from one pass over given trees."""

    final: Tensor
    """[B, h] states when the trees are closed."""
    hidden_states: tuple[Tensor | None, ...] | None
    losses: Callable[[], tuple[Tensor, Tensor, Tensor]]
    """Negative log-probability of texts and trees per item, and its parts "action" and "word" (detached)."""


class TreeClassifierMixin:
    """A classifier on the state of a language model when the tree of the sentence is closed.

    A model that inherits it has the classifier, `score`, and a method `_read_trees`, which gives a `TreeReading` of
    given trees.
    """

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

        That search takes nearly all of the time, hundreds of times more than the rest: to classify a text often, keep
        the actions that `parse` of the language model returns, and pass them.

        With `labels`, loss = classification loss + negative log-probability of texts and trees (RNNG: per action and
        word; Tree LM: per token of the linearized tree), so that the model stays a language model.

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right.
            labels: [B] class ids (or targets of a regression, or [B, num_labels] of a multi-label problem).
            actions: [B, A] derivations, 0 = padding.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            output_hidden_states: also return `hidden_states` (see `forward` of the base model).
            output_attentions: not possible (see `forward` of the base model).
            **kwargs: arguments of other models, which wrappers pass as None.

        Returns:
            `SyntacticClassifierOutput`.

        Raises:
            ValueError: see `forward` of the language model; and when the search finds no tree of a sentence.
            TypeError: for other keyword arguments.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        refuse_arguments(kwargs)
        wanted = self.model.wanted_states(output_hidden_states)
        mask = attended_tokens(self.config, input_ids, attention_mask)
        word_ends = self.word_ends_of(input_ids) if word_ends is None else word_ends
        if actions is None:
            actions = best_derivations(self, input_ids, mask, word_ends)
        read = self._read_trees(input_ids, mask, actions, word_ends, wanted)
        logits = self.score(read.final)
        result = SyntacticClassifierOutput(logits=logits, hidden_states=read.hidden_states)
        if labels is not None:
            classification = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            loss, action, word = read.losses()
            result.loss = classification + loss
            result.losses = {"classification": classification.detach(), "action": action, "word": word}
        return result
