"""What this program itself takes: processor time, and bytes written to the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

EVERY_SECONDS = 5.0
"""Told more often, the telling itself would be most of what is written."""
_IO = Path("/proc/self/io")


class OwnCost(Struct, frozen=True, kw_only=True):
    cpu_percent: float
    """Of one core."""
    bytes_per_second: float | None
    """Of all that is written, which is to the terminal; None where the kernel does not tell."""

    @property
    def words(self) -> str:
        rate = "" if self.bytes_per_second is None else f" {self.bytes_per_second / 1000:.1f} KB/s"
        return f"self {self.cpu_percent:.0f}%{rate}"


class CostMeter:
    """Asked as often as one likes; it looks each `EVERY_SECONDS`."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
        written: Callable[[], int | None] | None = None,
    ) -> None:
        self._clock, self._cpu = clock, cpu
        self._written = written if written is not None else written_bytes
        self._at, self._cpu_then, self._written_then = clock(), cpu(), self._written()
        self._newest: OwnCost | None = None

    def cost(self) -> OwnCost | None:
        """Over the last whole stretch; None before the first is over."""
        seconds = self._clock() - self._at
        if seconds >= EVERY_SECONDS:
            cpu, written = self._cpu(), self._written()
            known = written is not None and self._written_then is not None
            rate = ((written or 0) - (self._written_then or 0)) / seconds if known else None
            self._newest = OwnCost(cpu_percent=100 * (cpu - self._cpu_then) / seconds, bytes_per_second=rate)
            self._at, self._cpu_then, self._written_then = self._clock(), cpu, written
        return self._newest


def written_bytes() -> int | None:
    """By all writes of this process so far."""
    try:
        lines = _IO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("wchar:")), None)
