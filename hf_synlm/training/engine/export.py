# SPDX-License-Identifier: Apache-2.0
"""Export the final model of a run, or that of a checkpoint, and push it to the Hub."""

from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.files import folder_writer, read_json
from hf_synlm.data.tokenizers import save_tokenizer
from hf_synlm.hub.card import PAPERS
from hf_synlm.hub.checkpoint import STATE_FILE, one_line_errors
from hf_synlm.hub.export import export_model
from hf_synlm.hub.loading import load_checked_tokenizer
from hf_synlm.hub.upload import push_to_hub
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine.checkpoints import WEIGHTS_FILE, clear_errors, load_weights
from hf_synlm.training.engine.run import Run, tokenizer_hash


def export_run(run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], folder: Path) -> None:
    """Export the model as it is now to `folder`, which replaces an older one when it is complete; every process calls.

    A model of this library is exported with tokenizer, code and card (of `facts` and the name), one of transformers as
    transformers saves it.
    """
    weights = run.accelerator.get_state_dict(run.model)
    try:
        if run.accelerator.is_main_process:
            with clear_errors(folder, "The model"):
                _write_model(run, tokenizer, facts, folder, weights)
    finally:
        run.accelerator.wait_for_everyone()


def load_step(folder: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The language model of a checkpoint `step_N`, with the weights of that step, and its tokenizer."""
    settings = read_json(folder / STATE_FILE)["settings"]
    values = settings["config"]
    if not (folder / WEIGHTS_FILE).is_file():
        raise ValueError(
            f"{folder} has no {WEIGHTS_FILE}, only shards of the weights. Finish the run: repeat its command with "
            f"--resume-from-checkpoint {folder}."
        )
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[values["model_type"]].from_dict(values))
    with one_line_errors(str(folder), "model"):
        missing, others = load_weights(model, str(folder / WEIGHTS_FILE), strict=False)
    others = [name for name in others if not name.startswith("inference_network.")]  # URNNG's, of training alone
    if missing and not others:
        raise ValueError(f"{folder} lacks weights of its model, such as {missing[0]}. Take another checkpoint.")
    if others:
        raise ValueError(
            f"{folder} holds the weights of something else than a language model, such as a classifier. Take the "
            "folder 'model', which the run writes at its end."
        )
    kept = folder if (folder / "tokenizer.json").is_file() else folder.resolve().parent / "tokenizer"  # of older runs
    tokenizer = load_checked_tokenizer(str(kept))
    if tokenizer_hash(tokenizer) != settings["tokenizer"]:
        raise ValueError(
            f"{kept} holds another tokenizer than that of the run. Copy the tokenizer of the run to {folder}."
        )
    return model, tokenizer


def hub_facts(base_model: str | None, dataset: str | None = None) -> dict[str, Any]:
    """Where a model comes from, for its card: names on the Hub. Folders of this machine tell readers nothing."""
    facts: dict[str, Any] = {}
    if base_model and not Path(base_model).exists():
        facts["base_model"] = base_model
    if dataset and not Path(dataset).exists():
        facts["datasets"] = [dataset]
    return facts


def model_name(name: str) -> str:
    """Name of a model for readers elsewhere: on the Hub, or of its folder; `runs/mine/model` is "mine"."""
    if not Path(name).exists():
        return name
    folder = Path(name).resolve()
    return folder.parent.name if folder.name == "model" else folder.name


def _write_model(
    run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], folder: Path, weights: dict[str, Tensor]
) -> None:
    """The part of `export_run` that the main process does."""
    plain = run.accelerator.unwrap_model(run.model)
    if isinstance(plain, FSDPModule):
        plain = _without_shards(plain)
        # Gathered weights are copies: the ones that are tied would be saved twice.
        weights = {name: value for name, value in weights.items() if name not in plain.all_tied_weights_keys}
    if plain.config.model_type in PAPERS:
        stated = {"repo_id": run.arguments.hub_model_id or run.output_dir.resolve().name, **facts}
        export_model(plain, tokenizer, folder, overwrite=True, state_dict=weights, facts=stated)
    else:
        with folder_writer(folder) as partial:
            plain.save_pretrained(partial, state_dict=weights)
            save_tokenizer(tokenizer, partial)


def _without_shards(model: PreTrainedModel) -> PreTrainedModel:
    """An empty model of the class to be saved; FSDP2 has made a subclass of it."""
    model_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        empty = model_class(model.config)
    empty.generation_config = model.generation_config
    return empty


# ---------------------------------------------------------------------------------------------- the Hub
def check_repository(arguments: TrainingArguments) -> None:
    """Make the repository of `push_to_hub`, so that a wrong name or token fails before training."""
    if not arguments.push_to_hub:
        return
    try:
        HfApi().create_repo(arguments.hub_model_id, exist_ok=True)
    except Exception as error:  # the token or its rights, the name, the network: many types
        raise ValueError(
            f"--push-to-hub is set, and the repository {arguments.hub_model_id!r} cannot be made: {error}. Log in with "
            "`hf auth login` or set HF_TOKEN, choose another --hub-model-id, or leave --push-to-hub out."
        ) from error


def push_final_model(run: Run) -> None:
    """Push `output_dir/model` of a run that has ended, if the arguments ask for it."""
    if not run.arguments.push_to_hub or not run.accelerator.is_main_process:
        return
    folder, repo_id = run.output_dir / "model", run.arguments.hub_model_id
    try:
        config: Any = run.model.config
        if config.model_type in PAPERS:
            push_to_hub(folder, str(repo_id))
        else:
            HfApi().upload_folder(repo_id=repo_id, folder_path=str(folder))
    except Exception as error:  # many types; none may hide that the run is finished
        raise RuntimeError(
            f"The run is finished, and {folder} is complete, but it could not be pushed to {repo_id!r}: {error}. Push "
            f"it with `hf upload {repo_id} {folder}`."
        ) from error
