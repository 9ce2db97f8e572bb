"""The run that a command's argument names: one of this machine, or `[USER@]HOST:RUN` of another."""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import TYPE_CHECKING

from llmtop.presets.errors import UsageError
from llmtop.profiler.record import rundir
from llmtop.profiler.record.remote import command_there
from llmtop.profiler.record.rundir import RunDir

if TYPE_CHECKING:
    from llmtop.trainer.hosts.following import Following
    from llmtop.trainer.hosts.selection import Wanted

_followed: dict[Path, Following] = {}
"""Folders here that are kept like one on another machine, until this process ends."""


def find_run(ref: str, wanted: Wanted = "whole") -> RunDir:
    """A run on another machine is followed over SSH until this process ends. Raises as `rundir.find_run`.

    `wanted` says how much of such a run comes here.
    """
    if ":" not in ref:
        return rundir.find_run(rundir.runs_root(), ref)
    # Most runs are of this machine.
    from llmtop.trainer.hosts.following import Following, remote_name
    from llmtop.tui.commandline.telling import tell

    named = remote_name(ref)
    if named is None:
        return rundir.find_run(rundir.runs_root(), ref)
    following = Following(*named, wanted, tell)
    atexit.register(following.close)
    _followed[following.run.path] = following
    return following.run


def following_of(run: RunDir) -> Following | None:
    """What keeps a run's folder like that of another machine; None for a run of this one."""
    return _followed.get(run.path)


def find_run_here(ref: str, command: str) -> RunDir:
    """A run of this machine. Raises UsageError for one of another: `command` has to be called there."""
    refuse_run_elsewhere(ref, command)
    return rundir.find_run(rundir.runs_root(), ref)


def refuse_run_elsewhere(ref: str, command: str) -> None:
    if ":" not in ref:
        return
    from llmtop.trainer.hosts.following import remote_name

    named = remote_name(ref)
    if named is not None:
        host, run = named
        run = run or "RUN"
        raise UsageError(
            f"llmtop {command} takes no run of another machine",
            why=f"it works on the run's folder, checkpoints or processes, which are on {host}",
            fix=f"call it there: {command_there(run, host, command)}",
        )
