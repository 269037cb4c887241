"""RNNG: recurrent neural network grammars, batched (Dyer et al. 2016; Noji and Oseki 2021).

A stack LSTM reads the partial tree: SHIFT pushes a word, NT(x) an open nonterminal, REDUCE replaces a finished
constituent by one composed vector. From the state on the top of the stack come the next action and, if it is SHIFT,
the next word. With the actions given, nothing here runs action by action (but attention composition, which reads the
stack): compositions run by height, pushes by stack depth, over all sentences of a batch together.

Shapes: B sentences, T tokens, A actions of one sentence (or of all, where said), P pushes, W words of all sentences,
w element size, h stack size, V vocabulary, Y nonterminals. Log-probabilities and losses in nats.

Source: the authors' `models.py`, `fixed_stack_models.py` and `fixed_stack_in_order_models.py` (aistairc/rnng-pytorch).
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import can_return_tuple

from .composition_rnng import AttentionComposition, LSTMComposition, chain_inputs
from .configuration_rnng import RNNGConfig
from .linear_cross_entropy import linear_cross_entropy
from .modeling_outputs import SyntacticLMOutput, SyntacticModelOutput
from .schedule_rnng import LevelSchedule, RNNGSchedule, StepSchedule, make_schedule
from .stack_lstm_rnng import StackLSTM
from .token_batch import attended_tokens


# ---------------------------------------------------------------------------------------------- base model
class RNNGPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialization shared by the RNNG models."""

    config: RNNGConfig
    base_model_prefix = "model"
    accepts_loss_kwargs = False  # the loss has a normalizer of its own: see `loss_normalization`
    _no_split_modules = ["RNNGModel"]
    _skip_keys_device_placement = ["past_key_values"]
    _input_embed_layer = "embed_tokens"

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


class RNNGModel(RNNGPreTrainedModel):
    """The stack machine: states of given derivations, from which heads predict actions and words."""

    def __init__(self, config: RNNGConfig):
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
            self.register_buffer("word_final", torch.ones(config.vocab_size, dtype=torch.bool))
        self.post_init()

    def word_ends_of(self, input_ids: Tensor) -> Tensor | None:
        """Which tokens end a word [B, T], by their ids; None where every token does."""
        return self.word_final[input_ids] if self.config.subwords else None

    def make_schedule(
        self,
        actions: Tensor,
        mask: Tensor,
        word_ends: Tensor | None = None,
        run_last: bool = False,
    ) -> RNNGSchedule:
        """Lay out given derivations; see `schedule_rnng.make_schedule`.

        Args:
            actions: [B, A], 0 = padding.
            mask: [B, T], True = token.
            word_ends: [B, T], True at the last piece of every word.
            run_last: also execute the last action of each derivation.

        Returns:
            The schedule, on the device of the model.

        Raises:
            ValueError: for sequences that are no derivations of the tokens.
        """
        _check_actions(actions, mask)
        rows = [[action for action in row if action] for row in actions.tolist()]
        ends = None
        if word_ends is not None:
            ends = [
                [end for end, token in zip(*pair, strict=True) if token]
                for pair in zip(word_ends.tolist(), mask.tolist(), strict=True)
            ]
        schedule = make_schedule(
            rows,
            transition_system=self.config.transition_system,
            num_labels=len(self.config.nonterminals),
            num_words=mask.sum(1).tolist(),
            word_ends=ends,
            by_level=self.config.composition == "lstm",
            run_last=run_last,
        )
        return schedule.to(self.initial_element.device)

    def run(self, input_ids: Tensor, mask: Tensor, schedule: RNNGSchedule) -> Tensor:
        """States of the last layer of the stack LSTM after every push [P, h], in the order of the schedule.

        Args:
            input_ids: [B, T].
            mask: [B, T], True = token.
            schedule: of the derivations.
        """
        column = (~mask).to(torch.uint8).argsort(dim=1, stable=True)  # tokens first
        words = input_ids[schedule.word_row, column[schedule.word_row, schedule.word_position]]
        bottoms = self.initial_element.expand(schedule.num_sentences, -1)
        parts = [bottoms, self.embed_tokens(words), self.embed_nonterminals(schedule.label)]
        elements = self.dropout(torch.cat(parts))
        if isinstance(schedule, LevelSchedule):
            for chains in schedule.compositions:
                elements = torch.cat([elements, self.composition(chain_inputs(elements, chains), chains)])
            return self.stack_lstm.by_level(elements, schedule)
        assert isinstance(schedule, StepSchedule)
        first = torch.arange(schedule.num_sentences, device=elements.device)
        place = torch.cat([first, schedule.word_push, schedule.label_push])
        elements = elements.new_zeros(sum(schedule.sizes), elements.shape[1]).index_copy(0, place, elements)
        parameters = [*self.composition.parameters(), *self.output.parameters()]
        return self.stack_lstm.by_step(elements, schedule, self._compose_on_stack, parameters)

    def _compose_on_stack(self, inputs: Tensor, chains: Any, labels: Tensor, tops: Tensor) -> Tensor:
        return self.composition(inputs, chains, labels, self.predictor(tops))

    def predictor(self, hidden: Tensor) -> Tensor:
        """z = ReLU(W_o h + b_o) [..., w], which the action head and the word head share."""
        return F.relu(self.output(self.dropout(hidden)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        actions: Tensor,
        attention_mask: Tensor | None = None,
        word_ends: Tensor | None = None,
    ) -> SyntacticModelOutput:
        """States of given derivations.

        Args:
            input_ids: [B, T] token ids.
            actions: [B, A] complete derivations, 0 = padding: `parse` of the language model finds them.
            attention_mask: [B, T], 1 = token; padding left or right.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, w] (the prediction vector right after each token;
            zeros at padding), `action_hidden_state` [B, A, w] (before each action), `sentence_state` [B, h] (the
            stack's state when the derivation is over).

        Raises:
            ValueError: for bad shapes and ids, and for sequences that are no derivations of the tokens.

        Cost: see `schedule_rnng`.
        """
        mask = attended_tokens(self.config, input_ids, attention_mask)
        word_ends = self.word_ends_of(input_ids) if word_ends is None else word_ends
        schedule = self.make_schedule(actions, mask, word_ends, run_last=True)
        hidden = self.run(input_ids, mask, schedule)
        states = self.predictor(hidden[schedule.context])
        before = states.new_zeros(*actions.shape, states.shape[1])
        before[schedule.action_row, schedule.action_column] = states
        # A SHIFT is never the last action: the state after a word is the one before the next action.
        after = states.new_zeros(*input_ids.shape, states.shape[1])
        column = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        row = schedule.word_row
        after[row, column[row, schedule.word_position]] = states[schedule.shifts + 1]
        return SyntacticModelOutput(
            last_hidden_state=after, action_hidden_state=before, sentence_state=hidden[schedule.final]
        )


def _check_actions(actions: Tensor, mask: Tensor) -> None:
    if actions.dim() != 2 or len(actions) != len(mask) or actions.is_floating_point():
        raise ValueError(
            f"actions must be integers [batch, actions] for {len(mask)} rows, not {actions.dtype} "
            f"{tuple(actions.shape)}."
        )


# ---------------------------------------------------------------------------------------------- language model
class RNNGForCausalLM(RNNGPreTrainedModel):
    """RNNG with its heads: training objective, marginal next-token distribution, search."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: RNNGConfig):
        super().__init__(config)
        self.model = RNNGModel(config)
        self.action_head = nn.Linear(config.embedding_size, config.num_actions)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        actions: Tensor | None = None,
        word_ends: Tensor | None = None,
        schedule: RNNGSchedule | None = None,
        output_logits: bool = False,
    ) -> SyntacticLMOutput:
        """Training objective with `actions`."""
        mask = attended_tokens(self.config, input_ids, attention_mask)
        word_ends = self.model.word_ends_of(input_ids) if word_ends is None else word_ends
        if schedule is None:
            schedule = self.model.make_schedule(actions, mask, word_ends)
        return self._given_tree(input_ids, mask, actions, schedule, output_logits)

    def _given_tree(
        self, input_ids: Tensor, mask: Tensor, actions: Tensor, schedule: RNNGSchedule, output_logits: bool
    ) -> SyntacticLMOutput:
        """Log-probabilities of the actions and words of given derivations.

        loss = - sum_t log softmax(W_a z_t)[a_t] - sum_j log softmax(E z_j + b)[x_j], over all classes
        """
        states = self.model.predictor(self.model.run(input_ids, mask, schedule)[schedule.context])
        action_logits = self.action_head(states).float()
        action_loss = F.cross_entropy(action_logits, schedule.action, reduction="none")
        before = states[schedule.shifts]
        column = (~mask).to(torch.uint8).argsort(dim=1, stable=True)
        place = (schedule.word_row, column[schedule.word_row, schedule.word_position])
        words = input_ids[place]
        word_total, word_loss = linear_cross_entropy(
            before, self.lm_head.weight, words, torch.ones_like(words, dtype=torch.float32), self.lm_head.bias
        )
        count = {"batch": len(mask), "sum": 1, "action": len(action_loss), "token": len(words)}
        divisor = count[self.config.loss_normalization]
        joint = action_loss.new_zeros(len(mask)).index_add(0, schedule.action_row, -action_loss.detach())
        joint = joint.index_add(0, schedule.word_row, -word_loss.to(joint.dtype))
        output = SyntacticLMOutput(
            loss=(action_loss.sum() + word_total) / divisor,
            losses={"action": action_loss.detach().sum() / divisor, "word": word_loss.sum() / divisor},
            joint_log_prob=joint,
        )
        if output_logits:
            full = action_logits.new_zeros(*actions.shape, action_logits.shape[1])
            full[schedule.action_row, schedule.action_column] = action_logits
            logits = self.lm_head(before)
            given = logits.new_zeros(*input_ids.shape, logits.shape[1])
            given[place] = logits
            output.action_logits, output.token_logits_given_tree = full, given
        return output


__all__ = ["RNNGForCausalLM", "RNNGModel", "RNNGPreTrainedModel"]
