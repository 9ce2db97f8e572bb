"""Logs are appended in whole lines and tailed without ever showing half of one or losing one."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmtop.profiler.record import eventlog, eventtail
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.eventlog import EventTail, EventWriter
from llmtop.profiler.record.events import (
    AnyEvent,
    Compiling,
    HangSuspected,
    MemoryClassified,
    OutsideMeasured,
    PeakClassified,
    RankExited,
    StepFinished,
)
from llmtop.profiler.record.feed import RunReader
from tests.recorded import BEGAN, ManualClock, make_recorded_run

EXAMPLES: tuple[AnyEvent, ...] = (
    StepFinished(step=1, loss=2.5, tokens=64, step_seconds=0.5, phase_seconds={"data": None}),
    MemoryClassified(step=1, moment="end_of_forward", components={"parameters": 5}, total_bytes=9),
    PeakClassified(
        step=2,
        phase="backward",
        moment="loss_backward",
        components={"logits": 5},
        total_bytes=9,
        unnamed_bytes=4,
        largest_unnamed=(3, 1),
    ),
    OutsideMeasured(moment="context", device_used_bytes=7, reserved_bytes=2),
    RankExited(rank=1, pid=7, signal="SIGKILL"),
    CheckpointSaved(step=3, path="/ü\n", size_bytes=1, seconds=0.5),
    Compiling(what="cpu_adam"),
    HangSuspected(last_step=1, quiet_seconds=1.0, threshold_seconds=0.5),
)


def unstamped(events: list[AnyEvent]) -> list[AnyEvent]:
    return [msgspec.structs.replace(event, v=0, t=0.0, m=0.0, src="") for event in events]


def test_every_line_carries_version_times_source_and_kind(tmp_path: Path) -> None:
    now = ManualClock()
    with EventWriter(tmp_path / "log", "rank3", clock=now.clock()) as writer:
        writer.write(Compiling(what="cpu_adam"))
        now.advance(2.5)
        writer.write(StepFinished(step=1))
    first, second = (msgspec.json.decode(line) for line in (tmp_path / "log").read_bytes().splitlines())
    assert first == {"kind": "compiling", "v": 1, "t": BEGAN, "m": 1000.0, "src": "rank3", "what": "cpu_adam"}
    assert (second["t"], second["m"]) == (BEGAN + 2.5, 1002.5)


def test_no_annotation_of_an_event_is_left_to_be_evaluated() -> None:
    """It would be at each start of a program that reads a record, and slowly."""
    left = [
        f"{kind.__name__}.{name}"
        for kind in get_args(AnyEvent)
        for name, annotation in kind.__annotations__.items()
        if isinstance(annotation, str)
    ]
    assert left == []


def test_what_is_written_is_read_back_once(tmp_path: Path) -> None:
    tail = EventTail(tmp_path / "log")
    assert tail.poll() == []
    with EventWriter(tmp_path / "log", "rank0") as writer:
        for event in EXAMPLES:
            writer.write(event)
        assert unstamped(tail.poll()) == list(EXAMPLES)
        assert tail.poll() == []
        writer.write(EXAMPLES[0])
        assert unstamped(tail.poll()) == [EXAMPLES[0]]
    assert tail.skipped_lines == 0


def steps(path: Path) -> list[tuple[int, float]]:
    return [(event.step, event.m) for event in EventTail(path).poll() if isinstance(event, StepFinished)]


def step_maker(step: int) -> Callable[[], AnyEvent]:
    return lambda: StepFinished(step=step)


@pytest.fixture
def no_flusher(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if its time had not come yet."""
    monkeypatch.setattr(eventlog, "_flush_for_ever", lambda _: None)


@pytest.mark.usefixtures("no_flusher")
def test_what_is_held_is_stamped_at_once_and_written_before_what_follows(tmp_path: Path) -> None:
    path, now = tmp_path / "log", ManualClock()
    with EventWriter(path, "rank0", clock=now.clock()) as writer:
        for step in (1, 2):
            writer.hold(step_maker(step))
            now.advance(2.0)
        assert path.read_bytes() == b""
        writer.write(Compiling(what="cpu_adam"))
        assert steps(path) == [(1, 1000.0), (2, 1002.0)]
        assert [event.m for event in EventTail(path).poll()] == [1000.0, 1002.0, 1004.0]
        writer.hold(step_maker(3))
    assert [step for step, _ in steps(path)] == [1, 2, 3], "closing writes the rest"


@pytest.mark.usefixtures("no_flusher")
def test_an_event_that_cannot_be_made_holds_back_no_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> AnyEvent:
        raise RuntimeError("the device is gone")

    with EventWriter(tmp_path / "log", "rank0") as writer:
        for make in (step_maker(1), broken, step_maker(3)):
            writer.hold(make)
        writer.write(Compiling(what="cpu_adam"))
    assert [step for step, _ in steps(tmp_path / "log")] == [1, 3]
    assert "the device is gone" in caplog.text


@pytest.mark.usefixtures("no_flusher")
def test_a_full_disk_loses_what_was_held_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with EventWriter(tmp_path / "log", "rank0") as writer:
        for step in (1, 2):
            writer.hold(step_maker(step))
        monkeypatch.setattr(os, "write", full)
        writer.flush()
        monkeypatch.undo()
        writer.hold(step_maker(3))
    assert "2 events could not be written" in caplog.text
    assert [step for step, _ in steps(tmp_path / "log")] == [3]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("no_flusher")
def test_a_forked_process_does_not_write_what_its_parent_holds(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "log", "rank0") as writer:
        writer.hold(step_maker(1))
        locked, forked = threading.Event(), threading.Event()

        def keep_locked() -> None:
            with writer._lock:
                locked.set()
                forked.wait()

        other = threading.Thread(target=keep_locked)
        other.start()
        locked.wait()
        child = os.fork()
        if child == 0:
            writer.close()
            os._exit(0)
        forked.set()
        other.join()
        assert os.waitpid(child, 0)[1] == 0
        assert steps(tmp_path / "log") == []
    assert [step for step, _ in steps(tmp_path / "log")] == [1]


def test_a_process_that_stands_still_has_its_last_steps_on_the_disk(tmp_path: Path) -> None:
    """It is killed when they are there, without a chance to write anything more."""
    path = tmp_path / "log"
    standing = (
        "import sys, time\n"
        "from llmtop.profiler.record.eventlog import EventWriter\n"
        "from llmtop.profiler.record.events import StepFinished\n"
        "from pathlib import Path\n"
        "writer = EventWriter(Path(sys.argv[1]), 'rank0')\n"
        "for step in (1, 2, 3):\n"
        "    writer.hold(lambda step=step: StepFinished(step=step))\n"
        "    time.sleep(0.01)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", standing, str(path)]) as process:
        deadline = time.monotonic() + 60
        while len(steps(path)) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
        process.kill()
    assert [step for step, _ in steps(path)] == [1, 2, 3]


def test_not_a_number_is_written_as_unknown(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "log", "rank0") as writer:
        writer.write(StepFinished(step=1, loss=float("nan"), grad_norm=float("inf")))
    (event,) = EventTail(tmp_path / "log").poll()
    assert isinstance(event, StepFinished)
    assert event.loss is None and event.grad_norm is None


def test_a_torn_last_line_waits(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventWriter(path, "rank0") as writer:
        writer.write(EXAMPLES[0])
    whole = path.read_bytes()
    tail = EventTail(path)
    path.write_bytes(whole + whole[:20])
    assert len(tail.poll()) == 1
    assert tail.poll() == []
    with path.open("ab") as file:
        file.write(whole[20:])
    assert len(tail.poll()) == 1
    assert tail.skipped_lines == 0


def test_a_writer_after_a_torn_line_starts_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b'{"kind": "compi')
    with EventWriter(path, "rank0") as writer:
        writer.write(EXAMPLES[0])
    tail = EventTail(path)
    assert unstamped(tail.poll()) == [EXAMPLES[0]]
    assert tail.skipped_lines == 1


def test_a_full_disk_is_reported_and_later_lines_are_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    real_write = os.write
    with EventWriter(path, "rank0") as writer:
        written: list[int] = []

        def full_after_ten_bytes(descriptor: int, content: bytes) -> int:
            if written:
                raise OSError(28, "No space left on device")
            written.append(real_write(descriptor, content[:10]))
            return written[0]

        monkeypatch.setattr(os, "write", full_after_ten_bytes)
        with pytest.raises(OSError, match="No space"):
            writer.write(Compiling(what="x" * 7))
        monkeypatch.undo()
        writer.write(EXAMPLES[0])
    tail = EventTail(path)
    assert unstamped(tail.poll()) == [EXAMPLES[0]]
    assert tail.skipped_lines == 1


@pytest.mark.parametrize(
    "line",
    [
        b'{"v":1,"kind":"invented_tomorrow","t":1.0}',
        b'{"v":2,"kind":"compiling","what":"x"}',
        b'{"v":2,"kind":"compiling","renamed":"x"}',
        b'{"v":1,"kind":"compiling"}',
        b'{"v":1,"kind":"compiling","what":5}',
        b'{"v":1,"kind":"compiling","what":"\xff"}',
        b'{"v":1,"kind":"step_finished","step":"one"}',
        # What views would go through one by one, or compare each with all.
        b'{"v":1,"kind":"run_started","run_id":"r","name":"n","pid":1,"host":"h","llmtop_version":"1",'
        b'"world_size":9007199254740992}',
        b'{"v":1,"kind":"restage_failed","setting":1,"back_to":0,"reason":"r","world_size":0}',
        b'{"v":1,"kind":"topology_seen","topology":{"devices":[' + b",".join([b'{"index":0}'] * 257) + b"]}}",
        b"not json",
        b"[1, 2]",
        b"\x00\x01\x02",
        b'{"v":1,"kind":"rank_failed","error_type":"E","message":"m","details":{"a":' + b"[" * 5000,
    ],
)
def test_a_line_that_is_not_understood_is_skipped_and_counted(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "log"
    with EventWriter(path, "rank0") as writer:
        writer.write(EXAMPLES[0])
        with path.open("ab") as file:
            file.write(line + b"\n")
        writer.write(EXAMPLES[1])
    tail = EventTail(path)
    assert unstamped(tail.poll()) == [EXAMPLES[0], EXAMPLES[1]]
    assert tail.skipped_lines == 1


def test_unknown_fields_of_a_known_kind_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b'{"v":1,"kind":"compiling","what":"x","added_later":[1]}\n')
    assert unstamped(EventTail(tmp_path / "log").poll()) == [Compiling(what="x")]


lines = st.lists(
    st.one_of(
        st.sampled_from([msgspec.json.encode(event) for event in EXAMPLES]),
        st.binary(max_size=40).map(lambda raw: raw.replace(b"\n", b"")),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(lines, st.lists(st.integers(min_value=0, max_value=2000), max_size=6), st.integers(1, 300))
def test_any_growth_of_a_file_gives_the_same_events(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], cuts: list[int], max_bytes: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    raw = b"".join(line + b"\n" for line in content)
    path.write_bytes(raw)
    at_once = EventTail(path)
    expected = at_once.poll()
    path.unlink()

    tail, events, position = EventTail(path), list[AnyEvent](), 0
    for cut in [*sorted(min(cut, len(raw)) for cut in cuts), len(raw)]:
        with path.open("ab") as file:
            file.write(raw[position:cut])
        position = cut
        events += tail.poll(max_bytes)
    while more := tail.poll(max_bytes):
        events += more
    # A limited poll may meet only lines that it skips, and so give nothing before the end.
    events += tail.poll()
    assert events == expected
    assert tail.skipped_lines == at_once.skipped_lines


def test_a_log_that_cannot_be_read_is_counted_once_and_read_when_it_can(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.mkdir()
    (path / "something").touch()
    tail = EventTail(path)
    assert (tail.poll(), tail.poll(), tail.skipped_lines) == ([], [], 1)
    (path / "something").unlink()
    path.rmdir()
    with EventWriter(path, "rank0") as writer:
        writer.write(EXAMPLES[0])
    assert unstamped(tail.poll()) == [EXAMPLES[0]]
    assert tail.skipped_lines == 1


@pytest.mark.parametrize("error", [PermissionError(13, "Permission denied"), OSError(5, "I/O error")])
def test_an_error_while_reading_takes_nothing_down(
    error: OSError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "log"
    with EventWriter(path, "rank0") as writer:
        writer.write(EXAMPLES[0])
    tail = EventTail(path)

    def fails(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", fails)
        assert tail.poll() == []
    assert tail.skipped_lines == 1
    assert unstamped(tail.poll()) == [EXAMPLES[0]]


def test_a_log_that_is_cut_behind_its_writer_is_read_on(tmp_path: Path) -> None:
    run = make_recorded_run(tmp_path, steps=6, end=None)
    path = run.events_path(0)
    reader, tail = RunReader(run), EventTail(path)
    assert reader.poll().ranks[0].steps_seen == 6
    before = len(tail.poll())
    with EventWriter(path, "rank0") as log:
        os.truncate(path, 0)
        log.write(StepFinished(step=7, step_seconds=1.0))
        log.write(StepFinished(step=8, step_seconds=1.0))
        assert path.stat().st_size < tail.offset
        # What was read is gone from the record, and so from what is shown of it.
        assert reader.poll().ranks[0].steps_seen == 2
        # A bare reader, as a supervisor's, hears of what is written from then on.
        assert tail.poll() == [] and tail.lost_place and tail.skipped_lines == 1
        log.write(StepFinished(step=9, step_seconds=1.0))
        assert [event.step for event in tail.poll() if isinstance(event, StepFinished)] == [9]
    assert before > 6


@pytest.mark.parametrize("at_a_time", [None, 2000])
def test_what_has_no_end_is_passed_and_not_kept_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_a_time: int | None
) -> None:
    monkeypatch.setattr(eventtail, "_LONGEST_LINE_BYTES", 1 << 20)
    path = tmp_path / "rank-0.jsonl"
    with EventWriter(path, "rank0") as log:
        log.write(StepFinished(step=1))
        os.truncate(path, 40 << 20)  # a hole, as a file system may leave it
        log.write(StepFinished(step=2))
        log.write(StepFinished(step=3))
    tail = EventTail(path)
    tracemalloc.start()
    events = tail.poll(at_a_time)
    while tail.behind:
        events += tail.poll(at_a_time)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [event.step for event in events if isinstance(event, StepFinished)] == [1, 2, 3]
    assert tail.skipped_lines == 1 and tail.poll() == []
    assert peak_bytes < 8 << 20
