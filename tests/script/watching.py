"""Runs a script under llmtop and waits for its end."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.eventlog import EventTail
from llmtop.profiler.record.events import RunEnded
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.control import wait_for_end
from llmtop.trainer.script.start import start_script
from llmtop.trainer.supervisor.rankenv import free_port

SCRIPTS = Path(__file__).with_name("scripts")
SECONDS = 240.0
_Kind = TypeVar("_Kind")


def python(script: str, *words: str) -> tuple[str, ...]:
    return (sys.executable, str(SCRIPTS / script), *words)


def torchrun(ranks: int, script: str, *words: str) -> tuple[str, ...]:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks))
    return (*launcher, "--master-port", str(free_port()), str(SCRIPTS / script), *words)


def watched(root: Path, command: tuple[str, ...]) -> tuple[RunDir, RunEnded, RunState]:
    run = start_script(command, root=root)
    try:
        end = wait_for_end(run, SECONDS)
        assert end is not None, output(run)
    finally:
        leave_nothing(run)
    return run, end, read_state(run)


def leave_nothing(run: RunDir) -> None:
    """A second signal ends the command at once."""
    identity = run.supervisor_identity()
    while identity is not None and run.supervisor_alive():
        with suppress(ProcessLookupError):  # it may have ended by now
            os.kill(identity.pid, signal.SIGTERM)
        wait_for_end(run, 1.0)


def output(run: RunDir) -> str:
    """What the command has written so far."""
    path = run.log_path(0)
    return path.read_text(errors="replace") if path.exists() else ""


def of(run: RunDir, src: str | int, kind: type[_Kind]) -> list[_Kind]:
    return [event for event in EventTail(run.events_path(src)).poll() if isinstance(event, kind)]
