# SPDX-License-Identifier: Apache-2.0
"""Tensors that only the garbage collector can free: they fill the memory until it runs."""

import gc
from collections.abc import Callable
from typing import Any

from torch import Tensor


def tensors_in_cycles(call: Callable[[], Any]) -> list[Tensor]:
    """Tensors that a call leaves in cycles of references."""
    gc.collect()
    flags = gc.get_debug()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        call()
        gc.collect()
        return [kept for kept in gc.garbage if isinstance(kept, Tensor)]
    finally:
        gc.set_debug(flags)
        gc.garbage.clear()
