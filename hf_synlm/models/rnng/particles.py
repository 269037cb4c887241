# SPDX-License-Identifier: Apache-2.0
"""The variable-width beam of RNNG: a deterministic particle filter (Crabbe et al. 2019).

A hypothesis carries a number of particles. Inside a word, each of its actions gets its share of them, rounded; actions
without a particle are dropped. Between words all particles are dealt out anew, in proportion to the joint
probabilities of the hypotheses. Nothing is drawn at random, and the beam is as wide as the particles need it.

It has no short version in `tests/reference`; `tests/models/rnng/test_rnng_fast_track.py` checks it against exact
probabilities.

Source: `variable_beam_search` of the authors' code with `original_reweight=False`, without its limit of 3,000
hypotheses. Rounding makes the result depend on the last bits of the probabilities when particles are many.

Shapes: B sentences, K hypotheses, R states of a step, A action ids.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.labeled.fast_track import Continuations, FastTrackSearch, SetAside, own_places
from hf_synlm.search.labeled.machine import LabeledStackMachine, Phase
from hf_synlm.search.state import NEG_INF, Candidates, SearchState, check_count
from hf_synlm.trees.transitions import SHIFT

DEFAULT_PARTICLES = 1000


class ParticleSearch(FastTrackSearch):
    """Particle filter with the interface of the beam search for given words."""

    def __init__(self, machine: LabeledStackMachine, num_particles: int) -> None:
        check_count("num_particles", num_particles)
        super().__init__(machine, num_particles, num_particles, 0)

    def begin(self, batch_size: int, device: torch.device, **context: Any) -> SearchState:
        """State before the first word: one hypothesis with all particles."""
        state = super().begin(batch_size, device, **context)
        return replace(state, particles=torch.full_like(state.scores, float(self.num_beams)))

    def propose(
        self, state: SearchState, tokens: Tensor, block: object = None, active: Tensor | None = None
    ) -> Candidates:
        """All derivations that generate a given word [B] and still have particles, best first."""
        if active is not None:
            state = replace(state, scores=state.scores.masked_fill(~active[:, None], NEG_INF))
        return self._spread(state, Phase.CONTINUE, tokens)

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the words and deal the particles out anew; hypotheses that get none are dropped."""
        particles = self._dealt(chosen.scores)
        chosen = replace(chosen, scores=chosen.scores.masked_fill(particles == 0, NEG_INF))
        new, order = super().commit(state, chosen, active, wanted)
        moved = F.pad(particles, (0, max(0, int(order.max()) + 1 - particles.shape[1]))).gather(1, order)
        if active is not None:
            width = max(0, order.shape[1] - state.particles.shape[1])
            kept = F.pad(state.particles, (0, width))
            kept = kept.gather(1, order.clamp(max=kept.shape[1] - 1))
            moved = torch.where(active[:, None], moved, kept)
        return replace(new, particles=moved), order

    def _close(self, state: SearchState) -> SearchState:
        """End the sentence: the complete derivations that still have particles, best first."""
        reached = self._spread(state, Phase.END, None)
        alive = reached.scores.masked_fill(self._dealt(reached.scores) == 0, NEG_INF)
        return self._ended(state, replace(reached, scores=alive))

    def _dealt(self, scores: Tensor) -> Tensor:
        """Particles [B, K] in proportion to exp(scores), rounded."""
        alive = scores.masked_fill((scores == NEG_INF).all(1, keepdim=True), 0.0) if scores.shape[1] else scores
        return (self.num_beams * alive.softmax(1)).round().masked_fill(scores == NEG_INF, 0.0)

    def _spread(self, state: SearchState, phase: Phase, tokens: Tensor | None) -> Candidates:
        """Follow every action that gets a particle until the next word (or the end) is reached."""
        machine, aside, frontier = self.machine, SetAside(state, 1), self._frontier(state)
        particles = state.particles.masked_fill(state.scores == NEG_INF, 0.0)
        while frontier.scores.shape[1]:
            log_probs = machine.action_log_probs(frontier.seen, state.num_tokens, phase)
            shares = (log_probs.exp() * particles[..., None]).round()
            total = (frontier.scores[..., None] + log_probs).masked_fill(shares == 0, NEG_INF)
            reached = self._ended_by(frontier, total, phase, None)
            if tokens is not None:
                base = total[..., SHIFT]
                scores = base + machine.log_probs_of(frontier.seen.predictor, tokens, base > NEG_INF)
                reached = Continuations.of(frontier, scores[..., None], tokens[:, None, None].expand(*base.shape, 1))
            width = reached.scores.shape[1]
            aside.add(reached, 0 if tokens is None else width, reached.scores, own_places(reached.scores))
            moves = total.masked_fill(machine.not_structural, NEG_INF).flatten(1)
            scores, index = moves.topk(max(1, int((moves > NEG_INF).sum(1).amax())))
            particles = shares.flatten(1).gather(1, index).masked_fill(scores == NEG_INF, 0.0)
            frontier = self._execute(state, frontier, scores, index, scores > NEG_INF)
            particles = particles[:, : frontier.scores.shape[1]]
        return aside.candidates(tokens is not None, None)
