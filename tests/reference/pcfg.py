"""Slow, obvious specification of PCFGs: every bracketing of one sentence, every derivation of a bracketing.

A grammar is three tables of probabilities: root[A], emission[X][v], rule[A, B, C], nonterminals before preterminals.
"""

import math

import torch
from torch import Tensor

from tests.reference.trees import all_binary_trees, spans_of


def tree_weights(rule: Tensor, emission: Tensor, words: list[int], tree, best: bool = False) -> list[float]:
    """Weight of a bracketing by the symbol at its top: the sum over its labels, or the best of them."""
    num_nonterminals, num_symbols = rule.shape[:2]
    if isinstance(tree, int):
        return [0.0] * num_nonterminals + [row[words[tree]].item() for row in emission]
    left, right = (tree_weights(rule, emission, words, child, best) for child in tree)
    weights = []
    for table in rule.tolist():
        parts = [table[b][c] * left[b] * right[c] for b in range(num_symbols) for c in range(num_symbols)]
        weights.append(max(parts) if best else math.fsum(parts))
    return weights + [0.0] * (num_symbols - num_nonterminals)


def all_tree_probs(root: Tensor, rule: Tensor, emission: Tensor, words: list[int], best: bool = False) -> dict:
    """p(words, tree) of every bracketing, by its spans in post-order; or of its best derivation."""
    found = {}
    for tree in all_binary_trees(0, len(words)):
        weights = tree_weights(rule, emission, words, tree, best)
        parts = [prob * weights[symbol] for symbol, prob in enumerate(root.tolist())]
        found[tuple(spans_of(tree))] = max(parts) if best else math.fsum(parts)
    return found


def span_posteriors(probs: dict, size: int) -> Tensor:
    """Posteriors [n + 1, n + 1] of spans of two or more words."""
    posteriors, total = torch.zeros(size + 1, size + 1, dtype=torch.float64), math.fsum(probs.values())
    for spans, prob in probs.items():
        for i, j in spans:
            posteriors[i, j] += prob / total
    return posteriors
