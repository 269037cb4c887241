"""Transition systems that build trees: which action is legal, actions <-> spans.

GEN/COMP, the system of GPST (Hu et al. 2024, section 3), builds binary trees bottom-up on a stack:

* GEN (id 0) generates the next token and pushes it,
* COMP (id 1) replaces the top two stack items by their composition; it needs at least two items.

n tokens take n GEN and n - 1 COMP actions, 2n - 1 in all, and end with one item on the stack. The order of the actions
is the post-order of the tree. Action sequences are padded on the right with PAD_ACTION (-1).

Shapes: `[...]` is any batch shape, A the length of an action sequence.
"""

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor

from .trees import Span, validate_spans

GEN = 0
COMP = 1
PAD_ACTION = -1


def spans_to_actions(spans: Sequence[Span], num_tokens: int) -> list[int]:
    """Write a binary tree as the GEN/COMP actions that build it.

    After GEN of token t come as many COMP as there are spans that end at boundary t + 1. Inverse of `actions_to_spans`.

    Args:
        spans: the n - 1 half-open spans of a binary tree over n tokens, in any order.
        num_tokens: length n of the sentence in tokens.

    Returns:
        2n - 1 action ids.

    Raises:
        ValueError: the spans cross, leave the sentence or are not those of a binary tree.

    Cost: O(n log n).
    """
    validate_spans(spans, num_tokens)
    if len(spans) != num_tokens - 1:
        raise ValueError(
            f"{len(spans)} spans over {num_tokens} tokens are no binary tree, which has {num_tokens - 1}: "
            "complete the tree with spans_to_tree, binarize and tree_to_spans"
        )
    num_ending = [0] * (num_tokens + 1)
    for _, end in spans:
        num_ending[end] += 1
    actions: list[int] = []
    for end in range(1, num_tokens + 1):
        actions.append(GEN)
        actions.extend([COMP] * num_ending[end])
    return actions


def actions_to_spans(actions: Sequence[int], *, forest: bool = False) -> list[Span]:
    """Run GEN/COMP actions on a stack and list the spans that are composed.

    Inverse of `spans_to_actions`.

    Args:
        actions: action ids; padding (-1) may follow at the end.
        forest: accept a sequence that stops before a single tree is on the stack (a prefix of a derivation).

    Returns:
        Half-open spans of width >= 2, in the order of their COMP actions, which is post-order.

    Raises:
        ValueError: an id is unknown, COMP meets fewer than two items, an action follows after padding, or several
            items (or none) are left on the stack and `forest` is False; it names the position.

    Cost: O(A).
    """
    starts: list[int] = []
    spans: list[Span] = []
    num_generated = 0
    num_actions = len(actions)
    while num_actions > 0 and actions[num_actions - 1] == PAD_ACTION:
        num_actions -= 1
    for position in range(num_actions):
        action = actions[position]
        if action == GEN:
            starts.append(num_generated)
            num_generated += 1
        elif action == COMP:
            if len(starts) < 2:
                raise ValueError(
                    f"COMP at position {position} finds {len(starts)} item(s) on the stack and needs two: "
                    "generate another token (GEN) first"
                )
            starts.pop()
            spans.append((starts[-1], num_generated))
        else:
            raise ValueError(
                f"action {action} at position {position} is unknown: use GEN = {GEN}, COMP = {COMP}, "
                f"and {PAD_ACTION} as padding at the end only"
            )
    if len(starts) != 1 and not forest:
        raise ValueError(
            f"the {num_actions} actions leave {len(starts)} items on the stack, not one: "
            "add the missing COMP actions, or pass forest=True for an unfinished derivation"
        )
    return spans


def gen_comp_is_legal(action: int, stack_depth: int, num_remaining: int) -> bool:
    """Say whether an action may be taken in a state of the GEN/COMP system.

    GEN needs a token that is still to come, COMP needs two items on the stack.

    Args:
        action: GEN or COMP.
        stack_depth: number of items on the stack.
        num_remaining: number of tokens not generated yet.

    Returns:
        True if the action is legal.

    Raises:
        ValueError: the action is neither GEN nor COMP.
    """
    if action == GEN:
        return num_remaining > 0
    if action == COMP:
        return stack_depth >= 2
    raise ValueError(f"action {action} is unknown: use GEN = {GEN} or COMP = {COMP}")


def gen_comp_legal_mask(stack_depth: Tensor, num_remaining: Tensor) -> Tensor:
    """Say for a batch of states which of GEN and COMP is legal.

    Args:
        stack_depth: number of items on each stack, integers [...].
        num_remaining: number of tokens not generated yet, integers of the same (or a broadcastable) shape.

    Returns:
        Booleans [..., 2], True = legal, the last dimension indexed by the action id. A finished derivation (one item,
        no token left) has no legal action.
    """
    gen, comp = torch.broadcast_tensors(num_remaining > 0, stack_depth >= 2)
    return torch.stack((gen, comp), dim=-1)


def count_gen_comp_derivations(num_tokens: int) -> int:
    """Count the GEN/COMP derivations of n tokens, which is the number of binary trees: Catalan(n - 1).

    Catalan(n - 1) = binomial(2n - 2, n - 1) / n.

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The number of derivations.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a derivation needs at least one token")
    return comb(2 * num_tokens - 2, num_tokens - 1) // num_tokens
