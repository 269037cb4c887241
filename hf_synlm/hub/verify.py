# SPDX-License-Identifier: Apache-2.0
"""Check that an exported folder computes the same with and without this package.

`verify_export`, and the command `synlm verify`, loads the folder twice, here and in a process where `import hf_synlm`
fails, and compares configuration, tokenizer, logits, parses and generated text with its trees.
"""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import hf_synlm
from hf_synlm.hub.abilities import declared
from hf_synlm.hub.checkpoint import check_complete, code_repositories, pickled_files
from hf_synlm.hub.flatten import all_flat_files, outdated_code
from hf_synlm.hub.loading import check_checkpoint
from hf_synlm.hub.probe import Call, answer_calls, run_without_package

# Of unequal length, so that padding is part of the comparison.
DEFAULT_TEXTS = ("fruit flies like a banana", "the keys to the cabinet are on the table")
_CAUSAL = "AutoModelForCausalLM"


@dataclass(frozen=True)
class Check:
    """One line of a report: what was compared, whether it agrees, and the numbers."""

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class VerificationReport:
    """Result of `verify_export`: the folder, and what was compared, in order."""

    folder: Path
    checks: Sequence[Check]

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    def table(self) -> str:
        """The checks as a table for a terminal, one per line, and a closing line."""
        width = max(len(check.name) for check in self.checks)
        lines = [f"{'ok' if x.passed else 'DIFFERS':8} {x.name:{width}}  {x.detail}" for x in self.checks]
        count = sum(check.passed for check in self.checks)
        verdict = "loads and computes the same without hf_synlm" if self.passed else "is NOT the same without hf_synlm"
        return "\n".join([*lines, f"{self.folder}: {count} of {len(lines)} checks passed; it {verdict}."])


def verify_export(
    folder: str | os.PathLike,
    *,
    texts: Sequence[str] = DEFAULT_TEXTS,
    num_beams: int | None = None,
    max_new_tokens: int = 8,
    tolerance: float = 0.0,
    backbone: str | None = None,
) -> VerificationReport:
    """Compare a model folder with and without this package.

    Args:
        folder: what `export_model` or `save_pretrained` wrote, with a tokenizer.
        texts: what is tokenized, scored, parsed and continued.
        num_beams: beam of `parse`; by default the model's own.
        max_new_tokens: length of the greedy generation.
        tolerance: largest absolute difference of a number that still passes; 0 asks for equal bits. Trees and
            tokens must always be equal.
        backbone: folder or Hub name of the backbone of an adapter; by default the one that the adapter names.

    Returns:
        The report. Differences are in it; they do not raise.

    Raises:
        ValueError: if there is no such folder, it has no config.json or no auto_map, it lacks code, weights or a
            tokenizer, or its code imports hf_synlm.
        RuntimeError: if the process without hf_synlm itself fails, with the end of what it wrote.
    """
    folder = Path(folder).absolute()
    auto_map = check_complete(folder)
    check_checkpoint(folder)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    beam = {"num_beams": num_beams} if declared(config, "searches") else {}
    greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    classes = sorted((name for name in auto_map if "Model" in name), key=lambda name: name == _CAUSAL)  # that one last
    calls: dict[str, Call] = {
        "AutoConfig": ("AutoConfig", "to_json_string", {"use_diff": False}, ()),
        "AutoTokenizer": ("AutoTokenizer", "__call__", {"text": list(texts)}, ("input_ids",)),
        **{name: (name, "__call__", inputs, ("last_hidden_state", "logits")) for name in classes},
        "parse": (_CAUSAL, "parse", {**inputs, **beam}, ("spans", "labels", "actions", "log_probs", "token_log_probs")),
        "generate": (_CAUSAL, "generate", {**inputs, **greedy}, ("sequences", "actions", "spans", "labels")),
    }
    if not declared(config, "gives_trees"):
        del calls["parse"]
    if backbone is not None and os.path.isdir(backbone):
        backbone = os.path.abspath(backbone)  # the other process has a working folder of its own
    options = {} if backbone is None else {"backbone": backbone}
    # The code that lies on the Hub, of which the other process has no network to download it.
    places = [Path(snapshot_download(name, allow_patterns="*.py")) for name in code_repositories(auto_map)]
    without = run_without_package(str(folder), calls, options, constants.HF_HUB_CACHE if places else None)
    with torch.random.fork_rng(devices=[]):
        own = answer_calls(str(folder), calls, options)
    compared = [_compare(name, own[name], without[name], batch["attention_mask"].bool(), tolerance) for name in calls]
    return VerificationReport(folder, [_check_files(folder, [folder, *places]), *compared])


def _check_files(folder: Path, places: Sequence[Path]) -> Check:
    """Weights are safetensors only; code is compared with the installed package's."""
    own = all_flat_files()
    code = sorted(file for place in places for file in place.glob("*.py"))
    changed = [file.name for file in code if own.get(file.name) != file.read_text(encoding="utf-8")]
    pickled = pickled_files(folder)
    detail = f"{len(code)} files of code, "
    detail += f"not those of hf_synlm {hf_synlm.__version__}: {changed}" if changed else "equal to the package's"
    detail += f"; {outdated}" if (outdated := outdated_code(folder)) else ""
    detail += f"; pickled weights: {pickled}" if pickled else "; weights in safetensors only"
    # Code of another release is not a fault: what counts is that it computes the same.
    return Check("files", not pickled, detail)


def _compare(name: str, own: dict[str, Any], without: dict[str, Any], mask_BT: Tensor, tolerance: float) -> Check:
    for place, found in (("with", own), ("without", without)):
        if "error" in found:
            return Check(name, False, f"fails {place} hf_synlm: {found['error'].strip().splitlines()[-1]}")
    own_class, other_class = own.pop("class"), without.pop("class")
    differences = {field: _difference(own[field], without.get(field), mask_BT) for field in own}
    words = {0.0: "equal", math.inf: "different"}
    details = [f"{field} {words.get(value, f'max difference {value:.3g}')}" for field, value in differences.items()]
    passed = all(value <= tolerance for value in differences.values())
    if name != "AutoTokenizer":
        # The two sides must really have run different copies of the code.
        apart = own_class.startswith("hf_synlm.") and other_class.startswith("transformers_modules.")
        details.append("from package / from folder" if apart else f"{own_class} / {other_class}")
        passed &= apart
    return Check(name, passed, ", ".join(details))


def _difference(own: Any, other: Any, mask_BT: Tensor) -> float:
    """Largest absolute difference of numbers; infinity where anything else differs."""
    if not isinstance(own, Tensor) or not own.is_floating_point():
        equal = torch.equal(own, other) if isinstance(own, Tensor) else own == other
        return 0.0 if equal else math.inf
    if own.shape != other.shape:
        return math.inf
    if own.shape[:2] == mask_BT.shape:
        own, other = own[mask_BT], other[mask_BT]  # values at padding have no meaning
    same = (own == other) | (own.isnan() & other.isnan())
    # A number on one side and NaN on the other is a difference, however large the tolerance.
    return (own - other).abs().double().masked_fill(same, 0.0).nan_to_num(nan=math.inf).max().item()
