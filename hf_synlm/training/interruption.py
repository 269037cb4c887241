"""Signals that ask a run to stop, heard by all processes at the same step."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopSignals:
    """Takes note of SIGTERM and SIGINT inside a `with` block, in place of dying at once.

    A scheduler sends the first when a job's time is over, Ctrl-C is the second. The training loop looks at `received`
    between steps; a second signal acts as it does outside the block, for those who cannot wait.

    Fields:
        received: name of the signal, or `None`.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python lets no other thread do this
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
