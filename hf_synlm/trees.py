"""Constituency trees as plain data: half-open spans, nested tuples, bracket strings.

A **span** is a pair of boundaries `(i, j)`, 0 <= i < j <= n: the tokens i, ..., j - 1. A tree over n tokens has three
forms, with functions from each form to the others:

* spans: its constituents of width >= 2, including the whole sentence, in post-order (children before parents, left
  before right), without leaves. A binary tree has n - 1 of them, a one-token tree has none.
* nested tuples: a leaf is the int of its position, an inner node is the tuple of its two or more children.
* brackets: `((fruit flies) (like (a banana)))`.

A labeled tree is a list of (label, i, j), or brackets with labels: `(S (NP the cat) (VP sleeps))`. It may have
constituents over a single word and unary chains.

Everything here is pure Python without recursion: trees may be thousands of tokens deep. `hf_synlm.data.brackets` and
`hf_synlm.data.treebank` read brackets; `hf_synlm.evaluation.baseline_trees` has further trees that need no model.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Literal, TypeAlias

Span: TypeAlias = tuple[int, int]
Tree: TypeAlias = "int | tuple[Tree, ...]"


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
    if num_tokens > 1:
        _check_whole_sentence(spans, num_tokens)
    # Post-order is the order by end, then by descending start.
    return _build_tree(sorted(spans, key=lambda span: (span[1], -span[0])), tuple)


def _check_whole_sentence(spans: Sequence[Span], num_tokens: int) -> None:
    """Raise ValueError unless one of the spans is the whole sentence."""
    if all(end - start < num_tokens for start, end in spans):
        raise ValueError(
            f"the whole-sentence span (0, {num_tokens}) is missing, so the {len(spans)} spans are a forest: add it"
        )


def _build_tree(spans: Sequence[Span], join: Callable[[list[Tree]], Tree]) -> Tree:
    """Build a tree from spans in post-order; `join` makes a node of its children. Without spans it is one leaf."""
    if not spans:
        return 0
    stack: list[tuple[int, Tree]] = []
    next_token = 0
    for start, end in spans:
        while next_token < end:
            stack.append((next_token, next_token))
            next_token += 1
        first = len(stack)
        while first > 0 and stack[first - 1][0] >= start:
            first -= 1
        stack[first:] = [(start, join([node for _, node in stack[first:]]))]
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


def escape_word(word: str) -> str:
    """Write parentheses inside a word as -LRB- and -RRB-, as the Penn Treebank does.

    Inverse of `hf_synlm.data.brackets.unescape_word`.

    Args:
        word: any word.

    Returns:
        The word without parentheses.
    """
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def tree_to_brackets(tree: Tree, words: Sequence[str]) -> str:
    """Write a tree as unlabeled brackets, e.g. `((fruit flies) (like (a banana)))`; a single word has no brackets.

    Inverse of `hf_synlm.data.brackets.brackets_to_tree`. Parentheses inside words become -LRB- and -RRB-; so a word
    that contains one of these names is not read back as it was.

    Args:
        tree: nested tuples over the positions of `words`.
        words: one string per leaf, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the number of words differs from the number of leaves, a word is empty or contains white space, or
            the leaves are out of order.

    Cost: O(n).
    """
    spans = tree_to_spans(tree)
    num_leaves = spans[-1][1] if spans else 1
    if len(words) != num_leaves:
        raise ValueError(f"{len(words)} words for a tree of {num_leaves} leaves: give exactly one word per leaf")
    return _write_brackets([("(", start, end) for start, end in spans], words)


def _write_brackets(openings: Sequence[tuple[str, int, int]], words: Sequence[str]) -> str:
    """Write brackets around words, given the opening text and the span of each constituent in post-order."""
    check_words(words)
    opening: list[list[str]] = [[] for _ in words]
    num_closing = [0] * len(words)
    for text, start, end in openings:
        opening[start].append(text)
        num_closing[end - 1] += 1
    return " ".join(
        "".join(reversed(before)) + escape_word(word) + ")" * after
        for before, word, after in zip(opening, words, num_closing, strict=True)
    )


def check_words(words: Sequence[str]) -> None:
    """Check that a sentence can be written as its words with single spaces between them.

    Args:
        words: the words of a sentence.

    Raises:
        ValueError: a word is empty or contains white space.
    """
    for position, word in enumerate(words):
        if not word or any(map(str.isspace, word)):
            raise ValueError(f"word {position} is {word!r}: words must be non-empty and free of white space")


def labeled_spans_to_brackets(labeled_spans: Sequence[tuple[str, int, int]], words: Sequence[str]) -> str:
    """Write a labeled tree as brackets without part-of-speech tags, e.g. `(S (NP the cat) (VP sleeps))`.

    Inverse of `hf_synlm.data.treebank.brackets_to_labeled_spans`. Words are escaped as in `tree_to_brackets`.

    Args:
        labeled_spans: (label, i, j) of every constituent, including the whole sentence, in any order, but unary chains
            from bottom to top; width 1 is allowed. A single word may have none.
        words: the n words, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the spans cross, leave the sentence or lack the whole sentence; a word or label is empty or contains
            white space; a label contains a parenthesis.

    Cost: O(n + s log s) for s spans.
    """
    spans = [(start, end) for _, start, end in labeled_spans]
    validate_spans(spans, len(words), min_width=1, allow_duplicates=True)
    if len(words) > 1:
        _check_whole_sentence(spans, len(words))
    for label, start, end in labeled_spans:
        if not label or any(character.isspace() or character in "()" for character in label):
            raise ValueError(
                f"the label of span ({start}, {end}) is {label!r}: "
                "labels must be non-empty and free of white space and parentheses"
            )
    ordered = sorted(labeled_spans, key=lambda span: (span[2], -span[1]))
    return _write_brackets([(f"({label} ", start, end) for label, start, end in ordered], words)


def check_length(num_tokens: int) -> None:
    """Check that a tree over this number of tokens exists.

    Args:
        num_tokens: length of the sentence in tokens.

    Raises:
        ValueError: it is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a tree needs at least one token")


def right_branching(num_tokens: int) -> list[Span]:
    """Return the spans of the right-branching binary tree: (n - 2, n), ..., (1, n), (0, n).

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The n - 1 spans in post-order.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    check_length(num_tokens)
    return [(start, num_tokens) for start in range(num_tokens - 2, -1, -1)]


def binarize(tree: Tree, direction: Literal["right", "left"] = "right") -> Tree:
    """Split nodes with more than two children into binary ones; the spans of the tree stay, and others are added.

    "right" gives (a, (b, (c, d))) for (a, b, c, d), "left" gives (((a, b), c), d).

    Args:
        tree: nested tuples, two or more children per node.
        direction: the side of the added nodes.

    Returns:
        The binary tree over the same leaves.

    Raises:
        ValueError: `direction` is unknown, or the tree is malformed.

    Cost: O(n).
    """
    if direction not in ("right", "left"):
        raise ValueError(f"direction is {direction!r}: choose 'right' or 'left'")

    def join(children: list[Tree]) -> Tree:
        if direction == "left":
            return reduce(lambda left, right: (left, right), children)
        return reduce(lambda right, left: (left, right), reversed(children))

    return _build_tree(tree_to_spans(tree), join)


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
