# SPDX-License-Identifier: Apache-2.0
"""`synlm evaluate`: scores of models on treebanks, texts and test suites; means and pictures of the results."""

import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.evaluation.results import F1_TITLES, EvaluationResult, describe_files, markdown_table, write_report
from hf_synlm.evaluation.summary import load_runs, scores_of_groups, summarize, summary_to_json
from hf_synlm.evaluation.text.tables import need_columns, read_rows
from hf_synlm.evaluation.text.text_items import TextItem, read_items, read_treebank_items
from hf_synlm.viz import plot_bars, plot_effects
from hf_synlm.viz.plots import plot_lines

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.tree_files import Proposals

Results = Annotated[list[Path], typer.Argument(help="JSON files of one evaluation.", **options.INPUT_FILE)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceOptions:
    """How sentences are read, and the trees over which their probabilities are summed instead of a search."""

    tokenize: options.Tokenize = None
    proposals: list[Path] | None = option(
        "File of bracketed trees, of n-best lists of a parser (lines of ID ||| SCORE ||| TREE, or Charniak's), or "
        "of JSON lines of `synlm parse`; repeat for several. The probability of a sentence is then the sum over its "
        "trees in these files, as in papers on Transformer Grammars.",
        name="--proposals",
        **options.INPUT_FILE,
    )

    @property
    def files(self) -> list[Path]:
        """The files of trees."""
        return self.proposals or []

    def trees(self) -> "Proposals | None":
        """The trees of --proposals, or None without this option."""
        if self.files:
            from hf_synlm.evaluation.text.tree_files import Proposals

            return Proposals(self.files)
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairOptions(SentenceOptions):
    """Which minimal pairs are scored, and how."""

    limit: int | None = option("Score only this many pairs of each group, from the first on.", min=1)
    end_of_sentence: bool = option("Include the end of a sentence in its probability.", default=False)

    def how(self) -> dict[str, Any]:
        """The options of `evaluate_pairs`."""
        return {"end": self.end_of_sentence, "tokenize": self.tokenize, "proposals": self.trees()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions(options.TreebankReading):
    """How `perplexity` reads its input."""

    file_format: Literal["txt", "tsv", "csv", "jsonl", "treebank"] | None = option(
        "Format; default: by the ending of the file name. treebank: bracketed trees, of which only the words are read.",
        name="--format",
    )
    text_column: options.TextColumn = None
    split_sentences: options.SplitSentences = False
    punctuation: Literal["remove", "keep"] | None = option(
        "Punctuation of a treebank: keep it (default), or remove it before scoring."
    )
    punctuation_by: options.PunctuationBy = "tag"

    def items(self, texts: Path) -> tuple[list[TextItem], dict[str, Any]]:
        """Read the texts. Also return how the texts were read, for the result."""
        given = options.differing(self, InputOptions(file_format=self.file_format))
        of_text = ("text_column", "split_sentences")
        if self.file_format == "treebank":
            options.refuse(set(of_text) & set(given), "a treebank has neither columns nor lines")
            reading, treatment = self.reading(), self.punctuation or "keep"
            items, punctuation = read_treebank_items(texts, treatment, self.punctuation_by, **reading)
            return items, {"punctuation": punctuation, **reading}
        options.refuse((name for name in given if name not in of_text), "this belongs to --format treebank")
        items = read_items(
            texts, kind=self.file_format, text_column=self.text_column, by_sentences=self.split_sentences
        )
        outputs.say_odd_texts(item.text for item in items)
        return items, {}


# --------------------------------------------------------------------------------------------- texts and test suites
def perplexity(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    reading: InputOptions,
    sentences: SentenceOptions,
    context: options.Context = "sentence",
    out: options.Output = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Perplexity over tokens and over words, without and with the ends of sentences.

    The result names the estimator and the beam. It also names what counts as the end of a sentence. For RNNG and Tree
    LM, the actions that complete the tree are the end. GPST and an LSTM do not model the end of a sentence. Other
    models have an end token. To compare models with different tokenizers, use word_perplexity.

    Examples:
        synlm evaluate perplexity hf_synlm/data/samples/raw.valid.txt --model model_cards/palm-s-tiny
        synlm evaluate perplexity valid.txt --model model_cards/gpst-tiny --estimator stepwise --out ppl.json
    """
    outputs.check_results(out, overwrite, texts, *sentences.files, scoring.cache, model=model)
    items, read = reading.items(texts)
    trees = sentences.trees()
    how: dict[str, Any] = {"tokenize": sentences.tokenize, "options": {"seed": scoring.seed, **read}}
    how["data"] = {"files": describe_files([texts])}
    if trees is None and reading.file_format == "treebank":
        how["tokenize"] = sentences.tokenize or "words"
    if trees is not None:
        from hf_synlm.evaluation.text.tree_files import evaluate_proposals

        if context != "sentence":
            raise ValueError(f"--proposals reads each sentence alone, without --context {context}. Leave --context out")
        return outputs.report(evaluate_proposals(scoring.scorer(model), items, trees, **how), out)
    from hf_synlm.evaluation.text.perplexity import evaluate_perplexity

    scorer = scoring.scorer(model)
    outputs.say_plain_context(scorer, context)
    result = evaluate_perplexity(scorer, items, context=context, **how)
    _say_odd_scores(result.scores)
    outputs.report(result, out)


def _say_odd_scores(scores: Mapping[str, float]) -> None:
    """Remark on unknown words, and on sentences that cannot end."""
    share = scores["unknown_words"] / max(1, scores["words"])
    if share > 0.1:
        outputs.say(
            f"the model does not know {share:.0%} of the words, and scores a class of words in place of each. Do not "
            "compare this perplexity with that of a model that has another vocabulary"
        )
    if scores["bits_per_token"] < math.inf == scores.get("bits_per_token_with_end"):
        outputs.say(
            "scores with ends are infinite, because this model gives some sentences the probability 0 (a PCFG has "
            "no sentence of one word). Leave these sentences out to get finite scores"
        )


def syntaxgym(
    *,
    suites: Path = argument("Folder of suites in SyntaxGym's JSON format, or one suite.", default=MISSING, exists=True),
    model: options.Model,
    scoring: options.Scoring,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    suite: list[str] | None = option("Take only this suite; repeat for several."),
) -> None:
    """Measure accuracy on SyntaxGym's test suites, with the averages that papers report.

    mean_31_suites is the mean over the suites of Hu et al. 2020. mean_6_circuits is the mean over their circuits, which
    most papers call the SG score. The suites are not part of this package. Get them from
    cpllab/syntactic-generalization.

    Examples:
        synlm evaluate syntaxgym test_suites/json --model model_cards/gpst-tiny --num-beams 300 --out sg.json
    """
    outputs.check_results(out, overwrite, suites, scoring.cache, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.syntaxgym import evaluate_syntaxgym, find_suites

    paths = find_suites(suites, suite or [])
    result = evaluate_syntaxgym(scoring.scorer(model), paths, options={"seed": scoring.seed})
    outputs.report(result, out, items_out)


def blimp(
    *,
    paradigms: Path = argument("Folder of BLiMP's 67 .jsonl files, or one of them.", default=MISSING, exists=True),
    model: options.Model,
    scoring: options.Scoring,
    chosen: PairOptions,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    paradigm: list[str] | None = option("Take only this paradigm; repeat for several."),
) -> None:
    """Measure accuracy on BLiMP's minimal pairs, by paradigm and by phenomenon.

    The data are not part of this package. Get them from alexwarstadt/blimp (CC BY 4.0).

    Examples:
        synlm evaluate blimp blimp/data --model model_cards/gpst-tiny --limit 100 --out blimp.json
    """
    reads = (paradigms, *chosen.files, scoring.cache)
    outputs.check_results(out, overwrite, *reads, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.blimp import evaluate_blimp, find_blimp

    paths, how = find_blimp(paradigms, paradigm or []), chosen.how()
    settings = {"seed": scoring.seed}
    result = evaluate_blimp(scoring.scorer(model), paths, limit=chosen.limit, options=settings, **how)
    outputs.report(result, out, items_out)


def pairs(
    *,
    pairs: Path = argument("Table of minimal pairs: .tsv, .csv or .jsonl.", default=MISSING),
    model: options.Model,
    scoring: options.Scoring,
    chosen: PairOptions,
    out: options.Output = None,
    items_out: options.ItemsOutput = None,
    overwrite: options.Overwrite = False,
    good_column: str = option("Column of the better sentences.", default="sentence_good"),
    bad_column: str = option("Column of the other sentences.", default="sentence_bad"),
    group_column: str | None = option("Column that groups the pairs; the result has one score per group."),
) -> None:
    """Compute the share of minimal pairs in which the better sentence has the higher probability.

    The pairs may be the templates of Marvin and Linzen 2018, for example, or your own stimuli.

    Examples:
        synlm evaluate pairs agreement.tsv --model model_cards/rnng-mini --group-column construction --items-out i.tsv
    """
    reads = (pairs, *chosen.files, scoring.cache)
    outputs.check_results(out, overwrite, *reads, model=model, items_out=items_out)
    from hf_synlm.evaluation.suites.blimp import evaluate_pairs, first_pairs, read_pairs

    data = {"files": describe_files([pairs])}
    read = read_pairs(pairs, good_column=good_column, bad_column=bad_column, group_column=group_column)
    how: dict[str, Any] = {"data": data, **chosen.how()}
    how["options"] = {"pairs_per_group": chosen.limit or "all", "seed": scoring.seed}
    result = evaluate_pairs(scoring.scorer(model), first_pairs(read, chosen.limit), **how)
    outputs.report(result, out, items_out)


# ------------------------------------------------------------------------------------------------- several results
def summary(results: Results, out: options.Output = None, overwrite: options.Overwrite = False) -> None:
    """Mean and standard deviation of several results, for example one per seed.

    The results must have the same task, options and data. Their models must have the same architecture, size and
    precision. Other results are refused, because their mean would mix conventions.

    Examples:
        synlm evaluate summary sg.seed0.json sg.seed1.json sg.seed2.json --out sg.json
    """
    outputs.check_results(out, overwrite, *results)
    loaded = load_runs(results)
    names = "\n".join(f"- {path}: {result.model['name']}" for path, result in zip(results, loaded, strict=True))
    rows = summarize(loaded)
    text = f"# {loaded[0].task}\n\n{names}\n\n{markdown_table(rows)}\n"
    if out is not None:
        paths = write_report(out, summary_to_json(results, loaded, rows), text)
        outputs.say(f"wrote {paths[0]} and {paths[1]}")
    typer.echo(text, nl=False)


def plot(
    results: list[Path] = argument(
        "JSON files of one evaluation, or a table of `synlm surprisal`.", default=MISSING, **options.INPUT_FILE
    ),
    out: Path = option("File to write; its ending (.svg, .png, .pdf) sets the format.", default=MISSING),
    overwrite: options.Overwrite = False,
    label: list[str] | None = option(
        "Name of a file in the picture; repeat for each file in order. Files with the same name are runs of "
        "one model, drawn as mean with standard deviation. Default: names of the files, or of their folders."
    ),
    score: list[str] | None = option(
        "Score to draw, or the beginning of its name, such as 'suite '; repeat for several. Default: means and "
        "circuits or phenomena; F1 for parsing; word perplexity for perplexity."
    ),
    x: str | None = option("For a table: column of the x axis, such as region."),
    by: str | None = option("For a table: column with a line for each value."),
) -> None:
    """Draw the scores of one or several results as bars.

    Several runs of one model (--label) become one bar, which shows their mean and standard deviation. Right-branching
    trees are shown beside F1, and a line marks chance for minimal pairs. For a result of `evaluate reading`, the figure
    shows every predictor with its interval and its effects by lag. From a table, the words of a text with the same
    value of --x are drawn as one value: their surprisals are added, and other measures, such as entropy, are averaged.
    Needs matplotlib.

    Examples:
        synlm evaluate plot sg.gpst.json sg.rnng.json --out sg.svg --score 'circuit '
        synlm evaluate plot surprisals.tsv --by condition --x region --out regions.svg
    """
    outputs.check_out(out, overwrite, *results, check=outputs.check_picture)
    is_table = results[0].suffix.lower() == ".tsv"
    if x is not None and not is_table:
        raise ValueError(f"{results[0]} is not a table (.tsv), which --x needs. Give a table of `synlm surprisal`")
    if (is_table and (x is None or len(results) > 1 or label)) or (by and x is None):
        raise ValueError(
            "a table (.tsv) needs --x COLUMN, and allows neither a second file nor --label. --by needs a table and --x"
        )
    if x is not None:
        _plot_regions(results[0], out, x, by, score)
        return outputs.say(f"wrote {out}")
    loaded = load_runs(results)
    if loaded[0].task == "reading" and len(loaded) == 1 and not (label or score):
        _plot_reading(loaded[0], out)
        return outputs.say(f"wrote {out}")
    labels = label or _names(results)
    if len(labels) != len(results):
        raise ValueError(f"{len(labels)} labels for {len(results)} files. Give one --label for each file, or none")
    names, means, deviations = scores_of_groups(loaded, labels, score or [])
    runs = {name: labels.count(name) for name in means}
    named = ", ".join(name if count == 1 else f"{name} ({count} runs)" for name, count in runs.items())
    task, chance = loaded[0].task, 0.5 if loaded[0].task in ("blimp", "pairs") else None
    baseline = _right_branching(loaded[0])
    if any(name in baseline for name in names):
        means["right branching"] = [baseline.get(name, math.nan) for name in names]
    axis, limit = _AXES.get(task, ("score", None))
    rules = loaded[0].options.get("convention", "").split("; ")
    # Where there are several conventions, the name of each bar tells its own.
    title = "\n".join([f"{task}: {named}", *(re.split("[:,]", rule)[0] for rule in rules if rule and len(rules) == 1)])
    plot_bars(out, names, means, deviations=deviations, title=title, axis=axis, limit=limit, chance=chance)
    outputs.say(f"wrote {out}")


# What the scores of a task are, and where their axis ends.
_AXES = {
    **dict.fromkeys(("parsing", "parsing by conventions"), ("%", 100.0)),
    "perplexity": ("perplexity", None),
    "reading": ("Delta log-likelihood (nats per word)", None),
    **dict.fromkeys(("syntaxgym", "blimp", "pairs"), ("accuracy", 1.0)),
}


# Measures that a row of several words has as the sum of its words.
_SUMS = re.compile(r"(surprisal|lexical|structural)_(bits|nats)|n_(tokens|actions)|nae")


def _drawable(path: Path, number: int, name: str, value: str) -> float:
    """The number in a cell of a table, NaN if it is empty."""
    try:
        found = float(value.replace("_", " ") or "nan")  # Python reads 1_000 as a number
    except ValueError:
        found = math.inf
    if math.isinf(found) or (value and math.isnan(found)):
        raise ValueError(
            f"{path}: data row {number}: {value!r} in {name!r} is not a number. Correct the row, or name another "
            "column by --score"
        )
    return found


def _plot_regions(path: Path, out: Path, x: str, by: str | None, score: list[str] | None) -> None:
    """Draw the mean over items, with its standard error, of columns of a table of `synlm surprisal`.

    The rows of a text with the same `x` are one value, so that tables of words and of regions give the same figure.
    """
    import pandas

    rows = list(read_rows(path, "tsv"))
    measured = [name for name in rows[0] if name.startswith("surprisal_")] or ["surprisal_bits"]
    # Of several models, the first one's numbers stand in a column with its name, too.
    named = [name for name in measured[1:] if all(row[name] == row[measured[0]] for row in rows)]
    names = score or (named or measured)[:1]
    need_columns(
        path,
        rows,
        [*names, x, *([by] if by else []), "item", "sentence_id"],
        "Name columns by --x (word_id: the words of a sentence in order), --by and --score. `synlm surprisal` "
        "writes item and sentence_id.",
    )
    if not score and measured[1:]:
        outputs.say(f"the picture shows {names[0]}. --score chooses another score: {', '.join(measured)}")
    table = pandas.DataFrame(rows).assign(own=lambda rows: rows.get("file", "") + rows["item"])
    places, drawn, titles = list(table[x].unique()), dict[str, list[tuple[float, float]]](), list[str]()
    for name in names:
        values = pandas.Series([_drawable(path, number, name, value) for number, value in enumerate(table[name], 1)])
        if values.isna().all():
            raise ValueError(f"{path}: the column {name!r} holds no number. Name another column by --score")
        line = table[by] if by else pandas.Series(name, table.index)
        line = line + f", {name}" if by and len(names) > 1 else line
        keys = [line, table[x], table["own"], table["sentence_id"]]
        of_texts = values.dropna().groupby(keys, sort=False)
        is_sum = _SUMS.match(name) is not None
        of_items = (of_texts.sum() if is_sum else of_texts.mean()).groupby(level=[0, 1, 2], sort=False).mean()
        found = of_items.groupby(level=[0, 1], sort=False).agg(["mean", "sem"])
        for one in line.unique():
            of_line = found.reindex([(one, place) for place in places])
            drawn[one] = list(zip(of_line["mean"], of_line["sem"].fillna(0.0), strict=True))
        titles.append(f"{'sum' if is_sum else 'mean'} of {name} per {x}")
    plot_lines(
        out, places, drawn, title=f"{path.name}: means over items, standard errors", axes_titles=(x, "\n".join(titles))
    )


def _plot_reading(result: EvaluationResult, out: Path) -> None:
    """Delta LL of all predictors with intervals, and their effects by lag."""
    gains = {row["predictor"]: (row["delta_ll"], row["low"], row["high"]) for row in result.tables["differences"]}
    lags = range(result.options["spillover"] + 1)
    effects = {row["predictor"]: [(row[f"b_{k}"], row[f"se_{k}"]) for k in lags] for row in result.tables["effects"]}
    unit = "log ms" if result.options["log_rt"] else "ms"
    titles = f"{_AXES['reading'][0]}, 95 % intervals", f"b ({unit} per unit of the predictor), standard errors"
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
    raise ValueError(
        "the names of files and folders repeat. Pass a --label for each file. Give runs of one model the same label"
    )
