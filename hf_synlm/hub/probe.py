# SPDX-License-Identifier: Apache-2.0
"""What a model folder computes where hf_synlm is not installed: for `verify_export`.

`run_without_package` runs this file as a script in a process where `import hf_synlm` fails. So the file imports nothing
of this package: it does what a user of a published model does, with the Auto classes.
"""

import functools
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
import transformers
from transformers import dynamic_module_utils

SECONDS = 600  # a folder's code may hang
# Auto class, method, its arguments, and the fields of its output that are wanted; without fields, the output itself.
Call: TypeAlias = tuple[str, str, Mapping[str, Any], Sequence[str]]


def answer_calls(folder: str, calls: Mapping[str, Call], options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By name of a call the fields, and the module of the class in "class"; or a traceback in "error".

    `options` are those of `from_pretrained` of the models. A model is loaded when the Auto class changes.
    """
    answers: dict[str, dict[str, Any]] = {}
    loaded: tuple[str, Any] = ("", None)
    for name, (auto_class, method, arguments, fields) in calls.items():
        torch.manual_seed(0)  # weights that the folder lacks, such as a new head, are equal in every process
        try:
            if loaded[0] != auto_class:
                more = options if "Model" in auto_class else {}
                found = getattr(transformers, auto_class).from_pretrained(folder, trust_remote_code=True, **more)
                loaded = auto_class, found
            with torch.no_grad():
                output = getattr(loaded[1], method)(**arguments)
            values = {field: output[field] for field in fields if field in output} if fields else {method: output}
            answers[name] = {"class": type(loaded[1]).__module__, **values}
        except Exception:  # a finding about the folder; the other calls are still worth an answer
            answers[name] = {"error": traceback.format_exc(limit=-3)}
    return answers


def run_without_package(folder: str, calls: Mapping[str, Call], options: Mapping[str, Any], cache: str | None) -> Any:
    """`answer_calls` in a process with an empty working folder and cache, without network and without this package.

    `cache` is a cache of the Hub that holds the code, if the folder does not. Raises RuntimeError with the end of what
    the process wrote if it fails.
    """
    with tempfile.TemporaryDirectory(prefix="hf_synlm_probe_") as place:
        request, answer = f"{place}/request.pt", f"{place}/answer.pt"
        torch.save([torch.get_num_threads(), folder, calls, options], request)
        # The process shares neither caches nor the distributed run that starts it.
        left_out = ("HF_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        environment |= {"HF_HOME": place, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        environment |= {} if cache is None else {"HF_HUB_CACHE": cache}
        # -I: neither the current folder nor PYTHONPATH nor the user's own packages are on the path.
        command = [sys.executable, "-I", __file__, request, answer]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        run = subprocess.run(command, cwd=place, env=environment, timeout=SECONDS, text=True, **pipes)  # type: ignore
        if run.returncode:
            raise RuntimeError(f"The process without hf_synlm ended with {run.returncode}:\n{run.stderr[-4000:]}")
        return torch.load(answer, weights_only=True)


if __name__ == "__main__":
    sys.modules["hf_synlm"] = None  # type: ignore[assignment]  # from here on, `import hf_synlm` is an ImportError
    # Each Auto class would parse all files of the folder again.
    dynamic_module_utils.get_imports = functools.cache(dynamic_module_utils.get_imports)
    num_threads, *asked = torch.load(sys.argv[1], weights_only=True)
    torch.set_num_threads(num_threads)
    torch.save(answer_calls(*asked), sys.argv[2])
