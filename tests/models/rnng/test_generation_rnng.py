"""`generate` of RNNG: exact distributions and scores, valid trees, and everything users of transformers expect."""

import math
from typing import Any

import pytest
import torch

from hf_synlm import RNNGForCausalLM
from hf_synlm.search.labeled.fast_track import FastTrackSearch
from hf_synlm.search.state import SyntacticCache
from hf_synlm.trees.transitions import TransitionSystem
from tests.helpers.search_models import INSIDE, NARROW, actions_of, assert_fits, generate, rnng as make_model
from tests.models.rnng.test_rnng_fast_track import WIDE
from tests.reference.rnng_search import CONTINUE, EITHER, END, SHIFT, Grammar, log_sum_exp

EOS = 0
SYSTEMS = ["top_down", "in_order"]
OPTIONS: list[dict[str, Any]] = [{}, {"num_beams": 3, "num_return_sequences": 3}]
OPTIONS += [{"do_sample": True, "num_return_sequences": 4}, {"do_sample": True, "num_beams": 3}]


def exact_model(system: str, composition: str = "lstm", **fields: Any) -> RNNGForCausalLM:
    """A model that reads prompts with all their derivations."""
    return make_model(
        system, composition, scoring_num_beams=WIDE, action_beam_size=WIDE, **{"max_open_nonterminals": 3, **fields}
    )


def narrow_model(system: str, **fields: Any) -> RNNGForCausalLM:
    """A model that is fast."""
    return make_model(system, **{**NARROW, **fields})


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
            spans = rules.actions_to_spans(actions, [*Grammar(model, words).word_ends[:-1], True])
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


def one_more(grammar: Grammar) -> dict[tuple[int, tuple[int, ...]], float]:
    """log p(next word or the end, actions up to it | a prompt of one word), of words 1, 2 and 3."""
    prefixes, found = grammar.prefixes(1), {}
    marginal = log_sum_exp([score for score, _ in prefixes])
    for score, actions in grammar.weighted(prefixes, EITHER):
        for action, value in grammar.action_log_probs(actions, EITHER).items():
            if grammar.ends(actions, action):
                found[EOS, (*actions, action)] = score + value - marginal
            elif action == SHIFT:
                words = grammar.word_log_probs(actions).tolist()
                found |= {(word, (*actions, SHIFT)): score + value + words[word] - marginal for word in (1, 2, 3)}
    return found


@pytest.mark.parametrize("system", SYSTEMS)
def test_wide_beam_finds_the_best_sentences(system: str) -> None:
    """One more word or none: a very wide beam equals the enumeration of all words and derivations."""
    model = exact_model(system, vocab_size=4, nonterminals=["S"])
    prompt = [3]
    found_states = one_more(Grammar(model, prompt))
    best = {(3, EOS): max(score for (word, _), score in found_states.items() if word == EOS)}
    for word in (1, 2, 3):
        starts = [(score, actions) for (read, actions), score in found_states.items() if read == word]
        best[3, word] = Grammar(model, [3, word]).derivations(starts)[0][0]
    common = {"num_beams": 600, "num_return_sequences": 600, "max_new_tokens": 1}
    output = generate(model, [prompt], eos_token_id=EOS, length_penalty=0.0, **common)
    found: dict[tuple[int, ...], float] = {}
    for sequence, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True):
        found.setdefault(tuple(sequence), score)
    assert output.sequences_scores.tolist() == sorted(output.sequences_scores.tolist(), reverse=True)
    assert found.keys() >= best.keys()
    for key, score in best.items():
        assert found[key] == pytest.approx(score, abs=1e-4)


@pytest.mark.parametrize("system", SYSTEMS)
def test_close_tree_false_leaves_the_derivation_open(system: str) -> None:
    """The actions stop at the last word."""
    assert actions_of(generate(narrow_model(system), [[3, 4]], close_tree=False, num_beams=2), 0)[-1] == SHIFT


# ------------------------------------------------------------------------------------------------------------- sampling


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
    weights = one_more(Grammar(model, [3]))
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


@pytest.mark.parametrize("system", SYSTEMS)
def test_scores_sum_out_the_structure(system: str) -> None:
    """Per hypothesis, `scores` are log p(word | hypothesis) over all structural actions before the word."""
    model = exact_model(system)
    grammar = Grammar(model, [9])
    best = max(grammar.prefixes(1))
    for eos in (None, EOS):
        found = generate(model, [[9]], output_scores=True, max_new_tokens=1, eos_token_id=eos).scores[0][0]
        assert torch.allclose(found.exp(), grammar.next_word([best], eos).exp().float(), atol=1e-4)


# ------------------------------------------------------------------------------------------- processors and the end
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("cleaner", ["renormalize_logits", "remove_invalid_values"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_processors_that_hide_infinities_do_not_allow_the_end(system: str, cleaner: str, options: dict) -> None:
    """They turn scores that are -inf everywhere into NaN, or into the lowest number."""
    torch.manual_seed(0)
    options = {**options, cleaner: True, "eos_token_id": EOS, "min_new_tokens": 4, "max_new_tokens": 6}
    assert not bool((generate(narrow_model(system), [[3, 4]], **options).sequences[:, 2:6] == EOS).any())


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
            assert torch.equal(together.sequences[row, : alone.sequences.shape[1]], alone.sequences[0])
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
        seen = search.machine.look(state.pool, state.nodes)
        assert float(search.machine.vocabulary_log_probs(seen)[0, 0].exp().sum()) == pytest.approx(1)
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
    for seed in range(6):
        model = make_model("top_down", seed=seed, max_open_nonterminals=20, max_consecutive_nonterminals=None)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(3)
        options = {"num_beams": 2, "action_beam_size": 30, "max_new_tokens": 2, "num_return_sequences": 2}
        options["sequence_bias"] = [[[5], 20.0], [[6], 20.0]]
        found = generate(model, [[3, 4]], **options)
        with monkeypatch.context() as patch:
            patch.setattr(FastTrackSearch, "_is_decided", lambda self, aside, best, *_: torch.zeros_like(best).bool())
            expected = generate(model, [[3, 4]], **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert torch.allclose(found.sequences_scores, expected.sequences_scores, atol=1e-4)
