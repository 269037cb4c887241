# SPDX-License-Identifier: Apache-2.0
"""Normalized attention entropy of Tree LM, which predicts reading times: how evenly the last layer attends.

With a_hs the weights with which head h sees the n columns s before a row that some head sees, divided by their sum,

    NAE = - sum_h sum_s a_hs log a_hs / log n,   0 where n <= 1

over "raw" weights; or "projected" ones, a_hs ||v_hs W_h + c / H||, which count by what they add to the output, with W_h
and c the weights and the bias of the layer that joins the H heads (Kobayashi et al. 2020).

Source: Oh and Schuler 2022; Yoshida et al. 2025 for Transformer Grammars, `score.py` of their program.

Shapes: B sentences, P positions (rows), S columns, H heads, d width of a head, D width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from hf_synlm.core.cache import CACHE
from hf_synlm.core.module_tools import unwrapped, weight_of


def entropy_of_positions(
    base: Any, embedded: Tensor, mask: Tensor, index: Tensor, products: Tensor | None, cache: Any = None
) -> Tensor:
    """Run the layers of a bare model, as its `decode` does: the entropy [B, P], of raw weights without `products`."""
    if base.config.backbone_config is not None:
        weights, value = _backbone_attention(base.backbone, embedded, mask, index, cache)
    else:
        hidden, positions = base.decode(embedded, mask, index, cache)[-2], base.position_table(mask, embedded)
        weights, value = base.layers[-1].attention.look(hidden, mask, index, positions, cache)
    if products is not None:
        value = F.pad(value.float(), (0, 1), value=1.0)
        weights = weights * ((value @ products) * value).sum(-1).clamp(min=0).sqrt()[:, :, None]
    return _entropy(weights)


def output_products(base: Any, kind: str) -> Tensor | None:
    """Inner products [H, d + 1, d + 1] of the rows of W_h, and c / H, for "projected" weights; None for "raw" ones."""
    if kind not in ("projected", "raw"):
        raise ValueError(f"attention_entropy {kind!r} is unknown. Choose 'projected' or 'raw'.")
    if kind == "raw":
        return None
    heads, own = base.config.num_attention_heads, base.config.backbone_config is None
    layer = base.layers[-1].attention.o_proj if own else _output_layer(base.backbone)
    weight, bias = weight_of(layer), getattr(unwrapped(layer), "bias", None)
    weight = weight if isinstance(unwrapped(layer), Conv1D) else weight.T
    share = weight.new_zeros(weight.shape[1]) if bias is None else bias / heads
    table = torch.cat([weight.unflatten(0, (heads, -1)), share.expand(heads, 1, -1)], 1).float()
    return table @ table.mT


def _entropy(weights: Tensor) -> Tensor:
    """The entropy [B, P] of weights [B, H, P, S] that are not divided by their sum; the last columns are the rows."""
    rows, columns = weights.shape[2:]
    place = torch.arange(columns, device=weights.device)
    seen = (weights > 0).any(1) & (place < place[columns - rows :, None])
    kept = weights.float() * seen[:, None]
    share = kept / kept.sum(-1, keepdim=True).clamp(min=torch.finfo(kept.dtype).tiny)
    return torch.special.entr(share).sum((1, 3)) / seen.sum(-1).clamp(min=2).log()


class _LastValues:
    """Passes keys and values on to a cache, if there is one, and notes the values of the last layer."""

    def __init__(self, cache: Any) -> None:
        self.cache, self.values = cache, torch.empty(0)

    def update(self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        key, self.values = (key, value) if self.cache is None else self.cache.update(key, value, *args, **kwargs)
        return key, self.values

    def get_seq_length(self) -> int:
        return 0 if self.cache is None else self.cache.get_seq_length()


def _backbone_attention(
    backbone: Any, embedded: Tensor, mask: Tensor, index: Tensor, cache: Any
) -> tuple[Tensor, Tensor]:
    """Weights [B, H, P, S] and values [B, H, S, d] of the last layer; arguments as for `run_backbone`."""
    seen = embedded.new_zeros(()).masked_fill(~mask[:, None], float("-inf"))
    noted, kind = _LastValues(cache), backbone.config._attn_implementation
    backbone.set_attn_implementation("eager")  # the others keep no weights
    try:
        weights = backbone(
            inputs_embeds=embedded, attention_mask=seen, position_ids=index.amax(2), **{CACHE: noted},
            use_cache=True, output_attentions=True,
        ).attentions[-1]  # fmt: skip
    finally:
        backbone.set_attn_implementation(kind)
    return weights, noted.values.repeat_interleave(weights.shape[1] // noted.values.shape[1], 1)


def _output_layer(backbone: Any) -> Any:
    """The layer that joins the heads of the last attention: in all decoders the last of its linear layers."""
    attention = [module for module in backbone.modules() if "Attention" in type(module).__name__][-1]
    return [part for part in attention.children() if hasattr(part, "weight") and part.weight.dim() == 2][-1]
