"""Specification of ON-LSTM: one text, one step at a time, as the paper writes it; of the library only the parameters.

And of syntactic distances: decoders by recursion, the ranking loss pair by pair.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cumax(scores: Tensor) -> Tensor:
    return scores.softmax(0).cumsum(0)


def step(layer: Any, x: Tensor, h: Tensor, c: Tensor, keep: float) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """One step of one layer: h, c, the distance, and that of the split head."""
    gates = layer.ih.weight @ x + layer.ih.bias + (keep * layer.hh.weight) @ h + layer.hh.bias
    n, k = layer.num_chunks, len(h) // layer.num_chunks
    master_in, master_forget, rest = gates[:n], gates[n : 2 * n], gates[2 * n :]
    out, cell, enter, forget = rest.chunk(4)
    opened_in, opened_forget = 1 - cumax(master_in), cumax(master_forget)
    overlap = (opened_in * opened_forget).repeat_interleave(k)
    opened_in_units, opened_forget_units = opened_in.repeat_interleave(k), opened_forget.repeat_interleave(k)
    i = enter.sigmoid() * overlap + (opened_in_units - overlap)
    f = forget.sigmoid() * overlap + (opened_forget_units - overlap)
    c = f * c + i * cell.tanh()
    split = None
    if layer.split_head is not None:
        scores = (keep * layer.split_head.weight) @ master_forget + layer.split_head.bias
        split = 1 - cumax(scores).mean()
    return out.sigmoid() * c.tanh(), c, 1 - opened_forget.mean(), split


def read(model: Any, tokens: Sequence[int]) -> dict[str, Tensor]:
    """Outputs [T, E], next-token log-probabilities [T, V] and distances [L, T] (in evaluation mode)."""
    config, base = model.config, model.model
    keep = 1 - config.weight_dropout
    weight = base.embed_tokens.weight
    state = [(weight.new_zeros(size), weight.new_zeros(size)) for size in config.layer_sizes]
    outputs, distances, splits = [], [[] for _ in state], [[] for _ in state]
    for token in tokens:
        x = weight[token]
        for number, layer in enumerate(base.layers):
            h, c, distance, split = step(layer, x, *state[number], keep)
            state[number] = (h, c)
            distances[number].append(distance)
            splits[number].append(distance if split is None else split)
            x = h
        outputs.append(x)
    outputs = torch.stack(outputs)
    return {
        "outputs": outputs,
        "log_probs": (outputs @ model.lm_head.weight.t() + model.lm_head.bias).log_softmax(-1),
        "distances": torch.stack([torch.stack(row) for row in distances]),
        "splits": torch.stack([torch.stack(row) for row in splits]),
    }


def unbiased(distances: Sequence[float], first: int = 0) -> Any:
    """Nested pairs over word positions: split at the widest gap, the first value aside."""
    if len(distances) == 1:
        return first
    gap = max(range(1, len(distances)), key=lambda i: (distances[i], -i))
    return unbiased(distances[:gap], first), unbiased(distances[gap:], first + gap)


def biased(distances: Sequence[float], first: int = 0) -> Any:
    """Nested pairs: (what stands before the widest gap, (the word after it, the rest))."""
    if len(distances) == 1:
        return first
    gap = max(range(len(distances)), key=lambda i: (distances[i], -i))
    tree = first + gap
    if gap + 1 < len(distances):
        tree = (tree, biased(distances[gap + 1 :], first + gap + 1))
    return (biased(distances[:gap], first), tree) if gap else tree


def ranking_loss(
    predicted: Sequence[Sequence[float]],
    gold: Sequence[Sequence[float]],
    margin: float,
    scope: str,
    reduction: str,
    sentences: Sequence[Sequence[int]] | None = None,
) -> float:
    """Pair by pair; rows of a batch, NaN = no gold distance."""
    rows, columns = range(len(gold)), range(len(gold[0]))
    if scope == "sentence":
        pairs = [((b, i), (b, j)) for b in rows for i in columns for j in columns if i != j]
        if sentences is not None:
            pairs = [(x, y) for x, y in pairs if sentences[x[0]][x[1]] == sentences[y[0]][y[1]]]
    else:
        pairs = [((a, t), (b, t)) for t in columns for a in rows for b in rows if a != b]
    losses = [
        max(0.0, margin - (predicted[x[0]][x[1]] - predicted[y[0]][y[1]]))
        for x, y in pairs
        if gold[x[0]][x[1]] > gold[y[0]][y[1]]
    ]
    total = math.fsum(losses)
    return total if reduction == "sum" else total / max(1, len(losses))
