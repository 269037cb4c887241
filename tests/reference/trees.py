"""Slow, obvious enumerators of trees and action sequences; what the library computes is compared with them."""

import itertools
from collections.abc import Sequence

from hf_synlm.trees.transitions import TransitionSystem


def all_binary_trees(start: int, end: int) -> list:
    """List every binary tree over the leaves start, ..., end - 1 as nested pairs."""
    if end - start == 1:
        return [start]
    return [
        (left, right)
        for split in range(start + 1, end)
        for left in all_binary_trees(start, split)
        for right in all_binary_trees(split, end)
    ]


def all_trees(start: int, end: int) -> list:
    """List every tree over the leaves start, ..., end - 1 whose inner nodes have two or more children."""
    if end - start == 1:
        return [start]
    return [
        (first, *rest)
        for split in range(start + 1, end)
        for first in all_trees(start, split)
        for rest in all_forests(split, end)
    ]


def all_forests(start: int, end: int) -> list[tuple]:
    """List every sequence of trees that together cover the leaves start, ..., end - 1."""
    if start == end:
        return [()]
    return [
        (first, *rest)
        for split in range(start + 1, end + 1)
        for first in all_trees(start, split)
        for rest in all_forests(split, end)
    ]


def leaves(tree) -> list[int]:
    """List the leaves of a tree from left to right."""
    return [tree] if isinstance(tree, int) else [leaf for child in tree for leaf in leaves(child)]


def spans_of(tree) -> list[tuple[int, int]]:
    """List the spans of width >= 2 of a tree in post-order."""
    if isinstance(tree, int):
        return []
    below = [span for child in tree for span in spans_of(child)]
    return [*below, (leaves(tree)[0], leaves(tree)[-1] + 1)]


def spans_of_words(tree) -> list[tuple[int, int]]:
    """List the spans of width >= 2 of a tree over words in post-order."""
    count = itertools.count()

    def numbered(tree):
        return next(count) if isinstance(tree, str) else tuple(map(numbered, tree))

    return spans_of(numbered(tree))


def actions_of(tree) -> list[int]:
    """Write a binary tree as GEN (0) and COMP (1) actions in post-order."""
    return [0] if isinstance(tree, int) else [*actions_of(tree[0]), *actions_of(tree[1]), 1]


def tree_of(actions: Sequence[int]):
    """Run GEN (0) and COMP (1) actions; None if one of them is illegal or not exactly one tree is left."""
    stack: list = []
    num_leaves = 0
    for action in actions:
        if action == 0:
            stack.append(num_leaves)
            num_leaves += 1
        elif len(stack) < 2:
            return None
        else:
            right, left = stack.pop(), stack.pop()
            stack.append((left, right))
    return stack[0] if len(stack) == 1 else None


def all_gen_comp_sequences(num_tokens: int, word_ends: Sequence[bool] | None = None) -> list[list[int]]:
    """List every GEN/COMP derivation of n tokens, by trying all 2 ** (2n - 1) sequences.

    With `word_ends` (True at the last token of each word), only those in which every word is a constituent.
    """
    return [
        list(actions)
        for actions in itertools.product((0, 1), repeat=2 * num_tokens - 1)
        if sum(actions) == num_tokens - 1
        and (tree := tree_of(actions)) is not None
        and (word_ends is None or keeps_words_together(spans_of(tree), word_ends))
    ]


def word_spans(word_ends: Sequence[bool]) -> list[tuple[int, int]]:
    """List the token spans of the words, those of one token included."""
    ends = [position + 1 for position, is_end in enumerate(word_ends) if is_end]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def keeps_words_together(spans: Sequence[tuple[int, int]], word_ends: Sequence[bool]) -> bool:
    """Say whether every word of two or more tokens is a constituent of a binary tree."""
    return all(word in spans for word in word_spans(word_ends) if word[1] - word[0] > 1)


def labeled_spans_of(tree) -> list[tuple[int, int, int]]:
    """List (label, i, j) of every inner node of a labeled tree in post-order."""
    if isinstance(tree, int):
        return []
    label, children = tree
    below = [span for child in children for span in labeled_spans_of(child)]
    return [*below, (label, _labeled_leaves(tree)[0], _labeled_leaves(tree)[-1] + 1)]


def _labeled_leaves(tree) -> list[int]:
    return [tree] if isinstance(tree, int) else [leaf for child in tree[1] for leaf in _labeled_leaves(child)]


def stacks_of(actions: Sequence[int], system: str) -> list[list] | None:
    """Run SHIFT, REDUCE, FINISH and NT actions and list the stack after each; None if an action is impossible.

    An element is an int (token), a str (open nonterminal) or (label, children). An in-order NT goes below its left
    corner, the element on top.
    """
    first_nonterminal = 4 if system == "in_order" else 3
    stack: list = []
    stacks: list[list] = []
    previous = 0
    num_tokens = 0
    for action in actions:
        opens = [index for index, element in enumerate(stack) if isinstance(element, str)]
        is_nonterminal, after_nonterminal = action >= first_nonterminal, previous >= first_nonterminal
        if not action >= 1 or previous == first_nonterminal - 1 == 3:
            return None
        if is_nonterminal and system == "in_order":
            if not stack or after_nonterminal:
                return None
            stack = [*stack[:-1], str(action - first_nonterminal), stack[-1]]
        elif is_nonterminal:
            if stack and not opens:
                return None
            stack = [*stack, str(action - first_nonterminal)]
        elif action == 1:
            if not opens and (stack or system == "top_down"):
                return None
            stack = [*stack, num_tokens]
            num_tokens += 1
        elif action == 2:
            if not opens or opens[-1] == len(stack) - 1:
                return None
            stack = [*stack[: opens[-1]], (int(stack[opens[-1]]), tuple(stack[opens[-1] + 1 :]))]
        elif len(stack) != 1 or opens:
            return None
        stacks.append(stack)
        previous = action
    return stacks


def stack_depths(system: TransitionSystem, actions: Sequence[int], word_ends: object = None) -> list[int]:
    """Elements on the stack after each action: words, open nonterminals and closed constituents."""
    return [stack.depth for stack in system.steps(actions, word_ends, forest=True)]
