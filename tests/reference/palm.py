"""Specification of PaLM: one sentence, one token and one span at a time, Python lists; of the library only the
parameters and the configuration.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]


def state_of_span(inputs: Sequence[Tensor], forgets: Sequence[Tensor]) -> Tensor:
    """State of the rational RNN after the tokens of one span, from zero."""
    state = torch.zeros_like(inputs[0])
    for value, forget in zip(inputs, forgets, strict=True):
        state = forget * state + value
    return state


class Reader:
    """Reads one text token by token and keeps everything that it has seen.

    Args:
        model: A `PaLMForCausalLM` in evaluation mode.
    """

    def __init__(self, model: Any) -> None:
        self.model, self.base, self.config = model, model.model, model.config
        sizes = [layer.hidden_size for layer in self.base.layers]
        like = self.base.embed_tokens.weight
        self.states = [(like.new_zeros(size), like.new_zeros(size)) for size in sizes]
        self.queries: list[Tensor] = []
        self.scores: list[Tensor] = []  # per token, longest span first

    def read(self, token: int) -> Tensor:
        """Read a token; log p of the next one [V]."""
        inputs = self.base.embed_tokens.weight[token]
        last = len(self.base.layers) - 1
        for index, layer in enumerate(self.base.layers):
            inputs = self.cell(index, layer, inputs)
            if index == last - 1 and self.base.span_context is not None:
                inputs = self.look_back(inputs)
        logits = self.base.embed_tokens.weight @ inputs + self.model.lm_head.bias
        return logits.log_softmax(-1)

    def cell(self, index: int, layer: Any, inputs: Tensor) -> Tensor:
        """One step of one LSTM layer."""
        hidden, cell = self.states[index]
        gates = layer.weight_ih_l0 @ inputs + layer.bias_ih_l0 + layer.weight_hh_l0 @ hidden + layer.bias_hh_l0
        i, f, g, o = gates.chunk(4)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        self.states[index] = (o.sigmoid() * cell.tanh(), cell)
        return self.states[index][0]

    def vectors(self, query: Tensor, num_spans: int) -> list[Tensor]:
        """Vectors of the spans of `num_spans`, ..., 1 tokens that end before the next token."""
        attention = self.base.span_context.attention
        missing = [torch.zeros_like(query)] * num_spans
        before = (missing + self.queries)[-num_spans:]
        inputs, forgets = [], []
        for state in before:
            forget = (attention.forget_gate.weight @ state + attention.forget_gate.bias).sigmoid()
            value = attention.input.weight @ state
            if self.config.input_activation == "tanh":
                value = value.tanh()
            forgets.append(forget)
            inputs.append((1 - forget) * value)
        size, vectors = self.config.rrnn_size, []
        for length in range(num_spans, 0, -1):
            u, f = inputs[-length:], forgets[-length:]
            forward = state_of_span([value[:size] for value in u], [value[:size] for value in f])
            backward = state_of_span([value[size:] for value in u[::-1]], [value[size:] for value in f[::-1]])
            vector = torch.cat([forward, backward])
            if self.config.output_gate:
                gate = (attention.output_gate.weight @ query + attention.output_gate.bias).sigmoid()
                vector = (gate * vector).tanh()
            vectors.append(vector)
        return vectors

    def score(self, query: Tensor, vectors: list[Tensor]) -> Tensor:
        """Scores of the vectors, longest span first."""
        if self.config.span_scores == "right_branching":
            return torch.tensor([float(rank) for rank in range(len(vectors), 0, -1)]).to(query)
        attention = self.base.span_context.attention
        hidden = attention.query.weight @ query + attention.query.bias
        return torch.cat([attention.score.weight @ (attention.key.weight @ v + hidden).tanh() for v in vectors])

    def look_back(self, query: Tensor) -> Tensor:
        """What the last layer reads."""
        context_layer = self.base.span_context
        vectors = self.vectors(query, self.config.num_spans)
        self.scores.append(self.score(query, vectors))
        weights = self.scores[-1].softmax(-1)
        context = sum(weight * vector for weight, vector in zip(weights, vectors, strict=True))
        both = torch.cat([query, context])
        gate = (context_layer.residual_gate.weight @ both + context_layer.residual_gate.bias).sigmoid()
        projected = (context_layer.projection.weight @ context + context_layer.projection.bias).tanh()
        self.queries.append(query)
        return gate * query + (1 - gate) * projected


@torch.no_grad()
def log_probs(model: Any, tokens: Sequence[int]) -> Tensor:
    """log p(next | prefix) after each token [T, V]."""
    reader = Reader(model)
    return torch.stack([reader.read(token) for token in tokens])
