"""A log that has no room: wherever the disk cuts what is written, each event is there once, in its order."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import StepFinished
from llmtop.profiler.record.patientlog import PatientWriter


class Room:
    """What a disk takes: `os.write` up to a number of bytes, then no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._write = os.write
        self.left: int | None = None
        monkeypatch.setattr(os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.left is None:
            return self._write(descriptor, data)
        if self.left == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = self._write(descriptor, data[: self.left])
        self.left -= taken
        return taken


def test_each_event_is_there_once_wherever_the_room_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(monkeypatch)
    for left in range(250):
        path = tmp_path / str(left) / "rank-0.jsonl"
        path.parent.mkdir()
        with PatientWriter(path, "rank0") as log:
            log.write(StepFinished(step=1))
            room.left = left
            log.write(StepFinished(step=2))
            log.write(StepFinished(step=3))
            room.left = None
            log.write(StepFinished(step=4))
        steps = [event.step for event in EventTail(path).poll() if isinstance(event, StepFinished)]
        assert steps == [1, 2, 3, 4], left
