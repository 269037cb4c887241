# SPDX-License-Identifier: Apache-2.0
"""`synlm evaluate reading`: how much surprisal adds to a regression of reading times."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import argument, option
from hf_synlm.data.files import flag_of, write_text
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.text.tables import rows_text
from hf_synlm.evaluation.text.text_items import TextItem

if TYPE_CHECKING:
    from hf_synlm.evaluation.reading.frame import Settings
    from hf_synlm.evaluation.reading.report import ReadingReport
    from hf_synlm.evaluation.reading.tables import Predictor

_TIMES = "Reading times"
_WORDS = "Baseline and words"
_REGRESSION = "Regression"
_FILES = "More files"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimesOptions:
    """Reading times, and how they are joined with surprisals."""

    times: Path | None = option(
        "Table of times: a row per word, or per word and subject.", _TIMES, **options.INPUT_FILE
    )
    rt_column: str = option("Column of the reading times, in ms.", _TIMES, default="rt")
    preset: Literal["natural-stories", "sap"] | None = option("Corpus with reading times, in --data.", _TIMES)
    data: Path | None = option("Folder of the corpus: a clone of its repository.", _TIMES)
    slope: float | None = option("For --preset sap: ms per bit, such as sum_b of natural-stories.", _TIMES)
    on: str | None = option("Join tables by columns A,B; default: sentence_id,word_id or item,word_id.", _TIMES)
    partial: bool = option("Go on if many words are in only one of the tables.", _TIMES, default=False)
    allow_different_words: bool = option("Leave out words that differ between the tables.", _TIMES, default=False)

    def joining(self) -> dict[str, Any]:
        """The options of `match`."""
        on = tuple(self.on.split(",")) if self.on else ()
        return {"on": on, "partial": self.partial, "allow_different_words": self.allow_different_words}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RegressionOptions:
    """The baseline, the words that are left out, and how times are predicted."""

    spillover: int = option("Number of preceding words whose columns are predictors, too.", _WORDS, default=2, min=0)
    baseline: str | None = option("Baseline: length,frequency,punctuation,place (default), or some of these.", _WORDS)
    frequencies: str | None = option(
        "Counts of words: a file of words and counts (words that are not in the file are looked up in lower case), "
        "a column of the times, or wordfreq:en, ... (package wordfreq, counts per billion words). Default: none.",
        _WORDS,
    )
    missing_frequency: Literal["exclude", "zero"] = option(
        "What to do with words without a count.", _WORDS, default="exclude"
    )
    interaction: bool = option("Add the product of length and log frequency, both centered.", _WORDS, default=False)
    control: list[str] | None = option("Add this column of the times to the baseline; repeat for several.", _WORDS)
    keep_edges: bool = option("Keep the first and last words of sentences.", _WORDS, default=False)
    keep_oov: bool = option("Keep unknown words, with the surprisal of their class.", _WORDS, default=False)
    drop_punctuation: bool = option("Leave out words that end with punctuation.", _WORDS, default=False)
    folds: int = option("Number of folds of the cross-validation.", _REGRESSION, default=10, min=2)
    folds_by: Literal["sentence", "text"] = option("Never split this between folds.", _REGRESSION, default="sentence")
    log_rt: bool = option("Predict the logarithm of times.", _REGRESSION, default=False)
    by_subject: bool = option("Fit one regression per reader, and average them.", _REGRESSION, default=False)
    mixed: bool = option(
        "Fit one regression with random intercepts of readers. Fit other random effects in R.",
        _REGRESSION,
        default=False,
    )

    def settings(self, has_counts: bool, seed: int) -> "Settings":
        """The settings of the regression."""
        from hf_synlm.evaluation.reading.frame import BASELINE, Settings

        names = tuple(n for n in BASELINE if n != "frequency" or has_counts)
        if self.baseline is not None:
            names = tuple(self.baseline.split(","))
        if unknown := [name for name in names if name not in BASELINE]:
            raise ValueError(f"--baseline {self.baseline}: {unknown[0]!r} is unknown. Use {', '.join(BASELINE)}")
        if "frequency" in names and not has_counts:
            raise ValueError(f"--baseline {self.baseline}: frequency needs --frequencies FILE, or wordfreq:en")
        fields = {field.name for field in dataclasses.fields(Settings)} & set(vars(self))
        return Settings(**{**{name: getattr(self, name) for name in fields}, "baseline": names, "seed": seed})


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputingOptions(options.Beliefs, options.ScoringByBeams):
    """How surprisals are computed with --model."""

    context: Literal["sentence", "document"] | None = option(
        "Read each sentence alone, or after the earlier sentences of its text. Default: document for "
        "natural-stories if the model reads documents, else sentence."
    )
    tokenize: options.Tokenize = None
    word_correction: bool = option("Probability of words, not tokens; see `synlm surprisal`.", default=False)

    def predictors(
        self, model: str, texts: Sequence[TextItem], preferred: Literal["sentence", "document"]
    ) -> "tuple[list[Predictor], dict[str, Any]]":
        """Measure the words of texts in order, for each width of the beam. Also describe the model."""
        import pandas as pd

        from hf_synlm.evaluation.reading.tables import Predictor, with_places
        from hf_synlm.evaluation.text import surprisal as words

        found, context = [], self.context
        for width, scoring in self.by_width().items():
            scorer = scoring.scorer(model, details=False, belief_update=self.beliefs)
            if context is None:
                reason = words.why_sentences_alone(scorer)
                context = "sentence" if reason else preferred
                if context != preferred:
                    outputs.say(f"each sentence is read alone (--context sentence): {reason}")
            outputs.say_plain_context(scorer, context)
            correct = self.word_correction and words.can_correct_words(scorer)
            scores = words.score_words(
                scorer, texts, context=context, word_correction=correct, tokenize=self.tokenize,
                progress=f"surprisal: {scorer.name}",
            )  # fmt: skip
            rows = pd.DataFrame(words.word_table(texts, scores), columns=words.columns("bits", more=scores[0].more))
            name = Path(scorer.name).name + ("" if width is None else f" beam {width}")
            tokenize = scorer.tokenization(self.tokenize)
            settings = {**scorer.options(), "context": context, "tokenize": tokenize, "model": scorer.name}
            settings["word_correction"] = correct
            beliefs = f"{name} {self.beliefs[0]} beliefs, order {self.beliefs[1]:g}" if self.beliefs else ""
            columns = {name: "surprisal_bits", beliefs: "belief_update_bits"}
            table = with_places(rows, name)
            found += [Predictor(*pair, table, settings=settings) for pair in columns.items() if pair[1] in table]
        outputs.leave_output_to_first_process()
        return found, scorer.describe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Tables for other programs."""

    coefficients: Path | None = option("TSV file for b, SE, t, p of all terms.", _FILES)
    write_frame: Path | None = option("TSV file for all columns of the regression, for R.", _FILES)

    def write(self, found: "ReadingReport") -> None:
        """Write the requested tables."""
        from hf_synlm.evaluation.reading import report

        rows = dict(coefficients=report.coefficient_rows, write_frame=report.frame_rows)
        for name, path in dataclasses.asdict(self).items():
            if path is not None:
                write_text(path, rows_text(rows[name](found)))
                outputs.say(f"wrote {path}")


@dataclasses.dataclass(frozen=True)
class _Study:
    """What predicts which times, and how."""

    surprisals: Sequence[str]
    model: str | None
    times: TimesOptions
    regression: RegressionOptions
    computing: ComputingOptions

    def check(self, files: FileOptions) -> None:
        """Refuse options that contradict each other."""
        preset, model = self.times.preset, self.model
        if (preset is None) != (self.times.data is None):
            raise ValueError("--preset and --data go together. Name a corpus by --preset and its folder by --data")
        if preset is None and self.times.times is None:
            raise ValueError("the reading times are missing. Pass a table by --times, or --preset with --data")
        if preset is None and model is not None:
            raise ValueError(
                "--model reads only the text of a --preset. Make a table of your own text by `synlm surprisal`"
            )
        if bool(self.surprisals) == (model is not None):
            raise ValueError("give either tables of `synlm surprisal`, or --model to compute surprisals")
        if model is None:
            given = options.differing(self.computing, ComputingOptions(seed=self.computing.seed))
            options.refuse(given, "without --model nothing is computed, so this would change nothing")
        if preset == "sap":
            given = options.differing(self.regression, RegressionOptions()) + options.differing(files, FileOptions())
            options.refuse(given, "--preset sap compares effects of items, without a regression")
        elif self.times.slope is not None:
            options.refuse(["slope"], "this belongs to --preset sap")

    def predictors(
        self, texts: Sequence[TextItem], preferred: Literal["sentence", "document"], read: "Callable[[str], Predictor]"
    ) -> "tuple[list[Predictor], dict[str, Any]]":
        """Compute surprisals with the model, or read them from the tables. Also return the model's description."""
        if self.model is not None:
            return self.computing.predictors(self.model, texts, preferred)
        return [read(given) for given in self.surprisals], {}

    def regress(self) -> "ReadingReport":
        """Measure how well surprisal predicts the times of words."""
        from hf_synlm.evaluation.reading import natural_stories, report
        from hf_synlm.evaluation.reading.corpus import join_corpus
        from hf_synlm.evaluation.reading.tables import read_predictor, read_rows

        times, regression = self.times, self.regression
        text, counts, column, said = None, regression.frequencies, times.rt_column, list[str]()
        read = [path for path in (times.times, Path(counts or "")) if path is not None and path.is_file()]
        if times.data is not None:
            text, of_text = natural_stories.read_text(times.data)
            read, counts = read + of_text, counts or "count"
        settings = regression.settings(counts is not None, self.computing.seed)
        if times.times is not None:
            measured = read_rows(times.times)
            remark = "has no column word, so the words were not compared. Rename the column of its words to word"
            said = [] if "word" in measured else [f"{times.times} {remark}"]
        elif times.data is not None:
            measured, column, file, said = natural_stories.read_times(times.data)
            read.append(file)
        predictors, described = self.predictors(
            [] if text is None else natural_stories.text_items(text),
            "document",
            lambda given: (None if text is None else natural_stories.read_gpt3(given, text)) or read_predictor(given),
        )
        corpus = join_corpus(
            predictors[0].table if text is None else text, predictors, measured, rt_column=column,
            by_subject=regression.by_subject or regression.mixed, frequencies=counts,
            controls=regression.control or [], **times.joining(),
        )  # fmt: skip
        corpus.remarks[:0] = said
        return report.evaluate_reading(
            corpus,
            settings,
            model=described,
            options={
                "preset": times.preset,
                "controls": "+".join(regression.control or []) or None,
                "frequencies": counts,
            },
            data={"files": describe_files(read)},
        )

    def effects(self) -> EvaluationResult:
        """Compute the effects of the SAP benchmark by item."""
        from hf_synlm.evaluation.reading import sap
        from hf_synlm.evaluation.reading.tables import read_predictor
        from hf_synlm.evaluation.results import library_versions

        items, read = sap.read_items(self.times.data or Path())
        effects, file = sap.read_effects(self.times.data or Path(), self.times.times, self.times.rt_column)
        texts = [TextItem(str(k), sentence) for k, sentence in enumerate(items["sentence"])]
        predictors, described = self.predictors(texts, "sentence", read_predictor)
        rows = sap.compare_effects(items, effects, predictors, self.times.slope)
        remarks = [remark for one in predictors for remark in sap.remark_on_unknown_words(items, one)]
        remarks += sap.remark_on_equal_pairs(rows)
        for remark in remarks:
            outputs.say(remark)
        return EvaluationResult(
            task="reading-effects",
            scores={f"{row['predictor']} {row['construction']} {row['region']}": row["r"] for row in rows},
            model={"name": ", ".join(one.name for one in predictors), **described},
            options={"preset": "sap", "slope": self.times.slope, "seed": self.computing.seed},
            data={"files": describe_files([*read, file])},
            tables={"effects by item": rows} | ({"remarks": [{"remark": one} for one in remarks]} if remarks else {}),
            versions=library_versions("pandas", "scipy"),
        )


def reading(
    surprisals: list[str] | None = argument(
        "Tables of `synlm surprisal`: FILE, NAME=FILE or NAME=FILE:COLUMN; several are compared."
    ),
    *,
    model: str | None = option("Compute the surprisals by a model: folder, or name on the Hub.", "Model"),
    times: TimesOptions,
    regression: RegressionOptions,
    computing: ComputingOptions,
    files: FileOptions,
    out: options.Output = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Measure how much surprisal improves the prediction of reading times (Delta log-likelihood).

    The words are divided into parts (--folds). A regression predicts each part from the other parts, first with length,
    frequency, punctuation and place, then also with surprisal. Delta LL is the mean gain in log density, in nats per
    word. The mean gain can be positive although the effect has the wrong sign, so look at b and t, too. Tables are
    joined by the positions of words. The words of the tables must be the same.

    Examples:
        synlm evaluate reading surprisals.tsv --times rt.tsv --rt-column mean_rt --frequencies counts.tsv --out r.json
        synlm evaluate reading --preset natural-stories --data naturalstories --model gpt2 --out gpt2.json
    """
    study = _Study(surprisals or [], model, times, regression, computing)
    study.check(files)
    from hf_synlm.evaluation.reading.tables import split_given

    reads = [times.times, *(split_given(given)[1] for given in surprisals or ())]
    outputs.check_results(out, overwrite, *reads, model=model)
    for name, path in dataclasses.asdict(files).items():
        outputs.check_out(path, overwrite, *reads, *outputs.report_files(out), model=model, flag=flag_of(name))
    if times.preset == "sap":
        outputs.report(study.effects(), out)
        return
    found = study.regress()
    for remark in found.remarks:
        outputs.say(remark)
    files.write(found)
    outputs.report(found.result, out)
