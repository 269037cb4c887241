"""Sentences with known trees and known probabilities, drawn from a probabilistic context-free grammar (PCFG).

The grammar is in Chomsky normal form: a nonterminal becomes two nonterminals or one word, so that every derivation is a
binary tree over words. The default grammar has the attachment ambiguity of prepositional phrases: "the dog saw the
child with the telescope" has two trees, and how often each is drawn is known exactly.
"""

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence

from hf_synlm.trees.spans import Span


@dataclasses.dataclass(frozen=True)
class PCFG:
    """A probabilistic context-free grammar in Chomsky normal form.

    Attributes:
        start: the start symbol.
        rules: per nonterminal its expansions and their probabilities; an expansion is a pair of nonterminals or a
            tuple of one word, the probabilities of a nonterminal sum to 1.
    """

    start: str
    rules: Mapping[str, Mapping[tuple[str, ...], float]]

    def sample(self, generator: random.Random, max_length: int = 40) -> tuple[list[str], list[Span]]:
        """Draw a sentence and its tree.

        Args:
            generator: source of randomness.
            max_length: longer sentences are thrown away and drawn again, so that what is drawn follows the grammar's
                distribution conditional on at most `max_length` words.

        Returns:
            The words, and the n - 1 half-open spans of the binary tree in post-order.
        """
        while (drawn := self._draw(generator, max_length)) is None:
            pass
        return drawn

    def _draw(self, generator: random.Random, max_length: int) -> tuple[list[str], list[Span]] | None:
        """Draw one derivation from left to right; None once it has more than `max_length` words."""
        words: list[str] = []
        spans: list[Span] = []
        agenda: list[tuple[str, int | None]] = [(self.start, None)]
        num_symbols = 1  # every symbol on the agenda gives at least one word
        while agenda:
            symbol, start = agenda.pop()
            if start is not None:
                spans.append((start, len(words)))
                continue
            expansions = self.rules[symbol]
            (right,) = generator.choices(list(expansions), weights=list(expansions.values()))
            if len(right) == 1:
                words.append(right[0])
                continue
            num_symbols += 1
            if num_symbols > max_length:
                return None
            agenda.extend(((symbol, len(words)), (right[1], None), (right[0], None)))
        return words, spans

    def log_prob(self, words: Sequence[str]) -> float:
        """Compute the log-probability of a sentence, its trees summed out, by the inside algorithm.

        inside(A, i, j) = sum over A -> B C and splits k of p(A -> B C) inside(B, i, k) inside(C, k, j).

        Args:
            words: the sentence.

        Returns:
            log p(words) in nats under the grammar without a length limit; -inf if it has no tree.

        Cost: O(n^3 * rules).
        """
        length = len(words)
        inside: dict[Span, dict[str, float]] = {}
        for start, word in enumerate(words):
            inside[start, start + 1] = {
                left: expansions[(word,)] for left, expansions in self.rules.items() if (word,) in expansions
            }
        binary = [
            (left, right, probability)
            for left, expansions in self.rules.items()
            for right, probability in expansions.items()
            if len(right) == 2
        ]
        for width in range(2, length + 1):
            for start in range(length - width + 1):
                cell: dict[str, float] = {}
                for split in range(start + 1, start + width):
                    lefts, rights = inside[start, split], inside[split, start + width]
                    for left, (first, second), probability in binary:
                        if first in lefts and second in rights:
                            cell[left] = cell.get(left, 0.0) + probability * lefts[first] * rights[second]
                inside[start, start + width] = cell
        total = inside[0, length].get(self.start, 0.0)
        return math.log(total) if total > 0 else -math.inf


def _uniform(words: str, share: float = 1.0) -> dict[tuple[str, ...], float]:
    """Spread a probability evenly over words."""
    listed = words.split()
    return {(word,): share / len(listed) for word in listed}


# S   -> NP VP
# NP  -> Det N (0.6) | NP PP (0.2) | a name (0.2)        "the dog", "the dog with Mary", "Mary"
# VP  -> V NP (0.55) | VP PP (0.2) | an intransitive verb (0.25)
# PP  -> P NP
# In "V NP PP" the PP belongs to the NP or to the VP. Expected symbols stay finite: NP and VP double with p = 0.2 only.
DEFAULT_GRAMMAR = PCFG(
    start="S",
    rules={
        "S": {("NP", "VP"): 1.0},
        "NP": {("Det", "N"): 0.6, ("NP", "PP"): 0.2, **_uniform("Mary John Kim", 0.2)},
        "VP": {("V", "NP"): 0.55, ("VP", "PP"): 0.2, **_uniform("slept laughed left", 0.25)},
        "PP": {("P", "NP"): 1.0},
        "Det": _uniform("the a every"),
        "N": _uniform("dog child park telescope garden book"),
        "V": _uniform("saw liked found watched"),
        "P": _uniform("with in near"),
    },
)


def generate_corpus(
    num_sentences: int, seed: int, *, grammar: PCFG = DEFAULT_GRAMMAR, max_length: int = 40
) -> list[tuple[list[str], list[Span]]]:
    """Draw sentences with their gold trees.

    Args:
        num_sentences: how many.
        seed: the same seed gives the same corpus.
        grammar: the grammar to draw from.
        max_length: longer sentences are thrown away and drawn again.

    Returns:
        Per sentence its words and the half-open spans of its binary tree in post-order.
    """
    generator = random.Random(seed)
    return [grammar.sample(generator, max_length) for _ in range(num_sentences)]
