"""A bookmark is never a second truth: with it or without, a run is the fold of all its events."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record import bookmark, feed, recording
from llmtop.profiler.record.bookmark import ended_summary, read_bookmark, write_bookmark
from llmtop.profiler.record.bookmarking import (
    BEHIND_SECONDS,
    FOLD_EVERY_SECONDS,
    WRITE_EVERY_SECONDS,
    Bookmarker,
)
from llmtop.profiler.record.changeevents import ChangeApplied, RestageBegan
from llmtop.profiler.record.deviceevents import DeviceSample, HostSample, ProcessSample
from llmtop.profiler.record.events import (
    AnyEvent,
    ControlAnswered,
    HangSuspected,
    HardwareSampled,
    MemoryClassified,
    PhaseMemory,
    RankExited,
    RankFailed,
    RankStarted,
    RunEnded,
    RunStarted,
    StageBegan,
    StageFinished,
    StepFinished,
)
from llmtop.profiler.record.feed import RunReader, RunStream, read_state
from llmtop.profiler.record.rundir import RunDir
from tests.recorded import BEGAN, ManualClock, make_recorded_run
from tests.recorded_spec import recorded_prediction, recorded_spec

RANKS = 3
Line = tuple[str | int, AnyEvent]


def random_events(seed: int, count: int) -> list[Line]:
    """A run's lines in the order of writing; some at one time, and now and then a clock is set back."""
    dice, t = random.Random(seed), BEGAN
    steps = [0] * RANKS
    lines: list[Line] = [("supervisor", _started())]
    for _ in range(count):
        t += dice.choice((0.0, 0.0, 0.25, 0.5, 3.0)) - (40.0 if dice.random() < 0.01 else 0.0)
        rank = dice.randrange(RANKS)
        src: str | int = rank
        kind = dice.random()
        if kind < 0.6:
            steps[rank] += 1
            event: AnyEvent = _step(dice, steps[rank])
        elif kind < 0.75:
            src, event = "hardware", _sample(dice)
        elif kind < 0.85:
            src, event = "supervisor", _of_supervisor(dice, rank)
        else:
            event = _of_rank(dice, steps[rank])
        lines.append((src, msgspec.structs.replace(event, v=1, t=t, src=_name(src))))
    return lines


def _name(src: str | int) -> str:
    return src if isinstance(src, str) else f"rank{src}"


def _started() -> RunStarted:
    return RunStarted(
        v=1,
        t=BEGAN,
        src="supervisor",
        run_id="it",
        name="it",
        pid=1,
        host="here",
        world_size=RANKS,
        llmtop_version="0",
    )


def _step(dice: random.Random, step: int) -> StepFinished:
    memory = {
        phase: PhaseMemory(
            allocated_bytes=dice.randrange(1 << 40), peak_bytes=dice.choice((None, 5, 1 << 41))
        )
        for phase in dice.sample(("data", "forward", "backward", "optimizer"), 2)
    }
    return StepFinished(
        step=step,
        loss=dice.choice((None, dice.random())),
        tokens=dice.randrange(9),
        step_seconds=dice.random(),
        phase_seconds={"forward": dice.random(), "data": dice.choice((None, 0.1))},
        phase_memory=memory,
        profiled=dice.random() < 0.1,
        skipped=dice.random() < 0.1,
        in_use_only=dice.random() < 0.2,
        loss_scale=dice.choice((None, 2.0)),
    )


def _sample(dice: random.Random) -> HardwareSampled:
    return HardwareSampled(
        devices=(
            DeviceSample(
                index=dice.randrange(2),
                memory_used_bytes=dice.randrange(1 << 36),
                energy_joules=dice.choice((None, 10 * dice.random())),
                throttle_reasons=dice.choice((None, (), ("power",))),
                ecc_uncorrected=dice.choice((None, 0)),
                is_lost=dice.random() < 0.05,
            ),
        ),
        host=HostSample(memory_total_bytes=100, memory_available_bytes=dice.randrange(100)),
        processes=(ProcessSample(rank=dice.randrange(RANKS), rss_bytes=dice.randrange(1 << 30)),),
    )


def _of_supervisor(dice: random.Random, rank: int) -> AnyEvent:
    makers: tuple[Callable[[], AnyEvent], ...] = (
        lambda: RankStarted(rank=rank, pid=dice.randrange(9), setting=dice.randrange(2)),
        lambda: RankExited(rank=rank, pid=dice.randrange(9), exit_code=dice.choice((0, 1, None))),
        lambda: HangSuspected(last_step=1, quiet_seconds=2.0, threshold_seconds=1.0),
        lambda: ControlAnswered(request_id="r", action="stop", answer="accepted"),
        lambda: RestageBegan(setting=1, from_setting=0, last_step=3, world_size=dice.randrange(1, RANKS + 1)),
        lambda: RunEnded(state="failed", reason="it was so"),
        _started,
    )
    return dice.choice(makers)()


def _of_rank(dice: random.Random, step: int) -> AnyEvent:
    makers: tuple[Callable[[], AnyEvent], ...] = (
        lambda: StageBegan(stage=dice.choice(("import", "model"))),
        lambda: StageFinished(stage="model", seconds=1.0),
        lambda: MemoryClassified(
            step=step, moment="step", components={"parameters": dice.randrange(1 << 50)}
        ),
        lambda: ChangeApplied(setting=dice.randrange(3), step=step),
        lambda: RankFailed(error_type="E", message="m", details={"a": [1, {"b": dice.random()}], "n": None}),
    )
    return dice.choice(makers)()


def write(run: RunDir, lines: list[Line]) -> None:
    for src, event in lines:
        with run.events_path(src).open("ab") as log:
            log.write(msgspec.json.encode(event) + b"\n")
            if isinstance(event, StageBegan):
                log.write(b"not a line of ours\n")


def empty_run(root: Path) -> RunDir:
    run = RunDir.create(root, recorded_spec(), recorded_prediction(recorded_spec()), {})
    run.write_supervisor_pid()
    return run


def folded_anew(run: RunDir) -> RunState:
    """Without any bookmark."""
    run.bookmark_path.unlink(missing_ok=True)
    return read_state(run)


@pytest.fixture
def small_parts() -> Iterator[None]:
    """So that places lie within parts, and times on their borders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PART_BYTES", 600)
        yield


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30), cut=st.floats(0.0, 1.0), part_bytes=st.integers(200, 5000))
def test_a_bookmark_and_the_tail_are_the_fold_of_all(
    tmp_path_factory: pytest.TempPathFactory, seed: int, cut: float, part_bytes: int
) -> None:
    """Whatever the events are, wherever it is cut, and however much of each log was there at that time."""
    run = empty_run(tmp_path_factory.mktemp("runs"))
    lines = random_events(seed, 120)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recording, "PART_BYTES", part_bytes)
        at = round(cut * len(lines))
        write(run, lines[:at])
        keep_a_bookmark(run)
        write(run, lines[at:])
        with_bookmark = read_state(run)
    assert with_bookmark == folded_anew(run)


def keep_a_bookmark(run: RunDir) -> None:
    stream = RunStream(run)
    state = fold(RunState(run_id=run.run_id), stream.poll())
    assert write_bookmark(run, stream.bookmark(state))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), late=st.floats(0.0, 20.0))
def test_a_supervisors_bookmark_never_changes_what_a_run_is(
    tmp_path_factory: pytest.TempPathFactory, seed: int, late: float
) -> None:
    """Also where a rank writes a line long after the moment that it is of."""
    run, clock = empty_run(tmp_path_factory.mktemp("runs")), ManualClock(BEGAN)
    keeper = Bookmarker(run, wall=lambda: clock.now, monotonic=lambda: clock.now)
    lines, held = random_events(seed, 100), list[Line]()
    for src, event in lines:
        clock.now = max(clock.now, event.t)
        held.append((src, event))
        ready = [line for line in held if line[0] != 1 or line[1].t + late <= clock.now]
        held = [line for line in held if line not in ready]
        write(run, ready)
        keeper.turn()
        if run.bookmark_path.exists() and clock.now % 1.0 < 0.3:
            assert read_state(run) == without_bookmark(run)
    write(run, held)
    keeper.finish()
    found = read_state(run)
    assert found == folded_anew(run)


def without_bookmark(run: RunDir) -> RunState:
    """What the logs say now; the bookmark stays."""
    kept = run.bookmark_path.read_bytes()
    state = folded_anew(run)
    run.bookmark_path.write_bytes(kept)
    return state


def test_a_bookmark_is_written_now_and_then_and_at_the_end(tmp_path: Path, small_parts: None) -> None:
    run, clock = empty_run(tmp_path), ManualClock(BEGAN)
    keeper = Bookmarker(run, wall=lambda: clock.now, monotonic=lambda: clock.now)
    dice, step = random.Random(1), 0
    write(run, [("supervisor", _started())])
    while clock.now < BEGAN + WRITE_EVERY_SECONDS + 10.0:
        clock.advance(1.0)
        step += 1
        write(run, [(0, msgspec.structs.replace(_step(dice, step), v=1, t=clock.now, src="rank0"))])
        keeper.turn()
    found = read_bookmark(run)
    assert found is not None and ended_summary(run) is None
    written = BEGAN + WRITE_EVERY_SECONDS
    assert written - BEHIND_SECONDS - FOLD_EVERY_SECONDS <= found.until <= written
    assert 0 < found.state.steps_finished < step
    end = RunEnded(v=1, t=clock.now, src="supervisor", state="completed", reason="done")
    write(run, [("supervisor", end)])
    keeper.finish()
    summary = ended_summary(run)
    assert summary is not None
    assert (summary.status, summary.step, summary.started) == ("completed", step, BEGAN)


def test_a_bookmark_is_taken_instead_of_the_log(tmp_path: Path) -> None:
    """Else nothing here would tell that it is of use: its state is another one than that of the logs."""
    run = make_recorded_run(tmp_path)
    stream = RunStream(run)
    state = fold(RunState(run_id=run.run_id), stream.poll())
    other = msgspec.structs.replace(state, steps_finished=4711)
    assert write_bookmark(run, stream.bookmark(other))
    assert read_state(run).steps_finished == 4711
    assert read_state(run).steps_finished != folded_anew(run).steps_finished


def test_a_reader_keeps_one_of_a_long_record_that_nobody_adds_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WORTH_KEEPING_BYTES", 1000)
    going_on = make_recorded_run(tmp_path / "on", end=None)
    read_state(going_on)
    assert not going_on.bookmark_path.exists(), "its supervisor does that"
    run = make_recorded_run(tmp_path / "over")
    reader = RunReader(run)
    reader.poll(50)
    assert reader.behind and not run.bookmark_path.exists(), "not before all of it has been read"
    state = reader.poll()
    kept = run.bookmark_path.stat().st_mtime_ns
    assert read_state(run) == state
    assert run.bookmark_path.stat().st_mtime_ns == kept
    monkeypatch.setattr(feed, "WORTH_KEEPING_BYTES", 1 << 40)
    run.bookmark_path.unlink()
    read_state(run)
    assert not run.bookmark_path.exists(), "a short record is read as fast as a bookmark"


def _flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@settings(max_examples=40, deadline=None)
@given(at=st.floats(0.0, 1.0, exclude_max=True), cut=st.booleans())
def test_a_damaged_bookmark_is_as_if_it_were_not_there(
    tmp_path_factory: pytest.TempPathFactory, at: float, cut: bool
) -> None:
    run = _kept_run(tmp_path_factory)
    whole, content = SHARED[run.run_id]
    where = int(at * len(content))
    run.bookmark_path.write_bytes(content[:where] if cut else _flip(content, where))
    assert read_bookmark(run) is None
    assert read_state(run) == whole


SHARED: dict[str, tuple[RunState, bytes]] = {}
"""Run to its state and its whole bookmark, made once for all examples."""
_KEPT: list[RunDir] = []


def _kept_run(factory: pytest.TempPathFactory) -> RunDir:
    if not _KEPT:
        run = make_recorded_run(factory.mktemp("kept"), steps=12)
        whole = read_state(run)
        keep_a_bookmark(run)
        SHARED[run.run_id] = (whole, run.bookmark_path.read_bytes())
        _KEPT.append(run)
    return _KEPT[0]


def _append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


@pytest.mark.parametrize(
    ("spoil", "counts"),
    [
        (lambda run: _append(run.events_path(0), b"\n"), True),
        (lambda run: run.events_path(1).write_bytes(run.events_path(1).read_bytes()[:-40]), False),
        (lambda run: run.events_path(1).unlink(), False),
        (lambda run: run.events_path(1).write_bytes(run.events_path(0).read_bytes()), False),
        (lambda run: run.events_path(2).write_bytes(b""), True),
    ],
    ids=["a line more", "a log cut", "a log gone", "another log", "a log more"],
)
def test_a_bookmark_goes_with_its_logs(tmp_path: Path, spoil: Callable[[RunDir], Any], counts: bool) -> None:
    run = make_recorded_run(tmp_path)
    keep_a_bookmark(run)
    assert ended_summary(run) is not None
    spoil(run)
    assert (read_bookmark(run) is not None) == counts
    assert ended_summary(run) is None
    assert read_state(run) == folded_anew(run)


def test_a_copied_run_keeps_its_bookmark(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path)
    keep_a_bookmark(run)
    moved = run.path.rename(tmp_path / "elsewhere")
    assert read_bookmark(RunDir.open(moved)) is not None


def test_other_code_makes_another_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_recorded_run(tmp_path)
    keep_a_bookmark(run)
    package = tmp_path / "package"
    for folder in ("fold", "record"):
        (package / folder).mkdir(parents=True)
        (package / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(bookmark, "_PACKAGE", package)
    bookmark.code_digest.cache_clear()
    try:
        first = bookmark.code_digest()
        assert first is not None and read_bookmark(run) is None
        bookmark.code_digest.cache_clear()
        (package / "fold" / "a.py").write_text("x = 2\n")
        assert bookmark.code_digest() not in (first, None)
    finally:
        bookmark.code_digest.cache_clear()


def test_a_folder_that_cannot_be_written_costs_only_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bookmark, "write_atomic", full)
    run = make_recorded_run(tmp_path)
    stream = RunStream(run)
    state = fold(RunState(run_id=run.run_id), stream.poll())
    assert not write_bookmark(run, stream.bookmark(state))
    assert read_state(run) == state


def test_numbers_that_no_bookmark_can_hold(tmp_path: Path) -> None:
    run = empty_run(tmp_path)
    huge = RankFailed(v=1, t=BEGAN, src="rank0", error_type="E", message="m", details={"n": 1 << 70})
    write(run, [(0, huge)])
    stream = RunStream(run)
    state = fold(RunState(run_id=run.run_id), stream.poll())
    assert not write_bookmark(run, stream.bookmark(state))
