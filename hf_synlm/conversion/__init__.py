# SPDX-License-Identifier: Apache-2.0
"""Conversion of the authors' checkpoints: `convert_state_dict`, and the command `synlm convert`."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.conversion.gpst import convert_gpst
from hf_synlm.conversion.on_lstm import convert_on_lstm
from hf_synlm.conversion.palm import convert_palm
from hf_synlm.conversion.pcfg import convert_pcfg, pcfg_tokenizer
from hf_synlm.conversion.prpn import convert_prpn
from hf_synlm.conversion.pushdown import convert_pushdown
from hf_synlm.conversion.rnng import convert_rnng, rnng_tokenizer

CONVERTERS: dict[str, Callable[[Mapping[str, Tensor], Mapping[str, Any]], PreTrainedModel]] = {
    "gpst": convert_gpst,
    "on_lstm": convert_on_lstm,
    "palm": convert_palm,
    "pcfg": convert_pcfg,
    "prpn": convert_prpn,
    "pushdown": convert_pushdown,
    "rnng": convert_rnng,
}
# Where the authors' configuration holds the vocabulary.
TOKENIZERS: dict[str, Callable[[Mapping[str, Any]], PreTrainedTokenizerBase | None]] = {
    "pcfg": pcfg_tokenizer,
    "rnng": rnng_tokenizer,
}


def convert_state_dict(arch: str, state_dict: dict[str, Tensor], original_config: dict) -> PreTrainedModel:
    """Build a model from a checkpoint of the authors' code.

    Args:
        arch: architecture, for example "gpst".
        state_dict: tensors by their original names.
        original_config: the authors' configuration; see the converter of the architecture.

    Returns:
        The model, in evaluation mode.

    Raises:
        ValueError: a tensor or a value cannot be accounted for.
    """
    return CONVERTERS[arch](state_dict, original_config)
