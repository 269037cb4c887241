# SPDX-License-Identifier: Apache-2.0
"""`synlm surprisal`: word-by-word measures of texts."""

import dataclasses
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import count, pairwise, takewhile, tee
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.data.files import check_output, file_writer, write_text
from hf_synlm.data.text import plural, share
from hf_synlm.evaluation.results import EvaluationResult, describe_files, library_versions
from hf_synlm.evaluation.text.tables import table_text
from hf_synlm.evaluation.text.text_items import OpenTexts, TextItem, is_part_of_text, text_files

if TYPE_CHECKING:
    from hf_synlm.evaluation.text.scoring import TextScorer
    from hf_synlm.evaluation.text.surprisal import WordScores

_TREES = "Given trees"
_INSIDE = re.compile(r"\w[^\w\s'’-]+\s+\w")


def _check_table(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() in (".csv", ".json", ".jsonl", ".xlsx", ".parquet"):
        raise ValueError(f"--out {out} does not end in .tsv, but the table is TSV. Choose a name that ends in .tsv")
    check_output(out, overwrite)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputOptions(options.TextReading):
    """Where the input of `surprisal` holds the texts."""

    file_format: options.InputFormat | None = option(
        "Format of the input; default: by the ending of the file name.", name="--format"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasureOptions(options.Beliefs):
    """What `surprisal` measures, and how the model reads the texts."""

    unit: Literal["bits", "nats"] = option("Unit of surprisal, which is part of the column's name.", default="bits")
    context: options.Context = "sentence"
    word_correction: bool = option(
        "Compute the probability of words instead of tokens: the space after a word counts as part of this word, "
        "not of the next word. If tokens do not mark where words begin, nothing changes, and OUT.meta.json says so.",
        default=False,
    )
    tokenize: options.Tokenize = None
    lmzoo: bool = option("Write the columns of lm-zoo instead: one row per token, in bits.", default=False)
    entropy: Literal["shannon", "renyi"] | None = option(
        "Add entropy_bits: the entropy of the next token before each word. Only the first token of the word counts. "
        "renyi: add renyi_entropy_bits, of order 1/2, instead. For models that search (GPST, RNNG, ...), a second "
        "search computes the entropy by the estimator stepwise."
    )
    attention_entropy: Literal["projected", "raw"] | None = option(
        "For Tree LM and Transformer Grammars. Add nae, the normalized attention entropy where the word is read. "
        "The entropy is summed over the heads of the top layer and the tokens of the word, and averaged over the "
        "beam. projected: attention is weighted by its effect on the output. raw: add nae_raw, unweighted, instead."
    )
    frequencies: str | None = option(
        "Add length and log_frequency of each word without punctuation at its ends, as `synlm evaluate "
        "reading` computes them. Give a table of words and their counts, or wordfreq:en, wordfreq:de, ... (counts "
        "in a billion words). A word that the table lacks is looked up in lower case. Needs the extra [reading]."
    )
    first_word: bool = option(
        "Score the first word, after a begin token; otherwise its fields are empty.", default=True
    )

    def check(self, texts: Sequence[Path], several_columns: bool) -> None:
        """Refuse options whose measures have no column in lm-zoo's format."""
        if not self.lmzoo:
            return
        if len(texts) > 1 or texts[0].is_dir():
            raise ValueError(f"--lmzoo has no column for the file of a row. Give one file instead of {texts[0]} ...")
        if several_columns:
            raise ValueError("--lmzoo has only one column of surprisals. Give one --model and one --num-beams")
        usual = MeasureOptions(lmzoo=True, context=self.context, tokenize=self.tokenize, first_word=self.first_word)
        given = [name for name in options.differing(self, usual) if name != "word_correction"]
        options.refuse(given, "--lmzoo has four columns, in bits")

    @property
    def entropies(self) -> dict[str, Any]:
        """The requested kinds of entropy and belief update, as arguments of `TextScorer`."""
        return {"entropy": self.entropy, "attention_entropy": self.attention_entropy, "belief_update": self.beliefs}

    @property
    def counts_file(self) -> Path | None:
        """The path of --frequencies if it names a file, else None."""
        path = Path(self.frequencies or "")
        return path if path.is_file() else None

    def counts(self) -> Callable[[str], float] | None:
        """A function that returns the count of a word in --frequencies, or None without this option."""
        if self.frequencies is None:
            return None
        from hf_synlm.evaluation.reading.corpus import counter

        return counter(self.frequencies)

    def settings(self) -> dict[str, Any]:
        """What the result says of these measures."""
        found = {"unit": self.unit, "first_word": self.first_word, **self.entropies}
        if self.beliefs is not None:  # JSON has no inf
            found["belief_update"] = [self.beliefs[0], f"order {self.beliefs[1]:g}"]
        return {**found, "frequencies": self.frequencies}

    def data(self) -> dict[str, Any]:
        """The file of the frequencies, if there is one."""
        return {} if self.counts_file is None else {"frequencies": describe_files([self.counts_file])}

    def scorer(self, scoring: options.Scoring, model: str) -> "TextScorer":
        """Load the model so that it computes these measures."""
        return scoring.scorer(model, begin=self.first_word, details=not self.lmzoo, **self.entropies)

    def how(self, scorer: "TextScorer") -> dict[str, Any]:
        """Arguments of `score_words`. Print a remark if an option does not apply."""
        from hf_synlm.evaluation.text.surprisal import can_correct_words

        correct = self.word_correction and can_correct_words(scorer)
        if correct != self.word_correction:
            outputs.say("--word-correction does not apply, because the tokens of this model show where a word ends")
        tokenize = scorer.tokenization(self.tokenize)
        return {"context": self.context, "word_correction": correct, "tokenize": tokenize}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreeOptions:
    """Trees that are given for the texts of `surprisal`."""

    trees: list[Path] | None = option(
        "File with a tree for every sentence: brackets, or JSON lines of `synlm parse`; repeat for several. Leaves "
        "may split words: 'end' and '.' for 'end.'. The surprisal of a word then includes its part of the tree. Do "
        "not compare such values with surprisals summed over trees (GPST, RNNG, Tree LM, URNNG, Pushdown).",
        _TREES,
        **options.INPUT_FILE,
    )
    unknown_labels: str = option(
        "What to do with labels that the model lacks. error: stop. drop: leave out their brackets. FILE: each "
        "line names a label and its replacement, or a label to leave out.",
        _TREES,
        default="error",
    )

    @cached_property
    def counts(self) -> Counter[str]:
        """The numbers of scored texts and of changed trees."""
        return Counter()

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        named = [] if self.unknown_labels in ("error", "drop") else [Path(self.unknown_labels)]
        return [*(self.trees or ()), *named]

    def check(self, scoring: options.Scoring, measures: MeasureOptions) -> None:
        """Refuse options that would change nothing."""
        if self.trees is None:
            if self.unknown_labels != "error":
                raise ValueError("--unknown-labels belongs to --trees. Add --trees, or omit --unknown-labels")
            return
        unused: dict[str, object] = {"context": measures.context != "sentence"}
        unused |= {
            name: getattr(measures, name) for name in ("word_correction", "tokenize", "entropy", "belief_update")
        }
        names = ("num_beams", *options.SEARCH_OPTIONS, "estimator", "cache", "num_processes")
        unused |= {name: getattr(scoring, name) for name in names}
        given = [name for name, value in unused.items() if value]
        options.refuse(given, "with --trees every sentence has one tree and is read alone")

    def scores(self, scorer: "TextScorer", items: list[TextItem] | Iterator[TextItem]) -> "Iterator[WordScores]":
        """Score the words of texts with their trees. If the texts are a list, the trees may be in any order."""
        from hf_synlm.evaluation.text import given_trees
        from hf_synlm.evaluation.text.batches import growing_blocks
        from hf_synlm.evaluation.text.tree_files import Proposals

        drop = self.unknown_labels == "drop"
        renamed = None if self.unknown_labels in ("error", "drop") else given_trees.read_label_map(self.unknown_labels)
        if isinstance(items, list):
            blocks = iter([list(zip(items, given_trees.find_trees(Proposals(self.trees or []), items), strict=True))])
        else:
            items, read = tee(items)
            trees = given_trees.trees_in_order(self.trees or [], read)
            blocks = growing_blocks(zip(items, trees, strict=True), 64 * scorer.batch_size, 8)
        for block in blocks:
            texts, found = zip(*block, strict=True)
            fitted, changed = given_trees.fit_labels(scorer, found, drop=drop, renamed=renamed)
            self.counts.update(texts=len(texts), changed=changed)
            yield from given_trees.score_given_trees(scorer, texts, fitted)
        if self.counts["changed"]:
            total = plural(self.counts["texts"], "tree")
            outputs.say(f"--unknown-labels {self.unknown_labels} changed {self.counts['changed']} of {total}")

    def describe(self, scorer: "TextScorer") -> dict[str, Any]:
        """Describe the trees for the result. Call this after all texts have been scored."""
        from hf_synlm.evaluation.text.tree_files import without_search

        described = {"estimator": "joint with given trees", "unknown_labels": self.unknown_labels, "tokenize": None}
        files = describe_files(self.trees or [])
        return {**without_search(scorer), **described, "trees": files, "trees_changed": self.counts["changed"]}


def surprisal(
    *,
    texts: list[Path] = argument(
        "Text (one sentence per line), or .tsv, .csv or .jsonl tables; several files, or folders of them; - reads "
        "standard input.",
        default=MISSING,
    ),
    model: list[str] = option(
        "Folder of a model, or its name on the Hub; repeat for a column of surprisals by each.",
        "Model",
        default=MISSING,
        callback=options.find_models,
    ),
    scoring: options.ScoringByBeams,
    reading: InputOptions,
    given: TreeOptions,
    out: Path | None = option("TSV file to write; OUT.meta.json describes it. Default: print the table."),
    overwrite: options.Overwrite = False,
    measures: MeasureOptions,
) -> None:
    """Compute the surprisal of every word of texts.

    The table has one row per word of the input. White space separates words. Punctuation without a space before it
    belongs to the word. With --word-column, the input is a table with one word per row, and the output has the same
    rows in the same order. An empty word has no measures. The surprisal of a region is the sum over its words. With
    --trees, the surprisal of a word includes the tree actions since the word before. Rows are printed as soon as they
    are computed, and a long file is read piece by piece. Columns: item, sentence_id, word_id, word, n_tokens, oov,
    surprisal_bits, its lexical and structural part (GPST, RNNG), cum_logprob_nats, beam_entropy_bits, n_actions,
    stack_depth, char_start, char_end, file (if there are several), and the other columns of an input table. ON-LSTM,
    PRPN and PaLM add tree_distance, tree_depth, n_opened and n_closed. Further options add entropy_bits, nae,
    belief_update_bits, belief_cut, length and log_frequency. With several --num-beams, each width has a column, such as
    surprisal_bits_b5. The other columns come from the widest beam. With several --model, each model has a column, such
    as surprisal_bits_rnng-mini. The other columns come from the first model. sentence_id counts the texts of all files.
    If a model lacks a measure, the field of this measure is empty.

    Examples:
        echo "the people agree" | synlm surprisal - --model model_cards/rnng-mini
        synlm surprisal stories.txt --model model_cards/gpst-tiny --num-beams 100 --out surprisals.tsv
        synlm surprisal novels/ page.txt --model model_cards/rnng-mini --tokenize ptb --cache done.cache --out all.tsv
        synlm surprisal wsj23.txt --trees wsj23.mrg --model model_cards/rnng-mini --out given.tsv
    """
    found = text_files(texts)
    reads = (*given.files, measures.counts_file, scoring.cache)
    outputs.check_out(out, overwrite, *reads, model=model, check=_check_table, beside=outputs.meta_file, once=found)
    by_width = scoring.by_width()
    _check_places(texts, out)
    measures.check(texts, several_columns=len(by_width) > 1 or len(model) > 1)
    options.refuse_repeated("--model", [_column_of(name) for name in model])
    if len(model) > 1 and (scoring.cache or given.trees):
        raise ValueError("--cache and --trees work with only one --model. Run the models one by one")
    given.check(scoring, measures)
    opened = reading.open(texts, reading.file_format)
    count_of = measures.counts()
    if not measures.lmzoo and reading.sentence_column is None:
        _say_repeated_items(opened.first)
    widest = by_width.pop(max(by_width, key=lambda width: width or 0))
    of_models = widest.for_models(model)
    scorer = measures.scorer(of_models[model[0]], model[0])
    outputs.say_plain_context(scorer, measures.context)
    how = measures.how(scorer)
    if given.trees is None:
        _say_how_text_is_read(scorer, measures, opened.first)
    start = time.perf_counter()
    items, scores, reads_of = _score(scorer, opened, given, list(by_width), len(model), out, how)
    if count_of is not None:
        scores = _with_frequencies(scores, count_of)
    others, described = _score_by_others(dict(list(of_models.items())[1:]), measures, reads_of, opened.first, out)
    if others:
        from hf_synlm.evaluation.text.surprisal import side_by_side

        scores = side_by_side(scores, {_column_of(model[0]): None, **others})
    unit = None if measures.lmzoo else measures.unit
    columns, counts = _write_words(items, scores, out, unit, opened.first)
    described |= {} if given.trees is None else given.describe(scorer)
    settings = {**measures.settings(), **how, "seed": scoring.seed, **described}
    seconds = time.perf_counter() - start
    data = {"files": describe_files(opened.files), "columns": columns, **measures.data()}
    versions = library_versions(*["wordfreq"][: measures.frequencies is not None])
    result = EvaluationResult.of(scorer, "surprisal", counts, settings, data, versions=versions, seconds=seconds)
    if out is not None:
        _write_meta(result, out, words_per_second=counts["words"] / seconds)
    _say_what_was_cut(scorer, counts, how["tokenize"], may_split=given.trees is None)
    for name, number in opened.late.items():
        outputs.say(f"column {name!r} is left out: {share(number, counts['texts'], 'text')} it, but not the first")


def _score(
    scorer: "TextScorer",
    opened: OpenTexts,
    given: TreeOptions,
    narrower: Sequence[int | None],
    num_models: int,
    out: Path | None,
    how: dict[str, Any],
) -> "tuple[Iterable[TextItem], Iterable[WordScores], list[Iterable[TextItem]]]":
    """The texts, their scores by the first model, and the texts for every other one.

    All read the same texts in step: the rows of a text are complete when it has been read.
    """
    number = 1 + len(narrower) + num_models
    copies: list[Any] = [opened.items] * number if isinstance(opened.items, list) else list(tee(opened.items, number))
    items, reads = copies[0], copies[1:]
    if given.trees is None:
        return items, _search(scorer, reads[num_models - 1 :], narrower, out, how), reads
    from hf_synlm.evaluation.text.processes import progress_bar

    total = len(items) if isinstance(items, list) else None
    scores = progress_bar(given.scores(scorer, reads[0]), _bar(scorer, out), unit="sentences", total=total)
    return items, scores, reads


def _search(
    scorer: "TextScorer",
    reads: Sequence[Iterable[TextItem]],
    narrower: Sequence[int | None],
    out: Path | None,
    how: dict[str, Any],
) -> "Iterable[WordScores]":
    """Scores of the words of texts, with the surprisals by `narrower` beams; each reads the texts once."""
    from hf_synlm.evaluation.text import surprisal as words

    if narrower and not scorer.searches:
        raise ValueError(f"--num-beams: {type(scorer.model).__name__} does not search. Leave --num-beams out.")
    texts = reads[0]
    is_apart = isinstance(texts, list) and any(b.document < a.document for a, b in pairwise(texts))
    first, *more = reads if out is not None or is_apart else map(iter, reads)  # rows are printed at once
    bar = _bar(scorer, out)
    others = {
        width: words.iterate_words(scorer.with_beam(width), read, progress=bar and f"{bar}, beam {width}", **how)
        for width, read in zip(sorted(filter(None, narrower)), more, strict=True)
    }
    scores = words.iterate_words(scorer, first, progress=bar, **how)
    return words.with_beams(scores, scorer.num_beams or 0, others, outputs.say) if others else scores


def _bar(scorer: "TextScorer", out: Path | None) -> str | None:
    """The name of a progress bar, which would be mixed with rows in a terminal."""
    return None if out is None and sys.stdout.isatty() else f"surprisal: {scorer.name}"


def _column_of(model: str) -> str:
    """What the column of a model is called after: the folder, or that of its training run."""
    return [part for part in Path(model).parts if part != "model"][-1]


def _score_by_others(
    of_models: Mapping[str, options.Scoring],
    measures: MeasureOptions,
    reads: Sequence[Iterable[TextItem]],
    first: Sequence[TextItem],
    out: Path | None,
) -> "tuple[dict[str, Iterable[WordScores]], dict[str, Any]]":
    """Scores of the words of texts by further models, by their columns, and what describes the models."""
    found, described = {}, []
    for (name, scoring), read in zip(of_models.items(), reads, strict=False):
        scorer = scoring.scorer(name, begin=measures.first_word, details=False)
        how = measures.how(scorer)
        _say_how_text_is_read(scorer, measures, first)
        found[_column_of(name)] = _search(scorer, [read], [], out, how)
        described.append({**scorer.describe(), **scorer.options(), **how})
    return found, {"other_models": described} if described else {}


def _with_frequencies(scores: "Iterable[WordScores]", count_of: Callable[[str], float]) -> "Iterator[WordScores]":
    """Scores with the length and log frequency of every word, as in the baseline of reading times."""
    import torch

    from hf_synlm.evaluation.reading.corpus import length_of

    for found in scores:
        lengths = [length_of(word.text) for word in found.words]
        logs = [math.log(count_of(word.text) + 1) for word in found.words]
        found.more |= {"length": torch.tensor(lengths), "log_frequency": torch.tensor(logs, dtype=torch.float64)}
        yield found


def _check_places(texts: Sequence[Path], out: Path | None) -> None:
    """Refuse an output among the inputs."""
    if out is not None and any(place.is_dir() and out.resolve().is_relative_to(place.resolve()) for place in texts):
        raise ValueError(f"--out {out} lies in a folder whose files are read as input. Choose another folder")


def _write_words(
    items: Iterable[TextItem],
    scores: "Iterable[WordScores]",
    out: Path | None,
    unit: Literal["bits", "nats"] | None,
    first: Sequence[TextItem],
) -> tuple[list[str], Counter[str]]:
    """Print or write the rows of each text as soon as its scores are there; without a `unit` those of lm-zoo.

    `first` are texts that have all columns of the input. Returns the names of the columns, and counts.
    """
    from hf_synlm.evaluation.text import surprisal as words

    more, names = words.more_columns(first), list[str]()
    counts = Counter(texts=0, words=0, tokens=0, unknown_words=0, words_without_token=0)
    waiting: dict[int, Sequence[Any]] = {}
    following = 0
    with nullcontext() if out is None else file_writer(out) as file:
        for number, (item, found) in enumerate(zip(items, scores, strict=True), 1):
            rows: list[Sequence[Any]] = []
            if number == 1:
                names = words.columns(unit, first, found.more) if unit else words.LMZOO_COLUMNS
                rows.append(names)
            new = list(words.word_rows(number, item, found, unit, more) if unit else words.token_rows(number, found))
            if unit and item.rows:  # they come out in the order of the input
                waiting |= dict(zip((row.place for row in item.rows), new, strict=True))
                new = [waiting.pop(place) for place in takewhile(waiting.__contains__, count(following))]
                following += len(new)
            rows += new
            if file is None:
                _print(rows)
            else:
                file.write(table_text(rows).encode())
            counts["texts"] += 1
            counts["words"] += len(found.words)
            counts["tokens"] += len(found.tokens)
            counts["unknown_words"] += sum(found.unknown)
            counts["words_without_token"] += sum(bool(word.text) for word in found.words)
            counts["words_without_token"] -= int(found.num_tokens.count_nonzero())
        outputs.leave_output_to_first_process()
    return names, counts


def _write_meta(result: EvaluationResult, out: Path, words_per_second: float) -> None:
    """Say how the table was made, in a file beside it."""
    outputs.say(f"wrote {out}: {result.scores['words']:,} words, {words_per_second:.3g} a second")
    result.command = outputs.command_line.get()
    write_text(outputs.meta_file(out), result.to_json())
    outputs.say(f"wrote {outputs.meta_file(out)}, which says how the table was made")


def _print(rows: Sequence[Sequence[Any]]) -> None:
    """Print rows at once."""
    if outputs.is_first_process():
        typer.echo(table_text(rows), nl=False)
        sys.stdout.flush()


def _say_repeated_items(items: Sequence[TextItem]) -> None:
    repeated = sum(count > 1 for count in Counter(item.item for item in items).values())
    if repeated:
        texts = "texts, by condition" if items[0].rows else "texts"
        outputs.say(
            f"{plural(repeated, 'item')} with several {texts}. To join other tables, use sentence_id, which "
            "counts the texts, and word_id, not item"
        )
    if not items[0].rows and any(is_part_of_text(*both) for both in pairwise(items)):
        outputs.say(
            "each row of an item is read as a sentence of its own. If the rows hold the words or regions of one "
            "text, name the column by --word-column, not --text-column"
        )


def _say_how_text_is_read(scorer: "TextScorer", measures: MeasureOptions, items: Sequence[TextItem]) -> None:
    """Tell how a model reads words, and that one reads no marks between words."""
    outputs.say_tokenization(scorer, measures.tokenize)
    if scorer.tokenization(measures.tokenize) != "no-punctuation":
        return
    inside = sum(bool(_INSIDE.search(item.text)) for item in items)
    if inside:
        outputs.say(
            f"--tokenize no-punctuation: {share(inside, len(items), 'text')} marks between words, such as commas, "
            "which are left out. If you compare texts with and without marks, choose a model that reads punctuation"
        )


def _say_what_was_cut(scorer: "TextScorer", counts: Mapping[str, int], tokenize: str, may_split: bool) -> None:
    """Remarks on words that the model does not know, and texts that it cannot read in one piece."""
    from hf_synlm.evaluation.text.words import has_words

    if counts["unknown_words"]:
        if not has_words(scorer.tokenizer):
            remedy = "the tokenizer lacks some characters of these words"
        elif tokenize == "words" and may_split:
            remedy = "perhaps its treebank lacks punctuation, or separates punctuation and clitics; try --tokenize ptb"
        else:
            remedy = "each is read as a class of unknown words, or left out; a model with word pieces knows all words"
        outputs.say(
            f"{counts['unknown_words']} of {counts['words']} words ({counts['unknown_words'] / counts['words']:.0%}) "
            f"are unknown to this model (oov 1): {remedy}"
        )
    if without := counts["words_without_token"]:
        outputs.say(
            f"no token (n_tokens 0) and no surprisal: {without:,} of {plural(counts['words'], 'word')}, such as "
            "marks that the model does not read"
        )
    if scorer.cuts["texts_in_windows"]:
        outputs.say(
            f"{share(scorer.cuts['texts_in_windows'], counts['texts'], 'text')} more tokens than the model's "
            f"{scorer.max_tokens} positions: they were scored in windows that overlap by half"
        )
    if scorer.cuts["contexts_cut"]:
        outputs.say(
            f"{share(scorer.cuts['contexts_cut'], counts['texts'], 'text')} more context than the model can read: "
            "the first sentences of the context were left out"
        )
