# SPDX-License-Identifier: Apache-2.0
"""The model side of the search for labeled trees: effects of actions, legal actions, probabilities.

What states are made of is written by the machine of an architecture: RNNG's stack LSTM, the layers of Tree LM.

The slow and obvious version is `Grammar` in `tests/reference/rnng_search.py`, which replays whole prefixes.

A state is a node of the pool, the push that an action made; its stack is a chain of nodes. The authors keep a stack
tensor per hypothesis; here every node has four links:

    open    the innermost open nonterminal (-1 = none)
    corner  the first piece of the last word, or the last composed node: the left corner that an in-order NT takes
    base    (at a nonterminal) the node on which the finished constituent will stand
    outer   (at a nonterminal) the innermost nonterminal that was open before

and `floor`, the depth at which the finished constituent of a nonterminal will stand.

Hypotheses copy nothing.

Source: Noji and Oseki 2021; rules of the authors' `fixed_stack_models.py`, `fixed_stack_in_order_models.py`.

Shapes: B sentences, R rows, N nodes, A action ids, w width of a state, V vocabulary.
"""

import functools
import math
from abc import abstractmethod
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm.search.stack import NodePool, Nodes
from hf_synlm.search.state import NEG_INF, StackMachine, WordEdges, in_full_precision
from hf_synlm.search.token_head import PackedTokenHead, TokenHead
from hf_synlm.trees.transitions import FINISH, PAD, REDUCE, SHIFT

LINKS = ("open", "corner", "base", "outer")
COUNTS = ("floor", "num_open", "consecutive", "inside_word")
# Maximum length of a derivation, at least and per token, as in the authors' code; it bounds unary chains at the end.
_MIN_LENGTH, _LENGTH_PER_TOKEN = 100, 5


class Phase(Enum):
    """What may follow a state, besides more structural actions."""

    CONTINUE = "a word"
    END = "the end of the sentence"
    EITHER = "a word or the end"


class State(NamedTuple):
    """Integer fields of some states, each [B, R], in the order of the pool."""

    predecessor: Tensor
    below: Tensor
    depth: Tensor
    action: Tensor
    token: Tensor
    start: Tensor
    length: Tensor
    open: Tensor
    corner: Tensor
    base: Tensor
    outer: Tensor
    floor: Tensor
    num_open: Tensor
    consecutive: Tensor
    inside_word: Tensor


class Seen(NamedTuple):
    """What is known of some states."""

    nodes: Tensor
    """[B, R] their ids."""
    fields: Tensor
    """[B, R, 2 or 3, F] fields of the states, of their innermost open nonterminals, and in-order of their corners."""
    predictor: Tensor
    """[B, R, w]."""

    def state(self, which: int) -> State:
        """Fields of the states (0), their open nonterminals (1) or their corners (2)."""
        return State(*self.fields[:, :, which].unbind(-1))

    def column(self, name: str, which: int = 0) -> Tensor:
        """One field [B, R]; `which` as for `state`."""
        return self.fields[:, :, which, State._fields.index(name)]

    def rows(self, rows: slice) -> "Seen":
        """Some rows of every sentence."""
        return Seen(*(value[:, rows] for value in self))

    def take(self, index: Tensor) -> "Seen":
        """The states `index` [B, R']."""
        count = self.nodes.shape[1]
        flat = (index + torch.arange(0, len(index) * count, count, device=index.device)[:, None]).flatten()
        return Seen(*(v.flatten(0, 1).index_select(0, flat).view(*index.shape, *v.shape[2:]) for v in self))


def first_true(mask: Tensor, count: int) -> Tensor:
    """Indices where a mask [R] is True. The known number of them, `count`, avoids a device sync."""
    return (~mask).to(torch.uint8).argsort(stable=True)[:count]


def chosen_rows(mask: Tensor) -> Tensor | None:
    """Flat places where a mask is true, on a CPU; elsewhere None = all, as counting would wait for the device."""
    return mask.flatten().nonzero().squeeze(1) if mask.device.type == "cpu" else None


def flat_rows(values: Tensor, which: Tensor | None) -> Tensor:
    """Values [B, R] as [Q], those at the flat places `which` [Q] only; None = all."""
    return values.flatten() if which is None else values.flatten()[which]


class LabeledStackMachine(StackMachine):
    """Runs a model with heads on node pools, whose nodes have the feature "predictor" [w].

    `normalization` is "search" or "train" (see `LabeledTreeConfig`). `end_token_ids` [E] stand for the end of a
    sentence and are not words; None = all ids are words.
    """

    pad_action, token_action = PAD, SHIFT
    shifts_ahead = False
    """Whether words cost less in the call of the next `push`, for which `shift` can wait."""

    def __init__(self, model: Any, normalization: str | None = None, end_token_ids: Tensor | None = None) -> None:
        self.config, self.dtype = model.config, model.dtype
        self.model, self.lm_head = model.base_model, model.lm_head
        self.normalization = self.config.normalization if normalization is None else normalization
        self.end_token_ids = end_token_ids
        if self.normalization not in ("search", "train"):
            raise ValueError(f"normalization {self.normalization!r} is unknown. Choose 'search' or 'train'.")
        self.in_order, system = self.config.in_order, self.config.system
        self.first, self.num_actions = system.first_nonterminal, system.num_actions
        self._told_ends = False  # of words, by the caller
        self._make_tables()
        self._prepare(model)

    # ----------------------------------------------------------------------------------------- what a model writes
    @abstractmethod
    def _prepare(self, model: Any) -> None:
        """Hook: lay out the weights as they are now."""

    @abstractmethod
    def push(self, pool: NodePool, seen: Seen, actions: Tensor, num_tokens: Tensor, live: Tensor) -> Tensor:
        """Take one structural action from each of R states: ids of the new nodes [B, R'].

        Rows that are `live` are the first of each sentence, R' is the largest number of them; nothing else is computed.
        `num_tokens` [B] are those before.
        """

    @abstractmethod
    def shift(
        self,
        pool: NodePool,
        nodes: Tensor,
        tokens: Tensor,
        num_tokens: Tensor,
        edges: WordEdges | None,
        live: Tensor,
        waits: bool = False,
    ) -> Tensor:
        """Generate a word from each of R states: ids of the new nodes [B, R].

        Nothing is computed for rows that are not `live`. `num_tokens` [B] are those before; `edges` tell which tokens
        end a word, None = what the model knows of its tokens. With `waits`, see `shifts_ahead`, `push` does it.
        """

    @abstractmethod
    def action_logits(self, seen: Seen) -> Tensor:
        """Logits [B, R, A] of the next action, float32."""

    def watch_attention(self, kind: str) -> None:
        """Note the attention entropy of every word, for models that attend to derivations."""
        raise ValueError(
            f"attention_entropy={kind!r} (--attention-entropy): {type(self.model).__name__} does not attend to "
            "derivations. Leave this option out, or choose a Tree LM or a Transformer Grammar."
        )

    def _make_tables(self) -> None:
        """Tables of what never changes."""
        kinds = torch.arange(self.num_actions, device=self.model.device)
        self._kind = kinds.clamp(max=self.first)
        self.not_structural = (kinds != REDUCE) & (kinds < self.first)
        # What an NT adds to the fields of a state.
        counted = [name in ("depth", "length", "num_open", "consecutive") for name in State._fields]
        self._plus = torch.tensor(counted, dtype=torch.long, device=kinds.device)
        # Below which values of its fields a state is not full, not inside a word, and not right after an NT.
        limits = {"num_open": self.config.max_open_nonterminals, "consecutive": self.config.consecutive_limit}
        limits |= {"inside_word": 1, "action": self.first}
        values = [min(limits.get(name, math.inf), 2**62) for name in State._fields]
        self._limits = torch.tensor(values, device=kinds.device)

    @functools.cached_property
    @in_full_precision
    def _words(self) -> PackedTokenHead:
        return PackedTokenHead(self.lm_head, self.special_ids)

    # ---------------------------------------------------------------------------------------------------- nodes
    def look(self, pool: NodePool, nodes: Tensor) -> Seen:
        """What is known of the states `nodes` [B, R]; two reads of the pool."""
        self._told_ends |= pool.told_ends
        width, links = pool.fields.shape[2], State._fields.index("open")
        own = pool.fields.gather(1, nodes[..., None].expand(-1, -1, width))[:, :, None]
        # In-order, the corner is read as well.
        linked = own[:, :, 0, links : links + 1 + self.in_order].clamp(min=0)
        others = pool.fields.gather(1, linked.flatten(1)[..., None].expand(-1, -1, width))
        return Seen(nodes, torch.cat([own, others.unflatten(1, linked.shape[1:])], 2), pool.feature("predictor", nodes))

    def _append_words(
        self, pool: NodePool, nodes: Tensor, tokens: Tensor, num_tokens: Tensor, edges: WordEdges | None
    ) -> Tensor:
        """Integer fields of the nodes of SHIFT; returns their ids [B, R]."""
        pool.told_ends |= edges is not None
        before = self.look(pool, nodes).state(0)
        first = pool.reserve(nodes.shape[1])
        own = torch.arange(first, pool.size, device=nodes.device).expand_as(nodes)
        none, zero = torch.full_like(nodes, -1), torch.zeros_like(nodes)
        after = State(
            predecessor=nodes, below=nodes, depth=before.depth + 1, action=zero + SHIFT, token=tokens,
            start=num_tokens[:, None].expand_as(nodes), length=before.length + 1, open=before.open,
            corner=torch.where(before.inside_word > 0, before.corner, own), base=none, outer=none,
            floor=zero, num_open=before.num_open, consecutive=zero,
            inside_word=self._starts_inside(tokens, num_tokens, edges),
        )  # fmt: skip
        torch.stack(after, -1, out=pool.fields[:, first : pool.size])
        return own

    def end(self, pool: NodePool, nodes: Tensor, num_tokens: Tensor) -> Tensor:
        """End the sentences of states [B, R]; returns the new nodes [B, R], which have no vectors: nothing follows."""
        seen, is_top_down = self.look(pool, nodes), self.first <= FINISH
        actions = torch.full_like(nodes, REDUCE if is_top_down else FINISH)
        first = pool.reserve(nodes.shape[1])
        own = torch.arange(first, pool.size, device=nodes.device).expand_as(nodes)
        if is_top_down:  # the last REDUCE ends the sentence
            pool.fields[:, first : pool.size] = self._structural(seen, own, actions, num_tokens)
            return own
        # FINISH leaves the stack as it is.
        before = seen.state(0)
        after = before._replace(
            predecessor=nodes, action=actions, token=torch.full_like(nodes, -1), length=before.length + 1,
            consecutive=torch.zeros_like(nodes),
        )  # fmt: skip
        torch.stack(after, -1, out=pool.fields[:, first : pool.size])
        return own

    def _structural(self, seen: Seen, own: Tensor, actions: Tensor, num_tokens: Tensor) -> Tensor:
        """Integer fields [B, R, F] of the new nodes of NT and REDUCE."""
        before, opened = seen.state(0), seen.state(1)
        more = State(*(seen.fields[:, :, 0] + self._plus).unbind(-1))
        none, zero = torch.full_like(own, -1), torch.zeros_like(own)
        base, start, floor = seen.nodes, num_tokens[:, None].expand_as(own), more.depth
        if self.in_order:
            corner = seen.state(2)
            base, start, floor = corner.below, corner.start, corner.depth
        opening = more._replace(
            predecessor=seen.nodes, below=seen.nodes, action=actions, token=none, start=start, open=own, corner=own,
            base=base, outer=before.open, floor=floor,
        )  # fmt: skip
        consecutive = before.consecutive * (before.action >= self.first) if self.in_order else zero
        closing = State(
            predecessor=seen.nodes, below=opened.base, depth=opened.floor, action=actions, token=none,
            start=opened.start, length=more.length, open=opened.outer, corner=own, base=none, outer=none, floor=zero,
            num_open=before.num_open - 1, consecutive=consecutive, inside_word=before.inside_word,
        )  # fmt: skip
        opens = (actions >= self.first)[..., None]
        return torch.where(opens, torch.stack(opening, -1), torch.stack(closing, -1))

    def _starts_inside(self, tokens: Tensor, num_tokens: Tensor, edges: WordEdges | None) -> Tensor:
        """1 where more pieces of a word must follow a token [B, R] that is generated now, else 0."""
        if edges is not None:
            ends = edges.is_end.gather(1, num_tokens.clamp(max=edges.is_end.shape[1] - 1)[:, None])
            return (~ends).long().expand_as(tokens)
        ends = self.word_ends_of(tokens.clamp(min=0))
        return torch.zeros_like(tokens) if ends is None else (~ends).long()

    def word_ends_of(self, tokens: Tensor) -> Tensor | None:
        """Which tokens end a word, as far as the model knows; None = every token does."""
        return self.model.word_ends_of(tokens)

    # --------------------------------------------------------------------------------------------- probabilities
    @in_full_precision
    def action_log_probs(self, seen: Seen, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Log-probabilities [B, R, A] of the next action, -inf where illegal in this phase."""
        logits, legal = self.action_logits(seen), self.legal_actions(seen, num_tokens, phase)
        if self.normalization == "search":
            logits = logits.masked_fill(~self._chosen_from(legal, seen, num_tokens, phase), NEG_INF)
        return logits.log_softmax(-1).masked_fill(~legal, NEG_INF)  # some states have no legal action

    def _chosen_from(self, legal: Tensor, seen: Seen, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Actions [B, R, A] that share one probability: `legal` ones, and those that ends of words bar.

        Ends that the model does not know by `subwords` tell what comes next: what they bar is lost, and not spread over
        what may come.
        """
        if self.config.subwords or not self._told_ends:
            return legal
        fields = seen.fields.clone()
        fields[:, :, 0, State._fields.index("inside_word")] = 0
        return legal | self.legal_actions(seen._replace(fields=fields), num_tokens, phase)

    def legal_actions(self, seen: Seen, num_tokens: Tensor, phase: Phase) -> Tensor:
        """Which actions states may take [B, R, A]: the rules of the authors' search.

        Their limits of storage are left out, but for that of the derivation's length at the end of a sentence: before,
        they depend on how long it will be. In-order, a state that is full may still open constituents. It closes none
        before the next word, or with `max_open_nonterminals` before the last one: `generate` does not end the sentence.
        """
        now = seen.state(0)
        ending = phase is Phase.END
        under, is_open = State(*(seen.fields[:, :, 0] < self._limits).unbind(-1)), now.num_open > 0
        if self.in_order:
            begun = now.depth > 0
            free = under.inside_word | ending  # the end of the text ends a word
            room = under.num_open & under.consecutive
            reduce = is_open & free
            opens = under.action & begun & free
            if ending:
                longest = (_LENGTH_PER_TOKEN * num_tokens).clamp(min=_MIN_LENGTH)[:, None]
                opens = opens & room & (longest - now.length >= now.num_open + self.first)
            else:
                reduce = reduce & room
            # A lone tree or word must get a parent before the next word.
            shift = ~begun | is_open | ~free
            finish = ~is_open & (now.depth == 1) & begun & free
        else:
            # The last REDUCE ends the sentence.
            reduce, shift = (now.num_open > 1 if phase is Phase.CONTINUE else is_open) & under.action, is_open
            opens = under.num_open & under.consecutive & (is_open | (now.depth == 0))
            if not ending:
                reduce, opens = reduce & under.inside_word, opens & under.inside_word
        never = torch.zeros_like(is_open)
        kinds = [never, never if ending else shift, reduce, opens]
        if self.in_order:
            kinds.insert(FINISH, never if phase is Phase.CONTINUE else finish)
        elif ending:
            kinds[-1] = never
        return torch.stack(kinds, -1).index_select(2, self._kind)

    @in_full_precision
    def price_of_ends(self, pool: NodePool, nodes: Tensor, num_tokens: Tensor) -> Tensor:
        """What knowing the length has added to log p of complete derivations, as a number [B, R] of at most 0.

        The search takes for certain that a sentence goes on before its last word (`Phase.CONTINUE`) and that it is over
        after it (`Phase.END`). As in generation, every state may do both here; added to the scores of the search, this
        number makes them log-probabilities among texts of all lengths. It is 0 under "train".

        Cost: one row of the action head for every action.
        """
        price, is_over = torch.zeros(nodes.shape, device=nodes.device), torch.ones_like(nodes, dtype=torch.bool)
        if self.normalization == "train":
            return price
        for _ in range(max(pool.field("length", nodes).flatten().tolist(), default=0)):
            last = pool.nodes(nodes)
            is_over, nodes = is_over & (last.action != SHIFT), last.predecessor.clamp(min=0)
            seen = self.look(pool, nodes)
            logits, inside = self.action_logits(seen), seen.column("inside_word")[..., None] * self.config.subwords > 0
            goes_on, ends = (
                self._chosen_from(self.legal_actions(seen, num_tokens, phase), seen, num_tokens, phase)
                for phase in (Phase.CONTINUE, Phase.END)
            )
            log_probs = logits.masked_fill(~(goes_on | (ends & ~inside)), NEG_INF).log_softmax(2)
            certain = torch.where(is_over[..., None], ends, goes_on)
            chance = log_probs.masked_fill(~certain, NEG_INF).logsumexp(2)
            price = torch.where(last.predecessor < 0, price, price + chance)
        return price

    def end_action(self, seen: Seen) -> tuple[int, Tensor]:
        """The action that ends a sentence, and in which states [B, R] it does."""
        if self.first > FINISH:
            return FINISH, torch.ones_like(seen.nodes, dtype=torch.bool)
        return REDUCE, seen.column("num_open") == 1

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
        return TokenHead(self.lm_head, self.config.vocab_size, self.special_ids).logits(predictor)

    @functools.cached_property
    def special_ids(self) -> Tensor | None:
        """Words that may not be generated [E]: under "search" padding and end tokens; None = all may."""
        if self.normalization != "search":
            return None
        padding = torch.tensor([self.config.pad_token_id], device=self.model.device)
        return padding if self.end_token_ids is None else torch.cat([padding, self.end_token_ids.to(padding)])

    @in_full_precision
    def log_probs_of(self, predictor: Tensor, tokens: Tensor, wanted: Tensor, bound: bool = False) -> Tensor:
        """Log-probability [B, R] of one token per sentence [B] in the states that are `wanted`, from vectors [B, R, w].

        On a CPU the other states get -inf, and with `bound` the wanted ones upper bounds; elsewhere, where counting
        would wait, all are computed.
        """
        which, vectors = chosen_rows(wanted), predictor.flatten(0, 1)
        target = flat_rows(tokens[:, None].expand_as(wanted), which)
        if which is None:
            return self._words.log_probs(vectors, target).view_as(wanted)
        score = self._words.bound if bound else self._words.log_probs
        scores = torch.full((wanted.numel(),), NEG_INF, dtype=torch.float32, device=wanted.device)
        scores[which] = score(vectors[which], target).float()
        return scores.view_as(wanted)

    def vocabulary_log_probs(self, seen: Seen) -> Tensor:
        """Log-probabilities [B, R, V] of the next word."""
        return self.word_logits(seen.predictor).log_softmax(-1)
