# SPDX-License-Identifier: Apache-2.0
"""Labeled bracketing scores as the program EVALB (Sekine and Collins) computes them.

With m matched, g gold and t test brackets summed over the valid sentences: recall = m / g, precision = m / t,
F1 = 2 m / (g + t). Brackets match that have the same words under them and labels that count as equal. What is left out
(the root, traces, punctuation) and which labels are equal is in `EvalbParameters`; the defaults are COLLINS.prm, by
which F1 on the Penn Treebank is reported.

Habits of EVALB: a sentence without a prediction is left out, not counted as wrong. A sentence whose words differ from
the gold words is left out, too. Words are deleted by their tag, each side by its own tags, so predictions should carry
the gold tags (here they do unless others are given). Labels are cut at - and =, but not at |: ADVP|PRT is another label
than ADVP. COLLINS.prm leaves out only the root label TOP. ROOT and S1 count as brackets.

Source: evalb.c of EVALB 20080701 (public domain).
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import accumulate, compress
from typing import Literal

from hf_synlm.data.parsed import tree_lines, trees_by_depth
from hf_synlm.data.punctuation import drop_marks
from hf_synlm.data.text import PathLike, plural, read_lines, read_lines_beside
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.trees.evalb_input import COLLINS, Bracket, EvalbParameters, EvalbTree
from hf_synlm.trees.spans import Span

Status = Literal["valid", "error", "skipped"]

_QUOTES = frozenset(("'", '"', "/"))
_LABEL_END = re.compile("[-=]")
_WITH_ALL = "only punctuation differs: give all of it, or use --punctuation remove, which is not EVALB's score"


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
        reason: why the sentence is an "error".
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


@dataclasses.dataclass(frozen=True)
class EvalbSummary:
    """Scores over a set of sentences, as fractions in 0..1; 0 if nothing is counted.

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
        tagging_accuracy: share of the words with the gold tag; 1 if predictions carry the gold tags.
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
        """Pool the counts of sentences; `name` says which they are."""
        sentences = list(sentences)
        valid = [sentence for sentence in sentences if sentence.status == "valid"]
        names = ("matched", "gold", "test", "crossing", "words", "correct_tags")
        matched, gold, test, crossing, words, tags = (sum(getattr(one, name) for one in valid) for name in names)
        return cls(
            name=name,
            num_sentences=len(sentences),
            num_errors=sum(s.status == "error" for s in sentences),
            num_skipped=sum(s.status == "skipped" for s in sentences),
            num_valid=len(valid),
            recall=_ratio(matched, gold),
            precision=_ratio(matched, test),
            f1=_ratio(2 * matched, gold + test),
            complete_match=_ratio(sum(s.matched == s.gold == s.test for s in valid), len(valid)),
            average_crossing=_ratio(crossing, len(valid)),
            no_crossing=_ratio(sum(s.crossing == 0 for s in valid), len(valid)),
            two_or_less_crossing=_ratio(sum(s.crossing <= 2 for s in valid), len(valid)),
            tagging_accuracy=_ratio(tags, words),
        )


@dataclasses.dataclass(frozen=True)
class EvalbScores:
    """Result of an evaluation.

    Attributes:
        overall: scores over all sentences.
        short: scores over the sentences of at most `cutoff_length` words.
        sentences: counts of each sentence, in order.
    """

    overall: EvalbSummary
    short: EvalbSummary
    sentences: tuple[EvalbSentence, ...] = dataclasses.field(repr=False)

    def left_out(self) -> str:
        """How many sentences do not count, and why."""
        reasons = [sentence.reason for sentence in self.sentences if sentence.reason]
        return (
            f"of {plural(len(self.sentences), 'sentence')}, EVALB leaves out {self.overall.num_skipped} without a tree "
            f"and {self.overall.num_errors} with other words" + "".join(f" ({why})" for why in reasons[:1])
        )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


# --------------------------------------------------------------------------------------------------- evaluation
def labeled_f1(
    predicted: Sequence[tuple[Sequence[str], Sequence[Span]] | EvalbTree],
    gold: Sequence[TreebankSentence | EvalbTree],
    parameters: EvalbParameters = COLLINS,
) -> EvalbScores:
    """Score predicted labeled trees against gold trees.

    Args:
        predicted: per sentence (labels, spans): one label per half-open span over the gold words, in post-order, unary
            chains as repeated spans. A prediction may also be a tree with its own words and tags. Without words, the
            sentence has no parse. As in EVALB, it is left out of all scores and counted in `num_skipped`. Give ([], [])
            to count its gold brackets as missed.
        gold: the gold trees.
        parameters: what to count; the default is COLLINS.prm. With its list of removed tags, PUNCT of Universal
            Dependencies is removed, too, which the program EVALB does not do.

    Returns:
        The scores.

    Raises:
        ValueError: different numbers of sentences, or more than `max_errors` sentences whose words differ.

    Cost: per sentence O(gold brackets x predicted brackets).
    """
    if parameters.delete_labels == COLLINS.delete_labels and any("PUNCT" in tree.tags for tree in gold):
        parameters = dataclasses.replace(parameters, delete_labels=(*parameters.delete_labels, "PUNCT"))
    sentences: list[EvalbSentence] = []
    num_errors = 0
    for number, (test, truth) in enumerate(zip(predicted, gold, strict=True)):
        gold_tree = EvalbTree.from_sentence(truth) if isinstance(truth, TreebankSentence) else truth
        if not isinstance(test, EvalbTree):
            test = EvalbTree.from_spans(gold_tree.words, gold_tree.tags, *test)
        sentences.append(score_sentence(test, gold_tree, parameters))
        num_errors += sentences[-1].status == "error"
        if num_errors > parameters.max_errors + 1:  # EVALB looks at its counter before it counts
            raise ValueError(
                f"the words of more than {parameters.max_errors + 1} sentences differ from the gold words. The last "
                f"of them is sentence {number} ({sentences[-1].reason}). Score trees over the same words, or raise "
                "max_errors (MAX_ERROR of a parameter file)"
            )
    cutoff = parameters.cutoff_length
    return EvalbScores(
        overall=EvalbSummary.of("All", sentences),
        short=EvalbSummary.of(f"len<={cutoff}", [s for s in sentences if s.length <= cutoff]),
        sentences=tuple(sentences),
    )


def evaluate_files(
    gold: PathLike, test: PathLike, parameters: EvalbParameters = COLLINS, max_sentences: int | None = None
) -> EvalbScores:
    """Do what `evalb -p PARAMETERS GOLD TEST` does.

    Args:
        gold: file with one gold tree per line, or with trees of several lines, as `tree_lines` reads them.
        test: file of predicted trees; a blank line between trees of one line is a sentence without a parse.
        parameters: what to count.
        max_sentences: score at most this many first sentences.

    Returns:
        The scores.

    Raises:
        ValueError: different numbers of trees, malformed brackets, or see `labeled_f1`.
    """
    gold_lines = list(read_lines(gold))
    gold_trees, test_trees = (
        [EvalbTree.from_line(line, f"{path}:{number}") for number, line in tree_lines(lines)]
        for path, lines in ((gold, gold_lines), (test, read_lines_beside(test)))
    )
    if len(gold_trees) != len(test_trees):  # several gold trees may stand on a line, and blank lines say nothing
        gold_trees = [EvalbTree.from_line(line, f"{gold}:{number}") for number, line in trees_by_depth(gold_lines)]
    gold_trees, test_trees = gold_trees[:max_sentences], test_trees[:max_sentences]
    if len(gold_trees) != len(test_trees):
        raise ValueError(f"{gold} has {len(gold_trees)} lines and {test} {len(test_trees)}. Give one tree per line")
    return labeled_f1(test_trees, gold_trees, parameters)


def score_sentence(test: EvalbTree, gold: EvalbTree, parameters: EvalbParameters = COLLINS) -> EvalbSentence:
    """Compare the predicted tree of one sentence with the gold tree."""
    length = sum(tag not in parameters.delete_labels_for_length for tag in gold.tags)
    gold_kept, test_kept = ([tag not in parameters.delete_labels for tag in tree.tags] for tree in (gold, test))
    if not any(test_kept):
        return EvalbSentence("skipped", length)
    if sum(gold_kept) != sum(test_kept):
        _keep_confused_quotes(gold, gold_kept, test, test_kept, parameters)
    words = list(compress(gold.words, gold_kept))
    reason = _difference(words, list(compress(test.words, test_kept)), parameters)
    if reason and gold.words != test.words and drop_marks(gold.words) == drop_marks(test.words):
        is_read = all(i < j for tree in (gold, test) for _, i, j in tree.brackets)
        reason += f"; {_WITH_ALL if is_read else 'EVALB takes ( and ) for brackets: write words as -LRB- and -RRB-'}"
    if reason:
        return EvalbSentence("error", length, reason=reason)
    gold_brackets = _counted_brackets(gold, gold_kept, parameters)
    test_brackets = _counted_brackets(test, test_kept, parameters)
    return EvalbSentence(
        "valid",
        length,
        matched=_count_matches(gold_brackets, test_brackets, parameters),
        gold=len(gold_brackets),
        test=len(test_brackets),
        crossing=sum(any(_cross(mine, other) for other in gold_brackets) for mine in test_brackets),
        words=len(words),
        correct_tags=sum(map(parameters.same_label, compress(gold.tags, gold_kept), compress(test.tags, test_kept))),
    )


def _difference(gold: Sequence[str], test: Sequence[str], parameters: EvalbParameters) -> str:
    """Where the words of two trees differ; empty if they agree."""
    if len(gold) != len(test):
        return f"{len(gold)} gold words, {len(test)} predicted"
    for mine, other in zip(gold, test, strict=True):
        if not parameters.same_word(mine, other):
            return f"gold word {mine!r}, predicted {other!r}"
    return ""


def _keep_confused_quotes(
    gold: EvalbTree, gold_kept: list[bool], test: EvalbTree, test_kept: list[bool], parameters: EvalbParameters
) -> None:
    """Keep a quotation mark whose tags differ between the sides, if only one side would delete it."""

    def quotes(tree: EvalbTree) -> list[int]:
        pairs = enumerate(zip(tree.words, tree.tags, strict=True))
        return [place for place, (word, tag) in pairs if word in _QUOTES and tag in parameters.quote_labels]

    for mine in quotes(test):
        # Two marks are the same one if the same number of words before them is kept.
        num_before = sum(test_kept[:mine])
        for other in quotes(gold):
            is_same = sum(gold_kept[:other]) == num_before and test.tags[mine] != gold.tags[other]
            if is_same and test_kept[mine] != gold_kept[other]:
                test_kept[mine] = gold_kept[other] = True
                break


def _counted_brackets(tree: EvalbTree, kept: Sequence[bool], parameters: EvalbParameters) -> list[Bracket]:
    """Brackets over the words kept, labels cut; without deleted labels and empty brackets."""
    before = list(accumulate(kept, initial=0))
    counted = []
    for label, i, j in tree.brackets:
        bare = _LABEL_END.split(label, maxsplit=1)[0]
        is_deleted = any(parameters.same_label(bare, deleted) for deleted in parameters.delete_labels)
        if before[i] < before[j] and not is_deleted:
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
