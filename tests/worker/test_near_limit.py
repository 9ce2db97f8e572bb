"""Memory that is nearly full is looked at once, unasked, and its cost is said first."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtop.profiler.probes import snapshotting
from llmtop.profiler.probes.nearlimit import NearLimit, Room, near_limit_of
from llmtop.profiler.probes.profiling import UNASKED, Profiling
from llmtop.profiler.probes.stepreading import StepReading
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import PhaseMemory
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.snapshotevents import SnapshotTaken
from llmtop.profiler.record.snapshotrequest import SnapshotRequest, ask_for_snapshot
from llmtop.trainer.supervisor.progress import Progress
from tests.worker.launching import make_run, tiny_spec
from tests.worker.test_profiling import Probes, Recorder, segments_in_words

GIB = 2**30
TOTAL = 80 * GIB


class Filled(Probes):
    """Steps whose memory is read, with a peak that is set from outside."""

    def __init__(self) -> None:
        self.peak, self.reserved = 10 * GIB, 12 * GIB
        self.is_read = True

    def finish_step(self) -> StepReading:
        memory = PhaseMemory(allocated_bytes=GIB, peak_bytes=self.peak, reserved_bytes=self.reserved)
        return StepReading(times=None, phase_memory={"backward": memory} if self.is_read else {})


class Rank:
    def __init__(self, run: RunDir) -> None:
        self.probes = Filled()
        self.free = 0
        self.asked: list[int] = []
        self.told: list[SnapshotTaken] = []
        probes: Any = self.probes
        self.profiling = Profiling(
            run,
            probes,
            SimpleNamespace(module=torch.nn.Linear(2, 2)),
            rank=1,
            device=torch.device("cpu"),
            kernel_step=None,
            classify_every=lambda: 10,
            emit=self.told.append,  # type: ignore[arg-type]
            near_limit=NearLimit(self._room, TOTAL),
        )

    def _room(self) -> Room:
        self.asked.append(self.free)
        return Room(self.free, TOTAL)

    def steps(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            if seen := self.profiling.seen():
                self.profiling.take(seen, step)
            self.profiling.begin_step(step)
            with self.profiling.phase("forward", last=True):
                pass
            self.profiling.finish_step()


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "run", tiny_spec(steps=100))


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setitem(snapshotting.MAKERS, "state", made)
    return made


def test_it_is_taken_once_and_not_in_a_step_of_the_probes(
    run: RunDir, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(run)
    rank.steps(3, 8)
    assert not recorder.calls and not rank.asked, "far from the limit the driver is not asked"
    rank.probes.peak, rank.probes.reserved, rank.free = 77 * GIB, 78 * GIB, GIB
    with caplog.at_level(logging.WARNING):
        rank.steps(9, 40)
    # Step 10 is classified: the one after it is free.
    assert recorder.calls == ["start 11", "forward ended", "finish"]
    [told] = rank.told
    assert (told.number, told.what, told.step) == (UNASKED, "state", 11)
    assert "a peak of 77.0 GiB left 2.00 GiB of the device's 80.0 GiB" in told.notes[0]
    [warned] = [record.getMessage() for record in caplog.records if "nearly full" in record.getMessage()]
    assert "in step 11" in warned and "about" in warned and "stands still" in warned
    assert len(rank.asked) == 1


@pytest.mark.parametrize(
    ("peak", "reserved", "free"),
    [(77, 78, 2), (70, 78, 1), (50, 59, 0), (60, 79, 0)],
    ids=["the driver has more", "much is cached", "others hold it", "the peak leaves room"],
)
def test_a_peak_that_leaves_room_is_none(
    run: RunDir, recorder: Recorder, peak: int, reserved: int, free: int
) -> None:
    rank = Rank(run)
    rank.probes.peak, rank.probes.reserved, rank.free = peak * GIB, reserved * GIB, free * GIB
    rank.steps(3, 20)
    assert not recorder.calls and not rank.told


def test_steps_that_were_not_read_tell_nothing(run: RunDir, recorder: Recorder) -> None:
    rank = Rank(run)
    rank.probes.peak, rank.probes.reserved, rank.probes.is_read = 79 * GIB, 79 * GIB, False
    rank.steps(3, 8)
    assert not rank.asked
    rank.probes.is_read = True
    rank.steps(9, 12)
    assert len(rank.asked) == 1 and len(rank.told) == 1


def test_a_disk_without_room_is_left_alone(
    run: RunDir, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(run)
    rank.probes.peak = rank.probes.reserved = 79 * GIB
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    rank.steps(3, 8)
    assert not recorder.calls and "no snapshot is taken, for the disk has" in caplog.text


def test_what_somebody_asks_for_meanwhile_comes_first(run: RunDir, recorder: Recorder) -> None:
    rank = Rank(run)
    rank.probes.peak = rank.probes.reserved = 79 * GIB
    rank.steps(9, 9)
    ask_for_snapshot(run, SnapshotRequest(number=1, what="state", ranks=(1,)))
    rank.steps(10, 20)
    assert [told.number for told in rank.told] == [1]


def test_an_unasked_one_answers_no_request(run: RunDir) -> None:
    """Else the supervisor, which keeps the newest of each rank, would wait for one that was overtaken."""
    progress = Progress(run, 1)
    with EventWriter(run.events_path(0), "rank0") as events:
        events.write(SnapshotTaken(number=3, what="trace", step=5))
        events.write(SnapshotTaken(number=UNASKED, what="state", step=6))
    progress.poll()
    assert progress.snapshots[0].number == 3


def test_the_cpu_has_no_limit_of_its_own() -> None:
    assert near_limit_of(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_device_that_is_nearly_full_is_written_down(tmp_path: Path) -> None:
    """The whole road: what the driver has left, torch's own snapshot, and memory_viz's loader."""
    device = torch.device("cuda", 0)
    run = make_run(tmp_path / "run", tiny_spec(steps=100))
    near = near_limit_of(device)
    assert near is not None
    model = torch.nn.Linear(1024, 1024, bias=False, device=device)
    free, total = torch.cuda.mem_get_info(device)
    held = torch.empty(free - total // 100, dtype=torch.uint8, device=device)
    stats = PhaseMemory(
        allocated_bytes=torch.cuda.memory_allocated(device),
        peak_bytes=torch.cuda.max_memory_allocated(device),
        reserved_bytes=torch.cuda.memory_reserved(device),
    )
    told: list[SnapshotTaken] = []
    probes: Any = SimpleNamespace(
        step=lambda step: None,
        phase=Probes().phase,
        finish_step=lambda: StepReading(times=None, phase_memory={"forward": stats}),
    )
    profiling = Profiling(
        run,
        probes,
        SimpleNamespace(module=model, optimizer=None, basic_optimizer=None),
        rank=0,
        device=device,
        kernel_step=None,
        classify_every=lambda: 0,
        emit=told.append,  # type: ignore[arg-type]
    )
    for step in (3, 4, 5):
        profiling.begin_step(step)
        with profiling.phase("forward", last=True):
            pass
        profiling.finish_step()
    # Else the tests after this one find the device full.
    del held
    torch.cuda.empty_cache()
    [taken] = told
    assert not taken.problem and "nearly full" in taken.notes[0]
    pickled = next(run.path / file.name for file in taken.files if file.name.endswith(".pickle"))
    assert segments_in_words(pickled)
