"""What the two sides of a comparison are, what they share, and the clock that times them."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Step = Callable[[], Any]


class Sides(NamedTuple):
    """Both sides of a comparison.

    Fields:
        ours: one step of the measured side.
        theirs: one step of the baseline.
        check: raises AssertionError if the measured side computes something wrong.
    """

    ours: Step
    theirs: Step
    check: Step


def seconds(step: Step) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin


def training_step(model: nn.Module, loss_of: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Forward and backward pass of a loss of `model`; the step returns the loss."""

    def step() -> Tensor:
        model.zero_grad()
        loss = loss_of()
        loss.backward()
        return loss

    return step


def check_gradients(model: nn.Module) -> None:
    """Raise AssertionError unless every parameter has a finite gradient; 0 is one, for gates that are shut."""
    wrong = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not torch.isfinite(parameter.grad).all()
    ]
    if wrong:
        raise AssertionError(f"parameters without a finite gradient: {wrong}")


def without_dropout(config_class: Any, preset: str) -> dict[str, float]:
    """Fields of a configuration that switch off its dropout."""
    return {name: 0.0 for name in vars(config_class.from_preset(preset)) if name.endswith("dropout")}
