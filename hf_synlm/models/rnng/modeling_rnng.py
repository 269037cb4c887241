# SPDX-License-Identifier: Apache-2.0
"""RNNG: recurrent neural network grammars, batched (Dyer et al. 2016; Noji and Oseki 2021).

A stack LSTM reads the partial tree: SHIFT pushes a word, NT(x) an open nonterminal, REDUCE replaces a finished
constituent by one composed vector. The state on the top of the stack predicts the next action and, if it is SHIFT, the
next word. With given actions (teacher forcing), compositions run by height and pushes by stack depth, over all
sentences of a batch together. Only attention composition, which reads the stack, runs action by action.

The slow and obvious version is `naive_log_prob` in `tests/reference/rnng.py`.

Shapes: B sentences, T tokens, A actions of one sentence (or of all, where said), P pushes, W words of all sentences,
w element size, h stack size, V vocabulary, Y nonterminals. Log-probabilities and losses in nats.

Source: the authors' `models.py`, `fixed_stack_models.py` and `fixed_stack_in_order_models.py` (aistairc/rnng-pytorch).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_synlm.core.hidden_states import (
    kept_states,
)
from hf_synlm.core.losses import linear_cross_entropy, widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, check_tied_words, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import at_places, check_rows, columns_of_tokens
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.labeled.classification import TreeClassifierMixin, TreeReading
from hf_synlm.generation.labeled.mixin import FastTrackGenerationMixin, LabeledTrees
from hf_synlm.generation.tree_states import TreeStates, score_parts
from hf_synlm.models.rnng.composition import AttentionComposition, LSTMComposition, chain_inputs
from hf_synlm.models.rnng.configuration_rnng import RNNGConfig
from hf_synlm.models.rnng.particles import DEFAULT_PARTICLES, ParticleSearch
from hf_synlm.models.rnng.plan import Chains, RNNGPlan, make_plan
from hf_synlm.models.rnng.stack_lstm import StackLSTM
from hf_synlm.models.rnng.stack_machine import RNNGStackMachine
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.trees.given import check_actions


# ---------------------------------------------------------------------------------------------- base model
class RNNGPreTrainedModel(LabeledTrees, SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the RNNG models."""

    config: RNNGConfig
    stack_machine_class = RNNGStackMachine

    def _add_heads(self) -> None:
        self.action_head = nn.Linear(self.config.embedding_size, self.config.system.num_actions)
        self.lm_head = nn.Linear(self.config.embedding_size, self.config.vocab_size)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors do: PyTorch's defaults, or everything from U(-x, x)."""
        bound = self.config.initializer_range
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight) if bound is None else init.uniform_(module.weight, -bound, bound)
            if module.padding_idx is not None and bound is None:
                init.zeros_(module.weight[module.padding_idx])
        elif isinstance(module, nn.Linear):
            limit = module.in_features**-0.5 if bound is None else bound
            init.uniform_(module.weight, -limit, limit)
            if module.bias is not None:
                init.uniform_(module.bias, -limit, limit)
        elif isinstance(module, (nn.LSTM, nn.LSTMCell)):
            limit = module.hidden_size**-0.5 if bound is None else bound
            for parameter in module.parameters():
                init.uniform_(parameter, -limit, limit)
        elif isinstance(module, RNNGModel):
            initial = module.initial_element
            init.normal_(initial) if bound is None else init.uniform_(initial, -bound, bound)
            if self.config.subwords:
                init.ones_(module.word_final)


class RNNGModel(TreeStates, RNNGPreTrainedModel):
    """The stack machine: states of derivations, from which heads predict actions and words.

    Args:
        config: sizes.
        add_heads: also create the heads, which are needed to search for a derivation when none is given. Models with
            heads of their own leave them out.
    """

    _tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}

    def __init__(self, config: RNNGConfig, add_heads: bool = True):
        super().__init__(config)
        size, labels = config.embedding_size, len(config.nonterminals)
        self.embed_tokens = nn.Embedding(config.vocab_size, size, padding_idx=config.pad_token_id)
        self.embed_nonterminals = nn.Embedding(labels, size)
        self.initial_element = nn.Parameter(torch.zeros(size))
        self.stack_lstm = StackLSTM(size, config.hidden_size, config.num_layers, config.dropout)
        self.composition: LSTMComposition | AttentionComposition
        if config.composition == "lstm":
            self.composition = LSTMComposition(size, config.dropout)
        else:
            self.composition = AttentionComposition(size, labels, config.dropout)
        self.dropout = nn.Dropout(config.dropout)
        self.output = nn.Linear(config.hidden_size, size)
        if config.subwords:
            self.word_final = nn.Buffer(torch.ones(config.vocab_size, dtype=torch.bool))
        self.add_own_heads(add_heads)
        self.post_init()

    def make_plan(
        self,
        actions: Tensor,
        mask: Tensor,
        word_ends: Tensor | None = None,
        run_last: bool = False,
        shared: bool = False,
    ) -> RNNGPlan:
        """Lay out given derivations [B, A] on the device of the model; see `make_plan` in models/rnng/plan.py."""
        check_actions(actions, mask, word_ends)
        check_rows(mask)
        rows = [[action for action in row if action] for row in actions.tolist()]
        ends = None
        if word_ends is not None:
            ends = [
                [end for end, token in zip(*pair, strict=True) if token]
                for pair in zip(word_ends.tolist(), mask.tolist(), strict=True)
            ]
        plan = make_plan(
            rows,
            transition_system=self.config.transition_system,
            num_labels=len(self.config.nonterminals),
            num_words=mask.sum(1).tolist(),
            word_ends=ends,
            by_level=self.config.composition == "lstm",
            run_last=run_last,
            shared=shared,
        )
        return plan.to(self.initial_element.device)

    def run(self, input_ids: Tensor, mask: Tensor, plan: Any, every_layer: bool = False) -> list[Tensor]:
        """Run the stack machine on given derivations: states [P, h] of the last layer, or of every layer.

        They are those after every push, in the order of the plan.
        """
        # Hooks of NEFTune expect [B, T, w] and read the length of a text from it.
        words = self.embed_tokens(input_ids.long().masked_fill(~mask, 0))[_word_places(plan, mask)]
        bottoms = self.initial_element.expand(plan.num_sentences, -1)
        parts = [bottoms, words, self.embed_nonterminals(plan.label)]
        elements = self.dropout(torch.cat(parts))
        if not self.composition.reads_stack:
            for chains in plan.compositions:
                elements = torch.cat([elements, self.composition(chain_inputs(elements, chains), chains)])
            if not plan.compositions and torch.is_grad_enabled():
                # Distributed training waits for a gradient of every parameter, even if all trees are flat.
                elements = elements + 0.0 * sum(value.sum() for value in self.composition.parameters())
            return self.stack_lstm.by_level(elements, plan, every_layer)
        first = torch.arange(plan.num_sentences, device=elements.device)
        place = torch.cat([first, plan.word_push, plan.label_push])
        elements = elements.new_zeros(sum(plan.sizes), elements.shape[1]).index_copy(0, place, elements)
        parameters = [*self.composition.parameters(), *self.output.parameters()]
        return self.stack_lstm.by_step(elements, plan, self._compose_on_stack, parameters, every_layer)

    def _compose_on_stack(self, inputs: Tensor, chains: Chains, labels: Tensor, tops: Tensor) -> Tensor:
        return self.composition(inputs, chains, labels, self.predictor(tops))

    def predictor(self, hidden: Tensor) -> Tensor:
        """The vector [..., w] that action head and word head share: ReLU(W_o h + b_o)."""
        return F.relu(self.output(self.dropout(hidden)))

    def states_of(self, given: GivenTrees) -> SyntacticModelOutput:
        """States of given derivations, the prediction vectors and that of the stack; see `TreeStates`."""
        mask, actions = given.mask, given.trees
        plan = self.make_plan(actions, mask, given.word_ends, run_last=True)
        layers = self.run(given.input_ids, mask, plan, bool(given.wanted))
        states = self.predictor(layers[-1][plan.context])
        return SyntacticModelOutput(
            last_hidden_state=_after_words(states, mask, plan),
            action_hidden_state=at_places(states, (plan.action_row, plan.action_column), actions.shape),
            sentence_state=layers[-1][plan.final],
            hidden_states=self.hidden_states(given, plan, layers, states),
        )

    @property
    def num_states(self) -> int:
        """See `TreeStates`."""
        return self.config.num_layers + 2

    def hidden_states(
        self, given: GivenTrees, plan: RNNGPlan, layers: list[Tensor], states: Tensor
    ) -> tuple[Tensor | None, ...] | None:
        """Hidden states [B, T, *] after each token, 0 at padding, and None at places that are not wanted.

        `layers` has the states [P, h] of each layer after every push, `states` the vectors [A, w] before every action.
        """
        mask = given.mask
        if not given.wanted:
            return None
        embedded = self.embed_tokens(given.input_ids.long().masked_fill(~mask, 0)) * mask[..., None]
        after = [_after_words(layer[plan.context], mask, plan) for layer in layers]
        return kept_states([embedded, *after, _after_words(states, mask, plan)], given.wanted)


def _after_words(states: Tensor, mask: Tensor, plan: RNNGPlan) -> Tensor:
    """Move states from before every action [A, X] to after every token [B, T, X], 0 at padding."""
    # A SHIFT is never the last action: the state after a word is the one before the next action.
    return at_places(states[plan.shifts + 1], _word_places(plan, mask), mask.shape)


def _checked_plan(plan: RNNGPlan, actions: Tensor, mask: Tensor) -> RNNGPlan:
    """A plan made ahead, which must fit the derivations; tensors on a GPU are not read."""
    matches = plan.num_sentences == len(mask) == len(actions)
    if matches and actions.device.type == plan.action.device.type == "cpu":
        taken, words = actions != 0, plan.word_row.bincount(minlength=len(mask))
        matches = torch.equal(actions[taken], plan.action) and torch.equal(words, mask.sum(1))
    if not matches:
        raise ValueError("plan was made for other actions or tokens. Make the plan again, or leave it out.")
    return plan


# ---------------------------------------------------------------------------------------------- language model
class RNNGForCausalLM(FastTrackGenerationMixin, RNNGPreTrainedModel):
    """RNNG with its heads: training objective, marginal next-token distribution, search.

    `generate` takes `fast_track_size` besides the options of `SyntacticGenerationMixin.generate`; `num_beams` is the
    word beam and `action_beam_size` the beam inside a word. A generated sentence ends when its tree is closed, which
    `eos_token_id` stands for. With `eos_token_id=None` it goes on until a stopping criterion, which closes its tree.

    Loss: - sum_t log p(a_t | a_<t, x_<) - sum_j log p(x_j | a_<, x_<j). Cost of a pass over given trees: the number of
    sequential steps grows with the height of trees and the depth of stacks (LSTM composition). `forward` also takes the
    `plan` of `actions`, if it was made ahead (`make_plan` in models/rnng/plan.py).
    """

    tree_options = ("plan",)
    bare_class = RNNGModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def other_search(
        self, method: str, num_particles: int | None, normalization: str | None, **options: Any
    ) -> ParticleSearch:
        """The search of `parse` with method="particle"; see `FastTrackGenerationMixin`."""
        if method != "particle":
            raise ValueError(f"{type(self).__name__} has no method {method!r}. Choose 'search' or 'particle'.")
        if options.get("stepwise") or options.get("belief_update"):
            raise ValueError("method='particle' gives neither stepwise probabilities nor belief updates.")
        machine = self.stack_machine_class(self, normalization)
        return ParticleSearch(machine, DEFAULT_PARTICLES if num_particles is None else num_particles)

    def score_prefixes(self, given: GivenTrees) -> Tensor:
        """Log-probabilities of trees of one text; see `TreeScoringMixin`."""
        ids, mask = given.input_ids, given.mask
        plan = self.model.make_plan(given.trees, mask, given.word_ends, shared=True)
        hidden = self.model.run(ids[:1], mask[:1], plan)[-1]
        before, own = plan.context.unique(return_inverse=True)
        states = self.model.predictor(hidden[before])
        log_probs = widened(self.action_head(states)).log_softmax(1)[own, plan.action]
        shifts, place = own[plan.shifts].unique(return_inverse=True)
        words = torch.empty_like(shifts)
        words[place] = ids.flatten()  # every derivation shifts the whole text
        _, word_loss = linear_cross_entropy(
            states[shifts], weight_of(self.lm_head), words, torch.ones_like(words), self.lm_head.bias
        )
        log_probs[plan.shifts] -= word_loss[place].to(log_probs.dtype)
        return log_probs.new_zeros(len(ids)).index_add(0, plan.action_row, log_probs)

    def score_trees(self, given: GivenTrees) -> SyntacticLMOutput:
        """Loss and probability of given derivations; see `TreeScoringMixin`."""
        ids, actions, mask, plan = given.input_ids, given.trees, given.mask, given.own["plan"]
        if plan is None:
            plan = self.model.make_plan(actions, mask, given.word_ends)
        else:
            plan = _checked_plan(plan, actions, mask).to(ids.device)
        layers = self.model.run(ids, mask, plan, bool(given.wanted))
        states = self.model.predictor(layers[-1][plan.context])
        given.weights = self.loss_weights(given)
        hidden_states = self.model.hidden_states(given, plan, layers, states)
        return _score_derivations(self, given, states, plan, hidden_states=hidden_states)


def _score_derivations(
    model: Any, given: GivenTrees, states: Tensor, plan: RNNGPlan, **fields: Any
) -> SyntacticLMOutput:
    """Run the heads on the vectors [A, w] before the actions of given derivations, in one multiplication each."""
    check_tied_words(model)
    logits = widened(model.action_head(states))
    loss = F.cross_entropy(logits, plan.action, reduction="none")
    before, place = states[plan.shifts], _word_places(plan, given.mask)
    output = score_parts(model, given, loss, plan.action_row, before, place, **fields)
    if given.output_logits:
        output.action_logits = at_places(logits, (plan.action_row, plan.action_column), given.trees.shape)
        output.token_logits_given_tree = at_places(model.lm_head(before), place, given.mask.shape)
    return output


def _word_places(plan: RNNGPlan, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [W] of the words of a plan in the input."""
    return plan.word_row, columns_of_tokens(mask)[plan.word_row, plan.word_position]


# ---------------------------------------------------------------------------------------------- classification
class RNNGForSequenceClassification(TreeClassifierMixin, RNNGPreTrainedModel):
    """RNNG with a classifier on the state of the stack when the tree of the sentence is closed.

    Its weights are those of `RNNGForCausalLM`, so that it starts from a language model, and the classifier's.
    """

    bare_class = RNNGModel
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def read_trees(self, given: GivenTrees) -> TreeReading:
        """The state when the tree is closed; see `TreeClassifierMixin`."""
        plan = self.model.make_plan(given.trees, given.mask, given.word_ends, run_last=True)
        layers = self.model.run(given.input_ids, given.mask, plan, bool(given.wanted))
        states = self.model.predictor(layers[-1][plan.context])
        return TreeReading(
            layers[-1][plan.final],
            self.model.hidden_states(given, plan, layers, states),
            len(plan.action) + len(plan.shifts),
            lambda: _score_derivations(self, given, states, plan),
        )
