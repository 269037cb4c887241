# SPDX-License-Identifier: Apache-2.0
"""Language models whose trees are read off syntactic distances, which gold trees may train: ON-LSTM and PRPN.

Shapes: B sentences, T columns, V vocabulary. Losses are in nats.
"""

from typing import Any

from torch import Tensor
from transformers.utils import can_return_tuple

from hf_synlm.core.module_tools import also_takes
from hf_synlm.core.outputs import ParseOutput
from hf_synlm.recurrent.distances import Decoder, check_gold_distances, count_pairs, distance_losses, distance_trees
from hf_synlm.recurrent.language_model import (
    RecurrentLanguageModel,
    RecurrentLMOutput,
    RecurrentModelOutput,
    WeightedLoss,
)
from hf_synlm.trees.spans import Span


class DistanceLanguageModel(RecurrentLanguageModel):
    """Loss with gold distances, and trees, of a language model with syntactic distances."""

    supervision_remedy: str
    """How to configure a model that learns from gold trees."""

    @property
    def learns_from_trees(self) -> bool:
        """Whether some layers have supervised distances."""
        return False

    @property
    def language_model_weight(self) -> float:
        """Weight of the language model's loss, penalties included."""
        return self.config.language_model_weight

    def supervised_losses(
        self, input_ids: Tensor | None, output: RecurrentModelOutput, gold: Any
    ) -> dict[str, WeightedLoss]:
        """Ranking loss of the supervised distances; see `distance_losses`."""
        return distance_losses(self.config, input_ids, output.token_mask, output.syd_distances, gold)

    @can_return_tuple
    @also_takes(RecurrentLanguageModel.score_text)
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        distances: Tensor | None = None,
        **options: Any,
    ) -> RecurrentLMOutput:
        """Next-token log-probabilities, and with `labels` the training loss.

        loss = language_model_weight * (CE + penalties) + syntactic_distance_weight * ranking loss, where CE is the mean
        of -log p(x_t+1 | x_1..t). ON-LSTM has the penalties alpha mean(h^2) + beta mean((h_t+1 - h_t)^2), h the output
        of the last layer before its dropout; PRPN has none. The ranking loss (see `ranking_loss`) is summed over the
        supervised layers. The first token of a row is not predicted.

        Args:
            input_ids: [B, T] token ids.
            attention_mask: [B, T], 1 = token; masked columns are skipped, wherever they are.
            labels: [B, T] = `input_ids` with -100 where the loss does not count; they are shifted here.
            distances: [B, T] gold distances, value t of the gap before token t; NaN where there is none. They need
                labels, and a model with supervised distances. Without them nothing is learned from trees. A sentence
                ends with `eos_token_id`.
            **options: see `RecurrentLanguageModel.score_text`.

        Returns:
            `RecurrentLMOutput` with `distances` [B, L, T] (and `syd_distances` [B, S, T]). The parts of the loss are
            "language_model", "activation", "temporal_activation" and "syntactic_distance", as far as the model has them

        Raises:
            ValueError: see `score_text`; and for gold distances that train nothing.
        """
        labeled = labels is not None or options.get("shift_labels") is not None
        remedy = None if self.learns_from_trees else self.supervision_remedy
        gold = check_gold_distances(input_ids, distances, labeled, remedy)
        return self.score_text(input_ids, attention_mask, labels, gold, **options)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """How many items each part of the loss is a mean over (see `RecurrentLanguageModel.count_loss_items`).

        Pairs of distances are counted inside the rows given here. Scope "batch", and the batch normalization of PRPN,
        look at whole batches, so that pieces do not add up to them.
        """
        counts = super().count_loss_items(input_ids, **others)
        if self.learns_from_trees and self.config.syntactic_distance_reduction == "mean":
            counts["syntactic_distance"] = count_pairs(
                self.config, input_ids, others.get("attention_mask"), others.get("distances")
            )
        return counts

    @property
    def distance_layers(self) -> dict[str, list[int]]:
        """Hook: numbers of the layers that have distances; "supervised" ones learn from gold trees."""
        return {"supervised": [0] if self.learns_from_trees else [], "language_model": [0]}

    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        word_ends: Tensor | None = None,
        method: str = "distance",
        decoder: Decoder = "unbiased",
        distances: str | None = None,
        layer: int | None = None,
        num_beams: int | None = None,
    ) -> ParseOutput:
        """Trees of given sentences, and their probabilities as text.

        The surprisal of token t is `-token_log_probs[:, t]`, in nats.

        Args:
            input_ids: [B, T], one sentence per row; missing begin and end tokens are added.
            attention_mask: [B, T], 1 = token; None: everything but runs of `pad_token_id` at both ends.
            word_ends: [B, T], True at the last piece of every word: the distances at the beginnings of words count.
            method: only "distance" is possible.
            decoder: "unbiased", or "biased" to the right, as the authors of PRPN decode (see `distances_to_spans`).
            distances: "supervised" (those that learn from gold trees) or "language_model"; default: "supervised" if
                there are any.
            layer: the layer whose distances count (PRPN and Ordered Memory: 0); default: the last supervised layer, or
                the middle one of an unsupervised model, as in the evaluation of ON-LSTM's authors (the second of
                three).
            num_beams: has no effect: the words alone determine the distances, and so the tree.

        Returns:
            `ParseOutput` with one tree per sentence; `log_probs` [B, 1] is log p(sentence and its end), and
            `token_log_probs` [B, T] log p(token | beginning, tokens before).

        Raises:
            ValueError: for unknown options, distances that the model does not have, and bad input.

        Cost: one pass over the text.
        """
        if method != "distance":
            raise ValueError(f"method {method!r} is unknown. {type(self).__name__} parses with 'distance'.")
        kinds = self.distance_layers
        supervised, unsupervised = kinds["supervised"], kinds["language_model"]
        if distances is None:
            distances = "supervised" if supervised and layer in (None, *supervised) else "language_model"
        if distances not in kinds:
            raise ValueError(f"distances {distances!r} is unknown. Choose one of {list(kinds)}.")
        if layer is None:
            layer = supervised[-1] if supervised else unsupervised[len(unsupervised) // 2]
        if layer not in kinds[distances]:
            raise ValueError(f"Layer {layer} has no {distances} distances. Layers that have them: {kinds[distances]}.")
        field = "distances" if distances == "language_model" else "syd_distances"
        place = kinds[distances].index(layer)

        def read_trees(output: RecurrentModelOutput, starts: list[list[int]]) -> list[list[Span]]:
            return distance_trees(output[field][:, place], starts, decoder)

        return self.parse_text(input_ids, attention_mask, word_ends, read_trees)
