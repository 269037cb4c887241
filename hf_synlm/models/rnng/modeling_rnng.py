# SPDX-License-Identifier: Apache-2.0
"""RNNG: recurrent neural network grammars, batched (Dyer et al. 2016; Noji and Oseki 2021).

A stack LSTM reads the partial tree: SHIFT pushes a word, NT(x) an open nonterminal, REDUCE replaces a finished
constituent by one composed vector. The state on the top of the stack predicts the next action and, if it is SHIFT, the
next word. With given actions (teacher forcing), nothing here runs action by action, except attention composition,
which reads the stack: compositions run by height, pushes by stack depth, over all sentences of a batch together.

The slow and obvious version is `naive_log_prob` in `tests/reference/rnng.py`.

Shapes: B sentences, T tokens, A actions of one sentence (or of all, where said), P pushes, W words of all sentences,
w element size, h stack size, V vocabulary, Y nonterminals. Log-probabilities and losses in nats.

Source: the authors' `models.py`, `fixed_stack_models.py` and `fixed_stack_in_order_models.py` (aistairc/rnng-pytorch).
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import initialization as init

from hf_synlm.core.hidden_states import (
    HiddenStateChoice,
    kept_states,
    wanted_states,
)
from hf_synlm.core.losses import linear_cross_entropy, widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, check_tied_words, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import check_rows, columns_of_tokens
from hf_synlm.generation.labeled.classification import TreeClassifierMixin, TreeReading
from hf_synlm.generation.labeled.mixin import DerivationStates, FastTrackGenerationMixin, GivenTrees, WordFinalTokens
from hf_synlm.models.rnng.composition import AttentionComposition, LSTMComposition, chain_inputs
from hf_synlm.models.rnng.configuration_rnng import RNNGConfig
from hf_synlm.models.rnng.particles import ParticleSearch
from hf_synlm.models.rnng.plan import Chains, RNNGPlan, make_plan
from hf_synlm.models.rnng.stack_lstm import StackLSTM
from hf_synlm.models.rnng.stack_machine import RNNGStackMachine
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.trees.given import check_actions


# ---------------------------------------------------------------------------------------------- base model
class RNNGPreTrainedModel(WordFinalTokens, SyntacticPreTrainedModel):
    """Loading, saving and initialization shared by the RNNG models."""

    config: RNNGConfig
    stack_machine_class = RNNGStackMachine

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


class RNNGModel(DerivationStates, RNNGPreTrainedModel):
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
        self.has_heads = add_heads
        if add_heads:
            self.action_head = nn.Linear(size, config.num_actions)
            self.lm_head = nn.Linear(size, config.vocab_size)
        else:
            self._tied_weights_keys = {}
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

    def states_of(
        self, input_ids: Tensor, actions: Tensor, mask: Tensor, word_ends: Tensor | None, wanted: frozenset[int]
    ) -> SyntacticModelOutput:
        """States of given derivations, the prediction vectors and that of the stack; see `DerivationStates`."""
        plan = self.make_plan(actions, mask, word_ends, run_last=True)
        layers = self.run(input_ids, mask, plan, bool(wanted))
        hidden = layers[-1]
        states = self.predictor(hidden[plan.context])
        before = states.new_zeros(*actions.shape, states.shape[1])
        before[plan.action_row, plan.action_column] = states
        return SyntacticModelOutput(
            last_hidden_state=_after_words(states, mask, plan),
            action_hidden_state=before,
            sentence_state=hidden[plan.final],
            hidden_states=self.hidden_states(input_ids, mask, plan, layers, states, wanted),
        )

    def wanted_states(self, choice: HiddenStateChoice) -> frozenset[int]:
        """Places of the hidden states that a call wants; raises ValueError for other places."""
        return wanted_states(self.config, choice, self.config.num_layers + 2)

    def hidden_states(
        self,
        input_ids: Tensor,
        mask: Tensor,
        plan: RNNGPlan,
        layers: list[Tensor],
        states: Tensor,
        wanted: frozenset[int],
    ) -> tuple[Tensor | None, ...] | None:
        """Hidden states [B, T, *] after each token, 0 at padding, and None at places that are not `wanted`.

        `layers` are the states [P, h] of every layer after every push, `states` the vectors [A, w] before every action.
        """
        if not wanted:
            return None
        embedded = self.embed_tokens(input_ids.long().masked_fill(~mask, 0)) * mask[..., None]
        after = [_after_words(layer[plan.context], mask, plan) for layer in layers]
        return kept_states([embedded, *after, _after_words(states, mask, plan)], wanted)


def _after_words(states: Tensor, mask: Tensor, plan: RNNGPlan) -> Tensor:
    """Move states from before every action [A, X] to after every token [B, T, X], 0 at padding."""
    after = states.new_zeros(*mask.shape, states.shape[1])
    # A SHIFT is never the last action: the state after a word is the one before the next action.
    after[_word_places(plan, mask)] = states[plan.shifts + 1]
    return after


def _checked_plan(plan: RNNGPlan, reads_stack: bool, actions: Tensor, mask: Tensor) -> RNNGPlan:
    """A plan made ahead, which must fit the derivations; tensors on a GPU are not read."""
    matches = plan.num_sentences == len(mask) == len(actions)
    if matches and actions.device.type == plan.action.device.type == "cpu":
        taken, words = actions != 0, plan.word_row.bincount(minlength=len(mask))
        matches = torch.equal(actions[taken], plan.action) and torch.equal(words, mask.sum(1))
    if not matches:
        raise ValueError("plan was made for other actions or tokens. Make it anew, or leave it out.")
    return plan


# ---------------------------------------------------------------------------------------------- language model
class RNNGForCausalLM(FastTrackGenerationMixin, RNNGPreTrainedModel):
    """RNNG with its heads: training objective, marginal next-token distribution, search.

    `generate` takes `fast_track_size` besides the options of `SyntacticGenerationMixin.generate`; `num_beams` is the
    word beam and `action_beam_size` the beam inside a word. A generated sentence ends when its tree is closed, which
    `eos_token_id` stands for. With `eos_token_id=None` it goes on until a stopping criterion, which closes its tree.

    Loss: - sum_t log p(a_t | a_<t, x_<) - sum_j log p(x_j | a_<, x_<j). Cost of a pass over given trees: as many
    sequential steps as trees are high and stacks deep (LSTM composition).
    """

    takes_plan, particle_search_class = True, ParticleSearch
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RNNGConfig):
        super().__init__(config)
        self.model = RNNGModel(config, add_heads=False)
        self.action_head = nn.Linear(config.embedding_size, config.num_actions)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    def _joint_log_probs(self, input_ids: Tensor, actions: Tensor, word_ends: Tensor | None = None) -> Tensor:
        word_ends = self.model.word_ends_of(input_ids) if word_ends is None else word_ends
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        plan = self.model.make_plan(actions, mask, word_ends, shared=True)
        hidden = self.model.run(input_ids[:1], mask[:1], plan)[-1]
        before, own = plan.context.unique(return_inverse=True)
        states = self.model.predictor(hidden[before])
        log_probs = widened(self.action_head(states)).log_softmax(1)[own, plan.action]
        shifts, place = own[plan.shifts].unique(return_inverse=True)
        words = torch.empty_like(shifts)
        words[place] = input_ids.flatten().long()  # every derivation shifts the whole text
        _, word_loss = linear_cross_entropy(
            states[shifts], weight_of(self.lm_head), words, torch.ones_like(words), self.lm_head.bias
        )
        log_probs[plan.shifts] -= word_loss[place].to(log_probs.dtype)
        return log_probs.new_zeros(len(actions)).index_add(0, plan.action_row, log_probs)

    def score_trees(self, given: GivenTrees) -> tuple[Tensor, SyntacticLMOutput]:
        """Loss and probability of given derivations; see `FastTrackGenerationMixin`."""
        input_ids, mask, plan = given.input_ids, given.mask, given.plan
        if plan is None:
            plan = self.model.make_plan(given.actions, mask, given.word_ends)
        else:
            plan = _checked_plan(plan, self.model.composition.reads_stack, given.actions, mask).to(input_ids.device)
        layers = self.model.run(input_ids, mask, plan, bool(given.wanted))
        parts = _score_derivations(self, layers[-1], input_ids, mask, given.counted, plan)
        action, word = parts.action_total * given.per_action, parts.word_total * given.per_word
        output = SyntacticLMOutput(
            losses={"action": action.detach(), "word": word.detach()},
            joint_log_prob=parts.joint,
            hidden_states=self.model.hidden_states(input_ids, mask, plan, layers, parts.states, given.wanted),
        )
        if given.output_logits:
            self._add_logits(output, parts, plan, given.actions, mask)
        return action + word, output

    def _add_logits(
        self, output: SyntacticLMOutput, parts: "_Scores", plan: RNNGPlan, actions: Tensor, mask: Tensor
    ) -> None:
        """Logits of the actions and words of given derivations, in the places of the inputs."""
        output.action_logits = parts.action_logits.new_zeros(*actions.shape, parts.action_logits.shape[1])
        output.action_logits[plan.action_row, plan.action_column] = parts.action_logits
        logits = self.lm_head(parts.before_words)
        output.token_logits_given_tree = logits.new_zeros(*mask.shape, logits.shape[1])
        output.token_logits_given_tree[_word_places(plan, mask)] = logits


class _Scores(NamedTuple):
    """Scores of given derivations."""

    states: Tensor
    """[A, w] prediction vectors before the actions."""
    action_logits: Tensor
    """[A, Y] of all actions."""
    action_loss: Tensor
    """[A] - log p of each action."""
    action_total: Tensor
    """Their sum."""
    before_words: Tensor
    """[W, w] prediction vectors before the words."""
    word_loss: Tensor
    """[W] - log p of each word, detached."""
    word_total: Tensor
    """Sum of those that count."""
    joint: Tensor
    """[B] log p(text, tree), detached."""


def _score_derivations(
    model: Any, hidden: Tensor, input_ids: Tensor, mask: Tensor, counted: Tensor, plan: RNNGPlan
) -> _Scores:
    """Run the heads on the states [P, h] of given derivations, in one multiplication each."""
    check_tied_words(model)
    states = model.model.predictor(hidden[plan.context])
    action_logits = widened(model.action_head(states))
    action_loss = F.cross_entropy(action_logits, plan.action, reduction="none")
    before, place = states[plan.shifts], _word_places(plan, mask)
    words = input_ids[place].long()
    weights, head = counted[place].float(), model.lm_head
    word_total, word_loss = linear_cross_entropy(before, weight_of(head), words, weights, head.bias)
    joint = action_loss.new_zeros(len(mask)).index_add(0, plan.action_row, -action_loss.detach())
    joint = joint.index_add(0, plan.word_row, -word_loss.to(joint.dtype))
    return _Scores(states, action_logits, action_loss, action_loss.sum(), before, word_loss, word_total, joint)


def _word_places(plan: RNNGPlan, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and columns [W] of the words of a plan in the input."""
    return plan.word_row, columns_of_tokens(mask)[plan.word_row, plan.word_position]


# ---------------------------------------------------------------------------------------------- classification
class RNNGForSequenceClassification(TreeClassifierMixin, RNNGPreTrainedModel):
    """RNNG with a classifier on the state of the stack when the tree of the sentence is closed.

    Its weights are those of `RNNGForCausalLM`, so that it starts from a language model, and the classifier's.
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RNNGConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RNNGModel(config, add_heads=False)
        self.action_head = nn.Linear(config.embedding_size, config.num_actions)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def _read_trees(
        self, input_ids: Tensor, mask: Tensor, actions: Tensor, word_ends: Tensor | None, wanted: frozenset[int]
    ) -> TreeReading:
        plan = self.model.make_plan(actions, mask, word_ends, run_last=True)
        layers = self.model.run(input_ids, mask, plan, bool(wanted))
        hidden, hidden_states = layers[-1], None
        if wanted:
            states = self.model.predictor(hidden[plan.context])
            hidden_states = self.model.hidden_states(input_ids, mask, plan, layers, states, wanted)

        def losses() -> tuple[Tensor, Tensor, Tensor]:
            parts = _score_derivations(self, hidden, input_ids, mask, mask, plan)
            action, word = parts.action_total, parts.word_total
            count = len(parts.action_loss) + len(parts.word_loss)
            return (action + word) / count, action.detach() / count, word.detach() / count

        return TreeReading(hidden[plan.final], hidden_states, losses)
