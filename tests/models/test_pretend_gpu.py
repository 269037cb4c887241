"""The tests of `test_gpu.py` on the pretend GPU, in a process of their own: the device is there for good."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the real GPU")
def test_on_the_pretend_gpu():
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--pretend-gpu",
        "tests/models/test_gpu.py",
    ]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


CHECKS = """
import pytest, torch
from tests.helpers.pretend_gpu import PretendGPU
gpu = PretendGPU()
with gpu:
    x = gpu.move(torch.arange(6.0).requires_grad_())
    assert x.device.type == "pretend" and torch.equal((2 * x).cpu(), 2 * torch.arange(6.0))
    for mistake, message in (
        (lambda: x + torch.ones(6), "mixes devices"),
        (lambda: x.double(), "float64"),
    ):
        with pytest.raises(RuntimeError, match=message):
            mistake()
    for waits in (lambda: x.sum().item(), lambda: x[x > 2], lambda: x.tolist(), lambda: x.cpu(), lambda: x.nonzero()):
        with pytest.raises(AssertionError, match="waits"), gpu.nothing_waits():
            waits()
    with gpu.nothing_waits():
        y = (x[:3] + 1).exp() @ torch.ones(3, device="pretend")
    assert gpu.kernels["exp"] == 1 and sum(gpu.kernels.values()) == 4, gpu.kernels  # add, exp, ones and dot
    lstm = gpu.move(torch.nn.LSTM(3, 4))
    with torch.autocast("pretend", dtype=torch.bfloat16):
        assert lstm(x.view(2, 1, 3))[0].dtype == torch.float16
        assert (x.view(2, 3) @ x.view(3, 2)).dtype == torch.bfloat16
"""


def test_the_pretend_gpu_finds_mistakes():
    run = subprocess.run([sys.executable, "-c", CHECKS], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
