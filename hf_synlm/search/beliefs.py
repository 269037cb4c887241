# SPDX-License-Identifier: Apache-2.0
"""Belief update: how much a word changes the weights of the derivations.

It is a Renyi divergence, of order a = 0, 1, infinity or any other number that is not negative:

    D_a(q || p) = 1/(a - 1) log sum_y q(y)^a p(y)^(1 - a)      D_1 = sum_y q(y) log q(y) / p(y)
    D_0 = -log sum_{q(y) > 0} p(y)                             D_inf = log max_y q(y) / p(y)

with normalized weights p before and q after the word. There are two kinds:

    old    y are the derivations before the word; q(y) is the weight of all extensions of y through the word
    new    y are the derivations that have taken the word; p(y) is their weight without the word's own probability

The own probability of a word is that of all its tokens, given that a word comes. Neither kind changes where it is
multiplied by one number under all derivations. Where the search loses nothing and the sentence cannot end, "old" sums
up the p and q of "new" over the extensions of a derivation, so it is never larger.

The weights are those of all candidates that the search has reached, before it keeps the best. RNNG and Tree LM on a CPU
leave out what has a share below 1e-5 before the word, if the search did not score it.

The idea is that of Zhou, Stanojevic and Hale 2026 (arXiv 2606.27206); the definitions are ours.

Shapes: B sentences, K hypotheses, C candidates, W tokens. In nats, float64.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.state import NEG_INF, Scored


def renyi_divergence(log_q: Tensor, log_p: Tensor, order: float) -> Tensor:
    """D_a(q || p) [B] of order a, given log weights [B, C] that need not be normalized; 0 where there are none."""
    log_q, log_p = (values - values.logsumexp(1, keepdim=True) for values in (log_q, log_p))
    exists = log_q > NEG_INF
    ratio = (log_q - log_p).masked_fill(~exists, 0.0)
    if abs(order - 1) < 1e-7:  # the sum below would be lost in rounding
        value = (log_q.exp() * ratio).sum(1)
    elif order == math.inf:
        value = ratio.masked_fill(~exists, NEG_INF).amax(1)
    else:
        value = (order * log_q + (1 - order) * log_p).masked_fill(~exists, NEG_INF).logsumexp(1) / (order - 1)
    return value.masked_fill(~exists.any(1), 0.0).clamp(min=0.0)


class BeliefUpdates:
    """Belief updates of the words of B sentences, token by token.

    `ends` [B, W] is True at the last token of every word, where its value stands: p is that before its first token.
    `values` and `cut` hold [B] for every token: the divergence, and the share of q that is not in the beam after it.
    """

    def __init__(self, kind: str, order: float, ends: Tensor, num_beams: int) -> None:
        if kind not in ("old", "new") or not order >= 0:
            raise ValueError(
                f"belief_update is {(kind, order)} (--belief-update, --belief-order). Give 'old' or 'new', order >= 0."
            )
        self.kind, self.order, self.num_beams, self.ends = kind, order, num_beams, ends
        self._starts = F.pad(ends[:, :-1], (1, 0), value=True)
        self.values: list[Tensor] = []
        self.cut: list[Tensor] = []
        nothing = torch.zeros(len(ends), 1, dtype=torch.float64, device=ends.device)
        # Of the word so far: weights before it, log of the share that was kept; and per hypothesis of the beam the one
        # from which it came before the word, and the log-probability of the word's own tokens.
        self._before, self._kept = nothing.expand(-1, num_beams), nothing[:, 0]
        self._root, self._own = nothing.long(), nothing

    def add(
        self, scored: Scored, before: Tensor, after: Tensor, origin: Tensor, words: Tensor, order: Tensor, place: Tensor
    ) -> None:
        """Note the next token.

        `before` and `after` [R, K] are the scores of the beam. The candidates continued hypotheses, `origin`, by tokens
        with the log-probabilities `words`, and became hypotheses in this `order`; `place` [B] is the row of a sentence.
        """
        starts, ends = (values[:, len(self.values)] for values in (self._starts, self.ends))
        first = F.pad(before[place], (0, self.num_beams - before.shape[1]), value=NEG_INF).double()
        own_places = torch.arange(before.shape[1], device=place.device)
        self._before = torch.where(starts[:, None], first, self._before)
        self._root = torch.where(starts[:, None], own_places, self._root)
        self._own = self._own.masked_fill(starts[:, None], 0.0)
        continued, log_q = scored.origin[place], scored.after[place].double()
        if self.kind == "new":
            log_p = scored.before[place].double() - self._own.gather(1, continued)
            log_p = log_p.masked_fill(log_q == NEG_INF, NEG_INF)
        else:
            most = log_q.amax(1, keepdim=True).clamp(min=torch.finfo(log_q.dtype).min)
            log_p, weights = self._before, (log_q - most).exp()
            log_q = torch.zeros_like(log_p).scatter_add(1, self._root.gather(1, continued), weights).log()
        self.values.append(renyi_divergence(log_q, log_p, self.order).masked_fill(~ends, 0.0))
        kept = after.logsumexp(1) - scored.after.logsumexp(1) + (0.0 if scored.kept is None else scored.kept)
        self._kept = self._kept.masked_fill(starts, 0.0) + kept[place].double()
        self.cut.append((1 - self._kept.exp()).clamp(0.0, 1.0).nan_to_num(nan=0.0).masked_fill(~ends, 0.0))
        order = order.clamp(max=origin.shape[1] - 1)
        origin, words = (values.gather(1, order)[place] for values in (origin, words))
        self._root, self._own = self._root.gather(1, origin), self._own.gather(1, origin) + words
