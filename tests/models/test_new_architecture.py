"""A new architecture takes four places: a configuration, `score_trees`, a machine and a codec.

The toy lies outside of the package, so what it needs beside these four would be seen here.
"""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerBase, Trainer, TrainingArguments, set_seed

import hf_synlm
from hf_synlm.data.gold_trees import encode_trees
from hf_synlm.data.treebank import parse_treebank
from hf_synlm.evaluation.text.given_trees import score_given_trees
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.hub.export import export_model
from hf_synlm.hub.loading import load_pretrained
from hf_synlm.hub.verify import verify_export
from hf_synlm.trees.binary import actions_to_spans
from hf_synlm.trees.codecs import CODECS, Row, TreeCodec, pad_rows
from hf_synlm.trees.spans import Span
from tests.helpers.documentation import ROOT, blocks
from tests.helpers.scoring_models import tokenizer_of
from tests.helpers.toy_architecture import ToyConfig, ToyForCausalLM, derivation
from tests.reference.exhaustive_search import complete_derivations

TREES = ["(S (NP (X the) (X people)) (VP (X ask) (NP (X for) (X peace))))", "(S (X We) (VP (X ask)))"]


class ClosingsCodec(TreeCodec):
    """How many constituents end after each token."""

    field = "closings"

    def write(self, spans: list[Span], num_tokens: int) -> list[int]:
        """See `TreeCodec`."""
        ends = Counter(end for _, end in spans)
        return [ends[token + 1] for token in range(num_tokens)]

    def read(self, tree: Sequence[int], num_tokens: int) -> list[Span]:
        """See `TreeCodec`."""
        return actions_to_spans(derivation(tree))

    def pad_trees(self, trees: list[Any]) -> Tensor:
        """See `TreeCodec`."""
        return pad_rows(trees, self.padding)

    def steps(self, batch: Row) -> tuple[Tensor, Tensor]:
        """See `TreeCodec`: GEN and COMP."""
        trees = [[count for count in tree if count >= 0] for tree in batch["closings"].tolist()]
        return super().steps({**batch, "spans": [self.read(tree, len(tree)) for tree in trees]})


CODECS["closings"] = lambda config: ClosingsCodec()
AutoConfig.register("toy", ToyConfig)
AutoModelForCausalLM.register(ToyConfig, ToyForCausalLM)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tokenizer_of("words")


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerBase) -> ToyForCausalLM:
    return toy(ToyConfig.from_tokenizer(tokenizer, eos_token_id=None))


def toy(config: ToyConfig) -> ToyForCausalLM:
    set_seed(0)
    found = AutoModelForCausalLM.from_config(config).eval()
    for parameter in found.parameters():
        parameter.data.normal_(std=0.5)
    return found


def all_trees(ids: Sequence[int]) -> list[Row]:
    """A row for every binary tree of a text."""
    codec = ClosingsCodec()
    trees = [actions_to_spans(actions) for actions in complete_derivations(len(ids))]
    return [codec.encode(ids, [True] * len(ids), [("X", *span) for span in spans]) for spans in trees]


def test_trees_of_all_short_texts_have_at_most_probability_one():
    model = toy(ToyConfig())
    for length in range(1, 5):
        texts = itertools.product(range(2, 6), repeat=length)
        rows = [row for text in texts for row in all_trees(text)]
        total = model(**ClosingsCodec().pad(rows)).joint_log_prob.logsumexp(0).item()
        assert len(rows) == 4**length * math.comb(2 * length - 2, length - 1) // length
        assert total <= 0.0
        if length == 1:
            state = model.model.state(*torch.zeros(2, 8))
            words = model.lm_head(state).log_softmax(0)[2:].logsumexp(0)
            assert total == pytest.approx((model.action_log_probs(state)[0] + words).item())


def test_a_full_beam_is_the_enumeration():
    model, ids = toy(ToyConfig()), [2, 5, 3, 3, 4]
    rows = all_trees(ids)
    values = model(**ClosingsCodec().pad(rows)).joint_log_prob
    expected = {tuple(derivation(row["closings"])): value for row, value in zip(rows, values.tolist(), strict=True)}
    found = model.parse(torch.tensor([ids]), num_beams=200, num_return_sequences=len(rows))
    assert len(expected) == len(found.spans[0]) == 14
    for actions, score in zip(found.actions[0].tolist(), found.log_probs[0].tolist(), strict=True):
        assert expected[tuple(actions)] == pytest.approx(score)
    assert found.text_log_probs.item() == pytest.approx(values.logsumexp(0).item())


def test_it_reads_writes_and_parses(model: ToyForCausalLM, tokenizer: PreTrainedTokenizerBase):
    batch = tokenizer(["We ask for peace"], return_tensors="pt")
    assert model(**batch).logits.logsumexp(-1).abs().max() < 1e-5
    output = model.generate(**batch, num_beams=3, max_new_tokens=4, return_dict_in_generate=True)
    ids = output.sequences[0].tolist()
    row = {"input_ids": ids, "closings": ClosingsCodec().write(output.spans[0], len(ids))}
    joint = model(**ClosingsCodec().pad([row])).joint_log_prob.item()
    assert len(ids) == 8 and joint <= model.parse(output.sequences, num_beams=500).text_log_probs.item()
    sampled = model.generate(**batch, do_sample=True, structure_mode="marginal", max_new_tokens=4)
    assert sampled.shape == (1, 8)
    (parsed,) = hf_synlm.parse_sentences(model, tokenizer, [["We", "ask", "for", "peace"]])
    assert len(parsed.tree().spans) == 3


def test_surprisal_of_words_and_of_given_trees(model: ToyForCausalLM, tokenizer: PreTrainedTokenizerBase):
    rows = hf_synlm.surprisal(model, tokenizer, ["We ask for peace", "the people"], unit="nats", details=True)
    parsed = model.parse(**tokenizer(["We ask for peace"], return_tensors="pt"))
    total = sum(row["surprisal_nats"] for row in rows[:4])
    assert total == pytest.approx(-parsed.token_log_probs.sum().item(), abs=1e-4)
    given, scorer = list(parse_treebank(TREES)), TextScorer(model, tokenizer)
    items = [TextItem(str(number), " ".join(tree.words)) for number, tree in enumerate(given)]
    codec = tree_codec(model.config)
    joint = model(**codec.pad(encode_trees(given, tokenizer, codec))).joint_log_prob
    for scores, value in zip(score_given_trees(scorer, items, given), joint.tolist(), strict=True):
        assert scores.log_probs.sum().item() + scores.end == pytest.approx(value, abs=1e-4)
    assert [codec.decode(row) for row in encode_trees(given, tokenizer, codec)][1] == [("X", 0, 2)]


def test_the_page_quotes_this_file():
    (block,) = blocks(ROOT / "docs" / "adding-an-architecture.md", "python")
    assert block["code"] in Path(__file__).read_text(encoding="utf-8")


def test_trainer_trains_it(model: ToyForCausalLM, tokenizer: PreTrainedTokenizerBase, tmp_path: Path):
    codec = tree_codec(model.config)
    rows: Any = encode_trees(list(parse_treebank(TREES)), tokenizer, codec)
    before = model(**codec.pad(rows)).loss.item()
    arguments = TrainingArguments(str(tmp_path), max_steps=5, learning_rate=0.01, report_to="none", use_cpu=True)
    Trainer(model, arguments, codec.pad, train_dataset=rows).train()
    assert model.eval()(**codec.pad(rows)).loss.item() < before


def test_its_folder_loads_without_the_package(model: ToyForCausalLM, tokenizer, tmp_path: Path, warm_verify: None):
    ToyConfig.register_for_auto_class()
    ToyForCausalLM.register_for_auto_class("AutoModelForCausalLM")
    export_model(model, tokenizer, tmp_path / "toy", card="# A toy")
    report = verify_export(tmp_path / "toy", texts=["We ask for peace", "the people"])
    assert report.passed, report.table()
    loaded, _ = load_pretrained(str(tmp_path / "toy"))
    batch = tokenizer(["We ask"], return_tensors="pt")
    assert type(loaded) is ToyForCausalLM
    assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in loaded.state_dict().items())
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)
