"""Treebanks of several styles: what is a word, what is about the text, and where a tree ends."""

from pathlib import Path

import pytest

from hf_synlm.cli.app import main
from hf_synlm.data.treebank import clean_label, parse_treebank, read_treebank, sentence_to_brackets
from tests.helpers.commands import fail, run
from tests.helpers.refusals import refused

SWITCHBOARD = """*x*x*x*x*
*x* Copyright (C) 1999 Somebody *x*

( (CODE (SYM SpeakerA1) (. .) ))
( (S (EDITED (RM (-DFL- \\[) ) (NP-SBJ-UNF (PRP I)) (IP (-DFL- \\+) )) (NP-SBJ (PRP I)) (VP (VBP mean)) (-DFL- E_S) ))
"""


def read(text: str, **options) -> list[str]:
    """Its trees as they are written."""
    return [sentence_to_brackets(sentence) for sentence in parse_treebank(text.split("\n"), **options)]


def refuse(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read(text)
    assert "remove it" not in str(error.value)


def test_the_penn_helsinki_style() -> None:
    trees = """( (CODE <P_13>)
  (IP-MAT (NP-SBJ *con*) (VBD went) (CODE {COM:torn}) (PP (P to) (NP 0)) (WNP-1 *T*-1) (. .))
  (ID FAKE-1200,13.1))
( (CODE <P_14>) (ID FAKE-1200,13.2))
( (METADATA (AUTHOR me)) (IP-MAT (N Cats) (VBD slept)) (ID FAKE-1200,13.3))
( (VERSION (FORMAT dash)))
"""
    assert read(trees) == ["(IP (VBD went) (PP (P to)) (. .))", "(IP (N Cats) (VBD slept))"]
    # In other trees a tag says what is empty.
    others = "( (NP (CD 0) (SYM *) (SYM **) (CODE x) (NN a) (-NONE- *-1)) )"
    assert read(others) == ["(NP (CD 0) (SYM *) (SYM **) (CODE x) (NN a))"]
    lemmas = "( (IP (NS cats-cat) (NP *pro*) (V x-ray-x/ray) (. .-.) (Q all)) (ID x))"
    assert read(lemmas, lemma_separator="-") == ["(IP (NS cats) (V x-ray) (. .) (Q all))"]


def test_markup_outside_of_trees() -> None:
    chinese = "<DOC>\n<DATE> 2001 </DATE>\n<S ID=1>\n( (IP-HLN (NP-PN (NR a))\n (VV b)))\n</S>\n</DOC>"
    assert read(chinese) == ["(IP (NP (NR a)) (VV b))"]
    assert read("(S (A <a>)\n(B b))") == ["(S (A <a>) (B b))"]
    refuse("<DOC\n(S (A a))", "1: '<DOC' stands outside of all trees")


def test_words_and_brackets_are_left_out_on_demand() -> None:
    i, i_mean = "(NP (PRP I))", "(NP (PRP I)) (VP (VBP mean))"
    assert read(SWITCHBOARD, drop_tags=["-DFL-"]) == [f"(S (EDITED {i}) {i_mean})"]
    assert read(SWITCHBOARD, drop_tags=["-DFL-"], drop_labels=["EDITED", "S"]) == [f"(ROOT {i} {i_mean})"]
    assert read("( (S (A a)) (X x))", drop_tags=["X"]) == ["(S (A a))"]
    assert read("(TOP (S (A a)) (B b))", drop_labels=["TOP", "S"]) == ["(ROOT (A a) (B b))"]


def test_labels_and_their_function_tags() -> None:
    labels = "NP-PN NP_SBJ ADJP*OC NP;* nmod:poss -DFL- $*LRB* $-LRB-".split()
    assert [*map(clean_label, labels)] == "NP NP_SBJ ADJP*OC NP;* nmod:poss -DFL- $*LRB* $-LRB-".split()
    tree = "(ADJP*OC (NP_SBJ-1 ($*LRB* a)) (NP-PN (X b)))"
    assert read(tree, label_separators="*_;") == ["(ADJP (NP ($*LRB* a)) (NP-PN (X b)))"]
    assert read(tree, label_separators="") == read(tree, keep_functions=True)


PARENTHESES = [
    ("(S (NP (PRP He)) (VP (VB said) (-LRB- () (NP (NN yes)) (-RRB- ))) (. .))", "He said -LRB- yes -RRB- ."),
    (r"(S (VB said) (-LRB- \() (NP (NN yes)) (-RRB- \)) (. .))", "said -LRB- yes -RRB- ."),
    ("(S (PUNCT () (NN a) ($( ()(X ($( ))))", "-LRB- a -LRB- -RRB-"),
    ('(CS (S ($( ") (NP (ART Der)) ($, ,)))', '" Der ,'),
    ("(S (VB like(d)) (PRP (s)he) (NN f(x)(y)))", "like-LRB-d-RRB- -LRB-s-RRB-he f-LRB-x-RRB--LRB-y-RRB-"),
    ("(S (SYM \\) (NN a))", "\\ a"),
    ("(S (NP (PRP\t(Dia))) (VP (VB (makan)) (NP (NN (nasi)))) (NP (*-1)) (S (0)) (Z (.)))", "Dia makan nasi ."),
]  # fmt: skip


@pytest.mark.parametrize(("text", "words"), PARENTHESES)
def test_parentheses_that_are_characters(text: str, words: str) -> None:
    (sentence,) = parse_treebank([text])
    assert sentence.words == tuple(words.split())
    assert [s.words for s in parse_treebank([sentence_to_brackets(sentence)])] == [sentence.words]
    assert not set("()") & set("".join(sentence.tags))


def test_other_parentheses_are_refused_with_advice() -> None:
    refuse("(S (NP (EMOJI :)) (NN dog)) (VP (VB runs)))", "closes nothing. .*write -RRB- if it is a word")
    refuse("(S (EMOJI :() (NN a))", "follows the word ':'. Write .* as -LRB-")
    refuse("(S (NP (DT the) (NN )) (VB runs))", r"\(NN\) contains neither .*\(TAG word\)")
    refuse("(S (NP (PRP (Dia)) (NN (pesta olahraga))))", r"\(Dia\) contains neither")
    refuse("(S (DT) (NN))", r"\(DT\) contains neither")
    refuse("(PRP (Dia))", r"\(Dia\) contains neither")
    refuse("(NN ())", r"\(\) contains neither")


MISSING_BRACKETS = [
    ("(S (A a)\n(S (A b))\n(S (A c))))", 1, 2),
    ("(S (A z))\n(S (A z))\n(S (A a)\n(NP (A b)))", 3, 4),
    ("(S (A a)\n(NP (A b)))\n(S (A z))\n(S (A z))", 1, 2),
    ("(S (A z))\n(ROOT (S (A a))\n  (ROOT (S (A b))))", 2, 3),
    ("( (S (A a))\n( (S (A b))))", 1, 2),
    ("(S\n  (A a)\n(S\n  (A b)))\n(S\n  (A c)))", 1, 3),
]


@pytest.mark.parametrize(("text", "first", "second"), MISSING_BRACKETS)
def test_a_missing_bracket_does_not_merge_trees(text: str, first: int, second: int) -> None:
    refuse(text, f"(?s)(:{first}: .*never closed.*line {second}|:{second}: .*line {first}$)")


def test_trees_over_several_lines() -> None:
    plain = "(S\n(NP (A a))\n(VP (B b)))\n(S (A a)\n(S (B b))\n(CC c))"
    assert read(plain) == ["(S (NP (A a)) (VP (B b)))", "(S (A a) (S (B b)) (CC c))"]
    assert read("(TOP (S1\n (TOP (S (A a)\n  (S (A b))))))") == ["(S (A a) (S (A b)))"]


def test_only_white_space_of_ascii_separates_words(tmp_path: Path, capsys) -> None:
    tree = "(S (NN 1\u00a0000)\t(: \u0085) (PU \u3000))"
    (sentence,) = parse_treebank([tree])
    assert sentence.words == ("1\u00a0000", "\u0085", "\u3000") and read(tree) == [tree.replace("\t", " ")]
    # Tokenizers split there.
    file = tmp_path / "a.mrg"
    file.write_text(f"{tree}\n", encoding="utf-8")
    message = fail(capsys, "evaluate", "perplexity", file, "--format", "treebank", "--model", "none")
    assert "a.mrg:1: word 0 is '1\\xa0000'" in message


def test_commands_take_the_options(tmp_path: Path, capsys) -> None:
    file, out, ud = tmp_path / "swbd.mrg", tmp_path / "out.mrg", tmp_path / "a.conllu"
    file.write_text(SWITCHBOARD + "( (S (FW New York) (XX '')))\n", encoding="utf-8")
    ud.write_text("1\tGo\tgo\tVERB\t_\t_\t0\troot\t_\t_\n\n", encoding="utf-8")
    command = ["treebank", str(file), "--out", str(out)]
    assert "--split-leaves" in fail(capsys, *command)
    reading = ["--split-leaves", "--drop-tags", "-DFL- XX", "--drop-labels", "EDITED RM"]
    assert main([*command, *reading]) == 0
    assert out.read_text().split("\n")[1:] == ["(S (FW New) (FW York))", ""] and "EDITED" not in out.read_text()
    message = fail(capsys, "treebank", ud, "--out", out, "--overwrite", "--drop-tags", "X")
    assert "--drop-tags is for brackets" in message
    refused(r"a.conllu holds dependencies, which have no option drop_tags", list, read_treebank(ud, drop_tags=["X"]))
    trees = tmp_path / "trees.txt"
    trees.write_text("(I (I mean))\n(New York)\n")
    score = ("evaluate", "parsing", "--treebank", file, "--trees", trees, "--punctuation", "keep")
    assert "drop_tags ['-DFL-', 'XX']" in run(capsys, *score, "--tree-style", "unlabeled", *reading)
    text = ("evaluate", "perplexity", file, "--model", "none")
    assert "--split-leaves: this belongs to" in fail(capsys, *text, "--split-leaves")
    assert "--punctuation-by: this belongs" in fail(capsys, *text, "--punctuation-by", "form")


def test_brackets_at_the_margin_may_be_inside_of_trees(caplog: pytest.LogCaptureFixture) -> None:
    """An error where all other trees have one line; a warning where some have several; nothing where most are so."""
    odd = "(ROOT (S (A a)\n(CC and)\n  (S (B b))))\n"
    long = "(ROOT\n  (S (A a)))\n"
    assert len(read(f"{long}{odd}{long}")) == 3
    assert "<text>: brackets begin in column 0 inside of 1 of 3 trees, the first in line 4" in caplog.text
    assert "whether the tree that begins in line 3 lacks" in caplog.text
    refuse(f"(S (A a))\n{odd}(S (A a))", ":2: .*line 3")
    caplog.clear()
    assert len(read(f"(NP (A a))\n{odd}{odd}")) == 3 and not caplog.text
    assert read("(NP (A a)\n(NP (B b))\n)") == ["(NP (A a) (NP (B b)))"]
