"""Weights that are cast together under autocast: the same numbers as by autocast."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_synlm.models.gpst.cast_weights import call_with_weights_cast_together


@pytest.mark.parametrize("case", ["autocast", "float32", "checkpointing", "double", "tied", "eval"])
def test_weights_cast_together(case):
    """The same values and gradients as by autocast, also where a weight has no gradient or stands twice."""
    model: Any = nn.Sequential(nn.Linear(5, 7), Conv1D(4, 7), nn.LayerNorm(4), nn.Linear(4, 3, bias=False))
    model[1].bias.requires_grad_(False)
    model.gradient_checkpointing = case == "checkpointing"
    model.append(nn.Linear(3, 3)).append(nn.Linear(3, 3))
    if case == "tied":
        model[5].weight = model[4].weight
    model.train(case != "eval")
    model = model.double() if case == "double" else model
    results, seen = [], []
    model[0].register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.dtype))
    for call in (call_with_weights_cast_together, nn.Module.__call__):
        x = torch.linspace(-1, 1, 30, dtype=model[0].weight.dtype).view(6, 5).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=case != "float32"):
            output = call(model, x)
        model.zero_grad()
        output.float().square().sum().backward()
        results.append([output, x.grad, *(weight.grad for weight in model.parameters())])
        assert model[0].weight.grad.dtype == model[0].weight.dtype
    for mine, expected in zip(*results, strict=True):
        assert (mine is None) == (expected is None)
        torch.testing.assert_close(mine, expected, rtol=0, atol=0)
    own = model[0].weight.dtype
    assert seen == [torch.bfloat16 if case in ("autocast", "tied") else own, own]
