# SPDX-License-Identifier: Apache-2.0
"""Plans: the pushes and compositions of given RNNG derivations, laid out for batched computation.

The slow and obvious version is `StackMachine` in `tests/reference/rnng.py`, one action at a time.

With given actions (teacher forcing), everything that RNNG computes is known in advance: which vector every push puts on
the stack, which push it stands on, which children a REDUCE composes. A plan lists this as integers, for all sentences
of a batch together, in one of two orders:

* `LevelPlan`, where a composed vector depends on its children only: compositions by the height of their subtree,
  pushes by the depth of the stack. No loop over actions is left.
* `StepPlan`, where a composition reads the stack too: step t runs action t of all sentences.

Shapes: B sentences, A actions of all sentences, P pushes (one per action that is executed, after one per sentence for
the empty stack), R rows of a step, M children, S steps of all rows. An *element* is what a push puts on the stack:
rows 0 .. B - 1 are the bottoms of the stacks, then all words, all opened nonterminals, and all composed vectors.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_synlm.trees.transitions import REDUCE, SHIFT, TransitionSystem


@dataclass
class Chains:
    """Sequences of elements, read in both directions, longest first; step s of all rows stands before step s + 1."""

    index: Tensor
    """[2, S] element of every step, in reading order: forward, backward."""
    sizes: list[int]
    """Number of rows that are as long as step 0, 1, ..."""
    last: Tensor
    """[R] the last step of every row."""
    length: Tensor
    """[R] number of children."""
    position: Tensor | None
    """[2, R, M] step at which child m is read in each direction; arbitrary behind the end of a row. None with an
    opening element, whose composition reads last steps only."""


def lay_out_chains(children_C: Tensor, length_R: Tensor, opening_R: Tensor | None = None) -> Chains:
    """Lay out the children of some nodes; nodes with more children stand first.

    `children_C` are the elements of all nodes one after the other, left to right in each. An `opening_R` is read before
    the children in both directions, as step 0. Cost: O(children); without an opening O(nodes times the most children).
    """
    device = length_R.device
    row_C = torch.arange(len(length_R), device=device).repeat_interleave(length_R, output_size=len(children_C))
    start_R = length_R.cumsum(0) - length_R
    column_C = torch.arange(len(children_C), device=device) - start_R[row_C]
    shift = 0 if opening_R is None else 1
    steps_R = length_R + shift
    # Row r has a step s if it has more than s of them; the steps of one number stand together.
    size_S = (len(steps_R) - steps_R.bincount().cumsum(0))[:-1]
    first_S = F.pad(size_S.cumsum(0), (1, 0))
    forward_C = first_S[column_C + shift] + row_C
    backward_C = first_S[length_R[row_C] - 1 - column_C + shift] + row_C
    index = torch.empty(2, len(children_C) + shift * len(length_R), dtype=torch.long, device=device)
    index[0, forward_C], index[1, backward_C] = children_C, children_C
    position = None
    if opening_R is not None:
        index[:, : len(opening_R)] = opening_R
    else:
        position = torch.zeros(2, len(length_R), len(size_S), dtype=torch.long, device=device)
        position[0, row_C, column_C], position[1, row_C, column_C] = forward_C, backward_C
    last_R = first_S[steps_R - 1] + torch.arange(len(steps_R), device=device)
    return Chains(index, size_S.tolist(), last_R, length_R, position)


@dataclass
class RNNGPlan:
    """Fields that both orders share. Tensors are long; all are on one device, and `to` moves them."""

    word_row: Tensor
    """[W] sentence of every word that is pushed."""
    word_position: Tensor
    """[W] its position in the sentence."""
    label: Tensor
    """[Y] labels of the opened nonterminals."""
    action: Tensor
    """[A] all actions, sentence by sentence."""
    action_row: Tensor
    """[A] their sentences."""
    action_column: Tensor
    """[A] their positions in the action sequence."""
    context: Tensor
    """[A] push after which each action is predicted, in the order of this plan."""
    shifts: Tensor
    """[W] which of the A actions push the words."""
    final: Tensor
    """[B] last push of every sentence."""

    @property
    def num_sentences(self) -> int:
        """Number of sentences B."""
        return len(self.final)

    def to(self, device: Any, non_blocking: bool = False) -> "RNNGPlan":
        """The plan on another device; all of it in one copy."""
        if self.final.device == torch.device(device):
            return self
        parts, flat = self._packed()
        return _put_together(parts, flat.to(device, non_blocking=non_blocking))

    def __reduce__(self) -> tuple:
        """Pickle as one tensor: between processes, every tensor takes an open file."""
        return _put_together, self._packed()

    def _packed(self) -> tuple[Any, Tensor]:
        tensors: list[Tensor] = []
        parts = _take_apart(self, tensors, [0])
        return parts, torch.cat(tensors)


@dataclass
class LevelPlan(RNNGPlan):
    """Compositions by height, pushes by depth."""

    compositions: list[Chains] = field(default_factory=list)
    """Children of the nodes of each height; the opening element is the nonterminal."""
    source: Tensor = None
    """[P] element of every push, the bottoms first, then depth by depth."""
    sizes: list[int] = field(default_factory=list)
    """Number of pushes of each depth."""
    parents: list[Tensor] = field(default_factory=list)
    """For every depth but the first, [N] the push below, counted in its depth."""


@dataclass
class StackStep:
    """Action t of all sentences that execute it."""

    parent: Tensor
    """[R] pushes below the new ones."""
    reduced: Tensor
    """[R'] which of the R rows are REDUCE, those with the most children first."""
    top: Tensor
    """[R'] top of their stacks before the action."""
    label: Tensor
    """[R'] label of the nonterminal."""
    chains: Chains | None
    """Their children, as elements."""


@dataclass
class StepPlan(RNNGPlan):
    """Pushes action by action; elements are numbered as the pushes, so that both grow together."""

    word_push: Tensor = None
    """[W] pushes of the words."""
    label_push: Tensor = None
    """[Y] pushes of the opened nonterminals."""
    sizes: list[int] = field(default_factory=list)
    """Number of pushes: the bottoms, then of each step."""
    steps: list[StackStep] = field(default_factory=list)


class _Slot(NamedTuple):
    """Where a tensor lies in the one that holds all."""

    start: int
    shape: tuple[int, ...]


class _Parts(NamedTuple):
    """A dataclass, taken apart."""

    cls: type
    fields: dict[str, Any]


def _take_apart(value: Any, tensors: list[Tensor], used: list[int]) -> Any:
    """The value with slots in the place of its tensors, which are collected; `used` = [numbers in them]."""
    if isinstance(value, Tensor):
        tensors.append(value.flatten())
        used[0] += value.numel()
        return _Slot(used[0] - value.numel(), tuple(value.shape))
    if isinstance(value, list):
        return [_take_apart(item, tensors, used) for item in value]
    if dataclasses.is_dataclass(value):
        fields = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return _Parts(type(value), {name: _take_apart(item, tensors, used) for name, item in fields.items()})
    return value


def _put_together(parts: Any, flat: Tensor) -> Any:
    """Inverse of `_take_apart`; the tensors are views of one."""
    if isinstance(parts, _Slot):
        return flat[parts.start : parts.start + math.prod(parts.shape)].view(parts.shape)
    if isinstance(parts, _Parts):
        return parts.cls(**{name: _put_together(item, flat) for name, item in parts.fields.items()})
    return [_put_together(item, flat) for item in parts] if isinstance(parts, list) else parts


# ------------------------------------------------------------------------------------------------ stack machine
class _Record:
    """Every push of a batch in the order of the sentences, as plain lists."""

    def __init__(self, num_sentences: int) -> None:
        self.parent, self.depth, self.time = [-1] * num_sentences, [0] * num_sentences, [0] * num_sentences
        self.words: list[tuple[int, int, int]] = []  # push, row, position
        self.opened: list[tuple[int, int]] = []  # push, label
        # Push, nonterminal, children, height, push on the top of the stack before.
        self.composed: list[tuple[int, int, list[int], int, int]] = []
        self.known: dict[tuple[int, int], int] = {}  # push by the push before it and the action
        self.height = [0] * num_sentences
        self.context: list[int] = []
        self.action: list[int] = []
        self.action_row: list[int] = []
        self.action_column: list[int] = []
        self.final = list(range(num_sentences))

    def push(self, time: int, parent: int, height: int = 0) -> int:
        self.time.append(time)
        self.parent.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.height.append(height)
        return len(self.parent) - 1


def _run_sentence(
    record: _Record,
    row: int,
    bottom: int,
    system: TransitionSystem,
    actions: Sequence[int],
    word_ends: Sequence[bool] | None,
    run_last: bool,
) -> None:
    """Run the actions of one sentence and record the pushes, that of the last action only with `run_last`.

    Sentences on one `bottom` have the same words: they share the pushes of equal beginnings.

    `pushes` is the order in which the stack LSTM reads, `elements` the order of the tree: they differ in the in-order
    system, where the nonterminal is pushed behind its left corner but stands before it in the tree.
    """
    record.action += actions
    record.action_row += [row] * len(actions)
    record.action_column += range(len(actions))
    pushes, elements = [bottom], []
    for time, stack in enumerate(system.steps(actions, word_ends), 1):
        action, place, top = stack.action, stack.place, pushes[-1]
        record.context.append(top)
        if time == len(actions) and not run_last:
            continue  # no break: `steps` checks the end of the sentence
        push = record.known.get((top, action))
        if action == SHIFT:
            if push is None:
                push = record.push(time, top)
                record.words.append((push, bottom, stack.start))
            elements.append(push)
        elif action == REDUCE:
            nonterminal, *children = elements[place:]
            del elements[place:], pushes[place + 1 :]
            if push is None:
                height = 1 + max(record.height[child] for child in children)
                push = record.push(time, pushes[-1], height)
                record.composed.append((push, nonterminal, children, height, top))
            elements.append(push)
        elif stack.after_nonterminal:
            if push is None:
                push = record.push(time, top)
                record.opened.append((push, action - system.first_nonterminal))
            elements.insert(place, push)
        else:  # FINISH leaves the state as it is
            continue
        record.known[top, action] = push
        pushes.append(push)
    if run_last:
        record.final[row] = pushes[-1]


def _simulate(
    actions: Sequence[Sequence[int]],
    system: TransitionSystem,
    num_words: Sequence[int],
    word_ends: Sequence[Sequence[bool]] | None,
    run_last: bool,
    shared: bool,
) -> _Record:
    record = _Record(1 if shared else len(actions))
    for row, sequence in enumerate(actions):
        # The last token always ends a word.
        ends = None if word_ends is None else [*word_ends[row][:-1], True]
        try:
            _run_sentence(record, row, 0 if shared else row, system, sequence, ends, run_last)
        except ValueError as error:
            raise ValueError(f"actions, row {row}: {error}.") from error
        num_shifts = sequence.count(SHIFT)
        if num_shifts != num_words[row]:
            raise ValueError(
                f"actions, row {row}: {num_shifts} SHIFT actions for {num_words[row]} tokens. Give one SHIFT per token."
            )
    return record


def make_plan(
    actions: Sequence[Sequence[int]],
    *,
    transition_system: str,
    num_labels: int,
    num_words: Sequence[int],
    word_ends: Sequence[Sequence[bool]] | None = None,
    by_level: bool = True,
    run_last: bool = False,
    shared: bool = False,
) -> RNNGPlan:
    """Lay out given derivations, on the CPU.

    `actions` per sentence have no padding. `by_level` makes a `LevelPlan` (LSTM composition), otherwise a `StepPlan`
    (attention composition). In-order, all pieces of a word are a left corner: `word_ends`, None = every token is a
    word. `run_last` also executes the last action, whose state no prediction reads. `shared` derivations are of one
    text: the plan has one sentence, and every push of equal beginnings once. A sequence that is not a valid derivation
    raises ValueError with its row and position.

    Cost: O(actions) Python steps, about 2 microseconds each; run it in the data loader.
    Source: the authors' `fixed_stack_models.py` keeps a stack tensor instead and runs one action at a time.
    """
    system = TransitionSystem(transition_system, num_labels)
    record = _simulate(actions, system, num_words, word_ends, run_last, shared)
    return _by_level(record) if by_level else _by_step(record)


def _shared(record: _Record, place: Tensor) -> dict[str, Tensor]:
    """Fields of `RNNGPlan`; `place` [P] maps pushes to the order of the plan."""
    action = torch.tensor(record.action)
    words = torch.tensor(record.words, dtype=torch.long).view(-1, 3)
    opened = torch.tensor(record.opened, dtype=torch.long).view(-1, 2)
    return {
        "word_row": words[:, 1],
        "word_position": words[:, 2],
        "label": opened[:, 1],
        "action": action,
        "action_row": torch.tensor(record.action_row),
        "action_column": torch.tensor(record.action_column),
        "context": place[torch.tensor(record.context)],
        "shifts": (action == SHIFT).nonzero().squeeze(1),
        "final": place[torch.tensor(record.final)],
    }


def _by_level(record: _Record) -> LevelPlan:
    num_pushes = len(record.parent)
    element = list(range(num_pushes))  # push -> element
    count = len(record.final)
    for push, *_ in (*record.words, *record.opened):
        element[push] = count
        count += 1
    heights: dict[int, list[tuple[int, int, list[int], int, int]]] = {}
    for node in record.composed:
        heights.setdefault(node[3], []).append(node)
    compositions = []
    for height in sorted(heights):
        nodes = sorted(heights[height], key=lambda node: -len(node[2]))
        children = torch.tensor([element[child] for node in nodes for child in node[2]])
        opening = torch.tensor([element[node[1]] for node in nodes])
        compositions.append(lay_out_chains(children, torch.tensor([len(node[2]) for node in nodes]), opening))
        for push, *_ in nodes:
            element[push] = count
            count += 1
    depth = torch.tensor(record.depth)
    order = depth.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_pushes))
    sizes = depth.bincount().tolist()
    first = torch.tensor([0, *sizes]).cumsum(0)
    local = place - first[depth]
    below = local[torch.tensor(record.parent)[order].clamp_min(0)]
    return LevelPlan(
        **_shared(record, place),
        compositions=compositions,
        source=torch.tensor(element)[order],
        sizes=sizes,
        parents=list(below.split(sizes))[1:],
    )


def _by_step(record: _Record) -> StepPlan:
    num_pushes = len(record.parent)
    time = torch.tensor(record.time)
    order = time.argsort(stable=True)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(num_pushes))
    places = place.tolist()
    sizes = time.bincount().tolist()
    parents = place[torch.tensor(record.parent)[order].clamp_min(0)].split(sizes)
    nodes: list[list[tuple[int, int, list[int], int]]] = [[] for _ in sizes]
    labels = dict(record.opened)
    for push, nonterminal, children, _, top in record.composed:
        nodes[record.time[push]].append((push, labels[nonterminal], children, top))
    steps, first = [], 0
    for now, size in enumerate(sizes):
        if now:
            chosen = sorted(nodes[now], key=lambda node: -len(node[2]))
            chains = None
            if chosen:
                children = torch.tensor([places[child] for node in chosen for child in node[2]])
                chains = lay_out_chains(children, torch.tensor([len(node[2]) for node in chosen]))
            steps.append(
                StackStep(
                    parents[now],
                    torch.tensor([places[push] - first for push, *_ in chosen], dtype=torch.long),
                    torch.tensor([places[top] for *_, top in chosen], dtype=torch.long),
                    torch.tensor([label for _, label, *_ in chosen], dtype=torch.long),
                    chains,
                )
            )
        first += size
    return StepPlan(
        **_shared(record, place),
        word_push=torch.tensor([places[push] for push, _, _ in record.words], dtype=torch.long),
        label_push=torch.tensor([places[push] for push, _ in record.opened], dtype=torch.long),
        sizes=sizes,
        steps=steps,
    )
