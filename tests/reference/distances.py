"""Specification of the loss of syntactic distances, pair by pair."""

import math
from collections.abc import Sequence


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
