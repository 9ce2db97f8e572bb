"""Every screen as it looks: in three sizes, with ASCII alone, and without colours.

Each test walks through the app by keys and compares what stands there with the pictures in `snapshots`,
which `LLMTOP_SNAPSHOTS=write` writes anew: text with styles and not SVG, for the reasons in `pictures`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.looks.dressing import Dress
from llmtop.tui.looks.look import Look
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.runheader import RunHeader
from tests.fleets import PlayedFleet
from tests.recorded import BEGAN
from tests.tui import pictured
from tests.tui.hostfeed import feed_on_its_clock
from tests.tui.pictures import SNAPSHOTS, WRITING, picture
from tests.tui.tuiruns import ROUND_SECONDS, LiveRun, wait_for, wait_for_text


class View(NamedTuple):
    """How the app is looked at."""

    columns: int
    rows: int
    look: Look = Look()

    @property
    def name(self) -> str:
        signs = "-ascii" if self.look.ascii else ""
        colours = "-mono" if self.look.theme == "mono" else ""
        return f"{self.columns}x{self.rows}{signs}{colours}"


VIEWS = (
    View(80, 24),
    View(120, 40),
    View(200, 60),
    View(80, 24, Look(ascii=True)),
    View(80, 24, Look(theme="mono")),
)
every_view = pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.name)


_ALIKE_ROUNDS = 25


class Page(NamedTuple):
    """One picture: its name, the keys that lead there from the one before, and words that stand there."""

    name: str
    keys: tuple[str, ...]
    words: tuple[str, ...]


class Album:
    """The pictures of one view: all are looked at before a difference is told."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._differences: list[str] = []

    async def take(self, pilot: Pilot[Any], pages: Iterable[Page]) -> None:
        for page in pages:
            await pilot.press(*page.keys)
            await wait_for_text(pilot, *page.words, rounds=500)
            await self._compare(pilot, page.name)

    async def _compare(self, pilot: Pilot[Any], name: str) -> None:
        path = SNAPSHOTS / self._view.name / f"{name}.txt"
        if WRITING:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(await _settled(pilot), encoding="utf-8")
        wanted = path.read_text(encoding="utf-8")
        try:
            # The footer and what else follows from a message are painted a moment later.
            await wait_for(pilot, lambda: picture(pilot.app) == wanted, name, rounds=150)
        except AssertionError:
            shown = picture(pilot.app).splitlines()
            rows = difflib.unified_diff(wanted.splitlines(), shown, str(path), "shown", n=0, lineterm="")
            self._differences.append("\n".join(rows))

    def close(self) -> None:
        assert not self._differences, "\n\n".join(self._differences)


async def _settled(pilot: Pilot[Any]) -> str:
    """The picture once nothing has changed for a while: what a person looks at before it is kept."""
    shown, alike = "", 0
    while alike < _ALIKE_ROUNDS:
        await pilot.pause(ROUND_SECONDS)
        before, shown = shown, picture(pilot.app)
        alike = alike + 1 if before == shown else 0
    return shown


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that is another on the next machine or on the next day."""
    pictured.numbered_ids(monkeypatch)
    monkeypatch.setattr("llmtop.tui.plans.planning.predict_with_suggestions", pictured.suggested)
    monkeypatch.setattr("llmtop.tui.plans.grid.judge", pictured.judged)
    monkeypatch.setattr("llmtop.tui.screens.plan.where", pictured.found_where)
    monkeypatch.setattr("llmtop.profiler.findings.find._RULES", (pictured.found,))
    monkeypatch.setattr("llmtop.tui.feeds.owncost.CostMeter.cost", lambda _: None)
    monkeypatch.setattr(Input, "cursor_blink", False)


def app_of(view: View, root: Path, start: str, run: Any = None, **given: Any) -> LlmtopApp:
    deeds = Deeds(detect=lambda: pictured.HERE, gpus=pictured.gpus, stacks=lambda run, state: pictured.STACKS)
    app = LlmtopApp(start, run, root, deeds=deeds, dress=Dress(view.look), **given)  # type: ignore[arg-type]
    app.install_screen(RunsScreen(root, clock=lambda: pictured.LATER), "runs")
    return app


def panels(*opened: tuple[str, str, str]) -> Iterable[Page]:
    """Name, key, and a word of each panel; its key again closes it."""
    for at, (name, key, word) in enumerate(opened):
        before = opened[at - 1][1] if at else ""
        keys = (before, key) if before else (key,)
        yield Page(f"panel-{name}", keys, (word,))


@every_view
async def test_the_monitor_and_each_of_its_panels(view: View, root: Path) -> None:
    run = pictured.changed_run(root)
    pictured.other_runs(root)
    album = Album(view)
    app = app_of(view, root, "monitor", run)
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        pages = [Page("monitor", (), ("COMPLETED", "1 Memory", "8 Log"))]
        pages += panels(
            ("memory", "1", "top 140 GiB"),
            ("components", "2", "unexplained"),
            ("loss", "3", "gradient norm"),
            ("steps", "4", "step seconds"),
            ("host", "5", "swap"),
            ("links", "6", "phase"),
            ("findings", "7", "seen"),
            ("log", "8", "a long line"),
            ("devices", "9", "occupancy"),
            ("startup", "0", "random"),
            ("switches", "w", "differs"),
            ("stacks", "t", "all_reduce"),
            ("changes", "e", "refused"),
        )
        await album.take(pilot, pages)
        await album.take(pilot, [Page("help", ("escape", "question_mark"), ("Esc closes", "Monitor"))])
    album.close()


@every_view
async def test_the_runs_what_is_asked_about_them_and_two_compared(view: View, root: Path) -> None:
    pictured.changed_run(root)
    pictured.other_runs(root)
    album = Album(view)
    app = app_of(view, root, "runs")
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        pages = (
            Page("runs", (), ("4, 0 going on", "Help")),
            Page("runs-filter", ("slash", *"zero2"), ("3 of 4",)),
            Page("delete", ("enter", "d"), ("Delete this run?",)),
            Page("palette", ("escape", "escape", "ctrl+p", *"plan a new"), ("plan a new run",)),
            Page("compare", ("escape", "home", "space", "down", "c"), ("Compare", "peak memory")),
        )
        await album.take(pilot, pages)
    album.close()


@every_view
async def test_a_run_that_goes_on_and_what_is_asked_about_it(view: View, root: Path) -> None:
    live = LiveRun(root)
    album = Album(view)
    app = app_of(view, root, "monitor", live.run)
    async with app.run_test(size=(view.columns, view.rows), notifications=True) as pilot:
        live.recorder.start()
        await wait_for_text(pilot, "0 Start-up")
        app.screen.query_one(RunHeader)._clock = lambda: BEGAN + 60.0
        await album.take(pilot, [Page("monitor-starting", (), ("elapsed 1:00", "579 MiB", "first step"))])
        live.steps(1, 20)
        await wait_for_text(pilot, "20/60")
        pages = (
            Page("monitor-running", (), ("20/60",)),
            Page("stop", ("s",), ("Stop this run?",)),
            Page("change", ("escape", "c", *"micro_batch=2"), ("4 -> 2", "step time")),
            Page("change-asked", ("enter",), ("Change this run so?", "4 -> 2")),
        )
        await album.take(pilot, pages)
    live.close()
    album.close()


@every_view
async def test_a_replay(view: View, root: Path) -> None:
    run = pictured.changed_run(root)
    album = Album(view)
    app = app_of(view, root, "replay", run, wish=ReplayWish(step=14))
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        pages = (
            Page("replay", (), ("14/40", "REPLAY", "running")),
            Page("replay-ask-step", ("t",), ("Go to a step",)),
        )
        await album.take(pilot, pages)
    album.close()


@every_view
async def test_a_run_over_hosts(view: View, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = PlayedFleet(root, hosts=30, ranks=8)
    feed = partial(feed_on_its_clock, fleet)
    monkeypatch.setattr("llmtop.tui.screens.hosts.FleetFeed", feed)
    fleet.start()
    fleet.step(5)
    fleet.lose("node21")
    fleet.network("node07", links_down=("eth1",))
    fleet.network("node12", network_errors=90)
    fleet.shift_clock("node03", 2.5)
    fleet.step(3, slow={77: 1.6}, still=frozenset({"node21"}))
    album = Album(view)
    app = app_of(view, root, "monitor", fleet.run)
    async with app.run_test(size=(view.columns, view.rows)) as pilot:
        pages = (
            Page("hosts", (), ("30 hosts", "no answer", "worst first")),
            Page("hosts-findings", ("f",), ("its ranks may go on",)),
            Page("host", ("f", *("down",) * 5, "enter"), ("over its ranks", "damaged packets")),
        )
        await album.take(pilot, pages)
    fleet.close()
    album.close()


@every_view
async def test_the_plan_and_what_lies_over_it(view: View, root: Path) -> None:
    album = Album(view)
    app = app_of(view, root, "plan", recipe="test-8b")
    async with app.run_test(size=(view.columns, view.rows), notifications=True) as pilot:
        pages = (
            Page("plan", (), ("fits", "Liger", "each")),
            Page("plan-edited", ("down", "down", "down", "down", "right"), ("1 edited",)),
            Page("sweep", ("s",), ("ZeRO-3", "micro-batch")),
            Page("where", ("escape", "w"), ("a100-40gb", "Take it")),
            Page("plan-gpus", ("escape", "d", "a"), ("2 chosen",)),
            Page("plan-launch", ("enter", "L"), ("Launch this run?", "train_batch_size")),
            Page("plan-load", ("escape", "v"), ("bf16", "Longer")),
        )
        await album.take(pilot, pages)
    album.close()
