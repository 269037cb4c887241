"""Small random models of every architecture with tokenizers, for tests of evaluations."""

import functools
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.samples import sample_path
from hf_synlm.data.tokenizers import train_bpe_tokenizer
from hf_synlm.data.vocabulary import subword_tokenizer, word_final_ids, word_tokenizer
from hf_synlm.evaluation.text.scoring import TextScorer
from tests.helpers.search_models import GPST_TINY, varied
from tests.models.gpst.test_modeling_gpst import TINY

_DECODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
_SEARCH = {"scoring_num_beams": 4, "action_beam_size": 12, "nonterminals": ["NP", "S", "VP"]}
_RNNG = {"embedding_size": 8, "hidden_size": 10, **_SEARCH}
_TREE_LM = {**_DECODER, **_SEARCH}
_GPT2 = {"n_embd": 16, "n_head": 2}
_NO_DROPOUT = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), 0.0)
_PCFG = {"num_nonterminals": 4, "num_preterminals": 6, "symbol_size": 8}
_RECURRENT = {"embedding_size": 8, "hidden_size": 8}
_BACKBONE = {"model_type": "gpt2", "n_layer": 2, **_GPT2, **_NO_DROPOUT}
# Name -> type of the model, kind of its tokenizer, fields of its configuration.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpst": ("gpst", "bpe", {**TINY, "max_position_embeddings": 128}),
    "rnng": ("rnng", "words", _RNNG),
    "rnng_pieces": ("rnng", "pieces", {**_RNNG, "subwords": True}),
    "tree_lm": ("tree_lm", "words", {**_TREE_LM, "structure_attention": "stack_compose"}),
    "urnng": ("urnng", "framed_words", {"hidden_size": 8, "scoring_num_beams": 4}),
    "pushdown": ("pushdown", "framed_words", {**_DECODER, "num_depths": 6, "scoring_num_beams": 4}),
    "pcfg": ("pcfg", "framed_words", _PCFG),
    "on_lstm": ("on_lstm", "framed_words", {**_RECURRENT, "chunk_size": 2}),
    "prpn": ("prpn", "framed_words", _RECURRENT),
    "palm": ("palm", "framed_words", _RECURRENT),
    "ordered_memory": ("ordered_memory", "framed_words", {"hidden_size": 8, "num_slots": 4}),
    "lstm": ("lstm_lm", "words", {"embedding_size": 8, "hidden_size": 10, "num_layers": 1}),
    "gpt2": ("gpt2", "bpe", {**_GPT2, "n_layer": 1, "n_positions": 128}),
}
ARCHITECTURES = tuple(MODELS)
# Variants of tree LMs and PCFGs, for tests of what all of them can do.
_COMPOUND = {"latent_size": 4, "encoder_embedding_size": 6, "encoder_hidden_size": 5, "num_prior_samples": 2}
MODELS |= {
    "pcfg_compound": ("pcfg", "framed_words", {**_PCFG, **_COMPOUND}),
    "pcfg_tensor": ("pcfg", "framed_words", {**_PCFG, "grammar": "tensor", "rank": 5, "init": "default"}),
    "pcfg_simple": ("pcfg", "framed_words", {**_PCFG, "grammar": "simple"}),
    "tree_lm_binary": ("tree_lm", "framed_words", {**_TREE_LM, "linearization": "binary"}),
    "tree_lm_gpt2": ("tree_lm", "framed_words", {**_TREE_LM, "backbone_config": _BACKBONE}),
    "tree_lm_natural": ("tree_lm", "bpe", {**_TREE_LM, "backbone_config": _BACKBONE, "text_style": "natural"}),
}
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


def gpst_ids(tokenizer: Any) -> dict[str, int]:
    """Size of the vocabulary and special ids of GPST."""
    config, roles = GPSTConfig.from_tokenizer(tokenizer), ("bos", "eos", "pad", "cls", "sep", "reduce")
    return {name: getattr(config, name) for name in ("vocab_size", *(f"{role}_token_id" for role in roles))}


def small_gpst(tokenizer: Any) -> GPSTForCausalLM:
    """A new model of a few thousand weights for the tokens of a tokenizer, quick to verify."""
    return GPSTForCausalLM(GPSTConfig(**{**GPST_TINY, **gpst_ids(tokenizer)})).eval()


@functools.cache
def model_and_tokenizer(architecture: str) -> tuple[Any, Any]:
    """A random model in evaluation mode and its tokenizer."""
    torch.manual_seed(0)
    model_type, kind, fields = MODELS[architecture]
    tokenizer = tokenizer_of(kind)
    names = ("pad_token_id", "bos_token_id", "eos_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    ids = gpst_ids(tokenizer) if model_type == "gpst" else ids
    config = AutoConfig.for_model(model_type, **{**fields, "vocab_size": len(tokenizer), **ids})
    model = AutoModelForCausalLM.from_config(config)
    if architecture == "rnng_pieces":
        model.model.word_final.copy_(torch.tensor(word_final_ids(tokenizer)))
    return varied(model, 0.1).eval(), tokenizer


def scorer_of(architecture: str, **options: Any) -> TextScorer:
    """A scorer of a random model."""
    return TextScorer(*model_and_tokenizer(architecture), **options)
