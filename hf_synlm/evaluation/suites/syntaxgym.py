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

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_synlm.data.files import find_files, read_json
from hf_synlm.data.text import PathLike, check_list, errors_at
from hf_synlm.evaluation.results import EvaluationResult, Row, describe_files
from hf_synlm.evaluation.suites.formulas import Formula
from hf_synlm.evaluation.text.scoring import TextScorer
from hf_synlm.evaluation.text.surprisal import NATS, WordScores, score_words
from hf_synlm.evaluation.text.text_items import TextItem

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
_METRICS: dict[str, Callable[[list[float]], float]] = {
    "sum": sum, "mean": statistics.fmean, "median": statistics.median, "max": max, "min": min,
    "range": lambda values: max(values) - min(values),
}  # fmt: skip


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
    data = read_json(path)
    with errors_at(str(path)):
        return _suite(data)


def _suite(data: Any) -> Suite:
    meta, regions = _part(data, "meta", dict), _part({"region_meta": {}, **data}, "region_meta", dict)
    metric = meta.get("metric", "sum")
    if not isinstance(metric, str) or metric not in _METRICS:
        raise ValueError(f"metric {metric!r} is unknown. Choose one of {', '.join(_METRICS)}")
    names = {str(title): _whole_number(number, "region_meta") for number, title in regions.items()}
    formulas = []
    for number, prediction in enumerate(_part(data, "predictions", list)):
        with errors_at(f"prediction {number}"):
            if (kind := _part(prediction, "type", str)) != "formula":
                raise ValueError(f"its type is {kind!r}: only formulas can be evaluated")
            formulas.append(Formula(_part(prediction, "formula", str), names))
    items: dict[int, tuple[Sentence, ...]] = {}
    for place, item in enumerate(_part(data, "items", list)):
        with errors_at(f"items[{place}]"):
            number = _whole_number(_part(item, "item_number"), "item_number")
        with errors_at(f"item {number}"):
            if number in items:
                raise ValueError("it occurs twice. Delete one copy, or give it another number")
            items[number] = _sentences(item)
            conditions = {one.condition: {region for region, _ in one.regions} for one in items[number]}
            for formula in formulas:
                formula.check(conditions)
    if not formulas or not items:
        raise ValueError(f"it has {len(formulas)} predictions and {len(items)} items. Give it at least one of each")
    return Suite(_part(meta, "name", str), metric, names, tuple(formulas), tuple(items.items()))


def _sentences(item: Any) -> tuple[Sentence, ...]:
    """The conditions of an item."""
    found: dict[str, Sentence] = {}
    for condition in _part(item, "conditions", list):
        name = str(_part(condition, "condition_name"))
        if name in found:
            raise ValueError(f"it has the condition {name!r} twice. Delete one copy, or give it another name")
        regions: dict[int, tuple[str, ...]] = {}
        with errors_at(f"condition {name!r}"):
            for region in _part(condition, "regions", list):
                number = _whole_number(_part(region, "region_number"), "region_number")
                if number in regions:
                    raise ValueError(f"it has the region {number} twice. Give every region a number of its own")
                regions[number] = tuple(_part(region, "content", str).split())
            if not any(regions.values()):
                raise ValueError("its sentence has no words: fill a region, or leave the item out")
        found[name] = Sentence(name, tuple(regions.items()))
    return tuple(found.values())


def _part(value: Any, name: str, kind: type = object) -> Any:
    """A field of an object of JSON."""
    if not isinstance(value, dict) or name not in value:
        raise ValueError(f"{value!r:.60} is not part of a SyntaxGym suite, because it lacks {name!r}")
    if not isinstance(value[name], kind):
        raise ValueError(f"{name} is {value[name]!r:.60}. Give {_KINDS[kind]}")
    return value[name]


def _whole_number(value: Any, name: str) -> int:
    try:
        return operator.index(int(value) if isinstance(value, str) else value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} is {value!r:.60}. Give a whole number") from None


def find_suites(place: PathLike, names: Sequence[str] = ()) -> list[Path]:
    """The files of suites in alphabetical order: those of a folder with these names (without .json), or all."""
    return find_files(place, ".json", names, "suite", "cpllab/syntactic-generalization")


def score_regions(scorer: TextScorer, suites: Sequence[Suite], progress: str | None = None) -> list[list[list[Row]]]:
    """Rows of regions with surprisal (bits), and whether a word is outside the vocabulary; per suite and item."""
    sentences = [sentence for suite in suites for _, group in suite.items for sentence in group]
    items = [TextItem("", sentence.text) for sentence in sentences]
    scores = iter(score_words(scorer, items, tokenize="words", progress=progress))
    return [
        [
            [row for sentence in group for row in _region_rows(suite, number, sentence, next(scores))]
            for number, group in suite.items
        ]
        for suite in suites
    ]


def _region_rows(suite: Suite, item: int, sentence: Sentence, found: WordScores) -> Iterator[Row]:
    """One row per region of a sentence of a suite."""
    names, counts = {number: name for name, number in suite.region_names.items()}, found.num_tokens.tolist()
    first = place = 0
    for region, words in sentence.regions:
        inside = slice(place, place + len(words))
        size = sum(counts[inside])
        pieces = [-log_prob / NATS["bits"] for _, log_prob in found.tokens[first : first + size]]
        yield {
            "suite": suite.name, "item": item, "condition": sentence.condition, "region": region,
            "region_name": names.get(region), "content": " ".join(words),
            "surprisal_bits": _METRICS[suite.metric](pieces) if pieces else 0.0, "oov": any(found.unknown[inside]),
        }  # fmt: skip
        first, place = first + size, place + len(words)


def _reads_unknown_words(formula: Formula, item: Sequence[Row]) -> bool:
    """Whether a region that decides a prediction for an item has a word outside the vocabulary."""
    places = formula.regions()
    return any(
        row["oov"] and not places.isdisjoint({(row["condition"], n) for n in (row["region"], None)}) for row in item
    )


def surprisals_of(item: Sequence[Row]) -> dict[tuple[str, int], float]:
    """The surprisals of an item's rows, as a formula takes them."""
    return {(row["condition"], row["region"]): row["surprisal_bits"] for row in item}


def accuracies(suite: Suite, surprisals: Sequence[Mapping[tuple[str, int], float]]) -> list[float]:
    """Share of the items, 0..1, for which each prediction holds; items are given by their surprisals."""
    return [statistics.fmean(map(formula, surprisals)) for formula in suite.predictions]


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
        In these items, the model's preference says little about syntax. Items: one row per region with its surprisal.

    Raises:
        ValueError: two suites of one name, or an error of `load_suite`.

    Cost: one pass over every different sentence; all suites are batched together.
    """
    check_list("paths", paths)
    suites, files = [load_suite(path) for path in paths], describe_files(paths)
    of_name: dict[str, PathLike] = {}
    for suite, path in zip(suites, paths, strict=True):
        if suite.name in of_name:
            raise ValueError(f"{path} and {of_name[suite.name]} have the same name, {suite.name!r}. Leave one out")
        of_name[suite.name] = path
    start = time.perf_counter()
    regions = score_regions(scorer, suites, f"syntaxgym: {scorer.name}")
    seconds = time.perf_counter() - start
    rows: list[Row] = []
    by_suite: dict[str, float] = {}
    for suite, items in zip(suites, regions, strict=True):
        found = accuracies(suite, list(map(surprisals_of, items)))
        by_suite[suite.name] = found[0]
        for number, (formula, accuracy) in enumerate(zip(suite.predictions, found, strict=True)):
            rows.append({
                "suite": suite.name, "circuit": circuit_of(suite.name), "items": len(suite.items), "prediction": number,
                "accuracy": accuracy,
                "items_with_unknown_words": sum(_reads_unknown_words(formula, item) for item in items),
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
        items=[row for items in regions for item in items for row in item],
        seconds=seconds,
    )
