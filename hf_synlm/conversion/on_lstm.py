# SPDX-License-Identifier: Apache-2.0
"""The authors' checkpoints of ON-LSTM (Ordered-Neurons) and ON-LSTM-SYD (SDLM) -> `ONLSTMForCausalLM`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_synlm.conversion.rename import (
    AWD_EXTRACTION,
    AWD_OPTIONS,
    check_sizes,
    clean_state_dict,
    count_parts,
    end_ids,
    fill_model,
    flat_options,
    rename_state_dict,
)
from hf_synlm.models.on_lstm.configuration_on_lstm import ONLSTMConfig
from hf_synlm.models.on_lstm.modeling_on_lstm import ONLSTMForCausalLM

# original name (regular expression) -> name here
RULES: dict[str, str] = {
    r"encoder\.weight": "model.embed_tokens.weight",
    r"decoder\.(weight|bias)": r"lm_head.\1",
    r"rnn\.cells\.(\d+)\.ih\.0\.(weight|bias)": r"model.layers.\1.ih.\2",
    r"rnn\.cells\.(\d+)\.hh\.(weight|bias)": r"model.layers.\1.hh.\2",
    r"rnn\.cells\.(\d+)\.fwh\.(weight|bias)": r"model.layers.\1.split_head.\2",
}
# The authors' options that are fields here.
_OPTIONS = {
    **AWD_OPTIONS,
    "alpha1": "language_model_weight",
    "alpha2": "syntactic_distance_weight",
    "margin": "syntactic_distance_margin",
}
EXTRACTION = f"""{AWD_EXTRACTION}
with the args of the training (chunk_size, wdrop and, of SDLM, l4d, wds, un, alpha1, alpha2, margin are needed), add to
config.json the "eos_token_id" of their dictionary (that of <eos> or </s>), and pass --weights weights.pt
--config config.json."""


def convert_on_lstm(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> ONLSTMForCausalLM:
    """Build a model from the authors' state dict.

    Of SDLM, which has a split head in every layer and trains those of the supervised ones, the others are left out.
    `original_config` holds the authors' options by their names, at the top or in a section `config`: `chunk_size` and
    `wdrop` (evaluation reads it, too) are needed; `dropout`, `dropouth`, `dropouti`, `dropoute`, `alpha` and `beta` (or
    `ar_alpha`, `tar_beta`), `eos_token_id` (see `end_ids`) are optional. Of SDLM also `l4d` (supervised layer,
    -1 = the first and the third), `wds` ("no" = one set of trees), `un` (no supervision), `alpha1`, `alpha2`, `margin`.
    Sizes (`ntoken`, `ninp`, `nhid`, `nlayers`) must agree with the tensors.
    """
    options = flat_options(original_config, "config")
    tensors = rename_state_dict(clean_state_dict(state_dict), RULES)
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    sizes = {
        "vocab_size": len(embedding),
        "embedding_size": embedding.shape[1],
        "layer_size": tensors["model.layers.0.hh.weight"].shape[1],
        "num_layers": count_parts(tensors, "model.layers."),
    }
    if sizes["num_layers"] == 1:
        sizes["layer_size"] = options.get("nhid", embedding.shape[1])  # the only layer is as wide as the embedding
    check_sizes(sizes, options)
    config = ONLSTMConfig(
        **sizes,
        chunk_size=options["chunk_size"],
        tie_word_embeddings=torch.equal(output, embedding)
        if options.get("tie_weights") is None
        else options["tie_weights"],
        **end_ids(options),
        **{field: options[name] for name, field in _OPTIONS.items() if name in options or name == "wdrop"},
        **_supervision(tensors, options),
    )
    for name in [name for name in tensors if ".split_head." in name]:
        if int(name.split(".")[2]) not in (config.supervised_layers or []):
            del tensors[name]  # never trained
    return fill_model(ONLSTMForCausalLM(config).to(output.dtype), tensors)


def _supervision(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of SDLM; none of Ordered-Neurons, which knows no `l4d`."""
    split = any(".split_head." in name for name in tensors)
    if options.get("un", "l4d" not in options):
        if split:
            raise ValueError(
                "The checkpoint has split heads (fwh), but the configuration names no supervised layer. Add 'l4d' "
                "to the configuration, and delete 'un' there."
            )
        return {}
    if split != ((wds := options.get("wds", "middle")) != "no"):
        needs, has = ("no split heads", "some") if split else ("split heads (fwh)", "none")
        raise ValueError(
            f"The configuration has wds = {wds!r}, which needs {needs}, but the checkpoint has {has}. Correct wds."
        )
    return {
        "supervised_layers": [0, 2] if options["l4d"] == -1 else [options["l4d"]],
        "syntactic_distance_head": "split" if split else "shared",
        "syntactic_distance_scope": "batch",
        "syntactic_distance_reduction": "mean",
    }
