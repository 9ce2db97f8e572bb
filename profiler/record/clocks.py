"""Whose clock stamped the logs of a run over hosts, by what the lead's log says.

Whoever reads the logs of several hosts as one stream has each host's stamps less what its clock is ahead of
the launching machine's (`hostclock.py`); the files keep the stamps that their writers gave.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import msgspec

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.events import AnyEvent
from llmtop.profiler.record.hostclock import HostClock, NotedClocks
from llmtop.profiler.record.hostevents import ClockMeasured
from llmtop.profiler.record.hosts import HOSTS_FILE, Hosts, host_of_log, lead_log, read_hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.runfiles import rank_of_log
from llmtop.profiler.record.segments import segments_of

_KIND = b'"clock_measured"'


class Clocks:
    """What the lead's log says so far of the clocks that stamped a run's logs."""

    def __init__(self, run: RunDir, hosts: Hosts) -> None:
        self._run = run
        self.lead_path = lead_log(run)
        self._hosts = hosts.hosts
        self._first_ranks = [host.first_rank for host in hosts.hosts]
        self._noted = NotedClocks()
        self.changed = False
        """Whether what is taken off is other than at the beginning, so that what was read counts no more."""
        for event in _measured(self.lead_path):
            self._noted.note(event)
        here = range(hosts.world_size) if run.ranks_here is None else run.ranks_here
        self._read = tuple(
            host.name for host in self._hosts if host.ranks.start < here.stop and here.start < host.ranks.stop
        )
        """Hosts whose ranks are read."""
        self.taken_off = self._taken_off()
        """Of the hosts that are read those whose stamps are corrected, as of the beginning."""

    def of(self, path: Path) -> HostClock:
        """Of what writes that log; empty where nothing is taken off."""
        name = host_of_log(self._run, path) or self._host_of_rank(rank_of_log(path))
        return self.taken_off.get(name, ())

    def _host_of_rank(self, rank: int | None) -> str:
        if rank is None:
            return ""
        at = bisect_right(self._first_ranks, rank) - 1
        return self._hosts[at].name if at >= 0 and rank in self._hosts[at].ranks else ""

    def note(self, events: Iterable[AnyEvent]) -> None:
        """What the lead has written. What was noted already changes nothing."""
        measured = [event for event in events if isinstance(event, ClockMeasured)]
        if any([self._noted.note(event) for event in measured]):
            self.changed = self._taken_off() != self.taken_off

    def _taken_off(self) -> dict[str, HostClock]:
        clocks = {name: self._noted.of(name) for name in self._read}
        return {name: clock for name, clock in clocks.items() if any(one.taken_off_seconds for one in clock)}


def clocks_of(run: RunDir) -> Clocks | None:
    """None where one clock has stamped all that is read: of a run on one machine, of a host by itself, or of
    the lead."""
    if run.ranks_here is not None and not run.ranks_here:
        return None
    if not (run.path / HOSTS_FILE).exists() or lead_log(run) not in run.event_logs():
        return None
    try:
        hosts = read_hosts(run)
    except LlmtopError:
        return None  # whoever asks for its hosts is told so; its logs can be read as they are
    return None if hosts is None or not hosts.hosts else Clocks(run, hosts)


def _measured(lead_path: Path) -> Iterator[ClockMeasured]:
    """All measurements in the lead's log, by its whole lines; other events are not decoded."""
    decode = _decoder().decode
    for path in segments_of(lead_path).paths(lead_path):
        try:
            with path.open("rb") as file:
                lines = [line for line in file if _KIND in line and line.endswith(b"\n")]
        except OSError:
            continue  # it went while we looked, or cannot be read: the stream counts that
        for line in lines:
            try:
                event = decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
            if event.v <= EVENT_VERSION:
                yield event


@cache
def _decoder() -> msgspec.json.Decoder[ClockMeasured]:
    return msgspec.json.Decoder(ClockMeasured)
