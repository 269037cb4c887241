"""The command for GPUs: results are written as they come, and a failure costs one result."""

import json

import pytest
import torch
from benchmarks import gpu
from benchmarks.sides import measure, origin


def test_results_are_written_as_they_come(tmp_path):
    results = gpu.Results(tmp_path / "gpu.jsonl", "cpu")
    results.attempt("search", "good", lambda: measure(lambda: torch.ones(3).sum(), 2))
    results.attempt("search", "bad", lambda: {"ms": 1 / 0})
    first, second = (json.loads(line) for line in results.path.read_text().splitlines())
    assert first["name"] == "good" and first["ms"] > 0
    assert second["error"] == "ZeroDivisionError: division by zero"


def test_an_origin_names_machine_versions_and_commit():
    found = origin()
    assert found["torch"] == torch.__version__ and found["device"] == "cpu"
    assert all(found[name] for name in ("machine", "python", "transformers", "hf_synlm", "commit"))


def test_a_missing_gpu_is_said(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        gpu.main(["training"])
    assert "rehearse with --device cpu" in capsys.readouterr().err
