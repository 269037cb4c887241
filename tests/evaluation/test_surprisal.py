"""Word-by-word scores: they are what the models say, one row per word of the user's, whatever the text looks like."""

import copy
import csv
import dataclasses
import functools
import importlib
import io
import json
import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from hf_synlm.data.vocabulary import subword_tokenizer, word_tokenizer
from hf_synlm.evaluation.text import batches
from hf_synlm.evaluation.text.batches import batches_by_cost, usual_batch_size
from hf_synlm.evaluation.text.readers import LogitReader
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import (
    TREE_COLUMNS,
    can_correct_words,
    columns,
    describe_difference,
    iterate_words,
    score_words,
    why_sentences_alone,
    word_table,
)
from hf_synlm.evaluation.text.tables import table_text
from hf_synlm.evaluation.text.text_items import TextItem, read_items
from hf_synlm.evaluation.text.words import EncodedText, encode_sentences, split_as_treebank, word_starts
from hf_synlm.evaluation.trees.parsing_analysis import span_heights
from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence, parse_sentences
from tests.helpers.commands import fail, run
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import (
    ARCHITECTURES,
    SEARCHING,
    SENTENCES,
    model_and_tokenizer,
    scorer_of,
    tokenizer_of,
)

ITEMS = [TextItem(str(number), text) for number, text in enumerate(SENTENCES)]
EXACT = [name for name in ARCHITECTURES if name not in SEARCHING]


def totals(scores):
    return [found.log_probs.sum().item() for found in scores]


# ------------------------------------------------------------------------------------------------ what models say
@pytest.mark.parametrize("architecture", SEARCHING)
@pytest.mark.parametrize("estimator", ["beam_marginal", "stepwise"])
def test_searched_scores_are_those_of_parse(architecture, estimator):
    model, tokenizer = model_and_tokenizer(architecture)
    scores = score_words(scorer_of(architecture, estimator=estimator, num_beams=3, details=True), ITEMS[:2])
    for sentence, found in zip(SENTENCES[:2], scores, strict=True):
        parsed = model.parse(torch.tensor([tokenizer(sentence)["input_ids"]]), num_beams=3, stepwise=True)
        expected = parsed.stepwise_log_probs if estimator == "stepwise" else parsed.token_log_probs
        assert [p for _, p in found.tokens] == pytest.approx(expected[0].tolist(), abs=1e-4)
        assert found.log_probs.sum().item() == pytest.approx(expected.sum().item(), abs=1e-3)
        assert found.num_actions.sum().item() == pytest.approx(parsed.num_actions.sum().item(), rel=1e-4)
        assert found.stack_depth[-1].item() == pytest.approx(parsed.stack_depth[0, -1].item(), rel=1e-4)
        assert found.beam_entropy[-1].item() == pytest.approx(parsed.beam_entropy[0, -1].item(), abs=1e-4)


@pytest.mark.parametrize("architecture", ["urnng", "pushdown"])
def test_a_stepwise_end_is_that_of_the_logits(architecture):
    """Not a ratio of beams: the end token's log-probability in the distribution behind the words."""
    model, tokenizer = model_and_tokenizer(architecture)
    scorer = scorer_of(architecture, estimator="stepwise", num_beams=model.config.scoring_num_beams)
    for sentence, found in zip(SENTENCES, score_words(scorer, ITEMS, end=True), strict=True):
        logits = model(torch.tensor([tokenizer(sentence)["input_ids"]])).logits[0, -1]
        assert found.end == pytest.approx(logits.log_softmax(0)[tokenizer.eos_token_id].item(), abs=1e-4)


@pytest.mark.parametrize("architecture", EXACT)
def test_exact_scores_are_those_of_the_loss(architecture):
    model, tokenizer = model_and_tokenizer(architecture)
    scorer = scorer_of(architecture, details=True)
    ends = scorer.end_of_text == "end token"
    for sentence, found in zip(SENTENCES, score_words(scorer, ITEMS, end=ends), strict=True):
        ids = tokenizer(sentence)["input_ids"]
        row = torch.tensor([[scorer.begin_id, *ids, *([tokenizer.eos_token_id] if ends else [])]])
        output = model(row, attention_mask=torch.ones_like(row), labels=row)
        expected = -output.loss.item() * (row.shape[1] - 1)
        if getattr(output, "joint_log_prob", None) is not None:
            expected = output.joint_log_prob.item()
        assert found.log_probs.sum().item() + (found.end or 0.0) == pytest.approx(expected, abs=1e-3)
        assert found.lexical.isnan().all() and found.stack_depth.isnan().all()


@pytest.mark.parametrize("word_correction", [False, True])
def test_tokens_are_those_of_minicons(word_correction):
    scorer = importlib.import_module("minicons.scorer")
    model, tokenizer = model_and_tokenizer("gpt2")
    other = scorer.IncrementalLMScorer(model, "cpu", tokenizer=copy.deepcopy(tokenizer))  # minicons changes it
    # minicons leaves the end token out of what may stand after a word; Pimentel and Meister do not.
    other.bow_subword_idx = [*other.bow_subword_idx, tokenizer.eos_token_id]
    expected = other.token_score(SENTENCES, bos_token=True, bow_correction=word_correction)
    scores = score_words(scorer_of("gpt2"), ITEMS, word_correction=word_correction)
    for row, found in zip(expected, scores, strict=True):
        assert [p for _, p in found.tokens] == pytest.approx([p for _, p in row[1:]], abs=1e-4)


@pytest.mark.parametrize("architecture", ["gpst", "gpt2"])
def test_word_correction_makes_a_distribution_over_words(architecture):
    """The sum of the corrections telescopes: what a word gets, the next one pays."""
    scorer = scorer_of(architecture, **({"estimator": "stepwise"} if architecture == "gpst" else {}))
    (text,) = encode_sentences(scorer.tokenizer, [SENTENCES[0].split()])
    (raw,) = scorer.score([text], starts=True)
    corrected = score_words(scorer, ITEMS[:1], word_correction=True)[0]
    expected = (raw.log_probs.sum() + raw.word_start[-1]).item()
    assert corrected.log_probs.sum().item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "architecture", ["gpst", "rnng", "rnng_pieces", "tree_lm", "urnng", "pushdown", "pcfg", "prpn", "gpt2"]
)
def test_entropies_are_those_of_the_logits(architecture):
    """Of the next token before a word, whatever the estimator, also in batches and for words without tokens."""
    model, tokenizer = model_and_tokenizer(architecture)
    plain = score_words(scorer_of(architecture, details=True), ITEMS)
    for kind, column in (("shannon", "entropy_{}"), ("renyi", "renyi_entropy_{}")):
        scorer = scorer_of(architecture, entropy=kind, details=True)
        scores = score_words(scorer, ITEMS)
        for item, found, without in zip(ITEMS, scores, plain, strict=True):
            [text] = encode_sentences(tokenizer, [item.text.split()])
            p = model(torch.tensor([[scorer.begin_id, *text.ids]])).logits[0].double().softmax(-1)
            expected = -(p * p.clamp(min=1e-300).log()).sum(-1) if kind == "shannon" else 2 * p.sqrt().sum(-1).log()
            first = [text.word_of_token.index(word) for word in range(len(found.words))]
            assert found.more[column].tolist() == pytest.approx(expected[first].tolist(), abs=1e-4)
            assert torch.equal(found.log_probs, without.log_probs) and set(found.more) - set(without.more) == {column}
        assert 0 < found.more[column].max().item() <= math.log(model.config.vocab_size)
    rows = word_table(ITEMS[:1], scores[:1])
    at = columns("bits", ITEMS, scores[0].more).index("renyi_entropy_bits")
    assert [row[at] * math.log(2) for row in rows] == pytest.approx(scores[0].more[column].tolist())


@pytest.mark.parametrize("estimator", ["beam_marginal", "stepwise"])
def test_attention_entropies_are_those_of_parse(estimator, tmp_path):
    """Sums over the tokens of a word, in batches and from a cache, beside word correction; they change nothing else."""
    model, tokenizer = model_and_tokenizer("tree_lm")
    items = [TextItem("1", "We can't ask"), TextItem("2", "America"), TextItem("3", "")]
    how = {"tokenize": "ptb", "word_correction": estimator == "stepwise"}
    plain = score_words(scorer_of("tree_lm", estimator=estimator, num_beams=3), items, **how)
    for kind, column in (("projected", "nae"), ("raw", "nae_raw")):
        given = {"estimator": estimator, "num_beams": 3, "attention_entropy": kind}
        for _ in range(2):
            found = score_words(scorer_of("tree_lm", **given, cache=tmp_path / kind), items, **how)
            for item, one, without in zip(items[:2], found, plain, strict=False):
                ids = torch.tensor([tokenizer(item.text.replace("can't", "ca n't"))["input_ids"]])
                tokens = model.parse(ids, num_beams=3, attention_entropy=kind).attention_entropy[0].tolist()
                expected = tokens if len(tokens) == 1 else [tokens[0], tokens[1] + tokens[2], tokens[3]]
                assert one.more[column].tolist() == pytest.approx(expected, abs=1e-4)
                assert torch.equal(one.log_probs, without.log_probs) and not without.more
            assert found[2].more[column].shape == (0,)
    refused("attention_entropy", score_words, scorer_of("tree_lm", **given, cache=tmp_path / "projected"), items, **how)


@pytest.mark.parametrize("estimator", ["beam_marginal", "stepwise"])
@pytest.mark.parametrize("architecture", SEARCHING)
def test_belief_updates_are_those_of_parse(architecture, estimator, tmp_path):
    """One for each of the user's words, however many tokens it has; also from a cache, and beside word correction."""
    model, tokenizer = model_and_tokenizer(architecture)
    items = [*ITEMS, TextItem("4", "")]
    how = {"word_correction": estimator == "stepwise" and architecture == "gpst"}
    plain = score_words(scorer_of(architecture, estimator=estimator, num_beams=3), items, **how)
    for kind, order in (("old", 0.5), ("new", 1.0), ("new", math.inf)):
        given = {"estimator": estimator, "num_beams": 3, "belief_update": (kind, order)}
        for _ in range(2):
            found = score_words(scorer_of(architecture, **given, cache=tmp_path / f"{kind}{order}"), items, **how)
            for item, one, without in zip(items[:3], found, plain, strict=False):
                [text] = encode_sentences(tokenizer, [item.text.split()])
                last = [len(text.ids) - 1 - text.word_of_token[::-1].index(word) for word in range(text.num_words)]
                ends = torch.zeros(1, len(text.ids), dtype=torch.bool)
                ends[0, last] = True
                parsed = model.parse(torch.tensor([text.ids]), num_beams=3, belief_update=(kind, order, ends))
                for column, values in (("belief_update_{}", parsed.belief_update), ("belief_cut", parsed.belief_cut)):
                    assert one.more[column].tolist() == pytest.approx(values[0, last].tolist(), abs=1e-3)
                assert torch.equal(one.log_probs, without.log_probs) and not without.more
            assert found[3].more["belief_update_{}"].shape == (0,)
    refused("belief_update", score_words, scorer_of(architecture, **given, cache=tmp_path / "old0.5"), items, **how)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_measures_are_of_models_that_have_them(architecture):
    """Entropies of attention of those that attend to derivations, and changes of beliefs of those with a beam."""
    none = r"\w+ does not attend to derivations"
    if architecture in EXACT:
        said = r"\(--belief-update\): \w+ has no beam of derivations"
        refused(said, scorer_of, architecture, belief_update=("new", 1.0))
    if architecture != "tree_lm":
        refused(rf"\(--attention-entropy\): {none}", scorer_of, architecture, attention_entropy="raw")
    if architecture.startswith("rnng"):
        parse, ids = model_and_tokenizer(architecture)[0].parse, torch.tensor([[3, 4]])
        refused(f"attention_entropy='raw' .*{none}", parse, ids, attention_entropy="raw")


def test_belief_updates_by_the_command(tmp_path, capsys):
    """The order is Kullback-Leibler's unless another is given; the file beside the table names kind and order."""
    text, out = tmp_path / "in.txt", tmp_path / "out.tsv"
    text.write_text("the people agree\n")
    command, model = ("surprisal", text, "--num-beams", "3"), ("--model", "model_cards/rnng-tiny")
    bits = {}
    for order in (None, "1", "inf", "0.5"):
        more = () if order is None else ("--belief-order", order)
        run(capsys, *command, *model, "--belief-update", "new", *more, "--out", out, "--overwrite")
        rows = list(csv.DictReader(out.open(), delimiter="\t"))
        bits[order] = [float(row["belief_update_bits"]) for row in rows]
        options = json.loads(Path(f"{out}.meta.json").read_text())["options"]
        assert options["belief_update"] == ["new", f"order {order or 1}"]
    assert sum(bits["0.5"]) < sum(bits["1"]) == sum(bits[None]) < sum(bits["inf"])
    for order in ("1", "2"):
        assert f"--belief-order {order} belongs to" in fail(capsys, *command, *model, "--belief-order", order)
    assert "--lmzoo has four columns" in fail(capsys, *command, *model, "--belief-update", "old", "--lmzoo")
    trees, asked = tmp_path / "in.mrg", ("--belief-update", "old")
    trees.write_text("(S (NP the people) (VP agree))\n")
    assert "--belief-update: with --trees" in fail(capsys, "surprisal", text, *model, "--trees", trees, *asked)


def test_beams_are_compared_on_words_with_values():
    """In bits, whatever the unit of the table; one word says nothing."""
    narrow, wide = torch.tensor([3.0, math.nan, 2.0, 5.0]), torch.tensor([1.0, 2.0, 2.0, 4.9])
    line = describe_difference(narrow, wide)
    assert line.startswith("correlation 0.8349") and line.endswith("above 1 bit: 33.3% of the words")
    assert "difference 0.7 bits (mean surprisal 2.63)" in line
    assert not describe_difference(narrow[:2], wide[:2])


def test_entropies_in_documents_windows_and_caches(tmp_path):
    """The first word has none if nothing predicts it; words of a document follow those before."""
    scorer = scorer_of("gpt2", entropy="shannon", cache=tmp_path / "cache")
    whole = score_words(scorer, [TextItem("1", " ".join(SENTENCES[:2]))])[0].more["entropy_{}"]
    parts = score_words(scorer, ITEMS[:2], context="document")
    for _ in range(2):
        again = score_words(scorer, ITEMS[:2], context="document")
        assert [part.more["entropy_{}"].tolist() for part in again] == [p.more["entropy_{}"].tolist() for p in parts]
    assert torch.cat([part.more["entropy_{}"] for part in parts]).tolist() == pytest.approx(whole.tolist(), abs=1e-5)
    refused("entropy", score_words, scorer_of("gpt2", cache=tmp_path / "cache"), ITEMS)
    [found] = score_words(scorer_of("gpt2", entropy="shannon", begin=False), ITEMS[:1])
    assert found.more["entropy_{}"].isnan().tolist() == [True] + [False] * 6
    long = [TextItem("1", " ".join(SENTENCES * 3))]
    scorer = scorer_of("gpt2", entropy="shannon")
    [cut] = score_words(scorer, long)
    assert scorer.cuts["texts_in_windows"] == 1 and len(cut.more["entropy_{}"]) == len(cut.words)
    assert not cut.more["entropy_{}"].isnan().any()


def test_word_correction_of_whole_words_changes_nothing():
    scorer = scorer_of("rnng", estimator="stepwise")
    assert totals(score_words(scorer, ITEMS[:2], word_correction=True)) == totals(score_words(scorer, ITEMS[:2]))
    assert not can_correct_words(scorer) and not can_correct_words(scorer_of("rnng_pieces"))
    assert can_correct_words(scorer_of("gpst")) and can_correct_words(scorer_of("gpt2"))


@pytest.mark.parametrize("architecture", ["gpst", "rnng"])
def test_parts_add_up(architecture):
    scorer = scorer_of(architecture, details=True)
    for row in word_table(ITEMS[:2], score_words(scorer, ITEMS[:2])):
        values = dict(zip(columns("bits"), row, strict=True))
        parts = values["lexical_bits"], values["structural_bits"]
        assert sum(parts) == pytest.approx(values["surprisal_bits"], abs=1e-6)
        assert min(parts) >= 0
    # With one derivation the lexical part is the log-probability of the word in its state.
    one = scorer_of(architecture, details=True, num_beams=1)
    model, tokenizer = model_and_tokenizer(architecture)
    parsed = model.parse(torch.tensor([tokenizer(SENTENCES[1])["input_ids"]]), num_beams=1, lexical=True)
    (found,) = score_words(one, ITEMS[1:2])
    assert found.lexical.sum().item() == pytest.approx(parsed.lexical_log_probs.sum().item(), abs=1e-4)


def test_lexical_part_of_a_full_beam():
    """Against all derivations one by one, each scored as a given tree."""
    model, tokenizer = model_and_tokenizer("gpst")
    ids = torch.tensor([tokenizer("We ask for")["input_ids"][:4]])
    parsed = model.parse(ids, num_beams=50, num_return_sequences=50, lexical=True)
    with_word, without = [], []
    for tree, actions in zip(parsed.spans[0], parsed.actions[0].tolist(), strict=False):
        output = model(ids, spans=[tree])
        word = output.token_logits_given_tree[0, -1].float().log_softmax(-1)[ids[0, -1]]
        closing = range(max(slot for slot, action in enumerate(actions) if action == 0) + 1, 2 * ids.shape[1] - 1)
        log_probs = output.action_logits[0].float().log_softmax(-1)
        with_word.append(output.joint_log_prob[0] - sum(log_probs[slot, 1] for slot in closing))
        without.append(with_word[-1] - word)
    assert len(with_word) == 5  # binary trees over four tokens
    total, before = torch.stack(with_word).logsumexp(0).item(), torch.stack(without).logsumexp(0).item()
    assert parsed.token_log_probs.sum().item() == pytest.approx(total, abs=1e-4)
    assert parsed.lexical_log_probs[0, -1].item() == pytest.approx(total - before, abs=1e-4)


def test_batches_change_nothing_and_duplicates_are_scored_once(monkeypatch):
    model, _ = model_and_tokenizer("gpst")
    rows = []
    parse = type(model).parse

    @functools.wraps(parse)
    def counted(self, ids, *arguments, **options):
        rows.append(len(ids))
        return parse(self, ids, *arguments, **options)

    monkeypatch.setattr(type(model), "parse", counted)
    many = [*ITEMS, *reversed(ITEMS), TextItem("x", "We  ask\tfor peace ")]
    together = totals(score_words(scorer_of("gpst", batch_size=8), many))
    assert sum(rows) == len(ITEMS)
    alone = totals(score_words(scorer_of("gpst", batch_size=1), many))
    assert together == pytest.approx(alone, abs=1e-3)
    assert together[:3] == together[5:2:-1] and together[6] == together[1]
    rows.clear()
    monkeypatch.setattr(batches, "_MAX_DERIVED_TOKENS", model.config.scoring_num_beams)
    assert totals(score_words(scorer_of("gpst", batch_size=8), many)) == pytest.approx(alone, abs=1e-3)
    assert max(rows) == 1 and sum(rows) == len(ITEMS)  # on a CPU, fewer texts go together where beams are wide


def test_options_are_those_of_the_search():
    """A word beam that is not asked for is at most the beam of actions, which is at least the word beam asked for."""
    widths = {"num_beams", "action_beam_size"}
    for given, expected in (
        ({"search_options": {"action_beam_size": 3}}, (3, 3)),
        ({"num_beams": 4, "search_options": {"action_beam_size": 9}}, (4, 9)),
        ({"num_beams": 400}, (400, 400)),
    ):
        options = scorer_of("rnng", **given).options()
        assert (options["num_beams"], options["action_beam_size"]) == expected
        assert {"fast_track_size", "normalization", *widths} <= set(options)
    alone, both = ({"action_beam_size": 3}, None), ({"action_beam_size": 3}, 3)
    scores = [totals(score_words(scorer_of("rnng", num_beams=k, search_options=o), ITEMS)) for o, k in (alone, both)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-6)


def test_batches_stay_in_a_budget():
    """The longest first, and those that begin alike side by side."""
    texts = [EncodedSentence(tuple(ids), (), ()) for ids in ([1], [3, 1], [2, 1], [3, 2], [4] * 9, [3, 3], [5])]
    lengths = [[text.num_tokens for text in batch] for batch in batches_by_cost(texts, 3, 8)]
    assert lengths == [[9], [2, 2, 2], [2, 1, 1]]
    assert batches_by_cost(texts, 9, 4)[1:3] == [[texts[2], texts[1]], [texts[3], texts[5]]]


@pytest.mark.parametrize("architecture", ["on_lstm", "prpn", "palm", "lstm"])
def test_long_texts_are_read_in_segments(architecture, monkeypatch):
    model, _ = model_and_tokenizer(architecture)
    scorer = scorer_of(architecture)
    ends = scorer.end_of_text != "not modeled"
    encoded = encode_sentences(scorer.tokenizer, [(" ".join(SENTENCES[:2])).split(), SENTENCES[2].split()[:2]])
    assert word_starts(scorer.tokenizer, model.config.vocab_size, scorer.end_ids) is None  # words, not pieces
    beginnings = torch.arange(model.config.vocab_size) % 3 == 0  # as if these were pieces that begin words
    monkeypatch.setattr("hf_synlm.evaluation.text.scoring.word_starts", lambda *_: beginnings)
    whole = scorer.score(encoded, end=ends, starts=True)
    monkeypatch.setattr("hf_synlm.evaluation.text.scoring._MAX_LOGITS", 3 * model.config.vocab_size + 1)
    calls = []
    forward = model.forward
    monkeypatch.setattr(model, "forward", lambda ids, **k: calls.append(ids.shape) or forward(ids, **k))
    parts = scorer.score(encoded, end=ends, starts=True)
    assert max(rows * length for rows, length in calls) == 3 and len(calls) >= 5
    for one, other in zip(whole, parts, strict=True):
        assert torch.allclose(one.log_probs, other.log_probs, atol=1e-5, equal_nan=True)
        assert torch.allclose(one.word_start, other.word_start, atol=1e-5, equal_nan=True)
        assert len(one.word_start) == len(one.log_probs) + 1 and one.word_start[1:].isfinite().all()
        assert one.end == (pytest.approx(other.end, abs=1e-5) if ends else None)


# ------------------------------------------------------------------------------------------------------- context
def test_document_context_of_plain_models():
    documents = [TextItem("a", SENTENCES[0], 0), TextItem("b", SENTENCES[1], 0), TextItem("c", SENTENCES[1], 1)]
    scores = score_words(scorer_of("gpt2"), documents, context="document")
    joined = score_words(scorer_of("gpt2"), [TextItem("", " ".join(SENTENCES[:2]))])[0]
    assert torch.cat([scores[0].log_probs, scores[1].log_probs]).tolist() == pytest.approx(joined.log_probs.tolist())
    alone = score_words(scorer_of("gpt2"), documents)[2]
    assert scores[2].log_probs.tolist() == pytest.approx(alone.log_probs.tolist())
    assert scores[1].log_probs[0].item() != scores[2].log_probs[0].item()
    assert [word.text for word in scores[1].words] == SENTENCES[1].split()


def test_document_context_of_recurrent_models():
    model, tokenizer = model_and_tokenizer("on_lstm")
    documents = [TextItem("a", SENTENCES[0]), TextItem("", " "), TextItem("b", SENTENCES[1])]
    scores = score_words(scorer_of("on_lstm"), documents, context="document")
    end = tokenizer.eos_token_id
    first, second = (tokenizer(sentence)["input_ids"] for sentence in SENTENCES[:2])
    ids = torch.tensor([[end, *first, end, *second]])
    logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0].log_softmax(-1)
    expected = [logits[len(first) + 1 + k, token].item() for k, token in enumerate(second)]
    assert scores[2].log_probs.tolist() == pytest.approx(expected, abs=1e-4)
    assert len(scores[1].words) == 0 and len(scores[2].tokens) == len(second)


@pytest.mark.parametrize("architecture", ["gpst", "tree_lm_gpt2"])
def test_document_context_is_that_of_parse(architecture):
    """The tokens before a sentence."""
    scorer, documents = scorer_of(architecture), [TextItem(str(k), text) for k, text in enumerate(SENTENCES[:2])]
    scores, alone = (score_words(scorer, documents, context=context) for context in ("document", "sentence"))
    first, second = (scorer.tokenizer(sentence)["input_ids"] for sentence in SENTENCES[:2])
    numbers = torch.tensor([[1] * len(first) + [0] * len(second)])
    expected = scorer.model.parse(torch.tensor([[*first, *second]]), context_sentence_ids=numbers).token_log_probs
    assert [p for _, p in scores[1].tokens] == pytest.approx(expected[0, len(first) :].tolist(), abs=1e-4)
    assert totals(scores)[0] == pytest.approx(totals(alone)[0], abs=1e-4)
    assert totals(scores)[1] != pytest.approx(totals(alone)[1], abs=1e-3)


def test_contexts_are_cut_where_positions_are_few(monkeypatch):
    """The first sentences of the context of a tree LM on a backbone are left out."""
    scorer, documents = scorer_of("tree_lm_gpt2"), [TextItem(str(k), text) for k, text in enumerate(SENTENCES[:2])]
    ids, alone = scorer.tokenizer(SENTENCES[0])["input_ids"], totals(score_words(scorer, documents))[1]
    monkeypatch.setattr(scorer.model.config.backbone_config, "n_positions", 2 * len(ids))
    assert totals(score_words(scorer, documents, context="document"))[1] == pytest.approx(alone, abs=1e-4)
    assert scorer.cuts["contexts_cut"] == 1
    monkeypatch.setattr(scorer.model.config.backbone_config, "n_positions", 2)
    few = "A context of .* The limit is 1, half"
    numbers = (torch.arange(len(ids)) < 6).long()[None]
    refused(few, scorer.model.parse, torch.tensor([ids]), context_sentence_ids=numbers)
    assert why_sentences_alone(scorer) == "TreeLMForCausalLM is trained on single sentences"


def test_plain_context_is_text_as_it_was_written(monkeypatch):
    """With a space between sentences, whatever splits the words of the sentence itself."""
    scorer, tokenizer, encoded = scorer_of("tree_lm_gpt2"), tokenizer_of("bpe"), []
    scorer.tokenizer = tokenizer
    monkeypatch.setattr(TextScorer, "iterate", lambda self, texts, **options: iter(encoded.extend(texts) or ()))
    documents = [TextItem(str(k), text) for k, text in enumerate((SENTENCES[0], "", *SENTENCES[1:]))]
    score_words(scorer, documents, context="document", tokenize="ptb")
    assert [len(text.context) for text in encoded] == [0, 1, 1, 2]
    assert tokenizer.decode(sum(encoded[3].context, [])) == " ".join(SENTENCES[:2])


def test_beginnings_of_words_after_context():
    """`starts` reads logits, which have to be those behind the context."""
    scorer = scorer_of("gpst", estimator="stepwise", num_beams=3)
    texts = encode_sentences(scorer.tokenizer, [sentence.split() for sentence in SENTENCES[:3]])
    texts[1].context, texts[2].context = [texts[0].ids], [texts[0].ids, texts[1].ids]
    plain, found = scorer.score(texts), scorer.score(texts, starts=True)
    for one, other in zip(plain, found, strict=True):
        assert torch.allclose(one.log_probs, other.log_probs, atol=1e-4)
        assert other.word_start.shape == (len(one.log_probs) + 1,) and (other.word_start <= 1e-6).all()
    alone = scorer.score([EncodedText(texts[1].ids, texts[1].word_of_token, texts[1].num_words)], starts=True)[0]
    assert not torch.allclose(alone.word_start, found[1].word_start, atol=1e-4)
    assert not torch.allclose(alone.log_probs, found[1].log_probs, atol=1e-4)


# ---------------------------------------------------------------------------------------------------- long texts
@pytest.mark.parametrize("architecture", ["gpst", "gpt2"])
def test_long_texts_are_read_in_windows(architecture):
    scorer = scorer_of(architecture, num_beams=2) if architecture == "gpst" else scorer_of(architecture)
    model, tokenizer = model_and_tokenizer(architecture)
    text = " ".join(SENTENCES * 3) + " " + "supercalifragilistic" * 12
    ids = tokenizer(text)["input_ids"]
    limit = scorer.max_tokens
    assert len(ids) > 2 * limit
    (found,) = score_words(scorer, [TextItem("", text)])
    assert len(found.tokens) == len(ids) and found.log_probs.isfinite().all()
    assert scorer.cuts == {"texts_in_windows": 1, "contexts_cut": 0}
    # The second window begins in the middle of the first and is scored from where that ends.
    start = limit - (limit - limit // 2)
    (window,) = scorer.score([EncodedText(ids[start : start + limit], [0] * limit, 1)])
    assert found.tokens[limit][1] == pytest.approx(window.log_probs[limit - start].item(), abs=1e-4)


# ------------------------------------------------------------------------------------------------- words and tokens
CHARACTERS = (
    "aAeE .,'\"-\t\u00a0\u2003éßğİﬁñ"
    "中文字日本あア한글עבריתعرب😀👩‍👩‍👧🏽"
    "\u0301\u0308\u200d\u200b\ufeff\x00\x07\u2028\x85▁Ġ<|>/s0123"
)


def messy_line(generator: random.Random) -> str:
    words = [
        "".join(generator.choices(CHARACTERS, k=generator.choice([1, 2, 5, 9]))) for _ in range(generator.randint(0, 7))
    ]
    words += generator.choices(
        ["<|endoftext|>", "</s>", "<unk>", "<pad>", "[UNK]", "don't", "(well,", 'said:"No!"'], k=1
    )
    return generator.choice([" ", "  ", "\t", " \t "]).join(words)


@pytest.mark.parametrize("architecture", ["on_lstm", "prpn", "palm"])
def test_measures_of_the_one_tree(architecture):
    lines = ["We ask for peace and hope", "", "We", "\x00 The state of our Union"]
    scores = score_words(scorer_of(architecture, details=True), [TextItem("", line) for line in lines])
    model, tokenizer = model_and_tokenizer(architecture)
    (parsed,) = parse_sentences(model, tokenizer, [lines[0].split()])
    distance, depth, opened, closed = (scores[0].more[name].tolist() for name in TREE_COLUMNS)
    spans = parsed.tree().spans
    assert depth == [sum(i <= k < j for i, j in spans) for k in range(6)]
    assert opened == [sum(i == k for i, _ in spans) for k in range(6)]
    assert closed == [sum(j == k + 1 for _, j in spans) for k in range(6)]
    heights = span_heights(spans)
    over = [heights[min((j - i, (i, j)) for i, j in spans if i < k < j)[1]] for k in range(1, 6)]
    assert math.isnan(distance[0]) and distance[1:] == over, "trees are binary: a word has height 1"
    trees = [torch.stack([found.more[name] for name in TREE_COLUMNS], 1) for found in scores]
    assert [len(tree) for tree in trees] == [6, 0, 1, 6] and trees[2][0, 1:].tolist() == [0, 0, 0]
    assert trees[3][:, 1].isnan().tolist() == [not count for count in scores[3].num_tokens.tolist()]
    rows = word_table([TextItem("", lines[0])], scores[:1])
    assert [row[15:] for row in rows[1:]] == trees[0][1:].tolist()
    assert columns("bits", more=scores[0].more)[15:] == [*TREE_COLUMNS]
    assert score_words(scorer_of("gpt2", details=True), [TextItem("", "We")])[0].more == {}


@pytest.mark.parametrize("architecture", ["gpst", "rnng", "rnng_pieces", "on_lstm", "gpt2"])
def test_one_row_per_word_of_messy_text(architecture):
    generator = random.Random(1)
    lines = ["", "   ", "x" * 80, "\x00", "\u200f\u202e abc", " a\x1cc \x85 d\u200be "]
    lines += [messy_line(generator) for _ in range(15)]
    items = [TextItem(str(number), line) for number, line in enumerate(lines, 1)]
    options = {"num_beams": 2} if architecture in SEARCHING else {}
    scores = score_words(scorer_of(architecture, details=True, **options), items)
    rows = word_table(items, scores)
    assert [row[3] for row in rows] == [word for line in lines for word in line.split()]
    assert all(lines[row[1] - 1][row[13] : row[14]] == row[3] for row in rows)
    assert all(math.isfinite(row[6]) == (row[4] > 0) for row in rows)
    assert sum(row[4] for row in rows) == sum(len(found.tokens) for found in scores)
    read = list(csv.reader(io.StringIO(table_text([columns("bits"), *rows])), delimiter="\t"))
    assert read[0] == columns("bits") and [row[3] for row in read[1:]] == [row[3] for row in rows]


FLAGGED = [
    ("words", ["We", "zzzzing", "the", "</s>", "<pad>"], {1, 3, 4}, {0, 1, 2, 3, 4}),
    ("pieces", ["We", "中文"], {1}, {0, 1}),
    ("bpe", ["We", "中文"], set(), {0, 1}),
    ("bpe", ["<|endoftext|>", "we"], set(), {0, 1}),
]


@pytest.mark.parametrize(("kind", "words", "unknown", "word_of_token"), FLAGGED)
def test_unknown_words_are_flagged_and_special_tokens_are_text(kind, words, unknown, word_of_token):
    tokenizer = tokenizer_of(kind)
    (text,) = encode_sentences(tokenizer, [words])
    assert text.unknown == unknown and set(text.word_of_token) == word_of_token
    assert tokenizer.pad_token_id not in text.ids and tokenizer.eos_token_id not in text.ids
    (spaced,) = encode_sentences(tokenizer, [["", f" {words[0]}  {words[1]}", *words[2:]]])
    assert spaced.ids == text.ids and set(spaced.word_of_token) == set(range(1, len(words)))


@pytest.mark.parametrize("model", ["rnng", "on_lstm"])
def test_prose_scores_are_those_of_the_text_as_the_treebank_writes_it(model):
    prose = "“Don't ask,” she said (it's America's)… we'd go—we can't."
    pieces = split_as_treebank(scorer_of(model).tokenizer, [prose.split()])[0]
    texts = [prose, " ".join(piece for word in pieces for piece in word)]
    (scores,) = score_words(scorer_of(model), [TextItem("1", prose)], tokenize="ptb")
    (split,) = score_words(scorer_of(model), [TextItem("1", texts[1])])
    assert [word.text for word in scores.words] == prose.split()
    assert all(prose[word.start : word.end] == word.text for word in scores.words)
    assert scores.tokens == split.tokens
    assert scores.num_tokens.tolist() == list(map(len, pieces))
    sums = [part.sum().item() for part in split.log_probs.split(list(map(len, pieces)))]
    assert scores.log_probs.tolist() == pytest.approx(sums, abs=1e-4)


@pytest.mark.parametrize(
    ("vocabulary", "read"),
    [
        ("Mr. can't it end . -LRB- -RRB- `` ''", "`` it ''|-LRB- end . -RRB-|Mr.|can't|do n't|it --|``"),
        ("it end", "it|end|Mr|ca n't|do n't|it|"),
    ],
)
def test_words_are_split_as_far_as_the_vocabulary_needs_it(vocabulary, read):
    tokenizer = word_tokenizer([vocabulary.split()])
    pieces = split_as_treebank(tokenizer, ["“it” (end.) Mr. can't don’t it— “".split(), []])
    assert [" ".join(word) for word in pieces[0]] == read.split("|") and pieces[1] == []
    texts = encode_sentences(tokenizer, ["“it” (end.) Mr. can't don’t it— “".split()], tokenize="ptb")
    assert texts[0].num_words == 7 and 6 not in texts[0].unknown
    assert (6 in texts[0].word_of_token) == bool(pieces[0][6])  # a mark that is left out has no token


@pytest.mark.parametrize("word", ["don't", "it's", '"We', "-", "(", "well-known"])
def test_printed_words_are_read_as_typed_ones(word):
    """A vocabulary that holds typewriter forms whole reads their printed forms so, too; brackets are its own."""
    vocabulary = ["don't", '"We', "-", "it", "'s", "-LRB-", "(", "well-known", "``", "."]
    tokenizer = word_tokenizer([vocabulary], min_count=1)
    printed = word.translate(str.maketrans({"'": "\u2019", '"': "\u201c", "-": "\u2013"}))
    [[read], [other]] = split_as_treebank(tokenizer, [[word], [printed]])
    assert read == other == {"it's": ["it", "'s"], "(": ["-LRB-"]}.get(word, [word])


def test_a_vocabulary_of_pieces_knows_words_of_one_token():
    """Pieces can write `end.`, but the model has learned to read `end .`, whether "." is one token or two."""
    for more in ([], ["don", "tin", "go", "home", "now"] * 9):
        tokenizer = subword_tokenizer([["it", "can't", "(", ")", "“", "”", "—", ".", "St", *more]] * 9, 40)
        sentence = "can't don’t St. tin “(it)” it—it end.".split()
        pieces = split_as_treebank(tokenizer, [sentence, ["it", "it."], []])
        read = "can't|do n’t|St.|tin|“ ( it ) ”|it — it|end ."
        if more:
            read = read.replace("can't", "ca n't")  # too rare for a token of its own
        assert " ".join("|".join([" ".join(word) for word in pieces[0]]).split()) == read
        assert pieces[1:] == [[["it"], ["it", "."]], []]


def test_contractions_whose_parts_are_tokens_are_split():
    """Trees may have a few that their parser left whole, such as `don't`."""
    tokenizer = subword_tokenizer([["do", "n't", "Let", "'s", "don't", "Let's", "o'clock", "gonna", "."]] * 9, 200)
    words = ["don't", "Let's", "o'clock", "gonna", "let's", "don\u2019t"]
    assert all(len(tokenizer.tokenize(word)) == 1 for word in words[:4])
    read = [["do", "n't"], ["Let", "'s"], ["o'clock"], ["gonna"], ["let", "'s"], ["do", "n't"]]
    assert split_as_treebank(tokenizer, [[*words, "."]])[0][:-1] == read


@pytest.mark.parametrize("kind", ["words", "pieces"])
def test_periods_and_brackets_are_read_by_the_sentence_and_the_vocabulary(kind):
    """Periods of abbreviations stay in the middle of a sentence; brackets are as the vocabulary has them."""
    line = "Gov. Tarkin saw the E.U. team at 5 p.m. on Fri. evening. Then e.g. J. R. Smith left (the U.S.)"
    read = "Gov.|Tarkin|saw|the|E.U.|team|at|5|p.m.|on|Fri.|evening .|Then|e.g.|J.|R.|Smith|left|( the|U.S. )"
    # nltk takes the period before a closing bracket at the end; `-LRB-` is typed by hand.
    for brackets, escaped in ((["(", ")"], False), (["-LRB-", "-RRB-"], True)):
        words = ["the", "team", "saw", "left", ".", *brackets]
        tokenizer = word_tokenizer([words]) if kind == "words" else subword_tokenizer([words * 9] * 9, 60)
        pieces, typed = split_as_treebank(tokenizer, [line.split(), ["-LRB-the", "-RRB-", "(", "end."]])
        expected = read.replace("U.S. )", "U.S . )")
        expected = expected.replace("(", "-LRB-").replace(")", "-RRB-") if escaped else expected
        assert "|".join(" ".join(word) for word in pieces) == expected
        assert typed[1:] == [[brackets[1]], [brackets[0]], ["end", "."]]


def test_words_and_tokens_that_do_not_fit_are_refused():
    merges = [("o", "f"), (" ", "t"), ("of", " t")]
    vocabulary = {token: k for k, token in enumerate(["o", "f", " ", "t", "of", " t", "of t"])}
    crossing = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocabulary, merges)))
    refused("covers the words 'of' and 't'", encode_sentences, crossing, [["of", "t"]])


def test_which_tokens_begin_words():
    tokenizer = tokenizer_of("bpe")
    starts = word_starts(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    named = set(tokenizer.convert_ids_to_tokens(starts.nonzero().squeeze(1).tolist()))
    assert named == {token for token in tokenizer.get_vocab() if token.startswith("Ġ")} | {tokenizer.eos_token}


# ------------------------------------------------------------------------------------------------------- options
def test_begin_token_can_be_chosen():
    model, tokenizer = model_and_tokenizer("gpt2")
    scorer = scorer_of("gpt2", begin_token="<|CLS|>")
    ids = torch.tensor([[tokenizer.cls_token_id, *tokenizer(SENTENCES[1])["input_ids"]]])
    expected = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None]).squeeze(1)
    assert [p for _, p in score_words(scorer, ITEMS)[1].tokens] == pytest.approx(expected.tolist(), abs=1e-4)
    assert scorer.options()["begin_token"] == "<|CLS|>"


def test_a_gpu_reads_more_texts_in_one_call():
    sizes = {name: usual_batch_size(None, SimpleNamespace(device=torch.device(name))) for name in ("cpu", "cuda")}
    assert sizes == {"cpu": 16, "cuda": 128} and usual_batch_size(5, None) == 5


UNFIT_OPTIONS = [
    ("gpt2", {"begin_token": "<nothing>"}, {}, "begin_token '<nothing>'"),
    ("gpst", {"begin_token": "<|CLS|>"}, {}, "begin_token='<|CLS|>'"),
    ("gpt2", {"estimator": "stepwise"}, {}, "'stepwise'.* 'exact'"),
    ("gpst", {"estimator": "exact"}, {}, "'exact'.* 'beam_marginal' or 'stepwise'"),
    ("gpt2", {"num_beams": 3}, {}, "--num-beams"),
    ("lstm", {}, {"end": True}, "end=False"),
    ("gpst", {}, {"word_correction": True}, "'stepwise'"),
    ("rnng", {}, {"context": "document"}, "context 'sentence'"),
    ("lstm", {}, {"context": "document"}, "context 'sentence'"),
    ("tree_lm", {}, {"context": "document"}, "reads one sentence: choose the context 'sentence'"),
    ("pcfg", {}, {"context": "document"}, "PCFGForCausalLM reads one sentence: choose the context 'sentence'"),
]


@pytest.mark.parametrize(("architecture", "options", "scoring", "message"), UNFIT_OPTIONS)
def test_options_that_do_not_fit_are_refused(architecture, options, scoring, message):
    refused(message, lambda: score_words(scorer_of(architecture, **options), ITEMS, **scoring))


def test_context_is_refused_by_models_of_single_sentences():
    (text,) = encode_sentences(tokenizer_of("rnng"), [SENTENCES[0].split()])
    refused("RNNGForCausalLM", scorer_of("rnng").score, [dataclasses.replace(text, context=(text.ids,))])


def test_numbers_that_are_none_are_an_error():
    tokenizer = tokenizer_of("bpe")
    ids = {"bos_token_id": 0, "eos_token_id": 0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), n_embd=8, n_head=1, n_layer=1, **ids))
    model.transformer.wte.weight.data[:] = float("nan")
    refused("not numbers", score_words, TextScorer(model, tokenizer, name="damaged"), ITEMS)


# --------------------------------------------------------------------------------------------------------- files
def test_tables_of_all_formats(tmp_path):
    expected = [("i1", 'He said "no" .'), ("i2", "a\tb")]
    (tmp_path / "a.tsv").write_text('item\tsentence\ni1\t"He said ""no"" ."\ni2\t"a\tb"\n', encoding="utf-8")
    (tmp_path / "a.csv").write_text('\ufeffitem,sentence\ni1,"He said ""no"" ."\ni2,a\tb\n', encoding="utf-8")
    rows = [{"item": item, "sentence": text} for item, text in expected]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n\n", encoding="utf-8")
    # As Excel writes it where commas are decimal points.
    (tmp_path / "b.csv").write_text('\ufeffitem;sentence\r\ni1;"He said ""no"" ."\r\ni2;a\tb\r\n', encoding="utf-8")
    # As spreadsheets write columns that they have touched, header names with spaces, tabs, and Unicode text.
    (tmp_path / "c.csv").write_text('item, sentence ,,\ni1,"He said ""no"" .",,\ni2,a\tb,,\n', encoding="utf-8")
    (tmp_path / "f.csv").write_text('item\tsentence\ni1\t"He said ""no"" ."\ni2\t"a\tb"\n', encoding="utf-8")
    (tmp_path / "g.tsv").write_text('item\tsentence\r\ni1\t"He said ""no"" ."\r\ni2\t"a\tb"', encoding="utf-16")
    (tmp_path / "h.csv").write_text(
        '\ufeffsep=;\r\nitem;sentence\r\ni1;"He said ""no"" ."\r\ni2;a\tb\r\n', encoding="utf-8"
    )
    for name in ("a.tsv", "a.csv", "b.csv", "c.csv", "f.csv", "g.tsv", "h.csv", "a.jsonl"):
        assert [(item.item, item.text) for item in read_items(tmp_path / name)] == expected
    (tmp_path / "a.txt").write_text("one\n\ntwo three\r\nfour", encoding="utf-8")
    items = read_items(tmp_path / "a.txt")
    assert [(item.item, item.text, item.document) for item in items] == [
        ("1", "one", 0), ("2", "", 0), ("3", "two three", 1), ("4", "four", 1),
    ]  # fmt: skip
    (tmp_path / "b.jsonl").write_text('{"item": 7, "sentence": "a"}\n{"item": null, "sentence": "b"}\n')
    assert [item.item for item in read_items(tmp_path / "b.jsonl")] == ["7", "2"]
    # A line of a TSV is a row, and quotation marks are text, unless a program quoted the whole field.
    (tmp_path / "d.tsv").write_text('item\tsentence\n1\t"We agree .\n2\tThey ask ."\n3\t"She said ""no"" ."\n')
    assert [item.text for item in read_items(tmp_path / "d.tsv")] == ['"We agree .', 'They ask ."', 'She said "no" .']
    (tmp_path / "e.tsv").write_text('"item"\t"sentence"\n"1"\t"We agree ."\n')
    assert [item.text for item in read_items(tmp_path / "e.tsv")] == ["We agree ."]
    (tmp_path / "c.json").write_text('{"sentence": "pair \\ud83d\\ude42", "document": 2.5}\n')
    assert [item.text for item in read_items(tmp_path / "c.json", kind="jsonl")] == ["pair \U0001f642"]


BAD_FILES = [
    ("a.tsv", b"item\ttext\n1\ta\n", "no column 'sentence'"),
    ("a.tsv", b"item\tsentence\n1\n", "a.tsv:2: 1 fields"),
    ("a.csv", b'item,sentence\n1,"open\n2,b\n', "quotation mark"),
    ("a.csv", b'item,sentence\n1,"We agree .\n2,They ask ."\n3,b\n', r"a.csv:2: .* the row continues to line 3"),
    ("a.csv", b"sentence,sentence\na,b\n", "a column twice"),
    ("a.csv", b"sentence,,\na,b,c\n", "a.csv:2: columns 2, 3 hold text, but have no name"),
    ("a.csv", b"sep=|\nitem|sentence\n1|a|b\n", "a.csv:3: 3 fields"),
    ("a.tsv", b"\tsentence\t\n1\ta\t\n\tb\t7\n", "a.tsv:3: columns 1, 3 hold text"),
    ("a.csv", b"", "is empty"),
    ("a.jsonl", b'{"sentence": 3}\n', "3 in the column 'sentence'"),
    ("a.jsonl", b"{sentence}\n", "a.jsonl:1: not JSON"),
    ("a.jsonl", b'\n{"sentence": "x \\ud800 y"}\n', "a.jsonl:2: half of a character"),
    ("a.jsonl", b'{"sentence": "a", "document": [1]}\n', r"row 1 has \[1\] .*'document'"),
    ("a.json", b'{"sentence": "a"}\n', ".jsonl"),
    ("a.txt.gz", b"", "a.txt.gz"),
    ("a.txt", b"\n \n", "no text"),
    ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "a.txt' is a Git LFS pointer"),
    ("a.txt", b"abc\n\xff\n", "a.txt:2: byte 0xff"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES)
def test_bad_files_are_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    refused(message, read_items, tmp_path / name)
    (tmp_path / name).write_text('{"sentence": "a"}', encoding="utf-8")  # a format that is named counts
    assert read_items(tmp_path / name, kind="jsonl") == [TextItem("1", "a")]


def test_columns_that_are_named_must_be_there(tmp_path):
    (tmp_path / "a.csv").write_text("sentence,id\nWe ask,x\n")
    refused("row 1 has no 'nope'", read_items, tmp_path / "a.csv", item_column="nope")
    (tmp_path / "a.txt").write_text("We ask\n")
    for column in ("text_column", "item_column"):
        refused("column 'id'", read_items, tmp_path / "a.txt", **{column: "id"})


@pytest.mark.parametrize("architecture", ["gpt2", "rnng"])
def test_half_weights_are_computed_in_float32_on_a_cpu(architecture, tmp_path):
    model, tokenizer = model_and_tokenizer(architecture)
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    items = [TextItem("1", text) for text in SENTENCES]
    found = {}
    for dtype in ("auto", "float32", "bfloat16"):
        scorer = TextScorer.from_pretrained(str(tmp_path), dtype=dtype, device="cpu")
        found[dtype] = torch.cat([scores.log_probs for scores in score_words(scorer, items)])
        assert scorer.describe()["dtype"] == ("bfloat16" if dtype == "bfloat16" else "float32")
    assert torch.equal(found["auto"], found["float32"]) and not torch.equal(found["auto"], found["bfloat16"])


def test_scores_of_the_first_texts_come_before_the_last_are_read(monkeypatch):
    """In the order of the texts, though batches hold texts of about equal length; equal ones of a block count once."""
    lengths = [2, 9, 3, 3, 8, 1, 4, 2, 9, 5, 2, 7]
    items = [TextItem(str(k), " ".join(["we"] * length)) for k, length in enumerate(lengths)]
    scorer = scorer_of("gpt2", batch_size=2)
    read: list[int] = []
    score = LogitReader.score
    monkeypatch.setattr(LogitReader, "score", lambda self, batch: (read.append(len(batch)), score(self, batch))[1])
    found = iterate_words(scorer, iter(items))
    first = next(found)
    assert read == [1]
    assert [len(scores.words) for scores in (first, *found)] == lengths
    assert read == [1, 2, 2, 2, 2, 2]  # then 2, 4 and 8 texts in batches of two, as far as they differ


@pytest.mark.parametrize(("architecture", "number"), [("gpst", 1), ("on_lstm", 1), ("on_lstm", 2)])
def test_texts_of_an_iterator_are_read_as_they_are_needed(architecture, number):
    """Scores are those of a list, and few texts are read before the first scores come; ON-LSTM also has trees."""
    texts = [" ".join(["we ask for peace"] * (k % 4)) for k in range(300)]
    items, read = [TextItem(str(k), text) for k, text in enumerate(texts)], []
    scorer = scorer_of(architecture, details=True, batch_size=2, num_processes=number)
    found = iterate_words(scorer, (read.append(item) or item for item in items))
    early = [next(found)]
    assert len(read) <= (8 if number == 1 else 64)
    early += found
    whole = score_words(scorer, items)
    assert [[word.text for word in scores.words] for scores in early] == [text.split() for text in texts]
    for one, other in zip(word_table(items, early), word_table(items, whole), strict=True):
        assert one == pytest.approx(other, abs=1e-4, nan_ok=True)
