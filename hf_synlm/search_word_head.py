"""The output layer of a model, as a search uses it: logits, and log-probabilities of given words with bounds of them.

Shapes: N vectors, B sentences, R states, D width, V vocabulary.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .matrix_products import linear_map, without_autocast
from .module_tools import unwrapped, weight_of

# Numbers in one chunk of logits where one of each row is kept: memory does not grow with the batch. On a CPU, a chunk
# stays in the cache, but has so many rows that the weights are not read too often.
_CHUNK_ELEMENTS, _CPU_CHUNK_ELEMENTS, _CPU_CHUNK_ROWS = 1 << 24, 1 << 18, 64
# Rows and uses of the weights in a search, roughly: they choose their layout.
_ROWS, _USES = 16, 100
# Upper bounds of probabilities look at this part of the vocabulary.
_BOUND_SHARE = 16


class WordHead:
    """Logits h W^T + b of the next word, with weights laid out for many products: they must not change meanwhile.

    Args:
        layer: The linear layer with W [V, D] and b, or no b.
        excluded: Words that may not be generated [E]; their logits are -inf. None = all may.
    """

    def __init__(self, layer: Any, excluded: Tensor | None = None) -> None:
        self.weight, self.bias = weight_of(layer).detach(), unwrapped(layer).bias
        if excluded is not None:
            bias = self.weight.new_zeros(len(self.weight)) if self.bias is None else self.bias.detach()
            self.bias = bias.index_fill(0, excluded, float("-inf"))
        self._map = linear_map(self.weight, _ROWS, _USES)
        self._few: tuple[Any, Tensor] | None = None

    def logits(self, features: Tensor) -> Tensor:
        """Logits [..., V] in float32 after vectors [..., D]."""
        with without_autocast(self.weight.device.type):
            logits = self._map(features.reshape(-1, features.shape[-1]).to(self.weight.dtype))
        logits = logits if self.bias is None else logits.add_(self.bias)
        return logits.float().view(*features.shape[:-1], len(self.weight))

    @functools.cached_property
    def chunk(self) -> int:
        """Rows of which the logits should be computed at once, if they are not kept."""
        if self.weight.device.type == "cpu":
            return max(_CPU_CHUNK_ROWS, _CPU_CHUNK_ELEMENTS // len(self.weight))
        return max(1, _CHUNK_ELEMENTS // len(self.weight))

    def log_probs(self, features: Tensor, words: Tensor) -> Tensor:
        """Log-probabilities [N] of words [N] after vectors [N, D]."""
        parts = zip(features.split(self.chunk), words.split(self.chunk), strict=True)
        return -torch.cat([F.cross_entropy(self.logits(part), word, reduction="none") for part, word in parts])

    def bound(self, features: Tensor, words: Tensor) -> Tensor:
        """Upper bounds [B, R] of the log-probabilities of one word per sentence [B] after vectors [B, R, D].

        The denominator is computed for a sixteenth of the vocabulary, F, and bounded for the n other words by their
        mean logit (Jensen's inequality):

            log sum_v exp(x_v) >= log [ sum_{v in F} exp(x_v) + n exp(1/n sum_{v not in F} x_v) ]
        """
        few, few_bias = self._few or self._choose_few(features[0, :1])
        features = features.to(self.weight.dtype)
        with without_autocast(self.weight.device.type):
            denominator = few(features.flatten(0, 1)).add_(few_bias).float().logsumexp(1).view(features.shape[:2])
            target = torch.bmm(features, self.weight[words, :, None]).squeeze(2)
        target = target if self.bias is None else target + self.bias[words, None]
        # More than what sums in another order differ by.
        return (target.float() - denominator).clamp(max=0.0) + 1000 * torch.finfo(self.weight.dtype).eps

    def _choose_few(self, feature: Tensor) -> tuple[Any, Tensor]:
        """Take as F the words with the largest biases, without biases the most probable ones after a vector [1, D].

        A last row stands for the others.
        """
        favour = self.logits(feature)[0] if self.bias is None else self.bias
        often = favour.topk(max(1, len(favour) // _BOUND_SHARE)).indices
        rest = (favour > float("-inf")).index_fill(0, often, False).to(self.weight.dtype)
        count = rest.sum()
        mean = (rest / count.clamp(min=1)) @ self.weight
        bias = self.weight.new_zeros(len(favour)) if self.bias is None else self.bias
        others = count.log() + bias.masked_fill(rest == 0, 0).sum() / count.clamp(min=1)
        few = linear_map(torch.cat([self.weight[often], mean[None]]), _ROWS, _USES)
        self._few = few, torch.cat([bias[often], others[None]])
        return self._few
