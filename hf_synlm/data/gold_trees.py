"""Gold trees as supervision: actions for RNNG, syntactic distances for ON-LSTM and PRPN, spans for PaLM."""

from collections.abc import Iterable, Sequence
from typing import TypedDict

from transformers import PreTrainedTokenizerBase

from hf_synlm.data.collate import word_ends_from_offsets
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.rnng_actions import TransitionSystem
from hf_synlm.syntactic_distance import spans_to_distances
from hf_synlm.trees import Span, binarize, check_words, spans_to_tree, tree_to_spans


class EncodedTree(TypedDict):
    """A sentence with its tree as a model of the RNNG family takes it; `collate_trees` makes batches of these."""

    input_ids: list[int]
    """Token ids."""
    actions: list[int]
    """Action ids of the gold derivation."""
    word_ends: list[bool]
    """Per token, True at the last piece of each word."""


def label_inventory(sentences: Iterable[TreebankSentence]) -> tuple[str, ...]:
    """Collect the labels of constituents in alphabetical order; the position of a label is its id.

    The authors collect them from training, validation and test data together, so that no tree has an unknown label.

    Args:
        sentences: sentences of treebanks.

    Returns:
        The labels, each once.

    Raises:
        ValueError: there is no labeled constituent.
    """
    labels = {label for sentence in sentences for label, _, _ in sentence.labeled_spans}
    if not labels:
        raise ValueError("the sentences have no labeled constituent: are their trees labeled?")
    return tuple(sorted(labels))


def encode_tree(
    sentence: TreebankSentence, tokenizer: PreTrainedTokenizerBase, system: TransitionSystem, labels: Sequence[str]
) -> EncodedTree:
    """Encode a sentence and its tree for training or scoring. For many sentences, `encode_trees` is faster.

    Args:
        sentence: a sentence of a treebank.
        tokenizer: a fast tokenizer, of words or of pieces of words; the pieces of a word become siblings in the tree.
        system: the transition system.
        labels: its labels, in the order of their ids.

    Returns:
        `input_ids`, `actions` and `word_ends`, lists of ints, ints and bools.

    Raises:
        ValueError: a label is unknown, a word cannot be encoded on its own, or the tree has no constituent over the
            whole sentence; the message names the source line of the sentence.
    """
    return encode_trees([sentence], tokenizer, system, labels)[0]


def encode_trees(
    sentences: Sequence[TreebankSentence],
    tokenizer: PreTrainedTokenizerBase,
    system: TransitionSystem,
    labels: Sequence[str],
) -> list[EncodedTree]:
    """Encode sentences and their trees, with one call of the tokenizer.

    Args:
        sentences: sentences of a treebank.
        tokenizer: as in `encode_tree`.
        system: as in `encode_tree`.
        labels: as in `encode_tree`.

    Returns:
        Per sentence what `encode_tree` returns.

    Raises:
        ValueError: as `encode_tree`.

    Cost: O(tokens + constituents).
    """
    if len(labels) != system.num_labels or len(set(labels)) != len(labels):
        raise ValueError(f"{len(labels)} labels for a system of {system.num_labels}: give each of its labels once")
    if not sentences:
        return []
    label_ids = {label: index for index, label in enumerate(labels)}
    for sentence in sentences:
        _check_sentence(sentence, label_ids)
    encoding = tokenizer(
        [" ".join(sentence.words) for sentence in sentences],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        split_special_tokens=True,
        verbose=False,
    )
    return [
        _encode(sentence, input_ids, offsets, system, label_ids, tokenizer.pad_token_id)
        for sentence, input_ids, offsets in zip(
            sentences, encoding["input_ids"], encoding["offset_mapping"], strict=True
        )
    ]


def _check_sentence(sentence: TreebankSentence, label_ids: dict[str, int]) -> None:
    """Raise ValueError for words that cannot be joined and for unknown labels."""
    for label, start, end in sentence.labeled_spans:
        if label not in label_ids:
            raise ValueError(
                f"{sentence.source}: the label {label!r} of ({start}, {end}) is not one of the {len(label_ids)} labels "
                f"{', '.join(label_ids)}: collect the labels from all treebanks with label_inventory"
            )
    try:
        check_words(sentence.words)
    except ValueError as error:
        raise ValueError(f"{sentence.source}: {error}") from error


def _encode(
    sentence: TreebankSentence,
    input_ids: list[int],
    offsets: Sequence[tuple[int, int]],
    system: TransitionSystem,
    label_ids: dict[str, int],
    pad_token_id: int | None,
) -> EncodedTree:
    """Put the tree of a sentence over its tokens and write it as actions."""
    try:
        if pad_token_id in input_ids:
            raise ValueError("a word is the padding token of the tokenizer: change the word, or leave the sentence out")
        word_ends = word_ends_from_offsets(offsets, sentence.words)
        # Word boundary -> token boundary.
        boundaries = [0, *(token + 1 for token, is_end in enumerate(word_ends) if is_end)]
        spans = [(label_ids[label], boundaries[start], boundaries[end]) for label, start, end in sentence.labeled_spans]
        if not spans:
            raise ValueError("the tree has no constituent: give it one over the whole sentence")
        actions = system.spans_to_actions(spans, len(input_ids), word_ends)
    except ValueError as error:
        raise ValueError(f"{sentence.source}: {error}") from error
    return {"input_ids": list(input_ids), "actions": actions, "word_ends": word_ends}


def gold_distances(spans: Sequence[Span], word_ends: Sequence[bool]) -> list[int]:
    """Syntactic distances of a gold tree, aligned with the tokens of its sentence and the `</s>` after them.

    The value at a token belongs to the gap before it: the height of the node whose parts meet there, less one, in the
    tree binarized to the right; 0 between pieces of a word. The gap before `</s>`, where the sentence ends, and the gap
    before the first token, where the one before it ended, are above the whole sentence: one more than its largest.

    Source: Du et al. (2020), A.1 and their `helpers.py`, which give every first token one more than the largest value
    of the training set (`make_stream` does that). What their data hold for `</s>` is not known.

    Args:
        spans: half-open word spans of the tree, the whole sentence included; those of one word are left out.
        word_ends: per token, True at the last piece of each word.

    Returns:
        One value per token and one for `</s>`.

    Raises:
        ValueError: the spans are no tree over the words, or the last token does not end a word.

    Cost: O(n log n).
    """
    num_words = _count_words(word_ends)
    inner = list(dict.fromkeys((i, j) for i, j in spans if j - i > 1))
    of_words = iter(spans_to_distances(inner, num_words))
    distances = [next(of_words) if begins else 0 for begins in (True, *word_ends[:-1])]
    return [*distances, distances[0]]


def gold_spans(spans: Sequence[Span], word_ends: Sequence[bool], *, binarized: bool = False) -> list[Span]:
    """Token spans of the constituents that span attention is to find.

    Source: Peng et al. (2019), section 3.3: constituents of more than one word, the sentence itself left out.

    Args:
        spans: half-open word spans of the tree, in any order; copies and spans of one word are left out.
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
    tree = spans_to_tree(sorted(inner), num_words)
    kept = tree_to_spans(binarize(tree) if binarized else tree)[:-1]
    first = [0] + [token + 1 for token, is_end in enumerate(word_ends) if is_end]
    return [(first[i], first[j]) for i, j in kept]


def _count_words(word_ends: Sequence[bool]) -> int:
    """Number of words, or ValueError if the last token does not end one."""
    if not len(word_ends) or not word_ends[-1]:
        raise ValueError("word_ends must be True at the last token: every token belongs to a word")
    return sum(map(bool, word_ends))
