"""Logs of hosts whose clocks differ are read as one record in the launching machine's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.export.archive import export_run
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fleet.part import HostPart, LeadPart, RankPart
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.mirrors.follow import _Events
from llmtop.profiler.record import feed, recording
from llmtop.profiler.record.bookmark import ended_summary, read_bookmark
from llmtop.profiler.record.bookmarking import Bookmarker
from llmtop.profiler.record.clocks import clocks_of
from llmtop.profiler.record.eventlog import Clock, EventWriter
from llmtop.profiler.record.events import RankStarted, StepFinished
from llmtop.profiler.record.feed import LateLine, RunReader, RunStream, open_stream, read_state
from llmtop.profiler.record.hostclock import SET_SECONDS, NotedClocks, noted
from llmtop.profiler.record.hostevents import ClockMeasured
from llmtop.profiler.record.hosts import HostDir, Hosts, write_hosts
from llmtop.profiler.record.recording import Cursor, NoSuchPlace
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.replay import Replay
from llmtop.profiler.report.build import build_report
from llmtop.profiler.report.history import read_history
from llmtop.profiler.report.text import render
from llmtop.trainer.hosts.hostfile import with_ranks
from tests.fleets import PlayedFleet
from tests.recorded import BEGAN

AHEAD, BEHIND = 3 * 3600.0, -5 * 3600.0
"""Of the second host's clock and of the third one's."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[PlayedFleet]:
    """Three hosts whose clocks are hours apart, before they have made a step."""
    made = PlayedFleet(tmp_path / "hosts")
    clocks = {"node01": 0.02, "node02": AHEAD, "node03": BEHIND}
    for name, seconds in clocks.items():
        made.played[name].time.advance(seconds)
    made.start()
    for name, seconds in clocks.items():
        made.tell(ClockMeasured(host=name, offset_seconds=seconds, error_seconds=0.0004))
    yield made
    made.close()


def logs_of(run: RunDir) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sorted(run.path.rglob("*.jsonl"))}


def test_a_whole_run_is_shown_in_the_launching_machines_time(fleet: PlayedFleet) -> None:
    fleet.step(6)
    before, now = logs_of(fleet.run), fleet.time.now
    state = read_state(fleet.run)
    assert state.now is not None and BEGAN < state.now <= now
    events = list(RunStream(fleet.run).poll())
    assert [event.t for event in events] == sorted(event.t for event in events)
    last = [event.t for event in events if isinstance(event, StepFinished) and event.step == 6]
    assert max(last) - min(last) == pytest.approx(0.02, abs=1e-3), "a clock that is 20 ms off is left alone"
    steps = [event.step for event in events if isinstance(event, StepFinished)]
    assert steps == sorted(steps) and len(steps) == 6 * len(state.ranks)
    assert set(state.clocks) == {"node02", "node03"}
    replay = Replay(fleet.run, lambda _: {})
    replay.read_on(60.0)
    replay.seek(replay.end)
    assert replay.state == state
    assert logs_of(fleet.run) == before, "no log is written anew"


def test_what_is_shown_says_that_it_was_corrected(fleet: PlayedFleet) -> None:
    fleet.step(3)
    state = read_state(fleet.run)
    (found,) = (one for one in findings(state, fleet.spec, fleet.prediction) if one.key == "clocks_differ")
    assert found.title == "the clocks of 2 hosts differ, which is corrected"
    assert found.evidence.startswith(
        "node03: 5h 00m behind that of the launching machine; node02: 3h 00m ahead"
    )
    assert found.title in render(build_report(fleet.run), 100)
    part = read_state(HostPart(fleet.run, fleet.hosts.hosts[1]))
    assert set(part.clocks) == {"node02"}
    assert not read_state(LeadPart(fleet.run)).clocks


def test_a_host_and_a_rank_of_it_are_merged_with_what_the_lead_says(fleet: PlayedFleet) -> None:
    fleet.step(4)
    far = fleet.hosts.hosts[2]
    for part in (HostPart(fleet.run, far), RankPart(fleet.run, far, far.first_rank)):
        times = [event.t for event in RunStream(part).poll()]
        assert times == sorted(times)
        assert max(times) == pytest.approx(fleet.time.now - 2.0, abs=0.1)
    own = HostDir(fleet.run.path, far)
    assert clocks_of(own) is None, "by itself a host goes by its own clock"
    assert max(event.t for event in RunStream(own).poll()) < fleet.time.now + BEHIND + 1.0


def test_a_clock_that_is_measured_after_lines_were_read_has_them_read_anew(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.played["node02"].time.advance(AHEAD)
    fleet.start()
    fleet.step(2)
    live = RunReader(fleet.run)
    early = live.poll()
    assert early.now is not None and early.now > fleet.time.now + AHEAD - 60
    stream = RunStream(fleet.run)
    list(stream.poll())
    fleet.tell(ClockMeasured(host="node02", offset_seconds=AHEAD, error_seconds=0.001))
    with pytest.raises(LateLine):
        list(stream.poll())
    fleet.step(2)
    state = live.poll()
    assert state.now is not None and state.now <= fleet.time.now
    assert state == read_state(fleet.run)
    fleet.tell(ClockMeasured(host="node02", offset_seconds=AHEAD + 0.2, error_seconds=0.001))
    assert live.poll().clocks == state.clocks, "drift leaves what was taken off as it is"
    fleet.close()


def test_a_copy_of_the_figures_has_each_event_once_whenever_a_clock_is_measured(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.played["node01"].time.advance(AHEAD)
    fleet.start()
    fleet.step(3)
    follows = _Events(fleet.run)
    seen = [event for batch in follows.new() for event in batch]
    fleet.tell(ClockMeasured(host="node01", offset_seconds=AHEAD, error_seconds=0.001))
    fleet.step(3)
    seen += [event for batch in follows.new() for event in batch]
    fleet.step(1)
    seen += [event for batch in follows.new() for event in batch]
    for rank in range(6):
        own = [event.step for event in seen if isinstance(event, StepFinished) and event.src == f"rank{rank}"]
        assert own == [1, 2, 3, 4, 5, 6, 7]
    fleet.close()


def test_a_bookmark_counts_with_the_clocks_that_it_was_made_with(
    fleet: PlayedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WORTH_KEEPING_BYTES", 1)
    monkeypatch.setattr(recording, "PART_BYTES", 4096)
    fleet.step(30)
    fleet.end()
    part = HostPart(fleet.run, fleet.hosts.hosts[1])
    for run in (fleet.run, part):
        Bookmarker(run).finish()
        whole = read_state(run)
        made = read_bookmark(run)
        assert made is not None and made.state == whole and ended_summary(run) is not None
        stream, state = open_stream(run)
        assert state == whole and not list(stream.poll())
    fleet.tell(ClockMeasured(host="node02", offset_seconds=0.0, error_seconds=0.001))
    for run in (fleet.run, part):
        assert open_stream(run)[1].steps_finished == 0, "made with what was known before"
        assert len(read_state(run).clocks["node02"]) == 2


def test_an_uncertain_measurement_gives_way_to_a_better_one() -> None:
    rough = noted((), ClockMeasured(t=1.0, host="h", offset_seconds=0.4, error_seconds=0.5))
    assert rough[0].taken_off_seconds == 0.0, "it may be nothing"
    better = noted(rough, ClockMeasured(t=2.0, host="h", offset_seconds=0.3, error_seconds=0.001))
    assert [one.taken_off_seconds for one in better] == [0.3]
    assert noted(better, ClockMeasured(t=3.0, host="h", offset_seconds=0.31, error_seconds=0.0001)) is better
    later = noted(better, ClockMeasured(t=4.0, host="h", offset_seconds=90.0, error_seconds=0.001))
    assert [one.taken_off_seconds for one in later] == [0.3, 90.0]
    assert noted(later, ClockMeasured(t=4.0, host="h", offset_seconds=9.0, error_seconds=0.001)) is later


_MEASURED = st.builds(
    ClockMeasured,
    # Few times, so that some are the same and some go back.
    t=st.integers(0, 20).map(float),
    host=st.sampled_from(("h1", "h2")),
    offset_seconds=st.floats(-3.0, 3.0),
    error_seconds=st.floats(0.0, 2.0),
)


@given(st.lists(_MEASURED, max_size=20))
def test_measurements_that_pass_again_change_nothing(measured: list[ClockMeasured]) -> None:
    clocks = NotedClocks()
    for event in measured:
        clocks.note(event)
    before = [clocks.of(host) for host in ("h1", "h2")]
    for event in measured:
        assert not clocks.note(event)
    assert [clocks.of(host) for host in ("h1", "h2")] == before


def test_a_run_whose_clock_was_measured_ever_better_is_read_to_its_end(tmp_path: Path) -> None:
    fleet = PlayedFleet(tmp_path)
    fleet.start()
    for offset, error in ((0.0, 1.0), (-0.9, 0.9), (1.5, 0.04)):
        fleet.step(1)
        fleet.tell(ClockMeasured(host="node02", offset_seconds=offset, error_seconds=error))
    state = read_state(fleet.run)
    assert state.steps_finished == 3
    assert [one.taken_off_seconds for one in state.clocks["node02"]] == [1.5]
    seen = [event for batch in _Events(fleet.run).new() for event in batch]
    assert sum(isinstance(event, StepFinished) for event in seen) == 3 * len(state.ranks)
    fleet.close()


def test_a_record_that_changes_for_ever_is_given_up_and_said_so(
    fleet: PlayedFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.step(1)

    def changes(self: Cursor, until: float | None = None) -> NoReturn:
        raise NoSuchPlace("thinned again")

    monkeypatch.setattr(Cursor, "batch", changes)
    readers: tuple[Callable[[], object], ...] = (
        lambda: read_state(fleet.run),
        lambda: RunReader(fleet.run).poll(10),
        lambda: list(_Events(fleet.run).new()),
        lambda: read_history(fleet.run),
        lambda: export_run(fleet.run, fleet.run.path.parent / "out.llmtop"),
    )
    for read in readers:
        with pytest.raises(LlmtopError, match="cannot be read to its end") as told:
            read()
        assert "it was begun anew 50 times" in told.value.why and told.value.fix


# --- the merge, whatever the clocks were -------------------------------------------------------------


class Machine:
    """A host whose clock is ahead by some time, and one day set."""

    def __init__(self, run: RunDir, name: str, ranks: Sequence[int], ahead: float) -> None:
        self.name, self.ahead, self.booted = name, ahead, 1000.0
        self.now = BEGAN
        clock = Clock(wall=lambda: self.now + self.ahead, monotonic=lambda: self.now - self.booted)
        self.logs = [EventWriter(run.events_path(rank), f"rank{rank}", clock=clock) for rank in ranks]


_AHEAD = st.floats(min_value=-1e5, max_value=1e5).map(lambda seconds: round(seconds, 3))
_SET = st.none() | _AHEAD.filter(lambda seconds: abs(seconds) > 10)


@hypothesis_settings(max_examples=60)
@given(
    ahead=st.tuples(_AHEAD, _AHEAD),
    set_by=st.tuples(_SET, _SET),
    reboots=st.booleans(),
    written=st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 200.0)), min_size=1, max_size=60),
    set_after=st.floats(0.0, 1.0),
    part_bytes=st.integers(200, 5000),
)
def test_every_line_is_merged_at_its_time_and_each_log_keeps_its_order(
    ahead: tuple[float, float],
    set_by: tuple[float | None, float | None],
    reboots: bool,
    written: list[tuple[int, float]],
    set_after: float,
    part_bytes: int,
) -> None:
    with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PART_BYTES", part_bytes)
        run, now = RunDir(Path(folder)), BEGAN
        hosts = Hosts(hosts=with_ranks({"h1": (0, 1), "h2": (0, 1)}))
        write_hosts(run, hosts)
        machines = [
            Machine(run, host.name, host.ranks, by) for host, by in zip(hosts.hosts, ahead, strict=True)
        ]
        lead = EventWriter(
            run.events_path("supervisor"), "lead", clock=Clock(wall=lambda: now, monotonic=lambda: now)
        )

        def measure() -> None:
            for machine in machines:
                lead.write(ClockMeasured(host=machine.name, offset_seconds=machine.ahead, error_seconds=1e-4))

        measure()
        true: dict[int, float] = {}
        # Every log has begun before a clock is set: where one begins after that, nothing says which it is.
        first = [(log, 1.0) for log in range(4)]
        for number, (where, gap) in enumerate((*first, *written), 1):
            now += gap
            if number == 5 + int(set_after * len(written)):
                for machine, seconds in zip(machines, set_by, strict=True):
                    machine.ahead += seconds or 0.0
                    machine.booted = now - 50.0 if reboots and seconds else machine.booted
                measure()
            true[number] = now
            if where == 4:
                lead.write(RankStarted(rank=number, pid=1))
                continue
            machine = machines[where // 2]
            machine.now = now
            machine.logs[where % 2].write(StepFinished(step=number))
        for writer in (lead, *(log for machine in machines for log in machine.logs)):
            writer.close()
        _merged_as_it_was(run, true)


def _merged_as_it_was(run: RunDir, true: dict[int, float]) -> None:
    paths = run.event_logs()
    cursor = Cursor(paths, clocks=clocks_of(run))
    seen: list[tuple[int, float, str]] = []
    places = []
    while batch := cursor.batch():
        for event in batch:
            if isinstance(event, StepFinished | RankStarted):
                number = event.step if isinstance(event, StepFinished) else event.rank
                seen.append((number, event.t, event.src))
        places.append((len(seen), cursor.place))
    assert {number for number, _, _ in seen} == set(true)
    for number, t, _ in seen:
        # A clock that matters to nobody is left as it is, and one that was set by as little.
        assert t == pytest.approx(true[number], abs=SET_SECONDS)
    for log in {src for _, _, src in seen}:
        numbers = [number for number, _, src in seen if src == log]
        assert numbers == sorted(numbers)
    assert all(later[1] >= earlier[1] - SET_SECONDS for earlier, later in zip(seen, seen[1:], strict=False))
    for count, place in places[:: max(1, len(places) // 3)]:
        again, rest = Cursor(paths, place, clocks=clocks_of(run)), []
        while batch := again.batch():
            rest += [(event.t, event.src) for event in batch if isinstance(event, StepFinished | RankStarted)]
        assert rest == [(t, src) for _, t, src in seen[count:]]


def test_a_run_whose_list_of_hosts_is_damaged_is_read_as_its_logs_are(fleet: PlayedFleet) -> None:
    fleet.step(2)
    (fleet.run.path / "hosts.json").write_text("{")
    state: RunState = read_state(fleet.run)
    assert not state.clocks and state.steps_finished == 2
