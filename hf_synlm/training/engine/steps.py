# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps: signals, agreement of the processes, micro steps, gradient accumulation and clipping.

A micro step is one forward and backward pass of one process; a step is one optimizer update, made of
`gradient_accumulation_steps` micro steps on every process. A run resumes bit for bit (on CPU) because nothing depends
on history: sample ids are a function of the seed and the number of consumed samples, and the random state of a micro
step is a function of seed, micro step and rank.
"""

import itertools
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.distributed
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.samplers import seed_micro_step

Plan = tuple[bool, float, int, int, list[dict[str, float]] | None]
CountWords = Callable[[Mapping[str, Any]], int]
ComputeLoss = Callable[[nn.Module, dict[str, Any]], tuple[Tensor, dict[str, Tensor]]]


def is_due(step: int, interval: int, last: int) -> bool:
    """Whether something is due after `step` that happens every `interval` steps (0 = never), but not after the last."""
    return interval > 0 and step % interval == 0 and step < last


def to_shares(counts: Mapping[str, int], totals: Mapping[str, int]) -> dict[str, float]:
    """`loss_shares` of a piece of a batch: for each part of the loss, items of the piece / items of the whole batch.

    A share is 0 if the batch has no such item. `counts` come from `count_loss_items`.
    """
    return {name: count / totals[name] if totals[name] else 0.0 for name, count in counts.items()}


# ---------------------------------------------------------------------------------------------- signals
class StopSignals(ExitStack):
    """Notes the first SIGTERM or SIGINT inside a `with` block, so that the run can save before it ends.

    Schedulers send SIGTERM at the end of a job's time; Ctrl-C sends SIGINT. The training loop reads `received` between
    steps: the name of the signal, or `None`. A second signal acts as it does outside the block.
    """

    received: str | None = None

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # signal.signal works there only
            for number in (signal.SIGTERM, signal.SIGINT):
                self.callback(signal.signal, number, signal.signal(number, self._note))
        return self

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self.close()  # the handlers from before act again


# ---------------------------------------------------------------------------------------------- batches
def to_device(batch: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Move everything in a batch that has `to`: tensors, and plans made of tensors."""
    return {k: v.to(device, non_blocking=True) if hasattr(v, "to") else v for k, v in batch.items()}


def model_loss(model: nn.Module, batch: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a batch (scalar) and its named parts, detached; there may be no parts."""
    output = model(**batch)
    return output.loss, dict(getattr(output, "losses", None) or {})


def map_rows(
    accelerator: Accelerator,
    lengths: Sequence[int],
    batch_size: int,
    work: Callable[[list[int]], Sequence[Any]],
    description: str,
) -> list[Any]:
    """Apply `work` (row numbers -> one result each) to all rows, in batches of similar length; every process calls.

    The processes share the batches, which do not depend on the number of processes. Every process gets all results, in
    the order of the rows.
    """
    order = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    batches = [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    results: list[tuple[int, Any]] = []
    with tqdm(total=len(order), desc=description, disable=not accelerator.is_main_process, dynamic_ncols=True) as bar:
        for rows in batches[accelerator.process_index :: accelerator.num_processes]:
            results += zip(rows, work(rows), strict=True)
            bar.update(min(len(rows) * accelerator.num_processes, len(order) - bar.n))
    by_row = dict(gather_object(results))
    return [by_row[row] for row in range(len(lengths))]


# ---------------------------------------------------------------------------------------------- steps
class StepPlanner:
    """Counts the items of the losses of a step before its first micro step.

    Each part of the loss of a model with `count_loss_items` is a mean over a number of items (tokens, sentences,
    actions, pairs). Their sums over the micro steps and processes of a step give each micro step its shares, so that
    the losses of the micro steps add up to the loss of the whole batch. The losses of other models are averaged.

    Cost: one all-reduce of a few integers on the hosts (gloo) per step, none in a single process; no device is
    synchronized. The same all-reduce tells all processes about a signal, and the time of the main process.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, count_words: CountWords | None = None):
        self.accelerator, self.count_words = accelerator, count_words
        plain = accelerator.unwrap_model(model, keep_torch_compile=False)
        self.count_items = getattr(plain, "count_loss_items", None)
        self.group = torch.distributed.new_group(backend="gloo") if accelerator.num_processes > 1 else None
        self.begin = time.monotonic()

    def plan(self, batches: list[dict[str, Any]], stop: bool) -> Plan:
        """Agree on a step, given the batches of this process on the host; every process calls.

        `stop` says whether this process received a signal. Returns whether any process did, so that the step does not
        take place; the seconds since the planner was made; the tokens and words of all processes; and for each micro
        step the `loss_shares` of the model, or `None` for a model that does not count.
        """
        counts = [] if self.count_items is None else [self.count_items(**batch) for batch in batches]
        names = list(counts[0]) if counts else []
        tokens = sum(int(x.get("attention_mask", torch.ones_like(x["input_ids"])).sum()) for x in batches)
        milliseconds = round(1e3 * (time.monotonic() - self.begin)) if self.accelerator.is_main_process else 0
        words = 0 if self.count_words is None else sum(map(self.count_words, batches))
        own = [int(stop), milliseconds, tokens, words, *(sum(count[name] for count in counts) for name in names)]
        if self.group is not None:
            sums = torch.tensor(own)
            torch.distributed.all_reduce(sums, group=self.group)
            own = sums.tolist()
        totals = dict(zip(names, own[4:], strict=True))
        shares = [to_shares(count, totals) for count in counts] if counts else None
        return bool(own[0]), own[1] / 1e3, own[2], own[3], shares


@dataclass
class StepReport:
    """Measurements of one optimizer step; tensors stay on the device until they are read.

    Fields:
        losses: this process's share of each named mean over the batch of the step; "loss" is the objective.
        gradient_norm: before clipping.
        tokens, words: of all processes; words are 0 if they are not counted.
        seconds: of training before this step, by the clock of the main process.
        waited: seconds that this process waited for its batches.
    """

    losses: dict[str, Tensor]
    gradient_norm: Tensor
    tokens: int
    words: int
    seconds: float
    waited: float


def optimizer_steps(
    run: Run,
    batches: DataLoader,
    compute_loss: ComputeLoss,
    signals: StopSignals,
    count_words: CountWords | None = None,
) -> Iterator[StepReport]:
    """Train until `max_train_steps` or until a process receives a signal; yields after every optimizer step.

    `compute_loss` is (model, batch) -> the scalar objective and its named parts, detached. The batch is that of the
    loader with `loss_shares`, if the model counts its items; the objective is a mean otherwise. `step`, `consumed`,
    `tokens` and `words` of `run.state` are advanced before the yield.
    """
    accelerator, arguments, state, model = run.accelerator, run.arguments, run.state, run.model
    planner = StepPlanner(accelerator, model, count_words)
    accumulation = arguments.gradient_accumulation_steps
    pieces = accumulation * accelerator.num_processes
    sampler: Any = batches.batch_sampler
    consumed, iterator = sampler.consumed_per_micro_step, iter(batches)
    model.train()
    while state.step < arguments.num_steps:
        begin = time.perf_counter()
        host_batches = list(itertools.islice(iterator, accumulation))
        waited = time.perf_counter() - begin
        stop, seconds, tokens, words, shares = planner.plan(host_batches, signals.received is not None)
        if stop:
            return
        report = StepReport({}, torch.zeros(()), tokens, words, seconds, waited)
        for number, host_batch in enumerate(host_batches):
            batch = to_device(host_batch, accelerator.device)
            if shares is not None:
                batch["loss_shares"] = shares[number]
            seed_micro_step(arguments.seed, state.step * accumulation + number, accelerator.process_index)
            with accelerator.accumulate(model):
                loss, parts = compute_loss(model, batch)
                share = 1.0 if shares is not None else 1.0 / pieces
                # Gradients are averaged over micro steps (by accelerate) and processes (by DDP or FSDP).
                accelerator.backward(loss * (share * pieces))
                for name, value in {"loss": loss.detach(), **parts}.items():
                    old = report.losses.get(name)
                    report.losses[name] = value * share if old is None else old + value * share
                if accelerator.sync_gradients:
                    norm = accelerator.clip_grad_norm_(model.parameters(), arguments.max_grad_norm or math.inf)
                    report.gradient_norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                    if accelerator.scaler is not None:  # float16: the scaler skips steps that overflow
                        report.gradient_norm = torch.nan_to_num(report.gradient_norm, 0.0, 0.0)
                run.optimizer.step()
                if accelerator.sync_gradients:
                    run.schedule.step()
                run.optimizer.zero_grad()
        state.step += 1
        state.consumed += accumulation * consumed
        state.tokens += tokens
        state.words += words
        yield report
        model.train()
