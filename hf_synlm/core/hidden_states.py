"""The arguments `output_hidden_states` and `output_attentions` of `forward`.

Both default to the fields of the same names in the configuration, as in transformers. Hidden states are one tuple: the
embeddings, then the output of every layer. Shapes: B sentences, T columns, X features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_synlm.core.token_batch import after_columns

# Values of `output_hidden_states`: yes or no, or which entries of the tuple.
HiddenStateChoice = bool | int | Sequence[int] | None


def asked_of_layers(more: Mapping[str, Any]) -> dict[str, Any]:
    """Take `output_hidden_states` and `output_attentions` from the `**kwargs` of a `forward`.

    Args:
        more: the `**kwargs`. A value of None counts as not given: wrappers pass on all arguments that they know.

    Returns:
        `output_hidden_states` and `output_attentions`.

    Raises:
        TypeError: for other arguments.
    """
    names = ("output_hidden_states", "output_attentions")
    refuse_arguments({name: value for name, value in more.items() if name not in names})
    return {name: more.get(name) for name in names}


def refuse_arguments(others: Mapping[str, Any]) -> None:
    """Raise TypeError for arguments of a `forward` that it does not have; None counts as not given.

    Args:
        others: keyword arguments. Wrappers (PEFT) pass on `inputs_embeds=None` and the like to every model.

    Raises:
        TypeError: if one of them is not None.
    """
    unknown = sorted(name for name, value in others.items() if value is not None)
    if unknown:
        raise TypeError(f"forward() takes no arguments {unknown}")


def wanted_states(config: PreTrainedConfig, output_hidden_states: HiddenStateChoice, num_states: int) -> frozenset[int]:
    """Which hidden states a caller wants.

    Args:
        config: gives the value where the argument is None.
        output_hidden_states: True = all, False = none; or places in the tuple, negative ones from its end.
        num_states: length of the tuple.

    Returns:
        Places from 0 on; empty = none.

    Raises:
        ValueError: for places that do not exist.
    """
    choice = config.output_hidden_states if output_hidden_states is None else output_hidden_states
    if isinstance(choice, bool) or choice is None:
        return frozenset(range(num_states) if choice else ())
    places = [choice] if isinstance(choice, int) else list(choice)
    wrong = [place for place in places if not -num_states <= place < num_states]
    if wrong:
        raise ValueError(f"output_hidden_states: no entry {wrong[0]}; this model has {num_states} entries.")
    return frozenset(place % num_states for place in places)


def wants_attentions(config: PreTrainedConfig, output_attentions: bool | None) -> bool:
    """Whether a caller wants attention weights: `output_attentions`, or the field of `config` where that is None."""
    return bool(config.output_attentions if output_attentions is None else output_attentions)


def refuse_layer_outputs(
    config: PreTrainedConfig,
    reason: str,
    output_hidden_states: HiddenStateChoice = False,
    output_attentions: bool | None = False,
) -> None:
    """Raise ValueError if a caller wants outputs that the model does not have.

    Args:
        config: gives the values where arguments are None.
        reason: why the outputs do not exist, and what to do instead.
        output_hidden_states: the argument, if the model has no hidden states.
        output_attentions: the argument, if the model has no attention weights.

    Raises:
        ValueError: if the caller wants one of them.
    """
    choices = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
    for name, choice in choices.items():
        choice = getattr(config, name) if choice is None else choice
        if choice or type(choice) is int:  # 0 is a place
            raise ValueError(f"{name}={choice!r}: {reason}")


def kept_states(states: Sequence[Tensor], wanted: frozenset[int]) -> tuple[Tensor | None, ...] | None:
    """The tuple of hidden `states`, with None at the places that are not `wanted`; None if no place is."""
    return tuple(state if place in wanted else None for place, state in enumerate(states)) if wanted else None


def state_at_columns(values_BTX: Tensor, mask_BT: Tensor | None, before_BX: Tensor | None = None) -> Tensor:
    """Put values after every token back to the columns of the input.

    Args:
        values_BTX: after every token, without gaps between the tokens.
        mask_BT: True = token; None = every column.
        before_BX: before the first token; None = 0.

    Returns:
        [B, T, X]; a column that is skipped has the value of the column before it.
    """
    if mask_BT is None:
        return values_BTX
    before = torch.zeros_like(values_BTX[:, 0]) if before_BX is None else before_BX.to(values_BTX)
    return after_columns(torch.cat([before[:, None], values_BTX], 1), mask_BT)
