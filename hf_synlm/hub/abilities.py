# SPDX-License-Identifier: Apache-2.0
"""What a model can do, as its configuration declares it (see `SyntacticConfig`), also in folders exported earlier."""

import inspect
from typing import Any

from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel

from hf_synlm.trees.codecs import CODECS, TreeCodec


def declared(config: PreTrainedConfig, ability: str) -> Any:
    """What a configuration declares, such as `declared(config, "searches")`; None for models of other libraries.

    The code of folders that earlier versions exported may lack a declaration, or be wrong: the class of the installed
    package counts.
    """
    kind = config.model_type
    value = inspect.getattr_static(CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else type(config), ability, None)
    return value.__get__(config) if isinstance(value, property) else value


def tree_codec(config: PreTrainedConfig) -> TreeCodec:
    """The codec of the trees that are given to models with this configuration; ValueError if it has none."""
    name = declared(config, "tree_codec")
    if name not in CODECS:
        raise ValueError(
            f"Models of type {config.model_type} give no probability to given trees. Leave the files of trees out."
        )
    return CODECS[name](config)


def joint_log_probs(model: PreTrainedModel, batch: dict[str, Any]) -> Tensor:
    """`joint_log_probs` of a batch of trees of one text; folders exported earlier lack the method and use `forward`."""
    if not hasattr(model, "joint_log_probs"):
        return model(**batch).joint_log_prob
    return model.joint_log_probs(**{name: value for name, value in batch.items() if name != "attention_mask"})


def parse_options(model: PreTrainedModel) -> set[str]:
    """Names of what `parse` of a model takes besides the text; empty if it has none."""
    parse = getattr(model, "parse", None)
    text = {"input_ids", "attention_mask", "word_ends"}
    return set() if parse is None else set(inspect.signature(parse).parameters) - text
