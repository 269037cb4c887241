"""Running training scripts as processes: to the end, or until they are killed."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRAINING = ROOT / "training"
STATE_FILE = "training_state.json"


def environment(cache: str) -> dict[str, str]:
    """Environment of a script, with the cache of `datasets` in a folder of the test."""
    path = os.pathsep.join(x for x in (str(ROOT), os.environ.get("PYTHONPATH", "")) if x)
    return {**os.environ, "PYTHONPATH": path, "HF_DATASETS_CACHE": cache, "OMP_NUM_THREADS": "1"}


def run_script(command: Sequence[str], output_dir: Path, cache: str) -> dict:
    """Run a script to its end; what it printed and its results."""
    done = subprocess.run(command, env=environment(cache), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return {"stdout": done.stdout, **json.loads((output_dir / "all_results.json").read_text())}


def kill_after_checkpoint(command: Sequence[str], output_dir: Path, step: int, cache: str) -> None:
    """Run a script, kill it as soon as the checkpoint of a step is complete, and leave traces of a cut save."""
    with subprocess.Popen(
        command, env=environment(cache), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 120
        while not (output_dir / f"step_{step}" / STATE_FILE).is_file():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    (output_dir / "all_results.json").unlink(missing_ok=True)
    # Saves that were cut short: they are newer than the complete one and must not be taken.
    (output_dir / f"step_{step + 1}.partial").mkdir()
    (output_dir / "step_999").mkdir()
