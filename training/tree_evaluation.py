"""Unlabeled F1 of the trees that a model induces, against a treebank, next to the trees that need no model.

Words of the treebank are encoded with their word boundaries, so that word pieces stay together; trees over tokens are
folded back to words before they are scored.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.collate import collate_contexts, encode_words
from hf_synlm.data.treebank import TreebankSentence, read_treebank
from hf_synlm.evaluation.parsing import ParsingScores, branching_baselines, keep_by_tag, unlabeled_f1
from hf_synlm.trees import Span, fold_tokens

PUNCTUATION = {
    "remove": "punctuation removed before parsing",
    "ignore": "parsed with punctuation, scored without",
    "keep": "punctuation kept and scored",
}


@dataclasses.dataclass(frozen=True)
class Treebank:
    """Sentences with gold trees, ready to be parsed and scored.

    Attributes:
        words: per sentence the words that are parsed.
        spans: per sentence the gold spans over these words.
        keep: per sentence and word, whether it counts in the score; `None`: all do.
        convention: one line that says what is done with punctuation.
    """

    words: list[list[str]]
    spans: list[list[Span]]
    keep: list[list[bool]] | None
    convention: str

    @property
    def lengths(self) -> list[int]:
        """Number of words of each sentence."""
        return [len(words) for words in self.words]


def load_treebank(
    path: str | Path, punctuation: str = "remove", max_sentences: int | None = None, split_leaves: bool = False
) -> Treebank:
    """Read a treebank file for evaluation; see `make_treebank` and `read_treebank`."""
    return make_treebank(read_treebank(path, split_leaves=split_leaves), punctuation, max_sentences)


def make_treebank(
    trees: Iterable[TreebankSentence], punctuation: str = "remove", max_sentences: int | None = None
) -> Treebank:
    """Prepare gold trees for evaluation.

    Args:
        trees: the sentences.
        punctuation: "remove" deletes punctuation before parsing (Kim et al. 2019a, the paper's setting), "ignore"
            parses it but deletes it from both trees before scoring, "keep" treats it as words.
        max_sentences: read only so many of the first sentences.

    Returns:
        The treebank.

    Raises:
        ValueError: for another value of `punctuation`.
    """
    if punctuation not in PUNCTUATION:
        raise ValueError(f"punctuation {punctuation!r} is unknown. Choose one of {sorted(PUNCTUATION)}.")
    sentences: list[TreebankSentence] = []
    for sentence in trees:
        kept = keep_by_tag(sentence.tags)
        if any(kept):
            sentences.append(sentence if punctuation != "remove" else sentence.select_words(kept))
        if max_sentences is not None and len(sentences) == max_sentences:
            break
    return Treebank(
        words=[list(sentence.words) for sentence in sentences],
        spans=[sentence.spans for sentence in sentences],
        keep=[keep_by_tag(sentence.tags) for sentence in sentences] if punctuation == "ignore" else None,
        convention=PUNCTUATION[punctuation],
    )


@torch.no_grad()
def parse_words(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sentences: Sequence[Sequence[str]],
    *,
    batch_size: int = 32,
    **options: Any,
) -> list[list[Span]]:
    """Parse sentences given as words.

    Args:
        model: a model with `parse`.
        tokenizer: its tokenizer.
        sentences: per sentence its words.
        batch_size: sentences per call; they are sorted by length.
        **options: for `model.parse`, such as `method="inside"` or `num_beams=20`.

    Returns:
        Per sentence the spans of its best tree over words, in post-order.
    """
    training = model.training
    model.eval()
    encoded = [encode_words(tokenizer, words) for words in sentences]
    order = sorted(range(len(encoded)), key=lambda index: len(encoded[index][0]))
    trees: list[list[Span]] = [[] for _ in encoded]
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        batch = collate_contexts(
            [{"input_ids": encoded[row][0], "word_ends": encoded[row][1]} for row in rows], tokenizer.pad_token_id
        )
        inputs = {name: batch[name].to(model.device) for name in ("input_ids", "attention_mask", "word_ends")}
        output = model.parse(**inputs, **options)
        for row, hypotheses in zip(rows, output.spans, strict=True):
            trees[row] = fold_tokens(hypotheses[0], encoded[row][1])
    model.train(training)
    return trees


def score_trees(trees: Sequence[Sequence[Span]], treebank: Treebank, convention: str = "gpst") -> ParsingScores:
    """Unlabeled F1 of trees over the words of a treebank, by a convention of `hf_synlm.evaluation.parsing`."""
    return unlabeled_f1(trees, treebank.spans, treebank.lengths, convention, keep=treebank.keep)


def score_baselines(treebank: Treebank, convention: str = "gpst") -> dict[str, ParsingScores]:
    """The same for left, right, balanced and random trees, and for the binarized gold trees."""
    return branching_baselines(treebank.spans, treebank.lengths, convention, keep=treebank.keep)


def score_table(scores: dict[str, ParsingScores], treebank: Treebank) -> str:
    """Table of scores for a terminal, with the convention named in its last line."""
    width = max(map(len, scores))
    lines = [f"{'unlabeled F1 (%)':<{width + 2}}{'sentence':>10}{'corpus':>10}"]
    lines += [
        f"  {name:<{width}}{100 * score.sentence_f1:>10.2f}{100 * score.corpus_f1:>10.2f}"
        for name, score in scores.items()
    ]
    first = next(iter(scores.values()))
    lines.append(f"  {first.num_sentences} sentences; {treebank.convention}; convention {first.convention}")
    return "\n".join(lines)


def score_numbers(scores: dict[str, ParsingScores]) -> dict[str, dict[str, float]]:
    """Scores in percent, for JSON."""
    return {
        name: {"sentence_f1": round(100 * score.sentence_f1, 2), "corpus_f1": round(100 * score.corpus_f1, 2)}
        for name, score in scores.items()
    }
