"""Perplexity: its conventions, each against the model's own numbers; results, their files and means over seeds."""

from __future__ import annotations

import json
import math

import pytest
import torch

from hf_synlm.evaluation.perplexity import evaluate_perplexity
from hf_synlm.evaluation.results import EvaluationResult, load_result, markdown_table
from hf_synlm.evaluation.summary import scores_of_groups, summarize
from hf_synlm.evaluation.text_items import TextItem, read_items, read_treebank_items
from tests.scoring_models import ARCHITECTURES, SEARCHING, SENTENCES, model_and_tokenizer, scorer_of

ITEMS = [TextItem(str(number), text) for number, text in enumerate([*SENTENCES, "  ", SENTENCES[0]])]
TEXTS = [item.text for item in ITEMS if item.text.strip()]
NUM_WORDS = sum(len(text.split()) for text in TEXTS)


@pytest.mark.parametrize("architecture", SEARCHING)
@pytest.mark.parametrize("estimator", ["beam_marginal", "stepwise"])
def test_perplexity_of_searched_models(architecture, estimator):
    model, tokenizer = model_and_tokenizer(architecture)
    result = evaluate_perplexity(scorer_of(architecture, estimator=estimator, num_beams=3), ITEMS)
    nats = ends = tokens = 0.0
    for text in TEXTS:
        parsed = model.parse(torch.tensor([tokenizer(text)["input_ids"]]), num_beams=3, stepwise=True)
        chosen = parsed.stepwise_log_probs if estimator == "stepwise" else parsed.token_log_probs
        nats -= chosen.sum().item()
        ends -= (parsed.text_log_probs - parsed.token_log_probs.sum(1)).item()
        tokens += chosen.shape[1]
    scores = result.scores
    assert scores["sentences"] == len(TEXTS) and scores["tokens"] == tokens and scores["words"] == NUM_WORDS
    assert scores["token_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert scores["word_perplexity"] == pytest.approx(math.exp(nats / NUM_WORDS), rel=1e-4)
    with_end = math.exp((nats + ends) / (tokens + len(TEXTS)))
    assert scores["token_perplexity_with_end"] == pytest.approx(with_end, rel=1e-4)
    assert result.options["estimator"] == estimator and result.options["end_of_text"] == "trees closed"
    assert result.options["num_beams"] == 3


@pytest.mark.parametrize("architecture", [name for name in ARCHITECTURES if name not in SEARCHING])
def test_perplexity_of_other_models(architecture):
    model, tokenizer = model_and_tokenizer(architecture)
    scorer = scorer_of(architecture)
    result = evaluate_perplexity(scorer, ITEMS)
    nats = nats_with_end = tokens = 0.0
    for text in TEXTS:
        ids = [scorer.begin_id, *tokenizer(text)["input_ids"], tokenizer.eos_token_id]
        row = torch.tensor([ids])
        logits = model(row[:, :-1], attention_mask=torch.ones_like(row[:, :-1])).logits
        log_probs = logits.log_softmax(-1)[0].gather(1, row[0, 1:, None]).squeeze(1)
        nats -= log_probs[:-1].sum().item()
        nats_with_end -= log_probs.sum().item()
        tokens += len(ids) - 2
    assert result.scores["token_perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
    assert result.scores["bits_per_word"] == pytest.approx(nats / NUM_WORDS / math.log(2), rel=1e-4)
    characters = sum(len(" ".join(text.split())) for text in TEXTS)
    assert result.scores["bits_per_character"] == pytest.approx(nats / characters / math.log(2), rel=1e-4)
    if architecture == "lstm":
        assert result.options["end_of_text"] == "not counted" and "token_perplexity_with_end" not in result.scores
    else:
        expected = math.exp(nats_with_end / (tokens + len(TEXTS)))
        assert result.options["end_of_text"] == "end token"
        assert result.scores["token_perplexity_with_end"] == pytest.approx(expected, rel=1e-4)


def test_wider_beams_bound_more_tightly():
    values = [
        evaluate_perplexity(scorer_of("gpst", num_beams=width), ITEMS[:2]).scores["token_perplexity"]
        for width in (1, 4, 16)
    ]
    assert values == sorted(values, reverse=True)


def test_perplexity_of_documents():
    alone = evaluate_perplexity(scorer_of("gpt2"), ITEMS)
    together = evaluate_perplexity(scorer_of("gpt2"), ITEMS, context="document")
    assert together.scores["words"] == alone.scores["words"] and "token_perplexity_with_end" not in together.scores
    assert together.scores["token_perplexity"] != alone.scores["token_perplexity"]
    assert together.options["end_of_text"] == "not counted"


def test_no_text_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no tokens"):
        evaluate_perplexity(scorer_of("gpt2"), [TextItem("", " ")])
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(ValueError, match="holds no text"):
        evaluate_perplexity(scorer_of("gpt2"), read_items(tmp_path / "empty.txt"))
    with pytest.raises(ValueError, match="nothing predicts one"):
        evaluate_perplexity(scorer_of("gpt2", begin=False), [TextItem("", "W")])


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
    with pytest.raises(ValueError, match="empty.mrg: no sentence has words"):
        read_treebank_items(tmp_path / "empty.mrg", "remove")


# ------------------------------------------------------------------------------------------------------- results
def result_of(seed: int, value: float, **options) -> EvaluationResult:
    data = {"files": [{"path": f"place{seed}/a.txt", "bytes": 3, "sha256": "0"}]}
    settings = {"seed": seed, "num_beams": 4, **options}
    return EvaluationResult("perplexity", {"token_perplexity": value}, {"name": f"run{seed}"}, settings, data)


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
    for content, message in (
        ("text", "cannot be read"),
        ("{}", "no result"),
        ('{"format": "hf_synlm.result"}', "version"),
    ):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=message):
            load_result(tmp_path / "bad.json")
    fields = json.loads(path.read_text())
    for field, value, message in (
        ("scores", {"accuracy": "high"}, "the score 'accuracy' is 'high'"),
        ("scores", {"accuracy": True}, "the score 'accuracy' is True"),
        ("scores", [0.5], r"scores is \[0.5\]"),
        ("data", [], r"data is \[\]: it must be a JSON object"),
        ("data", {"files": ["a.txt"]}, "files in data"),
        ("model", {}, "task and the name of the model must be text"),
        ("task", None, "task and"),
    ):
        (tmp_path / "bad.json").write_text(json.dumps({**fields, field: value}))
        with pytest.raises(ValueError, match=f"bad.json: {message}"):
            load_result(tmp_path / "bad.json")
    del fields["options"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match="options"):
        load_result(path)
    with pytest.raises(ValueError, match=r"\.md"):
        result_of(0, 1.0).save(tmp_path / "a.md")


def test_means_over_seeds():
    (row,) = summarize([result_of(seed, value) for seed, value in enumerate([10.0, 12.0, 14.0])])
    assert (row["mean"], row["standard_deviation"], row["minimum"], row["maximum"], row["runs"]) == (12, 2, 10, 14, 3)
    assert summarize([result_of(0, 5.0)])[0]["standard_deviation"] is None
    (row,) = summarize([result_of(0, 5.0), result_of(1, math.nan)])  # a run that diverged
    assert math.isnan(row["mean"]) and math.isnan(row["standard_deviation"])
    with pytest.raises(ValueError, match="num_beams is 4 and 5"):
        summarize([result_of(0, 1.0), result_of(1, 1.0, num_beams=5)])
    other = result_of(1, 1.0)
    other.data["files"][0]["sha256"] = "1"
    with pytest.raises(ValueError, match="different data"):
        summarize([result_of(0, 1.0), other])
    other = result_of(1, 1.0)
    other.task = "blimp"
    with pytest.raises(ValueError, match="different tasks"):
        summarize([result_of(0, 1.0), other])
    with pytest.raises(ValueError, match="no results"):
        summarize([])


def test_groups_of_runs_for_pictures():
    runs = [result_of(seed, value) for seed, value in enumerate([10.0, 12.0, 14.0])]
    names, means, deviations = scores_of_groups(runs, ["a", "b", "a"], ["token_"])
    assert names == ["token_perplexity"]
    assert means == {"a": [12.0], "b": [12.0]}
    assert deviations == {"a": [pytest.approx(math.sqrt(8))], "b": [None]}
    with pytest.raises(ValueError, match="no score word_ppl: there are token_perplexity"):
        scores_of_groups(runs, "aab", ["word_ppl"])
    with pytest.raises(ValueError, match="num_beams"):  # runs of one group must be alike; groups may differ
        scores_of_groups([*runs[:2], result_of(2, 1.0, num_beams=9)], "aaa", ["token_perplexity"])
    scores_of_groups([*runs[:2], result_of(2, 1.0, num_beams=9)], "aab", ["token_perplexity"])
    other = result_of(1, 1.0)
    other.data["files"][0]["sha256"] = "1"
    with pytest.raises(ValueError, match="on different data"):
        scores_of_groups([*runs, other], "aaab", ["token_perplexity"])


def test_tables_for_readers():
    assert markdown_table([{"a": "x|y", "b": 1.5}, {"a": "z", "b": None}]) == (
        "| a | b |\n| --- | ---: |\n| x\\|y | 1.5 |\n| z |  |"
    )
    rows = [{"f1": 36.36, "p": 0.12345, "x": None, "n": 20.0}, {"f1": 41.2, "p": 1.0, "x": None, "n": 3}]
    columns = markdown_table(rows)
    assert columns.splitlines()[0] == "| f1 | p | n |"
    assert columns.splitlines()[2:] == ["| 36.36 | 0.1235 | 20.0 |", "| 41.20 | 1.0000 | 3 |"]
