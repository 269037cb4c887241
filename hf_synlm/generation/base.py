# SPDX-License-Identifier: Apache-2.0
"""What `generate` of all architectures has in common: stop strings, words of a text, and what is refused.

Shapes: B texts, T tokens.
"""

import copy
import functools
import inspect
import itertools
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation import GenerationMixin, StopStringCriteria
from transformers.generation.configuration_utils import GenerationMode

from hf_synlm.core.cache import CACHE, name_cache
from hf_synlm.core.configuration_base import NEWEST_TRANSFORMERS

# Private methods of transformers that `generate` calls and that are replaced here.
HOOKS = (
    "_beam_search", "_get_deprecated_gen_repo", "_get_logits_processor", "_get_stopping_criteria",
    "_prepare_cache_for_generation", "_prepare_special_tokens", "_sample", "_supports_default_dynamic_cache",
    "_validate_generation_mode", "_validate_model_kwargs",
)  # fmt: skip


def check_hooks(kind: type) -> None:
    """Raise ImportError if transformers has no hook, or calls it with other arguments, that a class of models replaces.

    It would else search without trees, and say nothing.
    """
    for name in HOOKS:
        own, stock = getattr(kind, name, None), getattr(GenerationMixin, name, None)
        parameters = inspect.signature(stock).parameters.values() if stock else ()
        named = [part.name for part in parameters if part.kind not in (part.VAR_POSITIONAL, part.VAR_KEYWORD)]
        try:
            fits = own is stock or (stock is not None and inspect.signature(own).bind(**dict.fromkeys(named)))
        except TypeError:
            fits = False
        if not fits:
            raise ImportError(
                f"This model was tested up to transformers {NEWEST_TRANSFORMERS}. Version {transformers.__version__} "
                f"has changed the method {name}, which generate needs: "
                f'pip install "transformers=={NEWEST_TRANSFORMERS}.*"'
            )


def _spelled_word(tokenizer: Any) -> str:
    """A word that the tokenizer spells in its own tokens: "abcdef", or the first one of the vocabulary."""

    def is_spelled(word: str) -> bool:
        return word.isalpha() and word in tokenizer.convert_tokens_to_string(tokenizer.tokenize(word))

    words = (tokenizer.convert_tokens_to_string([token]).strip() for token in tokenizer.get_vocab())
    word = next(filter(is_spelled, itertools.chain(["abcdef"], words)), None)
    if word is None:
        raise ValueError(f"The vocabulary of {type(tokenizer).__name__} spells no word, so its texts contain no words.")
    return word


class StopStrings(StopStringCriteria):
    """The criterion of transformers, also for vocabularies that cannot spell its probe "abcdef"."""

    @staticmethod
    def clean_tokenizer_vocab(tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The text that every token adds after a word, and the ids of the tokens."""
        return StopStringCriteria.clean_tokenizer_vocab(tokenizer, _spelled_word(tokenizer), *args, **kwargs)


def word_ends_of(tokenizer: Any, input_ids: Tensor) -> Tensor:
    """Which tokens [B, T] end a word of a text: white space follows, at their end or as the next token's beginning.

    Punctuation that a decoder glues to the word before it (WordPiece's `cleanup`) counts as part of this word. The last
    column ends a word.
    """
    before = tokenizer.tokenize(_spelled_word(tokenizer))
    start = len(tokenizer.convert_tokens_to_string(before))
    ids, places = input_ids.unique(return_inverse=True)
    tokens = tokenizer.convert_ids_to_tokens(ids.tolist())
    texts = [tokenizer.convert_tokens_to_string([*before, token])[start:] for token in tokens]
    begins, ends = (
        torch.tensor([text[edge].isspace() for text in texts], device=ids.device)[places]
        for edge in (slice(1), slice(-1, None))
    )
    return ends | F.pad(begins[:, 1:], (0, 1), value=True)


def checked_prompts(inputs: Tensor | None, kwargs: dict[str, Any]) -> Tensor | None:
    """The prompts of a call of `generate`; ValueError for ids that are not [B, T]."""
    prompts = kwargs.get("input_ids") if inputs is None else inputs
    if isinstance(prompts, Tensor) and prompts.dim() != 2:
        raise ValueError(f"input_ids has shape {tuple(prompts.shape)}. Give [batch, tokens], such as input_ids[None].")
    return prompts


class WordGenerationMixin(GenerationMixin):
    """`generate` with stop strings for every tokenizer, and without continuous batching."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers; a cache is taken under both of its names."""
        check_hooks(type(self))
        return super().generate(*args, **name_cache(kwargs, CACHE))

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As in transformers, but with the cache as `past_key_values`: prompt tuning of PEFT knows no other name."""
        return name_cache(super().prepare_inputs_for_generation(*args, **kwargs), "past_key_values")

    # transformers reads the names of its arguments.
    functools.update_wrapper(prepare_inputs_for_generation, GenerationMixin.prepare_inputs_for_generation)

    def _get_deprecated_gen_repo(self, generation_mode: Any, *args: Any, **kwargs: Any) -> str | None:
        modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE, GenerationMode.BEAM_SEARCH)
        if generation_mode not in (*modes, GenerationMode.BEAM_SAMPLE):
            raise ValueError(
                f"{generation_mode} is not offered. Use greedy search, sampling or beam search. Leave out "
                "assistant_model, prompt_lookup_num_tokens, penalty_alpha, dola_layers and num_beam_groups"
            )
        return None

    def _get_stopping_criteria(
        self, generation_config: GenerationConfig, stopping_criteria: StoppingCriteriaList | None, tokenizer: Any = None
    ) -> StoppingCriteriaList:
        if generation_config.stop_strings is not None and tokenizer is not None:
            strings = StopStrings(tokenizer, generation_config.stop_strings)
            stopping_criteria = StoppingCriteriaList([*(stopping_criteria or ()), strings])
            generation_config = copy.copy(generation_config)
            generation_config.stop_strings = None
        return super()._get_stopping_criteria(generation_config, stopping_criteria, tokenizer)

    def generate_batch(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: continuous batching is not possible."""
        # The inherited method of transformers would return something that looks like a result.
        raise NotImplementedError("generate_batch needs a cache in pages. Use generate with a padded batch.")

    def init_continuous_batching(self, *args: Any, **kwargs: Any) -> None:
        """Raise NotImplementedError: continuous batching is not possible."""
        self.generate_batch()
