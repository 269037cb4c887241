# SPDX-License-Identifier: Apache-2.0
"""What a model reads in one call: windows of texts, grouped by cost; and texts block by block."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedModel

from hf_synlm.evaluation.text.cache import Result
from hf_synlm.evaluation.text.processes import Compute, Text, iterate_batches
from hf_synlm.evaluation.text.words import EncodedText

T = TypeVar("T", bound=Text)
U = TypeVar("U")
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
    belief_ends: tuple[bool, ...] = ()  # of the words that have a belief update

    @property
    def num_tokens(self) -> int:
        """How many tokens are read for it."""
        return len(self.ids) + sum(map(len, self.context))


def cut_windows(
    text: EncodedText, limit: int | None, with_context: float | None, ends: Mapping[str, Sequence[bool]]
) -> list[Window]:
    """Cut a text into pieces of at most `limit` tokens, which overlap by half; keep as much of its context as fits.

    `with_context` is the largest number of tokens of a text with its context; None = `limit`. `ends` are values of all
    tokens by the field of `Window` that holds them.
    """
    context, length = tuple(map(tuple, text.context)), len(text.ids)
    if limit is None or length <= limit:
        room = limit if with_context is None else with_context
        while context and room is not None and sum(map(len, context)) + length > room:
            context = context[1:]
        return [Window(tuple(text.ids), context, 0, **{name: tuple(flags) for name, flags in ends.items()})]
    stride = max(1, limit // 2)
    windows, stop = [], 0
    while stop < length:
        start = max(0, stop - (limit - stride))
        part = slice(start, start + limit)
        flags = {name: tuple(values[part]) for name, values in ends.items()}
        windows.append(Window(tuple(text.ids[part]), (), stop - start, **flags))
        stop = start + limit
    return windows


def usual_batch_size(batch_size: int | None, model: PreTrainedModel) -> int:
    """How many texts a call reads at most; None = 16 on a CPU, 128 on other devices."""
    return batch_size or (_BATCH_SIZE if model.device.type == "cpu" else _GPU_BATCH_SIZE)


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


def growing_blocks(texts: Iterable[U], most: int, first: int = 1) -> Iterator[list[U]]:
    """`first` texts, then twice as many, ..., `most` at a time, in their order: the first are read soon."""
    left, size = iter(texts), first
    while block := list(islice(left, size)):
        yield block
        size = min(2 * size, most)


def iterate_texts(
    texts: Iterable[Any],
    parts_of: Callable[[Any], Sequence[Any]],
    compute: Compute,
    model: PreTrainedModel,
    *,
    batch_size: int,
    budget: int,
    **running: Any,
) -> Iterator[list[tuple[Any, Result]]]:
    """The parts of each text with their results, in the order of the texts.

    A list is one block of texts. Of an iterator, blocks that grow to 64 batches are taken as they are needed, and
    forgotten when they are computed. `batch_size` and `budget` are those of `batches_by_cost`, which groups the
    different parts of a block; `running` goes to `iterate_batches`.
    """
    is_list = isinstance(texts, list)
    # The parts of each text of a block, and how many results there are when all of them are computed.
    waiting: deque[tuple[list[Sequence[Any]], int]] = deque()

    def batches() -> Iterator[list[Any]]:
        number = 0
        for block in [texts] if is_list else growing_blocks(texts, 64 * batch_size):
            rows = [parts_of(text) for text in block]
            different = list(dict.fromkeys(chain.from_iterable(rows)))
            number += len(different)
            waiting.append((rows, number))
            yield from batches_by_cost(different, batch_size, budget)

    computed = iterate_batches(compute, list(batches()) if is_list else batches(), model, **running)
    results: dict[Any, Result] = {}
    for number, pair in enumerate(chain([None], computed)):
        results |= [] if pair is None else [pair]
        while waiting and waiting[0][1] <= number:
            rows, _ = waiting.popleft()
            yield from ([(part, results[part]) for part in row] for row in rows)
            for part in chain.from_iterable(rows):
                results.pop(part, None)
    yield from ([] for rows, _ in waiting for _ in rows)  # nothing to compute
