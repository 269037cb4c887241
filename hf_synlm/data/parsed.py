# SPDX-License-Identifier: Apache-2.0
"""Parses of sentences: trees over words, best first, with log-probabilities; and files of parses.

`ParsedSentence.from_output` converts the output of a model's `parse`. A file of parses contains JSON lines (all trees
and numbers), or bracketed trees (the best ones), which `lines_of_parses` writes; `read_parses` reads both, also from
other programs, and dependencies in CoNLL-U.
"""

import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from hf_synlm.data.brackets import brackets_to_labeled_spans, brackets_to_spans, unescape_word
from hf_synlm.data.dependencies import has_content, is_conllu
from hf_synlm.data.text import PathLike, errors_at, read_lines_beside
from hf_synlm.data.treebank import (
    PUNCTUATION_TAGS,
    SYMBOL_TAGS,
    UNIVERSAL_WORD_TAGS,
    WORD_TAGS,
    TreebankSentence,
    parse_treebank,
    read_dependency_trees,
)
from hf_synlm.trees.spans import (
    Span,
    escape_word,
    fold_tokens,
    labeled_spans_to_brackets,
    spans_to_brackets,
    validate_spans,
)

TreeStyle: TypeAlias = Literal["unlabeled", "labeled", "treebank"]

_KNOWN_TAGS = WORD_TAGS | UNIVERSAL_WORD_TAGS | PUNCTUATION_TAGS | SYMBOL_TAGS
_PHRASES = frozenset("CONJP FRAG LST NAC NX PRN PRT RRC S SBAR SBARQ SINV SQ".split())
# The first label of a file of labeled trees, where nothing else would show that it is one.
# A sentence of one word, such as a hashtag, has no space.
_COMMENT = re.compile(r"#\s+\S")
_MARKED_LABEL = re.compile(r"\([^\s()]+  ")


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """One tree of a sentence.

    Attributes:
        spans: half-open word spans in post-order, with the whole sentence. Without labels only spans of two or more
            words; with labels also constituents over one word, and unary chains from bottom to top.
        labels: one label per span; None for trees without labels.
        log_prob: log p(words, tree) in nats, or log p(words) if the model defines one tree; None if unknown. If words
            have several tokens: summed over the returned trees that differ only inside words.
    """

    spans: tuple[Span, ...]
    labels: tuple[str, ...] | None = None
    log_prob: float | None = None

    @property
    def unlabeled_spans(self) -> list[Span]:
        """The spans of two or more words, each once."""
        return list(dict.fromkeys((i, j) for i, j in self.spans if j - i >= 2))


@dataclasses.dataclass(frozen=True)
class ParsedSentence:
    """A sentence with its trees.

    Attributes:
        words: the n words.
        hypotheses: the trees, best first, each once; empty if the search found no complete tree. Trees over tokens that
            are equal over words are one tree, at the best of their ranks.
        word_log_probs: log p(word | words before) of each word in nats, summed over trees; None if unknown.
        unknown_words: indices of the words that the model does not know, where that was asked; not part of `to_dict`.
        tags: part of speech of each word, of models that give them.
    """

    words: tuple[str, ...]
    hypotheses: tuple[Hypothesis, ...] = ()
    word_log_probs: tuple[float, ...] | None = None
    unknown_words: tuple[int, ...] = ()
    tags: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.word_log_probs is not None and len(self.word_log_probs) != len(self.words):
            raise ValueError(f"{len(self.word_log_probs)} log-probabilities for {len(self.words)} words. Give one each")
        for rank, tree in enumerate(self.hypotheses):
            if tree.labels is not None and len(tree.labels) != len(tree.spans):
                raise ValueError(f"tree {rank}: {len(tree.labels)} labels for {len(tree.spans)} spans. Give one each")
            has_labels = tree.labels is not None
            min_width = 1 if has_labels else 2
            validate_spans(tree.spans, len(self.words), min_width=min_width, allow_duplicates=has_labels)

    @classmethod
    def from_output(cls, output: Any, words: Sequence[str], sentence: int = 0) -> "ParsedSentence":
        """Convert one sentence of the output of `model.parse`.

        Args:
            output: a `ParseOutput`.
            words: the words of the sentence: one per word if `word_ends` were given to `parse`, else one per token.
            sentence: row of the batch.

        Returns:
            The sentence, spans and log-probabilities counted in words.

        Raises:
            ValueError: the number of words does not fit, or a span cuts a word.
        """
        offset, length = output.offsets[sentence], output.lengths[sentence]
        ends = None if output.word_ends is None else list(output.word_ends[sentence])
        if ends is None or len(words) != len(ends):
            if len(words) != length:
                expected = f"{length} tokens" + (f" or {len(ends)} words" if ends is not None else "")
                raise ValueError(
                    f"sentence {sentence} has {expected}, but {len(words)} words were given. Give one word per token"
                )
            ends = list(range(offset + 1, offset + length + 1))
        last = set(ends)
        is_last = [position in last for position in range(offset + 1, max(last, default=offset) + 1)]
        found: dict[tuple[tuple[Span, ...], tuple[str, ...] | None], list[float]] = {}
        for rank, spans in enumerate(output.spans[sentence]):
            labels = None if output.labels is None else tuple(output.labels[sentence][rank])
            shifted = [(i - offset, j - offset) for i, j in spans]
            over_words = tuple(fold_tokens(shifted, is_last, keep_words=labels is not None))
            same = found.setdefault((over_words, labels), [])
            if output.log_probs is not None:
                same.append(float(output.log_probs[sentence, rank]))
        sums = [float(np.logaddexp.reduce(values)) if values else None for values in found.values()]
        trees = [Hypothesis(*tree, log_prob) for tree, log_prob in zip(found, sums, strict=True)]
        log_probs = None
        if output.token_log_probs is not None:
            row = output.token_log_probs[sentence].cpu().double().tolist()
            log_probs = tuple(math.fsum(row[i:j]) for i, j in zip([offset, *ends], ends, strict=False))
        tags, symbols = getattr(output, "tags", None), getattr(output, "preterminals", None)
        if symbols is not None and len(symbols[sentence]) == 1:  # several trees have symbols of their own
            tags = {sentence: symbols[sentence][0]}
        return cls(tuple(words), tuple(trees), log_probs, tags=tuple(tags[sentence]) or None if tags else None)

    def brackets(self, hypothesis: int = 0) -> str:
        """One tree as brackets.

        Args:
            hypothesis: rank of the tree.

        Returns:
            For example `((fruit flies) (like (a banana)))`, or with labels `(S (NP the cat) (VP sleeps))`.

        Raises:
            ValueError: there is no such tree.
        """
        tree = self.tree(hypothesis)
        if tree.labels is None:
            return spans_to_brackets(tree.spans, self.words)
        labeled = [(label, i, j) for label, (i, j) in zip(tree.labels, tree.spans, strict=True)]
        return labeled_spans_to_brackets(labeled, self.words)

    def tree(self, hypothesis: int = 0) -> Hypothesis:
        """The tree of a rank.

        Args:
            hypothesis: the rank, 0 = best.

        Returns:
            The tree.

        Raises:
            ValueError: there is none.
        """
        if not 0 <= hypothesis < len(self.hypotheses):
            raise ValueError(
                f"there is no tree {hypothesis} of {' '.join(self.words)!r}: the parser gave {len(self.hypotheses)} "
                "trees. A search with a wider beam may find more"
            )
        return self.hypotheses[hypothesis]

    def drawn(self, hypothesis: int = 0) -> tuple[Sequence[Span], Sequence[str] | None]:
        """Spans and labels of a tree as a picture shows it: tags are labels of their words."""
        tree = self.tree(hypothesis)
        if self.tags is None or tree.labels is None:
            return tree.spans, tree.labels
        return [*((k, k + 1) for k in range(len(self.words))), *tree.spans], [*self.tags, *tree.labels]

    def to_dict(self) -> dict[str, Any]:
        """The sentence as plain data for JSON; brackets are only for human readers."""
        trees = [
            {
                "brackets": self.brackets(rank),
                "spans": [list(span) for span in tree.spans],
                "labels": None if tree.labels is None else list(tree.labels),
                "log_prob": tree.log_prob,
            }
            for rank, tree in enumerate(self.hypotheses)
        ]
        log_probs = None if self.word_log_probs is None else list(self.word_log_probs)
        tags = {} if self.tags is None else {"tags": list(self.tags)}
        return {"words": list(self.words), **tags, "word_log_probs": log_probs, "trees": trees}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ParsedSentence":
        """Inverse of `to_dict`.

        Args:
            values: `words`, and optionally `trees` and `word_log_probs`.

        Returns:
            The sentence.

        Raises:
            ValueError: the values are not a parsed sentence.
        """
        try:
            trees = tuple(
                Hypothesis(
                    tuple((int(i), int(j)) for i, j in tree["spans"]),
                    None if tree.get("labels") is None else tuple(map(str, tree["labels"])),
                    tree.get("log_prob"),
                )
                for tree in values.get("trees", ())
            )
            log_probs, tags = (
                None if values.get(name) is None else tuple(values[name]) for name in ("word_log_probs", "tags")
            )
            return cls(tuple(values["words"]), trees, log_probs, tags=tags)
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is not a parsed sentence ({error!r}). Give words and trees with spans") from error


def posteriors(sentence: ParsedSentence) -> list[float] | None:
    """Probability of each tree of a sentence, given the words and that the tree is one of those listed.

    Args:
        sentence: a sentence with its trees.

    Returns:
        One probability per tree, which sum to 1; None if a tree has no log-probability, or if there are no trees.
    """
    log_probs = [tree.log_prob for tree in sentence.hypotheses]
    known = [value for value in log_probs if value is not None]
    if len(known) != len(log_probs) or max(known, default=-math.inf) == -math.inf:
        return None
    return np.exp(known - np.logaddexp.reduce(known)).tolist()


def as_treebank_sentence(parsed: ParsedSentence, source: str) -> TreebankSentence:
    """The best tree as a sentence of a treebank; X stands for labels and tags that it lacks."""
    tree, num_words = parsed.tree(), len(parsed.words)
    labels = tree.labels or ["X"] * len(tree.spans)
    labeled = [(label, i, j) for label, (i, j) in zip(labels, tree.spans, strict=True)]
    words = tuple(map(escape_word, parsed.words))
    return TreebankSentence(words, parsed.tags or ("X",) * num_words, tuple(labeled or [("X", 0, num_words)]), source)


# ------------------------------------------------------------------------------------------------------------- files
def read_parses(path: PathLike, style: TreeStyle | None = "unlabeled", **reading: Any) -> list[ParsedSentence]:
    """Read a file of parses; a blank line is a sentence without a parse (and without words).

    A sentence is a JSON object (`ParsedSentence.to_dict`) on its line, or a bracketed tree, see `tree_lines`. The
    tree does not show its style: `((the cat) (sat down))` may be two constituents or two words with their tags.
    A file in CoNLL-U is read as by `read_dependency_trees`.

    Args:
        path: the file.
        style: of bracketed trees: "unlabeled", `((the cat) sleeps)`; "labeled", `(S (NP the cat) (VP sleeps))`;
            "treebank", the format of the Penn Treebank, `(S (NP (DT the) (NN cat)) (VP (VBZ sleeps)))`; None: as
            `guess_style` says.
        **reading: options of `hf_synlm.data.treebank.read_treebank`, for trees with tags and for dependencies.

    Returns:
        The sentences; -LRB- and -RRB- are parentheses again.

    Raises:
        ValueError: a line is neither, or the style is unknown; the message names file and line.
    """
    lines = read_lines_beside(path)
    return parses_of_lines(lines, style or guess_style(lines)[0], source=str(path), **reading)


def parses_of_lines(
    lines: Iterable[str], style: TreeStyle = "unlabeled", *, source: str = "<text>", **reading: Any
) -> list[ParsedSentence]:
    """Read parses given as lines of text.

    Args:
        lines: as in a file of parses.
        style: as in `read_parses`.
        source: name for error messages.
        **reading: as in `read_parses`.

    Returns:
        As `read_parses`.

    Raises:
        ValueError: as `read_parses`.
    """
    lines, dependencies = list(lines), reading.pop("dependencies", {})
    if kind_of_trees(source, lines) == "conllu":
        found = read_dependency_trees(source, lines=lines, **dependencies)
        return [_from_treebank(sentence) for sentence in found]
    sentences = []
    for number, tree in tree_lines(lines):
        with errors_at(f"{source}:{number}"):
            sentences.append(read_parse(tree, style, **reading))
    return sentences


def kind_of_trees(source: PathLike, lines: Iterable[str]) -> Literal["json", "conllu", "brackets"]:
    """What a file of trees contains, by its name or its first line."""
    # What begins with # may be a comment, or a sentence of one word, such as a hashtag.
    first = next(filter(has_content, lines), "")
    return "json" if first.startswith('{"') else "conllu" if is_conllu(source, first) else "brackets"


def tree_lines(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Bracketed trees with the number of their first line.

    An open tree goes on in lines that are indented or begin with its closing bracket. Where a tree does so, blank lines
    stand between trees; in other files each line is a sentence. Trees go on in all lines (`trees_by_depth`) if one that
    has only its label in its first line is followed by a bracket at the margin, or if most trees would be open.
    """
    lines = list(lines)
    found: list[tuple[int, list[str]]] = []
    depth = num_open = 0
    for number, line in enumerate(lines, start=1):
        if depth <= 0 and _COMMENT.match(line):
            continue
        if depth > 0 and (not line or line[0].isspace() or line[0] == ")"):
            found[-1][1].append(line)
        else:
            num_open += depth != 0
            found.append((number, [line]))
            depth = 0
        if not line.startswith('{"'):
            depth += line.count("(") - line.count(")")
    pairs = zip(lines, lines[1:], strict=False)
    has_margin = any(re.fullmatch(r"\([^\s()]*\s*", line) and after.startswith("(") for line, after in pairs)
    if has_margin or 2 * num_open > sum(map(bool, map(str.strip, lines))):
        yield from trees_by_depth(lines)
        return
    goes_on = any(line.strip() for _, tree in found for line in tree[1:])
    for number, tree in found:
        text = tree[0] if len(tree) == 1 else " ".join(line.strip() for line in tree)
        if text.strip() or not goes_on:
            yield number, text


def trees_by_depth(lines: Iterable[str]) -> Iterator[tuple[int, str]]:
    """Bracketed trees, one after the other, with the number of their first line: a tree ends where its brackets do."""
    depth, first, tree = 0, 1, ""
    for number, line in enumerate(lines, start=1):
        if depth <= 0 and _COMMENT.match(line):
            continue
        for part in re.findall(r"[()]|[^()]+", f"{line} "):
            first = first if tree.strip() else number
            tree += part
            depth += (part == "(") - (part == ")")
            if part == ")" and depth <= 0:
                yield first, tree.strip()
                depth, tree = 0, ""
    if tree.strip():
        yield first, tree.strip()


def guess_style(lines: Iterable[str]) -> tuple[TreeStyle, bool]:
    """Tell labels and tags of bracketed trees from words, in any language.

    Only brackets of unlabeled trees begin with a bracket. Where all begin with a word or label and have two parts, the
    trees are binary and branch to the right; where some have more parts, the first is a label. In a treebank, every
    word has a bracket of its own.

    Args:
        lines: as in a file of parses; JSON lines have no style.

    Returns:
        The style, and whether this is certain. It is not if all trees branch to the right, if labels neither repeat nor
        differ from words by capital letters, or if labels of phrases may be tags.
    """
    trees = [tree for _, tree in tree_lines(lines) if not tree.startswith('{"')]
    if any(map(_MARKED_LABEL.match, trees)):
        return "labeled", True
    labels, labels_of_words, above = Counter[str](), Counter[str](), set[str]()
    words = Counter[bool]()  # how many have small letters
    is_wide = has_open_root = False
    for depth, (first, *others) in _bracket_parts(trees):
        inside = [part for part in others if part != "("]
        is_wide |= len(others) > 1
        if first == "(" and not others and depth == 1:
            return "treebank", True  # the wrapper around a tree
        if first == "(" and (depth > 1 or inside):
            return "unlabeled", True
        if first == "(":
            has_open_root = True
            continue
        labels[first] += 1
        words.update(word != word.upper() for word in inside)
        if not inside:
            above.add(first)
        elif len(others) == 1:
            labels_of_words[first] += 1
    alone, known = labels_of_words.total(), sum(labels_of_words[tag] for tag in _KNOWN_TAGS)
    if labels and not is_wide and not (above and alone == words.total() == known):
        return "unlabeled", has_open_root
    if 2 * sum(labels_of_words[label] for label in above) > alone:
        return "labeled", True
    if 2 * known > words.total():
        return "treebank", True
    if has_open_root:
        return "treebank" if above and alone == words.total() else "unlabeled", alone < words.total()
    are_capitals = words[True] > 0 and all(label == label.upper() for label in labels)
    is_certain = bool(above) and (are_capitals or 2 * len(labels) <= labels.total())
    if alone < words.total():
        return "labeled", is_certain
    # All words are alone. Labels of phrases end with P, those of words mostly do not.
    if all(label.endswith("P") or label in _PHRASES for label in labels_of_words):
        return "labeled", not labels
    return "treebank", is_certain


def _bracket_parts(trees: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Of every bracket that is not empty: its depth, and its parts, which are words or "(" for a bracket."""
    for tree in trees:
        path: list[list[str]] = [[]]
        for symbol in re.findall(r"[()]|[^\s()]+", tree):
            if symbol != ")":
                path[-1].append(symbol)
            if symbol == "(":
                path.append([])
            elif symbol == ")" and len(path) > 1 and (parts := path.pop()):
                yield len(path), parts


def lines_of_parses(sentences: Iterable[ParsedSentence]) -> list[str]:
    """The best trees as lines of a file, blank where there is none; `guess_style` tells their style.

    Where brackets do not show that trees are labeled, `(S agree)`, two spaces follow the first label, `(S  agree)`.
    Unlabeled trees of models are binary, which shows.
    """
    sentences = list(sentences)
    lines = [sentence.brackets() if sentence.hypotheses else "" for sentence in sentences]
    if any(sentence.hypotheses[0].labels for sentence in sentences if sentence.hypotheses):
        if guess_style(lines)[0] != "labeled":
            return [line.replace(" ", "  ", 1) for line in lines]
    return lines


def read_parse(line: str, style: TreeStyle = "unlabeled", **reading: Any) -> ParsedSentence:
    """Read one sentence of a file of parses.

    Args:
        line: a JSON object, a bracketed tree, or nothing.
        style: as in `read_parses`.
        **reading: options of `hf_synlm.data.treebank.parse_treebank`, for a tree with tags.

    Returns:
        The sentence.

    Raises:
        ValueError: the line is neither, or the style is unknown.
    """
    if style not in get_args(TreeStyle):
        raise ValueError(f"style is {style!r}. Choose one of {', '.join(get_args(TreeStyle))}")
    line = line.strip()
    if not line:
        return ParsedSentence(())
    if line.startswith('{"'):
        try:
            return ParsedSentence.from_dict(json.loads(line))
        except RecursionError as error:
            raise ValueError("the brackets of the JSON object are nested too deeply for a parsed sentence") from error
    if style == "unlabeled":
        spans, words = brackets_to_spans(line)
        return ParsedSentence(tuple(words), (Hypothesis(tuple(spans)),))
    if style == "labeled":
        return _with_labels(*brackets_to_labeled_spans(line))
    try:
        trees = list(parse_treebank([line], **reading))
    except ValueError as error:
        raise ValueError(str(error).replace("<text>:1: ", "")) from error
    if len(trees) != 1:
        raise ValueError(f"the line contains {len(trees)} trees. Write one per line")
    return _from_treebank(trees[0])


def _from_treebank(sentence: TreebankSentence) -> ParsedSentence:
    return _with_labels(sentence.labeled_spans, map(unescape_word, sentence.words))


def _with_labels(labeled: Sequence[tuple[str, int, int]], words: Iterable[str]) -> ParsedSentence:
    spans, labels = tuple((i, j) for _, i, j in labeled), tuple(label for label, _, _ in labeled)
    return ParsedSentence(tuple(words), (Hypothesis(spans, labels),))
