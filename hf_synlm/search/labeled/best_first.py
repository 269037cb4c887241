# SPDX-License-Identifier: Apache-2.0
"""Best-first search inside a word: fewer states than step by step, for models of which a state costs most.

The states of a word are executed in the order of their scores, a few at a time, until the best that is left cannot beat
the K hypotheses that have reached the word: log-probabilities never rise. So the K best are found exactly, unless more
than `action_beam_size` states wait at once, of which the best are kept. `FastTrackSearch` takes all states one action
further at every step instead, and executes many that score less than the K best in the end. On a CPU, a Tree LM also
executes the words of the best K found so far together with the last states: few of them turn out to be in vain.

With `slack` (nats) the word itself is bounded, too: a state is dropped if it could reach the K best only by making the
word more than exp(slack) times as probable as the best state that has been executed. That is a guess, not a bound, and
it holds where a word is given or must come, not where the sentence may end.

Shapes: B sentences, O actions that wait, R states of a step. All scores are natural logs; -inf = none.
"""

from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from hf_synlm.search.labeled.decoder import FastTrackDecoder
from hf_synlm.search.labeled.fast_track import Frontier, Limits, SetAside, WordScores, nodes_ahead
from hf_synlm.search.labeled.machine import Phase
from hf_synlm.search.state import NEG_INF, SearchState
from hf_synlm.trees.transitions import SHIFT

# States of a step for each sentence on a CPU: enough for fast products. Elsewhere steps are as wide as the beam.
_CPU_WIDTH = 32


class _Waiting(NamedTuple):
    """Structural actions that have not been executed, each [B, O], best first."""

    scores: Tensor
    parents: Tensor
    """State before the action."""
    actions: Tensor
    origin: Tensor
    """Hypothesis of the word beam."""

    def rows(self, rows: slice) -> Self:
        """Some of them."""
        return type(self)(*(values[:, rows] for values in self))

    def best_with(self, other: Self, count: int) -> Self:
        """The best `count` of these and others."""
        joined = [torch.cat(pair, 1) for pair in zip(self, other, strict=True)]
        scores, index = joined[0].topk(min(count, joined[0].shape[1]))
        return type(self)(scores, *(values.gather(1, index) for values in joined[1:]))


class BestFirstDecoder(FastTrackDecoder):
    """`FastTrackDecoder` whose words are searched best-first; `fast_track_size` has no effect."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fast_track_size = 0  # of what it would score besides, nothing is kept

    @property
    def options(self) -> dict[str, Any]:
        """What decides which hypotheses are found, besides `num_beams`."""
        slack = self.machine.config.search_slack
        more = {} if slack is None else {"search_slack": slack}
        return {"action_beam_size": self.action_beam_size, "search_order": "best_first", **more}

    def _reach(
        self, state: SearchState, phase: Phase, words: WordScores | None, limits: Limits | None = None
    ) -> SetAside:
        """Execute structural actions, best first, until the best K that reach the word or the end are known.

        Arguments as for `FastTrackSearch`. Cost: a state and a row of the model for every action that scores more than
        the K-th best hypothesis found so far.
        """
        aside, frontier, state.ahead = SetAside(state, self.num_beams), self._frontier(state), None
        none = frontier.origin[:, :0]
        waiting, best_word = _Waiting(frontier.scores[:, :0], none, none, none), None
        slack = self.machine.config.search_slack
        width = _CPU_WIDTH if none.device.type == "cpu" else self.action_beam_size
        while frontier.scores.shape[1]:
            total = frontier.scores[..., None] + self._action_log_probs(state, frontier, phase, limits)
            ended = self._ended_by(frontier, total, phase, limits)
            # `slack` compares with the best word of all states, so all are scored.
            least = aside.best[True][:, -1:] if slack is None else torch.full_like(total[:, :1, 0], NEG_INF)
            reached, num_words = self._reached(frontier, total, words, least, ended)
            aside.add(reached, num_words, *reached.scores.sort(1, descending=True))
            if phase is Phase.CONTINUE and slack is not None:
                gained = reached.scores[:, :num_words].view(*total.shape[:2], -1).amax(2) - total[..., SHIFT]
                lowest = torch.finfo(gained.dtype).min  # where SHIFT is illegal
                gained = gained.nan_to_num(nan=lowest, posinf=lowest).amax(1, keepdim=True)
                best_word = gained if best_word is None else torch.maximum(best_word, gained)
            waiting = waiting.best_with(self._next(frontier, total), self.action_beam_size)
            now, later = waiting.rows(slice(width)), waiting.rows(slice(width, None))
            live = (now.scores > NEG_INF) & ~self._is_decided(aside, now.scores, phase, limits)
            if best_word is not None:
                live = live & (now.scores + best_word + slack > aside.best[True][:, -1:])
            if phase is Phase.CONTINUE and self.machine.shifts_ahead:
                self._shift_ahead(state, aside, live)
            seen = self.machine.look(state.pool, now.parents)
            nodes = self.machine.push(state.pool, seen, now.actions, state.num_tokens, live)
            count = nodes.shape[1]
            scores, waiting = now.scores.masked_fill(~live, NEG_INF)[:, :count], later
            frontier = Frontier(self.machine.look(state.pool, nodes), scores, now.origin[:, :count])
        return aside

    def _shift_ahead(self, state: SearchState, aside: SetAside, live: Tensor) -> None:
        """Generate the words of the best K so far in the call that executes the states that are `live` [B, R].

        Where few states are left, hardly any of them gets among the best K, so `commit` needs no call of its own.
        """
        few = live.sum(1, keepdim=True) <= min(self.num_beams, _CPU_WIDTH - 1)  # no more wait for the next step
        if not bool(few.any() & live.any()):
            return
        best = aside.candidates(True, self.num_beams)
        wanted = few & (best.scores > NEG_INF) & ~nodes_ahead(state, best)[1]
        if bool(wanted.any()):
            step = (state.pool, best.parents, best.tokens, state.num_tokens, state.edges, wanted)
            nodes = self.machine.shift(*step, waits=True).masked_fill(~wanted, -1)
            state.ahead = nodes if state.ahead is None else torch.cat([state.ahead, nodes], 1)

    def _next(self, frontier: Frontier, total: Tensor) -> _Waiting:
        """The best structural actions of a frontier, whose actions have the scores `total` [B, R, A]."""
        scores, index = self._moves(total)
        row = (index // total.shape[2]).clamp(max=total.shape[1] - 1)  # of moves that do not exist, any
        parents, origin = (values.gather(1, row) for values in (frontier.seen.nodes, frontier.origin))
        return _Waiting(scores, parents, index % total.shape[2], origin)
