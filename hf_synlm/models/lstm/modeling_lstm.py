# SPDX-License-Identifier: Apache-2.0
"""An LSTM language model: the baseline without trees for the RNNG of Noji and Oseki (ACL Findings 2021).

It is the RNNG without its trees. Token embedding E, L layers of LSTM, and the RNNG's output layer:

    h_t = LSTM(E[x_t], h_t-1);    p(x_t+1 | x_1..t) = softmax(E ReLU(W h_t + b_o) + b_v)

Nonterminals, composition and actions are left out, everything else has the same shape. Every row begins with the begin
token, whether the row contains it or not. The first word is predicted from it. No end of the sentence is predicted, so
that perplexities per word compare with the RNNG's. The softmax runs over all ids, the begin token included, which
training makes improbable.

Shapes: B sentences, T tokens, L layers, H hidden size, E embedding size, V vocabulary, R rows. Losses are in nats.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.utils import can_return_tuple

from hf_synlm.core.cache import CACHE
from hf_synlm.core.hidden_states import asked_of_layers
from hf_synlm.core.losses import check_shares, linear_cross_entropy, share_of
from hf_synlm.core.matrix_products import without_autocast
from hf_synlm.core.module_tools import is_adapted, saved_whole, weight_of
from hf_synlm.core.outputs import SyntacticLMOutput
from hf_synlm.core.rows import after_columns, tokens_first
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.models.lstm.configuration_lstm import LSTMConfig
from hf_synlm.recurrent.cache import RecurrentCache, columns_of, segment_mask
from hf_synlm.recurrent.generation import RecurrentGenerationMixin
from hf_synlm.recurrent.language_model import (
    RecurrentModelOutput,
    RecurrentNetwork,
    RecurrentPreTrainedModel,
    Segment,
)
from hf_synlm.recurrent.layers import lstm_layer


@dataclass
class LSTMModelOutput(RecurrentModelOutput):
    """Output of the bare LSTM.

    Fields, besides those of `RecurrentModelOutput`:
        hidden_states: with `output_hidden_states`, the embeddings, then the states of every layer [B, T, *].
        last_hidden_state: [B, T, H] state of the last layer after the tokens up to each column.
        initial_state: [B, H] the same before the first column: after the begin token, or after the tokens in the cache.
    """

    initial_state: Tensor | None = None


class LSTMPreTrainedModel(RecurrentPreTrainedModel):
    """Loading, saving and initialization shared by the LSTM models."""

    config: LSTMConfig
    _no_split_modules = ["LSTM"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw everything from U(-x, x), or as PyTorch does (see `LSTMConfig.initializer_range`)."""
        if not isinstance(module, (nn.Embedding, nn.Linear, nn.LSTM)):
            return
        bound = self.config.initializer_range
        if bound is None and isinstance(module, nn.Embedding):
            init.normal_(module.weight)
            return
        if bound is None:
            width = module.in_features if isinstance(module, nn.Linear) else module.hidden_size
            bound = width**-0.5
        for parameter in module.parameters(recurse=False):
            init.uniform_(parameter, -bound, bound)


class LSTMModel(RecurrentNetwork, LSTMPreTrainedModel):
    """Embedding and LSTM layers: token ids in, states out (`LSTMModelOutput`).

    A leading `bos_token_id` of a text marks its start; it is not a token. It is read before `inputs_embeds`, too. Cost:
    T steps of L cells for the whole batch.
    """

    _keys_to_ignore_on_load_unexpected = [r"^(lm_head|projection\.1)\.(weight|bias)$"]
    batch_dim = 1

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)
        options = {"batch_first": True, "dropout": config.dropout if config.num_layers > 1 else 0.0}
        self.lstm = saved_whole(nn.LSTM(config.embedding_size, config.hidden_size, config.num_layers, **options))
        self.post_init()

    def embed(
        self,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: RecurrentCache | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """As in `RecurrentNetwork`, with the begin token before the start of a text."""
        begins = cache is None or not cache.is_initialized
        mask = self._read_columns(input_ids, attention_mask, None if begins else cache, inputs_embeds)
        if inputs_embeds is None:
            ids = tokens_first(input_ids.long().masked_fill(~mask, 0), mask)
            return self.embed_tokens(F.pad(ids, (1, 0), value=self.config.bos_token_id) if begins else ids), None, mask
        embedded = tokens_first(inputs_embeds, mask)
        if begins:
            beginning = self.embed_tokens(mask.new_full((len(mask), 1), self.config.bos_token_id, dtype=torch.long))
            embedded = torch.cat([beginning.to(embedded.dtype), embedded], 1)
        return embedded, None, mask

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """Zeros: h and c [L, B, H] of all layers."""
        zeros = embedded.new_zeros(self.config.num_layers, len(embedded), self.config.hidden_size)
        return zeros, zeros

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[LSTMModelOutput, tuple[Tensor, ...]]:
        """Run the layers over a segment; see `RecurrentNetwork`."""
        count_B, inputs = segment.mask.sum(1) + segment.begins, self.dropout(segment.embedded)
        if segment.record or is_adapted(self.lstm):  # `nn.LSTM` does not see what adapters change
            outputs, final = self._read_by_layer(inputs, count_B, state)
        else:
            # In the type of the weights, as in `lstm_layer`.
            with without_autocast(inputs.device.type):
                outputs, final = self._read(inputs, count_B, state, segment.keep_state)
        if not segment.begins:
            before = [torch.zeros_like(outputs[0][:, 0]), *state[0]][-len(outputs) :]
            outputs = [torch.cat([x[:, None].to(y.dtype), y], 1) for x, y in zip(before, outputs, strict=True)]
        after = tuple(after_columns(output, segment.mask) for output in outputs)
        hidden_states = after if segment.record else None
        return LSTMModelOutput(
            last_hidden_state=after[-1], hidden_states=hidden_states, initial_state=outputs[-1][:, 0]
        ), final

    def _read_columns(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        cache: RecurrentCache | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """Mask [B, T] of the columns that hold tokens, the begin token left out."""
        columns = columns_of(input_ids, inputs_embeds)
        if cache is None and inputs_embeds is None:
            return attended_tokens(self.config, input_ids, attention_mask)
        # The beginning was read before, so that a begin token is a token like any other here.
        mask = segment_mask(self.config, input_ids, inputs_embeds, attention_mask, cache)
        return torch.ones_like(columns, dtype=torch.bool) if mask is None else mask

    def _read(
        self, inputs: Tensor, count_B: Tensor, state: tuple[Tensor, ...], need_final: bool
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """States of the last layer after every token, and the state after the last token of each row (if needed)."""
        if not need_final or bool((count_B == inputs.shape[1]).all()):
            states, final = self.lstm(inputs, state)
            return [states], final
        # The state after the last token is that of the last column only in the longest rows. A row may hold no token at
        # all; packing does not know that, so such rows read one column and get their old state back.
        lengths = count_B.clamp_min(1).cpu()
        packed = pack_padded_sequence(inputs, lengths, batch_first=True, enforce_sorted=False)
        packed_states, final = self.lstm(packed, state)
        states, _ = pad_packed_sequence(packed_states, batch_first=True, total_length=inputs.shape[1])
        has_token = (count_B > 0)[None, :, None]
        return [states], tuple(torch.where(has_token, new, old) for new, old in zip(final, state, strict=True))

    def _read_by_layer(
        self, inputs: Tensor, count_B: Tensor, state: tuple[Tensor, ...]
    ) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        """The same with the embeddings and the states of every layer, which `nn.LSTM` does not tell."""
        outputs, final = [inputs], []
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        for layer in range(self.config.num_layers):
            weights = [weight_of(self.lstm, f"{name}_l{layer}") for name in names]
            inputs = self.dropout(outputs[-1]) if layer else outputs[0]
            states, last = lstm_layer(inputs, (state[0][layer], state[1][layer]), weights, count_B)
            outputs.append(states)
            final.append(last)
        return outputs, tuple(torch.stack(parts) for parts in zip(*final, strict=True))


class LSTMForCausalLM(RecurrentGenerationMixin, LSTMPreTrainedModel, GenerationMixin):
    """LSTM language model: next-token log-probabilities, training loss, generation."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: LSTMConfig):
        super().__init__(config)
        self.model = LSTMModel(config)
        self.projection = nn.Sequential(
            nn.Dropout(config.dropout), nn.Linear(config.hidden_size, config.embedding_size), nn.ReLU()
        )
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_shares: Mapping[str, float] | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> SyntacticLMOutput:
        """Next-token log-probabilities, and with `labels` the training loss.

        The loss is the mean of -log p(x_t | x_1..t-1) over the tokens with labels, the first token of a row included:
        it is predicted from the begin token. Nothing is predicted after the last token.

        Args:
            input_ids: [B, T] token ids. A leading `bos_token_id` marks the start; it is not a token.
            attention_mask: [B, T], 1 = token (see `LSTMModel.forward`).
            labels: [B, T] = `input_ids` with -100 where the loss does not count; padding and the begin token never do.
            past_key_values: state to continue from; it is updated in place, and no gradient flows through it.
            use_cache: return the state; default: only if one is given.
            logits_to_keep: compute `logits` for this many last columns only (0 = all), or for these columns.
            loss_shares: by part, the share of a step's items in this call, if a step takes several calls (see
                `count_loss_items`). The losses of the calls then add up to that of all their rows together.
            inputs_embeds: [B, T, E] instead of `input_ids` (see `LSTMModel.forward`).
            **kwargs: `shift_labels` [B, T], labels already shifted: position t holds the target of token t + 1 (so
                that the first token does not count, unless its row begins with the begin token); they replace
                `labels`. `output_hidden_states`, as for `LSTMModel.forward`.

        Returns:
            `SyntacticLMOutput` with `logits` [B, T, V], log p(next token | prefix); they are exact and carry gradients.
            With labels also `loss`, `losses` ("word") and `joint_log_prob` [B], here log p of the tokens of each row
            that have labels; in training mode no `logits` then.

        Raises:
            ValueError: see `LSTMModel.forward`; labels of another shape or outside the vocabulary.
            TypeError: for other keyword arguments.

        Cost: T steps of L cells, and one row of V numbers per token; in training never all of them at once.
        """
        check_shares(loss_shares, ("word",))
        given, shifted = self._given_labels(columns_of(input_ids, inputs_embeds), labels, kwargs)
        output = self.model(
            input_ids, attention_mask, past_key_values, use_cache,
            inputs_embeds=inputs_embeds, return_dict=True, **asked_of_layers(kwargs),
        )  # fmt: skip
        result = SyntacticLMOutput(**{CACHE: output.get(CACHE)}, hidden_states=output.hidden_states)
        if given is None or not self.training:
            result.logits = self._log_probs(
                lambda states: self.lm_head(self.projection(states)), output.last_hidden_state, logits_to_keep
            )
        if given is None:
            return result
        states, mask = output.last_hidden_state, output.token_mask
        if shifted:  # a label is predicted from the state after its column, the first one from the begin token
            mask = _with_beginnings(mask)
        else:  # from the state before its column
            states = torch.cat([output.initial_state[:, None], states[:, :-1]], 1)
        loss, result.joint_log_prob = self._objective(states, given.masked_fill(~mask, -100))
        result.loss = loss * share_of(loss_shares, "word")
        result.losses = {"word": result.loss.detach()}
        return result

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many words the loss is a mean over; it takes the arguments of `forward`, without a cache.

        `training.engine.steps.to_shares` divides it by the count of all calls of a step: the `loss_shares` of a call.
        """
        labels, shifted = others.get("labels"), others.get("shift_labels")
        mask = self.model._read_columns(input_ids, others.get("attention_mask"))
        if shifted is not None:
            labels, mask = shifted, _with_beginnings(mask)
        return {"word": int((labels[mask] != -100).sum())}

    def _objective(self, states: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the labels that count, and their log-probability per row [B] (detached)."""
        row, column = (labels != -100).nonzero(as_tuple=True)
        hidden_RE = self.projection(states[row, column])
        if len(row) == 0:  # nothing to learn, but every parameter gets its (zero) gradient
            return self.lm_head(hidden_RE).sum(), states.new_zeros(len(labels))
        wide = torch.promote_types(hidden_RE.dtype, torch.float32)
        coefficient = hidden_RE.new_full((len(row),), 1 / len(row), dtype=wide)
        loss, loss_R = linear_cross_entropy(
            hidden_RE, weight_of(self.lm_head), labels[row, column].long(), coefficient, self.lm_head.bias
        )
        return loss, -loss_R.new_zeros(len(labels)).index_add(0, row, loss_R)


def _with_beginnings(mask_BT: Tensor) -> Tensor:
    """The columns of tokens, and the one before the first token, where the state is that of the beginning."""
    return mask_BT | F.pad(mask_BT[:, 1:], (0, 1))
