"""The wall clock is set back or ahead while a run is recorded: no event is lost, and steps stay in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.events import HardwareSampled, RankStarted, RunEnded, RunStarted, StepFinished
from llmtop.profiler.record.feed import RunReader, read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.replay import Replay
from llmtop.profiler.report.build import build_report
from llmtop.trainer.supervisor.patience import Patience
from tests.recorded_spec import recorded_prediction, recorded_spec

BEGAN = 1_796_000_000.0
JUMPS = (-3600.0, 3600.0, -86400.0 * 365, 86400.0)


class JumpingClock:
    def __init__(self) -> None:
        self.seconds, self.jumped = 0.0, 0.0

    def clock(self) -> Clock:
        return Clock(wall=lambda: BEGAN + self.seconds + self.jumped, monotonic=lambda: self.seconds)


@pytest.mark.parametrize("jump", JUMPS)
@pytest.mark.parametrize("back_again", [False, True])
def test_a_jump_of_the_clock_loses_nothing(tmp_path: Path, jump: float, back_again: bool) -> None:
    spec = recorded_spec("cpu", ranks=2)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    now = JumpingClock()
    logs = {
        name: EventWriter(
            run.events_path(name), f"rank{name}" if name in (0, 1) else str(name), clock=now.clock()
        )
        for name in ("supervisor", "hardware", 0, 1)
    }
    logs["supervisor"].write(
        RunStarted(run_id=run.run_id, name="x", pid=1, host="h", world_size=2, llmtop_version="0")
    )
    for rank in (0, 1):
        logs["supervisor"].write(RankStarted(rank=rank, pid=10 + rank))
    run.write_supervisor_pid()
    live = RunReader(run)
    bookmarker = Bookmarker(run, wall=now.clock().wall, monotonic=now.clock().monotonic)
    for step in range(1, 61):
        now.seconds += 1.0
        if step == 20:
            now.jumped = jump
        if step == 40 and back_again:
            now.jumped = 0.0
        for rank in (0, 1):
            logs[rank].write(StepFinished(step=step, loss=1.0 / step, step_seconds=1.0))
        logs["hardware"].write(HardwareSampled())
        state = live.poll()
        assert state.steps_finished == step and state.hardware_samples == step
        bookmarker.turn()
    logs["supervisor"].write(RunEnded(state="completed", reason="done"))
    bookmarker.finish()
    _all_is_there(live.poll())
    _all_is_there(read_state(run))
    run.bookmark_path.unlink(missing_ok=True)
    _all_is_there(read_state(run))
    replay = Replay(run, lambda _: {})
    replay.read_on(60.0)
    replay.seek(replay.end)
    _all_is_there(replay.state)
    assert build_report(run).steps_finished == 60


def _all_is_there(state: RunState) -> None:
    assert state.status == "completed"
    assert [rank.steps_seen for rank in state.ranks.values()] == [60, 60]
    assert state.series.steps == tuple(range(1, 61))
    assert list(state.series.times) == sorted(state.series.times) or len(set(state.series.steps)) == 60
    assert state.last_loss == 1 / 60


def test_waiting_is_counted_by_a_clock_that_nobody_sets() -> None:
    now = [0.0]
    patience = Patience(5.0, clock=lambda: now[0])
    patience.wait(10.0, "waited")
    now[0] = 9.0
    assert patience.next_action() is None
    now[0] = 10.0
    assert patience.next_action() == "terminate"
