"""Ends what is left on the hosts of a run whose lead is gone: before each would do so by itself."""

from __future__ import annotations

import time
from collections.abc import Collection

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.hosts.beat import LeadBeat
from llmtop.trainer.hosts.members import STILL_LEAVING, Member
from llmtop.trainer.hosts.openfiles import make_room
from llmtop.trainer.hosts.transport import InFolder, OverSsh

_SECONDS = 40.0
_PAUSE_SECONDS = 0.2


def end_hosts(run: RunDir, hosts: Hosts, names: Collection[str]) -> dict[str, str]:
    """Of these hosts: name to why it is not known that nothing runs there; empty when all have ended.

    Only for a run without a lead: two would give orders to the same hosts.
    """
    make_room(len(names))
    beat = LeadBeat(run)
    beat.turn()
    members = [Member(run, host) for host in hosts.hosts if host.name in names]
    for member in members:
        if hosts.launcher == "ssh":
            member.transport = OverSsh(
                run,
                member.host,
                hosts,
                mark=beat.mark,
                begin=member.orders.begins_at,
                folder="",
                variables={},
            )
        else:
            member.transport = InFolder(run, member.host, beat)
        member.transport.start()
    try:
        return _end(members)
    finally:
        for member in members:
            if member.transport is not None:
                member.transport.close()
            member.orders.close()


def _end(members: list[Member]) -> dict[str, str]:
    # `OrderWriter` has told supervisors of before to leave.
    left = {member.name: member for member in members}
    deadline = time.monotonic() + _SECONDS
    while left and time.monotonic() < deadline:
        for name, member in list(left.items()):
            member.orders.flush()
            if _is_over(member):
                del left[name]
        time.sleep(_PAUSE_SECONDS)
    # Of those that cannot be asked now their last word counts.
    left = {name: member for name, member in left.items() if _lives(member) or not _has_ended(member)}
    return {name: _why(member) for name, member in left.items()}


def _has_ended(member: Member) -> bool:
    """The newest that its supervisor has told; `Member` waits for a new one's first words."""
    told = EventTail(member.dir.events_path(SUPERVISOR)).poll()
    return bool(told) and isinstance(told[-1], RunEnded)


def _is_over(member: Member) -> bool:
    """Whether nothing runs there any more. A supervisor that has said its last is there for a moment."""
    assert member.transport is not None
    if isinstance(member.transport, OverSsh):
        cannot_be_asked = bool(member.transport.problem) and _has_ended(member)
        return _lives(member) is False or (_lives(member) is None and cannot_be_asked)
    # On another machine no more can be seen of it than its words.
    return _has_ended(member) and not member.dir.supervisor_alive()


def _lives(member: Member) -> bool | None:
    """Whether the host's supervisor does; None: not known."""
    return member.transport.supervisor_lives if member.transport is not None else None


def _why(member: Member) -> str:
    assert member.transport is not None
    if _has_ended(member):
        return STILL_LEAVING
    because = f": {member.transport.problem}" if member.transport.problem else ""
    return f"it does not answer{because}"
