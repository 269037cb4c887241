# SPDX-License-Identifier: Apache-2.0
"""ROUGE of summaries (Lin 2004), by the package rouge-score. Needs the extra `[eval]`.

rouge1, rouge2: F1 of unigrams, bigrams. rougeL: F1 of the longest common subsequence of the whole texts. rougeLsum: of
sentences, the union over sentences as in ROUGE-1.5.5. The package reads each line as a sentence, so texts are split
into sentences here, one per line. "R-L" in papers may mean either, so both are given.
"""

import re
import unicodedata
from collections.abc import Sequence

import numpy as np
from rouge_score import rouge_scorer
from rouge_score.tokenizers import DefaultTokenizer, Tokenizer

from hf_synlm.data.text import UNSPACED, check_list, split_sentences

_TOKEN = re.compile(f"{UNSPACED.pattern}|[^\\W_{UNSPACED.pattern[1:-1]}]+")
ROUGE_TYPES = ("rouge1", "rouge2", "rougeL", "rougeLsum")


def sentences_as_lines(text: str, *, language: str = "en") -> str:
    """Put every sentence of a text on its own line; lines of the text are never joined."""
    return "\n".join(
        sentence for line in re.split(r"[\r\n]+", text) for sentence in split_sentences(line, language=language)
    )


class _Words(Tokenizer):
    """Words of any script."""

    def tokenize(self, text: str) -> list[str]:
        """Runs of letters, marks and digits; characters of scripts without spaces stand alone."""
        return _TOKEN.findall(unicodedata.normalize("NFC", text).lower())


def rouge_scores(
    predictions: Sequence[str],
    references: Sequence[str | Sequence[str]],
    *,
    use_stemmer: bool = False,
    language: str = "en",
) -> dict[str, float]:
    """Mean ROUGE F1 of summaries, in percent; of several references the best counts, for each measure by itself.

    `rouge_average` is the mean of the first three (the paper's R-AVG). The authors of GPST do not stem.
    Tokens of English are those of rouge-score: runs of ASCII letters and digits. In another `language` (ISO 639) they
    are runs of letters and digits of any script, and single characters of scripts without spaces (Chinese, Thai). A
    reference without a token is an error.

    Cost: per pair O(length of summary times length of reference) for the subsequences.
    """
    check_list("predictions", predictions)
    check_list("references", references)
    if use_stemmer and language != "en":
        raise ValueError(f"use_stemmer stems English words, but the language is {language!r}. Leave use_stemmer out.")
    tokens = DefaultTokenizer(use_stemmer) if language == "en" else _Words()
    scorer = rouge_scorer.RougeScorer(list(ROUGE_TYPES), tokenizer=tokens)
    table = np.zeros((len(predictions), len(ROUGE_TYPES)))
    for row, (prediction, given) in enumerate(zip(predictions, references, strict=True)):
        several = [given] if isinstance(given, str) else list(given)
        if not any(reference.strip() for reference in several):
            raise ValueError(f"document {row} has no reference summary. Leave this document out")
        if not any(map(tokens.tokenize, several)):
            raise ValueError(
                f"document {row} has no letters of {language!r} in its reference {several[0]!r:.60}. Set language "
                "(in summarization: --language) to the language of the documents, or leave this document out"
            )
        targets = [sentences_as_lines(reference, language=language) for reference in several]
        scores = scorer.score_multi(targets, sentences_as_lines(prediction, language=language))
        table[row] = [scores[name].fmeasure for name in ROUGE_TYPES]
    means = dict(zip(ROUGE_TYPES, (100 * table.mean(0)).tolist(), strict=True))
    return {**means, "rouge_average": float(np.mean([means[name] for name in ROUGE_TYPES[:3]]))}
