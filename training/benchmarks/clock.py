"""What the sides of a comparison are, and the clock that all of them are timed with."""

import time
from collections.abc import Callable

Step = Callable[[], object]


def seconds(step: Step) -> float:
    """Wall-clock seconds of one call."""
    begin = time.perf_counter()
    step()
    return time.perf_counter() - begin
