"""The supervisor's event log, which a full disk delays but does not break."""

from __future__ import annotations

from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.patientlog import PatientWriter

SETTLE_SECONDS = 60.0
"""How long the last events wait for room on a full disk."""


class Journal(PatientWriter):
    """Waits for its last line, which tells how the run ended."""

    def write_last(self, end: RunEnded) -> None:
        """The last line of a run: while there is no room for it, it is waited for."""
        self.write(end)
        if not self.settle(SETTLE_SECONDS):
            self.log(f"the end could not be written: {end.state}: {end.reason}")
