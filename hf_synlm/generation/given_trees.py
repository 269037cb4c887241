# SPDX-License-Identifier: Apache-2.0
"""`forward` with given trees, the same for all architectures: checks, the loss and its parts, next-token logits.

    forward(input_ids, actions=..)   ->   score_trees(GivenTrees)   ->   loss, losses, joint_log_prob, ..

An architecture writes `score_trees`. A `forward` names what the architecture reads besides the text, because Trainer
drops columns of a batch that `forward` does not name.

Shapes: B sentences, T tokens, A actions, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import HiddenStateChoice, refuse_arguments, wanted_states
from hf_synlm.core.losses import check_shares, share_of
from hf_synlm.core.module_tools import also_takes, evaluation_mode
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.search.parsing import only_token_ids


@dataclass
class GivenTrees:
    """Trees that a call gives, and what it wants to know of them."""

    config: Any
    input_ids: Tensor
    attention_mask: Tensor | None
    trees: Any
    """As `forward` takes them."""
    word_ends: Tensor | None = None
    labels: Tensor | None = None
    loss_shares: Mapping[str, float] | None = None
    wanted: frozenset[int] = frozenset()
    """Places of the hidden states."""
    output_attentions: bool | None = None
    output_logits: bool = False
    own: dict[str, Any] = field(default_factory=dict)
    """Arguments of this architecture alone."""
    weights: dict[str, float] = field(default_factory=dict)
    """Factors of the sums over the decisions about trees, and over the words, by the names of `losses`."""

    @cached_property
    def mask(self) -> Tensor:
        """[B, T] tokens; ids and mask are checked."""
        return attended_tokens(self.config, self.input_ids, self.attention_mask)


class TreeScoringMixin:
    """`forward` of a language model that gives probabilities to given trees."""

    tree_field = "actions"
    """Name of the trees among the arguments of `forward`."""
    tree_options: tuple[str, ...] = ()
    """Arguments of `forward` about given trees that no other architecture has."""
    loss_parts: tuple[str, ...] = ("action", "word")
    """Parts of the loss: of the trees, and of the words."""
    bare_class: type[Any]
    """The bare model, whose `_add_heads` this one has, too."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model = self.bare_class(config, add_heads=False)
        self._add_heads()  # type: ignore[attr-defined]
        self.post_init()  # type: ignore[attr-defined]

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Hook: output for given trees, with their loss."""
        raise NotImplementedError  # every architecture writes it

    def given_trees(
        self: Any, input_ids: Tensor, attention_mask: Tensor | None, trees: Any, **wants: Any
    ) -> GivenTrees:
        """Hook: the trees of a call."""
        return GivenTrees(self.config, input_ids, attention_mask, trees, **wants)

    @can_return_tuple
    def forward_with_trees(
        self: Any,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        trees: Any,
        *,
        word_ends: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool = False,
        output_marginal_logits: bool | None = None,
        loss_shares: Mapping[str, float] | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        return_loss: bool = True,
        **kwargs: Any,
    ) -> SyntacticLMOutput:
        """Loss and probability of given trees; without trees, next-token log-probabilities: every `forward`.

        Without trees, `logits` are log p(next token | prefix) with the trees summed out over the search. Nothing after
        a position changes its value. These probabilities assume that the sentence goes on.

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right. By default everything but padding.
            trees: as the architecture takes them.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            past_key_values: search state to continue from.
            use_cache: return the search state.
            logits_to_keep: compute `logits` for this many last positions only (0 = all).
            output_logits: also return `action_logits` and `token_logits_given_tree` of given trees.
            output_marginal_logits: with trees, compute `logits` as well, at the cost of those alone; default:
                `config.output_marginal_logits`, in evaluation mode.
            loss_shares: by part, the share of a step's items that this call holds, where a step takes several calls
                (see `count_loss_items`): the losses of the calls add up to that of all their rows together.
            output_hidden_states: also return `hidden_states` of the trees, all or those at the places given.
            output_attentions: also return `attentions`, if the model keeps them (GPST).
            return_loss: with trees, return the loss. (By this argument Trainer knows that trees have one.)
            **kwargs: `labels` [B, T] = `input_ids` with -100 where the word loss does not count; they need trees.
                Trainer drops a column of this name unless it is among its `label_names`. Arguments of the architecture
                alone (`tree_options`). Besides, None values, which wrappers pass for arguments of other models.

        Returns:
            `SyntacticLMOutput`; with trees its `joint_log_prob` [B] is log p(text, tree).

        Raises:
            ValueError: for bad shapes and ids, trees that are none of the tokens, labels without trees, and options
                that exclude each other.
            TypeError: for other keyword arguments.

        Cost: with trees, see the architecture. Logits: T words, each a few passes over the beam.
        """
        # Not in the signature: Trainer takes labels that are there for required.
        labels, own = kwargs.pop("labels", None), {name: kwargs.pop(name, None) for name in self.tree_options}
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        refuse_arguments(kwargs)
        check_shares(loss_shares, self.loss_parts)
        wanted = wanted_states(self.config, output_hidden_states, self.base_model.num_states)
        if trees is None:
            asked = {"labels": labels, "output_logits": output_logits or None, "loss_shares": loss_shares, **own}
            idle = [name for name, value in asked.items() if value is not None]
            if idle:
                raise ValueError(
                    f"{', '.join(idle)} need {self.tree_field}: {type(self).__name__} computes a loss only of given "
                    f"trees. Pass the {self.tree_field} of a treebank, or of trees that parse finds."
                )
            options = {"use_cache": use_cache, "logits_to_keep": logits_to_keep, "word_ends": word_ends}
            return self._marginal_forward(input_ids, attention_mask, past_key_values, **options)
        given = self.given_trees(
            input_ids, attention_mask, trees, word_ends=word_ends, labels=labels, loss_shares=loss_shares,
            wanted=wanted, output_attentions=output_attentions, output_logits=output_logits, own=own,
        )  # fmt: skip
        output = self.score_trees(given)
        if not return_loss:
            output = SyntacticLMOutput(**{name: value for name, value in output.items() if name != "loss"})
        if self.wants_logits_beside(output_marginal_logits):
            with torch.no_grad(), evaluation_mode(self):
                output.logits = self._marginal_forward(input_ids, attention_mask, word_ends=word_ends).logits
        return output

    @also_takes(forward_with_trees)
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        actions: Tensor | None = None,
        **options: Any,
    ) -> SyntacticLMOutput:
        """Loss and probability of given derivations with `actions`, next-token log-probabilities without.

        The loss is the negative log-probability of actions and words (see the class of the model).

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right. By default everything but padding.
            actions: [B, A] complete derivations, padded at the right end (see `config.tree_codec`).
            **options: see `forward_with_trees`.

        Returns:
            `SyntacticLMOutput`, with `output_logits` `action_logits` [B, A, Y] and `token_logits_given_tree` [B, T, V].
        """
        return self.forward_with_trees(input_ids, attention_mask, actions, **options)

    def loss_weights(self: Any, given: GivenTrees) -> dict[str, float]:
        """`GivenTrees.weights`: shares of this call, divided by the items of the parts of the loss."""
        trees = {"attention_mask": given.attention_mask, "labels": given.labels, self.tree_field: given.trees}
        counts = self.count_loss_items(given.input_ids, **trees)
        return {name: share_of(given.loss_shares, name) / max(1, counts.get(name, 1)) for name in self.loss_parts}

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many items the parts of the loss are divided by, here sentences; it takes the arguments of `forward`.

        Divided by the counts of all calls of a step, these are the `loss_shares` of a call:
        `training.engine.steps.to_shares`.
        """
        return dict.fromkeys(self.loss_parts, len(input_ids))

    def wants_logits_beside(self: Any, asked: bool | None) -> bool:
        """Whether a call with a loss gives next-token logits as well; in training only on request."""
        return self.config.output_marginal_logits and not self.training if asked is None else asked

    @torch.no_grad()
    def joint_log_probs(self: Any, input_ids: Tensor, word_ends: Tensor | None = None, **trees: Any) -> Tensor:
        """Log p(text, tree) [K] of several trees of one text, as `forward` gives it.

        Args:
            input_ids: [K, T], the text K times, without padding and begin token.
            word_ends: [K, T] as in `forward`; RNNG, Tree LM and GPST read them.
            **trees: the trees as `forward` takes them: actions, attachments or spans.

        Returns:
            The values in nats, without dropout.

        Raises:
            ValueError: as `forward`; and for rows that are not one text, or have a begin token.

        Cost: as `forward`. RNNG reads each distinct beginning of the trees once; so do the layers and heads of Tree LM,
        Pushdown Layers and GPST where the trees share enough. Tree LM then has numbers for all pairs of beginnings.
        """
        input_ids = input_ids.long()
        with evaluation_mode(self):
            given = self.given_trees(input_ids, torch.ones_like(input_ids), trees[self.tree_field], word_ends=word_ends)
            if not bool(given.mask.all()) or bool((input_ids != input_ids[:1]).any()):
                raise ValueError(
                    f"joint_log_probs: the rows of input_ids {input_ids.tolist()} must hold one and the same text, "
                    "without a begin token."
                )
            found = self.score_prefixes(given)
            if found is None:
                found = self(input_ids, given.attention_mask, word_ends=word_ends, **trees).joint_log_prob
            return found

    def score_prefixes(self, given: GivenTrees) -> Tensor | None:
        """Hook: `joint_log_probs`, where each beginning is read once; None where this does not pay."""
        return None
