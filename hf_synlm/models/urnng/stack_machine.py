# SPDX-License-Identifier: Apache-2.0
"""The stack machine of URNNG for the search: GEN and COMP as for GPST, states from a stack LSTM.

The end token is the right part of the whole tree, so GEN of it needs one tree, and COMP follows.

Shapes: B sentences, K hypotheses, R rows, P rows of several levels, L layers, h width, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.search.level_machine import LevelMachine
from hf_synlm.search.next_tokens import Process
from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.search.state import NEG_INF, Block, Candidates, SearchState, WordEdges
from hf_synlm.search.synchronous import Selection, SynchronousSearch


class URNNGStackMachine(LevelMachine):
    """Runs a URNNG with heads on node pools."""

    def __init__(self, model: Any) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.base, self.lm_head, self.predict_actions = model.base_model, model.lm_head, model.action_log_probs

    def begin(
        self,
        batch_size: int,
        device: torch.device,
        input_ids: Tensor | None = None,
        context_sentence_ids: Tensor | None = None,
    ) -> tuple[NodePool, Tensor]:
        """The pool and the state after the begin token [B, 1]; raises ValueError for a context."""
        if context_sentence_ids is not None:
            raise ValueError("context_sentence_ids: URNNG reads one sentence. Leave out the text before this sentence.")
        size, layers = self.config.hidden_size, self.config.num_layers
        features = {"constituent": (2 * size, self.dtype), "state": (2 * size * layers, self.dtype)}
        pool = NodePool(batch_size, {**features, "actions": (2, torch.float32)}, device)
        none = torch.full((batch_size, 1), -1, device=device)
        word = self.base.embed_tokens(torch.full_like(none, self.config.bos_token_id))
        below = word.new_zeros(batch_size, 1, layers, 2 * size)
        nodes = Nodes(none, none, torch.zeros_like(none), none, none, none)
        self._push_on(pool, below, nodes, None, F.pad(word, (0, size)))
        return pool, torch.zeros_like(none)

    def _push_on(
        self, pool: NodePool, below: Tensor, nodes: Nodes, length: Tensor | None, constituent: Tensor
    ) -> Tensor:
        """Push constituents [B, R, 2 h] on the states `below` [B, R, L, 2 h]."""
        state = self.base.stack_lstm.push(constituent.chunk(2, -1)[0], below)
        log_probs = self.predict_actions(state[..., -1, : self.config.hidden_size])
        return pool.append(nodes, length=length, constituent=constituent, state=state.flatten(2), actions=log_probs)

    def generated(self, tokens: Tensor) -> list[Tensor]:
        """Constituents of one word; see `LevelMachine`."""
        return [F.pad(self.base.embed_tokens(tokens), (0, self.config.hidden_size))]

    def composed(self, pool: NodePool, parents: Tensor, left: Tensor, levels: Levels) -> list[Tensor]:
        """Constituents of COMP actions in a row."""
        vector, vectors = pool.feature("constituent", parents), []
        for part in pool.feature("constituent", left).split(levels.sizes, 1):
            vector = self.base.composition(vector[:, : part.shape[1]], part)
            vectors.append(vector)
        return [torch.cat(vectors, 1)]

    def append(
        self,
        pool: NodePool,
        nodes: Nodes,
        length: Tensor | None,
        vectors: list[Tensor],
        num_tokens: Tensor,
        levels: Levels | None,
    ) -> Tensor:
        """Push constituents on the states below them, which `read` then finds there."""
        # Under the first element stands the state after the begin token, node 0.
        below = pool.feature("state", nodes.below.clamp(min=0)).unflatten(2, (self.config.num_layers, -1))
        return self._push_on(pool, below, nodes, length, *vectors)

    def action_log_probs(
        self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, edges: WordEdges | None, renormalize: bool = True
    ) -> Tensor:
        """Log-probabilities [B, R, 2] of GEN and COMP; GEN is certain where the stack bars COMP, as in training."""
        log_probs = super().action_log_probs(pool, nodes, num_tokens, edges)
        return torch.where(
            pool.field("depth", nodes)[..., None] < 2, F.pad(log_probs.new_zeros(1), (0, 1), value=NEG_INF), log_probs
        )

    def token_features(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Inputs [B, R, h] of the word head."""
        size = self.config.hidden_size
        return pool.feature("state", nodes)[..., -2 * size : -size]


class URNNGSearch(SynchronousSearch):
    """Word-synchronous beam search, in which COMP after the end token counts; `eos_token_ids` [E] are never None."""

    def _select_given(
        self, state: SearchState, block: Block, tokens: Tensor, synced: tuple[Tensor, Tensor], first_id: int
    ) -> tuple[Selection, Tensor]:
        """As `SynchronousSearch` does; the end token needs one tree."""
        barred = torch.isin(tokens, self.eos_token_ids)[:, None] & ~self.machine.is_complete(state.pool, block.nodes)
        generated = block.log_probs[..., :1].masked_fill(barred[..., None], NEG_INF)
        block = replace(block, log_probs=torch.cat([generated, block.log_probs[..., 1:]], 2))
        return super()._select_given(state, block, tokens, synced, first_id)

    def propose_tokens(
        self, state: SearchState, process: Process | None, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """As `SynchronousSearch` does; the scores of candidates that end have their COMP."""
        chosen, ended, summed = super().propose_tokens(state, process, keep_scores)
        return chosen, self._closed(state, ended), summed

    def draw_token(self, state: SearchState, process: Process | None) -> tuple[Candidates, Tensor]:
        """As `SynchronousSearch` does; the score of a candidate that ends has its COMP."""
        chosen, scores = super().draw_token(state, process)
        is_end = torch.isin(chosen.tokens, self.eos_token_ids)
        return replace(chosen, scores=torch.where(is_end, self._closed(state, chosen).scores, chosen.scores)), scores

    def _closed(self, state: SearchState, ended: Candidates) -> Candidates:
        """Candidates that end, with COMP after the end token; the state does not change."""
        pool, size, count = state.pool, state.pool.size, state.num_tokens + 1
        nodes = self.machine.push(pool, ended.parents, count, tokens=ended.tokens)
        comp = self.machine.action_log_probs(pool, nodes, count, None)[..., 1]
        pool.truncate(size)
        # Without a hypothesis there is no COMP, either.
        return replace(ended, scores=torch.where(ended.scores == NEG_INF, NEG_INF, ended.scores + comp))
