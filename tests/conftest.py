"""Shared test set-up: seeds, one thread, no network, uninitialized memory that shows, the `gpu` marker."""

import gc
import logging
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports huggingface_hub or transformers: both read these once, at import.
os.environ.update(dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"), "1"))
os.environ.update(HF_HUB_DISABLE_TELEMETRY="1", HF_HUB_DISABLE_PROGRESS_BARS="1", TOKENIZERS_PARALLELISM="false")
os.environ.setdefault("OMP_NUM_THREADS", "1")

# These libraries read the environment when they are imported, so it has to be set before.
import numpy as np
import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)

# How long an example takes depends on what else the machine does.
settings.register_profile("hf_synlm", deadline=None)
settings.load_profile("hf_synlm")

# torch remembers at its first use which functions a device as context reaches; `poisoned_empty` replaces some of them.
with torch.device("meta"):
    torch.empty(1)

if not torch.cuda.is_available():
    # Without a device, torch stores the call stack of every seed for later: this takes longer than many tests.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None

# Where log records are captured, torch.compile writes down every node of every graph.
logging.getLogger("torch.__trace").disabled = True

LOOPBACK = ("127.", "::1", "localhost", "0.0.0.0")
POISONS: dict[torch.dtype, float] = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), float("nan")),
    **{dtype: torch.iinfo(dtype).min for dtype in (torch.int32, torch.int64)},
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--pretend-gpu", action="store_true", help="run tests marked gpu on the pretend GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first, so that workers end together; skip what is marked `gpu` where there is none."""
    items.sort(key=lambda item: "training" not in item.path.parts)
    if torch.cuda.is_available() or config.getoption("pretend_gpu"):
        return
    # Only for lack of the device: on a machine with one, nothing is skipped.
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def short_collections() -> None:
    """Keep what was made before a file out of its garbage collections, each of which would take half a second.

    Programs, accelerate and datasets collect garbage at the end of a run.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def gpu_of_session(request: pytest.FixtureRequest) -> Any:
    """The GPU of this process: a real one, or the pretend one."""
    from tests.helpers.pretend_gpu import CUDA, PretendGPU

    return PretendGPU() if request.config.getoption("pretend_gpu") else CUDA()


@pytest.fixture
def gpu(gpu_of_session: Any) -> Iterator[Any]:
    """The device of tests marked `gpu`, see `tests/helpers/pretend_gpu.py`."""
    with gpu_of_session:
        yield gpu_of_session


def _is_loopback(address: Any) -> bool:
    # A Unix socket's address is a path; only (host, port, ...) addresses can leave the machine.
    return not isinstance(address, tuple) or str(address[0]).startswith(LOOPBACK)


@pytest.fixture(autouse=True, scope="session")
def no_network() -> Iterator[None]:
    """Let sockets connect to this machine only."""
    patch = pytest.MonkeyPatch()

    def guarded(connect: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: socket.socket, address: Any) -> Any:
            if not _is_loopback(address):
                raise ConnectionRefusedError(f"tests must not use the network, but something connects to {address!r}")
            return connect(self, address)

        return call

    patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def seed() -> None:
    """Start every test from the same random state, whatever ran before it."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what `torch.empty` and its relatives return with NaN, integers with the smallest one.

    So reading a value before it is written shows. Fresh memory is mostly zeros in a short test process, which hides
    exactly this mistake.
    """

    def poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = make(*args, **kwargs)
            if tensor.dtype in POISONS and tensor.device.type != "meta":
                with torch.no_grad():
                    tensor.fill_(POISONS[tensor.dtype])
            return tensor

        return call

    for owner, names in (
        (torch, ("empty", "empty_like", "empty_strided", "empty_permuted")),
        (torch.Tensor, ("new_empty", "new_empty_strided")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


@pytest.fixture(scope="session")
def saved_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one saved model each of gpst, rnng, on_lstm (exported), pcfg and gpt2; tests must not change it."""
    from hf_synlm.hub.export import export_model
    from tests.helpers.scoring_models import model_and_tokenizer

    folder = tmp_path_factory.mktemp("saved_models")
    for architecture in ("gpst", "rnng", "on_lstm"):
        export_model(*model_and_tokenizer(architecture), folder / architecture)
    for name in ("gpt2", "pcfg"):
        for part in model_and_tokenizer(name):
            part.save_pretrained(folder / name)
    return folder


@pytest.fixture
def warm_verify(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `verify_export` fork its process without hf_synlm from one that has imported torch."""
    import subprocess
    from types import SimpleNamespace

    from hf_synlm.hub import verify
    from tests.helpers import warm_python

    monkeypatch.setattr(verify, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": warm_python.run}))


@pytest.fixture
def program(tmp_path_factory: pytest.TempPathFactory, capsys: Any) -> Callable[..., dict[str, Any]]:
    """Runs a training program in this process with its flags; what it printed and its results."""
    from tests.helpers.training_runs import run_here

    return lambda name, flags: run_here(name, flags, str(tmp_path_factory.getbasetemp() / "datasets"), capsys)


@pytest.fixture
def tiny_gpst_config() -> Any:
    """A GPST of a few thousand parameters with every part present."""
    from hf_synlm import GPSTConfig
    from tests.helpers.search_models import GPST_TINY

    return GPSTConfig(**GPST_TINY)
