# SPDX-License-Identifier: Apache-2.0
"""A decoder of transformers (GPT-2, Llama, Qwen, ...) as the layers of a causal Tree LM.

Words keep the ids of the decoder's tokenizer and labels have a table of their own, so that its weights stay what they
are. The position of a node is its place in its derivation: the same for all hypotheses that share the node, and so are
its keys and values, learned or rotary positions included.

Shapes: B sentences, P positions (rows), S columns, D width, V words, Y labels.
"""

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import get_ident
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from hf_synlm.core.cache import CACHE
from hf_synlm.core.matrix_products import ONEDNN_TYPES, linear_map, uses_onednn

# Rows and uses of packed weights in a search, roughly: they choose their layout.
_ROWS, _USES = 64, 100
_FEW_ROWS, _ROW_STEP = 32, 4


def check_backbone(config: PreTrainedConfig) -> None:
    """Raise ValueError for a decoder that does not attend to all positions before; it names the field to change."""
    kind = config.model_type
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or kind in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise ValueError(f"The backbone is of type {kind!r}, not a decoder. Choose a decoder such as GPT-2.")
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["full_attention" if window is None else "sliding_attention"]
    if set(kinds) != {"full_attention"}:
        raise ValueError(
            f"The backbone has layers of the types {sorted(set(kinds))}, and a Tree LM needs full attention. If it "
            "was trained with full attention, set sliding_window to None and all layer_types to 'full_attention'."
        )


def max_positions(config: PreTrainedConfig | None) -> float:
    """Most positions of a tree: those of the decoder, or what its local layers see (GPT-Neo)."""
    longest = getattr(config, "max_position_embeddings", None) or math.inf
    return min(longest, config.window_size) if "local" in getattr(config, "attention_layers", ()) else longest


def cache_width(config: PreTrainedConfig) -> int:
    """Numbers that a layer of the decoder keeps of each position: its keys and values."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return 2 * heads * (getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def make_backbone(config: PreTrainedConfig) -> PreTrainedModel:
    """The decoder with random weights, without its embeddings of words, which are the Tree LM's."""
    backbone = AutoModel.from_config(config)
    if "position_ids" not in inspect.signature(backbone.forward).parameters:
        raise ValueError(f"{type(backbone).__name__} lacks position_ids, which a Tree LM needs. Take another decoder.")
    backbone.set_input_embeddings(None)
    return backbone


def run_backbone(
    backbone: PreTrainedModel, embedded: Tensor, mask: Tensor, index: Tensor, cache: Any, is_causal: bool = True
) -> list[Tensor]:
    """Run a decoder on linearized trees [B, P, D]: embeddings and states after each layer; with a cache the last.

    `mask` [B, P, S] is True where the row sees the column. Without a cache rows see all columns before them, if
    `is_causal`, which the decoder does by itself, so that its fast attention can be used. Of the distances `index`
    [B, P, S], that to the begin token is the position. More positions than the decoder has raise ValueError.
    """
    longest = max_positions(backbone.config)
    if is_causal and mask.shape[2] > longest:
        raise ValueError(
            f"A linearized tree needs {mask.shape[2]} positions or more, and the backbone has {longest}. Cut the text."
        )
    seen = None
    if cache is not None or not is_causal:
        seen = embedded.new_zeros(()).masked_fill(~mask[:, None], float("-inf"))
    output = backbone(
        inputs_embeds=embedded, attention_mask=seen, position_ids=index.amax(2), **{CACHE: cache},
        use_cache=cache is not None, output_hidden_states=cache is None,
    )  # fmt: skip
    return [output.last_hidden_state] if cache is not None else list(output.hidden_states)


def rows_to_add(rows: int) -> int:
    """Rows to add to a product on a CPU: oneDNN keeps half a MiB for every new number, and is slow with 1 to 3."""
    return -rows % _ROW_STEP if rows < _ROW_STEP or rows > _FEW_ROWS else 0


class PackedProducts(AbstractContextManager):
    """Within it, the linear layers of a module multiply by maps that are laid out for many products.

    Other threads, compiled code, and calls that record gradients multiply as ever; hooks and adapters of the layers
    keep their effect. For plain layers on a CPU in float32 or bfloat16, whose weights must not change meanwhile. Costs
    another copy of them.
    """

    def __init__(self, module: nn.Module) -> None:
        self._thread = [0]  # in a list, which the closures share
        self._forwards = {
            layer: _packed_forward(layer, linear_map(layer.weight, _ROWS, _USES, ONEDNN_TYPES), self._thread)
            for layer in module.modules()
            if isinstance(layer, nn.Linear)
            and getattr(layer.forward, "__func__", None) is nn.Linear.forward
            and uses_onednn(layer.weight, ONEDNN_TYPES)
        }

    def __enter__(self) -> None:
        self._thread[0] = get_ident()
        for layer, forward in self._forwards.items():
            vars(layer)["forward"] = forward

    def __exit__(self, *_: Any) -> None:
        for layer in self._forwards:
            vars(layer).pop("forward", None)

    def __deepcopy__(self, memo: Any) -> Self:
        """The same: copies of a search are of the same model."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Ordinary products: a cache that is saved does not hold the model."""
        return nullcontext, ()


def _packed_forward(layer: nn.Linear, product: Callable[[Tensor], Tensor], thread: list[int]) -> Callable:
    """A `forward` of the layer; it does not refer to `PackedProducts`, which would keep the maps until a collection."""
    bias = layer.bias

    def forward(input: Tensor) -> Tensor:
        if get_ident() != thread[0] or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return nn.Linear.forward(layer, input)
        output = product(input)
        return output if bias is None else output.add_(bias)

    return forward
