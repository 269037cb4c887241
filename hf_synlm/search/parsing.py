# SPDX-License-Identifier: Apache-2.0
"""Reading given text with a beam of derivations: n-best trees, prefix probabilities, next-token distributions.

Shapes: B sentences, T input columns, W words (tokens that count, moved to the left end), K hypotheses, A actions,
V vocabulary. Log-probabilities in nats, float32.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.core.outputs import ParseOutput
from hf_synlm.core.rows import Rows, check_rows
from hf_synlm.core.token_batch import check_aligned, check_tokens, first_token_mask, padding_mask
from hf_synlm.search.beliefs import BeliefUpdates
from hf_synlm.search.state import (
    NEG_INF,
    Candidates,
    GeneratingSearch,
    Search,
    SearchState,
    StackMachine,
    SyntacticCache,
    WordEdges,
    check_count,
)


def only_token_ids(input_ids: Tensor | None, inputs_embeds: Tensor | None) -> Tensor:
    """`input_ids`, of models that cannot read vectors instead. Raises ValueError if vectors are given, or no ids."""
    if input_ids is None or inputs_embeds is not None:
        raise ValueError(
            "This model reads input_ids, not inputs_embeds, because its trees are built over token ids. Pass "
            "input_ids. With PEFT, take LoRA instead of prompt tuning."
        )
    return input_ids


def check_length(machine: StackMachine, num_tokens: int, what: str, remedy: str = "Shorten it.") -> None:
    """Raise ValueError if a text of `num_tokens` (context included) does not fit the positions of the model."""
    if num_tokens > machine.max_tokens:
        raise ValueError(
            f"{what} of {num_tokens} tokens does not fit the {machine.max_tokens} positions of the model. {remedy}"
        )


def _split_inputs(
    config: Any,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    context_sentence_ids: Tensor | None,
    bos_token_id: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Mask of the words to read [B, T], and the context's sentence ids without begin tokens."""
    mask = checked_mask(config, input_ids, attention_mask)
    mask = mask & ~first_token_mask(input_ids, mask, bos_token_id)
    if context_sentence_ids is None:
        return mask, None
    check_aligned(input_ids, context_sentence_ids=context_sentence_ids)
    context_sentence_ids = context_sentence_ids.long() * mask
    of_text = mask & (context_sentence_ids == 0)
    descends = (context_sentence_ids < context_sentence_ids.cummax(1).values) | of_text.cummax(1).values
    if bool(((context_sentence_ids != 0) & (descends | (context_sentence_ids < 0))).any()):
        raise ValueError("context_sentence_ids must be 1, 2, ... in the sentences before a text, and 0 in the text")
    return of_text, context_sentence_ids


def checked_mask(config: Any, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Check ids and shapes, and give the mask [B, T] of the tokens; without an attention mask all are tokens."""
    mask = torch.ones_like(input_ids, dtype=torch.bool) if attention_mask is None else attention_mask.bool()
    check_tokens(config, input_ids, mask)
    return mask


def start_state(
    search: Search,
    input_ids: Tensor,
    attention_mask: Tensor | None,
    context_sentence_ids: Tensor | None = None,
    bos_token_id: int | None = None,
) -> tuple[SearchState, Rows]:
    """State before the first word of a text, and the words to read; padding may stand left or right.

    `context_sentence_ids` [B, T] are > 0 at tokens of complete sentences before the text. A `bos_token_id` that is a
    row's first token is the beginning itself.
    """
    mask, context = _split_inputs(search.machine.config, input_ids, attention_mask, context_sentence_ids, bos_token_id)
    text = Rows.of(input_ids, mask)
    total = max(text.lengths, default=0)
    arguments = {}
    if context is not None and bool((context > 0).any()):
        total = int((mask.sum(1) + (context > 0).sum(1)).max())
        arguments = {"input_ids": input_ids.masked_fill(context == 0, 0), "context_sentence_ids": context}
    check_length(search.machine, total, "A text")
    return search.begin(len(input_ids), input_ids.device, **arguments), text


def cache_after_context(
    search: GeneratingSearch,
    input_ids: Tensor,
    attention_mask: Tensor,
    context_sentence_ids: Tensor,
    bos_token_id: int | None = None,
) -> SyntacticCache:
    """Cache for `marginal_logits` of texts with context: the context is read, the texts are not; see `start_state`.

    A begin token may still come before the text.
    """
    cache = SyntacticCache(search.num_beams, search.eos_token_ids)
    cache.state, _ = start_state(search, input_ids, attention_mask, context_sentence_ids, bos_token_id)
    cache.begun = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
    return cache


def read_text(search: Search, state: SearchState, text: Rows) -> SearchState:
    """Read all words of a text. Rows of different lengths have the state after their own last word."""
    for step in range(text.ids.shape[1]):
        active = text.active(step)
        chosen = search.propose(state, text.ids[:, step], active=active)
        wanted = text.present[:, step + 1] if step + 1 < text.ids.shape[1] else None
        state, _ = search.commit(state, chosen, active, wanted)
    return state


# ------------------------------------------------------------------------------------------------------- parsing
@torch.no_grad()
def parse_with_search(
    search: Search,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    context_sentence_ids: Tensor | None = None,
    read_words: Callable[..., SearchState] | None = None,
    bos_token_id: int | None = None,
    *,
    word_ends: Tensor | None = None,
    num_return_sequences: int = 1,
    stepwise: bool = False,
    lexical: bool = False,
    belief_update: tuple[Any, ...] | None = None,
) -> ParseOutput:
    """n-best trees of given text with their joint probabilities, and prefix probabilities.

    `read_words` replaces the word-synchronous search by another one, such as `read_by_actions` (GPST): only `log_probs`
    and trees are returned then. `stepwise`, `lexical` and `belief_update` fill the fields of `ParseOutput` of these
    names: the first computes the distribution over the whole vocabulary at every word, the others score every word once
    more. The other arguments and what is refused: see `parse` of the models.

    Cost: about one pass of the layers that predict words for each of W words, over up to 4 K rows.
    Source: `R2D2GenFastBeamSearcher` and `R2D2GenFastEvaluator` of the authors' GPST code. There, the second numbers
    the positions after the last word one too small; here they are right.
    """
    check_count("num_return_sequences", num_return_sequences)
    if num_return_sequences > search.num_beams:
        raise ValueError(f"num_return_sequences={num_return_sequences} must be at most num_beams={search.num_beams}")
    for name, value in (("stepwise", stepwise), ("lexical", lexical), ("belief_update", belief_update)):
        if value and read_words is not None:
            raise ValueError(f"{name}={value} needs a word-synchronous beam. Keep synchronous=True")
    check_aligned(input_ids, word_ends=word_ends)
    state, text = start_state(search, input_ids, attention_mask, context_sentence_ids, bos_token_id)
    if context_sentence_ids is not None and min(text.lengths) == 0:
        raise ValueError(
            f"context_sentence_ids: row {text.lengths.index(0)} has only context. Write 0 at the tokens to parse"
        )
    check_rows(text.mask, may_be_empty=bos_token_id is not None)  # a lone begin token is the empty text
    if word_ends is not None:
        has_next = text.present & F.pad(text.present[:, 1:], (0, 1))
        state.edges = WordEdges.from_ends(text.align(word_ends.bool()) | ~has_next)
    notes = _Notes()
    if belief_update is not None:
        kind, order, ends = belief_update if len(belief_update) > 2 else (*belief_update, word_ends)
        check_aligned(input_ids, belief_update=ends)
        ends = torch.ones_like(text.present) if ends is None else text.align(ends.bool())
        notes.beliefs = BeliefUpdates(kind, order, ends, search.num_beams)
    if read_words is None:
        alone = context_sentence_ids is not None
        state = search.close(_read_by_tokens(search, state, text, notes, alone, stepwise, lexical))
    else:
        state = read_words(search, state, text.ids, text.count)
    output = _parse_output(search, state, text, text.first.tolist(), num_return_sequences, word_ends)
    if read_words is None:
        notes.write(output, text)
    output.input_ids = input_ids
    return output


def _read_by_tokens(
    search: Search, state: SearchState, text: Rows, notes: "_Notes", alone: bool, stepwise: bool, lexical: bool
) -> SearchState:
    """The beam after all tokens of the texts, with notes about it after every token."""
    search.keeps_scored, edges = notes.beliefs is not None, state.edges
    shared = _SharedPrefixes(text, edges, alone)
    for step in range(text.ids.shape[1]):
        rows = shared.split(state, step)
        if edges is not None:
            state.edges = edges.select_rows(rows)
        tokens, present = text.ids[rows, step], text.present[rows]
        active = None if text.active(step) is None else present[:, step]
        if stepwise:
            log_probs = search.next_token_log_probs(state)  # type: ignore[attr-defined]  # of a GeneratingSearch
            notes.stepwise.append(log_probs.gather(1, tokens[:, None]).squeeze(1)[shared.place])
        chosen = search.propose(state, tokens, state.block if stepwise else None, active)
        words = search.log_probs_of_candidates(state, chosen) if lexical or notes.beliefs else None
        # Level sizes may leave out sentences that are over: `close` counts again.
        wanted = text.present[:, step + 1] if step + 1 < text.ids.shape[1] else None
        if wanted is not None:
            wanted = torch.zeros_like(tokens).index_add_(0, shared.place, wanted.long()) > 0
        before, (state, order) = state.scores, search.commit(state, chosen, active, wanted)
        notes.add(search, state, chosen, order, shared.place, words if lexical else None)
        if notes.beliefs is not None:
            notes.beliefs.add(search.scored, before, state.scores, chosen.origin, words, order, shared.place)
    state.select_rows(shared.place)
    state.edges = edges
    return state


class _SharedPrefixes:
    """Sentences that begin alike share one beam up to where they part; `place` [B] is the row that holds each sentence.

    With `alone`, no two of them share anything, because they have contexts.
    """

    def __init__(self, text: Rows, edges: WordEdges | None, alone: bool) -> None:
        batch = torch.arange(len(text.ids), device=text.ids.device)
        keys = text.ids.masked_fill(~text.present, -1)[..., None]
        if edges is not None:
            keys = torch.cat([keys, edges.is_end[..., None]], 2)
        differs = (keys[:, None] != keys).any(3).cummax(2).values
        if alone:
            differs |= (batch[:, None] != batch)[..., None]
        # The first sentence with the same prefix, for every step and sentence; one host sync.
        self._leaders = batch[:, None].where(~differs, len(batch)).amin(1).T.tolist()
        self.place = self._rows = batch
        self._parted = list(range(len(batch)))

    def split(self, state: SearchState, step: int) -> Tensor:
        """Give every sentence that differs at `step` its own row of the beam, in place; one sentence of every row."""
        leaders = self._leaders[step]
        if leaders != self._parted:
            rows, self._parted = sorted(set(leaders)), leaders
            self._rows = torch.tensor(rows, device=self.place.device)
            if len(rows) != state.pool.batch_size:
                state.select_rows(self.place[self._rows])
            self.place = torch.tensor([rows.index(leader) for leader in leaders], device=self.place.device)
        return self._rows


class _Notes:
    """Statistics of the beam after every word."""

    def __init__(self) -> None:
        self.marginal: list[Tensor] = []
        self.entropy: list[Tensor] = []
        self.structural: list[Tensor] = []
        self.depth: list[Tensor] = []
        self.stepwise: list[Tensor] = []
        self.lexical: list[Tensor] = []
        self.attention: list[Tensor] = []
        self.beliefs: BeliefUpdates | None = None

    def add(
        self,
        search: Search,
        state: SearchState,
        chosen: Candidates,
        order: Tensor,
        place: Tensor,
        words: Tensor | None = None,
    ) -> None:
        """Note the beam `state` whose hypotheses came from the candidates `order`.

        `place` [B] is the row of each sentence, `words` are the log-probabilities of the candidates' words.
        """
        marginal = state.scores.logsumexp(1)
        # An empty beam has no posterior; its statistics are 0.
        log_posterior = (state.scores - marginal[:, None]).nan_to_num(nan=NEG_INF)
        posterior = log_posterior.exp()
        order = order.clamp(max=chosen.num_structural.shape[1] - 1)
        self.marginal.append(marginal[place])
        self.entropy.append(-(posterior * log_posterior.clamp(min=-1e4)).sum(1)[place])
        self.structural.append((posterior * chosen.num_structural.gather(1, order)).sum(1)[place])
        self.depth.append((posterior * state.pool.field("depth", state.nodes)).sum(1)[place])
        if "attention_entropy" in state.pool.features:
            of_words = state.pool.feature("attention_entropy", state.nodes)[..., 0]
            self.attention.append((posterior * of_words).sum(1)[place])
        if words is not None:
            # Of the same derivations just before the word; nothing is left after an impossible one.
            before = (state.scores - words.gather(1, order)).nan_to_num(nan=NEG_INF, posinf=NEG_INF).logsumexp(1)
            self.lexical.append((marginal - before).nan_to_num(nan=NEG_INF)[place])

    def write(self, output: ParseOutput, text: Rows) -> None:
        """Put the statistics into the output, in input columns."""

        def columns(values: list[Tensor]) -> Tensor:
            if not values:
                return torch.zeros(text.mask.shape, device=text.mask.device)
            return text.restore(torch.stack(values, 1))

        before = [torch.zeros_like(self.marginal[0]), *self.marginal[:-1]] if self.marginal else []
        # After an impossible word both marginals are -inf; the later words then count 0.
        ratios = [(m - p).nan_to_num(nan=0.0, neginf=NEG_INF) for m, p in zip(self.marginal, before, strict=True)]
        output.token_log_probs = columns(ratios)
        output.beam_entropy, output.num_actions = columns(self.entropy), columns(self.structural)
        output.stack_depth = columns(self.depth)
        if self.stepwise:
            output.stepwise_log_probs = columns(self.stepwise)
        if self.lexical:
            output.lexical_log_probs = columns(self.lexical)
        if self.attention:
            output.attention_entropy = columns(self.attention)
        if self.beliefs is not None:
            output.belief_update, output.belief_cut = columns(self.beliefs.values), columns(self.beliefs.cut)


def _parse_output(
    search: Search,
    state: SearchState,
    text: Rows,
    offsets: list[int],
    num_return_sequences: int,
    word_ends: Tensor | None,
) -> ParseOutput:
    """Trees of the finished beam, best first."""
    count, total = num_return_sequences, state.scores.logsumexp(1)
    missing = max(0, count - state.scores.shape[1])
    scores = F.pad(state.scores, (0, missing), value=NEG_INF)[:, :count]
    nodes = state.pool.derivations(F.pad(state.nodes, (0, missing))[:, :count], scores > NEG_INF)
    exists = (scores > NEG_INF).tolist()
    trees, labels = search.machine.trees(nodes)
    spans = [
        [[(i + offset, j + offset) for i, j in tree] for tree, there in zip(row, kept, strict=True) if there]
        for row, kept, offset in zip(trees, exists, offsets, strict=True)
    ]
    if labels is not None:
        labels = [
            [names for names, there in zip(row, kept, strict=True) if there]
            for row, kept in zip(labels, exists, strict=True)
        ]
    ends = None
    if word_ends is not None:
        flags = text.align(word_ends.bool()).tolist()
        ends = [
            [offset + t + 1 for t in range(length) if row[t] or t == length - 1]
            for row, length, offset in zip(flags, text.lengths, offsets, strict=True)
        ]
    return ParseOutput(
        spans=spans,
        labels=labels,
        actions=nodes.action.clamp(min=search.machine.pad_action),
        log_probs=scores,
        text_log_probs=total,
        offsets=offsets,
        lengths=text.lengths,
        word_ends=ends,
    )


# -------------------------------------------------------------------------------------------------- distributions
@torch.no_grad()
def marginal_logits(
    search: GeneratingSearch,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    cache: SyntacticCache | None = None,
    word_ends: Tensor | None = None,
    bos_token_id: int | None = None,
    logits_to_keep: int | Tensor = 0,
) -> tuple[Tensor, SyntacticCache]:
    """Log p(next token | prefix) after every token [B, T or fewer, V], and the state after the last column.

    Derivations are summed out over the beam; each position is normalized, uniform at padding. `input_ids` are new
    columns after those of the `cache` (which is updated in place); `attention_mask` covers them, or all columns so
    far. `logits_to_keep` is the number of last columns (0 = all), or the columns in a tensor.

    Cost: as `parse_with_search`, with all structural successors at the columns that are kept.
    """
    cache = SyntacticCache(search.num_beams, search.eos_token_ids) if cache is None else cache
    mask = _new_columns(search.machine.config, input_ids, attention_mask, cache)
    check_aligned(input_ids, word_ends=word_ends)
    if isinstance(logits_to_keep, int) and logits_to_keep < 0:
        raise ValueError(f"logits_to_keep={logits_to_keep} is negative. Give 0 to keep all columns")
    batch, width = input_ids.shape
    text = Rows.of(input_ids, mask)
    if cache.state is None:
        cache.state, cache.begun = search.begin(batch, input_ids.device), torch.zeros_like(mask[:, 0])
    state = cache.state
    begins = text.align(first_token_mask(input_ids, mask, bos_token_id)) & ~cache.begun[:, None]
    total = state.num_tokens + text.count - begins.sum(1)
    check_length(
        search.machine, int(total.max()), "A text",
        "Shorten it; in generate, shorten the prompt or lower max_new_tokens.",
    )  # fmt: skip
    first_begins = bool(begins.any())
    if word_ends is not None or state.edges is not None:
        _extend_edges(search.machine, state, text, begins, word_ends)
    if state.block is None and state.max_depth:
        search.refresh(state)
    kept = torch.arange(width, device=input_ids.device)
    kept = kept[-logits_to_keep if logits_to_keep else 0 :] if isinstance(logits_to_keep, int) else kept[logits_to_keep]
    target = torch.full((width,), len(kept), dtype=torch.long, device=input_ids.device)
    target[kept] = torch.arange(len(kept), device=input_ids.device)
    wanted = (target[text.columns] < len(kept)) & text.present
    wanted_steps = wanted.any(0).tolist()
    size = search.machine.config.vocab_size
    # One column more takes what belongs to no kept position.
    logits = torch.full((batch, len(kept) + 1, size), -torch.tensor(float(size)).log().item(), device=input_ids.device)
    rows = torch.arange(batch, device=input_ids.device)
    for step in range(text.ids.shape[1]):
        present, active = text.present[:, step], text.active(step)
        if step == 0 and first_begins:
            active = present & ~begins[:, 0]
        if active is None or step > 0 or bool(active.any()):
            chosen = search.propose(state, text.ids[:, step], state.block, active)
            state, _ = search.commit(state, chosen, active)
        if wanted_steps[step]:
            log_probs = search.next_token_log_probs(state)
            logits[rows, torch.where(wanted[:, step], target[text.columns[:, step]], len(kept))] = log_probs
    cache.state, cache.begun = state, cache.begun | mask.any(1)
    cache.num_columns += width
    return logits[:, : len(kept)], cache


def _new_columns(config: Any, input_ids: Tensor, attention_mask: Tensor | None, cache: SyntacticCache) -> Tensor:
    """Check the inputs of `marginal_logits`; mask [B, T] of the tokens in the new columns."""
    attention_mask = padding_mask(attention_mask)
    if attention_mask is not None:
        allowed = [(len(input_ids), columns + input_ids.shape[-1]) for columns in (0, cache.num_columns)]
        if tuple(attention_mask.shape) not in allowed:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {tuple(input_ids.shape)}, cache "
                f"{cache.num_columns} columns. Give one value per column of input_ids, or of cache and input_ids."
            )
        attention_mask = attention_mask[:, -input_ids.shape[1] :]
    mask = checked_mask(config, input_ids, attention_mask)
    if cache.state is not None and cache.batch_size != len(input_ids):
        raise ValueError(
            f"past_key_values holds {cache.batch_size} sentences, but input_ids has {len(input_ids)} rows. Expand "
            "the cache with past_key_values.batch_repeat_interleave, or start without a cache."
        )
    return mask


def _extend_edges(
    machine: StackMachine, state: SearchState, text: Rows, begins: Tensor, word_ends: Tensor | None
) -> None:
    """Add the word edges of new columns; where none are given, those that the model knows, or every token is a word."""
    present = text.present & ~begins
    known = machine.word_ends_of(text.ids) if word_ends is None else text.align(word_ends.bool())
    ends = torch.ones_like(present) if known is None else known | ~present
    if state.edges is None:
        size = int(state.num_tokens.max()) if len(state.num_tokens) else 0
        state.edges = WordEdges.from_ends(ends.new_ones(len(ends), size))
    # A begin token takes no position in the derivation.
    shift = begins[:, :1].long()
    index = (torch.arange(ends.shape[1], device=ends.device) + shift).clamp(max=ends.shape[1] - 1)
    state.edges = state.edges.extended(ends.gather(1, index), state.num_tokens)
