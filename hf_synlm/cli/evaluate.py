"""`synlm evaluate`: scores of models on treebanks, texts and test suites; means and pictures of the results."""

import dataclasses
import inspect
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.cli.treebanks import DependencyOptions
from hf_synlm.data.files import check_output, write_text
from hf_synlm.data.parsed import ParsedSentence, read_parses
from hf_synlm.evaluation.results import F1_TITLES, EvaluationResult, describe_files, markdown_table, write_report
from hf_synlm.evaluation.summary import load_runs, scores_of_groups, summarize, summary_to_json
from hf_synlm.evaluation.text.text_items import read_items, read_treebank_items
from hf_synlm.evaluation.trees.evalb import COLLINS, EvalbParameters
from hf_synlm.evaluation.trees.parsing import CONVENTIONS, ParsingConvention, resolve_convention
from hf_synlm.viz import plot_bars, plot_effects

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.proposals import Proposals
    from hf_synlm.evaluation.trees.treebank_parsing import Treebank

Results = Annotated[list[Path], typer.Argument(help="JSON files of one evaluation.", **options.INPUT_FILE)]
Limit = Annotated[int | None, typer.Option(min=1, help="Take at most this many of the first sentences.")]
LimitPairs = Annotated[int | None, typer.Option(min=1, help="Take at most this many of the first pairs of each group.")]
EndOfSentence = Annotated[
    bool, typer.Option("--end-of-sentence", help="Include the end of the sentences in their probability.")
]
ProposalFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--proposals",
        help="File of bracketed trees, such as n-best lists of a parser, or of JSON lines of `synlm parse`; repeat for "
        "several. The probability of a sentence is then the sum over its trees there, its end included, as papers on "
        "Transformer Grammars report it.",
        **options.INPUT_FILE,
    ),
]
MaxTrees = Annotated[
    int | None,
    typer.Option(min=1, help="With --proposals: take at most this many of the first distinct trees of a sentence."),
]


# ------------------------------------------------------------------------------------------------------- parsing
@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingOptions:
    """What counts in the score."""

    convention: Annotated[
        str,
        typer.Option(
            help="What counts: gpst, prpn, on-lstm, compound-pcfg, compound-pcfg-corpus, palm; or evalb: brackets, as "
            "the program EVALB counts them."
        ),
    ] = "gpst"
    punctuation: Annotated[
        Literal["remove", "ignore", "keep"] | None,
        typer.Option(
            help="remove: remove it before parsing (default); ignore: parse it, but do not score it; keep: parse and "
            "score it (default of evalb)."
        ),
    ] = None
    punctuation_by: Annotated[
        Literal["tag", "form"], typer.Option(help="Recognize punctuation by its tag, or by its form.")
    ] = "tag"
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Parse and score only sentences of at most this many words.")
    ] = None
    min_length: Annotated[
        int | None, typer.Option(min=1, help="Parse and score only sentences of at least this many words.")
    ] = None
    parameters: Annotated[
        Path | None,
        typer.Option("--prm", help="Parameter file of EVALB; default: as in COLLINS.prm.", **options.INPUT_FILE),
    ] = None
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="evalb: compare brackets without labels.")] = False

    def rule(self) -> ParsingConvention | EvalbParameters:
        """The convention; ValueError for an unknown name, or for options that belong to another convention."""
        if self.convention not in (*CONVENTIONS, "evalb"):
            raise ValueError(f"unknown convention {self.convention!r}: choose one of {', '.join(CONVENTIONS)}, evalb")
        lengths = {"max_length": self.max_length, "min_length": self.min_length}
        changes = {name: value for name, value in lengths.items() if value is not None}
        if self.convention == "evalb":
            if changes:
                raise ValueError("--max-length and --min-length: EVALB has CUTOFF_LEN in its parameter file (--prm)")
            counted = COLLINS if self.parameters is None else EvalbParameters.read(self.parameters)
            return dataclasses.replace(counted, labeled=counted.labeled and not self.unlabeled)
        if self.parameters is not None or self.unlabeled:
            raise ValueError(f"--prm and --unlabeled belong to --convention evalb, not to {self.convention}")
        return resolve_convention(self.convention, **changes)

    def treebank(self, path: Path, limit: int | None, dependencies: DependencyOptions) -> "Treebank":
        """The gold trees, with punctuation as the options say."""
        from hf_synlm.evaluation.trees.treebank_parsing import load_treebank

        usual = "keep" if self.convention == "evalb" else "remove"
        return load_treebank(
            path, self.punctuation or usual, limit, self.punctuation_by, dependencies=dependencies.chosen()
        )

    def describe(self, rule: ParsingConvention | EvalbParameters, bank: "Treebank") -> dict[str, Any]:
        """The options as the result states them."""
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
            "unit": "percent",
        }


def parsing(
    treebank: options.Treebank,
    counting: CountingOptions,
    dependencies: DependencyOptions,
    parsing: options.Parsing,
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model that parses, or its name on the Hub.", rich_help_panel="Model"),
    ] = None,
    trees: Annotated[
        list[Path] | None,
        typer.Option(help="Score the trees in this file instead, one line per gold sentence; repeat for several runs."),
    ] = None,
    tree_style: options.TreeStyle = None,
    limit: Limit = None,
    save_trees: Annotated[
        Path | None,
        typer.Option(
            help="File for the trees of the model: one line per gold sentence, blank if the sentence is not scored. "
            "`--trees`, `synlm evaluate compare` and `synlm draw` read it."
        ),
    ] = None,
    out: options.Output = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Compute the F1 of trees against a treebank by a named convention, beside trees that need no model.

    Also reports recall by label; width and height, depth and branching of the trees; and the agreement of several runs
    (several --trees). All numbers are in percent.

    Examples:
        synlm evaluate parsing --treebank hf_synlm/data/samples/trees.test.txt --limit 50 --model model_cards/gpst-tiny
        synlm evaluate parsing --treebank wsj23.mrg --model model_cards/rnng-mini --num-beams 20 --out f1.json
    """
    reads = (treebank, *(trees or ()), parsing.cache, counting.parameters)
    options.check_results(out, overwrite, *reads, model=model)
    options.check_out(save_trees, overwrite, *reads, *options.report_files(out), model=model, flag="--save-trees")
    if (model is None) == (not trees):
        raise ValueError("give either --model, which parses the treebank, or --trees, which are already parsed")
    rule, bank = counting.rule(), counting.treebank(treebank, limit, dependencies)
    settings = counting.describe(rule, bank)
    data = {"files": describe_files([treebank, *(trees or ()), *filter(None, [counting.parameters])])}
    if model is None:
        _check_unused(parsing)
        if save_trees is not None:
            raise ValueError("--save-trees: --trees are in a file already. Leave it out.")
        parses = _read_trees(trees or (), tree_style, limit)
        scores, tables = _score(bank, parses, rule)
        _say_missing(bank, parses, rule)
        named = {"name": ", ".join(map(str, trees or ()))}
        result = EvaluationResult("parsing", scores, named, settings, data, tables)
    else:
        from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences

        chosen, scorer = parsing.chosen(), parsing.scorer(model)
        if isinstance(rule, EvalbParameters) and rule.labeled and not hasattr(scorer.model.config, "nonterminals"):
            name = scorer.model.config.model_type
            raise ValueError(f"{name} gives trees without labels; score them without (--unlabeled)")
        count, numbers = len(bank.sentences), _numbers_scored(bank, rule)
        bank = bank.select(numbers)
        start, bar = time.perf_counter(), f"parse: {scorer.name}"
        parsed = parse_sentences(
            scorer.model, scorer.tokenizer, bank.words, progress=bar, **parsing.computation(), **chosen
        )
        options.leave_output_to_first_process()
        seconds = time.perf_counter() - start
        if save_trees is not None:
            lines = dict(zip(numbers, (s.brackets() if s.hypotheses else "" for s in parsed), strict=True))
            write_text(save_trees, "".join(f"{lines.get(number, '')}\n" for number in range(count)))
            options.say(f"wrote {save_trees}")
        scores, tables = _score(bank, {scorer.name: parsed}, rule)
        method = inspect.signature(scorer.model.parse).parameters.get("method")
        chosen = {"method": "search" if method is None else method.default, **chosen}
        unused = ["estimator", "begin_token", *([] if chosen["method"] == "search" else ["num_beams"])]
        settings |= {**dict.fromkeys(unused), "parse": chosen, "seed": parsing.seed}
        result = EvaluationResult.of(scorer, "parsing", scores, settings, data=data, tables=tables, seconds=seconds)
    options.report(result, out)


def _score(
    bank: "Treebank", runs: Mapping[str, Sequence[ParsedSentence]], rule: ParsingConvention | EvalbParameters
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    from hf_synlm.evaluation.trees.treebank_parsing import report_evalb, report_parsing

    return report_evalb(bank, runs, rule) if isinstance(rule, EvalbParameters) else report_parsing(bank, runs, rule)


def compare(
    treebank: options.Treebank,
    counting: CountingOptions,
    dependencies: DependencyOptions,
    first: Annotated[
        Path,
        typer.Argument(
            help="Trees of one parser, as `synlm evaluate parsing --save-trees` writes them.", **options.INPUT_FILE
        ),
    ],
    second: Annotated[Path, typer.Argument(help="Trees of the other parser.", **options.INPUT_FILE)],
    tree_style: options.TreeStyle = None,
    limit: Limit = None,
    out: options.Output = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Test whether two parsers differ on a treebank.

    Gives sentence F1 and recall by label of both, with p of a paired permutation test over the sentences (two-sided,
    10,000 samples, not corrected for the number of tests).

    Examples:
        synlm evaluate compare gpst.mrg rnng.mrg --treebank wsj23.mrg
    """
    options.check_results(out, overwrite, treebank, first, second, counting.parameters)
    from hf_synlm.evaluation.trees.treebank_parsing import report_comparison

    if first.resolve() == second.resolve():
        raise ValueError(f"{first} is given twice: give the trees of two parsers")
    rule, bank = counting.rule(), counting.treebank(treebank, limit, dependencies)
    if isinstance(rule, EvalbParameters):
        raise ValueError("--convention evalb: choose a convention of unlabeled F1")
    parses = _read_trees((first, second), tree_style, limit)
    scores, tables = report_comparison(bank, parses, rule)
    _say_missing(bank, parses, rule)
    data = {"files": describe_files([treebank, first, second])}
    named = {"name": f"{first} and {second}"}
    options.report(EvaluationResult("compare", scores, named, counting.describe(rule, bank), data, tables), out)


def _read_trees(
    paths: Sequence[Path], style: options.TreeStyle | None, limit: int | None
) -> dict[str, list[ParsedSentence]]:
    """The first trees of each file, one line per gold sentence, by its name."""
    return {str(path): read_parses(path, style)[:limit] for path in paths}


def _numbers_scored(bank: "Treebank", rule: ParsingConvention | EvalbParameters) -> Sequence[int]:
    """Numbers of the sentences that a convention scores."""
    return bank.numbers_scored(rule) if isinstance(rule, ParsingConvention) else range(len(bank.sentences))


def _say_missing(
    bank: "Treebank", parses: Mapping[str, Sequence[ParsedSentence]], rule: ParsingConvention | EvalbParameters
) -> None:
    """Remark on sentences that are scored, but have no tree in a file."""
    numbers = _numbers_scored(bank, rule)
    for name, parsed in parses.items():
        missing = sum(not parsed[number].hypotheses for number in numbers)
        if missing:
            options.say(
                f"{name} has no tree for {missing} of {len(numbers)} sentences, which count as sentences without "
                "brackets: were they left out by another convention when they were saved?"
            )


def _check_unused(parsing: options.Parsing) -> None:
    """Raise ValueError for options of a model if trees from a file are scored."""
    usual = dataclasses.asdict(options.Parsing())
    given = [name for name, value in dataclasses.asdict(parsing).items() if value != usual[name]]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{flags}: --trees are already parsed, so this would change nothing. Leave it out.")


# --------------------------------------------------------------------------------------------- texts and test suites
def perplexity(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    overwrite: options.Overwrite = False,
    context: options.Context = "sentence",
    file_format: Annotated[
        Literal["txt", "tsv", "csv", "jsonl", "treebank"] | None,
        typer.Option(
            "--format",
            help="Format of the input; default: the ending of its name. treebank: the words of bracketed trees.",
        ),
    ] = None,
    punctuation: Annotated[
        Literal["remove", "keep"] | None,
        typer.Option(help="Of a treebank: keep it (default), or remove it by its tags before scoring."),
    ] = None,
    text_column: options.TextColumn = None,
    tokenize: options.Tokenize = None,
    proposals: ProposalFiles = None,
    max_trees: MaxTrees = None,
) -> None:
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names the estimator, the beam, and what counts as the end of a sentence: an end token, or for GPST and
    RNNG the actions that complete the tree. To compare models with different tokenizers, use word_perplexity.

    Examples:
        synlm evaluate perplexity hf_synlm/data/samples/raw.valid.txt --model model_cards/palm-s-tiny
        synlm evaluate perplexity valid.txt --model model_cards/gpst-tiny --estimator stepwise --out ppl.json
    """
    options.check_results(out, overwrite, texts, *(proposals or ()), scoring.cache, model=model)
    settings: dict[str, object] = {"seed": scoring.seed}
    if file_format == "treebank":
        if text_column is not None:
            raise ValueError("--text-column: a treebank has no columns, leave it out")
        items, settings["punctuation"] = read_treebank_items(texts, punctuation or "keep")
    elif punctuation is not None:
        raise ValueError("--punctuation belongs to --format treebank, which has tags; remove it from the text yourself")
    else:
        items = read_items(texts, kind=file_format, text_column=text_column)
    data = {"files": describe_files([texts])}
    trees = _read_proposals(proposals, max_trees)
    if trees is not None:
        from hf_synlm.evaluation.text.proposals import evaluate_proposals

        if context != "sentence":
            raise ValueError(f"--context {context}: with --proposals every sentence stands by itself. Leave it out")
        result = evaluate_proposals(
            scoring.scorer(model), items, trees, split=tokenize is not None, data=data, options=settings
        )
        return options.report(result, out)
    from hf_synlm.evaluation.text.perplexity import evaluate_perplexity

    result = evaluate_perplexity(
        scoring.scorer(model), items, context=context, split=tokenize is not None, data=data, options=settings
    )
    share = result.scores["unknown_words"] / max(1, result.scores["words"])
    if share > 0.1:
        options.say(
            f"{share:.0%} of the words are unknown to the model and count as a class of words: its perplexity does not "
            "compare with that of a model with another vocabulary"
        )
    options.report(result, out)


def syntaxgym(
    suites: Annotated[
        Path, typer.Argument(exists=True, help="Folder of suites in SyntaxGym's JSON format, or one suite.")
    ],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    suite: Annotated[list[str] | None, typer.Option(help="Take only this suite; repeat for several.")] = None,
) -> None:
    """Accuracy on SyntaxGym's test suites: per suite, per circuit, and the means that papers report.

    mean_31_suites averages the suites of Hu et al. 2020, mean_6_circuits their circuits (what most papers call SG
    score). The suites are not part of this package: get them from cpllab/syntactic-generalization.

    Examples:
        synlm evaluate syntaxgym test_suites/json --model model_cards/gpst-tiny --num-beams 300 --out sg.json
    """
    options.check_results(out, overwrite, suites, scoring.cache, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.syntaxgym import evaluate_syntaxgym, find_suites

    paths = find_suites(suites, suite or [])
    if out is not None and out.resolve().parent == suites.resolve():
        raise ValueError(f"--out {out} is in the folder of the suites, and would be read as one. Choose another folder")
    result = evaluate_syntaxgym(scoring.scorer(model), paths, options={"seed": scoring.seed})
    options.report(result, out, items_out)


def _read_proposals(paths: list[Path] | None, max_trees: int | None) -> "Proposals | None":
    """The trees of --proposals; None = there are none."""
    if paths:
        from hf_synlm.evaluation.text.proposals import Proposals

        return Proposals(paths, max_trees)
    if max_trees is not None:
        raise ValueError("--max-trees belongs to --proposals: leave it out, or give files of trees")
    return None


def blimp(
    paradigms: Annotated[Path, typer.Argument(exists=True, help="Folder of BLiMP's 67 .jsonl files, or one of them.")],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    paradigm: Annotated[list[str] | None, typer.Option(help="Take only this paradigm; repeat for several.")] = None,
    limit: LimitPairs = None,
    end_of_sentence: EndOfSentence = False,
    tokenize: options.Tokenize = None,
    proposals: ProposalFiles = None,
    max_trees: MaxTrees = None,
) -> None:
    """Accuracy on BLiMP's minimal pairs: per paradigm, per phenomenon, and mean over the paradigms.

    The data are not part of this package: get them from alexwarstadt/blimp (CC BY 4.0).

    Examples:
        synlm evaluate blimp blimp/data --model model_cards/gpst-tiny --limit 100 --out blimp.json
    """
    reads = (paradigms, *(proposals or ()), scoring.cache)
    options.check_results(out, overwrite, *reads, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.blimp import evaluate_blimp, find_blimp

    paths, trees = find_blimp(paradigms, paradigm or []), _read_proposals(proposals, max_trees)
    scorer = scoring.scorer(model)
    result = evaluate_blimp(
        scorer, paths, limit=limit, end=end_of_sentence, options={"seed": scoring.seed}, proposals=trees,
        split=tokenize is not None,
    )  # fmt: skip
    options.report(result, out, items_out)


def pairs(
    pairs: Annotated[Path, typer.Argument(help="Table of minimal pairs: .tsv, .csv or .jsonl.")],
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    good_column: Annotated[str, typer.Option(help="Column of the better sentences.")] = "sentence_good",
    bad_column: Annotated[str, typer.Option(help="Column of the other sentences.")] = "sentence_bad",
    group_column: Annotated[
        str | None, typer.Option(help="Column that groups the pairs; the result has one score per group.")
    ] = None,
    limit: LimitPairs = None,
    end_of_sentence: EndOfSentence = False,
    tokenize: options.Tokenize = None,
    proposals: ProposalFiles = None,
    max_trees: MaxTrees = None,
) -> None:
    """Share of minimal pairs for which the model assigns a higher probability to the better sentence.

    The pairs may be the templates of Marvin and Linzen 2018, for example, or your own stimuli.

    Examples:
        synlm evaluate pairs agreement.tsv --model model_cards/rnng-mini --group-column construction --items-out i.tsv
    """
    reads = (pairs, *(proposals or ()), scoring.cache)
    options.check_results(out, overwrite, *reads, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.blimp import evaluate_pairs, first_pairs, read_pairs

    data = {"files": describe_files([pairs])}
    read = read_pairs(pairs, good_column=good_column, bad_column=bad_column, group_column=group_column)
    trees = _read_proposals(proposals, max_trees)
    scorer = scoring.scorer(model)
    settings = {"pairs_per_group": limit or "all", "seed": scoring.seed}
    result = evaluate_pairs(
        scorer, first_pairs(read, limit), end=end_of_sentence, data=data, options=settings, proposals=trees,
        split=tokenize is not None,
    )  # fmt: skip
    options.report(result, out, items_out)


# ------------------------------------------------------------------------------------------------- several results
def summary(results: Results, out: options.Output = None, overwrite: options.Overwrite = False) -> None:
    """Mean and standard deviation of several results, for example one per seed.

    The results must agree in task, options and data, and their models in architecture, size and precision; otherwise
    the mean would mix conventions, and the command refuses.

    Examples:
        synlm evaluate summary sg.seed0.json sg.seed1.json sg.seed2.json --out sg.json
    """
    options.check_results(out, overwrite, *results)
    loaded = load_runs(results)
    names = "\n".join(f"- {path}: {result.model['name']}" for path, result in zip(results, loaded, strict=True))
    rows = summarize(loaded)
    text = f"# {loaded[0].task}\n\n{names}\n\n{markdown_table(rows)}\n"
    if out is not None:
        paths = write_report(out, summary_to_json(results, loaded, rows), text)
        options.say(f"wrote {paths[0]} and {paths[1]}")
    typer.echo(text, nl=False)


def _check_picture(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() not in (".svg", ".png", ".pdf"):
        raise ValueError(f"--out {out}: choose a name in .svg, .png or .pdf")
    check_output(out, overwrite)


def plot(
    results: Results,
    out: Annotated[Path, typer.Option(help="File to write; its ending (.svg, .png, .pdf) is the format.")],
    overwrite: options.Overwrite = False,
    label: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a file in the picture; repeat for each file in order. Files with the same name are runs of "
            "one model, drawn as mean with standard deviation. Default: names of the files, or of their folders."
        ),
    ] = None,
    score: Annotated[
        list[str] | None,
        typer.Option(
            help="Score to draw, or the beginning of its name, such as 'suite '; repeat for several. Default: means "
            "and the circuits or phenomena; for parsing the F1s; for perplexity the one over words."
        ),
    ] = None,
) -> None:
    """Draw the scores of one or several results as bars.

    Several runs of one model (--label) become one bar: their mean, with the standard deviation. Right-branching trees
    are shown beside F1, and a line marks chance for minimal pairs. One result of `evaluate reading` is drawn with the
    intervals of all predictors and their effects by lag. Needs matplotlib.

    Examples:
        synlm evaluate plot sg.gpst.json sg.rnng.json --out sg.svg --score 'circuit '
    """
    options.check_out(out, overwrite, *results, check=_check_picture)
    loaded = load_runs(results)
    if loaded[0].task == "reading" and len(loaded) == 1 and not (label or score):
        _plot_reading(loaded[0], out)
        return options.say(f"wrote {out}")
    labels = label or _names(results)
    if len(labels) != len(results):
        raise ValueError(f"{len(labels)} labels for {len(results)} files: give one for each file, or omit --label")
    names, means, deviations = scores_of_groups(loaded, labels, score or [])
    runs = {name: labels.count(name) for name in means}
    named = ", ".join(name if count == 1 else f"{name} ({count} runs)" for name, count in runs.items())
    task, chance = loaded[0].task, 0.5 if loaded[0].task in ("blimp", "pairs") else None
    baseline = _right_branching(loaded[0])
    if any(name in baseline for name in names):
        means["right branching"] = [baseline.get(name, math.nan) for name in names]
    axis, limit = _AXES.get(task, ("score", None))
    title = "\n".join(filter(None, [f"{task}: {named}", loaded[0].options.get("convention", "").partition(",")[0]]))
    plot_bars(out, names, means, deviations=deviations, title=title, axis=axis, limit=limit, chance=chance)
    options.say(f"wrote {out}")


# What the scores of a task are, and where their axis ends.
_AXES = {
    "parsing": ("%", 100.0),
    "perplexity": ("perplexity", None),
    "reading": ("Delta log-likelihood (nats per word)", None),
    **dict.fromkeys(("syntaxgym", "blimp", "pairs"), ("accuracy", 1.0)),
}


def _plot_reading(result: EvaluationResult, out: Path) -> None:
    """Delta LL of all predictors with intervals, and their effects by lag."""
    gains = {row["predictor"]: (row["delta_ll"], row["low"], row["high"]) for row in result.tables["differences"]}
    lags = range(result.options["spillover"] + 1)
    effects = {row["predictor"]: [(row[f"b_{k}"], row[f"se_{k}"]) for k in lags] for row in result.tables["effects"]}
    unit = "log ms" if result.options["log_rt"] else "ms"
    titles = _AXES["reading"][0], f"b ({unit} per unit of the predictor)"
    plot_effects(out, gains, effects, title=f"reading times, {result.data['words']:,} words", axes_titles=titles)


def _right_branching(result: EvaluationResult) -> dict[str, float]:
    """Scores of right-branching trees by name, where the result has them."""
    rows = [row for row in result.tables.get("unlabeled F1 (%)", ()) if row["trees"] == "right"]
    return {name: row[title] for row in rows for name, title in F1_TITLES.items()}


def _names(paths: list[Path]) -> list[str]:
    """A name for each file: the file's, or that of its folder."""
    for names in ([path.stem for path in paths], [path.absolute().parent.name for path in paths]):
        if len(set(names)) == len(names):
            return names
    raise ValueError("files and folders have the same names: name each file by --label (runs of one model alike)")
