"""A run's state so far, and how far in its logs that goes: kept beside them so that a long run opens at once.

A bookmark is a cache of the fold and never a second truth. It counts only while its checksums are right, the
code that made it is the code that reads it, and the logs hold what was folded; else it is as if it were not
there. The supervisor writes one now and then and at the end, and a reader that had to fold a long record that
nobody supervises leaves one for the next.

The file is a line of JSON, the head, behind its checksum, and then the state as MessagePack. The head alone
answers for a run that has ended, without the modules of the fold.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import decode_json
from llmtop.profiler.record.hostclock import Stamps
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import Position, has_log, is_end, path_at
from llmtop.profiler.record.wholefile import write_atomic

if TYPE_CHECKING:
    from llmtop.profiler.fold.runstate import RunState
    from llmtop.profiler.record.recording import LogPlace

_CHECKED_BYTES = 256
"""Of a log before the offset of its mark: they hold times, so no other log has the same."""
_CHECKSUM_CHARACTERS = 8
_MOST = 1 << 62
_PACKAGE = Path(__file__).resolve().parents[1]
_CODE = ("fold", "record")
"""Folders of modules that say what a state is and how events make it."""


class Mark(Struct, frozen=True, kw_only=True):
    """How far one log was folded; as a `LogPlace`, with what lies before the offset."""

    at: Position
    taken: int = 0
    skipped_lines: int = 0
    latest: float = 0.0
    stamps: Stamps = Stamps()
    check: int


class Summary(Struct, frozen=True, kw_only=True):
    """What a list of runs shows of the state."""

    status: str
    step: int | None = None
    """At which it stands; None while it goes on and has not told from where."""
    last_loss: float | None = None
    started: float | None = None
    unsaved: bool = False
    """Whether the newest checkpoint that was asked for could not be written."""
    ended: bool = False
    """Whether the record says how the run ended."""


class Head(Struct, frozen=True, kw_only=True):
    code: str
    """Of the modules that made it."""
    until: float
    """All events up to this time are in the state, and none later."""
    logs: dict[str, Mark]
    """Path below the run's folder to mark."""
    body: int
    """Checksum of the state."""
    summary: Summary


class Bookmark(Struct, frozen=True, kw_only=True):
    state: RunState
    until: float
    places: dict[Path, LogPlace]


@cache
def code_digest(*folders: str) -> str | None:
    """Of every module in folders beside these, by default those that a state depends on; None where they are
    not there to be read."""
    checksum = size_bytes = 0
    try:
        for folder in folders or _CODE:
            for file in sorted((_PACKAGE / folder).rglob("*.py")):
                content = file.read_bytes()
                checksum = zlib.crc32(content, zlib.crc32(file.name.encode(), checksum))
                size_bytes += len(content)
    except OSError:
        return None
    return f"{checksum:08x}-{size_bytes}" if size_bytes else None


def ended_summary(run: RunDir) -> Summary | None:
    """Of a run whose bookmark says all that its logs do; None where they have to be read."""
    try:
        with run.bookmark_path.open("rb") as file:
            head = _head(run, file.readline())
    except OSError:
        return None
    if head is None:
        return None
    logs = _named_logs(run)
    whole = (
        head.summary.ended
        and head.logs.keys() == {name for name, path in logs.items() if has_log(path)}
        and all(not mark.taken and is_end(logs[name], mark.at) for name, mark in head.logs.items())
    )
    return head.summary if whole else None


def read_bookmark(run: RunDir) -> Bookmark | None:
    """The newest that counts."""
    from llmtop.profiler.fold.runstate import RunState
    from llmtop.profiler.record.recording import LogPlace

    try:
        with run.bookmark_path.open("rb") as file:
            head, body = _head(run, file.readline()), file.read()
    except OSError:
        return None
    if head is None or zlib.crc32(body) != head.body:
        return None
    try:
        state = msgspec.msgpack.decode(body, type=RunState)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    places = {
        run.path / name: LogPlace(mark.at, mark.taken, mark.skipped_lines, mark.latest, mark.stamps)
        for name, mark in head.logs.items()
    }
    return Bookmark(state=state, until=head.until, places=places)


def write_bookmark(run: RunDir, bookmark: Bookmark) -> bool:
    """Whether it could be kept: where it cannot, as on a full disk, the next reader takes longer."""
    code, state = code_digest(), bookmark.state
    if code is None:
        return False
    try:
        body = msgspec.msgpack.encode(state)
        marks = {
            _name(run, path): _mark(path, place) for path, place in bookmark.places.items() if has_log(path)
        }
        head = Head(
            code=code,
            until=bookmark.until,
            logs=marks,
            body=zlib.crc32(body),
            summary=summary_of(state),
        )
        line = msgspec.json.encode(head)
        content = b"%08x" % zlib.crc32(line) + line + b"\n" + body
        write_atomic(run.bookmark_path, content, lasting=False)
    except (OSError, OverflowError):
        # MessagePack has no whole numbers beyond 64 bits, and a rank's failure may name any.
        return False
    return True


def summary_of(state: RunState) -> Summary:
    return Summary(
        status=state.status,
        step=state.present_step,
        last_loss=state.present_loss,
        started=state.started,
        unsaved=state.unsaved is not None,
        ended=state.ended is not None,
    )


def _named_logs(run: RunDir) -> dict[str, Path]:
    return {_name(run, path): path for path in run.event_logs()}


def _name(run: RunDir, log: Path) -> str:
    """Of a host's log with the host: the lead's has the same name."""
    return log.relative_to(run.path).as_posix()


def _mark(path: Path, place: LogPlace) -> Mark:
    return Mark(
        at=place.at,
        taken=place.taken,
        skipped_lines=place.skipped_lines,
        latest=place.latest,
        stamps=place.stamps,
        check=_check(path, place.at),
    )


def _check(path: Path, at: Position) -> int:
    """Of what lies before a position in its file; raises OSError for one that cannot be read."""
    begin = max(0, at.offset - _CHECKED_BYTES)
    with path_at(path, at).open("rb") as file:
        file.seek(begin)
        return zlib.crc32(file.read(at.offset - begin))


def _head(run: RunDir, line: bytes) -> Head | None:
    """What the first line says, where it goes with this code and these logs; raises OSError without them."""
    checksum, text = line[:_CHECKSUM_CHARACTERS], line[_CHECKSUM_CHARACTERS:].rstrip(b"\n")
    if b"%08x" % zlib.crc32(text) != checksum:
        return None
    try:
        head = decode_json(text, Head)
    except msgspec.MsgspecError:
        return None
    return head if head.code == code_digest() and _go_with(run, head.logs) else None


def _can_be(mark: Mark) -> bool:
    """Whether there can be a file of such numbers: who makes up a bookmark knows its checksums too."""
    at = mark.at
    counts = (at.segment, at.offset, at.before_bytes, mark.taken, mark.skipped_lines)
    return all(0 <= count < _MOST for count in counts)


def _go_with(run: RunDir, marks: Mapping[str, Mark]) -> bool:
    """Whether each log still begins with what was folded of it."""
    return marks.keys() <= _named_logs(run).keys() and all(
        _can_be(mark)
        and path_at(run.path / name, mark.at).stat().st_size >= mark.at.offset
        and _check(run.path / name, mark.at) == mark.check
        for name, mark in marks.items()
    )
