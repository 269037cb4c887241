"""Specification of RNNG: one sentence, one action at a time, Python lists; of the library only the parameters."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

SHIFT, REDUCE, FINISH = 1, 2, 3


class StackMachine:
    """Runs one derivation.

    Args:
        model: An `RNNGForCausalLM` in evaluation mode.
        word_ends: Which tokens end a word; None = all.
        between: What happens to the state of a layer before the next layer reads it.
    """

    def __init__(self, model: Any, word_ends: Sequence[bool] | None = None, between: Callable = lambda x: x) -> None:
        self.model, self.word_ends, self.between = model, word_ends, between
        self.base, self.config = model.model, model.config
        self.in_order = self.config.transition_system == "in_order"
        self.first = 4 if self.in_order else 3
        self.states: list[list[tuple[Tensor, Tensor]]] = []  # per push on the stack: (h, c) of all layers
        self.elements: list[tuple[str, Tensor]] = []  # "word", "open" or "node", and the vector
        self.labels: list[int] = []  # of the open nonterminals
        self.corner = 0
        self.num_words = 0
        self.push(self.base.initial_element)

    def push(self, vector: Tensor) -> None:
        """One step of every layer from the state on the top."""
        size = self.config.hidden_size
        zero = vector.new_zeros(1, size)
        below = self.states[-1] if self.states else [(zero, zero)] * self.config.num_layers
        new: list[tuple[Tensor, Tensor]] = []
        for layer, cell in enumerate(self.base.stack_lstm.cells):
            inputs = vector[None] if layer == 0 else self.between(new[-1][0])
            new.append(cell(inputs, below[layer]))
        self.states.append(new)

    def top(self) -> Tensor:
        """State of the last layer [h]."""
        return self.states[-1][-1][0][0]

    def predictor(self) -> Tensor:
        """What the heads read [w]."""
        return self.base.output(self.top()).relu()

    def act(self, action: int, token: int) -> None:
        """Take one action."""
        if action == SHIFT:
            starts_word = self.num_words == 0 or self.word_ends is None or self.word_ends[self.num_words - 1]
            if starts_word:
                self.corner = len(self.elements)
            self.num_words += 1
            vector = self.base.embed_tokens.weight[token]
            self.elements.append(("word", vector))
        elif action >= self.first:
            self.labels.append(action - self.first)
            vector = self.base.embed_nonterminals.weight[self.labels[-1]]
            self.elements.insert(self.corner if self.in_order else len(self.elements), ("open", vector))
        elif action == REDUCE:
            place = max(k for k, (kind, _) in enumerate(self.elements) if kind == "open")
            children = [vector for _, vector in self.elements[place + 1 :]]
            vector = self.compose(self.labels.pop(), self.elements[place][1], children)
            del self.elements[place:], self.states[place + 1 :]
            self.corner = place
            self.elements.append(("node", vector))
        else:
            return
        self.push(vector)

    def compose(self, label: int, opening: Tensor, children: list[Tensor]) -> Tensor:
        """Vector of a constituent [w]."""
        composition, size = self.base.composition, self.config.embedding_size
        if self.config.composition == "lstm":
            states, _ = composition.rnn.lstm(torch.stack([opening, *children, opening]))
            return composition.output(torch.cat([states[-2, :size], states[1, size:]])).relu()
        states, _ = composition.rnn.lstm(torch.stack(children))
        query = torch.cat([composition.query_labels.weight[label], self.predictor()])
        weights = torch.stack([composition.key(state) @ query for state in states]).softmax(0)
        total = sum(weight * state for weight, state in zip(weights, states, strict=True))
        vector = composition.labels.weight[label]
        gate = composition.gate(torch.cat([vector, total])).sigmoid()
        return composition.output(gate * vector + (1 - gate) * total).relu()


def naive_derivation(
    model: Any,
    tokens: Sequence[int],
    actions: Sequence[int],
    word_ends: Sequence[bool] | None = None,
    between: Callable[[Tensor], Tensor] = lambda x: x,
) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of all actions [A, Y] and words [T, V] of a derivation, and the state when it is over [h]."""
    machine = StackMachine(model, word_ends, between)
    action_logits, word_logits, tokens = [], [], list(tokens)
    for action in actions:
        state = machine.predictor()
        action_logits.append(model.action_head(state))
        if action == SHIFT:
            word_logits.append(model.lm_head(state))
        machine.act(action, tokens.pop(0) if action == SHIFT else -1)
    assert not tokens and not machine.labels and len(machine.elements) == 1
    return torch.stack(action_logits), torch.stack(word_logits), machine.top()


def naive_log_prob(model: Any, tokens: Sequence[int], actions: Sequence[int], **options: Any) -> tuple[Tensor, Tensor]:
    """Log-probability of the actions, and of the words, of a derivation."""
    action_logits, word_logits, _ = naive_derivation(model, tokens, actions, **options)
    pairs = ((action_logits, actions), (word_logits, tokens))
    return tuple(
        sum(row.log_softmax(0)[value] for row, value in zip(logits, values, strict=True)) for logits, values in pairs
    )


def random_labeled_tree(generator: random.Random, num_tokens: int, num_labels: int) -> list[tuple[int, int, int]]:
    """A random tree (label, i, j) in post-order over the whole sentence, with unary chains and nodes over one token."""
    spans: list[tuple[int, int, int]] = []

    def build(start: int, end: int) -> None:
        if end - start > 1:
            cuts = sorted(generator.sample(range(start + 1, end), generator.randint(1, min(4, end - start - 1))))
            edges = [start, *cuts, end]
            for left, right in zip(edges, edges[1:], strict=False):
                # A child of several tokens is a constituent; a single token may be one.
                if right - left > 1 or generator.random() < 0.3:
                    build(left, right)
        chain = 1 + (generator.random() < 0.25) + (generator.random() < 0.1)
        spans.extend((generator.randrange(num_labels), start, end) for _ in range(chain))

    build(0, num_tokens)
    return spans


def random_word_ends(generator: random.Random, num_words: int) -> list[bool]:
    """Which tokens end a word, for words of one to three pieces."""
    ends: list[bool] = []
    for _ in range(num_words):
        ends += [False] * generator.choice([0, 0, 1, 2]) + [True]
    return ends


def over_pieces(spans: list[tuple[int, int, int]], word_ends: Sequence[bool]) -> list[tuple[int, int, int]]:
    """Spans of words as spans of pieces."""
    edge = [0, *(k + 1 for k, end in enumerate(word_ends) if end)]
    return [(label, edge[start], edge[end]) for label, start, end in spans]
