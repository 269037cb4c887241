# SPDX-License-Identifier: Apache-2.0
"""What the models with labeled derivations share: search, `parse`, generation, and which tokens end a word.

`search/labeled/fast_track.py` searches; here are the methods of a model that call it. RNNG and Tree LM inherit them.

Shapes: B sentences, T tokens, A actions, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedConfig

from hf_synlm.core.module_tools import also_takes, evaluation_mode
from hf_synlm.core.outputs import ParseOutput, SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens, between_padding
from hf_synlm.generation.given_trees import GivenTrees
from hf_synlm.generation.mixin import SYNTACTIC_GENERATION_DEFAULTS, SyntacticGenerationMixin
from hf_synlm.search.labeled.best_first import BestFirstDecoder
from hf_synlm.search.labeled.decoder import FastTrackDecoder
from hf_synlm.search.labeled.fast_track import FastTrackSearch
from hf_synlm.search.parsing import parse_with_search
from hf_synlm.search.state import SyntacticCache

_ONE_SENTENCE = "context_sentence_ids: {} reads one sentence. Leave out the text before this sentence."


class LabeledTrees:
    """Mixin of models with labeled derivations: their search, and which tokens end a word.

    `word_final` of the base model holds the latter, with `config.subwords`.
    """

    def word_search(
        self: Any,
        num_beams: int | None = None,
        eos_token_ids: Tensor | None = None,
        renormalize: bool = False,
        *,
        action_beam_size: int | None = None,
        fast_track_size: int | None = None,
        normalization: str | None = None,
    ) -> FastTrackDecoder:
        """Word-synchronous search; None = the fields of the configuration, made to fit. `renormalize` is not used.

        `eos_token_ids` [E] stand for the end of a sentence; None = sentences do not end.
        """
        config = self.config
        width = _default_width(config, action_beam_size) if num_beams is None else num_beams
        if action_beam_size is None:
            action_beam_size = max(config.action_beam_size, width if isinstance(width, int) else 0)
        track = config.fast_track_size if fast_track_size is None else fast_track_size
        machine = self.stack_machine_class(self, normalization, eos_token_ids)
        kind = BestFirstDecoder if config.searches_best_first else FastTrackDecoder
        return kind(machine, width, action_beam_size, track, eos_token_ids)

    def resize_token_embeddings(self: Any, *args: Any, **kwargs: Any) -> nn.Embedding:
        """Resize the vocabulary as transformers does; with `config.subwords` new tokens end a word."""
        embeddings = super().resize_token_embeddings(*args, **kwargs)
        base = self.base_model
        if self.config.subwords:
            flags, new = base.word_final, base.word_final.new_ones(self.config.vocab_size)
            new[: len(flags)] = flags[: len(new)]
            base.word_final = new
        return embeddings

    def word_ends_of(self: Any, input_ids: Tensor) -> Tensor | None:
        """Which tokens end a word, for ids of any shape; None where every token does."""
        return self.base_model.word_final[input_ids.long()] if self.config.subwords else None


class FastTrackGenerationMixin(SyntacticGenerationMixin):
    """`parse` and `generate` of a language model with labeled derivations; `forward` is in `generation/given_trees.py`.

    The class that inherits it sets `stack_machine_class` and writes `score_trees`. The loss is normalized as
    `config.loss_normalization` says, by all words and actions, even if `labels` leave words out. The softmaxes run over
    all classes, legal or not, as in the authors' training.
    """

    word_search = LabeledTrees.word_search  # and not that of the mixin
    generation_options = {**SYNTACTIC_GENERATION_DEFAULTS, "fast_track_size": None}

    def given_trees(self, *args: Any, **wants: Any) -> GivenTrees:
        """The trees of a call, with what the model knows of its tokens; see `TreeScoringMixin`."""
        given = super().given_trees(*args, **wants)
        if given.word_ends is None:
            given.word_ends = self.word_ends_of(given.input_ids.masked_fill(~given.mask, 0))
        return given

    def _marginal_forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, past_key_values: Any = None, **options: Any
    ) -> SyntacticLMOutput:
        """Next-token log-probabilities, derivations summed out over the word-synchronous search."""
        if attention_mask is None:
            attended_tokens(self.config, input_ids, None)  # checks
            attention_mask = self._default_attention_mask(input_ids).bool()
            begun = getattr(past_key_values, "begun", None)
            if begun is not None and len(begun) == len(input_ids):
                # The begin token of these rows has been read: everything but padding is a word.
                words = between_padding(input_ids, self.config.pad_token_id)
                attention_mask = torch.where(begun[:, None], words, attention_mask)
        return super()._marginal_forward(input_ids, attention_mask, past_key_values, **options)

    def count_loss_items(self, input_ids: Tensor, **others: Any) -> dict[str, int]:
        """See `TreeScoringMixin`; empty if `config.loss_normalization` is "sum"."""
        kind = self.config.loss_normalization
        if kind == "sum":
            return {}
        if kind == "token":
            count = int(attended_tokens(self.config, input_ids, others.get("attention_mask")).sum())
        else:
            count = len(input_ids) if kind == "batch" else int((others["actions"] != 0).sum())
        return dict.fromkeys(self.loss_parts, count)

    # ------------------------------------------------------------------------------------------------------ search
    def decoding_searches(
        self, config: GenerationConfig, renormalize: bool
    ) -> tuple[FastTrackDecoder, FastTrackDecoder]:
        """The searches of `generate`; see `SyntacticGenerationMixin`. `renormalize` is not used: see `normalization`.

        Under normalization "train" the probabilities of possible actions and words sum to less than one; sampling draws
        every action and word in proportion to them.
        """
        options = self._search_options(config)
        width = max(_default_width(self.config, config.action_beam_size), config.num_beams)
        return (
            self.word_search(width, **options),
            self.word_search(config.num_beams, self.own_end(config), **options),
        )

    @staticmethod
    def _search_options(config: GenerationConfig) -> dict[str, Any]:
        return {
            "action_beam_size": config.action_beam_size,
            "fast_track_size": config.fast_track_size,
        }

    def _new_cache(self, config: GenerationConfig) -> SyntacticCache:
        width, ends = _default_width(self.config, config.action_beam_size), self.own_end(config)
        return SyntacticCache(width, ends, **self._search_options(config))

    def _fit_cache(self, config: GenerationConfig, cache: SyntacticCache) -> None:
        for name in ("action_beam_size", "fast_track_size"):
            asked, has = getattr(config, name), cache.options.get(name)
            if asked is not None and asked != has:
                raise ValueError(f"{name}={asked}, but past_key_values was made with {has}. Leave {name} out.")
        cache.set_end_tokens(self.own_end(config))

    def _default_attention_mask(self, prompt: Tensor) -> Tensor:
        # The stock inference gives up where padding and end have one id; here padding is never a word. Where it is the
        # begin token, too, the one right before the text stays: the first word is predicted from it.
        word = (prompt != self.config.pad_token_id).long()
        before = word.cumsum(1) == 0
        mask = word.flip(1).cummax(1).values.flip(1).bool() & ~before
        if self.config.bos_token_id == self.config.pad_token_id:
            mask = mask | (before & ~F.pad(before[:, 1:], (0, 1)))
        return mask.long()

    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        if model_kwargs.get("context_sentence_ids") is not None:
            raise ValueError(_ONE_SENTENCE.format(type(self).__name__))
        super()._validate_model_kwargs(model_kwargs)

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict
    ) -> None:
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        decay = generation_config.exponential_decay_length_penalty
        if decay is not None and generation_config.structure_mode == "joint":
            raise ValueError(
                "exponential_decay_length_penalty scales the probability of an end token. But sentences here end "
                "when their tree is closed. Leave this option out, or take structure_mode='marginal'."
            )

    @torch.no_grad()
    @also_takes(SyntacticGenerationMixin.parse)
    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        num_beams: int | None = None,
        action_beam_size: int | None = None,
        fast_track_size: int | None = None,
        method: str = "search",
        num_particles: int | None = None,
        normalization: str | None = None,
        attention_entropy: str | None = None,
        context_sentence_ids: Tensor | None = None,
        **options: Any,
    ) -> ParseOutput:
        """Parse given text: n-best labeled trees, and prefix probabilities.

        The surprisal of token t is `-token_log_probs[:, t]`, in nats. Under "search" it assumes that the sentence goes
        on. Perplexity without ends = exp(-sum of `token_log_probs` / number of words). `log_probs` and `text_log_probs`
        are those of sentences that may end at every word, as in `generate`, so that the texts of all lengths share one
        probability. The order of the trees is that of the authors' search, which knows the length.

        Args:
            input_ids: [B, T], one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right.
            num_beams: word beam; default `config.scoring_num_beams`.
            action_beam_size: beam inside a word; default `config.action_beam_size`, at least `num_beams`.
            fast_track_size: default `config.fast_track_size`.
            method: "search", or "particle" for the authors' variable-width beam (RNNG only).
            num_particles: number of particles ("particle" only); default 1,000. As in the authors' code, an action that
                gets less than half a particle is dropped. With few particles and many labels, a sentence may lose all
                its derivations. It then has `log_probs` of -inf and no tree.
            normalization: "search" or "train"; default `config.normalization`. Under "search" `log_probs` are higher
                than the `joint_log_prob` of `forward` for the same tree. The difference is about a nat for a trained
                model, and far more for an untrained one.
            attention_entropy: "projected" or "raw": also return `attention_entropy` (Tree LM only).
            context_sentence_ids: [B, T], 1, 2, ... at the tokens of text before the sentence, which is read as plain
                text before the begin token (Tree LM on a backbone only).
            **options: see `SyntacticGenerationMixin.parse`; `word_ends` are by default as the model knows them.

        Returns:
            `ParseOutput` with `labels`; spans and labels list every constituent, unary chains from the bottom up.

        Raises:
            ValueError: for an unknown method, options that the method does not have, and bad input (see `forward`).

        Cost: about ten steps per word of up to `action_beam_size` states.
        Source: Noji and Oseki 2021, section 3; `word_sync_beam_search` and `variable_beam_search` of their code.
        """
        mask = attended_tokens(self.config, input_ids, attention_mask)
        if context_sentence_ids is not None and self.config.reads_context is None:
            raise ValueError(_ONE_SENTENCE.format(type(self).__name__))
        if options.get("word_ends") is None:
            options["word_ends"] = self.word_ends_of(input_ids.masked_fill(~mask, 0))
        with evaluation_mode(self):
            if method == "search":
                beams: dict[str, Any] = {"action_beam_size": action_beam_size, "fast_track_size": fast_track_size}
                search = self.word_search(num_beams, normalization=normalization, **beams)
            else:
                search = self.other_search(method, num_particles, normalization, **options)
            if attention_entropy is not None:
                search.machine.watch_attention(attention_entropy)
            return parse_with_search(search, input_ids, mask, context_sentence_ids, None, None, **options)

    def other_search(
        self, method: str, num_particles: int | None, normalization: str | None, **options: Any
    ) -> FastTrackSearch:
        """Hook: the search of `parse` with another method than "search"."""
        raise ValueError(f"{type(self).__name__} has no method {method!r}. Choose 'search'.")


def _default_width(config: PreTrainedConfig, action_beam_size: int | None) -> int:
    """Word beam where none is asked for."""
    width = config.scoring_num_beams
    return width if not isinstance(action_beam_size, int) else max(1, min(width, action_beam_size))
