"""Runs on another machine by `HOST:RUN`: seen, asked and stopped over what stands for ssh."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode, LlmtopError, UsageError
from llmtop.profiler.record.feed import read_state
from llmtop.trainer import control
from llmtop.trainer.hosts import following
from llmtop.trainer.hosts.following import Following, remote_name
from tests.hosts.lab import wait_for
from tests.hosts.over_hosts import stand_in
from tests.trainer.supervised import GRACES, TIMEOUT_SECONDS, Supervised, cleaned_up, fake_ranks

Far = Callable[..., Supervised]
FAR = "export LLMTOP_RUNS_DIR={runs}"


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Far]:
    """A run on the far machine, whose folder of runs is another one than here."""
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(tmp_path / "near-runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(following.PYTHON, sys.executable)
    stand_in(tmp_path, monkeypatch, more=FAR.format(runs=tmp_path / "far-runs"))
    with cleaned_up() as started:

        def make(scenario: str, graces: str = "") -> Supervised:
            fake_ranks(monkeypatch, scenario, graces)
            run = Supervised(tmp_path / "far-runs")
            started.append(run)
            run.start()
            return run

        yield make


def llmtop(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "llmtop.tui.cli", *words], capture_output=True, text=True, timeout=90
    )


@pytest.mark.parametrize(
    ("ref", "named"),
    [
        ("me@gpu-1:latest", ("me@gpu-1", "latest")),
        ("gpu-1:2026", ("gpu-1", "2026")),
        ("latest", None),
        ("/a/b:c", None),
        ("./x:y", None),
    ],
)
def test_which_words_mean_another_machine(ref: str, named: tuple[str, str] | None) -> None:
    assert remote_name(ref) == named


def test_a_run_on_another_machine_is_followed_and_asked(far: Far, tmp_path: Path) -> None:
    run = far("changes")
    run.wait_for_step(3)
    follows = Following("gpu-1", "latest")
    try:
        here = follows.run
        assert here.run_id == run.run.run_id and here.path != run.run.path
        assert here.supervisor_alive()
        wait_for(lambda: read_state(here).steps_finished >= 3)
        asked = control.change(here, control.SetParams(words=("learning_rate=0.001",)))
        answer = control.wait_until_settled(here, asked, TIMEOUT_SECONDS)
        assert answer is not None and answer.answer == "done"
        control.stop(here, save=False)
        ended = control.wait_for_end(here, TIMEOUT_SECONDS)
        assert ended is not None and ended.state == "stopped"
        wait_for(lambda: not here.supervisor_alive())
        assert run.end().state == "stopped"
        logs = list(run.run.path.glob("*.jsonl"))
        wait_for(
            lambda: all((here.path / path.name).read_bytes() == path.read_bytes() for path in logs),
            lambda: [path.name for path in here.path.iterdir()],
        )
    finally:
        follows.close()


def test_commands_take_a_run_on_another_machine(far: Far, tmp_path: Path) -> None:
    run = far("trains")
    run.wait_for_step(3)
    stopped = llmtop("stop", "gpu-1:latest")
    assert stopped.returncode == 0, stopped.stderr
    assert f"run {run.run.run_id} stopped" in stopped.stdout
    assert "it has ended on gpu-1" in stopped.stdout and "no process is left" not in stopped.stdout
    run.end()
    watched = llmtop("attach", "gpu-1:latest", "--plain")
    assert watched.returncode == 0, watched.stderr
    assert "stopped" in watched.stdout
    assert llmtop("report", f"gpu-1:{run.run.run_id}").stdout.count("stopped on request")
    assert llmtop("logs", "gpu-1:latest").returncode == 0


def test_of_a_lost_run_on_another_machine_nothing_is_said_to_have_been_ended(
    far: Far,
) -> None:
    run = far("trains")
    run.wait_for_step(1)
    os.kill(run.supervisor_pid, 9)
    wait_for(lambda: not run.run.supervisor_alive())
    answer = llmtop("stop", "gpu-1:latest")
    assert answer.returncode == ExitCode.JOB_FAILED and "no process" not in answer.stdout
    assert f"ssh -t gpu-1 llmtop stop {run.run.run_id}" in answer.stderr


def test_one_that_is_lost_while_it_stops_is_not_said_to_have_ended(
    far: Far,
) -> None:
    # For as long as it takes to kill the supervisor meanwhile.
    run = far("is_stubborn", GRACES)
    run.wait_for_step(1)
    words = [sys.executable, "-m", "llmtop.tui.cli", "stop", "gpu-1:latest"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as stop:
        wait_for(lambda: bool(control.answers(run.run)))
        os.kill(run.supervisor_pid, 9)
        out, error = stop.communicate(timeout=90)
    assert stop.returncode == ExitCode.JOB_FAILED and out == ""
    assert f"ssh -t gpu-1 llmtop stop {run.run.run_id}" in error


def test_a_request_that_did_not_get_there_is_not_made_later(far: Far, tmp_path: Path) -> None:
    run = far("trains")
    run.wait_for_step(1)
    first = Following("gpu-1", "latest")
    first.close()
    control.stop(first.run, save=False)
    second = Following("gpu-1", "latest")
    try:
        assert list(second.run.control_dir.iterdir()) == []
        before = read_state(second.run).steps_finished
        wait_for(lambda: read_state(second.run).steps_finished > before + 20)
    finally:
        second.close()
    assert list(run.run.control_dir.iterdir()) == []


def test_two_viewers_of_one_run_do_not_meet(far: Far, tmp_path: Path) -> None:
    run = far("trains")
    run.wait_for_step(1)
    first, second = Following("gpu-1", "latest"), Following("gpu-1", "latest")
    try:
        assert first.run.path != second.run.path
        wait_for(lambda: read_state(second.run).steps_finished > 1)
    finally:
        first.close()
        second.close()
    assert not second.run.path.exists() and first.run.path.exists()


def test_a_host_that_does_not_answer_and_a_run_that_is_not_there(far: Far, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run 'latest' on gpu-1"):
        Following("gpu-1", "latest")
    (tmp_path / "notes" / "unreachable-gpu-2").touch()
    with pytest.raises(LlmtopError, match="gpu-2 cannot be asked") as told:
        Following("gpu-2", "latest")
    assert "No route to host" in str(told.value)
    with pytest.raises(UsageError, match="is not the name of a host"):
        Following("-oProxyCommand=x", "latest")
    assert os.environ["LLMTOP_RUNS_DIR"] != str(tmp_path / "far-runs")
