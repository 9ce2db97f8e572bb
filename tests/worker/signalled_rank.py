"""The worker, but rank 1 gets a SIGTERM in its fifth step: `signalled_rank.py RUNDIR`."""

from __future__ import annotations

import signal
import sys

from llmtop.trainer.worker import __main__ as worker
from llmtop.trainer.worker import callbacks

SIGNALLED_STEP = 5


class SignalledReporter(callbacks.StepReporter):
    """Raises the signal between two steps, so that no rank can be done before it comes."""

    def after_step(self, step: int) -> None:
        if self._rank == 1 and step == SIGNALLED_STEP:
            signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    # Before the worker imports what uses it.
    callbacks.StepReporter = SignalledReporter  # type: ignore[misc]
    worker.main(sys.argv[1:])
