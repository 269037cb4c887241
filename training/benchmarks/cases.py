"""Speed of the models as ratios against a baseline that runs in turn with them.

    python training/benchmark.py --list
    python training/benchmark.py --case gpst-train-quarter --runs 7 --json

Every case builds both sides with the same width, layers, vocabulary and tokens. It checks that the measured side
computes the right thing, and reports nothing if it does not. Then it times the two sides alternately: A B A B. The
ratio is the median of the pairs, so it depends little on changes of the machine's speed. Times are wall-clock. Peak
memory (Linux only) is the growth of the resident set of a fresh process that runs one step of one side.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from benchmarks.beams import compare_beams
from benchmarks.evaluation import evaluation_speed
from benchmarks.gpst import BEAM, PARSE_TOKENS, QUARTER, gpst_parse, gpst_train
from benchmarks.lengths import compare_lengths
from benchmarks.loop import gpst_loop, memory_growth, process_scaling
from benchmarks.prepare import prepare_corpus
from benchmarks.recurrent import on_lstm_train, palm_train, prpn_train
from benchmarks.rnng import rnng_search, rnng_search_batched, rnng_search_growth, rnng_train
from benchmarks.sides import Sides, measure, origin, seconds, use_device
from benchmarks.trees import pushdown_train, transformer_grammar_train, treereg_train

Build = Callable[[], Sides]


class Case(NamedTuple):
    """One comparison: what is measured, against what, and the function that builds both sides."""

    what: str
    baseline: str
    build: Build


CASES = {
    "gpst-train-quarter": Case(
        "GPST forward + backward, D 192, d 64, 3 + 9 layers, V 12566, 2 x 512 tokens",
        "GPT2LMHeadModel forward + backward, same sizes and tokens",
        lambda: gpst_train(QUARTER, 2, 512),
    ),
    "gpst-train-small": Case(
        "GPST forward + backward, small preset, 1 x 512 tokens",
        "GPT2LMHeadModel forward + backward, same sizes and tokens",
        lambda: gpst_train({}, 1, 512),
    ),
    "gpst-parse-quarter": Case(
        f"GPST parse of {PARSE_TOKENS} tokens, beam {BEAM}, D 192, d 64, 3 + 9 layers, V 12566",
        f"GPT2LMHeadModel.generate(num_beams={BEAM}) of {PARSE_TOKENS} tokens, same sizes",
        lambda: gpst_parse(QUARTER),
    ),
    "gpst-parse-small": Case(
        f"GPST parse of {PARSE_TOKENS} tokens, beam {BEAM}, small preset",
        f"GPT2LMHeadModel.generate(num_beams={BEAM}) of {PARSE_TOKENS} tokens, same sizes",
        lambda: gpst_parse({}),
    ),
    "rnng-train-b32": Case(
        "RNNG forward + backward, 32 sentences, E = D = 256, 2 layers, LSTM composition, V 5400",
        "torch.nn.LSTM forward + backward, same sizes, as many steps as the RNNG has pushes",
        lambda: rnng_train(32),
    ),
    "rnng-train-b128": Case("the same with 128 sentences", "the same with as many steps", lambda: rnng_train(128)),
    "rnng-search-k100": Case(
        "RNNG parse of 17 tokens, action beam 100, word beam 10, fast-track 1, E = D = 256, 2 layers",
        "the same search with action beam 10",
        lambda: rnng_search(100, 10),
    ),
    "rnng-search-batched": Case(
        "RNNG parse of 8 sentences of 17 tokens together, action beam 100",
        "the same sentences one by one",
        lambda: rnng_search_batched(100),
    ),
    "on-lstm-train": Case(
        "ON-LSTM forward + backward, 3 layers, E 400, H 1150, V 10000, 20 x 70 tokens, no dropout",
        "three torch.nn.LSTM, embedding and output layer of the same sizes",
        lambda: on_lstm_train(dropout=False),
    ),
    "on-lstm-train-dropout": Case(
        "the same with the dropout of the preset",
        "the same, without dropout",
        lambda: on_lstm_train(dropout=True),
    ),
    "prpn-train": Case(
        "PRPN forward + backward, 2 layers, E 800, H 1200, V 10000, 64 x 35 tokens, no dropout",
        "two torch.nn.LSTM of the same sizes, a projection, embedding and output layer",
        lambda: prpn_train(dropout=False),
    ),
    "prpn-train-dropout": Case(
        "the same with the dropout of the preset",
        "the same, without dropout",
        lambda: prpn_train(dropout=True),
    ),
    "palm-train": Case(
        "PaLM forward + backward, 3 layers, E 400, H 1020, 20 spans, V 10000, 20 x 70 tokens",
        "AWD-LSTM: the same model without span attention",
        palm_train,
    ),
    "pushdown-train": Case(
        "Pushdown Layers forward + backward, 4 layers, D 256, V 5400, 32 sentences with their trees, no dropout",
        "GPT2LMHeadModel of the same size on the same tokens",
        pushdown_train,
    ),
    "pushdown-train-parameters": Case(
        "the same",
        "GPT2LMHeadModel with as many parameters: 7 layers for the attachment head's",
        lambda: pushdown_train(layers=7),
    ),
    "transformer-grammar-train": Case(
        "Transformer Grammar forward + backward, the same sizes and sentences",
        "GPT2LMHeadModel of the same size on as many tokens, labels included",
        transformer_grammar_train,
    ),
    "treereg-train": Case(
        "GPT2LMHeadModel with the loss of TreeReg, forward + backward, the same sizes and sentences",
        "the same without the loss",
        treereg_train,
    ),
    "prepare": Case(
        "text file (2.8 MB) to shards: sentences, tokens, boundaries, checksums, on disk; one process",
        "the tokenizer called with the same sentences, split before, 1000 at a time",
        lambda: prepare_corpus(1),
    ),
    "gpst-loop-quarter": Case(
        "a step of the training loop: batch from the data set, GPST forward + backward, clipping, AdamW; D 192, "
        "d 64, 3 + 9 layers, V 12566, 2 x 256 tokens",
        "forward + backward, clipping and AdamW on a batch that is ready",
        lambda: gpst_loop(QUARTER, 2, 256),
    ),
}


def _memory_mib(field: str) -> float:
    """A field of this process's memory status: VmRSS (now) or VmHWM (highest so far)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise OSError(f"/proc/self/status has no field {field}; memory is measured on Linux only")


def _peak_memory(case: str | Build, side: int, threads: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(threads)
    step = (CASES[case].build if isinstance(case, str) else case)()[side]
    before = _memory_mib("VmRSS")
    step()
    results.put(_memory_mib("VmHWM") - before)


def peak_memory(case: str | Build, side: int = 0) -> float:
    """Growth of the resident set during one step, in a fresh process.

    Args:
        case: name of a case, or a function that builds both sides and can be pickled.
        side: 0 measured side, 1 baseline.

    Returns:
        MiB.

    Raises:
        RuntimeError: when that process fails.
    """
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    process = context.Process(target=_peak_memory, args=(case, side, torch.get_num_threads(), results))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"the process that measures the memory of {case} ended with status {process.exitcode}")
    return results.get()


def run_case(name: str, runs: int) -> dict[str, Any]:
    """Check and time one case.

    Args:
        name: key of `CASES`.
        runs: counted pairs, after one uncounted pair.

    Returns:
        The figures that `--json` prints.

    Raises:
        AssertionError: when the correctness check fails; nothing is reported then.
    """
    case = CASES[name]
    ours, theirs, check, _ = case.build()
    check()
    costs = [measure(step, 1) for step in (ours, theirs)]
    pairs = [(seconds(ours), seconds(theirs)) for _ in range(runs)]
    ratios = [mine / other for mine, other in pairs]
    return {
        "case": name,
        "baseline": case.baseline,
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "runs": runs,
        "peak_memory_mib": costs[0].get("peak_mib") or round(peak_memory(name)),
        "baseline_peak_memory_mib": costs[1].get("peak_mib") or round(peak_memory(name, 1)),
        "costs": costs,
        **origin(),
    }


def compare_commits(name: str, ref: str, runs: int, device: str) -> dict[str, Any]:
    """Time the measured side of a case with the code of this folder against that of another commit, in turn.

    The benchmarks are those of this folder; `hf_synlm` comes from a throw-away worktree of the commit.

    Args:
        name: key of `CASES`.
        ref: commit, branch or tag of this repository.
        runs: counted pairs.
        device: where both run.

    Returns:
        The figures that `--json` prints.
    """
    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        git = ["git", "-C", str(root), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(base), ref], check=True)
        try:
            workers = [_Worker(code, name, device) for code in (root, base)]
            pairs = [(workers[0].seconds(), workers[1].seconds()) for _ in range(runs)]
            for worker in workers:
                worker.stop()
        finally:
            subprocess.run([*git, "remove", "--force", str(base)], check=True)
    ratios = [mine / other for mine, other in pairs]
    figures = {"case": name, "baseline": f"the same at {ref}", "ratio": round(statistics.median(ratios), 3)}
    return figures | {"ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3), "runs": runs, **origin()}


class _Worker:
    """A process that runs a step of a case, with the code of a folder, whenever it is asked to."""

    def __init__(self, code: Path, name: str, device: str) -> None:
        command = [sys.executable, str(Path(__file__).parents[1] / "benchmark.py"), "--worker", "--device", device]
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
    ours, _, check, _ = CASES[name].build()
    check()
    for _ in sys.stdin:
        print(seconds(ours), flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that the command line names.

    Args:
        arguments: command line; default `sys.argv`.

    Returns:
        Exit status: 1 when a correctness check failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="list the cases and stop")
    parser.add_argument("--case", action="append", choices=sorted(CASES), help="case to run (repeat); default: all")
    parser.add_argument("--runs", type=int, default=5, help="counted pairs per case")
    parser.add_argument("--threads", type=int, help="threads of torch; default: torch chooses")
    parser.add_argument("--growth", action="store_true", help="print how the cost of RNNG's search grows, and stop")
    parser.add_argument("--memory", action="store_true", help="print GPST's memory by batch and context, and stop")
    parser.add_argument("--scaling", action="store_true", help="print the speed of one process and of two, and stop")
    parser.add_argument(
        "--evaluation", metavar="MODEL", help="print sentences per second of scoring and parsing, and stop"
    )
    parser.add_argument(
        "--lengths", metavar="FOLDER", help="time training against the length of sentences, write it there, and stop"
    )
    parser.add_argument("--beams", metavar="FOLDER", help="time GPST's search by its beam, write it there, and stop")
    parser.add_argument("--json", action="store_true", help="print one JSON object per case")
    parser.add_argument("--device", default="cpu", help="where both sides run, as torch names it: cpu, cuda")
    parser.add_argument("--base", metavar="REF", help="compare with the code of another commit instead, case by case")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.runs < 1:
        parser.error(f"--runs {options.runs}: at least one pair is needed")
    if options.threads:
        torch.set_num_threads(options.threads)
    use_device(options.device)
    if options.worker:
        _work(options.case[0])
    elif options.base:
        for name in options.case or CASES:
            print(json.dumps(compare_commits(name, options.base, options.runs, options.device)), flush=True)
    elif options.growth:
        print(rnng_search_growth(options.runs))
    elif options.memory:
        print(memory_growth(peak_memory))
    elif options.scaling:
        print(process_scaling(10 * options.runs))
    elif options.evaluation:
        print(evaluation_speed(options.evaluation, options.runs))
    elif options.lengths:
        print(compare_lengths(options.lengths, options.runs))
    elif options.beams:
        print(compare_beams(options.beams, options.runs, peak_memory))
    elif options.list:
        for name in options.case or CASES:
            print(f"{name}: {CASES[name].what}; baseline: {CASES[name].baseline}")
    else:
        reported = [report_case(name, options.runs, options.json) for name in options.case or CASES]
        return int(not all(reported))
    return 0


def report_case(name: str, runs: int, as_json: bool) -> bool:
    """Run a case and print its figures, or why there are none.

    Args:
        name: key of `CASES`.
        runs: counted pairs.
        as_json: print JSON instead of a sentence.

    Returns:
        Whether the measured side passed its correctness check.
    """
    try:
        result = run_case(name, runs)
    except AssertionError as error:
        print(f"{name}: not reported, the correctness check failed: {error}", file=sys.stderr)
        return False
    if as_json:
        print(json.dumps(result), flush=True)
    else:
        print(
            f"{name}: ratio {result['ratio']} ({result['ratio_min']} to {result['ratio_max']}, {runs} pairs), peak "
            f"memory {result['peak_memory_mib']} MiB (baseline {result['baseline_peak_memory_mib']} MiB); baseline: "
            f"{result['baseline']}",
            flush=True,
        )
    return True
