"""The first event of every supervisor, and the last one of a supervisor that fails itself."""

from __future__ import annotations

import os
import socket

from llmtop.presets.errors import LlmtopError
from llmtop.presets.version import llmtop_version
from llmtop.profiler.record.events import RunEnded, RunStarted
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir


def run_started(run: RunDir, name: str, world_size: int) -> RunStarted:
    """Of this process."""
    return RunStarted(
        run_id=run.run_id,
        name=name,
        pid=os.getpid(),
        host=socket.gethostname(),
        world_size=world_size,
        llmtop_version=llmtop_version(),
    )


def supervisor_failed(run: RunDir, error: BaseException) -> RunEnded:
    """The run is over because of the supervisor, by a mistake that it can name or by a bug."""
    if isinstance(error, LlmtopError):
        return RunEnded(state="failed", reason=error.in_one_line, fix=error.fix)
    return RunEnded(
        state="failed",
        reason=f"the supervisor failed: {type(error).__name__}: {error}",
        fix=f"this is a bug of llmtop; {run.log_path(SUPERVISOR)} shows where",
    )
