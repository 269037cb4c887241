"""The search against enumeration, a one-action-at-a-time beam, and the authors' beams."""

import math
from typing import Any

import pytest
import torch

from hf_synlm import GPSTForCausalLM
from hf_synlm.conversion import convert_state_dict
from hf_synlm.search import synchronous
from hf_synlm.search.action_beam import read_by_actions
from hf_synlm.search.parsing import marginal_logits, parse_with_search
from hf_synlm.search.token_head import PackedTokenHead, TokenHead
from tests.helpers.goldens import read_case
from tests.helpers.refusals import refused
from tests.helpers.search_models import gpst, hypotheses, padded
from tests.reference import exhaustive_search as reference
from tests.reference.trees import all_gen_comp_sequences


@pytest.fixture
def model() -> GPSTForCausalLM:
    """A tiny model."""
    return gpst()


def parse(model: GPSTForCausalLM, ids: Any, num_beams: int, mask: Any = None, **kwargs: Any) -> Any:
    """All trees of the beam."""
    if not kwargs.pop("synchronous", True):
        kwargs["read_words"] = read_by_actions
    ids = torch.tensor([ids]) if isinstance(ids, list) else ids
    return parse_with_search(model.word_search(num_beams), ids, mask, num_return_sequences=num_beams, **kwargs)


# ---------------------------------------------------------------------------------------------------- authors' beams
@pytest.fixture(scope="module", params=["08_beam", "09_beam_atoms"])
def golden(request: pytest.FixtureRequest) -> tuple[GPSTForCausalLM, dict]:
    """A model of the authors and what their search found."""
    state, _, meta = read_case(f"gpst/{request.param}")
    return convert_state_dict("gpst", state, meta).eval(), meta


def golden_word_ends(sentence: dict) -> torch.Tensor | None:
    """Flags of the last pieces from the authors' (first, last) spans of words with several pieces."""
    if not sentence["atom_spans"]:
        return None
    ends = torch.ones(1, len(sentence["ids"]), dtype=torch.bool)
    for first, last in sentence["atom_spans"]:
        ends[0, first:last] = False
    return ends


def check_golden(output: Any, row: int, beam: dict) -> None:
    """The n-best list of one sentence."""
    found, expected = hypotheses(output, row), beam["hypotheses"]
    assert ["".join("SR"[a] for a in actions) for _, actions in found] == [h["actions"] for h in expected]
    assert [score for score, _ in found] == pytest.approx([h["log_prob"] for h in expected], abs=1e-4)
    for spans, hypothesis in zip(output.spans[row], expected, strict=True):
        offset = output.offsets[row]
        shifted = [(i - offset, j - offset) for i, j in spans]
        assert shifted == [(i, j + 1) for i, j in hypothesis["post_order_spans"] if i < j]


@pytest.mark.parametrize("num_beams", [1, 2, 5, 20])
def test_goldens_one_by_one(golden: tuple[GPSTForCausalLM, dict], num_beams: int) -> None:
    """n-best lists, trees, scores and prefix marginals equal those of the authors' search."""
    model, meta = golden
    for sentence in meta["sentences"]:
        beam = sentence["beams"][str(num_beams)]
        output = parse(model, sentence["ids"], num_beams, word_ends=golden_word_ends(sentence))
        check_golden(output, 0, beam)
        marginals = output.token_log_probs[0].cumsum(0)
        assert marginals.tolist() == pytest.approx(beam["prefix_log_marginal"], abs=1e-4)


# ------------------------------------------------------------------------------------------------------ enumeration
@pytest.mark.parametrize("surrogate", [True, False])
def test_wide_beam_is_exact(surrogate: bool) -> None:
    """A beam wider than the number of derivations finds all of them, with the scores of a pass without caches."""
    model = gpst(surrogate=surrogate)
    tokens = [9, 12, 9, 30, 5]
    output = parse(model, tokens, 64)
    found = {actions: score for score, actions in hypotheses(output)}
    expected = {actions: reference.log_prob(model, tokens, actions) for actions in reference.complete_derivations(5)}
    assert found.keys() == expected.keys() and len(expected) == 14
    for actions, score in expected.items():
        assert found[actions] == pytest.approx(score, abs=1e-4)
    prefixes = [
        reference.log_sum_exp(
            [reference.log_prob(model, tokens, actions) for actions in reference.prefix_derivations(count)]
        )
        for count in range(1, 6)
    ]
    assert output.token_log_probs[0].cumsum(0).tolist() == pytest.approx(prefixes, abs=1e-4)


@pytest.mark.parametrize("gen_bias", [0.0, 4.0, 9.0])
@pytest.mark.parametrize("num_beams", [1, 2, 3, 7])
def test_selection_equals_one_action_at_a_time(num_beams: int, gen_bias: float) -> None:
    """Blocks of several levels (and of several blocks per word, with deep stacks) change nothing."""
    model = gpst(gen_bias=gen_bias)
    tokens = [9, 12, 9, 30, 5, 21, 8]
    output = parse(model, tokens, num_beams)
    beam, marginals = reference.synchronous_beam(model, tokens, num_beams)
    assert [actions for _, actions in hypotheses(output)] == [actions for _, actions in beam]
    assert [score for score, _ in hypotheses(output)] == pytest.approx([score for score, _ in beam], abs=1e-4)
    assert output.token_log_probs[0].cumsum(0).tolist() == pytest.approx(marginals, abs=1e-4)


def test_deep_stacks_rescore() -> None:
    """Long sentences with deep stacks, many blocks and compactions still score as a pass without caches."""
    model = gpst(gen_bias=8.0)
    tokens = torch.randint(5, 40, (60,)).tolist()
    for num_beams in (1, 20):
        output = parse(model, tokens, num_beams)
        assert output.stack_depth.max() > 8
        for score, actions in hypotheses(output)[::5]:
            assert score == pytest.approx(reference.log_prob(model, tokens, actions), abs=1e-3)


def test_next_token_distribution_is_exact(model: GPSTForCausalLM) -> None:
    """With a wide beam the logits are the exact marginals; stepwise scores read them at the observed token."""
    tokens = [9, 12, 9, 30]
    logits, _ = marginal_logits(model.word_search(64), torch.tensor([[1, *tokens]]), bos_token_id=1)
    for count in range(5):
        assert torch.allclose(logits[0, count], reference.next_word_log_probs(model, tokens[:count]), atol=1e-4)
    stepwise = parse(model, tokens, 64, stepwise=True).stepwise_log_probs
    expected = logits[0, :4].gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    assert torch.allclose(stepwise[0], expected, atol=1e-5)


def test_negligible_successors_change_nothing() -> None:
    """Very deep stacks: leaving out successors below exp(-25) of the mass saves rows, not probability."""
    search = gpst(gen_bias=12.0).word_search(2)
    state = search.begin(2, torch.device("cpu"))
    with torch.no_grad():
        for token in torch.randint(5, 40, (30, 2)):
            state, _ = search.commit(state, search.propose(state, token))
        full = search.expand(state)
        state.block = full
        full.vocabulary_log_probs = search.vocabulary_log_probs(state, full.nodes)
        exact = search.next_token_log_probs(state)
        state.block = None
        assert torch.allclose(search.next_token_log_probs(state), exact, atol=1e-5)
    assert state.block.nodes.shape[1] < full.nodes.shape[1]


def test_beam_statistics(model: GPSTForCausalLM) -> None:
    """Entropy, actions per word and stack depth agree with an enumeration of the posterior."""
    tokens = [9, 12, 9, 30]
    output = parse(model, tokens, 64)
    for count in range(1, 5):
        prefixes = list(reference.prefix_derivations(count))
        scores = torch.tensor([reference.log_prob(model, tokens, actions) for actions in prefixes])
        posterior = scores.softmax(0)
        entropy = -(posterior * posterior.log()).sum()
        depth = sum(p * reference.stack_depth(actions) for p, actions in zip(posterior, prefixes, strict=True))
        before = [
            len(actions) - 2 - max((t for t, a in enumerate(actions[:-1]) if a == 0), default=-1)
            for actions in prefixes
        ]
        structural = sum(p * n for p, n in zip(posterior, before, strict=True))
        assert float(output.beam_entropy[0, count - 1]) == pytest.approx(float(entropy), abs=1e-4)
        assert float(output.stack_depth[0, count - 1]) == pytest.approx(float(depth), abs=1e-4)
        assert float(output.num_actions[0, count - 1]) == pytest.approx(float(structural), abs=1e-4)


def test_word_ends_admit_exactly_the_trees_that_keep_words(model: GPSTForCausalLM) -> None:
    """All derivations that cross no word, and no other."""
    tokens, ends = [9, 12, 9, 30, 5, 8], [False, True, True, False, False, True]
    output = parse(model, tokens, 64, word_ends=torch.tensor([ends]))
    expected = set(map(tuple, all_gen_comp_sequences(6, ends)))
    assert {actions for _, actions in hypotheses(output)} == expected
    assert output.brackets(["a", "b", "c"]) in {"((a b) c)", "(a (b c))"}
    unfinished = parse(model, tokens, 64, word_ends=torch.tensor([[*ends[:-1], False]]))
    assert {actions for _, actions in hypotheses(unfinished)} == expected


def test_action_beam(model: GPSTForCausalLM) -> None:
    """Wide enough, the asynchronous beam finds all derivations; its scores renormalize forced words."""
    tokens = [9, 12, 9, 30, 5]
    output = parse(model, tokens, 64, synchronous=False)
    found = {actions: score for score, actions in hypotheses(output)}
    assert found.keys() == set(reference.complete_derivations(5))
    for actions, score in found.items():
        assert score == pytest.approx(reference.log_prob(model, tokens, actions, renormalize=True), abs=1e-4)
    ids, mask = padded([tokens, [9], [8, 30]], left=True)
    batch = parse(model, ids, 6, mask, synchronous=False)
    for row, single in enumerate([tokens, [9], [8, 30]]):
        expected = hypotheses(parse(model, single, 6, synchronous=False))
        assert [a for _, a in hypotheses(batch, row)] == [a for _, a in expected]
        assert [s for s, _ in hypotheses(batch, row)] == pytest.approx([s for s, _ in expected], abs=1e-4)


def test_action_beam_that_is_wider_than_there_are_trees(model: GPSTForCausalLM) -> None:
    """Places of the beam that hold nothing in a short text do not read on while a longer one fills them."""
    rows = [[9, 12, 9, 30, 5], [9, 12, 9, 30], [8]]
    ids, mask = padded(rows, left=False)
    for num_beams in (7, 20):
        batch = parse(model, ids, num_beams, mask, synchronous=False, word_ends=mask.bool())
        for row, tokens in enumerate(rows):
            single = parse(model, tokens, num_beams, synchronous=False, word_ends=torch.ones(1, len(tokens)).bool())
            assert [a for _, a in hypotheses(batch, row)] == [a for _, a in hypotheses(single)]


# ------------------------------------------------------------------------------------------- batches, prefixes, caches


def test_prefixes_are_read_once(model: GPSTForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences that begin alike, end early or are equal share a beam; numbers and trees are those one by one."""
    rows = [[9, 12, 9, 30, 5], [9, 12, 7, 30], [9, 12], [9, 12, 9, 30, 5], [4, 12, 9]]
    ids, mask = padded(rows, left=False)
    ends = torch.tensor([[token == 9 for token in row] for row in ids.tolist()])
    sizes = []
    propose = synchronous.SynchronousSearch.propose
    monkeypatch.setattr(
        synchronous.SynchronousSearch, "propose",
        lambda self, state, *args: sizes.append(state.pool.batch_size) or propose(self, state, *args),
    )  # fmt: skip
    for options in ({}, {"stepwise": True, "lexical": True}, {"word_ends": ends}):
        sizes.clear()
        output = parse(model, ids, 4, mask, **options)
        assert sizes == [2, 2 if "word_ends" not in options else 3, 4, 4, 4]
        for number, row in enumerate(rows):
            alone = options | ({"word_ends": ends[number, None, : len(row)]} if "word_ends" in options else {})
            single = parse(model, row, 4, **alone)
            assert [a for _, a in hypotheses(output, number)] == [a for _, a in hypotheses(single)]
            torch.testing.assert_close(output.log_probs[number, : single.log_probs.shape[1]], single.log_probs[0])
            for name in ("token_log_probs", "beam_entropy", "stack_depth", "stepwise_log_probs", "lexical_log_probs"):
                if getattr(single, name) is not None:
                    torch.testing.assert_close(getattr(output, name)[number, : len(row)], getattr(single, name)[0])


def test_one_word_and_empty_texts(model: GPSTForCausalLM) -> None:
    """A lone token is its own tree; a lone begin token is the empty text."""
    output = parse(model, [9], 3)
    assert hypotheses(output) == [(pytest.approx(reference.log_prob(model, [9], (0,)), abs=1e-5), (0,))]
    assert output.spans == [[[]]]
    empty = parse(model, [1], 3, bos_token_id=1)
    assert empty.log_probs[0, 0] == 0 and empty.spans == [[[]]] and empty.actions.shape == (1, 3, 0)


def test_wrong_inputs_are_refused(model: GPSTForCausalLM) -> None:
    """Messages name the value and the remedy."""
    refused("65 tokens does not fit the 64 positions", parse, model, [9] * 65, 2)
    refused("only context", parse, model, [9, 9], 2, context_sentence_ids=torch.tensor([[1, 1]]))
    for context in ([0, 1, 0], [2, 1, 0], [-1, 0, 0]):
        refused("must be 1, 2", parse, model, [9, 9, 9], 2, context_sentence_ids=torch.tensor([context]))


def test_context_rows_are_independent(model: GPSTForCausalLM) -> None:
    """Contexts of different lengths in one batch, one of them empty, equal single rows."""
    rows = [([11, 12, 13, 14, 15], [1, 1, 2, 2, 2]), ([21], [1]), ([], [])]
    texts = [[9, 12, 9], [30, 5], [8, 9, 10, 11]]
    full = [context + text for (context, _), text in zip(rows, texts, strict=True)]
    ids, mask = padded(full, left=True)
    numbers = [sentences + [0] * len(text) for (_, sentences), text in zip(rows, texts, strict=True)]
    context, _ = padded(numbers, left=True, fill=0)
    output = parse(model, ids, 4, mask, context_sentence_ids=context)
    for row, tokens in enumerate(full):
        single = parse(model, tokens, 4, context_sentence_ids=torch.tensor([numbers[row]]))
        assert [a for _, a in hypotheses(output, row)] == [a for _, a in hypotheses(single)]
        assert [s for s, _ in hypotheses(output, row)] == pytest.approx([s for s, _ in hypotheses(single)], abs=1e-4)
    plain = parse(model, texts[2], 4)
    assert [s for s, _ in hypotheses(output, 2)] == pytest.approx([s for s, _ in hypotheses(plain)], abs=1e-4)


@pytest.mark.parametrize("change", ["hook", "other layer", "autocast"])
def test_bounds_spare_words(monkeypatch: pytest.MonkeyPatch, change: str) -> None:
    """Of large vocabularies fewer words are scored, with the same n-best lists; layers that do more are called."""
    scored: list[int] = []
    log_probs = TokenHead.log_probs
    monkeypatch.setattr(TokenHead, "log_probs", lambda *args: scored.append(len(args[1])) or log_probs(*args))
    model = gpst(vocab_size=1 << 16, gen_bias=2.0)
    ids, mask = padded([[9, 12, 9, 30, 5, 21, 8, 33], [7, 7, 22], [5, 31, 6, 6, 18]], left=True)
    found = parse(model, ids, 20, mask)
    number = sum(scored)
    scored.clear()
    if change == "hook":
        model.lm_head.register_forward_hook(lambda layer, given, result: 1.0 * result)
    elif change == "other layer":
        model.lm_head = torch.nn.Sequential(model.lm_head, torch.nn.Identity())
    with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
        expected = parse(model, ids, 20, mask)
    assert 0 < number < 0.8 * sum(scored)
    if change != "autocast":
        assert found.spans == expected.spans
        assert torch.allclose(found.log_probs, expected.log_probs, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("excluded", [None, [3, 17]])
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_bounds_of_words(bias: bool, excluded: list[int] | None, scale: float) -> None:
    """Bounds are not below the log-probabilities, and close to them where the logits of rare words differ little."""
    layer = torch.nn.Linear(8, 64, bias=bias).requires_grad_(False)
    layer.weight *= scale
    special = None if excluded is None else torch.tensor(excluded)
    head, features, words = PackedTokenHead(layer, special), torch.randn(2, 30, 8), torch.tensor([5, 60])
    exact = head.log_probs(features.flatten(0, 1), words.repeat_interleave(30)).view(2, 30)
    logits = layer(features)
    if excluded is not None:
        logits[..., excluded] = -math.inf
    assert torch.allclose(exact, logits.log_softmax(-1)[[0, 1], :, words], atol=1e-5)
    assert torch.allclose(TokenHead(layer, 64, special).logits(features), logits, atol=1e-5)
    bound = head.bound(features.flatten(0, 1), words.repeat_interleave(30)).view(2, 30)
    assert (bound >= exact).all()
    if scale == 0.1:
        assert (bound - exact).max() < 0.05


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_bounds_hold_despite_rounding(dtype: torch.dtype, scale: float) -> None:
    """Many words with nearly equal logits, huge logits, and more words than a float16 can count."""
    layer = torch.nn.Linear(16, 70000, bias=False, dtype=dtype).requires_grad_(False)
    layer.weight *= scale
    layer.weight += 1.0
    head, features, words = PackedTokenHead(layer), torch.randn(40, 16, dtype=dtype), torch.full((40,), 60000)
    exact = head.log_probs(features, words)
    bound = head.bound(features, words)
    assert not len(head.bound(features[:0], words[:0]))
    assert torch.isfinite(bound).all() and (bound >= exact).all()


def test_length_limit_counts_words_per_row(model: GPSTForCausalLM) -> None:
    """Begin tokens and padding take no position, rows are counted on their own."""
    limit = model.config.max_position_embeddings
    search = model.word_search(2)
    begun = torch.tensor([[1] + [9] * limit])
    full, _ = marginal_logits(search, begun, bos_token_id=1, logits_to_keep=1)
    assert torch.isfinite(full).all()
    refused(f"{limit + 1} tokens", marginal_logits, search, torch.tensor([[9] * (limit + 1)]), bos_token_id=1)
    first = torch.tensor([[9] * (limit - 2), [0] * (limit - 2)])
    _, cache = marginal_logits(search, first, (first > 0).long(), logits_to_keep=1)
    second, mask = torch.tensor([[9, 9, 0, 0], [9, 9, 9, 9]]), torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    marginal_logits(search, second, mask, cache=cache, logits_to_keep=1)
    refused(f"{limit + 1} tokens", marginal_logits, search, second[:, :1], cache=cache)
