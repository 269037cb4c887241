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
        for name, value in (("sentence_ids", sentence_ids), ("word_ends", word_ends)):
            if value is not None and value.shape != input_ids.shape:
                raise ValueError(f"{name} has shape {tuple(value.shape)}, input_ids {tuple(input_ids.shape)}.")
        mask = attended_tokens(config, input_ids, attention_mask, sentence_ids)
        length_B, shift_B = mask.sum(1), mask.long().argmax(1)
        if int(length_B.min()) == 0:
            row = int(length_B.argmin())
            raise ValueError(f"Row {row} of input_ids holds no token (besides a begin token). Leave empty texts out.")
        if int(length_B.max()) > config.max_position_embeddings:
            raise ValueError(
                f"A context of {int(length_B.max())} tokens does not fit max_position_embeddings="
                f"{config.max_position_embeddings}. Shorten it."
            )
        sentence_ids = mask.long() if sentence_ids is None else _number_runs(sentence_ids) * mask
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
        if not isinstance(merge_order, Tensor) or merge_order.is_floating_point() or merge_order.dim() != 2:
            raise ValueError(
                "merge_order must be a tensor of integers [batch, tokens - 1]: an argsort of split scores."
            )
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


def attended_tokens(
    config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None, sentence_ids: Tensor | None = None
) -> Tensor:
    """Mask [B, T] of the tokens that count: attended, and not the begin token at the start of a row.

    Args:
        config: for the vocabulary and the begin and padding ids.
        input_ids: [B, T].
        attention_mask: [B, T] or `None`: everything but runs of `pad_token_id` at both ends.
        sentence_ids: [B, T] or `None`; 0 is padding, too. A leading begin token that they make a sentence of its own
            stays a token.

    Returns:
        Boolean mask.

    Raises:
        ValueError: for wrong shapes, types, or ids outside the vocabulary.
    """
    _check_shapes(input_ids, attention_mask)
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask.bool()
    elif sentence_ids is None and config.pad_token_id is not None:
        mask = between_padding(input_ids, config.pad_token_id)
    if sentence_ids is not None:
        mask = mask & (sentence_ids != 0)
    check_tokens(config, input_ids, mask)
    if config.bos_token_id is not None:
        begin = mask & (mask.long().cumsum(1) == 1) & (input_ids == config.bos_token_id)
        if sentence_ids is not None:
            begin &= F.pad(sentence_ids[:, 1:] == sentence_ids[:, :-1], (0, 1), value=False)
        mask = mask & ~begin
    return mask


def between_padding(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """Mask of everything but runs of padding at both ends.

    Args:
        input_ids: [B, T].
        pad_token_id: the padding.

    Returns:
        Boolean mask [B, T], True = token.
    """
    word = (input_ids != pad_token_id).long()
    return (word.flip(1).cummax(1).values.flip(1) * word.cummax(1).values).bool()


def check_tokens(config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Check that a batch holds token ids of the vocabulary.

    Args:
        config: for the vocabulary.
        input_ids: [B, T].
        attention_mask: [B, T], 1 = token; None = every column.

    Raises:
        ValueError: for wrong shapes and types, or ids outside the vocabulary. (On a GPU, and in compiled and exported
            code, the embedding lookup finds these: a check would stall every step, and break the graph.)
    """
    _check_shapes(input_ids, attention_mask)
    if not (input_ids.is_cuda or torch.compiler.is_compiling()):
        outside = (input_ids < 0) | (input_ids >= config.vocab_size)
        if attention_mask is not None:
            outside = outside & attention_mask.bool()
        if outside.any():
            value = input_ids[outside][0].item()
            raise ValueError(f"Token id {value} is outside the vocabulary ({config.vocab_size} ids).")


def _check_shapes(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    if input_ids.dim() != 2 or input_ids.dtype not in integers or input_ids.numel() == 0:
        raise ValueError(f"input_ids must be integers [batch, tokens], not {input_ids.dtype} {tuple(input_ids.shape)}.")
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}. Align them."
        )


def check_labels(config: PreTrainedConfig, labels: Tensor, input_ids: Tensor) -> None:
    """Check that labels are ids of the vocabulary or -100, one per input id.

    Args:
        config: for the vocabulary.
        labels: [B, T].
        input_ids: [B, T].

    Raises:
        ValueError: unless they are. (On a GPU and in compiled code ids are not checked: that would stall every step.)
    """
    if not isinstance(labels, Tensor) or labels.shape != input_ids.shape or labels.is_floating_point():
        given = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"labels are {given}, input_ids {tuple(input_ids.shape)}. Give one integer per input id.")
    check_label_ids(config, labels)


def check_label_ids(config: PreTrainedConfig, labels: Tensor) -> None:
    """Check that integers are ids of the vocabulary or -100.

    Args:
        config: for the vocabulary.
        labels: integers of any shape.

    Raises:
        ValueError: unless they are. (Not on a GPU and not in compiled code, see `check_labels`.)
    """
    if not (labels.is_cuda or torch.compiler.is_compiling()):
        outside = (labels != -100) & ((labels < 0) | (labels >= config.vocab_size))
        if outside.any():
            raise ValueError(
                f"Label {labels[outside][0].item()} is outside the vocabulary ({config.vocab_size} ids). "
                "Use -100 to leave out."
            )


def tokens_first(values: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Move the tokens of every row to its left end, in their order; what is no token comes after them.

    Args:
        values: [B, T, ...].
        mask_BT: True = token; None = every column, nothing is moved.

    Returns:
        [B, T, ...].
    """
    if mask_BT is None:
        return values
    columns = (~mask_BT).to(torch.uint8).argsort(dim=1, stable=True)
    return values.gather(1, columns.view(*columns.shape, *[1] * (values.dim() - 2)).expand_as(values))


def after_columns(states: Tensor, mask_BT: Tensor | None) -> Tensor:
    """Put what a network computed after 0, 1, 2, ... tokens back to the columns of its input.

    Inverse of `tokens_first` at the columns that hold tokens; a column that is skipped has the state of the column
    before it.

    Args:
        states: [B, T + 1, ...]: before the first token, and after every token.
        mask_BT: True = token; None = every column.

    Returns:
        [B, T, ...].
    """
    if mask_BT is None:
        return states[:, 1:]
    count = mask_BT.cumsum(1)
    count = count.view(*count.shape, *[1] * (states.dim() - 2))
    return states.gather(1, count.expand(-1, -1, *states.shape[2:]))


def next_tokens(labels: Tensor, mask_BT: Tensor | None) -> Tensor:
    """The label of the token after each token; -100 after the last one and at columns that are no token.

    Args:
        labels: [B, T].
        mask_BT: True = token; None = every column.

    Returns:
        [B, T].
    """
    if mask_BT is not None:
        labels = tokens_first(labels.masked_fill(~mask_BT, -100), mask_BT)
    following = F.pad(labels[:, 1:], (0, 1), value=-100)
    if mask_BT is None:
        return following
    return after_columns(F.pad(following, (1, 0), value=-100), mask_BT).masked_fill(~mask_BT, -100)
