"""Why a command of the user's own takes no change from outside, and what to do instead."""

from __future__ import annotations

import shlex

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.hosts import read_hosts
from llmtop.profiler.record.rundir import RunDir

UNCHANGEABLE = "the run is a command of your own: llmtop watches it and does not change it"


def again(run: RunDir, command: tuple[str, ...], *, looked_at: bool) -> str:
    """The command line that starts it again; `looked_at`: llmtop did not start it."""
    words = shlex.join(command)
    if looked_at:
        return words
    return f"llmtop run {'--hostfile FILE ' if read_hosts(run) is not None else ''}-- {words}"


def require_changeable(run: RunDir) -> None:
    """Raise UsageError for a run whose options are its script's own."""
    script = run.spec().script
    if script is None:
        return
    start = again(run, script.command, looked_at=script.pid is not None)
    raise UsageError(
        f"run {run.run_id} cannot be changed",
        why=UNCHANGEABLE,
        fix=f"end it, change the script's own settings, and start it again: {start}",
    )
