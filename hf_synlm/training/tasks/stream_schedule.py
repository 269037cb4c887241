# SPDX-License-Identifier: Apache-2.0
"""Learning rate and optimizer of recurrent language models from epoch to epoch, and averaged weights.

A run goes through phases. The phase depends only on the validation losses after the epochs, so that a resumed run is in
the same phase:

    first        SGD or Adam
    averaging    ASGD: SGD whose weights are averaged; evaluations see the averages
    finetuning   the same; the averages begin anew

In every step, the rate of the phase is scaled by the length of the segment over the usual length.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from hf_synlm.core.cache import CACHE
from hf_synlm.recurrent.cache import RecurrentCache
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.arguments.text import ScheduleArguments
from hf_synlm.training.engine.checkpoints import BestModel
from hf_synlm.training.engine.run import Run


# ---------------------------------------------------------------------------------------------- phases
class Phase(NamedTuple):
    """What an epoch is trained with: name ("first", "averaging", "finetuning") and learning rate of a usual segment."""

    name: str
    learning_rate: float


def phase_after(losses: Sequence[float], schedule: ScheduleArguments, learning_rate: float) -> Phase:
    """Phase of the epoch that follows after epochs with these validation losses. Cost: O(epochs squared) comparisons.

    Source: `main.py` of Ordered-Neurons for "sgd-asgd" (non-monotone trigger of Merity et al. 2018; fine-tuning begins
    only if averaging has begun before), Peng et al. (2019), section 4, for "adam-asgd", `main_LM.py` of PRPN for
    "adam-plateau" (`ReduceLROnPlateau` with threshold 0).
    """
    if schedule.schedule == "adam-plateau":
        return Phase("first", learning_rate * schedule.plateau_factor ** _count_plateaus(losses, schedule))
    name = "first"
    for epoch, loss in enumerate(losses, start=1):
        if name == "averaging" and epoch == schedule.finetuning_epoch:
            name = "finetuning"
        if name == "first" and _averaging_begins(epoch, loss, losses, schedule):
            name = "averaging"
    if name != "first" and schedule.averaging_learning_rate is not None:
        learning_rate = schedule.averaging_learning_rate
    return Phase(name, learning_rate)


def _averaging_begins(epoch: int, loss: float, losses: Sequence[float], schedule: ScheduleArguments) -> bool:
    if schedule.schedule == "adam-asgd":
        return epoch == schedule.averaging_epoch
    earlier = losses[: max(0, epoch - 1 - schedule.non_monotone_interval)]
    return bool(earlier) and loss > min(earlier)


def _count_plateaus(losses: Sequence[float], schedule: ScheduleArguments) -> int:
    """How often the loss has not fallen for more than `plateau_patience` epochs."""
    best, waited, count = math.inf, 0, 0
    for loss in losses:
        best, waited = (loss, 0) if loss < best else (best, waited + 1)
        if waited > schedule.plateau_patience:
            waited, count = 0, count + 1
    return count


def validation_loss(evaluation: dict[str, Any]) -> float:
    """The loss of `evaluation` that decides about schedule and best model: nats per predicted token."""
    return evaluation["losses"]["nats_per_token"]


# ---------------------------------------------------------------------------------------------- optimizers
class PhasedOptimizer:
    """The optimizer of the first phase (SGD or Adam) and the averaging one (ASGD); one of them is in use.

    It replaces a torch optimizer and its schedule in `optimizer_steps`. accelerate prepares both optimizers and writes
    them to checkpoints; the state of the one that is not in use is empty.
    """

    def __init__(self, first: Any, averaging: Any, phase: Phase):
        self.first, self.averaging, self.phase = first, averaging, phase
        self.scale = 1.0

    @property
    def in_use(self) -> Any:
        """The prepared optimizer of the current phase."""
        return self.first if self.phase.name == "first" else self.averaging

    def step(self) -> None:
        """Update the weights with the rate of the phase times `scale`."""
        for group in self.in_use.param_groups:
            group["lr"] = self.phase.learning_rate * self.scale
        self.in_use.step()

    def zero_grad(self) -> None:
        """Reset the gradients."""
        self.in_use.zero_grad()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of the optimizer of the phase."""
        return list(self.in_use.param_groups)

    def get_last_lr(self) -> list[float]:
        """Rate of the phase."""
        return [self.phase.learning_rate]

    def enter(self, phase: Phase) -> bool:
        """Continue with a phase and return whether it is new; a new phase begins with an optimizer without history."""
        is_new = phase.name != self.phase.name
        if is_new:
            self.first.optimizer.state.clear()
            self.averaging.optimizer.state.clear()
        self.phase = phase
        return is_new

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights by their averages, where there are some; restore the weights afterwards."""
        averages = {}
        if self.phase.name != "first":
            states = self.averaging.optimizer.state
            averages = {parameter: state["ax"] for parameter, state in states.items()}
        weights = {parameter: parameter.detach().clone() for parameter in averages}
        with torch.no_grad():
            for parameter, average in averages.items():
                parameter.copy_(average)
            try:
                yield
            finally:
                for parameter, weight in weights.items():
                    parameter.copy_(weight)


class PhaseSchedule:
    """What `optimizer_steps` takes for the schedule of the `optimizer`; rates follow its phase."""

    def __init__(self, optimizer: Any):
        self.get_last_lr = optimizer.get_last_lr

    def step(self) -> None:
        """Change nothing: the next batch brings the scale of its rate."""


def make_phased_optimizer(
    accelerator: Accelerator, model: nn.Module, schedule: ScheduleArguments, arguments: TrainingArguments
) -> tuple[nn.Module, PhasedOptimizer, PhaseSchedule]:
    """Prepare the model and the optimizers of a schedule: model, optimizer and schedule, for `Run`.

    ASGD is torch's, with lambd = 0 and t0 = 0 as in the authors' code. Two of its properties are part of the published
    method: a step uses the rate of the step before, and the averages leave out the first step.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": arguments.learning_rate, "weight_decay": arguments.weight_decay}
    first: torch.optim.Optimizer
    if schedule.schedule == "sgd-asgd":
        first = torch.optim.SGD(parameters, **options)
    else:
        betas = (arguments.adam_beta1, arguments.adam_beta2)
        first = torch.optim.Adam(parameters, betas=betas, eps=arguments.adam_epsilon, **options)
    averaging = torch.optim.ASGD(parameters, lambd=0.0, t0=0.0, **options)
    model, first, averaging = accelerator.prepare(model, first, averaging)
    optimizer = PhasedOptimizer(first, averaging, phase=phase_after([], schedule, arguments.learning_rate))
    return model, optimizer, PhaseSchedule(optimizer)


class EpochControl(BestModel):
    """After every evaluation: keep the best weights (averages, if these were evaluated) and choose the next phase."""

    def __init__(self, optimizer: PhasedOptimizer, schedule: ScheduleArguments, arguments: TrainingArguments):
        super().__init__(validation_loss, arguments.early_stopping_patience)
        self.optimizer, self.schedule, self.learning_rate = optimizer, schedule, arguments.learning_rate

    def update(self, run: Run) -> bool:
        """Look at the newest evaluation; every process has to call. Return whether to stop."""
        stop = super().update(run)
        if run.state.step < run.arguments.num_steps and self.optimizer.enter(self.next_phase(run)):
            text = f"step {run.state.step}: {self.optimizer.phase.name} begins"
            if self.schedule.schedule == "adam-asgd" and self.optimizer.phase.name == "averaging":
                text += f", from the weights of step {self.restore(run)}"
            run.accelerator.print(text)
        return stop

    def adopt(self, run: Run, checkpoint: Path) -> None:
        """Take over the best weights and the phase of a resumed run; every process has to call."""
        super().adopt(run, checkpoint)
        self.optimizer.phase = self.next_phase(run)

    def next_phase(self, run: Run) -> Phase:
        """Phase that follows the evaluations of a run."""
        evaluations = run.state.notes["evaluations"][1:]  # without that of the untrained model
        return phase_after(list(map(validation_loss, evaluations)), self.schedule, self.learning_rate)

    def _write(self, run: Run) -> None:
        with self.optimizer.averaged_weights():
            super()._write(run)


class StreamObjective:
    """Loss of a batch that starts from the hidden-state cache of the previous one, if `carry` is set.

    The cache is part of checkpoints: `accelerate` saves and loads it by `state_dict` and `load_state_dict`. The
    optimizer takes the scale of the learning rate from the batch. Sentences have neither.
    """

    def __init__(self, accelerator: Accelerator, optimizer: PhasedOptimizer, carry: bool):
        self.accelerator, self.optimizer, self.carry = accelerator, optimizer, carry
        self.cache: RecurrentCache | None = None

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """Objective and its named parts, for `optimizer_steps`."""
        batch = dict(batch)
        self.optimizer.scale = batch.pop("rate_scale", 1.0)
        if batch.pop("begins", True):
            self.cache = None
        output = model(**batch, **{CACHE: self.cache}, use_cache=self.carry)
        if self.carry:
            self.cache = output[CACHE]
        return output.loss, output.losses

    def state_dict(self) -> dict[str, Any]:
        """Cache of the rows of all processes, rows first; every process has to call."""
        if self.cache is None or self.cache.state is None:
            return {}
        rows_first = [tensor.movedim(self.cache.batch_dim, 0).contiguous() for tensor in self.cache.state]
        gathered = [self.accelerator.gather(tensor).cpu() for tensor in rows_first]
        return {"state": gathered, "batch_dim": self.cache.batch_dim, "num_columns": self.cache.num_columns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the cache of the rows of this process."""
        self.cache = None
        if not state:
            return
        index, count = self.accelerator.process_index, self.accelerator.num_processes
        shares = [tensor.chunk(count)[index].to(self.accelerator.device) for tensor in state["state"]]
        self.cache = RecurrentCache()
        rows = tuple(share.movedim(0, state["batch_dim"]) for share in shares)
        self.cache.store(rows, state["num_columns"], state["batch_dim"])
