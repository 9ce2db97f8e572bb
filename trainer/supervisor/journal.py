"""The supervisor's event log, which a full disk delays but does not break."""

from __future__ import annotations

import time

from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.patientlog import PatientWriter

SETTLE_SECONDS = 60.0
"""How long the last events wait for room on a full disk."""


class Journal(PatientWriter):
    """Waits for its last line, which tells how the run ended: nothing follows it."""

    _ended = False

    def write_last(self, end: RunEnded) -> None:
        """The last line of a run: while there is no room for it, it is waited for."""
        deadline = time.monotonic() + SETTLE_SECONDS
        # With the event that says how long others have waited.
        self.settle(SETTLE_SECONDS)
        self._ended = True
        self.write(end)
        if not self.settle(max(0.0, deadline - time.monotonic())):
            self.log(f"the end could not be written: {end.state}: {end.reason}")

    def tell_resumed(self, seconds: float, lost: int) -> None:
        if not self._ended:
            super().tell_resumed(seconds, lost)
