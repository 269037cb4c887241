"""The tests of `test_gpu.py` on the pretend GPU, in a process of their own: the device is there for good."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests run on the real GPU")
def test_on_the_pretend_gpu():
    command = "-m pytest -q -p no:cacheprovider --pretend-gpu tests/models/test_gpu.py".split()
    run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
