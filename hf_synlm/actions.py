"""Transition systems that build trees: which action is legal, actions <-> spans.

GEN/COMP, the system of GPST (Hu et al. 2024, section 3), builds binary trees bottom-up on a stack:

* GEN (id 0) generates the next token and pushes it,
* COMP (id 1) replaces the top two stack items by their composition; it needs at least two items.

n tokens take n GEN and n - 1 COMP actions, 2n - 1 in all, and end with one item on the stack. The order of the actions
is the post-order of the tree. Action sequences are padded on the right with PAD_ACTION (-1).

NT/SHIFT/REDUCE, the systems of RNNG (Noji & Oseki 2021), build labeled n-ary trees: see `TransitionSystem`. Their ids
are those of the authors' checkpoints, where PAD is 0.

Shapes: `[...]` is any batch shape, A the length of an action sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from .trees import Span, validate_spans

LabeledSpan: TypeAlias = tuple[int, int, int]  # (label id, i, j)

GEN = 0
COMP = 1
PAD_ACTION = -1

PAD = 0
SHIFT = 1
REDUCE = 2
FINISH = 3  # in-order only; top-down gives this id to its first nonterminal


def spans_to_actions(spans: Sequence[Span], num_tokens: int) -> list[int]:
    """Write a binary tree as the GEN/COMP actions that build it.

    After GEN of token t come as many COMP as there are spans that end at boundary t + 1. Inverse of `actions_to_spans`.

    Args:
        spans: the n - 1 half-open spans of a binary tree over n tokens, in any order.
        num_tokens: length n of the sentence in tokens.

    Returns:
        2n - 1 action ids.

    Raises:
        ValueError: the spans cross, leave the sentence or are not those of a binary tree.

    Cost: O(n log n).
    """
    validate_spans(spans, num_tokens)
    if len(spans) != num_tokens - 1:
        raise ValueError(
            f"{len(spans)} spans over {num_tokens} tokens are no binary tree, which has {num_tokens - 1}: "
            "complete the tree with spans_to_tree, binarize and tree_to_spans"
        )
    num_ending = [0] * (num_tokens + 1)
    for _, end in spans:
        num_ending[end] += 1
    actions: list[int] = []
    for end in range(1, num_tokens + 1):
        actions.append(GEN)
        actions.extend([COMP] * num_ending[end])
    return actions


def actions_to_spans(actions: Sequence[int], *, forest: bool = False) -> list[Span]:
    """Run GEN/COMP actions on a stack and list the spans that are composed.

    Inverse of `spans_to_actions`.

    Args:
        actions: action ids; padding (-1) may follow at the end.
        forest: accept a sequence that stops before a single tree is on the stack (a prefix of a derivation).

    Returns:
        Half-open spans of width >= 2, in the order of their COMP actions, which is post-order.

    Raises:
        ValueError: an id is unknown, COMP meets fewer than two items, an action follows after padding, or several
            items (or none) are left on the stack and `forest` is False; it names the position.

    Cost: O(A).
    """
    starts: list[int] = []
    spans: list[Span] = []
    num_generated = 0
    num_actions = len(actions)
    while num_actions > 0 and actions[num_actions - 1] == PAD_ACTION:
        num_actions -= 1
    for position in range(num_actions):
        action = actions[position]
        if action == GEN:
            starts.append(num_generated)
            num_generated += 1
        elif action == COMP:
            if len(starts) < 2:
                raise ValueError(
                    f"COMP at position {position} finds {len(starts)} item(s) on the stack and needs two: "
                    "generate another token (GEN) first"
                )
            starts.pop()
            spans.append((starts[-1], num_generated))
        else:
            raise ValueError(
                f"action {action} at position {position} is unknown: use GEN = {GEN}, COMP = {COMP}, "
                f"and {PAD_ACTION} as padding at the end only"
            )
    if len(starts) != 1 and not forest:
        raise ValueError(
            f"the {num_actions} actions leave {len(starts)} items on the stack, not one: "
            "add the missing COMP actions, or pass forest=True for an unfinished derivation"
        )
    return spans


def gen_comp_is_legal(action: int, stack_depth: int, num_remaining: int) -> bool:
    """Say whether an action may be taken in a state of the GEN/COMP system.

    GEN needs a token that is still to come, COMP needs two items on the stack.

    Args:
        action: GEN or COMP.
        stack_depth: number of items on the stack.
        num_remaining: number of tokens not generated yet.

    Returns:
        True if the action is legal.

    Raises:
        ValueError: the action is neither GEN nor COMP.
    """
    if action == GEN:
        return num_remaining > 0
    if action == COMP:
        return stack_depth >= 2
    raise ValueError(f"action {action} is unknown: use GEN = {GEN} or COMP = {COMP}")


def gen_comp_legal_mask(stack_depth: Tensor, num_remaining: Tensor) -> Tensor:
    """Say for a batch of states which of GEN and COMP is legal.

    Args:
        stack_depth: number of items on each stack, integers [...].
        num_remaining: number of tokens not generated yet, integers of the same (or a broadcastable) shape.

    Returns:
        Booleans [..., 2], True = legal, the last dimension indexed by the action id. A finished derivation (one item,
        no token left) has no legal action.
    """
    gen, comp = torch.broadcast_tensors(num_remaining > 0, stack_depth >= 2)
    return torch.stack((gen, comp), dim=-1)


def count_gen_comp_derivations(num_tokens: int) -> int:
    """Count the GEN/COMP derivations of n tokens, which is the number of binary trees: Catalan(n - 1).

    Catalan(n - 1) = binomial(2n - 2, n - 1) / n.

    Args:
        num_tokens: length n of the sentence in tokens.

    Returns:
        The number of derivations.

    Raises:
        ValueError: `num_tokens` is less than 1.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}: a derivation needs at least one token")
    return comb(2 * num_tokens - 2, num_tokens - 1) // num_tokens


@dataclass(frozen=True)
class TransitionSystem:
    """A transition system for labeled trees: top-down or in-order, with its labels.

    The ids are PAD 0, SHIFT 1, REDUCE 2, for in-order FINISH 3, then one NT per label, in the order of the labels.
    Trees are n-ary, unary chains included, and their leaves are tokens; words have no part-of-speech tags.

    * top-down, the order of Dyer et al. (2016): NT(label), the children, REDUCE. The sentence ends with the REDUCE
      that closes the root.
    * in-order, left-corner: the first child, NT(label), the other children, REDUCE. FINISH ends the sentence. Where the
      first child is a word of several pieces, all of them are shifted before the NT.

    Source: Noji & Oseki (2021), sections 2 and 3; utils.py and action_dict.py of the authors' code.

    Attributes:
        name: "top_down" or "in_order".
        num_labels: number Y of labels.
    """

    name: Literal["top_down", "in_order"]
    num_labels: int

    def __post_init__(self) -> None:
        if self.name not in ("top_down", "in_order"):
            raise ValueError(f"the transition system is {self.name!r}: choose 'top_down' or 'in_order'")
        if self.num_labels < 1:
            raise ValueError(f"num_labels is {self.num_labels}: a tree needs at least one label")

    @property
    def first_nonterminal(self) -> int:
        """The id of NT(label 0)."""
        return FINISH + 1 if self.name == "in_order" else REDUCE + 1

    @property
    def num_actions(self) -> int:
        """The number of action ids, PAD included."""
        return self.first_nonterminal + self.num_labels

    def spans_to_actions(
        self, labeled_spans: Sequence[LabeledSpan], num_tokens: int, word_ends: Sequence[bool] | None = None
    ) -> list[int]:
        """Write a labeled tree as the actions that build it. Inverse of `actions_to_spans`.

        Args:
            labeled_spans: (label id, i, j) of every constituent, the whole sentence included, in any order but for
                unary chains, which stand from the bottom to the top; width 1 is allowed. In-order also takes a sentence
                of one token without any constituent.
            num_tokens: length n of the sentence in tokens.
            word_ends: per token, True if it is the last piece of its word; default: every token is a word.

        Returns:
            n SHIFT, one NT and one REDUCE per constituent, and FINISH at the end for in-order.

        Raises:
            ValueError: the spans cross, leave the sentence, cut a word or lack the whole sentence; a label id is out
                of range; `word_ends` has another length or ends inside a word.

        Cost: O(n + s log s) for s spans.
        """
        spans = [(start, end) for _, start, end in labeled_spans]
        validate_spans(spans, num_tokens, min_width=1, allow_duplicates=True)
        is_bare_token = self.name == "in_order" and num_tokens == 1 and not spans
        if (0, num_tokens) not in spans and not is_bare_token:
            raise ValueError(
                f"the whole-sentence span (0, {num_tokens}) is missing, so the {len(spans)} spans are a forest: "
                "add a constituent over the whole sentence"
            )
        if word_ends is not None:
            _check_word_boundaries(spans, num_tokens, word_ends)
        for label, start, end in labeled_spans:
            if not 0 <= label < self.num_labels:
                raise ValueError(
                    f"the label id of ({label}, {start}, {end}) is out of range: there are {self.num_labels} labels, "
                    "counted from 0"
                )
        # By end, then by descending start, is post-order; the sort is stable, so unary chains keep their order.
        ordered = sorted(labeled_spans, key=lambda span: (span[2], -span[1]))
        if self.name == "in_order":
            return self._in_order_actions(ordered, num_tokens, word_ends)
        return self._top_down_actions(ordered, num_tokens)

    def _top_down_actions(self, ordered: Sequence[LabeledSpan], num_tokens: int) -> list[int]:
        """Write spans in post-order as top-down actions."""
        opening: list[list[int]] = [[] for _ in range(num_tokens)]
        num_closing = [0] * (num_tokens + 1)
        for label, start, end in ordered:
            opening[start].append(self.first_nonterminal + label)
            num_closing[end] += 1
        actions: list[int] = []
        for token in range(num_tokens):
            # In post-order the innermost of the constituents that begin here comes first; it is opened last.
            actions.extend(reversed(opening[token]))
            actions.append(SHIFT)
            actions.extend([REDUCE] * num_closing[token + 1])
        return actions

    def _in_order_actions(
        self, ordered: Sequence[LabeledSpan], num_tokens: int, word_ends: Sequence[bool] | None
    ) -> list[int]:
        """Write spans in post-order as in-order actions."""
        # Per boundary the constituents that begin there, the innermost at the end of the list.
        waiting: list[list[tuple[int, int]]] = [[] for _ in range(num_tokens)]
        for label, start, end in reversed(ordered):
            waiting[start].append((self.first_nonterminal + label, end))
        actions: list[int] = []
        open_spans: list[Span] = []
        first_piece = 0
        for end in range(1, num_tokens + 1):
            actions.append(SHIFT)
            if word_ends is not None and not word_ends[end - 1]:
                continue
            # What is complete, a word at first, is the left corner of the next constituent that begins where it does.
            corner, first_piece = first_piece, end
            while True:
                if waiting[corner]:
                    action, last = waiting[corner].pop()
                    actions.append(action)
                    open_spans.append((corner, last))
                if not open_spans or open_spans[-1][1] != end:
                    break
                actions.append(REDUCE)
                corner = open_spans.pop()[0]
        return [*actions, FINISH]

    def actions_to_spans(
        self, actions: Sequence[int], word_ends: Sequence[bool] | None = None, *, forest: bool = False
    ) -> list[LabeledSpan]:
        """Run actions and list the constituents that are closed. Inverse of `spans_to_actions`.

        Args:
            actions: action ids; padding (0) may follow at the end.
            word_ends: per token, True if it is the last piece of its word; default: every token is a word. In-order
                needs it to tell where a left corner of several pieces begins.
            forest: accept a sequence that stops before the sentence is finished (a prefix of a derivation).

        Returns:
            (label id, i, j) in the order of the REDUCE actions, which is post-order, unary chains from the bottom to
            the top.

        Raises:
            ValueError: an action is unknown or illegal where it stands, or the sequence is not finished and `forest` is
                False; it names the position.

        Cost: O(A).
        """
        return self._run(actions, word_ends, forest)[0]

    def stack_depths(self, actions: Sequence[int], word_ends: Sequence[bool] | None = None) -> list[int]:
        """Count the elements on the stack after each action: words, open nonterminals and closed constituents.

        The learned initial state below them does not count. Before the first action the depth is 0.

        Args:
            actions: action ids of a derivation or of a prefix of one; padding may follow at the end.
            word_ends: as in `actions_to_spans`.

        Returns:
            One depth per action; FINISH and padding leave it as it is.

        Raises:
            ValueError: an action is unknown or illegal where it stands; it names the position.

        Cost: O(A).
        """
        return self._run(actions, word_ends, True)[1]

    def max_stack_depth(self, actions: Sequence[int], word_ends: Sequence[bool] | None = None) -> int:
        """Give the largest of `stack_depths`, 0 without actions: the `max_stack_size` of the authors.

        Args:
            actions: as in `stack_depths`.
            word_ends: as in `actions_to_spans`.

        Returns:
            The number of stack elements that the derivation needs room for.

        Raises:
            ValueError: as `stack_depths`.
        """
        return max(self.stack_depths(actions, word_ends), default=0)

    def _run(
        self, actions: Sequence[int], word_ends: Sequence[bool] | None, forest: bool
    ) -> tuple[list[LabeledSpan], list[int]]:
        """Run actions on a stack; return the closed constituents, and the depth of the stack after each action."""
        first_nonterminal, in_order = self.first_nonterminal, self.name == "in_order"
        num_actions = len(actions)
        while num_actions > 0 and actions[num_actions - 1] == PAD:
            num_actions -= 1
        spans: list[LabeledSpan] = []
        depths: list[int] = []
        # Per open nonterminal: its label, the first token it covers, and the depth of the stack below it.
        open_nodes: list[tuple[int, int, int]] = []
        # The last complete element, which an in-order NT takes as its left corner: first token, depth below it.
        corner = (0, 0)
        depth = num_tokens = 0
        previous = PAD
        for position in range(num_actions):
            action = actions[position]
            inside_word = bool(word_ends is not None and num_tokens and not word_ends[num_tokens - 1])
            problem = self._problem(action, previous, len(open_nodes), num_tokens, inside_word)
            if problem or (action == SHIFT and word_ends is not None and num_tokens == len(word_ends)):
                problem = problem or f"SHIFT, but word_ends has only {num_tokens} tokens"
                raise ValueError(f"action {action} at position {position} is illegal: {problem}")
            if action == SHIFT:
                if not inside_word:
                    corner = (num_tokens, depth)
                num_tokens += 1
                depth += 1
            elif action == REDUCE:
                label, start, below = open_nodes.pop()
                spans.append((label, start, num_tokens))
                corner = (start, below)
                depth = below + 1
            elif action >= first_nonterminal:
                start, below = corner if in_order else (num_tokens, depth)
                open_nodes.append((action - first_nonterminal, start, below))
                depth += 1
            depths.append(depth)
            previous = action
        is_finished = previous == FINISH if in_order else bool(spans) and not open_nodes
        if not forest and (not is_finished or (word_ends is not None and num_tokens != len(word_ends))):
            raise ValueError(
                f"the {num_actions} actions stop with {len(open_nodes)} open nonterminal(s) after {num_tokens} "
                f"token(s){'' if word_ends is None else f' of {len(word_ends)}'}, before the sentence is finished: "
                "add the missing actions, or pass forest=True for an unfinished derivation"
            )
        depths.extend([depth] * (len(actions) - num_actions))
        return spans, depths

    def _problem(self, action: int, previous: int, num_open: int, num_tokens: int, inside_word: bool) -> str:
        """Say why an action must not be taken, or return an empty string if it may be."""
        in_order = self.name == "in_order"
        if not PAD < action < self.num_actions:
            return (
                f"the {self.num_actions} ids of {self.name} with {self.num_labels} labels are 1 to "
                f"{self.num_actions - 1}, and {PAD} pads at the end only"
            )
        if (previous == FINISH and in_order) or (not in_order and num_open == 0 and num_tokens > 0):
            return "the sentence is finished"
        if action == SHIFT:
            if inside_word or num_open > 0 or (in_order and num_tokens == 0):
                return ""
            return "SHIFT needs an open nonterminal: take an NT first"
        if inside_word:
            return "it stands between the pieces of a word, where only SHIFT is legal"
        if action == REDUCE:
            if num_open == 0:
                return "REDUCE finds no open nonterminal"
            is_empty = not in_order and previous >= self.first_nonterminal
            return "REDUCE finds a nonterminal without children: SHIFT first" if is_empty else ""
        if not in_order:
            return ""
        if action == FINISH:
            is_one_element = num_open == 0 and (previous == REDUCE or num_tokens == 1)
            return "" if is_one_element else "FINISH needs exactly one complete element on the stack"
        if num_tokens == 0 or previous >= self.first_nonterminal:
            return "an in-order NT needs a complete element, its left corner, on top of the stack"
        return ""


def _check_word_boundaries(spans: Sequence[Span], num_tokens: int, word_ends: Sequence[bool]) -> None:
    """Raise ValueError unless spans begin and end where words do."""
    if len(word_ends) != num_tokens or not word_ends[-1]:
        raise ValueError(
            f"word_ends has {len(word_ends)} entries for {num_tokens} tokens, the last one {list(word_ends[-1:])}: "
            "give one per token, and True for the last token, which ends a word"
        )
    for start, end in spans:
        for boundary in (start, end):
            if boundary > 0 and not word_ends[boundary - 1]:
                raise ValueError(
                    f"span ({start}, {end}) cuts a word at boundary {boundary}: constituents consist of whole words"
                )
