"""The training loop: steps, readings, evaluations, checkpoints, and how it ends early."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_synlm.data.files import write_json
from hf_synlm.training.engine.checkpoints import (
    BestModel,
    load_checkpoint,
    plain_settings,
    remove_later,
    save_checkpoint,
)
from hf_synlm.training.engine.output_folder import end_run
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.speed import SpeedMeter, device_peak_flops
from hf_synlm.training.engine.steps import StepReport, StopSignals, is_due, optimizer_steps

Evaluate = Callable[[nn.Module, int], dict[str, Any]]


# ---------------------------------------------------------------------------------------------- readings
class LossMeter:
    """Collects step reports on the device; reading them takes one host sync and one reduction.

    Args:
        run: of this process.
        batches: whose sampler names the samples of a bad batch.
    """

    def __init__(self, run: Run, batches: DataLoader):
        self.run, self.accelerator, self.batches = run, run.accelerator, batches
        self.begin_step = run.state.step
        self.reports: list[StepReport] = []

    def read(self, step: int) -> dict[str, float]:
        """Means over the `reports` since the last reading, at least one; every process has to call.

        Args:
            step: of the last report.

        Returns:
            Name -> mean of the losses of whole batches, and of the gradient norm.

        Raises:
            FloatingPointError: a loss or the gradient norm is not finite. `output_dir/not_finite_N.json` names the
                batches.
        """
        device, reports = self.accelerator.device, self.reports
        names = list(reports[0].losses)
        losses = torch.stack([torch.stack([r.losses[name].float() for name in names]) for r in reports]).to(device)
        norms = torch.stack([r.gradient_norm.detach().float().to(device) for r in reports])
        total = self.accelerator.reduce(losses.mean(0), "sum")
        values = torch.cat([total, norms.mean()[None]]).tolist()
        means = dict(zip([*names, "gradient_norm"], values, strict=True))
        broken = [name for name, value in means.items() if not np.isfinite(value)]
        if broken:
            self._report_broken(broken, step, norms.tolist())
        self.reports = []
        return means

    def _report_broken(self, names: list[str], step: int, norms: list[float]) -> None:
        """Write which batches made a loss infinite or NaN, and raise."""
        accumulation = self.run.arguments.gradient_accumulation_steps
        first_step, rank, rows = step - len(self.reports) + 1, self.accelerator.process_index, []
        # The sampler yields the samples of the micro steps of this process again.
        sampler: Any = self.batches.batch_sampler
        samples = itertools.islice(sampler, (first_step - 1 - self.begin_step) * accumulation, None)
        for number, (report, norm) in enumerate(zip(self.reports, norms, strict=True)):
            for micro, loss in enumerate(torch.stack(report.micro_losses).tolist()):
                rows.append({"step": first_step + number, "micro_step": micro, "rank": rank, "loss": repr(loss),
                             "finite": bool(np.isfinite(loss)), "gradient_norm": repr(norm),
                             "sample_ids": next(samples)})  # fmt: skip
        rows = gather_object(rows)
        bad = [row["step"] for row in rows if not row["finite"] or row["gradient_norm"] in ("nan", "inf")]
        bad_step = min(bad, default=first_step)
        path = self.run.output_dir / f"not_finite_{bad_step}.json"
        if self.accelerator.is_main_process:
            rows = [row for row in rows if row["step"] == bad_step]
            write_json(path, {"first_bad_step": bad_step, "names": names, "micro_batches": rows})
        self.accelerator.wait_for_everyone()
        raise FloatingPointError(
            f"{', '.join(names)} became NaN or infinite between steps {first_step} and {step}, first at step "
            f"{bad_step}; {path} names its batches. Look at them, lower the learning rate, lengthen the warm-up or "
            "train in float32; then resume from the last checkpoint or start from step 0."
        )


# ---------------------------------------------------------------------------------------------- the run
def start_or_resume(
    run: Run, checkpoint: Path | None, settings: dict[str, Any], evaluate: Evaluate, best: BestModel | None = None
) -> None:
    """Load the checkpoint, or evaluate the untrained model.

    Args:
        run: of this process; its `state` is replaced or begun.
        checkpoint: of `output_folder`.
        settings: of `course_settings`.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        best: keeps the best model.

    Raises:
        ValueError: settings or data differ from those of the checkpoint, or it is damaged.
    """
    if checkpoint is not None:
        run.state = load_checkpoint(run.accelerator, checkpoint, settings)
        if run.accelerator.is_main_process:
            remove_later(run.output_dir, run.state.step)
        run.accelerator.wait_for_everyone()
        if best is not None:
            best.adopt(run, checkpoint)
        run.accelerator.print(f"resumed from {checkpoint} at step {run.state.step}")
        return
    run.state.settings = plain_settings(settings)
    run.state.notes["evaluations"] = [evaluate(run.model, 0)]
    if best is not None:
        best.update(run)


class TrainingLoop:
    """Steps with readings, evaluations, samples and checkpoints on the way.

    SIGTERM and SIGINT to any process end the run after the current step: with a checkpoint and exit status 0.

    Args:
        run: of this process.
        recipe: gives batches, losses, evaluations and samples.
        best: keeps the best model and stops the run early.
        after_checkpoint: called with every complete checkpoint but that of the last step.
    """

    def __init__(
        self,
        run: Run,
        recipe: Recipe,
        best: BestModel | None = None,
        after_checkpoint: Callable[[Path], None] | None = None,
    ):
        self.run, self.recipe, self.best, self.after_checkpoint = run, recipe, best, after_checkpoint
        accelerator, arguments = run.accelerator, run.arguments
        self.batches, flops = recipe.loader(run), recipe.flops_per_token(accelerator.unwrap_model(run.model))
        peak = device_peak_flops(accelerator.device, accelerator.mixed_precision, arguments.peak_flops)
        self.speed = SpeedMeter(flops, None if peak is None else peak * accelerator.num_processes)
        self.meter, self.saved_step = LossMeter(run, self.batches), run.state.step
        # All steps of the run with the time that is left; less often where it goes to a file.
        self.bar = tqdm(
            total=arguments.num_steps,
            initial=run.state.step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,
            disable=not accelerator.is_local_main_process,
        )

    def train(self) -> dict[str, float]:
        """Train to the last step, or until `best` says stop.

        Returns:
            `tokens_per_second` of all processes and, where it is known, `model_flop_utilization`, over the steps of
            this process.

        Raises:
            FloatingPointError: see `LossMeter.read`.
            OSError: a checkpoint cannot be written.
            SystemExit: with status 0, after a signal.
        """
        run, arguments = self.run, self.run.arguments
        with StopSignals() as signals, self.bar:
            stopped_early = False
            for report in optimizer_steps(run, self.batches, self.recipe.compute_loss, signals):
                self.meter.reports.append(report)
                self.speed.add(report.tokens)
                self.bar.update()
                if self._after_step():
                    stopped_early = True
                    run.accelerator.print(f"stopped at step {run.state.step}: no better evaluation for a while")
                    break
            if not stopped_early and run.state.step < arguments.num_steps:
                self._leave(signals)
        if run.state.notes["evaluations"][-1]["step"] != run.state.step:
            self._evaluate()
        return self.speed.overall()

    def _after_step(self) -> bool:
        """Read, evaluate, generate and save if they are due; whether to stop early."""
        arguments, step, last = self.run.arguments, self.run.state.step, self.run.arguments.num_steps
        # The last step is saved, too: the final measurements and the export may fail.
        save = is_due(step, arguments.checkpointing_steps, last) or (step == last and arguments.checkpointing_steps > 0)
        evaluate = step < last and self.recipe.evaluation_due(step)
        generate = is_due(step, arguments.generation_steps, last)
        # First: if the losses are not finite, the reading names the batch before anything else uses the model.
        if save or evaluate or generate or step % arguments.logging_steps == 0 or step == last:
            self._read()
        stop = False
        with self.speed.paused():
            if evaluate:
                stop = self._evaluate()
            if generate:
                self.recipe.generate(self.run.model, step)
            if save and not stop:  # a run resumed from here would not stop
                self._save()
        return stop

    def _evaluate(self) -> bool:
        """Evaluate, and note the best model; whether to stop early."""
        run = self.run
        run.state.notes["evaluations"].append(self.recipe.evaluate(run.model, run.state.step))
        return self.best is not None and self.best.update(run)

    def _read(self) -> None:
        """Show and note the means since the last reading."""
        run, step = self.run, self.run.state.step
        means, speed = self.recipe.summarize(self.meter.read(step)), self.speed.read()
        shown = {name: f"{value:.3f}" for name, value in means.items()}
        shown["tokens/s"] = f"{speed['tokens_per_second']:.0f}"
        if "model_flop_utilization" in speed:
            shown["MFU"] = f"{100 * speed['model_flop_utilization']:.1f}%"
        self.bar.set_postfix(shown)
        rates = {f"learning_rate/{i}": rate for i, rate in enumerate(run.schedule.get_last_lr())}
        values = {f"train/{name}": value for name, value in means.items()}
        run.accelerator.log({**values, **rates, **{f"speed/{k}": v for k, v in speed.items()}}, step=step)
        run.state.notes.setdefault("train", []).append({"step": step, **means})

    def _save(self) -> None:
        run, self.saved_step = self.run, self.run.state.step
        best_weights = None if self.best is None else self.best.weights(run)
        keep = run.arguments.checkpoints_total_limit
        folder = save_checkpoint(run.accelerator, run.output_dir, run.state, keep, best_weights)
        if self.after_checkpoint is not None and run.state.step < run.arguments.num_steps:
            self.after_checkpoint(folder)

    def _leave(self, signals: StopSignals) -> None:
        """Save, and end the process without error."""
        run = self.run
        if self.meter.reports:
            self._read()
        if run.state.step != self.saved_step:
            self._save()
        kept = f"saved in {run.output_dir / f'step_{run.state.step}'}" if run.state.step else "nothing to save"
        reason = signals.received or "a signal to another process"
        option = " with --resume_from_checkpoint latest" if run.arguments.overwrite_output_dir else ""
        run.accelerator.print(
            f"stopped by {reason} at step {run.state.step}: {kept}. The same command{option} continues the run."
        )
        end_run(run)
        raise SystemExit(0)
