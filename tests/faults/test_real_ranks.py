"""Harm to real ranks: one hangs in a collective, one is killed, the disk of the checkpoints is full."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from benchmarks.reliability.kills import kills
from benchmarks.reliability.powercut import power_cuts
from benchmarks.reliability.runs import rank_pids, tiny_spec, wait_for
from benchmarks.reliability.sound import problems_of
from llmtop.profiler.findings.find import findings
from llmtop.profiler.record.events import HangSuspected, StepFinished
from llmtop.profiler.record.eventtail import EventTail
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import SUPERVISOR
from llmtop.trainer import control
from llmtop.trainer.tune.nest import Nest
from llmtop.tui.commands.stop import processes_left
from tests.faults.disks import MIB, memory_disk

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def nest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nest]:
    with Nest(tiny_spec(), tmp_path_factory.mktemp("nest") / "nest.log", print) as made:
        made.wait_ready()
        yield made


def test_a_rank_that_hangs_in_a_collective_is_suspected_and_goes_on(nest: Nest, tmp_path: Path) -> None:
    run = nest.start(tiny_spec(hang_floor_seconds=5.0, hang_factor=2.0), tmp_path)
    wait_for(lambda: read_state(run).steps_finished >= 3, "steps")
    stopped = rank_pids(run)[1]
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: read_state(run).hang_seconds is not None, "the suspicion")
    told = {f.key: f for f in findings(read_state(run), run.spec(), run.prediction())}
    assert told["hang"].severity == "critical" and "llmtop stacks" in told["hang"].change
    before = read_state(run).steps_finished
    os.kill(stopped, signal.SIGCONT)
    wait_for(lambda: read_state(run).steps_finished > before + 2, "steps after it")
    assert read_state(run).hang_seconds is None
    assert (
        len([e for e in EventTail(run.events_path(SUPERVISOR)).poll() if isinstance(e, HangSuspected)]) >= 1
    )
    os.kill(stopped, signal.SIGSTOP)
    control.stop(run, save=False)
    end = control.wait_for_end(run, 120)
    assert end is not None and end.state == "stopped"
    assert not processes_left(run)


def test_a_checkpoint_without_room_is_refused_and_the_next_one_saved(nest: Nest, tmp_path: Path) -> None:
    with memory_disk(tmp_path / "disk", 160 * MIB) as disk:
        run = nest.start(tiny_spec(keep_checkpoints=2), disk.path)
        wait_for(lambda: bool(read_state(run).checkpoints), "the first checkpoint")
        disk.fill()
        wait_for(lambda: bool(read_state(run).unwritable), "the full disk")
        first = read_state(run).checkpoints[-1]
        pids = rank_pids(run)
        worked = _worked_seconds(pids)
        # Enough for some steps and for the next checkpoint, which nobody can write of now.
        wait_for(lambda: _worked_seconds(pids) > worked + 4.0, "work of the ranks")
        disk.make_room()
        wait_for(lambda: bool(read_state(run).checkpoints_refused), "the refusal")
        wait_for(lambda: read_state(run).checkpoints[-1].step > first.step, "a checkpoint after it")
        control.stop(run, save=True)
        end = control.wait_for_end(run, 120)
        assert end is not None and end.state == "stopped" and "saved in" in end.reason
        steps = [e.step for e in EventTail(run.events_path(0)).poll() if isinstance(e, StepFinished)]
        assert steps == list(range(1, len(steps) + 1)), "none of them is lost"
        refused = read_state(run).checkpoints_refused[-1]
        assert "free" in refused.why
        assert problems_of(run, kept=2) == []


def _worked_seconds(pids: dict[int, int]) -> float:
    """Processor time of the ranks: training takes it, waiting for a disk does not."""
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids.values())


def test_kills_at_random_moments_leave_sound_runs(nest: Nest, tmp_path: Path) -> None:
    rows = list(kills(nest, tmp_path, 3, seed=3))
    assert [row["problems"] for row in rows] == [[]] * 3


def test_copies_at_random_moments_are_sound_runs(nest: Nest, tmp_path: Path) -> None:
    rows = list(power_cuts(nest, tmp_path, 6, seed=3))
    assert [row["problems"] for row in rows] == [[]] * 6
