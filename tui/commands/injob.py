"""A command that waits for a run inside a batch job: what ends the job ends the run first."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.tui.commandline.telling import tell

_JOB = "SLURM_JOB_ID"


@contextmanager
def ending_with_its_job(run: RunDir, environment: Mapping[str, str] = os.environ) -> Iterator[None]:
    """On SIGTERM the run saves and is stopped, and this command waits on.

    Slurm kills all of a job at the end of its script, this command's: elsewhere a run goes on without it.
    """
    if not environment.get(_JOB):
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        tell("the job is to end: the run is stopped")
        try:
            # What a script trains only the script can save.
            control.stop(run, save=run.spec().script is None)
        except LlmtopError as error:
            # It may have ended a moment ago: how it did is still to be told.
            tell(f"warning: {error}")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
