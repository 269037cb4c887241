# SPDX-License-Identifier: Apache-2.0
"""Rules A -> B C as probabilities, and the sums over them that charts need: a table, factors of low rank, or a list.

Vectors of spans are scaled; charts keep the logarithms of their scales. All kinds of rules have the same methods, so
that charts need not know which they use.

Shapes: B sentences, T words, K spans of one width, W splits, Y nonterminals, X preterminals, S = Y + X symbols
(nonterminals first), r rank. `*` is nothing, or B where every sentence has a grammar of its own.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Words(NamedTuple):
    """What words add to spans, [B, T, ...] each."""

    left: Tensor
    """As left child of a word."""
    right: Tensor
    """As right child of a word."""
    begins: Tensor
    """As left child of a constituent."""
    ends: Tensor
    """As right child of a constituent."""


class DenseRules:
    """A table `rule` [*, Y, S, S] of p(A -> B C).

    Words have preterminals above them and longer spans nonterminals, so the table has four blocks. What a word adds to
    its sister is summed once per word: a matrix from the sister to the parent.
    """

    def __init__(self, rule: Tensor) -> None:
        self.rule, self.size, self.num_symbols = rule, *rule.shape[-3:-1]

    def of_words(self, emission: Tensor) -> Words:
        """What words add that are generated with probabilities `emission` [B, T, X]."""
        size, rule = self.size, self.rule
        begins = rule[..., size:, :].transpose(-3, -2).flatten(-2)  # [*, X, Y S]
        ends = rule[..., :size, size:].movedim(-1, -3).flatten(-2)  # [*, X, Y Y]
        begins, pairs = (emission @ begins).unflatten(-1, (size, -1)).split([size, rule.shape[-1] - size], -1)
        return Words(pairs, emission, begins, (emission @ ends).unflatten(-1, (size, size)))

    def combine(
        self, first: Words, last: Words, left: Sequence[Tensor], right: Sequence[Tensor], weight: Tensor
    ) -> Tensor:
        """Values [B, K, Y] of spans, summed over their W splits with `weight` [B, K, W].

        `first` and `last` are the first and the last words of the spans; `left` and `right` their W - 1 children
        [B, K, Y] of two or more words, the narrowest left one first, the widest right one first.
        """
        if not left:
            return _apply(first.left, last.right)
        values = weight[..., :1] * _apply(first.begins, right[0])
        values = values + weight[..., -1:] * _apply(last.ends, left[-1])
        if len(left) > 1:
            pairs = torch.stack([*left[:-1]], 2) * weight[..., 1:-1, None]
            pairs = pairs.transpose(2, 3) @ torch.stack([*right[1:]], 2)
            values = values + pairs.flatten(-2) @ self._constituents
        return values

    @cached_property
    def _constituents(self) -> Tensor:
        """[*, Y Y, Y] from two constituents to the parent."""
        return self.rule[..., : self.size, : self.size].flatten(-2).transpose(-2, -1)

    def of_constituents(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """What constituents with `values` [B, K, Y] are as left and as right children."""
        return values, values

    def of_root(self, root: Tensor) -> Tensor:
        """What the root [*, Y] reads of the values of a whole sentence."""
        return root

    def symbols(self, values: Tensor) -> Tensor:
        """Probabilities [B, K, Y] of the nonterminals of constituents."""
        return values

    # ------------------------------------------------------------------------------------------------- next words
    @cached_property
    def _corners(self) -> tuple[Tensor, Tensor]:
        """Sums over chains of left corners [*, Y, Y], and probabilities [*, Y, X] of a preterminal as left child."""
        nonterminals, words = self.rule.sum(-1).split([self.size, self.rule.shape[-1] - self.size], -1)
        return _chains(nonterminals, words.sum(-1)), words

    def _expand(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Expand symbols [B, S] to their left corners: nonterminals [B, Y] and preterminals [B, X]."""
        chains, words = self._corners
        nonterminals = row_times(expected[:, : self.size], chains)
        return nonterminals, expected[:, self.size :] + row_times(nonterminals, words)

    def begin(self, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Before the first word of `count` sentences: state [B, Y] and preterminals [B, X]."""
        expected = root.new_zeros(count, self.num_symbols)
        return self._expand(torch.cat([root.expand(count, -1), expected[:, self.size :]], -1))

    def follow(self, states: Tensor, word: Tensor, left: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """State and preterminals after the words read: a right sister begins.

        `states` [B, T, Y] are those before each word, `word` [B, X] the probabilities of the last word, `left`
        [B, T - 1, Y] the constituents that begin at each word but the last and end with it, `weight` [B, T] scales.
        """
        states, rule, size = states * weight[..., None], self.rule, self.size
        pairs = states[:, -1, :, None] * word[:, None]
        expected = row_times(pairs.flatten(1), rule[..., size:, :].flatten(-3, -2))
        if left.shape[1]:
            pairs = states[:, :-1].transpose(1, 2) @ left
            expected = expected + row_times(pairs.flatten(1), rule[..., :size, :].flatten(-3, -2))
        return self._expand(expected)

    # ------------------------------------------------------------------------------------------------ derivations
    def table(self) -> Tensor:
        """The table [*, Y, S, S]."""
        return self.rule

    def of_rows(self, rows: Tensor | int) -> Self:
        """The rules of some sentences, or of one."""
        return self if self.rule.dim() == 3 else type(self)(self.rule[rows])

    def single(self) -> Self:
        """The rules of the only sentence, for any number of sentences."""
        return type(self)(self.rule[0])

    def sides(self) -> tuple[Tensor, Tensor]:
        """Probabilities [*, Y, S] of the left and of the right children of nonterminals."""
        return self.rule.sum(-1), self.rule.sum(-2)

    def children(self, parent: int) -> tuple[Tensor, Tensor, Tensor]:
        """The children B and C of a nonterminal of one grammar, and p(A -> B C) [M]."""
        pairs = torch.arange(self.rule.shape[-1] ** 2, device=self.rule.device)
        return pairs // self.rule.shape[-1], pairs % self.rule.shape[-1], self.rule[parent].flatten()

    def best(self, first: Tensor, last: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """Log-probabilities [B, K, Y] of the best derivations of spans, as `combine` of those of words and children."""
        pairs = first.new_full((), -torch.inf)
        for one, other in zip(padded(first, left, self.size), padded(last, right[::-1], self.size)[::-1], strict=True):
            pairs = torch.maximum(pairs, (one[..., :, None] + other[..., None, :]).flatten(2))
        rule = self.rule.log().flatten(-2)
        return torch.stack([(pairs + rule[..., a, :].unsqueeze(-2)).amax(2) for a in range(self.size)], 2)

    def sample(self, parent: Tensor) -> tuple[Tensor, ...]:
        """Draw the children of nonterminals [R] of one grammar."""
        anything = parent.new_ones(len(parent), 1, self.num_symbols)
        return self.sample_split(parent, anything, anything, anything[..., 0])[1:3]

    def sample_split(self, parent: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """Draw split and children of nonterminals [R], given left and right children [R, W, S] and [R, W] scales.

        Also gives p(A -> B C) of the rules drawn.
        """
        rows = []
        for row, (a, *given) in enumerate(zip(parent.tolist(), left, right, weight[..., None], strict=True)):
            first, second, probs = self.of_rows(row).children(a)
            drawn = draw((given[0][:, first] * given[1][:, second] * given[2] * probs).view(1, -1))
            split, rule = drawn // len(probs), drawn % len(probs)
            rows.append((split, first[rule], second[rule], probs[rule]))
        return tuple(map(torch.cat, zip(*rows, strict=True)))


class LowRankRules:
    """p(A -> B C) = sum_k head[A, k] left[B, k] right[C, k]: first a rank given the parent, then each child by itself.

    `head` [*, Y, r] sums to 1 over k, `left` and `right` [*, S, r] over the symbols. Without `head` every nonterminal
    has its own rank (r = Y). Sums stay in the space of ranks; no table is built.

    Source: section 3.2 of Yang et al. (2022) for the inside pass.
    """

    def __init__(self, head: Tensor | None, left: Tensor, right: Tensor) -> None:
        size = left.shape[-1] if head is None else head.shape[-2]
        self.head, self.left, self.right = head, left, right
        self.size = size
        self.left_words, self.right_words = (side[..., size:, :] for side in (left, right))

    def _of_ranks(self, side: Tensor) -> Tensor:
        """[*, r, r] from the rank of a constituent to the rank of its parent, on one side."""
        nonterminals = side[..., : self.size, :]
        return nonterminals if self.head is None else self.head.transpose(-1, -2) @ nonterminals

    @cached_property
    def _ranks(self) -> tuple[Tensor, Tensor]:
        return self._of_ranks(self.left), self._of_ranks(self.right)

    def of_words(self, emission: Tensor) -> Words:
        """See `DenseRules`; words are [B, T, r] on each side."""
        left, right = emission @ self.left_words, emission @ self.right_words
        return Words(left, right, left, right)

    def combine(
        self, first: Words, last: Words, left: Sequence[Tensor], right: Sequence[Tensor], weight: Tensor
    ) -> Tensor:
        """Values [B, K, r] of spans; see `DenseRules`."""
        if not left:
            return first.left * last.right
        values = weight[..., :1] * first.begins * right[0] + weight[..., -1:] * last.ends * left[-1]
        if len(left) > 1:
            both = torch.stack([*left[:-1]], 2) * torch.stack([*right[1:]], 2)
            values = values + (weight[..., None, 1:-1] @ both).squeeze(-2)
        return values

    def of_constituents(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        left, right = self._ranks
        return values @ left, values @ right

    def of_root(self, root: Tensor) -> Tensor:
        """See `DenseRules`; [*, r]."""
        return root if self.head is None else row_times(root, self.head)

    def symbols(self, values: Tensor) -> Tensor:
        """See `DenseRules`."""
        return values if self.head is None else values @ self.head.transpose(-1, -2)

    # ------------------------------------------------------------------------------------------------- next words
    @cached_property
    def _corners(self) -> tuple[Tensor, Tensor]:
        """Sums over chains of left corners: of the ranks [*, r, r], and after a left sister [*, r, r]."""
        left, right = (side.transpose(-1, -2) for side in self._ranks)  # from the parent's rank to the child's
        chains = _chains(left, self.left_words.sum(-2))
        return chains, right @ chains

    def begin(self, root: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """See `DenseRules`; states are [B, r]."""
        state = row_times(self.of_root(root), self._corners[0]).expand(count, -1)
        return state, row_times(state, self.left_words.transpose(-1, -2))

    def follow(self, states: Tensor, word: Tensor, left: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseRules`; the word is [B, X], too."""
        own = row_times(word, self.left_words)[:, None]
        left = torch.cat([left, own], 1) if left.shape[1] else own
        sisters = (weight[:, None] @ (states * left)).squeeze(1)
        state = row_times(sisters, self._corners[1])
        words = row_times(sisters, self.right_words.transpose(-1, -2))
        return state, words + row_times(state, self.left_words.transpose(-1, -2))

    # ------------------------------------------------------------------------------------------------ derivations
    def table(self) -> Tensor:
        """The table [*, Y, S, S], multiplied out."""
        head = torch.eye(self.size, dtype=self.left.dtype, device=self.left.device) if self.head is None else self.head
        return torch.einsum("...ak,...bk,...ck->...abc", head, self.left, self.right)

    def of_rows(self, rows: Tensor) -> Self:
        """See `DenseRules`."""
        if self.left.dim() == 2:
            return self
        return type(self)(None if self.head is None else self.head[rows], self.left[rows], self.right[rows])

    def single(self) -> Self:
        """See `DenseRules`."""
        return type(self)(None if self.head is None else self.head[0], self.left[0], self.right[0])

    def sides(self) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        left, right = self.left.transpose(-1, -2), self.right.transpose(-1, -2)
        return (left, right) if self.head is None else (self.head @ left, self.head @ right)

    def _ranks_of(self, parent: Tensor) -> Tensor:
        """Probabilities [R, r] of the ranks of nonterminals [R]."""
        if self.head is None:
            return nn.functional.one_hot(parent, self.size).to(self.left.dtype)
        return _rows_of(self.head, parent)

    def sample(self, parent: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        rank = draw(self._ranks_of(parent))
        return draw(_rows_of(self.left.transpose(-1, -2), rank)), draw(_rows_of(self.right.transpose(-1, -2), rank))

    def sample_split(self, parent: Tensor, left: Tensor, right: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        """See `DenseRules`."""
        ranks = (left @ self.left) * (right @ self.right) * self._ranks_of(parent)[:, None]
        drawn = draw((ranks * weight[..., None]).flatten(1))
        split, rank = drawn // ranks.shape[2], drawn % ranks.shape[2]
        rows = torch.arange(len(parent), device=parent.device)
        first, second = (
            draw(child[rows, split] * _rows_of(side.transpose(-1, -2), rank))
            for child, side in ((left, self.left), (right, self.right))
        )
        both = _rows_of(self.left, first) * _rows_of(self.right, second)
        return split, first, second, (self._ranks_of(parent) * both).sum(-1)


class _Pairs:
    """The rules whose children are words or constituents, on each side: P pairs of children, and parents of a pair."""

    def __init__(self, rules: "SparseRules", first_is_word: bool, second_is_word: bool) -> None:
        parent, first, second = rules.rules
        here = ((first >= rules.size) == first_is_word) & ((second >= rules.size) == second_is_word)
        pairs, self.pair = (first * rules.num_symbols + second)[here].unique(return_inverse=True)
        self.parent, self.log_probs, self.second = parent[here], rules.log_probs[here], pairs % rules.num_symbols
        self.left = pairs // rules.num_symbols - rules.size * first_is_word
        self.right = self.second - rules.size * second_is_word
        places = torch.stack([self.parent, self.pair]), self.log_probs.exp()
        # [Y, P] from the pairs to their parents
        self.matrix = torch.sparse_coo_tensor(*places, (rules.size, len(pairs)), check_invariants=False).coalesce()

    def best_parents(self, values: Tensor) -> Tensor:
        """The largest [Y, B, K] of the pairs of a parent [P, B, K]; logarithms."""
        values = values.index_select(0, self.pair) + self.log_probs[:, None, None]
        none = values.new_full((len(self.matrix), *values.shape[1:]), -torch.inf)
        return none.scatter_reduce(0, self.parent[:, None, None].expand_as(values), values, "amax")


class SparseRules(DenseRules):
    """A list of rules [3, R], A, B and C of each, sorted by A, with log p(A -> B C) [R]; no other rule is possible.

    A pair of children stands once for all its parents. Pairs that begin or end with a word are possible in one split of
    a span each; only pairs of constituents, the fewest, are summed over all splits. Symbols are the first dimension in
    memory, so that whole rows are gathered.
    """

    def __init__(self, rules: Tensor, log_probs: Tensor, num_nonterminals: int, num_preterminals: int) -> None:
        self.rules, self.log_probs = rules, log_probs
        self.size, self.num_symbols = num_nonterminals, num_nonterminals + num_preterminals

    @cached_property
    def _pairs(self) -> dict[tuple[bool, bool], _Pairs]:
        return {(first, second): _Pairs(self, first, second) for first in (False, True) for second in (False, True)}

    def of_words(self, emission: Tensor) -> Words:
        """See `DenseRules`; words are [B, T, X] everywhere."""
        emission = emission.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        return Words(emission, emission, emission, emission)

    def combine(
        self, first: Words, last: Words, left: Sequence[Tensor], right: Sequence[Tensor], weight: Tensor
    ) -> Tensor:
        """See `DenseRules`."""
        found = self._over_splits(first.left, last.right, left, right, weight)
        values: Any = sum((pairs.matrix @ value.flatten(1)).unflatten(1, weight.shape[:2]) for pairs, value in found)
        return values.permute(1, 2, 0)

    def best(self, first: Tensor, last: Tensor, left: Sequence[Tensor], right: Sequence[Tensor]) -> Tensor:
        """See `DenseRules`."""
        found = [pairs.best_parents(values) for pairs, values in self._over_splits(first, last, left, right)]
        return torch.stack(found).amax(0).permute(1, 2, 0)

    def _over_splits(
        self, first: Tensor, last: Tensor, left: Sequence[Tensor], right: Sequence[Tensor], weight: Tensor | None = None
    ) -> Iterable[tuple[_Pairs, Tensor]]:
        """The kinds of pairs, with their sums [P, B, K] over the splits; or their maxima of logarithms."""
        found: dict[_Pairs, Tensor] = {}
        for split, (one, other) in enumerate(zip([first, *left], [*right, last], strict=True)):
            pairs = self._pairs[split == 0, split == len(left)]
            one = one.permute(2, 0, 1).index_select(0, pairs.left)
            other = other.permute(2, 0, 1).index_select(0, pairs.right)
            value = one + other if weight is None else one * other * weight[..., split]
            if pairs in found:
                value = torch.maximum(found[pairs], value) if weight is None else found[pairs] + value
            found[pairs] = value
        return found.items()

    # ------------------------------------------------------------------------------------------------- next words
    @cached_property
    def _left_corners(self) -> tuple[Tensor, Tensor, Tensor]:
        """Left corners L that are nonterminals, sums over the chains to them [Y, L]; p(X is the left child) [Y, X]."""
        steps, words = self.sides()[0].tensor_split([self.size], 1)
        lefts = self.rules[1][self.rules[1] < self.size].unique()
        steps = steps[:, lefts]
        return lefts, steps @ _chains(steps[lefts], words[lefts].sum(-1)), words

    def _expand(self, expected: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        lefts, chains, words = self._left_corners
        state, preterminals = expected.tensor_split([self.size], 1)
        state = state.index_add(1, lefts, state @ chains)
        return state, preterminals + state @ words

    def follow(self, states: Tensor, word: Tensor, left: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        states = states * weight[..., None]
        expected = states.new_zeros(len(states), self.num_symbols)
        for (first_is_word, _), pairs in self._pairs.items():
            before, child = (states[:, -1:], word[:, None]) if first_is_word else (states[:, :-1], left)
            if not child.shape[1]:
                continue
            found = (pairs.matrix.t() @ before.flatten(0, 1).t()).unflatten(1, before.shape[:2])
            found = (found * child.permute(2, 0, 1).index_select(0, pairs.left)).sum(2).t()
            expected = expected.scatter_add(1, pairs.second.expand_as(found), found)
        return self._expand(expected)

    # ------------------------------------------------------------------------------------------------ derivations
    def sides(self) -> tuple[Tensor, Tensor]:
        """See `DenseRules`."""
        none, places = self.log_probs.new_zeros(self.size * self.num_symbols), self.rules[0] * self.num_symbols
        left, right = (none.index_add(0, places + child, self.log_probs.exp()) for child in self.rules[1:])
        return left.view(self.size, -1), right.view(self.size, -1)

    def of_rows(self, rows: Tensor | int) -> Self:
        """See `DenseRules`."""
        return self

    def children(self, parent: int) -> tuple[Tensor, Tensor, Tensor]:
        """See `DenseRules`."""
        start, end = torch.searchsorted(self.rules[0], self.rules.new_tensor([parent, parent + 1])).tolist()
        return self.rules[1, start:end], self.rules[2, start:end], self.log_probs[start:end].exp()


def _chains(step: Tensor, stop: Tensor) -> Tensor:
    """(I - P)^-1 [*, d, d], the sum over chains of steps P, whose rows sum to 1 together with `stop` [*, d].

    Nothing is subtracted from 1: 1 - P[k, k] is a sum. The rounding unit gives chains without an end an inverse, too.
    """
    others = step - torch.diag_embed(step.diagonal(dim1=-2, dim2=-1))
    leaves = others.sum(-1) + stop
    leaves = torch.where(leaves > 0, leaves, 1) * (1 + torch.finfo(leaves.dtype).eps)
    return torch.linalg.inv(torch.diag_embed(leaves) - others)


def _rows_of(matrix: Tensor, index: Tensor) -> Tensor:
    """Rows [R, e] of a matrix [d, e], or of one matrix for each [R, d, e]."""
    if matrix.dim() == 2:
        return matrix[index]
    return matrix[torch.arange(len(index), device=index.device), index]


def row_times(rows: Tensor, matrix: Tensor) -> Tensor:
    """Rows [B, d] (or one row [d]) times a matrix [*, d, e]."""
    return (rows.unsqueeze(-2) @ matrix).squeeze(-2)


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Matrices [B, K, d, e] times vectors [B, K, e]."""
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)


def padded(words: Tensor, constituents: Sequence[Tensor], num_nonterminals: int) -> list[Tensor]:
    """Logarithms [..., S] of words [..., X] and of constituents [..., Y], by width."""
    parts = [F.pad(part, (0, words.shape[-1]), value=-torch.inf) for part in constituents]
    return [F.pad(words, (num_nonterminals, 0), value=-torch.inf), *parts]


def draw(weights: Tensor) -> Tensor:
    """Draw an entry of every row [R, N] of weights, which need not sum to 1."""
    return torch.multinomial(weights, 1).squeeze(1)
