# SPDX-License-Identifier: Apache-2.0
"""What the models with labeled derivations share: `forward`, search, `parse`, generation, and which tokens end a word.

`search/labeled/fast_track.py` searches; here are the methods of a model that call it. RNNG and Tree LM inherit them.

Shapes: B sentences, T tokens, A actions, V vocabulary.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedConfig
from transformers.utils import can_return_tuple

from hf_synlm.core.hidden_states import HiddenStateChoice, refuse_arguments
from hf_synlm.core.losses import check_shares, share_of
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.core.outputs import ParseOutput, SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens, between_padding
from hf_synlm.generation.mixin import SYNTACTIC_GENERATION_DEFAULTS, SyntacticGenerationMixin
from hf_synlm.search.labeled.best_first import BestFirstDecoder
from hf_synlm.search.labeled.decoder import FastTrackDecoder
from hf_synlm.search.labeled.fast_track import FastTrackSearch
from hf_synlm.search.outputs import SyntacticModelOutput
from hf_synlm.search.parsing import only_token_ids, parse_with_search
from hf_synlm.search.state import SyntacticCache
from hf_synlm.trees.given import counted_words

DEFAULT_PARTICLES = 1000
_ONE_SENTENCE = "context_sentence_ids: {} reads one sentence; leave out what stands before it."


class WordFinalTokens:
    """Mixin of models that hold which tokens end a word: `word_final` of the base model, with `config.subwords`."""

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


class DerivationStates:
    """`forward` of the bare models; they write `wanted_states` and `states_of`."""

    @can_return_tuple
    def forward(
        self: Any,
        input_ids: Tensor | None = None,
        actions: Tensor | None = None,
        attention_mask: Tensor | None = None,
        word_ends: Tensor | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        **kwargs: Any,
    ) -> SyntacticModelOutput:
        """States of derivations, which a search finds where they are not given.

        Args:
            input_ids: [B, T] token ids.
            actions: [B, A] complete derivations, 0 = padding; default: the best that the search finds, as `parse` of
                the language model does.
            attention_mask: [B, T], 1 = token; padding left or right.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            output_hidden_states: also return `hidden_states`, all or those at the places given.
            output_attentions: not possible: weights are not kept.
            **kwargs: arguments of other models, which wrappers pass as None.

        Returns:
            `SyntacticModelOutput` with `last_hidden_state` [B, T, *] (right after each token; zeros at padding),
            `action_hidden_state` [B, A, *] (before each action), `sentence_state` [B, *] (when the tree is closed).

        Raises:
            ValueError: for bad shapes and ids, for sequences that are not valid derivations of the tokens, where
                attentions are asked for, and when the search finds no tree of a sentence.
            TypeError: for other keyword arguments.

        Cost: without `actions` the model first runs `parse`, hundreds of times slower.
        """
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        refuse_arguments(kwargs)
        wanted = self.wanted_states(output_hidden_states)
        mask = attended_tokens(self.config, input_ids, attention_mask)
        word_ends = self.word_ends_of(input_ids) if word_ends is None else word_ends
        if actions is None:
            if not self.has_heads:
                raise ValueError(
                    f"actions are missing: parse of the model around this {type(self).__name__} finds them."
                )
            actions = best_derivations(self, input_ids, mask, word_ends)
        return self.states_of(input_ids, actions, mask, word_ends, wanted)


class GivenTrees(NamedTuple):
    """Derivations that a call gives, and what it wants to know of them."""

    input_ids: Tensor
    actions: Tensor
    mask: Tensor
    word_ends: Tensor | None
    counted: Tensor
    """[B, T] words that count for the loss."""
    plan: Any
    per_action: float
    """Factor of the sum over actions in the loss."""
    per_word: float
    wanted: frozenset[int]
    """Places of the hidden states."""
    output_logits: bool


class FastTrackGenerationMixin(SyntacticGenerationMixin):
    """`forward`, `parse` and `generate` of a language model with labeled derivations.

    The class that inherits it sets `stack_machine_class` and writes `score_trees`.
    """

    generation_options = {**SYNTACTIC_GENERATION_DEFAULTS, "fast_track_size": None}
    takes_plan = False
    """Whether derivations may come with a `plan` that was made ahead."""
    particle_search_class: type[Any] | None = None
    """The search of `parse` with method="particle"."""

    def score_trees(self, given: GivenTrees) -> tuple[Tensor, SyntacticLMOutput]:
        """Hook: the loss of given derivations, and the other fields of the output."""
        raise NotImplementedError  # RNNG and Tree LM write it

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        actions: Tensor | None = None,
        word_ends: Tensor | None = None,
        past_key_values: Any | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_logits: bool = False,
        output_marginal_logits: bool | None = None,
        loss_shares: Mapping[str, float] | None = None,
        output_hidden_states: HiddenStateChoice = None,
        output_attentions: bool | None = None,
        return_loss: bool = True,
        **kwargs: Any,
    ) -> SyntacticLMOutput:
        """Training objective and probability of given derivations with `actions`, next-token log-probabilities without.

        With `actions` the loss is the negative log-probability of derivations and words (see the class of the model),
        normalized as `config.loss_normalization` says, by all words and actions, also where `labels` leave words out.
        The softmaxes run over all classes, legal or not, as in the authors' training. The parts are "action" and
        "word". Without: `logits`, log p(next token | prefix) with the derivations summed out over the search; nothing
        after a position changes its value. These probabilities assume that the sentence goes on; closing the tree is
        not counted.

        Args:
            input_ids: [B, T] token ids, one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right. By default everything but padding.
            actions: [B, A] complete derivations, 0 = padding (see `TransitionSystem`).
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            past_key_values: search state to continue from.
            use_cache: return the search state.
            logits_to_keep: compute `logits` for this many last positions only (0 = all).
            output_logits: also return `action_logits` [B, A, Y] and `token_logits_given_tree` [B, T, V] of the given
                derivations. (Tree LM cuts its softmax in two for them: SHIFT is any word.)
            output_marginal_logits: with `actions`, compute `logits` as well, at the cost of those alone; default:
                `config.output_marginal_logits`, in evaluation mode.
            loss_shares: by part, the share of a step's items that this call holds, where a step takes several calls
                (see `count_loss_items`): the losses of the calls add up to that of all their rows together.
            output_hidden_states: also return `hidden_states` of the given derivations, as the base model does.
            output_attentions: not possible: weights are not kept.
            return_loss: with `actions`, return the loss. (By this argument Trainer knows that actions have one.)
            **kwargs: `labels` [B, T] = `input_ids` with -100 where the word loss does not count; needs `actions`.
                Trainer drops a column of this name unless it is among its `label_names`. RNNG: `plan` of `actions`, if
                it was made ahead (`make_plan` in models/rnng/plan.py). Besides, None values, which wrappers pass for
                arguments of other models.

        Returns:
            `SyntacticLMOutput`; with `actions` its `joint_log_prob` [B] is log p(text, tree).

        Raises:
            ValueError: for bad shapes and ids, sequences that are not valid derivations of the tokens, labels without
                actions, and options that exclude each other.
            TypeError: for other keyword arguments.

        Cost: objective: one pass over given trees. Logits: T words, each about ten steps of
            `config.action_beam_size` states.
        """
        # Not in the signature: Trainer takes what is there for required.
        labels, plan = kwargs.pop("labels", None), kwargs.pop("plan", None) if self.takes_plan else None
        input_ids = only_token_ids(input_ids, kwargs.pop("inputs_embeds", None))
        refuse_arguments(kwargs)
        check_shares(loss_shares, ("action", "word"))
        wanted = self.model.wanted_states(output_hidden_states)
        if actions is None:
            if labels is not None or plan is not None or output_logits:
                raise ValueError(
                    f"labels, plan and output_logits need actions: {type(self).__name__} is trained on trees. Pass the "
                    "derivations of a treebank, or those that parse finds."
                )
            return self._marginal_forward(
                input_ids, attention_mask, past_key_values, use_cache, logits_to_keep, word_ends
            )
        mask = attended_tokens(self.config, input_ids, attention_mask)
        ends = self.model.word_ends_of(input_ids) if word_ends is None else word_ends
        counted = counted_words(input_ids, labels, mask)
        divisors = self.count_loss_items(input_ids, actions, attention_mask)
        per_action, per_word = (share_of(loss_shares, name) / divisors.get(name, 1) for name in ("action", "word"))
        given = GivenTrees(
            input_ids, actions, mask, ends, counted, plan, per_action, per_word, wanted, output_logits
        )  # fmt: skip
        loss, output = self.score_trees(given)
        if return_loss:
            output.loss = loss
        if self.wants_logits_beside(output_marginal_logits):
            output.logits = self.logits_beside(input_ids, attention_mask, word_ends=word_ends)
        return output

    def _marginal_forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: SyntacticCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        word_ends: Tensor | None = None,
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
        return super()._marginal_forward(
            input_ids, attention_mask, past_key_values, use_cache, logits_to_keep, word_ends
        )

    def count_loss_items(
        self, input_ids: Tensor, actions: Tensor, attention_mask: Tensor | None = None, **others: Any
    ) -> dict[str, int]:
        """How many items the parts of the loss are divided by; empty if `config.loss_normalization` is "sum".

        Divided by the counts of all calls of a step, these are the `loss_shares` of a call:
        `training.engine.steps.to_shares`.
        """
        kind = self.config.loss_normalization
        if kind == "sum":
            return {}
        if kind == "token":
            count = int(attended_tokens(self.config, input_ids, attention_mask).sum())
        else:
            count = len(input_ids) if kind == "batch" else int((actions != 0).sum())
        return {"action": count, "word": count}

    # ------------------------------------------------------------------------------------------------------ search
    def word_search(
        self,
        num_beams: int | None = None,
        eos_token_ids: Tensor | None = None,
        renormalize: bool = False,
        **options: Any,
    ) -> FastTrackDecoder:
        """Word-synchronous search with this model; see `labeled_search`. `renormalize` is not used."""
        return labeled_search(self, num_beams, eos_token_ids, **options)

    def decoding_searches(
        self, config: GenerationConfig, renormalize: bool
    ) -> tuple[FastTrackDecoder, FastTrackDecoder]:
        """The searches of `generate`; see `SyntacticGenerationMixin`. `renormalize` is not used: see `normalization`.

        Under normalization "train" the probabilities of what may come sum to less than one; sampling draws every action
        and word in proportion to them.
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
                "exponential_decay_length_penalty scales the probability of an end token; a sentence here ends when "
                "its tree is closed. Leave it out, or take structure_mode='marginal'."
            )

    @torch.no_grad()
    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        word_ends: Tensor | None = None,
        num_beams: int | None = None,
        action_beam_size: int | None = None,
        fast_track_size: int | None = None,
        num_return_sequences: int = 1,
        method: str = "search",
        num_particles: int | None = None,
        normalization: str | None = None,
        stepwise: bool = False,
        lexical: bool = False,
        attention_entropy: str | None = None,
        belief_update: tuple[Any, ...] | None = None,
        context_sentence_ids: Tensor | None = None,
    ) -> ParseOutput:
        """Parse given text: n-best labeled trees, and prefix probabilities.

        The surprisal of token t is `-token_log_probs[:, t]`, in nats. Under "search" it assumes that the sentence goes
        on: perplexity without ends = exp(-sum of `token_log_probs` / number of words). `log_probs` and
        `text_log_probs` are those of sentences that may end at every word, as in `generate`, so that the texts of all
        lengths share one probability. The order of the trees is that of the authors' search, which knows the length.

        Args:
            input_ids: [B, T], one sentence per row.
            attention_mask: [B, T], 1 = token; padding left or right.
            word_ends: [B, T], True at the last piece of every word; by default what the model knows of its tokens.
            num_beams: word beam; default `config.scoring_num_beams`.
            action_beam_size: beam inside a word; default `config.action_beam_size`, at least `num_beams`.
            fast_track_size: default `config.fast_track_size`.
            num_return_sequences: number of trees per sentence, at most `num_beams`.
            method: "search", or "particle" for the authors' variable-width beam (RNNG only).
            num_particles: number of particles ("particle" only); default 1,000. As in the authors' code, an action that
                gets less than half a particle is dropped, so a sentence may lose all its derivations where they are few
                and labels many: then its `log_probs` are -inf, and it has no tree.
            normalization: "search" or "train"; default `config.normalization`. Under "search" `log_probs` are higher
                than the `joint_log_prob` of `forward` for the same tree: by a nat or so for a trained model, by far
                more for an untrained one.
            stepwise: also return `stepwise_log_probs`.
            lexical: also return `lexical_log_probs`.
            attention_entropy: "projected" or "raw": also return `attention_entropy` (Tree LM only).
            belief_update: kind ("old" or "new") and order, and [B, T] True at the last token of every word (default:
                `word_ends`): also return `belief_update` and `belief_cut`.
            context_sentence_ids: [B, T], 1, 2, ... at the tokens of text before the sentence, which is read as plain
                text before the begin token (Tree LM on a backbone only).

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
        if word_ends is None:
            word_ends = self.word_ends_of(input_ids.masked_fill(~mask, 0))
        with evaluation_mode(self):
            search = self._parsing_search(
                method, num_particles, num_beams, action_beam_size, fast_track_size, normalization,
                stepwise or belief_update is not None,
            )  # fmt: skip
            if attention_entropy is not None:
                search.machine.watch_attention(attention_entropy)
            return parse_with_search(
                search,
                input_ids,
                mask,
                word_ends=word_ends,
                context_sentence_ids=context_sentence_ids,
                num_return_sequences=num_return_sequences,
                stepwise=stepwise,
                lexical=lexical,
                belief_update=belief_update,
            )

    def _parsing_search(
        self,
        method: str,
        num_particles: int | None,
        num_beams: int | None,
        action_beam_size: int | None,
        fast_track_size: int | None,
        normalization: str | None,
        wants_beam: bool,
    ) -> FastTrackSearch:
        """The search that `parse` asks for."""
        if method == "search":
            return self.word_search(
                num_beams,
                action_beam_size=action_beam_size,
                fast_track_size=fast_track_size,
                normalization=normalization,
            )
        if method != "particle" or self.particle_search_class is None:
            known = "'search'" if self.particle_search_class is None else "'search' or 'particle'"
            raise ValueError(f"{type(self).__name__} has no method {method!r}. Choose {known}.")
        if wants_beam:
            raise ValueError("method='particle' gives neither stepwise probabilities nor belief updates.")
        particles = DEFAULT_PARTICLES if num_particles is None else num_particles
        return self.particle_search_class(self.stack_machine_class(self, normalization), particles)


def labeled_search(
    model: Any,
    num_beams: int | None = None,
    eos_token_ids: Tensor | None = None,
    *,
    action_beam_size: int | None = None,
    fast_track_size: int | None = None,
    normalization: str | None = None,
) -> FastTrackDecoder:
    """Word-synchronous search with a model that has heads; None = the fields of its configuration, made to fit.

    `eos_token_ids` [E] stand for the end of a sentence; None = sentences go on.
    """
    config = model.config
    width = _default_width(config, action_beam_size) if num_beams is None else num_beams
    if action_beam_size is None:
        action_beam_size = max(config.action_beam_size, width if isinstance(width, int) else 0)
    track = config.fast_track_size if fast_track_size is None else fast_track_size
    machine = model.stack_machine_class(model, normalization, eos_token_ids)
    kind = BestFirstDecoder if config.searches_best_first else FastTrackDecoder
    return kind(machine, width, action_beam_size, track, eos_token_ids)


def _default_width(config: PreTrainedConfig, action_beam_size: int | None) -> int:
    """Word beam where none is asked for."""
    width = config.scoring_num_beams
    return width if not isinstance(action_beam_size, int) else max(1, min(width, action_beam_size))


@torch.no_grad()
def best_derivations(model: Any, input_ids: Tensor, mask: Tensor, word_ends: Tensor | None) -> Tensor:
    """Actions [B, A] of the best trees that the search with the heads of a model finds."""
    with evaluation_mode(model):
        output = parse_with_search(labeled_search(model), input_ids, mask, word_ends=word_ends)
    # In-order, the tree of one word may be the bare word: no span, but a derivation.
    missing = [row for row, trees in enumerate(output.spans) if not trees]
    if missing:
        raise ValueError(f"The search finds no tree of row {missing[0]}. Pass actions, or raise action_beam_size.")
    return output.actions[:, 0]
