# SPDX-License-Identifier: Apache-2.0
"""The best tree of scored spans, for many sentences at once: CKY with one operation for each width.

Shapes: B sentences, N words of the longest. A chart [B, N + 1, N + 1] holds the span (i, j) in row i, column j.
"""

import torch
from torch import Tensor


def best_trees(gain: Tensor, num_words: Tensor) -> Tensor:
    """Spans of the binary trees with the largest sums of gains.

        best(i, j) = gain(i, j) + max over k of best(i, k) + best(k, j)

    Where the gain of a span is 0, it stands for no constituent, so that binary trees stand for trees of any shape.

    Args:
        gain: [B, N + 1, N + 1] of the spans i < j; of the others it does not count.
        num_words: [B] n of each sentence, at least 1; its tree covers (0, n).

    Returns:
        [B, N + 1, N + 1] bool, True at the spans of the tree, words included.

    Cost: O(B N^3) in 2 N steps.
    """
    size, most = len(gain), gain.shape[1] - 1
    sentence = torch.arange(size, device=gain.device)[:, None]
    # By width from the left, and from the right in reverse, so that both parts of all splits are slices.
    starting, ending = gain.new_zeros(2, size, most + 1, most + 1)
    split = torch.zeros(size, most + 1, most + 1, dtype=torch.long, device=gain.device)
    for width in range(1, most + 1):
        best = gain.diagonal(width, 1, 2)  # [B, N + 1 - width]
        first = torch.arange(most + 1 - width, device=gain.device)
        if width > 1:
            parts, point = (starting[:, : most + 1 - width, 1:width] + ending[:, width:, most + 1 - width : most]).max(
                2
            )
            best, split[:, first, first + width] = best + parts, first + 1 + point
        starting[:, : most + 1 - width, width] = ending[:, width:, most - width] = best
    chosen = torch.zeros_like(split, dtype=torch.bool)
    chosen[sentence[:, 0], 0, num_words] = True
    for width in range(most, 1, -1):
        first = torch.arange(most + 1 - width, device=gain.device)
        middle, here = split.diagonal(width, 1, 2), chosen.diagonal(width, 1, 2)
        chosen[sentence, first, middle] |= here
        chosen[sentence, middle, first + width] |= here
    return chosen
