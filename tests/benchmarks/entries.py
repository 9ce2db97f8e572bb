"""What a zygote's rank calls in place of the worker, in tests."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer.stacks import listen_for_stacks


def hang(arguments: list[str]) -> None:
    """Start a process that the rank must not leave behind, and wait for ever."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=False)
    (Path(arguments[0]) / "left.pid").write_text(str(left.pid))
    while True:
        signal.pause()


def hang_where_it_can_be_asked(arguments: list[str]) -> None:
    """As the worker does, listen for the wish to know where it stands; then wait for ever."""
    listen_for_stacks(RunDir.open(Path(arguments[0])), int(os.environ["RANK"]))
    while True:
        signal.pause()


def crash(arguments: list[str]) -> None:
    raise RuntimeError(f"no training in {arguments[0]}")


def build(arguments: list[str]) -> None:
    raise RuntimeError("the compiler is missing")
