"""The names that users may rely on, and that every public argument and result is typed."""

from __future__ import annotations

import ast
import importlib.resources
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import hf_synlm

PACKAGE = Path(hf_synlm.__file__).parent
FILES = sorted(file for file in PACKAGE.rglob("*.py") if not re.match(r"_(?!_)", file.name))

# Taking a name out of this list, or renaming one, breaks users: write it in CHANGELOG.md.
PUBLIC_NAMES = {
    "GPSTConfig",
    "GPSTForCausalLM",
    "GPSTForSequenceClassification",
    "GPSTModel",
    "GPSTPreTrainedModel",
    "LSTMConfig",
    "LSTMForCausalLM",
    "LSTMModel",
    "LSTMPreTrainedModel",
    "ONLSTMConfig",
    "ONLSTMForCausalLM",
    "ONLSTMForSequenceClassification",
    "ONLSTMModel",
    "ONLSTMPreTrainedModel",
    "PRPNConfig",
    "PRPNForCausalLM",
    "PRPNForSequenceClassification",
    "PRPNModel",
    "PRPNPreTrainedModel",
    "PaLMConfig",
    "PaLMForCausalLM",
    "PaLMForSequenceClassification",
    "PaLMModel",
    "PaLMPreTrainedModel",
    "ParseOutput",
    "RNNGConfig",
    "RNNGForCausalLM",
    "RNNGForSequenceClassification",
    "RNNGModel",
    "RNNGPreTrainedModel",
    "SyntacticClassifierOutput",
    "SyntacticLMOutput",
    "SyntacticModelOutput",
}
AUTO_CLASSES = {
    "AutoModel": (AutoModel, "GPSTModel"),
    "AutoModelForCausalLM": (AutoModelForCausalLM, "GPSTForCausalLM"),
    "AutoModelForSequenceClassification": (AutoModelForSequenceClassification, "GPSTForSequenceClassification"),
}


def test_names_are_pinned():
    assert set(hf_synlm.__all__) == PUBLIC_NAMES
    assert len(hf_synlm.__all__) == len(set(hf_synlm.__all__))


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_names_exist(name: str):
    assert hasattr(hf_synlm, name)


def test_version_is_the_one_of_the_project():
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert hf_synlm.__version__ == project["version"]


def test_package_carries_its_type_marker_and_samples():
    files = importlib.resources.files("hf_synlm")
    assert files.joinpath("py.typed").is_file()
    samples = {entry.name for entry in files.joinpath("data", "samples").iterdir()}
    assert {"NOTICE.txt"} < samples, "the embedded text must travel with its licence notice"


def test_config_is_registered():
    assert type(AutoConfig.for_model("gpst")) is hf_synlm.GPSTConfig
    assert hf_synlm.GPSTConfig._auto_class == "AutoConfig"


@pytest.mark.parametrize("auto_name", sorted(AUTO_CLASSES))
def test_model_is_registered_both_ways(auto_name: str, tiny_gpst_config):
    auto_class, name = AUTO_CLASSES[auto_name]
    own = getattr(hf_synlm, name)
    with torch.device("meta"):
        model = auto_class.from_config(tiny_gpst_config)
    assert type(model) is own, "local use needs no trust_remote_code"
    assert own._auto_class == auto_name, "saving copies the code and fills auto_map"
    assert tiny_gpst_config.auto_map[auto_name] == f"{own.__module__.rpartition('.')[2]}.{name}"


def public_functions(file: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        body = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        if prefix.startswith("_"):
            continue
        for item in body:
            if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)) and not item.name.startswith("_"):
                yield prefix + item.name, item


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_public_functions_are_annotated(file: Path):
    found = []
    for name, node in public_functions(file):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        found += [
            f"{name}: {argument.arg}"
            for argument in arguments
            if argument.annotation is None and argument.arg not in {"self", "cls"}
        ]
        if node.returns is None:
            found.append(f"{name}: no return annotation")
    assert not found, f"{file.relative_to(PACKAGE)}:\n  " + "\n  ".join(found)
