# SPDX-License-Identifier: Apache-2.0
"""Codecs: how a tree is given to the `forward` of an architecture. A configuration names its codec by `tree_codec`.

    codec = tree_codec(model.config)                               # hub/abilities.py
    rows = [codec.encode(ids, word_ends, labeled_spans), ...]      # a sentence with its tree each
    model(**codec.pad(rows)).joint_log_prob

`labeled_spans` are (label, i, j) over words, as in treebanks; `word_ends` is True at the last token of each word. A row
is a mapping of lists: `input_ids`, `word_ends` of the words' tokens, and the tree in `codec.field`.

Shapes: B sentences, T tokens, A actions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from hf_synlm.trees.actions import COMP, GEN, PAD_ACTION, spans_to_actions
from hf_synlm.trees.binary import actions_to_spans, binarize_spans
from hf_synlm.trees.spans import Span, check_word_ends, fold_tokens
from hf_synlm.trees.transitions import ADDED_NODE, CHAIN, PAD, SHIFT, TransitionSystem

Constituent: TypeAlias = tuple[str, int, int]
"""(label, i, j) over words."""
Row: TypeAlias = Mapping[str, Any]
NO_LABEL = "X"
"""Label of the constituents of unlabeled trees, and tag of words without one."""


@dataclass(frozen=True, kw_only=True)
class TreeCodec:
    """How trees are given to the models of an architecture: here as the spans of binary trees over tokens (GPST).

    Other codecs of binary trees write and read their own form of these spans by `write` and `read`.
    """

    closing: Sequence[int] = ()
    """Ids after the words of a text."""
    field = "spans"
    """Name of the tree in a row and in a batch."""
    padding = PAD_ACTION
    """The value that pads it."""
    labels = tuple[str, ...]()
    """Labels of constituents, if the model reads labels."""

    def unknown(self, labeled_spans: Sequence[Constituent], num_words: int) -> list[Constituent]:
        """Constituents whose label the model lacks. A tree with such constituents cannot be encoded."""
        return []

    def encode(self, ids: Sequence[int], word_ends: Sequence[bool], labeled_spans: Sequence[Constituent]) -> Row:
        """The row of a sentence with its tree; ValueError if the spans do not form a tree over the words.

        Models of binary trees read the tree binarized to the right, with the tokens of a word as a constituent, and the
        end of a text after it. Cost: O(n log n).
        """
        spans = binary_token_spans([span[1:] for span in labeled_spans], word_ends)
        tree = self.write(spans, len(ids))
        return {"input_ids": [*ids, *self.closing], "word_ends": list(word_ends), self.field: tree}

    def decode(self, row: Row) -> list[Constituent]:
        """The tree of a row, in post-order; inverse of `encode`, except for parts that it adds or leaves out."""
        spans = self.read(row[self.field], len(row["word_ends"]))
        return [(NO_LABEL, i, j) for i, j in fold_tokens(spans, row["word_ends"])]

    def write(self, spans: list[Span], num_tokens: int) -> list[Any]:
        """The tree with these spans in post-order, as `forward` takes it."""
        return spans

    def read(self, tree: Sequence[Any], num_tokens: int) -> list[Span]:
        """Inverse of `write`."""
        return list(tree)

    def key(self, row: Row) -> tuple:
        """A key that is equal for equal trees of a sentence."""
        return tuple(row[self.field])

    def pad(self, rows: Sequence[Row], pad_token_id: int = 0) -> dict[str, Any]:
        """Collate rows: arguments of `forward`, padded on the right."""
        trees = [row[self.field] for row in rows]
        return {**pad_inputs((row["input_ids"] for row in rows), pad_token_id), self.field: self.pad_trees(trees)}

    def pad_trees(self, trees: list[Any]) -> Any:
        """The trees of a batch."""
        return trees

    def steps(self, batch: Row) -> tuple[Tensor, Tensor]:
        """The decisions of a batch about trees [B, A], negative if there is none; tokens read before each [B, A]."""
        mask = batch["attention_mask"]
        actions = map(spans_to_actions, batch["spans"], mask.sum(1).tolist())
        return _steps(pad_rows(actions, PAD_ACTION).to(mask.device), GEN, PAD_ACTION)


class ActionCodec(TreeCodec):
    """GEN and COMP of binary trees (URNNG); an end token stands beside the tree of the words."""

    field = "actions"
    shift = GEN
    """The action that reads a token."""

    def write(self, spans: list[Span], num_tokens: int) -> list[int]:
        """See `TreeCodec`."""
        return spans_to_actions(spans, num_tokens) + [GEN, COMP] * len(self.closing)

    def read(self, tree: Sequence[int], num_tokens: int) -> list[Span]:
        """See `TreeCodec`."""
        return actions_to_spans(tree)[: num_tokens - 1]

    def pad_trees(self, trees: list[Any]) -> Tensor:
        """See `TreeCodec`."""
        return pad_rows(trees, self.padding)

    def steps(self, batch: Row) -> tuple[Tensor, Tensor]:
        """See `TreeCodec`: all actions."""
        return _steps(batch["actions"], self.shift, self.padding)


@dataclass(frozen=True, kw_only=True)
class AttachmentCodec(ActionCodec):
    """Attachments of tokens (Pushdown Layers; see models/pushdown/tape.py), also of the ids after the words."""

    ends: Sequence[int] = ()
    """Attachments of `closing`."""
    field = "attachments"
    padding = -100

    def write(self, spans: list[Span], num_tokens: int) -> list[int]:
        """See `TreeCodec`."""
        return [*tree_attachments(spans, num_tokens), *self.ends]

    def read(self, tree: Sequence[int], num_tokens: int) -> list[Span]:
        """See `TreeCodec`."""
        stack, spans = list[int](), list[Span]()  # first tokens of constituents
        for token, attachment in enumerate(tree[:num_tokens]):
            stack.append(token)
            while stack[-1] >= attachment:
                stack.pop()
                spans.append((stack[-1], token + 1))
        return spans

    def steps(self, batch: Row) -> tuple[Tensor, Tensor]:
        """See `TreeCodec`: each attachment follows its token."""
        attachments = batch["attachments"]
        return attachments, torch.arange(1, attachments.shape[1] + 1, device=attachments.device).expand_as(attachments)


@dataclass(frozen=True)
class LabeledCodec(ActionCodec):
    """Actions of a transition system (RNNG, Tree LM); the pieces of a word are siblings."""

    system_name: str = "top_down"
    labels: tuple[str, ...] = ()
    """In the order of their ids."""
    padding = PAD
    shift = SHIFT

    @cached_property
    def system(self) -> TransitionSystem:
        """The transition system."""
        return TransitionSystem(self.system_name, len(self.labels))

    def unknown(self, labeled_spans: Sequence[Constituent], num_words: int) -> list[Constituent]:
        """See `TreeCodec`; those of a binary tree have the labels of `binary_constituents`."""
        found = system_constituents(labeled_spans, num_words, self.system_name)
        return [constituent for constituent in found if constituent[0] not in self.labels]

    def encode(self, ids: Sequence[int], word_ends: Sequence[bool], labeled_spans: Sequence[Constituent]) -> Row:
        """See `TreeCodec`."""
        if not labeled_spans:
            raise ValueError("the tree has no constituent. Add a constituent over the whole sentence")
        first, ends = first_tokens(word_ends), list(word_ends)
        unknown = self.unknown(labeled_spans, len(first) - 1)
        if unknown:
            raise ValueError(
                f"the label {unknown[0][0]!r} is not one of the {len(self.labels)} labels {', '.join(self.labels)}. "
                "Collect the labels from all treebanks with label_inventory"
            )
        labeled = system_constituents(labeled_spans, len(first) - 1, self.system_name)
        spans = [(self.labels.index(label), first[i], first[j]) for label, i, j in labeled]
        actions = self.system.spans_to_actions(spans, len(ids), ends)
        return {"input_ids": list(ids), "word_ends": ends, "actions": actions}

    def decode(self, row: Row) -> list[Constituent]:
        """See `TreeCodec`."""
        words = list(accumulate(map(int, row["word_ends"]), initial=0))
        spans = self.system.actions_to_spans(row["actions"], row["word_ends"])
        return [(self.labels[label], words[i], words[j]) for label, i, j in spans]

    def pad(self, rows: Sequence[Row], pad_token_id: int = 0) -> dict[str, Any]:
        """See `TreeCodec`; with `word_ends` [B, T]."""
        ends = pad_rows((row["word_ends"] for row in rows), False, torch.bool)
        return {**super().pad(rows, pad_token_id), "word_ends": ends}


CODECS: dict[str, Callable[[Any], TreeCodec]] = {
    "spans": lambda config: TreeCodec(),
    "actions": lambda config: ActionCodec(closing=tuple({config.eos_token_id} - {None})),
    "attachments": lambda config: AttachmentCodec(closing=tuple(config.closing), ends=tuple(config.closing.values())),
    "labeled": lambda config: LabeledCodec(config.transition_system, tuple(config.nonterminals)),
}
"""Makes the codec that the configuration of a model names."""


# ---------------------------------------------------------------------------------------------- batches
def pad_rows(rows: Iterable[Any], value: int | bool, dtype: torch.dtype = torch.long) -> Tensor:
    """Stack rows of unequal length to [B, T], padded on the right."""
    return pad_sequence([torch.as_tensor(row, dtype=dtype) for row in rows], batch_first=True, padding_value=value)


def pad_inputs(rows: Iterable[Any], pad_token_id: int, side: Literal["right", "left"] = "right") -> dict[str, Tensor]:
    """Stack rows of token ids of unequal length to `input_ids` [B, T], with their `attention_mask`."""
    ids = [torch.as_tensor(row, dtype=torch.long) for row in rows]
    mask = pad_sequence([torch.ones_like(row) for row in ids], True, 0, side)
    return {"input_ids": pad_sequence(ids, True, pad_token_id, side), "attention_mask": mask}


def _steps(actions: Tensor, shift: int, padding: int) -> tuple[Tensor, Tensor]:
    """`TreeCodec.steps` of actions [B, A], one of which reads a token."""
    shifts = (actions == shift).long()
    return actions.masked_fill(actions == padding, -1), shifts.cumsum(1) - shifts


# ---------------------------------------------------------------------------------------------- trees
def first_tokens(word_ends: Sequence[bool]) -> list[int]:
    """The first token of each word, and the number of tokens; ValueError if the last token does not end a word."""
    check_word_ends((), word_ends)
    return [0, *(token + 1 for token, is_end in enumerate(word_ends) if is_end)]


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
    first = first_tokens(word_ends)
    num_words = len(first) - 1
    words = [*spans, *((word, word + 1) for word in range(num_words)), (0, num_words)]
    inner = {(first[i], first[j]) for i, j in words if first[j] - first[i] > 1}
    return binarize_spans(sorted(inner), len(word_ends))


def tree_attachments(spans: Sequence[Span], num_tokens: int) -> list[int]:
    """Attachments of positions 1 .. n of a binary tree, given by its spans in post-order without leaves.

    Each is the last position of the left part of the widest constituent that ends there, else the position itself.
    """
    attachments, start_of = list(range(1, num_tokens + 1)), list(range(num_tokens))
    for i, j in spans:
        # The right part is the widest constituent so far that ends at j; the left part ends where it starts.
        attachments[j - 1], start_of[j - 1] = start_of[j - 1], i
    return attachments


def system_constituents(labeled_spans: Sequence[Constituent], num_words: int, system: str) -> Sequence[Constituent]:
    """The constituents of a tree that the transition system `system` writes, in post-order."""
    return binary_constituents(labeled_spans, num_words) if system == "binary" else labeled_spans


def binary_constituents(labeled_spans: Sequence[Constituent], num_words: int) -> list[Constituent]:
    """Binarize a labeled tree to the right.

    Unary chains become one label, "S+VP" for a VP that is all of an S. Nodes that are added have the label "@".
    Constituents of one word are left out.

    Args:
        labeled_spans: (label, i, j) in post-order, over words.
        num_words: number of words.

    Returns:
        The constituents of a binary tree, in post-order.

    Raises:
        ValueError: a label of a part of the sentence is "@", one has a "+", or the spans do not form one tree.

    Cost: O(n log n).
    """
    labels: dict[Span, str] = {}
    for label, i, j in labeled_spans:
        # `parse` gives "@" to a sentence that has no label of its own.
        if (label == ADDED_NODE and (i, j) != (0, num_words)) or CHAIN in label:
            raise ValueError(f"the label {label!r} has a meaning in binary trees ({ADDED_NODE}, {CHAIN}). Rename it")
        labels[i, j] = f"{label}{CHAIN}{labels[i, j]}" if (i, j) in labels else label
    if num_words == 1:
        return []
    inner = [span for span in labels if span[1] - span[0] > 1]
    return [(labels.get(span, ADDED_NODE), *span) for span in binarize_spans(inner, num_words)]
