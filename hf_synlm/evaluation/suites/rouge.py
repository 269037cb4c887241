# SPDX-License-Identifier: Apache-2.0
"""ROUGE of summaries (Lin 2004), by the package rouge-score. Needs the extra `[eval]`.

rouge1, rouge2: F1 of unigrams, bigrams. rougeL: F1 of the longest common subsequence of the whole texts. rougeLsum: of
sentences, the union over sentences as in ROUGE-1.5.5. The package reads each line as a sentence, so texts are split
into sentences here, one per line. "R-L" in papers may mean either, so both are given.
"""

import re
from collections.abc import Sequence

import numpy as np
from rouge_score import rouge_scorer

from hf_synlm.data.text import check_list, split_sentences

ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def sentences_as_lines(text: str, *, language: str = "en") -> str:
    """Put every sentence of a text on its own line; lines of the text are never joined."""
    return "\n".join(
        sentence for line in re.split(r"[\r\n]+", text) for sentence in split_sentences(line, language=language)
    )


def rouge_scores(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    *,
    use_stemmer: bool = False,
    language: str = "en",
) -> dict[str, float]:
    """Mean ROUGE F1 of summaries, in percent; of several references the best counts, for each measure by itself.

    `rouge_average` is the mean of the first three (the paper's R-AVG). The authors of GPST do not stem. The package
    rouge-score keeps ASCII letters and digits only, whatever the language for splitting sentences.

    Cost: per pair O(length of summary times length of reference) for the subsequences.
    """
    check_list("predictions", predictions)
    check_list("references", references)
    scorer = rouge_scorer.RougeScorer(list(ROUGE_TYPES), use_stemmer=use_stemmer)
    table = np.zeros((len(predictions), len(ROUGE_TYPES)))
    for row, (prediction, given) in enumerate(zip(predictions, references, strict=True)):
        several = [given] if isinstance(given, str) else list(given)
        if not any(reference.strip() for reference in several):
            raise ValueError(f"document {row} has no reference summary: leave it out")
        targets = [sentences_as_lines(reference, language=language) for reference in several]
        scores = scorer.score_multi(targets, sentences_as_lines(prediction, language=language))
        table[row] = [scores[name].fmeasure for name in ROUGE_TYPES]
    means = dict(zip(ROUGE_TYPES, (100 * table.mean(0)).tolist(), strict=True))
    return {**means, "rouge_average": float(np.mean([means[name] for name in ROUGE_TYPES[:3]]))}
