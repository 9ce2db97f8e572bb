"""Logs of several files: writers begin them, readers follow, and thinning the oldest changes no sum."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from benchmarks.ui_runs import BEGAN, sample_event
from llmtop.profiler.fold.folding import fold
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.checkpointevents import CheckpointSaved
from llmtop.profiler.record.deviceevents import ProcessSample
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.eventlog import EventTail, EventWriter
from llmtop.profiler.record.events import (
    AnyEvent,
    LogThinned,
    MemoryClassified,
    RankStarted,
    StageBegan,
    StepFinished,
)
from llmtop.profiler.record.hostevents import ClockMeasured, HostLost
from llmtop.profiler.record.segments import (
    has_log,
    log_bytes,
    segment_path,
    segments_of,
    thinned_path,
)
from llmtop.profiler.record.thinning import Bounds, Thinner, thin
from tests.profiler.longlogs import SEGMENT, steps, write

BOUNDS = Bounds(whole=3 * SEGMENT, thinned=3 * SEGMENT)


def test_a_long_log_goes_on_in_other_files_and_is_read_as_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail, live = EventTail(path), []
    events = steps(1, 60)
    for event in events:
        write(path, [event])
        live += tail.poll()
    found = segments_of(path)
    assert found.until == 0 and found.numbers == tuple(range(len(found.numbers))) and len(found.numbers) > 5
    assert all(file.read_bytes().endswith(b"\n") for file in found.paths(path))
    assert live == EventTail(path).poll() == events
    assert log_bytes(path) == sum(file.stat().st_size for file in tmp_path.iterdir())


@given(st.lists(st.integers(1, 6), min_size=1, max_size=30), st.integers(200, 9000))
def test_however_it_is_cut_and_polled_every_event_comes_once(sizes: list[int], most_bytes: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "rank-0.jsonl"
        tail, seen, step = EventTail(path), [], 1
        for size in sizes:
            write(path, [*steps(step, size)])
            step += size
            seen += tail.poll(most_bytes)
        while more := tail.poll(most_bytes):
            seen += more
        assert [event.step for event in seen if isinstance(event, StepFinished)] == list(range(1, step))
        assert not tail.behind and tail.skipped_lines == 0


def test_a_torn_line_in_a_file_that_has_a_successor_is_counted_and_passed(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, [*steps(1, 30)])
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    tail = EventTail(path)
    read = [event.step for event in tail.poll() if isinstance(event, StepFinished)]
    assert tail.skipped_lines == 1 and read[-1] == 30 and len(read) == 29


def test_a_writer_that_comes_back_goes_on_in_the_newest_file(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    with EventWriter(path, "rank0", segment_bytes=SEGMENT) as first:
        for event in steps(1, 10):
            first.append(event)
        write(path, [*steps(11, 20)])
        # One that was left standing, as a rank that stood by, sees that the log went on without it.
        first.append(steps(31, 1)[0])
    read = [event.step for event in EventTail(path).poll() if isinstance(event, StepFinished)]
    assert read == list(range(1, 32))


def test_no_room_for_another_file_keeps_the_log_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rank-0.jsonl"
    with EventWriter(path, "rank0", segment_bytes=SEGMENT) as writer:
        opened = os.open

        def full(name: object, *rest: int, **more: int) -> int:
            if str(name).endswith(".1.jsonl"):
                raise OSError(28, "No space left on device")
            return opened(name, *rest, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "open", full)
        for event in steps(1, 20):
            writer.append(event)
        assert segments_of(path).numbers == (0,)
        monkeypatch.undo()
        writer.append(steps(21, 1)[0])
    assert segments_of(path).numbers == (0, 1)
    assert len(EventTail(path).poll()) == 21


# --- thinning ------------------------------------------------------------------------------------------


def long_log(count: int) -> list[AnyEvent]:
    """Of a rank: a start, steps of which some are skipped or not finite, classifications, checkpoints."""
    chance = random.Random(5)
    events: list[AnyEvent] = [StageBegan(t=BEGAN, stage="import")]
    for step in steps(1, count):
        number = step.step
        odd = chance.random()
        loss = None if odd < 0.02 else step.loss
        phases = step.phase_seconds if number <= 20 or number % 5 == 0 else {}
        step = replace(step, phase_seconds=phases)
        events.append(replace(step, loss=loss, skipped=0.02 < odd < 0.04, in_use_only=number % 3 == 0))
        if number % 20 == 0:
            events.append(
                MemoryClassified(t=step.t, step=number, moment="init", components={"parameters": number})
            )
        if number == count // 2:
            events.append(CheckpointSaved(t=step.t, step=number, path="x", size_bytes=1, seconds=1.0))
        if number == count // 3:
            events.append(ChangeApplied(t=step.t, setting=1, step=number + 1))
    return [replace(event, v=EVENT_VERSION, src="rank0") for event in events]


def samples(count: int) -> list[AnyEvent]:
    chance = random.Random(6)
    found: list[AnyEvent] = []
    for number in range(count):
        sample = sample_event(BEGAN + number, number, 2)
        hot = chance.random() < 0.1
        first = replace(
            sample.devices[0],
            memory_used_bytes=chance.randrange(1 << 30),
            throttle_reasons=("sw_thermal",) if hot else (),
            is_lost=number == 17,
        )
        compiling = chance.randrange(1 << 20) if number < 90 else 0
        process = ProcessSample(
            rank=0,
            rss_bytes=compiling + chance.randrange(1 << 30),
            pss_bytes=compiling + chance.randrange(1 << 20),
            compiler_rss_bytes=compiling,
            compiler_pss_bytes=compiling,
        )
        found.append(replace(sample, devices=(first, sample.devices[1]), processes=(process,)))
    return found


def through(thinner: Thinner, events: list[AnyEvent]) -> list[AnyEvent]:
    return [kept for event in events for kept in thinner.feed(event)] + thinner.finish()


@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_thinned_steps_fold_to_the_same_sums(rounds: int) -> None:
    events = long_log(900)
    started: list[AnyEvent] = [RankStarted(t=BEGAN, src="supervisor", rank=0, pid=1)]
    kept = events
    for number in range(1, rounds + 1):
        kept = through(Thinner(4**number), kept)
    assert len(kept) < len(events) // 3
    full, thinned = fold(RunState(), started + events), fold(RunState(), started + kept)
    for name in (
        "steps_finished",
        "skipped_steps",
        "nonfinite_losses",
        "first_nonfinite_step",
        "checkpoints",
    ):
        assert getattr(thinned, name) == getattr(full, name), name
    assert thinned.last_loss == full.last_loss and thinned.first_loss == full.first_loss
    assert thinned.energy.tokens == full.energy.tokens
    one, other = full.ranks[0], thinned.ranks[0]
    assert other.last_step is not None and one.last_step is not None
    assert other.last_step.step == one.last_step.step
    assert (other.steps_seen, other.peaks, other.peaks_in_use) == (
        one.steps_seen,
        one.peaks,
        one.peaks_in_use,
    )
    assert other.setting_peaks == one.setting_peaks and other.classified == one.classified
    assert {phase: total.steps for phase, total in other.phase_totals.items()} == {
        phase: total.steps for phase, total in one.phase_totals.items()
    }
    assert (other.told_steps, other.untold_steps) == (one.told_steps, one.untold_steps)
    for phase, total in one.phase_totals.items():
        assert other.phase_totals[phase].seconds == pytest.approx(total.seconds)
    assert (other.alone.steps, other.alone.stride) == (one.alone.steps, one.alone.stride)
    assert sum(other.alone.sums) == pytest.approx(sum(one.alone.sums))


@pytest.mark.parametrize("rounds", [1, 3])
def test_thinned_samples_fold_to_the_same_counts_and_peaks(rounds: int) -> None:
    events = samples(700)
    kept = events
    for number in range(1, rounds + 1):
        kept = through(Thinner(3**number), kept)
    assert len(kept) <= len(events) // 3**rounds + 3
    full, thinned = fold(RunState(), events), fold(RunState(), kept)
    for name in (
        *("hardware_samples", "throttled_samples", "lost_devices", "peak_device_bytes", "peak_rss_bytes"),
        *(
            "peak_pss_bytes",
            "peak_compiler_bytes",
            "peak_host_bytes",
            "peak_swap_bytes",
            "first_ecc_uncorrected",
        ),
    ):
        assert getattr(thinned, name) == getattr(full, name), name
    assert thinned.hardware is not None and full.hardware is not None
    assert thinned.hardware.t == full.hardware.t
    assert thinned.energy.joules == pytest.approx(full.energy.joules)
    assert (thinned.memory_trail.samples, thinned.memory_trail.stride) == (
        full.memory_trail.samples,
        full.memory_trail.stride,
    )
    largest = max(value or 0 for value in full.memory_trail.of_device(0))
    assert max(value or 0 for value in thinned.memory_trail.of_device(0)) == largest


def test_a_log_stays_below_its_bound_and_its_newest_part_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    largest, events = 0, long_log(2000)
    for first in range(0, len(events), 20):
        write(path, events[first : first + 20])
        thin(path, BOUNDS)
        largest = max(largest, log_bytes(path))
    assert largest <= BOUNDS.whole + BOUNDS.thinned + 20 * 1200
    found = segments_of(path)
    assert found.until and found.until == found.numbers[0]
    assert {file.name for file in tmp_path.iterdir()} == {file.name for file in found.paths(path)}
    read = EventTail(path).poll()
    (end,) = [event for event in read if isinstance(event, LogThinned)]
    assert end.until == found.until and end.keeps_one_in > 1
    whole = [event for event in read[read.index(end) :] if isinstance(event, StepFinished)]
    assert [event.step for event in whole] == list(range(whole[0].step, 2001))
    assert all(event.left_out is None for event in whole)
    told = [event for event in read if isinstance(event, StepFinished)]
    assert sum(1 + (event.left_out.steps if event.left_out else 0) for event in told) == 2000
    assert end.left_out == 2000 - len(told)


def test_a_cut_between_the_thinned_file_and_the_end_of_the_old_ones_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, long_log(200))
    kept = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert thin(path, BOUNDS) > 0
    after = EventTail(path).poll()
    for name, content in kept.items():
        (tmp_path / name).write_bytes(content)
    assert len(EventTail(path).poll()) > len(after), "the first file is there: all of them are"
    path.unlink()
    assert EventTail(path).poll() == after
    write(path, [*steps(500, 40)])
    thin(path, BOUNDS)
    assert not (tmp_path / "rank-0.1.jsonl").exists()


def test_a_full_disk_leaves_the_log_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, long_log(200))
    before = {file.name for file in tmp_path.iterdir()}

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        thin(path, BOUNDS)
    assert {file.name for file in tmp_path.iterdir()} == before


def test_a_file_that_cannot_be_read_is_not_thinned_away_with_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, long_log(200))
    segment_path(path, 1).unlink()
    segment_path(path, 1).mkdir()
    before = {file.name for file in tmp_path.iterdir()}
    with pytest.raises(OSError, match="cannot be read to its end"):
        thin(path, BOUNDS)
    assert {file.name for file in tmp_path.iterdir()} == before


def damaged_end(content: bytes) -> list[bytes]:
    """A thinned file whose last line is torn, is gone, or is none."""
    whole = content.rindex(b"\n", 0, len(content) - 1) + 1
    return [content[:-7], content[:whole], content[:whole] + b"\0" * 300 + b"\n", b""]


@pytest.mark.parametrize("kind", range(4))
def test_a_thinned_file_with_a_damaged_end_keeps_nobody(tmp_path: Path, kind: int) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, long_log(200))
    thin(path, BOUNDS)
    found = segments_of(path)
    sound = [event.step for event in EventTail(path).poll() if isinstance(event, StepFinished)]
    thinned = thinned_path(path, found.until)
    whole = thinned.read_bytes()
    thinned.write_bytes(damaged_end(whole)[kind])
    tail = EventTail(path)
    early = tail.poll(), tail.poll()
    assert len(early[0]) < len(sound) and not early[1], "it may be a copy that is still coming"
    an_hour_ago = time.time() - 3600
    os.utime(thinned, (an_hour_ago, an_hour_ago))
    read = [event.step for event in [*early[0], *tail.poll()] if isinstance(event, StepFinished)]
    assert read == (sound if kind < 3 else sound[-len(read) :]) and read[-1] == 200
    assert tail.skipped_lines == (kind in (0, 2)) and not tail.lost_place
    assert [event.step for event in EventTail(path).poll() if isinstance(event, StepFinished)] == read
    # What seemed damaged was a copy after all, and the rest of it comes: whoever reads begins anew.
    thinned.write_bytes(whole + b"\n" * 300)
    tail.poll()
    assert tail.lost_place


def test_a_log_whose_thinned_file_is_damaged_is_thinned_on(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    write(path, long_log(200))
    thin(path, BOUNDS)
    damaged = thinned_path(path, segments_of(path).until)
    damaged.write_bytes(damaged.read_bytes()[:-7])
    write(path, [*steps(500, 40)])
    with pytest.raises(OSError, match="cannot be read to its end"):
        thin(path, BOUNDS)
    os.utime(damaged, (0, 0))
    assert thin(path, BOUNDS) > 0 and not damaged.exists()
    assert isinstance(EventTail(path).poll()[-1], StepFinished)


def test_names(tmp_path: Path) -> None:
    base = tmp_path / "rank-12.jsonl"
    assert segment_path(base, 3).name == "rank-12.3.jsonl"
    assert thinned_path(base, 3).name == "rank-12.until-3.jsonl"
    for other in ("rank-1.jsonl", "rank-12.jsonl.bak", ".rank-12.jsonl.1.thinning", "rank-12.x.jsonl"):
        (tmp_path / other).touch()
    assert segments_of(base).paths(base) == () and not has_log(base)


def test_of_the_clocks_of_a_host_one_in_so_many_stays_in_its_place() -> None:
    """A launching machine of a thousand hosts measures them for weeks."""
    events: list[AnyEvent] = [
        ClockMeasured(t=float(n), host=f"h{n % 3}", offset_seconds=n / 1000, error_seconds=0.001)
        for n in range(90)
    ]
    lost = HostLost(t=45.5, host="h1", quiet_seconds=10.0)
    thinner = Thinner(8)
    kept = [one for event in (*events[:46], lost, *events[46:]) for one in thinner.feed(event)]
    assert lost in kept and [one.t for one in kept] == sorted(one.t for one in kept)
    clocks = [one for one in kept if isinstance(one, ClockMeasured)]
    assert [one.host for one in clocks].count("h2") == 4 and thinner.left_out == 90 - len(clocks)
