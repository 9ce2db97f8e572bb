"""Starts a command of the user's own under a supervisor."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from llmtop.presets.errors import UsageError
from llmtop.presets.resolve import Machine
from llmtop.presets.spec import RunSpec
from llmtop.profiler.hardware.machine import detect_machine
from llmtop.profiler.record.hosts import Hosts
from llmtop.profiler.record.processidentity import process_identity
from llmtop.profiler.record.rundir import RunDir, runs_root
from llmtop.trainer.launch import start_supervisor
from llmtop.trainer.script.job import command_line
from llmtop.trainer.script.unseen import unseen_prediction, unseen_spec

DRIVER_SECONDS = 5.0
"""That a launch waits for the driver of the GPUs to open: the command needs no answer of it, and the
supervisor goes on asking and tells which GPUs there are once it answers."""


def start_script(command: tuple[str, ...], *, root: Path | None = None) -> RunDir:
    """Launch `command` in this folder and return at once; its supervisor and its run's folder stay.

    Raises UsageError for a program that is not there, JobFailedError when the supervisor does not start.
    """
    _check(command)
    return _begun(unseen_spec(command, Path.cwd(), _machine()), root)


def start_script_over(
    command: tuple[str, ...],
    hosts: Hosts,
    variables: Mapping[str, str],
    *,
    gpu: str = "auto",
    root: Path | None = None,
) -> RunDir:
    """The same on hosts, each of which starts its part in a folder of this one's name.

    `gpu` is the preset of what they have; by default what this machine has. Raises UsageError too for a
    command that cannot be one job there.
    """
    from llmtop.trainer.hosts.scriptcommand import check_over_hosts
    from llmtop.trainer.hosts.start import start_over_hosts

    _check(command)
    check_over_hosts(command, hosts)
    # A shell that ssh starts may not find it.
    found = shutil.which(command[0]) or command[0]
    spec = unseen_spec((found, *command[1:]), Path.cwd(), _machine(), hosts=hosts, gpu=gpu)
    run = RunDir.create(root or runs_root(), spec, unseen_prediction(), {})
    start_over_hosts(run, hosts, variables)
    return run


def observe(pid: int, *, root: Path | None = None) -> RunDir:
    """Look at a process that runs already, and at all below it: hardware, memory, stacks.

    Nothing is done to it. Raises UsageError where there is none, JobFailedError when the supervisor does not
    start.
    """
    command = command_line(pid)
    if process_identity(pid) is None or not command:
        raise UsageError(f"there is no process {pid}", fix="see ps -ef | grep python for its number")
    spec = unseen_spec(command, Path.cwd(), _machine())
    assert spec.script is not None
    return _begun(replace(spec, script=replace(spec.script, pid=pid)), root)


def _machine() -> Machine:
    return detect_machine(open_seconds=DRIVER_SECONDS)


def _begun(spec: RunSpec, root: Path | None) -> RunDir:
    run = RunDir.create(root or runs_root(), spec, unseen_prediction(), {})
    start_supervisor(run)
    return run


def _check(command: tuple[str, ...]) -> None:
    if not command:
        raise UsageError(
            "no command follows '--'", fix="for example: llmtop run -- deepspeed train.py --epochs 1"
        )
    program = command[0]
    if shutil.which(program) is not None:
        return
    path = Path(program)
    if path.is_file() and not os.access(path, os.X_OK):
        fix = f"llmtop run -- python {program}" if path.suffix == ".py" else f"chmod +x {program}"
        raise UsageError(f"{program} is not a program", why="the file is not executable", fix=fix)
    raise UsageError(
        f"there is no program '{program}'",
        why="it is neither a file nor on PATH",
        fix="activate the environment that has it, or give its path",
    )
