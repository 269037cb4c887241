# SPDX-License-Identifier: Apache-2.0
"""Word vectors of a large model, with which a small model of other pieces begins."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import cut_texts, joined_strings
from hf_synlm.data.punctuation import spell
from hf_synlm.data.text import NATURAL
from hf_synlm.hub.checkpoint import is_adapter, one_line_errors
from hf_synlm.hub.loading import load_checked_tokenizer

_AT_ONCE = 10_000  # sentences whose characters are in memory at a time


@torch.no_grad()
def take_word_vectors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    sentences: Iterable[tuple[Sequence[str], Sequence[bool]]],
) -> int:
    """Let the table of words begin with the vectors of another model.

    A piece gets the mean of the vectors of `source` over the characters of which it is the first piece. The vector of a
    character is that of the piece of `source` that covers it in ordinary text. The means are centered, projected to
    their directions of largest variance (with the roots of the numbers of characters as weights), rotated at random,
    and scaled to the standard deviation of the vectors whose places they take. Other pieces keep their vectors.

    Args:
        model: untrained.
        tokenizer: its tokenizer, which reads the words as the model's `text_style` says.
        source: folder or Hub name of a model with a fast tokenizer.
        sentences: words of treebanks, and which of them have no space before them in text.

    Returns:
        The number of pieces that got a vector.

    Raises:
        ValueError: `source` cannot be loaded, or knows fewer than two pieces of the words.

    Cost: O(characters + V E^2) for V pieces and vectors of size E.
    """
    vectors, other_tokenizer = _load_vectors(source), load_checked_tokenizer(source)
    if not other_tokenizer.is_fast:
        raise ValueError(f"{source!r} has no fast tokenizer, which word vectors need. Name another model.")
    table, rest = model.get_input_embeddings().weight, iter(sentences)
    is_natural = getattr(model.config, "text_style", None) == NATURAL
    table_of = partial(torch.sparse_coo_tensor, size=(len(table), len(vectors)), check_invariants=True)
    counts = table_of(torch.empty(2, 0, dtype=torch.long), torch.empty(0))
    while some := list(islice(rest, _AT_ONCE)):
        own, others = _owners_of_both(tokenizer, other_tokenizer, some, is_natural)
        known = (own >= 0) & (others >= 0) & (others < len(vectors)) & (others != other_tokenizer.unk_token_id)
        pairs = torch.from_numpy(np.stack([own, others])[:, known])
        counts = (counts + table_of(pairs, torch.ones(pairs.shape[1]))).coalesce()
    if min(len(side.unique()) for side in counts.indices()) < 2:
        raise ValueError(f"{source!r} has no vectors for the words of the training sentences. Name another model.")
    number = counts.sum(1).to_dense()
    seen = number > 0
    means = torch.sparse.mm(counts, vectors)[seen] / number[seen, None]
    weights = number[seen].sqrt() / number[seen].sqrt().sum()
    means -= weights @ means
    directions = torch.linalg.eigh(means.T @ (weights[:, None] * means)).eigenvectors[:, -table.shape[1] :]
    rotation = nn.init.orthogonal_(torch.empty(directions.shape[1], table.shape[1]))
    found = means @ directions @ rotation
    table[seen] = found * (table[seen].std() / found.std())
    return len(found)


def _load_vectors(source: str) -> Tensor:
    """The table of words of a model, in float32."""
    if is_adapter(Path(source)):
        raise ValueError(f"{source!r} is an adapter without word vectors. Name its backbone.")
    with one_line_errors(source, "model"):
        model, info = AutoModel.from_pretrained(source, dtype="auto", output_loading_info=True)
        if model.get_input_embeddings() is None:
            raise ValueError(f"{type(model).__name__} has no word vectors. Name another model.")
        table = model.get_input_embeddings().weight
        if any(parameter is table and name in info["missing_keys"] for name, parameter in model.named_parameters()):
            raise ValueError("its files lack the word vectors. Name a complete model.")
        return table.float()


def _owners_of_both(
    tokenizer: PreTrainedTokenizerBase,
    other: PreTrainedTokenizerBase,
    sentences: Sequence[tuple[Sequence[str], Sequence[bool]]],
    is_natural: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """For each character of the words the first piece that covers it, of both tokenizers (-1: none).

    The second one reads the words as ordinary text spells them; the first one too, or with spaces between them.
    """
    words = [sentence for sentence, _ in sentences]
    texts = ["".join(chain.from_iterable(joined_strings(*sentence))) for sentence in sentences]
    places = list(_places(chain.from_iterable(words)))
    own = _owners(tokenizer, texts)[places] if is_natural else _owners(tokenizer, [" ".join(row) for row in words])
    return own, _owners(other, texts)[places]


def _places(words: Iterable[str]) -> Iterator[int]:
    """For each character of the words, that of their spellings, one after the other, which stands in its place."""
    start = 0
    for word in words:
        length = len(spell(word))
        yield from (start + min(place, length - 1) for place in range(len(word)))
        start += length


def _owners(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> np.ndarray:
    """For each character of the texts that is no space, the first piece that covers it (-1: none)."""
    found = []
    for text, (ids, offsets) in zip(texts, cut_texts(tokenizer, texts), strict=True):
        owners = np.full(len(text), -1)
        for piece, (start, end) in zip(reversed(ids), reversed(offsets), strict=True):  # a word's end mark comes later
            owners[start:end] = piece
        found.append(owners[[character != " " for character in text]])
    return np.concatenate(found)
