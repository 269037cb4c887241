# SPDX-License-Identifier: Apache-2.0
"""PaLM: a language model that attends to the spans right before each word (Peng, Schwartz and Smith, EMNLP 2019).

An AWD-LSTM (Merity et al., ICLR 2018), whose last layer but one also looks back at the K spans of 1 to K tokens that
end right before the token just read:

    h = LSTMs(x),    a_t = attention(h_t; spans that end at t - 1),    g = sigmoid(W_g [h ; a] + b_g)
    z = g * h + (1 - g) * tanh(W_c a + b_c),    p(x_t+1 | x_1..t) = softmax(E LSTM(z)_t + b)

The scores of the attention define a tree, top down: a constituent is split where the score of its right part, read at
the token after it, is highest. Trees are only induced (PaLM-U), or the attention is trained on given spans (PaLM-S).
Without the attention the model is the AWD-LSTM (`span_attention=False`).

Source: where paper and code (Noahs-ARK/PaLM) differ, this follows the code, and `PaLMConfig` has options for most
differences. It follows the paper in three points. No token sees later tokens or other rows of a batch. The loss of
PaLM-S is missing in the code. The scores of PaLM-RB are ten times those of the code. In the code the last row of the
embedding gets no gradient, by accident; here it does.

Shapes: B sentences, T tokens, K spans, H hidden size, E embedding size, D width of span vectors, V vocabulary. Losses
are in nats.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.generation import GenerationMixin
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import state_at_columns
from hf_synlm.core.matrix_products import OneDNNLinear
from hf_synlm.core.module_tools import also_takes
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.models.palm.configuration_palm import PaLMConfig
from hf_synlm.models.palm.span_attention import SpanAttention, attention_loss, gold_attention, split_by_scores
from hf_synlm.recurrent.cache import columns_of
from hf_synlm.recurrent.language_model import (
    RecurrentLanguageModel,
    RecurrentLMOutput,
    RecurrentModelOutput,
    RecurrentNetwork,
    RecurrentPreTrainedModel,
    RecurrentSequenceClassifier,
    Segment,
    WeightedLoss,
    activation_losses,
)
from hf_synlm.recurrent.layers import embedding_dropout, locked_dropout, lstm_layer, weight_dropout
from hf_synlm.trees.spans import Span


@dataclass
class PaLMModelOutput(RecurrentModelOutput):
    """Output of the bare PaLM.

    Fields, besides those of `RecurrentModelOutput`:
        query_states: [B, T, H] inputs of the attention: the output of the layer below it, after dropout.
        hidden_states: with `output_hidden_states`, the embeddings, then the output of every LSTM layer [B, T, *]
            (before the span attention mixes it).
        attentions: with `output_attentions`, one tensor: the weights [B, T, K] of the spans, the longest first.
    """

    query_states: Tensor | None = None


class WeightDropLSTM(nn.LSTM):
    """One LSTM layer; in training, single recurrent weights are left out for a whole segment."""

    weight_ih_l0: Tensor
    weight_hh_l0: Tensor
    bias_ih_l0: Tensor
    bias_hh_l0: Tensor

    def __init__(self, input_size: int, hidden_size: int, dropout: float) -> None:
        super().__init__(input_size, hidden_size, batch_first=True)
        self.weight_dropout = dropout

    # `nn.LSTM` declares overloads for packed sequences, which this layer does not take.
    def forward(  # type: ignore[override]
        self, inputs_BTI: Tensor, state: tuple[Tensor, Tensor], lengths_B: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs [B, T, H], and the state (h, c), each [B, H], after the first `lengths_B` inputs of each row."""
        recurrent = weight_dropout(self.weight_hh_l0, self.weight_dropout, self.training, rescale=True)
        weights = [self.weight_ih_l0, recurrent, self.bias_ih_l0, self.bias_hh_l0]
        return lstm_layer(inputs_BTI, state, weights, lengths_B)


class SpanContext(nn.Module):
    """Span attention with its residual gate, before the last LSTM layer."""

    def __init__(self, config: PaLMConfig) -> None:
        super().__init__()
        self.dropout = config.hidden_dropout
        self.attention = SpanAttention(config)
        self.projection = OneDNNLinear(2 * config.rrnn_size, config.layer_size)
        self.residual_gate = OneDNNLinear(config.layer_size + 2 * config.rrnn_size, config.layer_size)

    def forward(self, hidden_BTH: Tensor, query_BTH: Tensor, history_BKH: Tensor) -> tuple[Tensor, Tensor]:
        """Mix hidden states with the context of spans.

        Args:
            hidden_BTH: output of the layer below.
            query_BTH: the same after dropout.
            history_BKH: the last queries before these.

        Returns:
            Mixed states [B, T, H] and the scores of the spans [B, T, K].
        """
        context, scores_BTK = self.attention(query_BTH, history_BKH)
        context = self._drop(context)
        gate = self.residual_gate(torch.cat([query_BTH, context], -1)).sigmoid()
        projected = self._drop(self.projection(context).tanh())
        return self._drop(gate * hidden_BTH + (1 - gate) * projected), scores_BTK

    def _drop(self, values_BTD: Tensor) -> Tensor:
        return locked_dropout(values_BTD, self.dropout, self.training)


class PaLMPreTrainedModel(RecurrentPreTrainedModel):
    """Loading, saving and initialization shared by the PaLM models."""

    config: PaLMConfig
    _no_split_modules = ["WeightDropLSTM", "SpanContext"]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialize as the authors of PaLM do, AWD-LSTM too (whose authors do otherwise); all biases start at 0."""
        if isinstance(module, nn.Embedding):
            bound = (3 / module.embedding_dim) ** 0.5
            init.uniform_(module.weight, -bound, bound)
        elif isinstance(module, nn.Linear):
            bound = getattr(module, "initial_bound", (6 / (module.in_features + module.out_features)) ** 0.5)
            init.uniform_(module.weight, -bound, bound)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, WeightDropLSTM):
            for name, parameter in module.named_parameters():
                if name.startswith("bias"):
                    init.zeros_(parameter)
                else:  # each gate by itself
                    gates = [init.orthogonal_(torch.empty_like(gate)) for gate in parameter.chunk(4)]
                    init.copy_(parameter, torch.cat(gates))


class PaLMModel(RecurrentNetwork, PaLMPreTrainedModel):
    """Embedding, LSTM layers and span attention: token ids in, states out (`PaLMModelOutput`).

    The state holds (h, c) of every layer and the last K queries of the attention. Cost: T steps of L cells, and K steps
    of the attention for all tokens at once.
    """

    def __init__(self, config: PaLMConfig):
        super().__init__(config)
        sizes = [config.embedding_size, *config.layer_sizes]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.embedding_size)
        self.layers = nn.ModuleList(
            WeightDropLSTM(*pair, config.weight_dropout) for pair in zip(sizes, sizes[1:], strict=False)
        )
        self.span_context = SpanContext(config) if config.span_attention else None
        self.post_init()

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """Zeros: h and c of every layer, and K queries."""
        like, config = self.embed_tokens.weight, self.config
        state = [like.new_zeros(len(embedded), size) for size in config.layer_sizes for _ in "hc"]
        if self.span_context is not None:
            state.append(like.new_zeros(len(embedded), config.num_spans, config.layer_size))
        return tuple(state)

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[PaLMModelOutput, tuple[Tensor, ...]]:
        """Run the layers and the attention over a segment; see `RecurrentNetwork`."""
        config, training, mask_BT, lengths_B = self.config, self.training, segment.mask, None
        # The state after the last token need not be that of the last column. (While generating, nothing is looked up.)
        one_column = segment.embedded.shape[1] == 1
        if segment.keep_state and mask_BT is not None and (one_column or not bool(mask_BT.all())):
            lengths_B = mask_BT.sum(1)
        rate = config.embedding_dropout
        embedded = embedding_dropout(segment.embedded, segment.ids, config.vocab_size, rate, training)
        inputs = locked_dropout(embedded, config.input_dropout, training)
        output, new_state, last = PaLMModelOutput(), [], config.num_layers - 1
        recorded = [state_at_columns(inputs, mask_BT)] if segment.record else []
        for index, layer in enumerate(self.layers):
            hidden, layer_state = layer(inputs, state[2 * index : 2 * index + 2], lengths_B)
            new_state += layer_state
            if segment.record or index == last:
                recorded.append(state_at_columns(hidden, mask_BT, state[2 * index]))
            if index < last:
                inputs = locked_dropout(hidden, config.hidden_dropout, training)
            if index == last - 1 and self.span_context is not None:
                queries = inputs
                inputs, scores = self.span_context(hidden, queries, state[-1])
        output.last_hidden_state, output.hidden_states = recorded[-1], tuple(recorded) if segment.record else None
        if self.span_context is not None:
            if segment.attend:
                output.attentions = (state_at_columns(scores.softmax(-1), mask_BT),)
            output.query_states = state_at_columns(queries, mask_BT, state[-1][:, -1])
            output.span_scores = state_at_columns(scores, mask_BT)
            rows = torch.cat([state[-1].to(queries), queries], 1)
            new_state.append(_last_rows(rows, config.num_spans, lengths_B))
        return output, tuple(new_state)


def _last_rows(values_BTD: Tensor, count: int, lengths_B: Tensor | None) -> Tensor:
    """Each row's last `count` entries, of `count` old ones and `lengths_B` new ones; None = all of them are new."""
    if lengths_B is None:
        return values_BTD[:, -count:]
    rows = lengths_B[:, None] + torch.arange(count, device=lengths_B.device)
    return values_BTD.gather(1, rows[..., None].expand(-1, -1, values_BTD.shape[2]))


class PaLMForCausalLM(RecurrentLanguageModel, PaLMPreTrainedModel, GenerationMixin):
    """PaLM with its output layer: next-token log-probabilities, training objective, trees, generation."""

    network_class = PaLMModel

    def penalties(self, output: RecurrentModelOutput, features: Tensor) -> dict[str, WeightedLoss]:
        """AR of the last layer after its dropout, TAR before it; see `RecurrentLanguageModel`."""
        return activation_losses(self.config, features, output.last_hidden_state, output.token_mask)

    def supervised_losses(
        self, input_ids: Tensor | None, output: RecurrentModelOutput, gold: Any
    ) -> dict[str, WeightedLoss]:
        """Cross entropy of the span attention with the gold spans (PaLM-S); see `RecurrentLanguageModel`."""
        if gold is None:
            return {}
        target_BTK = gold_attention(gold, output.token_mask, output.span_scores)
        loss = attention_loss(output.span_scores, target_BTK, output.token_mask)
        return {"span_attention": (self.config.span_attention_weight, loss)}

    @can_return_tuple
    @also_takes(RecurrentLanguageModel.score_text)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        spans: Sequence[Sequence[Span]] | None = None,
        **options: Any,
    ) -> RecurrentLMOutput:
        """Next-token log-probabilities, and with `labels` the training loss.

        loss = mean of -log p(x_t+1 | x_1..t) + alpha * mean o^2 + beta * mean (h_t+1 - h_t)^2, where h is the output of
        the last layer and o the same after dropout; with `spans` (PaLM-S) + lambda * mean over all tokens of
        -sum_v y_tv log w_tv, where w is the attention and y shares 1 among the given spans that end right before t.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token (see `PaLMModel.forward`).
            labels: [B, T] = `input_ids` with -100 where the loss does not count; they are shifted inside. The first
                token of a row is not predicted.
            spans: per row the gold constituents `(i, j)`, in columns. The token right after a constituent attends to
                it, so that the row should hold the end of the sentence, too. A span that begins in an earlier segment
                has a negative i. Spans of one token, and longer than `config.num_spans`, do not count. In the paper
                constituents are not binarised, and the whole sentence is left out.
            **options: see `RecurrentLanguageModel.score_text`.

        Returns:
            `RecurrentLMOutput` with `span_scores` [B, T, K]. The parts of the loss are "language_model", "activation",
            "temporal_activation" and "span_attention".

        Raises:
            ValueError: see `score_text`; and for bad spans.
        """
        if spans is not None:
            self._check_spans(spans, columns_of(input_ids, options.get("inputs_embeds")))
        return self.score_text(input_ids, attention_mask, labels, spans, **options)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many items each part of the loss is a mean over (see `RecurrentLanguageModel.count_loss_items`)."""
        counts = super().count_loss_items(input_ids, **others)
        if others.get("spans") is not None:
            counts["span_attention"] = counts["activation"]
        return counts

    def _check_spans(self, spans: Sequence[Sequence[Span]], columns: Tensor) -> None:
        """Raise ValueError unless the attention can be trained on these spans."""
        width = columns.shape[1]
        for row, pairs in enumerate(spans):
            for span in pairs:
                is_pair = len(span) == 2 and all(isinstance(x, int) for x in span)
                if not (is_pair and span[0] < span[1] and 0 <= span[1] <= width):  # it may begin in the segment before
                    raise ValueError(f"{span!r} in row {row} is not a span (i, j) with i < j and 0 <= j <= {width}.")

    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        word_ends: Tensor | None = None,
        method: str = "attention",
        num_beams: int | None = None,
    ) -> ParseOutput:
        """Trees that the attention defines, and log-probabilities of given sentences.

        A constituent [i, j) is split at the k for which the attention at token j scores [k, j) highest. All spans are
        scored, however long; the k of a tie is the first one.

        Args:
            input_ids: [B, T], one sentence per row; missing begin and end tokens are added.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            word_ends: [B, T], True at the last piece of every word; the spans scored consist of whole words.
            method: only "attention" is possible.
            num_beams: has no effect: the words alone determine the attention, and so the tree.

        Returns:
            `ParseOutput` with one binary tree per sentence. `log_probs` [B, 1] is log p(text), end token included, and
            `token_log_probs` are those of `forward`, after a begin token.

        Raises:
            ValueError: for another method, a model without attention, and bad input (see `forward`).

        Cost: one pass over the text; n steps of the attention on sentences of n tokens.
        Source: section 2.2 of the paper. The authors' program (in an early commit) reads no begin token; it starts from
            the state after the sentence before.
        """
        if method != "attention":
            raise ValueError(f"method {method!r} is unknown. Choose 'attention'.")
        if self.model.span_context is None:
            raise ValueError("With span_attention=False, the model is an AWD-LSTM and has no trees. Use a PaLM.")
        return self.parse_text(input_ids, attention_mask, word_ends, self._read_trees)

    def _read_trees(self, output: PaLMModelOutput, starts: list[list[int]]) -> list[list[Span]]:
        """Spans over the words of each row, which begin at the columns `starts`."""
        queries, lengths = output.query_states, output.token_mask.sum(1).tolist()
        history = queries.new_zeros(len(queries), max(lengths), queries.shape[2])  # no span reaches into it
        rows = self.model.span_context.attention.scores(queries, history).cpu()
        if torch.isnan(rows).any():
            raise ValueError("Some scores of spans are not a number. Check the weights of the model.")
        return [split_by_scores(row, [*s, n - 1]) for row, s, n in zip(rows, starts, lengths, strict=True)]


class PaLMForSequenceClassification(RecurrentSequenceClassifier, PaLMPreTrainedModel):
    """PaLM with a classifier on the state after the last token."""

    network_class = PaLMModel
