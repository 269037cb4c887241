# SPDX-License-Identifier: Apache-2.0
"""The authors' RNNG checkpoints (aistairc/rnng-pytorch, the fixed-stack models) -> `RNNGForCausalLM`."""

import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hf_synlm.conversion.rename import (
    check_sizes,
    clean_state_dict,
    count_parts,
    fill_model,
    flat_options,
    rename_state_dict,
)
from hf_synlm.data.vocabulary import (
    BEGIN_TOKEN,
    END_TOKEN,
    PAD_TOKEN,
    UNKNOWN_TOKEN,
    WORD_END,
    UnknownRule,
    tokenizer_of_words,
)
from hf_synlm.models.rnng.configuration_rnng import RNNGConfig
from hf_synlm.models.rnng.modeling_rnng import RNNGForCausalLM

# original name (regular expression) -> name here
RULES: dict[str, str] = {
    r"emb\.0\.weight": "model.embed_tokens.weight",
    r"vocab_mlp\.(weight|bias)": r"lm_head.\1",
    r"action_mlp\.(weight|bias)": r"action_head.\1",
    r"rnng\.nt_emb\.0\.weight": "model.embed_nonterminals.weight",
    r"rnng\.initial_emb\.0\.weight": "model.initial_element",
    r"rnng\.stack_rnn\.lstm\.(\d+)\.(weight|bias)_(ih|hh)": r"model.stack_lstm.cells.\1.\2_\3",
    r"rnng\.output\.1\.(weight|bias)": r"model.output.\1",
    r"rnng\.composition\.rnn\.(.*_l0(?:_reverse)?)": r"model.composition.rnn.lstm.\1",
    r"rnng\.composition\.output\.[01]\.(weight|bias)": r"model.composition.output.\1",
    r"rnng\.composition\.V\.weight": "model.composition.key.weight",
    r"rnng\.composition\.nt_emb\.weight": "model.composition.query_labels.weight",
    r"rnng\.composition\.nt_emb2\.0\.weight": "model.composition.labels.weight",
    r"rnng\.composition\.gate\.0\.(weight|bias)": r"model.composition.gate.\1",
}
_UNKNOWN_RULES: dict[str, UnknownRule] = {"unk": "single", "berkeleyrule": "berkeley", "berkeleyrule2": "berkeley2"}
_LABEL_TABLES = (
    "model.embed_nonterminals.weight",
    "model.composition.query_labels.weight",
    "model.composition.labels.weight",
)
# Names that only the authors' older classes have, whose stack is a Python list per sentence.
_OLD_CLASSES = ("stack_rnn.linears", "stack_to_hidden", "composition.")
# The authors pickle their vocabulary and action dictionary together with the tensors.
EXTRACTION = """in a copy of the authors' code, with a file that you trust, run
    import json, torch
    checkpoint = torch.load("rnng.pt", map_location="cpu", weights_only=False)
    torch.save(checkpoint["model_state_dict"], "weights.pt")
    config = {name: checkpoint["args"][name] for name in ("strategy", "composition", "dropout")}
    config["nonterminals"] = checkpoint["action_dict"].nonterminals
    vocabulary = checkpoint["vocab"]
    config["vocabulary"] = [vocabulary.id_to_word(number) for number in range(vocabulary.size())]
    config["unkmethod"], config["subword"] = vocabulary.unkmethod, vocabulary.unkmethod == "subword"
    config.update({name: checkpoint["prepro_args"].get(name, False) for name in ("lowercase", "replace_num")})
    json.dump(config, open("config.json", "w"))
and pass --weights weights.pt --config config.json."""


def convert_rnng(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> RNNGForCausalLM:
    """Build a model from a checkpoint of the authors' fixed-stack classes.

    `original_config` holds, at the top or in a section `config`, `strategy` ("top_down" or "in_order"), `composition`
    ("lstm" or "attention"), `nonterminals` (the labels in the order of their ids), and, if they are known, `subword`
    (bool), `dropout`, `max_open_nts`, `max_cons_nts`, `vocabulary` (the tokens in the order of their ids; pieces that
    end a
    word hold U+2581). Sizes are read off the tensors; where `w_dim`, `h_dim`, `num_layers`, `vocab_size` are given,
    they
    must agree. Without the vocabulary of a model of pieces, `word_ends` must be passed with every text, or each piece
    counts as a word: a warning says so.
    """
    state_dict, original_config = clean_state_dict(state_dict), flat_options(original_config, "config")
    old = [key for key in state_dict if key.startswith(_OLD_CLASSES)]
    if old:
        raise ValueError(
            f"The checkpoint holds {old[0]!r}, so it was trained without --fixed_stack: gates of the LSTM (and "
            "pushes of in_order) have another order. Only models trained with --fixed_stack can be converted."
        )
    tensors = rename_state_dict(state_dict, RULES)
    config = rnng_config(tensors, original_config)
    tensors["model.initial_element"] = tensors["model.initial_element"].squeeze(0)
    for name in _LABEL_TABLES:
        if config.in_order and name in tensors and len(tensors[name]) == len(original_config["nonterminals"]) + 1:
            # The authors' in-order tables have one row too many, which no action reads.
            tensors[name] = tensors[name][:-1].clone()
    model = RNNGForCausalLM(config).to(tensors["action_head.weight"].dtype)
    if config.subwords:
        tensors["model.word_final"] = _word_final(original_config.get("vocabulary"), config.vocab_size)
    return fill_model(model, tensors)


def rnng_tokenizer(original_config: Mapping[str, Any]) -> PreTrainedTokenizerFast | None:
    """Tokenizer with the ids of a checkpoint of words, by `vocabulary`, `unkmethod`, `lowercase` and `replace_num`.

    None without a vocabulary, and for word pieces, whose tokenizer is the sentencepiece model of the checkpoint.
    """
    original_config = flat_options(original_config, "config")
    if "vocabulary" not in original_config or original_config.get("subword"):
        return None
    method = original_config.get("unkmethod", "unk")
    if method not in _UNKNOWN_RULES:
        raise ValueError(f"unkmethod is {method!r}. Known values are {', '.join(_UNKNOWN_RULES)}.")
    replaces_numbers = bool(original_config.get("replace_num", False))
    vocabulary = original_config["vocabulary"]
    if replaces_numbers:
        vocabulary = [re.sub(r"\AN(?=#*\Z)", "N#", word) for word in vocabulary]
    return tokenizer_of_words(
        vocabulary,
        unknown=_UNKNOWN_RULES[method],
        # The second rule's vocabularies have no token for classes that were never seen, only the class of plain words.
        unknown_token=UNKNOWN_TOKEN if UNKNOWN_TOKEN in vocabulary else "UNK",
        lowercase=bool(original_config.get("lowercase", False)),
        replace_numbers=replaces_numbers,
    )


def _word_final(vocabulary: Sequence[str] | None, vocab_size: int) -> Tensor:
    """Which tokens [V] end a word."""
    if vocabulary is None:
        warnings.warn(
            "The configuration holds no vocabulary, so the model does not know which pieces end a word. Pass word_ends "
            "with every text, or set model.model.word_final.",
            stacklevel=3,
        )
        return torch.ones(vocab_size, dtype=torch.bool)
    # Padding, unknown characters, beginning and end: of these, only the unknown one is part of a word.
    flags = [WORD_END in token or token in (PAD_TOKEN, BEGIN_TOKEN, END_TOKEN) for token in vocabulary]
    return torch.tensor(flags)


def rnng_config(tensors: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> RNNGConfig:
    """Configuration of a renamed checkpoint; for the options see `convert_rnng`."""
    vocab_size, width = tensors["model.embed_tokens.weight"].shape
    sizes = {
        "vocab_size": vocab_size,
        "embedding_size": width,
        "hidden_size": tensors["model.output.weight"].shape[1],
        "num_layers": count_parts(tensors, "model.stack_lstm.cells."),
    }
    check_sizes(sizes, original_config)
    vocabulary = original_config.get("vocabulary")
    if vocabulary is not None and len(vocabulary) != vocab_size:
        raise ValueError(f"The vocabulary holds {len(vocabulary)} tokens, but the checkpoint has {vocab_size}.")
    return RNNGConfig(
        **sizes,
        dropout=original_config.get("dropout", 0.3),
        transition_system=original_config["strategy"],
        composition=original_config["composition"],
        nonterminals=list(original_config["nonterminals"]),
        subwords=bool(original_config.get("subword", False)),
        max_open_nonterminals=original_config.get("max_open_nts", 100),
        max_consecutive_nonterminals=original_config.get("max_cons_nts"),
    )
