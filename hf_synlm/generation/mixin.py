# SPDX-License-Identifier: Apache-2.0
"""`generate` for syntactic language models: preparation by transformers, decoding loop of this library.

One step of the loop is one word, and structural actions are inner steps. So processors, stopping criteria, end tokens,
length limits and streamers see words only. Two modes:

* `structure_mode="joint"` (default): the papers' search over derivation and words together.
* `structure_mode="marginal"`: a beam of derivations is the model's cached state, `forward` gives log p(word | prefix)
  with the derivations summed out, and the decoding loops of transformers run on it.

Shapes: B prompts, K hypotheses, R rows of a block, L columns of a sequence, A actions, N nodes, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, SuppressTokensLogitsProcessor
from transformers.generation import SynthIDTextWatermarkLogitsProcessor
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from hf_synlm.core.cache import CACHE
from hf_synlm.core.module_tools import also_takes, evaluation_mode
from hf_synlm.core.outputs import GeneratedTrees, ParseOutput, SyntacticLMOutput
from hf_synlm.core.token_batch import attended_tokens, first_token_mask
from hf_synlm.generation.base import WordGenerationMixin, checked_prompts
from hf_synlm.generation.given_trees import TreeScoringMixin
from hf_synlm.generation.joint import JointDecoder
from hf_synlm.search.parsing import (
    check_length,
    checked_mask,
    marginal_logits,
    parse_with_search,
)
from hf_synlm.search.state import GeneratingSearch, SyntacticCache, check_count
from hf_synlm.search.synchronous import SynchronousSearch

# Kept on `generation_config`: saved in generation_config.json, and accepted by `generate`.
SYNTACTIC_GENERATION_DEFAULTS: dict[str, Any] = {
    "structure_mode": "joint",
    "action_beam_size": None,
    "synchronous": True,
    "close_tree": True,
}
# Arguments of `generate` that are neither generation options nor arguments of `forward`.
_SEARCH_INPUTS = ("context_sentence_ids",)
_NO_SYNTHID = (
    "SynthID watermarking has a state that every call changes, and joint mode calls processors several times per word; "
    "use structure_mode='marginal'"
)


@dataclass
class SyntacticGenerateOutput(GeneratedTrees, GenerateDecoderOnlyOutput):
    """Result of greedy search and sampling with trees (see `GeneratedTrees`).

    Fields:
        sequences_scores: [B] sum over the new words and the derivation of log-probabilities in nats. Greedy search adds
            up the word scores that the processors give (without processors: log p(new words, derivation | prompt));
            sampling adds up those of the model itself, without processors. -inf if the prompt has no derivation.
    """


@dataclass
class SyntacticGenerateBeamOutput(GeneratedTrees, GenerateBeamDecoderOnlyOutput):
    """Result of beam search with trees (see `GeneratedTrees`).

    Fields:
        sequences_scores: [B], always there: the sum of the action log-probabilities and of the word scores that the
            processors give (without processors: log p(new words, derivation | prompt)), in nats. Beam search, and beam
            sampling with synchronous=False, divide it by (new words) ** length_penalty. Word-synchronous beam sampling
            does not. -inf for missing sequences, if fewer exist than were asked for; these are the prompt alone.
    """


class JointBeamScores(tuple):
    """`scores` of joint beam search: per word, log p(word | hypothesis) of all hypotheses, structure summed out.

    A class of its own, because these do not add up to `sequences_scores`: see `compute_transition_scores`.
    """


def _refuse_gradient(gradient: Tensor) -> None:
    """In training, torch would only say that something does not require a gradient."""
    raise ValueError(
        "Next-token logits come from a search and have no gradient. For training, pass labels (for RNNG, actions) "
        "and take the loss of the output. With Trainer, leave label_smoothing_factor at 0."
    )


# --------------------------------------------------------------------------------------------------------- the mixin
class SyntacticGenerationMixin(TreeScoringMixin, WordGenerationMixin):
    """`generate`, the marginal `forward` and the search of a syntactic language model.

    The class that inherits it sets `stack_machine_class`; see `LevelMachine` in search/level_machine.py. Its config
    has `scoring_num_beams`, `bos_token_id` and `vocab_size`.
    """

    stack_machine_class: type[Any]
    action_decoder_class: type[JointDecoder] | None = None
    """The loop of `generate(..., synchronous=False)`."""
    generation_options = SYNTACTIC_GENERATION_DEFAULTS
    predicts_special_tokens = False
    """Whether padding and begin token have a probability as words, so that `generate` must exclude them."""
    _is_stateful = True

    def word_search(
        self, num_beams: int | None = None, eos_token_ids: Tensor | None = None, renormalize: bool = False
    ) -> GeneratingSearch:
        """Word-synchronous search with this model.

        Args:
            num_beams: Width K; None = `config.scoring_num_beams`.
            eos_token_ids: Words [E] that end the text. They may come only when exactly one tree is on the stack.
            renormalize: Forbid structural actions before the softmax over actions instead of after it.

        Returns:
            The search.
        """
        width = self.config.scoring_num_beams if num_beams is None else num_beams
        return SynchronousSearch(self.stack_machine_class(self), width, eos_token_ids, renormalize)

    def decoding_searches(
        self, config: GenerationConfig, renormalize: bool
    ) -> tuple[GeneratingSearch, GeneratingSearch]:
        """The search that reads prompts, and the one that generates, for a prepared generation config."""
        width = max(config.action_beam_size or self.config.scoring_num_beams, config.num_beams)
        return (
            self.word_search(width, renormalize=renormalize),
            self.word_search(config.num_beams, self.own_end(config), renormalize),
        )

    def own_end(self, config: GenerationConfig) -> Tensor | None:
        """The end token of the model itself [1], which needs a finished tree; None = texts have no end."""
        own = self.config.eos_token_id
        return None if config._eos_token_tensor is None or own is None else config._eos_token_tensor.new_full((1,), own)

    @torch.compiler.disable  # the search decides on the host what comes next: tracing it would gain nothing
    def _marginal_forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: SyntacticCache | None = None,
        *,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        word_ends: Tensor | None = None,
    ) -> SyntacticLMOutput:
        """Next-token log-probabilities with the derivations summed out; see `marginal_logits`."""
        if torch.compiler.is_exporting():
            raise ValueError(
                f"Next-token logits of {type(self).__name__} come from a search. Its steps depend on the text, so "
                "they cannot be exported as one graph. Export layers (see docs/what-works.md), or use the model "
                "itself."
            )
        cache = past_key_values
        search = (
            self.word_search() if cache is None
            else self.word_search(cache.num_beams, cache.eos_token_ids, **cache.options)
        )  # fmt: skip
        logits, cache = marginal_logits(
            search,
            input_ids,
            attention_mask,
            cache=past_key_values,
            word_ends=word_ends,
            bos_token_id=self.config.bos_token_id,
            logits_to_keep=logits_to_keep,
        )
        if self.training and torch.is_grad_enabled():
            logits.requires_grad_().register_hook(_refuse_gradient)
        keep = past_key_values is not None if use_cache is None else use_cache
        return SyntacticLMOutput(logits=logits, **{CACHE: cache if keep else None})

    @torch.no_grad()
    @also_takes(parse_with_search)
    def parse(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        num_beams: int | None = None,
        **options: Any,
    ) -> ParseOutput:
        """Parse given text: n-best binary trees, and prefix probabilities.

        The trees are those of the model alone, read from left to right.

        Args:
            input_ids: [B, T], one sentence per row; a begin token only marks its start.
            attention_mask: [B, T], 1 = token; None = all but padding.
            num_beams: width of the search; None = `config.scoring_num_beams`.
            **options: `word_ends` [B, T], True at the last piece of every word: no constituent crosses a word.
                `num_return_sequences`: trees per sentence, at most `num_beams`. `stepwise`, `lexical`: also compute
                the `log_probs` of these names. `belief_update`: kind ("old" or "new") and order, and [B, T] True at the
                last token of every word (default: `word_ends`, or every token): also compute `belief_update` and
                `belief_cut`.

        Returns:
            `ParseOutput`.

        Raises:
            ValueError: see `parse_with_search`.
        """
        mask = attended_tokens(self.config, input_ids, attention_mask)
        with evaluation_mode(self):
            return parse_with_search(self.word_search(num_beams), input_ids, mask, None, None, None, **options)

    def set_generation_defaults(self) -> None:
        """Add the options of this library to `generation_config`, so that they are saved and loaded with it."""
        for name, value in self.generation_options.items():
            if not hasattr(self.generation_config, name):
                setattr(self.generation_config, name, value)
        # A loader ignores unknown options of a file that says `_from_model_config: true`.
        self.generation_config._from_model_config = None

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """Save as transformers does, generation options of this library included."""
        self.set_generation_defaults()
        super().save_pretrained(*args, **kwargs)

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        structure_mode: str | None = None,
        action_beam_size: int | None = None,
        close_tree: bool | None = None,
        synchronous: bool | None = None,
        context_sentence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SyntacticGenerateOutput | SyntacticGenerateBeamOutput | Tensor:
        """Continue prompts word by word, and build their trees.

        Joint mode (default):
            num_beams=1: greedy over structure and words.
            num_beams=K: word-synchronous beam over (derivation, words), p(new words, derivation | prompt).
            do_sample, num_beams=1: exact ancestral sampling. A derivation of the prompt and the structural actions
                are drawn from their posterior. Words are drawn under the warpers (top_k, top_p, temperature, ..),
                actions without them.
            do_sample, num_beams=K: the authors' procedure. At every word, one hypothesis of a beam of K is drawn in
                proportion to its probability; the beam then starts anew from it.
        Marginal mode: stock decoding on the next-word distribution of `forward`, for RNNG and Tree LM with the end of
            the sentence; returns outputs of transformers, no trees.

        Args:
            inputs: Prompts [B, L]; left padding. A begin token only marks the start.
            generation_config: Options; keyword arguments win.
            logits_processor: Extra processors of word scores; they see one row of words per hypothesis. In joint mode
                they run several times per word (before and after every structural action), so each must be a pure
                function of (ids, scores). A processor that counts its calls or has a state gives wrong scores.
            stopping_criteria: Extra criteria; they see sequences of words.
            structure_mode: "joint" or "marginal".
            action_beam_size: GPST: number of derivations kept while a prompt is read (default
                `config.scoring_num_beams`, at least num_beams), and the size of the state in marginal mode. RNNG: beam
                inside a word, at least num_beams (default `config.action_beam_size`).
            close_tree: Complete the tree by forced actions when a criterion (usually the length) ends the text before
                an end token does; their probability counts. False leaves a forest.
            synchronous: False is the paper's baseline "w/o sync": at every step the best num_beams single actions (COMP
                or any word) stay, even if their hypotheses differ in length. With do_sample, num_beams are drawn. See
                generation/action_decoder.py. Joint mode only.
            context_sentence_ids: [B, L], > 0 at tokens of complete sentences before the prompt. They are encoded with
                their induced trees, and the stack starts empty after them. Joint mode only.
            **kwargs: Any argument of transformers that applies: prefix_allowed_tokens_fn, streamer (gets the words, for
                num_beams=1), custom_generate (replaces the loop of this library), in marginal mode synced_gpus and
                negative_prompt_ids; and any option: num_beams, num_return_sequences, do_sample, top_k,
                top_p, temperature, max_new_tokens, min_new_tokens, eos_token_id, stop_strings, repetition_penalty,
                length_penalty, early_stopping, output_scores, return_dict_in_generate, ... And those of the model:
                fast_track_size for RNNG. The model's own end token (`config.eos_token_id`) ends every text, unless
                eos_token_id=None; in joint mode it may come only when exactly one tree is on the stack. At any other
                eos_token_id the text just stops. In joint mode the hypotheses of a beam are texts with their
                derivations, so num_return_sequences may give one text several times, with different derivations.

        Returns:
            Sequences [B * num_return_sequences, L'], or with `return_dict_in_generate=True` an output with
            `sequences`, `sequences_scores`, `actions`, `spans`.

        Raises:
            ValueError: for options that do not apply, and texts that do not fit the positions of the model.
        """
        self.set_generation_defaults()
        given = {
            "structure_mode": structure_mode,
            "action_beam_size": action_beam_size,
            "close_tree": close_tree,
            "synchronous": synchronous,
            "context_sentence_ids": context_sentence_ids,
        }
        kwargs.update({name: value for name, value in given.items() if value is not None})
        prompt, mask = checked_prompts(inputs, kwargs), kwargs.get("attention_mask")
        if isinstance(inputs, Tensor) and mask is not None and mask.shape != inputs.shape:
            raise ValueError(f"attention_mask {tuple(mask.shape)} and inputs {tuple(inputs.shape)} need equal shapes.")
        if mask is None and isinstance(prompt, Tensor):
            mask = self._default_attention_mask(prompt)
            kwargs.update({} if mask is None else {"attention_mask": mask})
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _default_attention_mask(self, prompt: Tensor) -> Tensor | None:
        """Mask of prompts that come without one; None leaves it to transformers."""
        return None

    # ------------------------------------------------------------------------------ hooks of GenerationMixin.generate
    def _validate_model_kwargs(self, model_kwargs: dict[str, Any]) -> None:
        super()._validate_model_kwargs({k: v for k, v in model_kwargs.items() if k not in _SEARCH_INPUTS})

    def _get_logits_processor(self, generation_config: Any, *args: Any, **kwargs: Any) -> LogitsProcessorList:
        processors = super()._get_logits_processor(generation_config, *args, **kwargs)
        ends = [] if generation_config._eos_token_tensor is None else generation_config._eos_token_tensor.tolist()
        special = {self.config.pad_token_id, self.config.bos_token_id} - {None, *ends}
        if self.predicts_special_tokens and special:
            processors.append(SuppressTokensLogitsProcessor(sorted(special), device=self.device))
        return processors

    def _validate_generation_mode(
        self, generation_mode: Any, generation_config: Any, generation_mode_kwargs: dict
    ) -> None:
        super()._validate_generation_mode(generation_mode, generation_config, generation_mode_kwargs)
        _check_options(generation_config, generation_mode_kwargs)

    def _prepare_special_tokens(self, generation_config: GenerationConfig, *args: Any, **kwargs: Any) -> None:
        super()._prepare_special_tokens(generation_config, *args, **kwargs)
        own = self.own_end(generation_config)
        if own is not None:  # a sentence cannot go on behind its end, also if the call names other end tokens alone
            ends = generation_config._eos_token_tensor
            generation_config._eos_token_tensor = torch.cat([own, ends[ends != own]])

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict, generation_mode: Any, batch_size: int, max_cache_length: int
    ) -> None:
        joint = generation_config.structure_mode == "joint"
        cache = model_kwargs.get(CACHE)
        known = ("attention_mask", CACHE, "use_cache", "logits_to_keep", *(_SEARCH_INPUTS if joint else ()))
        unwanted = [name for name, value in model_kwargs.items() if value is not None and name not in known]
        if unwanted:
            mode = generation_config.structure_mode
            raise ValueError(f"{', '.join(unwanted)}: not supported by generate with structure_mode={mode!r}")
        if joint:
            if cache is not None:
                raise ValueError("past_key_values are not read. Pass the whole prompt, or structure_mode='marginal'")
        elif cache is not None:
            self._fit_cache(generation_config, cache)
        elif generation_config.use_cache is False:
            model_kwargs["new_cache"] = lambda: self._new_cache(generation_config)
            model_kwargs.pop(CACHE, None)  # the stock beam search would reorder it, even if it is None
        else:
            model_kwargs[CACHE] = self._new_cache(generation_config)

    def _new_cache(self, config: GenerationConfig) -> SyntacticCache:
        """Empty state of marginal mode."""
        return SyntacticCache(config.action_beam_size or self.config.scoring_num_beams)

    def _fit_cache(self, config: GenerationConfig, cache: SyntacticCache) -> None:
        """Hook: let a given cache follow the options. Raises ValueError if it cannot."""
        asked = config.action_beam_size
        if asked is not None and asked != cache.num_beams:
            raise ValueError(
                f"action_beam_size={asked}, but past_key_values is a beam of {cache.num_beams}. Leave "
                f"action_beam_size out, or start with SyntacticCache({asked})."
            )

    def prepare_inputs_for_generation(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Inputs of one step of transformers' loops; without a cache each step gets an empty one of the right beam.

        Padding on the right is moved to the left, because the loops read the next word at the last column.
        """
        new_cache = kwargs.pop("new_cache", None)
        inputs = super().prepare_inputs_for_generation(input_ids, *args, **kwargs)
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if mask is not None:
            mask = mask[:, -ids.shape[1] :]
            order = mask.long().argsort(dim=1, stable=True)
            inputs |= {"input_ids": ids.gather(1, order), "attention_mask": mask.gather(1, order)}
        if new_cache is not None:
            inputs["past_key_values"] = new_cache()
        return inputs

    def _prepare_marginal(self, input_ids: Tensor, kwargs: dict[str, Any]) -> None:
        """Check ids and lengths before the first step of a loop of transformers."""
        # Only stopping criteria need the tokenizer; the stock loop would pass it to `forward`.
        kwargs.pop("tokenizer", None)
        mask = kwargs.get("attention_mask")
        mask = None if mask is None else mask.to(input_ids.device)
        mask = checked_mask(self.config, input_ids, mask)
        begins = first_token_mask(input_ids, mask, self.config.bos_token_id)
        longest = int((mask.sum(1) - begins.sum(1)).max())
        check_length(
            self.word_search().machine,
            longest + kwargs["generation_config"].max_length - input_ids.shape[1],
            "Prompt and generated text",
            "Shorten the prompt or lower max_new_tokens (max_length).",
        )

    # A callable as `custom_generate` would do for the decoding loop, but transformers (5.24) drops `streamer`, the
    # tokenizer of stop strings, `synced_gpus` and `assistant_model` (`_extract_generation_mode_kwargs`).
    def _sample(self, input_ids: Tensor, **kwargs: Any) -> SyntacticGenerateOutput | Tensor:
        if kwargs["generation_config"].structure_mode == "marginal":
            self._prepare_marginal(input_ids, kwargs)
            return super()._sample(input_ids, **kwargs)
        return self._joint_search(input_ids, **kwargs)

    def _beam_search(self, input_ids: Tensor, **kwargs: Any) -> SyntacticGenerateBeamOutput | Tensor:
        if kwargs["generation_config"].structure_mode == "marginal":
            self._prepare_marginal(input_ids, kwargs)
            return super()._beam_search(input_ids, **kwargs)
        return self._joint_search(input_ids, **kwargs)

    @torch.no_grad()
    def _joint_search(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        streamer: Any = None,
        attention_mask: Tensor | None = None,
        context_sentence_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> SyntacticGenerateOutput | SyntacticGenerateBeamOutput | Tensor:
        """Decoding loop of joint mode."""
        config = generation_config
        if any(isinstance(processor, SynthIDTextWatermarkLogitsProcessor) for processor in logits_processor):
            raise ValueError(_NO_SYNTHID)
        inputs = [value if value is None else value.to(self.device) for value in (attention_mask, context_sentence_ids)]
        decoder_class = JointDecoder if config.synchronous else self.action_decoder_class
        if decoder_class is None:
            raise ValueError(f"synchronous=False: {type(self).__name__} writes word by word. Keep synchronous=True.")
        decoder = decoder_class(
            self, config, logits_processor, stopping_criteria, input_ids.to(self.device), streamer, *inputs
        )
        finished = decoder.run()
        if streamer is not None:
            streamer.end()
        # Independent draws are rows of their own.
        count = min(config.num_return_sequences, finished.scores.shape[1])
        sequences, scores, nodes = finished.best(count)
        if not config.return_dict_in_generate:
            return sequences
        machine = decoder.search.machine
        trees, labels = machine.trees(nodes)
        offsets = decoder.offset.repeat_interleave(len(sequences) // len(decoder.offset)).tolist()
        output_class = SyntacticGenerateOutput if config.num_beams == 1 else SyntacticGenerateBeamOutput
        return output_class(
            sequences=sequences,
            sequences_scores=scores,
            scores=None
            if not config.output_scores
            else decoder.scores
            if config.num_beams == 1
            else JointBeamScores(decoder.scores),
            actions=nodes.action.squeeze(1).clamp(min=machine.pad_action),
            spans=[[(i + x, j + x) for i, j in row[0]] for row, x in zip(trees, offsets, strict=True)],
            labels=None if labels is None else [row[0] for row in labels],
            offsets=offsets,
            lengths=(nodes.action == machine.token_action).sum((1, 2)).tolist(),
        )

    def compute_transition_scores(
        self,
        sequences: Tensor,
        scores: tuple[Tensor, ...],
        beam_indices: Tensor | None = None,
        normalize_logits: bool = False,
    ) -> Tensor:
        """Log-probability of every generated token, as in transformers; not for joint beam search.

        In joint mode with num_beams=1 it is given the derivation before the word: log p(word | words, derivation).

        Args:
            sequences: [B, L], of `generate`.
            scores: of `generate`.
            beam_indices: those of `generate` in marginal mode.
            normalize_logits: normalize the scores first.

        Returns:
            [B, new tokens].

        Raises:
            ValueError: for the scores of a joint beam, where derivation and words compete together.
        """
        if isinstance(scores, JointBeamScores):
            raise ValueError(
                "compute_transition_scores needs a score for each token, but a joint beam has one score for derivation "
                "and words together. Read sequences_scores, or generate with structure_mode='marginal'."
            )
        return super().compute_transition_scores(sequences, scores, beam_indices, normalize_logits)


def _check_options(config: GenerationConfig, mode_kwargs: dict[str, Any]) -> None:
    """Raise ValueError for options of `generate` that do not apply."""
    if config.structure_mode not in ("joint", "marginal"):
        raise ValueError(f"structure_mode={config.structure_mode!r} must be 'joint' or 'marginal'")
    if config.action_beam_size is not None:
        check_count("action_beam_size", config.action_beam_size)
    if not config.synchronous and config.output_scores:
        raise ValueError("output_scores needs synchronous=True, because hypotheses differ in their number of words")
    if config.structure_mode == "marginal":
        return
    refused = {
        "output_logits": config.output_logits,
        "prefill_chunk_size": config.prefill_chunk_size,
        "guidance_scale": config.guidance_scale not in (None, 1, 1.0),
        "low_memory": config.low_memory,
        "use_cache=False": config.use_cache is False,
        "synced_gpus": mode_kwargs.get("synced_gpus"),
    }
    names = [name for name, value in refused.items() if value]
    if names:
        raise ValueError(
            f"{', '.join(names)}: not supported with structure_mode='joint'. Try structure_mode='marginal'"
        )
