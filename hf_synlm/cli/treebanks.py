# SPDX-License-Identifier: Apache-2.0
"""`synlm treebank` and `silver`: trees for training, from treebanks and from a parser."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.data.dependencies import DEPENDENCY_OPTIONS, holds_dependencies
from hf_synlm.data.files import flag_of, write_json, write_text
from hf_synlm.data.parsed import as_treebank_sentence
from hf_synlm.data.punctuation import check_tags, keep_words
from hf_synlm.data.text import plural, read_lines, split_sentences
from hf_synlm.data.treebank import (
    TreebankSentence,
    binarize_sentence,
    list_bad_lines,
    parse_treebank,
    read_dependency_trees,
    sentence_to_brackets,
    to_ptb_concat,
)
from hf_synlm.evaluation.results import describe_files
from hf_synlm.evaluation.text.text_items import read_items

OutFile = Annotated[Path, typer.Option(help="File to write.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadingOptions(options.TreebankReading):
    """How `treebank` reads trees."""

    mark_heads: bool = option(
        "Add -HD to the child of a constituent that holds its head.", options.DEPENDENCIES, default=False
    )

    def by_kind(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The given options of brackets, and the given options of dependencies."""
        of_brackets = self.reading()
        of_dependencies = of_brackets.pop("dependencies", {}) | {"mark_heads": self.mark_heads}
        return of_brackets, {name: value for name, value in of_dependencies.items() if value}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CleaningOptions:
    """What `treebank` does with the trees that it has read."""

    punctuation: Literal["keep", "remove"] = option("Keep or remove punctuation.", default="keep")
    punctuation_by: options.PunctuationBy = "tag"
    words: Literal["keep", "ptb-concat"] = option(
        "keep: change no words; ptb-concat: lower case, N for numbers, no punctuation (the usual Penn Treebank text).",
        default="keep",
    )
    binarize: Literal["right", "left"] | None = option(
        "Make trees binary. The programs of this library do this themselves where they need it."
    )
    max_words: int | None = option("Leave out sentences of more words than this.", min=1)

    def of_brackets(self) -> list[str]:
        """The given options that need brackets, not dependencies."""
        given = ["--binarize"] * (self.binarize is not None) + ["--words ptb-concat"] * (self.words == "ptb-concat")
        return given + ["--punctuation-by form"] * (self.punctuation_by == "form")

    def count_unknown_tags(self, sentences: Iterable[TreebankSentence]) -> int:
        """How many words count as punctuation because their tags are unknown. Raise ValueError if they are many."""
        tags = Counter(tag for sentence in sentences for tag in sentence.tags)
        reads_tags = self.punctuation == "remove" and self.punctuation_by == "tag" and self.words != "ptb-concat"
        return check_tags(tags, "recognize punctuation by form (--punctuation-by form)") if tags and reads_tags else 0

    def clean(self, sentence: TreebankSentence, converted: bool, left_out: Counter[str]) -> TreebankSentence | None:
        """Return the tree to write, or None and count the reason.

        `converted` says whether the tree was made from dependencies.
        """
        kept: TreebankSentence | None = sentence
        if self.words == "ptb-concat":
            kept = to_ptb_concat(sentence)
        elif self.punctuation == "remove" and not converted:
            is_word = keep_words(sentence.words, sentence.tags, self.punctuation_by)
            kept = sentence.select_words(is_word) if any(is_word) else None
        if kept is None:
            left_out["no words left"] += 1
            return None
        if self.max_words is not None and len(kept.words) > self.max_words:
            left_out[f"more than {plural(self.max_words, 'word')}"] += 1
            return None
        return kept if self.binarize is None else binarize_sentence(kept, self.binarize)


def _holds_dependencies(path: Path, kind: str | None, given: Mapping[str, Any], brackets_only: Sequence[str]) -> bool:
    """Whether a file is CoNLL-U; ValueError for options that do not belong to its kind."""
    found = kind == "conllu" if kind else holds_dependencies(path)
    if found and brackets_only:
        raise ValueError(
            f"{path} holds dependencies, but {brackets_only[0]} is for brackets. Leave {brackets_only[0]} out. "
            "--structure left-first or right-first makes trees binary, and --punctuation remove removes punctuation."
        )
    if given and not found:
        raise ValueError(
            f"{path} holds bracketed trees, which are constituents already. Leave out {flag_of(next(iter(given)))}, "
            "or give --from conllu"
        )
    return found


def _read_trees_of(path: Path, left_out: Counter[str], **reading: Any) -> list[TreebankSentence]:
    """All trees of a file of brackets; an error lists all lines that have none."""
    try:
        return list(parse_treebank(read_lines(path), source=str(path), left_out=left_out, **reading))
    except ValueError as error:
        problems = list_bad_lines(path, **reading)
        if len(problems) < 2:
            raise
        listed = "\n  ".join([*problems[:20], *(["..."] if len(problems) > 20 else [])])
        raise ValueError(f"{path}: {len(problems)} lines are not trees:\n  {listed}") from error


def _read_parses(
    path: Path, left_out: Counter[str], style: options.TreeStyle, **reading: Any
) -> list[TreebankSentence]:
    """The best trees of a file of parses, which are read as they are."""
    if reading:
        raise ValueError(f"--from parses has no option {flag_of(next(iter(reading)))}. Leave this option out")
    parses = list(enumerate(options.read_trees(path, style), 1))
    found = [as_treebank_sentence(parsed, f"{path}:{number}") for number, parsed in parses if parsed.hypotheses]
    if len(found) < len(parses):
        left_out["no tree"] += len(parses) - len(found)
    return found


def treebank(
    *,
    trees: list[Path] = argument(
        "Files of bracketed trees, or of dependencies in CoNLL-U.", default=MISSING, **options.INPUT_FILE
    ),
    reading: ReadingOptions,
    out: OutFile,
    overwrite: options.Overwrite = False,
    kind: Literal["brackets", "conllu", "parses"] | None = option(
        "Format of the input; default: brackets or conllu, by the ending of the file name or by its first line. "
        "parses: output of `synlm parse` and `synlm evaluate parsing --save-trees`; missing labels become X.",
        name="--from",
    ),
    tree_style: options.TreeStyle = None,
    cleaning: CleaningOptions,
) -> None:
    """Check trees of parsers or treebanks, and write them as one clean file for training.

    The command reads bracketed trees with a tag for each word. Treebanks and the parsers benepar, stanza and supar
    write this format. The command also reads dependency treebanks (CoNLL-U, Universal Dependencies). In a dependency
    tree, a word and all words below it become a constituent. OUT has one tree per line, without traces, function tags
    and root wrappers. OUT.meta.json holds counts, and the checksums of inputs and output. If a tree cannot be read, the
    command stops and names the file and the lines.

    Examples:
        synlm treebank silver.train.txt --punctuation remove --max-words 40 --out train.txt
        synlm treebank de_gsd-ud-train.conllu --structure flat --labels deprel --out de.train.mrg
        synlm treebank parsed.txt --from parses --out train.txt
    """
    outputs.check_out(out, overwrite, *trees, beside=outputs.meta_file)
    if kind == "parses" and cleaning.punctuation == "remove" and cleaning.punctuation_by == "tag":
        raise ValueError("words of --from parses have no tags. Pass --punctuation-by form")
    if tree_style is not None and kind != "parses":
        raise ValueError("--tree-style is for --from parses. Add --from parses, or leave --tree-style out")
    inputs = describe_files(trees)
    of_brackets, of_dependencies = reading.by_kind()
    brackets_only = [*cleaning.of_brackets(), *map(flag_of, of_brackets)]
    left_out, changed = Counter[str](), Counter[str]()
    counted: dict[str, Any] = {"left_out": left_out, "counts": changed}
    sentences: list[tuple[TreebankSentence, bool]] = []  # with True if it was made of dependencies
    for path in trees:
        if _holds_dependencies(path, kind, of_dependencies, brackets_only):
            found = read_dependency_trees(path, punctuation=cleaning.punctuation, **counted, **of_dependencies)
            sentences += [(sentence, True) for sentence in found]
        else:
            read = partial(_read_parses, style=tree_style) if kind == "parses" else _read_trees_of
            sentences += [(sentence, False) for sentence in read(path, left_out, **of_brackets)]
    unknown_tags = cleaning.count_unknown_tags(sentence for sentence, converted in sentences if not converted)
    cleaned = (cleaning.clean(sentence, converted, left_out) for sentence, converted in sentences)
    kept = [sentence for sentence in cleaned if sentence is not None]
    remarks = [f"{count:,} left out ({why})" for why, count in left_out.items()]
    if not kept:
        names, why = ", ".join(map(str, trees)), "; ".join(remarks) or "it has none"
        raise ValueError(f"no tree is left of {names}: {why}. Give other files or weaker filters.")
    write_text(out, "".join(f"{sentence_to_brackets(sentence)}\n" for sentence in kept))
    num_words = sum(len(sentence.words) for sentence in kept)
    facts: dict[str, Any] = {"trees": len(kept), "words": num_words, "left_out": dict(left_out)}
    facts |= {"words_removed_by_unknown_tags": unknown_tags} if unknown_tags else {}
    if any(converted for _, converted in sentences):
        facts["dependencies"] = {**DEPENDENCY_OPTIONS, **of_dependencies, **changed}
    files = {"inputs": inputs, "output": describe_files([out])}
    write_json(outputs.meta_file(out), {**facts, **files, "command": outputs.command_line.get()})
    remarks += [f"{count:,} {what}" for what, count in (+changed).items()]
    outputs.say(", ".join([f"wrote {plural(len(kept), 'tree')} of {plural(num_words, 'word')} to {out}", *remarks]))


def silver(
    texts: options.Texts,
    out: OutFile,
    overwrite: options.Overwrite = False,
    parser: str = option("Parser: folder or Hub name of a model of `synlm train span-parser`.", default=MISSING),
    backbone: options.Backbone = None,
    min_confidence: float | None = option(
        "Leave out trees below this log-probability per word (nats), such as -0.1.", max=0
    ),
    dtype: options.DType = "auto",
    text_column: options.TextColumn = None,
    input_format: options.InputFormatOption = None,
    by_sentence: bool = option(
        "Split each line into sentences; default: a line is a sentence.", default=False, name="--split-sentences"
    ),
    language: str | None = option("Language for --split-sentences, such as de or zh-hans. Default: en."),
    words: Literal["split", "keep"] = option(
        "split: split words and punctuation as the (English) Penn Treebank does; keep: split at white space only.",
        default="split",
    ),
    device: options.Device = None,
    batch_size: int = option("Number of sentences to parse together.", default=50, min=1),
) -> None:
    """Parse text with a span parser, to train on the trees.

    The command writes one tree per sentence, without blank lines. `synlm treebank` turns these trees into training
    data. OUT.meta.json names the parser and holds checksums. If the command was stopped, run it again to continue.
    Until it is done, the trees are in OUT.partial.

    OUT.confidence.tsv holds the number of words of each tree. It also holds the log-probability of the tree in nats per
    word, as if spans were independent. The parser leaves out sentences that are too long, and words that it cannot
    read.

    Examples:
        synlm silver novel.txt --split-sentences --parser model_cards/span-parser-mini --out silver.mrg
        synlm treebank silver.mrg --max-words 40 --out train.txt
    """
    options.refuse(["language"] if language and not by_sentence else [], "this belongs to --split-sentences")
    confidences = Path(f"{out}.confidence.tsv")
    outputs.check_out(out, overwrite, texts, model=parser, beside=outputs.meta_file)
    outputs.check_out(confidences, overwrite, texts)
    inputs = describe_files([texts])
    items = read_items(texts, text_column=text_column, kind=input_format, flag="--input-format")
    lines = [item.text for item in items if item.text.strip()]
    if by_sentence:
        lines = [sentence for line in lines for sentence in split_sentences(line, language=language or "en")]
    loading = options.Parsing(backbone=backbone, device=device, dtype=dtype, batch_size=batch_size)
    facts, rows = _trees_of_parser(lines, out, loading, parser, words, min_confidence)
    table = "".join(f"{count}\t{confidence:.4f}\n" for _, count, confidence in rows)
    write_text(confidences, f"words\tconfidence\n{table}")
    write_text(out, "".join(f"{tree}\n" for tree, _, _ in rows))
    files = {"inputs": inputs, "output": describe_files([out])}
    write_json(outputs.meta_file(out), {"trees": len(rows), **facts, **files, "command": outputs.command_line.get()})
    Path(f"{out}.partial").unlink()
    remarks = [f"{count:,} left out ({why})" for why, count in facts["left_out"].items() if count]
    outputs.say(", ".join([f"wrote {plural(len(rows), 'tree')} to {out}", *remarks]))


def _trees_of_parser(
    lines: Sequence[str], out: Path, loading: options.Parsing, parser: str, words: str, min_confidence: float | None
) -> tuple[dict[str, Any], list[tuple[str, int, float]]]:
    """What names a span parser, and its trees with their numbers of words and confidences."""
    from hf_synlm.data.collate import encode_words
    from hf_synlm.evaluation.text.words import treebank_words
    from hf_synlm.evaluation.trees.treebank_parsing import EncodedSentence, parse_encoded
    from hf_synlm.hub.abilities import declared

    scorer = loading.scorer(parser)
    if not declared(scorer.model.config, "gives_tags"):
        raise ValueError(f"--parser {parser}: {type(scorer.model).__name__} gives no tags. Name a span parser.")
    limit, readable = scorer.model.config.max_position_embeddings, []
    for sentence in map(treebank_words if words == "split" else str.split, lines):
        with suppress(ValueError):  # a word of characters that the tokenizer leaves out; it is counted below
            ids, ends = encode_words(scorer.tokenizer, sentence)
            if len(ids) + 2 <= limit:
                readable.append(EncodedSentence(tuple(ids), tuple(ends), tuple(sentence)))
    given = {**loading.computation(), "cache": f"{out}.partial"}
    parsed = parse_encoded(scorer.model, readable, progress="silver trees", **given)
    outputs.leave_output_to_first_process()
    rows = [
        (sentence_to_brackets(as_treebank_sentence(one, "")), n, (one.tree().log_prob or 0.0) / n)
        for one, n in ((one, len(one.words)) for one in parsed)
    ]
    kept = [row for row in rows if min_confidence is None or row[2] >= min_confidence]
    left_out = {"not read": len(lines) - len(rows), "less sure": len(rows) - len(kept)}
    return {"parser": parser, "min_confidence": min_confidence, "left_out": left_out}, kept
