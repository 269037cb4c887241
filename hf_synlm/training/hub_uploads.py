"""Checkpoints on the Hub while training goes on: the model of each, and the checkpoint itself to resume from."""

import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerBase

from hf_synlm.hub.card import PAPERS
from hf_synlm.hub.export import push_to_hub
from hf_synlm.training.checkpoints import PARTIAL_SUFFIX, link_or_copy
from hf_synlm.training.run import Run, export_run

logger = get_logger(__name__)

LAST_CHECKPOINT = "last-checkpoint"


def push_final_model(run: Run) -> None:
    """Push `output_dir/model`, if the arguments ask for it; the last thing that a script does.

    Args:
        run: ended; its results are written.

    Raises:
        RuntimeError: when that fails. Nothing is lost then.
    """
    if not run.arguments.push_to_hub or not run.accelerator.is_main_process:
        return
    folder, repo_id, token = run.output_dir / "model", run.arguments.hub_model_id, run.arguments.hub_token
    try:
        if run.model.config.model_type in PAPERS:
            push_to_hub(folder, repo_id, token=token)
        else:
            HfApi(token=token).upload_folder(repo_id=repo_id, folder_path=str(folder))
    except Exception as error:  # of many kinds, and none of them may hide that the run is finished
        raise RuntimeError(
            f"The run is finished, and {folder} is complete, but it could not be pushed to {repo_id!r}: {error}. Push "
            f"it with `hf upload {repo_id} {folder}`."
        ) from error


class CheckpointUploads:
    """Pushes checkpoints in the background; `loop.train` calls it with every complete one.

    As with `hub_strategy="checkpoint"` of transformers, the repository holds the newest model at its root and the
    checkpoint in `last-checkpoint`, to be downloaded and named by `--resume_from_checkpoint`. A checkpoint that comes
    while another is on its way is left out, and a failed upload is a warning: neither holds the training up.

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
        if self._agree(busy):
            logger.warning(f"{checkpoint} is not pushed: the one before it is still on its way.")
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

    def _agree(self, value: bool) -> bool:
        """What the main process says, on every process."""
        shared = [value]
        if self.run.accelerator.num_processes > 1:
            broadcast_object_list(shared)
        return shared[0]

    def _report(self) -> None:
        """Warn of an upload that has failed."""
        if self.upload is not None and self.upload.exception() is not None:
            logger.warning(f"A checkpoint could not be pushed: {self.upload.exception()}")
        self.upload = None
