"""The baseline without trees: a language model of transformers on the same contexts as GPST.

A context begins with the begin token, so that the first word of a text has a learned probability, as under GPST.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import collate_contexts
from hf_synlm.training.arguments import check_overrides
from hf_synlm.training.flops import recurrent_flops_per_token

TREE_INPUTS = ("sentence_ids", "word_ends")


def make_baseline(
    model_type: str, overrides: Any, tokenizer: PreTrainedTokenizerBase, context_length: int
) -> PreTrainedModel:
    """Make an untrained causal language model of transformers.

    Args:
        model_type: as transformers knows it, such as "gpt2".
        overrides: `config_overrides` of the command line; see `check_overrides`.
        tokenizer: whose size and special tokens the configuration takes over.
        context_length: longest context in tokens.

    Returns:
        The model.

    Raises:
        ValueError: the model type has no causal language model; an override is not a field of its configuration; the
            tokenizer has no begin token; a context and that token are longer than the positions of the model.
    """
    try:
        config_class = type(AutoConfig.for_model(model_type))
    except ValueError as error:
        raise ValueError(
            f"architecture {model_type!r} is unknown. Choose gpst, or a model type of transformers such as gpt2."
        ) from error
    if tokenizer.bos_token_id is None:
        raise ValueError("The tokenizer has no begin token, and every context begins with one. Set its bos_token.")
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = config_class(vocab_size=len(tokenizer), **{**ids, **check_overrides(config_class, overrides)})
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and context_length >= limit:
        raise ValueError(
            f"context_length {context_length} and the begin token need {context_length + 1} positions, and the "
            f"{model_type} has {limit}. Change one of the two."
        )
    return AutoModelForCausalLM.from_config(config)


def collate_plain(rows: Sequence[Any], pad_token_id: int, begin_token_id: int) -> dict[str, Tensor]:
    """Collate contexts without the inputs that only GPST reads; each begins with the begin token.

    Args:
        rows: contexts with `input_ids`.
        pad_token_id: of the tokenizer.
        begin_token_id: of the tokenizer.

    Returns:
        `input_ids`, `attention_mask` and `labels`, each [B, T].
    """
    batch = collate_contexts([{"input_ids": [begin_token_id, *row["input_ids"]]} for row in rows], pad_token_id)
    return {name: value for name, value in batch.items() if name not in TREE_INPUTS}


def decoder_flops_per_token(model: PreTrainedModel, context_length: int) -> float:
    """FLOPs of training per token of a Transformer decoder: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    Args:
        model: with `lm_head`; N counts its matrices without embeddings, L its layers, D its width.
        context_length: T.

    Returns:
        FLOPs per token.
    """
    config = model.config
    return recurrent_flops_per_token(model) + 12 * config.num_hidden_layers * config.hidden_size * context_length
