# SPDX-License-Identifier: Apache-2.0
"""Reading constituency treebanks in the bracket format of the Penn Treebank.

`( (S (NP-SBJ (DT The) (NN cat)) (VP (VBZ sleeps)) (. .)) )` becomes words, part-of-speech tags and labeled spans. A
line may contain several trees, and a tree several lines. Reading removes traces (tag -NONE-) and constituents that
contain nothing else, function tags (NP-SBJ-1, NP=2, ADVP|PRT become NP, NP, ADVP) and the root wrapper. It keeps unary
chains, as labeled spans, and words as in the file (-LRB- for a parenthesis). White space is that of ASCII: a no-break
space is part of a word. `hf_synlm.data.brackets` says what else is read, such as the Penn-Helsinki style.

Every tree has a constituent over the whole sentence. A wrapper around several constituents or words is a constituent,
and so is the wrapper around a single word; its label is ROOT if it has none.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, compress
from types import MappingProxyType
from typing import Any, Literal

from hf_synlm.data.brackets import (
    LABEL_SEPARATORS,
    MARKUP,
    ROOT_LABELS,
    TRACE_TAG,
    Node,
    read_nodes,
)
from hf_synlm.data.dependencies import (
    DependencySentence,
    Invalid,
    Labels,
    NonProjective,
    Structure,
    Tokens,
    constituents,
    crossing_arcs,
    drop_punctuation,
    has_content,
    is_conllu,
    lift,
    read_conllu,
)
from hf_synlm.data.text import PathLike, read_lines
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span, escape_word, labeled_spans_to_brackets

# The 36 part-of-speech tags of the Penn Treebank that words have: everything but punctuation, $, # and empty elements.
WORD_TAGS = frozenset(
    "CC CD DT EX FW IN JJ JJR JJS LS MD NN NNS NNP NNPS PDT POS PRP PRP$ RB RBR RBS RP SYM TO UH VB VBD VBG VBN VBP "
    "VBZ WDT WP WP$ WRB".split()
)
# Of Universal Dependencies (UPOS) and its first version; SYM is in both sets.
UNIVERSAL_WORD_TAGS = frozenset(
    "ADJ ADP ADV AUX CCONJ CONJ DET INTJ NOUN NUM PART PRON PROPN PRT SCONJ SYM VERB X".split()
)
PUNCTUATION_TAGS = frozenset(("PUNCT", ",", ".", ":", "``", "''", "-LRB-", "-RRB-"))
# Other tags that are not of words: in the Penn Treebank, OntoNotes, the English Web Treebank, and GENIA.
SYMBOL_TAGS = frozenset(("$", "#", "HYPH", "NFP", "LRB", "RRB", "-LSB-", "-RSB-", "-LCB-", "-RCB-", "PERIOD", "COMMA"))
HEAD_MARK = "-HD"

_PTB_NUMBER = re.compile(r"(?=.*[0-9])[0-9.,:\-\\/]+|%")
_PTB_DROPPED_WORDS = frozenset(
    "`` '' , . : ; - ? ! ¨ ^ \\ \\\\ | ~ -lrb- -rrb- -lcb- -rcb- ( ) [ ] { } < > -- ... `".split()
)
_PTB_DROPPED_PAIRS = frozenset((("wa", "NNP"), ("'", "''")))


@dataclasses.dataclass(frozen=True)
class TreebankSentence:
    """One sentence of a treebank with its tree.

    Attributes:
        words: the n words.
        tags: the part-of-speech tag of each word.
        labeled_spans: (label, i, j) of every constituent, half-open, in post-order; unary chains from bottom to top;
            with constituents over one word, without part-of-speech tags.
        source: "file:line" of the tree's opening bracket.
        joined: whether a word follows the one before without a space; None if the file does not say.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    labeled_spans: tuple[tuple[str, int, int], ...]
    source: str
    joined: tuple[bool, ...] | None = None

    @property
    def spans(self) -> list[Span]:
        """The unlabeled spans (i, j) of width >= 2 in post-order, each once."""
        return list(dict.fromkeys((i, j) for _, i, j in self.labeled_spans if j - i >= 2))

    def select_words(self, keep: Sequence[bool]) -> "TreebankSentence":
        """The sentence with some of its words; constituents without words are removed.

        Args:
            keep: one bool per word, True = keep.

        Returns:
            A new sentence; its `labeled_spans` count the kept words.

        Raises:
            ValueError: the number of bools differs from the number of words.
        """
        if len(keep) != len(self.words):
            raise ValueError(f"keep has {len(keep)} values for {len(self.words)} words. Give one per word")
        before = list(accumulate(map(bool, keep), initial=0))
        # A word stays joined to a word that stays.
        marks = None if self.joined is None else map(all, zip(self.joined, (True, *keep), strict=False))
        return dataclasses.replace(
            self,
            words=tuple(compress(self.words, keep)),
            tags=tuple(compress(self.tags, keep)),
            joined=None if marks is None else tuple(compress(marks, keep)),
            labeled_spans=tuple(
                (label, before[i], before[j]) for label, i, j in self.labeled_spans if before[j] > before[i]
            ),
        )


@lru_cache(maxsize=10_000)
def clean_label(label: str, separators: str = LABEL_SEPARATORS) -> str:
    """Remove function tags and indices from a label: all from the first separator after its first character.

    Args:
        label: label of a constituent or word, e.g. "NP-SBJ-1".
        separators: the characters before function tags.

    Returns:
        The bare label, e.g. "NP"; labels that begin with a hyphen (-LRB-, -NONE-) stay unchanged, and -LRB- in others
        is a parenthesis.
    """
    if label.startswith("-") or not separators:
        return label
    return re.split(f"(?<=.)(?!-[LR]RB-)(?<!-[LR]RB)[{re.escape(separators)}]", label, maxsplit=1)[0]


def read_treebank(
    path: PathLike,
    *,
    encoding: str | None = None,
    dependencies: Mapping[str, Any] = MappingProxyType({}),
    without_punctuation: bool = False,
    **options: Any,
) -> Iterator[TreebankSentence]:
    """Read the sentences of a treebank file.

    Args:
        path: file of bracketed trees, or of dependencies in CoNLL-U, which `read_dependency_trees` reads.
        encoding: character encoding of a file of brackets; None = that of the command, or UTF-8.
        dependencies: options of `read_dependency_trees`; an error for brackets, which are constituents already.
        without_punctuation: remove the punctuation of dependencies; brackets keep it.
        **options: those of `parse_treebank`; for dependencies, `left_out` only.

    Yields:
        One `TreebankSentence` per tree that has words left.

    Raises:
        ValueError: as `parse_treebank`, or the file is not text in this encoding; the message names file and line. An
            option that dependencies do not have.

    Cost: O(file size) time, memory for one tree, or for all sentences of a file of dependencies.
    """
    # A pipe can be opened once.
    lines = read_lines(path, encoding=encoding)
    head = []
    for line in lines:
        head.append(line)
        if has_content(line):
            break
    lines = chain(head, lines)
    if is_conllu(path, head[-1] if head else ""):
        of_brackets = [name for name in options if name not in ("keep_functions", "left_out")]
        if given := [name for name in of_brackets if options[name]]:
            raise ValueError(f"{path} holds dependencies, which have no option {given[0]}. Leave this option out")
        how: dict[str, Any] = {"punctuation": "remove" if without_punctuation else "keep", **dependencies}
        yield from read_dependency_trees(path, left_out=options.get("left_out"), lines=lines, **how)
    else:
        if dependencies:
            raise ValueError(
                f"{path} holds bracketed trees, which are constituents already. Leave out the options of dependencies "
                f"({', '.join(sorted(dependencies))})"
            )
        yield from parse_treebank(lines, source=str(path), **options)


def read_dependency_trees(
    path: PathLike,
    *,
    structure: Structure = "flat",
    labels: Labels = "upos",
    tokens: Tokens = "surface",
    punctuation: Literal["keep", "remove"] = "keep",
    nonprojective: NonProjective = "lift",
    invalid: Invalid = "refuse",
    mark_heads: bool = False,
    left_out: Counter[str] | None = None,
    counts: Counter[str] | None = None,
    lines: Iterable[str] | None = None,
) -> Iterator[TreebankSentence]:
    """Read a dependency treebank in CoNLL-U as constituents, see `hf_synlm.data.dependencies`.

    Args:
        path: the file.
        structure: which constituents a word has with its dependents.
        labels: of all constituents of a word: its UPOS and P (NOUNP), X, or its relation to its head.
        tokens: "surface": a multiword token is one word; "syntactic": its words are.
        punctuation: "remove" removes what UPOS calls PUNCT (in CoNLL-X: a tag of punctuation of the Penn Treebank),
            before everything else.
        nonprojective: "lift" makes trees projective, "skip" leaves out sentences that are not, "refuse" is an error.
        invalid: "skip" leaves out sentences whose dependencies form no tree, which are otherwise an error.
        mark_heads: add -HD to the label or tag of the part of a constituent that holds its head. Readers of function
            tags cut it off.
        left_out: counts the sentences that are left out.
        counts: counts what was changed: multiword tokens, empty nodes, sentences with crossing arcs, these arcs, lifts
            ...
        lines: lines of the file, if it is open already.

    Yields:
        One sentence per tree that is not left out. Parentheses in words are -LRB- and -RRB-.

    Raises:
        ValueError: as `read_conllu`; no word has a UPOS, but labels need it; a tree is not projective and refused.
    """
    counts, left_out = Counter() if counts is None else counts, Counter() if left_out is None else left_out
    sentences = read_conllu(path, tokens, counts, lines, invalid)
    if not sentences:
        raise ValueError(f"{path} contains no sentence. Is it a file in CoNLL-U?")
    if labels == "upos" and all(tag == "_" for sentence in sentences for tag in sentence.tags):
        raise ValueError(f"{path}: no word has a UPOS to make labels of. Make trees by synlm treebank --labels X")
    for found in sentences:
        sentence = drop_punctuation(found, PUNCTUATION_TAGS) if punctuation == "remove" else found
        counts["punctuation removed"] += len(found.words) - (len(sentence.words) if sentence else 0)
        if sentence is None:
            left_out["no words"] += 1
            continue
        if crossing := crossing_arcs(sentence.heads):
            if nonprojective == "refuse":
                name = f" (sentence {sentence.name})" if sentence.name else ""
                raise ValueError(
                    f"{sentence.source}: the arc to {sentence.words[crossing[0]]!r} is not projective{name}. Lift such "
                    "arcs or skip such sentences (nonprojective: lift or skip)"
                )
            counts["sentences with crossing arcs"] += 1
            counts["crossing arcs"] += len(crossing)
            if nonprojective == "skip":
                left_out["not projective"] += 1
                continue
            sentence = lift(sentence, counts)
        mark = HEAD_MARK if mark_heads else ""
        yield _as_constituents(sentence, constituents(sentence, structure, labels, mark), mark)


def _as_constituents(
    sentence: DependencySentence, spans: Sequence[tuple[str, int, int]], mark: str
) -> TreebankSentence:
    """A sentence with the constituents of its dependencies; heads get the `mark`."""
    heads = {*sentence.heads} | ({0} if len(sentence.words) == 1 else set())
    tags = map(escape_word, sentence.tags)
    return TreebankSentence(
        words=tuple(map(escape_word, sentence.words)),
        tags=tuple(tag + mark * (word in heads) for word, tag in enumerate(tags)),
        labeled_spans=tuple((escape_word(label), i, j) for label, i, j in spans),
        source=sentence.source,
        # A sentence without SpaceAfter=No says nothing.
        joined=None if all(sentence.spaces[:-1]) else (True, *(not space for space in sentence.spaces[:-1])),
    )


def parse_treebank(
    lines: Iterable[str],
    *,
    source: str = "<text>",
    keep_functions: bool = False,
    split_leaves: bool = False,
    drop_tags: Collection[str] = (),
    drop_labels: Collection[str] = (),
    label_separators: str = LABEL_SEPARATORS,
    lemma_separator: str | None = None,
    left_out: Counter[str] | None = None,
) -> Iterator[TreebankSentence]:
    """Read the sentences of bracketed trees given as lines of text.

    Args:
        lines: lines of text, with or without line ends.
        source: name for error messages.
        keep_functions: keep function tags and indices on the labels of constituents.
        split_leaves: read a leaf of several words, (NN New York), as several words with the same tag. Otherwise it is
            an error, because it may also be a constituent whose words have no tags.
        drop_tags: leave out words with these tags, and constituents without other words.
        drop_labels: labels whose brackets are left out; the words in them stay. A whole sentence that loses its bracket
            is a ROOT.
        label_separators: characters before the function tags of constituents (`clean_label`).
        lemma_separator: character between a word and its lemma, as in (NS cats-cat); the last one in the leaf counts.
        left_out: counts the trees without words under "no words".

    Yields:
        One `TreebankSentence` per tree that has words left; trees without words are left out.

    Raises:
        ValueError: the brackets are malformed, or there is no tree; the message names the line.
    """
    num_trees, separators = 0, "" if keep_functions else label_separators
    empty_tags = {TRACE_TAG, *drop_tags}
    for root in read_nodes(lines, source, split_leaves):
        num_trees += 1
        sentence = _flatten(root, source, separators, empty_tags, drop_labels)
        if lemma_separator:
            words = (word.rpartition(lemma_separator)[0] or word for word in sentence.words)
            sentence = dataclasses.replace(sentence, words=tuple(words))
        if sentence.words:
            yield sentence
        elif left_out is not None:
            left_out["no words"] += 1
    if not num_trees:
        raise ValueError(f"{source} contains no tree. Is it a file of bracketed trees?")


def list_bad_lines(path: PathLike, **options: Any) -> list[str]:
    """Find the lines of a file that are not trees, where each line should hold one.

    Args:
        path: file of bracketed trees.
        **options: of `parse_treebank`.

    Returns:
        A message for each line that cannot be read, with its number; none if most lines cannot be read, because trees
        then stand on several lines.
    """
    problems, num_lines = [], 0
    for number, line in enumerate(read_lines(path), 1):
        if line.strip() and not MARKUP.fullmatch(line):
            num_lines += 1
            try:
                list(parse_treebank([line], source=f"line {number}", **options))
            except ValueError as error:
                problems.append(str(error).replace(f"line {number}:1: ", f"line {number}: "))
    return problems if 2 * len(problems) <= num_lines else []


def count_tags(paths: Iterable[PathLike], **reading: Any) -> Counter[str]:
    """Count the tags in treebanks.

    Args:
        paths: the files.
        **reading: options of `read_treebank`.

    Returns:
        The counts of the words that `read_treebank` gives.

    Raises:
        ValueError: as `read_treebank`.
    """
    return Counter(tag for path in paths for sentence in read_treebank(path, **reading) for tag in sentence.tags)


def _flatten(
    root: Node, source: str, separators: str, empty_tags: Collection[str], drop_labels: Collection[str]
) -> TreebankSentence:
    """List words, tags and labeled spans of a tree, without empty elements and the root wrapper."""
    line = root.line
    while root.label in ROOT_LABELS and len(root.children) == 1:
        root = root.children[0]
    words: list[str] = []
    tags: list[str] = []
    labeled_spans: list[tuple[str, int, int]] = []
    agenda: list[tuple[Node, int | None]] = [(root, None)]
    while agenda:
        node, start = agenda.pop()
        if start is not None:
            if len(words) > start:
                labeled_spans.append((clean_label(node.label, separators) or "ROOT", start, len(words)))
        elif node.words:
            tag = clean_label(node.label)
            if tag not in empty_tags:
                words.extend(node.words)
                tags.extend([tag] * len(node.words))
        else:
            agenda.append((node, len(words)))
            agenda.extend((child, None) for child in reversed(node.children))
    whole = (0, len(words))
    if root.label in ROOT_LABELS and len(labeled_spans) > 1 and labeled_spans[-2][1:] == whole:
        # Only one constituent is left in the wrapper.
        labeled_spans.pop()
    if drop_labels:
        labeled_spans = [span for span in labeled_spans if span[0] not in drop_labels]
    if words and (not labeled_spans or labeled_spans[-1][1:] != whole):
        labeled_spans.append(("ROOT", *whole))
    return TreebankSentence(tuple(words), tuple(tags), tuple(labeled_spans), f"{source}:{line}")


def sentence_to_brackets(sentence: TreebankSentence) -> str:
    """Write a sentence with its labels and tags, as `read_treebank` reads it.

    Args:
        sentence: of a treebank.

    Returns:
        One line, such as `(S (NP (DT The) (NN cat)) (VP (VBZ sleeps)))`.
    """
    tags = [(tag, at, at + 1) for at, tag in enumerate(sentence.tags)]
    return labeled_spans_to_brackets([*tags, *sentence.labeled_spans], sentence.words)


def binarize_sentence(sentence: TreebankSentence, direction: Literal["right", "left"]) -> TreebankSentence:
    """Make the tree of a sentence binary. A new constituent has the label of the constituent around it.

    Args:
        sentence: of a treebank.
        direction: the side on which the other children are grouped.

    Returns:
        The sentence with further constituents; unary chains stay.
    """
    count = len(sentence.words)
    if count < 2:
        return sentence
    known = {(i, j): label for label, i, j in sentence.labeled_spans}  # of a unary chain the highest
    inner = list({span for span in known if span[1] - span[0] > 1} | {(0, count)})
    labeled = list(sentence.labeled_spans)
    for i, j in binarize_spans(inner, count, direction):
        if (i, j) not in known:
            around = min((b - a, a, b) for a, b in known if a <= i and j <= b)
            labeled.append((known[around[1:]], i, j))
    # Stable: unary chains keep their order, from bottom to top.
    labeled.sort(key=lambda constituent: (constituent[2], -constituent[1]))
    return dataclasses.replace(sentence, labeled_spans=tuple(labeled))


def to_ptb_concat(sentence: TreebankSentence) -> TreebankSentence | None:
    r"""Bring a sentence of the Penn Treebank to the form of PTB-Concat (Mikolov et al. 2010), with its tree.

    Words become lower case and numbers N; punctuation is removed, and with it the constituents that contain nothing
    else. The vocabulary is left to `word_tokenizer(..., vocab_size=10_001, end_token=True)`, the 10,000 types and
    padding: other words become `<unk>`. With the trees of its sentences the corpus is called PTB-Concat-Syn (Du et al.
    2020). (PTB-Sepsent of Dyer et al. 2016 keeps punctuation and case: use `read_treebank` alone, and
    `word_tokenizer(..., unknown="berkeley2", min_count=2, end_token=True)`.)

    Source: Du et al. (2020), appendix A.3, steps 1 to 6, with three differences that give the published text. Of the
    3,914 sentences of the 10 % sample of the treebank in NLTK, 3,907 come out as in Mikolov's training file, token for
    token (79 % by the letter of the appendix, whose last step corrects the rest by hand).

    * Not `$` but `%` becomes N: `$` is a word of the published text, `%` is not.
    * Numbers are all tokens of digits and the characters `. , : - \ /`, such as 1,200, 3\/4 and 1:30.
    * The apostrophe is removed where it closes a quotation (tag `''`).

    Args:
        sentence: a sentence of `read_treebank`, without empty elements and function tags.

    Returns:
        The sentence, its spans counted in the remaining words; `None` if no word remains.
    """
    words = [word.lower() for word in sentence.words]
    words = ["N" if _PTB_NUMBER.fullmatch(word) else word for word in words]
    keep = [
        word not in _PTB_DROPPED_WORDS and (word, tag) not in _PTB_DROPPED_PAIRS
        for word, tag in zip(words, sentence.tags, strict=True)
    ]
    if not any(keep):
        return None
    return dataclasses.replace(sentence, words=tuple(words)).select_words(keep)
