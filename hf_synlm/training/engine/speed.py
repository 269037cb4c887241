# SPDX-License-Identifier: Apache-2.0
"""Speed of a run: tokens and floating point operations per second, memory, waiting for data; traces of steps."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from accelerate import Accelerator

from hf_synlm.training.arguments.base import STEPS_BEFORE_PROFILE
from hf_synlm.training.engine.run import Run
from hf_synlm.training.engine.steps import StepReport

# Dense peak in bfloat16 by the data sheets, in TFLOP/s, of the GPU whose name has these words; the first that fits.
PEAK_TFLOPS = {
    "B200": 2250, "GH200": 989, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312,
    "L40S": 362, "L40": 181, "L4": 121, "A10G": 70, "A10": 125,
}  # fmt: skip
BAR = {
    "tokens_per_second": ("tokens/s", ".0f"),
    "tokens_per_second_per_device": ("per device", ".0f"),
    "tflops_per_device": ("TFLOP/s", ".3g"),
    "model_flop_utilization": ("MFU", ".1%"),
    "memory_gib": ("GiB", ".1f"),
    "data_wait": ("data wait", ".0%"),
}


def peak_tflops(name: str) -> int | None:
    """Dense peak of a GPU in bfloat16, in TFLOP/s, by the name that CUDA reports; `None` if it is not in the table."""
    words = set(re.split(r"[\s-]+", name))
    return next((peak for gpu, peak in PEAK_TFLOPS.items() if words.issuperset(gpu.split())), None)


class SpeedMeter:
    """Speed of all processes together and of a device, without evaluations and checkpoints.

    `flops_per_token` are those of training; `None`: unknown.
    """

    def __init__(self, accelerator: Accelerator, flops_per_token: float | None):
        self.num_devices, self.flops_per_token = accelerator.num_processes, flops_per_token
        self.on_gpu = accelerator.device.type == "cuda"
        self.peak = peak_tflops(torch.cuda.get_device_name(accelerator.device)) if self.on_gpu else None
        self.tokens = self.all_tokens = 0
        self.waited = self.all_seconds = 0.0
        self._begin = time.perf_counter()

    def add(self, report: StepReport) -> None:
        """Count a step."""
        self.tokens += report.tokens
        self.waited += report.waited

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._begin += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """Speed since the last reading, and most memory so far; call it right after a synchronization of the device.

        `model_flop_utilization` is the share of the peak in bfloat16, `data_wait` the share of the time in which this
        process waited for batches.
        """
        now = time.perf_counter()
        seconds = now - self._begin
        by_device = self.tokens / seconds / self.num_devices
        speed = {
            "tokens_per_second": self.tokens / seconds,
            "tokens_per_second_per_device": by_device,
            "data_wait": self.waited / seconds,
        }
        if self.flops_per_token is not None:
            speed["tflops_per_device"] = by_device * self.flops_per_token / 1e12
            if self.peak is not None:
                speed["model_flop_utilization"] = speed["tflops_per_device"] / self.peak
        if self.on_gpu:
            speed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self.all_seconds += seconds
        self.all_tokens += self.tokens
        self._begin, self.tokens, self.waited = now, 0, 0.0
        return speed

    def overall(self) -> dict[str, float]:
        """`tokens_per_second` over all readings; empty before the first."""
        return {"tokens_per_second": self.all_tokens / self.all_seconds} if self.all_tokens else {}


def for_bar(speed: dict[str, float]) -> dict[str, str]:
    """The speed as the progress bar shows it; that of a device only if there are several."""
    if speed["tokens_per_second"] == speed["tokens_per_second_per_device"]:
        speed = {name: value for name, value in speed.items() if name != "tokens_per_second_per_device"}
    return {label: format(speed[name], form) for name, (label, form) in BAR.items() if name in speed}


# ---------------------------------------------------------------------------------------------- profiles
def make_profiler(run: Run) -> torch.profiler.profile:
    """Profiler of `arguments.profile` steps of this process; its `step` is called after every step."""
    schedule = torch.profiler.schedule(wait=STEPS_BEFORE_PROFILE - 1, warmup=1, active=run.arguments.profile, repeat=1)
    return torch.profiler.profile(schedule=schedule, on_trace_ready=partial(_write_profile, run))


def _write_profile(run: Run, profile: torch.profiler.profile) -> None:
    """Write the trace and a table of the operations that take longest."""
    device, rank = run.accelerator.device.type, run.accelerator.process_index
    folder = run.output_dir / "profile"
    folder.mkdir(exist_ok=True)
    profile.export_chrome_trace(str(folder / f"rank_{rank}.json.gz"))
    table = profile.key_averages().table(sort_by=f"self_{device}_time_total", row_limit=50)
    (folder / f"rank_{rank}.txt").write_text(table, encoding="utf-8")
    run.accelerator.print(f"profile of {run.arguments.profile} steps: {folder}")
