"""Gold trees as supervision for language models that read one token after the other.

A sentence of n tokens is followed by `</s>`; what is given for it has n + 1 positions.
"""

from collections.abc import Sequence

from hf_synlm.syntactic_distance import spans_to_distances
from hf_synlm.trees import Span, binarize, spans_to_tree, tree_to_spans


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
