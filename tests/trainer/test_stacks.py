"""Stacks of a rank that hangs: it writes them when it is asked; what would die of that is never asked."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import stacks
from llmtop.trainer.stacks import take_stacks
from tests.recorded_spec import recorded_prediction, recorded_spec

HANGS = """
import signal, sys, time
from pathlib import Path
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.stacks import listen_for_stacks

def waits_for_the_others():
    print("up", flush=True)
    sys.stdin.read()

def writes_in_two_parts(own):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})  # as in a handler of C
    own.write_text("the first thread")
    while not own.with_name("go").exists():
        time.sleep(0.01)
    own.write_text("the first thread, and the others")
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})

run = RunDir(Path(sys.argv[1]))
if sys.argv[2] == "listens":
    listen_for_stacks(run, 0)
elif sys.argv[2] == "is held up":
    signal.signal(signal.SIGUSR2, lambda *_: writes_in_two_parts(run.stacks_dir / "rank-0.txt"))
waits_for_the_others()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose supervisor is this process."""
    spec = recorded_spec("cpu")
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    run.write_supervisor_pid()
    return run


def start(run: RunDir, how: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HANGS, str(run.path), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    return process


@pytest.fixture
def hanging(run: RunDir) -> Iterator[subprocess.Popen[str]]:
    process = start(run, "listens")
    yield process
    process.communicate("")


def state_of(pid: int) -> RunState:
    return fold(RunState(world_size=1), [RankStarted(rank=0, pid=pid)])


@pytest.fixture(autouse=True)
def no_py_spy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "py_spy", lambda: None)
    # However busy the machine is.
    monkeypatch.setattr(stacks, "OWN_SECONDS", 120.0)


def test_a_hanging_rank_says_where_it_stands(run: RunDir, hanging: subprocess.Popen[str]) -> None:
    for _ in range(2):
        taken = take_stacks(run, state_of(hanging.pid))
        (one,) = taken.ranks
        assert one.way == "faulthandler" and "waits_for_the_others" in one.text
        assert one.text.count("most recent call first") == 1
        assert one.why == "py-spy is not installed"
    assert taken.path.parent == run.stacks_dir and taken.path.read_text() == taken.text
    assert taken.path.stat().st_mode & 0o777 == 0o600
    assert hanging.poll() is None


def test_a_rank_that_does_not_listen_is_left_alone(run: RunDir) -> None:
    process = start(run, "deaf")
    (one,) = take_stacks(run, state_of(process.pid)).ranks
    assert not one.way and "does not listen" in one.why
    assert process.poll() is None
    process.communicate("")
    assert process.returncode == 0


def test_one_that_is_held_up_while_it_writes_is_waited_for(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.stacks_dir.mkdir()
    own, looks = run.stacks_dir / "rank-0.txt", list[float]()
    process = start(run, "is held up")

    def look(seconds: float) -> None:
        time.sleep(seconds)
        if own.exists() and own.stat().st_size > 0:
            looks.append(seconds)
        if len(looks) == 25:
            (run.stacks_dir / "go").touch()

    monkeypatch.setattr(
        stacks, "time", SimpleNamespace(sleep=look, strftime=time.strftime, gmtime=time.gmtime)
    )
    try:
        (one,) = take_stacks(run, state_of(process.pid)).ranks
        assert one.text == "the first thread, and the others" and len(looks) > 25
    finally:
        (run.stacks_dir / "go").touch()
        process.communicate("")


def test_a_process_that_is_not_the_runs_is_never_asked(run: RunDir, hanging: subprocess.Popen[str]) -> None:
    (other,) = take_stacks(run, state_of(os.getppid())).ranks
    assert not other.text and other.why == "its process is gone"
    run.supervisor_pid_path.unlink()
    (orphan,) = take_stacks(run, state_of(hanging.pid)).ranks
    assert not orphan.text and orphan.why == "its process is gone"


def test_py_spy_comes_first_and_says_why_it_may_not(
    run: RunDir, hanging: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "py-spy"
    program.write_text('#!/bin/sh\necho "Thread 0x1 (idle)\n    all_reduce (torch.py:9) $3"\n')
    program.chmod(0o755)
    monkeypatch.setattr(stacks, "py_spy", lambda: str(program))
    (one,) = take_stacks(run, state_of(hanging.pid)).ranks
    assert one.way == "py-spy" and f"all_reduce (torch.py:9) {hanging.pid}" in one.text
    program.write_text(
        '#!/bin/sh\necho "Permission Denied: Try running again with elevated permissions" >&2\nexit 1\n'
    )
    (one,) = take_stacks(run, state_of(hanging.pid)).ranks
    assert one.way == "faulthandler" and "right to trace): Permission Denied" in one.why


def test_a_run_that_is_over_or_has_not_begun_has_no_stacks(run: RunDir) -> None:
    with pytest.raises(UsageError, match="no process to look at"):
        take_stacks(run, replace(state_of(1), status="completed"))
    with pytest.raises(UsageError, match="no rank yet"):
        take_stacks(run, RunState())
