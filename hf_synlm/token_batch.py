"""Batches of token rows, checked and shifted to the left end: what every model does before it reads text.

Shapes: B rows, T columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from .chart import TreeNodes


class TokenBatch:
    """A batch of token rows, checked, shifted to the left end and without begin tokens."""

    def __init__(self, ids: Tensor, sentence_ids: Tensor, word_index: Tensor | None, shift_B: Tensor, moved: bool):
        self.ids, self.sentence_ids, self.word_index = ids, sentence_ids, word_index
        self.shift_B, self.moved, self.width = shift_B, moved, ids.shape[1]

    @classmethod
    def read(
        cls,
        config: PreTrainedConfig,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        sentence_ids: Tensor | None,
        word_ends: Tensor | None,
    ) -> "TokenBatch":
        """Check the inputs of `forward` and bring them into this form."""
        mask = attended_tokens(config, input_ids, attention_mask if sentence_ids is None else sentence_ids != 0)
        for name, value in (("sentence_ids", sentence_ids), ("word_ends", word_ends)):
            if value is not None and value.shape != input_ids.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(input_ids.shape)}.")
        length_B, shift_B = mask.sum(1), mask.long().argmax(1)
        if int(length_B.min()) == 0:
            row = int(length_B.argmin())
            raise ValueError(f"Row {row} of input_ids holds no token (besides a begin token). Leave empty texts out.")
        if int(length_B.max()) >= config.max_position_embeddings:
            raise ValueError(
                f"A context of {int(length_B.max())} tokens does not fit max_position_embeddings="
                f"{config.max_position_embeddings} (at most {config.max_position_embeddings - 1} tokens). Shorten it."
            )
        sentence_ids = mask.long() if sentence_ids is None else sentence_ids * mask
        word_index = None
        if word_ends is not None:
            word_index = F.pad(word_ends.long().cumsum(1)[:, :-1], (1, 0))
        text = cls(input_ids, sentence_ids, word_index, shift_B, bool(shift_B.any()))
        if text.moved:
            text.ids, text.sentence_ids = text.align(input_ids), text.align(sentence_ids)
            text.word_index = None if word_index is None else text.align(word_index)
        expected = torch.arange(text.width, device=mask.device) < length_B[:, None]
        if not torch.equal(text.sentence_ids != 0, expected):
            raise ValueError("attention_mask or sentence_ids leave holes between tokens. Pad at one end only.")
        text.ids = text.ids.masked_fill(~expected, 0)
        return text

    def align(self, values_BT: Tensor) -> Tensor:
        """Shift rows to the left end (values that leave on the left are lost, the right end is filled with 0)."""
        column = torch.arange(self.width, device=values_BT.device) + self.shift_B[:, None]
        return values_BT.gather(1, column.clamp_max(self.width - 1)).masked_fill(column >= self.width, 0)

    def align_order(self, merge_order: Tensor) -> Tensor:
        """A merge order in input positions -> in shifted positions."""
        if not self.moved:
            return merge_order
        shifted = merge_order - self.shift_B.to(merge_order.device)[:, None]
        return torch.where(shifted < 0, shifted + merge_order.shape[1], shifted)

    def restore(self, values: Tensor) -> Tensor:
        """Shift [B, T, ...] back to input positions; 0 at padding."""
        if not self.moved:
            return values
        column = torch.arange(self.width, device=values.device) - self.shift_B[:, None]
        index = column.clamp_min(0).view(*column.shape, *[1] * (values.dim() - 2)).expand_as(values)
        hidden = (column < 0).view(*column.shape, *[1] * (values.dim() - 2))
        return values.gather(1, index).masked_fill(hidden, 0)

    def shifts(self) -> list[int]:
        """Input position of the first token of each row."""
        return self.shift_B.tolist()

    def list_spans(self, nodes: TreeNodes) -> list[list[tuple[int, int]]]:
        """Inner nodes of each row in post-order, in input positions."""
        rows: list[list[tuple[int, int]]] = [[] for _ in range(len(self.ids))]
        shifts = self.shifts()
        columns = (nodes.context_A.tolist(), nodes.start_A.tolist(), nodes.end_A.tolist())
        for row, start, end in zip(*columns, strict=True):
            if end - start > 1:
                rows[row].append((start + shifts[row], end + shifts[row]))
        return rows


def attended_tokens(config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Mask [B, T] of the tokens that count: attended, and not the begin token at the start of a row.

    Args:
        config: for the vocabulary and the begin and padding ids.
        input_ids: [B, T].
        attention_mask: [B, T] or `None`: everything but a trailing run of `pad_token_id`.

    Returns:
        Boolean mask.

    Raises:
        ValueError: for wrong shapes, types, or ids outside the vocabulary.
    """
    if input_ids.dim() != 2 or input_ids.is_floating_point() or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be integers [batch, tokens], not {input_ids.dtype} {tuple(input_ids.shape)}.")
    if attention_mask is None:
        mask = torch.ones_like(input_ids, dtype=torch.bool)
        if config.pad_token_id is not None:
            mask = (input_ids != config.pad_token_id).flip(1).long().cummax(1).values.flip(1).bool()
    elif attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}. Align them."
        )
    else:
        mask = attention_mask.bool()
    if not input_ids.is_cuda:  # on a GPU the check would stall every step; there the embedding lookup fails instead
        outside = ((input_ids < 0) | (input_ids >= config.vocab_size)) & mask
        if outside.any():
            value = input_ids[outside][0].item()
            raise ValueError(f"Token id {value} is outside the vocabulary ({config.vocab_size} ids).")
    if config.bos_token_id is not None:
        first = mask & (mask.long().cumsum(1) == 1)
        mask = mask & ~(first & (input_ids == config.bos_token_id))
    return mask
