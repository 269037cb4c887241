# SPDX-License-Identifier: Apache-2.0
"""How far gradients in half precision are from those in float32."""

from typing import Any

import torch
from benchmarks.sides import Sides

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def gradient_errors(sides: Sides) -> dict[str, Any]:
    """For each precision the three weights with the largest relative errors, and with most zeros where none should be.

    The norm that an error is relative to is at least 0.03 of the largest; zeros count where the exact gradient has more
    than a thousandth of the weight's largest.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    exact = _gradients(sides)
    floor = 0.03 * max(gradient.norm().item() for gradient in exact.values())
    results: dict[str, Any] = {}
    for kind, dtype in LOW.items():
        with torch.autocast(next(iter(exact.values())).device.type, dtype=dtype):
            found = _gradients(sides)
        errors, zeros = {}, {}
        for name, gradient in exact.items():
            errors[name] = round(((found[name] - gradient).norm() / gradient.norm().clamp_min(floor)).item(), 4)
            counts = gradient.abs() > 1e-3 * gradient.abs().max()
            zeros[name] = round((found[name][counts] == 0).float().mean().item(), 4)
        worst = {"errors": errors, "zeros": zeros}
        results[kind] = {key: dict(sorted(x.items(), key=lambda y: -y[1])[:3]) for key, x in worst.items()}
    return results


def _gradients(sides: Sides) -> dict[str, torch.Tensor]:
    assert sides.model is not None
    sides.ours()
    weights = sides.model.named_parameters()
    return {name: weight.grad.float().clone() for name, weight in weights if weight.grad is not None}
