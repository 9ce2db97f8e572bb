"""What a zygote's rank calls in place of the worker, in tests."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path


def hang(arguments: list[str]) -> None:
    """Start a process that the rank must not leave behind, and wait for ever."""
    left = subprocess.Popen(["sleep", "600"], start_new_session=False)
    (Path(arguments[0]) / "left.pid").write_text(str(left.pid))
    while True:
        signal.pause()


def crash(arguments: list[str]) -> None:
    raise RuntimeError(f"no training in {arguments[0]}")


def build(arguments: list[str]) -> None:
    raise RuntimeError("the compiler is missing")
