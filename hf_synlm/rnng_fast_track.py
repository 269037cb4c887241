"""Word-synchronous beam search with fast-track, for systems with many structural actions between two words.

The slow and obvious version is `Grammar.search` in `tests/reference/rnng_search.py`.

Inside a word the beam goes action by action (Stern et al. 2017). One step looks at all actions of all k states and
takes the best k of them. Those that reach the next word are set aside; the others are executed, and the next step
looks at the states that they lead to, until k have reached the word. *Fast-track* also sets aside a few at every step
that reach the word without being among the best k. The best K (the word beam) of those set aside go on together to the
next word: the search is *word-synchronous*. With `m_t = logsumexp_k log p(x_1..t, y_k)` over them, m_t - m_(t-1) is the
beam's log p(x_t | x_1..t-1).

States are nodes of a pool: hypotheses branch without copying a vector, only live states are computed, and the last
action of a word (SHIFT) is executed only for the K that are kept. A word also ends as soon as no live state can beat
the K that have reached it: log-probabilities never rise, so the result is the same (Noji and Oseki's code goes on).

Source: Noji and Oseki 2021, section 3; `word_sync_beam_search` of the authors' code.

Shapes: B sentences, K word beam, R states of a step, A action ids, G words considered per state, E continuations that
reach a word or the end, C hypotheses set aside, N nodes, V vocabulary. All scores are natural logs in float32; -inf
marks what does not exist.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from .rnng_actions import SHIFT
from .rnng_stack_machine import Phase, RNNGStackMachine
from .search_stack import NodePool, Nodes
from .search_state import NEG_INF, Candidates, SearchState, keep_frozen

WordScores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states [B, R], which may generate [B, R], origins [B, R]) -> scores and ids of G words [B, R, G]."""


class Frontier(NamedTuple):
    """States inside a word whose actions are looked at next, each [B, R]."""

    nodes: Tensor
    scores: Tensor
    origin: Tensor
    """Hypothesis of the word beam that a state descends from."""


class Reached(NamedTuple):
    """Hypotheses that reach the next word or the end of the sentence, each [B, C]; kept ones are sorted, best first."""

    scores: Tensor
    """Log-probability, the last action included; -inf = none."""
    parents: Tensor
    """State before the last action."""
    tokens: Tensor
    """The word."""
    origin: Tensor
    """Hypothesis of the word beam."""
    steps: Tensor
    """Number of actions before the last one."""
    actions: Tensor
    """The last action: SHIFT, or the one that ends the sentence."""

    @classmethod
    def none(cls, batch: int, device: torch.device) -> Self:
        """No hypotheses."""
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return cls(torch.zeros(batch, 0, device=device), *[empty] * 5)

    @classmethod
    def of(cls, frontier: Frontier, scores: Tensor, tokens: Tensor, action: int, steps: int) -> Self:
        """All states of a frontier by one last action: scores [B, R, G] and words [B, R, G], flattened to C = R G."""
        parents, origin = (value[..., None].expand_as(tokens).flatten(1) for value in (frontier.nodes, frontier.origin))
        tokens = tokens.flatten(1)
        last = torch.full_like(tokens, action)
        return cls(scores.flatten(1), parents, tokens, origin, torch.full_like(tokens, steps), last)

    def take(self, index: Tensor, scores: Tensor) -> "Reached":
        """The hypotheses `index` [B, C'] with new scores."""
        return Reached(scores, *(value.gather(1, index) for value in self[1:]))

    def candidates(self) -> Candidates:
        """These hypotheses as candidates of the next word."""
        return Candidates(self.scores, self.parents, self.tokens, self.origin, self.steps)

    def with_more(self, more: "Reached", count: int) -> "Reached":
        """The best `count` of these and others."""
        both = Reached(*(torch.cat(pair, 1) for pair in zip(self, more, strict=True)))
        scores, index = both.scores.topk(min(count, both.scores.shape[1]))
        return both.take(index, scores)


class SetAside(NamedTuple):
    """What the steps of a word have set aside so far."""

    words: Reached
    """The best K that generate a word."""
    ends: Reached
    """The best K that end the sentence."""
    total: Tensor
    """[B, 1] number of all hypotheses that were set aside."""
    by_fast_track: Tensor
    """[B, 1] number of those that fast-track set aside."""


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
    """Scores of one given word per sentence [B], as `WordScores`."""

    def __init__(self, machine: RNNGStackMachine, pool: NodePool, tokens: Tensor) -> None:
        self.machine, self.pool, self.tokens = machine, pool, tokens

    def __call__(self, nodes: Tensor, wanted: Tensor, origin: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.machine.log_probs_of(self.pool, nodes, self.tokens, wanted)
        return scores[..., None], self.tokens[:, None, None].expand(-1, nodes.shape[1], 1)


class FastTrackSearch:
    """Word-synchronous search with fast-track for given words, with the interface of `WordBeamSearch`.

    Args:
        machine: the model side.
        num_beams: hypotheses kept after a word (K).
        action_beam_size: states kept after an action (k), at least K.
        fast_track_size: hypotheses that reach the next word although they are not among the best k.
        eos_token_ids: ids that stand for the end of the sentence [E], of which the first is generated; None = a
            sentence goes on.

    Raises:
        ValueError: for widths that are not positive integers or do not fit.
    """

    def __init__(
        self,
        machine: RNNGStackMachine,
        num_beams: int,
        action_beam_size: int,
        fast_track_size: int,
        eos_token_ids: Tensor | None = None,
    ) -> None:
        for name, value, least in (
            ("num_beams", num_beams, 1),
            ("action_beam_size", action_beam_size, 1),
            ("fast_track_size", fast_track_size, 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r} must be an integer of at least {least}")
        if action_beam_size < num_beams:
            raise ValueError(
                f"action_beam_size={action_beam_size} is smaller than num_beams={num_beams}, the number of derivations "
                "kept after a word. Raise it."
            )
        self.machine, self.num_beams = machine, num_beams
        self.action_beam_size, self.fast_track_size = action_beam_size, fast_track_size
        self.eos_token_ids = eos_token_ids
        self.end_ids: list[int] = [] if eos_token_ids is None else eos_token_ids.tolist()  # once: it waits for a GPU

    def begin(self, batch_size: int, device: torch.device) -> SearchState:
        """State before the first word."""
        pool, nodes = self.machine.begin(batch_size, device)
        scores = torch.zeros(nodes.shape, dtype=torch.float32, device=device)
        return SearchState(pool, nodes, scores, torch.zeros_like(nodes[:, 0]), [1])

    def refresh(self, state: SearchState) -> None:
        """Nothing to recount: levels are not laid out ahead."""

    def keep(self, state: SearchState, index: Tensor) -> SearchState:
        """The beam with the hypotheses `index` [B, R'] only."""
        return state.with_hypotheses(index)

    # --------------------------------------------------------------------------------------------- inside a word
    def _reach(
        self, state: SearchState, phase: Phase, words: WordScores | None, limits: Limits | None = None
    ) -> tuple[Reached, Reached]:
        """Take structural actions until the next word or the end of the sentence is reached often enough.

        Args:
            state: beam between two words.
            phase: what may come.
            words: words to generate; None in `Phase.END`.
            limits: limits of logits processors; None = there are none.

        Returns:
            The hypotheses that generate a word, and those that end.
        """
        none, zero = Reached.none(len(state.nodes), state.nodes.device), torch.zeros_like(state.num_tokens)[:, None]
        aside = SetAside(none, none, zero, zero)
        frontier: Frontier | None = Frontier(state.nodes, state.scores, own_places(state.nodes))
        steps = 0
        while frontier is not None:
            log_probs = self._action_log_probs(state, frontier, phase, limits)
            total = frontier.scores[..., None] + log_probs
            postponed = self._postponed_words(total) if isinstance(words, _GivenWords) else None
            reached, moves = self._continuations(state, frontier, total, phase, words, postponed, limits, steps)
            width = reached.scores.shape[1]
            best, index = torch.cat([reached.scores, moves], 1).topk(min(self.action_beam_size, width + moves.shape[1]))
            reaches = (index < width) & (best > NEG_INF)
            if postponed is not None:
                self._score_postponed(reached.scores, postponed, reaches, frontier, words)
            aside = self._collect(aside, reached, best, index, reaches)
            live = ~reaches & (index >= width) & (best > NEG_INF) & ~self._is_full(aside)
            live = live & ~self._is_decided(aside, best.masked_fill(~live, NEG_INF), phase, limits)
            frontier = self._advance(state, frontier, best, index - width, live)
            steps += 1
        return aside.words, aside.ends

    def _continuations(
        self,
        state: SearchState,
        frontier: Frontier,
        total: Tensor,
        phase: Phase,
        words: WordScores | None,
        postponed: Tensor | None,
        limits: Limits | None,
        steps: int,
    ) -> tuple[Reached, Tensor]:
        """Continuations that reach a word or the end, and scores of the structural actions [B, R A].

        Every state contributes its G words, then its end. `total` [B, R, A] holds the scores of all actions; it is
        changed in place. The words of `postponed` states [B, R] get no score yet.
        """
        parts = []
        if words is not None:
            base = total[..., SHIFT]
            wanted = base > NEG_INF
            if postponed is not None:
                wanted = wanted & (postponed == NEG_INF)
            word_scores, ids = words(frontier.nodes, wanted, frontier.origin)
            parts.append(Reached.of(frontier, base[..., None] + word_scores, ids, SHIFT, steps))
        if phase is not Phase.CONTINUE:
            action, ends = self.machine.end_action(state.pool, frontier.nodes)
            score, token = self._end_scores(total[..., action].masked_fill(~ends, NEG_INF), frontier.origin, limits)
            parts.append(Reached.of(frontier, score[..., None], token[..., None], action, steps))
            total[..., action] = total[..., action].masked_fill(ends, NEG_INF)
        total[..., SHIFT] = NEG_INF
        return Reached(*(torch.cat(values, 1) for values in zip(*parts, strict=True))), total.flatten(1)

    def _collect(self, aside: SetAside, reached: Reached, best: Tensor, index: Tensor, reaches: Tensor) -> SetAside:
        """Set aside those of the best k actions `index` that reach the word, and by fast-track some others.

        Args:
            aside: what was set aside before.
            reached: all continuations that reach the word or the end [B, E].
            best: scores of the best k actions [B, k]; `index` counts the E continuations first.
            index: the best k actions [B, k].
            reaches: which of the best k reach the word [B, k].
        """
        more, more_index = self._fast_track(reached.scores, index, reaches)
        # No more than `capacity` are set aside; the worst of a step are dropped first.
        capacity = self._capacity - aside.total
        room = torch.cat([reaches, more > NEG_INF], 1).long().cumsum(1) <= capacity
        scores = torch.cat([best.masked_fill(~reaches, NEG_INF), more], 1).masked_fill(~room, NEG_INF)
        chosen = reached.take(torch.cat([index.clamp(max=reached.scores.shape[1] - 1), more_index], 1), scores)
        is_word = chosen.actions == SHIFT
        return SetAside(
            aside.words.with_more(chosen._replace(scores=scores.masked_fill(~is_word, NEG_INF)), self.num_beams),
            aside.ends.with_more(chosen._replace(scores=scores.masked_fill(is_word, NEG_INF)), self.num_beams),
            aside.total + (scores > NEG_INF).sum(1, keepdim=True),
            aside.by_fast_track + (more > NEG_INF).sum(1, keepdim=True),
        )

    @property
    def _capacity(self) -> int:
        """Most hypotheses of a sentence that are set aside in one word, as in the authors' code."""
        return min(2 * self.action_beam_size, self.action_beam_size + 5 * self.fast_track_size)

    def _is_full(self, aside: SetAside) -> Tensor:
        """Sentences [B, 1] where enough hypotheses are set aside."""
        return (aside.total >= self._capacity) | (aside.total - aside.by_fast_track >= self.action_beam_size)

    def _advance(
        self, state: SearchState, frontier: Frontier, best: Tensor, moves: Tensor, live: Tensor
    ) -> Frontier | None:
        """Execute those of the best k structural actions `moves` that are live [B, k]; None if there are none."""
        rows = int(live.sum(1).amax())
        if not rows:
            return None
        order = (~live).to(torch.uint8).argsort(dim=1, stable=True)[:, :rows]
        live, scores, moves = live.gather(1, order), best.gather(1, order), moves.gather(1, order).clamp(min=0)
        return self._execute(state, frontier, scores.masked_fill(~live, NEG_INF), moves, live)

    def _execute(self, state: SearchState, frontier: Frontier, scores: Tensor, moves: Tensor, live: Tensor) -> Frontier:
        """Execute structural actions [B, R'], given as row A + action of a frontier, where they are `live`."""
        row, action = moves // self.machine.config.num_actions, moves % self.machine.config.num_actions
        parents, origin = frontier.nodes.gather(1, row), frontier.origin.gather(1, row)
        tokens = torch.zeros_like(parents)
        nodes = self.machine.push(state.pool, parents, action, tokens, state.num_tokens, state.edges, live)
        return Frontier(nodes, scores, origin)

    def _action_log_probs(self, state: SearchState, frontier: Frontier, phase: Phase, limits: Limits | None) -> Tensor:
        """Log-probabilities of actions [B, R, A]; where no word may follow, only those that may end the sentence."""
        pool, nodes = state.pool, frontier.nodes
        log_probs = self.machine.action_log_probs(pool, nodes, state.num_tokens, phase)
        if limits is None or limits.wordless is None:
            return log_probs
        wordless = limits.wordless.gather(1, frontier.origin)[..., None]
        if phase is Phase.CONTINUE:
            return log_probs.masked_fill(wordless, NEG_INF)
        return torch.where(wordless, self.machine.action_log_probs(pool, nodes, state.num_tokens, Phase.END), log_probs)

    def _end_scores(self, scores: Tensor, origin: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
        """Scores [B, R] of hypotheses that end, after the processors, and the end tokens that they generate."""
        if limits is None:
            return scores, torch.full_like(origin, self.end_ids[0] if self.end_ids else 0)
        return scores + limits.end_scores.gather(1, origin), limits.end_tokens.gather(1, origin)

    def _postponed_words(self, total: Tensor) -> Tensor:
        """Scores [B, R] up to SHIFT of the states whose given word is not scored yet, -inf at the others.

        Given words cost most of the search, and a word is no more probable than the SHIFT before it: where k
        structural actions of `total` [B, R, A] beat the SHIFT, its word cannot be among the best k.
        """
        shift, moves = total[..., SHIFT], total.clone()
        moves[..., SHIFT] = NEG_INF
        moves = moves.flatten(1)
        if moves.shape[1] < self.action_beam_size:
            return torch.full_like(shift, NEG_INF)
        return shift.masked_fill(shift >= moves.topk(self.action_beam_size).values[:, -1:], NEG_INF)

    def _score_postponed(
        self, scores: Tensor, postponed: Tensor, reaches: Tensor, frontier: Frontier, words: WordScores
    ) -> None:
        """Score the words of `postponed` states where fast-track may need them, in place of `scores` [B, E]."""
        lacking = reaches.sum(1, keepdim=True) < self.fast_track_size
        wanted = (postponed > NEG_INF) & lacking
        if bool(wanted.any()):
            late = postponed + words(frontier.nodes, wanted, frontier.origin)[0].squeeze(2)
            rows = postponed.shape[1]
            scores[:, :rows] = torch.where(wanted, late, scores[:, :rows])

    def _fast_track(self, scores: Tensor, index: Tensor, reaches: Tensor) -> tuple[Tensor, Tensor]:
        """Scores and places [B, S] of the best continuations that reach the word, but are not among the best k.

        As many as `fast_track_size` leaves open after those of the best k actions `index` that reach the word.
        """
        width = min(self.fast_track_size, scores.shape[1])
        missing = self.fast_track_size - reaches.sum(1, keepdim=True)
        # Actions that do not reach the word go to a column of their own.
        taken = F.pad(torch.zeros_like(scores, dtype=torch.bool), (0, 1))
        taken = taken.scatter(1, torch.where(reaches, index, scores.shape[1]), True)[:, :-1]
        more, place = scores.masked_fill(taken, NEG_INF).topk(width)
        return more.masked_fill(torch.arange(width, device=scores.device) >= missing, NEG_INF), place

    def _is_decided(self, aside: SetAside, live: Tensor, phase: Phase, limits: Limits | None) -> Tensor:
        """Sentences [B, 1] where no live hypothesis [B, k] can be among the best K any more."""
        kept = (aside.ends if phase is Phase.END else aside.words).scores
        if kept.shape[1] < self.num_beams:
            return torch.zeros_like(live[:, :1], dtype=torch.bool)
        if limits is not None and limits.wordless is not None:
            kept = torch.where(limits.wordless.all(1, keepdim=True), aside.ends.scores, kept)
        worst = kept[:, -1:]
        decided = (worst > NEG_INF) & (live.amax(1, keepdim=True) <= worst)
        return decided if limits is None else decided & ~limits.raises.any(1, keepdim=True)

    # ------------------------------------------------------------------------------------------------ given words
    def propose(
        self, state: SearchState, tokens: Tensor, block: object = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given word per sentence.

        Args:
            state: beam between two words.
            tokens: the word of each sentence [B].
            block: not used.
            active: sentences that take a word [B]; the others get no candidates. None = all.

        Returns:
            At most K candidates per sentence, best first.
        """
        if active is not None:
            state = replace(state, scores=state.scores.masked_fill(~active[:, None], NEG_INF))
        return self._reach(state, Phase.CONTINUE, _GivenWords(self.machine, state.pool, tokens))[0].candidates()

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the word of every candidate, without the actions before it."""
        given = chosen.tokens[:, 0] if chosen.tokens.shape[1] else chosen.tokens.new_zeros(len(chosen.tokens))
        return self.machine.log_probs_of(state.pool, chosen.parents, given, chosen.scores > NEG_INF)

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen words and make them the new beam.

        Args:
            state: beam before the word.
            chosen: continuations [B, K].
            active: sentences that take a word [B]; the others keep their beam. None = all.
            wanted: not used.

        Returns:
            The new beam, and for each of its hypotheses the index of the candidate it comes from [B, R].
        """
        pool = state.pool
        if active is not None:
            chosen = keep_frozen(state, chosen, active)
        alive = chosen.scores > NEG_INF
        lengths = pool.field("length", chosen.parents).masked_fill(~alive, 0)
        rows, longest = torch.stack([alive.sum(1).amax(), lengths.amax()]).tolist()
        keep = pool.in_use(chosen.parents, alive, longest + 1)
        order = chosen.scores.argsort(dim=1, descending=True, stable=True)[:, : max(1, rows)]
        scores, parents, tokens = (x.gather(1, order) for x in (chosen.scores, chosen.parents, chosen.tokens))
        parents = pool.compact(keep, int(keep.sum(1).amax()), parents)
        moving = torch.ones_like(state.num_tokens, dtype=torch.bool) if active is None else active
        shifts = torch.full_like(parents, SHIFT)
        live_rows = (scores > NEG_INF) & moving[:, None]
        nodes = self.machine.push(pool, parents, shifts, tokens, state.num_tokens, state.edges, live_rows)
        nodes = torch.where(moving[:, None], nodes, parents)
        new = SearchState(pool, nodes, scores, state.num_tokens + moving, [nodes.shape[1]], state.edges)
        return new, order

    def close(self, state: SearchState) -> SearchState:
        """Take structural actions until the sentence is over: the best K complete derivations, best first."""
        reached = self._reach(state, Phase.END, None)[1]
        return self._ended(state, reached.candidates(), reached.actions)

    def _ended(self, state: SearchState, chosen: Candidates, actions: Tensor) -> SearchState:
        """Execute the actions [B, K] that end the sentence."""
        pool, live = state.pool, chosen.scores > NEG_INF
        tokens = torch.zeros_like(actions)
        nodes = self.machine.push(pool, chosen.parents, actions, tokens, state.num_tokens, state.edges, live)
        return replace(
            state, nodes=nodes, scores=chosen.scores, level_sizes=[nodes.shape[1]], origin=chosen.origin,
            next_log_probs=None,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the best way to end each hypothesis; the state stays as it is.

        One search ends all hypotheses together. Hypotheses that it loses are searched again, one by one.
        """
        pool, size = state.pool, state.pool.size
        wide = FastTrackSearch(
            self.machine, self.action_beam_size, self.action_beam_size, self.fast_track_size, self.eos_token_ids
        )
        closed = wide.close(state)
        count = state.nodes.shape[1]
        same = closed.origin[:, None] == torch.arange(count, device=closed.origin.device)[:, None]
        scores, index = closed.scores[:, None].masked_fill(~same, NEG_INF).max(2)
        ends = closed.nodes.gather(1, index)
        lost = (scores == NEG_INF) & (state.scores > NEG_INF)
        for column in lost.any(0).nonzero().flatten().tolist():
            chosen = lost[:, column]
            alone = state.with_hypotheses(torch.full_like(state.nodes[:, :1], column))
            alone.scores = alone.scores.masked_fill(~chosen[:, None], NEG_INF)
            closed = wide.close(alone)
            scores[:, column] = torch.where(chosen, closed.scores[:, 0], scores[:, column])
            ends[:, column] = torch.where(chosen, closed.nodes[:, 0], ends[:, column])
        nodes = pool.derivations(ends, scores > NEG_INF)
        pool.truncate(size)
        return scores, nodes


def own_places(nodes: Tensor) -> Tensor:
    """The place of every hypothesis in its beam [B, R], of their `nodes` [B, R]."""
    return torch.arange(nodes.shape[1], device=nodes.device).expand_as(nodes)
