"""Belief updates: their definition, and every search against all derivations."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from hf_synlm.search.beliefs import renyi_divergence
from tests.helpers.refusals import refused
from tests.helpers.scoring_models import SEARCHING, model_and_tokenizer
from tests.helpers.search_models import gpst, padded, rnng, varied
from tests.models.tree_lm.test_modeling_tree_lm import tiny
from tests.reference.exhaustive_search import GEN, log_prob, prefix_derivations, run
from tests.reference.rnng_search import SHIFT, Grammar

WIDE = 400
ORDERS = (0.0, 0.5, 1.0, 2.0, 7.5, math.inf)
KINDS = ("old", "new")
TOKENS = [3, 7, 5, 4, 6, 3]


# ---- the definition
def plain(q: list[float], p: list[float], order: float) -> float:
    """D_a(q || p) of weights, term by term; of order 0 it is -log of p's mass where q is."""
    pairs = [(a / sum(q), b / sum(p)) for a, b in zip(q, p, strict=True)]
    pairs = [(a, b) for a, b in pairs if a > 0]
    if order == 1:
        return sum(a * math.log(a / b) for a, b in pairs)
    if order == math.inf:
        return math.log(max(a / b for a, b in pairs))
    return math.log(sum(a**order * b ** (1 - order) for a, b in pairs)) / (order - 1)


@pytest.mark.parametrize("order", ORDERS)
def test_divergences_are_their_sums(order: float) -> None:
    torch.manual_seed(0)
    q, p = torch.rand(20, 6, dtype=torch.float64), torch.rand(20, 6, dtype=torch.float64)
    q[:, 4:], p[:, 5] = 0.0, 0.0
    found = renyi_divergence(q.log(), p.log(), order)
    expected = [plain(*rows, order) for rows in zip(q.tolist(), p.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-12)
    assert torch.allclose(renyi_divergence((9 * q).log(), p.log() - 700, order), found)
    assert torch.allclose(renyi_divergence(q.log(), q.log(), order), torch.zeros(()).double())
    # Sums of parts never diverge more than the parts.
    merged = renyi_divergence(*(values.view(20, 3, 2).sum(2).log() for values in (q, p)), order)
    assert (merged <= found + 1e-12).all()
    assert not renyi_divergence(torch.full_like(q, -math.inf), p.log(), order).any()
    assert torch.allclose(renyi_divergence(q.log(), p.log(), order + 1e-12), found)
    more = q.masked_fill(p == 0, 1.0)  # all of it where p has nothing
    assert renyi_divergence(more.log(), p.log(), order).isinf().all() == (order >= 1)


# ---- against enumeration
class Derivation(NamedTuple):
    actions: tuple[int, ...]
    score: float
    own: list[float]
    """Log-probabilities of its tokens."""


def of_grammar(model: Any, ends: list[bool] | None) -> Callable[[int], list[Derivation]]:
    """All derivations of the first tokens, by the rules of RNNG and Tree LM."""
    grammar = Grammar(model, TOKENS, ends)

    def derivations(count: int) -> list[Derivation]:
        found = []
        for score, actions in grammar.prefixes(count):
            places = [place for place, action in enumerate(actions) if action == SHIFT]
            own = [float(grammar.word_log_probs(actions[:k])[TOKENS[number]]) for number, k in enumerate(places)]
            found.append(Derivation(actions, score, own))
        return found

    return derivations


def of_gpst(model: Any, _: Any) -> Callable[[int], list[Derivation]]:
    """All derivations of the first tokens of GPST."""

    def derivations(count: int) -> list[Derivation]:
        found = []
        for actions in prefix_derivations(count):
            words = run(model, TOKENS, actions)[1]
            own = [float(words[k, TOKENS[k]]) for k in range(count)]
            found.append(Derivation(actions, log_prob(model, TOKENS, actions), own))
        return found

    return derivations


def beginning(actions: tuple[int, ...], count: int, shift: int) -> tuple[int, ...]:
    """The actions up to so many tokens."""
    places = [place for place, action in enumerate(actions) if action == shift]
    return actions[: places[count - 1] + 1] if count else ()


def expected_updates(derivations: Callable, ends: list[bool], kind: str, order: float, shift: int) -> list[float]:
    """The belief update of every word at its last token, elsewhere 0."""
    values, first = [], 0
    for place, is_end in enumerate(ends):
        if not is_end:
            values.append(0.0)
            continue
        after = derivations(place + 1)
        q = [math.exp(one.score) for one in after]
        p = [math.exp(one.score - sum(one.own[first:])) for one in after]
        if kind == "old":
            before = derivations(first)
            p, sums = [math.exp(one.score) for one in before], dict.fromkeys((one.actions for one in before), 0.0)
            for one in after:
                sums[beginning(one.actions, first, shift)] += math.exp(one.score)
            q = list(sums.values())
        values.append(plain(q, p, order))
        first = place + 1
    return values


def opinionated(make: Callable[..., Any], scale: float, *args: Any, **fields: Any) -> Any:
    """A model whose words depend on the tree; freshly drawn ones hardly do."""
    model = make(*args, **fields)
    torch.manual_seed(5)
    return varied(model, scale)


RNNG = {"nonterminals": ["S"], "max_open_nonterminals": 2, "max_consecutive_nonterminals": 1}
MODELS: dict[str, Callable[[], Any]] = {
    "rnng": functools.partial(opinionated, rnng, 1.0, **RNNG, seed=3),
    "rnng, in-order": functools.partial(opinionated, rnng, 1.0, "in_order", **RNNG, seed=3),
    "tree lm": functools.partial(opinionated, tiny, 0.5, **RNNG),
    "tree lm, best-first": functools.partial(opinionated, tiny, 0.5, **RNNG, search_order="best_first"),
    "transformer grammar": functools.partial(opinionated, tiny, 0.5, **RNNG, structure_attention="stack_compose"),
    "tree lm, binary": functools.partial(opinionated, tiny, 0.5, nonterminals=["S"], structure_attention="binary"),
    "gpst": functools.partial(opinionated, gpst, 0.1),
}


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_beams_that_hold_all_derivations_are_exact(name: str) -> None:
    """Six tokens that are words, and pieces of words that constituents may cross; "new" is never less than "old"."""
    model = MODELS[name]()
    enumerate_all, shift = (of_gpst, GEN) if name == "gpst" else (of_grammar, SHIFT)
    model.config.action_beam_size = WIDE
    derivations = functools.cache(enumerate_all(model, None))
    assert len(derivations(len(TOKENS))) > 40
    for ends in ([True] * 6, [False, True, False, False, True, True]):
        for order in ORDERS:
            found = {}
            for kind in KINDS:
                given = kind, order, torch.tensor([ends])
                parsed = model.parse(torch.tensor([TOKENS]), num_beams=WIDE, belief_update=given)
                found[kind] = parsed.belief_update[0]
                expected = expected_updates(derivations, ends, kind, order, shift)
                assert found[kind].tolist() == pytest.approx(expected, abs=2e-4), (kind, order, ends)
                assert parsed.belief_cut.abs().max() < 1e-4
            assert name == "gpst" or (found["new"] >= found["old"] - 1e-5).all()  # GPST loses what its stack bars
        assert found["new"].max() > 0.01


# ---- properties
@pytest.mark.parametrize("kind", KINDS)
def test_the_probability_of_the_word_itself_does_not_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word that is less probable by one number under all derivations has the same belief update."""
    for name in ("rnng", "tree lm"):
        model = MODELS[name]()
        model.config.action_beam_size = WIDE
        machine, ids = model.stack_machine_class, torch.tensor([TOKENS])
        plain = model.parse(ids, num_beams=WIDE, belief_update=(kind, 1.0))
        with monkeypatch.context() as patch:
            own = machine.log_probs_of
            patch.setattr(machine, "log_probs_of", lambda *args, own=own, **options: own(*args, **options) - 4.0)
            rarer = model.parse(ids, num_beams=WIDE, belief_update=(kind, 1.0))
        assert torch.allclose(rarer.token_log_probs, plain.token_log_probs - 4.0, atol=1e-4)
        assert torch.allclose(rarer.belief_update, plain.belief_update, atol=1e-4)
        assert plain.belief_update.max() > 0.01


@pytest.mark.parametrize("name", SEARCHING)
def test_one_derivation_has_nothing_to_change(name: str) -> None:
    """Of the derivations before a word: with a beam of one, and at the first word."""
    model, _ = model_and_tokenizer(name)
    ids = torch.randint(8, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    for order in ORDERS:
        assert model.parse(ids, num_beams=1, belief_update=("old", order)).belief_update.abs().max() < 1e-6
        assert model.parse(ids, num_beams=4, belief_update=("old", order)).belief_update[:, 0].abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SEARCHING)
def test_beliefs_change_nothing_and_do_not_depend_on_the_batch(name: str, kind: str) -> None:
    """Beside what `parse` gives anyway, in padded batches whose rows begin alike, with words of several tokens."""
    model, _ = model_and_tokenizer(name)
    rows = [[9, 20, 31, 12, 25, 17, 9], [9, 20, 31, 12, 8], [30, 11, 9]]
    ends = [[True, False, True, True, False, False, True], [False, True, True, False, True], [False, False, True]]
    for left in (False, True):
        ids, mask = padded(rows, left, fill=0)
        flags = padded([[int(end) for end in row] for row in ends], left, fill=0)[0].bool()
        together = model.parse(ids, mask, num_beams=4, stepwise=True, belief_update=(kind, 1.0, flags))
        without = model.parse(ids, mask, num_beams=4, stepwise=True)
        assert torch.equal(together.token_log_probs, without.token_log_probs) and without.belief_update is None
        assert torch.equal(together.stepwise_log_probs, without.stepwise_log_probs)
        for row, (tokens, own) in enumerate(zip(rows, ends, strict=True)):
            alone = model.parse(torch.tensor([tokens]), num_beams=4, belief_update=(kind, 1.0, torch.tensor([own])))
            place = mask[row].bool()
            assert torch.allclose(together.belief_update[row, place], alone.belief_update[0], atol=1e-3)
            assert torch.allclose(together.belief_cut[row, place], alone.belief_cut[0], atol=1e-3)
            assert not alone.belief_update[0, ~torch.tensor(own)].any()
        assert together.belief_cut.min() >= 0 and together.belief_cut.max() <= 1
        assert not together.belief_update[~mask.bool()].any() and together.belief_update.isfinite().all()


def test_what_the_beam_drops_is_counted() -> None:
    """1 - the share of the weight of all candidates that the K kept ones have, over all tokens of a word."""
    model, ends = MODELS["rnng"](), torch.tensor([[True, True, False, True, False, True]])
    model.config.action_beam_size = WIDE
    search = model.word_search(2)
    search.keeps_scored, state = True, search.begin(1, torch.device("cpu"))
    shares, kept = [], 1.0
    for place, token in enumerate(TOKENS):
        chosen = search.propose(state, torch.tensor([token]))
        kept *= float((chosen.scores.logsumexp(1) - search.scored.after.logsumexp(1)).exp())
        shares.append(1 - kept if ends[0, place] else 0.0)
        kept = 1.0 if ends[0, place] else kept
        state, _ = search.commit(state, chosen)
    found = model.parse(torch.tensor([TOKENS]), num_beams=2, belief_update=("new", 1.0, ends)).belief_cut[0]
    assert found.tolist() == pytest.approx(shares, abs=1e-5) and max(shares) > 0.1


def test_beliefs_are_of_equally_many_rows_on_every_device() -> None:
    search = gpst().word_search(2)
    on_cpu = search.begin(1, torch.device("cpu"))
    elsewhere = dataclasses.replace(on_cpu, nodes=on_cpu.nodes.to("meta"))
    assert search.max_rows(on_cpu) < search.max_rows(elsewhere)
    search.keeps_scored = True
    assert search.max_rows(on_cpu) == search.max_rows(elsewhere)


def test_what_cannot_be_is_refused() -> None:
    ids = torch.tensor([[9, 8, 10]])
    for given in (("newest", 1.0), ("new", -1.0), ("old", math.nan)):
        with pytest.raises(ValueError, match=rf"belief_update is \('{given[0]}', {given[1]}\) \(--belief-update"):
            gpst().parse(ids, belief_update=given)
    with pytest.raises(ValueError, match="belief_update has shape"):
        gpst().parse(ids, belief_update=("new", 1.0, torch.ones(1, 2, dtype=torch.bool)))
    refused("word-synchronous", gpst().parse, ids, synchronous=False, belief_update=("new", 1.0))
    with pytest.raises(ValueError, match="neither stepwise probabilities nor belief updates"):
        rnng().parse(ids, method="particle", belief_update=("new", 1.0))
