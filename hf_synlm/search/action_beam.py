# SPDX-License-Identifier: Apache-2.0
"""Beam search over single actions, the baseline "w/o sync" of the GPST paper.

The hypotheses of a beam have taken equally many actions, but may have reached different tokens. Illegal actions are
forbidden before the softmax over actions, so that forced actions cost nothing. The word-synchronous search is in
`search/synchronous.py`. The slow and obvious version is `action_beam` in tests/reference/exhaustive_search.py.

Shapes: B sentences, R hypotheses of a beam, M expansions, T tokens, V vocabulary.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from hf_synlm.search.stack import Levels
from hf_synlm.search.state import NEG_INF, SearchState
from hf_synlm.search.synchronous import SynchronousSearch
from hf_synlm.trees.actions import COMP, GEN

STAY = 2


class Expansions(NamedTuple):
    """Hypotheses with one more action, best first, each [B, M].

    Fields:
        scores: joint log-probability, the action included; -inf = no hypothesis.
        origin: hypothesis of the beam that takes the action.
        actions: GEN or COMP; `STAY` in sentences that are over.
        tokens: token of a GEN, arbitrary elsewhere.
    """

    scores: Tensor
    origin: Tensor
    actions: Tensor
    tokens: Tensor


def take_actions(
    search: SynchronousSearch, state: SearchState, chosen: Expansions, active: Tensor | None = None
) -> SearchState:
    """Make expansions the new beam, in their order, and run the layers on their nodes; `num_tokens` is [B, R].

    Sentences that are not `active` [B] keep the hypotheses `chosen.origin`. Expansions that do not exist stand last and
    are cut off where no sentence has one.
    """
    pool, machine = state.pool, search.machine
    parents = state.with_hypotheses(chosen.origin)
    alive = chosen.scores > NEG_INF
    keep = pool.in_use(parents.nodes, alive, state.max_length)
    rows, live = torch.stack([alive.sum(1).amax(), keep.sum(1).amax()]).tolist()
    rows = max(1, rows)
    scores, _, actions, tokens = (value[:, :rows] for value in chosen)
    # A hypothesis that does not exist reads nothing: otherwise it would read past the end of the text.
    num_tokens = parents.num_tokens[:, :rows] + ((actions == GEN) & alive[:, :rows])
    nodes = pool.compact(keep, live, parents.nodes[:, :rows])
    new = machine.push(pool, nodes, num_tokens, tokens=tokens, actions=actions)
    machine.read(pool, pool.paths(nodes, state.max_length), new, Levels([rows], new.device))
    if active is not None:
        new = torch.where(active[:, None], new, nodes)
    return replace(
        state, nodes=new, scores=scores, num_tokens=num_tokens, level_sizes=[rows],
        max_depth=state.max_depth + 1, max_length=state.max_length + 1,
    )  # fmt: skip


def read_by_actions(search: SynchronousSearch, state: SearchState, tokens: Tensor, length: Tensor) -> SearchState:
    """Parse given tokens [B, T]: the K best derivations with equally many actions, best first.

    Every derivation of n tokens has 2n - 1 actions, so a sentence's hypotheses finish together. `length` [B] counts
    tokens.
    """
    machine, pool = search.machine, state.pool
    state = replace(state, num_tokens=torch.zeros_like(state.nodes))
    for step in range(2 * tokens.shape[1] - 1):
        active, count = 2 * length - 1 > step, state.num_tokens
        log_probs = machine.action_log_probs(pool, state.nodes, count, state.edges, renormalize=True)
        next_token = tokens.gather(1, count.clamp(max=tokens.shape[1] - 1))
        lexical = search.log_probs_of(state, state.nodes, next_token)
        gen = (state.scores + log_probs[..., GEN] + lexical).masked_fill(count >= length[:, None], NEG_INF)
        comp = (state.scores + log_probs[..., COMP]).masked_fill(~active[:, None], NEG_INF)
        stay = state.scores.masked_fill(active[:, None], NEG_INF)
        expanded = torch.cat([gen, comp, stay], 1)
        scores, index = expanded.topk(min(search.num_beams, expanded.shape[1]))
        origin = index % count.shape[1]
        chosen = Expansions(scores, origin, index // count.shape[1], next_token.gather(1, origin))
        state = take_actions(search, state, chosen, active)
    return state
