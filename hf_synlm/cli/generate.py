"""`synlm generate`: prompts in, continuations with their trees out."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.evaluation.generation import GeneratedText, generate_texts
from hf_synlm.evaluation.results import check_writable, markdown_table, write_text
from hf_synlm.viz import SentenceView

_SEARCH, _CHOICE = "Estimator and beam", "Sampling"
Format = Literal["text", "table", "tree", "brackets", "json"]


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
    out: Annotated[Path | None, typer.Option("--out", help="File to write; default: print.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest continuation.")] = 20,
    num_sequences: Annotated[int, typer.Option(min=1, help="Texts per prompt.")] = 1,
    num_beams: Annotated[
        int | None, typer.Option(min=1, help="Beam of the search; default: greedy.", rich_help_panel=_SEARCH)
    ] = None,
    action_beam_size: options.ActionBeamSize = None,
    fast_track_size: options.FastTrackSize = None,
    structure_mode: Annotated[
        Literal["joint", "marginal"] | None,
        typer.Option(
            help="GPST, RNNG: joint (default) searches tree and words together; marginal sums the trees out and gives "
            "none.",
            rich_help_panel=_SEARCH,
        ),
    ] = None,
    sample: Annotated[
        bool, typer.Option("--sample", help="Draw words instead of taking the best.", rich_help_panel=_CHOICE)
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="Below 1 sharpens the distribution.", rich_help_panel=_CHOICE)
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Draw from so many words; 0 = all.", rich_help_panel=_CHOICE)
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Draw from words of this mass.", rich_help_panel=_CHOICE)
    ] = None,
    generate_option: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE for the model's generate(), e.g. repetition_penalty=1.2; repeat for several."),
    ] = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    gguf_file: options.GGUFFile = None,
    device: options.Device = None,
    dtype: options.DType = "auto",
    batch_size: options.BatchSize = 16,
    seed: options.Seed = 0,
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
    if out is not None:
        check_writable(out)
    chosen = {
        "do_sample": sample,
        "num_beams": num_beams,
        "num_return_sequences": num_sequences,
        "action_beam_size": action_beam_size,
        "fast_track_size": fast_track_size,
        "structure_mode": structure_mode,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
    }
    if not sample and (num_beams or 1) < num_sequences:
        raise ValueError(
            f"--num-sequences {num_sequences} needs a beam or a draw: add --num-beams {num_sequences} or --sample"
        )
    unused = [name for name in ("temperature", "top_k", "top_p") if chosen[name] is not None and not sample]
    if unused:
        raise ValueError(f"{', '.join(unused)}: only of use with --sample")
    given = options.parse_options(generate_option, "--generate-option", **chosen)
    scorer = options.load_scorer(
        model,
        revision=revision,
        trust_remote_code=trust_remote_code,
        gguf_file=gguf_file,
        device=device,
        dtype=dtype,
        seed=seed,
    )
    found = generate_texts(
        scorer.model,
        scorer.tokenizer,
        texts,
        batch_size=batch_size,
        progress=f"generate: {scorer.name}" if out is not None else None,
        max_new_tokens=max_new_tokens,
        **given,
    )
    _check_trees(found, style)
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
    texts = list(given or [""]) if path is None else [line for line in options.lines_of(path) if line.strip()]
    if not texts:
        raise ValueError(f"{path} holds no prompt: give one per line")
    return texts


def _check_trees(found: Sequence[GeneratedText], style: Format) -> None:
    if style in ("tree", "brackets") and not any(text.tree.hypotheses for text in found):
        raise ValueError(f"--format {style}: the model gives no trees here. Choose text, table or json.")


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
