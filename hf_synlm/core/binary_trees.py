# SPDX-License-Identifier: Apache-2.0
"""Binary trees of sentences, by sums of the scores of their spans: CKY with one operation for each width.

    best_ij = s_ij + max_k (best_ik + best_kj)

Sentences of a batch may have different lengths. Source: `get_argmax` of the authors' `models.py` (harvardnlp/urnng),
which goes span by span.

Shapes: B sentences, N words of the longest, K trees of a sentence, w words of a span minus 1.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class BinaryTrees:
    """Binary trees of sentences whose spans have scores.

    A tree is a table [N, N] of bools, true at [i, j] if it has a span over the words i to j, j included. Single words
    are spans, too. `scores` [B, N, N] are laid out alike; those with j < i or j behind the end are not used. Cost: N
    sequential steps, O(B N^3) operations.
    """

    def __init__(self, scores: Tensor, lengths: Tensor) -> None:
        self.scores, self.lengths = scores, lengths

    @torch.no_grad()
    def argmax(self) -> Tensor:
        """The trees [B, N, N] with the largest sums of scores; of equal splits, one with the shortest left part."""
        splits = []

        def best(width: int, both: Tensor) -> Tensor:
            value, split = both.max(2)
            splits.append(split)
            return self.scores.diagonal(width, 1, 2) + value

        self._by_width(self.scores.diagonal(dim1=1, dim2=2), best)
        return self._follow(lambda width: splits[width - 1][:, None], 1)[:, 0]

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
