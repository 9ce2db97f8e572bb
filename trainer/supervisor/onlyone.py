"""Keeps a second supervisor away from a run."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.rundir import RunDir


@contextmanager
def only_supervisor(run: RunDir) -> Iterator[None]:
    """Hold the run's folder for as long as this process lives; refused where another one holds it."""
    folder = os.open(run.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"run {run.run_id} already has a supervisor",
                why=f"another process holds {run.path}",
                fix=f"llmtop attach {run.run_id} watches it",
            ) from None
        yield
    finally:
        os.close(folder)
