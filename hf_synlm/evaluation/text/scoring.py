# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of tokens under any causal language model of transformers, in batches, every text once.

Estimators of log p(token | prefix):

    exact           from `forward(...).logits`: models whose next-token distribution is computed, not searched
    beam_marginal   m_t - m_(t-1), with m_t = log of the sum of p(x_1..t, y) over the derivations y in a beam (GPST,
                    RNNG). What the papers report. The sum over a text is a lower bound on the log-probability of
                    its beginning, and with the end (below) on that of the text; a single value may even be positive.
                    Splits into a lexical and a structural part.
    stepwise        log of the normalized distribution that the beam gives over the next token: `forward(...).logits`
                    of GPST and RNNG, what minicons and lm-eval see. A proper distribution for each prefix.

End of a text: a model that predicts an end token has its log-probability; URNNG and Pushdown Layers read it after the
words. For RNNG and Tree LM the tree is closed instead (this has a probability, but no token). Under normalization
"search" their words are predicted as if the sentence went on, so the end also holds the cost of not ending sooner.
Words and end together are log p(text). GPST and an LSTM of this library do not predict ends.

Shapes: B texts, T tokens, V vocabulary. Log-probabilities in nats, float64 once they are on the host.
"""

import copy
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase, set_seed

import hf_synlm.evaluation.text.ngram  # noqa: F401  registers its model type
from hf_synlm.core.configuration_base import position_limit
from hf_synlm.data.collate import word_ends_from_word_ids
from hf_synlm.data.files import find_model, flag_of
from hf_synlm.data.text import PathLike, Tokenization, check_list, tokenization_of
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text.batches import (
    Window,
    cut_windows,
    iterate_texts,
    token_budget,
    usual_batch_size,
)
from hf_synlm.evaluation.text.cache import ResultCache
from hf_synlm.evaluation.text.processes import checked_device
from hf_synlm.evaluation.text.readers import AttentionEntropy, Entropy, LogitReader, SearchReader
from hf_synlm.evaluation.text.token_scores import TokenScores, joined
from hf_synlm.evaluation.text.words import EncodedText, encode_sentences, has_words, word_starts
from hf_synlm.hub.abilities import declared, parse_options
from hf_synlm.hub.loading import load_pretrained

Estimator = Literal["exact", "beam_marginal", "stepwise"]
# Most numbers in the logits of one call: 1 GiB in float32.
_MAX_LOGITS = 1 << 28


class TextScorer:
    """Scores texts with a causal language model.

    Args:
        model: any causal language model of transformers; it stays on its device.
        tokenizer: a fast tokenizer.
        estimator: see the top of this file; None = "beam_marginal" for models with a search, otherwise "exact".
        num_beams: derivations kept after a word (models with a search); None = the model's `scoring_num_beams`.
        search_options: further options of `parse` (RNNG: `action_beam_size`, `fast_track_size`, `normalization`).
        batch_size: largest number of texts per call of the model; None = 16 on a CPU, 128 on other devices. Calls are
            smaller if logits are large, lengths differ, beams are wide on a CPU, or memory runs out.
        begin: predict the first token from a begin token. If False, the first token has no probability (not possible
            for the models of this library, which always use a begin token).
        begin_token: the begin token; None = the tokenizer's, or the one of the model's configuration. The choice
            matters: a model tuned on chats may know its begin token only before instructions, and may predict plain
            text much better after the end token of its pretraining.
        details: also give lexical parts and beam statistics if the model has them.
        entropy: also give the entropy of every token before it is read: "shannon", -sum_v p_v log p_v, or "renyi" of
            order 1/2, 2 log sum_v sqrt(p_v). For models that search it is that of the "stepwise" distribution.
        attention_entropy: also give the normalized attention entropy of every token (Tree LM): of "raw" attention
            weights, or "projected", in which each counts by the length of the vector that it adds to the output.
        belief_update: kind ("old" or "new") and order of the belief update of every word (models with a search); see
            `hf_synlm.search.beliefs`.
        name: name of the model in results.
        revision: revision of the model, for results.
        num_processes: how many processes score on a CPU, with one thread each; None = as many as save time, and under
            `accelerate launch` all of its processes; see `hf_synlm.evaluation.text.processes`.
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
        batch_size: int | None = None,
        begin: bool = True,
        begin_token: str | None = None,
        details: bool = False,
        entropy: Entropy | None = None,
        attention_entropy: AttentionEntropy | None = None,
        belief_update: tuple[str, float] | None = None,
        name: str | None = None,
        revision: str | None = None,
        num_processes: int | None = 1,
        cache: PathLike | None = None,
    ) -> None:
        self.model, self.tokenizer = model.eval(), tokenizer
        self.num_processes, self.cache = num_processes, cache
        self.batch_size, self.details, self.entropy = usual_batch_size(batch_size, model), details, entropy
        self.attention_entropy, self.belief_update = attention_entropy, belief_update
        self.name, self.revision = name or model.config._name_or_path, revision
        self.searches = bool(declared(model.config, "searches"))
        self.text_style = getattr(model.config, "text_style", None)
        self.search_options = {k: v for k, v in (search_options or {}).items() if v is not None}
        self.num_beams = num_beams
        self.cuts = {"texts_in_windows": 0, "contexts_cut": 0}
        if attention_entropy is not None and not declared(model.config, "measures_attention"):
            raise ValueError(
                f"attention_entropy {attention_entropy!r} (--attention-entropy): {type(model).__name__} does not "
                "attend to derivations. Leave this option out, or choose a Tree LM or a Transformer Grammar."
            )
        if belief_update is not None and not self.searches:
            raise ValueError(
                f"belief_update {belief_update} (--belief-update): {type(model).__name__} has no beam of "
                "derivations. Leave this option out, or choose GPST, RNNG, Tree LM, URNNG or Pushdown Layers."
            )
        self.estimator: Estimator = self._checked_estimator(estimator)
        self.begin_id = self._begin_id(begin_token) if begin else None
        if (not begin or begin_token is not None) and self.begins_itself:
            raise ValueError(
                f"begin={begin}, begin_token={begin_token!r} (--no-first-word, --begin-token): "
                f"{type(model).__name__} always begins with its own begin token. Leave both options out. If you do "
                "not want the first word, drop it from your analysis."
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
        backbone: str | None = None,
        seed: int = 0,
        auto_class: Any = AutoModelForCausalLM,
        **options: Any,
    ) -> "TextScorer":
        """Load a model with its tokenizer.

        Args:
            name: a folder, or a name on the Hub.
            revision: branch, tag or commit on the Hub.
            trust_remote_code: run code that comes with the model.
            device: None = a GPU if there is one.
            dtype: floating point type of the weights; "auto" = as saved, but float32 for 16 bits on a CPU.
            backbone: folder or Hub name of the backbone of an adapter; None = the one that the adapter names.
            seed: set before loading.
            auto_class: the Auto class that loads it. A parser that gives no probabilities of words can parse only.
            **options: passed to `TextScorer`.

        Returns:
            The scorer.

        Raises:
            ValueError: the model or the device does not exist; see also `TextScorer`.
        """
        name, device = find_model(name), checked_device(device)
        set_seed(seed)
        model, tokenizer = load_pretrained(
            name,
            auto_class,
            dtype=dtype,
            backbone=backbone,
            revision=revision,
            trust_remote_code=trust_remote_code,
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
        other.details, other.entropy, other.attention_entropy, other.belief_update = False, None, None, None
        return other

    @property
    def noted(self) -> dict[str, Any]:
        """Arguments of `parse` that ask for measures of tokens, with their values."""
        asked = {"attention_entropy": self.attention_entropy, "belief_update": self.belief_update}
        return {name: value for name, value in asked.items() if value is not None}

    # ------------------------------------------------------------------------------------------- what the model has
    def _checked_estimator(self, estimator: str | None) -> Estimator:
        allowed: tuple[Estimator, ...] = ("beam_marginal", "stepwise") if self.searches else ("exact",)
        name = type(self.model).__name__
        if estimator is not None and estimator not in allowed:
            raise ValueError(f"estimator {estimator!r}: for {name} choose {' or '.join(map(repr, allowed))}")
        given = {**self.search_options, **({} if self.num_beams is None else {"num_beams": self.num_beams})}
        # `parse` of models that do not search takes a beam, too, which changes nothing.
        unknown = sorted(set(given) - parse_options(self.model))
        if unknown:
            flags = ", ".join(f"{option} ({flag_of(option)})" for option in unknown)
            raise ValueError(f"{flags}: not an option of {name}. Leave {flags} out.")
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
        candidates = (*(own if self.begins_itself else reversed(own)), self.tokenizer.eos_token_id, *self.end_ids)
        found = next((token for token in candidates if token is not None), None)
        if found is None:
            raise ValueError(
                "the model has no begin or end token, and cannot predict the first word without one of them. Name a "
                "begin token by begin_token (--begin-token), or set bos_token_id in its configuration"
            )
        return found

    @property
    def begins_itself(self) -> bool:
        """Whether the model is one of this library, which begins every text with the token of its configuration."""
        return self._sentence_end is not None

    @property
    def _sentence_end(self) -> str | None:
        """`sentence_end` of a model of this library; None for others."""
        return declared(self.model.config, "sentence_end")

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
        return "end token" if self.closing_ids else "trees closed" if self._sentence_end == "tree" else "not modeled"

    @property
    def closing_ids(self) -> list[int]:
        """Tokens that a search reads after the words of a text that ends: an end word, if any, and the end token."""
        own = declared(self.model.config, "closing")
        return self.end_ids if own is None else list(own)

    @property
    def max_tokens(self) -> int | None:
        """Longest text in tokens, a begin token not counted; None = any."""
        config = self.model.config
        if self.searches:
            limit = self.model.word_search(1).machine.max_tokens
            return None if limit == float("inf") else int(limit)
        limit = position_limit(config)
        return None if limit is None else limit - (self.begin_id is not None)

    def describe(self) -> dict[str, Any]:
        """Description of the model for results, with the paper to cite, and checksums of the weights of a folder."""
        from hf_synlm.hub.card import paper_of

        paper = paper_of(self.model.config).get("citation")
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

        Three widths of a beam are recorded. `num_beams` derivations are kept after a word. `action_beam_size` are kept
        after an action inside a word (RNNG). `fast_track_size` of these move on to the next word at once (RNNG). A
        best-first search has `search_order` instead.
        """
        beam = {}
        if self.searches:
            search = self.model.word_search(self.num_beams, **self.search_options)
            beam = {"num_beams": search.num_beams, **self.search_options}
            if declared(self.model.config, "gives_labels"):
                beam = {name: value for name, value in beam.items() if name != "fast_track_size"} | search.options
                beam.setdefault("normalization", self.model.config.normalization)
        begin = None if self.begin_id is None else self.tokenizer.convert_ids_to_tokens(self.begin_id)
        return {"estimator": self.estimator, **beam, "begin_token": begin, "max_tokens": self.max_tokens}

    # ------------------------------------------------------------------------------------------------------- scoring
    def tokenization(self, given: Tokenization | None) -> Tokenization:
        """How the model reads the words of a text: as given, or as its `text_style` says."""
        return tokenization_of(self.text_style, given)

    def encode(self, sentences: Sequence[Sequence[str]], tokenize: Tokenization | None = None) -> list[EncodedText]:
        """`encode_sentences` for this model."""
        return encode_sentences(self.tokenizer, sentences, self.tokenization(tokenize), self.text_style)

    def score(
        self, texts: Sequence[EncodedText], *, end: bool = False, starts: bool = False, progress: str | None = None
    ) -> list[TokenScores]:
        """Scores of texts in their order, see `iterate`."""
        check_list("texts", texts, "*encode_sentences(tokenizer, [words])")
        return list(self.iterate(list(texts), end=end, starts=starts, progress=progress))

    def iterate(
        self,
        texts: Iterable[EncodedText],
        *,
        end: bool = False,
        starts: bool = False,
        progress: str | None = None,
    ) -> Iterator[TokenScores]:
        """Score texts, and yield the scores in the order of the texts; equal texts of a list are scored once.

        Texts longer than the model's positions are read in windows that overlap by half; every token is scored in the
        first window that contains it. Context that does not fit loses its first sentences. `self.cuts` counts both.

        Args:
            texts: encoded texts. The longest texts of a list are read first. Those of an iterator are read nearly in
                order, the first one alone, and forgotten when they are scored.
            end: also score the end of every text.
            starts: also give `TokenScores.word_start`.
            progress: name of a progress bar; None = no bar.

        Yields:
            The scores of each text.

        Raises:
            ValueError: the model does not predict ends or does not read context, `starts` with "beam_marginal", or the
                model gives a token the probability NaN.

        Cost: one pass over every different text; texts of about equal length are read together.
        """
        if end and self.end_of_text == "not modeled":
            raise ValueError(
                f"{type(self.model).__name__} is not trained to predict the end of a sentence. Set end=False (leave "
                "--end-of-sentence out)"
            )
        if starts and self.estimator == "beam_marginal":
            raise ValueError("word correction needs the distribution over next tokens. Use the estimator 'stepwise'")
        starting = word_starts(self.tokenizer, self.model.config.vocab_size, self.closing_ids) if starts else None
        width = self.model.word_search(self.num_beams).num_beams if self.searches else 1
        budget = token_budget(self.model, width)
        if self.estimator != "beam_marginal" or self.entropy is not None:
            budget = min(budget, self.max_rows)
        reader = SearchReader if self.searches else LogitReader
        for row in iterate_texts(
            texts,
            self._windows,
            reader(self, end, starting),
            self.model,
            batch_size=self.batch_size,
            budget=budget,
            num_processes=self.num_processes,
            num_beams=width,
            cache=self._result_cache(end, starts),
            progress=progress,
        ):
            yield joined([(window, TokenScores.from_dict(result)) for window, result in row])

    def _result_cache(self, end: bool, starts: bool) -> ResultCache | None:
        """The file of results, under everything that changes them."""
        if self.cache is None:
            return None
        options = {**self.options(), "details": self.details, "end": end, "starts": starts}
        options |= self.noted | ({} if self.entropy is None else {"entropy": self.entropy})
        reads_end = self.searches and self.closing_ids and (end or starts)
        options |= {"closing_ids": self.closing_ids} if reads_end else {}
        return ResultCache(self.cache, self.model, options)

    @cached_property
    def is_told_word_ends(self) -> bool:
        """Whether `parse` is told where words end: for labeled trees over pieces, if the model cannot know it.

        No constituent cuts a word then, as in training.
        """
        return getattr(self.model.config, "subwords", None) is False and not has_words(self.tokenizer)

    @property
    def max_rows(self) -> int:
        """Largest number of tokens in one call whose logits are in memory together."""
        return max(1, _MAX_LOGITS // self.model.config.get_text_config().vocab_size)

    @property
    def reads_context(self) -> str | None:
        """How the model reads the sentences before the one that it parses; see `SyntacticConfig`."""
        return declared(self.model.config, "reads_context")

    @property
    def max_context(self) -> float:
        """Largest number of tokens of a sentence with its context."""
        room: float | None = getattr(self.model.word_search(1).machine, "max_with_context", self.max_tokens)
        return math.inf if room is None else room

    def _windows(self, text: EncodedText) -> list[Window]:
        """Pieces of a text that the model can read; `cuts` counts texts and contexts that do not fit."""
        if text.context and not self.reads_context:
            raise ValueError(f"{type(self.model).__name__} cannot read context before a sentence. Leave context out")
        room = self.max_context if text.context else None
        ends = {"word_ends": text.word_ends} if self.is_told_word_ends else {}
        if self.belief_update is not None:
            ends["belief_ends"] = word_ends_from_word_ids(text.word_of_token)
        windows = cut_windows(text, self.max_tokens, room, ends)
        self.cuts["texts_in_windows"] += len(windows) > 1
        self.cuts["contexts_cut"] += len(windows) == 1 and len(windows[0].context) < len(text.context)
        return windows if text.ids else []
