"""A model that reads ordinary text: treebanks, texts and trees meet in the same pieces; all calls see equal words."""

import copy
import json
import re
from pathlib import Path

import pytest
import torch

from hf_synlm import parse_sentences, surprisal
from hf_synlm.cli import main
from hf_synlm.data.treebank import parse_treebank
from hf_synlm.evaluation.suites.blimp import MinimalPair, evaluate_pairs
from hf_synlm.evaluation.text.given_trees import score_given_trees
from hf_synlm.evaluation.text.perplexity import evaluate_perplexity
from hf_synlm.evaluation.text.surprisal import score_words
from hf_synlm.evaluation.text.text_items import TextItem
from tests.helpers.commands import run
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import model_and_tokenizer, scorer_of

TEXT = "We can't (ask) for peace."
LEAVES = "We ca n't -LRB- ask -RRB- for peace .".split()


@pytest.fixture(scope="module")
def scorer():
    return scorer_of("tree_lm_natural", num_beams=4)


def total(scores) -> float:
    return sum(p for _, p in scores.tokens)


def test_a_text_and_a_treebank_meet(scorer):
    (text,), (leaves,) = scorer.encode([TEXT.split()]), scorer.encode([LEAVES], "words")
    assert text.ids == leaves.ids and scorer.tokenizer.decode(text.ids) == TEXT
    assert text.word_ends == leaves.word_ends and sum(text.word_ends) == len(LEAVES)
    of_text = score_words(scorer, [TextItem("1", TEXT)])[0]
    of_leaves = score_words(scorer, [TextItem("1", " ".join(LEAVES))], tokenize="words")[0]
    assert [word.text for word in of_text.words] == TEXT.split() and of_text.tokens == of_leaves.tokens
    # A word of the text is a run of leaves: its surprisal is their sum.
    sums = [sum(of_leaves.log_probs[i:j]) for i, j in ((0, 1), (1, 3), (3, 6), (6, 7), (7, 9))]
    assert of_text.log_probs.tolist() == pytest.approx([float(value) for value in sums])


def test_marks_are_left_out_where_a_user_says_so(scorer):
    (text,) = scorer.encode([TEXT.split()], "no-punctuation")
    assert scorer.tokenizer.decode(text.ids) == "We can't ask for peace" and text.num_words == 5
    # A mark that is a word of its own is not unknown.
    (text,) = scorer.encode([LEAVES], "no-punctuation")
    assert text.num_words == len(LEAVES) and not text.unknown


def test_the_text_of_a_user_stays(scorer):
    for text in ("a - b ' c \" d", "It 's late .", 'He said "no."', "gonna cannot e.g. x/y -- (1)."):
        assert scorer.tokenizer.decode(scorer.encode([text.split()])[0].ids) == text


def test_trees_have_words_for_leaves(scorer):
    (of_text,) = parse_sentences(scorer.model, scorer.tokenizer, [TEXT])
    (of_leaves,) = parse_sentences(scorer.model, scorer.tokenizer, [LEAVES])
    assert of_text.words == ("We", "ca", "n't", "(", "ask", ")", "for", "peace", ".")
    assert of_leaves.words == tuple(LEAVES) and of_leaves.hypotheses == of_text.hypotheses
    refused("sentence 2 .* no words", parse_sentences, scorer.model, scorer.tokenizer, [TEXT, ""])


def test_every_call_is_told_where_words_end(scorer):
    """No constituent cuts a leaf: the same distribution in parsing, surprisal, perplexity and minimal pairs."""
    (parsed,) = parse_sentences(scorer.model, scorer.tokenizer, [TEXT], num_beams=4)
    (found,) = score_words(scorer, [TextItem("1", TEXT)])
    (text,) = scorer.encode([TEXT.split()])
    ids, ends = torch.tensor([text.ids]), torch.tensor([text.word_ends])
    expected = scorer.model.parse(ids, word_ends=ends, num_beams=4).token_log_probs[0]
    assert [p for _, p in found.tokens] == pytest.approx(expected.tolist(), abs=1e-4)
    assert parsed.word_log_probs is None or sum(parsed.word_log_probs) == pytest.approx(float(expected.sum()), abs=1e-4)
    other = scorer.model.parse(ids, num_beams=4).token_log_probs[0]
    assert float(other.sum()) != pytest.approx(float(expected.sum()), abs=1e-3)
    result = evaluate_perplexity(scorer, [TextItem("1", TEXT)])
    assert result.scores["bits_per_token"] * len(text.ids) == pytest.approx(-total(found) / 0.6931472, rel=1e-5)
    assert result.options["tokenize"] == "ptb"
    pair = MinimalPair(good=TEXT, bad="We ask (can't) for peace.", group="a")
    assert evaluate_pairs(scorer, [pair], end=False).scores["accuracy"] in (0.0, 1.0)


def test_given_ends_of_words_are_no_knowledge_of_what_comes():
    """Trees that keep words whole are some of all trees: in a beam that holds nearly all they are less probable."""
    model, tokenizer = model_and_tokenizer("tree_lm_natural")
    for text in ("peace", "We ask", "courage."):
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        ends = torch.zeros_like(ids, dtype=torch.bool)
        ends[:, -1] = True
        wide = {"num_beams": 300, "action_beam_size": 300}
        whole, every = (model.parse(ids, word_ends=x, **wide).token_log_probs.sum() for x in (ends, None))
        assert ids.shape[1] > 1 and whole < every


def test_trees_that_are_given(scorer):
    (tree,) = parse_treebank(["(S (NP (PRP We)) (VP (VBP ask)) (. .))"])
    labels = scorer.model.config.nonterminals
    renamed = tuple((labels[0], i, j) for _, i, j in tree.labeled_spans)
    tree = type(tree)(tree.words, tree.tags, renamed, tree.source)
    (found,) = score_given_trees(scorer, [TextItem("1", "We ask.")], [tree])
    assert "".join(token for token, _ in found.tokens).replace("\u0120", " ") == "We ask." and len(found.words) == 2


def test_commands(scorer, tmp_path, capsys):
    folder, text = tmp_path / "model", tmp_path / "a.txt"
    scorer.model.save_pretrained(folder)
    scorer.tokenizer.save_pretrained(folder)
    text.write_text(TEXT + "\n\n")
    beam = ("--model", folder, "--num-beams", 4)
    assert "ca n't -LRB-" in re.sub(r"[()]|NP ", "", run(capsys, "parse", text, *beam))
    assert main(["surprisal", str(text), *map(str, beam)]) == 0
    printed = capsys.readouterr()
    assert "can't" in printed.out and "attached" not in printed.err


# ---------------------------------------------------------------------------- text of a treebank, without punctuation
PROSE = "We ask, for peace. America's Union!"


def values(*of, **options) -> list[tuple[str, float]]:
    return [(row["word"], row["surprisal_bits"]) for row in surprisal(*of, **options)]


@pytest.mark.parametrize(
    ("name", "style", "how"),
    [("rnng", "treebank", "ptb"), ("on_lstm", "treebank", "ptb"), ("gpst", "no-punctuation", "no-punctuation")],
)
def test_a_configuration_says_how_text_is_read(name: str, style: str, how: str, tmp_path, capsys):
    model, tokenizer = copy.deepcopy(model_and_tokenizer(name))
    as_today = values(model, tokenizer, [PROSE])
    assert as_today == values(model, tokenizer, [PROSE], tokenize="words")
    expected = values(model, tokenizer, [PROSE], tokenize=how)
    model.config.text_style = style
    found = values(model, tokenizer, [PROSE])
    assert [word for word, _ in found] == PROSE.split() and found == expected != as_today
    assert values(model, tokenizer, [PROSE], tokenize="auto") == found
    assert values(model, tokenizer, [PROSE], tokenize="words") == as_today
    (of_text,), (of_words,) = (parse_sentences(model, tokenizer, [x]) for x in (PROSE, PROSE.split()))
    assert of_text == parse_sentences(model, tokenizer, [PROSE], tokenize=how)[0]
    assert of_words.words == tuple(PROSE.split()) != of_text.words
    # Commands name what they used; text that is split already stays.
    folder, text, trees = tmp_path / "model", tmp_path / "a.txt", tmp_path / "trees.txt"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    text.write_text(PROSE + "\n")
    trees.write_text("(S (NP (PRP We)) (VP (VBP ask)) (. .))\n")
    for more, used in (([], how), (["--tokenize", "auto"], how), (["--tokenize", "words"], "words")):
        command = ["surprisal", str(text), "--model", str(folder), *more, "--out", str(tmp_path / "a.tsv")]
        assert main([*command, "--overwrite"]) == 0
        assert json.loads((tmp_path / "a.tsv.meta.json").read_text())["options"]["tokenize"] == used
        assert (f"read by --tokenize {how}" in capsys.readouterr().err) == (used == how)
        pairs = tmp_path / "pairs.tsv"
        pairs.write_text(f"sentence_good\tsentence_bad\n{PROSE}\tWe ask.\n")
        for task, right in (
            (("pairs", pairs, *more), used),
            (("perplexity", text, *more), used),
            (("perplexity", trees, "--format", "treebank"), "words"),
        ):
            run(capsys, "evaluate", *task, "--model", folder, "--out", tmp_path / "a.json", "--overwrite")
            assert json.loads((tmp_path / "a.json").read_text())["options"]["tokenize"] == right
    printed = run(capsys, "parse", text, "--model", folder, "--format", "json")
    assert tuple(json.loads(printed)["words"]) == of_text.words


def test_checkpoints_say_how_they_read():
    folders = [path.parent for path in Path("model_cards").glob("*/config.json")]
    styles = {folder.name: json.loads((folder / "config.json").read_text())["text_style"] for folder in folders}
    unlike = {"gpst-mini", "gpst-tiny", "pcfg-mini"}
    assert {name for name, style in styles.items() if style == "no-punctuation"} == unlike
    assert {name for name, style in styles.items() if style == "natural"} == {"tree-lm-smollm2"}
    assert set(styles.values()) == {"treebank", "natural", "no-punctuation"}
