"""Word-synchronous beam search with fast-track, for systems with many structural actions between two words.

Inside a word the beam goes action by action (Stern et al. 2017): of all actions of all k states, the best k are
looked at; those that reach the next word are set aside, the others are executed and looked at again, until k have
reached it. *Fast-track* sets a few aside at every step although they are not among the best k. Of those set aside, the
best K (the word beam) go on together to the next word. With `m_t = logsumexp_k log p(x_1..t, y_k)` over them,
m_t - m_(t-1) is the beam's log p(x_t | x_1..t-1).

States are nodes of a pool: hypotheses branch without copying a vector, only states that are alive are computed, and a
word's last action is executed for the K that are kept. A word also ends as soon as no live state can beat the K that
have reached it: log-probabilities never rise, so the result is the same (Noji and Oseki's code goes on).

Source: Noji and Oseki 2021, section 3; `word_sync_beam_search` of the authors' code.

Shapes: B sentences, K word beam, R states of a step, A action ids, G words considered per state, C hypotheses set
aside, N nodes, V vocabulary. All scores are natural logs in float32; -inf marks what does not exist.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .rnng_actions import SHIFT
from .rnng_stack_machine import Phase, RNNGStackMachine
from .search_stack import NodePool, Nodes
from .search_state import NEG_INF, Candidates, SearchState, keep_frozen

WordScores = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(states [B, R], which may generate [B, R], origins [B, R]) -> scores and ids of G words [B, R, G]."""
_FIELDS = ("parents", "tokens", "origin", "steps", "actions")


@dataclass
class Reached:
    """The best hypotheses that have reached the next word (or the end of the sentence)."""

    scores: Tensor
    """[B, C] including the last action; best first, -inf = none."""
    fields: dict[str, Tensor]
    """[B, C] parents (states before the last action), tokens, origin, steps (actions before the last), actions."""

    @classmethod
    def none(cls, batch: int, device: torch.device) -> "Reached":
        """No hypotheses."""
        empty = torch.zeros(batch, 0, dtype=torch.long, device=device)
        return cls(torch.zeros(batch, 0, device=device), dict.fromkeys(_FIELDS, empty))

    def with_more(self, scores: Tensor, fields: dict[str, Tensor], count: int) -> "Reached":
        """The best `count` of these and others."""
        scores = torch.cat([self.scores, scores], 1)
        scores, index = scores.topk(min(count, scores.shape[1]))
        merged = {name: torch.cat([self.fields[name], fields[name]], 1).gather(1, index) for name in _FIELDS}
        return Reached(scores, merged)


@dataclass
class Limits:
    """What logits processors leave to the hypotheses of a beam, each [B, R]."""

    end_scores: Tensor
    """Added where a sentence ends; -inf = it must not."""
    end_tokens: Tensor
    """The end token that is written then."""
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
        pool, nodes, history = self.machine.begin(batch_size, device)
        scores = torch.zeros(nodes.shape, dtype=torch.float32, device=device)
        return SearchState(pool, nodes, scores, history, torch.zeros_like(nodes[:, 0]), [1])

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
            limits: what processors leave; None = there are none.

        Returns:
            The hypotheses that generate a word, and those that end.
        """
        pool, machine = state.pool, self.machine
        batch, device = len(state.nodes), state.nodes.device
        nodes, scores = state.nodes, state.scores
        origin = torch.arange(nodes.shape[1], device=device).expand(batch, -1)
        size, kept = self.action_beam_size, self.num_beams
        capacity = min(2 * size, size + 5 * self.fast_track_size)
        reached = [Reached.none(batch, device), Reached.none(batch, device)]
        count, forced = (
            torch.zeros(batch, 1, dtype=torch.long, device=device),
            torch.zeros_like(state.num_tokens)[:, None],
        )
        steps = 0
        while True:
            ends, moves, fields, late = self._continuations(state, nodes, scores, origin, phase, words, limits)
            width = ends.shape[1]
            best, index = torch.cat([ends, moves], 1).topk(min(size, width + moves.shape[1]))
            is_end = (index < width) & (best > NEG_INF)
            if late is not None:
                self._score_late(ends, late, is_end, nodes, words)
            more, more_index, new_forced = self._fast_track(ends, best, index, is_end)
            # No more than `capacity` are set aside; the worst of a step are dropped first.
            room = torch.cat([is_end, more > NEG_INF], 1).long().cumsum(1) <= capacity - count
            found = torch.cat([best.masked_fill(~is_end, NEG_INF), more], 1).masked_fill(~room, NEG_INF)
            place = torch.cat([index.clamp(max=width - 1), more_index], 1)
            chosen = {name: value.gather(1, place) for name, value in fields.items()}
            chosen["steps"] = torch.full_like(place, steps)
            ended = chosen.pop("ended").bool()
            for number, wanted in enumerate((~ended, ended)):
                reached[number] = reached[number].with_more(found.masked_fill(~wanted, NEG_INF), chosen, kept)
            count = count + (found > NEG_INF).sum(1, keepdim=True)
            forced = forced + new_forced
            live = ~is_end & (index >= width) & (best > NEG_INF)
            full = (count >= capacity) | (count - forced >= size)
            live = live & ~full & ~self._is_decided(reached, best.masked_fill(~live, NEG_INF), phase, limits)
            rows = int(live.sum(1).amax())
            if not rows:
                return reached[0], reached[1]
            order = (~live).to(torch.uint8).argsort(dim=1, stable=True)[:, :rows]
            live, scores = live.gather(1, order), best.gather(1, order)
            move = (index.gather(1, order) - width).clamp(min=0)
            row, action = move // machine.config.num_actions, move % machine.config.num_actions
            parents, origin = nodes.gather(1, row), origin.gather(1, row)
            tokens = torch.zeros_like(parents)
            nodes = machine.push(pool, parents, action, tokens, state.num_tokens, state.edges, live)
            scores = scores.masked_fill(~live, NEG_INF)
            steps += 1

    def _continuations(
        self,
        state: SearchState,
        nodes: Tensor,
        scores: Tensor,
        origin: Tensor,
        phase: Phase,
        words: WordScores | None,
        limits: Limits | None,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor | None]:
        """Scores of the continuations that reach a word or the end [B, E], of the others [B, R A], and the E's fields.

        Every state contributes its G words, then its end. Words that are given cost most of the search and are no more
        probable than the SHIFT before them: where k moves beat that, the word is not scored. The last value holds the
        scores [B, R] up to SHIFT of these (-inf elsewhere); None where all are scored.
        """
        machine, pool = self.machine, state.pool
        total = scores[..., None] + self._action_log_probs(state, nodes, origin, phase, limits)
        parts: list[tuple[Tensor, Tensor, int, bool]] = []
        late = None
        if words is not None:
            base = total[..., SHIFT]
            wanted = base > NEG_INF
            if isinstance(words, _GivenWords):
                bar = self._worst_move(total)
                late = base.masked_fill(base >= bar, NEG_INF)
                wanted = wanted & (base >= bar)
            word_scores, ids = words(nodes, wanted, origin)
            parts.append((base[..., None] + word_scores, ids, SHIFT, False))
        if phase is not Phase.CONTINUE:
            action, ends = machine.end_action(pool, nodes)
            score, token = self._end_scores(total[..., action].masked_fill(~ends, NEG_INF), origin, limits)
            parts.append((score[..., None], token[..., None], action, True))
            total[..., action] = total[..., action].masked_fill(ends, NEG_INF)
        total[..., SHIFT] = NEG_INF
        fields: dict[str, list[Tensor]] = {name: [] for name in ("parents", "tokens", "origin", "actions", "ended")}
        for _, ids, action, ended in parts:
            for name, value in (("parents", nodes), ("origin", origin)):
                fields[name].append(value[..., None].expand_as(ids).flatten(1))
            fields["tokens"].append(ids.flatten(1))
            fields["actions"].append(torch.full_like(fields["tokens"][-1], action))
            fields["ended"].append(torch.full_like(fields["tokens"][-1], int(ended)))
        merged = {name: torch.cat(values, 1) for name, values in fields.items()}
        return torch.cat([score.flatten(1) for score, *_ in parts], 1), total.flatten(1), merged, late

    def _action_log_probs(
        self, state: SearchState, nodes: Tensor, origin: Tensor, phase: Phase, limits: Limits | None
    ) -> Tensor:
        """Log-probabilities of actions [B, R, A]; where no word may follow, those at the end of a sentence, if any."""
        log_probs = self.machine.action_log_probs(state.pool, nodes, state.num_tokens, phase)
        if limits is None or limits.wordless is None:
            return log_probs
        wordless = limits.wordless.gather(1, origin)[..., None]
        if phase is Phase.CONTINUE:
            return log_probs.masked_fill(wordless, NEG_INF)
        return torch.where(
            wordless, self.machine.action_log_probs(state.pool, nodes, state.num_tokens, Phase.END), log_probs
        )

    def _end_scores(self, scores: Tensor, origin: Tensor, limits: Limits | None) -> tuple[Tensor, Tensor]:
        """Scores [B, R] of hypotheses that end as processors have it, and the end tokens they write."""
        if limits is None:
            return scores, torch.full_like(origin, self.end_ids[0] if self.end_ids else 0)
        return scores + limits.end_scores.gather(1, origin), limits.end_tokens.gather(1, origin)

    def _worst_move(self, total: Tensor) -> Tensor:
        """Score [B, 1] of the k-th best structural action of states [B, R, A]; -inf if there are fewer."""
        moves = total.clone()
        moves[..., SHIFT] = NEG_INF
        moves = moves.flatten(1)
        if moves.shape[1] < self.action_beam_size:
            return moves.new_full((len(moves), 1), NEG_INF)
        return moves.topk(self.action_beam_size).values[:, -1:]

    def _score_late(self, ends: Tensor, late: Tensor, is_end: Tensor, nodes: Tensor, words: WordScores) -> None:
        """Score the words that were left out where fast-track may need them, in place."""
        lacking = is_end.sum(1, keepdim=True) < self.fast_track_size
        wanted = (late > NEG_INF) & lacking
        if bool(wanted.any()):
            scores = late + words(nodes, wanted, nodes)[0].squeeze(2)
            ends[:, : nodes.shape[1]] = torch.where(wanted, scores, ends[:, : nodes.shape[1]])

    def _fast_track(self, ends: Tensor, best: Tensor, index: Tensor, is_end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The best ends [B, S] that are not among the best k, as many as `fast_track_size` leaves open."""
        width = min(self.fast_track_size, ends.shape[1])
        missing = self.fast_track_size - is_end.sum(1, keepdim=True)
        # One column more takes what is no end.
        taken = F.pad(torch.zeros_like(ends, dtype=torch.bool), (0, 1))
        taken = taken.scatter(1, torch.where(is_end, index, ends.shape[1]), True)[:, :-1]
        more, place = ends.masked_fill(taken, NEG_INF).topk(width)
        more = more.masked_fill(torch.arange(width, device=ends.device) >= missing, NEG_INF)
        return more, place, (more > NEG_INF).sum(1, keepdim=True)

    def _is_decided(self, reached: list[Reached], live: Tensor, phase: Phase, limits: Limits | None) -> Tensor:
        """Sentences [B, 1] where no live hypothesis can be among the best K any more."""
        main = reached[1 if phase is Phase.END else 0].scores
        if main.shape[1] < self.num_beams:
            return torch.zeros_like(live[:, :1], dtype=torch.bool)
        if limits is not None and limits.wordless is not None:
            main = torch.where(limits.wordless.all(1, keepdim=True), reached[1].scores, main)
        worst = main[:, -1:]
        decided = (worst > NEG_INF) & (live.amax(1, keepdim=True) <= worst)
        return decided if limits is None else decided & ~limits.raises.any(1, keepdim=True)

    def _candidates(self, state: SearchState, reached: Reached, first: int) -> Candidates:
        """Candidates with their histories: those of the beam, and the nodes from `first` on that lead to them."""
        pool, fields = state.pool, reached.fields
        width = state.history.shape[2]
        history = state.history.gather(1, fields["origin"][..., None].expand(-1, -1, width))
        history = F.pad(history, (0, pool.size - width))
        node = fields["parents"]
        for _ in range(int(fields["steps"].masked_fill(reached.scores == NEG_INF, 0).amax()) if node.numel() else 0):
            new = node >= first
            # Nodes of the old beam are in its history already.
            history.scatter_(2, node[..., None], history.gather(2, node[..., None]) | new[..., None])
            node = torch.where(new, pool.field("predecessor", node), node)
        return Candidates(
            reached.scores, fields["parents"], history, fields["tokens"], fields["origin"], fields["steps"]
        )

    # ------------------------------------------------------------------------------------------------ given words
    def propose(
        self, state: SearchState, tokens: Tensor, block: object = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given word per sentence.

        Args:
            state: beam between two words.
            tokens: the word of each sentence [B].
            block: not used.
            active: sentences that take a word [B]; the others get no candidate. None = all.

        Returns:
            At most K candidates per sentence, best first.
        """
        if active is not None:
            state = replace(state, scores=state.scores.masked_fill(~active[:, None], NEG_INF))
        first = state.pool.size
        return self._candidates(
            state, self._reach(state, Phase.CONTINUE, _GivenWords(self.machine, state.pool, tokens))[0], first
        )

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
        keep = (chosen.history & alive[..., None]).any(1)
        rows, live = torch.stack([alive.sum(1).amax(), keep.sum(1).amax()]).tolist()
        order = chosen.scores.argsort(dim=1, descending=True, stable=True)[:, : max(1, rows)]
        scores, parents, tokens = (x.gather(1, order) for x in (chosen.scores, chosen.parents, chosen.tokens))
        history = chosen.history.gather(1, order[..., None].expand(-1, -1, chosen.history.shape[2]))
        if pool.size > 2 * live + 32:
            index, renumber = pool.compact(F.pad(keep, (0, pool.size - keep.shape[1])), max(1, live))
            parents = renumber.gather(1, parents).clamp(min=0)
            inside = index < history.shape[2]
            index = index.clamp(max=history.shape[2] - 1)[:, None].expand(-1, history.shape[1], -1)
            history = history.gather(2, index) & inside[:, None]
        moving = torch.ones_like(state.num_tokens, dtype=torch.bool) if active is None else active
        shifts = torch.full_like(parents, SHIFT)
        live_rows = (scores > NEG_INF) & moving[:, None]
        nodes = self.machine.push(pool, parents, shifts, tokens, state.num_tokens, state.edges, live_rows)
        nodes = torch.where(moving[:, None], nodes, parents)
        new = SearchState(
            pool, nodes, scores, _with_nodes(pool, history, nodes, moving), state.num_tokens + moving,
            [nodes.shape[1]], state.edges,
        )  # fmt: skip
        return new, order

    def close(self, state: SearchState) -> SearchState:
        """Take structural actions until the sentence is over: the best K complete derivations, best first."""
        first = state.pool.size
        reached = self._reach(state, Phase.END, None)[1]
        return self._ended(state, self._candidates(state, reached, first), reached.fields["actions"])

    def _ended(self, state: SearchState, chosen: Candidates, actions: Tensor) -> SearchState:
        """Execute the actions [B, K] that end the sentence."""
        pool, live = state.pool, chosen.scores > NEG_INF
        tokens = torch.zeros_like(actions)
        nodes = self.machine.push(pool, chosen.parents, actions, tokens, state.num_tokens, state.edges, live)
        history = _with_nodes(pool, chosen.history, nodes, torch.ones_like(live[:, 0]))
        return replace(
            state, nodes=nodes, scores=chosen.scores, history=history, level_sizes=[nodes.shape[1]],
            origin=chosen.origin, next_log_probs=None,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the best way to end each hypothesis; the state stays as it is.

        One search ends all hypotheses together; those that it loses are searched again, one by one.
        """
        pool, size = state.pool, state.pool.size
        wide = FastTrackSearch(
            self.machine, self.action_beam_size, self.action_beam_size, self.fast_track_size, self.eos_token_ids
        )
        closed = wide.close(state)
        count = state.nodes.shape[1]
        same = closed.origin[:, None] == torch.arange(count, device=closed.origin.device)[:, None]
        scores, index = closed.scores[:, None].masked_fill(~same, NEG_INF).max(2)
        history = closed.history.gather(1, index[..., None].expand(-1, -1, closed.history.shape[2]))
        lost = (scores == NEG_INF) & (state.scores > NEG_INF)
        for column in lost.any(0).nonzero().flatten().tolist():
            chosen = lost[:, column]
            alone = state.with_hypotheses(torch.full_like(state.nodes[:, :1], column))
            alone.scores = alone.scores.masked_fill(~chosen[:, None], NEG_INF)
            closed = wide.close(alone)
            scores[:, column] = torch.where(chosen, closed.scores[:, 0], scores[:, column])
            history = F.pad(history, (0, closed.history.shape[2] - history.shape[2]))
            history[:, column] = torch.where(chosen[:, None], closed.history[:, 0], history[:, column])
        nodes = pool.derivations(history & (scores > NEG_INF)[..., None])
        pool.truncate(size)
        return scores, nodes


def _with_nodes(pool: NodePool, history: Tensor, nodes: Tensor, moving: Tensor) -> Tensor:
    """Histories [B, K, N] that include one new node each where a sentence moves [B]."""
    history = F.pad(history, (0, pool.size - history.shape[2]))
    place = nodes[..., None]
    return history.scatter(2, place, history.gather(2, place) | moving[:, None, None])


__all__ = ["FastTrackSearch", "Limits", "Reached"]
