"""All families with the installed transformers: the numbers are those of the pinned version, with and without hf_synlm.

The suite is short, so that every version of transformers can have it: `.ci/run` runs it with the newest one if that is
not the pinned one, and the workflow every night with the oldest, too. `python -m tests.versions.test_families` writes
the numbers anew.
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_synlm.core.configuration_base import NEWEST_TRANSFORMERS, OLDEST_TRANSFORMERS
from tests.helpers import warm_python
from tests.helpers.architectures import ARCHITECTURES, batch, build, labeled, without_dropout
from tests.versions import family_calls

FAMILIES = (*ARCHITECTURES, "rnng, in-order", "tree_lm, gpt2", "pcfg, sparse")
GOLDEN = Path(__file__).parents[1] / "goldens/versions/answers.json"


def model_of(name: str) -> Any:
    """A small model whose weights do not depend on how transformers makes them."""
    model = build(name, **without_dropout(name))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in sorted(model.named_parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=draw))
            if parameter_name.endswith("norm.weight"):
                parameter.abs_().add_(0.3)
    return model


def batches_of(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows without trees, and rows that train."""
    rows = {key: value for key, value in batch(name, 6, 6).items() if key in ("input_ids", "attention_mask")}
    return rows, labeled(name, 6, 6)


def differences(found: dict[str, list[float]], expected: dict[str, list[float]]) -> list[str]:
    """Calls whose numbers differ, by more than 1e-5 of their size."""
    assert found.keys() == expected.keys()
    return [name for name in found if found[name] != pytest.approx(expected[name], rel=1e-5, abs=1e-5)]


@functools.cache
def expected() -> dict[str, Any]:
    return json.loads(GOLDEN.read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_package(name: str) -> None:
    assert not differences(family_calls.answers(model_of(name), *batches_of(name)), expected()[name])


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of saved models in a process where `import hf_synlm` fails."""
    folder, cache = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("cache")
    for name in FAMILIES:
        model_of(name).save_pretrained(folder / name)
        torch.save(batches_of(name), folder / name / "batches.pt")
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    warm_python.run([sys.executable, "-I", family_calls.__file__, str(folder)], env=environment, check=True)
    return json.loads((folder / "answers.json").read_text())


@pytest.mark.parametrize("name", FAMILIES)
def test_remote_code(name: str, remote: dict[str, Any]) -> None:
    assert not differences(remote[name], expected()[name])


def test_the_versions_are_the_same_everywhere() -> None:
    oldest, newest = OLDEST_TRANSFORMERS, NEWEST_TRANSFORMERS
    for file, said in (
        ("newest.txt", f"transformers=={newest}."),
        ("docs/what-works.md", f"| transformers {oldest} to {newest} |"),
        (".github/workflows/ci.yml", f'"versions VERSION={oldest}.0"'),
        (".github/workflows/ci.yml", f' transformers: ["{oldest}", '),
        ("docs/getting-started.md", f"transformers {oldest} are the oldest"),
        ("pyproject.toml", f'"transformers>={oldest},<6"'),
        ("hf_synlm/hub/card_template.md", f"`transformers` {oldest} or later"),
    ):
        assert said in (GOLDEN.parents[3] / file).read_text(), file


if __name__ == "__main__":
    answers = {name: family_calls.answers(model_of(name), *batches_of(name)) for name in FAMILIES}
    GOLDEN.parent.mkdir(exist_ok=True)
    lines = [f' "{name}": {json.dumps(found)}' for name, found in answers.items()]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
