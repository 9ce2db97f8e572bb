"""A part of a run over hosts as a run to read: one host, one rank, or what the lead wrote.

Each is the same fold over fewer logs, so that looking at one rank of eight thousand reads the log of one.
"""

from __future__ import annotations

from pathlib import Path

from llmtop.profiler.record.hosts import Host, HostDir, read_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.segments import has_log


class HostPart(HostDir):
    """The ranks of one host, with what the lead says of the run; who supervises the run is the lead."""

    def __init__(self, run: RunDir, host: Host) -> None:
        super().__init__(run.path, host)
        self.whole = RunDir(run.path)

    def event_logs(self) -> tuple[Path, ...]:
        return (*super().event_logs(), self.whole.events_path(SUPERVISOR))

    @property
    def supervisor_pid_path(self) -> Path:
        return self.whole.supervisor_pid_path


class RankPart(HostPart):
    """One rank, with the samples of its host."""

    def __init__(self, run: RunDir, host: Host, rank: int) -> None:
        super().__init__(run, host)
        self.ranks_here = range(rank, rank + 1)

    def rank_events(self) -> dict[int, Path]:
        assert self.ranks_here is not None
        return {rank: path for rank, path in super().rank_events().items() if rank in self.ranks_here}

    @property
    def bookmark_path(self) -> Path:
        assert self.ranks_here is not None
        return self.own_path / f"bookmark-{self.ranks_here.start}"


class LeadPart(RunDir):
    """What was decided for the run as a whole, without any rank."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(run.path)
        self.ranks_here = range(0)

    def event_logs(self) -> tuple[Path, ...]:
        return (self.events_path(SUPERVISOR),)

    def rank_events(self) -> dict[int, Path]:
        return {}

    @property
    def bookmark_path(self) -> Path:
        return self.path / "hosts" / "bookmark"


MOST_RANKS_READ = 64
"""A run over hosts with more ranks is read whole neither to tell of it in lines nor from another machine."""


def part_in_lines(run: RunDir) -> RunDir:
    """What is read to tell of a run in a line now and then: of a large one over hosts its first host."""
    hosts = read_hosts(run)
    return run if hosts is None or hosts.world_size <= MOST_RANKS_READ else telling_part(run)


def telling_part(run: RunDir) -> RunDir:
    """What a list of runs reads: all of a run on one machine; over hosts the first one, which has the loss,
    and what the lead says; of what a host has of a run that another machine has launched, that host.
    Raises LlmtopError where the list of hosts is damaged."""
    hosts = read_hosts(run)
    if hosts is None or not hosts.hosts:
        return run
    if not has_log(run.events_path(SUPERVISOR)):
        parts = (HostDir(run.path, host) for host in hosts.hosts)
        own = next((part for part in parts if has_log(part.events_path(SUPERVISOR))), None)
        if own is not None:
            return own
    return HostPart(run, hosts.hosts[0])
