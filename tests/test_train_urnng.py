"""Training of URNNG: the objectives against the authors' program, resume, and what is saved."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hf_synlm import URNNGForCausalLM
from hf_synlm.training import variational
from hf_synlm.training.binary_tree_crf import BinaryTreeCRF
from tests.test_inference_network import CASES, GOLDENS, load_network, network_names
from tests.test_modeling_urnng import AUTHORS_NAMES, authors_model


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
        i, f, g, o = torch.cat([own[f"{read}.weight"], own[f"{below}.weight"], own[f"{read}.bias"][:, None]], 1).chunk(
            4
        )
        rows = torch.cat([i, f, o, g])
        found |= {f"stack_rnn.linears.{number}.weight": rows[:, :-1], f"stack_rnn.linears.{number}.bias": rows[:, -1]}
    model.zero_grad()
    return found


@pytest.mark.parametrize("case", CASES)
def test_objectives_are_those_of_the_authors(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, io, meta = authors_model(case)
    network, _, _ = load_network(case)
    variational.attach_network(model, network)
    grads = load_file(GOLDENS / case / "grads.safetensors")
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
    loss, _ = variational.supervised_loss(model, model, inputs)
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
