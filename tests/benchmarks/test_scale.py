"""The benchmark of many hosts: what it plays is what a viewer reads, and its table tells what it measured."""

from __future__ import annotations

from pathlib import Path

from benchmarks.scale import host_cost, table
from benchmarks.simfleet import SLOW_RANK, SimFleet
from llmtop.profiler.fleet.reading import FleetReader
from llmtop.profiler.record.hosts import read_hosts
from llmtop.tui.feeds.fleetview import fleet_view


def test_a_played_fleet_is_seen_with_who_is_slow_and_who_is_lost(tmp_path: Path) -> None:
    fleet = SimFleet(tmp_path, 4, 4)
    fleet.history(3, 4)
    hosts = read_hosts(fleet.run)
    assert hosts is not None and hosts.world_size == 16
    reader = FleetReader(fleet.run, hosts)
    reader.poll()
    view = fleet_view(reader, fleet.run.spec())
    assert view.steps == (12, 12) and view.answering == 3
    found = {one.key: one.title for one in view.findings}
    assert found["host_lost"] == "host node0003 does not answer"
    assert found["slowest_host"] == f"all hosts wait for rank {8 + SLOW_RANK} of host node0002"
    assert [row.alive for row in view.rows] == [4, 4, 4, 4]


def test_what_a_host_costs_is_measured_on_lines_that_were_written(tmp_path: Path) -> None:
    found = host_cost(tmp_path, 30, 2)
    assert (
        found["cpu_milliseconds_per_summary"] > 0 and 0 < found["line_bytes"] <= found["longest_line_bytes"]
    )
    assert "30" in table([found])
