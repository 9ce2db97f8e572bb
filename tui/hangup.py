"""Leaves when the terminal is gone, whoever has kept its signal from us.

The kernel sends SIGHUP to the processes whose controlling terminal goes away. A program that was started in a
session without one is told nothing, and its reads end at once for ever.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading


def leave_with_the_terminal() -> None:
    """From now on the end of the terminal on stdin ends this process as SIGHUP does."""
    if sys.stdin is not None and sys.stdin.isatty():
        threading.Thread(target=_wait, args=(sys.stdin.fileno(),), name="terminal", daemon=True).start()


def _wait(descriptor: int) -> None:
    """Sleeps until the other side of the terminal has been closed."""
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is told whatever one asks for
    while not any(happened & (select.POLLHUP | select.POLLNVAL) for _, happened in poll.poll()):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        # As `nohup` has it: that keeps a program from its terminal's end, but the app is nothing without one.
        os._exit(128 + signal.SIGHUP)
