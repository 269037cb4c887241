"""Surprisal of words with given trees: its parts are those of the joint probability, and it is incremental."""

import json
from pathlib import Path

import pytest

from hf_synlm.data.gold_trees import encode_trees
from hf_synlm.data.treebank import TreebankSentence, parse_treebank
from hf_synlm.evaluation.text.given_trees import find_trees, fit_labels, score_given_trees
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import word_table
from hf_synlm.evaluation.text.tables import table_text
from hf_synlm.evaluation.text.text_items import TextItem, read_items
from hf_synlm.evaluation.text.tree_files import Proposals, batch_trees
from hf_synlm.hub.abilities import tree_codec
from tests.helpers.commands import fail, run
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer, scorer_of

TREES = """(S (NP (X the) (X people)) (VP (X ask) (NP (X for) (X peace))) (X .))
(S (X We) (VP (X ask)))
(S (VP (X We) (X ask)))
(NP (X America))
"""
TEXTS = ["We ask", "the people ask for peace.", "", "America", "We ask"]
ITEMS = [TextItem(str(number), text) for number, text in enumerate(TEXTS, 1)]


def batch_of(scorer: TextScorer, tree: TreebankSentence) -> dict:
    """One given tree as arguments of `forward`."""
    codec = tree_codec(scorer.model.config)
    return batch_trees(scorer, codec, encode_trees([tree], scorer.tokenizer, codec, scorer.text_style))


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    file = tmp_path / "gold.mrg"
    file.write_text(TREES)
    return file


@pytest.mark.parametrize("architecture", ["gpst", "rnng", "rnng_pieces", "tree_lm", "urnng", "pushdown"])
def test_parts_add_up_to_the_joint_probability(architecture: str, trees: Path) -> None:
    scorer = scorer_of(architecture)
    given = find_trees(Proposals([trees]), ITEMS)
    assert [tree and tree.source.rsplit(":")[-1] for tree in given] == ["2", "1", None, "4", "3"]
    scores = score_given_trees(scorer, ITEMS, given)
    assert [len(found.words) for found in scores] == [2, 5, 0, 1, 2]
    for tree, found in zip(given, scores, strict=True):
        if tree is not None:
            joint = scorer.model(**batch_of(scorer, tree)).joint_log_prob.item()
            assert found.log_probs.sum().item() + found.end == pytest.approx(joint, abs=1e-4)
            assert (found.lexical - found.log_probs).min() > -1e-5 and found.num_tokens.min() >= 1
    # Nothing depends on what follows.
    lines = ["(S (NP (X the) (X people)) (VP (X ask) (X We)))", "(S (NP (X the) (X people)) (VP (X ask) (X the)))"]
    lines.append("(S (S (NP (X the) (X people)) (VP (X ask))) (X the))")
    others = list(parse_treebank(lines))
    found = score_given_trees(scorer, [TextItem("", " ".join(tree.words)) for tree in others], others)
    first, second, third = ((one.log_probs, one.lexical) for one in found)
    assert first[0][:3].tolist() == pytest.approx(second[0][:3].tolist(), abs=1e-5)
    assert second[0][3].item() != pytest.approx(third[0][3].item(), abs=1e-5)
    structural = [(one[0] - one[1]).tolist() for one in (first, second)]
    if architecture not in ("gpst", "rnng_pieces"):  # these read words of several tokens
        assert structural[0] == pytest.approx(structural[1], abs=1e-5)


@pytest.mark.parametrize("architecture", ["tree_lm", "tree_lm_gpt2"])
def test_attention_entropies_of_given_trees(architecture: str, trees: Path) -> None:
    """Of the tree of each text, in batches; leaves of one word are added."""
    scorer = scorer_of(architecture, attention_entropy="projected")
    given = find_trees(Proposals([trees]), ITEMS)
    scores = score_given_trees(scorer, ITEMS, given)
    for tree, found in zip(given, scores, strict=True):
        expected = []
        if tree is not None:
            tokens = scorer.model.attention_entropy(**batch_of(scorer, tree))[0].tolist()
            expected = [*tokens[: len(found.words) - 1], sum(tokens[len(found.words) - 1 : len(tree.words)])]
        assert found.more["nae"].tolist() == pytest.approx(expected, abs=1e-5)
    assert scores[0].more["nae"].tolist() != pytest.approx(scores[4].more["nae"].tolist(), abs=1e-3)


def test_a_text_has_one_tree(trees: Path) -> None:
    proposals = Proposals([trees])
    refused(r"sentence 1 has 2 different trees, but occurs 1 times in the input: 'We", find_trees, proposals, ITEMS[:1])
    with pytest.raises(ValueError, match=r"sentence 2 has no tree in .*gold.mrg: 'nobody asks'"):
        find_trees(proposals, [ITEMS[3], TextItem("2", "nobody asks")])
    twice = find_trees(proposals, [ITEMS[1]] * 2)
    assert twice[0] == twice[1]
    item = TextItem("1", "the people ask forpeace.")
    with pytest.raises(ValueError, match="on_lstm give no probability to given trees"):
        score_given_trees(scorer_of("on_lstm"), [item], find_trees(proposals, [item]))
    item = TextItem("1", "the people ask for pe ace.")
    with pytest.raises(ValueError, match=r"gold.mrg:1: the leaf 'peace' covers the words 'pe ace.' of the text"):
        score_given_trees(scorer_of("urnng"), [item], find_trees(proposals, [item]))


def test_labels_that_the_model_lacks() -> None:
    scorer = scorer_of("rnng")
    given = list(parse_treebank(["(S (NML (X the) (X people)) (VP (X ask)))", "(S (X We) (VP (X ask)))"]))
    with pytest.raises(ValueError, match=r"some labels of the 2 trees: NML in 1. Its labels are NP, S, VP"):
        score_given_trees(scorer, [TextItem("1", "the people ask"), TextItem("2", "We ask")], given)
    dropped, changed = fit_labels(scorer, given, drop=True)
    assert changed == 1 and dropped[0].labeled_spans == (("VP", 2, 3), ("S", 0, 3)) and dropped[1] == given[1]
    renamed, changed = fit_labels(scorer, given, renamed={"NML": "NP"})
    assert changed == 1 and ("NP", 0, 2) in renamed[0].labeled_spans
    # A unary chain is one label of a binary tree.
    given = list(parse_treebank(["(S (NP (QP (X the) (X people))) (VP (X ask)))"]))
    scorer = scorer_of("tree_lm_binary")
    refused(r"NP\+QP in 1", fit_labels, scorer, given)
    dropped, _ = fit_labels(scorer, given, drop=True)
    assert dropped[0].labeled_spans == (("VP", 2, 3), ("S", 0, 3))
    assert fit_labels(scorer_of("gpst"), given) == (given, 0)
    refused("GPSTForCausalLM does not read labels", fit_labels, scorer_of("gpst"), given, drop=True)


def test_labels_of_whole_sentences_stay() -> None:
    """Without them, a tree would be read under another root."""
    scorer, given = scorer_of("rnng"), list(parse_treebank(["(SQ (NP (X the)) (VP (X ask)))"]))
    for how in ({"drop": True}, {"renamed": {"SQ": ""}}):
        refused(r"labels of whole sentences cannot be left out: SQ in 1\. .*'SQ S'", fit_labels, scorer, given, **how)
    renamed, _ = fit_labels(scorer, given, renamed={"SQ": "S", "NP": ""})
    assert renamed[0].labeled_spans == (("VP", 1, 2), ("S", 0, 2))


MARKS = [
    ("`` We ask '' -- -LRB- peace -RRB-", '"We ask" — (peace)'),
    ("`` We ask '' -- -LRB- peace -RRB-", "“We ask” -- (peace)"),
    ("the people ' '' ask", "the people’” ask"),
    ("We `` ask '' ...", "We 'ask'…"),
]


@pytest.mark.parametrize(("leaves", "text"), MARKS)
def test_marks_of_treebanks_are_those_of_print(leaves: str, text: str, tmp_path: Path) -> None:
    words = leaves.split()
    file = _file(tmp_path / "gold.mrg", f"(S {' '.join(f'(X {word})' for word in words)})\n")
    item = TextItem("1", text)
    [found] = score_given_trees(scorer_of("rnng"), [item], find_trees(Proposals([file]), [item]))
    assert found.num_tokens.sum().item() == len(words) and len(found.words) == len(text.split())


def test_trees_that_a_model_wrote(trees: Path, tmp_path: Path) -> None:
    """Bracket files of `synlm parse`, whose leaves have no tags."""
    file = _file(tmp_path / "parses.txt", "(S (NP the people) (VP ask (NP for peace)) .)\n(S We (VP ask))\n")
    expected, found = (find_trees(Proposals([path]), ITEMS[1:2]) for path in (trees, file))
    assert found[0].words == expected[0].words and set(found[0].labeled_spans) == set(expected[0].labeled_spans)


def test_command(trees: Path, saved_models: Path, capsys: pytest.CaptureFixture) -> None:
    """A table with a word per row, of which one holds several leaves; the columns are those of all models."""
    table, out, labels = (trees.with_name(name) for name in ("words.tsv", "out.tsv", "labels.txt"))
    rows = [["w", "item"], *([word, "1"] for word in "the people ask for peace.".split())]
    table.write_text(table_text(rows))
    command = ["surprisal", table, "--word-column", "w", "--model", saved_models / "rnng", "--trees", trees]
    run(capsys, *command, "--out", out)
    [item] = read_items(table, word_column="w")
    given = find_trees(Proposals([trees]), [item])
    expected = word_table([item], score_given_trees(scorer_of("rnng"), [item], given))
    found = [line.split("\t") for line in out.read_text().splitlines()[1:]]
    assert [row[3] for row in found] == "the people ask for peace.".split() and found[-1][4] == "2"
    for at in (6, 7, 8):
        assert [float(row[at]) for row in found] == pytest.approx([row[at] for row in expected], abs=1e-4)
    assert [float(row[7]) + float(row[8]) for row in found] == pytest.approx([row[6] for row in expected], abs=1e-4)
    meta = json.loads(Path(f"{out}.meta.json").read_text())["options"]
    assert (meta["estimator"], meta["num_beams"], meta["trees_changed"]) == ("joint with given trees", None, 0)
    assert meta["trees"][0]["sha256"]
    trees.write_text(TREES.replace("(NP (X the)", "(NML (X the)"))
    assert "NML in 1. Its labels are NP, S, VP. --unknown-labels drop" in fail(capsys, *command)
    dropped = run(capsys, *command, "--unknown-labels", "drop")
    renamed, alone = (run(capsys, *command, "--unknown-labels", _file(labels, s)) for s in ("NML NP\n", "NML\n"))
    assert dropped == alone != renamed == out.read_text()
    assert "'NML NP S' is neither" in fail(capsys, *command, "--unknown-labels", _file(labels, "NML NP S\n"))
    for option in (["--context", "document"], ["--num-beams", "3"], ["--tokenize", "ptb"], ["--word-correction"]):
        assert f"{option[0]}: with --trees every sentence" in fail(capsys, *command, *option)
    assert "--unknown-labels belongs to --trees" in fail(capsys, *command[:-2], "--unknown-labels", "drop")


def test_attention_entropies_by_the_command(trees: Path, capsys: pytest.CaptureFixture) -> None:
    """Over a beam, or of given trees; others are refused before anything is read."""
    for part in model_and_tokenizer("tree_lm"):
        part.save_pretrained(trees.with_name("model"))
    texts, out = _file(trees.with_name("in.txt"), "the people ask for peace.\nAmerica\n"), trees.with_name("out.tsv")
    command = ["surprisal", texts, "--model", trees.with_name("model"), "--out", out, "--overwrite"]
    tables = []
    for where in ([], ["--trees", trees]):
        run(capsys, *command, "--attention-entropy", "raw", *where)
        header, *rows = (line.split("\t") for line in out.read_text().splitlines())
        tables.append([float(row[header.index("nae_raw")]) for row in rows])
        assert len(rows) == 6 and min(tables[-1]) > 0
        assert json.loads(Path(f"{out}.meta.json").read_text())["options"]["attention_entropy"] == "raw"
    assert tables[0] != tables[1]
    message = fail(capsys, *command, "--attention-entropy", "raw", "--lmzoo")
    assert "--attention-entropy: --lmzoo has four columns" in message


def _file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path
