# SPDX-License-Identifier: Apache-2.0
"""Exact probabilities of next words: sums over all derivations that begin with the words read so far.

The leftmost derivation writes words from left to right. F(i, A) is the weight of derivations that have written words
0..i-1 and are about to expand a constituent A that begins there:

    F0(0) = root;   F0(i, C) = sum_(j < i) sum_(A, B) F(j, A) p(A -> B C) b(j, i, B)
    F(i, nonterminals) = F0(i) (I - P)^-1,   P[A, B] = sum_C p(A -> B C): chains of left corners
    t(i, X) = F0(i, X) + sum_A F(i, A) sum_C p(A -> X C)
    p(w_0..i-1, then v) = sum_X t(i, X) emission[X, v];   p(w_0..i-1 is the sentence) = sum_A root[A] b(0, i, A)

b are the inside probabilities of spans that end before i, so no later word matters. The probabilities of all next words
and of the end sum to 1; derivations that never end count, too. Rules of low rank keep F in the space of ranks.

`read_sentences` reads all words at once from a chart; `PrefixState`, which a cache keeps, reads word by word.

Cost for n words, beside the inside pass: table O(n^2 Y^2 + n Y S (Y + X)); low rank O(n^2 r + n r^2 + n r X); then
O(n X V) for the words. A state costs O(n^2 r) (or Y for r) per word, and n steps.

Shapes: B sentences, T words, X preterminals, V vocabulary, d Y nonterminals or r ranks.
"""

from dataclasses import dataclass, fields
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.models.pcfg.inside import Chart, Grammar, in_full_precision, normalized, safe_log, scaled, split_weights
from hf_synlm.models.pcfg.rules import Words


@in_full_precision
def read_sentences(grammar: Grammar, chart: Chart) -> tuple[Tensor, Tensor]:
    """Scaled weights [B, T + 1, X] of the preterminals after 0, 1, ... words, and their log scales [B, T + 1]."""
    rules, (count, num_words) = grammar.rules, chart.whole.shape
    state, words = rules.begin(grammar.root, count)
    states, preterminals, scales = [state], [words], [chart.whole.new_zeros(count)]
    for end in range(1, num_words + 1):
        left, left_scale = chart.columns(end)
        weight, scale = split_weights(torch.stack(scales, 1) + left_scale)
        found = rules.follow(torch.stack(states, 1), chart.emission[:, end - 1], left, weight)
        state, words, scale = _scaled_state(*found, scale)
        states.append(state)
        preterminals.append(words)
        scales.append(scale)
    return torch.stack(preterminals, 1), torch.stack(scales, 1)


def _scaled_state(state: Tensor, words: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    words, more = normalized(words)
    return state / more.exp().unsqueeze(-1), words, scale + more


@in_full_precision
def prefix_log_probs(grammar: Grammar, preterminals: Tensor, scale: Tensor) -> Tensor:
    """Log p(words so far, then v) [..., V] of all words v."""
    probs = preterminals @ grammar.probabilities
    if not probs.requires_grad:
        return probs.log_().add_(scale.unsqueeze(-1))
    return safe_log(probs, scale.unsqueeze(-1))


@dataclass
class PrefixState:
    """What has been read of B sentences, whose words stand at the right end of T places."""

    states: Tensor
    """[B, T + 1, d] F before and behind every place."""
    state_scale: Tensor
    """[B, T + 1]; -inf before the sentence begins."""
    pairs: Tensor
    """[B, T, ...] what words add as left child of a word."""
    begins: Tensor
    """[B, T, ...] what words add as left child of a constituent."""
    left: Tensor
    """[B, T, T, d] what constituents (i, j) are as left children, at [i, j - 1]."""
    scale: Tensor
    """[B, T, T] log scales of spans (i, j), words included, at [i, j - 1]."""
    preterminals: Tensor
    """[B, X] weights of the preterminals now, in the scale of the last state."""
    prefix: Tensor
    """[B] log p(words so far)."""
    whole: Tensor
    """[B] log p(words so far are the sentence)."""
    count: Tensor
    """[B] number of words."""

    @classmethod
    def before(cls, grammar: Grammar, count: int) -> Self:
        """Before the first word of `count` sentences."""
        rules, like = grammar.rules, grammar.root
        state, preterminals = rules.begin(grammar.root, count)
        none = rules.of_words(like.new_zeros(count, 0, grammar.emission.shape[-2]))
        nothing = like.new_zeros(count)
        never = torch.full_like(nothing, float("-inf"))
        left = like.new_zeros(count, 0, 0, state.shape[1])
        number = nothing.long()
        return cls(
            state[:, None], nothing[:, None], none.left, none.begins, left, left[..., 0], preterminals, nothing, never,
            number,
        )  # fmt: skip

    def select(self, rows: Tensor) -> Self:
        """Some of the sentences [B'], in that order."""
        return type(self)(*(getattr(self, field.name).index_select(0, rows) for field in fields(self)))

    def read(self, grammar: Grammar, ids: Tensor, present: Tensor) -> Self:
        """Read one word `ids` [B] of every sentence where `present` [B]; the others stay as they are."""
        rules, num_words = grammar.rules, self.pairs.shape[1]
        emission, word_scale = scaled(grammar.of_words(ids[:, None]))
        last = rules.of_words(emission)
        left = self.left.new_zeros(*self.left.shape[:2], self.left.shape[3])  # [B, T, d] of spans that end here
        right, scale = torch.zeros_like(left), F.pad(word_scale, (num_words, 0))
        root, begin = rules.of_root(grammar.root), num_words - self.count
        whole = torch.full_like(self.whole, -torch.inf)
        for start in reversed(range(num_words)):
            first = Words(*(part[:, start : start + 1] for part in (self.pairs, last.right, self.begins, last.ends)))
            scales = self.scale[:, start, start:] + scale[:, start + 1 :]
            weight, above = split_weights(scales[:, None])
            children = self.left[:, None, start, start + 1 :].unbind(2), right[:, None, start + 1 :].unbind(2)
            values, more = normalized(rules.combine(first, last, *children, weight))
            for side, vectors in zip((left, right), rules.of_constituents(values), strict=True):
                side[:, start] = vectors[:, 0]
            scale[:, start] = (above + more)[:, 0]
            is_whole = (values[:, 0] * root).sum(-1).log() + scale[:, start]
            whole = torch.where(begin == start, is_whole, whole)
        weight, above = split_weights(self.state_scale + scale)
        found = rules.follow(self.states, emission[:, 0], left, weight)
        state, preterminals, state_scale = _scaled_state(*found, above)
        seen = (self.preterminals * emission[:, 0]).sum(-1).log() + self.state_scale[:, -1] + word_scale[:, 0]

        def longer(old: Tensor, new: Tensor, empty: float = 0.0) -> Tensor:
            """Add a place [B, 1, ...] at the end, or at the beginning of sentences without a word."""
            shape = [-1] + [1] * (old.dim() - 1)
            waiting = torch.cat([torch.full_like(new, empty), old], 1)
            return torch.where(present.view(shape), torch.cat([old, new], 1), waiting)

        return type(self)(
            longer(self.states, state[:, None]),
            longer(self.state_scale, state_scale[:, None], -torch.inf),
            longer(self.pairs, last.left),
            longer(self.begins, last.begins),
            _longer_spans(self.left, F.pad(left, (0, 0, 0, 1)), present),
            _longer_spans(self.scale[..., None], scale[..., None], present).squeeze(-1),
            torch.where(present[:, None], preterminals, self.preterminals),
            torch.where(present, seen, self.prefix),
            torch.where(present, whole, self.whole),
            self.count + present,
        )


def _longer_spans(old: Tensor, new: Tensor, present: Tensor) -> Tensor:
    """Add the spans [B, T + 1, d] that end with a new word to others [B, T, T, d], or make place before them."""
    longer = F.pad(old, (0, 0, 0, 1, 0, 1))
    longer[:, :, -1] = new
    return torch.where(present.view(-1, 1, 1, 1), longer, F.pad(old, (0, 0, 1, 0, 1, 0)))
