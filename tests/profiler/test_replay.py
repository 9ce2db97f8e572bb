"""A replay at any time is the fold of everything up to that time, whatever was looked at before."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from llmtop.profiler import replay
from llmtop.profiler.findings.find import findings
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import recording
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import AnyEvent, HangSuspected
from llmtop.profiler.record.recording import Cursor
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.replay import Replay
from tests.recorded import Recorder, make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return make_recorded_run(tmp_path_factory.mktemp("runs"), kind="cuda", ranks=2, steps=700)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts, snapshots and thinnings in a short run."""
    monkeypatch.setattr(recording, "PART_BYTES", 20_000)
    monkeypatch.setattr(replay, "PART_BYTES", 20_000)
    monkeypatch.setattr(replay, "MOST_SNAPSHOTS", 8)
    monkeypatch.setattr(replay, "_SLICES", 60)


def all_events(run: RunDir) -> list[AnyEvent]:
    return [event for _, event in sorted(stamped(run), key=lambda pair: pair[0])]


def stamped(run: RunDir) -> list[tuple[float, AnyEvent]]:
    return [(event.t, event) for path in run.event_logs() for event in EventTail(path).poll()]


def titles(state: RunState, run: RunDir) -> dict[str, str]:
    return {found.key: found.title for found in findings(state, run.spec(), run.prediction())}


def read(run: RunDir) -> Replay:
    found = Replay(run, lambda state: titles(state, run))
    found.read_on(1e9)
    assert found.complete
    return found


def expected(run: RunDir, t: float) -> RunState:
    return fold(RunState(run_id=run.run_id), [event for event in all_events(run) if event.t <= t])


def test_a_cursor_gives_every_event_in_order_and_can_be_entered_anywhere(run: RunDir) -> None:
    paths = run.event_logs()
    cursor, seen, places = Cursor(paths), [], []
    while taken := cursor.take(97):
        seen += taken
        places.append((len(seen), cursor.place))
    assert [t for t, _ in seen] == sorted(t for t, _ in stamped(run))
    assert len(seen) == len(stamped(run))
    for count, place in places[:: max(1, len(places) // 12)]:
        again, rest = Cursor(paths, place), []
        while taken := again.take(1000):
            rest += taken
        assert [t for t, _ in rest] == [t for t, _ in seen[count:]]


@hypothesis_settings(max_examples=25)
@given(shares=st.lists(st.floats(min_value=-0.1, max_value=1.1), min_size=1, max_size=4))
def test_any_way_to_a_time_gives_the_same_state(run: RunDir, shares: list[float]) -> None:
    found = SHARED.get(run.run_id) or SHARED.setdefault(run.run_id, read(run))
    assert found.begin is not None
    for share in shares:
        t = max(found.begin, found.begin + share * (found.end - found.begin))
        found.seek(t)
        assert found.state == expected(run, t)


SHARED: dict[str, Replay] = {}
"""Read once for all examples."""


def test_playing_on_is_the_same_as_going_there(run: RunDir) -> None:
    played, went = read(run), read(run)
    assert played.begin is not None
    for number in range(1, 40):
        t = played.begin + number / 40 * (played.end - played.begin)
        while not played.play_to(t, 50):
            pass
    went.seek(t)
    assert played.state == went.state
    assert len(played.state.hardware_history) == 300


def test_steps_are_found_by_number_and_by_time(run: RunDir) -> None:
    found = read(run)
    at = found.step_time(350)
    assert at is not None
    found.seek(at)
    assert found.state.steps_finished == 350
    assert found.step_time(700) is not None and found.step_time(701) is None
    after, before = found.step_after(at), found.step_before(at)
    assert after == found.step_time(351) and before == found.step_time(349)
    assert found.step_time(701) is None and found.step_after(found.end) is None


def test_snapshots_stay_few_and_small(run: RunDir) -> None:
    found = read(run)
    assert len(found._snapshots) <= 8
    assert all(not snapshot.state.hardware_history for snapshot in found._snapshots)


def test_a_finding_is_gone_to_by_the_event_that_brought_it(tmp_path: Path) -> None:
    spec = recorded_spec("cpu", ranks=2)
    run = RunDir.create(tmp_path, spec, recorded_prediction(spec), {})
    recorder = Recorder(run, spec, 1_795_978_000.0)
    recorder.start()
    for step in range(1, 40):
        recorder.step(step)
    recorder.time.advance(60)
    recorder.supervisor.write(HangSuspected(last_step=39, quiet_seconds=60.0, threshold_seconds=30.0))
    hung_at = recorder.time.now
    for step in range(40, 61):
        recorder.step(step)
    recorder.end("completed", 60)
    recorder.close()
    found = read(run)
    (mark,) = [mark for mark in found.marks if "hang" in mark.key]
    assert found.begin is not None
    t, seen = found.begin, []
    while (nxt := found.mark_after(t)) is not None:
        seen.append(nxt.key)
        t = nxt.t
        found.seek(t)
        assert nxt.key in titles(found.state, run)
    assert mark.key in seen
    exact = next(m for m in found.marks if m.key == mark.key)
    assert exact.t == hung_at
    back = found.mark_before(found.end + 1)
    assert back is not None and back.key == seen[-1]


def test_damage_and_torn_ends_are_survived(run: RunDir, tmp_path: Path) -> None:
    other = make_recorded_run(tmp_path, steps=10)
    with other.events_path(0).open("ab") as log:
        log.write(b'not json\n{"kind":"step_finished","t":')
    other.events_path(1).unlink()
    found = read(other)
    found.seek(found.end)
    assert found.state.status == "completed" and found.state.steps_finished == 10
