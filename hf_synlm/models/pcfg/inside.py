# SPDX-License-Identifier: Apache-2.0
"""The inside pass: probabilities of all spans of sentences, trees summed out.

    b(i, i + 1, X) = emission[X, w_i]
    b(i, j, A) = sum_(B, C) p(A -> B C) sum_k b(i, k, B) b(k, j, C)
    p(w_0..n-1) = sum_A root[A] b(0, n, A)

Spans are computed by width. The vectors of every span are divided by their maximum; the logarithms of these scales are
kept apart and carry no gradient, so nothing under- or overflows, and nothing is added to small numbers (the authors of
the low-rank grammars add 1e-9, here there is no such floor). The words of a row stand at its left end; what is behind
them changes nothing.

Cost for n words: table O(n^3 Y^2 + n^2 Y^3 + n X Y S); low rank O(n^3 r + n^2 r^2); list O(n^3 p + n^2 R) for R rules
with p pairs of constituents as children.

Shapes: B sentences, T words, K = T - w + 1 spans of width w, Y nonterminals, X preterminals, V vocabulary.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_synlm.core.matrix_products import without_autocast
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules, SparseRules, Words

# Far below the logarithm of every probability; sums of it are finite.
IMPOSSIBLE = -1e30
# Most entries of a square of constituents, half of which are a chart: 128 MB in float32.
_MAX_CHART = 1 << 26


@dataclass
class Grammar:
    """Probabilities of a grammar, or of one grammar for every sentence (`*` = B)."""

    root: Tensor
    """[*, Y] p(S -> A)."""
    emission: Tensor
    """[*, X, V] log p(X -> word)."""
    rules: DenseRules | LowRankRules | SparseRules

    def of_words(self, ids: Tensor) -> Tensor:
        """Log p(X -> word) [B, T, X] of words [B, T]."""
        if self.emission.dim() == 2:
            return self.emission.index_select(1, ids.flatten()).t().unflatten(0, ids.shape)
        places = ids.unsqueeze(1).expand(-1, self.emission.shape[1], -1)
        return self.emission.gather(2, places).transpose(1, 2)

    def of_rows(self, rows: Tensor) -> "Grammar":
        """The grammars of some sentences."""
        if self.root.dim() == 1:
            return self
        return Grammar(self.root[rows], self.emission[rows], self.rules.of_rows(rows))

    def single(self) -> "Grammar":
        """The only grammar of a batch of one, without the dimension of the batch."""
        return Grammar(self.root[0], self.emission[0], self.rules.single())

    @cached_property
    def probabilities(self) -> Tensor:
        """[*, X, V] p(X -> word)."""
        return self.emission.exp()


@dataclass
class Chart:
    """Inside probabilities of spans, by width: in lists of constituents, entry w - 2 is of width w."""

    emission: Tensor
    """[B, T, X] scaled probabilities of the words."""
    left: list[Tensor]
    """[B, K, *] what constituents are as left children."""
    right: list[Tensor]
    """[B, K, *] what they are as right children."""
    values: list[Tensor]
    """[B, K, *] what their parents know of them: nonterminals or ranks."""
    scale: list[Tensor]
    """[B, K] logarithms of scales; entry w - 1 is of width w, words are the first."""
    whole: Tensor
    """[B, T] log p(the first 1, 2, ... words are the sentence)."""

    def columns(self, end: int) -> tuple[Tensor, Tensor]:
        """Spans that end behind word `end` - 1, the longest first.

        Constituents as left children [B, end - 1, *], and the scales [B, end] of these and of the word.
        """
        left = [self.left[end - start - 2][:, start] for start in range(end - 1)]
        scale = [self.scale[end - start - 1][:, start] for start in range(end)]
        return torch.stack(left, 1) if left else self.emission[:, :0], torch.stack(scale, 1)


def scaled(log_probs: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities [..., X] divided by their maximum, and its logarithm [...]."""
    scale = log_probs.detach().amax(-1)
    return (log_probs - scale.unsqueeze(-1)).exp(), scale


def normalized(values: Tensor) -> tuple[Tensor, Tensor]:
    """Values [..., d] divided by their maximum, and its logarithm [...]."""
    largest = values.detach().amax(-1).clamp_min(torch.finfo(values.dtype).tiny)
    return values / largest.unsqueeze(-1), largest.log()


def split_weights(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Weights [..., W] of summands with log scales, the largest is 1, and its log scale [...]."""
    largest = scales.amax(-1)
    return (scales - largest.unsqueeze(-1)).exp(), largest


def rows_at_once(grammar: Grammar, num_words: int) -> int:
    """How many sentences without gradients share the memory of a chart."""
    return max(1, _MAX_CHART // (grammar.rules.size * max(1, num_words) ** 2))


def safe_log(values: Tensor, scale: Tensor) -> Tensor:
    """Log of values, plus their log scale; -inf for 0, whose gradient would not be a number even where it is unused."""
    return (values.clamp_min(torch.finfo(values.dtype).tiny).log() + scale).masked_fill(values == 0, -torch.inf)


def in_full_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn autocast off in a function of a `Grammar`: sums of probabilities are float32 or wider."""

    @functools.wraps(function)
    def run(grammar: Grammar, *args: Any, **kwargs: Any) -> Any:
        with without_autocast(grammar.root.device.type):
            return function(grammar, *args, **kwargs)

    return run


@in_full_precision
def inside(grammar: Grammar, log_emission: Tensor, allowed: Tensor | None = None) -> Chart:
    """The inside pass over words with `log_emission` [B, T, X].

    `allowed` [B, T + 1, T + 1] restricts the constituents to some spans, which must contain binary trees.
    """
    rules, root = grammar.rules, grammar.rules.of_root(grammar.root)
    emission, scale = scaled(log_emission)
    words, num_words = rules.of_words(emission), emission.shape[1]
    whole = [torch.zeros_like(scale[:, 0])]  # no sentence has one word
    chart = Chart(emission, [], [], [], [scale], scale)
    for width in range(2, num_words + 1):
        count = num_words - width + 1
        above = children(chart.scale, chart.scale, count)
        weight, scale = split_weights(torch.stack(above[0], 2) + torch.stack(above[1], 2))
        left, right = children(chart.left, chart.right, count)
        first, last = (Words(*(part[:, at] for part in words)) for at in (slice(count), slice(width - 1, None)))
        values, more = normalized(rules.combine(first, last, left, right, weight))
        scale = scale + more
        if allowed is not None:
            scale = scale.masked_fill(~allowed.diagonal(width, 1, 2), IMPOSSIBLE)
        whole.append((values[:, 0] * root).sum(-1))
        chart.values.append(values)
        chart.scale.append(scale)
        for side, vectors in zip((chart.left, chart.right), rules.of_constituents(values), strict=True):
            side.append(vectors)
    chart.whole = safe_log(torch.stack(whole, 1), torch.stack([part[:, 0] for part in chart.scale], 1))
    return chart


def children(left: list[Tensor], right: list[Tensor], count: int) -> tuple[list[Tensor], list[Tensor]]:
    """Left and right children [B, K, ...] of the `count` spans of a width, the narrowest left ones first."""
    return [part[:, :count] for part in left], [part[:, -count:] for part in reversed(right)]
