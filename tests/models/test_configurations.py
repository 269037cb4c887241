"""Configurations of all architectures: published sizes, and values that make no model."""

import math
from typing import Any

import pytest
import torch

import hf_synlm
from hf_synlm.core.configuration_base import position_limit
from tests.helpers.architectures import EVERY, build
from tests.helpers.recurrent_models import ARCHITECTURES, dropouts
from tests.helpers.refusals import refused

# Prefix of the classes -> preset -> millions of parameters; those of labels and those that nothing reads left out.
SIZES = {
    "GPST": {"gpst-small": "144.05", "gpst-medium": "403.7"},
    "RNNG": {"rnng-15m": "15.17", "rnng-35m": "35.30"},
    "TreeLM": {"transformer-grammar": "251.9"},
    "ONLSTM": {"on-lstm-ptb": "25.232180", "on-lstm-syd-ptb": "25.233820"},
    "PRPN": {"prpn-ptb-word": "43.603202"},
    "PaLM": {"palm-ptb": "23.643760", "palm-wikitext2": "37.3", "awd-lstm-ptb": "24.22", "awd-lstm-wikitext2": "33.6"},
    "PCFG": {"neural-pcfg": "5.34", "compound-pcfg": "15.3", "tn-pcfg": "4.20", "rank-space-pcfg": "18.3",
             "simple-pcfg": "14.0"},
    "LSTM": {"lstm-15m": "15.1", "lstm-35m": "35.3"},
}  # fmt: skip


@pytest.mark.parametrize(("prefix", "preset"), [(prefix, preset) for prefix in SIZES for preset in SIZES[prefix]])
def test_presets_have_the_published_sizes(prefix: str, preset: str) -> None:
    millions = SIZES[prefix][preset]
    config = getattr(hf_synlm, f"{prefix}Config").from_preset(preset)
    with torch.device("meta"):
        model = getattr(hf_synlm, f"{prefix}ForCausalLM")(config)
    labels = 52 * (1024 + 1) if prefix == "TreeLM" else 0
    assert f"{(model.num_parameters() - labels) / 1e6:.{len(millions.split('.')[1])}f}" == millions
    if prefix == "ONLSTM":
        assert [layer.num_chunks for layer in model.model.layers] == [115, 115, 40]
    if prefix == "RNNG":
        assert config.subwords == (preset == "rnng-35m")


@pytest.mark.parametrize("prefix", SIZES)
def test_every_preset_makes_a_model(prefix: str) -> None:
    config_class = getattr(hf_synlm, f"{prefix}Config")
    with torch.device("meta"):
        for preset in config_class.presets:
            getattr(hf_synlm, f"{prefix}ForCausalLM")(config_class.from_preset(preset))
    refused(next(iter(config_class.presets)), config_class.from_preset, "no such preset")


def test_how_sentences_end() -> None:
    ends = {name: getattr(hf_synlm, name).sentence_end for name in hf_synlm.__all__ if name.endswith("Config")}
    others = {name: end for name, end in ends.items() if end != "token"}
    assert others == {"GPSTConfig": "none", "RNNGConfig": "tree", "TreeLMConfig": "tree", "LSTMConfig": "none"}


def test_limits_of_rnng() -> None:
    config = hf_synlm.RNNGConfig()
    assert config.consecutive_limit == 8 and hf_synlm.RNNGConfig(transition_system="in_order").consecutive_limit == 3


@pytest.mark.parametrize("name", EVERY)
def test_the_longest_tested_text_is_there_can_be_set_and_is_saved(name: str, tmp_path: Any) -> None:
    config = build(name).config
    backbone = getattr(config, "backbone_config", None)
    room = 1024 if backbone is None else min(1024, backbone.max_position_embeddings // 4)
    assert name == "gpst" or config.max_position_embeddings == room
    changed = type(config)(**{**config.to_dict(), "max_position_embeddings": 77})
    changed.save_pretrained(tmp_path)
    assert type(config).from_pretrained(tmp_path).max_position_embeddings == 77
    assert position_limit(changed) == (77 if name == "gpst" else None)


def test_trees_on_a_backbone_take_several_positions_a_word() -> None:
    sizes = {"vocab_size": 20, "nonterminals": ["S"]}
    for positions, expected in ((512, 128), (8192, 1024)):
        config = hf_synlm.TreeLMConfig(backbone_config={"model_type": "gpt2", "n_positions": positions}, **sizes)
        assert config.max_position_embeddings == expected


# Model -> fields that are named where they have these values, each alone.
NAMED: dict[str, dict[str, Any]] = {
    "gpst": {"height_loss": "mean", "split_temperature": 0.0, "head_dropout": 1.0, "merge_noise": math.nan,
             "intermediate_size": 0},
    "rnng": {"dropout": 1.0, "num_layers": 0, "fast_track_size": -1, "initializer_range": 0.0,
             "max_consecutive_nonterminals": 0, "tie_word_embeddings": False},
    "tree_lm": {"dropout": 1.0},
    "pcfg, tensor": {"rank": 0},
    "pcfg": {"latent_size": -1, "num_nonterminals": 0},
    "pcfg, compound": {"encoder_hidden_size": 0, "num_prior_samples": 0},
    "ordered_memory": {"num_slots": 0},
    "palm": {"num_spans": 0, "span_attention_weight": -1.0, "activation_regularization": math.inf},
    "prpn": {"layer_size": 7, "num_slots": 0, "num_lookback": -1, "resolution": 1000.0},
    "on_lstm": {"syntactic_distance_margin": -1.0},
    "lstm": {"initializer_range": 0.0, "bos_token_id": None},
}  # fmt: skip
# Model, fields of its configuration, what the message names.
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((name, {field: value}, field) for name, fields in NAMED.items() for field, value in fields.items()),
    ("gpst", {"hidden_size": 25}, "hidden_size 25"),
    ("gpst", {"eos_token_id": None, "document_end_token": True}, "eos_token_id"),
    ("gpst", {"parser_size": 6, "parser_num_heads": 2}, "even"),
    ("gpst", {"pad_token_id": 1, "document_end_token": True}, "pad_token_id"),
    ("rnng", {"transition_system": "bottom_up"}, "bottom_up"),
    ("rnng", {"nonterminals": ["S", "S"]}, "each label only once"),
    ("rnng", {"pad_token_id": 19}, "pad_token_id 19"),
    ("tree_lm, causal", {"linearization": "bottom_up"}, "bottom_up"),
    ("tree_lm", {"linearization": "binary"}, "'causal'"),
    ("tree_lm, causal", {"linearization": "binary", "eos_token_id": None}, "an eos_token_id, but"),
    ("tree_lm", {"structure_attention": "tree"}, "tree"),
    ("tree_lm", {"hidden_size": 18, "num_attention_heads": 4}, "hidden_size 18"),
    ("tree_lm", {"min_relative_position": 1}, "0"),
    ("tree_lm", {"nonterminals": ["S", "S"]}, "each label only once"),
    ("tree_lm, causal", {"backbone_config": {"model_type": "clip"}}, "'clip'"),
    ("tree_lm, causal", {"backbone_config": {}}, "model_type"),
    ("tree_lm", {"backbone_config": {"model_type": "gpt2"}}, "backbone_config"),
    ("pushdown", {"pushdown_layers": [2]}, "layer 2"),
    ("pushdown", {"num_attention_heads": 3}, "3 heads"),
    ("pcfg", {"grammar": "lexical"}, "lexical"),
    ("pcfg", {"init": "orthogonal"}, "orthogonal"),
    ("pcfg", {"rank": 4}, "rank is 4, but grammar is 'dense'. Leave rank out"),
    ("pcfg, simple", {"rank": 4}, "rank is 4, but grammar is 'simple'. Leave rank out"),
    ("pcfg, tensor", {"rank": None}, "rank is None, but grammar is 'tensor'. Set rank to a number"),
    ("pcfg, tensor", {"latent_size": 3}, "latent_size 3 needs grammar 'dense' or 'simple', but grammar is 'tensor'"),
    ("pcfg", {"vocab_size": 3}, "no word beside the special tokens"),
    ("pcfg", {"eos_token_id": 30}, "eos_token_id 30"),
    ("palm", {"num_layers": 1}, "layers"),
    ("palm", {"span_scores": "balanced"}, "balanced"),
    ("prpn", {"gate": "wide"}, "gate 'wide'"),
    ("on_lstm", {"chunk_size": 5}, "chunk_size 5"),
    ("on_lstm", {"syntactic_distance_head": "two"}, "two"),
    ("on_lstm", {"syntactic_distance_scope": "corpus"}, "corpus"),
    ("on_lstm", {"supervised_layers": [3]}, "3"),
    ("on_lstm", {"supervised_layers": [1, 1]}, "different numbers"),
    *((name, {"num_layers": 0}, "num_layers") for name in ARCHITECTURES if name != "ordered_memory"),
    *((name, {dropouts(name)[0]: 1.0}, dropouts(name)[0]) for name in ARCHITECTURES),
    *((name, {"pad_token_id": 30}, "pad_token_id 30") for name in ARCHITECTURES),
    *((name, {"eos_token_id": -1}, "eos_token_id -1") for name in ARCHITECTURES),
    *((name, {"max_position_embeddings": 0}, "max_position_embeddings") for name in ARCHITECTURES),
    ("ordered_memory", {"num_slots": 1}, "num_slots"),
]


@pytest.mark.parametrize(("name", "fields", "named"), BAD)
def test_bad_fields_are_named(name: str, fields: dict[str, Any], named: str) -> None:
    refused(named, build, name, **fields)
