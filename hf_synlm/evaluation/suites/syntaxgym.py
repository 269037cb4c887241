# SPDX-License-Identifier: Apache-2.0
"""SyntaxGym: test suites of Hu et al. 2020, with their predictions evaluated in full.

An item of a suite has several conditions; a condition is a sentence cut into regions. A prediction compares the
surprisals of regions across the conditions of one item. The accuracy of a suite is the share of the items for which its
prediction holds. The accuracy of a circuit is the mean over its suites.

The sentence is the contents of its regions, joined by single spaces. The surprisal of a region is the sum over its
words (in bits), 0 for an empty region. If a suite has several predictions, its accuracy is that of the first, as in the
published numbers (the second of fgd_hierarchy asks for surprisals to be equal). All are reported.

Source: Jennifer Hu, Jon Gauthier, Peng Qian, Ethan Wilcox, Roger Levy: A Systematic Assessment of Syntactic
Generalization in Neural Language Models, ACL 2020; suites: cpllab/syntactic-generalization (MIT). They are not part of
this package.
"""

import json
import operator
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_synlm.data.text import PathLike, check_list, errors_at, open_text
from hf_synlm.evaluation.results import EvaluationResult, Row, describe_files
from hf_synlm.evaluation.suites.formulas import Formula
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import NATS, score_words
from hf_synlm.evaluation.text.text_items import TextItem, find_files

_LICENSING = [f"npi_{clause}_{word}" for clause in ("orc", "src") for word in ("any", "ever")] + [
    f"reflexive_{clause}_{gender}" for clause in ("orc", "prep", "src") for gender in ("fem", "masc")
]
CIRCUITS: dict[str, tuple[str, ...]] = {
    "Agreement": ("number_orc", "number_prep", "number_src"),
    "Licensing": tuple(_LICENSING),
    "Garden-Path Effects": ("mvrr", "mvrr_mod", "npz_ambig", "npz_ambig_mod", "npz_obj", "npz_obj_mod"),
    "Gross Syntactic State": (
        "subordination", "subordination_orc-orc", "subordination_pp-pp", "subordination_src-src",
    ),
    "Center Embedding": ("center_embed", "center_embed_mod"),
    "Long-Distance Dependencies": ("cleft", "cleft_modifier", "fgd_hierarchy", "fgd_object", "fgd_pp", "fgd_subject"),
}  # fmt: skip
"""Circuit -> its suites, 31 in all. Its score is their mean."""
_METRICS = {
    "sum": sum,
    "mean": lambda values: statistics.fmean(values) if values else 0.0,
    "median": lambda values: statistics.median(values) if values else 0.0,
    "range": lambda values: max(values, default=0.0) - min(values, default=0.0),
    "max": lambda values: max(values, default=0.0),
    "min": lambda values: min(values, default=0.0),
}


# How messages call the types of JSON.
_KINDS: dict[type, str] = {dict: "an object, {...}", list: "a list, [...]", str: 'a text, "..."'}


@dataclass(frozen=True)
class Sentence:
    """One condition of an item: its regions' numbers and words."""

    condition: str
    regions: tuple[tuple[int, tuple[str, ...]], ...]

    @property
    def text(self) -> str:
        """The regions joined by single spaces, empty ones left out."""
        return " ".join(word for _, words in self.regions for word in words)


@dataclass(frozen=True)
class Suite:
    """A test suite.

    Attributes:
        name: name of the suite.
        metric: how the surprisals of a region's tokens are combined.
        region_names: names of regions -> numbers.
        predictions: formulas.
        items: per item its number and its sentences.
    """

    name: str
    metric: str
    region_names: dict[str, int]
    predictions: tuple[Formula, ...]
    items: tuple[tuple[int, tuple[Sentence, ...]], ...]


def circuit_of(suite: str) -> str | None:
    """Circuit of a suite of Hu et al. 2020, None for other suites."""
    return next((circuit for circuit, names in CIRCUITS.items() if suite in names), None)


def load_suite(path: PathLike) -> Suite:
    """Read a suite in SyntaxGym's JSON format.

    Args:
        path: the file.

    Returns:
        The suite, checked: every item has all conditions and regions that its predictions name.

    Raises:
        ValueError: the file is not a valid suite; the message says where.
    """
    with errors_at(str(path)):
        try:
            with open_text(path) as file:
                data = json.load(file)
        except OSError as error:
            raise ValueError(f"it cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:  # no text, no JSON, or brackets without end
            raise ValueError(f"it is not JSON: {error}") from error
        return _suite(data)


def _suite(data: Any) -> Suite:
    meta, regions = _part(data, "meta", dict), _part({"region_meta": {}, **data}, "region_meta", dict)
    metric = meta.get("metric", "sum")
    if not isinstance(metric, str) or metric not in _METRICS:
        raise ValueError(f"metric {metric!r} is unknown: choose one of {', '.join(_METRICS)}")
    names = {str(title): _whole_number(number, "region_meta") for number, title in regions.items()}
    formulas = []
    for number, prediction in enumerate(_part(data, "predictions", list)):
        with errors_at(f"prediction {number}"):
            if (kind := _part(prediction, "type", str)) != "formula":
                raise ValueError(f"its type is {kind!r}: only formulas can be evaluated")
            formulas.append(Formula(_part(prediction, "formula", str)))
    items: dict[int, tuple[Sentence, ...]] = {}
    for place, item in enumerate(_part(data, "items", list)):
        with errors_at(f"items[{place}]"):
            number = _whole_number(_part(item, "item_number"), "item_number")
        with errors_at(f"item {number}"):
            if number in items:
                raise ValueError("it stands there twice: delete one, or give it a number of its own")
            items[number] = _sentences(item)
            conditions = {one.condition: {region for region, _ in one.regions} for one in items[number]}
            for formula in formulas:
                formula.check(conditions, names)
    if not formulas or not items:
        raise ValueError(f"it has {len(formulas)} predictions and {len(items)} items: it needs one of each")
    return Suite(_part(meta, "name", str), metric, names, tuple(formulas), tuple(items.items()))


def _sentences(item: Any) -> tuple[Sentence, ...]:
    """The conditions of an item."""
    found: dict[str, Sentence] = {}
    for condition in _part(item, "conditions", list):
        name = str(_part(condition, "condition_name"))
        if name in found:
            raise ValueError(f"it has the condition {name!r} twice: delete one, or name it otherwise")
        regions: dict[int, tuple[str, ...]] = {}
        with errors_at(f"condition {name!r}"):
            for region in _part(condition, "regions", list):
                number = _whole_number(_part(region, "region_number"), "region_number")
                if number in regions:
                    raise ValueError(f"it has the region {number} twice: give every region a number of its own")
                regions[number] = tuple(_part(region, "content", str).split())
            if not any(regions.values()):
                raise ValueError("its sentence has no words: fill a region, or leave the item out")
        found[name] = Sentence(name, tuple(regions.items()))
    return tuple(found.values())


def _part(value: Any, name: str, kind: type = object) -> Any:
    """A field of an object of JSON."""
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.60} stands where SyntaxGym has an object with {name!r}")
    if name not in value:
        raise ValueError(f"it is not a suite of SyntaxGym: it lacks {name!r}")
    if not isinstance(value[name], kind):
        raise ValueError(f"{name} is {value[name]!r:.60}: give {_KINDS[kind]}")
    return value[name]


def _whole_number(value: Any, name: str) -> int:
    try:
        return operator.index(int(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r:.60}: give a whole number") from None


def find_suites(place: PathLike, names: Sequence[str] = ()) -> list[Path]:
    """The files of suites in alphabetical order: those of a folder with these names (without .json), or all."""
    return find_files(place, ".json", names, "suite", "cpllab/syntactic-generalization")


def region_surprisals(
    scorer: TextScorer, suites: Sequence[Suite], *, progress: str | None = None
) -> list[list[dict[tuple[str, int], float]]]:
    """Surprisal of every region in bits, per suite and per item: (condition, region number) -> surprisal."""
    return [
        [{place: value for place, (value, _) in regions.items()} for regions in items]
        for items in _score_regions(scorer, suites, progress)
    ]


def _score_regions(
    scorer: TextScorer, suites: Sequence[Suite], progress: str | None
) -> list[list[dict[tuple[str, int], tuple[float, bool]]]]:
    """Surprisal of every region, and whether one of its words is outside the vocabulary."""
    sentences = [sentence for suite in suites for _, group in suite.items for sentence in group]
    items = [TextItem("", sentence.text) for sentence in sentences]
    scores = iter(score_words(scorer, items, tokenize="words", progress=progress))
    results: list[list[dict[tuple[str, int], tuple[float, bool]]]] = []
    for suite in suites:
        measure = _METRICS[suite.metric]
        results.append([])
        for _, group in suite.items:
            values: dict[tuple[str, int], tuple[float, bool]] = {}
            for sentence in group:
                found = next(scores)
                counts, first, place = found.num_tokens.tolist(), 0, 0
                for region, words in sentence.regions:
                    inside = slice(place, place + len(words))
                    size = sum(counts[inside])
                    pieces = [-log_prob / NATS["bits"] for _, log_prob in found.tokens[first : first + size]]
                    values[sentence.condition, region] = measure(pieces), any(found.unknown[inside])
                    first, place = first + size, place + len(words)
            results[-1].append(values)
    return results


def _region_rows(suite: Suite, measured: Sequence[Mapping[tuple[str, int], tuple[float, bool]]]) -> Iterator[Row]:
    """One row per region of every sentence of a suite."""
    names = {number: name for name, number in suite.region_names.items()}
    for (number, group), values in zip(suite.items, measured, strict=True):
        for sentence in group:
            for region, words in sentence.regions:
                surprisal, unknown = values[sentence.condition, region]
                yield {
                    "suite": suite.name, "item": number, "condition": sentence.condition, "region": region,
                    "region_name": names.get(region), "content": " ".join(words), "surprisal_bits": surprisal,
                    "oov": unknown,
                }  # fmt: skip


def _reads_unknown_words(formula: Formula, suite: Suite, regions: Mapping[tuple[str, int], tuple[float, bool]]) -> bool:
    """Whether a region that decides a prediction for an item has a word outside the vocabulary."""
    places = formula.places(suite.region_names)
    return any(
        unknown and ((condition, number) in places or (condition, None) in places)
        for (condition, number), (_, unknown) in regions.items()
    )


def accuracies(suite: Suite, surprisals: Sequence[Mapping[tuple[str, int], float]]) -> list[float]:
    """Share of the items, 0..1, for which each prediction holds; items are given by their surprisals."""
    return [
        statistics.fmean(formula(values, suite.region_names) for values in surprisals) for formula in suite.predictions
    ]


def summary(by_suite: Mapping[str, float]) -> dict[str, float]:
    """Means over suites and circuits, of the accuracy of each suite.

    These are "mean_over_suites" (all given); "mean_31_suites" (those of the paper) and "mean_6_circuits" if all 31 are
    given; and the mean of each circuit whose suites are all given.
    """
    scores = {"mean_over_suites": statistics.fmean(by_suite.values())}
    circuits = {
        circuit: statistics.fmean(by_suite[name] for name in names)
        for circuit, names in CIRCUITS.items()
        if set(names) <= set(by_suite)
    }
    if len(circuits) == len(CIRCUITS):
        scores["mean_31_suites"] = statistics.fmean(by_suite[name] for names in CIRCUITS.values() for name in names)
        scores["mean_6_circuits"] = statistics.fmean(circuits.values())
    return scores | {f"circuit {circuit}": value for circuit, value in circuits.items()}


def evaluate_syntaxgym(
    scorer: TextScorer, paths: Sequence[PathLike], *, options: Mapping[str, Any] | None = None
) -> EvaluationResult:
    """Accuracy of a model on test suites.

    Args:
        scorer: the model.
        paths: files of suites.
        options: further options for the result, such as the seed.

    Returns:
        The result: `summary` and the accuracy of every suite as scores, one row per prediction in `tables`. There,
        `items_with_unknown_words` counts the items in which a region of the formula has a word outside the vocabulary.
        The preference of a model there says little about syntax. Items: one row per region with its surprisal.

    Raises:
        ValueError: two suites of one name, or an error of `load_suite`.

    Cost: one pass over every different sentence; all suites are batched together.
    """
    check_list("paths", paths)
    suites, files = [load_suite(path) for path in paths], describe_files(paths)
    of_name: dict[str, PathLike] = {}
    for suite, path in zip(suites, paths, strict=True):
        if suite.name in of_name:
            raise ValueError(f"{path} and {of_name[suite.name]} have the same name, {suite.name!r}: leave one out")
        of_name[suite.name] = path
    start = time.perf_counter()
    regions = _score_regions(scorer, suites, f"syntaxgym: {scorer.name}")
    seconds = time.perf_counter() - start
    rows: list[Row] = []
    by_suite: dict[str, float] = {}
    for suite, items in zip(suites, regions, strict=True):
        found = accuracies(suite, [{place: value for place, (value, _) in item.items()} for item in items])
        by_suite[suite.name] = found[0]
        for number, (formula, accuracy) in enumerate(zip(suite.predictions, found, strict=True)):
            rows.append({
                "suite": suite.name, "circuit": circuit_of(suite.name), "items": len(suite.items), "prediction": number,
                "accuracy": accuracy,
                "items_with_unknown_words": sum(_reads_unknown_words(formula, suite, item) for item in items),
                "formula": formula.text,
            })  # fmt: skip
    scores = summary(by_suite) | {f"suite {name}": value for name, value in by_suite.items()}
    return EvaluationResult.of(
        scorer,
        "syntaxgym",
        scores,
        {"suite_accuracy": "first prediction", "regions": "joined by single spaces", **(options or {})},
        data={"files": files},
        tables={"Predictions": rows},
        items=[row for suite, measured in zip(suites, regions, strict=True) for row in _region_rows(suite, measured)],
        seconds=seconds,
    )
