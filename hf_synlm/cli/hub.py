# SPDX-License-Identifier: Apache-2.0
"""`synlm convert`, `info`, `export`, `verify` and `push`: folders of models."""

import dataclasses
import json
from pathlib import Path
from subprocess import SubprocessError
from typing import Annotated, Any, Literal

import typer

from hf_synlm.cli import options, outputs
from hf_synlm.cli.options import MISSING, argument, option
from hf_synlm.data.files import check_target, find_model, read_json
from hf_synlm.evaluation.results import card_rows, check_results_of, load_result
from hf_synlm.models import ARCHITECTURES

FOLDER: dict[str, Any] = {"check": check_target, "is_folder": True}
OutFolder = Annotated[Path, typer.Option(help="Folder to write.")]


def convert(
    *,
    architecture: Literal["gpst", "on_lstm", "palm", "pcfg", "prpn", "pushdown", "rnng"] = argument(
        "Architecture of the checkpoint.", default=MISSING
    ),
    weights: Path = option(
        "The authors' checkpoint: safetensors, a file of plain tensors, or a model of compound-pcfg.",
        default=MISSING,
        **options.INPUT_FILE,
    ),
    out: OutFolder,
    config: list[Path] | None = option(
        "The authors' configuration in JSON. gpst needs it twice: r2d2_config, then gpt_config (davidarps/silm: "
        "only config.json). Not needed with --vocabulary and for checkpoints of compound-pcfg.",
        **options.INPUT_FILE,
    ),
    vocabulary: Path | None = option(
        "vocab.pkl of a pushdown checkpoint, read without running code; needs --tokenizer gpt2.", **options.INPUT_FILE
    ),
    overwrite: options.Overwrite = False,
    tokenizer: str | None = option(
        "Folder or Hub name of the checkpoint's tokenizer; default: as the configuration describes it."
    ),
) -> None:
    """Convert a checkpoint of the authors' code into a self-contained repository.

    The conversion must use every tensor. Otherwise the command stops and names the unused tensors. A pickle that holds
    more than tensors is refused, because it can run code. The error message explains how to extract the tensors.

    Examples:
        synlm convert gpst --weights model.bin --config r2d2.json --config gpt.json --tokenizer gpst-vocab --out gpst
        synlm convert rnng --weights weights.pt --config config.json --out rnng
        synlm convert pcfg --weights compound-pcfg.pt --out compound-pcfg
        synlm convert pushdown --weights model.pt --vocabulary vocab.pkl --tokenizer gpt2 --out pushdown-bllip
    """
    configs = config or []
    if not configs and vocabulary is None and architecture != "pcfg":
        raise ValueError("give --config, or --vocabulary for pushdown")
    outputs.check_out(out, overwrite, weights, *configs, vocabulary, model=tokenizer, **FOLDER)
    from hf_synlm.conversion.files import convert_files
    from hf_synlm.hub.loading import load_checked_tokenizer

    outputs.hide_bars_of_weights()
    loaded = None if tokenizer is None else load_checked_tokenizer(tokenizer)
    convert_files(architecture, weights, configs, out, loaded, overwrite=overwrite, vocabulary=vocabulary)
    if not (out / "tokenizer_config.json").is_file():
        outputs.say(f"{out} has no tokenizer, so it cannot read text: convert again with --tokenizer")
    if read_json(out / "config.json").get("eos_token_id") is None:
        outputs.say(f"{out} has no end token, so it never ends a sentence: add eos_token_id to the file of --config")
    outputs.say(f"wrote {out}; check it by `synlm verify {out}`")


def info(
    model: str | None = argument("Folder of a model or of its training run, or its name on the Hub."),
    # Typer reads the names at run time; mypy cannot.
    files: Literal[ARCHITECTURES] | None = option(  # type: ignore[valid-type]
        "List instead the files of code that ship with every model of this architecture."
    ),
    style: options.ReportFormat = "table",
    revision: options.Revision = None,
) -> None:
    """Show what a model is, without running it.

    The command shows architecture, size, tokens, Auto classes and the facts of the card. It says whether the model is
    complete. The command only reads files and never runs code, so it is safe for models of unknown origin. It does not
    download the weights of a model on the Hub.

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
    model: options.ModelName,
    out: OutFolder,
    overwrite: options.Overwrite = False,
    facts: Path | None = option(
        "YAML or JSON file with facts for the card: repo_id, license, language, datasets, training_data, "
        "training_procedure, limits, results, task, ... They replace the same facts in the card.yaml beside the "
        "model, which is read by default. A card without card.yaml stays as it is.",
        **options.INPUT_FILE,
    ),
    results: list[Path] | None = option(
        "Result file of `synlm evaluate --out` to report on the card; repeat for several. Their numbers replace "
        "those in the card.yaml beside the model.",
        **options.INPUT_FILE,
    ),
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    backbone: options.Backbone = None,
    dtype: options.DType = "auto",
    code_repo: str | None = option(
        "Repository of `synlm push-code` on the Hub, OWNER/NAME, from which the model loads its code; "
        "default: the code is part of the export."
    ),
) -> None:
    """Export a self-contained repository that loads without hf_synlm.

    The repository holds code, weights in safetensors, tokenizer, generation options and card. A language model stays a
    language model, and a classifier stays a classifier. The code always comes from the installed hf_synlm, even if the
    model came from the Hub and was fine-tuned. An adapter of a backbone stays an adapter. A checkpoint of a training
    run becomes a model with the weights of that step. Export an old folder again to renew its code. The new folder
    appears only when it is complete.

    Examples:
        synlm export model_cards/gpst-tiny --out gpst-tiny --facts model_cards/gpst-tiny/card.yaml
        synlm export model_cards/gpst-tiny --out my-gpst --results f1.json --results ppl.json
        synlm export runs/mine/step_14000 --out mine-14000
        synlm export your-name/gpst-tiny --revision v1.0 --out gpst-tiny-v1 --dtype bfloat16
        synlm export runs/mine --out mine --code-repo your-name/synlm-code
    """
    outputs.check_out(out, overwrite, facts, *(results or ()), model=model, **FOLDER)
    from transformers import PreTrainedConfig

    from hf_synlm.hub.card import read_facts
    from hf_synlm.hub.checkpoint import STATE_FILE, loaded_tensors
    from hf_synlm.hub.export import export_model
    from hf_synlm.hub.loading import load_pretrained, saved_auto_class

    outputs.hide_bars_of_weights()
    given = {} if facts is None else read_facts(facts)
    found = {path: load_result(path) for path in results or ()}
    measured = [row for result in found.values() for row in card_rows(result)]
    if (Path(model) / STATE_FILE).is_file():
        if revision or backbone or measured or dtype != "auto":
            raise ValueError(
                f"{model!r} is a checkpoint of a training run. Leave out --revision, --backbone, --results and "
                "--dtype. You can give them when you export the model again."
            )
        return _export_step(Path(model), out, overwrite, given, code_repo)
    auto_class = saved_auto_class(model, revision, trust_remote_code)
    source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    loaded, tokenizer = load_pretrained(model, auto_class, dtype=dtype, backbone=backbone, merge=False, **source)
    written = str(loaded.dtype).removeprefix("torch.")
    check_results_of(found, model, type(loaded).__name__, loaded.num_parameters(), written)
    saved = PreTrainedConfig.get_config_dict(model, revision=revision)[0]
    is_cast = dtype != "auto" and written != (saved.get("dtype") or saved.get("torch_dtype") or "float32")
    stated, text = _stated_facts(model, revision, out.resolve().name, given, measured, is_cast)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        stated.setdefault("task", "text-classification")
    stored = loaded_tensors(model, revision) if dtype == "auto" else None
    chosen: dict[str, Any] = {"overwrite": overwrite, "code_repo": code_repo}
    export_model(loaded, tokenizer, out, card=text, facts=stated, stored=stored, **chosen)
    outputs.say(f"wrote {out}; check it by `synlm verify {out}`")


def _export_step(folder: Path, out: Path, overwrite: bool, facts: dict[str, Any], code_repo: str | None) -> None:
    """Export the model of a checkpoint of a training run."""
    from hf_synlm.hub.export import export_model
    from hf_synlm.training.engine.export import load_step

    export_model(*load_step(folder), out, overwrite=overwrite, facts=facts, code_repo=code_repo)
    outputs.say(f"wrote {out} with the weights of this step, not those of the best step or of an average")


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
            f"{model!r} has a README.md and no card.yaml. --results would replace this README.md. Give the facts of "
            "the new card by --facts."
        )
    # Facts with checksums are those of a card; results without them are the user's.
    of_cards = [facts for facts in (known, given) if is_cast and facts and (facts is known or "weights" in facts)]
    left_out = [facts.pop("results", None) for facts in of_cards]
    for facts in of_cards:
        facts.pop("weights", None)
        facts.pop("tree", None)
    if any(left_out) and not measured:
        outputs.say(
            "The card leaves out the results in card.yaml, because they were measured on the weights before this "
            "export. Evaluate the copy, and name the result files by --results."
        )
    elif is_cast and known is None and text is not None and not given:
        outputs.say("README.md is not changed: if it reports numbers, they belong to the weights before this export.")
    named = (known or {}).get("repo_id", "")
    stated = {**(known or {}), "repo_id": named if "/" in named else name, **given}
    measured_weights = (given if "results" in given else stated).get("weights")
    if not measured and measured_weights and Path(model).is_dir():
        if weight_checksums(model) != measured_weights:
            raise ValueError(
                f"card.yaml of {model!r} reports the results of other weights. Measure these weights and name the "
                "files by --results, or delete results and weights in card.yaml."
            )
    if measured:
        stated["results"] = [*given.get("results", ()), *measured]
    return stated, text if known is None and not given else None


def verify(
    model: options.ModelName,
    text: list[str] | None = option("Text to tokenize, parse and continue; repeatable."),
    max_new_tokens: int = option("Length of the greedy continuation.", default=8, min=1),
    tolerance: float = option(
        "Largest allowed difference between numbers; trees and tokens must be equal.", default=0.0, min=0.0
    ),
    style: options.ReportFormat = "table",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    backbone: options.Backbone = None,
) -> None:
    """Check that a model loads and computes the same without hf_synlm.

    The command loads the model here and in a clean process where `import hf_synlm` fails. Configuration, tokenizer,
    logits, parses and generated text with its trees must agree. If something differs, the exit code is 1. The command
    runs the code of the folder. If the model or its code is on the Hub, pass --trust-remote-code.

    Examples:
        synlm verify gpst-tiny
        synlm verify your-name/gpst-tiny --revision v1.0 --trust-remote-code --text "fruit flies like a banana"
    """
    from huggingface_hub import snapshot_download

    from hf_synlm.hub.checkpoint import check_model_source, is_folder, one_line_errors

    folder = Path(model)
    if not is_folder(model, is_owned=True) and not trust_remote_code:
        raise ValueError(
            f"{model!r} is a model on the Hub. To verify it, its code must run here. Read this code, then pass "
            "--trust-remote-code"
        )
    check_model_source(model, revision)
    if not folder.is_dir():
        with one_line_errors(model, "model"):
            folder = Path(snapshot_download(model, revision=revision))
    _check_trust(folder, trust_remote_code)
    outputs.say(f"loading {model} with and without hf_synlm ...")
    chosen: dict[str, Any] = {"max_new_tokens": max_new_tokens, "tolerance": tolerance, "backbone": backbone}
    if not _print_report(folder, style, **chosen, **({"texts": text} if text else {})):
        raise typer.Exit(1)


def _check_trust(folder: Path, trust_remote_code: bool) -> None:
    """Raise ValueError before code is downloaded and run that nobody has read."""
    from hf_synlm.hub.checkpoint import check_code, code_repositories

    elsewhere = code_repositories(check_code(folder))
    if elsewhere and not trust_remote_code:
        raise ValueError(
            f"{str(folder)!r} runs code of {', '.join(elsewhere)} on the Hub during verification. Read this code, "
            "then pass --trust-remote-code"
        )


def _print_report(folder: Path, style: str = "table", **choices: Any) -> bool:
    """Verify a folder and print the report; True if all checks passed."""
    from hf_synlm.hub.export import check_tokenizer_of
    from hf_synlm.hub.verify import verify_export

    outputs.hide_bars_of_weights()
    check_tokenizer_of(folder)
    try:
        report = verify_export(folder, **choices)
    except (RuntimeError, SubprocessError) as error:  # the clean process could not start: a finding about the folder
        outputs.say(f"failed: {error}")
        return False
    found = {"folder": str(folder), "passed": report.passed, "checks": [check._asdict() for check in report.checks]}
    typer.echo(json.dumps(found, indent=2) if style == "json" else report.table())
    return report.passed


RepoId = Annotated[str, typer.Argument(help="Name on the Hub, OWNER/NAME. A missing repository is created.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommitOptions:
    """How files are uploaded to a repository of the Hub."""

    private: bool = option("Make a new repository private.", default=False)
    revision: str | None = option("Branch, created if it does not exist; default: main, which models load.")
    message: str | None = option("Message of the commit; default: Upload model, or Upload code.")
    dry_run: bool = option(
        "Upload nothing: list the files with their sizes in bytes, and verify a model.", default=False
    )

    def chosen(self, message: str) -> dict[str, Any]:
        """The options of `push_to_hub` and `push_code`."""
        return {"private": self.private, "revision": self.revision, "commit_message": self.message or message}


def push(
    *,
    folder: Path = argument("Folder that `synlm export` or a training script wrote.", default=MISSING),
    repo_id: RepoId,
    commit: CommitOptions,
    check: bool = option("Run `synlm verify` first.", default=True, name="--verify/--no-verify"),
    trust_remote_code: options.TrustRemoteCode = False,
    backbone: options.Backbone = None,
) -> None:
    """Upload a folder in a single, all-or-nothing commit.

    The command first checks the login and verifies the folder. If the verification fails, the command uploads nothing
    (exit code 1). Hidden files are left out, and pickles are refused. The example on the card gets the name of the
    repository. The token comes from `hf auth login` or the environment variable HF_TOKEN. There is no option for the
    token, because other users of the machine could see it. The command prints the hash of the commit, for `revision=`.

    Examples:
        synlm push gpst-tiny your-name/gpst-tiny --dry-run
        synlm push gpst-tiny your-name/gpst-tiny --private
        synlm push gpst-tiny your-name/gpst-tiny --revision v2 --message "Trained twice as long" --no-verify
    """
    from hf_synlm.hub.upload import check_login, check_repo_id, files_to_push, push_to_hub

    check_repo_id(repo_id)
    folder = Path(find_model(folder))
    sizes = files_to_push(folder)
    if check and not commit.dry_run:
        check_login()
    from hf_synlm.hub.card import missing_on_card  # imports torch

    for remark in missing_on_card(str(folder)):
        outputs.say(remark)
    if check:
        _check_trust(folder, trust_remote_code)
    if check and not _print_report(folder, backbone=backbone):
        outputs.say(f"{folder} was not pushed")
        raise typer.Exit(1)
    if commit.dry_run:
        return _print_sizes(sizes, repo_id)
    pushed = push_to_hub(folder, repo_id, **commit.chosen("Upload model"))
    outputs.say(f'pushed {repo_id}; load it by from_pretrained("{repo_id}", revision="{pushed}", ...)')
    typer.echo(pushed)


def push_code(repo_id: RepoId, commit: CommitOptions) -> None:
    """Upload the code of all architectures to a repository.

    Models of `synlm export --code-repo` load their code from this repository, so one push repairs all of them. The
    repository holds the code, its licence, the versions that the code needs, and a card. The command prints the hash of
    the commit, for `code_revision=`.

    Examples:
        synlm push-code your-name/synlm-code --dry-run
        synlm push-code your-name/synlm-code --message "For transformers 5.24"
    """
    from hf_synlm.hub.code import code_repository, push_code as push

    if commit.dry_run:
        return _print_sizes({name: len(text.encode()) for name, text in code_repository(repo_id).items()}, repo_id)
    pushed = push(repo_id, **commit.chosen("Upload code"))
    outputs.say(f"pushed {repo_id}; models load it if they were exported with --code-repo {repo_id}")
    typer.echo(pushed)


def _print_sizes(sizes: dict[str, int], repo_id: str) -> None:
    typer.echo("\n".join(f"{size:12,}  {name}" for name, size in sizes.items()))
    typer.echo(f"{sum(sizes.values()):12,}  in {len(sizes)} files for {repo_id}; nothing was pushed")
