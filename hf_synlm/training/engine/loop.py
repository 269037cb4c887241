# SPDX-License-Identifier: Apache-2.0
"""The training loop: start or resume, steps, readings, evaluations, checkpoints, and how it ends early.

Resuming: `start_or_resume` restores a checkpoint of `checkpoints.py` and replaces `run.state`; `TrainingLoop` then asks
the recipe for a loader that starts behind `state.consumed` and counts on from `state.step`. `_save` writes checkpoints:
every `checkpointing_steps`, at the numbers of words of `keep_at_words`, after the last step, and after SIGTERM or
SIGINT (`_leave`).
"""

import itertools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_synlm.training.engine.checkpoints import (
    BestModel,
    load_checkpoint,
    plain_settings,
    remove_later,
    save_checkpoint,
)
from hf_synlm.training.engine.output_folder import forget_results
from hf_synlm.training.engine.recipe import Recipe
from hf_synlm.training.engine.run import Run, end_run
from hf_synlm.training.engine.speed import SpeedMeter, for_bar, make_profiler
from hf_synlm.training.engine.steps import StepReport, StopSignals, is_due, optimizer_steps
from hf_synlm.training.engine.word_counts import WordCounter

TIMED_STEPS = 20
Evaluate = Callable[[nn.Module, int], dict[str, Any]]


# ---------------------------------------------------------------------------------------------- readings
class LossMeter:
    """Collects step reports on the device; reading them takes one host sync and one reduction."""

    def __init__(self, run: Run, batches: DataLoader):
        self.run, self.accelerator, self.batches = run, run.accelerator, batches
        self.begin_step = run.state.step
        self.reports: list[StepReport] = []

    def read(self, step: int) -> dict[str, float]:
        """Means of losses and gradient norm over the reports since the last reading, at least one; every process calls.

        Raises FloatingPointError if one of them is not finite; it names the first such step and its samples.
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
            self._raise_broken(broken, step, losses.isfinite().all(1) & norms.isfinite())
        self.reports = []
        return means

    def _raise_broken(self, names: list[str], step: int, finite: Tensor) -> None:
        """Raise; `finite` says which steps since the last reading are finite on this process."""
        first_step, accumulation = step - len(finite) + 1, self.run.arguments.gradient_accumulation_steps
        bad = gather_object([first_step + number for number, value in enumerate(finite.tolist()) if not value])
        bad_step = min(bad, default=first_step)
        # The sampler yields the samples of the micro steps of this process again.
        sampler: Any = self.batches.batch_sampler
        begin = (bad_step - 1 - self.begin_step) * accumulation
        samples = [item for batch in itertools.islice(sampler, begin, begin + accumulation) for item in batch]
        raise FloatingPointError(
            f"{', '.join(names)} became NaN or infinite between steps {first_step} and {step}, first at step "
            f"{bad_step}, which reads the samples {gather_object(samples)}. Check these, lower the learning rate, "
            "lengthen the warm-up or train in float32; then resume from the last checkpoint or start from step 0."
        )


# ---------------------------------------------------------------------------------------------- the run
def start_or_resume(
    run: Run, checkpoint: Path | None, settings: dict[str, Any], evaluate: Evaluate, best: BestModel | None = None
) -> None:
    """Restore the checkpoint of `output_folder`, or evaluate the untrained model; sets `run.state`."""
    if checkpoint is not None:
        run.state = load_checkpoint(run.accelerator, checkpoint, settings)
        if run.accelerator.is_main_process:
            remove_later(run.output_dir, run.state.step)
            forget_results(run.output_dir)
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
    """Steps with readings, evaluations and checkpoints on the way.

    SIGTERM and SIGINT to any process end the run after the current step: with a checkpoint and exit status 0.
    """

    def __init__(self, run: Run, recipe: Recipe, best: BestModel | None = None):
        self.run, self.recipe, self.best = run, recipe, best
        self.batches = recipe.loader(run)
        flops_per_token = recipe.flops_per_token(run.accelerator.unwrap_model(run.model))
        self.speed = SpeedMeter(run.accelerator, flops_per_token)
        self.meter, self.saved_step = LossMeter(run, self.batches), run.state.step
        # All steps of the run with the time that is left; less often where it goes to a file.
        self.bar = tqdm(
            total=run.arguments.num_steps,
            initial=run.state.step,
            unit="step",
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 60,
            disable=not run.accelerator.is_local_main_process,
        )

    def train(self) -> dict[str, float]:
        """Train to the last step, or until `best` says stop; returns the speed of the steps of this process."""
        run, arguments = self.run, self.run.arguments
        profiling = make_profiler(run) if arguments.profile else nullcontext()
        with StopSignals() as signals, self.bar, profiling as profiler:
            stopped_early = False
            self._apply_limits(0.0)
            count = WordCounter(self.recipe.tokenizer) if arguments.word_marks else None
            for report in optimizer_steps(run, self.batches, self.recipe.compute_loss, signals, count):
                self.meter.reports.append(report)
                self.speed.add(report)
                self.bar.update()
                self._apply_limits(report.seconds)
                self._tell_time(report.seconds)
                if profiler is not None:
                    with self.speed.paused():
                        profiler.step()
                if self._after_step(self._keep(report.words)):
                    stopped_early = True
                    run.accelerator.print(f"stopped at step {run.state.step}: no better evaluation for a while")
                    break
            if not stopped_early and run.state.step < arguments.num_steps:
                self._leave(signals)
        if run.state.notes["evaluations"][-1]["step"] != run.state.step:
            self._evaluate()
        return self.speed.overall()

    def _apply_limits(self, seconds: float) -> None:
        """Make this step the last one if `max_tokens` or, after so many `seconds`, `max_time` is reached."""
        arguments, state = self.run.arguments, self.run.state
        reached = {"max_tokens": state.tokens, "max_time": seconds / 60}
        for name, value in reached.items():
            limit = getattr(arguments, name)
            if limit is not None and value >= limit and state.step < arguments.num_steps:
                self.run.accelerator.print(f"step {state.step} is the last one: {name} {limit} is reached")
                arguments.max_train_steps = self.bar.total = state.step

    def _tell_time(self, seconds: float) -> None:
        """Say how long the run will take, once, when `seconds` have passed since its first step."""
        step, left = self.run.state.step, self.run.arguments.num_steps - self.run.state.step
        done = step - self.meter.begin_step
        if done == TIMED_STEPS and left:
            minutes = seconds / done * left / 60
            self.run.accelerator.print(f"step {step}: the other {left:,} steps take about {minutes:,.1f} minutes")

    def _keep(self, words: int) -> bool:
        """Whether one of `keep_at_words` was reached in this step, which has read so many words."""
        run, state = self.run, self.run.state
        reached = [mark for mark in run.arguments.word_marks if state.words - words < mark <= state.words]
        if reached:
            state.notes.setdefault("kept", []).append(state.step)
            run.accelerator.print(f"step {state.step}: {state.words:,} words have been read (keep_at_words)")
        return bool(reached)

    def _after_step(self, save: bool = False) -> bool:
        """Read, evaluate and save if they are due; whether to stop early."""
        arguments, step, last = self.run.arguments, self.run.state.step, self.run.arguments.num_steps
        # The last step is saved, too: the final measurements and the export may fail.
        save |= is_due(step, arguments.checkpointing_steps, last) or (
            step == last and arguments.checkpointing_steps > 0
        )
        evaluate = step < last and self.recipe.evaluation_due(step)
        # First: if the losses are not finite, the reading names the samples before anything else uses the model.
        if save or evaluate or step % arguments.logging_steps == 0 or step == last:
            self._read()
        stop = False
        with self.speed.paused():
            if evaluate:
                stop = self._evaluate()
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
        self.bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()} | for_bar(speed))
        rates: dict[str, float] = {}
        for name, rate in zip(run.rate_names, run.schedule.get_last_lr(), strict=True):
            rates.setdefault("/".join(filter(None, ["learning_rate", name])), rate)
        values = {f"train/{name}": value for name, value in means.items()}
        values |= {f"speed/{name}": value for name, value in speed.items()}
        run.accelerator.log({**values, **rates}, step=step)
        run.state.notes.setdefault("train", []).append({"step": step, **means})

    def _save(self) -> None:
        run, self.saved_step = self.run, self.run.state.step
        best_weights = None if self.best is None else self.best.weights(run)
        keep, tokenizer = run.arguments.checkpoints_total_limit, self.recipe.tokenizer
        save_checkpoint(run.accelerator, run.output_dir, run.state, tokenizer, keep, best_weights)

    def _leave(self, signals: StopSignals) -> None:
        """Save, and end the process without error."""
        run = self.run
        if self.meter.reports:
            self._read()
        if run.state.step != self.saved_step:
            self._save()
        kept = f"saved in {run.output_dir / f'step_{run.state.step}'}" if run.state.step else "nothing to save"
        reason = signals.received or "a signal to another process"
        option = " with --resume-from-checkpoint latest" if run.arguments.overwrite_output_dir else ""
        run.accelerator.print(
            f"stopped by {reason} at step {run.state.step}: {kept}. The same command{option} continues the run."
        )
        end_run(run)
        raise SystemExit(0)
