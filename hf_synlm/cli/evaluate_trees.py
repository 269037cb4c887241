# SPDX-License-Identifier: Apache-2.0
"""`synlm evaluate parsing` and `compare`: scores of trees against a treebank."""

import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.data.files import write_text
from hf_synlm.data.parsed import ParsedSentence, TreeStyle, kind_of_trees, lines_of_parses
from hf_synlm.data.text import errors_at, plural, read_lines, read_lines_beside
from hf_synlm.evaluation.results import EvaluationResult, describe_files, estimate_of
from hf_synlm.evaluation.trees.evalb import COLLINS, EvalbParameters, EvalbScores, evaluate_files
from hf_synlm.evaluation.trees.parsing import CONVENTIONS, ParsingConvention, resolve_convention

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.scoring import TextScorer
    from hf_synlm.evaluation.trees.gold_treebank import Treebank

_CONVENTION = (
    "How brackets are counted: gpst (default), prpn, on-lstm, compound-pcfg, compound-pcfg-corpus, palm; or evalb, "
    "as in the program EVALB. If --trees have tags, evalb gives exactly the numbers of this program."
)
# How differences are tested by conventions of unlabeled F1, and by EVALB.
_TESTS = "paired permutations of sentences, p not corrected for the number of tests", "none by evalb"
Limit = Annotated[int | None, typer.Option(min=1, help="Number of sentences to score, from the first on.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingOptions(options.TreebankReading):
    """How gold trees are read, and what counts in the score."""

    convention: str = option(_CONVENTION, default="gpst")
    punctuation: Literal["remove", "ignore", "keep"] | None = option(
        "remove: remove it before parsing (default); ignore: parse it, but do not score it; keep: parse and "
        "score it (default of evalb)."
    )
    punctuation_by: options.PunctuationBy = "tag"
    max_length: int | None = option("Parse and score only sentences of at most this many words.", min=1)
    parameters: Path | None = option(
        "Parameter file of EVALB; default: the values of COLLINS.prm.", name="--prm", **options.INPUT_FILE
    )
    unlabeled: bool = option("evalb: compare brackets without labels.", default=False)

    def rule(self) -> ParsingConvention | EvalbParameters:
        """Return the convention. Raise ValueError for an unknown name, or for options of another convention."""
        if self.convention not in (*CONVENTIONS, "evalb"):
            raise ValueError(f"unknown convention {self.convention!r}. Choose one of {', '.join(CONVENTIONS)}, evalb")
        changes = {} if self.max_length is None else {"max_length": self.max_length}
        if self.convention == "evalb":
            if changes:
                raise ValueError("--max-length does not apply to EVALB. Set CUTOFF_LEN in a parameter file (--prm)")
            counted = COLLINS if self.parameters is None else EvalbParameters.read(self.parameters)
            return dataclasses.replace(counted, labeled=counted.labeled and not self.unlabeled)
        if self.parameters is not None or self.unlabeled:
            raise ValueError(f"--prm and --unlabeled need --convention evalb and do not work with {self.convention}")
        return resolve_convention(self.convention, **changes)

    def treebank(self, path: Path, limit: int | None) -> "Treebank":
        """Read the gold trees. The options say what happens to punctuation."""
        from hf_synlm.evaluation.trees.gold_treebank import load_treebank

        remedy = "recognize punctuation by form (--punctuation-by form), or keep it (--punctuation keep)"
        return load_treebank(path, self.treatment, limit, self.punctuation_by, remedy, **self.reading_all())

    @property
    def treatment(self) -> str:
        """What becomes of punctuation."""
        return self.punctuation or ("keep" if self.convention == "evalb" else "remove")

    def reading_all(self) -> dict[str, Any]:
        """Options for reading gold trees and predicted trees with tags."""
        return {**self.reading(), "keep_functions": self.convention == "evalb"}

    def predicted(self) -> dict[str, Any]:
        """Options for reading predicted trees.

        If gold trees lose punctuation by tag, predicted dependencies lose it, too.
        """
        reading = self.reading_all()
        if self.treatment == "remove" and self.punctuation_by == "tag":
            reading["dependencies"] = {**reading.get("dependencies", {}), "punctuation": "remove"}
        return reading

    def evalb(
        self, rule: ParsingConvention | EvalbParameters, gold: Path, limit: int | None
    ) -> Callable[[Path], EvalbScores] | None:
        """A function that scores files as the program EVALB does, or None if the options differ from EVALB's."""
        if not isinstance(rule, EvalbParameters) or self.punctuation not in (None, "keep") or self.given():
            return None
        is_read = kind_of_trees(gold, read_lines(gold)) == "brackets"
        counted = dataclasses.replace(rule, max_errors=10**9)  # `report_evalb` counts them, and names the file
        return partial(evaluate_files, gold, parameters=counted, max_sentences=limit) if is_read else None

    def describe(self, rule: ParsingConvention | EvalbParameters, bank: "Treebank") -> dict[str, Any]:
        """The options as the result describes them."""
        punctuation = bank.convention
        if isinstance(rule, ParsingConvention):
            convention = rule.describe()
        else:
            convention = f"evalb, {'COLLINS.prm' if self.parameters is None else self.parameters.name}"
            punctuation = "left out as the parameters say" if self.punctuation in (None, "keep") else punctuation
        return {
            "convention": convention,
            "unlabeled": self.unlabeled or None,
            "punctuation": punctuation,
            **self.reading(),
            "unit": "percent",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingByConventions(CountingOptions):
    """How gold trees are read, and what counts in the score by one or several conventions."""

    # The base class has one convention; `each` makes a base class of each.
    convention: list[str] | None = option(f"{_CONVENTION} Repeat for a table of several.")  # type: ignore[assignment]

    def each(self) -> Iterator[CountingOptions]:
        """Yield the options for each convention. Only EVALB gets the options of EVALB."""
        names = self.convention or ["gpst"]
        options.refuse_repeated("--convention", names)
        for name in names:
            unused = {"parameters": None, "unlabeled": False} if name != "evalb" and "evalb" in names else {}
            yield CountingOptions(**{**vars(self), "convention": name, **unused})


@dataclasses.dataclass(frozen=True, kw_only=True)
class AveragingOptions:
    """Whether several trees are averaged, and where trees are written."""

    consensus: bool = option(
        "With --trees: also score the tree that has most in common with all of them. With --model: score the "
        "average of the trees in the beam, weighted by probability, instead of the best tree.",
        default=False,
    )
    save_trees: Path | None = option(
        "File for the trees of the model, or of --consensus: one line per gold sentence, blank if the sentence is "
        "not scored. `--trees`, `synlm evaluate compare` and `synlm draw` read this file."
    )

    def write(self, sentences: Sequence[ParsedSentence]) -> None:
        """If a file is given, write the best tree of each sentence on one line. Without a tree, the line is blank."""
        if self.save_trees is not None:
            write_text(self.save_trees, "".join(f"{line}\n" for line in lines_of_parses(sentences)))
            outputs.say(f"wrote {self.save_trees}")


class _Case(NamedTuple):
    """A convention with the gold trees as it reads them, and the trees that it scores, by the name of their run."""

    counting: CountingOptions
    bank: "Treebank"
    rule: ParsingConvention | EvalbParameters
    runs: dict[str, Any]

    def numbers(self) -> Sequence[int]:
        """Numbers of the sentences that the convention scores."""
        of_all = range(len(self.bank.sentences))
        return self.bank.numbers_scored(self.rule) if isinstance(self.rule, ParsingConvention) else of_all


def parsing(
    treebank: options.Treebank,
    counting: CountingByConventions,
    parsing: options.ParsingByModels,
    given: AveragingOptions,
    model: list[str] | None = option(
        "Folder of the model that parses, or its Hub name; repeat for a table.", "Model", callback=options.find_models
    ),
    trees: list[Path] | None = option(
        "Score the trees in this file instead: one line for each gold sentence, blank if it has no tree; repeat "
        "for several runs."
    ),
    tree_style: options.TreeStyle = None,
    limit: Limit = None,
    out: options.Output = None,
    style: Literal["markdown", "latex"] = option(
        "How to print the tables; latex: for the package booktabs.", default="markdown", name="--format"
    ),
    overwrite: options.Overwrite = False,
) -> None:
    """Compute the F1 of trees against a treebank by a named convention.

    It also reports the F1 of trees that need no model, such as right-branching ones. It reports recall by label, and
    the width, height, depth and branching of the trees. With several --trees it reports the agreement of the runs,
    which is the F1 between every two of them. All numbers are in percent. With several --model or --convention it
    prints one table instead. The table has the F1 of each model and of right-branching trees, by each convention. It
    also tests each difference in sentence F1 (see `compare`). Each model is loaded once.

    Examples:
        synlm evaluate parsing --treebank hf_synlm/data/samples/trees.test.txt --limit 50 --model model_cards/gpst-tiny
        synlm evaluate parsing --treebank wsj23.mrg --model model_cards/rnng-mini --num-beams 20 --out f1.json
        synlm evaluate parsing --treebank wsj23.mrg --trees 1.mrg --trees 2.mrg --trees 3.mrg --consensus
        synlm evaluate parsing --treebank wsj23.mrg --model A --model B --convention gpst --convention compound-pcfg
    """
    models, files = model or [], trees or []
    reads = (treebank, *files, parsing.cache, counting.parameters)
    outputs.check_results(out, overwrite, *reads, model=models)
    outputs.check_out(
        given.save_trees, overwrite, *reads, *outputs.report_files(out), model=models, flag="--save-trees"
    )
    if bool(models) == bool(files):
        raise ValueError(
            "give either --model to parse the treebank, or --trees. To score both, first save the model's trees "
            "(--model M --save-trees m.mrg). Then give --trees own.mrg --trees m.mrg. If the trees have "
            "punctuation, add --punctuation ignore to both commands"
        )
    options.refuse_repeated("--trees", files)
    options.refuse_repeated("--model", models)
    if files:
        unused = options.differing(parsing, options.Parsing())
        options.refuse(unused, "--trees are already parsed, so this would change nothing")
    cases = []
    for one in counting.each():
        rule, bank = one.rule(), one.treebank(treebank, limit)
        evalb = None if given.consensus else one.evalb(rule, treebank, limit)
        cases.append(_Case(one, bank, rule, _read_runs(treebank, files, tree_style, limit, evalb, one.predicted())))
    data = {"files": describe_files([treebank, *files, *filter(None, [counting.parameters])])}
    if len(models) > 1 or len(cases) > 1:
        if given.consensus or given.save_trees is not None:
            raise ValueError("--consensus and --save-trees take one --model and one --convention. Give one of each")
        return outputs.report(_tabulate(cases, models, parsing, data), out, style=style)
    score = partial(_evaluate_model, *parsing.by_model(models).popitem()) if models else _evaluate_runs
    outputs.report(score(cases[0], given, data), out, style=style)


def _tabulate(
    cases: Sequence[_Case], models: Sequence[str], parsing: options.ParsingByModels, data: dict[str, Any]
) -> EvaluationResult:
    """Score models, or the trees of files, by several conventions; each model is loaded once, and parses once."""
    from hf_synlm.evaluation.trees.treebank_reports import report_conventions

    if parsing.cache is not None and len(models) > 1:
        raise ValueError(f"--cache {parsing.cache} holds trees of one model. Leave --cache out, or give one --model")
    described, methods = [], {}
    for model, own in parsing.by_model(models).items():
        from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences

        scorer = own.scorer(model)
        scored = [case for case in cases if not _needs_labels(scorer, case.rule)]
        if len(scored) < len(cases):
            outputs.say(f"evalb: {scorer.name} has no score, because its trees have no labels (add --unlabeled)")
        if not scored:
            continue
        words = list({tuple(case.bank.words[number]): 0 for case in cases for number in case.numbers()})
        how = {"progress": f"parse: {scorer.name}", **own.computation(), **own.chosen()}
        remedy = " (--method may be given once for each --model, in their order)" if own.method and models[1:] else ""
        with errors_at(f"--model {model}{remedy}"):
            parsed = parse_sentences(scorer.model, scorer.tokenizer, words, **how)
        trees = dict(zip(words, parsed, strict=True))
        for case in scored:
            case.runs[scorer.name] = [trees.get(tuple(own), ParsedSentence(())) for own in case.bank.words]
        used = {**scorer.options(), **_describe_parsing(scorer, own)}
        described.append({**scorer.describe(), "options": used})
        methods[scorer.name] = estimate_of("parsing", used)
    if models and not methods:
        raise ValueError("no model gives trees with labels. Add --unlabeled to score trees without labels")
    outputs.leave_output_to_first_process()
    for case in cases:
        for name, run in list(case.runs.items()) if isinstance(case.rule, EvalbParameters) else ():
            try:
                _score(case._replace(runs={name: run}))
            except ValueError as error:
                outputs.say(f"no score by evalb: {error}")
                del case.runs[name]
    names = list(dict.fromkeys(name for case in cases for name in case.runs))
    last = [Path(name).absolute().name for name in names]
    short = dict(zip(names, last if len(set(last)) == len(names) else names, strict=True))
    of_cases = [(case.bank, case.rule, {short[name]: run for name, run in case.runs.items()}) for case in cases]
    scores, tables = report_conventions(dict(zip((case.counting.convention for case in cases), of_cases, strict=True)))
    for case in cases:
        _say_missing(case)
    told = {short[name]: {"method": how["estimator"], "num_beams": how["num_beams"]} for name, how in methods.items()}
    none = {"method": None, "num_beams": None}
    tables["F1 (%)"] = [{"trees": r["trees"], **told.get(r["trees"], none), **r} for r in tables["F1 (%)"]]
    rules = [case.counting.describe(case.rule, case.bank) for case in cases]
    tables["conventions"] = [{**rule, "convention": rule["convention"].partition(":")[0]} for rule in rules]
    counted = "; ".join(rule["convention"] for rule in rules)
    tests = dict.fromkeys(_TESTS[isinstance(case.rule, EvalbParameters)] for case in cases)
    settings: dict[str, Any] = {"unit": "percent", "convention": counted, "tests of differences": "; ".join(tests)}
    settings |= {"parse_option": parsing.parse_option, "seed": parsing.seed}
    model_of = {"name": ", ".join(short.values()), "models": described}
    return EvaluationResult("parsing by conventions", scores, model_of, settings, data, tables)


def _describe_parsing(scorer: "TextScorer", parsing: options.Parsing, **more: Any) -> dict[str, Any]:
    """What trees depend on beside the scorer's options, as results state it."""
    from hf_synlm.hub.abilities import declared

    chosen = {"method": declared(scorer.model.config, "parse_method"), **parsing.chosen(**more)}
    unused = ["estimator", "begin_token", *([] if chosen["method"] == "search" else ["num_beams"])]
    return {**dict.fromkeys(unused), "parse": chosen, "seed": parsing.seed}


def _needs_labels(scorer: "TextScorer", rule: ParsingConvention | EvalbParameters) -> bool:
    """Whether labels count that the model does not give."""
    from hf_synlm.hub.abilities import declared

    return isinstance(rule, EvalbParameters) and rule.labeled and not declared(scorer.model.config, "gives_labels")


def _read_runs(
    gold: Path,
    files: Sequence[Path],
    style: TreeStyle | None,
    limit: int | None,
    evalb: Callable[[Path], EvalbScores] | None,
    reading: dict[str, Any],
) -> dict[str, Any]:
    """The trees of each file, or what the program EVALB says of them where it is asked for."""
    runs: dict[str, Any] = {}
    for path in files:
        run = options.read_trees(path, style, evalb, **reading)
        runs[str(path)] = run if isinstance(run, EvalbScores) else run[:limit]
        if isinstance(run, EvalbScores):
            _say_roots(gold, path)
    return runs


def _evaluate_runs(case: _Case, given: AveragingOptions, data: dict[str, Any]) -> EvaluationResult:
    """Score trees that are in files, and write their average."""
    from hf_synlm.evaluation.trees.consensus import average_parses

    if given.save_trees is not None and not given.consensus:
        raise ValueError("--save-trees would only copy --trees. Leave it out, or add --consensus.")
    average = average_parses(case.runs) if given.consensus else None
    scores, tables = _score(case, average)
    given.write(average or ())
    _say_missing(case)
    settings = case.counting.describe(case.rule, case.bank) | ({"consensus": True} if given.consensus else {})
    return EvaluationResult("parsing", scores, {"name": ", ".join(case.runs)}, settings, data, tables)


def _evaluate_model(
    model: str, parsing: options.Parsing, case: _Case, given: AveragingOptions, data: dict[str, Any]
) -> EvaluationResult:
    """Parse the sentences that are scored, write their trees, and score them."""
    from hf_synlm.evaluation.trees.consensus import average_parses
    from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences

    scorer = parsing.scorer(model)
    more = {"num_return_sequences": parsing.beam(scorer.model) if given.consensus else None}
    if _needs_labels(scorer, case.rule):
        name = scorer.model.config.model_type
        raise ValueError(f"{name} gives trees without labels. Add --unlabeled to score them")
    numbers, bank = case.numbers(), case.bank.select(case.numbers())
    start, bar = time.perf_counter(), f"parse: {scorer.name}"
    parsed = parse_sentences(
        scorer.model, scorer.tokenizer, bank.words, progress=bar, **parsing.computation(), **parsing.chosen(**more)
    )
    outputs.leave_output_to_first_process()
    parsed = average_parses({scorer.name: parsed}) if given.consensus else parsed
    seconds = time.perf_counter() - start
    found = dict(zip(numbers, parsed, strict=True))
    given.write([found.get(number, ParsedSentence(())) for number in range(len(case.bank.sentences))])
    scores, tables = _score(case._replace(bank=bank, runs={scorer.name: parsed}))
    settings = case.counting.describe(case.rule, case.bank) | ({"consensus": True} if given.consensus else {})
    settings |= _describe_parsing(scorer, parsing, **more)
    return EvaluationResult.of(scorer, "parsing", scores, settings, data=data, tables=tables, seconds=seconds)


def _score(
    case: _Case, average: Sequence[ParsedSentence] | None = None
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    from hf_synlm.evaluation.trees.treebank_reports import report_evalb, report_parsing

    if isinstance(case.rule, EvalbParameters):
        return report_evalb(case.bank, case.runs, case.rule, average=average)
    return report_parsing(case.bank, case.runs, case.rule, average=average)


def compare(
    treebank: options.Treebank,
    counting: CountingOptions,
    first: Path = argument(
        "Trees of one parser, as `synlm evaluate parsing --save-trees` writes them.",
        default=MISSING,
        **options.INPUT_FILE,
    ),
    second: Path = argument("Trees of the other parser.", default=MISSING, **options.INPUT_FILE),
    tree_style: options.TreeStyle = None,
    limit: Limit = None,
    out: options.Output = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Test whether two parsers differ on a treebank.

    The command prints sentence F1 and recall by label of both parsers. The value p comes from a paired permutation test
    over the sentences (two-sided, 10,000 samples, not corrected for the number of tests).

    Examples:
        synlm evaluate compare gpst.mrg rnng.mrg --treebank wsj23.mrg
    """
    outputs.check_results(out, overwrite, treebank, first, second, counting.parameters)
    from hf_synlm.evaluation.trees.treebank_reports import report_comparison

    if first.resolve() == second.resolve():
        raise ValueError(f"{first} is given twice. Give the trees of two parsers")
    rule, bank = counting.rule(), counting.treebank(treebank, limit)
    if isinstance(rule, EvalbParameters):
        raise ValueError("--convention evalb cannot compare two parsers. Choose a convention of unlabeled F1")
    reading = counting.predicted()
    parses = {str(path): options.read_trees(path, tree_style, **reading)[:limit] for path in (first, second)}
    scores, tables = report_comparison(bank, parses, rule)
    _say_missing(_Case(counting, bank, rule, parses))
    data = {"files": describe_files([treebank, first, second])}
    named = {"name": f"{first} and {second}"}
    outputs.report(EvaluationResult("compare", scores, named, counting.describe(rule, bank), data, tables), out)


def _say_missing(case: _Case) -> None:
    """Remark on sentences that are scored, but have no tree in a file, and on those that EVALB leaves out."""
    numbers = case.numbers()
    for name, run in case.runs.items():
        if isinstance(run, EvalbScores):
            if run.overall.num_valid < len(run.sentences):
                outputs.say(f"{name}: {run.left_out()}")
            continue
        missing = sum(not run[number].hypotheses for number in numbers)
        if missing:
            outputs.say(
                f"{name} has no tree for {missing} of {plural(len(numbers), 'sentence')}. These count as sentences "
                "without brackets. Check whether another convention left them out when the trees were saved"
            )


def _say_roots(gold: Path, test: Path) -> None:
    """Remark on root brackets without a label that only one of two files has, as EVALB counts them."""
    have = [any(re.match(r"\s*\(\s*\(", line) for line in read_lines_beside(path)) for path in (gold, test)]
    if have[0] != have[1]:
        path = gold if have[0] else test
        outputs.say(
            f"only {path} has brackets without a label around its trees: ( (S ...)). EVALB counts these brackets as "
            "constituents, and the other file lacks them. `synlm treebank` removes such brackets"
        )
