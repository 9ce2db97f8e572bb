"""The files of one log: a log that has grown goes on in another file, and its oldest ones are thinned.

    rank-0.jsonl             the first segment
    rank-0.1.jsonl, ...      those after it, in order; only the newest is written to
    rank-0.until-5.jsonl     in the place of all before number 5: fewer steps and samples (`thinning.py`)

Each is append-only and never changed; a segment ends at the end of a line. Everybody names a log by its first
file, and only this module and whoever reads or writes a log know of the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

SEGMENT_BYTES = 8 << 20
"""A segment that is as long as this gets a successor before the next line is written."""
_NAME = re.compile(r"(?P<stem>.+?)(?:\.(?P<until>until-)?(?P<number>[1-9]\d*))?\.jsonl")


class Position(Struct, frozen=True):
    """Where a reader of a log stands: at the start of a line of one of its files."""

    segment: int = 0
    """Its number; of a thinned file that of the last segment which it stands for."""
    offset: int = 0
    thinned: bool = False
    before_bytes: int = 0
    """In the files that were read before this one."""

    @property
    def read_bytes(self) -> int:
        return self.before_bytes + self.offset


START = Position()


class Segments(Struct, frozen=True):
    """What there is of one log."""

    until: int = 0
    """A thinned file stands for all segments before this number; 0: there is none."""
    numbers: tuple[int, ...] = ()
    """Of the segments that it does not stand for, in order."""

    @property
    def newest(self) -> int:
        """Number of the segment that is written to."""
        return self.numbers[-1] if self.numbers else self.until

    def paths(self, base: Path) -> tuple[Path, ...]:
        """In the order of reading."""
        plain = tuple(segment_path(base, number) for number in self.numbers)
        return (thinned_path(base, self.until), *plain) if self.until else plain


def segment_path(base: Path, number: int) -> Path:
    return base if number == 0 else base.with_name(f"{base.stem}.{number}{base.suffix}")


def thinned_path(base: Path, until: int) -> Path:
    return base.with_name(f"{base.stem}.until-{until}{base.suffix}")


def path_at(base: Path, at: Position) -> Path:
    return thinned_path(base, at.segment + 1) if at.thinned else segment_path(base, at.segment)


def base_name(name: str) -> str | None:
    """Of the log that a file belongs to; None for a name that is no log's."""
    match = _NAME.fullmatch(name)
    return None if match is None else f"{match['stem']}.jsonl"


def segments_of(base: Path) -> Segments:
    """The files of one log; none for a log that nobody has written yet."""
    plain: set[int] = set()
    until = 0
    for number, thinned in _numbers(base):
        if thinned:
            until = max(until, number)
        else:
            plain.add(number)
    if 0 in plain:
        # Thinned files take the place of segments from the first one on: while that is there, all are.
        until = 0
    return Segments(until, tuple(sorted(number for number in plain if number >= until)))


def superseded(base: Path) -> tuple[Path, ...]:
    """Files that a newer thinned one stands for, the first segment first."""
    found = sorted(_numbers(base), key=lambda one: (one[1], one[0]))
    until = max((number for number, thinned in found if thinned), default=0)
    return tuple(
        thinned_path(base, number) if thinned else segment_path(base, number)
        for number, thinned in found
        if number < until
    )


def log_bytes(base: Path) -> int:
    """Of all its files together."""
    return sum(file_bytes(path) for path in segments_of(base).paths(base))


def is_end(base: Path, at: Position) -> bool:
    """Whether a log ends there; raises OSError where that file is not there."""
    return (
        not at.thinned
        and path_at(base, at).stat().st_size == at.offset
        and not segment_path(base, at.segment + 1).exists()
    )


def written_at(base: Path) -> float | None:
    """Wall clock at which a log was last added to; None where there is none."""
    try:
        return segment_path(base, segments_of(base).newest).stat().st_mtime
    except OSError:
        return None


def has_log(base: Path) -> bool:
    return base.exists() or bool(segments_of(base).paths(base))


def _numbers(base: Path) -> Iterator[tuple[int, bool]]:
    """Of each file of a log, and whether it is a thinned one."""
    pattern = re.compile(re.escape(base.stem) + r"(?:\.(until-)?([1-9]\d*))?" + re.escape(base.suffix))
    try:
        names = [path.name for path in base.parent.iterdir()]
    except OSError:
        return
    for name in names:
        match = pattern.fullmatch(name)
        if match is not None:
            yield int(match[2] or 0), match[1] is not None


def file_bytes(path: Path) -> int:
    """Of one file; 0 where it is not there."""
    try:
        return path.stat().st_size
    except OSError:
        return 0  # it went while we looked
