"""The distribution over binary trees against a list of all trees, and the network against the authors' program."""

import pytest
import torch

from hf_synlm.training.tasks.inference_network import BinaryTreeCRF, InferenceNetwork, tree_actions
from hf_synlm.trees.actions import spans_to_actions
from tests.helpers.goldens import read_case, read_tensors
from tests.helpers.refusals import refused
from tests.reference.trees import all_binary_trees, spans_of

CASES = ("01_one_layer", "02_two_layers", "03_temperature")


def all_trees(length: int) -> list[set[tuple[int, int]]]:
    """Spans, the last word included, and those of single words, of every binary tree."""
    words = {(word, word) for word in range(length)}
    return [words | {(i, j - 1) for i, j in spans_of(tree)} for tree in all_binary_trees(0, length)]


def table(spans: set[tuple[int, int]], size: int) -> torch.Tensor:
    result = torch.zeros(size, size, dtype=torch.bool)
    result[tuple(zip(*spans, strict=True))] = True
    return result


LENGTHS = torch.tensor([7, 1, 4, 2])


@pytest.fixture
def scores() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 7, 7, dtype=torch.float64).requires_grad_()


def test_crf_is_the_sum_over_all_trees(scores: torch.Tensor) -> None:
    crf, best, entropy = BinaryTreeCRF(scores, LENGTHS), None, []
    log_partition, argmax = crf.log_partition, crf.argmax()
    for row, length in enumerate(LENGTHS.tolist()):
        spans = all_trees(length)
        trees = torch.stack([table(tree, 7) for tree in spans])
        totals = (trees * scores[row]).sum((1, 2))
        log_probs = totals.log_softmax(0)
        entropy.append(-(log_probs.exp() * log_probs).sum())
        assert log_partition[row].item() == pytest.approx(totals.logsumexp(0).item(), abs=1e-10)
        torch.testing.assert_close(crf.log_prob(trees.expand(4, -1, -1, -1))[row], log_probs)
        best = spans[int(totals.argmax())]
        assert torch.equal(argmax[row], table(best, 7))
        actions = spans_to_actions([(i, j + 1) for i, j in best if j > i], length)
        assert tree_actions(argmax)[row].tolist() == actions + [-1] * (13 - len(actions))
    torch.testing.assert_close(crf.entropy(), torch.stack(entropy))
    found = torch.autograd.grad(crf.entropy().sum() + (crf.log_partition * 2).sum(), scores, retain_graph=True)[0]
    expected = torch.autograd.grad(sum(entropy), scores)[0]
    for row, length in enumerate(LENGTHS.tolist()):
        trees = torch.stack([table(tree, 7) for tree in all_trees(length)])
        probs = (trees * scores[row]).sum((1, 2)).softmax(0)
        expected[row] += 2 * (probs[:, None, None] * trees).sum(0)  # probabilities of spans
    torch.testing.assert_close(found, expected)


def test_trees_are_drawn_with_their_probability(scores: torch.Tensor) -> None:
    crf = BinaryTreeCRF(scores, LENGTHS)
    drawn = crf.sample(40_000)
    # The mean of - log p is the entropy; its error is a few of 1 / sqrt(40,000).
    torch.testing.assert_close(-crf.log_prob(drawn).mean(1), crf.entropy(), atol=0.02, rtol=0)
    for row, length in enumerate(LENGTHS.tolist()):
        trees, counts = drawn[row].flatten(1).unique(dim=0, return_counts=True)
        probs = crf.log_prob(trees.view(1, -1, 7, 7).expand(4, -1, -1, -1))[row].exp()
        assert trees.sum(1).tolist() == [2 * length - 1] * len(trees)
        torch.testing.assert_close(counts / 40_000.0, probs.detach().float(), atol=0.01, rtol=0)


# ---------------------------------------------------------------------------------------------- authors' program
def load_network(case: str) -> tuple[InferenceNetwork, dict[str, torch.Tensor], dict]:
    """The network of a case, all weights, and its `meta.json`."""
    state, _, meta = read_case(f"urnng/{case}")
    network = InferenceNetwork(meta["w_dim"], meta["q_dim"], meta["max_len"] - 2, 0.0)
    network.load_state_dict({name: state[theirs] for name, theirs in network_names(network).items()} | {
        "boundaries": state["emb.weight"][[meta["ids"]["q_left_boundary"], meta["ids"]["q_right_boundary"]]]
    })  # fmt: skip
    return network, state, meta


def network_names(network: InferenceNetwork) -> dict[str, str]:
    """Our name of each weight -> the authors'; they have no `boundaries`."""
    theirs = {"lstm": "q_leaf_rnn", "positions": "q_pos_emb", "hidden": "q_binary.0", "norm": "q_binary.2"}
    theirs["output"] = "q_binary.4"
    parts = [name.partition(".") for name, _ in network.named_parameters() if name != "boundaries"]
    return {f"{module}.{rest}": f"{theirs[module]}.{rest}" for module, _, rest in parts}


@pytest.mark.parametrize("case", CASES)
def test_network_is_that_of_the_authors(case: str) -> None:
    network, state, meta = load_network(case)
    io = read_tensors(f"urnng/{case}", "io")
    for batch in meta["batches"]:
        gold = {name.removeprefix(batch["prefix"]): value for name, value in io.items() if batch["prefix"] in name}
        words = gold["sents"][:, 1:-1]
        lengths = torch.full((len(words),), words.shape[1])
        # Padding and company change nothing.
        embedded = torch.nn.functional.pad(state["emb.weight"][words], (0, 0, 0, 1), value=3.0)
        crf = network(embedded, lengths, meta["temperature_of_q"])
        n = batch["words"]
        for i in range(n):
            found = crf.scores[:, i, i:n] * meta["temperature_of_q"]
            torch.testing.assert_close(found, gold["q/scores"][:, i, i:], atol=1e-5, rtol=1e-5)


def test_too_long_sentences_are_refused() -> None:
    refused("4 words.* 3", InferenceNetwork(4, 3, 3, 0.0), torch.zeros(1, 4, 4), torch.tensor([4]))
