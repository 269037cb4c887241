"""Dropout of recurrent language models: one mask for all time steps, for whole words, for weights.

All masks come from `keep_mask`. Shapes: B sentences, T tokens, D features, E embedding, V vocabulary.

Source: `locked_dropout.py`, `embed_regularize.py` and `weight_drop.py` of AWD-LSTM, `LinearDropConnect` of
Ordered-Neurons.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def keep_mask(shape: Sequence[int], p: float, like: Tensor, rescale: bool = True) -> Tensor:
    """Draw a mask to multiply with: 0 with probability p, otherwise 1 / (1 - p), or 1 without rescaling.

    Args:
        shape: of the mask.
        p: probability of dropping, in [0, 1).
        like: gives type and device.
        rescale: keep the expected value of what is multiplied.

    Returns:
        The mask.
    """
    mask = torch.empty(tuple(shape), dtype=like.dtype, device=like.device).bernoulli_(1 - p)
    return mask.div_(1 - p) if rescale else mask


def locked_dropout(values_BTD: Tensor, p: float, training: bool) -> Tensor:
    """Drop the same features at all time steps of a sentence.

    Args:
        values_BTD: values.
        p: probability of dropping.
        training: otherwise nothing is dropped.

    Returns:
        [B, T, D].
    """
    if not training or p == 0:
        return values_BTD
    return values_BTD * keep_mask((values_BTD.shape[0], 1, values_BTD.shape[2]), p, values_BTD)


def embedding_dropout(embedded_BTE: Tensor, input_ids: Tensor, vocab_size: int, p: float, training: bool) -> Tensor:
    """Drop words: all occurrences of a token id in the batch together.

    The same as to drop rows of the embedding matrix before the lookup, without a copy of the matrix.

    Args:
        embedded_BTE: embeddings of `input_ids`.
        input_ids: [B, T].
        vocab_size: number of token ids V.
        p: probability of dropping.
        training: otherwise nothing is dropped.

    Returns:
        [B, T, E].
    """
    if not training or p == 0:
        return embedded_BTE
    return embedded_BTE * keep_mask((vocab_size, 1), p, embedded_BTE)[input_ids]


def weight_dropout(weight: Tensor, p: float, training: bool, *, rescale: bool) -> Tensor:
    """Drop single weights of a recurrent matrix, the same for a whole segment.

    Args:
        weight: the matrix.
        p: probability of dropping.
        training: draw a mask.
        rescale: True: what is kept is divided by 1 - p in training, and evaluation uses the matrix as it is (AWD-LSTM).
            False: training uses what is kept as it is, and evaluation the matrix times 1 - p (Ordered-Neurons).

    Returns:
        The matrix to use.
    """
    if p == 0:
        return weight
    if training:
        return weight * keep_mask(weight.shape, p, weight, rescale)
    return weight if rescale else weight * (1 - p)


__all__ = ["embedding_dropout", "keep_mask", "locked_dropout", "weight_dropout"]
