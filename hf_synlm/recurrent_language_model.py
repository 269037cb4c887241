"""What language models over a recurrent network share: scores and loss, generation, trees of given and generated text.

Such a model reads tokens from left to right and keeps a state (`RecurrentCache`); its trees are read off numbers that
the network computes on the way. Nothing is added to a row and its first token is not predicted. A model consists of

* `XPreTrainedModel(RecurrentPreTrainedModel)` with its configuration and initial weights;
* `XModel(XPreTrainedModel)`, whose forward(input_ids, attention_mask, past_key_values, use_cache) returns a
  `RecurrentModelOutput`;
* `XForCausalLM(RecurrentLanguageModel, XPreTrainedModel, GenerationMixin)` with `model`, `lm_head` and the hook
  `output_features`; its `forward` calls `score_text` and adds the losses of its own with `add_losses`, its `parse`
  calls `parse_text`;
* `XForSequenceClassification(RecurrentSequenceClassifier, XPreTrainedModel)` with `model`, `dropout` and `score`.

Shapes: B sentences, T columns of the input, L layers, E features that are read by the output layer, V vocabulary.
Losses and log-probabilities in nats.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import GenerationMixin
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from .actions import PAD_ACTION, spans_to_actions
from .hidden_states import HiddenStateChoice, asked_of_layers
from .losses import linear_cross_entropy, share_of
from .module_tools import NoOffloading, evaluation_mode, weight_of
from .outputs import InFieldOrder, ParseOutput, SyntacticClassifierOutput, SyntacticLMOutput
from .recurrent_cache import RecurrentCache
from .recurrent_sentences import ends_of_words, frame_sentences, spread_spans
from .token_batch import check_labels, next_tokens
from .trees import Span


# ------------------------------------------------------------------------------------------------------- outputs
@dataclass
class RecurrentModelOutput(InFieldOrder, BaseModelOutputWithPast):
    """Output of a bare recurrent network.

    Fields, besides those of the stock output:
        last_hidden_state: [B, T, E] output of the last layer after each column, without dropout. A column that is
            skipped has the state of the column before it.
        hidden_states: with `output_hidden_states`, the embeddings, then the output of every layer [B, T, *]; the last
            one is `last_hidden_state`.
        token_mask: [B, T], True at the columns that hold tokens; None = all.
        distances: [L, B, T] syntactic distances of the language model; value t belongs to the gap before token t.
        syd_distances: [S, B, T] distances that learn from gold trees, of every layer that has them.
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
        logits: [B, T, V] log p(next token | prefix), exact; they carry gradients (without `labels`).
        joint_log_prob: [B] log p of the tokens of each row that count in the loss (with `labels`).
        distances, syd_distances, span_scores: as in `RecurrentModelOutput`.
    """

    distances: Tensor | None = None
    syd_distances: Tensor | None = None
    span_scores: Tensor | None = None


@dataclass
class RecurrentGenerateOutput(GenerateDecoderOnlyOutput):
    """Result of greedy search and sampling, with the trees of the sequences.

    Fields, besides those of the stock output:
        actions: [B, A] GEN (0) and COMP (1), -1 = padding.
        spans: per sequence the inner nodes `(i, j)` in token positions of `sequences`, post-order; without begin token
            and end token.
    """

    actions: Tensor | None = None
    spans: list[list[Span]] | None = None


@dataclass
class RecurrentGenerateBeamOutput(GenerateBeamDecoderOnlyOutput):
    """Result of beam search, with the trees of the sequences.

    Fields, besides those of the stock output:
        actions, spans: as in `RecurrentGenerateOutput`.
    """

    actions: Tensor | None = None
    spans: list[list[Span]] | None = None


# ---------------------------------------------------------------------------------------------------- penalties
def activation_penalty(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Mean square of the states after the tokens (activation regularization, AR).

    Args:
        states: [B, T, E].
        mask_BT: True = token; None = every column.

    Returns:
        Scalar.
    """
    squares = states.to(torch.promote_types(states.dtype, torch.float32)).square()
    return squares.mean() if mask_BT is None else _mean_at(squares, mask_BT)


def temporal_activation_penalty(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Mean square of the change of state from each token to the next (temporal activation regularization, TAR).

    Args:
        states: [B, T, E]; columns that are skipped have the state of the column before.
        mask_BT: True = token; None = every column.

    Returns:
        Scalar, 0 without two tokens in a row.
    """
    if mask_BT is None:
        mask_BT = torch.ones(states.shape[:2], dtype=torch.bool, device=states.device)
    follows = mask_BT & (mask_BT.cumsum(1) > 1)
    changes = states[:, 1:] - states[:, :-1]
    return _mean_at(changes.to(torch.promote_types(changes.dtype, torch.float32)).square(), follows[:, 1:])


def _mean_at(values: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean of [B, T, E] over the columns of a mask."""
    return (values.mean(-1) * mask_BT).sum() / mask_BT.sum().clamp_min(1)


# --------------------------------------------------------------------------------------------------- base classes
class RecurrentPreTrainedModel(NoOffloading, PreTrainedModel):
    """What transformers has to know of a recurrent network."""

    base_model_prefix = "model"
    accepts_loss_kwargs = False  # every part of the loss has a normalizer of its own
    _is_stateful = True  # assisted decoding needs a cache that can be cropped
    _skip_keys_device_placement = ["past_key_values"]
    _input_embed_layer = "embed_tokens"


class RecurrentGenerationMixin(GenerationMixin):
    """Stock generation over the state of a recurrent network; what such a network does not have is refused."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def generate_batch(self, *args: Any, **kwargs: Any) -> None:
        """Continuous batching is not possible.

        Args:
            *args: not used.
            **kwargs: not used.

        Raises:
            NotImplementedError: always.
        """
        # A method of transformers that these models cannot have; what it would do instead must not look like a result.
        raise NotImplementedError("generate_batch: use generate with a padded batch; a recurrent state has no pages.")

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Continuous batching is not possible; see `generate_batch`."""
        self.generate_batch()

    def _sample(self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        self._check_generation(input_ids, kwargs.get("attention_mask"), generation_config)
        kwargs.pop("tokenizer", None)  # of stop strings, whose criterion has it
        return super()._sample(input_ids, *args, generation_config=generation_config, **kwargs)

    def _beam_search(self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        self._check_generation(input_ids, kwargs.get("attention_mask"), generation_config)
        kwargs.pop("tokenizer", None)  # of stop strings, whose criterion has it
        return super()._beam_search(input_ids, *args, generation_config=generation_config, **kwargs)

    def _check_generation(self, prompts: Tensor, mask: Tensor | None, config: Any) -> None:
        """Raise ValueError for options that nothing would come of, before anything is written."""
        if config.cache_implementation:
            raise ValueError(
                f"cache_implementation={config.cache_implementation!r}: a recurrent network has one kind of state. "
                "Leave it out."
            )


class RecurrentLanguageModel(RecurrentGenerationMixin):
    """Scores, loss, generation and trees of a causal language model over a recurrent network."""

    def output_features(self, output: RecurrentModelOutput) -> Tensor:
        """Hook: what `lm_head` reads, [B, T, E], dropout included.

        Args:
            output: of the bare network.

        Returns:
            The features.
        """
        raise NotImplementedError  # there are no features that would do for every architecture

    # ------------------------------------------------------------------------------------------- scores and loss
    def score_text(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        labels: Tensor | None,
        past_key_values: RecurrentCache | None,
        use_cache: bool | None,
        logits_to_keep: int | Tensor,
        loss_shares: Mapping[str, float] | None,
        more: dict[str, Any],
    ) -> tuple[RecurrentLMOutput, RecurrentModelOutput, Tensor]:
        """Next-token log-probabilities, or with labels the cross entropy: what every `forward` begins with.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T] or None.
            labels: [B, T] = `input_ids`, -100 where the loss shall not count.
            past_key_values: state to continue from.
            use_cache: return the state.
            logits_to_keep: compute `logits` for the last so many columns (0 = all), or for these columns.
            loss_shares: factors of the parts of the loss, besides their weights.
            more: keyword arguments left over; they may hold `shift_labels` [B, T], labels already shifted, which
                replace `labels`; what the bare network shall return of its layers (`output_hidden_states`,
                `output_attentions`); and nothing else. (Trainer takes every argument of `forward` with "label" in its
                name for one that must be there.)

        Returns:
            The output with `loss`, `losses` and `joint_log_prob`, or with `logits`; that of the bare network; and the
            features [B, T, E] that the output layer has read.

        Raises:
            ValueError: for bad labels, and labels together with logits_to_keep.
            TypeError: for other keyword arguments.
        """
        shift_labels = more.pop("shift_labels", None)
        asked = asked_of_layers(more)
        given = labels if shift_labels is None else shift_labels
        if given is not None:
            if not (isinstance(logits_to_keep, int) and logits_to_keep == 0):
                raise ValueError("logits_to_keep goes with next-token logits. Leave it out together with labels.")
            check_labels(self.config, given, input_ids)
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            return_dict=True,
            **asked,
        )
        features = self.output_features(output)
        result = RecurrentLMOutput(
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions,
            distances=output.distances,
            syd_distances=output.syd_distances,
            span_scores=output.span_scores,
        )
        mask = output.token_mask
        if given is None:
            kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = self.lm_head(features[:, kept])
            result.logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
            return result, output, features
        if shift_labels is None:
            targets = next_tokens(labels, mask)
        else:
            targets = shift_labels if mask is None else shift_labels.masked_fill(~mask, -100)
        loss, log_prob_BT = self._cross_entropy(features, targets)
        result.loss, result.joint_log_prob = loss * share_of(loss_shares, "language_model"), log_prob_BT.sum(1)
        result.losses = {"language_model": result.loss.detach()}
        return result, output, features

    def _cross_entropy(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Mean of -log p(target) over the targets that are not -100, and log p of each [B, T] (detached, else 0)."""
        counts = (targets != -100).flatten()
        weights = counts.to(torch.promote_types(features.dtype, torch.float32))
        loss, loss_R = linear_cross_entropy(
            features.flatten(0, 1),
            weight_of(self.lm_head),
            targets.flatten().long().clamp_min(0),
            weights / weights.sum().clamp_min(1),
            self.lm_head.bias,
        )
        return loss, torch.where(counts, -loss_R, torch.zeros_like(loss_R)).view(targets.shape)

    def add_losses(
        self,
        result: RecurrentLMOutput,
        parts: dict[str, tuple[float, Tensor]],
        loss_shares: Mapping[str, float] | None,
    ) -> RecurrentLMOutput:
        """Add weighted parts to the loss.

        Args:
            result: output with `loss` and `losses`, changed in place.
            parts: by name the weight and the value of each part; `losses` holds the values without their weights.
            loss_shares: factors of the parts, besides their weights.

        Returns:
            `result`.
        """
        for name, (weight, value) in parts.items():
            share = value * share_of(loss_shares, name)
            result.loss = result.loss + weight * share
            result.losses[name] = share.detach()
        return result

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many items each part of the loss is a mean over, so far as it is one.

        Divided by the counts of all calls of a step, these are the `loss_shares` of a call (`loss_shares.to_shares`).

        Args:
            input_ids: [B, T], as for `forward`.
            **others: the other arguments of `forward`: `labels` or `shift_labels`, perhaps `attention_mask` and gold
                trees.

        Returns:
            Counts by the names of `losses`.
        """
        attention_mask, shift_labels = others.get("attention_mask"), others.get("shift_labels")
        mask = None if attention_mask is None else attention_mask.bool()
        if shift_labels is None:
            targets = next_tokens(others["labels"], mask)
        else:
            targets = shift_labels if mask is None else shift_labels.masked_fill(~mask, -100)
        return {"language_model": int((targets != -100).sum())}

    @staticmethod
    def count_columns(input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, int]:
        """How many items the penalties of the states are means over.

        Args:
            input_ids: [B, T].
            attention_mask: [B, T] or `None`.

        Returns:
            Number of tokens ("activation") and of steps from a token to the next ("temporal_activation").
        """
        if attention_mask is None:
            rows, columns = input_ids.shape
            return {"activation": rows * columns, "temporal_activation": rows * (columns - 1)}
        count_B = attention_mask.bool().sum(1)
        return {"activation": int(count_B.sum()), "temporal_activation": int((count_B - 1).clamp_min(0).sum())}

    # ------------------------------------------------------------------------------------------------------ trees
    def parse_text(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        word_ends: Tensor | None,
        read_trees: Callable[[RecurrentModelOutput, list[list[int]]], list[list[Span]]],
    ) -> ParseOutput:
        """Trees and log-probabilities of given sentences: what every `parse` does, in evaluation mode.

        Every sentence is read as begin token, words, end token; those that do not stand in its row are added.

        Args:
            input_ids: [B, T], one sentence per row.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            word_ends: [B, T], True at the last piece of every word.
            read_trees: what the network has computed (column 0 is the begin token) and, per sentence, the columns at
                which its words (or tokens) begin -> spans over words.

        Returns:
            `ParseOutput` with one tree per sentence.

        Raises:
            ValueError: for bad input, and sentences without words.
        """
        text = frame_sentences(self.config, input_ids, attention_mask)
        if not bool((text.count_B > 0).all()):
            row = int(text.count_B.argmin())
            raise ValueError(f"Row {row} of input_ids holds no word. Leave empty sentences out.")
        ends = ends_of_words(word_ends, input_ids, text)
        with torch.no_grad(), evaluation_mode(self):
            output = self.model(text.input_ids, attention_mask=text.mask, return_dict=True)
            targets = next_tokens(text.input_ids, text.mask)
            _, scores = self._cross_entropy(self.output_features(output), targets)
            trees = read_trees(output, [[1, *(end + 1 for end in row[:-1])] for row in ends])
        trees = [spread_spans(*pair) for pair in zip(trees, ends, strict=True)]
        actions = [spans_to_actions(spans, row[-1]) for spans, row in zip(trees, ends, strict=True)]
        offsets = text.first_B.tolist()
        return ParseOutput(
            spans=[[[(i + x, j + x) for i, j in spans]] for spans, x in zip(trees, offsets, strict=True)],
            actions=_pad_actions(actions, input_ids.device)[:, None],
            log_probs=scores.sum(1, keepdim=True),
            text_log_probs=scores.sum(1),
            token_log_probs=text.at_columns(scores, input_ids.shape[1]),
            offsets=offsets,
            lengths=text.count_B.tolist(),
            word_ends=None
            if word_ends is None
            else [[x + end for end in row] for x, row in zip(offsets, ends, strict=True)],
        )

    # ------------------------------------------------------------------------------------------------- generation
    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        **kwargs: Any,
    ) -> RecurrentGenerateOutput | RecurrentGenerateBeamOutput | Tensor:
        """Continue prompts by the stock decoding loops, with the trees of what is written.

        Args:
            inputs: Prompts [B, L]; left padding. Without prompts the text begins with the begin token.
            generation_config: Options; keyword arguments win.
            logits_processor: Extra processors of word scores.
            stopping_criteria: Extra criteria.
            **kwargs: `attention_mask` [B, L], and any option of transformers: num_beams, num_return_sequences,
                do_sample, top_k, top_p, temperature, max_new_tokens, eos_token_id, stop_strings, repetition_penalty,
                length_penalty, output_scores, return_dict_in_generate, streamer, ...

        Returns:
            Sequences [B * num_return_sequences, L'], or with `return_dict_in_generate=True` an output with `sequences`,
            `spans` and `actions`: the tree of each sequence, prompt included, as `parse` finds it by default.

        Raises:
            ValueError: for options that do not exist, or that a recurrent network has no use for; for assisted
                decoding, which needs a state that can go back; and, where trees are asked for, for prompts with holes
                or padding on the right.

        Cost: one step per token from the cached state; for trees one more pass over the text.
        """
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _sample(self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        result = super()._sample(input_ids, *args, generation_config=generation_config, **kwargs)
        return self._with_trees(RecurrentGenerateOutput, result, input_ids, mask, generation_config)

    def _beam_search(self, input_ids: Tensor, *args: Any, generation_config: Any, **kwargs: Any) -> Any:
        mask = kwargs.get("attention_mask")
        result = super()._beam_search(input_ids, *args, generation_config=generation_config, **kwargs)
        return self._with_trees(RecurrentGenerateBeamOutput, result, input_ids, mask, generation_config)

    def _check_generation(self, prompts: Tensor, mask: Tensor | None, config: Any) -> None:
        super()._check_generation(prompts, mask, config)
        if config.return_dict_in_generate and mask is not None and self._has_trees:
            # A word after each prompt, as there will be: holes and padding on the right show.
            text = torch.cat([prompts, prompts[:, -1:]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            frame_sentences(self.config, *text)

    @property
    def _has_trees(self) -> bool:
        """Whether the network computes something that trees are read off."""
        return True

    def _with_trees(self, kind: Any, result: Any, prompts: Tensor, mask: Tensor | None, config: Any) -> Any:
        """Add the trees of the sequences to a result that has fields.

        `prompts` [P, N] and their mask hold every prompt P / (number of prompts) times.
        """
        if isinstance(result, Tensor) or not self._has_trees:
            return result
        count, width = len(result.sequences), prompts.shape[1]
        mask = torch.ones_like(prompts) if mask is None else mask
        # Beam search holds each prompt num_beams times and returns num_return_sequences of it.
        row = torch.arange(count, device=prompts.device) // config.num_return_sequences
        copies = config.num_beams if config.num_beams > 1 else config.num_return_sequences
        mask = mask[row * copies, :width]
        new = result.sequences[:, width:]
        ended = torch.zeros_like(new, dtype=torch.bool)
        if config._eos_token_tensor is not None:
            ended = torch.isin(new, config._eos_token_tensor)
        present = ended.long().cumsum(1) == 0  # an end token is no word, whichever it is
        if config._pad_token_tensor is not None:
            filled = present & (new != config._pad_token_tensor)
            present = present & (filled.flip(1).long().cumsum(1).flip(1) > 0)
        text = torch.cat([mask.bool(), present], 1)
        spans: list[list[Span]] = [[] for _ in range(count)]
        actions = torch.full((count, 1), PAD_ACTION, device=new.device)
        words = (frame_sentences(self.config, result.sequences, text).count_B > 0).nonzero()[:, 0]
        if len(words):
            parsed = self.parse(result.sequences[words], text[words])
            actions = actions.new_full((count, parsed.actions.shape[2]), PAD_ACTION)
            actions[words] = parsed.actions[:, 0]
            for place, trees in zip(words.tolist(), parsed.spans, strict=True):
                spans[place] = trees[0]
        return kind(**result, actions=actions, spans=spans)


def _pad_actions(actions: list[list[int]], device: torch.device) -> Tensor:
    """Action ids [B, A] of rows of unequal length."""
    width = max(map(len, actions))
    return torch.tensor([row + [PAD_ACTION] * (width - len(row)) for row in actions], device=device)


# ------------------------------------------------------------------------------------------------- classification
class RecurrentSequenceClassifier:
    """Classifier on the state after the last token of a text."""

    config: Any
    model: Any
    dropout: Any
    score: Any
    loss_function: Any

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
    ) -> SyntacticClassifierOutput:
        """Classify texts.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; columns of padding are skipped. Without a mask every column is a token.
            labels: [B] class ids (or targets of a regression, or [B, num_labels] of a multi-label problem).
            output_hidden_states: also return `hidden_states` of the bare network.
            output_attentions: also return `attentions` of the bare network.

        Returns:
            `SyntacticClassifierOutput` with `logits` [B, num_labels].

        Raises:
            ValueError: see the bare network.
        """
        output = self.model(
            input_ids,
            attention_mask=attention_mask,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            return_dict=True,
        )
        # A column of padding has the state of the last token before it.
        logits = self.score(self.dropout(output.last_hidden_state[:, -1]))
        result = SyntacticClassifierOutput(
            logits=logits, hidden_states=output.hidden_states, attentions=output.attentions
        )
        if labels is not None:
            result.loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
            result.losses = {"classification": result.loss.detach()}
        return result


__all__ = [
    "RecurrentGenerateBeamOutput",
    "RecurrentGenerateOutput",
    "RecurrentGenerationMixin",
    "RecurrentLMOutput",
    "RecurrentLanguageModel",
    "RecurrentModelOutput",
    "RecurrentPreTrainedModel",
    "RecurrentSequenceClassifier",
    "activation_penalty",
    "temporal_activation_penalty",
]
