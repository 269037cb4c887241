"""Ways to start training: `accelerate launch` with its files, with a module, and `synlm train`."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine.run import make_accelerator
from tests.helpers import training_runs, warm_python
from tests.helpers.commands import fail, run
from tests.helpers.refusals import refused

FILES = sorted((training_runs.PACKAGE_FILES / "accelerate").glob("*.yaml"))


def flags(output_dir: Path) -> list[str]:
    """A run of two steps on a few sentences, with a checkpoint."""
    files = training_runs.sample_files(output_dir.parent, "raw", train=120, valid=120)
    return [
        *("--config", "gpst_tiny", "--output-dir", str(output_dir), "--config-overrides", training_runs.SMALL_GPST),
        *("--train-files", files["train"], "--validation-files", files["valid"], "--max-train-steps", "2"),
        *("--one-sentence-per-line", "--tokenizer-vocab-size", "200", "--context-length", "24"),
        *("--validation-trees", "none", "--final-report", "False", "--logging-steps", "1"),
        *("--checkpointing-steps", "1", "--evaluation-steps", "0"),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_read_and_name_their_command(path: Path) -> None:
    config = load_config_from_file(str(path))
    kinds = {"cpu": "NO", "one_gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type == DistributedType(kinds[path.stem])
    assert config.mixed_precision == "no"  # --precision decides
    assert config.num_processes == (8 if path.stem in ("ddp", "fsdp2") else 1)
    assert f"accelerate launch --config_file hf_synlm/training/accelerate/{path.name}" in path.read_text()
    page = (training_runs.ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"accelerate launch --config_file hf_synlm/training/accelerate/{path.name}" in page


def test_layers_that_are_sharded_exist(tiny_gpst_config: GPSTConfig) -> None:
    values = yaml.safe_load((training_runs.PACKAGE_FILES / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    named = set(values["fsdp_transformer_layer_cls_to_wrap"].split(","))
    model = GPSTForCausalLM(tiny_gpst_config)
    assert named == set(model._no_split_modules)
    assert named <= {type(module).__name__ for module in model.modules()}


def test_launch(tmp_path: Path) -> None:
    """A program as a module, on two processes that meet by gloo, in bfloat16."""
    program = ("--num_processes", "2", "--main_process_port", "0", "-m", "hf_synlm.training.programs.pretrain_gpst")
    file = str(training_runs.PACKAGE_FILES / "accelerate" / "ddp.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", file, *program]
    cache = str(tmp_path / "cache")
    done = warm_python.run(
        [*command, *flags(tmp_path / "out")], env=training_runs.environment(cache), cwd=training_runs.ROOT, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert training_runs.results_of(tmp_path / "out")["step"] == 2
    state = (tmp_path / "out" / "step_1" / "training_state.json").read_text()
    assert re.search(r'"num_processes": 2\b', state)
    assert len(list((tmp_path / "out" / "step_1").glob("random_states_*.pkl"))) == 2


def test_synlm_train_needs_only_the_package(tmp_path: Path) -> None:
    """Files of the wheel alone: a copy of the package, far from the repository."""
    shutil.copytree(
        training_runs.ROOT / "hf_synlm", tmp_path / "site" / "hf_synlm", ignore=shutil.ignore_patterns("__pycache__")
    )
    variables = {**os.environ, "PYTHONPATH": str(tmp_path / "site"), "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    start = "import sys; from hf_synlm.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "train", "gpst", *flags(tmp_path / "out")]
    done = warm_python.run(command, env=variables, cwd=tmp_path, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert training_runs.results_of(tmp_path / "out")["step"] == 2


def test_synlm_train_shows_help_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    programs = {"gpst", "rnng", "tree-lm", "urnng", "pushdown", "recurrent", "treereg", "tree-planting"}
    assert programs | {"glue", "summarization", "induction"} <= set(run(capsys, "train", "--help").split())
    shown = " ".join(run(capsys, "train", "rnng", "--help").split())
    assert "usage: synlm train rnng" in shown and "Train RNNG, or an LSTM" in shown and "--max-batch-actions" in shown
    assert "There is no config file" in fail(capsys, "train", "gpst", "--config", "gpst_tinny", "--output-dir", "x")


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without GPUs")
def test_fsdp_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate makes something else of it on CPUs, without a word; the scripts have one."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    refused("FSDP", make_accelerator, TrainingArguments(output_dir="x"))
    training_runs.reset_accelerate()
