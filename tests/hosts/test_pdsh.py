"""pdsh itself starts the hosts: network namespaces with an sshd each, and one folder that all of them see."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.hostevents import HostJoined, HostLeft
from tests.hosts.in_lab import fake, tidy_lab
from tests.hosts.lab import Lab, wait_for, why_not

WHY_NOT = why_not() or ("" if shutil.which("pdsh") else "pdsh is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "pdsh is there")]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with tidy_lab(tmp_path, shared=True) as made:
        yield made


def test_hosts_are_started_by_pdsh_and_leave_when_the_run_is_stopped(lab: Lab) -> None:
    # pdsh takes a user for a word of its own, and its hosts in an order of its own.
    names = ("h2", "root@h1")
    run = fake(lab, "trains", "--launcher", "pdsh", hostfile=lab.hostfile(2, names))
    run.wait_for_step(2)
    joined = run.of(HostJoined)
    assert [(one.host, one.first_rank) for one in joined] == [("h2", 0), ("root@h1", 2)]
    assert {one.rank for one in run.of(RankStarted)} == {0, 1, 2, 3}
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    assert run.end().state == "stopped"
    assert {one.host for one in run.of(HostLeft) if one.answered} == set(names)


def test_what_ssh_says_to_pdsh_of_one_host_is_told_while_the_others_wait(lab: Lab) -> None:
    lab.kill_processes("h2")
    run = fake(lab, "trains", "--launcher", "pdsh")
    end = run.end()
    assert end.state == "failed" and "1 host of 2 cannot be used: h2: pdsh says: exited" in end.reason
    assert "exited with exit code 255; it says: ssh: connect to host" in end.reason
    assert "Connection refused" in end.reason and "--exclude" in end.fix
    left = {one.host: one for one in run.of(HostLeft)}
    assert left["h1"].answered and not left["h2"].was_there


def test_a_lost_connection_ends_nothing_that_pdsh_has_started(lab: Lab) -> None:
    """Both sides still hear of each other, through the folder."""
    run = fake(lab, "trains", "--launcher", "pdsh")
    run.wait_for_step(2)
    here = set(lab.processes("lead"))
    connections = [
        one.pid for one in psutil.process_iter(["name"]) if one.info["name"] == "ssh" and one.pid in here
    ]
    assert len(connections) == 2
    for pid in connections:
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, connections)), run.log)
    before = run.lines_of(1)
    run.wait_for(lambda: run.lines_of(1) > before)
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    assert run.end().state == "stopped"
    assert "ssh killed by signal 9" in run.run.log_path("supervisor").read_text()


def test_hosts_end_when_the_lead_is_gone_and_nothing_of_pdsh_stays(lab: Lab) -> None:
    run = fake(lab, "trains", "--launcher", "pdsh")
    run.wait_for_step(2)
    lead = run.run.supervisor_identity()
    assert lead is not None
    os.kill(lead.pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive())
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    wait_for(lambda: lab.processes("lead") == [], lambda: lab.processes("lead"))
