"""What a host has of a run that another machine has launched: listed as it is, and not taken for the run."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from llmtop.presets.errors import ExitCode
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.hosts import write_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.hosts import following
from llmtop.tui.cli import main
from tests.cli.conftest import Answer, Llmtop
from tests.hosts.over_hosts import OverHosts, stand_in

PATH_OF_RUNS = "export LLMTOP_RUNS_DIR={root}/runs-of-$host"


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OverHosts:
    """That of h2, long after the launch; the supervisor there is this process."""
    root = tmp_path / "runs-of-h2"
    monkeypatch.setenv("LLMTOP_RUNS_DIR", str(root))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(following.PYTHON, sys.executable)
    stand_in(tmp_path, monkeypatch, more=PATH_OF_RUNS.format(root=tmp_path))
    run = OverHosts(root)
    write_hosts(run.run, run.hosts)
    place = run.host("h2")
    place.own_path.mkdir(parents=True)
    place.write_supervisor_pid()
    started = RunStarted(
        run_id=run.run.run_id, name="x", pid=os.getpid(), host="h2", world_size=2, llmtop_version="0.1.0"
    )
    with EventWriter(place.events_path(SUPERVISOR), src=SUPERVISOR) as log:
        log.write(started)
    os.utime(run.run.spec_path, (1e9, 1e9))
    return run


@pytest.fixture
def llmtop(capsys: pytest.CaptureFixture[str]) -> Llmtop:
    def call(*words: str) -> Answer:
        code = main(list(words))
        return Answer(code, *capsys.readouterr())

    return call


@pytest.mark.parametrize("words", [("ls", "--json"), ("ls", "h2:", "--json")])
def test_it_is_listed_as_it_is_there(part: OverHosts, llmtop: Llmtop, words: tuple[str, ...]) -> None:
    def told(name: str) -> object:
        return llmtop(*words).json()["runs"][0][name]

    assert told("status") == "starting" and told("step") == 0
    # It has no rank 0, and the log of its own first one goes on in other files.
    with EventWriter(part.run.events_path(1), src="rank1", segment_bytes=20_000) as log:
        for step in range(1, 301):
            log.write(StepFinished(step=step, step_seconds=0.5))
    assert told("step") == 300
    with EventWriter(part.host("h2").events_path(SUPERVISOR), src=SUPERVISOR) as log:
        log.write(RunEnded(state="stopped", reason="stopped on request"))
    assert told("status") == "stopped"


@pytest.mark.parametrize(
    "words",
    [
        ("stop", "RUN"),
        ("set", "RUN", "learning_rate=0.001"),
        ("delete", "RUN", "--yes"),
        ("resume", "RUN", "--detach"),
    ],
)
def test_what_goes_on_there_is_neither_ended_nor_removed(
    part: OverHosts, llmtop: Llmtop, words: tuple[str, ...]
) -> None:
    """It would be told lost: its processes were ended, its checkpoints deleted, a second lead started."""
    run_id = part.run.run_id
    answer = llmtop(*(run_id if word == "RUN" else word for word in words))
    assert answer.code == ExitCode.USAGE, answer
    assert part.run.spec_path.exists() and not part.run.supervisor_pid_path.exists()
    if words[0] in ("stop", "set"):
        assert "this folder is one host's part of it" in answer.err


def test_the_launching_machine_has_the_whole(part: OverHosts) -> None:
    assert part.run.supervisor_alive()
    part.run.write_supervisor_pid(1)
    part.run.require_own("has nothing to stop")
    shutil.rmtree(part.run.path / "hosts")
    assert RunDir(part.run.path).supervisor_alive()
