"""Log-probabilities of tokens under any causal language model of transformers, in batches, every text once.

Estimators of log p(token | prefix):

    exact           from `forward(...).logits`: models whose next-token distribution is computed, not searched
    beam_marginal   m_t - m_(t-1), with m_t = log of the sum of p(x_1..t, y) over the derivations y in a beam (GPST,
                    RNNG). What the papers report. The sum over a text is a lower bound on its log-probability; a
                    single value may even be positive. Splits into a lexical and a structural part.
    stepwise        log of the normalized distribution that the beam gives over the next token: `forward(...).logits`
                    of GPST and RNNG, what minicons and lm-eval see. A proper distribution for each prefix.

End of a text: a model that predicts an end token has its log-probability; for GPST, RNNG and Tree LM the trees are
closed instead (what remains to be done after the last word has a probability, but no token). URNNG and Pushdown Layers
search, too, but end their sentences by a token, which is read behind the words. An LSTM of this library predicts
nothing there.

Shapes: B texts, T tokens, V vocabulary. Log-probabilities in nats, float64 once they are on the host.
"""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from hf_synlm.data.files import find_model
from hf_synlm.data.text import PathLike, check_list
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text.cache import Result, ResultCache
from hf_synlm.evaluation.text.processes import Text, device_of_process, is_launched, iterate_batches
from hf_synlm.evaluation.text.words import EncodedText, word_starts
from hf_synlm.hub.checkpoint import load_pretrained
from hf_synlm.search.parsing import cache_after_context, marginal_logits

T = TypeVar("T", bound=Text)
Estimator = Literal["exact", "beam_marginal", "stepwise"]
Entropy = Literal["shannon", "renyi"]
AttentionEntropy = Literal["projected", "raw"]
# Fields of `TokenScores` with one value per token.
PER_TOKEN = ("log_probs", "lexical", "beam_entropy", "num_actions", "stack_depth", "entropy", "attention_entropy")
# Most numbers in the logits of one call: 1 GiB in float32.
_MAX_LOGITS = 1 << 28
# Most tokens, times derivations, that a call reads on a CPU.
_MAX_DERIVED_TOKENS = 12_000


@dataclasses.dataclass
class TokenScores:
    """Scores of one text of n tokens.

    Attributes:
        log_probs: [n] log p(token | prefix) in nats; NaN where there is no prefix (no begin token).
        lexical: [n] part of the words in `log_probs`, or None.
        beam_entropy: [n] entropy in nats of the derivations in the beam after the token, or None.
        num_actions: [n] expected structural actions before the token, or None.
        stack_depth: [n] expected number of trees on the stack after the token, or None.
        entropy: [n] entropy in nats of the token given everything before it, or None.
        attention_entropy: [n] expected normalized attention entropy where the token is read, or None.
        end: log p(the text ends | text) in nats, or None.
        word_start: [n + 1] log p(the next token begins a word or ends the text) before every token and at the end.
    """

    log_probs: Tensor
    lexical: Tensor | None = None
    beam_entropy: Tensor | None = None
    num_actions: Tensor | None = None
    stack_depth: Tensor | None = None
    entropy: Tensor | None = None
    attention_entropy: Tensor | None = None
    end: float | None = None
    word_start: Tensor | None = None

    def to_dict(self) -> Result:
        """The scores as plain data for JSON, without those that are None."""
        values = {name: value for name, value in vars(self).items() if value is not None}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls, values: Result) -> Self:
        """Inverse of `to_dict`."""
        tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items() if name != "end"}
        return cls(**tensors, end=values.get("end"))


class TextScorer:
    """Scores texts with a causal language model.

    Args:
        model: any causal language model of transformers; it stays on its device.
        tokenizer: a fast tokenizer.
        estimator: see the top of this file; None = "beam_marginal" for models with a search, otherwise "exact".
        num_beams: derivations kept after a word (models with a search); None = the model's `scoring_num_beams`.
        search_options: further options of `parse` (RNNG: `action_beam_size`, `fast_track_size`, `normalization`).
        batch_size: largest number of texts per call of the model. Calls are smaller where logits are large, lengths
            differ, or beams are wide on a CPU.
        begin: predict the first token from a begin token. If False, the first token has no probability (not possible
            for the models of this library, which always use a begin token).
        begin_token: the begin token; None = the tokenizer's, or the one of the model's configuration. The choice
            matters: a model tuned on chats may know its begin token only before instructions, and may predict plain
            text much better after the end token of its pretraining.
        details: also give lexical parts and beam statistics where the model has them.
        entropy: also give the entropy of every token before it is read: "shannon", -sum_v p_v log p_v, or "renyi" of
            order 1/2, 2 log sum_v sqrt(p_v). Of models that search it is that of the "stepwise" distribution.
        attention_entropy: also give the normalized attention entropy of every token (Tree LM): of "raw" attention
            weights, or "projected", in which each counts by the length of the vector that it adds to the output.
        name: what results call the model.
        revision: revision of the model, for results.
        num_processes: how many processes score on a CPU, with one thread each; None = as many as are worth it, and
            under `accelerate launch` all that it started, see `hf_synlm.evaluation.text.processes`.
        cache: file to which scores are written as they come; a run that was stopped continues from it.

    Raises:
        ValueError: the model does not have an option or a begin token.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        estimator: Estimator | None = None,
        num_beams: int | None = None,
        search_options: dict[str, Any] | None = None,
        batch_size: int = 16,
        begin: bool = True,
        begin_token: str | None = None,
        details: bool = False,
        entropy: Entropy | None = None,
        attention_entropy: AttentionEntropy | None = None,
        name: str | None = None,
        revision: str | None = None,
        num_processes: int | None = 1,
        cache: PathLike | None = None,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.num_processes, self.cache = num_processes, cache
        self.batch_size, self.details, self.entropy = batch_size, details, entropy
        self.attention_entropy = attention_entropy
        self.name, self.revision = name or model.config._name_or_path, revision
        self.searches = hasattr(model, "word_search")
        self.search_options = {k: v for k, v in (search_options or {}).items() if v is not None}
        self.num_beams = num_beams
        self.cuts = {"texts_in_windows": 0, "contexts_cut": 0}
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: it must be at least 1")
        if attention_entropy is not None and not hasattr(model, "attention_entropy"):
            raise ValueError(
                f"attention_entropy {attention_entropy!r} (--attention-entropy): {type(model).__name__} does not "
                "attend to derivations; Tree LM and Transformer Grammars do. Leave it out."
            )
        self.estimator: Estimator = self._checked_estimator(estimator)
        self.begin_id = self._begin_id(begin_token) if begin else None
        if (not begin or begin_token is not None) and self._begins_itself:
            raise ValueError(
                f"begin={begin}, begin_token={begin_token!r} (--no-first-word, --begin-token): {type(model).__name__} "
                "reads every sentence from its own begin token. Leave both options out, and drop the first word from "
                "your analysis if you do not want it."
            )

    @classmethod
    def from_pretrained(
        cls,
        name: str,
        *,
        revision: str | None = None,
        trust_remote_code: bool = False,
        device: str | None = None,
        dtype: str = "auto",
        gguf_file: str | None = None,
        backbone: str | None = None,
        seed: int = 0,
        **options: Any,
    ) -> "TextScorer":
        """Load a model with its tokenizer.

        Args:
            name: a folder, or a name on the Hub.
            revision: branch, tag or commit on the Hub.
            trust_remote_code: run code that comes with the model.
            device: None = a GPU if there is one.
            dtype: floating point type of the weights; "auto" = as saved, but float32 for 16 bits on a CPU.
            gguf_file: name of a GGUF file in the folder.
            backbone: folder or Hub name of the backbone of an adapter; None = the one that the adapter names.
            seed: set before loading.
            **options: passed to `TextScorer`.

        Returns:
            The scorer.

        Raises:
            ValueError: the model or the device does not exist; see also `TextScorer`.
        """
        name, device = find_model(name), _checked_device(device)
        set_seed(seed)
        model, tokenizer = load_pretrained(
            name,
            dtype=dtype,
            backbone=backbone,
            revision=revision,
            trust_remote_code=trust_remote_code,
            gguf_file=gguf_file,
        )
        revision = getattr(model.config, "_commit_hash", None) or revision
        model = model.to(device)
        is_half = model.dtype in (torch.bfloat16, torch.float16) and not getattr(model, "is_quantized", False)
        if dtype == "auto" and device.type == "cpu" and is_half:
            model = model.float()
        return cls(model, tokenizer, name=name, revision=revision, **options)

    def with_beam(self, num_beams: int) -> Self:
        """A scorer of the same model with another beam, without details and entropies."""
        other = copy.copy(self)
        other.num_beams, other.cuts = num_beams, dict(self.cuts)
        other.details, other.entropy, other.attention_entropy = False, None, None
        return other

    # ------------------------------------------------------------------------------------------- what the model has
    def _checked_estimator(self, estimator: str | None) -> Estimator:
        allowed: tuple[Estimator, ...] = ("beam_marginal", "stepwise") if self.searches else ("exact",)
        name = type(self.model).__name__
        if estimator is not None and estimator not in allowed:
            raise ValueError(f"estimator {estimator!r}: for {name} choose {' or '.join(map(repr, allowed))}")
        given = {**self.search_options, **({} if self.num_beams is None else {"num_beams": self.num_beams})}
        # `parse` of models that do not search takes a beam, too, which changes nothing.
        known = inspect.signature(self.model.parse).parameters if hasattr(self.model, "parse") else {}
        unknown = sorted(set(given) - set(known))
        if unknown:
            flags = ", ".join(f"{option} (--{option.replace('_', '-')})" for option in unknown)
            raise ValueError(f"{flags}: not an option of {name}. Leave it out.")
        return allowed[0] if estimator is None else allowed[allowed.index(estimator)]

    def _begin_id(self, token: str | None) -> int | None:
        config = self.model.config
        if self.searches:
            return config.bos_token_id  # the beginning itself; other tokens would be words
        if token is not None:
            found = self.tokenizer.get_vocab().get(token)
            if found is None:
                raise ValueError(f"begin_token {token!r} is not in the vocabulary")
            return found
        own = (config.bos_token_id, self.tokenizer.bos_token_id)
        # Elsewhere what minicons and lm-eval take goes first: the tokenizer's.
        candidates = (
            *(own if self._begins_itself else reversed(own)),
            self.tokenizer.eos_token_id,
            *self.end_ids,
        )
        found = next((token for token in candidates if token is not None), None)
        if found is None:
            raise ValueError(
                "the model has no begin or end token from which the first word could be predicted: name one by "
                "begin_token (--begin-token), or set bos_token_id in its configuration"
            )
        return found

    @property
    def _begins_itself(self) -> bool:
        """Whether the model is one of this library, which begins every text with the token of its configuration."""
        return self._sentence_end is not None

    @property
    def _sentence_end(self) -> str | None:
        """`sentence_end` of a model of this library; None for others.

        The code of folders that earlier versions exported lacks the field: the installed class of the type has it.
        """
        installed = (
            CONFIG_MAPPING[self.model.config.model_type] if self.model.config.model_type in CONFIG_MAPPING else None
        )
        return getattr(self.model.config, "sentence_end", getattr(installed, "sentence_end", None))

    @property
    def end_ids(self) -> list[int]:
        """Tokens that end a text; empty if the model is not trained to end texts by one."""
        if self._sentence_end not in (None, "token"):
            return []
        ends = self.model.config.eos_token_id
        if ends is None and not self.searches:
            ends = self.tokenizer.eos_token_id
        return [] if ends is None else [ends] if isinstance(ends, int) else list(ends)

    @property
    def end_of_text(self) -> str:
        """How a text ends: "trees closed", "end token" or "not modeled"."""
        return "end token" if self.closing_ids else "trees closed" if self.searches else "not modeled"

    @property
    def closing_ids(self) -> list[int]:
        """What a search reads behind the words of a text that ends: the end token, and before it an end word."""
        return list(getattr(self.model.config, "closing", self.end_ids))

    @property
    def max_tokens(self) -> int | None:
        """Longest text in tokens, a begin token not counted; None = any."""
        config = self.model.config
        if self.searches:
            limit = self.model.word_search(1).machine.max_tokens
            return None if limit == float("inf") else int(limit)
        for attribute in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"):
            size = getattr(config, attribute, None)
            if isinstance(size, int) and not hasattr(self.model, "parse"):
                return size - (self.begin_id is not None)
        return None

    def describe(self) -> dict[str, Any]:
        """The model as results name it: with the paper to cite, and checksums of the weights of a folder."""
        from hf_synlm.hub.card import PAPERS

        paper = PAPERS.get(self.model.config.model_type, {}).get("citation")
        weights = sorted(Path(self.name).glob("*.safetensors")) if self.name else []
        return {
            "name": self.name,
            "revision": self.revision,
            "architecture": type(self.model).__name__,
            "num_parameters": self.model.num_parameters(),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            **({"paper": paper} if paper else {}),
            **({"weights": describe_files(weights)} if weights else {}),
        }

    def options(self) -> dict[str, Any]:
        """Everything in this object that changes numbers, for results.

        Three widths of a beam are recorded: `num_beams` derivations are kept after a word, `action_beam_size` after an
        action inside a word (RNNG), and `fast_track_size` of these move on to the next word at once (RNNG; in place of
        it `search_order`, where states are searched best-first).
        """
        beam = {}
        if self.searches:
            search = self.model.word_search(self.num_beams, **self.search_options)
            beam = {"num_beams": search.num_beams, **self.search_options}
            if "action_beam_size" in inspect.signature(self.model.parse).parameters:
                beam = {name: value for name, value in beam.items() if name != "fast_track_size"} | search.options
                beam.setdefault("normalization", self.model.config.normalization)
        begin = None if self.begin_id is None else self.tokenizer.convert_ids_to_tokens(self.begin_id)
        return {"estimator": self.estimator, **beam, "begin_token": begin, "max_tokens": self.max_tokens}

    # ------------------------------------------------------------------------------------------------------- scoring
    def score(
        self, texts: Sequence[EncodedText], *, end: bool = False, starts: bool = False, progress: str | None = None
    ) -> list[TokenScores]:
        """Scores of texts in their order, see `iterate`."""
        found = dict(self.iterate(texts, end=end, starts=starts, progress=progress))
        return [found[place] for place in range(len(texts))]

    def iterate(
        self,
        texts: Sequence[EncodedText],
        *,
        end: bool = False,
        starts: bool = False,
        progress: str | None = None,
        first_texts_first: bool = False,
    ) -> Iterator[tuple[int, TokenScores]]:
        """Score texts, and yield the place of each with its scores as soon as possible; equal ones are scored once.

        Texts longer than the model's positions are read in windows that overlap by half; every token is scored in the
        first window that contains it. Context that does not fit loses its first sentences. `self.cuts` counts both.

        Args:
            texts: encoded texts.
            end: also score the end of every text.
            starts: also give `TokenScores.word_start`.
            progress: name of a progress bar; None = no bar.
            first_texts_first: read texts nearly in their order, the first one alone; else the longest first.

        Yields:
            The place and the scores of each text.

        Raises:
            ValueError: the model does not predict ends or does not read context, `starts` with "beam_marginal", or the
                model gives a token the probability NaN.

        Cost: one pass over every different text; texts of about equal length are read together.
        """
        check_list("texts", texts, "*encode_sentences(tokenizer, [words])")
        if end and self.end_of_text == "not modeled":
            raise ValueError(
                f"{type(self.model).__name__} is not trained to predict the end of a sentence: set end=False"
            )
        if starts and self.estimator == "beam_marginal":
            raise ValueError("word correction needs the distribution over next tokens: use the estimator 'stepwise'")
        starting = word_starts(self.tokenizer, self.model.config.vocab_size, self.closing_ids) if starts else None
        windows = [self._windows(text) for text in texts]
        unique = list(dict.fromkeys(window for row in windows for window in row if window.ids))
        width = self.model.word_search(self.num_beams).num_beams if self.searches else 1
        budget = token_budget(self.model, width)
        if self.estimator != "beam_marginal" or self.entropy is not None:
            budget = min(budget, self.max_rows)
        cache = None
        if self.cache is not None:
            options = {**self.options(), "details": self.details, "end": end, "starts": starts}
            more = {"entropy": self.entropy, "attention_entropy": self.attention_entropy}
            options |= {name: kind for name, kind in more.items() if kind is not None}
            reads_end = self.searches and self.closing_ids and (end or starts)
            options |= {"closing_ids": self.closing_ids} if reads_end else {}
            cache = ResultCache(self.cache, self.model, options)
        blocks = _growing_blocks(unique, 64 * self.batch_size) if first_texts_first else [unique]
        computed = iterate_batches(
            partial(self._score_batch, end, starting),
            [batch for block in blocks for batch in batches_by_cost(block, self.batch_size, budget)],
            self.model,
            num_processes=self.num_processes,
            num_beams=width,
            cache=cache,
            progress=progress,
        )
        results: dict[_Window, TokenScores] = {}
        places: dict[_Window, list[int]] = {}
        missing = [{window for window in row if window.ids} for row in windows]
        for place, needed in enumerate(missing):
            for window in needed:
                places.setdefault(window, []).append(place)
            if not needed:
                yield place, _joined([])
        for window, values in computed:
            results[window] = TokenScores.from_dict(values)
            for place in places[window]:
                missing[place].remove(window)
                if not missing[place]:
                    yield place, _joined([(window, results.get(window)) for window in windows[place]])

    @property
    def max_rows(self) -> int:
        """Most tokens of one call whose logits are in memory together."""
        return max(1, _MAX_LOGITS // self.model.config.get_text_config().vocab_size)

    @torch.no_grad()
    def _score_batch(self, end: bool, starting: Tensor | None, batch: list["_Window"]) -> list[Result]:
        score = self._score_by_search if self.searches else self._score_by_logits
        return [scores.to_dict() for scores in score(batch, end, starting)]

    def _windows(self, text: EncodedText) -> list["_Window"]:
        """Cut a text into pieces that the model can read; keep as much of its context as fits."""
        limit, context, length = self.max_tokens, tuple(map(tuple, text.context)), len(text.ids)
        if context and not self.reads_context:
            raise ValueError(f"{type(self.model).__name__} cannot read context before a sentence: leave it out")
        if limit is None or length <= limit:
            if context:
                machine = self.model.word_search(1).machine
                room = getattr(machine, "max_with_context", machine.max_tokens)
                while context and sum(map(len, context)) + length > room:
                    context = context[1:]
            self.cuts["contexts_cut"] += len(context) < len(text.context)
            return [_Window(tuple(text.ids), context, 0)]
        self.cuts["texts_in_windows"] += 1
        stride = max(1, limit // 2)
        windows, stop = [], 0
        while stop < length:
            start = max(0, stop - (limit - stride))
            windows.append(_Window(tuple(text.ids[start : start + limit]), (), stop - start))
            stop = start + limit
        return windows

    def _padded(self, batch: list["_Window"], closing: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
        """Ids and mask [B, T] of context and text after a begin token, `closing` behind, padded on the right."""
        begin = [] if self.begin_id is None else [self.begin_id]
        rows = [torch.tensor([*begin, *(t for s in w.context for t in s), *w.ids, *closing]) for w in batch]
        ids = pad_sequence(rows, batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return ids.to(self.model.device), mask.to(self.model.device)

    # ---- exact next-token logits
    def _score_by_logits(self, batch: list["_Window"], end: bool, starting: Tensor | None) -> list[TokenScores]:
        """Scores from exact next-token logits; long texts in segments, by models that can continue from a cache."""
        ids, mask = self._padded(batch)
        # Texts of other models are at most as long as their positions, and not every cache takes several tokens.
        if self._begins_itself and len(batch) == 1 and ids.shape[1] > self.max_rows:
            return [self._scores(self._read_segments(ids, mask, starting), batch[0], end)]
        return self._read_logits(self.model(ids, attention_mask=mask).logits, batch, end, starting)

    def _read_segments(self, ids: Tensor, mask: Tensor, starting: Tensor | None) -> dict[str, Tensor]:
        """Read one text [1, T] in segments, each after the hidden-state cache of the one before."""
        following = torch.cat([ids[0, 1:], ids.new_zeros(1)])
        cache, parts = None, []
        for start in range(0, ids.shape[1], self.max_rows):
            part = slice(start, start + self.max_rows)
            output = self.model(ids[:, part], attention_mask=mask[:, part], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            parts.append(self._read(output.logits[0], following[part], starting))
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _read_logits(
        self, logits: Tensor, batch: list["_Window"], end: bool, starting: Tensor | None
    ) -> list[TokenScores]:
        scores = []
        for row, window in zip(logits, batch, strict=True):
            # Nothing follows the last token.
            following = torch.tensor([*window.ids[1 - self._num_begin :], 0], device=row.device)
            scores.append(self._scores(self._read(row[: len(following)], following, starting), window, end))
        return scores

    def _read(self, logits: Tensor, following: Tensor, starting: Tensor | None) -> dict[str, Tensor]:
        """Log-probabilities [n] after every token, given logits [n, V] and the id that follows each.

        `following`: of the next token; `ends`: that the text ends; `starts`: that a word begins or the text ends. And
        the entropy of the next token.
        """
        logits = logits.float()
        norm = logits.logsumexp(-1)
        reading = {"following": _on_host(logits.gather(1, following[:, None]).squeeze(1) - norm)}
        if self.end_ids:
            reading["ends"] = _on_host(logits[:, torch.tensor(self.end_ids, device=logits.device)].logsumexp(1) - norm)
        if starting is not None:
            which = starting.nonzero().squeeze(1).to(logits.device)
            reading["starts"] = _on_host(logits.index_select(1, which).logsumexp(1) - norm)
        if self.entropy is not None:
            reading["entropy"] = _on_host(_entropy(logits - norm[:, None], self.entropy))
        return reading

    def _scores(self, reading: dict[str, Tensor], window: "_Window", end: bool) -> TokenScores:
        """Scores of a text that was read with its begin token, if it has one."""
        length = len(window.ids)
        scores = TokenScores(_without_prefix(reading["following"][:-1], length))
        if end and "ends" in reading:
            scores.end = float(reading["ends"][-1])
        if "starts" in reading:
            scores.word_start = _without_prefix(reading["starts"], length + 1)
        if "entropy" in reading:
            scores.entropy = _without_prefix(reading["entropy"][:-1], length)
        if scores.log_probs[1 - self._num_begin :].isnan().any():
            raise ValueError(
                f"{self.name} gives tokens probabilities that are not numbers. Its weights are damaged, or values "
                f"overflow in {self.model.dtype}: load the model in float32."
            )
        return scores

    # ---- beam of derivations
    def _score_by_search(self, batch: list["_Window"], end: bool, starting: Tensor | None) -> list[TokenScores]:
        """Scores from a beam of derivations: of `parse`, or with `starting` from the beam's next-token logits.

        Entropies are always of these logits.
        """
        reads_logits = starting is not None or self.entropy is not None
        by_logits = self._score_by_beam_logits(batch, starting) if reads_logits else []
        found = by_logits
        if starting is not None and not self.details and not end and self.attention_entropy is None:
            return found
        stepwise = self.estimator == "stepwise"
        parsed = self._parse(batch, stepwise, self.closing_ids if end else ())
        if starting is None:
            chosen = parsed.stepwise_log_probs if stepwise else parsed.token_log_probs
            found = [TokenScores(values) for values in self._own_columns(chosen, batch)]
            for scores, read in zip(found, by_logits, strict=reads_logits):
                scores.entropy = read.entropy
        if self.details:
            names = {"beam_entropy": "beam_entropy", "num_actions": "num_actions", "stack_depth": "stack_depth"}
            for name, source in (names if stepwise else names | {"lexical": "lexical_log_probs"}).items():
                for scores, values in zip(found, self._own_columns(getattr(parsed, source), batch), strict=True):
                    setattr(scores, name, values)
        if self.attention_entropy is not None:
            for scores, values in zip(found, self._own_columns(parsed.attention_entropy, batch), strict=True):
                scores.attention_entropy = values
        if end:
            self._add_ends(found, parsed, batch, stepwise)
        return found

    def _parse(self, batch: list["_Window"], stepwise: bool, closing: Sequence[int]) -> Any:
        """What `parse` gives for texts after their context, with what ends them behind."""
        sentence_ids = self._context_sentence_ids(batch)
        return self.model.parse(
            *self._padded(batch, closing),
            num_beams=self.num_beams,
            stepwise=stepwise,
            lexical=self.details and not stepwise,
            **self.search_options,
            **({} if self.attention_entropy is None else {"attention_entropy": self.attention_entropy}),
            **({} if sentence_ids is None else {"context_sentence_ids": sentence_ids}),
        )

    def _add_ends(self, found: list[TokenScores], parsed: Any, batch: list["_Window"], stepwise: bool) -> None:
        if stepwise and self.closing_ids:
            for scores, values, window in zip(found, _on_host(parsed.stepwise_log_probs), batch, strict=True):
                stop = self._num_begin + window.num_tokens
                scores.end = float(values[stop : stop + len(self.closing_ids)].sum())
            return
        texts = self._own_columns(parsed.token_log_probs, batch)
        for scores, words, whole in zip(found, texts, _on_host(parsed.text_log_probs).tolist(), strict=True):
            scores.end = whole - float(words.sum())

    def _context_sentence_ids(self, batch: list["_Window"]) -> Tensor | None:
        """[B, T] 1, 2, ... in the sentences of the context and 0 elsewhere; None if no text has context."""
        if not any(window.context for window in batch):
            return None
        rows = []
        for window in batch:
            numbers = [k for k, sentence in enumerate(window.context, 1) for _ in sentence]
            rows.append(torch.tensor([0] * self._num_begin + numbers + [0] * len(window.ids)))
        return pad_sequence(rows, batch_first=True).to(self.model.device)

    def _score_by_beam_logits(self, batch: list["_Window"], starting: Tensor | None) -> list[TokenScores]:
        """Stepwise scores with `word_start` and entropies, which need the beam's distribution over all next tokens."""
        search = self.model.word_search(self.num_beams, **self.search_options)
        begin_id = self.model.config.bos_token_id
        ids, mask = self._padded(batch)
        sentence_ids, cache = self._context_sentence_ids(batch), None
        if sentence_ids is not None:
            cache = cache_after_context(search, ids, mask, sentence_ids, begin_id)
            ids, mask = self._padded([window._replace(context=()) for window in batch])
        logits, _ = marginal_logits(search, ids, mask, cache=cache, bos_token_id=begin_id)
        return self._read_logits(logits, batch, False, starting)

    def _own_columns(self, values: Tensor, batch: list["_Window"]) -> list[Tensor]:
        """The columns of the texts' own tokens, without begin token, context and what closes them, on the host."""
        cut = []
        for row, window in zip(_on_host(values), batch, strict=True):
            stop = self._num_begin + window.num_tokens
            cut.append(row[stop - len(window.ids) : stop])
        return cut

    @property
    def _num_begin(self) -> int:
        """Number of begin tokens before a text."""
        return int(self.begin_id is not None)

    @property
    def reads_context(self) -> bool:
        """Whether the model reads complete sentences before the one that it parses."""
        known = self.searches and "context_sentence_ids" in inspect.signature(self.model.parse).parameters
        return known and getattr(self.model, "reads_plain_context", True)


class _Window(NamedTuple):
    """Tokens of a text that are read together; the first `skip` are scored in an earlier window."""

    ids: tuple[int, ...]
    context: tuple[tuple[int, ...], ...]
    skip: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids) + sum(map(len, self.context))


def token_budget(model: PreTrainedModel, width: int) -> int:
    """How many tokens a call should read with a beam of this width: number of its texts times length of the longest.

    On a CPU 12,000 / width: with more, each token takes longer. On other devices, memory decides.
    """
    return _MAX_DERIVED_TOKENS // width if model.device.type == "cpu" else sys.maxsize


def batches_by_cost(texts: Sequence[T], batch_size: int, budget: int) -> list[list[T]]:
    """Group texts so that the cost of a call, its number of texts times the longest, stays in a budget.

    A single text may exceed it. The longest come first, so that a lack of memory shows at once. Of equally long texts,
    those that begin alike stand side by side, because a search reads a common beginning once.
    """
    left = sorted(texts, key=lambda text: (-text.num_tokens, text.ids))
    batches = []
    while left:
        size = max(1, min(batch_size, budget // left[0].num_tokens))
        batches.append(left[:size])
        left = left[size:]
    return batches


def _growing_blocks(texts: list[T], most: int) -> list[list[T]]:
    """1, 2, 4, ..., `most` texts at a time, in their order: the first are read soon, and most with others as long."""
    blocks, first = [], 0
    while first < len(texts):
        last = first + min(first + 1, most)
        blocks.append(texts[first:last])
        first = last
    return blocks


def _checked_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one."""
    if is_launched():
        return device_of_process(name)
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # What torch raises depends on how it was built.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used ({problem}): choose cpu, or leave it out") from error
    return device


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


def _joined(windows: list[tuple[_Window, TokenScores | None]]) -> TokenScores:
    """Scores of a text from those of its windows."""
    parts = [(window.skip, scores) for window, scores in windows if scores is not None]
    if not parts:  # a text without tokens
        nothing = torch.zeros(0, dtype=torch.float64)
        return TokenScores(nothing, nothing, nothing, nothing, nothing)
    last = parts[-1][1]
    joined = dataclasses.replace(last)
    for name in PER_TOKEN:
        if getattr(last, name) is not None:
            setattr(joined, name, torch.cat([getattr(scores, name)[skip:] for skip, scores in parts]))
    if last.word_start is not None:
        inner = [scores.word_start[skip:-1] for skip, scores in parts if scores.word_start is not None]
        joined.word_start = torch.cat([*inner, last.word_start[-1:]])
    return joined
