"""Small random models of every architecture with tokenizers, for tests of evaluations."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import (
    GPSTConfig,
    GPSTForCausalLM,
    LSTMConfig,
    LSTMForCausalLM,
    ONLSTMConfig,
    ONLSTMForCausalLM,
    OrderedMemoryConfig,
    OrderedMemoryForCausalLM,
    PaLMConfig,
    PaLMForCausalLM,
    PRPNConfig,
    PRPNForCausalLM,
    PushdownConfig,
    PushdownForCausalLM,
    RNNGConfig,
    RNNGForCausalLM,
    TreeLMConfig,
    TreeLMForCausalLM,
    URNNGConfig,
    URNNGForCausalLM,
)
from hf_synlm.data.samples import sample_path
from hf_synlm.data.tokenizers import special_token_ids, train_bpe_tokenizer
from hf_synlm.data.vocabulary import subword_tokenizer, word_final_ids, word_tokenizer
from hf_synlm.evaluation.scoring import TextScorer
from tests.test_modeling_gpst import TINY

ARCHITECTURES = (
    "gpst",
    "rnng",
    "rnng_pieces",
    "tree_lm",
    "urnng",
    "pushdown",
    "on_lstm",
    "prpn",
    "palm",
    "ordered_memory",
    "lstm",
    "gpt2",
)
SEARCHING = ("gpst", "rnng", "rnng_pieces", "tree_lm", "urnng", "pushdown")
SENTENCES = [
    "The state of our Union is strong.",
    "We ask for peace",
    "America is back, standing tall, looking to the eighties with courage and hope.",
]


def _lines() -> list[str]:
    return [line for line in sample_path("raw.valid.txt").read_text(encoding="utf-8").split("\n") if line][:120]


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """Byte-level BPE, pieces that mark the end of words, or words."""
    words = [line.split() for line in _lines()]
    if kind == "bpe":
        return train_bpe_tokenizer(_lines(), vocab_size=330)
    if kind == "pieces":
        return subword_tokenizer(words, 300)
    if kind == "framed_words":
        return word_tokenizer(words, min_count=2, end_token=True)
    return word_tokenizer(words, unknown="berkeley", min_count=2)


@functools.cache
def model_and_tokenizer(architecture: str) -> tuple[Any, Any]:
    """A random model in evaluation mode and its tokenizer."""
    torch.manual_seed(0)
    kinds = {
        "gpst": "bpe",
        "gpt2": "bpe",
        "rnng": "words",
        "rnng_pieces": "pieces",
        "tree_lm": "words",
        "lstm": "words",
    }
    tokenizer = tokenizer_of(kinds.get(architecture, "framed_words"))
    ids = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    common = {"vocab_size": len(tokenizer), **ids}
    if architecture == "gpst":
        config = {**TINY, **special_token_ids(tokenizer), "scoring_num_beams": 4, "max_position_embeddings": 128}
        model: Any = GPSTForCausalLM(GPSTConfig(**config))
    elif architecture.startswith("rnng"):
        pieces = architecture == "rnng_pieces"
        sizes = {"embedding_size": 8, "hidden_size": 10, "nonterminals": ["NP", "S", "VP"], "subwords": pieces}
        model = RNNGForCausalLM(RNNGConfig(**common, **sizes, scoring_num_beams=4, action_beam_size=12))
        if pieces:
            model.model.word_final.copy_(torch.tensor(word_final_ids(tokenizer)))
    elif architecture.startswith("tree_lm"):
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        search = {"nonterminals": ["NP", "S", "VP"], "scoring_num_beams": 4, "action_beam_size": 12}
        gpt2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2}
        gpt2 |= dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
        kind = {
            "tree_lm": {"structure_attention": "stack_compose"},
            "tree_lm_binary": {"linearization": "binary"},
            "tree_lm_no_opening": {"linearization": "no_opening"},
            "tree_lm_gpt2": {"backbone_config": gpt2},
        }
        model = TreeLMForCausalLM(TreeLMConfig(**common, **sizes, **search, **kind[architecture]))
    elif architecture == "urnng":
        model = URNNGForCausalLM(URNNGConfig(**common, hidden_size=8, scoring_num_beams=4))
    elif architecture == "pushdown":
        sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
        model = PushdownForCausalLM(PushdownConfig(**common, **sizes, num_depths=6, scoring_num_beams=4))
    elif architecture == "gpt2":
        sizes = {"n_embd": 16, "n_head": 2, "n_layer": 1, "n_positions": 128}
        model = GPT2LMHeadModel(GPT2Config(**common, **sizes))
    elif architecture == "lstm":
        model = LSTMForCausalLM(LSTMConfig(**common, embedding_size=8, hidden_size=10, num_layers=1))
    elif architecture == "on_lstm":
        model = ONLSTMForCausalLM(ONLSTMConfig(**common, embedding_size=8, hidden_size=8, chunk_size=2))
    elif architecture == "ordered_memory":
        model = OrderedMemoryForCausalLM(OrderedMemoryConfig(**common, hidden_size=8, num_slots=4))
    elif architecture == "prpn":
        model = PRPNForCausalLM(PRPNConfig(**common, embedding_size=8, hidden_size=8))
    else:
        model = PaLMForCausalLM(PaLMConfig(**common, embedding_size=8, hidden_size=8))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval(), tokenizer


def scorer_of(architecture: str, **options: Any) -> TextScorer:
    """A scorer of a random model."""
    return TextScorer(*model_and_tokenizer(architecture), **options)
