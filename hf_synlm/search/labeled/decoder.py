# SPDX-License-Identifier: Apache-2.0
"""Word-synchronous search with fast-track where the next word is not given: best words, drawn words, distributions.

The slow and obvious versions are `Grammar.next_word` and `Grammar.derivations` in `tests/reference/rnng_search.py`.

With end tokens, a sentence may end wherever its tree may be closed. The action that closes it has its probability; the
probability of the end token as a word is not used. Under normalization "search" the other words share it.

Logits processors see words: log p(w | state) of every word, -inf at the end tokens. For the end of a sentence they are
called once more, with scores that are 0 at the end tokens and -inf elsewhere; what they add counts with the closing
action.

Shapes: B sentences, K word beam, R states of a step, V vocabulary. All scores are natural logs in float32; -inf marks
what does not exist.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from hf_synlm.search.labeled.fast_track import FastTrackSearch, Frontier, Limits, own_places
from hf_synlm.search.labeled.machine import Phase, Seen
from hf_synlm.search.next_tokens import NEGLIGIBLE, Process, draw_index
from hf_synlm.search.state import NEG_INF, Candidates, SearchState
from hf_synlm.trees.transitions import SHIFT

# Numbers in one table of word scores: memory does not grow with the beam.
_TABLE_ELEMENTS = 1 << 24


class FastTrackDecoder(FastTrackSearch):
    """`FastTrackSearch` that also generates words which are not given; see there for the arguments."""

    @property
    def _free_phase(self) -> Phase:
        return Phase.CONTINUE if self.eos_token_ids is None else Phase.EITHER

    def propose_tokens(
        self, state: SearchState, process: Process | None, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """The best K derivations that generate one more word, of all words, and the best that end.

        As `propose`, with the K best words of every state as its continuations. The end counts as a word of probability
        1 in the states where the tree may be closed. Arguments and results: see `NextTokens.propose_tokens`; the word
        scores are those that the states visited by the search give.
        """

        def best_words(frontier: Frontier, base: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
            parts = []
            for part in self._parts(base):
                words = base[:, part, None] + self._words(frontier.seen.rows(part), frontier.origin[:, part], process)
                parts.append(words.topk(min(self.num_beams, words.shape[2]), 2))
            return torch.cat([best.values for best in parts], 1), torch.cat([best.indices for best in parts], 1)

        limits = self._limits(process, own_places(state.nodes))
        aside = self._reach(state, self._free_phase, best_words, limits)
        summed = self._summed_words(state, process, limits) if keep_scores else None
        chosen, ended = aside.candidates(True, self.num_beams), None
        if self.eos_token_ids is not None:
            ended = aside.candidates(False, self.num_beams)
            ended = replace(ended, parents=self._ended(state, ended).nodes)
        return chosen, ended, summed

    def draw_token(self, state: SearchState, process: Process | None) -> tuple[Candidates, Tensor]:
        """Draw one derivation and its next word (or the end of the sentence) per sentence.

        A hypothesis is drawn in proportion to its probability, then action by action from the model, then the word
        from p(w | state) under the processors: exact ancestral sampling. Results: see `NextTokens.draw_token`.
        """
        pool, machine = state.pool, self.machine
        origin = draw_index(state.scores)
        limits = self._limits(process, own_places(state.nodes))
        seen, scores = machine.look(pool, state.nodes.gather(1, origin)), state.scores.gather(1, origin)
        steps, actions = torch.zeros_like(origin), torch.zeros_like(origin)
        going = scores > NEG_INF
        ended = torch.zeros_like(going)
        while True:
            frontier = Frontier(seen, scores, origin)
            log_probs = self._action_log_probs(state, frontier, self._free_phase, limits)[:, 0]
            weights = log_probs.clone()
            may_end = torch.zeros_like(going)
            if self._free_phase is Phase.EITHER:
                end, may_end = machine.end_action(seen)
                closing = self._end_scores(weights[:, end, None], origin, limits)[0]
                weights[:, end] = torch.where(may_end, closing, weights[:, end, None])[:, 0]
            action = draw_index(weights)
            scores = torch.where(going, scores + log_probs.gather(1, action), scores)
            actions = torch.where(going, action, actions)
            going = going & (weights.gather(1, action) > NEG_INF)
            if self._free_phase is Phase.EITHER:
                ended = ended | (going & (action == end) & may_end)
            going = going & (action != SHIFT) & ~ended
            pushed = machine.push(pool, seen, action, state.num_tokens, going)
            if not pushed.shape[1]:
                break
            seen, steps = machine.look(pool, torch.where(going, pushed, seen.nodes)), steps + going
        reached = Candidates(scores, seen.nodes, torch.zeros_like(origin), origin, steps)
        return self._drawn(state, process, limits, reached, actions == SHIFT, ended)

    def _drawn(
        self,
        state: SearchState,
        process: Process | None,
        limits: Limits | None,
        reached: Candidates,
        shifted: Tensor,
        ended: Tensor,
    ) -> tuple[Candidates, Tensor]:
        """Draw the words of states [B, 1] that have `shifted` [B, 1], and end those that have `ended` [B, 1]."""
        scores, origin = reached.scores, reached.origin
        seen = self.machine.look(state.pool, reached.parents)
        log_probs = self._without_specials(self.machine.vocabulary_log_probs(seen))
        words = self._processed_words(process, origin, log_probs)
        token = draw_index(words[:, 0])
        word_score = log_probs[:, 0].gather(1, token).masked_fill(words[:, 0].gather(1, token) == NEG_INF, NEG_INF)
        scores = torch.where(shifted, scores + word_score, scores.masked_fill(~ended, NEG_INF))
        if self.eos_token_ids is not None:
            eos = self._end_scores(scores, origin, limits)[1]
            token = torch.where(ended, eos, token)
            only_end = torch.full_like(words[:, 0], NEG_INF).scatter(1, eos, 0.0)
            words = torch.where(ended[..., None], only_end[:, None], words)
        chosen = replace(reached, scores=scores, tokens=token)
        if bool(ended.any()):
            closed = self._ended(state, replace(chosen, scores=scores.masked_fill(~ended, NEG_INF)))
            chosen = replace(chosen, parents=torch.where(ended, closed.nodes, chosen.parents))
        return chosen, words[:, 0]

    # ----------------------------------------------------------------------------------------------- word scores
    def _parts(self, nodes: Tensor) -> Iterator[slice]:
        """Cut states [B, R] so that no table of word scores gets too large."""
        size = max(1, _TABLE_ELEMENTS // max(1, len(nodes) * self.machine.config.vocab_size))
        for start in range(0, max(1, nodes.shape[1]), size):
            yield slice(start, start + size)

    def _words(self, seen: Seen, origin: Tensor, process: Process | None) -> Tensor:
        """Word scores [B, R, V], -inf at padding and end tokens."""
        return self._processed_words(process, origin, self._without_specials(self.machine.vocabulary_log_probs(seen)))

    def _processed_words(self, process: Process | None, origin: Tensor, words: Tensor) -> Tensor:
        """Word scores [B, R, V] after the processors, -inf at the words that they forbid."""
        if process is None:
            return words
        words = self._processed(process, origin, words.clone())
        return self._without_specials(words.masked_fill(~_is_possible(words), NEG_INF))

    def _processed(self, process: Process, origin: Tensor, words: Tensor) -> Tensor:
        """The processors on scores [B, R, V]; they get K rows per sentence at a time."""
        pairs = zip(origin.split(self.num_beams, 1), words.split(self.num_beams, 1), strict=True)
        return torch.cat([process(*pair) for pair in pairs], 1)

    def _without_specials(self, words: Tensor) -> Tensor:
        words[..., self.machine.config.pad_token_id] = NEG_INF
        if self.eos_token_ids is not None:
            words[..., self.eos_token_ids] = NEG_INF
        return words

    def _limits(self, process: Process | None, origin: Tensor) -> Limits | None:
        """Limits that the processors set to hypotheses [B, R]; None without processors."""
        if process is None:
            return None
        nothing = torch.full((*origin.shape, self.machine.config.vocab_size), NEG_INF, device=origin.device)
        words = self._processed_words(process, origin, self._without_specials(torch.zeros_like(nothing)))
        wordless = (words == NEG_INF).all(2)
        raises = (words > 0).any(2)
        end_scores, end_tokens = torch.zeros_like(words[..., 0]), torch.zeros_like(origin)
        if self.eos_token_ids is not None:
            ends = self._processed(process, origin, nothing.index_fill(2, self.eos_token_ids, 0.0))
            ends = ends[..., self.eos_token_ids]
            end_scores, which = ends.masked_fill(~_is_possible(ends), NEG_INF).max(2)
            end_tokens = self.eos_token_ids[which]
        return Limits(end_scores, end_tokens, wordless if bool(wordless.any()) else None, raises | (end_scores > 0))

    def _summed_words(self, state: SearchState, process: Process | None, limits: Limits | None) -> Tensor:
        """Log p(word | hypothesis) [B, K, V], summed over the states that a beam visits without knowing the word."""
        parts = []
        for index in range(state.nodes.shape[1]):
            alone = state.with_hypotheses(torch.full_like(state.nodes[:, :1], index))
            origin = torch.full_like(alone.nodes, index)
            score = self._mixture(alone, process, limits, origin) - alone.scores
            parts.append(score.masked_fill(alone.scores == NEG_INF, NEG_INF))
        return torch.stack(parts, 1)

    # ----------------------------------------------------------------------------------------------- distributions
    def next_token_log_probs(self, state: SearchState) -> Tensor:
        """Next-word log-probabilities [B, V] given the prefix, derivations summed out; uniform where the beam is empty.

        log p(w | x) = logsumexp_r [ log p(x, y_r) + log p(SHIFT | y_r) + log p(w | y_r) ] - log Z over the states r
        that a beam of `action_beam_size` visits, which does not know the word. With end tokens, the first of them has
        the probability that the sentence is over.
        """
        if state.next_log_probs is not None:
            return state.next_log_probs
        total = self._mixture(state, None, None, own_places(state.nodes))
        total = total.masked_fill((total == NEG_INF).all(1, keepdim=True), 0.0)
        state.next_log_probs = total.log_softmax(-1)
        return state.next_log_probs

    def _mixture(self, state: SearchState, process: Process | None, limits: Limits | None, origin: Tensor) -> Tensor:
        """Log p(x, w) [B, V], summed over the states that the beam visits; the pool is left unchanged."""
        pool, machine, size = state.pool, self.machine, state.pool.size
        frontier, phase = self._frontier(state)._replace(origin=origin), self._free_phase
        total = state.scores.new_full((len(state.scores), machine.config.vocab_size), NEG_INF)
        while frontier.scores.shape[1]:
            seen, scores, origin = frontier
            log_probs = scores[..., None] + self._action_log_probs(state, frontier, phase, limits)
            for part in self._parts(scores):
                words = self._words(seen.rows(part), origin[:, part], process)
                total = torch.logaddexp(total, (log_probs[:, part, SHIFT, None] + words).logsumexp(1))
            ended = self._ended_by(frontier, log_probs, phase, limits)
            if ended is not None:
                for eos in self.end_ids:
                    over = ended.scores.masked_fill(ended.tokens != eos, NEG_INF)
                    total[:, eos] = torch.logaddexp(total[:, eos], over.logsumexp(1))
            scores, index = self._moves(log_probs)
            live = (scores > NEG_INF) & (scores >= total.logsumexp(1, keepdim=True) - NEGLIGIBLE)
            frontier = self._execute(state, frontier, scores, index, live)
        pool.truncate(size)
        return total


def _is_possible(scores: Tensor) -> Tensor:
    """Where processors allow a word: some of them write the lowest number, or NaN, for -inf."""
    return scores > torch.finfo(scores.dtype).min / 2
