"""A key is answered soon, and a slow link gets fewer paintings."""

from __future__ import annotations

import os
import selectors
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual import constants, screen
from textual.drivers import linux_driver
from textual.drivers.linux_driver import LinuxDriver

from llmtop.tui.app import LlmtopApp
from llmtop.tui.feeds import feed, pace
from llmtop.tui.feeds.feed import ViewArrived, follow_run
from llmtop.tui.feeds.link import LARGEST_FACTOR, WINDOW_SECONDS, Link, MeasuredFile
from llmtop.tui.feeds.monitorfeed import MonitorFeed
from llmtop.tui.feeds.view import RunView
from llmtop.tui.screens.monitor import MonitorScreen, all_panels
from llmtop.tui.widgets.content import Content
from llmtop.tui.widgets.panel import Panel
from tests.recorded import ManualClock, make_recorded_run
from tests.tui.tuiruns import wait_for, wait_for_text

GIVE_UP_SECONDS = 30.0
LARGE = 1_000_000
"""Bytes: more than any pipe holds."""


# --- opened panels --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_an_opened_panel_and_the_overview_are_painted_once(
    size: tuple[int, int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the size that they are going to have: a second painting is another screen for the terminal."""
    painted: list[tuple[str, bool]] = []
    paint = Panel._paint

    def counted(self: Panel, *args: object) -> None:
        painted.append((self.id or "", self.zoomed))
        paint(self, *args)  # type: ignore[arg-type]

    run = make_recorded_run(root, kind="cuda", ranks=2, steps=12)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=size) as pilot:
        await wait_for_text(pilot, "COMPLETED")
        monitor = app.screen
        assert isinstance(monitor, MonitorScreen)
        await pilot.pause()
        monkeypatch.setattr(Panel, "_paint", counted)
        for name, kind in all_panels():
            if name in ("switches", "stacks", "changes", "log"):
                continue  # what they show comes after they are opened
            painted.clear()
            await pilot.press(kind.KEY)
            await wait_for(pilot, lambda name=name: app.screen.query_one(f"#{name}", Panel).zoomed)  # type: ignore[misc]
            await pilot.pause()
            assert painted == [(name, True)]
            painted.clear()
            await pilot.press("escape")
            await wait_for(pilot, lambda: monitor.zoomed is None)
            await pilot.pause()
            assert len(painted) == len(set(painted)), "nothing is painted twice"
            assert not any(zoomed for _, zoomed in painted)


async def test_the_first_screen_is_painted_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    for name, kind in all_panels():

        def draw(
            self: Panel, view: RunView, width: int, height: int, draw: object = kind.draw, name: str = name
        ) -> Content:
            drawn.append(f"{name} {width} x {height}")
            return draw(self, view, width, height)  # type: ignore[operator,no-any-return]

        monkeypatch.setattr(kind, "draw", draw)
    run = make_recorded_run(root, kind="cuda", ranks=2, steps=12)
    app = LlmtopApp("monitor", run, root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "COMPLETED", "1 Memory")
        await pilot.pause()
        names = [line.split()[0] for line in drawn]
        assert sorted(names) == sorted(set(names)), drawn
        assert {"memory", "devices", "log"} <= set(names)
        assert not {"startup", "host"} & set(names), "they are not on this screen"


# --- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def settings() -> Iterator[None]:
    """Whatever is set is set back."""
    before = constants.ESCAPE_DELAY, screen.UPDATE_PERIOD, linux_driver.selectors  # type: ignore[attr-defined]
    yield
    constants.ESCAPE_DELAY, screen.UPDATE_PERIOD, linux_driver.selectors = before  # type: ignore[misc,attr-defined]


def test_esc_is_known_to_be_one_sooner_than_in_textual(
    settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ESCDELAY", raising=False)
    monkeypatch.delenv("TEXTUAL_FPS", raising=False)
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    pace.answer_soon()
    assert constants.ESCAPE_DELAY < pace.ESCAPE_SECONDS < 0.1
    assert screen.UPDATE_PERIOD == pace.FRAME_SECONDS


def test_who_has_set_the_delay_keeps_it(settings: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESCDELAY", "100")
    monkeypatch.setattr("sys.setswitchinterval", lambda _: None)
    before = constants.ESCAPE_DELAY
    pace.answer_soon()
    assert before == constants.ESCAPE_DELAY


def test_the_selector_looks_again_soon_after_input_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float | None] = []
    select = selectors.SelectSelector.select

    def noted(self: selectors.SelectSelector, timeout: float | None = None) -> object:
        asked.append(timeout)
        return select(self, 0)

    monkeypatch.setattr(selectors.SelectSelector, "select", noted)
    reader, writer = os.pipe()
    chosen = pace.KeySelector()
    chosen.register(reader, selectors.EVENT_READ)
    try:
        assert chosen.select(0.1) == []
        os.write(writer, b"\x1b")
        assert len(chosen.select(0.1)) == 1
        os.read(reader, 1)
        assert chosen.select(0.1) == []
        assert chosen.select(0.1) == []
    finally:
        chosen.close()
        os.close(reader)
        os.close(writer)
    assert asked == [0.1, 0.1, pace.ESCAPE_SECONDS, 0.1]


# --- a slow link ----------------------------------------------------------------------------------


def pass_window(link: Link, clock: ManualClock, held_share: float) -> int:
    with link.writing():
        clock.advance(held_share * WINDOW_SECONDS)
    clock.advance((1 - held_share) * WINDOW_SECONDS)
    return link.factor


def test_the_rate_goes_down_on_a_slow_link_and_up_again() -> None:
    clock = ManualClock()
    link = Link(clock=lambda: clock.now)
    assert link.factor == 1
    assert [pass_window(link, clock, 0.6) for _ in range(6)] == [2, 4, 8, 16, LARGEST_FACTOR, LARGEST_FACTOR]
    assert pass_window(link, clock, 0.1) == LARGEST_FACTOR, "neither slow nor free"
    assert [pass_window(link, clock, 0.0) for _ in range(5)] == [8, 4, 2, 1, 1]


def test_a_write_that_does_not_end_counts_as_long_as_it_lasts() -> None:
    clock = ManualClock()
    link = Link(clock=lambda: clock.now)
    with link.writing():
        clock.advance(WINDOW_SECONDS)
        assert link.factor == 2
        clock.advance(WINDOW_SECONDS)
        assert link.factor == 4


def test_a_reader_that_does_not_read_makes_the_link_slow() -> None:
    """Real writes into a full pipe."""
    reader, writer = os.pipe()
    clock = ManualClock()
    link = Link(clock=lambda: clock.now)
    with os.fdopen(writer, "w") as plain:
        measured = MeasuredFile(plain, link)

        def fill() -> None:
            measured.write("x" * LARGE)
            measured.flush()

        filler = threading.Thread(target=fill)
        filler.start()
        end = time.monotonic() + GIVE_UP_SECONDS
        while link._writing_since is None:
            assert time.monotonic() < end
        clock.advance(WINDOW_SECONDS)
        assert link.factor == 2
        assert measured.fileno() == writer
        left = LARGE
        while left:
            left -= len(os.read(reader, 65536))
        filler.join(GIVE_UP_SECONDS)
        assert not filler.is_alive()
    os.close(reader)
    clock.advance(WINDOW_SECONDS)
    assert link.factor == 1


def test_the_app_measures_what_it_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TEXTUAL_DRIVER", raising=False)
    app = LlmtopApp()
    kind = app.get_driver_class()
    assert issubclass(kind, LinuxDriver)
    monkeypatch.setattr(LinuxDriver, "__init__", lambda self, *_: setattr(self, "_file", "the terminal"))
    assert isinstance(kind(app)._file, MeasuredFile)


def test_a_slow_link_gets_fewer_views(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes by a poll's length with each poll, and each of them finds something new."""
    clock = ManualClock(0.0)
    stop = threading.Event()
    monkeypatch.setattr("llmtop.tui.feeds.feed.time.monotonic", lambda: clock.now)
    views = MonitorFeed(make_recorded_run(root, steps=3, end=None))
    first = views.poll()
    assert first is not None
    monkeypatch.setattr(views, "view", lambda: first)
    monkeypatch.setattr(views, "read", lambda: first.state)
    monkeypatch.setattr(views, "poll_log", lambda: None)

    class Woken(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            clock.advance(feed.LOOK_SECONDS)
            if clock.now >= 60.0:
                stop.set()
            return False

    def posted(factor: int) -> int:
        clock.now = 0.0
        stop.clear()
        told: list[object] = []
        link = Link()
        link._factor = factor
        monkeypatch.setattr(Link, "factor", property(lambda self: self._factor))
        follow_run(views, told.append, stop, Woken(), link)
        return sum(isinstance(message, ViewArrived) for message in told)

    assert posted(1) == 60
    assert posted(4) == 15
