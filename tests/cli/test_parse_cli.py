"""`synlm parse`, `synlm draw` and `synlm evaluate parsing`, from files to files."""

import functools
import io
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_synlm
from hf_synlm.cli import main
from hf_synlm.cli.train import PROGRAMS
from hf_synlm.data.parsed import ParsedSentence, guess_style, lines_of_parses, parses_of_lines, read_parses
from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.results import load_result
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.trees.baseline_trees import left_branching
from hf_synlm.evaluation.trees.consensus import average_parses
from hf_synlm.evaluation.trees.evalb import labeled_f1
from hf_synlm.evaluation.trees.gold_treebank import best_trees, load_treebank, make_treebank, score_baselines
from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences
from hf_synlm.training.arguments.command_lines import COMMAND_LINES
from hf_synlm.trees.spans import right_branching, spans_to_brackets
from hf_synlm.viz import posteriors
from tests.helpers.commands import fail, remarks, run
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer

TEXT = "We ask for peace\n\nThe state of our Union is strong\n"
GOLD = """(S (NP (PRP We)) (VP (VBP ask) (PP (IN for) (NP (NN peace)))) (. .))
(S (NP (NP (DT The) (NN state)) (PP (IN of) (NP (PRP$ our) (NNP Union)))) (VP (VBZ is) (ADJP (JJ strong))) (. .))
"""


@pytest.fixture
def files(tmp_path):
    (tmp_path / "in.txt").write_text(TEXT, encoding="utf-8")
    (tmp_path / "gold.mrg").write_text(GOLD, encoding="utf-8")
    return tmp_path


# -------------------------------------------------------------------------------------------------------- parse, draw
@pytest.mark.parametrize("architecture", ["rnng", "on_lstm"])
def test_every_format(architecture, saved_models, files, capsys):
    model, tokenizer = model_and_tokenizer(architecture)
    sentences = [line.split() for line in TEXT.splitlines() if line]
    expected = parse_sentences(model, tokenizer, sentences)
    command = ("parse", files / "in.txt", "--model", saved_models / architecture)
    assert run(capsys, *command).splitlines() == [expected[0].brackets(), "", expected[1].brackets()]
    run(capsys, *command, "--format", "json", "--out", files / "out.jsonl")
    again = read_parses(files / "out.jsonl")
    assert again[1] == ParsedSentence(())
    for found, wanted in zip((again[0], again[2]), expected, strict=True):
        assert (found.words, found.brackets()) == (wanted.words, wanted.brackets())
        assert found.word_log_probs == pytest.approx(wanted.word_log_probs, abs=1e-4)
    # What was written is drawn without the model.
    drawn = run(capsys, "draw", files / "out.jsonl")
    assert [line.rsplit("─ ", 1)[1] for line in drawn.splitlines() if line] == [w for s in sentences for w in s]
    assert run(capsys, "draw", files / "out.jsonl", "--format", "upright").splitlines()[-1].split() == sentences[1]
    assert run(capsys, "draw", files / "out.jsonl", "--format", "latex").count("\\begin{forest}") == 2
    page = run(capsys, "draw", files / "out.jsonl", "--format", "html")
    assert "".join(ElementTree.fromstring(page).itertext()).count("bits in all") == 2
    run(capsys, "draw", files / "out.jsonl", "--format", "svg", "--out", files / "pictures")
    assert sorted(file.name for file in (files / "pictures").iterdir()) == ["1.svg", "3.svg"]


def test_alternatives_of_the_beam(saved_models, files, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"We ask for peace\n")))
    options = ("--model", saved_models / "gpst", "--num-beams", 5, "--num-trees", 3, "--format", "json")
    (sentence,) = run(capsys, "parse", "-", *options).splitlines()
    trees = json.loads(sentence)["trees"]
    assert len(trees) == 3 and trees[0]["log_prob"] > trees[1]["log_prob"] > trees[2]["log_prob"]
    one = files / "one.txt"
    one.write_text("We ask for peace\n", encoding="utf-8")
    wide = ("--num-trees", 99, "--format", "html")
    assert "--num-trees 99 exceeds the beam of 4" in fail(capsys, "parse", one, "--model", saved_models / "gpst", *wide)
    svg = run(capsys, "parse", one, "--model", saved_models / "gpst", "--method", "inside", "--format", "svg")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    page = run(capsys, "parse", one, "--model", saved_models / "on_lstm", "--format", "html")
    assert "Unknown to the model: ask" in "".join(ElementTree.fromstring(page).itertext())
    biased = ("--parse-option", "decoder=biased", "--parse-option", "layer=0")
    assert run(capsys, "parse", one, "--model", saved_models / "on_lstm", *biased).startswith("(")


def test_trees_that_differ_inside_words_are_one_tree():
    """Four tokens, the first two of them one word; by hand."""
    spans = [[(0, 2), (0, 3), (0, 4)], [(0, 2), (2, 4), (0, 4)], [(1, 2), (0, 3), (0, 4)]]
    log_probs = {"log_probs": torch.tensor([0.3, 0.2, 0.1]).log()[None]}
    log_probs["token_log_probs"] = torch.tensor([[0.5, 0.5, 0.25, 0.25]]).log()
    output = SimpleNamespace(spans=[spans], labels=None, offsets=[0], lengths=[4], word_ends=[[2, 3, 4]], **log_probs)
    sentence = ParsedSentence.from_output(output, ["a", "b", "c"])
    assert [tree.spans for tree in sentence.hypotheses] == [((0, 2), (0, 3)), ((1, 3), (0, 3))]
    assert [math.exp(tree.log_prob) for tree in sentence.hypotheses] == pytest.approx([0.4, 0.2])
    assert [math.exp(value) for value in sentence.word_log_probs] == pytest.approx([0.25, 0.25, 0.25])
    assert posteriors(sentence) == pytest.approx([2 / 3, 1 / 3])
    output.log_probs = None
    assert [tree.log_prob for tree in ParsedSentence.from_output(output, list("abc")).hypotheses] == [None, None]


def test_sentences_that_do_not_fit_are_named_before_parsing(saved_models, files, capsys):
    long = files / "long.txt"
    long.write_text("We ask\n\n" + "peace and hope " * 40 + "\n", encoding="utf-8")
    message = fail(capsys, "parse", long, "--model", saved_models / "gpst", "--out", files / "long.out")
    assert "sentence 3 of 120 words (peace and hope peace and ...) has" in message and "--skip-long" in message
    assert main(["parse", str(long), "--model", str(saved_models / "gpst"), "--skip-long"]) == 0
    done = capsys.readouterr()
    assert done.out == "(We ask)\n\n\n" and "blank by --skip-long: 1 sentence longer than" in done.err


def test_tables_are_read_by_every_command(saved_models, files, capsys):
    """Trees of a table's texts; regions of a word-per-row table are one sentence of an item."""
    (files / "a.csv").write_text("item,S,condition\n1,We ask for peace,a\n2,,b\n3,So,b\n", encoding="utf-8")
    (files / "b.tsv").write_text("item\tword\n1\tWe ask\n2\tSo\n1\tfor peace\n", encoding="utf-8")
    (files / "plain.txt").write_text("We ask for peace\n\nSo\n", encoding="utf-8")
    model = ("--model", saved_models / "gpst")
    plain = run(capsys, "parse", files / "plain.txt", *model)
    assert run(capsys, "parse", files / "a.csv", "--text-column", "S", *model) == plain
    assert run(capsys, "parse", files / "b.tsv", "--word-column", "word", *model) == plain.replace("\n\n", "\n")
    message = fail(capsys, "parse", files / "a.csv", *model)
    assert "row 1 has no column 'sentence' (it has item, S, condition)" in message
    greedy = ("--max-new-tokens", 2)
    expected = run(capsys, "generate", files / "plain.txt", *greedy, *model)
    assert run(capsys, "generate", files / "a.csv", "--text-column", "S", *greedy, *model) == expected
    assert "is a table of texts, not of trees" in fail(capsys, "draw", files / "a.csv")


def test_lines_of_several_sentences(saved_models, files, capsys):
    """A remark on long lines, and their sentences with their places in the line."""
    long = "We ask for peace. " * 30
    (files / "long.txt").write_text(f"{long}\n\nWe ask. So we ask!\n", encoding="utf-8")
    model = ("--model", saved_models / "on_lstm")
    for command in (["parse"], ["surprisal"], ["evaluate", "perplexity"]):
        said = remarks(capsys, *command, files / "long.txt", *model)
        assert "1 of 2 texts has more than 100 words" in said and "--split-sentences" in said
        assert main([*command, str(files / "long.txt"), *map(str, model), "--split-sentences"]) == 0
        done = capsys.readouterr()
        assert "more than 100 words" not in done.err
        if command == ["parse"]:
            assert len(done.out.splitlines()) == 30 + 1 + 2
        elif command == ["surprisal"]:
            rows = [row.split("\t") for row in done.out.splitlines()[-5:]]
            assert [(row[0], row[1], row[3], *row[13:15]) for row in rows[1:3]] == [
                ("3", "32", "ask.", "3", "7"),
                ("3", "33", "So", "8", "10"),
            ]


def test_wrong_input_of_parse_and_draw(saved_models, files, capsys):
    command = ("parse", files / "in.txt", "--model", saved_models / "gpst")
    assert "foo: not an option of GPSTForCausalLM.parse" in fail(capsys, *command, "--parse-option", "foo=1")
    other = ("parse", files / "in.txt", "--model", saved_models / "on_lstm", "--num-trees", 2, "--format", "json")
    assert "--num-trees 2: ONLSTMForCausalLM" in fail(capsys, *other)
    for name in ("word_ends", "options"):  # the text, and what stands for others
        assert f"{name}: not an option of" in fail(capsys, *command, "--parse-option", f"{name}=1")
    assert "would overwrite an input" in fail(capsys, *command, "--out", files / "in.txt")
    assert "--parse-option foo. Write NAME=VALUE" in fail(capsys, *command, "--parse-option", "foo")
    for many in (("--num-trees", 2), ("--parse-option", "num_return_sequences=2")):
        message = fail(capsys, *command, *many, "--format", "latex")
        assert "--format latex shows one tree of a sentence, not 2" in message
    twice = ("--num-beams", 2, "--parse-option", "num_beams=3")
    assert "num_beams=3: the command has its own option for num_beams" in fail(capsys, *command, *twice)
    assert "a picture of every sentence. Name a folder" in fail(capsys, *command, "--format", "svg")
    (files / "empty.txt").write_text("\n\n", encoding="utf-8")
    assert "holds no text" in fail(capsys, "parse", files / "empty.txt", "--model", saved_models / "gpst")
    assert "empty.txt holds no tree" in fail(capsys, "draw", files / "empty.txt")
    (files / "text.txt").write_text("Stop\nWe ask (for peace).\n", encoding="utf-8")
    assert "text.txt holds text, not trees" in fail(capsys, "draw", files / "text.txt")
    for ending, meant in (("tex", "latex"), ("svg", "svg"), ("html", "html"), ("jsonl", "json")):
        message = fail(capsys, "draw", files / "gold.mrg", "--out", files / f"a.{ending}")
        assert f"means {meant}, but --format is text" in message
    (files / "trees.txt").write_text("(a b)\n((a b)\n", encoding="utf-8")
    assert "trees.txt:2: '(' at character 0 is never closed" in fail(capsys, "draw", files / "trees.txt")
    (files / "trees.json").write_text('{"words": ["a"], "trees": [{"brackets": "a"}]}\n', encoding="utf-8")
    assert "trees.json:1: this is not a parsed sentence" in fail(capsys, "draw", files / "trees.json")


STYLES = [
    (["((the cat) sleeps)"], "unlabeled"), (["(I (ask (for peace)))"], "unlabeled"), (["(a b)"], "unlabeled"),
    (["((the cat) (sat down))"], "unlabeled"), (["(S (NP We) (VP sleep))"], "labeled"),
    (["(S We (VP ask))"], "labeled"), (["( (S (NP (PRP We)) (VP (VBP ask)) (. .)) )"], "treebank"),
    (["(S (PRP We) (VP (VBP ask)))"], "treebank"), (['{"words": ["A"]}'], "labeled"),
    (["(狗 (吃 (小 鱼)))", "(我 (看 书))"], "unlabeled"), (["((小 狗) (在 (院子 里)))"], "unlabeled"),
    (["(I (SAW (THE DOG)))"], "unlabeled"), (["(1 (2 (3 4)))"], "unlabeled"), (["((كلب قرأ) كتاب)"], "unlabeled"),
    (["(nsubj (det the) cat)", "(root (nsubj she) runs)"], "labeled"), (["(句 狗 (名 吃 鱼))"], "labeled"),
    (["(X (X a) (X b))"], "labeled"), (["(S (X 狗) (VP 吃 (NP 鱼)))"], "labeled"), (["(S (NP We) .)"], "labeled"),
    (["(sentence (sn (spec (da0ms0 El)) (grup.nom (ncms000 perro))) (grup.verb (vmip3s0 ladra)))"], "treebank"),
    (["(IP (NP (NR 小明)) (PU ，) (VP (VV 看) (NP (NN 书) (PU 、) (NN 报))) (PU 。))"], "treebank"),
    (["(NOUNP (ADP Im) (ADJ alten) (NOUN Garten))"], "treebank"), (["( (NP (NN dog)) )"], "treebank"),
    (["(VERBP (NOUNP (ART das) (NN Haus)) (VVFIN steht) ($. .))"], "treebank"),
    (["( (NP (DT the) (NN cat)) (VP (VBD sat)) (. .))"], "treebank"),
    (["( (IP-MAT (NP-SBJ (PRO-N hann)) (VBDI svaf)) (ID FAKE,1.2))"], "treebank"),
]  # fmt: skip


@pytest.mark.parametrize(("lines", "style"), STYLES)
def test_labels_are_told_from_words_in_any_language(lines, style):
    for given in (lines, [*lines, "", *lines]):
        assert guess_style(given)[0] == style


def test_a_guess_is_said_and_an_error_names_the_style(files, capsys):
    trees = files / "trees.txt"
    for text, guess in (("(狗 (吃 鱼))\n", "unlabeled"), ("(sn (det la) (n casa))\n", "treebank")):
        trees.write_text(text, encoding="utf-8")
        said = remarks(capsys, "draw", trees)
        assert said.count("--tree-style") == 1 and f"read as {guess}" in said
        assert main(["draw", str(trees), "--tree-style", guess]) == 0 and not capsys.readouterr().err
    for text in ("(S (NP the cat) (VP sleeps))\n", "((小 狗) 叫)\n", GOLD):
        trees.write_text(text, encoding="utf-8")
        assert main(["draw", str(trees)]) == 0 and not capsys.readouterr().err
    trees.write_text("((小 狗) 叫)\n", encoding="utf-8")
    message = fail(capsys, "draw", trees, "--tree-style", "labeled")
    assert "trees.txt:1: the bracket opened at character 0 has no label" in message
    assert "read as labeled: --tree-style gives another style" in message
    message = fail(capsys, "draw", trees, "--tree-style", "treebank")
    assert "trees.txt:1: the word '狗'" not in message and "read as treebank" in message and "<text>" not in message


WRITTEN = [
    (("S",), ["(S  狗)", "", "鱼"]),  # as unlabeled, two words
    (("NN", "S"), ["(S  (NN 狗) (NN 吃))"]),  # as a treebank, without constituents
    (("NP", "S"), ["(S (NP 狗) (NP 吃))"]),
    (None, ["(狗 (吃 鱼))", "", "鱼"]),
]


@pytest.mark.parametrize(("labels", "lines"), WRITTEN)
def test_written_trees_are_read_as_they_were_meant(labels, lines):
    style = "labeled" if labels else "unlabeled"
    assert lines_of_parses(parses_of_lines(lines, style)) == lines and guess_style(lines)[0] == style


def test_trees_of_several_lines(files, capsys):
    (files / "several.mrg").write_text(
        "(S (NP (PRP We))\n   (VP (VBP ask)\n\t(PP (IN for) (NP (NN peace)))) (. .))\n\n"
        "(S\n    (NP (NP (DT The) (NN state)) (PP (IN of) (NP (PRP$ our) (NNP Union))))\n"
        "    (VP (VBZ is) (ADJP (JJ strong)))\n    (. .)\n)\n",
        encoding="utf-8",
    )
    assert read_parses(files / "several.mrg", None) == read_parses(files / "gold.mrg", "treebank")
    assert run(capsys, "draw", files / "several.mrg") == run(capsys, "draw", files / "gold.mrg")
    said = "# my corpus\n\n# (two trees)\n" + (files / "several.mrg").read_text(encoding="utf-8")
    (files / "comment.mrg").write_text(said.replace("\n\n(S\n", "\n# the second\n(S\n"), encoding="utf-8")
    assert read_parses(files / "comment.mrg", "treebank") == read_parses(files / "gold.mrg", "treebank")
    for reads in ("--treebank", "--trees"):
        commented = [files / f"{'comment' if flag == reads else 'gold'}.mrg" for flag in ("--treebank", "--trees")]
        for more in (("--punctuation", "keep"), ("--convention", "evalb")):
            done = run(capsys, "evaluate", "parsing", "--treebank", commented[0], "--trees", commented[1], *more)
            assert "| f1 | 100.0" in done
    command = ("evaluate", "parsing", "--treebank", files / "gold.mrg", "--punctuation", "keep", "--trees")
    assert "| f1 | 100.00" in run(capsys, *command, files / "several.mrg")
    assert "| f1 | 100.0" in run(capsys, *command, files / "several.mrg", "--convention", "evalb")
    compare = ("evaluate", "compare", files / "several.mrg", files / "gold.mrg", "--treebank", files / "gold.mrg")
    assert "| first | 100.0" in run(capsys, *compare, "--punctuation", "keep")
    # A line at the margin begins a tree, so that one bracket too few does not join sentences.
    (files / "lost.txt").write_text("\n((a b)\n(a b)\n\n((a b)\n c))\n", encoding="utf-8")
    assert "lost.txt:2: '(' at character 0 is never closed" in fail(capsys, "draw", files / "lost.txt")
    (files / "spare.txt").write_text("((a b)\n c)\n(a\n  (b c d)\n e))\n", encoding="utf-8")
    assert "spare.txt:3: ')' at character 13 closes nothing" in fail(capsys, "draw", files / "spare.txt")
    # Brackets inside JSON are words.
    lines = [json.dumps({"words": ["("], "trees": []}), "", json.dumps({"words": ["a"], "trees": []})]
    assert [sentence.words for sentence in parses_of_lines(lines)] == [("(",), (), ("a",)]


def test_dependencies_are_drawn_as_constituents(files, capsys):
    rows = [("We", "PRON", 2), ("ask", "VERB", 0), ("for", "ADP", 4), ("peace", "NOUN", 2)]
    lines = ["# text = We ask for peace"]
    lines += [f"{k}\t{word}\t_\t{tag}\t_\t_\t{head}\tdep\t_\t_" for k, (word, tag, head) in enumerate(rows, 1)]
    for name in ("trees.conllu", "trees.txt"):
        (files / name).write_text("\n".join(lines) + "\n\n", encoding="utf-8")
        assert run(capsys, "draw", files / name, "--format", "brackets") == "(VERBP We ask (NOUNP for peace))\n"
    command = ("evaluate", "parsing", "--treebank", files / "trees.txt", "--punctuation", "keep", "--trees")
    assert "| f1 | 100.0" in run(capsys, *command, files / "trees.conllu")
    assert "| f1 | 100.0" in run(capsys, *command, files / "trees.conllu", "--convention", "evalb")
    assert parses_of_lines(["#metoo"])[0].words == ("#metoo",)


# ---------------------------------------------------------------------------------------------------------- evaluation
def test_wide_beams_take_fewer_sentences_at_once(monkeypatch):
    model, tokenizer = model_and_tokenizer("gpst")
    sentences = [["We"] * count for count in (3, 20, 18, 19, 3)]
    parse, sizes = type(model).parse, []

    @functools.wraps(parse)
    def counted(self, input_ids, *arguments, **options):
        sizes.append(len(input_ids))
        return parse(self, input_ids, *arguments, **options)

    monkeypatch.setattr(type(model), "parse", counted)
    together = parse_sentences(model, tokenizer, sentences, num_beams=5)
    alone = parse_sentences(model, tokenizer, sentences, num_beams=5, batch_size=1)
    parse_sentences(model, tokenizer, sentences, method="inside", batch_size=2)
    assert sizes == [4, 1, 1, 1, 1, 2, 2]  # the two equal ones are parsed once
    sizes.clear()
    monkeypatch.setattr("hf_synlm.evaluation.text.batches._MAX_DERIVED_TOKENS", 600)
    parse_sentences(model, tokenizer, sentences[:4], num_beams=5)
    assert sizes == [2, 2]
    # What is refused leaves the model as it was.
    model.train()
    for wrong, options, message in (
        ([["We", "ask"], ["We", "a b"]], {}, r"sentence 2 \('We a b'\): word 1 is 'a b'"),
        ([["We"]], {"num_beams": 0}, "num_beams=0"),
        ([["We"]], {"method": "?"}, "method"),
    ):
        refused(message, parse_sentences, model, tokenizer, wrong, **options)
        assert model.training
    model.eval()
    assert best_trees(together) == best_trees(alone)


def test_saved_trees_score_alike_and_compare(saved_models, files, capsys):
    bank = ("--treebank", sample_path("trees.test.txt"), "--limit", 30, "--max-length", 15)
    scores = {}
    for name in ("on_lstm", "rnng"):
        out, trees = files / f"{name}.json", files / f"{name}.mrg"
        files_out = ("--out", out, "--save-trees", trees)
        parsed = run(capsys, "evaluate", "parsing", *bank, "--model", saved_models / name, *files_out)
        assert f"more rows: see {out}" in parsed and len(trees.read_text().splitlines()) == 30
        run(capsys, "evaluate", "parsing", *bank, "--trees", trees, "--out", out, "--overwrite")
        scores[name] = load_result(out).scores
        assert f"| f1 | {scores[name]['f1']:.2f}" in parsed
    out = files / "compared.json"
    run(capsys, "evaluate", "compare", files / "on_lstm.mrg", files / "rnng.mrg", *bank, "--out", out)
    found = load_result(out)
    assert (found.scores["first"], found.scores["second"]) == (scores["on_lstm"]["f1"], scores["rnng"]["f1"])
    assert 0 < found.scores["p"] <= 1 and found.scores["num_sentences"] == scores["rnng"]["num_sentences"]
    table = found.tables["sentence F1 and recall by label (%)"]
    recall = load_result(files / "on_lstm.json").tables["recall by label (%)"]
    assert table[0]["of"] == f"{scores['rnng']['num_sentences']:.0f} sentences"
    assert [(row["measure"], row["first"], row["of"].split()[0]) for row in table[1:]] == [
        (f"recall {row['label']}", row["recall"], str(row["gold"])) for row in recall
    ]
    # The first trees of a longer file; sentences that another convention left out are missed aloud.
    few = ("--treebank", sample_path("trees.test.txt"), "--limit", 5)
    said = remarks(capsys, "evaluate", "parsing", *few, "--trees", files / "rnng.mrg")
    missing = sum(not line for line in (files / "rnng.mrg").read_text().splitlines()[:5])
    assert 0 < missing < 5 and f"rnng.mrg has no tree for {missing} of 5 sentences" in said
    # A picture shows right-branching trees beside the scores, and never mixes conventions.
    plot = ("evaluate", "plot", files / "on_lstm.json", "--out", files / "f1.svg")
    run(capsys, *plot)
    texts = {text.strip() for text in ElementTree.parse(files / "f1.svg").getroot().itertext()}
    right = load_result(files / "on_lstm.json").tables["unlabeled F1 (%)"][2]
    assert right["trees"] == "right" and f"{right['corpus, without sentence span']:.3f}" in texts
    assert {"%", "right branching", "sentence_drop"} <= texts and "f1" not in texts
    assert not any("sentence F1" in text for text in texts)  # the other bars are other means
    other = files / "other.json"
    trees = ("--trees", files / "on_lstm.mrg", "--convention", "on-lstm", "--out", other)
    run(capsys, "evaluate", "parsing", *bank, *trees)
    message = fail(capsys, *plot, other, "--overwrite")
    assert "results with different rules cannot be compared: convention is 'gpst" in message
    copied = ("--trees", files / "rnng.mrg", "--save-trees", files / "again.mrg")
    assert "--save-trees would only copy --trees" in fail(capsys, "evaluate", "parsing", *bank, *copied)
    assert "--model a is given 2 times" in fail(capsys, "evaluate", "parsing", *bank, "--model", "a", "--model", "a")


def test_trees_from_elsewhere_and_agreement(files, capsys):
    treebank = make_treebank(read_treebank(sample_path("trees.test.txt")), max_sentences=30)
    for name, branch in (("right", right_branching), ("left", left_branching)):
        lines = [spans_to_brackets(branch(len(w)), w) for w in treebank.words]
        (files / f"{name}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    out = files / "result.json"
    command = ("evaluate", "parsing", "--treebank", sample_path("trees.test.txt"), "--limit", 30)
    command += ("--out", out, "--overwrite")
    run(capsys, *command, "--trees", files / "right.txt")
    expected = score_baselines(treebank)["right"].numbers()
    scores = load_result(out).scores
    assert {name: scores[name] for name in expected} == expected
    run(capsys, *command, "--trees", files / "right.txt", "--trees", files / "left.txt", "--max-length", 20)
    result = load_result(out)
    rows = {row["trees"]: row for row in result.tables["unlabeled F1 (%)"]}
    assert rows[str(files / "right.txt")] == {**rows["right"], "trees": str(files / "right.txt")}
    mean = (rows["right"]["F1 by the convention"] + rows["left"]["F1 by the convention"]) / 2
    assert result.scores["f1"] == pytest.approx(mean)
    assert isinstance(result.scores["num_sentences"], int)
    # Left and right trees share nothing but sentences of one or two words; of one run there is no agreement.
    assert 0 <= result.scores["agreement"] < 5 and "agreement" not in scores


def test_average_of_runs_beside_them(files, capsys):
    runs = {
        "left": "(((We ask) for) peace)\n((((((The state) of) our) Union) is) strong)\n",
        "odd": "\n(((The state) (of our)) ((Union is) strong))\n",
        "right": "(we (ask (for peace)))\n(The (state (of (our (Union (is strong))))))\n",
        "again": "(We (ask (for peace)))\n((The (state (of (our Union)))) (is strong))\n",
    }
    for name, text in runs.items():
        (files / name).write_text(text, encoding="utf-8")
    out, average = files / "result.json", files / "average.txt"
    command = ("evaluate", "parsing", "--treebank", files / "gold.mrg", "--out", out, "--overwrite")
    given = [option for name in runs for option in ("--trees", files / name)]
    run(capsys, *command, *given)
    alone = load_result(out)
    printed = run(capsys, *command, *given, "--consensus", "--save-trees", average)
    result = load_result(out)
    assert average.read_text() == "(We (ask (for peace)))\n(((The state) (of our)) (Union (is strong)))\n"
    # The average is no run: the means are as before.
    assert result.options["consensus"] and "consensus" not in alone.options
    assert result.scores.items() - alone.scores.items() == {("consensus_f1", result.scores["consensus_f1"])}
    table = result.tables["F1 between the runs (%)"]
    assert table[:4] == alone.tables["F1 between the runs (%)"] and len(table) == 5
    assert table[0]["1"] is None and table[0]["3"] == table[2]["1"] == 0 and table[2]["4"] == 60
    assert table[4]["run"] == "5 consensus of the runs" and table[4]["1"] == 20 and "5 consensus of the runs" in printed
    assert result.scores["agreement"] == pytest.approx(sum(row["mean"] for row in table[:4]) / 4, abs=0.01)
    run(capsys, *command, "--trees", average)
    assert load_result(out).scores["f1"] == result.scores["consensus_f1"]
    assert "left is given 2 times" in fail(capsys, *command, *given, "--trees", files / "left")
    (files / "other").write_text(runs["left"].replace("ask", "wish"), encoding="utf-8")
    message = fail(capsys, *command, *given, "--trees", files / "other", "--consensus")
    assert "sentence 1 is 'We wish for peace' in" in message


def test_average_by_evalb(files, capsys):
    trees = ("(S We ask for peace .)", "(S (NP We) (VP ask (PP for peace)) .)", "(S (NP We) (VP ask (X for peace)) .)")
    runs = []
    for number, tree in enumerate(trees):
        (files / f"{number}.mrg").write_text(f"{tree}\n\n", encoding="utf-8")
        runs += ["--trees", files / f"{number}.mrg"]
    command = ("evaluate", "parsing", "--treebank", files / "gold.mrg", "--convention", "evalb")
    command += ("--tree-style", "labeled")
    run(capsys, *command, *runs, "--consensus", "--save-trees", files / "average.mrg", "--out", files / "result.json")
    assert (files / "average.mrg").read_text() == f"{trees[1]}\n\n"
    result = load_result(files / "result.json")
    by_evalb = {row["trees"]: row["f1"] for row in result.tables["labeled brackets by EVALB (%)"]}
    assert result.scores["consensus_f1"] == by_evalb["consensus of the runs"] == by_evalb[str(files / "1.mrg")]
    assert result.scores["f1"] == pytest.approx(sum(by_evalb[str(files / f"{k}.mrg")] for k in range(3)) / 3)


def test_average_of_models_and_of_a_beam(saved_models, files, capsys):
    sentences = [line.split() for line in TEXT.splitlines() if line]
    gpst, on_lstm = saved_models / "gpst", saved_models / "on_lstm"
    command = ("parse", files / "in.txt", "--model", gpst)
    runs = {name: parse_sentences(*model_and_tokenizer(name), sentences) for name in ("gpst", "on_lstm", "rnng")}
    expected = average_parses(runs)
    printed = run(capsys, *command, "--model", on_lstm, "--model", saved_models / "rnng")
    assert printed.splitlines() == [expected[0].brackets(), "", expected[1].brackets()]
    for width, trees in ((4, ()), (8, ("--num-beams", 8)), (3, ("--num-beams", 8, "--num-trees", 3))):
        beam = {"num_beams": max(width, 8 if trees else 4), "num_return_sequences": width}
        expected = average_parses({"gpst": parse_sentences(*model_and_tokenizer("gpst"), sentences, **beam)})
        printed = run(capsys, *command, "--consensus", *trees)
        assert printed.splitlines() == [expected[0].brackets(), "", expected[1].brackets()]
    page = run(capsys, *command, "--consensus", "--format", "html")
    assert "bits in all" in "".join(ElementTree.fromstring(page).itertext())
    # On a treebank the average takes the place of the best tree.
    bank = ("evaluate", "parsing", "--treebank", files / "gold.mrg", "--punctuation", "keep", "--model")
    out = files / "result.json"
    run(capsys, *bank, gpst, "--consensus", "--save-trees", files / "mbr.txt", "--out", out)
    words = load_treebank(files / "gold.mrg", "keep").words
    beam = parse_sentences(*model_and_tokenizer("gpst"), words, num_return_sequences=4)
    assert (files / "mbr.txt").read_text().splitlines() == [s.brackets() for s in average_parses({"gpst": beam})]
    assert load_result(out).options["parse"]["num_return_sequences"] == 4 and load_result(out).options["consensus"]
    for bad in ((*bank, on_lstm, "--consensus"), ("parse", files / "in.txt", "--model", on_lstm, "--consensus")):
        assert "--consensus: ONLSTMForCausalLM has no beam" in fail(capsys, *bad)
    assert "gpst is given 2 times" in fail(capsys, *command, "--model", gpst)
    assert "--cache works with one --model" in fail(capsys, *command, "--model", on_lstm, "--cache", files / "cache")
    assert "--tokenize works with one --model" in fail(capsys, *command, "--model", on_lstm, "--tokenize", "ptb")


def test_evalb_from_the_command_line(saved_models, files, capsys):
    out = files / "result.json"
    command = ("evaluate", "parsing", "--treebank", files / "gold.mrg", "--convention", "evalb")
    command += ("--out", out, "--overwrite")
    run(capsys, *command, "--trees", files / "gold.mrg", "--tree-style", "treebank")
    assert load_result(out).scores["f1"] == 100
    run(capsys, *command, "--model", saved_models / "rnng")
    gold = list(read_treebank(files / "gold.mrg"))
    parsed = parse_sentences(*model_and_tokenizer("rnng"), [sentence.words for sentence in gold])
    trees = [(sentence.hypotheses[0].labels, sentence.hypotheses[0].spans) for sentence in parsed]
    assert load_result(out).scores["f1"] == round(100 * labeled_f1(trees, gold).overall.f1, 2)
    plain = files / "plain.txt"
    plain.write_text("(We (ask (for (peace .))))\n\n", encoding="utf-8")
    assert "the trees have no labels" in fail(capsys, *command, "--trees", plain)
    run(capsys, *command, "--trees", plain, "--unlabeled")
    # All of S, VP, PP and NP (peace) but NP (We), then a sentence without a tree, whose 7 brackets are missed.
    found = load_result(out)
    assert found.scores["num_valid"] == 2 and found.scores["recall"] == round(100 * 4 / (5 + 7), 2)


def test_evalb_counts_files_as_the_program_does(files, capsys):
    """The numbers are those of the program EVALB with COLLINS.prm."""
    tree = "(TOP (S (NP (PRP We)) (VP (VBD gave) ({} (RB up)) (NP (DT the) (NN plan))) (. .)))\n"
    other = "(TOP (S (NP (PRP They)) (VP (VBD came) ({} (RP back)) (ADVP (RB soon))) (. .)))\n"
    gold, pred = files / "one.mrg", files / "two.mrg"
    out, skipped = files / "result.json", "EVALB leaves out {} without a tree and {} with other words"

    def scores(gold_text, pred_text, *options):
        gold.write_text(gold_text, encoding="utf-8")
        pred.write_text(pred_text, encoding="utf-8")
        command = ("evaluate", "parsing", "--treebank", gold, "--trees", pred, "--convention", "evalb", *options)
        assert main([*map(str, command), "--out", str(out), "--overwrite"]) == 0
        found = load_result(out).scores
        return tuple(found[name] for name in ("recall", "precision", "f1", "num_skipped", "num_errors"))

    both = tree.format("ADVP|PRT") + other.format("PRT|ADVP"), tree.format("ADVP") + other.format("PRT")
    assert scores(*both) == (80.0, 80.0, 80.0, 0, 0)
    assert scores(*(text.replace("TOP", "ROOT") for text in both)) == (83.33, 83.33, 83.33, 0, 0)
    assert scores(*both, "--limit", 1) == (80.0, 80.0, 80.0, 0, 0)
    assert scores(*(text + "\n" for text in both)) == (80.0, 80.0, 80.0, 1, 0)
    capsys.readouterr()
    assert scores(both[1], tree.format("ADVP") + "\n") == (100.0, 100.0, 100.0, 1, 0)
    assert skipped.format(1, 0) in capsys.readouterr().err
    # Labels are kept whole on both sides where options change how trees are read, and in averages.
    for more in (["--split-leaves"], ["--consensus"]):
        assert scores(both[0], both[0], *more)[:3] == (100.0, 100.0, 100.0)
    # Gold trees may lie across lines; a wrapper that only one file has is a constituent.
    gold_text = both[0].replace("\n", "").replace(" (S (", "\n(S (").replace(" (VP", "\n(VP")
    assert scores(gold_text + "\n", both[1])[:3] == (80.0, 80.0, 80.0)
    capsys.readouterr()
    assert scores(both[1].replace("(TOP", "("), both[1])[2] < 100
    assert f"only {gold} has brackets without a label" in capsys.readouterr().err
    # A dash that only one side calls punctuation: the words that are left differ.
    dash = "(TOP (S (NP (PRP We)) (VP (VBD gave) (NP (DT the) (NN plan)) (NP ({} --) (NN idea))) (. .)))\n"
    assert scores(both[1] + dash.format(":"), both[1] + dash.format("NN")) == (100.0, 100.0, 100.0, 0, 1)
    assert skipped.format(0, 1) + " (5 gold words, 6 predicted)" in capsys.readouterr().err
    # Trees without tags are over the gold words, and their wrapper does not count.
    plain = "(S (NP We) (VP gave (ADVP up) (NP the plan)) .)\n"
    assert scores(tree.format("ADVP|PRT").replace("TOP", "ROOT"), plain) == (80.0, 80.0, 80.0, 0, 0)
    pred.write_text(dash.format("NN"), encoding="utf-8")
    gold.write_text(dash.format(":"), encoding="utf-8")
    message = fail(capsys, "evaluate", "parsing", "--treebank", gold, "--trees", pred, "--convention", "evalb")
    assert "of 1 sentence, EVALB leaves out 0 without a tree and 1 with other words (5 gold words, 6 pred" in message


def test_styles_that_are_guesses_are_said(files, capsys):
    trees = files / "trees.txt"
    for text, style in (
        ("(S (NP I) (SBAR sleep))\n" * 3, "labeled"),
        ("(これ は ペン です)\n(これ は 本 です)\n", "labeled"),
        ("((NP (NN a)) (VP (VB b)))\n", None),
        ("(S\n(NP (NN a))\n(VP (VB b))\n)\n(S (NP (NN a)) (VP (VB b)))\n", None),
    ):
        trees.write_text(text, encoding="utf-8")
        assert main(["draw", str(trees), "--format", "brackets"]) == 0
        found = capsys.readouterr()
        assert ("read as labeled. If this is wrong" in found.err) == (style == "labeled")
        assert style or "(NP a) (VP b)" in found.out
    # Of a command, --encoding is that of its input; trees that we have written are UTF-8.
    gold = files / "latin.mrg"
    gold.write_text("(S (NP (NN Bäume)) (VP (VB wachsen)))\n", encoding="latin-1")
    for encoding in ("utf-8", "latin-1"):
        trees.write_text("(S (NP Bäume) (VP wachsen))\n", encoding=encoding)
        command = ["evaluate", "parsing", "--treebank", str(gold), "--trees", str(trees), "--encoding", "latin-1"]
        assert "| f1 | 100" in run(capsys, *command, "--tree-style", "labeled")


def test_a_table_of_models_by_conventions(saved_models, files, capsys, monkeypatch):
    """The numbers and tests of single commands, though every model is loaded and parses once."""
    bank = ("--treebank", sample_path("trees.test.txt"), "--limit", 12)
    names = [str(saved_models / name) for name in ("on_lstm", "rnng")]
    short = ["on_lstm", "rnng"]
    conventions = {"gpst": (), "compound-pcfg-corpus": (), "evalb": ("--unlabeled",)}
    single = {}
    for name in names:
        for convention, more in conventions.items():
            out = files / "single.json"
            saved = ("--save-trees", files / f"{Path(name).name}.{convention}.mrg")
            command = ("evaluate", "parsing", *bank, "--model", name, "--convention", convention, *more, *saved)
            run(capsys, *command, "--out", out, "--overwrite")
            single[f"{convention} {Path(name).name}"] = load_result(out).scores["f1"]
    right = {row["trees"]: row for row in load_result(out).tables.get("unlabeled F1 (%)", [])}
    assert not right  # of EVALB
    loaded, pretrained = [], TextScorer.from_pretrained
    noted = lambda name, **how: loaded.append(name) or pretrained(name, **how)  # noqa: E731
    monkeypatch.setattr(TextScorer, "from_pretrained", noted)
    given = [word for name in names for word in ("--model", name)]
    given += [word for name in conventions for word in ("--convention", name)]
    command = ("evaluate", "parsing", *bank, *given, "--unlabeled")
    table = run(capsys, *command, "--out", files / "table.json")
    assert table.startswith("# parsing by conventions: on_lstm, rnng\n\nunit percent, convention gpst: ")
    assert loaded == names
    result = load_result(files / "table.json")
    baselines = {key: value for key, value in result.scores.items() if key.endswith(" right branching")}
    assert result.scores == {**single, **baselines} and len(baselines) == 3
    run(capsys, "evaluate", "plot", files / "table.json", "--out", files / "table.svg")
    texts = {text.strip() for text in ElementTree.parse(files / "table.svg").getroot().itertext()}
    assert {"%", "gpst on_lstm", "parsing by conventions: table"} <= texts and "gpst: sentence F1" not in texts
    treebank = load_treebank(sample_path("trees.test.txt"), max_sentences=12)
    assert baselines["gpst right branching"] == score_baselines(treebank)["right"].numbers()["f1"]
    rows = result.tables["F1 (%)"]
    assert [row["trees"] for row in rows] == [*short, "right branching"]
    assert [row["evalb"] for row in rows[:2]] == [single[f"evalb {name}"] for name in short]
    # The rows name method and beam, and the models all that the single command of the same model records.
    search = ("search, action beam 12, fast track 1", 4)
    assert [(row["method"], row["num_beams"]) for row in rows] == [("distance", None), search, (None, None)]
    for described, name in zip(result.model["models"], names, strict=True):
        run(capsys, "evaluate", "parsing", *bank, "--model", name, "--out", out, "--overwrite")
        alone = load_result(out)
        assert described.pop("options").items() <= alone.options.items() and described == alone.model
    tested = [row for row in result.tables["differences of sentence F1 (%)"] if row["convention"].startswith("gpst")]
    assert [row["systems"] for row in tested][0] == ", ".join(short) and len(tested) == 3
    both = (files / "on_lstm.gpst.mrg", files / "rnng.gpst.mrg")
    run(capsys, "evaluate", "compare", *both, *bank, "--out", out, "--overwrite")
    assert {name: tested[0][name] for name in ("first", "second", "second - first", "p")} == {
        name: load_result(out).scores[name] for name in ("first", "second", "second - first", "p")
    }
    assert result.tables["conventions"][0]["punctuation"] == "punctuation removed before parsing"
    assert [row["convention"] for row in result.tables["conventions"]] == [*list(conventions)[:2], "evalb, COLLINS.prm"]


def test_a_table_of_models_without_labels_and_of_files(saved_models, files, capsys):
    """Labeled brackets of a model without labels have no score; trees of files are scored alike."""
    command = ("evaluate", "parsing", "--treebank", sample_path("trees.test.txt"), "--limit", 12)
    models, trees = [], []
    for name in ("on_lstm", "rnng"):
        saved = files / f"{name}.mrg"
        run(capsys, *command, "--model", saved_models / name, "--save-trees", saved)
        models, trees = [*models, "--model", saved_models / name], [*trees, "--trees", saved]
    two, out = ("--convention", "compound-pcfg", "--convention", "compound-pcfg-corpus"), files / "f1.json"
    assert main(list(map(str, (*command, *models, *two, "--convention", "evalb", "--out", out)))) == 0
    said, result = capsys.readouterr(), load_result(out)
    assert f"evalb: {saved_models / 'on_lstm'} has no score, because its trees have no labels" in said.err
    assert "| on_lstm | distance |" in said.out
    assert "| rnng |" in run(capsys, *command, *models, "--convention", "evalb")  # the score of RNNG is left
    pair = ("--model", saved_models / "gpst", *models[:2])
    assert "no model gives trees with labels" in fail(capsys, *command, *pair, "--convention", "evalb")
    rows = result.tables["differences of sentence F1 (%)"]  # of means over sentences and over the corpus the same
    assert [row["convention"] for row in rows] == ["compound-pcfg, compound-pcfg-corpus"] * 3
    assert all(row["second - first"] == round(row["second"] - row["first"], 2) for row in rows)
    run(capsys, *command, *trees, *two, "--out", out, "--overwrite")
    assert list(load_result(out).scores.values()) == [v for k, v in result.scores.items() if not k.startswith("evalb")]
    latex = run(capsys, *command, *trees, *two, "--format", "latex")
    begin = "% F1 (%)\n\\begin{tabular}{lrr}\n\\toprule\ntrees & compound-pcfg & compound-pcfg-corpus \\\\\n"
    right = f"right branching & {result.scores['compound-pcfg right branching']:.2f} & "
    assert latex.startswith(begin) and latex.count("\\end{tabular}") == 3 and right in latex
    assert "need --convention evalb" in fail(capsys, *command, *trees, *two, "--unlabeled")
    labeled = (*trees, *two, "--convention", "evalb", "--punctuation", "remove")
    assert main(list(map(str, (*command, *labeled, "--out", out, "--overwrite")))) == 0
    said, again = capsys.readouterr(), load_result(out)
    assert f"no score by evalb: {files / 'on_lstm.mrg'}: the trees have no labels. Score them by --unlab" in said.err
    assert [name for name in again.scores if name.startswith("evalb")] == ["evalb rnng.mrg"]
    assert "| score |" not in said.out and "p not corrected for the number of tests; none by evalb" in said.out
    trees[1].write_text("(We ask)\n", encoding="utf-8")
    assert "1 sentence, but the treebank has 12" in fail(capsys, *command, *trees, *two)


@pytest.mark.parametrize("words", ["parse", "evaluate parsing --treebank", "surprisal"])
def test_a_beam_is_for_the_models_that_have_one(words, saved_models, files, capsys, caplog):
    """The others go without; if none has one, it is refused. A folder of a run is said once."""
    (files / "run").mkdir()
    (files / "run/model").symlink_to(saved_models / "on_lstm")
    command = [*words.split(), files / ("gold.mrg" if "treebank" in words else "in.txt"), "--num-beams", 2]
    said = remarks(capsys, *command, "--model", files / "run", "--model", saved_models / "rnng")
    assert f"--num-beams: no effect on {files / 'run/model'} (no beam of trees)" in said
    assert (said + caplog.text).count("is the output folder of a training run") == 1
    refused = fail(capsys, *command, "--model", saved_models / "on_lstm", "--model", saved_models / "pcfg")
    assert "--num-beams: ONLSTMForCausalLM has no beam of trees" in refused


def test_what_a_table_of_models_cannot_take(saved_models, capsys):
    one = ("evaluate", "parsing", "--treebank", sample_path("trees.test.txt"), "--model", saved_models / "on_lstm")
    refused = (*one, "--model", saved_models / "rnng", "--convention", "gpst", "--convention", "evalb")
    assert "--consensus and --save-trees take one --model and one --convention" in fail(capsys, *refused, "--consensus")
    assert "--method is given 2 times for 1 model" in fail(capsys, *one, "--method", "a", "--method", "b")
    assert "--cache c holds trees of one model" in fail(capsys, *refused, "--cache", "c")
    assert "--convention gpst is given 2 times" in fail(capsys, *refused, "--convention", "gpst")


def test_each_model_of_a_table_has_its_method(saved_models, files, capsys):
    bank = ("--treebank", sample_path("trees.test.txt"), "--limit", 12)
    out, expected = files / "f1.json", {}
    for name, method, beam in (("gpst", "mbr", None), ("rnng", "search", 4)):
        model = ("--model", saved_models / name, "--method", method)
        run(capsys, "evaluate", "parsing", *bank, *model, "--out", out, "--overwrite")
        expected[name] = (method, beam, load_result(out).scores["f1"])
    expected["rnng"] = ("search, action beam 12, fast track 1", *expected["rnng"][1:])
    models = [word for name in expected for word in ("--model", saved_models / name)]
    methods = ("--method", "mbr", "--method", "search")
    run(capsys, "evaluate", "parsing", *bank, *models, *methods, "--out", out, "--overwrite")
    rows = {row["trees"]: (row["method"], row["num_beams"], row["gpst"]) for row in load_result(out).tables["F1 (%)"]}
    assert rows.pop("right branching")[:2] == (None, None) and rows == expected
    message = fail(capsys, "evaluate", "parsing", *bank, *models, "--method", "mbr")
    assert "rnng (--method may be given once for each" in message and "RNNGForCausalLM has no method 'mbr'" in message
    (files / "copies").mkdir()
    (files / "copies/gpst").symlink_to(saved_models / "gpst")
    paths = [saved_models / "gpst", files / "copies/gpst"]
    for method in ("inside", "search"):  # once for all models; equal names of folders stay paths
        models = [word for path in paths for word in ("--model", path)]
        run(capsys, "evaluate", "parsing", *bank, *models, "--method", method, "--out", out, "--overwrite")
        rows = load_result(out).tables["F1 (%)"]
        assert [row["trees"] for row in rows[:2]] == list(map(str, paths)) and rows[0]["method"] == rows[1]["method"]
        assert rows[0]["method"] == method and rows[0]["gpst"] == rows[1]["gpst"]


def test_wrong_input_of_evaluate_parsing(saved_models, files, capsys):
    command = ("evaluate", "parsing", "--treebank", files / "gold.mrg")
    trees = files / "trees.txt"
    trees.write_text("(We (ask (for peace)))\n", encoding="utf-8")
    assert f"{trees}: 1 sentence, but the treebank has 2" in fail(capsys, *command, "--trees", trees)
    gold = "".join(f"(S (NP (PRP We)) (VP (VBP ask)) (. {mark}))\n" for mark in "..")
    (files / "marks.mrg").write_text(gold, encoding="utf-8")
    for style, given, remedy in (
        (
            "(We ask)\n",
            ("--convention", "evalb"),
            "lack punctuation. Add --punctuation remove and --unlabeled. Scores are then",
        ),
        ("(S (NP We) (VP ask))\n", ("--punctuation", "keep"), "lack punctuation. Add --punctuation remove"),
        ("(We (ask .))\n", (), "have punctuation. Add --punctuation ignore (punctuation is not scored, as in"),
    ):
        (files / "other.txt").write_text(style * 2, encoding="utf-8")
        scored = ("evaluate", "parsing", "--treebank", files / "marks.mrg", "--trees", files / "other.txt")
        assert f"The trees {remedy}" in fail(capsys, *scored, *given)
        asked = remedy.split("Add ")[1].partition(".")[0].partition(" (")[0].replace("and ", "").split()
        run(capsys, *scored, *(given if "evalb" in given else ()), *asked)
    assert "give either --model" in fail(capsys, *command)
    message = fail(capsys, *command, "--trees", trees, "--convention", "wsj")
    assert "'wsj'" in message and "palm, evalb" in message
    assert "need --convention evalb" in fail(capsys, *command, "--trees", trees, "--unlabeled")
    assert "CUTOFF_LEN" in fail(capsys, *command, "--trees", trees, "--convention", "evalb", "--max-length", 9)
    message = fail(capsys, *command, "--trees", trees, "--num-beams", 3, "--seed", 1)
    assert "--seed, --num-beams: --trees are already parsed" in message


def test_remedies_for_trees_over_other_words_work(saved_models, files, capsys):
    gold, own, model = files / "marks.mrg", files / "own.mrg", files / "m.mrg"
    whole = "(S (NP (PRP We)) (VP (VBP ask) (NP (NN sit) (HYPH -) (NNS ins)) {} (ADVP (RB now)) {}) (. .))\n"
    whole, typed = whole.format("(-LRB- -LRB-)", "(-RRB- -RRB-)"), whole.format("(-LRB- ()", "(-RRB- ))")
    some = "(S (NP (PRP We)) (VP (VBP ask) (NP (NN sit) (HYPH -) (NNS ins)) (ADVP (RB now))))\n"
    none, other = some.replace(" (HYPH -)", ""), some.replace("We", "I")
    gold.write_text(13 * whole, encoding="utf-8")
    command = ("evaluate", "parsing", "--treebank", gold)

    def fails(trees, *more):
        own.write_text(trees, encoding="utf-8")
        return fail(capsys, *command, "--trees", own, *more)

    keep, ignore, evalb = ("--punctuation", "keep"), ("--punctuation", "ignore"), ("--convention", "evalb")
    # Some punctuation is left: no treatment fits, and the words are named.
    assert "same words: leave out '-', too: the treebank counts this as punctuation" in fails(13 * some)
    for more in (keep, ignore):
        assert "same words: put in '-lrb-', '-rrb-', '.'" in fails(13 * some, *more)
    assert "leave out 'i'; put in 'we'; check their order" in fails(12 * some + other)
    # Trees of a file and of a model.
    both = fails(13 * whole, "--model", saved_models / "rnng")
    assert "Then give --trees own.mrg --trees m.mrg. If the trees have punctuation, add" in both
    saved = (*command, "--model", saved_models / "rnng", "--save-trees", model, "--overwrite")
    run(capsys, *saved)
    compared = ("evaluate", "compare", own, model, "--treebank", gold)
    for more in (keep, ignore, ("--punctuation", "remove")):
        message = f"Punctuation is in {own}, but not in {model}. Parse again for {model} (`"
        assert message in fail(capsys, *compared, *more) and message in fails(13 * whole, "--trees", model, *more)
    run(capsys, *saved, *ignore)
    run(capsys, *compared, *ignore)
    run(capsys, *command, "--trees", own, "--trees", model, *ignore)
    # EVALB: what it cannot score is no loss for the other conventions.
    message = fails(12 * none + whole, *evalb)
    assert "12 with other words (8 gold words, 5 predicted; only punctuation differs: give all of it, or" in message
    assert message.endswith("or raise MAX_ERROR in a parameter file (--prm)")
    (files / "more.prm").write_text("DELETE_LABEL .\nMAX_ERROR 20\n", encoding="utf-8")
    run(capsys, *command, "--trees", own, *evalb, "--prm", files / "more.prm")
    assert "EVALB takes ( and ) for brackets: write words as -LRB- and -RRB-)" in fails(13 * typed, *evalb)
    for trees, more in ((none, ()), (typed, keep)):
        own.write_text(13 * trees, encoding="utf-8")
        table = (*command, "--trees", own, *evalb, "--convention", "gpst", "--convention", "palm", *more)
        said = remarks(capsys, *table, "--out", files / "f1.json", "--overwrite")
        assert f"no score by evalb: {own}: of 13 sentences" in said
        found = load_result(files / "f1.json").scores
        assert found["gpst own.mrg"] == found["palm own.mrg"] == 100 and "evalb own.mrg" not in found
    run(capsys, *command, "--trees", own, *evalb, "--limit", 1, *ignore)


def test_what_cannot_be_scored_is_told_before_parsing(saved_models, files, capsys, monkeypatch):
    long = " ".join(f"(NN hope{k})" for k in range(90))
    (files / "long.mrg").write_text(f"(S (NP (PRP We)) (VP (VBP ask)))\n(NP {long})\n", encoding="utf-8")
    command = ("evaluate", "parsing", "--treebank", files / "long.mrg", "--model", saved_models / "gpst")
    out = files / "result.json"
    run(capsys, *command, "--max-length", 40, "--method", "inside", "--out", out)
    result = load_result(out)
    assert result.options["num_beams"] is None and result.options["parse"] == {"method": "inside"}
    assert result.scores["num_sentences"] == 1 and result.scores["depth"] == 1 and result.command.startswith("synlm ")
    monkeypatch.setattr("hf_synlm.evaluation.trees.treebank_parsing.collate_contexts", None)
    message = fail(capsys, *command)
    assert "sentence 2 of 90 words" in message and "(1 of 2 sentences are too long)" in message
    assert "none of 2 sentences is scored" in fail(capsys, *command, "--max-length", 1)
    assert "gpst gives trees without labels" in fail(capsys, *command, "--convention", "evalb")


# ------------------------------------------------------------------------------------------------------ without torch
ROOT = Path(hf_synlm.__file__).parents[1]
# But for the two programs on `Trainer`: the class of its options imports torch.
TRAINING = [name for name, (module, _) in PROGRAMS.items() if module in COMMAND_LINES]
WITHOUT_TORCH = {
    "help": "--help",
    "version": "--version",
    "a picture": "draw gold.mrg",
    "help of a command": "evaluate parsing -h",
    "help of another": "export -h",
    "no such file": "surprisal missing.txt --model m",
    "trees": "evaluate parsing --treebank gold.mrg --trees gold.mrg --punctuation keep --out f1.json --overwrite",
    "average": "evaluate parsing --treebank gold.mrg --trees gold.mrg --trees b.mrg --punctuation keep --consensus",
    "evalb": "evaluate parsing --treebank gold.mrg --trees gold.mrg --convention evalb",
    "table": "evaluate parsing --treebank gold.mrg --trees gold.mrg --trees b.mrg --punctuation keep --convention gpst "
    "--convention palm",
    "compare": "evaluate compare gold.mrg b.mrg --treebank gold.mrg --punctuation keep",
    "plot": "evaluate plot f1.json --out f1.svg --overwrite",
    "an unknown option": "surprisal in.txt --model m --nonsense 1",
    "an unknown convention": "evaluate parsing --treebank gold.mrg --model m --convention nonsense",
    "no model": "evaluate parsing --treebank gold.mrg",
    "options of a model": "evaluate parsing --treebank gold.mrg --trees gold.mrg --num-beams 5",
    "one file twice": "evaluate compare gold.mrg gold.mrg --treebank gold.mrg",
    # Configurations need transformers.
    "info": f"info {ROOT / 'model_cards' / 'gpst-tiny'}",
    "info of an adapter": f"info {ROOT / 'model_cards' / 'span-parser-mini'} --format json",
    "info of code": "info --files rnng",
    "no such model": "info ./nothing",
    "no login": "push gpst org/model",
    "an output that exists": f"export {ROOT / 'model_cards' / 'gpst-tiny'} --out .",
    "configurations": "train gpst --list-configs",
    "a program without configurations": "train ngram --list-configs",
    **{f"help of {name}": f"train {name} --help" for name in TRAINING},
    **{f"no option of {name}": f"train {name}" for name in TRAINING},
    "an option of no program": "train rnng --output-dir x --nothing",
    "an option of text that should be a number": "train rnng --output-dir x --seed a",
    "an unknown choice": "train rnng --output-dir x --precision fp8",
}
LOADED = """
import sys, synlm
for name, command in %r.items():
    status = synlm.main(command.split())
    loaded = [x for x in sys.modules if x in ("torch", "transformers") or "modeling_" in x]
    print("ended:", name, status, loaded)
"""


def test_commands_that_need_no_model_do_not_load_torch(files, saved_models):
    (files / "gpst").symlink_to(saved_models / "gpst")
    (files / "b.mrg").write_text(GOLD, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", LOADED % WITHOUT_TORCH]
    done = subprocess.run(program, cwd=files, env=environment, capture_output=True, text=True)
    ended = [line for line in done.stdout.splitlines() if line.startswith("ended:")]
    failing = {name for name in WITHOUT_TORCH if name[:3] in ("an ", "no ") or name.startswith(("options", "one"))}
    names = list(WITHOUT_TORCH)
    loaded = [[]] * names.index("info") + [["transformers"]] * len(names)
    expected = [f"ended: {name} {2 if name in failing else 0} {x}" for name, x in zip(names, loaded, strict=False)]
    assert ended == expected, done.stderr
    assert "gold.mrg is given twice" in done.stderr and "no login on the Hub" in done.stderr
    assert set(PROGRAMS) - set(TRAINING) == {"treereg", "tree-planting"}
