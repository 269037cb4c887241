# SPDX-License-Identifier: Apache-2.0
"""Labels after words in the search of Tree LM: binary trees.

A label of a binary tree takes the two last elements of the stack as its children. Unary chains are one label, "S+VP";
nodes that binarization has added have the label "@". In the trees that come out the chains are taken apart and the
added nodes are left out, so that labels and brackets are those of the treebank, but for constituents of one word. The
pieces of a word are one element of the stack.

Shapes: B sentences, R rows, F fields, V vocabulary, A action ids.
"""

import functools

import torch
from torch import Tensor

from hf_synlm.models.tree_lm.stack_machine import TreeLMStackMachine
from hf_synlm.search.labeled.machine import Phase, Seen, State
from hf_synlm.search.stack import NodePool
from hf_synlm.search.state import WordEdges
from hf_synlm.trees.transitions import ADDED_NODE, CHAIN


class BinaryTreeLMStackMachine(TreeLMStackMachine):
    """Runs a Tree LM with `linearization="binary"` on node pools; see `TreeLMStackMachine`.

    The end token is FINISH, and never a word.
    """

    @functools.cached_property
    def special_ids(self) -> Tensor:
        """Words that may not be generated [E]."""
        end = torch.tensor([self.config.eos_token_id], device=self.model.device)
        special = super().special_ids
        return end if special is None else torch.cat([special, end])

    def legal_actions(self, seen: Seen, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Which actions states may take [B, R, A]."""
        now, ending = seen.state(0), phase is Phase.END
        free = (now.inside_word == 0) | ending  # the end of the text ends a word
        never = torch.zeros_like(free)
        shift = never if ending else ~never
        finish = never if phase is Phase.CONTINUE else free & (now.depth == 1)
        return torch.stack([never, shift, never, finish, free & (now.depth > 1)], -1).index_select(2, self._kind)

    def look(self, pool: NodePool, nodes: Tensor) -> Seen:
        """What is known of the states `nodes` [B, R]: `state(0)`, and in `state(1)` the element below the last one."""
        self._told_ends |= pool.told_ends
        width = pool.fields.shape[2]
        own = pool.fields.gather(1, nodes[..., None].expand(-1, -1, width))
        below = own[..., State._fields.index("below")].clamp(min=0)
        left = pool.fields.gather(1, below[..., None].expand(-1, -1, width))
        return Seen(nodes, torch.stack([own, left], 2), pool.feature("predictor", nodes))

    def _append_words(
        self, pool: NodePool, nodes: Tensor, tokens: Tensor, num_tokens: Tensor, edges: WordEdges | None
    ) -> Tensor:
        """Integer fields of the nodes of SHIFT; a piece inside a word takes the place of the piece before it."""
        before = self.look(pool, nodes).state(0)
        own = super()._append_words(pool, nodes, tokens, num_tokens, edges)
        fields = pool.fields[:, pool.size - own.shape[1] : pool.size]
        for name in ("below", "depth", "start"):
            column = fields[..., State._fields.index(name)]
            column.copy_(torch.where(before.inside_word > 0, getattr(before, name), column))
        return own

    def _structural(self, seen: Seen, own: Tensor, actions: Tensor, num_tokens: Tensor) -> Tensor:
        """Integer fields [B, R, F] of the new nodes, which replace two elements."""
        before, left = seen.state(0), seen.state(1)
        after = before._replace(
            predecessor=seen.nodes, below=left.below, depth=before.depth - 1, action=actions,
            token=torch.full_like(own, -1), start=left.start, length=before.length + 1,
        )  # fmt: skip
        return torch.stack(after, -1)

    def _tree(self, actions: list[int], starts: list[int], ends: list[int]) -> tuple[list[tuple[int, int]], list[str]]:
        spans: list[tuple[int, int]] = []
        labels: list[str] = []
        for action, start, end in zip(actions, starts, ends, strict=True):
            label = self.config.nonterminals[action - self.first] if action >= self.first else ADDED_NODE
            is_whole = action >= self.first and (start, end) == (0, ends[-1])
            if label != ADDED_NODE or is_whole:
                chain = label.split(CHAIN)[::-1]
                labels += chain
                spans += [(start, end)] * len(chain)
        return spans, labels
