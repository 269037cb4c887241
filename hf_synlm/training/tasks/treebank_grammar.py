# SPDX-License-Identifier: Apache-2.0
"""Counting a PCFG in a treebank: binary rules by relative frequency, and a smoothed lexicon.

Constituents over the same words are one symbol, "S VP", and so are those over one word with its tag, "NP NN". More than
two children are split off from the left. What is left of A after a child B is the symbol "(A ... B)", which remembers
the last children (Markovization, horizontal order) and, with parent annotation, what A is a child of:

    A -> B1 (A B1),   (A B1) -> B2 (A B1 B2),   (A B1 B2) -> B3 B4

    p(A -> B C) = count(A -> B C) / count(A)
    p(word | X) = (count(X, word) + s p(word | tag)) / (count(X) + s),   p(word | tag) likewise, from p(word)

where tag is that of the preterminal X, and p(word) = (count(word) + 1) / (all words + vocabulary).

Source: Johnson, "PCFG Models of Linguistic Tree Representations" (1998); Klein and Manning, "Accurate Unlexicalized
Parsing" (ACL 2003), section 2.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.data.treebank import TreebankSentence

IMPOSSIBLE = -1e4
"""Score of a root that never occurs; its probability is 0."""


class Symbol(NamedTuple):
    """A symbol of the grammar; nonterminals sort before preterminals."""

    is_preterminal: bool
    name: str
    """See `PCFGConfig.symbols`."""


Rule = tuple[Symbol, Symbol, Symbol]


class _Node(NamedTuple):
    labels: list[str]
    """Of the constituents over the same words, from the top down, and the tag of a word."""
    start: int
    children: list["_Node"]

    def symbol(self, parent: str) -> Symbol:
        """The symbol of a child of the constituent `parent`, "" where it does not matter."""
        known = f"(^{parent})" if parent and (self.children or len(self.labels) > 1) else ""
        return Symbol(not self.children, " ".join(self.labels) + known)


def _tree(sentence: TreebankSentence) -> _Node:
    done: list[_Node] = []
    num_words = 0
    for label, start, end in sentence.labeled_spans:
        done += [_Node([sentence.tags[k]], k, []) for k in range(num_words, end)]
        num_words = max(num_words, end)
        first = next(place for place, node in enumerate(done) if node.start >= start)
        if first == len(done) - 1:
            done[first].labels.insert(0, label)
        else:
            done[first:] = [_Node([label], start, done[first:])]
    return done[0]


def binary_rules(sentence: TreebankSentence, order: int, annotate: bool) -> tuple[Symbol, list[Rule], list[Symbol]]:
    """The symbol of the root, the rules of a tree in pre-order, and the preterminals of its words.

    `order` children are remembered; `annotate` tells constituents what they are children of.
    """
    tree = _tree(sentence)
    rules, preterminals, agenda = [], [], [(tree, "")]
    while agenda:
        node, parent = agenda.pop()
        symbol, label = node.symbol(parent), node.labels[-1]
        if not node.children:
            preterminals.append(symbol)
            continue
        above = node.labels[-2] if annotate and len(node.labels) > 1 else parent
        children = [child.symbol(label if annotate else "") for child in node.children]
        for place in range(1, len(children) - 1):
            seen = [child.labels[0] for child in node.children[max(0, place - order) : place]]
            rest = Symbol(False, f"({' '.join([f'{label}^{above}' if above else label, *seen])})")
            rules.append((symbol, children[place - 1], rest))
            symbol = rest
        rules.append((symbol, children[-2], children[-1]))
        agenda += [(child, label if annotate else "") for child in reversed(node.children)]
    return tree.symbol(""), rules, preterminals


def count_grammar(
    sentences: Iterable[tuple[TreebankSentence, Sequence[int]]],
    *,
    order: int,
    annotate: bool,
    smoothing: float,
    **fields: int | None,
) -> PCFGForCausalLM:
    """Count the grammar of trees of two or more words with their ids; `fields` are of the configuration."""
    roots, rules, lexicon = Counter[Symbol](), Counter[Rule](), Counter[tuple[Symbol, int]]()
    for sentence, ids in sentences:
        root, found, preterminals = binary_rules(sentence, order, annotate)
        roots[root] += 1
        rules.update(found)
        lexicon.update(zip(preterminals, ids, strict=True))
    symbols = sorted({symbol for rule in rules for symbol in rule})
    number = {symbol: place for place, symbol in enumerate(symbols)}
    size = sum(not symbol.is_preterminal for symbol in symbols)
    config = PCFGConfig(
        grammar="sparse",
        num_nonterminals=size,
        num_preterminals=len(symbols) - size,
        num_rules=len(rules),
        symbols=[symbol.name for symbol in symbols],
        **fields,
    )
    words = torch.zeros(len(symbols) - size, config.vocab_size, dtype=torch.float64)
    places = torch.tensor([(number[symbol] - size, word) for symbol, word in lexicon])
    words[places.unbind(1)] = torch.tensor([*lexicon.values()], dtype=words.dtype)
    listed = sorted((*(number[symbol] for symbol in rule), count) for rule, count in rules.items())
    *numbers, counts = torch.tensor(listed).unbind(1)
    model = PCFGForCausalLM(config)
    grammar: Any = model.model.grammar
    with torch.no_grad():
        grammar.rules.copy_(torch.stack(numbers))
        grammar.rule_scores.copy_(counts.log())
        grammar.root_scores.fill_(IMPOSSIBLE)
        for symbol, count in roots.items():
            grammar.root_scores[number[symbol]] = torch.tensor(count).log()
        tags = [symbol.name.partition("(")[0].split()[-1] for symbol in symbols[size:]]
        grammar.emission_head[-1].weight.copy_(_smooth(words, tags, smoothing).log().t())
    return model


def _smooth(counts: Tensor, tags: list[str], strength: float) -> Tensor:
    """p(word | X) [X, V] from counts."""
    number = {tag: place for place, tag in enumerate(dict.fromkeys(tags))}
    of = torch.tensor([number[tag] for tag in tags])
    word = (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])
    tag = _mix(counts.new_zeros(len(number), counts.shape[1]).index_add(0, of, counts), word, strength)
    return _mix(counts, tag[of], strength)


def _mix(counts: Tensor, expected: Tensor, strength: float) -> Tensor:
    """Relative frequencies of counts [N, V], as if `strength` more had been seen, as `expected`."""
    return (counts + strength * expected) / (counts.sum(1, keepdim=True) + strength)
