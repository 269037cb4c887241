# SPDX-License-Identifier: Apache-2.0
"""The stack machine of RNNG for the search: states of the stack LSTM, compositions.

REDUCE finds its children by walking down from the top of the stack.

Shapes: B sentences, R rows, A action ids, Q compositions, M children, L layers, w element, h stack state.
"""

from typing import Any

import torch
from torch import Tensor

from hf_synlm.models.rnng.composition import chain_inputs
from hf_synlm.models.rnng.plan import Chains
from hf_synlm.search.labeled.machine import (
    COUNTS,
    LINKS,
    LabeledStackMachine,
    Seen,
    State,
    chosen_rows,
    first_true,
    flat_rows,
)
from hf_synlm.search.stack import NodePool, Nodes
from hf_synlm.search.state import WordEdges, in_full_precision
from hf_synlm.trees.transitions import REDUCE


class RNNGStackMachine(LabeledStackMachine):
    """Runs an RNNG with heads on node pools; arguments as for `LabeledStackMachine`."""

    @in_full_precision
    def _prepare(self, model: Any) -> None:
        """Lay out the weights as they are now."""
        self.action_head = model.action_head
        self._pusher = self.model.stack_lstm.pusher()
        self._read_chains = self.model.composition.rnn.prepared()
        labels = torch.arange(self.num_actions - self.first, device=self.model.device)
        # Of every action: the element of its nonterminal, and what that brings to the gates.
        elements = self.model.embed_nonterminals(labels)
        self._elements = torch.cat([elements.new_zeros(self.first, elements.shape[1]), elements])
        self._label_gates = self._pusher.inputs(self._elements)

    @in_full_precision
    def begin(self, batch_size: int, device: torch.device) -> tuple[NodePool, Tensor]:
        """The pool and the state before the first action [B, 1]."""
        config = self.config
        features = {
            "state": (2 * config.num_layers * config.hidden_size, self.dtype),
            "element": (config.embedding_size, self.dtype),
            "predictor": (config.embedding_size, self.dtype),
        }
        pool = NodePool(batch_size, features, device, links=LINKS, counts=COUNTS)
        none = torch.full((batch_size, 1), -1, device=device)
        zero = torch.zeros_like(none)
        first = Nodes(none, none, zero, none, none, none)
        pool.append(first, *[none] * len(LINKS), *[zero] * len(COUNTS))
        elements = self.model.initial_element.expand(batch_size, -1)
        nothing = elements.new_zeros(batch_size, config.num_layers, 2 * config.hidden_size)
        self._write(pool, pool.places(zero).flatten(), elements, self._pusher.inputs(elements), nothing)
        return pool, zero

    @in_full_precision
    def push(self, pool: NodePool, seen: Seen, actions: Tensor, num_tokens: Tensor, live: Tensor) -> Tensor:
        """Take one structural action (NT or REDUCE) from each of R states; see `LabeledStackMachine.push`.

        Cost: one wait for the device. Rows that stand on one state are multiplied with the recurrent weights together
        on a CPU. A composition takes as many steps as the widest constituent has children.
        """
        reduces = (actions == REDUCE) & live
        children = (seen.column("depth") - seen.column("floor", 1)) * reduces
        sizes = torch.stack([live.sum(1).amax(), live.sum(), reduces.sum(), children.amax()])
        rows, num_live, num_reduces, most = sizes.tolist()
        first = pool.reserve(rows)
        own = torch.arange(first, first + rows, device=actions.device).expand(len(actions), -1)
        seen, actions, live, reduces = (
            seen.rows(slice(rows)), actions[:, :rows], live[:, :rows], reduces[:, :rows]
        )  # fmt: skip
        if not rows:
            return own
        fields = self._structural(seen, own, actions, num_tokens)
        pool.fields[:, first : first + rows] = fields
        which = None if num_live == live.numel() else first_true(live.flatten(), num_live)
        taken = flat_rows(actions, which)
        elements, gates = self._elements.index_select(0, taken), self._label_gates.index_select(0, taken)
        if num_reduces:
            closing = first_true(flat_rows(reduces, which), num_reduces)
            chosen = closing if which is None else which[closing]
            composed = self._compose(pool, seen, chosen, children[:, :rows].flatten()[chosen], most)
            elements.index_copy_(0, closing, composed)
            gates.index_copy_(0, closing, self._pusher.inputs(composed))
        sentence = torch.arange(len(own), device=own.device)[:, None] * pool.fields.shape[1]
        below, places = (flat_rows(ids + sentence, which) for ids in (fields[..., State._fields.index("below")], own))
        self._write(pool, None if which is None else places, elements, gates, self._states(pool), below)
        return own

    @in_full_precision
    def shift(
        self,
        pool: NodePool,
        nodes: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
        live: Tensor,
    ) -> Tensor:
        """Generate a word from each of R states; see `LabeledStackMachine.shift`."""
        own = self._append_words(pool, nodes, tokens, num_tokens, edges)
        which = chosen_rows(live)
        elements = self.model.embed_tokens(flat_rows(tokens.clamp(min=0), which))
        below, places = (flat_rows(pool.places(ids), which) for ids in (nodes, own))
        self._write(pool, places, elements, self._pusher.inputs(elements), self._states(pool), below)
        return own

    def _states(self, pool: NodePool) -> Tensor:
        """States of the stack LSTM of all nodes [B N, L, 2 h]."""
        return pool.features["state"].flatten(0, 1).unflatten(1, (self.config.num_layers, -1))

    def _write(
        self,
        pool: NodePool,
        places: Tensor | None,
        elements: Tensor,
        gates: Tensor,
        states: Tensor,
        below: Tensor | None = None,
    ) -> None:
        """Push elements [Q, w] on the states `below` [Q] (None = all, in order).

        Features go to flat `places` [Q]; None = to the last nodes of all sentences, which is faster.
        """
        which = None
        if below is not None:
            if below.device.type == "cpu":  # elsewhere counting them would wait
                below, which = below.unique(return_inverse=True)
            states = states.index_select(0, below)
        new = self._pusher(gates, states, which)
        predictor = self.model.predictor(new[:, -1, : self.config.hidden_size])
        for name, value in (("state", new.flatten(1)), ("element", elements), ("predictor", predictor)):
            if places is None:
                last = value.unflatten(0, (pool.batch_size, -1))
                pool.features[name][:, pool.size - last.shape[1] : pool.size] = last
            else:
                pool.features[name].flatten(0, 1).index_copy_(0, places, value)

    def _compose(self, pool: NodePool, seen: Seen, which: Tensor, length: Tensor, most: int) -> Tensor:
        """Vectors [Q, w] of the constituents that REDUCE closes in the rows `which` [Q] of some states [B, R].

        Rows are read to the largest number of children, and what stands behind their own end is not used.
        """
        fields = pool.fields.flatten(0, 1)
        below = fields[:, State._fields.index("below")]
        offset = which // seen.nodes.shape[1] * pool.fields.shape[1]
        top = offset + seen.nodes.flatten()[which]
        nonterminal = offset + seen.column("open").flatten()[which]
        walk, current = [], top
        for step in range(most):
            if step:
                current = (offset + below[current]).clamp(min=0)
            if self.in_order:
                # The nonterminal stands among its children: it is left out.
                current = torch.where(current == nonterminal, offset + below[current], current)
            walk.append(current)
        backward = torch.stack(walk)  # [M, Q], from right to left
        column = torch.arange(most, device=which.device)[:, None]
        forward = backward.gather(0, (length - 1 - column).clamp(min=0))
        composition, children = self.model.composition, torch.stack([forward, backward])
        own = torch.arange(len(which), device=which.device)
        elements = pool.features["element"].flatten(0, 1)
        if not composition.reads_stack:
            children = torch.cat([nonterminal.expand(2, 1, -1), children], 1)
            chains = Chains(children.flatten(1), [len(which)] * (most + 1), length * len(which) + own, length, None)
            return composition(chain_inputs(elements, chains), chains, self._read_chains)
        position = torch.stack([column.expand_as(forward), (length - 1 - column).clamp(min=0)]) * len(which) + own
        last = (length - 1) * len(which) + own
        chains = Chains(children.flatten(1), [len(which)] * most, last, length, position.mT)
        labels = fields[nonterminal, State._fields.index("action")] - self.first
        tops = seen.predictor.flatten(0, 1)[which]
        return composition(chain_inputs(elements, chains), chains, labels, tops, self._read_chains)

    def action_logits(self, seen: Seen) -> Tensor:
        """Logits [B, R, A] of the next action, float32."""
        return self.action_head(seen.predictor).float()
