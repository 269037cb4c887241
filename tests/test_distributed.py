"""Two processes on CPU (gloo): DDP and FSDP2 give the gradients of one process."""

import os
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.test_modeling_gpst import NO_DROPOUT, ids_of, tiny


def batch(rank=None):
    ids, mask = ids_of(9, 4, 6, 1)
    labels = ids.masked_fill(mask == 0, -100)
    rows = slice(None) if rank is None else slice(2 * rank, 2 * rank + 2)
    return {"input_ids": ids[rows], "attention_mask": mask[rows], "labels": labels[rows]}


def worker(rank: int, kind: str, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert dist.get_world_size() == 2
    model = tiny(**NO_DROPOUT).train()
    if kind == "ddp":
        run = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    run(**batch(rank)).loss.backward()
    full = {n: p.grad.full_tensor() if kind == "fsdp" else p.grad for n, p in model.named_parameters()}
    if rank == 0:
        torch.save(full, Path(folder) / "gradients.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_processes_equal_one(kind, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(worker, args=(kind, port, str(tmp_path)), nprocs=2)
    theirs = torch.load(tmp_path / "gradients.pt", weights_only=True)
    model = tiny(**NO_DROPOUT).train()
    (0.5 * (model(**batch(0)).loss + model(**batch(1)).loss)).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(theirs[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
