"""Two processes on CPU (gloo): DDP and FSDP2 give the gradients of one process."""

import itertools
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
from training_runs import start_server

from hf_synlm import (
    ONLSTMConfig,
    ONLSTMForCausalLM,
    PaLMConfig,
    PaLMForCausalLM,
    PRPNConfig,
    PRPNForCausalLM,
)
from tests import test_modeling_rnng as rnng
from tests.test_modeling_gpst import NO_DROPOUT, ids_of, tiny

SIZES = {"vocab_size": 40, "embedding_size": 8, "hidden_size": 12}
NO_AWD_DROPOUT = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
NO_PRPN_DROPOUT = {"dropout": 0.0, "input_dropout": 0.0, "recurrent_dropout": 0.0}
RECURRENT = {
    "on_lstm": (ONLSTMForCausalLM, ONLSTMConfig(**SIZES, **NO_AWD_DROPOUT, chunk_size=2, supervised_layers=[1])),
    "prpn": (PRPNForCausalLM, PRPNConfig(**SIZES, **NO_PRPN_DROPOUT, num_slots=4, parsing_network="recurrent")),
    "palm": (PaLMForCausalLM, PaLMConfig(**SIZES, **NO_AWD_DROPOUT, num_spans=4, rrnn_size=6, attention_size=5)),
}
KINDS = ("ddp", "fsdp")
ARCHITECTURES = ("gpst", "rnng", *RECURRENT)


def make(architecture):
    if architecture in RECURRENT:
        torch.manual_seed(0)
        model_class, config = RECURRENT[architecture]
        return model_class(config).train()
    if architecture == "gpst":
        return tiny(**NO_DROPOUT).train()
    return rnng.tiny(composition="attention", dropout=0.0).train()


def batch(architecture, rank):
    if architecture == "rnng":  # the second half holds flat trees only
        values = rnng.batch(lengths=[6, 9, 1, 1])
        return {name: value[2 * rank : 2 * rank + 2] for name, value in values.items()}
    ids, mask = ids_of(9, 4, 6, 1)
    labels = ids.masked_fill(mask == 0, -100)
    rows = slice(2 * rank, 2 * rank + 2)
    return {"input_ids": ids[rows], "attention_mask": mask[rows], "labels": labels[rows]}


def gradients(kind: str, architecture: str, rank: int) -> dict[str, torch.Tensor]:
    model = make(architecture)
    if kind == "ddp":
        run = DistributedDataParallel(model)
    else:
        mesh = init_device_mesh("cpu", (2,))
        for module in list(model.modules()):
            if type(module).__name__ in model._no_split_modules:
                fully_shard(module, mesh=mesh)
        run = fully_shard(model, mesh=mesh)
    run(**batch(architecture, rank)).loss.backward()
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = tmp_path_factory.mktemp("gradients")
    start_server()
    mp.start_processes(worker, args=(port, str(folder)), nprocs=2, start_method="forkserver")
    return folder


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_equal_one(kind, architecture, folder):
    theirs = torch.load(folder / f"{kind}-{architecture}.pt", weights_only=True)
    model = make(architecture)
    (0.5 * sum(model(**batch(architecture, rank)).loss for rank in (0, 1))).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(theirs[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)
