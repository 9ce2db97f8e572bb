"""Who else has the processors: the work of a machine that is not the run's, by the name of its programs."""

from __future__ import annotations

from collections.abc import Container

from llmtop.profiler.hardware.processes import Running
from llmtop.profiler.record.deviceevents import OtherWork

_LEAST_PERCENT = 5.0
"""Of one processor: less slows nobody."""
_MOST = 3


class OthersCounter:
    """Rates are differences between two walks, so the first has none."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._time: float | None = None

    def advance(self, running: dict[int, Running], own: Container[int], now: float) -> tuple[OtherWork, ...]:
        """The programs that took most since the last call, the busiest first; `own` are the run's."""
        before, then = self._seconds, self._time
        self._seconds = {(pid, one.started): one.cpu_seconds for pid, one in running.items()}
        self._time = now
        if then is None or now <= then:
            return ()
        percents: dict[str, list[float]] = {}
        for pid, one in running.items():
            # What began since then has all its time from then on.
            took = one.cpu_seconds - before.get((pid, one.started), 0.0)
            if pid not in own and took > 0:
                percents.setdefault(one.name, []).append(100.0 * took / (now - then))
        work = [
            OtherWork(name=_printable(name), processes=len(each), cpu_percent=sum(each))
            for name, each in percents.items()
            if sum(each) >= _LEAST_PERCENT
        ]
        return tuple(sorted(work, key=lambda one: -one.cpu_percent)[:_MOST])


def _printable(name: str) -> str:
    """Another user of the machine may call a program anything, a line's end or an escape too."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
