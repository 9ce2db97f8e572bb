"""Reads a run over hosts: their newest summaries, and what the lead says. No rank's log is opened."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from llmtop.profiler.fleet.fewer import SEGMENT_BYTES
from llmtop.profiler.fleet.fleetstate import fleet_of, fold_fleet
from llmtop.profiler.fleet.part import LeadPart
from llmtop.profiler.fleet.summary import HostSummarised, decoder
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.feed import RunReader
from llmtop.profiler.record.hosts import HostDir, Hosts
from llmtop.profiler.record.remote import read_remote, time_there
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.profiler.record.segments import segment_path, segments_of

TAIL_BYTES = 16 * 1024
"""Of a log of summaries that is read at a time, at most: older ones matter to nobody."""


class SummaryTail:
    """The newest summaries of one host. The file need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._base = self._path = path
        """The log's first file, and the one that is read."""
        self._offset = 0
        self._unreadable = False
        self.skipped_lines = 0
        """Lines that are damaged or of a newer version; one for a log that cannot be read."""

    def poll(self) -> list[HostSummarised]:
        """Those that were added; of many only the newest. Nothing while the log cannot be read."""
        try:
            return self._added()
        except OSError:
            # Counted once, however often it is tried again: one damaged log must not hide the other hosts.
            self.skipped_lines += not self._unreadable
            self._unreadable = True
            return []

    def _added(self) -> list[HostSummarised]:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size >= SEGMENT_BYTES or not size:
            size = self._in_newest(size)
        if size < self._offset:
            self._offset = 0
        found = self._read(size) if size > self._offset else []
        self._unreadable = False
        return found

    def _in_newest(self, size: int) -> int:
        """A log that has grown goes on in another file: whether it has, and how long that one is."""
        newest = segment_path(self._base, segments_of(self._base).newest)
        if newest == self._path or not newest.exists():
            return size
        self._path, self._offset = newest, 0
        return newest.stat().st_size

    def _read(self, size: int) -> list[HostSummarised]:
        begin = max(self._offset, size - TAIL_BYTES)
        with self._path.open("rb") as file:
            file.seek(begin)
            content = file.read(size - begin)
        if begin > self._offset:
            content = content[content.find(b"\n") + 1 :]
        whole = content[: content.rfind(b"\n") + 1]
        self._offset = size - (len(content) - len(whole))
        return [one for line in whole.splitlines() if (one := self._decoded(line)) is not None]

    def _decoded(self, line: bytes) -> HostSummarised | None:
        try:
            made = decoder().decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            made = None
        if made is None or made.v > EVENT_VERSION:
            self.skipped_lines += 1
            return None
        return made


class FleetReader:
    """All hosts of a run, as far as they have told."""

    def __init__(
        self,
        run: RunDir,
        hosts: Hosts,
        *,
        wall: Callable[[], float] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wall` is the launching machine's clock; by default as it is told here."""
        self.run, self.hosts = run, hosts
        self._wall = wall if wall is not None else partial(time_there, run.path)
        self._monotonic = monotonic
        self._tails = {host.name: SummaryTail(HostDir(run.path, host).summary_path) for host in hosts.hosts}
        self._lead = RunReader(LeadPart(run), wall=wall if wall is not None else time.time)
        self._events = EventTail(run.events_path(SUPERVISOR))
        self._arrived: dict[str, float] = {}
        """Host to when its newest summary came, of those that came while somebody looked."""
        self._looked = False
        self._deaf_at = -math.inf
        """When a poll last found that there is no connection to the machine that has the run."""
        self.fleet = fleet_of(hosts)
        self.state: RunState = RunState(run_id=run.run_id)

    def poll(self) -> bool:
        """Read what is new; whether there was anything."""
        fleet, state = self.fleet, self.state
        told: list[HostSummarised] = []
        now = self._monotonic()
        remote = read_remote(self.run.path)
        if remote is not None and remote.lost_at is not None:
            self._deaf_at = now
        for name, tail in self._tails.items():
            added = tail.poll()
            if added:
                told += added
                if self._looked:
                    self._arrived[name] = now
        self._looked = True
        self.fleet = fold_fleet(fold_fleet(self.fleet, self._events.poll()), told)
        self.state = self._lead.poll()
        return self.fleet is not fleet or self.state is not state

    def quiet_seconds(self) -> dict[str, float]:
        """How long each host has told nothing: by when its summary came where that was seen, else by its
        stamp, with its clock's difference taken off."""
        wall, now = self._wall(), self._monotonic()
        quiet: dict[str, float] = {}
        for host in self.fleet.hosts.values():
            arrived, told = self._arrived.get(host.name), host.told_at
            if arrived is not None:
                quiet[host.name] = now - arrived
            elif told is not None:
                quiet[host.name] = max(0.0, wall - told)
        # What nobody could hear was not kept silent about.
        heard = now - self._deaf_at
        return {name: min(seconds, heard) for name, seconds in quiet.items()}

    @property
    def skipped_lines(self) -> int:
        return sum(tail.skipped_lines for tail in self._tails.values())
