# SPDX-License-Identifier: Apache-2.0
"""What the two sides of a comparison are, what they share, the device that runs them, and the clock that times them."""

import collections
import os
import platform
import statistics
import subprocess
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

import hf_synlm

Step = Callable[[], Any]


class Sides(NamedTuple):
    """One step of the measured side and of its baseline, and what raises AssertionError if the former is wrong."""

    ours: Step
    theirs: Step
    check: Step
    model: nn.Module | None = None


class _Device:
    """The device that all cases of a process use."""

    name = "cpu"
    precision = "float32"


def use_device(name: str, precision: str) -> AbstractContextManager[Any]:
    """Build all cases from now on on this device; returns the context in which they run in this precision."""
    _Device.name, _Device.precision = name, precision
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision != "float32"
    return torch.autocast(torch.device(name).type, torch.bfloat16) if precision == "bf16" else nullcontext()


def place(thing: Any) -> Any:
    """Move a tensor, a module in place, or the tensors of a dictionary to the device in use."""
    if isinstance(thing, dict):
        return {name: place(value) for name, value in thing.items()}
    return thing.to(_Device.name)


def synchronize() -> None:
    """Wait until the device in use has done everything."""
    if _Device.name.startswith("cuda"):
        torch.cuda.synchronize()


def seconds(step: Step) -> float:
    """Wall-clock seconds of one call, until the device is done."""
    synchronize()
    begin = time.perf_counter()
    step()
    synchronize()
    return time.perf_counter() - begin


def measure(step: Step, runs: int) -> dict[str, Any]:
    """What a step costs, after two steps of warming up: median milliseconds of some runs.

    On a GPU also the peak of its memory in MiB, its kernels and the milliseconds that they run, and where the host
    waits for the device, by source line.
    """
    seconds(step), seconds(step)
    figures: dict[str, Any] = {"ms": round(1e3 * statistics.median(seconds(step) for _ in range(runs)), 3)}
    if not _Device.name.startswith("cuda"):
        return figures
    torch.cuda.reset_peak_memory_stats()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        seconds(step)
    kernels = [event for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    waits = collections.Counter(
        f"{os.path.basename(warning.filename)}:{warning.lineno}" for warning in seen if "synchroniz" in str(warning)
    )
    return figures | {
        "peak_mib": torch.cuda.max_memory_allocated() >> 20,
        "kernels": len(kernels),
        "busy_ms": round(sum(event.device_time for event in kernels) / 1e3, 3),
        "waits": dict(waits.most_common()),
    }


def origin() -> dict[str, Any]:
    """Where a result comes from: machine, versions, and commit of the code."""
    folder = Path(hf_synlm.__file__).parent
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
    commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    facts: dict[str, Any] = {
        "machine": platform.processor() or platform.machine(),
        "device": _Device.name,
        "precision": _Device.precision,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_synlm": hf_synlm.__version__,
        "commit": commit or "unknown",
    }
    if _Device.name.startswith("cuda"):
        facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        facts["cudnn"] = torch.backends.cudnn.version()
    return facts


def training_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Forward and backward pass of a loss of `model`; the step returns the loss."""

    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return step


def compare_training(
    model: nn.Module,
    loss_of: Callable[[], Tensor],
    baseline: nn.Module,
    baseline_loss_of: Callable[[], Tensor],
    check: Callable[[], None],
) -> Sides:
    """Training step of a model against that of a baseline; after `check`, all gradients of the model are checked."""
    ours = training_step(model, loss_of)

    def check_all() -> None:
        check()
        ours()
        check_gradients(model)

    return Sides(ours, training_step(baseline, baseline_loss_of), check_all, model)


def check_gradients(model: nn.Module) -> None:
    """Raise AssertionError unless every parameter has a finite gradient; 0 is one, for gates that are shut."""
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not torch.isfinite(parameter.grad).all()
    ]
    if wrong:
        raise AssertionError(f"parameters without a finite gradient: {wrong}")
