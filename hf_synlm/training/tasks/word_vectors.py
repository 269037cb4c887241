# SPDX-License-Identifier: Apache-2.0
"""Word vectors of a large model, with which a small model of other pieces begins."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import cut_texts
from hf_synlm.data.punctuation import stands_joined


@torch.no_grad()
def take_word_vectors(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    source: str,
    sentences: Iterable[tuple[Sequence[str], Sequence[str]]],
) -> int:
    """Let the table of words begin with the vectors of another model.

    A piece gets the mean of the vectors of `source` over the characters that it covers in `sentences`; the vector of a
    character is that of the piece of `source` that covers it in ordinary spelling. The means are centered, projected to
    their directions of largest variance (with the roots of the numbers of characters as weights), rotated at random,
    and scaled to the standard deviation of the vectors whose places they take. Pieces of no sentence keep theirs.

    Args:
        model: untrained.
        tokenizer: its tokenizer.
        source: folder or Hub name of a model with a fast tokenizer.
        sentences: words and tags of treebanks.

    Returns:
        The number of pieces that got a vector.

    Cost: O(characters + V E^2) for V pieces and vectors of size E.
    """
    words, tags = zip(*sentences, strict=True)
    texts = [_as_text(*sentence) for sentence in zip(words, tags, strict=True)]
    own = _owners(tokenizer, [" ".join(sentence) for sentence in words])
    others = _owners(AutoTokenizer.from_pretrained(source), texts)
    vectors = AutoModel.from_pretrained(source, dtype=torch.float32).get_input_embeddings().weight
    table = model.get_input_embeddings().weight
    pairs = torch.from_numpy(np.stack([own, others])[:, (own >= 0) & (others >= 0)])
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


def _as_text(words: Sequence[str], tags: Sequence[str]) -> str:
    """The words with spaces where ordinary text has them."""
    return "".join(word if joins else f" {word}" for word, joins in zip(words, stands_joined(words, tags), strict=True))


def _owners(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> np.ndarray:
    """For each character of the texts that is no space, the first piece that covers it (-1: none)."""
    found = []
    for text, (ids, offsets) in zip(texts, cut_texts(tokenizer, texts), strict=True):
        owners = np.full(len(text), -1)
        for piece, (start, end) in zip(reversed(ids), reversed(offsets), strict=True):  # the mark of an end is later
            owners[start:end] = piece
        found.append(owners[[character != " " for character in text]])
    return np.concatenate(found)
