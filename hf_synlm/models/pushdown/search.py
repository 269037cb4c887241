# SPDX-License-Identifier: Apache-2.0
"""Word-synchronous beam search of Pushdown Layers: one attachment, then one word.

A hypothesis has read the same words as the others and has attached all but the last one. One step

1. attaches the last word in all legal ways (to a constituent on the stack, or to no constituent), and keeps the K best;
2. runs the layers on the last word, which now sees the new tape;
3. generates the next word.

So each word costs one batch of K rows. The end word of a sentence has one legal attachment, to the begin token.
Probabilities of illegal attachments are lost, as in the authors' program. The decision about a word, its lost
probability and the cut of the beam are charged to the next word: what is summed at a word is p(words so far).

Two nodes of the pool stand for a word: WORD has its id, the next node its attachment, with the keys and values of the
layers, its row of the tape, and its constituent (`start`, `below`, `depth`: the stack).

Source: Murty et al. 2023, `BeamSearchDepthBased` of the authors' program, which copies and recomputes the states of all
hypotheses.

Shapes: B sentences, K hypotheses, S positions of the longest hypothesis, D width, V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.losses import linear_cross_entropy
from hf_synlm.core.module_tools import unwrapped, weight_of
from hf_synlm.search.next_tokens import Process, add_block, draw_index
from hf_synlm.search.stack import Levels, NodePool, Nodes, grown
from hf_synlm.search.state import (
    NEG_INF,
    Block,
    BlockTable,
    Candidates,
    GeneratingSearch,
    Scored,
    SearchState,
    StackMachine,
    check_count,
    in_full_precision,
    keep_frozen,
)
from hf_synlm.search.tree_attention import PathCache
from hf_synlm.trees.prefixes import Prefixes

WORD = 0
_TO_BEGIN = 1  # the action that attaches to position 0


class PushdownMachine(StackMachine):
    """Runs a Pushdown language model with heads on node pools."""

    pad_action, token_action = -1, WORD

    def __init__(self, model: Any) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.model, self.lm_head, self.head = model.base_model, model.lm_head, model.attachment_head

    def begin(self, batch_size: int, device: torch.device, tape: int = 64) -> tuple[NodePool, Tensor]:
        """The pool, with room for rows of the `tape`, and the begin token [B, 1]."""
        width = self.config.hidden_size
        features = {f"layer_{number}": (2 * width, self.dtype) for number in range(self.config.num_hidden_layers)}
        features |= {
            "hidden": (width, self.dtype),
            "key": (self.head.key_size, self.dtype),
            "tape": (tape, torch.int32),
        }
        pool = NodePool(batch_size, features, device, links=("before",), counts=("position", "word"))
        none = torch.full((batch_size, 1), -1, device=device)
        zero = torch.zeros_like(none)
        token = torch.full_like(none, self.config.bos_token_id)
        pool.append(Nodes(none, none, zero, none, none, none), none, zero, token)
        path = zero[..., None][..., :0]
        self.read(pool, path, zero)
        return pool, zero

    def path(self, pool: NodePool, ids: Tensor, length: int) -> Tensor:
        """Attached positions 0, 1, .. of the derivations that end in the nodes `ids` [B, K]; -1 behind them."""
        newest_first = pool.follow("before", ids, length)
        index = pool.field("position", ids)[..., None] - torch.arange(length, device=ids.device)
        return newest_first.gather(2, index.clamp(min=0)).masked_fill(index < 0, -1)

    @in_full_precision
    def read(self, pool: NodePool, path: Tensor, own: Tensor) -> None:
        """Run the layers on the attached nodes `own` [B, K] behind `path` [B, K, S]."""
        position = pool.field("position", own).flatten()
        before, places = pool.places(path).flatten(0, 1), pool.places(own).flatten()
        # The row itself is the last column.
        columns = F.pad(torch.arange(path.shape[2], device=own.device).expand_as(before), (0, 1))
        columns[:, -1] = position
        mask = F.pad(path.flatten(0, 1) >= 0, (0, 1), value=True)[:, None]
        distance = (position[:, None] - columns).clamp(min=0)[:, None]
        tape = pool.features["tape"].flatten(0, 1)[places].long().gather(1, columns)[:, None]
        tokens = pool.field("word", own).flatten()
        embedded = self.model.embed(tokens)[:, None]
        hidden = self.model.decode(embedded, mask, distance, tape, PathCache(pool, before, places))[-1][:, 0]
        pool.features["hidden"].flatten(0, 1)[places] = hidden.to(self.dtype)
        pool.features["key"].flatten(0, 1)[places] = self.head.keys(hidden).to(self.dtype)

    @in_full_precision
    def attachment_log_probs(self, pool: NodePool, before: Tensor, path: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities [B, K, S + 1] of attaching `tokens` [B, K] behind the attached nodes `before` [B, K]."""
        flat = path.flatten(0, 1)
        tape = pool.feature("tape", before).flatten(0, 1)[:, None, : flat.shape[1]].long()
        scores = self.head(
            pool.feature("hidden", before).flatten(0, 1)[:, None],
            self.model.embed_tokens(tokens).flatten(0, 1)[:, None],
            pool.feature("key", path).flatten(0, 1),
            self.model.clip_tape(tape),
            pool.field("position", before).flatten()[:, None],
        )
        return scores.float().log_softmax(-1).view(*path.shape[:2], -1)

    @in_full_precision
    def logits(self, pool: NodePool, nodes: Tensor) -> Tensor:
        """Logits [B, K, V] of the next word behind the attached nodes, float32."""
        return self.lm_head(pool.feature("hidden", nodes)).float()

    def log_probs_of_trees(self, ids: Tensor, attachments: Tensor, tape: Tensor, prefixes: Prefixes) -> Tensor:
        """Log p(text, tree) [K] in nats of trees of one text, each distinct beginning a node that is read once.

        `ids` and `attachments` [K, P] (-100 = not attached) and `tape` [K, P, P] are those of `PushdownModel.lay_out`.
        """
        row, position, place = prefixes
        pool, _ = self.begin(1, ids.device, tape.shape[2])
        new = slice(1, None)  # the begin token is there already
        none = torch.full_like(row[None, new], -1)
        rows = tape[row, position][None, new].int()
        pool.append(Nodes(*[none] * 6), none, position[None, new], ids[:1, position[new]], tape=rows)
        columns, nodes = (torch.arange(count, device=row.device) for count in (ids.shape[1], len(row)))
        path = torch.where(columns <= position[:, None], place[row], -1)[None]
        before = path.masked_fill(path == nodes[:, None], -1)
        self.read(pool, before[:, new, :-1], nodes[None, new])
        # The states that predict a word and its attachment.
        node = (position < ids.shape[1] - 1).nonzero().T
        words, hidden = ids[0, position[node] + 1], pool.feature("hidden", node)[0]
        weights, bias = torch.ones_like(words[0]), unwrapped(self.lm_head).bias
        _, loss = linear_cross_entropy(hidden, weight_of(self.lm_head), words[0], weights, bias)
        attached = self.attachment_log_probs(pool, node, path[:, node[0], :-1], words)[0]
        number = torch.empty_like(position).scatter_(0, node[0], nodes[: node.shape[1]])
        own, decided = number[place[:, :-1]], attachments[:, 1:]
        log_probs = attached[own, decided.clamp(min=0)].masked_fill(decided < 0, 0) - loss[own]
        return log_probs.sum(1)

    def trees(self, nodes: Nodes) -> tuple[list[list[list[tuple[int, int]]]], None]:
        """Spans of derivations [B, K, A]; constituents left on the stack are closed from the right."""
        fields = (nodes.action.tolist(), nodes.start.tolist())
        return [[_tree(*parts) for parts in zip(*rows, strict=True)] for rows in zip(*fields, strict=True)], None


def _tree(actions: list[int], starts: list[int]) -> list[tuple[int, int]]:
    """Spans of one derivation. What ends the sentence, attached to the begin token or not at all, is joined last."""
    stack: list[int] = []  # first tokens of constituents
    spans: list[tuple[int, int]] = []

    def join(lowest: int, end: int) -> None:
        while len(stack) > 1 and stack[-1] > lowest:
            stack.pop()
            spans.append((stack[-1], end))

    num_words = 0
    for place, (action, start) in enumerate(zip(actions, starts, strict=True)):
        if action == WORD:
            following = actions[place + 1] if place + 1 < len(actions) else -1
            if following <= _TO_BEGIN:
                join(0, num_words)
            stack.append(num_words)
            num_words += 1
        elif action > _TO_BEGIN:
            join(start, num_words)
    join(0, num_words)
    return spans


class PushdownSearch(GeneratingSearch):
    """Word-synchronous beam search with a Pushdown language model; see the head of this file."""

    def __init__(self, machine: PushdownMachine, num_beams: int, eos_token_ids: Tensor | None = None) -> None:
        check_count("num_beams", num_beams)
        self.machine, self.num_beams, self.eos_token_ids = machine, num_beams, eos_token_ids

    # -------------------------------------------------------------------------------------------------- attachment
    def expand(self, state: SearchState, draw: bool = False, closing: bool = False) -> Block:
        """Attach the last words and run the layers on them: the K best derivations, or a drawn one.

        An end token is shifted with probability 1, unless the text ends with it (`closing`).
        """
        pool, nodes = state.pool, state.nodes
        tokens = pool.field("token", nodes)
        eos = self.machine.config.eos_token_id
        is_end = tokens == (-1 if eos is None else eos)
        pending = (tokens >= 0) & (pool.field("action", nodes) == WORD) & ~(is_end & closing)
        before = torch.where(pool.field("action", nodes) == WORD, pool.field("before", nodes), nodes)
        path = self.machine.path(pool, before, int(pool.field("position", before).max()) + 1)
        log_probs = self.machine.attachment_log_probs(pool, before, path, tokens.clamp(min=0))
        legal = self._legal(state, before, path, tokens)
        shift = F.one_hot(pool.field("position", before) + 1, log_probs.shape[2]).bool()
        # What has nothing to attach goes on as it is, under the column of shifting.
        attaches = (pending & ~is_end)[..., None]
        log_probs = torch.where(attaches, log_probs.masked_fill(~legal, NEG_INF), NEG_INF)
        log_probs = log_probs.masked_fill(shift & ~attaches, 0.0)
        total = (state.scores[..., None] + log_probs).flatten(1)
        if draw:
            index = draw_index(total)
            scores = total.gather(1, index)
        else:
            scores, index = total.sort(dim=1, descending=True, stable=True)
        width = min(self.num_beams, int((scores > NEG_INF).sum(1).amax().clamp(min=1)))
        scores, index = scores[:, :width], index[:, :width]
        origin, place = index // log_probs.shape[2], index % log_probs.shape[2]
        own = self._attach(pool, nodes.gather(1, origin), before.gather(1, origin), place, path, origin)
        kept = torch.where(pending.gather(1, origin), own, nodes.gather(1, origin))
        chosen = log_probs.flatten(1).gather(1, index)[..., None]
        share = scores.logsumexp(1) - total.logsumexp(1) if self.keeps_scored else None
        levels = Levels([width], origin.device)
        return Block(kept, scores, chosen, origin, torch.ones_like(origin[0]), levels, kept=share)

    def _stack(self, pool: NodePool, before: Tensor, path: Tensor) -> Tensor:
        """Which columns of paths are on the stack of the nodes `before` [B, K]: [B, K, S]."""
        depth = pool.field("depth", before) + 1  # and the begin token
        items = pool.follow("below", before, int(depth.max()))
        exists = torch.arange(items.shape[2], device=items.device) < depth[..., None]
        position = pool.field("position", items.flatten(1)).view_as(items)
        position = torch.where(exists, position, path.shape[2])
        found = torch.zeros(*path.shape[:2], path.shape[2] + 1, dtype=torch.bool, device=path.device)
        return found.scatter(2, position, True)[..., :-1]

    def _legal(self, state: SearchState, before: Tensor, path: Tensor, tokens: Tensor) -> Tensor:
        """Legal attachments [B, K, S + 1] of pending words: to the stack without the begin token, or shifting."""
        pool, position = state.pool, state.pool.field("position", before)[..., None]
        place = torch.arange(path.shape[2] + 1, device=path.device)
        legal = F.pad(self._stack(pool, before, path), (0, 1)) & (place > 0) | (place == position + 1)
        if state.edges is not None:
            # A constituent lies inside a word, or its first and last token are edges of words.
            last = position.clamp(max=state.edges.is_end.shape[1] - 1)
            start = F.pad(pool.field("start", path.flatten(1)).view_as(path), (0, 1))
            start = torch.where(place == position + 1, position, start).clamp(min=0)
            first = state.edges.word_start[:, None].expand(-1, start.shape[1], -1)
            is_end = state.edges.is_end[:, None].expand(-1, start.shape[1], -1).gather(2, last)
            word = first.gather(2, last)
            inside = start.clamp(max=first.shape[2] - 1)
            whole = (inside <= word) & (first.gather(2, inside) == inside)
            legal = legal & torch.where(is_end, whole, start >= word)
        end = self.machine.config.end_token_id
        return legal if end is None else torch.where((tokens == end)[..., None], place == 0, legal)

    def _attach(
        self, pool: NodePool, nodes: Tensor, before: Tensor, place: Tensor, path: Tensor, origin: Tensor
    ) -> Tensor:
        """New nodes [B, R] that attach the words of `nodes` at `place`, with the layers run on them."""
        path = path.gather(1, origin[..., None].expand(-1, -1, path.shape[2]))
        position = pool.field("position", before) + 1
        shifts = place >= position
        item = path.gather(2, place.clamp(max=path.shape[2] - 1)[..., None])[..., 0]
        below = torch.where(shifts, before, pool.field("below", item))
        depth = torch.where(shifts, pool.field("depth", before) + 1, pool.field("depth", item))
        start = torch.where(shifts, position - 1, pool.field("start", item))
        tape = self._tape(pool, before, path, place, position)
        made = Nodes(nodes, below, depth, 1 + place, torch.full_like(nodes, -1), start)
        length = pool.field("length", nodes) + 1
        word = pool.field("token", nodes).clamp(min=0)
        width = pool.features["tape"].shape[2]
        if tape.shape[2] > width:
            pool.features["tape"] = grown(pool.features["tape"], 2, max(tape.shape[2], 2 * width))
        tape = F.pad(tape, (0, pool.features["tape"].shape[2] - tape.shape[2]))
        own = pool.append(made, before, position, word, length=length, tape=tape.int())
        self.machine.read(pool, path, own)
        return own

    def _tape(self, pool: NodePool, before: Tensor, path: Tensor, place: Tensor, position: Tensor) -> Tensor:
        """Rows [B, R, S + 1] of the tape at new positions: one more for every constituent that is joined there."""
        columns = torch.arange(path.shape[2] + 1, device=path.device)
        joined = self._stack(pool, before, path) & (columns[:-1] >= place[..., None])
        first = (pool.field("start", path.flatten(1)).view_as(path) + 1).clamp(min=0)
        held = torch.zeros_like(columns).expand(*path.shape[:2], -1).scatter_add(2, first, joined.long()).cumsum(2)
        old = F.pad(pool.feature("tape", before).long(), (0, 1))[..., : len(columns)]
        return old + held * (columns <= position[..., None])

    # ------------------------------------------------------------------------------------------------------- words
    def propose(
        self, state: SearchState, tokens: Tensor, block: Block | None = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given word [B] per sentence."""
        block = self.expand(state) if block is None else block
        words = tokens[:, None].expand_as(block.nodes)
        scores = block.scores + self._log_probs_of(state.pool, block.nodes, words)
        self.scored = Scored(block.scores, scores, block.origin, block.kept)
        return Candidates(scores, block.nodes, words, block.origin, block.level.expand_as(words))

    def _log_probs_of(self, pool: NodePool, nodes: Tensor, tokens: Tensor) -> Tensor:
        logits = self.machine.logits(pool, nodes)
        return -F.cross_entropy(logits.flatten(0, 1), tokens.flatten(), reduction="none").view(nodes.shape)

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the word of every candidate, without its attachment."""
        return self._log_probs_of(state.pool, chosen.parents, chosen.tokens)

    def next_token_log_probs(self, state: SearchState) -> Tensor:
        """Log-probabilities [B, V] of the next word given the prefix, derivations summed out; keeps the block."""
        if state.next_log_probs is None:
            state.block = self.expand(state) if state.block is None else state.block
            weights = state.block.scores.log_softmax(1)
            log_probs = self.machine.logits(state.pool, state.block.nodes).log_softmax(-1)
            state.next_log_probs = (weights[..., None] + log_probs).logsumexp(1)
        return state.next_log_probs

    def propose_tokens(
        self, state: SearchState, process: Process | None, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """The best K derivations that generate one more word; see `NextTokens`."""
        block, ends, ended = self.expand(state), self.eos_token_ids, None
        words = self._word_log_probs(state, block)
        words = words if process is None else process(block.origin, words)
        summed = add_block(None, state, block, block.scores, words) if keep_scores else None
        if ends is not None:
            ended = self._best(block, words[..., ends], ends)
            words = words.index_fill(2, ends, NEG_INF)
        return self._best(block, words, torch.arange(words.shape[2], device=words.device)), ended, summed

    def _word_log_probs(self, state: SearchState, block: Block) -> Tensor:
        """Log-probabilities [B, R, V] of the next word; a sentence does not end before its first one."""
        log_probs = self.machine.logits(state.pool, block.nodes).log_softmax(-1)
        if self.eos_token_ids is not None:
            empty = (state.num_tokens == 0)[:, None, None]
            ends = log_probs[..., self.eos_token_ids].masked_fill(empty, NEG_INF)
            log_probs[..., self.eos_token_ids] = ends
        return log_probs

    def _best(self, block: Block, words: Tensor, tokens: Tensor) -> Candidates:
        """The K best continuations by `tokens` [G], whose log-probabilities are [B, R, G]."""
        total = (block.scores[..., None] + words).flatten(1)
        scores, index = total.topk(min(self.num_beams, total.shape[1]))
        return BlockTable([block]).candidates(scores, index // len(tokens), tokens[index % len(tokens)])

    def draw_token(self, state: SearchState, process: Process | None) -> tuple[Candidates, Tensor]:
        """Draw an attachment of the last word from its posterior, then the next word.

        Arguments and results: see `NextTokens.draw_token`.
        """
        block = self.expand(state, draw=True)
        log_probs = self._word_log_probs(state, block)
        scores = log_probs if process is None else process(block.origin, log_probs.clone())
        token = draw_index(scores[:, 0])
        total = block.scores + log_probs[:, 0].gather(1, token)
        total = total.masked_fill(scores[:, 0].gather(1, token) == NEG_INF, NEG_INF)
        return BlockTable([block]).candidates(total, torch.zeros_like(token), token), scores[:, 0]

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen words: the new beam, and the candidate from which each hypothesis comes."""
        pool = state.pool
        moving = torch.ones_like(state.num_tokens, dtype=torch.bool) if active is None else active
        chosen = keep_frozen(state, chosen, moving)
        order = chosen.scores.argsort(dim=1, descending=True, stable=True)
        scores, parents, tokens = (x.gather(1, order) for x in (chosen.scores, chosen.parents, chosen.tokens))
        alive = scores > NEG_INF
        lengths = pool.field("length", parents).masked_fill(~alive, 0)
        keep = pool.in_use(parents, alive, int(lengths.amax()) + 1)
        parents = pool.compact(keep, int(keep.sum(1).amax()), parents)
        start = state.num_tokens[:, None].expand_as(parents)
        word = pool.push(parents, WORD, tokens, start)
        own = pool.append(word, parents, pool.field("position", parents) + 1, tokens)
        nodes = torch.where(moving[:, None], own, parents)
        return SearchState(pool, nodes, scores, state.num_tokens + moving, [nodes.shape[1]], state.edges), order

    def close(self, state: SearchState) -> SearchState:
        """Attach the last words; hypotheses best first."""
        block = self.expand(state, closing=True)
        return replace(
            state, nodes=block.nodes, scores=block.scores, origin=block.origin, level_sizes=[block.nodes.shape[1]],
            block=None, next_log_probs=None,
        )  # fmt: skip

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] with the best attachment of each last word; the state stays."""
        pool, size, best = state.pool, state.pool.size, PushdownSearch(self.machine, 1)
        columns = torch.arange(state.nodes.shape[1], device=pool.device).expand_as(state.nodes).split(1, 1)
        blocks = [best.expand(state.with_hypotheses(column), closing=True) for column in columns]
        scores = torch.cat([block.scores for block in blocks], 1)
        nodes = pool.derivations(torch.cat([block.nodes for block in blocks], 1), scores > NEG_INF)
        pool.truncate(size)
        return scores, nodes
