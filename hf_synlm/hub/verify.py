"""Check that an exported folder computes the same with and without this package.

`verify_export`, and the command `synlm verify`, loads the folder twice, here and in a clean process where
`import hf_synlm` fails, and compares configuration, tokenizer, logits, parses and generated text with its trees.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

import hf_synlm
from hf_synlm.hub.checkpoint import check_checkpoint, pickled_files
from hf_synlm.hub.export import check_complete
from hf_synlm.hub.flatten import flat_files
from hf_synlm.hub.probe import probe_folder, run_without_package
from hf_synlm.models import ARCHITECTURES

DEFAULT_TEXTS = ("fruit flies like a banana", "the keys to the cabinet are on the table")
# Lengths of the rows of the default input: unequal, so that padding is part of the comparison.
DEFAULT_LENGTHS = (6, 4)


@dataclass(frozen=True)
class Check:
    """One line of a report: what was compared, whether it agrees, and the numbers."""

    name: str
    passed: bool
    detail: str


@dataclass
class VerificationReport:
    """Result of `verify_export`.

    Fields:
        folder: the folder that was checked.
        checks: what was compared, in order.
    """

    folder: Path
    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON."""
        return {"folder": str(self.folder), "passed": self.passed, "checks": [asdict(check) for check in self.checks]}

    def table(self) -> str:
        """The checks as a table for a terminal, one per line, and a closing line."""
        width = max(len(check.name) for check in self.checks)
        lines = [
            f"{'ok' if check.passed else 'DIFFERS':8} {check.name:{width}}  {check.detail}" for check in self.checks
        ]
        count = sum(check.passed for check in self.checks)
        verdict = "loads and computes the same without hf_synlm" if self.passed else "is NOT the same without hf_synlm"
        return "\n".join([*lines, f"{self.folder}: {count} of {len(self.checks)} checks passed; it {verdict}."])


def verify_export(
    folder: str | os.PathLike,
    *,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    texts: Sequence[str] = DEFAULT_TEXTS,
    num_beams: int | None = None,
    max_new_tokens: int = 8,
    tolerance: float = 0.0,
    timeout_seconds: float = 600.0,
) -> VerificationReport:
    """Compare a model folder with and without this package.

    For the clean process see `run_without_package`.

    Args:
        folder: what `export_model` or `save_pretrained` wrote.
        input_ids: [B, T] tokens for the models; by default two rows of unequal length, padded on the left.
        attention_mask: [B, T], 1 = token; by default 1 wherever `input_ids` are given.
        texts: texts for the tokenizer.
        num_beams: beam of `parse`; by default the model's own.
        max_new_tokens: length of the greedy generation.
        tolerance: largest absolute difference of a number that still passes; 0 asks for equal bits. Trees and
            tokens must always be equal.
        timeout_seconds: limit for the clean process.

    Returns:
        The report. Differences are in it; they do not raise.

    Raises:
        ValueError: when there is no such folder, or it has no config.json, no auto_map, or lacks code or weights.
        RuntimeError: when the clean process itself fails, with the end of what it wrote.
    """
    folder = Path(folder).absolute()
    auto_map = check_complete(folder)
    check_checkpoint(folder)
    if input_ids is None:
        input_ids, attention_mask = _default_inputs(folder)
    elif attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    request = {
        "auto_map": auto_map,
        "texts": list(texts),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "num_beams": num_beams,
        "max_new_tokens": max_new_tokens,
        "seed": 0,
    }
    without = run_without_package("verify", folder, request, timeout_seconds)
    with torch.random.fork_rng(devices=[]):
        own = probe_folder(str(folder), request)
    report = VerificationReport(folder, [_check_files(folder)])
    report.checks += [_compare(name, own[name], without[name], tolerance) for name in own]
    return report


def encode_texts(folder: str | os.PathLike, texts: Sequence[str]) -> dict[str, Any]:
    """Arguments that make `verify_export` read your own texts.

    Args:
        folder: the model folder.
        texts: the texts, at least one.

    Returns:
        `input_ids` and `attention_mask` [B, T], padded on the left, and `texts`.

    Raises:
        ValueError: when the folder is not complete, or its tokenizer cannot be loaded.
    """
    check_complete(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True, padding_side="left")
        batch = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)
    except (OSError, KeyError) as error:
        raise ValueError(f"{str(folder)!r} has no tokenizer that reads texts: {error}") from error
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "texts": list(texts)}


def _default_inputs(folder: Path) -> tuple[Tensor, Tensor]:
    """Token ids [B, T] spread over the vocabulary, special tokens left out, and their mask."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    special = {value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    ordinary = [token for token in range(config.vocab_size) if token not in special]
    longest, count = max(DEFAULT_LENGTHS), sum(DEFAULT_LENGTHS)
    chosen = [ordinary[(7 * index + 3) * len(ordinary) // (7 * count + 3)] for index in range(count)]
    ids = torch.full((len(DEFAULT_LENGTHS), longest), config.pad_token_id or 0)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(DEFAULT_LENGTHS):
        start = sum(DEFAULT_LENGTHS[:row])
        ids[row, longest - length :] = torch.tensor(chosen[start : start + length])
        mask[row, longest - length :] = 1
    return ids, mask


def _check_files(folder: Path) -> Check:
    """Weights are safetensors only; code is compared with the installed package's."""
    pickled = pickled_files(folder)
    code = sorted(folder.glob("*.py"))
    own: dict[str, str] = {}
    for name in ARCHITECTURES:
        own |= flat_files(name) if (folder / f"modeling_{name}.py").is_file() else {}
    changed = [file.name for file in code if own.get(file.name) != file.read_text(encoding="utf-8")]
    detail = f"{len(code)} files of code, "
    detail += f"not those of hf_synlm {hf_synlm.__version__}: {changed}" if changed else "equal to the package's"
    detail += f"; pickled weights: {pickled}" if pickled else "; weights in safetensors only"
    # Code of another release is no fault: what counts is that it computes the same.
    return Check("files", not pickled, detail)


def _compare(name: str, own: dict[str, Any], without: dict[str, Any], tolerance: float) -> Check:
    for place, result in (("with", own), ("without", without)):
        if "error" in result:
            return Check(name, False, f"fails {place} hf_synlm: {result['error'].strip().splitlines()[-1]}")
    passed, details = True, []
    for key, value in own["values"].items():
        other = without["values"][key]
        if key == "class":
            # The two sides must really have run different copies of the code.
            equal = value.startswith("hf_synlm.") and other.startswith("transformers_modules.")
            detail = "from package / from folder" if equal else f"{value} / {other}"
        elif isinstance(value, Tensor) and value.is_floating_point():
            equal, detail = _compare_numbers(value, other, tolerance)
        else:
            equal = torch.equal(value, other) if isinstance(value, Tensor) else value == other
            detail = "equal" if equal else "different"
        passed &= equal
        details.append(f"{key} {detail}")
    return Check(name, passed, ", ".join(details))


def _compare_numbers(own: Tensor, without: Tensor, tolerance: float) -> tuple[bool, str]:
    if own.shape != without.shape:
        return False, f"has shape {list(own.shape)} with and {list(without.shape)} without hf_synlm"
    same = (own == without) | (own.isnan() & without.isnan())
    difference = torch.where(same, torch.zeros_like(own), (own - without).abs()).double()
    # A number on one side and NaN on the other is a difference, however large the tolerance.
    largest = difference.nan_to_num(nan=float("inf")).max().item() if own.numel() else 0.0
    return largest <= tolerance, f"max difference {largest:.3g}"
