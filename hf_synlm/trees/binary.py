# SPDX-License-Identifier: Apache-2.0
"""Binary trees made of other trees, and of the actions that build them (`trees/actions.py`)."""

from collections.abc import Sequence
from typing import Literal

from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION
from hf_synlm.trees.spans import Span, in_post_order


def binarize_spans(spans: Sequence[Span], num_tokens: int, direction: Literal["right", "left"] = "right") -> list[Span]:
    """Add the spans that make a tree binary.

    "right" makes (a (b (c d))) of (a b c d), "left" makes (((a b) c) d).

    Args:
        spans: half-open spans of width >= 2 in any order, the whole sentence included.
        num_tokens: length n of the sentence in tokens.
        direction: the side of the added nodes.

    Returns:
        The n - 1 spans of the binary tree in post-order.

    Raises:
        ValueError: the spans cross, repeat, leave the sentence, or the whole sentence is
            missing.

    Cost: O(n log n).
    """
    binary: list[Span] = []
    starts: list[int] = []  # of the parts that have no parent yet
    next_token = 0
    for start, end in in_post_order(spans, num_tokens):
        starts.extend(range(next_token, end))
        next_token = max(next_token, end)
        children = []
        while starts and starts[-1] >= start:
            children.append(starts.pop())
        if direction == "right":
            binary += [(child, end) for child in children[1:]]
        else:
            binary += [(start, child) for child in children[-3::-1]] + [(start, end)]
        starts.append(start)
    return sorted(binary, key=lambda span: (span[1], -span[0]))


def actions_to_spans(actions: Sequence[int], *, forest: bool = False) -> list[Span]:
    """Run GEN/COMP actions on a stack and list the spans that are composed.

    Inverse of `spans_to_actions`.

    Args:
        actions: action ids; padding (-1) may follow at the end.
        forest: accept a sequence that stops before a single tree is on the stack (a prefix of a derivation).

    Returns:
        Half-open spans of width >= 2, in the order of their COMP actions, which is post-order.

    Raises:
        ValueError: an id is unknown, COMP meets fewer than two items, an action follows after padding, or the
            actions do not leave exactly one item on the stack and `forest` is False; it names the position.

    Cost: O(A).
    """
    starts: list[int] = []
    spans: list[Span] = []
    num_generated = 0
    num_actions = len(actions)
    while num_actions > 0 and actions[num_actions - 1] == PAD_ACTION:
        num_actions -= 1
    for position, action in enumerate(actions[:num_actions]):
        if action == GEN:
            starts.append(num_generated)
            num_generated += 1
        elif action == COMP and len(starts) > 1:
            starts.pop()
            spans.append((starts[-1], num_generated))
        else:
            raise ValueError(
                f"action {action} is not possible at position {position}, with {len(starts)} item(s) on the stack. "
                f"GEN is {GEN}. COMP is {COMP} and needs two items. {PAD_ACTION} pads only at the end"
            )
    if len(starts) != 1 and not forest:
        raise ValueError(
            f"the {num_actions} actions leave {len(starts)} items on the stack, not one. "
            "Add the missing COMP actions, or pass forest=True for an unfinished derivation"
        )
    return spans
