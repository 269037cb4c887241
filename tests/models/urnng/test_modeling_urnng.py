"""URNNG: probabilities of given trees, search, and the numbers of the authors' program."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm import URNNGConfig, URNNGForCausalLM
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.trees.actions import COMP, GEN
from tests.helpers.goldens import read_tensors
from tests.helpers.refusals import refused
from tests.reference.trees import actions_of, all_binary_trees
from tests.training.test_inference_network import CASES, load_network

BOS = 2


def tiny(cls: Any = URNNGForCausalLM, **changes: Any) -> Any:
    """A model with random weights, in evaluation mode."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 6, "num_layers": 2, "initializer_range": 0.9, "scoring_num_beams": 50}
    return cls(URNNGConfig(**{**sizes, **changes})).eval()


def batch() -> dict[str, Tensor]:
    """Sentences of equal length with their trees."""
    torch.manual_seed(0)
    return {"input_ids": torch.randint(3, 11, (3, 4)), "actions": all_derivations(4)[:3]}


def authors_model(case: str) -> tuple[URNNGForCausalLM, dict[str, Tensor], dict[str, Tensor], dict]:
    """The model of a case, all weights of the authors, the tensors of the case, and its `meta.json`."""
    _, state, meta = load_network(case)
    config = URNNGConfig(
        vocab_size=meta["vocab"], hidden_size=meta["h_dim"], num_layers=meta["num_layers"], bos_token_id=2,
        eos_token_id=3, dropout=0.0,
    )  # fmt: skip
    model = URNNGForCausalLM(config)
    model.load_state_dict(from_authors(state, config), strict=True)
    return model, state, read_tensors(f"urnng/{case}", "io"), meta


# Our weights -> the authors', but for the stack LSTM, whose gates and matrices are laid out in another way.
AUTHORS_NAMES = {
    "model.embed_tokens.weight": "emb.weight",
    "model.composition.gates.weight": "tree_rnn.linear.weight",
    "model.composition.gates.bias": "tree_rnn.linear.bias",
    "action_head.weight": "action_mlp_p.1.weight",
    "action_head.bias": "action_mlp_p.1.bias",
    "lm_head.weight": "vocab_mlp.1.weight",
    "lm_head.bias": "vocab_mlp.1.bias",
}


def from_authors(state: dict[str, Tensor], config: URNNGConfig) -> dict[str, Tensor]:
    """Weights under our names."""
    ours = {name: state[theirs] for name, theirs in AUTHORS_NAMES.items()}
    for number in range(config.num_layers):
        name = f"stack_rnn.linears.{number}."
        i, f, o, g = torch.cat([state[f"{name}weight"], state[f"{name}bias"][:, None]], 1).chunk(4)
        rows = torch.cat([i, f, g, o])
        size = config.hidden_size
        ours[f"model.stack_lstm.from_input.{number}.weight"] = rows[:, :size]
        ours[f"model.stack_lstm.from_below.{number}.weight"] = rows[:, size:-1]
        ours[f"model.stack_lstm.from_input.{number}.bias"] = rows[:, -1]
    return {name: value.clone() for name, value in ours.items()}


@pytest.mark.parametrize("case", CASES)
def test_probabilities_are_those_of_the_authors(case: str) -> None:
    model, _, io, meta = authors_model(case)
    for batch in meta["batches"]:
        gold = {name.removeprefix(batch["prefix"]): value for name, value in io.items() if batch["prefix"] in name}
        trees = gold["trees/actions"].long().flatten(0, 1)
        words = gold["sents"][:, 1:].repeat_interleave(gold["trees/actions"].shape[1], 0)
        output = model(words, actions=trees, action_weight=0.25)
        own = F.logsigmoid(torch.stack([-gold["p/reduce_logit"], gold["p/reduce_logit"]], -1)).flatten(0, 1)
        free = gold["p/action_mask"].flatten(0, 1).bool()
        torch.testing.assert_close(output.action_logits[free], own[free], atol=1e-5, rtol=1e-5)
        in_words, in_actions = gold["p/log_prob_words"].flatten(), gold["p/log_prob_actions"].flatten()
        torch.testing.assert_close(output.joint_log_prob, in_words + in_actions, atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(output.loss, -(in_words + 0.25 * in_actions).mean(), atol=2e-5, rtol=1e-5)
        contexts = model.model(words, trees).action_hidden_state
        torch.testing.assert_close(contexts, gold["p/contexts"].flatten(0, 1), atol=1e-5, rtol=1e-5)
        # Left and right padding; without the end token.
        ids = F.pad(gold["sents"][:, 1:-1], (1, 2))
        given = model(ids, actions=F.pad(gold["given/actions"].long(), (0, 3), value=-1))
        expected = gold["given_no_eos/log_prob_words"] + gold["given_no_eos/log_prob_actions"]
        torch.testing.assert_close(given.joint_log_prob, expected, atol=2e-5, rtol=1e-5)


def all_derivations(num_tokens: int) -> Tensor:
    """Actions [trees, A] of every binary tree."""
    return torch.tensor([actions_of(tree) for tree in all_binary_trees(0, num_tokens)])


def test_search_finds_the_sum_over_all_trees() -> None:
    model, words = tiny(eos_token_id=None), torch.tensor([[3, 4, 3, 7, 5]])
    trees = all_derivations(5)
    joint = model(words.expand(len(trees), -1), actions=trees).joint_log_prob
    output = model.parse(F.pad(words, (0, 1)), num_return_sequences=14, stepwise=True)
    torch.testing.assert_close(output.text_log_probs[0], joint.logsumexp(0))
    torch.testing.assert_close(output.log_probs[0], joint.sort(descending=True).values)
    torch.testing.assert_close(output.actions[0], trees[joint.argsort(descending=True)])
    # Prefix probabilities, and next words with all stacks summed out.
    logits = model(words).logits
    torch.testing.assert_close(logits.logsumexp(2), torch.zeros(1, 5), atol=1e-5, rtol=0)
    torch.testing.assert_close(output.stepwise_log_probs[0, 1:5], logits[0, :4].gather(1, words[0, 1:, None])[:, 0])
    torch.testing.assert_close(output.stepwise_log_probs[:, :5], output.token_log_probs[:, :5])
    # A sentence of one word has one tree, in which nothing is chosen.
    one = model(words[:, :1], actions=torch.tensor([[GEN]]))
    torch.testing.assert_close(one.joint_log_prob, output.token_log_probs[:, 0])


@pytest.mark.parametrize("ends", [[True, False, True], [True, False, True, False, True]])
def test_pieces_of_words_change_no_probability(ends: list[bool]) -> None:
    """Trees that keep words whole have the probability that `forward` gives them."""
    model, ids = tiny(eos_token_id=None), torch.tensor([[4, 5, 3, 6, 7][: len(ends)]])
    found = model.parse(ids, word_ends=torch.tensor([ends]), num_return_sequences=2)
    trees = found.actions[0][: len(found.spans[0])]
    joint = model(ids.expand(len(trees), -1), actions=trees).joint_log_prob
    torch.testing.assert_close(found.log_probs[0, : len(trees)], joint, atol=1e-5, rtol=0)


def test_the_end_token_is_the_right_part_of_the_whole_tree() -> None:
    """In the sum over trees, in next words, and in the scores of texts that `generate` ends."""
    model, words, end = tiny(), torch.tensor([[3, 4, 3, 7]]), 2

    def joint(ids: Tensor, trees: Tensor) -> Tensor:
        ids, trees = F.pad(ids, (0, 1), value=end), torch.cat([trees, torch.tensor([[GEN, COMP]] * len(trees))], 1)
        return model(ids.expand(len(trees), -1), actions=trees).joint_log_prob

    expected = joint(words, all_derivations(4)).logsumexp(0)
    found = model.parse(F.pad(words, (0, 1), value=end), stepwise=True)
    torch.testing.assert_close(found.text_log_probs[0], expected)
    # Before COMP: the whole trees, then the end token.
    closed, of_words = found.token_log_probs.sum(), model.parse(words).text_log_probs[0]
    assert closed > expected and closed < of_words
    # The distribution shares out what an end inside a tree would have.
    longer = torch.cat([words.expand(11, -1), torch.arange(11)[:, None]], 1)
    prefix = model.parse(words).token_log_probs.sum()
    next_words = torch.stack([model.parse(row[None]).token_log_probs.sum() for row in longer[1:]]) - prefix
    padding = model.model.config.pad_token_id
    logits = model(words).logits[0, -1]
    kept = torch.cat([logits[:padding], logits[padding + 1 :]])
    torch.testing.assert_close(kept.log_softmax(0), next_words.log_softmax(0), atol=1e-5, rtol=0)
    prompt, start = words[:, :2], model.parse(words[:, :2]).token_log_probs.sum()
    for options in ({"num_beams": 20, "length_penalty": 0.0}, {"do_sample": True}):
        torch.manual_seed(1)
        more = {"num_return_sequences": 20, "max_new_tokens": 3, "return_dict_in_generate": True, **options}
        out = model.generate(prompt, eos_token_id=end, **more)
        ended = [row for row, ids in enumerate(out.sequences.tolist()) if end in ids]
        assert ended
        for row in ended:
            ids = out.sequences[row][: out.sequences[row].tolist().index(end)]
            actions = out.actions[row][out.actions[row] >= 0]
            torch.testing.assert_close(out.sequences_scores[row], joint(ids[None], actions[None])[0] - start)


WRONG_ARGUMENTS = [
    ({"actions": torch.tensor([[0, 1, 0]])}, "COMP.*action 1"),
    ({"actions": torch.tensor([[0, 0, -1]])}, "one tree"),
    ({"actions": torch.tensor([[0, 0, 1, 0, 1]])}, "one tree"),
    ({"actions": torch.tensor([[0, -1, 0, 1]])}, "padding .-1."),
    ({"actions": torch.tensor([[0, 0, 1, -2]])}, "-2"),
    ({"actions": torch.tensor([[0, 0, 2]])}, "GEN is 0, COMP is 1"),
    ({"actions": torch.tensor([[0.0, 0.0, 1.0]])}, "integers"),
    ({"attention_mask": torch.tensor([[1, 0, 1]]), "actions": torch.tensor([[0, 0, 1]])}, "holes"),
    ({"action_weight": 0.5}, "action_weight"),
    ({"loss_shares": {"word": 0.5}}, "loss_shares"),
]


@pytest.mark.parametrize(("arguments", "message"), WRONG_ARGUMENTS)
def test_wrong_arguments_are_refused(arguments: dict[str, Any], message: str) -> None:
    ids = torch.tensor([[3, 4, 4] if "attention_mask" in arguments else [3, 4]])
    refused(message, tiny(), ids, **arguments)


def test_dropout_acts_at_words_between_layers_and_before_heads() -> None:
    model = tiny(num_layers=2)
    inputs = {"input_ids": torch.tensor([[3, 4]]), "actions": torch.tensor([[GEN, GEN, COMP]])}
    expected = model(**inputs).joint_log_prob
    model.model.stack_lstm.dropout = 0.5
    model.model.stack_lstm.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(**inputs).joint_log_prob, expected)
    model.eval()
    places: list[tuple[int, ...]] = []
    model.model.dropout.register_forward_hook(lambda _, given, result: places.append(tuple(given[0].shape)))
    model(**inputs)
    words_with_begin, pushes = 3, 4  # begin token, two words, their constituent
    assert places == [(words_with_begin, model.config.hidden_size), (pushes, model.config.hidden_size)]


def test_no_action_is_certain() -> None:
    """The authors keep probabilities above 1e-7."""
    model = tiny()
    model.action_head.bias.data.fill_(100.0)
    for hidden in (torch.zeros(6), torch.zeros(6, dtype=torch.bfloat16)):
        found = model.to(hidden.dtype).action_log_probs(hidden)
        assert found.exp().tolist() == pytest.approx([1e-7, 1 - 1e-7], rel=1e-5)


def test_the_compiled_lstm_gives_the_same() -> None:
    found = []
    for options in (None, {"backend": lambda graph, inputs: graph}):
        model = tiny().train()
        assert Recipe.layers_to_compile(None, model) == [model.model.stack_lstm]
        model.model.stack_lstm.compile_options = options
        torch.manual_seed(1)
        loss = model(**batch()).loss
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
