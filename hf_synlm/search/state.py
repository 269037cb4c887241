# SPDX-License-Identifier: Apache-2.0
"""State of a beam search over derivations: word edges, blocks, the beam, and the beam as a cache; and its contracts.

`StackMachine`, `Search` and `GeneratingSearch` say what shared code needs of a model and of its search.

Shapes: B sentences, K hypotheses, R rows of a block, C levels, T tokens, V vocabulary.
All scores are natural logs in float32; -inf marks a hypothesis that does not exist.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.cache import StateCache
from hf_synlm.core.matrix_products import without_autocast
from hf_synlm.search.stack import Levels, NodePool, Nodes

NEG_INF = float("-inf")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raise ValueError unless the argument `name` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {least}")


@dataclass
class WordEdges:
    """Where the words of a text begin and end when tokens are word pieces: a word end is the last piece of a word.

    Fields:
        is_end: [B, T] True at the last piece of a word; T counts tokens of the derivation.
        word_start: [B, T] position of the first piece of the word that holds the token.
    """

    is_end: Tensor
    word_start: Tensor

    @classmethod
    def from_ends(cls, is_end: Tensor) -> "WordEdges":
        """Edges from the flags of the last pieces [B, T]."""
        starts = torch.cat([torch.ones_like(is_end[:, :1]), is_end[:, :-1]], 1)
        position = torch.arange(is_end.shape[1], device=is_end.device)
        return cls(is_end, torch.where(starts, position, 0).cummax(1).values)

    def extended(self, is_end: Tensor, num_tokens: Tensor) -> "WordEdges":
        """Edges with the flags `is_end` [B, W] written from position `num_tokens` [B] on."""
        width = is_end.shape[1]
        table = torch.cat([self.is_end, torch.ones_like(is_end)], 1)
        index = num_tokens[:, None] + torch.arange(width, device=is_end.device)
        return WordEdges.from_ends(table.scatter(1, index, is_end))

    def select_rows(self, index: Tensor) -> "WordEdges":
        """Edges of the sentences `index`."""
        return WordEdges(self.is_end[index], self.word_start[index])


@dataclass
class Block:
    """States and their structural successors, level by level; row (c, k) is state k after c structural actions.

    Fields:
        nodes: [B, R] node ids.
        scores: [B, R] joint log-probability of the derivation so far.
        log_probs: [B, R, 2] log-probabilities of the next action: generate a token, take the structural action; -inf if
            illegal.
        origin: [B, R] which state of the beam the row descends from.
        level: [R] structural actions since the last token.
        levels: Which rows are state k after no structural action, after one, ..
        cut: Whether states of the last level may have structural successors that are not laid out.
        vocabulary_log_probs: [B, R, V], kept if they were computed.
        kept: [B] log of the share that a cut has left, if the search `keeps_scored` and cuts here.
    """

    nodes: Tensor
    scores: Tensor
    log_probs: Tensor
    origin: Tensor
    level: Tensor
    levels: Levels
    cut: bool = False
    vocabulary_log_probs: Tensor | None = None
    kept: Tensor | None = None


@dataclass
class SearchState:
    """Beam of B sentences between two tokens.

    Fields:
        nodes: [B, R] last node of every hypothesis, deepest stack first.
        scores: [B, R] joint log-probabilities; -inf = no hypothesis.
        num_tokens: [B] tokens generated in the current derivation, or [B, R] where hypotheses differ.
        level_sizes: Level c of the next block has at most this many rows.
        origin: [B, R] state of the beam before this one since the last token; None right after a token.
        level: Structural actions since the last token.
        max_depth: Upper bound of all stack depths, known without asking the device.
        max_length: Upper bound of the nodes of a derivation, those before its start included, known likewise.
        block: All structural successors, if they are known already.
        particles: [B, R] number of particles of every hypothesis (particle filter only).
        next_log_probs: [B, V] distribution of the next token, if it is known already.
        ahead: [B, E] nodes of tokens that the search has generated before they were chosen; -1 = none.
    """

    pool: NodePool
    nodes: Tensor
    scores: Tensor
    num_tokens: Tensor
    level_sizes: list[int]
    edges: WordEdges | None = None
    origin: Tensor | None = None
    level: int = 0
    max_depth: int = 0
    max_length: int = 1
    block: Block | None = None
    particles: Tensor | None = None
    next_log_probs: Tensor | None = None
    ahead: Tensor | None = None

    def select_rows(self, index: Tensor) -> None:
        """Keep the sentences `index` [B'], in that order, in place."""
        self.pool.select_rows(index)
        self.ahead = None
        for name in ("nodes", "scores", "num_tokens"):
            setattr(self, name, getattr(self, name).index_select(0, index))
        if self.edges is not None:
            self.edges = self.edges.select_rows(index)
        for name in ("next_log_probs", "particles"):
            if getattr(self, name) is not None:
                setattr(self, name, getattr(self, name).index_select(0, index))
        if self.block is not None:
            for name in ("nodes", "scores", "log_probs", "origin", "vocabulary_log_probs"):
                value = getattr(self.block, name)
                if value is not None:
                    setattr(self.block, name, value.index_select(0, index))

    def with_hypotheses(self, index: Tensor) -> "SearchState":
        """State over the same pool with the hypotheses `index` [B, R'], in that order; its levels are not counted."""
        num_tokens = self.num_tokens if self.num_tokens.dim() == 1 else self.num_tokens.gather(1, index)
        return replace(
            self, nodes=self.nodes.gather(1, index), scores=self.scores.gather(1, index), num_tokens=num_tokens,
            level_sizes=[index.shape[1]], block=None, next_log_probs=None, ahead=None,
        )  # fmt: skip


class Scored(NamedTuple):
    """Everything that a search has scored before it chose, each [B, C]."""

    before: Tensor
    """Log-probability without the token."""
    after: Tensor
    """Log-probability with the token; -inf = not scored."""
    origin: Tensor
    """Hypothesis of the beam that is continued."""
    kept: Tensor | None = None
    """[B] log of the share that an earlier cut has left; None = all."""


@dataclass
class Candidates:
    """Chosen continuations by one token, best first.

    Fields:
        scores: [B, K] joint log-probability including the token.
        parents: [B, K] node from which the token is generated.
        tokens: [B, K] the tokens.
        origin: [B, K] hypothesis of the beam that is continued.
        num_structural: [B, K] structural actions before the token.
    """

    scores: Tensor
    parents: Tensor
    tokens: Tensor
    origin: Tensor
    num_structural: Tensor


@dataclass
class BlockTable:
    """Rows of all blocks of one token."""

    blocks: list[Block] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows so far."""
        return sum(block.nodes.shape[1] for block in self.blocks)

    def candidates(self, scores: Tensor, rows: Tensor, tokens: Tensor) -> Candidates:
        """Look up rows [B, K] of the table."""
        nodes = torch.cat([block.nodes for block in self.blocks], 1)
        origin = torch.cat([block.origin for block in self.blocks], 1)
        level = torch.cat([block.level for block in self.blocks])
        return Candidates(scores, nodes.gather(1, rows), tokens, origin.gather(1, rows), level[rows])


def keep_frozen(state: SearchState, chosen: Candidates, active: Tensor) -> Candidates:
    """Put the old beam in the place of the candidates of the sentences that are not `active` [B]."""
    width = max(chosen.scores.shape[1], state.scores.shape[1])
    own = torch.arange(width, device=active.device).expand(len(active), -1)
    zero = torch.zeros_like(state.nodes)

    def merge(new: Tensor, old: Tensor, fill: float = 0) -> Tensor:
        new, old = (F.pad(x, (0, width - x.shape[1]), value=fill) for x in (new, old))
        return torch.where(active[:, None], new, old)

    return Candidates(
        merge(chosen.scores, state.scores, NEG_INF), merge(chosen.parents, state.nodes), merge(chosen.tokens, zero),
        merge(chosen.origin, own), merge(chosen.num_structural, zero),
    )  # fmt: skip


def in_full_precision(method: Callable[..., Any]) -> Callable[..., Any]:
    """Run a method of a machine, whose model is `model`, in the type of the weights and without gradients.

    Under autocast, rounding would decide which hypotheses survive.
    """

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad(), without_autocast(self.device_type):
            return method(self, *args, **kwargs)

    return run


class StackMachine(ABC):
    """The model side of a search.

    A machine writes `trees(nodes)`: spans of derivations [B, K, A], and their labels if trees are labeled, else None.
    """

    config: Any
    model: Any
    pad_action: int
    """Pads action sequences."""
    token_action: int
    """Adds a token."""
    max_tokens = float("inf")
    """Number of tokens for which the model has positions."""

    @functools.cached_property
    def device_type(self) -> str:
        """Device type of the model, which searches all its parameters for it."""
        return self.model.device.type

    @abstractmethod
    def begin(self, batch_size: int, device: torch.device) -> tuple[NodePool, Tensor]:
        """The pool and the state before the first action [B, 1]; GPST also takes sentences before the text."""

    def word_ends_of(self, tokens: Tensor) -> Tensor | None:
        """Which of the `tokens` [B, T] end a word, as far as the vocabulary tells; None = all."""
        return None


class Search(Protocol):
    """A word-synchronous search for given tokens."""

    machine: Any
    """The model side, a `StackMachine`."""
    num_beams: int
    eos_token_ids: Tensor | None
    keeps_scored = False
    """Whether `propose` scores everything that it reaches, and leaves it in `scored`."""
    scored: Scored | None = None

    def begin(self, batch_size: int, device: torch.device, **context: Any) -> SearchState:
        """State before the first token; `context` goes to the machine (complete sentences before the text)."""
        pool, nodes = self.machine.begin(batch_size, device, **context)
        scores = torch.zeros(nodes.shape, dtype=torch.float32, device=device)
        return SearchState(pool, nodes, scores, torch.zeros_like(nodes[:, 0]), [1], max_length=pool.size)

    def refresh(self, state: SearchState) -> None:
        """Count again what the next token needs, after sentences or hypotheses were selected; by default nothing."""
        return

    def keep(self, state: SearchState, index: Tensor) -> SearchState:
        """The beam with the hypotheses `index` [B, R'] only, over the same pool."""
        return state.with_hypotheses(index)

    def propose(
        self, state: SearchState, tokens: Tensor, block: Block | None = None, active: Tensor | None = None
    ) -> Candidates:
        """The best K derivations that generate one given token [B] per sentence."""

    def commit(
        self, state: SearchState, chosen: Candidates, active: Tensor | None = None, wanted: Tensor | None = None
    ) -> tuple[SearchState, Tensor]:
        """Generate the chosen tokens: the new beam, and the candidate from which each hypothesis comes."""

    def close(self, state: SearchState) -> SearchState:
        """Complete the trees: hypotheses best first, with their log-probabilities among texts of all lengths."""

    def close_each(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the hypotheses with closed trees; the state does not change."""

    def log_probs_of_candidates(self, state: SearchState, chosen: Candidates) -> Tensor:
        """Log-probability [B, K] of the token of every candidate, without the actions before it."""


class GeneratingSearch(Search, Protocol):
    """A word-synchronous search that also generates tokens."""

    def next_token_log_probs(self, state: SearchState) -> Tensor:
        """Log-probabilities [B, V] of the next token given the prefix, derivations summed out."""

    def propose_tokens(
        self, state: SearchState, process: Any, keep_scores: bool = False
    ) -> tuple[Candidates, Candidates | None, Tensor | None]:
        """The best K derivations that generate one more token; see `NextTokens`."""

    def draw_token(self, state: SearchState, process: Any) -> tuple[Candidates, Tensor]:
        """Draw one derivation and its next token per sentence; see `NextTokens`."""


class SyntacticCache(StateCache):
    """The beam of derivations after a prefix, as `past_key_values`.

    It cannot be cropped: a beam forgets what it has dropped.
    `eos_token_ids` are tokens that may only be generated when exactly one tree is on the stack.
    """

    def __init__(self, num_beams: int, eos_token_ids: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.num_beams = num_beams
        self.eos_token_ids = eos_token_ids
        self.begun: Tensor | None = None

    def set_end_tokens(self, eos_token_ids: Tensor | None) -> None:
        """Change the end tokens; distributions computed under other ones are forgotten."""
        old, new = (None if ids is None else ids.tolist() for ids in (self.eos_token_ids, eos_token_ids))
        self.eos_token_ids = eos_token_ids
        if old != new and self.state is not None:
            self.state.block = self.state.next_log_probs = None

    @property
    def batch_size(self) -> int:
        """Number of sentences B; 0 before anything was read."""
        return 0 if self.state is None else self.state.pool.batch_size

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the sentences `beam_idx` [B'], in that order."""
        if self.state is not None:
            index = beam_idx.to(self.state.pool.device, torch.long)
            self.state.select_rows(index)
            self.begun = self.begun.index_select(0, index)

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.begun = None
