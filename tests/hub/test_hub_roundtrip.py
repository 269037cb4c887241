"""Export, load without the package, save again: what users of a published model do."""

import copy
import json
import os
import runpy
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hf_synlm import GPSTConfig, GPSTForCausalLM, GPSTModel
from hf_synlm.cli import main
from hf_synlm.hub import export
from hf_synlm.hub.card import fill_card
from hf_synlm.hub.checkpoint import check_complete
from hf_synlm.hub.export import export_model
from hf_synlm.hub.flatten import LICENSE, PACKAGE, flat_files
from hf_synlm.hub.upload import push_to_hub
from hf_synlm.hub.verify import verify_export
from tests.helpers import warm_python
from tests.helpers.refusals import raised, refused
from tests.helpers.scoring_models import model_and_tokenizer, small_gpst, tokenizer_of

pytestmark = pytest.mark.usefixtures("warm_verify")

CHANGE = """
import functools
_forward = GPSTForCausalLM.forward
def _changed(self, *args, **kwargs):
    output = _forward(self, *args, **kwargs)
    output.logits = output.logits + 1e-3
    return output
GPSTForCausalLM.forward = functools.wraps(_forward)(_changed)  # generate reads the names of the arguments
"""
CLASSES = {"AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"}
ALL_CHECKS = {"files", "AutoConfig", "AutoTokenizer", *CLASSES, "parse", "generate"}


@pytest.fixture
def tokenizer() -> Any:
    return copy.deepcopy(tokenizer_of("bpe"))


@pytest.fixture
def model(tokenizer: Any) -> GPSTForCausalLM:
    return small_gpst(tokenizer)


@pytest.fixture
def exported(model, tokenizer, tmp_path: Path) -> Path:
    return export_model(model, tokenizer, tmp_path / "gpst-tiny")


def run_without_package(code: str, *arguments: str, cache: Path) -> str:
    """Run code in a clean process where `import hf_synlm` fails; return what it prints."""
    block = "import sys; sys.modules['hf_synlm'] = None\n"
    command = [sys.executable, "-I", "-c", block + code, *arguments]
    environment = {"HF_HOME": str(cache), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    run = warm_python.run(command, env=environment)
    assert run.returncode == 0, run.stderr
    return run.stdout


class TestExport:
    def test_a_model_without_head_exports_all_auto_classes(self, model, tokenizer, tmp_path: Path):
        folder = export_model(GPSTModel(model.config), tokenizer, tmp_path / "part")
        assert check_complete(folder) == GPSTConfig().auto_map
        report = verify_export(folder)
        assert report.passed, report.table()

    def test_state_dict_is_used(self, model, tokenizer, tmp_path: Path):
        other = GPSTForCausalLM(model.config)
        folder = export_model(model, tokenizer, tmp_path / "given", state_dict=other.state_dict())
        assert [path.name for path in tmp_path.iterdir()] == [folder.name]
        loaded = GPSTForCausalLM.from_pretrained(folder)
        assert all(torch.equal(loaded.state_dict()[name], value) for name, value in other.state_dict().items())

    def test_existing_folder_is_an_error_without_overwrite(self, exported: Path, model, tokenizer):
        before = {file.name: file.read_bytes() for file in exported.iterdir()}
        refused("exists.*overwrite", export_model, model, tokenizer, exported)
        assert {file.name: file.read_bytes() for file in exported.iterdir()} == before
        (exported / "stale.txt").write_text("from before")
        (link := exported.with_name("link")).symlink_to(exported)
        assert export_model(model, tokenizer, link, card="# New\n", overwrite=True) == link
        assert link.is_symlink() and (exported / "README.md").read_text() == "# New\n"
        assert not (exported / "stale.txt").exists()
        os.mkfifo(exported.with_name("pipe"))
        exported.with_name("file").write_text("something else")
        for name in ("pipe", "file"):
            refused("is a file", export_model, model, tokenizer, exported.with_name(name), overwrite=True)
        assert sorted(path.name for path in exported.parent.iterdir()) == ["file", exported.name, "link", "pipe"]

    @pytest.mark.parametrize("step", ["model", "tokenizer", "check"])
    def test_interrupted_export_leaves_nothing(self, step, model, tokenizer, tmp_path: Path, monkeypatch):
        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        owner = {"model": type(model.config), "tokenizer": type(tokenizer), "check": export}[step]
        name = "check_complete" if step == "check" else "save_pretrained"
        monkeypatch.setattr(owner, name, fail)
        raised(KeyboardInterrupt, None, export_model, model, tokenizer, tmp_path / "broken")
        assert not list(tmp_path.iterdir())

    def test_interrupted_overwrite_keeps_the_old_folder(self, exported: Path, model, tokenizer, monkeypatch):
        before = {file.name: file.read_bytes() for file in exported.iterdir()}
        replace = os.replace

        def fail_last(source: str | Path, target: str | Path) -> None:
            if Path(target) == exported and not Path(source).name.endswith(".old.partial"):
                raise OSError("interrupted")
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail_last)
        raised(OSError, "interrupted", export_model, model, tokenizer, exported, overwrite=True)
        assert {file.name: file.read_bytes() for file in exported.iterdir()} == before
        assert [path.name for path in exported.parent.iterdir()] == [exported.name]

    def test_tokenizer_that_does_not_fit_is_an_error(self, model, tokenizer, tmp_path: Path):
        tokenizer.pad_token = "<|SEP|>"
        with pytest.raises(ValueError, match="pad_token_id is 2 in the model's configuration and 4 in the tokenizer"):
            export_model(model, tokenizer, tmp_path / "bad")
        tokenizer.add_tokens([f"extra{index}" for index in range(60)])
        refused("The tokenizer has 390 tokens and the model 330", export_model, model, tokenizer, tmp_path / "bad")
        assert not list(tmp_path.iterdir())

    def test_model_without_code_is_an_error(self, model, tokenizer, tmp_path: Path):
        refused("the code would not be saved", export_model, torch.nn.DataParallel(model), tokenizer, tmp_path / "bad")


def test_older_transformers_is_named_in_one_line(exported: Path, monkeypatch):
    assert "\ntransformers>=5.20,<5.25\n" in (exported / "requirements.txt").read_text()
    monkeypatch.setattr("transformers.__version__", "5.19.1")
    with pytest.raises(ImportError, match="needs transformers 5.20 or later, and 5.19.1 is installed: pip install"):
        runpy.run_path(str(exported / "configuration_base.py"))


def test_the_licence_lies_beside_the_code(exported: Path, model, tmp_path: Path):
    text = (PACKAGE.parent / "LICENSE").read_bytes()
    assert LICENSE.read_bytes() == text == (exported / "LICENSE").read_bytes()
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "LICENSE").write_text("that of the weights")
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "LICENSE").read_text() == "that of the weights"


def test_code_of_your_own_is_in_no_repository_of_code(model, tmp_path: Path):
    model.config.auto_map = {**model.config.auto_map, "AutoModel": "modeling_mine.MyModel"}
    for name, message in {"org/code": r"\['modeling_mine.py'\] is your own code", "code": "no owner"}.items():
        refused(message, export_model, model, None, tmp_path / "out", code_repo=name)
    assert not list(tmp_path.iterdir())


class TestRemote:
    def test_saving_the_remote_model_again_keeps_its_code(self, exported: Path, tmp_path: Path):
        code = """
import sys
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, pipeline
source, target, classifier = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
model.save_pretrained(target)
AutoTokenizer.from_pretrained(source, trust_remote_code=True).save_pretrained(target)
head = AutoModelForSequenceClassification.from_pretrained(target, trust_remote_code=True, num_labels=3)
head.save_pretrained(classifier)
generate = pipeline("text-generation", model=source, trust_remote_code=True)
print(generate("fruit flies", max_new_tokens=3, do_sample=False)[0]["generated_text"])
"""
        again, classifier = tmp_path / "again", tmp_path / "classifier"
        said = run_without_package(code, str(exported), str(again), str(classifier), cache=tmp_path / "cache")
        assert said.splitlines()[-1].startswith("fruit flies")
        for folder in (again, classifier):
            assert check_complete(folder) == GPSTConfig().auto_map
            for file in exported.glob("*.py"):
                assert (folder / file.name).read_bytes() == file.read_bytes(), file.name
        report = verify_export(again)
        assert report.passed, report.table()
        assert (again / "model.safetensors").read_bytes() == (exported / "model.safetensors").read_bytes()
        assert len(json.loads((classifier / "config.json").read_text())["id2label"]) == 3

    def test_smoothed_labels_of_a_remote_model_are_shifted(self, tmp_path: Path):
        """Trainer shifts them for classes that it knows."""
        code = """
import sys
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules."), type(model)
arguments = TrainingArguments(sys.argv[2], report_to="none", use_cpu=True, label_smoothing_factor=0.1)
ids = torch.tensor([[5, 6, 7, 8, 9]])
loss = Trainer(model, arguments).compute_loss(model, {"input_ids": ids, "labels": ids.clone()})
log_probs = model(ids).logits[:, :-1]
expected = -0.9 * log_probs.gather(2, ids[:, 1:, None]).mean() - 0.1 * log_probs.mean()
torch.testing.assert_close(loss, expected)
print("equal")
"""
        model, tokenizer = model_and_tokenizer("on_lstm")
        folder = export_model(model, tokenizer, tmp_path / "on-lstm")
        said = run_without_package(code, str(folder), str(tmp_path / "out"), cache=tmp_path / "cache")
        assert said.splitlines()[-1] == "equal"


class TestVerify:
    def test_changed_code_is_found(self, exported: Path):
        file = exported / "modeling_gpst.py"
        file.write_text(file.read_text() + CHANGE)
        lines = verify_export(exported, max_new_tokens=2).table().splitlines()
        assert [line.split()[1] for line in lines if line.startswith("DIFFERS")] == ["AutoModelForCausalLM"]
        assert "modeling_gpst.py" in lines[0]
        assert verify_export(exported, max_new_tokens=2, tolerance=0.01).passed

    def test_pickles_and_code_that_needs_the_package_are_found(self, exported: Path):
        torch.save({}, exported / "pytorch_model.bin")
        failed = {check.name: check.detail for check in verify_export(exported).checks if not check.passed}
        assert list(failed) == ["files"] and "pytorch_model.bin" in failed["files"]
        file = exported / "trees_spans.py"
        file.write_text(file.read_text() + "\nimport hf_synlm\n")
        refused("trees_spans.py.*hf_synlm", verify_export, exported)

    def test_unusable_folders(self, exported: Path, tmp_path: Path):
        (tmp_path / "empty").mkdir()
        refused("has no config.json", verify_export, tmp_path / "empty")
        (exported / "gpst_chart.py").unlink()
        refused(r"needs \['gpst_chart.py'\]", verify_export, exported)
        config = json.loads((exported / "config.json").read_text())
        (exported / "config.json").write_text(json.dumps({**config, "auto_map": None}))
        refused("has no auto_map", verify_export, exported)


class TestCard:
    RESULT = {
        "task": "language modeling", "dataset": "State of the Union", "split": "test", "metric": "perplexity",
        "value": 123.456, "num_beams": 20, "estimator": "beam marginal",
        "command": "synlm evaluate perplexity in.txt --model runs/mine/model", "dataset_id": "org/sotu",
    }  # fmt: skip

    def test_every_place_is_filled(self, tiny_gpst_config: GPSTConfig):
        stated = {"training_data": "Speeches.", "training_procedure": "Two minutes.", "limits": "- Presidents only."}
        facts = {"repo_id": "org/gpst-tiny", "datasets": ["org/sotu"], "license": "cc0-1.0", "language": "zh"}
        facts |= {"tree": "a tree", "code_url": "https://example.org/hf_synlm"}
        facts["results"] = [self.RESULT]
        text = fill_card(tiny_gpst_config, {**facts, **stated})
        data = ModelCard(text).data
        assert (data.license, data.language, data.library_name) == ("cc0-1.0", "zh", "transformers")
        assert data.pipeline_tag == "text-generation" and data.datasets == ["org/sotu"]
        assert {"custom_code", "hf_synlm", "gpst", "syntactic-language-model"} <= set(data.tags)
        assert data.metrics == ["perplexity"]
        assert data.eval_results[0].metric_name == "perplexity (beam 20, beam marginal)"
        assert data.eval_results[0].source_url == "https://huggingface.co/org/gpst-tiny#results"
        assert "{{" not in text
        parts = ["| 123.5 | 20 | beam marginal |", "in.txt --model org/gpst-tiny\n", "```text\na tree\n```"]
        for part in (*stated.values(), *parts, "part of [hf_synlm](https://example.org/hf_synlm)"):
            assert part in text
        assert text.count('from_pretrained("org/gpst-tiny", trust_remote_code=True)') == 2

    def test_no_licence_language_and_base_model_unless_stated(self, tiny_gpst_config: GPSTConfig):
        data = ModelCard(fill_card(tiny_gpst_config, {"repo_id": "a"})).data
        assert data.license is None and data.language is None
        facts = {"repo_id": "a", "base_model": "org/b", "datasets": ["org/c"], "license": "mit"}
        data = ModelCard(fill_card(tiny_gpst_config, facts)).data
        assert (data.base_model, data.datasets, data.license) == ("org/b", ["org/c"], "mit")

    def test_a_number_needs_its_beam(self, tiny_gpst_config: GPSTConfig):
        result = {key: value for key, value in self.RESULT.items() if key != "num_beams"}
        refused("depends on the beam", fill_card, tiny_gpst_config, {"repo_id": "org/x", "results": [result]})

    @pytest.mark.parametrize("facts", [{}, {"repo_id": "a/x", "licence": "mit"}, {"repo_id": "a/x", "token": "hf_x"}])
    def test_unknown_and_missing_facts(self, tiny_gpst_config: GPSTConfig, facts: dict):
        refused("repo_id", fill_card, tiny_gpst_config, facts)

    def test_card_snippet_runs(self, exported: Path):
        text = (exported / "README.md").read_text()
        code = text.split("```python\n")[1].split("```")[0].replace('"gpst-tiny"', f'"{exported}"')
        exec(compile(code, "README.md", "exec"), {"print": lambda *args: None})


# Name -> model of `scoring_models`, what its configuration has instead.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "lstm": ("lstm", {"num_layers": 2}),
    "rnng_classifier": ("rnng", {"transition_system": "in_order", "composition": "attention"}),
    "on_lstm_classifier": ("on_lstm", {}),
    **{name: (name, {}) for name in ("pcfg_compound", "pcfg_tensor", "pcfg_simple")},
    "awd_lstm": ("palm", {"span_attention": False}),
    "prpn_syd": ("prpn", {"parsing_network": "recurrent"}),
}


@pytest.mark.parametrize("name", ["rnng", "tree_lm", "urnng", "pushdown", "pcfg", "palm", "ordered_memory", *VARIANTS])
def test_every_architecture_is_the_same_without_the_package(name: str, tmp_path: Path):
    base, fields = VARIANTS.get(name, (name, {}))
    model, tokenizer = model_and_tokenizer(base)
    if name in VARIANTS:
        torch.manual_seed(0)
        auto = AutoModelForSequenceClassification if "classifier" in name else AutoModelForCausalLM
        model = auto.from_config(type(model.config)(**{**model.config.to_dict(), **fields})).eval()
    searches = name.startswith(("rnng", "tree_lm", "urnng", "pushdown"))
    folder = export_model(model, tokenizer, tmp_path / name)
    assert check_complete(folder) == type(model.config)().auto_map
    report = verify_export(folder)
    assert report.passed, report.table()
    without = {"parse"} if name in ("awd_lstm", "lstm") else set()
    without |= CLASSES - set(model.config.auto_map)
    assert {check.name for check in report.checks} == ALL_CHECKS - without
    assert not (folder / "modeling_gpst.py").exists()
    card = (folder / "README.md").read_text()
    assert ("parse(" in card) == ("parse" not in without) and ("beam" in card) == searches and "<!--" not in card
    code = card.split("```python\n")[1].split("```")[0].replace(f'"{name}"', f'"{folder}"')
    exec(compile(code, "README.md", "exec"), {"print": lambda *args: None})


def test_incomplete_folder_is_not_pushed(exported: Path):
    (exported / "model.safetensors").unlink()
    refused("no weights", push_to_hub, exported, "org/gpst-tiny")


@pytest.mark.parametrize("name", ["exported_0_1", "exported_before_rooms"])
def test_folders_of_earlier_versions_load_with_and_without_the_package(name: str, tmp_path: Path):
    """An ON-LSTM of version 0.1, and a URNNG of the flat package before it had sub-packages."""
    with tarfile.open(Path(__file__).parent / "fixtures" / f"{name}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / name
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert type(model).__module__.startswith("hf_synlm.models.")
    weights = load_file(folder / "model.safetensors")
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in weights.items())
    report = verify_export(folder)
    assert "not those of hf_synlm" in report.checks[0].detail
    differing = [check.name for check in report.checks if not check.passed]
    # No configuration had `text_style`, and no code the cache's name of transformers 5.24.
    assert differing == ["AutoConfig", "AutoModelForCausalLM", "generate"], report.table()
    assert "written for transformers up to 5.23: `synlm export` renews it" in report.checks[0].detail

    # Exported again, it has today's code.
    renewed = tmp_path / "renewed"
    assert main(["export", str(folder), "--out", str(renewed)]) == 0
    code = {file.name: file.read_text(encoding="utf-8") for file in renewed.glob("*.py")}
    assert code == flat_files(model.config.model_type)
    report = verify_export(renewed, max_new_tokens=2)
    assert report.passed, report.table()
