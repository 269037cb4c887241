# SPDX-License-Identifier: Apache-2.0
"""Word-synchronous beam search with fast-track, for systems with many structural actions between two words.

The slow and obvious version is `Grammar.search` in `tests/reference/rnng_search.py`.

Inside a word the beam goes action by action (Stern et al. 2017). One step looks at all actions of all k states and
takes the best k of them. Those that reach the next word are set aside; the others are executed, and the next step
looks at the states that they lead to, until k have reached the word. *Fast-track* also sets aside a few at every step
that reach the word without being among the best k. The best K (the word beam) of those set aside go on together to the
next word: the search is *word-synchronous*. With `m_t = logsumexp_k log p(x_1..t, y_k)` over them, m_t - m_(t-1) is the
beam's log p(x_t | x_1..t-1).

States are nodes of a pool: hypotheses branch without copying a vector, only live states are computed, and the last
action of a word (SHIFT) is executed for the K that are kept (`best_first`: for some earlier). A word ends as soon as no
live state can beat the K that have reached it: log-probabilities never rise (Noji and Oseki's code goes on).

Source: Noji and Oseki 2021, section 3; `word_sync_beam_search` of the authors' code.

Shapes: B sentences, K word beam, R states of a step, A action ids, G words considered per state, E continuations that
reach a word or the end, N nodes, V vocabulary. All scores are natural logs in float32; -inf = none.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.labeled.machine import LabeledStackMachine, Phase, Seen
from hf_synlm.search.stack import Nodes
from hf_synlm.search.state import NEG_INF, Candidates, Scored, Search, SearchState, check_count, keep_frozen
from hf_synlm.trees.transitions import SHIFT

# States whose word is scored at once besides those that matter for sure: rows cost less than another product.
_MORE_WORDS = 3
# A continuation that weighs less than exp(-11.5), 1e-5, of all before the word does not change what is believed.
_WEIGHTLESS, _LOWEST = 11.5, torch.finfo(torch.float32).min


class Frontier(NamedTuple):
    """States inside a word whose actions are looked at next."""

    seen: Seen
    scores: Tensor
    """[B, R]"""
    origin: Tensor
    """[B, R] hypothesis of the word beam that a state descends from."""


class Continuations(NamedTuple):
    """Hypotheses that reach the next word or the end of the sentence by one more action, each [B, E]."""

    scores: Tensor
    """Log-probability, that action included; -inf = none."""
    parents: Tensor
    """State before that action."""
    tokens: Tensor
    """The word, or the end token."""
    origin: Tensor
    """Hypothesis of the word beam."""

    @classmethod
    def of(cls, frontier: Frontier, scores: Tensor, tokens: Tensor) -> Self:
        """All states of a frontier by one action: scores [B, R, G] and words [B, R, G], flattened to E = R G."""
        states = (frontier.seen.nodes, frontier.origin)
        parents, origin = (value[..., None].expand_as(tokens).flatten(1) for value in states)
        return cls(scores.flatten(1), parents, tokens.flatten(1), origin)


WordScores = Callable[[Frontier, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states, their scores with SHIFT [B, R], scores that make a continuation one of the best k [B, 1]) -> scores and ids
of G words [B, R, G]; words that reach neither that score nor the fast-track may have -inf."""


class SetAside:
    """What the steps of a word have set aside so far; `num_beams` (K) hypotheses are kept in the end."""

    def __init__(self, state: SearchState, num_beams: int) -> None:
        self.state = state
        self.total = self.regular = torch.zeros_like(state.num_tokens)[:, None]
        """[B, 1] number of all hypotheses that were set aside, and of those without fast-track."""
        nothing = state.scores.new_full((len(state.scores), num_beams), NEG_INF)
        self.best = {True: nothing, False: nothing}
        """Scores of the best K that generate a word (True) or end the sentence (False) [B, K]."""
        self._all: list[Continuations] = []
        self._found: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
        self._num_places = 0

    def add(self, reached: Continuations, num_words: int, scores: Tensor, place: Tensor) -> None:
        """Set aside some continuations of a step, by their scores [B, S], best first (-inf = none), and places.

        The places are among all that have `reached` the word or the end, the `num_words` that generate a word first.
        """
        self.total = self.total + (scores > NEG_INF).sum(1, keepdim=True)
        width = reached.scores.shape[1]
        for kind in (True, False):
            if num_words == (0 if kind else width):
                continue
            chosen = scores if num_words in (0, width) else scores.masked_fill((place < num_words) != kind, NEG_INF)
            self._found[kind].append((chosen, place + self._num_places))
            best = self.best[kind]
            self.best[kind] = torch.cat([best, chosen], 1).topk(best.shape[1]).values
        self._all.append(reached)
        self._num_places += width

    def candidates(self, kind: bool, count: int | None) -> Candidates:
        """The best `count` hypotheses that generate a word (True) or end the sentence (False), best first."""
        if not self._found[kind]:
            none = self.total[:, :0]
            return Candidates(self.state.scores[:, :0], none, none, none, none)
        scores, places = (torch.cat(values, 1) for values in zip(*self._found[kind], strict=True))
        scores, index = scores.topk(scores.shape[1] if count is None else min(count, scores.shape[1]))
        place = places.gather(1, index)
        columns = zip(*[reached[1:] for reached in self._all], strict=True)
        parents, tokens, origin = (torch.cat(column, 1).gather(1, place) for column in columns)
        pool = self.state.pool
        before = pool.field("length", self.state.nodes).gather(1, origin)
        return Candidates(scores, parents, tokens, origin, pool.field("length", parents) - before)


@dataclass
class Limits:
    """Where logits processors let words and ends follow the hypotheses of a beam, each [B, R]."""

    end_scores: Tensor
    """Added where a sentence ends; -inf = it must not end."""
    end_tokens: Tensor
    """The end token that is generated then."""
    wordless: Tensor | None
    """True where no word may follow; None = nowhere."""
    raises: Tensor
    """True where a word or the end may score above 0."""


class _GivenWords:
    """Scores of one given word per sentence [B], as `WordScores`.

    Words cost most of a search. So on a CPU, where choosing rows costs nothing, cheap upper bounds say first which
    states can matter.
    """

    def __init__(self, machine: LabeledStackMachine, tokens: Tensor, fast_track_size: int, keeps: bool) -> None:
        self.machine, self.tokens, self.fast_track_size = machine, tokens, fast_track_size
        self._seen: list[tuple[Tensor, ...]] | None = [] if keeps else None

    def __call__(self, frontier: Frontier, base: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        ids = self.tokens[:, None].expand_as(base)
        if base.device.type == "cpu":
            scores = self._scores_that_matter(frontier.seen.predictor, base, least)
        else:
            scores = base + self.machine.log_probs_of(frontier.seen.predictor, self.tokens, base > NEG_INF)
        if self._seen is not None:
            self._seen.append((base, scores, frontier.origin, frontier.seen.nodes))
        return scores[..., None], ids[..., None]

    def scored(self, state: SearchState) -> Scored | None:
        """All continuations of `state`, if they were kept; what bounds left out on a CPU is scored now if it weighs."""
        if self._seen is None:
            return None
        before, after, origin, nodes = (torch.cat(values, 1) for values in zip(*self._seen, strict=True))
        if before.device.type == "cpu":
            least = (state.scores.logsumexp(1, keepdim=True) - _WEIGHTLESS).clamp(min=_LOWEST)
            late, place = ((before >= least) & (after == NEG_INF)).sort(dim=1, descending=True)
            late, place = (values[:, : int(late.sum(1).amax())] for values in (late, place))
            predictor = state.pool.feature("predictor", nodes.gather(1, place))
            found = before.gather(1, place) + self.machine.log_probs_of(predictor, self.tokens, late)
            after = after.scatter_reduce(1, place, found, "amax")
        return Scored(before, after, origin)

    def _scores_that_matter(self, predictor: Tensor, base: Tensor, least: Tensor) -> Tensor:
        track = min(self.fast_track_size, base.shape[1])
        wanted = (base > NEG_INF) if track else (base >= least.clamp(min=_LOWEST))  # words do not raise scores
        bound = base + self.machine.log_probs_of(predictor, self.tokens, wanted, bound=True)
        if track:
            first = min(track + _MORE_WORDS, base.shape[1])
            least = torch.minimum(least, bound.topk(first).values[:, -1:])
        wanted = wanted & (bound >= least)
        scores = base + self.machine.log_probs_of(predictor, self.tokens, wanted)
        if track:
            # Fast-track takes the best, whichever they are.
            late = (bound > scores.topk(track).values[:, -1:]) & ~wanted
            if bool(late.any()):
                scores = torch.where(late, base + self.machine.log_probs_of(predictor, self.tokens, late), scores)
        return scores


class FastTrackSearch(Search):
    """Word-synchronous search with fast-track for given words, with the interface of `SynchronousSearch`.

    After a word `num_beams` (K) hypotheses are kept, after an action `action_beam_size` (k >= K) states, and
    `fast_track_size` hypotheses may reach the next word although they are not among the best k. `eos_token_ids` [E]
    stand for the end of the sentence, the first of them is generated; None = a sentence goes on.
    """

    def __init__(
        self,
        machine: LabeledStackMachine,
        num_beams: int,
        action_beam_size: int,
        fast_track_size: int,
        eos_token_ids: Tensor | None = None,
    ) -> None:
        check_count("num_beams", num_beams)
        check_count("action_beam_size", action_beam_size)
        check_count("fast_track_size", fast_track_size, least=0)
        if action_beam_size < num_beams:
            raise ValueError(
                f"action_beam_size={action_beam_size} is smaller than num_beams={num_beams}, the number of "
                f"derivations kept after a word. Raise action_beam_size to {num_beams} or more."
            )
        self.machine, self.num_beams = machine, num_beams
        self.action_beam_size, self.fast_track_size = action_beam_size, fast_track_size
        self.eos_token_ids = eos_token_ids
        self.end_ids: list[int] = [] if eos_token_ids is None else eos_token_ids.tolist()  # once: it waits for a GPU

    @property
    def options(self) -> dict[str, Any]:
        """What decides which hypotheses are found, besides `num_beams`."""
        return {"action_beam_size": self.action_beam_size, "fast_track_size": self.fast_track_size}

    # --------------------------------------------------------------------------------------------- inside a word
    def _frontier(self, state: SearchState) -> Frontier:
        """The states of a beam between two words."""
        return Frontier(self.machine.look(state.pool, state.nodes), state.scores, own_places(state.nodes))

    def _reach(
        self, state: SearchState, phase: Phase, words: WordScores | None, limits: Limits | None = None
    ) -> SetAside:
        """Take structural actions until the next word or the end of the sentence is reached often enough.

        Returns the hypotheses that generate one of `words` (None in `Phase.END`), and those that end. `limits` are
        those of logits processors. Cost: steps of a constant number of operations and one wait for the device, whatever
        B and k are.
        """
        aside, frontier = SetAside(state, self.num_beams), self._frontier(state)
        while frontier.scores.shape[1]:
            total = frontier.scores[..., None] + self._action_log_probs(state, frontier, phase, limits)
            ended = self._ended_by(frontier, total, phase, limits)
            moves, index = self._moves(total)
            # One of the best k: at least as good as the k-th move.
            reached, num_words = self._reached(frontier, total, words, moves[:, -1:], ended)
            live = self._set_aside(aside, reached, num_words, moves)
            live = live & ~self._is_over(aside, moves, phase, limits)
            frontier = self._execute(state, frontier, moves, index, live)
        return aside

    def _reached(
        self, frontier: Frontier, total: Tensor, words: WordScores | None, least: Tensor, ended: Continuations | None
    ) -> tuple[Continuations, int]:
        """Hypotheses that generate one of `words` or have `ended`, and how many of them generate one.

        `least` [B, 1] is the score from which a word matters; `total` [B, R, A] are the scores of actions.
        """
        parts = [] if words is None else [Continuations.of(frontier, *words(frontier, total[..., SHIFT], least))]
        num_words = parts[0].scores.shape[1] if parts else 0
        parts += [] if ended is None else [ended]
        return parts[0] if len(parts) == 1 else Continuations(*map(lambda *both: torch.cat(both, 1), *parts)), num_words

    def _ended_by(self, frontier: Frontier, total: Tensor, phase: Phase, limits: Limits | None) -> Continuations | None:
        """Continuations by the action that ends the sentence; it is taken out of the scores `total` [B, R, A]."""
        if phase is Phase.CONTINUE:
            return None
        action, ends = self.machine.end_action(frontier.seen)
        scores, tokens = self._end_scores(total[..., action].masked_fill(~ends, NEG_INF), frontier.origin, limits)
        total[..., action] = total[..., action].masked_fill(ends, NEG_INF)
        return Continuations.of(frontier, scores[..., None], tokens[..., None])

    def _moves(self, total: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and places of the best k structural actions [B, k], of the scores of all actions [B, R, A]."""
        moves = total.masked_fill(self.machine.not_structural, NEG_INF).flatten(1)
        missing = max(0, self.action_beam_size - moves.shape[1])
        return (F.pad(moves, (0, missing), value=NEG_INF) if missing else moves).topk(self.action_beam_size)

    def _set_aside(self, aside: SetAside, reached: Continuations, num_words: int, moves: Tensor) -> Tensor:
        """Set aside what is among the best k of a step, and by fast-track some more; which moves [B, k] are, too.

        The continuation of rank r is among the best k of all if it is no worse than the move of rank k - 1 - r: of the
        moves -1, -4, -6 and the continuations -2, -5, with k = 3, -2 is (-2 >= -6) and -5 is not (-5 < -4); the best
        three are -1, -2, -4. The fast-track adds as many as are missing to its size, those of the ranks below it.
        """
        size, track = self.action_beam_size, self.fast_track_size
        width = min(max(size, track), reached.scores.shape[1])
        ranked, place = reached.scores.topk(width)
        least = F.pad(moves.flip(1), (0, max(0, width - size)), value=math.inf)[:, :width]
        fails = ranked < least.clamp(min=torch.finfo(least.dtype).min)
        count = (~fails).sum(1, keepdim=True)
        fails[:, :track] = False
        # No more than `capacity` are set aside; the worst of a step are dropped first.
        column = torch.arange(max(width, size), device=place.device)
        fails |= column[:width] >= self._capacity - aside.total
        aside.regular = aside.regular + count
        aside.add(reached, num_words, ranked.masked_fill(fails, NEG_INF), place)
        return (column[:size] < size - count) & (moves > NEG_INF)

    @property
    def _capacity(self) -> int:
        """Most hypotheses of a sentence that are set aside in one word, as in the authors' code."""
        return min(2 * self.action_beam_size, self.action_beam_size + 5 * self.fast_track_size)

    def _is_over(self, aside: SetAside, moves: Tensor, phase: Phase, limits: Limits | None) -> Tensor:
        """Sentences [B, 1] that are synchronized: enough is set aside, or no live hypothesis can reach the best K."""
        full = (aside.total >= self._capacity) | (aside.regular >= self.action_beam_size)
        return full | self._is_decided(aside, moves[:, :1], phase, limits)

    def _execute(self, state: SearchState, frontier: Frontier, scores: Tensor, moves: Tensor, live: Tensor) -> Frontier:
        """Execute structural actions [B, R'], given as row A + action of a frontier, where they are `live`.

        Those that are live stand before the others.
        """
        row, action = moves // self.machine.num_actions, moves % self.machine.num_actions
        row = row.clamp(max=frontier.scores.shape[1] - 1)  # places of moves that do not exist lie behind the last row
        nodes = self.machine.push(state.pool, frontier.seen.take(row), action, state.num_tokens, live)
        rows = nodes.shape[1]
        scores = scores.masked_fill(~live, NEG_INF)[:, :rows]
        return Frontier(self.machine.look(state.pool, nodes), scores, frontier.origin.gather(1, row[:, :rows]))

    def _action_log_probs(self, state: SearchState, frontier: Frontier, phase: Phase, limits: Limits | None) -> Tensor:
        """Log-probabilities of actions [B, R, A]; where no word may follow, only those that may end the sentence."""
        log_probs = self.machine.action_log_probs(frontier.seen, state.num_tokens, phase)
        if limits is None or limits.wordless is None:
            return log_probs
        wordless = limits.wordless.gather(1, frontier.origin)[..., None]
        if phase is Phase.CONTINUE:
            return log_probs.masked_fill(wordless, NEG_INF)
        ending = self.machine.action_log_probs(frontier.seen, state.num_tokens, Phase.END)
        return torch.where(wordless, ending, log_probs)

    def _end_scores(self, scores: Tensor, origin: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
        """Scores [B, R] of hypotheses that end, after the processors, and the end tokens that they generate."""
        if limits is None:
            return scores, torch.full_like(origin, self.end_ids[0] if self.end_ids else 0)
        return scores + limits.end_scores.gather(1, origin), limits.end_tokens.gather(1, origin)

    def _is_decided(self, aside: SetAside, best: Tensor, phase: Phase, limits: Limits | None) -> Tensor:
        """Sentences [B, 1] where hypotheses that score at most `best` [B, 1] cannot be among the best K any more."""
        kept = aside.best[phase is not Phase.END]
        if limits is None:
            return best <= kept[:, -1:]
        if limits.wordless is not None:
            kept = torch.where(limits.wordless.all(1, keepdim=True), aside.best[False], kept)
        return (best <= kept[:, -1:]) & ~limits.raises.any(1, keepdim=True)

    # ------------------------------------------------------------------------------------------------ given words
    def propose(
        self, state: SearchState, tokens: Tensor, block: object = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given word per sentence, best first.

        Sentences that are not `active` get no candidates.
        """
        scores = state.scores if active is None else state.scores.masked_fill(~active[:, None], NEG_INF)
        going = replace(state, scores=scores)
        words = _GivenWords(self.machine, tokens, self.fast_track_size, self.keeps_scored)
        chosen = self._reach(going, Phase.CONTINUE, words).candidates(True, self.num_beams)
        state.ahead, self.scored = going.ahead, words.scored(going)
        return chosen

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the word of every candidate, without the actions before it."""
        given = chosen.tokens[:, 0] if chosen.tokens.shape[1] else chosen.tokens.new_zeros(len(chosen.tokens))
        predictor = state.pool.feature("predictor", chosen.parents)
        return self.machine.log_probs_of(predictor, given, chosen.scores > NEG_INF)

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen words: the new beam, and the candidate [B, R] from which each hypothesis comes.

        Sentences that are not `active` [B] keep their beam.
        """
        pool = state.pool
        if active is not None:
            chosen = keep_frozen(state, chosen, active)
        alive, (last, known) = chosen.scores > NEG_INF, nodes_ahead(state, chosen, active)
        lengths = pool.field("length", last).masked_fill(~alive, 0)
        rows, longest = torch.stack([alive.sum(1).amax(), lengths.amax()]).tolist()
        keep = pool.in_use(last, alive, longest + 1)
        order = chosen.scores.argsort(dim=1, descending=True, stable=True)[:, : max(1, rows)]
        scores, last, tokens, known = (x.gather(1, order) for x in (chosen.scores, last, chosen.tokens, known))
        last = pool.compact(keep, int(keep.sum(1).amax()), last)
        moving = torch.ones_like(state.num_tokens, dtype=torch.bool) if active is None else active
        to_do = moving[:, None] & ~known
        nodes = self.machine.shift(pool, last, tokens, state.num_tokens, state.edges, to_do & (scores > NEG_INF))
        nodes = torch.where(to_do, nodes, last)
        new = SearchState(pool, nodes, scores, state.num_tokens + moving, [nodes.shape[1]], state.edges)
        return new, order

    def close(self, state: SearchState) -> SearchState:
        """The derivations of `_close`, in its order, with log-probabilities among texts of all lengths."""
        closed = self._close(state)
        price = self.machine.price_of_ends(closed.pool, closed.nodes, closed.num_tokens)
        return replace(closed, scores=torch.where(closed.scores > NEG_INF, closed.scores + price, NEG_INF))

    def _close(self, state: SearchState) -> SearchState:
        """Take structural actions until the sentence is over, which is certain: the best K derivations, best first."""
        return self._ended(state, self._reach(state, Phase.END, None).candidates(False, self.num_beams))

    def _ended(self, state: SearchState, chosen: Candidates) -> SearchState:
        """Take the action that ends the sentences of candidates [B, K]."""
        nodes = self.machine.end(state.pool, chosen.parents, state.num_tokens)
        return replace(
            state, nodes=nodes, scores=chosen.scores, level_sizes=[nodes.shape[1]], origin=chosen.origin,
            next_log_probs=None,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the best way to end each hypothesis; the state stays as it is.

        One search ends all hypotheses together. Hypotheses that it loses are searched again, one by one.
        """
        pool, size = state.pool, state.pool.size
        wide = type(self)(
            self.machine, self.action_beam_size, self.action_beam_size, self.fast_track_size, self.eos_token_ids
        )
        closed = wide._close(state)
        count = state.nodes.shape[1]
        same = closed.origin[:, None] == torch.arange(count, device=closed.origin.device)[:, None]
        scores, index = closed.scores[:, None].masked_fill(~same, NEG_INF).max(2)
        ends = closed.nodes.gather(1, index)
        lost = (scores == NEG_INF) & (state.scores > NEG_INF)
        for column in lost.any(0).nonzero().flatten().tolist():
            chosen = lost[:, column]
            alone = state.with_hypotheses(torch.full_like(state.nodes[:, :1], column))
            alone.scores = alone.scores.masked_fill(~chosen[:, None], NEG_INF)
            closed = wide._close(alone)
            scores[:, column] = torch.where(chosen, closed.scores[:, 0], scores[:, column])
            ends[:, column] = torch.where(chosen, closed.nodes[:, 0], ends[:, column])
        nodes = pool.derivations(ends, scores > NEG_INF)
        pool.truncate(size)
        return scores, nodes


def nodes_ahead(state: SearchState, chosen: Candidates, active: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Nodes [B, K] of the words of candidates that were generated ahead, of the others the parents; which are known."""
    if state.ahead is None:
        return chosen.parents, torch.zeros_like(chosen.parents, dtype=torch.bool)
    ahead = state.ahead if active is None else state.ahead.masked_fill(~active[:, None], -1)
    parents, tokens = (state.pool.field(name, ahead)[:, None] for name in ("predecessor", "token"))
    same = (parents == chosen.parents[..., None]) & (tokens == chosen.tokens[..., None])
    found = ahead[:, None].masked_fill(~same, -1).amax(2)
    return torch.where(found < 0, chosen.parents, found), found >= 0


def own_places(nodes: Tensor) -> Tensor:
    """The place of every hypothesis in its beam [B, R], of their `nodes` [B, R]."""
    return torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
