# SPDX-License-Identifier: Apache-2.0
"""Gold trees as supervision: actions for RNNG, distances for ON-LSTM and PRPN, spans for PaLM, attachments."""

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import encode_joined, word_ends_from_offsets, word_ends_from_word_ids
from hf_synlm.data.punctuation import stands_joined
from hf_synlm.data.text import NATURAL, errors_at
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.models.pushdown.tape import tree_attachments
from hf_synlm.models.tree_lm.linearization import ADDED_NODE, CHAIN
from hf_synlm.recurrent.distances import spans_to_distances
from hf_synlm.trees.binary import binarize_spans
from hf_synlm.trees.spans import Span, check_words, in_post_order
from hf_synlm.trees.transitions import TransitionSystem


class EncodedTree(TypedDict):
    """A sentence with its tree as input of RNNG; `collate_trees` makes batches of these."""

    input_ids: list[int]
    """Token ids."""
    actions: list[int]
    """Action ids of the gold derivation."""
    word_ends: list[bool]
    """Per token, True at the last piece of each word."""


def system_constituents(sentence: TreebankSentence, system: str) -> Sequence[tuple[str, int, int]]:
    """The constituents of a sentence that the transition system `system` writes: (label, i, j) in post-order."""
    spans = sentence.labeled_spans
    return binary_constituents(spans, len(sentence.words)) if system == "binary" else spans


def label_inventory(sentences: Iterable[TreebankSentence], system: str = "top_down") -> tuple[str, ...]:
    """Collect the labels of constituents in alphabetical order; the position of a label is its id.

    The authors collect them from training, validation and test data together, so that every label is known.

    Args:
        sentences: sentences of treebanks.
        system: name of the transition system; "binary" has labels of its own (see `binary_constituents`).

    Returns:
        The labels, each once.

    Raises:
        ValueError: no constituent has a label.
    """
    labels = {label for sentence in sentences for label, _, _ in system_constituents(sentence, system)}
    if not labels:
        raise ValueError("the sentences have no labeled constituent: are their trees labeled?")
    return tuple(sorted(labels))


def binary_constituents(labeled_spans: Sequence[tuple[str, int, int]], num_words: int) -> list[tuple[str, int, int]]:
    """Binarize a labeled tree to the right.

    Unary chains become one label, "S+VP" for a VP that is all of an S. Nodes that are added have the label "@".
    Constituents of one word are left out.

    Args:
        labeled_spans: (label, i, j) in post-order, over words.
        num_words: number of words.

    Returns:
        The constituents of a binary tree, in post-order.

    Raises:
        ValueError: a label of a part of the sentence is "@", one has a "+", or the spans are no tree over all words.

    Cost: O(n log n).
    """
    labels: dict[Span, str] = {}
    for label, i, j in labeled_spans:
        # `parse` gives "@" to a sentence that has no label of its own.
        if (label == ADDED_NODE and (i, j) != (0, num_words)) or CHAIN in label:
            raise ValueError(f"the label {label!r} has a meaning in binary trees ({ADDED_NODE}, {CHAIN}): rename it")
        labels[i, j] = f"{label}{CHAIN}{labels[i, j]}" if (i, j) in labels else label
    if num_words == 1:
        return []
    inner = [span for span in labels if span[1] - span[0] > 1]
    return [(labels.get(span, ADDED_NODE), *span) for span in binarize_spans(inner, num_words)]


def encode_trees(
    sentences: Sequence[TreebankSentence],
    tokenizer: PreTrainedTokenizerBase,
    system: TransitionSystem,
    labels: Sequence[str],
    text_style: str | None = None,
) -> list[EncodedTree]:
    """Encode sentences and their trees for training or scoring, with one call of the tokenizer.

    Args:
        sentences: sentences of a treebank.
        tokenizer: a fast tokenizer, of words or of pieces of words; the pieces of a word become siblings in the tree.
        system: the transition system.
        labels: its labels, in the order of their ids.
        text_style: of the model's configuration; "natural" spells words as text has them (see `data.punctuation`).

    Returns:
        Per sentence `input_ids`, `actions` and `word_ends`, lists of ints, ints and bools.

    Raises:
        ValueError: a label is unknown, a word cannot be encoded on its own, or a tree has no constituent over the
            whole sentence; the message names the source line of the sentence.

    Cost: O(tokens + constituents).
    """
    if len(labels) != system.num_labels or len(set(labels)) != len(labels):
        raise ValueError(f"{len(labels)} labels for a system of {system.num_labels}: give each of its labels once")
    if not sentences:
        return []
    label_ids = {label: index for index, label in enumerate(labels)}
    for sentence in sentences:
        with errors_at(sentence.source):
            check_words(sentence.words)
    encoded: list[EncodedTree] = []
    for sentence, (input_ids, places) in zip(sentences, _cut(sentences, tokenizer, text_style), strict=True):
        with errors_at(sentence.source):
            if tokenizer.pad_token_id in input_ids:
                raise ValueError("a word is the padding token of the tokenizer: change it, or leave the sentence out")
            is_natural = text_style == NATURAL
            word_ends = (
                word_ends_from_word_ids(places) if is_natural else word_ends_from_offsets(places, sentence.words)
            )
            first, labeled = _first_tokens(word_ends), system_constituents(sentence, system.name)
            unknown = [label for label, _, _ in labeled if label not in label_ids]
            if unknown:
                raise ValueError(
                    f"the label {unknown[0]!r} is not one of the {len(labels)} labels {', '.join(labels)}: collect the "
                    "labels from all treebanks with label_inventory"
                )
            spans = [(label_ids[label], first[i], first[j]) for label, i, j in labeled]
            if not sentence.labeled_spans:
                raise ValueError("the tree has no constituent: give it one over the whole sentence")
            actions = system.spans_to_actions(spans, len(input_ids), word_ends)
        encoded.append({"input_ids": list(input_ids), "actions": actions, "word_ends": word_ends})
    return encoded


def _cut(
    sentences: Sequence[TreebankSentence], tokenizer: PreTrainedTokenizerBase, text_style: str | None
) -> Iterable[tuple[list[int], list[Any]]]:
    """Per sentence its tokens, and for each the place of its word ("natural"), or its offsets in the joined words."""
    if text_style == NATURAL:
        joined = [stands_joined(s.words, s.tags) if s.joined is None else s.joined for s in sentences]
        return encode_joined(tokenizer, [sentence.words for sentence in sentences], joined)
    encoding = tokenizer(
        [" ".join(sentence.words) for sentence in sentences],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        split_special_tokens=True,
        verbose=False,
    )
    return zip(encoding["input_ids"], encoding["offset_mapping"], strict=True)


def _first_tokens(word_ends: Sequence[bool]) -> list[int]:
    """The first token of each word, and the number of tokens."""
    return [0, *(token + 1 for token, is_end in enumerate(word_ends) if is_end)]


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
    num_words = _count_words(word_ends)
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
    num_words = _count_words(word_ends)
    if num_words == 1:
        return []
    inner = {(i, j) for i, j in spans if j - i > 1} | {(0, num_words)}
    kept = (binarize_spans if binarized else in_post_order)(sorted(inner), num_words)[:-1]
    first = _first_tokens(word_ends)
    return [(first[i], first[j]) for i, j in kept]


def gold_attachments(spans: Sequence[Span], word_ends: Sequence[bool]) -> list[int]:
    """Compute the attachments of Pushdown Layers: those of the tree over tokens, binarized to the right.

    Source: Murty et al. (2023). The tokens of a word are a constituent.

    Args:
        spans: half-open word spans of the tree, in any order; copies and spans of one word are ignored.
        word_ends: per token, True at the last piece of each word.

    Returns:
        Per token the position that it is attached to, counted from 1 at the first token (see `pushdown_tape`).

    Raises:
        ValueError: the spans cross or leave the sentence, or the last token does not end a word.

    Cost: O(n log n).
    """
    return tree_attachments(binary_token_spans(spans, word_ends), len(word_ends))


def binary_token_spans(spans: Sequence[Span], word_ends: Sequence[bool]) -> list[Span]:
    """Binarize a tree over words to the right, and its words over their tokens.

    Args:
        spans: half-open word spans of the tree, in any order; copies and spans of one word are ignored.
        word_ends: per token, True at the last piece of each word.

    Returns:
        The half-open spans of the n - 1 inner nodes over n tokens, in post-order.

    Raises:
        ValueError: the spans cross or leave the sentence, or the last token does not end a word.

    Cost: O(n log n).
    """
    num_words, num_tokens, first = _count_words(word_ends), len(word_ends), _first_tokens(word_ends)
    words = [*spans, *((word, word + 1) for word in range(num_words)), (0, num_words)]
    inner = {(first[i], first[j]) for i, j in words if first[j] - first[i] > 1}
    return binarize_spans(sorted(inner), num_tokens)


def _count_words(word_ends: Sequence[bool]) -> int:
    """Number of words, or ValueError if the last token does not end one."""
    if not len(word_ends) or not word_ends[-1]:
        raise ValueError("word_ends must be True at the last token: every token belongs to a word")
    return sum(map(bool, word_ends))
