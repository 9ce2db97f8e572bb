"""The start-up panel: seconds of each stage, the slowest rank by name, and what a stage that lasts does."""

from __future__ import annotations

from typing import Any

import msgspec

from llmtop.presets.spec import Script
from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.events import (
    AnyEvent,
    Compiling,
    HardwareSampled,
    NvmeMeasured,
    RankStarted,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.scriptevents import RunDescribed
from llmtop.tui.feeds.view import RunView
from llmtop.tui.panels.startup import StartupPanel
from tests.recorded_spec import recorded_prediction, recorded_spec

WIDTH, HEIGHT = 76, 18


def stage(name: Any, rank: int, began: float, seconds: float | None = None) -> list[AnyEvent]:
    src = f"rank{rank}"
    events: list[AnyEvent] = [StageBegan(stage=name, t=began, src=src)]
    if seconds is not None:
        events.append(StageFinished(stage=name, seconds=seconds, t=began + seconds, src=src))
    return events


def drawn(
    *batches: list[AnyEvent], zoomed: bool = False, now: float = 30.0, script: Script | None = None
) -> list[str]:
    started = RunStarted(run_id="r", name="n", pid=1, host="h", world_size=2, llmtop_version="1", t=1.0)
    ranks = [RankStarted(rank=rank, pid=2 + rank, t=1.0) for rank in (0, 1)]
    events = [event for batch in batches for event in batch]
    state = fold(RunState(), [started, *ranks, *events, HardwareSampled(t=now, src="hardware")])
    spec = msgspec.structs.replace(recorded_spec("cuda"), script=script)
    prediction = recorded_prediction(spec)
    view = RunView(
        state=state, spec=spec, prediction=prediction, breakdown=breakdown(state, spec, prediction)
    )
    panel = StartupPanel()
    panel.zoomed = zoomed
    return panel.draw(view, WIDTH, HEIGHT).plain.splitlines()


IMPORTED = [*stage("import", 0, 1.0, 4.0), *stage("import", 1, 1.0, 9.0)]


def row(rows: list[str], words: str) -> str:
    return next(line for line in rows if words in line)


def test_a_finished_stage_has_its_seconds_and_the_slowest_rank() -> None:
    rows = drawn(IMPORTED)
    assert "9.0" in row(rows, "import torch") and "rank 1 slowest" in row(rows, "import torch")
    even = [*stage("import", 0, 1.0, 8.9), *stage("import", 1, 1.0, 9.0)]
    assert "slowest" not in row(drawn(even), "import torch")


def test_a_stage_that_goes_on_says_what_it_does() -> None:
    joining = [*stage("import", 0, 1.0, 4.0), *stage("import", 1, 1.0), *stage("process_group", 0, 5.0)]
    rows = drawn(joining)
    at = rows.index(row(rows, "join the ranks"))
    assert "25.0" in rows[at] and "rank 0" in rows[at]
    assert rows[at + 1].strip() == "waiting for rank 1, which is still importing"


def test_an_op_in_the_making_is_named_and_stages_that_may_not_come_are_not_shown() -> None:
    assert not any("build ops" in line or "load weights" in line for line in drawn(IMPORTED))
    building = [*stage("op_build", 0, 10.0), *stage("op_build", 1, 10.0)]
    rows = drawn(IMPORTED, building, [Compiling(what="cpu_adam", t=12.0, src="supervisor")])
    assert "over a minute" in rows[rows.index(row(rows, "build ops")) + 1]


def test_records_of_older_versions_show_their_engine_stage() -> None:
    rows = drawn(IMPORTED, [*stage("engine", 0, 10.0, 2.0), *stage("engine", 1, 10.0, 2.0)])
    assert "2.0" in row(rows, "build the engine")


def test_a_measured_drive_is_shown() -> None:
    measured = NvmeMeasured(
        path="/drive",
        read_bytes_per_second=3e9,
        write_bytes_per_second=2e9,
        step_read_bytes=6 * 10**9,
        step_write_bytes=2 * 10**9,
        step_seconds=3.0,
        direct=True,
        t=2.0,
    )
    text = " ".join(drawn(IMPORTED, [measured]))
    assert "/drive reads" in text and "which takes about 3.00 s" in text.replace("  ", " ")


def test_alone_on_the_screen_it_shows_each_rank() -> None:
    assert any("rank 0 4.0" in line and "rank 1 9.0" in line for line in drawn(IMPORTED, zoomed=True))


def test_of_a_script_only_what_is_seen_of_it_is_told() -> None:
    script = Script(command=("python", "train.py"), folder="/")
    step = StepFinished(step=1, t=20.0, src="rank0")
    rows = [drawn(*batch, script=script) for batch in ([], [[RunDescribed(setting=0, t=9.0)]], [[step]])]
    assert rows[0] == ["✓ 2 ranks seen", "· its model and settings", "· first step"]
    assert rows[1] == ["✓ 2 ranks seen", "✓ its model and settings are read", "· first step"]
    assert rows[2][-1] == "✓ first step"
    problem = drawn([RunDescribed(problem="no model is known", t=9.0)], script=script)
    assert problem[-1].strip() == "no model is known"


def test_nothing_is_wider_than_the_panel() -> None:
    building = [*stage("op_build", 0, 10.0), *stage("op_build", 1, 10.0)]
    for zoomed in (False, True):
        rows = drawn(IMPORTED, building, [Compiling(what="x" * 90, t=12.0, src="supervisor")], zoomed=zoomed)
        assert all(len(line) <= WIDTH for line in rows), rows
