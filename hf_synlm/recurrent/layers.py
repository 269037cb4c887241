# SPDX-License-Identifier: Apache-2.0
"""Layers of recurrent language models: an LSTM over rows of unequal length, and dropout.

Dropout has one mask for all time steps (`locked_dropout`), for all occurrences of a word (`embedding_dropout`), or for
the weights of a whole segment (`weight_dropout`). All masks come from `keep_mask`.

Shapes: B rows, T tokens, I input size, H hidden size, D features, E embedding, V vocabulary.

Source: `locked_dropout.py`, `embed_regularize.py` and `weight_drop.py` of AWD-LSTM, `LinearDropConnect` of
Ordered-Neurons.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from hf_synlm.core.matrix_products import without_autocast


def lstm_layer(
    inputs_BTI: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], lengths_B: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Run one LSTM layer over rows of unequal length: outputs [B, T, H], and (h, c), each [B, H], after every row.

    Padding follows the inputs [B, T, I] of a row. The weights are those of the inputs [4 H, I], of h [4 H, H], and two
    biases [4 H], gates in the order of `nn.LSTM`.

    Under autocast the layer runs in the type of its weights: PyTorch's bfloat16 LSTM needs a CPU with AVX-512, and on a
    GPU autocast would run it in float16, where small gradients become 0.
    """
    with without_autocast(inputs_BTI.device.type):
        return _run_lstm(inputs_BTI.to(weights[0].dtype), state, weights, lengths_B)


def _run_lstm(
    inputs_BTI: Tensor, state: tuple[Tensor, Tensor], weights: Sequence[Tensor], lengths_B: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """`lstm_layer`, in the type of its inputs."""
    options = (True, 1, 0.0, torch.is_grad_enabled(), False)  # biases, layers, dropout, train, bidirectional
    old = tuple(tensor[None].to(inputs_BTI) for tensor in state)
    if lengths_B is None or inputs_BTI.shape[1] == 1:
        outputs, *new = torch.lstm(inputs_BTI, old, list(weights), *options, True)
        if lengths_B is not None:
            new = [torch.where(lengths_B[:, None] > 0, *pair) for pair in zip(new, old, strict=True)]
        return outputs, (new[0][0], new[1][0])
    # Packing needs at least one input per row: empty rows read one and keep their old state.
    lengths = lengths_B.clamp_min(1).cpu()
    packed = pack_padded_sequence(inputs_BTI, lengths, batch_first=True, enforce_sorted=False)
    begin = tuple(tensor[:, packed.sorted_indices] for tensor in old)
    data, *new = torch.lstm(packed.data, packed.batch_sizes, begin, list(weights), *options)
    packed = PackedSequence(data, packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices)
    outputs, _ = pad_packed_sequence(packed, batch_first=True, total_length=inputs_BTI.shape[1])
    has_token = (lengths_B > 0)[:, None]
    pairs = zip(new, old, strict=True)
    hidden, cell = (torch.where(has_token, n[0, packed.unsorted_indices], o[0]) for n, o in pairs)
    return outputs, (hidden, cell)


def keep_mask(shape: Sequence[int], p: float, like: Tensor, rescale: bool = True) -> Tensor:
    """Draw a mask to multiply with: 0 with probability p, otherwise 1 / (1 - p), or 1 without rescaling."""
    mask = torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_(1 - p)
    return mask.div_(1 - p) if rescale else mask


def locked_mask(batch_size: int, size: int, p: float, training: bool, like: Tensor) -> Tensor | None:
    """Draw the mask [B, 1, D] of `locked_dropout`; None if nothing is dropped."""
    return keep_mask((batch_size, 1, size), p, like) if training and p else None


def locked_dropout(values_BTD: Tensor, p: float, training: bool) -> Tensor:
    """Drop the same features at all time steps of a sentence [B, T, D] (variational dropout)."""
    mask = locked_mask(len(values_BTD), values_BTD.shape[2], p, training, values_BTD)
    return values_BTD if mask is None else values_BTD * mask


def embedding_dropout(
    embedded_BTE: Tensor, input_ids: Tensor | None, vocab_size: int, p: float, training: bool
) -> Tensor:
    """Drop words: all occurrences of a token id in the batch together.

    This equals dropping rows of the embedding matrix before the lookup, without a copy of the matrix. Nothing is
    dropped from embeddings that came without ids (`inputs_embeds`).
    """
    if not training or p == 0 or input_ids is None:
        return embedded_BTE
    return embedded_BTE * keep_mask((vocab_size, 1), p, embedded_BTE)[input_ids]


def weight_dropout(weight: Tensor, p: float, training: bool, *, rescale: bool) -> Tensor:
    """Drop single weights of a recurrent matrix (DropConnect), the same ones for a whole segment.

    With `rescale`, training divides the kept weights by 1 - p, and evaluation uses the matrix as it is (AWD-LSTM).
    Without, training uses the kept weights as they are, and evaluation the matrix times 1 - p (Ordered-Neurons).
    """
    if p == 0:
        return weight
    if training:
        return weight * keep_mask(weight.shape, p, weight, rescale)
    return weight if rescale else weight * (1 - p)
