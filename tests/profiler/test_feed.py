"""A reader of a run that is being written shows what is there and knows when nobody writes any more."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import recording
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import RankExited, RunEnded, StepFinished
from llmtop.profiler.record.feed import START_GRACE_SECONDS, RunReader, RunStream, read_state
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


def test_a_run_that_has_ended_is_never_lost(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, end="failed")
    dead_supervisor(run)
    assert RunReader(run).poll().status == "failed"


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
