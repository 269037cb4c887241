"""How fast a run is, what it is compared with, where it ends, what it records, and in which precision it computes."""

import copy
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import GPSTConfig, GPSTForCausalLM
from hf_synlm.training.arguments.base import TrainingArguments
from hf_synlm.training.engine import checkpoints, run as common, samplers
from hf_synlm.training.engine.speed import SpeedMeter, for_bar, peak_tflops
from hf_synlm.training.engine.steps import StepReport
from hf_synlm.training.programs.pretrain_gpst import GPSTRecipe
from tests.helpers.refusals import refused
from tests.helpers.training_runs import reset_accelerate
from tests.training.test_training_loop import fresh_accelerate, gpst_rows, losses, make_run, train  # noqa: F401

TOKENS = int(gpst_rows()["attention_mask"].sum())  # of a step


# ---------------------------------------------------------------------------------------------- speed
def test_peaks_are_found_by_name() -> None:
    names = {
        "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756, "NVIDIA A100-SXM4-80GB": 312, "NVIDIA L40S": 362,
        "NVIDIA A10G": 70, "NVIDIA RTX A1000": None, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
    }  # fmt: skip
    assert {name: peak_tflops(name) for name in names} == names


def test_speed_of_all_processes_and_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 2.0, 3.0, 5.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr("torch.cuda.max_memory_allocated", lambda: 3 * 2**29)
    meter = SpeedMeter(SimpleNamespace(num_processes=2, device=torch.device("cuda")), flops_per_token=1e9)
    for _ in range(2):
        meter.add(StepReport({}, torch.zeros(()), 40_000, 0, seconds=0.0, waited=0.5))
    with meter.paused():
        pass
    speed = meter.read()  # 80,000 tokens in 4 seconds
    assert speed == pytest.approx(
        {"tokens_per_second": 20_000, "tokens_per_second_per_device": 10_000, "tflops_per_device": 10.0,
         "model_flop_utilization": 10 / 989, "memory_gib": 1.5, "data_wait": 0.25}
    )  # fmt: skip
    assert meter.overall() == {"tokens_per_second": 20_000}
    shown = {"tokens/s": "20000", "per device": "10000", "TFLOP/s": "10", "MFU": "1.0%", "GiB": "1.5"}
    assert for_bar(speed) == {**shown, "data wait": "25%"}
    one = {"tokens_per_second": 5.0, "tokens_per_second_per_device": 5.0, "data_wait": 0.0}
    assert for_bar(one) == {"tokens/s": "5", "data wait": "0%"}


def test_operations_of_a_token() -> None:
    """Those that docs/results.md counts as products; GPT-2: 6 for a weight, and its attention."""
    recipe: Any = SimpleNamespace(data=SimpleNamespace(context_length=1024))
    with torch.device("meta"):
        models = {name: GPSTForCausalLM(GPSTConfig.from_preset(f"gpst-{name}")) for name in ("small", "medium")}
        gpt2 = GPT2LMHeadModel(GPT2Config())
    found = {name: GPSTRecipe.flops_per_token(recipe, model) for name, model in models.items()}
    assert found == pytest.approx({"small": 1.64e9, "medium": 4.34e9}, rel=0.02)
    matrices = gpt2.num_parameters() - gpt2.transformer.wpe.weight.numel()
    assert GPSTRecipe.flops_per_token(recipe, gpt2) == pytest.approx(6 * matrices + 12 * 12 * 768 * 1024)


# ---------------------------------------------------------------------------------------------- limits and profiles
def test_a_run_ends_with_the_step_that_reaches_its_tokens(tmp_path: Path) -> None:
    options = {"max_tokens": 2 * TOKENS, "max_train_steps": 9, "checkpointing_steps": 5}
    run, batches = make_run(tmp_path / "run", **options)
    train(run, batches)
    assert run.state.step == 2 and run.state.tokens == 2 * TOKENS and len(losses(run)) == 2
    assert run.state.notes["evaluations"][-1] == {"step": 2}
    assert [folder.name for folder in checkpoints.list_checkpoints(run.output_dir)] == ["step_2"]

    # Killed between its last checkpoint and its results, the run ends where it would have ended.
    again, batches = make_run(tmp_path / "run", **options)
    again.state = checkpoints.load_checkpoint(again.accelerator, tmp_path / "run" / "step_2", {})
    train(again, batches)
    assert again.state.step == 2
    longer, batches = make_run(tmp_path / "run", **{**options, "max_tokens": 3 * TOKENS})
    longer.state = checkpoints.load_checkpoint(longer.accelerator, tmp_path / "run" / "step_2", {})
    train(longer, batches)
    assert longer.state.step == 3


def test_a_run_ends_with_the_step_that_reaches_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 10 seconds here; the third one begins after 20."""
    clock = iter(range(0, 999, 10))
    monkeypatch.setattr("hf_synlm.training.engine.steps.time.monotonic", lambda: next(clock) - 10.0)
    run, batches = make_run(tmp_path, max_time=0.5, max_train_steps=9)
    train(run, batches)
    assert run.state.step == 3


def test_steps_are_profiled(tmp_path: Path) -> None:
    run, batches = make_run(tmp_path, profile=2, max_train_steps=6)
    train(run, batches)
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "rank_0.json.gz").read_bytes()))
    steps = {event["name"] for event in trace["traceEvents"] if event.get("name", "").startswith("ProfilerStep")}
    assert steps == {"ProfilerStep#3", "ProfilerStep#4"}
    assert "aten::" in (tmp_path / "profile" / "rank_0.txt").read_text()
    with pytest.raises(ValueError, match="profile is 4, after 3 other steps, but the run has only 6"):
        TrainingArguments(output_dir="x", profile=4, max_train_steps=6).limit_steps()


# ---------------------------------------------------------------------------------------------- defaults on a GPU
def test_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("precision is 'tf32'", common.make_accelerator, TrainingArguments(output_dir="x", precision="tf32"))
    reset_accelerate()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for given, expected in (("bf16", "bf16"), ("float32", "no"), (None, "fp16")):
        accelerator = common.make_accelerator(TrainingArguments(output_dir="x", precision=given))
        assert common.precision_of(accelerator) == accelerator.mixed_precision == expected
        reset_accelerate()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    made = common.Accelerator
    on_gpu = SimpleNamespace(device=torch.device("cuda"), mixed_precision="no", num_processes=1)
    monkeypatch.setattr(common, "Accelerator", lambda **options: on_gpu)
    for given, expected in (("float32", "no"), ("tf32", "tf32"), (None, "tf32")):
        accelerator = common.make_accelerator(TrainingArguments(output_dir="x", precision=given))
        assert common.precision_of(accelerator) == expected
        assert torch.backends.cuda.matmul.allow_tf32 == torch.backends.cudnn.allow_tf32 == (expected == "tf32")
    monkeypatch.setattr(common, "Accelerator", made)
    common.make_accelerator(TrainingArguments(output_dir="x"))
    assert not torch.backends.cuda.matmul.allow_tf32


def test_workers_by_device() -> None:
    def workers(device: str, given: int | None) -> int:
        accelerator: Any = SimpleNamespace(device=torch.device(device))
        arguments = TrainingArguments(output_dir="x", dataloader_num_workers=given)
        sampler = samplers.StepSampler(8, 2, 0)
        return samplers.make_loader(accelerator, list(range(8)), dict, arguments, sampler).num_workers

    assert [workers("cpu", None), workers("cuda", None), workers("cuda", 0), workers("cpu", 1)] == [0, 2, 0, 1]


# ---------------------------------------------------------------------------------------------- fused AdamW
def steps_of(optimizer: torch.optim.Optimizer, weights: list[torch.Tensor], seeds: range) -> None:
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


def uncorrected(fused: bool | None) -> tuple[torch.optim.Optimizer, list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    arguments = TrainingArguments(output_dir="x", max_train_steps=9, learning_rate=0.1, weight_decay=0.1,
                                  adam_bias_correction=False)  # fmt: skip
    return common.make_optimizer(model, arguments, fused=fused)[0], list(model.parameters())


def test_adamw_is_fused_on_a_gpu() -> None:
    def fused(device: str, scaler: Any = None) -> bool | None:
        recipe: Any = SimpleNamespace(learning_rates=lambda model: {}, arguments=TrainingArguments(output_dir="x"))
        recipe.arguments.limit_steps()
        recipe.accelerator = SimpleNamespace(device=torch.device(device), scaler=scaler, prepare=lambda *parts: parts)
        return GPSTRecipe.prepare(recipe, torch.nn.Linear(2, 2))[1].defaults["fused"]

    assert (fused("cuda"), fused("cpu"), fused("cuda", scaler="of float16")) == (True, None, None)


def test_a_fused_step_reads_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    """It equals the other one, and a loaded optimizer continues bit for bit; so does an older, which is not fused."""
    plain, expected = uncorrected(None)
    steps_of(plain, expected, range(6))
    for first, second in ((True, True), (None, True)):
        straight, weights = uncorrected(first)
        steps_of(straight, weights, range(3))
        resumed, loaded = uncorrected(second)
        with torch.no_grad():
            for mine, theirs in zip(loaded, weights, strict=True):
                mine.copy_(theirs)
        resumed.load_state_dict(copy.deepcopy(straight.state_dict()))
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "__int__", lambda tensor: pytest.fail("a tensor was read"))
            steps_of(straight, weights, range(3, 6))
            steps_of(resumed, loaded, range(3, 6))
        for mine, theirs, other in zip(loaded, weights, expected, strict=True):
            assert torch.equal(mine, theirs)
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)
