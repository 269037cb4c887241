"""Matrix products on both paths: oneDNN and the ordinary one."""

import pytest
import torch

from hf_synlm import matrix_products
from hf_synlm.matrix_products import linear_map, weight_gradient


@pytest.fixture(params=[True, False], ids=["onednn", "ordinary"])
def path(request, monkeypatch):
    if request.param and not matrix_products._HAS_ONEDNN:
        pytest.skip("PyTorch was built without oneDNN")
    monkeypatch.setattr(matrix_products, "_HAS_ONEDNN", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("uses", [1, 50])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rows", [1, 7])
def test_linear_map(path, dtype, uses, transposed, rows):
    weight = torch.randn(13, 21, dtype=dtype)
    weight = weight.t().contiguous().t() if transposed else weight
    product = linear_map(weight, rows, uses)
    for count in (rows, rows, 3):
        x = torch.randn(count, 21, dtype=dtype)
        torch.testing.assert_close(product(x), x @ weight.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_weight_gradient(path, dtype):
    grad, x = torch.randn(40, 13, dtype=dtype), torch.randn(40, 21, dtype=dtype)
    torch.testing.assert_close(weight_gradient(grad, x), grad.t() @ x)
