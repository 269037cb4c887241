"""What `output_hidden_states` and `output_attentions` of a `forward` ask for; nothing is kept unless they do.

Both default to the fields of the same names in the configuration, as in transformers. Hidden states come as one tuple:
the embeddings, then the output of every layer. Shapes: B sentences, T columns, X features.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .token_batch import after_columns

# What `output_hidden_states` may be: yes or no, or which entries of the tuple.
HiddenStateChoice = bool | int | Sequence[int] | None


def asked_of_layers(more: Mapping[str, Any]) -> dict[str, Any]:
    """What `**kwargs` of a `forward` ask of the layers.

    Args:
        more: arguments without a name of their own. What is None counts as not given: wrappers pass on everything that
            they know of.

    Returns:
        `output_hidden_states` and `output_attentions`.

    Raises:
        TypeError: for other arguments.
    """
    names = ("output_hidden_states", "output_attentions")
    unknown = sorted(name for name, value in more.items() if value is not None and name not in names)
    if unknown:
        raise TypeError(f"forward() takes no arguments {unknown}")
    return {name: more.get(name) for name in names}


def wanted_states(config: PreTrainedConfig, output_hidden_states: HiddenStateChoice, num_states: int) -> frozenset[int]:
    """Which hidden states a caller asks for.

    Args:
        config: its `output_hidden_states` counts where the argument is None.
        output_hidden_states: True = all, False = none; or places in the tuple, negative ones from its end.
        num_states: how many there are.

    Returns:
        Places, none of them negative; empty = nothing is asked for.

    Raises:
        ValueError: for places that do not exist.
    """
    choice = config.output_hidden_states if output_hidden_states is None else output_hidden_states
    if isinstance(choice, bool) or choice is None:
        return frozenset(range(num_states) if choice else ())
    places = [choice] if isinstance(choice, int) else list(choice)
    wrong = [place for place in places if not -num_states <= place < num_states]
    if wrong:
        raise ValueError(f"output_hidden_states: there is no entry {wrong[0]}; this model has {num_states} of them.")
    return frozenset(place % num_states for place in places)


def wants_attentions(config: PreTrainedConfig, output_attentions: bool | None) -> bool:
    """Whether a caller asks for attention weights.

    Args:
        config: its `output_attentions` counts where the argument is None.
        output_attentions: the argument.

    Returns:
        The answer.
    """
    return bool(config.output_attentions if output_attentions is None else output_attentions)


def refuse_layer_outputs(
    config: PreTrainedConfig,
    reason: str,
    output_hidden_states: HiddenStateChoice = False,
    output_attentions: bool | None = False,
) -> None:
    """Raise ValueError if something is asked for that there is not.

    Args:
        config: of the model.
        reason: why there is none, and what to do instead.
        output_hidden_states: the argument, where there are no hidden states.
        output_attentions: the argument, where there are no attention weights.

    Raises:
        ValueError: if one of them is asked for.
    """
    choices = {"output_hidden_states": output_hidden_states, "output_attentions": output_attentions}
    for name, choice in choices.items():
        choice = getattr(config, name) if choice is None else choice
        if choice or type(choice) is int:  # 0 is a place
            raise ValueError(f"{name}={choice!r}: {reason}")


def kept_states(states: Sequence[Tensor], wanted: frozenset[int]) -> tuple[Tensor | None, ...] | None:
    """The tuple of hidden states, with None for those that nobody asks for.

    Args:
        states: all of them, or nothing where nothing is asked for.
        wanted: places.

    Returns:
        The tuple; None if nothing is asked for.
    """
    return tuple(state if place in wanted else None for place, state in enumerate(states)) if wanted else None


def state_at_columns(values_BTX: Tensor, mask_BT: Tensor | None, before_BX: Tensor | None = None) -> Tensor:
    """Values of tokens that stand first, at the columns of the input.

    Args:
        values_BTX: after every token.
        mask_BT: True = token; None = every column.
        before_BX: before the first token; None = 0.

    Returns:
        [B, T, X]; a column that is skipped has the value of the column before it.
    """
    if mask_BT is None:
        return values_BTX
    before = torch.zeros_like(values_BTX[:, 0]) if before_BX is None else before_BX.to(values_BTX)
    return after_columns(torch.cat([before[:, None], values_BTX], 1), mask_BT)


__all__ = [
    "HiddenStateChoice",
    "asked_of_layers",
    "kept_states",
    "refuse_layer_outputs",
    "state_at_columns",
    "wanted_states",
    "wants_attentions",
]
