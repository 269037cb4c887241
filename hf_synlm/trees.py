"""Constituency trees as plain data: half-open spans, nested tuples, bracket strings.

A **span** is a pair of boundaries `(i, j)`, 0 <= i < j <= n: the tokens i, ..., j - 1. A tree over n tokens is given in
one of three ways, with a function for every way there and back:

* spans: the list of its constituents of width >= 2, the whole sentence included, in post-order (children before
  parents, left before right), leaves left out. A binary tree has n - 1 of them, a one-token tree has none.
* nested tuples: a leaf is the int of its position, an inner node is the tuple of its two or more children.
* brackets: `((fruit flies) (like (a banana)))`.

A labeled tree is a list of (label, i, j), or brackets with labels: `(S (NP the cat) (VP sleeps))`. It may have
constituents over a single word and unary chains.

Everything here is pure Python and iterative: a right-branching tree over thousands of tokens is no special case.
"""

import random
import re
from collections.abc import Sequence
from typing import Literal, TypeAlias

Span: TypeAlias = tuple[int, int]
Tree: TypeAlias = "int | tuple[Tree, ...]"

_ESCAPES = (("(", "-LRB-"), (")", "-RRB-"))
_BRACKET_OR_WORD = re.compile(r"[()]|[^\s()]+")


def validate_spans(
    spans: Sequence[Span], num_tokens: int, *, min_width: int = 2, allow_duplicates: bool = False
) -> None:
    """Check that spans lie inside the sentence and nest in each other.

    Args:
        spans: half-open spans in any order.
        num_tokens: length n of the sentence in tokens.
        min_width: smallest width j - i that is allowed; 1 admits single tokens.
        allow_duplicates: admit the same span twice (a unary chain).

    Raises:
        ValueError: a span is out of range, too narrow or given twice, or two spans cross; it names them.

    Cost: O(s log s) for s spans.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a tree needs at least one token; leave empty sentences out")
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) does not fit into a sentence of {num_tokens} tokens: "
                f"spans are half-open, 0 <= i < j <= {num_tokens}"
            )
        if end - start < min_width:
            raise ValueError(
                f"span ({start}, {end}) is {end - start} token(s) wide, less than {min_width}: "
                "leaves are not listed among the spans of a tree, remove it"
            )
    # Sorted by start, longest first, every span must end inside the innermost span that is still open.
    open_spans: list[Span] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        if open_spans and open_spans[-1][1] < end:
            raise ValueError(f"spans {open_spans[-1]} and ({start}, {end}) cross: remove one of them")
        if open_spans and open_spans[-1] == (start, end) and not allow_duplicates:
            raise ValueError(f"span ({start}, {end}) is given twice: collapse unary chains to one span")
        open_spans.append((start, end))


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
    validate_spans(spans, num_tokens)
    if num_tokens == 1:
        return 0
    if all(end - start < num_tokens for start, end in spans):
        raise ValueError(
            f"the whole-sentence span (0, {num_tokens}) is missing, so the {len(spans)} spans are a forest: add it"
        )
    stack: list[tuple[int, Tree]] = []
    next_token = 0
    # Post-order is the order by end, then by descending start.
    for start, end in sorted(spans, key=lambda span: (span[1], -span[0])):
        while next_token < end:
            stack.append((next_token, next_token))
            next_token += 1
        first = len(stack)
        while first > 0 and stack[first - 1][0] >= start:
            first -= 1
        children = tuple(node for _, node in stack[first:])
        stack[first:] = [(start, children)]
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
            raise ValueError(f"{node!r} is no part of a tree: leaves are ints and inner nodes are tuples")
    return spans


def escape_word(word: str) -> str:
    """Write parentheses inside a word as -LRB- and -RRB-, as the Penn Treebank does; inverse of `unescape_word`.

    Args:
        word: any word.

    Returns:
        The word without parentheses.
    """
    for symbol, escape in _ESCAPES:
        word = word.replace(symbol, escape)
    return word


def unescape_word(word: str) -> str:
    """Turn -LRB- and -RRB- back into parentheses; inverse of `escape_word`.

    Args:
        word: as it stands in a file of trees.

    Returns:
        The word.
    """
    for symbol, escape in _ESCAPES:
        word = word.replace(escape, symbol)
    return word


def tree_to_brackets(tree: Tree, words: Sequence[str]) -> str:
    """Write a tree as unlabeled brackets, e.g. `((fruit flies) (like (a banana)))`; a single word stands bare.

    Inverse of `brackets_to_tree`. Parentheses inside words are written -LRB- and -RRB-; therefore a word that contains
    these five letters literally comes back as a parenthesis.

    Args:
        tree: nested tuples over the positions of `words`.
        words: one string per leaf, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the number of words is not the number of leaves, a word is empty or holds white space, or the
            leaves of the tree are out of order.

    Cost: O(n).
    """
    _check_words(tree, words)
    pieces: list[str] = []
    agenda: list[Tree | str] = [tree]
    while agenda:
        node = agenda.pop()
        if isinstance(node, str):
            pieces.append(node)
        elif isinstance(node, int):
            pieces.append(escape_word(words[node]))
        else:
            pieces.append("(")
            agenda.append(")")
            for child in reversed(node[1:]):
                agenda.extend((child, " "))
            agenda.append(node[0])
    return "".join(pieces)


def _check_words(tree: Tree, words: Sequence[str]) -> None:
    """Raise ValueError unless there is one printable word for every leaf of the tree."""
    spans = tree_to_spans(tree)
    num_leaves = spans[-1][1] if spans else 1
    if len(words) != num_leaves:
        raise ValueError(f"{len(words)} words for a tree of {num_leaves} leaves: give exactly one word per leaf")
    _check_printable(words)


def _check_printable(words: Sequence[str]) -> None:
    """Raise ValueError for a word that cannot stand among others with spaces between them."""
    for position, word in enumerate(words):
        if not word or any(character.isspace() for character in word):
            raise ValueError(f"word {position} is {word!r}: words must be non-empty and free of white space")


def brackets_to_tree(text: str) -> tuple[Tree, list[str]]:
    """Read unlabeled brackets such as `((fruit flies) (like (a banana)))`.

    Inverse of `tree_to_brackets`. Labeled trees of a treebank are read by `hf_synlm.data.treebank`.

    Args:
        text: one tree; white space between words and brackets is free.

    Returns:
        The tree as nested tuples, and its words with -LRB- and -RRB- turned back into parentheses.

    Raises:
        ValueError: the text is empty, brackets do not match, a bracket holds fewer than two children, or text follows
            after the tree; it names the character position.

    Cost: O(length of the text).
    """
    words: list[str] = []
    open_nodes: list[tuple[int, list[Tree]]] = []
    tree: Tree | None = None
    for match in _BRACKET_OR_WORD.finditer(text):
        symbol, position = match.group(), match.start()
        if tree is not None:
            raise ValueError(f"{symbol!r} at character {position} stands after the end of the tree: give one tree")
        if symbol == "(":
            open_nodes.append((position, []))
            continue
        node: Tree
        if symbol == ")":
            if not open_nodes:
                raise ValueError(f"')' at character {position} closes nothing: remove it or add its '('")
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
    if open_nodes:
        raise ValueError(f"'(' at character {open_nodes[-1][0]} is never closed: add its ')'")
    if tree is None:
        raise ValueError(f"no tree in {text!r}: leave empty lines out")
    return tree, words


def labeled_spans_to_brackets(labeled_spans: Sequence[tuple[str, int, int]], words: Sequence[str]) -> str:
    """Write a labeled tree as brackets without part-of-speech tags, e.g. `(S (NP the cat) (VP sleeps))`.

    Inverse of `brackets_to_labeled_spans`. Parentheses inside words are written -LRB- and -RRB-; therefore a word that
    contains these five letters literally comes back as a parenthesis.

    Args:
        labeled_spans: (label, i, j) of every constituent, the whole sentence included, in any order but for unary
            chains, which stand from the bottom to the top; width 1 is allowed. A single word may have none.
        words: the n words, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the spans cross, leave the sentence or lack the whole sentence; a word or label is empty or holds
            white space; a label holds a parenthesis.

    Cost: O(n + s log s) for s spans.
    """
    spans = [(start, end) for _, start, end in labeled_spans]
    validate_spans(spans, len(words), min_width=1, allow_duplicates=True)
    if (0, len(words)) not in spans and len(words) > 1:
        raise ValueError(
            f"the whole-sentence span (0, {len(words)}) is missing, so the {len(spans)} spans are a forest: add it"
        )
    _check_printable(words)
    opening: list[list[str]] = [[] for _ in words]
    num_closing = [0] * (len(words) + 1)
    for label, start, end in sorted(labeled_spans, key=lambda span: (span[2], -span[1])):
        if not label or any(character.isspace() or character in "()" for character in label):
            raise ValueError(
                f"the label of span ({start}, {end}) is {label!r}: "
                "labels must be non-empty and free of white space and parentheses"
            )
        opening[start].append(label)
        num_closing[end] += 1
    return " ".join(
        "".join(f"({label} " for label in reversed(opening[position]))
        + escape_word(word)
        + ")" * num_closing[position + 1]
        for position, word in enumerate(words)
    )


def brackets_to_labeled_spans(text: str) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Read labeled brackets without part-of-speech tags, e.g. `(S (NP the cat) (VP sleeps))`.

    Inverse of `labeled_spans_to_brackets`. Trees of a treebank, whose words have tags, are read by
    `hf_synlm.data.treebank`; here a tag would be a constituent over one word.

    Args:
        text: one tree; white space between words and brackets is free.

    Returns:
        (label, i, j) of every constituent in post-order, unary chains from the bottom to the top, and the words with
        -LRB- and -RRB- turned back into parentheses.

    Raises:
        ValueError: the text is empty, brackets do not match, a bracket has no label or holds nothing, or text follows
            after the tree; it names the character position.

    Cost: O(length of the text).
    """
    labeled_spans: list[tuple[str, int, int]] = []
    words: list[str] = []
    # Per open bracket: where it stands in the text, its label (None as long as it is to come), its first word.
    open_nodes: list[tuple[int, str | None, int]] = []
    for match in _BRACKET_OR_WORD.finditer(text):
        symbol, position = match.group(), match.start()
        if words and not open_nodes:
            raise ValueError(f"{symbol!r} at character {position} stands after the end of the tree: give one tree")
        label_expected = bool(open_nodes) and open_nodes[-1][1] is None
        if label_expected and symbol in "()":
            raise ValueError(f"the bracket opened at character {open_nodes[-1][0]} has no label: add one")
        if label_expected:
            open_nodes[-1] = (open_nodes[-1][0], symbol, len(words))
        elif symbol == "(":
            open_nodes.append((position, None, len(words)))
        elif symbol == ")":
            if not open_nodes:
                raise ValueError(f"')' at character {position} closes nothing: remove it or add its '('")
            opened_at, label, start = open_nodes.pop()
            if start == len(words):
                raise ValueError(f"the bracket opened at character {opened_at} holds no word: remove it")
            labeled_spans.append((str(label), start, len(words)))
        else:
            words.append(unescape_word(symbol))
    if open_nodes:
        raise ValueError(f"'(' at character {open_nodes[-1][0]} is never closed: add its ')'")
    if not words:
        raise ValueError(f"no tree in {text!r}: leave empty lines out")
    return labeled_spans, words


def _check_length(num_tokens: int) -> None:
    """Raise ValueError unless a tree over this number of tokens exists."""
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a tree needs at least one token")


def left_branching(num_tokens: int) -> list[Span]:
    """Return the spans of the left-branching binary tree: (0, 2), (0, 3), ..., (0, n).

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The n - 1 spans in post-order.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    _check_length(num_tokens)
    return [(0, end) for end in range(2, num_tokens + 1)]


def right_branching(num_tokens: int) -> list[Span]:
    """Return the spans of the right-branching binary tree: (n - 2, n), ..., (1, n), (0, n).

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The n - 1 spans in post-order.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    _check_length(num_tokens)
    return [(start, num_tokens) for start in range(num_tokens - 2, -1, -1)]


def balanced(num_tokens: int) -> list[Span]:
    """Return the spans of the balanced binary tree: every span is split in the middle, the right half is the longer.

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The n - 1 spans in post-order.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    _check_length(num_tokens)
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
    """Draw a binary tree uniformly from all Catalan(n - 1) binary trees over n tokens.

    Source: Remy's algorithm (Knuth, The Art of Computer Programming 4A, section 7.2.1.6, algorithm R): a tree over
    k + 1 leaves comes from a tree over k leaves by putting a new leaf beside one of its 2k - 1 nodes, left or right.

    Args:
        num_tokens: length n of the sentence in tokens.
        generator: source of randomness, e.g. `random.Random(seed)`.

    Returns:
        The n - 1 spans in post-order.

    Raises:
        ValueError: `num_tokens` is less than 1.

    Cost: O(n).
    """
    _check_length(num_tokens)
    # Slot s holds a node: None for a leaf, else the slots of its two children. A node that gets a new sibling moves to
    # a fresh slot and leaves its old one to the new parent, so that no parent has to be updated.
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


def binarize(tree: Tree, direction: Literal["right", "left"] = "right") -> Tree:
    """Split nodes with more than two children into binary ones.

    "right" gives (a, (b, (c, d))) for (a, b, c, d), "left" gives (((a, b), c), d). The spans of the tree are kept, so
    removing the spans that were added restores it.

    Args:
        tree: nested tuples, two or more children per node.
        direction: the side on which the added nodes stand.

    Returns:
        The binary tree over the same leaves.

    Raises:
        ValueError: `direction` is unknown, or the tree is malformed.

    Cost: O(n).
    """
    if direction not in ("right", "left"):
        raise ValueError(f"direction is {direction!r}: choose 'right' or 'left'")
    tree_to_spans(tree)  # rejects malformed trees
    done: list[Tree] = []
    # Children come off the agenda before their parent: a number stands for "combine the last so many results".
    agenda: list[tuple[Tree, bool]] = [(tree, False)]
    while agenda:
        node, children_done = agenda.pop()
        if not isinstance(node, tuple):
            done.append(node)
        elif not children_done:
            agenda.append((node, True))
            agenda.extend((child, False) for child in reversed(node))
        else:
            parts = done[-len(node) :]
            del done[-len(node) :]
            while len(parts) > 1:
                where = slice(-2, None) if direction == "right" else slice(0, 2)
                parts[where] = [tuple(parts[where])]
            done.append(parts[0])
    return done[0]


def fold_tokens(spans: Sequence[Span], word_ends: Sequence[bool]) -> list[Span]:
    """Map token spans to word spans: spans inside one word vanish, token boundaries become word boundaries.

    Args:
        spans: half-open token spans.
        word_ends: per token, True if it is the last piece of its word; the last token must be.

    Returns:
        Half-open word spans of width >= 2, in the order given.

    Raises:
        ValueError: a span begins or ends inside a word without lying in that word as a whole, a span is out of range,
            or the last token does not end a word.

    Cost: O(n + s) for s spans.
    """
    num_tokens = len(word_ends)
    if num_tokens == 0 or not word_ends[-1]:
        raise ValueError("word_ends must be True at the last token: every token belongs to a word")
    words_before = [0]
    for is_end in word_ends:
        words_before.append(words_before[-1] + bool(is_end))
    folded: list[Span] = []
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(f"span ({start}, {end}) does not fit into {num_tokens} tokens")
        first_word, last_word = words_before[start], words_before[end - 1]
        if first_word == last_word:
            continue
        for boundary in (start, end):
            if boundary > 0 and not word_ends[boundary - 1]:
                raise ValueError(
                    f"token span ({start}, {end}) cuts a word at boundary {boundary}: "
                    "parse with word_ends, which keeps the pieces of a word together"
                )
        folded.append((first_word, last_word + 1))
    return folded
