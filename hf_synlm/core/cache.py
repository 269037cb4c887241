"""The state of a model after a prefix as `past_key_values`."""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache


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
            f"crop({tokens_to_remove}): the model cannot go back to words that it has read; start a new cache"
        )
