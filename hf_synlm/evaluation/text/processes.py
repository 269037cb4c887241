# SPDX-License-Identifier: Apache-2.0
"""Batches of texts on many cores or many devices, and in memory that is too small for them.

By default the calling process computes. `num_processes` starts workers on the cores of this machine, with one thread
each; they map the weights from one file, so that these are in memory once. Under `accelerate launch`, every process has
its own device and computes its share of the batches (`num_processes=None`); all of them get all results. The batches
are the same in every case, and so are their order, the numbers and the errors.
"""

import atexit
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather_object
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_synlm.core.matrix_products import keep_packed_weights
from hf_synlm.evaluation.text.cache import Result, ResultCache

logger = logging.getLogger(__name__)

# A worker takes eight seconds of CPU to start, in which a search of a small model extends about so many derivations.
_DERIVATIONS_PER_WORKER = 2000
# Servers of forks import the packages once for all workers; where there are none, every worker does.
_START = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"


class Text(Protocol):
    """What is computed together or apart: a tuple that can be hashed and written as JSON."""

    @property
    def ids(self) -> tuple[int, ...]:
        """Its tokens."""

    @property
    def num_tokens(self) -> int:
        """How many tokens are read for it."""


Compute: TypeAlias = Callable[[list[Any]], list[Result]]
_Finish: TypeAlias = Callable[[], list[Result]]


def is_launched() -> bool:
    """Whether `accelerate launch` or torchrun started several processes, of which this is one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def checked_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU if there is one; under `accelerate launch` what accelerate chooses."""
    if is_launched():
        state = PartialState(cpu=name == "cpu" or not torch.cuda.is_available())
        atexit.register(state.destroy_process_group)
        return torch.device(name or state.device)
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    # What torch raises depends on how it was built.
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        problem = str(error).splitlines()[0]
        raise ValueError(f"device {name!r} cannot be used ({problem}). Choose cpu, or leave the device out") from error
    return device


def iterate_batches(
    compute: Compute,
    batches: Iterable[Sequence[Any]],
    model: PreTrainedModel,
    *,
    num_processes: int | None = 1,
    num_beams: int = 1,
    cache: ResultCache | None = None,
    progress: str | None = None,
) -> Iterator[tuple[Any, Result]]:
    """Compute the results of texts batch by batch, and yield each text with its result, in the order of the batches.

    Batches that are no list are taken as they are needed, and nothing of them is kept. For workers, `compute` must be
    picklable. Under `accelerate launch` all results come at the end. If one result of a batch is missing in `cache`,
    the whole batch is computed, so that a run that continues another gives the same numbers to the last bit.
    """
    together = num_processes is None and is_launched()
    state = PartialState(cpu=model.device.type == "cpu") if together else None
    known = [cache.read() if cache is not None and (state is None or state.is_main_process) else {}]
    (found,) = known if state is None else broadcast_object_list(known)

    def is_known(batch: Sequence[Any]) -> bool:
        return bool(found) and all(json.dumps(text) in found for text in batch)

    is_list = state is not None or isinstance(batches, list)
    every = list(batches) if is_list else []
    left = [batch for batch in every if not is_known(batch)]
    size = sum(map(len, left)) if is_list else sys.maxsize  # as many as are worth it
    workers = num_workers(num_processes, model, size * num_beams)
    workers = min(workers, len(left)) if is_list else workers
    if state is not None:
        batches = left = left[state.process_index :: state.num_processes]
    run: Compute = partial(_in_memory, compute)
    packed: dict[Any, Any] = {}

    def here(batch: Sequence[Any]) -> _Finish:
        if is_known(batch):
            return lambda: [found[json.dumps(text)] for text in batch]
        return partial(_keeping, run, packed, list(batch))

    hidden = progress is None or (state is not None and not state.is_main_process)
    total = sum(text.num_tokens for batch in left for text in batch) if is_list else None
    unit = "sentences" if total is None else "tokens"
    bar = progress_bar(None, None if hidden else progress, unit=unit, total=total)
    with bar, nullcontext(here) if workers < 2 else _on_workers(run, workers) as there:
        todo = iter(batches)
        first = _in_order(() if is_list else islice(todo, 1), here, 0)  # workers take seconds to start
        others = _in_order(todo, lambda batch: (here if is_known(batch) else there)(batch), 4 * (workers - 1))
        for batch, values in chain(first, others):
            if not is_known(batch):
                new = {json.dumps(text): value for text, value in zip(batch, values, strict=True)}
                if cache is not None:
                    cache.add(new)
                if state is not None:
                    found |= new
                bar.update(len(batch) if total is None else sum(text.num_tokens for text in batch))
            if state is None:
                yield from zip(batch, values, strict=True)
    if state is not None:
        found = {key: value for part in gather_object([found]) for key, value in part.items()}
        yield from [(text, found[json.dumps(text)]) for batch in every for text in batch]


def _in_order(
    batches: Iterable[Sequence[Any]], start: Callable[[Sequence[Any]], _Finish], ahead: int
) -> Iterator[tuple[Sequence[Any], list[Result]]]:
    """Each batch with its results; so many are started before the results of the first are asked for."""
    started: deque[tuple[Sequence[Any], _Finish]] = deque()
    for batch in batches:
        started.append((batch, start(batch)))
        if len(started) > ahead:
            batch, finish = started.popleft()
            yield batch, finish()
    for batch, finish in started:
        yield batch, finish()


def progress_bar(parts: Iterable[Any] | None, name: str | None, *, unit: str, total: int | None = None) -> tqdm:
    """A bar of that name, None = no bar; in a file or a pipe, a line every ten seconds."""
    lines: dict[str, Any] = {}
    if not sys.stderr.isatty():
        text = "{desc}: {n_fmt}{unit}, {rate_noinv_fmt}\n"
        if total is not None or parts is not None:
            text = "{desc}: {n_fmt} of {total_fmt}{unit}, {rate_noinv_fmt}, {remaining} left\n"
        lines = {"mininterval": 10, "miniters": 1, "delay": 10, "bar_format": text}
    return tqdm(parts, desc=name, total=total, unit=f" {unit}", disable=name is None, **lines)


def num_workers(num_processes: int | None, model: PreTrainedModel, num_derivations: int) -> int:
    """How many processes of this machine compute; 1 = the one that asks.

    None means: on a CPU one for every 2,000 derivations (texts times beam), but not more than torch would use threads;
    on a GPU and under `accelerate launch` one.
    """
    on_cpu = model.device.type == "cpu"
    if num_processes is None:
        worth = num_derivations // _DERIVATIONS_PER_WORKER if on_cpu and not is_launched() else 1
        return max(1, min(worth, torch.get_num_threads()))
    if num_processes > 1 and not on_cpu:
        raise ValueError(
            f"num_processes is {num_processes}, but the model is on {model.device}. Leave num_processes out. To use "
            "several GPUs, run accelerate launch -m hf_synlm.cli"
        )
    return num_processes


def _keeping(compute: Compute, packed: dict[Any, Any], batch: list[Any]) -> list[Result]:
    """Results of a batch, with weights that are packed once for all batches."""
    with keep_packed_weights(packed):
        return compute(batch)


def _in_memory(compute: Compute, batch: list[Any]) -> list[Result]:
    """Results of a batch, in halves where memory is out."""
    half = len(batch) // 2
    try:
        return compute(batch)
    except torch.OutOfMemoryError:
        if not half:
            raise
    logger.warning(f"Out of memory with {len(batch)} texts at once: continuing with {half}. Lower the batch size.")
    return _in_memory(compute, batch[:half]) + _in_memory(compute, batch[half:])


# ------------------------------------------------------------------------------------------------------- workers
@contextmanager
def _on_workers(compute: Compute, number: int) -> Iterator[Callable[[Sequence[Any]], _Finish]]:
    """What hands a batch to workers, and returns what waits for its results."""
    context = multiprocessing.get_context(_START)
    # By `synlm`, which is imported first, libraries are quiet.
    context.set_forkserver_preload(["synlm", "hf_synlm.evaluation.text.processes"])
    others = multiprocessing.active_children()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "compute.pt"
        torch.save(compute, path)
        pool = ProcessPoolExecutor(number, context, _start_worker, (path,))

        def start(batch: Sequence[Any]) -> _Finish:
            # Workers inherit the mask from the start, unless they come from a server of forks that was there before.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                return pool.submit(_work, list(batch)).result
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

        try:
            yield start
        except BrokenProcessPool as error:
            raise ChildProcessError(
                f"one of {number} worker processes died, perhaps because memory ran out: use fewer processes or a "
                "smaller batch size. A script that starts processes needs if __name__ == '__main__'."
            ) from error
        finally:
            for worker in multiprocessing.active_children():  # an error or Ctrl-C does not wait for their batches
                if worker not in others:
                    worker.terminate()
            pool.shutdown(cancel_futures=True)


def _start_worker(path: Path) -> None:
    """Load what computes; end when the process that reads the results ends."""
    global _compute
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # Ctrl-C ends the process that asks, with one message
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _compute = torch.load(path, mmap=True, weights_only=False)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


_compute: Compute
_packed_weights: dict[Any, Any] = {}


def _work(batch: list[Any]) -> list[Result]:
    return _keeping(_compute, _packed_weights, batch)
