"""Logs are appended in whole lines and tailed without ever showing half of one or losing one."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from tests.recorded import BEGAN, ManualClock

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
    time = ManualClock()
    with EventWriter(tmp_path / "log", "rank3", clock=time.clock()) as writer:
        writer.write(Compiling(what="cpu_adam"))
        time.advance(2.5)
        writer.write(StepFinished(step=1))
    first, second = (msgspec.json.decode(line) for line in (tmp_path / "log").read_bytes().splitlines())
    assert first == {"kind": "compiling", "v": 1, "t": BEGAN, "m": 1000.0, "src": "rank3", "what": "cpu_adam"}
    assert (second["t"], second["m"]) == (BEGAN + 2.5, 1002.5)


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
