# SPDX-License-Identifier: Apache-2.0
"""Sentences between a begin token and an end token, as recurrent language models read them to parse.

Shapes: B sentences, T columns of the input, N words (or tokens) of the longest sentence.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.core.rows import Rows, check_rows
from hf_synlm.core.token_batch import attended_tokens, check_aligned
from hf_synlm.trees.spans import Span, right_branching


class FramedSentences(NamedTuple):
    """Sentences with begin and end token, and where their tokens stand in the input."""

    input_ids: Tensor
    """[B, N + 2]: begin token, tokens, end token, padding."""
    mask: Tensor
    """[B, N + 2]."""
    first_B: Tensor
    """Input column of the first token."""
    count_B: Tensor
    """Number of tokens, begin and end token left out."""
    closed_B: Tensor
    """Whether the end token stands in the input."""

    def at_columns(self, scores: Tensor, width: int) -> Tensor:
        """Move scores [B, N + 2] of the next token after each column of `input_ids` to the columns of the input.

        0 at padding and at a begin token.
        """
        place = torch.arange(width, device=scores.device) - self.first_B[:, None]
        scored = (place >= 0) & (place < (self.count_B + self.closed_B)[:, None])
        return scores.gather(1, place.clamp(0, scores.shape[1] - 1)).masked_fill(~scored, 0)


def frame_sentences(
    config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None, may_be_empty: bool = False
) -> FramedSentences:
    """Put every sentence between a begin token and an end token, unless its row has them.

    Without `attention_mask`, runs of `pad_token_id` at both ends are padding.
    """
    begin, end = config.bos_token_id, config.eos_token_id
    if begin is None or end is None:
        raise ValueError("bos_token_id or eos_token_id is None, but a sentence is read between these tokens. Set both.")
    words = attended_tokens(config, input_ids, attention_mask)  # without the begin token
    last = words & (words.flip(1).long().cumsum(1) == 1).flip(1)
    closing = last & (input_ids == end)
    words = words & ~closing
    check_rows(words, may_be_empty=may_be_empty)
    rows = Rows.of(input_ids, words)
    count_B, ids = rows.count, F.pad(rows.ids, (1, 1))
    place = torch.arange(ids.shape[1], device=ids.device)
    ids = torch.where(place == count_B[:, None] + 1, end, ids)
    ids = torch.where(place == 0, begin, ids)
    mask = place <= count_B[:, None] + 1
    return FramedSentences(ids.masked_fill(~mask, 0), mask, rows.first, count_B, closing.any(1))


def ends_of_words(word_ends: Tensor | None, input_ids: Tensor, text: FramedSentences) -> list[list[int]]:
    """Per sentence the end of each word, counted in tokens from the first one.

    Without `word_ends` every token is a word.
    """
    counts = text.count_B.tolist()
    if word_ends is None:
        return [list(range(1, count + 1)) for count in counts]
    check_aligned(input_ids, word_ends=word_ends)
    rows = []
    for row, (flags, first, count) in enumerate(zip(word_ends.tolist(), text.first_B.tolist(), counts, strict=True)):
        ends = [place + 1 for place in range(count) if flags[first + place]]
        if not ends or ends[-1] != count:
            raise ValueError(f"word_ends of row {row} does not mark the last token, but a word ends there.")
        rows.append(ends)
    return rows


def spread_spans(spans: list[Span], ends: list[int]) -> list[Span]:
    """Turn spans over words into spans over tokens in post-order; the pieces of a word are a right-branching tree."""
    bounds = [0, *ends]
    tokens = [(bounds[i], bounds[j]) for i, j in spans]
    for start, end in zip(bounds[:-1], ends, strict=True):
        tokens += [(start + i, start + j) for i, j in right_branching(end - start)]
    return sorted(tokens, key=lambda span: (span[1], -span[0]))
