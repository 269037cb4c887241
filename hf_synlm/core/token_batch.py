# SPDX-License-Identifier: Apache-2.0
"""Check batches of token rows, and tell tokens from padding, before a model reads them.

Shapes: B rows, T columns.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig


def attended_tokens(
    config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None, sentence_ids: Tensor | None = None
) -> Tensor:
    """Mask [B, T] of the tokens to read: attended, and not the begin token at the start of a row.

    Without `attention_mask` that is everything but runs of `pad_token_id` at both ends. Where `sentence_ids` [B, T] is
    0 is padding, too; a leading begin token with another sentence id than the next token stays a token.
    """
    attention_mask = padding_mask(attention_mask)
    _check_shapes(input_ids, attention_mask)
    mask = torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = attention_mask.bool()
    elif sentence_ids is None and config.pad_token_id is not None:
        mask = between_padding(input_ids, config.pad_token_id)
    if sentence_ids is not None:
        mask = mask & (sentence_ids != 0)
    check_tokens(config, input_ids, mask)
    begin = first_token_mask(input_ids, mask, config.bos_token_id)
    if sentence_ids is not None:
        begin &= F.pad(sentence_ids[:, 1:] == sentence_ids[:, :-1], (0, 1), value=False)
    return mask & ~begin


def padding_mask(attention_mask: Tensor | None) -> Tensor | None:
    """The padding mask [B, T] that a causal mask [B, T, T] has as its last row; masks of other shapes stay.

    BabyLM's fine-tuning writes causal masks. Raises ValueError for a mask [B, T, T] that is not causal.
    """
    if attention_mask is None or attention_mask.dim() != 3 or attention_mask.shape[1] != attention_mask.shape[2]:
        return attention_mask
    sees_BTT = attention_mask.bool()
    tokens_BT = sees_BTT.any(1)
    wrong = (sees_BTT != tokens_BT[:, None].expand_as(sees_BTT).tril()).nonzero()
    if len(wrong):
        row, column, other = wrong[0].tolist()
        raise ValueError(
            f"attention_mask {list(sees_BTT.shape)} is not causal: in row {row}, column {column} "
            f"{'sees column' if other > column else 'does not see token'} {other}. Give the padding mask [B, T]."
        )
    return tokens_BT


def first_token_mask(input_ids: Tensor, mask: Tensor, bos_token_id: int | None) -> Tensor:
    """Find the begin tokens [B, T]: a `bos_token_id` as first token of its row is the beginning, not a word."""
    if bos_token_id is None:
        return torch.zeros_like(mask)
    return mask & (mask.long().cumsum(1) == 1) & (input_ids == bos_token_id)


def between_padding(input_ids: Tensor, pad_token_id: int) -> Tensor:
    """Mask [B, T] of `input_ids`, False at the runs of `pad_token_id` at both ends of a row."""
    word = (input_ids != pad_token_id).long()
    return (word.flip(1).cummax(1).values.flip(1) * word.cummax(1).values).bool()


def check_tokens(config: PreTrainedConfig, input_ids: Tensor, attention_mask: Tensor | None) -> None:
    """Check shapes and types, and that token ids are in the vocabulary.

    Ids are not checked on a GPU and in compiled code, where that would stall every step: there the embedding lookup
    fails.
    """
    _check_shapes(input_ids, attention_mask)
    if input_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = (input_ids < 0) | (input_ids >= config.vocab_size)
        if attention_mask is not None:
            outside = outside & attention_mask.bool()
        if outside.any():
            value = input_ids[outside][0].item()
            raise ValueError(
                f"Token id {value} is outside the vocabulary ({config.vocab_size} ids). Is it from the tokenizer of "
                f"this model? If so, tokenizer.convert_ids_to_tokens({value}) shows the piece. Respell its word."
            )


def _check_shapes(input_ids: Tensor, attention_mask: Tensor | None) -> None:
    if not isinstance(input_ids, Tensor):
        raise ValueError(
            f"input_ids is a {type(input_ids).__name__}, not a tensor of token ids. Call the tokenizer first: "
            "model.parse(**tokenizer([text], return_tensors='pt'))."
        )
    integers = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
    # A tokenizer makes an empty tensor of floats of an empty text, so this comes first.
    check_columns("input_ids", input_ids, attention_mask)
    if input_ids.dim() != 2 or input_ids.dtype not in integers:
        raise ValueError(f"input_ids must be integers [batch, tokens], not {input_ids.dtype} {tuple(input_ids.shape)}.")


def check_columns(name: str, values_BT: Tensor, attention_mask: Tensor | None) -> None:
    """Raise ValueError if an input, called `name` in the message, is empty or does not fit its mask."""
    shape = list(values_BT.shape)
    if values_BT.numel() == 0:
        raise ValueError(f"{name} {shape} hold no token. Leave empty texts out, or give the begin token.")
    if attention_mask is not None and attention_mask.shape != values_BT.shape:
        raise ValueError(f"attention_mask {list(attention_mask.shape)} and {name} {shape} need equal shapes.")


def check_aligned(input_ids: Tensor, **others: Tensor | None) -> None:
    """Raise ValueError if an input, called by its name, has not one value per input id."""
    for name, values in others.items():
        if values is not None and values.shape != input_ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}, input_ids {tuple(input_ids.shape)}. Give one value per id."
            )


def check_labels(config: PreTrainedConfig, labels: Tensor, input_ids: Tensor) -> None:
    """Check that labels are ids of the vocabulary or -100, one per input id."""
    if not isinstance(labels, Tensor) or labels.shape != input_ids.shape or labels.is_floating_point():
        given = f"{labels.dtype} {tuple(labels.shape)}" if isinstance(labels, Tensor) else f"a {type(labels).__name__}"
        raise ValueError(f"labels are {given}, but input_ids {tuple(input_ids.shape)}. Give one integer per input id.")
    check_label_ids(config, labels)


def check_label_ids(config: PreTrainedConfig, labels: Tensor) -> None:
    """Check that integers are ids of the vocabulary or -100; not on a GPU and in compiled code, see `check_tokens`."""
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        outside = (labels != -100) & ((labels < 0) | (labels >= config.vocab_size))
        if outside.any():
            raise ValueError(
                f"Label {labels[outside][0].item()} is outside the vocabulary ({config.vocab_size} ids). "
                "Use -100 to leave a token out of the loss."
            )
