"""`generate` of GPST: the authors' beams, exact distributions, and everything users of transformers expect."""

import math

import pytest
import torch

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.search.state import SyntacticCache
from hf_synlm.trees.binary import actions_to_spans
from tests.helpers.search_models import actions_of, assert_fits, ending_model, generate, gpst
from tests.models.gpst.test_modeling_gpst import TINY
from tests.reference import exhaustive_search as reference
from tests.search.test_search_words import golden  # noqa: F401

EOS = 1


@pytest.fixture
def model() -> GPSTForCausalLM:
    """A tiny model."""
    return gpst()


def prompt_log_prob(model: GPSTForCausalLM, prompt: list[int]) -> float:
    """Exact log p(prompt)."""
    return reference.log_sum_exp(
        [reference.log_prob(model, prompt, actions) for actions in reference.prefix_derivations(len(prompt))]
    )


# ---------------------------------------------------------------------------------------------------------- joint beams
def test_goldens(golden: tuple[GPSTForCausalLM, dict]) -> None:  # noqa: F811
    """Beam search after a context equals the authors' word by word."""
    model, meta = golden
    for case in meta["generation"]:
        ids = [token for sentence in case["prefix_sentences"] for token in sentence]
        context = [number for number, sentence in enumerate(case["prefix_sentences"], 1) for _ in sentence]
        output = generate(
            model,
            [ids],
            context_sentence_ids=torch.tensor([context]),
            num_beams=case["beam_size"],
            num_return_sequences=case["beam_size"],
            max_new_tokens=case["max_steps"],
            **({"length_penalty": 0.0} if case["beam_size"] > 1 else {}),
        )
        for row, expected in enumerate(case["hypotheses"]):
            assert output.sequences[row, len(ids) :].tolist() == expected["token_ids"]
            assert "".join("SR"[a] for a in actions_of(output, row)) == expected["actions"]
            assert float(output.sequences_scores[row]) == pytest.approx(expected["log_prob"], abs=1e-4)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_scores_are_joint_given_the_prompt(model: GPSTForCausalLM, num_beams: int) -> None:
    """Rescoring without caches gives log p(prompt, words, tree) - log p(prompt); trees are complete."""
    prompt = [9, 12, 30]
    penalty = {"length_penalty": 1.0} if num_beams > 1 else {}
    output = generate(
        model, [prompt], num_beams=num_beams, num_return_sequences=num_beams, action_beam_size=32, **penalty
    )
    for row in range(num_beams):
        tokens, actions = output.sequences[row].tolist(), actions_of(output, row)
        assert len(actions) == 2 * len(tokens) - 1 and len(output.spans[row]) == len(tokens) - 1
        joint = reference.log_prob(model, tokens, actions) - prompt_log_prob(model, prompt)
        expected = joint / 5 if num_beams > 1 else joint
        assert float(output.sequences_scores[row]) == pytest.approx(expected, abs=1e-4)
    assert (output.sequences_scores.diff() <= 0).all()
    forest = generate(model, [prompt], num_beams=num_beams, action_beam_size=32, close_tree=False, **penalty)
    assert reference.stack_depth(actions_of(forest, 0)) >= 1
    assert actions_of(forest, 0)[-1] == 0


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
    expected = best[0] - prompt_log_prob(model, prompt)
    assert float(output.sequences_scores[0]) == pytest.approx(expected, abs=1e-4)


def test_end_token_only_on_one_tree() -> None:
    """Sequences that end have one complete tree without the end token, and rescore; greedy, beam and sampling."""
    model, prompt, ended = ending_model("gpst"), [9, 12], 0
    for options in ({}, {"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_return_sequences": 20}):
        output = generate(model, [prompt], eos_token_id=EOS, action_beam_size=16, max_new_tokens=8, **options)
        for row, sequence in enumerate(output.sequences.tolist()):
            actions = actions_of(output, row)
            assert reference.stack_depth(actions) == 1
            if EOS in sequence:
                ended += 1
                stop = sequence.index(EOS)
                assert actions.count(0) == stop and set(sequence[stop + 1 :]) <= {0}
                tokens = sequence[: stop + 1]
                joint = reference.log_prob(model, tokens, (*actions, 0)) - prompt_log_prob(model, prompt)
                length = stop + 1 - len(prompt) if "num_beams" in options else 1
                assert float(output.sequences_scores[row]) == pytest.approx(joint / length, abs=1e-4)
    assert ended > 4


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
    probabilities = torch.tensor([weights[actions] for actions in order]).softmax(0)
    assert_fits(counts, probabilities)
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


def test_drawing_is_defined_when_rows_are_over(model: GPSTForCausalLM) -> None:
    """Rows without hypotheses do not disturb the others."""
    search = model.word_search(1)
    state = search.begin(2, torch.device("cpu"))
    state.scores[0] = -math.inf
    with torch.no_grad():
        chosen, words = search.draw_word(state, None)
    assert chosen.scores[0] == -math.inf and torch.isfinite(chosen.scores[1]) and torch.isfinite(words[1]).all()


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("seed", range(8))
def test_scores_of_mixed_beams_are_those_of_the_given_trees(seed, synchronous):
    """Ended and running hypotheses of different depths side by side, rescored without search and caches."""
    torch.manual_seed(seed)
    special = {"bos_token_id": 3, "reduce_token_id": 2, "pad_token_id": 0, "cls_token_id": None, "sep_token_id": None}
    model = GPSTForCausalLM(GPSTConfig(**{**TINY, "vocab_size": 12, **special})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
        state = torch.randn(200, model.config.hidden_size)
        direction = model.heads.token(state).mean(0)
        model.lm_head.weight[1] += (0.5 + seed % 3 * 0.5) * direction / direction.norm()  # likely end tokens
    prompt = torch.tensor([[5, 7]]) if seed % 2 else torch.tensor([[5]])
    output = model.generate(
        prompt,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=2 + seed // 4,
        eos_token_id=1,
        action_beam_size=64,
        length_penalty=0.0,
        return_dict_in_generate=True,
        synchronous=synchronous,
    )
    begin = _prompt_log_prob(model, prompt, synchronous)
    for row, score in enumerate(output.sequences_scores.tolist()):
        words = output.sequences[row].tolist()
        if score == -math.inf or 1 in words:
            continue
        actions = [a for a in output.actions[row].tolist() if a >= 0]
        expected = _rescore(model, words, actions, renormalize=not synchronous) - begin
        assert score == pytest.approx(expected, abs=1e-4), (words, actions)


def _rescore(model, words, actions, renormalize):
    """log p(words, tree) from one pass over the given tree; `renormalize` forbids COMP before the softmax."""
    spans = actions_to_spans(actions)
    with torch.no_grad():
        given = model(torch.tensor([words]), attention_mask=torch.ones(1, len(words)), spans=[spans])
    tokens = given.token_logits_given_tree.log_softmax(-1)[0, torch.arange(len(words)), torch.tensor(words)].sum()
    log_prob, depth = given.action_logits[0].log_softmax(-1), 0
    total = float(tokens)
    for slot, action in enumerate(actions):
        if not (renormalize and depth < 2):
            total += float(log_prob[slot, action])
        depth += 1 if action == 0 else -1
    return total


def _prompt_log_prob(model, prompt, synchronous):
    """log p(prompt) summed over all its derivations up to the last word."""
    words = prompt[0].tolist()
    if len(words) == 1:
        return _rescore(model, words, [0], renormalize=not synchronous)
    with torch.no_grad():  # the last action closes the tree; before it, the prompt has one derivation
        closing = model(prompt, spans=[[(0, 2)]]).action_logits[0, 2].log_softmax(-1)[1]
    return _rescore(model, words, [0, 0, 1], renormalize=not synchronous) - float(closing)
