"""Specification of Ordered Memory: one text, one slot at a time, as the paper writes it.

Of the library it uses only the parameters.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cell(layer: Any, below: Tensor, slot: Tensor) -> Tensor:
    """What a slot composes."""
    hidden = (layer.cell_in.weight @ torch.cat([below, slot]) + layer.cell_in.bias).clamp(min=0)
    a, b, c, new = (layer.cell_out.weight @ hidden + layer.cell_out.bias).chunk(4)
    return layer.norm(a.sigmoid() * below + b.sigmoid() * slot + c.sigmoid() * new)


def choose(layer: Any, x: Tensor, candidates: Sequence[Tensor], before: Sequence[Tensor]) -> list[Tensor]:
    """Probabilities of the slots, from those of the last step."""
    query = layer.query_norm(layer.query.weight @ x + layer.query.bias)
    weights = []
    for number, candidate in enumerate(candidates):
        key = layer.key_norm(layer.key.weight @ candidate + layer.key.bias)
        score = layer.slot_score.weight[0] @ (query + key).clamp(min=0) + layer.slot_score.bias[0]
        last = number == len(candidates) - 1
        factor = torch.tensor(1.0) if last else torch.stack(list(before[: number + 2])).sum()
        weights.append((score / len(x) ** 0.5).exp() * (factor if factor >= 1e-5 else 0.0))
    return [weight / sum(weights) for weight in weights]


def read(layer: Any, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, D] and probabilities of the slots [T, N] of inputs [T, I], without dropout."""
    count, outputs, probs = layer.num_slots, [], []
    memory: list[Tensor] = []
    candidates: list[Tensor] = []
    chosen: list[Tensor] = []
    for t, value in enumerate(inputs):
        x = layer.norm(layer.input_projection.weight @ value + layer.input_projection.bias)
        if t == 0:
            memory = candidates = [x] * count
            memory, chosen = [torch.zeros_like(x)] * count, [x.new_zeros(())] * count
        else:
            chosen = choose(layer, x, candidates, chosen)
            kept = [sum(chosen[i:]) for i in range(count)]
            memory = [(1 - r) * m + r * c for r, m, c in zip(kept, memory, candidates, strict=True)]
            candidates, below = [], x
            for i in range(count):
                up_to = sum(chosen[: i + 1])
                below = (1 - up_to) * x + up_to * cell(layer, below, memory[i])
                candidates.append(below)
        outputs.append(candidates[-1])
        probs.append(torch.stack(chosen))
    return torch.stack(outputs), torch.stack(probs)
