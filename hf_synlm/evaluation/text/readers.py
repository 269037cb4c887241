# SPDX-License-Identifier: Apache-2.0
"""How a model reads a batch of texts: next-token logits, or a search over trees.

Shapes: B texts, T tokens, V vocabulary, n tokens of one text.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_synlm.core.cache import CACHE
from hf_synlm.evaluation.text.batches import Window
from hf_synlm.evaluation.text.cache import Result
from hf_synlm.evaluation.text.token_scores import TokenScores
from hf_synlm.hub.abilities import declared
from hf_synlm.search.parsing import cache_after_context, marginal_logits
from hf_synlm.trees.codecs import pad_inputs

Entropy = Literal["shannon", "renyi"]
AttentionEntropy = Literal["projected", "raw"]


class LogitReader:
    """Scores texts from exact next-token logits.

    Args:
        scorer: the `TextScorer` that reads.
        end: also score the end of every text.
        starting: [V] True for tokens that begin a word, to give `word_start`; None = do not.
    """

    def __init__(self, scorer: Any, end: bool, starting: Tensor | None):
        self.scorer, self.model = scorer, scorer.model
        self.end, self.starting = end, starting
        self.num_begin = int(scorer.begin_id is not None)

    @torch.no_grad()
    def __call__(self, batch: list[Window]) -> list[Result]:
        """Scores of each text, as `TokenScores.to_dict` gives them."""
        return [scores.to_dict() for scores in self.score(batch)]

    def _padded(self, batch: list[Window], closing: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T] of context and text after a begin token, `closing` behind, padded on the right."""
        begin = [] if self.scorer.begin_id is None else [self.scorer.begin_id]
        rows = ([*begin, *(t for s in w.context for t in s), *w.ids, *closing] for w in batch)
        padded = pad_inputs(rows, 0)
        return padded["input_ids"].to(self.model.device), padded["attention_mask"].to(self.model.device)

    def score(self, batch: list[Window]) -> list[TokenScores]:
        """Scores of texts; long ones are read in segments, by models that can continue from a cache."""
        ids, mask = self._padded(batch)
        # Texts of other models are at most as long as their positions, and not every cache takes several tokens.
        if self.scorer.begins_itself and len(batch) == 1 and ids.shape[1] > self.scorer.max_rows:
            return [self._scores(self._read_segments(ids, mask), batch[0])]
        return self._scores_of_logits(self.model(ids, attention_mask=mask).logits, batch)

    def _read_segments(self, ids: Tensor, mask: Tensor) -> dict[str, Tensor]:
        """Read one text [1, T] in segments, each after the hidden-state cache of the one before."""
        following = torch.cat([ids[0, 1:], ids.new_zeros(1)])
        cache, parts = None, []
        for start in range(0, ids.shape[1], self.scorer.max_rows):
            part = slice(start, start + self.scorer.max_rows)
            output = self.model(ids[:, part], attention_mask=mask[:, part], use_cache=True, **{CACHE: cache})
            cache = output[CACHE]
            parts.append(self._read(output.logits[0], following[part]))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _scores_of_logits(self, logits: Tensor, batch: list[Window]) -> list[TokenScores]:
        scores = []
        for row, window in zip(logits, batch, strict=True):
            # Nothing follows the last token.
            following = torch.tensor([*window.ids[1 - self.num_begin :], 0], device=row.device)
            scores.append(self._scores(self._read(row[: len(following)], following), window))
        return scores

    def _read(self, logits: Tensor, following: Tensor) -> dict[str, Tensor]:
        """Log-probabilities [n] after every token, given logits [n, V] and the id that follows each.

        `following`: of the next token; `ends`: that the text ends; `starts`: that a word begins or the text ends. And
        the entropy of the next token.
        """
        logits = logits.float()
        norm = logits.logsumexp(-1)
        reading = {"following": _on_host(logits.gather(1, following[:, None]).squeeze(1) - norm)}
        if self.end and self.scorer.end_ids:
            ends = torch.tensor(self.scorer.end_ids, device=logits.device)
            reading["ends"] = _on_host(logits[:, ends].logsumexp(1) - norm)
        if self.starting is not None:
            which = self.starting.nonzero().squeeze(1).to(logits.device)
            reading["starts"] = _on_host(logits.index_select(1, which).logsumexp(1) - norm)
        if self.scorer.entropy is not None:
            reading["entropy"] = _on_host(_entropy(logits - norm[:, None], self.scorer.entropy))
        return reading

    def _scores(self, reading: dict[str, Tensor], window: Window) -> TokenScores:
        """Scores of a text that was read with its begin token, if it has one."""
        length = len(window.ids)
        scores = TokenScores(_without_prefix(reading["following"][:-1], length))
        if "ends" in reading:
            scores.end = float(reading["ends"][-1])
        if "starts" in reading:
            scores.word_start = _without_prefix(reading["starts"], length + 1)
        if "entropy" in reading:
            scores.entropy = _without_prefix(reading["entropy"][:-1], length)
        found = scores.log_probs[1 - self.num_begin :]
        if declared(self.model.config, "is_grammar"):  # it predicts nothing after what it cannot derive
            found = found[found.isneginf().cumsum(0) == 0]
        if found.isnan().any():
            raise ValueError(
                f"{self.scorer.name} gives tokens probabilities that are not numbers. Its weights are damaged, or "
                f"values overflow in {self.model.dtype}. Load the model in float32."
            )
        return scores


class SearchReader(LogitReader):
    """Scores texts from a beam of derivations: of `parse`, or, for `word_start`, from the beam's next-token logits.

    Entropies are always of these logits.
    """

    def score(self, batch: list[Window]) -> list[TokenScores]:
        """Scores of texts, with beam statistics where the scorer gives details."""
        reads_logits = self.starting is not None or self.scorer.entropy is not None
        by_logits = self._score_by_beam_logits(batch) if reads_logits else []
        found = by_logits
        noted = self.scorer.noted
        if self.starting is not None and not self.scorer.details and not self.end and not noted:
            return found
        stepwise = self.scorer.estimator == "stepwise"
        parsed = self._parse(batch, stepwise)
        if self.starting is None:
            chosen = parsed.stepwise_log_probs if stepwise else parsed.token_log_probs
            found = [TokenScores(values) for values in self._own_columns(chosen, batch)]
            for scores, read in zip(found, by_logits, strict=reads_logits):
                scores.entropy = read.entropy
        names = [*noted, *(["belief_cut"] if "belief_update" in noted else [])]
        if self.scorer.details:
            names += ["beam_entropy", "num_actions", "stack_depth", *([] if stepwise else ["lexical"])]
        for name in names:
            measured = getattr(parsed, "lexical_log_probs" if name == "lexical" else name)
            for scores, values in zip(found, self._own_columns(measured, batch), strict=True):
                setattr(scores, name, values)
        if self.end:
            self._add_ends(found, parsed, batch, stepwise)
        return found

    def _parse(self, batch: list[Window], stepwise: bool) -> Any:
        """What `parse` gives for texts after their context, with what ends them behind."""
        sentence_ids, noted = self._context_sentence_ids(batch), self.scorer.noted
        ids, mask = self._padded(batch, self.scorer.closing_ids if self.end else ())
        if "belief_update" in noted:
            noted["belief_update"] += (self._ends("belief_ends", batch, mask),)
        return self.model.parse(
            ids,
            mask,
            num_beams=self.scorer.num_beams,
            stepwise=stepwise,
            lexical=self.scorer.details and not stepwise,
            **self.scorer.search_options,
            **noted,
            **({} if sentence_ids is None else {"context_sentence_ids": sentence_ids}),
            **({"word_ends": self._ends("word_ends", batch, mask)} if self.scorer.is_told_word_ends else {}),
        )

    def _ends(self, name: str, batch: list[Window], mask: Tensor) -> Tensor:
        """[B, T] False at the pieces of the texts that end no word; `name` is the field of a window that says it."""
        ends = torch.ones_like(mask, dtype=torch.bool)
        for row, window in zip(ends, batch, strict=True):
            stop = self.num_begin + window.num_tokens
            row[stop - len(window.ids) : stop] = torch.tensor(getattr(window, name))
        return ends

    def _add_ends(self, found: list[TokenScores], parsed: Any, batch: list[Window], stepwise: bool) -> None:
        closing = self.scorer.closing_ids
        if stepwise and closing:
            for scores, values, window in zip(found, _on_host(parsed.stepwise_log_probs), batch, strict=True):
                stop = self.num_begin + window.num_tokens
                scores.end = float(values[stop : stop + len(closing)].sum())
            return
        texts = self._own_columns(parsed.token_log_probs, batch)
        for scores, words, whole in zip(found, texts, _on_host(parsed.text_log_probs).tolist(), strict=True):
            scores.end = whole - float(words.sum())

    def _context_sentence_ids(self, batch: list[Window]) -> Tensor | None:
        """[B, T] 1, 2, ... in the sentences of the context and 0 elsewhere; None if no text has context."""
        if not any(window.context for window in batch):
            return None
        rows = []
        for window in batch:
            numbers = [k for k, sentence in enumerate(window.context, 1) for _ in sentence]
            rows.append(torch.tensor([0] * self.num_begin + numbers + [0] * len(window.ids)))
        return pad_sequence(rows, batch_first=True).to(self.model.device)

    def _score_by_beam_logits(self, batch: list[Window]) -> list[TokenScores]:
        """Stepwise scores with `word_start` and entropies, which need the beam's distribution over all next tokens."""
        search = self.model.word_search(self.scorer.num_beams, **self.scorer.search_options)
        begin_id = self.model.config.bos_token_id
        ids, mask = self._padded(batch)
        sentence_ids, cache = self._context_sentence_ids(batch), None
        if sentence_ids is not None:
            cache = cache_after_context(search, ids, mask, sentence_ids, begin_id)
            ids, mask = self._padded([window._replace(context=()) for window in batch])
        ends = self._ends("word_ends", batch, mask) if self.scorer.is_told_word_ends else None
        logits, _ = marginal_logits(search, ids, mask, cache=cache, word_ends=ends, bos_token_id=begin_id)
        return self._scores_of_logits(logits, batch)

    def _own_columns(self, values: Tensor, batch: list[Window]) -> list[Tensor]:
        """The columns of the texts' own tokens, without begin token, context and what closes them, on the host."""
        cut = []
        for row, window in zip(_on_host(values), batch, strict=True):
            stop = self.num_begin + window.num_tokens
            cut.append(row[stop - len(window.ids) : stop])
        return cut


def _entropy(log_probs: Tensor, kind: Entropy) -> Tensor:
    """Entropy [n] in nats of distributions [n, V]."""
    if kind == "renyi":
        return 2 * (log_probs / 2).logsumexp(-1)
    return torch.special.entr(log_probs.exp()).sum(-1)


def _on_host(values: Tensor) -> Tensor:
    return values.cpu().double()


def _without_prefix(values: Tensor, length: int) -> Tensor:
    """[length] values of the last tokens of a text; NaN for the first token if it has no prefix."""
    return torch.cat([values.new_full((length - len(values),), float("nan")), values])
