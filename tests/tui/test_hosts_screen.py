"""A run over hosts on the screen: all of them, one, one rank; found by words, put in order; the way back."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widgets import Input

from llmtop.tui.app import LlmtopApp
from llmtop.tui.asking.deeds import Deeds
from llmtop.tui.screens.hosts import HostsScreen
from llmtop.tui.screens.monitor import MonitorScreen
from llmtop.tui.screens.runs import RunsScreen
from llmtop.tui.widgets.hosttable import HostTable
from tests.fleets import PlayedFleet
from tests.tui.hostfeed import feed_on_its_clock
from tests.tui.tuiruns import screen_text, wait_for, wait_for_text


@pytest.fixture
def fleet(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedFleet]:
    played = PlayedFleet(root, hosts=40, ranks=2)
    monkeypatch.setattr("llmtop.tui.screens.hosts.FleetFeed", partial(feed_on_its_clock, played))
    monkeypatch.setattr("llmtop.tui.feeds.fleetfeed.POLL_SECONDS", 0.05)
    played.start()
    played.step(5)
    yield played
    played.close()


def app_of(fleet: PlayedFleet, root: Path, **given: Any) -> LlmtopApp:
    return LlmtopApp("monitor", fleet.run, root, deeds=Deeds(), **given)


def shown_hosts(pilot: Pilot[Any]) -> list[str]:
    """In the order of the table."""
    rows = (re.match(r"[ ▸]*(node\d\d) ", row) for row in screen_text(pilot.app).splitlines())
    return [row[1] for row in rows if row]


async def test_the_worst_hosts_are_first_and_it_says_why(fleet: PlayedFleet, root: Path) -> None:
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "40 hosts", "node01", "nothing stands out so far")
        await wait_for_text(pilot, "hosts 40/40", "ranks 80/80", "5/60")
        fleet.step(2, slow={51: 1.7})
        fleet.lose("node07")
        fleet.network("node31", links_down=("eth1",))
        fleet.step(1, slow={51: 1.7})
        await wait_for_text(pilot, "all hosts wait for rank 51 of host node26", "link eth1 of host node31")
        await wait_for(pilot, lambda: shown_hosts(pilot)[:3] == ["node07", "node31", "node26"])
        await wait_for_text(pilot, "hosts 39/40")


async def test_a_host_that_is_found_again_leaves_its_place(fleet: PlayedFleet, root: Path) -> None:
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "node01")
        fleet.lose("node07")
        await wait_for_text(pilot, "✗ no answer", "host node07 does not answer")
        fleet.find("node07")
        await wait_for_text(pilot, "host node07 answers again")
        await wait_for(pilot, lambda: "no answer" not in screen_text(pilot.app))


async def test_words_find_hosts_and_a_rank_finds_its_own(fleet: PlayedFleet, root: Path) -> None:
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "node01")
        await pilot.press("slash", *"rank51")
        await wait_for(pilot, lambda: shown_hosts(pilot) == ["node26"])
        pilot.app.screen.query_one(Input).value = "node3"
        await wait_for(pilot, lambda: len(shown_hosts(pilot)) == 10)
        await pilot.press("escape")
        await wait_for(pilot, lambda: len(shown_hosts(pilot)) > 10)


async def test_rows_are_ordered_by_a_column_and_the_cursor_stays_on_its_host(
    fleet: PlayedFleet, root: Path
) -> None:
    fleet.step(1, slow={20: 1.4, 60: 1.2})
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "node01")
        await wait_for(pilot, lambda: shown_hosts(pilot)[:2] == ["node11", "node31"])
        await pilot.press("down")
        await wait_for_text(pilot, "▸node31")
        await pilot.press("o")
        await wait_for_text(pilot, "host▴", "▸node31")
        await pilot.press("O", "home")
        await wait_for(pilot, lambda: shown_hosts(pilot)[0] == "node40")
        await pilot.press("end")
        await wait_for_text(pilot, "▸node01")


async def test_one_host_one_rank_and_back(fleet: PlayedFleet, root: Path) -> None:
    fleet.step(2, slow={51: 1.7})
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "▸node26")
        await pilot.press("enter")
        shown = await wait_for_text(pilot, "node26  ranks 50 to 51", "over its ranks", "▸51")
        assert "Filter" not in shown
        await pilot.press("left")
        await wait_for_text(pilot, "▸50")
        await pilot.press("right", "enter")
        await wait_for_text(pilot, "rank 51 of 80", "Log  rank 51", "step 7/60")
        assert isinstance(pilot.app.screen, MonitorScreen)
        await pilot.press("escape")
        await wait_for_text(pilot, "over its ranks")
        await pilot.press("m")
        await wait_for_text(pilot, "ranks 50 to 51 of 80")
        await pilot.press("escape")
        await wait_for_text(pilot, "over its ranks")
        await pilot.press("escape")
        await wait_for_text(pilot, "worst first", "▸node26")
        await pilot.press("escape")
        await wait_for(pilot, lambda: isinstance(pilot.app.screen, RunsScreen))


async def test_what_stands_out_is_opened_with_what_to_do(fleet: PlayedFleet, root: Path) -> None:
    for number in range(1, 9):
        fleet.lose(f"node0{number}")
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "Findings 8", "5 more hosts do not answer")
        await pilot.press("f")
        await wait_for_text(pilot, "its ranks may go on", "hosts node04, node05, node06 and 2 more")
        await pilot.press("escape")
        await wait_for_text(pilot, "worst first")


async def test_the_end_of_the_run_is_told_and_a_person_leaves(fleet: PlayedFleet, root: Path) -> None:
    app = app_of(fleet, root)
    async with app.run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "node01")
        fleet.end("failed", "rank 51 of node26 ended by SIGKILL", rank=51)
        await wait_for_text(pilot, "FAILED: rank 51 of node26 ended by SIGKILL")
        await wait_for(pilot, lambda: "Stop" not in screen_text(app).splitlines()[-1])
        await pilot.press("q")
    assert app.return_value == 4 and "failed" in app.farewell


async def test_a_narrow_terminal_keeps_what_matters(fleet: PlayedFleet, root: Path) -> None:
    fleet.lose("node07")
    async with app_of(fleet, root).run_test(size=(60, 16)) as pilot:
        shown = await wait_for_text(pilot, "▸node07", "no answer")
        assert "step" in shown and "excess" in shown
        await pilot.resize_terminal(200, 50)
        await wait_for_text(pilot, "host mem", "network", "busy", "peak")


async def test_before_anything_was_told_hosts_are_waited_for(root: Path) -> None:
    played = PlayedFleet(root, hosts=3)
    async with LlmtopApp("monitor", played.run, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "◌ waiting", "hosts 0/3", "step 0/60")
        await pilot.press("enter")
        await wait_for_text(pilot, "it has told nothing yet")
        assert isinstance(pilot.app.screen, HostsScreen)
    played.close()


async def test_a_click_chooses_a_host_and_another_opens_it(fleet: PlayedFleet, root: Path) -> None:
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "▸node01")
        await pilot.click(HostTable, offset=(4, 3))
        await wait_for_text(pilot, "▸node03")
        await pilot.click(HostTable, offset=(4, 3))
        await wait_for_text(pilot, "node03  ranks 4 to 5", "over its ranks")


async def test_words_that_no_host_holds_are_told(fleet: PlayedFleet, root: Path) -> None:
    async with app_of(fleet, root).run_test(size=(80, 24)) as pilot:
        await wait_for_text(pilot, "▸node01")
        await pilot.press("slash", *"nowhere")
        await wait_for_text(pilot, "no host holds these words")
        await pilot.press("enter", "enter")
        await wait_for_text(pilot, "no host holds these words")
