"""The search of RNNG against enumeration and against the authors' procedure, one hypothesis at a time."""

import copy
from typing import Any

import pytest
import torch

from hf_synlm import RNNGConfig, RNNGForCausalLM
from hf_synlm.search.labeled import fast_track
from hf_synlm.trees.transitions import TransitionSystem
from tests.helpers.refusals import refused
from tests.helpers.search_models import INSIDE, assert_same, hypotheses, padded, rnng as make_model
from tests.reference.rnng_search import Grammar, log_sum_exp

SYSTEMS = [(system, composition) for system in ("top_down", "in_order") for composition in ("lstm", "attention")]
NORMALIZATIONS = ("search", "train")
WIDE = 5000


def parse(model: RNNGForCausalLM, ids: list[int] | torch.Tensor, width: int | None = None, **options: Any) -> Any:
    """All trees of the beam; `width` sets both beams."""
    ids = torch.tensor([ids]) if isinstance(ids, list) else ids
    if width is not None:
        options = {"num_beams": width, "action_beam_size": width, **options}
    return model.parse(ids, **{"num_return_sequences": options.get("num_beams", 1), **options})


# --------------------------------------------------------------------------------------------------------- enumeration
def check_exact(model: Any, tokens: list[int], normalization: str, ends: Any = None, width: int = WIDE) -> None:
    """n-best list, prefix marginals and next-word distributions with beams that hold everything."""
    grammar = Grammar(model, tokens, ends, normalization)
    prefixes = [grammar.prefixes(count) for count in range(len(tokens) + 1)]
    options = {} if ends is None else {"word_ends": torch.tensor([ends])}
    output = parse(model, tokens, width, normalization=normalization, stepwise=True, **options)
    exact = grammar.with_ends(grammar.derivations(prefixes[-1]))
    assert_same(hypotheses(output), exact)
    assert output.text_log_probs.item() == pytest.approx(log_sum_exp([score for score, _ in exact]), abs=1e-4)
    marginals = [log_sum_exp([score for score, _ in states]) for states in prefixes]
    assert output.token_log_probs[0].cumsum(0).tolist() == pytest.approx(marginals[1:], abs=1e-4)
    expected = torch.stack([grammar.next_word(states) for states in prefixes]).float()
    stepwise = expected[:-1].gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert torch.allclose(output.stepwise_log_probs[0], stepwise, atol=1e-4)
    wide = copy.deepcopy(model)
    wide.config.scoring_num_beams = wide.config.action_beam_size = width
    wide.config.normalization = normalization
    logits = wide(torch.tensor([tokens]), **options).logits[0]
    assert torch.allclose(logits.exp(), expected[1:].exp(), atol=1e-5)
    assert torch.allclose(logits.exp().sum(-1), torch.ones(len(tokens)), atol=1e-5)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_full_beams_are_exact(system: str, composition: str, normalization: str) -> None:
    """Two words: trees, scores, prefix probabilities and next-word probabilities equal the enumeration."""
    check_exact(make_model(system, composition), [3, 7], normalization)


@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_best_first_is_exact(system: str, composition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With full beams, and for the first word with any: the best K of all its derivations, from fewer states."""
    model = make_model(system, composition)
    model.config.search_order = "best_first"
    check_exact(model, [3, 7], "search")
    (scores,) = [sorted((score for score, _ in Grammar(model, [3], None, "search").prefixes(1)), reverse=True)]
    rows, push = [], model.stack_machine_class.push
    monkeypatch.setattr(
        model.stack_machine_class, "push", lambda *args: (rows.append(int(args[-1].sum())), push(*args))[1]
    )
    for beams in (1, 3):
        counts = []
        for order, slack in (("steps", None), ("best_first", None), ("best_first", 100), ("best_first", 0.01)):
            model.config.search_order, model.config.search_slack = order, slack
            rows.clear()
            found = parse(model, [3], num_beams=beams, action_beam_size=WIDE).token_log_probs.item()
            counts.append(sum(rows))
            if order == "best_first" and slack != 0.01:
                assert found == pytest.approx(log_sum_exp(scores[:beams]), abs=1e-5)
        assert counts[3] <= counts[2] == counts[1] <= counts[0]
    counts = []
    for model.config.search_order in ("steps", "best_first"):
        rows.clear()
        parse(model, [3, 7, 5, 4, 6], num_beams=2, action_beam_size=100)
        counts.append(sum(rows))
    assert counts[1] < counts[0] / 2


def test_slack_compares_with_the_best_word_of_all_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the state that knows the word best is an improbable one, whose word is left out without slack."""
    sizes = {"embedding_size": 16, "hidden_size": 16, "num_layers": 1, "nonterminals": ["NP", "S", "VP"]}
    torch.manual_seed(17)
    model = RNNGForCausalLM(RNNGConfig(vocab_size=40, search_order="best_first", search_slack=0.5, **sizes)).eval()
    for parameter in model.parameters():
        parameter.data = 0.6 * torch.randn_like(parameter)
    bounded = parse(model, [7, 20, 24, 37], num_beams=1, action_beam_size=60).token_log_probs

    def score_all(words: Any, predictor: torch.Tensor, base: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        return base + words.machine.log_probs_of(predictor, words.tokens, base > float("-inf"))

    monkeypatch.setattr(fast_track._GivenWords, "_scores_that_matter", score_all)
    scored = parse(model, [7, 20, 24, 37], num_beams=1, action_beam_size=60).token_log_probs
    assert torch.allclose(bounded, scored, atol=1e-5)


@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_full_beams_are_exact_for_three_words_and_one(system: str) -> None:
    """Three with one label less and few nonterminals in a row, so that all trees can be listed.

    Of one word, the in-order system has a tree without any constituent.
    """
    limit = 2 if system == "top_down" else 1
    few = make_model(system, nonterminals=["S"], max_consecutive_nonterminals=limit, seed=3)
    check_exact(few, [3, 7, 3], "search")
    model = make_model(system, max_consecutive_nonterminals=3)
    check_exact(model, [3], "search")
    trees = {actions for _, actions in hypotheses(parse(model, [3], WIDE))}
    assert ((1, 3) in trees) == (system == "in_order")


@pytest.mark.parametrize(("given", "normalization"), [(True, "search"), (False, "train")])
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_full_beams_are_exact_for_word_pieces(system: str, composition: str, given: bool, normalization: str) -> None:
    """Nothing but SHIFT inside a word, whether its edges are given or known by the ids of the pieces."""
    if given:
        ends = [False, True, True] if system == "top_down" else [False, True]
        check_exact(make_model(system, composition), [3, 7, 4][: len(ends)], normalization, ends)
    else:
        tokens = [INSIDE[0], 7, 4] if system == "top_down" else [INSIDE[0], 7]
        check_exact(make_model(system, composition, subwords=True), tokens, normalization)


@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_the_end_of_the_text_ends_a_word(system: str) -> None:
    """A text that stops inside a word has trees, and the word its pieces."""
    check_exact(make_model(system, subwords=True), [3, INSIDE[0]], "search")
    given = parse(make_model(system), [3, 4], WIDE, word_ends=torch.tensor([[True, False]]))
    assert_same(hypotheses(given), hypotheses(parse(make_model(system), [3, 4], WIDE)))


# ----------------------------------------------------------------------------------------------- the authors' procedure
SETTINGS = [(1, 1, 0), (1, 1, 1), (1, 4, 1), (3, 3, 0), (2, 6, 0), (2, 6, 1), (3, 8, 2), (4, 5, 3), (5, 20, 1)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_selection_is_that_of_the_authors(system: str, setting: tuple[int, int, int]) -> None:
    """Final beam and prefix marginals of random models equal the procedure on Python lists."""
    num_beams, size, track = setting
    options = {"num_beams": num_beams, "action_beam_size": size, "fast_track_size": track}
    for seed in range(2):
        model = make_model(system, seed=seed, max_open_nonterminals=5, max_consecutive_nonterminals=3)
        tokens = torch.randint(1, 12, (4 - seed,)).tolist()
        normalization = NORMALIZATIONS[seed % 2]
        beam, marginals = Grammar(model, tokens, None, normalization).search(*setting)
        output = parse(model, tokens, **options, normalization=normalization)
        assert len(hypotheses(output)) == len(beam)
        if beam:
            assert_same(hypotheses(output), beam)
        assert output.token_log_probs[0].cumsum(0).tolist() == pytest.approx(marginals, abs=1e-4)


@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_selection_with_word_pieces(system: str) -> None:
    """The same inside words of several pieces, with attention composition."""
    model = make_model(system, "attention", subwords=True, seed=5)
    tokens = [INSIDE[1], INSIDE[0], 3, 4, INSIDE[2], 8]
    beam, marginals = Grammar(model, tokens).search(3, 7, 1)
    output = parse(model, tokens, num_beams=3, action_beam_size=7, fast_track_size=1)
    assert_same(hypotheses(output), beam)
    assert output.token_log_probs[0].cumsum(0).tolist() == pytest.approx(marginals, abs=1e-4)


# ------------------------------------------------------------------------------------------- batches, prefixes, caches


# ----------------------------------------------------------------------------------------------- trees and their scores
@pytest.mark.parametrize("subwords", [False, True])
@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_trees_are_those_of_the_actions(system: str, composition: str, subwords: bool) -> None:
    """Spans and labels are what the transition system reads from the actions; "train" scores are `joint_log_prob`."""
    model = make_model(system, composition, subwords=subwords, max_consecutive_nonterminals=3)
    rows = [[3, 7, 2, 4, 9], [8], [INSIDE[0], INSIDE[1], 4]]
    ids, mask = padded(rows, left=True)
    output = parse(model, ids, num_beams=5, attention_mask=mask, normalization="train")
    rules = TransitionSystem(system, 2)
    for row, tokens in enumerate(rows):
        offset, ends = output.offsets[row], Grammar(model, tokens).word_ends
        for rank, (score, actions) in enumerate(hypotheses(output, row)):
            spans = [(label, i + offset, j + offset) for label, i, j in rules.actions_to_spans(actions, ends)]
            assert output.spans[row][rank] == [(i, j) for _, i, j in spans]
            assert output.labels[row][rank] == [model.config.nonterminals[label] for label, _, _ in spans]
            given = model(torch.tensor([tokens]), actions=torch.tensor([actions]))
            assert score == pytest.approx(float(given.joint_log_prob), abs=1e-4)


@pytest.mark.parametrize(("system", "composition"), SYSTEMS)
def test_long_sentences(system: str, composition: str) -> None:
    """40 words: finite, the same in a batch, and under "train" the score of the given tree."""
    model = make_model(system, composition, max_consecutive_nonterminals=None, max_open_nonterminals=100, seed=1)
    long, short = torch.randint(1, 12, (40,)).tolist(), [3, 4]
    ids, mask = padded([short, long], left=False)
    options = {"num_beams": 3, "action_beam_size": 12, "normalization": "train"}
    output = parse(model, ids, attention_mask=mask, **options)
    single = parse(model, long, **options)
    assert torch.isfinite(output.token_log_probs).all()
    assert_same(hypotheses(output, 1), hypotheses(single), 1e-3)
    assert_same(hypotheses(output, 0), hypotheses(parse(model, short, **options)))
    for score, actions in hypotheses(single):
        joint = model(torch.tensor([long]), actions=torch.tensor([actions])).joint_log_prob
        assert score == pytest.approx(float(joint), abs=2e-3)


@pytest.mark.parametrize("system", ["top_down", "in_order"])
def test_particle_filter(system: str) -> None:
    """Very many particles keep everything; few keep trees that are scored as in the beam; batches change nothing."""
    model = make_model(system)
    tokens = [3, 7]
    grammar = Grammar(model, tokens)
    expected = {actions: score for score, actions in grammar.with_ends(grammar.derivations())}
    many = model.parse(torch.tensor([tokens]), method="particle", num_particles=2000, num_return_sequences=10)
    assert [s for s, _ in hypotheses(many)] == pytest.approx(list(expected.values())[:10], abs=1e-4)
    few = model.parse(torch.tensor([tokens]), method="particle", num_particles=20, num_return_sequences=5)
    for score, actions in hypotheses(few):
        assert score == pytest.approx(expected[actions], abs=1e-4)
    rows = [[3, 7, 4, 1], [9], [5, 5]]
    ids, mask = padded(rows, left=True)
    batch = model.parse(ids, mask, method="particle", num_particles=50, num_return_sequences=5)
    for row, single in enumerate(rows):
        alone = model.parse(torch.tensor([single]), method="particle", num_particles=50, num_return_sequences=5)
        assert_same(hypotheses(batch, row), hypotheses(alone))
        columns = mask[row].bool()
        assert torch.allclose(batch.token_log_probs[row][columns], alone.token_log_probs[0], atol=1e-4)


# -------------------------------------------------------------------------------------------------------- other inputs


def test_wrong_inputs_are_refused() -> None:
    """Messages name the value and the remedy."""
    model = make_model()
    ids = torch.tensor([[3, 4, 9]])
    cases: list[tuple[dict[str, Any], str]] = [
        ({"action_beam_size": 2.5}, "action_beam_size=2.5"),
        ({"num_beams": 4, "action_beam_size": 3}, "action_beam_size=3 is smaller than num_beams=4"),
        ({"fast_track_size": -1}, "fast_track_size=-1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences=3"),
        *(({"num_return_sequences": number}, f"num_return_sequences={number}") for number in (0, 1.5, True)),
        *(({"normalization": name}, f"normalization '{name}'") for name in ("none", "")),
        ({"method": "chart"}, "method 'chart'"),
        ({"method": "particle", "num_particles": 0}, "num_particles=0"),
    ]
    for options, message in cases:
        refused(message, model.parse, ids, **options)


# ------------------------------------------------------------------------------------------------- known corner cases
def test_a_begin_token_inside_a_text_is_a_word_in_every_split() -> None:
    """Only at the beginning of a text does the begin token stand for it."""
    model = make_model(bos_token_id=2)
    ids = torch.tensor([[5, 7, 2, 8, 9]])
    whole = model(ids).logits
    first = model(ids[:, :2], use_cache=True)
    second = model(ids[:, 2:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-5)


def test_word_ends_may_be_given_for_a_part_only() -> None:
    """For the rest counts what the model knows of its pieces."""
    model = make_model(subwords=True)
    ids = torch.tensor([[INSIDE[0], 4, INSIDE[1], 5, 6]])
    ends = model.model.word_ends_of(ids)
    whole = model(ids).logits
    first = model(ids[:, :2], word_ends=ends[:, :2], use_cache=True)
    second = model(ids[:, 2:], past_key_values=first.past_key_values)
    assert torch.allclose(torch.cat([first.logits, second.logits], 1), whole, atol=1e-5)


def test_brackets_of_pieces_name_words() -> None:
    """What the model knows of its pieces is in the output, too."""
    output = make_model(subwords=True).parse(torch.tensor([[INSIDE[0], 4, 5]]))
    assert output.word_ends == [[2, 3]]
    text = output.brackets(["ab", "c"])
    assert text.replace("(", " ( ").replace(")", " ) ").split()[-1] == ")" and " ab" in text and " c)" in text


def test_narrow_action_beams_narrow_the_word_beam() -> None:
    """Nobody who asks for a narrow action beam has to ask for a word beam that fits."""
    model, ids = make_model(), torch.tensor([[3, 4]])
    narrow = model.parse(ids, action_beam_size=3)
    assert torch.equal(narrow.log_probs, model.parse(ids, num_beams=3, action_beam_size=3).log_probs)
    for mode in ("joint", "marginal"):
        assert model.generate(ids, action_beam_size=3, structure_mode=mode, max_new_tokens=2).shape[1] >= 2


@pytest.mark.parametrize(("num_tokens", "longest"), [(5, 100), (30, 150)])
def test_length_of_a_derivation_is_bounded(num_tokens: int, longest: int) -> None:
    """At the end of a sentence an in-order model that always opens a constituent stops at the authors' length."""
    model = make_model("in_order", max_consecutive_nonterminals=1000, nonterminals=["S"])
    with torch.no_grad():
        model.action_head.bias[model.config.system.first_nonterminal] += 50.0
    actions = model.parse(torch.full((1, num_tokens), 3), num_beams=1, action_beam_size=2).actions
    assert longest - 8 < int((actions > 0).sum()) <= longest
