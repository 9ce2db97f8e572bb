"""Processes that stand still and come back (SIGSTOP, SIGCONT), and signals that end sessions (SIGHUP)."""

from __future__ import annotations

import os
import signal

import psutil

from llmtop.profiler.record.events import RankStarted, StepFinished
from llmtop.profiler.record.feed import read_state
from llmtop.trainer import control
from tests.faults.conftest import Start
from tests.trainer.supervised import GRACES, Supervised


def newest_step(run: Supervised, rank: int) -> int:
    return max((event.step for event in run.events(rank) if isinstance(event, StepFinished)), default=0)


def test_ranks_go_on_while_their_supervisor_stands_still(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    os.kill(run.supervisor_pid, signal.SIGSTOP)
    try:
        before = newest_step(run, 0)
        run.wait_for(lambda: newest_step(run, 0) > before + 5)
        assert read_state(run.run).status == "running"
        asked = control.stop(run.run, save=False)
        assert asked not in control.answers(run.run)
    finally:
        os.kill(run.supervisor_pid, signal.SIGCONT)
    assert run.end().state == "stopped"
    assert [answer.answer for answer in control.answers(run.run)[asked]] == ["accepted", "done"]


def test_a_rank_that_stands_still_is_ended_by_a_stop(start: Start) -> None:
    # Long enough for the other rank to obey.
    run = start("trains", graces=GRACES.replace("stop=60", "stop=4"))
    run.wait_for_step(1)
    stopped = next(event.pid for event in run.of(RankStarted) if event.rank == 1)
    os.kill(stopped, signal.SIGSTOP)
    run.wait_for(lambda: psutil.Process(stopped).status() == psutil.STATUS_STOPPED)
    control.stop(run.run, save=False)
    end = run.end()
    assert end.state == "stopped" and "rank 1 did not stop in time and was killed" in end.reason


def test_a_hangup_of_supervisor_and_ranks_changes_nothing(start: Start) -> None:
    run = start("trains")
    run.wait_for_step(1)
    for pid in (run.supervisor_pid, *(event.pid for event in run.of(RankStarted))):
        os.kill(pid, signal.SIGHUP)
    before = newest_step(run, 1)
    run.wait_for_step(before + 5)
    control.stop(run.run, save=True)
    end = run.end()
    assert end.state == "stopped" and "saved in" in end.reason
