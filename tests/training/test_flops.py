"""FLOPs by formula against the products of a training step, counted; and the speed that follows from them."""

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import GPT2Config, GPT2LMHeadModel

from hf_synlm import (
    GPSTConfig,
    GPSTForCausalLM,
    ONLSTMConfig,
    ONLSTMForCausalLM,
    OrderedMemoryConfig,
    OrderedMemoryForCausalLM,
)
from hf_synlm.core import matrix_products
from hf_synlm.training.engine import flops, speed
from hf_synlm.training.engine.flops import decoder_flops_per_token
from tests.models.gpst.test_modeling_gpst import NO_DROPOUT
from tests.models.rnng import test_modeling_rnng as rnng

aten = torch.ops.aten
IN_PLACE = ("addmm", "baddbmm")


class Counter(TorchDispatchMode):
    """Adds up the FLOPs of all products, those inside backward passes included."""

    formulas = {**flop_registry} | {getattr(aten, f"{name}_"): flop_registry[getattr(aten, name)] for name in IN_PLACE}
    total = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        formula = self.formulas.get(function._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=result)
        return result


def counted(model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, **batch: Any) -> int:
    """What a step takes, with products that PyTorch has formulas for: not those of oneDNN and of fused attention."""
    monkeypatch.setattr(matrix_products, "_HAS_ONEDNN", False)
    with Counter() as counter, sdpa_kernel(SDPBackend.MATH):
        model(**batch).loss.backward()
    return counter.total


@pytest.mark.parametrize("window_size", [2, 3])
def test_gpst(window_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "composition_size": 32, "composition_num_heads": 4}
    sizes.update(composition_intermediate_size=96, parser_size=48, parser_num_heads=4, parser_score_size=80)
    more = {"vocab_size": 300, "num_decomposition_layers": 2, "score_size": 24, "window_size": window_size}
    ids = {f"{name}_token_id": k for k, name in enumerate(("bos", "eos", "pad", "reduce", "cls", "sep"))}
    config = GPSTConfig(**sizes, **more, **ids, **NO_DROPOUT, merge_noise=0.0)
    model = GPSTForCausalLM(config).train()
    T, n = 96, 12
    rows = torch.randint(10, 300, (2, T))
    sentence_ids = (torch.arange(T) // n + 1).expand(2, T)
    found = counted(model, monkeypatch, input_ids=rows, labels=rows, sentence_ids=sentence_ids)
    expected = rows.numel() * flops.gpst_flops_per_token(config, T, n)
    assert found == pytest.approx(expected, rel=0.04)


@pytest.mark.parametrize("composition", ["lstm", "attention"])
def test_rnng(composition: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = rnng.tiny(composition=composition, dropout=0.0).train()
    batch = rnng.batch(lengths=[12] * 8)
    found = counted(model, monkeypatch, **batch)
    tokens, actions = 8 * 12, int((batch["actions"] != 0).sum())
    expected = tokens * flops.rnng_flops_per_token(model.config, actions / tokens)
    assert found == pytest.approx(expected, rel=0.1)


def test_recurrent(monkeypatch: pytest.MonkeyPatch) -> None:
    none = {f"{name}_dropout": 0.0 for name in ("embedding", "input", "hidden", "output", "weight")}
    model = ONLSTMForCausalLM(ONLSTMConfig(vocab_size=90, embedding_size=24, hidden_size=32, chunk_size=4, **none))
    rows = torch.randint(0, 90, (4, 20))
    found = counted(model.train(), monkeypatch, input_ids=rows, labels=rows)
    assert found == pytest.approx(rows.numel() * flops.recurrent_flops_per_token(model), rel=0.05)


def test_ordered_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = OrderedMemoryConfig(vocab_size=90, hidden_size=24, num_slots=5)
    model = OrderedMemoryForCausalLM(config).eval()  # all slots are in use
    rows = torch.randint(0, 90, (4, 40))
    found = counted(model, monkeypatch, input_ids=rows, labels=rows)
    assert found == pytest.approx(rows.numel() * flops.recurrent_flops_per_token(model), rel=0.1)


def test_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(vocab_size=90, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    model = GPT2LMHeadModel(config).train()
    rows = torch.randint(0, 90, (4, 64))
    found = counted(model, monkeypatch, input_ids=rows, labels=rows)
    assert found == pytest.approx(rows.numel() * decoder_flops_per_token(model, 64), rel=0.01)


def test_speed_and_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(speed.time, "perf_counter", lambda: clock[0])
    meter = speed.SpeedMeter(flops_per_token=6.0, peak_flops=1200.0)
    assert meter.overall() == {}
    meter.add(300)
    clock[0] = 1.0
    with meter.paused():
        clock[0] = 9.0
    meter.add(300)
    clock[0] = 11.0
    assert meter.read() == {"tokens_per_second": 200.0, "model_flop_utilization": 1.0}
    meter.add(100)
    clock[0] = 12.0
    assert meter.read() == {"tokens_per_second": 100.0, "model_flop_utilization": 0.5}
    assert meter.overall() == {"tokens_per_second": 175.0, "model_flop_utilization": 0.875}
    assert speed.SpeedMeter(6.0, None).ratio is None


def test_peak_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert speed.device_peak_flops(cpu, "no", None) is None and speed.device_peak_flops(cpu, "no", 2e9) == 2e9
    for name, half, single in (
        ("NVIDIA H100 80GB HBM3", 989e12, 67e12),
        ("NVIDIA A100-SXM4-80GB", 312e12, 19.5e12),
        ("NVIDIA A100 80GB PCIe", 312e12, 19.5e12),
        ("NVIDIA GeForce RTX 4090", 165e12, 82.6e12),
        ("Tesla V100-PCIE-16GB", 112e12, 14e12),
        ("Tesla T4", 65e12, 8.1e12),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.device_peak_flops(gpu, "bf16", None) == half
        assert speed.device_peak_flops(gpu, "no", None) == single
    for name in (
        "an accelerator of next year", "NVIDIA A100X", "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert speed.device_peak_flops(gpu, "bf16", None) is None
