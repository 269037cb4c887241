# SPDX-License-Identifier: Apache-2.0
"""Check that an exported folder computes the same with and without this package.

`verify_export`, and the command `synlm verify`, loads the folder twice: here, and in a process where `import hf_synlm`
fails. It compares configuration, tokenizer, logits, parses and generated text with its trees. That process runs this
file as a script, so the file imports the package only in the functions that compare.
"""

import functools
import logging
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import constants, snapshot_download
from torch import Tensor

# Of unequal length, so that padding is part of the comparison.
DEFAULT_TEXTS = ("fruit flies like a banana", "the keys to the cabinet are on the table")
_CAUSAL = "AutoModelForCausalLM"


class Check(NamedTuple):
    """One line of a report: what was compared, whether it agrees, and the numbers."""

    name: str
    passed: bool
    detail: str


class VerificationReport(NamedTuple):
    """Result of `verify_export`: the folder, and what was compared, in order."""

    folder: Path
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    def table(self) -> str:
        """The checks as a table for a terminal, one per line, and a closing line."""
        lines = [f"{'ok' if x.passed else 'DIFFERS':8} {x.name:21}  {x.detail}" for x in self.checks]
        verdict = "loads and computes the same" if self.passed else "is NOT the same"
        return "\n".join([*lines, f"{self.folder}: it {verdict} without hf_synlm."])


def verify_export(
    folder: str | os.PathLike,
    *,
    texts: Sequence[str] = DEFAULT_TEXTS,
    max_new_tokens: int = 8,
    tolerance: float = 0.0,
    backbone: str | None = None,
) -> VerificationReport:
    """Compare a model folder with and without this package.

    Args:
        folder: a folder that `export_model` or `save_pretrained` wrote, with a tokenizer.
        texts: texts to tokenize, score, parse and continue.
        max_new_tokens: length of the greedy generation.
        tolerance: largest absolute difference of a number that still passes; 0 asks for equal bits. Trees and
            tokens must always be equal.
        backbone: folder or Hub name of the backbone of an adapter; by default the one that the adapter names.

    Returns:
        The report. Differences are in the report; they raise no error.

    Raises:
        ValueError: if there is no such folder, it has no config.json or no auto_map, it lacks code, weights or a
            tokenizer, or its code imports hf_synlm.
        RuntimeError: if the process without hf_synlm itself fails, with the end of its output.
    """
    from hf_synlm.hub.abilities import declared
    from hf_synlm.hub.checkpoint import check_complete, code_repositories
    from hf_synlm.hub.loading import check_checkpoint

    folder = Path(folder).absolute()
    auto_map = check_complete(folder)
    check_checkpoint(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    # Auto class, method, arguments, and the wanted fields of the output; without fields, the output itself.
    calls: dict[str, Any] = {"AutoConfig": ("AutoConfig", "to_json_string", {"use_diff": False}, ())}
    calls["AutoTokenizer"] = "AutoTokenizer", "__call__", {"text": list(texts)}, ("input_ids",)
    for name in sorted((name for name in auto_map if "Model" in name), key=lambda name: name == _CAUSAL):  # it is last
        calls[name] = name, "__call__", inputs, ("last_hidden_state", "logits")
    parses = _CAUSAL if _CAUSAL in auto_map else "AutoModelForTokenClassification"  # a span parser's
    if declared(transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True), "gives_trees"):
        calls["parse"] = parses, "parse", inputs, ("spans", "labels", "actions", "log_probs", "token_log_probs")
    if _CAUSAL in auto_map:
        calls["generate"] = _CAUSAL, "generate", inputs | greedy, ("sequences", "actions", "spans", "labels")
    asked = str(folder), calls, backbone, torch.get_num_threads()
    # Code that lies in other repositories comes into the cache before the process without network needs it.
    places = [folder, *(snapshot_download(name, allow_patterns="*.py") for name in code_repositories(auto_map))]
    own, without, mask_BT = _answers(*asked), _without_package(*asked), batch["attention_mask"].bool()
    compared = (_compare(name, own[name], without[name], mask_BT, tolerance) for name in calls)
    return VerificationReport(folder, [_check_files(folder, places), *compared])


@torch.random.fork_rng(devices=[])
def _answers(folder: str, calls: Mapping[str, Any], backbone: str | None, num_threads: int) -> dict[str, dict]:
    """By name of a call the fields, and the module of the class in "class"; or what went wrong in "error"."""
    answers: dict[str, dict[str, Any]] = {}
    torch.set_num_threads(num_threads)
    # New heads lack weights on purpose; those of the model are checked before.
    (logger := logging.getLogger("transformers.modeling_utils")).disabled = True

    @functools.lru_cache(1)
    def load(kind: str) -> Any:
        options = {"backbone": backbone} if backbone is not None and "Model" in kind else {}
        return getattr(transformers, kind).from_pretrained(folder, trust_remote_code=True, **options)

    for name, (kind, method, arguments, fields) in calls.items():
        torch.manual_seed(0)  # weights that the folder lacks, such as a new head, are equal in every process
        try:
            with torch.no_grad():
                output = getattr(load(kind), method)(**arguments)
            values = {field: output[field] for field in fields if field in output} if fields else {method: output}
            answers[name] = {"class": type(load(kind)).__module__, **values}
        except Exception as error:  # a finding about the folder; the other calls are still worth an answer
            answers[name] = {"error": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    logger.disabled = False
    return answers


def _without_package(*asked: Any) -> dict[str, dict]:
    """`_answers` of a process without this package, without network, and with an empty cache of code."""
    with tempfile.TemporaryDirectory(prefix="hf_synlm_verify_") as place:
        file = f"{place}/calls.pt"
        torch.save(asked, file)
        # The process does not take part in the distributed run that starts it.
        left_out = ("HF_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        # The cache of the Hub serves code and backbones that lie there.
        environment |= {"HF_HOME": place, "HF_HUB_CACHE": constants.HF_HUB_CACHE, "HF_HUB_OFFLINE": "1"}
        # -I: neither the current folder nor PYTHONPATH nor the user's own packages are on the path.
        command = [sys.executable, "-I", __file__, file]
        # A folder's code may hang.
        run = subprocess.run(command, env=environment, timeout=600, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"The process without hf_synlm ended with {run.returncode}:\n{run.stderr[-4000:]}")
        return torch.load(file, weights_only=True)


def _check_files(folder: Path, places: Sequence[str | Path]) -> Check:
    """Weights are safetensors only; code is compared with the installed package's."""
    from hf_synlm.hub.checkpoint import pickled_files
    from hf_synlm.hub.flatten import all_flat_files, outdated_code

    own, pickled = all_flat_files(), pickled_files(folder)
    code = {file.name: file.read_text(encoding="utf-8") for place in places for file in Path(place).glob("*.py")}
    changed = sorted(name for name in code if own.get(name) != code[name])
    other = f"not those of hf_synlm here: {changed}" if changed else "equal to the package's"
    kind = f"pickled weights: {pickled}" if pickled else "weights in safetensors only"
    details = [f"{len(code)} files of code, {other}", outdated_code(folder), kind]
    # Code of another release is not a fault: what counts is that it computes the same.
    return Check("files", not pickled, "; ".join(filter(None, details)))


def _compare(name: str, own: dict[str, Any], without: dict[str, Any], mask_BT: Tensor, tolerance: float) -> Check:
    if error := own.get("error") or without.get("error"):
        return Check(name, False, f"fails {'with' if 'error' in own else 'without'} hf_synlm: {error}")
    classes = own.pop("class"), without.pop("class")
    differences = {field: _difference(own[field], without.get(field), mask_BT) for field in own}
    words = {0.0: "equal", math.inf: "different"}
    details = [f"{field} {words.get(value, f'max difference {value:.3g}')}" for field, value in differences.items()]
    # The two sides must really have run different copies of the code; tokenizers have none.
    apart = [name.startswith("transformers_modules.") for name in classes] == [False, True]
    details += [] if name == "AutoTokenizer" else ["from package / from folder" if apart else " / ".join(classes)]
    passed = max(differences.values(), default=0.0) <= tolerance and (apart or name == "AutoTokenizer")
    return Check(name, passed, ", ".join(details))


def _difference(own: Any, other: Any, mask_BT: Tensor) -> float:
    """Largest absolute difference of numbers; infinity where anything else differs."""
    if not isinstance(own, Tensor) or not own.is_floating_point() or own.shape != other.shape:
        return 0.0 if (torch.equal(own, other) if isinstance(own, Tensor) else own == other) else math.inf
    if own.shape[:2] == mask_BT.shape:
        own, other = own[mask_BT], other[mask_BT]  # values at padding have no meaning
    same = (own == other) | (own.isnan() & other.isnan())
    # A number on one side and NaN on the other is a difference, however large the tolerance.
    return (own - other).abs().double().masked_fill(same, 0.0).nan_to_num(nan=math.inf).max().item()


if __name__ == "__main__":
    sys.modules["hf_synlm"] = None  # type: ignore[assignment]  # from here on, `import hf_synlm` is an ImportError
    # Each Auto class would parse all files of the folder again.
    transformers.dynamic_module_utils.get_imports = functools.cache(transformers.dynamic_module_utils.get_imports)
    torch.save(_answers(*torch.load(sys.argv[1], weights_only=True)), sys.argv[1])
