# SPDX-License-Identifier: Apache-2.0
"""What a model reads in one call: windows of texts, grouped by cost."""

import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from transformers import PreTrainedModel

from hf_synlm.evaluation.text.processes import Text
from hf_synlm.evaluation.text.words import EncodedText

T = TypeVar("T", bound=Text)
# Most texts of a call unless the caller decides. On a GPU a search launches hardly more kernels for many texts than for
# one, and a call that runs out of memory is halved.
_BATCH_SIZE, _GPU_BATCH_SIZE = 16, 128
# Most tokens, times derivations, that a call reads on a CPU.
_MAX_DERIVED_TOKENS = 12_000


class Window(NamedTuple):
    """Tokens of a text that are read together; the first `skip` are scored in an earlier window."""

    ids: tuple[int, ...]
    context: tuple[tuple[int, ...], ...]
    skip: int
    word_ends: tuple[bool, ...] = ()  # of models that do not know themselves which tokens end a word

    @property
    def num_tokens(self) -> int:
        """How many tokens are read for it."""
        return len(self.ids) + sum(map(len, self.context))


def cut_windows(
    text: EncodedText, limit: int | None, with_context: float | None = None, with_word_ends: bool = False
) -> list[Window]:
    """Cut a text into pieces of at most `limit` tokens, which overlap by half; keep as much of its context as fits.

    `with_context` is the largest number of tokens of a text with its context; None = `limit`.
    """
    context, length = tuple(map(tuple, text.context)), len(text.ids)
    ends = tuple(text.word_ends) if with_word_ends else ()
    if limit is None or length <= limit:
        room = limit if with_context is None else with_context
        while context and room is not None and sum(map(len, context)) + length > room:
            context = context[1:]
        return [Window(tuple(text.ids), context, 0, ends)]
    stride = max(1, limit // 2)
    windows, stop = [], 0
    while stop < length:
        start = max(0, stop - (limit - stride))
        part = slice(start, start + limit)
        windows.append(Window(tuple(text.ids[part]), (), stop - start, ends[part]))
        stop = start + limit
    return windows


def checked_batch_size(batch_size: int | None, model: PreTrainedModel) -> int:
    """How many texts a call reads at most; None = 16 on a CPU, 128 on other devices."""
    if batch_size is None:
        return _BATCH_SIZE if model.device.type == "cpu" else _GPU_BATCH_SIZE
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
    return batch_size


def token_budget(model: PreTrainedModel, width: int) -> int:
    """How many tokens a call should read with a beam of this width: number of its texts times length of the longest.

    On a CPU 12,000 / width: with more, each token takes longer. On other devices, memory decides.
    """
    return _MAX_DERIVED_TOKENS // width if model.device.type == "cpu" else sys.maxsize


def batches_by_cost(texts: Sequence[T], batch_size: int, budget: int) -> list[list[T]]:
    """Group texts so that the cost of a call, its number of texts times the longest, stays in a budget.

    A single text may exceed it. The longest come first, so that a lack of memory shows at once. Of equally long texts,
    those that begin alike stand side by side, because a search reads a common beginning once.
    """
    left = sorted(texts, key=lambda text: (-text.num_tokens, text.ids))
    batches = []
    while left:
        size = max(1, min(batch_size, budget // left[0].num_tokens))
        batches.append(left[:size])
        left = left[size:]
    return batches


def growing_blocks(texts: list[T], most: int) -> list[list[T]]:
    """1, 2, 4, ..., `most` texts at a time, in their order: the first are read soon, and most with others as long."""
    blocks, first = [], 0
    while first < len(texts):
        last = first + min(first + 1, most)
        blocks.append(texts[first:last])
        first = last
    return blocks
