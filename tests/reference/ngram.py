"""Interpolated modified Kneser-Ney by the definition: dictionaries, one token at a time."""

from collections import Counter, defaultdict
from collections.abc import Sequence

NGram = tuple[int, ...]


class KneserNey:
    """Probabilities of an n-gram model; sentences are without begin and end."""

    def __init__(self, sentences: Sequence[Sequence[int]], order: int, begin: int, end: int, tokens: Sequence[int]):
        self.order, self.begin, self.tokens = order, begin, tokens
        texts = [(begin, *sentence, end) for sentence in sentences]
        grams = {
            k: Counter(text[i : i + k] for text in texts for i in range(len(text) - k + 1)) for k in range(1, order + 1)
        }
        firsts = {k: {text[:k] for text in texts if len(text) >= k} for k in grams}
        self.counts: dict[int, Counter[NGram]] = {order: grams[order]}
        for k in range(1, order):
            before: defaultdict[NGram, set[int]] = defaultdict(set)
            for gram in grams[k + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[k] = Counter({gram: len(before[gram]) for gram in grams[k]})
            if k > 1:
                self.counts[k].update({gram: grams[k][gram] for gram in firsts[k]})
        self.discounts = {k: self.discounts_of(counts) for k, counts in self.counts.items()}

    @staticmethod
    def discounts_of(counts: Counter[NGram]) -> list[float]:
        t = [sum(count == k for count in counts.values()) for k in range(5)]
        if 0 in t[1:]:
            return [0, 0.5, 1, 1.5]
        y = t[1] / (t[1] + 2 * t[2])
        found = [0, 1 - 2 * y * t[2] / t[1], 2 - 3 * y * t[3] / t[2], 3 - 4 * y * t[4] / t[3]]
        return found if min(found) >= 0 else [0, 0.5, 1, 1.5]

    def prob(self, token: int, history: NGram) -> float:
        """p(token | history), of at most N - 1 tokens."""
        k = len(history) + 1
        lower = self.prob(token, history[1:]) if history else (token in self.tokens) / len(self.tokens)
        following = {gram: count for gram, count in self.counts[k].items() if gram[:-1] == history and count}
        if not following:
            return lower
        cost = [self.discounts[k][min(count, 3)] for count in following.values()]
        own = following.get((*history, token), 0)
        rest = sum(cost) / sum(following.values())
        return (own - self.discounts[k][min(own, 3)]) / sum(following.values()) + rest * lower
