# SPDX-License-Identifier: Apache-2.0
"""The authors' PaLM checkpoints (Noahs-ARK/PaLM), and those of AWD-LSTM -> `PaLMForCausalLM`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_synlm.conversion.rename import (
    AWD_EXTRACTION,
    AWD_OPTIONS,
    Tensors,
    check_sizes,
    clean_state_dict,
    count_parts,
    end_ids,
    fill_model,
    flat_options,
    rename_state_dict,
)
from hf_synlm.models.palm.configuration_palm import PaLMConfig
from hf_synlm.models.palm.modeling_palm import PaLMForCausalLM

_ATTENTION = "model.span_context.attention"
# original name (regular expression) -> name here; those of the rational RNN are put together below
RULES: dict[str, str] = {
    r"encoder\.weight": "model.embed_tokens.weight",
    r"decoder\.(weight|bias)": r"lm_head.\1",
    r"rnns\.(\d+)\.(?:module\.)?((?:weight|bias)_(?:ih|hh)_l0)(?:_raw)?": r"model.layers.\1.\2",
    r"_att_\.rrnn_(fw|bw)\.(weight|bias)": r"\1.\2",
    r"_att_\._w_gate_": f"{_ATTENTION}.output_gate.weight",
    r"_att_\._b_gate_": f"{_ATTENTION}.output_gate.bias",
    r"_att_\._w1_span_": f"{_ATTENTION}.key.weight",
    r"_att_\._w1_token_": f"{_ATTENTION}.query.weight",
    r"_att_\._b1_": f"{_ATTENTION}.query.bias",
    r"_att_\._w2_": f"{_ATTENTION}.score.weight",
    r"_hidden_layer_\.(weight|bias)": r"model.span_context.projection.\1",
    r"_hidden_gate_\.(weight|bias)": r"model.span_context.residual_gate.\1",
}
# What only learned scores read.
_SCORES = [f"{_ATTENTION}.{name}" for name in ("key.weight", "query.weight", "query.bias", "score.weight")]
EXTRACTION = f"""{AWD_EXTRACTION}
with the args of the training (max_span_length is needed), add to config.json the "eos_token_id" of their dictionary
(that of <eos>), and pass --weights weights.pt --config config.json."""


def convert_palm(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> PaLMForCausalLM:
    """Build a model from the authors' state dict.

    The columns of a rational RNN's matrix take turns, input and forget gate of each unit; here each is a matrix of its
    own, both directions together. The first half of its bias is never read and is left out. One checkpoint serves
    PaLM-U, PaLM-S and PaLM-RB, whose scores are fixed: there the layers that score are left out. Without tensors of
    the attention the checkpoint is an AWD-LSTM.

    `original_config` holds what the tensors do not say, at the top or in sections `config` and `loss`: with attention
    `num_spans`, or the authors' `max_span_length` (one more). Optional are `kind` ("PaLM-RB" for fixed scores); their
    `dropout`, `dropouth`, `dropouti`, `dropoute`, `wdrop`, `alpha`, `beta` (or `ar_alpha`, `tar_beta`); `att_lambda`;
    `eos_token_id` (see `end_ids`). Sizes (`emsize`, `nhid`, `nlayers`, or `vocab_size`, `emb_size`, `hidden_size`,
    `num_layers`, `rrnn_size_per_direction`, `attention_mlp_size`) must agree with the tensors.
    """
    options = flat_options(original_config, "config", "loss")
    tensors = rename_tensors(clean_state_dict(state_dict))
    span_attention = any(name.startswith("model.span_context.") for name in tensors)
    vocab_size, embedding_size = tensors["model.embed_tokens.weight"].shape
    sizes = {
        "vocab_size": vocab_size,
        "embedding_size": embedding_size,
        "num_layers": count_parts(tensors, "model.layers."),
        "layer_size": tensors["model.layers.0.weight_hh_l0"].shape[1],
    }
    if sizes["num_layers"] == 1:  # the only layer is as wide as the embedding
        sizes["layer_size"] = options.get("hidden_size", options.get("nhid", embedding_size))
    if span_attention:
        sizes["rrnn_size"] = len(tensors[f"{_ATTENTION}.input.weight"]) // 2
        sizes["attention_size"] = len(tensors[f"{_ATTENTION}.key.weight"])
    check_sizes(sizes, options)
    known = {**AWD_OPTIONS, "att_lambda": "span_attention_weight"}
    fields = {field: options[name] for name, field in known.items() if name in options}
    if span_attention:
        fields["num_spans"] = _num_spans(options)
        if str(options.get("kind", "")).lower().startswith("palm-rb"):
            fields["span_scores"] = "right_branching"
    config = PaLMConfig(
        **sizes,
        span_attention=span_attention,
        **end_ids(options),
        **fields,
    )
    if config.span_attention and config.span_scores == "right_branching":
        for name in _SCORES:
            tensors.pop(name, None)
    return fill_model(PaLMForCausalLM(config).to(tensors["lm_head.weight"].dtype), tensors)


def _num_spans(options: Mapping[str, Any]) -> int:
    """Number of spans, which no tensor tells and every number depends on."""
    given = {name: options[name] for name in ("num_spans", "max_span_length") if options.get(name) is not None}
    if not given:
        raise ValueError("The configuration has neither 'num_spans' nor 'max_span_length'. Add one of them.")
    counts = {value - (name == "max_span_length") for name, value in given.items()}
    if len(counts) > 1:
        raise ValueError(
            f"The configuration has {given}, but max_span_length must be num_spans + 1. Delete one of the two."
        )
    return counts.pop()


def rename_tensors(state_dict: Mapping[str, Tensor]) -> Tensors:
    """Rename tensors and put their directions together: [H, 2d] and [2d] -> [2d, H] per gate."""
    # After an evaluation the authors' layers hold the recurrent weights by a second name, too.
    pairs = ((key, f"{key}_raw") for key in state_dict)
    copies = [key for key, raw in pairs if raw in state_dict and torch.equal(state_dict[key], state_dict[raw])]
    tensors = rename_state_dict({key: value for key, value in state_dict.items() if key not in copies}, RULES)
    names = [f"{direction}.{part}" for part in ("weight", "bias") for direction in ("fw", "bw")]
    if all(name in tensors for name in names):
        *weights, forward_bias, backward_bias = map(tensors.pop, names)
        tensors[f"{_ATTENTION}.input.weight"] = torch.cat([weight[:, 0::2].T for weight in weights])
        tensors[f"{_ATTENTION}.forget_gate.weight"] = torch.cat([weight[:, 1::2].T for weight in weights])
        biases = [bias[len(bias) // 2 :] for bias in (forward_bias, backward_bias)]
        tensors[f"{_ATTENTION}.forget_gate.bias"] = torch.cat(biases)
    return tensors
