"""Two processes on CPU (gloo): DDP and FSDP2 give the gradients of one process."""

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.core import test_losses
from tests.helpers.training_runs import start_server
from tests.helpers.two_processes import free_port

KINDS = ("ddp", "fsdp")
ARCHITECTURES = ("gpst", "rnng", "on_lstm", "prpn", "palm")


def make(architecture):
    """A model in training without dropout, and the batch of both processes."""
    model, batch = test_losses.make("rnng-attention" if architecture == "rnng" else architecture)
    if architecture == "prpn":
        del batch["distances"]  # without them, both engines wait for gradients of the head that predicts distances
    return model, batch


def half(batch, rank):
    """Two rows; of RNNG, those of the second process are flat trees."""
    rows = ([0, 1], [2, 6])[rank]
    return {
        name: value[rows] if isinstance(value, torch.Tensor) else [value[row] for row in rows]
        for name, value in batch.items()
    }


def gradients(kind: str, architecture: str, rank: int) -> dict[str, torch.Tensor]:
    model, batch = make(architecture)
    if kind == "ddp":
        run = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    run(**half(batch, rank)).loss.backward()
    # The wrapper dies here, before the group: the last one to hold the group would wait for threads that wait for
    # Python's lock.
    return {n: p.grad.full_tensor() if kind == "fsdp" else p.grad for n, p in model.named_parameters()}


def worker(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert dist.get_world_size() == 2
    for kind, architecture in itertools.product(KINDS, ARCHITECTURES):
        found = gradients(kind, architecture, rank)
        if rank == 0:
            torch.save(found, Path(folder) / f"{kind}-{architecture}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Gradients of all cases, computed by the same two processes."""
    folder = tmp_path_factory.mktemp("gradients")
    start_server()
    mp.start_processes(worker, args=(free_port(), str(folder)), nprocs=2, start_method="forkserver")
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, architecture, folder):
    theirs = torch.load(folder / f"{kind}-{architecture}.pt", weights_only=True)
    model, batch = make(architecture)
    (0.5 * sum(model(**half(batch, rank)).loss for rank in (0, 1))).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(theirs[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
