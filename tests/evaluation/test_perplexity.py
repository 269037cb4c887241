"""Perplexity: its conventions, each against the model's own numbers; results, their files and means over seeds."""

import dataclasses
import json
import math

import pytest
import torch

from hf_synlm.evaluation.results import EvaluationResult, load_result, markdown_table
from hf_synlm.evaluation.summary import scores_of_groups, summarize
from hf_synlm.evaluation.text.perplexity import evaluate_perplexity, perplexities
from hf_synlm.evaluation.text.surprisal import WordScores, score_words
from hf_synlm.evaluation.text.text_items import TextItem, read_treebank_items
from hf_synlm.evaluation.text.words import Word
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import SENTENCES, scorer_of

ITEMS = [TextItem(str(number), text) for number, text in enumerate([*SENTENCES, "  ", SENTENCES[0]])]
TEXTS = [item.text for item in ITEMS if item.text.strip()]
NUM_WORDS = sum(len(text.split()) for text in TEXTS)


BEAMS = {"gpst": {"num_beams": 3}, "rnng_pieces": {"num_beams": 3, "estimator": "stepwise"}}


@pytest.mark.parametrize("architecture", [*BEAMS, "on_lstm", "lstm", "gpt2"])
def test_perplexities_by_hand(architecture):
    """From the scores of the tokens, which test_surprisal.py compares with the models' own numbers."""
    options = BEAMS.get(architecture, {})
    scorer = scorer_of(architecture, **options)
    result = evaluate_perplexity(scorer, ITEMS)
    ends_count = architecture not in ("gpst", "lstm")
    found = score_words(scorer, [TextItem("", text) for text in TEXTS], end=ends_count)
    tokens = sum(len(text.tokens) for text in found)
    nats = -sum(log_prob for text in found for _, log_prob in text.tokens)
    characters = sum(len(" ".join(text.split())) for text in TEXTS)
    scores, number_of = result.scores, {"sentences": len(TEXTS), "words": NUM_WORDS, "tokens": tokens}
    assert {name: scores[name] for name in number_of} == number_of
    assert scores["token_perplexity"] == pytest.approx(math.exp(nats / tokens))
    assert scores["word_perplexity"] == pytest.approx(math.exp(nats / NUM_WORDS))
    assert scores["bits_per_word"] == pytest.approx(nats / NUM_WORDS / math.log(2))
    assert scores["bits_per_character"] == pytest.approx(nats / characters / math.log(2))
    assert result.options["end_of_text"] == (scorer.end_of_text if ends_count else "not counted")
    if ends_count:
        with_end = (nats - sum(text.end for text in found)) / (tokens + len(TEXTS))
        assert scores["token_perplexity_with_end"] == pytest.approx(math.exp(with_end))
    else:
        assert scorer.end_of_text == "not modeled" and "token_perplexity_with_end" not in scores
    assert {name: result.options[name] for name in options} == options


def test_characters_of_words_without_a_token_do_not_count():
    words, log_probs = [Word(text, 0, 2) for text in ("ab", "…", "ab")], torch.tensor([-1.0, math.nan, -2.0])
    tokens = [("ab", -1.0), ("ab", -2.0)]
    found = WordScores(words, torch.tensor([1, 0, 1]), [False] * 3, log_probs, *[log_probs] * 4, tokens)
    assert perplexities([found])["bits_per_character"] == pytest.approx(3 / 5 / math.log(2))


def test_perplexity_of_documents():
    alone = evaluate_perplexity(scorer_of("gpt2"), ITEMS)
    together = evaluate_perplexity(scorer_of("gpt2"), ITEMS, context="document")
    assert together.scores["words"] == alone.scores["words"] and "token_perplexity_with_end" not in together.scores
    assert together.scores["token_perplexity"] != alone.scores["token_perplexity"]
    assert together.options["end_of_text"] == "not counted"


@pytest.mark.parametrize(
    ("begin", "text", "message"), [(True, " ", "no token has a probability"), (False, "W", "more than one token")]
)
def test_no_text_is_an_error(begin, text, message):
    refused(message, evaluate_perplexity, scorer_of("gpt2", begin=begin), [TextItem("", text)])


def test_words_of_a_treebank(tmp_path):
    tree = "(S (NP (DT The) (NN cat)) (VP (VBZ sleeps)) (. .))"
    (tmp_path / "gold.mrg").write_text(f"{tree}\n(FRAG (. .))\n")
    for arguments, texts, treatment in (
        ((), ["The cat sleeps .", "."], "punctuation kept and scored"),
        (("remove",), ["The cat sleeps"], "punctuation removed before parsing"),
    ):
        items, told = read_treebank_items(tmp_path / "gold.mrg", *arguments)
        assert [item.text for item in items] == texts and told == treatment
    (tmp_path / "empty.mrg").write_text("(FRAG (. .))\n")
    refused("empty.mrg: every word is punctuation", read_treebank_items, tmp_path / "empty.mrg", "remove")


# ------------------------------------------------------------------------------------------------------- results
def result_of(seed: int, value: float, **options) -> EvaluationResult:
    data = {"files": [{"path": f"place{seed}/a.txt", "bytes": 3, "sha256": "0"}]}
    settings = {"seed": seed, "num_beams": 4, **options}
    return EvaluationResult("perplexity", {"token_perplexity": value}, {"name": f"run{seed}"}, settings, data)


def other_data() -> EvaluationResult:
    result = result_of(1, 1.0)
    result.data["files"][0]["sha256"] = "1"
    return result


def test_results_can_be_read_again(tmp_path):
    result = evaluate_perplexity(scorer_of("gpst", name="a|b"), ITEMS, options={"seed": 7})
    path, table = result.save(tmp_path / "new" / "ppl.json")
    assert load_result(path) == result
    assert sorted(file.name for file in path.parent.iterdir()) == ["ppl.json", "ppl.md"]
    text = table.read_text(encoding="utf-8")
    assert "| token_perplexity |" in text and "seed 7" in text and "torch" in text
    assert {"python", "torch", "transformers", "hf_synlm"} <= set(result.versions)
    assert result.model["num_parameters"] > 0 and result.seconds > 0


def test_results_that_are_none(tmp_path):
    path, _ = result_of(0, math.inf).save(tmp_path / "inf.json")
    assert math.isnan(load_result(path).scores["token_perplexity"])
    for content, message in (("text", "cannot be read"), ("{}", "not a result")):
        (tmp_path / "bad.json").write_text(content)
        refused(message, load_result, tmp_path / "bad.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": None}))
    refused("version", load_result, path)


def test_means_over_seeds():
    (row,) = summarize([result_of(seed, value) for seed, value in enumerate([10.0, 12.0, 14.0])])
    assert (row["mean"], row["standard_deviation"], row["minimum"], row["maximum"], row["runs"]) == (12, 2, 10, 14, 3)
    assert summarize([result_of(0, 5.0)])[0]["standard_deviation"] is None
    (row,) = summarize([result_of(0, 5.0), result_of(1, math.nan)])  # a run that diverged
    assert math.isnan(row["mean"]) and math.isnan(row["standard_deviation"])
    for others, message in (
        ([result_of(1, 1.0, num_beams=5)], "num_beams is 4 and 5"),
        ([other_data()], "different data"),
        ([dataclasses.replace(result_of(1, 1.0), task="blimp")], "different tasks"),
    ):
        refused(message, summarize, [result_of(0, 1.0), *others])


def test_groups_of_runs_for_pictures():
    runs = [result_of(seed, value) for seed, value in enumerate([10.0, 12.0, 14.0])]
    names, means, deviations = scores_of_groups(runs, ["a", "b", "a"], ["token_"])
    assert names == ["token_perplexity"]
    assert means == {"a": [12.0], "b": [12.0]}
    assert deviations == {"a": [pytest.approx(math.sqrt(8))], "b": [None]}
    refused("word_ppl", scores_of_groups, runs, "aab", ["word_ppl"])
    refused("num_beams", scores_of_groups, [*runs[:2], result_of(2, 1.0, num_beams=9)], "aaa", ["token_perplexity"])
    scores_of_groups([*runs[:2], result_of(2, 1.0, num_beams=9)], "aab", ["token_perplexity"])
    refused("different data", scores_of_groups, [*runs, other_data()], "aaab", ["token_perplexity"])
    ends = [result_of(0, 1.0, end_of_text=how) for how in ("end token", "trees closed", "not counted")]
    scores_of_groups(ends, "abc", ["token_perplexity"])
    pairs = [dataclasses.replace(result, task="pairs") for result in ends]
    scores_of_groups(pairs[:2], "ab", ["token_perplexity"])
    refused("ends of sentences counted is True and False", scores_of_groups, pairs[1:], "ab", ["token_perplexity"])


def test_tables_for_readers():
    table = markdown_table([{"a": "x|y", "b": 1.5}, {"a": "z", "b": None}])
    assert table.splitlines()[1:] == ["| --- | ---: |", "| x\\|y | 1.5 |", "| z |  |"]
    rows = [{"f1": 36.36, "p": 0.12345, "x": None, "n": 20.0}, {"f1": 41.2, "p": 1.0, "x": None, "n": 3}]
    columns = markdown_table(rows)
    assert columns.splitlines()[0] == "| f1 | p | n |"
    assert columns.splitlines()[2:] == ["| 36.36 | 0.1235 | 20.0 |", "| 41.20 | 1.0000 | 3 |"]
