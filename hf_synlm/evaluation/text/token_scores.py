# SPDX-License-Identifier: Apache-2.0
"""Scores of the tokens of a text."""

import dataclasses
from typing import Self

import torch
from torch import Tensor

from hf_synlm.evaluation.text.batches import Window
from hf_synlm.evaluation.text.cache import Result


@dataclasses.dataclass
class TokenScores:
    """Scores of one text of n tokens.

    Attributes:
        log_probs: [n] log p(token | prefix) in nats; NaN where there is no prefix (no begin token).
        lexical: [n] part of the words in `log_probs`, or None.
        beam_entropy: [n] entropy in nats of the derivations in the beam after the token, or None.
        num_actions: [n] expected structural actions before the token, or None.
        stack_depth: [n] expected number of trees on the stack after the token, or None.
        entropy: [n] entropy in nats of the token given everything before it, or None.
        attention_entropy: [n] expected normalized attention entropy where the token is read, or None.
        belief_update: [n] belief update in nats, at the last token of each word, or None.
        belief_cut: [n] likewise the share of the beliefs that the beam has dropped, or None.
        end: log p(the text ends | text) in nats, or None.
        word_start: [n + 1] log p(the next token begins a word or ends the text) before every token and at the end.
    """

    log_probs: Tensor
    lexical: Tensor | None = None
    beam_entropy: Tensor | None = None
    num_actions: Tensor | None = None
    stack_depth: Tensor | None = None
    entropy: Tensor | None = None
    attention_entropy: Tensor | None = None
    belief_update: Tensor | None = None
    belief_cut: Tensor | None = None
    end: float | None = None
    word_start: Tensor | None = None

    def to_dict(self) -> Result:
        """The scores as plain data for JSON, without those that are None."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Result) -> Self:
        """Inverse of `to_dict`."""
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items() if name != "end"}
        return cls(**tensors, end=values.get("end"))


# Fields with one value per token.
_PER_TOKEN = [field.name for field in dataclasses.fields(TokenScores) if field.name not in ("end", "word_start")]


def joined(windows: list[tuple[Window, TokenScores]]) -> TokenScores:
    """Scores of a text from those of its windows."""
    parts = [(window.skip, scores) for window, scores in windows]
    if not parts:  # a text without tokens
        nothing = torch.zeros(0, dtype=torch.float64)
        return TokenScores(nothing, nothing, nothing, nothing, nothing)
    last = parts[-1][1]
    joined = dataclasses.replace(last)
    for name in _PER_TOKEN:
        if getattr(last, name) is not None:
            setattr(joined, name, torch.cat([getattr(scores, name)[skip:] for skip, scores in parts]))
    if last.word_start is not None:
        inner = [scores.word_start[skip:-1] for skip, scores in parts if scores.word_start is not None]
        joined.word_start = torch.cat([*inner, last.word_start[-1:]])
    return joined
