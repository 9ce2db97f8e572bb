"""Tail a log that somebody else is writing, in whichever files it goes on."""

from __future__ import annotations

import time
from functools import cache
from pathlib import Path

import msgspec

from llmtop.profiler.record.events import EVENT_VERSION, AnyEvent, LogThinned
from llmtop.profiler.record.segments import START, Position, file_bytes, path_at, segment_path, segments_of

_READ_BYTES = 1 << 20
_LONGEST_LINE_BYTES = 64 << 20
"""What goes on for longer without an end is no event, and is not kept in memory to find that out."""
_STILL_SECONDS = 60.0
"""A thinned file without its last line may be one that is still coming from another machine, in parts; one
that has not grown for so long is damaged."""


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
        """Whether what it read is not what the log has now: the file in which it stood was thinned meanwhile,
        or cut, or one that was taken for damaged went on."""
        self._cut_short: tuple[Path, int] | None = None
        """A thinned file that was left without its last line, and its size."""
        self._unreadable = False
        self._at = at
        """Start of the first line that was not complete yet."""
        self._file = path_at(path, at)
        self._following = segment_path(path, at.segment + 1)
        """The file that will follow it."""
        self._seen_size = 0
        self._known_size = 0
        """Of the file, at the last look."""
        self._follows = False
        """Whether another file followed when this one had been read."""
        self._endless = False
        """Whether it stands in what has gone on for too long to be a line."""
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
        if self._cut_short is not None and file_bytes(self._cut_short[0]) > self._cut_short[1]:
            self.lost_place = True
        while True:
            before = self._at.read_bytes
            found, there = self._poll_file(left)
            events = events + found if events else found
            if left is not None:
                left -= self._at.read_bytes - before
            elif there and before < self._at.read_bytes and self._seen_size < self._known_size:
                continue
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
            if size < self._at.offset:
                self._stand_at_cut(size)
            if size <= self._seen_size:
                return [], True
            most = _LONGEST_LINE_BYTES if max_bytes is None else max_bytes
            end = min(size, self._at.offset + most)
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

    def _stand_at_cut(self, size: int) -> None:
        """Somebody has cut the file behind its writer, who goes on at its new end."""
        self.lost_place = True
        self.skipped_lines += 1
        self._at = msgspec.structs.replace(self._at, offset=size)
        self._seen_size = size

    def _go_on(self, found: list[AnyEvent]) -> bool:
        """Whether there is more to read: another file follows one that has been read to its end."""
        at = self._at
        if at.thinned:
            if not (found and isinstance(found[-1], LogThinned)) and not self._is_cut_short():
                return False
        elif self._seen_size < self._known_size or not self._following.exists():
            return False
        elif self._grown():
            # Written before the next file was begun, and after the look at this one.
            return True
        elif at.offset < self._known_size:
            # Torn by a power cut that the next file's beginning outlived: nobody writes here any more.
            self.skipped_lines += not self._endless
        self._stand(Position(at.segment + 1, before_bytes=at.read_bytes))
        return True

    def _is_cut_short(self) -> bool:
        """Whether a thinned file that was read to its end will not get the last line that it lacks."""
        if self._seen_size < self._known_size or not self._following.exists():
            return False
        try:
            status = self._file.stat()
        except OSError:
            return False
        # The clock may have been set back meanwhile.
        if status.st_size > self._known_size or abs(time.time() - status.st_mtime) < _STILL_SECONDS:
            return False
        self.skipped_lines += self._at.offset < self._known_size
        self._cut_short = (self._file, status.st_size)
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
        self._following = segment_path(self.path, at.segment + 1)
        self._seen_size = self._known_size = 0

    def _read_lines(self, end: int, size: int) -> bytes:
        """Whole lines from the offset up to about `end`; at least one line if the file has one."""
        chunks: list[bytes] = []
        with self._file.open("rb") as file:
            file.seek(self._at.offset)
            position, has_line = self._at.offset, False
            line_end = min(size, position + _LONGEST_LINE_BYTES)
            while position < end or (position < line_end and not has_line):
                chunk = file.read(min(_READ_BYTES, max(end - position, 1 << 16)))
                if not chunk:
                    break
                position += len(chunk)
                has_line = has_line or b"\n" in chunk
                chunks.append(chunk)
        content = b"".join(chunks)
        whole = content[: content.rfind(b"\n") + 1]
        if not whole and len(content) >= _LONGEST_LINE_BYTES:
            self.skipped_lines += not self._endless
            self._endless = True
            self._at = msgspec.structs.replace(self._at, offset=position)
            self._seen_size = position
            return b""
        self._endless = self._endless and not whole
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
