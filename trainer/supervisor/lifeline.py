"""The first event of every supervisor, and the last one of a supervisor that fails itself."""

from __future__ import annotations

import os
import socket

from llmtop.presets.errors import LlmtopError
from llmtop.presets.version import llmtop_version
from llmtop.profiler.record.events import RunEnded, RunStarted
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import SUPERVISOR, RunDir
from llmtop.trainer.change.restagefolder import restage_folders
from llmtop.trainer.statefile import newest_in


def run_started(run: RunDir, name: str, world_size: int) -> RunStarted:
    """Of this process."""
    return RunStarted(
        run_id=run.run_id,
        name=name,
        pid=os.getpid(),
        host=socket.gethostname(),
        world_size=world_size,
        llmtop_version=llmtop_version(),
        goes_on_after=_goes_on_after(run),
    )


def _goes_on_after(run: RunDir) -> int | None:
    """The step of the newest state, where the ranks look too; those of hosts have their own folders."""
    if read_hosts(run) is not None:
        return None
    saved = newest_in((run.checkpoints_dir, *restage_folders(run)))
    return 0 if saved is None else saved[0].step


def supervisor_failed(run: RunDir, error: BaseException) -> RunEnded:
    """The run is over because of the supervisor, by a mistake that it can name or by a bug."""
    if isinstance(error, LlmtopError):
        return RunEnded(state="failed", reason=error.in_one_line, fix=error.fix)
    return RunEnded(
        state="failed",
        reason=f"the supervisor failed: {type(error).__name__}: {error}",
        fix=f"this is a bug of llmtop; {run.log_path(SUPERVISOR)} shows where",
    )
