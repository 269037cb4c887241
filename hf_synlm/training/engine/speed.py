"""Speed of a run: tokens per second, and model FLOP utilization (MFU), the used share of the devices' peak."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Dense peak of one device in FLOP/s from the vendors' data sheets: bfloat16 (or else float16) with tensor cores, TF32,
# float32. Keys are the names that CUDA reports, without the words of _NO_MODEL.
PEAK_FLOPS: dict[str, tuple[float, float, float]] = {
    "B200": (2.25e15, 1.1e15, 75e12),
    "GH200": (989e12, 494e12, 67e12),
    "H200": (989e12, 494e12, 67e12),
    "H100": (989e12, 494e12, 67e12),
    "H100 PCIE": (756e12, 378e12, 51e12),
    "H100 NVL": (835e12, 418e12, 60e12),
    "A100": (312e12, 156e12, 19.5e12),
    "A100 PCIE": (312e12, 156e12, 19.5e12),
    "L40S": (362e12, 183e12, 91.6e12),
    "L40": (181e12, 90.5e12, 90.5e12),
    "L4": (121e12, 60e12, 30.3e12),
    "A10": (125e12, 62.5e12, 31.2e12),
    "A10G": (70e12, 35e12, 35e12),
    "RTX 4090": (165e12, 82.6e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12, 35.6e12),
    "V100": (125e12, 15.7e12, 15.7e12),
    "V100 PCIE": (112e12, 14e12, 14e12),
    "T4": (65e12, 8.1e12, 8.1e12),
}
# Brands, sizes and kinds of memory, and sockets. Any other word names another device, such as a laptop's.
_NO_MODEL = re.compile(r"NVIDIA|TESLA|GEFORCE|\d+GB|HBM\w+|SXM\d?")


def device_peak_flops(device: torch.device, mixed_precision: str, given: float | None) -> float | None:
    """Peak FLOP/s of one device in the precision of a run.

    Args:
        device: of the run.
        mixed_precision: of accelerate: "no", "bf16", "fp16" or "fp8" (counted by the peak of bfloat16).
        given: `--peak_flops`; it wins.

    Returns:
        The peak; `None` for a device that is not in the table, such as a CPU. Then no utilization is reported.
    """
    if given is not None:
        return given
    if device.type != "cuda":
        return None
    words = re.split(r"[\s-]+", torch.cuda.get_device_name(device).upper())
    peaks = PEAK_FLOPS.get(" ".join(word for word in words if not _NO_MODEL.fullmatch(word)))
    if peaks is None:
        return None
    half, tf32, single = peaks
    if mixed_precision != "no":
        return half
    return tf32 if torch.backends.cuda.matmul.allow_tf32 else single


class SpeedMeter:
    """Tokens per second of all processes together, without evaluations and checkpoints.

    Args:
        flops_per_token: of a training step (see `flops.py`); `None` if unknown.
        peak_flops: FLOP/s of all devices together; `None` if unknown.
    """

    def __init__(self, flops_per_token: float | None, peak_flops: float | None):
        self.ratio = None if flops_per_token is None or peak_flops is None else flops_per_token / peak_flops
        self.tokens = self.all_tokens = 0
        self.all_seconds = 0.0
        self._begin = time.perf_counter()

    def add(self, tokens: int) -> None:
        """Count the tokens of a step."""
        self.tokens += tokens

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._begin += time.perf_counter() - begin

    def read(self) -> dict[str, float]:
        """Speed since the last reading; call it right after a synchronization of the device."""
        now = time.perf_counter()
        seconds, tokens = now - self._begin, self.tokens
        self._begin, self.tokens = now, 0
        self.all_seconds += seconds
        self.all_tokens += tokens
        return self._speed(tokens, seconds)

    def overall(self) -> dict[str, float]:
        """Speed over all readings; empty before the first."""
        return self._speed(self.all_tokens, self.all_seconds) if self.all_tokens else {}

    def _speed(self, tokens: int, seconds: float) -> dict[str, float]:
        speed = {"tokens_per_second": tokens / seconds}
        if self.ratio is not None:
            speed["model_flop_utilization"] = self.ratio * speed["tokens_per_second"]
        return speed
