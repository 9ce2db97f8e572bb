"""Requests to end early: SIGTERM ends after a checkpoint, SIGUSR1 without one; the first of them counts.

A signal only sets a flag. The ranks agree on it in the reduction that ends every step, so that all
of them leave after the same step.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """What this rank has been asked to do; other ranks may not have been asked yet."""

    def __init__(self) -> None:
        self.stop = False
        self.save = False
        """Save a checkpoint before leaving."""

    def listen(self) -> None:
        """Install the handlers. Called before the long imports, or a signal meanwhile would kill."""
        signal.signal(signal.SIGTERM, self._on_terminate)
        signal.signal(signal.SIGUSR1, self._on_user_signal)
        # Ctrl-C goes to the whole terminal group; only the supervisor decides what it means.
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _on_terminate(self, _signal: int, _frame: FrameType | None) -> None:
        # Whoever stops without a checkpoint sends this to what has not left then: no time for one is left.
        self.save = self.save or not self.stop
        self.stop = True

    def _on_user_signal(self, _signal: int, _frame: FrameType | None) -> None:
        self.stop = True
