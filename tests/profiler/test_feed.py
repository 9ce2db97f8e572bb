"""A reader of a run that is being written shows what is there and knows when nobody writes any more."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.presets.spec import Script
from llmtop.profiler.fold.ending import ending
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import feed, recording
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RankExited, RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.feed import START_GRACE_SECONDS, RunReader, RunStream, read_state
from llmtop.profiler.record.leftovers import RUN_MARK
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import write_atomic
from tests.recorded import BEGAN, ManualClock, make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec


def empty_run(root: Path) -> RunDir:
    spec = recorded_spec()
    return RunDir.create(root, spec, recorded_prediction(spec), {})


def dead_supervisor(run: RunDir) -> None:
    identity = process_identity(os.getpid())
    assert identity is not None
    gone = msgspec.structs.replace(identity, started_ticks=1)
    write_atomic(run.supervisor_pid_path, msgspec.json.encode(gone))


def test_polling_while_logs_grow_gives_the_state_of_the_whole(tmp_path: Path) -> None:
    finished = make_recorded_run(tmp_path / "done")
    growing = empty_run(tmp_path / "live")
    growing.write_supervisor_pid()
    reader = RunReader(growing)
    assert reader.poll().status == "starting"
    contents = {p.name: p.read_bytes() for p in finished.path.glob("*.jsonl")}
    for share in (0.1, 0.35, 0.351, 0.8, 1.0):
        for name, content in contents.items():
            (growing.path / name).write_bytes(content[: round(len(content) * share)])
        state = reader.poll()
    assert replace(state, run_id=finished.run_id) == read_state(finished)
    assert state.status == "completed"
    assert set(state.ranks) == {0, 1}


def test_nothing_new_gives_the_same_object(tmp_path: Path) -> None:
    reader = RunReader(make_recorded_run(tmp_path, end=None))
    state = reader.poll()
    assert state.status == "running"
    assert reader.poll() is state


def test_events_of_all_logs_come_in_the_order_of_time(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    events = list(RunStream(run).poll())
    assert [event.t for event in events] == sorted(event.t for event in events)
    assert fold(RunState(run_id=run.run_id), events) == read_state(run)


def test_a_run_without_end_and_supervisor_is_lost(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, end=None)
    reader = RunReader(run)
    assert reader.poll().status == "running"
    dead_supervisor(run)
    lost = reader.poll()
    assert lost.status == "lost"
    assert reader.poll() is lost
    with EventWriter(run.events_path("supervisor"), "supervisor") as writer:
        writer.write(RankExited(rank=0, pid=1, signal="SIGKILL"))
        assert reader.poll().status == "lost"
        writer.write(RunEnded(state="failed", reason="rank 0 was killed by SIGKILL"))
    assert reader.poll().status == "failed"


@pytest.fixture
def left_behind() -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that carries the mark of a run and waits to be killed."""
    begun: list[subprocess.Popen[bytes]] = []

    def start(run_id: str) -> subprocess.Popen[bytes]:
        command = (sys.executable, "-c", "import sys; print(1, flush=True); sys.stdin.read()")
        environment = {**os.environ, RUN_MARK: run_id}
        pipe = subprocess.PIPE
        begun.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe))
        assert begun[-1].stdout is not None and begun[-1].stdout.readline()
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def test_of_a_lost_run_what_still_runs_is_named_with_how_to_end_it_and_go_on(
    tmp_path: Path, left_behind: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    run = make_recorded_run(tmp_path, end=None, steps=8)
    dead_supervisor(run)
    reader = RunReader(run)
    alone = ending(reader.poll())
    assert "killed, or the machine was restarted" in alone.reason and "llmtop stop" not in alone.fix
    process = left_behind(run.run_id)
    pid, reader = process.pid, RunReader(run)
    state = reader.poll()
    assert state.left is not None and state.left.pids == (pid,) and reader.poll() is state
    end = ending(state)
    assert f"process {pid} of the run still runs, at step {state.steps_finished} by the record" in end.reason
    assert "restarted" not in end.reason
    assert end.fix.startswith(f"llmtop stop {run.run_id} ends what is left; ")
    newest = state.checkpoints[-1].step if state.checkpoints else None
    goes_on = "--anew begins anew" if newest is None else f"goes on after step {newest:,}"
    assert f"llmtop resume {run.run_id} {goes_on}" in end.fix
    saved = CheckpointSaved(step=5, path="/c/step-5", size_bytes=1, seconds=1.0)
    kept = ending(replace(state, checkpoints=(saved,)))
    assert kept.fix.endswith(f"; llmtop resume {run.run_id} goes on after step 5")
    process.kill()
    process.wait()
    state = reader.poll()
    assert state.left is not None and state.left.pids == () and "still runs" not in ending(state).reason


def test_a_lost_script_says_what_to_start_again_and_one_that_was_looked_at_is_looked_at_again(
    tmp_path: Path, left_behind: Callable[[str], subprocess.Popen[bytes]]
) -> None:
    spec = recorded_spec("cpu", ranks=1)

    def lost(script: Script) -> tuple[RunDir, RunState]:
        run = RunDir.create(tmp_path, replace(spec, script=script), recorded_prediction(spec), {})
        dead_supervisor(run)
        return run, read_state(run)

    run, _ = lost(Script(command=("torchrun", "my train.py"), folder="/"))
    pid = left_behind(run.run_id).pid
    end = ending(read_state(run))
    assert f"process {pid} of the run still runs" in end.reason
    assert end.fix.startswith(f"llmtop stop {run.run_id} ends what is left; ")
    assert end.fix.endswith("newest checkpoint where it has one: llmtop run -- torchrun 'my train.py'")
    _, looked = lost(Script(command=("train",), folder="/", pid=pid))
    assert ending(looked).fix == f"llmtop attach --pid {pid} looks at it again"


def test_a_run_that_has_ended_is_never_lost(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, end="failed")
    dead_supervisor(run)
    assert RunReader(run).poll().status == "failed"


@pytest.mark.parametrize("kept", [False, True], ids=["seen before", "kept beside the logs"])
def test_a_run_that_went_on_again_and_died_is_lost_at_the_first_look(
    tmp_path: Path, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of it says that it has ended, which was true once."""
    monkeypatch.setattr(feed, "WORTH_KEEPING_BYTES", 1)
    run = make_recorded_run(tmp_path, end="failed")
    reader = RunReader(run)
    assert reader.poll().status == "failed" and run.bookmark_path.exists()
    dead_supervisor(run)
    with EventWriter(run.events_path("supervisor"), "supervisor") as writer:
        again = RunStarted(
            run_id=run.run_id,
            name="run",
            pid=1,
            host="here",
            world_size=2,
            llmtop_version="0",
            goes_on_after=1,
        )
        writer.write(again)
    if kept:
        reader = RunReader(run)
    assert reader.poll().status == "lost"
    assert reader.poll().status == "lost"


def test_a_new_run_has_time_to_get_a_supervisor(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    created = run.created()
    assert created is not None
    time = ManualClock(created + 1)
    reader = RunReader(run, wall=lambda: time.now)
    assert reader.poll().status == "starting"
    time.advance(START_GRACE_SECONDS)
    assert reader.poll().status == "lost"


def test_ranks_that_appear_later_and_lines_not_understood(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    run.write_supervisor_pid()
    reader = RunReader(run)
    with EventWriter(run.events_path(0), "rank0", clock=ManualClock(BEGAN).clock()) as writer:
        writer.write(StepFinished(step=1, loss=2.0))
    assert set(reader.poll().ranks) == {0}
    with EventWriter(run.events_path(7), "rank7", clock=ManualClock(BEGAN + 1).clock()) as writer:
        writer.write(StepFinished(step=1, loss=2.0))
    run.events_path("hardware").write_text("garbage\n")
    state = reader.poll()
    assert set(state.ranks) == {0, 7}
    assert state.skipped_lines == 1


def test_a_run_that_is_deleted_while_watched_stays_as_it_was(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    reader = RunReader(run)
    state = reader.poll()
    for path in sorted(run.path.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    run.path.rmdir()
    assert reader.poll() is state


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_recorded_run(tmp_path_factory.mktemp("runs"), kind="cuda", ranks=3, steps=8)


@settings(max_examples=12, deadline=None)
@given(part=st.integers(1, 200), part_bytes=st.integers(500, 20_000))
def test_reading_in_parts_comes_to_the_same_state(recorded: RunDir, part: int, part_bytes: int) -> None:
    """Parts of each log hold different spans of time; what is folded never runs ahead of a log."""
    whole = read_state(recorded)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PART_BYTES", part_bytes)
        read_in_parts(recorded, part, whole)


def read_in_parts(run: RunDir, part: int, whole: RunState) -> None:
    reader, polls = RunReader(run), 0
    before = reader.poll(part)
    while reader.behind:
        assert before.status != "lost", "a run that is over is not lost while it is read"
        newest = reader.poll(part)
        assert newest.now is None or before.now is None or newest.now >= before.now
        before, polls = newest, polls + 1
        assert polls < 10_000
    assert before == whole
