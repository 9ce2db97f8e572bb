"""A supervised run that a benchmark does something to while it trains."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cells import Planned
from llmtop.presets.errors import JobFailedError
from llmtop.profiler.record.feed import read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.trainer import control
from llmtop.trainer.launch import start_run
from llmtop.trainer.stacks import take_stacks


@contextmanager
def live_run(planned: Planned, name: str, patience_seconds: float) -> Iterator[RunDir]:
    """Train in a folder of its own until the block ends; stopped then, without saving, and removed."""
    root = Path(tempfile.mkdtemp(prefix=f"llmtop-{name}-"))
    # A time-out's signal ends the run as an error does, not this script alone.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run = start_run(planned.spec, planned.prediction, root=root)
        try:
            yield run
        finally:
            if run.supervisor_alive():
                control.stop(run, save=False)
                control.wait_for_end(run, patience_seconds)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def wait_for_steps(run: RunDir, more: int, patience_seconds: float) -> None:
    """Raises JobFailedError where the run ends before, or stands still that long: where is printed."""
    wanted = read_state(run).steps_finished + more
    deadline = time.monotonic() + patience_seconds
    while (state := read_state(run)).steps_finished < wanted:
        if not run.supervisor_alive() or state.ended is not None:
            raise JobFailedError(
                "the run made no more steps", why=state.ended.reason if state.ended else "its supervisor died"
            )
        if time.monotonic() > deadline:
            print(take_stacks(run, state).text, flush=True)
            raise JobFailedError(
                f"the run made no step for {patience_seconds:g} s", why="where it stands is told above"
            )
        time.sleep(0.2)
