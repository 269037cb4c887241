# SPDX-License-Identifier: Apache-2.0
"""NT, SHIFT, REDUCE and FINISH: the actions of RNNG, which build labeled n-ary trees (Noji & Oseki 2021).

`TransitionSystem` says which actions are legal, and turns trees into actions and back. The ids are those of the
authors' checkpoints, where PAD is 0. `models/rnng/plan.py` lays out its steps for batched computation; the
batched machine of the search is in `search/labeled/machine.py`. The slow and obvious version is `stacks_of` in
tests/reference/trees.py.

A, in costs, is the length of an action sequence.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

from hf_synlm.trees.spans import check_word_ends, validate_spans

LabeledSpan: TypeAlias = tuple[int, int, int]  # (label id, i, j)

PAD = 0
SHIFT = 1
REDUCE = 2
FINISH = 3  # top-down alone gives this id to its first nonterminal
ADDED_NODE = "@"  # label of the nodes that binarization adds
CHAIN = "+"  # between the labels of a unary chain, which are one label of a binary tree


@dataclass(slots=True)
class Stack:
    """The stack of one sentence: what the last action did to it, and what decides which action is legal next.

    Fields:
        action: The last action.
        place: Number of elements below what the action made. An in-order NT goes below its left corner.
        start: First token of the constituent that the action opened or closed, or the token that it shifted.
        num_tokens: Number of tokens shifted so far.
        open_nodes: Place and first token of every open nonterminal.
        corner: Place and first token of the last complete element, which an in-order NT takes as its left corner.
        elements: First token of every element, open nonterminals included; their number is the `depth`.
    """

    action: int = PAD
    place: int = 0
    start: int = 0
    num_tokens: int = 0
    open_nodes: list[tuple[int, int]] = field(default_factory=list)
    corner: tuple[int, int] = (0, 0)
    elements: list[int] = field(default_factory=list)
    after_nonterminal: bool = False
    inside_word: bool = False
    is_finished: bool = False

    @property
    def depth(self) -> int:
        """Number of elements."""
        return len(self.elements)


# The id of every NT in the tables below.
_NT = -1
_NO_OPEN = (lambda stack: not stack.open_nodes, "REDUCE finds no open nonterminal")
_SHIFT_OUTSIDE = "SHIFT needs an open nonterminal: take an NT first"
# For every action what makes it illegal, besides the rules of `_problem`, and the message.
_Rules: TypeAlias = dict[int, list[tuple[Callable[[Stack], bool], str]]]
_TOP_DOWN: _Rules = {
    _NT: [],
    SHIFT: [(lambda stack: not stack.open_nodes, _SHIFT_OUTSIDE)],
    REDUCE: [
        _NO_OPEN,
        (lambda stack: stack.after_nonterminal, "REDUCE finds a nonterminal without children: SHIFT first"),
    ],
}
_IN_ORDER: _Rules = {
    _NT: [
        (
            lambda stack: stack.num_tokens == 0 or stack.after_nonterminal,
            "an in-order NT needs a complete element, its left corner, on top of the stack",
        )
    ],
    SHIFT: [(lambda stack: not stack.open_nodes and stack.num_tokens > 0, _SHIFT_OUTSIDE)],
    REDUCE: [_NO_OPEN],
    FINISH: [
        (
            lambda stack: bool(stack.open_nodes) or stack.depth != 1,
            "FINISH needs exactly one complete element on the stack",
        )
    ],
}


_BINARY: _Rules = {
    _NT: [(lambda stack: stack.depth < 2, "a binary constituent needs two elements on the stack")],
    SHIFT: [],
    REDUCE: [(lambda stack: True, "a binary constituent is closed by its label")],
    FINISH: [(lambda stack: stack.depth != 1, "FINISH needs exactly one element on the stack")],
}
_RULES = {"top_down": _TOP_DOWN, "in_order": _IN_ORDER, "binary": _BINARY}


@dataclass(frozen=True)
class TransitionSystem:
    """A transition system for labeled trees: top-down, in-order or binary, with its Y labels.

    The ids are PAD 0, SHIFT 1, REDUCE 2, FINISH 3 but for top-down, then one per label, in the order of the labels.
    Trees are n-ary, unary chains included, but for binary; their leaves are tokens; words have no
    part-of-speech tags.

    * top-down, the order of Dyer et al. (2016): NT(label), the children, REDUCE. The sentence ends with the REDUCE
      that closes the root.
    * in-order, left-corner: the first child, NT(label), the other children, REDUCE. FINISH ends the sentence. Where the
      first child is a word of several pieces, all of them are shifted before the NT.
    * binary, bottom-up: a label takes the two last elements as its children. FINISH ends the sentence. The pieces of a
      word are one element. (GEN and COMP of GPST, with labels.)

    Source: Noji & Oseki (2021), sections 2 and 3; utils.py and action_dict.py of the authors' code.
    """

    name: str
    num_labels: int

    @cached_property
    def first_nonterminal(self) -> int:
        """The id of NT(label 0)."""
        return REDUCE + 1 if self.name == "top_down" else FINISH + 1

    @cached_property
    def num_actions(self) -> int:
        """The number of action ids, PAD included."""
        return self.first_nonterminal + self.num_labels

    def spans_to_actions(
        self, labeled_spans: Sequence[LabeledSpan], num_tokens: int, word_ends: Sequence[bool] | None = None
    ) -> list[int]:
        """Write a labeled tree as the actions that build it. Inverse of `actions_to_spans`.

        `labeled_spans` are (label id, i, j) of every constituent, the whole sentence included, in any order but for
        unary chains, which stand from the bottom to the top; width 1 is allowed. In-order also takes a sentence of one
        token without any constituent. Binary takes what `binary_constituents` gives. A tree that is not like that, or
        cuts a word, raises ValueError. The result has n SHIFT, one NT and one REDUCE per constituent, and FINISH at the
        end for in-order; n SHIFT, one label per constituent, and FINISH for binary.
        """
        spans = [(start, end) for _, start, end in labeled_spans]
        validate_spans(spans, num_tokens, min_width=1, allow_duplicates=True)
        is_bare_token = not spans and (self.name == "binary" or (self.name == "in_order" and num_tokens == 1))
        if (0, num_tokens) not in spans and not is_bare_token:
            raise ValueError(
                f"the whole-sentence span (0, {num_tokens}) is missing, so the {len(spans)} spans are a forest. "
                "Add a constituent over the whole sentence"
            )
        if word_ends is not None:
            check_word_ends(spans, word_ends)
        ending: list[list[LabeledSpan]] = [[] for _ in range(num_tokens + 1)]
        # The sort is stable, so unary chains keep their order.
        for span in sorted(labeled_spans, key=lambda span: -span[1]):
            ending[span[2]].append(span)
        # Pieces of a word are one part of the tree, but for top-down, where they are siblings.
        is_last = [True] * num_tokens if word_ends is None or self.name == "top_down" else word_ends
        starts: list[int] = []  # first tokens of the parts that have no parent yet
        parts: list[list[Any]] = []  # their actions, nested as the tree is
        for token in range(num_tokens):
            if token == 0 or is_last[token - 1]:
                starts.append(token)
                parts.append([])
            parts[-1].append(SHIFT)
            for label, start, _ in ending[token + 1]:
                place, action = bisect_left(starts, start), self.first_nonterminal + label
                children: list[Any] = parts[place:]
                if self.name == "top_down":
                    children = [action, *children, REDUCE]
                elif self.name == "in_order":
                    children = [children[0], action, *children[1:], REDUCE]
                else:
                    children.append(action)
                starts[place:], parts[place:] = [start], [children]
        return _flat(parts) + [FINISH] * (self.name != "top_down")

    def actions_to_spans(
        self, actions: Sequence[int], word_ends: Sequence[bool] | None = None, *, forest: bool = False
    ) -> list[LabeledSpan]:
        """Run actions and list (label id, i, j) of the constituents that are closed. Inverse of `spans_to_actions`.

        They are in the order of the REDUCE actions, which is post-order, unary chains from the bottom to the top.
        Padding (0) may follow the actions. In-order needs `word_ends` to tell where a left corner of several pieces
        begins. `forest` accepts a sequence that stops before the sentence is finished. Raises ValueError with the
        position of an illegal action.
        """
        open_labels: list[int] = []
        spans: list[LabeledSpan] = []
        for stack in self.steps(_without_padding(actions), word_ends, forest=forest):
            if stack.after_nonterminal and self.name == "binary":
                spans.append((stack.action - self.first_nonterminal, stack.start, stack.num_tokens))
            elif stack.after_nonterminal:
                open_labels.append(stack.action - self.first_nonterminal)
            elif stack.action == REDUCE:
                spans.append((open_labels.pop(), stack.start, stack.num_tokens))
        return spans

    def steps(
        self, actions: Sequence[int], word_ends: Sequence[bool] | None = None, *, forest: bool = False
    ) -> Iterator[Stack]:
        """Run actions (without padding) on a stack and check each of them; yields the stack, always the same object."""
        stack = Stack()
        for position, action in enumerate(actions):
            problem = self._problem(action, stack, word_ends)
            if problem:
                raise ValueError(f"action {action} at position {position} is illegal: {problem}")
            self._take(action, stack)
            if action == SHIFT and word_ends is not None:
                stack.inside_word = not word_ends[stack.num_tokens - 1]
            yield stack
        num_words = stack.num_tokens if word_ends is None else len(word_ends)
        if not forest and (not stack.is_finished or stack.num_tokens != num_words):
            raise ValueError(
                f"the {len(actions)} actions stop with {len(stack.open_nodes)} open nonterminal(s) after "
                f"{stack.num_tokens} token(s){'' if word_ends is None else f' of {num_words}'}. So the sentence is "
                "not finished. Add the missing actions"
            )

    def _problem(self, action: int, stack: Stack, word_ends: Sequence[bool] | None) -> str:
        """Say why an action must not be taken, or return an empty string if it may be."""
        if not PAD < action < self.num_actions:
            return (
                f"the {self.num_actions} ids of {self.name} with {self.num_labels} labels are 1 to "
                f"{self.num_actions - 1}, and {PAD} pads at the end only"
            )
        if stack.is_finished:
            return "the sentence is finished"
        if word_ends is not None and action == SHIFT and stack.num_tokens == len(word_ends):
            return f"SHIFT, but word_ends has only {stack.num_tokens} tokens"
        if stack.inside_word:
            return "" if action == SHIFT else "it stands between the pieces of a word, where only SHIFT is legal"
        for is_violated, message in _RULES[self.name][_NT if action >= self.first_nonterminal else action]:
            if is_violated(stack):
                return message
        return ""

    def _take(self, action: int, stack: Stack) -> None:
        """Change the stack by a legal action."""
        elements = stack.elements
        stack.action, stack.after_nonterminal = action, action >= self.first_nonterminal
        if action == SHIFT:
            if self.name != "binary" or not stack.inside_word:
                elements.append(stack.num_tokens)
            stack.place, stack.start = len(elements) - 1, elements[-1]
            if not stack.inside_word:
                stack.corner = stack.place, stack.start
            stack.num_tokens += 1
        elif action == REDUCE:
            stack.place, stack.start = stack.corner = stack.open_nodes.pop()
            del elements[stack.place + 1 :]
            stack.is_finished = not stack.open_nodes and self.name == "top_down"
        elif not stack.after_nonterminal:
            stack.is_finished = True
        elif self.name == "binary":
            elements.pop()
            stack.place, stack.start = len(elements) - 1, elements[-1]
        else:
            below = stack.corner if self.name == "in_order" else (len(elements), stack.num_tokens)
            stack.place, stack.start = below
            stack.open_nodes.append(below)
            elements.insert(*below)


def _flat(nested: list[list[Any]]) -> list[int]:
    """The actions of nested lists in their order, without recursion."""
    actions: list[int] = []
    agenda: list[Any] = nested[::-1]
    while agenda:
        part = agenda.pop()
        if isinstance(part, list):
            agenda.extend(reversed(part))
        else:
            actions.append(part)
    return actions


def _without_padding(actions: Sequence[int]) -> Sequence[int]:
    length = len(actions)
    while length > 0 and actions[length - 1] == PAD:
        length -= 1
    return actions[:length]
