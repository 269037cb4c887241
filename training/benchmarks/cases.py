# SPDX-License-Identifier: Apache-2.0
"""Speed of the models as ratios against a baseline that runs in turn with them.

    python training/benchmark.py --list
    python training/benchmark.py --case gpst-train-quarter --runs 7

Results are lines of JSON. Every case builds both sides with the same width, layers, vocabulary and tokens. It checks
that the measured side computes the right thing, and reports no figures if it does not. Then it times the two sides
alternately: A B A B. The ratio is the median of the pairs, so it depends little on changes of the machine's speed.
Times are wall-clock. Peak memory (Linux only) is the growth of the resident set of a fresh process that runs one step.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.gradients import gradient_errors
from benchmarks.grammar import pcfg_growth
from benchmarks.lengths import time_by_length
from benchmarks.search import BEAM, PARSE_TOKENS, gpst_growth, gpst_parse, rnng_growth, rnng_search
from benchmarks.sides import Sides, measure, origin, seconds, use_device
from benchmarks.train import (
    QUARTER,
    gpst_train,
    on_lstm_train,
    palm_train,
    prpn_train,
    pushdown_train,
    rnng_train,
    transformer_grammar_train,
)

Build = Callable[[], Sides]


class Case(NamedTuple):
    """One comparison: what is measured, against what, and the function that builds both sides."""

    what: str
    baseline: str
    build: Build


GPT2 = "GPT2LMHeadModel, same sizes and tokens"
CASES = {
    "gpst-train-quarter": Case(
        "GPST forward + backward, D 192, d 64, 3 + 9 layers, V 12566, 2 x 512 tokens",
        GPT2,
        lambda: gpst_train(QUARTER, 2, 512),
    ),
    "gpst-train-small": Case("the same, small preset, 1 x 512 tokens", GPT2, lambda: gpst_train({}, 1, 512)),
    "gpst-parse-quarter": Case(
        f"GPST parse of {PARSE_TOKENS} tokens, beam {BEAM}, D 192, d 64, 3 + 9 layers, V 12566",
        f"GPT2LMHeadModel.generate(num_beams={BEAM}) of as many tokens, same sizes",
        lambda: gpst_parse(QUARTER),
    ),
    "gpst-parse-small": Case("the same, small preset", GPT2, lambda: gpst_parse({})),
    "rnng-train-b32": Case(
        "RNNG forward + backward, 32 sentences, E = D = 256, 2 layers, LSTM composition, V 5400",
        "torch.nn.LSTM, same sizes, as many steps as the RNNG has pushes",
        lambda: rnng_train(32),
    ),
    "rnng-train-b128": Case("the same, 128 sentences", "the same", lambda: rnng_train(128)),
    "rnng-search-k100": Case(
        "RNNG parse of 17 tokens, action beam 100, word beam 10, fast-track 1, E = D = 256, 2 layers",
        "the same search with action beam 10",
        lambda: rnng_search(1, 100, 10),
    ),
    "rnng-search-batched": Case(
        "RNNG parse of 8 sentences of 17 tokens together, action beam 100",
        "the same sentences one by one",
        lambda: rnng_search(8, 100, 100),
    ),
    "on-lstm-train": Case(
        "ON-LSTM forward + backward, 3 layers, E 400, H 1150, V 10000, 20 x 70 tokens, no dropout",
        "three torch.nn.LSTM, embedding and output layer of the same sizes",
        on_lstm_train,
    ),
    "prpn-train": Case(
        "PRPN forward + backward, 2 layers, E 800, H 1200, V 10000, 64 x 35 tokens, no dropout",
        "two torch.nn.LSTM of the same sizes, a projection, embedding and output layer",
        prpn_train,
    ),
    "palm-train": Case(
        "PaLM forward + backward, 3 layers, E 400, H 1020, 20 spans, V 10000, 20 x 70 tokens",
        "AWD-LSTM: the same model without span attention",
        palm_train,
    ),
    "pushdown-train": Case(
        "Pushdown Layers forward + backward, 4 layers, D 256, V 5400, 32 sentences with their trees, no dropout",
        GPT2,
        pushdown_train,
    ),
    "pushdown-train-parameters": Case(
        "the same", "GPT2LMHeadModel with as many parameters: 7 layers", lambda: pushdown_train(layers=7)
    ),
    "transformer-grammar-train": Case(
        "Transformer Grammar forward + backward, the same sizes and sentences",
        "GPT2LMHeadModel on as many tokens, labels included",
        transformer_grammar_train,
    ),
}
# Of sizes that a GPU is made for.
GPU_CASES = {
    "gpst-train-8x1024": Case("GPST forward + backward, small preset", GPT2, lambda: gpst_train({}, 8, 1024)),
    "gpst-parse-16": Case("GPST parse of 16 texts, small preset", GPT2, lambda: gpst_parse({}, 16)),
    "rnng-train-b512": Case("RNNG forward + backward, 512 sentences", "torch.nn.LSTM", lambda: rnng_train(512)),
}


def _memory_mib(field: str) -> float:
    """A field of this process's memory status: VmRSS (now) or VmHWM (highest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no field {field}; memory is measured on Linux only")


def _peak_memory(case: str | Build, side: int, threads: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(threads)
    step = ((CASES | GPU_CASES)[case].build if isinstance(case, str) else case)()[side]
    before = _memory_mib("VmRSS")
    step()
    results.put(_memory_mib("VmHWM") - before)


def peak_memory(case: str | Build, side: int = 0) -> float:
    """Growth of the resident set during one step, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_peak_memory, args=(case, side, torch.get_num_threads(), results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that measures the memory of {case} ended with status {process.exitcode}")
    return results.get()


def ratios(pairs: list[tuple[float, float]]) -> dict[str, Any]:
    """Median and range of the quotients of pairs of times."""
    found = [ours / theirs for ours, theirs in pairs]
    middle = {"ratio": round(statistics.median(found), 3), "runs": len(found)}
    return middle | {"ratio_min": round(min(found), 3), "ratio_max": round(max(found), 3)}


def run_case(name: str, runs: int) -> dict[str, Any]:
    """Check and time one case; AssertionError when the measured side computes something wrong."""
    case = (CASES | GPU_CASES)[name]
    ours, theirs, check, _ = case.build()
    check()
    costs = [measure(step, 1) for step in (ours, theirs)]
    times = ratios([(seconds(ours), seconds(theirs)) for _ in range(runs)])
    memory = [cost.get("peak_mib") or round(peak_memory(name, side)) for side, cost in enumerate(costs)]
    return {"case": name, "baseline": case.baseline, **times, "peak_memory_mib": memory, "costs": costs, **origin()}


def compare_commits(name: str, ref: str, runs: int, *place: str) -> dict[str, Any]:
    """Time the measured side of a case with the code of this folder against that of another commit, in turn.

    The benchmarks are those of this folder; `hf_synlm` comes from a throw-away worktree of the commit. `place` are
    options, of device and precision.
    """
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(base), ref], check=True)
        try:
            workers = [_Worker(code, name, place) for code in (root, base)]
            pairs = [(workers[0].seconds(), workers[1].seconds()) for _ in range(runs)]
            for worker in workers:
                worker.stop()
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)
    return {"case": name, "baseline": f"the same at {ref}", **ratios(pairs), **origin()}


class _Worker:
    """A process that runs a step of a case, with the code of a folder, whenever it is asked to."""

    def __init__(self, code: Path, name: str, place: tuple[str, ...]) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "benchmark.py"), "--worker", *place]
        command += ["--case", name, "--threads", str(torch.get_num_threads())]
        environment = {**os.environ, "PYTHONPATH": str(code)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, env=environment, cwd=code, **pipes)
        self.seconds()

    def seconds(self) -> float:
        """Seconds of one step."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())

    def stop(self) -> None:
        """End the process."""
        self.process.communicate()


def _work(name: str) -> None:
    """Check a case, then time one step for every line of standard input."""
    ours, _, check, _ = (CASES | GPU_CASES)[name].build()
    check()
    for _ in sys.stdin:
        print(seconds(ours), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run what the command line names; status 1 when a correctness check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--case", action="append", choices=sorted(CASES | GPU_CASES), help="case to run (repeat)")
    parser.add_argument("--runs", type=int, default=5, help="counted pairs per case")
    parser.add_argument("--threads", type=int, help="threads of torch; default: torch chooses")
    parser.add_argument("--device", default="cpu", help="where both sides run, as torch names it: cpu, cuda")
    parser.add_argument(
        "--precision",
        default="float32",
        choices=("float32", "tf32", "bf16"),
        help="of both sides: float32, with products in TF32 on a GPU (tf32), or under autocast to bfloat16",
    )
    parser.add_argument("--base", metavar="REF", help="compare with the code of another commit instead, case by case")
    parser.add_argument("--growth", action="store_true", help="print how searches and charts grow, and stop")
    parser.add_argument("--lengths", action="store_true", help="time training by the length of sentences, and stop")
    parser.add_argument(
        "--gradients", action="store_true", help="print errors of gradients in half precision, and stop"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least one pair is needed")
    if options.threads:
        torch.set_num_threads(options.threads)
    names = options.case or [*CASES, *(GPU_CASES if options.device.startswith("cuda") else ())]
    with use_device(options.device, options.precision):
        if options.worker:
            _work(names[0])
            return 0
        if options.list:
            rows: Iterable[Any] = ({"case": name, **(CASES | GPU_CASES)[name]._asdict()} for name in names)
        elif options.base:
            place = ("--device", options.device, "--precision", options.precision)
            rows = (compare_commits(name, options.base, options.runs, *place) for name in names)
        elif options.growth:
            growths = pcfg_growth(options.runs), gpst_growth(options.runs, peak_memory), rnng_growth(options.runs)
            rows = itertools.chain(*growths)
        elif options.lengths:
            rows = time_by_length(options.runs)
        elif options.gradients:
            rows = ({"case": name, **gradient_errors(sides)} for name in names if (sides := CASES[name].build()).model)
        else:
            rows = (_attempt(name, options.runs) for name in names)
        failed = False
        for row in rows:
            print(json.dumps(row, default=str), flush=True)
            failed |= "error" in row
    return int(failed)


def _attempt(name: str, runs: int) -> dict[str, Any]:
    """The figures of a case, or why there are none: one failure must not cost the rest."""
    try:
        return run_case(name, runs)
    except (AssertionError, RuntimeError) as error:
        return {"case": name, "error": f"{type(error).__name__}: {error}"[:500]}
