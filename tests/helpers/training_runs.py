"""Running training scripts as processes: to the end, or until they are killed; `two_processes` runs two at a time.

Importing transformers takes longer than these runs. A server process imports the scripts once and forks every run
from itself (the start method "forkserver" of multiprocessing); a run is a process of its own all the same, which can
be killed.
"""

import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import datasets
import pytest
from accelerate.state import AcceleratorState, GradientState, PartialState

from hf_synlm.data.samples import sample_path
from hf_synlm.data.treebank import read_treebank
from hf_synlm.training.engine.checkpoints import list_checkpoints
from hf_synlm.training.engine.loop import TrainingLoop

ROOT = Path(__file__).resolve().parents[2]
TRAINING = ROOT / "training"
PACKAGE_FILES = ROOT / "hf_synlm" / "training"  # configs/ and accelerate/
SCRIPTS = ("pretrain_gpst", "train_rnng", "train_recurrent")
SMALL_GPST = "hidden_size=32,composition_size=32,composition_intermediate_size=64,score_size=16,parser_size=32"
# Overrides of configurations that make tiny models.
TINY = {
    "gpst": SMALL_GPST,
    "rnng": "embedding_size=12,hidden_size=16",
    "on_lstm": "embedding_size=8,hidden_size=12,num_layers=2,chunk_size=4",
    "prpn": "embedding_size=8,hidden_size=12,num_slots=5,num_lookback=2",
    "palm": "embedding_size=8,hidden_size=12,num_spans=4,rrnn_size=4,attention_size=6",
    "awd_lstm": "embedding_size=8,hidden_size=12",
    "pcfg": "symbol_size=8,num_nonterminals=4,num_preterminals=6",
}


def sample_files(folder: Path, kind: str, **counts: int) -> dict[str, str]:
    """Files with the first lines of the embedded samples of a kind ("raw" or "trees"), and a folder for caches."""
    paths = {"cache": str(folder / "cache")}
    for name, count in counts.items():
        lines = sample_path(f"{kind}.{name}.txt").read_text(encoding="utf-8").splitlines()[:count]
        paths[name] = str(folder / f"{kind}.{name}.txt")
        Path(paths[name]).write_text("\n".join(lines), encoding="utf-8")
    return paths


def sample_treebank(folder: Path, **counts: int) -> dict[str, str]:
    """Files of the first trees of the embedded treebank, and the same sentences as text (NAME.words)."""
    paths = sample_files(folder, "trees", **counts)
    for name in counts:
        lines = [" ".join(sentence.words) for sentence in read_treebank(paths[name])]
        paths[f"{name}.words"] = str(folder / f"{name}.words.txt")
        Path(paths[f"{name}.words"]).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return paths


def environment(cache: str) -> dict[str, str]:
    """Environment of a script, with the cache of `datasets` in a folder of the test."""
    path = os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
    return {**os.environ, "PYTHONPATH": path, "HF_DATASETS_CACHE": cache, "OMP_NUM_THREADS": "1"}


def _signal_after_step_two(number: signal.Signals) -> None:
    """Let this process get a signal in its second step: one from outside may come when a short run has ended."""
    after_step = TrainingLoop._after_step

    def after_step_and_signal(loop: TrainingLoop, save: bool = False) -> bool:
        if loop.run.state.step == 2:
            os.kill(os.getpid(), number)
        return after_step(loop, save)

    TrainingLoop._after_step = after_step_and_signal  # type: ignore[method-assign]


def _target(script: str, argv: Sequence[str], log: str, changes: dict[str, str], number: signal.Signals | None) -> None:
    os.environ.update(changes)
    with open(log, "ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    # The cache has been read from the environment of the server.
    datasets.config.HF_DATASETS_CACHE = Path(os.environ["HF_DATASETS_CACHE"])
    sys.argv = [script, *argv]
    if number is not None:
        _signal_after_step_two(number)
    importlib.import_module(f"hf_synlm.training.programs.{script}").main(list(argv))
    sys.stdout.flush()


def start_server() -> None:
    """Start the process that imports the scripts, if it does not run yet."""
    before = os.environ.get("PYTHONPATH")
    # The server does not take over sys.path, and an import that fails in it is passed over in silence.
    os.environ["PYTHONPATH"] = os.pathsep.join(x for x in (str(ROOT), before) if x)
    try:
        forkserver.set_forkserver_preload([f"hf_synlm.training.programs.{name}" for name in SCRIPTS])
        forkserver.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


class ScriptRun:
    """A script in a process of its own.

    Args:
        script: name of the module in training/.
        argv: its flags, with `--output-dir`.
        cache: folder for the cache of `datasets`.
        number: signal that the process gets in its second step.
        changes: changes of the environment.
    """

    def __init__(self, script: str, argv: Sequence[str], cache: str, number: int | None = None, **changes: str):
        self.output_dir = Path(argv[list(argv).index("--output-dir") + 1])
        self.output_dir.parent.mkdir(parents=True, exist_ok=True)
        self.log = self.output_dir.with_name(f"{self.output_dir.name}.log")
        self.log.unlink(missing_ok=True)
        start_server()
        context = multiprocessing.get_context("forkserver")
        arguments = (script, argv, str(self.log), {"HF_DATASETS_CACHE": cache, **changes}, number)
        self.process = context.Process(target=_target, args=arguments)
        self.process.start()

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for something that the process does."""
        deadline = time.monotonic() + 120
        while not condition():
            assert self.process.is_alive() and time.monotonic() < deadline, f"no {what}:\n{self.text[-3000:]}"
            time.sleep(0.002)

    def kill(self) -> None:
        """Kill -9."""
        self.process.kill()
        self.process.join()

    def finish(self, status: int = 0) -> str:
        """Wait for the end; what it has printed."""
        self.process.join(240)
        assert self.process.exitcode == status, f"status {self.process.exitcode}:\n{self.text[-3000:]}"
        return self.text


def results_of(output_dir: Path) -> dict[str, Any]:
    """`all_results.json` of a run."""
    return json.loads((output_dir / "all_results.json").read_text(encoding="utf-8"))


def reset_accelerate() -> None:
    """Accelerate keeps the precision and accumulation of the first run in a process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def last_wins(argv: Sequence[str]) -> list[str]:
    """A command line without the options that are given again behind, which the programs refuse for lists."""
    groups: list[list[str]] = []
    for word in argv:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    last = {group[0].partition("=")[0].replace("_", "-"): group for group in groups}
    return [word for group in last.values() for word in group]


def run_here(script: str, argv: Sequence[str], cache: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run a script in this process; what it printed and its results."""
    reset_accelerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", Path(cache))
        importlib.import_module(f"hf_synlm.training.programs.{script}").main(last_wins(argv))
    return {"stdout": capsys.readouterr().out, **results_of(Path(argv[argv.index("--output-dir") + 1]))}


def cut_off(whole: Path, cut: Path, step: int) -> None:
    """Copy what a run had written when it was killed in the save after the checkpoint of a step."""
    shutil.copytree(whole, cut, ignore=shutil.ignore_patterns("model", "all_results.json", "evaluation.*"))
    for folder in list_checkpoints(cut):
        if int(folder.name.removeprefix("step_")) > step:
            shutil.rmtree(folder)
    # Saves that were cut short: they are newer than the complete one and must not be taken.
    (cut / f"step_{step + 1}.partial").mkdir()
    (cut / "step_999").mkdir()
