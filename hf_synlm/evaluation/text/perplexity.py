# SPDX-License-Identifier: Apache-2.0
"""Perplexity with its conventions: estimator, unit of text, and whether ends of sentences count.

    perplexity = exp(-(sum of log p) / N)

over tokens or over the user's words (so that models with different tokenizers compare), without and with the end of
each sentence. With it, N grows by one per sentence, and log p includes the end: that of an end token, or for RNNG and
    Tree LM that of closing the trees. Empty lines are left out.

A corpus perplexity by "beam_marginal" is an upper bound on the model's own, because a beam misses derivations. Under
normalization "search", without ends, it bounds that of a model that knows where sentences do not end. "stepwise" is the
perplexity of the distribution that the beam gives, which may be above or below.
"""

import math
import time
from collections.abc import Sequence

from hf_synlm.data.text import Tokenization
from hf_synlm.evaluation.results import EvaluationResult
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import NATS, Context, WordScores, score_words
from hf_synlm.evaluation.text.text_items import TextItem


def perplexities(scores: Sequence[WordScores]) -> dict[str, float]:
    """Perplexities of scored texts.

    Args:
        scores: words of the texts; the ends are counted if all texts with words have one.

    Returns:
        `token_perplexity`, `word_perplexity`, `bits_per_token`, `bits_per_word`, `bits_per_character` (characters of
        words, and one space between two words), all but the last also with the suffix `_with_end`, where the end of a
        text counts as one token (also an end word with the end token, as by the authors), and the counts `sentences`,
        `words`, `tokens`, `unknown_words`. Words without a token, and a first word that nothing predicts, are left out.

    Raises:
        ValueError: there are no tokens to score.
    """
    texts = [found for found in scores if found.tokens]
    tokens = sum(sum(not math.isnan(p) for _, p in found.tokens) for found in texts)
    if not tokens:
        raise ValueError("no token has a probability, so there is no perplexity. Give texts of more than one token")
    scored = [[w.text for w, p in zip(t.words, t.log_probs.tolist(), strict=True) if not math.isnan(p)] for t in texts]
    words, characters = sum(map(len, scored)), sum(len(" ".join(text)) for text in scored)
    nats = -math.fsum(float(found.log_probs.nansum()) for found in texts)
    results = {
        **averages(nats, tokens, words, ""),
        "bits_per_character": nats / characters / NATS["bits"] if characters else math.nan,
        "sentences": len(texts),
        "words": words,
        "tokens": tokens,
        "unknown_words": sum(sum(found.unknown) for found in texts),
    }
    if all(found.end is not None for found in texts):
        nats -= math.fsum(end for found in texts if not math.isnan(end := found.end or 0.0))
        results |= averages(nats, tokens + len(texts), words + len(texts), "_with_end")
    return results


def averages(nats: float, tokens: int, words: int, suffix: str) -> dict[str, float]:
    """Perplexities and bits per token and per word (NaN without words) of texts with -log p = `nats`, by name."""
    return {
        f"token_perplexity{suffix}": perplexity_of(nats / tokens),
        f"word_perplexity{suffix}": perplexity_of(nats / words) if words else math.nan,
        f"bits_per_token{suffix}": nats / tokens / NATS["bits"],
        f"bits_per_word{suffix}": nats / words / NATS["bits"] if words else math.nan,
    }


def perplexity_of(nats: float) -> float:
    """Exp of the mean nats, infinity where no number is as large."""
    return math.inf if nats >= 700 else math.exp(nats)


def evaluate_perplexity(
    scorer: TextScorer,
    items: Sequence[TextItem],
    *,
    context: Context = "sentence",
    tokenize: Tokenization | None = None,
    data: dict | None = None,
    options: dict | None = None,
) -> EvaluationResult:
    """Perplexity of texts under a model.

    Args:
        scorer: the model.
        items: the texts.
        context: see `score_words`. In documents, ends of sentences are not counted; recurrent models read an end token
            between sentences.
        tokenize: how the model reads words, see `encode_sentences`; None = as its `text_style` says. The words that
            are counted are those of the text.
        data: description of the data for results.
        options: further options for the result, such as the seed.

    Returns:
        The result; see `perplexities`.
    """
    start = time.perf_counter()
    end = context == "sentence" and scorer.end_of_text != "not modeled"
    progress = f"perplexity: {scorer.name}"
    scores = score_words(scorer, items, context=context, tokenize=tokenize, end=end, progress=progress)
    seconds = time.perf_counter() - start
    settings = {
        "context": context,
        "tokenize": scorer.tokenization(tokenize),
        "end_of_text": scorer.end_of_text if end else "not counted",
        "unit": "nats inside, bits where the name says so",
        **(options or {}),
    }
    return EvaluationResult.of(
        scorer, "perplexity", perplexities(scores), settings, data=data or {"texts": len(items)}, seconds=seconds
    )
