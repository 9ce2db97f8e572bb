"""Which hosts of a run that has ended did not say that nothing runs there any more."""

from __future__ import annotations

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunStarted
from llmtop.profiler.record.hostevents import HostLeft
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir


def hosts_left_open(run: RunDir) -> dict[str, str]:
    """Host to what is known of it instead; of the run's newest start."""
    open_: dict[str, str] = {}
    for event in EventTail(run.events_path(SUPERVISOR)).poll():
        if isinstance(event, RunStarted):
            open_ = {}
        elif isinstance(event, HostLeft) and not event.answered:
            open_[event.host] = event.reason
    return open_
