"""Keeps a log that grows for weeks below a bound: its newest part whole, of what is older one step in N.

Of a log that has more than `MOST_BYTES`, all but the newest `WHOLE_BYTES` is written anew into one file of at
most `THINNED_BYTES`, which takes the place of those that it was made from (`segments.py`). Steps and samples
that are left out are added up in the next one that stays: counts, sums, peaks and means stay what they were.
Events that tell of something that happened (a start, a checkpoint, a change, a failure) all stay.

A closed file has no writer any more: whoever supervises the run may do this beside the ranks that write.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from llmtop.profiler.record.changeevents import ChangeApplied
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import (
    AnyEvent,
    HardwareSampled,
    LogThinned,
    MemoryClassified,
    PeakClassified,
    StageBegan,
    StepFinished,
)
from llmtop.profiler.record.hostclock import NotedClocks
from llmtop.profiler.record.hostevents import ClockMeasured
from llmtop.profiler.record.leftout import with_sample, with_step
from llmtop.profiler.record.segments import (
    Position,
    Segments,
    log_bytes,
    path_at,
    segment_path,
    segments_of,
    superseded,
    thinned_path,
)
from llmtop.profiler.record.wholefile import sync_folder

WHOLE_BYTES = 32 << 20
"""Of a log's newest files, which are never thinned."""
THINNED_BYTES = 32 << 20
MOST_BYTES = WHOLE_BYTES + THINNED_BYTES
"""A log that is longer is thinned; until that is done it may have a file more."""
_FIRST_STEPS = 4
"""Of a process or a setting: they warm up, and figures leave them out."""
_CLASSIFIED_EVERY = 16
"""Of as many steps that stay, one may be classified."""
_PART_BYTES = 256 * 1024
_LAST_LINE_BYTES = 4096


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes; tests give their own."""

    whole: int = WHOLE_BYTES
    thinned: int = THINNED_BYTES


USUAL_BOUNDS = Bounds()
Rewrite = Callable[[Path, Segments, int, int, Path], int]
"""What writes all of a log before a segment anew, one in so many staying, into a file; the file's length."""


def thin(base: Path, bounds: Bounds = USUAL_BOUNDS, rewrite: Rewrite | None = None) -> int:
    """Thin a log that is longer than its bounds; bytes that this freed, 0 where there was nothing to do.

    `rewrite` is for a log of other events than a rank's or a supervisor's. Raises OSError where the thinned
    file cannot be written: the log is then as it was.
    """
    before = log_bytes(base)
    if before <= bounds.whole + bounds.thinned:
        return 0
    found = segments_of(base)
    until = _first_whole(base, found, bounds.whole)
    if until <= max(found.until, 0) or until not in found.numbers:
        return 0
    _write_thinned(base, found, until, bounds.thinned, rewrite or _write_once)
    for path in superseded(base):
        path.unlink(missing_ok=True)
    return before - log_bytes(base)


def _first_whole(base: Path, found: Segments, whole_bytes: int) -> int:
    """Number of the oldest segment that is not thinned."""
    kept = 0
    for number in reversed(found.numbers):
        kept += segment_path(base, number).stat().st_size
        if kept >= whole_bytes:
            return number
    return found.numbers[0] if found.numbers else 0


def _write_thinned(base: Path, found: Segments, until: int, most_bytes: int, rewrite: Rewrite) -> None:
    aside = base.with_name(f".{base.name}.{os.getpid()}.thinning")
    keeps_one_in, before_bytes = _keeps_one_in(base, found), math.inf
    try:
        while True:
            size = rewrite(base, found, until, keeps_one_in, aside)
            # Half of it, so that the next files find room and not each of them has all of this written again.
            if size <= most_bytes // 2 or size >= before_bytes:
                break
            # As long as there is something to leave out.
            keeps_one_in, before_bytes = 2 * keeps_one_in, size
        aside.replace(thinned_path(base, until))
        sync_folder(base.parent)
    finally:
        aside.unlink(missing_ok=True)


def _keeps_one_in(base: Path, found: Segments) -> int:
    """As the thinned file that there is has it: what it left out does not come back."""
    if not found.until:
        return 1
    with thinned_path(base, found.until).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LAST_LINE_BYTES))
        last = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    try:
        return msgspec.json.decode(last, type=LogThinned).keeps_one_in
    except msgspec.MsgspecError:
        return 1  # damaged, so that it is found anew how many stay


def _write_once(base: Path, found: Segments, until: int, keeps_one_in: int, aside: Path) -> int:
    thinner = Thinner(keeps_one_in)
    encode = msgspec.json.Encoder().encode
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
        last: AnyEvent | None = None
        for event in _events(base, found, until):
            last = event
            for kept in thinner.feed(event):
                file.write(encode(kept) + b"\n")
        for kept in thinner.finish():
            file.write(encode(kept) + b"\n")
        stamps = (last.t, last.m, last.src) if last is not None else (0.0, 0.0, "")
        end = LogThinned(
            v=EVENT_VERSION,
            t=stamps[0],
            m=stamps[1],
            src=stamps[2],
            until=until,
            keeps_one_in=thinner.keeps_one_in,
            left_out=thinner.left_out,
        )
        file.write(encode(end) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _events(base: Path, found: Segments, until: int) -> Iterator[AnyEvent]:
    """Of all files before a segment, in order. Raises OSError where one of them cannot be read to its end."""
    start = Position(found.until - 1, thinned=True) if found.until else Position(found.numbers[0])
    tail = EventTail(base, start)
    while tail.position.thinned or tail.position.segment < until:
        at = tail.position
        # A part ends with its file, so that nothing of the first whole segment is among it.
        yield from tail.poll(_PART_BYTES, one_file=True)
        if tail.position == at:
            # Whatever is not in the thinned file is gone for good.
            raise OSError(errno.EIO, "it cannot be read to its end", str(path_at(base, at)))


class Thinner:
    """Leaves out steps and samples of one log; what it keeps of them depends only on the events."""

    def __init__(self, keeps_one_in: int) -> None:
        self.keeps_one_in = keeps_one_in
        self.left_out = 0
        self._step: StepFinished | None = None
        """The newest that was left out so far: it stays where another event comes before the next one."""
        self._sample: HardwareSampled | None = None
        self._sampled = False
        self._first_steps = _FIRST_STEPS
        self._classified: dict[tuple[str, str], MemoryClassified | PeakClassified] = {}
        """The newest of each kind and moment that is not written yet; of peaks the largest."""
        self._classified_at: dict[tuple[str, str], int] = {}
        self._clocks: dict[str, int] = {}
        """Of each host how often its clock was measured."""
        self._noted = NotedClocks()
        """What their logs are corrected by."""

    def feed(self, event: AnyEvent) -> Iterable[AnyEvent]:
        """What is written, now that this event has come."""
        if isinstance(event, StepFinished):
            return self._feed_step(event)
        if isinstance(event, HardwareSampled):
            return self._feed_sample(event)
        if isinstance(event, MemoryClassified | PeakClassified):
            return self._feed_classified(event)
        if isinstance(event, ClockMeasured):
            return self._feed_clock(event)
        if isinstance(event, LogThinned):
            # Of the file before; its count goes on in this one's.
            self.left_out += event.left_out
            return ()
        if isinstance(event, StageBegan | ChangeApplied):
            self._first_steps = _FIRST_STEPS
        return (*self.finish(), event)

    def finish(self) -> list[AnyEvent]:
        """What was held back and must not be lost: the newest of each kind."""
        held: list[AnyEvent | None] = [*self._classified.values(), self._step, self._sample]
        self._classified, self._step, self._sample = {}, None, None
        found = [event for event in held if event is not None]
        return sorted(found, key=lambda event: event.t)

    def _feed_step(self, event: StepFinished) -> Iterable[AnyEvent]:
        before, self._step = self._step, None
        if before is not None:
            self.left_out += 1
            event = replace(event, left_out=with_step(event.left_out, before))
        if self._first_steps > 0 or event.profiled or event.step % self.keeps_one_in == 0:
            self._first_steps -= 1
            return (event,)
        self._step = event
        return ()

    def _feed_sample(self, event: HardwareSampled) -> Iterable[AnyEvent]:
        before, self._sample = self._sample, None
        if before is not None:
            self.left_out += 1
            event = replace(event, left_out=with_sample(event.left_out, before))
        passed = 1 + (event.left_out.samples if event.left_out is not None else 0)
        # The first one is what energy and error counters are counted from.
        if passed >= self.keeps_one_in or not self._sampled:
            self._sampled = True
            return (event,)
        self._sample = event
        return ()

    def _feed_clock(self, event: ClockMeasured) -> Iterable[AnyEvent]:
        """What comes after says how it is now; what logs are corrected by stays."""
        before = self._clocks.get(event.host, 0)
        self._clocks[event.host] = before + 1
        # It is noted whether or not it is kept for its number.
        if self._noted.note(event) or before % self.keeps_one_in == 0:
            return (*self.finish(), event)
        self.left_out += 1
        return ()

    def _feed_classified(self, event: MemoryClassified | PeakClassified) -> Iterable[AnyEvent]:
        if isinstance(event, MemoryClassified):
            key = ("memory", event.moment)
        else:
            key = ("peak", event.phase)
            held = self._classified.get(key)
            if isinstance(held, PeakClassified) and held.total_bytes > event.total_bytes:
                event = held
        self._classified[key] = event
        due = self._classified_at.get(key, -1) + _CLASSIFIED_EVERY * self.keeps_one_in
        if self.keeps_one_in > 1 and key in self._classified_at and event.step < due:
            return ()
        self._classified_at[key] = event.step
        return (self._classified.pop(key),)
