# SPDX-License-Identifier: Apache-2.0
"""The authors' PRPN checkpoints (yikangshen/PRPN) -> `PRPNForCausalLM`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_synlm.conversion.rename import (
    check_sizes,
    clean_state_dict,
    count_parts,
    end_ids,
    fill_model,
    flat_options,
    rename_state_dict,
)
from hf_synlm.models.prpn.configuration_prpn import PRPNConfig
from hf_synlm.models.prpn.modeling_prpn import PRPNForCausalLM

_BATCH_NORM = r"\.(weight|bias|running_mean|running_var|num_batches_tracked)"
# original name (regular expression) -> name here
RULES: dict[str, str] = {
    r"encoder\.weight": "model.embed_tokens.weight",
    r"decoder\.(weight|bias)": r"lm_head.\1",
    r"parser\.gate\.1\.(weight|bias)": r"model.parser.features.convolution.\1",
    rf"parser\.gate\.2{_BATCH_NORM}": r"model.parser.features.norm.\1",
    r"parser\.gate\.5\.(weight|bias)": r"model.parser.score.\1",
    r"reader\.(\d+)\.projector_summ\.1\.(weight|bias)": r"model.layers.\1.key.\2",
    r"reader\.(\d+)\.memory_rnn\.ih\.0\.(weight|bias)": r"model.layers.\1.input.\2",
    r"reader\.(\d+)\.memory_rnn\.hh\.0\.(weight|bias)": r"model.layers.\1.recurrent.\2",
    r"reader\.(\d+)\.memory_rnn\.ih\.1\.gamma": r"model.layers.\1.input_norm.weight",
    r"reader\.(\d+)\.memory_rnn\.ih\.1\.beta": r"model.layers.\1.input_norm.bias",
    r"reader\.(\d+)\.memory_rnn\.hh\.1\.gamma": r"model.layers.\1.recurrent_norm.weight",
    r"reader\.(\d+)\.memory_rnn\.hh\.1\.beta": r"model.layers.\1.recurrent_norm.bias",
    r"reader\.(\d+)\.memory_rnn\.c_norm\.gamma": r"model.layers.\1.cell_norm.weight",
    r"reader\.(\d+)\.memory_rnn\.c_norm\.beta": r"model.layers.\1.cell_norm.bias",
    r"predictor\.projector_pred\.1\.(weight|bias)": r"model.predictor.key.\1",
    r"predictor\.res\.res\.(\d+)\.0\.(weight|bias)": r"model.predictor.blocks.\1.inner.\2",
    rf"predictor\.res\.res\.(\d+)\.1{_BATCH_NORM}": r"model.predictor.blocks.\1.inner_norm.\2",
    r"predictor\.res\.res\.(\d+)\.4\.(weight|bias)": r"model.predictor.blocks.\1.outer.\2",
    rf"predictor\.res\.res\.(\d+)\.5{_BATCH_NORM}": r"model.predictor.blocks.\1.outer_norm.\2",
    r"predictor\.ffd\.1\.(weight|bias)": r"model.predictor.output.\1",
    rf"predictor\.ffd\.2{_BATCH_NORM}": r"model.predictor.output_norm.\1",
}
_DROPOUTS = {"dropout": "dropout", "idropout": "input_dropout", "rdropout": "recurrent_dropout"}
# The authors pickle the whole model.
EXTRACTION = """in a copy of the authors' code, with a file that you trust, run
    import torch
    model = torch.load("model.pt", map_location="cpu", weights_only=False)
    torch.save(model.state_dict(), "weights.pt")
and pass --weights weights.pt --config config.json, a JSON object with the options that the model was trained with:
nslots, hard and resolution, the "eos_token_id" of the authors' dictionary (that of <eos>), and if you like dropout,
idropout and rdropout."""


def convert_prpn(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> PRPNForCausalLM:
    """Build a model from the authors' state dict.

    `original_config` holds the authors' options, at the top or in a section `config`: `nslots` and `hard` (which no
    tensor tells), `resolution` (default 0.1), `dropout`, `idropout`, `rdropout`, `eos_token_id` (see `end_ids`).
    Sizes are read off the tensors; where `ntoken`, `ninp`, `nhid`, `nlayers`, `nlookback`, `res` and `tie_weights` (or
    `tied`) are given, they must agree.
    """
    options = flat_options(original_config, "config")
    tensors = rename_state_dict(clean_state_dict(state_dict), RULES)
    embedding, output = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    convolution = tensors["model.parser.features.convolution.weight"]
    sizes = {
        "vocab_size": embedding.shape[0],
        "embedding_size": embedding.shape[1],
        "layer_size": convolution.shape[0],
        "num_layers": count_parts(tensors, "model.layers."),
        "num_lookback": convolution.shape[2] - 1,
        "num_residual_blocks": count_parts(tensors, "model.predictor.blocks."),
    }
    check_sizes(sizes, options)
    tied = bool(options.get("tie_weights", options.get("tied", torch.equal(embedding, output))))
    config = PRPNConfig(
        **sizes,
        num_slots=options["nslots"],
        gate="hard" if options["hard"] else "soft",
        resolution=options.get("resolution", 0.1),
        tie_word_embeddings=tied,
        **end_ids(options),
        **{field: options[name] for name, field in _DROPOUTS.items() if name in options},
    )
    return fill_model(PRPNForCausalLM(config).to(embedding.dtype), tensors)
