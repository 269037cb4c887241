# SPDX-License-Identifier: Apache-2.0
"""Continue prompts with any causal language model; models of this library also give the tree of the text.

The tree covers the whole text, prompt included. Its leaves are words where the model knows which tokens end one, and
otherwise tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.core.configuration_base import position_limit
from hf_synlm.core.module_tools import evaluation_mode
from hf_synlm.data.parsed import Hypothesis, ParsedSentence
from hf_synlm.data.text import NATURAL, Tokenization, check_list, tokenization_of
from hf_synlm.evaluation.text.batches import usual_batch_size
from hf_synlm.evaluation.text.processes import progress_bar
from hf_synlm.evaluation.text.words import split_sentences
from hf_synlm.hub.abilities import declared
from hf_synlm.trees.codecs import first_tokens, pad_inputs
from hf_synlm.trees.spans import Span, fold_tokens


@dataclass(frozen=True)
class GeneratedText:
    """One continuation of one prompt."""

    prompt: str
    text: str  # with the prompt as it was read, without begin, end and padding tokens
    num_new_tokens: int  # without the end token
    ended: bool  # by an end token of the model
    score: float | None  # in nats: `sequences_scores` of `generate`
    tree: ParsedSentence  # without a tree, if the model gives none

    def to_dict(self) -> dict[str, Any]:
        """The continuation as plain data for JSON."""
        tree: dict[str, Any] = next(iter(self.tree.to_dict()["trees"]), {})
        return {
            **{name: getattr(self, name) for name in ("prompt", "text", "num_new_tokens", "ended", "score")},
            "leaves": list(self.tree.words),
            **{name: tree.get(name) for name in ("brackets", "spans", "labels")},
        }


@torch.no_grad()
def generate_texts(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    tokenize: Tokenization | None = None,
    batch_size: int | None = None,
    progress: str | None = None,
    **options: Any,
) -> list[GeneratedText]:
    """Continue prompts by `model.generate`, which gets `options`; an empty prompt begins a new text.

    Gives `num_return_sequences` texts per prompt. All prompts are checked before the model begins. `tokenize` says how
    words are split, as for `parse_sentences`; but a model of the style "natural" reads prompts as they are written.
    Words with a special token stay whole. Raises ValueError for a prompt that has words, but none that the model reads.
    """
    check_list("prompts", prompts)
    texts = _split(tokenizer, prompts, tokenize, getattr(model.config, "text_style", None))
    rows = [_prompt_ids(model, tokenizer, text) for text in texts]
    _check_lengths(model, rows, options.get("max_new_tokens") or 0)
    found: list[GeneratedText] = []
    batch_size = usual_batch_size(batch_size, model)
    with evaluation_mode(model):
        for start in progress_bar(range(0, len(rows), batch_size), progress, unit="batches"):
            part = slice(start, start + batch_size)
            found += _continue(model, tokenizer, prompts[part], rows[part], options)
    return found


def _split(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], tokenize: Tokenization | None, text_style: str | None
) -> Sequence[str]:
    """Prompts with spaces between the parts of words; unchanged for models that read text as it is written."""
    how = tokenization_of(text_style, tokenize)
    if text_style == NATURAL and tokenize in ("ptb", "no-punctuation"):
        raise ValueError(f"tokenize is {tokenize!r}, but the model reads prompts as they are written. Leave it out")
    if how == "words" or text_style == NATURAL:
        return prompts
    # A prompt goes on, so that the period of `I met Dr.` is not an end.
    begun = [[*prompt.split(), "Xavier"] for prompt in prompts]
    special, texts = tokenizer.all_special_tokens, []
    for prompt, words, split in zip(prompts, begun, split_sentences(tokenizer, begun, how, text_style), strict=True):
        read = (
            [word] if any(token in word for token in special) else parts
            for word, parts in zip(words[:-1], split[:-1], strict=True)
        )
        texts.append(" ".join(chain.from_iterable(read)))
        if prompt.strip() and not texts[-1]:
            raise ValueError(f"The model reads no word of the prompt {prompt!r}. Change it, or set tokenize to 'words'")
    return texts


def _prompt_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Tokens of a prompt; the begin token for an empty one."""
    ids = list(tokenizer(prompt)["input_ids"]) if prompt.strip() else []
    if ids:
        return ids
    candidates = (model.config.bos_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    begin = next((token for token in candidates if token is not None), None)
    if begin is None:
        raise ValueError(f"{type(model).__name__} has no begin token and cannot begin a text. Give a prompt")
    return [begin]


def _check_lengths(model: PreTrainedModel, rows: Sequence[list[int]], max_new_tokens: int) -> None:
    limit = position_limit(model.config)
    # Models of this library count from the first word.
    begin = model.config.bos_token_id if declared(model.config, "sentence_end") else None
    for number, row in enumerate(rows, start=1):
        length = len(row) - (row[0] == begin)
        if limit is not None and length + max_new_tokens > limit:
            raise ValueError(
                f"prompt {number} has {length} tokens. With {max_new_tokens} new tokens it exceeds the {limit} "
                "positions of the model. Shorten the prompt, or lower max_new_tokens"
            )


def _end_ids(model: PreTrainedModel, options: dict[str, Any]) -> tuple[set[int], set[int]]:
    """Tokens behind a text: its end, or what fills its row; and words of a text at which it stops."""
    settings = model.generation_config
    given = _listed(options.get("eos_token_id", settings.eos_token_id))
    own = _listed(settings.eos_token_id) if given else set()
    return own | _listed(settings.pad_token_id), given - own


def _listed(tokens: Any) -> set[int]:
    return {*(tokens if isinstance(tokens, (list, tuple)) else [tokens])} - {None}


def _continue(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    rows: Sequence[list[int]],
    options: dict[str, Any],
) -> Iterator[GeneratedText]:
    """Continue one batch, padded on the left."""
    candidates = (tokenizer.pad_token_id, model.config.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in candidates if token is not None), 0)
    inputs = {name: values.to(model.device) for name, values in pad_inputs(rows, pad, "left").items()}
    width = inputs["input_ids"].shape[1]
    output = model.generate(
        **inputs,
        pad_token_id=pad,
        return_dict_in_generate=True,
        **({"tokenizer": tokenizer} if options.get("stop_strings") else {}),
        **options,
    )
    scores: Tensor | None = getattr(output, "sequences_scores", None)
    gives_trees = declared(model.config, "gives_trees")
    trees, labels = (getattr(output, name, None) if gives_trees else None for name in ("spans", "labels"))
    behind, stops = _end_ids(model, options)
    behind.add(pad)
    sequences = output.sequences.tolist()
    per_prompt = len(sequences) // len(rows)
    for number, sequence in enumerate(sequences):
        prompt, new = rows[number // per_prompt], sequence[width:]
        read = prompt[prompt[0] == model.config.bos_token_id :]
        offset = width - len(read)
        spans = None if trees is None else [(i - offset, j - offset) for i, j in trees[number]]
        first_end = next((place for place, token in enumerate(new) if token in behind), len(new))
        first_end = next((place + 1 for place, token in enumerate(new[:first_end]) if token in stops), first_end)
        # The tree knows best how long the text is: an untrained model may write the padding token as a word.
        length = max(j for _, j in spans) - len(read) if spans else first_end
        tokens = read + new[:length]
        yield GeneratedText(
            prompt=prompts[number // per_prompt],
            text=tokenizer.decode(tokens).removeprefix(" "),
            num_new_tokens=length,
            ended=length < len(new) or not stops.isdisjoint(new[length - 1 : length]),
            score=None if scores is None else scores[number].item(),
            tree=_tree(model, tokenizer, tokens, spans, labels[number] if labels else None),
        )


def _tree(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tokens: list[int],
    spans: Sequence[Span] | None,
    labels: Sequence[str] | None,
) -> ParsedSentence:
    """The words of a text, or its tokens, with their tree."""
    known = None if spans is None else model.word_ends_of(torch.tensor(tokens, device=model.device))
    # The last word may lack its end.
    ends = [True] * len(tokens) if known is None else [*known.tolist()[:-1], True]
    leaves = (tokenizer.decode(tokens[i:j]) for i, j in pairwise(first_tokens(ends) if tokens else ()))
    words = tuple("".join(leaf.split()) or "_" for leaf in leaves)
    if spans is None or not words:
        return ParsedSentence(words)
    over_words = tuple(fold_tokens(spans, ends, keep_words=labels is not None))
    return ParsedSentence(words, (Hypothesis(over_words, None if labels is None else tuple(labels)),))
