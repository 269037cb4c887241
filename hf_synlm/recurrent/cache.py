# SPDX-License-Identifier: Apache-2.0
"""The state of a recurrent network as `past_key_values`, and the segments of text that it reads."""

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_synlm.core.cache import StateCache
from hf_synlm.core.token_batch import check_columns, check_tokens, padding_mask


class RecurrentCache(StateCache):
    """State of a recurrent network after a prefix.

    `forward` replaces the state, a tuple of tensors, in place and detaches it from the
    graph, so that segments of a long text can be trained one after the other. It cannot be cropped: a recurrent
    network does not go back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.batch_dim = 0

    def store(self, state: tuple[Tensor, ...], num_columns: int, batch_dim: int = 0) -> None:
        """Replace the state after reading `num_columns` more.

        `batch_dim` is the dimension of the sentences in its tensors.
        """
        self.batch_dim = batch_dim
        # Copies: a slice would keep (and save) the states of the whole segment.
        self.state = tuple(tensor.detach().clone() for tensor in state)
        self.num_columns += num_columns

    def read(self, device: torch.device) -> tuple[Tensor, ...]:
        """The state on `device`."""
        # Tensors made in inference mode can be used in training only after a copy outside of it.
        copy = not torch.is_inference_mode_enabled()
        return tuple((t.clone() if copy and t.is_inference() else t).to(device) for t in self.state or ())

    def __bool__(self) -> bool:
        """True: there are no layers to count."""
        return True

    @property
    def batch_size(self) -> int:
        """Number of sentences; 0 before anything was read."""
        return 0 if self.state is None else self.state[0].shape[self.batch_dim]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sentences `beam_idx` [B'], in that order."""
        if self.state is not None:
            self.state = tuple(tensor.index_select(self.batch_dim, beam_idx.to(tensor.device)) for tensor in self.state)


def store_state(
    cache: RecurrentCache | None, wanted: bool | None, state: tuple[Tensor, ...], num_columns: int, batch_dim: int = 0
) -> RecurrentCache | None:
    """Store the state after a segment in the cache, or in a new one if one is `wanted`; see `RecurrentCache.store`."""
    if cache is None and not wanted:
        return None
    cache = RecurrentCache() if cache is None else cache
    cache.store(state, num_columns, batch_dim)
    return cache


def segment_mask(
    config: PreTrainedConfig,
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    cache: RecurrentCache | None,
) -> Tensor | None:
    """Check a segment of text; mask [B, T] of the columns that hold tokens, None = all.

    The segment is given as ids or as embeddings. `attention_mask` covers it, or all columns read so far, those of the
    `cache` included.
    """
    columns, attention_mask = columns_of(input_ids, inputs_embeds), padding_mask(attention_mask)
    if cache is not None and cache.is_initialized:
        if cache.batch_size != len(columns):
            raise ValueError(
                f"past_key_values holds {cache.batch_size} rows, but input_ids has {len(columns)}. Pass the cache "
                "that was returned for the same rows, or leave past_key_values out."
            )
        both = (len(columns), cache.num_columns + columns.shape[-1])
        if attention_mask is not None and attention_mask.shape == both:
            attention_mask = attention_mask[:, cache.num_columns :]
    if inputs_embeds is None:
        check_tokens(config, input_ids, attention_mask)
    else:
        check_columns("inputs_embeds", columns, attention_mask)
        if inputs_embeds.shape[2] != config.embedding_size:
            raise ValueError(f"inputs_embeds are {inputs_embeds.shape[2]} wide, not {config.embedding_size}.")
    return None if attention_mask is None else attention_mask.bool()


def columns_of(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """A tensor [B, T] with a value for each column of a text that is given as ids or as embeddings [B, T, E]."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("Give either input_ids or inputs_embeds, not both.")
    if inputs_embeds is None:
        return input_ids
    return inputs_embeds[..., 0]
