"""How long a call of a benchmark may go on, and each of its runs."""

from __future__ import annotations

import time

from benchmarks.rows import Row

LONGEST_SECONDS = 120.0
"""Of one run, unless told otherwise; DeepSpeed's ops are built before."""
TOO_LATE = "too late"
"""The status of a row that says nothing: there was no time left when its run could have begun."""
_OVERTIME_SECONDS = 50.0
"""What was started before the time was up may take so much longer."""


class TimeLeft:
    """The time that a call has, from `began` on."""

    def __init__(
        self, minutes: float, *, longest_seconds: float = LONGEST_SECONDS, began: float | None = None
    ) -> None:
        self._deadline = (time.monotonic() if began is None else began) + 60 * minutes
        self._longest = longest_seconds

    def seconds_for_a_run(self) -> float | None:
        """How long a run that starts now may take; None when it is too late to start one."""
        left = self._deadline - time.monotonic()
        return None if left < 0 else min(self._longest, left + _OVERTIME_SECONDS)

    def cut(self, row: Row) -> bool:
        """Whether a run was ended, or not begun, for our lack of time and says nothing."""
        limit: float | None = row.get("cut_after_seconds")
        return row.get("status") == TOO_LATE or (limit is not None and limit < self._longest)
