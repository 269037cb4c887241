# SPDX-License-Identifier: Apache-2.0
"""GEN and COMP: the actions that build binary trees, and trees as sequences of them.

GPST (Hu et al. 2024, section 3) builds binary trees bottom-up on a stack:

* GEN (id 0) generates the next token and pushes it,
* COMP (id 1) replaces the top two stack items by their composition; it needs at least two items.

n tokens take n GEN and n - 1 COMP actions, 2n - 1 in all, and end with one item on the stack. The order of the actions
is the post-order of the tree. Action sequences are padded on the right with PAD_ACTION (-1).

The actions of RNNG, which build labeled trees, are in `trees/transitions.py`. A, in costs, is the length of a
sequence.
"""

from collections.abc import Sequence

from hf_synlm.trees.spans import Span, validate_spans

GEN = 0
COMP = 1
PAD_ACTION = -1


def spans_to_actions(spans: Sequence[Span], num_tokens: int) -> list[int]:
    """Write a binary tree as the GEN/COMP actions that build it.

    After GEN of token t come as many COMP as there are spans that end at boundary t + 1. Inverse of
    `trees.binary.actions_to_spans`.

    Args:
        spans: the n - 1 half-open spans of a binary tree over n tokens, in any order.
        num_tokens: length n of the sentence in tokens.

    Returns:
        2n - 1 action ids.

    Raises:
        ValueError: the spans cross, leave the sentence or do not form a binary tree.

    Cost: O(n log n).
    """
    validate_spans(spans, num_tokens)
    if len(spans) != num_tokens - 1:
        raise ValueError(
            f"{len(spans)} spans over {num_tokens} tokens are not a binary tree, which has {num_tokens - 1} spans. "
            "Complete the tree with trees.binary.binarize_spans"
        )
    num_ending = [0] * (num_tokens + 1)
    for _, end in spans:
        num_ending[end] += 1
    actions: list[int] = []
    for end in range(1, num_tokens + 1):
        actions.append(GEN)
        actions.extend([COMP] * num_ending[end])
    return actions
