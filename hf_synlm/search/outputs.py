# SPDX-License-Identifier: Apache-2.0
"""Output of the bare models whose `parse` searches."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.utils import ModelOutput

from hf_synlm.core.outputs import InFieldOrder


@dataclass
class SyntacticModelOutput(InFieldOrder, ModelOutput):
    """Output of the bare GPST model, and of the bare RNNG: one pass over given sentences with their trees.

    The trees are given, or induced from whole sentences. So these states see later words: use them as features, not as
    a language model.

    Fields:
        last_hidden_state: [B, T, D] state of the token layers after each token.
        token_hidden_state: [B, T + 1, D] the same states shifted: slot t predicts token t, slot T follows the text.
        type_hidden_state: [B, A, D] state of the type layers at each slot (slot 0 = beginning, slot t + 1 = node t).
        action_hidden_state: [B, A, w] prediction vector before each action (RNNG).
        sentence_state: [B, h] state of the stack when the derivation is over (RNNG).
        outside_vectors: [tokens, d] outside vectors of all tokens of the batch, row by row.
        spans: per row the inner nodes `(i, j)` of the trees in post-order (with `output_spans`).
        parser_scores: [B, T - 1] split scores of the parser between neighbouring tokens.
        structure: `TreeStructure`, which heads and losses of this package read (GPST, with `output_structure`).
        chart: dict of chart tensors (with `output_chart`).
        hidden_states: with `output_hidden_states`, states after each token [B, T, *], the last one being
            `last_hidden_state`. GPST: the inputs of the type layers at the slot that predicts the next token, then the
            output there of every type layer and of every token layer. RNNG: the word embeddings, the states of every
            layer of the stack LSTM, the prediction vectors; 0 at padding.
        attentions: with `output_attentions`, weights over slots (GPST): of every type layer [B, H, A, A], then of every
            token layer [B, H, T + 1, T + 1].
    """

    last_hidden_state: Tensor | None = None
    token_hidden_state: Tensor | None = None
    type_hidden_state: Tensor | None = None
    action_hidden_state: Tensor | None = None
    sentence_state: Tensor | None = None
    outside_vectors: Tensor | None = None
    spans: list[list[tuple[int, int]]] | None = None
    parser_scores: Tensor | None = None
    structure: Any | None = None
    chart: dict[str, Any] | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
