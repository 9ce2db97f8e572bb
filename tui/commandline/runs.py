"""The run that a command's argument names: one of this machine, or `[USER@]HOST:RUN` of another."""

from __future__ import annotations

import atexit

from llmtop.profiler.record import rundir
from llmtop.profiler.record.rundir import RunDir


def find_run(ref: str) -> RunDir:
    """A run on another machine is followed over SSH until this process ends. Raises as `rundir.find_run`."""
    if ":" not in ref:
        return rundir.find_run(rundir.runs_root(), ref)
    # Most runs are of this machine.
    from llmtop.trainer.hosts.following import Following, remote_name

    named = remote_name(ref)
    if named is None:
        return rundir.find_run(rundir.runs_root(), ref)
    following = Following(*named)
    atexit.register(following.close)
    return following.run
