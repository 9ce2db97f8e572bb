"""The worker, but rank 1 gets a SIGTERM in its fifth step: `signalled_rank.py RUNDIR`."""

from __future__ import annotations

import signal
import sys

from llmtop.trainer.worker import __main__ as worker
from llmtop.trainer.worker import callbacks

SIGNALLED_STEP = 5


def signal_in_between(self: callbacks.StepReporter, step: int) -> None:
    """Between two steps, so that no rank can be done before it comes."""
    if self._rank == 1 and step == SIGNALLED_STEP:
        signal.raise_signal(signal.SIGTERM)


if __name__ == "__main__":
    callbacks.StepReporter.after_step = signal_in_between  # type: ignore[method-assign]
    worker.main(sys.argv[1:])
