# SPDX-License-Identifier: Apache-2.0
"""The arguments `output_hidden_states` and `output_attentions` of `forward`.

Both default to the fields of the same names in the configuration, as in transformers. Hidden states are one tuple: the
embeddings, then the output of every layer. Shapes: B sentences, T columns, X features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_synlm.core.rows import after_columns

_NO_CACHE = ("use_cache", False)
_REMEDIES = {
    "cu_seq_lens_q": "the texts of a packed row would read each other: give each text its own row (packing=False)",
    "num_items_in_batch": "every part of the loss has a count of its own: pass loss_shares (see count_loss_items)",
    "position_ids": "attention_mask counts the tokens: leave position_ids out, and use packing=False",
    "use_cache": "this call keeps no state: leave use_cache out",
}
# Values of `output_hidden_states`: yes or no, or which entries of the tuple.
HiddenStateChoice = bool | int | Sequence[int] | None


def asked_of_layers(more: Mapping[str, Any]) -> dict[str, Any]:
    """Take `output_hidden_states` and `output_attentions` from the `**kwargs` of a `forward`; refuse the others."""
    names = ("output_hidden_states", "output_attentions")
    refuse_arguments({name: value for name, value in more.items() if name not in names})
    return {name: more.get(name) for name in names}


def refuse_arguments(others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments that a `forward` does not have.

    None counts as not given: wrappers (PEFT) pass `inputs_embeds=None` and the like to every model. So does
    `use_cache=False`.
    """
    unknown = sorted(name for name, value in others.items() if value is not None and (name, value) != _NO_CACHE)
    if unknown:
        remedies = [f"{name}: {_REMEDIES[name]}" for name in unknown if name in _REMEDIES]
        raise TypeError(f"forward() takes no arguments {unknown}" + "".join(f". {remedy}" for remedy in remedies))


def wanted_states(config: PreTrainedConfig, output_hidden_states: HiddenStateChoice, num_states: int) -> frozenset[int]:
    """Places, counted from 0, of the hidden states that a caller wants; empty = no states.

    `output_hidden_states` is True (all), False, or places in the tuple of `num_states` entries, negative ones from its
    end; None = the field of `config`.
    """
    choice = config.output_hidden_states if output_hidden_states is None else output_hidden_states
    if isinstance(choice, bool) or choice is None:
        return frozenset(range(num_states) if choice else ())
    places = [choice] if isinstance(choice, int) else list(choice)
    wrong = [place for place in places if not -num_states <= place < num_states]
    if wrong:
        raise ValueError(f"output_hidden_states names entry {wrong[0]}, but this model has {num_states} entries.")
    return frozenset(place % num_states for place in places)


def wants_attentions(config: PreTrainedConfig, output_attentions: bool | None) -> bool:
    """Whether a caller wants attention weights: `output_attentions`, or the field of `config` where that is None."""
    return bool(config.output_attentions if output_attentions is None else output_attentions)


def kept_states(states: Sequence[Tensor], wanted: frozenset[int]) -> tuple[Tensor | None, ...] | None:
    """The tuple of hidden `states`, with None at the places that are not `wanted`; None if no place is."""
    return tuple(state if place in wanted else None for place, state in enumerate(states)) if wanted else None


def state_at_columns(values_BTX: Tensor, mask_BT: Tensor | None, before_BX: Tensor | None = None) -> Tensor:
    """Put values [B, T, X] after every token back to the columns of the input.

    A column that is skipped has the value of the column before it; before the first token that is `before_BX` (None =
    0).
    """
    if mask_BT is None:
        return values_BTX
    before = torch.zeros_like(values_BTX[:, 0]) if before_BX is None else before_BX.to(values_BTX)
    return after_columns(torch.cat([before[:, None], values_BTX], 1), mask_BT)
