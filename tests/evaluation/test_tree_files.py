"""Sums over given trees: exact where all trees are given, a bound elsewhere."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch

from hf_synlm.data.parsed import Hypothesis, ParsedSentence
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.suites.blimp import evaluate_pairs, read_pairs
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.evaluation.text.tree_files import Proposals, evaluate_proposals, read_proposals, score_proposals
from hf_synlm.generation.given_trees import TreeScoringMixin
from hf_synlm.trees.codecs import binary_token_spans, tree_attachments
from tests.helpers.commands import fail, run
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import scorer_of
from tests.models.pushdown.test_modeling_pushdown import histories

WORDS = ("the", "people", "of", "America")


def binary_trees(words: tuple[str, ...], label: str = "NP") -> list[str]:
    """All binary trees of some words, in brackets."""
    if len(words) == 1:
        return [f"(X {words[0]})"]
    halves = [product(binary_trees(words[:at], label), binary_trees(words[at:], label)) for at in range(1, len(words))]
    return [f"({label} {left} {right})" for pairs in halves for left, right in pairs]


@pytest.fixture
def trees(tmp_path: Path) -> Path:
    """The five binary trees of four words, two of them twice, and a tree of another sentence between them."""
    lines = binary_trees(WORDS)
    file = tmp_path / "trees.txt"
    file.write_text("\n".join([*lines[:2], "", "(S (X We) (X ask))", *reversed(lines)]) + "\n")
    return file


def test_sum_over_all_trees_is_the_probability(trees: Path) -> None:
    """A beam as wide as all derivations gives the same: the end token stands beside the tree of the words."""
    scorer = scorer_of("urnng", num_beams=60)
    score = score_proposals(scorer_of("urnng"), WORDS, read_proposals([trees])[WORDS])
    assert (score.num_tokens, score.num_trees) == (4, 5)
    ids = torch.tensor([[*scorer.tokenizer(" ".join(WORDS))["input_ids"], scorer.model.config.eos_token_id]])
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(TreeScoringMixin, "joint_log_probs")  # as in folders that were exported earlier
        again = score_proposals(scorer_of("urnng"), WORDS, read_proposals([trees])[WORDS])
    assert again == score
    found = scorer.model.parse(ids, torch.ones_like(ids), num_beams=60, num_return_sequences=60)
    assert len(found.spans[0]) == 5 and all((0, 4) in spans for spans in found.spans[0])
    closed = found.log_probs[0, :5].double()
    assert score.log_prob == pytest.approx(float(closed.logsumexp(0)), abs=1e-4)
    [whole] = score_words(scorer, [TextItem("1", " ".join(WORDS))], end=True)
    total = sum(log_prob for _, log_prob in whole.tokens) + whole.end
    assert total == pytest.approx(float(closed.logsumexp(0)), abs=1e-4)


def test_the_score_may_stand_behind_the_tree(tmp_path: Path) -> None:
    file = tmp_path / "n.best"
    file.write_text("0 ||| -1.5 ||| (S (X We) (X ask))\n1 ||| (S (X We) (X agree)) ||| -2\n")
    assert set(read_proposals([file])) == {("We", "ask"), ("We", "agree")}


def test_pushdown_layers_predict_the_end_token(trees: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a text is the end token, and before it the end word, if there is one."""
    scorer = scorer_of("pushdown", num_beams=200)
    [words] = score_words(scorer, [TextItem("1", " ".join(WORDS))], end=True)
    eos, ids = scorer.model.config.eos_token_id, scorer.tokenizer(" ".join(WORDS))["input_ids"]
    attachments = torch.tensor([[*tree, -100] for tree in histories(len(ids))])
    each = torch.tensor([[*ids, eos]]).expand_as(attachments)
    expected = scorer.model(each, attachments=attachments).joint_log_prob.logsumexp(0)
    assert sum(log_prob for _, log_prob in words.tokens) + words.end == pytest.approx(float(expected), abs=1e-4)
    score = score_proposals(scorer_of("pushdown"), WORDS, read_proposals([trees])[WORDS])
    assert score.log_prob < sum(log_prob for _, log_prob in words.tokens) + words.end < score.log_prob + 3
    # An end word, as in the authors' data, is attached to the begin token.
    monkeypatch.setattr(scorer.model.config, "end_token_id", 5)
    ended = score_proposals(scorer, WORDS, read_proposals([trees])[WORDS][:1])
    assert scorer.closing_ids == [5, eos] and ended.num_tokens == 4
    [tree] = read_proposals([trees])[WORDS][:1]
    own = tree_attachments(binary_token_spans(tree.spans, [True] * len(ids)), len(ids))
    joint = scorer.model(torch.tensor([[*ids, 5, eos]]), attachments=torch.tensor([[*own, 0, -100]])).joint_log_prob
    assert ended.log_prob == pytest.approx(float(joint), abs=1e-5)
    [words] = score_words(scorer, [TextItem("1", " ".join(WORDS))], end=True)
    assert sum(log_prob for _, log_prob in words.tokens) + words.end > ended.log_prob


@pytest.mark.parametrize(
    "architecture", ["gpst", "rnng", "rnng_pieces", "tree_lm", "tree_lm_binary", "urnng", "pushdown"]
)
def test_sums_grow_with_the_trees(architecture: str, trees: Path) -> None:
    """Order and copies change nothing; the best tree has a share of the sum."""
    scorer, given = scorer_of(architecture), read_proposals([trees])[WORDS]
    assert len(given) == 7
    different = list({tree.labeled_spans: tree for tree in given}.values())
    sums = [score_proposals(scorer, WORDS, some) for some in (different[:1], different[:2], given)]
    assert [score.num_trees for score in sums] == [1, 2, 5]
    assert sums[0].log_prob < sums[1].log_prob < sums[2].log_prob
    assert sums[0].best_share == pytest.approx(1.0) and 0.2 <= sums[2].best_share < 1
    assert score_proposals(scorer, WORDS, given[::-1]).log_prob == pytest.approx(sums[2].log_prob, abs=1e-5)


def test_trees_of_another_model(trees: Path, tmp_path: Path) -> None:
    """The JSON lines of `synlm parse`, with and without labels, are as good as brackets."""
    given = read_proposals([trees])[WORDS]
    for architecture, labels in (("rnng", True), ("pushdown", False)):
        names = [tuple(label for label, _, _ in tree.labeled_spans) if labels else None for tree in given]
        spans = [tuple((i, j) for _, i, j in tree.labeled_spans) for tree in given]
        parses = [Hypothesis(*parts, -1.0) for parts in zip(spans, names, strict=True)]
        file = tmp_path / "nbest.json"
        file.write_text("\n" + json.dumps(ParsedSentence(WORDS, tuple(parses)).to_dict()) + "\n")
        found = read_proposals([file])
        assert list(found) == [WORDS] and found[WORDS][0].source == f"{file}:2"
        scores = [score_proposals(scorer_of(architecture), WORDS, of) for of in (given, found[WORDS])]
        assert scores[0] == scores[1]


def test_lists_of_parsers(tmp_path: Path) -> None:
    """Of Charniak's parser, and of Dyer's RNNG with and without tags: the trees as without their scores."""
    first, second = "(S (NP (PRP We)) (VP (VBD gave) (NN 5)))", "(S (NP (PRP We) (VBD gave)) (NN 5))"
    file, words = tmp_path / "trees", ("We", "gave", "5")
    trees = read_proposals([_file(file, f"{first}\n{second}")])[words]
    lists = {
        "charniak": f"2 s1\n-12.5\n(S1 {first})\n-1e-05\n(S1 {second})\n\n",
        "dyer": f"0 ||| -12.5 ||| {first}\n0 ||| -13 ||| {second}\n",
        "samples": "0 ||| -12.5 ||| (S (NP We) (VP gave 5))\n0 ||| -13 ||| (S (NP We gave) 5)\n",
    }
    for name, text in lists.items():
        found = read_proposals([_file(file, text)])
        assert list(found) == [words]
        assert [tree.labeled_spans for tree in found[words]] == [tree.labeled_spans for tree in trees]
        assert found[words][1].source.endswith(":5" if name == "charniak" else ":2")
    with pytest.raises(ValueError, match=r"more.txt:2: '\(' is never closed"):
        read_proposals([_file(file, "0 ||| -1 ||| (S (NN a))\n0 ||| -1 ||| (S (NN a)")])


def test_labels_of_binary_trees(tmp_path: Path) -> None:
    """Unary chains have one label there, which the model must know; "@" stands for the nodes of binarization."""
    file = tmp_path / "trees.txt"
    file.write_text("(NP (X the) (X people) (X of))\n(S (NP (X the) (X people) (X of)))\n")
    scorer, given = scorer_of("tree_lm_binary"), read_proposals([file])
    refused("@, S.NP; its labels are NP, S, VP", score_proposals, scorer, WORDS[:3], given[WORDS[:3]])


def test_result_states_its_protocol(trees: Path) -> None:
    items = [TextItem("1", " ".join(WORDS)), TextItem("2", " "), TextItem("3", "We ask")]
    scorer = scorer_of("rnng")
    with pytest.raises(ValueError, match="'a b' .*ODD"):
        evaluate_proposals(scorer, [TextItem("1", "a b")], Proposals([_file(trees, "(ODD (X a) (X b))")]))
    some = Proposals([_file(trees, "(ODD (X a) (X b))\n(NP (X a) (X b))")])
    assert evaluate_proposals(scorer, [TextItem("1", "a b")], some).scores["mean_trees"] == 1
    result = evaluate_proposals(scorer, items, Proposals([trees]))
    scores = result.scores
    assert result.options["estimator"] == "proposals"
    assert result.options["num_beams"] is None and len(result.data["proposals"]) == 1
    assert (scores["sentences"], scores["words"], scores["mean_trees"]) == (2, 6, 3)
    given = read_proposals([trees])
    nats = -sum(score_proposals(scorer, words, given[words]).log_prob for words in (WORDS, ("We", "ask")))
    assert "word_perplexity" not in scores
    assert scores["word_perplexity_with_end"] == pytest.approx(math.exp(nats / (6 + 2)))


def test_minimal_pairs(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Sums over the trees of both sentences; the trees may split punctuation off."""
    table, trees = tmp_path / "pairs.tsv", tmp_path / "trees.txt"
    table.write_text("sentence_good\tsentence_bad\nWe ask.\tWe asks.\nWe ask.\tAsk we.\n")
    sentences = [("We", "ask", "."), ("We", "asks", "."), ("Ask", "we", ".")]
    trees.write_text("\n".join(tree for words in sentences for tree in binary_trees(words)))
    scorer, proposals = scorer_of("rnng"), Proposals([trees])
    result = evaluate_pairs(scorer, read_pairs(table), proposals=proposals)
    sums = [score_proposals(scorer, words, read_proposals([trees])[words]).log_prob for words in sentences]
    found = [(item["logprob_good_nats"], item["logprob_bad_nats"]) for item in result.items]
    assert found == [(sums[0], sums[1]), (sums[0], sums[2])]
    assert result.options["estimator"] == "proposals" and len(result.data["proposals"]) == 1
    assert result.scores["accuracy"] == sum(sums[0] > bad for bad in sums[1:]) / 2
    assert [item["oov"] for item in result.items] == [True, True]
    trees.write_text(trees.read_text() + "(NP (X We) (X ask.))\n")
    with pytest.raises(ValueError, match="'We ask.' split its words in 2 ways"):
        evaluate_pairs(scorer, read_pairs(table), proposals=Proposals([trees]))
    command = ["evaluate", "pairs", str(table), "--model", "model_cards/rnng-tiny", "--proposals", str(trees)]
    assert "split its words" in fail(capsys, *command)


def _file(trees: Path, text: str) -> Path:
    file = trees.with_name("more.txt")
    file.write_text(text + "\n")
    return file


def test_what_proposals_cannot_do(trees: Path) -> None:
    proposals, known, other = Proposals([trees]), [TextItem("1", " ".join(WORDS))], [TextItem("1", "nobody asks")]
    refused("on_lstm", evaluate_proposals, scorer_of("on_lstm"), known, proposals)
    refused("num_beams", evaluate_proposals, scorer_of("rnng", num_beams=3), known, proposals)
    said = "sentence 1 has no tree in .*trees.txt: 'nobody asks'"
    refused(said, evaluate_proposals, scorer_of("rnng"), other, proposals)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """The trees of a treebank itself: one tree for each sentence."""
    sample = Path(__file__).parents[2] / "hf_synlm" / "data" / "samples" / "trees.test.txt"
    few = tmp_path / "few.txt"
    few.write_text("\n".join(sample.read_text(encoding="utf-8").split("\n")[:3]), encoding="utf-8")
    command = ["evaluate", "perplexity", str(few), "--format", "treebank", "--model", "model_cards/rnng-tiny"]
    printed = run(capsys, *command, "--proposals", sample)
    assert "estimator proposals" in printed and f"| sentences | {len(list(read_treebank(few)))} |" in printed
