"""A supervisor that has run out of what the system gives: open files, processes."""

from __future__ import annotations

import os
import resource
import signal

import psutil
import pytest

from llmtop.profiler.record.events import RankStarted
from llmtop.trainer import control
from tests.faults.conftest import Start
from tests.trainer.supervised import SHORT_GRACES, TIMEOUT_SECONDS

LIMITS = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC}
_NOT_LIMITED = pytest.mark.skipif(os.geteuid() == 0, reason="root may have any number of processes")
_TURNS = 20
_NO_MORE_FILES = "requests and samples wait: [Errno 24] Too many open files"


def turns(pid: int) -> int:
    """How often a process has waited: its loop goes on."""
    return int(psutil.Process(pid).num_ctx_switches().voluntary)


@pytest.mark.parametrize("what", ["files", pytest.param("processes", marks=_NOT_LIMITED)])
def test_a_supervisor_that_is_given_nothing_more_goes_on(start: Start, what: str) -> None:
    run = start("trains")
    run.wait_for_step(3)
    run.wait_for(lambda: len(run.events("hardware")) > 0)
    pid = run.supervisor_pid
    before, turned = resource.prlimit(pid, LIMITS[what]), turns(pid)
    ranks = [psutil.Process(event.pid) for event in run.of(RankStarted)]
    resource.prlimit(pid, LIMITS[what], (1, before[1]))
    if what == "files":
        # Not each of its waits is the end of a turn.
        run.wait_for(lambda: _NO_MORE_FILES in run.log())
    run.wait_for(lambda: turns(pid) > turned + _TURNS)
    assert all(rank.is_running() for rank in ranks)
    if what == "files":
        assert run.log().count(_NO_MORE_FILES) == 1
    resource.prlimit(pid, LIMITS[what], before)
    samples = len(run.events("hardware"))
    run.wait_for(lambda: len(run.events("hardware")) > samples + 2)
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"
    assert "Traceback" not in run.log()


def test_ranks_are_ended_where_processes_cannot_be_listed(start: Start) -> None:
    run = start("steps_when_told", graces=SHORT_GRACES)
    run.wait_for_files("ready")
    ranks = [psutil.Process(event.pid) for event in run.of(RankStarted)]
    pid = run.supervisor_pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, before[1]))
    # No request can be read by then.
    os.kill(pid, signal.SIGTERM)
    assert not psutil.wait_procs(ranks, timeout=TIMEOUT_SECONDS)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    assert run.end().state == "stopped"
