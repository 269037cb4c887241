"""Renaming engine for state dicts: every key of the source is accounted for, or it is an error."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def clean_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check the tensors of a checkpoint, and strip the prefix `module.` of distributed training.

    Args:
        state_dict: tensors by their original names.

    Returns:
        The same tensors.

    Raises:
        ValueError: for keys that are no names, and values that are no finite floating-point numbers.
    """
    if not all(isinstance(key, str) for key in state_dict):
        raise ValueError("The keys of a state dict are names; this one has others. Pass the model's state dict.")
    cleaned = {key.removeprefix("module."): tensor for key, tensor in state_dict.items()}
    for key, tensor in cleaned.items():
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ValueError(f"{key} holds values that are no finite floating-point numbers. Is the file damaged?")
    return cleaned


def rename_state_dict(state_dict: Mapping[str, Tensor], rules: Mapping[str, str]) -> dict[str, Tensor]:
    r"""Rename the tensors of a state dict by patterns.

    Args:
        state_dict: tensors by their original names.
        rules: regular expression that matches a whole original name -> new name, in which `\1`, `\2`, ... stand for
            the groups.

    Returns:
        Tensors by their new names.

    Raises:
        ValueError: when a key matches no rule or two keys get the same new name; the message lists them.

    Cost: keys times rules.
    """
    renamed: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in state_dict.items():
        matches = ((re.fullmatch(pattern, key), target) for pattern, target in rules.items())
        match, target = next(((match, target) for match, target in matches if match), (None, ""))
        if match is None:
            unknown.append(key)
            continue
        name = match.expand(target)
        if name in renamed:
            raise ValueError(f"Two tensors of the checkpoint become {name!r}; the second is {key!r}.")
        renamed[name] = tensor
    if unknown:
        raise ValueError(f"The checkpoint holds {len(unknown)} unknown tensors: {unknown[:9]}. Is it another model?")
    return renamed


def boundary_ids(options: Mapping[str, Any]) -> dict[str, int | None]:
    """Token ids of the boundary of sentences, which no tensor tells.

    Args:
        options: `eos_token_id`, and `bos_token_id` where it is another one.

    Returns:
        Both, for the configuration; None where they are not given, so that nothing that needs them (`parse`) takes some
        word for the boundary.
    """
    end = options.get("eos_token_id")
    return {"bos_token_id": options.get("bos_token_id", end), "eos_token_id": end}


def fill_model(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a model its tensors, all of them and no others.

    Args:
        model: the model, changed in place.
        tensors: by the names of its state dict; of two tied tensors both.

    Raises:
        ValueError: when a tensor is missing, unknown or of another shape.
    """
    expected = {name: value.shape for name, value in model.state_dict().items()}
    for name in sorted(set(expected) | set(tensors)):
        found, wanted = tensors.get(name), expected.get(name)
        if found is None or wanted is None or found.shape != wanted:
            given = "missing" if found is None else tuple(found.shape)
            raise ValueError(
                f"{name} is {given} in the checkpoint and should be {None if wanted is None else tuple(wanted)}. "
                "Is it the configuration of this checkpoint?"
            )
    model.load_state_dict(dict(tensors))
