"""`synlm generate`: prompts in, continuations with their trees out."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import check_output as check_writable
from hf_synlm.data.files import write_text
from hf_synlm.data.text import read_lines
from hf_synlm.evaluation.generation import GeneratedText, generate_texts
from hf_synlm.evaluation.results import markdown_table
from hf_synlm.viz import SentenceView

_SEARCH, _CHOICE = "Estimator and beam", "Sampling"
Format = Literal["text", "table", "tree", "brackets", "json"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChoosingOptions:
    """How `generate` chooses words."""

    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 20
    num_sequences: Annotated[int, typer.Option(min=1, help="Texts per prompt.")] = 1
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="Beam of the search; default: greedy.", rich_help_panel=_SEARCH)
    ] = None
    action_beam_size: options.ActionBeamSize = None
    fast_track_size: options.FastTrackSize = None
    structure_mode: Annotated[
        Literal["joint", "marginal"] | None,
        typer.Option(
            help="GPST, RNNG: joint (default) searches tree and words together; marginal sums the trees out and gives "
            "none.",
            rich_help_panel=_SEARCH,
        ),
    ] = None
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw words instead of taking the best.", rich_help_panel=_CHOICE)
    ] = False
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Below 1 sharpens the distribution.", rich_help_panel=_CHOICE)
    ] = None
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Draw from so many words; 0 = all.", rich_help_panel=_CHOICE)
    ] = None
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from words of this mass.", rich_help_panel=_CHOICE)
    ] = None
    generate_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for the model's generate(), e.g. repetition_penalty=1.2; repeat for several."),
    ] = None

    def chosen(self) -> dict[str, Any]:
        """The options of `generate`.

        Raises:
            ValueError: options that do not go together.
        """
        if not self.sample and (self.num_beams or 1) < self.num_sequences:
            raise ValueError(
                f"--num-sequences {self.num_sequences} needs a beam or a draw: add --num-beams {self.num_sequences} or "
                "--sample"
            )
        given = {
            "max_new_tokens": self.max_new_tokens,
            "num_return_sequences": self.num_sequences,
            "do_sample": self.sample,
        }
        search = ("num_beams", "action_beam_size", "fast_track_size", "structure_mode")
        draw = ("temperature", "top_k", "top_p")
        unused = [name for name in draw if getattr(self, name) is not None and not self.sample]
        if unused:
            raise ValueError(f"{', '.join(unused)}: only of use with --sample")
        given |= {name: getattr(self, name) for name in (*search, *draw)}
        return options.parse_options(self.generate_option, "--generate-option", **given)


def command(
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
        Format,
        typer.Option(
            "--format",
            help="text: a line per text; table: with its score and tree; tree: with a drawing; brackets: its tree, one "
            "line per text; json: everything, one line per text.",
        ),
    ] = "text",
    out: Annotated[
        Path | None,
        typer.Option("--out", help="File to write; default: print.", callback=options.output_check(check_writable)),
    ] = None,
    choosing: ChoosingOptions,
    loading: options.Loading,
    gguf_file: options.GGUFFile = None,
) -> None:
    """Continue prompts, with the tree of the whole text for the models of this library.

    Trees are over tokens, as the model composes them. The score of a text is the log-probability in nats that the
    search sums up; of beam search without --sample it is divided by the number of new tokens (length_penalty).

    Examples:
        synlm generate --model runs/gpst_tiny/model --prompt "The state of our Union" --num-beams 5 --format tree
        synlm generate prompts.txt --model gpt2 --sample --top-k 20 --num-sequences 3 --seed 1
        synlm generate --model runs/rnng_tiny/model --sample --format brackets | synlm draw - --tree-style labeled
    """
    texts = _prompts(prompts, prompt)
    chosen = choosing.chosen()
    scorer = loading.scorer(model, gguf_file=gguf_file)
    if style in ("tree", "brackets") and (
        chosen.get("structure_mode") == "marginal" or not hasattr(scorer.model, "parse")
    ):
        raise ValueError(f"--format {style}: the model gives no trees here. Choose text, table or json.")
    found = generate_texts(
        scorer.model,
        scorer.tokenizer,
        texts,
        batch_size=loading.batch_size,
        progress=f"generate: {scorer.name}" if out is not None else None,
        **chosen,
    )
    written = _format(found, style)
    if out is None:
        typer.echo(written, nl=False)
    else:
        write_text(out, written)
        typer.echo(f"wrote {out}", err=True)


def _prompts(path: Path | None, given: Sequence[str] | None) -> list[str]:
    """Prompts of the file and of the options, or one empty prompt."""
    if path is not None and given:
        raise ValueError("prompts come from a file or from --prompt: leave one of the two out")
    texts = list(given or [""]) if path is None else [line for line in read_lines(path) if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompt: give one per line")
    return texts


def _format(found: Sequence[GeneratedText], style: Format) -> str:
    if style == "table":
        return markdown_table([_row(text) for text in found]) + "\n"
    if style == "json":
        return "".join(json.dumps(text.to_dict(), ensure_ascii=False) + "\n" for text in found)
    if style == "text":
        return "".join(" ".join(text.text.splitlines()) + "\n" for text in found)
    if style == "brackets":
        return "".join((text.tree.brackets() if text.tree.hypotheses else "") + "\n" for text in found)
    return "\n".join(f"{text.text}\n{SentenceView(text.tree)}\n" for text in found)


def _row(text: GeneratedText) -> dict[str, Any]:
    tree = text.tree.brackets() if text.tree.hypotheses else None
    return {"prompt": text.prompt, "text": text.text, "score": text.score, "tree": tree}
