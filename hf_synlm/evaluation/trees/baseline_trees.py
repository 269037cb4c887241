# SPDX-License-Identifier: Apache-2.0
"""Binary trees that a parser has to beat: left-branching, balanced and random ones.

Right-branching trees are in `hf_synlm.trees.spans`, because PaLM uses them too.
"""

import random

from hf_synlm.trees.spans import Span


def left_branching(num_tokens: int) -> list[Span]:
    """The left-branching binary tree: (0, 2), (0, 3), ..., (0, n)."""
    return [(0, end) for end in range(2, num_tokens + 1)]


def balanced(num_tokens: int) -> list[Span]:
    """The balanced binary tree in post-order: every span is split in the middle, an odd token goes to the right."""
    # Parent, right, left is post-order backwards.
    spans: list[Span] = []
    agenda: list[Span] = [(0, num_tokens)]
    while agenda:
        start, end = agenda.pop()
        if end - start < 2:
            continue
        spans.append((start, end))
        middle = start + (end - start) // 2
        agenda.extend(((start, middle), (middle, end)))
    return spans[::-1]


def random_tree(num_tokens: int, generator: random.Random) -> list[Span]:
    """Draw a binary tree, in post-order, uniformly from all Catalan(n - 1) binary trees over n tokens; O(n).

    Source: Remy's algorithm (Knuth, The Art of Computer Programming 4A, section 7.2.1.6, algorithm R): a tree over
    k + 1 leaves comes from a tree over k leaves by putting a new leaf beside one of its 2k - 1 nodes, left or right.
    """
    # A slot is None for a leaf, else the slots of its two children. A node that gets a new sibling moves to a new slot
    # and leaves its old slot to the new parent, so other parents stay as they are.
    children: list[tuple[int, int] | None] = [None]
    for _ in range(num_tokens - 1):
        slot = generator.randrange(len(children))
        moved, leaf = len(children), len(children) + 1
        children.extend((children[slot], None))
        children[slot] = (leaf, moved) if generator.random() < 0.5 else (moved, leaf)
    spans: list[Span] = []
    next_token = 0
    agenda: list[tuple[int, int | None]] = [(0, None)]
    while agenda:
        slot, start = agenda.pop()
        pair = children[slot]
        if start is not None:
            spans.append((start, next_token))
        elif pair is None:
            next_token += 1
        else:
            agenda.extend(((slot, next_token), (pair[1], None), (pair[0], None)))
    return spans
