# SPDX-License-Identifier: Apache-2.0
"""Reading a grammar that a PCFG has learned: its likely rules and words as numbers, text and picture."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.hub.abilities import declared
from hf_synlm.viz.layout import clean_text

# Levels of a derivation in which symbols are counted if it need not end.
LEVELS = 20
# Rules are searched among so many children on each side.
_CHILDREN = 300
# Words that stand for a preterminal in a rule.
_EXAMPLES = 2


@dataclass(frozen=True)
class Rule:
    """A rule A -> B C of a nonterminal A.

    Fields:
        first, second: the children, named as in `parse`: "NT3", "T17".
        probability: p(A -> B C), given A.
    """

    first: str
    second: str
    probability: float


@dataclass(frozen=True)
class Nonterminal:
    """A nonterminal and its likely rules.

    Fields:
        symbol: its name.
        uses: how often it stands in a derivation, on average; see `InducedGrammar`.
        rules: its rules, the likeliest first.
    """

    symbol: str
    uses: float
    rules: list[Rule]


@dataclass(frozen=True)
class Preterminal:
    """A preterminal and its likely words.

    Fields:
        symbol: its name.
        uses: how often it stands in a derivation, on average; see `InducedGrammar`.
        words: p(word) of its words, given the preterminal, the likeliest first.
    """

    symbol: str
    uses: float
    words: dict[str, float]


@dataclass(frozen=True)
class InducedGrammar:
    """What one reads of a grammar.

    Fields:
        growth: how many times more nonterminals a deep level of a derivation has than the level above it (the spectral
            radius of the expected numbers of children). Derivations end if it is below 1.
        levels: None: uses are those of whole derivations, which end. A number: derivations need not end, and uses are
            those in so many levels from the root.
        num_words: expected number of words of a sentence; None if derivations need not end.
        num_nonterminals, num_preterminals: how many symbols the grammar has.
        root: p(S -> A) of the likely first symbols.
        nonterminals: the nonterminals of most uses, the most used first.
        preterminals: the preterminals of most uses, the most used first.
        examples: the likeliest words of every preterminal in a rule.
    """

    growth: float
    levels: int | None
    num_words: float | None
    num_nonterminals: int
    num_preterminals: int
    root: dict[str, float]
    nonterminals: list[Nonterminal]
    preterminals: list[Preterminal]
    examples: dict[str, list[str]]


@torch.no_grad()
def read_grammar(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    num_rules: int = 5,
    num_words: int = 8,
    num_nonterminals: int = 30,
    num_preterminals: int = 60,
) -> InducedGrammar:
    """Read the likely rules and words of a PCFG; of a compound grammar those of the mean of the prior, z = 0.

        uses = root + uses P,   P[A, B] = expected number of children B of A

    Args:
        model: A `PCFGForCausalLM`.
        tokenizer: Its tokenizer.
        num_rules: Rules per nonterminal, and first symbols.
        num_words: Words per preterminal.
        num_nonterminals: Nonterminals to read, those with the most uses.
        num_preterminals: Preterminals to read, those with the most uses.

    Returns:
        `InducedGrammar`; what has probability 0 is left out.

    Raises:
        ValueError: If the model is no PCFG.

    Rules are searched among the 300 likeliest children on each side, because p(A -> B C) is at most the probability of
    either child. So all rules of a probability above 1/301 are found; in general the result is exact if the worst rule
    is at least as likely as the best child left out. No table over all pairs is built for grammars of low rank.
    """
    config = model.config
    if not declared(config, "is_grammar"):
        raise ValueError(
            f"{type(model).__name__}: a model of the type {config.model_type!r} has no rules to read. Name a PCFG, "
            "as `synlm train pcfg` makes it. For other models, `synlm parse` prints trees."
        )
    latent = torch.zeros(1, config.latent_size, dtype=model.dtype, device=model.device) if config.is_compound else None
    grammar = model.model.make_grammar(latent)
    grammar = grammar if latent is None else grammar.single()
    size, sides, names = len(grammar.root), grammar.rules.sides(), config.names
    growth, uses, uses_of_words = _expected_uses(grammar.root, sides[0] + sides[1])

    def words(preterminal: int, count: int) -> dict[str, float]:
        ids, probs = zip(*_largest(grammar.emission[preterminal].exp(), count), strict=True)
        tokens = tokenizer.convert_ids_to_tokens(ids)
        return {token or str(i): prob for token, i, prob in zip(tokens, ids, probs, strict=True)}

    rules = {a: _likely_rules(grammar.rules, a, sides, num_rules) for a, _ in _largest(uses, num_nonterminals)}
    children = sorted({child for found in rules.values() for b, c, _ in found for child in (b, c)})
    return InducedGrammar(
        growth=growth,
        levels=None if growth < 1 else LEVELS,
        num_words=uses_of_words.sum().item() if growth < 1 else None,
        num_nonterminals=size,
        num_preterminals=len(uses_of_words),
        root={names[a]: prob for a, prob in _largest(grammar.root, num_rules)},
        nonterminals=[
            Nonterminal(names[a], uses[a].item(), [Rule(names[b], names[c], prob) for b, c, prob in found])
            for a, found in rules.items()
        ],
        preterminals=[
            Preterminal(names[size + x], count, words(x, num_words))
            for x, count in _largest(uses_of_words, num_preterminals)
        ],
        examples={names[child]: list(words(child - size, _EXAMPLES)) for child in children if child >= size},
    )


def _largest(values: Tensor, count: int) -> list[tuple[int, float]]:
    """Places of the largest values that are above 0, and the values; the first of equal ones first."""
    found, places = values.sort(descending=True, stable=True)
    return [(i, value) for i, value in zip(places[:count].tolist(), found[:count].tolist(), strict=True) if value > 0]


def _likely_rules(rules: Any, parent: int, sides: tuple[Tensor, Tensor], count: int) -> list[tuple[int, int, float]]:
    """The likeliest children of a nonterminal, and p(A -> B C)."""
    if hasattr(rules, "children"):
        first, second, probs = rules.children(parent)
        return [(int(first[rule]), int(second[rule]), prob) for rule, prob in _largest(probs, count)]
    first, second = (side[parent].topk(min(_CHILDREN, side.shape[1])).indices.sort().values for side in sides)
    if rules.head is None:
        pairs = rules.left[first, parent, None] * rules.right[second, parent]
    else:
        pairs = (rules.left[first] * rules.head[parent]) @ rules.right[second].t()
    largest = _largest(pairs.flatten(), count)
    return [(int(first[pair // len(second)]), int(second[pair % len(second)]), prob) for pair, prob in largest]


def _expected_uses(root: Tensor, children: Tensor) -> tuple[float, Tensor, Tensor]:
    """Growth, and expected uses of nonterminals [Y] and preterminals [X], given expected numbers of children [Y, S]."""
    nonterminals, preterminals = children.double().split([len(root), children.shape[1] - len(root)], 1)
    level = root.double()
    growth = _spectral_radius(nonterminals)
    if growth < 1:
        uses = torch.linalg.solve(torch.eye(len(root)).to(level) - nonterminals.t(), level)
    else:
        uses = level
        for _ in range(LEVELS - 1):
            level = level @ nonterminals
            uses = uses + level
    return growth, uses, uses @ preterminals


def _spectral_radius(matrix: Tensor) -> float:
    """Of a matrix without negative numbers, by power iteration; 1 is added to its eigenvalues, so that one leads."""
    vector, radius = torch.full_like(matrix[0], 1 / len(matrix)), torch.inf
    for _ in range(1000):
        vector, before = vector + vector @ matrix, radius
        radius = vector.sum().item() - 1
        vector = vector / vector.sum()
        if abs(radius - before) < 1e-12:
            break
    return radius


# ---------------------------------------------------------------------------------------------- text and picture
def grammar_to_text(grammar: InducedGrammar) -> str:
    """Write a grammar for readers, with the likeliest words of the preterminals in rules.

    Args:
        grammar: What `read_grammar` gives.

    Returns:
        Several lines.
    """
    if grammar.levels is None:
        end = f"a sentence has {grammar.num_words:.1f} words on average; uses are per sentence"
    else:
        end = f"derivations need not end; uses are those in the first {grammar.levels} levels"
    read = f"{len(grammar.nonterminals)} of {grammar.num_nonterminals} nonterminals"
    read += f", {len(grammar.preterminals)} of {grammar.num_preterminals} preterminals, the most used first"
    lines = [read, f"growth {grammar.growth:.3f}: {end}", f"S -> {_listed(grammar.root)}"]
    for nonterminal in grammar.nonterminals:
        lines += ["", f"{nonterminal.symbol}, {nonterminal.uses:.3g} uses"]
        for rule in nonterminal.rules:
            lines.append(f"  {rule.probability:.3f}  {nonterminal.symbol} -> {_children_to_text(grammar, rule)}")
    lines.append("")
    for preterminal in grammar.preterminals:
        lines.append(f"{preterminal.symbol}, {preterminal.uses:.3g} uses: {_listed(preterminal.words)}")
    return "\n".join(lines)


def _children_to_text(grammar: InducedGrammar, rule: Rule) -> str:
    """`T3 (the, a) NT9`."""
    shown = []
    for child in (rule.first, rule.second):
        words = ", ".join(map(clean_text, grammar.examples.get(child, ())))
        shown.append(f"{child} ({words})" if words else child)
    return " ".join(shown)


def _listed(probs: dict[str, float]) -> str:
    return ", ".join(f"{clean_text(name)} {prob:.3f}" for name, prob in probs.items())
