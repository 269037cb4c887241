"""Training of URNNG: the objectives against the authors' program, and what is saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_synlm import URNNGForCausalLM
from hf_synlm.training.arguments.base import parse_arguments
from hf_synlm.training.engine.recipe import kept_evaluation
from hf_synlm.training.programs import train_urnng
from hf_synlm.training.tasks import variational
from hf_synlm.training.tasks.inference_network import BinaryTreeCRF
from tests.helpers.goldens import read_tensors
from tests.helpers.refusals import refused
from tests.helpers.training_runs import sample_files
from tests.models.urnng.test_modeling_urnng import AUTHORS_NAMES, authors_model
from tests.training.test_inference_network import CASES, load_network, network_names


def authors_batch(gold: dict[str, Tensor]) -> dict[str, Any]:
    """Words with the end token, and the given trees."""
    ids = gold["sents"][:, 1:]
    actions = gold["given/actions"].long()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "actions": actions, "trees": tables(actions)}


def tables(actions: Tensor) -> Tensor:
    """Trees [..., N, N] of actions [..., 2 N - 1]."""
    flat, size = actions.flatten(0, -2), (actions.shape[-1] + 1) // 2
    trees = torch.zeros(len(flat), size, size, dtype=torch.bool)
    for tree, row in zip(trees, flat.tolist(), strict=True):
        starts, count = [], 0
        for action in row:
            if action == 0:
                starts.append(count)
                count += 1
            else:
                starts.pop()
            tree[starts[-1], count - 1] = True
    return trees.view(*actions.shape[:-1], size, size)


def gradients(model: URNNGForCausalLM, network: nn.Module) -> dict[str, Tensor]:
    """Gradients of the last backward pass under the authors' names; clears them."""
    names = network_names(network)
    found = {names[name]: value.grad for name, value in network.named_parameters() if name in names}
    own = {name: value.grad for name, value in model.named_parameters() if not name.startswith("inference_network")}
    own["lm_head.weight"] = own["model.embed_tokens.weight"]
    # The network's boundaries are words 0 and 2 there.
    own["model.embed_tokens.weight"] = own["model.embed_tokens.weight"].clone()
    own["model.embed_tokens.weight"][[0, 2]] += network.boundaries.grad
    found |= {theirs: own[name] for name, theirs in AUTHORS_NAMES.items()}
    for number in range(model.config.num_layers):
        read, below = (f"model.stack_lstm.from_{part}.{number}" for part in ("input", "below"))
        gates = torch.cat([own[f"{read}.weight"], own[f"{below}.weight"], own[f"{read}.bias"][:, None]], 1)
        i, f, g, o = gates.chunk(4)
        rows = torch.cat([i, f, o, g])
        found |= {f"stack_rnn.linears.{number}.weight": rows[:, :-1], f"stack_rnn.linears.{number}.bias": rows[:, -1]}
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES)
def test_objectives_are_those_of_the_authors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, io, meta = authors_model(case)
    network, _, _ = load_network(case)
    variational.attach_network(model, network)
    grads = read_tensors(f"urnng/{case}", "grads")
    temperature = meta["temperature_of_q"]
    read = variational.read_trees
    monkeypatch.setattr(variational, "read_trees", lambda *a: read(*a[:3], temperature))
    for batch in meta["batches"]:
        prefix = batch["prefix"]
        gold = {name.removeprefix(prefix): value for name, value in io.items() if prefix in name}
        inputs, count = authors_batch(gold), meta["batches"][0]["samples"]
        drawn = tables(gold["trees/actions"][..., :-2].long())
        monkeypatch.setattr(BinaryTreeCRF, "sample", lambda crf, number, drawn=drawn: drawn)
        for train, names in ((True, "q_on"), (False, "q_off")):
            loss, parts = variational.variational_loss(model, model, inputs, count, meta["kl_weight"], train)
            expected = gold["elbo/loss"][0] if train else -gold["elbo/objective_q_off"].mean()
            torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(parts["word_nats"], -gold["p/log_prob_words"].mean(), atol=1e-4, rtol=1e-5)
            torch.testing.assert_close(parts["action_nats"], -gold["p/log_prob_actions"].mean(), atol=1e-4, rtol=1e-5)
            loss.backward()
            check_gradients(gradients(model, network), grads, f"{prefix}{names}/")
        bounds = variational.estimate(model, network, inputs, count)
        torch.testing.assert_close(bounds.importance.float(), gold["eval/log_likelihood"], atol=1e-4, rtol=1e-5)
    ended = variational.with_end_token(inputs["actions"], inputs["attention_mask"].sum(1) - 1)
    loss, _ = variational.supervised_loss(model, model, {**inputs, "actions": ended})
    loss.backward()
    if temperature == 1:
        expected = -(gold["given/log_prob_words"] + gold["given/log_prob_actions"] + gold["given/log_q"]).mean()
        torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-5)
        check_gradients(gradients(model, network), grads, f"{prefix}given/")


def check_gradients(found: dict[str, Tensor], grads: dict[str, Tensor], prefix: str) -> None:
    """Compare the gradients that the authors' program has; two of them are 0 but for rounding."""
    names = [name for name in grads if name.startswith(prefix)]
    assert names
    for name in names:
        theirs = name.removeprefix(prefix)
        if theirs not in ("q_binary.2.bias", "q_binary.4.bias"):
            torch.testing.assert_close(found[theirs], grads[name], atol=1e-4, rtol=1e-4)


# ---------------------------------------------------------------------------------------------- the program
def test_supervised_models_continue_on_words_alone(tmp_path: Path, program: Callable[..., dict]) -> None:
    corpus = sample_files(tmp_path, "trees", train=24, valid=8, test=5)

    def run(output_dir: Path, *flags: str, config: str = "urnng_tiny") -> dict:
        """Results of the program, and what it printed."""
        argv = [
            *("--config", config, "--output-dir", str(output_dir), "--overwrite-output-dir", "False"),
            *("--train-files", corpus["train"], "--validation-files", corpus["valid"], "--test-files", corpus["test"]),
            *("--per-device-train-batch-size", "4", "--batch-group-size", "8", "--logging-steps", "1"),
            *("--num-samples", "3", "--importance-samples", "8", "--network-hidden-size", "5", "--seed", "0", *flags),
        ]
        return program("train_urnng", argv)

    sizes = ("--config-overrides", "hidden_size=6,num_layers=1,dropout=0.1")
    gold = run(tmp_path / "gold", *sizes, "--objective", "supervised", "--max-train-steps", "8")
    nats = [row["word_nats"] + row["action_nats"] + row["network_nats"] for row in gold["train"]]
    assert nats[-1] < nats[0]
    folder = tmp_path / "gold" / "model"
    model, network = URNNGForCausalLM.from_pretrained(folder), variational.load_network(folder)
    assert not any(name.startswith("inference_network") for name in load_file(folder / "model.safetensors"))
    again = run(tmp_path / "words", "--model-name-or-path", str(folder), "--max-train-steps=2", config="urnng_ptb")
    assert again["evaluations"][0]["losses"] == kept_evaluation(gold)["losses"]
    assert network.sizes["embedding_size"] == model.config.hidden_size == 6


def test_layers_may_be_compiled() -> None:
    flags = ["--output-dir", "x", "--torch-compile"]
    assert parse_arguments(train_urnng.URNNGRecipe.parts.values(), flags)[-1].torch_compile


def test_rates_are_halved_after_the_epoch_named() -> None:
    losses = [5.0, 4.0, 4.5, 3.0, 3.5, 2.0, 2.5]
    assert [train_urnng.count_halvings(losses[:n], 3) for n in range(8)] == [0, 0, 0, 0, 0, 1, 2, 3]


def test_network_of_another_folder(tmp_path: Path) -> None:
    refused("inference_network.safetensors", variational.load_network, tmp_path)
