# SPDX-License-Identifier: Apache-2.0
"""The state of a model after a prefix, and the name that it has in calls and outputs.

transformers 5.24 renamed `past_key_values` to `cache`, in outputs, `forward` and `generate`. Models here take both
names, and their outputs know both. Calls of stock code use `CACHE`, the name in the version that is installed.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

CACHE_NAMES = ("past_key_values", "cache")
CACHE = next(field.name for field in fields(BaseModelOutputWithPast) if field.name in CACHE_NAMES)


def name_cache(arguments: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments of a call, with the cache under `name`; ValueError if it is given under both names."""
    given = [value for key, value in arguments.items() if key in CACHE_NAMES and value is not None]
    others = {key: value for key, value in arguments.items() if key not in CACHE_NAMES}
    return {**others, name: given[0]} if given else others


def takes_both_names(forward: Callable) -> Callable:
    """A `forward` with the argument `past_key_values` that also takes `cache`; its signature has the name `CACHE`."""
    signature = inspect.signature(forward)

    @functools.wraps(forward)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **name_cache(kwargs, "past_key_values"))

    parameters = signature.parameters.values()
    own = [part.replace(name=CACHE) if part.name == "past_key_values" else part for part in parameters]
    renamed.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]  # `inspect` reads it
    return renamed


class StateCache(Cache):
    """A state that a model replaces as a whole; stock decoding loops treat it like any other cache.

    A subclass has `batch_size` and `reorder_cache`.
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.state: Any = None
        self.num_columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of input columns read, padding included."""
        return self.num_columns

    @property
    def is_initialized(self) -> bool:
        """Whether anything was read."""
        return self.state is not None

    @property
    def is_croppable(self) -> bool:
        """False."""
        return False

    @property
    def is_compileable(self) -> bool:
        """False."""
        return False

    @property
    def is_linear(self) -> list[bool]:
        """As of a cache of keys: `generate` leaves out the words of a prompt that were read (transformers 5.24)."""
        return [False]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the sentences `indices` [B'], in that order."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sentence `repeats` times."""
        if self.state is not None:
            self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.state, self.num_columns = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Not possible."""
        raise ValueError(
            f"crop({tokens_to_remove}): the model cannot go back to words that it has read. Start a new cache"
        )
