"""Reading induced grammars: numbers of a grammar made by hand, and `synlm grammar`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.cli import main
from hf_synlm.data.vocabulary import word_tokenizer
from hf_synlm.models.pcfg.inside import Grammar
from hf_synlm.models.pcfg.rules import DenseRules, LowRankRules
from hf_synlm.viz import grammar as of_grammar
from hf_synlm.viz.grammar import Preterminal, Rule, grammar_to_text, read_grammar
from tests.helpers.commands import fail, run

TOKENIZER = word_tokenizer([["the", "a", "cat", "sleeps"]], end_token=True)
IDS = {word: TOKENIZER.convert_tokens_to_ids(word) for word in ("the", "a", "cat", "sleeps")}


def logs(shape: tuple[int, ...], probs: dict[tuple[int, ...], float]) -> Tensor:
    """Logarithms of probabilities by place; what is not named has none."""
    table = torch.zeros(shape)
    for place, prob in probs.items():
        table[place] = prob
    return table.log().clamp_min(-1e4)


def made_by_hand(repeated: float) -> PCFGForCausalLM:
    """S -> NT0; NT0 -> NT0 NT0 (`repeated`) or NT1 T2; NT1 -> T0 T1; T0 gives the, a; T1 cat; T2 sleeps."""
    config = PCFGConfig.from_tokenizer(TOKENIZER, num_nonterminals=2, num_preterminals=3, symbol_size=3)
    model = PCFGForCausalLM(config).eval()
    rules = {(0, 0, 0): repeated, (0, 1, 4): 1 - repeated, (1, 2, 3): 1.0}
    words = {(0, IDS["the"]): 0.625, (0, IDS["a"]): 0.375, (1, IDS["cat"]): 1.0, (2, IDS["sleeps"]): 1.0}
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    # Symbols are unit vectors that reach the last layers as they are.
    for name in ("preterminals.weight", "nonterminals.weight", "emission_head.0.weight"):
        state[f"model.grammar.{name}"] = torch.eye(*state[f"model.grammar.{name}"].shape)
    state["model.grammar.rule_head.weight"][:, :2] = logs((2, 5, 5), rules).flatten(1).t()
    state["model.grammar.emission_head.3.weight"] = logs((3, len(TOKENIZER)), words).t()
    state["model.grammar.root_head.3.bias"] = logs((2,), {(0,): 1.0})
    model.load_state_dict(state)
    return model


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    made_by_hand(0.25).save_pretrained(tmp_path / "pcfg")
    TOKENIZER.save_pretrained(tmp_path / "pcfg")
    return tmp_path / "pcfg"


def numbers(values: Any) -> Any:
    return pytest.approx(values, rel=1e-5)


# ------------------------------------------------------------------------------------------------------- numbers
def test_rules_words_and_uses():
    found = read_grammar(made_by_hand(0.25), TOKENIZER)
    # NT0 has on average half an NT0 as child, so that it stands in 1 + 1/2 + 1/4 + ... places.
    assert (found.growth, found.levels, found.num_words) == (numbers(0.5), None, numbers(4.5))
    assert found.root == {"NT0": numbers(1.0)}
    first, second = found.nonterminals
    assert (first.symbol, first.uses, second.symbol, second.uses) == ("NT0", numbers(2.0), "NT1", numbers(1.5))
    assert first.rules == [Rule("NT1", "T2", numbers(0.75)), Rule("NT0", "NT0", numbers(0.25))]
    assert second.rules == [Rule("T0", "T1", numbers(1.0))]
    assert found.preterminals == [
        Preterminal("T0", numbers(1.5), {"the": numbers(0.625), "a": numbers(0.375)}),
        Preterminal("T1", numbers(1.5), {"cat": numbers(1.0)}),
        Preterminal("T2", numbers(1.5), {"sleeps": numbers(1.0)}),
    ]
    assert found.examples == {"T0": ["the", "a"], "T1": ["cat"], "T2": ["sleeps"]}


def test_limits():
    found = read_grammar(
        made_by_hand(0.25), TOKENIZER, num_rules=1, num_words=1, num_nonterminals=1, num_preterminals=2
    )
    assert [one.rules for one in found.nonterminals] == [[Rule("NT1", "T2", numbers(0.75))]]
    assert [list(one.words) for one in found.preterminals] == [["the"], ["cat"]]
    assert (found.num_nonterminals, found.num_preterminals, found.examples) == (2, 3, {"T2": ["sleeps"]})


def test_derivations_that_need_not_end():
    found = read_grammar(made_by_hand(0.75), TOKENIZER)
    assert (found.growth, found.levels, found.num_words) == (numbers(1.5), 20, None)
    assert found.nonterminals[0].uses == numbers((1.5**20 - 1) / 0.5)
    assert "need not end; uses are those in the first 20 levels" in grammar_to_text(found)


def test_growth_of_a_cycle():
    """NT0 makes NT1 and NT1 makes NT0: the two eigenvalues have one size."""
    assert of_grammar._spectral_radius(torch.tensor([[0.0, 0.5], [0.5, 0.0]]).double()) == numbers(0.5)
    assert of_grammar._spectral_radius(torch.zeros(2, 2)) == 0


@pytest.mark.parametrize("kind", ["tensor", "simple", "compound"])
def test_low_rank_as_table(kind: str, monkeypatch):
    torch.manual_seed(0)
    kinds: dict[str, Any] = {"tensor": {"grammar": "tensor", "rank": 5, "init": "default"}}
    kinds |= {"simple": {"grammar": "simple"}, "compound": {"grammar": "simple", "latent_size": 4}}
    sizes = {"encoder_embedding_size": 6, "encoder_hidden_size": 5, "num_prior_samples": 3}
    sizes |= {"num_nonterminals": 4, "num_preterminals": 6, "symbol_size": 8}
    model = PCFGForCausalLM(PCFGConfig(vocab_size=len(TOKENIZER), **sizes, **kinds[kind])).eval()
    found = read_grammar(model, TOKENIZER)
    with torch.no_grad():
        made = model.model.make_grammar(torch.zeros(1, 4) if kind == "compound" else None)
    made = made.single() if kind == "compound" else made
    dense = Grammar(made.root[None], made.emission[None], DenseRules(made.rules.table()[None]))
    single = dense if kind == "compound" else dense.single()
    monkeypatch.setattr(model.model, "make_grammar", lambda latent: single)
    expected = read_grammar(model, TOKENIZER)
    assert (found.growth, found.root) == (numbers(expected.growth), numbers(expected.root))
    for one, other in zip(found.nonterminals, expected.nonterminals, strict=True):
        assert (one.symbol, one.uses) == (other.symbol, numbers(other.uses))
        assert [(x.first, x.second) for x in one.rules] == [(x.first, x.second) for x in other.rules]
        assert [x.probability for x in one.rules] == numbers([x.probability for x in other.rules])
    assert found.examples == expected.examples


def test_no_likely_rule_is_missed(monkeypatch):
    """Among four children on each side are all rules above 1/5."""
    monkeypatch.setattr(of_grammar, "_CHILDREN", 4)
    generator = torch.Generator().manual_seed(0)
    head, left, right = (torch.randn(shape, generator=generator) for shape in ((9, 5), (30, 5), (30, 5)))
    rules = LowRankRules((4 * head).softmax(1), (4 * left).softmax(0), (4 * right).softmax(0))
    table, likely = rules.table(), 0
    for parent in range(9):
        found = of_grammar._likely_rules(rules, parent, rules.sides(), 16)
        pairs = {(b, c) for b, c, _ in found}
        assert {tuple(place) for place in (table[parent] > 1 / 5).nonzero().tolist()} <= pairs
        assert [prob for *_, prob in found] == numbers([table[parent, b, c].item() for b, c, _ in found])
        likely += (table[parent] > 1 / 5).sum().item()
    assert likely >= 5


# ------------------------------------------------------------------------------------------------------- command
def test_command(saved: Path, capsys):
    text = run(capsys, "grammar", saved)
    assert text.splitlines() == [
        "2 of 2 nonterminals, 3 of 3 preterminals, the most used first",
        "growth 0.500: a sentence has 4.5 words on average; uses are per sentence",
        "S -> NT0 1.000",
        "",
        "NT0, 2 uses",
        "  0.750  NT0 -> NT1 T2 (sleeps)",
        "  0.250  NT0 -> NT0 NT0",
        "",
        "NT1, 1.5 uses",
        "  1.000  NT1 -> T0 (the, a) T1 (cat)",
        "",
        "T0, 1.5 uses: the 0.625, a 0.375",
        "T1, 1.5 uses: cat 1.000",
        "T2, 1.5 uses: sleeps 1.000",
    ]
    found = json.loads(run(capsys, "grammar", saved, "--format", "json"))
    assert found == dataclasses.asdict(read_grammar(made_by_hand(0.25), TOKENIZER))


def test_compound_grammar_is_said(tmp_path: Path, capsys):
    sizes = {"latent_size": 2, "encoder_embedding_size": 3, "encoder_hidden_size": 3}
    sizes |= {"num_nonterminals": 2, "num_preterminals": 3, "symbol_size": 4}
    model = PCFGForCausalLM(PCFGConfig(vocab_size=len(TOKENIZER), **sizes))
    model.save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    assert main(["grammar", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert captured.out == grammar_to_text(read_grammar(model, TOKENIZER)) + "\n" and "z = 0" in captured.err


def test_refusals(saved_models: Path, capsys):
    message = fail(capsys, "grammar", saved_models / "gpst")
    assert "GPSTForCausalLM" in message and "'gpst' has no rules" in message and "synlm train pcfg" in message
