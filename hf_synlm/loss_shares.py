"""A loss of several means, computed in several calls: gradient accumulation and data-parallel training.

Every part of a loss is a mean over items of its own: tokens, sentences, actions, pairs. The mean over a whole batch is
not the mean of the means over its pieces, unless each is weighted by its share of the items. A model counts the items
of a piece from its inputs alone (`count_loss_items`), so that the counts of all pieces of a step are known before the
first backward pass; `forward(..., loss_shares=...)` weights its parts, and the losses of the pieces add up.
"""

from collections.abc import Iterable, Mapping


def to_shares(counts: Mapping[str, int], totals: Mapping[str, int]) -> dict[str, float]:
    """Share of the items that a piece of a batch holds, for each part of the loss.

    share = items of the piece / items of the whole batch; 0 where the batch holds none.

    Args:
        counts: of `count_loss_items` for the piece.
        totals: the same, added up over all pieces.

    Returns:
        `loss_shares` for the `forward` of the piece.

    Raises:
        ValueError: when the two have other names.
    """
    if counts.keys() != totals.keys():
        raise ValueError(f"The parts of the piece are {sorted(counts)}, those of the batch {sorted(totals)}.")
    return {name: count / totals[name] if totals[name] else 0.0 for name, count in counts.items()}


def share_of(loss_shares: Mapping[str, float] | None, name: str) -> float:
    """Share of a part; 1 for a whole batch, and for parts that are sums and no means.

    Args:
        loss_shares: argument of `forward`.
        name: of the part.

    Returns:
        The factor.
    """
    return 1.0 if loss_shares is None else loss_shares.get(name, 1.0)


def check_shares(loss_shares: Mapping[str, float] | None, parts: Iterable[str]) -> None:
    """Check the argument of `forward`.

    Args:
        loss_shares: argument of `forward`.
        parts: names of the parts of the loss.

    Raises:
        ValueError: for names that are no parts.
    """
    known = list(parts)
    for name in loss_shares or ():
        if name not in known:
            raise ValueError(f"loss_shares: the loss has no part {name!r}. Its parts: {', '.join(known)}.")


__all__ = ["check_shares", "share_of", "to_shares"]
