"""Which hosts do not get on as the others do, though they tell of it at different times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from llmtop.profiler.fleet.fleetstate import HostState
from llmtop.profiler.fleet.summary import STEP

BEHIND_STEPS, BEHIND_SECONDS = 2, 5.0
"""Both: a line of a rank reaches a summary some seconds late, in which quick steps are many."""


def steps_behind(hosts: Sequence[HostState]) -> dict[str, int]:
    """How many steps the farthest host is ahead of each that has told any; 0 for those that keep up.

    What a host told before the others it is taken to have gone on from: steps are compared as of one time.
    """
    told = [(host.name, host.summary, host.told_at or 0.0) for host in hosts if host.summary is not None]
    if not told:
        return {}
    usual = _usual_seconds(hosts)
    newest, ahead = max(at for _, _, at in told), max(summary.step for _, summary, _ in told)
    least = max(BEHIND_STEPS, BEHIND_SECONDS / usual if usual else 0.0)
    found: dict[str, int] = {}
    for name, summary, at in told:
        steps = ahead - summary.step - ((newest - at) / usual if usual else 0.0)
        found[name] = int(steps) if steps >= least else 0
    return found


def _usual_seconds(hosts: Sequence[HostState]) -> float | None:
    known = [
        host.summary.seconds[STEP].median
        for host in hosts
        if host.summary is not None and STEP in host.summary.seconds
    ]
    return median(known) if known else None
