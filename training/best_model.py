"""The weights of the best evaluation of a run, and early stopping."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import PARTIAL_SUFFIX, STATE_FILE, list_checkpoints, publish_folder, remove_folder
from common import Run
from safetensors.torch import load_model as load_weights
from safetensors.torch import save_model as save_weights


class BestModel:
    """Keeps the weights of the best evaluation, and says when there was no better one for long enough.

    Weights lie in `output_dir/best_N`, N the step of the evaluation. What a complete checkpoint names as its best stays
    as long as the checkpoint, so that a resumed run finds it.

    Args:
        metric: the number of an evaluation to minimise.
        patience: stop after so many evaluations in a row without a better one; 0 = never.
    """

    def __init__(self, metric: Callable[[dict[str, Any]], float], patience: int):
        self.metric, self.patience = metric, patience

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
        """Delete weights that neither the run nor one of its checkpoints names as its best."""
        if run.accelerator.is_main_process:
            notes = [
                json.loads((folder / STATE_FILE).read_text())["notes"] for folder in list_checkpoints(run.output_dir)
            ]
            kept = {self._folder(run, item["best"]["step"]) for item in (run.state.notes, *notes) if "best" in item}
            for folder in run.output_dir.glob("best_*"):
                if folder not in kept and not folder.name.endswith(PARTIAL_SUFFIX):
                    remove_folder(folder)
        run.accelerator.wait_for_everyone()

    def restore(self, run: Run) -> int:
        """Load the best weights into the model, on every process, and return the step that they are from."""
        step = run.state.notes["best"]["step"]
        file = self._folder(run, step) / "model.safetensors"
        load_weights(run.accelerator.unwrap_model(run.model), str(file))
        return step

    @staticmethod
    def _folder(run: Run, step: int) -> Path:
        return run.output_dir / f"best_{step}"

    def _write(self, run: Run) -> None:
        folder = self._folder(run, run.state.notes["best"]["step"])
        partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
        if run.accelerator.is_main_process:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            save_weights(run.accelerator.unwrap_model(run.model), str(partial / "model.safetensors"))
            publish_folder(partial, folder)
        run.accelerator.wait_for_everyone()
