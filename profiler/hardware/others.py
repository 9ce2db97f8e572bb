"""Who else has the processors: the work of a machine that is not the run's, by the name of its programs."""

from __future__ import annotations

import pwd
from collections.abc import Callable, Container
from pathlib import Path

from llmtop.profiler.hardware.processes import Running
from llmtop.profiler.record.deviceevents import OtherWork

_LEAST_PERCENT = 5.0
"""Of one processor: less slows nobody."""
_MOST = 3
_MOST_PIDS = 3
"""Of each program."""


class OthersCounter:
    """Rates are differences between two walks, so the first has none."""

    def __init__(self, owner: Callable[[int], str] | None = None) -> None:
        """`owner` tells a process's user; empty where that cannot be told."""
        self._owner = owner if owner is not None else _owner
        self._seconds: dict[tuple[int, int], float] = {}
        self._time: float | None = None

    def advance(self, running: dict[int, Running], own: Container[int], now: float) -> tuple[OtherWork, ...]:
        """The programs that took most since the last call, the busiest first; `own` are the run's."""
        before, then = self._seconds, self._time
        self._seconds = {(pid, one.started): one.cpu_seconds for pid, one in running.items()}
        self._time = now
        if then is None or now <= then:
            return ()
        percents: dict[str, list[tuple[float, int]]] = {}
        for pid, one in running.items():
            # What began since then has all its time from then on.
            took = one.cpu_seconds - before.get((pid, one.started), 0.0)
            if pid not in own and took > 0:
                percents.setdefault(one.name, []).append((100.0 * took / (now - then), pid))
        totals = {name: sum(percent for percent, _ in each) for name, each in percents.items()}
        busiest = sorted(
            (name for name in totals if totals[name] >= _LEAST_PERCENT), key=lambda n: -totals[n]
        )
        return tuple(self._work(name, totals[name], percents[name]) for name in busiest[:_MOST])

    def _work(self, name: str, percent: float, each: list[tuple[float, int]]) -> OtherWork:
        pids = tuple(pid for _, pid in sorted(each, key=lambda one: (-one[0], one[1]))[:_MOST_PIDS])
        users = dict.fromkeys(_printable(user) for user in map(self._owner, pids) if user)
        return OtherWork(
            name=_printable(name), processes=len(each), cpu_percent=percent, pids=pids, users=tuple(users)
        )


def _owner(pid: int) -> str:
    """By name, else by number."""
    try:
        uid = Path(f"/proc/{pid}").stat().st_uid
    except OSError:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _printable(name: str) -> str:
    """Another user of the machine may call a program anything, a line's end or an escape too."""
    return "".join(letter if letter.isprintable() else "?" for letter in name)
