"""A run under a real lead and real supervisors of hosts, looked at: summaries, screens, one rank, the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from llmtop.profiler.fleet.part import HostPart, RankPart
from llmtop.profiler.record.feed import read_state
from llmtop.trainer import control
from llmtop.tui.app import LlmtopApp
from tests.hosts.over_hosts import OverHosts, fake_ranks, stand_in
from tests.trainer.supervised import cleaned_up
from tests.tui.tuiruns import screen_text, wait_for, wait_for_text


@pytest.fixture
def over_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OverHosts]:
    stand_in(tmp_path, monkeypatch)
    fake_ranks(monkeypatch, "trains")
    with cleaned_up() as started:
        made = OverHosts(tmp_path / "runs", slots=2)
        started.append(made)
        made.start()
        yield made


async def test_hosts_ranks_and_the_end_of_a_real_run(over_hosts: OverHosts) -> None:
    run = over_hosts.run
    over_hosts.wait_for_step(3)
    app = LlmtopApp("monitor", run, run.path.parent)
    async with app.run_test(size=(100, 30)) as pilot:
        await wait_for_text(pilot, "hosts 2/2", "ranks 4/4", "● running")
        await pilot.press("slash", *"h2", "enter", "enter")
        await wait_for_text(pilot, "h2  ranks 2 to 3", "over its ranks", "process memory")
        await pilot.press("right", "m")
        await wait_for_text(pilot, "ranks 2 to 3 of 4", "Log  rank 2")
        await pilot.press("escape")
        await wait_for_text(pilot, "over its ranks")
        control.stop(run, save=True)
        assert over_hosts.end().state == "stopped"
        await pilot.press("escape")
        await wait_for_text(pilot, "STOPPED: ", "■ stopped")
        await wait_for(pilot, lambda: "Stop" not in screen_text(app).splitlines()[-1])
    host = over_hosts.hosts.hosts[1]
    assert set(read_state(HostPart(run, host)).ranks) == {2, 3}
    state = read_state(RankPart(run, host, 3))
    assert set(state.ranks) == {3} and state.steps_finished >= 3 and state.status == "stopped"
