# SPDX-License-Identifier: Apache-2.0
"""Surprisal of words with given trees, by one pass of the model over each tree.

    lexical    = -log p(word | words and actions before it)
    structural = -log p(actions since the word before | words and actions before them)

Their sum is of the word together with its part of the tree (joint), so it must not be compared with surprisal that is
summed over trees. What comes after the last word (actions that close the tree, an end token) belongs to no word.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_synlm.data.brackets import plain_word
from hf_synlm.data.gold_trees import encode_trees
from hf_synlm.data.text import PathLike, read_lines
from hf_synlm.data.treebank import TreebankSentence
from hf_synlm.evaluation.text.batches import batches_by_cost
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import WordScores, by_words, words_of
from hf_synlm.evaluation.text.text_items import TextItem
from hf_synlm.evaluation.text.token_scores import TokenScores
from hf_synlm.evaluation.text.tree_files import Proposals, batch_trees, iterate_trees
from hf_synlm.evaluation.text.words import EncodedText, Word
from hf_synlm.hub.abilities import tree_codec
from hf_synlm.trees.codecs import LabeledCodec, Row, TreeCodec


class _Row(NamedTuple):
    """A tree among those that are read together."""

    ids: tuple[int, ...]
    place: int

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def find_trees(proposals: Proposals, items: Sequence[TextItem]) -> list[TreebankSentence | None]:
    """The tree of each text, which has the same characters; None for a text without words.

    Where a text has several trees, there must be one for each time that it stands in the input, in the same order.
    """
    times = Counter(plain_word(item.text) for item in items)
    seen = Counter[str]()
    found: list[TreebankSentence | None] = []
    for number, item in enumerate(items, 1):
        key = plain_word(item.text)
        if not key:
            found.append(None)
            continue
        trees = proposals.trees_of(item.text, number)
        if len({(tree.words, tree.labeled_spans) for tree in trees}) > 1 and len(trees) != times[key]:
            raise ValueError(
                f"sentence {number} has {len(trees)} different trees, but occurs {times[key]} times in the input: "
                f"{item.text!r}. Give one tree per occurrence."
            )
        found.append(trees[seen[key] % len(trees)])
        seen[key] += 1
    return found


def trees_in_order(paths: Sequence[PathLike], items: Iterable[TextItem]) -> Iterator[TreebankSentence | None]:
    """As `find_trees`, from files that have a tree for each text in their order, and are read as it is needed."""
    trees = chain.from_iterable(iterate_trees(Path(path)) for path in paths)
    for number, item in enumerate(items, 1):
        key = plain_word(item.text)
        tree = next(trees, None) if key else None
        if key and (tree is None or plain_word(" ".join(tree.words)) != key):
            raise ValueError(
                f"The tree for sentence {number} ({item.text!r}) is not at its place"
                + ("" if tree is None else f": {tree.source} has the tree of {' '.join(tree.words)!r} there")
                + ". Give the trees of a long file in the order of its texts, one for each"
            )
        yield tree


def read_label_map(path: PathLike) -> dict[str, str]:
    """Labels and those that stand for them, from lines of two words; a label alone is left out ("")."""
    pairs = dict[str, str]()
    for number, line in enumerate(read_lines(path), 1):
        parts = line.split()
        if len(parts) > 2:
            raise ValueError(f"{path}:{number}: {line!r} is neither 'LABEL' nor 'LABEL REPLACEMENT'")
        pairs |= {parts[0]: "".join(parts[1:])} if parts else {}
    return pairs


def fit_labels(
    scorer: TextScorer,
    trees: Sequence[TreebankSentence | None],
    *,
    drop: bool = False,
    renamed: Mapping[str, str] | None = None,
) -> tuple[list[TreebankSentence | None], int]:
    """Trees with the labels that the model knows, and how many were changed.

    Labels are `renamed` first, or left out (""); then `drop` leaves out the brackets of those that the model lacks.
    """
    codec = tree_codec(scorer.model.config)
    if not isinstance(codec, LabeledCodec):
        if drop or renamed:
            raise ValueError(f"{type(scorer.model).__name__} does not read labels. Leave --unknown-labels out")
        return list(trees), 0
    fitted, lacking, roots = list[TreebankSentence | None](), Counter[str](), Counter[str]()
    for tree in trees:
        if tree is None:
            fitted.append(None)
            continue
        spans = ((renamed.get(label, label), i, j) for label, i, j in tree.labeled_spans) if renamed else None
        new = tree if spans is None else dataclasses.replace(tree, labeled_spans=tuple(s for s in spans if s[0]))
        unknown = codec.unknown(new.labeled_spans, len(new.words))
        lacking.update({label for label, _, _ in unknown})
        fitted.append(_without(new, unknown, codec.system_name == "binary") if drop else new)
        if not _labels_of_whole(fitted[-1]):
            roots.update(_labels_of_whole(tree))
    changed = sum(old != new for old, new in zip(trees, fitted, strict=True))
    if lacking and not drop:
        counts = ", ".join(f"{label} in {count}" for label, count in lacking.most_common())
        raise ValueError(
            f"the model does not know some labels of the {sum(tree is not None for tree in trees)} trees: {counts}. "
            f"Its labels are {', '.join(sorted(codec.labels))}. --unknown-labels drop removes brackets with unknown "
            "labels. In --unknown-labels FILE, a line 'SQ S' renames SQ to S, and a line 'SQ' removes SQ."
        )
    if roots:
        counts = ", ".join(f"{label} in {count}" for label, count in roots.most_common())
        raise ValueError(
            f"labels of whole sentences cannot be left out: {counts}. "
            f"Rename them by --unknown-labels FILE, with lines such as '{next(iter(roots))} S'."
        )
    return fitted, changed


def _labels_of_whole(tree: TreebankSentence | None) -> list[str]:
    """Labels of the constituents over all words."""
    return [] if tree is None else [label for label, i, j in tree.labeled_spans if (i, j) == (0, len(tree.words))]


def _without(tree: TreebankSentence, unknown: Sequence[tuple[str, int, int]], binary: bool) -> TreebankSentence:
    """The tree without these constituents; in binary trees a label may be that of a unary chain."""
    out = {span[1:] if binary else span for span in unknown}
    left = tuple(span for span in tree.labeled_spans if (span[1:] if binary else span) not in out)
    return dataclasses.replace(tree, labeled_spans=left)


def score_given_trees(
    scorer: TextScorer, items: Sequence[TextItem], trees: Sequence[TreebankSentence | None]
) -> list[WordScores]:
    """Surprisal of the words of texts together with given trees.

    Args:
        scorer: a GPST, RNNG, Tree LM, URNNG or model with Pushdown Layers.
        items: the texts.
        trees: the tree of each, with labels that the model knows; None for a text without words.

    Returns:
        Per text its scores: `log_probs` are of words and structure, `lexical` the part of the words, `end` what
        remains of the joint probability.

    Raises:
        ValueError: the model gives no probability to trees, or a tree does not fit it or its text.

    Cost: one forward pass over trees of about equal length, and their logits; a second one for attention entropies.
    """
    fit_labels(scorer, trees)  # raises ValueError for others
    codec, given = tree_codec(scorer.model.config), [tree for tree in trees if tree is not None]
    rows = encode_trees(given, scorer.tokenizer, codec, scorer.text_style)
    unknown = [text.unknown for text in scorer.encode([tree.words for tree in given], "words")]
    texts = [_Row(tuple(row["input_ids"]), place) for place, row in enumerate(rows)]
    found: dict[int, TokenScores] = {}
    for batch in batches_by_cost(texts, scorer.batch_size, max(1, scorer.max_rows // 4)):
        read = _read_trees(scorer, codec, [rows[text.place] for text in batch])
        found |= {text.place: one for text, one in zip(batch, read, strict=True)}
    results, places = list[WordScores](), count()
    for item, tree in zip(items, trees, strict=True):
        words, text, scores = words_of(item), EncodedText([], [], 0), TokenScores(torch.zeros(0, dtype=torch.float64))
        if tree is not None:
            place = next(places)
            text, scores = _encoded(words, tree, rows[place], unknown[place]), found[place]
        results.append(by_words(scorer, words, text, scores))
    return results


def _encoded(words: Sequence[Word], tree: TreebankSentence, row: Mapping[str, Any], unknown: Set[int]) -> EncodedText:
    """The tokens of a tree, given to the words of the text; `unknown` are leaves."""
    owners, ends = _leaves_to_words([word.text for word in words], tree), row["word_ends"]
    leaves = accumulate(ends[:-1], initial=0)  # of the tokens
    return EncodedText(
        row["input_ids"][: len(ends)],
        [owners[leaf] for leaf in leaves],
        len(words),
        unknown=frozenset(owners[leaf] for leaf in unknown),
    )


def _leaves_to_words(words: Sequence[str], tree: TreebankSentence) -> list[int]:
    """The word that has the characters of each leaf."""
    word_at = [number for number, word in enumerate(words) for _ in plain_word(word)]
    owners, place = list[int](), 0
    for leaf in tree.words:
        length = len(plain_word(leaf))
        own = sorted(set(word_at[place : place + length]))
        if len(own) > 1:
            raise ValueError(
                f"{tree.source}: the leaf {leaf!r} covers the words {' '.join(words[k] for k in own)!r} of the text. "
                "Write the text with the words of the tree, or split the leaf."
            )
        owners += own
        place += length
    return owners


@torch.no_grad()
def _read_trees(scorer: TextScorer, codec: TreeCodec, rows: Sequence[Row]) -> list[TokenScores]:
    """Scores of the tokens of sentences with their trees, by one call of the model."""
    batch = batch_trees(scorer, codec, rows)
    ids = batch["input_ids"]
    output = scorer.model(**batch, **({} if "spans" in batch else {"output_logits": True}))
    lexical = _log_probs(output.token_logits_given_tree[:, : ids.shape[1]], ids)
    structural = lexical.new_zeros(len(ids), ids.shape[1] + 1)
    actions, before = codec.steps(batch)
    values = _log_probs(output.action_logits[:, : actions.shape[1]], actions.clamp(min=0))
    structural.scatter_add_(1, before, values.masked_fill(actions < 0, 0.0))
    found = []
    for row, of_words, of_tree in zip(rows, lexical.cpu().double(), structural.cpu().double(), strict=True):
        own, every_id = len(row["word_ends"]), len(row["input_ids"])
        end = of_words[own:every_id].sum() + of_tree[own:].sum()
        found.append(TokenScores(of_words[:own] + of_tree[:own], lexical=of_words[:own], end=float(end)))
    if scorer.attention_entropy is not None:
        given = {name: batch[name] for name in ("input_ids", "actions", "attention_mask", "word_ends")}
        entropies = scorer.model.attention_entropy(**given, kind=scorer.attention_entropy).cpu().double()
        for scores, row, values in zip(found, rows, entropies, strict=True):
            scores.attention_entropy = values[: len(row["word_ends"])]
    return found


def _log_probs(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities [B, N] of ids [B, N] under logits [B, N, V]."""
    logits = logits.float()
    return logits.gather(2, ids[..., None]).squeeze(2) - logits.logsumexp(2)
