"""`generate` of GPST: the authors' beams, exact distributions, and everything users of transformers expect."""

import math

import pytest
import torch

from hf_synlm import GPSTForCausalLM
from hf_synlm.search.state import SyntacticCache
from tests.helpers.search_models import actions_of, assert_fits, ending_model, generate, gpst, padded
from tests.reference import exhaustive_search as reference
from tests.search.test_synchronous import golden  # noqa: F401

EOS = 1


@pytest.fixture
def model() -> GPSTForCausalLM:
    """A tiny model."""
    return gpst()


def prompt_log_prob(model: GPSTForCausalLM, prompt: list[int], renormalize: bool = False) -> float:
    """Exact log p(prompt), with COMP renormalized where it is illegal or not."""
    derivations = reference.prefix_derivations(len(prompt))
    return reference.log_sum_exp([reference.log_prob(model, prompt, x, renormalize) for x in derivations])


# ---------------------------------------------------------------------------------------------------------- joint beams
def test_goldens(golden: tuple[GPSTForCausalLM, dict]) -> None:  # noqa: F811
    """Beam search after a context equals the authors' word by word."""
    model, meta = golden
    for case in meta["generation"]:
        ids = [token for sentence in case["prefix_sentences"] for token in sentence]
        context = [number for number, sentence in enumerate(case["prefix_sentences"], 1) for _ in sentence]
        options = dict.fromkeys(("num_beams", "num_return_sequences"), case["beam_size"])
        options |= {"length_penalty": 0.0} if case["beam_size"] > 1 else {}
        options |= {"context_sentence_ids": torch.tensor([context]), "max_new_tokens": case["max_steps"]}
        output = generate(model, [ids], **options)
        for row, expected in enumerate(case["hypotheses"]):
            assert output.sequences[row, len(ids) :].tolist() == expected["token_ids"]
            assert "".join("SR"[a] for a in actions_of(output, row)) == expected["actions"]
            assert float(output.sequences_scores[row]) == pytest.approx(expected["log_prob"], abs=1e-4)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("num_beams", [1, 4])
def test_scores_are_joint_given_the_prompt(model: GPSTForCausalLM, num_beams: int, synchronous: bool) -> None:
    """Rescoring without caches gives log p(prompt, words, tree) - log p(prompt); trees are complete or a forest."""
    rows = [[9, 12, 30], [21]]
    ids, mask = padded(rows, left=True)
    plain = {"length_penalty": 0.0} if num_beams > 1 else {}
    for options in (plain, {**plain, "close_tree": False}, {"length_penalty": 1.0} if plain else {"do_sample": True}):
        output = generate(
            model, ids, attention_mask=mask, num_beams=num_beams, num_return_sequences=num_beams,
            action_beam_size=32, max_new_tokens=7, synchronous=synchronous, **options,
        )  # fmt: skip
        assert output.sequences.shape == (2 * num_beams, 10)
        for row in range(2 * num_beams):
            prompt, actions = rows[row // num_beams], actions_of(output, row)
            tokens = prompt + output.sequences[row, 3:].tolist()
            joint = reference.log_prob(model, tokens, actions, not synchronous)
            expected = joint - prompt_log_prob(model, prompt, not synchronous)
            length = 7 if options.get("length_penalty") else 1
            assert float(output.sequences_scores[row]) == pytest.approx(expected / length, abs=1e-4)
            assert actions.count(0) == len(tokens) and len(output.spans[row]) == actions.count(1)
            assert actions[-1] == 0 if "close_tree" in options else reference.stack_depth(actions) == 1


ENDING = (
    {},
    {"num_beams": 4, "num_return_sequences": 4, "length_penalty": 0.0, "early_stopping": "never"},
    {"do_sample": True, "top_k": 0, "num_return_sequences": 20},
    {"do_sample": True, "top_k": 0, "num_return_sequences": 4, "num_beams": 4},
)


@pytest.mark.parametrize("synchronous", [True, False])
def test_end_token_only_on_one_tree(synchronous: bool) -> None:
    """Ended and running sequences have one complete tree without the end token, and rescore."""
    model, prompt, ended, running = ending_model("gpst"), [9, 12], 0, 0
    base = prompt_log_prob(model, prompt, not synchronous)
    for options in ENDING:
        output = generate(
            model, [prompt], eos_token_id=EOS, action_beam_size=16, max_new_tokens=8, synchronous=synchronous, **options
        )
        for row, tokens in enumerate(output.sequences.tolist()):
            actions = actions_of(output, row)
            assert reference.stack_depth(actions) == 1
            if EOS in tokens:
                stop = tokens.index(EOS)
                assert actions.count(0) == stop and set(tokens[stop + 1 :]) <= {0}
                tokens, actions = tokens[: stop + 1], (*actions, 0)
            ended, running = ended + (EOS in tokens), running + (EOS not in tokens)
            if options != ENDING[-1]:
                expected = reference.log_prob(model, tokens, actions, not synchronous) - base
                assert float(output.sequences_scores[row]) == pytest.approx(expected, abs=1e-4)
    assert ended > 4 and running > 0


def test_wide_beam_finds_the_best_words(model: GPSTForCausalLM) -> None:
    """Two more words: a very wide beam equals the enumeration of all words and derivations."""
    prompt, best = [9, 12], (-math.inf, None, None)
    for actions in reference.prefix_derivations(3):
        first = actions[: -1 - next(i for i, a in enumerate(reversed(actions[:-1])) if a == 0)]
        assert first
        base = reference.log_prob(model, [*prompt, 5], actions)
        _, words = reference.run(model, [*prompt, 5], actions[:-1])
        scores = base - float(words[-1, 5]) + words[-1]
        for token in range(40):
            closing = (1,) * (reference.stack_depth(actions) - 1)
            tokens = [*prompt, token]
            if float(scores[token]) > best[0]:
                best = max(best, (float(scores[token]), tokens, (*actions, *closing)), key=lambda x: x[0])
    output = generate(model, [prompt], num_beams=200, action_beam_size=8, max_new_tokens=1, close_tree=False)
    assert output.sequences[0].tolist() == best[1]
    assert float(output.sequences_scores[0]) == pytest.approx(best[0] - prompt_log_prob(model, prompt), abs=1e-4)


# ------------------------------------------------------------------------------------------------------------- sampling


@pytest.mark.parametrize("mode", ["joint", "marginal"])
def test_sampling_follows_the_exact_marginal(model: GPSTForCausalLM, mode: str) -> None:
    """Next words, drawn with their structure or from the marginal logits, are distributed as the enumeration says."""
    prompt = [9, 12, 30]
    output = generate(
        model, torch.tensor([prompt]).expand(3000, -1), do_sample=True, top_k=0, max_new_tokens=1,
        structure_mode=mode, action_beam_size=32,
    )  # fmt: skip
    counts = torch.bincount(output.sequences[:, -1], minlength=40)
    assert_fits(counts, reference.next_word_log_probs(model, prompt).exp())


def test_sampled_derivations_follow_their_posterior(model: GPSTForCausalLM) -> None:
    """Given the drawn word, the structure has its exact conditional distribution, and the scores are right."""
    prompt = [9, 12]
    output = generate(
        model, [prompt], do_sample=True, top_k=0, num_return_sequences=3000, max_new_tokens=1, action_beam_size=8,
        close_tree=False,
    )  # fmt: skip
    weights = {}
    for actions in reference.prefix_derivations(3):
        _, words = reference.run(model, [*prompt, 5], actions[:-1])
        weights[actions] = reference.log_prob(model, [*prompt, 5], actions) - float(words[-1, 5])
    order = list(weights)
    counts = torch.zeros(len(order))
    for row in range(3000):
        counts[order.index(actions_of(output, row))] += 1
    assert_fits(counts, torch.tensor([weights[actions] for actions in order]).softmax(0))
    for row in range(5):
        joint = reference.log_prob(model, output.sequences[row].tolist(), actions_of(output, row))
        expected = joint - prompt_log_prob(model, prompt)
        assert float(output.sequences_scores[row]) == pytest.approx(expected, abs=1e-4)


def test_scores_sum_out_the_structure(model: GPSTForCausalLM) -> None:
    """Per hypothesis, `scores` are log p(word | hypothesis) over all structural actions before the word."""
    output = generate(model, [[9, 12]], action_beam_size=1, output_scores=True, num_beams=1, max_new_tokens=1)
    start = (0, 0)
    expected = []
    for actions in (start, (*start, 1)):
        gens, words = reference.run(model, [9, 12], actions)
        base = reference.log_prob(model, [9, 12], actions) - reference.log_prob(model, [9, 12], start)
        expected.append(base + float(gens[-1, 0]) + words[-1])
    assert torch.allclose(output.scores[0][0], torch.stack(expected).logsumexp(0), atol=1e-4)


# ------------------------------------------------------------------------------------------------------- marginal mode


def test_marginal_mode_ends_only_complete_trees() -> None:
    """The end token has only the probability of derivations with one tree."""
    model = ending_model("gpst")
    cache = SyntacticCache(32, torch.tensor([EOS]))
    logits = model(torch.tensor([[9, 12, 30]]), past_key_values=cache).logits[0, -1]
    prompt, parts = [9, 12, 30], []
    for prefix in reference.prefix_derivations(3):
        for count in range(reference.stack_depth(prefix)):
            actions = (*prefix, *[1] * count)
            gens, words = reference.run(model, prompt, actions)
            row = reference.log_prob(model, prompt, actions) + float(gens[-1, 0]) + words[-1]
            row[EOS] = row[EOS] if reference.stack_depth(actions) == 1 else -math.inf
            parts.append(row)
    assert torch.allclose(logits, torch.stack(parts).logsumexp(0).log_softmax(-1), atol=1e-4)
    free = model(torch.tensor([[9, 12, 30]]), past_key_values=SyntacticCache(32)).logits[0, -1]
    assert free[EOS] > logits[EOS]
