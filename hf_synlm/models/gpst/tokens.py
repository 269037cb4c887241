# SPDX-License-Identifier: Apache-2.0
"""Batches of contexts as GPST reads them: checked, moved to the left end, without begin tokens.

Shapes: B rows, T columns, P boundaries between tokens.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.core.rows import check_rows, count_runs
from hf_synlm.core.token_batch import attended_tokens, check_aligned
from hf_synlm.models.gpst.chart import TreeNodes


class ContextBatch:
    """A batch of token rows, checked, moved to the left end and without begin tokens."""

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
    ) -> "ContextBatch":
        """Check the inputs of `forward` and bring them into this form."""
        check_aligned(input_ids, sentence_ids=sentence_ids, word_ends=word_ends)
        mask = attended_tokens(config, input_ids, attention_mask, sentence_ids)
        length_B, shift_B, runs_B = mask.sum(1), mask.long().argmax(1), count_runs(mask)
        # One copy to the host: every one waits for the device.
        facts = [(runs_B != 1).sum(), length_B.max(), shift_B.max()]
        num_wrong, longest, largest_shift = torch.stack(facts).tolist()
        if num_wrong:
            check_rows(mask, "attention_mask or sentence_ids")
        if longest > config.max_position_embeddings:
            raise ValueError(
                f"A context of {longest} tokens does not fit "
                f"max_position_embeddings={config.max_position_embeddings}. Shorten the context."
            )
        sentence_ids = mask.long() if sentence_ids is None else _number_runs(sentence_ids) * mask
        word_index = None
        if word_ends is not None:
            word_index = F.pad(word_ends.long().cumsum(1)[:, :-1], (1, 0))
        text = cls(input_ids, sentence_ids, word_index, shift_B, largest_shift > 0)
        if text.moved:
            text.ids, text.sentence_ids = text.align(input_ids), text.align(sentence_ids)
            text.word_index = None if word_index is None else text.align(word_index)
        text.ids = text.ids.masked_fill(text.sentence_ids == 0, 0)
        return text

    def align(self, values_BT: Tensor) -> Tensor:
        """Shift rows to the left end (values that leave on the left are lost, the right end is filled with 0)."""
        column = torch.arange(self.width, device=values_BT.device) + self.shift_B[:, None]
        return values_BT.gather(1, column.clamp_max(self.width - 1)).masked_fill(column >= self.width, 0)

    def align_order(self, merge_order: Tensor) -> Tensor:
        """Bring a merge order from input positions to shifted positions."""
        merge_order = merge_order.long()
        if not self.moved:
            return merge_order
        shifted = merge_order - self.shift_B.to(merge_order.device)[:, None]
        return torch.where(shifted < 0, shifted + merge_order.shape[1], shifted)

    def words_first(self, order_BP: Tensor) -> Tensor:
        """The merge order with the boundaries inside words moved to the front, otherwise unchanged."""
        if self.word_index is None or order_BP.shape != (len(self.ids), self.width - 1):
            return order_BP
        within = self.word_index[:, 1:] == self.word_index[:, :-1]
        order_BP = order_BP.to(within.device)
        front = (~within).long().gather(1, order_BP.clamp(0, max(self.width - 2, 0))).argsort(dim=1, stable=True)
        return order_BP.gather(1, front)

    def check_words(self, spans: list[list[tuple[int, int]]]) -> None:
        """Raise ValueError if a given span (in input positions) cuts a word."""
        if self.word_index is None:
            return
        words, shifts = self.word_index.tolist(), self.shifts()
        for row, row_spans in enumerate(spans):
            word, shift, length = words[row], shifts[row], int((self.sentence_ids[row] != 0).sum())
            for i, j in row_spans:
                first, last = i - shift, j - shift
                if not 0 <= first < last <= length or word[first] == word[last - 1]:
                    continue  # out of range is reported elsewhere; spans inside one word are fine
                cuts_left = first > 0 and word[first - 1] == word[first]
                if cuts_left or (last < length and word[last - 1] == word[last]):
                    raise ValueError(f"Span {(i, j)} of row {row} cuts a word of word_ends. Give spans of whole words.")

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


def _number_runs(sentence_ids: Tensor) -> Tensor:
    """Number the runs of equal sentence ids 1, 2, ...; 0 stays 0. Equal ids that stand apart are two sentences."""
    changed = F.pad(sentence_ids[:, 1:] != sentence_ids[:, :-1], (1, 0), value=False)
    return (changed.long().cumsum(1) + 1) * (sentence_ids != 0)
