"""Corpora of language models: versions of the Penn Treebank, gold structure, vocabularies, streams in rows."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from hf_synlm.data.gold_trees import gold_distances, gold_spans
from hf_synlm.data.streams import SentenceCode, StreamRows, TokenStream, collate_framed, make_stream
from hf_synlm.data.tokenizers import character_tokenizer
from hf_synlm.data.treebank import parse_treebank, to_ptb_concat
from hf_synlm.recurrent.distances import distances_to_spans
from hf_synlm.trees.binary import binarize_spans
from tests.helpers.refusals import refused

END = 9
# (NP the small robot) (VP painted (NP a fence) (PP in Oslo)): the example of Du et al.'s code.
ROBOT = [(0, 3), (4, 6), (6, 8), (3, 8), (0, 8)]


# ---------------------------------------------------------------------------------------------- Penn Treebank
def concat(text: str) -> list[str] | None:
    sentence = to_ptb_concat(next(iter(parse_treebank([text]))))
    return None if sentence is None else list(sentence.words)


def test_words_of_ptb_concat() -> None:
    for text, expected in (
        ("(S (NP (NNP Mr.) (NNP N.V.)) (, ,) (VP (VBZ is) (CD 61)) (. .))", "mr. n.v. is N"),
        (r"(S (CD 1,200.5) (CD 3\/4) (CD 1:30) (CD 1989-90) (JJ 30-day) (NNS 1980s))", "N N N N 30-day 1980s"),
        ("(S (QP ($ $) (CD 7.5) (NN %)) (: --) (: ;) (: ...))", "$ N N"),
        ("(S (`` `) (NNS landings) ('' ') (NNS boys) (POS '))", "landings boys '"),
        ("(S (-LRB- -LRB-) (UH oh) (. !) (-RRB- -RRB-) (SYM #) (CC &))", "oh # &"),
        ("(S (PRP You) (VBN gotta) (NNP Wa) (NNS Wa))", "you gotta wa"),
        ("(S (`` ``) (. ?))", None),
    ):
        assert concat(text) == (None if expected is None else expected.split())


def test_ptb_concat_keeps_the_tree_over_the_words_that_are_left() -> None:
    text = "(S (`` ``) (NP (DT The) (NN cat)) (, ,) (PRN (: --)) (VP (VBZ sleeps) (ADVP (RB now) (. .))) ('' ''))"
    sentence = to_ptb_concat(next(iter(parse_treebank([text]))))
    assert sentence is not None
    assert (sentence.words, sentence.tags) == (("the", "cat", "sleeps", "now"), ("DT", "NN", "VBZ", "RB"))
    assert sentence.labeled_spans == (("NP", 0, 2), ("ADVP", 3, 4), ("VP", 2, 4), ("S", 0, 4))
    refused("keep has 1 values for 4 words", sentence.select_words, [True])


# ---------------------------------------------------------------------------------------------- gold structure
def test_gold_distances_of_words() -> None:
    # Gaps 2 1 4 3 1 2 1 inside, the sentence's height at its first token and at </s>.
    assert gold_distances(ROBOT, [True] * 8) == [5, 2, 1, 4, 3, 1, 2, 1, 5]
    assert gold_distances([(0, 2)], [True, True]) == [2, 1, 2]
    assert gold_distances([], [True]) == [1, 1]
    assert gold_distances([(0, 1), *ROBOT, (0, 8)], [True] * 8) == gold_distances(ROBOT, [True] * 8)


def test_gold_distances_bring_the_tree_back() -> None:
    assert distances_to_spans(gold_distances(ROBOT, [True] * 8)[:-1]) == binarize_spans(ROBOT, 8)


def test_gold_structure_of_pieces() -> None:
    ends = [True, False, True, False, False, True]  # three words of 1, 2 and 3 pieces
    assert gold_distances([(1, 3), (0, 3)], ends) == [3, 2, 0, 1, 0, 0, 3]
    assert gold_spans([(1, 3), (0, 3)], ends) == [(1, 6)]


def test_gold_spans() -> None:
    assert gold_spans(ROBOT, [True] * 8) == [(0, 3), (4, 6), (6, 8), (3, 8)]
    added = {(1, 3), (4, 8)}
    assert set(gold_spans(ROBOT, [True] * 8, binarized=True)) == {(0, 3), (4, 6), (6, 8), (3, 8)} | added
    assert gold_spans([(0, 1)], [True]) == gold_spans([(0, 2)], [True, True]) == []
    refused("word_ends must be True", gold_spans, [(0, 2)], [True, False])
    refused("cross", gold_spans, [(0, 2), (1, 3)], [True] * 3)


# ---------------------------------------------------------------------------------------------- vocabularies
def test_character_vocabulary(tmp_path: Path) -> None:
    character_tokenizer(["a cab", "a <unk>", "\u00e9\n"], min_count=1).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in ("a cab", " a  b ", "<unk> e\n"):
        ids = loaded(text)["input_ids"]
        assert len(ids) == len(text)
        assert loaded.decode(ids) == text.replace("e", "<|unk|>")
    assert loaded.get_vocab()["a"] == 3  # the most frequent one
    assert [loaded.pad_token_id, loaded.unk_token_id, loaded.bos_token_id, loaded.eos_token_id] == [0, 1, 2, 2]
    assert loaded("a q")["input_ids"][2] == 1
    refused("none of 2 characters occurs at least 3 times", character_tokenizer, ["ab"], min_count=3)


# ---------------------------------------------------------------------------------------------- streams
def two_lines(**gold: bool) -> TokenStream:
    """</s> 1 2 3 4 </s> 5 6 7 </s>, the first line with the tree ((1 2) (3 4)), the second with (5 (6 7))."""
    trees = [([1, 2, 3, 4], [(0, 2), (2, 4), (0, 4)]), ([5, 6, 7], [(1, 3), (0, 3)])]
    codes = [SentenceCode(ids) for ids, _ in trees]
    for code, (ids, tree) in zip(codes, trees, strict=True):
        ends = [True] * len(ids)
        code.distances = gold_distances(tree, ends) if gold.get("distances") else None
        code.spans = gold_spans(tree, ends) if gold.get("spans") else None
    return make_stream(codes, END)


def test_stream_of_two_lines() -> None:
    stream = two_lines(distances=True, spans=True)
    assert stream.ids.tolist() == [9, 1, 2, 3, 4, 9, 5, 6, 7, 9]
    assert stream.starts.tolist() == [1, 6, 10] and stream.num_sentences == 2
    assert math.isnan(stream.distances[0])
    assert stream.distances[1:].tolist() == [3, 1, 2, 1, 3, 3, 2, 1, 3]
    assert stream.spans.tolist() == [[1, 3], [3, 5], [7, 9]]
    assert two_lines().distances is None and two_lines().spans is None


def test_an_empty_line_is_a_boundary() -> None:
    stream = make_stream([SentenceCode([1]), SentenceCode([]), SentenceCode([2])], END)
    assert stream.ids.tolist() == [9, 1, 9, 9, 2, 9]


def test_the_first_token_has_the_largest_distance_of_all() -> None:
    stream = make_stream([SentenceCode([1, 2], [2, 1, 2]), SentenceCode([3], [1, 7])], END)
    assert stream.distances[1:].tolist() == [7, 1, 2, 7, 7]


def test_rows_read_every_token_once() -> None:
    for size in (2, 3, 7, 20, 41):
        stream = make_stream([SentenceCode(list(range(size - 2)))], END)
        for num_rows in range(1, min(size, 6)):
            for complete in (True, False):
                pairs = read_pairs(StreamRows(stream, num_rows, complete=complete), 3)
                expected = list(pairwise(stream.ids.tolist()))
                assert pairs == (expected if complete else expected[: len(pairs)])
                assert complete or len(expected) - len(pairs) == (size - 1) % num_rows


def read_pairs(rows: StreamRows, width: int) -> list[tuple[int, int]]:
    """All tokens with what is predicted after them, row by row."""
    parts = [rows.segment(start, width) for start in range(0, rows.length, width)]
    ids, labels = (torch.cat([part[name] for part in parts], 1) for name in ("input_ids", "shift_labels"))
    for part in parts:
        mask = part.get("attention_mask", torch.ones_like(part["input_ids"]))
        assert torch.equal(mask == 0, part["shift_labels"] == -100)
    kept = labels != -100
    return list(zip(ids[kept].tolist(), labels[kept].tolist(), strict=True))


def test_offsets_shift_the_rows() -> None:
    stream = two_lines()
    rows = StreamRows(stream, 4, offset=1)  # 9 predictions, 4 rows of 2: one is left over
    assert rows.segment(0, 5)["input_ids"].tolist() == [[1, 2], [3, 4], [9, 5], [6, 7]]
    assert rows.segment(1, 1)["shift_labels"].tolist() == [[3], [9], [6], [9]]
    assert StreamRows(stream, 4).segment(0, 5)["shift_labels"].tolist() == [[1, 2], [3, 4], [9, 5], [6, 7]]
    assert rows.segment(0, 2, range(2, 4))["input_ids"].tolist() == [[9, 5], [6, 7]]
    refused("cannot be cut into 10 rows", StreamRows, stream, 10)


def test_gold_structure_is_aligned_in_segments() -> None:
    stream = two_lines(distances=True, spans=True)
    rows = StreamRows(stream, 2, complete=True)  # 9 1 2 3 4 | 9 5 6 7
    first, second = rows.segment(0, 3), rows.segment(3, 3)
    assert first["input_ids"].tolist() == [[9, 1, 2], [9, 5, 6]]
    assert second["input_ids"].tolist() == [[3, 4], [7, 7]] and second["attention_mask"].tolist() == [[1, 1], [1, 0]]
    np.testing.assert_array_equal(first["distances"], [[math.nan, 3, 1], [3, 3, 2]])
    np.testing.assert_array_equal(second["distances"], [[2, 1], [1, math.nan]])
    # (1 2) ends before column 3 of row 0; (3 4) at column 0 of row 1, which has not read it; (6 7) would end at the
    # column after the last.
    assert first["spans"] == [[], []]
    assert second["spans"] == [[(-2, 0)], []]
    # The words that an offset leaves out have not been read either; a span that begins with the row counts.
    assert StreamRows(stream, 2, offset=1).segment(0, 3)["spans"] == [[(0, 2)], []]
    assert StreamRows(stream, 4, offset=1).segment(0, 2)["spans"] == [[], [], [], []]
    assert StreamRows(stream, 3).segment(0, 3)["spans"] == [[], [(0, 2)], []]


def test_framed_sentences() -> None:
    batch = collate_framed(two_lines(distances=True, spans=True), [1, 0], pad_token_id=8)
    assert batch["input_ids"].tolist() == [[9, 5, 6, 7, 9, 8], [9, 1, 2, 3, 4, 9]]
    assert batch["shift_labels"].tolist() == [[5, 6, 7, 9, -100, -100], [1, 2, 3, 4, 9, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1, 0], [1] * 6]
    nan = math.nan
    np.testing.assert_array_equal(batch["distances"], [[nan, 3, 2, 1, 3, nan], [nan, 3, 1, 2, 1, 3]])
    assert batch["spans"] == [[(2, 4)], [(1, 3), (3, 5)]]
    plain = collate_framed(two_lines(distances=True), [0], 8, gold=False)
    assert set(plain) == {"input_ids", "attention_mask", "shift_labels"}


def test_bad_streams_are_refused() -> None:
    refused("no sentences", make_stream, [], END)
