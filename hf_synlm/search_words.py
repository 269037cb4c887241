"""Word-synchronous beam search over the derivations of a syntactic language model.

A derivation builds a tree with the words as it goes: between two words it may take structural actions. Here a state
has one structural successor (COMP for GPST); `fast_track_search` is for systems with many. The beam holds K derivations
that have generated the same words, so that

    m_t = logsumexp_k log p(x_1..t, y_k)

is a lower bound on the prefix log-probability, tight once K exceeds the number of derivations (Stern et al. 2017; for
GPST the authors' `R2D2GenFastBeamSearcher`).

One word takes few calls of the model. The structural successors of the current states are laid out level by level (a
*block*: row (c, k) is state k after c structural actions); all rows get the probabilities of their next action in one
pass, and those of their next word in another; and the selection is then replayed on the table of scores, level by
level, exactly as if the states had been expanded one action at a time. Nodes live in a `NodePool`; nothing is copied
when hypotheses branch.

The model side is an *adapter* with
    begin(batch_size, device, **context) -> (pool, nodes [B, 1], history [B, 1, N])
    push(pool, parents, num_tokens, tokens=None, actions=None) -> id of the first of R new nodes
    read_actions(pool, history): run the layers that predict actions on the R newest nodes, history [B, R, N]
    num_unread(pool) -> how many of the newest nodes these layers have not seen
    action_log_probs(pool, nodes, num_tokens, edges, renormalize=False) -> [B, R, 2]: generate a word, take the
        structural action; -inf where illegal
    chain_bound(pool, nodes) -> [B, R] upper bound of the structural actions before the next word
    is_complete(pool, nodes) -> [B, R] exactly one tree on the stack
    score_words(pool, history), num_unscored(pool): the same for the layers that predict words
    word_features(pool, nodes) -> [B, R, D], and logits_of(features [..., D]) -> [..., V] float32

Shapes: B sentences, K hypotheses, R rows of a step, C levels, N nodes, T tokens, V vocabulary.
All scores are natural logs in float32; -inf marks a hypothesis that does not exist.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .search_proposals import NEGLIGIBLE, Process, draw_word, propose_words
from .search_stack import Nodes
from .search_state import NEG_INF, Block, BlockTable, Candidates, SearchState

# Numbers in one chunk of logits where only a few of each row are kept: memory does not grow with the batch.
_CHUNK_ELEMENTS = 1 << 24


def chain_history(history: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Histories of all rows of a block whose new nodes are laid out level by level behind the old ones.

    Args:
        history: Nodes of the states [B, R, N].
        sizes: Rows of each level; row k of level c + 1 succeeds row k of level c.

    Returns:
        Histories [B, sum(sizes), N + sum(sizes[1:])] and the state [sum(sizes)] each row descends from.
    """
    device = history.device
    chain = torch.cat([torch.arange(size, device=device) for size in sizes])
    level = torch.cat([torch.full((size,), c, device=device) for c, size in enumerate(sizes)])
    new_chain, new_level = chain[sizes[0] :], level[sizes[0] :]
    own = (chain[:, None] == new_chain) & (level[:, None] >= new_level)
    return torch.cat([history[:, chain], own.expand(history.shape[0], -1, -1)], 2), chain


class WordBeamSearch:
    """Word-synchronous beam search with a model adapter.

    Args:
        adapter: Model side of the search (see the top of this file).
        num_beams: Number K of derivations kept per sentence.
        eos_token_ids: Words that may only be generated when exactly one tree is on the stack [E].
        renormalize: Forbid structural actions before the softmax over actions instead of after it.
    """

    def __init__(
        self, adapter: Any, num_beams: int, eos_token_ids: Tensor | None = None, renormalize: bool = False
    ) -> None:
        if not isinstance(num_beams, int) or isinstance(num_beams, bool):
            raise ValueError(f"num_beams={num_beams!r} must be an integer: the number of derivations in the beam")
        if num_beams < 1:
            raise ValueError(f"num_beams={num_beams}: a beam holds at least one derivation")
        self.adapter = adapter
        self.num_beams = num_beams
        self.eos_token_ids = eos_token_ids
        self.renormalize = renormalize

    # ------------------------------------------------------------------------------------------------ one block
    def begin(self, batch_size: int, device: torch.device, **context: Any) -> SearchState:
        """State before the first word; `context` goes to the adapter (complete sentences before the text)."""
        pool, nodes, history = self.adapter.begin(batch_size, device, **context)
        scores = torch.zeros(nodes.shape, dtype=torch.float32, device=device)
        return SearchState(pool, nodes, scores, history, torch.zeros_like(nodes[:, 0]), [1])

    def refresh(self, state: SearchState) -> None:
        """Recount the levels of the next block over all sentences (one host sync)."""
        chain = self.adapter.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        state.level_sizes = [state.nodes.shape[1], *_level_counts(chain, state.max_depth).tolist()]

    def expand(
        self,
        state: SearchState,
        *,
        max_rows: int | None = None,
        negligible: float | None = None,
        words: bool = True,
    ) -> Block:
        """Lay out the states and their structural successors, and run the layers on them.

        Args:
            state: Beam between two words (or between two blocks of one word).
            max_rows: Stop adding levels beyond this number of rows per sentence; None = all levels.
            negligible: Leave out successors that weigh less than exp(-negligible) of the mass collected in the
                sentence before them; None = none.
            words: Whether the rows need next-word probabilities.

        Returns:
            The block. Its new nodes stay in the pool.
        """
        pool, adapter = state.pool, self.adapter
        sizes, cut = self._block_sizes(state.level_sizes, max_rows)
        # The pool may hold nodes of an earlier expansion of this state.
        history = torch.nn.functional.pad(state.history, (0, pool.size - state.history.shape[2]))
        history, chain = chain_history(history, sizes)
        counts = state.num_tokens if state.num_tokens.dim() == 2 else state.num_tokens[:, None].expand_as(state.nodes)
        nodes, scores, log_probs, mass = [state.nodes], [state.scores], [], None
        for first, last in self._chunks(sizes, negligible is not None):
            for size in sizes[max(first, 1) : last]:
                start = adapter.push(pool, nodes[-1][:, :size], counts[:, :size])
                nodes.append(torch.arange(start, start + size, device=history.device).expand(len(history), -1))
            end, unread = sum(sizes[:last]), adapter.num_unread(pool)
            if unread:
                adapter.read_actions(pool, history[:, end - unread : end, : pool.size])
            ids = torch.cat(nodes[first:last], 1)
            row_counts = counts[:, chain[end - ids.shape[1] : end]]
            actions = adapter.action_log_probs(pool, ids, row_counts, state.edges, self.renormalize)
            log_probs += actions.split(sizes[first:last], 1)
            for level in range(first, last):
                if level:
                    scores.append(scores[-1][:, : sizes[level]] + log_probs[level - 1][:, : sizes[level], 1])
                if negligible is not None:
                    if mass is not None:
                        scores[-1] = scores[-1].masked_fill(scores[-1] < mass - negligible, NEG_INF)
                    more = (scores[-1] + log_probs[level][..., 0]).logsumexp(1, keepdim=True)
                    mass = more if mass is None else torch.logaddexp(mass, more)
            if last < len(sizes) and not bool((scores[-1] > NEG_INF).any()):
                sizes = sizes[:last]
                break
        end = sum(sizes)
        history, chain = history[:, :end, : pool.size], chain[:end]
        unscored = adapter.num_unscored(pool)
        if words and unscored:
            adapter.score_words(pool, history[:, end - unscored :])
        origin = chain.expand(len(history), -1) if state.origin is None else state.origin[:, chain]
        bounds = [(sum(sizes[:c]), sum(sizes[: c + 1])) for c in range(len(sizes))]
        rows = torch.cat(nodes, 1), torch.cat(scores, 1), torch.cat(log_probs, 1)
        return Block(rows[0], rows[1], rows[2], history, origin, bounds, state.level, cut)

    def _chunks(self, sizes: list[int], may_stop: bool) -> list[tuple[int, int]]:
        """Levels that are run together, as (first, last + 1): all, or runs of about 4 K rows if one may stop early."""
        if not may_stop:
            return [(0, len(sizes))]
        stops, rows = [0], 0
        for level, size in enumerate(sizes):
            if rows + size > 4 * self.num_beams and rows:
                stops.append(level)
                rows = 0
            rows += size
        return list(zip(stops, [*stops[1:], len(sizes)], strict=True))

    def settle(self, state: SearchState) -> None:
        """Run the layers on the newest nodes while they stand in the order of the beam (before it is reordered)."""
        if self.adapter.num_unread(state.pool):
            self.adapter.read_actions(state.pool, state.history)
        if self.adapter.num_unscored(state.pool):
            self.adapter.score_words(state.pool, state.history)

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

    def word_log_probs(self, state: SearchState, nodes: Tensor) -> Tensor:
        """Next-word log-probabilities of states [B, R, V], end tokens only where one tree is on the stack."""
        log_probs = self.adapter.logits_of(self.adapter.word_features(state.pool, nodes)).log_softmax(-1)
        return self.mask_end(log_probs, self.adapter.is_complete(state.pool, nodes))

    def mask_end(self, log_probs: Tensor, complete: Tensor) -> Tensor:
        """Forbid end tokens in rows whose stack does not hold exactly one tree (no renormalization), in place."""
        if self.eos_token_ids is not None:
            ends = log_probs[..., self.eos_token_ids].masked_fill(~complete[..., None], NEG_INF)
            log_probs[..., self.eos_token_ids] = ends
        return log_probs

    def log_probs_of(self, state: SearchState, nodes: Tensor, tokens: Tensor) -> Tensor:
        """Log-probability [B, R] of one next word per state, `tokens` [B, R]."""
        index = tokens.flatten()[:, None]
        return self._by_chunks(
            state, nodes, lambda logits, rows: logits.gather(1, index[rows]).squeeze(1) - logits.logsumexp(1)
        )

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the word of every candidate, without the actions before it."""
        return self.log_probs_of(state, chosen.parents, chosen.tokens)

    def any_word_log_probs(self, state: SearchState, nodes: Tensor) -> Tensor:
        """Log-probability [B, R] that the next word is one that may be generated: no end token inside a tree."""
        if self.eos_token_ids is None:
            return torch.zeros(nodes.shape, device=nodes.device)
        complete = self.adapter.is_complete(state.pool, nodes).flatten()
        return self._by_chunks(
            state, nodes, lambda logits, rows: self.mask_end(logits.log_softmax(1), complete[rows]).logsumexp(1)
        )

    def _by_chunks(self, state: SearchState, nodes: Tensor, reduce: Callable[[Tensor, slice], Tensor]) -> Tensor:
        """Reduce the logits of states [B, R] to one number each [B, R], some rows at a time.

        `reduce` maps the logits [M, V] of a slice of the B R flat rows to [M].
        """
        features = self.adapter.word_features(state.pool, nodes).flatten(0, 1)
        size = max(1, _CHUNK_ELEMENTS // self.adapter.config.vocab_size)
        chunks = [slice(first, first + size) for first in range(0, max(1, len(features)), size)]
        return torch.cat([reduce(self.adapter.logits_of(features[rows]), rows) for rows in chunks]).view(nodes.shape)

    # ---------------------------------------------------------------------------------------------- selection
    def select(
        self, block: Block, generated: Tensor, synced: tuple[Tensor, Tensor], first_id: int
    ) -> tuple[tuple[Tensor, Tensor], Tensor, tuple[Tensor, Tensor]]:
        """Replay the synchronous selection on a block.

        At every level the pool is the best K among the continuations by a word that were selected before, the
        continuations by a word of this level's pending states, and their structural successors; the successors that
        survive are the pending states of the next level.

        Args:
            block: Rows with their scores.
            generated: [B, R, G] scores of the G words considered in each row.
            synced: Scores and ids [B, k] of the continuations selected in earlier blocks.
            first_id: Id of the first continuation of this block; row r, word g has id first_id + r G + g.

        Returns:
            The selected continuations (scores and ids, [B, K'] each, -inf = none), which rows were pending [B, R],
            and the structural successors that survive the last level: their scores (-inf = none) and their position
            in the last level.
        """
        scores, ids = synced
        structural = block.scores + block.log_probs[..., 1]
        width, pending, visited = generated.shape[2], block.scores[:, : block.bounds[0][1]] > NEG_INF, []
        for level, (a, b) in enumerate(block.bounds):
            visited.append(pending)
            words = generated[:, a:b].masked_fill(~pending[..., None], NEG_INF).flatten(1)
            moves = structural[:, a:b].masked_fill(~pending, NEG_INF)
            pool = torch.cat([scores, words, moves], 1)
            best, index = pool.topk(min(self.num_beams, pool.shape[1]))
            new_ids = torch.arange(first_id + a * width, first_id + b * width, device=ids.device)
            ids = torch.cat([ids, new_ids.expand(len(ids), -1)], 1)
            is_word = index < ids.shape[1]
            move = index - ids.shape[1]
            ids = ids.gather(1, index.clamp(max=ids.shape[1] - 1))
            scores = best.masked_fill(~is_word, NEG_INF)
            moved = best.masked_fill(is_word, NEG_INF)
            if level + 1 < len(block.bounds):
                size, limit = block.bounds[level + 1][1] - b, b - a
                target = torch.where(moved > NEG_INF, move, limit)
                pending = pending.new_zeros(len(best), limit + 1).scatter_(1, target, True)[:, :size]
        return (scores, ids), torch.cat(visited, 1), (moved, move.clamp(min=0))

    def next_block_state(self, state: SearchState, block: Block, moved: Tensor, move: Tensor) -> SearchState:
        """Execute the structural actions that survive a block, as the first level of the next one."""
        row = block.bounds[-1][0] + move
        parents = block.nodes.gather(1, row)
        chain = self.adapter.chain_bound(state.pool, parents).masked_fill(moved == NEG_INF, 0) - 1
        chain, order = chain.sort(dim=1, descending=True, stable=True)
        counts = _level_counts(chain, state.max_depth, first=0).tolist()
        order = order[:, : max(1, counts[0])]
        row, moved, parents = row.gather(1, order), moved.gather(1, order), parents.gather(1, order)
        width = block.history.shape[2]
        history = block.history.gather(1, row[..., None].expand(-1, -1, width))
        first = self.adapter.push(state.pool, parents, state.num_tokens)
        nodes, history = append_own(first, history)
        origin = block.origin.gather(1, row)
        level = block.level + len(block.bounds)
        sizes = [nodes.shape[1], *counts[1:]]
        return SearchState(
            state.pool, nodes, moved, history, state.num_tokens, sizes, state.edges, origin, level,
            state.max_depth,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------ one word
    def propose(
        self, state: SearchState, tokens: Tensor, block: Block | None = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given word per sentence.

        Args:
            state: Beam between two words.
            tokens: The word of each sentence [B].
            block: All structural successors of the beam, if they are laid out already.
            active: Not used: the levels leave out sentences that are over.

        Returns:
            At most K candidates per sentence.
        """
        table, frontier = BlockTable(), state
        synced = state.scores.new_zeros(len(tokens), 0), tokens.new_zeros(len(tokens), 0)
        while True:
            block = block or self.expand(frontier, max_rows=4 * self.num_beams)
            given = tokens[:, None].expand_as(block.nodes)
            if block.word_log_probs is None:
                words = self.log_probs_of(state, block.nodes, given)
            else:
                words = block.word_log_probs.gather(2, given[..., None]).squeeze(2)
            generated = block.scores + block.log_probs[..., 0] + words
            synced, _, (moved, move) = self.select(block, generated[..., None], synced, table.num_rows)
            table.blocks.append(block)
            if not block.cut or not bool((moved > NEG_INF).any()):
                break
            frontier, block = self.next_block_state(frontier, block, moved, move), None
        return table.candidates(*synced, tokens[:, None].expand_as(synced[1]))

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen words and make them the new beam.

        Args:
            state: Beam before the word.
            chosen: Continuations [B, K].
            active: Sentences that take a word [B]; the others keep their beam. None = all.
            wanted: Sentences whose next block matters [B]; None = all.

        Returns:
            The new beam, and for each of its hypotheses the index of the candidate it comes from [B, R].
        """
        pool, adapter = state.pool, self.adapter
        scores, parents, tokens, history = chosen.scores, chosen.parents, chosen.tokens, chosen.history
        chain = adapter.chain_bound(pool, parents) + 1
        if active is not None:
            scores, parents, tokens, history, chain = self._keep_frozen(state, chosen, chain, active)
        alive = scores > NEG_INF
        keep = (history & alive[..., None]).any(1)
        chain, order = chain.masked_fill(~alive, -1).sort(dim=1, descending=True, stable=True)
        counted = chain if wanted is None else chain.masked_fill(~wanted[:, None], -1)
        counts = _level_counts(counted, state.max_depth + 1)
        # The one host sync of a word: number of hypotheses, of nodes in use, and rows of every level of the next block.
        rows, live, *sizes = torch.cat([alive.sum(1).amax()[None], keep.sum(1).amax()[None], counts]).tolist()
        order = order[:, : max(1, rows)]
        scores, parents, tokens = scores.gather(1, order), parents.gather(1, order), tokens.gather(1, order)
        history = history.gather(1, order[..., None].expand(-1, -1, history.shape[2]))
        if pool.size > 2 * live + 32:
            index, renumber = pool.compact(keep, max(1, live))
            parents = renumber.gather(1, parents).clamp(min=0)
            history = history.gather(2, index[:, None].expand(-1, history.shape[1], -1))
        first = adapter.push(pool, parents, state.num_tokens + 1, tokens=tokens)
        nodes, new_history = append_own(first, history)
        num_tokens = state.num_tokens + 1
        if active is not None:
            nodes = torch.where(active[:, None], nodes, parents)
            new_history[..., -nodes.shape[1] :] &= active[:, None, None]
            num_tokens = torch.where(active, num_tokens, state.num_tokens)
        new = SearchState(
            pool, nodes, scores, new_history, num_tokens, [nodes.shape[1], *sizes], state.edges,
            max_depth=state.max_depth + 1,
        )  # fmt: skip
        return new, order

    def _keep_frozen(
        self, state: SearchState, chosen: Candidates, chain: Tensor, active: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Put the old beam in the place of the candidates where a sentence takes no word."""
        width = max(chosen.scores.shape[1], state.scores.shape[1])
        size = chosen.history.shape[2]
        old_chain = self.adapter.chain_bound(state.pool, state.nodes)
        pad = torch.nn.functional.pad
        old_history = pad(state.history, (0, size - state.history.shape[2]))
        merged = []
        for new, old, fill in (
            (chosen.scores, state.scores, NEG_INF),
            (chosen.parents, state.nodes, 0),
            (chosen.tokens, torch.zeros_like(state.nodes), 0),
            (chain, old_chain, 0),
        ):
            new, old = pad(new, (0, width - new.shape[1]), value=fill), pad(old, (0, width - old.shape[1]), value=fill)
            merged.append(torch.where(active[:, None], new, old))
        history = pad(chosen.history, (0, 0, 0, width - chosen.history.shape[1]))
        old_history = pad(old_history, (0, 0, 0, width - old_history.shape[1]))
        scores, parents, tokens, chain = merged
        return scores, parents, tokens, torch.where(active[:, None, None], history, old_history), chain

    def close(self, state: SearchState) -> SearchState:
        """Take the structural actions that are left until one tree is on the stack; no other action is legal.

        Only for systems with one structural action. Every state has one successor, so nothing is selected.

        Returns:
            A new state over the same pool, its hypotheses best first.
        """
        chain = self.adapter.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        chain, deepest = chain.sort(dim=1, descending=True, stable=True)
        if not bool((deepest[:, 1:] > deepest[:, :-1]).all()):
            self.settle(state)  # nodes that no layer has read yet must be read in the order of their ids
        state = state.with_hypotheses(deepest)
        self.refresh(state)
        block = self.expand(state, words=False)
        chain = chain.clamp(min=0, max=len(block.bounds) - 1)
        first_row = torch.tensor([a for a, _ in block.bounds], device=chain.device)
        row = first_row[chain] + torch.arange(chain.shape[1], device=chain.device)
        row = row.clamp(max=block.nodes.shape[1] - 1)
        scores = block.scores.gather(1, row).masked_fill(state.scores == NEG_INF, NEG_INF)
        scores, order = scores.sort(dim=1, descending=True, stable=True)
        row = row.gather(1, order)
        history = block.history.gather(1, row[..., None].expand(-1, -1, block.history.shape[2]))
        return SearchState(
            state.pool, block.nodes.gather(1, row), scores, history, state.num_tokens, [row.shape[1]], state.edges,
            deepest.gather(1, order), max_depth=state.max_depth,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the hypotheses with their trees closed; the state stays as is."""
        size = state.pool.size
        closed = self.close(state)
        back = closed.origin.argsort(1)
        history = closed.history.gather(1, back[..., None].expand(-1, -1, closed.history.shape[2]))
        nodes = state.pool.derivations(history)
        state.pool.truncate(size)
        return closed.scores.gather(1, back), nodes

    def keep(self, state: SearchState, index: Tensor) -> SearchState:
        """The beam with the hypotheses `index` [B, R'] only, over the same pool."""
        self.settle(state)
        state = state.with_hypotheses(index)
        chain = self.adapter.chain_bound(state.pool, state.nodes).masked_fill(state.scores == NEG_INF, -1)
        return state.with_hypotheses(chain.argsort(dim=1, descending=True, stable=True))

    def propose_words(
        self, state: SearchState, process: Process | None, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """The best K derivations that generate one more word; see `word_proposals.propose_words`."""
        return propose_words(self, state, process, keep_scores)

    def draw_word(self, state: SearchState, process: Process | None) -> tuple[Candidates, Tensor]:
        """Draw one derivation and its next word per sentence; see `word_proposals.draw_word`."""
        return draw_word(self, state, process)

    # ------------------------------------------------------------------------------------------ distributions
    def closure(self, state: SearchState) -> Block:
        """All structural successors of the beam, with their next-word log-probabilities."""
        if state.block is None:
            state.block = self.expand(state, negligible=NEGLIGIBLE)
            state.block.word_log_probs = self.word_log_probs(state, state.block.nodes)
        return state.block

    def next_token_log_probs(self, state: SearchState) -> Tensor:
        """Next-word log-probabilities given the prefix, derivations summed out.

        log p(w | x) = logsumexp_r [ log p(x, y_r) + log p(GEN | y_r) + log p(w | y_r) ] - log Z over all structural
        successors r of the hypotheses in the beam.

        Args:
            state: Beam between two words.

        Returns:
            [B, V], normalized over V. Uniform where the beam is empty.
        """
        block = self.closure(state)
        weights = block.scores + block.log_probs[..., 0]
        weights = weights - weights.amax(1, keepdim=True).clamp(min=torch.finfo(weights.dtype).min)
        total = (weights[..., None] + block.word_log_probs).logsumexp(1)
        return total.masked_fill((total == NEG_INF).all(1, keepdim=True), 0.0).log_softmax(-1)


def append_own(first: int, history: Tensor) -> tuple[Tensor, Tensor]:
    """Count the nodes that were just pushed to their own histories.

    Args:
        first: Id of the first one.
        history: Nodes of the parents [B, R, N].

    Returns:
        Ids of the R nodes [B, R], and their histories [B, R, N + R].
    """
    batch, rows, _ = history.shape
    own = torch.eye(rows, dtype=torch.bool, device=history.device).expand(batch, -1, -1)
    nodes = torch.arange(first, first + rows, device=history.device).expand(batch, -1)
    return nodes, torch.cat([history, own], 2)


def _level_counts(chain: Tensor, max_depth: int, first: int = 1) -> Tensor:
    """Largest number of rows per sentence that reach level `first`, .., `max_depth`, from bounds [B, R]."""
    levels = torch.arange(first, max(max_depth, first) + 1, device=chain.device)
    return (chain[..., None] >= levels).sum(1).amax(0)


__all__ = ["WordBeamSearch", "append_own", "chain_history"]
