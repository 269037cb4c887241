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

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm import PCFGConfig, PCFGForCausalLM
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.training.tasks.span_batches import label_chains
from hf_synlm.trees.spans import Span

IMPOSSIBLE = -1e4
"""Score of a root that never occurs; its probability is 0."""


class Symbol(NamedTuple):
    """A symbol of the grammar; nonterminals sort before preterminals."""

    is_preterminal: bool
    name: str
    """See `PCFGConfig.symbols`."""


Rule = tuple[Symbol, Symbol, Symbol]


def binary_rules(sentence: TreebankSentence, order: int, annotate: bool) -> tuple[Symbol, list[Rule], list[Symbol]]:
    """The symbol of the root, the rules of a tree in pre-order, and the preterminals of its words.

    `order` children are remembered; `annotate` tells constituents what they are children of.
    """
    labels = {span: chain.split() for span, chain in label_chains(sentence).items()}
    for k, tag in enumerate(sentence.tags):
        labels.setdefault((k, k + 1), []).append(tag)
    children, symbols, parts_of, stack = defaultdict[Span, list[Span]](list), {}, {}, list[Span]()
    for i, j in sorted(labels, key=lambda span: (span[0], -span[1])):
        while stack and stack[-1][1] <= i:
            stack.pop()
        if stack:
            children[stack[-1]].append((i, j))
        outer = labels[stack[-1]][-1] if stack and annotate else ""
        chain = labels[i, j]
        known = f"(^{outer})" if outer and (j - i > 1 or len(chain) > 1) else ""
        symbols[i, j] = Symbol(j - i == 1, " ".join(chain) + known)
        above = [outer, *chain][-2] if annotate else ""
        parts_of[i, j] = f"{chain[-1]}^{above}" if above else chain[-1]
        stack.append((i, j))
    rules = []
    for span, found in children.items():
        parent = symbols[span]
        for place in range(1, len(found) - 1):
            seen = [labels[one][0] for one in found[max(0, place - order) : place]]
            rest = Symbol(False, f"({' '.join([parts_of[span], *seen])})")
            rules.append((parent, symbols[found[place - 1]], rest))
            parent = rest
        rules.append((parent, symbols[found[-2]], symbols[found[-1]]))
    return symbols[0, len(sentence.words)], rules, [symbols[k, k + 1] for k in range(len(sentence.words))]


def count_grammar(
    sentences: Iterable[tuple[TreebankSentence, Sequence[int]]],
    order: int,
    annotate: bool,
    smoothing: float,
    **fields: Any,
) -> PCFGForCausalLM:
    """Count the grammar of trees of two or more words with their ids; `fields` are of the configuration."""
    roots, rules, lexicon = list[Symbol](), list[Rule](), list[tuple[Symbol, int]]()
    for sentence, ids in sentences:
        root, found, preterminals = binary_rules(sentence, order, annotate)
        roots.append(root)
        rules += found
        lexicon += zip(preterminals, ids, strict=True)
    symbols = sorted({symbol for rule in rules for symbol in rule})
    number = {symbol: place for place, symbol in enumerate(symbols)}
    size = sum(not symbol.is_preterminal for symbol in symbols)
    listed, counts = torch.tensor([[number[one] for one in rule] for rule in rules]).unique(dim=0, return_counts=True)
    config = PCFGConfig(
        grammar="sparse", num_nonterminals=size, num_preterminals=len(symbols) - size, num_rules=len(listed),
        symbols=[symbol.name for symbol in symbols], **fields,
    )  # fmt: skip
    words = torch.zeros(len(symbols) - size, config.vocab_size, dtype=torch.float64)
    places = torch.tensor([(number[symbol] - size, word) for symbol, word in lexicon])
    words.index_put_(places.unbind(1), torch.ones_like(words[0, 0]), accumulate=True)
    tags = [labels[-1] for labels in config.labels[size:]]
    model = PCFGForCausalLM(config)
    grammar: Any = model.model.grammar
    with torch.no_grad():
        grammar.rules.copy_(listed.t())
        grammar.rule_scores.copy_(counts.log())
        of_roots = torch.tensor([number[root] for root in roots]).bincount(minlength=size)
        grammar.root_scores.copy_(of_roots.log().clamp(min=IMPOSSIBLE))
        grammar.emission_head[-1].weight.copy_(_smooth(words, tags, smoothing).log().t())
    return model


def _smooth(counts: Tensor, tags: list[str], strength: float) -> Tensor:
    """p(word | X) [X, V] from counts."""
    is_same = torch.tensor([[tag == other for other in tags] for tag in tags], dtype=counts.dtype)
    expected = (counts.sum(0) + 1) / (counts.sum() + counts.shape[1])
    for of in (is_same @ counts, counts):  # of the tag, of the preterminal
        expected = (of + strength * expected) / (of.sum(1, keepdim=True) + strength)
    return expected
