"""Signs of life in a folder: a small document that its writer replaces again and again.

Whoever gives one lives, also where the disk is full: there the old one is given a new time, which takes
no room. Only changes count for who looks: clocks may differ.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from llmtop.profiler.record.wholefile import write_atomic


def give_sign(path: Path, beat: dict[str, Any]) -> None:
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

    def quiet_seconds(self) -> float:
        now = time.monotonic()
        if now >= self._due:
            self._due = now + self._look_seconds
            with suppress(OSError), self._path.open("rb") as file:
                sign = (os.fstat(file.fileno()).st_mtime_ns, file.read())
                if sign != self._seen:
                    self._seen, self._changed_at = sign, now
        return now - self._changed_at
