# SPDX-License-Identifier: Apache-2.0
"""The authors' checkpoints of PCFGs (harvardnlp/compound-pcfg, sustcsonglin/TN-PCFG) -> `PCFGForCausalLM`."""

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_synlm.conversion.rename import (
    Holder,
    HolderUnpickler,
    check_sizes,
    clean_state_dict,
    end_ids,
    fill_model,
    flat_options,
    rename_state_dict,
)
from hf_synlm.data.vocabulary import END_TOKEN, PAD_TOKEN, UNKNOWN_TOKEN, tokenizer_of_words
from hf_synlm.models.pcfg.configuration_pcfg import PCFGConfig
from hf_synlm.models.pcfg.modeling_pcfg import PCFGForCausalLM

_RESIDUAL = {"lin1": "first", "linear.0": "first", "lin2": "second", "linear.2": "second"}


def _mlp_rules(source: str, target: str, last: int = 3) -> dict[str, str]:
    """Rules of Linear, residual layers, Linear; `last` is the place of the last one."""
    rules = {rf"{source}\.({place})\.(weight|bias)": rf"{target}.\1.\2" for place in (0, last)}
    for old, new in _RESIDUAL.items():
        rules[rf"{source}\.(\d)\.{old.replace('.', chr(92) + '.')}\.(weight|bias)"] = rf"{target}.\1.{new}.\2"
    return rules


_GRAMMAR, _ENCODER = "model.grammar", "model.encoder"
# original name (regular expression) -> name here
SHARED: dict[str, str] = {
    r"root_emb": f"{_GRAMMAR}.root.weight",
    r"(?:t_emb|term_emb)": f"{_GRAMMAR}.preterminals.weight",
    r"(?:nt_emb|nonterm_emb)": f"{_GRAMMAR}.nonterminals.weight",
    r"rule_state_emb": f"{_GRAMMAR}.symbols.weight",
    r"rule_mlp\.(weight|bias)": rf"{_GRAMMAR}.rule_head.\1",
    r"enc_emb\.weight": f"{_ENCODER}.embed_tokens.weight",
    r"enc_rnn\.(.+)": rf"{_ENCODER}.lstm.\1",
    r"(?:enc_params|enc_out)\.(weight|bias)": rf"{_ENCODER}.parameters_head.\1",
    r"(parent|left|right)_mlp1?\.0\.(weight|bias)": rf"{_GRAMMAR}.\1.\2",
    r"parent_mlp\.2\.(weight|bias)": rf"{_GRAMMAR}.projections.0.\1",
    r"left_mlp\.2\.(weight|bias)": rf"{_GRAMMAR}.projections.1.\1",
    r"right_mlp\.2\.(weight|bias)": rf"{_GRAMMAR}.projections.2.\1",
    r"rank_proj": f"{_GRAMMAR}.projections.0.weight",
    r"vocab_emb": f"{_GRAMMAR}.emission_head.0.weight",
    **_mlp_rules("root_mlp", f"{_GRAMMAR}.root_head"),
}
_EMISSION = _mlp_rules("(?:vocab_mlp|term_mlp)", f"{_GRAMMAR}.emission_head")
# The simple grammar without z has no last layer of its own kind: three residual layers, then word vectors.
_SIMPLE_EMISSION = _mlp_rules("term_mlp", f"{_GRAMMAR}.preterminal_layers", 0)


def convert_pcfg(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> PCFGForCausalLM:
    """Convert a checkpoint of a neural, compound, TN-, rank-space or simple PCFG.

    Args:
        state_dict: tensors by their original names.
        original_config: any options of the authors' programs, which must agree with the tensors; besides them
            `bos_token_id`, `eos_token_id` and `pad_token_id`, if the vocabulary has such ids (harvardnlp: 2, 3, 0). The
            sizes are those of the tensors.

    Returns:
        The model, in evaluation mode. Its preterminals give special tokens the little probability that they have in
        the authors' programs.

    Raises:
        ValueError: a tensor or an option cannot be accounted for.
    """
    state = clean_state_dict(state_dict)
    simple = "vocab_emb" in state
    tensors = rename_state_dict(state, {**SHARED, **(_SIMPLE_EMISSION if simple else _EMISSION)})
    for old, new in (("rank_proj", "projections.0"), ("vocab_emb", "emission_head.0")):
        if old in state:
            name = f"{_GRAMMAR}.{new}.weight"
            tensors[name] = tensors[name].t().contiguous()
    return fill_model(PCFGForCausalLM(_config(tensors, flat_options(original_config))), tensors)


def _config(tensors: Mapping[str, Tensor], options: Mapping[str, Any]) -> PCFGConfig:
    def rows(name: str, dim: int = 0) -> int:
        return tensors[f"{_GRAMMAR}.{name}.weight"].shape[dim]

    def has(name: str) -> bool:
        return f"{_GRAMMAR}.{name}.weight" in tensors

    fields: dict[str, Any] = {"symbol_size": rows("root", 1), "latent_size": 0}
    fields["vocab_size"] = rows("emission_head.0" if has("preterminal_layers.0") else "emission_head.3")
    if has("rule_head"):
        fields |= {"grammar": "dense", "num_nonterminals": rows("nonterminals")}
        fields["num_preterminals"] = rows("preterminals")
    elif has("projections.0"):
        fields |= {"grammar": "tensor" if has("projections.1") else "tensor_shared", "rank": rows("projections.0")}
        fields["num_nonterminals"] = rows("root_head.3")
        fields["num_preterminals"] = rows("symbols") - rows("root_head.3")
    else:
        fields |= {"grammar": "simple", "num_nonterminals": options["NT"]}
        fields["num_preterminals"] = rows("symbols") - options["NT"]
    encoder = tensors.get(f"{_ENCODER}.embed_tokens.weight"), tensors.get(f"{_ENCODER}.parameters_head.weight")
    if encoder[0] is not None and encoder[1] is not None:
        fields["latent_size"] = len(encoder[1]) // 2
        fields |= {"encoder_embedding_size": encoder[0].shape[1], "encoder_hidden_size": encoder[1].shape[1] // 2}
    check_sizes(fields, options)
    return PCFGConfig(**fields, **end_ids(options), pad_token_id=options.get("pad_token_id"), mask_special_tokens=False)


# -------------------------------------------------------------------------------------- files of compound-pcfg
def read_pickled_model(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and options of a checkpoint of harvardnlp/compound-pcfg, a pickle of the model; None for other files.

    Every class but those of its model is refused, and these are replaced by empty ones, so no code of the file runs.
    The options are those of its training, with `vocabulary`, the words by id.
    """
    reader: Any = SimpleNamespace(Unpickler=HolderUnpickler, load=HolderUnpickler.load_file, __name__="pickle")
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\x03\x04"
        if is_zip and "constants.pkl" in torch._C.PyTorchFileReader(str(path)).get_all_records():
            return None  # TorchScript, whose code torch.load would run
        with warnings.catch_warnings(action="ignore"):  # the code of the classes is not there
            found = torch.load(path, map_location="cpu", pickle_module=reader, weights_only=False)
    except Exception:  # the reader of plain files says what is wrong
        return None
    if not isinstance(found, Mapping) or not isinstance(found.get("model"), Holder):
        return None
    options = dict(found.get("args", {}))
    words = found.get("word2idx")
    if words:
        options["vocabulary"] = sorted(words, key=words.__getitem__)
        options |= {"pad_token_id": words.get(PAD_TOKEN), "eos_token_id": words.get(END_TOKEN)}
    return dict(_tensors(found["model"], "")), options


def _tensors(module: Any, prefix: str) -> list[tuple[str, Tensor]]:
    """Parameters of a module without code, by their names."""
    own = [(prefix + name, value.detach()) for name, value in module._parameters.items() if value is not None]
    return own + [pair for name, part in module._modules.items() for pair in _tensors(part, f"{prefix}{name}.")]


def pcfg_tokenizer(original_config: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """Tokenizer with the ids of a checkpoint, by `vocabulary`: lower case, numbers as N; None without a vocabulary."""
    if "vocabulary" not in original_config:
        return None
    tokens = [re.sub(r"\AN(?=#*\Z)", "N#", word) for word in original_config["vocabulary"]]
    boundary = END_TOKEN if END_TOKEN in tokens else PAD_TOKEN
    return tokenizer_of_words(
        tokens, unknown_token=UNKNOWN_TOKEN, lowercase=True, replace_numbers=True, boundary=boundary
    )
