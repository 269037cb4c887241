# SPDX-License-Identifier: Apache-2.0
"""The words of rows of token ids: one sentence per row, between optional begin and end tokens.

Shapes: B rows, T columns, N words of the longest row.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_synlm.core.rows import Rows, check_rows
from hf_synlm.core.token_batch import attended_tokens
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig


@dataclass
class Sentences(Rows):
    """The words of rows, and where the sentences end."""

    ended: Tensor
    """[B, T] columns from the end token on."""
    closing: Tensor
    """[B, T] columns of end tokens, and of all tokens behind."""

    def at_columns(self, spans: Tensor) -> Tensor:
        """Values [B, N + 1, N + 1] of spans of words, as spans of columns [B, T + 1, T + 1]; 0 elsewhere."""
        size, width = spans.shape[1], self.mask.shape[1] + 1
        moved = spans.new_zeros(len(spans), width + size, width + size)
        places = torch.arange(size, device=spans.device)
        for values, row, first in zip(moved, spans, self.first.tolist(), strict=True):
            values[first + places[:, None], first + places] = row
        return moved[:, :width, :width]

    def emission(self, log_emission: Tensor) -> Tensor:
        """Log p(X -> word) [B, N, X]; padding has any finite value."""
        return log_emission.masked_fill(~self.present.unsqueeze(-1), 0.0)


def read_rows(config: PCFGConfig, input_ids: Tensor, attention_mask: Tensor | None) -> Sentences:
    """The words of rows [B, T]; special tokens inside a sentence raise ValueError (not on a GPU)."""
    attended = attended_tokens(config, input_ids, attention_mask)
    ended = torch.zeros_like(attended)
    if config.eos_token_id is not None:
        ended = ((input_ids == config.eos_token_id) & attended).cumsum(1) > 0
    columns = attended & ~ended
    refuse_silent_words(config, input_ids, columns)
    return Sentences(**vars(Rows.of(input_ids, columns, least=1)), ended=ended, closing=ended & attended)


def read_whole_rows(config: PCFGConfig, input_ids: Tensor, attention_mask: Tensor | None) -> Sentences:
    """As `read_rows`, for sentences as wholes: no row is empty, has holes, or goes on after its end token."""
    text = read_rows(config, input_ids, attention_mask)
    check_rows(text.mask)
    for row, others in enumerate(text.closing.sum(1).tolist()):
        if others > 1:
            raise ValueError(f"Row {row} of input_ids continues after its end token. Give one sentence per row.")
    return text


def refuse_silent_words(config: PCFGConfig, input_ids: Tensor, columns: Tensor) -> None:
    """Raise ValueError if words are special tokens, which no preterminal gives; not on a GPU and in compiled code."""
    if not config.silent_ids or input_ids.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = torch.isin(input_ids, torch.tensor(config.silent_ids)) & columns
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"Token {input_ids[row, column].item()} in row {row}, column {column} is a special token, not a word of "
            "the grammar, so the sentence has probability 0. Leave this token out of the sentence, or mask it."
        )
