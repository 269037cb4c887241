"""TreeReg: losses, gradients, norms and trees of the authors' program, and training by `Trainer`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_synlm.data.brackets import brackets_to_spans
from hf_synlm.data.treebank import read_treebank
from hf_synlm.data.vocabulary import subword_tokenizer
from hf_synlm.training.programs import train_treereg
from hf_synlm.training.tasks import treereg as task
from hf_synlm.trees.spans import spans_to_brackets
from tests.helpers.finetuning import tiny_gpt2, trainer_arguments
from tests.helpers.goldens import read_meta, read_tensors
from tests.helpers.refusals import refused
from tests.helpers.training_runs import sample_files

CASES = ("01_words", "02_pieces", "03_edges", "04_llama")
FULL = task.TreeRegArguments(treereg_part=1.0)


def read(case: str, offset: int = 0) -> tuple[list[dict[str, Any]], dict[str, Tensor], dict[str, Tensor]]:
    """Sentences, tensors and trees of a golden; the first token stands at `offset`."""
    sentences = read_meta(f"treereg/{case}")["sentences"]
    rows = []
    for sentence in sentences:
        begins = [place for place, starts in enumerate(sentence["word_starts"]) if starts]
        ends = [*begins[1:], len(sentence["word_starts"])]
        spans, words = brackets_to_spans(sentence["gold"])
        rows.append({"input_ids": [0], "splits": task.gold_splits(spans, len(words))})
        rows[-1]["word_spans"] = [(i + offset, j + offset) for i, j in zip(begins, ends, strict=True)]
    batch = task.TreeRegCollator(0)(rows)
    return (sentences, read_tensors(f"treereg/{case}", "io"), {key: batch[key] for key in ("word_spans", "splits")})


@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradient_are_those_of_the_authors(case: str) -> None:
    sentences, golden, trees = read(case)
    vectors = golden["hidden_states"].requires_grad_()
    loss = task.tree_regularization_loss(vectors, **trees)
    torch.testing.assert_close(loss, golden["loss/treereg"].view(()), atol=1e-5, rtol=1e-5)
    loss.backward()
    torch.testing.assert_close(vectors.grad, golden["grad_hidden_states"], atol=1e-5, rtol=1e-4)
    norms = task.orthogonal_norms(vectors, vectors).triu(1)
    for row, length in zip(zip(norms, golden["orthogonal_norm"], strict=True), golden["lengths"].tolist(), strict=True):
        torch.testing.assert_close(*(values[:length, :length] for values in row), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_trees_are_those_of_the_authors(case: str) -> None:
    sentences, golden, trees = read(case)
    parses = task.greedy_parse(golden["hidden_states"], trees["word_spans"])
    for sentence, (spans, score), expected in zip(sentences, parses, golden["parse_score"].tolist(), strict=True):
        assert spans_to_brackets(spans, brackets_to_spans(sentence["gold"])[1]) == sentence["parse"]
        assert score == pytest.approx(expected, abs=1e-4, rel=1e-5)


def test_gradient_of_a_language_model_with_the_loss() -> None:
    _, golden, trees = read("04_llama", offset=1)
    meta = read_meta("treereg/04_llama")
    model = LlamaForCausalLM(LlamaConfig(**meta["llama_config"])).eval()
    model.load_state_dict(read_tensors("treereg/04_llama", "state"), strict=False)
    ids, mask = golden["input_ids"], golden["attention_mask"]
    targets = torch.cat([ids[:, 1:], ids[:, :1]], 1)
    last = mask.sum(1, keepdim=True) - 1
    targets = targets.scatter(1, last, model.config.eos_token_id).masked_fill(~mask.bool(), -100)
    out = model(ids, attention_mask=mask, output_hidden_states=True)
    loss = torch.nn.functional.cross_entropy(out.logits.mT, targets)
    read_vectors = task.TreeRegArguments(treereg_layer=meta["layer"], treereg_part=meta["part"]).vectors
    loss = loss + task.tree_regularization_loss(read_vectors(out.hidden_states), **trees)
    torch.testing.assert_close(loss, golden["loss/total"].view(()), atol=1e-5, rtol=1e-5)
    loss.backward()
    grads = read_tensors("treereg/04_llama", "grads")
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], atol=1e-5, rtol=1e-4, msg=name)


def test_norms_keep_their_digits_where_vectors_share_a_direction() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(1, 20, 32) + 100 * torch.randn(32)
    exact = task.orthogonal_norms(vectors.double(), vectors.double())
    torch.testing.assert_close(
        task.orthogonal_norms(vectors, vectors).triu(1).double(), exact.triu(1), atol=1e-4, rtol=1e-5
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert task.orthogonal_norms(vectors, vectors).dtype == torch.float32


def examples(count: int) -> list[dict[str, Any]]:
    row = {"input_ids": [0, 5, 6, 7, 8, 0], "word_spans": [(1, 2), (2, 3), (3, 4), (4, 5)]}
    return [{**row, "splits": task.gold_splits([(0, 2), (2, 4), (0, 4)], 4)} for _ in range(count)]


def train(folder: Path, treereg: task.TreeRegArguments, **options: Any) -> task.TreeRegTrainer:
    rows = {"train_dataset": examples(8), "eval_dataset": examples(2), "data_collator": task.TreeRegCollator(0)}
    trainer = task.TreeRegTrainer(tiny_gpt2(4, 20), trainer_arguments(folder, **options), treereg=treereg, **rows)
    trainer.train()
    return trainer


def test_trainer_learns_the_trees_and_evaluates_the_language_model(tmp_path: Path) -> None:
    trainer = train(tmp_path, task.TreeRegArguments(treereg_every=2, treereg_part=1.0), max_steps=41)
    logged = [entry["treereg_loss"] for entry in trainer.state.log_history if "treereg_loss" in entry]
    assert len(logged) == 21 and logged[-1] < 0.2 * logged[0]
    batch = {key: value.to(trainer.model.device) for key, value in task.TreeRegCollator(0)(examples(2)).items()}
    spans = batch.pop("word_spans")
    del batch["splits"]
    with torch.no_grad():
        out = trainer.model.eval()(**batch, output_hidden_states=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(out.loss), rel=1e-5)
    assert task.greedy_parse(FULL.vectors(out.hidden_states), spans)[0][0] == [(0, 2), (2, 4), (0, 4)]


def test_accumulation_does_not_change_a_step(tmp_path: Path) -> None:
    every_step = task.TreeRegArguments(treereg_every=1, treereg_weight=3.0)
    whole = train(tmp_path, every_step, per_device_train_batch_size=8, optim="sgd")
    parts = train(tmp_path, every_step, per_device_train_batch_size=2, gradient_accumulation_steps=4, optim="sgd")
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    plain = train(tmp_path, task.TreeRegArguments(treereg_weight=0.0), per_device_train_batch_size=8, optim="sgd")
    assert not torch.equal(plain.model.transformer.h[0].ln_1.weight, whole.model.transformer.h[0].ln_1.weight)


@pytest.mark.parametrize("config", ["treereg_tiny", "treereg_bllip"])
def test_program_trains_a_new_model_and_measures_it(config: str, tmp_path: Path) -> None:
    files = sample_files(tmp_path, "trees", train=6, valid=3)
    command = ["--config", config, "--train-file", files["train"], "--validation-file", files["valid"]]
    command += ["--config-overrides", "n_embd=16,n_layer=2", "--treereg-layer", "1", "--max-steps", "2", "--use-cpu"]
    if config == "treereg_bllip":
        words = (tree.words for tree in read_treebank(files["train"]))
        subword_tokenizer(words, 300).save_pretrained(tmp_path / "pieces")
        command += ["--tokenizer-name", str(tmp_path / "pieces"), "--report-to", "none"]
    train_treereg.main([*command, "--output-dir", str(tmp_path / "run"), "--disable-tqdm", "True"])
    results = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert 0 <= results["eval_f1"] < 100 and results["eval_perplexity_per_token"] > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.n_embd == 16
    refused("not empty", train_treereg.main, [*command, "--output-dir", str(tmp_path / "run")])


def test_controls_have_trees_of_others(tmp_path: Path) -> None:
    """The same trees in other places, a drawn one where no sentence is as long, or trees to the right."""
    gold = list(read_treebank(sample_files(tmp_path, "trees", train=40)["train"]))
    found = train_treereg.control_trees(gold, "random", seed=0)
    assert [tree.words for tree in found] == [tree.words for tree in gold]
    lengths = [len(tree.words) for tree in gold]
    shared = [place for place, length in enumerate(lengths) if lengths.count(length) > 1]
    assert sorted(found[k].labeled_spans for k in shared) == sorted(gold[k].labeled_spans for k in shared)
    assert sum(found[k].labeled_spans != gold[k].labeled_spans for k in shared) > len(shared) / 2
    assert all(len(found[k].spans) == max(lengths[k] - 1, 0) for k in set(range(40)) - set(shared))
    again, other = (train_treereg.control_trees(gold, "random", seed) for seed in (0, 1))
    assert found == again != other
    right = train_treereg.control_trees(gold, "right", seed=0)
    assert all(set(tree.spans) == {(k, len(tree.words)) for k in range(len(tree.words) - 1)} for tree in right)


def test_wrong_options_are_refused() -> None:
    refused("treereg-part", task.TreeRegArguments, treereg_part=0.0)
    refused("treereg-layer is 7", task.TreeRegArguments(treereg_layer=7).vectors, [torch.zeros(1, 1, 4)] * 3)
