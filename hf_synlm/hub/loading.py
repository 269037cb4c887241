# SPDX-License-Identifier: Apache-2.0
"""Loading saved models of unknown origin, or refusing them clearly.

Nothing here runs code that lies in a folder unless the user trusts it, and nothing unpickles more than tensors. What a
folder promises is checked before memory is taken: shard names stay inside the folder, headers can be read, shapes are
those of the configuration.
"""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hf_synlm.data.files import CONFIG_FILE, TOKENIZER_FILES, find_model, read_json
from hf_synlm.hub import architectures
from hf_synlm.hub.checkpoint import (
    ADAPTER_FILE,
    check_hub,
    check_model_source,
    check_tokenizer_source,
    is_folder,
    one_line_errors,
    stored_tensors,
)

logger = logging.getLogger(__name__)


def check_checkpoint(folder: str | os.PathLike) -> None:
    """Refuse a model folder that cannot be what it claims to be, before memory is taken for it.

    The configuration must be valid and give every tensor its shape; shards must lie in the folder. The model is built
    without memory for its weights. Of other architectures only configuration and headers are read.
    """
    folder = Path(folder)
    values, tensors = read_json(folder / CONFIG_FILE), stored_tensors(folder)
    named = values.get("architectures")
    name = str(named[0]) if isinstance(named, list) and named else ""
    model_class: Any = getattr(architectures, name) if name in architectures.__all__ else None
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or config_class.model_type != values.get("model_type"):
        return
    with one_line_errors(str(folder), "model"):
        config = config_class.from_dict(values)
    with torch.device("meta"):
        expected = model_class(config).state_dict()
    wrong = [
        f"{key} {list(tensor.shape)} instead of {list(expected[key].shape)}"
        for key, tensor in tensors.items()
        if key in expected and tensor.shape != tuple(expected[key].shape)
    ]
    if wrong:
        more = f", and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ValueError(
            f"{str(folder)!r}: the weights have other shapes than config.json says: {', '.join(wrong[:3])}{more}. "
            "One of the two files belongs to another model."
        )


def load_pretrained(
    name: str,
    auto_class: Any = AutoModelForCausalLM,
    *,
    dtype: str = "auto",
    backbone: str | None = None,
    merge: bool = True,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model and its tokenizer from a folder or the Hub, or say in one line why that fails.

    `options` are those of `from_pretrained`, for both (`revision`, `trust_remote_code`, ...); None counts as not given.
    `backbone` is the folder or Hub name of the backbone of an adapter, if not the one that the adapter names; `merge`
    adds the adapter to the weights.
    Raises ValueError if the model or tokenizer is missing, if files are damaged or do not fit together, and for pickled
    weights that hold more than tensors. Of the output folder of a training run, its model is loaded.
    """
    name = find_model(name)
    given: Mapping[str, Any] = {key: value for key, value in options.items() if value is not None}
    subfolder = given.get("subfolder", "")
    check_model_source(name, given.get("revision"), subfolder)
    check_tokenizer_source(name, subfolder)
    if (Path(name) / CONFIG_FILE).is_file():
        check_checkpoint(name)
    with one_line_errors(name, "model"):
        tokenizer = AutoTokenizer.from_pretrained(name, **given)
        of_adapter: dict[str, Any] = {"backbone": backbone, "merge": merge}
        if (backbone is None and merge) or not PreTrainedConfig.get_config_dict(name, **given)[0].get("adapter_of"):
            of_adapter = {}
        if backbone is not None and not of_adapter:
            raise ValueError(f"the model is not an adapter. Leave out the backbone {backbone!r} (--backbone).")
        given = {**given, **of_adapter, "dtype": dtype, "output_loading_info": True}
        return whole(auto_class.from_pretrained(name, **given)), tokenizer


def whole(loaded: tuple[PreTrainedModel, Mapping[str, Any]]) -> PreTrainedModel:
    """The model of `from_pretrained(..., output_loading_info=True)`; ValueError if its files lack weights."""
    model, info = loaded
    saved = " ".join(model.config.architectures or ["another model"])
    of_model = model.state_dict()
    known = {tensor.data_ptr() for name, tensor in of_model.items() if name not in info["missing_keys"]}
    missing = [n for n in sorted(info["missing_keys"]) if n not in of_model or of_model[n].data_ptr() not in known]
    if missing:
        raise ValueError(
            f"it was saved as {saved} and lacks weights of "
            f"{type(model).__name__} (they would be random): {', '.join(missing[:3])}{', ...' * (len(missing) > 3)}. "
            "Name a complete model, such as the one that it was fine-tuned from."
        )
    if "Classification" in saved.replace(type(model).__name__, ""):
        logger.warning(f"the model was saved as {saved}: its probabilities and trees are those after fine-tuning")
    return model


def load_checked_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder or the Hub, or say in one line why that fails."""
    check_tokenizer_source(name)
    if not is_folder(name):
        check_hub(name, None, TOKENIZER_FILES[:2])
    with one_line_errors(name, "tokenizer"):
        return AutoTokenizer.from_pretrained(name)


def saved_config(name: str, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """Load a configuration from a folder or the Hub, or say in one line why that fails."""
    name = find_model(name)
    check_model_source(name, revision)
    if is_folder(name) and not (Path(name) / CONFIG_FILE).is_file():  # an adapter of PEFT
        name, revision = read_json(Path(name) / ADAPTER_FILE)["base_model_name_or_path"], None
    with one_line_errors(name, "model"):
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=trust_remote_code)


def saved_auto_class(name: str, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The Auto class that loads a model as what it was saved: a language model, a classifier, or a bare model.

    It is that of causal language models if the configuration does not tell.
    """
    config = saved_config(name, revision, trust_remote_code)
    saved = next(iter(config.architectures or ()), None)
    auto_map = getattr(config, "auto_map", None) or {}
    kinds = architectures.AUTO_CLASSES.values()
    named = (kind for kind in kinds if str(auto_map.get(kind.__name__)).rpartition(".")[2] == saved)
    return next(named, AutoModelForCausalLM)
