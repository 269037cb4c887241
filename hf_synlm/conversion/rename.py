"""What the converters share: rename every tensor of a state dict or refuse it, read options, fill a model."""

import re
from collections.abc import Container, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)
COUNTER = ".num_batches_tracked"  # of batch normalizers, which older versions of PyTorch do not have


def clean_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check the tensors of a checkpoint, and strip the prefix `module.` of distributed training.

    Args:
        state_dict: tensors by their original names.

    Returns:
        The same tensors.

    Raises:
        ValueError: for keys that are not strings, and values that are not finite floating-point numbers; counters of
            batch normalizers are whole numbers.
    """
    if not all(isinstance(key, str) for key in state_dict):
        raise ValueError("The keys of a state dict are names; this one has other keys. Pass the model's state dict.")
    cleaned = {key.removeprefix("module."): tensor for key, tensor in state_dict.items()}
    for key, tensor in cleaned.items():
        if key.endswith(COUNTER):
            continue
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ValueError(f"{key} holds values that are not finite floating-point numbers. Is the file damaged?")
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


# Options of AWD-LSTM, which PaLM and ON-LSTM are built on, and their fields here.
AWD_OPTIONS = {
    "dropoute": "embedding_dropout",
    "dropouti": "input_dropout",
    "dropouth": "hidden_dropout",
    "dropout": "output_dropout",
    "wdrop": "weight_dropout",
    "alpha": "activation_regularization",
    "ar_alpha": "activation_regularization",
    "beta": "temporal_activation_regularization",
    "tar_beta": "temporal_activation_regularization",
}
# How to take the tensors out of the pickles of AWD-LSTM's descendants; what to add to config.json differs.
AWD_EXTRACTION = """in a copy of the authors' code, with a file that you trust, run
    import json, torch
    model = torch.load("model.pt", map_location="cpu", weights_only=False)[0]
    torch.save(model.state_dict(), "weights.pt")
    json.dump(vars(args), open("config.json", "w"))"""


def flat_options(original_config: Mapping[str, Any], *sections: str) -> dict[str, Any]:
    """Options of a configuration, with those in its sections put at the top.

    Args:
        original_config: options by name.
        *sections: names of sections, which may be absent.

    Returns:
        The options; a section counts more than the top.
    """
    options = dict(original_config)
    for section in sections:
        if isinstance(original_config.get(section), Mapping):
            options |= original_config[section]
    return options


def require(names: Iterable[str], given: Container[str], what: str, remedy: str) -> None:
    """Refuse a checkpoint or a configuration that lacks something.

    Args:
        names: what must be there.
        given: what is there.
        what: beginning of the message, which the missing names follow.
        remedy: end of the message.

    Raises:
        ValueError: names are missing.
    """
    missing = [name for name in names if name not in given]
    if missing:
        raise ValueError(f"{what} {missing}. {remedy}")


def check_sizes(sizes: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Refuse a configuration whose sizes are not those of the tensors.

    Args:
        sizes: of the tensors, by the names of the authors' options.
        options: the authors' options; sizes may be absent.

    Raises:
        ValueError: a size differs.
    """
    for name, value in sizes.items():
        if options.get(name, value) != value:
            raise ValueError(f"{name} is {options[name]} in the configuration and {value} in the tensors.")


def count_parts(tensors: Iterable[str], prefix: str) -> int:
    """Number of layers or blocks, from names such as "model.layers.3.weight".

    Args:
        tensors: their names.
        prefix: what comes before the number, such as "model.layers.".

    Returns:
        How many different numbers follow the prefix.
    """
    return len({name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)})


def boundary_ids(options: Mapping[str, Any]) -> dict[str, int | None]:
    """Token ids of the beginning and end of sentences, which cannot be read off the tensors.

    Args:
        options: `eos_token_id`, and `bos_token_id` where it is another one.

    Returns:
        Both, for the configuration; None where they are not given, so that `parse` takes no ordinary word for the
        boundary.
    """
    end = options.get("eos_token_id")
    return {"bos_token_id": options.get("bos_token_id", end), "eos_token_id": end}


def fill_model(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    """Give a model its tensors, all of them and no others.

    Args:
        model: the model, changed in place.
        tensors: by the names of its state dict; of two tied tensors both. Counters of batch normalizers may be missing.

    Returns:
        The model, its tied weights tied, in evaluation mode.

    Raises:
        ValueError: when a tensor is missing, unknown or of another shape.
    """
    expected = {name: value.shape for name, value in model.state_dict().items()}
    for name in sorted(set(expected) | set(tensors)):
        found, wanted = tensors.get(name), expected.get(name)
        if found is None and name.endswith(COUNTER):
            continue  # PyTorch counts from zero
        if found is None or wanted is None or found.shape != wanted:
            given = "missing" if found is None else tuple(found.shape)
            raise ValueError(
                f"{name} is {given} in the checkpoint and should be {None if wanted is None else tuple(wanted)}. "
                "Is it the configuration of this checkpoint?"
            )
    model.load_state_dict(dict(tensors))
    model.tie_weights()
    return model.eval()
