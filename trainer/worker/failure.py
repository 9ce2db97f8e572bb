"""Turns the exception that ended a rank into its last event and its exit code."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Protocol

from llmtop.presets.errors import ExitCode, LlmtopError
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


def words_for_the_log(error: BaseException, run_id: str) -> str:
    """What a rank's log ends with: a person's mistake in words, memory that ran out in few, anything else
    with its traceback."""
    if isinstance(error, LlmtopError):
        return f"{error}\n"
    if is_out_of_memory(error):
        # Where it happened says little of what to do; the event has the traceback for who wants it.
        return (
            f"out of memory at {innermost(error)}: {error}\n"
            f"llmtop report {run_id} says which allocation it was and what would fit\n"
        )
    return "".join(traceback.format_exception(error))


def exit_code(error: BaseException) -> int:
    """Never 0: a rank that failed must not look finished to its supervisor."""
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    if isinstance(error, LlmtopError):
        return error.exit_code
    return ExitCode.BUG
