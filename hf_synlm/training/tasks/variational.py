# SPDX-License-Identifier: Apache-2.0
"""The objectives of URNNG: the evidence lower bound with sampled trees, and the likelihood of given trees.

    ELBO = E_q [log p(x, z)] + H(q(z | x)),   z: trees,   q: the inference network

Its gradient for the model is that of K sampled trees; for the network, entropy and score function with the mean of the
other samples as the baseline (REINFORCE):

    f_k = log p(x | z_k) + w log p(z_k),   b_k = mean of the other f
    loss = - mean_k f_k - w H(q) - mean_k (f_k - b_k) log q(z_k)

where f_k - b_k is a constant, and w, the weight of the KL divergence, rises from 0 to 1. Samples also estimate
log p(x) by importance: log mean_k p(x, z_k) / q(z_k | x).

Source: Kim et al. 2019, section 2.3; `train.py` and `eval_ppl.py` of the authors (harvardnlp/urnng).

Shapes: B sentences, T tokens with the end token, K samples, A actions. Nats.
"""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from hf_synlm.core.losses import share_of
from hf_synlm.training.tasks.inference_network import BinaryTreeCRF, InferenceNetwork, tree_actions
from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION

NETWORK_FILE = "inference_network.safetensors"
_ROWS = 64  # sentences with a tree that `estimate` reads in one pass


def attach_network(model: Any, network: InferenceNetwork) -> None:
    """Make a network part of a model, so that they are trained and checkpointed together; exports leave it out."""
    model.inference_network = network
    model._keys_to_ignore_on_save |= {f"inference_network.{name}" for name in network.state_dict()}


def save_network(network: InferenceNetwork, folder: Path) -> None:
    """Write a network to `NETWORK_FILE` in a folder, with the sizes that it is made of."""
    weights = {name: value.detach().cpu().contiguous() for name, value in network.state_dict().items()}
    # One entry: the order of several is not fixed.
    save_file(weights, folder / NETWORK_FILE, {"sizes": json.dumps(network.sizes)})


def load_network(folder: Path) -> InferenceNetwork:
    """Load the network that `save_network` has written to the folder of a model, in evaluation mode."""
    file = folder / NETWORK_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {NETWORK_FILE}. Name the folder of a model that train_urnng has written.")
    with safe_open(file, "pt") as stored:
        sizes = json.loads(stored.metadata()["sizes"])
    network = InferenceNetwork(**sizes)
    network.load_state_dict(load_file(file))
    return network.eval()


def with_end_token(actions: Tensor, lengths: Tensor) -> Tensor:
    """Append the end token, GEN and COMP, to trees over words [B, ..., A], `lengths` [B]: [B, ..., A + 2]."""
    place = (2 * lengths - 1).view(-1, *[1] * (actions.dim() - 1)).expand(*actions.shape[:-1], 1)
    padded = F.pad(actions, (0, 2), value=PAD_ACTION).scatter(-1, place, GEN)
    return padded.scatter(-1, place + 1, COMP)


class Sampled(NamedTuple):
    """Sampled trees of sentences with their probabilities."""

    loss: Tensor
    """- mean over sentences and trees of log p(x | z) + w log p(z), with gradients for the model."""
    words: Tensor
    """[B, K] log p(x | z)."""
    actions: Tensor
    """[B, K] log p(z)."""
    network: Tensor
    """[B, K] log q(z | x), with gradients for the network."""


def read_trees(model: Any, network: InferenceNetwork, batch: dict[str, Any], temperature: float = 1.0) -> BinaryTreeCRF:
    """The network's distribution over trees of the words, the end token left out.

    `batch` has `input_ids` and `attention_mask`, padded on the right, every row with an end token. For the temperature
    see `InferenceNetwork.forward`.
    """
    embedded = model.get_input_embeddings()(batch["input_ids"][:, :-1])
    return network(embedded, batch["attention_mask"].sum(1) - 1, temperature)


def sample_trees(
    model: nn.Module, crf: BinaryTreeCRF, batch: dict[str, Any], count: int, action_weight: float = 1.0
) -> Sampled:
    """Draw K = `count` trees of every sentence and score them with the model: the cost of B K sentences."""
    trees = crf.sample(count)
    actions = with_end_token(tree_actions(trees), crf.lengths).flatten(0, 1)
    ids, mask = (batch[name].repeat_interleave(count, 0) for name in ("input_ids", "attention_mask"))
    output = model(input_ids=ids, attention_mask=mask, actions=actions, action_weight=action_weight)
    taken = output.action_logits.gather(2, actions.clamp(min=0)[..., None]).squeeze(2)
    in_actions = taken.masked_fill(actions == PAD_ACTION, 0.0).sum(1)
    in_words = output.joint_log_prob - in_actions
    shape = (-1, count)
    return Sampled(output.loss, in_words.view(shape), in_actions.view(shape), crf.log_prob(trees))


def variational_loss(
    model: nn.Module, plain: Any, batch: dict[str, Any], count: int, weight: float, train_network: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the evidence lower bound, a mean over sentences; K = `count` trees of each, w = `weight`.

    `plain` is the model without its wrapper, `batch` as for `read_trees`, with `loss_shares`. The network gets
    gradients only with `train_network`. Returns the loss, and detached means over sentences: `word_nats`,
    `action_nats`, `entropy`, `network_nats` and `tokens`.
    """
    crf = read_trees(plain, plain.inference_network, batch)
    sampled = sample_trees(model, crf, batch, count, weight)
    entropy, loss = crf.entropy(), sampled.loss
    if train_network:
        value = sampled.words + weight * sampled.actions
        baseline = (value.sum(1, keepdim=True) - value) / max(count - 1, 1)
        loss = loss - (weight * entropy + ((value - baseline) * sampled.network).mean(1)).mean()
    else:
        # Distributed training waits for a gradient of every parameter.
        loss = loss + 0.0 * entropy.sum()
    return _shared(loss, batch, -sampled.words.mean(), -sampled.actions.mean(), entropy.mean(), -sampled.network.mean())


def supervised_loss(model: nn.Module, plain: Any, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of given trees, for the model and the network: - log p(x, z) - log q(z | x), a mean over sentences.

    Arguments and results are those of `variational_loss`; `batch` also has `actions` [B, A] of the trees and
    those of the words, `trees` [B, N, N].
    """
    crf = read_trees(plain, plain.inference_network, batch)
    output = model(**{name: batch[name] for name in ("input_ids", "attention_mask", "actions")})
    network = crf.log_prob(batch["trees"][:, None]).mean()
    losses = output.losses
    return _shared(output.loss - network, batch, losses["word"], losses["action"], crf.entropy().mean(), -network)


def _shared(
    loss: Tensor, batch: dict[str, Any], words: Tensor, actions: Tensor, entropy: Tensor, network: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of a step that a micro batch has, of the loss and of its parts."""
    share = share_of(batch.get("loss_shares"), "word")
    tokens = batch["attention_mask"].sum(1).float().mean()
    parts = {"word_nats": words, "action_nats": actions, "entropy": entropy, "network_nats": network, "tokens": tokens}
    return loss * share, {name: value.detach() * share for name, value in parts.items()}


class Bounds(NamedTuple):
    """Estimates of log p(x) of sentences, each [B]."""

    evidence: Tensor
    """The evidence lower bound."""
    importance: Tensor
    """log mean_k p(x, z_k) / q(z_k | x): a tighter bound, on the average."""


@torch.no_grad()
def estimate(
    model: Any, network: InferenceNetwork, batch: dict[str, Any], count: int, temperature: float = 1.0
) -> Bounds:
    """Estimate the probability of sentences, trees summed out, from K = `count` trees of each.

    Model and network are in evaluation mode. The authors take temperature 2 with 1,000 trees, so that all trees are
    drawn.
    """
    crf = read_trees(model, network, batch, temperature)
    per_pass = max(1, _ROWS // len(crf.lengths))
    passes = [sample_trees(model, crf, batch, min(per_pass, count - k), 1.0) for k in range(0, count, per_pass)]
    joint, proposed = (
        torch.cat(parts, 1) for parts in ([x.words + x.actions for x in passes], [x.network for x in passes])
    )
    weights = (joint - proposed).double()
    return Bounds(joint.double().mean(1) + crf.entropy(), weights.logsumexp(1) - math.log(count))
