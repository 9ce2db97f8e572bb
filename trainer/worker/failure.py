"""What the exception that ended a rank becomes in its log and in its exit code."""

from __future__ import annotations

import traceback

from llmtop.presets.errors import ExitCode, LlmtopError
from llmtop.profiler.oom.failure import innermost, is_out_of_memory


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
