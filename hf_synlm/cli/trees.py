"""`synlm parse`, `draw`, `generate` and `surprisal`: trees, texts and word-by-word measures."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import check_output, write_json, write_text
from hf_synlm.data.parsed import ParsedSentence, read_parses
from hf_synlm.data.text import read_lines
from hf_synlm.data.treebank import (
    TreebankSentence,
    binarize_sentence,
    list_bad_lines,
    read_treebank,
    sentence_to_brackets,
    to_ptb_concat,
)
from hf_synlm.evaluation.results import EvaluationResult, describe_files, markdown_table
from hf_synlm.evaluation.text.text_items import TextItem, read_items, table_text
from hf_synlm.viz import SentenceView, sentences_to_page

if TYPE_CHECKING:
    from hf_synlm.evaluation.generation import GeneratedText
    from hf_synlm.evaluation.text.scoring import TextScorer
    from hf_synlm.evaluation.text.surprisal import WordScores

Format: TypeAlias = Literal["brackets", "json", "text", "upright", "latex", "svg", "html"]
FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="brackets and json: one line per sentence (json: all trees, log-probabilities); text, upright: drawings; "
        "latex: for the package forest; svg: a file per sentence; html: one page with all trees and surprisals.",
    ),
]
Out = Annotated[Path | None, typer.Option(help="File to write (svg of several sentences: folder); default: print.")]
OutFile = Annotated[Path, typer.Option(help="File to write.")]
Sentences = Annotated[Path, typer.Argument(help="Text, one sentence per line; - reads standard input.")]
PunctuationBy = Annotated[
    Literal["tag", "form"],
    typer.Option(
        help="Recognize punctuation by the tags of the Penn Treebank, or by its form if the parser gives no tags."
    ),
]


def _meta(out: Path) -> Path:
    return Path(f"{out}.meta.json")


def _check_with_meta(out: Path, overwrite: bool) -> None:
    check_output(out, overwrite)
    check_output(_meta(out), overwrite)


def parse(
    texts: Sentences,
    model: options.Model,
    parsing: options.Parsing,
    style: FormatOption = "brackets",
    out: Out = None,
    overwrite: options.Overwrite = False,
    num_trees: Annotated[
        int,
        typer.Option(
            min=1,
            help="Trees per sentence (json, html), for models with a beam. Trees that are equal over words count once.",
        ),
    ] = 1,
    tokenize: options.Tokenize = None,
) -> None:
    """Parse sentences into trees.

    Prints trees as brackets, JSON, drawings, LaTeX, SVG or an HTML page. White space separates words; the pieces of a
    word stay together. A blank line stays blank, and so does a sentence without a tree. Pictures show the surprisal of
    each word given the words before it, summed over trees. With --tokenize ptb, trees are over the pieces of words.

    Examples:
        echo "the people agree" | synlm parse - --model model_cards/rnng-tiny
        synlm parse in.txt --model model_cards/gpst-tiny --num-trees 5 --format html --out trees.html
    """
    # The names of pictures depend on the sentences, see `_check_drawings`.
    options.check_out(out, overwrite, texts, parsing.cache, model=model, check=lambda path, replace: None)
    sentences = [line.split() for line in read_lines(texts)]
    if not any(sentences):
        raise ValueError(f"{texts} holds no sentence: give one per line")
    _check_drawings(sentences, style, out, overwrite)
    from hf_synlm.evaluation.text.words import encode_sentences, split_as_treebank
    from hf_synlm.evaluation.trees.treebank_parsing import parse_sentences

    chosen = parsing.chosen(num_return_sequences=None if num_trees == 1 else num_trees)
    scorer = parsing.scorer(model)
    width = parsing.num_beams or getattr(scorer.model.config, "scoring_num_beams", None)
    if width is None and num_trees > 1 and hasattr(scorer.model, "parse"):
        raise ValueError(f"--num-trees {num_trees}: {type(scorer.model).__name__} gives one tree. Omit the option.")
    if width is not None and num_trees > width:
        raise ValueError(f"--num-trees {num_trees}: the beam holds {width}. Give --num-beams of at least as many.")
    if tokenize:
        pieces = split_as_treebank(scorer.tokenizer, sentences)
        sentences = [[piece for word in words for piece in word] for words in pieces]
    found = parse_sentences(
        scorer.model,
        scorer.tokenizer,
        [words for words in sentences if words],
        progress=f"parse: {scorer.name}",
        **parsing.computation(),
        **chosen,
    )
    options.leave_output_to_first_process()
    missing = sum(not sentence.hypotheses for sentence in found)
    if missing:
        options.say(f"no complete tree for {missing} of {len(found)} sentences; a wider beam may find more")
    if style == "html":
        encoded = encode_sentences(scorer.tokenizer, [list(sentence.words) for sentence in found])
        unknown = [tuple(sorted(text.unknown)) for text in encoded]
        found = [dataclasses.replace(s, unknown_words=places) for s, places in zip(found, unknown, strict=True)]
    remaining = iter(found)
    parsed = [next(remaining) if words else ParsedSentence(()) for words in sentences]
    _write_drawings(parsed, style, out, title=f"{texts}, parsed by {scorer.name}")


def _read_trees_of(path: Path, left_out: Counter[str]) -> list[TreebankSentence]:
    """All trees of a file; an error lists all lines that have none."""
    try:
        return list(read_treebank(path, left_out=left_out))
    except ValueError as error:
        problems = list_bad_lines(path)
        if len(problems) < 2:
            raise
        listed = "\n  ".join([*problems[:20], *(["..."] if len(problems) > 20 else [])])
        raise ValueError(f"{path}: {len(problems)} lines are no trees:\n  {listed}") from error


def treebank(
    trees: Annotated[list[Path], typer.Argument(help="Files of bracketed trees.", **options.INPUT_FILE)],
    out: OutFile,
    overwrite: options.Overwrite = False,
    punctuation: Annotated[Literal["keep", "remove"], typer.Option(help="Keep or remove punctuation.")] = "keep",
    punctuation_by: PunctuationBy = "tag",
    words: Annotated[
        Literal["keep", "ptb-concat"],
        typer.Option(
            help="keep; or ptb-concat: lower case, N for numbers, no punctuation (the common text of the Penn "
            "Treebank)."
        ),
    ] = "keep",
    binarize: Annotated[
        Literal["right", "left"] | None,
        typer.Option(help="Make trees binary. The programs of this library do this themselves where they need it."),
    ] = None,
    max_words: Annotated[int | None, typer.Option(min=1, help="Leave out sentences of more words than this.")] = None,
) -> None:
    """Check trees of parsers or treebanks, and write them as one clean file for training.

    Reads bracketed trees with a tag for each word: the format of treebanks, and of the parsers benepar, stanza and
    supar. Writes one tree per line, without traces, function tags and root wrappers. OUT.meta.json holds counts, and
    the checksums of inputs and output. If a tree cannot be read, the command stops and names the file and the lines.

    Examples:
        synlm treebank silver.train.txt --punctuation remove --max-words 40 --out train.txt
    """
    options.check_out(out, overwrite, *trees, check=_check_with_meta, beside=_meta)
    from hf_synlm.data.punctuation import check_tags, keep_words

    left_out, lines, num_words = Counter[str](), list[str](), 0
    inputs = describe_files(trees)
    sentences = [sentence for path in trees for sentence in _read_trees_of(path, left_out)]
    unknown_tags = 0
    if punctuation == "remove" and punctuation_by == "tag" and words != "ptb-concat":
        tags = Counter(tag for sentence in sentences for tag in sentence.tags)
        unknown_tags = check_tags(tags, "tell it by form (--punctuation-by form)")
    for sentence in sentences:
        kept: TreebankSentence | None = sentence
        if words == "ptb-concat":
            kept = to_ptb_concat(sentence)
        elif punctuation == "remove":
            is_word = keep_words(sentence.words, sentence.tags, punctuation_by)
            kept = sentence.select_words(is_word) if any(is_word) else None
        if kept is None:
            left_out["no words left"] += 1
        elif max_words is not None and len(kept.words) > max_words:
            left_out[f"more than {max_words} words"] += 1
        else:
            lines.append(sentence_to_brackets(kept if binarize is None else binarize_sentence(kept, binarize)))
            num_words += len(kept.words)
    if not lines:
        raise ValueError(f"no tree is left of {', '.join(map(str, trees))}: {dict(left_out)}. Leave options out.")
    write_text(out, "\n".join(lines) + "\n")
    facts = {"trees": len(lines), "words": num_words, "left_out": dict(left_out)}
    facts |= {"words_removed_by_unknown_tags": unknown_tags} if unknown_tags else {}
    files = {"inputs": inputs, "output": describe_files([out])}
    write_json(_meta(out), {**facts, **files, "command": options.command_line.get()})
    dropped = "".join(f", {count:,} left out ({why})" for why, count in left_out.items())
    options.say(f"wrote {len(lines):,} trees of {num_words:,} words to {out}{dropped}")


def silver(
    texts: Sentences,
    out: OutFile,
    overwrite: options.Overwrite = False,
    language: Annotated[str, typer.Option(help="Language of Stanza, such as en, de, zh-hans.")] = "en",
    package: Annotated[
        str | None, typer.Option(help="Parser of the language; default: the one that Stanza chooses.")
    ] = None,
    models: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of Stanza's models; default: ~/stanza_resources."),
    ] = None,
    words: Annotated[
        Literal["split", "keep"],
        typer.Option(
            help="split: split words and punctuation as treebanks do; keep: take the words that white space separates."
        ),
    ] = "split",
    device: options.Device = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Number of sentences to parse together.")] = 50,
) -> None:
    """Parse text with the neural parser Stanza, to train on its trees where there is no treebank.

    Needs: pip install 'hf_synlm[silver]'. Writes one tree per sentence, as the parser gives it, without blank lines;
    `synlm treebank` turns them into training data. Missing models of Stanza are downloaded. OUT.meta.json names the
    parser and holds checksums. If the command was stopped, run it again to continue: until it is done, the trees are
    in OUT.partial.

    Examples:
        synlm silver novel.txt --out silver.mrg
        synlm treebank silver.mrg --max-words 40 --out train.txt
    """
    options.check_out(out, overwrite, texts, models, check=_check_with_meta, beside=_meta)
    inputs = describe_files([texts])
    lines = [line for line in read_lines(texts) if line.strip()]
    if not lines:
        raise ValueError(f"{texts} holds no sentence: give one per line")
    from tqdm import tqdm

    from hf_synlm.data.silver import load_parser, silver_trees
    from hf_synlm.evaluation.text.cache import ResultCache

    parser = load_parser(language, package, models, split_words=words == "split", device=device)
    used = {name: [model.package for model in found] for name, found in parser.load_list}
    facts = {"stanza": version("stanza"), "language": language, "packages": used}
    partial = ResultCache(f"{out}.partial", None, {**facts, "words": words})
    trees = {json.loads(line): tree["tree"] for line, tree in partial.read().items()}
    left = [line for line in dict.fromkeys(lines) if line not in trees]
    found = tqdm(silver_trees(parser, left, batch_size), total=len(left), desc="silver trees", unit="sentence")
    for line, tree in zip(left, found, strict=True):
        trees[line] = tree
        partial.add({json.dumps(line): {"tree": tree}})
    write_text(out, "".join(f"{trees[line]}\n" for line in lines))
    files = {"inputs": inputs, "output": describe_files([out])}
    write_json(_meta(out), {"trees": len(lines), **facts, **files, "command": options.command_line.get()})
    partial.path.unlink()
    options.say(f"wrote {len(lines):,} trees to {out}")


def draw(
    trees: Annotated[
        Path,
        typer.Argument(
            help="One tree per line, or the JSON lines of `synlm parse --format json`; - reads standard input."
        ),
    ],
    tree_style: options.TreeStyle = None,
    style: FormatOption = "text",
    out: Out = None,
    overwrite: options.Overwrite = False,
) -> None:
    """Draw trees from a file, whichever program wrote it.

    This needs no model. Without --tree-style the command recognizes labels and tags by their capital letters.

    Examples:
        echo "(S (NP the cat) (VP sleeps))" | synlm draw -
        synlm draw hf_synlm/data/samples/trees.test.txt --format html --out trees.html
    """
    options.check_out(out, overwrite, trees, check=lambda path, replace: None)
    sentences = read_parses(trees, tree_style)
    _check_drawings([sentence.words for sentence in sentences], style, out, overwrite)
    _write_drawings(sentences, style, out, title=str(trees))


def _check_drawings(sentences: Sequence[Sequence[str]], style: Format, out: Path | None, overwrite: bool) -> None:
    """Raise ValueError for SVG pictures without a folder, and for files that cannot be written."""
    numbers = [number for number, words in enumerate(sentences, start=1) if words]
    if style == "svg" and len(numbers) != 1 and (out is None or out.suffix == ".svg"):
        raise ValueError(
            f"{len(numbers)} sentences make as many SVG pictures: name a folder by --out, or use --format html"
        )
    if out is not None:
        for file in {_picture_file(out, number, len(sentences)) for number in numbers} if style == "svg" else [out]:
            check_output(file, overwrite)


def _picture_file(out: Path, number: int, count: int) -> Path:
    """The SVG file of a sentence: `out` itself, or a numbered file in the folder `out`."""
    return out if out.suffix == ".svg" else out / f"{number:0{len(str(count))}d}.svg"


def _write_drawings(sentences: Sequence[ParsedSentence], style: Format, out: Path | None, title: str) -> None:
    """Write or print sentences; those without words are blank lines, or left out of drawings."""
    if style == "svg":
        drawn = {number: SentenceView(s).svg() + "\n" for number, s in enumerate(sentences, start=1) if s.hypotheses}
        if out is None:
            typer.echo("".join(drawn.values()), nl=False)
            return
        for number, picture in drawn.items():
            write_text(_picture_file(out, number, len(sentences)), picture)
        options.say(f"wrote {len(drawn)} picture(s) to {out}")
    elif style == "html":
        _print_or_write(sentences_to_page(sentences, title=title), out)
    elif style in ("brackets", "json"):
        _print_or_write("\n".join(_line(sentence, style) for sentence in sentences) + "\n", out)
    else:
        drawings = [_drawing(sentence, style) for sentence in sentences if sentence.words]
        _print_or_write("\n\n".join(drawings) + "\n", out)


def _line(sentence: ParsedSentence, style: Format) -> str:
    if style == "json":
        return json.dumps(sentence.to_dict(), ensure_ascii=False)
    return sentence.brackets() if sentence.hypotheses else ""


def _drawing(sentence: ParsedSentence, style: Format) -> str:
    if not sentence.hypotheses:
        return ""
    view = SentenceView(sentence)
    return view.latex() if style == "latex" else view.text(style="upright" if style == "upright" else "sideways")


def _print_or_write(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_text(out, text)
        options.say(f"wrote {out}")


# ------------------------------------------------------------------------------------------------------- generate
_BEAM, _SAMPLING = "Estimator and beam", "Sampling"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoosingOptions:
    """How `generate` chooses words."""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum length of a continuation.")] = 20
    num_sequences: Annotated[int, typer.Option(min=1, help="Texts per prompt.")] = 1
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="Beam of the search; default: greedy.", rich_help_panel=_BEAM)
    ] = None
    action_beam_size: options.ActionBeamSize = None
    fast_track_size: options.FastTrackSize = None
    structure_mode: Annotated[
        Literal["joint", "marginal"] | None,
        typer.Option(
            help="GPST, RNNG: joint (default) searches tree and words together; marginal sums over the trees and "
            "gives no tree.",
            rich_help_panel=_BEAM,
        ),
    ] = None
    sample: Annotated[
        bool,
        typer.Option("--sample", help="Sample words instead of taking the best.", rich_help_panel=_SAMPLING),
    ] = False
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="Values below 1 sharpen the distribution.", rich_help_panel=_SAMPLING),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(min=0, help="Sample from the top k tokens; 0: from all tokens.", rich_help_panel=_SAMPLING),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, help="Sample from the top tokens whose probabilities sum to p.", rich_help_panel=_SAMPLING
        ),
    ] = None
    generate_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for the model's generate(), e.g. repetition_penalty=1.2; repeat for several."),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """The options of `generate`; ValueError if they do not go together."""
        if not self.sample and (self.num_beams or 1) < self.num_sequences:
            raise ValueError(
                f"--num-sequences {self.num_sequences} needs a beam or sampling: add --num-beams {self.num_sequences} "
                "or --sample"
            )
        search = ("num_beams", "action_beam_size", "fast_track_size", "structure_mode")
        sampling = ("temperature", "top_k", "top_p")
        unused = [name for name in sampling if getattr(self, name) is not None and not self.sample]
        if unused:
            raise ValueError(f"{', '.join(unused)}: only of use with --sample")
        return options.parse_options(
            self.generate_option,
            "--generate-option",
            max_new_tokens=self.max_new_tokens,
            num_return_sequences=self.num_sequences,
            do_sample=self.sample,
            **{name: getattr(self, name) for name in (*search, *sampling)},
        )


def generate(
    prompts: Annotated[
        Path | None,
        typer.Argument(
            help="Prompts, one per line; - reads standard input. Default: begin new texts, or see --prompt."
        ),
    ] = None,
    *,
    model: options.Model,
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; repeat for several.")] = None,
    style: Annotated[
        Literal["text", "table", "tree", "brackets", "json"],
        typer.Option(
            "--format",
            help="text: one line per text; table: with its score and tree; tree: with a drawing; brackets: its tree, "
            "one line per text; json: everything, one line per text.",
        ),
    ] = "text",
    out: Annotated[Path | None, typer.Option(help="File to write; default: print.")] = None,
    overwrite: options.Overwrite = False,
    choosing: ChoosingOptions,
    loading: options.Loading,
    gguf_file: options.GGUFFile = None,
) -> None:
    """Continue prompts. Models of this library also give the tree of the whole text.

    Trees are over tokens, as the model composes them. The score of a text is the log-probability in nats that the
    search adds up; beam search without --sample divides it by the number of new tokens (length_penalty).

    Examples:
        synlm generate --model model_cards/gpst-tiny --prompt "The state of our Union" --num-beams 5 --format tree
        synlm generate --model model_cards/rnng-tiny --sample --seed 1 --format brackets | synlm draw -
        synlm generate prompts.txt --model gpt2 --sample --top-k 20 --num-sequences 3
    """
    options.check_out(out, overwrite, prompts, model=model)
    texts = _read_prompts(prompts, prompt)
    chosen = choosing.chosen()
    from hf_synlm.evaluation.generation import generate_texts

    scorer = loading.scorer(model, gguf_file=gguf_file)
    has_trees = getattr(scorer.model.config, "gives_trees", hasattr(scorer.model, "parse"))
    has_trees = has_trees and chosen.get("structure_mode") != "marginal"
    if style in ("tree", "brackets") and not has_trees:
        raise ValueError(f"--format {style}: the model gives no trees here. Choose text, table or json.")
    found = generate_texts(
        scorer.model,
        scorer.tokenizer,
        texts,
        batch_size=loading.batch_size,
        progress=f"generate: {scorer.name}",
        **chosen,
    )
    if empty := sum(not text.num_new_tokens for text in found):
        options.say(
            f"texts that end with their prompt: {empty} of {len(found)}. Try another prompt, --sample, or a --seed."
        )
    if style == "table":
        _print_or_write(markdown_table([_row(text) for text in found]) + "\n", out)
    else:
        lines: dict[str, Callable[[GeneratedText], str]] = {
            "text": lambda text: " ".join(text.text.splitlines()),
            "brackets": lambda text: text.tree.brackets() if text.tree.hypotheses else "",
            "json": lambda text: json.dumps(text.to_dict(), ensure_ascii=False),
            "tree": lambda text: f"{text.text}\n{SentenceView(text.tree)}\n",
        }
        _print_or_write("\n".join(map(lines[style], found)) + ("" if style == "tree" else "\n"), out)


def _read_prompts(path: Path | None, given: Sequence[str] | None) -> list[str]:
    """Prompts of the file or of the options, or one empty prompt."""
    if path is not None and given:
        raise ValueError("prompts come from a file or from --prompt: leave one of the two out")
    texts = list(given or [""]) if path is None else [line for line in read_lines(path) if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompt: give one per line")
    return texts


def _row(text: "GeneratedText") -> dict[str, Any]:
    tree = text.tree.brackets() if text.tree.hypotheses else None
    return {"prompt": text.prompt, "text": text.text, "score": text.score, "tree": tree}


# ------------------------------------------------------------------------------------------------------ surprisal
def _check_table(out: Path, overwrite: bool) -> None:
    if out.suffix.lower() in (".csv", ".json", ".jsonl", ".xlsx", ".parquet"):
        raise ValueError(f"--out {out}: the table is tab-separated. Choose a name in .tsv")
    _check_with_meta(out, overwrite)


def surprisal(
    texts: options.Texts,
    model: options.Model,
    scoring: options.Scoring,
    out: Annotated[
        Path | None, typer.Option(help="TSV file to write; OUT.meta.json describes it. Default: print the table.")
    ] = None,
    overwrite: options.Overwrite = False,
    unit: Annotated[
        Literal["bits", "nats"], typer.Option(help="Unit of surprisal, which is part of the column's name.")
    ] = "bits",
    context: options.Context = "sentence",
    word_correction: Annotated[
        bool,
        typer.Option(
            "--word-correction",
            help="Probability of words instead of tokens: count the space after a word as part of this word, not of "
            "the next one. Has no effect if tokens do not mark the beginning of words; OUT.meta.json says so.",
        ),
    ] = False,
    tokenize: options.Tokenize = None,
    lmzoo: Annotated[
        bool,
        typer.Option("--lmzoo", help="Write the columns of lm-zoo instead: one row per token, in bits."),
    ] = False,
    first_word: Annotated[
        bool, typer.Option(help="Score the first word, after a begin token; otherwise its fields are empty.")
    ] = True,
    file_format: Annotated[
        Literal["txt", "tsv", "csv", "jsonl"] | None,
        typer.Option("--format", help="Format of the input; default: the ending of its name."),
    ] = None,
    text_column: options.TextColumn = None,
    item_column: Annotated[
        str | None,
        typer.Option(help="Column of the items' ids in a table; default: item, or the number of the row."),
    ] = None,
) -> None:
    """Surprisal of every word of a text.

    The table has one row per word of the input. White space separates words; attached punctuation belongs to its word.
    Columns: item, sentence_id, word_id, word, n_tokens, oov, surprisal_bits, its lexical and structural part (GPST,
    RNNG), cum_logprob_nats, beam_entropy_bits, n_actions, stack_depth, char_start, char_end, tree_distance, tree_depth,
    n_opened, n_closed (ON-LSTM, PRPN, PaLM), and the other columns of an input table. A field is empty if the model
    does not have this measure.

    Examples:
        echo "the people agree" | synlm surprisal - --model model_cards/rnng-tiny
        synlm surprisal stories.txt --model model_cards/gpst-tiny --num-beams 100 --out surprisals.tsv
    """
    options.check_out(out, overwrite, texts, scoring.cache, model=model, check=_check_table, beside=_meta)
    if lmzoo and unit != "bits":
        raise ValueError(f"--unit {unit}: the columns of lm-zoo are in bits; leave out --unit or --lmzoo")
    files = describe_files([texts])
    items = read_items(texts, kind=file_format, text_column=text_column, item_column=item_column)
    if not lmzoo:
        _say_repeated_items(items)
    scorer = scoring.scorer(model, begin=first_word, details=not lmzoo)
    from hf_synlm.evaluation.text import surprisal as words

    if word_correction and not words.can_correct_words(scorer):
        word_correction = False
        options.say("--word-correction does not apply: tokens of this model tell where a word ends")
    start = time.perf_counter()
    scores = words.score_words(
        scorer,
        items,
        context=context,
        word_correction=word_correction,
        split=tokenize is not None,
        progress=f"surprisal: {scorer.name}",
    )
    options.leave_output_to_first_process()
    seconds = time.perf_counter() - start
    rows = words.token_table(scores) if lmzoo else words.word_table(items, scores, unit)
    names = words.LMZOO_COLUMNS if lmzoo else words.columns(unit, items)
    counts = _counts(scores)
    settings = {
        "unit": unit, "context": context, "word_correction": word_correction, "tokenize": tokenize,
        "first_word": first_word, "seed": scoring.seed,
    }  # fmt: skip
    data = {"files": files, "columns": list(names)}
    result = EvaluationResult.of(scorer, "surprisal", counts, settings, data=data, seconds=seconds)
    result.command = options.command_line.get()
    _print_or_write(table_text(names, rows), out)
    if out is not None:
        write_text(_meta(out), result.to_json())
        options.say(f"wrote {_meta(out)}, which says how the table was made")
    _say_what_was_cut(scorer, counts, tokenize)


def _say_repeated_items(items: Sequence[TextItem]) -> None:
    repeated = sum(count > 1 for count in Counter(item.item for item in items).values())
    if repeated:
        options.say(
            f"items with several texts: {repeated}. Join other tables by sentence_id, which counts the rows of the "
            "input, and word_id, not by item"
        )


def _counts(scores: "Sequence[WordScores]") -> dict[str, int]:
    return {
        "texts": len(scores),
        "words": sum(len(found.words) for found in scores),
        "tokens": sum(len(found.tokens) for found in scores),
        "unknown_words": sum(sum(found.unknown) for found in scores),
    }


def _say_what_was_cut(scorer: "TextScorer", counts: Mapping[str, int], tokenize: str | None) -> None:
    """Remarks on words that the model does not know, and texts that it cannot read in one piece."""
    if counts["unknown_words"]:
        if type(scorer.tokenizer.backend_tokenizer.model).__name__ != "WordLevel":
            remedy = "its tokenizer lacks some of their characters"
        elif tokenize is None:
            remedy = "its treebank may lack punctuation, or separate it and clitics; try --tokenize ptb"
        else:
            remedy = "each is read as a class of unknown words, or left out; a model with word pieces knows all words"
        options.say(
            f"{counts['unknown_words']} of {counts['words']} words ({counts['unknown_words'] / counts['words']:.0%}) "
            f"are unknown to this model (oov 1): {remedy}"
        )
    if scorer.cuts["texts_in_windows"]:
        options.say(
            f"{scorer.cuts['texts_in_windows']} of {counts['texts']} texts are longer than the model's "
            f"{scorer.max_tokens} positions: they were scored in windows that overlap by half"
        )
