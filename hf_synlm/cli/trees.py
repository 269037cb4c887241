# SPDX-License-Identifier: Apache-2.0
"""`synlm parse`, `draw` and `generate`: trees of texts, and texts with their trees."""

import dataclasses
import inspect
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.data.files import check_output, file_writer, write_text
from hf_synlm.data.parsed import ParsedSentence, lines_of_parses
from hf_synlm.data.text import NATURAL, file_ending, plural
from hf_synlm.evaluation.results import json_text, markdown_table
from hf_synlm.evaluation.text.text_items import read_items
from hf_synlm.viz import SentenceView
from hf_synlm.viz.html import page_parts

if TYPE_CHECKING:
    from hf_synlm.evaluation.generation import GeneratedText

Format: TypeAlias = Literal["brackets", "json", "text", "upright", "latex", "svg", "html"]
_ENDINGS: dict[str, Format] = {".svg": "svg", ".html": "html", ".tex": "latex", ".jsonl": "json"}
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="brackets, json: one line per sentence; json has all trees and their log-probabilities. text, upright: "
        "trees drawn with characters. latex: for the package forest. svg: one file per sentence. html: one page "
        "with all trees and surprisals.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="Output file, for svg also a folder. By default, print the output.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TreesOptions:
    """Which trees of a beam `parse` prints."""

    num_trees: int | None = option(
        "Trees per sentence (json, html), for models with a beam; default: 1. Trees that are equal over words "
        "count once. With --consensus: how many trees of each beam count; default: all.",
        min=1,
    )
    consensus: bool = option(
        "Print the average of the trees in the beam, weighted by probability, not the best tree.", default=False
    )

    def count(self, model: Any, parsing: options.Parsing, among_several: bool) -> int | None:
        """How many trees of a sentence a model returns. With `among_several`, models without a beam return one tree."""
        if self.num_trees in (None, 1) and not self.consensus:
            return None
        from hf_synlm.hub.abilities import declared

        if among_several and not declared(model.config, "searches"):
            return None
        width = parsing.beam(model, f"--num-trees {self.num_trees}" if self.num_trees else "--consensus")
        if self.num_trees and self.num_trees > width:
            raise ValueError(
                f"--num-trees {self.num_trees} exceeds the beam of {width}. Raise --num-beams to --num-trees or more."
            )
        return self.num_trees or width

    def check_format(self, style: str, parsing: options.Parsing, num_models: int) -> None:
        """Refuse a format that shows one tree of a sentence where there are several."""
        several = parsing.chosen(num_return_sequences=self.num_trees).get("num_return_sequences", 1)
        if several != 1 and num_models == 1 and not self.consensus and style not in ("json", "html"):
            raise ValueError(
                f"--format {style} shows one tree of a sentence, not {several}. Choose --format json or html."
            )


def parse(
    *,
    texts: options.Texts,
    model: list[str] = option(
        "Folder of a model, or its name on the Hub; repeat for several, to print the average of their trees.",
        "Model",
        default=MISSING,
        callback=options.find_models,
    ),
    parsing: options.Parsing,
    style: FormatOption = "brackets",
    out: Out = None,
    overwrite: options.Overwrite = False,
    wanted: TreesOptions,
    reading: options.TextReading,
    input_format: options.InputFormatOption = None,
    tokenize: options.Tokenize = None,
    skip_long: bool = option(
        "Write a blank line for a sentence that is longer than the model can read.", default=False
    ),
) -> None:
    """Parse sentences into trees.

    The command prints trees as brackets, JSON, drawings, LaTeX, SVG or an HTML page. White space separates words. The
    pieces of a word stay together. A blank line stays blank. A sentence without a tree also becomes a blank line.
    Pictures show the surprisal of each word given the words before it, summed over trees. If --tokenize splits words,
    the leaves of trees are their parts.

    Examples:
        echo "the people agree" | synlm parse - --model model_cards/rnng-mini
        synlm parse in.txt --model model_cards/gpst-tiny --num-trees 5 --format html --out trees.html
        synlm parse in.txt --model model_cards/gpst-tiny --model model_cards/prpn-syd-tiny
    """
    options.refuse_repeated("--model", model)
    # The names of pictures depend on the sentences, see `_check_drawings`.
    outputs.check_out(out, overwrite, texts, parsing.cache, model=model, check=lambda path, replace: None)
    if len(model) > 1 and (tokenize or parsing.cache):
        raise ValueError(f"--{'tokenize' if tokenize else 'cache'} works with one --model only. Leave this option out.")
    wanted.check_format(style, parsing, len(model))
    opened = reading.open([texts], input_format, "--input-format")
    is_whole = opened.items is opened.first or len(model) > 1 or wanted.consensus
    is_stream = not is_whole and "RANK" not in os.environ  # accelerate launch: all results come at the end
    sentences: Any = (item.text.split() for item in opened.items)
    sentences = sentences if is_stream else list(sentences)
    _check_drawings(sentences if style == "svg" and not is_stream else None, style, out, overwrite)
    from hf_synlm.evaluation.text.batches import growing_blocks
    from hf_synlm.evaluation.trees.consensus import average_parses
    from hf_synlm.evaluation.trees.treebank_parsing import iterate_parses

    runs: dict[str, Iterator[ParsedSentence]] = {}
    skipped = Counter[str]()
    for name, own in parsing.for_models(model).items():
        scorer = own.scorer(name)
        runs[name] = iterate_parses(
            scorer.model,
            scorer.tokenizer,
            sentences,
            {**own.computation(), "progress": f"parse: {scorer.name}"},
            tokenize=scorer.tokenization(tokenize) if len(model) == 1 else None,  # several share their words
            skipped=skipped,
            skip_long=skip_long,
            **own.chosen(num_return_sequences=wanted.count(scorer.model, own, among_several=len(model) > 1)),
        )
        runs[name] = runs[name] if is_stream else iter(list(runs[name]))  # one model after the other
    if len(model) == 1:
        outputs.say_tokenization(scorer, tokenize)
    found = runs[model[0]]
    if wanted.consensus or len(model) > 1:
        found = iter(average_parses({name: list(run) for name, run in runs.items()}))
    counts = Counter[str]()
    found = _counted(found, counts)
    blocks: Iterable[list[ParsedSentence]] = growing_blocks(found, 1024) if is_stream else [list(found)]
    outputs.leave_output_to_first_process()
    if style == "html" and len(model) == 1:
        blocks = (_with_unknown_words(block, scorer) for block in blocks)
    total = None if is_stream else len(sentences)
    _write_drawings(blocks, style, out, f"{texts}, parsed by {', '.join(runs)}", total, overwrite)
    _say_what_has_no_tree(skipped["long"], counts)


def _counted(found: Iterable[ParsedSentence], counts: Counter[str]) -> Iterator[ParsedSentence]:
    """The sentences; `counts` says how many have words, and how many of these no tree."""
    for sentence in found:
        counts["sentences"] += bool(sentence.words)
        counts["without tree"] += bool(sentence.words) and not sentence.hypotheses
        yield sentence


def _say_what_has_no_tree(num_long: int, counts: Counter[str]) -> None:
    if num_long:
        outputs.say(f"left blank by --skip-long: {plural(num_long, 'sentence')} longer than the model can read")
    if counts["without tree"]:
        outputs.say(
            f"no complete tree for {counts['without tree']} of {plural(counts['sentences'], 'sentence')}. If the "
            "model searches, a wider beam may find more. If it is a grammar, its rules do not fit these sentences"
        )


def _with_unknown_words(sentences: Sequence[ParsedSentence], scorer: Any) -> list[ParsedSentence]:
    """Sentences that say which of their words the tokenizer does not know."""
    texts = scorer.encode([sentence.words for sentence in sentences], "words")
    return [
        dataclasses.replace(sentence, unknown_words=tuple(sorted(text.unknown)))
        for sentence, text in zip(sentences, texts, strict=True)
    ]


def draw(
    trees: Path = argument(
        "Bracketed trees, the JSON lines of `synlm parse --format json`, or CoNLL-U; - reads standard input.",
        default=MISSING,
    ),
    tree_style: options.TreeStyle = None,
    style: FormatOption = "text",
    out: Out = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Draw trees from a file, whichever program wrote it.

    This needs no model. A tree may continue in indented lines. Dependencies are drawn as flat constituents. `synlm
    treebank` can make other constituents of dependencies.

    Examples:
        echo "(S (NP the cat) (VP sleeps))" | synlm draw -
        synlm draw hf_synlm/data/samples/trees.test.txt --format html --out trees.html
    """
    outputs.check_out(out, overwrite, trees, check=lambda path, replace: None)
    if file_ending(trees) in (".tsv", ".csv"):
        raise ValueError(f"{trees} is a table of texts, not of trees. Parse it first by `synlm parse`")
    sentences = options.read_trees(trees, tree_style)
    if not any(sentence.words for sentence in sentences):
        raise ValueError(f"{trees} holds no tree. Give a file with at least one tree")
    _check_drawings([sentence.words for sentence in sentences], style, out, overwrite)
    _write_drawings([sentences], style, out, str(trees), len(sentences), overwrite)


def _check_drawings(
    sentences: Sequence[Sequence[str]] | None, style: Format, out: Path | None, overwrite: bool
) -> None:
    """Refuse SVG pictures without a folder, and for files that cannot be written. None: many sentences."""
    numbers = [number for number, words in enumerate(sentences or (), start=1) if words]
    meant = style if out is None else _ENDINGS.get(out.suffix.lower(), style)
    if meant != style:
        raise ValueError(f"the ending of --out {out} means {meant}, but --format is {style}. Change --out or --format")
    if style == "svg" and (sentences is None or len(numbers) != 1) and (out is None or out.suffix == ".svg"):
        raise ValueError("--format svg makes a picture of every sentence. Name a folder by --out, or use --format html")
    if out is not None:
        total = None if sentences is None else len(sentences)
        for file in {_picture_file(out, number, total) for number in numbers} if style == "svg" else [out]:
            check_output(file, overwrite)


def _picture_file(out: Path, number: int, total: int | None) -> Path:
    """The SVG file of a sentence: `out` itself, or a numbered file in the folder `out`; None: of many."""
    return out if out.suffix == ".svg" else out / f"{number:0{7 if total is None else len(str(total))}d}.svg"


def _write_drawings(
    blocks: Iterable[Sequence[ParsedSentence]],
    style: Format,
    out: Path | None,
    title: str,
    total: int | None,
    overwrite: bool,
) -> None:
    """Write or print sentences; those without words are blank lines, or left out. `total`: how many, if it is known."""
    if style == "svg":
        count = 0
        for number, sentence in enumerate(chain.from_iterable(blocks), start=1):
            if sentence.hypotheses:
                picture = SentenceView(sentence).svg() + "\n"
                if out is None:
                    typer.echo(picture, nl=False)
                else:
                    write_text(check_output(_picture_file(out, number, total), overwrite), picture)
                count += 1
        if out is not None:
            outputs.say(f"wrote {plural(count, 'picture')} to {out}")
    elif style == "html":
        _print_or_write(page_parts(chain.from_iterable(blocks), title), out)
    elif style == "json":
        _print_or_write((json_text(s.to_dict(), indent=None) for sentences in blocks for s in sentences), out)
    elif style == "brackets":
        _print_or_write((f"{line}\n" for sentences in blocks for line in lines_of_parses(sentences)), out)
    else:
        drawn_texts = (_drawing(sentence, style) for sentences in blocks for sentence in sentences if sentence.words)
        _print_or_write(
            (f"{gap}{text}\n" for gap, text in zip(chain([""], repeat("\n")), drawn_texts, strict=False)), out
        )


def _drawing(sentence: ParsedSentence, style: Format) -> str:
    if not sentence.hypotheses:
        return ""
    view = SentenceView(sentence)
    return view.latex() if style == "latex" else view.text(style="upright" if style == "upright" else "sideways")


def _print_or_write(parts: Iterable[str], out: Path | None) -> None:
    if out is None:
        for part in parts:
            typer.echo(part, nl=False)
    else:
        with file_writer(out) as file:
            file.writelines(part.encode() for part in parts)
        outputs.say(f"wrote {out}")


# ------------------------------------------------------------------------------------------------------- generate
_BEAM, _SAMPLING = "Estimator and beam", "Sampling"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoosingOptions(options.Widths):
    """How `generate` chooses words."""

    max_new_tokens: int = option("Maximum length of a continuation.", default=20, min=1)
    num_sequences: int = option("Texts per prompt.", default=1, min=1)
    num_beams: int | None = option("Width of the beam; default: greedy search.", _BEAM, min=1)
    structure_mode: Literal["joint", "marginal"] | None = option(
        "GPST, RNNG: joint (default) searches for tree and words together; marginal sums over the trees and gives "
        "no tree. PCFG: marginal is the default, and joint needs --sample. joint with --sample draws the tree from "
        "the model; --temperature, --top-k, --top-p act only on words.",
        _BEAM,
    )
    sample: bool = option("Sample words instead of taking the best.", _SAMPLING, default=False)
    temperature: float | None = option("Values below 1 sharpen the distribution of words.", _SAMPLING, min=0.0)
    top_k: int | None = option("Sample from the top k tokens; 0: from all tokens.", _SAMPLING, min=0)
    top_p: float | None = option(
        "Sample from the top tokens whose probabilities sum to p.", _SAMPLING, min=0.0, max=1.0
    )
    generate_option: list[str] | None = option(
        "NAME=VALUE for the model's generate(), e.g. repetition_penalty=1.2; repeat for several."
    )

    def chosen(self) -> dict[str, Any]:
        """Arguments of `generate`. Raise ValueError if they contradict each other."""
        if not self.sample and (self.num_beams or 1) < self.num_sequences:
            raise ValueError(
                f"--num-sequences {self.num_sequences} needs a beam or sampling. Add --num-beams {self.num_sequences} "
                "or --sample"
            )
        search = ("num_beams", "action_beam_size", "fast_track_size", "structure_mode")
        sampling = ("temperature", "top_k", "top_p")
        if not self.sample:
            options.refuse([name for name in sampling if getattr(self, name) is not None], "works only with --sample")
        return options.parse_options(
            self.generate_option,
            "--generate-option",
            max_new_tokens=self.max_new_tokens,
            num_return_sequences=self.num_sequences,
            do_sample=self.sample,
            **{name: getattr(self, name) for name in (*search, *sampling)},
        )


def generate(
    prompts: Path | None = argument(
        "Prompts, one per line, or a .tsv, .csv or .jsonl table; - reads standard input. Default: begin new "
        "texts, or see --prompt."
    ),
    *,
    model: options.Model,
    prompt: list[str] | None = option("A prompt; repeat for several."),
    style: Literal["text", "table", "tree", "brackets", "json"] = option(
        "text: one line per text; table: texts, scores and trees; tree: texts and drawings of trees; brackets: one "
        "tree per line; json: all results, one line per text.",
        default="text",
        name="--format",
    ),
    out: Path | None = option("File to write; default: print."),
    overwrite: options.Overwrite = False,
    text_column: options.TextColumn = None,
    input_format: options.InputFormatOption = None,
    tokenize: options.Tokenize = None,
    choosing: ChoosingOptions,
    loading: options.Loading,
) -> None:
    """Continue prompts. Models of this library also give the tree of the whole text.

    A blank line in the file of prompts gives --num-sequences blank lines. Tables and drawings leave out blank lines.
    The leaves of trees are words if the model knows which tokens end a word, and otherwise tokens. The score of a text
    is the log-probability in nats of its new tokens, as the search computes it. Beam search without --sample divides
    this score by their number, the end token included (length_penalty).

    Examples:
        synlm generate --model model_cards/gpst-tiny --prompt "The state of our Union" --num-beams 5 --format tree
        synlm generate --model model_cards/rnng-mini --sample --seed 1 --format brackets | synlm draw -
        synlm generate prompts.txt --model gpt2 --sample --top-k 20 --num-sequences 3
    """
    outputs.check_out(out, overwrite, prompts, model=model)
    texts: list[str | None] = list(prompt or [""])
    if prompts is not None:
        if prompt:
            raise ValueError("prompts come from a file or from --prompt. Leave one of the two out")
        items = read_items(prompts, text_column=text_column, kind=input_format, flag="--input-format")
        texts = [item.text if item.text.strip() else None for item in items]
    chosen = choosing.chosen()
    from hf_synlm.evaluation.generation import GeneratedText, generate_texts
    from hf_synlm.hub.abilities import declared

    scorer = loading.scorer(model)
    has_trees = declared(scorer.model.config, "gives_trees") and chosen.get("structure_mode") != "marginal"
    if style in ("tree", "brackets") and not has_trees:
        raise ValueError(f"--format {style} needs trees, but the model gives none here. Choose text, table or json.")
    known = inspect.signature(scorer.model.generate).parameters
    named = {"action_beam_size", "fast_track_size", "structure_mode"} & set(chosen)
    options.refuse(sorted(named - set(known)), f"not an option of {type(scorer.model).__name__}.generate")
    found = generate_texts(
        scorer.model,
        scorer.tokenizer,
        [text for text in texts if text is not None],
        tokenize=tokenize,
        batch_size=loading.batch_size,
        progress=f"generate: {scorer.name}",
        **chosen,
    )
    if scorer.text_style != NATURAL and any(texts):
        outputs.say_tokenization(scorer, tokenize)
    if empty := sum(not text.num_new_tokens for text in found):
        outputs.say(
            f"texts without new words: {empty} of {len(found)}. Try another prompt, --sample, or another --seed."
        )
    if style in ("text", "json", "brackets"):
        blank, remaining = GeneratedText("", "", 0, False, None, ParsedSentence(())), iter(found)
        found = [blank if t is None else next(remaining) for t in texts for _ in range(choosing.num_sequences)]
    _print_or_write([_show(found, style)], out)


def _show(texts: "Sequence[GeneratedText]", style: str) -> str:
    """Generated texts in the format of --format."""
    if style == "table":
        return markdown_table([_row(text) for text in texts]) + "\n"
    if style == "tree":
        return "\n".join(f"{text.text}\n{SentenceView(text.tree)}\n" for text in texts)
    if style == "brackets":
        lines = lines_of_parses(text.tree for text in texts)
    elif style == "json":
        lines = [json.dumps(text.to_dict(), ensure_ascii=False) for text in texts]
    else:
        lines = [" ".join(text.text.splitlines()) for text in texts]
    return "".join(f"{line}\n" for line in lines)


def _row(text: "GeneratedText") -> dict[str, Any]:
    tree = text.tree.brackets() if text.tree.hypotheses else None
    return {"prompt": text.prompt, "text": text.text, "score": text.score, "tree": tree}
