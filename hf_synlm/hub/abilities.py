# SPDX-License-Identifier: Apache-2.0
"""What a model can do, as its configuration declares it (see `SyntacticConfig`), also in folders exported earlier."""

import inspect
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel


def declared(config: PreTrainedConfig, ability: str) -> Any:
    """What a configuration declares, such as `declared(config, "searches")`; None for models of other libraries.

    The code of folders that earlier versions exported may lack a declaration, or be wrong: the class of the installed
    package counts.
    """
    kind = config.model_type
    value = inspect.getattr_static(CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else type(config), ability, None)
    return value.__get__(config) if isinstance(value, property) else value


def parse_options(model: PreTrainedModel) -> set[str]:
    """Names of what `parse` of a model takes besides the text; empty if it has none."""
    parse = getattr(model, "parse", None)
    text = {"input_ids", "attention_mask", "word_ends"}
    return set() if parse is None else set(inspect.signature(parse).parameters) - text
