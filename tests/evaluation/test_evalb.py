"""The scorer reproduces EVALB's own outputs, and counts what it says it counts."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hf_synlm.data.treebank import parse_treebank, read_treebank
from hf_synlm.evaluation.trees import evalb
from tests.helpers.refusals import refused

GOLDENS = Path(__file__).parents[1] / "goldens" / "evalb"
GOLD = "(TOP (S (NP-SBJ (DT the) (NN cat)) (VP (VBD sat) (PRT (RP down)) (NP (-NONE- *T*))) (. .)))"
NUMBER_OF = re.compile(r"(.*?)\s*=\s*([\d.]+)")
FIELDS = {
    "Number of sentence": "num_sentences", "Number of Error sentence": "num_errors",
    "Number of Skip  sentence": "num_skipped", "Number of Valid sentence": "num_valid", "Bracketing Recall": "recall",
    "Bracketing Precision": "precision", "Bracketing FMeasure": "f1", "Complete match": "complete_match",
    "Average crossing": "average_crossing", "No crossing": "no_crossing",
    "2 or less crossing": "two_or_less_crossing", "Tagging accuracy": "tagging_accuracy",
}  # fmt: skip


def rows(text):
    """The per-sentence lines of EVALB's output: status, length and counts."""
    fields = [line.split() for line in text.splitlines()]
    found = [[float(x) for x in line] for line in fields if len(line) == 12 and line[0].isdecimal()]
    return [[row[2], row[1], *row[5:11]] for row in found]


@pytest.mark.parametrize(
    ("data", "parameters", "expected"),
    [("sample", "sample.prm", "sample.rsl"), ("bug", "new.prm", "bug.rsl-new"), ("bug", "COLLINS.prm", "bug.rsl-old")],
)
def test_numbers_of_evalb(data, parameters, expected):
    scores = evalb.evaluate_files(
        GOLDENS / f"{data}.gld", GOLDENS / f"{data}.tst", evalb.EvalbParameters.read(GOLDENS / parameters)
    )
    text = (GOLDENS / expected).read_text()
    assert len(scores.sentences) == len(rows(text)) > 0
    for own, row in zip(scores.sentences, rows(text), strict=True):
        if row[0] and data == "sample":
            row[6] = 0.0  # an older release gave sentences that are left out a number of words
        status = ("valid", "error", "skipped").index(own.status)
        counts = (own.matched, own.gold, own.test, own.crossing, own.words, own.correct_tags)
        assert [status, own.length, *counts] == row
    stated = [match.groups() for match in map(NUMBER_OF.fullmatch, text.splitlines()) if match]
    for part, numbers in ((scores.overall, stated[: len(stated) // 2]), (scores.short, stated[len(stated) // 2 :])):
        assert len(numbers) >= 11  # no F measure in some, or not a number
        for title, number in numbers:
            value = getattr(part, FIELDS[title])
            scale = 1 if isinstance(value, int) or title == "Average crossing" else 100
            assert float(number) == round(scale * value, 2)


def test_default_parameters_are_collins():
    assert evalb.EvalbParameters.read(GOLDENS / "COLLINS.prm") == evalb.COLLINS == evalb.EvalbParameters()


def score(test, gold=GOLD, parameters=evalb.COLLINS):
    return evalb.score_sentence(evalb.EvalbTree.from_line(test), evalb.EvalbTree.from_line(gold), parameters)


def test_collins_rules():
    counts = score("(S1 (S (NP (DT the) (NN cat)) (VP (VBD sat) (ADVP (RB down))) (. .)))")
    # S, NP, VP and PRT in gold: no TOP, no trace, no full stop. S1 is no TOP: COLLINS.prm counts it.
    assert (counts.gold, counts.test, counts.matched) == (4, 5, 4)
    assert (counts.length, counts.words, counts.correct_tags, counts.crossing) == (5, 4, 3, 0)
    relabeled = "(S (NP (DT the) (NN cat)) (X (VBD sat) (ADVP (RB down))) (. .))"
    assert score(relabeled).matched == 3
    assert score(relabeled, parameters=replace(evalb.COLLINS, labeled=False)).matched == 4
    assert score("(S (NP (DT the)) (VP (NN cat) (VBD sat)) (RP down) (. .))").crossing == 1


def test_sentences_left_out():
    gold = [evalb.EvalbTree.from_line(GOLD)] * 3
    other, none = evalb.EvalbTree.from_line(GOLD.replace("cat", "dog")), evalb.EvalbTree.from_line("")
    scores = evalb.labeled_f1([none, other, gold[0]], gold)
    assert [sentence.status for sentence in scores.sentences] == ["skipped", "error", "valid"]
    assert "'cat', predicted 'dog'" in scores.sentences[1].reason
    assert (scores.overall.f1, scores.overall.num_valid, scores.overall.complete_match) == (1.0, 1, 1.0)
    missed = evalb.labeled_f1([([], []), gold[1], gold[2]], gold)
    assert (missed.overall.recall, missed.overall.precision, missed.overall.num_skipped) == (2 / 3, 1.0, 0)
    with pytest.raises(ValueError, match=r"more than 1 sentences.*sentence 1 .*max_errors"):
        evalb.labeled_f1([other, other, none], gold, replace(evalb.COLLINS, max_errors=0))


def test_unary_chains_count_every_copy():
    (gold,) = parse_treebank(["(S (NP (NP (NN a))) (VP (VB b)))"])
    assert [label for label, _, _ in gold.labeled_spans] == ["NP", "NP", "VP", "S"]
    scores = evalb.labeled_f1([(["NP", "VP", "S"], [(0, 1), (1, 2), (0, 2)])], [gold])
    assert (scores.overall.recall, scores.overall.precision) == (3 / 4, 1.0)
    opening = evalb.EvalbTree.from_sentence(gold).brackets
    assert opening == evalb.EvalbTree.from_line("(S (NP (NP (NN a))) (VP (VB b)))").brackets


def test_treebank_sentences_score_as_files():
    parameters = evalb.EvalbParameters.read(GOLDENS / "new.prm")
    gold, test = (list(read_treebank(GOLDENS / name)) for name in ("bug.gld", "bug.tst"))
    from_files = evalb.evaluate_files(GOLDENS / "bug.gld", GOLDENS / "bug.tst", parameters)
    assert (
        evalb.labeled_f1(list(map(evalb.EvalbTree.from_sentence, test)), gold, parameters).sentences
        == from_files.sentences
    )


BAD_PARAMETERS = [
    ("DELETE_LABEL TOP\nDELTE_LABEL X", r"prm:2: 'DELTE_LABEL' is not a parameter"),
    ("LABELED yes", r"prm:1: .*value of LABELED"),
    ("# comment\n\nEQ_LABEL ADVP", r"prm:3: .*value of EQ_LABEL"),
    ("DELETE_LABEL", r"prm:1: .*value of DELETE_LABEL"),
]


@pytest.mark.parametrize(("text", "message"), BAD_PARAMETERS)
def test_bad_parameters_name_their_line(tmp_path, text, message):
    (tmp_path / "bad.prm").write_text(text)
    refused(message, evalb.EvalbParameters.read, tmp_path / "bad.prm")


def test_bad_trees_are_errors(tmp_path):
    refused("'a' has no bracket", evalb.EvalbTree.from_line, "(S a (N b))")
    for name, text in (("gld", "(S (N a))\n(S (N b))\n"), ("tst", "(S (N a))\n")):
        (tmp_path / name).write_text(text)
    refused("has 2 lines and .* 1", evalb.evaluate_files, tmp_path / "gld", tmp_path / "tst")
