# SPDX-License-Identifier: Apache-2.0
"""Word-synchronous beam search over the derivations of a syntactic language model.

A derivation builds a tree together with the tokens: between two tokens it may take structural actions. Here a state has
one structural successor (COMP for GPST); `search/labeled/fast_track.py` is for systems with many. "Word-synchronous":
the hypotheses of the beam are compared only when all of them have generated the same tokens, so that

    m_t = logsumexp_k log p(x_1..t, y_k)

over the K derivations y_k of the beam is a lower bound on the prefix log-probability, tight once K exceeds the number
of derivations (Stern et al. 2017; for GPST the authors' `R2D2GenFastBeamSearcher`).

The "word" of this term is a token. The beam is *synchronized* after a token when no structural successor is among the
best K (`SynchronousSearch.select`). Elsewhere a word is what the user writes, and a *word end* is the last token of a
word (`WordEdges`, `word_ends`), which no constituent may cross: `legal_actions` of the stack machine sees to it.

One token takes few calls of the model. The structural successors of the current states are laid out level by level (a
*block*: row (c, k) is state k after c structural actions). One pass gives all rows the probabilities of their next
action, another one those of their next token. Then the selection is replayed on the table of scores, level by level,
exactly as if the states had been expanded one action at a time. Nodes live in a `NodePool`: hypotheses branch without
copies. The model side is a `LevelMachine` (`search/level_machine.py`).

A block of three states with 3, 2 and 1 trees on their stacks, and its selection for K = 2:

    level   rows            entries (w: the token, C: COMP)     the best two    row that goes on
    0       k0  k1  k2      w0 C0  w1 C1  w2                    C0  w1          k0
    1       k0c k1c         w1 from above, w0c C0c              w0c w1          none: the beam is synchronized
    2       k0cc

Row k1c was laid out and scored, but its state k1 took no COMP, so it does not compete; level 2 is not read.

The slow and obvious version is `synchronous_beam` in tests/reference/exhaustive_search.py.

Shapes: B sentences, K hypotheses, R rows of a step, C levels, L nodes of a path, T tokens, V vocabulary.
All scores are natural logs in float32; -inf marks a hypothesis that does not exist.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.next_tokens import NEGLIGIBLE, NextTokens
from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.search.state import (
    NEG_INF,
    Block,
    BlockTable,
    Candidates,
    Scored,
    Search,
    SearchState,
    check_count,
    keep_frozen,
)
from hf_synlm.search.token_head import PackedTokenHead, rows_at_once

# Rows that cost hardly more than none: the layers are called for so many at once, and a block may have so many. Deep
# stacks allow many actions in a row, of which few are taken: a CPU lays out fewer, a GPU saves the launches of a block.
_SMALL_RUN, _SMALL_BLOCK, _SMALL_BLOCK_ON_CPU = 128, 256, 64
# Rows of a block from which their tokens are selected by bounds, for which the output layer must be packed.
_BOUNDED_ROWS = 32


class Selection(NamedTuple):
    """What a synchronous selection leaves."""

    generated: tuple[Tensor, Tensor]
    """Scores and ids [B, K'] of the continuations by a token that were selected; -inf = none."""
    pending: Tensor
    """[B, R] which rows were pending."""
    moved: Tensor
    """Scores of the structural successors of the last level, -inf where they do not survive."""


class SynchronousSearch(NextTokens, Search):
    """Word-synchronous beam search with a `LevelMachine`.

    `eos_token_ids` [E] are tokens that may only be generated when exactly one tree is on the stack. With `renormalize`,
    structural actions are forbidden before the softmax over actions instead of after it.
    """

    def __init__(
        self, machine: Any, num_beams: int, eos_token_ids: Tensor | None = None, renormalize: bool = False
    ) -> None:
        check_count("num_beams", num_beams)
        self.machine = machine
        self.num_beams = num_beams
        self.eos_token_ids = eos_token_ids
        self.renormalize = renormalize

    # ------------------------------------------------------------------------------------------------ one block
    def refresh(self, state: SearchState) -> None:
        """Recount the levels of the next block over all sentences (one host sync)."""
        chain = self.machine.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        state.level_sizes = [state.nodes.shape[1], *_level_counts(chain, state.max_depth).tolist()]

    def expand(
        self,
        state: SearchState,
        *,
        max_rows: int | None = None,
        negligible: float | None = None,
        predict: bool = True,
    ) -> Block:
        """Lay out the states and their structural successors, and run the layers on them.

        The new nodes stay in the pool. No levels are added beyond `max_rows` rows per sentence (None = all levels).
        Successors are left out that weigh less than exp(-negligible) of the mass collected in the sentence before them.
        `predict` tells whether the rows need next-token probabilities.
        """
        pool, counts = state.pool, state.num_tokens
        sizes, cut = self._block_sizes(state.level_sizes, max_rows)
        path = pool.paths(state.nodes, state.max_length)[..., :-1]
        nodes, entering, mass = state.nodes, state.scores, None
        runs: list[tuple[Tensor, Tensor, Tensor]] = []
        for first, last in self._runs(sizes, negligible is not None):
            levels = Levels(sizes[first:last], path.device)
            width = sizes[first]
            path, counts = path[:, :width], counts if counts.dim() == 1 else counts[:, :width]
            nodes = self._successors(pool, nodes, counts, levels, first == 0)
            self.machine.read(pool, path, nodes, levels, predict)
            path = torch.cat([path, levels.lines(nodes, -1)], 2)
            repeated = counts if counts.dim() == 1 else counts.index_select(1, levels.line)
            log_probs = self.machine.action_log_probs(pool, nodes, repeated, state.edges, self.renormalize)
            structural = levels.lines(log_probs[..., 1], NEG_INF)
            scores = torch.cat([entering[:, :width, None], structural[..., :-1]], 2).cumsum(2)
            if negligible is not None:
                scores, mass = _without_negligible(scores, levels.lines(log_probs[..., 0], NEG_INF), mass, negligible)
            entering = scores[..., -1] + structural[..., -1]
            runs.append((nodes, scores.flatten(1).index_select(1, levels.place), log_probs))
            nodes = nodes[:, -sizes[last - 1] :]
            if last < len(sizes) and negligible is not None and not bool((scores[..., -1] > NEG_INF).any()):
                sizes = sizes[:last]
                break
        nodes, scores, log_probs = (torch.cat(part, 1) for part in zip(*runs, strict=True))
        levels = levels if len(runs) == 1 else Levels(sizes, nodes.device)
        origin = levels.line.expand_as(nodes) if state.origin is None else state.origin[:, levels.line]
        return Block(nodes, scores, log_probs, origin, state.level + levels.level, levels, cut)

    def _successors(self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, levels: Levels, begins: bool) -> Tensor:
        """Nodes [B, P] of levels behind states [B, R], which are the first of these levels if the block `begins`."""
        if begins and len(levels.sizes) == 1:
            return nodes
        later = Levels(levels.sizes[1:], nodes.device) if begins else levels
        width = later.sizes[0]
        num_tokens = num_tokens if num_tokens.dim() == 1 else num_tokens[:, :width]
        made = self.machine.push(pool, nodes[:, :width], num_tokens, levels=later)
        return torch.cat([nodes, made], 1) if begins else made

    def _runs(self, sizes: list[int], may_stop: bool) -> list[tuple[int, int]]:
        """Levels that are laid out together, as (first, last + 1).

        Attention runs on full lines, so a run ends where most of their rows would be in vain, and after about 4 K rows
        if the search may stop early.
        """
        stops = [0]
        for level in range(1, len(sizes)):
            rows = sizes[stops[-1]] * (level + 1 - stops[-1])
            in_vain = rows > max(_SMALL_RUN, 2 * sum(sizes[stops[-1] : level + 1]))
            if in_vain or (may_stop and rows > 4 * self.num_beams):
                stops.append(level)
        return list(zip(stops, [*stops[1:], len(sizes)], strict=True))

    def max_rows(self, state: SearchState) -> int:
        """Rows of a block, where the search may stop early; those that are kept do not depend on the device."""
        small = _SMALL_BLOCK_ON_CPU if self.keeps_scored or state.nodes.device.type == "cpu" else _SMALL_BLOCK
        return max(4 * self.num_beams, small)

    def _block_sizes(self, level_sizes: list[int], max_rows: int | None) -> tuple[list[int], bool]:
        """Rows per level of the next block, and whether states with successors remain behind it."""
        sizes = level_sizes[:1]
        for size in level_sizes[1:]:
            if size == 0:
                return sizes, False
            if max_rows is not None and sum(sizes) + size > max_rows:
                return sizes, True
            sizes.append(size)
        return sizes, False

    def vocabulary_log_probs(self, state: SearchState, nodes: Tensor) -> Tensor:
        """Next-token log-probabilities of states [B, R, V], end tokens only where one tree is on the stack."""
        features = self.machine.token_features(state.pool, nodes)
        log_probs = self.machine.token_head.logits(features).log_softmax(-1)
        return self.mask_end(log_probs, self.machine.is_complete(state.pool, nodes))

    def mask_end(self, log_probs: Tensor, complete: Tensor) -> Tensor:
        """Forbid end tokens in rows whose stack does not hold exactly one tree (no renormalization), in place."""
        if self.eos_token_ids is not None:
            ends = log_probs[..., self.eos_token_ids].masked_fill(~complete[..., None], NEG_INF)
            log_probs[..., self.eos_token_ids] = ends
        return log_probs

    def log_probs_of(self, state: SearchState, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability [B, R] of one next token per state, `tokens` [B, R]."""
        features = self.machine.token_features(state.pool, nodes)
        return self.machine.token_head.log_probs(features.flatten(0, 1), tokens.flatten()).view(nodes.shape)

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the token of every candidate, without the actions before it."""
        return self.log_probs_of(state, chosen.parents, chosen.tokens)

    def any_token_log_probs(self, state: SearchState, nodes: Tensor) -> Tensor:
        """Log-probability [B, R] that the next token is one that may be generated: no end token inside a tree."""
        if self.eos_token_ids is None:
            return torch.zeros(nodes.shape, device=nodes.device)
        head, complete = self.machine.token_head, self.machine.is_complete(state.pool, nodes).flatten()
        features = self.machine.token_features(state.pool, nodes).flatten(0, 1)
        chunk = rows_at_once(features, head.vocab_size)
        parts = zip(features.split(chunk), complete.split(chunk), strict=True)
        sums = [self.mask_end(head.logits(part).log_softmax(1), ends).logsumexp(1) for part, ends in parts]
        return torch.cat(sums).view(nodes.shape)

    # ---------------------------------------------------------------------------------------------- selection
    def select(self, block: Block, generated: Tensor, synced: tuple[Tensor, Tensor], first_id: int) -> Selection:
        """Replay the selection on a block: the beam is synchronized when no structural successor is among the best K.

        At every level the pool is the best K among the continuations by a token that were selected before, the
        continuations by a token of this level's pending states, and their structural successors; the successors that
        survive are the pending states of the next level.

        `generated` [B, R, G] are the scores of the G tokens considered in each row, `synced` the scores and ids [B, k]
        of the continuations selected in earlier blocks. Row r, token g has the id first_id + r G + g.
        """
        scores, ids = synced
        width, device = generated.shape[2], ids.device
        chain = block.levels.line
        # Tokens and the structural action of every row [B, G + 1, R]; the action of state k of a level has id -1 - k.
        entries = torch.cat([generated, (block.scores + block.log_probs[..., 1])[..., None]], 2).transpose(1, 2)
        word_ids = torch.arange(first_id, first_id + len(chain) * width, device=device).view(-1, width).T
        entry_ids = torch.cat([word_ids, -1 - chain[None]]).expand(len(ids), -1, -1)
        dropped, left_out = block.scores[:, : block.levels.sizes[0]] == NEG_INF, []
        for a, b in block.levels.bounds:
            dropped = dropped[:, : b - a]
            left_out.append(dropped)
            pool = torch.cat([scores, entries[..., a:b].masked_fill(dropped[:, None], NEG_INF).flatten(1)], 1)
            best, index = pool.topk(min(self.num_beams, pool.shape[1]))
            ids = torch.cat([ids, entry_ids[..., a:b].flatten(1)], 1).gather(1, index)
            scores = best.masked_fill(ids < 0, NEG_INF)
            # Column 0 takes the tokens.
            moved = best.new_full((len(best), b - a + 1), NEG_INF)
            moved = moved.scatter_(1, (-ids).clamp(min=0), best)[:, 1:]
            dropped, ids = moved == NEG_INF, ids.clamp(min=0)
        return Selection((scores, ids), ~torch.cat(left_out, 1), moved)

    def _select_given(
        self, state: SearchState, block: Block, tokens: Tensor, synced: tuple[Tensor, Tensor], first_id: int
    ) -> tuple[Selection, Tensor | None]:
        """`select` for one given token per sentence [B], and scores with the token [B, R]; None = of few rows."""
        head = None
        if block.vocabulary_log_probs is None and block.nodes.numel() >= _BOUNDED_ROWS and not self.keeps_scored:
            head = self.machine.packed_token_head
        if head is not None:
            return self._select_by_bounds(state, block, head, tokens, synced, first_id), None
        given = tokens[:, None].expand_as(block.nodes)
        if block.vocabulary_log_probs is None:
            lexical = self.log_probs_of(state, block.nodes, given)
        else:
            lexical = block.vocabulary_log_probs.gather(2, given[..., None]).squeeze(2)
        scores = block.scores + block.log_probs[..., 0] + lexical
        return self.select(block, scores[..., None], synced, first_id), scores

    def _select_by_bounds(
        self,
        state: SearchState,
        block: Block,
        head: PackedTokenHead,
        tokens: Tensor,
        synced: tuple[Tensor, Tensor],
        first_id: int,
    ) -> Selection:
        """The same, but few tokens are scored, which costs much of a search.

        The selection begins with upper bounds. The rows whose token it has selected are scored, and it starts again,
        until it has selected none by a bound. Then other tokens, with lower scores than their bounds, would change
        nothing: those that had a place for some levels gave it up to K better entries, as did all that they kept out.
        """
        features, base = self.machine.token_features(state.pool, block.nodes), block.scores + block.log_probs[..., 0]
        scores, open_rows = base.clone(), base > NEG_INF
        scores[open_rows] += head.bound(features[open_rows], tokens[:, None].expand_as(base)[open_rows])
        while True:
            selection = self.select(block, scores[..., None], synced, first_id)
            scored, ids = selection.generated
            rows = (ids.masked_fill(scored == NEG_INF, -1) - first_id).clamp(min=-1) + 1
            wanted = open_rows & torch.zeros_like(F.pad(open_rows, (1, 0))).scatter_(1, rows, True)[:, 1:]
            chosen = wanted.nonzero(as_tuple=True)
            if not len(chosen[0]):
                return selection
            scores[chosen] = base[chosen] + head.log_probs(features[chosen], tokens[chosen[0]])
            open_rows = open_rows & ~wanted

    def next_block_state(self, state: SearchState, block: Block, moved: Tensor) -> SearchState | None:
        """Execute the structural actions that survive a block: the first level of the next one, or None.

        `moved` are the scores after these actions in the states of the last level, -inf where they do not survive.
        """
        first, last = block.levels.bounds[-1]
        row = torch.arange(first, last, device=moved.device).expand_as(moved)
        parents = block.nodes[:, first:]
        chain = self.machine.chain_bound(state.pool, parents).masked_fill(moved == NEG_INF, 0) - 1
        chain, order = chain.sort(dim=1, descending=True, stable=True)
        counts = _level_counts(chain, state.max_depth, first=0).tolist()
        if not counts[0]:
            return None
        order = order[:, : counts[0]]
        row, moved, parents = row.gather(1, order), moved.gather(1, order), parents.gather(1, order)
        nodes = self.machine.push(state.pool, parents, state.num_tokens)
        origin = block.origin.gather(1, row)
        level = state.level + len(block.levels.sizes)
        sizes = [nodes.shape[1], *counts[1:]]
        return SearchState(
            state.pool, nodes, moved, state.num_tokens, sizes, state.edges, origin, level, state.max_depth,
            state.max_length,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ one token
    def propose(
        self, state: SearchState, tokens: Tensor, block: Block | None = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given token per sentence.

        `block` holds all structural successors, if they are laid out already. `active` is not used: the levels leave
        out finished sentences.
        """
        table, frontier, scored = BlockTable(), state, []
        synced = state.scores.new_zeros(len(tokens), 0), tokens.new_zeros(len(tokens), 0)
        while frontier is not None:
            block = block or self.expand(frontier, max_rows=self.max_rows(frontier))
            selection, scores = self._select_given(state, block, tokens, synced, table.num_rows)
            table.blocks.append(block)
            if self.keeps_scored:
                scored.append((block.scores + block.log_probs[..., 0], scores, block.origin))
            frontier = self.next_block_state(frontier, block, selection.moved) if block.cut else None
            synced, block = selection.generated, None
        if self.keeps_scored:
            self.scored = Scored(*(torch.cat(values, 1) for values in zip(*scored, strict=True)))
        return table.candidates(*synced, tokens[:, None].expand_as(synced[1]))

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen tokens: the new beam, and the candidate [B, R] from which each hypothesis comes.

        Sentences that are not `active` [B] keep their beam; the next block matters only for those that are `wanted`
        [B].
        """
        pool = state.pool
        moving = torch.ones_like(state.num_tokens, dtype=torch.bool) if active is None else active
        if active is not None:
            chosen = keep_frozen(state, chosen, active)
        scores, parents, tokens = chosen.scores, chosen.parents, chosen.tokens
        chain = self.machine.chain_bound(pool, parents) + moving[:, None]
        alive = scores > NEG_INF
        chain, order = chain.masked_fill(~alive, -1).sort(dim=1, descending=True, stable=True)
        counted = chain if wanted is None else chain.masked_fill(~wanted[:, None], -1)
        counts = _level_counts(counted, state.max_depth + 1)
        counts = torch.cat([alive.sum(1).amax()[None], counts])
        keep = pool.in_use(parents, alive, state.max_length) if pool.is_full else None
        if keep is not None:
            counts = torch.cat([counts, keep.sum(1).amax()[None]])
        # The one host sync of a token: number of hypotheses, rows of every level of the next block, nodes in use.
        rows, *sizes = counts.tolist()
        order = order[:, : max(1, rows)]
        scores, parents, tokens = scores.gather(1, order), parents.gather(1, order), tokens.gather(1, order)
        if keep is not None:
            parents = pool.compact(keep, sizes.pop(), parents)
        nodes = self.machine.push(pool, parents, state.num_tokens + 1, tokens=tokens)
        if active is not None:
            nodes = torch.where(active[:, None], nodes, parents)
        new = SearchState(
            pool, nodes, scores, state.num_tokens + moving, [nodes.shape[1], *sizes], state.edges,
            max_depth=state.max_depth + 1, max_length=state.max_length + 2,
        )  # fmt: skip
        return new, order

    def close(self, state: SearchState) -> SearchState:
        """Take structural actions until one tree is on the stack: a new state, best hypotheses first.

        Every state has one successor: nothing is selected.
        """
        chain = self.machine.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        chain, deepest = chain.sort(dim=1, descending=True, stable=True)
        state = state.with_hypotheses(deepest)
        self.refresh(state)
        block = self.expand(state, predict=False)
        # Row (c, k) of the block: hypothesis k takes as many actions as its stack allows.
        first = torch.arange(chain.shape[1], device=chain.device) * len(block.levels.sizes)
        row = block.levels.row[first + chain.clamp(min=0)]
        scores = block.scores.gather(1, row).masked_fill(state.scores == NEG_INF, NEG_INF)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        row = row.gather(1, order)
        return SearchState(
            state.pool, block.nodes.gather(1, row), scores, state.num_tokens, [row.shape[1]], state.edges,
            deepest.gather(1, order), max_depth=state.max_depth, max_length=state.max_length,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the hypotheses with closed trees; the state does not change."""
        size = state.pool.size
        closed = self.close(state)
        back = closed.origin.argsort(1)
        nodes = state.pool.derivations(closed.nodes.gather(1, back))
        state.pool.truncate(size)
        return closed.scores.gather(1, back), nodes

    def keep(self, state: SearchState, index: Tensor) -> SearchState:
        """The beam with the hypotheses `index` [B, R'] only, over the same pool."""
        state = state.with_hypotheses(index)
        chain = self.machine.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        return state.with_hypotheses(chain.argsort(dim=1, descending=True, stable=True))

    # ------------------------------------------------------------------------------------------ distributions
    def closure(self, state: SearchState) -> Block:
        """All structural successors of the beam, with their next-token log-probabilities."""
        if state.block is None:
            state.block = self.expand(state, negligible=NEGLIGIBLE)
            state.block.vocabulary_log_probs = self.vocabulary_log_probs(state, state.block.nodes)
        return state.block

    def next_token_log_probs(self, state: SearchState) -> Tensor:
        """Next-token log-probabilities [B, V] given the prefix, derivations summed out; uniform if the beam is empty.

        log p(w | x) = logsumexp_r [ log p(x, y_r) + log p(GEN | y_r) + log p(w | y_r) ] - log Z over all structural
        successors r of the hypotheses in the beam.
        """
        block = self.closure(state)
        weights = block.scores + block.log_probs[..., 0]
        weights = weights - weights.amax(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).min)
        total = (weights[..., None] + block.vocabulary_log_probs).logsumexp(1)
        return total.masked_fill((total == NEG_INF).all(1, keepdim=True), 0.0).log_softmax(-1)


def _without_negligible(scores: Tensor, gen: Tensor, mass: Tensor | None, negligible: float) -> tuple[Tensor, Tensor]:
    """Scores [B, R, C] without rows that weigh less than exp(-negligible) of the tokens of the levels before them.

    `gen` are log-probabilities of a token after each row, `mass` [B] the log mass of the tokens of earlier levels.
    Returns the mass with these levels, too.
    """
    first = torch.full_like(scores[:, 0, 0], NEG_INF) if mass is None else mass
    total = torch.cat([first[:, None], (scores + gen).logsumexp(1)], 1).logcumsumexp(1)
    return scores.masked_fill(scores < total[:, None, :-1] - negligible, NEG_INF), total[:, -1]


def _level_counts(chain: Tensor, max_depth: int, first: int = 1) -> Tensor:
    """Largest number of rows per sentence that reach level `first`, .., `max_depth`, from bounds [B, R]."""
    levels = torch.arange(first, max(max_depth, first) + 1, device=chain.device)
    return (chain[..., None] >= levels).sum(1).amax(0)
