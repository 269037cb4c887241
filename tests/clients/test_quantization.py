"""Weights in int8 by torchao: loading, search, saving; what is read directly is dequantized, or refused."""

from typing import Any

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import TorchAoConfig

from hf_synlm.core.module_tools import weight_of
from tests.helpers.architectures import batch, build
from tests.helpers.refusals import refused

# Layers that must be in int8: those that do most of the work, so far as they are `nn.Linear`.
QUANTIZED = {
    "gpst": ["parser.layers.0.q_proj", "composition.layers.0.in_proj"],
    "rnng": ["model.output", "action_head"],
    "on_lstm": ["layers.0.ih", "layers.2.hh"],
    "prpn": ["layers.0.key", "layers.1.recurrent"],
    "palm": ["span_context.projection"],
    "pcfg": ["grammar.rule_head", "emission_head.0"],
    "lstm": ["projection.1"],
}
# Largest difference of a log-probability from that of float32, in nats, for models with large random weights.
TOLERANCE = 0.05


def scores(model: Any, name: str) -> torch.Tensor:
    inputs = {key: value for key, value in batch(name).items() if key != "actions"}
    log_probs = model(**inputs).logits[inputs["attention_mask"].bool()]
    return log_probs.masked_fill(log_probs == -torch.inf, 0.0)


@pytest.mark.parametrize("name", QUANTIZED)
def test_int8(name: str, tmp_path: Any) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "float")
    load = type(model).from_pretrained
    small = load(tmp_path / "float", quantization_config=TorchAoConfig(Int8WeightOnlyConfig())).eval()
    int8 = {key for key, value in small.named_parameters() if type(value).__module__.startswith("torchao.")}
    for layer in QUANTIZED[name]:
        assert any(key.endswith(f"{layer}.weight") for key in int8), layer
    assert 0 < (scores(small, name) - scores(model, name)).abs().max() < TOLERANCE
    ids = batch(name)["input_ids"][:1, :4]
    if name != "lstm":
        expected, parsed = model.parse(ids), small.parse(ids)
        assert parsed.spans == expected.spans
        torch.testing.assert_close(parsed.token_log_probs, expected.token_log_probs, atol=TOLERANCE, rtol=0)
    written = small.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False)
    assert written.shape[1] > 4
    small.save_pretrained(tmp_path / "int8")
    assert torch.equal(scores(load(tmp_path / "int8").eval(), name), scores(small, name))


def test_layers_of_gpt2_stay_as_they_are(tmp_path: Any) -> None:
    """torchao has no product for the transposed matrices of GPT-2, so transformers leaves them in float."""
    model = build("gpst")
    model.save_pretrained(tmp_path)
    small = type(model).from_pretrained(tmp_path, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    layers = [value for key, value in small.named_parameters() if key.endswith(transposed)]
    assert layers and all(type(layer) is nn.Parameter and layer.is_floating_point() for layer in layers)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn])
def test_other_small_numbers_that_are_read_directly_are_refused(dtype: torch.dtype) -> None:
    layer = nn.Linear(4, 3)
    layer.weight = nn.Parameter(torch.ones(3, 4, dtype=dtype), requires_grad=False)
    refused(rf"Linear .*{dtype}.*reads this weight directly.*llm_int8_skip_modules", weight_of, layer)
