"""What each reading of a device costs, and the rule that a dear one never runs on the fast clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import median_low
from typing import Any

from msgspec import Struct

FAST_SECONDS = 1e-3
"""A reading that takes longer runs on the slow clock only."""
_REMEMBERED = 5


class CallCost(Struct, frozen=True, kw_only=True):
    """One reading of one device."""

    call: str
    device: int
    seconds: float | None
    """Typical of the last few; None before the second call, for the first one pays for warming up."""
    is_slow: bool


class _Meter(Struct):
    calls: int
    seconds: deque[float]
    newest: dict[str, Any]
    """What the reading gave last."""
    always_slow: bool

    def typical(self) -> float | None:
        # Of two the lower: one call that another process held up proves nothing.
        return median_low(self.seconds) if self.seconds else None

    def is_slow(self) -> bool:
        # A reading whose cost is not known yet may be dear.
        typical = self.typical()
        return self.always_slow or typical is None or typical > FAST_SECONDS


class CallCosts:
    """Runs readings and times them. In a fast sample, a slow one answers with what it gave last."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._meters: dict[tuple[str, int], _Meter] = {}

    def run(
        self,
        call: str,
        device: int,
        read: Callable[[], dict[str, Any]],
        *,
        fast: bool,
        always_slow: bool = False,
    ) -> dict[str, Any]:
        """The reading's answer, or in a fast sample the last one of a slow reading."""
        meter = self._meters.get((call, device))
        if meter is None:
            meter = _Meter(calls=0, seconds=deque(maxlen=_REMEMBERED), newest={}, always_slow=always_slow)
            self._meters[call, device] = meter
        if fast and meter.is_slow():
            return meter.newest
        began = self._clock()
        meter.newest = read()
        if meter.calls:
            meter.seconds.append(self._clock() - began)
        meter.calls += 1
        return meter.newest

    def table(self) -> tuple[CallCost, ...]:
        """Every reading so far, the dearest first."""
        rows = [
            CallCost(call=call, device=device, seconds=meter.typical(), is_slow=meter.is_slow())
            for (call, device), meter in self._meters.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), row.call, row.device)))
