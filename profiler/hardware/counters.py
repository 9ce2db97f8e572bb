"""Running totals to rates."""

from __future__ import annotations

from collections.abc import Mapping


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


class GroupCounter:
    """Totals of members that come and go, each by numbers of its own: who has gone takes nothing along."""

    def __init__(self) -> None:
        self._totals: Mapping[tuple[int, int], float] = {}
        self._time = 0.0

    def advance(self, totals: Mapping[tuple[int, int], float], now: float) -> float | None:
        """The rate since the last call, per second, of all that were there then too; None without any.

        What comes back after a reading that missed it is not taken for new. A total that went backwards is
        another's, who has the number now: it adds nothing.
        """
        before, then = self._totals, self._time
        self._totals, self._time = totals, now
        both = [max(0.0, total - before[key]) for key, total in totals.items() if key in before]
        return sum(both) / (now - then) if both and now > then else None
