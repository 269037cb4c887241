"""The training loop: micro steps, optimizer steps, readings, evaluations and checkpoints.

Terms: a micro step is one forward and backward pass of one process; a step is one optimizer update, made of
`gradient_accumulation_steps` micro steps on every process. A run resumes bit for bit (on CPU) because nothing depends
on history: sample ids are a function of (seed, what was consumed), and the random state of a micro step is a function
of (seed, micro step, rank).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from best_model import BestModel
from checkpoints import TrainingState, fingerprint, load_checkpoint, save_checkpoint
from common import Run
from run_arguments import TrainingArguments
from samplers import seed_micro_step
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move the tensors of a batch, and what else can be moved, such as a schedule of tensors."""
    return {k: v.to(device, non_blocking=True) if hasattr(v, "to") else v for k, v in batch.items()}


@dataclass
class StepReport:
    """What one optimizer step leaves: tensors on the device, read only at logging intervals.

    Fields:
        losses: name -> mean over the micro steps of this process; "loss" is the objective.
        gradient_norm: before clipping.
    """

    losses: dict[str, Tensor]
    gradient_norm: Tensor


def optimizer_steps(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: Any,
    batches: DataLoader,
    arguments: TrainingArguments,
    state: TrainingState,
    compute_loss: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]],
) -> Iterator[StepReport]:
    """Train until `max_train_steps`, yielding after every optimizer step.

    The objective of a step is the mean over its micro steps of a loss that is itself a mean over the micro batch.

    Args:
        accelerator: of the run.
        model: prepared.
        optimizer: prepared.
        schedule: prepared.
        batches: of `make_loader`.
        arguments: of the run.
        state: of the run; `step` and `consumed` are advanced.
        compute_loss: (model, batch) -> the scalar objective and its named parts, detached.

    Yields:
        `StepReport`, after `state` has been advanced.
    """
    model.train()
    sums: dict[str, Tensor] = {}
    accumulation = arguments.gradient_accumulation_steps
    iterator = iter(batches)
    micro_step = state.step * accumulation
    while state.step < arguments.max_train_steps:
        batch = to_device(next(iterator), accelerator.device)
        seed_micro_step(arguments.seed, micro_step, accelerator.process_index)
        with accelerator.accumulate(model):
            loss, parts = compute_loss(model, batch)
            accelerator.backward(loss)
            for name, value in {"loss": loss.detach(), **parts}.items():
                sums[name] = sums[name] + value / accumulation if name in sums else value / accumulation
            norm = torch.zeros(())
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm)
            optimizer.step()
            if accelerator.sync_gradients:
                schedule.step()
            optimizer.zero_grad()
        micro_step += 1
        state.consumed += batches.batch_sampler.consumed_per_micro_step
        if accelerator.sync_gradients:
            state.step += 1
            report, sums = StepReport(sums, norm), {}
            yield report
            model.train()


class LossMeter:
    """Sums step reports on the device and reads them (one host sync, one reduction) when asked."""

    def __init__(self, accelerator: Accelerator):
        self.accelerator = accelerator
        self.names: list[str] = []
        self.total: Tensor | None = None
        self.count = 0

    def add(self, report: StepReport) -> None:
        """Add a step."""
        self.names = [*report.losses, "gradient_norm"]
        device = self.accelerator.device
        values = torch.stack([v.detach().float().to(device) for v in (*report.losses.values(), report.gradient_norm)])
        self.total = values if self.total is None else self.total + values
        self.count += 1

    def read(self, step: int) -> dict[str, float]:
        """Means over the steps since the last reading and over all processes.

        Args:
            step: last step that was added, for messages.

        Returns:
            Name -> mean; empty when nothing was added.

        Raises:
            FloatingPointError: when a loss or the gradient norm was not finite.
        """
        if self.total is None:
            return {}
        values = self.accelerator.reduce(self.total / self.count, "mean").tolist()
        first = step - self.count + 1
        self.total, self.count = None, 0
        means = dict(zip(self.names, values, strict=True))
        broken = [name for name, value in means.items() if not np.isfinite(value)]
        if broken:
            raise FloatingPointError(
                f"{', '.join(broken)} became NaN or infinite between steps {first} and {step}. Lower the learning "
                "rate, lengthen the warm-up or train in float32; then resume from the last checkpoint or start again."
            )
        return means


def progress_bar(accelerator: Accelerator, arguments: TrainingArguments, state: TrainingState) -> tqdm:
    """Progress bar over all steps of the run, starting where the run resumes."""
    return tqdm(
        total=arguments.max_train_steps,
        initial=state.step,
        unit="step",
        dynamic_ncols=True,
        mininterval=0.5,
        disable=not accelerator.is_local_main_process,
    )


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether something that happens every `interval` steps (0 = never) and not after the last step is due."""
    return interval > 0 and step % interval == 0 and step < last


Evaluate = Callable[[nn.Module, int], dict[str, Any]]


def start_or_resume(
    run: Run, checkpoint: Path | None, settings: dict[str, Any], evaluate: Evaluate, best: BestModel | None = None
) -> None:
    """Load the checkpoint, or evaluate the untrained model.

    Args:
        run: of this process; its `state` is replaced or begun.
        checkpoint: of `prepare_output_dir`.
        settings: of `course_settings`.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        best: keeps the best model.
    """
    mark = fingerprint(**settings)
    if checkpoint is not None:
        run.state = load_checkpoint(run.accelerator, checkpoint, mark)
        run.accelerator.print(f"resumed from {checkpoint} at step {run.state.step}")
        return
    run.state.fingerprint = mark
    run.state.notes["evaluations"] = [evaluate(run.model, 0)]
    if best is not None:
        best.update(run)


def train(
    run: Run,
    batches: DataLoader,
    compute_loss: Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]],
    evaluate: Evaluate,
    best: BestModel | None = None,
    summarize: Callable[[dict[str, float]], dict[str, float]] = dict,
    evaluation_due: Callable[[int], bool] | None = None,
) -> None:
    """Train to the last step (or until `best` says stop), with logging, evaluation and checkpoints on the way.

    Args:
        run: of this process.
        batches: of `make_loader`.
        compute_loss: see `optimizer_steps`.
        evaluate: (model, step) -> the evaluation, with the key `step`.
        best: keeps the best model and stops the run.
        summarize: means of the named parts over the steps of a reading -> what is shown and noted.
        evaluation_due: whether to evaluate after a step; default: every `evaluation_steps`. The last step always is.
    """
    accelerator, arguments, state = run.accelerator, run.arguments, run.state
    if evaluation_due is None:

        def evaluation_due(step: int) -> bool:
            return is_due(step, arguments.evaluation_steps, arguments.max_train_steps)

    meter = LossMeter(accelerator)
    steps = optimizer_steps(
        accelerator, run.model, run.optimizer, run.schedule, batches, arguments, state, compute_loss
    )
    with progress_bar(accelerator, arguments, state) as bar:
        for report in steps:
            meter.add(report)
            bar.update()
            save = is_due(state.step, arguments.checkpointing_steps, arguments.max_train_steps)
            if save or state.step % arguments.logging_steps == 0 or state.step == arguments.max_train_steps:
                means = summarize(meter.read(state.step))
                bar.set_postfix({name: f"{value:.3f}" for name, value in means.items()})
                rates = {f"learning_rate/{i}": rate for i, rate in enumerate(run.schedule.get_last_lr())}
                accelerator.log({**{f"train/{k}": v for k, v in means.items()}, **rates}, step=state.step)
                state.notes.setdefault("train", []).append({"step": state.step, **means})
            stop = False
            if state.step < arguments.max_train_steps and evaluation_due(state.step):
                state.notes["evaluations"].append(evaluate(run.model, state.step))
                stop = best is not None and best.update(run)
            if save and not stop:  # resumed from here, the run would go on
                save_checkpoint(accelerator, run.output_dir, state, arguments.checkpoints_total_limit)
                if best is not None:
                    best.prune(run)
            if stop:
                accelerator.print(f"stopped at step {state.step}: no better evaluation for a while")
                break
    if state.notes["evaluations"][-1]["step"] != state.step:
        state.notes["evaluations"].append(evaluate(run.model, state.step))
        if best is not None:
            best.update(run)
