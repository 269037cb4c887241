"""`synlm export`: a model in, a repository that needs no hf_synlm out."""

from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from hf_synlm.cli import options
from hf_synlm.evaluation.results import card_rows, load_result
from hf_synlm.hub.card import fill_card
from hf_synlm.hub.checkpoint import load_pretrained, saved_auto_class
from hf_synlm.hub.export import export_model


def command(
    model: Annotated[str, typer.Argument(help="Folder of a trained model, or its name on the Hub.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write.", callback=options.output_check())],
    facts: Annotated[
        Path | None,
        typer.Option(
            help="YAML or JSON file of what the card states: repo_id, license, language, datasets, training_data, "
            "training_procedure, limits, results, task, ..."
        ),
    ] = None,
    results: Annotated[
        list[Path] | None,
        typer.Option(help="JSON file of `synlm evaluate`, whose number the card states; repeat for several."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an existing folder, once the new one is complete.")
    ] = False,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dtype: options.DType = "auto",
) -> None:
    """Write a self-contained repository: code, weights in safetensors, tokenizer, generation options, card.

    The model is saved as what it is, a language model or a classifier, with the code of the installed hf_synlm; so is
    a fine-tuned copy of a model from the Hub. The folder appears once it is complete.

    Examples:
        synlm export model_cards/gpst-tiny --out gpst-tiny --facts model_cards/gpst-tiny/card.yaml
        synlm export runs/gpst_tiny/model --out my-gpst --results f1.json --results ppl.json
        synlm export your-name/gpst-tiny --revision v1.0 --out gpst-tiny-v1 --dtype bfloat16
    """
    if out.exists() and not overwrite:
        raise ValueError(f"{out} exists. Choose another folder, or replace it by --overwrite.")
    stated = {"repo_id": out.resolve().name, **_read_facts(facts)}
    measured = [row for path in results or () for row in card_rows(load_result(path))]
    stated["results"] = [*stated.get("results", ()), *measured]
    auto_class = saved_auto_class(model, revision, trust_remote_code)
    if auto_class.__name__ == "AutoModelForSequenceClassification":
        stated.setdefault("task", "text-classification")
    loaded, tokenizer = load_pretrained(
        model, auto_class, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code
    )
    export_model(loaded, tokenizer, out, card=fill_card(loaded.config, stated), overwrite=overwrite)
    typer.echo(f"wrote {out}; check it by `synlm verify {out}`", err=True)


def _read_facts(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is neither YAML nor JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no mapping from facts to values, such as `license: cc0-1.0`")
    return found
