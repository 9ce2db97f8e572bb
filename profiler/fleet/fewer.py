"""Thins the log of a host's summaries as others are thinned: its newest part whole, fewer of what is older.

A summary says all that is known at its time, so nothing has to be added up: of those of so many times ten
seconds the first stays, and every one that says something happened.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from llmtop.profiler.fleet.summary import HostSummarised
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.events import LogThinned
from llmtop.profiler.record.segments import Segments, segment_path, thinned_path
from llmtop.profiler.record.thinning import Bounds, thin

SEGMENT_BYTES = 1 << 20
"""A log of summaries goes on in another file at this length: there may be thousands of hosts."""
BOUNDS = Bounds(whole=2 << 20, thinned=2 << 20)
"""Of one host's summaries: some five hours are whole."""
_SLOT_SECONDS = 10.0
"""Between two summaries of a long run."""


def thin_summaries(base: Path, bounds: Bounds = BOUNDS) -> int:
    """Bytes that this freed. Raises OSError where it cannot be done: the log is then as it was."""
    return thin(base, bounds, _write_fewer)


def _write_fewer(base: Path, found: Segments, until: int, keeps_one_in: int, aside: Path) -> int:
    """All before a segment anew into one file; its length."""
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    left_out, slot, last = 0, -1, None
    with os.fdopen(descriptor, "wb", buffering=1 << 20) as file:
        for line, told in _lines(base, found, until):
            if isinstance(told, LogThinned):
                left_out += told.left_out
                continue
            now = int(told.t / (_SLOT_SECONDS * keeps_one_in)) if keeps_one_in > 1 else slot + 1
            if now != slot or last is None or _happened(last, told):
                slot = now
                file.write(line)
            else:
                left_out += 1
            last = told
        end = LogThinned(
            v=EVENT_VERSION,
            t=last.t if last is not None else 0.0,
            m=last.m if last is not None else 0.0,
            src=last.src if last is not None else "",
            until=until,
            keeps_one_in=keeps_one_in,
            left_out=left_out,
        )
        file.write(msgspec.json.encode(end) + b"\n")
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _lines(base: Path, found: Segments, until: int) -> Iterator[tuple[bytes, HostSummarised | LogThinned]]:
    """In their order, damaged ones passed over. Raises OSError where a file cannot be read."""
    either = msgspec.json.Decoder(HostSummarised | LogThinned)
    whole = [segment_path(base, number) for number in found.numbers if number < until]
    for path in [thinned_path(base, found.until), *whole] if found.until else whole:
        with path.open("rb") as file:
            for line in file:
                try:
                    yield line, either.decode(line)
                except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                    continue


def _happened(before: HostSummarised, after: HostSummarised) -> bool:
    """Whether a host says more than new figures."""
    return any(
        getattr(before, name) != getattr(after, name)
        for name in ("status", "setting", "alive", "failed", "links_down", "devices_lost", "xids")
    )
