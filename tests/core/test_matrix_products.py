"""Matrix products: float32 by oneDNN where PyTorch has it, other types by the ordinary functions."""

import pytest
import torch
from torch import nn

from hf_synlm.core.matrix_products import (
    OneDNNLinear,
    keep_packed_weights,
    linear_map,
    weight_gradient,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("uses", [1, 50])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 20])
def test_linear_map(dtype, uses, transposed, rows):
    weight = torch.randn(13, 21, dtype=dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    product = linear_map(weight, rows, uses, row_step={1: 1, 7: 4, 20: 16}[rows])
    for count in (rows, rows, 3):
        x = torch.randn(count, 21, dtype=dtype)
        torch.testing.assert_close(product(x), x @ weight.t())


def test_packed_weights_are_kept_until_they_change(monkeypatch):
    """Also by two loops in turn; and not elsewhere."""
    packed = []
    reorder = torch.ops.mkldnn._reorder_linear_weight
    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda *given: packed.append(1) or reorder(*given))
    weight, x = nn.Parameter(torch.randn(13, 21), requires_grad=False), torch.randn(4, 21)

    def times_packed() -> int:
        packed.clear()
        for _ in range(2):
            torch.testing.assert_close(linear_map(weight, 4, 50)(x), x @ weight.t())
            linear_map(weight * 1, 4, 50)  # is computed, and not kept
        return len(packed) - 2

    first, second = {}, {}
    for kept, count in ((first, 1), (second, 1), (first, 0), (second, 0)):
        with keep_packed_weights(kept):
            assert times_packed() == count
    weight.add_(1)
    with keep_packed_weights(first):
        assert times_packed() == 1
    assert times_packed() == 2 and len(first) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weight_gradient(dtype):
    grad, x = torch.randn(40, 13, dtype=dtype), torch.randn(40, 21, dtype=dtype)
    torch.testing.assert_close(weight_gradient(grad, x), grad.t() @ x)


@pytest.mark.parametrize("layout", ["contiguous", "strided", "expanded"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(9, 11), (99,), (3, 2)])
def test_linear(layout, bias, shape):
    layer = OneDNNLinear(21, 13, bias=bias)
    x, grad = torch.randn(*shape, 21), torch.randn(*shape, 13)
    if layout == "strided":
        x, grad = (value.transpose(0, -1).contiguous().transpose(0, -1) for value in (x, grad))
    if layout == "expanded":
        x, grad = x[:1].expand(*shape, 21), grad[..., :1].expand(*shape, 13)
    results = []
    for function in (layer, lambda value: torch.nn.functional.linear(value, layer.weight, layer.bias)):
        leaf = x.detach().requires_grad_()
        output = function(leaf)
        results.append([output, *torch.autograd.grad(output, [leaf, *layer.parameters()], grad)])
    for mine, expected in zip(*results, strict=True):
        assert mine.shape == expected.shape
        torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-5)


def test_linear_in_other_types():
    layer, x = OneDNNLinear(21, 13), torch.randn(99, 21)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    assert layer.double()(x.double()).dtype == torch.float64
