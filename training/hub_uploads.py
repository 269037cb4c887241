"""Checkpoints on the Hub while training goes on: the model of each, and the checkpoint itself to resume from."""

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from checkpoints import PARTIAL_SUFFIX
from common import Run, export_run
from huggingface_hub import HfApi
from transformers import PreTrainedTokenizerBase

logger = get_logger(__name__)

LAST_CHECKPOINT = "last-checkpoint"


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
        if self.enabled and run.accelerator.is_main_process:  # a wrong name or token fails here, not after days
            self.api.create_repo(run.arguments.hub_model_id, exist_ok=True)

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
        export_run(self.run, self.tokenizer, self.facts(), folder)
        if self.run.accelerator.is_main_process:
            # Links cost no space, and the checkpoint may be deleted before it has been read.
            shutil.copytree(checkpoint, folder / LAST_CHECKPOINT, copy_function=os.link)
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
