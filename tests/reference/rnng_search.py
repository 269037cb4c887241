"""Exhaustive and one-hypothesis-at-a-time specifications of the search of RNNG: one sentence, Python lists.

States are prefixes of derivations (tuples of action ids). What is legal is decided here by replaying the prefix; the
logits come from `forward` on a completion of it, so nothing of the search is used.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.reference.exhaustive_search import log_sum_exp

SHIFT, REDUCE, FINISH = 1, 2, 3
CONTINUE, END, EITHER = "a word follows", "the text is over", "a word follows or the text is over"
Actions = tuple[int, ...]
BATCH = 512


@dataclass
class Counters:
    """What the legality rules read of a prefix."""

    tokens: int = 0
    open: int = 0
    depth: int = 0
    consecutive: int = 0
    previous: int = 0
    inside_word: bool = False


@dataclass
class Grammar:
    """Legality of actions, and the scores of a model.

    Args:
        model: An `RNNGForCausalLM` in evaluation mode.
        tokens: The sentence.
        word_ends: Which tokens end a word; None = what the model knows.
        normalization: "search" or "train".
    """

    model: Any
    tokens: list[int]
    word_ends: list[bool] | None = None
    normalization: str = "search"

    def __post_init__(self) -> None:
        config = self.model.config
        self.in_order = config.transition_system == "in_order"
        self.is_binary = config.transition_system == "binary"
        self.finishes = self.in_order or self.is_binary
        self.first = 4 if self.finishes else 3
        self.labels = range(self.first, self.first + len(config.nonterminals))
        self.max_open, self.max_consecutive = config.max_open_nonterminals, config.max_consecutive_nonterminals
        # Ends that the model does not know: what they bar is lost.
        self.is_told = self.word_ends is not None and not config.subwords
        if self.word_ends is None:
            final = self.model.model.word_final.tolist() if config.subwords else [True] * config.vocab_size
            self.word_ends = [final[token] for token in self.tokens]
        self.filler = 1 if config.pad_token_id == 0 else 0
        self.known: dict[Actions, tuple[torch.Tensor, torch.Tensor]] = {}

    # ------------------------------------------------------------------------------------------------------- legality
    def counters(self, actions: Actions) -> Counters:
        """Replay a prefix."""
        c, below = Counters(), []  # below: depth of the stack under each open constituent
        corner = 0  # depth of the stack under the last complete element
        for action in actions:
            if self.is_binary:
                # The pieces of a word are one element; a label takes two.
                c.depth += (action == SHIFT and not c.inside_word) - (action >= self.first)
                if action == SHIFT:
                    c.inside_word = not self.word_ends[c.tokens] if c.tokens < len(self.word_ends) else False
                    c.tokens += 1
            elif action == SHIFT:
                if not c.inside_word:
                    corner = c.depth
                c.depth += 1
                c.inside_word = not self.word_ends[c.tokens] if c.tokens < len(self.word_ends) else False
                c.tokens += 1
                c.consecutive = 0
            elif action == REDUCE:
                corner = below.pop()
                c.depth = corner + 1
                c.open -= 1
                if not (self.in_order and c.previous >= self.first):
                    c.consecutive = 0
            elif action >= self.first:
                below.append(corner if self.in_order else c.depth)
                c.depth += 1
                c.open += 1
                c.consecutive += 1
            c.previous = action
        return c

    def legal(self, actions: Actions, phase: str, anywhere: bool = False) -> list[int]:
        """Legal actions after a prefix; `anywhere`, inside words as well."""
        c = self.counters(actions)
        if c.inside_word and phase != END and not anywhere:
            return [SHIFT]
        if self.is_binary:
            composes, ends = c.depth > 1, c.depth == 1 and phase != CONTINUE
            return [SHIFT] * (phase != END) + [FINISH] * ends + [*self.labels] * composes
        return self._legal_in_order(c, len(actions), phase) if self.in_order else self._legal_top_down(c, phase)

    def _legal_top_down(self, c: Counters, phase: str) -> list[int]:
        if c.open == 0:
            return [] if c.tokens else list(self.labels)
        reduces = c.previous < self.first and not (phase == CONTINUE and c.open == 1)
        if phase == END:
            return [REDUCE] if reduces else []
        opens = c.open < self.max_open and c.consecutive < self.max_consecutive
        return [SHIFT] + [REDUCE] * reduces + [*self.labels] * opens

    def _legal_in_order(self, c: Counters, length: int, phase: str) -> list[int]:
        full = c.open > self.max_open - 1 or c.consecutive > self.max_consecutive - 1
        legal = []
        if phase != END and (c.tokens == 0 or c.open > 0):
            legal.append(SHIFT)
        if c.open > 0 and not (full and phase != END):
            legal.append(REDUCE)
        if phase != CONTINUE and c.tokens and c.open == 0 and c.depth == 1:
            legal.append(FINISH)
        room = phase != END or (not full and max(100, 5 * c.tokens) - length >= c.open + 4)
        if c.previous < self.first and c.depth > 0 and room:
            legal.extend(self.labels)
        return legal

    # --------------------------------------------------------------------------------------------------------- scores
    def completed(self, actions: Actions) -> tuple[Actions, list[int], list[bool]]:
        """A derivation that begins with a prefix, followed by SHIFT if that is legal; its tokens and word ends."""
        c = self.counters(actions)
        over = c.inside_word and c.previous != SHIFT  # the end of the text has ended the word
        shifts = SHIFT in self.legal(actions, EITHER) and not over
        more: Actions = (SHIFT,) * shifts + (REDUCE,) * c.open
        if self.is_binary:
            more += (self.first,) * (c.depth + shifts - (shifts and c.inside_word) - 1)
        elif c.open == 0 and self.in_order and c.tokens:  # a lone element gets a parent
            more += (self.first, REDUCE)
        elif c.open == 0 and not self.in_order:
            more, shifts = (self.first, SHIFT, REDUCE), True
        tokens, ends = self.tokens[: c.tokens], self.word_ends[: c.tokens]
        if shifts:
            tokens, ends = [*tokens, self.filler], [*ends, True]
        return (*actions, *more, *(FINISH,) * self.finishes), tokens, ends

    @torch.no_grad()
    def learn(self, prefixes: Iterable[Actions]) -> None:
        """Compute the logits after prefixes, several at a time."""
        missing = sorted({p for p in prefixes if p not in self.known})
        for begin in range(0, len(missing), BATCH):
            part = missing[begin : begin + BATCH]
            rows = [self.completed(prefix) for prefix in part]
            width, length = (max(len(row[i]) for row in rows) for i in (1, 0))
            ids, actions = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), length).long()
            mask, ends = torch.zeros_like(ids), torch.zeros_like(ids, dtype=torch.bool)
            for row, (row_actions, tokens, row_ends) in enumerate(rows):
                actions[row, : len(row_actions)] = torch.tensor(row_actions)
                ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
                ends[row, : len(tokens)] = torch.tensor(row_ends)
            output = self.model(ids, attention_mask=mask, actions=actions, word_ends=ends, output_logits=True)
            for row, prefix in enumerate(part):
                words = output.token_logits_given_tree[row, min(prefix.count(SHIFT), width - 1)]
                self.known[prefix] = output.action_logits[row, len(prefix)].double(), words.double()

    def action_log_probs(self, actions: Actions, phase: str) -> dict[int, float]:
        """Log-probabilities of the legal actions after a prefix."""
        self.learn([actions])
        legal, logits = self.legal(actions, phase), self._action_logits(actions)
        if self.normalization == "train":
            log_probs = logits.log_softmax(0)
        else:
            log_probs = torch.full_like(logits, -math.inf)
            chosen_from = sorted({*legal, *(self.legal(actions, phase, anywhere=True) if self.is_told else ())})
            log_probs[legal] = logits[legal] - logits[chosen_from].logsumexp(0)
        return {action: float(log_probs[action]) for action in legal}

    def _action_logits(self, actions: Actions) -> torch.Tensor:
        logits = self.known[actions][0]
        if self.normalization == "search" and self.model.config.model_type == "tree_lm":
            # One softmax: only words that may come are words.
            logits = logits.index_fill(0, torch.tensor(SHIFT), float(self.words(actions).logsumexp(0)))
        return logits

    def word_log_probs(self, actions: Actions) -> torch.Tensor:
        """Log-probabilities [V] of the next word after a prefix that SHIFT may follow."""
        self.learn([actions])
        return self.words(actions).log_softmax(0)

    def words(self, actions: Actions) -> torch.Tensor:
        """Logits [V] of the words that may come after a known prefix."""
        logits, config = self.known[actions][1].clone(), self.model.config
        if self.normalization == "search":
            never = [config.pad_token_id]
            if config.model_type == "tree_lm":
                never += [token for token in (config.bos_token_id, config.eos_token_id) if token is not None]
            logits[never] = -math.inf
        return logits

    def log_prob(self, actions: Actions, phase_after: Callable[[int], str]) -> float:
        """log p(actions, their words); `phase_after` gives the phase after so many words."""
        total, generated = 0.0, 0
        for place, action in enumerate(actions):
            total += self.action_log_probs(actions[:place], phase_after(generated))[action]
            if action == SHIFT:
                total += float(self.word_log_probs(actions[:place])[self.tokens[generated]])
                generated += 1
        return total

    # ---------------------------------------------------------------------------------------------------- enumeration
    def ends(self, prefix: Actions, action: int) -> bool:
        """Whether an action ends the sentence."""
        if self.finishes:
            return action == FINISH
        return action == REDUCE and self.counters(prefix).open == 1

    def weighted(self, starts: list[tuple[float, Actions]], phase: str) -> list[tuple[float, Actions]]:
        """All states before the next word with their log-probabilities."""
        found, frontier = [], starts
        while frontier:
            found += frontier
            self.learn([actions for _, actions in frontier])
            frontier = [
                (score + value, (*actions, action))
                for score, actions in frontier
                for action, value in self.action_log_probs(actions, phase).items()
                if action != SHIFT and not self.ends(actions, action)
            ]
        return found

    def prefixes(self, count: int) -> list[tuple[float, Actions]]:
        """All derivations of the first words, up to the last of them, with their log-probabilities."""
        beam: list[tuple[float, Actions]] = [(0.0, ())]
        for token in self.tokens[:count]:
            beam = [
                (score + value + float(self.word_log_probs(actions)[token]), (*actions, SHIFT))
                for score, actions in self.weighted(beam, CONTINUE)
                for action, value in self.action_log_probs(actions, CONTINUE).items()
                if action == SHIFT
            ]
        return beam

    def derivations(self, prefixes: list[tuple[float, Actions]] | None = None) -> list[tuple[float, Actions]]:
        """All derivations of the sentence, best first."""
        starts = self.prefixes(len(self.tokens)) if prefixes is None else prefixes
        complete = [
            (score + value, (*actions, action))
            for score, actions in self.weighted(starts, END)
            for action, value in self.action_log_probs(actions, END).items()
            if self.ends(actions, action)
        ]
        return sorted(complete, key=lambda x: -x[0])

    def with_ends(self, derivations: list[tuple[float, Actions]]) -> list[tuple[float, Actions]]:
        """Complete derivations, in their order, with their log-probabilities where every state may go on or end."""
        whole = replace(self, word_ends=[*self.word_ends[:-1], True])  # the end of the text ends a word
        return [(whole._log_prob_with_end(actions), actions) for _, actions in derivations]

    def _log_prob_with_end(self, actions: Actions) -> float:
        if self.normalization == "train":
            return self.log_prob(actions, lambda count: CONTINUE if count < len(self.tokens) else END)
        total, words = 0.0, iter(self.tokens)
        for place, action in enumerate(actions):
            prefix = actions[:place]
            self.learn([prefix])
            inside = self.counters(prefix).inside_word and not self.is_told
            legal = {*self.legal(prefix, CONTINUE), *([] if inside else self.legal(prefix, END))}
            legal = sorted(legal | {*self.legal(prefix, CONTINUE, anywhere=True)} if self.is_told else legal)
            logits = self._action_logits(prefix)
            total += float(logits[action] - logits[legal].logsumexp(0))
            if action == SHIFT:
                total += float(self.word_log_probs(prefix)[next(words)])
        return total

    def next_word(self, prefixes: list[tuple[float, Actions]], eos: int | None = None) -> torch.Tensor:
        """log p(next word | prefixes) [V], normalized; with `eos`, that id stands for the end of the sentence."""
        phase = CONTINUE if eos is None else EITHER
        parts = []
        for score, actions in self.weighted(prefixes, phase):
            for action, value in self.action_log_probs(actions, phase).items():
                if action == SHIFT:
                    words = self.word_log_probs(actions)
                    words[[self.model.config.pad_token_id, *([] if eos is None else [eos])]] = -math.inf
                    parts.append(score + value + words)
                elif eos is not None and self.ends(actions, action):
                    end = torch.full((self.model.config.vocab_size,), -math.inf, dtype=torch.float64)
                    end[eos] = score + value
                    parts.append(end)
        return torch.stack(parts).logsumexp(0).log_softmax(0)

    # ----------------------------------------------------------------------------------------------------- the search
    def search(self, num_beams: int, action_beam_size: int, fast_track_size: int) -> tuple[list[tuple], list[float]]:
        """Word-synchronous beam search with fast-track, as the authors write it: no early stop, no batching.

        Returns:
            The complete derivations, best first but scored by `with_ends`, and the log-marginal of every prefix.
        """
        beam: list[tuple[float, Actions]] = [(0.0, ())]
        marginals = []
        for position in range(len(self.tokens) + 1):
            completed = self._complete(beam, position, num_beams, action_beam_size, fast_track_size)
            beam = sorted(completed, key=lambda x: -x[0])[:num_beams]
            marginals.append(log_sum_exp([score for score, _ in beam]))
        return self.with_ends(beam), marginals[:-1]

    def _complete(
        self, beam: list[tuple[float, Actions]], position: int, num_beams: int, size: int, fast_track_size: int
    ) -> list[tuple[float, Actions]]:
        phase = CONTINUE if position < len(self.tokens) else END
        capacity = min(2 * size, size + 5 * fast_track_size)
        completed: list[tuple[float, Actions]] = []
        forced = 0
        while beam and len(completed) < capacity and len(completed) - forced < size:
            self.learn([actions for _, actions in beam])
            pairs = []
            for score, actions in beam:
                for action, value in self.action_log_probs(actions, phase).items():
                    is_end = action == SHIFT if phase == CONTINUE else self.ends(actions, action)
                    if action == SHIFT:
                        value += float(self.word_log_probs(actions)[self.tokens[position]])
                    pairs.append((score + value, (*actions, action), is_end))
            pairs.sort(key=lambda x: -x[0])
            best, rest = pairs[:size], pairs[size:]
            ends = [x for x in best if x[2]]
            tracked = [x for x in rest if x[2]][: max(0, fast_track_size - len(ends))]
            forced += len(tracked)
            completed += [x[:2] for x in [*ends, *tracked][: capacity - len(completed)]]
            beam = [x[:2] for x in best if not x[2]]
        return completed
