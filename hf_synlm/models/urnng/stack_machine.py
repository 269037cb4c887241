"""The stack machine of URNNG for the search: GEN and COMP as for GPST, states from a stack LSTM.

Shapes: B sentences, R rows, P rows of several levels, L layers, h width.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.models.gpst.stack_machine import GPSTStackMachine
from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.search.state import WordEdges
from hf_synlm.trees.actions import COMP, GEN


class URNNGStackMachine(GPSTStackMachine):
    """Runs a URNNG with heads on node pools."""

    max_tokens = float("inf")

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
            raise ValueError("context_sentence_ids: URNNG reads one sentence; leave out what stands before it.")
        size, layers = self.config.hidden_size, self.config.num_layers
        features = {"constituent": (2 * size, self.dtype), "state": (2 * size * layers, self.dtype)}
        pool = NodePool(batch_size, {**features, "actions": (2, torch.float32)}, device)
        none = torch.full((batch_size, 1), -1, device=device)
        word = self.base.embed_tokens(torch.full_like(none, self.config.bos_token_id))
        below = word.new_zeros(batch_size, 1, layers, 2 * size)
        nodes = Nodes(none, none, torch.zeros_like(none), none, none, none)
        self._append(pool, nodes, None, F.pad(word, (0, size)), below)
        return pool, torch.zeros_like(none)

    def _append(self, pool: NodePool, nodes: Nodes, length: Tensor | None, constituent: Tensor, below: Tensor) -> int:
        """Push constituents [B, R, 2 h] on the states `below` [B, R, L, 2 h]."""
        state = self.base.stack_lstm.push(constituent.chunk(2, -1)[0], below)
        log_probs = self.predict_actions(state[..., -1, : self.config.hidden_size])
        return pool.append(nodes, length=length, constituent=constituent, state=state.flatten(2), actions=log_probs)

    def push(
        self,
        pool: NodePool,
        parents: Tensor,
        num_tokens: Tensor,
        tokens: Tensor | None = None,
        actions: Tensor | None = None,
        levels: Levels | None = None,
    ) -> int:
        """Take one action from each of R states, or several COMP in a row; see `GPSTStackMachine.push`."""
        length = None
        if tokens is not None:
            start = (num_tokens if num_tokens.dim() == 2 else num_tokens[:, None]) - 1
            nodes = pool.push(parents, GEN, tokens, start.expand_as(parents))
            vector = F.pad(self.base.embed_tokens(tokens), (0, self.config.hidden_size))
        if tokens is None or actions is not None:
            made, length, composed = self._reduce(pool, parents, levels)
            if actions is None:
                nodes, vector = made, composed
            else:
                composes, length = actions == COMP, None
                nodes = Nodes(*(torch.where(composes, a, b) for a, b in zip(made, nodes, strict=True)))
                vector = torch.where(composes[..., None], composed, vector)
        # Under the first element stands the state after the begin token, node 0.
        below = pool.feature("state", nodes.below.clamp(min=0))
        return self._append(pool, nodes, length, vector, below.unflatten(2, (self.config.num_layers, -1)))

    def _reduce(self, pool: NodePool, parents: Tensor, levels: Levels | None) -> tuple[Nodes, Tensor, Tensor]:
        """Nodes, lengths and constituents of some COMP in a row (None = one), [B, P, ...] each."""
        levels = levels or Levels([parents.shape[1]], parents.device)
        nodes, length, left = pool.pop_chain(parents, COMP, levels)
        vector, vectors = pool.feature("constituent", parents), []
        for part in pool.feature("constituent", left).split(levels.sizes, 1):
            vector = self.base.composition(vector[:, : part.shape[1]], part)
            vectors.append(vector)
        return nodes, length, torch.cat(vectors, 1)

    def read(self, pool: NodePool, path: Tensor, nodes: Tensor, levels: Levels, words: bool = True) -> None:
        """Do nothing: `push` has computed the states."""

    def action_log_probs(
        self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, edges: WordEdges | None, renormalize: bool = True
    ) -> Tensor:
        """Log-probabilities [B, R, 2] of GEN and COMP; GEN is certain where COMP is illegal, as in training."""
        return super().action_log_probs(pool, nodes, num_tokens, edges, renormalize=True)

    def word_features(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Inputs [B, R, h] of the word head."""
        size = self.config.hidden_size
        return pool.feature("state", nodes)[..., -2 * size : -size]
