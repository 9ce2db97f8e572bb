"""Hosts on the screen by the clock of a played fleet."""

from __future__ import annotations

from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.feeds.fleetfeed import FleetFeed
from tests.fleets import PlayedFleet


def feed_on_its_clock(fleet: PlayedFleet, run: RunDir, hosts: Hosts) -> FleetFeed:
    """Looks at the time that has passed in the run, and not at that of the test."""
    reader = FleetReader(run, hosts, wall=lambda: fleet.time.now, monotonic=lambda: fleet.time.now)
    return FleetFeed(run, hosts, reader)
