"""The files for `accelerate launch`: each is read by accelerate, and launched where this machine can."""

import re
import sys
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from training_runs import TRAINING, launch, results_of

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.data.samples import sample_path
from hf_synlm.training.arguments import TrainingArguments
from hf_synlm.training.run import make_accelerator

FILES = sorted((TRAINING / "accelerate").glob("*.yaml"))
SMALL = "hidden_size=32,composition_size=32,composition_intermediate_size=64,score_size=16,parser_size=32"


def command(name: str, output_dir: Path, *more: str) -> list[str]:
    folder = output_dir.parent
    for part in ("train", "valid"):
        lines = sample_path(f"raw.{part}.txt").read_text(encoding="utf-8").splitlines()[:20]
        (folder / f"{part}.txt").write_text("\n".join(lines), encoding="utf-8")
    return [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(TRAINING / "accelerate" / f"{name}.yaml"), *more),
        *(str(TRAINING / "pretrain_gpst.py"), "--config", str(TRAINING / "configs" / "gpst_tiny.yaml")),
        *("--output_dir", str(output_dir), "--config_overrides", SMALL, "--max_train_steps", "2"),
        *("--train_files", f"{folder}/train.txt", "--validation_files", f"{folder}/valid.txt"),
        *("--one_sentence_per_line", "--tokenizer_vocab_size", "200", "--context_length", "24"),
        *("--validation_trees", "none", "--final_report", "False", "--logging_steps", "1"),
        *("--checkpointing_steps", "1", "--evaluation_steps", "0"),
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_files_are_read_and_name_their_command(path: Path) -> None:
    config = load_config_from_file(str(path))
    kinds = {"cpu": "NO", "one_gpu": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP"}
    assert config.distributed_type == DistributedType(kinds[path.stem])
    assert config.mixed_precision == ("no" if path.stem == "cpu" else "bf16")
    assert config.num_processes == (8 if path.stem in ("ddp", "fsdp2") else 1)
    assert f"accelerate launch --config_file training/accelerate/{path.name}" in path.read_text()
    readme = (TRAINING / "README.md").read_text(encoding="utf-8")
    assert f"accelerate launch --config_file training/accelerate/{path.name}" in readme


def test_layers_that_are_sharded_exist(tiny_gpst_config: GPSTConfig) -> None:
    values = yaml.safe_load((TRAINING / "accelerate" / "fsdp2.yaml").read_text())["fsdp_config"]
    named = set(values["fsdp_transformer_layer_cls_to_wrap"].split(","))
    model = GPSTForCausalLM(tiny_gpst_config)
    assert named == set(model._no_split_modules)
    assert named <= {type(module).__name__ for module in model.modules()}


@pytest.mark.parametrize(("name", "more", "processes"), [("cpu", (), 1), ("ddp", ("--num_processes", "2"), 2)])
def test_launch(name: str, more: tuple[str, ...], processes: int, tmp_path: Path) -> None:
    """For real; the second one in bfloat16, on two processes that meet by gloo."""
    port = ("--main_process_port", "0") if processes > 1 else ()
    done = launch(command(name, tmp_path / "out", *more, *port), str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert results_of(tmp_path / "out")["step"] == 2
    state = (tmp_path / "out" / "step_1" / "training_state.json").read_text()
    assert re.search(rf'"num_processes": {processes}\b', state)
    assert len(list((tmp_path / "out" / "step_1").glob("random_states_*.pkl"))) == processes


@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without GPUs")
def test_fsdp_needs_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate makes something else of it on CPUs, without a word; the scripts have one."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match="The launcher asks for FSDP, and accelerate makes .* of it"):
        make_accelerator(TrainingArguments(output_dir="x"))
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.mark.slow
@pytest.mark.skipif(torch.accelerator.is_available(), reason="is about machines without GPUs")
def test_launched_fsdp_needs_gpus(tmp_path: Path) -> None:
    """Accelerate makes DDP of it on CPUs, without a word; the script has one."""
    more = ("--num_processes", "2", "--main_process_port", "0")
    done = launch(command("fsdp2", tmp_path / "out", *more), str(tmp_path / "cache"))
    assert done.returncode != 0
    assert "ValueError: The launcher asks for FSDP, and accelerate makes" in done.stderr
    assert "Launch with training/accelerate/ddp.yaml" in done.stderr
    assert not (tmp_path / "out").exists()
