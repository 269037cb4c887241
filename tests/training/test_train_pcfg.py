"""Training of PCFGs: what is read and when, what is learned, and what is saved."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from hf_synlm import PCFGForCausalLM
from hf_synlm.data.treebank import read_treebank
from hf_synlm.evaluation.trees.gold_treebank import make_treebank
from hf_synlm.evaluation.trees.parsing import unlabeled_f1
from hf_synlm.evaluation.trees.treebank_parsing import parse_words
from hf_synlm.training.engine.recipe import kept_evaluation
from hf_synlm.training.programs import train_pcfg
from hf_synlm.training.tasks.stream_batches import read_words
from tests.helpers.training_runs import TINY, sample_treebank

SIZES = TINY["pcfg"]
COMPOUND = "latent_size=3,encoder_embedding_size=5,encoder_hidden_size=4"
GRAMMARS = {"dense": SIZES, "compound": f"{SIZES},{COMPOUND}", "simple": f"{SIZES},grammar=simple"}
GRAMMARS["low rank"] = f"{SIZES},grammar=tensor_shared,rank=5"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A few trees of the embedded treebank, and the same sentences as text."""
    return sample_treebank(tmp_path_factory.mktemp("trees"), train=24, valid=8, test=5)


Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(corpus: dict[str, str], program: Run) -> Run:
    """Runs the program in this process; its results and what it printed."""

    def start(output_dir: Path, *flags: str, kind: str = "", grammar: str = SIZES) -> dict[str, Any]:
        roles = {"train": "train", "validation": "valid", "test": "test"}
        files = [part for role, name in roles.items() for part in (f"--{role}-files", corpus[f"{name}{kind}"])]
        argv = [
            *("--output-dir", str(output_dir), "--config-overrides", grammar, "--tokenizer-min-frequency", "2"),
            *files,
            *("--curriculum-words", "0", "--learning-rate", "0.02", "--logging-steps", "1", "--seed", "0", *flags),
        ]
        return program("train_pcfg", argv)

    return start


def of_text(folder: Path, *sentences: str) -> tuple[str, ...]:
    """Flags for a text to train on."""
    (file := folder / "text.txt").write_text("\n".join(sentences) + "\n", encoding="utf-8")
    return ("--file-format", "text", *(f"--{role}_files={file}" for role in ("train", "validation", "test")))


# ---------------------------------------------------------------------------------------------- runs
@pytest.mark.parametrize("kind", list(GRAMMARS))
def test_every_grammar_learns(kind: str, run: Run, tmp_path: Path) -> None:
    found = run(tmp_path / "out", "--max-train-steps", "13", "--num-train-epochs", "2", grammar=GRAMMARS[kind])
    assert "12 steps: --num-train-epochs 2 ends before --max-train-steps 13" in found["stdout"]
    first, *_, last = found["evaluations"]
    assert last["losses"]["perplexity"] < 0.8 * first["losses"]["perplexity"]
    assert [item["step"] for item in found["evaluations"]] == [0, 6, 12]
    for row in found["train"]:
        assert ("kl" in row) == (kind == "compound")
        nats = row["language_model"] + row.get("kl", 0)
        assert row["loss"] == pytest.approx(nats) and row["perplexity"] == pytest.approx(np.exp(nats / row["tokens"]))
    assert set(last["trees"]) == set(first["trees"]) >= {"sentence_f1", "corpus_f1"}


@pytest.mark.usefixtures("warm_verify")
def test_the_best_grammar_is_saved_and_reported(run: Run, corpus: dict[str, str], tmp_path: Path) -> None:
    steps = ("--num-train-epochs", "2", "--parse-options", "method=viterbi", "--final-report", "True")
    found = run(tmp_path / "out", *steps, "--curriculum-words", "20")
    best = kept_evaluation(found)
    assert best["losses"]["nats"] == min(item["losses"]["nats"] for item in found["evaluations"])
    folder = tmp_path / "out" / "model"
    model, tokenizer = PCFGForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    boundary = tokenizer.eos_token_id
    nats = tokens = 0.0
    for sentence in read_treebank(corpus["valid"]):
        words = tokenizer(" ".join(sentence.words), add_special_tokens=False)["input_ids"]
        nats -= model.log_likelihood(torch.tensor([[boundary, *words, boundary]])).item()
        tokens += len(words) + 1
    assert best["losses"]["tokens"] == tokens and best["losses"]["nats"] == pytest.approx(nats, rel=1e-6)
    bank = make_treebank(read_treebank(corpus["test"]))
    trees = parse_words(model, tokenizer, bank.words, method="viterbi")
    scores = unlabeled_f1(trees, bank.spans, bank.lengths, "compound-pcfg")
    assert found["test"]["trees"]["model"] == scores.numbers()
    report = found["test"]["saved_model"]["trees"]["remove"]["sentence_and_corpus_f1"]
    assert report["model"]["sentence_f1"] == scores.numbers()["sentence_f1"]
    assert "computes the same without hf_synlm." in found["stdout"]
    *_, closing, last = found["stdout"].strip().splitlines()
    assert closing.startswith("validation perplexity")
    assert last == f"The model is in {folder}. Next: synlm parse FILE --model {folder}"
    assert AutoConfig.from_pretrained(folder).text_style == "treebank"


def test_a_treebank_may_begin_with_one_word(run: Run, corpus: dict[str, str], tmp_path: Path) -> None:
    """What is tried before training is the first sentence that is scored."""
    gold = tmp_path / "gold.mrg"
    gold.write_text("(ROOT (NP (NN Introduction)))\n" + Path(corpus["valid"]).read_text())
    found = run(tmp_path / "out", "--max-train-steps", "1", "--parsing-files", str(gold))
    assert found["evaluations"][-1]["trees"]["sentence_f1"] > 0


def test_text_is_learned_as_its_trees_are(run: Run, corpus: dict[str, str], tmp_path: Path) -> None:
    """Gold trees are no part of the training; a text has none to compare with unless they are named."""
    steps = ("--max-train-steps", "3")
    trees = run(tmp_path / "trees", *steps)
    text = run(tmp_path / "text", *steps, "--file-format", "text", kind=".words")
    named = ("--parsing-files", corpus["valid"], "--final-parsing-files", corpus["test"])
    both = run(tmp_path / "both", *steps, "--file-format", "text", *named, kind=".words")
    assert trees["train"] == text["train"] == both["train"]
    assert trees["evaluations"] == both["evaluations"] and trees["test"]["trees"] == both["test"]["trees"]
    assert "trees" not in text["evaluations"][-1] and "trees" not in text["test"]


def test_steps_of_several_calls_are_those_of_one_batch(run: Run, tmp_path: Path) -> None:
    """Means are over the sentences of the step: two calls hold two sentences and one."""
    data = of_text(tmp_path, "the cat sees the dog", "a dog sings", "the dog sees")
    steps = ("--max-train-steps", "4", "--tokenizer-min-frequency", "1", "--adam-epsilon", "1e-3", *data)
    whole = run(tmp_path / "whole", *steps, "--per-device-train-batch-size", "3")
    parts = ("--per-device-train-batch-size", "2", "--gradient-accumulation-steps", "2")
    parted = run(tmp_path / "parted", *steps, *parts)
    for one, other in zip(whole["train"], parted["train"], strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert whole["train"][0]["tokens"] == pytest.approx((6 + 4 + 4) / 3)
    one, other = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "parted"))
    for name, weight in one.items():
        torch.testing.assert_close(weight, other[name], rtol=1e-4, atol=2e-5, msg=name)


def test_continues_from_a_model(run: Run, tmp_path: Path) -> None:
    first = run(tmp_path / "first", "--max-train-steps", "3")
    folder = ("--model-name-or-path", str(tmp_path / "first" / "model"))
    again = run(tmp_path / "again", "--max-train-steps", "1", *folder, grammar="{}")
    # Some CPUs round products otherwise where memory lies otherwise.
    assert again["evaluations"][0]["losses"] == pytest.approx(kept_evaluation(first)["losses"], rel=1e-7)


# ---------------------------------------------------------------------------------------------- sentences
def test_sentences_of_one_word_are_left_out(run: Run, tmp_path: Path) -> None:
    """In training and in evaluation, for they have probability 0; so do blank lines."""
    lines = ("the cat sees the dog", "yes", "", "a dog sings", "no")
    flags = ("--max-train-steps", "2", "--tokenizer-min-frequency", "1", *of_text(tmp_path, *lines))
    assert run(tmp_path / "out", *flags)["evaluations"][-1]["losses"]["tokens"] == 6 + 4
    vocabulary = json.loads((tmp_path / "out" / "model" / "tokenizer.json").read_text())["model"]["vocab"]
    assert "sings" in vocabulary and not {"yes", "no"} & set(vocabulary)
    file = str(tmp_path / "text.txt")
    data = train_pcfg.PCFGDataArguments([file], [file], file_format="text", max_sentence_words=4)
    assert list(read_words([file], data)) == ["a dog sings".split()]


LENGTHS = np.array([9, 4, 7, 4, 12, 5, 30])


def epochs(first: float, growth: int, count: int = 4) -> list[list[int]]:
    """The lengths that every epoch reads."""
    sampler = train_pcfg.CurriculumSampler(first, growth, LENGTHS, 2, 1000, 3, 0)
    return [sorted(LENGTHS[batch].tolist() for batch in sampler.epoch_batches(epoch)) for epoch in range(count)]


def test_epochs_have_longer_and_longer_sentences() -> None:
    def flat(first: float, growth: int) -> list[list[int]]:
        return [sorted(length for batch in epoch for length in batch) for epoch in epochs(first, growth)]

    assert flat(5, 2) == [[4, 4, 5], [4, 4, 5, 7], [4, 4, 5, 7, 9], [4, 4, 5, 7, 9]]
    assert flat(7, 0) == [[4, 4, 5, 7]] * 4
    assert flat(np.inf, 1) == [sorted(LENGTHS)] * 4
    for batches in epochs(7, 5):
        assert all(len(batch) <= 2 for batch in batches)


def test_the_curriculum_counts_words(run: Run, tmp_path: Path) -> None:
    """Boundaries are no words; epochs end when their sentences have been read."""
    lines = ("a b c", "b c", "a b c d", "a b", "a b c d e f g")
    flags = (*of_text(tmp_path, *lines), "--tokenizer-min-frequency", "1", "--num-train-epochs", "4")
    flags += ("--per-device-train-batch-size", "1")
    short = run(tmp_path / "short", *flags, "--curriculum-words", "2", "--curriculum-growth", "1")
    assert [item["step"] for item in short["evaluations"]] == [0, 2, 2 + 3, 5 + 4, 9 + 4]
    assert [row["tokens"] for row in short["train"]][:2] == [3, 3]
    every = run(tmp_path / "every", *flags, "--curriculum-words", "0")
    assert [item["step"] for item in every["evaluations"]] == [0, 5, 10, 15, 20]


# ---------------------------------------------------------------------------------------------- refusals
REFUSED = [
    ("--tokenizer-type characters", "tokenizer-type is 'characters', but a PCFG reads words. Leave this option"),
    ("--curriculum-words 2", "Raise --curriculum-words from 2 to 3, the shortest training sentence"),
    ("--parse-options methods=viterbi", "parse_options: methods: not an option of .*method, "),
    ("--parse-options method=search", "method 'search' is unknown"),
    ("--gradient-accumulation-steps 99", "only 1 batches"),
    ("--config-overrides grammar=dense,rank=3", "rank"),
    ("--max-sentence-words 2", "there are no"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED)
def test_what_is_refused_before_training(flags: str, message: str, run: Run, tmp_path: Path) -> None:
    data = of_text(tmp_path, "the cat sees the dog", "a dog sings")
    (gold := tmp_path / "gold.txt").write_text("(S (NP (DT a) (NN dog)) (VBZ sings))\n")
    with pytest.raises(ValueError, match=message):
        run(tmp_path / "out", *data, "--parsing-files", str(gold), "--max-train-steps", "1", *flags.split())
    assert not (tmp_path / "out" / "all_results.json").exists()
