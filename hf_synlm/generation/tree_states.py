# SPDX-License-Identifier: Apache-2.0
"""Architectures whose states are those of one given tree: their bare models, and the loss of their decisions and words.

Shapes: B sentences, T tokens, A actions, N decisions about trees, W words of all sentences, D width.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import HiddenStateChoice, refuse_arguments, wanted_states
from hf_synlm.core.losses import linear_cross_entropy
from hf_synlm.core.module_tools import also_takes, evaluation_mode, unwrapped, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.parsing import only_token_ids, parse_with_search
from hf_synlm.trees.given import counted_words


def score_parts(
    model: Any,
    given: GivenTrees,
    action_loss: Tensor,
    action_row: Tensor,
    before: Tensor,
    place: tuple[Tensor, ...],
    **fields: Any,
) -> SyntacticLMOutput:
    """Loss and probability of given trees, beside further `fields` of the output.

    `action_loss` [N] is - log p of each decision about a tree, `action_row` [N] its sentence; `before` [W, D] are the
    states that predict the words, `place` their rows and columns [W].
    """
    words, head = given.input_ids[place].long(), model.lm_head
    counts = counted_words(given.input_ids, given.labels, given.mask)[place].float()
    total, word_loss = linear_cross_entropy(before, weight_of(head), words, counts, unwrapped(head).bias)
    joint = action_loss.new_zeros(len(given.mask)).index_add(0, action_row, -action_loss.detach())
    joint = joint.index_add(0, place[0], -word_loss.to(joint.dtype))
    (structure, per_action), (lexical, per_word) = given.weights.items()
    action, word = action_loss.sum() * per_action, total * per_word
    losses = {structure: action.detach(), lexical: word.detach()}
    return SyntacticLMOutput(loss=action + word, losses=losses, joint_log_prob=joint, **fields)


class FindsTrees:
    """`forward` of a model with heads finds the trees that are not given."""

    @torch.no_grad()
    def best_trees(self: Any, input_ids: Tensor, mask: Tensor, word_ends: Tensor | None) -> Tensor:
        """Hook: the best trees that the search with the heads of the model finds, as `forward` takes them."""
        with evaluation_mode(self):
            output = parse_with_search(self.word_search(), input_ids, mask, word_ends=word_ends)
        # In-order, the tree of one word may be the bare word: no span, but a derivation.
        missing = [row for row, trees in enumerate(output.spans) if not trees]
        if missing:
            raise ValueError(
                f"The search finds no tree for row {missing[0]}. Pass trees, or raise scoring_num_beams and "
                "action_beam_size of the configuration."
            )
        return output.actions[:, 0]

    def given_or_best_trees(
        self: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        trees: Tensor | None,
        word_ends: Tensor | None,
        output_hidden_states: HiddenStateChoice,
        others: dict[str, Any],
    ) -> GivenTrees:
        """Arguments of `forward`, checked; `others` are those that it does not know."""
        input_ids = only_token_ids(input_ids, others.pop("inputs_embeds", None))
        refuse_arguments(others)
        wanted = wanted_states(self.config, output_hidden_states, self.base_model.num_states)
        given = GivenTrees(self.config, input_ids, attention_mask, trees, word_ends, wanted=wanted)
        mask = given.mask
        if word_ends is None:
            given.word_ends = self.word_ends_of(input_ids)
        if trees is None:
            given.trees = self.best_trees(input_ids, mask, given.word_ends)
        return given


class TreeStates(FindsTrees):
    """`forward` of a bare model that reads given trees; it writes `states_of`."""

    tree_field = "actions"

    def add_own_heads(self: Any, add_heads: bool) -> None:
        """Add the heads that a search for trees needs, unless the model around has its own."""
        self.has_heads = add_heads
        if add_heads:
            self._add_heads()
        else:
            self._tied_weights_keys = dict[str, str]()

    @property
    def num_states(self) -> int:
        """Hook: number of hidden states."""
        return 0

    def states_of(self, given: GivenTrees) -> SyntacticModelOutput:
        """Hook: states of given trees."""
        raise NotImplementedError  # every architecture writes it

    @can_return_tuple
    def states_with_trees(
        self: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        trees: Tensor | None,
        *,
        word_ends: Tensor | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SyntacticModelOutput:
        """States of trees: every `forward` of a bare model.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; padding left or right.
            trees: as the architecture takes them; default: the best ones, as `parse` of the language model finds them.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            output_hidden_states: also return `hidden_states`, all or those at the places given.
            output_attentions: not possible: weights are not kept.
            **kwargs: arguments of other models, which wrappers pass as None.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, *] (right after each token).

        Raises:
            ValueError: for bad shapes and ids, trees that are none of the tokens, and when the search finds no tree of
                a sentence.
            TypeError: for other keyword arguments.

        Cost: without trees the model first runs `parse`, hundreds of times slower.
        """
        if trees is None and not self.has_heads:
            raise ValueError(
                f"{self.tree_field} are missing. Pass given trees. Or call parse of the model around this "
                f"{type(self).__name__}, and pass its trees."
            )
        given = self.given_or_best_trees(input_ids, attention_mask, trees, word_ends, output_hidden_states, kwargs)
        return self.states_of(given)

    @also_takes(states_with_trees)
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        actions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **options: Any,
    ) -> SyntacticModelOutput:
        """States of derivations, which a search finds where they are not given.

        Args:
            input_ids: [B, T] token ids.
            actions: [B, A] complete derivations, padded at the right end; default: the best that `parse` of the
                language model finds.
            attention_mask: [B, T], 1 = token; padding left or right.
            **options: see `states_with_trees`.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, *] (right after each token; zeros at padding),
            `action_hidden_state` [B, A, *] (before each action), `sentence_state` [B, *] (when the tree is closed).
        """
        return self.states_with_trees(input_ids, attention_mask, actions, **options)
