"""A model in evaluation mode for a while."""

import contextlib
from collections.abc import Iterator

from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No dropout and no noise inside; afterwards every module has its own mode back, whatever that of the others is.

    Args:
        model: the model.

    Yields:
        Nothing.
    """
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


__all__ = ["evaluation_mode"]
