"""The worker, but deaf: no signal asks it to leave, and a child in a session of its own is deaf as well.

`deaf_rank.py RUNDIR`
"""

from __future__ import annotations

import signal
import subprocess
import sys

from llmtop.trainer.worker import __main__ as worker
from llmtop.trainer.worker.stopping import StopRequest

CHILD_SECONDS = 600


class DeafRequest(StopRequest):
    def listen(self) -> None:
        """Ignored signals stay so in what is started."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    DeafRequest().listen()
    sleeps = f"import time; time.sleep({CHILD_SECONDS})"
    subprocess.Popen([sys.executable, "-c", sleeps], start_new_session=True)
    worker.StopRequest = DeafRequest  # type: ignore[attr-defined]
    worker.main(sys.argv[1:])
