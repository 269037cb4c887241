"""Slow, obvious specifications: the pruned chart by replaying merges, inside and outside cell by cell."""

import torch
from torch.nn import functional as F


def replay_chart(order: list[int], window: int) -> tuple[dict, dict]:
    """Cells of one sentence's pruned chart by replaying the merges on a list of super tokens.

    Spans of at most `window` + 1 tokens exist from the start. After each merge, spans of exactly window + 1 super
    tokens get their inner boundaries as splits when they first appear. A cell is encoded if it is the root or a child
    of an encoded cell. Returns splits by cell and levels by cell; spans are half-open.
    """
    n = len(order) + 1
    splits = {}
    for width in range(2, min(window + 1, n) + 1):
        for start in range(n - width + 1):
            splits[start, start + width] = list(range(start + 1, start + width))
    edges = list(range(n + 1))
    for boundary in order:
        edges.remove(boundary + 1)
        for x in range(len(edges) - window - 1):
            span = edges[x], edges[x + window + 1]
            splits.setdefault(span, edges[x + 1 : x + window + 1])
    needed, encoded = [(0, n)], set()
    while needed:
        start, end = needed.pop()
        if end - start == 1 or (start, end) in encoded:
            continue
        encoded.add((start, end))
        for k in splits[start, end]:
            needed += [(start, k), (k, end)]
    # Cells that reach `window` super tokens are encoded even if no encoded cell uses them: replay says which.
    levels = {(i, i + 1): 0 for i in range(n)}
    for span in sorted(encoded, key=lambda s: s[1] - s[0]):
        levels[span] = 1 + max(max(levels[span[0], k], levels[k, span[1]]) for k in splits[span])
    return {span: splits[span] for span in encoded}, {span: levels[span] for span in encoded}


def naive_inside(splits, leaves, composition, temperature=1.0, accumulate=False, hard=False):
    """Inside vectors with and without the gradient of the split weights, heights and scores of one sentence."""
    maps = composition.chart_tensors()
    size = leaves.shape[1]
    main = {(i, i + 1): leaf for i, leaf in enumerate(leaves)}
    language = dict(main)
    height = {span: leaves.new_zeros(()) for span in main}
    score = dict(height)
    phis = {}

    def cell(vectors, span, stop):
        pairs = [torch.stack([vectors[span[0], k], vectors[k, span[1]]])[:, None] for k in splits[span]]
        phi = torch.stack([composition.score_splits(maps, p)[0][0] for p in pairs])
        if accumulate:
            phi = phi + torch.stack([score[span[0], k] + score[k, span[1]] for k in splits[span]])
        weight = F.softmax(phi if hard else phi / temperature, 0)
        if hard:
            weight = F.one_hot(weight.argmax(), len(weight)) - weight.detach() + weight
        used = weight.detach() if stop else weight
        mixed = sum(w * composition.compose(maps, p)[0][0] for w, p in zip(used, pairs, strict=True))
        return F.layer_norm(mixed, (size,)), weight, phi

    for span in sorted(splits, key=lambda s: s[1] - s[0]):
        main[span], weight, phi = cell(main, span, stop=False)
        language[span], _, _ = cell(language, span, stop=True)
        height[span] = sum(
            w * (torch.maximum(height[span[0], k], height[k, span[1]]) + 1)
            for w, k in zip(weight, splits[span], strict=True)
        )
        score[span], phis[span] = (weight * phi).sum(), phi.detach()
    return main, language, height, score, phis


def naive_outside(splits, inside, score, root, decomposition, n, accumulate=False):
    """Outside vectors of all cells of one sentence, messages collected in a dictionary."""
    maps, bias = decomposition.chart_tensors(), decomposition.sibling_bias()
    messages = {}
    outside, outside_score = {(0, n): root}, {(0, n): root.new_zeros(())}
    for span in sorted(splits, key=lambda s: s[0] - s[1]):
        if span not in outside:
            scores = torch.stack([s for s, _ in messages[span]])
            weight = scores.softmax(0)
            outside[span] = sum(w * m for w, (_, m) in zip(weight, messages[span], strict=True))
            outside_score[span] = (weight * scores).sum()
        for k in splits[span]:
            left, right = (span[0], k), (k, span[1])
            features = decomposition.cell_features(torch.stack([inside[left], inside[right]]))
            value, message, _ = decomposition.messages(maps, bias, outside[span][None], features[:, None, None])
            for side, (sibling, child) in enumerate(((left, right), (right, left))):
                total = value[side, 0, 0]
                if accumulate:
                    total = total + score[sibling] + outside_score[span]
                messages.setdefault(child, []).append((total, message[side]))
    for leaf in ((i, i + 1) for i in range(n)):
        if leaf not in outside:
            scores = torch.stack([s for s, _ in messages[leaf]])
            outside[leaf] = sum(w * m for w, (_, m) in zip(scores.softmax(0), messages[leaf], strict=True))
    return torch.stack([outside[i, i + 1] for i in range(n)])
