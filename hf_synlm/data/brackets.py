# SPDX-License-Identifier: Apache-2.0
r"""Reading brackets: as the nodes of a treebank, or those without tags as spans.

Of a treebank, `read_nodes` knows several styles:

* Lines between trees that are SGML (`<S ID=1>`) or a header of `*x*` are skipped.
* Parentheses that are characters become -LRB- and -RRB- where only that reading is a tree: `(-LRB- ()`, `(-RRB- \))`,
  `(VB like(d))`, the German tag of `($( ")`. Elsewhere they are an error.
* A word may stand in a bracket of its own, `(PRP (He))`, if all words of its tree do.
* In the Penn-Helsinki style, an unlabeled wrapper holds `(ID ...)`, `(CODE ...)` or such beside the tree. These are no
  words, nor are, as in CorpusSearch, 0 and what begins with *. In other trees, only the tag -NONE- marks what is empty.
* A bracket was not closed where a tree that begins in column 0 holds brackets there, all with its own label, or any if
  all other trees have one line. In other files a warning says so, unless most trees are like that. ROOT, TOP, ... does
  not stand inside of its like either.
"""

import dataclasses
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence

from hf_synlm.trees.spans import Span, escape_word

logger = logging.getLogger(__name__)

# White space is that of ASCII: a no-break space (1 000) or an ideographic one is part of a word.
_BRACKET_OR_WORD = re.compile(r"[()]|[^\s()]+", re.ASCII)

TRACE_TAG = "-NONE-"
ROOT_LABELS = frozenset(("", "ROOT", "TOP", "S1", "VROOT"))
LABEL_SEPARATORS = "-=|"
# In trees in the Penn-Helsinki style, and in Switchboard.
_ABOUT_TEXT = frozenset("CODE COMMENT ID LB META METADATA VERSION".split())

MARKUP = re.compile(r"\s*(?:<.*>|\*x\*.*|#.*)\s*", re.ASCII)
# Parentheses that touch each other or a character on the wrong side: in the lines that are worth the next expression.
_SUSPECT = re.compile(r"\((?:\)|(?<=[^\s()]\())|\)[^\s()]|RRB-?\s+\\?\)\)", re.ASCII)
_LEAF_WITH_PARENTHESIS = re.compile(
    r"""\((?:
      (-?LRB-? | -?RRB-? | \$\() \s+ (\\?[()])                                                # (-RRB- ))
    | ([^\s()]+) \s+ (\\?\() (?=\)(?!\)))                                                      # (PUNCT ()
    | (\$\( | [^\s()]+) \s+ ((?:\([^\s()]+\))* [^\s()] (?: \([^\s()]+\) | [^\s()] )*)         # (PRP (s)he)
    )\)""",
    re.ASCII | re.VERBOSE,
)


def unescape_word(word: str) -> str:
    """Turn -LRB- and -RRB- back into parentheses; inverse of `hf_synlm.trees.spans.escape_word`.

    Args:
        word: as it stands in a file of trees.

    Returns:
        The word.
    """
    return word.replace("-LRB-", "(").replace("-RRB-", ")")


_PLAIN = str.maketrans(dict.fromkeys('‘’`“”„"', "'") | dict.fromkeys("–—", "-") | {"…": "..."})


def plain_word(word: str) -> str:
    """A word as it is compared with that of another text: quotation marks, dashes and parentheses of one kind.

    Those of a treebank, such as `` and -LRB-, are those of print. Spaces do not count, and words may be joined before
    or after.
    """
    tokens = (unescape_word(token).replace("``", "'").replace("''", "'").replace("--", "-") for token in word.split())
    return "".join(tokens).translate(_PLAIN)


def _at_character(symbol: str, place: tuple[int, int]) -> str:
    """Name a symbol of a text of one line."""
    return f"{symbol!r} at character {place[1]}"


def read_brackets(
    lines: Iterable[str], describe: Callable[[str, tuple[int, int]], str] = _at_character
) -> Iterator[tuple[str, tuple[int, int], bool]]:
    """Split bracketed trees into brackets and words, and check that the brackets match.

    All readers of trees use this: those of this file, `hf_synlm.data.treebank`, and `evalb_input` of the evaluation.

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
                    raise ValueError(
                        f"{describe(symbol, place)} closes nothing. Add its '(', or write -RRB- if it is a word"
                    )
                open_places.pop()
            yield symbol, place, is_first
            is_first = symbol == "("
    if open_places:
        raise ValueError(
            f"{describe('(', open_places[-1])} is never closed. Add its ')', or write -LRB- if it is a word"
        )


# ------------------------------------------------------------------------------------------------- nodes of a treebank
@dataclasses.dataclass
class Node:
    """A bracket with its label, its line, and its children or words."""

    label: str
    line: int
    children: list["Node"] = dataclasses.field(default_factory=list)
    words: list[str] = dataclasses.field(default_factory=list)


def read_nodes(lines: Iterable[str], source: str, split_leaves: bool) -> Iterator[Node]:
    """Yield the outermost brackets of the text."""

    def describe(symbol: str, place: tuple[int, int]) -> str:
        return f"{source}:{place[0]}: {symbol!r}"

    path: list[Node] = []
    layout = _Layout(source)
    for symbol, place, is_first in read_brackets(_tidy(lines, path), describe):
        if symbol == "(":
            if is_first and len(path) > 1:
                _check_label(path, source)
            if path and path[-1].words:
                raise ValueError(
                    f"{describe(symbol, place)} follows the word {path[-1].words[-1]!r}. Write the word as (TAG "
                    "word), and a parenthesis inside a word as -LRB-"
                )
            path.append(Node("", place[0]))
            if not place[1]:
                layout.margin.append(path[-1])
        elif symbol == ")":
            node = path.pop()
            if not node.words and not node.children:
                layout.bare.append((node, path[-1] if path else node))
            layout.branches |= len(node.children) > 1 and bool(node.label)
            if path:
                path[-1].children.append(node)
            else:
                layout.end_tree(node, place)
                yield node
        elif not path:
            raise ValueError(f"{describe(symbol, place)} stands outside of all trees. Begin trees with '('")
        elif is_first:
            path[-1].label = symbol
            if symbol in ROOT_LABELS and len(path) > 1:
                _check_label(path, source)
        elif path[-1].children or (path[-1].words and not split_leaves):
            raise ValueError(
                f"{source}:{place[0]}: the word {symbol!r} has no bracket of its own. Write it as (TAG {symbol}). If "
                "it belongs to the leaf before, split such leaves (--split-leaves of this command or of synlm "
                "treebank; in Python split_leaves=True)"
            )
        else:
            path[-1].words.append(symbol)
    layout.end_file()


def _tidy(lines: Iterable[str], path: Sequence[Node]) -> Iterator[str]:
    """The lines without mark-up between trees, `path` being empty there, and with -LRB- and -RRB- for characters."""
    for line in lines:
        if not path and MARKUP.fullmatch(line):
            yield ""
        else:
            yield _LEAF_WITH_PARENTHESIS.sub(_escape_leaf, line) if _SUSPECT.search(line) else line


def _escape_leaf(match: re.Match[str]) -> str:
    tag, word = filter(None, match.groups())
    word = re.sub(r"\\([()])", r"\1", word)
    return f"({escape_word(tag)} {escape_word(word)})"


def _check_label(path: Sequence[Node], source: str) -> None:
    """Raise ValueError if the innermost bracket has no label, or that of another tree."""
    root, node = path[0], path[-1]
    if not node.label:
        remedy = f"add one, or close the tree that begins in line {root.line}" if root.line < node.line else "add one"
        raise ValueError(f"{source}:{node.line}: a bracket inside the tree has no label: {remedy}")
    if node.label == root.label and any(outer.children or outer.label not in ROOT_LABELS for outer in path[:-1]):
        raise ValueError(
            f"{source}:{root.line}: '(' is never closed before {node.label} begins in line {node.line}. Add its ')'"
        )


class _Layout:
    """What shows only at the end of a tree, or after several trees."""

    def __init__(self, source: str):
        self.source = source
        self.margin: list[Node] = []  # brackets of a tree that begin in column 0
        self.bare: list[tuple[Node, Node]] = []  # brackets of a tree with nothing but a label, each with its parent
        self.broken: list[tuple[int, int]] = []  # lines of trees in column 0, and of the first bracket there inside
        self.branches = self.is_open = False  # brackets of several ones, with a label and without
        self.num_whole, self.has_long = 0, False  # of the other trees, and whether one has several lines

    def end_tree(self, root: Node, end: tuple[int, int]) -> None:
        """Check a tree, whose last bracket has the place `end`, and make it one of the usual style."""
        if self.bare:
            _open_words(root, self.bare, self.source)
        self.is_open |= not root.label and len(root.children) > 1
        if not root.label and any(child.label in _ABOUT_TEXT for child in root.children):
            _leave_out_remarks(root)
        # A tree that ends in column 0, too, is written so on purpose.
        if len(self.margin) > 1 and self.margin[0] is root and end[1]:
            self.broken.append((root.line, self.margin[1].line))
            if all(node.label == root.label for node in self.margin):
                raise ValueError(self._missing(*self.broken[-1]))
        else:
            self.num_whole += 1
            self.has_long |= end[0] > root.line
        self.margin.clear()
        self.bare.clear()

    def end_file(self) -> None:
        """Refuse trees, or warn of them, that seem to be several ones, or to be unlabeled."""
        if self.is_open and not self.branches and self.source != "<text>":  # a tree alone tells little
            raise ValueError(
                f"{self.source} seems to hold unlabeled trees. Write labels and tags: (S (NP (DT the) (NN cat)) ...)"
            )
        if self.num_whole >= len(self.broken) > 0:
            first, second = self.broken[0]
            if not self.has_long:
                raise ValueError(self._missing(first, second))
            count = self.num_whole + len(self.broken)
            logger.warning(
                f"{self.source}: brackets begin in column 0 inside of {len(self.broken)} of {count} trees, the first "
                f"in line {second}. Check whether the tree that begins in line {first} lacks a ')'"
            )

    def _missing(self, first: int, second: int) -> str:
        return (
            f"{self.source}:{first}: '(' is never closed before the next tree begins in line {second}: add its ')', "
            f"or a space before line {second} if this line continues the tree"
        )


def _open_words(root: Node, bare: Sequence[tuple[Node, Node]], source: str) -> None:
    """Read words in brackets of their own; ValueError if such a bracket may be something else."""
    nodes = [root]
    for node in nodes:
        nodes.extend(node.children)
    is_style = len(bare) > 1 and not any(node.words for node in nodes)
    for node, parent in bare:
        if not is_style or not parent.label or len(parent.children) != 1:
            raise ValueError(
                f"{source}:{node.line}: ({node.label}) contains neither a word nor a constituent. Write words as "
                "(TAG word), and a parenthesis that is a word as -LRB- or -RRB-"
            )
        parent.children, parent.words = [], [node.label]
        parent.label = TRACE_TAG if _is_empty(node.label) else parent.label


def _leave_out_remarks(root: Node) -> None:
    """Leave out what is about the text in a tree of the Penn-Helsinki style, and mark what is empty."""
    nodes = [root]
    for node in nodes:
        node.children = [child for child in node.children if child.label not in _ABOUT_TEXT]
        nodes.extend(node.children)
        if any(map(_is_empty, node.words)):
            node.label = TRACE_TAG


def _is_empty(word: str) -> bool:
    return word == "0" or word.startswith("*")


_TREE = re.compile(r"\s*(\(\s*)?\([A-Z][A-Z0-9=|-]*\s*(\([^\s()a-z]+\s+)+[^\s()]+\)")  # labels have no small letters


def begins_with_tree(text: str) -> bool:
    """Whether text begins as a labeled tree does, not as a sentence in parentheses."""
    return _TREE.match(text) is not None


# ------------------------------------------------------------------------------------------------ trees without tags
def brackets_to_spans(text: str) -> tuple[list[Span], list[str]]:
    """Read unlabeled brackets such as `((fruit flies) (like (a banana)))`.

    Inverse of `hf_synlm.trees.spans.spans_to_brackets`.

    Args:
        text: one tree; white space between words and brackets is free.

    Returns:
        The half-open spans of the tree in post-order, without leaves, and its words with -LRB- and -RRB- turned back
        into parentheses.

    Raises:
        ValueError: the text is empty, brackets do not match, a bracket has fewer than two children, or text follows
            after the tree; the message names the character position.

    Cost: O(length of the text).
    """
    constituents, words = _read_tree(text, has_labels=False)
    return [(i, j) for _, i, j in constituents], words


def brackets_to_labeled_spans(text: str) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Read labeled brackets without part-of-speech tags, e.g. `(S (NP the cat) (VP sleeps))`.

    Inverse of `hf_synlm.trees.spans.labeled_spans_to_brackets`. For trees with tags use
    `hf_synlm.data.treebank.parse_treebank`; here a tag would be a constituent over one word.

    Args:
        text: one tree; white space between words and brackets is free.

    Returns:
        (label, i, j) of every constituent in post-order, unary chains from bottom to top, and the words with -LRB- and
        -RRB- turned back into parentheses.

    Raises:
        ValueError: the text is empty, brackets do not match, a bracket has no label or no words, or text follows after
            the tree; the message names the character position.

    Cost: O(length of the text).
    """
    return _read_tree(text, has_labels=True)


def _read_tree(text: str, has_labels: bool) -> tuple[list[tuple[str, int, int]], list[str]]:
    """Label and span of every bracket in post-order, and the words; labels may be empty if there are none."""
    constituents: list[tuple[str, int, int]] = []
    words: list[str] = []
    # Per open bracket: its character in the text, its label, its first word, its number of children.
    open_nodes: list[tuple[int, str, int, int]] = []
    for symbol, place, is_first in read_brackets([text]):
        if words and not open_nodes:
            raise ValueError(f"{_at_character(symbol, place)} stands after the end of the tree. Give one tree")
        if symbol == "(":
            open_nodes.append((place[1], "", len(words), 0))
            continue
        if is_first and has_labels and symbol != ")":
            open_nodes[-1] = (open_nodes[-1][0], symbol, len(words), 0)
            continue
        if symbol == ")":
            opened_at, label, start, count = open_nodes.pop()
            if has_labels and not label:
                raise ValueError(f"the bracket opened at character {opened_at} has no label. Add a label")
            if has_labels and not count:
                raise ValueError(
                    f"the bracket opened at character {opened_at} contains no word. Add a word, and write "
                    "parentheses that are characters as -LRB- and -RRB-"
                )
            if not has_labels and count < 2:
                raise ValueError(
                    f"the bracket opened at character {opened_at} has {count} child(ren). Give it at least two, and "
                    "write a single word without brackets"
                )
            constituents.append((label, start, len(words)))
        else:
            words.append(unescape_word(symbol))
        if open_nodes:
            opened_at, label, start, count = open_nodes.pop()
            open_nodes.append((opened_at, label, start, count + 1))
    if not words:
        raise ValueError(f"no tree in {text!r}. Leave empty lines out")
    return constituents, words
