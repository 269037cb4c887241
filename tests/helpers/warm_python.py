"""Python processes of a test, forked from one that has imported what takes long.

torch and what transformers brings along take five seconds of every new process, and some thirty tests need one. The
server of this file imports them once. It imports neither hf_synlm nor transformers nor huggingface_hub, which read the
environment when they are imported; so its children do this themselves, with their own environment.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SLOW = (
    "torch torch._dynamo torch.distributed.tensor torch.utils._pytree scipy.optimize scipy.stats numpy PIL.Image "
    "jinja2 tokenizers safetensors.torch regex yaml httpx httpx2 dill psutil sympy tqdm.auto typer rich pyarrow.parquet"
).split()


@functools.cache
def server() -> subprocess.Popen[str]:
    """The server of this process, which ends with it."""
    command = [sys.executable, "-I", __file__]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    timeout: float | None = None,
    check: bool = False,
    **streams: Any,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` for `python [-I] FILE`, `-m MODULE` or `-c CODE`, and arguments; captures output as text."""
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("stdout", "stderr")]
        request = {"words": list(command[1:]), "environment": dict(os.environ if env is None else env)}
        request |= {"folder": str(cwd or Path.cwd()), "files": [str(file) for file in files], "timeout": timeout}
        server().stdin.write(json.dumps(request) + "\n")
        server().stdin.flush()
        status = json.loads(server().stdout.readline())
        out, err = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    if status is None:
        raise subprocess.TimeoutExpired(command, timeout, out, err)
    if check:
        assert status == 0, err
    return subprocess.CompletedProcess(command, status, out, err)


# ------------------------------------------------------------------------------------------------------ the server
def run_child(request: dict[str, Any]) -> None:
    """The command; ends the process."""
    status = 0
    try:
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        for number, file in enumerate(request["files"], start=1):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), number)
        isolated = request["words"][0] == "-I"
        words = request["words"][isolated:]
        if not isolated:
            paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
            sys.path[:0] = ["" if words[0] in ("-c", "-m") else str(Path(words[0]).parent), *paths]
        if words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            main = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        elif words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        status = 1
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def wait(pid: int, timeout: float | None) -> int | None:
    """Exit status of a child; None if it had to be killed."""
    deadline = time.monotonic() + (timeout or float("inf"))
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return None
        time.sleep(0.01)


def serve() -> None:
    """Import, then fork a child for every line of standard input."""
    for name in SLOW:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    assert not {name.split(".")[0] for name in sys.modules} & {"hf_synlm", "transformers", "huggingface_hub"}
    while line := sys.stdin.readline():
        request = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run_child(request)
        sys.stdout.write(json.dumps(wait(pid, request["timeout"])) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
