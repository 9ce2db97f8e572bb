"""Turns the exception that ended a rank into its last event."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Protocol

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.oom.message import read_shortage
from llmtop.profiler.record.events import RankFailed

# Torch raises its own class on CUDA; on the host the allocator raises a plain RuntimeError.
_OUT_OF_MEMORY_WORDS = (
    "cuda out of memory",
    "defaultcpuallocator",
    "cannot allocate memory",
    "out of memory",
)


class Where(Protocol):
    """Where a rank is: `StageLog`."""

    current: str | None
    step: int | None
    micro_batch: int | None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out, judged without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in _OUT_OF_MEMORY_WORDS)


def failure_event(error: BaseException, stages: Where) -> RankFailed:
    """The event for an error; a mistake in the user's files needs no traceback to be understood."""
    by_user = isinstance(error, LlmtopError)
    out_of_memory = is_out_of_memory(error)
    message = str(error) or type(error).__name__
    return RankFailed(
        error_type=type(error).__name__,
        message=message,
        out_of_memory=out_of_memory,
        stage=stages.current,
        step=stages.step,
        micro_batch=stages.micro_batch,
        where="" if by_user else innermost(error),
        traceback="" if by_user else "".join(traceback.format_exception(error)),
        shortage=read_shortage(message) if out_of_memory else None,
    )


def innermost(error: BaseException) -> str:
    """File, line and function that raised it; empty for an error that nobody raised."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f"{'/'.join(Path(frame.filename).parts[-2:])}:{frame.lineno} in {frame.name}"
