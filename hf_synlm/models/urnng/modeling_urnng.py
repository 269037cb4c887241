# SPDX-License-Identifier: Apache-2.0
"""URNNG: an unsupervised recurrent neural network grammar (Kim et al. 2019).

Binary trees without labels are built bottom-up on a stack: GEN pushes a word, COMP replaces the two top constituents by
their composition. A stack LSTM reads the stack; the state on its top predicts the next action, and before GEN the word:

    p(COMP) = sigmoid(w . h + b), where two constituents stand on the stack; otherwise GEN is certain
    p(word) = softmax(E h + b)

A sentence may end in the end token, which is then the right part of the whole tree. Trees are learned without gold
trees by `training/train_urnng.py`, whose inference network proposes them; search, `parse` and `generate` need the model
alone and are those of GPST.

Shapes: B sentences, T tokens, A actions, P pushes, V vocabulary, h width. Log-probabilities and losses in nats.

Source: the authors' `models.py` and `utils.py` (harvardnlp/urnng), whose numbers this gives without dropout. There, an
embedding is dropped again, with another mask, wherever it is read.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import asked_of_layers
from hf_synlm.core.losses import check_shares, linear_cross_entropy, share_of
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, check_tied_words, evaluation_mode, unwrapped, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.generation.mixin import SyntacticGenerationMixin
from hf_synlm.models.urnng.configuration_urnng import URNNGConfig
from hf_synlm.models.urnng.layers import BinaryTreeLSTM, URNNGStackLSTM
from hf_synlm.models.urnng.plan import URNNGPlan, make_plan
from hf_synlm.models.urnng.stack_machine import URNNGSearch, URNNGStackMachine
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.parsing import only_token_ids, parse_with_search
from hf_synlm.search.synchronous import SynchronousSearch
from hf_synlm.trees.actions import GEN, PAD_ACTION
from hf_synlm.trees.given import counted_words

# Probabilities of actions lie in [1e-7, 1 - 1e-7], as in the authors' code.
_LARGEST_LOGIT = 16.118095


class URNNGPreTrainedModel(SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the URNNG models."""

    config: URNNGConfig
    stack_machine_class = URNNGStackMachine

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: everything from U(-x, x)."""
        if isinstance(module, (nn.Embedding, nn.Linear)):
            for parameter in module.parameters(recurse=False):
                init.uniform_(parameter, -self.config.initializer_range, self.config.initializer_range)

    def word_search(
        self, num_beams: int | None = None, eos_token_ids: Tensor | None = None, renormalize: bool = False
    ) -> SynchronousSearch:
        """See `SyntacticGenerationMixin`; the end token of the configuration always ends a sentence."""
        own = self.config.eos_token_id
        search = SynchronousSearch if own is None else URNNGSearch
        ends = None if own is None else torch.tensor([own], device=self.device)
        width = self.config.scoring_num_beams if num_beams is None else num_beams
        return search(self.stack_machine_class(self), width, ends, renormalize)

    def action_log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [..., 2] of GEN and COMP where both are legal, float32 or wider."""
        logit = self.action_head(hidden)
        logit = logit.to(torch.promote_types(logit.dtype, torch.float32)).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        return F.logsigmoid(torch.cat([-logit, logit], -1))


class URNNGModel(URNNGPreTrainedModel):
    """The stack of derivations: states from which heads predict actions and words.

    Args:
        config: sizes.
        add_heads: also create the heads, which are needed to search for a derivation when none is given.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: URNNGConfig, add_heads: bool = True):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.stack_lstm = URNNGStackLSTM(config.hidden_size, config.num_layers, config.dropout)
        self.composition = BinaryTreeLSTM(config.hidden_size)
        self.dropout = nn.Dropout(config.dropout)
        self.has_heads = add_heads
        if add_heads:
            self.action_head = nn.Linear(config.hidden_size, 1)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        else:
            self._tied_weights_keys = {}
        self.post_init()

    def run(self, input_ids: Tensor, mask: Tensor, plan: URNNGPlan) -> Tensor:
        """Run the stack on given derivations: states [P, h] of the pushes, in the order of the plan.

        Cost: as many sequential steps as trees are high and stacks deep.
        """
        words = self.embed_tokens(input_ids.masked_fill(~mask, 0))
        begin = self.embed_tokens(input_ids.new_full((1, 1), self.config.bos_token_id))[0]  # hooks expect [B, T, D]
        elements = self.composition.compose_all(
            self.dropout(torch.cat([begin, words.flatten(0, 1)])), plan.compositions
        )
        return self.stack_lstm(elements.index_select(0, plan.source), plan.sizes, plan.parents)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        actions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> SyntacticModelOutput:
        """States of derivations, which a search finds where they are not given.

        Args:
            input_ids: [B, T] token ids.
            actions: [B, A] GEN and COMP, -1 = padding; default: the best that `parse` of the language model finds.
            attention_mask: [B, T], 1 = token; padding left or right.
            **kwargs: arguments of other models, which wrappers pass as None.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, h] (right after each token; 0 at padding),
            `action_hidden_state` [B, A, h] (before each action) and `sentence_state` [B, h] (when the tree is built).

        Raises:
            ValueError: for bad shapes and ids, and actions that do not derive the tokens.
            TypeError: for other keyword arguments.

        Cost: without `actions` the model first runs `parse`.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        asked_of_layers(kwargs)
        mask = attended_tokens(self.config, input_ids, attention_mask)
        if actions is None:
            if not self.has_heads:
                raise ValueError("actions are missing: parse of the model around this URNNGModel finds them.")
            with evaluation_mode(self):
                actions = parse_with_search(self.word_search(), input_ids, mask).actions[:, 0]
        plan = make_plan(actions, mask)
        live = F.pad(actions != PAD_ACTION, (1, 0), value=True)
        states = self.run(input_ids, mask, plan)[plan.place] * live[..., None]
        last = states.new_zeros(*mask.shape, states.shape[2])
        last[mask] = states[:, 1:][actions == GEN]
        final = states[torch.arange(len(states), device=states.device), live.sum(1) - 1]
        return SyntacticModelOutput(last_hidden_state=last, action_hidden_state=states[:, :-1], sentence_state=final)


class URNNGForCausalLM(SyntacticGenerationMixin, URNNGPreTrainedModel):
    """URNNG with its heads: probabilities of given trees, marginal next-token distribution, search.

    Its `parse` is that of `SyntacticGenerationMixin`; the inference network of training, which reads whole sentences,
    finds other trees.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    word_search = URNNGPreTrainedModel.word_search  # and not that of the mixin
    predicts_special_tokens = True

    def __init__(self, config: URNNGConfig):
        super().__init__(config)
        self.model = URNNGModel(config, add_heads=False)
        self.action_head = nn.Linear(config.hidden_size, 1)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        actions: Tensor | None = None,
        action_weight: float = 1.0,
        past_key_values: Any | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_marginal_logits: bool | None = None,
        loss_shares: Mapping[str, float] | None = None,
        return_loss: bool = True,
        output_logits: bool = False,
        **kwargs: Any,
    ) -> SyntacticLMOutput:
        """Probability of given trees with `actions`, next-token log-probabilities without.

        With `actions`: loss = - mean over sentences of log p(words | tree) + action_weight log p(tree), each the
        product over the steps of the derivation. Without: `logits`, log p(next token | prefix) with the trees summed
        out over the search; nothing after a position changes its value.

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right. By default everything but padding.
            actions: [B, A] GEN and COMP of the tree of all tokens, an end token included; -1 = padding.
            action_weight: weight of log p(tree) in the loss.
            past_key_values: search state to continue from.
            use_cache: return the search state.
            logits_to_keep: compute `logits` for this many last positions only (0 = all).
            output_marginal_logits: with `actions`, compute `logits` as well, at the cost of those alone; default:
                `config.output_marginal_logits`, in evaluation mode.
            loss_shares: by part, the share of a step's sentences that this call holds, where a step takes several calls
                (see `count_loss_items`): the losses of the calls add up to that of all their rows together.
            return_loss: with `actions`, return the loss. (By this argument Trainer knows that actions have one.)
            output_logits: with `actions`, also return `token_logits_given_tree` [B, T, V].
            **kwargs: `word_ends` [B, T] without actions (see `parse`); with actions `labels` [B, T] = `input_ids` with
                -100 where the word loss does not count. Besides, None values for arguments of other models.

        Returns:
            `SyntacticLMOutput`; with `actions` its `joint_log_prob` [B] is log p(words, tree), and `action_logits`
            [B, A, 2] are the log-probabilities of GEN and COMP (0 and -inf where COMP is illegal).

        Raises:
            ValueError: for bad shapes and ids, actions that do not derive the tokens, and options that exclude
                each other.
            TypeError: for other keyword arguments.

        Cost: with actions see `URNNGModel.run`. Logits: T words, each a few passes over the beam.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        word_ends, labels = kwargs.pop("word_ends", None), kwargs.pop("labels", None)
        asked_of_layers(kwargs)
        check_shares(loss_shares, ("action", "word"))
        if actions is None:
            if labels is not None or loss_shares is not None or action_weight != 1.0 or output_logits:
                raise ValueError(
                    "labels, loss_shares, action_weight, output_logits need actions: of `parse` or inference networks."
                )
            return self._marginal_forward(
                input_ids, attention_mask, past_key_values, use_cache, logits_to_keep, word_ends
            )
        if word_ends is not None and not self.wants_logits_beside(output_marginal_logits):
            raise ValueError("word_ends go with next-token logits: the actions say what the tree is. Leave them out.")
        check_tied_words(self)
        mask = attended_tokens(self.config, input_ids, attention_mask)
        plan = make_plan(actions, mask)
        states = self.model.dropout(self.model.run(input_ids, mask, plan))[plan.place[:, :-1]]
        log_probs = self.action_log_probs(states)
        certain = torch.zeros_like(log_probs)
        certain[..., 1] = float("-inf")
        log_probs = torch.where(plan.forced[..., None], certain, log_probs)
        taken = log_probs.gather(2, actions.clamp(min=0)[..., None]).squeeze(2)
        taken = torch.where((actions == PAD_ACTION) | plan.forced, 0.0, taken).sum(1)
        shifts, row = actions == GEN, mask.nonzero()[:, 0]
        per_word = counted_words(input_ids, labels, mask)[mask].float() / len(mask)
        head, share = self.lm_head, share_of(loss_shares, "word")
        word_loss, nats = linear_cross_entropy(
            states[shifts], weight_of(head), input_ids[mask], per_word * share, unwrapped(head).bias
        )
        action_loss = -taken.mean() * (action_weight * share_of(loss_shares, "action"))
        result = SyntacticLMOutput(
            loss=word_loss + action_loss if return_loss else None,
            losses={"action": action_loss.detach(), "word": word_loss.detach()},
            joint_log_prob=taken.detach().index_add(0, row, -nats.to(taken.dtype)),
            action_logits=log_probs.detach(),
        )
        if output_logits:
            words = head(states[shifts])
            result.token_logits_given_tree = words.new_zeros(*mask.shape, words.shape[1])
            result.token_logits_given_tree[mask] = words
        if self.wants_logits_beside(output_marginal_logits):
            result.logits = self.logits_beside(input_ids, attention_mask, word_ends=word_ends)
        return result

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """Number of sentences over which each part of the loss is a mean.

        `training.engine.steps.to_shares` divides them by those of all calls of a step: the `loss_shares` of a call.

        Args:
            input_ids: [B, T], as for `forward`.
            **others: further arguments of `forward`; they change no count.

        Returns:
            Counts by the names of `losses`.
        """
        return {"action": len(input_ids), "word": len(input_ids)}
