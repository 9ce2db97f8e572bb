"""What the opened panels of memory, host, steps, training and links tell beyond the overview."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from llmtop.profiler.breakdown import breakdown
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, OtherWork, ProcessSample
from llmtop.profiler.record.events import (
    UNREAD_STEPS,
    AnyEvent,
    HardwareSampled,
    PeakClassified,
    PhaseMemory,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.feed import read_state
from llmtop.tui.app import LlmtopApp
from llmtop.tui.feeds.view import RunView
from llmtop.tui.panels.host import HostPanel
from llmtop.tui.panels.links import LinksPanel
from llmtop.tui.panels.memory import MemoryPanel
from llmtop.tui.widgets.paint import area, stretched
from llmtop.tui.widgets.picture import Picture
from llmtop.tui.widgets.plot import LinePlot
from tests.recorded import make_recorded_run
from tests.recorded_spec import GIB, Kind, recorded_prediction, recorded_spec
from tests.tui.tuiruns import LiveRun, wait_for_text


def opened(kind: type[Picture]) -> Picture:
    panel = kind()
    panel.zoomed = True
    return panel


def text(panel: Picture, state: RunState, kind: Kind = "cuda", *, width: int = 76, **options: Any) -> str:
    spec = recorded_spec(kind, **options)
    prediction = recorded_prediction(spec)
    parts = breakdown(state, spec, prediction)
    view = RunView(state=state, spec=spec, prediction=prediction, breakdown=parts)
    return panel.draw(view, width, 20).plain


def recorded(tmp_path: Path, kind: Kind, ranks: int = 2) -> RunState:
    return read_state(make_recorded_run(tmp_path, kind=kind, ranks=ranks, steps=20, end=None))


# --- memory ---------------------------------------------------------------------------------------


def test_memory_is_told_at_each_moment_over_time_and_by_rank(tmp_path: Path) -> None:
    shown = text(opened(MemoryPanel), recorded(tmp_path, "cuda", 4), ranks=4)
    for words in ("optimizer step", "backward of the loss", "(predicted peak)", "not looked at in this run"):
        assert words in shown
    assert "the fullest (GPU0)" in shown and "top 140 GiB" in shown and "GPU3" in shown
    table = shown.split("largest of any step by phase, allocated")[1].split("\n")
    assert table[1].split() == ["rank", "data", "forward", "backward", "optimizer", "reserved"]
    assert [row.split()[0] for row in table[2:6]] == ["0", "1", "2", "3"]


def test_compilers_below_a_rank_stand_beside_it(tmp_path: Path) -> None:
    process = ProcessSample(rank=0, rss_bytes=7 * GIB, compiler_rss_bytes=5 * GIB)
    state = fold(recorded(tmp_path, "cpu", 1), [HardwareSampled(t=9e9, processes=(process,))])
    shown = text(MemoryPanel(), state, "cpu")
    assert "2.00 GiB" in shown and "5.00 GiB more in compilers" in shown and "7.00 GiB" not in shown
    table = text(opened(HostPanel), state, "cpu")
    assert "7.00 GiB" in table and "5.00 GiB of it in compilers" in table


def test_it_says_how_many_steps_were_read_and_what_the_others_reached(tmp_path: Path) -> None:
    peaks = {UNREAD_STEPS: PhaseMemory(peak_bytes=99 * GIB), "backward": PhaseMemory(peak_bytes=98 * GIB)}
    step = StepFinished(step=30, phase_memory=peaks, memory_every=10, src="rank0")
    shown = text(opened(MemoryPanel), fold(recorded(tmp_path, "cuda"), [step]))
    table = shown.split("largest of the steps read, now 1 in 10, by phase, allocated")[1].split("\n")
    assert table[1].split()[-3:] == ["not", "read", "reserved"]
    assert "99.0 GiB" in table[2] and "99.0 GiB" not in table[3]


def test_a_traced_peak_stands_at_its_moment(tmp_path: Path) -> None:
    state = recorded(tmp_path, "cuda")
    parts = {"parameters": 15 * GIB, "activations": 7 * GIB}
    traced = PeakClassified(
        step=20,
        phase="backward",
        moment="loss_backward",
        components=parts,
        total_bytes=24 * GIB,
        src="rank0",
        t=state.now or 0.0,
    )
    rows = text(opened(MemoryPanel), fold(state, [traced])).split("\n")
    at = next(number for number, row in enumerate(rows) if row.startswith("backward of the loss"))
    assert rows[at + 2].startswith("actual") and "24.0 GiB" in rows[at + 2] and "?" in rows[at + 2]


def test_memory_of_processes_on_the_cpu_kind(tmp_path: Path) -> None:
    shown = text(opened(MemoryPanel), recorded(tmp_path, "cpu"), "cpu")
    assert "the fullest (rank 0)" in shown and "by phase, resident" in shown and "reserved" not in shown


# --- host -----------------------------------------------------------------------------------------


def host_state(growth: float, count: int = 80) -> RunState:
    events: list[AnyEvent] = []
    for n in range(count):
        events.append(StepFinished(step=n + 1, src="rank0", t=float(n), step_seconds=1.0, loss=2.0))
        host = HostSample(
            memory_total_bytes=64 * GIB,
            memory_available_bytes=round(40 * GIB - growth * n) - n % 2 * 2**26,
            nvme_read_bytes_per_second=3.2e9,
            nvme_write_bytes_per_second=1.1e9,
        )
        events.append(HardwareSampled(t=n + 0.5, host=host))
    return fold(RunState(status="running"), events)


def test_the_host_says_when_memory_is_full_and_how_sure_that_is() -> None:
    shown = text(opened(HostPanel), host_state(64 * 2**20))
    (ahead,) = [row for row in shown.split("\n") if row.startswith("ahead")]
    assert "machine full in 9m" in ahead and "+3.75 GiB a minute, give or take" in ahead and " to " in ahead
    assert "no growth that stands out" in text(opened(HostPanel), host_state(0.0))
    assert "too few samples" in text(opened(HostPanel), host_state(0.0, count=8))


def test_the_host_says_who_has_its_processors_and_what_limits_the_ranks() -> None:
    work = (OtherWork(name="ff\x1b[31mmpeg", processes=3, cpu_percent=200.0),)
    host = HostSample(
        cpu_count=8, cpu_percent=50.0, other_work=work, cpu_limit_cores=1.5, cpu_throttled_percent=60.0
    )
    process = ProcessSample(rank=0, cpu_percent=100.0, cpu_wait_percent=25.0)
    events: list[AnyEvent] = [HardwareSampled(t=float(n), host=host, processes=(process,)) for n in range(2)]
    shown = text(opened(HostPanel), fold(RunState(run_id="a-run"), events))
    assert "4.0 of 8 processors busy, 3.0 of them for others: ff" in shown and "x3 2.0" in shown
    assert "\x1b" not in shown
    assert "limit 1.5 processors, used up in 60% of its periods" in shown
    assert "waits" in shown and " 25%" in shown


def test_nvme_rates_stand_beside_those_of_all_disks() -> None:
    shown = text(opened(HostPanel), host_state(0.0))
    (read,) = [row for row in shown.split("\n") if row.startswith("NVMe") and "read" in row]
    assert "2.98 GiB/s" in read


def test_the_headline_warns_only_of_what_grows() -> None:
    spec = recorded_spec("cuda")
    prediction = recorded_prediction(spec)

    def headline(state: RunState) -> tuple[str, ...]:
        parts = breakdown(state, spec, prediction)
        return HostPanel().headline(RunView(state=state, spec=spec, prediction=prediction, breakdown=parts))

    assert any("full in 9m" in words for words in headline(host_state(64 * 2**20)))
    assert not any("full in" in words for words in headline(host_state(0.0)))
    # Ranks that start anew fill memory with the model: no forecast, neither then nor in their first steps.
    starting = fold(host_state(64 * 2**20), [StageBegan(stage="model", src="rank0", t=80.0)])
    assert not any("full in" in words for words in headline(starting))
    begun: list[AnyEvent] = [
        StageFinished(stage="model", src="rank0", t=81.0, seconds=1.0),
        StepFinished(step=81, src="rank0", t=82.0, step_seconds=1.0, loss=2.0),
    ]
    assert not any("full in" in words for words in headline(fold(starting, begun)))


# --- steps and links ------------------------------------------------------------------------------


def phased(rank: int, number: int, forward: float) -> StepFinished:
    phases: dict[str, float | None] = {"data": 0.01, "forward": forward, "backward": 0.5, "optimizer": 0.1}
    seconds = sum(seconds or 0.0 for seconds in phases.values())
    return StepFinished(
        step=number,
        src=f"rank{rank}",
        t=float(number),
        step_seconds=seconds,
        phase_seconds=phases,
        tokens=1000,
    )


async def test_the_slowest_rank_is_named_with_its_phases(root: Path) -> None:
    live = LiveRun(root, kind="cuda", ranks=4)
    live.start()
    for number in range(1, 12):
        for rank, writer in enumerate(live.recorder.ranks):
            writer.write(replace(phased(rank, number, 0.45 if rank == 2 else 0.3), loss=2.0))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(100, 40)) as pilot:
        await wait_for_text(pilot, "11/60")
        await pilot.press("4")
        shown = await wait_for_text(pilot, "slowest rank 2, 150 ms behind rank 0", "lately")
        row = next(line for line in shown.splitlines() if line.strip().startswith("2 "))
        assert row.split()[1:8] == ["10.0", "ms", "450", "ms", "500", "ms", "100"]
    live.close()


async def test_phases_that_few_steps_tell_stay_and_say_of_how_many_they_are(root: Path) -> None:
    live = LiveRun(root, kind="cuda", ranks=1)
    live.start()
    for number in range(1, 24):
        step = replace(phased(0, number, 0.3), loss=2.0)
        live.recorder.ranks[0].write(step if number % 5 == 0 else replace(step, phase_seconds={}))
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(100, 40)) as pilot:
        await wait_for_text(pilot, "23/60")
        await pilot.press("4")
        shown = await wait_for_text(pilot, "phases: means of 4 of 21 steps after the first 2", "lately")
        row = next(line.split() for line in shown.splitlines() if line.split()[1:2] == ["forward"])
        assert row[2:4] == ["300", "ms"]
    live.close()


def linked(t: float, sent: float) -> HardwareSampled:
    return HardwareSampled(t=t, devices=(DeviceSample(index=0, nvlink_tx_bytes_per_second=sent),))


def test_links_are_told_by_the_phase_that_was_under_way() -> None:
    phases = {"forward": 2.0, "backward": 4.0, "optimizer": 1.0}
    events: list[AnyEvent] = [
        StepFinished(step=n, src="rank0", t=7.0 * n, step_seconds=7.0, phase_seconds=dict(phases))
        for n in range(1, 6)
    ]
    events += [linked(t / 4, 80e9 if (t / 4 - 1e-6) % 7 < 6 else 1e9) for t in range(140)]
    shown = text(opened(LinksPanel), fold(RunState(), events))
    rows = {row.split()[0]: row.split() for row in shown.split("\n") if row}
    assert rows["forward"][1:3] == ["74.5", "GiB/s"] and rows["optimizer"][1:3] == ["954", "MiB/s"]
    assert rows["data"][1] == "n/a"


def test_links_over_the_course_of_a_step_stand_under_its_phases() -> None:
    phases = {"forward": 0.4, "backward": 0.5, "optimizer": 0.1}
    events: list[AnyEvent] = [
        StepFinished(step=n, src="rank0", t=float(n), step_seconds=1.0, phase_seconds=dict(phases))
        for n in range(1, 12)
    ]
    events += [linked(t / 20, 80e9 if (t / 20 - 0.025) % 1 < 0.4 else 20e9) for t in range(1, 220)]
    shown = text(opened(LinksPanel), fold(RunState(), events), width=76).split("\n")
    at = next(number for number, row in enumerate(shown) if row.startswith("a step of 1.00 s"))
    bar, sent = shown[at + 2], shown[at + 3]
    assert sent.startswith("NVLink →") and sent.endswith("74.5 GiB/s")
    began = {letter: bar.index(letter) for letter in "FBO"}
    assert set(sent[began["F"] : began["B"] - 1]) == {"█"}
    assert set(sent[began["B"] + 1 : began["O"] - 1]) == {"▂"}


def test_slow_sampling_tells_no_phase_and_says_what_would() -> None:
    events: list[AnyEvent] = [phased(0, n, 0.3) for n in range(1, 30)]
    events += [linked(float(n), 1e9) for n in range(30)]
    shown = text(opened(LinksPanel), fold(RunState(run_id="a-run"), events))
    assert "by phase of the step: n/a. A sample comes every 1.00 s" in shown
    assert "llmtop set a-run sample_seconds=0.12" in shown


# --- training -------------------------------------------------------------------------------------


async def test_training_draws_every_curve_and_marks_skipped_steps(root: Path) -> None:
    live = LiveRun(root, kind="cuda", ranks=1, precision="fp16")
    live.start()
    for number in range(1, 31):
        live.recorder.ranks[0].write(
            StepFinished(
                step=number,
                loss=3.0 - number / 30,
                learning_rate=1e-4,
                grad_norm=1.0 + number / 9,
                loss_scale=65536.0 if number < 20 else 32768.0,
                skipped=number in (5, 20),
                step_seconds=0.5,
            )
        )
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(80, 40)) as pilot:
        await wait_for_text(pilot, "30/60")
        await pilot.press("3")
        shown = await wait_for_text(pilot, "scale 32768", "2 of 30 steps skipped (x in the plot): 5, 20")
        for words in ("gradient norm", "learning rate", "loss scale", "x"):
            assert words in shown
        assert sum(plot.display for plot in app.screen.query_one("#loss").query(LinePlot)) == 4
    live.close()


# --- what they are painted with -------------------------------------------------------------------


@given(
    st.lists(st.none() | st.floats(0, 1e12), max_size=300),
    st.integers(1, 120),
    st.integers(1, 8),
    st.floats(1, 1e12),
)
def test_an_area_fills_its_rows_exactly(
    values: list[float | None], width: int, rows: int, top: float
) -> None:
    painted = area(values, width, rows, top, mark=top / 2)
    assert len(painted) == rows
    assert all(row.cell_length == (width if values else 0) for row in painted)
    assert len(stretched(values, width)) == (width if values else 0)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("width", [30, 60, 120])
def test_opened_panels_draw_at_any_width(kind: Kind, width: int, tmp_path: Path) -> None:
    state = recorded(tmp_path, kind)
    for panel in (MemoryPanel, HostPanel, LinksPanel):
        assert text(opened(panel), state, kind, width=width)
