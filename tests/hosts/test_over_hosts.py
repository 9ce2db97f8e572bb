"""A lead, supervisors of two hosts and fake ranks: launch, stop, change, relaunch, failures in words."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtop.presets.errors import JobFailedError, UsageError
from llmtop.profiler.fleet.summary import decoder
from llmtop.profiler.record.changeevents import ChangeAsked, Restaged
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import ControlAnswered, RankStarted, RunEnded, RunStarted
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.hostabout import read_about
from llmtop.profiler.record.hostevents import ClockMeasured, HostJoined, HostLeft
from llmtop.profiler.record.rundir import SUPERVISOR
from llmtop.trainer import control
from llmtop.trainer.hosts import crew, ending
from llmtop.trainer.hosts.members import Member
from llmtop.trainer.hosts.transport import OverSsh
from llmtop.trainer.hosts.versions import require_alike
from llmtop.trainer.launch import resume_run
from llmtop.tui.commands import stop
from tests.hosts.lab import wait_for
from tests.hosts.over_hosts import GRACES, OverHosts, Start
from tests.trainer.supervised import TIMEOUT_SECONDS


@pytest.mark.parametrize("launcher", ["ssh", "srun", "pdsh"])
def test_a_run_over_two_hosts_stops_when_it_is_asked_to(start: Start, launcher: str) -> None:
    run = start("trains", slots=2, launcher=launcher)
    run.wait_for_step(3)
    run.wait_for(lambda: {one.host for one in run.of(ClockMeasured)} == {"h1", "h2"})
    assert all(abs(one.offset_seconds) <= one.error_seconds + 0.01 for one in run.of(ClockMeasured))
    control.stop(run.run, save=True)
    end = run.end()
    assert end.state == "stopped" and "saved in checkpoints/x" in end.reason
    joined = run.of(HostJoined)
    assert [(one.host, one.first_rank, one.ranks) for one in joined] == [("h1", 0, 2), ("h2", 2, 2)]
    assert {one.rank for one in run.of(RankStarted)} == {0, 1, 2, 3}
    assert {one.host for one in run.of(HostLeft)} == {"h1", "h2"}
    for name in ("h1", "h2"):
        told = run.host_events(name)
        assert isinstance(told[0], RunStarted) and isinstance(told[-1], RunEnded)
        summaries = run.host(name).summary_path.read_bytes().splitlines()
        assert decoder().decode(summaries[-1]).status == "stopped"
    state = read_state(run.run)
    assert state.status == "stopped" and set(state.ranks) == {0, 1, 2, 3}
    # The values of variables lie in no file once the run is over.
    assert not any(b"fake_rank.py" in path.read_bytes() for path in run.run.path.rglob("*.json"))


def test_each_rank_knows_its_place_and_where_to_meet(start: Start) -> None:
    run = start("shows_environment", slots=2)
    run.end()
    told = [json.loads((run.run.path / f"environment-{rank}").read_text()) for rank in range(4)]
    assert [(one["RANK"], one["LOCAL_RANK"]) for one in told] == [
        ("0", "0"),
        ("1", "1"),
        ("2", "0"),
        ("3", "1"),
    ]
    assert {(one["WORLD_SIZE"], one["LOCAL_WORLD_SIZE"]) for one in told} == {("4", "2")}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told}) == 1
    about = read_about(run.host("h1"))
    assert about is not None and told[3]["MASTER_ADDR"] == about.address
    assert about.versions["python"] and about.versions["torch"]


def test_changes_reach_all_hosts_between_steps_and_by_a_relaunch(start: Start) -> None:
    run = start("changes")
    run.wait_for_step(2)
    hot = control.change(run.run, control.SetParams(words=("learning_rate=0.001",)))
    answer = control.wait_until_settled(run.run, hot, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "done"
    cold = control.change(run.run, control.SetParams(words=("zero=1",)))
    answer = control.wait_until_settled(run.run, cold, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "done", answer
    assert len(run.of(Restaged)) == 1
    assert run.run.in_force().setting == 2
    assert [one.setting for one in run.of(RankStarted)] == [0, 0, 2, 2]
    assert not (run.run.path / "restage").exists()
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"


def test_a_setting_that_fails_on_one_host_leaves_the_run_on_the_old_one(start: Start) -> None:
    run = start("changes")
    (run.run.path / "fails-on").write_text("1")
    run.wait_for_step(2)
    asked = control.change(run.run, control.SetParams(words=("zero=1",)))
    answer = control.wait_until_settled(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "refused" and "back on its old setting" in answer.reason
    assert run.run.in_force().setting == 0
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"


def test_the_rank_at_fault_is_named_and_no_rank_is_left_on_another_host(start: Start) -> None:
    run = start("out_of_memory")
    end = run.end()
    assert end.state == "out_of_memory" and end.rank == 1


def test_a_host_whose_supervisor_is_killed_is_named_also_to_whoever_waits_for_a_change(start: Start) -> None:
    run = start("changes")
    (run.run.path / "hangs-early").write_text("1")
    run.wait_for_step(2)
    asked = control.change(run.run, control.SetParams(words=("zero=1",)))
    run.wait_for(lambda: bool(run.of(ChangeAsked)))
    identity = run.host("h2").supervisor_identity()
    assert identity is not None
    os.kill(identity.pid, signal.SIGKILL)
    answer = control.wait_until_settled(run.run, asked, TIMEOUT_SECONDS)
    assert answer is not None and answer.answer == "refused", answer
    assert "made ready (host h2: its supervisor" in answer.reason
    end = run.end()
    assert end.state == "failed" and "host h2: its supervisor" in end.reason
    assert "its ranks are 1" in end.reason


def test_what_a_host_ends_for_by_itself_is_no_stop_on_request(start: Start) -> None:
    run = start("trains", graces=GRACES.replace("finish=30", "finish=3"))
    run.wait_for_step(2)
    identity = run.host("h2").supervisor_identity()
    assert identity is not None
    os.kill(identity.pid, signal.SIGTERM)
    end = run.end()
    assert end.state == "failed" and end.reason.startswith("host h2 ended its ranks: received SIGTERM. ")


def test_hosts_end_by_themselves_when_the_lead_is_gone(start: Start) -> None:
    run = start("trains", graces=GRACES.replace("host=60", "host=12"))
    run.wait_for_step(2)
    os.kill(run.supervisor_pid, signal.SIGKILL)
    for name in ("h1", "h2"):
        wait_for(lambda name=name: isinstance(run.host_events(name)[-1], RunEnded), run.log)  # type: ignore[misc]
        last = run.host_events(name)[-1]
        assert isinstance(last, RunEnded) and "was not heard of for 12 s" in last.reason
    run.comes_to_nothing()


def test_stop_reaches_the_hosts_of_a_run_whose_lead_was_killed(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("trains")
    run.wait_for_step(2)
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive())
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "runs"))
    stopped = subprocess.run(
        [sys.executable, "-m", "llmtop.tui.cli", "stop", run.run.run_id], capture_output=True, text=True
    )
    assert stopped.returncode == 0, stopped.stderr
    assert "no process is left" in stopped.stdout
    assert run.processes() == [] and run.supervisors_left() == [], "what was said is so"
    last = [run.host_events(name)[-1] for name in ("h1", "h2")]
    assert all(isinstance(one, RunEnded) for one in last)


def test_a_host_is_over_once_its_supervisor_is_gone_and_not_with_its_last_words(tmp_path: Path) -> None:
    run = OverHosts(tmp_path)
    member = Member(run.run, run.hosts.hosts[0])
    with EventWriter(member.dir.events_path(SUPERVISOR), SUPERVISOR) as log:
        log.write(RunEnded(state="stopped", reason="as ordered"))
    member.ended = RunEnded(state="stopped", reason="as ordered")
    member.transport = ssh = OverSsh.__new__(OverSsh)
    link: Any = SimpleNamespace(opened=True, heard_pong=True, alive=True, ended_code=None, problem="")
    ssh.link, link.holds_started = link, False
    assert not ending._is_over(member) and crew._is_on_its_way_out(member)
    # Asked before it had said who it is, and not again since: its end would be told.
    link.alive, link.holds_started = None, True
    assert not ending._is_over(member) and crew._is_on_its_way_out(member)
    link.alive, link.holds_started = True, False
    assert "still on its way out" in ending._why(member)
    link.ended_code = 0
    assert ending._is_over(member) and not crew._is_on_its_way_out(member)
    link.ended_code, link.alive = None, False
    assert ending._is_over(member) and not crew._is_on_its_way_out(member)
    # One that cannot be asked: its last words count once it is known that nobody answers.
    link.opened = False
    assert not ending._is_over(member) and not crew._is_on_its_way_out(member)
    link.problem = "No route to host"
    assert ending._is_over(member)
    member.orders.close()


def test_stop_says_that_no_process_is_left_once_none_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = OverHosts(tmp_path).run
    seen = [[7], [7], []]
    monkeypatch.setattr(stop, "processes_left", lambda found: seen.pop(0))
    stop._require_none_left(run)
    assert not seen
    monkeypatch.setattr(stop, "processes_left", lambda found: [7])
    monkeypatch.setattr(stop, "_LEAVE_SECONDS", 0.1)
    with pytest.raises(JobFailedError, match="are left: 7"):
        stop._require_none_left(run)


def test_a_run_is_gone_on_with_on_its_hosts(start: Start) -> None:
    run = start("changes")
    run.wait_for_step(2)
    control.stop(run.run, save=False)
    run.end()
    resume_run(run.run)
    run.supervisor_pid = run.run.supervisor_identity().pid  # type: ignore[union-attr]
    run.wait_for(lambda: len(run.of(RankStarted)) == 4)
    # A lead that is killed leaves supervisors on the hosts, which make room for those of the next one.
    os.kill(run.supervisor_pid, signal.SIGKILL)
    wait_for(lambda: not run.run.supervisor_alive())
    resume_run(run.run)
    run.supervisor_pid = run.run.supervisor_identity().pid  # type: ignore[union-attr]
    run.wait_for(lambda: len(run.of(RankStarted)) == 6)
    control.stop(run.run, save=False)
    assert run.end().state == "stopped"
    assert sum(isinstance(event, RunStarted) for event in run.host_events("h2")) == 3


def test_a_host_that_cannot_be_reached_is_named_before_anything_is_started(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "unreachable-h2").touch()
    run = start("trains", graces=GRACES + ",connect=4")
    end = run.end()
    assert end.state == "failed" and "h2: cannot be reached" in end.reason
    assert "No route to host" in end.reason
    assert run.of(RankStarted) == []


def test_a_host_that_lacks_something_is_named_before_anything_is_started(start: Start) -> None:
    run = start("trains", data="/nowhere/text")
    end = run.end()
    assert end.state == "failed"
    assert end.reason.startswith("host h1 (and 1 other): data /nowhere/text does not exist")
    assert run.of(RankStarted) == []


def test_a_host_without_llmtop_is_named_with_what_python_says(start: Start, tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    run = start("trains", python=str(bare))
    end = run.end()
    assert "its supervisor ended with exit code 1; it says: " in end.reason and "llmtop" in end.reason


def test_hosts_with_other_versions_are_named_with_both() -> None:
    first = {"python": "3.11", "torch": "2.13.0", "deepspeed": "0.19.8"}
    require_alike({"a": first, "b": dict(first)})
    with pytest.raises(UsageError) as told:
        require_alike(
            {"a": first, "b": {**first, "torch": "2.12.1"}, "c": {"python": "3.11", "torch": "2.13.0"}}
        )
    assert "torch 2.12.1 on b, 2.13.0 on a" in str(told.value)
    assert "deepspeed none on c, 0.19.8 on a" in str(told.value)


def test_a_stop_while_hosts_are_waited_for_ends_the_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "unreachable-h2").touch()
    run = start("trains")
    asked = control.stop(run.run, save=False)
    end = run.end()
    assert end.state == "stopped" and "before the first step" in end.reason
    assert run.of(RankStarted) == []
    assert any(isinstance(one, ControlAnswered) and one.request_id == asked for one in run.events())
