# SPDX-License-Identifier: Apache-2.0
"""Word vectors of a large model, with which a small model of other pieces begins."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import cut_texts
from hf_synlm.data.punctuation import spell
from hf_synlm.hub.checkpoint import one_line_errors
from hf_synlm.hub.loading import load_tokenizer


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
        tokenizer: its tokenizer; it reads the words with spaces between them.
        source: folder or Hub name of a model with a fast tokenizer.
        sentences: words of treebanks, and which of them have no space before them in text.

    Returns:
        The number of pieces that got a vector.

    Raises:
        ValueError: `source` cannot be loaded, or has no vectors for at least two pieces.

    Cost: O(characters + V E^2) for V pieces and vectors of size E.
    """
    words, joined = zip(*sentences, strict=True)
    texts = [_as_text(*sentence) for sentence in zip(words, joined, strict=True)]
    own, table = _owners(tokenizer, [" ".join(sentence) for sentence in words]), model.get_input_embeddings().weight
    vectors, other_tokenizer = _load_vectors(source), load_tokenizer(source)
    if not other_tokenizer.is_fast:
        raise ValueError(f"{source!r} has no fast tokenizer, which word vectors need. Name another model.")
    others = _owners(other_tokenizer, texts)[list(_places(chain.from_iterable(words)))]
    known = (own >= 0) & (others >= 0) & (others < len(vectors))
    pairs = torch.from_numpy(np.stack([own, others])[:, known])
    if len(pairs[0].unique()) < 2:
        raise ValueError(f"{source!r} has no vectors for the words of the training sentences. Name another model.")
    counts = torch.sparse_coo_tensor(
        pairs, torch.ones(pairs.shape[1]), (len(table), len(vectors)), check_invariants=True
    ).coalesce()
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
    with one_line_errors(source, "model"):
        return AutoModel.from_pretrained(source, dtype="auto").get_input_embeddings().weight.float()


def _as_text(words: Sequence[str], joined: Sequence[bool]) -> str:
    """The words as ordinary text spells them and puts spaces between them."""
    return "".join(spell(word) if joins else f" {spell(word)}" for word, joins in zip(words, joined, strict=True))


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
