"""Export of a run's model: the final one, and checkpoints on the Hub while training goes on."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_synlm.data.files import PARTIAL_SUFFIX, folder_writer
from hf_synlm.hub.card import PAPERS
from hf_synlm.hub.export import export_model, push_to_hub
from hf_synlm.training.engine.arguments import TrainingArguments
from hf_synlm.training.engine.checkpoints import clear_errors, link_or_copy
from hf_synlm.training.engine.run import Run

logger = get_logger(__name__)

LAST_CHECKPOINT = "last-checkpoint"


def export_run(run: Run, tokenizer: PreTrainedTokenizerBase, facts: dict[str, Any], folder: Path) -> None:
    """Export the model of a run as it is now; every process has to call.

    A model of this library is exported with tokenizer, code and card, one of transformers as transformers saves it.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: for the card of a model of this library; the name is added.
        folder: appears when it is complete; an older one is replaced.

    Raises:
        OSError: it cannot be written.
    """
    weights = run.accelerator.get_state_dict(run.model)
    try:
        if run.accelerator.is_main_process:
            with clear_errors(folder, "The model"):
                _write_model(run, tokenizer, facts, folder, weights)
    finally:
        run.accelerator.wait_for_everyone()


def hub_facts(base_model: str | None, dataset: str | None = None) -> dict[str, Any]:
    """Where a model comes from, for its card: names on the Hub. Folders of this machine tell readers nothing.

    Args:
        base_model: folder or name of the model that training began with.
        dataset: folder or name of the training data.

    Returns:
        The facts that are known.
    """
    facts: dict[str, Any] = {}
    if base_model and not Path(base_model).exists():
        facts["base_model"] = base_model
    if dataset and not Path(dataset).exists():
        facts["datasets"] = [dataset]
    return facts


def model_name(name: str) -> str:
    """Name of a model for readers elsewhere: on the Hub, or of its folder, without the folders around it.

    Args:
        name: folder, or name on the Hub.

    Returns:
        The name; of `runs/mine/model` it is "mine".
    """
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
            tokenizer.save_pretrained(partial)


def _without_shards(model: PreTrainedModel) -> PreTrainedModel:
    """An empty model of the class to be saved; FSDP2 has made a subclass of it."""
    model_class: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, FSDPModule))
    with torch.device("meta"):
        empty = model_class(model.config)
    empty.generation_config = model.generation_config
    return empty


# ---------------------------------------------------------------------------------------------- the Hub
def check_repository(arguments: TrainingArguments) -> None:
    """Make the repository of `push_to_hub`, so that a wrong name or token fails before training.

    Args:
        arguments: of the run.

    Raises:
        ValueError: it cannot be made.
    """
    if not arguments.push_to_hub:
        return
    try:
        HfApi(token=arguments.hub_token).create_repo(arguments.hub_model_id, exist_ok=True)
    except Exception as error:  # the token or its rights, the name, the network: many types
        raise ValueError(
            f"push_to_hub is set, and the repository {arguments.hub_model_id!r} cannot be made: {error}. Log in with "
            "`hf auth login` or pass --hub_token, choose another --hub_model_id, or leave --push_to_hub out."
        ) from error


def push_final_model(run: Run) -> None:
    """Push `output_dir/model`, if the arguments ask for it.

    Args:
        run: ended; its results are written.

    Raises:
        RuntimeError: the push failed; the run and its model are complete.
    """
    if not run.arguments.push_to_hub or not run.accelerator.is_main_process:
        return
    folder, repo_id, token = run.output_dir / "model", run.arguments.hub_model_id, run.arguments.hub_token
    try:
        config: Any = run.model.config
        if config.model_type in PAPERS:
            push_to_hub(folder, str(repo_id), token=token)
        else:
            HfApi(token=token).upload_folder(repo_id=repo_id, folder_path=str(folder))
    except Exception as error:  # many types; none may hide that the run is finished
        raise RuntimeError(
            f"The run is finished, and {folder} is complete, but it could not be pushed to {repo_id!r}: {error}. Push "
            f"it with `hf upload {repo_id} {folder}`."
        ) from error


class CheckpointUploads:
    """Pushes checkpoints in the background; the training loop calls it with every complete one.

    As with `hub_strategy="checkpoint"` of transformers, the repository holds the newest model at its root and the
    checkpoint in `last-checkpoint`, to be downloaded and named by `--resume_from_checkpoint`. A checkpoint is skipped
    while the upload of another one is under way, and a failed upload gives a warning: training never waits.

    Args:
        run: of this process.
        tokenizer: of the model.
        facts: makes what the card states, at the time of an upload.
    """

    def __init__(self, run: Run, tokenizer: PreTrainedTokenizerBase, facts: Callable[[], dict[str, Any]]):
        self.run, self.tokenizer, self.facts = run, tokenizer, facts
        self.enabled = run.arguments.push_to_hub and run.arguments.hub_strategy == "checkpoint"
        self.api = HfApi(token=run.arguments.hub_token)
        self.upload: Future | None = None

    def __call__(self, checkpoint: Path) -> None:
        """Push a checkpoint; every process has to call."""
        if not self.enabled:
            return
        busy = self.run.accelerator.is_main_process and self.upload is not None and not self.upload.done()
        shared = [busy]
        broadcast_object_list(shared)  # from the main process
        if shared[0]:
            logger.warning(f"{checkpoint} is not pushed: the upload of the previous one is still under way.")
            return
        self._report()
        folder = self.run.output_dir / f"hub{PARTIAL_SUFFIX}"
        if self.run.accelerator.is_main_process:
            shutil.rmtree(folder, ignore_errors=True)
        try:
            export_run(self.run, self.tokenizer, self.facts(), folder)
            if self.run.accelerator.is_main_process:
                # Links cost no space, and the checkpoint may be deleted before it has been read.
                shutil.copytree(checkpoint, folder / LAST_CHECKPOINT, copy_function=link_or_copy)
        except OSError as error:
            logger.warning(f"{checkpoint} is not pushed: {error}")
            return
        if self.run.accelerator.is_main_process:
            self.upload = self.api.upload_folder(
                repo_id=self.run.arguments.hub_model_id,
                folder_path=str(folder),
                commit_message=f"Training in progress, {checkpoint.name}",
                run_as_future=True,
            )

    def finish(self) -> None:
        """Wait for the last upload."""
        if self.upload is not None:
            self.upload.exception()
            self._report()
            shutil.rmtree(self.run.output_dir / f"hub{PARTIAL_SUFFIX}", ignore_errors=True)

    def _report(self) -> None:
        """Warn if the last upload has failed."""
        if self.upload is not None and self.upload.exception() is not None:
            logger.warning(f"A checkpoint could not be pushed: {self.upload.exception()}")
        self.upload = None
