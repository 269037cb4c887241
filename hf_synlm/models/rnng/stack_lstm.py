# SPDX-License-Identifier: Apache-2.0
"""The stack LSTM of RNNG: every push is an LSTM step from the state of the push below it.

The slow and obvious version is `naive_derivation` in `tests/reference/rnng.py`, one push at a time.

Three ways to run the same parameters: all pushes of a batch by stack depth (`by_level`), action by action where the
composition reads the stack (`by_step`), and single pushes for the search (`pusher`).

Shapes: P pushes, R rows of a step, L layers, w element size, h stack size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from hf_synlm.core.compiled_levels import LevelModule
from hf_synlm.core.matrix_products import ROW_STEP, linear, linear_map
from hf_synlm.core.module_tools import unwrapped, weight_of
from hf_synlm.models.rnng.composition import chain_inputs
from hf_synlm.models.rnng.forest_lstm import (
    by_activation,
    for_sigmoids,
    forest_lstm,
    lstm_slopes,
    lstm_step,
    lstm_step_backward,
    search_step,
)
from hf_synlm.models.rnng.plan import LevelPlan, StepPlan

# Rows per push and pushes of a search, roughly: they choose the layout of the weights.
_PUSHED_ROWS, _PUSHES = 100, 100


class StackLSTM(LevelModule):
    """Parameters of the stack LSTM and its three ways to run.

    Dropout stands between the layers only: the state that later pushes read is never dropped. (The authors' in-place
    dropout also drops the recurrent state of the lower layers in training.)
    """

    def __init__(self, input_size: int, hidden_size: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        # Only their parameters are used.
        self.cells = nn.ModuleList(
            nn.LSTMCell(hidden_size if layer else input_size, hidden_size) for layer in range(num_layers)
        )
        self.hidden_size, self.dropout = hidden_size, dropout

    def weights(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of every layer: input weights, recurrent weights, and the sum of the two biases."""
        layers = []
        for cell in self.cells:
            plain = unwrapped(cell)
            layers.append((weight_of(cell, "weight_ih"), weight_of(cell, "weight_hh"), plain.bias_ih + plain.bias_hh))
        return layers

    def by_level(self, elements: Tensor, plan: LevelPlan, every_layer: bool = False) -> list[Tensor]:
        """Run all pushes of elements [P, w], depth by depth: states [P, h] of the last layer, or of every one.

        Cost: L times the deepest stack sequential steps.
        """
        inputs, states = elements.index_select(0, plan.source), []
        for layer, (weight_ih, weight_hh, bias) in enumerate(self.weights()):
            if layer:
                inputs = F.dropout(inputs, self.dropout, self.training)
            gates = linear(inputs, weight_ih, bias)
            hidden, _ = forest_lstm(gates[None], weight_hh[None], plan.sizes, plan.parents, self.compile_options)
            inputs = hidden[0].to(elements.dtype)
            if every_layer:
                states.append(inputs)
        return states or [inputs]

    def by_step(
        self,
        elements: Tensor,
        plan: StepPlan,
        compose: Any,
        parameters: Sequence[Tensor],
        every_layer: bool = False,
    ) -> list[Tensor]:
        """Run all pushes, action by action: states [P, h] of the last layer, or of every one.

        Elements of compositions are arbitrary: `compose` maps inputs [2, S, w] of the children, chains, labels [R] and
        stack tops [R, h] to [R, w]; `parameters` are what it reads besides, for its gradients.

        Cost: as many sequential steps as the longest action sequence: a composition reads the push before it. States
        stand in one buffer for the whole sequence, so that nothing is copied per step, forward or backward.
        """
        weights = [by_activation(value) for layer in self.weights() for value in layer]
        masks = torch.ones(len(self.cells) - 1, len(elements), self.hidden_size, device=elements.device)
        masks = F.dropout(masks.to(elements.dtype), self.dropout, self.training)
        # The hand-written passes keep one type throughout.
        with torch.autocast(elements.device.type, enabled=False):
            train = torch.is_grad_enabled()  # off inside of the function
            first = 0 if every_layer else len(self.cells) - 1
            states = _StackSteps.apply(
                elements, masks, plan, compose, train, first, len(weights), *weights, *parameters
            )
            return list(states.unbind())

    @torch.no_grad()
    def pusher(self) -> "Pusher":
        """Prepare single pushes with the weights as they are now, for evaluation."""
        return Pusher(self)


class Pusher:
    """Single pushes of a search. The weights must not change while this is in use."""

    def __init__(self, stack_lstm: StackLSTM) -> None:
        self.size, self._layers = stack_lstm.hidden_size, []
        weights = stack_lstm.weights()
        # In half precision, tanh by a sigmoid loses digits near 0.
        is_half = weights[0][0].dtype.itemsize < 4
        order, self._step = (by_activation, lstm_step) if is_half else (for_sigmoids, search_step)
        for layer in weights:
            weight_ih, weight_hh, bias = (order(value) for value in layer)
            maps = (linear_map(weight, _PUSHED_ROWS, _PUSHES, row_step=ROW_STEP) for weight in (weight_ih, weight_hh))
            self._layers.append((*maps, bias))

    def inputs(self, elements: Tensor) -> Tensor:
        """What elements [R, w] bring to the gates of the lowest layer [R, 4 h]."""
        return self._layers[0][0](elements)

    def __call__(self, gates: Tensor, below: Tensor, which: Tensor | None = None) -> Tensor:
        """Push elements with `inputs` [R, 4 h] (overwritten) on U states `below` [U, L, 2 h]: new states [R, L, 2 h].

        `which` [R] is the state for each element; None = U is R. A state that several elements are pushed on is
        multiplied with the recurrent weights once.
        """
        size = self.size
        states = below.new_empty(len(gates), len(self._layers), 2 * size)
        for layer, (from_input, from_state, bias) in enumerate(self._layers):
            recurrent, cells = from_state(below[:, layer, :size]).add_(bias), below[:, layer, size:]
            if which is not None:
                recurrent, cells = recurrent.index_select(0, which), cells.index_select(0, which)
            if layer:
                gates = from_input(states[:, layer - 1, :size])
            self._step(gates.add_(recurrent), cells, states[:, layer])
        return states


class _StackSteps(torch.autograd.Function):
    """`StackLSTM.by_step`. The LSTM is differentiated by hand; every composition keeps a small graph of its own."""

    @staticmethod
    def forward(ctx, elements, masks, plan, compose, train, first_layer, num_weights, *tensors):
        weights, parameters = tensors[:num_weights], tensors[num_weights:]
        layers = [weights[3 * layer : 3 * layer + 3] for layer in range(len(weights) // 3)]
        elements, size = elements.clone(), layers[0][1].shape[1]
        states = elements.new_zeros(len(layers), len(elements), 2 * size)
        before = torch.zeros_like(states)  # those of the pushes below
        hidden, below = states[..., :size], before[..., :size]
        # The inputs of the lowest layer are known for words and nonterminals.
        acts = [F.linear(elements, layers[0][0], layers[0][2])]
        acts += [torch.zeros_like(acts[0]) for _ in layers[1:]]
        graphs: list[Any] = [None]
        train, first = train and any(ctx.needs_input_grad), 0
        for number, count in enumerate(plan.sizes):
            rows = slice(first, first + count)
            step = plan.steps[number - 1] if number else None
            if step is not None:
                graphs.append(_compose(elements, hidden[-1], step, rows, compose, train))
                if graphs[-1] is not None:
                    at = step.reduced + first
                    acts[0][at] = F.linear(elements[at], layers[0][0], layers[0][2])
            for layer, (weight_ih, weight_hh, bias) in enumerate(layers):
                gates = acts[layer][rows]
                if layer:
                    torch.addmm(bias, hidden[layer - 1, rows] * masks[layer - 1, rows], weight_ih.t(), out=gates)
                if step is not None:
                    torch.index_select(states[layer], 0, step.parent, out=before[layer, rows])
                    gates.addmm_(below[layer, rows], weight_hh.t())
                lstm_step(gates, before[layer, rows, size:], states[layer, rows])
            first += count
        ctx.save_for_backward(elements, masks, states, before, *acts, *weights)
        ctx.plan, ctx.graphs, ctx.parameters, ctx.first_layer = plan, graphs, parameters, first_layer
        return hidden[first_layer:].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        with torch.autocast(grad_output.device.type, enabled=False):
            return _StackSteps._backward(ctx, grad_output)

    @staticmethod
    def _backward(ctx, grad_output):
        elements, masks, states, before, *rest = ctx.saved_tensors
        depth, size = len(states), states.shape[2] // 2
        acts, weights, parameters = rest[:depth], rest[depth:], ctx.parameters
        layers = [weights[3 * layer : 3 * layer + 3] for layer in range(depth)]
        slopes = [lstm_slopes(act, b[:, size:], s[:, size:]) for act, b, s in zip(acts, before, states, strict=True)]
        grads, down = torch.zeros_like(states), torch.zeros_like(states)
        grads[ctx.first_layer :, :, :size] = grad_output
        grad_elements = torch.zeros_like(elements)
        grad_gates = [torch.zeros_like(act) for act in acts]
        grad_parameters: list[Any] = [None] * len(parameters)
        sizes, steps, first = ctx.plan.sizes, ctx.plan.steps, len(elements)
        for number in range(len(sizes) - 1, -1, -1):
            first -= sizes[number]
            rows = slice(first, first + sizes[number])
            step = steps[number - 1] if number else None
            for layer in range(depth - 1, -1, -1):
                gates, to_below = grad_gates[layer][rows], down[layer, rows]
                (through, factors), forget = slopes[layer], acts[layer][rows, 2 * size : 3 * size]
                lstm_step_backward(
                    (through[rows], factors[rows]), forget, grads[layer, rows], gates, to_below[:, size:]
                )
                if step is not None:
                    torch.mm(gates, layers[layer][1], out=to_below[:, :size])
                    grads[layer].index_add_(0, step.parent, to_below)
                if layer:
                    grads[layer - 1, rows, :size] += (gates @ layers[layer][0]) * masks[layer - 1, rows]
            graph = ctx.graphs[number]
            if graph is not None:
                at = step.reduced + first
                # What later compositions read of these elements has arrived; this is what the push itself reads.
                grad_composed = grad_elements[at] + grad_gates[0][at] @ layers[0][0]
                _compose_backward(
                    graph, step, grad_composed, grad_elements, grads[-1, :, :size], parameters, grad_parameters
                )
        # Distributed training waits for a gradient of every parameter, also where all trees are flat.
        for number, value in enumerate(parameters):
            if grad_parameters[number] is None and value.requires_grad:
                grad_parameters[number] = torch.zeros_like(value)
        grad_elements += grad_gates[0] @ layers[0][0]
        grad_weights: list[Tensor] = []  # each in one multiplication over all pushes
        for layer, gates in enumerate(grad_gates):
            inputs = states[layer - 1, :, :size] * masks[layer - 1] if layer else elements
            grad_weights += [gates.t() @ inputs, gates.t() @ before[layer, :, :size], gates.sum(0)]
        return grad_elements, None, None, None, None, None, None, *grad_weights, *grad_parameters


def _compose(elements: Tensor, tops: Tensor, step: Any, rows: slice, compose: Any, train: bool) -> Any:
    """Compose the nodes of one step into `elements`; returns what backward needs of it."""
    if step.chains is None:
        return None
    inputs, top = chain_inputs(elements, step.chains), tops.index_select(0, step.top)
    with torch.set_grad_enabled(train):
        inputs, top = inputs.requires_grad_(train), top.requires_grad_(train)
        composed = compose(inputs, step.chains, step.label, top)
    elements[step.reduced + rows.start] = composed.detach().to(elements.dtype)
    return inputs, top, composed


def _compose_backward(
    graph: tuple[Tensor, Tensor, Tensor],
    step: Any,
    grad_composed: Tensor,
    grad_elements: Tensor,
    grad_tops: Tensor,
    parameters: tuple[Tensor, ...],
    grad_parameters: list[Any],
) -> None:
    """Add the gradients of one step's compositions to those of children, stack tops and parameters."""
    inputs, top, composed = graph
    wanted = [inputs, top, *(value for value in parameters if value.requires_grad)]
    # The graphs live as long as the context does: there may be another backward.
    grads = torch.autograd.grad(
        composed, wanted, grad_composed.to(composed.dtype), retain_graph=True, allow_unused=True
    )
    grad_elements.index_add_(0, step.chains.index.flatten(), grads[0].flatten(0, 1))
    if grads[1] is not None:
        grad_tops.index_add_(0, step.top, grads[1])
    trained = [number for number, value in enumerate(parameters) if value.requires_grad]
    for number, grad in zip(trained, grads[2:], strict=True):
        if grad is not None and grad_parameters[number] is None:
            grad_parameters[number] = grad.clone()  # two parameters may share one gradient
        elif grad is not None:
            grad_parameters[number].add_(grad)
