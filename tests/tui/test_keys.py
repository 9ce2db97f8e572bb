"""The table of keys: every row does what it says from the keyboard alone, and nothing is bound beside it."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from textual.actions import ActionParseResult, parse
from textual.binding import Binding
from textual.dom import DOMNode

import llmtop.tui.panels as panels_package
import llmtop.tui.screens as screens_package
import llmtop.tui.widgets as widgets_package
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.asking.requests import ReplayWish
from llmtop.tui.commandlist import KeyCommands
from llmtop.tui.keys import APP_KEYS, HELP, MONITOR_KEYS, MOVE_KEYS, Key
from tests.fleets import PlayedFleet
from tests.tui.tuiruns import MACHINE, LiveRun, screen_text, wait_for, wait_for_text

SCREENS = {"Runs": "runs", "Plan": "plan", "Monitor": "monitor", "Hosts": "monitor", "Replay": "replay"}
ELSEWHERE = {
    *("Launch", "GPUs of this machine", "Load", "Sweep and where", "Tune"),
    *("Log, opened", "Findings, opened"),
}
"""Sections of what is opened on a screen."""


class Listening(LlmtopApp):
    """Notes each action that a key starts, and starts none of them."""

    CSS_PATH = str(Path(inspect.getfile(LlmtopApp)).with_name("looks") / "theme.tcss")
    heard: list[str]
    deaf = True

    async def run_action(
        self,
        action: str | ActionParseResult,
        default_namespace: DOMNode | None = None,
        namespaces: Mapping[str, DOMNode] | None = None,
    ) -> bool:
        if self.deaf:
            return await super().run_action(action, default_namespace, namespaces)
        where, name, parameters = parse(action) if isinstance(action, str) else action
        place: Any = self if where == "app" else self.screen if where == "screen" else default_namespace
        if name.startswith("scroll_") or not place.check_action(name, parameters):
            return False  # an area with nothing to scroll leaves the key to others
        self.heard.append(name)
        assert hasattr(place, f"action_{name}") or hasattr(place, f"_action_{name}"), (name, place)
        return True


@pytest.fixture
def fleet(root: Path) -> Iterator[PlayedFleet]:
    """A run over hosts, which its own screen shows."""
    played = PlayedFleet(root)
    played.start()
    played.step(3)
    yield played
    played.close()


def name_of(key: Key) -> str:
    return parse(key.action)[1]


def rows_of(title: str) -> list[Key]:
    """A screen's own meaning of a key comes before the app's."""
    below = MONITOR_KEYS if title == "Replay" else ()
    rows: dict[str, Key] = {}
    for row in (*next(keys for name, keys in HELP if name == title), *below, *APP_KEYS, *MOVE_KEYS):
        rows.setdefault(row.key, row)
    return list(rows.values())


def test_every_section_is_walked() -> None:
    assert {title for title, _ in HELP} == {*SCREENS, *ELSEWHERE, "Everywhere", "Lists and texts"}


@pytest.mark.parametrize("title", SCREENS)
async def test_every_key_of_a_screen_starts_its_action(
    title: str, live: LiveRun, fleet: PlayedFleet, root: Path
) -> None:
    app = Listening(
        SCREENS[title],  # type: ignore[arg-type]
        fleet.run if title == "Hosts" else live.run,
        root,
        deeds=Deeds(detect=lambda: MACHINE),
        wish=ReplayWish(step=3),
    )
    async with app.run_test(size=(120, 40)) as pilot:
        await wait_for(pilot, lambda: app.settled and bool(getattr(app.screen, "rows", True)))
        await pilot.pause()
        app.deaf = False
        for row in rows_of(title):
            place = app if row in APP_KEYS else app.screen
            if app._check_action_state(row.action, place) is not True or name_of(row) == "cancel_edit":
                continue  # not to be done now
            app.heard = []
            await pilot.press(row.key)
            await pilot.pause()
            # What has the focus may have its own word for the same key, as Enter in a list.
            said = {name_of(row), "select_cursor", "select", "zoom", "cursor_down", "cursor_up"}
            assert said & set(app.heard), f"{row.key}: {row.action} was not started, but {app.heard}"


@pytest.mark.parametrize("title", SCREENS)
async def test_footer_and_palette_come_from_the_table(
    title: str, live: LiveRun, fleet: PlayedFleet, root: Path
) -> None:
    app = LlmtopApp(
        SCREENS[title],  # type: ignore[arg-type]
        fleet.run if title == "Hosts" else live.run,
        root,
        deeds=Deeds(detect=lambda: MACHINE),
        wish=ReplayWish(step=3),
    )
    async with app.run_test(size=(250, 40)) as pilot:
        await wait_for(pilot, lambda: app.settled and bool(getattr(app.screen, "rows", True)))
        await wait_for_text(pilot, "? Help")
        footer = screen_text(app).splitlines()[-1]
        words = [entry.words for entry in KeyCommands(app.screen)._entries()]
        for row in rows_of(title):
            if row.key in ("q", "escape") or row in MOVE_KEYS or row.action == SCREENS[title]:
                continue
            place = app if row in APP_KEYS else app.screen
            if not (row.label or row.help) or app._check_action_state(row.action, place) is not True:
                continue
            if row.footer and row.label:
                assert row.label in footer, row
            assert any((row.help or row.label) in word for word in words), row


def classes() -> list[type]:
    """Everything of the app that may bind keys."""
    found = []
    for package in (panels_package, screens_package, widgets_package):
        for module in iter_modules(package.__path__, f"{package.__name__}."):
            own = import_module(module.name)
            found += [
                kind
                for _, kind in inspect.getmembers(own, inspect.isclass)
                if kind.__module__ == own.__name__
            ]
    return found


def test_no_key_is_shown_that_the_table_does_not_know() -> None:
    known = {key.key for _, keys in HELP for key in keys} | {"escape", "enter", "question_mark", "q"}
    for kind in classes():
        for binding in kind.__dict__.get("BINDINGS", []):
            if isinstance(binding, Binding) and binding.show:
                assert set(binding.key.split(",")) <= known, (kind, binding)


def test_rows_of_one_section_do_not_contradict_each_other() -> None:
    for title, keys in HELP:
        bound = [key.key for key in keys]
        assert len(bound) == len(set(bound)), title
        assert all(key.help or key.label or not key.footer for key in keys), title


async def test_fast_keys_keep_their_order(root: Path, live: LiveRun) -> None:
    """`j` stands for an arrow, and what is typed right after it comes after it."""
    from tests.recorded import make_recorded_run

    make_recorded_run(root, steps=3)
    app = LlmtopApp("runs", root=root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "● running", "✓ completed")
        second = app.screen.shown[1].run_id  # type: ignore[attr-defined]
        for key in ("j", "space"):
            app.simulate_key(key)
        await wait_for(pilot, lambda: app.screen.marked == (second,))  # type: ignore[attr-defined]
