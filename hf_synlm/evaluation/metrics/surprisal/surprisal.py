# SPDX-License-Identifier: Apache-2.0
"""Surprisal of each word under any causal language model, syntactic ones included.

Surprisal -log p(word | words before) of each word of texts, one value for each word between white space, whatever the
tokens of the model; under causal language models of transformers, and under syntactic language models, with the trees
summed out.
"""

import math
from typing import Any

import evaluate
from torch import Tensor

from hf_synlm.evaluation.metrics import ListInputs
from hf_synlm.evaluation.text.perplexity import perplexities
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import NATS, Context, Unit, can_correct_words, score_words
from hf_synlm.evaluation.text.text_items import TextItem

_CITATION = """
@inproceedings{hale-2001-probabilistic,
  title = "A Probabilistic {E}arley Parser as a Psycholinguistic Model",
  author = "Hale, John",
  booktitle = "Proceedings of NAACL",
  year = "2001"
}
"""


class Surprisal(ListInputs, evaluate.Metric):
    """Surprisal of words; see `hf_synlm.evaluation.text.surprisal`."""

    def _info(self) -> evaluate.MetricInfo:
        return self._text_info(__doc__, _CITATION, "predictions")

    def _compute(
        self,
        predictions: list[str],
        model_id: str,
        unit: Unit = "bits",
        context: Context = "sentence",
        word_correction: bool = False,
        **options: Any,
    ) -> dict[str, Any]:
        """Score the inputs that were added.

        Args:
            predictions: texts, usually one sentence each.
            model_id: folder of a model, or its name on the Hub.
            unit: "bits" (default) or "nats".
            context: "sentence" (default) reads every text alone; "document" reads all texts as one document, in order.
            word_correction: count the space after a word, which marks its end, for the word and not for the next
                one; default: False. In the returned options it is False where tokens do not mark the beginning of
                words, so that it changes nothing.
            **options: of `hf_synlm.evaluation.text.scoring.TextScorer.from_pretrained`, such as estimator="stepwise",
                num_beams=100, batch_size=16, device="cuda", trust_remote_code=True.

        Returns:
            words: per text its words.
            surprisals: per text the surprisal of each word; None where nothing predicts it.
            lexical, structural: per text the two parts of each surprisal; None where the model has no beam of
                derivations.
            unknown: per text whether each word is outside the vocabulary.
            mean_surprisal: mean over the words that have one.
            word_perplexity, token_perplexity: of all texts, their ends not counted.
            unit, estimator: what the numbers are.
            options: everything in the model and its beam that changes numbers.

        Examples:
            >>> metric = evaluate.load("surprisal")
            >>> scores = metric.compute(predictions=["The cat sleeps ."], model_id="gpt2")  # doctest: +SKIP
            >>> scores["words"], len(scores["surprisals"][0])                               # doctest: +SKIP
            ([['The', 'cat', 'sleeps', '.']], 4)
        """
        scorer = TextScorer.from_pretrained(model_id, details=True, **options)
        items = [TextItem(str(number), text) for number, text in enumerate(predictions)]
        word_correction = word_correction and can_correct_words(scorer)
        scores = score_words(scorer, items, context=context, word_correction=word_correction)
        means = perplexities(scores)
        surprisals = [_listed(-found.log_probs / NATS[unit]) for found in scores]
        known = [value for row in surprisals for value in row if value is not None]
        return {
            "words": [[word.text for word in found.words] for found in scores],
            "surprisals": surprisals,
            "lexical": [_listed(-found.lexical / NATS[unit]) for found in scores],
            "structural": [_listed((found.lexical - found.log_probs) / NATS[unit]) for found in scores],
            "unknown": [found.unknown for found in scores],
            "mean_surprisal": math.fsum(known) / len(known) if known else None,
            "word_perplexity": _or_none(means["word_perplexity"]),
            "token_perplexity": _or_none(means["token_perplexity"]),
            "unit": unit,
            "estimator": scorer.estimator,
            "options": {**scorer.options(), "context": context, "word_correction": word_correction},
        }


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value


def _listed(values: Tensor) -> list[float | None]:
    return list(map(_or_none, values.tolist()))
