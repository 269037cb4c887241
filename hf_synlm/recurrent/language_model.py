# SPDX-License-Identifier: Apache-2.0
"""Language models over a recurrent network: scores, losses, and trees of given text; classifiers.

Such a model reads tokens from left to right and keeps a state (`RecurrentCache`). It predicts every token from the
tokens before it, so the first token of a row is not predicted. Its trees are read from numbers that the network
computes on the way. A model consists of

* `XPreTrainedModel(RecurrentPreTrainedModel)` with its configuration and initial weights;
* `XModel(RecurrentNetwork, XPreTrainedModel)`, whose `initial_state` and `read` say what the network does with a
  segment of text;
* `XForCausalLM(RecurrentLanguageModel, XPreTrainedModel, GenerationMixin)` with `network_class = XModel`; its `forward`
  returns `score_text`, whose hooks `penalties` and `supervised_losses` add parts to the loss, its `parse` returns
  `parse_text`;
* `XForSequenceClassification(RecurrentSequenceClassifier, XPreTrainedModel)` with `network_class = XModel`.

Shapes: B sentences, T columns of the input, L layers, E features that the output layer reads, V vocabulary.
Losses and log-probabilities in nats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from hf_synlm.core.cache import CACHE
from hf_synlm.core.hidden_states import (
    HiddenStateChoice,
    asked_of_layers,
    kept_states,
    refuse_arguments,
    wanted_states,
    wants_attentions,
)
from hf_synlm.core.losses import check_shares, linear_cross_entropy, share_of, widened
from hf_synlm.core.module_tools import SyntacticPreTrainedModel, evaluation_mode, weight_of
from hf_synlm.core.outputs import InFieldOrder, ParseOutput, SyntacticClassifierOutput, SyntacticLMOutput
from hf_synlm.core.rows import next_tokens, tokens_first
from hf_synlm.recurrent.cache import RecurrentCache, columns_of, segment_mask, store_state
from hf_synlm.recurrent.generation import RecurrentGenerationMixin
from hf_synlm.recurrent.layers import locked_dropout
from hf_synlm.recurrent.sentences import ends_of_words, frame_sentences, spread_spans
from hf_synlm.trees.actions import PAD_ACTION, spans_to_actions
from hf_synlm.trees.spans import Span

WeightedLoss: TypeAlias = tuple[float, Tensor]
"""Weight of a part of the loss, and its value."""


# ------------------------------------------------------------------------------------------------------- outputs
@dataclass
class RecurrentModelOutput(InFieldOrder, BaseModelOutputWithPast):
    """Output of a bare recurrent network.

    Fields, besides those of transformers' output:
        last_hidden_state: [B, T, E] output of the last layer after each column, without dropout. A masked column has
            the state of the column before it.
        hidden_states: with `output_hidden_states`, the embeddings, then the output of every layer [B, T, *]; the last
            one is `last_hidden_state`.
        token_mask: [B, T], True = token; None = every column.
        distances: [B, L, T] syntactic distances of the language model; value t belongs to the gap before token t.
        syd_distances: [B, S, T] supervised distances, which learn from gold trees, of every layer that has them.
        span_scores: [B, T, K] scores of the spans that end right before each token, the longest first.
    """

    token_mask: Tensor | None = None
    distances: Tensor | None = None
    syd_distances: Tensor | None = None
    span_scores: Tensor | None = None


@dataclass
class RecurrentLMOutput(SyntacticLMOutput):
    """Output of `forward` of the causal language models over a recurrent network.

    Fields, besides those of `SyntacticLMOutput`:
        logits: [B, T, V] log p(next token | prefix), exact; they carry gradients. In training mode with `labels` they
            are left out: the loss never holds all of them at once.
        joint_log_prob: [B] log p of the tokens of each row that count in the loss (with `labels`).
        distances, syd_distances, span_scores: as in `RecurrentModelOutput`.
    """

    distances: Tensor | None = None
    syd_distances: Tensor | None = None
    span_scores: Tensor | None = None


# ---------------------------------------------------------------------------------------------------- penalties
def activation_penalty(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Mean square of the states [B, T, E] after the tokens (activation regularization, AR)."""
    squares = widened(states).square()
    return squares.mean() if mask_BT is None else _mean_at(squares, mask_BT)


def temporal_activation_penalty(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Mean square of the change of state from each token to the next (temporal activation regularization, TAR).

    Masked columns have the state of the column before. 0 if no row has two tokens.
    """
    if mask_BT is None:
        mask_BT = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    follows = mask_BT & (mask_BT.cumsum(1) > 1)
    changes = states[:, 1:] - states[:, :-1]
    return _mean_at(widened(changes).square(), follows[:, 1:])


def _mean_at(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of values [B, T, E] over the columns of a mask."""
    return (values.mean(-1) * mask_BT).sum() / mask_BT.sum().clamp_min(1)


def activation_losses(config: Any, dropped: Tensor, states: Tensor, mask_BT: Tensor | None) -> dict[str, WeightedLoss]:
    """Weight and value of "activation" (AR of `dropped`) and "temporal_activation" (TAR of `states`)."""
    return {
        "activation": (config.activation_regularization, activation_penalty(dropped, mask_BT)),
        "temporal_activation": (
            config.temporal_activation_regularization,
            temporal_activation_penalty(states, mask_BT),
        ),
    }


# --------------------------------------------------------------------------------------------------- base classes
class RecurrentPreTrainedModel(SyntacticPreTrainedModel):
    """What transformers has to know of a recurrent network."""

    _is_stateful = True  # assisted decoding needs a cache that can be cropped


class Segment(NamedTuple):
    """A segment of text for a network, and the outputs that are wanted."""

    embedded: Tensor
    """[B, T, E], the tokens at the left end of their rows."""
    ids: Tensor | None
    """[B, T], likewise; None = only the embeddings are known."""
    mask: Tensor | None
    """[B, T] tokens in the order of the input; None = every column."""
    begins: bool
    """Whether nothing was read before."""
    keep_state: bool
    record: bool
    """Whether hidden states are wanted."""
    attend: bool
    """Whether attention weights are wanted."""


class RecurrentNetwork:
    """The bare network: token ids in, states out."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.(weight|bias)$"]  # the language model always has them
    batch_dim = 0
    """Dimension of the sentences in the tensors of the state."""

    @property
    def num_states(self: Any) -> int:
        """Hook: number of hidden states, the embeddings included."""
        return self.config.num_layers + 1

    def initial_state(self, embedded: Tensor) -> tuple[Tensor, ...]:
        """Hook: the state before any token, for embeddings [B, T, E]."""
        raise NotImplementedError  # every network writes it

    def read(self, segment: Segment, state: tuple[Tensor, ...]) -> tuple[RecurrentModelOutput, tuple[Tensor, ...]]:
        """Hook: the output of the network for a segment, and the state after the last token of every row."""
        raise NotImplementedError  # every network writes it

    def embed(
        self: Any,
        input_ids: Tensor | None,
        inputs_embeds: Tensor | None,
        attention_mask: Tensor | None,
        cache: RecurrentCache | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Embed a segment, and move its tokens to the left end of their rows: padding is read after them.

        Returns embeddings, ids and mask, as `Segment` has them.
        """
        mask = segment_mask(self.config, input_ids, inputs_embeds, attention_mask, cache)
        if inputs_embeds is not None:
            return tokens_first(inputs_embeds, mask), None, mask
        ids = input_ids.long()
        if mask is not None:
            ids = tokens_first(ids.masked_fill(~mask, self.config.pad_token_id or 0), mask)
        return self.embed_tokens(ids), ids, mask

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        inputs_embeds: Tensor | None = None,
        **others: None,
    ) -> RecurrentModelOutput:
        """Read token ids from left to right.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; masked columns are skipped, wherever they are. With a cache, a mask may
                cover all columns read so far. Without a mask every column is a token (LSTM: all but runs of
                `pad_token_id` at both ends).
            past_key_values: state to continue from; it is updated in place, and no gradient flows through it.
            use_cache: return the state; default: only if one is given.
            output_hidden_states: also return `hidden_states`, all or those at the places given.
            output_attentions: also return `attentions`; only PRPN and PaLM have them.
            inputs_embeds: [B, T, E] instead of `input_ids`; whole words cannot be dropped from them.
            **others: arguments of other models, which must be None.

        Returns:
            The output of the network; see its class.

        Raises:
            ValueError: for wrong shapes, types, ids outside the vocabulary, or a cache of another batch.
        """
        cache, wanted = past_key_values, wanted_states(self.config, output_hidden_states, self.num_states)
        refuse_arguments(others)
        embedded, ids, mask = self.embed(input_ids, inputs_embeds, attention_mask, cache)
        begins = cache is None or not cache.is_initialized
        state = self.initial_state(embedded) if begins else cache.read(embedded.device)
        asked = cache is not None or bool(use_cache), bool(wanted), wants_attentions(self.config, output_attentions)
        output, new_state = self.read(Segment(embedded, ids, mask, begins, *asked), state)
        width = columns_of(input_ids, inputs_embeds).shape[1]
        output.past_key_values = store_state(cache, use_cache, new_state, width, self.batch_dim)
        output.token_mask = mask
        if wanted:
            output.hidden_states = kept_states(output.hidden_states, wanted)
        return output


class RecurrentLanguageModel(RecurrentGenerationMixin):
    """Scores, loss, generation and trees of a causal language model over a recurrent network."""

    network_class: type[RecurrentPreTrainedModel]
    """The bare network."""
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.network_class(config)
        self.lm_head = nn.Linear(config.embedding_size, config.vocab_size)
        self.post_init()

    def output_features(self, output: RecurrentModelOutput) -> Tensor:
        """Hook: the input [B, T, E] of `lm_head`, by default the states of the last layer with locked dropout."""
        return locked_dropout(output.last_hidden_state, self.config.output_dropout, self.training)

    def penalties(self, output: RecurrentModelOutput, features: Tensor) -> dict[str, WeightedLoss]:
        """Hook: weight and value of regularizers, by the names of `losses`."""
        return {}

    @property
    def language_model_weight(self) -> float:
        """Hook: weight of the language model's loss, penalties included, beside the supervised losses."""
        return 1.0

    def supervised_losses(
        self, input_ids: Tensor | None, output: RecurrentModelOutput, gold: Any
    ) -> dict[str, WeightedLoss]:
        """Hook: weight and value of losses of gold trees, by the names of `losses`.

        `gold` is that of `score_text`. `input_ids` is None if embeddings were given, for which there are no gold trees.
        """
        return {}

    # ------------------------------------------------------------------------------------------- scores and loss
    def score_text(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        gold: Any = None,
        *,
        past_key_values: RecurrentCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        loss_shares: Mapping[str, float] | None = None,
        inputs_embeds: Tensor | None = None,
        **more: Any,
    ) -> RecurrentLMOutput:
        """Next-token log-probabilities, and with `labels` the training loss: the common part of every `forward`.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; masked columns are skipped, wherever they are.
            labels: [B, T] = `input_ids` with -100 where the loss does not count; they are shifted here.
            gold: for `supervised_losses`.
            past_key_values: state to continue from; it is updated in place, and no gradient flows through it.
            use_cache: return the state; default: only if one is given.
            logits_to_keep: compute `logits` for this many last columns only (0 = all), or for these columns.
            loss_shares: by part, the share of a step's items in this call, if a step takes several calls (see
                `count_loss_items`). The losses of the calls then add up to that of all their rows together.
            inputs_embeds: [B, T, E] instead of `input_ids`; whole words cannot be dropped from them.
            **more: `shift_labels` [B, T], labels already shifted: position t holds the target of token t + 1 (they
                replace `labels`); `output_hidden_states` and `output_attentions` of the bare network.

        Returns:
            `RecurrentLMOutput` with `logits` [B, T, V], log p(next token | prefix), which are exact and carry
            gradients. With labels also `loss`, `losses` (without their weights) and `joint_log_prob` [B]; in training
            mode no `logits` then.

        Raises:
            ValueError: see the bare network; and for bad labels.
            TypeError: for other keyword arguments.

        Cost: see the bare network, and one row of V numbers per token; in training never all of them at once.
        """
        columns = columns_of(input_ids, inputs_embeds)
        given, shifted = self._given_labels(columns, labels, more)
        output = self.model(
            input_ids, attention_mask, past_key_values, use_cache,
            inputs_embeds=inputs_embeds, return_dict=True, **asked_of_layers(more),
        )  # fmt: skip
        features = self.output_features(output)
        names = (CACHE, "hidden_states", "attentions", "distances", "syd_distances", "span_scores")
        result = RecurrentLMOutput(**{name: output.get(name) for name in names})
        if given is None or not self.training:
            result.logits = self._log_probs(self.lm_head, features, logits_to_keep)
        if given is None:
            return result
        targets = _targets(given, shifted, output.token_mask)
        loss, log_prob_BT = self._cross_entropy(features, targets, None if torch.is_grad_enabled() else result.logits)
        result.loss, result.joint_log_prob = loss * share_of(loss_shares, "language_model"), log_prob_BT.sum(1)
        result.losses = {"language_model": result.loss.detach()}
        _add_losses(result, self.penalties(output, features), loss_shares)
        result.loss = self.language_model_weight * result.loss
        _add_losses(result, self.supervised_losses(input_ids, output, gold), loss_shares)
        check_shares(loss_shares, result.losses)
        return result

    def _cross_entropy(
        self, features: Tensor, targets: Tensor, log_probs: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean of -log p(target) over the targets that are not -100, and log p of each [B, T] (detached, else 0).

        From `log_probs` [B, T, V] if they are known, so that the head is not multiplied twice.
        """
        counts = (targets != -100).flatten()
        weights = counts.to(torch.promote_types(features.dtype, torch.float32))
        weights = weights / weights.sum().clamp_min(1)
        targets_R = targets.flatten().long().clamp_min(0)
        if log_probs is None:
            head = weight_of(self.lm_head)
            loss, loss_R = linear_cross_entropy(features.flatten(0, 1), head, targets_R, weights, self.lm_head.bias)
        else:
            loss_R = -log_probs.flatten(0, 1).gather(1, targets_R[:, None]).squeeze(1)
            loss, loss_R = (loss_R * weights).sum(), loss_R.detach()
        return loss, torch.where(counts, -loss_R, torch.zeros_like(loss_R)).view(targets.shape)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many items each part of the loss is a mean over, by the names of `losses`; takes `forward`'s arguments.

        Divided by the counts of all calls of a step, these are the `loss_shares` of a call:
        `training.engine.steps.to_shares`. Targets ("language_model"), and in models with these penalties, tokens
        ("activation") and steps from a token to the next ("temporal_activation").
        """
        attention_mask, shift_labels = others.get("attention_mask"), others.get("shift_labels")
        mask = None if attention_mask is None else attention_mask.bool()
        shifted = shift_labels is not None
        targets = _targets(shift_labels if shifted else others["labels"], shifted, mask)
        counts = {"language_model": int((targets != -100).sum())}
        if self.config.penalizes_activations:
            tokens_B = torch.ones_like(input_ids).sum(1) if mask is None else mask.sum(1)
            counts["activation"] = int(tokens_B.sum())
            counts["temporal_activation"] = int((tokens_B - 1).clamp_min(0).sum())
        return counts

    # ------------------------------------------------------------------------------------------------------ trees
    def parse_text(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        word_ends: Tensor | None,
        read_trees: Callable[[RecurrentModelOutput, list[list[int]]], list[list[Span]]],
    ) -> ParseOutput:
        """Trees and log-probabilities of given sentences, in evaluation mode: the common part of every `parse`.

        Every sentence is read as begin token, words, end token; missing begin and end tokens are added. `read_trees`
        maps the output of the network (column 0 is the begin token) and, per sentence, the columns at which its words
        (or tokens) begin to spans over words.
        """
        text = frame_sentences(self.config, input_ids, attention_mask)
        ends = ends_of_words(word_ends, input_ids, text)
        with torch.no_grad(), evaluation_mode(self):
            output = self.model(text.input_ids, attention_mask=text.mask, return_dict=True)
            targets = next_tokens(text.input_ids, text.mask)
            _, scores = self._cross_entropy(self.output_features(output), targets)
            trees = read_trees(output, [[1, *(end + 1 for end in row[:-1])] for row in ends])
        trees = [spread_spans(*pair) for pair in zip(trees, ends, strict=True)]
        actions = [torch.tensor(spans_to_actions(*pair)) for pair in zip(trees, (row[-1] for row in ends), strict=True)]
        offsets = text.first_B.tolist()
        return ParseOutput(
            spans=[[[(i + x, j + x) for i, j in spans]] for spans, x in zip(trees, offsets, strict=True)],
            actions=pad_sequence(actions, True, PAD_ACTION)[:, None].to(input_ids.device),
            log_probs=scores.sum(1, keepdim=True),
            text_log_probs=scores.sum(1),
            token_log_probs=text.at_columns(scores, input_ids.shape[1]),
            offsets=offsets,
            lengths=text.count_B.tolist(),
            input_ids=input_ids,
            word_ends=None
            if word_ends is None
            else [[x + end for end in row] for x, row in zip(offsets, ends, strict=True)],
        )


def _targets(labels: Tensor, shifted: bool, mask: Tensor | None) -> Tensor:
    """The target after each column [B, T], -100 where there is none, of labels that may be shifted already."""
    if shifted:
        return labels if mask is None else labels.masked_fill(~mask, -100)
    return next_tokens(labels, mask)


def _add_losses(
    result: RecurrentLMOutput, parts: dict[str, WeightedLoss], loss_shares: Mapping[str, float] | None
) -> None:
    """Add weighted parts to `loss`, and their values without weights to `losses`, in place."""
    for name, (weight, value) in parts.items():
        share = value * share_of(loss_shares, name)
        result.loss = result.loss + weight * share
        result.losses[name] = share.detach()


# ------------------------------------------------------------------------------------------------- classification
class RecurrentSequenceClassifier:
    """Classifier on the state after the last token of a text."""

    network_class: type[RecurrentPreTrainedModel]
    """The bare network."""
    dropout_field = "output_dropout"
    """Field of the configuration with the dropout of the state."""
    config: Any
    loss_function: Callable[..., Tensor]
    post_init: Callable[[], None]

    def __init__(self, config: Any) -> None:
        # The next class is the base class of an architecture, which a model names after this mixin.
        super().__init__(config)  # type: ignore[call-arg]
        self.num_labels = config.num_labels
        self.model = self.network_class(config)
        self.dropout = nn.Dropout(getattr(config, self.dropout_field))
        self.score = nn.Linear(config.embedding_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        **others: None,
    ) -> SyntacticClassifierOutput:
        """Classify texts.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; masked columns are skipped. Without a mask every column is a token.
            labels: [B] class ids (or targets of a regression, or [B, num_labels] of a multi-label problem).
            inputs_embeds: [B, T, E] instead of `input_ids`.
            output_hidden_states: also return `hidden_states` of the bare network.
            output_attentions: also return `attentions` of the bare network.
            **others: arguments of other models, which must be None.

        Returns:
            `SyntacticClassifierOutput` with `logits` [B, num_labels].

        Raises:
            ValueError: see the bare network.
            TypeError: for other arguments.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
            **others,
        )
        # Masked columns have the state of the last token before them.
        logits = self.score(self.dropout(output.last_hidden_state[:, -1]))
        result = SyntacticClassifierOutput(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )
        if labels is not None:
            result.loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            result.losses = {"classification": result.loss.detach()}
            unread = output.get("syd_distances")
            if unread is not None:  # data-parallel training needs a gradient of every parameter
                result.loss = result.loss + 0.0 * unread.sum()
        return result
