# SPDX-License-Identifier: Apache-2.0
"""Labeled trees as sequences for a Transformer, with the mask and the positions of Transformer Grammars.

    (S (NP the blue bird) (VP sings))  ->  <s> (S (NP the blue bird NP) (VP sings VP) S)

Under "stack_compose" every closing label stands twice. The first copy attends to its constituent, whose one vector it
becomes; from then on nobody sees what is inside. The second copy attends to the stack and predicts what follows. All
other positions attend to the stack, too: complete constituents and words at the level of each open constituent, and
the opening labels. The relative position of a pair is the difference of its depths in the tree.

Binary trees are bottom-up, with causal attention: a label stands after the two elements that it takes as children.

    <s> the blue bird @ NP sings S </s>

There is no stack here, and no loop over positions. With n_t = number of open constituents after action t, what action
i has put on the stack stays there until

    popped_i = the first t > i with n_t < n_i

so that before a later action t the stack holds the i with popped_i >= t, and REDUCE at t composes those with
popped_i = t. The slow and obvious version, a walk with a stack, is in `tests/reference/tree_lm.py`.

Source: Sartran et al. 2022, section 3; `masking_rules.cc` of the authors' program.

Shapes: B sentences, T tokens, A actions, P positions, W word ids, Y labels.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedConfig

from hf_synlm.trees.prefixes import Prefixes
from hf_synlm.trees.transitions import FINISH, PAD, REDUCE, SHIFT

BEGIN = -1  # the begin token, where it stands among actions


class Linearization(NamedTuple):
    """Derivations as input of a Transformer."""

    tokens: Tensor
    """[B, P] ids: words, W + label for an opening, W + Y + label for a closing; the begin token first. Bottom-up: W +
    label for a closing, and the end token last."""
    mask: Tensor
    """[B, P, P], True = the row sees the column."""
    relative: Tensor
    """[B, P, P] relative positions, counted from the smallest."""
    last: Tensor
    """[B, 1 + A] the position that is read after each action (column 0: after the begin token); it predicts the next
    one. At padding anything."""
    targets: Tensor
    """[B, A] id of the token that each action writes; anything at padding."""
    open_label: Tensor
    """[B, A] label of the innermost constituent that is open before each action; -1 = none. Bottom-up: anything."""


def linearize(actions: Tensor, words: Tensor, config: PreTrainedConfig) -> Linearization:
    """Lay out derivations [B, A], which may stop anywhere; `words` [B, T] stand side by side from the first column on.

    Cost: O(A^2) numbers and operations for a sentence, in some thirty launches.
    """
    # The begin token is an element of the stack that stays for ever; here it is an action of its own.
    actions = torch.cat([actions.new_full((len(actions), 1), BEGIN), actions], 1)
    opens, reduces, shifts = actions >= config.system.first_nonterminal, actions == REDUCE, actions == SHIFT
    num_open = (opens.long() - reduces.long()).cumsum(1)
    popped = _popped(num_open, actions != PAD)

    number = torch.arange(actions.shape[1], device=actions.device)
    is_open = opens[:, None] & (number < number[:, None]) & (popped[:, None] >= number[:, None])
    innermost = torch.where(is_open, number, -1).amax(2)
    labels = (actions - config.system.first_nonterminal).clamp(min=0)
    open_label = torch.where(innermost >= 0, labels.gather(1, innermost.clamp(min=0)), -1)

    order = (shifts.cumsum(1) - 1).clamp(min=0, max=words.shape[1] - 1)
    targets = torch.where(shifts, words.gather(1, order), config.vocab_size + labels)
    if config.is_bottom_up:
        targets = torch.where(actions == FINISH, config.eos_token_id, targets)
    else:
        targets = torch.where(reduces, config.vocab_size + len(config.nonterminals) + open_label, targets)
    targets = torch.where(actions == BEGIN, config.bos_token_id, targets)

    composes = config.structure_attention == "stack_compose"
    ends = ((actions != PAD).long() + (reduces & composes)).cumsum(1)
    position = torch.arange(int(ends[:, -1].max()), device=actions.device).expand(len(actions), -1).contiguous()
    owner = torch.searchsorted(ends, position, right=True).clamp(max=actions.shape[1] - 1)
    if composes:
        second = reduces.gather(1, owner) & (position == ends.gather(1, owner) - 1)
        first = reduces.gather(1, owner) & ~second
        mask = _stack_compose(owner, popped.gather(1, owner), first) & ~second[:, None]
        depth = (num_open + (~opens & (actions != BEGIN))).gather(1, owner)
        index = relative_depths(depth[:, :, None] - depth[:, None], config)
    else:
        distance = position[:, :, None] - position[:, None]
        mask, index = distance >= 0, distance.clamp(min=0)
    real, itself = position < ends[:, -1:], position[:, :, None] == position[:, None]
    mask = (mask & real[:, None] & real[:, :, None]) | itself
    return Linearization(targets.gather(1, owner), mask, index, ends - 1, targets[:, 1:], open_label[:, 1:])


def share_prefixes(plan: Linearization, prefixes: Prefixes) -> Linearization:
    """Derivations of one text as one row, in which each distinct prefix stands once and sees what is before it.

    Cost: O(N^2) numbers for N prefixes.
    """
    row, position, place = prefixes
    number = torch.arange(plan.tokens.shape[1], device=row.device)
    seen, others = plan.mask[row, position] & (number <= plan.last[row, -1:]), place[row]
    node, column = seen.nonzero(as_tuple=True)
    mask = seen.new_zeros(1, len(row), len(row))
    relative = torch.zeros_like(mask, dtype=plan.relative.dtype)
    mask[0, node, others[node, column]] = True
    relative[0, node, others[node, column]] = plan.relative[row, position][node, column]
    return plan._replace(tokens=plan.tokens[row, position][None], mask=mask, relative=relative)


def relative_depths(difference: Tensor, config: PreTrainedConfig) -> Tensor:
    """Differences of depth, clipped and counted from the smallest."""
    lowest = config.min_relative_position
    return difference.clamp(lowest, config.max_relative_position) - lowest


def _stack_compose(owner: Tensor, popped: Tensor, composes: Tensor) -> Tensor:
    """What positions [B, P] see of others [B, P, P], by the actions that own and pop them."""
    row, column, leaves = owner[:, :, None], owner[:, None], popped[:, None]
    return torch.where(composes[:, :, None], leaves == row, (leaves > row) & (column <= row))


def _popped(num_open: Tensor, exists: Tensor) -> Tensor:
    """Action [B, A] that takes away what each action has put on the stack; A where it stays."""
    later = torch.ones(num_open.shape[1], num_open.shape[1], dtype=torch.bool, device=num_open.device).triu(1)
    fewer = (num_open[:, None] < num_open[:, :, None]) & later & exists[:, None]
    return torch.where(fewer.any(2), fewer.to(torch.uint8).argmax(2), num_open.shape[1])


def check_derivations(actions: Tensor, num_words: Tensor, word_ends: Tensor | None, config: PreTrainedConfig) -> None:
    """Raise ValueError, with row and position, for actions [B, A] that are not derivations of their sentences.

    `word_ends` [B, T] have their tokens from the first column on; None = every token ends a word.
    """
    opens, reduces, shifts = actions >= config.system.first_nonterminal, actions == REDUCE, actions == SHIFT
    last = (actions != PAD).sum(1, keepdim=True) - 1
    place = torch.arange(actions.shape[1], device=actions.device)
    if config.is_bottom_up:
        wrong = (actions == REDUCE) | ((actions == FINISH) != (place == last))
        wrong = wrong | _breaks_binary_trees(shifts, opens, place == last, word_ends)
    else:
        num_open = (opens.long() - reduces.long()).cumsum(1)
        wrong = opens & F.pad(reduces[:, 1:], (0, 1))
        wrong = ((wrong | (num_open < 1)) & (place < last)) | (((num_open != 0) | ~reduces) & (place == last))
    wrong = wrong | (actions >= config.system.num_actions)
    if word_ends is not None:
        inside = (
            ~word_ends.gather(1, (shifts.cumsum(1) - 1).clamp(min=0, max=word_ends.shape[1] - 1))
            & shifts.cumsum(1).bool()
        )
        wrong = wrong | (F.pad(inside[:, :-1], (1, 0)) & ~shifts & (place <= last))
    bad = wrong.any(1) | (shifts.sum(1) != num_words) | (last < 0)[:, 0]
    if not bool(bad.any()):
        return
    row = int(bad.nonzero()[0])
    count = int(num_words[row])
    ends = [True] * count if word_ends is None else word_ends[row, :count].tolist()
    taken = [action for action in actions[row].tolist() if action]
    try:
        for _ in config.system.steps(taken, ends):
            pass
    except ValueError as error:
        raise ValueError(f"actions of row {row}: {error}") from None


def _breaks_binary_trees(shifts: Tensor, labels: Tensor, is_last: Tensor, word_ends: Tensor | None) -> Tensor:
    """Where labels [B, A] do not find two elements, or the end not one."""
    begins = shifts
    if word_ends is not None:  # the pieces of a word are one element
        order = (shifts.cumsum(1) - 1).clamp(min=0, max=word_ends.shape[1] - 1)
        begins = shifts & F.pad(word_ends, (1, 0), value=True)[:, :-1].gather(1, order)
    depth = (begins.long() - labels.long()).cumsum(1)
    return (labels & (depth < 1)) | (is_last & (depth != 1))
