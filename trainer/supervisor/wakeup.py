"""Waits for time or signals, whichever comes first, without losing a signal in between."""

from __future__ import annotations

import os
import select
import signal
from types import FrameType


class Wakeup:
    """Signals become bytes in a pipe, so that the main loop reads them where it waits."""

    def __init__(self, *signals: signal.Signals) -> None:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in signals:
            signal.signal(number, _noted)

    def wait(self, seconds: float) -> list[signal.Signals]:
        """The signals that came since the last call; empty when the time ran out first."""
        select.select([self._read], [], [], max(0.0, seconds))
        try:
            received = os.read(self._read, 4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in received]


def _noted(_number: int, _frame: FrameType | None) -> None:
    """A handler must exist for a signal to reach the pipe; the pipe has it already."""
