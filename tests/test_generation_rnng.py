"""`generate` of RNNG: exact distributions and scores, valid trees, and everything users of transformers expect."""

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
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
)
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from hf_synlm import RNNGForCausalLM
from hf_synlm.rnng_actions import TransitionSystem
from hf_synlm.rnng_fast_track import FastTrackSearch
from hf_synlm.search_state import SyntacticCache
from tests.reference.rnng_search import CONTINUE, EITHER, END, SHIFT, Actions, Grammar, log_sum_exp
from tests.test_generation_gpst import ListStreamer, Recorder, StopAfter, chi_square
from tests.test_rnng_fast_track import INSIDE, WIDE, make_model, never_early, padded

EOS = 0
SYSTEMS = ["top_down", "in_order"]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 3, "num_return_sequences": 3},
    {"do_sample": True, "num_return_sequences": 4},
    {"do_sample": True, "num_beams": 3},
]


def exact_model(system: str, composition: str = "lstm", **fields: Any) -> RNNGForCausalLM:
    """A model that reads prompts with all their derivations."""
    return make_model(
        system, composition, scoring_num_beams=WIDE, action_beam_size=WIDE, **{"max_open_nonterminals": 3, **fields}
    )


def narrow_model(system: str, **fields: Any) -> RNNGForCausalLM:
    """A model that is fast."""
    return make_model(system, **{"scoring_num_beams": 3, "action_beam_size": 8, **fields})


def generate(model: RNNGForCausalLM, ids: Any, **kwargs: Any) -> Any:
    """Generate with an output object; no end unless one is given."""
    ids = torch.tensor(ids) if isinstance(ids, list) else ids
    return model.generate(ids, **{"eos_token_id": None, "max_new_tokens": 5, "return_dict_in_generate": True, **kwargs})


def actions_of(output: Any, row: int) -> Actions:
    """Actions of one sequence."""
    return tuple(a for a in output.actions[row].tolist() if a > 0)


def words_of(output: Any, row: int) -> list[int]:
    """Words of one sequence: everything but begin, end and padding, which are one id."""
    return [token for token in output.sequences[row].tolist() if token]


# ----------------------------------------------------------------------------------------------------- trees and scores
@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("subwords", [False, True])
@pytest.mark.parametrize("system", SYSTEMS)
def test_every_sequence_has_its_tree(system: str, subwords: bool, options: dict, eos: int | None) -> None:
    """Complete derivations of all words, with the spans and labels of their actions; from prompts and from nothing."""
    model = narrow_model(system, subwords=subwords)
    rules = TransitionSystem(system, 2)
    for prompt in ([[3, 4, 9], [INSIDE[0], 7, INSIDE[1]]], [[EOS]]):
        output = generate(model, prompt, eos_token_id=eos, **options)
        for row in range(len(output.sequences)):
            words, actions = words_of(output, row), actions_of(output, row)
            assert actions.count(SHIFT) == len(words) and torch.isfinite(output.sequences_scores[row])
            assert eos is not None or len(words) == 5 + (len(prompt[0]) if prompt[0] != [EOS] else 0)
            ends = [*Grammar(model, words).word_ends[:-1], True]
            spans = rules.actions_to_spans(actions, ends)
            first = int(prompt == [[EOS]])
            assert output.spans[row] == [(i + first, j + first) for _, i, j in spans]
            assert output.labels[row] == [model.config.nonterminals[label] for label, _, _ in spans]
            tensors = torch.tensor([words]), torch.tensor([actions])
            assert torch.isfinite(model(tensors[0], actions=tensors[1]).joint_log_prob).all()


@pytest.mark.parametrize("normalization", ["search", "train"])
@pytest.mark.parametrize("options", OPTIONS[:3])
@pytest.mark.parametrize(("system", "composition"), [("top_down", "lstm"), ("in_order", "attention")])
def test_scores_are_joint_given_the_prompt(system: str, composition: str, options: dict, normalization: str) -> None:
    """Rescored without search and caches, sequences that end by themselves and sequences that are closed."""
    model = exact_model(system, composition, normalization=normalization)
    prompt, ended = [3, 4], []
    marginal = log_sum_exp([score for score, _ in Grammar(model, prompt, None, normalization).prefixes(2)])
    for start, base in ((prompt, marginal), ([EOS], 0.0)):
        given = len(start) if start != [EOS] else 0
        output = generate(model, [start], eos_token_id=EOS, max_new_tokens=3, action_beam_size=300, **options)
        for row, score in enumerate(output.sequences_scores.tolist()):
            words, actions = words_of(output, row), actions_of(output, row)
            ends = len(words) < given + 3
            ended.append(ends)

            def phase_after(count: int, given: int = given, total: int = len(words), ends: bool = ends) -> str:
                if count < given:
                    return CONTINUE
                return END if count == total and not ends else EITHER

            grammar = Grammar(model, words, None, normalization)
            expected = grammar.log_prob(actions, phase_after) - base
            if normalization == "train":
                joint = model(torch.tensor([words]), actions=torch.tensor([actions])).joint_log_prob
                assert float(joint) - base == pytest.approx(expected, abs=1e-4)
            # The closing of the tree counts as a word of the length.
            length = len(words) + ends - given if "num_beams" in options else 1
            assert score == pytest.approx(expected / length, abs=1e-4)
    assert any(ended)


@pytest.mark.parametrize("system", SYSTEMS)
def test_wide_beam_finds_the_best_sentences(system: str) -> None:
    """One more word or none: a very wide beam equals the enumeration of all words and derivations."""
    model = exact_model(system, vocab_size=4, nonterminals=["S"])
    prompt = [3]
    grammar = Grammar(model, prompt)
    prefixes = grammar.prefixes(1)
    marginal = log_sum_exp([score for score, _ in prefixes])
    best: dict[tuple[int, ...], float] = {}
    states = grammar.weighted(prefixes, EITHER)
    for score, actions in states:
        for action, value in grammar.action_log_probs(actions, EITHER).items():
            if grammar.ends(actions, action):
                best[(3, EOS)] = max(best.get((3, EOS), -math.inf), score + value - marginal)
    for word in (1, 2, 3):
        longer = Grammar(model, [3, word])
        starts = [
            (score + value + float(grammar.word_log_probs(actions)[word]), (*actions, SHIFT))
            for score, actions in states
            for action, value in grammar.action_log_probs(actions, EITHER).items()
            if action == SHIFT
        ]
        best[(3, word)] = longer.derivations(starts)[0][0] - marginal
    common = {"num_beams": 600, "num_return_sequences": 600, "max_new_tokens": 1}
    output = generate(model, [prompt], eos_token_id=EOS, length_penalty=0.0, **common)
    found: dict[tuple[int, ...], float] = {}
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        found.setdefault(tuple(sequence), score)
    assert output.sequences_scores.tolist() == sorted(output.sequences_scores.tolist(), reverse=True)
    assert found.keys() >= best.keys()
    for key, score in best.items():
        assert found[key] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("structure_mode", ["joint", "marginal"])
@pytest.mark.parametrize("options", [{}, {"num_beams": 3, "num_return_sequences": 2}])
@pytest.mark.parametrize("system", SYSTEMS)
def test_batch_equals_one_by_one(system: str, options: dict, structure_mode: str) -> None:
    """Left-padded prompts of unequal lengths equal single prompts."""
    model = narrow_model(system, seed=2)
    rows = [[3, 4, 9, 8], [7], [10, 5]]
    ids, mask = padded(rows, left=True)
    count = options.get("num_return_sequences", 1)
    common = {"structure_mode": structure_mode, "eos_token_id": EOS, "max_new_tokens": 6, **options}
    output = generate(model, ids, attention_mask=mask, **common)
    for row, prompt in enumerate(rows):
        single = generate(model, [prompt], **common)
        for rank in range(count):
            index = row * count + rank
            new = output.sequences[index, ids.shape[1] :].tolist()
            expected = single.sequences[rank, len(prompt) :].tolist()
            assert new[: len(expected)] == expected and set(new[len(expected) :]) <= {EOS}
            if structure_mode == "joint":
                assert actions_of(output, index) == actions_of(single, rank)
                shift = ids.shape[1] - len(prompt)
                assert output.spans[index] == [(i + shift, j + shift) for i, j in single.spans[rank]]
                assert output.labels[index] == single.labels[rank]
                score = float(single.sequences_scores[rank])
                assert float(output.sequences_scores[index]) == pytest.approx(score, abs=1e-4)
    unmasked = generate(model, ids.masked_fill(mask == 0, 0), **common)  # padding is known by its id
    assert torch.equal(unmasked.sequences[:, 4:], output.sequences[:, 4:])


def test_missing_hypotheses_are_prompts() -> None:
    """Fewer sequences than asked for: the prompt stands in, with score -inf and no tree."""
    model = make_model("in_order", max_open_nonterminals=1, max_consecutive_nonterminals=1, nonterminals=["S"])
    allowed = {"prefix_allowed_tokens_fn": lambda batch, ids: [7]}
    output = generate(model, [[9]], num_beams=4, num_return_sequences=4, max_new_tokens=1, **allowed)
    exists = torch.isfinite(output.sequences_scores)
    assert 0 < exists.sum() < 4 and (output.sequences[exists] == torch.tensor([9, 7])).all()
    assert (output.sequences[~exists] == torch.tensor([9, 0])).all()
    for row in range(int(exists.sum()), 4):
        assert output.spans[row] == [] and actions_of(output, row) == ()


@pytest.mark.parametrize("system", SYSTEMS)
def test_close_tree_false_leaves_the_derivation_open(system: str) -> None:
    """The actions stop at the last word."""
    output = generate(narrow_model(system), [[3, 4]], close_tree=False, num_beams=2)
    assert actions_of(output, 0)[-1] == SHIFT


def test_length_penalty_and_early_stopping() -> None:
    """`early_stopping` stops at K finished sequences, "never" finds no worse ones; long texts can be favored."""
    model = narrow_model("top_down")
    common = {"eos_token_id": EOS, "num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 8}
    scores = {
        stop: generate(model, [[3, 4]], early_stopping=stop, length_penalty=0.0, **common).sequences_scores
        for stop in (True, False, "never")
    }
    assert (scores["never"] >= scores[True] - 1e-5).all() and (scores[False] >= scores[True] - 1e-5).all()
    short = generate(model, [[3, 4]], length_penalty=-5.0, **common)
    long = generate(model, [[3, 4]], length_penalty=5.0, early_stopping="never", **common)
    assert len(words_of(short, 0)) < len(words_of(long, 0))


# ------------------------------------------------------------------------------------------------------------- sampling
def assert_fits(counts: torch.Tensor, probabilities: torch.Tensor) -> None:
    """Chi-square test at about four standard deviations."""
    statistic, freedom = chi_square(counts, probabilities)
    assert statistic < freedom + 4 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.parametrize("eos", [None, EOS])
@pytest.mark.parametrize("system", SYSTEMS)
def test_sampling_follows_the_exact_marginal(system: str, eos: int | None) -> None:
    """Next words of joint sampling, the end among them, are distributed as the enumerated marginal."""
    model = exact_model(system)
    grammar = Grammar(model, [3])
    expected = grammar.next_word(grammar.prefixes(1), eos).exp()
    output = generate(
        model, [[3]], do_sample=True, top_k=0, num_return_sequences=3000, max_new_tokens=1, eos_token_id=eos,
        action_beam_size=WIDE, close_tree=False,
    )  # fmt: skip
    assert_fits(torch.bincount(output.sequences[:, -1], minlength=12), expected)
    cache = SyntacticCache(WIDE, None if eos is None else torch.tensor([eos]), action_beam_size=WIDE)
    logits = model(torch.tensor([[3]]), past_key_values=cache).logits[0, -1]
    assert torch.allclose(logits.exp(), expected.float(), atol=1e-5)


@pytest.mark.parametrize("system", SYSTEMS)
def test_sampled_sentences_follow_the_model(system: str) -> None:
    """Texts of one word or none more and their trees are distributed as the model says, and scored so."""
    model = exact_model(system, nonterminals=["S"], vocab_size=4, max_open_nonterminals=2)
    grammar = Grammar(model, [3])
    prefixes = grammar.prefixes(1)
    marginal = log_sum_exp([score for score, _ in prefixes])
    weights: dict[tuple[int, Actions], float] = {}
    for score, actions in grammar.weighted(prefixes, EITHER):
        for action, value in grammar.action_log_probs(actions, EITHER).items():
            if grammar.ends(actions, action):
                weights[EOS, (*actions, action)] = score + value - marginal
            elif action == SHIFT:
                for word in (1, 2, 3):
                    value_word = float(grammar.word_log_probs(actions)[word])
                    weights[word, (*actions, SHIFT)] = score + value + value_word - marginal
    assert math.exp(log_sum_exp(list(weights.values()))) == pytest.approx(1.0, abs=1e-5)
    output = generate(
        model, [[3]], do_sample=True, top_k=0, num_return_sequences=3000, max_new_tokens=1, eos_token_id=EOS,
        action_beam_size=WIDE, close_tree=False,
    )  # fmt: skip
    order = list(weights)
    counts = torch.zeros(len(order))
    for row, word in enumerate(output.sequences[:, -1].tolist()):
        key = (word, actions_of(output, row))
        counts[order.index(key)] += 1
        if row < 50:
            assert float(output.sequences_scores[row]) == pytest.approx(weights[key], abs=1e-4)
    assert_fits(counts, torch.tensor([weights[key] for key in order]).exp())


def test_beam_sampling_draws_from_the_beam() -> None:
    """With num_beams=K, first words come in proportion to the K best candidates."""
    model = narrow_model("top_down")
    search = model.word_search(4)
    with torch.no_grad():
        chosen, _, _ = search.propose_words(search.begin(1, torch.device("cpu")), None)
    prompts = torch.zeros(1500, 1, dtype=torch.long)
    output = generate(model, prompts, do_sample=True, top_k=0, num_beams=4, max_new_tokens=1)
    counts = torch.bincount(output.sequences[:, -1], minlength=12).float()
    expected = torch.zeros(12).scatter_add(0, chosen.tokens[0], chosen.scores[0].softmax(0))
    assert counts[expected == 0].sum() == 0
    assert_fits(counts[expected > 0], expected[expected > 0])


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 1e-3}])
def test_warpers_act_on_words(options: dict) -> None:
    """Sharp warpers leave only the best word of the drawn structure."""
    model = make_model("in_order")
    best = Grammar(model, []).word_log_probs(()).argmax()
    output = generate(model, [[EOS]], do_sample=True, max_new_tokens=1, num_return_sequences=20, **options)
    assert (output.sequences[:, -1] == best).all()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_sampling_repeats_under_a_seed(num_beams: int) -> None:
    """The same seed gives the same words and trees, another seed others."""
    model, results = narrow_model("in_order"), []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        output = generate(model, [[9, 2], [8, 7]], do_sample=True, top_k=0, num_beams=num_beams, max_new_tokens=8)
        results.append((output.sequences.tolist(), output.actions.tolist()))
    assert results[0] == results[1] != results[2]


# ------------------------------------------------------------------------------------ processors, criteria, streams
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True}, {"do_sample": True, "num_beams": 2}])
@pytest.mark.parametrize("eos", [None, EOS])
def test_processors_see_words_of_every_hypothesis(options: dict, eos: int | None) -> None:
    """One row of words per hypothesis, and what they forbid is not generated."""
    model = narrow_model("in_order")
    options = {**options, "eos_token_id": eos, "min_new_tokens": 5 if eos is not None else None}
    plain = generate(model, [[9, 2], [8, 3]], **options)
    recorder = Recorder(int(plain.sequences[0, 2]))
    output = generate(model, [[9, 2], [8, 3]], logits_processor=LogitsProcessorList([recorder]), **options)
    assert not (output.sequences[:, 2:] == recorder.forbidden).any()
    rows = 2 * options.get("num_beams", 1)
    assert {shape[0][0] for shape in recorder.shapes} == {rows}
    assert {shape[0][1] for shape in recorder.shapes} == set(range(2, 7))
    assert {shape[1] for shape in recorder.shapes} == {(rows, 12)}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("system", SYSTEMS)
def test_stock_options_apply(system: str, num_beams: int) -> None:
    """n-gram blocking, bad words, allowed words per prompt, minimal length, and scores."""
    model, ids = narrow_model(system), [[9, 1], [8, 3]]
    output = generate(model, ids, num_beams=num_beams, no_repeat_ngram_size=1, max_new_tokens=7)
    assert all(len(set(row)) == len(row) for row in output.sequences.tolist())
    banned = generate(model, ids, num_beams=num_beams).sequences[0, 2].item()
    assert banned not in generate(model, ids, num_beams=num_beams, bad_words_ids=[[banned]]).sequences[:, 2:]
    allowed = generate(model, ids, num_beams=num_beams, prefix_allowed_tokens_fn=lambda row, _: [4 + row, 7 + row])
    assert set(allowed.sequences[0, 2:].tolist()) <= {4, 7} and set(allowed.sequences[1, 2:].tolist()) <= {5, 8}
    scored = generate(model, ids, num_beams=num_beams, output_scores=True)
    assert len(scored.scores) == 5 and all(step.shape == (2 * num_beams, 12) for step in scored.scores)


@pytest.mark.parametrize("options", [*OPTIONS, {"structure_mode": "marginal"}])
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_least_number_of_words(system: str, options: dict) -> None:
    """No tree is closed before `min_new_tokens`; from then on they are."""
    output = generate(narrow_model(system), [[9, 1]], eos_token_id=EOS, min_new_tokens=3, max_new_tokens=9, **options)
    lengths = [len(words_of(output, row)) for row in range(len(output.sequences))]
    assert min(lengths) >= 5
    if options == OPTIONS[2]:
        assert min(lengths) < 11


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_the_end_is_forbidden_row_by_row(system: str, options: dict) -> None:
    """A processor that forbids the end of one prompt, or after some words, does so for these only."""
    model = narrow_model(system)

    def allowed(row: int, ids: torch.Tensor) -> list[int]:
        return [EOS, *range(1, 12)] if row == 0 or int(ids[-1]) > 5 else [*range(1, 12)]

    for seed in range(3):
        torch.manual_seed(seed)
        output = generate(
            model, [[9, 1], [8, 3]], eos_token_id=EOS, prefix_allowed_tokens_fn=allowed, max_new_tokens=6, **options
        )
        rows = len(output.sequences)
        for row in range(rows // 2, rows):
            words = words_of(output, row)
            assert len(words) == 8 or words[-1] > 5


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("sampling", [True, False])
@pytest.mark.parametrize("system", SYSTEMS)
def test_when_only_the_end_is_allowed(system: str, sampling: bool, num_beams: int) -> None:
    """The tree is closed."""
    model = narrow_model(system)
    for options in (
        {"forced_eos_token_id": EOS, "max_new_tokens": 2},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [EOS]},
    ):
        for seed in range(6 if sampling else 1):
            torch.manual_seed(seed)
            common = {"eos_token_id": EOS, "do_sample": sampling, "num_beams": num_beams}
            output = generate(model, [[9, 2, 3], [8, 9, 11]], **common, **options)
            assert torch.isfinite(output.sequences_scores).all() and (output.sequences[:, -1] == EOS).all()
            if "prefix_allowed_tokens_fn" in options:
                assert output.sequences.shape == (2, 4)
            for row in range(2):
                TransitionSystem(system, 2).actions_to_spans(actions_of(output, row))


@pytest.mark.parametrize("system", SYSTEMS)
def test_scores_sum_out_the_structure(system: str) -> None:
    """Per hypothesis, `scores` are log p(word | hypothesis) over all structural actions before the word."""
    model = exact_model(system)
    grammar = Grammar(model, [9])
    best = max(grammar.prefixes(1))
    for eos in (None, EOS):
        output = generate(model, [[9]], output_scores=True, max_new_tokens=1, eos_token_id=eos)
        found = output.scores[0][0]
        assert torch.allclose(found.exp(), grammar.next_word([best], eos).exp().float(), atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 0}])
def test_stopping_criteria(options: dict) -> None:
    """A row stops at its word, its tree is closed, and the rest is padding."""
    model = narrow_model("top_down")
    plain = generate(model, [[9, 2]], max_new_tokens=8, **options)
    word = int(plain.sequences[0, 4])
    torch.manual_seed(0)
    output = generate(
        model, [[9, 2], [8, 3]], max_new_tokens=8, stopping_criteria=StoppingCriteriaList([StopAfter(word)]),
        pad_token_id=0, **options,
    )  # fmt: skip
    for row, sequence in enumerate(output.sequences.tolist()):
        new = sequence[2:]
        length = new.index(word) + 1 if word in new else len(new)
        assert set(new[length:]) <= {0}
        actions = actions_of(output, row)
        assert actions.count(SHIFT) == 2 + length
        TransitionSystem("top_down", 2).actions_to_spans(actions)


@pytest.mark.parametrize("options", [{}, {"do_sample": True}, {"structure_mode": "marginal"}])
def test_streamer_gets_prompt_and_words(options: dict) -> None:
    """First the prompt, then word by word, then the end; with beams it is refused as in transformers."""
    model, streamer = narrow_model("in_order", seed=4), ListStreamer()
    output = generate(model, [[9, 2], [8, 3]], streamer=streamer, eos_token_id=EOS, max_new_tokens=7, **options)
    assert streamer.ended and streamer.values[0].tolist() == [[9, 2], [8, 3]]
    assert torch.equal(torch.stack(streamer.values[1:], 1), output.sequences[:, 2:])
    with pytest.raises(ValueError, match="streamer"):
        generate(model, [[9]], streamer=ListStreamer(), num_beams=2)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}, {"structure_mode": "marginal"}])
def test_stop_strings(options: dict) -> None:
    """Stop strings work with the stock criterion, which wants a tokenizer."""
    model = narrow_model("in_order")
    plain = generate(model, [[9, 2]], **options).sequences[0].tolist()
    letters = "abcdefghijkl"
    pieces = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    pieces.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=pieces)
    output = generate(model, [[9, 2]], stop_strings=[letters[plain[3]]], tokenizer=tokenizer, pad_token_id=0, **options)
    sequence = words_of(output, 0)
    assert plain[3] not in sequence[2:-1]
    assert sequence[-1] == plain[3] or len(sequence) == 7


class Forbid(LogitsProcessor):
    """Forbids every word of the row whose second word is 5, from a length on."""

    def __init__(self, last: int) -> None:
        self.last = last

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Forbid."""
        stop = (ids[:, 1] == 5) & (ids.shape[1] >= self.last)
        return scores.masked_fill(stop[:, None], -math.inf)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_rows_without_words_keep_what_they_have(system: str, options: dict) -> None:
    """Where every word is forbidden the text stays as it is, and the other rows do not notice."""
    model, prompts = narrow_model(system), torch.tensor([[9, 2], [9, 5], [3, 8]])
    options = {name: value for name, value in options.items() if name != "num_return_sequences"}
    for last in (2, 4):
        output = generate(model, prompts, logits_processor=LogitsProcessorList([Forbid(last)]), **options)
        assert output.sequences.shape == (3, 7)
        assert output.sequences[1, :2].tolist() == [9, 5] and (output.sequences[1, last:] == 0).all()
        assert actions_of(output, 1).count(SHIFT) == last
        assert torch.isfinite(output.sequences_scores).all()
        if not options.get("do_sample"):
            for row in (0, 2):
                single = generate(model, prompts[row : row + 1], **options)
                assert torch.equal(output.sequences[row], single.sequences[0])
                assert float(output.sequences_scores[row]) == pytest.approx(float(single.sequences_scores[0]), abs=1e-4)


# ------------------------------------------------------------------------------------------------------- marginal mode
@pytest.mark.parametrize("system", SYSTEMS)
def test_marginal_mode_is_stock_decoding_on_logits(system: str) -> None:
    """Greedy words are the best of the logits; beams score by their sum; without cache the same; from nothing, too."""
    model = narrow_model(system)
    for start in ([9, 2, 3], [EOS]):
        ids = torch.tensor([start])
        output = generate(model, ids, structure_mode="marginal")
        logits = model(output.sequences).logits
        assert torch.equal(logits[:, len(start) - 1 : -1].argmax(-1), output.sequences[:, len(start) :])
        uncached = generate(model, ids, structure_mode="marginal", use_cache=False)
        assert torch.equal(uncached.sequences, output.sequences)
        beams = generate(
            model,
            ids,
            structure_mode="marginal",
            num_beams=3,
            num_return_sequences=3,
            length_penalty=0.0,
            output_scores=True,
        )
        for row in range(3):
            logits = model(beams.sequences[row : row + 1]).logits[0, len(start) - 1 : -1]
            total = logits.gather(1, beams.sequences[row, len(start) :, None]).sum()
            assert float(total) == pytest.approx(float(beams.sequences_scores[row]), abs=1e-3)


def test_marginal_mode_continues_from_a_cache() -> None:
    """Prompts read before generation need not be read again; options and ends hold."""
    model, ids = narrow_model("in_order"), torch.tensor([[9, 2, 3, 8]])
    for eos in (None, EOS):
        expected = generate(model, ids, structure_mode="marginal", eos_token_id=eos).sequences
        cache = model(ids[:, :3], use_cache=True).past_key_values
        found = generate(model, ids, structure_mode="marginal", past_key_values=cache, eos_token_id=eos)
        assert torch.equal(found.sequences, expected)
    wide = generate(model, ids, structure_mode="marginal", action_beam_size=20, fast_track_size=2)
    assert wide.past_key_values.options == {"action_beam_size": 20, "fast_track_size": 2}


# ------------------------------------------------------------------------------------------------- outputs and options
def test_output_types() -> None:
    """Stock types, and plain tensors without `return_dict_in_generate`."""
    model = narrow_model("top_down")
    assert isinstance(generate(model, [[9]]), GenerateDecoderOnlyOutput)
    assert isinstance(generate(model, [[9]], num_beams=2), GenerateBeamDecoderOnlyOutput)
    plain = generate(model, [[9]], return_dict_in_generate=False)
    assert torch.is_tensor(plain) and plain.shape == (1, 6)
    assert torch.equal(plain[:, 1:], generate(model, [[EOS, 9]]).sequences[:, 2:])


@pytest.mark.parametrize("options", OPTIONS)
def test_nothing_as_prompt(options: dict) -> None:
    """No input at all, a begin token, and a row of padding beside others are the same."""
    model = narrow_model("top_down")
    results = []
    for prompt in ({}, {"input_ids": torch.tensor([[EOS]])}, {"input_ids": torch.tensor([[EOS, EOS]])}):
        torch.manual_seed(0)
        output = model.generate(max_new_tokens=4, return_dict_in_generate=True, **prompt, **options)
        results.append([words_of(output, row) for row in range(len(output.sequences))])
    assert results[0] == results[1] == results[2] and results[0][0]
    if not options.get("do_sample"):
        ids = torch.tensor([[3, 4], [0, 0]])
        output = model.generate(ids, max_new_tokens=4, return_dict_in_generate=True, **options)
        count = len(output.sequences) // 2
        assert [words_of(output, row) for row in range(count, 2 * count)] == results[0]


def test_generation_options_survive_saving(tmp_path: Any) -> None:
    """Options of this library are saved, loaded, used, and can be overridden by a config or keywords."""
    model = narrow_model("top_down")
    model.set_generation_defaults()
    model.generation_config.structure_mode = "marginal"
    model.generation_config.action_beam_size, model.generation_config.fast_track_size = 5, 2
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.generation_config.fast_track_size == 2
    assert "spans" not in generate(loaded, [[9]])
    assert generate(loaded, [[9]]).past_key_values.options["action_beam_size"] == 5
    assert generate(loaded, [[9]], structure_mode="joint").spans is not None
    config = GenerationConfig(max_new_tokens=2, structure_mode="joint", return_dict_in_generate=True, min_new_tokens=2)
    assert actions_of(loaded.generate(torch.tensor([[9]]), config), 0).count(SHIFT) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"foo": 3}, "foo"),
        ({"structure_mode": "tree"}, "structure_mode='tree'"),
        ({"action_beam_size": 0}, "action_beam_size=0"),
        ({"action_beam_size": 2, "num_beams": 3}, "action_beam_size=2"),
        ({"action_beam_size": 2.5}, "action_beam_size=2.5"),
        ({"fast_track_size": -1}, "fast_track_size=-1"),
        ({"fast_track_size": "a"}, "fast_track_size='a'"),
        ({"close_tree": "no"}, "close_tree='no'"),
        ({"close_tree": False, "structure_mode": "marginal"}, "close_tree=False"),
        ({"synchronous": False}, "synchronous=False"),
        ({"cache_implementation": "static"}, "cache_implementation='static'"),
        ({"output_logits": True}, "output_logits"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"use_cache": False}, "use_cache"),
        ({"synced_gpus": True}, "synced_gpus"),
        ({"prompt_lookup_num_tokens": 2}, "assisted|stateful|offer greedy"),
        ({"penalty_alpha": 0.5, "top_k": 4}, "offer greedy"),
        ({"past_key_values": SyntacticCache(2)}, "past_key_values"),
        ({"context_sentence_ids": torch.tensor([[0, 0]])}, "context_sentence_ids"),
        ({"actions": torch.tensor([[3, 1, 1, 2]])}, "actions"),
        ({"word_ends": torch.tensor([[True, True]])}, "word_ends"),
        ({"structure_mode": "marginal", "word_ends": torch.tensor([[True, True]])}, "word_ends"),
        ({"watermarking_config": SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2])}, "SynthID"),
        ({"structure_mode": "marginal", "action_beam_size": 3, "past_key_values": SyntacticCache(2)}, "made with"),
        ({"structure_mode": "marginal", "use_cache": False, "past_key_values": SyntacticCache(2)}, "use_cache=False"),
    ],
)
def test_unsupported_options_are_refused(options: dict, message: str) -> None:
    """Nothing is silently ignored."""
    with pytest.raises(ValueError, match=message):
        generate(narrow_model("top_down"), [[9, 2]], **options)


# ------------------------------------------------------------------------------------------- processors and the end
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cleaner", ["renormalize_logits", "remove_invalid_values"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_processors_that_hide_infinities_do_not_allow_the_end(system: str, cleaner: str, options: dict) -> None:
    """They turn scores that are -inf everywhere into NaN, or into the lowest number."""
    torch.manual_seed(0)
    options = {**options, cleaner: True, "eos_token_id": EOS, "min_new_tokens": 4, "max_new_tokens": 6}
    output = generate(narrow_model(system), [[3, 4]], **options)
    assert not bool((output.sequences[:, 2:6] == EOS).any())


@pytest.mark.parametrize("system", SYSTEMS)
def test_processors_of_one_prompt_do_not_touch_another(system: str) -> None:
    """What is forbidden to one prompt changes neither texts nor scores of the others, nor its own in their company."""
    prompts = torch.tensor([[3, 4], [9, 5], [7, 7]])

    def forbidding(row: int) -> Any:
        return lambda number, ids: list(range(1, 12)) if prompts[row].tolist() == ids[:2].tolist() else list(range(12))

    for seed in range(4):
        model = narrow_model(system, seed=seed)
        options = {"eos_token_id": EOS, "num_beams": 3, "max_new_tokens": 4, "prefix_allowed_tokens_fn": forbidding(0)}
        together = generate(model, prompts, **options)
        for row in range(3):
            alone = generate(model, prompts[row : row + 1], **options)
            width = alone.sequences.shape[1]
            assert torch.equal(together.sequences[row, :width], alone.sequences[0])
            assert float(together.sequences_scores[row]) == pytest.approx(float(alone.sequences_scores), abs=1e-4)


def test_end_tokens_are_no_words() -> None:
    """Whatever the model thinks of them as words, the other words share it."""
    model = exact_model("top_down", vocab_size=6, nonterminals=["S"]).requires_grad_(False)
    distributions = []
    for boost in (0.0, 4.0):
        model.lm_head.bias[3] += boost
        search = model.word_search(None, torch.tensor([3]))
        state = search.begin(1, torch.device("cpu"))
        state, _ = search.commit(state, search.propose(state, torch.tensor([4])))
        assert float(search.machine.word_log_probs(state.pool, state.nodes)[0, 0].exp().sum()) == pytest.approx(1)
        distributions.append(search.next_token_log_probs(state)[0])
    assert torch.allclose(distributions[0], distributions[1], atol=1e-5)


def test_biases_on_the_end_count() -> None:
    """A processor that adds to the end token adds to the action that ends the sentence."""
    model = narrow_model("top_down")
    length = {}
    for bias in (-50.0, 0.0, 50.0):
        output = generate(model, [[3, 4]], eos_token_id=EOS, max_new_tokens=8, sequence_bias=[[[EOS], bias]])
        length[bias] = output.sequences.shape[1]
    assert length[-50.0] == 10 and length[50.0] == 3
    with pytest.raises(ValueError, match="exponential_decay_length_penalty.*marginal"):
        generate(model, [[3, 4]], exponential_decay_length_penalty=(1, 2.0))


def test_any_end_token_ends_a_sentence() -> None:
    """The one that the processors leave is written."""
    model = narrow_model("top_down")
    output = generate(model, [[3, 4]], eos_token_id=[0, 3], prefix_allowed_tokens_fn=lambda *_: [3])
    assert output.sequences.tolist() == [[3, 4, 3]]


def test_raised_scores_do_not_stop_the_search_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A live hypothesis may still win when a processor adds to its next word."""
    for seed in range(12):
        model = make_model("top_down", seed=seed, max_open_nonterminals=20, max_consecutive_nonterminals=None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        options = {"num_beams": 2, "action_beam_size": 30, "max_new_tokens": 2, "num_return_sequences": 2}
        options["sequence_bias"] = [[[5], 20.0], [[6], 20.0]]
        found = generate(model, [[3, 4]], **options)
        with monkeypatch.context() as patch:
            patch.setattr(FastTrackSearch, "_is_decided", never_early)
            expected = generate(model, [[3, 4]], **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.allclose(found.sequences_scores, expected.sequences_scores, atol=1e-4)
