# SPDX-License-Identifier: Apache-2.0
"""Constituency trees as plain data: half-open spans and bracket strings.

A **span** is a pair of boundaries `(i, j)`, 0 <= i < j <= n: the tokens i, ..., j - 1. A tree over n tokens is the list
of its constituents of width >= 2, including the whole sentence, in post-order (children before parents, left before
right), without leaves. A binary tree has n - 1 of them. In brackets:
`((fruit flies) (like (a banana)))`.

A labeled tree is a list of (label, i, j), or brackets with labels: `(S (NP the cat) (VP sleeps))`. It may have
constituents over a single word and unary chains.

Everything here is pure Python without recursion: trees may be thousands of tokens deep. `hf_synlm.data.brackets` reads
brackets; `evaluation/trees/baseline_trees.py` has further trees that need no model.
"""

import string
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]


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
        raise ValueError(f"num_tokens is {num_tokens}: a tree needs at least one token. Leave empty sentences out")
    for start, end in spans:
        if not 0 <= start < end <= num_tokens:
            raise ValueError(
                f"span ({start}, {end}) does not fit into a sentence of {num_tokens} tokens. Spans are half-open, "
                f"with 0 <= i < j <= {num_tokens}"
            )
        if end - start < min_width:
            raise ValueError(
                f"span ({start}, {end}) is {end - start} token(s) wide, less than {min_width}. Remove it, because "
                "leaves are not among the spans of a tree"
            )
    # Sorted by start, longest first, every span must end inside the innermost span that is still open.
    open_spans: list[Span] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][1] <= start:
            open_spans.pop()
        if open_spans and open_spans[-1][1] < end:
            raise ValueError(f"spans {open_spans[-1]} and ({start}, {end}) cross. Remove one of them")
        if open_spans and open_spans[-1] == (start, end) and not allow_duplicates:
            raise ValueError(f"span ({start}, {end}) is given twice. Collapse unary chains to one span")
        open_spans.append((start, end))


def in_post_order(spans: Sequence[Span], num_tokens: int) -> list[Span]:
    """Check the spans of a tree and sort them.

    Args:
        spans: half-open spans of width >= 2 in any order, the whole sentence included.
        num_tokens: length n of the sentence in tokens.

    Returns:
        The spans in post-order: by end, the shorter first.

    Raises:
        ValueError: the spans cross, repeat, leave the sentence, or the whole sentence is missing.
    """
    validate_spans(spans, num_tokens)
    _check_whole_sentence(spans, num_tokens)
    return sorted(spans, key=lambda span: (span[1], -span[0]))


def _check_whole_sentence(spans: Sequence[Span], num_tokens: int) -> None:
    """Raise ValueError unless one of the spans is the whole sentence, which a single token need not have."""
    if num_tokens > 1 and all(end - start < num_tokens for start, end in spans):
        raise ValueError(
            f"the whole-sentence span (0, {num_tokens}) is missing, so the {len(spans)} spans are a forest. Add it"
        )


def escape_word(word: str) -> str:
    """A word with -LRB- and -RRB- for parentheses, as in the Penn Treebank; undone by `data.brackets.unescape_word`."""
    return word.replace("(", "-LRB-").replace(")", "-RRB-")


def spans_to_brackets(spans: Sequence[Span], words: Sequence[str]) -> str:
    """Write a tree as unlabeled brackets, e.g. `((fruit flies) (like (a banana)))`; a single word has no brackets.

    Parentheses inside words become -LRB- and -RRB-; so a word that contains one of these names is not read back as it
    was.

    Args:
        spans: half-open spans of width >= 2 in any order, the whole sentence included.
        words: the n words, without white space.

    Returns:
        One line of text.

    Raises:
        ValueError: the spans cross, repeat, leave the sentence or lack the whole sentence; a word is empty or contains
            white space.

    Cost: O(n + s log s) for s spans.
    """
    return _write_brackets([("(", start, end) for start, end in in_post_order(spans, len(words))], words)


def _write_brackets(openings: Sequence[tuple[str, int, int]], words: Sequence[str]) -> str:
    """Write brackets around words, given the opening text and the span of each constituent in post-order."""
    check_words(words, string.whitespace.__contains__)
    opening: list[list[str]] = [[] for _ in words]
    num_closing = [0] * len(words)
    for text, start, end in openings:
        opening[start].append(text)
        num_closing[end - 1] += 1
    return " ".join(
        "".join(reversed(before)) + escape_word(word) + ")" * after
        for before, word, after in zip(opening, words, num_closing, strict=True)
    )


def check_words(words: Sequence[str], is_space: Callable[[str], bool] = str.isspace) -> None:
    """Raise ValueError if a word is empty or has white space, by default that of Unicode, at which tokenizers split."""
    for position, word in enumerate(words):
        if not word or any(map(is_space, word)):
            raise ValueError(
                f"word {position} is {word!r}. Words must be non-empty and free of white space. Write _ instead of "
                "white space"
            )


def labeled_spans_to_brackets(labeled_spans: Sequence[tuple[str, int, int]], words: Sequence[str]) -> str:
    """Write a labeled tree as brackets without part-of-speech tags, e.g. `(S (NP the cat) (VP sleeps))`.

    Inverse of `hf_synlm.data.brackets.brackets_to_labeled_spans`. Words are escaped as in `spans_to_brackets`.

    Args:
        labeled_spans: (label, i, j) of every constituent, including the whole sentence, in any order, but unary chains
            from bottom to top; width 1 is allowed. A single word needs no constituent.
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
    _check_whole_sentence(spans, len(words))
    for label, start, end in labeled_spans:
        if not label or any(character in string.whitespace + "()" for character in label):
            raise ValueError(
                f"the label of span ({start}, {end}) is {label!r}. Give labels that are non-empty and free of white "
                "space and parentheses"
            )
    ordered = sorted(labeled_spans, key=lambda span: (span[2], -span[1]))
    return _write_brackets([(f"({label} ", start, end) for label, start, end in ordered], words)


def right_branching(num_tokens: int) -> list[Span]:
    """Return the spans of the right-branching binary tree: (n - 2, n), ..., (1, n), (0, n).

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The n - 1 spans in post-order.
    """
    return [(start, num_tokens) for start in range(num_tokens - 2, -1, -1)]


def check_word_ends(spans: Iterable[Span], word_ends: Sequence[bool]) -> None:
    """Raise ValueError unless spans of tokens begin and end where words do, and the last token ends a word."""
    if not len(word_ends) or not word_ends[-1]:
        raise ValueError("word_ends must be True at the last token, because every token belongs to a word")
    for span in spans:
        for boundary in span:
            if boundary > 0 and not word_ends[boundary - 1]:
                raise ValueError(
                    f"token span {span} cuts a word at boundary {boundary}. "
                    "Parse with word_ends, which keeps the pieces of a word together"
                )


def fold_tokens(spans: Sequence[Span], word_ends: Sequence[bool], *, keep_words: bool = False) -> list[Span]:
    """Map token spans to word spans: spans inside one word vanish, token boundaries become word boundaries.

    Args:
        spans: half-open token spans.
        word_ends: per token, True if it is the last piece of its word; the last token must be.
        keep_words: keep spans over one whole word, as trees with labels have them; others inside a word are an error.

    Returns:
        Half-open word spans of width >= 2, or with `keep_words` 1, in the order given.

    Raises:
        ValueError: a span begins or ends inside a word without lying in that word as a whole, or the last token does
            not end a word.

    Cost: O(n + s) for s spans.
    """
    words = list(accumulate(map(bool, word_ends), initial=0))  # that end before each boundary
    kept = [(start, end) for start, end in spans if keep_words or words[start] != words[end - 1]]
    check_word_ends(kept, word_ends)
    return [(words[start], words[end]) for start, end in kept]
