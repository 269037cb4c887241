# SPDX-License-Identifier: Apache-2.0
"""The output layer of a model, as a search uses it: logits, and log-probabilities of given tokens with bounds of them.

Shapes: N vectors, B sentences, R states, D width, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.matrix_products import ONEDNN_TYPES, ROW_STEP, linear_map, uses_onednn
from hf_synlm.core.module_tools import unwrapped, weight_of

# Numbers in one chunk of logits where one of each row is kept: memory does not grow with the batch. On a CPU, a chunk
# stays in the cache, but has so many rows that the weights are not read too often.
_CHUNK_ELEMENTS, _CPU_CHUNK_ELEMENTS, _CPU_CHUNK_ROWS = 1 << 24, 1 << 18, 64
# Rows and uses of packed weights in a search, roughly: they choose their layout.
_ROWS, _USES = 16, 100
_ROW_STEP = 4  # a row more costs the whole vocabulary
# Upper bounds of probabilities look at this part of the vocabulary.
_BOUND_SHARE = 16
# Weights from which the selection of rows by bounds pays, though it runs several times.
_BOUNDS_FROM = 1 << 20


def rows_at_once(features: Tensor, width: int) -> int:
    """How many vectors to multiply at a time with a matrix of some width when the product is not kept."""
    if features.device.type == "cpu":
        return max(_CPU_CHUNK_ROWS, _CPU_CHUNK_ELEMENTS // width)
    return max(1, _CHUNK_ELEMENTS // width)


class TokenHead:
    """Logits of the next token by the layer itself; tokens `excluded` [E] get -inf."""

    def __init__(self, layer: Any, vocab_size: int, excluded: Tensor | None = None) -> None:
        self.layer, self.vocab_size, self.excluded = layer, vocab_size, excluded

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., V] in float32 after vectors [..., D]."""
        logits = self.product(features).float()
        return logits if self.excluded is None else logits.index_fill(-1, self.excluded, float("-inf"))

    def product(self, features: Tensor) -> Tensor:
        """Logits [..., V] with those of excluded tokens."""
        return self.layer(features)

    def log_probs(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [N] of tokens [N] after vectors [N, D]."""
        chunk = rows_at_once(features, self.vocab_size)
        parts = zip(features.split(chunk), tokens.split(chunk), strict=True)
        return -torch.cat([F.cross_entropy(self.logits(part), word, reduction="none") for part, word in parts])


class PackedTokenHead(TokenHead):
    """Logits by the weights of a linear layer, laid out for many products: they must not change meanwhile."""

    def __init__(self, layer: Any, excluded: Tensor | None = None) -> None:
        weight, bias = weight_of(layer), unwrapped(layer).bias
        self.weight = weight.detach()
        super().__init__(layer, len(self.weight))
        if excluded is not None:
            bias = self.weight.new_zeros(self.vocab_size) if bias is None else bias
            bias = bias.index_fill(0, excluded, float("-inf"))
        self.bias = None if bias is None else bias.detach()
        self._map = linear_map(weight, _ROWS, _USES, ONEDNN_TYPES, _ROW_STEP)
        self._few: tuple[Any, Tensor] | None = None

    def product(self, features: Tensor) -> Tensor:
        """Logits [..., V], those of excluded tokens -inf."""
        logits = self._map(features)
        return logits if self.bias is None else logits.add_(self.bias)

    def bound(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Upper bounds [N] of the log-probabilities of tokens [N] after vectors [N, D].

        The sum is computed for a sixteenth F of the vocabulary, and bounded by the mean logit of n others (Jensen):

            log sum_v exp(x_v) >= log [ sum_{v in F} exp(x_v) + n exp(1/n sum_{v not in F} x_v) ]
        """
        if not len(features):
            return features.new_zeros(0, dtype=torch.float32)
        few, few_bias = self._few or self._choose_few(features[:1])
        parts = features.split(rows_at_once(features, len(few_bias)))
        denominator = torch.cat([few(part).float().add_(few_bias).logsumexp(1) for part in parts])
        target = torch.bmm(features[:, None], self.weight[tokens, :, None])[:, 0, 0].float()
        # More than what sums in another order differ by.
        eps = max(torch.finfo(torch.float32).eps, torch.finfo(self.weight.dtype).eps)
        slack = 100 * eps * (1 + target.abs() + denominator.abs())
        target = target if self.bias is None else target + self.bias[tokens]
        return (target - denominator).clamp(max=0.0) + slack

    def _choose_few(self, feature: Tensor) -> tuple[Any, Tensor]:
        """Take as F the tokens with the largest biases, without biases the most probable ones after a vector [1, D].

        A last row stands for the others.
        """
        favour = self.logits(feature)[0] if self.bias is None else self.bias
        often = favour.topk(max(1, len(favour) // _BOUND_SHARE)).indices
        rest = (favour > float("-inf")).index_fill(0, often, False)
        # In float32: halves cannot count the tokens of a large vocabulary.
        count = rest.sum().float().clamp(min=1)
        outside = self.weight[~rest].sum(0, dtype=torch.float32)
        mean = (self.weight.sum(0, dtype=torch.float32) - outside) / count
        bias = torch.zeros_like(favour) if self.bias is None else self.bias
        others = torch.where(rest.any(), count.log() + bias[rest].sum(dtype=torch.float32) / count, float("-inf"))
        few = linear_map(
            torch.cat([self.weight[often], mean[None].to(self.weight.dtype)]), _ROWS, _USES, row_step=ROW_STEP
        )
        self._few = few, torch.cat([bias[often].float(), others[None]])
        return self._few


def bounds_pay(layer: Any) -> bool:
    """Whether to score only the tokens that bounds do not exclude.

    That takes a CPU, where choosing rows costs nothing, a large vocabulary, and a plain linear layer in float32: other
    layers may compute something else than their weights say, and bounds in lower precision are loose.
    """
    is_plain = type(layer) is nn.Linear and not (layer._forward_hooks or layer._forward_pre_hooks)
    if not is_plain or torch.is_autocast_enabled("cpu"):
        return False
    return uses_onednn(layer.weight) and layer.weight.numel() >= _BOUNDS_FROM
