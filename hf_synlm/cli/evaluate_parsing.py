"""`synlm evaluate parsing`."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.data.parsed import ParsedSentence, read_parses
from hf_synlm.evaluation.evalb import COLLINS, EvalbParameters
from hf_synlm.evaluation.parsing import CONVENTIONS, ParsingConvention, resolve_convention
from hf_synlm.evaluation.results import EvaluationResult, describe_files
from hf_synlm.evaluation.treebank_parsing import Treebank, load_treebank, parse_sentences, report_evalb, report_parsing


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingOptions:
    """What counts in the score."""

    convention: Annotated[
        str,
        typer.Option(help=f"What counts: {', '.join(CONVENTIONS)}; or evalb, brackets as the program EVALB counts."),
    ] = "gpst"
    punctuation: Annotated[
        Literal["remove", "ignore", "keep"] | None,
        typer.Option(
            help="Remove it before parsing (default); parse, but do not score it; keep it (default of evalb)."
        ),
    ] = None
    punctuation_by: Annotated[Literal["tag", "form"], typer.Option(help="What tells punctuation.")] = "tag"
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Parse and score sentences of at most so many words only.")
    ] = None
    min_length: Annotated[
        int | None, typer.Option(min=1, help="Parse and score sentences of at least so many words only.")
    ] = None
    parameters: Annotated[
        Path | None, typer.Option("--prm", help="Parameter file of EVALB; default: as in COLLINS.prm.")
    ] = None
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="evalb: compare brackets without labels.")] = False

    def rule(self) -> ParsingConvention | EvalbParameters:
        """The convention.

        Raises:
            ValueError: there is none of this name, or options that belong to another one.
        """
        if self.convention not in (*CONVENTIONS, "evalb"):
            raise ValueError(
                f"there is no convention {self.convention!r}: choose one of {', '.join(CONVENTIONS)}, evalb"
            )
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

    def treebank(self, path: Path, limit: int | None) -> Treebank:
        """The gold trees, with punctuation as the options say."""
        usual = "keep" if self.convention == "evalb" else "remove"
        return load_treebank(path, self.punctuation or usual, limit, punctuation_by=self.punctuation_by)

    def describe(self, rule: ParsingConvention | EvalbParameters, bank: Treebank) -> dict[str, Any]:
        """The options of the result."""
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


def command(
    treebank: Annotated[Path, typer.Option(help="Gold trees in the format of the Penn Treebank.")],
    counting: CountingOptions,
    parsing: options.Parsing,
    model: Annotated[
        str | None,
        typer.Option(help="Folder of the model that parses, or its name on the Hub.", rich_help_panel="Model"),
    ] = None,
    trees: Annotated[
        list[Path] | None,
        typer.Option(help="Score the trees in this file instead, one line per gold sentence; repeat for several runs."),
    ] = None,
    tree_style: options.TreeStyleOption = "unlabeled",
    limit: Annotated[int | None, typer.Option(min=1, help="Take the first so many sentences.")] = None,
    out: options.Output = None,
) -> None:
    """F1 of trees against a treebank, by a named convention, next to the trees that need no model.

    Also recall by label, width and height, depth and branching of the trees, and the agreement of several runs
    (several --trees). All numbers in percent.

    Example: synlm evaluate parsing --treebank wsj23.mrg --model runs/gpst_tiny/model --num-beams 20 --out f1.json
    """
    if (model is None) == (not trees):
        raise ValueError("give either --model, which parses the treebank, or --trees, which were parsed before")
    rule, bank = counting.rule(), counting.treebank(treebank, limit)
    settings = counting.describe(rule, bank)
    data = {"files": describe_files([treebank, *(trees or ()), *filter(None, [counting.parameters])])}
    if model is None:
        _check_unused(parsing)
        scores, tables = _score(bank, {str(path): read_parses(path, tree_style) for path in trees or ()}, rule)
        named = {"name": ", ".join(map(str, trees or ()))}
        result = EvaluationResult("parsing", scores, named, settings, data, tables)
    else:
        chosen, scorer = parsing.chosen(), parsing.scorer(model)
        if isinstance(rule, EvalbParameters):
            _check_labels(scorer.model.config, rule)
        else:
            bank = bank.select(bank.numbers_scored(rule))
        start, bar = time.perf_counter(), f"parse: {scorer.name}"
        parsed = parse_sentences(
            scorer.model, scorer.tokenizer, bank.words, batch_size=parsing.batch_size, progress=bar, **chosen
        )
        seconds = time.perf_counter() - start
        scores, tables = _score(bank, {scorer.name: parsed}, rule)
        unused = ["estimator", "begin_token", *([] if chosen.get("method", "search") == "search" else ["num_beams"])]
        settings |= {**dict.fromkeys(unused), "parse": chosen, "seed": parsing.seed}
        result = EvaluationResult.of(scorer, "parsing", scores, settings, data=data, tables=tables, seconds=seconds)
    options.report(result, out)


def _score(
    bank: Treebank, runs: Mapping[str, Sequence[ParsedSentence]], rule: ParsingConvention | EvalbParameters
) -> tuple[dict[str, float], dict[str, list[dict[str, Any]]]]:
    return report_evalb(bank, runs, rule) if isinstance(rule, EvalbParameters) else report_parsing(bank, runs, rule)


def _check_unused(parsing: options.Parsing) -> None:
    """Trees that are given need no model, so none of its options."""
    usual = dataclasses.asdict(options.Parsing())
    given = [name for name, value in dataclasses.asdict(parsing).items() if value != usual[name]]
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{flags}: --trees were parsed before, so this would change nothing. Leave it out.")


def _check_labels(config: Any, parameters: EvalbParameters) -> None:
    if parameters.labeled and not getattr(config, "nonterminals", None):
        raise ValueError(f"{config.model_type} gives trees without labels; score them without (--unlabeled)")
