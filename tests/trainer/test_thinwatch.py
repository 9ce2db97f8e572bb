"""Who keeps logs short: one that cannot be thinned hinders no other, and ends nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.ui_runs import BEGAN, step_event
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import segment_path, segments_of
from llmtop.profiler.record.thinning import Bounds
from llmtop.trainer.supervisor import thinwatch
from llmtop.trainer.supervisor.thinwatch import ThinWatch
from tests.recorded_spec import recorded_prediction, recorded_spec

SEGMENT = 4096


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    spec = recorded_spec("cuda", ranks=2)
    made = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    for rank in (0, 1):
        with EventWriter(made.events_path(rank), f"rank{rank}", segment_bytes=SEGMENT) as writer:
            for step in range(1, 101):
                writer.append(step_event(step, rank, BEGAN + step, 1.0))
    return made


def test_a_log_that_cannot_be_thinned_is_told_once_and_the_others_are(run: RunDir) -> None:
    broken = segment_path(run.events_path(0), 1)
    broken.unlink()
    broken.mkdir()
    told: list[str] = []
    watch = ThinWatch(run, told.append, Bounds(whole=SEGMENT, thinned=SEGMENT))
    watch._thin_all()
    watch._thin_all()
    assert segments_of(run.events_path(1)).until > 0 == segments_of(run.events_path(0)).until
    of_broken = [line for line in told if line.startswith("rank-0.jsonl")]
    assert len(of_broken) == 1 and "cannot be read to its end" in of_broken[0]


def test_a_mistake_of_llmtops_own_ends_no_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def fails(path: Path, bounds: Bounds) -> int:
        asked.append(path)
        raise ZeroDivisionError

    monkeypatch.setattr(thinwatch, "thin", fails)
    told: list[str] = []
    watch = ThinWatch(run, told.append, Bounds(whole=SEGMENT, thinned=SEGMENT))
    watch._thin_all()
    watch._thin_all()
    assert asked == [run.events_path(0), run.events_path(1)], "it is not tried again and again"
    assert all("ZeroDivisionError" in line for line in told) and len(told) == 2
