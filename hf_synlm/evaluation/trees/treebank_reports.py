# SPDX-License-Identifier: Apache-2.0
"""Scores and tables of the trees of one or several runs over a treebank: unlabeled F1, EVALB, comparisons."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from hf_synlm.data.parsed import Hypothesis, ParsedSentence
from hf_synlm.evaluation.results import F1_TITLES, Row
from hf_synlm.evaluation.trees.evalb import COLLINS, EvalbParameters, EvalbScores, EvalbSummary, EvalbTree, labeled_f1
from hf_synlm.evaluation.trees.gold_treebank import Treebank, best_trees, match_treebank
from hf_synlm.evaluation.trees.parsing import (
    ParsingConvention,
    ParsingScores,
    binarized_gold,
    branching_baselines,
    unlabeled_f1,
)
from hf_synlm.evaluation.trees.parsing_analysis import (
    Recall,
    compare_parses,
    compare_scores,
    pair_rows,
    pairwise_f1,
    recall_by_label,
    recall_by_size,
    tree_statistics,
)
from hf_synlm.trees.spans import Span, right_branching

RIGHT = "right branching"


def report_parsing(
    treebank: Treebank,
    runs: Mapping[str, Sequence[ParsedSentence]],
    convention: ParsingConvention,
    *,
    average: Sequence[ParsedSentence] | None = None,
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """Score the trees of one or several runs without their labels; all numbers are of sentences that are scored.

    Args:
        treebank: the gold trees.
        runs: per run, by its name, the parsed sentences of the treebank in order.
        convention: what is counted.
        average: the average of the runs, which is scored beside them as `consensus_f1`.

    Returns:
        Scores by name, means if there are several runs (then also `f1_standard_deviation` and `agreement`); and tables
        by title.

    Raises:
        ValueError: trees that are not over the words of the treebank, or as `unlabeled_f1`.
    """
    count, runs = len(runs), _with_average(runs, average)
    treebank, runs, gold, lengths = _scored(treebank, runs, convention)
    trees = {name: treebank.over_kept_words(best_trees(parsed)) for name, parsed in runs.items()}
    scores = {name: unlabeled_f1(found, gold, lengths, convention) for name, found in trees.items()}
    baselines = branching_baselines(gold, lengths, convention)
    binary = [binarized_gold(spans, length) for spans, length in zip(gold, lengths, strict=True)]
    shown: dict[str, Sequence[Sequence[Span]]] = {**trees, "gold": gold, "binarized gold": binary}
    shapes = {
        name: {key: round(value, 2) for key, value in tree_statistics(found, lengths).items()}
        for name, found in shown.items()
    }
    numbers = [_numbers_of_run(score, shapes[name], runs[name]) for name, score in scores.items()]
    pairs = pairwise_f1(list(trees.values()), lengths, convention)
    values = _over_runs(numbers[:count])
    if count > 1:
        values["agreement"] = round(100 * statistics.fmean(f1 for (_, b), f1 in pairs.items() if b < count), 2)
    if average is not None:
        values["consensus_f1"] = numbers[-1]["f1"]
    first = next(iter(trees))
    tables = {
        "unlabeled F1 (%)": [_f1_row(name, score) for name, score in (scores | baselines).items()],
        "shape of the trees": [{"trees": name, **shape} for name, shape in shapes.items()],
        **_recall_tables(trees[first], gold, treebank, convention, "" if len(runs) == 1 else f", {first}"),
    }
    if pairs:
        tables["F1 between the runs (%)"] = pair_rows(list(runs), count, pairs)
    return values, tables


def _scored(
    treebank: Treebank, runs: Mapping[str, Sequence[ParsedSentence]], convention: ParsingConvention
) -> tuple[Treebank, dict[str, list[ParsedSentence]], list[Sequence[Span]], list[int]]:
    """The sentences that are scored: gold ones, those of the runs, and gold spans and lengths of what counts."""
    match_treebank(runs, treebank)
    chosen = treebank.numbers_scored(convention)
    treebank = treebank.select(chosen)
    of_runs = {name: [parsed[number] for number in chosen] for name, parsed in runs.items()}
    return treebank, of_runs, *treebank.scored_trees()


def report_conventions(
    cases: Mapping[str, tuple[Treebank, ParsingConvention | EvalbParameters, Mapping[str, Any]]],
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """F1 of several systems by several conventions, beside right branching, and tests of all differences.

    Args:
        cases: by the name of a convention: the gold trees, the convention, and the run of each system, as in
            `report_parsing` or `report_evalb`. A system may lack a convention.

    Returns:
        F1 in percent by "CONVENTION SYSTEM"; and tables: F1, a row per system; and differences of sentence F1, second
        less first, with p of `permutation_test`, which is not corrected for the number of tests. EVALB is not tested;
        conventions with the same sentence F1 share a row.

    Raises:
        ValueError: as `report_parsing` and `report_evalb`.
    """
    scores: dict[str, dict[str, float]] = {}
    differences: dict[tuple[Any, ...], list[str]] = {}
    for title, (treebank, rule, runs) in cases.items():
        if isinstance(rule, EvalbParameters):
            if not rule.labeled:
                trees = [Hypothesis(tuple(right_branching(length))) for length in treebank.lengths]
                words = map(tuple, treebank.words)
                runs = {**runs, RIGHT: [ParsedSentence(w, (tree,)) for w, tree in zip(words, trees, strict=True)]}
            scores[title] = {name: report_evalb(treebank, {name: run}, rule)[0]["f1"] for name, run in runs.items()}
            continue
        treebank, runs, gold, lengths = _scored(treebank, runs, rule)
        spans_of = {name: treebank.over_kept_words(best_trees(parsed)) for name, parsed in runs.items()}
        spans_of[RIGHT] = [right_branching(length) for length in lengths]
        found = {name: unlabeled_f1(spans, gold, lengths, rule) for name, spans in spans_of.items()}
        scores[title] = {name: score.numbers()["f1"] for name, score in found.items()}
        for first, second in combinations(found, 2):
            row = {"systems": f"{first}, {second}", **compare_scores(found[first], found[second])}
            differences.setdefault(tuple(row.items()), []).append(title)
    names = sorted({name: None for each in scores.values() for name in each}, key=RIGHT.__eq__)
    rows = [{"trees": name, **{title: each.get(name) for title, each in scores.items()}} for name in names]
    values = {f"{title} {name}": value for title, each in scores.items() for name, value in each.items()}
    tested = [{"convention": ", ".join(titles), **dict(row)} for row, titles in differences.items()]
    return values, {"F1 (%)": rows, "differences of sentence F1 (%)": tested}


def _numbers_of_run(
    score: ParsingScores, shape: Mapping[str, float], run: Sequence[ParsedSentence]
) -> dict[str, float]:
    return {
        **score.numbers(),
        "precision": round(100 * score.precision, 2),
        "recall": round(100 * score.recall, 2),
        **shape,
        "num_sentences": score.num_sentences,
        "num_without_tree": sum(not sentence.hypotheses for sentence in run),
    }


def _over_runs(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The numbers of the only run, or the means over several ones, with the standard deviation of F1."""
    if len(numbers) == 1:
        return dict(numbers[0])
    columns = {name: [each[name] for each in numbers] for name in numbers[0]}  # counts that are equal stay counts
    means = {name: found[0] if len(set(found)) == 1 else statistics.fmean(found) for name, found in columns.items()}
    return {**means, "f1_standard_deviation": statistics.stdev(each["f1"] for each in numbers)}


def _f1_row(name: str, score: ParsingScores) -> Row:
    numbers = score.numbers()
    titled = {title: numbers[key] for key, title in F1_TITLES.items()}
    return {"trees": name, **titled, "recall": round(100 * score.recall, 2)}


def _with_average(runs: Mapping[str, Any], average: Sequence[ParsedSentence] | None) -> dict[str, Any]:
    """The runs, and at the end their average under its name in tables."""
    return dict(runs) if average is None else {**runs, "consensus of the runs": average}


def report_comparison(
    treebank: Treebank, systems: Mapping[str, Sequence[ParsedSentence]], convention: ParsingConvention
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """`compare_parses` of two systems, by name: the row of sentence F1 as scores, and all rows as a table."""
    match_treebank(systems, treebank)
    first, second = (_constituents(treebank.over_kept_words(best_trees(parsed))) for parsed in systems.values())
    rows = compare_parses(first, second, treebank.scored(), convention)
    scores = {name: value for name, value in rows[0].items() if name not in ("measure", "of")}
    scores["num_sentences"] = len(treebank.numbers_scored(convention))
    return scores, {"sentence F1 and recall by label (%)": rows}


def _recall_tables(
    trees: Sequence[Sequence[Span]],
    gold: Sequence[Sequence[Span]],
    treebank: Treebank,
    convention: ParsingConvention,
    of_run: str,
) -> dict[str, list[Row]]:
    sentences = treebank.scored()
    trees, gold = _constituents(trees), _constituents(gold)
    classes: dict[str, Mapping[Any, Recall]] = {"label": recall_by_label(trees, sentences, convention)}
    for size in ("width", "height"):
        lengths = [len(sentence.words) for sentence in sentences]
        classes[size] = recall_by_size(trees, gold, lengths, size, convention)
    if not any(classes["label"]):
        del classes["label"]
    return {
        f"recall by {name} (%){of_run}": [
            {name: key, "recall": round(100 * recall.value, 2), "found": recall.found, "gold": recall.total}
            for key, recall in found.items()
        ]
        for name, found in classes.items()
    }


def _constituents(trees: Sequence[Sequence[Span]]) -> list[list[Span]]:
    """The spans of two or more words."""
    return [[(i, j) for i, j in spans if j - i > 1] for spans in trees]


def report_evalb(
    treebank: Treebank,
    runs: Mapping[str, Sequence[ParsedSentence] | EvalbScores],
    parameters: EvalbParameters = COLLINS,
    *,
    average: Sequence[ParsedSentence] | None = None,
) -> tuple[dict[str, float], dict[str, list[Row]]]:
    """Score the trees of one or several runs as EVALB does; words carry the gold tags, and there are no root wrappers.

    A sentence without a tree counts as one without brackets: its gold brackets are missed.

    Args:
        treebank: the gold trees; EVALB itself leaves out words by their tags.
        runs: per run, by its name, the parsed sentences of the treebank in order; or what `evaluate_files` gives for
            trees with tags of their own.
        parameters: what to count; `labeled=False` for trees without labels.
        average: the average of the runs, which is scored beside them as `consensus_f1`.

    Returns:
        Scores by name in percent, means if there are several runs; and tables by title.

    Raises:
        ValueError: trees that are not over the words of the treebank, trees without labels if labels count, or no
            sentence that EVALB scores.
    """
    gold = [EvalbTree.from_sentence(sentence) for sentence in treebank.sentences]
    scores: dict[str, EvalbScores] = {}
    for name, run in _with_average(runs, average).items():
        if isinstance(run, EvalbScores):
            scores[name] = run
        else:
            lacks = parameters.labeled and any(tree.labels is None for one in run for tree in one.hypotheses[:1])
            also = f"{' and --unlabeled' * lacks}. Scores are then not EVALB's. For these, score trees with punctuation"
            match_treebank({name: run}, treebank, also)
            if lacks:
                raise ValueError(f"{name}: the trees have no labels. Score them by --unlabeled")
            scores[name] = labeled_f1([_brackets(sentence) for sentence in run], gold, parameters)
        counted = scores[name].overall
        if not counted.num_valid or counted.num_errors > parameters.max_errors + 1:
            raised = ", or raise MAX_ERROR in a parameter file (--prm)" if counted.num_valid else ""
            raise ValueError(f"{name}: {scores[name].left_out()}. Score trees over the same words{raised}")
    rows = [
        {"trees": name, "sentences": part.name, **_numbers_of_evalb(part)}
        for name, score in scores.items()
        for part in (score.overall, score.short)
    ]
    numbers = [_numbers_of_evalb(score.overall) for score in scores.values()]
    values = _over_runs(numbers[: len(runs)])
    if average is not None:
        values["consensus_f1"] = numbers[-1]["f1"]
    return values, {f"{'labeled' if parameters.labeled else 'unlabeled'} brackets by EVALB (%)": rows}


def _numbers_of_evalb(part: EvalbSummary) -> dict[str, float]:
    return {
        **{key: round(100 * getattr(part, key), 2) for key in ("f1", "precision", "recall", "complete_match")},
        "average_crossing": round(part.average_crossing, 2),
        **{key: getattr(part, key) for key in ("num_valid", "num_skipped", "num_errors")},
    }


def _brackets(sentence: ParsedSentence) -> tuple[Sequence[str], Sequence[Span]]:
    if not sentence.hypotheses:
        return (), ()
    tree = sentence.hypotheses[0]
    return tree.labels or ["X"] * len(tree.spans), tree.spans
