"""The weights of the best evaluation of a run, and early stopping."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights

from hf_synlm.training.checkpoints import (
    BEST_FILE,
    PARTIAL_SUFFIX,
    link_or_copy,
    publish_folder,
    remove_folder,
    written_whole,
)
from hf_synlm.training.run import Run

WEIGHTS_FILE = "model.safetensors"


class BestModel:
    """Keeps the weights of the best evaluation, and says when there was no better one for long enough.

    Weights lie in `output_dir/best_N`, N the step of the evaluation. A checkpoint holds those that were the best when
    it was written (`weights`), so that a run can be resumed from it wherever it lies (`adopt`).

    Args:
        metric: the number of an evaluation to minimise.
        patience: stop after this many evaluations in a row without a better one; 0 = never.
        first_step: evaluations of earlier steps are never the best; 1 leaves out the model that a run begins with.
    """

    def __init__(self, metric: Callable[[dict[str, Any]], float], patience: int = 0, first_step: int = 0):
        self.metric, self.patience, self.first_step = metric, patience, first_step

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call.

        Args:
            run: whose `state.notes` hold the evaluations; the best is noted there.

        Returns:
            Whether to stop.

        Raises:
            FloatingPointError: when the metric is not finite.
        """
        notes = run.state.notes
        evaluation = notes["evaluations"][-1]
        if evaluation["step"] < self.first_step:
            return False
        value, best = self.metric(evaluation), notes.get("best")
        if not np.isfinite(value):
            raise FloatingPointError(f"The validation loss is {value} at step {evaluation['step']}.")
        if best is None or value < best["value"]:
            notes["best"] = {"step": evaluation["step"], "value": value}
            self._write(run)
            self.prune(run)
            return False
        stale = sum(1 for other in notes["evaluations"] if other["step"] > best["step"])
        return 0 < self.patience <= stale

    def prune(self, run: Run) -> None:
        """Delete weights that are no longer the best."""
        if run.accelerator.is_main_process:
            kept = self._folder(run, run.state.notes["best"]["step"]) if "best" in run.state.notes else None
            for folder in run.output_dir.glob("best_*"):
                if folder != kept and not folder.name.endswith(PARTIAL_SUFFIX):
                    remove_folder(folder)
        run.accelerator.wait_for_everyone()

    def weights(self, run: Run) -> Path | None:
        """File of the best weights so far, if there are some."""
        best = run.state.notes.get("best")
        return None if best is None else self._folder(run, best["step"]) / WEIGHTS_FILE

    def adopt(self, run: Run, checkpoint: Path) -> None:
        """Take the best weights over from the checkpoint that a run is resumed from; every process has to call.

        Args:
            run: resumed.
            checkpoint: that it is resumed from.

        Raises:
            ValueError: when the checkpoint lacks them.
        """
        file = self.weights(run)
        if run.accelerator.is_main_process and file is not None and not file.is_file():
            if not (checkpoint / BEST_FILE).is_file():
                raise ValueError(
                    f"The best weights of the run are those of step {run.state.notes['best']['step']}, and "
                    f"{checkpoint / BEST_FILE} is missing. Take the whole checkpoint, or another one."
                )
            with written_whole(file.parent, "The best model") as partial:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                link_or_copy(checkpoint / BEST_FILE, partial / WEIGHTS_FILE)
                publish_folder(partial, file.parent)
        self.prune(run)

    def restore(self, run: Run) -> int:
        """Load the best weights into the model, on every process, and return the step that they are from."""
        step = run.state.notes["best"]["step"]
        file = self._folder(run, step) / WEIGHTS_FILE
        load_weights(run.accelerator.unwrap_model(run.model), str(file))
        return step

    @staticmethod
    def _folder(run: Run, step: int) -> Path:
        return run.output_dir / f"best_{step}"

    def _write(self, run: Run) -> None:
        folder = self._folder(run, run.state.notes["best"]["step"])
        if run.accelerator.is_main_process:
            with written_whole(folder, "The best model") as partial:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                save_weights(run.accelerator.unwrap_model(run.model), str(partial / WEIGHTS_FILE))
                publish_folder(partial, folder)
        run.accelerator.wait_for_everyone()
