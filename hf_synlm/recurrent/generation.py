# SPDX-License-Identifier: Apache-2.0
"""Next-token scores and `generate` of language models over a recurrent network.

The decoding loops of transformers write the words. The tree of a text is a function of its words (`parse`), so that a
joint search over words and trees would find the same as this search over words.

Shapes: B sentences, T columns, P prompts, L columns of a sequence, A actions, V vocabulary.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput

from hf_synlm.core.losses import widened
from hf_synlm.core.outputs import GeneratedTrees
from hf_synlm.core.token_batch import check_labels
from hf_synlm.generation.base import WordGenerationMixin, checked_prompts, word_ends_of
from hf_synlm.recurrent.sentences import frame_sentences
from hf_synlm.trees.actions import PAD_ACTION
from hf_synlm.trees.spans import Span


@dataclass
class RecurrentGenerateOutput(GeneratedTrees, GenerateDecoderOnlyOutput):
    """Result of greedy search and sampling, with the trees of the sequences (see `GeneratedTrees`)."""


@dataclass
class RecurrentGenerateBeamOutput(GeneratedTrees, GenerateBeamDecoderOnlyOutput):
    """Result of beam search, with the trees of the sequences (see `GeneratedTrees`).

    Fields:
        sequences_scores: [B], always there: the sum of the scores of the new words, divided by their number to the
            power of length_penalty. Without processors a score is log p(word | words before), in nats.
    """


class RecurrentGenerationMixin(WordGenerationMixin):
    """Next-token scores and generation over the state of a recurrent network; unsupported options are refused."""

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def generate(
        self,
        inputs: Tensor | None = None,
        generation_config: GenerationConfig | None = None,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        *,
        structure_mode: str | None = None,
        **kwargs: Any,
    ) -> RecurrentGenerateOutput | RecurrentGenerateBeamOutput | Tensor:
        """Continue prompts by the decoding loops of transformers; the output holds the trees of the sequences.

        Args:
            inputs: Prompts [B, L]; left padding. Without prompts the text begins with the begin token.
            generation_config: Options; keyword arguments win.
            logits_processor: Extra processors of word scores.
            stopping_criteria: Extra criteria.
            structure_mode: "joint" or "marginal", which are one here: the words alone determine the tree.
            **kwargs: `attention_mask` [B, L]; `tokenizer`, which tells where words end, so that no constituent ends
                inside a word; `inputs_embeds` [B, L, E] instead of a prompt; and any option of transformers: num_beams,
                num_return_sequences, do_sample, top_k, top_p, temperature, max_new_tokens, eos_token_id, stop_strings,
                repetition_penalty, length_penalty, output_scores, return_dict_in_generate, streamer, ...

        Returns:
            Sequences [B * num_return_sequences, L'], or with `return_dict_in_generate=True` an output with `sequences`,
            `spans` and `actions`: the tree of each sequence, prompt included, as `parse` finds it by default. Beam
            search adds `sequences_scores`.

        Raises:
            ValueError: for unknown options and those that a recurrent network does not support; for assisted decoding,
                which needs a state that can go back; and, if the output has trees, for prompts with holes or padding
                on the right, and prompts without ids.

        Cost: one step per token from the cached state; for trees one more pass over the text. Beam search with
            `return_dict_in_generate` holds the scores [P * num_beams, V] of all steps until it ends.
        """
        if structure_mode not in (None, "joint", "marginal"):
            raise ValueError(f"structure_mode={structure_mode!r} must be 'joint' or 'marginal'")
        checked_prompts(inputs, kwargs)
        return super().generate(inputs, generation_config, logits_processor, stopping_criteria, **kwargs)

    def _sample(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._decode(super()._sample, RecurrentGenerateOutput, input_ids, args, kwargs)

    def _beam_search(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._decode(super()._beam_search, RecurrentGenerateBeamOutput, input_ids, args, kwargs)

    def _decode(self, loop: Callable, kind: type, prompts: Tensor, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a decoding loop of transformers, and add the trees to a result with fields."""
        mask, config = kwargs.get("attention_mask"), kwargs["generation_config"]
        if config.cache_implementation:
            raise ValueError(
                f"cache_implementation={config.cache_implementation!r} does not apply, because a recurrent network "
                "has one kind of state. Leave this option out."
            )
        tokenizer = kwargs.pop("tokenizer", None)  # the criterion of stop strings has it already
        if not config.return_dict_in_generate:
            return loop(prompts, *args, **kwargs)
        if self.config.gives_trees and kwargs.get("inputs_embeds") is not None:
            raise ValueError(
                "return_dict_in_generate gives trees, which need input_ids. Leave this option or inputs_embeds out."
            )
        if self.config.gives_trees and mask is not None:
            # A word will follow each prompt: with one, holes and padding on the right are found here.
            text = torch.cat([prompts, prompts[:, -1:]], 1), torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
            frame_sentences(self.config, *text, may_be_empty=True)
        # The stock beam search returns the scores of sequences only together with those of all steps.
        kwargs["generation_config"] = with_scores = copy.copy(config)
        with_scores.output_scores = config.output_scores or config.num_beams > 1
        result = loop(prompts, *args, **kwargs)
        fields = {name: value for name, value in result.items() if config.output_scores or name != "scores"}
        if self.config.gives_trees:
            fields.update(self._trees(result.sequences, prompts, mask, config, tokenizer))
        return kind(**fields)

    def _trees(
        self, sequences: Tensor, prompts: Tensor, mask: Tensor | None, config: Any, tokenizer: Any
    ) -> dict[str, Any]:
        """Fields of the output; `prompts` [P, N] hold each prompt num_beams or num_return_sequences times."""
        count, width = len(sequences), prompts.shape[1]
        mask = torch.ones_like(prompts) if mask is None else mask
        row = torch.arange(count, device=prompts.device) // config.num_return_sequences
        copies = config.num_beams if config.num_beams > 1 else config.num_return_sequences
        text = torch.cat([mask[row * copies, :width].bool(), _words(sequences[:, width:], config)], 1)
        spans: list[list[Span]] = [[] for _ in range(count)]
        actions = torch.full((count, 1), PAD_ACTION, device=sequences.device)
        framed = frame_sentences(self.config, sequences, text, may_be_empty=True)
        places: dict[str, Any] = {"offsets": framed.first_B.tolist(), "lengths": framed.count_B.tolist()}
        words = (framed.count_B > 0).nonzero()[:, 0]
        if len(words):
            word_ends = None
            if tokenizer is not None:
                word_ends = word_ends_of(tokenizer, sequences)
                last = framed.first_B + framed.count_B - 1
                word_ends = word_ends.scatter(1, last.clamp_min(0)[:, None], True)[words]
            parsed = self.parse(sequences[words], text[words], word_ends=word_ends)
            actions = actions.new_full((count, parsed.actions.shape[2]), PAD_ACTION)
            actions[words] = parsed.actions[:, 0]
            for place, trees in zip(words.tolist(), parsed.spans, strict=True):
                spans[place] = trees[0]
            if parsed.labels is not None:
                found = dict(zip(words.tolist(), (trees[0] for trees in parsed.labels), strict=True))
                places["labels"] = [found.get(place, []) for place in range(count)]
        return {"actions": actions, "spans": spans, **places}

    # ------------------------------------------------------------------------------------------- next-token scores
    def _given_labels(self, columns: Tensor, labels: Tensor | None, more: dict[str, Any]) -> tuple[Tensor | None, bool]:
        """The labels of a `forward`, checked, and whether they are already shifted.

        `shift_labels` are taken out of `more`. (They are not in the signature of `forward`: Trainer requires every
        argument there with "label" in its name.)
        """
        shift_labels = more.pop("shift_labels", None)
        given = labels if shift_labels is None else shift_labels
        if given is not None:
            check_labels(self.config, given, columns)
        return given, shift_labels is not None

    @staticmethod
    def _log_probs(head: Callable[[Tensor], Tensor], features: Tensor, logits_to_keep: int | Tensor) -> Tensor:
        """Next-token log-probabilities [B, T', V], in float32 or higher, after the columns to keep."""
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = head(features[:, kept])
        return widened(logits).log_softmax(-1)


def _words(new: Tensor, config: Any) -> Tensor:
    """Which of the generated tokens are words: those before the first end token, padding at the end left out."""
    ended = torch.zeros_like(new, dtype=torch.bool)
    if config._eos_token_tensor is not None:
        ended = torch.isin(new, config._eos_token_tensor)
    present = ended.long().cumsum(1) == 0
    if config._pad_token_tensor is not None:
        filled = present & (new != config._pad_token_tensor)
        present = present & (filled.flip(1).long().cumsum(1).flip(1) > 0)
    return present
