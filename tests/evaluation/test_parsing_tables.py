"""Breakdowns of recall, shapes of trees, agreement of runs, treebanks for evaluation, and the published tables.

The tables of the literature are checked on the 10 % sample of the Penn Treebank, which may not be part of the project:
set HF_SYNLM_PTB_SAMPLE to a folder of its .mrg files (NLTK's corpus "treebank", folder `combined`).
"""

import os
from itertools import product
from pathlib import Path

import pytest

from hf_synlm.data.parsed import Hypothesis, ParsedSentence
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import parse_treebank, read_treebank
from hf_synlm.evaluation.trees.baseline_trees import left_branching
from hf_synlm.evaluation.trees.evalb import EvalbParameters, EvalbTree, labeled_f1
from hf_synlm.evaluation.trees.gold_treebank import (
    make_treebank,
    match_treebank,
    score_baselines,
    score_table,
    score_trees,
)
from hf_synlm.evaluation.trees.parsing import CONVENTIONS, binarized_gold, branching_baselines, resolve_convention
from hf_synlm.evaluation.trees.parsing_analysis import (
    Recall,
    permutation_test,
    recall_by_label,
    recall_by_size,
    span_heights,
    tree_statistics,
)
from hf_synlm.trees.spans import right_branching
from tests.helpers.refusals import refused


def test_paired_permutations_are_those_of_a_full_count():
    first, second = [0.9, 0.8, 0.4, 1.0, 0.7, 0.3, 0.6], [0.5, 0.6, 0.5, 0.4, 0.6, 0.3, 0.2]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    sums = [sum(s * d for s, d in zip(signs, differences, strict=True)) for signs in product((1, -1), repeat=7)]
    exact = sum(abs(value) >= abs(sum(differences)) - 1e-9 for value in sums) / len(sums)
    assert permutation_test(first, second) == pytest.approx(exact, abs=0.01)
    assert permutation_test(second, first) == permutation_test(first, second)
    assert permutation_test(first, first) == 1.0
    assert permutation_test([1.0] * 30, [0.0] * 30) == pytest.approx(1 / 10_001)


TREE = "(S (NP (DT the) (NN cat)) (VP (VBD sat) (PP (IN on) (NP (NP (DT a) (NN mat))))) (. .))"


def sentence(text=TREE):
    (parsed,) = parse_treebank([text])
    return parsed.select_words([tag != "." for tag in parsed.tags])


# ------------------------------------------------------------------------------------------- recall by class
def test_recall_by_label_by_hand():
    gold = sentence()
    found = recall_by_label([[(0, 2), (4, 6), (3, 6), (1, 6), (0, 6)]], [gold], CONVENTIONS["gpst"])
    assert found == {"NP": Recall(2, 2), "VP": Recall(0, 1), "PP": Recall(1, 1)}
    assert found["NP"].value == 1 and list(found)[0] == "NP"
    assert recall_by_label([[]], [gold], CONVENTIONS["palm"])["S"] == Recall(1, 1)
    assert recall_by_label([[]], [gold], resolve_convention("gpst", max_length=5)) == {}


def test_recall_by_length_and_height_by_hand():
    gold = sentence().spans
    assert span_heights(gold) == {(0, 2): 1, (4, 6): 1, (3, 6): 2, (2, 6): 3, (0, 6): 4}
    predicted = [(0, 2), (3, 6), (2, 4)]
    by_length = recall_by_size([predicted], [gold], [6], "width", CONVENTIONS["gpst"])
    assert by_length == {2: Recall(1, 2), 3: Recall(1, 1), 4: Recall(0, 1)}
    by_height = recall_by_size([predicted], [gold], [6], "height", CONVENTIONS["palm"])
    assert by_height == {1: Recall(1, 2), 2: Recall(1, 1), 3: Recall(0, 1), 4: Recall(1, 1)}
    # Precision by height is recall with the sides exchanged; (2, 4) crosses a gold constituent.
    assert recall_by_size([gold], [predicted], [6], "height", CONVENTIONS["gpst"]) == {1: Recall(2, 3)}


# -------------------------------------------------------------------------------------------------- shapes of trees
def test_statistics_by_hand():
    def numbers(spans, length):
        return list(tree_statistics([spans], [length]).values())

    assert numbers(right_branching(5), 5) == [(1 + 2 + 3 + 4 + 4) / 5, 4, 0, 100]
    assert numbers(left_branching(5), 5) == [(1 + 2 + 3 + 4 + 4) / 5, 1 / 4, 100, 0]
    # ((0 1) (2 (3 (4 5)))) with spans of width 1 and copies, listed in any order.
    words = numbers([(4, 6), (3, 6), (2, 6), (2, 6), (0, 2), (0, 1)], 6)
    assert words == pytest.approx([17 / 6, 2, 0, 200 / 3])
    # Flat, (0 1 2 (3 4) 5): there is no constituent at the end or at the beginning, and no split.
    assert numbers([(3, 5), (0, 6)], 6)[2:] == [0, 0]
    # (0 1 (2 3)): the split before (2 3); the rest is (0 1).
    assert numbers([(2, 4), (0, 4)], 4)[2:] == [0, 0]
    # Of two sentences, depths are means of means; the other numbers are of all words and splits together.
    both = tree_statistics([right_branching(5), left_branching(3)], [5, 3])
    assert list(both.values()) == pytest.approx([(14 / 5 + 5 / 3) / 2, (4 + 1) / (1 + 2), 25, 75])
    # A single word has no constituent around it.
    assert numbers([], 1) == [0, 0, 0, 0]


# -------------------------------------------------------------------------------------------- treebanks and tables
@pytest.fixture(scope="module")
def embedded():
    return list(read_treebank(sample_path("trees.test.txt")))


def test_the_four_numbers_of_a_treebank(embedded):
    treebank = make_treebank(embedded)
    baselines = score_baselines(treebank)
    table = score_table(baselines, treebank).splitlines()
    for line in table[2:-1]:
        name, *cells = line.rsplit(maxsplit=4)
        assert cells == [f"{100 * value:.2f}" for value in baselines[name.strip()].variants.values()]
    assert "punctuation removed before parsing" in table[-1] and "convention gpst" in table[-1]
    best = [binarized_gold(spans, length) for spans, length in zip(treebank.spans, treebank.lengths, strict=True)]
    assert score_trees(best, treebank) == baselines["binarized gold"]


def test_corpus_f1_with_the_whole_sentence_is_that_of_evalb(embedded):
    """EVALB without labels, on gold trees without unary chains and without constituents over one word."""
    treebank = make_treebank(embedded)
    for branch in (right_branching, left_branching):
        trees = [branch(length) for length in treebank.lengths]
        evalb = [
            [EvalbTree.from_spans(s.words, s.tags, ["X"] * len(tree), tree) for s, tree in zip(part, side, strict=True)]
            for part, side in ((treebank.sentences, trees), (treebank.sentences, treebank.spans))
        ]
        ours = score_trees(trees, treebank, min_length=2)
        assert labeled_f1(*evalb, EvalbParameters(labeled=False)).overall.f1 == pytest.approx(
            ours.variants["corpus_count"]
        )


def test_punctuation_by_tag_or_form():
    text = "(S (NP (DT the) (NN dog)) (VP (VBZ costs) (NP ($ $) (CD 5))) (: --) (. .))"
    gold = list(parse_treebank([text, "(X (. .) (. .))"]))
    removed = {by: make_treebank(gold, punctuation_by=by) for by in ("tag", "form")}
    assert removed["tag"].words == [["the", "dog", "costs", "5"]]
    assert removed["form"].words == [["the", "dog", "costs", "$", "5"]]
    assert removed["form"].convention == "punctuation removed before parsing (told by form)"
    ignored = make_treebank(gold, "ignore", punctuation_by="form")
    assert ignored.keep == [[True, True, True, True, True, False, False]]
    assert ignored.scored()[0].words == tuple(removed["form"].words[0])
    assert make_treebank(gold, "keep").keep is None
    part = ignored.select([0])
    assert (part.words, part.keep, part.convention) == (ignored.words, ignored.keep, ignored.convention)
    wrong = [(0, 2), (3, 5), (2, 5), (5, 7), (0, 7)]
    for by in ("tag", "form"):
        assert score_trees([wrong], make_treebank(gold[:1], "ignore", punctuation_by=by)).precision == 1
    assert score_trees([wrong], make_treebank(gold[:1], "keep")).precision == 3 / 4
    refused("shape", make_treebank, gold, punctuation_by="shape")


def test_tags_that_are_not_those_of_the_penn_treebank(caplog):
    chinese = list(parse_treebank(["(S (NP (Nab 他)) (VP (VC2 看) (NP (Nab 書)) (PERIOD .)))"]))
    for punctuation in ("remove", "ignore"):
        refused("3 of 4 .*Nab, VC2", make_treebank, chinese, punctuation)
    assert make_treebank(chinese, "keep").words == [["他", "看", "書", "."]]
    assert make_treebank(chinese, punctuation_by="form").words == [["他", "看", "書"]]
    # With a tag or two that is not known, the white list of the authors' scorers counts, but not in silence.
    tree = "(S (NP (DT the) (AFX ex) (HYPH -) (NN cat)) (VP (VBZ sleeps) (NP {})) (. .))"
    mostly, brown = (list(parse_treebank([tree.format("(NN time) " * count)])) for count in (14, 13))
    assert not caplog.records
    treebank = make_treebank(mostly)
    assert treebank.words == [["the", "cat", "sleeps"] + ["time"] * 14]
    assert treebank.convention == "punctuation removed before parsing, with 1 word of unknown tags"
    assert "1 of 20 words count as punctuation" in caplog.text and "Universal Dependencies: AFX" in caplog.text
    refused("1 of 19 words have tags", make_treebank, brown)
    refused("every word is punctuation", make_treebank, parse_treebank(["(X (. .) (. .))"]))
    assert len(make_treebank(parse_treebank(["(X (. .) (. .))"]), "keep").sentences) == 1


def test_trees_that_do_not_match_their_text():
    treebank = make_treebank(parse_treebank([TREE, TREE]))
    words = ("The", "cat", "sat", "on", "a", "mat")

    def parsed(*words):
        return ParsedSentence(words, (Hypothesis(tuple(right_branching(len(words)))),))

    right, none = parsed(*words), ParsedSentence(())
    match_treebank({"mine.txt": [right, none]}, treebank)
    for sentences, message in (
        ([right], r"mine.txt: 1 sentence, .* 2 \(punctuation removed"),
        ([right, parsed(*words[:5], "rug")], "sentence 2 .*<text>:2: word 6 is 'rug', .* 'mat'"),
        ([parsed(*words, "."), right], "7 words, .* 6"),
    ):
        refused(message, match_treebank, {"mine.txt": sentences}, treebank)


# Sentence and corpus F1 without and with the whole sentence, punctuation removed. EVALB gives the same last column.
PTB_SAMPLE = {
    ("right", 10): (58.6, 55.0, 67.2, 63.3),
    ("right", 40): (40.5, 36.8, 44.9, 40.6),
    ("right", None): (39.9, 35.8, 44.3, 39.4),
    ("left", None): (8.6, 6.4, 15.7, 11.7),
    ("balanced", None): (24.1, 20.5, 29.8, 25.1),
    ("binarized gold", 10): (84.8, 85.6, 88.5, 88.2),
    ("binarized gold", None): (84.4, 84.6, 85.7, 85.5),
}


@pytest.mark.skipif("HF_SYNLM_PTB_SAMPLE" not in os.environ, reason="HF_SYNLM_PTB_SAMPLE names no treebank")
def test_tables_on_the_sample_of_the_penn_treebank():
    folder = Path(os.environ["HF_SYNLM_PTB_SAMPLE"])
    files = sorted(folder.glob("*.mrg")) or sorted(folder.glob("*.txt"))
    sentences = [sentence for file in files for sentence in read_treebank(file)]
    treebank = make_treebank(sentences)
    assert len(treebank.sentences) == 3914
    for limit, number in ((10, 555), (40, 3764), (None, 3914)):
        scores = branching_baselines(treebank.spans, treebank.lengths, max_length=limit)
        assert scores["right"].num_sentences == number
        for (name, length), expected in PTB_SAMPLE.items():
            if length == limit:
                assert tuple(round(100 * value, 1) for value in scores[name].variants.values()) == expected
    kept = score_baselines(make_treebank(sentences, "keep"))["right"]
    assert tuple(round(100 * value, 1) for value in kept.variants.values()) == (0.8, 0.1, 8.0, 5.4)
    # PaLM, table 4: gold 6.5 and 52.7 on section 23; Du et al., table 3: gold 5.0 and 2.22, binarized 6.4 and 2.92.
    short = treebank.select(k for k, length in enumerate(treebank.lengths) if length <= 40)
    gold = tree_statistics(short.spans, short.lengths)
    assert (round(gold["left_splits"], 1), round(gold["right_splits"], 1)) == (6.5, 53.2)
    every = tree_statistics(treebank.spans, treebank.lengths)
    assert (round(every["depth"], 1), round(every["right_left_ratio"], 2)) == (5.0, 2.13)
    binary = [binarized_gold(s, n) for s, n in zip(treebank.spans, treebank.lengths, strict=True)]
    found = tree_statistics(binary, treebank.lengths)
    assert (round(found["depth"], 1), round(found["right_left_ratio"], 2)) == (6.5, 2.82)
