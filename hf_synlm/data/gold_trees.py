# SPDX-License-Identifier: Apache-2.0
"""Gold trees as supervision: rows of a codec, distances for ON-LSTM and PRPN, spans for PaLM."""

from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import cut_texts, encode_joined, word_ends_from_offsets, word_ends_from_word_ids
from hf_synlm.data.punctuation import stands_joined
from hf_synlm.data.text import NATURAL, errors_at
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.recurrent.distances import spans_to_distances
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.codecs import Row, TreeCodec, first_tokens, system_constituents
from hf_synlm.trees.spans import Span, check_words, in_post_order


def label_inventory(sentences: Iterable[TreebankSentence], system: str = "top_down") -> tuple[str, ...]:
    """Collect the labels of constituents in alphabetical order; the position of a label is its id.

    The authors collect them from training, validation and test data together, so that every label is known.

    Args:
        sentences: sentences of treebanks.
        system: name of the transition system; "binary" has labels of its own (see `trees.codecs.binary_constituents`).

    Returns:
        The labels, each once.

    Raises:
        ValueError: no constituent has a label.
    """
    every = (system_constituents(tree.labeled_spans, len(tree.words), system) for tree in sentences)
    labels = {label for constituents in every for label, _, _ in constituents}
    if not labels:
        raise ValueError("the sentences have no labeled constituent. Give trees with labels")
    return tuple(sorted(labels))


def encode_trees(
    sentences: Sequence[TreebankSentence],
    tokenizer: PreTrainedTokenizerBase,
    codec: TreeCodec,
    text_style: str | None = None,
) -> list[Row]:
    """Encode sentences and their trees for training or scoring, with one call of the tokenizer.

    Args:
        sentences: sentences of a treebank.
        tokenizer: a fast tokenizer, of words or of pieces of words.
        codec: that of the model: `hf_synlm.hub.abilities.tree_codec(model.config)`.
        text_style: of the model's configuration; "natural" spells words as text has them (see `data.punctuation`).

    Returns:
        Rows of the codec, of which `codec.pad` makes batches.

    Raises:
        ValueError: a label is unknown, a word cannot be encoded on its own, or the tree is not one; the message names
            the source line of the sentence.

    Cost: O(tokens + constituents).
    """
    if not sentences:
        return []
    for sentence in sentences:
        with errors_at(sentence.source):
            check_words(sentence.words)
    encoded = []
    for sentence, (ids, places) in zip(sentences, _cut(sentences, tokenizer, text_style), strict=True):
        with errors_at(sentence.source):
            if tokenizer.pad_token_id in ids:
                raise ValueError("a word is the padding token of the tokenizer: change the word, or skip the sentence")
            is_natural = text_style == NATURAL
            ends = word_ends_from_word_ids(places) if is_natural else word_ends_from_offsets(places, sentence.words)
            encoded.append(codec.encode(ids, ends, sentence.labeled_spans))
    return encoded


def _cut(
    sentences: Sequence[TreebankSentence], tokenizer: PreTrainedTokenizerBase, text_style: str | None
) -> Iterable[tuple[list[int], list[Any]]]:
    """Per sentence its tokens, and for each the place of its word ("natural"), or its offsets in the joined words."""
    if text_style == NATURAL:
        return encode_joined(tokenizer, [s.words for s in sentences], [which_joined(s) for s in sentences])
    return cut_texts(tokenizer, [" ".join(sentence.words) for sentence in sentences])


def which_joined(sentence: TreebankSentence) -> Sequence[bool]:
    """Which words have no space before them in text: what the file says, otherwise what `stands_joined` says."""
    return stands_joined(sentence.words, sentence.tags) if sentence.joined is None else sentence.joined


def gold_distances(spans: Sequence[Span], word_ends: Sequence[bool]) -> list[int]:
    """Compute the syntactic distances of a gold tree, one per token of the sentence and one for the `</s>` after it.

    The value at a token belongs to the gap before it: the height minus one of the node whose parts meet there, in the
    tree binarized to the right; 0 between pieces of a word. The gaps before the first token and before `</s>` are
    sentence boundaries: one more than the largest value inside.

    Source: Du et al. (2020), A.1 and their `helpers.py`, which give every first token one more than the largest value
    of the training set (`make_stream` does that). Their value for `</s>` is not known.

    Args:
        spans: half-open word spans of the tree, with the whole sentence; spans of one word are ignored.
        word_ends: per token, True at the last piece of each word.

    Returns:
        One value per token and one for `</s>`.

    Raises:
        ValueError: the spans are not a tree over the words, or the last token does not end a word.

    Cost: O(n log n).
    """
    num_words = len(first_tokens(word_ends)) - 1
    inner = list(dict.fromkeys((i, j) for i, j in spans if j - i > 1))
    of_words = iter(spans_to_distances(inner, num_words))
    distances = [next(of_words) if begins else 0 for begins in (True, *word_ends[:-1])]
    return [*distances, distances[0]]


def gold_spans(spans: Sequence[Span], word_ends: Sequence[bool], *, binarized: bool = False) -> list[Span]:
    """Compute the token spans of the constituents that span attention has to find.

    Source: Peng et al. (2019), section 3.3: constituents of more than one word, without the whole sentence.

    Args:
        spans: half-open word spans of the tree, in any order; copies and spans of one word are ignored.
        word_ends: per token, True at the last piece of each word.
        binarized: add the spans of the tree binarized to the right, as the authors' code does.

    Returns:
        Half-open token spans in post-order.

    Raises:
        ValueError: the spans cross or leave the sentence, or the last token does not end a word.

    Cost: O(n log n).
    """
    first = first_tokens(word_ends)
    num_words = len(first) - 1
    if num_words == 1:
        return []
    inner = {(i, j) for i, j in spans if j - i > 1} | {(0, num_words)}
    kept = (binarize_spans if binarized else in_post_order)(sorted(inner), num_words)[:-1]
    return [(first[i], first[j]) for i, j in kept]
