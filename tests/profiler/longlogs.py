"""Logs of several short files, for tests."""

from __future__ import annotations

from pathlib import Path

from msgspec.structs import replace

from benchmarks.ui_runs import BEGAN, step_event
from llmtop.profiler.record.eventbase import EVENT_VERSION
from llmtop.profiler.record.eventlog import EventWriter
from llmtop.profiler.record.events import (
    AnyEvent,
    StepFinished,
)

SEGMENT = 4096


def steps(first: int, count: int, rank: int = 0) -> list[StepFinished]:
    return [step_event(step, rank, BEGAN + step, 1.0) for step in range(first, first + count)]


def write(path: Path, events: list[AnyEvent], src: str = "rank0") -> None:
    with EventWriter(path, src, segment_bytes=SEGMENT) as writer:
        for event in events:
            writer.append(replace(event, v=EVENT_VERSION, src=src))
