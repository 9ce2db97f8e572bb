"""Running totals to rates."""

from __future__ import annotations


class RateCounter:
    """One counter. A total that went backwards (a wrap, a reset, a lost device) gives no rate."""

    def __init__(self) -> None:
        self._total: float | None = None
        self._time = 0.0

    def advance(self, total: float | None, now: float) -> float | None:
        """The rate since the last call, per second; None when there is no sound one."""
        before, then = self._total, self._time
        self._total, self._time = total, now
        if before is None or total is None or total < before or now <= then:
            return None
        return (total - before) / (now - then)
