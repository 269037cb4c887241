"""Reading brackets: the words and brackets of a text, and trees without labels."""

import re
from collections.abc import Callable, Iterable, Iterator

from hf_synlm.trees import Tree

_BRACKET_OR_WORD = re.compile(r"[()]|[^\s()]+")


def unescape_word(word: str) -> str:
    """Turn -LRB- and -RRB- back into parentheses; inverse of `hf_synlm.trees.escape_word`.

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

    All readers of trees use this: `brackets_to_tree`, `hf_synlm.data.treebank`, `hf_synlm.evaluation.evalb_input`.

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

    Inverse of `hf_synlm.trees.tree_to_brackets`.

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
