"""What the hosts of a run that has ended did not say, or never had a part in."""

from __future__ import annotations

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.hostevents import HostJoined, HostLeft
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir


def hosts_left_open(run: RunDir) -> dict[str, str]:
    """Hosts that did not say that nothing runs there any more, to what is known of them instead.

    A start that never reached a host says nothing of what an earlier one has left there.
    """
    open_: dict[str, str] = {}
    for event in _told(run):
        if isinstance(event, HostJoined):
            open_[event.host] = "it has not said that it left"
        elif event.answered:
            open_.pop(event.host, None)
        elif event.was_there:
            open_[event.host] = event.reason
    return open_


def hosts_never_there(run: RunDir) -> dict[str, str]:
    """Hosts that no start of the run has reached, to why: nothing runs and nothing lies there."""
    never: dict[str, str] = {}
    there: set[str] = set()
    for event in _told(run):
        if isinstance(event, HostJoined) or event.was_there:
            there.add(event.host)
        else:
            never[event.host] = event.reason
    return {name: why for name, why in never.items() if name not in there}


def _told(run: RunDir) -> list[HostJoined | HostLeft]:
    told = EventTail(run.events_path(SUPERVISOR)).poll()
    return [event for event in told if isinstance(event, HostJoined | HostLeft)]
