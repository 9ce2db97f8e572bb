"""Hosts of a run: folded to summaries of bounded size, read back, compared, and their troubles named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from llmtop.profiler.fleet import summariser
from llmtop.profiler.fleet.fewer import thin_summaries
from llmtop.profiler.fleet.findings import HostFinding, fleet_findings, gathered
from llmtop.profiler.fleet.part import HostPart, LeadPart, RankPart, telling_part
from llmtop.profiler.fleet.reading import TAIL_BYTES, FleetReader, SummaryTail
from llmtop.profiler.fleet.summary import ALONE, STEP, HostSummarised, Worst, decoder, spread
from llmtop.profiler.record.events import LogThinned
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.hosts import HostDir
from llmtop.profiler.record.remote import Remote, write_remote
from llmtop.profiler.record.segments import log_bytes, segment_path, segments_of, thinned_path
from llmtop.profiler.record.thinning import Bounds
from tests.fleets import PlayedFleet
from tests.recorded import make_recorded_run


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PlayedFleet]:
    played = PlayedFleet(tmp_path)
    played.start()
    yield played
    played.close()


class Viewer:
    """Reads as a viewer does, on the fleet's clock or on one that has passed it by some seconds."""

    def __init__(self, fleet: PlayedFleet) -> None:
        self.late = 0.0
        self.reader = FleetReader(
            fleet.run,
            fleet.hosts,
            wall=lambda: fleet.time.now + self.late,
            monotonic=lambda: fleet.time.now + self.late,
        )

    def findings(self, *, goes_on: bool = True) -> dict[str, HostFinding]:
        self.reader.poll()
        found = fleet_findings(self.reader.fleet, "some-run", self.reader.quiet_seconds(), goes_on=goes_on)
        return {one.key: one for one in found}

    def summary(self, host: str) -> HostSummarised:
        self.reader.poll()
        told = self.reader.fleet.hosts[host].summary
        assert told is not None
        return told


def test_a_spread_names_the_rank_with_the_largest_and_leaves_out_what_is_not_known() -> None:
    found = spread({3: 1.0, 4: 5.0, 5: None, 6: 5.0, 7: 2.0})
    assert found is not None
    assert (found.low, found.median, found.high, found.rank) == (1.0, 3.5, 5.0, 4)
    assert spread({1: None}) is None and spread({}) is None


def test_a_summary_says_what_all_ranks_of_a_host_do(fleet: PlayedFleet) -> None:
    fleet.step(5)
    fleet.step(3, slow={3: 2.0})
    told = Viewer(fleet).summary("node02")
    assert (told.first_rank, told.ranks, told.alive, told.status) == (2, 2, 2, "running")
    assert (told.step, told.ahead_step) == (8, 8)
    # The times are those of the three steps since the summary before.
    assert told.seconds[ALONE].rank == 3
    assert told.seconds[ALONE].high == pytest.approx(2 * told.seconds[ALONE].low)
    assert told.seconds[STEP].low == pytest.approx(1.35)
    assert told.peak_bytes is not None and told.peak_bytes.rank == 3
    assert told.figures["utilization_percent"].rank == 3
    assert told.rss_bytes is not None and told.rss_bytes.rank == 3
    assert told.loss is None and Viewer(fleet).summary("node01").loss == pytest.approx(3.92)
    assert told.tokens_per_second == pytest.approx(fleet.spec.tokens_per_step / 1.35, rel=1e-4)


def test_a_summary_stays_as_long_as_it_was_however_long_the_run_is(fleet: PlayedFleet) -> None:
    path = HostDir(fleet.run.path, fleet.hosts.hosts[0]).summary_path
    fleet.step(4)
    short = len(path.read_bytes().splitlines()[-1])
    for _ in range(30):
        fleet.step(20)
    lengths = [len(line) for line in path.read_bytes().splitlines()]
    assert len(lengths) == 32, "one for each time that one was due"
    assert max(lengths) < 1.2 * short and max(lengths) < TAIL_BYTES / 4


def test_a_host_on_which_nothing_happens_says_nothing_twice(fleet: PlayedFleet) -> None:
    fleet.step(3)
    tail = SummaryTail(HostDir(fleet.run.path, fleet.hosts.hosts[0]).summary_path)
    assert len(tail.poll()) == 2
    for _ in range(5):
        fleet.pass_time(10.0)
        fleet.summarise()
    assert tail.poll() == []


def test_between_two_steps_the_times_of_the_last_one_stay(fleet: PlayedFleet) -> None:
    fleet.step(4)
    before = Viewer(fleet).summary("node01").seconds
    fleet.sample()
    fleet.pass_time(10.0)
    fleet.summarise()
    after = Viewer(fleet).summary("node01")
    assert after.seconds == before and after.t > fleet.time.now - 1


def test_of_a_long_log_of_summaries_only_its_end_is_read(fleet: PlayedFleet, tmp_path: Path) -> None:
    fleet.step(3)
    line = HostDir(fleet.run.path, fleet.hosts.hosts[0]).summary_path.read_bytes().splitlines()[-1]
    path = tmp_path / "long.jsonl"
    path.write_bytes(b"\n".join([line] * 500) + b"\n" + line[:40])
    tail = SummaryTail(path)
    assert 0 < len(tail.poll()) <= TAIL_BYTES / len(line)
    assert tail.skipped_lines == 0
    with path.open("ab") as file:
        file.write(line[40:] + b"\nnot a summary\n")
    assert len(tail.poll()) == 1 and tail.skipped_lines == 1
    path.write_bytes(line + b"\n")
    assert len(tail.poll()) == 1


def test_summaries_go_on_in_another_file_and_old_ones_get_fewer(
    fleet: PlayedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = Bounds(whole=8000, thinned=16_000)
    monkeypatch.setattr("llmtop.profiler.fleet.reading.SEGMENT_BYTES", 4000)
    monkeypatch.setattr("llmtop.profiler.fleet.summariser._THIN_AFTER", 2)
    monkeypatch.setattr(summariser, "thin_summaries", partial(thin_summaries, bounds=bounds))
    host = fleet.played["node01"]
    host.summariser._writer._segment_bytes = 4000
    path = host.dir.summary_path
    tail = SummaryTail(path)
    for turn in range(90):
        fleet.step(1)
        if turn == 20:
            fleet.network("node01", links_down=("eth1",))
        if turn == 23:
            fleet.network("node01")
        assert [one.step for one in tail.poll()][-1] == fleet.steps
        assert log_bytes(path) <= bounds.whole + bounds.thinned + 2 * 4000 + 4000
    found = segments_of(path)
    assert found.until > 4
    assert SummaryTail(path).poll()[-1].step == fleet.steps, "whoever looks now begins in the newest file"
    *kept, end = thinned_path(path, found.until).read_bytes().splitlines()
    told = [decoder().decode(line) for line in kept]
    thinned = msgspec.json.decode(end, type=LogThinned)
    assert thinned.keeps_one_in > 1 and thinned.left_out > 0
    whole = sum(len(segment_path(path, number).read_bytes().splitlines()) for number in found.numbers)
    assert whole + len(told) + thinned.left_out == host.summariser._written
    assert [one.t for one in told] == sorted(one.t for one in told)
    changes = [one.links_down for one in told]
    assert any(down == ("eth1",) for down in changes) and changes[0] == changes[-1] == ()


def test_a_full_disk_leaves_summaries_as_they_were_and_the_next_ones_are_written(
    fleet: PlayedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmtop.profiler.fleet.summariser._THIN_AFTER", 1)
    host = fleet.played["node01"]
    host.summariser._writer._segment_bytes = 2000
    small = Bounds(whole=2000, thinned=2000)
    monkeypatch.setattr(summariser, "thin_summaries", partial(thin_summaries, bounds=small))
    path = host.dir.summary_path

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr("llmtop.profiler.fleet.fewer.os.fsync", full)
        for _ in range(12):
            with suppress(OSError):
                fleet.step(1)
        lines = b"".join(file.read_bytes() for file in segments_of(path).paths(path)).splitlines()
        assert [decoder().decode(line).step for line in lines][-1] == fleet.steps
        assert len(lines) == host.summariser._written and not list(path.parent.glob(".*"))
    fleet.step(1)
    assert segments_of(path).until > 0


def test_a_summary_that_cannot_be_read_hides_no_other(fleet: PlayedFleet) -> None:
    fleet.step(3)
    path = fleet.played["node02"].dir.summary_path
    path.unlink()
    path.mkdir()
    viewer = Viewer(fleet)
    viewer.findings()
    assert viewer.summary("node03").step == 3
    assert viewer.reader.fleet.hosts["node02"].summary is None
    assert viewer.reader.skipped_lines == 1


def test_hosts_that_all_do_well_have_no_findings(fleet: PlayedFleet) -> None:
    fleet.step(5)
    assert Viewer(fleet).findings() == {}


def test_the_slowest_rank_is_named_with_its_host(fleet: PlayedFleet) -> None:
    fleet.step(5, slow={4: 1.8})
    found = Viewer(fleet).findings()["slowest_host"]
    assert (found.host, found.title) == ("node03", "all hosts wait for rank 4 of host node03")
    assert "280 ms a step" in found.evidence


def test_a_host_that_is_slow_as_a_whole_is_named_and_not_one_of_its_ranks(fleet: PlayedFleet) -> None:
    fleet.step(5, slow={4: 1.8, 5: 1.9})
    assert Viewer(fleet).findings()["slowest_host"].title == "all hosts wait for host node03"


def test_a_host_that_does_not_get_on_is_named(fleet: PlayedFleet) -> None:
    fleet.step(4)
    viewer = Viewer(fleet)
    fleet.step(2, still=frozenset({"node02"}))
    assert "host_behind" not in viewer.findings(), "that may be what has not been written yet"
    fleet.step(4, still=frozenset({"node02"}))
    found = viewer.findings()["host_behind"]
    assert found.host == "node02" and found.evidence == "at step 4, others at 10"


def test_a_host_that_told_earlier_than_others_is_not_behind(fleet: PlayedFleet) -> None:
    fleet.step(4)
    fleet.silent.add("node02")
    fleet.step(20)
    assert Viewer(fleet).findings() == {}, "it is silent for less than is named"


def test_several_failed_ranks_of_a_host_are_all_named_and_of_many_hosts_the_first(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path, hosts=6)
    fleet.start()
    fleet.step(4)
    for rank in range(12):
        fleet.fail(rank)
    fleet.pass_time(5.0)
    fleet.summarise()
    viewer = Viewer(fleet)
    viewer.reader.poll()
    found = gathered(fleet_findings(viewer.reader.fleet, "r", {}, goes_on=True))
    failed = [one.title for one in found if one.key == "rank_failed"]
    assert failed[:2] == ["rank 0 of host node01 failed", "rank 1 of host node01 failed"]
    assert len(failed) == 7 and failed[-1] == "3 more hosts have a rank that failed"
    fleet.close()


def test_a_host_is_lost_and_found_again(fleet: PlayedFleet) -> None:
    fleet.step(4)
    viewer = Viewer(fleet)
    viewer.findings()
    fleet.lose("node02")
    fleet.silent.add("node02")
    fleet.step(1, still=frozenset({"node02"}))
    found = viewer.findings()["host_lost"]
    assert found.severity == "critical" and "its last step told is 4" in found.evidence
    assert "its connection broke" in found.evidence
    fleet.find("node02")
    fleet.silent.clear()
    fleet.step(1)
    found = viewer.findings()["host_found"]
    assert found.severity == "info" and "1m 15s" in found.evidence
    assert "host_lost" not in viewer.findings()


def test_a_host_that_tells_nothing_for_long_is_named_by_the_viewers_own_clock(fleet: PlayedFleet) -> None:
    fleet.step(4)
    viewer = Viewer(fleet)
    assert "host_silent" not in viewer.findings()
    fleet.silent.add("node03")
    fleet.step(2)
    viewer.findings()
    viewer.late = 31.0
    assert viewer.findings()["host_silent"].severity == "warning"
    assert "host_silent" not in viewer.findings(goes_on=False)


def test_a_clock_that_differs_is_taken_off_before_anything_is_said(fleet: PlayedFleet) -> None:
    fleet.shift_clock("node02", -90.0)
    fleet.shift_clock("node03", 0.001)
    fleet.step(4)
    viewer = Viewer(fleet)
    found = viewer.findings()
    assert "host_silent" not in found, "its stamps alone would have it silent for 90 s"
    assert found["clocks_differ"].host == "node02"
    assert "1m 30s behind that of the launching machine" in found["clocks_differ"].evidence
    assert viewer.reader.quiet_seconds()["node02"] == pytest.approx(0.0, abs=0.1)


def test_failed_links_are_named_with_their_host(fleet: PlayedFleet) -> None:
    fleet.step(4)
    viewer = Viewer(fleet)
    fleet.network("node01", links_down=("eth1",))
    fleet.network("node02", link_losses=3)
    fleet.network("node03", network_errors=19)
    fleet.step(1)
    found = viewer.findings()
    assert found["link_down"].title == "link eth1 of host node01 is down"
    assert found["link_lost"].host == "node02" and found["link_lost"].evidence.startswith("2 times")
    assert found["network_errors"].host == "node03" and found["network_errors"].evidence.startswith(
        "12 errors"
    )


def test_a_rank_that_failed_is_named_with_what_it_said(fleet: PlayedFleet) -> None:
    fleet.step(4)
    fleet.fail(5, "NCCL error: remote process exited\nmore")
    fleet.pass_time(5.0)
    fleet.summarise()
    found = Viewer(fleet).findings()["rank_failed"]
    assert found.title == "rank 5 of host node03 failed"
    assert found.evidence == "RuntimeError: NCCL error: remote process exited"


def test_what_several_hosts_say_of_themselves_is_said_once(fleet: PlayedFleet) -> None:
    fleet.step(4)
    reader = Viewer(fleet).reader
    reader.poll()
    worst = (Worst("warning", "throttled", "GPU 1 runs below its full clock"),)
    hosts = {
        name: replace(host, summary=replace(host.summary, worst=worst))
        for name, host in reader.fleet.hosts.items()
        if host.summary is not None
    }
    found = fleet_findings(replace(reader.fleet, hosts=hosts), "r", {}, goes_on=True)
    assert [(one.key, one.evidence) for one in found] == [("throttled", "on hosts node01, node02, node03")]


def test_a_run_that_has_ended_says_so_on_every_host(fleet: PlayedFleet) -> None:
    fleet.step(4)
    fleet.end()
    viewer = Viewer(fleet)
    assert {viewer.summary(name).status for name in fleet.played} == {"completed"}
    assert viewer.reader.state.status == "completed"


def test_one_host_one_rank_and_the_lead_are_each_a_run_to_read(fleet: PlayedFleet) -> None:
    fleet.step(4)
    fleet.step(1, slow={3: 1.5})
    host = fleet.hosts.hosts[1]
    state = read_state(HostPart(fleet.run, host))
    assert set(state.ranks) == {2, 3} and state.steps_finished == 5
    assert state.hardware is not None and state.status == "running"
    state = read_state(RankPart(fleet.run, host, 3))
    assert set(state.ranks) == {3} and state.steps_finished == 5
    assert state.series.step_seconds[-1] == pytest.approx(1.175)
    state = read_state(LeadPart(fleet.run))
    assert state.ranks == {} and state.name == fleet.spec.name


def test_a_list_of_runs_reads_of_hosts_only_the_first(fleet: PlayedFleet, tmp_path: Path) -> None:
    fleet.step(4)
    part = telling_part(fleet.run)
    assert {path.name for path in part.rank_events().values()} == {"rank-0.jsonl", "rank-1.jsonl"}
    state = read_state(part)
    assert (state.steps_finished, state.status) == (4, "running") and state.last_loss is not None
    alone = make_recorded_run(tmp_path, steps=3)
    assert telling_part(alone) is alone


def test_the_clock_of_who_looks_on_from_elsewhere_is_taken_off(fleet: PlayedFleet) -> None:
    """An hour apart, hosts would all be said to tell nothing."""
    fleet.step(3)
    for ahead_seconds, silent in ((0.0, True), (fleet.time.now - time.time(), False)):
        remote = Remote(host="gpu-1", path="/x", alive=True, ahead_seconds=ahead_seconds)
        write_remote(fleet.run.path, remote)
        reader = FleetReader(fleet.run, fleet.hosts)
        reader.poll()
        assert all((seconds > 30.0) == silent for seconds in reader.quiet_seconds().values()), ahead_seconds


def test_hosts_are_not_blamed_for_a_lost_connection_to_the_machine_that_has_the_run(
    fleet: PlayedFleet,
) -> None:
    fleet.step(3)
    viewer = Viewer(fleet)
    viewer.findings()
    remote = Remote(host="gpu-1", path="/x", alive=True, connected=False, lost_at=fleet.time.now)
    write_remote(fleet.run.path, remote)
    viewer.late = 300.0
    assert "host_silent" not in viewer.findings()
    # Nothing has come yet when it stands again.
    write_remote(fleet.run.path, replace(remote, connected=True, lost_at=None))
    viewer.late = 301.0
    assert "host_silent" not in viewer.findings()
    viewer.late = 340.0
    assert "host_silent" in viewer.findings()
