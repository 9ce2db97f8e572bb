"""A cable that is out while all hosts make ready for another setting: the change is made when it is back."""

from __future__ import annotations

import threading

import pytest

from llmtop.profiler.record.changeevents import ChangeAsked, RestageBegan, Restaged
from llmtop.profiler.record.events import RankStarted
from llmtop.profiler.record.hostevents import HostFound, HostLost
from tests.hosts.in_lab import IN_LAB, fake
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.slow, IN_LAB]


def test_a_relaunch_waits_for_a_host_whose_cable_is_out_and_is_made_once(lab: Lab) -> None:
    run = fake(lab, "changes")
    run.wait_for_step(2)
    # The host makes ready until its cable is out, however long it takes to pull it.
    waits = run.far_path("h2", "waits-early")
    waits.write_text("1")
    codes: list[int] = []

    def ask() -> None:
        codes.append(lab.llmtop("set", run.run.run_id, "zero=3", check=False).returncode)

    asks = threading.Thread(target=ask)
    asks.start()
    run.wait_for(lambda: bool(run.of(ChangeAsked)))
    lab.pull_cable("h2")
    run.wait_for(lambda: bool(run.of(HostLost)))
    assert not run.of(RestageBegan), "the ranks of the other host still train"
    waits.unlink()
    lab.plug_in("h2")
    run.wait_for(lambda: bool(run.of(HostFound)))
    asks.join(timeout=180.0)
    assert codes == [0], run.events()
    assert len(run.of(Restaged)) == 1
    assert [one.setting for one in run.of(RankStarted)] == [0, 0, 1, 1]
    assert lab.llmtop("stop", run.run.run_id).returncode == 0
    assert run.end().state == "stopped"
    for rank, host in ((0, "h1"), (1, "h2")):
        assert (run.run.path / f"rank-{rank}.jsonl").read_bytes() == run.far_bytes(host, f"rank-{rank}.jsonl")
