"""Names of the weights of Pushdown Layers: MurtyShikhar/Pushdown-Layers -> this library."""

import re
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedConfig

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


def convert_weights(weights: Mapping[str, Tensor], config: PreTrainedConfig) -> dict[str, Tensor]:
    """Rename the weights of a checkpoint of the authors' program.

    Args:
        weights: its state dict.
        config: a `PushdownConfig` of the same sizes.

    Returns:
        State dict of `PushdownForCausalLM`.

    Cost: O(size of the weights); keys and values, interleaved by head there, are copied.
    """
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
    converted["lm_head.weight"] = converted["model.embed_tokens.weight"]
    return converted
