"""`generate` of GPST: the authors' beams, exact distributions, and everything users of transformers expect."""

import inspect
import math
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    TextIteratorStreamer,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.actions import actions_to_spans
from hf_synlm.search_state import SyntacticCache
from tests.reference import exhaustive_search as reference
from tests.test_modeling_gpst import TINY
from tests.test_search_words import golden, make_model, padded  # noqa: F401

EOS = 1


@pytest.fixture
def model(tiny_gpst_config: Any) -> GPSTForCausalLM:
    """A tiny model."""
    return make_model(tiny_gpst_config)


@pytest.fixture
def ending_model(tiny_gpst_config: Any) -> GPSTForCausalLM:
    """A tiny model that likes to end: the begin token has an id of its own, the end token is 1."""
    tiny_gpst_config.bos_token_id = 3
    model = make_model(tiny_gpst_config)
    with torch.no_grad():
        states = torch.randn(200, 16)
        direction = model.heads.token(states).mean(0)
        model.lm_head.weight[EOS] += 1.5 * direction / direction.norm()
    return model


def generate(model: GPSTForCausalLM, ids: Any, **kwargs: Any) -> Any:
    """Generate with an output object; no end token unless one is given."""
    ids = torch.tensor(ids) if isinstance(ids, list) else ids
    options = {"eos_token_id": None, "max_new_tokens": 5, "return_dict_in_generate": True, **kwargs}
    return model.generate(ids, **options)


def actions_of(output: Any, row: int) -> tuple[int, ...]:
    """Actions of one sequence."""
    return tuple(a for a in output.actions[row].tolist() if a >= 0)


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


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("mode", ["joint", "marginal"])
def test_batch_equals_one_by_one(ending_model: GPSTForCausalLM, options: dict, mode: str) -> None:
    """Left-padded prompts of unequal lengths, with end tokens, equal single prompts."""
    rows = [[9, 12, 30, 8], [21], [3, 14, 15]]
    ids, mask = padded(rows, left=True)
    count = options.get("num_return_sequences", 1)
    common = {"structure_mode": mode, "eos_token_id": EOS, "max_new_tokens": 6, **options}
    output = generate(ending_model, ids, attention_mask=mask, **common)
    for row, prompt in enumerate(rows):
        single = generate(ending_model, [prompt], **common)
        for rank in range(count):
            new = output.sequences[row * count + rank, ids.shape[1] :].tolist()
            expected = single.sequences[rank, len(prompt) :].tolist()
            # The stock beam search pads with the end token where the padding id is 0.
            assert new[: len(expected)] == expected and set(new[len(expected) :]) <= {0, EOS}
            if mode == "joint":
                index = row * count + rank
                assert actions_of(output, index) == actions_of(single, rank)
                shift = ids.shape[1] - len(prompt)
                assert output.spans[index] == [(i + shift, j + shift) for i, j in single.spans[rank]]
                score = float(single.sequences_scores[rank])
                assert float(output.sequences_scores[index]) == pytest.approx(score, abs=1e-4)


def test_end_token_only_on_one_tree(ending_model: GPSTForCausalLM) -> None:
    """Sequences that end have one complete tree without the end token, and rescore; greedy, beam and sampling."""
    prompt, ended = [9, 12], 0
    for options in ({}, {"num_beams": 4, "num_return_sequences": 4}, {"do_sample": True, "num_return_sequences": 20}):
        output = generate(ending_model, [prompt], eos_token_id=EOS, action_beam_size=16, max_new_tokens=8, **options)
        for row, sequence in enumerate(output.sequences.tolist()):
            actions = actions_of(output, row)
            assert reference.stack_depth(actions) == 1
            if EOS in sequence:
                ended += 1
                stop = sequence.index(EOS)
                assert actions.count(0) == stop and set(sequence[stop + 1 :]) <= {0}
                tokens = sequence[: stop + 1]
                joint = reference.log_prob(ending_model, tokens, (*actions, 0)) - prompt_log_prob(ending_model, prompt)
                length = stop + 1 - len(prompt) if "num_beams" in options else 1
                assert float(output.sequences_scores[row]) == pytest.approx(joint / length, abs=1e-4)
    assert ended > 4


def test_early_stopping_and_length_penalty(ending_model: GPSTForCausalLM) -> None:
    """`early_stopping` stops at K finished sequences, "never" finds no worse ones; long texts can be favored."""
    common = {"eos_token_id": EOS, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 10}
    scores = {
        stop: generate(ending_model, [[9, 12]], early_stopping=stop, length_penalty=0.0, **common).sequences_scores
        for stop in (True, False, "never")
    }
    assert (scores["never"] >= scores[True] - 1e-5).all() and (scores[False] >= scores[True] - 1e-5).all()
    short = generate(ending_model, [[9, 12]], length_penalty=-5.0, **common).sequences
    long = generate(ending_model, [[9, 12]], length_penalty=5.0, early_stopping="never", **common).sequences
    assert (short[0] != 0).sum() <= (long[0] != 0).sum()


# ------------------------------------------------------------------------------------------------------------- sampling
def chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> tuple[float, int]:
    """Statistic and degrees of freedom, rare words taken together."""
    expected = counts.sum() * probabilities
    common = expected >= 5
    groups = [(counts[common], expected[common]), (counts[~common].sum()[None], expected[~common].sum()[None])]
    observed, wanted = (torch.cat([group[i].double() for group in groups]) for i in range(2))
    return float(((observed - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()), len(wanted) - 1


def test_sampling_follows_the_exact_marginal(model: GPSTForCausalLM) -> None:
    """Next words of joint sampling are distributed as the enumerated marginal."""
    prompt = [9, 12, 30]
    output = generate(
        model, [prompt], do_sample=True, top_k=0, num_return_sequences=4000, max_new_tokens=1, action_beam_size=32
    )
    counts = torch.bincount(output.sequences[:, -1], minlength=40)
    statistic, freedom = chi_square(counts, reference.next_word_log_probs(model, prompt).exp())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


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
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)
    for row in range(5):
        joint = reference.log_prob(model, output.sequences[row].tolist(), actions_of(output, row))
        expected = joint - prompt_log_prob(model, prompt)
        assert float(output.sequences_scores[row]) == pytest.approx(expected, abs=1e-4)


def test_marginal_sampling_follows_the_exact_marginal(model: GPSTForCausalLM) -> None:
    """The stock loop on the marginal logits draws from the same distribution."""
    prompt = torch.tensor([[9, 12, 30]]).expand(3000, -1)
    output = generate(
        model, prompt, do_sample=True, top_k=0, max_new_tokens=1, structure_mode="marginal", action_beam_size=8
    )
    counts = torch.bincount(output.sequences[:, -1], minlength=40)
    statistic, freedom = chi_square(counts, reference.next_word_log_probs(model, [9, 12, 30]).exp())
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


def test_beam_sampling_draws_from_the_beam(model: GPSTForCausalLM) -> None:
    """With num_beams=K, first words come in proportion to the K best candidates."""
    search = model.word_search(4)
    state = search.begin(1, torch.device("cpu"))
    with torch.no_grad():
        chosen, _, _ = search.propose_words(state, None)
    prompts = torch.full((1500, 1), EOS)
    output = generate(model, prompts, do_sample=True, top_k=0, num_beams=4, max_new_tokens=1)
    counts = torch.bincount(output.sequences[:, -1], minlength=40)
    probabilities = torch.zeros(40).scatter(0, chosen.tokens[0], chosen.scores[0].softmax(0))
    assert counts[probabilities == 0].sum() == 0
    statistic, freedom = chi_square(counts[chosen.tokens[0]], chosen.scores[0].softmax(0))
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 1e-3}])
def test_warpers_act_on_words(model: GPSTForCausalLM, options: dict) -> None:
    """Sharp warpers leave only the best word of the drawn structure."""
    search = model.word_search(1)
    state = search.begin(1, torch.device("cpu"))
    with torch.no_grad():
        best = search.next_token_log_probs(state).argmax()
    output = generate(model, [[EOS]], do_sample=True, max_new_tokens=1, num_return_sequences=20, **options)
    assert (output.sequences[:, -1] == best).all()


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("num_beams", [1, 3])
def test_sampling_repeats_under_a_seed(model: GPSTForCausalLM, num_beams: int, synchronous: bool) -> None:
    """The same seed gives the same words and trees, another seed others."""
    results = []
    options = {"do_sample": True, "top_k": 0, "num_beams": num_beams, "synchronous": synchronous}
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        output = generate(model, [[9, 12], [8, 7]], max_new_tokens=12, **options)
        results.append((output.sequences.tolist(), output.actions.tolist()))
    assert results[0] == results[1] != results[2]


# ------------------------------------------------------------------------------------ processors, criteria, streams
class Recorder(LogitsProcessor):
    """Remembers what it is called with, and forbids a word."""

    def __init__(self, forbidden: int) -> None:
        self.forbidden, self.shapes = forbidden, []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid the word."""
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        scores = scores.clone()
        scores[:, self.forbidden] = -math.inf
        return scores


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 2}])
def test_processors_see_words_of_every_hypothesis(model: GPSTForCausalLM, options: dict) -> None:
    """One row of words per hypothesis, and what they forbid is not generated."""
    plain = generate(model, [[9, 12], [8, 30]], **options)
    recorder = Recorder(int(plain.sequences[0, 2]))
    output = generate(model, [[9, 12], [8, 30]], logits_processor=LogitsProcessorList([recorder]), **options)
    assert not (output.sequences[:, 2:] == recorder.forbidden).any()
    rows = 2 * options.get("num_beams", 1)
    assert {shape[0][0] for shape in recorder.shapes} == {rows}
    assert {shape[0][1] for shape in recorder.shapes} == set(range(2, 7))
    assert {shape[1] for shape in recorder.shapes} == {(rows, 40)}


@pytest.mark.parametrize("num_beams", [1, 3])
def test_stock_options_apply(model: GPSTForCausalLM, num_beams: int) -> None:
    """n-gram blocking, bad words, allowed words per prompt, minimal length, and scores."""
    ids = [[9, 12], [8, 30]]
    output = generate(model, ids, num_beams=num_beams, no_repeat_ngram_size=1, max_new_tokens=8)
    assert all(len(set(row)) == len(row) for row in output.sequences.tolist())
    banned = generate(model, ids, num_beams=num_beams).sequences[0, 2].item()
    assert banned not in generate(model, ids, num_beams=num_beams, bad_words_ids=[[banned]]).sequences[:, 2:]
    allowed = generate(model, ids, num_beams=num_beams, prefix_allowed_tokens_fn=lambda row, _: [10 + row, 20 + row])
    assert set(allowed.sequences[0, 2:].tolist()) <= {10, 20} and set(allowed.sequences[1, 2:].tolist()) <= {11, 21}
    scored = generate(model, ids, num_beams=num_beams, output_scores=True)
    assert len(scored.scores) == 5 and all(step.shape == (2 * num_beams, 40) for step in scored.scores)


@pytest.mark.parametrize("num_beams", [1, 2])
def test_sampling_finds_the_allowed_words_of_every_prompt(model: GPSTForCausalLM, num_beams: int) -> None:
    """Rows keep their number, also where a prompt has more derivations than the beam."""
    rows = set()

    def allowed(row: int, _: torch.Tensor) -> list[int]:
        rows.add(row)
        return [10 + row, 20 + row]

    ids = [[9, 12, 13, 14], [8, 30, 5, 6]]
    output = generate(
        model, ids, do_sample=True, num_beams=num_beams, action_beam_size=10, prefix_allowed_tokens_fn=allowed
    )
    assert rows == {0, 1}
    assert set(output.sequences[0, 4:].tolist()) <= {10, 20} and set(output.sequences[1, 4:].tolist()) <= {11, 21}


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


class StopAfter(StoppingCriteria):
    """Stops a row that holds a word."""

    def __init__(self, word: int) -> None:
        self.word = word

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Whether the last word is the one."""
        return input_ids[:, -1] == self.word


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}])
def test_stopping_criteria(model: GPSTForCausalLM, options: dict, synchronous: bool) -> None:
    """A row stops at its word, its tree is closed, and the rest is padding."""
    options = {**options, "synchronous": synchronous}
    plain = generate(model, [[9, 12]], max_new_tokens=8, **options)
    word = int(plain.sequences[0, 4])
    torch.manual_seed(0)
    output = generate(
        model, [[9, 12], [8, 30]], max_new_tokens=8, stopping_criteria=StoppingCriteriaList([StopAfter(word)]),
        pad_token_id=0, **options,
    )  # fmt: skip
    for row, sequence in enumerate(output.sequences.tolist()):
        new = sequence[2:]
        length = new.index(word) + 1 if word in new else 8
        assert set(new[length:]) <= {0}
        actions = actions_of(output, row)
        assert actions.count(0) == 2 + length and reference.stack_depth(actions) == 1


class ListStreamer(BaseStreamer):
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.values, self.ended = [], False

    def put(self, value: torch.Tensor) -> None:
        """Keep."""
        self.values.append(value)

    def end(self) -> None:
        """Note the end."""
        self.ended = True


@pytest.mark.parametrize(
    "options",
    [{}, {"do_sample": True}, {"structure_mode": "marginal"}]
    + [{"synchronous": False}, {"synchronous": False, "do_sample": True}],
)
def test_streamer_gets_prompt_and_words(ending_model: GPSTForCausalLM, options: dict) -> None:
    """First the prompt, then word by word, then the end; with beams it is refused as in transformers."""
    streamer = ListStreamer()
    output = generate(
        ending_model, [[9, 12], [8, 30]], streamer=streamer, eos_token_id=EOS, max_new_tokens=7, **options
    )
    assert streamer.ended and streamer.values[0].tolist() == [[9, 12], [8, 30]]
    assert torch.equal(torch.stack(streamer.values[1:], 1), output.sequences[:, 2:])
    with pytest.raises(ValueError, match="streamer"):
        generate(ending_model, [[9]], streamer=ListStreamer(), num_beams=2)


# ------------------------------------------------------------------------------------------------------- marginal mode
def test_marginal_mode_is_stock_decoding_on_logits(model: GPSTForCausalLM) -> None:
    """Greedy words are the best of the logits; beams score by their sum; without cache the same."""
    ids = torch.tensor([[9, 12, 30]])
    output = generate(model, ids, structure_mode="marginal")
    logits = model(output.sequences).logits
    assert torch.equal(logits[:, 2:-1].argmax(-1), output.sequences[:, 3:])
    assert torch.equal(generate(model, ids, structure_mode="marginal", use_cache=False).sequences, output.sequences)
    beams = generate(
        model,
        ids,
        structure_mode="marginal",
        num_beams=3,
        num_return_sequences=3,
        output_scores=True,
        length_penalty=0.0,
    )
    for row in range(3):
        logits = model(beams.sequences[row : row + 1]).logits[0, 2:-1]
        total = logits.gather(1, beams.sequences[row, 3:, None]).sum()
        assert float(total) == pytest.approx(float(beams.sequences_scores[row]), abs=1e-3)
    again = generate(model, ids, structure_mode="marginal", action_beam_size=1)
    assert again.past_key_values.num_beams == 1 and isinstance(again.past_key_values, SyntacticCache)


def test_marginal_mode_ends_only_complete_trees(ending_model: GPSTForCausalLM) -> None:
    """The end token has only the probability of derivations with one tree."""
    cache = SyntacticCache(32, torch.tensor([EOS]))
    logits = ending_model(torch.tensor([[9, 12, 30]]), past_key_values=cache).logits[0, -1]
    prompt, parts = [9, 12, 30], []
    for prefix in reference.prefix_derivations(3):
        for count in range(reference.stack_depth(prefix)):
            actions = (*prefix, *[1] * count)
            gens, words = reference.run(ending_model, prompt, actions)
            row = reference.log_prob(ending_model, prompt, actions) + float(gens[-1, 0]) + words[-1]
            row[EOS] = row[EOS] if reference.stack_depth(actions) == 1 else -math.inf
            parts.append(row)
    assert torch.allclose(logits, torch.stack(parts).logsumexp(0).log_softmax(-1), atol=1e-4)
    free = ending_model(torch.tensor([[9, 12, 30]]), past_key_values=SyntacticCache(32)).logits[0, -1]
    assert free[EOS] > logits[EOS]


def test_marginal_mode_continues_from_a_cache(model: GPSTForCausalLM) -> None:
    """Prompts read before generation need not be read again."""
    ids = torch.tensor([[9, 12, 30, 8]])
    expected = generate(model, ids, structure_mode="marginal").sequences
    cache = model(ids[:, :3], use_cache=True).past_key_values
    assert torch.equal(generate(model, ids, structure_mode="marginal", past_key_values=cache).sequences, expected)


# ------------------------------------------------------------------------------------------ outputs and options
def test_output_types(model: GPSTForCausalLM) -> None:
    """Stock types, and plain tensors without `return_dict_in_generate`."""
    assert isinstance(generate(model, [[9]]), GenerateDecoderOnlyOutput)
    assert isinstance(generate(model, [[9]], num_beams=2), GenerateBeamDecoderOnlyOutput)
    plain = generate(model, [[9]], return_dict_in_generate=False)
    assert torch.is_tensor(plain) and plain.shape == (1, 6)
    assert torch.equal(plain, generate(model, [[9]]).sequences)
    assert torch.equal(plain[:, 1:], generate(model, [[EOS, 9]]).sequences[:, 2:])


def test_prompt_of_a_begin_token_or_nothing(model: GPSTForCausalLM) -> None:
    """Without a prompt the begin token stands in; trees start at the first new word."""
    model.generation_config.bos_token_id = EOS
    output = model.generate(max_new_tokens=4, return_dict_in_generate=True, eos_token_id=None)
    assert output.sequences[0, 0] == EOS and len(output.spans[0]) == 3
    assert torch.equal(output.sequences, generate(model, [[EOS]], max_new_tokens=4).sequences)


def test_generation_options_survive_saving(model: GPSTForCausalLM, tmp_path: Any) -> None:
    """Options of this library are saved, loaded, used, and can be overridden by a config or keywords."""
    model.set_generation_defaults()
    model.generation_config.structure_mode = "marginal"
    model.generation_config.action_beam_size = 2
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.structure_mode == "marginal" and loaded.generation_config.action_beam_size == 2
    assert "spans" not in generate(loaded, [[9]])
    assert generate(loaded, [[9]]).past_key_values.num_beams == 2
    assert generate(loaded, [[9]], structure_mode="joint").spans is not None
    config = GenerationConfig(max_new_tokens=2, structure_mode="joint", return_dict_in_generate=True, eos_token_id=None)
    assert len(loaded.generate(torch.tensor([[9]]), config).spans[0]) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": 3}, "foo"),
        ({"structure_mode": "tree"}, "structure_mode='tree'"),
        ({"action_beam_size": 0}, "action_beam_size=0"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged'"),
        ({"output_logits": True}, "output_logits"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"use_cache": False}, "use_cache"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 2}, "assisted|stateful|offer greedy"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "offer greedy"),
        ({"past_key_values": SyntacticCache(2)}, "past_key_values"),
        ({"structure_mode": "marginal", "context_sentence_ids": torch.tensor([[0, 0]])}, "context_sentence_ids"),
        ({"word_ends": torch.tensor([[True, True]])}, "word_ends"),
        ({"structure_mode": "marginal", "word_ends": torch.tensor([[True, True]])}, "word_ends"),
        ({"structure_mode": "marginal", "output_attentions": True}, "output_attentions"),
        ({"max_new_tokens": 100}, "Prompt and generated text.*max_new_tokens"),
        ({"max_new_tokens": 100, "structure_mode": "marginal"}, "Prompt and generated text.*max_new_tokens"),
        ({"max_new_tokens": 100, "structure_mode": "marginal", "num_beams": 2}, "max_new_tokens"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])}, "SynthID"),
        ({"structure_mode": "marginal", "action_beam_size": 3, "past_key_values": SyntacticCache(2)}, "beam of 2"),
        ({"structure_mode": "marginal", "use_cache": False, "past_key_values": SyntacticCache(2)}, "use_cache=False"),
    ],
)
def test_unsupported_options_are_refused(model: GPSTForCausalLM, options: dict, message: str) -> None:
    """Nothing is silently ignored."""
    with pytest.raises(ValueError, match=message):
        generate(model, [[9, 12]], **options)


def test_batch_generation_is_refused(model: GPSTForCausalLM) -> None:
    """Continuous batching, and assisted decoding."""
    with pytest.raises(NotImplementedError, match="padded batch"):
        model.generate_batch([[9]])
    with pytest.raises(ValueError, match="offer greedy"):
        generate(model, [[9]], assistant_model=model)


def test_generate_has_a_typed_signature(model: GPSTForCausalLM) -> None:
    """The options of this library are named, typed and documented; those of transformers keep their places."""
    signature = inspect.signature(type(model).generate)
    stock = [name for name in inspect.signature(GenerationMixin.generate).parameters if name != "kwargs"]
    assert list(signature.parameters)[: len(stock)] == stock
    for name in ("structure_mode", "action_beam_size", "close_tree", "context_sentence_ids"):
        assert signature.parameters[name].annotation is not inspect.Parameter.empty
        assert f"{name}:" in type(model).generate.__doc__


def test_text_streamer_with_a_tokenizer(model: GPSTForCausalLM) -> None:
    """The stock text streamer decodes as words come."""

    class Decoder:
        def decode(self, ids: Any, **kwargs: Any) -> str:
            return "".join(f"w{int(i)} " for i in ids)

    streamer = TextIteratorStreamer(Decoder(), skip_prompt=True)
    output = generate(model, [[9, 12]], streamer=streamer)
    assert "".join(streamer).split() == [f"w{i}" for i in output.sequences[0, 2:].tolist()]


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"structure_mode": "marginal"}])
def test_stop_strings(model: GPSTForCausalLM, options: dict) -> None:
    """Stop strings work with the stock criterion, which wants a tokenizer."""
    plain = generate(model, [[9, 12]], **options).sequences[0].tolist()

    letters = "abcdefghijklmnopqrstuvwxyz0123456789ABCD"
    pieces = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    pieces.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    output = generate(
        model, [[9, 12]], stop_strings=[letters[plain[3]]], tokenizer=tokenizer, pad_token_id=0, **options
    )
    sequence = [token for token in output.sequences[0].tolist() if token]
    assert plain[3] not in sequence[2:-1]
    assert sequence[-1] == plain[3] or len(sequence) == 7


def test_drawing_is_defined_when_rows_are_over(model: GPSTForCausalLM) -> None:
    """Rows without hypotheses do not disturb the others."""
    search = model.word_search(1)
    state = search.begin(2, torch.device("cpu"))
    state.scores[0] = -math.inf
    with torch.no_grad():
        chosen, words = search.draw_word(state, None)
    assert chosen.scores[0] == -math.inf and torch.isfinite(chosen.scores[1]) and torch.isfinite(words[1]).all()


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("synchronous", [True, False])
def test_sampling_when_only_the_end_is_allowed(model: GPSTForCausalLM, num_beams: int, synchronous: bool) -> None:
    """The end token waits for one tree: derivations that may take it are drawn, others are not."""
    for options in (
        {"forced_eos_token_id": EOS, "max_new_tokens": 3},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [EOS]},
    ):
        for seed in range(10):
            torch.manual_seed(seed)
            common = {"eos_token_id": EOS, "do_sample": True, "num_beams": num_beams, "synchronous": synchronous}
            output = generate(model, [[9, 12, 30], [8, 9, 11]], **common, **options)
            if "prefix_allowed_tokens_fn" in options:
                assert (output.sequences[:, 3] == EOS).all() and output.sequences.shape == (2, 4)
            assert torch.isfinite(output.sequences_scores).all()
            for row in range(2):
                length = len([a for a in actions_of(output, row) if a == 0])
                assert len(actions_of(output, row)) == 2 * length - 1


OPTIONS = [{}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 3}]


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("options", OPTIONS)
def test_rows_without_words_keep_what_they_have(model: GPSTForCausalLM, options: dict, synchronous: bool) -> None:
    """Where every word is forbidden the text stays as it is, and the other rows do not notice."""

    class Forbid(LogitsProcessor):
        def __init__(self, last: int) -> None:
            self.last = last

        def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            stop = (ids[:, 1] == 21) & (ids.shape[1] >= self.last)
            return scores.masked_fill(stop[:, None], -math.inf)

    prompts = torch.tensor([[9, 12], [9, 21], [30, 8]])
    for last in (2, 4):
        processors = LogitsProcessorList([Forbid(last)])
        common = {"synchronous": synchronous, **options}
        output = generate(model, prompts, logits_processor=processors, **common)
        assert output.sequences.shape == (3, 7)
        assert output.sequences[1, :2].tolist() == [9, 21] and (output.sequences[1, last:] == 0).all()
        assert (output.sequences[1, :last] != 0).all() and len(output.spans[1]) == last - 1
        assert torch.isfinite(output.sequences_scores).all()
        if not options.get("do_sample"):
            for row in (0, 2):
                single = generate(model, prompts[row : row + 1], **common)
                assert torch.equal(output.sequences[row], single.sequences[0])
                assert float(output.sequences_scores[row]) == pytest.approx(float(single.sequences_scores[0]), abs=1e-4)


def test_missing_hypotheses_are_prompts(tiny_gpst_config: Any) -> None:
    """Fewer sequences than asked for: the prompt stands in, with score -inf and no tree."""
    model = make_model(tiny_gpst_config)
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [7]}
    output = generate(model, [[9]], num_beams=4, num_return_sequences=4, max_new_tokens=1, **allowed)
    assert output.sequences[0].tolist() == [9, 7] and torch.isfinite(output.sequences_scores[0])
    assert (output.sequences_scores[1:] == -math.inf).all()
    assert (output.sequences[1:] == torch.tensor([9, 0])).all() and output.spans[1:] == [[], [], []]
    assert (output.actions[1:] == -1).all()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_marginal_mode_honours_its_options_without_and_with_a_cache(
    ending_model: GPSTForCausalLM, num_beams: int
) -> None:
    """The width of the beam and the rule of the end token hold however the state is kept."""
    ids = torch.tensor([[9, 12, 30, 8], [8, 5, 21, 7]])
    common = {"structure_mode": "marginal", "num_beams": num_beams, "output_scores": True, "eos_token_id": EOS}
    for options in ({"action_beam_size": 1}, {"action_beam_size": 6}, {}):
        expected = generate(ending_model, ids, **common, **options)
        uncached = generate(ending_model, ids, use_cache=False, **common, **options)
        assert torch.equal(uncached.sequences, expected.sequences)
        for ours, stock in zip(uncached.scores, expected.scores, strict=True):
            assert torch.allclose(ours, stock, atol=1e-4)
    cache = ending_model(ids[:, :3], use_cache=True).past_key_values
    assert cache.eos_token_ids is None
    cache.batch_repeat_interleave(num_beams)
    continued = generate(ending_model, ids, past_key_values=cache, **common)
    assert torch.equal(continued.sequences, expected.sequences)
    assert cache.eos_token_ids.tolist() == [EOS]
    for ours, stock in zip(continued.scores, expected.scores, strict=True):
        assert torch.allclose(ours, stock, atol=1e-4)


@pytest.mark.parametrize("synchronous", [True, False])
@pytest.mark.parametrize("seed", range(16))
def test_scores_of_mixed_beams_are_those_of_the_given_trees(seed, synchronous):
    """Ended and running hypotheses of different depths side by side, rescored without search and caches."""
    torch.manual_seed(seed)
    fields = {
        **TINY,
        "vocab_size": 12,
        "cls_token_id": None,
        "sep_token_id": None,
        "bos_token_id": 3,
        "reduce_token_id": 2,
    }
    model = GPSTForCausalLM(GPSTConfig(**{**fields, "pad_token_id": 0, "eos_token_id": 1})).eval()
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
        max_new_tokens=2 + seed // 8,
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
