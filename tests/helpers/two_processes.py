"""Jobs on two processes, with the environment that torchrun gives, so that the imports are paid for once.

A job is a run of a training script, or a command of `synlm`. Both processes fork a child per job, which meets the
other's child, can be killed, and leaves its exit status in `OUTPUT_DIR.status_RANK`.
"""

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import datasets

from tests.helpers.training_runs import environment, start_server


def shard_on_cpu() -> None:
    """Make accelerate prepare models for FSDP2 on CPUs, which its launcher does for GPUs only."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    initialize = AcceleratorState.__init__

    def patched(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        initialize(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            for state in (PartialState, AcceleratorState):
                state._shared_state["distributed_type"] = DistributedType.FSDP
            AcceleratorState._shared_state["fsdp_plugin"] = fsdp_plugin

    AcceleratorState.__init__ = patched


def run_child(job: dict[str, Any]) -> None:
    """The job itself; ends the process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]), **job.get("environment", {}))
    rank = os.environ["RANK"]
    with open(f"{job['output_dir']}.log_{rank}", "wb", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    status = 1
    try:
        if "ACCELERATE_USE_FSDP" in job.get("environment", {}):
            shard_on_cpu()
        sys.argv = [job["script"], *job["argv"]]
        importlib.import_module(job["script"]).main(job["argv"])
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def watch(pid: int, job: dict[str, Any]) -> int:
    """Wait for a child; kill it or send it a signal once its checkpoint exists, if the job says so."""
    rank, deadline, done = int(os.environ["RANK"]), time.monotonic() + 120, False
    trigger = Path(job["output_dir"]) / job["after"] if "after" in job else None
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if trigger is not None and not done and trigger.exists():
            done = True
            if rank in job["ranks"]:
                os.kill(pid, getattr(signal, job["signal"]))
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            deadline += 60
        time.sleep(0.002)


def main(jobs_file: str, rank: int, environment: dict[str, str]) -> None:
    """Run the jobs one after the other."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update(environment, **{name: str(value) for name, value in ranks.items()})
    datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])  # has been read from the environment
    jobs = json.loads(Path(jobs_file).read_text(encoding="utf-8"))
    for script in sorted({job["script"] for job in jobs}):
        importlib.import_module(script)
    for job in jobs:
        pid = os.fork()
        if pid == 0:
            run_child(job)
        Path(f"{job['output_dir']}.status_{rank}").write_text(str(watch(pid, job)), encoding="utf-8")


def free_port() -> int:
    """A port for two processes to meet at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_jobs(jobs: list[dict[str, Any]], folder: Path, cache: str) -> None:
    """Run jobs, each with a port of its own, on two processes; `folder` gets the list of them."""
    file = folder / "jobs.json"
    file.write_text(json.dumps([{**job, "port": free_port()} for job in jobs]), encoding="utf-8")
    start_server()
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=main, args=(str(file), rank, environment(cache))) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(280)
        assert process.exitcode == 0


def check_status(output_dir: Path, expected: int = 0) -> None:
    """Both processes have ended a job so."""
    found = [int(Path(f"{output_dir}.status_{rank}").read_text()) for rank in (0, 1)]
    logs = [Path(f"{output_dir}.log_{rank}").read_text(encoding="utf-8", errors="replace") for rank in (0, 1)]
    assert found == [expected] * 2, "".join(log[-3000:] for log in logs)
