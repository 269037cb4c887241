# SPDX-License-Identifier: Apache-2.0
"""The authors' GPST checkpoints (ant-research/StructuredLM_RTDT) -> `GPSTForCausalLM`."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hf_synlm.conversion.rename import Options, clean_state_dict, fill_model, rename_state_dict
from hf_synlm.models.gpst.configuration_gpst import GPSTConfig
from hf_synlm.models.gpst.modeling_gpst import GPSTForCausalLM

_PAIR_ENCODERS = {"inside_enc": "composition", "outside_enc": "decomposition"}

# original name (regular expression) -> name here
RULES: dict[str, str] = {
    r"classifier\.weight": "lm_head.weight",
    r"embeddings\.weight": "model.embed_tokens.weight",
    r"bos_embedding": "model.bos_embedding",
    r"(down_scale|up_scale)\.(weight|bias)": r"model.\1.\2",
    r"r2d2\.parser\.encoder\.tok_embeddings\.weight": "model.parser.embed_tokens.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.attention\.w([qkvo])\.weight": r"model.parser.layers.\1.\2_proj.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.feed_forward\.w1\.weight": r"model.parser.layers.\1.gate_proj.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.feed_forward\.w2\.weight": r"model.parser.layers.\1.down_proj.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.feed_forward\.w3\.weight": r"model.parser.layers.\1.up_proj.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.attention_norm\.weight": r"model.parser.layers.\1.attention_norm.weight",
    r"r2d2\.parser\.encoder\.layers\.(\d+)\.ffn_norm\.weight": r"model.parser.layers.\1.mlp_norm.weight",
    r"r2d2\.parser\.encoder\.norm\.weight": "model.parser.norm.weight",
    r"r2d2\.parser\.score_mlp\.(\d+)\.(weight|bias)": r"model.parser.score.\1.\2",
    r"r2d2\.outside_root_embedding": "model.root_embedding",
    **{
        rf"r2d2\.{old}\.layers\.(\d+)\.{part}": rf"model.{new}.layers.\1.{target}"
        for old, new in _PAIR_ENCODERS.items()
        for part, target in {
            r"self_attn\.in_proj_(weight|bias)": r"in_proj.\2",
            r"self_attn\.out_proj\.(weight|bias)": r"out_proj.\2",
            r"(linear1|linear2)\.(weight|bias)": r"\2.\3",
            r"position_embedding\.weight": "role_embedding.weight",
        }.items()
    },
    **{
        rf"r2d2\.{old}\.(left|right|parent)_linear\.(\d+)\.(weight|bias)": rf"model.{new}.\1_score.\2.\3"
        for old, new in _PAIR_ENCODERS.items()
    },
    r"action_layers\.wpe\.weight": "model.position_embedding.weight",
    r"action_layers\.h\.(.+)": r"model.type_layers.h.\1",
    r"generation_layers\.(h\..+|ln_f\.(?:weight|bias))": r"model.token_layers.\1",
    r"action_mlp\.(\d+)\.(weight|bias)": r"heads.action.\1.\2",
    r"dense\.(\d+)\.(weight|bias)": r"heads.token.\1.\2",
    r"insideoutside_dense\.(\d+)\.(weight|bias)": r"heads.auto_encoding.\1.\2",
}


# Switches of theirs that this model does not have.
_REFUSED = ("ldr_detach", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn")
# What davidarps/silm, whose GPST is the authors' with other widths, calls the two files: in config.json, in its own.
_SECTIONS = {"r2d2config": "r2d2_config", "gptconfig": "gpt_config", "r2d2": "r2d2_config", "gpt": "gpt_config"}


def convert_gpst(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> GPSTForCausalLM:
    """Build a model from the authors' state dict and their two configuration files.

    `original_config` is `{"r2d2_config": {...}, "gpt_config": {...}}` as in their JSON files, with optional
    `temperature` and `noise_coeff`; or the config.json of davidarps/silm, whose tensors have the prefix `model.`.

    Source: the state dict of `model/generative_r2d2_fast.py`. The tied `classifier.weight` must equal
    `embeddings.weight`. Without `up_scale` the checkpoint is of the ablation without surrogate. The height loss is
    the shipped one; heads that the release hard-codes to dropout 0.2 get it.
    """
    state_dict = {name.removeprefix("model."): tensor for name, tensor in clean_state_dict(state_dict).items()}
    up_scale = {f"up_scale.{name}" for name in ("weight", "bias")} & set(state_dict)
    if len(up_scale) == 1:
        raise ValueError(f"The checkpoint holds only {up_scale.pop()}, not weight and bias. Is the file damaged?")
    config = gpst_config(original_config, surrogate=bool(up_scale))
    renamed = rename_state_dict(state_dict, RULES)
    pair = ("lm_head.weight", "model.embed_tokens.weight")
    for name, other in (pair, pair[::-1]):
        if other in renamed:
            renamed.setdefault(name, renamed[other])
    return fill_model(GPSTForCausalLM(config), renamed)


def gpst_config(original_config: Mapping[str, Any], surrogate: bool = True) -> GPSTConfig:
    """Translate the authors' two configuration files.

    Switches without a counterpart are refused: the span vocabulary, detached surrogates, variants of GPT-2's attention.
    """
    original_config = Options({_SECTIONS.get(name, name): value for name, value in original_config.items()})
    chart, gpt = Options(original_config["r2d2_config"]), Options(original_config["gpt_config"])
    if (chart.get("ext_vocab_size") or -1) > 0:
        raise ValueError(f"ext_vocab_size is {chart['ext_vocab_size']}, but this library has no span vocabulary.")
    for name in _REFUSED:
        if chart.get(name) or gpt.get(name):
            raise ValueError(f"{name} is switched on in the original configuration, but this library does not have it.")
    activation = gpt.get("activation_function", "gelu_new")
    ids = {"pad_token_id": chart.get("pad_token_id"), "reduce_token_id": chart["reduce_token_id"]}
    if surrogate and ids["reduce_token_id"] >= gpt["vocab_size"]:  # a mark that no text and no embedding has
        ids["reduce_token_id"] = ids["pad_token_id"]
    return GPSTConfig(
        vocab_size=gpt["vocab_size"],
        hidden_size=gpt["n_embd"],
        num_attention_heads=gpt["n_head"],
        num_type_layers=gpt["action_layer_num"],
        num_token_layers=gpt["n_layer"] - gpt["action_layer_num"],
        max_position_embeddings=gpt["n_positions"] - 1,
        intermediate_size=gpt.get("n_inner"),
        activation_function="gelu_pytorch_tanh" if activation == "gelu_new" else activation,
        layer_norm_epsilon=gpt.get("layer_norm_epsilon", 1e-5),
        composition_size=chart["hidden_size"],
        composition_num_heads=chart["num_attention_heads"],
        composition_intermediate_size=chart["intermediate_size"],
        num_composition_layers=chart["encoder_num_hidden_layers"],
        num_decomposition_layers=chart["decoder_num_hidden_layers"],
        score_size=chart["const_size"],
        window_size=chart["window_size"],
        parser_size=chart["parser_input_dim"],
        parser_score_size=chart["parser_hidden_dim"],
        num_parser_layers=chart["parser_num_layers"],
        parser_num_heads=chart["parser_nhead"],
        head_expansion=gpt.get("dense_hidden_factor", 4),
        merge_noise=float(original_config.get("noise_coeff", 1.0)),
        split_temperature=float(original_config.get("temperature", 1.0)),
        hard_inside=bool(chart.get("use_gumbel", False)),
        surrogate=surrogate,
        height_loss="shipped",
        height_threshold=chart.get("height_threshold", 15),
        token_loss_weight=0.5 if surrogate else 1.0,
        action_loss_weight=1.0 if surrogate else 2.0,
        embedding_dropout=gpt.get("embd_pdrop", 0.1),
        residual_dropout=gpt.get("resid_pdrop", 0.1),
        attention_dropout=gpt.get("attn_pdrop", 0.1),
        # The authors' composition drops everything at the rate of its attention.
        composition_dropout=chart.get("attention_probs_dropout_prob", 0.1),
        composition_attention_dropout=chart.get("attention_probs_dropout_prob", 0.1),
        parser_dropout=chart.get("hidden_dropout_prob", 0.1),
        bos_token_id=chart.get("bos_token_id"),
        eos_token_id=chart.get("eos_token_id"),
        cls_token_id=chart.get("cls_token_id"),
        sep_token_id=chart.get("sep_token_id"),
        **ids,
    )
