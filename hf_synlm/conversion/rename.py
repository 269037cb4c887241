# SPDX-License-Identifier: Apache-2.0
"""What the converters share: rename every tensor of a state dict or refuse it, read options, fill a model."""

import pickle
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

Model = TypeVar("Model", bound=PreTrainedModel)
COUNTER = ".num_batches_tracked"  # of batch normalizers, which older versions of PyTorch do not have


class Tensors(dict[str, Tensor]):
    """Tensors of a checkpoint by name; one that is missing is a ValueError."""

    def __missing__(self, name: str) -> Tensor:
        raise ValueError(f"The checkpoint lacks {name!r}. Is it another model?")


class Options(dict[str, Any]):
    """Options of a configuration by name; one that is missing is a ValueError."""

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"The configuration lacks {name!r}. Add {name!r}, because the tensors do not show it.")


def clean_state_dict(state_dict: Mapping[str, Tensor]) -> Tensors:
    """Strip the prefix `module.` of distributed training, and refuse values that are not finite floats.

    Counters of batch normalizers are whole numbers.
    """
    cleaned = Tensors({key.removeprefix("module."): tensor for key, tensor in state_dict.items()})
    for key, tensor in cleaned.items():
        if key.endswith(COUNTER):
            continue
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise ValueError(f"{key} holds values that are not finite floating-point numbers. Is the file damaged?")
    return cleaned


def rename_state_dict(state_dict: Mapping[str, Tensor], rules: Mapping[str, str]) -> Tensors:
    r"""Rename tensors by rules: regular expression that matches a whole name -> new name, with groups as `\1`.

    Raises ValueError with the names that match no rule, and if two tensors get the same name.
    """
    renamed = Tensors()
    unknown = []
    for key, tensor in state_dict.items():
        matches = ((re.fullmatch(pattern, key), target) for pattern, target in rules.items())
        match, target = next(((match, target) for match, target in matches if match), (None, ""))
        if match is None:
            unknown.append(key)
            continue
        name = match.expand(target)
        if name in renamed:
            raise ValueError(f"{key!r} and an earlier tensor of the checkpoint both become {name!r}.")
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


def flat_options(original_config: Mapping[str, Any], *sections: str) -> Options:
    """Options of a configuration, with those of its sections put at the top, where they win."""
    options = Options(original_config)
    for section in sections:
        if isinstance(original_config.get(section), Mapping):
            options |= original_config[section]
    return options


# Fields here that tensors tell -> what the authors' programs call them.
_SIZES = {
    "vocab_size": "ntoken vocab V",
    "embedding_size": "ninp emsize emb_size w_dim",
    "layer_size": "nhid hidden_size",
    "num_layers": "nlayers",
    "num_lookback": "nlookback",
    "num_residual_blocks": "res",
    "hidden_size": "h_dim",
    "rrnn_size": "rrnn_size_per_direction",
    "attention_size": "attention_mlp_size",
    "symbol_size": "state_dim s_dim",
    "num_nonterminals": "nt_states NT",
    "num_preterminals": "t_states T",
    "rank": "r_dim",
    "latent_size": "z_dim",
    "encoder_embedding_size": "w_dim",
    "encoder_hidden_size": "h_dim",
}


def check_sizes(sizes: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ValueError unless options, where given, equal the sizes of the tensors, by the names of fields here."""
    for field, value in sizes.items():
        for name in (field, *_SIZES.get(field, "").split()):
            if options.get(name, value) != value:
                raise ValueError(f"{name} is {options[name]} in the configuration, but {value} in the tensors.")


def count_parts(tensors: Iterable[str], prefix: str) -> int:
    """Number of layers or blocks, from names such as "model.layers.3.weight" with the prefix "model.layers."."""
    return len({name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)})


def end_ids(options: Mapping[str, Any]) -> dict[str, int | None]:
    """Token ids of the beginning and end of sentences, which cannot be read off the tensors.

    They are None where they are not given, so that `parse` takes no ordinary word for the boundary.
    """
    end = options.get("eos_token_id")
    return {"bos_token_id": options.get("bos_token_id", end), "eos_token_id": end}


def fill_model(model: Model, tensors: Mapping[str, Tensor]) -> Model:
    """Give a model its tensors, all of them and no others, tie its weights, and put it into evaluation mode.

    Of two tied tensors both are given. Counters of batch normalizers may be missing.
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
                "Does the configuration belong to this checkpoint?"
            )
    for name, other in model.all_tied_weights_keys.items():
        if not torch.equal(tensors[name], tensors[other]):
            raise ValueError(f"{name} and {other} differ, but the model ties them. Is the file damaged?")
    model.load_state_dict(dict(tensors))
    model.tie_weights()
    return model.eval()


# Classes whose objects the authors' pickles consist of (a model of harvardnlp/compound-pcfg, the vocabulary of
# Pushdown-Layers), and functions that make their tensors.
_CLASSES = (
    "models.CompPCFG models.ResidualLayer PCFG.PCFG torch.nn.modules.linear.Linear torch.nn.modules.sparse.Embedding "
    "torch.nn.modules.container.Sequential torch.nn.modules.activation.ReLU torch.nn.modules.rnn.LSTM "
    "torch.nn.modules.container.ModuleList torch.nn.modules.dropout.Dropout "
    "torch.nn.backends.thnn._get_thnn_function_backend "  # in every module of PyTorch 1.0, which the authors used
    "vocabulary.WordVocabulary"
).split()
_TENSORS = {
    "collections.OrderedDict", "builtins.set", "__builtin__.set",
    "torch._utils._rebuild_parameter", "torch._utils._rebuild_tensor_v2", "torch.nn.parameter.Parameter",
}  # fmt: skip


class Holder:
    """Stands for an object of a pickle: attributes without code."""


class HolderUnpickler(pickle.Unpickler):
    """Reads tensors, and objects without their code; every other class is refused."""

    def find_class(self, module: str, name: str) -> Any:
        """The function or class that a pickle names."""
        if f"{module}.{name}" in _CLASSES:
            return type(name, (Holder,), {})
        if f"{module}.{name}" in _TENSORS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")

    @classmethod
    def load_file(cls, file: Any, **options: Any) -> Any:
        """Read a pickle from an open file."""
        return cls(file, **options).load()
