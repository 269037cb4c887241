"""The sampler of sentences with known trees and probabilities that other tests use."""

import math
import random
from collections import Counter

import pytest

from hf_synlm.data.brackets import spans_to_tree, tree_to_spans
from tests.reference.pcfg import DEFAULT_GRAMMAR, PCFG, generate_corpus


def test_pcfg_corpora_have_binary_trees_and_repeat():
    corpus = generate_corpus(200, seed=1)
    assert corpus == generate_corpus(200, seed=1) != generate_corpus(200, seed=2)
    for words, spans in corpus:
        assert 2 <= len(words) <= 40
        assert len(spans) == len(words) - 1
        assert tree_to_spans(spans_to_tree(spans, len(words))) == spans
        assert DEFAULT_GRAMMAR.log_prob(words) > -math.inf
    assert max(len(words) for words, _ in generate_corpus(200, seed=1, max_length=5)) == 5
    assert generate_corpus(0, seed=1) == []


def test_pcfg_probability_sums_over_both_attachments():
    # Mary saw the dog with Kim: S -> NP VP, then the PP under NP or under VP, which cost the same.
    name, noun_phrase, verb = 0.2 / 3, 0.6 / 3 / 6, 0.55 / 4
    one_tree = name * verb * noun_phrase * 0.2 * (1 / 3) * name
    assert DEFAULT_GRAMMAR.log_prob("Mary saw the dog with Kim".split()) == pytest.approx(math.log(2 * one_tree))
    assert DEFAULT_GRAMMAR.log_prob("Mary slept".split()) == pytest.approx(math.log(name * 0.25 / 3))
    assert DEFAULT_GRAMMAR.log_prob("slept Mary".split()) == -math.inf


def test_pcfg_sampling_follows_the_probabilities():
    # S -> S S | a with p = 1/3: p(n words) = Catalan(n - 1) (1/3)^(n - 1) (2/3)^n.
    grammar = PCFG("S", {"S": {("S", "S"): 1 / 3, ("a",): 2 / 3}})
    draws = 20_000
    generator = random.Random(0)
    drawn = [grammar.sample(generator, max_length=10_000) for _ in range(draws)]
    lengths = Counter(len(words) for words, _ in drawn)
    for length, catalan in ((1, 1), (2, 1), (3, 2), (4, 5)):
        probability = catalan * (1 / 3) ** (length - 1) * (2 / 3) ** length
        assert grammar.log_prob(["a"] * length) == pytest.approx(math.log(probability))
        assert lengths[length] == pytest.approx(draws * probability, abs=4 * math.sqrt(draws * probability))
    trees_of_four = Counter(tuple(spans) for words, spans in drawn if len(words) == 4)
    assert len(trees_of_four) == 5
