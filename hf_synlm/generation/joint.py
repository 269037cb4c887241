# SPDX-License-Identifier: Apache-2.0
"""Generate derivation and words together: beam search, exact sampling, and the authors' sampling.

One step is one word ("word-synchronous"); structural actions are inner steps.

Shapes: B prompts, K hypotheses, M candidates, R rows of a block, L columns of a sequence, A actions, N nodes,
V vocabulary.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from hf_synlm.search.next_tokens import Process, draw_index
from hf_synlm.search.parsing import check_length, read_text, start_state
from hf_synlm.search.stack import Nodes
from hf_synlm.search.state import NEG_INF, Candidates, GeneratingSearch, SearchState


def gumbel(scores: Tensor) -> Tensor:
    """Add standard Gumbel noise: the K largest are K draws without replacement in proportion to exp(scores).

    Source: Kool et al. 2019, "Stochastic beams and where to find them".
    """
    return scores - torch.empty_like(scores).exponential_().log()


def draw_candidate(chosen: Candidates, ended: Candidates | None, num_beams: int) -> Candidates:
    """Draw one of the best K candidates of each sentence in proportion to its probability; -inf where there is none."""
    if ended is not None:
        chosen = Candidates(*(torch.cat([getattr(c, name) for c in (chosen, ended)], 1) for name in vars(chosen)))
    scores, order = chosen.scores.topk(min(num_beams, chosen.scores.shape[1]))
    return _take(chosen, order.gather(1, draw_index(scores)))


def _take(chosen: Candidates, index: Tensor) -> Candidates:
    """Candidates `index` [B, K]."""
    return Candidates(*(value.gather(1, index) for value in vars(chosen).values()))


def keep_best(search: GeneratingSearch, state: SearchState, count: int, draw: bool = False) -> SearchState:
    """Drop all but the best `count` hypotheses of a beam between two words, over the same pool.

    With `draw`, they are drawn in proportion to their probability, without replacement.
    """
    if state.nodes.shape[1] > count:
        state = search.keep(state, (gumbel(state.scores) if draw else state.scores).topk(count).indices)
    search.refresh(state)
    return state


# ------------------------------------------------------------------------------------------------- finished sequences
class FinishedSequences:
    """The best K finished sequences of every prompt, with their derivations, padded to `length` columns.

    Free places hold the prompt itself, with score -inf and without a derivation.
    """

    def __init__(self, prompts: Tensor, num_beams: int, length: int, pad: int) -> None:
        batch, device = len(prompts), prompts.device
        self.pad, self.length = pad, length
        self.scores = torch.full((batch, num_beams), NEG_INF, device=device)
        self.sequences = F.pad(prompts, (0, length - prompts.shape[1]), value=pad)[:, None].repeat(1, num_beams, 1)
        self.nodes = torch.full((batch, num_beams, 0, 2), -1, device=device)
        self.lengths = torch.full_like(self.scores, prompts.shape[1], dtype=torch.long)
        self._prompts = self.sequences[:, :1], prompts.shape[1]

    def add(self, scores: Tensor, sequences: Tensor, nodes: Nodes, lengths: Tensor | None = None) -> None:
        """Offer sequences [B, M, L] with scores [B, M] (-inf = none) and derivations [B, M, A].

        Their lengths [B, M] are L unless they are given.
        """
        count = self.scores.shape[1]
        if lengths is None:
            lengths = torch.full_like(scores, sequences.shape[2], dtype=torch.long)
        sequences = F.pad(sequences, (0, self.length - sequences.shape[2]), value=self.pad)
        # A sequence that does not exist must not take a place: it looks like a free place.
        missing = (scores == NEG_INF)[..., None]
        sequences = torch.where(missing, self._prompts[0], sequences)
        lengths = torch.where(missing[..., 0], self._prompts[1], lengths)
        pairs = torch.stack([nodes.action, nodes.start], -1).masked_fill(missing[..., None], -1)
        width = max(pairs.shape[2], self.nodes.shape[2])
        merged = [
            torch.cat([self.scores, scores], 1),
            torch.cat([self.sequences, sequences], 1),
            torch.cat([F.pad(x, (0, 0, 0, width - x.shape[2]), value=-1) for x in (self.nodes, pairs)], 1),
            torch.cat([self.lengths, lengths], 1),
        ]
        index = merged[0].topk(count).indices
        self.scores, self.sequences, self.nodes, self.lengths = (
            torch.take_along_dim(x, index.view(*index.shape, *[1] * (x.dim() - 2)), 1) for x in merged
        )

    def best(self, count: int) -> tuple[Tensor, Tensor, Nodes]:
        """The best `count` of every prompt: sequences [B count, L], scores, and derivations [B count, 1, A].

        Only actions and starts of the derivations are set.
        """
        lengths = self.lengths[:, :count].flatten()
        sequences = self.sequences[:, :count].flatten(0, 1)[:, : int(lengths.max())]
        action, start = self.nodes[:, :count].flatten(0, 1).unbind(-1)
        width = int((action >= 0).sum(1).max())
        action, start = action[:, :width], start[:, :width]
        fields = [action[:, None] if name == "action" else start[:, None] for name in Nodes._fields]
        return sequences, self.scores[:, :count].flatten(), Nodes(*fields)


class JointDecoder:
    """One call of `generate` with `structure_mode="joint"`, word by word.

    The inputs have the rows that transformers repeats for beams and samples. The processors must be pure functions of
    (ids, scores): one word takes several calls of them.
    """

    renormalize = False

    def __init__(
        self,
        model: Any,
        config: GenerationConfig,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        input_ids: Tensor,
        streamer: Any = None,
        attention_mask: Tensor | None = None,
        context_sentence_ids: Tensor | None = None,
    ) -> None:
        self.config, self.processors, self.criteria, self.streamer = config, processors, criteria, streamer
        self.num_beams, self.prompt_length = config.num_beams, input_ids.shape[1]
        # Rows that transformers repeated are read once.
        stride = max(config.num_beams, config.num_return_sequences)
        ids = input_ids[::stride]
        mask = None if attention_mask is None else attention_mask[::stride]
        context = None if context_sentence_ids is None else context_sentence_ids[::stride]
        prompt_search, self.search = model.decoding_searches(config, self.renormalize)
        state, text = start_state(prompt_search, ids, mask, context, model.config.bos_token_id)
        longest = int((state.pool.num_context + text.count).max()) if text.lengths else 0
        check_length(
            prompt_search.machine,
            longest + config.max_length - self.prompt_length,
            "Prompt and generated text",
            "Shorten the prompt or lower max_new_tokens (max_length).",
        )
        self.offset = self.prompt_length - text.count  # column of the first token of every tree
        columns = self.offset[:, None] + torch.arange(text.ids.shape[1], device=ids.device)
        if config.return_dict_in_generate and bool(((text.columns != columns) & text.present).any()):
            raise ValueError(
                "attention_mask shows padding on the right of a prompt or inside it. Pad only on the left, because "
                "spans of trees are columns of the sequences."
            )
        self.state = read_text(prompt_search, state, text)
        total = self.state.scores.logsumexp(1, keepdim=True)
        self.state.scores -= total.masked_fill(total == NEG_INF, 0.0)
        self.sequences = ids[:, None]
        pad = config._pad_token_tensor
        self.pad = int(pad) if pad is not None else 0
        self.scores: tuple[Tensor, ...] = ()

    def _process(self, origin: Tensor, words: Tensor) -> Tensor:
        """Processors on the word log-probabilities [B, R, V] of rows that descend from hypotheses `origin` [B, R]."""
        return self._processed(self.sequences.take_along_dim(origin[..., None], 1), words)

    def _processed(self, ids: Tensor, words: Tensor) -> Tensor:
        """Processors on the word log-probabilities [B, R, V] after `ids` [B, R, L].

        They get K rows per prompt, as in stock beam search: some compute the prompt of a row from its number.
        """
        batch, rows, size = words.shape
        extra = self.num_beams - rows if self.num_beams > rows else 0
        ids = torch.cat([ids, ids[:, :1].expand(-1, extra, -1)], 1)
        words = F.pad(words, (0, 0, 0, extra))
        return self.processors(ids.flatten(0, 1), words.flatten(0, 1)).view(batch, -1, size)[:, :rows]

    @property
    def process(self) -> Process | None:
        """`_process`, or None without processors."""
        return self._process if len(self.processors) else None

    def _extended(self, chosen: Candidates) -> Tensor:
        """Sequences [B, M, L + 1] of candidates."""
        return torch.cat([self.sequences.take_along_dim(chosen.origin[..., None], 1), chosen.tokens[..., None]], 2)

    def _stops(self, sequences: Tensor) -> Tensor:
        """Which sequences [B, M, L] meet a stopping criterion [B, M]."""
        return self.criteria(sequences.flatten(0, 1), self.scores or None).view(sequences.shape[:2])

    def _closed(self, state: SearchState) -> tuple[Tensor, Nodes]:
        """Scores [B, K] and derivations [B, K, A] of the hypotheses with closed trees; the state does not change."""
        if not self.config.close_tree:
            return state.scores, state.pool.derivations(state.nodes)
        return self.search.close_each(state)

    @property
    def lengths(self) -> Tensor:
        """Columns of every hypothesis [B, R]."""
        return torch.full_like(self.state.nodes, self.sequences.shape[2])

    def _final(self, scores: Tensor, lengths: Tensor) -> Tensor:
        """Length-penalized scores; only generated columns count. Greedy search has no penalty."""
        if self.num_beams == 1:
            return scores
        return scores / (lengths - self.prompt_length).clamp(min=1) ** float(self.config.length_penalty)

    def run(self) -> FinishedSequences:
        """Generate: the best `num_return_sequences` of every prompt's beam, or that many rows of one draw each."""
        return self.run_sampling() if self.config.do_sample else self.run_beam()

    # ------------------------------------------------------------------------------------------------- beam search
    def run_beam(self) -> FinishedSequences:
        """Word-synchronous beam search; greedy search is the beam of one."""
        config, search, count = self.config, self.search, self.num_beams
        self.state = keep_best(search, self.state, count)
        self.sequences = self.sequences.expand(-1, self.state.nodes.shape[1], -1)
        device = self.sequences.device
        finished = FinishedSequences(self.sequences[:, 0], count, config.max_length, self.pad)
        done = torch.zeros(len(self.sequences), dtype=torch.bool, device=device)
        while not bool(done.all()):
            was_done = done
            chosen, ended, words = search.propose_tokens(self.state, self.process, config.output_scores)
            if config.output_scores:
                words = F.pad(words, (0, 0, 0, count - words.shape[1]), value=NEG_INF)
                self.scores += (words.flatten(0, 1),)
            over = self._file_dead(finished, ~done, chosen, ended)
            extended = self._extended(chosen)
            scores = chosen.scores if ended is None else torch.cat([chosen.scores, ended.scores], 1)
            bar = scores.topk(min(count, scores.shape[1])).values[:, -1:]
            if ended is not None:
                valid = ended.scores.masked_fill(ended.scores < bar, NEG_INF)
                nodes = self.state.pool.derivations(ended.parents, valid > NEG_INF)
                lengths = torch.full_like(ended.tokens, extended.shape[2])
                finished.add(self._final(valid, lengths), self._extended(ended), nodes, lengths)
            stops = self._stops(extended)
            self.state, order = search.commit(self.state, chosen)
            self.sequences, stops = extended.take_along_dim(order[..., None], 1), stops.gather(1, order)
            if bool(stops.any()):
                self._finish_stopped(finished, stops & (self.state.scores >= bar))
                self.state.scores = self.state.scores.masked_fill(stops, NEG_INF)
            done = was_done | self._is_done(finished)
            self.state.scores = self.state.scores.masked_fill(done[:, None], NEG_INF)
            self._stream(chosen, ended, bar, was_done | over)
        return finished

    def _file_dead(
        self,
        finished: FinishedSequences,
        running: Tensor,
        chosen: Any,
        ended: Any,
        given: Tensor | None = None,
    ) -> Tensor:
        """File the sequences so far of prompts without a possible next word and without a finished sequence.

        The beam is still the one before the candidates. `given` [B, 1] are scores of the hypotheses before the last
        restart; with them the sum is filed as it is. Returns the prompts without a possible next word [B].
        """
        dead = running & (chosen.scores == NEG_INF).all(1)
        if ended is not None:
            dead = dead & (ended.scores == NEG_INF).all(1)
        if not bool(dead.any()):
            return dead
        unfiled = (dead & (finished.scores == NEG_INF).all(1))[:, None].expand_as(self.state.scores)
        if given is None:
            self._finish_stopped(finished, unfiled)
        else:
            scores, nodes = self._closed(self.state)
            finished.add((given + scores).masked_fill(~unfiled, NEG_INF), self.sequences, nodes)
        return dead

    def _finish_stopped(self, finished: FinishedSequences, stops: Tensor) -> None:
        """Close the trees of the hypotheses that meet a criterion and file them."""
        stopped = replace(self.state, scores=self.state.scores.masked_fill(~stops, NEG_INF))
        scores, nodes = self._closed(stopped)
        finished.add(self._final(scores, self.lengths), self.sequences, nodes, self.lengths)

    def _is_done(self, finished: FinishedSequences) -> Tensor:
        """Which prompts are finished [B]: the stock rules of `early_stopping`."""
        config, lengths = self.config, self.lengths
        full = (finished.scores > NEG_INF).all(1)
        if self.num_beams > 1 and config.early_stopping is not True:
            if config.early_stopping == "never" and config.length_penalty > 0:
                lengths = torch.full_like(lengths, config.max_length)
            full = full & (self._final(self.state.scores, lengths).amax(1) <= finished.scores.amin(1))
        return full | (self.state.scores == NEG_INF).all(1)

    def _stream(self, chosen: Candidates, ended: Candidates | None, bar: Tensor, was_done: Tensor) -> None:
        """Hand the new word of every row to the streamer (num_beams=1 only)."""
        if self.streamer is None:
            return
        tokens = chosen.tokens[:, 0]
        if ended is not None:
            tokens = torch.where(ended.scores[:, 0] >= bar[:, 0], ended.tokens[:, 0], tokens)
        self.streamer.put(tokens.masked_fill(was_done, self.pad).cpu())

    # ---------------------------------------------------------------------------------------------------- sampling
    def run_sampling(self) -> FinishedSequences:
        """Draw one sequence per row; `num_return_sequences` rows per prompt."""
        config, search, repeats = self.config, self.search, self.config.num_return_sequences
        search.refresh(self.state)
        rows = torch.arange(len(self.sequences), device=self.sequences.device).repeat_interleave(repeats)
        self.state.select_rows(rows)
        finished = FinishedSequences(self.sequences[rows, 0], 1, config.max_length, self.pad)
        done, total = torch.zeros_like(rows, dtype=torch.bool), torch.zeros(len(rows), 1, device=rows.device)
        if self.num_beams > 1:  # draw the prompt's derivation once, then restart from it at every word
            self.state = keep_best(search, self.state, 1, draw=True)
            total = self._restart()
        self.sequences = self.sequences[rows].expand(-1, self.state.nodes.shape[1], -1)
        while not bool(done.all()):
            chosen = self._draw()
            done = done | self._file_dead(finished, ~done, chosen, None, total)
            extended = self._extended(chosen)
            extended[done, :, -1] = self.pad
            is_end = torch.zeros_like(chosen.tokens, dtype=torch.bool)
            if search.eos_token_ids is not None:
                is_end = torch.isin(chosen.tokens, search.eos_token_ids) & ~done[:, None]
                if bool(is_end.any()):
                    nodes = self.state.pool.derivations(chosen.parents, is_end)
                    finished.add((total + chosen.scores).masked_fill(~is_end, NEG_INF), extended, nodes)
            self.state, order = search.commit(self.state, chosen, ~(done | is_end[:, 0]))
            self.sequences = extended
            stops = self._stops(extended) & ~is_end & ~done[:, None]
            if bool(stops.any()):
                scores, nodes = self._closed(self.state)
                finished.add((total + scores).masked_fill(~stops, NEG_INF), extended, nodes)
            if self.streamer is not None:
                self.streamer.put(extended[:, 0, -1].cpu())
            done = done | (is_end | stops)[:, 0]
            if self.num_beams > 1:
                total = total + self._restart()
            self.state.scores = self.state.scores.masked_fill(done[:, None], NEG_INF)
        return finished

    def _restart(self) -> Tensor:
        """Scores [B, 1] of the drawn hypotheses, which count from 0 again; -inf stays -inf."""
        scores = self.state.scores
        self.state.scores = torch.zeros_like(scores).masked_fill(scores == NEG_INF, NEG_INF)
        return scores.masked_fill(scores == NEG_INF, 0.0)

    def _draw(self) -> Candidates:
        """Draw the next word of every row."""
        if self.num_beams == 1:
            chosen, words = self.search.draw_token(self.state, self.process)
        else:
            keep = self.config.output_scores
            chosen, ended, words = self.search.propose_tokens(self.state, self.process, keep)
            words = words.logsumexp(1) if keep else None
            chosen = draw_candidate(chosen, ended, self.num_beams)
        if self.config.output_scores:
            self.scores += (words,)
        return chosen
