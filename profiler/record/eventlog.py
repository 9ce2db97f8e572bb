"""Append events to a log as whole lines; `eventtail.py` reads one that somebody else is writing."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec

from llmtop.profiler.record.eventbase import Event
from llmtop.profiler.record.events import EVENT_VERSION
from llmtop.profiler.record.eventtail import EventTail as EventTail
from llmtop.profiler.record.segments import SEGMENT_BYTES, segment_path, segments_of
from llmtop.profiler.units import counted

logger = logging.getLogger(__name__)

HELD_SECONDS = 1.0
"""How long an event that may wait is held at most: several are written for little more than one costs."""


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

    def forget_held(self) -> None:
        """In a forked copy: what is held is its parent's to write."""
        self._held.clear()

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

    def __enter__(self) -> Self:
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
        inherited.forget_held()


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
