"""Signs of life in a folder: a small document that its writer replaces again and again.

Whoever gives one lives, also where the disk is full: there the old one is given a new time, which takes
no room. Only changes count for who looks: clocks may differ.

Where a folder is all that two machines share, signs measure how much: a host repeats in its own the newest
that it has seen of the lead, so what it says of its time was written after the one and before the other.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from llmtop.presets.foreign import decode_json
from llmtop.profiler.record.hosts import lead_beat_path
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.wholefile import random_hex, write_atomic
from llmtop.trainer.hosts.link import Clock, RoundTrips

BEAT_SECONDS = 5.0
_SIGNS_KNOWN = 64
"""A host repeats a newer one, or is lost."""


class LeadSign(Struct, frozen=True):
    mark: str = ""
    """Of one start of the lead."""
    n: int = 0


class HostSign(Struct, frozen=True, kw_only=True):
    n: int = 0
    t: float = 0.0
    """By the host's clock."""
    pid: int = 0
    ranks: tuple[int, ...] = ()
    """That live."""
    heard: LeadSign = LeadSign()
    """The newest that was seen."""


def give_sign(path: Path, beat: Struct | dict[str, Any]) -> None:
    try:
        write_atomic(path, msgspec.json.encode(beat), lasting=False)
    except OSError:
        with suppress(OSError):  # nothing can be told here: who looks counts the silence
            os.utime(path)


class SignWatch:
    """For how long another one has given no sign."""

    def __init__(self, path: Path, look_seconds: float = 0.0) -> None:
        self._path, self._look_seconds = path, look_seconds
        self._seen: tuple[int, bytes] | None = None
        self._changed_at = time.monotonic()
        self._due = 0.0

    @property
    def content(self) -> bytes:
        """Of the newest that was seen; empty before any."""
        return self._seen[1] if self._seen is not None else b""

    def quiet_seconds(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._look_seconds
            with suppress(OSError), self._path.open("rb") as file:
                sign = (os.fstat(file.fileno()).st_mtime_ns, file.read())
                if sign != self._seen:
                    self._seen, self._changed_at = sign, now
        return now - self._changed_at


def lead_sign(content: bytes) -> LeadSign:
    """As it was given; one that says nothing where it is none."""
    try:
        return decode_json(content, LeadSign)
    except msgspec.MsgspecError:
        return LeadSign()


class LeadBeat:
    """A sign of life for the hosts, and a mark by which one knows this folder."""

    def __init__(self, run: RunDir, wall: Callable[[], float] = time.time) -> None:
        self._path: Path = lead_beat_path(run)
        self.mark = random_hex(16)
        self._wall = wall
        self._due = 0.0
        self._number = 0
        self._given: deque[tuple[LeadSign, float]] = deque(maxlen=_SIGNS_KNOWN)
        """With the time before which each cannot have been seen."""

    def turn(self) -> None:
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + BEAT_SECONDS
        self._number += 1
        sign = LeadSign(self.mark, self._number)
        self._given.append((sign, self._wall()))
        give_sign(self._path, sign)

    def given_at(self, sign: LeadSign) -> float | None:
        """By the clock here; None for one that is too old, or another start's."""
        return next((at for given, at in self._given if given == sign), None)


class SignClock:
    """How far a host's clock is ahead, by the signs of both sides."""

    def __init__(self, lead: LeadBeat, wall: Callable[[], float] = time.time) -> None:
        self._lead, self._wall = lead, wall
        self._seen = b""
        self._trips = RoundTrips()

    @property
    def clock(self) -> Clock | None:
        """None until a sign repeats one of the lead's."""
        return self._trips.best

    def see(self, content: bytes) -> None:
        """The host's newest sign, as it was seen just now."""
        if content == self._seen:
            return
        self._seen, now = content, self._wall()
        try:
            sign = decode_json(content, HostSign)
        except msgspec.MsgspecError:
            return
        given = self._lead.given_at(sign.heard)
        if given is not None:
            self._trips.add(given, sign.t, now)
