"""Keeps a second supervisor away from a run."""

from __future__ import annotations

from contextlib import AbstractContextManager

from llmtop.presets.errors import UsageError
from llmtop.profiler.record.holding import hold
from llmtop.profiler.record.rundir import RunDir


def only_supervisor(run: RunDir) -> AbstractContextManager[None]:
    """Hold the run's folder for as long as this process lives; refused where another one holds it."""
    return hold(
        run.path,
        lambda: UsageError(
            f"run {run.run_id} already has a supervisor",
            why=f"another process holds {run.path}",
            fix=f"llmtop attach {run.run_id} watches it",
        ),
    )
