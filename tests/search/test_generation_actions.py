"""`generate(..., synchronous=False)`: the beam over single actions."""

import itertools
import math
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList

from hf_synlm import GPSTForCausalLM
from tests.helpers.search_models import actions_of, assert_fits, generate, gpst, padded
from tests.models.gpst.test_generation_gpst import EOS, prompt_log_prob
from tests.reference import exhaustive_search as reference


@pytest.fixture
def model() -> GPSTForCausalLM:
    """A tiny model."""
    return gpst()


def generate_by_actions(model: GPSTForCausalLM, ids: Any, **kwargs: Any) -> Any:
    """Generate over single actions; the length is not penalized and beams do not stop early."""
    if kwargs.get("num_beams", 1) > 1:
        kwargs = {"length_penalty": 0.0, "early_stopping": "never", **kwargs}
    return generate(model, ids, synchronous=False, **kwargs)


def rescored(model: GPSTForCausalLM, tokens: list[int], actions: tuple[int, ...], prompt: list[int]) -> float:
    """Exact log p(new words, derivation | prompt), renormalized."""
    return reference.log_prob(model, tokens, actions, renormalize=True) - prompt_log_prob(model, prompt, True)


# --------------------------------------------------------------------------------------------------------- beam search
@pytest.mark.parametrize(("prompt", "num_new"), [([], 3), ([3, 5, 3], 1), ([5, 4], 2)])
def test_wide_beam_finds_everything(prompt: list[int], num_new: int) -> None:
    """A beam wider than all derivations ranks all texts and trees; missing sequences are padding."""
    small = gpst(vocab_size=6)
    length = len(prompt) + num_new
    expected = {}
    for words in itertools.product(range(6), repeat=num_new):
        for actions in reference.complete_derivations(length):
            tokens = [*prompt, *words]
            expected[(*tokens,), actions] = rescored(small, tokens, actions, prompt)
    count = len(expected) + 5
    output = generate_by_actions(
        small, [[EOS, *prompt]], num_beams=count, num_return_sequences=count, max_new_tokens=num_new
    )
    found = {}
    for row in range(len(expected)):
        found[tuple(output.sequences[row, 1:].tolist()), actions_of(output, row)] = float(output.sequences_scores[row])
    assert found == pytest.approx(expected, abs=1e-4)
    assert (output.sequences_scores.diff()[: len(expected) - 1] <= 0).all()
    assert (output.sequences_scores[-5:] == -math.inf).all()
    # Where there are no more, the prompt stands alone.
    prompts = torch.tensor([EOS, *prompt, *[0] * num_new]).expand(5, -1)
    assert torch.equal(output.sequences[-5:], prompts)
    assert (output.actions[-5:] == -1).all() and output.spans[-1] == []


@pytest.mark.parametrize("num_beams", [1, 2, 5])
@pytest.mark.parametrize("eos", [None, 5])
@pytest.mark.parametrize("seed", [2, 6])
def test_beam_equals_its_specification(num_beams: int, eos: int | None, seed: int) -> None:
    """Selection step by step, from scratch: for num_beams=1 the best of V + 1 actions at every step."""
    small = gpst(gen_bias=-1.5, seed=seed, vocab_size=6)
    small.config.eos_token_id = eos
    expected = reference.action_beam(small, num_beams, 5, eos)
    output = generate_by_actions(
        small, [[EOS]], num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=5, eos_token_id=eos
    )
    for row, (score, tokens, actions) in enumerate(expected):
        assert output.sequences[row, 1 : 1 + len(tokens)].tolist() == tokens
        assert (output.sequences[row, 1 + len(tokens) :] == 0).all()
        assert actions_of(output, row) == actions
        assert float(output.sequences_scores[row]) == pytest.approx(score, abs=1e-4)
    if eos is None:
        synchronous = generate(small, [[EOS]], num_beams=num_beams, length_penalty=0.0 if num_beams > 1 else 1.0)
        same = torch.equal(output.sequences[:1], synchronous.sequences) and actions_of(synchronous, 0) == expected[0][2]
        assert same == (num_beams == 1)


def test_context_before_the_text(model: GPSTForCausalLM) -> None:
    """After complete sentences the stack is empty; padding does not matter."""
    ids, mask = padded([[9, 12, 30, 8], [21, 7]], left=True)
    context = mask * torch.tensor([1, 1, 2, 2])
    common = {"num_beams": 3, "max_new_tokens": 4}
    output = generate_by_actions(model, ids, attention_mask=mask, context_sentence_ids=context, **common)
    single = generate_by_actions(model, [[21, 7]], context_sentence_ids=torch.tensor([[2, 2]]), **common)
    assert torch.equal(output.sequences[1, 4:], single.sequences[0, 2:])
    assert float(output.sequences_scores[1]) == pytest.approx(float(single.sequences_scores[0]), abs=1e-4)
    assert [len(spans) for spans in output.spans] == [3, 3]


# ---------------------------------------------------------------------------------------- processors, criteria, streams
@pytest.mark.parametrize("num_beams", [1, 5])
def test_processors_see_the_history_of_every_hypothesis(model: GPSTForCausalLM, num_beams: int) -> None:
    """Scores are those of the model plus what the processor says about the words of the hypothesis itself."""
    rows = [[9, 12], [8]]
    ids, mask = padded(rows, left=True)
    table, lengths = torch.randn(11, 40), []

    def bias(ids: torch.Tensor) -> torch.Tensor:
        """What is added after histories [R, L]."""
        return table[(ids * torch.arange(1, ids.shape[1] + 1) ** 2).sum(1) % 11]

    def add_bias(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert ids.shape[0] == scores.shape[0] == 2 * num_beams
        lengths.append(ids.shape[1])
        return scores.add_(bias(ids))  # in place

    output = generate_by_actions(
        model, ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=num_beams, max_new_tokens=6,
        action_beam_size=8, logits_processor=LogitsProcessorList([add_bias]),
    )  # fmt: skip
    assert set(lengths) == set(range(2, 8)) and (num_beams == 1 or len(lengths) > 12)
    for row, sequence in enumerate(output.sequences):
        prompt = rows[row // num_beams]
        expected = rescored(model, prompt + sequence[2:].tolist(), actions_of(output, row), prompt)
        for end in range(2, 8):
            expected += float(bias(sequence[None, :end])[0, sequence[end]])
        assert float(output.sequences_scores[row]) == pytest.approx(expected, abs=1e-3)


# ------------------------------------------------------------------------------------------------------------- sampling
def test_sampling_follows_the_actions_one_by_one(model: GPSTForCausalLM) -> None:
    """Derivations and words of ancestral sampling have their exact renormalized probabilities."""
    prompt = [9, 12]
    output = generate_by_actions(
        model, [prompt], do_sample=True, top_k=0, num_return_sequences=3000, max_new_tokens=1, action_beam_size=8,
        close_tree=False,
    )  # fmt: skip
    probabilities, order = [], []
    for actions in reference.prefix_derivations(3):
        scores = [rescored(model, [*prompt, word], actions, prompt) for word in range(40)]
        probabilities += scores
        order += [(actions, word) for word in range(40)]
    probabilities = torch.tensor(probabilities).exp()
    assert float(probabilities.sum()) == pytest.approx(1.0, abs=1e-4)
    counts = torch.zeros(len(order))
    for row in range(3000):
        index = order.index((actions_of(output, row), int(output.sequences[row, -1])))
        counts[index] += 1
        assert float(output.sequences_scores[row].exp()) == pytest.approx(float(probabilities[index]), rel=1e-3)
    assert_fits(counts, probabilities)


def test_sampling_under_processors_is_scored_by_the_model(model: GPSTForCausalLM) -> None:
    """Warpers move no mass from words to COMP: the structure before the next word is as likely as without them."""
    prompt, warpers = [9, 12], {"top_k": 2, "temperature": 0.5}
    output = generate_by_actions(
        model, [prompt], do_sample=True, num_return_sequences=2000, max_new_tokens=1, action_beam_size=8,
        close_tree=False, **warpers,
    )  # fmt: skip
    composed = sum(actions_of(output, row) == (0, 0, 1, 0) for row in range(2000)) / 2000
    expected = float(reference.run(model, prompt, (0, 0))[0][-1, 1].exp())
    assert composed == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / 2000))
    for row in range(5):
        score = rescored(model, output.sequences[row].tolist(), actions_of(output, row), prompt)
        assert float(output.sequences_scores[row]) == pytest.approx(score, abs=1e-4)


def test_beam_sampling_draws_without_replacement(model: GPSTForCausalLM) -> None:
    """Two of three words: p(i, j) = p_i p_j / (1 - p_i) + p_j p_i / (1 - p_j)."""
    output = generate_by_actions(
        model, torch.full((2000, 1), EOS), do_sample=True, top_k=3, num_beams=2, num_return_sequences=2,
        max_new_tokens=1,
    )  # fmt: skip
    words = reference.run(model, [], ())[1][-1].topk(3)
    p = words.values.softmax(0)
    pairs = [(0, 1), (0, 2), (1, 2)]
    expected = torch.stack([p[i] * p[j] / (1 - p[i]) + p[j] * p[i] / (1 - p[j]) for i, j in pairs])
    drawn = [sorted(pair) for pair in output.sequences[:, 1].view(-1, 2).tolist()]
    counts = torch.tensor(
        [float(sum(pair == sorted(words.indices[[i, j]].tolist()) for pair in drawn)) for i, j in pairs]
    )
    assert counts.sum() == 2000
    assert_fits(counts, expected)
    assert (output.sequences_scores.view(-1, 2).diff() <= 0).all()
