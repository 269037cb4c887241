"""Labeled bracketing scores as the program EVALB (Sekine and Collins) computes and prints them.

With m matched, g gold and t test brackets summed over the valid sentences: recall = m / g, precision = m / t,
F1 = 2 m / (g + t). Brackets match that have the same words under them and labels that count as equal. What is left out
(the root, traces, punctuation) and which labels are equal is in `EvalbParameters`; the defaults are COLLINS.prm, by
which F1 on the Penn Treebank is reported.

Three habits of EVALB to know: a sentence without a prediction is left out, not counted as wrong; a sentence whose words
differ from the gold ones is left out, too; and words are deleted by their tag, each side by its own tags, so that
predictions should carry the gold tags (here they do unless others are given).

Source: evalb.c of EVALB 20080701 (public domain).
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal

from hf_synlm.data.text import PathLike, read_lines
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.trees import Span

Bracket = tuple[str, int, int]
Status = Literal["valid", "error", "skipped"]

_STATUS_CODE: dict[Status, int] = {"valid": 0, "error": 1, "skipped": 2}
_QUOTES = frozenset(("'", '"', "/"))
_LABEL_END = re.compile("[-=]")
# A closing bracket, an opening one with its label and, if a word follows, the word and its closing bracket, or rubbish.
_ELEMENT = re.compile(r"\)|\(([^\s()]*)(?:\s+([^\s()]+)\s*\))?|[^\s()]+")
_RULE = "=" * 76
_HEAD = (
    "  Sent.                        Matched  Bracket   Cross        Correct Tag\n"
    " ID  Len.  Stat. Recal  Prec.  Bracket gold test Bracket Words  Tags Accracy\n"
)


@dataclasses.dataclass(frozen=True)
class EvalbParameters:
    """What EVALB reads from a parameter file; the defaults are COLLINS.prm.

    Attributes:
        delete_labels: brackets with these labels are not counted, and words with these tags are removed.
        delete_labels_for_length: words with these tags do not count for the length of a sentence.
        equal_labels: pairs of labels that match each other.
        equal_words: pairs of words that match each other.
        quote_labels: tags among which a quotation mark may be confused: where gold and test disagree on one and only
            one side would delete it, it stays.
        labeled: False compares brackets without their labels.
        cutoff_length: the second summary is over the sentences of at most this length.
        max_errors: more sentences than this and one whose words differ stop the evaluation, as in EVALB.
    """

    delete_labels: tuple[str, ...] = ("TOP", "-NONE-", ",", ":", "``", "''", ".")
    delete_labels_for_length: tuple[str, ...] = ("-NONE-",)
    equal_labels: tuple[tuple[str, str], ...] = (("ADVP", "PRT"),)
    equal_words: tuple[tuple[str, str], ...] = ()
    quote_labels: tuple[str, ...] = ()
    labeled: bool = True
    cutoff_length: int = 40
    max_errors: int = 10

    @classmethod
    def read(cls, path: PathLike) -> "EvalbParameters":
        """Read a parameter file (.prm) of EVALB.

        Args:
            path: the file. What it does not set is empty, as in EVALB, not as in COLLINS.prm.

        Returns:
            The parameters.

        Raises:
            ValueError: an unknown keyword or a value that does not fit; the message names file and line.
        """
        lists: dict[str, list] = {name: [] for name in _LIST_KEYWORDS.values()}
        numbers = {"labeled": 1, "cutoff_length": 40, "max_errors": 10, "debug": 0}
        for number, line in enumerate(read_lines(path), start=1):
            if line.startswith("#") or not line.strip():
                continue
            keyword, *values = line.split()
            if keyword in _LIST_KEYWORDS:
                name = _LIST_KEYWORDS[keyword]
                count = 2 if name.startswith("equal") else 1
                lists[name].append(tuple(values) if count == 2 else values[0] if values else None)
                is_right = len(values) == count
            elif keyword in _NUMBER_KEYWORDS:
                is_right = len(values) == 1 and values[0].isdecimal()
                numbers[_NUMBER_KEYWORDS[keyword]] = int(values[0]) if is_right else 0
            else:
                known = ", ".join((*_LIST_KEYWORDS, *_NUMBER_KEYWORDS))
                raise ValueError(f"{path}:{number}: {keyword!r} is no parameter of EVALB: use one of {known}")
            if not is_right:
                raise ValueError(f"{path}:{number}: {line.strip()!r}: the value of {keyword} does not fit")
        return cls(
            **{name: tuple(values) for name, values in lists.items()},
            labeled=bool(numbers["labeled"]),
            cutoff_length=numbers["cutoff_length"],
            max_errors=numbers["max_errors"],
        )

    def same_label(self, left: str, right: str) -> bool:
        """Tell whether two labels count as equal."""
        return left == right or (left, right) in self.equal_labels or (right, left) in self.equal_labels

    def same_word(self, left: str, right: str) -> bool:
        """Tell whether two words count as equal."""
        return left == right or (left, right) in self.equal_words or (right, left) in self.equal_words


_LIST_KEYWORDS = {
    "DELETE_LABEL": "delete_labels",
    "DELETE_LABEL_FOR_LENGTH": "delete_labels_for_length",
    "EQ_LABEL": "equal_labels",
    "EQ_WORD": "equal_words",
    "QUOTE_LABEL": "quote_labels",
}
_NUMBER_KEYWORDS = {
    "LABELED": "labeled",
    "CUTOFF_LEN": "cutoff_length",
    "MAX_ERROR": "max_errors",
    "DEBUG": "debug",
}
COLLINS = EvalbParameters()


@dataclasses.dataclass(frozen=True)
class EvalbTree:
    """One side of a comparison: nothing is deleted from it yet.

    Attributes:
        words: the words, traces included.
        tags: the tag of each word.
        brackets: (label, i, j) of every constituent, half-open, in the order in which they open.
    """

    words: tuple[str, ...]
    tags: tuple[str, ...]
    brackets: tuple[Bracket, ...]

    @classmethod
    def from_line(cls, line: str, where: str = "<text>") -> "EvalbTree":
        """Read a line of a file as EVALB does: one sentence, of one tree, several, or none.

        Args:
            line: bracketed trees, e.g. "(S (NP (DT the) (NN cat)) (VP (VBZ sleeps)))".
            where: name for error messages.

        Returns:
            The tree; it has no words if the line is blank.

        Raises:
            ValueError: the brackets are malformed.
        """
        words: list[str] = []
        tags: list[str] = []
        brackets: list[Bracket] = []
        open_brackets: list[int] = []
        for element in _ELEMENT.finditer(line):
            label, word = element.groups()
            if label is None and element[0] == ")":
                if not open_brackets:
                    raise ValueError(f"{where}: ')' closes nothing: remove it or add its '('")
                index = open_brackets.pop()
                brackets[index] = (*brackets[index][:2], len(words))
            elif label is None:
                raise ValueError(f"{where}: {element[0]!r} has no bracket of its own: write it as (TAG {element[0]})")
            elif word is None:
                open_brackets.append(len(brackets))
                brackets.append((label, len(words), len(words)))
            else:
                words.append(word)
                tags.append(label)
        if open_brackets:
            raise ValueError(f"{where}: '(' of {brackets[open_brackets[-1]][0]!r} is never closed: add its ')'")
        return cls(tuple(words), tuple(tags), tuple(brackets))

    @classmethod
    def from_spans(
        cls, words: Sequence[str], tags: Sequence[str], labels: Sequence[str], spans: Sequence[Span]
    ) -> "EvalbTree":
        """Put a tree together from what a parser gives.

        Args:
            words: the n words.
            tags: one tag per word.
            labels: one label per span.
            spans: half-open word spans in post-order (unary chains from the bottom to the top).

        Returns:
            The tree.

        Raises:
            ValueError: lengths that do not fit, or a span outside the sentence.
        """
        if len(tags) != len(words) or len(labels) != len(spans):
            raise ValueError(
                f"{len(words)} words have {len(tags)} tags, and {len(spans)} spans have {len(labels)} labels: "
                "give one tag per word and one label per span"
            )
        for i, j in spans:
            if not 0 <= i < j <= len(words):
                raise ValueError(f"span ({i}, {j}) does not fit into {len(words)} words: spans are half-open, in words")
        brackets = [(label, i, j) for label, (i, j) in zip(labels, spans, strict=True)]
        opening = sorted(reversed(brackets), key=lambda bracket: (bracket[1], -bracket[2]))
        return cls(tuple(words), tuple(tags), tuple(opening))

    @classmethod
    def from_sentence(cls, sentence: TreebankSentence) -> "EvalbTree":
        """Convert a sentence of a treebank.

        Args:
            sentence: as `read_treebank` gives it. Its cleaning agrees with EVALB's, except that it also cuts labels
                at "|" (ADVP|PRT becomes ADVP); read with `keep_functions=True` to leave all cutting to EVALB.

        Returns:
            The tree.
        """
        spans = [(i, j) for _, i, j in sentence.labeled_spans]
        return cls.from_spans(sentence.words, sentence.tags, [label for label, _, _ in sentence.labeled_spans], spans)


@dataclasses.dataclass(frozen=True)
class EvalbSentence:
    """Counts of one sentence.

    Attributes:
        status: "valid"; "error" if the words differ; "skipped" if there is no prediction. Only valid ones count.
        length: number of gold words.
        matched: number of brackets in both trees.
        gold: number of brackets of the gold tree.
        test: number of brackets of the predicted tree.
        crossing: number of predicted brackets that cross a gold one.
        words: number of words left after deletion.
        correct_tags: number of these whose predicted tag is right.
        reason: what is wrong with an "error" sentence.
    """

    status: Status
    length: int
    matched: int = 0
    gold: int = 0
    test: int = 0
    crossing: int = 0
    words: int = 0
    correct_tags: int = 0
    reason: str = ""

    @property
    def is_complete(self) -> bool:
        """True if both trees have the same brackets."""
        return self.status == "valid" and self.matched == self.gold == self.test


@dataclasses.dataclass(frozen=True)
class EvalbSummary:
    """Scores over a set of sentences, as fractions in 0..1; 0 where nothing is counted.

    Attributes:
        name: which sentences.
        num_sentences: all of them.
        num_errors: sentences left out because their words differ.
        num_skipped: sentences left out because they have no prediction.
        num_valid: sentences scored.
        recall: matched / gold brackets.
        precision: matched / predicted brackets.
        f1: harmonic mean of the two.
        complete_match: share of the valid sentences with the gold brackets exactly.
        average_crossing: crossing brackets per valid sentence (not a share).
        no_crossing: share of the valid sentences without crossing brackets.
        two_or_less_crossing: share of those with at most two.
        tagging_accuracy: share of the words with the gold tag; 1 where predictions carry the gold tags.
    """

    name: str
    num_sentences: int
    num_errors: int
    num_skipped: int
    num_valid: int
    recall: float
    precision: float
    f1: float
    complete_match: float
    average_crossing: float
    no_crossing: float
    two_or_less_crossing: float
    tagging_accuracy: float

    @classmethod
    def of(cls, name: str, sentences: Iterable[EvalbSentence]) -> "EvalbSummary":
        """Pool the counts of sentences.

        Args:
            name: which sentences these are.
            sentences: their counts.

        Returns:
            The scores.
        """
        sentences = list(sentences)
        valid = [sentence for sentence in sentences if sentence.status == "valid"]
        matched, gold = sum(s.matched for s in valid), sum(s.gold for s in valid)
        test, words = sum(s.test for s in valid), sum(s.words for s in valid)
        return cls(
            name=name,
            num_sentences=len(sentences),
            num_errors=sum(s.status == "error" for s in sentences),
            num_skipped=sum(s.status == "skipped" for s in sentences),
            num_valid=len(valid),
            recall=_ratio(matched, gold),
            precision=_ratio(matched, test),
            f1=_ratio(2 * matched, gold + test),
            complete_match=_ratio(sum(s.is_complete for s in valid), len(valid)),
            average_crossing=_ratio(sum(s.crossing for s in valid), len(valid)),
            no_crossing=_ratio(sum(s.crossing == 0 for s in valid), len(valid)),
            two_or_less_crossing=_ratio(sum(s.crossing <= 2 for s in valid), len(valid)),
            tagging_accuracy=_ratio(sum(s.correct_tags for s in valid), words),
        )

    def __str__(self) -> str:
        return "\n".join(
            (
                f"-- {self.name} --",
                f"Number of sentence        = {self.num_sentences:6d}",
                f"Number of Error sentence  = {self.num_errors:6d}",
                f"Number of Skip  sentence  = {self.num_skipped:6d}",
                f"Number of Valid sentence  = {self.num_valid:6d}",
                f"Bracketing Recall         = {100 * self.recall:6.2f}",
                f"Bracketing Precision      = {100 * self.precision:6.2f}",
                f"Bracketing FMeasure       = {100 * self.f1:6.2f}",
                f"Complete match            = {100 * self.complete_match:6.2f}",
                f"Average crossing          = {self.average_crossing:6.2f}",
                f"No crossing               = {100 * self.no_crossing:6.2f}",
                f"2 or less crossing        = {100 * self.two_or_less_crossing:6.2f}",
                f"Tagging accuracy          = {100 * self.tagging_accuracy:6.2f}",
            )
        )


@dataclasses.dataclass(frozen=True)
class EvalbScores:
    """Result of an evaluation; `str()` prints EVALB's summary.

    Attributes:
        overall: scores over all sentences.
        short: scores over the sentences of at most `cutoff_length` words.
        sentences: counts of each sentence, in order.
    """

    overall: EvalbSummary
    short: EvalbSummary
    sentences: tuple[EvalbSentence, ...] = dataclasses.field(repr=False)

    @property
    def precision(self) -> float:
        """Labeled precision over all sentences, 0..1."""
        return self.overall.precision

    @property
    def recall(self) -> float:
        """Labeled recall over all sentences, 0..1."""
        return self.overall.recall

    @property
    def f1(self) -> float:
        """Labeled F1 over all sentences, 0..1: the number that papers report (in percent)."""
        return self.overall.f1

    def __str__(self) -> str:
        return f"=== Summary ===\n\n{self.overall}\n\n{self.short}"

    def report(self) -> str:
        """EVALB's whole output: a line per sentence, the totals, the summary."""
        lines = [_row(number, sentence) for number, sentence in enumerate(self.sentences, start=1)]
        valid = [sentence for sentence in self.sentences if sentence.status == "valid"]
        names = ("matched", "gold", "test", "crossing", "words", "correct_tags")
        matched, gold, test, crossing, words, tags = (sum(getattr(s, name) for s in valid) for name in names)
        total = (
            f"                {100 * self.recall:6.2f} {100 * self.precision:6.2f} {matched:6d} {gold:5d} {test:5d}  "
            f"{crossing:5d}  {words:5d} {tags:5d}   {100 * self.overall.tagging_accuracy:6.2f}"
        )
        return _HEAD + "\n".join((_RULE, *lines, _RULE, total, str(self)))


def _row(number: int, sentence: EvalbSentence) -> str:
    """The line of one sentence in EVALB's output."""
    return (
        f"{number:4d}  {sentence.length:3d}    {_STATUS_CODE[sentence.status]}  "
        f"{100 * _ratio(sentence.matched, sentence.gold):6.2f} {100 * _ratio(sentence.matched, sentence.test):6.2f}   "
        f"{sentence.matched:3d}    {sentence.gold:3d}  {sentence.test:3d}    {sentence.crossing:3d}   "
        f"{sentence.words:4d}  {sentence.correct_tags:4d}   {100 * _ratio(sentence.correct_tags, sentence.words):6.2f}"
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# --------------------------------------------------------------------------------------------------- evaluation
def labeled_f1(
    predicted: Sequence[tuple[Sequence[str], Sequence[Span]] | TreebankSentence | EvalbTree | None],
    gold: Sequence[TreebankSentence | EvalbTree],
    parameters: EvalbParameters = COLLINS,
) -> EvalbScores:
    """Score predicted labeled trees against gold trees.

    Args:
        predicted: per sentence (labels, spans): one label per half-open span over the gold words, in post-order, unary
            chains as repeated spans (see `word_brackets` for trees over word pieces). Or a tree with words and tags of
            its own. None stands for a sentence that got no parse: like EVALB, it is left out of all scores and counted
            in `num_skipped`; give ([], []) to have its gold brackets counted as missed.
        gold: the gold trees.
        parameters: what to count; the default is COLLINS.prm.

    Returns:
        The scores.

    Raises:
        ValueError: different numbers of sentences, spans outside of their sentence (the message names the sentence),
            more than `max_errors` sentences whose words differ.

    Cost: per sentence O(gold brackets x predicted brackets).
    """
    if len(predicted) != len(gold):
        raise ValueError(f"there are {len(predicted)} predicted and {len(gold)} gold trees: give one per sentence")
    sentences: list[EvalbSentence] = []
    num_errors = 0
    for number, (prediction, truth) in enumerate(zip(predicted, gold, strict=True)):
        gold_tree = EvalbTree.from_sentence(truth) if isinstance(truth, TreebankSentence) else truth
        if prediction is None:
            test_tree = EvalbTree((), (), ())
        elif isinstance(prediction, TreebankSentence):
            test_tree = EvalbTree.from_sentence(prediction)
        elif isinstance(prediction, EvalbTree):
            test_tree = prediction
        else:
            labels, spans = prediction
            try:
                test_tree = EvalbTree.from_spans(gold_tree.words, gold_tree.tags, labels, spans)
            except ValueError as error:
                raise ValueError(f"prediction for sentence {number}: {error}") from error
        sentences.append(score_sentence(test_tree, gold_tree, parameters))
        num_errors += sentences[-1].status == "error"
        if num_errors > parameters.max_errors + 1:  # EVALB looks at its counter before it counts
            raise ValueError(
                f"the words of more than {parameters.max_errors + 1} sentences differ from the gold words, the last is "
                f"sentence {number} ({sentences[-1].reason}): score trees over the same words, or raise max_errors"
            )
    cutoff = parameters.cutoff_length
    return EvalbScores(
        overall=EvalbSummary.of("All", sentences),
        short=EvalbSummary.of(f"len<={cutoff}", [s for s in sentences if s.length <= cutoff]),
        sentences=tuple(sentences),
    )


def evaluate_files(gold: PathLike, test: PathLike, parameters: EvalbParameters = COLLINS) -> EvalbScores:
    """Do what `evalb -p PARAMETERS GOLD TEST` does.

    Args:
        gold: file with one gold tree per line.
        test: file with one predicted tree per line; a blank line is a sentence without a parse.
        parameters: what to count.

    Returns:
        The scores; `report()` gives EVALB's output.

    Raises:
        ValueError: different numbers of lines, malformed brackets, or see `labeled_f1`.
    """
    gold_trees, test_trees = (
        [EvalbTree.from_line(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), start=1)]
        for path in (gold, test)
    )
    if len(gold_trees) != len(test_trees):
        raise ValueError(f"{gold} has {len(gold_trees)} lines and {test} {len(test_trees)}: give one tree per line")
    return labeled_f1(test_trees, gold_trees, parameters)


def score_sentence(test: EvalbTree, gold: EvalbTree, parameters: EvalbParameters = COLLINS) -> EvalbSentence:
    """Compare the predicted tree of one sentence with the gold tree.

    Args:
        test: the predicted tree.
        gold: the gold tree.
        parameters: what to count.

    Returns:
        The counts.
    """
    length = sum(tag not in parameters.delete_labels_for_length for tag in gold.tags)
    sides = {"gold": gold, "test": test}
    kept = {name: [tag not in parameters.delete_labels for tag in tree.tags] for name, tree in sides.items()}
    if not any(kept["test"]):
        return EvalbSentence("skipped", length)
    if sum(kept["gold"]) != sum(kept["test"]):
        _keep_confused_quotes(sides, kept, parameters)
    words, tags = (
        {
            name: [x for x, keep in zip(getattr(tree, part), kept[name], strict=True) if keep]
            for name, tree in sides.items()
        }
        for part in ("words", "tags")
    )
    reason = _difference(words["gold"], words["test"], parameters)
    if reason:
        return EvalbSentence("error", length, reason=reason)
    gold_brackets, test_brackets = (_counted_brackets(tree, kept[name], parameters) for name, tree in sides.items())
    return EvalbSentence(
        "valid",
        length,
        matched=_count_matches(gold_brackets, test_brackets, parameters),
        gold=len(gold_brackets),
        test=len(test_brackets),
        crossing=sum(any(_cross(mine, other) for other in gold_brackets) for mine in test_brackets),
        words=len(words["gold"]),
        correct_tags=sum(map(parameters.same_label, tags["gold"], tags["test"])),
    )


def _difference(gold: Sequence[str], test: Sequence[str], parameters: EvalbParameters) -> str:
    """Say where the words of two trees differ; empty if they agree."""
    if len(gold) != len(test):
        return f"{len(gold)} gold words, {len(test)} predicted"
    for mine, other in zip(gold, test, strict=True):
        if not parameters.same_word(mine, other):
            return f"gold word {mine!r}, predicted {other!r}"
    return ""


def _keep_confused_quotes(
    sides: dict[str, EvalbTree], kept: dict[str, list[bool]], parameters: EvalbParameters
) -> None:
    """Keep a quotation mark whose tags differ between the sides, if only one side would delete it."""
    marks = {}
    for name, tree in sides.items():
        positions = [
            position
            for position, (word, tag) in enumerate(zip(tree.words, tree.tags, strict=True))
            if word in _QUOTES and tag in parameters.quote_labels
        ]
        marks[name] = positions
    for mine in marks["test"]:
        # The place among the words kept so far says which marks of the two sides are the same one.
        place = sum(kept["test"][:mine])
        for other in marks["gold"]:
            if sum(kept["gold"][:other]) != place or sides["test"].tags[mine] == sides["gold"].tags[other]:
                continue
            if kept["test"][mine] != kept["gold"][other]:
                kept["test"][mine] = kept["gold"][other] = True
                break


def _counted_brackets(tree: EvalbTree, kept: Sequence[bool], parameters: EvalbParameters) -> list[Bracket]:
    """Brackets over the words kept, labels cut; without deleted labels and empty brackets."""
    before = [0]
    for keep in kept:
        before.append(before[-1] + keep)
    counted = []
    for label, i, j in tree.brackets:
        bare = _LABEL_END.split(label, maxsplit=1)[0]
        if before[i] < before[j] and not any(
            parameters.same_label(bare, deleted) for deleted in parameters.delete_labels
        ):
            counted.append((bare, before[i], before[j]))
    return counted


def _count_matches(gold: Sequence[Bracket], test: Sequence[Bracket], parameters: EvalbParameters) -> int:
    """Number of pairs, each gold bracket with the first predicted one that is left and fits."""
    left: defaultdict[Span, list[str]] = defaultdict(list)
    for label, i, j in test:
        left[i, j].append(label)
    matched = 0
    for label, i, j in gold:
        candidates = left[i, j]
        for index, candidate in enumerate(candidates):
            if not parameters.labeled or parameters.same_label(label, candidate):
                del candidates[index]
                matched += 1
                break
    return matched


def _cross(left: Bracket, right: Bracket) -> bool:
    (_, i, j), (_, k, m) = left, right
    return i < k < j < m or k < i < m < j


def word_brackets(
    spans: Sequence[Span], labels: Sequence[str], word_ends: Sequence[int], offset: int = 0
) -> list[Span]:
    """Turn spans over word pieces into spans over words.

    Args:
        spans: half-open token spans of one tree, as in `ParseOutput.spans[sentence][hypothesis]`.
        labels: one label per span.
        word_ends: the end (exclusive token position) of each word, as in `ParseOutput.word_ends[sentence]`.
        offset: token position at which the first word begins, as in `ParseOutput.offsets[sentence]`.

    Returns:
        The spans in words, aligned with `labels`; a constituent over one word keeps its width of 1.

    Raises:
        ValueError: a span begins or ends inside a word, or labels and spans do not fit.
    """
    if len(labels) != len(spans):
        raise ValueError(f"there are {len(spans)} spans and {len(labels)} labels: give one label per span")
    boundary = {position: word for word, position in enumerate((offset, *word_ends))}
    for label, (i, j) in zip(labels, spans, strict=True):
        if i not in boundary or j not in boundary:
            raise ValueError(f"{label} ({i}, {j}) begins or ends inside a word: words end at {list(word_ends)}")
    return [(boundary[i], boundary[j]) for i, j in spans]
