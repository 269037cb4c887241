"""Tree-planting: edges, targets and loss by the slow and obvious way, and training by `Trainer`."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_synlm.data.treebank import parse_treebank
from hf_synlm.data.vocabulary import subword_tokenizer
from hf_synlm.training.programs import train_tree_planting
from hf_synlm.training.tasks import tree_planting
from tests.helpers.finetuning import tiny_gpt2, trainer_arguments
from tests.helpers.refusals import refused
from tests.helpers.training_runs import sample_files

TREES = (
    "(S (NP (D the) (J old) (N dog)) (VP (V barks)))",
    "(FRAG (NP (N dogs)))",
    "(S (VP (V see) (NP (D the) (N dogs)) (PP (P of) (NP (N America)))))",
)


def paths_of(tree: Any) -> list[tuple[Any, ...]]:
    """Nodes from below the node above the tree to the begin token, to each word, and to the end token."""
    from_top = list(enumerate(tree.labeled_spans))[::-1]  # they stand in post-order
    inner = [(*(node for node, (_, i, j) in from_top if i <= word < j), -1 - word) for word in range(len(tree.words))]
    return [("begin",), *inner, ("end",)]


def edges_by_paths(tree: Any) -> list[list[int]]:
    """Edges up to the lowest common node and down again."""

    def count(first: tuple[Any, ...], second: tuple[Any, ...]) -> int:
        shared = 0
        while shared < min(len(first), len(second)) and first[shared] == second[shared]:
            shared += 1
        return len(first) + len(second) - 2 * shared

    paths = paths_of(tree)
    return [[0 if a is b else count(a, b) for b in paths] for a in paths]


def loss_by_words(attention: torch.Tensor, word_spans: list[tuple[int, int]], edges: list[list[int]]) -> list[float]:
    """KL for each word but the first, number by number."""
    losses = []
    for i in range(1, len(word_spans)):
        given = [
            sum(float(attention[t - 1, u]) for t in range(*word_spans[i]) for u in range(*word_spans[j]))
            for j in range(i)
        ]
        target = [math.exp(-edges[i][j]) for j in range(i)]
        pairs = [(t / sum(target), g / sum(given)) for t, g in zip(target, given, strict=True)]
        losses.append(sum(t * (math.log(t) - math.log(g)) for t, g in pairs))
    return losses


def test_edges_are_those_of_the_paths() -> None:
    for tree in parse_treebank(TREES):
        spans = [(i, j) for _, i, j in tree.labeled_spans]
        assert tree_planting.edge_counts(spans, len(tree.words)).int().tolist() == edges_by_paths(tree)
    # the old dog barks: siblings 2, begin token and end token 2, to each other
    (tree, *_) = parse_treebank(TREES)
    edges = tree_planting.edge_counts([(i, j) for _, i, j in tree.labeled_spans], 4)
    assert edges[1].tolist() == [4, 0, 2, 2, 4, 4] and edges[0, 5] == 2


def test_arcs_are_those_of_the_dependency_tree() -> None:
    """Den Hund hat sie zu füttern vergessen, whose arcs cross: what is above only one of two words."""
    edges = tree_planting.dependency_edges([1, 5, 6, 6, 5, 6, -1])
    above = [[0, 1, 5, 6], [1, 5, 6], [2, 6], [3, 6], [4, 5, 6], [5, 6], [6]]
    for i, first in enumerate(above, 1):
        for j, second in enumerate(above, 1):
            assert edges[i, j] == len(set(first) ^ set(second))
        assert edges[0, i] == edges[i, 0] == edges[8, i] == len(first) + 1
    assert edges[0, 8] == 2 and edges.diagonal().sum() == 0


def test_program_plants_dependencies_as_they_are(tmp_path: Path) -> None:
    conllu = Path(__file__).resolve().parents[1] / "goldens" / "dependencies" / "de.conllu"
    command = ["--config", "tree_planting_tiny", "--train-file", str(conllu), "--validation-file", str(conllu)]
    command += ["--config-overrides", "n_embd=16,n_layer=2", "--max-steps", "1", "--use-cpu", "--disable-tqdm", "True"]
    losses = []
    for name, more in (("arcs", []), ("flat", ["--tree-structure", "flat"]), ("words", ["--tree-tokens", "syntactic"])):
        train_tree_planting.main([*command, *more, "--output-dir", str(tmp_path / name)])
        losses.append(json.loads((tmp_path / name / "eval_results.json").read_text())["eval_planting_loss"])
    assert len(set(losses)) == 3
    with pytest.raises(ValueError, match="--trees random needs constituents"):
        train_tree_planting.main([*command, "--trees", "random", "--output-dir", str(tmp_path / "random")])
    (sentence, *_) = train_tree_planting.read_trees(str(conllu), {"punctuation": "remove"})
    assert sentence.words[-1] != "." and len(sentence.heads) == len(sentence.words)
    with pytest.raises(ValueError, match="tree_labels belongs to constituents"):
        train_tree_planting.main([*command, "--tree-labels", "X", "--output-dir", str(tmp_path / "labels")])


def encoded() -> tuple[list[Any], list[Any]]:
    """The trees, and what models read."""
    trees = list(parse_treebank(TREES))
    tokenizer = subword_tokenizer([tree.words for tree in trees], 40)
    return trees, [tree_planting.encode_sentence(tokenizer, tree.words, tree.labeled_spans) for tree in trees]


def test_loss_and_its_gradient_word_by_word() -> None:
    trees, rows = encoded()
    assert any(end - start > 1 for row in rows for start, end in row["word_spans"])
    batch = tree_planting.TreePlantingCollator(0)(rows)
    torch.manual_seed(0)
    length = batch["input_ids"].shape[1]
    scores = torch.randn(3, length, length, dtype=torch.float64, requires_grad=True)
    attention = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -math.inf).softmax(2)
    loss = tree_planting.tree_planting_loss(attention, batch["word_spans"], batch["edges"])
    expected = [
        value
        for weights, row, tree in zip(attention.detach(), rows, trees, strict=True)
        for value in loss_by_words(weights, row["word_spans"], edges_by_paths(tree))
    ]
    assert loss.item() == pytest.approx(sum(expected) / len(expected), rel=1e-9)
    loss.backward()
    assert scores.grad is not None and scores.grad.isfinite().all() and scores.grad.any()
    # Where the attention is the target, nothing is left to learn.
    words = batch["word_spans"].shape[1]
    own = torch.stack([torch.arange(words), torch.arange(words) + 1], 1)[None]
    edges = tree_planting.edge_counts([(0, words - 2)], words - 2)[None]
    best = (-edges[:, 1:, :-1]).masked_fill(~torch.ones(words - 1, words - 1, dtype=torch.bool).tril(), -math.inf)
    best = torch.nn.functional.pad(best.softmax(2), (0, 1, 0, 1))
    assert float(tree_planting.tree_planting_loss(best, own, edges)) == pytest.approx(0, abs=1e-6)


def train(folder: Path, planting: tree_planting.TreePlantingArguments, **options: Any) -> Any:
    _, rows = encoded()
    data = {"train_dataset": rows, "eval_dataset": rows, "data_collator": tree_planting.TreePlantingCollator(0)}
    arguments = trainer_arguments(folder, **options)
    trainer = tree_planting.TreePlantingTrainer(tiny_gpt2(2, 40), arguments, planting=planting, **data)
    trainer.train()
    return trainer


def test_one_head_learns_the_trees(tmp_path: Path) -> None:
    trainer = train(tmp_path, tree_planting.TreePlantingArguments(planting_layer=1, planting_head=1), max_steps=60)
    logged = [entry["planting_loss"] for entry in trainer.state.log_history if "planting_loss" in entry]
    assert len(logged) == 60 and logged[-1] < 0.5 * logged[0]
    batch = tree_planting.TreePlantingCollator(0)(trainer.eval_dataset)
    trees = {name: batch.pop(name) for name in ("word_spans", "edges")}
    with torch.no_grad():
        out = trainer.model.eval()(**batch, output_attentions=True)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(float(out.loss), rel=1e-5)
    losses = [float(tree_planting.tree_planting_loss(out.attentions[0][:, head], **trees)) for head in (0, 1)]
    assert losses[1] < losses[0]


def test_weight_zero_is_the_plain_model(tmp_path: Path) -> None:
    plain = train(tmp_path, tree_planting.TreePlantingArguments(planting_weight=0.0))
    planted = train(tmp_path, tree_planting.TreePlantingArguments())
    assert not any("planting_loss" in entry for entry in plain.state.log_history)
    assert not all(map(torch.equal, plain.model.parameters(), planted.model.parameters()))


def test_program_trains_a_new_model_and_measures_it(tmp_path: Path) -> None:
    files = sample_files(tmp_path, "trees", train=6, valid=3)
    command = ["--config", "tree_planting_tiny", "--train-file", files["train"], "--validation-file", files["valid"]]
    command += ["--config-overrides", "n_embd=16,n_layer=2", "--max-steps", "2", "--use-cpu", "--disable-tqdm", "True"]
    train_tree_planting.main([*command, "--output-dir", str(tmp_path / "run")])
    results = json.loads((tmp_path / "run" / "eval_results.json").read_text())
    assert results["eval_planting_loss"] > 0 and results["eval_perplexity_per_token"] > 1
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run").config.n_embd == 16
    train_tree_planting.main([*command, "--output-dir", str(tmp_path / "one"), "--per-device-eval-batch-size", "1"])
    one_by_one = json.loads((tmp_path / "one" / "eval_results.json").read_text())["eval_planting_loss"]
    assert one_by_one == pytest.approx(results["eval_planting_loss"], rel=1e-5)


def test_wrong_options_are_refused() -> None:
    heads = [torch.zeros(1, 2, 3, 3)] * 2
    refused("planting_layer is 3", tree_planting.TreePlantingArguments(planting_layer=3).attention, heads)
    refused("planting_head is 2", tree_planting.TreePlantingArguments(planting_head=2).attention, heads)
    refused("attention", tree_planting.TreePlantingArguments().attention, ())
