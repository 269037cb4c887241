# SPDX-License-Identifier: Apache-2.0
"""The authors' Pushdown Layers (MurtyShikhar/Pushdown-Layers) -> `PushdownForCausalLM`."""

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from hf_synlm.conversion.rename import (
    HolderUnpickler,
    check_sizes,
    clean_state_dict,
    count_parts,
    fill_model,
    flat_options,
)
from hf_synlm.data.tokenizers import fast_tokenizer
from hf_synlm.models.pushdown.configuration_pushdown import PushdownConfig
from hf_synlm.models.pushdown.modeling_pushdown import PushdownForCausalLM

# Of the authors' program -> ours. Replaced in this order.
NAMES = (
    (r"^input_embedding\.", "model.embed_tokens."),
    (r"^output_map\.", "lm_head."),
    (r"^trafo\.encoder\.layers\.", "model.layers."),
    (r"\.self_attn\.data_to_q\.", ".attention.q_proj."),
    (r"\.self_attn\.pos_to_pq\.", ".attention.relative_proj."),
    (r"\.self_attn\.multi_head_merge\.", ".attention.o_proj."),
    (r"\.self_attn\.depth_embed\.", ".attention.depth_embedding."),
    (r"\.linear1\.", ".up_proj."),
    (r"\.linear2\.", ".down_proj."),
    (r"\.norm1\.", ".attention_norm."),
    (r"\.norm2\.", ".feed_forward_norm."),
    (r"\.data_to_q_prime\.", ".query_proj."),
    (r"\.data_to_k_prime\.", ".key_proj."),
    (r"\.pos_to_pq_stack\.", ".relative_proj."),
    (r"\.q_next_word_mlp\.", ".query_mlp."),
    (r"\.k_next_word_mlp\.", ".shift_mlp."),
    (r"\.key_and_stack_info_composer\.", ".key_mlp."),
    (r"^attachment_head\.depth_embed\.", "attachment_head.depth_embedding."),
    (r"_mlp\.0\.", "_mlp.up_proj."),
    (r"_mlp\.3\.", "_mlp.down_proj."),
)
# Without effect on any output there: parameters without a gradient, and tables of positions.
DEAD = re.compile(r"attachment_head\.(data_to_q|multi_head_merge|global_pos_bias)\b|int_seq$|pos_encoding$")
# What the tensors of the authors' BLLIP model do not say, from `eval_configs/bllip_config.yaml`.
BLLIP_CONFIG = {"compose_keys_and_stack_info": True}
END_WORD = "<eos>"


def convert_pushdown(state_dict: Mapping[str, Tensor], original_config: Mapping[str, Any]) -> PushdownForCausalLM:
    """Build a model from the authors' state dict; parameters and buffers without effect are left out.

    `original_config` holds what the tensors do not say, at the top or in a section `config`:
    `compose_keys_and_stack_info` and, if it is true, `additive_composition` of the attachment head; `end_word_id`, the
    last word of a sentence in their data, or null. Optional are `tape` ("depth", or "binary" without depths),
    `layer_attention_heads` (8 in their program), and `pad_token_id`, `bos_token_id`, `eos_token_id` (0 and the last two
    ids, the first of them the end). Sizes and `pushdown_layers` by the names of `PushdownConfig` must agree with the
    tensors.
    """
    options = flat_options(original_config, "config")
    tensors = clean_state_dict({name: tensor for name, tensor in state_dict.items() if not DEAD.search(name)})
    layers = "trafo.encoder.layers."
    embeddings = tensors["input_embedding.weight"]
    vocab_size, hidden_size = embeddings.shape
    num_layers = count_parts(tensors, layers)
    with_tape = [n for n in range(num_layers) if f"{layers}{n}.self_attn.depth_embed.weight" in tensors]
    num_depths, depth_size = tensors["attachment_head.depth_embed.weight"].shape
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "intermediate_size": len(tensors[f"{layers}0.linear1.weight"]),
        "num_depths": num_depths,
    }
    check_sizes(sizes, options)
    given = options.get("pushdown_layers")
    if given is not None:
        given = sorted(given) if isinstance(given, list | tuple) else given
        check_sizes({"pushdown_layers": with_tape}, {"pushdown_layers": given})
    is_sum = bool(options.get("additive_composition"))
    config = PushdownConfig(
        **sizes,
        pushdown_layers=None if len(with_tape) == num_layers else with_tape,
        attachment_depth_size=PushdownConfig.attachment_depth_size if is_sum else depth_size,
        attachment_key="none" if not options["compose_keys_and_stack_info"] else "sum" if is_sum else "mlp",
        stack_tape=options.get("tape", "depth"),
        num_attention_heads=options.get("layer_attention_heads", 8),
        end_token_id=options["end_word_id"],
        # Everywhere in the authors' program.
        tie_word_embeddings=torch.equal(embeddings, tensors.get("output_map.weight", embeddings)),
        pad_token_id=options.get("pad_token_id", 0),
        bos_token_id=options.get("bos_token_id", vocab_size - 1),
        eos_token_id=options.get("eos_token_id", vocab_size - 2),
    )
    return fill_model(PushdownForCausalLM(config).to(embeddings.dtype), convert_weights(tensors, config))


def convert_weights(weights: Mapping[str, Tensor], config: PushdownConfig) -> dict[str, Tensor]:
    """State dict of `PushdownForCausalLM` from the authors' weights; their keys and values are interleaved by head."""
    converted = {}
    for name, weight in weights.items():
        unused = "composer" in name and config.attachment_key != "mlp"
        unused |= name == "attachment_head.depth_embed.weight" and config.attachment_key == "none"
        if DEAD.search(name) or unused:
            continue
        for pattern, ours in NAMES:
            name = re.sub(pattern, ours, name)
        if ".self_attn.data_to_kv." in name:
            heads = weight.unflatten(0, (config.num_attention_heads, 2, -1))
            for place, kind in enumerate(("k_proj", "v_proj")):
                own = name.replace("self_attn.data_to_kv", f"attention.{kind}")
                converted[own] = heads[:, place].flatten(0, 1).contiguous()
        else:
            converted[name] = weight
    converted.setdefault("lm_head.weight", converted["model.embed_tokens.weight"])
    return converted


def read_vocabulary(path: Path) -> list[str]:
    """Pieces of the authors' `vocab.pkl` (a pickled `vocabulary.WordVocabulary`) in the order of their ids.

    Raises ValueError for any other file; no code of a file is run.
    """
    try:
        words = HolderUnpickler(io.BytesIO(path.read_bytes())).load().words
        pieces = sorted(words, key=words.__getitem__)
        is_vocabulary = [words[piece] for piece in pieces] == list(range(len(pieces)))
    except Exception as error:  # a damaged pickle can fail anywhere
        raise ValueError(
            f"{path} is not a vocab.pkl of Pushdown-Layers ({error}). Pass the file beside model.pt."
        ) from error
    is_vocabulary &= all(isinstance(piece, str) for piece in pieces) and not {"<s>", "</s>"} & set(pieces)
    if not is_vocabulary or pieces[:1] != ["<pad>"] or END_WORD not in words:
        raise ValueError(f"{path} must begin with <pad> (0) and contain {END_WORD}. Is the file another vocabulary?")
    return pieces


def pushdown_tokenizer(pieces: list[str], gpt2: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Tokenizer of the authors' BLLIP model: GPT-2's, with the ids of the pieces that the training data had.

    GPT-2's merges that give a piece of the vocabulary are kept, with the steps to it, so that the pieces are GPT-2's
    wherever all of them are known. Steps (and bytes) that are no pieces of the vocabulary have ids beyond those of the
    model, which refuses a text where one is left, as the authors' program does; a word with any other unknown piece is
    spelled with smaller ones. As in `eval_pushdown_model.py`, a question mark that ends a text is a word of its own. No
    token is added: the model begins with <s>, and evaluation and training write <eos>, the end word, and </s>.

    Args:
        pieces: of `read_vocabulary`.
        gpt2: GPT-2's tokenizer, for its merges.

    Returns:
        A fast tokenizer, padding on the left.

    Raises:
        ValueError: `gpt2` has no merges of bytes.
    """
    backend = getattr(gpt2, "backend_tokenizer", None)
    model = {} if backend is None else json.loads(backend.to_str())["model"]
    if model.get("type") != "BPE" or "\u0120" not in model["vocab"]:
        raise ValueError(
            f"{type(gpt2).__name__} of {gpt2.name_or_path!r} has no merges of bytes. Pass --tokenizer gpt2."
        )
    parts = {"".join(merge): tuple(merge) for merge in model["merges"]}
    wanted, steps = set(pieces), set(pre_tokenizers.ByteLevel.alphabet())
    for piece in reversed(parts):  # a merge stands behind those of its parts
        if piece in steps or piece in wanted:
            steps.update((piece, *parts[piece]))
    known = [*pieces, "</s>", "<s>"]
    vocabulary = {piece: number for number, piece in enumerate([*known, *sorted(steps - set(known))])}
    made = Tokenizer(models.BPE(vocabulary, [merge for piece, merge in parts.items() if piece in steps]))
    made.normalizer = normalizers.Replace(Regex(r"(?<! )\?(?=\s*\z)"), " ?")
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return fast_tokenizer(
        made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", extra_special_tokens=[END_WORD],
        num_model_tokens=len(known),
    )  # fmt: skip
