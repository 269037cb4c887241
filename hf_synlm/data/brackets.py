"""Reading brackets, and trees as nested tuples: a leaf is its position, an inner node the tuple of its children.

Functions lead from each form of a tree (brackets, nested tuples, spans) to the others, without recursion.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from hf_synlm.trees.spans import Span, in_post_order, spans_to_brackets

Tree: TypeAlias = "int | tuple[Tree, ...]"

_BRACKET_OR_WORD = re.compile(r"[()]|[^\s()]+")


def unescape_word(word: str) -> str:
    """Turn -LRB- and -RRB- back into parentheses; inverse of `hf_synlm.trees.spans.escape_word`.

    Args:
        word: as it stands in a file of trees.

    Returns:
        The word.
    """
    return word.replace("-LRB-", "(").replace("-RRB-", ")")


def _at_character(symbol: str, place: tuple[int, int]) -> str:
    """Name a symbol of a text of one line."""
    return f"{symbol!r} at character {place[1]}"


def read_brackets(
    lines: Iterable[str], describe: Callable[[str, tuple[int, int]], str] = _at_character
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Split bracketed trees into brackets and words, and check that the brackets match.

    All readers of trees use this: `brackets_to_tree`, `hf_synlm.data.treebank`, and `evalb_input` of the evaluation.

    Args:
        lines: lines of text.
        describe: names a symbol and its place in error messages; default: its character, for a text of one line.

    Yields:
        "(", ")" or a word; its line (from 1) and its character in the line (from 0); whether it directly follows a "(",
        as a label does.

    Raises:
        ValueError: a bracket has no partner.
    """
    open_places: list[tuple[int, int]] = []
    is_first = False
    for number, line in enumerate(lines, start=1):
        for match in _BRACKET_OR_WORD.finditer(line):
            symbol, place = match.group(), (number, match.start())
            if symbol == "(":
                open_places.append(place)
            elif symbol == ")":
                if not open_places:
                    raise ValueError(f"{describe(symbol, place)} closes nothing: remove it or add its '('")
                open_places.pop()
            yield symbol, place, is_first
            is_first = symbol == "("
    if open_places:
        raise ValueError(f"{describe('(', open_places[-1])} is never closed: add its ')'")


def brackets_to_tree(text: str) -> tuple[Tree, list[str]]:
    """Read unlabeled brackets such as `((fruit flies) (like (a banana)))`.

    Inverse of `tree_to_brackets`.

    Args:
        text: one tree; white space between words and brackets is free.

    Returns:
        The tree as nested tuples, and its words with -LRB- and -RRB- turned back into parentheses.

    Raises:
        ValueError: the text is empty, brackets do not match, a bracket has fewer than two children, or text follows
            after the tree; the message names the character position.

    Cost: O(length of the text).
    """
    words: list[str] = []
    tree: Tree | None = None
    open_nodes: list[tuple[int, list[Tree]]] = []
    for symbol, place, _ in read_brackets([text]):
        if tree is not None:
            raise ValueError(f"{_at_character(symbol, place)} stands after the end of the tree: give one tree")
        if symbol == "(":
            open_nodes.append((place[1], []))
            continue
        node: Tree
        if symbol == ")":
            opened_at, children = open_nodes.pop()
            if len(children) < 2:
                raise ValueError(
                    f"the bracket opened at character {opened_at} has {len(children)} child(ren): "
                    "a constituent needs at least two, a single word stands without brackets"
                )
            node = tuple(children)
        else:
            node = len(words)
            words.append(unescape_word(symbol))
        if open_nodes:
            open_nodes[-1][1].append(node)
        else:
            tree = node
    if tree is None:
        raise ValueError(f"no tree in {text!r}: leave empty lines out")
    return tree, words


def spans_to_tree(spans: Sequence[Span], num_tokens: int) -> Tree:
    """Build the nested tuples of a list of spans; tokens and spans without a closer parent attach to the node above.

    Inverse of `tree_to_spans`. Example: `[(0, 2), (0, 5)]` over 5 tokens gives `((0, 1), 2, 3, 4)`.

    Args:
        spans: half-open spans of width >= 2 in any order, the whole sentence included.
        num_tokens: length n of the sentence in tokens.

    Returns:
        The tree: an int for one token, else nested tuples.

    Raises:
        ValueError: the spans cross, repeat, leave the sentence, or `(0, num_tokens)` is missing.

    Cost: O(n + s log s) for s spans.
    """
    stack: list[tuple[int, Tree]] = []
    next_token = 0
    # A sentence of one token has no spans: its tree is the token.
    for start, end in in_post_order(spans, num_tokens) or [(0, 1)]:
        stack.extend((token, token) for token in range(next_token, end))
        next_token = max(next_token, end)
        first = len(stack)
        while first > 0 and stack[first - 1][0] >= start:
            first -= 1
        children = [node for _, node in stack[first:]]
        stack[first:] = [(start, tuple(children) if len(children) > 1 else children[0])]
    return stack[0][1]


def tree_to_spans(tree: Tree) -> list[Span]:
    """List the spans of a tree in post-order, leaves left out.

    Inverse of `spans_to_tree`.

    Args:
        tree: nested tuples whose leaves read 0, 1, ..., n - 1 from left to right.

    Returns:
        Half-open spans of width >= 2; empty for a single leaf.

    Raises:
        ValueError: the leaves are not 0, 1, ..., n - 1 in order, a node has fewer than two children, or something else
            than an int or a tuple stands in the tree.

    Cost: O(n).
    """
    spans: list[Span] = []
    next_token = 0
    # An entry is a subtree still to visit, or the start of a node whose children are all done.
    agenda: list[tuple[Tree, int | None]] = [(tree, None)]
    while agenda:
        node, start = agenda.pop()
        if start is not None:
            spans.append((start, next_token))
        elif isinstance(node, tuple):
            if len(node) < 2:
                raise ValueError(
                    f"a node above token {next_token} has {len(node)} child(ren): inner nodes need at least two, "
                    "replace a node with a single child by that child"
                )
            agenda.append((node, next_token))
            agenda.extend((child, None) for child in reversed(node))
        elif isinstance(node, int) and not isinstance(node, bool):
            if node != next_token:
                raise ValueError(f"leaf {node} stands where {next_token} should: leaves must read 0, 1, ..., n - 1")
            next_token += 1
        else:
            raise ValueError(f"{node!r} is not part of a tree: leaves are ints and inner nodes are tuples")
    return spans


def tree_to_brackets(tree: Tree, words: Sequence[str]) -> str:
    """Write a tree as unlabeled brackets, e.g. `((fruit flies) (like (a banana)))`; a single word has no brackets.

    Inverse of `brackets_to_tree`. Parentheses inside words become -LRB- and -RRB-; so a word
    that contains one of these names is not read back as it was.

    Args:
        tree: nested tuples over the positions of `words`.
        words: one string per leaf, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the number of words differs from the number of leaves, a word is empty or contains white space, or
            the leaves are out of order.

    Cost: O(n log n).
    """
    spans = tree_to_spans(tree)
    num_leaves = spans[-1][1] if spans else 1
    if len(words) != num_leaves:
        raise ValueError(f"{len(words)} words for a tree of {num_leaves} leaves: give exactly one word per leaf")
    return spans_to_brackets(spans, words)
