"""Everything that only a GPU can tell, in one command, in the order of its value.

    python training/benchmarks/gpu.py                      all parts
    python training/benchmarks/gpu.py training search      some of them
    python training/benchmarks/gpu.py --device cpu         a rehearsal without a GPU, at small sizes

Each part runs in a process of its own and ends within ten minutes. A result is a line of JSON, which is printed and
added to OUTPUT at once. The first line says where the results come from: machine, versions, commit.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "training")]

import torch  # noqa: E402
from benchmarks.gpst import QUARTER, gpst_parse, gpst_train  # noqa: E402
from benchmarks.recurrent import on_lstm_train, palm_train, prpn_train  # noqa: E402
from benchmarks.rnng import SearchedSentences, rnng_train  # noqa: E402
from benchmarks.sides import Sides, measure, origin, place, synchronize, use_device  # noqa: E402

MINUTES = 10
RUNS = {"cuda": 7, "cpu": 1}
LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Results:
    """Where results go: to the screen and, line by line, to a file."""

    def __init__(self, path: Path, device: str) -> None:
        self.path, self.device, self.rehearsal = path, device, device == "cpu"
        self.runs = RUNS["cpu" if self.rehearsal else "cuda"]

    def add(self, part: str, name: str, **figures: Any) -> None:
        """Write one result."""
        line = json.dumps({"part": part, "name": name, **figures})
        print(line, flush=True)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")

    def attempt(self, part: str, name: str, figures: Callable[[], dict[str, Any]]) -> None:
        """Write a result, or the error that came instead: one failure must not cost the rest of a part."""
        try:
            self.add(part, name, **figures())
        except Exception as error:
            self.add(part, name, error=f"{type(error).__name__}: {error}"[:500])


# ---------------------------------------------------------------------------------------------------------- parts
def tests(results: Results) -> None:
    """The tests marked `gpu`: losses, gradients, trees and text of all models equal those of the CPU, and more."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/models/test_gpu.py"]
    # The pretend GPU knows no cases of real size, and a rehearsal need not run every model.
    command += ["--pretend-gpu", "-k", "palm and not train"] if results.rehearsal else ["-m", "gpu"]
    for line in lines_of(command):
        if found := re.match(r"\S+::(\S+) (PASSED|FAILED|SKIPPED|ERROR)", line):
            results.add("tests", found[1], outcome=found[2].lower())
        elif re.match(r"(E  |FAILED |=+ .* in )", line):
            results.add("tests", "output", line=line.strip()[:500])


def gradients(results: Results) -> None:
    """Gradients in bfloat16 and float16 against float32: the largest errors, and the largest shares of zeros."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    for name, build in training_cases(results, big=False):
        sides = build()
        assert sides.model is not None
        exact = _gradients(sides)
        for kind, dtype in LOW.items():
            results.attempt("gradients", f"{name} {kind}", lambda s=sides, d=dtype, e=exact: _compare(s, d, e))


def _gradients(sides: Sides) -> dict[str, torch.Tensor]:
    sides.ours()
    return {
        name: weight.grad.float().clone() for name, weight in sides.model.named_parameters() if weight.grad is not None
    }


def _compare(sides: Sides, dtype: torch.dtype, exact: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Relative errors of the gradients, and shares of zeros where the exact gradient is none, of the worst weights."""
    with torch.autocast(next(iter(exact.values())).device.type, dtype=dtype):
        found = _gradients(sides)
    floor = 0.03 * max(gradient.norm().item() for gradient in exact.values())
    errors, zeros = {}, {}
    for name, gradient in exact.items():
        errors[name] = round(((found[name] - gradient).norm() / gradient.norm().clamp_min(floor)).item(), 4)
        counts = gradient.abs() > 1e-3 * gradient.abs().max()
        zeros[name] = round((found[name][counts] == 0).float().mean().item(), 4)
    return {key: dict(sorted(x.items(), key=lambda y: -y[1])[:3]) for key, x in (("errors", errors), ("zeros", zeros))}


def training_cases(results: Results, big: bool = True) -> Iterator[tuple[str, Callable[[], Sides]]]:
    """Training steps beside those of GPT-2 and cuDNN's LSTM, by name."""
    if results.rehearsal:
        yield "gpst-quarter 1 x 64", lambda: gpst_train(QUARTER, 1, 64)
        yield "rnng 4", lambda: rnng_train(4)
        return
    for rows, columns in [(2, 512), (8, 1024), (32, 1024)][: 3 if big else 1]:
        yield f"gpst-small {rows} x {columns}", lambda r=rows, c=columns: gpst_train({}, r, c)
    yield "on-lstm 20 x 70", lambda: on_lstm_train(dropout=False)
    yield "prpn 64 x 35", lambda: prpn_train(dropout=False)
    yield "palm 20 x 70", palm_train
    for count in (32, 128, 512)[: 3 if big else 1]:
        yield f"rnng {count}", lambda c=count: rnng_train(c)


def training(results: Results) -> None:
    """Milliseconds, kernels, waits and memory of training steps, in float32 and bfloat16."""
    for name, build in training_cases(results):
        results.attempt("training", name, lambda b=build: _sides(b(), results.runs))
        if not results.rehearsal:
            torch.cuda.empty_cache()


def _sides(sides: Sides, runs: int) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for side, step in (("ours", sides.ours), ("baseline", sides.theirs)):
        figures[side] = {"float32": measure(step, runs)}
        if runs > 1:  # not in a rehearsal: few CPUs have PyTorch's bfloat16 LSTM
            low = torch.autocast(place(torch.empty(0)).device.type, dtype=torch.bfloat16)
            figures[side]["bf16"] = measure(low(step), runs)
    return figures


def search(results: Results) -> None:
    """Milliseconds of searches for 1, 16 and 64 rows."""
    rows = (1,) if results.rehearsal else (1, 16, 64)
    sizes = QUARTER if results.rehearsal else {}
    for count in rows:

        def gpst(count: int = count) -> dict[str, Any]:
            sides = gpst_parse(sizes, count)
            return {"parse": measure(sides.ours, results.runs), "GPT-2 beams": measure(sides.theirs, results.runs)}

        results.attempt("search", f"gpst {count}", gpst)
    data = SearchedSentences()
    for count in rows:
        ids = (data.ids * count)[:count]
        results.attempt(
            "search", f"rnng {count}", lambda i=ids: measure(lambda: data.search(i, 100), min(3, results.runs))
        )


def deterministic(results: Results) -> None:
    """Whether two equal steps give equal gradients in deterministic mode, and what the mode costs."""
    torch.use_deterministic_algorithms(True)
    for name, build in training_cases(results, big=False):

        def figures(build: Callable[[], Sides] = build) -> dict[str, Any]:
            sides, found = build(), []
            for _ in range(2):
                torch.manual_seed(0)
                found.append(_gradients(sides))
            equal = all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())
            return {"equal": equal, **measure(sides.ours, results.runs)}

        results.attempt("deterministic", name, figures)
    torch.use_deterministic_algorithms(False)


def accelerate(results: Results) -> None:
    """The training programs under accelerate in each precision: loss after some steps, tokens per second."""
    steps = "2" if results.rehearsal else "100"
    programs = {"pretrain_gpst": "gpst_tiny", "train_recurrent": "palm_s_tiny"}
    for precision in ("no", "bf16") if results.rehearsal else ("no", "bf16", "fp16"):
        for program, config in programs.items():
            with tempfile.TemporaryDirectory() as folder:
                output = Path(folder) / "run"
                command = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1"]
                command += ["--num_machines", "1", "--dynamo_backend", "no", "--mixed_precision", precision]
                command += ["--cpu"] if results.rehearsal else []
                command += [f"training/{program}.py", "--config", config]
                command += ["--output_dir", str(output), "--max_train_steps", steps, "--evaluation_steps", "0"]
                command += ["--final_report", "False"] if program == "pretrain_gpst" else []
                tail = list(lines_of(command))[-5:]
                found = output / "all_results.json"
                run = json.loads(found.read_text(encoding="utf-8")) if found.is_file() else {"error": tail}
                figures = {key: run[key] for key in ("error", "tokens_per_second", "train") if key in run}
                results.add("accelerate", f"{config} {precision}", **figures)


PARTS = {part.__name__: part for part in (tests, gradients, training, search, accelerate, deterministic)}


# ----------------------------------------------------------------------------------------------------------- command
def lines_of(command: list[str]) -> Iterator[str]:
    """Run a command in the root of the repository; its output line by line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
        assert process.stdout
        yield from process.stdout


def main(arguments: list[str] | None = None) -> int:
    """Run the parts that the command line names.

    Args:
        arguments: command line; default `sys.argv`.

    Returns:
        Exit status: 1 if a part did not end.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"default: all of {', '.join(PARTS)}")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--output", type=Path, default=Path("runs/gpu.jsonl"), help="results, one JSON object a line")
    parser.add_argument("--within", action="store_true", help=argparse.SUPPRESS)  # this process is that of a part
    options = parser.parse_args(arguments)
    if unknown := [part for part in options.parts if part not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}. Choose from {', '.join(PARTS)}.")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU. Install a build of torch with CUDA, or rehearse with --device cpu.")
    use_device(options.device)
    results = Results(options.output, options.device)
    if options.within:
        PARTS[options.parts[0]](results)
        synchronize()
        return 0
    options.output.parent.mkdir(parents=True, exist_ok=True)
    results.add("origin", "results", **origin())
    failed = False
    for part in options.parts or PARTS:
        command = [sys.executable, __file__, part, "--within", "--device", options.device, "--output"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        command.append(str(options.output.absolute()))
        # A session of its own: what a part has started ends with it.
        with subprocess.Popen(command, env=environment, start_new_session=True) as process:
            try:
                status: int | str = process.wait(60 * MINUTES)
            except subprocess.TimeoutExpired:
                status = f"stopped after {MINUTES} minutes"
                os.killpg(process.pid, signal.SIGKILL)
        failed |= status != 0
        results.add(part, "end", status=status)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
