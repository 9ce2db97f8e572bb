"""Whether a run that has ended goes on: by its files, without reading its record."""

from __future__ import annotations

import os
from pathlib import Path

from llmtop.profiler.record.rundir import RunDir


class LeftRun:
    """A run's folder as it was when the run was read."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        self._supervisor = _written(run.supervisor_pid_path)
        self._bytes = _log_bytes(run.path)

    def goes_on(self) -> bool:
        """Whether its logs have grown since, or somebody else supervises it."""
        now = _log_bytes(self._run.path)
        if now > self._bytes or _written(self._run.supervisor_pid_path) != self._supervisor:
            return True
        # Of a log whose oldest part was thinned the next line counts from there.
        self._bytes = now
        return False


def _written(path: Path) -> tuple[int, int] | None:
    """Changes when the file is replaced; None where it is not there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


def _log_bytes(folder: Path) -> int:
    """Of all event logs in a run's folder, and of those that hosts have in theirs."""
    try:
        with os.scandir(folder) as entries:
            logs = [entry for entry in entries if entry.name.endswith(".jsonl")]
            total = sum(entry.stat().st_size for entry in logs)
    except OSError:
        return 0  # it goes while we look
    return total + sum(_log_bytes(host) for host in _hosts(folder))


def _hosts(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder / "hosts") as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []
