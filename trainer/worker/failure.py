"""Turns the exception that ended a rank into its last event and its exit code."""

from __future__ import annotations

import traceback

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.profiler.record.events import RankFailed

# Torch raises its own class on CUDA; on the host the allocator raises a plain RuntimeError.
_OUT_OF_MEMORY_WORDS = (
    "cuda out of memory",
    "defaultcpuallocator",
    "cannot allocate memory",
    "out of memory",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether device or host memory ran out, judged without importing torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    text = str(error).lower()
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in _OUT_OF_MEMORY_WORDS)


def failure_event(error: BaseException, *, stage: str | None, step: int | None) -> RankFailed:
    """The event for an error; a mistake in the user's files needs no traceback to be understood."""
    by_user = isinstance(error, LlmtopError)
    return RankFailed(
        error_type=type(error).__name__,
        message=str(error) or type(error).__name__,
        out_of_memory=is_out_of_memory(error),
        stage=stage,
        step=step,
        traceback="" if by_user else "".join(traceback.format_exception(error)),
    )


def exit_code(error: BaseException) -> int:
    """Never 0: a rank that failed must not look finished to its supervisor."""
    if is_out_of_memory(error):
        return ExitCode.OUT_OF_MEMORY
    if isinstance(error, LlmtopError):
        return error.exit_code
    return ExitCode.BUG
