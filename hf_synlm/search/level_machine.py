# SPDX-License-Identifier: Apache-2.0
"""What the search needs of a model with one structural action: GEN and COMP on node pools, legal actions, trees.

GEN puts a token on the stack, COMP puts one entry in the place of the two on top (`trees/actions.py`).

Shapes: B sentences, R rows, P rows of several levels, A actions, K hypotheses, D features of the word head.
"""

import functools
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from hf_synlm.search.stack import Levels, NodePool, Nodes
from hf_synlm.search.state import NEG_INF, StackMachine, WordEdges
from hf_synlm.search.token_head import PackedTokenHead, TokenHead, bounds_pay
from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION


class LevelMachine(StackMachine):
    """Runs a model on node pools, whose nodes have the feature "actions" [2]: log p(GEN), log p(COMP)."""

    pad_action, token_action = PAD_ACTION, GEN
    lm_head: Any

    # ----------------------------------------------------------------------------------------- what a model writes
    @abstractmethod
    def generated(self, tokens: Tensor) -> list[Tensor]:
        """Hook: vectors [B, R, *] of GEN."""

    @abstractmethod
    def composed(self, pool: NodePool, parents: Tensor, left: Tensor, levels: Levels) -> list[Tensor]:
        """Hook: vectors [B, P, *] of COMP actions in a row, whose left parts are `left` [B, P]."""

    @abstractmethod
    def append(
        self,
        pool: NodePool,
        nodes: Nodes,
        length: Tensor | None,
        vectors: list[Tensor],
        num_tokens: Tensor,
        levels: Levels | None,
    ) -> Tensor:
        """Hook: write nodes with their vectors to the pool; returns their ids [B, P]."""

    def read(self, pool: NodePool, path: Tensor, nodes: Tensor, levels: Levels, predict: bool = True) -> None:
        """Hook: run the layers on nodes [B, P] that follow one another, behind paths [B, R, L] (-1 = no node).

        Nodes that were read before may be read again. With `predict`, layers that predict tokens run, too.
        """

    @abstractmethod
    def token_features(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Hook: inputs [B, R, D] of the word head, in states that were read."""

    # ---------------------------------------------------------------------------------------------------- actions
    def push(
        self,
        pool: NodePool,
        parents: Tensor,
        num_tokens: Tensor,
        tokens: Tensor | None = None,
        actions: Tensor | None = None,
        levels: Levels | None = None,
    ) -> Tensor:
        """Take one action from each of R states, or several COMP in a row; returns the ids [B, P] of the new nodes.

        Rows that no hypothesis needs may hold any id. `num_tokens` [B] or [B, R] counts the token of this action.
        Without `tokens` all rows take COMP, as often as `levels` say (None = once); with them GEN, or what `actions`
        [B, R] say.
        """
        num_tokens = num_tokens if num_tokens.dim() == 2 else num_tokens[:, None]
        if tokens is not None:
            nodes, length = pool.push(parents, GEN, tokens, (num_tokens - 1).expand_as(parents)), None
            vectors = self.generated(tokens)
        if tokens is None or actions is not None:
            chain = levels or Levels([parents.shape[1]], parents.device)
            made, length, left = pool.pop_chain(parents, COMP, chain)
            composed = self.composed(pool, parents, left, chain)
            if actions is None:
                nodes, vectors = made, composed
            else:
                is_comp, length = actions == COMP, None
                nodes = Nodes(*(torch.where(is_comp, a, b) for a, b in zip(made, nodes, strict=True)))
                vectors = [torch.where(is_comp[..., None], a, b) for a, b in zip(composed, vectors, strict=True)]
        return self.append(pool, nodes, length, vectors, num_tokens, levels)

    def chain_bound(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Number of COMP actions that the stack allows in a row [B, R]; -1 on an empty stack."""
        return pool.field("depth", nodes) - 1

    def is_complete(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Whether exactly one tree is on the stack [B, R]."""
        return pool.field("depth", nodes) == 1

    def legal_actions(
        self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, edges: WordEdges | None
    ) -> tuple[Tensor | None, Tensor]:
        """Which states [B, R] may take GEN (None = all) and COMP.

        COMP needs two trees. With word edges, GEN is illegal at the end of a word until the top tree covers the word.
        COMP must not build a span that crosses a word: the span stays inside the last token's word, or both its edges
        are word edges.
        """
        may_comp = pool.field("depth", nodes) >= 2
        if edges is None:
            return None, may_comp
        top = pool.nodes(nodes)
        left_start = pool.field("start", top.below).clamp(min=0)
        last = (num_tokens if num_tokens.dim() == 2 else num_tokens[:, None]).expand_as(nodes) - 1
        at_end, word_start = edges.is_end.gather(1, last.clamp(min=0)), edges.word_start.gather(1, last.clamp(min=0))
        starts_word = edges.word_start.gather(1, left_start) == left_start
        may_comp = may_comp & ((left_start >= word_start) | (at_end & starts_word))
        return (last < 0) | ~at_end | (top.start <= word_start), may_comp

    def action_log_probs(
        self,
        pool: NodePool,
        nodes: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
        renormalize: bool = False,
    ) -> Tensor:
        """Log-probabilities [B, R, 2] of GEN and COMP, -inf where illegal; `num_tokens` [B] or [B, R] are those so far.

        With `renormalize`, COMP is forbidden before the softmax instead of after it.
        """
        log_probs = pool.feature("actions", nodes)
        may_gen, may_comp = self.legal_actions(pool, nodes, num_tokens, edges)
        gen, comp = log_probs.unbind(-1)
        if renormalize:
            gen = torch.where(may_comp, gen, 0.0)
        if may_gen is not None:
            gen = gen.masked_fill(~may_gen, NEG_INF)
        return torch.stack([gen, comp.masked_fill(~may_comp, NEG_INF)], -1)

    def trees(self, nodes: Nodes) -> tuple[list[list[list[tuple[int, int]]]], None]:
        """Spans of the composed nodes of derivations [B, K, A], in the order of the actions; they have no labels."""
        is_comp = nodes.action == COMP
        end = (nodes.action == GEN).long().cumsum(2)
        rows = zip(is_comp.tolist(), nodes.start.tolist(), end.tolist(), strict=True)
        spans = [
            [
                [(i, j) for flag, i, j in zip(flags, starts, ends, strict=True) if flag]
                for flags, starts, ends in zip(*row, strict=True)
            ]
            for row in rows
        ]
        return spans, None

    @functools.cached_property
    def token_head(self) -> TokenHead:
        """The output layer."""
        return TokenHead(self.lm_head, self.config.vocab_size)

    @functools.cached_property
    def packed_token_head(self) -> PackedTokenHead | None:
        """The output layer with bounds; None = they do not pay."""
        return PackedTokenHead(self.lm_head) if bounds_pay(self.lm_head) else None
