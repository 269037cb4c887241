# SPDX-License-Identifier: Apache-2.0
"""Continue a word-synchronous beam when the next token is not given: the best tokens, or a drawn token.

Shapes: B sentences, K hypotheses, M candidates, R rows of a block, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.state import NEG_INF, Block, BlockTable, Candidates, SearchState

Process = Callable[[Tensor, Tensor], Tensor]
# Rows are left out if their whole subtree weighs less than exp(-25), about 1e-11, of the mass already collected: far
# below the float32 resolution of a sum.
NEGLIGIBLE = 25.0


class NextTokens:
    """Methods of `SynchronousSearch` for tokens that are not given."""

    def propose_tokens(
        self: Any, state: SearchState, process: Process | None, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """The best K derivations that generate one more token.

        The selection is that of `SynchronousSearch.propose`, with the K best tokens of every row as its continuations.
        End tokens do not compete for places in the beam; they are returned separately.

        `process` maps hypotheses [B, R] and their token log-probabilities [B, R, V] to token scores; None = identity.
        Returns at most K candidates; at most K candidates that end (None without end tokens); and with `keep_scores`
        log p(token | hypothesis) [B, K', V] with the structural actions before the token summed out.
        """
        table, frontier, ends = BlockTable(), state, self.eos_token_ids
        synced = state.scores.new_zeros(len(state.scores), 0), state.nodes.new_zeros(len(state.nodes), 0)
        tokens, ended, summed = [], [], None
        while frontier is not None:
            block = self.expand(frontier, max_rows=self.max_rows(frontier))
            lexical = self.vocabulary_log_probs(frontier, block.nodes)
            if process is not None:
                levels = [process(block.origin[:, a:b], lexical[:, a:b]) for a, b in block.levels.bounds]
                lexical = self.mask_end(torch.cat(levels, 1), self.machine.is_complete(state.pool, block.nodes))
            base = block.scores + block.log_probs[..., 0]
            if keep_scores:
                summed = add_block(summed, state, block, base, lexical)
            if ends is not None:
                ended.append(base[..., None] + lexical[..., ends])
                lexical[..., ends] = NEG_INF
            best, token = lexical.topk(min(self.num_beams, lexical.shape[2]), 2)
            width = best.shape[2]
            tokens.append(token.flatten(1))
            generated = base[..., None] + best
            synced, pending, moved = self.select(block, generated, synced, table.num_rows * width)
            if ends is not None:
                ended[-1] = ended[-1].masked_fill(~pending[..., None], NEG_INF).flatten(1)
            table.blocks.append(block)
            frontier = self.next_block_state(frontier, block, moved) if block.cut else None
        scores, ids = synced
        chosen = table.candidates(scores, ids // width, torch.cat(tokens, 1).gather(1, ids))
        if ends is None:
            return chosen, None, summed
        all_ended = torch.cat(ended, 1)
        scores, ids = all_ended.topk(min(self.num_beams, all_ended.shape[1]))
        return chosen, table.candidates(scores, ids // len(ends), ends[ids % len(ends)]), summed

    def draw_token(self: Any, state: SearchState, process: Process | None) -> tuple[Candidates, Tensor]:
        """Draw one derivation and its next token per sentence.

        First a structural successor r of the hypotheses is drawn with probability proportional to
        p(x, y_r) p(GEN | y_r), then the token from p(w | y_r) under the processors. Without processors, tokens follow
        `SynchronousSearch.next_token_log_probs` exactly. Where the processors forbid all tokens of the drawn r, another
        one is drawn: r follows its distribution among those after which some token is allowed.

        Returns one candidate per sentence, its score the log-probability under the model (without the processors; -inf
        where no token is possible), and the token scores [B, V] it was drawn from.
        """
        block = self.expand(state, negligible=NEGLIGIBLE)
        base = block.scores + block.log_probs[..., 0]
        weights = base + self.any_token_log_probs(state, block.nodes)
        row = draw_index(weights)
        while True:
            nodes = block.nodes.gather(1, row)
            log_probs = scores = self.vocabulary_log_probs(state, nodes)
            if process is None:
                break
            scores = process(block.origin.gather(1, row), log_probs.clone())
            scores = self.mask_end(scores, self.machine.is_complete(state.pool, nodes))
            barren = (scores == NEG_INF).all(2)
            weights = weights.scatter(1, row, weights.gather(1, row).masked_fill(barren, NEG_INF))
            again = barren & (weights > NEG_INF).any(1, keepdim=True)
            if not bool(again.any()):
                break
            row = torch.where(again, draw_index(weights), row)
        token = draw_index(scores[:, 0])
        score = (base.gather(1, row) + log_probs[:, 0].gather(1, token)).masked_fill(
            scores[:, 0].gather(1, token) == NEG_INF, NEG_INF
        )
        return BlockTable([block]).candidates(score, row, token), scores[:, 0]


def add_block(summed: Tensor | None, state: SearchState, block: Block, base: Tensor, lexical: Tensor) -> Tensor:
    """Add the rows of a block to log p(token | hypothesis) [B, K, V]."""
    if summed is None:
        summed = lexical.new_full((*state.scores.shape, lexical.shape[2]), NEG_INF)
    relative = base - state.scores.gather(1, block.origin)
    relative = relative.masked_fill(base == NEG_INF, NEG_INF)
    # One more row collects the rows that no hypothesis needs.
    summed = F.pad(summed, (0, 0, 0, 1), value=NEG_INF)
    for a, b in block.levels.bounds:
        origin = block.origin[:, a:b].masked_fill(base[:, a:b] == NEG_INF, summed.shape[1] - 1)
        index = origin[..., None].expand(-1, -1, lexical.shape[2])
        more = relative[:, a:b, None] + lexical[:, a:b]
        summed = summed.scatter(1, index, torch.logaddexp(summed.gather(1, index), more))
    return summed[:, :-1]


def draw_index(scores: Tensor) -> Tensor:
    """Draw an index per row [B, 1] with probability proportional to exp(scores [B, M]); any one if all are -inf."""
    scores = scores.masked_fill((scores == NEG_INF).all(1, keepdim=True), 0.0)
    return torch.multinomial(scores.softmax(1), 1)
