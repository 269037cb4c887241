"""The stack machine of RNNG for the search: effects of actions, legal actions, probabilities of actions and words.

The slow and obvious version is `Grammar` in `tests/reference/rnng_search.py`, which replays whole prefixes.

A state is a node of the pool, the push that an action made; its stack is a chain of nodes. The authors keep a stack
tensor per hypothesis; here every node has three links:

    open    the innermost open nonterminal (-1 = none)
    base    (at a nonterminal) the node on which the finished constituent will stand
    corner  the first piece of the last word, or the last composed node: the left corner that an in-order NT takes

REDUCE finds its children by walking down from the top to `base`; hypotheses copy nothing.

Source: Noji and Oseki 2021; rules of the authors' `fixed_stack_models.py`, `fixed_stack_in_order_models.py`.

Shapes: B sentences, R rows, N nodes, A action ids, Q compositions, M children, L layers, w element, h stack state,
V vocabulary.
"""

import math
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from .rnng_actions import FINISH, PAD, REDUCE, SHIFT
from .rnng_composition import chain_inputs
from .rnng_plan import lay_out_chains
from .search_stack import NodePool, Nodes
from .search_state import NEG_INF, WordEdges

_LINKS = ("open", "base", "corner")
_COUNTS = ("num_open", "consecutive", "inside_word")
# Maximum length of a derivation, at least and per token, as in the authors' code; it bounds unary chains at the end.
_MIN_LENGTH, _LENGTH_PER_TOKEN = 100, 5
# Numbers in one chunk of logits where only two of each row are kept: memory does not grow with the batch.
_CHUNK_ELEMENTS = 1 << 24


class Phase(Enum):
    """What may follow a state, besides more structural actions."""

    CONTINUE = "a word"
    END = "the end of the sentence"
    EITHER = "a word or the end"


class RNNGStackMachine:
    """Runs an RNNG on node pools.

    Args:
        model: with heads. Used attributes: `config`, `dtype`, `action_head`, `lm_head`; of its `base_model`
            `embed_tokens`, `embed_nonterminals`, `initial_element`, `stack_lstm`, `composition`, `predictor`,
            `word_ends_of`.
        normalization: "search" or "train" (see `RNNGConfig`); None = the config's.
        end_token_ids: ids that stand for the end of a sentence [E] and are not words; None = all ids are words.

    Raises:
        ValueError: for another normalization.
    """

    max_tokens = math.inf
    pad_action, token_action = PAD, SHIFT

    def __init__(self, model: Any, normalization: str | None = None, end_token_ids: Tensor | None = None) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.model, self.action_head, self.lm_head = model.base_model, model.action_head, model.lm_head
        self.normalization = self.config.normalization if normalization is None else normalization
        self.end_token_ids = end_token_ids
        if self.normalization not in ("search", "train"):
            raise ValueError(f"normalization {self.normalization!r} is unknown. Choose 'search' or 'train'.")
        self._push_states = self.model.stack_lstm.pusher()
        self.in_order, self.first = self.config.in_order, self.config.first_nonterminal

    # ---------------------------------------------------------------------------------------------------- nodes
    def begin(self, batch_size: int, device: torch.device) -> tuple[NodePool, Tensor]:
        """The pool and the state before the first action [B, 1]."""
        config = self.config
        features = {
            "hidden": (config.num_layers * config.hidden_size, self.dtype),
            "cells": (config.num_layers * config.hidden_size, self.dtype),
            "element": (config.embedding_size, self.dtype),
            "predictor": (config.embedding_size, self.dtype),
            "actions": (config.num_actions, torch.float32),
        }
        pool = NodePool(batch_size, features, device, links=_LINKS, counts=_COUNTS)
        none = torch.full((batch_size, 1), -1, device=device)
        zero = torch.zeros_like(none)
        element = self.model.initial_element.expand(batch_size, -1)
        nothing = element.new_zeros(batch_size, config.num_layers, config.hidden_size)
        values = self._run(element, nothing, nothing)
        pool.append(
            Nodes(none, none, zero, none, none, none), none, none, none, zero, zero, zero,
            **{name: value[:, None] for name, value in values.items()},
        )  # fmt: skip
        return pool, zero

    def _run(self, elements: Tensor, hidden: Tensor, cells: Tensor) -> dict[str, Tensor]:
        """Features of pushes [R, ..] from their elements [R, w] and the states below them [R, L, h]."""
        hidden, cells = self._push_states(elements, hidden, cells)
        predictor = self.model.predictor(hidden[:, -1])
        # Under autocast what comes out has its type.
        return {
            "hidden": hidden.flatten(1).to(self.dtype),
            "cells": cells.flatten(1).to(self.dtype),
            "element": elements,
            "predictor": predictor.to(self.dtype),
            "actions": self.action_head(predictor).float(),
        }

    def push(
        self,
        pool: NodePool,
        parents: Tensor,
        actions: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
        live: Tensor,
    ) -> Tensor:
        """Take one action from each of R states.

        Args:
            pool: grows by R nodes.
            parents: states before the actions [B, R].
            actions: action ids [B, R]; FINISH leaves a copy of the state.
            tokens: tokens of SHIFT actions [B, R].
            num_tokens: tokens before the actions [B].
            edges: which tokens end a word; None = what the model knows of its tokens.
            live: rows that matter [B, R]; the others get fields, but nothing is computed for them.

        Returns:
            Ids of the new nodes [B, R].
        """
        first, rows = pool.size, parents.shape[1]
        own = torch.arange(first, first + rows, device=parents.device).expand_as(parents)
        nodes, further = self._fields(pool, parents, own, actions, tokens, num_tokens, edges)
        row, column = live.nonzero(as_tuple=True)
        chosen, below, parent = actions[row, column], nodes.below[row, column], parents[row, column]
        elements = self._elements(pool, row, parent, chosen, tokens[row, column])
        size = (len(row), self.config.num_layers, self.config.hidden_size)
        values = self._run(
            elements,
            pool.features["hidden"][row, below].view(size),
            pool.features["cells"][row, below].view(size),
        )
        if self.in_order:
            finished = (chosen == FINISH)[:, None]
            values = {name: torch.where(finished, pool.features[name][row, parent], v) for name, v in values.items()}
        pool.append(nodes, *further)
        for name, value in values.items():
            pool.features[name][row, column + first] = value
        return own

    def _fields(
        self,
        pool: NodePool,
        parents: Tensor,
        own: Tensor,
        actions: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
    ) -> tuple[Nodes, tuple[Tensor, ...]]:
        """Integer fields of the new nodes [B, R]."""
        top = pool.nodes(parents)
        opened, corner = pool.field("open", parents), pool.field("corner", parents)
        num_open, consecutive = pool.field("num_open", parents), pool.field("consecutive", parents)
        shift, reduce, finish = actions == SHIFT, actions == REDUCE, (actions == FINISH) & self.in_order
        opens = actions >= self.first
        # NT: where the constituent will stand, and where it begins in the sentence.
        base, start = parents, num_tokens[:, None].expand_as(parents)
        if self.in_order:
            base = torch.where(opens, pool.field("below", corner), -1)
            start = torch.where(opens, pool.field("start", corner), start)
        # REDUCE: back to below the nonterminal, and out of it.
        nonterminal = pool.nodes(opened)
        bottom = pool.field("base", opened)
        below = torch.where(reduce, bottom, torch.where(finish, top.below, parents))
        depth = torch.where(reduce, pool.field("depth", bottom), torch.where(finish, top.depth - 1, top.depth)) + 1
        start = torch.where(reduce, nonterminal.start, torch.where(finish, top.start, start))
        outer = pool.field("open", nonterminal.predecessor)
        open_now = torch.where(opens, own, torch.where(reduce, outer, opened))
        inside_word = pool.field("inside_word", parents)
        corner_now = torch.where((shift & (inside_word > 0)) | finish, corner, own)
        inside_word = torch.where(shift, self._starts_inside(tokens, num_tokens, edges), inside_word)
        chain = reduce & (top.action >= self.first) if self.in_order else torch.zeros_like(reduce)
        consecutive = torch.where(opens, consecutive + 1, torch.where(chain | finish, consecutive, 0))
        num_open = num_open + opens.long() - reduce.long()
        nodes = Nodes(parents, below, depth, actions, torch.where(shift, tokens, -1), start)
        return nodes, (open_now, torch.where(opens, base, -1), corner_now, num_open, consecutive, inside_word)

    def _starts_inside(self, tokens: Tensor, num_tokens: Tensor, edges: WordEdges | None) -> Tensor:
        """1 where more pieces of a word must follow a token [B, R] that is generated now, else 0."""
        if edges is not None:
            ends = edges.is_end.gather(1, num_tokens.clamp(max=edges.is_end.shape[1] - 1)[:, None])
            return (~ends).long().expand_as(tokens)
        ends = self.word_ends_of(tokens)
        return torch.zeros_like(tokens) if ends is None else (~ends).long()

    def _elements(self, pool: NodePool, row: Tensor, parent: Tensor, actions: Tensor, tokens: Tensor) -> Tensor:
        """Elements that the actions put on the stack [R, w]; arbitrary for FINISH."""
        is_shift, is_reduce = actions == SHIFT, actions == REDUCE
        labels = (actions - self.first).clamp(min=0)
        words = self.model.embed_tokens(tokens.masked_fill(~is_shift, 0).clamp(min=0))
        elements = torch.where(is_shift[:, None], words, self.model.embed_nonterminals(labels))
        which = is_reduce.nonzero().squeeze(1)
        if len(which):
            elements[which] = self._compose(pool, row[which], parent[which]).to(elements.dtype)
        return elements

    def _compose(self, pool: NodePool, row_Q: Tensor, top_Q: Tensor) -> Tensor:
        """Vectors [Q, w] of the constituents that REDUCE closes in the states `top_Q` of sentences `row_Q`."""
        capacity = pool.fields.shape[1]
        fields = pool.fields.flatten(0, 1)
        names = {name: fields[:, pool.names.index(name)] for name in ("below", "open", "base", "depth", "action")}
        offset = row_Q * capacity
        top = offset + top_Q
        nonterminal = offset + names["open"][top]
        bottom = offset + names["base"][nonterminal]
        length = names["depth"][top] - names["depth"][bottom] - 1
        length, order = length.sort(descending=True, stable=True)
        top, nonterminal, offset = top[order], nonterminal[order], offset[order]
        walk, current = [], top
        for _ in range(int(length[0])):
            # The nonterminal stands among its children in the in-order system and below them in the other.
            current = torch.where(current == nonterminal, offset + names["below"][current], current)
            walk.append(current)
            current = (offset + names["below"][current]).clamp(min=0)
        seen_QM = torch.stack(walk, 1)
        column = torch.arange(seen_QM.shape[1], device=seen_QM.device)
        children_QM = seen_QM.gather(1, (length[:, None] - 1 - column).clamp(min=0))
        children = children_QM[column < length[:, None]]
        elements = pool.features["element"].flatten(0, 1)
        composition = self.model.composition
        if composition.reads_stack:
            chains = lay_out_chains(children, length)
            labels = names["action"][nonterminal] - self.first
            tops = pool.features["predictor"].flatten(0, 1)[top]
            composed = composition(chain_inputs(elements, chains), chains, labels, tops)
        else:
            chains = lay_out_chains(children, length, nonterminal)
            composed = composition(chain_inputs(elements, chains), chains)
        return torch.empty_like(composed).index_copy_(0, order, composed)

    def word_ends_of(self, tokens: Tensor) -> Tensor | None:
        """Which tokens end a word, as far as the model knows; None = all do (end of word)."""
        return self.model.word_ends_of(tokens)

    # --------------------------------------------------------------------------------------------- probabilities
    def action_log_probs(self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Log-probabilities of the next action.

        Args:
            pool: the nodes.
            nodes: states [B, R].
            num_tokens: tokens before them [B].
            phase: what may come.

        Returns:
            Log-probabilities [B, R, A]; -inf where illegal.
        """
        logits = pool.feature("actions", nodes)
        legal = self.legal_actions(pool, nodes, num_tokens, phase)
        if self.normalization == "train":
            return logits.log_softmax(-1).masked_fill(~legal, NEG_INF)
        log_probs = logits.masked_fill(~legal, NEG_INF).log_softmax(-1)
        return log_probs.masked_fill(~legal, NEG_INF)  # a state without a legal action has no distribution

    def legal_actions(self, pool: NodePool, nodes: Tensor, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Which actions states may take [B, R, A]: the rules of the authors' search.

        Their limits of storage are left out, but for that of the derivation's length at the end of a sentence: before,
        they depend on how long it will be.
        """
        config = self.config
        depth, before = pool.field("depth", nodes), pool.field("action", nodes)
        num_open, consecutive = pool.field("num_open", nodes), pool.field("consecutive", nodes)
        begun = (num_tokens > 0)[:, None].expand_as(nodes)
        ending = phase is Phase.END
        free = (pool.field("inside_word", nodes) == 0) | ending  # the end of the text ends a word
        after_open = before >= self.first
        if self.in_order:
            full = (num_open >= config.max_open_nonterminals) | (consecutive >= config.consecutive_limit)
            reduce = (num_open > 0) & free
            opens = ~after_open & (depth > 0) & free
            if ending:
                longest = (_LENGTH_PER_TOKEN * num_tokens).clamp(min=_MIN_LENGTH)[:, None]
                room = longest - pool.field("length", nodes) >= num_open + self.first
                opens = opens & ~full & room
            else:
                reduce = reduce & ~full
            # A lone tree or word must get a parent before the next word.
            shift = ~begun | (num_open > 0) | ~free
            finish = (num_open == 0) & (depth == 1) & begun & free
        else:
            limit = config.consecutive_limit
            reduce = (num_open > 0) & ~after_open & free
            opens = (num_open < config.max_open_nonterminals) & (consecutive < limit) & free
            opens = opens & ((num_open > 0) | ~begun)
            shift = num_open > 0
            finish = reduce & (num_open == 1)  # the same action as REDUCE
            if phase is Phase.CONTINUE:
                reduce = reduce & ~finish
            if ending:
                opens = torch.zeros_like(opens)
        legal = torch.zeros(*nodes.shape, config.num_actions, dtype=torch.bool, device=nodes.device)
        legal[..., REDUCE], legal[..., self.first :] = reduce, opens[..., None]
        if not ending:
            legal[..., SHIFT] = shift
        if self.in_order and phase is not Phase.CONTINUE:
            legal[..., FINISH] = finish
        legal[..., PAD] = False
        return legal

    def end_action(self, pool: NodePool, nodes: Tensor) -> tuple[int, Tensor]:
        """The action that ends a sentence, and in which states [B, R] it does."""
        if self.in_order:
            return FINISH, torch.ones_like(nodes, dtype=torch.bool)
        return REDUCE, pool.field("num_open", nodes) == 1

    def trees(self, nodes: Nodes) -> tuple[list[list[list[tuple[int, int]]]], list[list[list[str]]]]:
        """Spans and labels of the constituents of derivations [B, K, A], in the order of their REDUCE actions."""
        ends = (nodes.action == SHIFT).cumsum(2).tolist()
        spans, labels = [], []
        for row in zip(nodes.action.tolist(), nodes.start.tolist(), ends, strict=True):
            trees = [self._tree(*derivation) for derivation in zip(*row, strict=True)]
            spans.append([tree[0] for tree in trees])
            labels.append([tree[1] for tree in trees])
        return spans, labels

    def _tree(self, actions: list[int], starts: list[int], ends: list[int]) -> tuple[list[tuple[int, int]], list[str]]:
        opened: list[str] = []
        spans, labels = [], []
        for action, start, end in zip(actions, starts, ends, strict=True):
            if action >= self.first:
                opened.append(self.config.nonterminals[action - self.first])
            elif action == REDUCE:
                spans.append((start, end))
                labels.append(opened.pop())
        return spans, labels

    def word_logits(self, predictor: Tensor) -> Tensor:
        """Logits [..., V] of the next word, float32; under "search" -inf at padding and end tokens."""
        logits = self.lm_head(predictor).float()
        if self.normalization == "search":
            logits[..., self.config.pad_token_id] = NEG_INF
            if self.end_token_ids is not None:
                logits[..., self.end_token_ids] = NEG_INF
        return logits

    def log_probs_of(self, pool: NodePool, nodes: Tensor, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Log-probability [B, R] of one token per sentence [B] in the states `wanted` [B, R]; -inf elsewhere."""
        row, column = wanted.nonzero(as_tuple=True)
        predictor, target = pool.features["predictor"][row, nodes[row, column]], tokens[row, None]
        size = max(1, _CHUNK_ELEMENTS // self.config.vocab_size)
        chunks = []
        for part, chosen in zip(predictor.split(size), target.split(size), strict=True):
            logits = self.word_logits(part)
            chunks.append(logits.gather(1, chosen).squeeze(1) - logits.logsumexp(1))
        result = torch.full(nodes.shape, NEG_INF, device=nodes.device)
        result[row, column] = torch.cat(chunks) if chunks else result.new_zeros(0)
        return result

    def word_log_probs(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Log-probabilities [B, R, V] of the next word."""
        return self.word_logits(pool.feature("predictor", nodes)).log_softmax(-1)
