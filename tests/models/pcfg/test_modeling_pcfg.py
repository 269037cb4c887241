"""PCFG: charts, prefixes, trees and samples against sums over all bracketings; what a grammar cannot do."""

import itertools
import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.models.pcfg import trees
from hf_synlm.models.pcfg.inside import Grammar, inside
from hf_synlm.models.pcfg.prefix import prefix_log_probs, read_sentences
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules, SparseRules
from tests.helpers.recurrent_models import gradients
from tests.helpers.refusals import raised, refused
from tests.reference.pcfg import all_tree_probs, span_posteriors

PAD, BOS, EOS, WORDS = 0, 1, 2, range(3, 11)
_ENCODER = {"encoder_embedding_size": 7, "encoder_hidden_size": 5}
# Name -> fields of the configuration.
PCFGS: dict[str, dict[str, Any]] = {
    "pcfg": {},
    "pcfg, compound": {"latent_size": 4, "num_prior_samples": 3, **_ENCODER},
    "pcfg, tensor": {"grammar": "tensor", "rank": 6, "init": "default"},
    "pcfg, tensor_shared": {"grammar": "tensor_shared", "rank": 6},
    "pcfg, simple": {"grammar": "simple"},
    "pcfg, simple compound": {"grammar": "simple", "latent_size": 4, **_ENCODER},
    "pcfg, sparse": {"grammar": "sparse", "num_rules": 4 * 9 * 9},
}
every_grammar = pytest.mark.parametrize("name", PCFGS)
KINDS = ("dense", "tensor", "simple", "sparse")
every_kind = pytest.mark.parametrize("kind", KINDS)


def tiny(cls: Any = PCFGForCausalLM, **changes: Any) -> Any:
    """A grammar with random weights, in evaluation mode."""
    torch.manual_seed(1)
    sizes = {"vocab_size": 11, "num_nonterminals": 4, "num_preterminals": 5, "symbol_size": 8}
    special = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    model = cls(PCFGConfig(**{**sizes, **special, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.8, 0.8)
    return model.eval()


def random_grammar(kind: str, num_words: int = 5, seed: int = 1) -> tuple[Grammar, Tensor]:
    """A grammar of 3 nonterminals and 4 preterminals in float64, and its table of rules."""
    torch.manual_seed(seed)
    double = {"dtype": torch.float64}
    root, emission = torch.randn(3, **double).softmax(0), torch.randn(4, num_words, **double).log_softmax(1)
    if kind in ("dense", "sparse"):
        rules: Any = listed(kind, torch.randn(3, 49, **double).mul(2).softmax(1).view(3, 7, 7))
    else:
        rank = 3 if kind == "simple" else 5
        head = None if kind == "simple" else torch.randn(3, rank, **double).softmax(1)
        rules = LowRankRules(head, *(torch.randn(7, rank, **double).mul(2).softmax(0) for _ in range(2)))
    return Grammar(root, emission, rules), cube(rules)


def cube(rules: Any) -> Tensor:
    """The table of a grammar's rules."""
    if not isinstance(rules, SparseRules):
        return rules.table()
    table = rules.log_probs.new_zeros(rules.size, rules.num_symbols, rules.num_symbols)
    return table.index_put(tuple(rules.rules), rules.log_probs.exp())


def listed(kind: str, table: Tensor) -> Any:
    """A table as it is, or half of its rules as a list."""
    if kind == "dense":
        return DenseRules(table)
    table = table * (table > table.flatten(1).median(1).values[:, None, None])
    table = table / table.sum((1, 2), keepdim=True)
    rules = table.nonzero().t().contiguous()
    return SparseRules(rules, table[tuple(rules)].log(), len(table), table.shape[1] - len(table))


def stack(grammars: list[Grammar]) -> Grammar:
    """One grammar for every sentence."""
    root, emission = (torch.stack([getattr(one, name) for one in grammars]) for name in ("root", "emission"))
    rules = grammars[0].rules
    names = ("rule",) if isinstance(rules, DenseRules) else ("head", "left", "right")
    parts = [[getattr(one.rules, name) for one in grammars] for name in names]
    return Grammar(root, emission, type(rules)(*(None if part[0] is None else torch.stack(part) for part in parts)))


def derivation_log_prob(grammar: Grammar, table: Tensor, words: list[int], tree: trees.Derivation) -> float:
    """log p of a derivation, rule by rule."""
    size = len(grammar.root)
    symbols = dict(zip(tree.spans, tree.nonterminals, strict=True))
    symbols |= {(i, i + 1): size + tag for i, tag in enumerate(tree.preterminals)}
    total = grammar.root[symbols[0, len(words)]].log()
    for i, j in tree.spans:
        (split,) = (k for k in range(i + 1, j) if (i, k) in symbols and (k, j) in symbols)
        total = total + table[symbols[i, j], symbols[i, split], symbols[split, j]].log()
    return (total + sum(grammar.emission[tag, word] for tag, word in zip(tree.preterminals, words, strict=True))).item()


# -------------------------------------------------------------------------------------------------- all bracketings
@every_kind
def test_charts_and_trees_equal_sums_over_all_bracketings(kind: str) -> None:
    """Rows of all lengths in one batch, behind whose ends anything may stand."""
    grammar, table = random_grammar(kind)
    lengths = torch.tensor([7, 2, 5, 3, 6, 4])
    ids = torch.randint(5, (len(lengths), 7))
    log_emission = grammar.of_words(ids)
    log_probs, posteriors = trees.span_posteriors(grammar, log_emission, lengths)
    best = trees.best_trees(posteriors, lengths)
    scores = trees.tree_log_probs(grammar, log_emission, lengths, best)
    derivations, viterbi = trees.viterbi(grammar, log_emission, lengths)
    for row, size in enumerate(lengths.tolist()):
        words = ids[row, :size].tolist()
        probs = all_tree_probs(grammar.root, table, grammar.emission.exp(), words)
        expected = span_posteriors(probs, size)
        close = {"atol": 1e-10, "rtol": 0.0}
        assert log_probs[row].item() == pytest.approx(math.log(math.fsum(probs.values())), abs=1e-10)
        torch.testing.assert_close(posteriors[row, : size + 1, : size + 1], expected, **close)
        assert not posteriors[row, :, size + 1 :].any()
        risks = {spans: sum(expected[span].item() for span in spans) for spans in probs}
        assert risks[tuple(best[row])] == pytest.approx(max(risks.values()), abs=1e-10)
        assert scores[row].item() == pytest.approx(math.log(probs[tuple(best[row])]), abs=1e-10)
        # Bracketings can tie exactly, so that the best one is a matter of rounding.
        highest = all_tree_probs(grammar.root, table, grammar.emission.exp(), words, best=True)
        assert viterbi[row].item() == pytest.approx(math.log(max(highest.values())), abs=1e-10)
        assert math.log(highest[tuple(derivations[row].spans)]) == pytest.approx(viterbi[row].item(), abs=1e-10)
        found = derivation_log_prob(grammar, table, words, derivations[row])
        assert found == pytest.approx(viterbi[row].item(), abs=1e-10)


def test_viterbi_takes_the_smallest_split_at_ties() -> None:
    flat = Grammar(torch.ones(3), torch.zeros(4, 5), DenseRules(torch.ones(3, 7, 7)))
    derivations, _ = trees.viterbi(flat, torch.zeros(2, 5, 4), torch.tensor([5, 3]))
    assert [tree.spans for tree in derivations] == [[(3, 5), (2, 5), (1, 5), (0, 5)], [(1, 3), (0, 3)]]
    assert not any(any(tree.nonterminals + tree.preterminals) for tree in derivations)


@every_kind
def test_all_sentences_have_the_probability_1(kind: str) -> None:
    """Of a grammar whose derivations surely end; those that begin with a word have the probability of this prefix."""
    grammar, table = random_grammar(kind, num_words=2)
    few = torch.tensor([0.03 if kind in ("dense", "sparse") else 0.001] * 3 + [1.0] * 4, dtype=torch.float64)
    if kind in ("dense", "sparse"):
        table = table * few[:, None] * few
        grammar.rules = listed(kind, table / table.sum((1, 2), keepdim=True))
    else:
        sides = [side * few[:, None] for side in (grammar.rules.left, grammar.rules.right)]
        grammar.rules = LowRankRules(grammar.rules.head, *(side / side.sum(0) for side in sides))
    total, first = 0.0, torch.zeros(2, dtype=torch.float64)
    for size in range(2, 10):
        ids = torch.tensor(list(itertools.product(range(2), repeat=size)))
        probs = inside(grammar, grammar.of_words(ids)).whole[:, -1].exp()
        total += probs.sum().item()
        first += torch.stack([probs[ids[:, 0] == word].sum() for word in range(2)])
    assert 1 - 1e-4 < total < 1
    weights, scale = read_sentences(grammar, inside(grammar, grammar.of_words(ids[:1])))
    torch.testing.assert_close(prefix_log_probs(grammar, weights, scale)[0, 0].exp(), first, atol=1e-4, rtol=0.0)


@every_grammar
@pytest.mark.parametrize("masked", [True, False])
def test_uniform_grammars_have_a_closed_form(name: str, masked: bool) -> None:
    """p(x) = Catalan(n - 1) Y^(n - 2) S^(-2 (n - 1)) X^n V^-n."""
    model = tiny(**PCFGS[name], mask_special_tokens=masked)
    for parameter in model.parameters():
        parameter.data.zero_()
    vocabulary = 8 if masked else 11
    for size in range(2, 12):
        catalan = math.comb(2 * size - 2, size - 1) // size
        expected = math.log(catalan) + (size - 2) * math.log(4) - 2 * (size - 1) * math.log(9)
        expected += size * math.log(5 / vocabulary)
        assert model.log_likelihood(torch.full((1, size), WORDS[0])).item() == pytest.approx(expected, abs=1e-4)


# ------------------------------------------------------------------------------------------------------- next words
@every_grammar
def test_next_words_add_up_to_sentences(name: str) -> None:
    """Every row sums to 1, and the probabilities of 40 words and the end to that of the sentence, in float32."""
    model = tiny(**PCFGS[name])
    ids = torch.randint(WORDS.start, WORDS.stop, (3, 42))
    ids[:, 0], ids[:, -1], ids[1, 30], ids[1, 31:] = BOS, EOS, EOS, PAD
    logits = model(ids).logits
    torch.testing.assert_close(logits.logsumexp(2), torch.zeros(3, 42), atol=1e-4, rtol=0.0)
    assert logits[..., [PAD, BOS]].isneginf().all() and logits[:, :2, EOS].isneginf().all()
    steps = logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2).masked_fill(ids[:, 1:] == PAD, 0.0)
    parsed = model.parse(ids)
    torch.testing.assert_close(parsed.token_log_probs[:, 1:], steps, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(steps.sum(1), parsed.text_log_probs, atol=1e-4, rtol=0.0)
    if not model.config.is_compound:
        torch.testing.assert_close(model.log_likelihood(ids), parsed.text_log_probs, atol=1e-4, rtol=0.0)
    # Nothing but the end follows the end.
    assert torch.equal(logits[1, 30:].exp(), torch.eye(11)[EOS].expand(12, -1))


@every_grammar
def test_gradients_of_next_words_are_those_of_the_sentence(name: str) -> None:
    model = tiny(**{**PCFGS[name], "num_prior_samples": 2})
    ids = torch.randint(WORDS.start, WORDS.stop, (2, 12))
    ids[:, 0], ids[:, -1] = BOS, EOS
    found = gradients(model, model(ids).logits[:, :-1].gather(2, ids[:, 1:, None]).sum())
    if model.config.is_compound:  # whose sentences have other z
        assert all(gradient.isfinite().all() for key, gradient in found.items() if "grammar" in key)
    else:
        expected = gradients(model, -2 * model(ids, labels=ids).loss)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@every_grammar
def test_inference_mode_changes_nothing(name: str) -> None:
    """Posteriors are gradients, which it forbids."""
    model, ids = tiny(**PCFGS[name]), torch.tensor([[BOS, 5, 6, 7, 8, EOS], [BOS, 5, 6, EOS, PAD, PAD]])
    with torch.inference_mode():
        found = model.parse(ids.clone()), model(ids.clone(), output_chart=True)
    torch.testing.assert_close(found[0].span_probs, model.parse(ids).span_probs)
    torch.testing.assert_close(found[1].chart, model(ids, output_chart=True).chart)
    torch.testing.assert_close(found[1].chart["span_probs"], found[0].span_probs)


@every_grammar
def test_one_word_is_no_sentence(name: str) -> None:
    model = tiny(**PCFGS[name])
    ids, mask = torch.tensor([[5, PAD, PAD], [5, 6, 7]]), torch.tensor([[1, 0, 0], [1, 1, 1]])
    assert model.log_likelihood(ids, mask).isneginf().tolist() == [True, False]
    for method in ("mbr", "viterbi", "sample"):
        parsed = model.parse(ids, mask, method=method)
        assert parsed.spans[0] == [[]] and parsed.text_log_probs.isneginf().tolist() == [True, False]
        assert parsed.log_probs.isneginf().flatten().tolist() == [True, False]
        assert parsed.token_log_probs.isfinite().all()  # that of the word is the probability of a prefix
    assert not model.parse(ids, mask).span_probs[0].any()
    labels = ids.masked_fill(mask == 0, -100)
    both, one = (model(ids[rows], attention_mask=mask[rows], labels=labels[rows]) for rows in ([0, 1], [1]))
    torch.testing.assert_close(both.loss, one.loss)
    assert both.joint_log_prob.isneginf().tolist() == [True, False]
    refused("No loss: every sentence has one word", model, ids[:1, :1], labels=ids[:1, :1])


@every_grammar
def test_shifted_labels_are_labels(name: str) -> None:
    """As Trainer passes them where it splits sequences: sentences count as wholes, with and without a begin token."""
    model = tiny(**PCFGS[name]).train()
    noise = torch.randn(3, 4) if model.config.is_compound else None
    rows = [[BOS, 5, 6, 7, EOS], [5, 6, 7, 8, EOS], [BOS, 5, EOS, PAD, PAD]]
    ids, mask = torch.tensor(rows), torch.tensor(rows) != PAD
    for left_out in ([], [0], [1]):
        labels = ids.masked_fill(~mask, -100)
        labels[left_out] = -100
        shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        one, other = (model(ids, mask, latent_noise=noise, **{key: value}) for key, value in
                      (("labels", labels), ("shift_labels", shifted)))  # fmt: skip
        torch.testing.assert_close(one.losses, other.losses)
        torch.testing.assert_close(one.joint_log_prob, other.joint_log_prob)
        counts = model.count_loss_items(ids, attention_mask=mask, shift_labels=shifted)
        assert set(counts.values()) == {2 - len(left_out)}
        assert counts == model.count_loss_items(ids, attention_mask=mask, labels=labels)
    shifted[0, 2] = -100
    refused("Some labels of a sentence are -100", model, ids, mask, shift_labels=shifted)


# ----------------------------------------------------------------------------------------------------- latent vectors
def test_a_compound_grammar_that_does_not_read_z_is_a_neural_one() -> None:
    compound, plain = tiny(**PCFGS["pcfg, compound"]), tiny()
    state = {key: value for key, value in compound.state_dict().items() if "encoder" not in key}
    for key in ("root_head.0", "emission_head.0", "rule_head"):
        weight = state[f"model.grammar.{key}.weight"]
        weight[:, 8:] = 0.0  # in place: also in the compound grammar
        state[f"model.grammar.{key}.weight"] = weight[:, :8].clone()
    plain.load_state_dict(state)
    ids = torch.tensor([[5, 6, 7, 8, 3], [4, 4, 9, PAD, PAD]])
    noise = torch.randn(2, 4)
    labels = ids.masked_fill(ids == PAD, -100)
    found, expected = compound(ids, labels=labels, latent_noise=noise), plain(ids, labels=labels)
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss - found.losses["kl"], expected.loss)
    assert compound.parse(ids).spans == plain.parse(ids).spans


def test_samples_of_z_give_the_integral_over_z() -> None:
    """One sample is on average the bound that is trained; the mean of many is the probability of the sentence."""
    model, ids = tiny(latent_size=1, **_ENCODER), torch.tensor([[5, 6, 7, 8, 3]])
    latent = torch.linspace(-8, 8, 1601)
    grammar = model.model.make_grammar(latent[:, None])
    given = inside(grammar, grammar.of_words(ids.expand(1601, -1))).whole[:, -1]
    exact = (given - latent.square() / 2).logsumexp(0).item() + math.log(0.01 / math.sqrt(2 * math.pi))
    torch.manual_seed(0)
    many = ids.expand(2000, -1)
    ratios = (model.log_likelihood(many, num_samples=5) - exact).exp()
    assert ratios.mean().item() == pytest.approx(1, abs=4 * ratios.std().item() / math.sqrt(2000))
    assert ratios.std() < 2
    single = model.log_likelihood(many)
    bound = -model.train()(many, labels=many).loss.item()
    assert single.mean().item() == pytest.approx(bound, abs=8 * single.std().item() / math.sqrt(2000))
    assert bound < exact - 0.05


def test_samples_of_the_prior_are_those_of_the_seed() -> None:
    fields = PCFGS["pcfg, compound"]
    ids = torch.tensor([[5, 6, 7]])
    model, other = tiny(**fields), tiny(**fields, prior_seed=1)
    torch.manual_seed(5)
    first = model(ids).logits
    assert torch.equal(first, model(ids).logits) and not torch.allclose(first, other(ids).logits, atol=1e-4)
    # One is the prior's mean.
    single, plain = tiny(**{**fields, "num_prior_samples": 1}), tiny()
    state = {key: value for key, value in single.state_dict().items() if "encoder" not in key}
    plain.load_state_dict({k: v[:, :8] if v.shape[-1:] == (12,) else v for k, v in state.items()})
    torch.testing.assert_close(single(ids).logits, plain(ids).logits)


@every_grammar
def test_the_vocabulary_grows_and_shrinks(name: str, tmp_path: Any) -> None:
    """Words that were there keep their probabilities among themselves."""
    model, ids = tiny(**PCFGS[name]), torch.tensor([[5, 6, 7], [8, 4, 5]])
    before = model(ids, labels=ids, logits_to_keep=1)
    model.resize_token_embeddings(14)
    assert model(torch.tensor([[5, 13]])).logits.shape == (1, 2, 14)
    model.save_pretrained(tmp_path)
    loaded = PCFGForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, loaded.state_dict()[key]) for key, tensor in model.state_dict().items())
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)
    model.resize_token_embeddings(11)
    torch.testing.assert_close(model(ids, labels=ids, logits_to_keep=1), before)
    model.resize_token_embeddings(pad_to_multiple_of=8)
    assert model.config.vocab_size == model(ids).logits.shape[2] == 16


# ------------------------------------------------------------------------------------------------------------ samples
def check_frequencies(found: Counter, expected: dict, count: int) -> None:
    """Frequencies are those of probabilities, within 4 standard errors; rare outcomes count as one."""
    often = {outcome: prob for outcome, prob in expected.items() if prob * count > 10}
    seen = {outcome: found[outcome] for outcome in often}
    often["others"], seen["others"] = 1 - sum(often.values()), found.total() - sum(seen.values())
    assert found.keys() <= expected.keys() and found.total() == count
    for outcome, prob in often.items():
        assert seen[outcome] / count == pytest.approx(prob, abs=4 * math.sqrt(abs(prob * (1 - prob)) / count)), outcome


@pytest.mark.parametrize(("kind", "own"), [(kind, own) for kind in KINDS for own in (False, True)][:-1])
def test_drawn_derivations_follow_the_posterior(kind: str, own: bool) -> None:
    """Of one grammar, and where every sentence has its own."""
    grammar, _ = random_grammar(kind)
    single = [grammar, random_grammar(kind, seed=2)[0] if own else grammar]
    if own:
        grammar = stack(single)
    ids, count = torch.tensor([[0, 3, 1, 2], [4, 0, 2, 0]]), 4000
    lengths = torch.tensor([4, 3])
    drawn, scores = trees.sample(grammar, grammar.of_words(ids), lengths, count)
    for row, size in enumerate(lengths.tolist()):
        words, part = ids[row, :size].tolist(), slice(row * count, (row + 1) * count)
        alone, table = single[row], cube(single[row].rules)
        probs = all_tree_probs(alone.root, table, alone.emission.exp(), words)
        total = math.fsum(probs.values())
        spans, expected = Counter(tuple(t.spans) for t in drawn[part]), {t: p / total for t, p in probs.items()}
        check_frequencies(spans, expected, count)
        whole = {}
        for tree, score in zip(drawn[part], scores[part].tolist(), strict=True):
            whole[tuple(tree.spans), tuple(tree.nonterminals), tuple(tree.preterminals)] = tree, score
        for tree, score in whole.values():
            assert score == pytest.approx(derivation_log_prob(alone, table, words, tree), abs=1e-10)
        names = Counter((tuple(t.spans), tuple(t.nonterminals), tuple(t.preterminals)) for t in drawn[part])
        check_frequencies(names, {key: math.exp(score) / total for key, (_, score) in whole.items()}, count)


@every_grammar
def test_drawn_sentences_follow_the_model(name: str) -> None:
    """Words by the probabilities of prefixes, sentences by theirs; derivations that were cut are flagged."""
    model, count, limit = tiny(**PCFGS[name]), 3000, 3
    torch.manual_seed(3)
    options = {"structure_mode": "joint", "do_sample": True, "num_return_sequences": count, "max_new_tokens": limit}
    drawn = model.generate(**options, return_dict_in_generate=True)
    rows = [tuple(id for id in row if id != PAD) for row in drawn.sequences.tolist()]
    assert all(row[0] == BOS and len(row) <= limit + 1 for row in rows)
    for size in (1, 2, 3):
        prefix = Counter(row[:size] for row in rows if len(row) > size).most_common(1)[0][0]
        longer = [row[len(prefix)] for row in rows if row[: len(prefix)] == prefix and len(row) > len(prefix)]
        probs = model(torch.tensor([prefix])).logits[0, -1].exp().tolist()
        check_frequencies(Counter(longer), dict(enumerate(probs)), len(longer))
    pairs = Counter(row[1:3] if row[-1] == EOS else "longer" for row in rows)
    ids = torch.tensor(list(itertools.product(WORDS, repeat=2)))
    expected = model.parse(ids).text_log_probs.exp().tolist()
    sentences = dict(zip(map(tuple, ids.tolist()), expected, strict=True))
    check_frequencies(pairs, {**sentences, "longer": 1 - sum(expected)}, count)
    found = zip(rows, drawn.lengths, drawn.spans, drawn.labels, drawn.complete, strict=True)
    for ids, size, spans, labels, done in found:
        assert len(spans) == len(labels) == size - 1 and spans[-1] == (1, size + 1)
        assert len(ids) == size + 1 + (size < limit) and (done or size == limit)
    assert 0 < drawn.complete.sum() < count


# ---------------------------------------------------------------------------------------------------------- refusals
REFUSED_BY_PARSE: list[tuple[dict[str, Any], str]] = [
    ({"method": "search"}, "method 'search' is unknown. Choose one of .*mbr"),
    ({"num_return_sequences": 3}, "num_return_sequences is 3. Give 1, or more with method='sample'"),
    ({"num_return_sequences": 2, "method": "viterbi"}, "num_return_sequences is 2. Give 1"),
    ({"num_return_sequences": 0, "method": "sample"}, "num_return_sequences is 0. Give 1"),
    ({"word_ends": torch.ones(1, 2, dtype=torch.bool)}, r"word_ends has shape \(1, 2\), input_ids \(1, 3\)"),
    ({"word_ends": torch.tensor([[True, False, True]])}, "several tokens.*reads words. Use the grammar's tokenizer"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED_BY_PARSE)
def test_what_parse_refuses(options: dict[str, Any], message: str) -> None:
    refused(message, tiny().parse, torch.tensor([[5, 6, 7]]), **options)


def test_the_best_derivation_needs_a_table(monkeypatch: Any) -> None:
    model, ids = tiny(**PCFGS["pcfg, tensor"]), torch.tensor([[5, 6, 7]])
    assert len(model.parse(ids, method="viterbi").labels[0][0]) == 2
    monkeypatch.setattr(trees, "_MAX_TABLE", 300)
    with pytest.raises(ValueError, match="'viterbi' needs a table of 324 rules, more than 300. Use 'mbr' or 'sample'"):
        model.parse(ids, method="viterbi")


REFUSED_TEXTS: list[tuple[list[int], list[int] | None, str]] = [
    ([5, PAD, 6], None, "Token 0 in row 0, column 1 is a special token.*Leave this token out"),
    ([5, BOS, 6], None, "Token 1 in row 0, column 1 is a special token"),
    ([5, 6, EOS, 7], None, "Row 0 of input_ids continues after its end token. Give one sentence per row"),
    ([BOS, EOS], None, "Row 0 of input_ids has no token"),
    ([5, 6, 7], [1, 0, 1], "holes inside row 0"),
    ([5, 11], None, "Token id 11 is outside the vocabulary"),
]


@pytest.mark.parametrize(("ids", "mask", "message"), REFUSED_TEXTS)
def test_what_is_no_sentence(ids: list[int], mask: list[int] | None, message: str) -> None:
    model, text = tiny(), torch.tensor([ids])
    given = None if mask is None else torch.tensor([mask])
    for call in (model.parse, model.log_likelihood, model.model, lambda *text: model(*text, labels=text[0])):
        refused(message, call, text, given)


def test_what_forward_refuses() -> None:
    model, ids = tiny(), torch.tensor([[5, 6, 7]])
    for options, message in (
        (
            {"labels": torch.tensor([[5, -100, 7]])},
            "Some labels of a sentence are -100.*Set all labels to -100, or none",
        ),
        ({"labels": torch.tensor([[5, 6]])}, "labels"),
        (
            {"labels": ids, "latent_noise": torch.zeros(1, 4)},
            r"latent_noise has shape \(1, 4\), but needs the shape of z, \(1, 0\)",
        ),
    ):
        refused(message, model, ids, **options)
    for name in ("inputs_embeds", "position_ids", "spans"):
        raised(TypeError, name, model, ids, **{name: torch.zeros(1)})
    refused("Token 1 in row 0, column 2 is a special token", model, torch.tensor([[5, 6, BOS]]), use_cache=True)
    with pytest.raises(ValueError, match="past_key_values holds 1 rows, but input_ids has 2"):
        model(ids.repeat(2, 1), past_key_values=model(ids, use_cache=True).past_key_values)


def test_joint_generation_without_special_tokens() -> None:
    """As of converted checkpoints: sentences begin with their first word, and `complete` tells which ended."""
    options = {"structure_mode": "joint", "do_sample": True, "max_new_tokens": 4, "num_return_sequences": 20}
    drawn = tiny(bos_token_id=None, eos_token_id=None).generate(**options, return_dict_in_generate=True)
    for row, size, spans in zip(drawn.sequences, drawn.lengths, drawn.spans, strict=True):
        assert (row != PAD).sum() == size and spans[-1] == (0, size)
    with pytest.raises(ValueError, match="sentences of unequal length. Pass pad_token_id"):
        tiny(bos_token_id=None, eos_token_id=None, pad_token_id=None).generate(**options)


def test_what_joint_generation_refuses() -> None:
    model = tiny()
    for options, message in (
        ({"structure_mode": "jiont"}, "structure_mode='jiont' must be 'joint' or 'marginal'"),
        ({"num_beams": 3}, "num_beams: not supported with structure_mode='joint'. Try 'marginal'"),
        ({"top_k": 3, "temperature": 0.5}, "temperature, top_k: not supported with structure_mode='joint'"),
        ({"generation_config": GenerationConfig(top_k=3)}, "top_k: not supported with structure_mode='joint'"),
        ({"eos_token_id": 5}, "eos_token_id: not supported with structure_mode='joint'"),
        ({"do_sample": False}, "draws derivations. Pass do_sample=True"),
        ({"inputs": torch.tensor([[BOS, 5]])}, "begins at the root of a tree. Leave the prompt out, or use 'marginal'"),
        ({"inputs": torch.tensor([[5]])}, "begins at the root of a tree"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(**{"structure_mode": "joint", "do_sample": True, "max_new_tokens": 4, **options})


# ------------------------------------------------------------------------------------------------ extreme numbers
def table_of(scores: dict[tuple[int, int, int], float], num_nonterminals: int, size: int, other: float) -> DenseRules:
    """Rules from their scores before the softmax."""
    rule = torch.full((num_nonterminals, size, size), other)
    for place, score in scores.items():
        rule[place] = score
    return DenseRules(rule.flatten(1).softmax(1).view_as(rule))


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0, 200.0])
def test_a_nonterminal_that_hardly_stops_being_its_own_left_corner(gap: float) -> None:
    """NT0 -> NT0 T0 is all but certain: next words are those of float64, and finite where NT0 never ends."""
    root, emission = torch.tensor([1e-9, 1 - 1e-9]), torch.zeros(2, 9).log_softmax(1)
    rules = table_of({(0, 0, 2): gap, (1, 0, 0): -40.0, (1, 1, 0): -40.0}, 2, 4, 0.0)
    found = []
    for dtype in (torch.float32, torch.float64):
        grammar = Grammar(root.to(dtype), emission.to(dtype), DenseRules(rules.rule.to(dtype)))
        chart = inside(grammar, grammar.of_words(torch.tensor([[1, 4, 2]])))
        found.append(prefix_log_probs(grammar, *read_sentences(grammar, chart)).double())
    assert found[0].isfinite().all()
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_beginning_of_probability_0_spoils_no_gradient() -> None:
    """The first two words alone are no sentence in float32; all three are one."""
    rules = table_of({(0, 1, 3): 0.0, (1, 2, 2): 0.0}, 2, 4, -130.0)
    rule = rules.rule.clone().requires_grad_()
    grammar = Grammar(torch.tensor([1.0, 0.0]), torch.zeros(2, 4).log_softmax(1), DenseRules(rule))
    whole = inside(grammar, grammar.of_words(torch.tensor([[0, 1, 2]]))).whole
    assert whole[0].isfinite().tolist() == [False, False, True]
    whole[0, 2].backward()
    assert rule.grad is not None and rule.grad.isfinite().all() and rule.grad.any()


def test_a_sentence_that_the_grammar_does_not_have_has_no_tree() -> None:
    model = tiny()
    with torch.no_grad():  # constituents of two words only
        bias = model.model.grammar.rule_head.bias.view(9, 9)
        bias[:4], bias[:, :4] = -1e3, -1e3
    ids = torch.tensor([[3, 5, 4], [4, 6, PAD]])
    for method in ("mbr", "viterbi", "sample"):
        output = model.parse(ids, method=method)
        assert [len(trees) for trees in output.spans] == [0, 1], method
        assert output.log_probs[:, 0].isneginf().tolist() == [True, False]


@every_grammar
def test_autocast_leaves_sums_of_probabilities_in_full_precision(name: str) -> None:
    model, ids = tiny(**PCFGS[name]), torch.randint(3, 11, (2, 20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, cached = model(ids).logits, model(ids, use_cache=True).logits
        parsed = model.parse(ids)
    for found in (logits, cached):
        torch.testing.assert_close(found.exp().sum(-1), torch.ones(2, 20), atol=1e-4, rtol=0)
    torch.testing.assert_close(parsed.span_probs.sum((1, 2)), torch.full((2,), 19.0), atol=1e-3, rtol=0)
