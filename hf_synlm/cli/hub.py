"""`synlm convert`, `info`, `export`, `verify` and `push`: folders of models."""

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options
from hf_synlm.data.files import read_json
from hf_synlm.evaluation.results import card_rows, check_results_of, load_result
from hf_synlm.models import ARCHITECTURES


def _check_target(out: Path, overwrite: bool) -> None:
    from hf_synlm.hub.export import check_target

    check_target(out, overwrite)


ModelName = Annotated[str, typer.Argument()]
OutFolder = Annotated[Path, options.Writes(_check_target, replaces_folder=True)]
ReportFormat = Annotated[Literal["table", "json"], typer.Option("--format")]


def convert(
    architecture: Annotated[Literal["gpst", "on_lstm", "palm", "prpn", "pushdown", "rnng"], typer.Argument()],
    weights: Annotated[Path, typer.Option(**options.INPUT_FILE)],
    config: Annotated[list[Path], typer.Option(**options.INPUT_FILE)],
    out: OutFolder,
    overwrite: bool = False,
    tokenizer: str | None = None,
) -> None:
    """Convert a checkpoint of the authors' code.

    The result is a self-contained repository. The conversion accounts for every tensor, or it stops and names the
    tensors that are left. Pickles with more than tensors are refused, because they can run code; the message says how
    to take the tensors out.

    Options:
        architecture: Architecture of the checkpoint.
        weights: The authors' checkpoint: safetensors, or a file of plain tensors.
        config: The authors' configuration in JSON; for gpst twice: first r2d2_config, then gpt_config.
        out: Folder to write.
        tokenizer: Folder or Hub name of the checkpoint's tokenizer; default: what the configuration describes.

    Examples:
        synlm convert gpst --weights model.bin --config r2d2.json --config gpt.json --tokenizer gpst-vocab --out gpst
        synlm convert rnng --weights weights.pt --config config.json --out rnng
    """
    from hf_synlm.conversion.files import convert_files
    from hf_synlm.hub.checkpoint import load_tokenizer

    options.hide_bars_of_weights()
    loaded = None if tokenizer is None else load_tokenizer(tokenizer)
    convert_files(architecture, weights, config, out, loaded, overwrite=overwrite)
    if not (out / "tokenizer_config.json").is_file():
        options.say(f"{out} has no tokenizer, so it cannot read text: convert again with --tokenizer")
    if read_json(out / "config.json").get("eos_token_id") is None:
        options.say(f"{out} has no end token, so it cannot end a sentence: add eos_token_id to --config")
    options.say(f"wrote {out}; check it by `synlm verify {out}`")


def info(
    model: Annotated[str | None, typer.Argument()] = None,
    files: Annotated[str | None, typer.Option(metavar=f"[{'|'.join(ARCHITECTURES)}]")] = None,
    style: ReportFormat = "table",
    revision: str | None = None,
) -> None:
    """Show what a model is, without running it.

    That is its architecture, size, tokens, Auto classes, whether it is complete, and what its card says. The command
    reads files and runs no code, so it is safe for models of unknown origin. The weights of a model on the Hub are not
    downloaded.

    Options:
        files: List instead the files of code that ship with every model of this architecture.
        style: How to print the result.

    Examples:
        synlm info model_cards/gpst-tiny
        synlm info your-name/gpst-tiny --revision v1.0 --format json
        synlm info --files gpst
    """
    if (model is None) == (files is None):
        raise ValueError("give either a model or --files ARCHITECTURE")
    from hf_synlm.hub.info import describe_model, files_table, info_table, shipped_files

    if files is not None:
        found: dict[str, Any] = shipped_files(files)
    else:
        found = describe_model(str(model), revision)
    if style == "json":
        typer.echo(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        typer.echo(info_table(found) if files is None else files_table(found))


def export(
    model: ModelName,
    out: OutFolder,
    overwrite: bool = False,
    facts: options.InputFile = None,
    results: options.InputFiles = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: options.DType = "auto",
) -> None:
    """Export a self-contained repository that loads without hf_synlm.

    It holds code, weights in safetensors, tokenizer, generation options and card. A language model stays a language
    model, and a classifier a classifier. The code is that of the installed hf_synlm, also for a fine-tuned copy of a
    model from the Hub. The folder appears when it is complete.

    Options:
        out: Folder to write.
        facts: YAML or JSON file of what the card states: repo_id, license, language, datasets, training_data,
            training_procedure, limits, results, task, ... Default: what card.yaml beside the model states; single facts
            replace those. A card without card.yaml stays as it is.
        results: Result file of `synlm evaluate --out` to report on the card; repeat for several. They replace the
            numbers of card.yaml beside the model.

    Examples:
        synlm export model_cards/gpst-tiny --out gpst-tiny --facts model_cards/gpst-tiny/card.yaml
        synlm export model_cards/gpst-tiny --out my-gpst --results f1.json --results ppl.json
        synlm export your-name/gpst-tiny --revision v1.0 --out gpst-tiny-v1 --dtype bfloat16
    """
    from transformers import PreTrainedConfig

    from hf_synlm.hub.card import read_facts
    from hf_synlm.hub.checkpoint import load_pretrained, saved_auto_class
    from hf_synlm.hub.export import export_model

    options.hide_bars_of_weights()
    given = {} if facts is None else read_facts(facts)
    found = {path: load_result(path) for path in results or ()}
    measured = [row for result in found.values() for row in card_rows(result)]
    auto_class = saved_auto_class(model, revision, trust_remote_code)
    loaded, tokenizer = load_pretrained(
        model, auto_class, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
    )
    written = str(loaded.dtype).removeprefix("torch.")
    check_results_of(found, model, type(loaded).__name__, loaded.num_parameters(), written)
    saved = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    is_cast = dtype != "auto" and written != (saved.get("dtype") or saved.get("torch_dtype") or "float32")
    stated, text = _stated_facts(model, revision, out.resolve().name, given, measured, is_cast)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        stated.setdefault("task", "text-classification")
    export_model(loaded, tokenizer, out, card=text, overwrite=overwrite, facts=stated)
    options.say(f"wrote {out}; check it by `synlm verify {out}`")


def _stated_facts(
    model: str, revision: str | None, name: str, given: dict[str, Any], measured: list[dict[str, Any]], is_cast: bool
) -> tuple[dict[str, Any], str | None]:
    """Facts for the card of a copy, and the text of a card that has no facts and stays as it is.

    If its weights are cast to another type, results of the original are left out.
    """
    from hf_synlm.hub.card import saved_card
    from hf_synlm.hub.checkpoint import weight_checksums

    known, text = saved_card(model, revision)
    if known is None and text is not None and measured and not given:
        raise ValueError(
            f"{model!r} has a README.md without card.yaml, which --results would replace. Give what the new card shall "
            "state by --facts."
        )
    # Facts with checksums are those of a card; results without them are the user's.
    of_cards = [facts for facts in (known, given) if is_cast and facts and (facts is known or "weights" in facts)]
    left_out = [facts.pop("results", None) for facts in of_cards]
    for facts in of_cards:
        facts.pop("weights", None)
    if any(left_out) and not measured:
        options.say(
            "The card is without the results of card.yaml, which are those of the weights as they were saved. Evaluate "
            "the copy, and name the result files by --results."
        )
    elif is_cast and known is None and text is not None and not given:
        options.say("README.md stays as it is: its numbers, if any, are those of the weights as they were saved.")
    stated = {**(known or {}), "repo_id": name, **given}
    measured_weights = (given if "results" in given else stated).get("weights")
    if not measured and measured_weights and Path(model).is_dir():
        if weight_checksums(model) != measured_weights:
            raise ValueError(
                f"{model!r} has other weights than those whose results its card.yaml reports. Measure it and name the "
                "files by --results, or take results and weights out of card.yaml."
            )
    if measured:
        stated["results"] = [*given.get("results", ()), *measured]
    return stated, text if known is None and not given else None


def verify(
    model: ModelName,
    text: list[str] | None = None,
    num_beams: options.OptionalPositive = None,
    max_new_tokens: options.Positive = 8,
    tolerance: Annotated[float, typer.Option(min=0.0)] = 0.0,
    style: ReportFormat = "table",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> None:
    """Check that a folder loads without hf_synlm.

    The command loads a model here and in a clean process where `import hf_synlm` fails, and compares what the two
    compute: configuration, tokenizer, logits, parses and generated text with its trees must agree. The command runs the
    code of the folder, so a model on the Hub needs --trust-remote-code. Exit code 1 if something differs.

    Options:
        text: Text to tokenize, parse and continue; repeatable.
        num_beams: Beam of the parser; default: the model's.
        max_new_tokens: Length of the greedy continuation.
        tolerance: Largest difference of a number that passes; trees and tokens must be equal.
        style: How to print the result.

    Examples:
        synlm verify gpst-tiny
        synlm verify your-name/gpst-tiny --revision v1.0 --trust-remote-code --text "fruit flies like a banana"
    """
    from huggingface_hub import snapshot_download

    from hf_synlm.hub.checkpoint import check_model_source, one_line_errors

    check_model_source(model, revision)
    folder = Path(model)
    if not folder.is_dir() and not trust_remote_code:
        raise ValueError(
            f"{model!r} is a model on the Hub, and verifying it runs its code: read the code, then pass "
            "--trust-remote-code"
        )
    if not folder.is_dir():
        with one_line_errors(model, "model"):
            folder = Path(snapshot_download(model, revision=revision))
    options.say(f"loading {model} with and without hf_synlm ...")
    chosen: dict[str, Any] = {"num_beams": num_beams, "max_new_tokens": max_new_tokens, "tolerance": tolerance}
    if not _print_report(folder, style, **chosen, **({"texts": text} if text else {})):
        raise typer.Exit(1)


def _print_report(folder: Path, style: str = "table", **choices: Any) -> bool:
    """Verify a folder and print the report; True if all checks passed."""
    from hf_synlm.hub.export import check_tokenizer_of
    from hf_synlm.hub.verify import verify_export

    options.hide_bars_of_weights()
    check_tokenizer_of(folder)
    try:
        report = verify_export(folder, **choices)
    except RuntimeError as error:  # the clean process could not even start: a finding about the folder
        options.say(f"failed: {error}")
        return False
    typer.echo(json.dumps(report.to_dict(), indent=2) if style == "json" else report.table())
    return report.passed


def push(
    folder: options.PathArgument,
    repo_id: Annotated[str, typer.Argument()],
    private: bool = False,
    revision: str | None = None,
    message: str = "Upload model",
    check: Annotated[bool, typer.Option("--verify/--no-verify")] = True,
    dry_run: bool = False,
) -> None:
    """Upload a folder in a single, all-or-nothing commit.

    The command first checks the login and verifies the folder, and does not push it if something differs (exit code 1).
    Hidden files are left out, pickles are refused. The example on the card gets the name of the repository. The token
    is that of `hf auth login` or of the environment variable HF_TOKEN; there is no option for it, because other users
    of the machine can see it. Prints the hash of the commit, for `revision=`.

    Options:
        folder: What `synlm export` or a training script wrote.
        repo_id: Name on the Hub, OWNER/NAME; made if it does not exist.
        private: Make a new repository private.
        revision: Branch, made if it does not exist; default: main.
        message: Message of the commit.
        check: First do what `synlm verify` does.
        dry_run: Upload nothing: verify, and list the files with their sizes in bytes.

    Examples:
        synlm push gpst-tiny your-name/gpst-tiny --dry-run
        synlm push gpst-tiny your-name/gpst-tiny --private
        synlm push gpst-tiny your-name/gpst-tiny --revision v2 --message "Trained twice as long" --no-verify
    """
    from hf_synlm.hub.card import missing_on_card
    from hf_synlm.hub.export import check_login, check_repo_id, files_to_push, push_to_hub

    check_repo_id(repo_id)
    sizes = files_to_push(folder)
    for remark in missing_on_card(str(folder)):
        options.say(remark)
    if check and not dry_run:
        check_login()
    if check and not _print_report(folder):
        options.say(f"{folder} was not pushed")
        raise typer.Exit(1)
    if dry_run:
        typer.echo("\n".join(f"{size:12,}  {name}" for name, size in sizes.items()))
        typer.echo(f"{sum(sizes.values()):12,}  in {len(sizes)} files for {repo_id}; nothing was pushed")
        return
    commit = push_to_hub(folder, repo_id, private=private, revision=revision, commit_message=message)
    options.say(f'pushed {repo_id}; load it by from_pretrained("{repo_id}", revision="{commit}", ...)')
    typer.echo(commit)
