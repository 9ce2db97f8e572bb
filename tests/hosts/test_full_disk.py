"""A host with a full disk stays in the run, is named where something is asked of it, and hears all later."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from llmtop.profiler.record.hostevents import HostFound, HostLost
from tests.faults.disks import Disk
from tests.hosts.in_lab import GRACES, IN_LAB, fake
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.slow, IN_LAB]
HOST_SECONDS = 12.0


def disk_of(lab: Lab, name: str) -> Disk:
    """A small one for the runs of a host, which sees it alone."""
    server = lab._servers[name].pid
    small = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(lab.runs_of(name))]
    subprocess.run(["nsenter", "--mount", f"--target={server}", *small], check=True)
    return Disk(Path(f"/proc/{server}/root{lab.runs_of(name)}"))


def test_a_host_with_a_full_disk_stays_in_the_run_and_hears_later_what_it_was_told(lab: Lab) -> None:
    disk = disk_of(lab, "h2")
    run = fake(lab, "trains", graces=GRACES.replace("host=40", f"host={HOST_SECONDS:g}"))
    run.wait_for_step(2)
    disk.fill()
    full_at = run.events(0)[-1].t
    # It would hold the launching machine for gone by then.
    run.wait_for(lambda: run.events(0)[-1].t > full_at + 1.2 * HOST_SECONDS)
    assert run.run.supervisor_alive() and "h2" not in {one.host for one in run.of(HostLost)}
    # The other one may be lost for a while to a machine that has no time for either.
    run.wait_for(lambda: len(run.of(HostFound)) == len(run.of(HostLost)))
    refused = lab.llmtop("set", run.run.run_id, "learning_rate=0.001", check=False)
    assert refused.returncode != 0
    assert "host h2 takes no change now (write: No space left on device)" in refused.stderr
    before = run.lines_of(1)
    disk.make_room()
    run.wait_for(lambda: run.lines_of(1) > before)
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    assert run.end().state == "stopped"
