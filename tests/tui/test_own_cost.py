"""The app says what it costs itself, where there is room for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llmtop.tui.app import LlmtopApp
from llmtop.tui.feeds.owncost import EVERY_SECONDS, CostMeter, written_bytes
from llmtop.tui.widgets.runheader import TICK_SECONDS, RunHeader
from tests.tui.tuiruns import LiveRun, wait_for_text


class Figures:
    def __init__(self) -> None:
        self.now, self.cpu, self.written = 100.0, 3.0, 5000


def meter(figures: Figures, told: bool = True) -> CostMeter:
    return CostMeter(
        clock=lambda: figures.now,
        cpu=lambda: figures.cpu,
        written=lambda: figures.written if told else None,
    )


def test_cost_is_of_the_last_stretch() -> None:
    figures = Figures()
    found = meter(figures)
    assert found.cost() is None
    figures.now, figures.cpu, figures.written = 100.0 + EVERY_SECONDS, 3.1, 25_000
    cost = found.cost()
    assert cost is not None and cost.words == "self 2% 4.0 KB/s"
    figures.cpu = 9.0
    assert found.cost() is cost
    figures.now += 2 * EVERY_SECONDS
    second = found.cost()
    assert second is not None and second.words == "self 59% 0.0 KB/s"


def test_without_the_kernels_count_only_the_processor_is_told() -> None:
    figures = Figures()
    found = meter(figures, told=False)
    figures.now += EVERY_SECONDS
    cost = found.cost()
    assert cost is not None and cost.bytes_per_second is None and cost.words == "self 0%"


def test_what_is_written_counts() -> None:
    before = written_bytes()
    assert before is not None
    with Path(os.devnull).open("wb", buffering=0) as sink:
        sink.write(bytes(4096))
    after = written_bytes()
    assert after is not None and after - before >= 4096


async def test_the_header_tells_it(live: LiveRun, root: Path) -> None:
    app = LlmtopApp("monitor", live.run, root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "20/60")
        figures = Figures()
        header = app.screen.query_one(RunHeader)
        header.meter = meter(figures)
        figures.now, figures.written = figures.now + EVERY_SECONDS, 30_000
        header.repaint()
        await wait_for_text(pilot, "self 0% 5.0 KB/s", "left")


def test_between_views_the_head_is_left_alone_and_without_them_its_time_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each repaint by itself sends as much as one of all panels."""
    now, painted = [100.0], list[float]()
    monkeypatch.setattr("llmtop.tui.widgets.runheader.time.monotonic", lambda: now[0])
    head = RunHeader()
    monkeypatch.setattr(head, "repaint", lambda: painted.append(now[0]))
    head.watch_view()
    for _ in range(4):
        now[0] += TICK_SECONDS
        head._tick()
    assert painted == [100.0, 102.0, 103.0, 104.0]
