"""A folder that was exported for transformers 5.23: a GPST of width 8, its code, and what it said then."""

import json
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_synlm.core import configuration_base
from hf_synlm.core.cache import CACHE
from hf_synlm.hub.flatten import outdated_code
from hf_synlm.hub.verify import verify_export
from tests.helpers.commands import run

FIXTURE = Path(__file__).parents[1] / "hub/fixtures/exported_for_5_23.tar.gz"
OUTDATED = "written for transformers up to 5.23: `synlm export` renews it"
MARGINAL = {"structure_mode": "marginal"}
GENERATE: dict[str, dict[str, Any]] = {"joint": {}, "beams": {"num_beams": 3}, "marginal": MARGINAL}
GENERATE["uncached beams"] = {**MARGINAL, "num_beams": 3, "use_cache": False}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with tarfile.open(FIXTURE) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "exported_for_5_23"


def test_the_package_gives_the_numbers_of_old_code(folder: Path):
    expected = {name: torch.tensor(value) for name, value in json.loads((folder / "expected.json").read_text()).items()}
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    assert type(model).__module__.startswith("hf_synlm.models.")
    ids = torch.tensor([[6, 7, 8, 6, 9, 10, 11, 6, 12]])
    found = {"logits": model(ids).logits, "loss": model(ids, labels=ids).loss, "parse": model.parse(ids).log_probs}
    for name, options in GENERATE.items():
        found[name] = model.generate(ids[:, :4], max_new_tokens=4, pad_token_id=0, **options)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=1e-5, msg=name)


def test_old_code_is_told_and_renewed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    assert f"files, {OUTDATED}\n" in run(capsys, "info", folder)
    report = verify_export(folder, max_new_tokens=2, tolerance=1e-5)
    assert OUTDATED in report.checks[0].detail
    # No configuration had `text_style`. Without the package the old code reads no text in transformers 5.24.
    differing = [check.name for check in report.checks if not check.passed]
    assert (differing == ["AutoConfig"]) == (CACHE == "past_key_values"), report.table()
    run(capsys, "export", folder, "--out", tmp_path / "new")
    report = verify_export(tmp_path / "new", max_new_tokens=2)
    assert report.passed, report.table()
    assert "written for" not in report.table() + run(capsys, "info", tmp_path / "new")


def test_what_the_code_says_itself(folder: Path):
    for newest, said in ((configuration_base.NEWEST_TRANSFORMERS, None), ("5.9", OUTDATED.replace("5.23", "5.9"))):
        (folder / "configuration_base.py").write_text(f'NEWEST_TRANSFORMERS = "{newest}"\n')
        assert outdated_code(folder) == said
    (folder / "configuration_base.py").unlink()
    assert outdated_code(folder) is None
