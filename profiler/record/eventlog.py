"""Append events to a log as whole lines, and tail a log that somebody else is writing."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import msgspec

from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.events import EVENT_VERSION, AnyEvent, LogThinned
from llmtop.profiler.record.segments import (
    SEGMENT_BYTES,
    START,
    Position,
    path_at,
    segment_path,
    segments_of,
)
from llmtop.profiler.units import counted

logger = logging.getLogger(__name__)

HELD_SECONDS = 1.0
"""How long an event that may wait is held at most: several are written for little more than one costs."""
_READ_BYTES = 1 << 20


class Clock(msgspec.Struct, frozen=True, kw_only=True):
    """Where stamps come from; tests give their own."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


FLUSHER = "llmtop-events"
"""Name of the thread that writes what was held."""
_E = TypeVar("_E", bound=Event)
Make = Callable[[], Event]
_Held = tuple[float, float, Make]
"""Wall clock and monotonic clock of the moment, and what makes the event."""


class EventWriter:
    """The only writer of one log. Lines reach the file in one write, so readers never see two mixed.

    A file that has become long gets a successor (`segments.py`); `path` is that of the first.
    """

    def __init__(
        self, path: Path, src: str, *, clock: Clock | None = None, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        self.path = path
        self._src = src
        self._segment_bytes = segment_bytes
        self._clock = clock or Clock()
        self._encode = msgspec.json.Encoder().encode
        self._segment = segments_of(path).newest
        self._descriptor = _opened(segment_path(path, self._segment))
        self._torn = ends_torn(self._descriptor)
        self._lock = threading.RLock()
        self._held: deque[_Held] = deque()
        self._flusher: threading.Thread | None = None

    def write(self, event: Event) -> None:
        """Stamp and append one event. Raises OSError when the disk is full or the file cannot be written."""
        self.append(self.stamp(event))

    def stamp(self, event: _E) -> _E:
        """The event as of now and of this source."""
        return self._stamped(event, self._clock.wall(), self._clock.monotonic())

    def append(self, stamped: Event) -> None:
        """Append an event that has its stamp; raises OSError as `write` does."""
        with self._lock:
            self.flush()
            self._append([self._encode(stamped)])

    def hold(self, make: Make) -> None:
        """Append what `make` gives, stamped as of now, within `HELD_SECONDS` or before the next `write`.

        A thread makes and writes it, so whoever trains does not wait for it. It is lost only with a process
        that is killed before.
        """
        clock = self._clock
        self._held.append((clock.wall(), clock.monotonic(), make))
        if self._flusher is None:
            myself = weakref.ref(self)
            self._flusher = threading.Thread(
                target=_flush_for_ever, args=(myself,), name=FLUSHER, daemon=True
            )
            self._flusher.start()
            os.register_at_fork(after_in_child=lambda: _forget_in_child(myself))

    def flush(self) -> None:
        """Write what is held. Never raises: says what is lost."""
        with self._lock:
            lines = [line for line in map(self._made, self._taken()) if line]
            try:
                self._append(lines)
            except OSError:
                # A full disk must not end a training: later events are tried again.
                logger.exception("%s could not be written to %s", counted(len(lines), "event"), self.path)

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def close(self) -> None:
        """What is held is written first."""
        with self._lock:
            if not self.closed:
                self.flush()
                os.close(self._descriptor)
                self._descriptor = -1

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _taken(self) -> Iterator[_Held]:
        while self._held:
            yield self._held.popleft()

    def _made(self, held: _Held) -> bytes:
        """Empty where it cannot be made."""
        wall, monotonic, make = held
        try:
            return self._encode(self._stamped(make(), wall, monotonic))
        except Exception:
            # The event after it may be the one that tells why.
            logger.exception("an event could not be made for %s", self.path)
            return b""

    def _stamped(self, event: _E, wall: float, monotonic: float) -> _E:
        return msgspec.structs.replace(event, v=EVENT_VERSION, t=wall, m=monotonic, src=self._src)

    def _append(self, lines: Sequence[bytes]) -> None:
        if lines:
            self._turn_over()
            torn, self._torn = self._torn, True
            write_line(self._descriptor, b"\n".join(lines), after_torn=torn)
            self._torn = False

    def _turn_over(self) -> None:
        """Go on in the next file where this one is long enough, or another process has begun that one.

        Raises OSError where a torn line cannot be ended.
        """
        while True:
            following = segment_path(self.path, self._segment + 1)
            if os.fstat(self._descriptor).st_size < self._segment_bytes and not following.exists():
                return
            if self._torn:
                # Whoever reads goes on to the next file at the end of a line.
                os.write(self._descriptor, b"\n")
            try:
                descriptor = _opened(following)
            except OSError:
                # A full disk has no room for a name either: this file takes what there is room for.
                return
            os.close(self._descriptor)
            self._descriptor, self._segment = descriptor, self._segment + 1
            self._torn = ends_torn(descriptor)


def _opened(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _forget_in_child(writer: weakref.ref[EventWriter]) -> None:
    """What is held is the parent's to write, and so is the lock that its thread may have had."""
    inherited = writer()
    if inherited is not None:
        inherited._lock, inherited._flusher = threading.RLock(), None
        inherited._held.clear()


def _flush_for_ever(writer: weakref.ref[EventWriter]) -> None:
    while (alive := writer()) is not None and not alive.closed:
        alive.flush()
        del alive
        time.sleep(HELD_SECONDS)


def ends_torn(descriptor: int) -> bool:
    """Whether the last line of a file has no end, as a writer that was killed inside it leaves it."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def write_line(descriptor: int, line: bytes, *, after_torn: bool) -> None:
    """A whole line; a torn one before it must not swallow it. Raises OSError when the disk is full."""
    rest = (b"\n" if after_torn else b"") + line + b"\n"
    while rest:
        rest = rest[os.write(descriptor, rest) :]


@cache
def _decoder() -> msgspec.json.Decoder[AnyEvent]:
    """One for all logs: it takes a millisecond to make."""
    return msgspec.json.Decoder(AnyEvent)


class EventTail:
    """Reads what was appended to one log since the last poll, in whichever files. None need exist yet.

    A log that cannot be read (no permission, a folder in its place) gives nothing for as long as that
    lasts: one damaged log must not hide the others.
    """

    def __init__(self, path: Path, at: Position = START) -> None:
        """`path` is that of the log's first file."""
        self.path = path
        self.skipped_lines = 0
        """Lines that are damaged, of an unknown kind, or of a newer version; one for an unreadable log."""
        self.lost_place = False
        """Whether the file in which it stood was thinned meanwhile: the events there were left out."""
        self._unreadable = False
        self._at = at
        """Start of the first line that was not complete yet."""
        self._file = path_at(path, at)
        self._seen_size = 0
        self._known_size = 0
        """Of the file, at the last look."""
        self._follows = False
        """Whether another file followed when this one had been read."""
        self._looked_ns = 0
        """When the folder had last changed as a missing log was looked for."""
        self._decoder = _decoder()

    @property
    def position(self) -> Position:
        """Where the next poll begins to read: the start of a line."""
        return self._at

    @property
    def offset(self) -> int:
        """The same as bytes of all that was read, also of files before this one."""
        return self._at.read_bytes

    @property
    def behind(self) -> bool:
        """Whether the log had more than the last poll was asked to read."""
        return self._known_size > self._seen_size or self._follows

    def poll(self, max_bytes: int | None = None, *, one_file: bool = False) -> list[AnyEvent]:
        """The next events in the order of writing: all that are there, or about `max_bytes` of them.

        `one_file`: none of another file than the one in which it stands.
        """
        events: list[AnyEvent] = []
        left = max_bytes
        while True:
            before = self._at.read_bytes
            found, there = self._poll_file(left)
            events = events + found if events else found
            if left is not None:
                left -= self._at.read_bytes - before
            self._follows = False
            if not (self._go_on(found) if there else self._find_file()):
                return events
            if one_file or left is not None and left <= 0:
                self._follows = True
                return events

    def _poll_file(self, max_bytes: int | None) -> tuple[list[AnyEvent], bool]:
        """What is new in this file, and whether it is there."""
        try:
            size = self._known_size = self._file.stat().st_size
            if size <= self._seen_size:
                return [], True
            end = size if max_bytes is None else min(size, self._at.offset + max_bytes)
            lines = self._read_lines(end, size)
        except FileNotFoundError:
            return [], False
        except OSError:
            # Counted once, however often it is tried again.
            self.skipped_lines += not self._unreadable
            self._unreadable = True
            return [], True
        self._unreadable = False
        return self._decode(lines), True

    def _go_on(self, found: list[AnyEvent]) -> bool:
        """Whether there is more to read: another file follows one that has been read to its end."""
        at = self._at
        if at.thinned:
            if not (found and isinstance(found[-1], LogThinned)):
                return False
        elif self._seen_size < self._known_size or not segment_path(self.path, at.segment + 1).exists():
            return False
        elif self._grown():
            # Written before the next file was begun, and after the look at this one.
            return True
        elif at.offset < self._known_size:
            # Torn by a power cut that the next file's beginning outlived: nobody writes here any more.
            self.skipped_lines += 1
        self._stand(Position(at.segment + 1, before_bytes=at.read_bytes))
        return True

    def _grown(self) -> bool:
        try:
            return self._file.stat().st_size > self._known_size
        except OSError:
            return False

    def _find_file(self) -> bool:
        """Look for the log where its file is not there; whether there is another one to read."""
        at = self._at
        fresh = at == START
        try:
            changed_ns = self.path.parent.stat().st_mtime_ns
        except OSError:
            return False
        if fresh and changed_ns == self._looked_ns:
            return False
        self._looked_ns = changed_ns
        found = segments_of(self.path)
        if not found.paths(self.path) or (found.newest <= at.segment and not fresh):
            return False
        if fresh and found.until:
            self._stand(Position(found.until - 1, thinned=True))
            return True
        following = [number for number in found.numbers if fresh or number > at.segment]
        if not following:
            return False
        self.lost_place = not fresh
        self._stand(Position(following[0], before_bytes=at.read_bytes))
        return True

    def _stand(self, at: Position) -> None:
        """At the beginning of another file."""
        self._at, self._file = at, path_at(self.path, at)
        self._seen_size = self._known_size = 0

    def _read_lines(self, end: int, size: int) -> bytes:
        """Whole lines from the offset up to about `end`; at least one line if the file has one."""
        chunks: list[bytes] = []
        with self._file.open("rb") as file:
            file.seek(self._at.offset)
            position, has_line = self._at.offset, False
            while position < end or (position < size and not has_line):
                chunk = file.read(min(_READ_BYTES, max(end - position, 1 << 16)))
                if not chunk:
                    break
                position += len(chunk)
                has_line = has_line or b"\n" in chunk
                chunks.append(chunk)
        content = b"".join(chunks)
        whole = content[: content.rfind(b"\n") + 1]
        self._at = msgspec.structs.replace(self._at, offset=self._at.offset + len(whole))
        # While a torn line has not grown there is nothing to read again.
        self._seen_size = position if position >= size else self._at.offset
        return whole

    def _decode(self, lines: bytes) -> list[AnyEvent]:
        if not lines:
            return []
        try:
            events: list[AnyEvent] = self._decoder.decode_lines(lines)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            # Some line is not ours to understand: find out which, keep the others.
            events = self._decode_one_by_one(lines)
        known = [event for event in events if event.v <= EVENT_VERSION]
        self.skipped_lines += len(events) - len(known)
        return known

    def _decode_one_by_one(self, lines: bytes) -> list[AnyEvent]:
        events: list[AnyEvent] = []
        for line in lines.split(b"\n"):
            if not line.strip():
                continue
            try:
                events.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                self.skipped_lines += 1
        return events
