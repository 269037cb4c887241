# SPDX-License-Identifier: Apache-2.0
"""Levels of charts, stacks and chains as pure functions that `torch.compile` makes few kernels of.

A model computes level after level, and the numbers of levels and of their rows depend on the text. What it does at one
level is a function, and so is its gradient: a few graphs serve all texts.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

# Graphs of a function in a process, of which torch allows 8. Each precision needs a few (one row in a level, or more),
# with evaluation twice as many.
_MOST_GRAPHS = 64


class LevelModule(nn.Module):
    """A module that computes by levels: `compile` compiles their functions, not `forward`."""

    compile_options: dict[str, Any] | None = None

    def compile(self, *args: Any, dynamic: bool | None = None, **options: Any) -> None:
        """Compile the functions of the levels, with options of `torch.compile`; only rows are dynamic."""
        self.compile_options = options


def call_level(options: dict[str, Any] | None, function: Callable, *inputs: Any, fixed: tuple = ()) -> Any:
    """Call a function of a level, compiled if there are options; only rows of `inputs` vary."""
    if options is None:
        return function(*fixed, *inputs)
    _mark_rows(inputs)
    return _compiled(function, **options)(*fixed, *inputs)


@functools.cache
def _compiled(function: Callable, **options: Any) -> Callable:
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    return torch.compile(function, fullgraph=True, **options)


def _mark_rows(inputs: Any) -> None:
    """Tell torch.compile that the last dimension but one varies, in all tensors of nested tuples and lists."""
    if isinstance(inputs, Tensor):
        torch._dynamo.maybe_mark_dynamic(inputs, max(inputs.dim() - 2, 0))
    elif isinstance(inputs, (tuple, list)):
        for part in inputs:
            _mark_rows(part)
