# SPDX-License-Identifier: Apache-2.0
"""Decoding action by action, the baseline "w/o sync" of the GPST paper (`generate(..., synchronous=False)`).

At every step each hypothesis has V + 1 expansions, COMP and GEN of any token, and all expansions compete:

    score(COMP) = score + log p(COMP),    score(w) = score + log p(GEN) + log p(w),

where COMP is forbidden before the softmax over {GEN, COMP} while the stack holds fewer than two trees. The best K stay,
so that a beam holds derivations with different numbers of tokens. The prompt is always read token by token. The slow
and obvious version is `action_beam` in tests/reference/exhaustive_search.py.

With `do_sample`, K expansions are drawn without replacement in proportion to exp(score) (Gumbel-top-K; stock beam
sampling does the same with tokens). The processed token scores are normalized first, so that warpers move no mass from
tokens to COMP. K = 1 is exact ancestral sampling, one action at a time.

Shapes: B prompts, K hypotheses, R <= K hypotheses of a beam, M expansions, L columns of a sequence, V vocabulary.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.generation.joint import FinishedSequences, JointDecoder, gumbel, keep_best
from hf_synlm.search.action_beam import Expansions, take_actions
from hf_synlm.search.stack import Levels
from hf_synlm.search.state import NEG_INF
from hf_synlm.trees.actions import COMP, GEN


class ActionDecoder(JointDecoder):
    """One call of `generate` with `synchronous=False`; arguments as `JointDecoder`.

    `sequences` [B, R, max_length] are padded on the right.
    """

    renormalize = True

    @property
    def lengths(self) -> Tensor:
        """Columns of every hypothesis [B, R]."""
        return self.state.num_tokens + self.offset[:, None]

    def run(self) -> FinishedSequences:
        """Beam search or sampling over single actions: the best K sequences of every prompt.

        With num_beams=1 and sampling, there are `num_return_sequences` rows per prompt.
        """
        self._start()
        prompts = self.sequences[:, 0, : self.prompt_length]
        finished = FinishedSequences(prompts, self.num_beams, self.config.max_length, self.pad)
        done = torch.zeros(len(prompts), dtype=torch.bool, device=prompts.device)
        streamed = self.prompt_length
        while not bool(done.all()):
            chosen, ended, selected = self._choose()
            self._file_dead(finished, ~done, chosen, ended)
            if ended is not None:
                parents = self.state.with_hypotheses(ended.origin)
                nodes = parents.pool.derivations(parents.nodes, ended.scores > NEG_INF)
                lengths = self.lengths.gather(1, ended.origin) + 1
                finished.add(self._final(ended.scores, lengths), self._written(ended), nodes, lengths)
            sequences = self._written(chosen)
            self.state = take_actions(self.search, self.state, chosen)
            rows = self.state.nodes.shape[1]
            self.sequences = sequences[:, :rows]
            stops = self._stopped((chosen.actions[:, :rows] == GEN) & (self.state.scores > NEG_INF))
            if bool(stops.any()):
                self._finish_stopped(finished, stops & selected[:, :rows])
                self.state.scores = self.state.scores.masked_fill(stops, NEG_INF)
            done = done | self._is_done(finished)
            self.state.scores = self.state.scores.masked_fill(done[:, None], NEG_INF)
            if self.streamer is not None:
                streamed = self._stream_columns(finished, done, streamed)
        return finished

    def _start(self) -> None:
        """Make the beam after the prompt that of the first action."""
        config, search, pool = self.config, self.search, self.state.pool
        path = pool.paths(self.state.nodes, self.state.max_length)
        search.machine.read(pool, path[..., :-1], self.state.nodes, Levels([path.shape[1]], path.device))
        independent = config.do_sample and self.num_beams == 1
        rows = torch.arange(len(self.sequences), device=self.sequences.device)
        rows = rows.repeat_interleave(config.num_return_sequences if independent else 1)
        self.state.select_rows(rows)
        self.state = keep_best(search, self.state, self.num_beams, draw=config.do_sample)
        self.offset = self.offset[rows]
        self.state.num_tokens = self.state.num_tokens[:, None].expand_as(self.state.nodes)
        sequences = F.pad(self.sequences[rows], (0, config.max_length - self.prompt_length), value=self.pad)
        self.sequences = sequences.expand(-1, self.state.nodes.shape[1], -1)

    # ------------------------------------------------------------------------------------------------- one action
    def _choose(self) -> tuple[Expansions, Expansions | None, Tensor]:
        """Select expansions; as in the synchronous search, end tokens do not compete for places in the beam.

        Returns at most K expansions that continue; at most K that end, if they are among the best K of both kinds (None
        without end tokens); and which of the first are among the best K of both kinds [B, M].
        """
        state, search, ends = self.state, self.search, self.search.eos_token_ids
        log_probs = search.machine.action_log_probs(state.pool, state.nodes, state.num_tokens, None, renormalize=True)
        lexical, model_lexical = self._word_scores()
        size, base = lexical.shape[2], (state.scores + log_probs[..., GEN])[..., None]
        comp, num_gen = state.scores + log_probs[..., COMP], lexical[0].numel()
        scores = keys = torch.cat([(base + lexical).flatten(1), comp], 1)
        if self.config.do_sample:
            keys = gumbel(keys)
            if self.num_beams == 1:  # one draw: its score is that of the model, without processors
                scores = torch.cat([(base + model_lexical).flatten(1), comp], 1)

        def best(keys: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Expansions]:
            keys, index = keys.topk(min(self.num_beams, keys.shape[1]))
            index = index if columns is None else columns[index]
            is_gen = index < num_gen
            origin, actions = torch.where(is_gen, index // size, index - num_gen), torch.where(is_gen, GEN, COMP)
            value = scores.gather(1, index).masked_fill(keys == NEG_INF, NEG_INF)
            return keys, Expansions(value, origin, actions, index % size)

        if ends is None:
            best_keys, chosen = best(keys)
            return chosen, None, torch.ones_like(best_keys, dtype=torch.bool)
        columns = (torch.arange(lexical.shape[1], device=ends.device)[:, None] * size + ends).flatten()
        end_keys, ended = best(keys[:, columns], columns)
        best_keys, chosen = best(keys.index_fill(1, columns, NEG_INF))
        both = torch.cat([best_keys, end_keys], 1)
        bar = both.topk(min(self.num_beams, both.shape[1])).values[:, -1:]
        return chosen, ended._replace(scores=ended.scores.masked_fill(end_keys < bar, NEG_INF)), best_keys >= bar

    def _word_scores(self) -> tuple[Tensor, Tensor]:
        """Token scores under the processors and those of the model [B, R, V]; end tokens only after one tree."""
        state, search, machine = self.state, self.search, self.search.machine
        complete = machine.is_complete(state.pool, state.nodes)
        lexical = model_lexical = search.vocabulary_log_probs(state, state.nodes)
        if len(self.processors):
            for own, ids in self._by_length(state.scores > NEG_INF):
                lexical = torch.where(own[..., None], self._processed(ids, model_lexical.clone()), lexical)
            lexical = search.mask_end(lexical, complete)
        if self.config.do_sample:
            lexical = lexical - lexical.logsumexp(2, keepdim=True).clamp(min=torch.finfo(lexical.dtype).min)
        return lexical, model_lexical

    def _written(self, chosen: Expansions) -> Tensor:
        """Sequences [B, M, L] of expansions."""
        sequences = self.sequences.take_along_dim(chosen.origin[..., None], 1)
        # A hypothesis of full length has left the beam, but its place may still count one column more.
        column = self.lengths.gather(1, chosen.origin).clamp(max=sequences.shape[2] - 1)
        token = torch.where(chosen.actions == GEN, chosen.tokens, self.pad)
        return sequences.scatter(2, column[..., None], token[..., None])

    def _by_length(self, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Group hypotheses [B, R] by length, for callers that need tokens without padding.

        Yields which hypotheses have one length [B, R], and tokens [B, R, length]. All rows keep their place: rows of
        other lengths hold the tokens of another hypothesis of the prompt, so ignore their results.
        """
        lengths, places = self.lengths, torch.arange(rows.shape[1], device=rows.device)
        for length in lengths[rows].unique().tolist():
            own = rows & (lengths == length)
            substitute = torch.where(own, self.config.max_length + 1, lengths).argmax(1, keepdim=True)
            origin = torch.where(own, places, substitute)
            yield own, self.sequences[:, :, :length].take_along_dim(origin[..., None], 1)

    def _stopped(self, at_word: Tensor) -> Tensor:
        """Which of the hypotheses that have just generated a token meet a stopping criterion [B, R]."""
        stops = torch.zeros_like(at_word)
        for own, ids in self._by_length(at_word):
            stops |= own & self._stops(ids)
        return stops

    def _stream_columns(self, finished: FinishedSequences, done: Tensor, streamed: int) -> int:
        """Pass the columns that all rows have reached to the streamer (num_beams=1 only), and count them."""
        lengths = torch.where(done, self.config.max_length, self.lengths[:, 0])
        ready = int(finished.lengths.max() if bool(done.all()) else lengths.min())
        words = torch.where(done[:, None], finished.sequences[:, 0], self.sequences[:, 0])
        for column in range(streamed, ready):
            self.streamer.put(words[:, column].cpu())
        return max(streamed, ready)
