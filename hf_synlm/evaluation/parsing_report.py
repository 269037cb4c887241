"""Everything that is reported about the trees of one or several runs on a treebank, as numbers and tables.

F1 by a named convention with the four common variants, the trees that need no model, recall by label, width and height,
shapes of trees, and the agreement of several runs. Percent throughout, as in publications.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from hf_synlm.data.parsed import ParsedSentence
from hf_synlm.evaluation.evalb import COLLINS, EvalbParameters, EvalbScores, EvalbTree, labeled_f1
from hf_synlm.evaluation.parsing import ParsingConvention, ParsingScores, apply_keep, binarized_gold, resolve_convention
from hf_synlm.evaluation.parsing_analysis import (
    Recall,
    agreement,
    recall_by_height,
    recall_by_label,
    recall_by_length,
    tree_statistics,
)
from hf_synlm.evaluation.treebank_parsing import Treebank, best_trees, match_treebank, score_baselines, score_trees
from hf_synlm.trees import Span

Row = dict[str, Any]


def report_parsing(
    treebank: Treebank,
    runs: Mapping[str, Sequence[ParsedSentence]],
    convention: str | ParsingConvention = "gpst",
    **changes: Any,
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """Score the trees of one or several runs without their labels; all numbers are of sentences that are scored.

    Args:
        treebank: the gold trees.
        runs: per run, by its name, the parsed sentences of the treebank in order.
        convention: as in `unlabeled_f1`.
        **changes: as in `unlabeled_f1`.

    Returns:
        Scores by name, means where there are several runs (then also `f1_standard_deviation` and `agreement`); and
        tables by title.

    Raises:
        ValueError: no runs, trees that are not over the words of the treebank, or as `unlabeled_f1`.
    """
    if not runs:
        raise ValueError("there are no trees to score: give at least one run")
    convention = resolve_convention(convention, **changes)
    for name, parsed in runs.items():
        match_treebank(parsed, treebank, name)
    numbers_scored = treebank.numbers_scored(convention)
    treebank = treebank.select(numbers_scored)
    runs = {name: [parsed[number] for number in numbers_scored] for name, parsed in runs.items()}
    trees = {name: best_trees(parsed) for name, parsed in runs.items()}
    scores = {name: score_trees(found, treebank, convention) for name, found in trees.items()}
    baselines = score_baselines(treebank, convention)
    lengths = [len(sentence.words) for sentence in treebank.scored()]
    kept = {name: _scored_part(found, treebank) for name, found in trees.items()}
    shapes = _shapes(kept, treebank, lengths)
    numbers = [_numbers(score, shapes[name]) for name, score in scores.items()]
    values = {name: statistics.fmean(each[name] for each in numbers) for name in numbers[0]}
    values["num_without_tree"] = statistics.fmean(sum(not s.hypotheses for s in parsed) for parsed in runs.values())
    if len(runs) > 1:
        values["f1_standard_deviation"] = statistics.stdev(each["f1"] for each in numbers)
        agreed = agreement(list(trees.values()), treebank.lengths, convention, keep=treebank.keep)
        values["agreement"] = round(100 * agreed.mean, 2)
    first = next(iter(kept))
    tables = {
        "unlabeled F1 (%)": [_f1_row(name, score) for name, score in (scores | baselines).items()],
        "shape of the trees": [{"trees": name, **shape} for name, shape in shapes.items()],
        **_recall_tables(kept[first], treebank, lengths, convention, "" if len(runs) == 1 else f", {first}"),
    }
    return values, tables


def _numbers(score: ParsingScores, shape: Mapping[str, float]) -> dict[str, float]:
    pooled = {"precision": round(100 * score.precision, 2), "recall": round(100 * score.recall, 2)}
    return {**score.numbers(), **pooled, **shape, "num_sentences": score.num_sentences}


def _f1_row(name: str, score: ParsingScores) -> Row:
    numbers = score.numbers()
    return {
        "trees": name,
        "F1 by the convention": numbers["f1"],
        "sentence, without sentence span": numbers["sentence_drop"],
        "corpus, without sentence span": numbers["corpus_drop"],
        "sentence, with sentence span": numbers["sentence_count"],
        "corpus, with sentence span": numbers["corpus_count"],
    }


def _scored_part(trees: Sequence[Sequence[Span]], treebank: Treebank) -> list[list[Span]]:
    """Spans over the words that count, of two or more words."""
    return [[(i, j) for i, j in spans if j - i > 1] for spans in apply_keep(trees, treebank.lengths, treebank.keep)]


def _shapes(
    kept: Mapping[str, list[list[Span]]], treebank: Treebank, lengths: Sequence[int]
) -> dict[str, dict[str, float]]:
    gold = _scored_part(treebank.spans, treebank)
    binary = [binarized_gold(spans, length) for spans, length in zip(gold, lengths, strict=True)]
    return {
        name: tree_statistics(trees, lengths).numbers()
        for name, trees in {**kept, "gold": gold, "binarized gold": binary}.items()
    }


def _recall_tables(
    trees: Sequence[Sequence[Span]],
    treebank: Treebank,
    lengths: Sequence[int],
    convention: ParsingConvention,
    of_run: str,
) -> dict[str, list[Row]]:
    gold = _scored_part(treebank.spans, treebank)
    by_label = recall_by_label(trees, treebank.scored(), convention)
    classes: dict[str, Mapping[Any, Recall]] = {
        "width": recall_by_length(trees, gold, lengths, convention),
        "height": recall_by_height(trees, gold, lengths, convention),
    }
    if any(label for label in by_label):
        classes = {"label": by_label, **classes}
    return {
        f"recall by {name} (%){of_run}": [
            {name: key, "recall": round(100 * recall.value, 2), "found": recall.found, "gold": recall.total}
            for key, recall in found.items()
        ]
        for name, found in classes.items()
    }


def report_evalb(
    treebank: Treebank,
    runs: Mapping[str, Sequence[ParsedSentence]],
    parameters: EvalbParameters = COLLINS,
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """Score the trees of one or several runs as EVALB does; words carry the gold tags.

    A sentence without a tree counts as one without brackets: its gold brackets are missed.

    Args:
        treebank: the gold trees; EVALB leaves words out by their tags itself.
        runs: per run, by its name, the parsed sentences of the treebank in order.
        parameters: what to count; `labeled=False` for trees without labels.

    Returns:
        Scores by name in percent, means where there are several runs; and tables by title.

    Raises:
        ValueError: trees that are not over the words of the treebank, trees without labels where labels count, or no
            sentence that EVALB scores.
    """
    if not runs:
        raise ValueError("there are no trees to score: give at least one run")
    gold = [EvalbTree.from_sentence(sentence) for sentence in treebank.sentences]
    scores: dict[str, EvalbScores] = {}
    for name, parsed in runs.items():
        match_treebank(parsed, treebank, name)
        scores[name] = labeled_f1([_brackets(sentence, name, parameters) for sentence in parsed], gold, parameters)
        if not scores[name].overall.num_valid:
            raise ValueError(
                f"{name}: EVALB scores none of the {len(gold)} sentences, because they have no tree, or are words that "
                "its parameters delete"
            )
    rows = [
        {
            "trees": name,
            "sentences": part.name,
            **{key: round(100 * getattr(part, key), 2) for key in ("recall", "precision", "f1", "complete_match")},
            "average_crossing": round(part.average_crossing, 2),
            "num_valid": part.num_valid,
        }
        for name, score in scores.items()
        for part in (score.overall, score.short)
    ]
    overall = [row for row in rows if row["sentences"] == "All"]
    keys = ("f1", "precision", "recall", "complete_match", "average_crossing", "num_valid")
    values = {key: statistics.fmean(row[key] for row in overall) for key in keys}
    if len(runs) > 1:
        values["f1_standard_deviation"] = statistics.stdev(row["f1"] for row in overall)
    return values, {f"{'labeled' if parameters.labeled else 'unlabeled'} brackets by EVALB (%)": rows}


def _brackets(sentence: ParsedSentence, name: str, parameters: EvalbParameters) -> tuple[Sequence[str], Sequence[Span]]:
    if not sentence.hypotheses:
        return (), ()
    tree = sentence.hypotheses[0]
    if tree.labels is None and parameters.labeled:
        raise ValueError(f"{name}: the trees have no labels; score them without (labeled=False, --unlabeled)")
    return tree.labels or ["X"] * len(tree.spans), tree.spans
