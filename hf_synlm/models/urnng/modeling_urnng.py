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

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_synlm.core.losses import widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, check_tied_words
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import at_places
from hf_synlm.generation.action_decoder import ActionDecoder
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.mixin import SyntacticGenerationMixin
from hf_synlm.generation.tree_states import TreeStates, score_parts
from hf_synlm.models.urnng.configuration_urnng import URNNGConfig
from hf_synlm.models.urnng.layers import BinaryTreeLSTM, URNNGStackLSTM
from hf_synlm.models.urnng.plan import URNNGPlan, make_plan
from hf_synlm.models.urnng.stack_machine import URNNGSearch, URNNGStackMachine
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.synchronous import SynchronousSearch
from hf_synlm.trees.actions import GEN, PAD_ACTION

# Probabilities of actions lie in [1e-7, 1 - 1e-7], as in the authors' code.
_LARGEST_LOGIT = 16.118095


class URNNGPreTrainedModel(SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the URNNG models."""

    config: URNNGConfig
    stack_machine_class = URNNGStackMachine

    def _add_heads(self) -> None:
        self.action_head = nn.Linear(self.config.hidden_size, 1)
        self.lm_head = nn.Linear(self.config.hidden_size, self.config.vocab_size)

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
        logit = widened(logit).clamp(-_LARGEST_LOGIT, _LARGEST_LOGIT)
        return F.logsigmoid(torch.cat([-logit, logit], -1))


class URNNGModel(TreeStates, URNNGPreTrainedModel):
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
        self.add_own_heads(add_heads)
        self.post_init()

    def run(self, input_ids: Tensor, mask: Tensor, plan: URNNGPlan) -> Tensor:
        """Run the stack on given derivations: states [P, h] of the pushes, in the order of the plan.

        Cost: the number of sequential steps grows with the height of trees and the depth of stacks.
        """
        words = self.embed_tokens(input_ids.masked_fill(~mask, 0))
        begin = self.embed_tokens(input_ids.new_full((1, 1), self.config.bos_token_id))[0]  # hooks expect [B, T, D]
        elements = self.composition.compose_all(
            self.dropout(torch.cat([begin, words.flatten(0, 1)])), plan.compositions
        )
        return self.stack_lstm(elements.index_select(0, plan.source), plan.sizes, plan.parents)

    def states_of(self, given: GivenTrees) -> SyntacticModelOutput:
        """States [.., h] of given derivations; see `TreeStates`."""
        actions, mask = given.trees, given.mask
        plan = make_plan(actions, mask)
        live = F.pad(actions != PAD_ACTION, (1, 0), value=True)
        states = self.run(given.input_ids, mask, plan)[plan.place] * live[..., None]
        last = at_places(states[:, 1:][actions == GEN], mask, mask.shape)
        final = states[torch.arange(len(states), device=states.device), live.sum(1) - 1]
        return SyntacticModelOutput(last_hidden_state=last, action_hidden_state=states[:, :-1], sentence_state=final)


class URNNGForCausalLM(SyntacticGenerationMixin, URNNGPreTrainedModel):
    """URNNG with its heads: probabilities of given trees, marginal next-token distribution, search.

    Its `parse` is that of `SyntacticGenerationMixin`; the inference network of training, which reads whole sentences,
    finds other trees.

    Loss: - mean over sentences of log p(words | tree) + w log p(tree), each the product over the steps of the
    derivation; w is `action_weight` of `forward` (1). `actions` are GEN and COMP of the tree of all tokens, an end
    token included; `action_logits` [B, A, 2] are their log-probabilities (0 and -inf where COMP is illegal). Cost: see
    `URNNGModel.run`.
    """

    bare_class = URNNGModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    word_search = URNNGPreTrainedModel.word_search  # and not that of the mixin
    action_decoder_class = ActionDecoder
    tree_options = ("action_weight",)
    predicts_special_tokens = True

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Loss and probability of given derivations; see `TreeScoringMixin`."""
        check_tied_words(self)
        actions, mask, weight = given.trees, given.mask, given.own["action_weight"]
        plan = make_plan(actions, mask)
        states = self.model.dropout(self.model.run(given.input_ids, mask, plan))[plan.place[:, :-1]]
        log_probs = self.action_log_probs(states)
        certain = torch.zeros_like(log_probs)
        certain[..., 1] = -torch.inf
        log_probs = torch.where(plan.forced[..., None], certain, log_probs)
        decided = (actions != PAD_ACTION) & ~plan.forced
        loss = -log_probs[decided].gather(1, actions[decided][:, None]).squeeze(1)
        given.weights = self.loss_weights(given)
        given.weights["action"] *= 1.0 if weight is None else weight
        before, place = states[actions == GEN], mask.nonzero(as_tuple=True)
        output = score_parts(
            self, given, loss, decided.nonzero()[:, 0], before, place, action_logits=log_probs.detach()
        )
        if given.output_logits:
            output.token_logits_given_tree = at_places(self.lm_head(before), place, mask.shape)
        return output
