"""A large run on another machine in the app: a rank's log comes when it is opened; a lost link is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.hosts import following
from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking import deeds
from llmtop.tui.commandline.runs import find_run, following_of
from llmtop.tui.screens.hosts import HostsScreen
from llmtop.tui.screens.monitor import MonitorScreen
from tests.fleets import PlayedFleet
from tests.hosts.over_hosts import stand_in
from tests.hosts.test_link import break_link
from tests.tui.hostfeed import feed_on_its_clock
from tests.tui.tuiruns import screen_text, wait_for, wait_for_text


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedFleet]:
    runs = tmp_path / "far-runs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(following.PYTHON, sys.executable)
    stand_in(tmp_path, monkeypatch, more=f"export LLMTOP_RUNS_DIR={runs}")
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(ssh.read_text().replace('exec sh -c "$last"', 'exec sh -c "exec $last"'))
    played = PlayedFleet(runs, hosts=36, ranks=2)
    monkeypatch.setattr("llmtop.tui.screens.hosts.FleetFeed", partial(feed_on_its_clock, played))
    monkeypatch.setattr("llmtop.tui.feeds.fleetfeed.POLL_SECONDS", 0.05)
    monkeypatch.setattr("llmtop.tui.feeds.fleetfeed.AGE_SECONDS", 0.2)
    played.start()
    played.step(5)
    yield played
    played.close()


@pytest.fixture
def near(fleet: PlayedFleet) -> Iterator[RunDir]:
    run = find_run("gpu-1:latest", "screen")
    yield run
    follows = following_of(run)
    assert follows is not None
    follows.close()


def told(app: LlmtopApp, words: str) -> bool:
    return any(words in note.message for note in app._notifications)


async def test_a_rank_is_fetched_when_it_is_opened_and_goes_on(fleet: PlayedFleet, near: RunDir) -> None:
    fleet.step(2, slow={51: 1.7})
    app = LlmtopApp("monitor", near, near.path.parent, read_only=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "hosts 36/36", "▸node26")
        assert not list(near.path.glob("rank-*"))
        await pilot.press("enter")
        await wait_for_text(pilot, "node26  ranks 50 to 51", "▸51")
        await pilot.press("enter")
        await wait_for_text(pilot, "rank 51 of 72", "step 7/60")
        assert isinstance(app.screen, MonitorScreen)
        assert [path.name for path in near.path.glob("rank-*")] == ["rank-51.jsonl"]
        fleet.step(1)
        await wait_for_text(pilot, "step 8/60")
        await pilot.press("escape")
        await wait_for_text(pilot, "over its ranks")
        await pilot.press("m")
        await wait_for_text(pilot, "ranks 50 to 51 of 72")
        await pilot.press("q")
    assert "llmtop attach gpu-1:" in app.farewell


async def test_a_connection_that_breaks_is_told_on_every_screen_until_it_is_mended(
    fleet: PlayedFleet, near: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deeds, "_BREAK_SECONDS", 0.2)
    app = LlmtopApp("monitor", near, near.path.parent)
    async with app.run_test(size=(120, 30)) as pilot:
        await wait_for_text(pilot, "hosts 36/36", "▸node01")
        unreachable = tmp_path / "notes" / "unreachable-gpu-1"
        unreachable.touch()
        break_link()
        await wait_for_text(pilot, "! no connection to gpu-1 for ", "No route to host")
        await pilot.press("enter", "m")
        await wait_for(pilot, lambda: told(app, "Nothing of it has come: ssh: gpu-1: No route to host"))
        assert isinstance(app.screen, HostsScreen)
        unreachable.unlink()
        await wait_for(pilot, lambda: "no connection" not in screen_text(app))
        await pilot.press("m")
        await wait_for_text(pilot, "ranks 0 to 1 of 72", "step 5/60")
        unreachable.touch()
        break_link()
        await wait_for_text(pilot, "! no connection to gpu-1 for ")
        await pilot.press("escape")
        await wait_for_text(pilot, "over its ranks")
        await pilot.press("m")
        await wait_for_text(pilot, "ranks 0 to 1 of 72", "step 5/60", "! no connection to gpu-1 for ")
        unreachable.unlink()
        await wait_for(pilot, lambda: "no connection" not in screen_text(app))
        await pilot.press("escape")
        await wait_for(pilot, lambda: isinstance(app.screen, HostsScreen))
        await wait_for(pilot, lambda: "no connection" not in screen_text(app))
