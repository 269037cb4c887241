# SPDX-License-Identifier: Apache-2.0
"""Minimal pairs: BLiMP, and other pairs of sentences. A model should prefer the first of a pair.

A pair counts if the good sentence has the higher log-probability as a whole (Warstadt et al. 2020: "full-sentence
method"); equal ones do not. These are ties. "accuracy_ties_right" counts them as right, as lm-eval does. Sentences that
occur in several pairs are scored once.

Source: Alex Warstadt, Alicia Parrish, Haokun Liu, Anhad Mohananey, Wei Peng, Sheng-Fu Wang, Samuel R. Bowman: BLiMP,
TACL 2020 (data: CC BY 4.0, not part of this package); Rebecca Marvin, Tal Linzen: Targeted Syntactic Evaluation of
Language Models, EMNLP 2018.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hf_synlm.data.files import find_files
from hf_synlm.data.text import PathLike, Tokenization, check_list
from hf_synlm.evaluation.results import EvaluationResult, Row, describe_files
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import NATS
from hf_synlm.evaluation.text.tables import file_format, need_columns, read_rows
from hf_synlm.evaluation.text.tree_files import Proposals


@dataclass(frozen=True)
class MinimalPair:
    """Two sentences, the first of which is better.

    Attributes:
        good: the better sentence.
        bad: the other one.
        group: what the pair tests (BLiMP: the paradigm).
        phenomenon: group of groups.
        number: number of its row in the file.
        columns: the other columns of its table.
    """

    good: str
    bad: str
    group: str = "all"
    phenomenon: str | None = None
    number: int | None = field(default=None, compare=False)
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)


class _ScoredPair(NamedTuple):
    """A pair with the log-probabilities of its sentences in nats."""

    pair: MinimalPair
    good: float
    bad: float
    has_unknown_words: bool

    def row(self) -> Row:
        """What is written of every pair."""
        return {
            "pair": self.pair.number, "group": self.pair.group, "phenomenon": self.pair.phenomenon,
            "sentence_good": self.pair.good, "sentence_bad": self.pair.bad, "logprob_good_nats": self.good,
            "logprob_bad_nats": self.bad, "correct": self.good > self.bad, "oov": self.has_unknown_words,
            **self.pair.columns,
        }  # fmt: skip


def read_pairs(
    path: PathLike,
    *,
    good_column: str = "sentence_good",
    bad_column: str = "sentence_bad",
    group_column: str | None = None,
    phenomenon_column: str | None = None,
    keep_equal: bool = False,
    remedy: str = "Name the columns that have it (--good-column, --bad-column, --group-column).",
) -> list[MinimalPair]:
    """Read minimal pairs from TSV, CSV or JSON lines.

    Args:
        path: the file; its ending tells the format: .tsv, .csv or .jsonl.
        good_column: column of the better sentences.
        bad_column: column of the others.
        group_column: column of what the pairs test; None = one group.
        phenomenon_column: column of groups of groups; None = there are none.
        keep_equal: keep pairs of two equal sentences, which are ties.
        remedy: what to do about a column that is missing.

    Returns:
        The pairs in the order of the file.

    Raises:
        ValueError: a missing column or value, an empty sentence, two equal sentences, plain text.
    """
    kind = file_format(path)
    if kind == "txt":
        raise ValueError(f"{path} does not end in .tsv, .csv or .jsonl. Save the pairs in one of these formats")
    rows = list(read_rows(path, kind))
    groups = [name for name in (group_column, phenomenon_column) if name]
    for row in rows:  # numbers may name groups
        row |= {name: str(row[name]) for name in groups if isinstance(row.get(name), (int, float))}
    need_columns(path, rows, [good_column, bad_column, *groups], remedy)
    pairs = []
    for number, row in enumerate(rows, 1):
        good, bad = row[good_column], row[bad_column]
        if not good.strip() or not bad.strip():
            raise ValueError(f"{path}: data row {number} has an empty sentence. Delete the row")
        if good.split() == bad.split() and not keep_equal:
            raise ValueError(f"{path}: data row {number} has the same sentence twice, {good!r:.60}. Delete the row")
        group = row[group_column] if group_column else "all"
        used = (good_column, bad_column, *groups)
        more = {name: value for name, value in row.items() if name not in used}
        phenomenon = row[phenomenon_column] if phenomenon_column else None
        pairs.append(MinimalPair(good, bad, group, phenomenon, number, more))
    return pairs


def first_pairs(pairs: Sequence[MinimalPair], limit: int | None) -> list[MinimalPair]:
    """The first `limit` pairs of each group, in order; None = all."""
    seen: defaultdict[tuple[str | None, str], Iterator[int]] = defaultdict(count)
    return [pair for pair in pairs if limit is None or next(seen[pair.phenomenon, pair.group]) < limit]


def find_blimp(place: PathLike, paradigms: Sequence[str] = ()) -> list[Path]:
    """The files of paradigms in alphabetical order: those of a folder with these names (without .jsonl), or all."""
    return find_files(place, ".jsonl", paradigms, "paradigm", "alexwarstadt/blimp, folder data")


def read_blimp(path: PathLike) -> list[MinimalPair]:
    """Pairs of a file of BLiMP by `UID` and `linguistics_term`; as in the paper, s-selection is argument structure.

    Seven of its 67,000 pairs hold one sentence twice: they are kept, as in published scores.
    """
    remedy = "Score files with other columns by `synlm evaluate pairs`, which names them."
    pairs = read_pairs(path, group_column="UID", phenomenon_column="linguistics_term", keep_equal=True, remedy=remedy)
    merged = {"s-selection": "argument_structure"}
    return [replace(pair, phenomenon=merged.get(pair.phenomenon or "", pair.phenomenon)) for pair in pairs]


@torch.no_grad()
def score_sentences(
    scorer: TextScorer,
    sentences: Sequence[str],
    places: Sequence[str],
    end: bool = False,
    progress: str | None = None,
    tokenize: Tokenization | None = None,
) -> list[tuple[float, bool]]:
    """Log-probability of each sentence in nats, and whether it has a word outside the vocabulary.

    Tokens that nothing predicts are left out, and the end unless it is asked for; `places` name sentences in messages.
    """
    texts = scorer.encode([sentence.split() for sentence in sentences], tokenize)
    for place, sentence, text in zip(places, sentences, texts, strict=True):
        if not text.ids:
            raise ValueError(f"{place}: the sentence {sentence!r} has no tokens. Leave this sentence out")
    scores = scorer.score(texts, end=end, progress=progress)
    return [
        (float(found.log_probs.nansum()) + ((found.end or 0.0) if end else 0.0), bool(text.unknown))
        for found, text in zip(scores, texts, strict=True)
    ]


def evaluate_pairs(
    scorer: TextScorer,
    pairs: Sequence[MinimalPair],
    *,
    task: str = "pairs",
    end: bool = False,
    data: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    proposals: Proposals | None = None,
    tokenize: Tokenization | None = None,
) -> EvaluationResult:
    """Share of the pairs whose good sentence is more probable.

    Args:
        scorer: the model.
        pairs: the pairs.
        task: name of the result.
        end: count the end of the sentences.
        data: description of the data for results.
        options: further options for the result, such as the seed.
        proposals: trees of all sentences; a sentence's probability is then the sum over its trees, end included.
        tokenize: how the model reads words, see `encode_sentences`; None = as its `text_style` says.

    Returns:
        The result. Its scores are "accuracy" (over all pairs), "accuracy_ties_right" (the same, but a tie counts, as in
        lm-eval), the number of "ties", "mean_over_groups", and if pairs have phenomena "mean_over_phenomena" (mean over
        phenomena of the mean over their groups) and the accuracy of each. Its table has one row per group, its items
        one row per pair with both log-probabilities.

    Raises:
        ValueError: a sentence has no tokens, or (with proposals) no tree, or `tokenize` is given with proposals.

    Cost: one pass over every different sentence.
    """
    check_list("pairs", pairs, "MinimalPair(good, bad)")
    start = time.perf_counter()
    both = [sentence for pair in pairs for sentence in (pair.good, pair.bad)]
    if proposals is None:
        settings: dict[str, Any] = {"end_of_text": scorer.end_of_text if end else "not counted"}
        settings["tokenize"] = scorer.tokenization(tokenize)
        places = [f"pair {pair.number or k} ({pair.group})" for k, pair in enumerate(pairs, 1) for _ in range(2)]
        found = score_sentences(scorer, both, places, end, f"{task}: {scorer.name}", tokenize)
    else:
        settings = proposals.settings(scorer, tokenize)
        data = {**(data or {}), "proposals": proposals.files}
        sums = proposals.score(scorer, both, f"{task}: {scorer.name}")
        found = [(score.log_prob, score.has_unknown_words) for score in sums]
    seconds = time.perf_counter() - start
    scored = [
        _ScoredPair(pair, good, bad, unknown_good or unknown_bad)
        for pair, (good, unknown_good), (bad, unknown_bad) in zip(pairs, found[::2], found[1::2], strict=True)
    ]
    rows = _rows_of_groups(scored)
    return EvaluationResult.of(
        scorer,
        task,
        _means(scored, rows),
        {**settings, **(options or {})},
        data={"pairs": len(pairs), **(data or {})},
        tables={"Groups": rows},
        items=[one.row() for one in scored],
        seconds=seconds,
    )


def _rows_of_groups(scored: Sequence[_ScoredPair]) -> list[Row]:
    groups: dict[tuple[str | None, str], list[_ScoredPair]] = {}
    for one in scored:
        groups.setdefault((one.pair.phenomenon, one.pair.group), []).append(one)
    return [
        {
            "phenomenon": phenomenon,
            "group": group,
            "pairs": len(members),
            "accuracy": statistics.fmean(one.good > one.bad for one in members),
            "mean_difference_bits": statistics.fmean(one.good - one.bad for one in members) / NATS["bits"],
            "ties": sum(one.good == one.bad for one in members),
            "pairs_with_unknown_words": sum(one.has_unknown_words for one in members),
        }
        for (phenomenon, group), members in groups.items()
    ]


def _means(scored: Sequence[_ScoredPair], rows: Sequence[Row]) -> dict[str, float]:
    """Accuracy over pairs, over groups and over phenomena, and that of each phenomenon."""
    scores = {
        "accuracy": statistics.fmean(one.good > one.bad for one in scored),
        "accuracy_ties_right": statistics.fmean(one.good >= one.bad for one in scored),
        "ties": sum(one.good == one.bad for one in scored),
        "mean_over_groups": statistics.fmean(row["accuracy"] for row in rows),
    }
    phenomena: dict[str, list[float]] = {}
    for row in rows:
        if row["phenomenon"] is not None:
            phenomena.setdefault(f"phenomenon {row['phenomenon']}", []).append(row["accuracy"])
    means = {name: statistics.fmean(accuracies) for name, accuracies in phenomena.items()}
    return scores | ({"mean_over_phenomena": statistics.fmean(means.values())} if means else {}) | means


def evaluate_blimp(
    scorer: TextScorer,
    paths: Sequence[PathLike],
    *,
    limit: int | None = None,
    end: bool = False,
    options: Mapping[str, Any] | None = None,
    proposals: Proposals | None = None,
    tokenize: Tokenization | None = None,
) -> EvaluationResult:
    """Accuracy on BLiMP: per paradigm ("group"), per phenomenon, and the mean over the paradigms.

    Args:
        scorer: the model.
        paths: files of paradigms.
        limit: number of pairs taken from each paradigm; None = all.
        end: count the end of the sentences.
        options: further options for the result, such as the seed.
        proposals: see `evaluate_pairs`.
        tokenize: see `evaluate_pairs`.

    Returns:
        The result of `evaluate_pairs`. The published mean is "mean_over_groups", if all 67 paradigms with all their
        pairs were taken. "paradigms" in the options says how many were.
    """
    check_list("paths", paths)
    data = {"files": describe_files(paths)}
    pairs = [pair for path in paths for pair in read_blimp(path)[:limit]]
    settings = {"paradigms": len(paths), "pairs_per_paradigm": limit or "all", **(options or {})}
    return evaluate_pairs(
        scorer, pairs, task="blimp", end=end, data=data, options=settings, proposals=proposals, tokenize=tokenize
    )
