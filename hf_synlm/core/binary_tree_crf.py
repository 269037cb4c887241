# SPDX-License-Identifier: Apache-2.0
"""A distribution over the binary trees of a sentence: p(tree) is proportional to exp(sum of the scores of its spans).

    A_ij = s_ij + logsumexp_k (A_ik + A_kj)     sum over all trees of the span from i to j;   log Z = A_0n
    p_k = softmax_k (A_ik + A_kj)               probability that the span is split at k
    H_ij = sum_k p_k (H_ik + H_kj - log p_k)    entropy of its trees

All spans of one width are computed together; sentences of a batch may have different lengths.

Source: `get_alpha`, `get_entropy`, `sample` and `get_argmax` of the authors' `models.py` (harvardnlp/urnng), which go
span by span.

Shapes: B sentences, N words of the longest, K trees of a sentence, w words of a span minus 1, A = 2 N - 1 actions.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION


class BinaryTreeCRF:
    """Binary trees of sentences, with the probability exp(sum of the scores of the spans) / Z.

    A tree is a table [N, N] of bools, true at [i, j] if it has a span over the words i to j, j included. Single words
    are spans, too. `scores` [B, N, N] are laid out alike; those with j < i or j behind the end are not used. Cost: N
    sequential steps, O(B N^3) operations.
    """

    def __init__(self, scores: Tensor, lengths: Tensor) -> None:
        self.scores, self.lengths = scores, lengths
        self._splits: list[Tensor] = []
        """By width, [B, N - w, w] A_ik + A_kj of the spans that begin at each word."""

        def add_up(width: int, both: Tensor) -> Tensor:
            self._splits.append(both)
            return scores.diagonal(width, 1, 2) + both.logsumexp(2)

        self.log_partition = self._by_width(scores.diagonal(dim1=1, dim2=2), add_up)

    def _by_width(self, words: Tensor, combine: Callable[[int, Tensor], Tensor]) -> Tensor:
        """Values [B] of whole sentences from those of words [B, N].

        `combine` maps a width w and the sums of the values of both parts [B, N - w, w], for every span and split, to
        values of spans [B, N - w].
        """
        # Spans that begin at a word, by increasing width; and those that end at a word, by decreasing width.
        begin = end = words[..., None]
        whole = [words[:, 0]]
        for width in range(1, words.shape[1]):
            begin, end = begin[:, :-1], end[:, 1:]
            value = combine(width, begin + end)
            begin, end = torch.cat([begin, value[..., None]], 2), torch.cat([value[..., None], end], 2)
            whole.append(value[:, 0])
        return torch.stack(whole, 1).gather(1, self.lengths[:, None] - 1).squeeze(1)

    def entropy(self) -> Tensor:
        """Entropy [B] in nats."""

        def add_up(width: int, both: Tensor) -> Tensor:
            log_probs = self._splits[width - 1].log_softmax(2)
            return (log_probs.exp() * (both - log_probs)).sum(2)

        return self._by_width(torch.zeros_like(self.scores[:, 0]), add_up)

    def log_prob(self, trees: Tensor) -> Tensor:
        """Log-probabilities [B, K] of trees [B, K, N, N]."""
        total = torch.einsum("bkij,bij->bk", trees.to(self.scores.dtype), self.scores)
        return total - self.log_partition[:, None]

    @torch.no_grad()
    def sample(self, count: int) -> Tensor:
        """Draw K = `count` trees of every sentence [B, K, N, N]: N sequential steps, O(B K N^2 log N) operations."""

        def draw(width: int) -> Tensor:
            share = self._splits[width - 1].softmax(2).cumsum(2)
            places = torch.rand(*share.shape[:2], count, device=share.device, dtype=share.dtype) * share[..., -1:]
            return torch.searchsorted(share, places, right=True).clamp(max=width - 1).transpose(1, 2)

        return self._follow(draw, count)

    @torch.no_grad()
    def argmax(self) -> Tensor:
        """The most probable trees [B, N, N]."""
        splits = []

        def best(width: int, both: Tensor) -> Tensor:
            value, split = both.max(2)
            splits.append(split)
            return self.scores.diagonal(width, 1, 2) + value

        self._by_width(self.scores.diagonal(dim1=1, dim2=2), best)
        return self._follow(lambda width: splits[width - 1][:, None], 1)[:, 0]

    def _follow(self, split_of: Callable[[int], Tensor], count: int) -> Tensor:
        """Trees [B, K, N, N] from the whole sentence down; `split_of` width gives the splits [B, K, N - w] of spans."""
        size, device = self.scores.shape[1], self.scores.device
        # The last place takes the parts of spans that are not in the tree.
        flat = torch.zeros(len(self.scores), count, size * size + 1, dtype=torch.bool, device=device)
        table = flat[..., :-1].unflatten(2, (size, size))
        flat.scatter_(2, (self.lengths - 1)[:, None, None].expand(-1, count, -1), True)
        for width in range(size - 1, 0, -1):
            first = torch.arange(size - width, device=device)
            middle = first + split_of(width)  # last word of the left part
            inside = table.diagonal(width, 2, 3)
            for place in (first * size + middle, (middle + 1) * size + first + width):
                flat.scatter_(2, torch.where(inside, place, size * size), True)
        words = torch.arange(size, device=device)
        table[..., words, words] &= words < self.lengths[:, None, None]
        return table


def tree_actions(trees: Tensor) -> Tensor:
    """Write trees [..., N, N] (see `BinaryTreeCRF`) as GEN and COMP in post-order [..., A], padded by `PAD_ACTION`."""
    size = trees.shape[-1]
    words = torch.arange(size, device=trees.device)
    ending = trees.sum(-2)  # spans that end with each word, the word itself included
    lengths = (ending > 0).sum(-1, keepdim=True)
    place = (ending.cumsum(-1) - ending).masked_fill(words >= lengths, 2 * size - 1)
    actions = torch.full((*trees.shape[:-2], 2 * size), COMP, device=trees.device).scatter_(-1, place, GEN)[..., :-1]
    return actions.masked_fill(torch.arange(2 * size - 1, device=trees.device) >= 2 * lengths - 1, PAD_ACTION)
